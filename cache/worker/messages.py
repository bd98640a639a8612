"""What is asked of the cache worker and what it answers.

Plain msgspec values, which travel by `ipc`. Knows no torch, FAISS or Redis.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from cache.entry import CacheError, CacheWorkerUnavailable
from cache.fingerprint import Partition
from cache.query import Neighbourhood, Query
from cache.verdicts.judges import Judgement
from ipc import CallFrame, ReplyFrame, Wire


class Embedded(msgspec.Struct, frozen=True, array_like=True, tag="embedded"):
    """A unit vector for each text, as little-endian float32, and each text's number of tokens."""

    vectors: tuple[bytes, ...]
    tokens: tuple[int, ...]
    dims: int


class TextTooLong(CacheError):
    """The text `index` of a request does not fit the encoder's window: it has `length` of at most
    `length_max` units. The unit is tokens, or characters where the worker counted no tokens.
    """

    def __init__(self, index: int, length: int, length_max: int, unit: str = "tokens") -> None:
        super().__init__(f"text {index} has {length:,} {unit}, the encoder reads at most {length_max:,}")
        self.index = index
        self.length = length
        self.length_max = length_max
        self.unit = unit


class WorkerState(StrEnum):
    LOADING = "loading"  # the encoder
    REBUILDING = "rebuilding"  # the index, while lookups are answered from what is there
    READY = "ready"
    AWAY = "away"  # said by the client when there is no worker
    FAILED = "failed"  # the encoder could not be loaded; `detail` says why


class WorkerStatus(msgspec.Struct, frozen=True, array_like=True, tag="status"):
    """The worker's state. `progress` is the finished share of `state`, 0 to 1. `lookups` and
    `batches` count since the worker's start.
    """

    state: WorkerState
    progress: float = 0.0
    detail: str = ""
    entries: int = 0
    embedder: str = ""
    lookups: int = 0
    batches: int = 0
    rule: str = ""  # names what the rule looks at; another one learns anew
    index: str = ""  # why the vector engine does not answer

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY

    @property
    def size(self) -> str:
        """The number of entries, for people."""
        return "1 prompt" if self.entries == 1 else f"{self.entries:,} prompts"


class AskLookup(msgspec.Struct, frozen=True, array_like=True, tag="lookup"):
    """Asks for the decision on a prompt, with its `count` nearest neighbours."""

    query: Query
    count: int = 0


class AskEmbed(msgspec.Struct, frozen=True, array_like=True, tag="embed"):
    """Asks for the vectors of a few texts."""

    texts: tuple[str, ...]


class AnswerText(msgspec.Struct, frozen=True, array_like=True):
    """An answer as text. `exact` and `created_at` name its entry; an answer without an entry has an
    empty `exact`.
    """

    exact: bytes
    created_at: float
    text: str


class AskJudge(msgspec.Struct, frozen=True, array_like=True, tag="judge"):
    """Asks whether a fresh answer says the same as others of its namespace."""

    partition: Partition
    compat: bytes
    fresh: AnswerText
    others: tuple[AnswerText, ...]


class Judged(msgspec.Struct, frozen=True, array_like=True, tag="judged"):
    """The rulings on the other answers, in order."""

    judgements: tuple[Judgement, ...]


Ask = AskLookup | AskEmbed | AskJudge
AskReply = Neighbourhood | Embedded | Judged | WorkerStatus

WIRE: Wire[Ask, AskReply] = Wire(
    calls=msgspec.msgpack.Decoder(CallFrame[Ask]),
    replies=msgspec.msgpack.Decoder(ReplyFrame[AskReply]),
    errors=(CacheWorkerUnavailable, TextTooLong),
    unsendable=CacheWorkerUnavailable,
    bytes_max=4 << 20,
)
