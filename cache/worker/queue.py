"""How many of the texts that wait in the cache worker go together, and when work that is no lookup's
has its turn.

Knows no messages, no cache and no encoder.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

EMBED_TEXTS, EMBED_CHARS = 8, 500
"""Of a piece of work that is no lookup's: one pass of the encoder, for which a lookup may have to wait."""
_SPARE_S = 0.25
_LOOKUPS_ABOUT_S = 1.0

T = TypeVar("T")


class SpareTime:
    """Gives turns to work that is no lookup's: one piece at a time, when no lookup is under way or
    the piece has waited long enough. So a lookup waits for one piece at most.

    While lookups come, the work rests after each piece for twice the piece's time: it gets a third
    of the time at most.
    """

    def __init__(self) -> None:
        self.has_no_lookup = asyncio.Event()  # none waits, and none is being answered
        self.has_no_lookup.set()
        self._turn = asyncio.Lock()
        self._looked_up_at = -_LOOKUPS_ABOUT_S
        self._rests_until = 0.0

    def lookup(self) -> None:
        """Note that a lookup came. The caller sets `has_no_lookup` after its answer."""
        self.has_no_lookup.clear()
        self._looked_up_at = time.monotonic()

    async def do(self, piece: Callable[[], Awaitable[T]]) -> T:
        """Do a piece of work in its turn, and return its result."""
        async with self._turn:
            if time.monotonic() - self._looked_up_at < _LOOKUPS_ABOUT_S:
                await asyncio.sleep(self._rests_until - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_SPARE_S):
                    await self.has_no_lookup.wait()
            began = time.monotonic()
            try:
                return await piece()
            finally:
                self._rests_until = 3 * time.monotonic() - 2 * began


def fitting(lengths: Iterable[int], count_max: int, chars_max: int) -> int:
    """Return how many of these texts make one batch; at least 1."""
    sums = itertools.accumulate(itertools.islice(lengths, count_max))
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= chars_max, sums)))
