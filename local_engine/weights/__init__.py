"""Matrices: how they are read, held and multiplied.

Imports kernels and `config`; no model and no file. Read `linear` first.
"""
