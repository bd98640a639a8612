"""The audit log in SQL: what operators changed and which texts they read, with time, actor, client and
way.

The acts are: changes of teams, keys, budgets, models, deployments, batches, the cache, the ledger and
the configuration, sign-ins, verdicts, and texts shown, exported or imported. It has no texts of
requests. Invariant: rows are added and never changed; age alone removes them, and they outlive teams. A
deployment's latest row with an action of `USES` decides its use, an alias's latest change of its model,
what the database says of it, and a removed month's row, that no file waits for it: these stay for ever.
"""

from collections.abc import AsyncIterator
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
TEAM_CREATED, TEAM_CHANGED, TEAM_DELETED = "team_created", "team_changed", "team_deleted"
KEY_CREATED, KEY_CHANGED = "key_created", "key_changed"
BUDGET_CREATED, BUDGET_CHANGED, BUDGET_DELETED = "budget_created", "budget_changed", "budget_deleted"
CACHE_PURGED, ANSWER_CLEARED, VERDICT_GIVEN = "cache_purged", "answer_cleared", "verdict_given"
TEXTS_SHOWN = "texts_shown"
PERSON_DISABLED, PERSON_ENABLED, KEYS_KEPT = "person_disabled", "person_enabled", "keys_kept"
SIGNED_IN, SIGNED_OUT, SESSION_ENDED = "signed_in", "signed_out", "session_ended"
AGENT_SIGNED_IN = "agent_signed_in"
USES = {DRAINED: "drained", DISABLED: "disabled", ENABLED: ""}
"""The use of a deployment after an action; empty: in use."""
_STATE = frozenset((*USES, MODEL_CHANGED, LEDGER_DROPPED))
_SELDOM_MS = 600_000
_DAY_MS = 86_400_000
_AT_ONCE = 1_000
_LIKES_MAX = 1_000


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One look of an operator at texts, or one act.

    `at_ms` is unix milliseconds. `entry` says what was changed or read: the id of the cached answer or
    the batch, the name of a team or key, the certificate's alias, the conditions of a purge, the page
    with the texts. `change` is JSON: each changed field's values before and after; empty where there
    are none. `team_id` is 0 for what is no team's. `request_id` is empty except for answers; `actor`
    is the person or `admin key`; `client` is the address, or the system's user for a command; `way`
    is `dashboard`, `api`, `command`, or `age` for a month of the ledger that was removed.
    """

    at_ms: int
    action: str
    team_id: int
    request_id: str
    entry: str
    client: str
    way: str
    actor: str = ""
    change: str = ""
    id: int = 0  # given by the database

    def of_change(self, before: sa.Row[Any] | None, after: sa.Row[Any] | None) -> "AuditRow":
        """The same with what differs between two states of a database row; None: it is not there."""
        old, new = (_shown(row) for row in (before, after))
        change = {name: [old.get(name), new.get(name)] for name in {**old, **new} if old.get(name) != new.get(name)}
        return msgspec.structs.replace(self, change=msgspec.json.encode(change).decode())


def _shown(row: sa.Row[Any] | None) -> dict[str, Any]:
    """The fields of a row that people may read: no digests."""
    fields = row._asdict() if row is not None else {}
    if unit := fields.get("unit"):  # of a budget, whose amounts are in it
        of_unit = "microusd" if unit == "money" else unit
        fields |= {f"{name}_{of_unit}": fields.pop(stored) for name, stored in _AMOUNTS.items()}
    return {name: value for name, value in fields.items() if not isinstance(value, bytes)}


_AMOUNTS = {"limit": "limit_microusd", "raised_by": "raised_by"}


class ModelChange(msgspec.Struct, frozen=True):
    """A change of what the database says of an alias: its model's settings before and after; None: nothing."""

    alias: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class Audit:
    """Reads and writes the log. Database errors are sqlalchemy's own."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._seldom: dict[tuple[str, str, str, str], int] = {}

    async def add(self, row: AuditRow) -> None:
        """Write a row. It is on disk when this returns."""
        await self._database.write(inserted(row))

    async def add_seldom(self, row: AuditRow) -> None:
        """Write a row unless its like, but for the time, was written in the last ten minutes: pages read
        themselves again.
        """
        like = (row.action, row.entry, row.actor, row.client)
        if row.at_ms - self._seldom.get(like, -_SELDOM_MS) >= _SELDOM_MS:
            await self.add(row)
            if len(self._seldom) >= _LIKES_MAX:
                self._seldom.clear()
            self._seldom[like] = row.at_ms

    async def rows(self, limit: int, before: int | None = None) -> tuple[AuditRow, ...]:
        """The latest rows, newest first; with `before`, only rows with a lower id."""
        table = schema.audit
        statement = sa.select(table).order_by(table.c.id.desc()).limit(limit)
        if before is not None:
            statement = statement.where(table.c.id < before)
        return tuple([AuditRow(**row._asdict()) for row in await self._database.rows(statement)])

    async def between(self, from_ms: int, until_ms: int) -> AsyncIterator[AuditRow]:
        """The rows from `from_ms` on and before `until_ms` (unix milliseconds), the first one first."""
        table, last = schema.audit, 0
        of_range = sa.select(table).where(table.c.at_ms >= from_ms, table.c.at_ms < until_ms).order_by(table.c.id)
        while rows := await self._database.rows(of_range.where(table.c.id > last).limit(_AT_ONCE)):
            for row in rows:
                yield AuditRow(**row._asdict())
            last = rows[-1].id

    async def forget(self, kept_days: int | None, now_s: float) -> None:
        """Remove the rows older than `kept_days` that decide nothing any more; None: remove none."""
        if kept_days is not None:
            table = schema.audit
            is_old = table.c.at_ms < int(now_s * 1000) - kept_days * _DAY_MS
            await self._database.write(sa.delete(table).where(is_old, table.c.action.not_in(_STATE)))

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
