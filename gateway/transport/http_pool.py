"""The connections to one server: made as they are needed, kept alive between exchanges, the last used first.

Knows one origin and, where the environment names one, the proxy before it; nothing of what is said. Sources: RFC 9110 section 9.3.6
(CONNECT), RFC 9112 section 9.3.1 (retries), RFC 8305 (happy eyeballs, through aiohappyeyeballs). Invariants: a server is trusted by
its certificate or not at all; a request is sent a second time only where a kept connection turned out to be closed before a byte
of an answer came, once, on a fresh connection; names are resolved off the event loop.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote

from aiohappyeyeballs import start_connection

from gateway.transport.http_client import Connection, Disconnected, Exchange, TransportError, Unreachable

KEEP_ALIVE_S = 60.0
_DNS_TTL_S = 30.0
_NEXT_ADDRESS_AFTER_S = 0.25
_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a server is. `proxy` is an http:// or https:// URL, with credentials where it wants them."""

    host: str
    port: int
    is_tls: bool
    proxy: SplitResult | None = None

    @property
    def authority(self) -> str:
        """The origin as `Host` names it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    @property
    def is_forwarded(self) -> bool:
        """Requests are the proxy's to forward: their target is the whole URL. Through TLS it sees nothing but bytes."""
        return self.proxy is not None and not self.is_tls


class Pool:
    """Connections to `origin`; at most `idle_max` of them wait for work."""

    def __init__(self, origin: Origin, connect_timeout_s: float, idle_max: int) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._idle: dict[Connection, float] = {}  # with the time since when; the last used last
        self._open: set[Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        self._addresses: deque[Any] = deque()
        self._resolved_at = 0.0
        proxy = origin.proxy
        self._tls = _Resuming.build() if origin.is_tls or (proxy is not None and proxy.scheme == "https") else None

    def aclose(self) -> None:
        """Close every connection; exchanges break."""
        for connection in list(self._open):
            connection.abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def send(self, exchange: Exchange) -> None:
        """Send the request, and wait for the response's head. Raises TransportError; `exchange.close` ends it at any time."""
        kept = self._take()
        if kept is not None:
            kept.begin(exchange)
            try:
                await exchange.answered()
                return
            except Disconnected:
                if not exchange.retry():
                    raise
        connection = await self._connect(exchange)
        connection.begin(exchange)
        await exchange.answered()

    # -- keeping; see http1.Keeper -----------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        self._open.add(connection)

    def freed(self, connection: Connection) -> None:
        loop = asyncio.get_running_loop()
        self._idle[connection] = loop.time()
        if self._tls is not None:
            self._tls.remember(connection.transport)
        if len(self._idle) > self._idle_max:
            next(iter(self._idle)).abort()
        if self._reaper is None:
            self._reaper = loop.call_later(KEEP_ALIVE_S, self._reap)

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _take(self) -> Connection | None:
        """The connection that was used last: of those that are open it is the likeliest to stay so, and the others may go."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
        return None

    def _reap(self) -> None:
        """Close what nobody has used for a while."""
        self._reaper = None
        loop = asyncio.get_running_loop()
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            left_s = since + KEEP_ALIVE_S - loop.time()
            if left_s > 0:
                self._reaper = loop.call_later(left_s, self._reap)
                return
            connection.abort()

    # -- connecting --------------------------------------------------------------------------------------------------

    async def _connect(self, exchange: Exchange) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s) as exchange.opening:
                connection = await self._dial()
        except TimeoutError:
            if not exchange.is_over:
                raise Unreachable(f"no connection within {self._connect_timeout_s:g} s") from None
            raise Disconnected("the exchange was given up") from None
        except (OSError, UnicodeError) as error:  # UnicodeError: a host name that is none
            self._addresses.clear()
            raise Unreachable(f"{type(error).__name__}: {error}") from None
        finally:
            exchange.opening = None
        if exchange.is_over:
            connection.abort()
            raise Disconnected("the exchange was given up")
        return connection

    async def _dial(self) -> Connection:
        """A connection that speaks to the origin. Raises OSError, Unreachable."""
        origin, proxy = self._origin, self._origin.proxy
        loop = asyncio.get_running_loop()
        raw = await start_connection(
            await self._resolve(), happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S, interleave=1, loop=loop
        )
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        next_host, is_tls = (origin.host, origin.is_tls) if proxy is None else (proxy.hostname, proxy.scheme == "https")
        _, connection = await loop.create_connection(
            lambda: Connection(self),
            sock=raw,
            ssl=self._tls if is_tls else None,
            server_hostname=next_host if is_tls else None,
        )
        if proxy is None or not origin.is_tls:
            return connection
        return await self._tunnel(connection, proxy)

    async def _tunnel(self, hop: Connection, proxy: SplitResult) -> Connection:
        """TLS to the origin through a proxy that was asked to CONNECT. Raises Unreachable where it will not."""
        host = f"[{self._origin.host}]" if ":" in self._origin.host else self._origin.host
        target = f"{host}:{self._origin.port}".encode()
        exchange = Exchange(b"CONNECT %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (target, target, proxy_authorization(proxy)))
        try:
            hop.begin(exchange)
            await exchange.answered()
            if not 200 <= exchange.status < 300:
                raise Unreachable(f"the proxy answered HTTP {exchange.status}")
            transport, connection = hop.detach(), Connection(self)
        except BaseException as error:
            hop.abort()
            if isinstance(error, TransportError):
                raise Unreachable(f"no way through the proxy: {error}") from None
            raise
        assert self._tls is not None
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(transport, connection, self._tls, server_hostname=self._origin.host)
        except BaseException:
            transport.abort()
            raise
        if secured is None:  # what asyncio returns where the connection ended during the handshake
            raise Unreachable("the proxy closed the connection")
        connection.connection_made(secured)
        return connection

    async def _resolve(self) -> list[Any]:
        """The addresses of the next hop, in another order each time, so that work is spread where there are several."""
        loop = asyncio.get_running_loop()
        if not self._addresses or loop.time() - self._resolved_at > _DNS_TTL_S:
            proxy = self._origin.proxy
            host, port = self._origin.host, self._origin.port
            if proxy is not None:
                host, port = proxy.hostname or "", proxy.port or _PORTS.get(proxy.scheme, 80)
                if proxy.scheme not in _PORTS:
                    raise Unreachable(f"a {proxy.scheme}:// proxy is not supported, only http:// and https://")
            flags = socket.AI_ADDRCONFIG
            self._addresses = deque(await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags))
            self._resolved_at = loop.time()
        addresses = list(self._addresses)
        self._addresses.rotate(-1)
        return addresses


def proxy_authorization(proxy: SplitResult) -> bytes:
    """The header that gives the proxy the credentials in its URL; nothing where it has none."""
    if proxy.username is None:
        return b""
    return b"Proxy-Authorization: %b\r\n" % basic(proxy)


def basic(url: SplitResult) -> bytes:
    """The credentials in `url` as RFC 7617 has them."""
    pair = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    return b"Basic " + base64.b64encode(pair.encode())


class _Resuming(ssl.SSLContext):
    """Verifies, and resumes the last session with each server: a new connection costs it no second key exchange."""

    _sessions: dict[str, ssl.SSLSession]

    @classmethod
    def build(cls) -> _Resuming:
        context = cls(ssl.PROTOCOL_TLS_CLIENT)  # which checks certificates and host names
        context._sessions = {}
        context.load_default_certs()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def remember(self, transport: asyncio.BaseTransport) -> None:
        """Keep the session of a connection that has served: with TLS 1.3, tickets come after the handshake."""
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secured is not None and secured.server_hostname is not None and secured.session is not None:
            self._sessions[secured.server_hostname] = secured.session

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        session = self._sessions.get(options.get("server_hostname") or "")
        return super().wrap_bio(*arguments, **{"session": session, **options})
