"""The processes' Redis client: all commands of one tick of the event loop leave together.

Replaces redis-py's client for commands and scripts; a command is a future instead of a task. Plain
servers are reached through `redis_connection`, Sentinel and Cluster through redis-py's pipelines.
`tests/transport/test_redis_link.py` compares the replies of both with redis-py's.

Knows no keys or values. Commands run in the order in which they were issued. Invariants: no call
takes longer than two time-outs; from a failure until the answer to a probe, every call fails at
once. So an unreachable Redis costs a request milliseconds, not its deadline.
"""

import asyncio
import contextlib
import hashlib
import random
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cache.redis_client import cluster_nodes, connect
from cache.redis_connection import Command, Pending, RedisWire, answer, fail, open_connection

_PATIENCE_S = 0.002
_PROBE_AFTER_S = (0.05, 0.2, 0.5, 1.0)  # pauses between probes while Redis is away
_REPLICA_LEFT_EVERY_S = 1.0
# of a command, a key, and a command inside a script, by Redis 6 and by later ones
_DENIED = re.compile("no permissions|user executing the script", re.IGNORECASE)
_DENIED_FOR_S = 60.0
_LOST = (RedisConnectionError, RedisTimeoutError)
# a script, not PING: `CLIENT PAUSE WRITE` answers PING and holds scripts back
_PROBE: Command = ("EVAL", "return 1", 0)


class RedisLink:
    """`execute_command` and `eval` with redis-py's results, batched.

    `client` is redis-py's, for subscriptions and scans. `timeout_s` bounds a connection attempt and
    a reply. Calls raise redis.exceptions.RedisError: ConnectionError and TimeoutError while Redis
    is away, ResponseError for a bad command.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.client = connect(url, timeout_s)
        self.round_trips = 0  # counted for tests
        self.patience_s = _PATIENCE_S
        self._timeout_s = timeout_s
        # decision: own-redis-connection
        # each reply comes when it is there, in the order of the commands; a cluster's nodes have no order
        self.is_direct = "+" not in url.partition("://")[0]
        self._is_cluster = "+cluster" in url.partition("://")[0]
        # redis-py's conversions of replies, so that both ways give the same
        self._callbacks = self.client.response_callbacks if self.is_direct else {}
        self._wire: RedisWire | None = None
        self._waiting: list[Pending] = []
        self._is_scheduled = False
        self._pump: asyncio.Task[None] | None = None
        self._leaving: list[Callable[[], None]] = []
        self._shas: dict[str, str] = {}
        self._is_up = True
        self._why = ""  # it is away, in the words of the last try
        self._prober: asyncio.Task[None] | None = None
        self._stays_until = 0.0  # on the loop's clock
        self._denied = ("", 0.0)  # the last refusal of a permission, and until when it is told

    @property
    def is_up(self) -> bool:
        """False from a failure until the answer to a probe."""
        return self._is_up

    @property
    def denied(self) -> str:
        """Redis' error about a permission that its user lacked in the last minute; else empty."""
        words, until = self._denied
        return words if asyncio.get_running_loop().time() < until else ""

    def execute_command(self, *args: Any) -> Awaitable[Any]:
        """Issue one command at once; the result is its reply, as redis-py gives it.

        Raises RedisError when awaited.
        """
        return self._enqueue(Pending(args, asyncio.get_running_loop().create_future(), self._callbacks.get(args[0])))

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]:
        """Run a Lua script, sent by its SHA-1, or whole if Redis does not know it yet.

        Raises RedisError when awaited.
        """
        sha = self._shas.get(script)
        if sha is None:
            sha = self._shas[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        return self._enqueue(
            Pending(
                ("EVALSHA", sha, numkeys, *keys_and_args), asyncio.get_running_loop().create_future(), script=script
            )
        )

    def _enqueue(self, pending: Pending) -> "asyncio.Future[Any]":
        """Queue a command for the end of the tick.

        Creates no task, which would cost more than the command.
        """
        future = pending.future
        if not self._is_up:
            fail(pending, RedisConnectionError(f"Redis is away: {self._why}"))
            return future
        self._waiting.append(pending)
        if not self._is_scheduled:
            self._is_scheduled = True
            future.get_loop().call_soon(self._flush)
        return future

    def defer(self, leave: Callable[[], None]) -> None:
        """Call `leave` in about 2 ms with other deferred callbacks, so that their commands share a
        round trip.
        """
        self._leaving.append(leave)
        if len(self._leaving) == 1:
            asyncio.get_running_loop().call_later(self.patience_s, self._end_patience)

    def _end_patience(self) -> None:
        leaving, self._leaving = self._leaving, []
        for leave in leaving:
            leave()

    def _refused(self, pending: Pending, error: RedisError) -> None:
        """Handle an error reply: an unknown script is sent whole, any other error goes to the
        caller.

        The link leaves a replica: it would refuse writes for good, and another server may be the
        primary at this address by now.
        """
        if isinstance(error, NoScriptError) and pending.script is not None:
            pending.command = ("EVAL", pending.script, *pending.command[2:])
            pending.script = None
            self._enqueue(pending)
            return
        fail(pending, error)
        if _DENIED.search(str(error)):
            self._denied = (str(error), asyncio.get_running_loop().time() + _DENIED_FOR_S)
        if isinstance(error, ReadOnlyError) or "-READONLY" in str(error):  # Redis 6 has it within a script's error
            loop = asyncio.get_running_loop()
            if self._wire is not None and loop.time() >= self._stays_until:
                self._stays_until = loop.time() + _REPLICA_LEFT_EVERY_S
                loop.call_soon(self._wire.end, RedisConnectionError("the server is a replica"))

    def _flush(self) -> None:
        """Send the commands of this tick, or begin to connect.

        A command with a cancelled caller is sent, too: it may be a settlement.
        """
        self._is_scheduled = False
        if not self._waiting:
            return  # the batch was sent or failed already
        if self._wire is not None:
            batch, self._waiting = self._waiting, []
            self.round_trips += 1
            self._wire.send(batch)
        elif self._pump is None:
            self._pump = asyncio.create_task(self._connect() if self.is_direct else self._send_pooled())

    async def _connect(self) -> None:
        try:
            await self._open()
        except Exception as error:
            self._failed([], error if isinstance(error, RedisError) else RedisConnectionError(str(error)))
        finally:
            self._pump = None
        if self._waiting:
            self._flush()

    async def _open(self) -> RedisWire:
        """Return the connection, opened if necessary."""
        if self._wire is None:
            self._wire = await open_connection(self.url, self._timeout_s, self._lost, self._refused)
        return self._wire

    def _lost(self, error: RedisError, unanswered: list[Pending]) -> None:
        """Repeat unanswered commands once, on a new connection; scripts that change money are
        idempotent.

        After a time-out nothing is repeated: Redis hangs.
        """
        self._wire = None
        if isinstance(error, RedisTimeoutError):
            self._failed(unanswered, error)
            return
        repeated = [pending for pending in unanswered if pending.is_repeated]
        for pending in repeated:
            fail(pending, error)
        resent = [pending for pending in unanswered if not pending.is_repeated]
        for pending in resent:
            pending.is_repeated = True
        self._waiting = resent + self._waiting
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _send_pooled(self) -> None:
        """Send through redis-py, one pipeline at a time.

        Each pipeline has the commands issued during the last one.
        """
        while self._waiting:
            batch, self._waiting = self._waiting, []
            commands = [pending.command for pending in batch]
            try:
                try:
                    replies = await self._pipeline(commands)
                except RedisConnectionError:  # a pooled connection to a server that was restarted
                    replies = await self._pipeline(commands)
            except Exception as error:  # a cluster's are not always RedisError
                self._failed(batch, error if isinstance(error, RedisError) else RedisConnectionError(str(error)))
                continue
            for pending, reply in zip(batch, replies, strict=True):
                if isinstance(reply, RedisError):
                    self._refused(pending, reply)
                else:
                    answer(pending, reply)
        self._pump = None

    async def _pipeline(self, commands: list[Command]) -> list[Any]:
        self.round_trips += 1
        pipeline = self.client.pipeline(transaction=False)
        for args in commands:
            pipeline.execute_command(*args)
        replies: list[Any] = []
        try:
            replies = await pipeline.execute(raise_on_error=False)
        finally:
            if self._is_cluster and (not replies or any(isinstance(one, _LOST) for one in replies)):
                await (
                    self.client.aclose()
                )  # another node may have the slots by now: it asks for them before its next use
        return replies

    def _failed(self, batch: list[Pending], error: RedisError) -> None:
        """Fail the batch and all queued commands, which would fail too, and begin to probe."""
        behind, self._waiting = self._waiting, []
        for pending in (*batch, *behind):
            fail(pending, error)
        if self._is_up:
            self._is_up, self._why = False, str(error)
            self._prober = asyncio.create_task(self._probe_until_up())

    async def _probe_until_up(self) -> None:
        """Probe Redis, after growing pauses, until it answers. Only this task waits for a probe."""
        for pause_s in chain(_PROBE_AFTER_S, repeat(_PROBE_AFTER_S[-1])):
            await asyncio.sleep(pause_s)
            try:
                await self._probe()
            except Exception as error:
                self._why = str(error)
                continue
            self._is_up = True
            return

    async def _probe(self) -> None:
        """Raise an error if Redis does not answer; an error reply is an answer."""
        if not self.is_direct:
            (reply,) = await self._pipeline([_PROBE])
            if isinstance(reply, RedisConnectionError):  # it is loading its data
                raise reply
            return
        # marked as repeated: it fails with its connection, and the next probe opens another
        pending = Pending(_PROBE, asyncio.get_running_loop().create_future(), is_repeated=True)
        (await self._open()).send([pending])
        with contextlib.suppress(ResponseError):
            await pending.future

    @asynccontextmanager
    async def subscribe(self, *channels: str) -> AsyncIterator[Any]:
        """A redis-py PubSub subscribed to `channels`.

        Its `listen()` and `get_message()` raise RedisError when disconnected.
        """
        # any node of a cluster tells all messages; another one at the next try, as this one may be lost
        client = connect(random.choice(cluster_nodes(self.url)), 5.0)
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(*channels)
            yield pubsub
        finally:
            await pubsub.aclose()
            await client.aclose()

    async def aclose(self) -> None:
        """Wait for outstanding replies, at most two time-outs, then close."""
        self._end_patience()
        if self._prober is not None:
            self._prober.cancel()
            await asyncio.gather(self._prober, return_exceptions=True)
        waiting = [pending.future for pending in self._waiting] + (self._wire.unanswered if self._wire else [])
        if waiting:
            await asyncio.wait(waiting, timeout=2 * self._timeout_s)
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        await self.client.aclose()
