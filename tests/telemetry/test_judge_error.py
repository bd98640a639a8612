"""A judge's error by another one, and a share that it measured, corrected."""

from __future__ import annotations

import random

import pytest

from gateway.telemetry.judge_error import RulingCounts, false_different, false_same, true_share


def test_error_rates_are_shares_of_what_the_other_judge_calls_so() -> None:
    """Nine of ten equal answers found, one of four different ones missed; without pairs nothing is known."""
    counts = RulingCounts(same_same=9, same_different=1, different_same=1, different_different=3)
    assert (counts.pairs, counts.agreed) == (14, 12)
    same, different = false_same(counts), false_different(counts)
    assert (same.estimate, different.estimate) == (0.25, 0.1)
    assert 0 < same.low < 0.25 < same.high < 1
    nothing = false_same(RulingCounts())
    assert (nothing.estimate, nothing.low, nothing.high) == (None, 0.0, 1.0)


@pytest.mark.parametrize("truth", [0.0, 0.01, 0.2, 1.0])
def test_a_measured_share_is_corrected_for_the_judge(truth: float) -> None:
    """What the judge would call different at its error rates leads back to the truth; a judge without information says: all."""
    measured = truth * (1 - 0.05) + (1 - truth) * 0.03
    assert true_share(measured, 0.03, 0.05) == pytest.approx(truth)
    assert 0.0 <= true_share(random.Random(1).random(), 0.3, 0.3) <= 1.0
    assert true_share(0.5, 0.5, 0.5) == 1.0
