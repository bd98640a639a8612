"""The trace of a request: W3C Trace Context, and ids that follow from the request's own.

A span's id is a digest of the request's id and of the span's name, so a call of a deployment can
name its span before the request has ended and its spans are made. Knows no exporter and no clock.
Invariant: where the gateway makes no spans, a client's headers go on as they came.
Source: https://www.w3.org/TR/trace-context/ (level 1), https://www.w3.org/TR/baggage/
"""

import hashlib
import re
from collections.abc import Mapping
from contextvars import ContextVar

import msgspec

from gateway.settings import TraceSettings
from ipc import TRACE_ID

REQUEST = "request"
"""The name of the span of a whole request."""
UNTRACED = TraceSettings()
"""The settings of a gateway that makes no spans."""

_HEADERS = frozenset({"traceparent", "tracestate", "baggage"})
# version 00, and what a later version begins with; ids of zeros are invalid (section 3.2.2)
_PARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_WHOLE = 1 << 64

TraceHeaders = tuple[tuple[str, str], ...]


class Trace(msgspec.Struct, frozen=True):
    """A request's place in a trace. Ids are lower-case hex digits."""

    id: str = ""  # 32 digits; empty where the client sent none that can be read
    span_id: str = ""  # 16 digits: the gateway's span of the request; empty where it makes none
    parent_id: str = ""  # the client's span
    is_sampled: bool = False  # by the client, or without one by this gateway
    headers: TraceHeaders = ()  # as the client sent them

    def sent_from(self, span_id: str) -> TraceHeaders:
        """The headers of a call whose span is `span_id`."""
        if not self.span_id:
            return self.headers
        own = ("traceparent", f"00-{self.id}-{span_id}-{self.is_sampled:02x}")
        # the state belongs to the client's trace (section 3.3)
        return own, *[one for one in self.headers if one[0] == "baggage" or (one[0] == "tracestate" and self.parent_id)]


CURRENT: ContextVar[Trace | None] = ContextVar("trace", default=None)
"""The trace of the request that a task works for."""


def maker_of(trace: Trace | None) -> str:
    """The trace and the span of a request, as the entry of its answer keeps them; empty without a span."""
    return f"{trace.id}-{trace.span_id}" if trace is not None and trace.span_id else ""


def span_of(request_id: str, name: str) -> str:
    """The id of a request's span of this name: 16 hex digits."""
    return hashlib.blake2b(f"{request_id}/{name}".encode(), digest_size=8).hexdigest()


def trace_of(headers: Mapping[str, str], request_id: str, traces: TraceSettings) -> Trace | None:
    """The trace of a request with these headers, by lower-case name; None where it has none.

    Without a parent, `traces.sample` of the ids are sampled, the same at all hosts (OpenTelemetry,
    "TraceIdRatioBased").
    """
    is_off = traces.endpoint is None
    if is_off and _HEADERS.isdisjoint(headers):
        CURRENT.set(None)
        TRACE_ID.set("")
        return None
    named = [(name, headers[name]) for name in sorted(_HEADERS) if name in headers]
    sent = tuple((name, value) for name, value in named if value.isascii() and value.isprintable())
    parent = _PARENT.fullmatch(headers.get("traceparent", ""))
    trace_id, parent_id, flags = parent.groups() if parent is not None else ("", "", "00")
    span_id, is_sampled = "", bool(int(flags, 16) & 1)
    if not is_off:
        span_id = span_of(request_id, REQUEST)
        if not trace_id:
            trace_id = hashlib.blake2b(request_id.encode(), digest_size=16).hexdigest()
            is_sampled = int(trace_id[16:], 16) < traces.sample * _WHOLE
    trace = Trace(trace_id, span_id, parent_id, is_sampled, sent)
    CURRENT.set(trace)
    TRACE_ID.set(trace_id)
    return trace


def own_trace(request_id: str) -> Trace | None:
    """The trace of a request of the gateway's own, below the request that this task works for."""
    if (trace := CURRENT.get()) is None or not trace.span_id:
        return None
    return Trace(trace.id, span_of(request_id, REQUEST), trace.span_id, trace.is_sampled)
