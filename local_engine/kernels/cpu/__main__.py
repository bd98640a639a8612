"""`python -m local_engine.kernels.cpu`: compile the kernels for this machine, if possible."""

from local_engine.kernels.cpu import compile_kernels

print(compile_kernels())
