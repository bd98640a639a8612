"""The canonical facts of one finished request.

It contains no services. Invariant: the log line, the metrics, the stats and the recent requests are
made from this value alone, so they agree.
"""

from typing import Any

import msgspec

from cache import Entry
from gateway.accounts import Identity
from gateway.deployments.progress import Attempt
from gateway.journey.bill import Claim
from gateway.journey.flight import Flight, Reply
from gateway.journey.generation import Generation, Rejection
from gateway.journey.hedge import Hedged
from gateway.journey.rescue import Seam
from gateway.journey.storing import deployment_of
from gateway.journey.turn import Arrival, Ended, Turn
from gateway.wire.errors import ApiError


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finished request. `record_of` makes it once, on every exit."""

    request_id: str
    at_s: float  # unix time of arrival
    batch: str = ""  # the batch that it is a line of
    route: str = "chat"  # chat | text_completion | embeddings | ...
    team_id: int = 0
    team: str = ""
    key_id: int = 0
    key: str = ""  # the key's name
    alias: str = ""  # a configured name, or empty: it becomes a metric's label
    asked: str = ""  # the client's text in `model` where it is no alias itself; bounded, never a label
    is_stream: bool = False
    status: int = 200
    error: str = ""  # the error's code, if there is one
    refusal: str = ""  # the message that the client got with it; empty where a provider wrote it
    cache: str = "miss"  # exact | semantic | coalesced | miss | bypass
    similarity: float | None = None  # of the semantic hit, or of the nearest entry on a miss
    miss_reason: str = ""  # the reason for a semantic miss
    nearest: str = ""  # the nearest entry's text; empty unless prompts may be logged
    question: str = ""  # the last user text of a semantic hit; empty unless prompts may be logged
    store: str = ""  # `stored`, or the reason against it
    entry: str = ""  # id of the cached answer that was served or stored
    deployment: str = ""
    policy: str = ""
    why: str = ""  # the winner's explanation, in words
    rejected: tuple[Rejection, ...] = ()
    queued_ms: float = 0.0  # waited for a place, as every deployment was full
    awaited: str = ""  # how waiting for another worker, which made the same answer, ended: served | made | ended
    awaited_ms: float = 0.0
    attempts: tuple[Attempt, ...] = ()
    fallbacks: tuple[Rejection, ...] = ()  # the aliases that could not answer, and why
    answered_alias: str = ""  # the fallback that was asked last
    hedge: Hedged | None = None  # the deployment that was asked beside a slow first one
    seams: tuple[Seam, ...] = ()  # where another deployment went on with a stream that broke off
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_audio_tokens: int = 0  # of the cached ones
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    audio_prompt_tokens: int = 0
    image_prompt_tokens: int = 0
    reasoning_tokens: int = 0
    audio_completion_tokens: int = 0
    image_completion_tokens: int = 0
    tool_calls: int = 0
    usage_estimated: bool = False  # the deployment did not report the tokens of its answer
    claims: tuple[Claim, ...] = ()  # reports of more than was held
    provider_cost_microusd: int | None = None  # as the provider says itself
    cost_microusd: int = 0
    baseline_microusd: int = 0  # the cost without Sameway
    is_baseline_unknown: bool = False  # as a price is missing
    saved_microusd: int = 0  # the baseline less the cost; below 0 where Sameway cost more
    savings: dict[str, int] | None = None  # the same by mechanism, for generations
    avoided_microusd: int = 0  # by a hit: the cost of the same answer when it was generated
    saved_ms: float = 0.0  # the time of its generation, less that of the hit
    ttft_ms: float | None = None
    duration_ms: float = 0.0
    draft: str = ""  # id of the near answer that a local engine used as a draft
    drafted_tokens: dict[str, int] | None = (
        None  # guesses that were verified, by source: text, reference (that answer), model
    )
    accepted_tokens: dict[str, int] | None = None  # correct guesses, each of which saves a step
    survived: tuple[str, ...] = ()  # failed parts that the request did without: redis, cache_worker
    is_disconnected: bool = False  # the client left before its last byte


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
    asked: str = "",
    cache: str = "miss",
    reply: Reply | None = None,
    flight: Flight | None = None,
) -> Record:
    """The record of a finished request.

    `duration_ms` is from its arrival to its end. `alias` is a configured name or empty; `asked` is
    the name that was asked for instead. `flight` is for a request that led one; `reply` is for any
    other request that got a reply. `cache` is for requests without a generation.
    """
    if flight is not None:
        facts = _of_generation(flight, duration_ms)
    elif reply is not None:
        facts = _of_reply(reply, duration_ms)
    else:
        facts = {"cache": cache}
    if identity is not None:
        team, key = identity.team, identity.key
        facts["team_id"], facts["team"], facts["key_id"], facts["key"] = team.id, team.name, key.id, key.name
    facts["request_id"], facts["at_s"], facts["batch"] = arrival.request_id, arrival.at_s, arrival.batch
    facts["route"], facts["alias"], facts["asked"] = arrival.operation, alias, asked
    facts["is_stream"], facts["duration_ms"] = turn is not None and turn.is_stream, duration_ms
    facts["status"], facts["error"], facts["refusal"] = ended.status, ended.error, ended.refusal
    facts["is_disconnected"] = ended.is_disconnected
    return Record(**facts)  # one dictionary: a second one would be merged


def _of_generation(flight: Flight, duration_ms: float) -> dict[str, Any]:
    """The facts of the request that led a flight."""
    generation, route = flight.generation, flight.generation.route
    progress, semantic, spent = generation.progress, generation.semantic, generation.spent
    facts: dict[str, Any] = {
        "cache": generation.source,
        "similarity": semantic.similarity,
        "miss_reason": semantic.miss_reason,
        "nearest": semantic.nearest,
        "question": semantic.question,
        "store": generation.store,
        "deployment": generation.answered_by,
        "why": generation.why,
        "queued_ms": generation.queued_ms,
        "attempts": generation.attempts,
        "hedge": generation.hedge,
        "draft": progress.draft,
        "survived": generation.degraded,
    }
    if generation.fallbacks:
        facts["fallbacks"] = tuple(generation.fallbacks)
        facts["answered_alias"] = generation.serving.name
    if generation.seams:
        facts["seams"] = tuple(generation.seams)
    if route is not None:
        facts["policy"] = generation.serving.settings.policy
    if route is not None and (route.rejected or generation.no_room):
        rejected = [Rejection(r.name, r.reason) for r in route.rejected]
        rejected += [Rejection(name, "has no room in its budget") for name in generation.no_room]
        facts["rejected"] = tuple(rejected)
    if generation.awaited_until:
        facts |= _awaited(generation, generation.turn)
    if generation.served is not None:
        return facts | _of_entry(generation.served, duration_ms, ttft_ms=duration_ms)
    if generation.stored is not None:
        facts["entry"] = generation.stored.id
    if flight.first_at is not None:
        facts["ttft_ms"] = (flight.first_at - generation.turn.started) * 1000.0
    if spent is not None and spent.charged_deployment:
        facts["deployment"] = spent.charged_deployment
        facts["prompt_tokens"], facts["completion_tokens"] = spent.usage.prompt_tokens, spent.usage.completion_tokens
        facts.update(spent.usage.parts())
        facts["usage_estimated"] = spent.is_estimated
        facts["cost_microusd"], facts["claims"] = spent.cost_microusd, spent.claims
        facts["is_baseline_unknown"] = spent.baseline_microusd is None
        if spent.baseline_microusd is not None:
            facts["baseline_microusd"] = spent.baseline_microusd
            if spent.savings:
                facts["saved_microusd"] = spent.baseline_microusd - spent.cost_microusd
                facts["savings"] = spent.savings
    return facts


def _of_reply(reply: Reply, duration_ms: float) -> dict[str, Any]:
    """The facts of a request that led no flight: an exact hit, or a reader of another's flight."""
    facts: dict[str, Any]
    if (reader := reply.reader) is None:
        assert reply.entry is not None
        facts = {"cache": reply.source}
        if reply.pointed is not None:
            found = reply.pointed.semantic
            facts |= {"similarity": found.similarity, "question": found.question}
        return facts | _of_entry(reply.entry, duration_ms, ttft_ms=reply.looked_up_ms)
    ttft_ms, served = reply.begun_ms, reply.served
    if ttft_ms is None:  # its generation failed before the first chunk
        facts = {}
    elif served is not None:
        facts = _of_entry(served, duration_ms, ttft_ms=ttft_ms)
    else:
        generation, spent = reader.generation, reader.generation.spent
        facts = {
            "entry": generation.fingerprint.exact.hex(),
            "deployment": generation.answered_by,
            "ttft_ms": ttft_ms,
        }
        if spent is not None:
            facts["avoided_microusd"] = spent.answer_microusd
            facts["baseline_microusd"] = facts["saved_microusd"] = spent.baseline_microusd or 0
            facts["is_baseline_unknown"] = spent.baseline_microusd is None
            facts["prompt_tokens"] = spent.usage.prompt_tokens
            facts["completion_tokens"] = spent.usage.completion_tokens
    if reader.generation.awaited_until > reply.turn.started:
        facts |= _awaited(reader.generation, reply.turn)
    facts["cache"], facts["survived"] = reply.source, reply.degraded
    return facts


def _awaited(generation: Generation, turn: Turn) -> dict[str, Any]:
    return {"awaited": generation.awaited, "awaited_ms": (generation.awaited_until - turn.started) * 1000.0}


def _of_entry(entry: Entry, duration_ms: float, *, ttft_ms: float) -> dict[str, Any]:
    """The facts of a recorded answer that was served, with its cost when it was generated."""
    labels = entry.labels
    baseline = labels.get("baseline_microusd")
    return {
        "entry": entry.id,
        "deployment": deployment_of(entry),
        "ttft_ms": ttft_ms,
        "baseline_microusd": baseline or 0,
        "saved_microusd": baseline or 0,
        "is_baseline_unknown": baseline is None,
        "avoided_microusd": labels.get("cost_microusd", 0),
        "prompt_tokens": labels.get("prompt_tokens", 0),
        "completion_tokens": labels.get("completion_tokens", 0),
        "saved_ms": max(0.0, float(labels.get("duration_ms", 0)) - duration_ms),
    }
