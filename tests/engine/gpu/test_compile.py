"""Every kernel compiles to a real GPU's machine code and fits it: nothing more can be said of them without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_BYTES_MAX = 227 << 10  # of a Hopper multiprocessor, per block


def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """In bfloat16, for the head sizes of large and odd models, with Triton's own assembler."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.engine.gpu.compiled", "90"],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    names = {"_attend", "_merge", "_add_norm", "_gate", "_rotate_write", "_draw", "_product"}
    assert {one["kernel"] for one in found} == names
    assert all(one["size_bytes"] > 0 and one["shared_bytes"] <= SHARED_BYTES_MAX for one in found)
