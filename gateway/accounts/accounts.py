"""Teams, keys and budgets: stored in SQL, answered from memory.

No HTTP, no Redis, no spend. Invariant: `identify` never awaits and reads one consistent snapshot of
the database. A change commits and is in this process's snapshot when its method returns. `notify`
then asks the other processes to `reload`; `refresh` finds a change whose message was lost. A key
that the snapshot lacks makes `find` look whether the database has changed, within a bound on the
rate and on the memory of such keys. So does a snapshot that `refresh` has not confirmed for
`_HOLDS_S`, as after a pause of the process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar, Unpack

import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.audit import USES, AuditRow, inserted, latest_uses
from gateway.accounts.checks import check, check_new_budget, check_plaintext
from gateway.accounts.database import Database, uncancelled
from gateway.accounts.errors import AlreadyExists, DoesNotExist, Invalid
from gateway.accounts.teams import (
    BudgetChanges,
    BudgetFields,
    FirstBudget,
    Identity,
    Key,
    KeyChanges,
    KeyFields,
    NewKey,
    Team,
    TeamChanges,
    TeamFields,
    digest,
    new_plaintext,
    shown_prefix,
)
from policies import Budget, WindowKind
from policies.verification import Verify
from policies.windows import KEY, TEAM, Overdraft, Unit

_T = TypeVar("_T")
_FIRST_TEAM = "default"
_ROWS_AT_ONCE = 200
# looks at the database for keys that the snapshot lacks: guesses must not keep it busy
_LOOKS_PER_S = 10.0
_LOOKS_AT_ONCE = 20.0
LOOK_TIMEOUT_S = 1.0
_UNKNOWN_MAX = 1_024
# four times as long as a worker takes to look again, on the clock that a pause of the host moves, too
_HOLDS_S = 2.0
BUDGETS_MAX = 50
"""The budgets that a team may have: each that applies is checked with every generation."""


async def _notify_none() -> None:
    """The default `notify`, for a single process."""


class Accounts:
    """`open` first. `clock` gives unix seconds; `notify` is awaited after each committed change."""

    def __init__(
        self,
        database_url: str,
        *,
        notify: Callable[[], Awaitable[None]] = _notify_none,
        clock: Callable[[], float] = time.time,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """Raises Invalid for a URL of another kind of database. Connects to nothing."""
        self.database = Database(database_url)
        self._notify = notify
        self._clock = clock
        self._random_bytes = random_bytes
        self._identities: Mapping[bytes, Identity] = {}
        self._uses: Mapping[str, str] = {}
        self._on_uses: Callable[[Mapping[str, str]], None] | None = None
        self._version = 0
        self._confirmed_at_s = 0.0  # when the database was asked for what the snapshot has, or failed to answer
        self._reading = asyncio.Lock()
        self._used_at_s: dict[int, float] = {}
        self.unknown: dict[bytes, None] = {}  # digests that this snapshot's database does not have
        self._looks = _LOOKS_AT_ONCE
        self._looked_at_s = 0.0
        self._looking: asyncio.Task[bool] | None = None
        self._look_in_turn = asyncio.Lock()

    async def open(self) -> None:
        """Migrate where needed, and load. Several processes may do so at once."""
        await self.database.open()
        await self.reload()

    async def close(self) -> None:
        await self.database.close()

    # ── callers ──

    def identify(self, bearer: str) -> Identity | None:
        """The identity of a key, from memory.

        Returns None where the key is unknown, revoked or expired, or its team is inactive, and where
        the snapshot is too old to tell: `find` asks the database then.
        """
        identity, now_s = self._identities.get(digest(bearer)), self._clock()
        if identity is None or not 0.0 <= now_s - self._confirmed_at_s <= _HOLDS_S:
            return None
        return self._valid(identity, now_s)

    def _valid(self, identity: Identity | None, now_s: float) -> Identity | None:
        """The identity, if its key has not expired; notes its use."""
        if identity is None or (identity.key.expires_at_s is not None and identity.key.expires_at_s <= now_s):
            return None
        self._used_at_s[identity.key.id] = now_s
        return identity

    async def of_key(self, key_id: int) -> Identity | None:
        """The identity of a key by its id, from memory like `find`; None like `identify`."""
        if self._is_old():
            await self._look(is_old=True)
        found = next((one for one in self._identities.values() if one.key.id == key_id), None)
        expires_at_s = found.key.expires_at_s if found is not None else None
        return None if expires_at_s is not None and expires_at_s <= self._clock() else found

    async def find(self, bearer: str) -> Identity | None:
        """The identity of a key: from memory, else from a database that has changed since.

        Returns None like `identify`, and where too many unknown keys came lately, or the database
        does not answer in time. A key of an old snapshot is served from memory in that case.
        """
        identity, key_digest = self.identify(bearer), digest(bearer)
        is_old = key_digest in self._identities and self._is_old()
        if identity is not None or (not is_old and (key_digest in self.unknown or not self._may_look())):
            return identity
        is_confirmed = await self._look(is_old=is_old)
        identity = self._valid(self._identities.get(key_digest), self._clock())
        if identity is None and is_confirmed:
            if len(self.unknown) >= _UNKNOWN_MAX:
                del self.unknown[next(iter(self.unknown))]
            self.unknown[key_digest] = None
        return identity

    def _is_old(self) -> bool:
        """True where the snapshot may lack a change that is `_HOLDS_S` old, or the clock was set
        back.
        """
        return not 0.0 <= self._clock() - self._confirmed_at_s <= _HOLDS_S

    async def _look(self, *, is_old: bool) -> bool:
        """Ask the database for a change, one request at a time; False where it does not answer in
        time.

        With `is_old` it returns at once after another request has refreshed the snapshot.
        """
        try:
            async with asyncio.timeout(LOOK_TIMEOUT_S), self._look_in_turn:
                if is_old and not self._is_old():
                    return True
                if self._looking is not None and not self._looking.done():
                    raise TimeoutError  # one that timed out still waits for the database
                self._looking = asyncio.ensure_future(self.refresh())
                self._looking.add_done_callback(_retrieved)
                await asyncio.shield(self._looking)
                return True
        except (TimeoutError, SQLAlchemyError):
            self._confirmed_at_s = self._clock()  # memory serves while the database is away
            return False

    def _may_look(self) -> bool:
        """Take one look from the bucket, which refills with time; False if it is empty."""
        now_s = self._clock()
        self._looks = min(_LOOKS_AT_ONCE, self._looks + max(0.0, now_s - self._looked_at_s) * _LOOKS_PER_S)
        self._looked_at_s = now_s
        if self._looks < 1.0:
            return False
        self._looks -= 1.0
        return True

    @uncancelled
    async def reload(self) -> None:
        """Take a new snapshot of the database."""
        async with self._reading:
            asked_at_s = self._clock()
            async with self.database.reading() as connection:
                if not self.database.is_sqlite:  # one snapshot for all reads, as SQLite has
                    await connection.execute(sa.text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"))
                version = (await connection.execute(sa.select(schema.installation.c.version))).scalar_one()
                teams = {team.id: team async for team in _read(connection, schema.teams, _team)}
                of_team: dict[int, tuple[Budget, ...]] = {}
                async for budget in _read(connection, schema.budgets, _budget):
                    budget = dataclasses.replace(budget, time_zone=teams[budget.team_id].time_zone)
                    of_team[budget.team_id] = (*of_team.get(budget.team_id, ()), budget)
                identities: dict[bytes, Identity] = {}
                async for key in _read(connection, schema.keys, _key):
                    if key.is_active and teams[key.team_id].is_active:
                        identities[key.digest] = Identity(key, teams[key.team_id], of_team.get(key.team_id, ()))
                acts = [(row.entry, row.action) for row in await connection.execute(latest_uses())]
            self._identities = identities
            self._uses = {name: USES[action] for name, action in acts if USES[action]}
            if self._on_uses is not None:
                self._on_uses(self._uses)
            self._version, self._confirmed_at_s = version, asked_at_s
            self.unknown.clear()

    @uncancelled
    async def refresh(self) -> bool:
        """Reload where the database has changed since the last reload, and return whether it had.

        Reads one row.
        """
        asked_at_s = self._clock()
        try:
            async with self.database.reading() as connection:
                version = (await connection.execute(sa.select(schema.installation.c.version))).scalar_one()
        except SQLAlchemyError:
            self._confirmed_at_s = self._clock()  # memory serves while the database is away
            raise
        if version == self._version:
            self._confirmed_at_s = asked_at_s
            return False
        await self.reload()
        return True

    @uncancelled
    async def save_last_used(self) -> None:
        """Save when keys were last used. Call it regularly, and before `close`."""
        used, self._used_at_s = self._used_at_s, {}
        if not used:
            return
        keys = schema.keys
        seen: sa.BindParameter[float] = sa.bindparam("seen_at_s")
        is_newer = sa.or_(keys.c.last_used_at_s.is_(None), keys.c.last_used_at_s < seen)
        statement = sa.update(keys).where(keys.c.id == sa.bindparam("key"), is_newer).values(last_used_at_s=seen)
        rows = [{"key": key_id, "seen_at_s": at_s} for key_id, at_s in sorted(used.items())]
        try:
            async with self.database.writing() as connection:
                await connection.execute(statement, rows)
        except Exception:
            self._used_at_s = used | self._used_at_s  # for the next time
            raise

    @uncancelled
    async def ensure_first(self, plaintext: str | None = None) -> str | None:
        """Create the team `default` and its key in a new database, and return the key's plaintext.

        `plaintext` presets the key. Returns None in a database that had its first key before; of
        processes that race, one gets the key. Raises Invalid for a `plaintext` that is too short to
        be a secret.
        """
        if plaintext is not None:
            check_plaintext(plaintext)
        key = plaintext or new_plaintext(self._random_bytes)
        installation, teams = schema.installation, schema.teams
        async with self.database.reading() as connection:
            if (await connection.execute(sa.select(installation.c.is_claimed))).scalar_one():
                return None
        async with self._change("a team or key of that name") as connection:
            claim = sa.update(installation).where(sa.not_(installation.c.is_claimed)).values(is_claimed=True)
            if (await connection.execute(claim)).rowcount == 0:
                return None
            team_id = (await connection.execute(sa.select(teams.c.id).where(teams.c.name == _FIRST_TEAM))).scalar()
            if team_id is None:
                team_id = await _insert(connection, teams, self._new_team(_FIRST_TEAM, {}))
            await _insert(connection, schema.keys, self._new_key(team_id, "first", key, {}))
        return key

    # ── teams ──

    @uncancelled
    async def create_team(self, name: str, *, budget: FirstBudget | None = None, **fields: Unpack[TeamFields]) -> Team:
        """Create a team, with its first `budget` in the same transaction. Raises Invalid, AlreadyExists."""
        check({"name": name, **fields})
        values = self._new_budget(**budget) if budget is not None else None
        async with self._change(f"a team named {name!r}") as connection:
            team_id = await _insert(connection, schema.teams, self._new_team(name, fields))
            if values is not None:
                await _insert(connection, schema.budgets, {"team_id": team_id, **values})
            return _team(await _row(connection, schema.teams, team_id))

    @uncancelled
    async def update_team(self, team_id: int, **changes: Unpack[TeamChanges]) -> Team:
        """Raises Invalid, AlreadyExists, DoesNotExist."""
        check(changes)
        async with self._change(f"a team named {changes.get('name')!r}") as connection:
            await _update(connection, schema.teams, team_id, dict(changes))
            return _team(await _row(connection, schema.teams, team_id))

    @uncancelled
    async def list_teams(self) -> list[Team]:
        """All teams, by id."""
        async with self.database.reading() as connection:
            return [row async for row in _read(connection, schema.teams, _team)]

    @uncancelled
    async def team(self, team_id: int) -> Team:
        """Raises DoesNotExist."""
        async with self.database.reading() as connection:
            return _team(await _row(connection, schema.teams, team_id))

    @uncancelled
    async def delete_team(self, team_id: int) -> None:
        """Delete a team with its keys and budgets; its ledger rows stay. Raises DoesNotExist."""
        async with self._change("") as connection:
            # before the team's own row, as writers of its stores lock them
            await connection.execute(sa.delete(schema.holdings).where(schema.holdings.c.team_id == team_id))
            await _delete(connection, schema.teams, team_id)

    # ── keys ──

    @uncancelled
    async def create_key(self, team_id: int, name: str, **fields: Unpack[KeyFields]) -> NewKey:
        """Create a key; its plaintext is returned once and stored nowhere.

        Raises Invalid, AlreadyExists, DoesNotExist (the team).
        """
        check({"name": name, **fields})
        plaintext = new_plaintext(self._random_bytes)
        async with self._change(f"a key named {name!r} in this team") as connection:
            await _row(connection, schema.teams, team_id)
            key_id = await _insert(connection, schema.keys, self._new_key(team_id, name, plaintext, fields))
            return NewKey(_key(await _row(connection, schema.keys, key_id)), plaintext)

    @uncancelled
    async def update_key(self, key_id: int, **changes: Unpack[KeyChanges]) -> Key:
        """Raises Invalid, AlreadyExists, DoesNotExist."""
        check(changes)
        async with self._change(f"a key named {changes.get('name')!r} in this team") as connection:
            await _update(connection, schema.keys, key_id, dict(changes))
            return _key(await _row(connection, schema.keys, key_id))

    async def revoke_key(self, key_id: int) -> Key:
        """Deactivate a key; its row stays, since the ledger names it. Raises DoesNotExist."""
        return await self.update_key(key_id, is_active=False)

    @uncancelled
    async def list_keys(self, team_id: int | None = None) -> list[Key]:
        """All keys, or one team's, by id."""
        async with self.database.reading() as connection:
            return [row async for row in _read(connection, schema.keys, _key, team_id)]

    # ── budgets ──

    @uncancelled
    async def create_budget(
        self, team_id: int, window: WindowKind, limit: int, is_hard: bool = True, **fields: Unpack[BudgetFields]
    ) -> Budget:
        """Create a budget. One on the team's money counts from the start of the running window, any
        other one from now.

        Raises Invalid, AlreadyExists, DoesNotExist (the team).
        """
        values = self._new_budget(window, limit, is_hard, **fields)
        async with self._change(f"a {'hard' if is_hard else 'soft'} {window} budget of this team") as connection:
            await _row(connection, schema.teams, team_id)
            budgets, keys = schema.budgets, schema.keys
            count = sa.select(sa.func.count()).where(budgets.c.team_id == team_id)
            if (await connection.execute(count)).scalar_one() >= BUDGETS_MAX:
                raise AlreadyExists(f"this team has {BUDGETS_MAX} budgets, the most that it may have: delete one first")
            if values["axis"] == KEY and values["whose"] != _EACH:
                of_team = sa.select(keys.c.id).where(keys.c.team_id == team_id)
                if values["whose"] not in {f"={key_id}" for key_id in (await connection.execute(of_team)).scalars()}:
                    raise Invalid("value", "expected the id of a key of this team, or null for each key")
            budget_id = await _insert(connection, budgets, {"team_id": team_id, **values})
            return await self._budget(connection, budget_id)

    @uncancelled
    async def update_budget(self, budget_id: int, **changes: Unpack[BudgetChanges]) -> Budget:
        """Raises AlreadyExists, DoesNotExist."""
        values: dict[str, Any] = {_COLUMNS.get(name, name): value for name, value in changes.items()}
        async with self._change("a budget of this team with that window and hardness") as connection:
            await _update(connection, schema.budgets, budget_id, values)
            return await self._budget(connection, budget_id)

    @uncancelled
    async def raise_budget(self, budget_id: int, by: int, until_ms: int, row: AuditRow) -> Budget:
        """Add `by` to the limit until a moment, unix milliseconds, which `row` records.

        A later raise replaces it; `by` 0 ends it. Raises DoesNotExist.
        """
        async with self._change("") as connection:
            await connection.execute(inserted(row))
            await _update(connection, schema.budgets, budget_id, {"raised_by": by, "raised_until_ms": until_ms})
            return await self._budget(connection, budget_id)

    @uncancelled
    async def reset_budget(self, budget_id: int, row: AuditRow) -> Budget:
        """Count from 0 again, which `row` records. Requests under way count as before. Raises DoesNotExist."""
        budgets = schema.budgets
        async with self._change("") as connection:
            await connection.execute(inserted(row))
            again = {"epoch": budgets.c.epoch + 1, "begun_ms": self._now_ms()}
            await _update(connection, budgets, budget_id, again)
            return await self._budget(connection, budget_id)

    @uncancelled
    async def list_budgets(self, team_id: int | None = None) -> list[Budget]:
        """All budgets, or one team's, by id."""
        async with self.database.reading() as connection:
            teams = schema.teams
            zones = {
                row.id: row.time_zone for row in await connection.execute(sa.select(teams.c.id, teams.c.time_zone))
            }
            rows = [row async for row in _read(connection, schema.budgets, _budget, team_id)]
            return [dataclasses.replace(row, time_zone=zones[row.team_id]) for row in rows]

    @uncancelled
    async def delete_budget(self, budget_id: int) -> None:
        """Raises DoesNotExist."""
        async with self._change("") as connection:
            await _delete(connection, schema.budgets, budget_id)

    # ── deployments ──

    def follow_uses(self, take: Callable[[Mapping[str, str]], None]) -> None:
        """Call `take` now and after each reload, with the deployments that are drained or disabled.

        They come by name, each with the one word that it is.
        """
        self._on_uses = take
        take(self._uses)

    @uncancelled
    async def set_use(self, row: AuditRow) -> None:
        """Change the use of a deployment, which `row` records."""
        async with self._change("") as connection:
            await connection.execute(inserted(row))

    # ── changes ──

    async def _budget(self, connection: AsyncConnection, budget_id: int) -> Budget:
        found = _budget(await _row(connection, schema.budgets, budget_id))
        team = await _row(connection, schema.teams, found.team_id)
        return dataclasses.replace(found, time_zone=team["time_zone"])

    def _new_budget(
        self, window: WindowKind, limit: int, is_hard: bool = True, **fields: Unpack[BudgetFields]
    ) -> dict[str, Any]:
        """The columns of a budget. Raises Invalid."""
        check_new_budget(window, {"limit": limit, "is_hard": is_hard, **fields})
        value, axis = fields.get("value"), fields.get("axis", TEAM)
        return {
            "window_kind": WindowKind.TOTAL if window is WindowKind.ROLLING else window,
            "limit_microusd": limit,
            "is_hard": is_hard,
            "axis": axis,
            "whose": "" if axis == TEAM else _EACH if value is None else f"={value}",
            "unit": fields.get("unit", Unit.MONEY),
            "overdraft": fields.get("overdraft", Overdraft.REFUSE),
            "rolling_s": fields.get("rolling_s", 0),
            "begun_ms": self._now_ms(),
        }

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    @asynccontextmanager
    async def _change(self, taken: str) -> AsyncIterator[AsyncConnection]:
        """A transaction that counts as a change; afterwards a new snapshot here, and `notify`.

        `taken` names the row that a violated uniqueness means: "... exists already".
        """
        try:
            async with self.database.writing() as connection:
                installation = schema.installation
                await connection.execute(sa.update(installation).values(version=installation.c.version + 1))
                yield connection
        except IntegrityError:
            raise AlreadyExists(f"{taken} exists already") from None
        await self.reload()
        await self._notify()

    def _new_team(self, name: str, fields: TeamFields) -> dict[str, Any]:
        defaults = {"is_active": True, "is_semantic_enabled": True, "is_store_enabled": True}
        return {**defaults, **fields, "name": name, "created_at_s": self._clock()}

    def _new_key(self, team_id: int, name: str, plaintext: str, fields: KeyFields) -> dict[str, Any]:
        return {
            "is_active": True,
            **fields,
            "team_id": team_id,
            "name": name,
            "prefix": shown_prefix(plaintext),
            "digest": digest(plaintext),
            "created_at_s": self._clock(),
        }


def _retrieved(look: asyncio.Task[bool]) -> None:
    """Mark the error of a look that was not awaited as seen, so that asyncio does not log it."""
    if not look.cancelled():
        look.exception()


async def _read(
    connection: AsyncConnection, table: sa.Table, make: Callable[[Any], _T], team_id: int | None = None
) -> AsyncIterator[_T]:
    """The table's rows by id. Yields to the event loop every `_ROWS_AT_ONCE` rows."""
    statement = sa.select(table).order_by(table.c.id)
    if team_id is not None:
        statement = statement.where(table.c.team_id == team_id)
    result = await connection.stream(statement)
    async for rows in result.mappings().partitions(_ROWS_AT_ONCE):
        for row in rows:
            yield make(row)


async def _row(connection: AsyncConnection, table: sa.Table, row_id: int) -> Any:
    row = (await connection.execute(sa.select(table).where(table.c.id == row_id))).mappings().first()
    if row is None:
        raise DoesNotExist(f"there is no {table.name[:-1]} {row_id}")
    return row


async def _insert(connection: AsyncConnection, table: sa.Table, values: Mapping[str, Any]) -> int:
    return int((await connection.execute(sa.insert(table).values(values).returning(table.c.id))).scalar_one())


async def _update(connection: AsyncConnection, table: sa.Table, row_id: int, changes: dict[str, Any]) -> None:
    if changes:
        await connection.execute(sa.update(table).where(table.c.id == row_id).values(changes))


async def _delete(connection: AsyncConnection, table: sa.Table, row_id: int) -> None:
    if (await connection.execute(sa.delete(table).where(table.c.id == row_id))).rowcount == 0:
        raise DoesNotExist(f"there is no {table.name[:-1]} {row_id}")


def _team(row: Mapping[str, Any]) -> Team:
    verify = row["verify"]
    return Team(**{**row, "verify": None if verify is None else Verify(verify)})


def _key(row: Mapping[str, Any]) -> Key:
    models = row["models"]
    return Key(**{**row, "digest": bytes(row["digest"]), "models": None if models is None else tuple(models)})


def _budget(row: Mapping[str, Any]) -> Budget:
    """The budget of a row, without its team's time zone."""
    whose = row["whose"]
    return Budget(
        id=row["id"],
        team_id=row["team_id"],
        window=WindowKind.ROLLING if row["rolling_s"] else WindowKind(row["window_kind"]),
        limit=row["limit_microusd"],
        is_hard=row["is_hard"],
        axis=row["axis"],
        value=whose[1:] if whose.startswith("=") else None,
        unit=Unit(row["unit"]),
        rolling_s=row["rolling_s"],
        overdraft=Overdraft(row["overdraft"]),
        raised_by=row["raised_by"],
        raised_until_ms=row["raised_until_ms"],
        epoch=row["epoch"],
        begun_ms=row["begun_ms"],
    )


_EACH = "*"
_COLUMNS = {"limit": "limit_microusd"}
