"""`POST /v1/chat/completions`: a raw ASGI endpoint around the pipeline.

Knows the wire, not the decisions. Shapes: OpenAI API reference, "Create chat completion" and "Streaming"; WHATWG server-sent
events. Invariants: whatever happens a request gets one response and one record; a stream that fails after its first chunk ends
with an error event and without `[DONE]`; a client that leaves gives its place in the flight back at once.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from cache import Entry, ExactCache
from gateway.api.asgi import (
    ClientGone,
    Receive,
    Scope,
    Send,
    bearer_of,
    failure,
    headers_of,
    read_body,
    send_failure,
    send_whole,
)
from gateway.api.headers import EVENT_STREAM, JSON, answer_headers, cost_header
from gateway.journey.flight import Reader
from gateway.journey.generation import Answer
from gateway.journey.record import Record, new_record
from gateway.journey.storing import chunks_of
from gateway.journey.turn import Turn, read_turn
from gateway.pipeline import Pipeline
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.chunks import unfold
from gateway.wire.errors import ApiError, DeadlineExceeded
from gateway.wire.fold import fold
from gateway.wire.sse import DONE, frame, frames
from gateway.wire.types import CHAT, Chunk


class Form(Protocol):
    """How the answer to one request is told: in one piece, or in events."""

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        """All of an answer, which is `entry` where it was recorded."""

    def replay(self, entry: Entry) -> bytes:
        """The whole stream of a recorded answer."""

    def told(self, chunks: Sequence[Chunk]) -> bytes:
        """What has come of an answer, as events."""

    def end(self) -> bytes:
        """The events after the last chunk."""

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which is not complete."""


class Chat:
    """The endpoint. One instance per worker. Another that answers the same in another form says `route` and `read` anew, one that
    asks for another kind of answer `route` and `kind`."""

    route = CHAT.name
    kind = CHAT

    def __init__(self, pipeline: Pipeline, body_bytes_max: int) -> None:
        self._pipeline = pipeline
        self._body_bytes_max = body_bytes_max

    def read(self, raw: bytes, headers: Mapping[str, str], record: Record) -> tuple[Turn, Form]:
        """What is asked, and how its answer is told. Raises BadRequest naming the field."""
        turn = read_turn(raw, headers, record, self.kind)
        return turn, _Completion(self._pipeline.exact, turn.wants_usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = headers_of(scope)
        record = new_record(self.route)
        turn: Turn | None = None
        answer: Answer | None = None
        watch = _Watch(scope, receive)
        try:
            identity = self._pipeline.authenticate(bearer_of(headers), record)
            turn, form = self.read(await read_body(receive, headers, self._body_bytes_max), headers, record)
            watch.turn = turn
            answer = await self._pipeline.answer(turn, identity, watch.attend)
            if turn.is_stream:
                await self._stream(turn, form, answer, watch, send)
            else:
                await self._whole(turn, form, answer, send)
        except (Exception, asyncio.CancelledError) as error:
            await send_failure(send, error, record)
        finally:
            watch.stop()
            self._pipeline.finish(record, turn, answer)

    async def _whole(self, turn: Turn, form: Form, answer: Answer, send: Send) -> None:
        """All chunks at once. An error anywhere is an error response: nothing has left yet."""
        entry, chunks = answer.entry, list[Chunk]()
        if answer.reader is not None:
            while batch := await answer.reader.next():
                chunks += batch
            entry = answer.reader.facts.entry  # found by meaning
        body = form.whole(chunks, entry)
        await send_whole(send, 200, [JSON, *answer_headers(turn, answer), *cost_header(answer)], body)

    async def _stream(self, turn: Turn, form: Form, answer: Answer, watch: "_Watch", send: Send) -> None:
        """Chunks as they come; all that are ready leave in one send."""
        headers = [*EVENT_STREAM, *answer_headers(turn, answer)]
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        if answer.entry is not None:
            body = form.replay(answer.entry)
            await send(start)
            await send({"type": "http.response.body", "body": body})
            return
        reader = answer.reader
        assert reader is not None
        await send(start)
        watch.first_chunk_left()
        try:
            while batch := await reader.next():
                body = form.told(batch)
                if reader.is_at_end:
                    body += form.end()
                await send({"type": "http.response.body", "body": body, "more_body": not reader.is_at_end})
                if reader.is_at_end:
                    return
            await send({"type": "http.response.body", "body": form.end()})
        except ClientGone:
            raise
        except (Exception, asyncio.CancelledError) as error:
            await send({"type": "http.response.body", "body": form.failed(failure(error, turn.record))})


class _Completion:
    """A `chat.completion`, or its chunks and `[DONE]`. What a recorded answer becomes is made once for all its hits."""

    __slots__ = ("_exact", "_wants_usage")

    def __init__(self, exact: ExactCache, wants_usage: bool) -> None:
        self._exact = exact
        self._wants_usage = wants_usage

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        if entry is None:
            return fold(chunks)
        first = entry.chunks[0]
        return first.data if first.is_whole else self._exact.derived(entry, "whole", _folded)

    def replay(self, entry: Entry) -> bytes:
        name, make = ("events and usage", _framed_with_usage) if self._wants_usage else ("events", _framed)
        return self._exact.derived(entry, name, make)

    def told(self, chunks: Sequence[Chunk]) -> bytes:
        return _frames(chunks, self._wants_usage)

    def end(self) -> bytes:
        return DONE

    def failed(self, error: ApiError) -> bytes:
        return frame(error.body())


def _folded(entry: Entry) -> bytes:
    return fold(chunks_of(entry))


def _framed(entry: Entry) -> bytes:
    return _frames(chunks_of(entry), wants_usage=False) + DONE


def _framed_with_usage(entry: Entry) -> bytes:
    return _frames(chunks_of(entry), wants_usage=True) + DONE


def _frames(chunks: Sequence[Chunk], wants_usage: bool) -> bytes:
    if chunks and chunks[0].is_whole:  # then it is the only one
        chunks = unfold(chunks[0].data)
    payloads: list[bytes] = []
    for chunk in chunks:
        if wants_usage or not chunk.is_usage_only:
            payloads += chunk.each()
    return frames(payloads)


class _Watch:
    """Takes a reader out of its flight when the client leaves or its deadline passes."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self.turn: Turn | None = None
        self._when_gone = scope.get("extensions", {}).get(WHEN_GONE)
        self._receive = receive
        self._reader: Reader | None = None
        self._task: asyncio.Task[None] | None = None  # under a server that can only be asked
        self._timer: asyncio.TimerHandle | None = None

    def attend(self, reader: Reader) -> None:
        self._reader = reader
        if self._when_gone is not None:
            self._when_gone(self._gone)
        else:
            self._task = asyncio.create_task(self._until_gone())
        remaining_ms = self.turn.remaining_ms() if self.turn is not None else None
        if remaining_ms is not None:
            late = DeadlineExceeded("The client's own deadline passed before the answer was there")
            self._timer = asyncio.get_running_loop().call_later(remaining_ms / 1000.0, reader.leave, late)

    def first_chunk_left(self) -> None:
        """A read time-out starts anew with every byte: from here on the client sees for itself."""
        if self._timer is not None:
            self._timer.cancel()

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            continue
        self._gone()

    def _gone(self) -> None:
        if self._reader is not None:
            self._reader.leave(ClientGone())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        elif self._when_gone is not None:
            self._when_gone(None)
        if self._reader is not None:
            self._reader.close()
