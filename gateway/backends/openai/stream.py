"""One answer of an OpenAI-compatible server on its way: its bytes read, its ending checked, its time kept.

Knows the backend that sends and nothing else. Invariants: base.py's (a stream ends after its finish or raises), and a
connection goes back to the pool only after its answer's last byte: leaving an answer early closes it, so that the server
stops generating.

Time: a stream's first chunk has `ttft_timeout_s`, connecting included; after it, silence is bounded by `idle_timeout_s`
(any byte breaks it, so keep-alive comments count as life). A whole answer comes in one piece after all of its tokens,
so it has `ttft_timeout_s + idle_timeout_s`. Silence after every choice's finish costs only the usage chunk: the answer is
complete, and ends after `_TAIL_TIMEOUT_S`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from gateway.backends.base import (
    BackendBroken,
    BackendError,
    BackendOverloaded,
    BackendRequest,
    BackendTimeout,
    BackendUnavailable,
)
from gateway.backends.refusals import scrubbed
from gateway.transport.http_client import Disconnected, Exchange, TransportError, Unreachable
from gateway.wire.chunks import DeltaTemplate, FinishTracker, parse, to_chunk
from gateway.wire.sse import PayloadTooLarge, Splitter
from gateway.wire.types import Chunk

if TYPE_CHECKING:
    from gateway.backends.openai.backend import OpenAIBackend

_TAIL_TIMEOUT_S = 5.0
_ERROR_BYTES_MAX = 64 << 10
_WHOLE_BYTES_MAX = 64 << 20


class OpenAIStream:
    """One answer on its way; see base.ChunkStream. One reader at a time; `aclose` from anywhere."""

    __slots__ = (
        "_backend",
        "_ending",
        "_error",
        "_exchange",
        "_has_begun",
        "_is_counted",
        "_is_over",
        "_is_reading",
        "_is_silent",
        "_is_tail",
        "_read_at",
        "_ready",
        "_request",
        "_run",
        "_runs_left",
        "_splitter",
        "_timer",
    )

    def __init__(self, backend: OpenAIBackend, request: BackendRequest) -> None:
        self._backend = backend
        self._request = request
        self._ready: list[Chunk] = []
        self._ending = FinishTracker(request.choices, request.prompts)
        self._splitter = Splitter()
        self._run: DeltaTemplate | None = None
        self._runs_left = DeltaTemplate.PER_ANSWER_MAX
        self._exchange: Exchange | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._error: BackendError | None = None  # to raise once what came before it has been read
        self._has_begun = False  # the first chunk is there
        self._is_over = False  # nothing more will be read
        self._is_counted = False
        self._is_reading = False
        self._is_silent = False
        self._is_tail = False
        self._read_at = 0.0

    def __aiter__(self) -> OpenAIStream:
        return self

    async def __anext__(self) -> list[Chunk]:
        if not self._ready and not self._is_over:
            try:
                if self._exchange is None:
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
            pending, self._error = self._error, None
            raise pending
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Let go: an unfinished answer's connection is closed now, and the server sees it."""
        self._ready.clear()
        if not self._is_over:
            self._error = BackendBroken("The answer was given up")
            self._leave()

    async def _begin(self) -> None:
        """Connect, send, and wait for the first chunk."""
        backend, request = self._backend, self._request
        load = backend.load(0)
        if not load.is_ready:
            raise BackendUnavailable(f"The deployment is not ready: {load.reason}")
        if backend.running >= backend.concurrency_max:
            raise BackendOverloaded("The deployment has as many requests as it may", retry_after_s=1.0)
        if backend.pool is None:
            raise BackendUnavailable("The deployment is not started")
        backend.running += 1
        self._is_counted = True
        exchange = self._exchange = backend.exchange(request)
        self._read_at, self._is_reading = asyncio.get_running_loop().time(), True
        self._arm(request.ttft_timeout_s + (0.0 if request.is_stream else request.idle_timeout_s))
        try:
            await backend.pool.send(exchange)
        except TransportError as error:
            raise self._unsent(error) from None
        if exchange.status != 200:
            raise backend.refused(exchange, await self._body(_ERROR_BYTES_MAX, is_cut=True))
        kind = exchange.headers.get(b"content-type", b"").lower()
        is_json_or_page = kind.startswith((b"application/json", b"text/html"))
        if kind.startswith(b"text/event-stream") or (request.is_stream and not is_json_or_page):
            await self._fill()
        else:
            self._take_whole(await self._body(_WHOLE_BYTES_MAX))
        self._has_begun, self._is_reading = True, False
        if not self._is_over:
            self._arm(request.idle_timeout_s)

    def _unsent(self, error: TransportError) -> BackendError:
        """Why there is no answer, not even its head."""
        if self._is_over and self._error is not None:
            return self._error  # given up by `aclose`
        if self._is_silent:
            return self._silence()
        detail = self._backend.told(error)
        match error:
            case Unreachable():
                return BackendUnavailable("The deployment cannot be reached", detail=detail)
            case Disconnected():
                return BackendUnavailable("The deployment closed the connection", detail=detail)
        return BackendUnavailable("The deployment does not speak HTTP", detail=detail)

    async def _body(self, size_bytes_max: int, is_cut: bool = False) -> bytes:
        """The whole body; of one that is too long its beginning, where `is_cut` allows it."""
        assert self._exchange is not None
        parts: list[bytes] = []
        size_bytes = 0
        try:
            while part := await self._exchange.read():
                parts.append(part)
                size_bytes += len(part)
                if size_bytes > size_bytes_max:
                    if is_cut:
                        break
                    raise BackendBroken("The deployment's answer is too long", detail=f"over {size_bytes_max} bytes")
        except TransportError as error:
            if self._is_over and self._error is not None:
                raise self._error from None
            if not is_cut and self._is_silent:
                raise self._silence() from None
            if not is_cut:
                raise BackendBroken("The deployment's answer broke off", detail=self._backend.told(error)) from None
        return b"".join(parts)

    def _take_whole(self, body: bytes) -> None:
        try:
            answer = parse(body)
        except msgspec.DecodeError as error:
            excerpt = scrubbed(body[:200].decode("utf-8", "replace"), self._backend.api_key)
            raise BackendBroken("The deployment's answer is not JSON", detail=f"{error}: {excerpt}") from None
        if answer.error or answer.object == "error":
            raise self._backend.in_band(answer.error or msgspec.json.decode(body))
        self._ending.add(answer)
        if self._ending.failed_reason or not self._ending.is_finished:
            raise _unfinished(self._ending)
        self._ready.append(to_chunk(body, answer, is_whole=True))
        self._finish()

    async def _fill(self) -> None:
        """Read until there is a chunk, an error or the end: of what came together, all."""
        exchange = self._exchange
        assert exchange is not None
        while not self._ready and not self._is_over:
            if self._ending.is_complete and not self._is_tail:
                self._is_tail = True
                self._arm(min(_TAIL_TIMEOUT_S, self._request.idle_timeout_s))
            if self._has_begun:
                self._read_at, self._is_reading = asyncio.get_running_loop().time(), True
            try:
                data = await exchange.read()
                if data:
                    self._take_all(self._splitter.feed(data))
                else:
                    self._at_end()
            except TransportError as error:
                self._at_cut(error)
            except PayloadTooLarge as error:
                self._fail(BackendBroken("The deployment's answer is too long", detail=str(error)))
            finally:
                if self._has_begun:
                    self._is_reading = False

    def _take_all(self, payloads: Sequence[bytes]) -> None:
        """The events that have come together; of text that goes on as it began, all at once."""
        position = 0
        while position < len(payloads):
            if self._run is not None:
                rest = payloads[position:] if position else payloads
                count = len(self._run.texts(rest))
                if count:
                    self._ready.append(Chunk(b"\n".join(rest[:count]), has_content=True, count=count))
                position += count
                if position == len(payloads):
                    return
                self._run = None
            if not self._take(payloads[position]):
                return
            position += 1

    def _take(self, payload: bytes) -> bool:
        """One event of the stream; True where more is wanted."""
        if payload == b"[DONE]":
            if self._ending.is_finished:
                self._finish()
            else:
                self._fail(_unfinished(self._ending))
            return False
        if not payload:
            return True
        try:
            answer = parse(payload)
        except msgspec.DecodeError as error:
            excerpt = scrubbed(payload[:200].decode("utf-8", "replace"), self._backend.api_key)
            self._fail(BackendBroken("The deployment's stream is not JSON", detail=f"{error}: {excerpt}"))
            return False
        if self._ending.is_going_on(answer):
            self._ready.append(Chunk(payload, has_content=True))
            if self._runs_left:
                self._runs_left -= 1
                self._run = DeltaTemplate.of(payload)
            return True
        if answer.error or answer.object == "error":
            self._fail(self._backend.in_band(answer.error or msgspec.json.decode(payload)))
            return False
        self._ending.add(answer)
        if self._ending.failed_reason is not None:
            self._fail(_unfinished(self._ending))
            return False
        self._ready.append(to_chunk(payload, answer))
        return True

    def _at_end(self) -> None:
        """The body ended; where that is right depends on what has finished, not on [DONE]."""
        last = self._splitter.end()
        if last is not None and not self._take(last):
            return
        if self._ending.is_complete:
            self._finish()
        else:
            self._fail(_unfinished(self._ending))

    def _at_cut(self, error: TransportError) -> None:
        """The connection failed, or was closed by `_watch` or `aclose`."""
        if self._is_over:
            return
        if self._ending.is_complete:
            self._finish()
        elif self._is_silent:
            self._fail(self._silence())
        else:
            self._fail(BackendBroken("The deployment's answer broke off", detail=self._backend.told(error)))

    def _finish(self) -> None:
        """Done: what is left of the body is framing, and the connection may serve another."""
        self._is_over = True
        self._let_go()
        if self._exchange is not None:
            self._exchange.release()

    def _fail(self, error: BackendError) -> None:
        self._error = error
        self._leave()

    def _leave(self) -> None:
        """End without having finished: close the connection."""
        self._is_over = True
        self._let_go()
        if self._exchange is not None:
            self._exchange.close()

    def _let_go(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._is_counted:
            self._is_counted = False
            self._backend.running -= 1

    def _arm(self, timeout_s: float) -> None:
        """One timer watches the whole stream: cheaper than a time-out around each read."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(timeout_s, self._watch, timeout_s)

    def _watch(self, timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        silent_s = loop.time() - self._read_at if self._is_reading else 0.0
        if silent_s < timeout_s:  # a reader that does not read is not the server's silence
            self._timer = loop.call_later(timeout_s - silent_s, self._watch, timeout_s)
        elif self._exchange is not None:
            self._timer = None
            self._is_silent = True
            self._exchange.close()

    def _silence(self) -> BackendTimeout:
        request = self._request
        if self._has_begun:
            silence_s = request.idle_timeout_s
            return BackendTimeout(f"The deployment fell silent for {silence_s:g} s inside its answer")
        silence_s = request.ttft_timeout_s + (0.0 if request.is_stream else request.idle_timeout_s)
        return BackendTimeout(f"The deployment sent nothing within {silence_s:g} s")


def _unfinished(ending: FinishTracker) -> BackendBroken:
    if ending.failed_reason:
        return BackendBroken("The deployment gave its answer up", detail=f"finish_reason {ending.failed_reason!r}")
    return BackendBroken("The deployment's answer ended before its finish")
