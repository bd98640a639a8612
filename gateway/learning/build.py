"""The parts that make the semantic cache learn, put together: who judges, who is heard, what is
measured and what follows.

Knows how they fit and nothing of what they do. Invariant: a worker without any of it serves
from the exact cache, and by meaning what is certain; it never serves more.
"""

import contextlib
import random
import time
from dataclasses import KW_ONLY, dataclass
from typing import Self

from redis.exceptions import RedisError

from cache import ExactCache, SemanticClient
from cache.redis_link import RedisLink
from cache.verdicts import VerdictStore
from gateway.accounts import Team
from gateway.accounts.accounts import Accounts
from gateway.deployments.fleet import Fleet
from gateway.journey.flight import Flight
from gateway.journey.record import Record
from gateway.journey.semantic import Bounds
from gateway.learning.checks import Checks
from gateway.learning.comparisons import Findings, Judging
from gateway.learning.internal_requests import InternalRequests
from gateway.learning.own_judges import OwnJudges
from gateway.learning.reports import Reports
from gateway.learning.spending import Spending
from gateway.learning.verifiers import Verifiers
from gateway.loggers import get_logger
from gateway.pipeline import Learn, Pipeline
from gateway.settings import CacheSettings, Settings
from gateway.telemetry import metric_names as m
from gateway.telemetry.measured_error import Certificates, MeasuredErrors
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats

_log = get_logger()


@dataclass(eq=False)
class Learning:
    """The learning parts of a worker. The gateway's own requests are refused until `connect`."""

    settings: Settings
    accounts: Accounts
    exact: ExactCache
    semantic: SemanticClient
    link: RedisLink
    stats: Stats
    _: KW_ONLY
    metrics: Metrics
    fleet: Fleet

    def __post_init__(self) -> None:
        cache, findings = self.settings.cache, Findings(self.stats, self.metrics)
        self.verdicts = VerdictStore(self.link)
        self.truth = MeasuredErrors(Bounds(self.settings), cache.judge_error_max)
        self.certificates = Certificates(self.link, self.stats, self.truth.bounds, _judges(cache), time.time)
        self._requests, self._spending = InternalRequests(), Spending(self.stats, cache.verify_share)
        self.verifiers = Verifiers(
            settings=self.settings,
            fleet=self.fleet,
            accounts=self.accounts,
            exact=self.exact,
            verdicts=self.verdicts,
            requests=self._requests,
            spending=self._spending,
            note=self._note_question,
            count=findings.count,
        )
        self.checks = Checks(cache.check_share, self._requests, random.random)
        self.judging = Judging(
            exact=self.exact,
            verdicts=self.verdicts,
            judges=OwnJudges(self.semantic),
            fallback=self.verifiers,
            reply_ttl_s=float(cache.feedback_ttl_s),
            findings=findings,
            checks=self.checks,
            defer=self.link.defer,
        )
        self.reports = Reports(self.verdicts, self.exact, self.stats, findings.count)

    def _note_question(self, payer: Team, alias: str, cost_microusd: int, outcome: str) -> None:
        self.metrics.add(m.VERIFIER_QUESTIONS, 1, payer.name, alias, outcome)
        self.metrics.add(m.VERIFIER_COST, cost_microusd / 1e6, payer.name, alias)
        self.stats.add_question(payer.id, alias, cost_microusd)

    async def opened(self) -> Self:
        """Itself, once it has read the certificates, so that this worker counts for them."""
        with contextlib.suppress(RedisError):  # without Redis nothing is served by meaning
            await self.certificates.recall()
        return self

    def connect(self, pipeline: Pipeline) -> None:
        """Send the gateway's own requests to `pipeline`: checks, and questions about its undecided lookups."""
        self._requests.connect(pipeline)
        self.verifiers.connect(pipeline)

    @property
    def learn(self) -> Learn | None:
        """Takes each flight that is over; None where the cache is exact only."""
        return self._recorded if self.settings.cache.is_semantic else None

    def _recorded(self, flight: Flight, record: Record) -> None:
        self.judging.recorded(flight, record)
        self.verifiers.recorded(flight.generation)

    def take(self, cache: CacheSettings) -> None:
        """Go on with other settings."""
        self.truth.judge_error, self.checks.share = cache.judge_error_max, cache.check_share
        self._spending.share, self.judging.reply_ttl_s = cache.verify_share, float(cache.feedback_ttl_s)
        self.certificates.judges = _judges(cache)

    async def stop(self) -> None:
        """Begin no more checks, and end the gateway's own requests, for which no client waits any more."""
        await self.checks.aclose()
        await self._requests.aclose()
        await self.verifiers.aclose()

    async def aclose(self) -> None:
        """Finish what runs; drop what waits."""
        await self.judging.aclose()
        await self.verifiers.aclose()

    async def look(self) -> None:
        """Measure, and tighten or relax bounds. Raises redis.exceptions.RedisError,
        SQLAlchemyError.
        """
        if self.verifiers.is_named:
            await self._spending.read()
        teams, status = await self.accounts.list_teams(), self.semantic.status
        certificates = await self.certificates.update(teams, status.embedder if status.rule else "", status.rule)
        for live in self.truth.update(await self.stats.hours(), teams, certificates):
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
                    self.metrics.set(m.SEMANTIC_ERROR, measured.estimate, *labels)
                self.metrics.set(m.SEMANTIC_ERROR_LOW, measured.low, *labels)
                self.metrics.set(m.SEMANTIC_ERROR_HIGH, measured.high, *labels)
                self.metrics.set(m.SEMANTIC_BOUND, certificate.start.basis.error_max, *labels)
                strictness = self.truth.bounds.strictness.get((team_id, alias), 1.0)
                self.metrics.set(m.SEMANTIC_STRICTNESS, strictness, *labels)


def _judges(cache: CacheSettings) -> str:
    return OwnJudges.names if cache.verifier is None else f"{OwnJudges.names}, {cache.verifier}"
