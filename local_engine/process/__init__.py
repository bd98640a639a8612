"""An engine in a separate process, behind a unix socket: the worker, and its client.

Imports no torch before the worker's thread loads the engine. Read `worker` first.
"""

from __future__ import annotations

import os


def prepare_environment() -> None:
    """Set the variables that torch reads when it is loaded.

    Idle threads must sleep: on shared cores, spinning threads make torch 20 times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
