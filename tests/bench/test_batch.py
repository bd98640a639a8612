"""The bench of batches, short."""

from __future__ import annotations

from bench.batch import main


def test_a_batch_through_a_kill_of_everything() -> None:
    """120 lines, every process killed once in the middle: each line once, exact books; a file of 80 MB leaves memory flat."""
    assert main(["--lines", "120", "--kills", "1", "--mb", "80"]) == 0
