"""The recorded answers as the pipeline uses them: stage 4 looks for one, 6 waits for one that another
worker is making, 10 stores one.

Knows no vectors, no routes and no money. Invariants: a failure of the cache is a miss, or leaves an
answer unstored, with its reason; a claim to make an entry ends with the entry, or is released.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from msgspec.structs import replace

from cache import CacheUnavailable, Controls, Entry, ExactCache, Fingerprint, Outcome
from cache.eligibility import Refusal, is_cut_as_asked, store_refusal
from cache.entry import ASKED, FRESH_S, TAGS, digest_of, pack_context
from cache.exact import LookupMiss
from cache.moving import moves
from gateway.accounts import Identity
from gateway.deployments.alias import Alias
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.journey.outcomes import Looked, SemanticResult, Spent, Stored
from gateway.journey.queue import ranking
from gateway.journey.rate_limits import LimitHeaders, Limits
from gateway.journey.semantic import SemanticLookup
from gateway.journey.storing import MAKER, lifetime, recorded
from gateway.journey.trace import maker_of
from gateway.journey.turn import Turn
from gateway.loggers import get_logger
from gateway.settings import CacheSettings
from gateway.transport.eager import Eager
from gateway.wire.reader import has_words, lack_of
from gateway.wire.sse import events_in
from gateway.wire.types import RESPONSE, Chunk

_FOLLOW_POLL_S, _FOLLOW_POLL_S_MAX = 0.01, 0.2
PATIENCE_TIMES = 2.0
"""The wait for another worker's answer, as a multiple of the time that it is expected to take."""
_PATIENCE_MS_MAX, _EXPECTED_MS = 20_000.0, 5_000.0
_NO_SEMANTIC = SemanticResult()
_log = get_logger()


class RecordedAnswers:
    """The exact cache of one worker, and what is stored there."""

    def __init__(self, settings: CacheSettings, exact: ExactCache, semantic: SemanticLookup, limits: Limits) -> None:
        self._settings = settings
        self._exact = exact
        self._semantic = semantic
        self._limits = limits

    async def look(
        self, turn: Turn, identity: Identity, alias: Alias, fingerprint: Fingerprint, taken: Eager[LimitHeaders] | None
    ) -> Looked:
        """3 and 4, in one round trip: limits, exact entry, deployment that saw this prefix last.

        `taken`: the headers of rate limits, if the request was counted before. Raises RateLimited.
        """
        controls, is_exact = turn.controls, self._settings.is_exact
        may_look = is_exact and not controls.no_cache
        entry = self._exact.lookup_local(fingerprint, controls.max_age_s) if may_look else None
        taking = taken or self._limits.take(identity)
        is_apart = controls.no_cache and controls.no_store and not alias.is_hinted  # Redis knows nothing that it needs
        if entry is not None or not is_exact or is_apart:
            is_stale = entry is not None and self._exact.is_stale(entry)
            return Looked(fingerprint, await taking, entry, is_stale=is_stale)
        team = identity.team
        claims = may_be_awaited(controls) if may_look and controls.max_age_s != 0 else None
        key = self._semantic.words_key(fingerprint, controls, team, alias) if claims is not None else None
        lookup = await self._exact.lookup_shared(
            fingerprint, controls.max_age_s, wants_warm=alias.is_hinted, claims=claims, words_key=key
        )
        try:
            headers = await taking
        except BaseException:  # refused, or the client has left
            if lookup.is_claimed:
                await self.release(fingerprint)
            raise
        warm, semantic, entry = dict[str, int](), _NO_SEMANTIC, lookup.entry if may_look else None
        if lookup.warm:
            warm[lookup.warm] = turn.demand.prompt_tokens * lookup.warm_depth // len(fingerprint.chain)
        if lookup.pointer is not None:
            semantic = self._semantic.hit_by_words(fingerprint, controls, team, alias, lookup) or _NO_SEMANTIC
            entry = semantic.entry
        return Looked(
            fingerprint=fingerprint,
            limit_headers=headers,
            entry=entry,
            is_stale=entry is not None and self._exact.is_stale(entry),
            semantic=semantic,
            words_key=key,
            warm=warm,
            degraded=("redis",) if lookup.miss is LookupMiss.UNAVAILABLE else (),
            is_claimed=lookup.is_claimed,
            claimed_for_ms=lookup.elsewhere_ms,
        )

    async def release(self, fingerprint: Fingerprint) -> None:
        """End the claim to make an entry that does not come."""
        try:
            await self._exact.release(fingerprint)
        except CacheUnavailable as error:
            _log.info("claim_left_to_its_lease", entry=fingerprint.id, reason=str(error))

    async def await_other_worker(self, flight: Flight) -> None:
        """6. Wait for the answer that another worker is making; it is the outcome's once it is stored.

        No answer comes, and this worker makes it, if that worker ends without storing it and no
        other has begun to make it, if two have so ended, or after `_patience_s`.
        """
        generation = flight.generation
        fingerprint, controls = generation.looked.fingerprint, generation.turn.controls
        age_ms, unstored, pause_s = generation.looked.claimed_for_ms or 0.0, 0, _FOLLOW_POLL_S
        until = time.perf_counter() + _patience_s(flight)
        while (left_s := until - time.perf_counter()) > 0:
            try:
                await asyncio.sleep(min(pause_s, left_s))
            finally:
                generation.looked = replace(generation.looked, awaited_until=time.perf_counter())
            pause_s = min(1.5 * pause_s, _FOLLOW_POLL_S_MAX)
            lookup = await self._exact.lookup_shared(
                fingerprint, controls.max_age_s, wants_warm=False, claims=may_be_awaited(controls)
            )
            is_claimed = generation.looked.is_claimed or lookup.is_claimed
            generation.looked = replace(generation.looked, is_claimed=is_claimed, entry=lookup.entry)
            unstored += lookup.elsewhere_ms is not None and lookup.elsewhere_ms < age_ms
            if lookup.entry is not None or lookup.elsewhere_ms is None or unstored > 1:
                return
            age_ms = lookup.elsewhere_ms

    def store_local(self, flight: Flight, spent: Spent) -> Stored:
        """10. Store the answer in this worker's memory, if it is eligible, before its reader has all of it.

        Returns the entry for `store_shared`, or the reason against it.
        """
        generation, cache = flight.generation, self._settings
        looked, answered = generation.looked, generation.answered
        is_refused = answered.progress.is_complete and not flight.chunks  # by a guard
        if is_refused or not answered.progress.has_begun:
            return Stored(spent)
        is_findable = not looked.no_lookup_reason
        outcome = _outcome_of(generation, is_servable=cache.is_exact or is_findable)
        ttl_s, stale_s = lifetime(generation.turn.controls.ttl_s, generation.alias.settings, cache)
        if moves(looked.fingerprint.text or ""):
            outcome = replace(outcome, moves=not cache.moving_ttl_s)
            ttl_s, stale_s = min(ttl_s, cache.moving_ttl_s), 0
        ttl_s = generation.identity.team.kept_s(ttl_s)
        stale_s = generation.identity.team.kept_s(ttl_s + stale_s) - ttl_s
        refusal = store_refusal(outcome, generation.turn.controls, cache.entry_bytes_max)
        if refusal is Refusal.TRUNCATED:
            self._semantic.cut(looked.fingerprint.compat)
        if refusal is not None:
            return Stored(spent, None, refusal.value)
        entry = _entry_of(flight, spent, ttl_s, stale_s, is_findable=is_findable)
        if self._exact.purges.reach(entry, generation.turn.arrival.at_s):
            return Stored(spent, None, Refusal.PURGED.value)
        self._exact.store_local(entry)
        return Stored(spent, entry, "stored")

    def store_shared(self, generation: Generation) -> list[Coroutine[Any, Any, None]]:
        """10. Store in Redis the entry, the deployment that has this prefix warm now, and the pointer
        from the prompt's words to a semantic hit; release a claim without an entry. The caller
        awaits all together.
        """
        looked, is_kept = generation.looked, self._settings.is_exact and not generation.turn.controls.no_store
        works = [self._store(generation)]
        if looked.semantic.entry is not None and looked.words_key is not None and is_kept:
            # before the claim is released
            asked_at = generation.turn.arrival.at_s
            works.insert(0, self._semantic.point(looked.fingerprint, looked.words_key, looked.semantic, asked_at))
        return works

    async def _store(self, generation: Generation) -> None:
        looked, stored, asked_at = generation.looked, generation.stored, generation.turn.arrival.at_s
        fingerprint, entry, is_claimed = looked.fingerprint, stored.entry, looked.is_claimed
        is_hinted = generation.alias.is_hinted and self._settings.is_exact  # else no lookup asks for hints
        deployment = generation.deployment if is_hinted else None
        try:
            if entry is not None:
                words = looked.words_key if entry.text is not None else None
                result = await self._exact.store(entry, deployment, fingerprint.chain, words, asked_at)
                if result.refusal is not None:
                    generation.stored = replace(stored, outcome=result.refusal.value)
                is_claimed = is_claimed and result.refusal is not None
            elif generation.answered.progress.has_begun and deployment is not None:
                await self._exact.store_warm(fingerprint, deployment)
                is_claimed = False
        except CacheUnavailable:
            generation.stored = replace(stored, outcome=Refusal.UNAVAILABLE.value)
        finally:
            if is_claimed:
                await self.release(fingerprint)


def may_be_awaited(controls: Controls) -> bool:
    """Whether other requests may wait for the answer to one with these controls."""
    return not (controls.no_store or controls.only_if_cached)


def _patience_s(flight: Flight) -> float:
    """How long to wait for the answer that another worker is making, in seconds.

    Twice the time that the first choice is expected to take, less the time that passed, and no
    longer than leaves it that time before the latest deadline.
    """
    ranked, remaining_ms = ranking(flight).ranked, flight.remaining_ms()
    expected_ms = ranked[0].total_ms if ranked else _EXPECTED_MS
    passed_ms = flight.generation.looked.claimed_for_ms or 0.0
    patience_ms = min(PATIENCE_TIMES * expected_ms, _PATIENCE_MS_MAX) - passed_ms
    return (patience_ms if remaining_ms is None else min(patience_ms, remaining_ms - expected_ms)) / 1000.0


def _outcome_of(generation: Generation, *, is_servable: bool) -> Outcome:
    """What decides whether an answer is stored. `is_servable`: some lookup could find it."""
    turn, answered = generation.turn, generation.answered
    progress, model = answered.progress, answered.tries[-1].deployment.model
    return Outcome(
        is_complete=progress.is_complete,
        finish_reasons=tuple(progress.finish_reasons),
        # another model than that of the first choice answered
        is_fallback=answered.serving is not generation.alias or answered.first_choice_model not in ("", model),
        is_servable=is_servable,
        is_rescued=bool(answered.seams),
        size_bytes=progress.size_bytes,
        lack=None if has_words(progress.chunks) else _lack(generation),
        is_length_asked=generation.holds.cut_at is None
        and (turn.kind.output_tokens_default is not None or (answered.is_cut and _ends_as_asked(generation))),
    )


def _lack(generation: Generation) -> Refusal | None:
    """Why an answer says nothing that is worth keeping; None if it says something."""
    progress, kind = generation.answered.progress, generation.turn.kind
    if kind.is_plain and kind is not RESPONSE:
        return None if progress.has_content else Refusal.EMPTY
    chunks = progress.chunks
    if kind is RESPONSE:
        data = b"".join([chunk.data for chunk in chunks])
        chunks = [Chunk((events_in(data) or [data])[-1], has_content=True)]  # the last event has all of it
    return Refusal(lack) if (lack := lack_of(chunks)) else None


def _ends_as_asked(generation: Generation) -> bool:
    """Whether a chat's answer was cut exactly at the limit of its body, by the deployment's count.

    A body whose two names of the limit differ has no known limit.
    """
    progress, body = generation.answered.progress, generation.turn.body
    limits = {body.get(name) for name in ("max_tokens", "max_completion_tokens")} - {None}
    limit, usage = limits.pop() if len(limits) == 1 else None, progress.usage
    tokens = usage.completion_tokens if usage is not None else None
    return is_cut_as_asked(progress.finish_reasons, generation.answered.demand.choices, limit, tokens)


def _entry_of(flight: Flight, spent: Spent, fresh_s: int, stale_s: int, *, is_findable: bool) -> Entry:
    """The entry that records an answer.

    Without `is_findable` the entry's text is None, so it is never embedded; a label has its digest,
    for purges.
    """
    generation = flight.generation
    pieces, more_labels = recorded(flight.chunks)
    fingerprint, controls = generation.looked.fingerprint, generation.turn.controls
    progress = generation.answered.progress
    duration_ms = int(progress.attempt.duration_ms if progress.attempt is not None else 0)
    labels: dict[str, str | int | None] = {
        "model": generation.alias.name,
        "deployment": progress.deployment,
        "cost_microusd": spent.answer_microusd,
        "prompt_tokens": spent.usage.prompt_tokens,
        "completion_tokens": spent.usage.completion_tokens,
        "duration_ms": duration_ms,
        **more_labels,
        "baseline_microusd": spent.answer_baseline_microusd,
        MAKER: maker_of(generation.turn.arrival.trace) or None,
        FRESH_S: fresh_s if stale_s else None,
        TAGS: "\n".join(controls.tags) or None,
        ASKED: None if is_findable or fingerprint.text is None else digest_of(fingerprint.text),
    }
    return Entry(
        partition=fingerprint.partition,
        exact=fingerprint.exact,
        compat=fingerprint.compat,
        text=fingerprint.text if is_findable else None,
        context=pack_context(fingerprint.context) if is_findable else b"",
        chunks=pieces,
        created_at=time.time(),
        ttl_s=float(fresh_s + stale_s),
        namespace=controls.namespace,
        labels={name: label for name, label in labels.items() if label is not None},
        # a second of waiting counts as a tenth of a cent
        saves=spent.answer_microusd + duration_ms,
    )
