"""Rate limits without a round trip: leases from Redis's limits, and per-process limits for when
Redis is away.

Knows no HTTP, keys or teams. A process leases a five-hundredth of a limit (`_SHARES`) from Redis
and charges most requests to its lease in memory. Invariants: Redis was charged before a lease is
used; each process holds at most two five-hundredths unused, so no minute exceeds or misses a limit
by more than that per process; the remaining room shown is at most a second old. A limit too small
for leases is charged in Redis each time.

`LocalRateLimits` uses no Redis: a subject gets at most its limit from each process, which bounds
it; failing open would not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from policies.rate_limits import MINUTE_US, LimitDecision, LimitState, RateLimit, RateLimits, decision_of

# decision: limits-are-leased
_SHARES = 500
_FRESH_S = 1.0
_SUBJECTS_MAX = 10_000


class _Lease:
    """This process's lease of one limit.

    A negative `left` is a debt: requests used more than expected.
    """

    __slots__ = ("is_asking", "is_tokens", "lead_us", "left", "per_min", "quantum", "subject", "synced_at_s", "unit")

    def __init__(self, subject: str, unit: str, per_min: int) -> None:
        self.subject = subject
        self.unit = unit
        self.is_tokens = unit == "tokens"
        self.per_min = per_min
        self.quantum = per_min // _SHARES
        self.left = 0
        self.lead_us = 0
        self.synced_at_s = float("-inf")
        self.is_asking = False  # one request at a time asks for a quantum

    def state(self, now_s: float) -> LimitState:
        lead_us = max(0, self.lead_us - int((now_s - self.synced_at_s) * 1e6))
        room = (MINUTE_US - lead_us) * self.per_min // MINUTE_US + self.left
        return LimitState(self.subject, self.unit, self.per_min, max(0, room), lead_us / 1e6)


class Limited(msgspec.Struct, frozen=True):
    """The limits that one kind of request counts against, with this process's leases.

    Created by `limited`.
    """

    scope: str
    leases: tuple[_Lease, ...]


class LeasedRateLimits:
    """Charges leases of `shared`. `clock` gives seconds that never jump.

    Costs are by unit: None skips the limits of that unit, 0 checks without charging.
    """

    def __init__(self, shared: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._leases: dict[tuple[str, str, str, int], _Lease] = {}

    def limited(self, scope: str, limits: Sequence[tuple[str, str, int]]) -> Limited:
        """A handle on (subject, unit, per minute) limits; keep it until one of them changes."""
        if len(self._leases) > _SUBJECTS_MAX:
            self._leases.clear()  # kept handles keep their leases: at worst a lease is held twice for a while
        keys = [(scope, *limit) for limit in limits]
        return Limited(scope, tuple(self._leases.setdefault(key, _Lease(*key[1:])) for key in keys))

    def take_now(self, limited: Limited, requests: int | None, tokens: int | None) -> bool:
        """Charge this process's leases if they suffice.

        Otherwise charges nothing and returns False: call `take`.
        """
        synced_since_s = self._clock() - _FRESH_S
        for lease in limited.leases:
            cost = tokens if lease.is_tokens else requests
            if cost is not None and (lease.left < cost or lease.synced_at_s < synced_since_s or not lease.quantum):
                return False
        for lease in limited.leases:
            lease.left -= (tokens if lease.is_tokens else requests) or 0
        return True

    def shown(self, limited: Limited, requests: int | None, tokens: int | None) -> LimitDecision:
        """The decision on a request that `take_now` charged, with the remaining room in these
        units.
        """
        now_s = self._clock()
        leases = [lease for lease in limited.leases if (tokens if lease.is_tokens else requests) is not None]
        return LimitDecision(True, 0.0, tuple([lease.state(now_s) for lease in leases]))

    async def take(self, limited: Limited, requests: int | None, tokens: int | None) -> LimitDecision:
        """Charge as `RateLimits.take` does, and lease a quantum of each limit with room for it."""
        charges: list[tuple[_Lease, RateLimit, int]] = []  # with the part that the lease pays
        for lease in limited.leases:
            cost = tokens if lease.is_tokens else requests
            if cost is None:
                continue
            charge = max(0, cost - lease.left) if lease.quantum else cost
            prepaid = cost - charge
            lease.left -= prepaid
            more = 0 if lease.is_asking else max(0, lease.quantum - lease.left)
            lease.is_asking = lease.is_asking or more > 0
            charges.append((lease, RateLimit(lease.subject, lease.unit, lease.per_min, charge, more), prepaid))
        decision = None
        try:
            decision = await self._shared.take(limited.scope, [limit for _, limit, _ in charges])
        finally:
            for i, (lease, limit, prepaid) in enumerate(charges):
                if limit.lease:
                    lease.is_asking = False
                if decision is None or not decision.is_allowed:
                    lease.left += prepaid
                if decision is not None:
                    state = decision.states[i]
                    lease.left += state.leased
                    lease.lead_us, lease.synced_at_s = int(state.reset_s * 1e6), self._clock()
        if not decision.is_allowed:
            return decision
        now_s = self._clock()
        return LimitDecision(True, 0.0, tuple([lease.state(now_s) for lease, _, _ in charges]))

    def correct(self, limited: Limited, expected: int, actual: int) -> Coroutine[Any, Any, None] | None:
        """Correct the charge of a request that was charged `expected` tokens and used `actual`.

        Returns a coroutine to await if Redis must be charged, None if the lease absorbs the
        difference.
        """
        charges: list[tuple[_Lease, int]] = []
        for lease in limited.leases:
            if not lease.is_tokens or expected == actual:
                continue
            lease.left += expected - actual
            if not lease.quantum or not -lease.quantum <= lease.left <= 2 * lease.quantum:
                charges.append((lease, -lease.left))
        return self._charge(limited.scope, charges) if charges else None

    async def _charge(self, scope: str, charges: Sequence[tuple[_Lease, int]]) -> None:
        """Charge these amounts in Redis, or return negative ones, and level the leases by them."""
        for lease, amount in charges:
            lease.left += amount
            lease.lead_us += (
                amount * MINUTE_US // lease.per_min
            )  # as Redis will reply: the remaining room is shown from it
        await self._shared.charge(
            scope, [(RateLimit(lease.subject, lease.unit, lease.per_min, 0), amount) for lease, amount in charges]
        )


class LocalRateLimits:
    """GCRA in this process's memory, with the decisions of `RateLimits`.

    `clock` gives seconds that never jump.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrivals_us: dict[tuple[str, str, str], float] = {}
        self._prune_at = _SUBJECTS_MAX

    def take(self, scope: str, limits: Sequence[RateLimit]) -> LimitDecision:
        """Charge every limit its cost, or none if a limit has no room."""
        now_us = self._clock() * 1e6
        leads_us = [self._lead_us(scope, limit, now_us) for limit in limits]
        steps_us = [limit.cost * MINUTE_US / limit.per_min for limit in limits]
        is_allowed = all(lead + step <= MINUTE_US for lead, step in zip(leads_us, steps_us, strict=True))
        if is_allowed:
            leads_us = [lead + step for lead, step in zip(leads_us, steps_us, strict=True)]
            self._keep(scope, limits, leads_us, now_us)
        return decision_of(limits, [int(lead) for lead in leads_us], is_allowed=is_allowed)

    def correct(self, scope: str, limits: Sequence[RateLimit], unit: str, actual: int) -> None:
        """Correct the charge of a request that `take` charged and that used `actual` of `unit`."""
        now_us = self._clock() * 1e6
        changed_limits = [limit for limit in limits if limit.unit == unit and limit.cost != actual]
        leads_us = [
            max(self._lead_us(scope, limit, now_us) + (actual - limit.cost) * MINUTE_US / limit.per_min, 0.0)
            for limit in changed_limits
        ]
        self._keep(scope, changed_limits, leads_us, now_us)

    def _lead_us(self, scope: str, limit: RateLimit, now_us: float) -> float:
        return max(self._arrivals_us.get(_key(scope, limit), 0.0) - now_us, 0.0)

    def _keep(self, scope: str, limits: Sequence[RateLimit], leads_us: Sequence[float], now_us: float) -> None:
        if len(self._arrivals_us) > self._prune_at:  # a past arrival time limits nothing
            self._arrivals_us = {key: at for key, at in self._arrivals_us.items() if at > now_us}
            self._prune_at = max(_SUBJECTS_MAX, 2 * len(self._arrivals_us))
        for limit, lead_us in zip(limits, leads_us, strict=True):
            self._arrivals_us[_key(scope, limit)] = now_us + lead_us


def _key(scope: str, limit: RateLimit) -> tuple[str, str, str]:
    return scope, limit.subject, limit.unit
