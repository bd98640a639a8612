"""The version, and the commit that a distribution was built from."""

import functools
import subprocess
from pathlib import Path

VERSION = "0.1.0"  # pyproject.toml reads it here


@functools.cache
def build() -> str:
    """The commit: that of the wheel, else of the clone that this file lies in; else `unknown`."""
    try:  # deploy/sameway_build.py writes the file
        return Path(__file__).with_name("build.txt").read_text().strip() or "unknown"
    except OSError:
        pass
    root = Path(__file__).parents[1]
    if not (root / ".git").exists():
        return "unknown"
    argv = ["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
