"""One configurable decoder for every supported family, its MLPs and rotary tables.

Imports weights, kernels and `attention`; no checkpoint and no sequence. Read `decoder` first.
"""
