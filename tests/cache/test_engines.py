"""Vector engines, for real: Redis' query engine, pgvector, and FAISS beside them. They propose, and the rule decides."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from numpy.typing import NDArray

from cache import ExactCache, Hit, Miss, MissReason, Partition, Purge, Trial
from cache.decision.differences import KINDS_MAX
from cache.decision.features import FEATURES
from cache.decision.prior import PRIOR
from cache.decision.rule import VerifiedRule
from cache.exact.store import EntryStore
from cache.query import Neighbourhood, Query
from cache.redis_link import RedisLink
from cache.semantic.cache import SemanticCache
from cache.semantic.engine import EngineAway, EngineUnfit, PlacedKey, Proposed, VectorEngine, room_id
from cache.semantic.follower import Follower
from cache.semantic.index import VectorIndex
from cache.semantic.postgres_engine import PostgresEngine
from cache.semantic.proposals import ProposalFollower
from cache.semantic.redis_engine import RedisEngine
from cache.verdicts import AnswerRef, Scope, Source, Suspension, Verdict, VerdictStore
from tests.cache.fakes import ACME, OTHER, FakeEmbedder, ask, entry_for, query
from tests.services import PostgresServer, RedisServer, run_query_engine

T = TypeVar("T")
DIMS = 16
ENGINES = ("faiss", "redis", "pgvector")


class FaissEngine:
    """The index of a worker as a vector engine: the same few calls, in this process."""

    def __init__(self) -> None:
        self._index = VectorIndex(DIMS)
        self._keys: dict[int, tuple[bytes, PlacedKey]] = {}

    async def open(self) -> None: ...

    async def put(self, keys: Sequence[PlacedKey]) -> None:
        for key in keys:
            await self.drop(key.partition, [key.exact])
            for room in key.rooms:
                number = len(self._keys) + 1 + max(self._keys, default=0)
                self._keys[number] = room, key
                self._index.add(room, number, np.frombuffer(key.vector, "<f2", DIMS).astype(np.float32))

    async def drop(self, partition: Partition, exacts: Sequence[bytes]) -> None:
        for number, (room, key) in list(self._keys.items()):
            if key.partition == partition and key.exact in exacts:
                del self._keys[number]
                self._index.remove(room, number)

    async def sample(self, room: bytes, count: int) -> Proposed:
        now = time.time()
        here = [key for name, key in self._keys.values() if name == room and key.expires_at > now]
        return {key.exact: key.vector for key in sorted(here, key=lambda key: key.exact)[:count]}

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> Proposed:
        (found,) = self._index.search(room, vector[None], count)
        keys = [self._keys[number][1] for number in found.keys.tolist()]
        return {key.exact: key.vector for key in keys if key.expires_at > time.time()}

    async def aclose(self) -> None: ...


class MeaningEmbedder(FakeEmbedder):
    """Texts that share words are near, whatever their case."""

    def _vector(self, text: str) -> Any:
        words = [super(MeaningEmbedder, self)._vector(word) for word in set(text.casefold().split())]
        whole = np.sum(words, axis=0)
        return (whole / np.linalg.norm(whole)).astype(np.float32)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[RedisLink]:
    """The connection that a cache worker has, to an empty Redis."""
    link = RedisLink(redis_server.url, 5.0)
    await link.execute_command("FLUSHALL")
    yield link
    await link.aclose()


@pytest.fixture
def exact(redis: RedisLink) -> ExactCache:
    return ExactCache(redis)


@pytest.fixture
async def engine_of(
    query_engine_server: RedisServer, pgvector_server: PostgresServer
) -> AsyncIterator[Callable[..., Any]]:
    """Makes an engine by name, empty at the first call; all of one name are one engine."""
    key, faiss = os.urandom(8), FaissEngine()
    database = pgvector_server.create_database()
    opened: list[VectorEngine] = []

    def make(name: str) -> VectorEngine:
        made: VectorEngine = faiss
        if name == "redis":
            made = RedisEngine(query_engine_server.url, DIMS, key, 5.0)
        elif name == "pgvector":
            made = PostgresEngine(database, DIMS, key, 5.0)
        opened.append(made)
        return made

    yield make
    for one in opened:
        await one.aclose()


class Host:
    """A cache worker's cache with an engine. Its log is followed when it is asked."""

    def __init__(self, redis: RedisLink, thread: ThreadPoolExecutor, engine: VectorEngine, **options: Any) -> None:
        self.embedder = MeaningEmbedder(dims=DIMS)
        self.cache = SemanticCache(self.embedder, options.pop("rule", None), index=VectorIndex(DIMS))
        self.engine = engine
        options = {"timeout_s": 5.0, **options}
        self.follower = ProposalFollower(
            redis, self.cache, thread, b"fakefake", engine=engine, encoding=thread, **options
        )
        self._thread = thread
        self._redis = redis
        self._indexing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Host:
        await self.follower.follow()
        self._indexing = asyncio.create_task(self.follower.index(self._do))
        await self.is_so(lambda: self.follower._is_open or self.follower.trouble)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._indexing is not None
        self._indexing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._indexing

    async def _do(self, work: Callable[[], T], /) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def is_so(self, holds: Callable[[], Any]) -> None:
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def has_indexed(self) -> None:
        await has_indexed(self._redis)

    async def near(self, asked: Query) -> Neighbourhood:
        await self.follower.follow()
        if not self.follower.has_all(asked):
            await self.follower.bring(asked)
        return self.cache.near([asked], 16)[0]


async def has_indexed(redis: RedisLink) -> None:
    """Until the engine has all that the log has."""
    async with asyncio.timeout(20):
        while True:
            has_log = await redis.execute_command("EXISTS", "sameway:cache:log")  # the host's first read makes it
            groups = await redis.execute_command("XINFO", "GROUPS", "sameway:cache:log") if has_log else ()
            last = await redis.execute_command("XREVRANGE", "sameway:cache:log", "+", "-", "COUNT", 1)
            if groups and not groups[0][b"pending"] and (not last or groups[0][b"last-delivered-id"] == last[0][0]):
                return
            await asyncio.sleep(0.02)


async def put(exact: ExactCache, *texts: str, tenant: Partition = ACME, ttl_s: float = 60.0, **fields: Any) -> None:
    for text in texts:
        await exact.store(entry_for(ask(text, tenant, **fields), time.time(), ttl_s=ttl_s))


def placed(number: int, *rooms: bytes, tenant: Partition = ACME, ttl_s: float = 60.0, check: bytes = b"") -> PlacedKey:
    vector = np.random.default_rng(number).normal(size=DIMS)
    half = (vector / np.linalg.norm(vector)).astype("<f2")
    exact = number.to_bytes(1, "big") * 16
    return PlacedKey(tenant, exact, rooms or (room_id(b"a"),), time.time() + ttl_s, half.tobytes() + check)


@pytest.mark.parametrize("name", ENGINES)
async def test_an_engine_keeps_what_it_is_given(engine_of: Callable[[str], VectorEngine], name: str) -> None:
    """By room, to the last bit, in any number of rooms; until it is dropped, expires, or is put anew."""
    engine = engine_of(name)
    await engine.open()
    await engine.open()
    a, b = room_id(b"a"), room_id(b"b")
    keys = [
        placed(number, a, *((b,) if number % 2 else ()), check=b"12345678" * (number % 3 == 0)) for number in range(20)
    ]
    await engine.put([*keys, placed(30, a, ttl_s=-1), placed(5, room_id(b"c"), tenant=OTHER)])
    expected = {key.exact: key.vector for key in keys}
    assert dict(await engine.sample(a, 100)) == expected
    assert dict(await engine.sample(a, 3)) == {key.exact: key.vector for key in keys[:3]}
    asked = np.frombuffer(keys[7].vector, "<f2", DIMS).astype(np.float32)
    for size in (20, 10**6):  # read whole, or by the graph
        found = await engine.nearest(b, asked, 4, size)
        cosines = {
            key.exact: float(np.frombuffer(key.vector, "<f2", DIMS).astype(np.float32) @ asked)
            for key in keys
            if b in key.rooms
        }
        assert set(found) == set(sorted(cosines, key=cosines.__getitem__)[-4:])
        assert all(expected[one] == vector for one, vector in found.items())
    await engine.drop(ACME, [keys[0].exact, keys[1].exact, b"\xee" * 16])
    await engine.drop(OTHER, [keys[2].exact])
    assert set(await engine.sample(a, 100)) == {key.exact for key in keys[2:]}
    assert keys[1].exact not in await engine.sample(b, 100)
    assert await engine.sample(room_id(b"none"), 10) == {}


async def doubt(redis: RedisLink, text: str, *, is_right: bool = False, seed: int = 0) -> tuple[Verdict, AnswerRef]:
    """A verdict on the answer to `text`, and that answer."""
    (about,) = await EntryStore(redis).lookup_abouts(ACME, [ask(text).exact])
    assert about is not None
    features = np.random.default_rng(seed).random(len(FEATURES) + KINDS_MAX + 2)
    features[0], features[len(FEATURES) :] = (1.0 if is_right else -1.0), 0.0
    rule = SemanticCache(MeaningEmbedder(dims=DIMS)).rule_name
    trial = Trial((), features.astype("<f4").tobytes(), 0.8, 1.0, rule)
    found = Verdict(source=Source.MISS, compat=ask(text).compat, is_right=is_right, trial=trial, at=1.0)
    return found, AnswerRef(ask(text).exact, about.created_at)


async def both(
    redis: RedisLink,
    exact: ExactCache,
    thread: ThreadPoolExecutor,
    engine_of: Callable[[str], VectorEngine],
    room_keys: int,
) -> tuple[list[Query], list[list[Neighbourhood]]]:
    """The answers of a host for each engine, and last of one that has everything itself, to the same questions."""
    things = ["cat", "dog", "tree", "lake", "hill", "road", "boat", "moon", "star", "bird"]
    hosts = [Host(redis, thread, engine_of(name), room_keys=room_keys) for name in ENGINES]
    own = SemanticCache(MeaningEmbedder(dims=DIMS), index=VectorIndex(DIMS))
    follower = Follower(redis, own, thread, b"fakefake")
    await follower.follow()
    async with contextlib.AsyncExitStack() as stack:
        for host in hosts:
            await stack.enter_async_context(host)
        texts = [f"where is the {one} of {other}" for one in things for other in things[:4]]
        for place, text in enumerate(texts):
            await put(exact, text, tenant=(ACME, OTHER)[place % 3 == 0])
        for number in range(60):
            found = await doubt(redis, texts[number % 26 // 3 * 3 + 1], is_right=number % 4 > 0, seed=number)
            assert await VerdictStore(redis).take(ACME, f"v{number}", *found)
        # the log gives each record to one of the three, and the engines are three: each host brings all here
        for host in hosts:
            for tenant in (ACME, OTHER):
                names = [ask(text, tenant).exact for text in texts]
                await host.follower._place(await host.follower._added(tenant, names), host._do)
        questions = [
            query(text, tenant)
            for one in things[:6]
            for text in (f"where is the {one} of DOG", f"please where is the {one} of cat", f"who is the {one} of lake")
            for tenant in (ACME, OTHER)
        ]
        answers = [[await host.near(question) for question in questions] for host in hosts]
        await follower.follow()
        while own.settle():
            pass
        return questions, [*answers, [own.near([question], 16)[0] for question in questions]]


def unlike(some: list[Neighbourhood], others: list[Neighbourhood]) -> list[str]:
    """The questions with other answers: pytest would need minutes to say how they differ."""
    pairs = enumerate(zip(some, others, strict=True))
    return [f"{place}: {one.decision} {other.decision}" for place, (one, other) in pairs if one != other]


async def test_equal_neighbours_give_equal_decisions(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor, engine_of: Callable[[str], VectorEngine]
) -> None:
    """With each engine the decision, its trial and every neighbour are those of a host that has all keys, to the last bit."""
    _, (faiss, of_redis, pgvector, own) = await both(redis, exact, thread, engine_of, 1_000)
    assert any(isinstance(one.decision, Hit) for one in own)
    assert any(isinstance(one.decision, Miss) and len(one.neighbours) == 16 for one in own)
    assert any(near.right > near.wrong > 0 for one in own for near in one.neighbours)
    assert any(one.verdicts == 60 for one in own)
    assert unlike(faiss, own) == []
    assert unlike(of_redis, own) == []
    assert unlike(pgvector, own) == []


async def test_large_rooms_have_equal_decisions_too(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor, engine_of: Callable[[str], VectorEngine]
) -> None:
    """Where a room is not copied whole the engines propose equal neighbours, and hits are those of a host that has all keys."""
    _, (faiss, of_redis, pgvector, own) = await both(redis, exact, thread, engine_of, 8)
    assert unlike(of_redis, faiss) == []
    assert unlike(pgvector, faiss) == []
    assert [one.decision.exact for one in faiss if isinstance(one.decision, Hit)] == [
        one.decision.exact for one in own if isinstance(one.decision, Hit)
    ]
    assert [[near.similarity for near in one.neighbours] for one in faiss] == [
        [near.similarity for near in one.neighbours] for one in own
    ]


class Odd:
    """An engine with a fault: answers in another order, one too few, late, or none."""

    def __init__(self, engine: VectorEngine, fault: str) -> None:
        self._engine, self.fault = engine, fault
        self.asked: list[bytes] = []
        self.open, self.put, self.drop, self.aclose = engine.open, engine.put, engine.drop, engine.aclose

    async def sample(self, room: bytes, count: int) -> Proposed:
        self.asked.append(room)
        return await self._with_fault(await self._engine.sample(room, count))

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> Proposed:
        self.asked.append(room)
        found = await self._with_fault(await self._engine.nearest(room, vector, count, size))
        return dict(list(found.items())[:-1]) if self.fault == "too few" else found

    async def _with_fault(self, found: Proposed) -> Proposed:
        if self.fault == "late":
            await asyncio.sleep(0.5)
            raise EngineAway("it was late")
        if self.fault == "away":
            raise EngineAway("it is away")
        return dict(reversed(found.items()))


@pytest.mark.parametrize("fault", ["other order", "too few"])
async def test_what_an_engine_gets_wrong_costs_hits_alone(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor, fault: str
) -> None:
    """Another order changes nothing. Without the nearest of a large room a hit may become a miss, and no miss another hit."""
    faiss = FaissEngine()
    texts = [
        f"where is the {one} of {other}"
        for one in ["cat", "dog", "tree", "lake"]
        for other in ["hill", "road", "boat", "moon"]
    ]
    async with Host(redis, thread, faiss, room_keys=4) as host:
        await put(exact, *texts)
        await host.has_indexed()
        right = [await host.near(query(text.upper())) for text in texts]
    async with Host(redis, thread, Odd(faiss, fault), room_keys=4) as host:
        odd = [await host.near(query(text.upper())) for text in texts]
    assert all(isinstance(one.decision, Hit) for one in right)
    if fault == "other order":
        assert unlike(odd, right) == []
    for one, other in zip(odd, right, strict=True):
        assert isinstance(one.decision, Miss) or one.decision.exact == other.decision.exact
    assert any(isinstance(one.decision, Miss) for one in odd) == (fault == "too few")


@pytest.mark.parametrize("name", ENGINES)
async def test_what_leaves_is_not_proposed(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor, engine_of: Callable[[str], VectorEngine], name: str
) -> None:
    """Purged, expired and of a deleted team: neither a host with a copy nor a fresh one finds it, and soon the engine has it
    no more."""
    engine = engine_of(name)
    async with Host(redis, thread, engine, room_keys=3) as host:
        await put(exact, "one thing", "two things", "three things", "four things", "five things")
        await put(exact, "brief thing", ttl_s=0.8)
        await put(exact, "one thing", tenant=OTHER)
        await host.has_indexed()
        asked = [query(text.upper()) for text in ("one thing", "brief thing", "five things")]
        asked.append(query("ONE THING", OTHER))
        assert [type((await host.near(asked[place])).decision) for place in (0, 2, 3)] == [Hit] * 3
        await exact.purge(Purge(text="one thing", partition=ACME))
        await exact.purge(Purge(partition=OTHER))
        await host.has_indexed()
        await asyncio.sleep(0.8)  # the brief one has expired, whether it was ever found or not
        async with Host(redis, thread, engine, room_keys=3) as fresh:
            for one in (host, fresh):
                assert [type((await one.near(question)).decision) for question in asked] == [Miss, Miss, Hit, Miss]
        assert len(await engine.sample(room_id(asked[0].namespace), 100)) == 4
        assert await engine.sample(room_id(asked[3].namespace), 100) == {}


async def test_a_doubted_answer_is_withdrawn_on_a_fresh_host(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """A host reads a team's verdicts before its first decision: what was reported is not served, also before it has seen a log."""
    faiss, store = FaissEngine(), VerdictStore(redis)
    async with Host(redis, thread, faiss) as host:
        await put(exact, "one thing")
        await host.has_indexed()
        assert isinstance((await host.near(query("ONE THING"))).decision, Hit)
        found = await doubt(redis, "one thing")
        assert await store.take(
            ACME, "wrong", *found, None, Scope.ANSWER, Suspension(exact=found[1].exact, source=Source.FEEDBACK, at=1.0)
        )
        async with Host(redis, thread, faiss) as fresh:
            for one in (host, fresh):
                decision = (await one.near(query("ONE THING"))).decision
                assert isinstance(decision, Miss)
                assert decision.reason is MissReason.SUSPENDED


async def test_an_engine_that_is_away_or_late_is_a_miss(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """Told once, and for a second at once; rooms that are copied whole are answered from the copy, and all is well afterwards."""
    now = [0.0]
    odd = Odd(FaissEngine(), "")
    async with Host(redis, thread, odd, timeout_s=0.2, monotonic=lambda: now[0]) as host:
        await put(exact, "one thing")
        await host.has_indexed()
        assert isinstance((await host.near(query("ONE THING"))).decision, Hit)
        for odd.fault in ("away", "late"):
            odd.asked.clear()
            for _ in range(3):
                with pytest.raises(EngineAway):
                    await host.near(query("ONE THING", OTHER))
            assert odd.asked.count(room_id(query("one thing", OTHER).namespace)) == 1
            assert host.follower.away
            now[0] += 400
            assert isinstance((await host.near(query("ONE THING"))).decision, Hit)
        odd.fault = ""
        await host.is_so(lambda: not host.follower._reads)
        assert isinstance((await host.near(query("ONE THING", OTHER))).decision, Miss)
        assert not host.follower.away


async def test_an_engine_that_was_emptied_is_filled_again(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor, engine_of: Callable[[str], VectorEngine]
) -> None:
    """One that is new beside entries, too: with the vectors that Redis has from before, by one of the hosts."""
    before = SemanticCache(MeaningEmbedder(dims=DIMS), index=VectorIndex(DIMS))
    follower = Follower(redis, before, thread, b"fakefake")
    await follower.follow()
    await put(exact, "one thing", "two things")
    await put(exact, "three things", tenant=OTHER)
    await follower.follow()
    before.lookup([query("ONE THING")])
    await follower.follow()
    engine, now = engine_of("redis"), [0.0]
    async with Host(redis, thread, engine, monotonic=lambda: now[0]) as host:
        for is_filled_again in (False, True):
            now[0] += 400
            for asked, count in ((query("ONE THING"), 2), (query("THREE THINGS", OTHER), 1)):
                async with asyncio.timeout(10):
                    while len(await engine.sample(room_id(asked.namespace), 10)) < count:  # noqa: ASYNC110
                        await asyncio.sleep(0.02)
            async with asyncio.timeout(10):
                while await redis.execute_command("EXISTS", "sameway:cache:filling"):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert "one thing" not in host.embedder.encoded
            if not is_filled_again:
                await engine._redis.execute_command("FLUSHALL")  # type: ignore[attr-defined]
                await engine.open()
        await host.is_so(lambda: host.follower.progress.done == 3)
    await engine._redis.execute_command("FLUSHALL")  # type: ignore[attr-defined]
    async with Host(redis, thread, engine) as fresh:
        await fresh.is_so(lambda: fresh.follower.progress.done == 3)
        assert isinstance((await fresh.near(query("TWO THINGS"))).decision, Hit)


async def test_a_full_engine_takes_the_rest_later(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """What it refuses waits, and is said; nothing is lost."""
    with run_query_engine() as server:
        engine = RedisEngine(server.url, DIMS, b"fullfull", 5.0)
        control = RedisLink(server.url, 5.0)
        async with Host(redis, thread, engine) as host:
            await host.has_indexed()
            await control.execute_command("CONFIG", "SET", "maxmemory", "1")
            await put(exact, "one thing")
            await host.is_so(lambda: "OOM" in host.follower.trouble)
            await control.execute_command("CONFIG", "SET", "maxmemory", "0")
            await host.has_indexed()
            assert len(await engine.sample(room_id(query("one thing").namespace), 10)) == 1
            server.pause()
            with pytest.raises(EngineAway):
                await Host(redis, thread, engine, timeout_s=0.1).near(query("one thing"))
            server.resume()
        await engine.aclose()
        await control.aclose()


async def test_a_server_that_lacks_a_part_is_named(redis_server: RedisServer, postgres_server: PostgresServer) -> None:
    """A Redis without the query engine, a PostgreSQL without pgvector; one that is away is no error of the configuration."""
    plain = RedisEngine(redis_server.url, DIMS, b"fakefake", 5.0)
    with pytest.raises(EngineUnfit, match=r"FT\.CREATE.*Redis 8"):
        await plain.open()
    await plain.aclose()
    gone = RedisEngine("unix:///nowhere/redis.sock", DIMS, b"fakefake", 5.0)
    with pytest.raises(EngineAway):
        await gone.open()
    await gone.aclose()
    with pytest.raises(EngineAway):
        await PostgresEngine("postgresql://postgres@/none?host=/nowhere", DIMS, b"fakefake", 5.0).open()
    bare = PostgresEngine(postgres_server.create_database(), DIMS, b"fakefake", 5.0)
    has_vector = (postgres_server._binaries.parent / "share/postgresql/extension/vector.control").exists()
    if not has_vector:
        with pytest.raises(EngineUnfit, match=r"vector.*0\.8"):
            await bare.open()


async def test_four_hosts_stay_within_one_bound(
    redis: RedisLink, exact: ExactCache, thread: ThreadPoolExecutor
) -> None:
    """A cold namespace's account is given out once over all of them. A learned one serves, over all of them and after one is
    killed, no more wrong answers than the bound allows, with as many hits as one host alone."""
    starts = [await exact.count_start(ask("one thing")) for _ in range(4)]
    assert starts == [1, 2, 3, 4]
    served = {}
    for count in (1, 4):
        await redis.execute_command("FLUSHALL")
        draw, faiss, verdicts = random.Random(7), FaissEngine(), VerdictStore(redis)
        async with contextlib.AsyncExitStack() as stack:
            hosts = [Host(redis, thread, faiss, rule=VerifiedRule(PRIOR, 0.05)) for _ in range(count)]
            for host in hosts:
                await stack.enter_async_context(host)
            things = [f"thing{number}" for number in range(12)]
            for thing in things:
                await put(exact, f"where is the {thing} today")
            await hosts[0].has_indexed()
            wrong = hits = 0
            for number in range(160):
                living = hosts if number < 110 or count == 1 else hosts[1:]  # one is killed: what it counted is lost
                host, thing = draw.choice(living), draw.choice(things)
                text, is_right = draw.choice(
                    ((f"tell me where is the {thing} today", True), (f"where is the {thing} tomorrow", False))
                )
                decision = (await host.near(query(text, error_max=0.05))).decision
                trial = decision.trial
                assert trial is not None
                if isinstance(decision, Hit):
                    hits, wrong = hits + 1, wrong + (not is_right)
                else:
                    (about,) = await EntryStore(redis).lookup_abouts(ACME, [trial.ranked[0]])
                    assert about is not None
                    found = Verdict(
                        source=Source.MISS, compat=query(text).compat, is_right=is_right, trial=trial, at=1.0
                    )
                    await verdicts.take(ACME, f"{number}", found, AnswerRef(trial.ranked[0], about.created_at))
            expected = 0.05 * 160
            assert wrong <= expected + 3 * expected**0.5
            served[count] = hits
    assert served[4] > 0
    assert served[4] >= 0.7 * served[1]
