"""Three ways to run a step on a loaded model, one module each: torch, native kernels, Triton.

Imports models, kernels and values of `sequence`; no scheduler and no engine. Read `native` first.
"""
