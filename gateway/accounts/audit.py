"""The audit log in SQL: which texts of a team an admin asked to see, which certificates were
started, which budgets were raised or reset, and what an operator did with a deployment or a batch
by hand, when and from where.

No texts. Invariant: rows are added and never changed or removed; they outlive teams. The latest row
of a deployment with an action of `USES` decides on its use.
"""

from __future__ import annotations

import msgspec
import sqlalchemy as sa

from gateway.accounts import schema
from gateway.accounts.database import Database, uncancelled

ANSWER_SHOWN = "answer_shown"
CERTIFICATE_STARTED = "certificate_started"
DRAINED = "deployment_drained"
DISABLED = "deployment_disabled"
ENABLED = "deployment_enabled"
RESET = "deployment_reset"
TRIED = "deployment_tried"
BUDGET_RAISED = "budget_raised"
BUDGET_RESET = "budget_reset"
LEDGER_CORRECTED = "ledger_corrected"
BATCH_CANCELLED = "batch_cancelled"
USES = {DRAINED: "drained", DISABLED: "disabled", ENABLED: ""}
"""What a deployment is after an action; empty: in use."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One look of an admin at texts, one certificate started, or one act on a budget, a batch or a
    deployment.

    `at_ms` is unix milliseconds; `entry` is the id of the cached answer or the batch, the
    certificate's alias, what was done to the budget or the ledger, or the deployment's name; of the
    last two `team_id` is 0. `request_id` is empty but for answers; `client` is the address; `way`
    is `dashboard`, `api` or `command`.
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
        async with self._database.writing() as connection:
            await connection.execute(inserted(row))

    @uncancelled
    async def rows(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The latest rows, the newest first; those with an id below `before` if it is given."""
        table = schema.audit
        statement = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(table.c.id < before)
        async with self._database.reading() as connection:
            return tuple([AuditRow(**row) for row in (await connection.execute(statement)).mappings()])


def inserted(row: AuditRow) -> sa.Insert:
    """The statement that writes `row`."""
    values = msgspec.structs.asdict(row)
    del values["id"]
    return sa.insert(schema.audit).values(values)


def latest_uses() -> sa.Select[tuple[str, str]]:
    """The query of each deployment's name with the last action that changed its use."""
    table = schema.audit
    latest = sa.select(sa.func.max(table.c.id)).where(table.c.action.in_(USES)).group_by(table.c.entry)
    return sa.select(table.c.entry, table.c.action).where(table.c.id.in_(latest))
