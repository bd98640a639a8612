"""An engine in a process of its own, behind a unix socket: the worker, and a client of it.

Imports no torch before the worker's thread loads the engine. Read `worker` first.
"""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Before torch is loaded: idle threads must sleep. Spinning ones cost 20 times the speed where
    cores are shared."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
