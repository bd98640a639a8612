"""`POST /v1/chat/completions`: a raw ASGI endpoint around the pipeline.

Parses and renders, and leaves decisions to the pipeline. Shapes: OpenAI API reference, "Create chat
completion" and "Streaming"; WHATWG server-sent events. Invariants: every request gets one response
and one record; a stream that fails after its first chunk ends with an error event and without
`[DONE]`; the reader of a client that leaves is closed at once.
"""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import msgspec
from msgspec.structs import replace

from cache import Entry, ExactCache
from cache.fingerprint import FIELDS
from gateway.accounts import Identity
from gateway.api import asgi
from gateway.api.endpoint import Call
from gateway.api.headers import EVENT_STREAM, answer_headers, base_headers, cost_header, media_headers
from gateway.api.input_files import NAMES_FILES, with_files
from gateway.api.provider_ids import NamedObjects, apart_from_cache
from gateway.api.spelling import warnings
from gateway.batches.files import Files
from gateway.deployments.alias import Alias
from gateway.journey.bodies import Body, ClientGone
from gateway.journey.flight import Reply
from gateway.journey.shared_stream import Reader
from gateway.journey.storing import chunks_of
from gateway.journey.turn import Caller, Ended, Turn, arrive, read_turn, turn_of
from gateway.pipeline import Pipeline
from gateway.settings import Settings
from gateway.transport.http_server import WHEN_GONE
from gateway.wire.chunks import UNREADABLE, payloads, unfold
from gateway.wire.errors import ApiError, BadRequest, DeadlineExceeded
from gateway.wire.fold import fold
from gateway.wire.forms import Form, FormFiles, boundary_of
from gateway.wire.sse import DONE, frame, frames
from gateway.wire.types import CHAT, IMAGE_EDIT, Chunk, Kind, each_of

SILENCE_S = 15.0
"""The longest silence of a stream to a client: nginx and balancers of clouds end one of a minute, or of half."""
COMMENT = b": ping\n\n"
"""A comment, which clients skip (WHATWG HTML, section 9.2.6)."""

Respond = Callable[[asgi.Scope, asgi.Send], Awaitable[None]]
"""Sends the response to a request."""


class Renderer(Protocol):
    """Renders the answer to one request, in one piece or as events.

    If `is_kept`, the endpoint calls `keep` once the answer is complete, before its last byte
    leaves.
    """

    __slots__ = ()
    is_kept: bool = False
    is_background: bool = False  # it outlives its request
    ping: bytes = COMMENT  # what a silent stream sends next; empty where it would break the answer

    async def keep(self) -> None:
        """Keep the answer."""
        return

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        """The body of a whole answer, from the cached `entry` if given, else from `chunks`."""

    def replay(self, entry: Entry) -> bytes:
        """The whole stream of a cached answer."""

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        """The next chunks of an answer, as events."""

    def end(self) -> bytes:
        """The events after the last chunk."""

    def failed(self, error: ApiError) -> bytes:
        """The event that ends an incomplete stream."""


class AnswerEndpoint:
    """The endpoint for requests of one `kind`, which deployments answer. One instance per worker.

    `body_bytes_max` bounds a request's body. An endpoint with another shape of the same request
    overrides `read` and `operation`, its name in records; an endpoint with another shape of errors
    overrides `send_error`.
    """

    operation = ""
    release: Callable[[str], Awaitable[None]] | None = None  # what a request holds, at its end
    files: Files | None = None  # whose ids a request's content may have
    send_error = staticmethod(asgi.send_error)

    def __init__(self, pipeline: Pipeline, body_bytes_max: int, kind: Kind = CHAT) -> None:
        self._pipeline = pipeline
        self._body_bytes_max = body_bytes_max
        self._kind = kind
        self._objects = NamedObjects(pipeline)

    @property
    def alias(self) -> Alias | None:
        """The endpoint's own alias, for a request; None: the alias that the request names."""
        return None

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        """The turn of a request, and the renderer of its answer. Raises ApiError."""
        turn = read_turn(await self.body(call), call.headers, call.arrival, self._kind, asgi.model_of(call.scope))
        return turn, self.renderer(turn, call)

    def renderer(self, turn: Turn, call: Call) -> Renderer:
        """The renderer of the answer in OpenAI's shape."""
        if self._kind.is_plain:
            return PlainRenderer()
        options = turn.body.get("stream_options")
        is_bare = options is not None and options.get("include_obfuscation") is False
        return (UnpaddedCompletion if is_bare else CompletionRenderer)(self._pipeline.exact, turn.wants_usage)

    async def body(self, call: Call) -> bytes:
        """The body, once no object that it names belongs to another team. Raises ApiError."""
        raw = await call.body.whole(self._body_bytes_max)
        if self.files is not None and NAMES_FILES in raw:
            raw = await with_files(raw, self.files, call.identity.team.id, self._body_bytes_max)
        if self._objects.have_owners:
            await self._objects.check(raw, call.identity.team.id)
        return raw

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        headers = asgi.headers_of(scope)
        caller: Caller | None = scope.get("caller")
        arrival = arrive(self.operation or self._kind.name, headers, caller, self._pipeline.settings.traces)
        identity: Identity | None = None
        turn: Turn | None = None
        ended = Ended()
        watcher = DisconnectWatcher(scope)
        reply: Reply | None = None
        is_apart = False
        early: _EarlyStart | None = None
        try:
            # decision: auth-before-body
            sent = asgi.key_of(headers), scope.get("client")
            identity = caller.identity if caller is not None else await self._pipeline.authenticate(*sent)
            body = self._pipeline.bodies.of(receive, headers, identity)
            turn, renderer = await self.read(Call(identity, arrival, headers, scope, body=body, send=send))
            if doubts := warnings(turn.body, headers, turn.kind):
                send = asgi.with_headers(send, lambda _: doubts)
            if not turn.body.keys() <= FIELDS.keys():
                turn = apart_from_cache(turn, turn.body)
            if renderer.is_background:
                respond_to = await self.begin(turn, renderer, identity)
                is_apart = True
                await respond_to(scope, send)
                return
            answering = self._pipeline.answer(turn, identity, watcher.attend, self.alias, body.taken)
            if turn.is_stream and not turn.kind.is_plain and self._pipeline.settings.is_pinged_early:
                send = early = _EarlyStart(send, renderer, arrival.request_id)
                reply = await early.until(answering)
            else:
                reply = await answering
            if turn.is_stream:
                ended = await self._stream(renderer, reply, watcher, send)
            else:
                await self._whole(renderer, reply, send)
        except (Exception, asyncio.CancelledError) as error:
            begun = early if early is not None and early.is_begun else None
            respond = begun.fail if begun is not None else partial(self.send_error, send, arrival.request_id)
            ended = await asgi.fail(error, arrival.request_id, respond, watcher.note)
        finally:
            watcher.stop()
            reply = reply or watcher.reply
            if turn is not None and turn.upload is not None and not (reply is not None and reply.is_leading):
                turn.upload.parcel.close()  # else the generation does
            if not is_apart:
                self._pipeline.finish(arrival, ended, identity=identity, turn=turn, reply=reply)
                if self.release is not None:
                    await self.release(arrival.request_id)

    async def begin(self, turn: Turn, renderer: Renderer, identity: Identity) -> Respond:
        """Begin an answer in the background; it is recorded at its end. Raises ApiError."""
        raise NotImplementedError

    async def _whole(self, renderer: Renderer, reply: Reply, send: asgi.Send) -> None:
        """Send all chunks at once. Any error is an error response, because no byte has left yet."""
        chunks = await reply.reader.whole() if reply.reader is not None else []
        body = renderer.whole(chunks, reply.shown)
        if renderer.is_kept:
            await renderer.keep()
        first = media_headers(reply.media if reply.turn.kind.is_plain else "")
        status = reply.reader.status if reply.reader is not None else 200
        await asgi.send_whole(send, status, [*first, *answer_headers(reply), *cost_header(reply)], body)

    async def _stream(self, renderer: Renderer, reply: Reply, watcher: "DisconnectWatcher", send: asgi.Send) -> Ended:
        """Send chunks as they arrive, all that are ready in one write.

        An error after the start is an event that ends the stream.
        """
        first = media_headers(reply.media) if reply.turn.kind.is_plain else EVENT_STREAM
        status = reply.reader.status if reply.reader is not None else 200
        start = {"type": "http.response.start", "status": status, "headers": [*first, *answer_headers(reply)]}
        if (reader := reply.reader) is None:
            entry = reply.shown
            assert entry is not None
            body = renderer.replay(entry)
            if renderer.is_kept:
                await renderer.keep()
            await send(start)
            await asgi.send_body(send, body)
            return Ended()
        await send(start)
        watcher.begun()
        try:
            is_last = False
            while not is_last:
                if (batch := await reader.next()) is None:
                    body = renderer.ping
                else:
                    body = renderer.events(batch) if batch else b""
                    if is_last := not batch or reader.is_at_end:
                        body += await _end(renderer)
                if body or is_last:
                    await send({"type": "http.response.body", "body": body, "more_body": not is_last})
                watcher.left_at = time.monotonic()
            return Ended()
        except (Exception, asyncio.CancelledError) as error:

            async def respond(refusal: ApiError) -> None:
                if body := renderer.failed(refusal):  # without its end the connection ends, and it looks cut
                    await send({"type": "http.response.body", "body": body})

            return await asgi.fail(error, reply.turn.arrival.request_id, respond, watcher.note)


class _EarlyStart:
    """`send` for a stream that may begin before its answer does, so that it is never silent for long.

    Its headers then tell nothing of the answer, and a refusal is an event.
    """

    def __init__(self, send: asgi.Send, renderer: Renderer, request_id: str) -> None:
        self._send = send
        self._renderer = renderer
        self._headers = [*EVENT_STREAM, *base_headers(request_id)]
        self.is_begun = False

    async def until(self, answering: Coroutine[Any, Any, Reply]) -> Reply:
        """The reply, once it has begun. Raises what `answering` raises."""
        task = asyncio.ensure_future(answering)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
                if not self.is_begun:
                    await self._send({"type": "http.response.start", "status": 200, "headers": self._headers})
                    self.is_begun = True
                await self._send({"type": "http.response.body", "body": self._renderer.ping, "more_body": True})
            return task.result()
        finally:
            task.cancel()

    async def __call__(self, message: asgi.Message) -> None:
        if not self.is_begun or message["type"] != "http.response.start":
            await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """Send an error as the event that ends the stream."""
        await self._send({"type": "http.response.body", "body": self._renderer.failed(error)})


async def _end(renderer: Renderer) -> bytes:
    """The events after the last chunk; an answer that the renderer keeps is kept first."""
    events = renderer.end()
    if renderer.is_kept:
        await renderer.keep()
    return events


class EventRenderer(Renderer):
    """The base of renderers with typed events: `_take` reads one chunk and emits its events."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._events: list[bytes] = []

    def replay(self, entry: Entry) -> bytes:
        return self.events(chunks_of(entry)) + self.end()

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        """The next chunks of an answer, as events. Raises msgspec.DecodeError."""
        try:
            for payload in payloads(chunks):
                self._take(payload)
        except UNREADABLE as error:
            raise msgspec.DecodeError(str(error)) from None
        return self._taken()

    def end(self) -> bytes:
        raise NotImplementedError

    def _take(self, payload: bytes) -> None:
        raise NotImplementedError

    def _taken(self) -> bytes:
        events, self._events = self._events, []
        return b"".join(events)


def event_of(name: str, fields: dict[str, Any]) -> bytes:
    """Encode a server-sent event with its name and its fields."""
    return framed(name, msgspec.json.encode(fields))


def framed(name: str, data: bytes) -> bytes:
    """A server-sent event of its name and its data, which has one line."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


class CompletionRenderer(Renderer):
    """A `chat.completion`, or its chunks and `[DONE]`. A cached answer is rendered once."""

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

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        return _frames(chunks, self._wants_usage)

    def end(self) -> bytes:
        return DONE

    def failed(self, error: ApiError) -> bytes:
        return frame(error.body())


class UnpaddedCompletion(CompletionRenderer):
    """The same without the padding of OpenAI's chunks, for `stream_options.include_obfuscation: false`."""

    __slots__ = ()

    def replay(self, entry: Entry) -> bytes:
        return _PADDING.sub(b"", super().replay(entry))

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        return _PADDING.sub(b"", super().events(chunks))


_PADDING = re.compile(rb',\s*"obfuscation":\s*"[^"]*"')  # no text in JSON has an unescaped quote


class PlainRenderer(Renderer):
    """A plain answer, with the deployment's bytes. A failed binary answer is cut, for it cannot
    hold an error.
    """

    __slots__ = ("media", "ping")

    def __init__(self) -> None:
        self.media = ""
        self.ping = b""

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        return b"".join([one.data for one in (entry.chunks if entry is not None else chunks)])

    def replay(self, entry: Entry) -> bytes:
        return self.whole((), entry)

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        self.media = self.media or chunks[0].media
        body = self.whole(chunks, None)
        is_between = self.media.startswith("text/event-stream") and body.endswith(b"\n\n")
        self.ping = COMMENT if is_between else b""
        return body

    def end(self) -> bytes:
        return b""

    def failed(self, error: ApiError) -> bytes:
        return frame(error.body()) if self.media.startswith("text/event-stream") else b""


class Uploads(AnswerEndpoint):
    """The endpoint for requests of a `kind` with files in a form; the disk holds the form
    meanwhile.
    """

    def __init__(self, pipeline: Pipeline, settings: Settings, kind: Kind) -> None:
        super().__init__(pipeline, settings.body_bytes_max, kind)
        self._settings = settings

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        boundary = boundary_of(call.headers.get("content-type", ""))
        if not boundary and self._kind is not IMAGE_EDIT:
            raise BadRequest("Expected a multipart/form-data body with a file", code="invalid_type")
        if not boundary:
            return await super().read(call)
        upload, body = await read_form(call.body, boundary, self._settings)
        model = asgi.model_of(call.scope)
        with upload:
            body = body if model is None else {**body, "model": model}
            return turn_of(body, b"", call.headers, call.arrival, self._kind, upload=upload), PlainRenderer()


async def read_form(incoming: Body, boundary: bytes, settings: Settings) -> tuple[FormFiles, dict[str, Any]]:
    """The files of a form, and its fields as a body. The caller closes the files. Raises ApiError."""
    form = Form(boundary, settings.body_bytes_max)
    with FormFiles(settings.data_dir) as upload:
        async for data in incoming.pieces(settings.upload_bytes_max):
            for part, piece in form.read(data):
                await upload.add(part, piece)
        form.check()
        return upload, upload.body(form)


def _folded(entry: Entry) -> bytes:
    return fold(chunks_of(entry))


def _framed(entry: Entry) -> bytes:
    return _frames(chunks_of(entry), wants_usage=False) + DONE


def _framed_with_usage(entry: Entry) -> bytes:
    return _frames(chunks_of(entry), wants_usage=True) + DONE


def _frames(chunks: Sequence[Chunk], wants_usage: bool) -> bytes:
    if chunks and chunks[0].is_whole:  # then it is the only one
        chunks = unfold(chunks[0].data)
        if wants_usage:
            rest = [replace(one, data=one.data[:-1] + _NO_USAGE + b"}") for one in chunks if not one.is_usage_only]
            chunks = [*rest, *(one for one in chunks if one.is_usage_only)]
    if wants_usage:
        return frames(each_of(chunks))
    if True in map(_is_usage_only, chunks):
        chunks = [chunk for chunk in chunks if not chunk.is_usage_only]
    # the gateway asks for usage itself, and OpenAI has the field where a client does
    return frames(each_of(chunks)).replace(_NO_USAGE, b"").replace(b', "usage": null', b"")


_NO_USAGE = b',"usage":null'
_is_usage_only = attrgetter("is_usage_only")


class DisconnectWatcher:
    """Detaches a reader from its flight when the client leaves or its deadline passes, and wakes one whose client
    has heard nothing for long.
    """

    reply: Reply | None = None  # a reply that waits for a flight
    _reader: Reader | None = None
    left_at = 0.0  # the last bytes to the client, by time.monotonic
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, scope: asgi.Scope) -> None:
        self._when_gone = scope.get("extensions", {}).get(WHEN_GONE)

    def attend(self, reply: Reply) -> None:
        """Stop reading the answer of `reply` when its client leaves or its deadline passes."""
        self.reply, self._reader = reply, reply.reader
        if self._when_gone is not None:
            self._when_gone(self._gone)
        remaining_ms = reply.turn.remaining_ms()
        if remaining_ms is not None:
            self._timer = asyncio.get_running_loop().call_later(remaining_ms / 1000.0, self._late)

    def begun(self) -> None:
        """Watch for silences, and no longer for the deadline: the client's read time-out starts again with every byte."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S, self._look)
        self.left_at = time.monotonic()

    def _look(self) -> None:
        left_s = SILENCE_S - (time.monotonic() - self.left_at)
        if left_s <= 0 and self._reader is not None:
            self._reader.wake()
        self._timer = asyncio.get_running_loop().call_later(left_s if left_s > 0 else SILENCE_S, self._look)

    def note(self, ended: Ended) -> None:
        """Record how an incomplete reply ended."""
        if self.reply is not None:
            self.reply.end(ended)

    def _gone(self) -> None:
        self._leave(ClientGone())

    def _late(self) -> None:
        self._leave(DeadlineExceeded("The client's own deadline passed before the answer was there"))

    def _leave(self, reason: Exception) -> None:
        if self._reader is not None:
            self._reader.leave(reason)

    def stop(self) -> None:
        """Stop watching, and close the reader."""
        if self._timer is not None:
            self._timer.cancel()
        if self._when_gone is not None:
            self._when_gone(None)
        if self._reader is not None:
            self._reader.close()
