"""Rate limits as the pipeline sees them: who is limited, by how much, and what the client is told.

Knows no prompts. Invariant: limits never fail open. While Redis is away each worker keeps them by itself, so that a team gets
at most its limit per worker.
"""

from collections.abc import Awaitable

from redis.exceptions import RedisError

from gateway.accounts import Identity
from gateway.errors import RateLimited
from gateway.turn import Turn
from policies import LimitState, LocalRateLimits, RateLimit, RateLimits, Verdict

_OUTPUT_TOKENS_EXPECTED = 256


class Limits:
    """Requests and tokens per minute, of keys and teams."""

    def __init__(self, shared: RateLimits, local: LocalRateLimits) -> None:
        self._shared = shared
        self._local = local

    def take(self, identity: Identity) -> Awaitable[dict[str, str]] | None:
        """2. One request; None where nobody is limited, else the response's headers to await. Raises RateLimited when awaited."""
        limits = _limits_of(identity, 0)
        return self._take(identity, limits) if limits else None

    def take_tokens(self, turn: Turn, identity: Identity) -> Awaitable[dict[str, str]] | None:
        """The tokens that a generation is expected to need; hits need none. As `take`."""
        limits = [limit for limit in _limits_of(identity, _expected_tokens(turn)) if limit.unit == "tokens"]
        return self._take(identity, limits) if limits else None

    async def _take(self, identity: Identity, limits: list[RateLimit]) -> dict[str, str]:
        try:
            verdict = await self._shared.take(_scope(identity), limits)
        except RedisError:
            verdict = self._local.take(_scope(identity), limits)
        headers = _headers(verdict)
        if verdict.is_allowed:
            return headers
        refused = verdict.refused_by
        assert refused is not None
        whose, unit = refused.subject.partition(":")[0], refused.unit
        if verdict.retry_after_s is None:
            raise RateLimited(
                f"This request needs more {unit} than this {whose} may use in a minute ({refused.limit})",
                60.0,
                {**headers, "x-should-retry": "false"},
            )
        raise RateLimited(
            f"Rate limit reached for this {whose}: {refused.limit} {unit} per minute. Try again in {verdict.retry_after_s:.1f} s",
            verdict.retry_after_s,
            headers,
        )

    async def take_requests(self, identity: Identity) -> dict[str, str]:
        """One request that is not a chat: its tokens are not limited. The response's headers. Raises RateLimited."""
        limits = [limit for limit in _limits_of(identity, 0) if limit.unit == "requests"]
        return await self._take(identity, limits) if limits else {}

    async def correct(self, turn: Turn, identity: Identity, tokens: int) -> None:
        """What `take_tokens` took was expected; now it is known what it was."""
        limits = [limit for limit in _limits_of(identity, _expected_tokens(turn)) if limit.unit == "tokens"]
        try:
            await self._shared.correct(_scope(identity), limits, "tokens", tokens)
        except RedisError:
            self._local.correct(_scope(identity), limits, "tokens", tokens)


def _expected_tokens(turn: Turn) -> int:
    return turn.ask.prompt_tokens + (turn.ask.output_tokens_max or _OUTPUT_TOKENS_EXPECTED) * turn.ask.choices


def _limits_of(identity: Identity, tokens: int) -> list[RateLimit]:
    key, team = identity.key, identity.team
    limits = (
        (f"key:{key.id}", "requests", key.requests_per_min, 1),
        (f"key:{key.id}", "tokens", key.tokens_per_min, tokens),
        (f"team:{team.id}", "requests", team.requests_per_min, 1),
        (f"team:{team.id}", "tokens", team.tokens_per_min, tokens),
    )
    return [RateLimit(subject, unit, per_min, cost) for subject, unit, per_min, cost in limits if per_min is not None]


def _scope(identity: Identity) -> str:
    return f"team:{identity.team.id}"


def _headers(verdict: Verdict) -> dict[str, str]:
    """`x-ratelimit-*` for the tightest limit of each unit, as the OpenAI API writes them."""
    headers = {}
    for unit in ("requests", "tokens"):
        state: LimitState | None = verdict.tightest(unit)
        if state is not None:
            headers[f"x-ratelimit-limit-{unit}"] = str(state.limit)
            headers[f"x-ratelimit-remaining-{unit}"] = str(state.remaining)
            headers[f"x-ratelimit-reset-{unit}"] = _span(state.reset_s)
    return headers


def _span(seconds: float) -> str:
    """A duration as OpenAI writes it: `6m0s`, `1.5s`, `20ms`."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest)}s" if minutes else f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
