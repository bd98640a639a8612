"""The gateway's way to Redis: one pipeline in flight, filled by whatever the event loop asks for meanwhile.

Knows nothing of keys or values. Commands issued while a pipeline is out wait for the next, so a busy worker pays for few
round trips, and the order in which commands were issued is the order in which Redis runs them. Invariant: no call takes
longer than two time-outs, and while Redis is away calls fail at once (a breaker with one probe), so that a paused or dead
Redis costs a request milliseconds, not its deadline.
"""

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from cache.redis_url import connect

_PROBE_AFTER_S = (0.05, 0.2, 0.5, 1.0)  # growing pauses between probes of a Redis that is away
_BATCH_MAX = 512


class RedisLink:
    """`execute_command` and `eval` as redis-py has them, batched; `client` for what must not wait in line (subscriptions, scans).

    Raises redis.exceptions.RedisError: ConnectionError and TimeoutError while Redis is away, ResponseError for a bad command.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url = url
        self.client = connect(url, timeout_s)
        self._waiting: list[tuple[asyncio.Future[Any], tuple[Any, ...]]] = []
        self._pump: asyncio.Task[None] | None = None
        self._shas: dict[str, str] = {}
        self._failures = 0
        self._probe_at = 0.0
        self.round_trips = 0

    @property
    def is_up(self) -> bool:
        """False from a failure until a later call succeeded."""
        return self._failures == 0

    async def execute_command(self, *args: Any) -> Any:
        """The reply to one command. Raises RedisError."""
        return await self._enqueue(args)

    async def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any:
        """The reply of a Lua script, sent by its SHA-1 and whole only where Redis does not know it yet. Raises RedisError."""
        sha = self._shas.get(script)
        if sha is None:
            sha = self._shas[script] = hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
        try:
            return await self._enqueue(("EVALSHA", sha, numkeys, *keys_and_args))
        except NoScriptError:
            return await self._enqueue(("EVAL", script, numkeys, *keys_and_args))

    def _enqueue(self, args: tuple[Any, ...]) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._failures and time.monotonic() < self._probe_at:
            future.set_exception(RedisConnectionError("Redis is away; not asked again yet"))
            return future
        self._waiting.append((future, args))
        if self._pump is None:
            self._pump = asyncio.create_task(self._run())
        return future

    async def _run(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:_BATCH_MAX], self._waiting[_BATCH_MAX:]
            # a caller that was cancelled while waiting in line still gets its command sent: it may be a settle
            commands = [args for _, args in batch]
            try:
                try:
                    replies = await self._send(commands)
                except RedisConnectionError:
                    # a pooled connection to a server that was restarted: once more on a fresh one. Safe, since every
                    # script that moves money is exactly-once by its hold's id
                    replies = await self._send(commands)
            except (RedisError, OSError) as error:
                self._failed(batch, error)
                continue
            self._failures = 0
            for (future, _), reply in zip(batch, replies, strict=True):
                if future.done():
                    continue
                if isinstance(reply, Exception):
                    future.set_exception(reply)
                else:
                    future.set_result(reply)
        self._pump = None

    async def _send(self, commands: list[tuple[Any, ...]]) -> list[Any]:
        self.round_trips += 1
        pipeline = self.client.pipeline(transaction=False)
        for args in commands:
            pipeline.execute_command(*args)
        replies: list[Any] = await pipeline.execute(raise_on_error=False)
        return replies

    def _failed(self, batch: list[tuple[asyncio.Future[Any], tuple[Any, ...]]], error: Exception) -> None:
        """Fail the batch and everything behind it: it would only wait for the same time-out."""
        self._probe_at = time.monotonic() + _PROBE_AFTER_S[min(self._failures, len(_PROBE_AFTER_S) - 1)]
        self._failures += 1
        behind, self._waiting = self._waiting, []
        if not isinstance(error, RedisError):
            error = RedisConnectionError(str(error))
        for future, _ in (*batch, *behind):
            if not future.done():
                future.set_exception(error)
                future.exception()  # a caller that left is no reason for a warning at collection

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
        """Let what waits go out, then close."""
        if self._pump is not None:
            await asyncio.wait([self._pump])
        await self.client.aclose()
