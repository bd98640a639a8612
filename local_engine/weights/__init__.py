"""Reads, stores and multiplies matrices.

Imports kernels and `config`; no model and no file. Read `linear` first.
"""
