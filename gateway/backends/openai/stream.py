"""One answer of an OpenAI-compatible server: reads its bytes, checks its end, keeps its time
limits.

Knows no backend: its arguments are functions that admit and send its request. Invariants: those of
`base` (a stream ends after its finish or raises), and a connection returns to the pool only after
the answer's last byte. A reader that leaves an answer early closes its connection, so that the
server stops generating.

    NEW ──admit, send──> WAITING ──first chunk──> STREAMING ──last finish──> TAIL
     └─────────────────────┴────────────────────────┴────────────────────────┴──> OVER

WAITING lasts at most `ttft_timeout_s`, connecting included; for a whole answer, which arrives after
all of its tokens, `whole_timeout_s`. A whole answer's first byte other than white space, which some
servers send as keep-alive, ends WAITING. STREAMING bounds silence by `idle_timeout_s`; any byte
ends a silence, also a keep-alive comment. The stream gives up a dripping server after
`_DRIP_SILENCES` times that limit: if no event came, or if a whole answer is slower than
`_WHOLE_BYTES_PER_S`. TAIL waits only for the usage chunk: the answer is complete without it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from enum import Enum, auto
from typing import Any, Protocol

import msgspec

from gateway.backends.base import BackendBroken, BackendError, BackendRequest, BackendTimeout, Passage
from gateway.backends.openai.errors import Translator
from gateway.exceptions import fresh
from gateway.transport.http_client import Exchange, NotAsked, TransportError
from gateway.wire import plain
from gateway.wire.chunks import (
    NO_USAGE,
    DeltaTemplate,
    FinishTracker,
    ParsedAnswer,
    decoded,
    mended,
    to_chunk,
    with_pairs,
)
from gateway.wire.reader import PieceReader
from gateway.wire.sse import PayloadTooLarge, Splitter, events_in
from gateway.wire.types import TOLD, Chunk
from policies import Usage
from policies.durations import duration_s

_ERROR_BYTES_MAX = 64 << 10
_WHOLE_BYTES_MAX = 64 << 20
_WHOLE_BYTES_PER_S = 500.0
_DONE = b"[DONE]"
_BODIES = (b"{", b"[", b"<")  # with which JSON and pages begin, and no field of an event
_BEFORE_BODIES = b"\xef\xbb\xbf \t\r\n"
_DRIP_SILENCES = 10.0
_LATE_SHARE = 0.1
_LAST_EVENTS = (".done", ".completed", "message_stop")
_LAST_OF_RESPONSES = ("response.completed", "response.incomplete")  # others of that name are of its parts
_FIRST_OF_RESPONSES = ("response.created", "response.queued", "response.in_progress")  # no answer has begun


class State(Enum):
    """The states of an answer, which the module's head draws."""

    NEW = auto()
    WAITING = auto()
    STREAMING = auto()
    TAIL = auto()
    OVER = auto()


_NEW, _WAITING, _STREAMING, _TAIL, _OVER = State  # an attribute of an enum costs a search


class EventReader(Protocol):
    """Translates one answer of a server with another API into the data of OpenAI's events."""

    def chunks(self, payloads: Sequence[bytes]) -> list[bytes]:
        """The data of OpenAI's events for the data of the server's events."""

    def whole(self, body: bytes) -> list[bytes]:
        """The data of OpenAI's events for a whole answer; `body` alone if it holds no answer."""

    def end(self) -> list[bytes]:
        """The data that is left at the end of the server's events."""


class OpenAIStream(msgspec.Struct, eq=False):
    """One answer; see `base.ChunkStream`. One reader at a time; `aclose` from anywhere.

    `admit` counts a request and builds its exchange; `send` sends the exchange and waits for the
    response's head; `on_end` is called once after a successful `admit`. `tail_timeout_s` of silence
    after the last finish ends the answer.
    """

    request: BackendRequest
    admit: Callable[[BackendRequest], Exchange]
    send: Callable[[Exchange], Awaitable[None]]
    translate: Translator
    on_end: Callable[[], None]
    is_asked_again: Callable[[BackendError], bool]
    tail_timeout_s: float
    reader: EventReader | None = None
    _passing: _Passing | None = None  # of a plain answer that is no JSON
    _state: State = _NEW
    _ready: list[Chunk] = []
    _answer: PieceReader = msgspec.field(default_factory=PieceReader)
    _finishes: FinishTracker = msgspec.field(default_factory=FinishTracker)
    _unanswering: bytes = b""  # a piece that is no part of an answer: it may say why none comes
    _is_body: bool | None = None  # whether the bytes are one body, and no events; None before the first
    _splitter: Splitter = msgspec.field(default_factory=Splitter)
    _template: DeltaTemplate | None = None
    _templates_left: int = DeltaTemplate.PER_ANSWER_MAX
    _exchange: Exchange | None = None
    _timer: asyncio.TimerHandle | None = None
    _error: BackendError | None = None  # raised after the chunks that came before it
    _silence: str = ""  # set where the timer closed the exchange
    _reading_since: float | None = None  # the server is silent only while this stream reads

    def __aiter__(self) -> OpenAIStream:
        return self

    async def __anext__(self) -> list[Chunk]:
        if not self._ready and self._state is not _OVER:
            try:
                if self._state is _NEW:
                    await self._begin()
                else:
                    await self._fill()
            except BaseException:
                self._error = None
                self._leave()
                raise
        if self._ready:
            ready, self._ready = self._ready, []
            return ready
        if self._error is not None:
            try:
                raise fresh(self._error)
            finally:
                self._error = None
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Drop the answer; the connection of an unfinished answer is closed at once."""
        self._ready.clear()
        if self._state is not _OVER:
            self._error = BackendBroken("The answer was given up")
            self._leave()

    async def _begin(self) -> None:
        """Connect, send, and wait for the first chunk."""
        request = self.request
        self._answer.key, self._answer.tools = request.request_id.removeprefix("req_"), request.body.get("tools")
        self._finishes = FinishTracker(request.choices, request.prompts)
        while await self._refused(exchange := self._admitted()):  # with another key it begins anew
            exchange.release()
            self.on_end()
            self._state = _NEW
        passage = request.passage
        kind = exchange.headers.get(b"content-type", b"").lower()
        is_json_or_page = kind.startswith((b"application/json", b"text/html"))
        if request.kind.is_plain and (passage is not None or not is_json_or_page):
            self._passing = _Passing(kind, exchange.status, passage)
        is_stream = request.is_stream or kind.startswith(b"text/event-stream")
        if self._passing is not None or (is_stream and not is_json_or_page):
            await self._fill()
        else:
            self._take_whole(await self._body(exchange, _WHOLE_BYTES_MAX))
        self._reading_since = None
        if self._state is _WAITING:
            self._state = _STREAMING
        if self._state is not _OVER:
            self._arm(request.idle_timeout_s)

    def _admitted(self) -> Exchange:
        exchange = self._exchange = self.admit(self.request)
        if exchange.pieces is not None:
            exchange.pieces = self._noted(exchange.pieces)
        self._state = _WAITING
        return exchange

    async def _refused(self, exchange: Exchange) -> bool:
        """Send, and wait for the response's head. Returns whether its refusal concerns a key, and another
        one is there; raises other refusals.
        """
        self._reading_since = asyncio.get_running_loop().time()
        self._arm(self._first_within_s)
        try:
            await self.send(exchange)
        except TransportError as error:
            # no variable holds the error: with this frame it would be a cycle
            is_own = isinstance(error, NotAsked)
            raise (
                (self._error and fresh(self._error)) or (not is_own and self._late()) or self.translate.unsent(error)
            ) from None
        passage = self.request.passage
        if exchange.status // 100 != 2 or (exchange.status == 204 and passage is None):
            refused = await self._body(exchange, _ERROR_BYTES_MAX, is_cut=True)
            failure = self.translate.refused(exchange, refused, is_passage=passage is not None)
            if not self.is_asked_again(failure):
                raise fresh(failure)  # this frame holds the one that was kept
            return True
        return False

    async def _noted(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield the pieces of a long body; each piece that the server takes ends its silence."""
        async for piece in pieces:
            self._reading_since = asyncio.get_running_loop().time()
            yield piece

    async def _body(self, exchange: Exchange, size_bytes_max: int, is_cut: bool = False) -> bytes:
        """The whole body; with `is_cut`, the beginning of a body that is too long or broke off."""
        parts: list[bytes] = []
        size_bytes = 0
        loop, begun_at = asyncio.get_running_loop(), 0.0
        try:
            while part := await exchange.read():
                if not exchange.is_complete:
                    now = loop.time()
                    if self._state is _WAITING and not part.isspace():
                        self._state, begun_at = _STREAMING, now
                        self._arm(self.request.idle_timeout_s)
                    if self._state is _STREAMING:
                        self._reading_since = now
                        patience_s = _DRIP_SILENCES * self.request.idle_timeout_s + size_bytes / _WHOLE_BYTES_PER_S
                        if now - begun_at > patience_s:
                            raise _dripped(now - begun_at)
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > size_bytes_max:
                    if is_cut:
                        break
                    raise BackendBroken("The deployment's answer is too long", detail=f"over {size_bytes_max} bytes")
                if exchange.is_complete:
                    break
        except TransportError as error:
            if self._error is not None:  # `aclose` was called
                raise fresh(self._error) from None
            if not is_cut:
                raise self._late() or self.translate.cut(error) from None
        return b"".join(parts)

    def _take_whole(self, body: bytes) -> None:
        if self.reader is not None and (events := self.reader.whole(body)) != [body]:
            self._take_events(events)
            self._mark(body, 0)
            return
        is_plain = self.request.kind.is_plain
        try:
            body, answer = mended(body) if is_plain else self._answer.whole(body)
        except msgspec.DecodeError as error:
            if is_plain or not (events := events_in(body)):
                raise self.translate.not_json("answer", body, error) from None
            self._take_all(events)
            if self._state is not _OVER:
                self._at_end()
            return
        if (answer.error or answer.object == "error") and (failure := self._failure(body, answer)) is not None:
            raise fresh(failure)  # a frame that held its own error would not be freed
        if is_plain:
            self._ready.append(plain.chunk_of(body))
            self._finish()
            return
        self._finishes.add(answer)
        if self._finishes.failed_reason or not self._finishes.is_finished:
            self._unanswering = body
            raise self._unfinished()
        self._ready.append(to_chunk(body, answer, is_whole=True))
        self._finish()

    def _failure(self, data: bytes, answer: ParsedAnswer) -> BackendError | None:
        """The error that a piece or a whole answer with an error tells of; None if it tells of none."""
        if answer.object == "error" or not answer.choices:
            return self.translate.failed(data)
        return self.translate.in_band(msgspec.json.encode({"error": answer.error}))

    async def _fill(self) -> None:
        """Read until a chunk, an error or the end; takes all events of each read."""
        exchange = self._exchange
        assert exchange is not None
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self._ready and self._state is not _OVER:
            if self._state is _STREAMING and (self._finishes.has_any or self._passing) and self._is_complete:
                self._state = _TAIL
                self._arm(min(self.tail_timeout_s, self.request.idle_timeout_s))
            if self._state is not _WAITING:
                self._reading_since = loop.time()
                if self._reading_since - since > _DRIP_SILENCES * self.request.idle_timeout_s:
                    self._cut(_dripped(self._reading_since - since))  # bytes came, but no event
                    break
            try:
                data = await exchange.read()
                if data and self._passing is not None:
                    self._take_passing(self._passing, data)
                elif data:
                    if self._is_body is None and (first := data.lstrip(_BEFORE_BODIES)[:1]):
                        self._is_body = first in _BODIES
                    if self._is_body:  # whatever its type says
                        self._take_whole(data + await self._body(exchange, _WHOLE_BYTES_MAX))
                    else:
                        self._take_all(self._splitter.feed(data))
                else:
                    self._at_end()
            except TransportError as error:
                if self._state is not _OVER:  # else `aclose` closed it
                    self._cut(self._late() or self.translate.cut(error))
            except PayloadTooLarge as error:
                self._fail(BackendBroken("The deployment's answer is too long", detail=str(error)))
            finally:
                if self._state is not _WAITING:
                    self._reading_since = None

    def _take_passing(self, passing: _Passing, data: bytes) -> None:
        """Pass bytes on unchanged; an event stream's leave event by event, each once complete."""
        has_content = not passing.is_events or self.request.passage is not None
        passing.keep(data)
        for payload in self._splitter.feed(data) if passing.is_events else ():
            try:
                event = passing.read(payload)
            except msgspec.DecodeError:  # another server's
                passing.has_ended = passing.has_ended or payload == b"[DONE]"
                has_content = True
                continue
            if event.error or event.type in ("error", "response.failed"):
                error = event.response.get("error") if isinstance(event.response, dict) else event.error
                self._fail(self.translate.failed(msgspec.json.encode({"error": error}) if error else payload))
                return
            has_content = has_content or event.type not in _FIRST_OF_RESPONSES
        self._ready.append(Chunk(data, has_content=has_content, media=passing.media, status=passing.status))

    def _take_all(self, payloads: Sequence[bytes]) -> None:
        """Take the events of one read; each chunk of a translated one has what it came from."""
        if self.reader is None:
            self._take_events(payloads)
            return
        for payload in payloads:
            if self._state is not _OVER:
                position = len(self._ready)
                self._take_events(self.reader.chunks([payload]))
                self._mark(payload, position)

    def _mark(self, native: bytes, position: int) -> None:
        """Note that the chunks from `position` on came as `native`: one line of valid JSON."""
        native = with_pairs(native).replace(b"\n", b" ")
        if not native.startswith(b"{"):  # no event: another API's end
            return
        if position == len(self._ready) and self._error is None:
            self._ready.append(Chunk(b"", native=native))
        for place in range(position, len(self._ready)):
            self._ready[place] = msgspec.structs.replace(self._ready[place], native=native)
            native = TOLD

    def _take_events(self, payloads: Sequence[bytes]) -> None:
        """Take events in OpenAI's shape; a run of events that differ only in text becomes one
        chunk.
        """
        if _DONE in payloads[:-1]:  # some servers count the tokens after it
            end = payloads.index(_DONE)
            payloads = [*payloads[:end], *filter(_counts, payloads[end:]), _DONE]
        position = 0
        while position < len(payloads):
            if self._template is not None:
                payloads_left = payloads[position:] if position else payloads
                texts = self._template.texts(payloads_left)
                if count := len(texts):
                    data, has_words = b"\n".join(payloads_left[:count]), not "".join(texts).isspace()
                    self._ready.append(Chunk(data, has_content=True, has_words=has_words, count=count))
                position += count
                if position == len(payloads):
                    return
                self._template = None
            if not self._take(payloads[position]):
                return
            position += 1

    def _take(self, payload: bytes) -> bool:
        """Take one event; returns False if the stream is over."""
        if payload == _DONE:
            self._conclude(is_told=True)
            return False
        if not payload:
            return True
        reader = self._answer
        try:
            try:
                payload, answer = mended(payload)
            except msgspec.ValidationError as failure:
                payload, answer = reader.remade(payload, failure)
            if (text := self._finishes.more_of(answer)) and not reader.held:
                self._ready.append(Chunk(payload, has_content=True, has_words=not text.isspace()))
                if self._templates_left:
                    self._templates_left -= 1
                    self._template = DeltaTemplate.of(payload, text)
                return True
            pieces = [(payload, answer)] if reader.is_usual(answer) else reader.pieces(payload, answer)
        except msgspec.DecodeError as error:
            self._fail(self.translate.not_json("stream", payload, error))
            return False
        return all(self._hand_on(*piece) for piece in pieces)

    def _hand_on(self, payload: bytes, answer: ParsedAnswer) -> bool:
        """Hand on a piece as the reader made it; returns False if the stream is over."""
        if (answer.error or answer.object == "error") and (failure := self._failure(payload, answer)) is not None:
            self._fail(failure)
            return False
        if not answer.choices and answer.usage == NO_USAGE:
            self._unanswering = payload
        if self._finishes.add(answer) is not None:
            self._unanswering = payload
            self._fail(self._unfinished())
            return False
        self._ready.append(to_chunk(payload, answer))
        return True

    def _unfinished(self) -> BackendError:
        """The error of an answer that ended before its finish: what the server said of it, if it did."""
        causes = (self.translate.in_band(data) for data in (self._unanswering, self._splitter.stray) if data)
        cut = BackendBroken("The deployment's answer ended before its finish")
        if self._finishes.failed_reason:
            detail = f"finish_reason {self._finishes.failed_reason!r}"
            cut = BackendBroken("The deployment gave its answer up", detail=detail)
        return next(filter(None, causes), cut)

    def _at_end(self) -> None:
        """Handle the body's end: the answer is complete if its choices have finished, also without
        [DONE].
        """
        if self._passing is not None:
            if self._passing.is_finished:
                self._close()
            else:
                self._fail(self._unfinished())
            return
        last = self._splitter.end()
        if last is not None:
            self._take_all([last])
        if self._state is not _OVER and self.reader is not None:
            self._take_events(self.reader.end())
        if self._state is not _OVER:
            self._conclude()

    def _conclude(self, *, is_told: bool = False) -> None:
        """End an answer after its last event. `is_told`: the server says so."""
        if self._answer.held and not all(self._hand_on(*piece) for piece in self._answer.rest()):
            return
        if self._finishes.is_finished if is_told else self._finishes.is_complete:
            self._finish()
        else:
            self._fail(self._unfinished())

    def _cut(self, failure: BackendError) -> None:
        """End an answer whose server sends no more: it is complete, or failed."""
        if self._is_complete:
            self._close()
        else:
            self._fail(failure)

    @property
    def _is_complete(self) -> bool:
        """Whether the answer's end has been read."""
        return self._finishes.is_complete if self._passing is None else self._passing.has_ended

    def _close(self) -> None:
        """End a complete answer; passed bytes get a last chunk with their usage."""
        if (passing := self._passing) is not None:
            usage, reasons = passing.usage, (passing.finish_reason,)
            end = Chunk(b"", finish_reasons=reasons, usage=usage, media=passing.media, status=passing.status)
            self._ready.append(end)
        self._finish()

    def _finish(self) -> None:
        """End a complete answer, and release its connection: the rest of the body is framing."""
        self._end()
        if self._exchange is not None:
            self._exchange.release()

    def _fail(self, error: BackendError) -> None:
        self._error = error
        self._leave()

    def _leave(self) -> None:
        """End an incomplete answer, and close its connection."""
        self._end()
        if self._exchange is not None:
            self._exchange.close()

    def _end(self) -> None:
        state, self._state = self._state, _OVER
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if state is not _NEW and state is not _OVER:
            self.on_end()

    def _arm(self, timeout_s: float) -> None:
        """Set the stream's only timer, which is cheaper than a time-out around each read."""
        if self._timer is not None:
            self._timer.cancel()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout_s, self._watch, timeout_s, loop.time() + timeout_s)

    def _watch(self, timeout_s: float, due_s: float) -> None:
        """Look for a silence. A timer that fires well after `due_s` waits once more."""
        loop = asyncio.get_running_loop()
        since = self._reading_since
        now = loop.time()
        silent_s = 0.0 if since is None else now - since
        late_s = now - due_s
        if late_s > _LATE_SHARE * timeout_s:
            # this worker was paused or held up: what came meanwhile is read first
            self._timer = loop.call_later(min(late_s, timeout_s), self._watch, timeout_s, math.inf)
        elif silent_s < timeout_s:
            left_s = timeout_s - silent_s
            self._timer = loop.call_later(left_s, self._watch, timeout_s, now + left_s)
        elif self._exchange is not None:
            self._timer = None
            self._silence = (
                f"sent nothing within {duration_s(self._first_within_s)}"
                if self._state is _WAITING
                else f"fell silent for {duration_s(self.request.idle_timeout_s)} inside its answer"
            )
            self._exchange.close()

    def _late(self) -> BackendTimeout | None:
        return BackendTimeout(f"The deployment {self._silence}") if self._silence else None

    @property
    def _first_within_s(self) -> float:
        """The most seconds until the first chunk."""
        return self.request.ttft_timeout_s if self.request.is_stream else self.request.whole_timeout_s


class _Passing:
    """A plain answer of text, bytes or events; reads the end and the usage from its events."""

    __slots__ = ("_counted", "_is_free", "_keeps", "_kept", "has_ended", "is_events", "media", "status")

    def __init__(self, media: bytes, status: int, passage: Passage | None) -> None:
        self.media, self.status = media.decode("latin-1"), status
        self.is_events = media.startswith(b"text/event-stream")
        self._is_free = passage is not None and not passage.is_counted
        self.has_ended = False  # by its last event
        self._counted = plain.Counted()
        self._keeps = passage is not None and passage.is_counted and "json" in self.media
        self._kept: list[bytes] = []

    def keep(self, data: bytes) -> None:
        """Keep a piece of a whole answer that may report its tokens."""
        if self._keeps:
            self._kept.append(data)

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete if its bytes end here."""
        return not self.is_events or self._is_free or self.has_ended

    @property
    def finish_reason(self) -> str:
        """The finish reason, once the whole answer has been read."""
        return self._counted.finish_reason

    @property
    def usage(self) -> Usage | None:
        """The usage, once the whole answer has been read; None if unknown."""
        if self._is_free:
            return Usage(0, 0)
        if self._kept:
            self._counted.read(b"".join(self._kept))
        return self._counted.usage

    def read(self, payload: bytes) -> _Event:
        """Read the data of one event."""
        event: _Event = decoded(payload, _Event)
        kind = str(event.type)
        is_last = kind in _LAST_OF_RESPONSES if kind.startswith("response.") else kind.endswith(_LAST_EVENTS)
        self.has_ended = self.has_ended or is_last
        self._counted.read(payload)
        return event


class _Event(msgspec.Struct):
    type: Any = None
    error: Any = None
    response: Any = None


def _dripped(waited_s: float) -> BackendTimeout:
    return BackendTimeout(f"The deployment sent too little within {duration_s(waited_s)}")


def _counts(payload: bytes) -> bool:
    """Whether an event tells the tokens of an answer, and no more of the answer."""
    try:
        answer = mended(payload)[1]
    except msgspec.DecodeError:
        return False
    return answer.usage != NO_USAGE and not answer.choices
