"""`python -m local_engine.native`: compile the kernels for this machine, where that can be done."""

from local_engine.native import compile_kernels

print(compile_kernels())
