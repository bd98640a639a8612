"""From a real Redis into semantic caches: rebuilds, the log, and hosts that agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

import cache.exact.log
from cache import CacheLimits, ExactCache, Hit, MissReason, Purge, Trial
from cache.entry import wording_id
from cache.semantic.cache import SemanticCache
from cache.semantic.follower import Follower
from cache.semantic.index import FLAT_MAX, VectorIndex
from cache.verdicts import AnswerRef, Source, Verdict, VerdictStore
from tests.cache.fakes import ACME, OTHER, FakeEmbedder, ask, entry_for, query
from tests.services import run_redis


class Host:
    """A semantic cache that follows Redis, as a cache worker does. `flat_max`: keys of a namespace that are searched one by one."""

    def __init__(
        self, redis: Redis, thread: ThreadPoolExecutor, key: bytes = b"fakefake", flat_max: int = FLAT_MAX
    ) -> None:
        self.embedder = FakeEmbedder()
        self.cache = SemanticCache(self.embedder, index=VectorIndex(16, flat_max=flat_max))
        self.follower = Follower(redis, self.cache, thread, key)

    async def sees(self, *texts: str) -> list[bool]:
        await self.follower.follow()
        return [isinstance(answer, Hit) for answer in self.cache.lookup([query(text.upper()) for text in texts])]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def exact(redis: Redis) -> ExactCache:
    return ExactCache(redis)


async def put(exact: ExactCache, *texts: str, ttl_s: float = 60.0) -> None:
    for text in texts:
        await exact.store(entry_for(ask(text), time.time(), ttl_s=ttl_s))


async def test_a_store_is_seen_and_a_purge_too(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """By a host that follows, and by one that starts afterwards."""
    host = Host(redis, thread)
    assert await host.sees("one", "two") == [False, False]
    await put(exact, "one", "two")
    assert await host.sees("one", "two") == [True, True]
    await exact.purge(Purge(text="one"))
    assert await host.sees("one", "two") == [False, True]
    assert await Host(redis, thread).sees("one", "two") == [False, True]


async def test_what_redis_sent_is_folded_before_a_lookup(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """A host that listens has what was stored, without a command of the lookup's own."""
    host = Host(redis, thread)
    await host.follower.catch_up()
    assert not host.follower.is_following
    await host.follower.follow()
    listening = asyncio.create_task(host.follower.listen())
    for text in ("one", "two", "three"):
        await put(exact, text)
        async with asyncio.timeout(30):
            while not isinstance(host.cache.lookup([query(text.upper())])[0], Hit):
                await asyncio.sleep(0.001)
                await host.follower.catch_up()
    listening.cancel()


async def test_two_hosts_and_a_rebuilt_one_agree(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """Whatever is stored, replaced, evicted and purged, in every partition: the same answers to everything."""
    small = ExactCache(redis, CacheLimits(size_bytes_max=12_000))
    early, late = Host(redis, thread), Host(redis, thread, flat_max=4)  # one with lists made beside the work
    await early.follower.follow()
    for number in range(12):
        for tenant in (ACME, OTHER):
            await small.store(entry_for(ask(f"text {number % 9}", tenant), time.time(), "x" * 200))
        if number % 4 == 1:
            await late.follower.follow()
            await small.purge(Purge(text=f"text {number - 1}"))
    rebuilt = Host(redis, thread, flat_max=3)
    questions = [query(f"TEXT {number}", tenant) for number in range(9) for tenant in (ACME, OTHER)]
    answers = []
    for host in (early, late, rebuilt):
        await host.follower.follow()
        answers.append(host.cache.near(questions, 16))
    assert answers[0] == answers[1] == answers[2]
    assert any(isinstance(answer.decision, Hit) for answer in answers[0])
    entries = (await small.stats()).entries
    assert entries < 18
    assert len(early.cache) == len(late.cache) == len(rebuilt.cache) == entries


async def test_vectors_are_kept_and_nothing_is_embedded_twice(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """A rebuild takes them from Redis; another model does not; they go with their entry."""
    first = Host(redis, thread)
    await put(exact, "one", "two", "three")
    assert await first.sees("one", "two") == [True, True]
    while first.cache.settle():
        pass
    await first.follower.follow()
    again = Host(redis, thread)
    await again.follower.follow()
    assert again.cache.is_settled
    again.cache.lookup([query("four")])
    assert again.embedder.encoded == ["four"]
    other_model = Host(redis, thread, b"otherkey")
    await other_model.follower.follow()
    other_model.cache.lookup([query("four")])
    assert sorted(other_model.embedder.encoded) == ["four", "one", "three", "two"]
    await exact.purge(Purge())
    assert not await redis.exists(f"sameway:{{{ACME.hex()}}}:vectors")


async def test_vectors_of_another_embedder_are_named_in_the_log(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    """A host that finds them says so once and makes its own; none of its searches compares the two kinds."""
    first, other = Host(redis, thread), Host(redis, thread, b"bfloat16")
    await put(exact, "one", "two")
    assert await first.sees("one") == [True]
    await first.follower.follow()
    assert caplog.messages == []
    assert await other.sees("one", "two") == [True, True]
    assert sorted(other.embedder.encoded) == ["ONE", "TWO", "one", "two"]
    await put(exact, "three")
    assert await other.sees("three") == [True]
    (said,) = caplog.messages
    assert "cache.precision" in said


async def test_a_vector_of_a_purged_entry_is_not_kept(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """Made before the purge, written after it: nothing is left behind."""
    host = Host(redis, thread)
    await put(exact, "one")
    await host.follower.follow()
    host.cache.lookup([query("one")])
    await exact.purge(Purge())
    await host.follower.follow()
    assert not await redis.exists(f"sameway:{{{ACME.hex()}}}:vectors")


async def test_an_emptied_redis_empties_the_index(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """Lost data is noticed by its name, although the log goes on."""
    host = Host(redis, thread)
    await put(exact, "one")
    assert await host.sees("one") == [True]
    await redis.flushall()
    await put(exact, "two")
    await host.follower.follow()
    assert await host.sees("one", "two") == [False, True]
    assert len(host.cache) == 1


async def test_a_follower_that_fell_behind_the_log_rebuilds(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records that were trimmed away unread are made up for by a scan."""
    monkeypatch.setattr(cache.exact.log, "LOG_LENGTH_MAX", 50)
    monkeypatch.setattr(cache.exact.log, "READ_COUNT", 10)
    host = Host(redis, thread)
    await put(exact, "gone", "kept")
    assert await host.sees("gone", "kept") == [True, True]
    await exact.purge(Purge(text="gone"))
    for number in range(400):
        await exact.store(entry_for(ask(f"filler {number}", OTHER), time.time()))
    assert await redis.xlen("sameway:cache:log") < 400
    for _ in range(3):
        await host.follower.follow()
    assert await host.sees("gone", "kept") == [False, True]
    assert len(host.cache) == 401


async def test_expired_entries_are_not_rebuilt(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """Nor found by who followed."""
    host = Host(redis, thread)
    await put(exact, "short", ttl_s=0.3)
    await put(exact, "long")
    assert await host.sees("long") == [True]
    time.sleep(0.3)  # noqa: ASYNC251
    assert await host.sees("short", "long") == [False, True]
    late = Host(redis, thread)
    assert await late.sees("short", "long") == [False, True]
    assert len(late.cache) == 1


async def test_unknown_records_and_entries_are_passed_over(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """Another version of the software may write beside this one."""
    host = Host(redis, thread)
    await put(exact, "one")
    await redis.xadd("sameway:cache:log", {"r": b"\xc1"})
    await redis.xadd("sameway:cache:log", {"other": b"field"})
    await redis.hset(f"sameway:{{{ACME.hex()}}}:about", "x" * 16, b"0000000001garbage")
    await redis.zadd("sameway:cache:partitions", {b"short": 1})
    await put(exact, "two")
    assert await host.sees("one", "two") == [True, True]
    assert await Host(redis, thread).sees("one", "two") == [True, True]


async def test_redis_away_leaves_the_index_as_it_was(thread: ThreadPoolExecutor) -> None:
    """It says so, answers from what is there, and follows again when Redis is back."""
    with run_redis(is_durable=True) as server:
        redis = Redis.from_url(server.url, socket_timeout=3, retry=Retry(NoBackoff(), 0))
        exact, host = ExactCache(redis), Host(redis, thread)
        await put(exact, "one")
        assert await host.sees("one") == [True]
        for strike, heal in ((server.kill, server.start), (server.pause, server.resume)):
            strike()
            await host.follower.follow()
            assert not host.follower.is_up
            assert host.follower.failure
            assert await host.sees("one") == [True]
            heal()
            assert await host.sees("one") == [True]
            assert host.follower.is_up
        await put(exact, "two")
        assert await host.sees("two") == [True]
        await redis.aclose()


async def test_progress_tells_how_far_a_rebuild_is(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """All of what there was, at its end."""
    await put(exact, *(f"text {number}" for number in range(30)))
    host = Host(redis, thread)
    assert host.follower.progress.share == 0.0
    await host.follower.follow()
    assert (host.follower.progress.done, host.follower.progress.total) == (30, 30)
    (near,) = host.cache.near([query("x")], 50)
    assert near.decision.reason is MissReason.NUMBERS  # type: ignore[union-attr]


async def test_a_wording_follows_and_is_rebuilt(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """Two hosts serve the entry's answer for it after the second yes, and neither once the entry is gone."""
    host, entry, asked = Host(redis, thread), entry_for(ask("one"), time.time()), ask("open the lid")
    await exact.store(entry)
    await exact.store(entry.worded(asked.exact, "open the lid", ""))
    first = (wording_id(asked.exact), b"")
    found = []
    for wordings in (first, (b"v" * 16, first[0])):
        verdict = Verdict(
            source=Source.VERIFIER,
            compat=entry.compat,
            is_right=True,
            trial=Trial((), b"", 0.0, 1.0, b""),
            at=time.time(),
            wordings=wordings,
        )
        await VerdictStore(redis).take(ACME, str(wordings), verdict, AnswerRef(entry.exact, entry.created_at))
        found.append(await host.sees("open the lid"))
    assert found == [[False], [True]]
    again = Host(redis, thread)
    assert await again.sees("open the lid") == [True]
    await exact.purge(Purge(text="one"))
    assert await host.sees("open the lid") == await again.sees("open the lid") == [False]


def told(host: Host) -> tuple[float, float]:
    """The hits that the host's next comparison tells, and the errors to expect of them."""
    decision = host.cache.near([query("what one thing")], 8)[0].decision
    assert not isinstance(decision, Hit)
    assert decision.trial is not None
    served, risked = np.frombuffer(decision.trial.features, "<f4")[-2:].tolist()
    return served, round(risked, 4)


async def follow(*hosts: Host) -> None:
    """As long as it takes to see that another has ended."""
    for _ in range(45):
        for host in hosts:
            await host.follower.follow()


async def test_what_a_killed_worker_has_served_is_told_by_another(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """Once: by one of those that live, also after a rebuild there. What a worker told itself is not told again, and one that
    was only silent leaves what was taken to that other."""
    silent, ended, living, last = hosts = [Host(redis, thread) for _ in range(4)]
    await put(exact, "one thing", "two things")
    for host in hosts:
        assert await host.sees("one thing") == [True]
    assert told(living) == (1, 0.01)
    assert told(living) == (0, 0)
    assert await silent.sees("one thing", "two things") == [True, True]
    for _ in range(4):
        for host in hosts:
            await host.follower.follow()
    del ended
    await follow(living, last)  # take over 1 and 3
    assert await silent.sees("one thing") == [True]
    await follow(silent, living, last)
    last.cache.forget_verdicts()
    sums = [told(host) for host in (silent, living, last)]
    assert sums[0] == (1, 0.01)
    assert sum(served for served, _ in sums) == 1 + 1 + 3 + 1
    assert sum(risked for _, risked in sums) == pytest.approx(0.06)
    await follow(silent, living, last)
    assert [told(host) for host in (silent, living, last)] == [(0, 0)] * 3
    assert await redis.hlen("sameway:cache:untold") == 0
