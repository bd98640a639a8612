"""The audit log in SQL: which texts of a team an admin asked to see, when and from where.

No texts. Invariant: rows are added and never changed or removed; they outlive teams.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from gateway.accounts import schema
from gateway.accounts.database import Database, uncancelled

ANSWER_SHOWN = "answer_shown"


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One look of an admin at texts.

    `at_ms` is unix milliseconds; `entry` is the id of the cached answer; `client` is the address;
    `way` is `dashboard` or `api`.
    """

    at_ms: int
    action: str
    team_id: int
    request_id: str
    entry: str
    client: str
    way: str
    id: int = 0  # given by the database


class Audit:
    """Reads and writes the log. Database errors are sqlalchemy's own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @uncancelled
    async def add(self, row: AuditRow) -> None:
        """Write a row. It is on disk when this returns."""
        values = msgspec.structs.asdict(row)
        del values["id"]
        async with self._database.writing() as connection:
            await connection.execute(sa.insert(schema.audit).values(values))

    @uncancelled
    async def rows(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The latest rows, the newest first; those with an id below `before` if it is given."""
        table = schema.audit
        statement = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(table.c.id < before)
        async with self._database.reading() as connection:
            return tuple([AuditRow(**row) for row in (await connection.execute(statement)).mappings()])
