"""Rate limits: GCRA on a real Redis, all limits or none, and the same in one process alone."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis

from policies import LocalRateLimits, RateLimit, RateLimits
from tests.services import RedisServer

KEY = RateLimit("key:5", "requests", per_min=6, cost=1)
TEAM = RateLimit("team:2", "requests", per_min=60, cost=1)
TOKENS = RateLimit("team:2", "tokens", per_min=6000, cost=1000)


class Clock:
    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000

    def __call__(self) -> int:
        return self.now_us

    def wait(self, s: float) -> None:
        self.now_us += int(s * 1e6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def limits(redis: Redis, clock: Clock) -> RateLimits:
    return RateLimits(redis, clock)


async def test_a_minute_at_once_then_the_rate(limits: RateLimits, clock: Clock) -> None:
    """Six a minute: six at once, then one every ten seconds."""
    for left in (5, 4, 3, 2, 1, 0):
        decision = await limits.take("t", (KEY,))
        assert decision.is_allowed
        assert decision.states[0].remaining == left
    refused = await limits.take("t", (KEY,))
    assert not refused.is_allowed
    assert refused.retry_after_s == pytest.approx(10)
    assert refused.states[0].reset_s == pytest.approx(60)
    assert refused.refused_by == refused.states[0]
    clock.wait(9.99)
    assert not (await limits.take("t", (KEY,))).is_allowed
    clock.wait(0.01)
    assert (await limits.take("t", (KEY,))).is_allowed
    clock.wait(60)
    assert (await limits.take("t", (KEY,))).states[0].remaining == 5


async def test_all_limits_or_none(limits: RateLimits) -> None:
    """What the key's limit refuses is not charged to the team, and the other way round."""
    for _ in range(6):
        await limits.take("t", (KEY, TEAM, TOKENS))
    refused = await limits.take("t", (KEY, TEAM, replace(TOKENS, cost=1)))
    assert not refused.is_allowed
    assert [s.remaining for s in refused.states] == [0, 54, 0]
    assert (await limits.take("t", (TEAM,))).states[0].remaining == 53
    assert refused.tightest("requests").subject == "key:5"
    assert refused.tightest("tokens").limit == 6000
    assert refused.tightest("images") is None


async def test_scopes_and_units_do_not_mix(limits: RateLimits) -> None:
    """The same subject in another scope or unit has its own room."""
    await limits.take("t", (KEY,))
    assert (await limits.take("u", (KEY,))).states[0].remaining == 5
    assert (await limits.take("t", (replace(KEY, unit="tokens"),))).states[0].remaining == 5


async def test_what_can_never_pass_says_so(limits: RateLimits) -> None:
    """A request larger than a minute's worth has no time after which to try again."""
    refused = await limits.take("t", (KEY, replace(TOKENS, cost=6001)))
    assert not refused.is_allowed
    assert refused.retry_after_s is None
    assert refused.refused_by.unit == "tokens"


async def test_charges_are_corrected(limits: RateLimits, clock: Clock) -> None:
    """An estimate too high is given back, one too low is owed; never more back than was taken."""
    taken = (KEY, TOKENS)
    await limits.take("t", taken)
    await limits.charge("t", [(TOKENS, 400 - TOKENS.cost)])
    assert (await limits.take("t", (replace(TOKENS, cost=0),))).states[0].remaining == 5600
    await limits.charge("t", [(TOKENS, 10_000 - TOKENS.cost)])
    after = await limits.take("t", (replace(TOKENS, cost=0),))
    assert not after.is_allowed
    assert after.states[0].remaining == 0
    assert after.retry_after_s == pytest.approx((400 + 9000 - 6000) / 100)
    clock.wait(3600)
    await limits.charge("t", [(TOKENS, -TOKENS.cost)])
    assert (await limits.take("t", (replace(TOKENS, cost=0),))).states[0].remaining == 6000


async def test_keys_end_when_they_are_full_again(limits: RateLimits, redis: Redis) -> None:
    """Idle subjects cost no memory."""
    await limits.take("t", (KEY, TOKENS, replace(TEAM, cost=0)))
    lasting = {key: await redis.pttl(key) for key in await redis.keys()}
    assert set(lasting) == {b"sameway:{t}:rate:key:5:requests", b"sameway:{t}:rate:team:2:tokens"}
    assert all(0 < ms <= 10_002 for ms in lasting.values())


async def test_redis_own_clock_serves_all_hosts(redis: Redis) -> None:
    """Without an injected clock the limit holds too."""
    limits = RateLimits(redis)
    decisions = await asyncio.gather(*(limits.take("t", (KEY,)) for _ in range(20)))
    assert sum(v.is_allowed for v in decisions) == 6


async def test_no_limits_no_round_trip(clock: Clock) -> None:
    """Without limits nothing is asked of Redis."""
    assert (await RateLimits(None, clock).take("t", ())).is_allowed  # type: ignore[arg-type]


steps = st.lists(
    st.tuples(
        st.floats(0, 30),
        st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 5000), st.integers(0, 200)), max_size=3),
        st.none() | st.integers(0, 300),
    ),
    max_size=20,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=steps)
def test_alone_or_on_redis_the_verdicts_are_alike(redis_server: RedisServer, steps: list) -> None:
    """Any sequence of requests, waits and corrections: one process alone decides what Redis decides."""

    async def compare() -> None:
        client = Redis.from_url(redis_server.url)
        await client.flushall()
        clock = Clock()
        shared, local = RateLimits(client, clock), LocalRateLimits(lambda: clock.now_us / 1e6)
        for wait_s, wanted, actual in steps:
            clock.wait(wait_s)
            asked = tuple({s: RateLimit(s, "tokens", per_min, cost) for s, per_min, cost in wanted}.values())
            one, other = await shared.take("t", asked), local.take("t", asked)
            close = [abs(a.remaining - b.remaining) <= 1 for a, b in zip(one.states, other.states, strict=True)]
            assert all(close)
            if one.is_allowed != other.is_allowed:  # only where a limit is met to the µs
                assert (one.retry_after_s or other.retry_after_s) == pytest.approx(0, abs=1e-3)
                break
            if actual is not None:
                changed = [(limit, actual - limit.cost) for limit in asked if limit.cost != actual]
                if changed:
                    await shared.charge("t", changed)
                local.correct("t", asked, "tokens", actual)
        await client.aclose()

    asyncio.run(compare())


@settings(max_examples=60)
@given(per_min=st.integers(1, 100), gaps=st.lists(st.floats(0, 20), max_size=200))
def test_no_stretch_of_time_gets_more_than_a_burst_and_its_rate(per_min: int, gaps: list[float]) -> None:
    """In any stretch of t minutes at most per_min * (1 + t) pass, and with that wait honoured the next one does."""
    now_s, passed = 1000.0, []
    limits = LocalRateLimits(lambda: now_s)
    limit = RateLimit("a", "requests", per_min, 1)
    for gap in gaps:
        now_s += gap
        decision = limits.take("t", (limit,))
        if decision.is_allowed:
            passed.append(now_s)
        else:
            assert decision.retry_after_s is not None
            now_s += decision.retry_after_s + 1e-5
            assert limits.take("t", (limit,)).is_allowed
            passed.append(now_s)
    for first in range(len(passed)):
        count = len(passed) - first
        assert count <= per_min * (1 + (passed[-1] - passed[first]) / 60) + 1e-6 or count <= per_min
