"""A lease in Redis: of many workers, one at a time has it, and the next once it expires.

Knows no work. Invariant: only the holder renews or ends a lease. A holder that pauses for longer
than the lease's life learns it at its next `take`; its actions meanwhile must be harmless.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from redis.exceptions import RedisError

from policies.redis import RedisCommands

# KEYS lease. ARGV token, its life in ms, 1 to take a free one or 0 to renew an own one.
# Replies 1 where the caller has it now, else 0.
_TAKE = """
local owner = redis.call('GET', KEYS[1])
if owner ~= ARGV[1] and (owner or ARGV[3] == '0') then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# KEYS lease. ARGV token.
_DROP = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class Lease:
    """The lease `key`, for the worker that `token` names, for `life_ms` after each `take`."""

    def __init__(self, redis: RedisCommands, key: str, token: str, life_ms: int) -> None:
        self._redis = redis
        self._key = key
        self._token = token
        self._life_ms = life_ms

    async def take(self, *, is_new: bool = True) -> bool:
        """Take or renew the lease, without `is_new` only renew it; returns whether this worker has
        it now.
        """
        return bool(await self._redis.eval(_TAKE, 1, self._key, self._token, self._life_ms, int(is_new)))

    async def drop(self) -> None:
        """Release the lease, so that another worker can take it at once."""
        with contextlib.suppress(RedisError):  # its life ends it anyway
            await self._redis.eval(_DROP, 1, self._key, self._token)

    async def keep(self, step: Callable[[], Awaitable[float]]) -> None:
        """Call `step`, which returns the seconds until its next call, until cancelled; then drop
        the lease.
        """
        try:
            while True:
                wait_s = await step()
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    # Python 3.11: wait_for in a Redis client can swallow it
                    raise asyncio.CancelledError
                await asyncio.sleep(wait_s)
        finally:
            await self.drop()
