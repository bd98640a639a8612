"""The canonical facts of one finished request.

It contains no services. Invariants: the log line, the metrics, the stats and the recent requests are
made from this value alone, so they agree; outside this process its parts are one level of fields,
which `flat` writes and `of_flat` reads.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

import msgspec

from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Hedged, MoneyFacts, Rejection, Seam
from gateway.journey.turn import Ended
from policies import Usage


class GuardCall(msgspec.Struct, frozen=True):
    """A guard's look at the texts of a request, or at those of its answer if it `is_after`.

    `verdict` is allowed, replaced, refused or failed.
    """

    name: str
    is_after: bool
    verdict: str
    duration_ms: float


class RequestFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who asked for what, and when."""

    id: str = msgspec.field(name="request_id")
    at_s: float  # unix time of arrival
    batch: str = ""  # the batch that it is a line of
    operation: str = msgspec.field(default="chat", name="route")  # chat | text_completion | embeddings | ...
    team_id: int = 0
    team: str = ""
    key_id: int = 0
    key: str = ""  # the key's name
    alias: str = ""  # a configured name, or empty: it becomes a metric's label
    # the client's text in `model` where it is no alias itself; bounded, never a label
    model: str = msgspec.field(default="", name="asked")
    is_stream: bool = False
    loop: str = ""  # that it is part of: repeated_tool_calls | repeated_requests
    masked: int = 0  # values that were masked
    changed: int = msgspec.field(default=0, name="placeholders_changed")  # that came back in another form
    unknown: int = msgspec.field(default=0, name="placeholders_unknown")  # in the answer, of no value of it
    guards: tuple[GuardCall, ...] = ()
    # as in rows of the ledger
    user: str = ""
    session: str = ""
    tags: str = ""
    # W3C Trace Context, where the request has a trace; the names are OpenTelemetry's for logs
    trace_id: str = ""
    span_id: str = ""  # the gateway's own span
    parent_span_id: str = ""  # the client's
    trace_flags: int = 0  # 1: sampled


class CacheFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the cache did for a request, and what it kept of it."""

    source: str = msgspec.field(default="miss", name="cache")  # exact | semantic | coalesced | miss | bypass
    similarity: float | None = None  # of the semantic hit, or of the nearest entry on a miss
    miss_reason: str = ""  # the reason for a semantic miss
    prompt_id: str = ""  # of a miss: the same for the same last words of a team
    nearest: str = ""  # the nearest entry's text; empty unless prompts may be logged
    question: str = ""  # the last user text of a semantic hit; empty unless prompts may be logged
    awaited: str = ""  # how waiting for another worker, which made the same answer, ended: served | made | ended
    awaited_ms: float = 0.0
    store: str = ""  # `stored`, or the reason against it
    entry: str = ""  # id of the cached answer that was served or stored
    made_in: str = ""  # the trace and the span of the request that made the answer
    kept: str = ""  # of the answer that was served: `curated`, or `stale` where a newer one was made
    # failed parts that the request did without: redis, cache_worker
    degraded: tuple[str, ...] = msgspec.field(default=(), name="survived")


class VerifierFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a verifier said of stored answers for a request, before or beside its generation.

    Its question has a record and a row of the ledger of its own, with the same cost.
    """

    verifier: str = ""  # the deployment that was asked, or that had been for the same words before
    # yes | no | unsure | risky (a yes beyond the error bound) | failed | late | remembered (the same words before)
    verdict: str = ""
    verify_ms: float | None = None  # that the request waited for it
    verify_microusd: int = 0
    would_serve: str = ""  # id of the answer that would be served where a verifier only observes
    would_save_microusd: int = 0


class AnswerFacts(msgspec.Struct, frozen=True, omit_defaults=True):
    """Which deployment answered a request, and why that one."""

    deployment: str = ""
    policy: str = ""
    why: str = ""  # the winner's explanation, in words
    rejected: tuple[Rejection, ...] = ()
    queued_ms: float = 0.0  # waited for a place, as every deployment was full
    attempts: tuple[Attempt, ...] = ()
    fallbacks: tuple[Rejection, ...] = ()  # the aliases that could not answer, and why
    answered_alias: str = ""  # the fallback that was asked last
    hedge: Hedged | None = None  # the deployment that was asked beside a slow first one
    seams: tuple[Seam, ...] = ()  # where another deployment went on with a stream that broke off
    draft: str = ""  # id of the near answer that a local engine used as a draft


class Times(msgspec.Struct, frozen=True, omit_defaults=True):
    """How long a request took."""

    ttft_ms: float | None = None
    duration_ms: float = 0.0
    saved_ms: float = 0.0  # the time of a hit's generation, less that of the hit
    # of its stages, each of which begins where the one before ends; `stages_of` has all
    received_ms: float = 0.0  # before the start, from the arrival until the body was read
    exact_ms: float = 0.0  # guards, limits and the exact lookup
    semantic_ms: float = 0.0  # the semantic lookup, with its verifier
    reserve_ms: float = 0.0
    record_ms: float = 0.0  # after the end: settling and storing


class Record(msgspec.Struct, frozen=True):
    """One finished request. `recording.record_of` makes it once, on every exit."""

    request: RequestFacts
    ended: Ended = Ended()
    cache: CacheFacts = CacheFacts()
    verifier: VerifierFacts = VerifierFacts()
    answer: AnswerFacts = AnswerFacts()
    usage: Usage = Usage()
    money: MoneyFacts = MoneyFacts()
    times: Times = Times()


class Stage(msgspec.Struct, frozen=True):
    """A part of a request's time, in milliseconds from its start."""

    name: str
    at_ms: float
    duration_ms: float
    attempt: Attempt | None = None  # of a call of a deployment


def stages_of(record: Record) -> list[Stage]:
    """Where the time of a request went, in order; calls of deployments may overlap, and what took no
    time is left out.
    """
    times, cache, answer = record.times, record.cache, record.answer
    stages: list[Stage] = []
    at_ms = 0.0

    def add(name: str, duration_ms: float | None) -> None:
        nonlocal at_ms
        if duration_ms is not None and duration_ms > 0.0:
            stages.append(Stage(name, at_ms, duration_ms))
            at_ms += duration_ms

    if times.received_ms:
        stages.append(Stage("receive", -times.received_ms, times.received_ms))
    is_at_once = cache.source in ("exact", "semantic") and not times.exact_ms
    before_ms, after_ms = (
        sum([look.duration_ms for look in record.request.guards if look.is_after is is_after])
        for is_after in (False, True)
    )
    add("guard", before_ms)
    looked_up_ms = times.ttft_ms if is_at_once else times.exact_ms
    add("exact lookup", None if looked_up_ms is None else looked_up_ms - before_ms - (after_ms if is_at_once else 0.0))
    if cache.source == "coalesced" and times.ttft_ms is not None:
        add("shared answer", times.ttft_ms - at_ms)
    elif cache.awaited:
        add("other worker", cache.awaited_ms - at_ms)
    verify_ms = record.verifier.verify_ms or 0.0
    add("semantic lookup", times.semantic_ms - verify_ms)
    add("verifier", verify_ms)
    add("reserve", times.reserve_ms)
    add("queue", answer.queued_ms)
    stages += [Stage(one.name, one.at_ms, one.duration_ms, one) for one in answer.attempts]
    if after_ms:
        stages.append(Stage("guard", max(at_ms, times.duration_ms - after_ms), after_ms))
    if times.record_ms:
        stages.append(Stage("record", times.duration_ms, times.record_ms))
    return stages


_PARTS: Mapping[str, type[msgspec.Struct]] = {part.name: part.type for part in msgspec.structs.fields(Record)}
_UNRECORDED = ("units", "rounds")  # the cost has them
_FIELDS = [
    (part, field)
    for part, values in _PARTS.items()
    for field in msgspec.structs.fields(values)
    if field.name not in _UNRECORDED
]
FIELDS: Mapping[str, msgspec.structs.FieldInfo] = {field.encode_name: field for _, field in _FIELDS}
"""The fields of a flat record, by their names."""
PATHS: Mapping[str, str] = {field.encode_name: f"{part}.{field.name}" for part, field in _FIELDS}
"""Where each of them is in a record, such as `usage.prompt_tokens`."""


def flat(record: Record) -> dict[str, Any]:
    """The fields of all parts of `record` as one level of plain values, without defaults."""
    parts = msgspec.to_builtins(record).values()
    fields: dict[str, Any] = dict(chain.from_iterable(map(dict.items, parts)))
    if not fields.keys().isdisjoint(_UNRECORDED):
        for name in _UNRECORDED:
            fields.pop(name, None)
    return fields


def of_flat(fields: Mapping[str, Any]) -> Record:
    """The record that `flat` made `fields` of. Raises msgspec.ValidationError."""
    return msgspec.convert(dict.fromkeys(_PARTS, fields), Record)
