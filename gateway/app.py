"""One gateway worker: the application, its parts, and its background loops.

`create_app(settings)` opens nothing; the lifespan opens the parts in order and closes them in the
reverse order. Knows how the parts fit together, and not how they work. Invariant: a worker starts
without Redis, the cache worker and deployments, but not without its database, which it needs to
authenticate.
"""

import asyncio
import ctypes
import gc
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi_offline import FastAPIOffline
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Match

from cache import CacheUnavailable, ExactCache, SemanticClient
from cache.redis_link import RedisLink
from gateway.access.agents import Agents
from gateway.access.people import Bearers
from gateway.access.provider import Provider
from gateway.accounts.accounts import Accounts
from gateway.accounts.audit import Audit
from gateway.accounts.database import NoAnswer
from gateway.accounts.errors import SchemaUnknown
from gateway.accounts.ledger import Ledger
from gateway.accounts.ledger_files import LedgerFiles
from gateway.accounts.ledger_writer import HitsWriter, LedgerWriter
from gateway.accounts.provider_ids import ProviderIds
from gateway.accounts.sessions import Sessions
from gateway.accounts.spool import Spool
from gateway.accounts.stored_responses import ResponseStore
from gateway.admin.guard import Endpoint, Guard
from gateway.admin.pages import page_routes
from gateway.admin.parts import AdminParts
from gateway.admin.routes import ERROR, api_routes
from gateway.admin.views import deployments_of
from gateway.alerts.mail import Mail
from gateway.alerts.watch import AlertWatch, Channel
from gateway.alerts.webhook import Webhook
from gateway.api import telemetry
from gateway.api.asgi import Receive, Scope, Send, headers_of
from gateway.api.background import Background
from gateway.api.batches import BatchesEndpoint
from gateway.api.chat import AnswerEndpoint, Uploads
from gateway.api.compaction import Compact
from gateway.api.feedback import Feedback
from gateway.api.files import AnthropicFiles, FilesEndpoint
from gateway.api.front import BelowPath, Front, Routes, document, no_such_route, wrong_method
from gateway.api.memory import Memory
from gateway.api.message_batches import MessageBatches
from gateway.api.messages import CountTokens, Messages
from gateway.api.models import Models
from gateway.api.openapi import PATHS, SCHEMAS, routes_of
from gateway.api.passthrough import Passthrough
from gateway.api.responses import InputTokens, Responses
from gateway.api.stored_chats import StoredChats, StoringChat
from gateway.api.stored_responses import ConversationsEndpoint, StoredResponses
from gateway.api.tokens import DetokenizeEndpoint, TokenizeEndpoint
from gateway.batches.batches import Batches
from gateway.batches.files import Files
from gateway.batches.work import BatchRunner
from gateway.data_dir import prepare
from gateway.deployments.fleet import Fleet, build_fleet
from gateway.deployments.shared_health import SharedHealth
from gateway.deployments.shared_load import SharedLoad
from gateway.deployments.shared_slots import SharedSlots
from gateway.exceptions import let_go
from gateway.journey.budget import Money
from gateway.journey.guards import Emit
from gateway.journey.rate_limits import Limits
from gateway.journey.record import Record
from gateway.journey.semantic import SemanticLookup
from gateway.journey.turn import Turn
from gateway.learning.build import Learning
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.reload import Configuration, cache_limits
from gateway.settings import Settings
from gateway.telemetry import logs
from gateway.telemetry import metric_names as m
from gateway.telemetry.health import HealthMonitor
from gateway.telemetry.hosts import BEAT_S, Hosts
from gateway.telemetry.metrics import CONTENT_TYPE, Metrics
from gateway.telemetry.stats import Stats
from gateway.telemetry.traces import Traces
from gateway.transport.contents import contents_at
from gateway.version import VERSION, build
from gateway.wire.errors import ApiError, BadRequest
from gateway.wire.fold import fold
from gateway.wire.types import KINDS, Chunk
from policies import Budgets, LeasedRateLimits, LocalRateLimits, RateLimits

ACCOUNTS_CHANNEL = "sameway:accounts"
# a request leaves no reference cycles, so collections are rare; measured in docs/benchmarks.md
_GC_THRESHOLDS = (20_000, 20, 50)
# freed memory lies between cached answers, and the allocator would keep it; measured there too
_TIDY_EVERY_S = 30.0
_PURGE_EVERY_S = 300.0
_TRUTH_EVERY_S = 5.0
_HITS_EVERY_S = 5.0
_SWEEP_EVERY_S = 30.0
_REPEAT_S = 60.0
_SETTLE_S = 3.0  # of cancelled work: its money and its rows
_KEY_REFUSALS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The key is missing or wrong", "content": ERROR},
    429: {"description": "Wrong keys came from this address, and the key was not read", "content": ERROR},
}
_log = get_logger()


Loop = Callable[[], Coroutine[Any, Any, None]]


@dataclass(slots=True, frozen=True, kw_only=True)
class WorkerParts(AdminParts):
    """All parts of a worker: those of the admin plane, and the rest."""

    link: RedisLink
    writer: LedgerWriter
    hits: HitsWriter
    metrics: Metrics
    pipeline: Pipeline
    learning: Learning
    memory: Memory
    background: Background
    watch: HealthMonitor
    files: Files
    runner: BatchRunner


def create_app(settings: Settings) -> FastAPI:
    """The ASGI application for `settings`. Its lifespan opens the parts."""
    app = FastAPIOffline(  # serves `/docs` without a CDN, also on a host without Internet
        title="Sameway",
        version=VERSION,
        description="A semantic-caching inference gateway. `/v1` speaks OpenAI's API; `/admin/api` is for operators.",
        lifespan=_lifespan,
        redoc_url=None,
        redirect_slashes=False,  # it would lead to whatever host the client named
    )
    app.state.settings = settings
    app.state.routes = {}
    app.state.opened = asyncio.Event()
    app.state.stops_by = 0.0  # without a server that says when it stops, at once
    app.state.requests = set[asyncio.Task[None]]()
    document(app, PATHS, SCHEMAS)
    app.add_exception_handler(HTTPException, _in_openai_shape)
    app.add_exception_handler(ApiError, _refused)

    @app.get("/", include_in_schema=False)
    async def root() -> RedirectResponse:
        return RedirectResponse("/admin")

    @app.get("/health", tags=["operations"], summary="The same as /healthz, under vLLM's name")
    @app.get("/healthz", tags=["operations"], summary="The process lives")
    async def healthz() -> dict[str, str]:
        return {"status": "ok", "version": VERSION, "build": build()}

    @app.get(
        "/readyz",
        tags=["operations"],
        summary="Everything this host needs is there; with a key, what is not",
        responses={503: {"description": "Not ready"}, **_KEY_REFUSALS},
        openapi_extra={"security": [{}, {"adminKey": []}]},
    )
    async def readyz(request: Request) -> JSONResponse:
        parts: WorkerParts = request.app.state.parts
        report = parts.watch.report()
        shown = report if await parts.guard.may_observe(request, Endpoint.READYZ) else {"is_ready": report["is_ready"]}
        return JSONResponse(shown, status_code=200 if report["is_ready"] else 503)

    @app.get(
        "/metrics",
        tags=["operations"],
        summary="Prometheus metrics of all workers of this host; needs a key",
        response_class=PlainTextResponse,
        responses={403: {"description": "`Host` does not name this host", "content": ERROR}, **_KEY_REFUSALS},
        openapi_extra={"security": [{"adminKey": []}]},
    )
    async def metrics(request: Request) -> Response:
        parts: WorkerParts = request.app.state.parts
        await parts.guard.check_observer(request, Endpoint.METRICS)
        return Response(parts.metrics.render(), media_type=CONTENT_TYPE)

    return app


def served(app: FastAPI) -> BelowPath:
    """What a server serves of `app`: whom proxies name first, then `/v1` without FastAPI's routing."""
    return BelowPath(Front(app, app.state.routes), app.state)


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return Response(error.body(), error.http_status, error.headers, "application/json")


async def _in_openai_shape(request: Request, error: Exception) -> Response:
    """FastAPI's own refusals (an unknown path, a wrong method), in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    let_go(error)
    refusal: ApiError = BadRequest(str(error.detail))
    headers = error.headers
    if error.status_code == 404:
        refusal = no_such_route(request.url.path, request.app.state.routes)
    elif error.status_code == 405:
        allowed = [one for one in _METHODS if _is_served({**request.scope, "method": one})]
        refusal = wrong_method(request.url.path, request.method, allowed)
        headers = refusal.headers
    return Response(refusal.body(), error.status_code, headers, "application/json")


_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")


def _is_served(scope: Scope) -> bool:
    return any(route.matches(scope)[0] is Match.FULL for route in scope["app"].router.routes)


class _NoDatabase(Exception):
    """The database cannot be used at the start.

    Logged without a stack trace, which would hide the reason.
    """


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    settings = app.state.settings = prepare(app.state.settings).model_copy(deep=True)  # this worker's own
    async with AsyncExitStack() as stack:
        try:
            parts = await _open(settings, stack, app.state.routes)
        except _NoDatabase as error:
            _log.error("start_failed", reason=str(error))
            raise
        except Exception as error:
            _log.exception("start_failed", reason=f"{type(error).__name__}: {error}")
            raise
        app.state.parts = parts
        app.state.routes.update(_routes(settings, parts))
        app.router.routes.extend([*api_routes(), *page_routes(parts)])
        parts.configuration.applied.append(partial(_renew, app.state.routes, parts))
        start_loops(parts, stack)
        app.state.opened.set()
        if parts.metrics.error is not None:
            _log.warning(
                "metrics_not_shared", reason=str(parts.metrics.error), consequence="a scrape sees one worker's"
            )
        gc.collect()
        gc.freeze()  # objects of the start-up live as long as the process
        gc.set_threshold(*_GC_THRESHOLDS)
        gc.enable()  # the command turned it off
        yield
        if app.state.requests:  # the server has cancelled them
            await asyncio.wait(app.state.requests, timeout=_SETTLE_S)
        await _finish_work(parts, app.state.stops_by - time.monotonic())


def _renew(routes: dict[str, Any], parts: WorkerParts) -> None:
    """Serve what the configuration says by now."""
    routes.clear()
    routes.update(_routes(parts.settings, parts))
    parts.writer.settings = parts.settings.ledger


def begin_stop(app: FastAPI, requests: set[asyncio.Task[None]]) -> None:
    """Begin no more work without a client, and set the time at which running work is cancelled.

    `requests` are the running requests.
    """
    app.state.requests = requests
    app.state.stops_by = time.monotonic() + app.state.settings.shutdown_grace_s
    app.state.parts.runner.stop()


async def _finish_work(parts: WorkerParts, within_s: float) -> None:
    """Wait for work without a client, and cancel what still runs after `within_s`. Leases are kept meanwhile."""
    tasks = [*parts.background.tasks, *parts.runner.stop()]
    for timeout_s in (max(0.0, within_s), _SETTLE_S):
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)
        for task in tasks:
            task.cancel()


async def _open_accounts(settings: Settings, link: RedisLink, stack: AsyncExitStack) -> Accounts:
    """The accounts of the database; announces changes to the other workers. Raises _NoDatabase."""

    async def tell_others() -> None:
        try:
            await link.execute_command("PUBLISH", ACCOUNTS_CHANNEL, "changed")
        except RedisError as error:  # `refresh` finds the change within seconds
            _log.warning("account_change_not_announced", reason=str(error))

    accounts = Accounts(settings.sql_url, notify=tell_others, leavers_days=lambda: settings.access.leavers_days)
    try:
        await accounts.open()
    except (SQLAlchemyError, OSError, SchemaUnknown) as error:
        why = (str(error).splitlines() or [""])[0]
        kind = "" if isinstance(error, NoAnswer | SchemaUnknown) else f"{type(error).__name__}: "
        raise _NoDatabase(f"database_url: it can't be used: {kind}{why}") from error
    stack.push_async_callback(accounts.close)
    await _show_first_key(accounts, settings)
    return accounts


async def _open(settings: Settings, stack: AsyncExitStack, routes: Routes) -> WorkerParts:
    """Open every part, in the order of their dependencies. `routes` are filled later."""
    metrics = Metrics(settings.run_dir / "metrics", VERSION, build())
    stack.callback(metrics.close)
    log = logs.configure(settings, on_drop=lambda lines: metrics.add(m.LOG_DROPPED, lines))
    stack.callback(logs.close)
    link = RedisLink(settings.redis_target, settings.redis_timeout_ms / 1000.0)
    stack.push_async_callback(link.aclose)
    accounts = await _open_accounts(settings, link, stack)
    stored_responses = _open_responses(settings, accounts, metrics, stack)
    memory = Memory(stored_responses, settings)
    ledger, budgets = Ledger(accounts.database), Budgets(link, defer=link.defer)
    money = Money(budgets, settings.budgets, _open_spool(settings), ledger.saved)
    stack.push_async_callback(money.aclose)
    exact, semantic = _open_cache(settings, link, stack)
    fleet = await _open_fleet(settings, accounts, semantic, stack)
    metrics.current = lambda: {**fleet.labels(), "team": accounts.team_ids}
    hits = HitsWriter(ledger, (stats := Stats(link, time.time)).take_hits)
    stack.push_async_callback(_last_flush, stats, hits, hosts := Hosts(settings, link))
    emit = _emitter(settings, log, metrics, stats, _open_traces(settings, fleet, metrics, stack))
    limits = Limits(LeasedRateLimits(RateLimits(link)), LocalRateLimits())
    services: dict[str, Any] = {"stats": stats, "metrics": metrics, "fleet": fleet}
    learning = await Learning(settings, accounts, exact, semantic, link, **services).opened()
    lookup = SemanticLookup(settings, semantic, exact, learning.truth.bounds)
    guard, learn = _guard(settings, accounts, metrics, link, stack), learning.learn
    keys = Bearers(settings, guard.provider, accounts, guard.agents)
    services = {"money": money, "fleet": fleet, "bearers": keys, "observe": emit, "learn": learn}
    pipeline = Pipeline(settings, accounts, limits, exact, lookup, **services)
    learning.connect(pipeline)
    for end in (learning.aclose, pipeline.drain, learning.stop):  # the last one first
        stack.push_async_callback(end)
    background = Background(pipeline, stored_responses, memory, link, partial(metrics.add, m.BACKGROUND_RESPONSES, 1))
    writer = LedgerWriter(link, ledger, budgets, settings=settings.ledger)
    watch = HealthMonitor(
        settings, link, accounts, writer=writer, semantic=semantic, fleet=fleet, money=money, pipeline=pipeline
    )
    return WorkerParts(
        settings=settings,
        configuration=Configuration(settings, pipeline, semantic, learning, metrics=metrics, link=link),
        guard=guard,
        link=link,
        accounts=accounts,
        ledger=ledger,
        audit=Audit(accounts.database),
        stored_responses=stored_responses,
        memory=memory,
        background=background,
        writer=writer,
        hits=hits,
        budgets=budgets,
        exact=exact,
        semantic=semantic,
        fleet=fleet,
        money=money,
        stats=stats,
        metrics=metrics,
        pipeline=pipeline,
        learning=learning,
        watch=watch,
        **_batches(settings, accounts, pipeline, metrics, routes),
        shared_health=SharedHealth(settings, lambda: fleet.deployments, link),
        verdicts=learning.verdicts,
        reports=learning.reports,
        truth=learning.truth,
        certificates=learning.certificates,
        hosts=hosts,
        deployments=lambda: deployments_of(fleet),
        healths=watch.parts,
        version=VERSION,
    )


def _emitter(settings: Settings, log: logs.Log, metrics: Metrics, stats: Stats, traces: Traces | None) -> Emit:
    """Logs, measures, counts and traces each record."""

    def emit(record: Record, turn: Turn | None, chunks: Sequence[Chunk]) -> None:
        if settings.log_prompts and turn is not None:
            prompt = msgspec.json.encode(turn.body.get(turn.kind.prompt)).decode()
            log.emit(record, prompt=prompt, answer=_told(chunks) if chunks else "")
        else:
            log.emit(record)
        metrics.observe(record)
        stats.add(record)
        if traces is not None:
            traces.add(record)

    return emit


def _open_responses(settings: Settings, accounts: Accounts, metrics: Metrics, stack: AsyncExitStack) -> ResponseStore:
    def count(outcome: str, responses: int) -> None:
        metrics.add(m.STORED_RESPONSES, responses, outcome)

    store = ResponseStore(accounts.database, time.time, settings.responses, count)
    stack.push_async_callback(store.aclose)
    return store


def _batches(
    settings: Settings, accounts: Accounts, pipeline: Pipeline, metrics: Metrics, routes: Routes
) -> dict[str, Any]:
    """The files and batches of `WorkerParts`."""
    files = Files(accounts.database, settings.batches, contents_at(settings.files_url))
    batches = Batches(accounts.database, files, settings.batches)
    runner = BatchRunner(
        batches=batches,
        files=files,
        pipeline=pipeline,
        accounts=accounts,
        settings=settings.batches,
        routes=routes,
        on_line=lambda how: metrics.add(m.BATCH_LINES, 1, how),
    )
    return {"files": files, "batches": batches, "runner": runner}


def _open_traces(settings: Settings, fleet: Fleet, metrics: Metrics, stack: AsyncExitStack) -> Traces | None:
    if settings.traces.endpoint is None:
        return None
    traces = Traces(settings.traces, lambda: fleet.deployments, metrics, VERSION)
    stack.push_async_callback(traces.aclose)
    return traces


def _open_spool(settings: Settings) -> Spool:
    spool = Spool(settings.data_dir.absolute() / "spool")
    if spool.error is not None:
        _log.warning("rows_not_spooled", reason=str(spool.error), consequence="a kill loses rows that Redis lacks")
    return spool


def _open_cache(settings: Settings, link: RedisLink, stack: AsyncExitStack) -> tuple[ExactCache, SemanticClient]:
    semantic = SemanticClient(settings.cache_socket, settings.cache.semantic_timeout_ms / 1000.0)
    semantic.start()
    stack.push_async_callback(semantic.aclose)
    return ExactCache(link, cache_limits(settings), defer=link.defer), semantic


async def _open_fleet(settings: Settings, accounts: Accounts, semantic: SemanticClient, stack: AsyncExitStack) -> Fleet:
    """The deployments, each in the use that an operator gave it."""
    fleet = build_fleet(settings, time.monotonic, semantic)
    accounts.follow_uses(fleet.take_uses)
    await fleet.start()
    stack.push_async_callback(fleet.aclose)
    return fleet


async def _show_first_key(accounts: Accounts, settings: Settings) -> None:
    """Make the first key in a new database, and print it."""
    first_key = await accounts.ensure_first(plaintext=settings.api_key)
    if first_key is not None:
        shown = "as preset in SAMEWAY_API_KEY" if settings.api_key else first_key
        print(f"  API key    {shown} (shown this once; team `default`)", flush=True)


def _guard(settings: Settings, accounts: Accounts, metrics: Metrics, link: RedisLink, stack: AsyncExitStack) -> Guard:
    provider = Provider(settings)
    stack.callback(provider.aclose)
    sessions = Sessions(accounts.database, time.time)
    count = lambda endpoint, outcome: metrics.add(m.WRONG_KEYS, 1, endpoint, outcome)  # noqa: E731
    guard = Guard(settings, sessions, count, redis=link, provider=provider)
    guard.agents = Agents(sessions, guard.mark, link)
    return guard


def _routes(settings: Settings, parts: WorkerParts) -> Routes:
    models = Models(settings, parts.pipeline, time.time())
    files = FilesEndpoint(parts.pipeline, parts.files), AnthropicFiles(parts.pipeline, parts.files)
    memory, background = parts.memory, parts.background
    stored = StoredResponses(parts.pipeline, memory, background)
    chats = StoredChats(parts.pipeline, memory, parts.stored_responses)
    conversations = ConversationsEndpoint(parts.pipeline, memory)
    batches = BatchesEndpoint(parts.pipeline, parts.batches, parts.runner.woken.set)
    of_messages = MessageBatches(parts.pipeline, parts.batches, parts.runner.woken.set)
    chat = StoringChat(parts.pipeline, settings.body_bytes_max, memory, parts.stored_responses)
    responses, compact = (
        made(parts.pipeline, settings.body_bytes_max, memory, background) for made in (Responses, Compact)
    )
    messages = Messages(parts.pipeline, settings.body_bytes_max)
    for endpoint in (chat, responses, compact, messages):
        endpoint.files = parts.files

    async def files_of_client(scope: Scope, receive: Receive, send: Send) -> None:
        await files["anthropic-version" in headers_of(scope)](scope, receive, send)

    return {
        **routes_of(stored.path, stored),
        **routes_of(conversations.path, conversations),
        **routes_of(FilesEndpoint.path, files_of_client),
        **routes_of(batches.path, batches),
        **routes_of(of_messages.path, of_messages),
        **{
            f"/v1{kind.path}": {
                "POST": Uploads(parts.pipeline, settings, kind)
                if kind.is_form
                else AnswerEndpoint(parts.pipeline, settings.body_bytes_max, kind)
            }
            for kind in KINDS
        },
        **routes_of(chats.path, chats),
        chats.path: {"GET": chats, "POST": chat},
        "/v1/responses": {"POST": responses},
        **{
            one.route: dict.fromkeys(one.methods, one)
            for one in (
                Passthrough(parts.pipeline, settings, deployment, ProviderIds(parts.accounts.database))
                for deployment in parts.fleet.deployments
                if deployment.settings.passthrough
            )
        },
        "/v1/responses/input_tokens": {"POST": InputTokens(parts.pipeline, memory)},
        "/v1/responses/compact": {"POST": compact},
        "/v1/messages": {"POST": messages},
        "/v1/messages/count_tokens": {"POST": CountTokens(parts.pipeline)},
        "/v1/feedback": {"POST": Feedback(parts.pipeline, parts.learning.reports)},
        **{path: {"POST": telemetry.Telemetry(parts.pipeline)} for path in telemetry.PATHS},
        "/tokenize": {"POST": TokenizeEndpoint(parts.pipeline)},
        "/detokenize": {"POST": DetokenizeEndpoint(parts.pipeline)},
        "/v1/models": {"GET": models},
        "/v1/models/*": {"GET": models, "DELETE": models},
    }


# -- the loops -------------------------------------------------------------------------------------


def start_loops(parts: WorkerParts, stack: AsyncExitStack) -> None:
    """Start the loops, and keep them as the configuration needs them."""
    loops = Loops()
    stack.push_async_callback(loops.aclose)

    def keep() -> None:
        loops.keep(_loops(parts))

    keep()
    parts.configuration.applied.append(keep)


class Loops:
    """The background loops of a worker, each with what it was made of."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[object, asyncio.Task[None]]] = {}
        self._ending = set[asyncio.Task[None]]()

    def keep(self, wanted: Mapping[str, tuple[object, Loop]]) -> None:
        """Run the `wanted` loops and no others. One that is made of the same as before goes on."""
        for name, (made_of, task) in list(self._running.items()):
            if name not in wanted or wanted[name][0] != made_of:
                del self._running[name]
                ending = asyncio.create_task(_cancelled(task))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
        for name, (made_of, loop) in wanted.items():
            if name not in self._running:
                self._running[name] = made_of, asyncio.create_task(_for_ever(name, loop), name=name)

    async def aclose(self) -> None:
        """End all, the last one first."""
        for _, task in reversed(self._running.values()):
            await _cancelled(task)
        await asyncio.gather(*self._ending)


def _alert_watch(parts: WorkerParts) -> AlertWatch:
    alerts = parts.settings.alerts
    channels: dict[str, Channel] = {}
    if alerts.webhook_url:
        channels["webhook"] = Webhook(alerts.webhook_url, parts.settings.alerts_secret or "")
    if alerts.smtp_host:
        channels["email"] = Mail(alerts)
    return AlertWatch(
        parts.link,
        parts.accounts,
        parts.budgets,
        alerts,
        channels,
        count=lambda channel, outcome: parts.metrics.add(m.ALERTS, 1, channel, outcome),
    )


def _loops(parts: WorkerParts) -> dict[str, tuple[object, Loop]]:
    """The loops that the configuration needs, each with what it is made of."""
    settings = parts.settings
    always: dict[str, Loop] = {
        "purges": lambda: parts.exact.follow_purges(parts.link.subscribe),
        "accounts": lambda: _follow_accounts(parts),
        "configuration": parts.configuration.follow,
        "last_used": lambda: _every(30.0, parts.accounts.save_last_used),
        "ledger": parts.writer.run,
        "money": parts.money.keep,
        "hosts": lambda: _every(BEAT_S, parts.hosts.beat),
        "stats": lambda: _every(0.5, parts.stats.flush),
        "hits": lambda: _every(_HITS_EVERY_S, parts.hits.flush),
        "touches": lambda: _every(1.0, parts.exact.flush_touches),
        "claims": lambda: _every(1.0, parts.exact.renew_claims),
        "files": lambda: _every(_SWEEP_EVERY_S, parts.files.sweep),
        "old_batches": lambda: _every(_SWEEP_EVERY_S, parts.batches.forget),
        "batches": parts.runner.run,
        "batch_gauges": lambda: _every(_SWEEP_EVERY_S, partial(_count_batches, parts)),
        "watch": lambda: parts.watch.run(parts.metrics),
        "health": parts.shared_health.run,
        "background": parts.background.run,
        "audit": lambda: _every(_PURGE_EVERY_S, lambda: parts.audit.forget(settings.access.audit_days, time.time())),
        "responses": lambda: _every(_PURGE_EVERY_S, parts.stored_responses.purge),
        "memory": lambda: _every(_TIDY_EVERY_S, partial(_tidy, parts.pipeline)),
    }
    loops: dict[str, tuple[object, Loop]] = {name: (None, loop) for name, loop in always.items()}
    watch = cache(lambda: _alert_watch(parts))
    loops["alerts"] = settings.alerts.model_dump_json(), lambda: watch().run()
    if groups := [id(one) for lists in parts.fleet.replicas.values() for one in lists]:
        load = cache(lambda: SharedLoad(parts.fleet, parts.link))
        loops["load"] = groups, lambda: load().run()
        loops["replicas"] = groups, lambda: load().follow()
    if any(deployment.settings.concurrency_max for deployment in parts.fleet.deployments):
        loops["slots"] = None, SharedSlots(parts.fleet, parts.link, settings.workers).run
    if (place := settings.ledger.files_url) is not None:
        files = cache(lambda: LedgerFiles(parts.ledger, contents_at(place), parts.link, time.time))
        loops["ledger_files"] = place, lambda: files().run()
    if settings.cache.is_semantic:
        loops["judging"] = None, parts.learning.judging.run
        loops["truth"] = None, lambda: _every(_TRUTH_EVERY_S, parts.learning.look)
    return loops


async def _for_ever(name: str, loop: Loop) -> None:
    """Log and restart a loop that failed: a worker without it would be wrong without a sign.

    What is the same as before is logged once in `_REPEAT_S`: a Redis that is away fails all loops each second.
    """
    before, logged_at = "", 0.0
    while True:
        try:
            await loop()
        except (RedisError, CacheUnavailable, SQLAlchemyError, OSError) as error:
            reason, now = f"{type(error).__name__}: {error}", time.monotonic()
            if reason != before or now - logged_at > _REPEAT_S:
                before, logged_at = reason, now
                _log.warning("loop_interrupted", loop=name, reason=reason)
        except Exception:
            _log.exception("loop_failed", loop=name)
        await asyncio.sleep(random.uniform(0.5, 1.0))


async def _every(seconds: float, act: Callable[[], Awaitable[object]]) -> None:
    while True:
        await asyncio.sleep(seconds)
        await act()


async def _count_batches(parts: WorkerParts) -> None:
    batches, lines = await parts.batches.left()
    parts.metrics.set(m.BATCHES_LEFT, batches)
    parts.metrics.set(m.BATCH_LINES_LEFT, lines)


async def _tidy(pipeline: Pipeline) -> None:
    """Collect the young objects, unless the worker is generating, and return free pages to the kernel.

    Only libraries and bugs make cycles, so the young generations are small. A thread returns the
    pages, because thousands of scattered ones take longer than a request.
    """
    if not pipeline.generations:
        gc.collect(1)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        await asyncio.to_thread(libc.malloc_trim, 0)


async def _follow_accounts(parts: WorkerParts) -> None:
    async with parts.link.subscribe(ACCOUNTS_CHANNEL) as subscription:
        await parts.accounts.refresh()
        async for message in subscription.listen():
            if message["type"] == "message":
                await parts.accounts.refresh()


async def _cancelled(task: asyncio.Task[None]) -> None:
    while not task.done():  # on Python 3.11 a wait inside redis-py can swallow a cancellation
        task.cancel()
        await asyncio.wait([task], timeout=0.5)


def _told(chunks: Sequence[Chunk]) -> str:
    """The answer for the log. Chunks that cannot be folded are shown one by one, and bytes by their size."""
    if chunks[0].media and not chunks[0].media.startswith("text/"):
        return f"({sum(len(chunk.data) for chunk in chunks)} bytes of {chunks[0].media})"
    try:
        return fold(chunks).decode()
    except msgspec.DecodeError:
        return b"\n".join(chunk.data for chunk in chunks).decode("utf-8", "replace")


async def _last_flush(stats: Stats, hits: HitsWriter, hosts: Hosts) -> None:
    try:
        await stats.flush()
        await hosts.leave()
    except RedisError as error:
        _log.warning("stats_not_flushed", reason=str(error))
    try:
        await hits.flush()
    except SQLAlchemyError as error:
        _log.warning("hits_not_written", reason=str(error))
