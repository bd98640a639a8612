"""Leased rate limits: most requests cost no round trip, and a limit is kept to a five-hundredth per process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from policies import LeasedRateLimits, RateLimits
from policies.leased_limits import Limited
from policies.rate_limits import LimitDecision
from tests.services import RedisServer


class Counting:
    """A client that counts the scripts it sends, and can be away."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self.scripts = 0
        self.is_away = False

    async def execute_command(self, *args: Any) -> Any:
        return await self._client.execute_command(*args)

    async def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        if self.is_away:
            raise RedisConnectionError("away")
        self.scripts += 1
        return await self._client.eval(script, numkeys, *keys_and_args)


class Process:
    """One worker's limits, on a clock that it shares with Redis' scripts."""

    def __init__(self, client: Any, per_min: int, unit: str = "requests") -> None:
        self.now_s = 1_700_000_000.0
        self.redis = Counting(client)
        shared = RateLimits(self.redis, lambda: int(self.now_s * 1e6))
        self.limits = LeasedRateLimits(shared, lambda: self.now_s)
        self.limited: Limited = self.limits.limited("t", [("team:1", unit, per_min)])

    async def take(self, requests: int | None = 1, tokens: int | None = 0) -> LimitDecision:
        if self.limits.take_now(self.limited, requests, tokens):
            return self.limits.shown(self.limited, requests, tokens)
        return await self.limits.take(self.limited, requests, tokens)


async def test_most_requests_cost_no_round_trip(redis: Redis) -> None:
    """A large limit is leased a five-hundredth at a time, and what is shown as remaining counts down all the while."""
    process = Process(redis, per_min=50_000)
    seen = [(await process.take()).states[0].remaining for _ in range(1_000)]
    assert seen == list(range(49_999, 48_999, -1))
    assert process.redis.scripts == 10


async def test_a_small_limit_is_asked_for_each_time(redis: Redis) -> None:
    """What can't be shared out is exact: of six a minute six pass."""
    process = Process(redis, per_min=6)
    decisions = [(await process.take()).is_allowed for _ in range(8)]
    assert decisions == [True] * 6 + [False] * 2
    assert process.redis.scripts == 8


async def test_a_refused_request_takes_nothing(redis: Redis) -> None:
    """Where Redis refuses or is away, what this process held it still holds."""
    process = Process(redis, per_min=1_000, unit="tokens")
    assert (await process.take(None, 999)).is_allowed
    refused = await process.take(None, 50)
    assert not refused.is_allowed
    assert refused.retry_after_s == pytest.approx(50 / 1_000 * 60, abs=0.2)
    process.redis.is_away = True
    with pytest.raises(RedisConnectionError):
        await process.take(None, 50)
    process.redis.is_away = False
    assert (await process.take(None, 1)).is_allowed


async def test_corrections_stay_here_until_they_are_large(redis: Redis) -> None:
    """Small differences between expected and used tokens move this process's share; large ones reach Redis."""
    process = Process(redis, per_min=50_000, unit="tokens")
    await process.take(None, 10)
    assert process.limits.correct(process.limited, 10, 40) is None
    assert process.limits.correct(process.limited, 10, 10) is None
    assert (await process.take(None, 0)).states[0].remaining == 49_960
    scripts = process.redis.scripts
    correcting = process.limits.correct(process.limited, 0, 5_000)
    assert correcting is not None
    await correcting
    assert (await process.take(None, 0)).states[0].remaining == 44_960
    assert process.redis.scripts == scripts + 1
    process.now_s += 1.1  # what was heard is old by now: Redis is asked
    assert (await process.take(None, 0)).states[0].remaining == pytest.approx(44_960 + 50_000 / 60 * 1.1, abs=2)
    assert process.redis.scripts == scripts + 2


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.floats(0, 2), st.integers(1, 400), st.integers(0, 40)), min_size=1, max_size=40
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(per_min=st.sampled_from([300, 1_000, 20_000]), steps=STEPS)
def test_two_processes_keep_a_limit_together(redis_server: RedisServer, per_min: int, steps: list) -> None:
    """In any stretch of t minutes at most per_min * (1 + t) and a five-hundredth per process are used; and nobody is refused
    while more than that is left."""

    async def run() -> None:
        client = Redis.from_url(redis_server.url)
        await client.flushall()
        processes = [Process(client, per_min, "tokens") for _ in range(2)]
        used: list[tuple[float, int]] = []
        now_s = processes[0].now_s
        slack = 2 * (per_min // 500)
        for which, wait_s, cost, times in steps:
            now_s += wait_s
            for process in processes:
                process.now_s = now_s
            for _ in range(times):
                if (await processes[which].take(None, cost)).is_allowed:
                    used.append((now_s, cost))
                else:
                    arrival_s = 0.0  # the exact limit's theoretical arrival time
                    for at_s, amount in used:
                        arrival_s = max(arrival_s, at_s) + amount * 60 / per_min
                    assert (now_s + 60 - max(arrival_s, now_s)) * per_min / 60 - now_s * per_min / 60 < cost + slack + 1
        for i, (since_s, _) in enumerate(used):
            total = 0
            for at_s, amount in used[i:]:
                total += amount
                assert total <= per_min * (1 + (at_s - since_s) / 60) + slack + 1
        await client.aclose()

    asyncio.run(run())
