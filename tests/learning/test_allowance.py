"""What may be spent on judging a team's answers: two percent of what the cache has saved it, over all workers and crashes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from redis.asyncio import Redis

from gateway.learning.allowance import Allowance

DAY_S = 86_400.0
SAVED = {1: 50_000}  # µUSD: the allowance is 1,000


class Days:
    """A clock, and the savings that the statistics have."""

    def __init__(self, saved: Mapping[int, int] = SAVED) -> None:
        self.now_s = 20_000 * DAY_S
        self.saved = dict(saved)

    async def savings(self) -> Mapping[int, int]:
        return dict(self.saved)

    def of(self, redis: Redis) -> Allowance:
        """The allowances of one more worker."""
        return Allowance(redis, self.savings, lambda: self.now_s)


async def test_workers_share_what_there_is(redis: Redis) -> None:
    """However they race, together they take no more than the allowance; another team's is its own."""
    days = Days({**SAVED, 2: 50_000})
    workers = [days.of(redis) for _ in range(4)]
    taken = await asyncio.gather(*(workers[number % 4].reserve(1, 70) for number in range(40)))
    assert sum(taken) * 70 == 980
    assert await workers[0].reserve(2, 1_000)
    assert not await workers[1].reserve(2, 1)


async def test_what_was_not_spent_comes_back_and_what_a_dead_worker_held_does_not(redis: Redis) -> None:
    """A worker killed between the reservation and its end leaves it spent: the cap holds."""
    days = Days()
    dead, alive = days.of(redis), days.of(redis)
    assert await dead.reserve(1, 600)
    assert await alive.reserve(1, 400)
    await alive.settle(1, 400, 150)
    assert await alive.state(1) == (750, 1_000)
    assert not await alive.reserve(1, 251)
    assert await alive.reserve(1, 250)


async def test_without_savings_nothing_is_spent(redis: Redis) -> None:
    """A team that the statistics do not have has saved nothing."""
    assert not await Days({}).of(redis).reserve(1, 1)


async def test_what_cannot_be_told_is_nothing() -> None:
    """Without Redis there is no allowance, and no error."""
    away: Redis = Redis.from_url("redis://127.0.0.1:1")
    assert not await Days().of(away).reserve(1, 1)
    await Days().of(away).settle(1, 1, 1)
    await away.aclose()


async def test_old_spending_leaves_the_window(redis: Redis) -> None:
    """Spending counts for thirty days, as savings do."""
    days = Days()
    one = days.of(redis)
    assert await one.reserve(1, 1_000)
    days.now_s += 29 * DAY_S
    assert not await one.reserve(1, 1)
    days.now_s += DAY_S
    assert await one.reserve(1, 1_000)
