"""Serves an ASGI application by granian: hyper, its parser, reads all of the clients' bytes.

granian bounds a head's size and time and idle connections, and ends a connection whose answer ends
unfinished. This module adds: a callback that reports a departed client, reading the rest of a body
that was answered early, and a kernel time-out for a client that reads nothing. The endpoints bound
the size, time and sum of bodies (`gateway/journey/bodies.py`).

Sources: ASGI HTTP specification 2.3; granian 2.8, `granian.server.embed`. Knows no endpoints.
Invariant: the workers listen on one address with SO_REUSEPORT, and the kernel divides connections.
"""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP1Settings
from granian.server.embed import Server

WHEN_GONE = "sameway.when_gone"
"""The ASGI extension with a function that registers a callback for a client that leaves."""

HEAD_BYTES_MAX = 64 << 10
_CONNECTIONS_MAX = 1 << 16  # the limit of open files comes first
_BACKLOG = 2048
_KEEP_ALIVE_MS = 75_000  # longer than SDKs keep an idle connection, so that the client closes it first
_WATCH_AFTER_S = 0.05  # most answers are complete before, and need no watch
_LINGER_S, _LINGER_IDLE_S = 30.0, 1.0  # of a body that is read on after its answer
_UNSENT_BYTES = 128 << 10  # of a connection, in the kernel; it would take megabytes

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def reserve(host: str, port: int) -> socket.socket:
    """Bind a socket to the workers' address; port 0 picks a free port. Raises OSError."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    reserved = socket.socket(family, socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(address)  # an error if another program listens there, or another gateway
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # from now on the workers may
    except OSError:
        reserved.close()
        raise
    return reserved


class HttpServer:
    """Serves `app` on `address`, an IP address, and `port`.

    A client that reads no byte for `stall_s` seconds loses its connection.
    """

    def __init__(self, app: App, address: str, port: int, stall_s: int) -> None:
        self.requests: set[asyncio.Task[None]] = set()
        self._app = app
        self._port = port
        self._stall_s = stall_s
        self._server = Server(
            self._answer,
            address=address,
            port=port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.http1,
            websockets=False,
            backlog=_BACKLOG,
            backpressure=_CONNECTIONS_MAX,
            http1_settings=HTTP1Settings(header_read_timeout=_KEEP_ALIVE_MS, max_buffer_size=HEAD_BYTES_MAX),
            log_enabled=False,
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises OSError if the address is not available."""
        # decision: granian-reads-http
        self._serving = asyncio.ensure_future(self._server.serve())
        # RFC 5482's limit counts a closed window, too; the other leaves a slow client's backlog with its deployment
        inherited = (("TCP_USER_TIMEOUT", self._stall_s * 1000), ("TCP_NOTSENT_LOWAT", _UNSENT_BYTES))
        is_listening = False
        while not is_listening:
            if self._serving.done():
                self._serving.result()
            await asyncio.sleep(0.01)
            for listener in self._listeners():
                is_listening = True
                for name, value in inherited:
                    if hasattr(socket, name):
                        listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def _listeners(self) -> Iterator[socket.socket]:
        """This process's sockets that listen on the port: granian does not expose its own."""
        for fd in map(int, os.listdir("/dev/fd")):
            with contextlib.suppress(OSError):  # closed meanwhile
                if stat.S_ISSOCK(os.fstat(fd).st_mode):
                    with socket.socket(fileno=os.dup(fd)) as listener:
                        is_open = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                        if is_open and listener.getsockname()[1:2] == (self._port,):
                            yield listener

    async def stop(self, grace_s: float) -> None:
        """Take no more requests, wait for the running ones, and cancel them after `grace_s`."""
        self._server.stop()  # type: ignore[no-untyped-call]
        assert self._serving is not None
        await asyncio.wait([self._serving], timeout=grace_s)
        for request in self.requests:
            request.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.requests.add(task)
        exchange = _Exchange(scope["headers"], receive)
        scope["extensions"] = {WHEN_GONE: exchange.when_gone}
        try:
            await self._app(scope, exchange.receive, send)
            if not exchange.is_read():
                await exchange.linger()
        finally:
            exchange.when_gone(None)
            self.requests.discard(task)


class _Exchange:
    """One request: tracks how much of its body was read, and calls back when its client leaves."""

    __slots__ = ("_headers", "_is_whole", "_receive", "_size", "_watch")

    def __init__(self, headers: list[tuple[bytes, bytes]], receive: Receive) -> None:
        self._headers = headers  # not the scope, which refers to this exchange
        self._receive = receive
        self._is_whole = False
        self._size = 0
        self._watch: asyncio.TimerHandle | asyncio.Task[None] | None = None

    async def receive(self) -> Any:
        message = await self._receive()
        if message.get("more_body"):
            self._size += len(message["body"])
        else:
            self._is_whole = True
        return message

    def is_read(self) -> bool:
        """Whether the whole body has been read."""
        if self._is_whole:
            return True
        headers = dict(self._headers)
        return b"transfer-encoding" not in headers and int(headers.get(b"content-length", b"0")) == self._size

    def when_gone(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` if the client leaves before the response is complete; None removes it."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if callback is not None:
            self._watch = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._watch_for, callback)

    def _watch_for(self, callback: Callable[[], None]) -> None:
        self._watch = asyncio.create_task(self._until_gone(callback))

    async def _until_gone(self, callback: Callable[[], None]) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            continue
        self._watch = None  # the callback may end this exchange
        callback()

    async def linger(self) -> None:
        """Read the rest of a body that was answered early, so that its client sees the answer.

        A close with unread bytes would reset the connection (RFC 9112, section 9.6).
        """
        with contextlib.suppress(TimeoutError):
            ends_at_s = asyncio.get_running_loop().time() + _LINGER_S
            while not self._is_whole and asyncio.get_running_loop().time() < ends_at_s:
                async with asyncio.timeout(_LINGER_IDLE_S):
                    await self.receive()
