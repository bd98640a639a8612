"""The demo, as `./run demo` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(400)
def test_the_demo_shows_all_its_steps() -> None:
    """Each of its checks passes, from the first start to the restart with what was kept."""
    done = subprocess.run([sys.executable, "deploy/demo.py"], cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
