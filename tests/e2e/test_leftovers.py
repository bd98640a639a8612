"""What a request leaves in memory when it has ended, by each way out: nothing.

A worker in the test's own process, with the collector off: what only a collection would free stays, and is counted. The body of
a request is as large as its client likes, and collections are rare, so that a single cycle is memory for free.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import socket
import types
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import uvloop
from redis.exceptions import ConnectionError as RedisConnectionError

from cache import CacheWorkerUnavailable, Miss, MissReason
from cache.event_loop import Loop
from cache.query import Neighbourhood
from cache.worker import messages as cache_wire
from gateway.journey import tries
from gateway.settings import Settings
from ipc import IncomingCall, RpcServer
from local_engine import EngineUsage, Output
from local_engine.messages import EngineError, EngineFailed, PromptTooLong
from policies import WindowKind
from tests.backends.test_local import ScriptedEngine
from tests.e2e.gateway import API_KEY, deployment
from tests.e2e.upstream import Upstream
from tests.e2e.worker import OpenWorker, open_worker
from tests.rpc import StandIn
from tests.services import RedisServer

TIMES = 10
ADMIN_KEY = "sk-admin-0123456789abcdef0123456789abcdef"
CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASKED_OF_ADMINS = f"Authorization: Bearer {ADMIN_KEY}\r\nContent-Type: application/json\r\n"
QUICK = {"ttft_timeout_ms": 100, "idle_timeout_ms": 100}

# the aliases, and how the upstream answers each
PLANS = {
    "mock": "",
    "rejects": "status=400",
    "away": "status=404",
    "unknown-key": "status=401;body=auth",
    "busy": "status=429;retry_after=7",
    "fails": "status=500",
    "late": "delay_ms=100",
    "late-rejects": "delay_ms=100;status=400",
    "late-fails": "delay_ms=100;status=500",
    "late-cut": "pace_ms=20;cut=middle",
    "slow": "pace_ms=20;chunks=200",
    "hangs": "hang=headers",
    "hangs-quick": "hang=headers",
    "hangs-first-quick": "hang=first",
    "hangs-middle-quick": "hang=middle",
    "cut-headers": "cut=headers",
    "cut-middle": "cut=middle",
    "cut-end": "cut=end",
    "reset": "cut=middle;reset=1",
    "error-first": "error=first",
    "error-middle": "error=middle",
    "malformed": "malformed=middle",
    "page": "body=html;is_whole=1",
    "unfinished": "has_finish=0",
    "gives-up": "finish=error",
    "other-form": "is_whole=1",
    "no-text": "note=bytes",
    "out-of-range": "note=range;is_stream=1",
}
UPSTREAM_FAILURES = [
    alias for alias in PLANS if alias not in ("mock", "hangs") and not alias.startswith(("late", "slow"))
]
STREAMED_ONLY = ("quick", "cut-end")  # a whole answer has no such place, or is waited for too long


class Sender:
    """Clients of the worker, over plain sockets: they make no cycles of their own."""

    def __init__(self, worker: OpenWorker) -> None:
        self.worker = worker
        self.engine_plays = ""
        self.is_cache_worker_silent = False
        self.cache_worker = _cache_worker(self)
        self.keys: dict[str, str] = {}
        self._numbers = itertools.count()
        self._loop = asyncio.get_running_loop()

    def body(self, model: str = "mock", **fields: Any) -> bytes:
        """A new question to a model."""
        messages = [{"role": "user", "content": f"question {next(self._numbers)}"}]
        return json.dumps({"model": model, "messages": messages, **fields}).encode()

    async def open(self, path: str, body: bytes, headers: str = "", *, size: int | None = None) -> socket.socket:
        """A connection that has sent a request; `size` is announced instead of the body's."""
        if "Authorization" not in headers:
            headers += f"Authorization: Bearer {API_KEY}\r\n"
        opened = socket.socket()
        opened.setblocking(False)
        await self._loop.sock_connect(opened, ("127.0.0.1", self.worker.port))
        length = len(body) if size is None else size
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n"
        await self._loop.sock_sendall(opened, head.encode() + body)
        return opened

    async def all_of(self, opened: socket.socket) -> int:
        """Read until the connection ends; the status."""
        data = b""
        while part := await self._loop.sock_recv(opened, 1 << 16):
            data += part
        opened.close()
        return int(data[9:12] or b"0")

    async def ask(self, body: bytes | str = b"", headers: str = "", path: str = CHAT) -> int:
        """The status of one request; a text is the name of a model."""
        return await self.all_of(await self.open(path, self.body(body) if isinstance(body, str) else body, headers))

    async def leave(self, opened: socket.socket, *, after: bytes = b"", resets: bool = False) -> int:
        """Close the connection, after these bytes of the answer or while it is awaited."""
        if after:
            data = b""
            while after not in data:
                data += await self._loop.sock_recv(opened, 1 << 16)
        else:
            await asyncio.sleep(0.02)
        if resets:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        opened.close()
        return 0

    async def together(self, model: str, leave: str = "", **fields: Any) -> int:
        """Two identical requests at once, of which `leave` ("leader", "reader" or "both") go away; the last status."""
        body = self.body(model, **fields)
        leader = await self.open(CHAT, body)
        await asyncio.sleep(0.02)
        reader = await self.open(CHAT, body)
        await asyncio.sleep(0.02)
        status = 0
        for who, opened in (("leader", leader), ("reader", reader)):
            if leave in (who, "both"):
                await self.leave(opened)
        for who, opened in (("leader", leader), ("reader", reader)):
            if leave not in (who, "both"):
                status = await self.all_of(opened)
        return status

    async def without_redis(self, ask: Awaitable[int]) -> int:
        """A request whose commands fail: the connection is cut, and no other can be made."""
        link = self.worker.parts.link
        url, link.url = link.url, "unix:///nonexistent"
        assert link._wire is not None
        link._wire.end(RedisConnectionError("cut"))  # what the request before still waits for fails, too
        try:
            return await ask
        finally:
            await self.worker.parts.pipeline.drain()
            link.url = url
            async with asyncio.timeout(60):
                while not link.is_up:  # noqa: ASYNC110 - the link comes back by itself
                    await asyncio.sleep(0.01)
            await self.worker.parts.money.retry()

    async def with_engine(self, plays: str, **fields: Any) -> int:
        """A request to the local engine, which plays a part of `_script`."""
        self.engine_plays = plays
        return await self.ask(self.body("engine", **fields))

    async def while_cache_worker_ends(self) -> int:
        """A request whose lookup is not answered, because the worker's connection ends."""
        self.is_cache_worker_silent = True
        waiting = await self.open(CHAT, self.body())
        await asyncio.sleep(0.02)
        self.cache_worker.die()
        self.is_cache_worker_silent = False
        status = await self.all_of(waiting)
        async with asyncio.timeout(60):
            while not self.worker.parts.semantic.is_connected:  # noqa: ASYNC110 - the client comes back by itself
                await asyncio.sleep(0.01)
        return status

    def rest(self) -> None:
        """Close every breaker: each request reaches its upstream."""
        for one in self.worker.parts.fleet.deployments:
            one.health.reset()


Exit = tuple[int, Callable[[Sender], Awaitable[int]]]
"""A status, 0 for a client that leaves, and one request that ends so."""


def _prompts(model: str, *prompts: Any, **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": prompts, "cache": {"no-cache": True}, **fields}).encode()


def _responses(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, "input": "what?", "cache": {"no-cache": True}, **fields}).encode()


def _key(name: str) -> Callable[[Sender], Awaitable[int]]:
    return lambda to: to.ask("mock", f"Authorization: Bearer {to.keys[name]}\r\n")


REFUSED: dict[str, Exit] = {
    "no key": (401, lambda to: to.ask("mock", "Authorization: none\r\n")),
    "unknown key": (401, lambda to: to.ask("mock", "Authorization: Bearer sk-none\r\n")),
    "no JSON": (400, lambda to: to.ask(b'{"model": "mock", "messages": [{"role": "user", "content": "word')),
    "half a pair": (400, lambda to: to.ask(b'{"model": "\\ud800"}')),
    "deep": (400, lambda to: to.ask(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}")),
    "no object": (400, lambda to: to.ask(b"[]")),
    "a bad field": (400, lambda to: to.ask(to.body(temperature=9))),
    "a bad control": (400, lambda to: to.ask(to.body(cache={"x": 1}))),
    "no such model": (404, lambda to: to.ask("none")),
    "too large": (413, lambda to: to.ask(b" " * 1_100_000)),
    "a coding": (415, lambda to: to.ask("mock", "Content-Encoding: br\r\n")),
    "no gzip": (400, lambda to: to.ask("mock", "Content-Encoding: gzip\r\n")),
    "only if cached": (504, lambda to: to.ask("mock", "Cache-Control: only-if-cached\r\n")),
    "over budget": (429, _key("poor")),
    "rate limited": (429, _key("limited")),
    "tokens limited": (429, _key("tokens")),
    "another's model": (403, _key("other")),
    "too long": (400, lambda to: to.ask("narrow")),
    "no tools there": (
        400,
        lambda to: to.ask(to.body("plain", tools=[{"type": "function", "function": {"name": "f"}}])),
    ),
    "no server": (503, lambda to: to.ask("refused")),
    "prompts": (400, lambda to: to.ask(_prompts("mock", "a", 1), path=COMPLETIONS)),
    "responses": (400, lambda to: to.ask(_responses("mock", previous_response_id="x"), path=RESPONSES)),
    "embeddings": (400, lambda to: to.ask(b'{"model": "all-minilm-l6-v2", "input": 5}', path="/v1/embeddings")),
    "no embedder": (503, lambda to: to.ask(b'{"model": "all-minilm-l6-v2", "input": "5"}', path="/v1/embeddings")),
    "feedback": (400, lambda to: to.ask(b'{"x": 1}', path="/v1/feedback")),
    "no such route": (404, lambda to: to.ask(b"{}", path="/v1/none")),
    "admin, no key": (401, lambda to: to.ask(b'{"name": "x"}', "Authorization: none\r\n", "/admin/api/teams")),
    "admin, no JSON": (400, lambda to: to.ask(b'{"name": "x', ASKED_OF_ADMINS, "/admin/api/teams")),
    "admin, a bad field": (400, lambda to: to.ask(b'{"name": ""}', ASKED_OF_ADMINS, "/admin/api/teams")),
    "admin, no such page": (404, lambda to: to.ask(b"", ASKED_OF_ADMINS, "/admin/api/none")),
    "admin, too many wrong keys": (429, lambda to: to.ask(b'{"name": "x"}', path="/admin/api/teams")),
}
FAILED: dict[str, Exit] = {
    f"{alias}, {'streamed' if is_stream else 'whole'}": (
        0,
        lambda to, a=alias, s=is_stream: to.ask(to.body(a, stream=s)),
    )  # type: ignore[misc]
    for alias in UPSTREAM_FAILURES
    for is_stream in (False, True)
    if is_stream or not alias.endswith(STREAMED_ONLY)
} | {
    "failover": (200, lambda to: to.ask("failover")),
    "prompts": (400, lambda to: to.ask(_prompts("rejects", "a", "b"), path=COMPLETIONS)),
    "responses": (400, lambda to: to.ask(_responses("rejects"), path=RESPONSES)),
    "responses, cut": (200, lambda to: to.ask(_responses("cut-middle", stream=True), path=RESPONSES)),
    "deadline": (504, lambda to: to.ask("hangs", "X-Stainless-Read-Timeout: 0.05\r\n")),
    "deadline, streamed": (504, lambda to: to.ask(to.body("hangs", stream=True), "X-Stainless-Read-Timeout: 0.05\r\n")),
    "two, failed": (503, lambda to: to.together("late-fails")),
    "two, rejected": (400, lambda to: to.together("late-rejects")),
    "two, cut": (200, lambda to: to.together("late-cut", stream=True)),
    "no Redis": (503, lambda to: to.without_redis(to.ask("mock"))),
    "no Redis, limited": (200, lambda to: to.without_redis(_key("generous")(to))),
    "the cache worker ends": (200, lambda to: to.while_cache_worker_ends()),
    "engine": (200, lambda to: to.with_engine("answers")),
    "engine, too long": (400, lambda to: to.with_engine("too long")),
    "engine, failed": (503, lambda to: to.with_engine("fails")),
    "engine, aborted": (502, lambda to: to.with_engine("aborts")),
    "engine, silent": (504, lambda to: to.with_engine("nothing", stream=True)),
}
LEFT: dict[str, Callable[[Sender], Awaitable[int]]] = {
    "in the head of its body": lambda to: _left(to, b"", size=1_000),
    "in its body": lambda to: _left(to, to.body() + b" " * 200_000, size=300_000),
    "at once": lambda to: _left(to, to.body(), at_once=True),
    "while it waits": lambda to: _left(to, to.body("hangs")),
    "by a reset": lambda to: _left(to, to.body("hangs"), resets=True),
    "while it waits for a stream": lambda to: _left(to, to.body("hangs", stream=True)),
    "in a stream": lambda to: _left(to, to.body("slow", stream=True), after=b"data: "),
    "in a stream, by a reset": lambda to: _left(to, to.body("slow", stream=True), after=b"data: ", resets=True),
    "in a response's stream": lambda to: _left(to, _responses("slow", stream=True), after=b"data: ", path=RESPONSES),
    "while prompts wait": lambda to: _left(to, _prompts("hangs", "a", "b"), path=COMPLETIONS),
    "while an engine works": lambda to: _left(to, to.body("engine", stream=True)),
    "an admin's body": lambda to: _left(to, b'{"name', path="/admin/api/teams", size=100),
    "the leader": lambda to: to.together("late", "leader"),
    "the leader of a failure": lambda to: to.together("late-fails", "leader"),
    "a reader": lambda to: to.together("late", "reader"),
    "both": lambda to: to.together("late", "both"),
}


async def _announced(to: Sender, size: int) -> int:
    return await to.all_of(await to.open(CHAT, to.body(), size=size))


async def _left(
    to: Sender, body: bytes, *, path: str = CHAT, size: int | None = None, at_once: bool = False, **how: Any
) -> int:
    to.engine_plays = "nothing"
    opened = await to.open(path, body, size=size)
    if at_once:
        opened.close()
        return 0
    return await to.leave(opened, **how)


def _script(to: Sender) -> Callable[[Any], list[Output | EngineError]]:
    def play(request: Any) -> list[Output | EngineError]:
        usage = EngineUsage(prompt_tokens=1, completion_tokens=1)
        ended = {"answers": "stop", "aborts": "abort"}.get(to.engine_plays)
        if ended is not None:
            return [Output(index=0, text="well", finish_reason=ended, usage=usage)]  # type: ignore[arg-type]
        too_long = PromptTooLong("no", prompt_tokens=9, context_tokens=5)
        error = {"too long": too_long, "fails": EngineFailed("no")}.get(to.engine_plays)
        return [error] if error is not None else []

    return play


def _cache_worker(to: Sender) -> StandIn:
    """A cache worker with an empty index."""

    def answer(call: IncomingCall[cache_wire.Ask]) -> None:
        if isinstance(call.body, cache_wire.AskLookup) and not to.is_cache_worker_silent:
            call.reply(Neighbourhood(Miss(MissReason.EMPTY), ()))
        elif isinstance(call.body, cache_wire.AskEmbed):
            call.fail(CacheWorkerUnavailable("not here"))

    status = cache_wire.WorkerStatus(cache_wire.WorkerState.AWAY)
    return StandIn(RpcServer(cache_wire.WIRE, state=lambda: status, on_call=answer))


def _models(url: str) -> dict[str, Any]:
    def one(name: str, plan: str, **more: Any) -> dict[str, Any]:
        return {"deployments": [deployment(url, f"at-{name}", f"mock?{plan}" if plan else "mock", **more)]}

    models = {name: one(name, plan, **(QUICK if name.endswith("quick") else {})) for name, plan in PLANS.items()}
    models["plain"] = one("plain", "", capabilities=[])
    models["narrow"] = one("narrow", "", context_tokens_max=5)
    models["refused"] = {"deployments": [deployment("http://127.0.0.1:9/v1", "nobody")]}
    first = deployment(url, "first", "mock?status=500", price={})
    models["failover"] = {"policy": "cheapest", "deployments": [first, deployment(url, "second")]}
    models["engine"] = {"deployments": [{"name": "engine", "backend": "local", "engine": "default", **QUICK}]}
    return models


@pytest.fixture(scope="module")
def event_loop_policy() -> asyncio.AbstractEventLoopPolicy:
    """A worker's loop, whose transports are other objects than asyncio's."""
    policy = uvloop.EventLoopPolicy()
    policy._loop_factory = Loop  # type: ignore[method-assign]
    return policy


async def _teams(to: Sender) -> None:
    """A key for each limit."""
    accounts = to.worker.parts.accounts
    limits: dict[str, dict[str, Any]] = {
        "poor": {},
        "limited": {"requests_per_min": 1},
        "tokens": {"tokens_per_min": 1},
        "generous": {"requests_per_min": 1_000_000},
        "other": {},
    }
    for name, limit in limits.items():
        team = await accounts.create_team(name, **limit)
        models = ("other",) if name == "other" else None
        to.keys[name] = (await accounts.create_key(team.id, "key", models=models)).plaintext
        if name == "poor":
            await accounts.create_budget(team.id, WindowKind.DAY, 1)
    await accounts.create_budget(1, WindowKind.DAY, 10**12)
    assert await to.worker.parts.writer.step()


@pytest.fixture
async def to(
    redis_server: RedisServer, redis: object, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Sender]:
    """A worker with a scripted engine, a scripted cache worker, and an alias for each way to fail."""
    monkeypatch.setattr(tries, "pause_before_retry", lambda failure, attempts: None)
    settings = Settings(
        data_dir=tmp_path,
        redis_url=redis_server.url,
        api_key=API_KEY,
        admin_key=ADMIN_KEY,
        secret="s" * 32,
        body_bytes_max=1_000_000,
        engines={"default": {}},  # type: ignore[dict-item]
        models=_models(upstream.url),
    )
    settings.run_dir.mkdir(mode=0o700)
    engine = ScriptedEngine(tmp_path)
    engine.path = settings.engine_socket("default")
    await engine.start(engine.path)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(open_worker(settings, monkeypatch))
        sender = Sender(worker)
        engine.script = _script(sender)
        await sender.cache_worker.start(settings.cache_socket)
        await _teams(sender)
        yield sender
        await sender.cache_worker.stop()
    await engine.stop()


async def left_by(to: Sender, leave: Callable[[Sender], Awaitable[int]]) -> Counter[str]:
    """The objects that `TIMES` requests left, by type: those that only a collection frees, and those of ours that live on."""

    async def settle() -> None:
        await to.worker.parts.pipeline.drain()
        await asyncio.sleep(0.03)
        await to.worker.parts.pipeline.drain()

    for _ in range(2):
        to.rest()
        await leave(to)
    await settle()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for _ in range(TIMES):
            to.rest()
            await leave(to)
        await settle()
        alive = Counter(type(one).__qualname__ for one in gc.get_objects() if _is_of_a_request(one))
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        cyclic = Counter(type(one).__qualname__ for one in gc.garbage)
        gc.garbage.clear()
    finally:
        gc.set_debug(0)
        gc.enable()
    return Counter({name: count for name, count in (alive | cyclic).items() if count >= TIMES})


REQUESTS = frozenset(
    {"Turn", "Generation", "Flight", "Reader", "Reply", "Exchange", "OpenAIStream", "LocalStream", "RequestCycle"}
)


def _is_of_a_request(one: object) -> bool:
    return isinstance(one, BaseException | types.TracebackType) or type(one).__qualname__ in REQUESTS


async def test_a_refused_request_leaves_nothing(to: Sender) -> None:
    """A body that is not read, not understood, not allowed or not affordable is freed with its refusal."""
    await _check(to, REFUSED)


async def test_a_failed_request_leaves_nothing(to: Sender) -> None:
    """Whatever the upstream, the engine, Redis or the cache worker does, its request is freed with the answer's end."""
    await _check(to, FAILED)


async def test_a_client_that_leaves_leaves_nothing(to: Sender) -> None:
    """A request is freed when its client leaves, wherever it was: alone, or in a flight with others."""
    await _check(to, {name: (0, leave) for name, leave in LEFT.items()})


async def _check(to: Sender, exits: dict[str, Exit]) -> None:
    found: dict[str, Any] = {}
    for name, (status, leave) in exits.items():
        if left := await left_by(to, leave):
            found[name] = dict(left)
        to.rest()
        got = await leave(to)
        if status and got != status:
            found[f"{name}: the status"] = got
    assert found == {}
