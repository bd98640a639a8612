"""Estimates: learn TTFT's line and TPOT, forget, and never say nonsense."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Estimate
from policies.estimate import EstimatePrior
from tests.policies.clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_before_the_first_call_the_prior_speaks(clock: Clock) -> None:
    """An unseen deployment is expected to behave as the prior says, and its time-out is the ceiling."""
    estimate = Estimate(clock, EstimatePrior(ttft_ms=400, prefill_ms_per_token=0.5, tpot_ms=30))
    assert estimate.figures().ttft_ms(0) == pytest.approx(400)
    assert estimate.figures().ttft_ms(1000) == pytest.approx(900)
    assert estimate.figures().tpot_ms == pytest.approx(30)
    assert estimate.ttft_timeout_ms(100, 1000, 60_000) == 60_000
    assert estimate.ttft_timeout_ms(100, 1000, 60_000, 10_000) == 10_000
    assert estimate.ttft_timeout_ms(40_000, 1000, 60_000, 10_000) == pytest.approx(
        2 * estimate.figures().ttft_ms(40_000)
    )
    assert estimate.ttft_timeout_ms(1_000_000, 1000, 60_000, 10_000) == 60_000
    assert estimate.figures().weight == 0


def test_learns_the_line_and_the_pace(clock: Clock) -> None:
    """From calls of different lengths it finds base and slope of TTFT, and TPOT, through noise."""
    estimate, noise = Estimate(clock), random.Random(1)
    for _ in range(200):
        tokens = noise.randrange(0, 8000)
        estimate.observe((150 + 0.1 * tokens) * noise.lognormvariate(0, 0.1), 8 * noise.lognormvariate(0, 0.1), tokens)
    assert estimate.figures().ttft_ms(100) == pytest.approx(160, rel=0.35)
    assert estimate.figures().ttft_ms(8000) == pytest.approx(950, rel=0.15)
    assert estimate.figures().prefill_ms_per_token == pytest.approx(0.1, rel=0.25)
    assert estimate.figures().tpot_ms == pytest.approx(8, rel=0.15)


def test_one_length_is_enough_for_that_length(clock: Clock) -> None:
    """Prompts that are all alike leave the slope to the prior, and are themselves predicted well."""
    estimate = Estimate(clock)
    for _ in range(100):
        estimate.observe(80.0, 5.0, 500)
    assert estimate.figures().ttft_ms(500) == pytest.approx(80, rel=0.3)


def test_follows_a_change(clock: Clock) -> None:
    """A deployment that became ten times slower is known to be after some tens of calls."""
    estimate = Estimate(clock)
    for _ in range(100):
        estimate.observe(100.0, 5.0, 100)
    for _ in range(60):
        estimate.observe(1000.0, 50.0, 100)
    assert estimate.figures().ttft_ms(100) > 800
    assert estimate.figures().tpot_ms > 40


def test_one_freak_call_moves_little(clock: Clock) -> None:
    """A single hundredfold outlier does not change the picture."""
    estimate = Estimate(clock)
    for _ in range(100):
        estimate.observe(100.0, 5.0, 100)
    before_ms = estimate.figures().ttft_ms(100)
    estimate.observe(10_000_000.0, 5.0, 100)
    assert estimate.figures().ttft_ms(100) < 2 * before_ms


def test_what_was_slow_long_ago_gets_another_chance(clock: Clock) -> None:
    """Without calls the estimates go back to the prior, or a slow deployment would never be measured again."""
    estimate = Estimate(clock, EstimatePrior(ttft_ms=300, prefill_ms_per_token=0.1, tpot_ms=20))
    for _ in range(50):
        estimate.observe(30_000.0, 500.0, 100)
    clock.now_s += 4 * 3600
    assert estimate.figures().ttft_ms(0) == pytest.approx(300, rel=0.05)
    assert estimate.figures().tpot_ms == pytest.approx(20, rel=0.05)
    assert estimate.ttft_timeout_ms(0, 1, 60_000) == 60_000


def test_the_time_out_is_learned_between_its_bounds(clock: Clock) -> None:
    """Wide enough for every call of a steady deployment, far below the ceiling, never under the floor."""
    estimate, noise = Estimate(clock), random.Random(2)
    seen = [200 * noise.lognormvariate(0, 0.2) for _ in range(400)]
    for ttft_ms in seen:
        estimate.observe(ttft_ms, 5.0, 300)
    wait_ms = estimate.ttft_timeout_ms(300, 50, 60_000)
    assert max(seen) < wait_ms < 3000
    assert estimate.ttft_timeout_ms(300, 5000, 60_000) == 5000
    assert estimate.ttft_timeout_ms(300, 50, 100) == 100


def test_time_outs_raise_the_prediction(clock: Clock) -> None:
    """A call given up on counts as at least what it was waited for."""
    estimate = Estimate(clock)
    for _ in range(20):
        estimate.observe(100.0, 5.0, 100)
    before_ms = estimate.figures().ttft_ms(100)
    estimate.observe_timeout(1.0, 100)
    assert estimate.figures().ttft_ms(100) == pytest.approx(before_ms, rel=0.01)
    for _ in range(10):
        estimate.observe_timeout(5000.0, 100)
    assert estimate.figures().ttft_ms(100) > 2 * before_ms


observations = st.tuples(
    st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 1e6),
    st.none() | st.floats(0, 1e5) | st.just(math.nan),
    st.integers(-1, 10**6),
)


@given(st.lists(observations, max_size=50), st.integers(0, 10**6), st.floats(0, 1e5))
def test_never_nonsense(seen: list[tuple[float, float | None, int]], tokens: int, idle_s: float) -> None:
    """Whatever it is fed, it predicts finite positive times that do not fall with the prompt's length."""
    clock = Clock()
    estimate = Estimate(clock)
    for ttft_ms, tpot_ms, prompt_tokens in seen:
        estimate.observe(ttft_ms, tpot_ms, prompt_tokens)
        clock.now_s += idle_s / 50
    assert 0 < estimate.figures().ttft_ms(tokens) < math.inf
    assert 0 <= estimate.figures().tpot_ms < math.inf
    assert estimate.figures().ttft_ms(tokens) <= estimate.figures().ttft_ms(tokens + 100) * (1 + 1e-9)
    assert 10 <= estimate.ttft_timeout_ms(tokens, 10, 1e5) <= 1e5
