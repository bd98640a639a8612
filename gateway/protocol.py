"""uvicorn's HTTP protocol, with the limits that a server on a network needs.

Knows bytes, not requests. Invariants: a request's head is bounded in size and in time; an offer to upgrade is declined by
ignoring it, as RFC 9110 section 7.8 allows, so that a client that offers HTTP/2 (Java's does) is answered all the same.
"""

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES_MAX = 64 << 10
HEAD_WITHIN_S = 20.0

_UPGRADE = re.compile(rb"(\r\n)upgrade:", re.IGNORECASE)
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
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._is_in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.transport = Gathering(transport, self.loop)  # type: ignore[assignment]  # it is one, by delegation
        self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._is_in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_head = True  # the next one's, on a connection that is kept
        super().on_message_complete()

    def data_received(self, data: bytes) -> None:
        if self._is_in_head:
            head, end, rest = data.partition(b"\r\n\r\n")
            self._head_bytes += len(head)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._stop_timer()
                self.transport.write(_TOO_LARGE)
                self.transport.close()
                return
            if b"pgrade:" in head:
                data = _UPGRADE.sub(rb"\1x-upgrade-ignored:", head) + end + rest
            if self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._head_is_late)
        super().data_received(data)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
