"""Triton runs its kernels in numpy here, which must be said before it is first imported. There is no Triton but for Linux."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("TRITON_INTERPRET", "1")
collect_ignore_glob = [] if sys.platform == "linux" else ["test_*.py"]
