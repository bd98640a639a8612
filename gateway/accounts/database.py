"""One SQL database, a SQLite file or a PostgreSQL: opened, migrated, and used in transactions.

No accounts. Invariants:

- when `open` returns, the schema is at `schema.VERSION`, however many processes opened the database
  at once; only a process that finds an earlier version imports alembic;
- a transaction that has begun commits or rolls back, also when its caller is cancelled
  (`uncancelled`): a connection that is torn down inside a statement can keep SQLite's write lock
  until it is garbage-collected.
"""

import asyncio
import contextlib
import functools
import operator
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlencode

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import ArgumentError, DataError, DBAPIError, IntegrityError, ProgrammingError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.accounts import schema
from gateway.accounts.errors import Invalid, SchemaUnknown

_SQLITE_BUSY_MS = 30_000
_WAL_TRIES = 500
_WAL_BYTES_MAX = 64 << 20  # that stay after a checkpoint
_PAGES_AT_ONCE, _SHRINK_PAUSE_S = 1_000, 0.05
# a server that stopped answering is an error, not a wait
POSTGRES_TIMEOUTS = {"timeout": 10, "command_timeout": 60}
MIGRATIONS = Path(__file__).parent / "migrations"
# what SQLAlchemy and asyncpg.connect take by name; the rest of a URL's query is libpq's
_DRIVER_OPTIONS = {"host", "port", "ssl", "target_session_attrs"}
# a pooler gives each transaction another connection, which knows no statement of an earlier one
_BEHIND_A_POOLER = {"statement_cache_size": 0, "prepared_statement_cache_size": 0, "prepared_statement_name_func": str}
_READ_ONLY = "25006"  # PostgreSQL, appendix A: read_only_sql_transaction
_ADVISORY_LOCK = 0x5A3E_3A11  # any number, the same in every process


P = ParamSpec("P")
T = TypeVar("T")


def uncancelled(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Make a coroutine method run to its end once it has begun.

    A cancelled caller waits for that end, and is cancelled then.
    """

    @functools.wraps(method)
    async def run(*args: P.args, **kwargs: P.kwargs) -> T:
        task = asyncio.ensure_future(method(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            task.exception()  # retrieved, so that asyncio does not log it
            raise

    return run


class NoAnswer(SQLAlchemyError):
    """The server is away or too slow, or the file is not a database.

    `__cause__` is the driver's error, which sqlalchemy does not wrap.
    """


def name_of(error: BaseException) -> str:
    """The class of an error, for logs: an error's text may hold written values.

    For NoAnswer it is the class of the cause.
    """
    return type((isinstance(error, NoAnswer) and error.__cause__) or error).__name__


def is_down(error: BaseException) -> bool:
    """Whether the database failed. A refused statement or value is a bug instead."""
    return isinstance(error, SQLAlchemyError) and not isinstance(error, DataError | IntegrityError | ProgrammingError)


class Database:
    """Connections inside a transaction: `reading()`, and `writing()`, which commits at its end."""

    def __init__(self, url: str) -> None:
        """Connect to nothing yet. Raises Invalid for a `url` of an unsupported database."""
        parsed = _normal(url)
        self.is_sqlite = parsed.get_backend_name() == "sqlite"
        self._path = Path(parsed.database or "") if self.is_sqlite else None
        options: dict[str, Any] = {"pool_size": 4}
        if not self.is_sqlite:
            parsed, arguments = _for_asyncpg(parsed)
            options = {"pool_size": 5, "pool_pre_ping": True, "connect_args": arguments}
        # errors are logged, and a statement's values may be a client's texts
        self._engine: AsyncEngine = create_async_engine(parsed, hide_parameters=True, **options)
        self._writer = self._engine.execution_options(is_writing=True)
        self._fast_writer = self._writer.execution_options(is_durable=False)
        if self.is_sqlite:
            event.listen(self._engine.sync_engine, "connect", _on_sqlite_connect)
            event.listen(self._engine.sync_engine, "begin", _on_sqlite_begin)
        else:
            event.listen(self._engine.sync_engine, "handle_error", _on_postgres_error)

    @uncancelled
    async def open(self) -> None:
        """Create or migrate the schema unless it is current.

        Raises SchemaUnknown, and sqlalchemy's errors.
        """
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            await self._use_wal()
        async with self.reading() as connection:
            if await _version(connection) == schema.VERSION:
                return
        async with self.writing() as connection:  # SQLite has one writer; PostgreSQL needs the lock
            if not self.is_sqlite:
                await connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK)))
            version = await _version(connection)
            if version != schema.VERSION:
                await connection.run_sync(functools.partial(_upgrade, version) if version else create_tables)
                if await _version(connection) != schema.VERSION:  # Alembic takes the start of a revision for it
                    raise SchemaUnknown(_of_another(version, _NO_RELEASE))

    @uncancelled
    async def check(self) -> None:
        """Check that the schema is current, without a change. Raises SchemaUnknown."""
        if self._path is not None and not self._path.exists():
            raise SchemaUnknown(f"there is no database at {self._path}")
        async with self.reading() as connection:
            found = await _version(connection)
        if found != schema.VERSION:
            raise SchemaUnknown(_of_another(found, "`sameway serve` of this version makes or migrates them"))

    @uncancelled
    async def close(self) -> None:
        await self._engine.dispose()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[AsyncConnection]:
        """A transaction for reading. Enter it, like `writing`, only in an `uncancelled` method.

        `reading` and `writing` raise only sqlalchemy's errors, including NoAnswer.
        """
        with _as_no_answer():
            async with self._engine.connect() as connection:
                yield connection

    @asynccontextmanager
    async def writing(self, *, is_durable: bool = True) -> AsyncIterator[AsyncConnection]:
        """A transaction that holds SQLite's write lock from its start.

        Its reads stay valid until it commits. Without `is_durable` the commit does not wait for the
        disk: it survives a killed process, and may be lost if the host fails.
        """
        with _as_no_answer():
            async with (self._writer if is_durable else self._fast_writer).begin() as connection:
                if not (is_durable or self.is_sqlite):
                    await connection.execute(sa.text("SET LOCAL synchronous_commit = off"))
                yield connection

    @uncancelled
    async def rows(self, statement: sa.Select[Any]) -> Sequence[Any]:
        """The rows of one query, in a transaction of its own."""
        async with self.reading() as connection:
            rows: Sequence[Any] = (await connection.execute(statement)).all()
        return rows

    async def scalars(self, statement: sa.Select[Any]) -> list[Any]:
        """The first column of one query's rows."""
        return [row[0] for row in await self.rows(statement)]

    @uncancelled
    async def write(self, statement: sa.UpdateBase, values: Any = None, *, is_durable: bool = True) -> int:
        """Run one change in a transaction of its own. Returns the number of rows that it changed."""
        async with self.writing(is_durable=is_durable) as connection:
            return (await connection.execute(statement, values)).rowcount

    async def takes_writes(self) -> bool:
        """Whether the database accepts writes; a PostgreSQL replica does not. Raises sqlalchemy's
        errors.
        """
        if self.is_sqlite:
            return True
        try:
            await self.write(sa.delete(schema.installation).where(sa.false()), is_durable=False)
        except DBAPIError as error:
            if not _is_read_only(error.orig):
                raise
            return False
        return True

    @uncancelled
    async def shrink(self) -> None:
        """Give SQLite's free pages back to the disk, in small steps; PostgreSQL does so itself."""
        pages_left = None
        while self.is_sqlite and pages_left != 0:
            async with self.reading() as connection:
                driver = (await connection.get_raw_connection()).driver_connection
                assert driver is not None
                # a script, as a statement ends at its first page
                await driver.executescript(f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})")
                free = (await connection.exec_driver_sql("PRAGMA freelist_count")).scalar_one()
            pages_left = 0 if free == pages_left else free
            await asyncio.sleep(_SHRINK_PAUSE_S)

    def insert(self, table: sa.Table) -> Any:
        """An INSERT in the dialect, with `on_conflict_do_nothing` and `on_conflict_do_update`."""
        if self.is_sqlite:
            from sqlalchemy.dialects import sqlite

            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # costs 10% of a start

        return postgresql.insert(table)

    async def add_up(
        self,
        connection: AsyncConnection,
        table: sa.Table,
        columns: Sequence[str],
        rows: Iterable[tuple[tuple[Any, ...], Sequence[int]]],
        added_columns: Sequence[str] | None = None,
    ) -> None:
        """Insert `rows`, the values of `columns` by primary key, or add them to the rows with these
        keys; those of one key are summed before.

        If `added_columns` is given, only these columns are added to an existing row; of the others
        it keeps the larger value.
        """
        keys = [column.name for column in table.primary_key]
        larger = "CASE WHEN excluded.{1} > {0}.{1} THEN excluded.{1} ELSE {0}.{1} END"
        sums = dict.fromkeys(added_columns or columns, "{0}.{1} + excluded.{1}")
        updates = ", ".join(f"{name} = {sums.get(name, larger).format(table.name, name)}" for name in columns)
        values = [(*key, *row) for key, row in sorted(summed(rows).items())]
        on_conflict = f"ON CONFLICT ({', '.join(keys)}) DO UPDATE SET {updates}"
        await self.insert_many(connection, table, [*keys, *columns], values, on_conflict)

    async def insert_many(
        self,
        connection: AsyncConnection,
        table: sa.Table,
        names: Sequence[str],
        rows: Sequence[tuple[Any, ...]],
        then: str = "",
    ) -> list[Any]:
        """Insert `rows`, the values of the columns `names`; `then` ends the statement. Returns the
        first column of what it returns.

        sqlalchemy's way to insert many rows costs several times the databases' own work, and each
        value as much as a row's share of the statement: columns that have their default in all rows
        are left out.
        """
        columns = {
            name: values
            for name, values in zip(names, zip(*rows, strict=True), strict=bool(rows))
            if values.count(_default(table.c[name])) < len(values)
        }
        if not columns:
            return []
        quoted = ", ".join(f'"{name}"' for name in columns)
        into = f"INSERT INTO {table.name} ({quoted})"
        if self.is_sqlite:
            marks = ", ".join("?" * len(columns))
            await connection.exec_driver_sql(
                f"{into} VALUES ({marks}) {then}", list(zip(*columns.values(), strict=True))
            )
            return []
        insert = f"{into} SELECT * FROM unnest({arrays(table, columns)}) {then}"
        result = await connection.exec_driver_sql(insert, tuple(map(list, columns.values())))
        return list(result.scalars()) if result.returns_rows else []

    async def _use_wal(self) -> None:
        """Switch the file to WAL mode, in which readers run beside a writer.

        Several processes may create the file at once. SQLite then reports "locked" to all but one
        without waiting, so this retries.
        """
        async with self.reading() as connection:
            driver = (await connection.get_raw_connection()).driver_connection
            assert driver is not None
            for attempt in range(_WAL_TRIES):
                try:
                    await driver.execute("PRAGMA auto_vacuum=INCREMENTAL")  # of an empty file alone
                    await driver.execute("PRAGMA journal_mode=WAL")
                    return
                except sqlite3.OperationalError:
                    if attempt == _WAL_TRIES - 1:
                        raise
                    await asyncio.sleep(0.01)


def _default(column: sa.Column[Any]) -> Any:
    """The value of a row that names none: nothing of the type, or NULL."""
    return None if column.server_default is None else column.type.python_type()


def summed(rows: Iterable[tuple[T, Sequence[int]]]) -> dict[T, Sequence[int]]:
    """The sums of the amounts of each key, element by element."""
    sums: dict[T, Sequence[int]] = {}
    for key, amounts in rows:
        have = sums.get(key)
        sums[key] = amounts if have is None else list(map(operator.add, have, amounts))
    return sums


def arrays(table: sa.Table, names: Iterable[str]) -> str:
    """PostgreSQL's marks for an array of each of these columns."""
    return ", ".join(f"${place}::{table.c[name].type}[]" for place, name in enumerate(names, 1))


def _normal(url: str) -> URL:
    try:
        parsed = make_url(url.replace("postgres://", "postgresql://", 1))
    except ArgumentError:
        raise Invalid(
            "database_url", f"not a URL: expected sqlite:///FILE or postgresql://..., found {url!r}"
        ) from None
    backend = parsed.get_backend_name()
    if backend == "sqlite" and parsed.database and parsed.database != ":memory:":
        return parsed.set(drivername="sqlite+aiosqlite")
    if backend == "postgresql":
        return parsed.set(drivername="postgresql+asyncpg")
    shown = parsed.render_as_string(hide_password=True)
    raise Invalid("database_url", f"expected sqlite:///FILE or postgresql://..., found {shown!r}")


@contextlib.contextmanager
def _as_no_answer() -> Iterator[None]:
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise NoAnswer(f"{type(error).__name__}: {error}") from error


def _for_asyncpg(url: URL) -> tuple[URL, dict[str, Any]]:
    """A PostgreSQL URL without libpq's options, and these options as asyncpg's arguments."""
    libpq = {name: value for name, value in url.query.items() if name not in _DRIVER_OPTIONS}
    driver_url = url.difference_update_query(libpq)
    arguments: dict[str, Any] = dict(POSTGRES_TIMEOUTS)
    if seconds := libpq.pop("connect_timeout", ""):
        if not (isinstance(seconds, str) and seconds.isdecimal() and int(seconds)):
            raise Invalid("database_url", f"connect_timeout: expected seconds, found {seconds!r}")
        arguments["timeout"] = int(seconds)
    if libpq.pop("pgbouncer", "") == "true":  # not libpq's: Prisma's name for it, in the URLs of poolers
        arguments |= _BEHIND_A_POOLER
    if libpq:
        arguments["dsn"] = "postgresql://?" + urlencode(libpq, doseq=True)
    return driver_url, arguments


def _on_postgres_error(context: ExceptionContext) -> None:
    """Drop all connections to a read-only server: after a failover it may be a replica."""
    if _is_read_only(context.original_exception):
        context.is_disconnect = True


def _is_read_only(error: BaseException | None) -> bool:
    return getattr(error, "sqlstate", None) == _READ_ONLY


def _on_sqlite_connect(connection: Any, _record: Any) -> None:
    connection.isolation_level = None  # _on_sqlite_begin begins transactions, not the driver
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_SQLITE_BUSY_MS}")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA journal_size_limit={_WAL_BYTES_MAX}")
    cursor.close()


def _on_sqlite_begin(connection: sa.Connection) -> None:
    options = connection.get_execution_options()
    is_writing = options.get("is_writing", False)
    mode = "FULL" if options.get("is_durable", True) else "NORMAL"
    if is_writing and connection.info.get("synchronous") != mode:
        # else every commit is on disk before it returns: ledger rows leave Redis after it
        connection.exec_driver_sql(f"PRAGMA synchronous={mode}")
        connection.info["synchronous"] = mode
    connection.exec_driver_sql("BEGIN IMMEDIATE" if is_writing else "BEGIN")


async def _version(connection: AsyncConnection) -> str | None:
    """The schema's version; None for a database without a schema."""
    has_table = await connection.run_sync(lambda sync: sa.inspect(sync).has_table("alembic_version"))
    if not has_table:
        return None
    found = (await connection.execute(sa.text("SELECT version_num FROM alembic_version"))).scalar()
    return None if found is None else str(found)


def create_tables(connection: sa.Connection) -> None:
    """Create the tables of the latest migration in an empty database.

    Does not import alembic, which a server would otherwise keep in memory.
    """
    schema.metadata.create_all(connection, checkfirst=False)
    connection.execute(schema.installation.insert().values(id=1, version=1, is_claimed=False))
    version = sa.Table(
        "alembic_version", sa.MetaData(), sa.Column("version_num", sa.String(32), primary_key=True, nullable=False)
    )
    version.create(connection)
    connection.execute(version.insert().values(version_num=schema.VERSION))


_NO_RELEASE = "no release had them: `sameway backup` of the version that made them, then `sameway restore` of this one"


def _of_another(version: str | None, remedy: str) -> str:
    """That the tables are not of this version, and what to do; `remedy` is for those of an earlier one."""
    if (version or "") > schema.VERSION:
        remedy = "start that later version, or restore the backup from before it"
    return f"its tables are of schema {version or 'none'}, and this version of Sameway has {schema.VERSION}: {remedy}"


def _upgrade(version: str, connection: sa.Connection) -> None:
    """Run the migrations from `version` on `connection`, inside its transaction. Raises SchemaUnknown."""
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise SchemaUnknown(_of_another(version, _NO_RELEASE)) from error
