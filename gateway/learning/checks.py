"""Checks of semantic hits: beside some of them a fresh answer to the same request is generated, so that
the two can be compared.

Invariants: the share that is drawn depends on the number of hits alone, never on the request or the
answer, so that the checks are a sample of all hits; no client waits for a check or sees one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from gateway.journey.generation import Compared, Generation
from gateway.learning.internal_requests import BUSY, InternalRequests

_SHARES = ((3, 0.0), (300, 0.3), (1_000, 0.1))  # up to so many hits, at least such a share
_NAMESPACES_MAX = 20_000


def check_share(hits: int, share: float) -> float:
    """The share of the next hit, after `hits` of its namespace: none of the first three, 30% up to
    300, 10% up to 1,000, then `share`; never less than `share`, but of the first three. At a `share`
    of 0 nothing is checked.
    """
    least = next((of_step for most, of_step in _SHARES if hits < most), share)
    return max(least, share) if share and least else 0.0


class Checks:
    """The checks of one worker. `share` is the setting, `random` gives numbers in [0, 1)."""

    def __init__(self, share: float, requests: InternalRequests, random: Callable[[], float]) -> None:
        self.share = share
        self._requests = requests
        self.random = random
        self._hits: OrderedDict[bytes, int] = OrderedDict()  # of this worker, by namespace
        self._running: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> int:
        """The number of checks under way."""
        return len(self._running)

    def hit(self, generation: Generation, about: Compared) -> None:
        """A hit by meaning was served: begin its check, if one is drawn."""
        if generation.turn.controls.only_if_cached or self._requests.generations() > BUSY:
            return
        fingerprint, trial = generation.looked.fingerprint, about.trial
        namespace = fingerprint.partition + fingerprint.compat
        hits = max(trial.hits, self._hits.pop(namespace, 0))
        self._hits[namespace] = hits + 1
        if len(self._hits) > _NAMESPACES_MAX:
            self._hits.popitem(last=False)
        share = check_share(hits, self.share)
        if self.random() < share:
            about = replace(about, trial=replace(trial, chance=share))
            task = asyncio.ensure_future(self._requests.check(generation, about))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def aclose(self) -> None:
        """Begin no more checks, and cancel those under way, down to their deployments."""
        self.share = 0.0
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
