"""Rate limits kept by one process alone: what holds while Redis is away.

The same algorithm as `rate_limits` (GCRA), the same verdicts, no await. Knows no Redis. Invariant: a subject gets at most its
limit from this process; several processes together may give it that much each, which is bounded, where failing open is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from policies.rate_limits import MINUTE_US, RateLimit, Verdict, verdict_of

_SUBJECTS_MAX = 10_000


class LocalRateLimits:
    """`clock` gives seconds that never jump."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals_us: dict[tuple[str, str, str], float] = {}
        self._tidy_at = _SUBJECTS_MAX

    def take(self, scope: str, limits: Sequence[RateLimit]) -> Verdict:
        """Charge every limit its cost, or none where one has no room."""
        now_us = self._clock() * 1e6
        leads_us = [max(self._arrivals_us.get(_key(scope, limit), 0.0) - now_us, 0.0) for limit in limits]
        steps_us = [limit.cost * MINUTE_US / limit.per_min for limit in limits]
        is_allowed = all(lead + step <= MINUTE_US for lead, step in zip(leads_us, steps_us, strict=True))
        if is_allowed:
            leads_us = [lead + step for lead, step in zip(leads_us, steps_us, strict=True)]
            self._keep(scope, limits, leads_us, now_us)
        return verdict_of(limits, [int(lead) for lead in leads_us], is_allowed=is_allowed)

    def correct(self, scope: str, limits: Sequence[RateLimit], unit: str, actual: int) -> None:
        """The request that `take` charged turned out to cost `actual` of `unit`."""
        now_us = self._clock() * 1e6
        changed = [limit for limit in limits if limit.unit == unit and limit.cost != actual]
        leads_us = [
            max(
                max(self._arrivals_us.get(_key(scope, limit), 0.0) - now_us, 0.0)
                + (actual - limit.cost) * MINUTE_US / limit.per_min,
                0.0,
            )
            for limit in changed
        ]
        self._keep(scope, changed, leads_us, now_us)

    def _keep(self, scope: str, limits: Sequence[RateLimit], leads_us: Sequence[float], now_us: float) -> None:
        if len(self._arrivals_us) > self._tidy_at:  # what lies in the past says nothing any more
            self._arrivals_us = {key: at for key, at in self._arrivals_us.items() if at > now_us}
            self._tidy_at = max(_SUBJECTS_MAX, 2 * len(self._arrivals_us))
        for limit, lead_us in zip(limits, leads_us, strict=True):
            self._arrivals_us[_key(scope, limit)] = now_us + lead_us


def _key(scope: str, limit: RateLimit) -> tuple[str, str, str]:
    return scope, limit.subject, limit.unit
