"""Rate limits as the pipeline uses them: an identity's limits, and the headers that report them.

Knows no prompts. Invariant: limits never fail open. While Redis is away, each worker applies them
separately, so a team gets at most its limit from each worker.
"""

import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from redis.exceptions import RedisError

from gateway.accounts import Identity, scope_of
from gateway.transport.eager import Eager
from gateway.wire.errors import RateLimited
from gateway.wire.requests import OUTPUT_TOKENS_EXPECTED
from policies import Demand, LeasedRateLimits, LocalRateLimits, RateLimit
from policies.durations import duration_s
from policies.leased_limits import Limited
from policies.rate_limits import LimitDecision

_IDENTITIES_MAX = 10_000
_SHOWN_FOR_S = 0.05


LimitHeaders = dict[bytes, bytes]


class _Known(msgspec.Struct):
    """An identity's limits, prepared once, and their last headers, by requests and tokens."""

    identity: Identity
    limited: Limited
    shown: dict[tuple[bool, bool], Eager[LimitHeaders]] = {}
    shown_at_s: float = 0.0


class Limits:
    """Requests and tokens per minute, of keys and teams.

    Each method that takes sends its command to Redis at once, if it needs one, and gives the
    response's headers when awaited.
    """

    def __init__(
        self, shared: LeasedRateLimits, local: LocalRateLimits, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._shared = shared
        self._local = local
        self._clock = clock
        self._known: dict[tuple[int, str], _Known] = {}

    def take(self, identity: Identity) -> Eager[LimitHeaders]:
        """3. Take one request. Raises RateLimited."""
        return self._take(identity, 1, 0)

    def take_tokens(self, tokens: int, identity: Identity) -> Eager[LimitHeaders]:
        """7. Take the tokens that a generation is expected to need. Raises RateLimited."""
        return self._take(identity, None, tokens)

    def take_requests(self, identity: Identity) -> Eager[LimitHeaders]:
        """Take one request without a generation: its tokens are not limited. Raises RateLimited."""
        return self._take(identity, 1, None)

    def correct(self, expected: int, identity: Identity, tokens: int) -> Coroutine[Any, Any, None] | None:
        """Replace the `expected` tokens that `take_tokens` took by `tokens`, those used.

        Returns a coroutine to await if Redis must be updated, else None.
        """
        known = self._of(identity)
        if not known.limited.leases:
            return None
        correcting = self._shared.correct(known.limited, expected, tokens)
        return None if correcting is None else self._correct(correcting, identity, expected, tokens)

    async def _correct(
        self, correcting: Coroutine[Any, Any, None], identity: Identity, expected: int, tokens: int
    ) -> None:
        try:
            await correcting
        except RedisError:
            self._local.correct(scope_of(identity.team.id), _limits_of(identity, None, expected), "tokens", tokens)

    def _of(self, identity: Identity) -> _Known:
        """The identity's prepared limits. A new snapshot of accounts has new objects of teams."""
        of = identity.key.id, identity.user
        known = self._known.get(of)
        if known is None or known.identity.team is not identity.team:
            if len(self._known) > _IDENTITIES_MAX:
                self._known.clear()
            limits = [(limit.subject, limit.unit, limit.per_min) for limit in _limits_of(identity, 0, 0)]
            limited = self._shared.limited(scope_of(identity.team.id), limits)
            known = self._known[of] = _Known(identity, limited)
        return known

    def _take(self, identity: Identity, requests: int | None, tokens: int | None) -> Eager[LimitHeaders]:
        """Take from this worker's lease without waiting, or from Redis if that does not suffice."""
        known = self._of(identity)
        if not known.limited.leases:
            return _UNLIMITED
        if self._shared.take_now(known.limited, requests, tokens):
            return self._shown(known, requests, tokens)
        return Eager(self._ask(known, requests, tokens))

    async def _ask(self, known: _Known, requests: int | None, tokens: int | None) -> LimitHeaders:
        try:
            verdict = await self._shared.take(known.limited, requests, tokens)
        except RedisError:
            verdict = self._local.take(known.limited.scope, _limits_of(known.identity, requests, tokens))
        headers = _headers(verdict)
        if verdict.is_allowed:
            return headers
        raise _refusal(verdict, headers)

    def _shown(self, known: _Known, requests: int | None, tokens: int | None) -> Eager[LimitHeaders]:
        """The headers, made once in 50 ms: the worker's copy of Redis's counts is up to 1 s old."""
        now_s = self._clock()
        if now_s - known.shown_at_s > _SHOWN_FOR_S:
            known.shown, known.shown_at_s = {}, now_s
        units = (requests is None, tokens is None)
        headers = known.shown.get(units)
        if headers is None:
            headers = known.shown[units] = Eager.done(_headers(self._shared.shown(known.limited, requests, tokens)))
        return headers


def _refusal(verdict: LimitDecision, headers: LimitHeaders) -> RateLimited:
    refused = verdict.refused_by
    assert refused is not None
    whose, unit = refused.subject.partition(":")[0], refused.unit
    texts = {name.decode(): value.decode() for name, value in headers.items()}
    if verdict.retry_after_s is None:
        return RateLimited(
            f"This request needs more {unit} than this {whose} may use in a minute ({refused.limit})",
            60.0,
            {**texts, "x-should-retry": "false"},
        )
    return RateLimited(
        f"Rate limit reached for this {whose}: {refused.limit} {unit} per minute. Try again in {duration_s(verdict.retry_after_s)}",
        verdict.retry_after_s,
        texts,
    )


def expected_tokens(demand: Demand) -> int:
    """The tokens that a generation is expected to need, for limits on tokens."""
    output_tokens = demand.output_tokens_max if demand.is_output_asked else OUTPUT_TOKENS_EXPECTED
    return demand.prompt_tokens + output_tokens * demand.choices


def _limits_of(identity: Identity, requests: int | None, tokens: int | None) -> list[RateLimit]:
    """Every limit of the key, or of the person with a token, and of the team, in the units that are taken."""
    key, team = identity.key, identity.team
    scope = scope_of(team.id)
    caller = f"person:{key.id}:{identity.user}" if identity.user else f"key:{key.id}"
    limits = (
        (caller, "requests", key.requests_per_min, requests),
        (caller, "tokens", key.tokens_per_min, tokens),
        (scope, "requests", team.requests_per_min, requests),
        (scope, "tokens", team.tokens_per_min, tokens),
    )
    return [
        RateLimit(subject, unit, per_min, cost)
        for subject, unit, per_min, cost in limits
        if per_min is not None and cost is not None
    ]


_UNLIMITED = Eager.done(LimitHeaders())
_HEADERS = {
    unit: tuple(f"x-ratelimit-{what}-{unit}".encode() for what in ("limit", "remaining", "reset"))
    for unit in ("requests", "tokens")
}


def _headers(verdict: LimitDecision) -> LimitHeaders:
    """`x-ratelimit-*` for the tightest limit of each unit, as the OpenAI API writes them."""
    headers: LimitHeaders = {}
    for unit, (limit, remaining, reset) in _HEADERS.items():
        state = verdict.tightest(unit)
        if state is not None:
            headers[limit], headers[remaining] = b"%d" % state.limit, b"%d" % state.remaining
            headers[reset] = _span(state.reset_s).encode()
    return headers


def _span(seconds: float) -> str:
    """A duration as OpenAI writes it: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
