"""`python -m local_engine.kernels.cpu`: compile the kernels for this machine, where that can be
done."""

from local_engine.kernels.cpu import compile_kernels

print(compile_kernels())
