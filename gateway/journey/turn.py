"""One request as a value: validated, with its cache controls and its deadline, before any decision.

Shapes: OpenAI API reference, "Create chat completion" and "Create completion". Known fields
are checked for type and range, unknown ones pass through unchanged. Invariant: `body` is the
client's JSON without Sameway's own `cache` object, otherwise unchanged, except that a completion
without a length gets OpenAI's default, because servers have other defaults.
"""

import os
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from cache import Controls
from gateway.accounts import Identity
from gateway.backends.base import Native, Passage
from gateway.journey.trace import UNTRACED, Trace, own_trace, trace_of
from gateway.settings import TraceSettings
from gateway.wire.errors import BadRequest
from gateway.wire.forms import FormFiles
from gateway.wire.requests import SHAPES, convert, decode_object, json_name
from gateway.wire.types import CHAT, Kind
from policies import Demand
from policies.verification import Verify

_Tag = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f\x7f]*$")]


class CacheFields(msgspec.Struct, forbid_unknown_fields=True, rename={"no_cache": "no-cache", "no_store": "no-store"}):
    """The body's `cache` object."""

    ttl: Annotated[int, Meta(ge=1)] | None = None
    no_cache: bool = False
    no_store: bool = False
    namespace: Annotated[str, Meta(max_length=256)] = ""
    error_max: Annotated[float, Meta(ge=0, le=1)] | None = None
    verify: Verify | None = None
    tags: Annotated[tuple[_Tag, ...], Meta(max_length=16)] = ()


class Arrival(msgspec.Struct, frozen=True):
    """A request before its body is read. `operation` is chat, text_completion, embeddings, ...

    `batch` is the id of the batch that it is a line of, or empty.
    """

    request_id: str
    at_s: float  # unix time
    operation: str
    batch: str = ""
    trace: Trace | None = None


class Caller(msgspec.Struct, frozen=True):
    """The caller of a line of a batch, which the gateway itself puts into the request's scope."""

    identity: Identity
    batch: str


def arrive(
    operation: str,
    headers: Mapping[str, str] | None = None,
    caller: Caller | None = None,
    traces: TraceSettings = UNTRACED,
) -> Arrival:
    """The arrival of a request of this operation, now, with a new id.

    `headers` say its trace; None: a request of the gateway's own is in that of the work at hand.
    """
    at_s = time.time()
    request_id = new_id(at_s)
    trace = own_trace(request_id) if headers is None else trace_of(headers, request_id, traces)
    return Arrival(request_id, at_s, operation, "" if caller is None else caller.batch, trace)


SESSION_HEADERS = {
    "x-sameway-session": "what `sameway run` starts, and any client that sets it",
    "x-litellm-session-id": "clients that are set up for LiteLLM",
    "x-litellm-trace-id": "the same",
    "x-claude-code-session-id": "Claude Code 2.1.197, its subagents too",
    "session-id": "Codex CLI 0.171.0; its `thread-id` is that of a subagent",
    "session_id": "Codex CLI before, pi",
    "x-parent-session-id": "opencode 1.18.33, for its subagents",
    "x-session-id": "opencode 1.18.33",
    "x-opencode-session": "opencode, with a provider of its own",
    "x-session-affinity": "opencode before, pi",
}
"""The headers that name a session, each before those below it, and who sends them."""


class Labels(msgspec.Struct, frozen=True):
    """What a request goes by in budgets, as sent: the body's `metadata`, the header with tags, and the
    session of SESSION_HEADERS.
    """

    metadata: Any = None
    header: str = ""
    session: str = ""


NO_LABELS = Labels()


class Ended(msgspec.Struct, frozen=True, omit_defaults=True):
    """The end of a reply, as its client saw it.

    `status` is HTTP's; `error` is the error's code and `refusal` its message, empty without one.
    """

    status: int = 200
    error: str = ""
    refusal: str = ""
    is_disconnected: bool = False  # the client left before its last byte


class Turn(msgspec.Struct, frozen=True):
    """One request, as its caller sent it. Times are seconds on the clock of `time.perf_counter`."""

    arrival: Arrival
    alias: str
    body: dict[str, Any]
    controls: Controls
    demand: Demand
    is_stream: bool
    wants_usage: bool
    kind: Kind
    started: float
    deadline: float | None = None  # None: the client has no deadline
    native: Native | None = None
    labels: Labels = NO_LABELS
    # `body` with marks of a provider's prompt cache, for deployments that keep them; None: it has none
    marked: dict[str, Any] | None = None
    upload: FormFiles | None = None
    passage: Passage | None = None
    is_guarded: bool = False  # guards have seen it: its texts are those that they left
    booked: dict[str, str] | None = None  # of a request of the gateway's own: the labels of the one that it is about

    @property
    def shortened_to(self) -> int | None:
        """The tokens that its answer may have where no deployment writes as many as it allows."""
        if not self.demand.is_output_bound:
            return None
        tokens = self.demand.output_tokens_max
        return tokens if tokens < self.body["max_completion_tokens"] else None

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1000.0

    def remaining_ms(self) -> float | None:
        """Milliseconds until the client's deadline; None if it has none."""
        return None if self.deadline is None else max(0.0, (self.deadline - time.perf_counter()) * 1000.0)


def read_turn(
    raw: bytes,
    headers: Mapping[str, str],
    arrival: Arrival,
    kind: Kind = CHAT,
    model: str | None = None,
    metadata: Any = None,
) -> Turn:
    """The turn of the body `raw` and of `headers`, by lower-case name.

    `model` replaces the body's; `metadata` is used where the body has none. Raises BadRequest with
    the invalid field.
    """
    return turn_of(decode_object(raw, model), raw, headers, arrival, kind, metadata)


def turn_of(
    body: dict[str, Any],
    raw: bytes,
    headers: Mapping[str, str],
    arrival: Arrival,
    kind: Kind,
    metadata: Any = None,
    upload: FormFiles | None = None,
) -> Turn:
    """The same of a decoded body; `upload` are the files of a form, whose fields are texts."""
    if kind.output_tokens_default is not None and body.get("max_tokens") is None:
        body["max_tokens"] = kind.output_tokens_default
    request = convert(body, SHAPES[kind.name], is_strict=upload is None)
    started = time.perf_counter()
    demand = request.demand(raw, body)
    controls = read_controls(headers.get("cache-control", ""), body.pop("cache", None))
    if not kind.is_repeatable and controls.ttl_s is None and controls.max_age_s is None:
        # a provider makes another image each time
        controls = msgspec.structs.replace(controls, no_cache=True, no_store=True)
    return Turn(
        arrival=arrival,
        alias=request.model,
        controls=controls,
        body=body,
        demand=msgspec.structs.replace(demand, is_batch=True) if arrival.batch else demand,
        is_stream=kind.is_bytes or bool(request.stream),
        wants_usage=bool(request.stream_options and request.stream_options.include_usage),
        kind=kind,
        started=started,
        deadline=_deadline(headers.get("x-stainless-read-timeout"), started),
        labels=labels_of(headers, body.get("metadata", metadata)),
        upload=upload,
    )


def labels_of(headers: Mapping[str, str], metadata: Any) -> Labels:
    """The tags and the session in `headers`, by lower-case name, and a body's `metadata`."""
    header, session = headers.get("x-sameway-tags", ""), ""
    if not SESSION_HEADERS.keys().isdisjoint(headers):
        session = next(filter(None, [headers.get(name, "").strip() for name in SESSION_HEADERS]), "")
    if metadata is None and not header and not session:
        return NO_LABELS
    # a header is UTF-8 here, so that its values equal those of a body
    texts = [text.encode("latin-1", "replace").decode("utf-8", "replace") for text in (header, session)]
    return Labels(metadata, *texts)


def read_controls(cache_control: str, fields: Any) -> Controls:
    """Cache controls from a `Cache-Control` header and the body's `cache` object (`fields`).

    Source: RFC 9111, section 5.2.1. If both set a control, the stricter one holds. Unknown
    directives are ignored, as the RFC requires. Raises BadRequest, also for unknown fields of the
    `cache` object.
    """
    if not cache_control and fields is None:
        return _DEFAULT_CONTROLS
    directives: dict[str, str] = {}
    for part in cache_control.split(","):
        name, _, value = part.strip().partition("=")
        directives[name.strip().lower()] = value.strip().strip('"')
    if fields is not None and not isinstance(fields, dict):
        raise BadRequest(
            f"Invalid cache: expected an object, got {json_name(fields)}", param="cache", code="invalid_type"
        )
    body_controls: CacheFields = convert(fields or {}, CacheFields, "cache")
    max_age = directives.get("max-age", "")
    return Controls(
        no_cache=body_controls.no_cache or "no-cache" in directives,
        no_store=body_controls.no_store or "no-store" in directives,
        only_if_cached="only-if-cached" in directives,
        max_age_s=int(max_age) if max_age.isdecimal() and len(max_age) < 12 else None,
        ttl_s=body_controls.ttl,
        namespace=body_controls.namespace,
        error_max=body_controls.error_max,
        verify=body_controls.verify,
        tags=body_controls.tags,
    )


_DEFAULT_CONTROLS = Controls()


def _deadline(header: str | None, started: float) -> float | None:
    """The deadline of the official SDKs' read time-out, in seconds; None for any other value."""
    if not header:
        return None
    try:
        seconds = float(header)
    except ValueError:
        return None
    return started + seconds if 0 < seconds < 86_400 else None


def elapsed_ms_since(at_s: float) -> float:
    """Milliseconds since `at_s`, in unix time."""
    return max(0.0, (time.time() - at_s) * 1000.0)


def new_id(at_s: float) -> str:
    """The id of a request that arrived at `at_s`, in unix time.

    It contains that time, as a version 7 UUID does (RFC 9562, section 5.7).
    """
    # no client can guess it: the ids of stored responses are made of it
    return f"req_{int(at_s * 1000):012x}{os.urandom(10).hex()}"


def arrived_at(request_id: str) -> float | None:
    """The unix time in an id that `new_id` made; None for any other id."""
    digits = request_id.removeprefix("req_")
    try:
        return int(digits[:12], 16) / 1000.0 if len(digits) == 32 else None
    except ValueError:
        return None
