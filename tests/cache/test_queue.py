"""How many of those who wait in the worker make a batch, and when other work has its turn."""

from __future__ import annotations

import asyncio
import time

from hypothesis import given
from hypothesis import strategies as st

from cache.worker.queue import SpareTime, fitting


@given(st.lists(st.integers(0, 50), min_size=1, max_size=30), st.integers(1, 10), st.integers(0, 120))
def test_a_batch_is_as_large_as_fits(lengths: list[int], count_max: int, chars_max: int) -> None:
    """One at least, whatever its length; else no more texts and characters than allowed, and the next one would be too much."""
    count = fitting(lengths, count_max, chars_max)
    assert 1 <= count <= count_max
    assert count == 1 or sum(lengths[:count]) <= chars_max
    assert count in (len(lengths), count_max) or sum(lengths[: count + 1]) > chars_max


async def test_other_work_has_a_third_of_the_time_while_lookups_are_about() -> None:
    """However many pieces wait, they take no more than a third of the time where a lookup came lately, and all of it where none did."""

    async def worked(seconds: float, spare: SpareTime, *, has_lookups: bool) -> float:
        """The share of the time that pieces took."""
        busy, begun = 0.0, time.monotonic()

        async def piece() -> None:
            nonlocal busy
            began = time.monotonic()
            await asyncio.sleep(0.02)
            busy += time.monotonic() - began

        async def pieces() -> None:
            while time.monotonic() - begun < seconds:
                await spare.do(piece)

        callers = [asyncio.create_task(pieces()) for _ in range(3)]
        while time.monotonic() - begun < seconds:
            if has_lookups:
                spare.lookup()
                spare.has_no_lookup.set()
            await asyncio.sleep(0.005)
        await asyncio.gather(*callers)
        return busy / (time.monotonic() - begun)

    spare = SpareTime()
    assert await worked(0.4, spare, has_lookups=False) > 0.7
    assert await worked(0.8, spare, has_lookups=True) < 0.45
