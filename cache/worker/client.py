"""The gateway's end of the cache worker's socket.

Knows no torch, FAISS or Redis. Runs on one event loop, multiplexes all requests over one connection
and reconnects by itself. Invariants: a lookup never raises and never outlives its time-out: without
the worker it is a miss with that reason; a request whose caller has gone is cancelled in the
worker.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cache.entry import CacheError, CacheWorkerUnavailable
from cache.fingerprint import Partition
from cache.query import Hit, Miss, MissReason, Neighbourhood, Query
from cache.verdicts.judges import Judgement
from cache.worker import messages as wire
from cache.worker.queue import EMBED_CHARS, EMBED_TEXTS, fitting

_RECONNECT_S = (0.05, 0.1, 0.25, 0.5, 1.0)
_EMBED_TIMEOUT_S = 60.0
_EMBED_CHARS_MAX = 1 << 18  # of one text: no encoder's window holds a longer one
_NEAR_TIMEOUT_S = 5.0
_JUDGE_TIMEOUT_S = 10.0

T = TypeVar("T")


class TextTooLong(CacheError):
    """A text does not fit the encoder's window: `index` in the request, `length` of at most
    `length_max`, which count `unit`.
    """

    def __init__(self, index: int, length: int, length_max: int, unit: str) -> None:
        super().__init__(f"text {index} has {length:,} {unit}, the encoder reads at most {length_max:,}")
        self.index = index
        self.length = length
        self.length_max = length_max
        self.unit = unit


class SemanticClient:
    """Ask the worker at `socket_path`. `timeout_s` bounds a lookup. Use as an async context
    manager, or `start` and `aclose`.
    """

    def __init__(self, socket_path: Path | str, timeout_s: float = 0.5) -> None:
        self._path = str(socket_path)
        self._timeout_s = timeout_s
        self._ids = itertools.count(1)
        # None: the worker went away; a future that had an exception would be in a cycle with its frames
        self._waiting: dict[int, asyncio.Future[wire.AnswerPayload | None]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._link: asyncio.Task[None] | None = None
        # why no lookup should wait: no answer has come since
        self._silent_for: MissReason | None = MissReason.LOADING

    def start(self) -> None:
        """Begin to connect, and keep connecting, in the background. Needs a running loop."""
        if self._link is None:
            self._link = asyncio.create_task(self._keep_connected(), name="cache worker link")

    async def aclose(self) -> None:
        if self._link is not None:
            self._link.cancel()
            await asyncio.gather(self._link, return_exceptions=True)
            self._link = None

    async def __aenter__(self) -> SemanticClient:
        self.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    @property
    def is_connected(self) -> bool:
        return self._writer is not None

    async def lookup(self, query: Query, timeout_s: float | None = None) -> Hit | Miss:
        """The decision on a prompt. Without a worker, or in time, it is a Miss with UNAVAILABLE,
        LOADING or TIMEOUT.

        While the worker is silent (its imports hold it up, or one lookup was not answered in time)
        no other lookup waits for it. `timeout_s` may only shorten the client's.
        """
        timeout_s = min(self._timeout_s, timeout_s) if timeout_s is not None else self._timeout_s
        if self._writer is not None and self._silent_for is not None:
            return Miss(self._silent_for)
        try:
            reply = await self._ask(wire.AskLookup(next(self._ids), query, timeout_s), timeout_s)
        except TimeoutError:
            self._probe(MissReason.TIMEOUT)
            return Miss(MissReason.TIMEOUT)
        except CacheWorkerUnavailable:
            return Miss(MissReason.UNAVAILABLE)
        return reply if isinstance(reply, Hit | Miss) else Miss(MissReason.UNAVAILABLE)

    async def near(self, query: Query, count: int = 8) -> Neighbourhood:
        """The decision for a prompt and its neighbours in the same partition and compat: to be
        seen, not counted. Raises CacheWorkerUnavailable.
        """
        shown = msgspec.structs.replace(query, is_try=True)
        ask = wire.AskNear(next(self._ids), shown, count, _NEAR_TIMEOUT_S)
        return _expect(Neighbourhood, await self._ask_or_raise(ask, _NEAR_TIMEOUT_S))

    async def embed(self, texts: Sequence[str], timeout_s: float = _EMBED_TIMEOUT_S) -> AsyncIterator[wire.Embedded]:
        """Unit vectors and token counts, in order, a few texts at a time: lookups and other
        callers' texts come in between. `timeout_s` bounds the wait for each few. Raises
        TextTooLong, or CacheWorkerUnavailable.
        """
        for place, text in enumerate(texts):
            if len(text) > _EMBED_CHARS_MAX:
                raise TextTooLong(place, len(text), _EMBED_CHARS_MAX, "characters")
        start = 0
        while start < len(texts):
            count = fitting(map(len, itertools.islice(texts, start, None)), EMBED_TEXTS, EMBED_CHARS)
            some = tuple(texts[start : start + count])
            reply = await self._ask_or_raise(wire.AskEmbed(next(self._ids), some, timeout_s), timeout_s)
            if isinstance(reply, wire.TooLong):
                raise TextTooLong(start + reply.index, reply.length, reply.length_max, reply.unit)
            yield _expect(wire.Embedded, reply)
            start += count

    async def judge(
        self, partition: Partition, compat: bytes, fresh: wire.Answered, others: Sequence[wire.Answered]
    ) -> list[Judgement]:
        """Whether a fresh answer says what each of `others` does, in order; they are of this
        partition and compat. The fresh one is kept to compare later ones with, as far as it is
        stored. Raises CacheWorkerUnavailable, also where the worker has no time for it.
        """
        ask = wire.AskJudge(
            id=next(self._ids),
            partition=partition,
            compat=compat,
            fresh=fresh,
            others=tuple(others),
            timeout_s=_JUDGE_TIMEOUT_S,
        )
        return list(_expect(wire.Judged, await self._ask_or_raise(ask, _JUDGE_TIMEOUT_S)).judgements)

    async def status(self) -> wire.Status:
        """What the worker is doing; AWAY where there is none. Never raises."""
        try:
            reply = await self._ask(wire.AskStatus(next(self._ids)), _NEAR_TIMEOUT_S)
        except (CacheWorkerUnavailable, TimeoutError):
            return wire.Status(wire.WorkerState.AWAY)
        return reply if isinstance(reply, wire.Status) else wire.Status(wire.WorkerState.AWAY)

    async def _ask_or_raise(
        self, ask: wire.AskNear | wire.AskEmbed | wire.AskJudge, timeout_s: float
    ) -> wire.AnswerPayload:
        try:
            return await self._ask(ask, timeout_s)
        except TimeoutError:
            raise CacheWorkerUnavailable(f"the cache worker did not answer within {timeout_s:g} s") from None

    async def _ask(self, ask: wire.Ask, timeout_s: float) -> wire.AnswerPayload:
        """Raises CacheWorkerUnavailable at once where there is no connection, TimeoutError where no
        answer came.
        """
        data = wire.frame(ask)
        if len(data) > wire.FRAME_BYTES_MAX:
            raise CacheWorkerUnavailable("too much for one request")
        if not self._write(data):
            raise CacheWorkerUnavailable("the cache worker is away")
        future: asyncio.Future[wire.AnswerPayload | None] = asyncio.get_running_loop().create_future()
        self._waiting[ask.id] = future
        try:
            async with asyncio.timeout(timeout_s):
                reply = await future
        finally:
            if self._waiting.pop(ask.id, None) is not None and not _is_answered(future):
                self._write(wire.frame(wire.Cancel(ask.id)))
        if reply is None:
            raise CacheWorkerUnavailable("the cache worker went away")
        return reply

    def _probe(self, silence: MissReason) -> None:
        """Ask for a sign of life; whatever comes ends the silence."""
        self._silent_for = silence
        self._write(wire.frame(wire.AskStatus(next(self._ids))))

    def _write(self, data: bytes) -> bool:
        """Whether there is a connection to write to.

        Its end is seen here before `_read` ends, and uvloop's transport raises for a write after
        it.
        """
        if self._writer is None or self._writer.is_closing():
            return False
        self._writer.write(data)
        return True

    async def _keep_connected(self) -> None:
        attempt = 0
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                attempt = 0
                self._probe(MissReason.LOADING)
                await self._read(reader)
            except (OSError, asyncio.IncompleteReadError, msgspec.DecodeError):
                # away, gone or broken: waiting requests fail below, and the next attempt follows
                pass
            finally:
                self._lose()
            await asyncio.sleep(_RECONNECT_S[min(attempt, len(_RECONNECT_S) - 1)])
            attempt += 1

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while True:
            length = int.from_bytes(await reader.readexactly(wire.LENGTH_BYTES), "big")
            answer = wire.read_answer(await reader.readexactly(length))
            self._silent_for = None
            future = self._waiting.get(answer.id)
            if future is not None and not future.done():
                future.set_result(answer.payload)

    def _lose(self) -> None:
        """Close the connection and fail every waiting request."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.close()
        for future in self._waiting.values():
            if not future.done():
                future.set_result(None)
        self._waiting.clear()


def _is_answered(future: asyncio.Future[Any]) -> bool:
    return future.done() and not future.cancelled()


def _expect(kind: type[T], reply: wire.AnswerPayload) -> T:
    if isinstance(reply, kind):
        return reply
    raise CacheWorkerUnavailable(
        reply.detail if isinstance(reply, wire.Failed) else f"unexpected {type(reply).__name__}"
    )
