"""What is asked of the semantic cache and what it answers, in its process and across the worker's
socket.

Plain msgspec values and their framing: a 4-byte big-endian length, then msgpack. Knows no torch,
FAISS or Redis. Invariant: what a client does not understand closes its connection, never the
worker.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.fingerprint import Partition
from cache.query import Hit, Miss, Neighbourhood, Query
from cache.stored import reader
from cache.verdicts.judges import Judgement

FRAME_BYTES_MAX = 4 << 20
LENGTH_BYTES = 4


class Embedded(msgspec.Struct, frozen=True, array_like=True, tag="embedded"):
    """One unit vector for each text as little-endian float32, and how many tokens each text has."""

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    dims: int


class TooLong(msgspec.Struct, frozen=True, array_like=True, tag="too_long"):
    """Text number `index` does not fit the encoder's window; nothing was embedded. `length` and
    `length_max` count `unit`: tokens, or characters where no token was counted.
    """

    index: int
    length: int
    length_max: int
    unit: str = "tokens"


class WorkerState(StrEnum):
    LOADING = "loading"  # the encoder
    REBUILDING = "rebuilding"  # the index, while lookups are answered from what is there
    READY = "ready"
    AWAY = "away"  # said by the client when there is no worker
    FAILED = "failed"  # the encoder could not be loaded; `detail` says why


class Status(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """The worker's state. `progress` is 0 to 1 of `state`; `lookups` and `batches` count since its
    start.
    """

    state: WorkerState
    progress: float = 0.0
    detail: str = ""
    entries: int = 0
    namespaces: int = 0
    embedder: str = ""
    dims: int = 0
    tokens_max: int = 0
    is_redis_up: bool = False
    lookups: int = 0
    batches: int = 0
    rule: str = ""  # names what the rule looks at; another one learns anew

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


class Answered(msgspec.Struct, frozen=True, array_like=True):
    """An answer as text. `exact` and `created_at` name its entry; an empty `exact`: it has none."""

    exact: bytes
    created_at: float
    text: str


class AskJudge(msgspec.Struct, frozen=True, array_like=True, tag="judge"):
    """Whether a fresh answer says what others of its namespace do."""

    id: int
    partition: Partition
    compat: bytes
    fresh: Answered
    others: tuple[Answered, ...]
    timeout_s: float


class Judged(msgspec.Struct, frozen=True, array_like=True, tag="judged"):
    """The rulings on the others, in order."""

    judgements: tuple[Judgement, ...]


class AskStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    id: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """The client of request `id` does not wait any more."""

    id: int


Ask = AskLookup | AskNear | AskEmbed | AskJudge | AskStatus | Cancel
AnswerPayload = Hit | Miss | Neighbourhood | Embedded | Judged | TooLong | Status | Failed


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The reply to the ask of the same id."""

    id: int
    payload: AnswerPayload


_ENCODER = msgspec.msgpack.Encoder()
_asks: msgspec.msgpack.Decoder[Ask] = msgspec.msgpack.Decoder(Ask)
_read_ask, _read_answer = reader(_asks), reader(msgspec.msgpack.Decoder(Answer))


def frame(message: Ask | Answer) -> bytes:
    data = _ENCODER.encode(message)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_ask(data: bytes) -> Ask:
    """Raises msgspec.DecodeError."""
    return _read_ask(data)


def read_answer(data: bytes) -> Answer:
    """Raises msgspec.DecodeError."""
    return _read_answer(data)
