"""Fixtures that every folder of tests shares: real servers, started once a session."""

from __future__ import annotations

import functools
import gc
import os
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path

import hypothesis
import pytest
from httpx._transports import default as httpx_transports
from redis.asyncio import Redis

from tests.cpu import CpuReport
from tests.marks import MARKERS, marker_of
from tests.services import (
    REDIS_VARIABLE,
    PostgresServer,
    RedisServer,
    pgvector_binaries,
    put_on_path,
    run_postgres,
    run_query_engine,
    run_redis,
)
from tests.touches import SERVICES, services_of

# how long an example takes says more of the machine than of the code: tests that bound time do so themselves
hypothesis.settings.register_profile("sameway", deadline=None)
hypothesis.settings.register_profile("quick", deadline=None, max_examples=25)

# each of httpx's functions and each client of OpenAI's and Anthropic's would read all authorities anew: 25 ms
httpx_transports.create_ssl_context = functools.cache(httpx_transports.create_ssl_context)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests without a marker of tests/marks.py")
    parser.addoption("--long", action="store_true", help="tests marked `long`, too")


def pytest_configure(config: pytest.Config) -> None:
    hypothesis.settings.load_profile("quick" if config.getoption("--quick") else "sameway")
    if config.getoption("--quick"):
        config.pluginmanager.register(CpuReport())
    if os.environ.get(REDIS_VARIABLE):
        folder = tempfile.TemporaryDirectory(prefix="sameway-path-")
        config.add_cleanup(folder.cleanup)
        put_on_path(Path(folder.name))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--quick` the others are not even imported: their imports take longer than the quick tests."""
    return True if config.getoption("--quick") and marker_of(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing of what is imported is garbage, and to look through it again and again takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if marker := marker_of(item.path):
            item.add_marker(marker)
        if any(service in config.option.markexpr for service in SERVICES):
            function = getattr(item, "originalname", item.name)
            owner = getattr(item, "cls", None)
            for service in services_of(
                item.path, owner.__name__ if owner else function, getattr(item, "fixturenames", ())
            ):
                item.add_marker(service)
    if config.getoption("--quick"):
        items[:] = [item for item in items if not any(map(item.get_closest_marker, MARKERS))]
    if not config.getoption("--long"):
        items[:] = [item for item in items if not item.get_closest_marker("long")]
    # what takes longest starts first, so that no process is left with it alone at the end
    order = ("browser", "e2e", "slow", *(marker for marker in MARKERS if marker not in ("browser", "e2e", "slow")))
    items.sort(key=lambda item: order.index(marker_of(item.path)) if marker_of(item.path) else len(order))


def pytest_collection_finish() -> None:
    """What was imported stays, some 700,000 objects: no collection looks at them again, and few look at all."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    """One Redis for the whole session: do not stop or kill this one, make your own with `run_redis`."""
    with run_redis() as server:
        yield server


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[Redis]:
    """A client of an empty Redis; replies are bytes."""
    client = Redis.from_url(redis_server.url, decode_responses=False)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    """One PostgreSQL for the whole session."""
    with run_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def query_engine_server() -> Iterator[RedisServer]:
    """One Redis with the query engine for the whole session: give each test an embedder's key of its own."""
    with run_query_engine() as server:
        yield server


@pytest.fixture(scope="session")
def pgvector_server() -> Iterator[PostgresServer]:
    """One PostgreSQL with pgvector for the whole session."""
    with run_postgres(pgvector_binaries()) as server:
        yield server


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> str:
    """The SQLAlchemy URL of a new, empty database."""
    return postgres_server.create_database()
