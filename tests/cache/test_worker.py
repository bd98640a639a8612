"""The worker process and its client, for real: the default encoder, a real Redis, signals and garbage."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from redis.asyncio import Redis

from cache import CacheWorkerUnavailable, ExactCache, Hit, Miss, MissReason, Purge, SemanticClient
from cache.query import Near
from cache.verdicts import Ruling
from cache.worker import AnswerText, TextTooLong, WorkerState, WorkerStatus
from cache.worker.messages import WIRE, AskLookup, Embedded
from ipc import CallFrame, ReplyFrame
from tests.cache.fakes import ACME, OTHER, ask, entry_for, query
from tests.services import RedisServer, run_redis

REPOSITORY = Path(__file__).parents[2]
FRANCE, PARAPHRASE = "What is the capital of France?", "Tell me, what is France's capital?"


def worker_argv(socket_path: Path, **options: Any) -> list[str]:
    return [sys.executable, "-m", "cache.worker", str(socket_path), json.dumps({"device": "cpu", **options})]


class WorkerProcess:
    """One `python -m cache.worker` on a socket of its own."""

    def __init__(self, folder: Path, redis_url: str, index_url: str, **options: Any) -> None:
        self.socket_path = folder / "cache.sock"
        self._folder = folder
        self._argv = worker_argv(self.socket_path, **options)
        self._env = {**os.environ, "SAMEWAY_REDIS_URL": redis_url, "SAMEWAY_INDEX_URL": index_url}
        self.process: subprocess.Popen[bytes]

    def start(self) -> None:
        with (self._folder / "worker.log").open("ab") as log:
            self.process = subprocess.Popen(self._argv, cwd=REPOSITORY, stderr=log, env=self._env)

    def end(self, number: int) -> int:
        self.process.send_signal(signal.SIGCONT)
        self.process.send_signal(number)
        return self.process.wait(30)

    def log(self) -> str:
        return (self._folder / "worker.log").read_text()


@contextlib.contextmanager
def run_worker(redis_url: str, index_url: str = "", **options: Any) -> Iterator[WorkerProcess]:
    with tempfile.TemporaryDirectory(prefix="sameway-worker-") as folder:
        worker = WorkerProcess(Path(folder), redis_url, index_url, **options)
        worker.start()
        try:
            yield worker
        finally:
            if worker.process.poll() is None:
                worker.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with run_redis(is_durable=True) as server:
        yield server


@pytest.fixture(scope="module")
def worker(server: RedisServer) -> Iterator[WorkerProcess]:
    """One for all tests here: loading the encoder takes seconds. A test that kills it starts it again."""
    with run_worker(server.url) as worker:
        yield worker


@pytest.fixture
async def exact(server: RedisServer) -> AsyncIterator[ExactCache]:
    """The cache, purged (not flushed: the worker goes on following)."""
    redis = Redis.from_url(server.url)
    exact = ExactCache(redis)
    await exact.purge(Purge())
    yield exact
    await redis.aclose()


@pytest.fixture
async def client(worker: WorkerProcess) -> AsyncIterator[SemanticClient]:
    async with SemanticClient(worker.socket_path, timeout_s=20) as client:
        await until_status(client, lambda status: status.is_ready and is_redis_up(status))
        yield client


def is_redis_up(status: WorkerStatus) -> bool:
    return status.detail == "following the log"


async def until_status(client: SemanticClient, condition: Callable[[WorkerStatus], bool]) -> WorkerStatus:
    async with asyncio.timeout(90):
        while True:
            status = client.status
            if condition(status):
                return status
            await asyncio.sleep(0.02)


async def until_hit(client: SemanticClient, text: str) -> None:
    """The worker follows the log again a moment after Redis is back."""
    async with asyncio.timeout(30):
        while True:
            if isinstance(await client.lookup(query(text)), Hit):
                return
            await asyncio.sleep(0.05)


async def status_now(worker: WorkerProcess) -> WorkerStatus:
    """The state that it sends to each client."""
    async with SemanticClient(worker.socket_path) as client:
        return await until_status(client, lambda status: status.state is not WorkerState.AWAY)


async def embed(client: SemanticClient, texts: Sequence[str]) -> list[Embedded]:
    """All that comes, a few texts at a time."""
    return [few async for few in client.embed(texts)]


async def put(exact: ExactCache, text: str) -> bytes:
    """Store an entry; then ask Redis, as a request does before its semantic lookup: it has sent the log by then."""
    entry = entry_for(ask(text), time.time())
    await exact.store(entry)
    await exact.lookup(ask("something else"))
    return entry.exact


async def test_a_worker_that_loads_answers_at_once_and_one_killed_comes_back(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """Kill -9: asks are a miss UNAVAILABLE, then LOADING, then the rebuilt index hits as before."""
    stored = await put(exact, FRANCE)
    before = await client.lookup(query(PARAPHRASE))
    assert isinstance(before, Hit)
    assert before.exact == stored
    worker.end(signal.SIGKILL)
    async with asyncio.timeout(10):
        while client.is_connected:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert await client.lookup(query(PARAPHRASE)) == Miss(MissReason.UNAVAILABLE)
    assert client.status.state is WorkerState.AWAY
    with pytest.raises(CacheWorkerUnavailable):
        await embed(client, ["x"])
    worker.start()
    status = await until_status(client, lambda status: status.state is not WorkerState.AWAY)
    assert status.state is WorkerState.LOADING  # the socket listens long before the encoder is there
    assert await client.lookup(query(PARAPHRASE)) == Miss(MissReason.LOADING)
    with pytest.raises(CacheWorkerUnavailable, match="loading"):
        await embed(client, ["x"])
    await until_status(client, lambda status: status.is_ready)
    assert await client.lookup(query(PARAPHRASE)) == before


async def test_a_store_is_seen_by_the_next_lookup(client: SemanticClient, exact: ExactCache) -> None:
    """No waiting for the follower's next round: Redis sends the log. A purge is seen as fast."""
    assert await client.lookup(query(PARAPHRASE)) == Miss(MissReason.EMPTY)
    for _ in range(3):
        await put(exact, FRANCE)
        assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)
        await exact.purge(Purge(id=ask(FRANCE).id))
        await exact.lookup(ask("something else"))
        assert await client.lookup(query(PARAPHRASE)) == Miss(MissReason.EMPTY)


async def test_another_tenant_and_another_request_see_nothing(client: SemanticClient, exact: ExactCache) -> None:
    """Not even that something was near."""
    await put(exact, FRANCE)
    for stranger in (query(PARAPHRASE, OTHER), query(PARAPHRASE, seed=1), query(FRANCE, OTHER)):
        assert await client.lookup(stranger) == Miss(MissReason.EMPTY)
        assert (await client.near(stranger)).neighbours == ()


async def test_misses_say_why(client: SemanticClient, exact: ExactCache) -> None:
    """Negated, of another country, over the window; `near` shows the neighbours with their reasons."""
    stored = await put(exact, FRANCE)
    negated = await client.lookup(query("What is not the capital of France?"))
    assert isinstance(negated, Miss)
    assert negated.reason is MissReason.WORDS
    assert negated.nearest is not None
    assert negated.nearest.text == FRANCE
    assert await client.lookup(query("word " * 400)) == Miss(MissReason.TOO_LONG)
    await put(exact, "How do I bake bread?")
    near = await client.near(query(PARAPHRASE), 1)
    assert isinstance(near.decision, Hit)
    (only,) = near.neighbours
    assert msgspec.structs.replace(only, group=b"") == Near(near.decision.similarity, FRANCE, stored, None)
    near = await client.near(query(PARAPHRASE), 5)
    assert [one.reason for one in near.neighbours] == [None, MissReason.FAR]


async def test_texts_are_embedded_for_callers(client: SemanticClient) -> None:
    """Unit vectors as float32 bytes with token counts; a text over the window is named."""
    import numpy as np

    texts = ["hello", "hello there", *(f"text number {number}" for number in range(20)), "hello"]
    few = await embed(client, texts)
    assert {one.dims for one in few} == {384}
    assert [tokens for one in few for tokens in one.tokens][:2] == [3, 4]
    vectors = np.array([np.frombuffer(vector, "<f4") for one in few for vector in one.vectors])
    assert vectors.shape == (23, 384)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] == pytest.approx(vectors[-1], abs=2e-6)
    with pytest.raises(TextTooLong, match="text 1 has 302 tokens, the encoder reads at most 256"):
        await embed(client, ["short", "word " * 300])


@pytest.mark.parametrize(
    ("text", "length", "length_max"),
    [("a" * 10_000_000, "10,000,000", "262,144"), (" " * 9_000 + "word", "9,004", "8,192")],
)
async def test_a_text_of_megabytes_never_reaches_the_tokenizer(
    client: SemanticClient, text: str, length: str, length_max: str
) -> None:
    """It would be one token after seconds in which no lookup is answered: its characters are counted first."""
    with pytest.raises(TextTooLong, match=f"text 9 has {length} characters, the encoder reads at most {length_max}"):
        await embed(client, [*["short"] * 9, text])
    assert len(await embed(client, [" " * 8_000 + "word"])) == 1  # white space alone makes no text too long


async def test_lookups_go_before_texts_of_callers(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """While two callers have thousands of long texts embedded, a lookup waits for one small piece of that work at most: for
    that under way."""
    await put(exact, FRANCE)
    await client.lookup(query(PARAPHRASE))
    async with SemanticClient(worker.socket_path) as other:
        await until_status(other, lambda status: status.is_ready)
        pieces = 0

        async def embed_many() -> None:
            nonlocal pieces
            async for _ in other.embed(["word " * 200] * 2_000):
                pieces += 1

        embedding = [asyncio.create_task(embed_many()) for _ in range(2)]
        for number in range(10):
            while pieces < number:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            before = pieces
            assert isinstance(await client.lookup(query(f"{PARAPHRASE}{' ' * number}")), Hit)
            assert pieces - before <= 3  # one whose reply was under way, one that was, and one if all this takes long
        for task in embedding:
            task.cancel()
        await asyncio.gather(*embedding, return_exceptions=True)


LONG = "Hold the button for ten seconds until the light turns red, then let go of it. " * 4


async def answered(exact: ExactCache, text: str, answer: str = LONG) -> AnswerText:
    """Stored, as a judge is asked about it."""
    entry = entry_for(ask(text), time.time(), answer)
    await exact.store(entry)
    return AnswerText(entry.exact, entry.created_at, answer)


async def test_answers_are_judged_and_their_sketches_kept(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache, server: RedisServer
) -> None:
    """Short ones are left open; the fresh answer's sketch reaches Redis, and one of the others' that had none."""
    one, fresh = await answered(exact, FRANCE), await answered(exact, "How do I bake bread?", LONG + "It is done.")
    short = [AnswerText(b"", 0.0, f"It is {number}.") for number in (7, 8, 7)]
    rulings = await client.judge(ACME, ask("x").compat, short[0], short[1:])
    assert [one.ruling for one in rulings] == [Ruling.UNKNOWN, Ruling.UNKNOWN]
    (judgement,) = await client.judge(ACME, ask("x").compat, fresh, [one])
    assert judgement.ruling is not Ruling.DIFFERENT
    redis = Redis.from_url(server.url)
    async with asyncio.timeout(20):
        for known in (one, fresh):
            while not await redis.hexists(f"sameway:{{{ACME.hex()}}}:vectors", known.exact + b"a"):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    await redis.aclose()


@pytest.mark.parametrize(
    "answer",
    [
        "a" * 65_000,
        "a.\n" * 20_000,
        "\x00\x1b" * 30_000,
        "😀" * 16_000,
        "Go. " * 16_000,
        " " * 65_000,
        "你好。" * 10_000,
    ],
    ids=lambda answer: repr(answer[:6]),
)
async def test_a_hostile_answer_is_judged_with_the_real_encoder(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache, answer: str
) -> None:
    """UNKNOWN, in time, and never an exception in the log."""
    fresh, other = await answered(exact, FRANCE, answer), await answered(exact, PARAPHRASE)
    await client.judge(ACME, ask("x").compat, other, [])
    (judgement,) = await client.judge(ACME, ask("x").compat, fresh, [other])
    assert judgement.ruling is Ruling.UNKNOWN
    assert "could not be judged" not in worker.log()


async def test_judging_that_finds_no_room_is_dropped_and_lookups_go_first(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """Of more answers than may wait some are refused at once; what waits behind lookups is judged after them."""
    await put(exact, FRANCE)
    await client.lookup(query(PARAPHRASE))
    fresh = AnswerText(b"", 0.0, LONG)
    async with SemanticClient(worker.socket_path, timeout_s=30) as other:
        await until_status(other, lambda status: status.is_ready)
        os.kill(worker.process.pid, signal.SIGSTOP)
        judging = [asyncio.create_task(other.judge(ACME, ask("x").compat, fresh, [fresh])) for _ in range(80)]
        lookups = [asyncio.create_task(other.lookup(query(f"{PARAPHRASE}{' ' * n}"))) for n in range(10)]
        await asyncio.sleep(0.05)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert all([isinstance(await lookup, Hit) for lookup in lookups])
        judged = sum(task.done() and task.exception() is None for task in judging)
        assert judged < 32  # of 64: on a busy machine a few wait long enough to have their turn
        found = await asyncio.gather(*judging, return_exceptions=True)
    refused = [one for one in found if isinstance(one, CacheWorkerUnavailable)]
    assert 1 <= len(refused) <= 16
    assert all("too many" in str(one) for one in refused)


async def test_killed_in_the_middle_of_judging(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """Its asker is told at once; the next worker judges, with the sketches that were stored."""
    fresh, other = await answered(exact, FRANCE), await answered(exact, PARAPHRASE)
    os.kill(worker.process.pid, signal.SIGSTOP)
    judging = asyncio.create_task(client.judge(ACME, ask("x").compat, fresh, [other]))
    await asyncio.sleep(0.05)
    worker.end(signal.SIGKILL)
    with pytest.raises(CacheWorkerUnavailable, match="went away"):
        await judging
    worker.start()
    await until_status(client, lambda status: status.is_ready)
    (judgement,) = await client.judge(ACME, ask("x").compat, fresh, [other])
    assert judgement.why != "the cache worker failed"


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 64,
        b"\x00\x00\x00\x05hello",
        b"\x00\x00\x00\x00",
        b"\x00\x00",
        WIRE.encode(CallFrame(1, AskLookup(query("x"))))[:-3],
    ],
)
async def test_garbage_closes_its_own_connection_only(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache, garbage: bytes
) -> None:
    """Whatever bytes arrive, others are served."""
    reader, writer = await asyncio.open_unix_connection(str(worker.socket_path))
    writer.write(garbage)
    writer.write_eof()
    async with asyncio.timeout(20):
        await reader.read()
    writer.close()
    await put(exact, FRANCE)
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)


async def test_what_waits_together_is_one_batch(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """Asks that pile up while the worker is busy are answered in few batches, each to its own asker."""
    await put(exact, FRANCE)
    await client.lookup(query(PARAPHRASE))
    before = await status_now(worker)
    async with SemanticClient(worker.socket_path, timeout_s=30) as other:
        await until_status(other, lambda status: status.is_ready)
        os.kill(worker.process.pid, signal.SIGSTOP)
        asked = [query(f"{PARAPHRASE} {'please ' * (number % 3)}{number}") for number in range(30)]
        answers = asyncio.gather(*((client, other)[number % 2].lookup(one) for number, one in enumerate(asked)))
        hit = asyncio.create_task(other.lookup(query(PARAPHRASE)))
        await asyncio.sleep(0.05)
        os.kill(worker.process.pid, signal.SIGCONT)
        assert [answer.reason for answer in await answers if isinstance(answer, Miss)] == [MissReason.NUMBERS] * 30
        assert isinstance(await hit, Hit)
    after = await status_now(worker)
    assert after.lookups - before.lookups == 31
    assert after.batches - before.batches <= 6


async def test_lookups_nobody_waits_for_are_not_computed(
    worker: WorkerProcess, client: SemanticClient, exact: ExactCache
) -> None:
    """Timed out, cancelled or disconnected: each is a miss or gone for the client, and dropped by the worker."""
    await put(exact, FRANCE)
    await client.lookup(query(PARAPHRASE))
    before = await status_now(worker)
    gone = SemanticClient(worker.socket_path, timeout_s=30)
    gone.start()
    await until_status(gone, lambda status: status.is_ready)
    os.kill(worker.process.pid, signal.SIGSTOP)
    try:
        cancelled = asyncio.create_task(client.lookup(query("cancelled")))
        left = asyncio.create_task(gone.lookup(query("left")))
        await asyncio.sleep(0.05)
        assert await client.lookup(query("late"), timeout_s=0.05) == Miss(MissReason.TIMEOUT)
        with pytest.raises(StopIteration) as returned:  # no lookup waits for a silent worker
            client.lookup(query("the next")).send(None)
        assert returned.value.value == Miss(MissReason.TIMEOUT)
        cancelled.cancel()
        await gone.aclose()
        assert await left == Miss(MissReason.UNAVAILABLE)
    finally:
        os.kill(worker.process.pid, signal.SIGCONT)
    await embed(client, ["it answers"])
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)
    # of the three that were given up, one may be read a moment before its goodbye; "cancelled" and "late" never are
    assert 1 <= (await status_now(worker)).lookups - before.lookups <= 2


async def test_redis_may_go_and_come_back(client: SemanticClient, exact: ExactCache, server: RedisServer) -> None:
    """Away, lookups are answered from the index and the status says so; back with its data, stores are seen again; back without,
    the index forgets."""
    await put(exact, FRANCE)
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)
    server.kill()
    await until_status(client, lambda status: not is_redis_up(status))
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)
    short = AnswerText(b"", 0.0, "It is 7.")
    assert [one.judge for one in await client.judge(ACME, ask("x").compat, short, [short])] == ["prose"]
    server.start()
    await until_status(client, is_redis_up)
    await put(exact, "How do I bake bread?")
    await until_hit(client, "How do I bake a bread")
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)
    redis = Redis.from_url(server.url)
    await redis.flushall()
    await redis.aclose()
    await until_status(client, lambda status: status.entries == 0 and status.is_ready)
    assert await client.lookup(query(PARAPHRASE)) == Miss(MissReason.EMPTY)
    await put(exact, FRANCE)
    assert isinstance(await client.lookup(query(PARAPHRASE)), Hit)


def test_sigterm_ends_it_cleanly_even_while_it_loads(server: RedisServer) -> None:
    """WorkerStatus 0, at once, and the socket is gone."""
    with run_worker(server.url) as worker:
        until(worker.socket_path.exists)
        assert worker.end(signal.SIGTERM) == 0
        assert not worker.socket_path.exists()


def test_it_ends_with_its_parent(server: RedisServer, tmp_path: Path) -> None:
    """Kill -9 of who started it leaves no orphan."""
    arguments = worker_argv(tmp_path / "s")
    code = f"import subprocess, time; p = subprocess.Popen({arguments!r}); print(p.pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=REPOSITORY,
        env={**os.environ, "SAMEWAY_REDIS_URL": server.url},
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until((tmp_path / "s").exists)
    parent.kill()
    parent.wait()
    until(lambda: not is_alive(child))
    assert not (tmp_path / "s").exists()


async def test_an_encoder_that_can_not_be_had_is_said(server: RedisServer) -> None:
    """The worker stays, says why, and lookups are misses."""
    with run_worker(server.url, embedder="/nowhere/model") as worker:
        async with SemanticClient(worker.socket_path) as client:
            status = await until_status(client, lambda status: status.state is WorkerState.FAILED)
            assert status.detail == "no embedder at /nowhere/model"
            assert await client.lookup(query("x")) == Miss(MissReason.LOADING)
            with pytest.raises(CacheWorkerUnavailable, match="/nowhere/model"):
                await embed(client, ["x"])


async def test_without_a_worker_the_client_never_raises(tmp_path: Path) -> None:
    """Lookups are misses at once; status is AWAY; only embed and near raise."""
    async with SemanticClient(tmp_path / "none") as client:
        assert await client.lookup(query("x")) == Miss(MissReason.UNAVAILABLE)
        assert client.status == WorkerStatus(WorkerState.AWAY)
        with pytest.raises(CacheWorkerUnavailable):
            await client.near(query("x"))


async def test_a_worker_that_talks_nonsense_is_left(tmp_path: Path) -> None:
    """Garbage from the other end is a miss, and the client connects anew."""
    calls = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        writer.write(WIRE.encode(ReplyFrame(0, WorkerStatus(WorkerState.READY))))
        while await reader.read(1_000) and calls < 3:
            writer.write(b"\x00\x00\x00\x03abc")
        writer.close()

    fake = await asyncio.start_unix_server(serve, str(tmp_path / "s"))
    async with SemanticClient(tmp_path / "s", timeout_s=20) as client:
        async with asyncio.timeout(20):
            while calls < 3:
                answer = await client.lookup(query("x"))
                assert answer in (Miss(MissReason.UNAVAILABLE), Miss(MissReason.LOADING))
                await asyncio.sleep(0.01)
    fake.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Running, and not a zombie that nobody has reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False


def test_a_vector_engine_without_a_part_ends_the_worker(server: RedisServer) -> None:
    """With the status of a bad configuration, by which the supervisor starts it no more, and a line that names the part."""
    with run_worker(server.url, server.url) as worker:
        assert worker.process.wait(60) == os.EX_CONFIG
        assert "the server has no FT.CREATE" in worker.log()
