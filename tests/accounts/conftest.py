"""Both databases, empty, for each test that asks for `database_url`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.accounts.accounts import Accounts


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database that has never been opened."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'sub' / 'sameway.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
async def accounts(database_url: str) -> AsyncIterator[Accounts]:
    """Open accounts on an empty database."""
    opened = Accounts(database_url)
    await opened.open()
    yield opened
    await opened.close()
