"""Limits on requests and tokens per minute, for several subjects at once.

Knows no HTTP, keys or teams. Invariant: a request is charged against all of its limits or none.

The algorithm is the generic cell rate algorithm (ITU-T Recommendation I.371, annex A, virtual
scheduling). Each limit has one number, the theoretical arrival time. A request moves it ahead by
cost / rate; it may lead the present by at most a minute. So an idle subject may spend a minute's
worth at once; after that the rate applies. The number gives both the remaining room and the time
until the limit is full again. Redis's clock serves all hosts.

Token charges are estimates at first; `charge` moves the arrival time by the difference. A request
that used more than the room delays the following requests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import msgspec

from policies.redis import RedisCommands

MINUTE_US = 60_000_000

_NOW = """
local now = tonumber(ARGV[1])
if not now then local t = redis.call('TIME'); now = t[1] * 1000000 + t[2] end
"""

# KEYS one arrival time per limit. ARGV now, then per limit: cost, rate per minute, and how much
# more to take if it fits.
# Replies {1 or 0, then per limit how many µs its arrival time leads the present, after the charge
# if there was one, and whether the additional amount was taken}.
_TAKE = (
    _NOW
    + """
local reply, lead, step = {1}, {}, {}
for i = 1, #KEYS do
  local cost, rate = tonumber(ARGV[3 * i - 1]), tonumber(ARGV[3 * i])
  lead[i] = math.max(tonumber(redis.call('GET', KEYS[i]) or 0) - now, 0)
  step[i] = cost * 60000000 / rate
  if lead[i] + step[i] > 60000000 then reply[1] = 0 end
end
for i = 1, #KEYS do
  local more = tonumber(ARGV[3 * i + 1]) * 60000000 / tonumber(ARGV[3 * i])
  if reply[1] == 1 then
    lead[i] = lead[i] + step[i]
    if lead[i] + more > 60000000 then more = 0 end
    lead[i] = lead[i] + more
    if step[i] + more > 0 then
      redis.call('SET', KEYS[i], string.format('%.3f', now + lead[i]), 'PX', math.ceil(lead[i] / 1000) + 1)
    end
  end
  reply[2 * i], reply[2 * i + 1] = math.floor(lead[i] + 0.5), more > 0 and reply[1] or 0
end
return reply
"""
)

# KEYS one arrival time per limit. ARGV now, then per limit: cost and rate per minute. Costs may be
# negative; the script refuses nothing.
_CHARGE = (
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


class RateLimit(msgspec.Struct, frozen=True):
    """`per_min` of `unit` ("requests", "tokens") for `subject` ("key:5", "team:2").

    This request costs `cost`. `lease` more are taken for later requests, if all of them fit. Raises
    ValueError for a rate below 1 and for a negative cost or lease.
    """

    subject: str
    unit: str
    per_min: int
    cost: int
    lease: int = 0

    def __post_init__(self) -> None:
        if self.per_min < 1 or self.cost < 0 or self.lease < 0:
            raise ValueError(f"a rate limit is at least 1 per minute and a cost at least 0: {self}")


class LimitState(msgspec.Struct, frozen=True):
    """A limit after a decision: `remaining` can be taken now, the whole limit in `reset_s` seconds.

    `leased` is the additional amount that this decision took.
    """

    subject: str
    unit: str
    limit: int
    remaining: int
    reset_s: float
    leased: int = 0


class LimitDecision(msgspec.Struct, frozen=True):
    """Whether a request may pass.

    `retry_after_s` is 0 if it may, None if it never can because it costs more than a minute's
    worth. `refused_by` is the limit with the longest wait.
    """

    is_allowed: bool
    retry_after_s: float | None
    states: tuple[LimitState, ...]
    refused_by: LimitState | None = None

    def tightest(self, unit: str) -> LimitState | None:
        """The limit in `unit` with the least room; the gateway shows it in `x-ratelimit-*`."""
        tightest = None
        for state in self.states:
            if state.unit == unit and (
                tightest is None or (state.remaining, state.limit) < (tightest.remaining, tightest.limit)
            ):
                tightest = state
        return tightest


class RateLimits:
    """All rate limits in Redis. Errors of the Redis client pass through.

    `scope` is common to the limits of one request (its team) and keeps their keys in one slot.
    `clock_us` None uses Redis's clock.
    """

    def __init__(self, redis: RedisCommands, clock_us: Callable[[], int] | None = None) -> None:
        self._redis = redis
        self._clock_us = clock_us

    async def take(self, scope: str, limits: Sequence[RateLimit]) -> LimitDecision:
        """Charge every limit its cost, or none if a limit has no room.

        Without limits: allowed, without a round trip.
        """
        if not limits:
            return LimitDecision(True, 0.0, ())
        reply = await self._redis.eval(_TAKE, len(limits), *_keys(scope, limits), self._now(), *_charges(limits))
        granted = [limit.lease * more for limit, more in zip(limits, reply[2::2], strict=True)]
        return decision_of(limits, [int(lead) for lead in reply[1::2]], is_allowed=reply[0] == 1, granted=granted)

    async def charge(self, scope: str, amounts: Sequence[tuple[RateLimit, int]]) -> None:
        """Charge each amount, or return it if negative; refuses nothing."""
        limits = [limit for limit, _ in amounts]
        charges = [value for limit, amount in amounts for value in (amount, limit.per_min)]
        await self._redis.eval(_CHARGE, len(limits), *_keys(scope, limits), self._now(), *charges)

    def _now(self) -> int | str:
        return "" if self._clock_us is None else self._clock_us()


def decision_of(
    limits: Sequence[RateLimit], leads_us: Sequence[int], *, is_allowed: bool, granted: Sequence[int] = ()
) -> LimitDecision:
    """The decision that follows from `leads_us`: how far each arrival time leads the present, after
    any charge.

    `granted` is the additional amount taken of each limit.
    """
    states = tuple(
        _state(limit, lead_us, more)
        for limit, lead_us, more in zip(limits, leads_us, granted or [0] * len(limits), strict=True)
    )
    if is_allowed:
        return LimitDecision(True, 0.0, states)
    waits_s = [_wait_s(limit, lead_us) for limit, lead_us in zip(limits, leads_us, strict=True)]
    longest = max(range(len(limits)), key=lambda i: waits_s[i])
    wait_s = waits_s[longest]
    return LimitDecision(False, None if math.isinf(wait_s) else wait_s, states, states[longest])


def _keys(scope: str, limits: Sequence[RateLimit]) -> list[str]:
    return [f"sameway:{{{scope}}}:rate:{limit.subject}:{limit.unit}" for limit in limits]


def _charges(limits: Sequence[RateLimit]) -> list[int]:
    return [value for limit in limits for value in (limit.cost, limit.per_min, limit.lease)]


def _state(limit: RateLimit, lead_us: int, leased: int) -> LimitState:
    room = max(0, (MINUTE_US - lead_us) * limit.per_min // MINUTE_US)
    return LimitState(
        subject=limit.subject,
        unit=limit.unit,
        limit=limit.per_min,
        remaining=room,
        reset_s=lead_us / 1e6,
        leased=leased,
    )


def _wait_s(limit: RateLimit, lead_us: int) -> float:
    if limit.cost > limit.per_min:
        return math.inf
    return max(0.0, (lead_us + limit.cost * MINUTE_US / limit.per_min - MINUTE_US) / 1e6)
