"""The schema: made once however many start, equal to its description, and never touched when it is current."""

from __future__ import annotations

import asyncio
from pathlib import Path

import asyncpg
import msgspec
import pytest
import sqlalchemy as sa
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.accounts import Invalid, Ledger, LedgerFilter, SchemaUnknown, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import _POSTGRES_TIMEOUTS, Database, NoAnswer, _create, _upgrade
from gateway.accounts.ledger import Group
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


def contents(connection: sa.Connection) -> dict[str, object]:
    """Every table as the database itself describes it, with its rows; and what alembic finds to differ from the schema."""
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    found: dict[str, object] = {"difference": compare_metadata(context, schema.metadata)}
    inspector = sa.inspect(connection)
    for table in inspector.get_table_names():
        found[table] = [
            [(c["name"], str(c["type"]), c["nullable"], c["default"]) for c in inspector.get_columns(table)],
            inspector.get_pk_constraint(table)["constrained_columns"],
            sorted(map(str, inspector.get_unique_constraints(table) + inspector.get_check_constraints(table))),
            sorted(map(str, inspector.get_foreign_keys(table) + inspector.get_indexes(table))),
            connection.execute(sa.text(f"SELECT * FROM {table}")).all(),
        ]
    return found


async def test_the_migrations_make_what_the_schema_says(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No table, column, index, constraint or row differs between a database that was made at once and one that was migrated,
    and the version is the last migration's."""
    described = []
    for make in (_create, _upgrade):
        monkeypatch.setattr("gateway.accounts.database._create", make)
        database = Database(database_url)
        await database.open()
        async with database.reading() as connection:
            described.append(await connection.run_sync(contents))
        await database.close()
        await empty(database_url)
    assert described[0] == described[1]
    assert described[0]["difference"] == []
    assert len(described[0]) > 6
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))
    assert ScriptDirectory.from_config(config).get_current_head() == schema.VERSION


async def migrated_to(url: str, version: str) -> None:
    """A database as a gateway of this version of the schema left it."""
    if url.startswith("sqlite"):
        Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    config = Config()
    config.set_main_option("script_location", str(Path(schema.__file__).parent / "migrations"))

    def migrate(connection: sa.Connection) -> None:
        config.attributes["connection"] = connection
        command.upgrade(config, version)

    database = Database(url)
    async with database.writing() as connection:
        await connection.run_sync(migrate)
    await database.close()


async def test_a_ledger_with_rows_learns_of_estimates(database_url: str) -> None:
    """Rows from before the column are no estimates, in the next version also where an earlier process still writes them."""
    await migrated_to(database_url, "0002")
    names = "id, at_ms, request_id, team_id, key_id, alias, deployment, prompt_tokens, cached_tokens, completion_tokens"
    insert = (
        f"INSERT INTO ledger ({names}, cost_microusd, kind) VALUES ('%s', 5, 'r', 1, 1, 'a', 'd', 1, 0, 1, 7, 'chat')"
    )
    database = Database(database_url)
    async with database.writing() as connection:
        await connection.execute(sa.text(insert % "before"))
    await database.open()
    async with database.writing() as connection:
        await connection.execute(sa.text(insert % "beside"))
    ledger = Ledger(database)
    (row,) = [row for row in (await ledger.rows(LedgerFilter())).rows if row.id == "before"]
    marked = msgspec.structs.replace(row, id="marked", usage_estimated=True)
    assert await ledger.append([marked]) == 1
    found = {row.id: row.usage_estimated for row in (await ledger.rows(LedgerFilter())).rows}
    assert found == {"before": False, "beside": False, "marked": True}
    await database.close()


async def test_a_database_full_of_data_is_migrated_whole(database_url: str) -> None:
    """A team, a key, a budget and a ledger of version 0004, before kinds of tokens, savings and axes: each row is as it was,
    the sums are the rows', and what came later has its default."""
    await migrated_to(database_url, "0004")
    database = Database(database_url)
    row = {"id": 3, "name": "acme", "created_at_s": 5.0, "is_active": True, "is_semantic_enabled": True}
    key = {"id": 4, "team_id": 3, "name": "k", "prefix": "sk-sw-", "digest": b"d" * 32, "created_at_s": 5.0}
    budget = {"id": 9, "team_id": 3, "window_kind": "month", "limit_microusd": 70, "is_hard": True}
    labels = {"team_id": 3, "key_id": 4, "alias": "a", "deployment": "d", "kind": "chat"}
    counts = {"prompt_tokens": 10, "cached_tokens": 4, "completion_tokens": 5, "cost_microusd": 7}
    day = 20_000
    async with database.writing() as connection:
        for name, values in (
            ("teams", row),
            ("keys", {**key, "is_active": True}),
            ("budgets", budget),
            ("ledger_days", {"day": day, **labels, "requests": 2, **{name: 2 * n for name, n in counts.items()}}),
            *(
                ("ledger", {"id": one, "at_ms": day * 86_400_000 + 1, "request_id": "r", **labels, **counts})
                for one in ("x", "y")
            ),
        ):
            await connection.execute(sa.table(name, *map(sa.column, values)).insert().values(values))
    await database.close()
    accounts = Accounts(database_url)
    await accounts.open()
    (team,), (found,) = await accounts.list_teams(), await accounts.list_budgets()
    assert (team.id, team.name, found.id, found.limit, found.axis) == (3, "acme", 9, 70, "team")
    assert [one.id for one in await accounts.list_keys() if one.team_id == 3] == [4]
    ledger = Ledger(accounts.database)
    rows = (await ledger.rows(LedgerFilter())).rows
    assert [(one.id, one.cost_microusd, one.baseline_microusd, one.user) for one in rows] == [
        ("y", 7, None, ""),
        ("x", 7, None, ""),
    ]
    await ledger.mend_sums()
    for group in (Group.TEAM, Group.KEY, Group.USER, Group.DAY):
        (total,) = await ledger.totals([group])
        assert (total.requests, total.cost_microusd, total.cached_tokens, total.tool_calls) == (2, 14, 8, 0)
    more = msgspec.structs.replace(rows[0], id="z", cache_write_tokens=3, charges=())
    assert await ledger.append([more]) == 1
    (total,) = await ledger.totals([Group.DEPLOYMENT])
    assert (total.requests, total.cost_microusd, total.cache_write_tokens) == (3, 21, 3)
    await accounts.close()


async def test_of_budgets_of_one_kind_the_one_that_held_stays(database_url: str) -> None:
    """A database of the first version may hold several: the smallest was what stopped the team."""
    await migrated_to(database_url, "0001")
    database = Database(database_url)
    values = [
        (1, "day", 30, True),
        (1, "day", 10, True),
        (1, "day", 10, True),
        (1, "day", 20, False),
        (2, "day", 9, True),
    ]
    async with database.writing() as connection:
        for team in (1, 2):
            row = {"id": team, "name": str(team), "created_at_s": 0.0, "is_active": True, "is_semantic_enabled": True}
            await connection.execute(schema.teams.insert().values(row))
        for id, (team_id, window, limit, is_hard) in enumerate(values, 1):
            row = {"id": id, "team_id": team_id, "window_kind": window, "limit_microusd": limit, "is_hard": is_hard}
            await connection.execute(schema.budgets.insert().values(row))
    await database.close()
    database = Database(database_url)
    await database.open()
    async with database.reading() as connection:
        ids = (await connection.execute(sa.select(schema.budgets.c.id).order_by("id"))).scalars().all()
    await database.close()
    assert ids == [2, 4, 5]


async def test_a_database_of_a_later_version_is_left_alone(accounts: Accounts, database_url: str) -> None:
    """A schema this code does not know stops the start with a sentence, unchanged."""
    async with accounts.database.writing() as connection:
        await connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    older = Accounts(database_url)
    with pytest.raises(SchemaUnknown, match="later version"):
        await older.open()
    await older.close()


async def test_a_failed_migration_leaves_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The migration is one transaction on both databases: it is there whole or not at all."""
    database = Database(database_url)

    def fail(connection: sa.Connection) -> None:
        connection.execute(sa.text("CREATE TABLE half (id INTEGER)"))
        raise RuntimeError("killed")

    monkeypatch.setattr("gateway.accounts.database._create", fail)
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
    monkeypatch.setitem(_POSTGRES_TIMEOUTS, "command_timeout", 0.2)
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
