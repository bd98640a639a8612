"""Makes the record of a finished request from the outcomes of its stages, once, on every exit."""

import time
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Any

import msgspec
from msgspec.structs import replace

from cache import Entry, Fingerprint
from gateway.accounts import Identity
from gateway.backends.refusals import without_quotes
from gateway.journey.flight import Flight, Reply
from gateway.journey.generation import Generation
from gateway.journey.loops import LOOPS
from gateway.journey.masks import odd_placeholders
from gateway.journey.needs import booked_labels
from gateway.journey.outcomes import Hedged, MoneyFacts, Rejection, SemanticResult
from gateway.journey.record import AnswerFacts, CacheFacts, Record, RequestFacts, Times, VerifierFacts
from gateway.journey.storing import MAKER, chunks_of, deployment_of, kept
from gateway.journey.trace import Trace, maker_of
from gateway.journey.turn import Arrival, Ended, Turn
from gateway.wire.errors import ApiError, BadRequest, shown
from gateway.wire.texts import texts_in
from gateway.wire.types import Chunk
from policies import Usage

_UNTRACED = Trace()
_GONE = "client_gone"  # the code of a generation that was cancelled because its last reader left


def ended_with(error: ApiError | None, leader: Ended) -> Ended:
    """The end of the request that led a flight: the generation's `error`, else its reply's end."""
    if error is None:
        return leader
    if error.error_code == _GONE:
        return leader if leader.error else Ended(499, _GONE, is_disconnected=True)
    return Ended(error.http_status, error.error_code or error.type, error.own_words, leader.is_disconnected)


def record_of(
    arrival: Arrival,
    ended: Ended,
    duration_ms: float,
    *,
    identity: Identity | None = None,
    turn: Turn | None = None,
    alias: str = "",
    model: str = "",
    source: str = "miss",
    reply: Reply | None = None,
    flight: Flight | None = None,
) -> Record:
    """The record of a finished request.

    `duration_ms` is from its arrival to its end. `alias` is a configured name or empty; `model` is
    the name that was asked for, recorded where it is another. `flight` is for a request that led one; `reply` is for any
    other request that got a reply. `source` is for requests without a generation.
    """
    looked = flight.generation.looked if flight is not None else reply.looked if reply is not None else None
    vault = turn.vault if turn is not None else None
    changed, unknown = odd_placeholders(vault, _chunks_of(flight, reply)) if vault is not None else (0, 0)
    labels: dict[str, Any] = booked_labels(turn, identity) if turn is not None and identity is not None else {}
    trace = arrival.trace or _UNTRACED
    request = RequestFacts(
        id=arrival.request_id,
        at_s=arrival.at_s,
        batch=arrival.batch,
        operation=arrival.operation,
        team_id=identity.team.id if identity is not None else 0,
        team=identity.team.name if identity is not None else "",
        key_id=identity.key.id if identity is not None else 0,
        key=identity.key.name if identity is not None else "",
        alias=alias,
        model=shown(model) if model != alias else "",
        is_stream=turn is not None and turn.is_stream,
        loop=ended.error if ended.error in LOOPS else looked.loop if looked is not None else "",
        masked=len(vault) if vault is not None else 0,
        changed=changed,
        unknown=unknown,
        trace_id=trace.id,
        span_id=trace.span_id,
        parent_span_id=trace.parent_id,
        trace_flags=int(trace.is_sampled),
        **labels,
    )
    if flight is not None:
        record = Record(request, ended, *_of_flight(flight, duration_ms))
    elif reply is not None:
        record = Record(request, ended, *_of_reply(reply, duration_ms))
    else:
        record = Record(request, ended, CacheFacts(source), times=Times(None, duration_ms))
    if identity is not None and identity.team.store_s_max is not None:  # the latest requests stay for longer
        record = replace(record, cache=replace(record.cache, nearest="", question=""))
    if turn is None:
        return record
    record = _without_quotes(record, turn)
    received_ms = (turn.started - time.perf_counter() + time.time() - arrival.at_s) * 1000.0
    return (
        replace(record, times=replace(record.times, received_ms=round(received_ms, 3)))
        if received_ms >= 1.0
        else record
    )


def _without_quotes(record: Record, turn: Turn) -> Record:
    """`record` without what servers said in the request's own words: records have no texts."""
    attempts, ended = record.answer.attempts, record.ended
    refusal = ended.refusal if ended.error.startswith("upstream") else ""
    if not refusal and all(attempt.verdict in ("ok", "cancelled") for attempt in attempts):
        return record
    texts = [refusal, *[attempt.outcome for attempt in attempts if attempt.verdict not in ("ok", "cancelled")]]
    if turn.demand.prompt_tokens_max <= 1 << 20:  # bytes, which take 10 ms
        with suppress(BadRequest):  # too deep, or too long, to be read here: all words may quote it
            texts = [*texts_in([turn.body, None if turn.native is None else msgspec.json.decode(turn.native.raw)])]
    attempts = tuple([replace(attempt, outcome=without_quotes(attempt.outcome, texts)) for attempt in attempts])
    ended = replace(ended, refusal=without_quotes(refusal, texts) or ended.refusal)
    return replace(record, ended=ended, answer=replace(record.answer, attempts=attempts))


def _chunks_of(flight: Flight | None, reply: Reply | None) -> Sequence[Chunk]:
    """The answer of a request, as far as it came."""
    if flight is None and reply is not None:
        flight = reply.flight
    if flight is not None:
        return flight.chunks
    entry = None if reply is None else reply.served
    return () if entry is None else chunks_of(entry)


_Facts = tuple[CacheFacts, VerifierFacts, AnswerFacts, Usage, MoneyFacts, Times]
_UNVERIFIED = VerifierFacts()


def _of_flight(flight: Flight, duration_ms: float) -> _Facts:
    """The facts of the request that led a flight."""
    generation, looked, stored = flight.generation, flight.generation.looked, flight.generation.stored
    semantic, entry = looked.semantic, looked.entry or stored.entry
    awaited, awaited_ms = _awaited(generation, generation.turn)
    cache = CacheFacts(
        source=generation.source,
        similarity=semantic.similarity,
        miss_reason=semantic.miss_reason,
        nearest=semantic.nearest,
        question=semantic.question,
        awaited=awaited,
        awaited_ms=awaited_ms,
        store=stored.outcome,
        entry=entry.id if entry is not None else "",
        made_in=_maker(looked.entry),
        prompt_id=_prompt_id(looked.fingerprint) if looked.entry is None else "",
        kept=kept(looked.entry),
        degraded=looked.degraded,
    )
    answer = _answer_of(generation)
    verified = _verified(semantic)
    if looked.entry is not None:
        usage, money, times = _replayed(looked.entry, duration_ms, duration_ms)
    else:
        ttft_ms = None if flight.first_at is None else (flight.first_at - generation.turn.started) * 1000.0
        usage, money, times = stored.spent.usage, stored.spent.money, Times(ttft_ms, duration_ms)
    stages = {name: round(took, 3) for name in _STAGES if (took := getattr(generation, name))}
    return cache, verified, answer, usage, money, replace(times, **stages)


_STAGES = ("exact_ms", "semantic_ms", "reserve_ms", "record_ms")


def _verified(semantic: SemanticResult) -> VerifierFacts:
    """What a verifier said, and which answer would be served where it only observes."""
    asking, would = semantic.asking, semantic.would
    if asking is None:
        if would is None and not semantic.verified_by:
            return _UNVERIFIED
        facts = VerifierFacts(semantic.verified_by, "remembered" if semantic.verified_by else "")
    else:
        would = asking.entry if semantic.entry is None else None
        facts = VerifierFacts(
            verifier=asking.verifier,
            verdict=asking.verdict,
            verify_ms=asking.waited_ms,
            verify_microusd=asking.cost_microusd,
        )
    if would is None:
        return facts
    saved = int(would.labels.get("baseline_microusd", 0)) - facts.verify_microusd
    return replace(facts, would_serve=would.id, would_save_microusd=saved)


def _answer_of(generation: Generation) -> AnswerFacts:
    """What stages 8 and 9 did."""
    answered, spent = generation.answered, generation.stored.spent
    hedge, rejected = answered.hedge, list[Rejection]()
    if answered.route is not None:
        rejected = [Rejection(rejection.name, rejection.reason) for rejection in answered.route.rejected]
        rejected += [Rejection(name, "has no room in its budget") for name in generation.holds.refusals]
    return AnswerFacts(
        deployment=spent.charged_deployment or generation.deployment,
        policy=answered.serving.settings.policy if answered.route is not None else "",
        why=answered.why,
        rejected=tuple(rejected),
        queued_ms=answered.queued_ms,
        attempts=tuple([tried.progress.attempt for tried in answered.tries if tried.progress.attempt is not None]),
        fallbacks=answered.fallbacks,
        answered_alias=answered.serving.name if answered.fallbacks else "",
        hedge=Hedged(hedge.deployment, hedge.outcome, spent.hedge_microusd) if hedge is not None else None,
        seams=answered.seams,
        draft=answered.progress.draft,
    )


def _of_reply(reply: Reply, duration_ms: float) -> _Facts:
    """The facts of a request that led no flight: a hit, or a reader of another's flight."""
    entry, begun_ms = reply.served, reply.begun_ms
    if reply.flight is None:
        assert entry is not None
        semantic, deployment = reply.looked.semantic, deployment_of(entry)
        cache = CacheFacts(
            source=reply.source,
            similarity=semantic.similarity,
            question=semantic.question,
            entry=entry.id,
            made_in=_maker(entry),
            kept=reply.kept,
        )
        return cache, _verified(semantic), AnswerFacts(deployment), *_replayed(entry, begun_ms, duration_ms)
    generation = reply.flight.generation
    awaited, awaited_ms = _awaited(generation, reply.turn)
    entry_id = generation.looked.fingerprint.exact.hex() if entry is None else entry.id
    cache = CacheFacts(
        source=reply.source,
        awaited=awaited,
        awaited_ms=awaited_ms,
        entry=entry_id if begun_ms is not None else "",
        made_in=_maker(entry) or maker_of(generation.turn.arrival.trace),
        degraded=reply.looked.degraded,
    )
    times = Times(begun_ms, duration_ms, exact_ms=round(reply.looked_up_ms, 3))
    if begun_ms is None:  # it failed before the first chunk
        return cache, _UNVERIFIED, AnswerFacts(), Usage(), MoneyFacts(), times
    answer, spent = AnswerFacts(generation.deployment), generation.stored.spent
    if entry is not None:
        return cache, _UNVERIFIED, answer, *_replayed(entry, begun_ms, duration_ms)
    usage = Usage(spent.usage.prompt_tokens, spent.usage.completion_tokens)
    baseline = None if spent.money.is_baseline_unknown else spent.money.baseline_microusd
    return cache, _UNVERIFIED, answer, usage, _avoided(baseline, spent.answer_microusd), times


# the defaults themselves: the encoder leaves out a default by its identity
_NOT_AWAITED = (CacheFacts().awaited, CacheFacts().awaited_ms)


def _awaited(generation: Generation, turn: Turn) -> tuple[str, float]:
    """How the wait for another worker ended, and the milliseconds of `turn` until then: `served`,
    `made` here after all, or `ended` with an error.
    """
    looked = generation.looked
    if looked.awaited_until <= turn.started:
        return _NOT_AWAITED
    is_made = bool(generation.answered.tries) or looked.entry is not None
    outcome = "served" if looked.is_from_elsewhere else "made" if is_made else "ended"
    return outcome, (looked.awaited_until - turn.started) * 1000.0


def _replayed(entry: Entry, ttft_ms: float | None, duration_ms: float) -> tuple[Usage, MoneyFacts, Times]:
    """The facts of a recorded answer, with its cost when it was generated."""
    labels: dict[str, Any] = entry.labels
    usage = Usage(labels.get("prompt_tokens", 0), labels.get("completion_tokens", 0))
    money = _avoided(labels.get("baseline_microusd"), labels.get("cost_microusd", 0))
    return usage, money, Times(ttft_ms, duration_ms, max(0.0, labels.get("duration_ms", 0) - duration_ms))


def _prompt_id(fingerprint: Fingerprint) -> str:
    """A digest of a prompt's last words, which tells nothing without the key of its team."""
    text = (fingerprint.text or "").encode()
    return blake2b(text, digest_size=6, key=fingerprint.partition).hexdigest() if text else ""


def _maker(entry: Entry | None) -> str:
    """The trace and the span in which an entry's answer was made; empty if unknown."""
    return str(entry.labels.get(MAKER, "")) if entry is not None else ""


def _avoided(baseline_microusd: int | None, answer_microusd: int) -> MoneyFacts:
    """The money of a request that got an answer without a generation of its own."""
    return MoneyFacts(
        baseline_microusd=baseline_microusd or 0,
        is_baseline_unknown=baseline_microusd is None,
        saved_microusd=baseline_microusd or 0,
        avoided_microusd=answer_microusd,
    )
