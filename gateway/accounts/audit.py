"""The audit log in SQL: an admin's and an operator's acts, with time, client and way.

The acts are: answers shown, exported or imported, certificates started, budgets raised or reset,
ledger corrections, and changes of a deployment, a batch or the configuration. It has no texts of
requests. Invariant: rows are added and never changed or removed; they outlive teams. A deployment's
latest row with an action of `USES` decides its use, and an alias's latest change of its model, what
the database says of it.
"""

from typing import Any

import msgspec
import sqlalchemy as sa

from gateway.accounts import schema
from gateway.accounts.database import Database

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
LEDGER_DROPPED = "ledger_dropped"
BATCH_CANCELLED = "batch_cancelled"
CACHE_IMPORTED = "cache_imported"
CACHE_EXPORTED = "cache_exported"
CONFIG_RELOADED = "configuration_reloaded"
MODEL_CHANGED = "model_changed"
USES = {DRAINED: "drained", DISABLED: "disabled", ENABLED: ""}
"""The use of a deployment after an action; empty: in use."""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One look of an admin at texts, one certificate started, or one act on a budget, the ledger, a
    batch or a deployment.

    `at_ms` is unix milliseconds. `entry` is the id of the cached answer or the batch, the
    certificate's alias, the change of the budget or the ledger, its removed month, or the deployment's name. `team_id`
    is 0 for a change of the ledger or a deployment. `request_id` is empty except for answers;
    `client` is the address, or the system's user for a command; `way` is `dashboard`, `api`,
    `command`, or `age` for a month of the ledger that was removed.
    """

    at_ms: int
    action: str
    team_id: int
    request_id: str
    entry: str
    client: str
    way: str
    id: int = 0  # given by the database


class ModelChange(msgspec.Struct, frozen=True):
    """A change of what the database says of an alias: its model's settings before and after; None: nothing."""

    alias: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Audit:
    """Reads and writes the log. Database errors are sqlalchemy's own."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, row: AuditRow) -> None:
        """Write a row. It is on disk when this returns."""
        await self._database.write(inserted(row))

    async def rows(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The latest rows, newest first; with `before`, only rows with a lower id."""
        table = schema.audit
        statement = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(table.c.id < before)
        return tuple([AuditRow(**row._asdict()) for row in await self._database.rows(statement)])

    async def model_changes(self) -> list[tuple[AuditRow, ModelChange]]:
        """All changes of models, the first one first."""
        table = schema.audit
        rows = await self._database.rows(sa.select(table).where(table.c.action == MODEL_CHANGED).order_by(table.c.id))
        return [(AuditRow(**row._asdict()), msgspec.json.decode(row.entry, type=ModelChange)) for row in rows]

    async def kept_models(self) -> dict[str, dict[str, Any]]:
        """What the database says of aliases."""
        latest = {change.alias: change.after for _, change in await self.model_changes()}
        return {alias: model for alias, model in latest.items() if model is not None}


def inserted(row: AuditRow) -> sa.Insert:
    """The statement that writes `row`."""
    values = msgspec.structs.asdict(row)
    del values["id"]
    return sa.insert(schema.audit).values(values)


def latest_uses() -> sa.Select[tuple[str, str]]:
    """The query for each deployment's name and the last action that changed its use, in their order."""
    table = schema.audit
    latest = sa.select(sa.func.max(table.c.id)).where(table.c.action.in_(USES)).group_by(table.c.entry)
    return sa.select(table.c.entry, table.c.action).where(table.c.id.in_(latest)).order_by(table.c.id)
