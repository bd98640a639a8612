"""Stage 6 of the journey: a semantic hit or the reason for a miss; its error bound; drafts.

Stage 4 may find an entry by a prompt's words: `hit_by_words` says whether it is a hit. The cache
decides which answers are hits, and which a verifier may be asked about. Invariants: a lookup that
fails, or that points at an answer which is gone, is a miss with its reason; the least of all given
error bounds holds, and every hit is charged its risk; words find nothing that the cache worker's
rule would refuse for now; where a verifier only observes, nothing found by meaning is served.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from cache import Controls, Entry, ExactCache, Fingerprint, Hit, Lookup, Miss, MissReason, Query, SemanticClient, Trial
from cache.decision.normal_form import words_key
from cache.decision.pieces import compile_pattern, without
from cache.entry import CacheUnavailable
from cache.exact import Verified
from cache.query import BOUND_MIN, Undecided
from gateway.accounts import Team
from gateway.deployments.alias import Alias
from gateway.journey.flight import Flight
from gateway.journey.outcomes import Looked, SemanticResult
from gateway.journey.storing import answer_text, chunks_of, shows
from gateway.settings import NEAR_SIMILARITY_MIN, Settings
from gateway.transport.eager import Eager
from gateway.wire.fold import fold
from policies.asking import ErrorAccount
from policies.verification import Verification, Verify

_DRAFT_BYTES_MAX = 64 << 10  # reading a longer answer would hold other requests up
_DRAFT_CHARS_MAX = 16 << 10
_CUT_MAX = 1_000
_STORES_AWAITED_S = 0.25  # for an answer that is being stored
OBSERVED = "observed"
"""The miss reason of a hit that is not served, as a verifier only observes."""
_VERIFIED_S = 3_600.0  # after which the rule decides again about a prompt that it found to mean the same
_WORKER = ("cache_worker",)
_DEGRADED = {MissReason.TIMEOUT: _WORKER, MissReason.UNAVAILABLE: _WORKER, MissReason.INDEX: ("vector_engine",)}
_WORDS_P = 0.998  # of a hit by the same words: as sure as the rule can be


@dataclass(frozen=True, slots=True)
class Bound:
    """The error bound of a semantic lookup.

    `untightened` is the bound before the measured error tightened it; None if it did not.
    """

    error_max: float
    untightened: float | None = None


class Bounds:
    """The error bounds of one worker, tightened if the measured error passed them.

    docs/semantic-cache.md, "The bound", has the steps after this one.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # by team and alias, below 1; without an entry: 1. `telemetry.measured_error` updates it
        self.strictness: dict[tuple[int, str], float] = {}

    def error_max(self, team: Team, alias: str, of_request: float | None = None) -> float:
        """The least bound of settings, team, alias and request (`of_request`), before any tightening."""
        model, cache = self._settings.models.get(alias), self._settings.cache
        of_alias = model.semantic_error_max if model is not None else None
        least = cache.error_max
        for bound in (team.semantic_error_max, of_alias, of_request):
            if bound is not None and bound < least:
                least = bound
        return least

    def bound(self, team: Team, alias: str, of_request: float | None) -> Bound:
        """The bound for a request of `team` for `alias`; `of_request` is the request's own bound."""
        error_max = self.error_max(team, alias, of_request)
        strictness = self.strictness.get((team.id, alias))
        return Bound(error_max) if strictness is None else Bound(error_max * strictness, error_max)


class AsksVerifier(Protocol):
    """Asks a verifier whether one of several stored answers is right for a request."""

    async def look(self, flight: Flight, semantic: SemanticResult) -> SemanticResult:
        """What becomes of an undecided lookup: a hit on the verifier's word, or the same miss with
        the question. Never raises but for a cancellation.
        """


@dataclass(eq=False)
class SemanticLookup:
    """Finds answers to prompts in other words. One per worker.

    `clock` gives unix seconds.
    """

    _settings: Settings
    _semantic: SemanticClient
    _exact: ExactCache
    _bounds: Bounds
    clock: Callable[[], float] = time.time
    # by compat: the latest answer on its way to Redis
    _stores: dict[bytes, asyncio.Future[None]] = field(default_factory=dict, init=False)
    _cut: dict[bytes, None] = field(default_factory=dict, init=False)  # compats of the latest answers that a limit cut

    def __post_init__(self) -> None:
        self.errors = ErrorAccount(self._settings.workers)

    def cut(self, compat: bytes) -> None:
        """An answer was not stored, because a limit cut it that is not the request's own."""
        self._cut[compat] = None
        if len(self._cut) > _CUT_MAX:
            del self._cut[next(iter(self._cut))]

    def relaxed(self, looked: Looked, team: Team, alias: Alias) -> Looked:
        """5. `looked` with the context that a semantic lookup compares, or with the reason for no semantic
        lookup, apart from cache controls.
        """
        fingerprint = looked.fingerprint
        if reason := self._why_not(fingerprint, team, alias):
            return msgspec.structs.replace(looked, no_lookup_reason=reason, words_key=None)
        key = looked.words_key
        if key is None and fingerprint.text is not None:
            key = words_key(fingerprint.words, fingerprint.text)
        if (volatile := self._settings.cache.volatile) and fingerprint.context:
            context = without(fingerprint.context, tuple(map(compile_pattern, volatile)))
            fingerprint = msgspec.structs.replace(fingerprint, context=context)
        return msgspec.structs.replace(looked, fingerprint=fingerprint, words_key=key)

    def verification(self, controls: Controls, team: Team, alias: Alias) -> Verification:
        """How a verifier takes part in a request."""
        of_request = None if controls.verify is None else Verify(controls.verify)
        return self._settings.verification(alias.name, team.verify, of_request)

    async def find(self, fingerprint: Fingerprint, controls: Controls, team: Team, alias: Alias) -> SemanticResult:
        """A semantic hit, or the reason for a miss. `relaxed` has no reason against a lookup."""
        if controls.no_cache or fingerprint.text is None:
            return SemanticResult(miss_reason="no-cache")
        storing = self._stores.get(fingerprint.compat)
        if storing is not None:  # an answer that this worker is storing may be the hit
            await asyncio.wait((storing,), timeout=_STORES_AWAITED_S)
        bound = self._bounds.bound(team, alias.name, controls.error_max)
        verification = self.verification(controls, team, alias)
        self._pay(fingerprint, bound.error_max)
        query = Query(
            partition=fingerprint.partition,
            compat=fingerprint.compat,
            text=fingerprint.text,
            error_max=bound.error_max,
            untightened=bound.untightened,
            context=fingerprint.context,
            may_ask=verification.is_asked_first and bound.error_max >= BOUND_MIN,
        )
        result = await self._semantic.lookup(query)
        if not isinstance(result, Hit):
            return self._missed(result, fingerprint, bound)
        is_served = verification.is_served
        stored = await self._exact.lookup_entry(fingerprint, result.exact, controls.max_age_s, is_served=is_served)
        if stored.entry is None:  # the answer is gone: no sample of misses
            reason = stored.miss.value if stored.miss else "gone"
            return SemanticResult(similarity=result.similarity, miss_reason=reason)
        if result.differing and shows(stored.entry, fingerprint, result.differing):
            return SemanticResult(similarity=result.similarity, miss_reason=MissReason.DOCUMENTS.value)
        question = self.shown(fingerprint)
        if not is_served:
            near, would = result.similarity, stored.entry
            return SemanticResult(similarity=near, miss_reason=OBSERVED, question=question, would=would)
        self.errors.charge(fingerprint.compat, 1.0 - result.trial.p if result.trial is not None else 0.0)
        return SemanticResult(stored.entry, result.similarity, bound.error_max, question=question, trial=result.trial)

    def _pay(self, fingerprint: Fingerprint, error_max: float) -> None:
        if self.errors.pay(fingerprint.compat, error_max):
            self._starting = asyncio.ensure_future(self._start(fingerprint, error_max))

    async def _start(self, fingerprint: Fingerprint, error_max: float) -> None:
        """Give a new namespace what it starts with, if no other workers of any host took that before."""
        with contextlib.suppress(CacheUnavailable):
            if await self._exact.count_start(fingerprint) <= self._settings.workers:
                self.errors.start(fingerprint.compat, error_max)

    def _missed(self, result: Miss | Undecided, fingerprint: Fingerprint, bound: Bound) -> SemanticResult:
        undecided = result if isinstance(result, Undecided) else None
        miss = result.miss if isinstance(result, Undecided) else result
        is_cut = miss.reason is MissReason.EMPTY and fingerprint.compat in self._cut
        nearest = miss.nearest
        return SemanticResult(
            similarity=nearest.similarity if nearest is not None else None,
            error_max=bound.error_max,
            miss_reason=(MissReason.CUT if is_cut else miss.reason).value,
            nearest=nearest.text if nearest is not None and self._settings.log_prompts else "",
            trial=miss.trial,
            degraded=_DEGRADED.get(miss.reason, ()),
            undecided=undecided,
        )

    def words_key(self, fingerprint: Fingerprint, controls: Controls, team: Team, alias: Alias) -> bytes | None:
        """The key by which this prompt's words may find another request's answer; None if none may."""
        if fingerprint.text is None or controls.no_cache or self._why_not(fingerprint, team, alias):
            return None
        if not self.verification(controls, team, alias).is_served:
            return None
        bound = self._bounds.bound(team, alias.name, controls.error_max)
        if bound.untightened is not None or bound.error_max < BOUND_MIN:
            return None
        return words_key(fingerprint.words, fingerprint.text)

    def hit_by_words(
        self, fingerprint: Fingerprint, controls: Controls, team: Team, alias: Alias, lookup: Lookup
    ) -> SemanticResult | None:
        """The hit that a pointer from this prompt's words means; None if the cache worker is to decide."""
        entry, verified = lookup.entry, lookup.pointer.verified if lookup.pointer is not None else None
        assert entry is not None
        bound = self._bounds.bound(team, alias.name, controls.error_max)
        verifier = ""
        if verified is None:
            similarity, trial = 1.0, Trial((entry.exact,), b"", _WORDS_P, 1.0, b"")
        else:
            similarity, trial, verifier = verified.similarity, verified.trial, verified.verifier
            is_old = not verifier and self.clock() - verified.at > _VERIFIED_S
            if not verifier:  # the worker, whose inequality counts its own hits, does not see this one
                trial = msgspec.structs.replace(trial, risk=1.0 - trial.p)
            has_room = self.errors.has(fingerprint.compat, trial.risk, bound.error_max)
            if is_old or not has_room or bound.error_max < verified.error_max:
                return None
        self._pay(fingerprint, bound.error_max)
        self.errors.charge(fingerprint.compat, trial.risk)
        self._exact.use(entry)
        question = self.shown(fingerprint)
        return SemanticResult(entry=entry, similarity=similarity, question=question, trial=trial, verified_by=verifier)

    def shown(self, fingerprint: Fingerprint) -> str:
        """The request's own text; empty unless prompts may be logged."""
        return (fingerprint.text or "") if self._settings.log_prompts else ""

    async def point(self, fingerprint: Fingerprint, key: bytes, result: SemanticResult, asked_at: float) -> None:
        """Point this prompt's words to the entry that the cache worker chose; that ends the claim. What a
        verifier was asked about becomes a wording of the entry, unless a purge since `asked_at` was of it.
        """
        entry, text = result.entry, fingerprint.text
        if entry is None or result.trial is None or result.similarity is None:
            return
        trial = msgspec.structs.replace(result.trial, ranked=result.trial.ranked[:1], peers=())
        with contextlib.suppress(CacheUnavailable):  # then the cache worker decides again
            verified = Verified(result.similarity, trial, result.error_max, self.clock(), result.verified_by)
            await self._exact.point(fingerprint, entry, key, verified)
            if result.asking is not None and text is not None:
                wording = entry.worded(fingerprint.exact, text, fingerprint.context)
                await self._exact.store(wording, asked_at=asked_at)

    def begin_draft(self, fingerprint: Fingerprint, result: SemanticResult) -> Eager[Lookup] | None:
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
        return Eager(self._exact.lookup_entry(fingerprint, trial.ranked[0], is_served=False))

    def begin_storing(self, fingerprint: Fingerprint) -> Callable[[], None]:
        """Let lookups that this request's answer may serve wait for it, until the result is called."""
        stored = self._stores[fingerprint.compat] = asyncio.get_running_loop().create_future()

        def end() -> None:
            stored.set_result(None)
            if self._stores.get(fingerprint.compat) is stored:
                del self._stores[fingerprint.compat]

        return end

    def _why_not(self, fingerprint: Fingerprint, team: Team, alias: Alias) -> str:
        """The reason for no semantic lookup, apart from cache controls; empty if there is one."""
        if not (self._settings.cache.is_semantic and alias.settings.is_semantic):
            return "off"
        if not team.is_semantic_enabled:
            return "off_for_team"
        return "not_eligible" if fingerprint.text is None else ""


def draft_of(entry: Entry | None) -> str:
    """The text of the entry's answer, up to a bound; empty if there is none or it is too long."""
    if entry is None or entry.chunks_bytes > _DRAFT_BYTES_MAX:
        return ""
    try:
        whole = fold(chunks_of(entry))
    except msgspec.DecodeError:  # recorded as received, with an error in a part that was not parsed
        return ""
    return (answer_text(whole) or "")[:_DRAFT_CHARS_MAX]
