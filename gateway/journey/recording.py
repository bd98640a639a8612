"""Makes the record of a finished request from the outcomes of its stages, once, on every exit."""

from cache import Entry
from gateway.accounts import Identity
from gateway.journey.flight import Flight, Reply
from gateway.journey.generation import Generation, Rejection
from gateway.journey.record import AnswerFacts, CacheFacts, MoneyFacts, Record, RequestFacts, Times
from gateway.journey.storing import deployment_of
from gateway.journey.turn import Arrival, Ended, Turn
from gateway.wire.errors import ApiError
from policies import Usage

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
    the name that was asked for instead. `flight` is for a request that led one; `reply` is for any
    other request that got a reply. `source` is for requests without a generation.
    """
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
        model=model,
        is_stream=turn is not None and turn.is_stream,
    )
    if flight is not None:
        return _of_flight(request, ended, flight, duration_ms)
    if reply is not None:
        return _of_reply(request, ended, reply, duration_ms)
    return Record(request=request, ended=ended, cache=CacheFacts(source=source), times=Times(None, duration_ms))


def _of_flight(request: RequestFacts, ended: Ended, flight: Flight, duration_ms: float) -> Record:
    """The record of the request that led a flight."""
    generation, semantic = flight.generation, flight.generation.semantic
    awaited, awaited_ms = _awaited(generation, generation.turn)
    served, stored = generation.served, generation.stored
    entry = served or stored
    cache = CacheFacts(
        source=generation.source,
        similarity=semantic.similarity,
        miss_reason=semantic.miss_reason,
        nearest=semantic.nearest,
        question=semantic.question,
        awaited=awaited,
        awaited_ms=awaited_ms,
        store=generation.store,
        entry=entry.id if entry is not None else "",
        degraded=generation.degraded,
    )
    answer = _answer_of(generation)
    if served is not None:
        return _replayed(request, ended, cache, answer, served, Times(duration_ms, duration_ms))
    ttft_ms = None if flight.first_at is None else (flight.first_at - generation.turn.started) * 1000.0
    times, spent = Times(ttft_ms, duration_ms), generation.spent
    if spent is None or not spent.charged_deployment:
        return Record(request=request, ended=ended, cache=cache, answer=answer, times=times)
    baseline = spent.baseline_microusd
    money = MoneyFacts(
        usage_estimated=spent.is_estimated,
        claims=spent.claims,
        cost_microusd=spent.cost_microusd,
        baseline_microusd=baseline or 0,
        is_baseline_unknown=baseline is None,
        saved_microusd=baseline - spent.cost_microusd if baseline is not None and spent.savings else 0,
        savings=spent.savings or None,
    )
    return Record(request=request, ended=ended, cache=cache, answer=answer, usage=spent.usage, money=money, times=times)


def _answer_of(generation: Generation) -> AnswerFacts:
    """What stages 8 and 9 did."""
    route, spent, no_room = generation.route, generation.spent, generation.no_room
    rejected = [Rejection(one.name, one.reason) for one in route.rejected] if route is not None else []
    if route is not None:
        rejected += [Rejection(name, "has no room in its budget") for name in no_room]
    return AnswerFacts(
        deployment=(spent.charged_deployment if spent is not None else "") or generation.answered_by,
        policy=generation.serving.settings.policy if route is not None else "",
        why=generation.why,
        rejected=tuple(rejected),
        queued_ms=generation.queued_ms,
        attempts=generation.attempts,
        fallbacks=tuple(generation.fallbacks),
        answered_alias=generation.serving.name if generation.fallbacks else "",
        hedge=generation.hedge,
        seams=tuple(generation.seams),
        draft=generation.progress.draft,
    )


def _of_reply(request: RequestFacts, ended: Ended, reply: Reply, duration_ms: float) -> Record:
    """The record of a request that led no flight: a hit, or a reader of another's flight."""
    if (reader := reply.reader) is None:
        assert reply.entry is not None
        semantic = reply.pointed.semantic if reply.pointed is not None else None
        cache = CacheFacts(
            source=reply.source,
            similarity=semantic.similarity if semantic is not None else None,
            question=semantic.question if semantic is not None else "",
            entry=reply.entry.id,
        )
        answer = AnswerFacts(deployment=deployment_of(reply.entry))
        return _replayed(request, ended, cache, answer, reply.entry, Times(reply.looked_up_ms, duration_ms))
    generation, served = reader.generation, reply.served
    times = Times(reply.begun_ms, duration_ms)
    is_begun = times.ttft_ms is not None  # else its generation failed before the first chunk
    awaited, awaited_ms = _awaited(generation, reply.turn)
    entry_id = served.id if served is not None else generation.fingerprint.exact.hex()
    cache = CacheFacts(
        source=reply.source,
        awaited=awaited,
        awaited_ms=awaited_ms,
        entry=entry_id if is_begun else "",
        degraded=reply.degraded,
    )
    answer = AnswerFacts(deployment=generation.answered_by if is_begun else "")
    if served is not None and is_begun:
        return _replayed(request, ended, cache, answer, served, times)
    spent = generation.spent
    if spent is None or not is_begun:
        return Record(request=request, ended=ended, cache=cache, answer=answer, times=times)
    baseline = spent.baseline_microusd
    money = MoneyFacts(
        baseline_microusd=baseline or 0,
        is_baseline_unknown=baseline is None,
        saved_microusd=baseline or 0,
        avoided_microusd=spent.answer_microusd,
    )
    usage = Usage(spent.usage.prompt_tokens, spent.usage.completion_tokens)
    return Record(request=request, ended=ended, cache=cache, answer=answer, usage=usage, money=money, times=times)


def _awaited(generation: Generation, turn: Turn) -> tuple[str, float]:
    """How the wait for another worker ended, and the milliseconds of `turn` until then."""
    if generation.awaited_until <= turn.started:
        return "", 0.0
    return generation.awaited, (generation.awaited_until - turn.started) * 1000.0


def _replayed(
    request: RequestFacts, ended: Ended, cache: CacheFacts, answer: AnswerFacts, entry: Entry, times: Times
) -> Record:
    """The record of a request that got a recorded answer, with its cost when it was generated."""
    baseline = _label(entry, "baseline_microusd")
    money = MoneyFacts(
        baseline_microusd=baseline,
        is_baseline_unknown="baseline_microusd" not in entry.labels,
        saved_microusd=baseline,
        avoided_microusd=_label(entry, "cost_microusd"),
    )
    saved_ms = max(0.0, _label(entry, "duration_ms") - times.duration_ms)
    return Record(
        request=request,
        ended=ended,
        cache=cache,
        answer=answer,
        usage=Usage(_label(entry, "prompt_tokens"), _label(entry, "completion_tokens")),
        money=money,
        times=Times(times.ttft_ms, times.duration_ms, saved_ms),
    )


def _label(entry: Entry, name: str) -> int:
    return int(entry.labels.get(name, 0))
