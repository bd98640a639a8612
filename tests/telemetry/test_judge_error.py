"""A judge's error by another one."""

from __future__ import annotations

from gateway.telemetry.measured_error import VETO, RulingCounts, by_judge, false_different, false_same


def test_error_rates_are_shares_of_what_the_other_judge_calls_so() -> None:
    """Nine of ten equal answers found, one of four different ones missed; without pairs nothing is known."""
    counts = RulingCounts(same_same=9, same_different=1, different_same=1, different_different=3)
    assert (counts.pairs, counts.agreed) == (14, 12)
    same, different = false_same(counts), false_different(counts)
    assert (same.estimate, different.estimate) == (0.25, 0.1)
    assert 0 < same.low < 0.25 < same.high < 1
    nothing = false_same(RulingCounts())
    assert (nothing.estimate, nothing.low, nothing.high) == (None, 0.0, 1.0)


def test_a_rate_counts_by_what_is_sure_of_it_until_enough_pairs_have_come() -> None:
    """Few pairs without an error change nothing, few errors the least that they prove; many pairs count with their margin."""
    few, many = RulingCounts(same_same=20, different_different=20), RulingCounts(same_same=200, different_different=200)
    assert (few.flips, few.allowed) == ((0.0, 0.0), 0.0)
    assert many.flips == (0.0, 0.0)
    assert 0.015 < many.allowed < 0.02
    wrong = RulingCounts(same_same=20, same_different=10, different_different=20)
    assert wrong.flips == (0.0, false_same(wrong).low)
    assert wrong.allowed == false_same(wrong).low
    assert RulingCounts(same_same=5, same_different=10, different_different=90).flips == (0.0, 0.1)
    assert RulingCounts().flips == (0.0, 0.0)


def test_a_judges_rulings_beside_all_others_count_and_those_beside_a_veto_prove_nothing() -> None:
    """Over the hours of a day."""
    day = [{"prose\nmodel": RulingCounts(same_same=2)}, {"prose\nother": RulingCounts(same_different=3)}]
    found = by_judge([*day, {f"prose\n{VETO}": RulingCounts(same_different=50)}])
    assert found == {"prose": RulingCounts(same_same=2, same_different=3)}
