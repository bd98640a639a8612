"""The ledger as files: each hour's rows and hits, in Parquet, in a folder or a bucket.

Files are `ledger/v1/day=2026-11-27/17.parquet` and `hits/v1/...`, hours in UTC; the version is that
of the columns. Knows no budgets. Invariants: a file has each row of its hour once, also after a kill
between the file and its mark, as the next writer replaces it whole; a row that comes late makes its
hour's files anew: the transaction of the rows counts a change, which a mark names. Any number of
workers may write at once, and a lease in Redis lets one.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import schema
from gateway.accounts.ledger import COLUMNS, Ledger, LedgerFilter, flat_row
from gateway.accounts.months import HOUR_MS, unwritten
from gateway.accounts.parquet import VERSION, ParquetFile
from gateway.loggers import get_logger
from gateway.transport.contents import Contents
from policies.lease import Lease
from policies.redis import RedisCommands

_LEASE = "sameway:{money}:ledger:files"
_LEASE_MS = 300_000
_LATE_MS = 300_000  # most rows of an hour are there by then
_LOOK_EVERY_S = 30.0
_PAGE = 5_000

_log = get_logger()
_marks, _hits = schema.ledger_exports, schema.ledger_hits


class LedgerFiles:
    """Writes the files: `run` it until cancelled, or call `step`. `clock` gives unix seconds."""

    def __init__(self, ledger: Ledger, contents: Contents, redis: RedisCommands, clock: Callable[[], float]) -> None:
        self._ledger = ledger
        self._contents = contents
        self._clock = clock
        self._lease = Lease(redis, _LEASE, secrets.token_hex(16), _LEASE_MS)

    async def run(self) -> None:
        await self._lease.keep(self._turn)

    async def _turn(self) -> float:
        try:
            is_written = await self._lease.take() and await self.step()
        except (RedisError, SQLAlchemyError, OSError) as error:
            _log.warning("ledger_not_exported", reason=f"{type(error).__name__}: {error}")
            is_written = False
        return 0.0 if is_written else _LOOK_EVERY_S

    async def step(self) -> bool:
        """Write the files of the latest hour that has changed. Returns whether there was one.

        Raises OSError, and sqlalchemy's errors.
        """
        database = self._ledger.database
        mark = await unwritten(database, int(self._clock() * 1000 - _LATE_MS))
        if mark is not None:
            hour, changes = mark  # of before the read: a later row counts as a change again
            await self._write("ledger", hour, tuple(COLUMNS), self._rows(hour))
            await self._write("hits", hour, tuple(_hits.c.keys()), self._hits(hour))
            await database.write(sa.update(_marks).where(_marks.c.hour == hour).values(exported=changes))
        return mark is not None

    async def _write(self, kind: str, hour: int, columns: tuple[str, ...], rows: AsyncIterator[dict[str, Any]]) -> None:
        at = datetime.fromtimestamp(hour * HOUR_MS // 1000, UTC)
        key = f"{kind}/v{VERSION}/day={at:%Y-%m-%d}/{at:%H}.parquet"
        parquet = await asyncio.to_thread(ParquetFile, columns)
        file = await asyncio.to_thread(lambda: self._contents.create(key, is_replaced=True))
        async for piece in parquet.stream(rows):
            await asyncio.to_thread(file.write, piece)
        await asyncio.to_thread(file.seal)

    async def _rows(self, hour: int) -> AsyncIterator[dict[str, Any]]:
        where, cursor = LedgerFilter(from_ms=hour * HOUR_MS, until_ms=(hour + 1) * HOUR_MS), None
        while True:
            page = await self._ledger.rows(where, _PAGE, cursor)
            for row in page.rows:
                yield flat_row(row)
            if (cursor := page.cursor) is None:
                return

    async def _hits(self, hour: int) -> AsyncIterator[dict[str, Any]]:
        is_inside = _hits.c.at_ms.between(hour * HOUR_MS, (hour + 1) * HOUR_MS - 1)
        for row in await self._ledger.database.rows(sa.select(_hits).where(is_inside).order_by(_hits.c.at_ms)):
            yield row._asdict()
