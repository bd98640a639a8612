"""Models on disk, in every supported format, behind one interface: Checkpoint.

Imports `text`, `weights` and `config`; no model, no executor. Read `open` first.
"""
