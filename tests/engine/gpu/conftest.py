"""Fixtures of the GPU's kernels: Triton runs them in numpy here, which must be said before it is first imported."""

from __future__ import annotations

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
