"""The parts that make the semantic cache learn, put together: who judges, who is heard, what is
measured and what follows.

Knows how they fit and nothing of what they do. Invariant: a worker without any of it would serve
the same answers, and never better.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from cache import ExactCache, Partition, SemanticClient
from cache.verdicts import Judgement, Ruling, Source, VerdictStore, equal
from cache.worker import Answered
from gateway.accounts import Accounts
from gateway.deployments.fleet import Fleet
from gateway.journey.record import Record
from gateway.journey.turn import Turn
from gateway.learning.allowance import Allowance
from gateway.learning.comparisons import Check, Judging
from gateway.learning.internal_requests import InternalRequests, own_identity
from gateway.learning.model_judges import ModelJudges
from gateway.learning.reports import Reports
from gateway.loggers import get_logger
from gateway.pipeline import Learn, Pipeline
from gateway.settings import Settings
from gateway.telemetry import metric_names as m
from gateway.telemetry.judge_error import RulingCounts
from gateway.telemetry.measured_error import LiveError, MeasuredErrors
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats
from gateway.transport.redis_link import RedisLink

_log = get_logger()


@dataclass(frozen=True, slots=True)
class Learning:
    """The learning parts of a worker."""

    verdicts: VerdictStore
    judging: Judging
    reports: Reports
    truth: MeasuredErrors
    learn: Learn | None  # takes each flight that is over; None where the cache is exact only
    _own: InternalRequests | None
    _stats: Stats
    _metrics: Metrics
    _accounts: Accounts

    def connect(self, pipeline: Pipeline) -> None:
        """Answer the gateway's own requests by `pipeline`."""
        if self._own is not None:
            self._own.connect(pipeline)

    async def look(self) -> None:
        """Measure, and tighten or relax bounds. Raises redis.exceptions.RedisError,
        SQLAlchemyError.
        """
        changed = self.truth.update(await self._stats.samples(), await self._accounts.list_teams())
        for live in changed:
            _log_bound(live)
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
    if live.strictness < 1.0:
        measured = live.measured
        _log.warning(
            "semantic_bound_tightened", **facts, error=measured.estimate, error_low=measured.low, by=live.strictness
        )
    else:
        _log.info("semantic_bound_relaxed", **facts)


class OwnJudges:
    """The judges that cost no money: equality, then those of the cache worker."""

    def __init__(self, semantic: SemanticClient) -> None:
        self._semantic = semantic

    async def compare(
        self, partition: Partition, compat: bytes, fresh: Answered, others: Sequence[Answered]
    ) -> list[Judgement]:
        judgements = [equal(fresh.text, other.text) for other in others]
        left = [place for place, found in enumerate(judgements) if found.ruling is Ruling.UNKNOWN]
        rulings = await self._semantic.judge(partition, compat, fresh, [others[place] for place in left])
        for place, ruling in zip(left, rulings, strict=True):
            judgements[place] = ruling
        return judgements


async def open_learning(
    settings: Settings,
    accounts: Accounts,
    exact: ExactCache,
    semantic: SemanticClient,
    link: RedisLink,
    stats: Stats,
    metrics: Metrics,
    truth: MeasuredErrors,
    fleet: Fleet,
) -> Learning:
    """All that learns. Its own requests are refused until `Learning.connect`."""
    cache, verdicts = settings.cache, VerdictStore(link)
    identity = await own_identity(cache, accounts)
    own = InternalRequests(identity) if identity is not None else None
    model = cache.judge_model
    judges: ModelJudges | None = None
    is_auto = model == "auto" and model not in settings.models
    allowance = Allowance(link, stats.saved)
    if own is not None and model is not None:

        def questioned(record: Record, cost_microusd: int, outcome: str) -> None:
            metrics.add(m.JUDGE_QUESTIONS, 1, record.team, outcome)
            metrics.add(m.JUDGE_COST, cost_microusd / 1e6, record.team)
            stats.add_question(record.team_id, record.alias, cost_microusd)

        judges = ModelJudges(
            None if is_auto else model, fleet, own, allowance if is_auto else None, own.generations, questioned
        )

    async def regenerate(turn: Turn) -> bytes | None:
        return await own.ask(turn.body) if own is not None else None

    def note(check: Check) -> None:
        stats.add_check(check.record.team_id, check.record.alias, check.is_wrong, check.weight)

    def count(source: Source, ruling: Ruling, judge: str) -> None:
        metrics.add(m.VERDICTS, 1, source.value, ruling.value, judge)

    def compared(one: Judgement, other: Judgement) -> None:
        if Ruling.UNKNOWN not in (one.ruling, other.ruling):
            stats.add_rulings(one.judge, other.judge, RulingCounts(**{f"{one.ruling}_{other.ruling}": 1}))

    judging = Judging(
        exact,
        verdicts,
        OwnJudges(semantic),
        judges,
        regenerate if own is not None else None,
        cache.shadow_share,
        float(cache.feedback_ttl_s),
        random.random,
        note,
        count,
        compared,
    )
    reports = Reports(verdicts, exact, stats, stats.add_report, count)
    learn = judging.recorded if cache.is_semantic else None
    return Learning(
        verdicts=verdicts,
        judging=judging,
        reports=reports,
        truth=truth,
        learn=learn,
        _own=own,
        _stats=stats,
        _metrics=metrics,
        _accounts=accounts,
    )
