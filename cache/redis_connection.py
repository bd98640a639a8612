"""One connection to one Redis server: commands leave in one write, replies arrive in order.

Replaces redis-py's asyncio connection for plain servers with a socket, hiredis's reader and a
queue; redis-py took a third of a miss's CPU (docs/benchmarks.md, "What a request costs"). redis-py
still serves Cluster and Sentinel. `tests/transport/test_redis_link.py` compares the replies with
redis-py's.

Protocol: RESP3, https://redis.io/docs/latest/develop/reference/protocol-spec/. Knows no keys.
Invariant: every command ends exactly once, with a reply or an error, and none waits longer than its
time-out.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import hiredis
import msgspec
from redis.asyncio import ConnectionPool, SSLConnection, UnixDomainSocketConnection
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoScriptError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

Command = tuple[Any, ...]

_ERRORS: Mapping[str, type[RedisError]] = {
    "NOSCRIPT": NoScriptError,
    "LOADING": BusyLoadingError,
    "READONLY": ReadOnlyError,
    "NOAUTH": AuthenticationError,
    "WRONGPASS": AuthenticationError,
}


class Pending(msgspec.Struct):
    """One command and the future of its reply.

    `understand` converts the reply as redis-py does. `script` is the source of an EVALSHA's digest.
    `is_repeated` marks a command that was sent before, on a connection that was lost.
    """

    command: Command
    future: "asyncio.Future[Any]"
    understand: Callable[[Any], Any] | None = None
    script: str | None = None
    is_repeated: bool = False
    sent_at: float = 0.0  # on the loop's clock


class RedisWire(asyncio.Protocol):
    """One connection to a Redis server.

    Calls `on_lost(error, unanswered)` once, if the connection is lost, and `on_refused` for each
    error reply.
    """

    def __init__(
        self,
        timeout_s: float,
        on_lost: Callable[[RedisError, list[Pending]], None],
        on_refused: Callable[[Pending, RedisError], None],
    ) -> None:
        self._timeout_s = timeout_s
        self._on_refused = on_refused
        self._on_lost: Callable[[RedisError, list[Pending]], None] | None = on_lost
        self._reader = hiredis.Reader(replyError=_error)
        self._unanswered: deque[Pending] = deque()
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def serve(self, on_lost: Callable[[RedisError, list[Pending]], None]) -> None:
        """Replace the callback after the greeting.

        Raises ConnectionError if the connection is already lost.
        """
        if self._on_lost is None:
            raise RedisConnectionError("the connection was lost at once")
        self._on_lost = on_lost

    @property
    def unanswered(self) -> "list[asyncio.Future[Any]]":
        """The futures of the commands that wait for a reply."""
        return [pending.future for pending in self._unanswered]

    def send(self, batch: list[Pending]) -> None:
        """Write all commands at once; their futures get the replies.

        A command that cannot be encoded fails alone.
        """
        assert self._transport is not None
        now, parts = self._loop.time(), list[bytes]()
        for pending in batch:
            try:
                parts.append(hiredis.pack_command(pending.command))
            except (TypeError, ValueError) as error:
                fail(pending, ResponseError(f"not a command: {error}"))
                continue
            pending.sent_at = now
            self._unanswered.append(pending)
        self._transport.write(b"".join(parts))
        if self._timer is None and self._unanswered:
            self._timer = self._loop.call_later(self._timeout_s, self._check)

    def data_received(self, data: bytes) -> None:
        reader, unanswered = self._reader, self._unanswered
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                if isinstance(reply, hiredis.PushNotification):  # of RESP3: no command's reply
                    continue
                if not unanswered:
                    self.end(RedisConnectionError("a reply that no command asked for"))
                    return
                pending = unanswered.popleft()
                if isinstance(reply, RedisError):
                    self._on_refused(pending, reply)
                else:
                    answer(pending, reply)
        except (hiredis.ProtocolError, MemoryError) as error:  # MemoryError: an absurd length
            self.end(RedisConnectionError(f"not Redis' protocol: {error}"))

    def _check(self) -> None:
        """End the connection if the oldest command waited too long, else set the timer for it."""
        self._timer = None
        if not self._unanswered:
            return
        late_s = self._loop.time() - self._unanswered[0].sent_at - self._timeout_s
        if late_s >= 0:
            self.end(RedisTimeoutError(f"no reply within {self._timeout_s:g} s"))
        else:
            self._timer = self._loop.call_later(-late_s, self._check)

    def connection_lost(self, error: Exception | None) -> None:
        self.end(RedisConnectionError(f"the connection was lost: {error or 'closed by Redis'}"))

    def end(self, error: RedisError) -> None:
        """Close the connection, and call the callback if that was not done."""
        on_lost, self._on_lost = self._on_lost, None
        unanswered = list(self._unanswered)
        self._unanswered.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        if on_lost is not None:
            on_lost(error, unanswered)

    def close(self) -> None:
        """Close the connection without the callback; unanswered commands fail."""
        if self._on_lost is not None:
            self._on_lost = _fail_all
        self.end(RedisConnectionError("the connection was closed"))


async def open_connection(
    url: str,
    timeout_s: float,
    on_lost: Callable[[RedisError, list[Pending]], None],
    on_refused: Callable[[Pending, RedisError], None],
) -> RedisWire:
    """An authenticated connection to `url`. For the callbacks see `RedisWire`. Raises RedisError.

    redis-py reads the URL: `redis://[user[:password]@]host[:port][/db]`, `rediss://`,
    `unix://[user[:password]@]path`, each with options as in `?db=1&ssl_ca_certs=PATH`.
    """
    server = _server_of(url)
    loop = asyncio.get_running_loop()

    def make() -> RedisWire:
        # a lost greeting is an error, and is not repeated
        return RedisWire(timeout_s, _fail_all, on_refused)

    try:
        async with asyncio.timeout(timeout_s):
            if isinstance(server, UnixDomainSocketConnection):
                _, wire = await loop.create_unix_connection(make, server.path)
            else:
                tls = server.ssl_context.get() if isinstance(server, SSLConnection) else None
                _, wire = await loop.create_connection(make, server.host, server.port, ssl=tls)
    except TimeoutError:
        raise RedisTimeoutError(f"no connection within {timeout_s:g} s") from None
    except OSError as error:
        raise RedisConnectionError(f"no connection: {error}") from None
    batch = [Pending(command, loop.create_future()) for command in _greeting(server)]
    wire.send(batch)
    try:
        await asyncio.gather(*(pending.future for pending in batch))
    except RedisError:
        wire.close()
        raise
    wire.serve(on_lost)
    return wire


@lru_cache(maxsize=8)  # what redis-py makes for a URL is a cycle, for the collector alone to free
def _server_of(url: str) -> Any:
    pool: Any = ConnectionPool.from_url(url)
    return pool.make_connection()


def _fail_all(error: RedisError, unanswered: list[Pending]) -> None:
    for pending in unanswered:
        fail(pending, error)


def _greeting(server: Any) -> list[Command]:
    auth = ("AUTH", server.username or "default", server.password) if server.password else ()
    commands: list[Command] = [("HELLO", "3", *auth)]
    if server.db:
        commands.append(("SELECT", server.db))
    return commands


def answer(pending: Pending, reply: Any) -> None:
    """Resolve the command's future with its reply, converted as redis-py does."""
    if not pending.future.done():
        try:
            pending.future.set_result(reply if pending.understand is None else pending.understand(reply))
        except Exception as error:  # the reply does not fit: an error of the command alone
            pending.future.set_exception(error)


def fail(pending: Pending, error: RedisError) -> None:
    """Fail the command's future, without a warning if its caller was cancelled.

    The future gets a copy: an error that several raised would keep the frames of all.
    """
    if not pending.future.done():
        copy = type(error).__new__(type(error), *error.args)
        copy.__dict__.update(error.__dict__)
        pending.future.set_exception(copy)
        pending.future.exception()


def _error(text: str) -> RedisError:
    kind = _ERRORS.get(text.partition(" ")[0], ResponseError)
    return kind(text)
