"""Compiled arithmetic for CPUs (C++) and GPUs (Triton), beside torch's form of the same.

Knows tensors and pointers; imports nothing of the package but `config`. Read `supports` first.
"""
