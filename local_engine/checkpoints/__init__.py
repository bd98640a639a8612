"""Models on disk, in each format that is read, as one shape: Checkpoint.

Imports `text`, `weights` and `config`; no model, no executor. Read `open` first.
"""
