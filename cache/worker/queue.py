"""The requests that wait in the cache worker, their connections, and how many are answered
together.

Knows the messages, no cache and no encoder. Invariant: no request is answered twice, or after its
client left.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from cache.worker.messages import Answer, AnswerPayload, AskEmbed, AskJudge, AskLookup, AskNear, frame

_UNSENT_BYTES_MAX = 64 << 20


@dataclass(slots=True, eq=False)
class Connection:
    """One client of the worker."""

    writer: asyncio.StreamWriter
    waiting: set[int] = field(default_factory=set)  # ids whose answer is still wanted

    def answer(self, id: int, reply: AnswerPayload) -> None:
        """Send the reply to the ask `id`, unless the client has left."""
        self.waiting.discard(id)
        if self.writer.is_closing():  # before the reader of its asks has seen it; uvloop's transport would raise
            return
        self.writer.write(frame(Answer(id, reply)))
        if self.writer.transport.get_write_buffer_size() > _UNSENT_BYTES_MAX:
            self.writer.transport.abort()  # it asks and does not read


@dataclass(frozen=True, slots=True)
class Job:
    """One ask that takes time. `chars` is the length of a lookup's text."""

    connection: Connection
    ask: AskLookup | AskNear | AskEmbed | AskJudge
    deadline: float  # on the monotonic clock
    chars: int = 0

    def is_wanted(self) -> bool:
        return self.ask.id in self.connection.waiting and time.monotonic() < self.deadline

    def answer(self, reply: AnswerPayload) -> None:
        if self.ask.id in self.connection.waiting:
            self.connection.answer(self.ask.id, reply)


def fitting(lengths: Iterable[int], count_max: int, chars_max: int) -> int:
    """How many of these texts make a batch: one at least."""
    sums = itertools.accumulate(itertools.islice(lengths, count_max))
    return max(1, sum(1 for _ in itertools.takewhile(lambda total: total <= chars_max, sums)))
