"""Sketches of answers: made once in small pieces, kept with the entry, seen by every host, gone with the answer."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from cache import CacheLimits, ExactCache, Partition, Purge
from cache.encoder.types import Encoded
from cache.exact.store import EntryStore, Sketched
from cache.semantic.cache import PromptAdded, SemanticCache, SketchAdded
from cache.semantic.follower import Follower
from cache.semantic.sketches import AnswerSketches
from cache.verdicts import Ruling
from cache.verdicts.prose import sketch
from cache.verdicts.records import answer_name
from cache.worker.judging import AnswerJudging
from cache.worker.messages import AnswerText, AskJudge
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask, entry_for
from tests.services import RedisServer

KEY = b"fakefake"
LONG = (
    "Hold the button for ten seconds until the light turns red. Then let go of it and wait for the box to start again. "
    "It asks for the password that is printed on the bottom. After that the old settings are gone for good."
)

T = TypeVar("T")


async def at_once(work: Callable[[], T]) -> T:
    """Any moment is one without a lookup."""
    return work()


class Host:
    """A semantic cache with its judges that follows Redis, as a cache worker does."""

    def __init__(
        self, redis: Redis, thread: ThreadPoolExecutor, key: bytes = KEY, size_bytes_max: int = 1 << 20
    ) -> None:
        self.embedder = FakeEmbedder(tokens_max=200)
        self.cache = SemanticCache(self.embedder)
        self.follower = Follower(redis, self.cache, thread, key, size_bytes_max)
        self.judging = AnswerJudging(self.cache)

    async def judges(self, fresh: AnswerText, *others: AnswerText, text: str = "one", tenant: Partition = ACME) -> None:
        await self.follower.follow()
        await self.judging.judge(AskJudge(tenant, ask(text, tenant).compat, fresh, others), at_once)
        await self.follower.follow()

    async def has(self, *texts: str, tenant: Partition = ACME) -> list[bool]:
        """Whether the answer to each text is here with a sketch."""
        await self.follower.follow()
        known = self.cache._by_entry
        return [
            (tenant, ask(text, tenant).exact) in known and not self.cache.wants_sketch(tenant, ask(text, tenant).exact)
            for text in texts
        ]


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
def exact(redis: Redis) -> ExactCache:
    return ExactCache(redis)


async def put(exact: ExactCache, text: str, tenant: Partition = ACME, **fields: Any) -> AnswerText:
    """Store an answer; as a judge is asked about it."""
    entry = entry_for(ask(text, tenant), time.time(), LONG, **fields)
    await exact.store(entry)
    return AnswerText(entry.exact, entry.created_at, LONG)


def vectors(tenant: Partition = ACME) -> str:
    return f"sameway:{{{tenant.hex()}}}:vectors"


async def test_a_sketch_is_seen_by_every_host_and_made_once(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """By one that follows and by one that starts afterwards, of its own partition alone; neither embeds a sentence for it."""
    first, second = Host(redis, thread), Host(redis, thread)
    await second.follower.follow()
    fresh = await put(exact, "one")
    await put(exact, "one", OTHER)
    await first.judges(fresh)
    rebuilt = Host(redis, thread)
    for host in (first, second, rebuilt):
        assert await host.has("one") == [True]
        assert await host.has("one", tenant=OTHER) == [False]
    assert any("button" in text for text in first.embedder.encoded)
    assert not any("button" in text for text in (*second.embedder.encoded, *rebuilt.embedder.encoded))
    made = len(first.embedder.encoded)
    await first.judges(fresh)
    assert len(first.embedder.encoded) == made


async def test_a_sketch_holds_no_text(redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor) -> None:
    """Hashes and numbers: no word of the answer is in it."""
    await Host(redis, thread).judges(await put(exact, "one"))
    (data,) = [value for field, value in (await redis.hgetall(vectors())).items() if field.endswith(b"a")]
    kept = data.lower()
    assert not any(word.encode() in kept for word in LONG.casefold().replace(".", "").split() if len(word) > 3)


@pytest.mark.parametrize("way", ["purge", "team", "anew", "ttl", "evicted"])
async def test_a_sketch_goes_with_its_answer(redis: Redis, thread: ThreadPoolExecutor, way: str) -> None:
    """Purged, with its team, replaced, expired or evicted: gone from Redis and from every host."""
    exact = ExactCache(redis, CacheLimits(size_bytes_max=12_000))
    host = Host(redis, thread, size_bytes_max=12_000)
    fresh = await put(exact, "one", ttl_s=0.5 if way == "ttl" else 60.0)
    await host.judges(fresh)
    field = fresh.exact + b"a"
    assert await redis.hexists(vectors(), field)
    match way:
        case "purge":
            await exact.purge(Purge(text="one"))
        case "team":
            await exact.purge(Purge(partition=ACME))
        case "anew":
            await put(exact, "one")
        case "ttl":
            while await redis.hexists(vectors(), field):
                await put(exact, "two")
        case _:
            for number in range(20):
                await put(exact, f"filler {number}")
    assert not await redis.hexists(vectors(), field)
    assert await host.has("one") == await Host(redis, thread).has("one") == [False]
    assert not any(
        host.cache._sketches.has(ask("one").partition + ask("one").compat, name) for name in [name_of(fresh)]
    )


def name_of(one: AnswerText) -> bytes:
    return answer_name(one.exact, one.created_at)


async def test_a_sketch_of_an_answer_that_is_gone_is_not_kept(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """Purged or answered anew while the sketch was on its way: nothing of the old answer is left behind."""
    store, old = EntryStore(redis), await put(exact, "one")
    await exact.purge(Purge())
    await store.store_sketches(ACME, KEY, [Sketched(old.exact, old.created_at, b"x" * 40)], 1 << 20)
    assert not await redis.exists(vectors())
    await put(exact, "one")
    await store.store_sketches(ACME, KEY, [Sketched(old.exact, old.created_at, b"x" * 40)], 1 << 20)
    assert await Host(redis, thread).has("one") == [False]


@pytest.mark.parametrize("damage", ["model", "bytes", "empty", "time", "cut"])
async def test_a_sketch_that_can_not_be_used_is_none(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor, damage: str
) -> None:
    """Of another embedder, of another answer, or damaged: the judge abstains, and no exception stops the rebuild."""
    fresh = await put(exact, "one")
    await Host(redis, thread).judges(fresh)
    value = await redis.hget(vectors(), fresh.exact + b"a")
    other = {
        "model": b"otherkey" + value[8:],
        "bytes": value[:16] + b"\xc1" * 50,
        "empty": b"",
        "time": value[:8] + struct.pack(">d", 1.0) + value[16:],
        "cut": value[:-7],
    }
    await redis.hset(vectors(), fresh.exact + b"a", other[damage])
    host = Host(redis, thread)
    assert await host.has("one") == [False]
    assert host.follower.is_up


async def test_another_that_has_none_is_sketched_on_the_way(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """The first of a namespace, or one that an earlier version stored: one of them at a time, of the given partition alone."""
    host = Host(redis, thread)
    others = [await put(exact, text) for text in ("one", "two")]
    theirs = await put(exact, "one", OTHER)
    fresh = await put(exact, "three")
    await host.judges(fresh, theirs, *others)
    assert await host.has("one", "two", "three") == [True, False, True]
    assert await host.has("one", tenant=OTHER) == [False]


async def test_an_answer_that_was_not_stored_is_judged_and_not_kept(
    redis: Redis, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """A shadow check's: nothing of it is left."""
    host = Host(redis, thread)
    other = await put(exact, "one")
    await host.judges(AnswerText(b"", 0.0, LONG), other)
    assert await redis.hkeys(vectors()) in ([other.exact + b"a", other.exact], [other.exact, other.exact + b"a"])
    assert len(host.cache._sketches) == 1


actions = st.tuples(
    st.sampled_from(["put", "put", "sketch", "sketch", "purge"]), st.integers(0, 6), st.integers(0, 5_000)
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(actions, min_size=1, max_size=25))
async def test_sketches_count_and_the_budget_holds(
    redis_server: RedisServer, steps: list[tuple[str, int, int]]
) -> None:
    """Whatever is stored, sketched and purged: bytes stay under the budget and are the sum of what is there."""
    redis, budget = Redis.from_url(redis_server.url), 9_000
    await redis.flushall()
    exact, store = ExactCache(redis, CacheLimits(size_bytes_max=budget)), EntryStore(redis)
    bare: dict[bytes, int] = {}
    for way, number, length in steps:
        fp = ask(str(number))
        match way:
            case "put":
                result = await exact.store(entry_for(fp, time.time(), "x" * (length % 900)))
                bare[fp.exact] = result.size_bytes
            case "sketch":
                await store.store_sketches(ACME, KEY, [Sketched(fp.exact, 1.0, b"s" * (1 + length))], budget)
            case _:
                await exact.purge(Purge(id=fp.id))
        there = {one.exact: one.size_bytes async for batch in store.scan(ACME) for one in batch}
        sketches = {
            field[:16]: len(value) for field, value in (await redis.hgetall(vectors())).items() if len(field) == 17
        }
        assert sketches.keys() <= there.keys()
        assert there == {one: bare[one] + sketches.get(one, 0) for one in there}
        assert sum(there.values()) == (await exact.stats()).size_bytes <= budget
    await redis.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        "", "a" * 65_000, "a.\n" * 20_000, "- x\n" * 16_000, "\x00\x1b" * 30_000, "😀" * 16_000, "\u202e\ufeff\u0301" * 9_000,
        " " * 65_000, "1 " * 30_000, "?!" * 30_000, "```" * 20_000, "你好。" * 10_000, "<|x|>\n" * 10_000,
    ],
    ids=lambda answer: repr(answer[:6]),
)  # fmt: skip
async def test_hostile_answers_are_cheap(answer: str) -> None:
    """Never an exception, and never more than a few small pieces for the encoder."""
    cache = SemanticCache(FakeEmbedder(tokens_max=10_000), clock=lambda: 1.0)
    pieces: list[int] = []
    encode = cache.embed_sentences

    def embed(partition: Partition, texts: Sequence[str]) -> Encoded:
        pieces.append(sum(map(len, texts)))
        return encode(partition, texts)

    cache.embed_sentences = embed  # type: ignore[method-assign]
    fresh, other = AnswerText(b"", 0.0, answer), AnswerText(b"o" * 16, 1.0, LONG)
    judged = await AnswerJudging(cache).judge(AskJudge(ACME, b"c" * 16, fresh, (other, fresh)), at_once)
    assert [one.ruling for one in judged.judgements] == [Ruling.UNKNOWN] * 2
    assert sum(pieces) <= 20_000
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(judged))


def test_all_namespaces_stay_within_a_bound() -> None:
    """The answers that came first go first."""
    encode = FakeEmbedder(tokens_max=200).encode
    made, vector = sketch(LONG, encode), encode(["x"]).vectors[0]
    one = AnswerSketches()
    one.add(b"n", answer_name(b"e" * 16, 1.0), vector, made)
    sketches = AnswerSketches(6 * one.size_bytes)
    for number in range(12):
        sketches.add(b"n%d" % (number % 4), answer_name(bytes([number]) * 16, 1.0), vector, made)
    kept = [sketches.has(b"n%d" % (n % 4), answer_name(bytes([n]) * 16, 1.0)) for n in range(12)]
    assert kept == [False] * 6 + [True] * 6
    assert sketches.size_bytes == 6 * one.size_bytes


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2), st.integers(0, 4)), max_size=40))
def test_what_is_kept_is_what_was_added_and_not_dropped(steps: list[tuple[bool, int, int]]) -> None:
    """Answers that say nothing among them: each is there until it is dropped, and nothing is left of what went."""
    encode = FakeEmbedder(tokens_max=200).encode
    made, vector = [sketch(text, encode) for text in (LONG, "", "Yes.")], encode(["x"]).vectors[0]
    sketches, kept = AnswerSketches(), set()
    for is_added, namespace, number in steps:
        one = (b"n%d" % namespace, answer_name(bytes([number]) * 16, 1.0))
        if is_added:
            sketches.add(*one, vector, made[number % 3])
            kept.add(one)
        else:
            sketches.drop(*one)
            kept.discard(one)
    for namespace in range(3):
        for number in range(5):
            one = (b"n%d" % namespace, answer_name(bytes([number]) * 16, 1.0))
            assert sketches.has(*one) is (one in kept)
    for one in kept:
        sketches.drop(*one)
    assert (sketches.size_bytes, sketches._namespaces) == (0, {})


def test_a_sketch_before_its_prompt_has_a_vector() -> None:
    """The prompt is embedded then; one that does not fit the encoder is dropped, with its answer."""
    cache, clock = SemanticCache(FakeEmbedder(tokens_max=3), clock=Clock()), Clock()
    data = sketch(LONG, FakeEmbedder(tokens_max=200).encode).encode()
    for text in ("one", "one two three four"):
        fp = ask(text)
        cache.fold([PromptAdded(ACME, fp.exact, fp.compat, text, clock.now, clock.now + 60.0)])
        cache.fold([SketchAdded(ACME, fp.exact, clock.now, data)])
    assert len(cache) == 1
    assert not cache.wants_sketch(ACME, ask("one").exact)
