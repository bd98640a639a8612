"""HTTP/1.1 as a client speaks it: one connection, and one exchange (a request and its response) at a time on it.

Source: RFC 9112; bytes are parsed by llhttp (httptools). Knows no URLs, pools or OpenAI. Invariants: what came before a failure
is read before the failure is raised; a body that did not end as its head announced is never a whole one; closing an exchange
closes its connection at once; what is buffered of heads, trailers and unread bodies is bounded.

    TransportError
    ├── Unreachable     no connection: refused, not found, not trusted, too late
    ├── Disconnected    the connection ended before its response did
    └── NotHTTP         what came is no response, or larger than one has a reason to be
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

HEAD_BYTES_MAX = 64 << 10
BUFFER_BYTES_MAX = 512 << 10  # of a body that nobody reads: beyond it the server is left waiting
INFLATED_BYTES_MAX = 64 << 20
DRAIN_WITHIN_S = 1.0


class TransportError(Exception):
    """An exchange failed below what its messages say."""


class Unreachable(TransportError):
    """There is no connection."""


class Disconnected(TransportError):
    """The connection ended before the response did."""


class NotHTTP(TransportError):
    """What came is no HTTP/1.1 response."""


class Exchange:
    """One request and its response. One reader at a time; `close` from anywhere."""

    __slots__ = (
        "_buffer",
        "_connection",
        "_error",
        "_inflater",
        "_is_complete",
        "_is_released",
        "_waiter",
        "headers",
        "is_answered",
        "opening",
        "request",
        "status",
    )

    def __init__(self, *request: bytes) -> None:
        self.request = request  # head and body, written together
        self.status = 0  # until the response's head is there
        self.headers: Mapping[bytes, bytes] = {}  # by lower-case name; of repeated ones the last
        self.is_answered = False  # a byte of the response has come
        self.opening: asyncio.Timeout | None = None  # while a connection is being made for it
        self._buffer: list[bytes] = []
        self._connection: Connection | None = None
        self._error: TransportError | None = None
        self._inflater: Any = None
        self._is_complete = False
        self._is_released = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """The whole response has come, read or not."""
        return self._is_complete

    @property
    def is_over(self) -> bool:
        """Nothing more will come."""
        return self._is_complete or self._error is not None

    async def answered(self) -> None:
        """Until status and headers are there; interim (1xx) responses are passed over. Raises TransportError."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def read(self) -> bytes:
        """What has come of the body since the last read, at least a byte; empty at its end. Raises TransportError."""
        while True:
            if self._buffer:
                data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
                self._buffer.clear()
                if self._connection is not None:
                    self._connection.resume()
                if self._inflater is not None:
                    data = self._inflated(data)
                if data:
                    return data
            elif self._error is not None:
                raise self._error
            elif self._is_complete:
                return b""
            else:
                await self._wait()

    def release(self) -> None:
        """The rest does not matter: the connection serves others once it has come, and is closed where that takes long."""
        self._buffer.clear()
        self._is_released = True
        if not self.is_over:
            asyncio.get_running_loop().call_later(DRAIN_WITHIN_S, self.close)
            if self._connection is not None:
                self._connection.resume()

    def close(self) -> None:
        """Give up what is not over: the server sees its connection closed, now. A read that waits raises Disconnected."""
        if self.is_over:
            return
        connection = self._connection
        self._is_released = True
        self.end(Disconnected("the exchange was given up"))
        if connection is not None:
            connection.abort()
        if self.opening is not None:
            self.opening.reschedule(0.0)

    # -- for its connection ------------------------------------------------------------------------------------------

    def begin(self, connection: Connection) -> None:
        self._connection = connection

    def retry(self) -> bool:
        """Forget a connection that was lost before it answered; False where there is nothing to try again."""
        if self.is_answered or not isinstance(self._error, Disconnected) or self._is_released:
            return False
        self._error = None
        return True

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.headers = headers
        self.status = status
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding in (b"gzip", b"x-gzip"):
            self._inflater = zlib.decompressobj(wbits=31)
        elif coding not in (b"identity", b""):
            self._error = NotHTTP(f"the body is coded as {coding[:40]!r}, which nobody asked for")
            self._is_released = True

    def arrive(self, data: bytes) -> bool:
        """Part of the body; True where more of it should wait until this has been read."""
        if self._is_released:
            return False
        self._buffer.append(data)
        return len(data) > BUFFER_BYTES_MAX or (
            len(self._buffer) > 1 and sum(map(len, self._buffer)) > BUFFER_BYTES_MAX
        )

    def end(self, error: TransportError | None = None) -> None:
        """The first end counts."""
        if not self.is_over:
            self._error = error
            self._is_complete = error is None
        self._connection = None
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _inflated(self, data: bytes) -> bytes:
        try:
            inflated: bytes = self._inflater.decompress(data, INFLATED_BYTES_MAX)
        except zlib.error as error:
            raise NotHTTP(f"the body is not what its coding says: {error}") from None
        if self._inflater.unconsumed_tail:
            raise NotHTTP(f"the body inflates to more than {INFLATED_BYTES_MAX} bytes at once")
        return inflated


class Keeper(Protocol):
    """Who owns a connection and is told what becomes of it."""

    def opened(self, connection: Connection) -> None: ...
    def freed(self, connection: Connection) -> None: ...
    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """One connection. Its keeper hears when it is open, free for another exchange, and gone."""

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._is_paused = False
        self._is_spoilt = False  # a response that nobody asked for has begun
        self._is_interim = False
        self._is_kept_alive = False
        self._quiet_bytes = 0  # since the exchange began or its body went on: heads, trailers, framing
        self._parts: list[bytes] = []
        self._parts_at_end: int | None = None  # how many of them are the response's, once it is complete
        self._headers: dict[bytes, bytes] = {}
        # the parser's callbacks: those that only keep what they are given cost no Python at all
        self.on_header = self._headers.__setitem__
        self.on_body = self._parts.append
        # decision: own-http-client
        self._parser: Any = HttpResponseParser(self)
        # what servers get wrong and every client overlooks
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    # -- its keeper --------------------------------------------------------------------------------------------------

    @property
    def transport(self) -> asyncio.Transport:
        assert self._transport is not None
        return self._transport

    @property
    def is_usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def begin(self, exchange: Exchange) -> None:
        """Send a request; this connection is its own until the response is over."""
        assert self._exchange is None
        self._exchange = exchange
        self._quiet_bytes = 0
        self._parts_at_end = None
        self._headers.clear()  # trailers of the last response
        exchange.begin(self)
        self.transport.writelines(exchange.request)

    def abort(self) -> None:
        """Close it now."""
        self._end(Disconnected("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    def detach(self) -> asyncio.Transport:
        """Hand the transport over to another protocol: after a CONNECT it is the target's."""
        transport, self._transport = self.transport, None
        self._end(None)
        return transport

    # -- its exchange ------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()

    # -- its transport -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so
        self._keeper.opened(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abort()  # nobody asked
            return
        exchange.is_answered = True
        self._quiet_bytes += len(data)
        error: TransportError | None = None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as bad:
            error = NotHTTP(f"{type(bad).__name__}: {bad}"[:200])
        parts = self._parts[: self._parts_at_end]
        if parts:
            self._parts.clear()
            self._quiet_bytes = 0
            if exchange.arrive(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._is_paused = True
                self.transport.pause_reading()
        if self._parts_at_end is not None:
            self._complete(exchange, is_reusable=error is None)
        elif error is not None or self._quiet_bytes > HEAD_BYTES_MAX or exchange.is_over:
            self._end(error or NotHTTP(f"more than {HEAD_BYTES_MAX} bytes without a body"))
            self.transport.abort()
        elif parts or exchange.status:
            exchange.wake()

    def _complete(self, exchange: Exchange, is_reusable: bool) -> None:
        transport = self.transport
        self.resume()
        if (
            is_reusable
            and not self._is_spoilt
            and self._is_kept_alive
            and not transport.is_closing()
            and not transport.get_write_buffer_size()  # it answered before it had heard everything
        ):
            self._exchange = None
            exchange.end()
            self._keeper.freed(self)
        else:
            self._end(None)
            transport.abort()

    def eof_received(self) -> bool:
        exchange = self._exchange
        if exchange is not None:
            framed = (b"content-length", b"transfer-encoding")
            is_until_close = exchange.status and not any(name in exchange.headers for name in framed)
            self._end(None if is_until_close else Disconnected("the server closed the connection"))
        return False  # and let the transport close

    def connection_lost(self, error: Exception | None) -> None:
        told = f"{type(error).__name__}: {error}" if error is not None else "closed"
        self._end(Disconnected(f"the connection was lost: {told}"))
        self._transport = None

    def _end(self, error: TransportError | None) -> None:
        """No exchange after this one; tells the keeper once."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(error)
        if self._parser is not None:
            self._parser = None  # it holds this object, as this object held it
            self._keeper.lost(self)

    # -- its parser --------------------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._parts_at_end is not None:
            self._is_spoilt = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers = {name.lower(): value for name, value in self._headers.items()}
        self._headers.clear()
        self._is_interim = status < 200
        if not self._is_interim and self._parts_at_end is None and self._exchange is not None:
            self._exchange.head(status, headers)

    def on_message_complete(self) -> None:
        if not self._is_interim and self._parts_at_end is None:
            self._parts_at_end = len(self._parts)
            self._is_kept_alive = self._parser.should_keep_alive()  # which the parser knows only now
