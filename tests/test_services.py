"""The servers that tests lean on do what their names say."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from tests.services import run_redis


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
