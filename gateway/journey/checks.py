"""Checks of semantic hits: which would-be hits are generated instead of served, so that the fresh
answer can be compared with the one that would have been served.

Invariant: the share that is drawn depends on the number of hits alone, never on the request or the
answer, so that the checks are a sample of all hits.
"""

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cache import MissReason, Trial
from gateway.journey.outcomes import SemanticResult

_SHARES = ((3, 0.0), (300, 0.3), (1_000, 0.1))  # up to so many hits, at least such a share
_NAMESPACES_MAX = 20_000


def check_share(hits: int, share: float) -> float:
    """The share of the next would-be hit, after `hits` of its namespace: none of the first three, 30%
    up to 300, 10% up to 1,000, then `share`; never less than `share`, but of the first three. At a
    `share` of 0 nothing is checked.
    """
    least = next((of_step for most, of_step in _SHARES if hits < most), share)
    return max(least, share) if share and least else 0.0


class Checks:
    """Draws the checks of one worker. `share` is the setting, `random` gives numbers in [0, 1)."""

    def __init__(self, share: float, random: Callable[[], float]) -> None:
        self._share = share
        self.random = random
        self._hits: OrderedDict[bytes, int] = OrderedDict()  # would-be ones of this worker, by namespace

    def draw(self, namespace: bytes, hit: SemanticResult) -> SemanticResult:
        """A hit by meaning; or, where a check is drawn, the miss that it becomes. The trial of that has
        the answer of `hit` first, and the share as its chance.
        """
        entry, trial = hit.entry, hit.trial
        if entry is None or trial is None:
            return hit
        hits = max(trial.hits, self._hits.pop(namespace, 0))
        self._hits[namespace] = hits + 1
        if len(self._hits) > _NAMESPACES_MAX:
            self._hits.popitem(last=False)
        share = check_share(hits, self._share)
        if self.random() >= share:
            return hit
        ranked = (entry.exact, *[exact for exact in trial.ranked if exact != entry.exact])
        # features are of the answer that the rule found likeliest
        features = trial.features if trial.ranked[:1] == ranked[:1] else b""
        check: Trial = msgspec.structs.replace(trial, ranked=ranked, features=features, chance=share)
        return msgspec.structs.replace(hit, entry=None, miss_reason=MissReason.AUDIT.value, trial=check)
