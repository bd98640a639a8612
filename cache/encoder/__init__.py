"""Texts to unit vectors, on a CPU or a GPU.

Knows no cache and imports no other room. OpenVINO and torch are imported when a model is opened.
Read `embedder.py` first.
"""
