"""Checks of semantic hits: for which hits a fresh answer is generated beside the one that is served, so
that the two can be compared.

Invariant: the share that is drawn depends on the number of hits alone, never on the request or the
answer, so that the checks are a sample of all hits.
"""

import time
from collections import OrderedDict
from collections.abc import Callable

from msgspec.structs import replace

from gateway.journey.generation import CheckedHit, Generation
from gateway.journey.record import Record
from gateway.journey.savings import CHECK
from gateway.journey.turn import Turn, arrive

BUSY = 64
"""The generations under way from which on none begins that no request waits for."""
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
    """Draws the checks of one worker. `share` is the setting, `random` gives numbers in [0, 1)."""

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        self._share = share
        self.random = random
        self._hits: OrderedDict[bytes, int] = OrderedDict()  # of this worker, by namespace

    def draw(self, hit: Generation, record: Record) -> CheckedHit | None:
        """What the check of a hit by meaning needs, if one is drawn. The trial has the served answer
        first, and the share as its chance.
        """
        semantic, fingerprint = hit.looked.semantic, hit.looked.fingerprint
        entry, trial = semantic.entry, semantic.trial
        if entry is None or trial is None or hit.turn.controls.only_if_cached:
            return None
        namespace = fingerprint.partition + fingerprint.compat
        hits = max(trial.hits, self._hits.pop(namespace, 0))
        self._hits[namespace] = hits + 1
        if len(self._hits) > _NAMESPACES_MAX:
            self._hits.popitem(last=False)
        share = check_share(hits, self._share)
        if self.random() >= share:
            return None
        ranked = (entry.exact, *[exact for exact in trial.ranked if exact != entry.exact])
        # features are of the answer that the rule found likeliest
        features = trial.features if trial.ranked[:1] == ranked[:1] else b""
        trial = replace(trial, ranked=ranked, features=features, chance=share)
        return CheckedHit(record, entry, trial, semantic.verified_by)


def asked_again(turn: Turn) -> Turn:
    """The turn of a check: all that the client asked for, past the cache, from now on."""
    now, controls = time.perf_counter(), replace(turn.controls, no_cache=True)
    deadline = None if turn.deadline is None else now + turn.deadline - turn.started
    return replace(turn, arrival=arrive(CHECK), controls=controls, started=now, deadline=deadline)
