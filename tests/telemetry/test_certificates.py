"""Certificates: when one starts, what counts for it, and that two workers agree."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from redis.asyncio import Redis

from gateway.accounts import Team
from gateway.journey.record import CacheFacts, Record, RequestFacts
from gateway.journey.semantic import Bounds
from gateway.settings import CacheSettings, Settings
from gateway.telemetry.measured_error import Certificate, Certificates, checked
from gateway.telemetry.stats import Stats

TEAM, PAIR = Team(1, "acme", 0.0), (1, "small")


@dataclass
class Clock:
    now_s: float = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


class Worker:
    """A worker's statistics and certificates."""

    def __init__(self, redis: Redis, clock: Clock, error_max: float = 0.01, judges: str = "equality") -> None:
        settings = Settings(cache=CacheSettings(error_max=error_max))
        self.clock = clock
        self.stats = Stats(redis, clock)
        self.certificates = Certificates(redis, self.stats, Bounds(settings), judges, clock)

    def serve(self, requests: int) -> None:
        """Requests of which every one is a semantic hit, and a check that no judge could tell."""
        for number in range(requests):
            request = RequestFacts(f"r{number}", self.clock.now_s, team_id=1, alias="small")
            self.stats.add(Record(request, cache=CacheFacts("semantic")))
        self.stats.add_checks(1, "small", checked(0.1, None, "", is_verified=False))

    async def look(self, embedder: str = "minilm", rule: str = "aa") -> Certificate:
        await self.stats.flush()
        return (await self.certificates.update([TEAM], embedder, rule))[PAIR]


async def test_two_workers_and_a_restart_count_for_one(redis: Redis) -> None:
    """A worker that starts later counts on; what it reads is the sum."""
    clock = Clock()
    one, other = Worker(redis, clock), Worker(redis, clock)
    one.serve(3)
    first = await one.look()
    assert (first.start.why, first.counts.requests, first.counts.hits, first.counts.open) == ("", 3, 3, 1)
    other.serve(2)
    clock.now_s += 7_200
    assert (await other.look()).counts.requests == 5
    again = Worker(redis, clock)
    await again.certificates.recall()
    again.serve(1)
    found = await again.look()
    assert found.start == first.start
    assert (found.counts.requests, found.counts.open) == (6, 3)
    assert (await one.certificates.read())[PAIR] == found


async def test_an_admins_new_one_counts_from_then_on(redis: Redis) -> None:
    """What a worker counted for the old one before it has looked is dropped."""
    clock = Clock()
    one, other = Worker(redis, clock), Worker(redis, clock)
    one.serve(3)
    await one.look()
    await other.look()
    clock.now_s += 60
    await one.certificates.restart(TEAM, "small", "an admin asked for it")
    one.serve(1)
    other.serve(5)  # it has not looked since
    await other.stats.flush()
    found = await one.look()
    assert (found.start.why, found.start.since_s) == ("an admin asked for it", clock.now_s)
    assert (found.counts.requests, found.counts.open) == (1, 1)
    assert (await other.look()).counts.requests == 1
    other.serve(5)
    assert (await other.look()).counts.requests == 6
    assert {id for _, id in await one.stats.certified()} == {found.start.id}


@pytest.mark.parametrize(
    ("changed", "look", "why"),
    [
        ({"error_max": 0.02}, {}, "the bound changed from 0.01 to 0.02"),
        ({"judges": "equality, m"}, {}, "the judges changed from equality to equality, m"),
        ({}, {"embedder": "other"}, "the embedder changed from minilm to other"),
        ({}, {"rule": "bb"}, "the rule changed from aa to bb"),
        ({}, {"embedder": "", "rule": ""}, ""),
    ],
)
async def test_a_changed_ground_starts_a_new_one(
    redis: Redis, changed: dict[str, float], look: dict[str, str], why: str
) -> None:
    """Bound, judges, embedder and rule; a cache worker that is away is no change, nor is one that is back."""
    clock = Clock()
    one = Worker(redis, clock)
    one.serve(3)
    before = await one.look()
    later = Worker(redis, clock, **changed)  # type: ignore[arg-type]
    await later.certificates.recall()
    clock.now_s += 60
    found = await later.look(**look)
    assert found.start.why == why
    assert (found.start.id == before.start.id) == (not why)
    assert (found.counts.requests, found.start.since_s == clock.now_s) == ((0, True) if why else (3, False))
    assert (await later.look()).start.id == found.start.id


async def test_a_deleted_teams_is_dropped(redis: Redis) -> None:
    """With its counts."""
    one = Worker(redis, Clock())
    one.serve(1)
    await one.look()
    assert await one.certificates.update([], "minilm", "aa") == {}
    assert await one.certificates.read() == {}
    assert await one.stats.certified() == {}


@pytest.mark.parametrize("data", [b"\xc1", b"\x84\xa2id\xa1\xff\xa7since_s\x01\xa5basis\x80\xa3why\xa0"])
async def test_one_that_can_not_be_read_starts_anew(redis: Redis, data: bytes) -> None:
    """Damaged bytes of a start stop no worker: a new certificate counts from then on."""
    worker = Worker(redis, Clock())
    worker.serve(2)
    before = await worker.look()
    await redis.hset("sameway:certificates", "1:small", data)
    await redis.hset("sameway:certificates", b"\xff", b"x")
    assert await worker.certificates.read() == {}
    worker.clock.now_s += 60
    worker.serve(1)
    after = await worker.look()
    assert after.start.id != before.start.id
    assert after.start.why == "its start could not be read"
    assert after.counts.requests == 0
    assert await redis.hkeys("sameway:certificates") == [b"1:small"]
