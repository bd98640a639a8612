"""What is asked of the semantic cache and what it answers, in its process and across the worker's socket.

Plain msgspec values and their framing: a 4-byte big-endian length, then msgpack. Knows no torch, FAISS or Redis. Invariant:
what a client does not understand closes its connection, never the worker.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.fingerprint import Partition

FRAME_BYTES_MAX = 32 << 20
LENGTH_BYTES = 4


class Query(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to look up by meaning. `error_max` tightens the configured bound, as a share of requests."""

    partition: Partition
    compat: bytes
    text: str
    error_max: float | None = None


class MissReason(StrEnum):
    """Why the semantic cache did not answer; counted by this name."""

    EMPTY = "empty"  # nothing is cached for this partition and compat
    TOO_LONG = "too_long"  # the prompt does not fit the encoder's window
    FAR = "far"  # the nearest entry is not similar enough
    NUMBERS = "numbers"  # near, but numbers, dates or units differ
    POLARITY = "polarity"  # near, but one negates, or turns on what the other turns off
    NAMES = "names"  # near, but names, identifiers or quoted strings differ
    DIRECTION = "direction"  # near, but from and to are swapped
    FORM = "form"  # near, but another language, format, length or kind of answer is asked for
    WORDS = "words"  # near, but words that carry the question differ
    UNSURE = "unsure"  # near, but too likely to be wrong for the error bound
    AUDIT = "audit"  # would be served, and is generated to see whether that would be right
    STRICT = "strict"  # near, but the error bound asked for is stricter than anything measured
    TIME = "time"  # asks about now, and the answer was not given now
    LOADING = "loading"  # the encoder is not ready
    TIMEOUT = "timeout"  # the worker did not answer in time
    UNAVAILABLE = "unavailable"  # the worker is away


class Near(msgspec.Struct, frozen=True, array_like=True):
    """A cached prompt of the same partition and compat. `similarity` is the cosine; `reason` is why it may not be served."""

    similarity: float
    text: str
    exact: bytes
    reason: MissReason | None = None


class Hit(msgspec.Struct, frozen=True, array_like=True, tag="hit"):
    """Entry `exact` answers the prompt; it was stored for `text`."""

    exact: bytes
    similarity: float
    text: str


class Miss(msgspec.Struct, frozen=True, array_like=True, tag="miss"):
    """Nothing may be served; `nearest` is what came closest."""

    reason: MissReason
    nearest: Near | None = None


class Neighbourhood(msgspec.Struct, frozen=True, array_like=True, tag="near"):
    """The decision for a prompt and its neighbours, the nearest first."""

    decision: Hit | Miss
    neighbours: tuple[Near, ...]


class Embedded(msgspec.Struct, frozen=True, array_like=True, tag="embedded"):
    """One unit vector for each text as little-endian float32, and how many tokens each text has."""

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    dims: int


class TooLong(msgspec.Struct, frozen=True, array_like=True, tag="too_long"):
    """Text number `index` does not fit the encoder's window; nothing was embedded."""

    index: int
    tokens: int
    tokens_max: int


class WorkerState(StrEnum):
    LOADING = "loading"  # the encoder
    REBUILDING = "rebuilding"  # the index, while lookups are answered from what is there
    READY = "ready"
    AWAY = "away"  # said by the client when there is no worker
    FAILED = "failed"  # the encoder could not be loaded; `detail` says why


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """What the worker is doing. `progress` is 0 to 1 of `state`; `lookups` and `batches` count since its start."""

    state: WorkerState
    progress: float = 0.0
    detail: str = ""
    entries: int = 0
    namespaces: int = 0
    embedder: str = ""
    dims: int = 0
    tokens_max: int = 0
    index_bytes: int = 0
    is_redis_up: bool = False
    lookups: int = 0
    batches: int = 0

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker could not do it: `detail` is for people."""

    detail: str


class AskLookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    id: int
    query: Query
    timeout_s: float


class AskNear(msgspec.Struct, frozen=True, array_like=True, tag="near"):
    id: int
    query: Query
    count: int
    timeout_s: float


class AskEmbed(msgspec.Struct, frozen=True, array_like=True, tag="embed"):
    id: int
    texts: tuple[str, ...]
    timeout_s: float


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    id: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Whoever asked `id` does not wait any more."""

    id: int


Ask = AskLookup | AskNear | AskEmbed | AskStatus | Cancel
Reply = Hit | Miss | Neighbourhood | Embedded | TooLong | Status | Failed


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The reply to the ask of the same id."""

    id: int
    reply: Reply


_ENCODER = msgspec.msgpack.Encoder()
_ASKS: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def frame(message: Ask | Answer) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_ask(data: bytes) -> Ask:
    """Raises msgspec.DecodeError."""
    return _ASKS.decode(data)


def read_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _ANSWERS.decode(data)
