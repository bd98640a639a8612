"""Compiled kernels for CPUs (C++) and GPUs (Triton), with torch's equivalents.

Knows tensors and pointers; imports nothing of the package but `config`. Read `supports` first.
"""
