"""Rate limits of which this process holds a small share: most requests are charged in memory, and Redis hears of many at once.

Knows no HTTP, keys or teams. Invariants: what is used was charged in Redis before; one five-hundredth of a limit (`_SHARES`), and
at most twice that, lies unused in each process, so no minute exceeds a limit by more than that per process and none falls short of
it by more. A limit too small to be shared out is asked of Redis each time, exactly. What is shown as remaining is at most a second
old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from policies.rate_limits import MINUTE_US, LimitState, RateLimit, RateLimits, Verdict

_SHARES = 500
_HEARD_WITHIN_S = 1.0
_SUBJECTS_MAX = 10_000


class _Share:
    """What this process holds of one limit. `left` below 0 is a debt: more was used than was expected."""

    __slots__ = ("heard_at_s", "is_asking", "is_tokens", "lead_us", "left", "per_min", "quantum", "subject", "unit")

    def __init__(self, subject: str, unit: str, per_min: int) -> None:
        self.subject = subject
        self.unit = unit
        self.is_tokens = unit == "tokens"
        self.per_min = per_min
        self.quantum = per_min // _SHARES
        self.left = 0
        self.lead_us = 0
        self.heard_at_s = float("-inf")
        self.is_asking = False  # for a quantum: one at a time

    def state(self, now_s: float) -> LimitState:
        lead_us = max(0, self.lead_us - int((now_s - self.heard_at_s) * 1e6))
        room = (MINUTE_US - lead_us) * self.per_min // MINUTE_US + self.left
        return LimitState(self.subject, self.unit, self.per_min, max(0, room), lead_us / 1e6)


class Limited:
    """The limits that one sort of request counts against, with this process's shares of them. Made by `limited`."""

    __slots__ = ("_scope", "_shares")

    def __init__(self, scope: str, shares: tuple[_Share, ...]) -> None:
        self._scope = scope
        self._shares = shares

    def __bool__(self) -> bool:
        return bool(self._shares)


class BorrowedRateLimits:
    """`clock` gives seconds that never jump. Costs are by unit: None leaves limits of that unit alone, 0 only asks."""

    def __init__(self, shared: RateLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._shared = shared
        self._clock = clock
        self._shares: dict[tuple[str, str, str, int], _Share] = {}

    def limited(self, scope: str, limits: Sequence[tuple[str, str, int]]) -> Limited:
        """A handle on (subject, unit, per minute) limits; keep it for as long as they stay what they are."""
        if len(self._shares) > _SUBJECTS_MAX:
            self._shares.clear()  # handles that are kept go on with theirs: at worst a share is held twice for a while
        keys = [(scope, *limit) for limit in limits]
        return Limited(scope, tuple(self._shares.setdefault(key, _Share(*key[1:])) for key in keys))

    def take_now(self, limited: Limited, requests: int | None, tokens: int | None) -> bool:
        """Charge what this process holds, if that suffices; False where Redis must be asked (`take`), and nothing is charged."""
        heard_since_s = self._clock() - _HEARD_WITHIN_S
        for share in limited._shares:
            cost = tokens if share.is_tokens else requests
            if cost is not None and (share.left < cost or share.heard_at_s < heard_since_s or not share.quantum):
                return False
        for share in limited._shares:
            share.left -= (tokens if share.is_tokens else requests) or 0
        return True

    def shown(self, limited: Limited, requests: int | None, tokens: int | None) -> Verdict:
        """The verdict on what `take_now` has charged: what remains of the limits in these units."""
        now_s = self._clock()
        asked = [share for share in limited._shares if (tokens if share.is_tokens else requests) is not None]
        return Verdict(True, 0.0, tuple([share.state(now_s) for share in asked]))

    async def take(self, limited: Limited, requests: int | None, tokens: int | None) -> Verdict:
        """As `RateLimits.take`, and a quantum of each limit that has room for it besides."""
        asked: list[tuple[_Share, RateLimit, int]] = []  # with what is paid from the share itself
        for share in limited._shares:
            cost = tokens if share.is_tokens else requests
            if cost is None:
                continue
            charge = max(0, cost - share.left) if share.quantum else cost
            own = cost - charge
            share.left -= own
            borrow = 0 if share.is_asking else max(0, share.quantum - share.left)
            share.is_asking = share.is_asking or borrow > 0
            asked.append((share, RateLimit(share.subject, share.unit, share.per_min, charge, borrow), own))
        verdict = None
        try:
            verdict = await self._shared.take(limited._scope, [limit for _, limit, _ in asked])
        finally:
            for i, (share, limit, own) in enumerate(asked):
                if limit.borrow:
                    share.is_asking = False
                if verdict is None or not verdict.is_allowed:
                    share.left += own
                if verdict is not None:
                    state = verdict.states[i]
                    share.left += state.borrowed
                    share.lead_us, share.heard_at_s = int(state.reset_s * 1e6), self._clock()
        if not verdict.is_allowed:
            return verdict
        now_s = self._clock()
        return Verdict(True, 0.0, tuple([share.state(now_s) for share, _, _ in asked]))

    def correct(self, limited: Limited, expected: int, actual: int) -> Coroutine[Any, Any, None] | None:
        """A request that was charged `expected` tokens has used `actual`: what to await where Redis must hear of it; None where
        the difference is small beside what this process holds, and stays here."""
        charges: list[tuple[_Share, int]] = []
        for share in limited._shares:
            if not share.is_tokens or expected == actual:
                continue
            share.left += expected - actual
            if not share.quantum or not -share.quantum <= share.left <= 2 * share.quantum:
                charges.append((share, -share.left))
        return self._charge(limited._scope, charges) if charges else None

    async def _charge(self, scope: str, charges: Sequence[tuple[_Share, int]]) -> None:
        """Have Redis charge or give back these amounts: the shares are even then."""
        for share, amount in charges:
            share.left += amount
            share.lead_us += amount * MINUTE_US // share.per_min  # as Redis will say: what remains is shown from it
        await self._shared.charge(
            scope, [(RateLimit(share.subject, share.unit, share.per_min, 0), amount) for share, amount in charges]
        )
