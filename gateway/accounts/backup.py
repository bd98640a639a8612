"""`sameway backup` and `restore`: everything an installation is, in one zip archive.

`manifest.json` says the version of the tables, how many rows each has, and which ids were given;
`tables/NAME.jsonl` has a row in each line (bytes in base64), so that a backup of SQLite can be
restored into PostgreSQL; `data/` has the secrets and the files of the data directory, and
`sameway.yaml` the configuration. Knows no Redis: what SQL does not have yet, and cached answers, are
not in it. Invariants: the rows are of one moment; a restore is whole or changes nothing in the
database; ids are not given again.
"""

import base64
import os
import shutil
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import months, schema
from gateway.accounts.database import Database, uncancelled
from gateway.accounts.errors import Invalid, SchemaUnknown

_LEFT_OUT = (schema.sessions.name,)  # people sign in again
DATA = ("secret", "admin.key", "files")  # of the data directory
_CONFIG = "sameway.yaml"
_ROWS_AT_ONCE = 500
_TABLES = [table for table in schema.metadata.sorted_tables if table.name not in _LEFT_OUT]
_NUMBERED = [table for table in _TABLES if table.autoincrement_column is not None]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an archive has: the tables' version, its moment, rows by table, and the last id given by table."""

    version: str
    at_s: int
    rows: dict[str, int]
    ids: dict[str, int]


async def back_up(database: Database, data_dir: Path, config: Path | None, path: Path) -> Manifest:
    """Write the archive `path`, which only its owner can read. Raises OSError, Invalid where it exists, and sqlalchemy's."""
    if path.exists():
        raise Invalid("file", f"{path} exists already: expected a new one")
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with _private(draft) as file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            manifest = await _dump(database, archive)
            archive.writestr("manifest.json", msgspec.json.encode(manifest))
            for found in sorted(one for name in DATA for one in _files(data_dir / name)):
                archive.write(found, f"data/{found.relative_to(data_dir)}")
            if config is not None:
                archive.write(config, _CONFIG)
        draft.rename(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    return manifest


async def restore(database: Database, data_dir: Path, path: Path) -> Manifest:
    """Fill an empty database and data directory from the archive `path`.

    Its configuration becomes `sameway.yaml` of the data directory. Raises Invalid for anything else
    than an archive or a target that is not empty, SchemaUnknown for one of a later version, OSError,
    and sqlalchemy's errors.
    """
    try:
        archive = zipfile.ZipFile(path)
        manifest = msgspec.json.decode(archive.read("manifest.json"), type=Manifest)
    except (zipfile.BadZipFile, KeyError, msgspec.MsgspecError):
        raise Invalid("file", f"{path} is not what `sameway backup` wrote") from None
    if manifest.version > schema.VERSION:
        raise SchemaUnknown(f"the backup is of a later version of Sameway ({manifest.version}): install that one first")
    with archive:
        targets = dict(_targets(archive, data_dir))
        if found := next((target for target in targets.values() if target.exists()), None):
            raise Invalid("data_dir", f"{found} exists already: expected an empty data directory")
        await database.open()
        await _load(database, archive, manifest)
        for name, target in targets.items():
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with archive.open(name) as source, _private(target) as file:
                shutil.copyfileobj(source, file)
    return manifest


def _private(path: Path) -> BinaryIO:
    """A new file for its owner alone. Raises FileExistsError."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb")


def _files(path: Path) -> Iterator[Path]:
    yield from [path] if path.is_file() else (one for one in path.rglob("*") if one.is_file())


def _targets(archive: zipfile.ZipFile, data_dir: Path) -> Iterator[tuple[str, Path]]:
    """Where each member that is a file goes. Raises Invalid for one that leads out of the data directory."""
    for name in archive.namelist():
        if name == _CONFIG or name.startswith("data/"):
            target = data_dir / name.removeprefix("data/")
            if not target.resolve().is_relative_to(data_dir.resolve()):
                raise Invalid("file", f"its member {name!r} leads out of the data directory")
            yield name, target


@uncancelled
async def _dump(database: Database, archive: zipfile.ZipFile) -> Manifest:
    rows: dict[str, int] = {}
    async with database.reading() as connection:
        if not database.is_sqlite:  # SQLite's transaction sees one moment anyway
            await connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ, READ ONLY"))
        for table in _TABLES:
            rows[table.name] = 0
            query = sa.select(table).order_by(*table.primary_key)
            with archive.open(f"tables/{table.name}.jsonl", "w", force_zip64=True) as member:
                async for row in await connection.stream(query):
                    member.write(msgspec.json.encode(dict(row._mapping)) + b"\n")
                    rows[table.name] += 1
        ids = {table.name: await _last_id(connection, database, table) for table in _NUMBERED}
    return Manifest(version=schema.VERSION, at_s=int(time.time()), rows=rows, ids=ids)


@uncancelled
async def _load(database: Database, archive: zipfile.ZipFile, manifest: Manifest) -> None:
    async with database.writing() as connection:
        for table in _TABLES:
            if table is schema.installation:
                await connection.execute(sa.delete(table))
            elif (await connection.execute(sa.select(sa.literal(1)).select_from(table).limit(1))).first():
                raise Invalid("database_url", f"its table {table.name} has rows already: expected an empty database")
        for table in _TABLES:
            for rows in _read(archive, table):
                if table in (schema.ledger, schema.ledger_hits):
                    await months.prepare(connection, database, table, [row["at_ms"] for row in rows])
                await connection.execute(sa.insert(table), rows)
        for table in _NUMBERED:
            await _go_on_from(connection, database, table, manifest.ids.get(table.name, 0))


def _read(archive: zipfile.ZipFile, table: sa.Table) -> Iterator[list[dict[str, Any]]]:
    """The rows of a table, some at a time; a column that the archive lacks gets its default."""
    binary = [column.name for column in table.columns if isinstance(column.type, sa.LargeBinary)]
    if f"tables/{table.name}.jsonl" not in archive.namelist():  # of a version that had none
        return
    with archive.open(f"tables/{table.name}.jsonl") as member:
        rows = []
        for line in member:
            row = msgspec.json.decode(line, type=dict[str, Any])
            row = {name: value for name, value in row.items() if name in table.c}  # without those of an earlier version
            row |= {name: base64.b64decode(row[name]) for name in binary if row.get(name) is not None}
            rows.append(row)
            if len(rows) == _ROWS_AT_ONCE:
                yield rows
                rows = []
        if rows:
            yield rows


async def _last_id(connection: AsyncConnection, database: Database, table: sa.Table) -> int:
    """The last id that the table gave, also to a row that is gone; 0 for none."""
    if database.is_sqlite:
        query = sa.text("SELECT seq FROM sqlite_sequence WHERE name = :name").bindparams(name=table.name)
    else:
        query = sa.text(f"SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM {_sequence(table)}")
    return int((await connection.execute(query)).scalar() or 0)


async def _go_on_from(connection: AsyncConnection, database: Database, table: sa.Table, last: int) -> None:
    if last <= 0:
        return
    if database.is_sqlite:
        await connection.execute(sa.text("DELETE FROM sqlite_sequence WHERE name = :name"), {"name": table.name})
        insert = sa.text("INSERT INTO sqlite_sequence (name, seq) VALUES (:name, :last)")
        await connection.execute(insert, {"name": table.name, "last": last})
    else:
        await connection.execute(sa.text(f"SELECT setval('{_sequence(table)}', :last)"), {"last": last})


def _sequence(table: sa.Table) -> str:
    """PostgreSQL's name of the sequence of a `serial` column ("Numeric Types")."""
    column = table.autoincrement_column
    assert column is not None
    return f"{table.name}_{column.name}_seq"
