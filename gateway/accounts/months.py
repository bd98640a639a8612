"""The months of the ledger: partitions on PostgreSQL, made before their rows, and dropped whole.

Knows no sums: those are kept for ever. SQLite keeps all months in one table, as a transaction over
several files is not one after a power cut: there a month's rows are deleted a few at a time. Source
of the locks: PostgreSQL documentation, "CREATE TABLE" and "Table Partitioning". Invariant: a month
is removed whole, together with its row in the audit log, and only once all of its days are over.
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

HOUR_MS = 3_600_000
_TABLES = (schema.ledger, schema.ledger_hits)
_HOURS_KEPT = 40 * 24
_REST = "rest"  # the partition of moments outside of any month that a clock can mean
_FIRST, _END = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)
_ROWS_AT_ONCE = 5_000


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
async def forget(database: Database, now_ms: int, kept_days: int | None) -> list[str]:
    """Remove the months that ended `kept_days` ago, and old hours. Returns the names of the removed months."""
    for hours in (schema.ledger_hours, schema.ledger_exports):
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
        await _remove(database, month, now_ms)
        removed.append(month.name)
    return removed


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
