"""The heart of the gateway in one process: endpoints, pipeline, real Redis, real accounts; scripted backends and a clock.

Every object of the product that a test of the journey needs is made in this file, and nowhere else: tests speak to `World`,
`Client`, `Reply` and `ScriptedBackend`. Invariant: when a world closes, nothing is under way and nothing is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import json
import secrets
import shutil
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import sqlalchemy as sa
from openai import AsyncOpenAI
from redis.asyncio import Redis

from cache import CacheLimits, ExactCache, Hit, Miss, MissReason, Partition, Purge, Query, SemanticClient
from cache.entry import About
from cache.query import Asked as Candidate
from cache.query import LookupResult, Near, Trial, Undecided
from cache.redis_link import RedisLink
from cache.verdicts import Judge, Verdict, VerdictStore
from cache.verdicts.records import AnswerJudged
from cache.worker.messages import Embedded
from gateway.access.agents import Agents
from gateway.access.people import Bearers
from gateway.access.provider import Provider
from gateway.accounts import Identity, LedgerRow, decode_row, partition_of, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import NoAnswer
from gateway.accounts.ledger import Ledger
from gateway.accounts.provider_ids import ProviderIds
from gateway.accounts.sessions import Sessions
from gateway.accounts.spool import Spool
from gateway.accounts.stored_responses import ResponseStore, StoredResponse
from gateway.api.background import Background
from gateway.api.chat import AnswerEndpoint
from gateway.api.compaction import Compact
from gateway.api.front import Front
from gateway.api.memory import Memory
from gateway.api.messages import CountTokens, Messages
from gateway.api.models import Models
from gateway.api.openapi import PATHS, routes_of
from gateway.api.responses import InputTokens, Responses
from gateway.api.stored_responses import ConversationsEndpoint, StoredResponses
from gateway.api.telemetry import Telemetry
from gateway.backends.base import (
    BackendBroken,
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
    BackendUnavailable,
    Load,
    Native,
)
from gateway.backends.openai.backend import OpenAIBackend
from gateway.backends.refusals import UpstreamRefusal, refusal
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet, build_fleet
from gateway.journey.bodies import Bodies
from gateway.journey.budget import Money
from gateway.journey.generation import Compared
from gateway.journey.rate_limits import Limits
from gateway.journey.record import Record, RequestFacts
from gateway.journey.semantic import Bounds, SemanticLookup
from gateway.learning.checks import Checks
from gateway.learning.internal_requests import InternalRequests
from gateway.learning.spending import Spending
from gateway.learning.verifiers import Verifiers
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats
from gateway.telemetry.traces import Traces
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.types import KINDS, Chunk
from policies import Budget, Budgets, LeasedRateLimits, LocalRateLimits, RateLimits, Usage, WindowKind
from policies.breaker import Asker
from policies.holds import LEDGER_LOCK, LEDGER_STREAM
from tests.services import RedisServer

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

IDENTITY_HEADERS = {"x-fairness": "team", "X-Objective": "tag:priority", "x-session": "session", "x-user": "user"}
KEY = "sk-sw-world-0123456789abcdef0123456789abcdef"
TOO_DEEP = (
    495 if sys.version_info < (3, 12) else 1500
)  # JSON that can be read, and not walked by Python's own recursion
WITHIN_S = 5.0  # whatever a test waits for takes milliseconds: this is when it has failed


async def until(is_so: Callable[[], bool]) -> None:
    """Wait until something is so. Raises TimeoutError when it is not in time."""
    async with asyncio.timeout(WITHIN_S):
        while not is_so():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.001)


# -- what a backend does ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finish:
    """A chunk with a finish reason."""

    reason: str = "stop"


@dataclass(frozen=True)
class Tokens:
    """The last chunk: what was counted."""

    prompt: int = 10
    completion: int = 5
    cached: int = 0
    tier: str = ""  # that answered


@dataclass(frozen=True)
class Whole:
    """A complete answer in one piece, with its usage."""

    text: str
    reason: str = "stop"


Step = str | Finish | Tokens | Whole | Chunk | asyncio.Event | BaseException
"""A text is a delta, a chunk is sent as it is, an event is waited for, an exception is raised."""


def unavailable(detail: str = "out of order") -> BackendUnavailable:
    return BackendUnavailable("The deployment is out of order", detail=detail)


def overloaded(retry_after_s: float | None = None) -> BackendOverloaded:
    return BackendOverloaded("The deployment is overloaded", retry_after_s=retry_after_s)


def timed_out() -> BackendTimeout:
    return BackendTimeout("The deployment did not answer in time")


def broken() -> BackendBroken:
    return BackendBroken("The deployment's answer broke off")


def denied(status: int, words: str = "Not for you", code: str | None = None) -> BackendError:
    """What a deployment makes of a permanent refusal."""
    error = {"error": {"message": words, "type": "invalid_request_error", "param": None, "code": code}}
    return refusal(UpstreamRefusal(status, json.dumps(error).encode()))


def rejected(status: int = 400, words: str = "Bad field") -> BackendRejected:
    error = {"error": {"message": words, "type": "invalid_request_error", "param": "x", "code": "bad"}}
    return BackendRejected(words, status=status, body=json.dumps(error).encode())


@dataclass
class Call:
    """One request that a backend was given, and what became of it."""

    body: dict[str, Any]
    is_stream: bool
    partition: bytes
    request_id: str
    draft: str
    prefix: str
    idle_timeout_s: float
    ttft_timeout_s: float
    whole_timeout_s: float
    model: str = ""
    native: Native | None = None
    trace: tuple[tuple[str, str], ...] = ()
    steps: int = 0  # of its script that were asked for
    is_cancelled: bool = False  # while it was at work
    is_closed: bool = False


class ScriptedBackend:
    """A deployment that does what a test says, and remembers what it was asked."""

    def __init__(self, name: str, capabilities: frozenset[str] = frozenset()) -> None:
        self.name = name
        self.capabilities = capabilities
        self.calls: list[Call] = []
        self.state = Load()
        self.bug: Exception | None = None  # raised where the gateway asks how busy it is
        self._always: tuple[Step, ...] = ("answer ", f"of {name}", Finish(), Tokens())
        self._next: list[tuple[Step, ...]] = []

    def plays(self, *steps: Step) -> None:
        """From now on every answer is this one."""
        self._always = steps

    def plays_once(self, *steps: Step) -> None:
        """The next answer is this one; several calls queue several answers."""
        self._next.append(steps)

    def is_down(self, reason: str, *, is_starting: bool = False) -> None:
        """It says of itself that it is not ready."""
        self.state = Load(is_ready=False, reason=reason, is_starting=is_starting)

    def is_waited_for(self) -> None:
        """It says that requests wait for it."""
        self.state = Load(waiting=1)

    def is_up(self) -> None:
        self.state = Load()

    async def called(self, times: int = 1) -> Call:
        """The call of this number, once it has come."""
        await until(lambda: len(self.calls) >= times)
        return self.calls[times - 1]

    async def start(self) -> None:
        """Nothing to connect."""

    async def aclose(self) -> None:
        """Nothing to close."""

    def load(self, prompt_tokens: int) -> Load:
        if self.bug is not None:
            raise self.bug
        return self.state

    def stream(self, request: BackendRequest) -> _Playing:
        call = Call(
            body=request.body,
            is_stream=request.is_stream,
            partition=request.salt,
            request_id=request.request_id,
            draft=request.draft,
            prefix=request.prefix,
            idle_timeout_s=request.idle_timeout_s,
            ttft_timeout_s=request.ttft_timeout_s,
            whole_timeout_s=request.whole_timeout_s,
            model=request.model,
            trace=request.trace,
            native=request.native,
        )
        self.calls.append(call)
        return _Playing(call, self._next.pop(0) if self._next else self._always, request.kind.name != "chat")


class _Playing:
    """A script on its way."""

    def __init__(self, call: Call, steps: Sequence[Step], is_text: bool) -> None:
        self._call = call
        self._given_up = asyncio.Event()
        self._steps = iter(steps)
        self._is_text = is_text

    def __aiter__(self) -> _Playing:
        return self

    async def __anext__(self) -> list[Chunk]:
        await asyncio.sleep(0)
        for step in self._steps:
            self._call.steps += 1
            if isinstance(step, asyncio.Event):
                try:
                    await _either(step, self._given_up)
                except asyncio.CancelledError:
                    self._call.is_cancelled = True
                    raise
                if self._given_up.is_set():
                    raise BackendBroken("The answer was given up")
            elif isinstance(step, BaseException):
                raise step
            else:
                return [step if isinstance(step, Chunk) else _chunk(step, self._is_text)]
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._call.is_closed = True
        self._given_up.set()


async def _either(one: asyncio.Event, other: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(event.wait()) for event in (one, other)]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _chunk(step: str | Finish | Tokens | Whole, is_text: bool) -> Chunk:
    head: dict[str, Any] = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    if is_text:
        head["object"] = "text_completion"
    if isinstance(step, Tokens):
        usage = Usage(step.prompt, step.completion, step.cached)
        counted = {"prompt_tokens": step.prompt, "completion_tokens": step.completion}
        head |= {"service_tier": step.tier} if step.tier else {}
        return Chunk(_json({**head, "choices": [], "usage": counted}), usage=usage, is_usage_only=True)
    if isinstance(step, Whole):
        said: dict[str, Any] = (
            {"text": step.text} if is_text else {"message": {"role": "assistant", "content": step.text}}
        )
        usage = Usage(10, 5)
        counted = {"prompt_tokens": 10, "completion_tokens": 5}
        head["object"] = "text_completion" if is_text else "chat.completion"
        data = _json({**head, "choices": [{"index": 0, **said, "finish_reason": step.reason}], "usage": counted})
        return Chunk(data, is_whole=True, has_content=bool(step.text), finish_reasons=(step.reason,), usage=usage)
    delta = step if isinstance(step, str) else ""
    reason = step.reason if isinstance(step, Finish) else None
    part: dict[str, Any] = {"text": delta} if is_text else {"delta": {"content": delta} if delta else {}}
    data = _json({**head, "choices": [{"index": 0, **part, "finish_reason": reason}]})
    return Chunk(data, has_content=bool(delta), finish_reasons=(reason,) if reason else ())


def _json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def deployment(name: str, model: str = "m", usd: tuple[float, float] = (1.0, 2.0), **more: Any) -> dict[str, Any]:
    """The settings of a deployment; `usd` are its prices for a million tokens, read and written, and the same with each of
    its `allow_fields`."""
    factors = dict.fromkeys(more.get("allow_fields", ()), 1.0)
    price = {"input_usd_per_mtok": usd[0], "output_usd_per_mtok": usd[1], "factors": factors}
    kind = {"backend": "local"} if "engine" in more else {"backend": "openai", "base_url": "http://provider.example/v1"}
    own = {} if "engine" in more else {"model": model}
    return {"name": name, "price": price, **kind, **own, **more}


# -- the semantic cache, scripted ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """A semantic lookup as it came."""

    text: str
    error_max: float | None


class ScriptedSemantic:
    """A cache worker that answers what a test says; nothing is near until it says otherwise."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.contexts: list[str] = []
        self.bug: Exception | None = None
        self._reply: LookupResult = Miss(MissReason.EMPTY)

    def hits(
        self, entry: str, similarity: float = 0.97, differing: tuple[tuple[str, str], ...] = (), **facts: Any
    ) -> None:
        """From now on the entry of this id answers everything; `facts` are its trial's."""
        trial = msgspec.structs.replace(self.trial(entry), **facts)
        self._reply = Hit(bytes.fromhex(entry), similarity, "a near prompt", trial, differing)

    def trial(self, entry: str) -> Trial:
        """What its decisions say of the entry of this id."""
        return _trial(bytes.fromhex(entry))

    def doubts(self, *candidates: tuple[str, str], p: float = 0.9, **facts: Any) -> None:
        """From now on a verifier may be asked about the entries of these ids, each with its prompt; `facts` are of each."""
        asked = [
            Candidate(bytes.fromhex(entry), bytes([number]) * 24, 0.9, text, p, **facts)
            for number, (entry, text) in enumerate(candidates)
        ]
        exact = bytes.fromhex(candidates[0][0])
        nearest = Near(0.9, candidates[0][1], exact, MissReason.UNSURE)
        self._reply = Undecided(tuple(asked), Miss(MissReason.UNSURE, nearest, _trial(exact)))

    def misses(self, reason: str, near: str | None = None, similarity: float = 0.9) -> None:
        """From now on nothing may be served; `near` is the entry that came nearest."""
        if near is None:
            self._reply = Miss(MissReason(reason))
            return
        exact = bytes.fromhex(near)
        nearest = Near(similarity, "a near prompt", exact, MissReason(reason))
        self._reply = Miss(MissReason(reason), nearest, _trial(exact))

    async def lookup(self, query: Query, timeout_s: float | None = None) -> LookupResult:
        self.asked.append(Asked(query.text, query.error_max))
        self.contexts.append(query.context)
        await asyncio.sleep(0)
        if self.bug is not None:
            raise self.bug
        reply = self._reply
        return reply.miss if isinstance(reply, Undecided) and not query.may_ask else reply

    async def embed(self, texts: Sequence[str]) -> AsyncIterator[Embedded]:
        """One vector of two numbers for each text, a token for each of its words."""
        for text in texts:
            if self.bug is not None:
                raise self.bug
            yield Embedded((b"\0" * 8,), (len(text.split()),), 2)


def _trial(exact: bytes) -> Trial:
    return Trial((exact,), b"", 0.9, 1.0, b"rule")


# -- a client ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a client got."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def id(self) -> str:
        return self.headers["x-request-id"]

    @property
    def cache(self) -> str:
        return self.headers["x-sameway-cache"]

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        """The error object, of a response or of the event that ended a stream."""
        return (self.events[-1] if self.is_stream else self.json)["error"]

    @property
    def is_stream(self) -> bool:
        return self.headers["content-type"].startswith("text/event-stream")

    @property
    def events(self) -> list[Any]:
        """Each event's JSON; `[DONE]` as it is."""
        lines = [line.removeprefix("data: ") for line in self.text.split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def is_done(self) -> bool:
        return self.text.endswith("data: [DONE]\n\n")

    @property
    def content(self) -> str:
        """The answer's text, however it came."""
        if not self.is_stream:
            choice = self.json["choices"][0]
            return str(choice["message"]["content"] if "message" in choice else choice["text"])
        choices = [choice for event in self.events if event != "[DONE]" for choice in event.get("choices", ())]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


class Client:
    """One request under way, over ASGI."""

    def __init__(self, endpoint: Any, path: str, headers: dict[str, str], body: bytes) -> None:
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        extensions = {WHEN_GONE: self._when_gone}
        scope = {"type": "http", "method": "POST", "path": path, "headers": raw, "extensions": extensions}
        self._to_come = [{"type": "http.request", "body": body, "more_body": False}]
        self._gone = asyncio.Event()
        self._on_leave: Callable[[], None] | None = None
        self._takes = asyncio.Event()
        self._takes.set()
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()
        self._task = asyncio.create_task(endpoint(scope, self._receive, self._send))

    def _when_gone(self, callback: Callable[[], None] | None) -> None:
        self._on_leave = callback

    async def _receive(self) -> dict[str, Any]:
        if self._to_come:
            return self._to_come.pop()
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            assert not self._status, "a request got two responses"
            self._status = message["status"]
            self._headers = {name.decode(): value.decode("latin-1") for name, value in message["headers"]}
        else:
            self._body += message.get("body", b"")
            while not (self._takes.is_set() or self._gone.is_set()):  # noqa: ASYNC110 - either of two events
                await asyncio.sleep(0.001)

    def stops(self) -> None:
        """Take nothing more of the answer, until `goes_on`."""
        self._takes.clear()

    def goes_on(self) -> None:
        self._takes.set()

    @property
    def has_begun(self) -> bool:
        """Whether anything of a response has come."""
        return bool(self._status)

    def leave(self) -> None:
        """Go away."""
        self._gone.set()
        if self._on_leave is not None:
            self._on_leave()

    async def sees(self, text: str) -> None:
        """Wait until this has come."""
        await until(lambda: text.encode() in self._body)

    async def reply(self) -> Reply:
        """All of it."""
        async with asyncio.timeout(WITHIN_S):
            await self._task
        return Reply(self._status, self._headers, bytes(self._body))


# -- the world -----------------------------------------------------------------------------------------------------------


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def passes(self, seconds: float) -> None:
        self._passed_s += seconds

    def steady(self) -> float:
        """A clock that stands still in between: rates can be counted."""
        return 1_000.0 + self._passed_s

    def going(self) -> float:
        """A clock that also goes by itself: a deployment's rest ends."""
        return time.monotonic() + self._passed_s

    def unix(self) -> float:
        """The time of day, which also goes by itself: Redis has its own."""
        return time.time() + self._passed_s


@dataclass(frozen=True)
class Team:
    """A team with one key."""

    id: int
    key: str


@dataclass(frozen=True)
class Lesson:
    """A finished request that the semantic cache may learn from, the id of the entry that keeps its answer, the decision's trial, and
    the hit that it checks."""

    request_id: str
    stored: str | None
    trial: Trial | None
    checks: str = ""


class _Learner:
    def __init__(self, checks: Checks) -> None:
        self.checks = checks
        self.verifiers: Verifiers | None = None
        self.lessons: list[Lesson] = []

    def recorded(self, flight: Any, record: Record) -> None:
        generation, checks = flight.generation, flight.generation.checks
        if self.verifiers is not None:
            self.verifiers.recorded(generation)
        if generation.looked.semantic.trial is None and checks is None:
            return
        entry = generation.stored.entry.id if generation.stored.outcome == "stored" else None
        trial = generation.looked.semantic.trial if checks is None else checks.trial
        self.lessons.append(Lesson(record.request.id, entry, trial, checks.record.request.id if checks else ""))
        semantic = generation.looked.semantic
        if semantic.entry is not None and trial is not None:
            self.checks.hit(generation, Compared(record, trial, semantic.entry, semantic.verified_by))


@dataclass(repr=False)  # a task that returns one is written out at its end, settings and all
class World:
    """One worker's heart, and the knobs a test turns."""

    clock: Clock
    redis: Redis
    backends: dict[str, ScriptedBackend]
    semantic: ScriptedSemantic
    records: list[Record]
    _pipeline: Pipeline
    _accounts: Accounts
    _first: Identity
    _budgets: Budgets
    _exact: ExactCache
    _money: Money
    _link: RedisLink
    _learner: _Learner
    _endpoints: dict[str, Any]
    stored_responses: ResponseStore
    background: Background
    ended: list[str]  # outcomes of responses in the background
    stored: list[tuple[str, int]]  # responses to keep: outcomes, and how many
    _asked_budgets: list[Budget] = field(default_factory=list)
    _clients: list[Client] = field(default_factory=list)
    _others: list[World] = field(default_factory=list)
    _connected: list[OpenAIBackend] = field(default_factory=list)
    _verifiers: Verifiers | None = None
    logged: list[Any] = field(default_factory=list)  # the turns whose texts may be logged
    questions: list[tuple[str, int, str]] = field(default_factory=list)  # to verifiers: team, cost in µUSD, outcome

    @property
    def sql_url(self) -> str:
        """The database, for a second process."""
        return self._pipeline.settings.sql_url

    @property
    def bodies(self) -> Bodies:
        """The request bodies under way."""
        return self._pipeline.bodies

    # -- asking

    def begin(
        self,
        content: str | None = "hello",
        *,
        model: str = "mock",
        key: str | None = KEY,
        headers: dict[str, str] | None = None,
        path: str = "/v1/chat/completions",
        raw: bytes | None = None,
        **fields: Any,
    ) -> Client:
        """A request that is on its way; `raw` instead of a body that is made of the others."""
        is_chat = path.endswith("chat/completions") and "messages" not in fields
        said = {"messages": [{"role": "user", "content": content}]} if is_chat else {}
        sent = {**({"authorization": f"Bearer {key}"} if key else {}), **(headers or {})}
        body = json.dumps({"model": model, **said, **fields}).encode() if raw is None else raw
        client = Client(self._endpoints[path], path, sent, body)
        self._clients.append(client)
        return client

    def front(self) -> httpx.ASGITransport:
        """A way for clients in front of the endpoints."""
        front = Front(
            None,
            {
                path: dict.fromkeys(map(str.upper, PATHS.get(path, ("GET", "POST"))), one)
                for path, one in self._endpoints.items()
            },
        )
        return httpx.ASGITransport(app=front, raise_app_exceptions=False)  # type: ignore[arg-type]

    def client(self, key: str = KEY) -> AsyncOpenAI:
        """The official client, in front of the endpoints."""
        http = httpx.AsyncClient(transport=self.front(), timeout=WITHIN_S)
        return AsyncOpenAI(base_url="http://world/v1", api_key=key, http_client=http, max_retries=0)

    async def ask(self, content: str | None = "hello", **how: Any) -> Reply:
        """A request and its reply, once it is recorded. As `begin`."""
        reply = await self.begin(content, **how).reply()
        await self.quiet()
        return reply

    async def ask_internally(self, content: str, *, model: str = "mock") -> bytes | None:
        """The answer to a request of the gateway's own, once it is recorded."""
        requests = InternalRequests()
        requests.connect(self._pipeline)
        body = {"model": model, "messages": [{"role": "user", "content": content}]}
        reply = await requests.ask(body, self._first, self._pipeline.fleet.alias(model), WITHIN_S)
        await self.quiet()
        return reply.whole

    @property
    def verifiers(self) -> Verifiers:
        """Those that this worker asks, where the settings name one."""
        assert self._verifiers is not None
        return self._verifiers

    def judge(self, alias: str) -> Judge | None:
        """The judge of a fresh answer of this alias, of the first team."""
        facts = RequestFacts("req_judged", 0.0, team_id=self._first.team.id, key_id=self._first.key.id, alias=alias)
        return self.verifiers.of(Record(facts), b"here")

    async def words(self) -> list[Verdict]:
        """The verdicts of verifiers that are kept for the first team, oldest first."""
        await self.quiet()
        records, _ = await VerdictStore(self._link).read(await self.partition(), b"0-0")
        return [one.verdict for one in records if isinstance(one, AnswerJudged)]

    async def partition(self) -> Partition:
        """Of the first team."""
        identity = await self._accounts.find(KEY)
        assert identity is not None
        return partition_of(self._pipeline.settings.secret, identity.team.id)

    async def about(self, entry: str) -> About:
        """The facts kept about an entry of the first team."""
        about = await self._exact.lookup_about(await self.partition(), bytes.fromhex(entry))
        assert about is not None
        return about

    async def purge(self, entry: str | None = None, text: str | None = None) -> None:
        """Remove the one entry with an id or a prompt, as an admin does."""
        assert (await self._exact.purge(Purge(id=entry, text=text))).count == 1

    async def purge_by_tag(self, tag: str) -> int:
        """Remove the entries with a tag, as an admin does, and count them."""
        return (await self._exact.purge(Purge(tag=tag))).count

    def draws_checks(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        """From now on hits by meaning are checked: each that may be, unless `draw` says otherwise."""
        self._learner.checks.random = draw

    async def quiet(self) -> None:
        """Until nothing is under way, and every verifier's word is kept."""
        await until(lambda: self.generations + self._learner.checks.running == 0)
        if self._verifiers is not None:
            async with asyncio.timeout(WITHIN_S):
                await self._verifiers.drain()
                await self._pipeline.drain()

    async def stops(self) -> None:
        """As a worker that is to end: what clients wait for is finished."""
        await self._learner.checks.aclose()
        await self._pipeline.drain()

    async def record(self, reply: Reply) -> Record:
        """The one record of a request."""
        await self.quiet()
        (found,) = [record for record in self.records if record.request.id == reply.id]
        return found

    def spans(self) -> list[ReadableSpan]:
        """Those that would be sent of all requests so far, as OpenTelemetry's exporter in memory has them."""
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        exporter, pipeline = InMemorySpanExporter(), self._pipeline
        processor, metrics = SimpleSpanProcessor(exporter), Metrics(None)
        traces = Traces(pipeline.settings.traces, lambda: pipeline.fleet.deployments, metrics, "1.2.3", processor)
        for record in self.records:
            traces.add(record)
        return list(exporter.get_finished_spans())

    # -- teams and money

    async def team(self, name: str = "another", *, models: tuple[str, ...] | None = None, **limits: Any) -> Team:
        """A new team; `limits` are its requests_per_min, tokens_per_min, is_semantic_enabled, semantic_error_max, and rules."""
        team = await self._accounts.create_team(name, **limits)
        made = await self._accounts.create_key(team.id, "key", **({} if models is None else {"models": models}))
        return Team(team.id, made.plaintext)

    async def changes(self, team: Team, **changes: Any) -> None:
        """Other limits and rules of a team."""
        await self._accounts.update_team(team.id, **changes)

    async def budget(
        self, team: Team, limit: int, *, window: str = "day", is_hard: bool = True, **fields: Any
    ) -> Budget:
        """A new budget of a team; `fields` are its axis, value, unit, rolling_s and overdraft."""
        made = await self._accounts.create_budget(team.id, WindowKind(window), limit, is_hard, **fields)
        self._asked_budgets.append(made)
        return made

    async def change_budget(self, budget: Budget, **changes: Any) -> None:
        """Other values of a budget; without any it is deleted."""
        if changes:
            await self._accounts.update_budget(budget.id, **changes)
        else:
            await self._accounts.delete_budget(budget.id)

    async def used_of(self, budget: Budget) -> dict[str, tuple[int, int]]:
        """What each value of a budget has spent and holds, in its unit; without values that have nothing."""
        states = await self._budgets.states([budget])
        return {state.value: (state.spent, state.held) for state in states if state.spent or state.held}

    async def money_of(self, team: Team) -> tuple[int, int]:
        """What the team has spent of its budget, and what is held, in µUSD."""
        (state,) = await self._budgets.spent([one for one in self._asked_budgets if one.team_id == team.id])
        return state.spent, state.held

    async def ledger(self) -> list[LedgerRow]:
        """The rows on the books, oldest first."""
        await self.quiet()
        entries: Any = await self.redis.xrange(LEDGER_STREAM)
        return [decode_row(fields[b"row"]) for _, fields in entries]

    def sets(self, **values: Any) -> None:
        """Other values of settings, from the next request on."""
        self._pipeline.settings.__dict__.update(values)  # sections may be shared with other worlds

    async def settles(self) -> None:
        """Until Redis has taken what it could not take before, as the worker tries twice a second."""
        async with asyncio.timeout(WITHIN_S):
            while self.unsettled:
                await self._money.retry()
                await asyncio.sleep(0.01)

    @property
    def unsettled(self) -> int:
        """Rows that wait for Redis."""
        return self._money.unsettled

    # -- stored responses

    async def gives(self, team: Team, *ids: str) -> None:
        """Ids that a provider gave to a team through /passthrough."""
        await ProviderIds(self._accounts.database).record("files", team.id, ids)

    async def delete_team(self, team: Team) -> None:
        await self._accounts.delete_team(team.id)

    async def stored_sizes(self) -> list[int]:
        """The bytes of each response in the database."""
        async with self._accounts.database.reading() as connection:
            return list((await connection.execute(sa.select(schema.responses.c.size_bytes))).scalars())

    async def room(self) -> tuple[int, int]:
        """How many conversations the first team has, and their bytes."""
        held = (await self.stored_responses.room(1))["conversations"]
        return held.count, held.bytes

    async def conversation_items(self) -> int:
        """How many items of conversations are in the database."""
        async with self._accounts.database.reading() as connection:
            return (
                await connection.execute(sa.select(sa.func.count()).select_from(schema.conversation_items))
            ).scalar_one()

    async def chain_of(self, turns: int, text: str) -> str:
        """The id of the last of so many responses, each of which continues the one before with `text`."""
        identity = await self._accounts.find(KEY)
        assert identity is not None
        item = {"type": "message", "id": "msg_x", "role": "user", "content": [{"type": "input_text", "text": text}]}
        said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
        ids = [None, *(f"resp_{secrets.token_hex(16)}" for _ in range(turns))]
        body, given = _json({"output": [said]}), _json([item])
        rows = [
            StoredResponse(str(id), identity.team.id, identity.key.id, before, given, body)
            for before, id in itertools.pairwise(ids)
        ]
        await asyncio.gather(*map(self.stored_responses.put, rows))
        return str(ids[-1])

    @contextlib.contextmanager
    def database_fails(self) -> Iterator[None]:
        """Until its end nothing can be written to the database of stored responses."""

        async def fail(_: object) -> int:
            raise NoAnswer("out of order")

        insert, self.stored_responses._insert = self.stored_responses._insert, fail  # type: ignore[method-assign]
        try:
            yield
        finally:
            self.stored_responses._insert = insert  # type: ignore[method-assign]

    def loses_an_acknowledgement(self, of: str) -> None:
        """The next transaction of this method of the stored responses commits, and fails all the same."""
        store, method = self.stored_responses, getattr(self.stored_responses, of)

        async def act(*arguments: Any, **more: Any) -> None:
            setattr(store, of, method)
            await method(*arguments, **more)
            raise NoAnswer("the connection was lost after the commit")

        setattr(store, of, act)

    # -- what is under way

    @property
    def flights(self) -> int:
        """Generations that others may join."""
        return len(self._pipeline.flights)

    async def connects(self, deployment: str, url: str, kind: type[OpenAIBackend] = OpenAIBackend) -> None:
        """From now on a deployment is the server at `url`, of a kind, with the key `sk-provider`."""
        one = self._deployment(deployment)
        backend = kind(deployment, base_url=url, model=one.model, capabilities=one.capabilities, api_key="sk-provider")
        await backend.start()
        one.backend = backend
        self._connected.append(backend)

    def takes_out(self, **uses: str) -> None:
        """What an operator makes of deployments: drained or disabled; all others are in use."""
        self._pipeline.fleet.take_uses(uses)

    def waiting(self, deployment: str) -> int:
        """Requests that wait for a place at a deployment."""
        return self._deployment(deployment).slots.waiting

    def is_resting(self, deployment: str) -> bool:
        """Whether a breaker of a deployment is open."""
        return self._deployment(deployment).health.is_resting

    def is_probed_elsewhere(self, deployment: str) -> None:
        """Another worker has the right to probe a deployment, as long as it rests."""

        async def is_taken(_: Any) -> bool:
            return False

        self._deployment(deployment).claim = is_taken

    def rests(self, deployment: str) -> None:
        """Requests of three callers fail at a deployment."""
        for caller in "abc":
            self._deployment(deployment).health.failed(Asker("chat:", caller))

    def is_available(self, deployment: str) -> bool | None:
        """Whether a deployment answers; None before its first answer."""
        return self._deployment(deployment).is_available

    def _deployment(self, name: str) -> Deployment:
        (found,) = [one for one in self._pipeline.fleet.deployments if one.name == name]
        return found

    @property
    def generations(self) -> int:
        return self._pipeline.generations

    @property
    def lessons(self) -> list[Lesson]:
        return self._learner.lessons

    # -- bugs

    def breaks(self, stage: str) -> None:
        """From now on a stage fails by a bug: `store_local`, `store` or `settle`."""

        async def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"a bug in {stage}")

        def fail_now(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"a bug in {stage}")

        part: Any = {"store_local": self._exact, "store": self._exact, "settle": self._money}[stage]
        setattr(part, stage, fail_now if stage == "store_local" else fail)

    # -- the end

    async def is_released(self) -> None:
        """Nothing is under way, and nothing is held. Raises AssertionError."""
        await self.quiet()
        assert self.generations == 0
        assert self.flights == 0
        assert self._money.holds == 0
        places = [one.slots for one in self._pipeline.fleet.deployments]
        assert [one for one in places if one.taken or one.waiting] == []
        calls = [call for backend in self.backends.values() for call in backend.calls]
        assert [call for call in calls if not call.is_closed] == []
        with contextlib.suppress(ConnectionError, OSError):
            for state in await self._budgets.spent(self._asked_budgets):
                assert state.held == 0
        ids = [record.request.id for record in self.records]
        assert len(ids) == len(set(ids)), "a request was recorded twice"

    async def another(self) -> World:
        """Another worker on the same Redis and database, with scripted backends of its own."""
        made = await _build(self._pipeline.settings, self.redis)
        self._others.append(made)
        return made

    def never_comes_back(self) -> None:
        """As if this worker had been killed: what it claimed is neither renewed nor released."""
        self._exact._store.claims._held.clear()

    async def renews(self) -> None:
        """What the worker does every second for the answers that others wait for."""
        await self._exact.renew_claims()

    async def aclose(self) -> None:
        for other in self._others:
            await other.aclose()
        for client in self._clients:
            client.leave()
        with contextlib.suppress(asyncio.TimeoutError):
            await self.quiet()
        for backend in self._connected:
            await backend.aclose()
        await self._link.aclose()
        await self.stored_responses.aclose()
        await self._accounts.close()


@functools.cache
def _database() -> Path:
    """A database with team `default` and `KEY`: migrating takes longer than most tests."""
    folder = tempfile.TemporaryDirectory(prefix="sameway-world-")
    weakref.finalize(_database, folder.cleanup)
    path = Path(folder.name) / "sameway.db"

    async def make() -> None:
        accounts = Accounts(f"sqlite:///{path}")
        await accounts.open()
        await accounts.ensure_first(plaintext=KEY)
        await accounts.close()

    thread = threading.Thread(target=lambda: asyncio.run(make()))
    thread.start()
    thread.join()
    return path


MODELS: dict[str, Any] = {
    "mock": {"deployments": [deployment("plain")]},
    "pair": {"policy": "cheapest", "deployments": [deployment("first", usd=(0, 0)), deployment("second")]},
    "breaking": {
        "policy": "cheapest",
        "deployments": [
            deployment("dear-first", usd=(1.0, 1.0), output_tokens_max=1000),
            deployment("next", output_tokens_max=1000),
        ],
    },
    "windows": {
        "policy": "cheapest",
        "deployments": [
            deployment("told-8k", usd=(0, 0)),
            deployment("also-8k", usd=(0.1, 0.1), context_tokens_max=8192),
            deployment("unknown"),
        ],
    },
    "rescued": {
        "policy": "cheapest",
        "deployments": [
            deployment("breaks", usd=(0.1, 0.1)),
            deployment("goes on", usd=(1.0, 2.0), capabilities=["completions", "prefill"]),
            deployment("cannot", usd=(0.5, 0.5)),
        ],
    },
    "primary": {
        "policy": "cheapest",
        "fallbacks": ["secondary", "tertiary"],
        "deployments": [deployment("p", usd=(1.0, 1.0), context_tokens_max=500, output_tokens_max=100)],
    },
    "secondary": {"deployments": [deployment("s", "other", usd=(2.0, 2.0), output_tokens_max=100)]},
    "tertiary": {"deployments": [deployment("t", "third", usd=(9.0, 9.0), output_tokens_max=100)]},
    "unrescued": {
        "policy": "cheapest",
        "rescue": "error",
        "deployments": [deployment("breaks off", usd=(0, 0)), deployment("could", capabilities=["prefill"])],
    },
    "mixed": {"policy": "cheapest", "deployments": [deployment("big", "big", (0, 0)), deployment("small", "small")]},
    "twins": {"policy": "fastest", "deployments": [deployment("left"), deployment("right")]},
    "dear": {"deployments": [deployment("dear", output_tokens_max=1000, region="eu-west-1")]},
    "engine": {"deployments": [deployment("engine", engine="default", usd=(0, 0))]},
    "able": {
        "policy": "cheapest",
        "deployments": [
            deployment("own", engine="default", usd=(0, 0)),
            deployment("managed", "o4-mini", context_tokens_max=9_000),
        ],
    },
    "narrow": {"deployments": [deployment("narrow", context_tokens_max=50)]},
    "simple": {"deployments": [deployment("simple", capabilities=[], output_tokens_max=1000)]},
    "behind": {"deployments": [deployment("behind", identity_headers=IDENTITY_HEADERS)]},
    "small-room": {"deployments": [deployment("small-room", concurrency_max=2, queue_max=3)]},
    "rooms": {
        "policy": "cheapest",
        "deployments": [deployment("near", "m", (0, 0), concurrency_max=1), deployment("far", "n", concurrency_max=1)],
    },
    "exact-only": {"is_semantic": False, "deployments": [deployment("exact-only")]},
}


@asynccontextmanager
async def open_world(server: RedisServer, folder: Path, **settings: Any) -> AsyncIterator[World]:
    """A world on an empty Redis; `settings` are those that differ."""
    folder.mkdir(exist_ok=True, parents=True)
    shutil.copy(_database(), folder / "sameway.db")
    redis = Redis.from_url(server.url, decode_responses=False)
    await redis.flushall()
    values = {"data_dir": folder, "redis_url": server.url, "secret": "of the tests", "models": MODELS, **settings}
    world = await _build(Settings(**values), redis)
    try:
        yield world
    finally:
        await world.aclose()
        await redis.aclose()


async def _build(settings: Settings, redis: Redis) -> World:
    """The parts of a worker, as the application puts them together."""
    clock, requests, semantic, records = Clock(), InternalRequests(), ScriptedSemantic(), list[Record]()
    learner = _Learner(Checks(settings.cache.check_share, requests, lambda: 1.0))
    link = RedisLink(settings.redis_target, settings.redis_timeout_ms / 1000.0)
    accounts = Accounts(settings.sql_url, clock=clock.unix)
    await accounts.open()
    first = await accounts.find(KEY)
    assert first is not None
    budgets = Budgets(link, defer=link.defer)
    money = Money(budgets, settings.budgets, Spool(settings.data_dir / "spool"), Ledger(accounts.database).saved)
    await redis.set(LEDGER_LOCK, "tests")
    await budgets.mark_ready("tests")
    cache = settings.cache
    limits = CacheLimits(
        entry_bytes_max=cache.entry_bytes_max, ttl_s_max=cache.ttl_s_max, moving_ttl_s=cache.moving_ttl_s
    )
    exact = ExactCache(link, limits, clock.unix, clock.going, link.defer)
    rates = Limits(
        LeasedRateLimits(RateLimits(link, lambda: int(clock.steady() * 1e6)), clock.steady),
        LocalRateLimits(clock.steady),
        clock.steady,
    )

    turns: list[Any] = []

    def emit(record: Record, turn: object, chunks: object) -> None:
        records.append(record)
        turns.append(turn)

    scripted: Any = semantic
    client: SemanticClient = scripted
    fleet, backends = _fleet(settings, clock, client)
    lookup = SemanticLookup(settings, client, exact, Bounds(settings), clock=clock.unix)
    agents = Agents(Sessions(accounts.database, clock.unix), lambda kind: kind.encode() * 8, redis, clock.unix)
    bearers = Bearers(settings, Provider(settings, clock.unix), accounts, agents, clock.unix)
    pipeline = Pipeline(
        settings,
        accounts,
        rates,
        exact,
        lookup,
        money=money,
        fleet=fleet,
        bearers=bearers,
        observe=emit,
        learn=learner.recorded,
    )
    questions: list[tuple[str, int, str]] = []
    requests.connect(pipeline)
    verifiers = _verifiers(settings, fleet, accounts, exact, link, requests, questions)
    if verifiers is not None:
        verifiers.connect(pipeline)
    learner.verifiers = verifiers
    outcomes: list[tuple[str, int]] = []
    store = ResponseStore(accounts.database, clock.unix, settings.responses, lambda *one: outcomes.append(one))
    memory = Memory(store, settings)
    ended: list[str] = []
    background = Background(pipeline, store, memory, link, ended.append)
    conversations = ConversationsEndpoint(pipeline, memory)
    stored_one = StoredResponses(pipeline, memory, background)
    endpoints = {
        **{f"/v1{kind.path}": AnswerEndpoint(pipeline, settings.body_bytes_max, kind) for kind in KINDS},
        **dict.fromkeys(routes_of("/v1/responses", stored_one), stored_one),
        "/v1/responses": Responses(pipeline, settings.body_bytes_max, memory, background),
        "/v1/responses/input_tokens": InputTokens(pipeline, memory),
        "/v1/responses/compact": Compact(pipeline, settings.body_bytes_max, memory, background),
        **dict.fromkeys(routes_of("/v1/conversations", conversations), conversations),
        "/v1/messages": Messages(pipeline, settings.body_bytes_max),
        "/v1/messages/count_tokens": CountTokens(pipeline),
        "/v1/metrics": Telemetry(pipeline),
        "/v1/models": (listed := Models(settings, pipeline, 0.0)),
        "/v1/models/*": listed,
    }
    return World(
        clock=clock,
        redis=redis,
        backends=backends,
        semantic=semantic,
        records=records,
        _pipeline=pipeline,
        _accounts=accounts,
        _first=first,
        _budgets=budgets,
        _exact=exact,
        _money=money,
        _link=link,
        _learner=learner,
        _endpoints=endpoints,
        stored_responses=store,
        background=background,
        ended=ended,
        stored=outcomes,
        _verifiers=verifiers,
        questions=questions,
        logged=turns,
    )


def _verifiers(
    settings: Settings,
    fleet: Fleet,
    accounts: Accounts,
    exact: ExactCache,
    link: RedisLink,
    requests: InternalRequests,
    questions: list[tuple[str, int, str]],
) -> Verifiers | None:
    """The verifiers that the settings name, if any."""
    if not any(settings.verification(name).verifier for name in settings.models):
        return None
    return Verifiers(
        settings=settings,
        fleet=fleet,
        accounts=accounts,
        exact=exact,
        verdicts=VerdictStore(link),
        requests=requests,
        spending=Spending(Stats(link, time.time), settings.cache.verify_share),
        note=lambda payer, _, cost, outcome: questions.append((payer.name, cost, outcome)),
        count=lambda *_: None,
    )


def _fleet(settings: Settings, clock: Clock, client: SemanticClient) -> tuple[Fleet, dict[str, ScriptedBackend]]:
    """The fleet that the settings describe, with a script behind each deployment."""
    fleet = build_fleet(settings, clock.going, client)
    backends: dict[str, ScriptedBackend] = {}
    for one in fleet.deployments:
        backends[one.name] = ScriptedBackend(one.name, one.capabilities)
        one.backend = backends[one.name]
    return fleet, backends
