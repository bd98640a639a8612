"""A judge's error by another one."""

from __future__ import annotations

from gateway.telemetry.judge_error import RulingCounts, false_different, false_same


def test_error_rates_are_shares_of_what_the_other_judge_calls_so() -> None:
    """Nine of ten equal answers found, one of four different ones missed; without pairs nothing is known."""
    counts = RulingCounts(same_same=9, same_different=1, different_same=1, different_different=3)
    assert (counts.pairs, counts.agreed) == (14, 12)
    same, different = false_same(counts), false_different(counts)
    assert (same.estimate, different.estimate) == (0.25, 0.1)
    assert 0 < same.low < 0.25 < same.high < 1
    nothing = false_same(RulingCounts())
    assert (nothing.estimate, nothing.low, nothing.high) == (None, 0.0, 1.0)
