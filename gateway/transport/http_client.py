"""An HTTP/1.1 client connection, with one exchange (a request and its response) at a time.

Replaces aiohttp's client with `http_pool`: aiohttp takes three to four times the CPU for a whole
answer and twice for a stream (docs/benchmarks.md, "What a request costs").
`tests/transport/test_http_client.py` tests it against RFC 9112, with misbehaving servers and random
bytes; llhttp (httptools) parses.

Knows no URLs, pools or OpenAI. Invariants: a reader gets all bytes that arrived before a failure,
then the failure; a body that ends before its announced end is an error; closing an exchange closes
its connection at once; buffers of heads, trailers and unread bodies are bounded.

    TransportError
    ├── Unreachable     no connection: refused, not found, not trusted, too late
    │   └── NotAsked    this host lacked what a connection needs: no fault of the server
    ├── Disconnected    the connection ended before the response did
    └── NotHTTP         the bytes are no response, or too many
"""

from __future__ import annotations

import asyncio
import select
import zlib
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol

import msgspec
from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from gateway.exceptions import fresh

HEAD_BYTES_MAX = 64 << 10  # of the fields of a response
QUIET_BYTES_MAX = 2 * HEAD_BYTES_MAX  # read without a byte of a body, as trailers and interim responses are
BUFFER_BYTES_MAX = 128 << 10  # of an unread body; beyond it reading from the server pauses
INFLATED_BYTES_MAX = 64 << 20
DRAIN_WITHIN_S = 1.0


class TransportError(Exception):
    """The base of the transport's errors: an exchange failed."""


class Unreachable(TransportError):
    """No connection could be made."""


class NotAsked(Unreachable):
    """This host has no descriptor, port or memory for a connection, or its resolver does not
    answer.
    """


class Disconnected(TransportError):
    """The connection ended before the response did."""


class NotHTTP(TransportError):
    """The server sent bytes that are not an HTTP/1.1 response, or too many."""


class Exchange(msgspec.Struct, eq=False):
    """One request and its response. One reader at a time; `close` from anywhere.

    `lines`, the head, and `body` are written together; `pieces` is the rest of a long body, written
    as the server takes it.
    """

    lines: bytes
    body: bytes = b""
    pieces: AsyncIterator[bytes] | None = None
    status: int = 0  # until the response's head has arrived
    headers: Mapping[bytes, bytes] = {}  # by lower-case name; the last of repeated ones
    is_answered: bool = False  # a byte of the response has arrived
    is_complete: bool = False  # all of it has arrived, read or not
    opening: asyncio.Timeout | None = None  # set while the pool connects for it
    _buffer: list[bytes] = []
    connection: Connection | None = None  # that serves it
    _error: TransportError | None = None
    _inflater: Any = None
    _is_released: bool = False
    _waiter: asyncio.Future[None] | None = None

    @property
    def is_over(self) -> bool:
        """Whether the response is complete or has failed."""
        return self.is_complete or self._error is not None

    async def answered(self) -> None:
        """Wait for status and headers, ignoring interim (1xx) responses. Raises TransportError."""
        while not self.status:
            if self._error is not None:
                raise fresh(self._error)
            await self._wait()

    async def read(self) -> bytes:
        """The bytes of the body since the last read, at least one; empty at its end.

        Raises TransportError.
        """
        while True:
            if self._buffer:
                data = self._buffer[0] if len(self._buffer) == 1 else b"".join(self._buffer)
                self._buffer.clear()
                if self.connection is not None:
                    self.connection.resume()
                if self._inflater is not None:
                    data = self._inflated(data)
                if data:
                    return data
            elif self._error is not None:
                raise fresh(self._error)
            elif self.is_complete:
                return b""
            else:
                await self._wait()

    async def feed(self) -> None:
        """Write `pieces` until they end or a response arrives; after an early response the
        connection closes.
        """
        connection = self.connection
        while self.pieces is not None and connection is not None and not (self.is_over or self.status):
            piece = await anext(self.pieces, None)
            if piece is None:
                self.pieces = None
            elif not self.is_over:
                connection.transport.write(piece)
                while connection.is_full and not (self.is_over or self.status):
                    await self._wait()

    def release(self) -> None:
        """Ignore the rest of the response; its connection is then reused, or closed after
        DRAIN_WITHIN_S.
        """
        self._buffer.clear()
        self._is_released = True
        if not self.is_over:
            asyncio.get_running_loop().call_later(DRAIN_WITHIN_S, self.close)
            if self.connection is not None:
                self.connection.resume()

    def close(self) -> None:
        """Close the connection of an unfinished exchange, at once.

        A pending read raises Disconnected.
        """
        if self.is_over:
            return
        connection = self.connection
        self._is_released = True
        self.end(Disconnected("the exchange was given up"))
        if connection is not None:
            connection.abort()
        if self.opening is not None:
            self.opening.reschedule(0.0)

    # -- called by its connection ------------------------------------------------------------------

    def retry(self) -> bool:
        """Prepare for a new connection after the old one was lost unanswered; returns False if not
        allowed.
        """
        if self.is_answered or not isinstance(self._error, Disconnected) or self._is_released:
            return False
        self._error = None
        return True

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.headers = headers
        self.status = status
        coding = headers.get(b"content-encoding", b"identity").strip().lower()
        if coding in (b"gzip", b"x-gzip", b"deflate"):
            self._inflater = zlib.decompressobj(wbits=47)  # either
        elif coding not in (b"identity", b""):
            self.end(NotHTTP(f"the body is coded as {coding[:40]!r}, which the request does not accept"))

    def arrive(self, data: bytes) -> bool:
        """Take part of the body; returns True if the connection should pause until the part is
        read.
        """
        if not self._is_released and self._error is None:
            self._buffer.append(data)
        return sum(map(len, self._buffer)) > BUFFER_BYTES_MAX

    def end(self, error: TransportError | None = None) -> None:
        """End the exchange; later calls change nothing."""
        if not self.is_over:
            self._error = error
            self.is_complete = error is None
        self.connection = None
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


class Owner(Protocol):
    """The owner of connections, such as a pool."""

    def opened(self, connection: Connection) -> None: ...
    def freed(self, connection: Connection) -> None: ...
    def lost(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """One connection. Notifies its owner when it is open, free for another exchange, and lost."""

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._exchange: Exchange | None = None
        self.transport: Any = None  # uvloop's class is not declared as one of asyncio
        self._is_paused = False
        self.is_full = False  # the server takes what is written too slowly
        self._messages = 0  # of this exchange that have begun and are not interim
        self._is_kept_alive = False
        self._quiet_bytes = 0
        self._parts: list[bytes] = []
        self._parts_at_end: int | None = None  # those of the response, once it is complete
        self._headers: dict[bytes, bytes] = {}
        self.on_body = self._parts.append  # without Python code
        # decision: own-http-client
        self._parser: Any = HttpResponseParser(self)
        # common errors of servers, which other clients accept too
        self._parser.set_dangerous_leniencies(
            lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
        )

    # -- called by its owner -----------------------------------------------------------------------

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open and its socket has nothing to read."""
        if self.transport is None or self.transport.is_closing():
            return False
        arrived = select.poll()
        arrived.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return not arrived.poll(0)

    def begin(self, exchange: Exchange) -> None:
        """Send a request; the connection takes no other exchange until the response is over."""
        assert self._exchange is None
        self._exchange, exchange.connection = exchange, self
        self._messages = self._quiet_bytes = 0
        self._parts_at_end = None
        self.transport.writelines((exchange.lines, exchange.body))

    def abort(self) -> None:
        """Close the connection at once."""
        self._end(Disconnected("the connection was closed"))

    def detach(self) -> asyncio.Transport:
        """Give the transport to another protocol, after a CONNECT."""
        transport, self.transport = self.transport, None
        self._end(None)
        return transport  # type: ignore[no-any-return]

    # -- called by its exchange --------------------------------------------------------------------

    def resume(self) -> None:
        if self._is_paused and self.transport is not None:
            self._is_paused = False
            self.transport.resume_reading()

    # -- called by its transport -------------------------------------------------------------------

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._exchange is not None:
            self._exchange.wake()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.abort()  # bytes without a request
            return
        exchange.is_answered = True
        self._quiet_bytes += len(data)
        error: TransportError | None = None
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as bad:
            error = NotHTTP(f"{type(bad).__name__}: {bad}"[:200])
        if parts := self._parts[: self._parts_at_end]:
            self._parts.clear()
            self._quiet_bytes = 0
            if exchange.arrive(parts[0] if len(parts) == 1 else b"".join(parts)):
                self._is_paused = True
                self.transport.pause_reading()
        if self._parts_at_end is not None:
            self._complete(exchange, is_clean=error is None and not exchange.is_over)
        elif error is not None or self._quiet_bytes > QUIET_BYTES_MAX or exchange.is_over:
            self._end(error or NotHTTP(f"more than {QUIET_BYTES_MAX} bytes without a body"))
        elif parts or exchange.status:
            exchange.wake()

    def _complete(self, exchange: Exchange, is_clean: bool) -> None:
        """End the exchange, and free the connection or close it.

        It is freed if the server has read the whole request, and sent no more than its answer.
        """
        self.resume()
        is_sent = exchange.pieces is None and not self.transport.get_write_buffer_size()
        if is_clean and is_sent and self._messages == 1 and self._is_kept_alive and not self.transport.is_closing():
            self._exchange = None
            exchange.end()
            self._owner.freed(self)
        else:
            self._end(None)

    def eof_received(self) -> bool:
        exchange = self._exchange
        framed = (b"content-length", b"transfer-encoding")
        if exchange is not None and exchange.status and not any(name in exchange.headers for name in framed):
            self._end(None)  # the body lasts until the connection's end
        return False  # lets the transport close

    def connection_lost(self, error: Exception | None) -> None:
        told = f"{type(error).__name__}: {error}" if error is not None else "closed by the server"
        self._end(Disconnected(f"the connection was lost: {told}"))

    def _end(self, error: TransportError | None) -> None:
        """End the exchange and the connection; notifies the owner once."""
        exchange, self._exchange = self._exchange, None
        transport, self.transport = self.transport, None
        if exchange is not None:
            exchange.end(error)
        if transport is not None:
            transport.abort()
        if self._parser is not None:
            self._parser = None  # breaks a reference cycle
            self._owner.lost(self)

    # -- called by its parser ----------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._messages += 1
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if self._parts_at_end is not None or self._exchange is None:
            return  # a second response
        if sum(map(len, self._headers)) + sum(map(len, self._headers.values())) > HEAD_BYTES_MAX:
            raise ValueError(f"more than {HEAD_BYTES_MAX} bytes of fields")
        if status < 200:
            self._messages -= 1
        else:
            self._exchange.head(status, self._headers)
            self._headers = {}  # for the trailers

    def on_message_complete(self) -> None:
        if self._messages and self._parts_at_end is None:
            self._parts_at_end = len(self._parts)
            self._is_kept_alive = self._parser.should_keep_alive()  # the parser knows it only now
