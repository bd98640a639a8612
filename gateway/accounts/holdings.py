"""The number of rows or files, and of their bytes, that each team has in a store.

All stores count here. Knows no contents of rows. A sum over a team's rows at each write would cost
more with each row, and a later purge would bound nothing until it runs.

Invariants: a team's count changes in the transaction of its rows, so it equals their sum even after
a kill; a transaction locks the count's row first, so a bound holds over all workers and hosts.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts.database import Database, uncancelled
from gateway.accounts.schema import holdings
from gateway.wire.errors import Forbidden

ROW_BYTES = 256
"""The bytes of a row beside its texts: its ids and its index entries."""

_EVICTED_AT_ONCE = 100


class OverQuota(Forbidden):
    """A team's store lacks room for a write; the caller rolls back."""

    code = "storage_quota_exceeded"


@dataclass(frozen=True, slots=True)
class Holding:
    """A number of rows, and their bytes."""

    count: int
    bytes: int


class Holdings:
    """Counts each team's rows in `table`, and sums their bytes, which the column `size` holds."""

    def __init__(self, database: Database, table: sa.Table, size: str = "size_bytes") -> None:
        self._database = database
        self._table = table
        self._size = table.c[size]
        # as a text: sqlalchemy's own takes several times as long to make it
        marks = "?, ?, ?, ?" if database.is_sqlite else "$1, $2, $3, $4"
        self._add = (
            f"INSERT INTO holdings (team_id, store, count, bytes) VALUES ({marks}) "
            "ON CONFLICT (team_id, store) DO UPDATE SET count = holdings.count + excluded.count, "
            "bytes = holdings.bytes + excluded.bytes RETURNING count, bytes"
        )

    async def add(self, connection: AsyncConnection, team_id: int, size: int, count: int = 1) -> Holding:
        """Add rows to a team's count, and lock it until the transaction's end. Returns the new
        count.
        """
        added = await connection.exec_driver_sql(self._add, (team_id, self._table.name, count, size))
        row: Any = added.one()
        return Holding(*row)

    async def lock(self, connection: AsyncConnection, team_id: int) -> Holding | None:
        """Lock a team's count until the transaction's end, and return it; None before the first
        row.
        """
        asked = sa.select(holdings.c.count, holdings.c.bytes).with_for_update()
        mine = asked.where(holdings.c.team_id == team_id, holdings.c.store == self._table.name)
        row = (await connection.execute(mine)).first()
        return None if row is None else Holding(*row)

    async def resize(
        self, connection: AsyncConnection, team_id: int, values: Mapping[str, Any], *where: sa.ColumnElement[bool]
    ) -> Holding | None:
        """Change a row of the team, also its bytes. Returns the team's new count; None if the row
        is missing.
        """
        await self.lock(connection, team_id)
        size_before = (await connection.execute(sa.select(self._size).where(*where))).scalar()
        if size_before is None:
            return None
        await connection.execute(sa.update(self._table).where(*where).values(values))
        return await self.add(connection, team_id, values[self._size.name] - size_before, 0)

    async def delete(self, connection: AsyncConnection, team_id: int, *where: sa.ColumnElement[bool]) -> int:
        """Delete rows of the team; returns the number of deleted rows."""
        if await self.lock(connection, team_id) is None:
            return 0
        gone = sa.delete(self._table).where(self._table.c.team_id == team_id, *where).returning(self._size)
        sizes = (await connection.execute(gone)).scalars().all()
        if sizes:
            await self.add(connection, team_id, -sum(sizes), -len(sizes))
        return len(sizes)

    async def bound(self, connection: AsyncConnection, team_id: int, held: Holding, bytes_max: int, kept: str) -> None:
        """Delete the team's oldest rows, except the row `kept`, until it holds at most `bytes_max`
        bytes.

        Raises OverQuota if that row alone has more.
        """
        table, excess_bytes = self._table, held.bytes - bytes_max
        while excess_bytes > 0:
            oldest = sa.select(table.c.id, self._size).where(table.c.team_id == team_id, table.c.id != kept)
            rows = await connection.execute(oldest.order_by(table.c.expires_at_s, table.c.id).limit(_EVICTED_AT_ONCE))
            ids = []
            for id, size in rows:
                if excess_bytes > 0:
                    ids.append(id)
                    excess_bytes -= size
            if not ids:
                raise OverQuota(f"This does not fit into the {bytes_max:,} bytes that are kept for a team: send less")
            await self.delete(connection, team_id, table.c.id.in_(ids))

    @uncancelled
    async def purge(self, *conditions: sa.ColumnElement[bool], most: int) -> int:
        """Delete at most `most` rows of any team; returns the number of rows found."""
        found = sa.select(self._table.c.team_id, self._table.c.id).where(*conditions).limit(most)
        rows = await self._database.rows(found)
        ids = defaultdict[int, list[str]](list)
        for team_id, id in rows:
            ids[team_id].append(id)
        for team_id, its in ids.items():
            async with self._database.writing(is_durable=False) as connection:
                await self.delete(connection, team_id, self._table.c.id.in_(its), *conditions)
        return len(rows)

    async def of_teams(self, *teams: int) -> dict[int, Holding]:
        """The counts of `teams`, or of all teams."""
        statement = sa.select(holdings.c.team_id, holdings.c.count, holdings.c.bytes)
        statement = statement.where(holdings.c.store == self._table.name, holdings.c.count > 0)
        rows = await self._database.rows(statement.where(holdings.c.team_id.in_(teams)) if teams else statement)
        return {team_id: Holding(count, size) for team_id, count, size in rows}
