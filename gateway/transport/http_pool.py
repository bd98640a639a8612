"""The connections to one server: opened on demand, kept alive between exchanges, last used first.

Replaces aiohttp's connector, with `http_client`. Knows one origin and its proxy, and no messages.
Sources: RFC 9110 section 9.3.6 (CONNECT), RFC 9112 section 9.3.1 (retries). Invariants: a server is
trusted only by its certificate; a request is sent again at most once, on a new connection, and only
if a kept connection closed before a byte of the answer.
"""

from __future__ import annotations

import asyncio
import base64
import socket
import ssl
import urllib.request
from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, unquote, urlsplit

from cache.event_loop import is_own_want
from gateway.exceptions import let_go
from gateway.transport.http_client import Connection, Disconnected, Exchange, NotAsked, TransportError, Unreachable
from policies.durations import duration_s

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Origin:
    """A server's address. `proxy` is an http:// or https:// URL, possibly with credentials.

    `socket_path` is that of the server's unix socket, which then replaces host and port.
    """

    host: str
    port: int
    is_tls: bool
    proxy: SplitResult | None = None
    socket_path: str = ""

    @property
    def authority(self) -> str:
        """The origin's value in the `Host` header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS["https" if self.is_tls else "http"] else f"{host}:{self.port}"

    @property
    def is_forwarded(self) -> bool:
        """Whether the proxy forwards requests, whose target is then the whole URL; TLS uses a
        tunnel.
        """
        return self.proxy is not None and not self.is_tls


class Pool:
    """Connections to `origin`.

    At most `idle_max` idle connections stay open, each for at most `keep_alive_s`.
    """

    def __init__(self, origin: Origin, connect_timeout_s: float, idle_max: int, keep_alive_s: float = 60.0) -> None:
        self._origin = origin
        self._connect_timeout_s = connect_timeout_s
        self._idle_max = idle_max
        self._keep_alive_s = keep_alive_s
        # the time since which each is idle, on the loop's clock; the last used last
        self._idle: dict[Connection, float] = {}
        self._open: set[Connection] = set()
        self._reaper: asyncio.TimerHandle | None = None
        proxy = origin.proxy
        self._tls = _Resuming.build() if origin.is_tls or (proxy is not None and proxy.scheme == "https") else None

    def aclose(self) -> None:
        """Close every connection; running exchanges fail."""
        for connection in list(self._open):
            connection.abort()
        if self._reaper is not None:
            self._reaper.cancel()
            self._reaper = None

    async def send(self, exchange: Exchange) -> None:
        """Send the request and wait for the response's head.

        `exchange.close` ends the wait. Raises TransportError.
        """
        kept = self._take() if exchange.pieces is None else None  # pieces cannot be sent again
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
        await exchange.feed()
        await exchange.answered()

    # -- called by connections; see http_client.Owner ----------------------------------------------

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
            self._reaper = loop.call_later(self._keep_alive_s, self._reap)

    def lost(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._idle.pop(connection, None)

    def _take(self) -> Connection | None:
        """The last used connection, which the server is the least likely to have closed."""
        while self._idle:
            connection, _ = self._idle.popitem()
            if connection.is_usable:
                return connection
            connection.abort()
        return None

    def _reap(self) -> None:
        """Close connections that were idle for `keep_alive_s`."""
        self._reaper = None
        loop = asyncio.get_running_loop()
        while self._idle:
            connection, since = next(iter(self._idle.items()))
            left_s = since + self._keep_alive_s - loop.time()
            if left_s > 0:
                self._reaper = loop.call_later(left_s, self._reap)
                return
            connection.abort()

    # -- connecting --------------------------------------------------------------------------------

    async def _connect(self, exchange: Exchange) -> Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s) as exchange.opening:
                connection = await self._dial()
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            is_want, detail = is_own_want(error), f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError):
                detail = f"no connection within {duration_s(self._connect_timeout_s)}"
                detail += ": this host's resolver does not answer" if is_want else ""
            let_go(error)
            raise (NotAsked if is_want else Disconnected if exchange.is_over else Unreachable)(detail) from None
        finally:
            exchange.opening = None
        if exchange.is_over:
            connection.abort()
            raise Disconnected("the exchange was given up")
        return connection

    async def _dial(self) -> Connection:
        """A new connection to the origin. Raises OSError, Unreachable."""
        origin, proxy = self._origin, self._origin.proxy
        host, port, is_tls = origin.host, origin.port, origin.is_tls
        loop = asyncio.get_running_loop()
        if origin.socket_path:
            return (await loop.create_unix_connection(lambda: Connection(self), origin.socket_path))[1]
        if proxy is not None:
            if proxy.scheme not in _PORTS:
                raise Unreachable(f"a {proxy.scheme}:// proxy is not supported, only http:// and https://")
            host, port, is_tls = proxy.hostname or "", proxy.port or _PORTS[proxy.scheme], proxy.scheme == "https"
        _, connection = await loop.create_connection(
            lambda: Connection(self), host, port, flags=socket.AI_ADDRCONFIG, ssl=self._tls if is_tls else None
        )
        if proxy is None or not origin.is_tls:
            return connection
        return await self._tunnel(connection, proxy)

    async def _tunnel(self, hop: Connection, proxy: SplitResult) -> Connection:
        """Open TLS to the origin through the proxy's CONNECT. Raises Unreachable if the proxy
        refuses.
        """
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
        if secured is None:  # the connection ended during the handshake
            raise Unreachable("the proxy closed the connection")
        connection.connection_made(secured)
        return connection


def split_socket(url: str) -> tuple[str, str]:
    """The unix socket of a URL, and its URL below that socket; an empty path without one.

    nginx's spelling: `http://unix:/run/server.sock:/v1` (ngx_http_proxy_module, `proxy_pass`).
    """
    parts = urlsplit(url)
    if parts.netloc != "unix:":
        return "", url
    socket_path, _, path = parts.path.partition(":")
    return socket_path, parts._replace(netloc="localhost", path=path).geturl()


def proxy_of(scheme: str, host: str) -> SplitResult | None:
    """The proxy from the environment for a server (HTTPS_PROXY, NO_PROXY, ...); None for this
    machine.
    """
    if host == "localhost" or host.startswith("127.") or host == "::1" or urllib.request.proxy_bypass(host):
        return None
    proxy = urllib.request.getproxies().get(scheme)
    return urlsplit(proxy if "://" in proxy else f"http://{proxy}") if proxy else None


def proxy_authorization(proxy: SplitResult) -> bytes:
    """The header with the credentials in the proxy's URL; empty without credentials."""
    if proxy.username is None:
        return b""
    return b"Proxy-Authorization: %b\r\n" % basic(proxy)


def basic(url: SplitResult) -> bytes:
    """The credentials in `url` in the form of RFC 7617."""
    pair = f"{unquote(url.username or '')}:{unquote(url.password or '')}"
    return b"Basic " + base64.b64encode(pair.encode())


class _Resuming(ssl.SSLContext):
    """Verifies certificates, and resumes the last session with each server to save a key exchange."""

    _sessions: dict[str, ssl.SSLSession]

    @classmethod
    def build(cls) -> _Resuming:
        context = cls(ssl.PROTOCOL_TLS_CLIENT)  # checks certificates and host names
        context._sessions = {}
        context.load_default_certs()
        context.set_alpn_protocols(["http/1.1"])
        return context

    def remember(self, transport: asyncio.BaseTransport) -> None:
        """Keep the session of a used connection: in TLS 1.3, tickets follow the handshake."""
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if secured is not None and secured.server_hostname is not None and secured.session is not None:
            self._sessions[secured.server_hostname] = secured.session

    def wrap_bio(self, *arguments: Any, **options: Any) -> ssl.SSLObject:
        session = self._sessions.get(options.get("server_hostname") or "")
        return super().wrap_bio(*arguments, **{"session": session, **options})
