"""The processes' event loop: uvloop's, with name lookups that do not delay other connections.

uvloop looks up every address, even a literal one, in libuv's few threads, where a resolver that
does not answer delays every connection. Here a literal address needs no thread, and a name's lookup
has its own thread, which all callers share. Every library of a process connects through its loop.

Knows no protocols and no servers. Sources: RFC 8305 (happy eyeballs, through aiohappyeyeballs), RFC
8767 (stale addresses). Invariants: a name has one lookup at a time; a known address is used until
the resolver gives another answer; a call that ends while the resolver is silent has that as its
cause.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections import OrderedDict
from concurrent.futures import Future
from typing import Any

import msgspec
import uvloop
from aiohappyeyeballs import start_connection

_FRESH_S = 30.0
_PATIENCE_S = 0.5  # with a lookup, where an address is known, or the resolver is silent
_SILENT_AFTER_S = 6.0  # glibc asks the second server of resolv.conf after 5 s
_NEXT_ADDRESS_AFTER_S = 0.25
_LOOKUPS_MAX = 64
_NAMES_MAX = 1_000
_ANSWERS = frozenset({socket.EAI_NONAME, socket.EAI_NODATA, socket.EAI_ADDRFAMILY, socket.EAI_FAMILY})
_WANTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL, errno.ENETDOWN})


def is_own_want(error: BaseException | None) -> bool:
    """Whether a connection failed because this host lacks descriptors, ports, memory or a
    resolver's answer.

    Reads `error`, its cause and its context.
    """
    while error is not None:
        if isinstance(error, socket.gaierror):
            return error.errno not in _ANSWERS
        if isinstance(error, OSError) and error.errno in _WANTS:
            return True
        error = error.__cause__ or error.__context__
    return False


class _Name(msgspec.Struct, eq=False):
    addresses: list[Any] = []
    fresh_until: float = 0.0  # on the loop's clock
    lookup: asyncio.Future[list[Any]] | None = None
    began: float = 0.0  # the lookup
    asked_since: float | None = None  # no answer has come since


class Loop(uvloop.Loop):
    """An event loop for `uvloop.run(..., loop_factory=Loop)`."""

    def __init__(self) -> None:
        super().__init__()
        self._names: OrderedDict[tuple[Any, ...], _Name] = OrderedDict()

    async def getaddrinfo(
        self, host: Any, port: Any, *, family: int = 0, type: int = 0, proto: int = 0, flags: int = 0
    ) -> list[Any]:
        """Look a host up as `socket.getaddrinfo` does; the addresses of a name are rotated."""
        try:
            return socket.getaddrinfo(host, port, family, type, proto, flags | socket.AI_NUMERICHOST)
        except socket.gaierror as error:
            if error.errno != socket.EAI_NONAME:
                raise
        key = (host, family, type, proto, flags)
        name = self._names.setdefault(key, _Name())
        self._names.move_to_end(key)
        if self.time() >= name.fresh_until:
            await self._refresh(key, name)
        addresses, name.addresses = name.addresses, name.addresses[1:] + name.addresses[:1]
        number = socket.getaddrinfo("127.0.0.1", port)[0][4][1]
        return [(*kinds, (at[0], number, *at[2:])) for *kinds, at in addresses]

    async def create_connection(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> tuple[Any, Any]:
        """Do as asyncio's method, but try the addresses of `host` at short intervals.

        After a failure the addresses are looked up again.
        """
        if host is None or options.get("local_addr") is not None:
            return await super().create_connection(protocol_factory, host, port, **options)
        family, proto, flags = (options.pop(part, 0) for part in ("family", "proto", "flags"))
        where = await self.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, proto=proto, flags=flags)
        try:
            sock = await start_connection(where, happy_eyeballs_delay=_NEXT_ADDRESS_AFTER_S, interleave=1, loop=self)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if options.get("ssl"):
                options["server_hostname"] = options.get("server_hostname") or host
            return await super().create_connection(protocol_factory, **{**options, "sock": sock})
        except BaseException:
            if (name := self._names.get((host, family, socket.SOCK_STREAM, proto, flags))) is not None:
                name.fresh_until = 0.0
            raise

    async def _refresh(self, key: tuple[Any, ...], name: _Name) -> None:
        """Wait for the resolver, or only for a moment if an address is known or the resolver is
        silent.

        Raises OSError if then no address is known.
        """
        lookup, now = name.lookup or self._look_up(key, name), self.time()
        is_silent = name.asked_since is not None and now - name.asked_since > _SILENT_AFTER_S
        patience_s = max(0.0, name.began + _PATIENCE_S - now) if name.addresses or is_silent else None
        silence = socket.gaierror(socket.EAI_AGAIN, f"this host's resolver does not answer about {key[0]!r}")
        try:
            await asyncio.wait([lookup], timeout=patience_s)
        except asyncio.CancelledError as cancelled:
            raise cancelled from silence  # a time-out's cause
        error = lookup.exception() if lookup.done() else silence
        if error is not None and not name.addresses:
            raise type(error)(*error.args)

    def _look_up(self, key: tuple[Any, ...], name: _Name) -> asyncio.Future[list[Any]]:
        """Begin a lookup, which fails at once if too many run."""
        count = sum(one.lookup is not None for one in self._names.values())
        while len(self._names) > _NAMES_MAX:
            self._names.popitem(last=False)
        addresses: Future[list[Any]] = Future()
        name.began = self.time()
        name.asked_since = name.began if name.asked_since is None else name.asked_since
        name.lookup = asyncio.wrap_future(addresses, loop=self)
        name.lookup.add_done_callback(lambda lookup: self._learn(name, lookup))
        if count >= _LOOKUPS_MAX:
            addresses.set_exception(socket.gaierror(socket.EAI_AGAIN, f"{count} other lookups wait for the resolver"))
            return name.lookup
        try:  # no executor's: the process would wait for its threads at its end
            threading.Thread(target=_find, args=(addresses, key), name=f"lookup {key[0]}", daemon=True).start()
        except RuntimeError as error:
            addresses.set_exception(socket.gaierror(socket.EAI_AGAIN, f"no thread for a lookup: {error}"))
        return name.lookup

    def _learn(self, name: _Name, lookup: asyncio.Future[list[Any]]) -> None:
        name.lookup = None
        error = lookup.exception()
        if is_own_want(error):
            return
        name.asked_since = None
        name.addresses = [] if error is not None else lookup.result()
        name.fresh_until = 0.0 if error is not None else self.time() + _FRESH_S


def _find(addresses: Future[list[Any]], key: tuple[Any, ...]) -> None:
    host, *kinds = key
    try:
        addresses.set_result(socket.getaddrinfo(host, 0, *kinds))
    except Exception as error:
        addresses.set_exception(error)
