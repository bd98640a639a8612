"""Checks the worker's parts: readiness, the admin's list of parts, and the gauges.

Checks twice a second, so a probe of `/readyz` waits for nothing. Knows no requests. Invariants:
`/readyz` is 503 until every part was ready once, so a balancer sends no request to a cold host;
after that it is 503 only while this host has no deployment for some alias, because a gateway without
its cache still answers.
"""

import asyncio
import math
import os
import resource
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from cache import SemanticClient
from cache.redis_link import RedisLink
from cache.worker import WorkerState, WorkerStatus
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import name_of
from gateway.accounts.ledger_writer import LedgerWriter, WriterStats
from gateway.deployments.alias import ABSENCES
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.journey.budget import Money
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.telemetry import metric_names as m
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.parts import GatewayPart, PartHealth
from policies.replicas import Reading

_LOOK_EVERY_S = 0.5
_LOOK_TIMEOUT_S = 6.0  # longer than the time-outs of Redis and the cache worker: only the database can be late
_DESCRIPTORS_SHARE_MAX = 0.9
_CACHE_WORKER, _VECTOR_ENGINE, _FILES = "cache worker", "vector engine", "files"
_UNREAD = Reading(*[math.nan] * len(Reading.__struct_fields__))
_LACKS = "its user lacks a permission"
# a write that changes nothing fails if writes do (disk or memory full, a replica), or scripts
_WRITE = "return redis.pcall('SETRANGE', KEYS[1], 0, '')"

_log = get_logger()


@dataclass(eq=False)
class HealthMonitor:
    """The results of the last check of every part of this worker."""

    settings: Settings
    link: RedisLink
    accounts: Accounts
    _: KW_ONLY
    writer: LedgerWriter
    semantic: SemanticClient
    fleet: Fleet
    money: Money
    pipeline: Pipeline
    files_trouble: Callable[[], str] = lambda: ""

    def __post_init__(self) -> None:
        self._redis_error = "not asked yet"
        self._redis_note = ""
        self._database_error = "not asked yet"
        self._cache = WorkerStatus(WorkerState.AWAY)
        self._backlog = 0
        self._written = WriterStats()  # as counted in the metrics
        self.was_ready = False
        self._are_descriptors_scarce = False
        self.lag_s = 0.0

    async def run(self, metrics: Metrics) -> None:
        """Check the parts and set the gauges, for ever."""
        await self._look_at_eviction()
        while True:
            before = time.perf_counter()
            await asyncio.sleep(_LOOK_EVERY_S)
            self.lag_s = max(0.0, time.perf_counter() - before - _LOOK_EVERY_S)
            self._cache = self.semantic.status
            looks = {asyncio.ensure_future(look) for look in (self._look_at_redis(), self._look_at_database())}
            _, late = await asyncio.wait(looks, timeout=_LOOK_TIMEOUT_S)
            for look in late:
                look.cancel()
            if late:
                self._database_error = self._database_error or "does not answer in time"
            self._look_at_descriptors()
            self._set_gauges(metrics)

    async def _look_at_redis(self) -> None:
        try:
            self._backlog = await self.writer.backlog()
            await self.link.eval(_WRITE, 1, "sameway:writable")
            error = ""
        except RedisError as failure:
            error = f"{type(failure).__name__}: {failure}"
        if denied := self.link.denied:
            error = f"{_LACKS}: {denied}"
            if not self._redis_error.startswith(_LACKS):
                _log.error("redis_denied", reason=denied, wanted="+@all -@admin -@dangerous ~sameway:* &sameway:*")
        self._redis_error = error

    async def _look_at_eviction(self) -> None:
        """Warn if Redis may evict keys: budgets and rows of the ledger are in Redis."""
        try:
            policy = await self.link.client.config_get("maxmemory-policy")
        except Exception as error:  # a managed Redis may refuse the question; this is only advice
            _log.info("redis_policy_unknown", reason=f"{type(error).__name__}: {error}")
            return
        if policy.get("maxmemory-policy", "noeviction") != "noeviction":
            consequence, wanted = "budgets and rows of the ledger may be lost", "maxmemory-policy noeviction"
            self._redis_note = f"{consequence}: set {wanted}"
            _log.warning("redis_may_evict", consequence=consequence, wanted=wanted)

    async def _look_at_database(self) -> None:
        try:
            await self.accounts.refresh()
            self._database_error = "" if await self.accounts.database.takes_writes() else "takes no writes"
        except SQLAlchemyError as error:
            self._database_error = name_of(error)

    def _look_at_descriptors(self) -> None:
        """Warn if few descriptors are left; the kernel gives the lowest free number."""
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        try:
            lowest_free = os.dup(0)
            os.close(lowest_free)
        except OSError:
            lowest_free = limit
        are_scarce = limit != resource.RLIM_INFINITY and lowest_free > _DESCRIPTORS_SHARE_MAX * limit
        if are_scarce and not self._are_descriptors_scarce:
            _log.error(
                "descriptors_used_up", limit=limit, consequence="connections are turned away", wanted="ulimit -n"
            )
        self._are_descriptors_scarce = are_scarce

    # -- results ------------------------------------------------------------------------------------------------

    def parts(self) -> list[GatewayPart]:
        """Every part with its state and details for people."""
        cache = self._cache
        detail = {
            WorkerState.READY: f"{cache.size} indexed, {cache.embedder}",
            WorkerState.AWAY: "the worker is away; lookups by meaning are misses",
            WorkerState.FAILED: f"lookups by meaning are misses: {cache.detail}",
        }.get(cache.state, f"{cache.state} {cache.progress:.0%} {cache.detail}".strip())
        redis = "; ".join(filter(None, (self._redis_error, self._redis_note)))
        is_starting = cache.state in (WorkerState.LOADING, WorkerState.REBUILDING)
        away = PartHealth.STARTING if is_starting else PartHealth.DOWN
        worker = GatewayPart(_CACHE_WORKER, PartHealth.OK if cache.is_ready else away, detail)
        return [
            GatewayPart("redis", PartHealth.DOWN if self._redis_error else PartHealth.OK, redis),
            GatewayPart("database", PartHealth.DOWN if self._database_error else PartHealth.OK, self._database_error),
            *([worker] if self.settings.needs_cache_worker else ()),
            *self._engine(),
            *([GatewayPart(_FILES, PartHealth.DOWN, why)] if (why := self.files_trouble()) else ()),
            *(self._part(deployment) for deployment in self.fleet.deployments),
        ]

    def _engine(self) -> list[GatewayPart]:
        """The vector engine, if the settings name one."""
        if self.settings.cache.index_url is None:
            return []
        away = self._cache.index if self._cache.state is not WorkerState.AWAY else "not known"
        detail = f"{away}; lookups by meaning that need it are misses" if away else ""
        return [GatewayPart(_VECTOR_ENGINE, PartHealth.DOWN if away else PartHealth.OK, detail)]

    def _part(self, deployment: Deployment) -> GatewayPart:
        if deployment.is_available is None:
            return GatewayPart(deployment.name, PartHealth.UNASKED, "no answer from it yet")
        if deployment.is_available:
            return GatewayPart(deployment.name, PartHealth.OK)
        is_starting = deployment.backend.load(0).is_starting and not deployment.use
        return GatewayPart(deployment.name, PartHealth.STARTING if is_starting else PartHealth.DOWN, deployment.trouble)

    def report(self) -> dict[str, Any]:
        """The body of `/readyz`."""
        parts = self.parts()
        # what a provider does, and what an operator took out of use, is so on every host: no balancer
        # has a better one, and only requests find out that a deployment is back
        unanswerable = {
            name
            for name, alias in self.fleet.aliases.items()
            if not any(d.backend.load(0).is_ready or d.use for d in alias.deployments.values())
        }
        self.fleet.unproven &= unanswerable
        is_answerable = not unanswerable - self.fleet.unproven  # a new alias takes no host out of service
        # before the first readiness every part must be ready, except deployments that are down, not
        # starting, and an embedder that can't be loaded; afterwards each alias needs only one
        # available deployment
        failed = [_CACHE_WORKER] if self._cache.state is WorkerState.FAILED else []
        may_be_down = {_VECTOR_ENGINE, _FILES, *failed, *(one.name for one in self.fleet.deployments)}
        is_up = all(
            part.health is PartHealth.OK or (part.name in may_be_down and part.health is not PartHealth.STARTING)
            for part in parts
        )
        self.was_ready = self.was_ready or (is_answerable and is_up)
        return {
            "is_ready": self.was_ready and is_answerable,
            "is_degraded": any(part.health in (PartHealth.STARTING, PartHealth.DOWN) for part in parts),
            "parts": {part.name: {"health": part.health.value, "detail": part.detail} for part in parts},
        }

    def _set_gauges(self, metrics: Metrics) -> None:
        metrics.set(m.LOOP_LAG, self.lag_s)
        metrics.set(m.IN_FLIGHT, self.pipeline.generations)
        metrics.set(m.WORKER_MEMORY, _memory_bytes())
        metrics.set(m.REDIS_UP, float(not self._redis_error))
        metrics.set(m.DATABASE_UP, float(not self._database_error))
        metrics.set(m.LEDGER_BACKLOG, self._backlog + self.money.unsettled)
        before, self._written = self._written, replace(self.writer.stats)
        metrics.add(m.LEDGER_FAILURES, self._written.failures - before.failures)
        metrics.add(m.LEDGER_SET_ASIDE, self._written.set_aside - before.set_aside)
        metrics.add(m.LEDGER_DRIFT, (self._written.drift_microusd - before.drift_microusd) / 1e6)
        metrics.set(m.CACHE_WORKER_UP, float(self._cache.is_ready))
        metrics.set(m.INDEX_ENTRIES, self._cache.entries)
        metrics.set(m.L1_BYTES, self.pipeline.exact.l1_bytes)
        self.set_deployment_gauges(metrics)

    def set_deployment_gauges(self, metrics: Metrics) -> None:
        for alias in self.fleet.aliases.values():
            absence = alias.absence
            for cause in ABSENCES:
                metrics.set(m.MODEL_UNAVAILABLE, float(absence == cause), alias.name, cause)
        for deployment in self.fleet.deployments:
            load = deployment.backend.load(0)
            is_available = deployment.is_available
            now = math.nan if is_available is None else float(is_available)
            metrics.set(m.DEPLOYMENT_AVAILABLE, now, deployment.name)
            workers = 1 if load.engine is None else self.settings.workers  # an engine reports its total to each worker
            metrics.set(m.DEPLOYMENT_RUNNING, load.running / workers, deployment.name)
            if load.engine is not None:
                metrics.set(m.ENGINE_KV_USED, load.engine.kv_usage, deployment.name)
            if deployment.backlog is not None:
                reading = deployment.backlog.reading or _UNREAD
                metrics.set(m.SERVER_RUNNING, reading.running, deployment.name)
                metrics.set(m.SERVER_WAITING, reading.waiting, deployment.name)
                metrics.set(m.ENGINE_KV_USED, reading.kv_used, deployment.name)
            metrics.set(m.DEPLOYMENT_WAITING, load.waiting / workers + deployment.slots.waiting, deployment.name)


def _memory_bytes() -> float:
    try:
        with open("/proc/self/statm") as file:
            return float(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux: use the peak
        return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
