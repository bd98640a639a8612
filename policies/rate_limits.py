"""Requests and tokens per minute, for a key and its team at once.

Knows no HTTP, keys or teams, only subjects. Invariant: a request is charged against all of its limits or none.

The algorithm is the generic cell rate algorithm (ITU-T Recommendation I.371, annex A, virtual scheduling): one
number per limit, the theoretical arrival time, moves ahead by cost / rate with each request and may lead the
present by a minute at most. So a quiet minute's worth may come at once, then the rate holds; nothing is reset, and
one number tells the remaining room and when it is full again. The clock is Redis's own, one for all hosts.

Token charges are an estimate first; `correct` moves the arrival time by the difference. A request that turned out
larger than the room was lends from the future: the next ones wait it off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from policies.redis import Redis

MINUTE_US = 60_000_000

_NOW = """
local now = tonumber(ARGV[1])
if not now then local t = redis.call('TIME'); now = t[1] * 1000000 + t[2] end
"""

# KEYS one arrival time per limit. ARGV now, then per limit: cost and rate per minute.
# Replies {1 or 0, then per limit how many µs its arrival time leads the present, after the charge if there was one}.
_TAKE = (
    _NOW
    + """
local reply, lead, step = {1}, {}, {}
for i = 1, #KEYS do
  local cost, rate = tonumber(ARGV[2 * i]), tonumber(ARGV[2 * i + 1])
  lead[i] = math.max(tonumber(redis.call('GET', KEYS[i]) or 0) - now, 0)
  step[i] = cost * 60000000 / rate
  if lead[i] + step[i] > 60000000 then reply[1] = 0 end
end
for i = 1, #KEYS do
  if reply[1] == 1 then
    lead[i] = lead[i] + step[i]
    if step[i] > 0 then
      redis.call('SET', KEYS[i], string.format('%.3f', now + lead[i]), 'PX', math.ceil(lead[i] / 1000) + 1)
    end
  end
  reply[i + 1] = math.floor(lead[i] + 0.5)
end
return reply
"""
)

# KEYS and ARGV as in _TAKE; costs may be negative, and nothing is refused.
_CORRECT = (
    _NOW
    + """
for i = 1, #KEYS do
  local lead = math.max(tonumber(redis.call('GET', KEYS[i]) or 0) - now, 0)
  lead = math.max(lead + tonumber(ARGV[2 * i]) * 60000000 / tonumber(ARGV[2 * i + 1]), 0)
  if lead > 0 then
    redis.call('SET', KEYS[i], string.format('%.3f', now + lead), 'PX', math.ceil(lead / 1000) + 1)
  else
    redis.call('DEL', KEYS[i])
  end
end
return 1
"""
)


@dataclass(frozen=True, slots=True)
class RateLimit:
    """`per_min` of `unit` ("requests", "tokens") for `subject` ("key:5", "team:2"); this request costs `cost`."""

    subject: str
    unit: str
    per_min: int
    cost: int

    def __post_init__(self) -> None:
        if self.per_min < 1 or self.cost < 0:
            raise ValueError(f"a rate limit is at least 1 per minute and a cost at least 0: {self}")


@dataclass(frozen=True, slots=True)
class LimitState:
    """A limit after the decision: how much could be taken now, and in how many seconds all of it."""

    subject: str
    unit: str
    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the request may pass. `retry_after_s` is 0 where it may, None where it never will: it costs more than
    a whole minute's worth. `refused_by` is the limit that takes longest."""

    is_allowed: bool
    retry_after_s: float | None
    states: tuple[LimitState, ...]
    refused_by: LimitState | None = None

    def tightest(self, unit: str) -> LimitState | None:
        """Of several limits in one unit the one with least room, to be shown in `x-ratelimit-*`."""
        return min((s for s in self.states if s.unit == unit), key=lambda s: (s.remaining, s.limit), default=None)


class RateLimits:
    """All rate limits in Redis. Failures of Redis pass through as its client raises them.

    `scope` names what the limits of one request share (its team) and keeps their keys in one slot.
    `clock_us` None: Redis's own clock.
    """

    def __init__(self, redis: Redis, clock_us: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._clock_us = clock_us

    async def take(self, scope: str, limits: Sequence[RateLimit]) -> Verdict:
        """Charge every limit its cost, or none where one has no room. Without limits: allowed, no round trip."""
        if not limits:
            return Verdict(True, 0.0, ())
        reply = await self._redis.eval(_TAKE, len(limits), *_keys(scope, limits), self._now(), *_charges(limits))
        return verdict_of(limits, [int(lead) for lead in reply[1:]], is_allowed=reply[0] == 1)

    async def correct(self, scope: str, limits: Sequence[RateLimit], unit: str, actual: int) -> None:
        """The request that `take` charged turned out to cost `actual` of `unit`: charge or give back the difference."""
        changed = [limit for limit in limits if limit.unit == unit and limit.cost != actual]
        if not changed:
            return
        charges = [value for limit in changed for value in (actual - limit.cost, limit.per_min)]
        await self._redis.eval(_CORRECT, len(changed), *_keys(scope, changed), self._now(), *charges)

    def _now(self) -> int | str:
        return "" if self._clock_us is None else self._clock_us()


def verdict_of(limits: Sequence[RateLimit], leads_us: Sequence[int], *, is_allowed: bool) -> Verdict:
    """The verdict that follows from how far each limit's arrival time leads the present, after the charge if there was one."""
    states = tuple(_state(limit, lead_us) for limit, lead_us in zip(limits, leads_us, strict=True))
    if is_allowed:
        return Verdict(True, 0.0, states)
    waits_s = [_wait_s(limit, lead_us) for limit, lead_us in zip(limits, leads_us, strict=True)]
    longest = max(range(len(limits)), key=lambda i: waits_s[i])
    wait_s = waits_s[longest]
    return Verdict(False, None if math.isinf(wait_s) else wait_s, states, states[longest])


def _keys(scope: str, limits: Sequence[RateLimit]) -> list[str]:
    return [f"sameway:{{{scope}}}:rate:{limit.subject}:{limit.unit}" for limit in limits]


def _charges(limits: Sequence[RateLimit]) -> list[int]:
    return [value for limit in limits for value in (limit.cost, limit.per_min)]


def _state(limit: RateLimit, lead_us: int) -> LimitState:
    room = max(0, (MINUTE_US - lead_us) * limit.per_min // MINUTE_US)
    return LimitState(limit.subject, limit.unit, limit.per_min, room, lead_us / 1e6)


def _wait_s(limit: RateLimit, lead_us: int) -> float:
    if limit.cost > limit.per_min:
        return math.inf
    return max(0.0, (lead_us + limit.cost * MINUTE_US / limit.per_min - MINUTE_US) / 1e6)
