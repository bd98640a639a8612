"""The two methods this package needs of a Redis client.

Knows no client library: redis-py's `redis.asyncio.Redis` fits as it is (decode_responses off), and so does a link
that shares pipelines and bounds every call by a time-out. What a failed call raises passes through untouched.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol


class Redis(Protocol):
    """Raw replies: bytes, integers, lists, None. Servers from 6.2 on; every key a script touches is in its KEYS."""

    def execute_command(self, *args: Any) -> Awaitable[Any]: ...

    def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Awaitable[Any]: ...
