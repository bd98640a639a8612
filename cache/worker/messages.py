"""What is asked of the semantic cache and what it answers, in its process and across the worker's socket.

Plain msgspec values and their framing: a 4-byte big-endian length, then msgpack. Knows no torch, FAISS or Redis. Invariant:
what a client does not understand closes its connection, never the worker.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.fingerprint import Partition
from cache.verdicts.judges import Opinion

FRAME_BYTES_MAX = 32 << 20
LENGTH_BYTES = 4


class Query(msgspec.Struct, frozen=True, array_like=True):
    """One prompt to look up by meaning. `error_max` tightens the configured bound, as a share of requests; where it was tightened
    because too many answers were wrong, `untightened` is what it would have been. `is_try`: somebody only wants to see the
    decision; nothing is audited or counted."""

    partition: Partition
    compat: bytes
    text: str
    error_max: float | None = None
    untightened: float | None = None
    is_try: bool = False


class Trial(msgspec.Struct, frozen=True, array_like=True):
    """What a decision was made of, for the verdict that may follow. `ranked` has the entries that a fresh answer should be compared
    with, the likeliest first, each of another group; `evidence` (float32, little-endian) and `p` are of the first, and empty evidence
    means that a veto decided. `chance` is with which probability a request like this one is generated: 1 where it was not to
    be served. `rule` names whose evidence it is."""

    ranked: tuple[bytes, ...]
    evidence: bytes
    p: float
    chance: float
    rule: bytes


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
    SUSPENDED = "suspended"  # would be served, but its answer was found wrong and nobody has cleared it
    TIGHTENED = "tightened"  # would be served, but too many answers were wrong lately: the bound has tightened itself
    LOADING = "loading"  # the encoder is not ready
    TIMEOUT = "timeout"  # the worker did not answer in time
    UNAVAILABLE = "unavailable"  # the worker is away


class Near(msgspec.Struct, frozen=True, array_like=True):
    """A cached prompt of the same partition and compat. `similarity` is the cosine; `reason` is why it may not be served. `group`
    names the prompts with an equal answer, of which there are `keys`; `right` and `wrong` are the verdicts on serving that answer."""

    similarity: float
    text: str
    exact: bytes
    reason: MissReason | None = None
    group: bytes = b""
    keys: int = 1
    right: float = 0.0
    wrong: float = 0.0


class Hit(msgspec.Struct, frozen=True, array_like=True, tag="hit"):
    """Entry `exact` answers the prompt; it was stored for `text`."""

    exact: bytes
    similarity: float
    text: str
    trial: Trial | None = None


class Miss(msgspec.Struct, frozen=True, array_like=True, tag="miss"):
    """Nothing may be served; `nearest` is what came closest."""

    reason: MissReason
    nearest: Near | None = None
    trial: Trial | None = None


class Neighbourhood(msgspec.Struct, frozen=True, array_like=True, tag="near"):
    """The decision for a prompt and its neighbours, the nearest first. `p_min` is the p that would be served, None while too few
    verdicts have come to say; `verdicts` is how many have."""

    decision: Hit | Miss
    neighbours: tuple[Near, ...]
    p_min: float | None = None
    verdicts: int = 0


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

    @property
    def size(self) -> str:
        """How many entries, for people."""
        return "1 prompt" if self.entries == 1 else f"{self.entries:,} prompts"


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


class AskAgree(msgspec.Struct, frozen=True, array_like=True, tag="agree"):
    """Whether two short answers state the same."""

    id: int
    fresh: str
    cached: str
    timeout_s: float


class Agreed(msgspec.Struct, frozen=True, array_like=True, tag="agreed"):
    opinion: Opinion


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    id: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Whoever asked `id` does not wait any more."""

    id: int


Ask = AskLookup | AskNear | AskEmbed | AskAgree | AskStatus | Cancel
Reply = Hit | Miss | Neighbourhood | Embedded | Agreed | TooLong | Status | Failed


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
