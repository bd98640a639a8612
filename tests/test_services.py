"""The servers that tests lean on do what their names say."""

from __future__ import annotations

from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.services import (
    POSTGRES_VARIABLE,
    REDIS_VARIABLE,
    ServiceUnavailable,
    postgres_binaries,
    redis_binary,
    run_redis,
)
from tests.touches import services_of


async def test_redis_answers(redis: Redis) -> None:
    """The fixture is a working, empty Redis whose replies are bytes."""
    assert await redis.execute_command("DBSIZE") == 0
    await redis.execute_command("SET", "k", "v")
    assert await redis.execute_command("GET", "k") == b"v"


async def test_durable_redis_survives_kill() -> None:
    """What was written before kill -9 is there after the next start, and nothing answers in between."""
    with run_redis(is_durable=True) as server:
        client = Redis.from_url(server.url)
        await client.set("k", "v")
        server.kill()
        with pytest.raises(RedisConnectionError):
            await client.get("k")
        server.start()
        assert await client.get("k") == b"v"
        await client.aclose()


async def test_paused_redis_hangs_until_resumed() -> None:
    """A paused server keeps its connections and answers nothing; resumed, it goes on."""
    with run_redis() as server:
        client = Redis.from_url(server.url, socket_timeout=1, retry=None)
        assert await client.ping()
        server.pause()
        with pytest.raises(RedisTimeoutError):
            await client.get("k")
        server.resume()
        assert await client.ping()
        await client.aclose()


async def test_postgres_answers(postgres_url: str) -> None:
    """The URL is good for SQLAlchemy's asyncpg, and the database is empty."""
    engine = create_async_engine(postgres_url)
    async with engine.connect() as connection:
        tables = await connection.execute(text("select count(*) from pg_tables where schemaname = 'public'"))
        assert tables.scalar_one() == 0
    await engine.dispose()


def test_a_variable_names_the_servers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The named ones are taken, and a wrong name is no way to another server."""
    for program in ("valkey-server", "postgres"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv(REDIS_VARIABLE, str(tmp_path / "valkey-server"))
    monkeypatch.setenv(POSTGRES_VARIABLE, str(tmp_path))
    postgres = postgres_binaries.__wrapped__
    assert (redis_binary(), postgres()) == (str(tmp_path / "valkey-server"), tmp_path)
    monkeypatch.setenv(REDIS_VARIABLE, str(tmp_path / "nothing"))
    monkeypatch.setenv(POSTGRES_VARIABLE, str(tmp_path / "nothing"))
    for find in (redis_binary, postgres):
        with pytest.raises(ServiceUnavailable, match="nothing"):
            find()


@pytest.mark.parametrize(
    ("place", "name", "fixtures", "touched"),
    [
        ("policies/test_budgets.py", "test_all_budgets_or_none", ["redis", "redis_server"], {"redis"}),
        ("policies/test_routing.py", "test_nothing_of_this_name", [], set()),
        (
            "accounts/test_money_crash.py",
            "test_nothing_of_this_name",
            ["postgres_url", "postgres_server"],
            {"postgres"},
        ),
        ("cache/test_worker.py", "test_nothing_of_this_name", ["redis"], {"redis"}),
        ("e2e/test_client.py", "test_nothing_of_this_name", ["client", "gateway"], {"redis"}),
        ("test_services.py", "test_durable_redis_survives_kill", [], {"redis"}),
    ],
)
def test_the_code_shows_what_a_test_starts(place: str, name: str, fixtures: list[str], touched: set[str]) -> None:
    """By a fixture, through a helper or by itself; a gateway starts a Redis of its own."""
    assert services_of(Path(__file__).parent / place, name, fixtures) == touched
