"""The response headers with an answer's source, its cost and the cost that it saved.

Sources: RFC 9211 (Cache-Status), RFC 9111 section 5.1 (Age), W3C Server Timing. Names are
lower-case bytes, as ASGI requires. Invariant: docs/api.md lists every `x-sameway-` header; a test
compares.
"""

import time

from cache import Entry
from gateway.journey.flight import Reply
from gateway.journey.storing import deployment_of
from gateway.wire.errors import ApiError
from policies.prices import dollars

Headers = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # else nginx in front delays a stream until its buffer is full
]

_MEDIA = ("audio/", "text/plain", "text/vtt", "application/json", "application/octet-stream", "application/x-subrip")


def media_headers(media: str) -> Headers:
    """The headers of a plain answer with a deployment's content type; an unlisted type is sent as
    bytes, and a whole answer without one is JSON.
    """
    if not media:
        return [JSON]
    if media.startswith("text/event-stream"):
        return EVENT_STREAM
    shown = media if media.lower().startswith(_MEDIA) else "application/octet-stream"
    return [(b"content-type", shown.encode("latin-1", "replace")), (b"x-content-type-options", b"nosniff")]


def base_headers(request_id: str) -> Headers:
    """The headers of every response."""
    return [(b"x-request-id", request_id.encode())]


def error_headers(request_id: str, error: ApiError) -> Headers:
    """The headers of an error response."""
    own = ((name.encode(), value.encode("latin-1", "replace")) for name, value in error.headers.items())
    return [JSON, *base_headers(request_id), *own]


def answer_headers(reply: Reply) -> Headers:
    """The headers of an answer that has begun."""
    turn, source, entry, flight = reply.turn, reply.source, reply.served, reply.flight
    deployment = deployment_of(entry) if flight is None else flight.generation.deployment
    headers = [
        (b"x-request-id", turn.arrival.request_id.encode()),
        (b"x-sameway-cache", source.encode()),
        (b"x-sameway-backend", deployment.encode("latin-1", "replace")),
        (b"cache-status", _cache_status(source, entry).encode()),
        (b"server-timing", f"sameway;dur={turn.elapsed_ms():.2f}".encode()),
    ]
    limit_headers = reply.looked.limit_headers
    if flight is not None:
        answered, holds = flight.generation.answered, flight.generation.holds
        if answered.fallbacks:
            headers.append((b"x-sameway-fallback", answered.serving.name.encode("latin-1", "replace")))
        if answered.hedge is not None:
            headers.append((b"x-sameway-hedge", answered.hedge.deployment.encode("latin-1", "replace")))
        if answered.queued_ms:
            headers.append((b"x-sameway-queued-ms", f"{answered.queued_ms:.0f}".encode()))
        if source == "miss" and (reason := flight.generation.looked.semantic.miss_reason):
            headers.append((b"x-sameway-miss-reason", reason.encode()))
        if (cut_at := holds.cut_at) is None and turn.demand.is_output_bound:
            cut_at = flight.generation.turn.shortened_to
        if cut_at is not None:
            headers.append((b"x-sameway-cut-at", str(cut_at).encode()))
        if holds.limit_headers and reply.is_leading:
            limit_headers = limit_headers | holds.limit_headers  # the tokens' limits, too
    if entry is not None:
        if (hit := reply.semantic_hit) is not None and hit.similarity is not None:
            headers.append((b"x-sameway-similarity", f"{hit.similarity:.4f}".encode()))
            if hit.verified_by:
                headers.append((b"x-sameway-verified", b"true"))
        if reply.kept:
            headers.append((b"x-sameway-kept", reply.kept.encode()))
        headers.append((b"age", str(int(entry.age_s(time.time()))).encode()))
        asking = hit.asking if hit is not None and reply.is_leading else None
        cost = asking.cost_microusd if asking is not None else 0
        headers.append((b"x-sameway-cost-usd", dollars(cost).encode() if cost else b"0"))
        if (baseline := entry.labels.get("baseline_microusd")) is not None:
            headers.append((b"x-sameway-saved-usd", dollars(max(0, int(baseline) - cost)).encode()))
    headers += limit_headers.items()
    return headers


def cost_header(reply: Reply) -> Headers:
    """The headers with the cost of an answer that is sent whole.

    A stream's headers leave before its cost is known; the ledger has that cost.
    """
    if reply.flight is None or reply.served is not None:
        return []
    money = reply.flight.generation.stored.spent.money
    if reply.is_leading:
        return [(b"x-sameway-cost-usd", dollars(money.cost_microusd).encode())]
    headers = [(b"x-sameway-cost-usd", b"0")]
    if not money.is_baseline_unknown:
        headers.append((b"x-sameway-saved-usd", dollars(money.baseline_microusd).encode()))
    return headers


def _cache_status(kind: str, entry: Entry | None) -> str:
    if entry is not None:
        ttl = "" if entry.is_curated else f"; ttl={int(entry.fresh_until - time.time())}"
        return f"sameway; hit{ttl}; detail={kind}"
    if kind == "coalesced":
        return "sameway; fwd=miss; collapsed"
    return f"sameway; fwd={'request' if kind == 'bypass' else 'uri-miss'}"
