"""One request to `/v1` and its response, between uvicorn's protocol and an endpoint: ASGI, with less done on the way.

uvicorn's own exchange checks each header by two regular expressions, writes a response's head and body apart, and tells of a client
that has left only to who sits in `receive`. Here a head leaves with the first piece of its body, in one write, and a callback tells.
Format: HTTP/1.1 (RFC 9112); ASGI HTTP specification 2.3. Knows no endpoints. Invariant: a header that could split a response is an
error, and no response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

if TYPE_CHECKING:
    from gateway.transport.http_protocol import CarefulProtocol

WHEN_GONE = "sameway.when_gone"
"""The ASGI extension under which an endpoint finds a function that takes a callback for when the client leaves."""

_Header = tuple[bytes, bytes]
_CLOSE = (b"connection", b"close")
_LF, _CR = b"\n\r"
_name = itemgetter(0)


class Exchange(RequestResponseCycle):
    """As uvicorn's, for what is asked of `/v1`; `run_asgi` and the 500 for a bug are uvicorn's own."""

    def __init__(self, protocol: CarefulProtocol, transport: asyncio.Transport, keep_alive: bool) -> None:
        scope: Any = protocol.scope
        scope["extensions"] = {WHEN_GONE: self._when_gone}
        self.scope = scope
        self.transport = transport
        self.flow = protocol.flow
        self.logger = protocol.logger
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = protocol.expect_100_continue
        self.on_response = protocol.on_response_complete
        self.body: bytes = b""  # type: ignore[assignment]  # grows by what comes, which is mostly all of it
        self.more_body = True
        self.disconnected = self.response_started = self.response_complete = False
        self._state = protocol.server_state
        self._start: Any = None
        self._is_chunked = False
        self._is_read = False
        self._waiter: asyncio.Future[None] | None = None
        self._on_gone: Callable[[], None] | None = None

    @property
    def message_event(self) -> Exchange:  # type: ignore[override]  # the protocol sets it when something has come
        return self

    def set(self) -> None:
        """Something has come: a piece of the body, its end, or the client's."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
        if self.disconnected and self._on_gone is not None:
            on_gone, self._on_gone = self._on_gone, None
            on_gone()

    def _when_gone(self, callback: Callable[[], None] | None) -> None:
        """Call back when the client leaves before the response is complete, once; None: not any more."""
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
                self.flow.resume_reading()  # a large body paused it, and a client that leaves is heard of by reading
                return {"type": "http.request", "body": body, "more_body": self.more_body}
            self.flow.resume_reading()
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if not self.response_started:
            self.response_started = True
            self._start = message
            return
        if self.response_complete or message["type"] != "http.response.body":
            raise RuntimeError(f"{message['type']} after the response's {'end' if self.response_complete else 'start'}")
        body: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if self._start is not None:
            start, self._start = self._start, None
            head = self._head(start["status"], start["headers"])
        else:
            head = b""
        if self._is_chunked:
            end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
            body = b"%x\r\n%b%b" % (len(body), body, end) if body else b"0\r\n\r\n" if is_last else b""
        self.transport.write(head + body if head else body)
        if is_last:
            self.response_complete = True
            self._on_gone = None
            del self.scope["extensions"]  # nothing that refers to itself is left to the collector
            self.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()

    def _head(self, status: int, headers: list[_Header]) -> bytes:
        if _CLOSE in headers:
            self.keep_alive = False
            headers.remove(_CLOSE)
        lines = list(map(b": ".join, (*self._state.default_headers, *headers)))
        self._is_chunked = b"content-length" not in map(_name, headers)
        if self.scope["http_version"] == "1.0":
            self._is_chunked = False  # which it does not know: such a body ends where the connection does
        if self._is_chunked:
            lines.append(b"transfer-encoding: chunked")
        if not self.keep_alive:
            lines.append(b"connection: close")
        plain = b"".join(lines)
        if _LF in plain or _CR in plain or 0 in plain:
            raise RuntimeError("a header holds what would split the response")
        return b"%b%b\r\n\r\n" % (STATUS_LINE[status], b"\r\n".join(lines))
