"""Stage 6 of the journey: an answer that was found by meaning, or the reason why there is none.

Knows what a lookup by meaning needs to be told and what its reply means for a job, and nothing of how a hit is decided.
Invariant: a lookup that fails, or that points at an answer which is gone, is a miss with its reason.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from cache import ExactCache, Fingerprint, HitKind, Miss, MissReason, Query, SemanticClient
from gateway.accounts.teams import Team
from gateway.journey.generation import Job
from gateway.journey.storing import chunks_of
from gateway.settings import Settings

_STORES_AWAITED_S = 0.25


@dataclass(frozen=True, slots=True)
class Bound:
    """What a lookup by meaning must keep to. `untightened` is what it was before it tightened itself; None where it did not."""

    error_max: float
    untightened: float | None = None


def error_max_of(settings: Settings, team: Team, alias: str, asked: float | None = None) -> float:
    """The least of all bounds that are given."""
    model = settings.models.get(alias)
    of_alias = model.semantic_error_max if model is not None else None
    given = (settings.cache.error_max, team.semantic_error_max, of_alias, asked)
    return min(bound for bound in given if bound is not None)


class Bounds:
    """The error bounds of one worker, tightened where the measured error passed them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.strictness: dict[tuple[int, str], float] = {}  # by team and alias, below 1; without an entry: 1

    def error_max(self, team: Team, alias: str, asked: float | None = None) -> float:
        """The least of all bounds that are given."""
        return error_max_of(self._settings, team, alias, asked)

    def bound(self, team: Team, alias: str, asked: float | None) -> Bound:
        """The bound for a request of a team for an alias."""
        error_max = self.error_max(team, alias, asked)
        strictness = self.strictness.get((team.id, alias))
        return Bound(error_max) if strictness is None else Bound(error_max * strictness, error_max)


class ByMeaning:
    """Finds answers that were given to other words of the same meaning. One per worker."""

    def __init__(self, settings: Settings, semantic: SemanticClient, exact: ExactCache, bounds: Bounds) -> None:
        self._settings = settings
        self._semantic = semantic
        self._exact = exact
        self._bounds = bounds
        self._stores: dict[bytes, asyncio.Future[None]] = {}  # by compat: the latest answer on its way to Redis

    async def find(self, job: Job) -> bool:
        """Replay a verified semantic hit into the job's flight; anything else is a miss with its reason in the record."""
        record, controls = job.turn.record, job.turn.controls
        found, text = job.fingerprint, job.fingerprint.text
        reason = self._why_not(job)
        if reason or text is None:
            record.miss_reason = reason
            return False
        storing = self._stores.get(found.compat)
        if storing is not None:  # what this worker is storing right now may be what is asked for
            await asyncio.wait((storing,), timeout=_STORES_AWAITED_S)
        bound = self._bounds.bound(job.identity.team, job.alias.name, controls.error_max)
        result = await self._semantic.lookup(
            Query(found.partition, found.compat, text, bound.error_max, bound.untightened)
        )
        job.trial = result.trial
        if isinstance(result, Miss):
            record.miss_reason = result.reason.value
            if result.reason in (MissReason.TIMEOUT, MissReason.UNAVAILABLE):
                record.survived += ("cache_worker",)
            if result.nearest is not None:
                record.similarity = result.nearest.similarity
                record.nearest = result.nearest.text if self._settings.log_prompts else ""
            return False
        record.similarity = result.similarity
        pointed = await self._exact.lookup_entry(found, result.exact, controls.max_age_s)
        if pointed.entry is None:
            record.miss_reason = pointed.miss.value if pointed.miss else "gone"
            job.trial = None  # a would-be hit with nothing to serve: no sample of misses or audits
            return False
        entry = pointed.entry
        facts = job.facts
        facts.kind, facts.similarity, facts.entry = HitKind.SEMANTIC, result.similarity, entry
        facts.deployment = str(entry.labels.get("deployment", ""))
        record.cache, record.deployment, record.entry = "semantic", facts.deployment, entry.id
        job.flight.extend(chunks_of(entry))
        return True

    def may_find(self, job: Job) -> bool:
        """Whether others may be answered by meaning with what this job generates."""
        return self._why_not(job) in ("", "no-cache")

    @contextlib.contextmanager
    def storing(self, fingerprint: Fingerprint) -> Iterator[None]:
        """While the answer to this request is on its way to Redis, lookups that it may answer wait for it a little."""
        stored = self._stores[fingerprint.compat] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            stored.set_result(None)
            if self._stores.get(fingerprint.compat) is stored:
                del self._stores[fingerprint.compat]

    def _why_not(self, job: Job) -> str:
        """Why a lookup by meaning is not even tried; empty where it is."""
        if not (self._settings.cache.is_semantic and job.alias.settings.is_semantic):
            return "off"
        if not job.identity.team.is_semantic_enabled:
            return "off_for_team"
        if job.fingerprint.text is None:
            return "not_eligible"
        return "no-cache" if job.turn.controls.no_cache else ""
