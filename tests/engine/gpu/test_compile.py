"""Every kernel compiles to a real GPU's machine code and fits it: nothing more can be said of them without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SHARED_BYTES_MAX = 227 << 10  # of a Hopper multiprocessor, per block
SPILLED_BYTES_MAX = 128  # of a thread


@pytest.mark.long
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """In bfloat16, for the head sizes of large and odd models, with Triton's own assembler; steps of other sizes than those
    that were compiled for need no kernel more."""
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
    counts = Counter(one["kernel"] for one in found)
    rows = {"_add_norm", "_gate", "_rotate_write", "_to_fp8"}
    assert set(counts) == {"_attend", "_merge", "_draw", "_product", "_sort", "_product_each", *rows}
    assert counts["_attend"] == 3 * 2  # decodes, other tiles in parts, other tiles whole; two models
    assert counts["_merge"] <= 2 * 2
    assert counts["_draw"] == 1
    assert counts["_product_each"] == 2 * 2  # few rows and many, gate and down
    for one in found:
        assert one["shared_bytes"] <= SHARED_BYTES_MAX, one
        assert one["spilled_bytes"] <= SPILLED_BYTES_MAX, one
