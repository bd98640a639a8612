"""The bench of batches, short."""

from __future__ import annotations

import pytest

from bench.batch import main


@pytest.mark.long
def test_a_batch_through_a_kill_of_everything() -> None:
    """120 lines, every process killed once in the middle: each line once, exact books. (Its large file: tests/e2e/test_files.py.)"""
    assert main(["--lines", "120", "--kills", "1", "--mb", "0"]) == 0
