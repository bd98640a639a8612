"""Prices: whole µUSD, rounded up once, never below the exact product."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import Price, Usage
from policies.prices import FREE

amounts = st.integers(0, 10**9)
counts = st.integers(0, 10**7)


@st.composite
def tokens(draw: st.DrawFn) -> Usage:
    prompt = draw(counts)
    return Usage(prompt, draw(counts), draw(st.integers(0, prompt)))


prices = st.builds(Price, amounts, amounts, st.none() | amounts, st.integers(0, 10**6))


@given(prices, tokens())
def test_cost_is_the_exact_product_rounded_up(price: Price, used: Usage) -> None:
    """The cost is the smallest whole µUSD that is not less than the exact sum."""
    cached = price.input_microusd_per_mtok
    if price.cached_input_microusd_per_mtok is not None:
        cached = price.cached_input_microusd_per_mtok
    exact = price.request_microusd + Fraction(
        (used.prompt_tokens - used.cached_tokens) * price.input_microusd_per_mtok
        + used.cached_tokens * cached
        + used.completion_tokens * price.output_microusd_per_mtok,
        1_000_000,
    )
    cost = price.cost(used)
    assert exact <= cost < exact + 1


@given(prices, tokens(), counts, counts)
def test_the_worst_case_bounds_every_smaller_use(price: Price, used: Usage, more_in: int, more_out: int) -> None:
    """No use of at most these sizes, however much of it is cached, costs more than `cost_max`."""
    assert price.cost(used) <= price.cost_max(used.prompt_tokens + more_in, used.completion_tokens + more_out)


def test_a_known_price() -> None:
    """2.50 USD in, 1.25 cached, 10 out per million tokens: 1000 prompt (400 cached) + 100 out are 3000 µUSD."""
    price = Price(2_500_000, 10_000_000, 1_250_000)
    assert price.cost(Usage(1000, 100, 400)) == 1500 + 500 + 1000


def test_free_is_free() -> None:
    """The local engine's price charges nothing."""
    assert FREE.cost(Usage(10**6, 10**6)) == 0


@pytest.mark.parametrize("wrong", [(-1, 0, 0), (0, -1, 0), (1, 0, 2), (1, 0, -1)])
def test_impossible_tokens_are_refused(wrong: tuple[int, int, int]) -> None:
    """Negative counts and more cached than prompt raise."""
    with pytest.raises(ValueError, match="tokens"):
        Price(1, 1).cost(Usage(*wrong))
