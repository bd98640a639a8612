"""Kernels in Triton, and the self-test that compares each with torch. Read `attention` first."""
