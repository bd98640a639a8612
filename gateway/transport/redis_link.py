"""The gateway's way to Redis: everything that the event loop asks for in one tick leaves together.

Knows nothing of keys or values. Two ways out: a wire of our own to a plain server, redis-py's pipelines to Sentinel and Cluster. The
order in which commands were issued is the order in which a server runs them. Invariant: no call takes longer than two time-outs,
and while Redis is away calls fail at once (a breaker with one probe), so that a paused or dead Redis costs a request
milliseconds, not its deadline.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cache.redis_client import connect
from gateway.transport.redis_connection import Command, Pending, RedisWire, answer, fail, open_connection

_PATIENCE_S = 0.002
_PROBE_AFTER_S = (0.05, 0.2, 0.5, 1.0)  # growing pauses between probes of a Redis that is away


class RedisLink:
    """`execute_command` and `eval` as redis-py has them, batched; `client` for what must not wait in line (subscriptions, scans).

    Raises redis.exceptions.RedisError: ConnectionError and TimeoutError while Redis is away, ResponseError for a bad command.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.client = connect(url, timeout_s)
        self.round_trips = 0  # and what they carried, for who counts what a request costs
        self.commands = 0
        self._timeout_s = timeout_s
        # decision: own-redis-connection
        self._is_direct = "+" not in url.partition("://")[0]
        # what redis-py makes of replies: the wire's are the same as a client's
        self._callbacks = self.client.response_callbacks if self._is_direct else {}
        self._wire: RedisWire | None = None
        self._waiting: list[Pending] = []
        self._is_scheduled = False
        self._pump: asyncio.Task[None] | None = None
        self._leaving: list[Callable[[], None]] = []
        self._shas: dict[str, str] = {}
        self._failures = 0
        self._probe_at = 0.0

    @property
    def is_up(self) -> bool:
        """False from a failure until a later call succeeded."""
        return self._failures == 0

    def execute_command(self, *args: Any) -> Awaitable[Any]:
        """The reply to one command, as redis-py gives it; on its way as soon as this is called. Raises RedisError when awaited."""
        return self._enqueue(Pending(args, asyncio.get_running_loop().create_future(), self._callbacks.get(args[0])))

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]:
        """The reply of a Lua script, sent by its SHA-1 and whole only where Redis does not know it yet. As `execute_command`."""
        sha = self._shas.get(script)
        if sha is None:
            sha = self._shas[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        return self._enqueue(
            Pending(
                ("EVALSHA", sha, numkeys, *keys_and_args), asyncio.get_running_loop().create_future(), script=script
            )
        )

    def _enqueue(self, pending: Pending) -> "asyncio.Future[Any]":
        """A future and no task: most of what a command costs is not the command."""
        future = pending.future
        self.commands += 1
        if self._failures and time.monotonic() < self._probe_at:
            fail(pending, RedisConnectionError("Redis is away; not asked again yet"))
            return future
        self._waiting.append(pending)
        if not self._is_scheduled:
            self._is_scheduled = True
            future.get_loop().call_soon(self._flush)
        return future

    def defer(self, leave: Callable[[], None]) -> None:
        """Call `leave` in a few milliseconds, with all others for which that is soon enough: what they send leaves in one
        round trip."""
        self._leaving.append(leave)
        if len(self._leaving) == 1:
            asyncio.get_running_loop().call_later(_PATIENCE_S, self._end_patience)

    def _end_patience(self) -> None:
        leaving, self._leaving = self._leaving, []
        for leave in leaving:
            leave()

    def _refused(self, pending: Pending, error: RedisError) -> None:
        """Redis' answer is an error. A script that it does not know is sent whole; everything else is the caller's."""
        if isinstance(error, NoScriptError) and pending.script is not None:
            pending.command = ("EVAL", pending.script, *pending.command[2:])
            pending.script = None
            self._enqueue(pending)
        else:
            fail(pending, error)

    def _flush(self) -> None:
        """The end of a tick: what was gathered leaves, or somebody begins to connect. A caller that was cancelled in line still
        gets its command sent: it may be a settlement."""
        self._is_scheduled = False
        if not self._waiting:
            return  # it has left, or failed, meanwhile
        if self._wire is not None:
            batch, self._waiting = self._waiting, []
            self.round_trips += 1
            self._wire.send(batch)
            if self._failures:
                batch[-1].future.add_done_callback(self._heard)
        elif self._pump is None:
            self._pump = asyncio.create_task(self._connect() if self._is_direct else self._send_pooled())

    def _heard(self, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and not isinstance(future.exception(), RedisConnectionError | RedisTimeoutError):
            self._failures = 0

    async def _connect(self) -> None:
        try:
            self._wire = await open_connection(self.url, self._timeout_s, self._lost, self._refused)
        except Exception as error:
            self._failed([], error if isinstance(error, RedisError) else RedisConnectionError(str(error)))
        finally:
            self._pump = None
        if self._waiting:
            self._flush()

    def _lost(self, error: RedisError, unanswered: list[Pending]) -> None:
        """The connection is gone. What it had not answered is asked once more, on a fresh one: every script that moves money is
        exactly-once by its hold's id. A time-out is not repeated: Redis hangs, and would only hang again."""
        self._wire = None
        if isinstance(error, RedisTimeoutError):
            self._failed(unanswered, error)
            return
        repeated = [pending for pending in unanswered if pending.is_repeated]
        for pending in repeated:
            fail(pending, error)
        again = [pending for pending in unanswered if not pending.is_repeated]
        for pending in again:
            pending.is_repeated = True
        self._waiting = again + self._waiting
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    async def _send_pooled(self) -> None:
        """Through redis-py: one pipeline at a time, filled by what is asked for meanwhile."""
        while self._waiting:
            batch, self._waiting = self._waiting, []
            commands = [pending.command for pending in batch]
            try:
                try:
                    replies = await self._pipeline(commands)
                except RedisConnectionError:  # a pooled connection to a server that was restarted
                    replies = await self._pipeline(commands)
            except Exception as error:  # a cluster that can't be reached raises what is no RedisError
                self._failed(batch, error if isinstance(error, RedisError) else RedisConnectionError(str(error)))
                continue
            self._failures = 0
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
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    def _failed(self, batch: list[Pending], error: RedisError) -> None:
        """Fail the batch and everything behind it: it would only wait for the same."""
        self._probe_at = time.monotonic() + _PROBE_AFTER_S[min(self._failures, len(_PROBE_AFTER_S) - 1)]
        self._failures += 1
        behind, self._waiting = self._waiting, []
        for pending in (*batch, *behind):
            fail(pending, error)

    @asynccontextmanager
    async def subscribe(self, *channels: str) -> AsyncIterator[Any]:
        """A redis-py PubSub that has subscribed; its `listen()`/`get_message()` raise RedisError when the connection is lost."""
        client = connect(self.url.replace("+cluster", "", 1), 5.0)
        pubsub = client.pubsub(ignore_subscribe_messages=True)
        try:
            await pubsub.subscribe(*channels)
            yield pubsub
        finally:
            await pubsub.aclose()
            await client.aclose()

    async def aclose(self) -> None:
        """Let what waits be answered, then close."""
        self._end_patience()
        waiting = [pending.future for pending in self._waiting] + (self._wire.unanswered if self._wire else [])
        if waiting:
            await asyncio.wait(waiting, timeout=2 * self._timeout_s)
        if self._wire is not None:
            self._wire.close()
            self._wire = None
        await self.client.aclose()
