"""Stage 6 of the journey: a semantic hit or the reason for a miss; its error bound; drafts.

The cache decides which answers are hits. Invariants: a lookup that fails, or that points at an
answer which is gone, is a miss with its reason; the least of all given error bounds holds.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cache import Controls, Entry, ExactCache, Fingerprint, Lookup, Miss, MissReason, Query, SemanticClient, Trial
from cache.context.relax import relaxed
from cache.context.volatile import compile_pattern
from gateway.accounts import Team
from gateway.deployments.alias import Alias
from gateway.journey.storing import answer_text, chunks_of
from gateway.settings import NEAR_SIMILARITY_MIN, Settings
from gateway.transport.eager import Eager
from gateway.wire.fold import fold

_DRAFT_BYTES_MAX = 64 << 10  # reading a longer answer would hold other requests up
_DRAFT_CHARS_MAX = 16 << 10


@dataclass(frozen=True, slots=True)
class Bound:
    """The error bound of a semantic lookup.

    `untightened` is the bound before the measured error tightened it; None if it did not.
    """

    error_max: float
    untightened: float | None = None


class Bounds:
    """The error bounds of one worker, tightened if the measured error passed them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # by team and alias, below 1; without an entry: 1. `telemetry.measured_error` updates it
        self.strictness: dict[tuple[int, str], float] = {}

    def error_max(self, team: Team, alias: str, asked: float | None = None) -> float:
        """The least bound of settings, team, alias and request (`asked`), before any tightening."""
        model, cache = self._settings.models.get(alias), self._settings.cache
        of_alias = model.semantic_error_max if model is not None else None
        given = (cache.error_max, team.semantic_error_max, of_alias, asked)
        return min(bound for bound in given if bound is not None)

    def bound(self, team: Team, alias: str, asked: float | None) -> Bound:
        """The bound for a request of `team` for `alias`; `asked` is the request's own bound."""
        error_max = self.error_max(team, alias, asked)
        strictness = self.strictness.get((team.id, alias))
        return Bound(error_max) if strictness is None else Bound(error_max * strictness, error_max)


class AuditDraw(msgspec.Struct, frozen=True):
    """A would-be hit that is generated instead: its chance to be compared, and the certificate that
    it counts for.
    """

    chance: float
    certificate: str


class SemanticResult(msgspec.Struct, frozen=True):
    """The outcome of stage 6: the `entry` that is served, or the reason why there is none."""

    entry: Entry | None = None
    similarity: float | None = None  # of the hit, or of the nearest entry that is not served
    miss_reason: str = ""
    nearest: str = ""  # the nearest entry's text; empty unless prompts may be logged
    question: str = ""  # the request's own text, of a hit; empty unless prompts may be logged
    trial: Trial | None = None  # the decision's features, for the verdict that may follow
    degraded: tuple[str, ...] = ()  # parts that failed and that the request did without
    audit: AuditDraw | None = None  # of a would-be hit that is generated instead


class SemanticLookup:
    """Finds answers to prompts in other words. One per worker.

    `audited` gets the team, the alias and the trial of each audit when it is drawn.
    `stores_awaited_s` is how long a lookup waits for an answer that is being stored.
    """

    def __init__(
        self,
        settings: Settings,
        semantic: SemanticClient,
        exact: ExactCache,
        bounds: Bounds,
        audited: Callable[[int, str, Trial], AuditDraw] | None = None,
        stores_awaited_s: float = 0.25,
    ) -> None:
        self._settings = settings
        self._semantic = semantic
        self._exact = exact
        self._bounds = bounds
        self._audited = audited
        self._stores_awaited_s = stores_awaited_s
        self._volatile = tuple(map(compile_pattern, settings.cache.volatile))
        # by compat: the latest answer on its way to Redis
        self._stores: dict[bytes, asyncio.Future[None]] = {}

    def relaxed(self, found: Fingerprint, body: Mapping[str, Any], team: Team, alias: Alias) -> Fingerprint:
        """The fingerprint of a request with what its last text does not rely on left out of its compat."""
        if self._why_not(found, team, alias):
            return found
        return relaxed(found, body, self._settings.cache.key_fields, self._volatile)

    async def find(self, found: Fingerprint, controls: Controls, team: Team, alias: Alias) -> SemanticResult:
        """A verified semantic hit, or the reason for a miss."""
        reason = self._why_not(found, team, alias) or ("no-cache" if controls.no_cache else "")
        if reason or found.text is None:
            return SemanticResult(miss_reason=reason)
        storing = self._stores.get(found.compat)
        if storing is not None:  # an answer that this worker is storing may be the hit
            await asyncio.wait((storing,), timeout=self._stores_awaited_s)
        bound = self._bounds.bound(team, alias.name, controls.error_max)
        query = Query(found.partition, found.compat, found.text, bound.error_max, bound.untightened)
        result = await self._semantic.lookup(query)
        if isinstance(result, Miss):
            nearest, is_away = result.nearest, result.reason in (MissReason.TIMEOUT, MissReason.UNAVAILABLE)
            audit = None
            if result.reason is MissReason.AUDIT and result.trial is not None and self._audited is not None:
                audit = self._audited(team.id, alias.name, result.trial)
            return SemanticResult(
                similarity=nearest.similarity if nearest is not None else None,
                # another date, user or history is all that may keep an answer from it
                miss_reason=(result.reason is MissReason.EMPTY and found.kept) or result.reason.value,
                nearest=nearest.text if nearest is not None and self._settings.log_prompts else "",
                trial=result.trial,
                degraded=("cache_worker",) if is_away else (),
                audit=audit,
            )
        pointed = await self._exact.lookup_entry(found, result.exact, controls.max_age_s)
        if pointed.entry is None:  # the answer is gone: no sample of misses or audits
            reason = pointed.miss.value if pointed.miss else "gone"
            return SemanticResult(similarity=result.similarity, miss_reason=reason)
        return SemanticResult(
            entry=pointed.entry,
            similarity=result.similarity,
            question=found.text if self._settings.log_prompts else "",
            trial=result.trial,
        )

    def is_findable(self, found: Fingerprint, team: Team, alias: Alias) -> bool:
        """Whether a semantic lookup may find the answer to this request."""
        return not self._why_not(found, team, alias)

    def begin_draft(self, found: Fingerprint, result: SemanticResult) -> Eager[Lookup] | None:
        """Begin to read the answer to the nearest cached prompt, as a local engine's draft.

        Returns None if no prompt is near enough. The engine verifies each guess from the draft, so
        a draft changes the number of steps and never the answer. It is of the request's own
        partition and compat, as a hit is. A draft does not count as a use of the entry, and does
        not delay its eviction.
        """
        trial, similarity = result.trial, result.similarity
        if trial is None or not trial.ranked or similarity is None or similarity < NEAR_SIMILARITY_MIN:
            return None
        # decision: near-answer-drafts
        return Eager(self._exact.lookup_entry(found, trial.ranked[0], is_served=False))

    @contextlib.contextmanager
    def storing(self, fingerprint: Fingerprint) -> Iterator[None]:
        """Let lookups that this request's answer may serve wait while it is being stored."""
        stored = self._stores[fingerprint.compat] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            stored.set_result(None)
            if self._stores.get(fingerprint.compat) is stored:
                del self._stores[fingerprint.compat]

    def _why_not(self, found: Fingerprint, team: Team, alias: Alias) -> str:
        """The reason for no semantic lookup, apart from cache controls; empty if there is one."""
        if not (self._settings.cache.is_semantic and alias.settings.is_semantic):
            return "off"
        if not team.is_semantic_enabled:
            return "off_for_team"
        return "not_eligible" if found.text is None else ""


def draft_of(entry: Entry | None) -> str:
    """The text of the entry's answer, up to a bound; empty if there is none or it is too long."""
    if entry is None or entry.chunks_bytes > _DRAFT_BYTES_MAX:
        return ""
    try:
        whole = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as received, with an error in a part that was not parsed
        return ""
    return (answer_text(whole) or "")[:_DRAFT_CHARS_MAX]
