"""The two methods that this package needs from a Redis client.

Knows no client library: redis-py's `redis.asyncio.Redis` with decode_responses off fits, and so
does a link that shares pipelines and bounds every call by a time-out. Errors of a call pass through
unchanged.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class RedisCommands(Protocol):
    """A client with raw replies: bytes, integers, lists, None.

    For servers from 6.2; a script's KEYS are complete.
    """

    def execute_command(self, *args: Any) -> Awaitable[Any]: ...

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]: ...
