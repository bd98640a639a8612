"""The admin plane on real parts: Redis, a SQLite file, the exact cache, budgets, the ledger; and a cache worker that answers by rule.

The worker stand-in speaks the real worker's protocol on a real socket and needs no model: what it finds near is what shares
words. Everything else is what the gateway itself runs.
"""

from __future__ import annotations

import asyncio
import functools
import json
import shutil
import tempfile
import threading
import weakref
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import jinja2
from fastapi import FastAPI
from redis.asyncio import Redis

from cache import CacheLimits, Entry, ExactCache, Hit, Miss, MissReason, Recorded, SemanticClient, fingerprint
from cache.query import Near, Neighbourhood
from cache.verdicts import VerdictStore
from cache.worker import WorkerState, WorkerStatus
from cache.worker import messages as wire
from gateway.access.agents import Agents
from gateway.access.provider import Provider
from gateway.accounts import LedgerRow
from gateway.accounts.accounts import Accounts
from gateway.accounts.audit import Audit
from gateway.accounts.ledger import Ledger
from gateway.accounts.sessions import Sessions
from gateway.accounts.spool import Spool
from gateway.accounts.stored_responses import ResponseStore
from gateway.admin.guard import Guard
from gateway.admin.models import DeploymentOut
from gateway.admin.pages import page_routes
from gateway.admin.parts import AdminParts
from gateway.admin.routes import api_routes
from gateway.batches.batches import Batches
from gateway.batches.files import Files
from gateway.deployments.fleet import build_fleet
from gateway.deployments.shared_health import SharedHealth
from gateway.journey.budget import Money
from gateway.journey.semantic import Bounds
from gateway.learning.reports import Reports
from gateway.settings import ResponseSettings, Settings
from gateway.telemetry.hosts import Hosts
from gateway.telemetry.measured_error import Certificates, MeasuredErrors
from gateway.telemetry.parts import GatewayPart, PartHealth
from gateway.telemetry.stats import Stats
from gateway.transport.contents import contents_at
from ipc import IncomingCall, RpcServer
from local_engine import EngineLoad
from policies import Budgets, Usage
from policies.holds import LEDGER_LOCK
from tests.rpc import StandIn

ADMIN_KEY = "sk-admin-for-tests-0123456789"
SECRET = "secret of the tests"
PAGES = (
    "",
    "/requests",
    "/teams",
    "/savings",
    "/cache",
    "/quality",
    "/deployments",
    "/models",
    "/batches",
    "/ledger",
    "/audit",
    "/sessions",
    "/me",
    "/playground",
)
"""Every page of a session, after `/admin`, but those of a team."""
NOW_S = 2_220_871_500.0  # 2040-05-17 12:45:00 UTC: ahead of Redis, whose own clock ends what is old

LOCAL = DeploymentOut(
    name="small@local",
    alias="small",
    backend="local",
    model="SmolLM2-135M-Instruct",
    policy="balanced",
    is_available=True,
    reason="",
    running=2,
    waiting=0,
    ttft_ms=180.0,
    tpot_ms=11.2,
    input_microusd_per_mtok=0,
    output_microusd_per_mtok=0,
    hold_output_tokens=4096,
    capabilities=("json_object", "logprobs"),
    context_tokens_max=8192,
    output_tokens_max=4096,
    engine=EngineLoad(
        kv_blocks_used=25,
        kv_blocks_cached=50,
        kv_blocks_total=100,
        prefill_tokens_per_s=640.0,
        prompt_tokens_total=2_000,
        cached_tokens_total=1_500,
        answer_tokens_total=345,
        preemptions_total=2,
        drafted_tokens_total={"text": 30, "reference": 10},
        accepted_tokens_total={"text": 20, "reference": 9},
    ),
)
REMOTE = LOCAL.model_copy(
    update={
        "name": "small@api",
        "backend": "openai",
        "model": "gpt-small",
        "ttft_ms": 420.0,
        "tpot_ms": 7.9,
        "running": 0,
        "input_microusd_per_mtok": 150_000,
        "output_microusd_per_mtok": 600_000,
        "hold_microusd": 2_473,
        "capabilities": ("json_object", "json_schema", "tools", "vision"),
        "context_tokens_max": 128_000,
        "engine": None,
    }
)


@dataclass(repr=False)  # a task that returns one is written out at its end, settings and all
class World:
    """The parts, and the knobs a test turns."""

    admin: AdminParts
    app: FastAPI
    redis: Redis
    accounts: Accounts
    stats: Stats
    exact: ExactCache
    budgets: Budgets
    ledger: Ledger
    known_texts: dict[str, bytes]
    session: str
    deployments: list[DeploymentOut] = field(default_factory=lambda: [LOCAL, REMOTE])
    parts: list[GatewayPart] = field(
        default_factory=lambda: [GatewayPart("redis", PartHealth.OK), GatewayPart("database", PartHealth.OK)]
    )
    now_s: float = NOW_S
    refused_keys: Counter[tuple[str, str]] = field(default_factory=Counter)  # by endpoint and outcome

    async def cache_answer(
        self,
        team_id: int,
        prompt: str,
        model: str = "small",
        created_at_s: float = NOW_S - 60,
        deployment: str = "here",
        namespace: str = "",
        answer: str = "",
    ) -> Entry:
        """A stored answer to a prompt of one message."""
        body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        asked = fingerprint(body, self.admin.partition_of(team_id), namespace)
        said = {"object": "chat.completion", "choices": [{"message": {"role": "assistant", "content": answer}}]}
        chunk = Recorded(json.dumps(said).encode() if answer else b'{"object":"chat.completion"}', is_whole=True)
        labels: dict[str, str | int] = {"model": model, "deployment": deployment, "cost_microusd": 120}
        entry = Entry(
            partition=asked.partition,
            exact=asked.exact,
            compat=asked.compat,
            text=prompt,
            chunks=(chunk,),
            created_at=created_at_s,
            ttl_s=86_400.0,
            labels=labels,
            namespace=namespace,
        )
        await self.exact.store(entry)
        self.known_texts[prompt] = asked.exact
        async with asyncio.timeout(30):
            while self.admin.semantic.status.entries < len(self.known_texts):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return entry

    async def spend(
        self, team_id: int, microusd: int, number: int = 0, deployment: str = "small@api", **fields: Any
    ) -> None:
        """One settled generation: it counts against the team's budgets and is in the ledger."""
        hold_id = f"hold-{team_id}-{number}-{microusd}"
        row = LedgerRow(
            **{"alias": "small", "key_id": 1, **fields},
            id=hold_id,
            at_ms=int(self.now_s * 1000) - number,
            request_id=f"req_{number:04}",
            team_id=team_id,
            deployment=deployment,
            usage=Usage(400, 120),
            cost_microusd=microusd,
            kind="chat",
        )
        await self.budgets.settle(self.budgets.unreserved(hold_id, team_id), microusd, b"")
        await self.ledger.append([row])


@functools.cache
def _migrated() -> Path:
    """An empty database of the current schema: migrating takes longer than most tests."""
    folder = tempfile.TemporaryDirectory(prefix="sameway-admin-")
    weakref.finalize(_migrated, folder.cleanup)
    path = Path(folder.name) / "sameway.db"

    async def migrate() -> None:
        accounts = Accounts(f"sqlite:///{path}")
        await accounts.open()
        await accounts.close()

    thread = threading.Thread(target=lambda: asyncio.run(migrate()))
    thread.start()
    thread.join()
    return path


class _CompiledOnce(jinja2.BytecodeCache):
    """The code of each template, in memory: compiling them takes longer than most tests."""

    def __init__(self) -> None:
        self._codes: dict[str, bytes] = {}

    def load_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        if bucket.key in self._codes:
            bucket.bytecode_from_string(self._codes[bucket.key])

    def dump_bytecode(self, bucket: jinja2.bccache.Bucket) -> None:
        self._codes[bucket.key] = bucket.bytecode_to_string()


_ENVIRONMENT = functools.partial(jinja2.Environment, bytecode_cache=_CompiledOnce())


@asynccontextmanager
async def open_world(redis: Redis, folder: Path, **changes: Any) -> AsyncIterator[World]:
    """Everything, opened, with `changes` of the settings; the cache worker's stand-in listens in `folder`."""
    shutil.copy(_migrated(), folder / "sameway.db")
    settings = Settings(data_dir=folder, admin_key=ADMIN_KEY, secret=SECRET, **changes)
    leavers = lambda: settings.access.leavers_days  # noqa: E731
    accounts = Accounts(settings.sql_url, clock=lambda: world.now_s, leavers_days=leavers)
    known_texts: dict[str, bytes] = {}
    socket_path = folder / "cache.sock"
    worker = _worker(known_texts)
    await worker.start(socket_path)
    semantic = SemanticClient(socket_path)
    semantic.start()
    budgets = Budgets(redis, lambda: world.now_s)
    exact = ExactCache(redis, CacheLimits(size_bytes_max=64 << 20), lambda: world.now_s)
    stats, ledger = Stats(redis, lambda: world.now_s), Ledger(accounts.database)
    verdicts, truth = VerdictStore(redis), MeasuredErrors(Bounds(settings))
    await redis.set(LEDGER_LOCK, "tests")
    await budgets.mark_ready("tests")
    guard = Guard(
        settings,
        Sessions(accounts.database, lambda: world.now_s),
        lambda *refused: world.refused_keys.update([refused]),
        lambda: world.now_s,
        provider=Provider(settings, lambda: world.now_s),
    )
    no_embedder: Any = None
    fleet = build_fleet(settings, lambda: NOW_S, no_embedder)
    files = Files(accounts.database, settings.batches, contents_at(settings.files_url), lambda: world.now_s)
    accounts.follow_uses(fleet.take_uses)
    link: Any = redis  # without the loop that exchanges
    unchanged: Any = SimpleNamespace(refused="", kept=frozenset())  # a whole worker has a configuration that changes
    guard.agents = Agents(guard.sessions, guard.mark, link, lambda: world.now_s)
    admin = AdminParts(
        settings=settings,
        configuration=unchanged,
        guard=guard,
        accounts=accounts,
        ledger=ledger,
        audit=Audit(accounts.database),
        stored_responses=ResponseStore(accounts.database, lambda: world.now_s, ResponseSettings(), lambda *_: None),
        batches=Batches(accounts.database, files, settings.batches, lambda: world.now_s),
        budgets=budgets,
        money=Money(budgets, settings.budgets, Spool(None), ledger.saved),
        stats=stats,
        exact=exact,
        semantic=semantic,
        verdicts=verdicts,
        reports=Reports(verdicts, exact, stats, lambda *_: None),
        truth=truth,
        fleet=fleet,
        shared_health=SharedHealth(settings, fleet.deployments, link),
        certificates=Certificates(redis, stats, truth.bounds, "equality, agreement", lambda: world.now_s),
        hosts=Hosts(settings, redis),
        deployments=lambda: world.deployments,
        healths=lambda: world.parts,
        clock=lambda: world.now_s,
        version="0.1.0",
        started_at_s=NOW_S - 93_784,
    )
    world = World(
        admin=admin,
        app=FastAPI(),
        redis=redis,
        accounts=accounts,
        stats=stats,
        exact=exact,
        budgets=budgets,
        ledger=ledger,
        known_texts=known_texts,
        session="",
    )
    await accounts.open()
    world.session = await guard.new_session()
    world.app.state.parts, world.app.state.settings, world.app.state.routes = admin, admin.settings, {}
    with patch("jinja2.Environment", _ENVIRONMENT):
        world.app.router.routes.extend([*api_routes(), *page_routes(admin)])
    while not semantic.status.is_ready:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    try:
        yield world
    finally:
        await semantic.aclose()
        await worker.stop()
        await accounts.close()


def _worker(known: dict[str, bytes]) -> StandIn:
    """Texts that share words are near, those with all words in common are hits."""

    def answer(call: IncomingCall[wire.Ask]) -> None:
        assert isinstance(call.body, wire.AskLookup)
        call.reply(_neighbourhood(call.body, known))

    def status() -> WorkerStatus:
        return WorkerStatus(WorkerState.READY, 1.0, entries=len(known), embedder="all-MiniLM-L6-v2")

    return StandIn(RpcServer(wire.WIRE, state=status, on_call=answer))


def _neighbourhood(ask: wire.AskLookup, known: dict[str, bytes]) -> Neighbourhood:
    asked = set(ask.query.text.lower().split())
    found = []
    for text, exact in known.items():
        words = set(text.lower().split())
        similarity = len(asked & words) / len(asked | words)
        if similarity > 0.2:
            found.append(Near(similarity, text, exact, None if similarity > 0.9 else MissReason.FAR))
    found.sort(key=lambda near: -near.similarity)
    if found and found[0].reason is None:
        return Neighbourhood(Hit(found[0].exact, found[0].similarity, found[0].text), tuple(found[: ask.count]))
    reason = MissReason.FAR if found else MissReason.EMPTY
    return Neighbourhood(Miss(reason, found[0] if found else None), tuple(found[: ask.count]))
