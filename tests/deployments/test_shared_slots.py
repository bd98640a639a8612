"""`concurrency_max` holds over all workers and hosts, through a real Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from cache.redis_link import RedisLink
from gateway.deployments.fleet import build_fleet
from gateway.deployments.shared_slots import SharedSlots
from gateway.deployments.slots import Slots, Ticket
from gateway.settings import Settings
from tests.services import RedisServer

LIMIT = 3


class Worker:
    """One worker's slots at a deployment of `LIMIT` slots, and its loop."""

    def __init__(self, url: str, folder: Path) -> None:
        deployment = {"name": "one", "backend": "openai", "base_url": "http://10.0.0.1/v1", "model": "m"}
        models: Any = {"mock": {"deployments": [deployment | {"price": {}, "concurrency_max": LIMIT}]}}
        no_embedder: Any = None
        fleet = build_fleet(Settings(data_dir=folder, models=models), lambda: 0.0, no_embedder)
        self.link = RedisLink(url, 1.0)
        self.shared = SharedSlots(fleet, self.link, workers=4)
        self.slots: Slots = fleet.deployments[0].slots
        self.served = 0

    async def request(self, running: set[int], peak: list[int]) -> None:
        """Take a slot when it is to be had, hold it for a moment, and give it back."""
        while not self.slots.take(1):
            ticket = Ticket(1, asyncio.get_running_loop().create_future())
            self.slots.join(ticket, is_first=False)
            await ticket.called
        running.add(id(asyncio.current_task()))
        peak.append(len(running))
        await asyncio.sleep(0.002)
        running.discard(id(asyncio.current_task()))
        self.served += 1
        self.slots.give_back(1)


@pytest.fixture
async def workers(redis_server: RedisServer, redis: Redis, tmp_path: Path) -> AsyncIterator[list[Worker]]:
    made = [Worker(redis_server.url, tmp_path) for _ in range(4)]
    yield made
    for worker in made:
        await worker.link.aclose()


async def test_all_workers_together_stay_within_the_limit_and_each_gets_its_part(workers: list[Worker]) -> None:
    """However many wait at each, no more than the limit run at once, all slots are used, and none of four waits for the others' end."""
    running, peak = set[int](), list[int]()
    loops = [asyncio.create_task(worker.shared.run()) for worker in workers]
    requests = [asyncio.create_task(worker.request(running, peak)) for worker in workers for _ in range(15)]
    done = asyncio.create_task(asyncio.wait(requests))
    while sum(worker.served for worker in workers) < 30:  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.005)
    assert all(worker.served >= 3 for worker in workers)
    await asyncio.wait_for(done, 20)
    for loop in loops:
        loop.cancel()
    assert max(peak) == LIMIT
    assert [worker.served for worker in workers] == [15] * 4


async def test_an_idle_worker_leaves_all_slots_to_others(workers: list[Worker]) -> None:
    """A worker may use the whole limit while nobody else wants some; asking is answered by what there is."""
    first, second, *_ = workers
    for worker in workers:
        await worker.shared.exchange()
    loop = asyncio.create_task(first.shared.run())
    for _ in range(LIMIT):
        assert first.slots.is_short or first.slots.granted
        while first.slots.is_short:
            await first.slots.ask()
        assert first.slots.take(1)
    loop.cancel()
    await second.shared.exchange()
    asked = asyncio.create_task(second.slots.ask())
    await asyncio.sleep(0)
    await second.shared.exchange()
    await asked
    assert (second.slots.granted, second.slots.is_refused, second.slots.is_full) == (0, True, True)
    first.slots.give_back(1)
    await first.shared.exchange()
    await second.shared.exchange()  # as each second: it may ask again
    again = asyncio.create_task(second.slots.ask())
    await asyncio.sleep(0)
    await second.shared.exchange()
    await again
    assert second.slots.take(1)


async def test_without_redis_each_worker_has_an_equal_part(workers: list[Worker], tmp_path: Path) -> None:
    """At least one slot; what ran before runs on."""
    away = Worker("redis://127.0.0.1:1", tmp_path)
    assert away.shared.limited()["one"].granted == 0
    with pytest.raises(RedisError):
        await away.shared.exchange()
    assert away.slots.granted == 1
    await away.link.aclose()
