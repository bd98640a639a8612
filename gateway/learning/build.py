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
from gateway.learning.allowance import Allowance
from gateway.learning.comparisons import Findings, Judging
from gateway.learning.internal_requests import InternalRequests, own_identity
from gateway.learning.model_judges import ModelJudges, OwnJudges
from gateway.learning.reports import Reports
from gateway.loggers import get_logger
from gateway.pipeline import Learn, Pipeline
from gateway.settings import Settings
from gateway.telemetry import metric_names as m
from gateway.telemetry.measured_error import Certificates, MeasuredErrors
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
        certificates = await self.certificates.update(teams, status.embedder if status.rule else "", status.rule)
        for live in self.truth.update(await self._stats.hours(), teams, certificates):
            facts = {"team": live.team, "model": live.alias, "error_max": live.error_max}
            if live.strictness < 1.0:
                _log.warning("semantic_bound_tightened", **facts, error_low=live.measured.low, by=live.strictness)
            else:
                _log.info("semantic_bound_relaxed", **facts)
        names = {team.id: team.name for team in teams}
        for (team_id, alias), certificate in certificates.items():
            if not certificate.counts.is_empty:
                labels, measured = (names[team_id], alias), self.truth.measure(certificate.counts)
                if measured.estimate is not None:
                    self._metrics.set(m.SEMANTIC_ERROR, measured.estimate, *labels)
                self._metrics.set(m.SEMANTIC_ERROR_LOW, measured.low, *labels)
                self._metrics.set(m.SEMANTIC_ERROR_HIGH, measured.high, *labels)
                self._metrics.set(m.SEMANTIC_BOUND, certificate.start.basis.error_max, *labels)
                strictness = self.truth.bounds.strictness.get((team_id, alias), 1.0)
                self._metrics.set(m.SEMANTIC_STRICTNESS, strictness, *labels)


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

    findings = Findings(stats, metrics)
    judging = Judging(
        exact=exact,
        verdicts=verdicts,
        judges=OwnJudges(semantic),
        fallback=judges,
        reply_ttl_s=float(cache.feedback_ttl_s),
        random=random.random,
        findings=findings,
        defer=link.defer,
    )
    reports = Reports(verdicts, exact, stats, findings.count)
    names = OwnJudges.names if model is None else f"{OwnJudges.names}, {model}"
    certificates = Certificates(link, stats, truth.bounds, names, time.time)
    with contextlib.suppress(RedisError):  # without Redis nothing is served by meaning
        await certificates.recall()
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
