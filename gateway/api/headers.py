"""The response headers that say where an answer came from, what it cost and what it saved.

Sources: RFC 9211 (Cache-Status), RFC 9111 section 5.1 (Age), W3C Server Timing. Names are lower-case bytes, as ASGI wants them.
Invariant: every header of our own is listed in README, and a test compares.
"""

import time

from cache import Entry, HitKind
from gateway.journey.generation import Answer, Facts
from gateway.journey.turn import Turn

Headers = list[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx in front would hold a stream back until its buffer is full
]


def base_headers(request_id: str) -> Headers:
    """What every response carries."""
    return [(b"x-request-id", request_id.encode())]


def answer_headers(turn: Turn, answer: Answer) -> Headers:
    """What an answer that has begun carries."""
    record = turn.record
    entry, similarity = answer.entry, None
    if answer.reader is not None:
        facts: Facts = answer.reader.facts
        entry, similarity = facts.entry, facts.similarity
    headers = [
        (b"x-request-id", record.request_id.encode()),
        (b"x-sameway-cache", record.cache.encode()),
        (b"x-sameway-backend", record.deployment.encode("latin-1", "replace")),
        (b"cache-status", _cache_status(record.cache, entry).encode()),
        (b"server-timing", f"sameway;dur={turn.elapsed_ms():.2f}".encode()),
    ]
    if similarity is not None:
        headers.append((b"x-sameway-similarity", f"{similarity:.4f}".encode()))
    if entry is not None:
        headers.append((b"age", str(int(entry.age_s(time.time()))).encode()))
        headers.append((b"x-sameway-cost-usd", b"0"))
        headers.append((b"x-sameway-saved-usd", usd(int(entry.labels.get("cost_microusd", 0)))))
    if turn.headers:
        headers += turn.headers.items()
    return headers


def cost_header(answer: Answer) -> Headers:
    """What a whole answer cost, known once it is complete. A stream's headers have left by then: its cost is in the ledger."""
    if answer.reader is None or answer.reader.facts.entry is not None:
        return []
    facts: Facts = answer.reader.facts
    if answer.kind is HitKind.COALESCED:
        return [(b"x-sameway-cost-usd", b"0"), (b"x-sameway-saved-usd", usd(facts.cost_microusd))]
    return [(b"x-sameway-cost-usd", usd(facts.cost_microusd))]


def usd(microusd: int) -> bytes:
    """µUSD as dollars in plain decimal notation."""
    return f"{microusd // 1_000_000}.{microusd % 1_000_000:06d}".encode()


def _cache_status(kind: str, entry: Entry | None) -> str:
    if entry is not None:
        return f"sameway; hit; ttl={int(entry.expires_at - time.time())}; detail={kind}"
    if kind == HitKind.COALESCED:
        return "sameway; fwd=miss; collapsed"
    return f"sameway; fwd={'request' if kind == 'bypass' else 'uri-miss'}"
