"""How many of those who wait in the worker make a batch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cache.worker.queue import fitting


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 10), st.integers(0, 120))
def test_a_batch_is_as_large_as_fits(lengths: list[int], count_max: int, chars_max: int) -> None:
    """One at least, whatever its length; else no more texts and characters than allowed, and the next one would be too much."""
    count = fitting(lengths, count_max, chars_max)
    assert 1 <= count <= count_max
    assert count == 1 or sum(lengths[:count]) <= chars_max
    assert count in (len(lengths), count_max) or sum(lengths[: count + 1]) > chars_max
