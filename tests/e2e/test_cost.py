"""What a request costs, in things that can be counted: round trips, commands, tasks, SQL statements, connections.

A worker inside the test's own process, its background loops off, so that every count is a request's own. The numbers are asserted
exactly: who makes a request dearer, or cheaper, changes them here.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from openai import OpenAI
from redis.asyncio import Redis
from sqlalchemy import event

from cache.decision import normal_form
from cache.entry import Purge
from cache.query import Hit, Trial
from gateway.app import WorkerParts
from gateway.settings import Settings
from policies import WindowKind
from tests.e2e.gateway import API_KEY, Gateway, deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import open_worker
from tests.services import RedisServer

SERVER = "_future_watcher_wrapper.<locals>.future_watcher"  # granian's task of a request
TASKS_OF_A_GENERATION = {SERVER: 1, "Pipeline.generate": 1}
TASKS_OF_A_HIT = {SERVER: 1}


@dataclass
class Cost:
    """What was counted between two moments. `commands` by their first word, scripts as EVALSHA."""

    round_trips: int = 0
    commands: dict[str, int] = field(default_factory=dict)
    tasks: dict[str, int] = field(default_factory=dict)
    statements: int = 0
    connections: int = 0


class Worker:
    """A gateway worker and one client's connection to it."""

    def __init__(self, parts: WorkerParts, upstream: Upstream, port: int) -> None:
        self.parts = parts
        self._upstream = upstream
        self._port = port
        self._commands: Counter[str] = Counter()
        self._tasks: Counter[str] = Counter()
        self._statements = 0
        self._asked = 0
        self._count()

    def _count(self) -> None:
        link = self.parts.link
        enqueue = link._enqueue

        def counting(pending: Any) -> Any:
            self._commands[str(pending.command[0])] += 1
            return enqueue(pending)

        link._enqueue = counting  # type: ignore[method-assign]

        def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **options: Any) -> asyncio.Task[Any]:
            self._tasks[coroutine.__qualname__] += 1
            return asyncio.Task(coroutine, loop=loop, **options)

        asyncio.get_running_loop().set_task_factory(make_task)  # type: ignore[arg-type]
        engine = self.parts.accounts.database._engine.sync_engine

        @event.listens_for(engine, "before_cursor_execute")
        def count_statement(*_: Any) -> None:
            self._statements += 1

    async def connect(self) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)

    async def cost_of_many(self, count: int) -> Cost:
        """What so many misses cost that are asked at once, each on a connection of its own."""
        others = [copy.copy(self) for _ in range(count)]
        for number, other in enumerate(others):
            other._asked += 1_000 * number
            await other.connect()
        round_trips = self.parts.link.round_trips
        self._commands.clear()
        await asyncio.gather(*(other.ask() for other in others))
        for other in others:
            other.close()
        return Cost(self.parts.link.round_trips - round_trips, dict(self._commands))

    async def ask(self, text: str | None = None, **fields: Any) -> dict[str, str]:
        """One answered request; the response's headers. Returns when it is recorded."""
        self._asked += 1
        body = {"model": "mock", "messages": [{"role": "user", "content": text or f"question {self._asked}"}], **fields}
        data = json.dumps(body).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:] if line)
        assert lines[0].endswith(" 200 OK"), lines
        if "content-length" in headers:
            await self._reader.readexactly(int(headers["content-length"]))
        else:
            assert (await self._reader.readuntil(b"0\r\n\r\n")).count(b"data: [DONE]") == 1
        await self.parts.pipeline.drain()
        left = asyncio.Event()
        self.parts.link.defer(left.set)  # behind what is gathered
        await left.wait()
        while self.parts.learning.judging.waiting:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return headers

    async def cost(self, text: str | None = None, **fields: Any) -> Cost:
        """What one request costs."""
        connections, round_trips = self._upstream.seen().connections_total, self.parts.link.round_trips
        self._commands.clear()
        self._tasks.clear()
        self._statements = 0
        await self.ask(text, **fields)
        return Cost(
            self.parts.link.round_trips - round_trips,
            dict(self._commands),
            dict(self._tasks),
            self._statements,
            self._upstream.seen().connections_total - connections,
        )

    async def limit(self, per_min: int) -> None:
        """Give the team rate limits, and the clock of what is borrowed a rest."""
        await self.parts.accounts.update_team(1, requests_per_min=per_min, tokens_per_min=1_000 * per_min)
        self.parts.pipeline.limits._shared._clock = lambda: 1_000.0

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def worker(
    redis_server: RedisServer,
    redis: Redis,
    upstream: Upstream,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[Worker]:
    """A worker with a hard budget and without limits, asked twice by each way."""
    settings = Settings(
        data_dir=tmp_path,
        redis_url=redis_server.url,
        api_key=API_KEY,
        secret="s" * 32,
        log_format="json",
        engines={},
        cache=getattr(request, "param", {"is_semantic": False}),
        models={"mock": {"deployments": [deployment(upstream.url, "plain", "mock?chunks=64")]}},  # type: ignore[dict-item]
    )
    async with open_worker(settings, monkeypatch) as opened:
        parts = opened.parts
        await parts.semantic.aclose()
        await parts.accounts.create_budget(1, WindowKind.DAY, 10**12)
        assert await parts.writer.step()
        made = Worker(parts, upstream, opened.port)
        await made.connect()
        for stream in (False, True, False):
            await made.ask(stream=stream)
        async with asyncio.timeout(60):
            yield made
        made.close()


GENERATION = Cost(3, {"EVALSHA": 4}, TASKS_OF_A_GENERATION)


async def test_a_miss(worker: Worker) -> None:
    """The lookup, which claims the answer; the hold; the settlement with its ledger row and the store together.
    Nothing is asked of SQL, and the connection to the deployment is kept."""
    assert await worker.cost() == GENERATION


async def test_a_streamed_miss(worker: Worker) -> None:
    """A stream of 64 chunks costs what a whole costs."""
    assert await worker.cost(stream=True) == GENERATION


async def test_misses_that_end_together(worker: Worker) -> None:
    """Eight are looked up and held one by one, and settled and stored by one command each for all of them, in one round trip."""
    worker.parts.link.patience_s = 1.0  # on the busiest machine they end within it
    cost = await worker.cost_of_many(8)
    assert cost.commands == {"EVALSHA": 8 + 8 + 2}
    assert cost.round_trips <= 8 + 8 + 1


async def test_a_long_dialogue(worker: Worker) -> None:
    """Earlier turns cost no command where there is one deployment, and so no warm one to choose."""
    turns = [{"role": role, "content": f"{role} {i}"} for i in range(20) for role in ("user", "assistant")]
    assert await worker.cost(messages=[*turns, {"role": "user", "content": "and?"}]) == GENERATION


async def test_a_hit_from_redis(worker: Worker) -> None:
    """One command, whole or streamed; no generation, no money. A script, for another worker may have stored it."""
    await worker.ask("again")
    for stream in (False, True):
        worker.parts.exact._l1.clear()
        assert await worker.cost("again", stream=stream) == Cost(1, {"EVALSHA": 1}, TASKS_OF_A_HIT)


@pytest.mark.parametrize("worker", [{"is_semantic": False, "l1_bytes_max": 0}], indirect=True)
async def test_a_hit_that_memory_had_no_room_for(worker: Worker, redis: Redis) -> None:
    """Redis reads one field and runs no script; an entry that is gone since is generated."""
    await worker.ask("again")
    for stream in (False, True):
        await redis.config_resetstat()
        assert await worker.cost("again", stream=stream) == Cost(1, {"HGET": 1}, TASKS_OF_A_HIT)
        counted = {name.split("|")[0] for name in await redis.info("commandstats")}  # from Redis 7 on by sub-command
        assert counted - {"cmdstat_config", "cmdstat_info"} == {"cmdstat_hget"}
    await worker.parts.exact.purge(Purge())
    assert await worker.cost("again") != Cost(1, {"HGET": 1}, TASKS_OF_A_HIT)
    assert await worker.cost("again") == Cost(1, {"HGET": 1}, TASKS_OF_A_HIT)


async def test_a_hit_from_memory(worker: Worker) -> None:
    """Nothing leaves the process."""
    await worker.ask("again")
    for stream in (False, True):
        assert await worker.cost("again", stream=stream) == Cost(0, {}, TASKS_OF_A_HIT)


@pytest.mark.parametrize("worker", [{"check_share": 0}], indirect=True)
async def test_a_hit_by_the_same_words(worker: Worker) -> None:
    """The look-up's one command finds it; what is remembered for feedback follows the answer."""
    await worker.ask("What is it like there?")
    for text in (" What is  it like there?", "What is it  like there? "):
        for stream in (False, True):
            cost = await worker.cost(text, stream=stream)
            assert cost.commands["EVALSHA"] == 2
            assert cost.commands.keys() <= {"EVALSHA", "EVAL"}  # its text, the first time
            assert cost.tasks.keys() <= {*TASKS_OF_A_HIT, "Judging._remember"}
            assert (cost.statements, cost.connections) == (0, 0)


@pytest.mark.parametrize("worker", [{"check_share": 0}], indirect=True)
async def test_a_hit_by_meaning(worker: Worker, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the look-up, one command points the new words at the entry and ends the claim; what is remembered for feedback
    shares a round trip. The words are brought into their normal form once."""
    await worker.ask("What is it like there?")
    (key,) = await redis.keys("sameway:*:used")
    (exact,) = await redis.zrevrange(key, 0, 0)
    trial = Trial(ranked=(exact,), features=b"", p=0.99, chance=1.0, rule=b"")
    monkeypatch.setattr(worker.parts.semantic, "lookup", AsyncMock(return_value=Hit(exact, 0.97, "", trial)))
    await worker.ask("Tell me, what is it like there?")  # Redis has the scripts then
    folded = Mock(wraps=normal_form.normal_form)
    monkeypatch.setattr(normal_form, "normal_form", folded)
    for number in range(12):  # an entry has fewer pointers
        cost = await worker.cost(f"Tell me, what is {number} of it like there?")
        assert (cost.commands, cost.round_trips) == ({"EVALSHA": 3}, 3)
    assert folded.call_count == 12
    assert not await redis.keys("*:claim:*")


async def test_large_limits_cost_nothing(worker: Worker) -> None:
    """Rate limits are charged in memory once a share of them is borrowed."""
    await worker.limit(1_000_000)
    await worker.ask("again")
    assert await worker.cost() == GENERATION
    assert await worker.cost("again") == Cost(0, {}, TASKS_OF_A_HIT)


async def test_small_limits_cost_commands_and_no_round_trips(worker: Worker) -> None:
    """A limit that is asked of Redis each time travels with the lookup, its tokens with the hold, their correction with the
    settlement."""
    await worker.limit(400)
    await worker.ask("again")
    costs = await worker.cost()
    assert costs.round_trips == 3
    worker.parts.exact._l1.clear()
    assert await worker.cost("again") == Cost(1, {"EVALSHA": 2}, TASKS_OF_A_HIT)


async def test_a_request_leaves_nothing_to_the_collector(worker: Worker) -> None:
    """What a request made is freed by its last reference: no cycle waits for a collection."""
    await worker.ask("again")
    for stream in (False, True):
        gc.collect()
        gc.freeze()  # a collection looks at what the requests made, not at the whole suite
        gc.disable()
        try:
            for _ in range(20):
                await worker.ask("again", stream=stream)
            hits = gc.collect()
            for _ in range(20):
                await worker.ask(stream=stream)
            misses = gc.collect()
        finally:
            gc.enable()
        assert (hits // 20, misses // 20) == (0, 0)


def test_a_workers_threads_share_one_arena(gateway: Gateway, client: OpenAI) -> None:
    """With an arena of glibc's for each thread, each would keep the most that it ever held."""
    client.chat.completions.create(model="mock", messages=[{"role": "user", "content": "arenas"}])
    workers = [process for process in gateway.children("gateway worker") if "-m" in process.cmdline()]
    assert [_thread_arenas(process.pid) for process in workers] == [0]


def _thread_arenas(pid: int) -> int:
    """glibc reserves 64 MiB for a thread's arena, at a multiple of it, and opens it from the start as it is needed."""
    size = 64 << 20
    spans = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    regions = [(*(int(end, 16) for end in span[0].split("-")), span[1]) for span in spans]
    return sum(
        start % size == 0
        and opened.startswith("rw")
        and middle == after
        and (end - start) == size
        and closed[:3] == "---"
        for (start, middle, opened), (after, end, closed) in itertools.pairwise(regions)
    )
