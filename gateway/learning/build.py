"""The parts that make the semantic cache learn, put together: who judges, who is heard, what is
measured and what follows.

Knows how they fit and nothing of what they do. Invariant: a worker without any of it would serve
the same answers, and never better.
"""

import contextlib
import random
import time
from dataclasses import dataclass

from redis.exceptions import RedisError

from cache import ExactCache, SemanticClient
from cache.redis_link import RedisLink
from cache.verdicts import VerdictStore
from gateway.accounts import Accounts
from gateway.deployments.fleet import Fleet
from gateway.journey.record import Record
from gateway.journey.semantic import Bounds
from gateway.journey.turn import Turn
from gateway.learning.allowance import Allowance
from gateway.learning.comparisons import Findings, Judging
from gateway.learning.internal_requests import InternalRequests, own_identity
from gateway.learning.model_judges import ModelJudges, OwnJudges
from gateway.learning.reports import Reports
from gateway.loggers import get_logger
from gateway.pipeline import Learn, Pipeline
from gateway.settings import Settings
from gateway.telemetry import metric_names as m
from gateway.telemetry.certificates import Certificates
from gateway.telemetry.measured_error import LiveError, MeasuredErrors, shadow_share
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Learning:
    """The learning parts of a worker."""

    verdicts: VerdictStore
    judging: Judging
    reports: Reports
    truth: MeasuredErrors
    certificates: Certificates
    learn: Learn | None  # takes each flight that is over; None where the cache is exact only
    _requests: InternalRequests | None
    _stats: Stats
    _metrics: Metrics
    _accounts: Accounts
    _semantic: SemanticClient

    def connect(self, pipeline: Pipeline) -> None:
        """Answer the gateway's own requests by `pipeline`."""
        if self._requests is not None:
            self._requests.connect(pipeline)

    async def look(self) -> None:
        """Measure, and tighten or relax bounds. Raises redis.exceptions.RedisError,
        SQLAlchemyError.
        """
        teams, status = await self._accounts.list_teams(), self._semantic.status
        found = await self.certificates.update(teams, status.embedder if status.rule else "", status.rule)
        certified = {pair: (one.start.since_s, one.counts) for pair, one in found.items()}
        for live in self.truth.update(await self._stats.hours(), teams, certified):
            _log_bound(live)
        names = {team.id: team.name for team in teams}
        for (team_id, alias), (_, counts) in certified.items():
            if not counts.is_empty:
                high = self.truth.measure(counts).high
                self._metrics.set(m.SEMANTIC_CERTIFIED, high, names[team_id], alias)
        for live in self.truth.live:
            labels = (live.team, live.alias)
            if live.measured.estimate is not None:
                self._metrics.set(m.SEMANTIC_ERROR, live.measured.estimate, *labels)
            self._metrics.set(m.SEMANTIC_ERROR_LOW, live.measured.low, *labels)
            self._metrics.set(m.SEMANTIC_ERROR_HIGH, live.measured.high, *labels)
            self._metrics.set(m.SEMANTIC_BOUND, live.error_max, *labels)
            self._metrics.set(m.SEMANTIC_STRICTNESS, live.strictness, *labels)


def _log_bound(live: LiveError) -> None:
    facts = {"team": live.team, "model": live.alias, "error_max": live.error_max}
    if live.drift is not None:
        error, by, since_s = live.measured.estimate, live.strictness, live.drift.since_s
        _log.warning("semantic_bound_tightened", **facts, error=error, by=by, since_s=since_s)
    else:
        _log.info("semantic_bound_relaxed", **facts)


async def open_learning(
    settings: Settings,
    accounts: Accounts,
    exact: ExactCache,
    semantic: SemanticClient,
    link: RedisLink,
    stats: Stats,
    metrics: Metrics,
    fleet: Fleet,
) -> Learning:
    """Open all parts that learn. The gateway's own requests are refused until `Learning.connect`."""
    cache, verdicts = settings.cache, VerdictStore(link)
    truth = MeasuredErrors(Bounds(settings), cache.judge_error_max)
    identity = await own_identity(cache, accounts)
    requests = InternalRequests(identity) if identity is not None else None
    model = cache.judge_model
    judges: ModelJudges | None = None
    is_auto = model == "auto" and model not in settings.models
    allowance = Allowance(link, stats.saved)
    if requests is not None and model is not None:

        def questioned(record: Record, cost_microusd: int, outcome: str) -> None:
            metrics.add(m.JUDGE_QUESTIONS, 1, record.request.team, outcome)
            metrics.add(m.JUDGE_COST, cost_microusd / 1e6, record.request.team)
            stats.add_question(record.request.team_id, record.request.alias, cost_microusd)

        judges = ModelJudges(
            None if is_auto else model,
            fleet,
            requests,
            allowance if is_auto else None,
            requests.generations,
            questioned,
        )

    async def regenerate(turn: Turn) -> bytes | None:
        return (await requests.ask(turn.body))[0] if requests is not None else None

    findings = Findings(stats, metrics, truth, judges)
    judging = Judging(
        exact=exact,
        verdicts=verdicts,
        judges=OwnJudges(semantic),
        fallback=judges,
        regenerate=regenerate if requests is not None else None,
        share=lambda team_id, alias: shadow_share(cache.shadow_share, stats.certified_hits.get((team_id, alias), 0)),
        reply_ttl_s=float(cache.feedback_ttl_s),
        random=random.random,
        findings=findings,
        defer=link.defer,
    )
    reports = Reports(verdicts, exact, stats, findings.count)
    certificates = await _open_certificates(link, stats, truth.bounds, model)
    return Learning(
        verdicts=verdicts,
        judging=judging,
        reports=reports,
        truth=truth,
        certificates=certificates,
        learn=judging.recorded if cache.is_semantic else None,
        _requests=requests,
        _stats=stats,
        _metrics=metrics,
        _accounts=accounts,
        _semantic=semantic,
    )


async def _open_certificates(link: RedisLink, stats: Stats, bounds: Bounds, model: str | None) -> Certificates:
    """Read the certificates, so that this worker counts for them."""
    judges = OwnJudges.names if model is None else f"{OwnJudges.names}, {model}"
    certificates = Certificates(link, stats, bounds, judges, time.time)
    with contextlib.suppress(RedisError):  # without Redis nothing is served by meaning
        await certificates.recall()
    return certificates
