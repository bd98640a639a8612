"""The schema: made once however many start, equal to its description, and never touched when it is current."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import asyncpg
import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.accounts import Invalid, SchemaUnknown, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import MIGRATIONS, POSTGRES_TIMEOUTS, Database, NoAnswer
from tests.accounts.conftest import empty, fork
from tests.accounts.spender import open_first


def test_processes_that_start_at_once_make_it_once(database_url: str, tmp_path: Path) -> None:
    """Three processes open an empty database together: all come up, one makes the first key, and none imports alembic."""
    files = [tmp_path / f"said-{number}" for number in range(3)]
    together = [fork(open_first, database_url, str(file)) for file in files]
    for process in together:
        process.join(60)
    assert [process.exitcode for process in together] == [0, 0, 0]
    assert sorted(file.read_text() for file in files) == ["first False", "later False", "later False"]


async def test_the_tables_are_what_the_schema_says(accounts: Accounts) -> None:
    """Alembic finds no table, column or index that differs from the schema, and the version is the last migration's."""

    def difference(connection: sa.Connection) -> object:
        return compare_metadata(MigrationContext.configure(connection, opts={"compare_type": True}), schema.metadata)

    async with accounts.database.reading() as connection:
        assert await connection.run_sync(difference) == []
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_current_head() == schema.VERSION


@pytest.mark.parametrize(
    ("version", "remedy"),
    [
        ("9999", "start that later version, or restore"),
        ("0001", "then `sameway restore` of this one"),
        (schema.VERSION[:-1], "then `sameway restore` of this one"),
    ],
)
async def test_a_database_of_another_version_is_left_alone(
    accounts: Accounts, database_url: str, version: str, remedy: str
) -> None:
    """A schema of a later release, or of a commit before the first one, stops the start with a sentence, unchanged."""
    async with accounts.database.writing() as connection:
        await connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{version}'"))
    older = Accounts(database_url)
    with pytest.raises(SchemaUnknown, match=f"tables are of schema {version}, .* has {schema.VERSION}: .*{remedy}"):
        await older.open()
    await older.close()
    async with accounts.database.reading() as connection:
        assert (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).scalar_one() == version


async def test_the_next_release_migrates(
    accounts: Accounts, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A migration that is added runs once over what is there, and a database made anew has its version."""
    team = await accounts.create_team("acme")
    shutil.copytree(MIGRATIONS, tmp_path / "migrations")
    (tmp_path / "migrations" / "versions" / "v0002_next.py").write_text(
        f"import sqlalchemy as sa\nfrom alembic import op\nrevision, down_revision = '0002', '{schema.VERSION}'\n"
        "def upgrade():\n    op.add_column('teams', sa.Column('motto', sa.Text, server_default='ever on'))\n"
    )
    monkeypatch.setattr("gateway.accounts.database.MIGRATIONS", tmp_path / "migrations")
    monkeypatch.setattr(schema, "VERSION", "0002")
    for _ in range(2):
        later = Accounts(database_url)
        await later.open()
        assert [one.name for one in await later.list_teams()] == [team.name]
        async with later.database.reading() as connection:
            assert (await connection.execute(sa.text("SELECT motto FROM teams"))).scalar_one() == "ever on"
        await later.close()


async def test_a_failed_migration_leaves_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The migration is one transaction on both databases: it is there whole or not at all."""
    database = Database(database_url)

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE half (id INTEGER)"))
        raise RuntimeError("killed")

    monkeypatch.setattr("gateway.accounts.database.create_tables", fail)
    with pytest.raises(RuntimeError):
        await database.open()
    async with database.reading() as connection:
        assert await connection.run_sync(lambda sync: sa.inspect(sync).get_table_names()) == []
    monkeypatch.undo()
    await database.open()
    await database.close()


async def test_a_server_that_took_no_writes_for_a_while_is_written_again(accounts_postgres: str) -> None:
    """A connection that began while its server was a replica stays read-only for good: it is not kept."""
    await empty(accounts_postgres)
    accounts = Accounts(accounts_postgres)
    await accounts.open()
    name = make_url(accounts_postgres).database
    operator = await asyncpg.connect(accounts_postgres.replace("+asyncpg", ""))
    await operator.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    await operator.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid()"
    )
    try:
        assert not await accounts.database.takes_writes()
        with pytest.raises(DBAPIError, match="read-only"):
            await accounts.create_team("acme")
        await accounts.reload()  # which opens a connection
    finally:
        await operator.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
        await operator.close()
    with pytest.raises(DBAPIError, match="read-only"):
        await accounts.create_team("acme")
    assert await accounts.database.takes_writes()
    assert (await accounts.create_team("acme")).name == "acme"
    await accounts.close()


async def test_a_server_that_takes_too_long_is_an_error_of_the_database(
    accounts_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A statement without an answer raises what callers take for a failed database, and no error of the system's."""
    monkeypatch.setitem(POSTGRES_TIMEOUTS, "command_timeout", 0.2)
    database = Database(accounts_postgres)
    with pytest.raises(NoAnswer, match="TimeoutError"):
        async with database.reading() as connection:
            await connection.execute(sa.text("SELECT pg_sleep(5)"))
    async with database.reading() as connection:
        assert (await connection.execute(sa.text("SELECT 1"))).scalar() == 1
    await database.close()


@pytest.mark.parametrize(("query", "are_kept"), [("", True), ("&pgbouncer=true", False)])
async def test_behind_a_pooler_no_statement_outlives_its_use(
    accounts_postgres: str, query: str, are_kept: bool
) -> None:
    """A pooler gives the next transaction to another connection, which knows none of this one's statements."""
    await empty(accounts_postgres)
    accounts = Accounts(accounts_postgres + query)
    await accounts.open()
    team = await accounts.create_team("acme")
    await accounts.create_key(team.id, "k")
    async with accounts.database.reading() as connection:
        kept = (await connection.execute(sa.text("SELECT count(*) FROM pg_prepared_statements"))).scalar_one()
    assert (kept > 0) is are_kept
    await accounts.close()


async def test_the_options_of_a_url_are_libpqs() -> None:
    """`sslmode` and its like mean what they mean to psql: a server without TLS is refused, or asked for it and used all the same."""
    asked = []

    async def without_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readexactly(8))
        if asked[-1][4:] == b"\x04\xd2\x16\x2f":  # the protocol's SSLRequest
            writer.write(b"N")
            asked.append(await reader.read(1000))
        writer.close()

    async with await asyncio.start_server(without_tls, "127.0.0.1", 0) as server:
        url = f"postgresql://me:secret@127.0.0.1:{server.sockets[0].getsockname()[1]}/sameway"
        for query, is_tls_wanted in (
            ("sslmode=require&connect_timeout=7", True),
            ("sslmode=disable&application_name=a", False),
        ):
            asked.clear()
            database = Database(f"{url}?{query}")
            with pytest.raises(SQLAlchemyError):
                await database.open()
            await database.close()
            assert (asked == [b"\0\0\0\x08\x04\xd2\x16\x2f", b""]) is is_tls_wanted
    with pytest.raises(Invalid, match="connect_timeout"):
        Database(f"{url}?connect_timeout=soon")


async def test_sqlite_survives_a_crash_and_serves_readers_beside_a_writer(tmp_path: Path) -> None:
    """Write-ahead log, every commit synced, foreign keys on; a reader is not kept waiting by an open write."""
    database = Database(f"sqlite:///{tmp_path / 'a.db'}")
    await database.open()
    async with database.reading() as connection:
        pragmas = [(await connection.exec_driver_sql(f"PRAGMA {name}")).scalar() for name in _PRAGMAS]
    assert dict(zip(_PRAGMAS, pragmas, strict=True)) == _PRAGMAS
    async with database.writing() as writer, database.reading() as reader:
        await writer.execute(sa.update(schema.installation).values(version=5))
        assert (await reader.execute(sa.select(schema.installation.c.version))).scalar() == 1
    await database.close()


_PRAGMAS = {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 30_000}


async def test_a_damaged_file_is_an_error_of_the_database(tmp_path: Path) -> None:
    """A start can tell it from a bug, and say in a line which setting it is about."""
    path = tmp_path / "sameway.db"
    path.write_bytes(b"no database" * 1000)
    database = Database(f"sqlite:///{path}")
    with pytest.raises(NoAnswer, match="not a database"):
        await database.open()
    await database.close()


@pytest.mark.parametrize("url", ["nonsense", "mysql://h/d", "sqlite://", "sqlite:///:memory:", "sqlite+aiosqlite://"])
def test_other_databases_are_refused(url: str) -> None:
    """Only a SQLite file or a PostgreSQL will do, and the answer names the setting."""
    with pytest.raises(Invalid, match="database_url"):
        Database(url)


def test_a_password_is_not_told(tmp_path: Path) -> None:
    """A refused URL is shown without its password."""
    with pytest.raises(Invalid) as caught:
        Database("mysql://me:secret@h/d")
    assert "secret" not in str(caught.value)
