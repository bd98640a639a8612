"""The exact cache against a real Redis: what is served, what is refused, what a purge leaves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from cache import CacheLimits, CacheUnavailable, Entry, ExactCache, Purge, fingerprint
from cache.eligibility import Refusal
from cache.entry import CURATED, CURATED_TTL_S, TAGS
from cache.exact import LookupMiss
from cache.exact.store import EntryStore
from tests.cache.fakes import ACME, OTHER, Clock, ask, entry_for
from tests.services import RedisServer, run_redis


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def exact(redis: Redis, clock: Clock) -> ExactCache:
    return ExactCache(redis, clock=clock)


def subscribing(url: str) -> Any:
    @asynccontextmanager
    async def subscribe(channel: str) -> AsyncIterator[Any]:
        client = Redis.from_url(url, socket_connect_timeout=1.0, retry=Retry(NoBackoff(), 0))
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(channel)
            yield pubsub
        finally:
            await pubsub.aclose()
            await client.aclose()

    return subscribe


@asynccontextmanager
async def following(cache: ExactCache, url: str) -> AsyncIterator[ExactCache]:
    """The cache with its L1 on: it follows purges and has heard itself."""
    task = asyncio.create_task(cache.follow_purges(subscribing(url)))
    try:
        await until(lambda: cache.is_l1_on)
        yield cache
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_what_was_stored_is_found_whole(exact: ExactCache, clock: Clock) -> None:
    """Chunks, labels and times come back as they went in, to the very same request only."""
    fp = ask("Why?")
    entry = entry_for(fp, clock.now, labels={"model": "m", "cost_microusd": 12})
    result = await exact.store(entry)
    assert result.refusal is None
    assert result.evicted == 0
    found = await exact.lookup(fp)
    assert found.entry == entry
    assert found.miss is None
    for stranger in (ask("How?"), ask("Why?", OTHER), ask("Why?", seed=1)):
        assert (await exact.lookup(stranger)).miss is LookupMiss.ABSENT


async def test_entries_expire_and_a_hit_does_not_prolong_them(exact: ExactCache, clock: Clock) -> None:
    """The TTL counts from creation."""
    fp = ask("Why?")
    await exact.store(entry_for(fp, clock.now, ttl_s=60.0))
    for _ in range(5):
        clock.now += 10
        assert (await exact.lookup(fp)).entry is not None
    clock.now += 10
    assert (await exact.lookup(fp)).miss is LookupMiss.EXPIRED


async def test_redis_forgets_a_partition_whose_entries_expired(redis: Redis) -> None:
    """Redis' own clock removes all keys of an idle partition, the accounting too."""
    exact = ExactCache(redis, CacheLimits(warm_ttl_s=0.05))
    fp = ask("Why?")
    await exact.store(entry_for(fp, time.time(), ttl_s=0.1), warm="gpu", chain=fp.chain)
    assert await redis.keys(f"*{ACME.hex()}*")
    async with asyncio.timeout(20):
        while await redis.keys(f"*{ACME.hex()}*"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_max_age_refuses_what_is_older(exact: ExactCache, clock: Clock) -> None:
    """An entry too old for this caller stays for others."""
    fp = ask("Why?")
    await exact.store(entry_for(fp, clock.now))
    clock.now += 10
    assert (await exact.lookup(fp, max_age_s=9)).miss is LookupMiss.TOO_OLD
    assert (await exact.lookup(fp, max_age_s=10)).entry is not None


async def test_the_ttl_has_a_ceiling(redis: Redis, clock: Clock) -> None:
    """Nobody stores for longer than the configuration allows, nor what has expired already."""
    exact = ExactCache(redis, CacheLimits(ttl_s_max=5), clock)
    fp = ask("Why?")
    await exact.store(entry_for(fp, clock.now, ttl_s=1e9))
    assert (await exact.lookup(fp)).entry is not None
    clock.now += 5
    assert (await exact.lookup(fp)).miss is LookupMiss.EXPIRED
    assert (await exact.store(entry_for(fp, clock.now - 10, ttl_s=1.0))).refusal is Refusal.TTL


async def test_a_newer_answer_replaces_the_older(exact: ExactCache, clock: Clock) -> None:
    """And is not counted twice."""
    fp = ask("Why?")
    await exact.store(entry_for(fp, clock.now, "old " * 100))
    await exact.store(entry_for(fp, clock.now, "new"))
    found = await exact.lookup(fp)
    assert found.entry is not None
    assert found.entry.chunks[0].data == b"new"
    stats = await exact.stats()
    assert stats.entries == 1
    await exact.purge(Purge())
    assert (await exact.stats()).size_bytes == 0


def _curated(text: str, now: float, answer: str = "as we say") -> Entry:
    return entry_for(ask(text), now, answer, ttl_s=CURATED_TTL_S, labels={CURATED: 1})


async def test_a_curated_answer_neither_expires_nor_gives_way(
    redis: Redis, redis_server: RedisServer, clock: Clock
) -> None:
    """No time, no generated answer and no want of room ends it; a newer one of an operator and a purge do."""
    exact = ExactCache(redis, CacheLimits(ttl_s_max=60, size_bytes_max=20_000), clock)
    async with following(exact, redis_server.url):
        assert (await exact.store(_curated("Why?", clock.now))).refusal is None
        clock.now += 10 * 365 * 86_400
        held = (await exact.lookup(ask("Why?"))).entry
        exact.store_local(entry_for(ask("Why?"), clock.now, "generated"))
        assert exact.lookup_local(ask("Why?")) == held
        assert (await exact.store(entry_for(ask("Why?"), clock.now, "generated"))).refusal is Refusal.CURATED
        for n in range(30):
            assert (await exact.store(entry_for(ask(f"{n}?"), clock.now, "x" * 3_000))).refusal is None
        found = (await exact.lookup(ask("Why?"))).entry
        assert found is not None
        assert (found.chunks[0].data, found.is_curated) == (b"as we say", True)
        assert (await exact.store(_curated("Why?", clock.now, "as we say now"))).refusal is None
        await until(lambda: exact.lookup_local(ask("Why?")) is None)
        found = (await exact.lookup(ask("Why?"))).entry
        assert found is not None
        assert found.chunks[0].data == b"as we say now"
        await exact.purge(Purge())
        assert ((await exact.stats()).entries, (await exact.stats()).size_bytes) == (0, 0)


async def test_curated_answers_leave_the_size_budget_as_it_is(redis: Redis, clock: Clock) -> None:
    """What does not fit beside them is refused, theirs or not, and the accounting stays exact."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=20_000), clock)
    results = [await exact.store(_curated(f"{n}?", clock.now, "x" * 3_000)) for n in range(6)]
    assert [one.refusal for one in results] == [None] * 4 + [Refusal.TOO_LARGE] * 2
    assert (await exact.store(entry_for(ask("Why?"), clock.now, "y" * 3_000))).refusal is Refusal.TOO_LARGE
    stats = await exact.stats()
    assert (stats.entries, stats.size_bytes) == (4, sum(one.size_bytes for one in results[:4]))


async def test_a_purge_by_tag_finds_what_has_it(exact: ExactCache, clock: Clock) -> None:
    """Among several tags, as a whole, together with other conditions."""
    for text, tags in (("Why?", "a\nprice list"), ("How?", "price list"), ("Who?", "price"), ("Where?", "")):
        await exact.store(entry_for(ask(text), clock.now, labels={TAGS: tags} if tags else {}))
    assert (await exact.purge(Purge(tag="price list"), is_dry_run=True)).count == 2
    assert (await exact.purge(Purge(tag="price list", text="why?"))).count == 1
    assert (await exact.purge(Purge(tag="price list"))).count == 1
    assert {entry.text for entry in await _all(exact)} == {"Who?", "Where?"}


async def _all(exact: ExactCache) -> list[Entry]:
    return [
        found.entry for text in ("Why?", "How?", "Who?", "Where?") if (found := await exact.lookup(ask(text))).entry
    ]


async def test_garbage_in_redis_is_a_miss(exact: ExactCache, redis: Redis, clock: Clock) -> None:
    """An entry that can't be read, or belongs elsewhere, is never served."""
    fp = ask("Why?")
    key = f"sameway:{{{ACME.hex()}}}:entries"
    for garbage in (b"", b"\xc1", b"x" * 100, entry_for(ask("How?", OTHER), clock.now).encode()):
        await redis.execute_command("HSET", key, fp.exact, garbage)
        assert (await exact.lookup(fp)).miss is LookupMiss.UNREADABLE


async def test_the_longest_known_prefix_is_the_warm_hint(exact: ExactCache, clock: Clock) -> None:
    """A continuation learns who saw its start; the deepest link wins; a stranger learns nothing."""
    turns = [{"role": role, "content": str(i)} for i, role in enumerate(["system", "user", "assistant", "user"] * 20)]

    def dialogue(length: int, tenant: Any = ACME) -> Any:
        return fingerprint({"model": "m", "messages": turns[:length]}, tenant)

    first = dialogue(2)
    await exact.store(entry_for(first, clock.now), warm="gpu-0", chain=first.chain)
    hinted = await exact.lookup(dialogue(4))
    assert (hinted.warm, hinted.warm_depth) == ("gpu-0", 2)
    await exact.store_warm(dialogue(4), "gpu-1")
    hinted = await exact.lookup(dialogue(6))
    assert (hinted.warm, hinted.warm_depth) == ("gpu-1", 4)
    far = await exact.lookup(dialogue(80))  # too far for the latest links: the first is asked for all the same
    assert (far.warm, far.warm_depth) == ("gpu-1", 1)
    assert (await exact.lookup(dialogue(4, OTHER))).warm is None
    shared = fingerprint({"model": "m", "messages": [turns[0], {"role": "user", "content": "else"}]}, ACME)
    assert (await exact.lookup(shared)).warm_depth == 1


steps_of = st.tuples(st.integers(0, 12), st.integers(1, 3000), st.sampled_from([0, 0, 900, 50_000]), st.integers(0, 3))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(steps_of, min_size=1, max_size=25), st.sampled_from([2, 3_600, 40_000]))
async def test_the_size_budget_is_never_exceeded(
    redis_server: RedisServer, steps: list[tuple[int, int, int, int]], pause_s: int
) -> None:
    """Whatever is stored and looked up: bytes stay under the budget and are the sum of what is there; out goes what has been worth
    least lately, by every use's saving for a byte, halved every six hours."""
    redis = Redis.from_url(redis_server.url)
    await redis.flushall()
    clock = Clock()
    budget = 8_000
    exact = ExactCache(redis, CacheLimits(size_bytes_max=budget), clock, monotonic=clock)
    scores: dict[bytes, float] = {}  # when each counts as used, ms
    sizes: dict[bytes, int] = {}
    worths: dict[bytes, float] = {}

    def used_at(one: bytes, worth: float) -> float:
        now, half_life = int(clock.now * 1_000), 6 * 3_600_000
        left = 2 ** ((scores[one] - now) / half_life) if one in scores else 0.0
        return round(now + half_life * math.log2(left + worth))

    for number, length, saves, uses in steps:
        clock.now += pause_s
        fp = ask(str(number))
        if uses:
            for _ in range(uses):
                assert ((await exact.lookup(fp)).entry is not None) is (fp.exact in scores)
            if fp.exact in scores:
                scores[fp.exact] = used_at(fp.exact, uses * worths[fp.exact])
            await exact.flush_touches()
        else:
            entry = entry_for(fp, clock.now, "x" * length, ttl_s=1e7, saves=saves)
            result = await exact.store(entry)
            assert result.refusal is None
            scores[fp.exact] = used_at(fp.exact, entry.worth)
            sizes[fp.exact], worths[fp.exact] = result.size_bytes, entry.worth
            others = sorted((scores[one], one) for one in scores if one != fp.exact)
            while sum(sizes[one] for one in scores) > budget:
                del scores[others.pop(0)[1]]
        stats = await exact.stats()
        assert stats.size_bytes == sum(sizes[one] for one in scores) <= budget
        stored = [one.exact async for batch in EntryStore(redis).scan(ACME) for one in batch]
        assert sorted(stored) == sorted(scores)
    await redis.aclose()


@pytest.mark.parametrize("kept", ["often", "dear", "small"])
async def test_what_is_worth_most_stays(redis: Redis, clock: Clock, kept: str) -> None:
    """What is asked often, was dear or is small outlives what came after it; a week later it does not."""
    for is_later in (False, True):
        await redis.flushall()
        exact = ExactCache(redis, CacheLimits(size_bytes_max=16_000, ttl_s_max=1e9), clock)
        fp, long = ask("the one"), {"ttl_s": 1e9, "saves": 1_000}
        size = 300 if kept == "small" else 2_000
        dear = {"saves": 500_000} if kept == "dear" else {}
        await exact.store(entry_for(fp, clock.now, "x" * size, **{**long, **dear}))
        for _ in range(20 if kept == "often" else 0):
            await exact.lookup(fp)
        await exact.flush_touches()
        clock.now += 7 * 86_400 if is_later else 60
        for number in range(12):
            await exact.store(entry_for(ask(f"filler {number}"), clock.now, "y" * 2_000, **long))
        assert ((await exact.lookup(fp)).entry is None) is is_later


@pytest.mark.parametrize("is_served", [True, False])
async def test_only_what_is_served_is_worth_more(redis: Redis, clock: Clock, is_served: bool) -> None:
    """An answer that others only look at, as drafts and guesses do, goes when its time has come."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=16_000), clock)
    fp = ask("the one")
    await exact.store(entry_for(fp, clock.now, "x" * 2_000, ttl_s=1e6, saves=1_000))
    for _ in range(20):
        assert (await exact.lookup_entry(fp, fp.exact, is_served=is_served)).entry is not None
    await exact.flush_touches()
    clock.now += 60
    for number in range(12):
        await exact.store(entry_for(ask(f"filler {number}"), clock.now, "y" * 2_000, ttl_s=1e6, saves=1_000))
    assert ((await exact.lookup(fp)).entry is not None) is is_served


async def test_one_tenant_does_not_evict_another(redis: Redis, clock: Clock) -> None:
    """The budget is for each partition."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=10_000), clock)
    theirs = ask("Why?", OTHER)
    await exact.store(entry_for(theirs, clock.now))
    for number in range(50):
        await exact.store(entry_for(ask(str(number)), clock.now, "x" * 1000))
    assert (await exact.lookup(theirs)).entry is not None


async def test_an_answer_over_the_limit_is_refused(redis: Redis, clock: Clock) -> None:
    """Neither the entry limit nor the budget can be passed by one entry, and nothing is evicted for it."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=5_000, entry_bytes_max=100_000), clock)
    await exact.store(entry_for(ask("small"), clock.now))
    assert (await exact.store(entry_for(ask("big"), clock.now, "x" * 6_000))).refusal is Refusal.TOO_LARGE
    assert (await exact.lookup(ask("small"))).entry is not None


async def test_expired_entries_give_their_bytes_back_first(redis: Redis, clock: Clock) -> None:
    """A store sweeps what expired before it evicts what lives."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=7_000), clock)
    living = ask("living")
    await exact.store(entry_for(living, clock.now, "x" * 1000, ttl_s=1000))
    await exact.store(entry_for(ask("dying"), clock.now, "x" * 2000, ttl_s=5))
    clock.now += 10
    assert (await exact.store(entry_for(ask("new"), clock.now, "x" * 1500))).evicted == 0
    assert (await exact.lookup(living)).entry is not None
    assert (await exact.stats()).entries == 2


PURGES: list[tuple[Callable[[Clock], Purge], set[str]]] = [
    (lambda clock: Purge(), {"a", "b", "c", "d"}),
    (lambda clock: Purge(partition=ACME), {"a", "b", "c"}),
    (lambda clock: Purge(partition=OTHER), {"d"}),
    (lambda clock: Purge(id=ask("b").id), {"b"}),
    (lambda clock: Purge(id="no hex"), set()),
    (lambda clock: Purge(text="  A "), {"a"}),
    (lambda clock: Purge(namespace="n"), {"c"}),
    (lambda clock: Purge(labels=(("model", "large"),)), {"b", "d"}),
    (lambda clock: Purge(partition=ACME, labels=(("model", "large"),)), {"b"}),
    (lambda clock: Purge(older_than_s=50), {"a"}),
    (lambda clock: Purge(text="a", labels=(("model", "large"),)), set()),
]


@pytest.mark.parametrize(("purge_at", "expected"), PURGES)
async def test_a_purge_removes_what_matches_everywhere(
    redis: Redis, redis_server: RedisServer, clock: Clock, purge_at: Callable[[Clock], Purge], expected: set[str]
) -> None:
    """A dry run only counts; the purge removes exactly what matches, from Redis and from every process' L1, before it returns."""
    purger, reader = ExactCache(redis, clock=clock), ExactCache(redis, clock=clock)
    named = fingerprint({"model": "m", "messages": [{"role": "user", "content": "c"}]}, ACME, "n")
    fps = {"a": ask("a"), "b": ask("b"), "c": named, "d": ask("d", OTHER)}
    labels = {"b": {"model": "large"}, "d": {"model": "large"}}
    async with following(purger, redis_server.url), following(reader, redis_server.url):
        await purger.store(entry_for(fps["a"], clock.now - 55))
        for name in ("b", "c", "d"):
            await purger.store(entry_for(fps[name], clock.now, labels=labels.get(name, {})))
        entries = {name: (await reader.lookup(fp)).entry for name, fp in fps.items()}
        for fp in fps.values():
            assert (await reader.lookup(fp)).entry is not None
            assert reader.lookup_local(fp) is not None
        dry = await purger.purge(purge_at(clock), is_dry_run=True)
        assert dry.count == len(expected)
        assert {sample.id for sample in dry.samples} == {fps[name].id for name in expected}
        assert all(reader.lookup_local(fp) is not None for fp in fps.values())
        before = (await purger.stats()).size_bytes
        done = await purger.purge(purge_at(clock))
        assert (done.count, done.size_bytes) == (dry.count, dry.size_bytes)
        for name, fp in fps.items():
            assert (reader.lookup_local(fp) is None) is (name in expected)
            assert (purger.lookup_local(fp) is None) or name not in expected
            assert ((await reader.lookup(fp)).entry is None) is (name in expected)
        assert (await purger.stats()).size_bytes == before - done.size_bytes
        for name, entry in entries.items():  # as if its request had come before the purge, and then after it
            assert entry is not None
            late = await reader.store(entry, asked_at=clock.now - 1)
            assert (late.refusal is Refusal.PURGED) is reader.purges.reach(entry, clock.now - 1) is (name in expected)
            assert ((await purger.lookup(fps[name])).entry is None) is (name in expected)
            assert (await reader.store(entry, asked_at=clock.now + 1)).refusal is None


async def test_a_purge_counts_answers_and_no_wordings(exact: ExactCache, clock: Clock) -> None:
    """What else was asked for an answer goes with it; asked by its own words, it counts."""
    entry = entry_for(ask("a"), clock.now)
    for worded in (entry, *(entry.worded(bytes([number]) * 16, f"wording {number}", "") for number in range(3))):
        await exact.store(worded)
    by_words = await exact.purge(Purge(text="wording 0"))
    dry, done = await exact.purge(Purge(), is_dry_run=True), await exact.purge(Purge())
    assert [one.count for one in (by_words, dry, done)] == [1, 1, 1]
    assert [one.text for one in done.samples] == [entry.text]
    assert dry.size_bytes == done.size_bytes
    assert (await exact.stats()).size_bytes == 0


async def test_a_purge_leaves_nothing_to_read(exact: ExactCache, redis: Redis, clock: Clock) -> None:
    """Neither the entries' keys nor a word of the prompt in the log; the empty partition is forgotten once it is counted."""
    fp = ask("a secret prompt")
    await exact.store(entry_for(fp, clock.now, "a secret answer"))
    await exact.purge(Purge(text="a secret prompt"))
    assert await redis.keys(f"*{ACME.hex()}*") == []
    log = await redis.xrange("sameway:cache:log")
    assert len(log) == 2
    assert b"secret" not in b"".join(fields[b"r"] for _, fields in log)
    assert await redis.zcard("sameway:cache:partitions") == 1
    assert (await exact.stats()).partitions == ()
    assert await redis.zcard("sameway:cache:partitions") == 0


async def test_many_entries_are_purged_in_batches(exact: ExactCache, clock: Clock) -> None:
    """A purge of hundreds counts each once."""
    for number in range(701):
        await exact.store(entry_for(ask(str(number)), clock.now))
    done = await exact.purge(Purge(partition=ACME))
    assert done.count == 701
    assert len(done.samples) == 20
    stats = await exact.stats()
    assert (stats.entries, stats.size_bytes) == (0, 0)


async def test_the_l1_is_off_without_a_subscription(redis: Redis, redis_server: RedisServer, clock: Clock) -> None:
    """Not before purges are followed, and not after: then peek knows nothing, and lookups ask Redis."""
    exact = ExactCache(redis, clock=clock)
    fp = ask("Why?")
    exact.store_local(entry_for(fp, clock.now))
    assert exact.lookup_local(fp) is None
    async with following(exact, redis_server.url):
        exact.store_local(entry_for(fp, clock.now))
        assert exact.lookup_local(fp) is not None
    assert exact.lookup_local(fp) is None


async def test_the_l1_goes_off_when_redis_does_and_comes_back() -> None:
    """A lost connection empties it at once; a paused Redis, whose connection stays, within the heartbeat's patience."""
    with run_redis() as server:
        client = Redis.from_url(server.url, socket_timeout=0.5, retry=Retry(NoBackoff(), 0))
        ticks = Clock()
        exact = ExactCache(client, clock=Clock(), monotonic=ticks)
        fp = ask("Why?")
        async with following(exact, server.url):
            exact.store_local(entry_for(fp, Clock().now))
            assert exact.lookup_local(fp) is not None
            server.kill()
            await until(lambda: exact.lookup_local(fp) is None)
            server.start()
            await until(lambda: exact.is_l1_on)
            assert exact.lookup_local(fp) is None
            exact.store_local(entry_for(fp, Clock().now))
            server.pause()
            assert exact.lookup_local(fp) is not None
            ticks.now += 6
            assert exact.lookup_local(fp) is None
            assert exact.purges.reach(entry_for(fp, Clock().now), Clock().now)  # it may have missed a purge of it
            server.resume()
            await until(lambda: exact.is_l1_on)
            assert exact.purges.reach(entry_for(fp, Clock().now), Clock().now)
            assert not exact.purges.reach(entry_for(fp, Clock().now), Clock().now + 1)
        await client.aclose()


async def test_a_purge_during_a_lookup_keeps_the_answer_out_of_the_l1(
    redis: Redis, redis_server: RedisServer, clock: Clock
) -> None:
    """An answer that Redis gave before a purge is not put aside after it."""

    class Slow:
        """Holds the reply of HGET back until told."""

        def __init__(self) -> None:
            self.go = asyncio.Event()
            self.asked = asyncio.Event()

        async def execute_command(self, *args: Any) -> Any:
            reply = await redis.execute_command(*args)
            if args[0] == "HGET":
                self.asked.set()
                await self.go.wait()
            return reply

        async def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
            return await redis.eval(script, numkeys, *keys_and_args)

    slow = Slow()
    reader, purger = ExactCache(slow, clock=clock), ExactCache(redis, clock=clock)
    fp = ask("Why?")
    await purger.store(entry_for(fp, clock.now))
    async with following(reader, redis_server.url):
        pending = asyncio.create_task(reader.lookup(fp))
        await slow.asked.wait()
        await purger.purge(Purge())
        slow.go.set()
        await pending
        assert reader.lookup_local(fp) is None
        assert (await reader.lookup(fp)).miss is LookupMiss.ABSENT


async def test_a_semantic_hit_is_checked_and_a_dangling_one_reported(
    exact: ExactCache, redis: Redis, clock: Clock
) -> None:
    """`get` serves only the same partition and compat; what is gone is said to the indexes."""
    stored = ask("Why?")
    await exact.store(entry_for(stored, clock.now))
    found = await exact.lookup_entry(ask("How come?"), stored.exact)
    assert found.entry is not None
    assert (await exact.lookup_entry(ask("Why?", seed=1), stored.exact)).miss is LookupMiss.UNREADABLE
    assert (await exact.lookup(stored)).entry is not None
    assert (await exact.lookup_entry(ask("Why?", OTHER), stored.exact)).miss is LookupMiss.ABSENT
    store = EntryStore(redis)
    start = await store.log.end(b"e")
    assert (await exact.lookup_entry(ask("Why?"), stored.exact)).entry is not None
    gone = ask("gone")
    assert (await exact.lookup_entry(ask("Why?"), gone.exact)).miss is LookupMiss.ABSENT
    records = (await store.log.read(start, *await asyncio.gather(*store.log.listen(start)))).records
    assert [record.exacts for record in records] == [(gone.exact,)]


async def test_stores_of_one_moment_are_one_call_a_partition(redis: Redis, clock: Clock) -> None:
    """New partitions, an answer that replaces another and warm hints among them: as if one had come after the other."""
    exact = ExactCache(redis, CacheLimits(), clock)
    asks = [ask(f"Why {i}?") for i in range(4)]
    theirs = ask("Why?", OTHER)
    storing = [
        exact.store(entry_for(fp, clock.now, "1"), warm="gpu" if i else None, chain=fp.chain)
        for i, fp in enumerate(asks)
    ]
    storing += [exact.store(entry_for(asks[0], clock.now, "2")), exact.store(entry_for(theirs, clock.now))]
    results = await asyncio.gather(*storing)
    assert [result.refusal for result in results] == [None] * 6
    for fp, data in zip((*asks, theirs), (b"2", b"1", b"1", b"1"), strict=False):
        found = await exact.lookup(fp)
        assert found.entry is not None
        assert found.entry.chunks[0].data == data
    sizes = {one.partition: one for one in (await exact.stats()).partitions}
    assert sizes[ACME].entries == 4
    assert sizes[ACME].size_bytes == sum(result.size_bytes for result in results[1:5])
    assert sizes[OTHER].entries == 1
    assert (await exact.lookup(ask("Why 1?"))).entry is not None
    assert await redis.keys(f"*{ACME.hex()}*warm*")


async def test_a_store_whose_caller_left_is_stored_with_the_others(redis: Redis, clock: Clock) -> None:
    """Also in a partition that has to be listed first."""
    exact = ExactCache(redis, CacheLimits(), clock)
    left, stays = ask("left"), ask("stays")
    leaving, staying = (asyncio.create_task(exact.store(entry_for(fp, clock.now))) for fp in (left, stays))
    await asyncio.sleep(0)
    leaving.cancel()
    assert (await staying).refusal is None
    assert [(await exact.lookup(fp)).entry is not None for fp in (left, stays)] == [True, True]
    assert [one.entries for one in (await exact.stats()).partitions] == [2]


async def test_an_entry_may_evict_one_that_came_with_it(redis: Redis, clock: Clock) -> None:
    """The budget holds within one call too."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=14_500), clock)
    storing = [exact.store(entry_for(ask(f"Why {i}?"), clock.now, "x" * 5_000)) for i in range(5)]
    results = await asyncio.gather(*storing)
    assert sum(result.evicted for result in results) == 3
    assert (await exact.stats()).size_bytes == sum(result.size_bytes for result in results[:2])


async def test_a_form_of_an_answer_is_made_once(redis: Redis, redis_server: RedisServer, clock: Clock) -> None:
    """For all hits of the very answer that is held, and counted with it; again for another answer, and where none is held."""
    made: list[str] = []

    def make(entry: Entry) -> bytes:
        made.append(entry.chunks[0].data.decode())
        return b"x" * 1_000

    cache = ExactCache(redis, CacheLimits(l1_bytes_max=10_000), clock)
    fp = ask("Why?")
    first, second = entry_for(fp, clock.now, "1"), entry_for(fp, clock.now, "2")
    cache.derived(first, "whole", make)
    async with following(cache, redis_server.url):
        cache.store_local(first)
        before = cache.l1_bytes
        assert [cache.derived(first, "whole", make) for _ in range(3)] == [b"x" * 1_000] * 3
        assert cache.derived(first, "events", make) == b"x" * 1_000
        assert made == ["1", "1", "1"]
        assert cache.l1_bytes == before + 2_000
        cache.store_local(second)
        assert cache.l1_bytes == before
        cache.derived(second, "whole", make)
        cache.derived(first, "whole", make)
        assert made[3:] == ["2", "1"]
        for number in range(30):
            other = entry_for(ask(str(number)), clock.now)
            cache.store_local(other)
            cache.derived(other, "whole", make)
            assert cache.l1_bytes <= 10_000
        cache.take(CacheLimits(l1_bytes_max=5_000))
        assert 0 < cache.l1_bytes <= 5_000
        await cache.purge(Purge())
        assert cache.l1_bytes == 0


async def test_the_l1_is_bounded(redis: Redis, redis_server: RedisServer, clock: Clock) -> None:
    """In entries and in bytes, least recently used out first."""
    limits = CacheLimits(l1_entries_max=3, l1_bytes_max=20_000)
    exact = ExactCache(redis, limits, clock)
    fps = [ask(str(number)) for number in range(5)]
    async with following(exact, redis_server.url):
        for fp in fps[:3]:
            exact.store_local(entry_for(fp, clock.now))
        assert exact.lookup_local(fps[0]) is not None
        exact.store_local(entry_for(fps[3], clock.now))
        assert [exact.lookup_local(fp) is not None for fp in fps[:4]] == [True, False, True, True]
        exact.store_local(entry_for(fps[4], clock.now, "x" * 19_000))
        exact.store_local(entry_for(fps[1], clock.now, "x" * 30_000))
        stats = await exact.stats()
        assert stats.l1_bytes <= 20_000
        assert exact.lookup_local(fps[1]) is None
        clock.now += 61
        exact.store_local(entry_for(fps[2], clock.now - 61))
        assert all(exact.lookup_local(fp) is None for fp in fps)


async def test_redis_away_is_a_miss_for_readers_and_an_error_for_writers() -> None:
    """Lookups and get answer UNAVAILABLE; store, link, purge and stats raise CacheUnavailable; back again, all work."""
    with run_redis() as server:
        client = Redis.from_url(server.url, socket_timeout=1, retry=Retry(NoBackoff(), 0))
        exact = ExactCache(client)
        fp = ask("Why?")
        entry = entry_for(fp, time.time())
        await exact.store(entry)
        for strike, heal in ((server.kill, server.start), (server.pause, server.resume)):
            strike()
            assert (await exact.lookup(fp)).miss is LookupMiss.UNAVAILABLE
            assert (await exact.lookup_entry(fp, fp.exact)).miss is LookupMiss.UNAVAILABLE
            for attempt in (exact.store(entry), exact.store_warm(fp, "gpu"), exact.purge(Purge()), exact.stats()):
                with pytest.raises(CacheUnavailable):
                    await attempt
            heal()
            assert (await exact.store(entry)).refusal is None
            assert (await exact.lookup(fp)).entry == entry
        await client.aclose()
