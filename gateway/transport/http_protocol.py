"""uvicorn's HTTP protocol, with the limits that a server on a network needs and a shorter way to `/v1`.

Knows bytes, not requests. Invariants: a request's head is bounded in size and in time; an offer to upgrade is declined by
ignoring it, as RFC 9110 section 7.8 allows, so that a client that offers HTTP/2 (Java's does) is answered all the same.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from gateway.transport.http_server import Exchange

HEAD_BYTES_MAX = 64 << 10
HEAD_WITHIN_S = 20.0
_PIPELINED_MAX = 16  # requests that wait for the one before; beyond them the client is left waiting

_PLAIN_PATH = re.compile(rb"[A-Za-z0-9/._~-]+")  # nothing to decode, no query
_UPGRADE = re.compile(rb"(^|\n)upgrade:", re.IGNORECASE)
_PART_OF_UPGRADE = re.compile(rb"(?:^|\n)(u(?:p(?:g(?:r(?:a(?:de?)?)?)?)?)?)\Z", re.IGNORECASE)
_TOO_LARGE = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n"
    b'{"error":{"message":"The request\'s headers are too large","type":"invalid_request_error","param":null,'
    b'"code":"headers_too_large"}}'
)


class Gathering:
    """A transport whose writes of one tick leave in one system call: uvicorn writes a response's head and body apart."""

    __slots__ = ("_loop", "_parts", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts:
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class CarefulProtocol(HttpToolsProtocol):
    """One connection. Requests to `/v1` are answered through `Exchange`, everything else as uvicorn does."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_head = True
        self._head_bytes = 0
        self._held = b""  # the end of what came of a head, where it may be the beginning of an offer to upgrade
        self._head_timer: asyncio.TimerHandle | None = None
        self._idle_since = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None
        self._direct: asyncio.Transport | None = None
        self._running: RequestResponseCycle | None = None  # `cycle` is the latest, which may wait behind it

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._direct = transport
        self.transport = Gathering(transport, self.loop)  # type: ignore[assignment]  # it is one, by delegation
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None
        running = self._running
        if running is not None and running is not self.cycle and not running.response_complete:
            running.disconnected = True
            running.message_event.set()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._stop_timer()
        url = self.url
        is_free = self.cycle is None or self.cycle.response_complete
        if not (is_free and url.startswith(b"/v1/") and _PLAIN_PATH.fullmatch(url)):
            super().on_headers_complete()
            if 0 < len(self.pipeline) < _PIPELINED_MAX:
                self.flow.resume_reading()  # or nobody would hear of a client that leaves
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
        self.cycle = Exchange(self, self._direct, version == "1.1" and parser.should_keep_alive())
        self._start_asgi_task(self.cycle, self.app)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        self._is_in_head = True  # the next one's, on a connection that is kept
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """As uvicorn's, with one timer for a connection's whole life instead of one for each request."""
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
        """The timer stays; what is idle is asked when it fires."""

    def _idle_for_long(self) -> None:
        """Close what nobody used since the timer was set; else look again when that could be so."""
        is_idle = self.cycle is None or self.cycle.response_complete
        left_s = self.timeout_keep_alive - (self.loop.time() - self._idle_since) if is_idle else self.timeout_keep_alive
        if left_s > 0.0:
            self._idle_timer = self.loop.call_later(left_s, self._idle_for_long)
        else:
            self._idle_timer = None
            self.transport.close()

    def data_received(self, data: bytes) -> None:
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
        super().data_received(data)
        if self._is_in_head and self._head_bytes > HEAD_BYTES_MAX and not self.transport.is_closing():
            self._refuse_head()
        elif self._is_in_head and self._head_bytes and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def _refuse_head(self) -> None:
        self._stop_timer()
        self.transport.write(_TOO_LARGE)
        self.transport.close()

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
