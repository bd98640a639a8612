"""uvicorn's HTTP protocol with limits, and a cheaper request cycle for `/v1`.

Replaces uvicorn's `RequestResponseCycle`, which matches each header against two regular
expressions, writes a response's head and body apart, and reports a client that left only to a
pending `receive`. Here the head leaves with the first piece of the body, in one write, and a
callback reports a client that left. A request takes 25 to 30 µs of CPU instead of 34 to 40
(docs/benchmarks.md, "What a request costs"). `tests/transport/test_http_server.py` holds it to
uvicorn's behaviour.

Builds on private classes of uvicorn 0.54, to which pyproject.toml pins it. Formats: HTTP/1.1 (RFC
9112), ASGI HTTP specification 2.3. Knows no endpoints. Invariant: a header that could split a
response raises, and is never sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import sys
import termios
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

WHEN_GONE = "sameway.when_gone"
"""The ASGI extension with a function that registers a callback for a client that leaves."""

_LARGE_BYTES = 256 << 10  # of a body that is written in pieces
_PIECE_BYTES = 64 << 10
_STALL_S = 300.0
_STALL_LOOKS = 10  # within that time: a client's kernel takes bytes for a moment after the client stopped

_Header = tuple[bytes, bytes]
_CLOSE = (b"connection", b"close")
_LF, _CR = b"\n\r"
_name = itemgetter(0)


class ClientStalled(Exception):
    """The client took no byte for `stall_s`, while more than a buffer waited for it."""

    def __init__(self, stall_s: float) -> None:
        super().__init__(stall_s)
        self.stall_s = stall_s


class RequestCycle(RequestResponseCycle):
    """One request to `/v1` and its response. `run_asgi` and the 500 for a bug are uvicorn's.

    `send` waits while a client is slow, and raises ClientStalled if it takes nothing. After that a
    stream may be ended: what is sent then waits for nothing. A response of known length is cut.
    """

    body: bytes = b""  # type: ignore[assignment]  # mostly arrives in one piece
    more_body = True
    disconnected = response_started = response_complete = False
    _is_stalled = _is_chunked = _is_read = False
    _start: Any = None
    _waiter: asyncio.Future[None] | None = None
    _on_gone: Callable[[], None] | None = None

    def __init__(self, protocol: ServerProtocol, transport: asyncio.Transport, keep_alive: bool) -> None:
        scope: Any = protocol.scope
        scope["extensions"] = {WHEN_GONE: self._when_gone}
        self.scope = scope
        self.transport = transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.on_response = protocol.on_response_complete
        self._state = protocol.server_state
        self._close = protocol.close
        self._stall_s = protocol.stall_s

    @property
    # the protocol sets it on arrival
    def message_event(self) -> RequestCycle:  # type: ignore[override]
        return self

    def set(self) -> None:
        """A piece of the body arrived, or its end, or the client left."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.disconnected:
            self.scope.pop("extensions", None)  # breaks a reference cycle
            if self._on_gone is not None:
                on_gone, self._on_gone = self._on_gone, None
                on_gone()

    def _when_gone(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` once if the client leaves before the response is complete; None removes
        it.
        """
        self._on_gone = callback
        if self.disconnected:
            self.set()

    async def receive(self) -> Any:
        if self.waiting_for_100_continue and not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        while not (self.disconnected or self.response_complete):
            if self.body or not (self.more_body or self._is_read):
                body, self.body = self.body, b""
                self._is_read = not self.more_body
                # a large body paused it; only reading detects a client that leaves
                self.flow.resume_reading()
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self.flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self._drained()
        if self.disconnected:
            return
        if not self.response_started:
            self.response_started = True
            self._start = message
            return
        if self.response_complete or message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} after the response's {'end' if self.response_complete else 'start'}")
        body: bytes = message.get("body", b"")
        if message.get("is_cut"):  # an answer of bytes that failed must not look complete
            self.disconnected = True
            self.transport.close()
            return
        is_last = not message.get("more_body", False)
        if self._start is not None:
            start, self._start = self._start, None
            head = self._head(start["status"], start["headers"])
        else:
            head = b""
        if len(body) > _LARGE_BYTES:
            if not await self._send_large(head, body, is_last):
                return
            body = head = b""
        elif self._is_chunked:
            end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
            body = b"%x\r\n%b%b" % (len(body), body, end) if body else b"0\r\n\r\n" if is_last else b""
        if head or body:
            self.transport.write(head + body if head else body)
        if is_last:
            self.response_complete = True
            self._on_gone = None
            del self.scope["extensions"]  # breaks a reference cycle
            self.set()
            if not self.keep_alive:
                self._close()
            self.on_response()

    async def _send_large(self, head: bytes, body: bytes, is_last: bool) -> bool:
        """Write a body as the socket takes it: no copy of it is made for this client.

        Returns False if the client has left. Raises ClientStalled.
        """
        if self._is_chunked:
            head += b"%x\r\n" % len(body)
        if head:
            self.transport.write(head)
        pieces = memoryview(body)
        for start in range(0, len(body), _PIECE_BYTES):
            if self.flow.write_paused:
                try:
                    await self._drained()
                except ClientStalled:
                    self.disconnected = True  # nothing can follow half a piece of known length
                    self.transport.abort()
                    raise
            if self.disconnected:
                return False
            self.transport.write(pieces[start : start + _PIECE_BYTES])
        if self._is_chunked:
            self.transport.write(b"\r\n0\r\n\r\n" if is_last else b"\r\n")
        return True

    async def _drained(self) -> None:
        """Wait until the client has taken most of what was written. Raises ClientStalled."""
        untaken_bytes, looks_left = self._untaken_bytes(), _STALL_LOOKS
        while self.flow.write_paused and not (self.disconnected or self._is_stalled):
            try:
                async with asyncio.timeout(self._stall_s / _STALL_LOOKS):
                    await self.flow.drain()
            except TimeoutError:
                before, untaken_bytes = untaken_bytes, self._untaken_bytes()
                looks_left = looks_left - 1 if untaken_bytes >= before else _STALL_LOOKS
                if looks_left == 0:
                    self._is_stalled = True
                    self.keep_alive = False
                    raise ClientStalled(self._stall_s) from None

    def _untaken_bytes(self) -> int:
        """What waits for the client here and in the kernel, which asks for more only once a third of its buffer is free."""
        waiting: int = self.transport.get_write_buffer_size()
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no socket of TCP, or closed meanwhile
            queue = fcntl.ioctl(self.transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
            waiting += int.from_bytes(queue, sys.byteorder)
        return waiting

    def _head(self, status: int, headers: list[_Header]) -> bytes:
        if _CLOSE in headers:
            self.keep_alive = False
            headers.remove(_CLOSE)
        lines = list(map(b": ".join, (*self._state.default_headers, *headers)))
        self._is_chunked = status != 204 and b"content-length" not in map(_name, headers)
        if self.scope["http_version"] == "1.0":
            self._is_chunked = False  # HTTP/1.0 has no chunks: the body ends with the connection
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        plain = b"".join(lines)
        if _LF in plain or _CR in plain or 0 in plain:
            raise RuntimeError("a header holds what would split the response")
        return b"%b%b\r\n\r\n" % (STATUS_LINE[status], b"\r\n".join(lines))


HEAD_BYTES_MAX = 64 << 10
LINGER_S_MAX = 30.0  # of a connection that is answered before its request has arrived; nginx's values
BODY_BYTES_PER_S = 500.0
_PIPELINED_MAX = 16  # further pipelined requests stay unread

_PLAIN_PATH = re.compile(rb"[A-Za-z0-9/._~-]+")  # needs no decoding, has no query
_UPGRADE = re.compile(rb"(^|\n)upgrade:", re.IGNORECASE)
_PART_OF_UPGRADE = re.compile(rb"(?:^|\n)(u(?:p(?:g(?:r(?:a(?:de?)?)?)?)?)?)\Z", re.IGNORECASE)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"The request\'s headers are too large","type":"invalid_request_error","param":null,'
    b'"code":"headers_too_large"}}'
)
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"The request\'s body came too slowly","type":"invalid_request_error","param":null,'
    b'"code":"request_timeout"}}'
)


class BufferedTransport:
    """A transport that joins the writes of one tick into one system call; uvicorn writes head and
    body apart.
    """

    __slots__ = ("_close", "_loop", "_parts", "_transport")

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, close: Callable[[], None]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._close = close
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Trailers(list[_Header]):
    """Where fields after a body go: they are no headers, and are dropped (RFC 9110, section 6.5.1)."""

    def append(self, field: _Header) -> None:
        pass


_TRAILERS = _Trailers()


class ServerProtocol(HttpToolsProtocol):
    """One connection. Requests to `/v1` use `RequestCycle`, all others uvicorn's cycle."""

    # arguments are not possible: uvicorn makes the object
    linger_idle_s = 5.0
    head_within_s = 20.0
    body_within_s = 20.0  # and a second more for each BODY_BYTES_PER_S, as Apache's mod_reqtimeout

    def __init__(self, *arguments: Any, stall_s: float = _STALL_S, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.stall_s = stall_s
        self._is_in_head = True
        self._head_bytes = 0
        self._held = b""  # the end of a partial head, if it may begin an upgrade header
        self._head_timer: asyncio.TimerHandle | None = None
        self._body_bytes = 0
        self._unbodied_bytes = 0  # since the last byte of a body, or its head
        self._body_since = 0.0
        self._body_timer: asyncio.TimerHandle | None = None  # set while a body is incomplete
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._direct: asyncio.Transport | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingers_until = 0.0  # on the loop's clock, once it lingers
        self._has_lingered_bytes = False
        # `cycle` is the latest request, which may wait for this one
        self._running: RequestResponseCycle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._direct = transport
        # it satisfies the type by delegation
        self.transport = BufferedTransport(transport, self.loop, self.close)  # type: ignore[assignment]
        self._head_timer = self.loop.call_later(self.head_within_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self._stop_body_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        if self._linger_timer is not None:
            self._linger_timer.cancel()
            self._linger_timer = None
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)
        self.pipeline.clear()
        # these break reference cycles
        self.cycle = None  # type: ignore[assignment]
        self._running = None
        self.transport = self._direct  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        """uvicorn's, without a comparison for each header."""
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.expect_100_continue = dict(self.headers).get(b"expect", b"").lower() == b"100-continue"
        self._is_in_head = False
        self._head_bytes = self._unbodied_bytes = 0
        self.headers = _TRAILERS
        if self._head_timer is not None:
            self._stop_timer()
        url = self.url
        is_free = self.cycle is None or self.cycle.response_complete
        if not (is_free and url.startswith(b"/v1/") and _PLAIN_PATH.fullmatch(url)):
            super().on_headers_complete()
            if 0 < len(self.pipeline) < _PIPELINED_MAX:
                self.flow.resume_reading()  # only reading detects a client that leaves
            return
        parser, scope = self.parser, self.scope
        method = parser.get_method()
        version = parser.get_http_version()
        if method not in (b"POST", b"GET") or version not in ("1.1", "1.0"):
            super().on_headers_complete()
            return
        scope["method"] = method.decode()
        scope["http_version"] = version
        scope["path"] = url.decode()
        scope["raw_path"] = url
        scope["query_string"] = b""
        assert self._direct is not None
        # decision: own-http-server
        self.cycle = RequestCycle(self, self._direct, version == "1.1" and parser.should_keep_alive())
        self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._unbodied_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._is_in_head = True  # of the next request on this connection
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """uvicorn's, with one timer for the connection instead of one for each request."""
        self.server_state.total_requests += 1
        if self._direct is None or self._direct.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._idle_since = self.loop.time()
        if self._idle_timer is None:
            self._idle_timer = self.loop.call_later(self.timeout_keep_alive, self._idle_for_long)

    def _unset_keepalive_if_required(self) -> None:
        """Do nothing: `_idle_for_long` checks for idleness when the timer fires."""

    def _idle_for_long(self) -> None:
        """Close the connection if it was idle for the whole time; otherwise set the timer again."""
        is_idle = self.cycle is None or self.cycle.response_complete
        left_s = self.timeout_keep_alive - (self.loop.time() - self._idle_since) if is_idle else self.timeout_keep_alive
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._idle_for_long)
        else:
            self._idle_timer = None
            self.transport.close()

    def close(self) -> None:
        """Close the connection, with nothing of a request left unread.

        A close with unread bytes resets the connection, and a client that still sends its body
        would lose the answer. So it is half-closed, and what comes is dropped until the client has
        seen the answer and closes (RFC 9112, section 9.6).
        """
        assert self._direct is not None
        is_partial = self._head_bytes > 0 or (self.cycle is not None and self.cycle.more_body)
        if self._lingers_until or not is_partial or self._direct.is_closing():
            self._direct.close()
            return
        self._lingers_until = self.loop.time() + LINGER_S_MAX
        self._stop_timer()
        self._stop_body_timer()
        self._direct.write_eof()
        self.flow.resume_reading()
        self._linger_timer = self.loop.call_later(self.linger_idle_s, self._end_linger)

    def _end_linger(self) -> None:
        """Close the connection if no byte came since the last look, or it has lingered for too long."""
        assert self._direct is not None
        if self._has_lingered_bytes and self.loop.time() < self._lingers_until:
            self._has_lingered_bytes = False
            self._linger_timer = self.loop.call_later(self.linger_idle_s, self._end_linger)
        else:
            self._direct.abort()

    def data_received(self, data: bytes) -> None:
        if self._lingers_until:
            self._has_lingered_bytes = True
            return
        if self._is_in_head:
            if self._held:
                data, self._held = self._held + data, b""
            head, end, rest = data.partition(b"\r\n\r\n")
            self._head_bytes += len(head)
            if end and self._head_bytes > HEAD_BYTES_MAX:
                self._refuse_head()
                return
            if head.lower().find(b"upgrade:") >= 0:
                data = _UPGRADE.sub(rb"\1x-upgrade-ignored:", head) + end + rest
            if not end and (part := _PART_OF_UPGRADE.search(data[-8:])):
                data, self._held = data[: -len(part[1])], part[1]
        self._unbodied_bytes += len(data)
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse_head()
        elif self._is_in_head and self._head_bytes and self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_within_s, self._head_is_late)
        if not self._is_in_head:
            self._body_bytes += len(data)
            if self._unbodied_bytes > HEAD_BYTES_MAX:  # trailers, or extensions of a chunk
                self._refuse_body(_TOO_LARGE)
            elif self._body_timer is None:
                self._body_since = self.loop.time()
                self._body_timer = self.loop.call_later(self.body_within_s, self._body_is_late)
        elif self._body_timer is not None:
            self._stop_body_timer()

    def _body_is_late(self) -> None:
        """Refuse a body that drips, unless this server paused it."""
        if self.flow.read_paused:
            self._body_since = self.loop.time()
        left_s = self._body_since + self.body_within_s + self._body_bytes / BODY_BYTES_PER_S - self.loop.time()
        if left_s > 0.0:
            self._body_timer = self.loop.call_later(left_s, self._body_is_late)
            return
        self._body_timer = None
        self._refuse_body(_TOO_SLOW)

    def _refuse_body(self, answer: bytes) -> None:
        if self.cycle is None or not self.cycle.response_started:
            self.transport.write(answer)
        self.transport.close()

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        self._body_bytes = 0

    def _refuse_head(self) -> None:
        self._stop_timer()
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _head_is_late(self) -> None:
        self._head_timer = None
        assert self._direct is not None
        self._direct.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
