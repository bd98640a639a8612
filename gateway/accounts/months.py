"""The months of the ledger: partitions on PostgreSQL, made before their rows, and dropped whole.

Knows no sums: those are kept for ever. Marks of files (`ledger_files.py`) are kept as long as rows.
SQLite keeps all months in one table, as a transaction over several files is not one after a power
cut: there a month's rows are deleted a few at a time. Source of the locks: PostgreSQL
documentation, "CREATE TABLE" and "Table Partitioning". Invariant: a month is removed whole, together
with its row in the audit log, and only once all of its days are over.
"""

import asyncio
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.audit import LEDGER_DROPPED, AuditRow, inserted
from gateway.accounts.database import Database, uncancelled
from gateway.loggers import get_logger

HOUR_MS = 3_600_000
_TABLES = (schema.ledger, schema.ledger_hits)
_HOURS_KEPT = 40 * 24
_REST = "rest"  # the partition of moments outside of any month that a clock can mean
_FIRST, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_ROWS_AT_ONCE = 5_000

_log = get_logger()


class Month(NamedTuple):
    """A month in UTC: its name, as in 2026_11, and unix milliseconds from its start to before its end."""

    name: str
    start_ms: int
    end_ms: int


def month_of(at_ms: int) -> Month | None:
    """The month of a moment in unix milliseconds; None outside the years 2000 to 2199."""
    if not _FIRST.timestamp() * 1000 <= at_ms < _END.timestamp() * 1000:
        return None
    at = datetime.fromtimestamp(at_ms // 1000, UTC)
    start = datetime(at.year, at.month, 1, tzinfo=UTC)
    end = datetime(at.year + at.month // 12, at.month % 12 + 1, 1, tzinfo=UTC)
    return Month(f"{at.year}_{at.month:02}", int(start.timestamp() * 1000), int(end.timestamp() * 1000))


async def prepare(connection: AsyncConnection, database: Database, table: sa.Table, moments: Iterable[int]) -> None:
    """Make the partitions that rows of these moments need, in the rows' transaction."""
    if database.is_sqlite:
        return
    for month in dict.fromkeys(map(month_of, moments)):
        name = f"{table.name}_{month.name if month else _REST}"
        is_known = sa.select(sa.func.to_regclass(name).is_not(None))
        if (await connection.execute(is_known)).scalar():
            continue
        # of two writers one waits here, and finds it; attached, as its creation in place would wait for readers
        await connection.execute(sa.text(f"LOCK TABLE {table.name} IN SHARE UPDATE EXCLUSIVE MODE"))
        if not (await connection.execute(is_known)).scalar():
            bounds = f"FOR VALUES FROM ({month.start_ms}) TO ({month.end_ms})" if month else "DEFAULT"
            await connection.execute(sa.text(f"CREATE TABLE {name} (LIKE {table.name} INCLUDING ALL)"))
            await connection.execute(sa.text(f"ALTER TABLE {table.name} ATTACH PARTITION {name} {bounds}"))


@uncancelled
async def forget(
    database: Database, now_ms: int, kept_days: int | None, *, must_be_in_files: bool = False
) -> list[str]:
    """Remove the months that ended `kept_days` ago, and old hours. Returns the names of the removed months.

    With `must_be_in_files` a month stays while an hour of it has changed since its file, and later ones
    with it; a month that was removed before has files already.
    """
    hours = schema.ledger_hours
    await database.write(sa.delete(hours).where(hours.c.hour < now_ms // HOUR_MS - _HOURS_KEPT), is_durable=False)
    oldest = month_of(now_ms - kept_days * 86_400_000) if kept_days is not None else None
    removed: list[str] = []
    while oldest is not None:
        first_ms = min(
            [at_ms for table in _TABLES for at_ms in await database.scalars(_first(table)) if at_ms] or [now_ms]
        )
        month = month_of(first_ms)
        if month is None or month.start_ms >= oldest.start_ms:
            break
        if must_be_in_files and await unwritten(database, month.end_ms, month.start_ms):
            consequence = "its rows stay until its files have them"
            _log.warning("ledger_month_not_exported", month=month.name, consequence=consequence)
            break
        await _remove(database, month, now_ms)
        removed.append(month.name)
    return removed


async def unwritten(database: Database, end_ms: int, start_ms: int = 0) -> tuple[int, int] | None:
    """The latest hour of this time that has changed since its file, and its number of changes.

    Those of removed months do not count: a file that is written now would lack the rows that are gone.
    """
    marks, audit = schema.ledger_exports.c, schema.audit.c
    is_inside = marks.hour.between(start_ms // HOUR_MS, end_ms // HOUR_MS - 1)
    changed = sa.select(marks.hour, marks.changes).where(is_inside, marks.exported < marks.changes)
    for hour, changes in await database.rows(changed.order_by(marks.hour.desc()).limit(1)):
        month = month_of(hour * HOUR_MS)
        removed = sa.select(audit.id).where(
            audit.action == LEDGER_DROPPED, audit.entry == (month.name if month else "")
        )
        if month is not None and not await database.rows(removed.limit(1)):
            return hour, changes
    return None


def _first(table: sa.Table) -> sa.Select[tuple[int]]:
    return sa.select(sa.func.min(table.c.at_ms)).where(table.c.at_ms >= _FIRST.timestamp() * 1000)


async def _remove(database: Database, month: Month, now_ms: int) -> None:
    rows, hits = _TABLES
    ids = sa.select(rows.c.id).where(rows.c.at_ms.between(month.start_ms, month.end_ms - 1)).limit(_ROWS_AT_ONCE)
    some = sa.delete(rows).where(rows.c.id.in_(ids))
    while database.is_sqlite and await database.write(some):  # noqa: ASYNC110
        await asyncio.sleep(0)  # other writers go between
    async with database.writing() as connection:
        if database.is_sqlite:
            await connection.execute(sa.delete(hits).where(hits.c.at_ms.between(month.start_ms, month.end_ms - 1)))
        else:  # a query that reads the month is not waited for: the next look tries again
            await connection.execute(sa.text("SET LOCAL lock_timeout = '2s'"))
            for table in _TABLES:
                await connection.execute(sa.text(f"DROP TABLE IF EXISTS {table.name}_{month.name}"))
        hour = schema.ledger_exports.c.hour
        inside = hour.between(month.start_ms // HOUR_MS, month.end_ms // HOUR_MS - 1)
        await connection.execute(sa.delete(schema.ledger_exports).where(inside))
        audit = AuditRow(
            at_ms=now_ms,
            action=LEDGER_DROPPED,
            team_id=0,
            request_id="",
            entry=month.name,
            client="ledger.kept_days",
            way="age",
        )
        await connection.execute(inserted(audit))
