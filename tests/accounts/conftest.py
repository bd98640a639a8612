"""Both databases, empty, for each test that asks for `database_url`."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator, Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from gateway.accounts.accounts import Accounts
from tests.services import PostgresServer

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.accounts.spender"])


def fork(target: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that runs `target`, from a server that has imported the accounts once for all: nothing of this process is in it."""
    process = _FORKS.Process(target=target, args=args, daemon=True)
    process.start()
    return process


@pytest.fixture(scope="session")
def accounts_postgres(postgres_server: PostgresServer) -> str:
    """One database for all these tests: emptying it is much cheaper than making another."""
    return postgres_server.create_database()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that looks as if it had never been opened."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sub' / 'sameway.db'}"
    url: str = request.getfixturevalue("accounts_postgres")
    asyncio.run(empty(url))
    return url


async def empty(url: str) -> None:
    """As if nobody had ever opened it."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).unlink()
        return
    connection = await asyncpg.connect(url.replace("+asyncpg", ""))
    await connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    await connection.close()


@pytest.fixture
async def accounts(database_url: str) -> AsyncIterator[Accounts]:
    """Open accounts on an empty database."""
    opened = Accounts(database_url)
    await opened.open()
    yield opened
    await opened.close()
