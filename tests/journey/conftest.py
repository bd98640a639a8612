"""One world a test, which must have let go of everything at the end; and another with other settings for tests that need it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.services import RedisServer, run_redis
from tests.world import World, open_world

OpenWorld = Callable[..., Awaitable[World]]


@pytest.fixture(autouse=True)
def logged() -> Iterator[list[Any]]:
    """What was logged, as structlog's events."""
    with structlog.testing.capture_logs() as events:
        yield events


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[World]:
    """A world with the settings of `tests.world.MODELS`."""
    async with open_world(redis_server, tmp_path) as opened:
        yield opened
        await opened.is_released()


@pytest.fixture
async def open_a_world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[OpenWorld]:
    """A world with settings that differ, as keywords; one a test, for it empties Redis."""
    async with AsyncExitStack() as stack:

        async def open_one(server: RedisServer | None = None, **settings: Any) -> World:
            return await stack.enter_async_context(open_world(server or redis_server, tmp_path / "world", **settings))

        yield open_one


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Redis that the test may kill."""
    with run_redis() as server:
        yield server
