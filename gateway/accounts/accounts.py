"""Teams, keys and budgets: stored in SQL, answered from memory.

No HTTP, no Redis, no spend. Invariant: `identify` never awaits and reads one consistent snapshot of
the database. A change commits and is in this process's snapshot when its method returns. `notify`
then asks the other processes to `reload`; `refresh` detects a change whose message was lost. For a
key that the snapshot lacks, `find` checks whether the database has changed; the rate of checks and
the memory of such keys are bounded. It also checks if `refresh` has not confirmed the snapshot for
`_HOLDS_S`, as after a pause of the process.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from sqlalchemy.exc import IntegrityError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.audit import USES, AuditRow, inserted, latest_uses
from gateway.accounts.checks import check, check_new_budget, check_plaintext
from gateway.accounts.database import Database, uncancelled
from gateway.accounts.errors import AlreadyExists, DoesNotExist, Invalid
from gateway.accounts.persons import DAY_S, Person, Persons
from gateway.accounts.teams import Identity, Key, NewKey, Team, digest, new_plaintext, shown_prefix
from policies import Budget, WindowKind
from policies.windows import KEY, TEAM, Overdraft, Unit

_T = TypeVar("_T")
_FIRST_TEAM = "default"
PEOPLE = "signed-in people"
"""The key of a team's callers that come with tokens: its row has their models and limits; nobody has its plaintext."""
ALL_PEOPLE = "*"
"""The owner of that key."""
_ROWS_AT_ONCE = 200
_VERSION = sa.select(schema.installation.c.version)
# looks at the database for keys that the snapshot lacks: guesses must not keep it busy
_LOOKS_PER_S = 10.0
_LOOKS_AT_ONCE = 20.0
LOOK_TIMEOUT_S = 1.0
_UNKNOWN_MAX = 1_024
# four times as long as a worker takes to look again, on the clock that a pause of the host moves, too
_HOLDS_S = 2.0
BUDGETS_MAX = 50
"""The most budgets of a team: every generation checks all that apply."""
OWN_KEYS_MAX = 20
"""The most keys of a member in a team that work: each has a key's limits and budgets of its own."""


async def _notify_none() -> None:
    """Do nothing: the default `notify`, for a single process."""


class Accounts:
    """Stores teams, keys and budgets, and identifies callers. Call `open` first.

    `clock` gives unix seconds; `notify` is awaited after each committed change; `leavers_days` gives the setting.
    """

    def __init__(
        self,
        database_url: str,
        *,
        notify: Callable[[], Awaitable[None]] = _notify_none,
        clock: Callable[[], float] = time.time,
        leavers_days: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Connect to nothing. Raises Invalid for a URL of an unsupported database."""
        self.database = Database(database_url)
        self._notify = notify
        self._clock = clock
        self._identities: Mapping[bytes, Identity] = {}
        self._people: Mapping[int, Identity] = {}
        self.team_ids: Mapping[str, int] = {}
        self._leavers_days = leavers_days
        self.persons = Persons({}, {}, leavers_days)
        self._seen_at_s: dict[str, float] = {}  # people, not saved yet
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
        """Migrate the schema if it is old, and load. Several processes may call it at once."""
        await self.database.open()
        await self.reload()

    async def close(self) -> None:
        await self.database.close()

    # ── callers ──

    def identify(self, bearer: str) -> Identity | None:
        """The identity of a key, from memory.

        Returns None if the key is unknown, revoked or expired, or its team is inactive, and if the
        snapshot is too old to tell: `find` asks the database then.
        """
        identity = self._identities.get(digest(bearer))
        return None if identity is None or self._is_old() else self._valid(identity, self._clock())

    def _valid(self, identity: Identity | None, now_s: float) -> Identity | None:
        """The identity, unless its key has expired or its owner is out; records the key's use."""
        if identity is None or (identity.key.expires_at_s is not None and identity.key.expires_at_s <= now_s):
            return None
        if identity.key.owner and self.persons.why_stopped(identity.key.owner, now_s):
            return None
        self._used_at_s[identity.key.id] = now_s
        return identity

    def why_not(self, bearer: str | None) -> str:
        """Why a key is not taken now."""
        if not bearer:
            return "No API key provided: send it as `Authorization: Bearer ...`, `api-key` or `x-api-key`"
        if (identity := self._identities.get(digest(bearer))) is None:
            return (
                "Incorrect API key provided: it is unknown, revoked or expired; `/admin` and `sameway keys` make keys"
            )
        return (
            self.persons.why_stopped(identity.key.owner, self._clock())
            or "This API key has expired, or another secret took its place"
        )

    def people(self, team_id: int) -> Identity | None:
        """What the people of a team have in common, from memory; None like `identify`, and where no one came yet."""
        return None if self._is_old() else self._valid(self._people.get(team_id), self._clock())

    async def find_people(self, team_id: int) -> Identity | None:
        """The same, after a look at the database; the first of a team's people makes their key."""
        if self._is_old():
            await self._look(is_old=True)
        if team_id not in self._people and team_id in self.team_ids.values():
            with contextlib.suppress(AlreadyExists, DoesNotExist):  # another worker's, a revoked one; a deleted team
                await self.create_key(team_id, PEOPLE, owner=ALL_PEOPLE)
            await self.refresh()
        return self._valid(self._people.get(team_id), self._clock())

    async def of_key(self, key_id: int) -> Identity | None:
        """The identity of a key by its id, from memory like `find`; None like `identify`."""
        if self._is_old():
            await self._look(is_old=True)
        found = next((one for one in self._identities.values() if one.key.id == key_id), None)
        return self._valid(found, self._clock())

    async def find(self, bearer: str) -> Identity | None:
        """The identity of a key: from memory, else from a database that has changed since.

        Returns None like `identify`, and if too many unknown keys came lately, or the database does
        not answer in time. In that case a key of an old snapshot is served from memory.
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
        """Whether the snapshot may lack a change older than `_HOLDS_S`, or the clock was set back."""
        return not 0.0 <= self._clock() - self._confirmed_at_s <= _HOLDS_S

    async def _look(self, *, is_old: bool) -> bool:
        """Refresh the snapshot, one request at a time; returns False if the database does not
        answer in time.

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
        """Take a token from the bucket of database checks, which refills with time; False if it is
        empty.
        """
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
                version = (await connection.execute(_VERSION)).scalar_one()
                teams = {team.id: team async for team in _read(connection, schema.teams, _team)}
                of_team: dict[int, tuple[Budget, ...]] = {}
                async for budget in _read(connection, schema.budgets, _budget):
                    of_team[budget.team_id] = (*of_team.get(budget.team_id, ()), budget)
                identities: dict[bytes, Identity] = {}
                async for key in _read(connection, schema.keys, _key):
                    if key.is_active and teams[key.team_id].is_active:
                        more = teams[key.team_id], of_team.get(key.team_id, ())
                        identities[key.digest] = Identity(key, *more)
                        if key.old_digest is not None and key.old_until_s is not None:
                            until_s = min(key.old_until_s, key.expires_at_s or key.old_until_s)
                            identities[key.old_digest] = Identity(replace(key, expires_at_s=until_s), *more)
                persons = {person.name: person async for person in _read(connection, schema.people, _person)}
                ended = {row.name: row.at_s async for row in _read(connection, schema.ended_tokens, _as_it_is)}
                acts = [(row.entry, row.action) for row in await connection.execute(latest_uses())]
            self._identities = identities
            self._people = {one.team.id: one for one in identities.values() if one.key.owner == ALL_PEOPLE}
            self.persons = Persons(persons, ended, self._leavers_days)
            self.team_ids = {team.name: team.id for team in teams.values()}
            self._uses = {name: USES[action] for name, action in acts}
            if self._on_uses is not None:
                self._on_uses(self._uses)
            self._version, self._confirmed_at_s = version, asked_at_s
            self.unknown.clear()

    @uncancelled
    async def refresh(self) -> bool:
        """Reload if the database has changed since the last reload; returns whether it had.

        Reads one row.
        """
        asked_at_s = self._clock()
        try:
            (version,) = await self.database.scalars(_VERSION)
        except SQLAlchemyError:
            self._confirmed_at_s = self._clock()  # memory serves while the database is away
            raise
        if version == self._version:
            self._confirmed_at_s = asked_at_s
            return False
        await self.reload()
        return True

    def saw(self, name: str) -> None:
        """The provider vouched for a person just now; keys that stopped as it had not for long do not work again."""
        person, now_s = self.persons.listed.get(name), self._clock()
        stop_at_s = self.persons.keys_stop_at_s(name)
        if person is None or (now_s - person.seen_at_s > DAY_S and (stop_at_s is None or stop_at_s > now_s)):
            self._seen_at_s[name] = now_s

    async def save_seen(self) -> None:
        """Save who was seen."""
        if seen_at_s := self._seen_at_s:
            self._seen_at_s = {}
            try:
                await self._set_people([{"name": name, "seen_at_s": at_s} for name, at_s in sorted(seen_at_s.items())])
            except Exception:
                self._seen_at_s = seen_at_s | self._seen_at_s  # for the next time
                raise

    async def let_in(self, name: str, *, row: AuditRow | None = None) -> None:
        """Enable a person, whose keys work from now on as after a sign-in; `row` goes to the audit log. Raises Invalid."""
        names = sorted({name, *self.persons.disabled_as(name)})
        await self._set_people([{"name": one, "seen_at_s": self._clock(), "is_disabled": False} for one in names], row)

    async def disable(self, name: str, *, row: AuditRow | None = None) -> None:
        """Take nothing from a person any more: no sign-in, no key, no token. `row` as in `let_in`. Raises Invalid."""
        person = self.persons.listed.get(name)
        seen_at_s = person.seen_at_s if person is not None else self._clock()
        await self._set_people([{"name": name, "seen_at_s": seen_at_s, "is_disabled": True}], row)

    @uncancelled
    async def _set_people(self, rows: list[dict[str, Any]], row: AuditRow | None = None) -> None:
        for one in rows:
            check(one)
        insert = self.database.insert(schema.people)
        changed = {name: insert.excluded[name] for name in rows[0] if name != "name"}
        async with self._change("") as connection:
            await connection.execute(insert.on_conflict_do_update(index_elements=["name"], set_=changed), rows)
            if row is not None:
                await connection.execute(inserted(row))

    @uncancelled
    async def end_tokens(self, names: Collection[str], at_s: float, kept_s: float) -> None:
        """Take no token any more that was issued up to `at_s` for one of `names`, of `ends_of`. It is remembered for
        `kept_s` seconds, in which such tokens end.
        """
        table, insert = schema.ended_tokens, self.database.insert(schema.ended_tokens)
        at, is_later = insert.excluded.at_s, table.c.at_s < insert.excluded.at_s
        latest = insert.on_conflict_do_update(index_elements=["name"], set_={"at_s": at}, where=is_later)
        async with self._change("") as connection:
            await connection.execute(sa.delete(table).where(table.c.at_s < self._clock() - kept_s))
            await connection.execute(latest, [{"name": name, "at_s": at_s} for name in names])

    @uncancelled
    async def save_last_used(self) -> None:
        """Save when keys were last used and who was seen. Call it regularly, and before `close`."""
        await self.save_seen()
        used_at_s, self._used_at_s = self._used_at_s, {}
        if not used_at_s:
            return
        keys = schema.keys
        seen: sa.BindParameter[float] = sa.bindparam("seen_at_s")
        is_newer = sa.or_(keys.c.last_used_at_s.is_(None), keys.c.last_used_at_s < seen)
        statement = sa.update(keys).where(keys.c.id == sa.bindparam("key"), is_newer).values(last_used_at_s=seen)
        rows = [{"key": key_id, "seen_at_s": at_s} for key_id, at_s in sorted(used_at_s.items())]
        try:
            await self.database.write(statement, rows)
        except Exception:
            self._used_at_s = used_at_s | self._used_at_s  # for the next time
            raise

    @uncancelled
    async def ensure_first(self, plaintext: str | None = None) -> str | None:
        """Create the team `default` and its key in a new database, and return the key's plaintext.

        `plaintext` presets the key. Returns None if the database has had its first key; of racing
        processes, a single one gets the key. Raises Invalid for a `plaintext` too short to be a
        secret.
        """
        if plaintext is not None:
            check_plaintext(plaintext)
        key = plaintext or new_plaintext()
        installation, teams = schema.installation, schema.teams
        if await self.database.scalars(sa.select(installation.c.is_claimed)) == [True]:
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
    async def create_team(
        self, name: str, *, budget: Mapping[str, Any] | None = None, row: AuditRow | None = None, **fields: Any
    ) -> Team:
        """Create a team, with its first `budget` in the same transaction; `row`: see `_recorded`. Raises
        Invalid, AlreadyExists.
        """
        check({"name": name, **fields})
        values = self._new_budget(**budget) if budget is not None else None
        async with self._change(f"a team named {name!r}") as connection:
            team_id = await _insert(connection, schema.teams, self._new_team(name, fields))
            if values is not None:
                await _insert(connection, schema.budgets, {"team_id": team_id, **values})
            return _team(await _recorded(connection, schema.teams, team_id, row))

    async def update_team(self, team_id: int, *, row: AuditRow | None = None, **changes: Any) -> Team:
        """Change a team's fields; `row`: see `_recorded`. Raises Invalid, AlreadyExists, DoesNotExist."""
        taken = f"a team named {changes.get('name')!r}"
        return _team(await self._updated(schema.teams, team_id, changes, taken, row))

    async def list_teams(self) -> list[Team]:
        """All teams, by id."""
        return await self._listed(schema.teams, _team)

    @uncancelled
    async def team(self, team_id: int) -> Team:
        """Read a team. Raises DoesNotExist."""
        async with self.database.reading() as connection:
            return _team(await _row(connection, schema.teams, team_id))

    @uncancelled
    async def delete_team(self, team_id: int, row: AuditRow | None = None) -> None:
        """Delete a team with its keys and budgets; its ledger rows stay. `row`: see `_recorded`. Raises
        DoesNotExist.
        """
        async with self._change("") as connection:
            await _recorded(connection, schema.teams, team_id, row, is_going=True)
            # before the team's own row, as writers of its stores lock them
            await connection.execute(sa.delete(schema.holdings).where(schema.holdings.c.team_id == team_id))
            await _delete(connection, schema.teams, team_id)

    # ── keys ──

    @uncancelled
    async def create_key(
        self, team_id: int, name: str, *, row: AuditRow | None = None, is_bound: bool = False, **fields: Any
    ) -> NewKey:
        """Create a key; its plaintext is returned once and stored nowhere. `row`: see `_recorded`. What `fields` do not
        say is of the team's template; with `is_bound` also what they say otherwise, and the owner has at most
        `OWN_KEYS_MAX` that work.

        Raises Invalid, AlreadyExists, and DoesNotExist for an unknown team.
        """
        check({"name": name, **fields})
        _check_free(name, fields)
        plaintext = new_plaintext()
        async with self._change(f"a key named {name!r} in this team") as connection:
            team = _team(await _row(connection, schema.teams, team_id))
            template = team.new_keys.fields(self._clock())
            if fields.get("owner") == ALL_PEOPLE:
                template.pop("expires_at_s", None)
            if is_bound and fields.get("expires_at_s") is not None and "expires_at_s" in template:
                template["expires_at_s"] = min(template["expires_at_s"], fields["expires_at_s"])
            if is_bound:
                keys, now_s = schema.keys.c, self._clock()
                works = keys.is_active & (keys.expires_at_s.is_(None) | (keys.expires_at_s > now_s))
                own = sa.select(sa.func.count()).where(keys.team_id == team_id, keys.owner == fields["owner"], works)
                if (await connection.execute(own)).scalar_one() >= OWN_KEYS_MAX:
                    raise AlreadyExists(f"you have {OWN_KEYS_MAX} keys in this team, the most: revoke one first")
            fields |= {name: one for name, one in template.items() if is_bound or fields.get(name) is None}
            key_id = await _insert(connection, schema.keys, self._new_key(team_id, name, plaintext, fields))
            return NewKey(_key(await _recorded(connection, schema.keys, key_id, row)), plaintext)

    async def update_key(self, key_id: int, *, row: AuditRow | None = None, **changes: Any) -> Key:
        """Change a key's fields; `row`: see `_recorded`. Raises Invalid, AlreadyExists, DoesNotExist."""
        _check_free(changes.get("name"), {})
        taken = f"a key named {changes.get('name')!r} in this team"
        return _key(await self._updated(schema.keys, key_id, changes, taken, row))

    @uncancelled
    async def rotate_key(self, key_id: int, overlap_s: float, *, row: AuditRow | None = None) -> NewKey:
        """Give a key another secret, which is returned once; the one that it had works for `overlap_s` seconds more, an
        older one no more. `row`: see `_recorded`. Raises DoesNotExist, and Invalid for the key of a team's people.
        """
        plaintext = new_plaintext()
        async with self._change("") as connection:
            before = await _row(connection, schema.keys, key_id)
            if before.owner == ALL_PEOPLE:
                raise Invalid("key_id", "expected a key with a secret: that of signed-in people has none")
            secret = {"digest": digest(plaintext), "prefix": shown_prefix(plaintext)}
            old = {"old_digest": before.digest, "old_until_s": self._clock() + overlap_s}
            await connection.execute(sa.update(schema.keys).where(schema.keys.c.id == key_id).values(**secret, **old))
            return NewKey(_key(await _recorded(connection, schema.keys, key_id, row, before)), plaintext)

    async def revoke_key(self, key_id: int, row: AuditRow | None = None) -> Key:
        """Deactivate a key; its row stays, since the ledger names it. Raises DoesNotExist."""
        return await self.update_key(key_id, row=row, is_active=False)

    async def list_keys(self, team_id: int | None = None) -> list[Key]:
        """All keys, or one team's, by id."""
        return await self._listed(schema.keys, _key, team_id)

    # ── budgets ──

    @uncancelled
    async def create_budget(
        self,
        team_id: int,
        window: WindowKind,
        limit: int,
        is_hard: bool = True,
        *,
        row: AuditRow | None = None,
        **fields: Any,
    ) -> Budget:
        """Create a budget; `row`: see `_recorded`. A budget on the team's money counts from the start of the running
        window, any other budget from its creation.

        Raises Invalid, AlreadyExists, and DoesNotExist for an unknown team.
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
            return _budget(await _recorded(connection, schema.budgets, budget_id, row))

    async def update_budget(self, budget_id: int, *, row: AuditRow | None = None, **changes: Any) -> Budget:
        """Change a budget's fields; `row`: see `_recorded`. Raises AlreadyExists, DoesNotExist."""
        if "limit" in changes:
            changes["limit_microusd"] = changes.pop("limit")
        taken = "a budget of this team with that window and hardness"
        return _budget(await self._updated(schema.budgets, budget_id, changes, taken, row))

    async def raise_budget(self, budget_id: int, by: int, until_ms: int, row: AuditRow) -> Budget:
        """Add `by` to a budget's limit until `until_ms` (unix milliseconds), and write `row` to the
        audit log.

        A later raise replaces it; `by` 0 ends it. Raises DoesNotExist.
        """
        raised = {"raised_by": by, "raised_until_ms": until_ms}
        return _budget(await self._updated(schema.budgets, budget_id, raised, row=row))

    async def reset_budget(self, budget_id: int, row: AuditRow) -> Budget:
        """Restart a budget's count at 0, and write `row` to the audit log. Running requests count
        as before.

        Raises DoesNotExist.
        """
        again = {"epoch": schema.budgets.c.epoch + 1, "begun_ms": self._now_ms()}
        return _budget(await self._updated(schema.budgets, budget_id, again, row=row))

    async def list_budgets(self, team_id: int | None = None) -> list[Budget]:
        """All budgets, or one team's, by id."""
        return await self._listed(schema.budgets, _budget, team_id)

    @uncancelled
    async def delete_budget(self, budget_id: int, row: AuditRow | None = None) -> None:
        """Delete a budget; `row`: see `_recorded`. Raises DoesNotExist."""
        async with self._change("") as connection:
            await _recorded(connection, schema.budgets, budget_id, row, is_going=True)
            await _delete(connection, schema.budgets, budget_id)

    # ── deployments ──

    def follow_uses(self, take: Callable[[Mapping[str, str]], None]) -> None:
        """Call `take` now and after each reload, with what the acts of operators say, the oldest first:
        `drained`, `disabled` or empty (enabled again), by the name of a deployment or of replicas.
        """
        self._on_uses = take
        take(self._uses)

    @uncancelled
    async def set_use(self, row: AuditRow) -> None:
        """Change the use of a deployment by writing `row` to the audit log."""
        async with self._change("") as connection:
            await connection.execute(inserted(row))

    # ── changes ──

    @uncancelled
    async def _listed(self, table: sa.Table, make: Callable[[Any], _T], team_id: int | None = None) -> list[_T]:
        async with self.database.reading() as connection:
            return [row async for row in _read(connection, table, make, team_id)]

    @uncancelled
    async def _updated(
        self, table: sa.Table, row_id: int, changes: dict[str, Any], taken: str = "", row: AuditRow | None = None
    ) -> Any:
        """The row after `changes`. For `taken` see `_change`, for `row` `_recorded`.

        Raises Invalid, AlreadyExists, DoesNotExist.
        """
        check(changes)
        async with self._change(taken) as connection:
            before = await _row(connection, table, row_id) if row is not None else None
            if changes:
                await connection.execute(sa.update(table).where(table.c.id == row_id).values(changes))
            return await _recorded(connection, table, row_id, row, before)

    def _new_budget(self, window: WindowKind, limit: int, is_hard: bool = True, **fields: Any) -> dict[str, Any]:
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
        """A transaction that increments the version; afterwards reloads this snapshot, and calls
        `notify`.

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

    def _new_team(self, name: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        defaults = {"is_active": True, "is_semantic_enabled": True, "is_store_enabled": True}
        return {**defaults, **fields, "name": name, "created_at_s": self._clock()}

    def _new_key(self, team_id: int, name: str, plaintext: str, fields: Mapping[str, Any]) -> dict[str, Any]:
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
    """Retrieve the error of a look that was not awaited, so that asyncio does not log it."""
    if not look.cancelled():
        look.exception()


async def _read(
    connection: AsyncConnection, table: sa.Table, make: Callable[[Any], _T], team_id: int | None = None
) -> AsyncIterator[_T]:
    """The table's rows by id. Yields to the event loop every `_ROWS_AT_ONCE` rows."""
    statement = _selected(table).order_by(*table.primary_key)
    if team_id is not None:
        statement = statement.where(table.c.team_id == team_id)
    result = await connection.stream(statement)
    async for rows in result.partitions(_ROWS_AT_ONCE):
        for row in rows:
            yield make(row)


def _selected(table: sa.Table) -> sa.Select[Any]:
    """The table's columns; of budgets, also the time zone of their team."""
    if table is not schema.budgets:
        return sa.select(table)
    return sa.select(table, schema.teams.c.time_zone).join(schema.teams)


async def _row(connection: AsyncConnection, table: sa.Table, row_id: int) -> Any:
    row = (await connection.execute(_selected(table).where(table.c.id == row_id))).first()
    if row is None:
        raise DoesNotExist(f"there is no {table.name[:-1]} {row_id}")
    return row


async def _recorded(
    connection: AsyncConnection,
    table: sa.Table,
    row_id: int,
    audit: AuditRow | None,
    before: Any = None,
    *,
    is_going: bool = False,
) -> Any:
    """The table's row as it is now. `audit` goes to the audit log in the same transaction, with what changed
    since `before`; without an `entry` it gets the row's name. `is_going`: the row is deleted next.

    Raises DoesNotExist.
    """
    now = await _row(connection, table, row_id)
    if audit is not None:
        named = getattr(now, "name", "")
        entry = audit.entry or f"{table.name[:-1]} {row_id}" + (f": {named}" if named else "")
        team_id = row_id if table is schema.teams else now.team_id
        audit = msgspec.structs.replace(audit, entry=entry, team_id=team_id)
        states = (now, None) if is_going else (before, now)
        await connection.execute(inserted(audit.of_change(*states)))
    return now


async def _insert(connection: AsyncConnection, table: sa.Table, values: Mapping[str, Any]) -> int:
    return int((await connection.execute(sa.insert(table).values(values).returning(table.c.id))).scalar_one())


async def _delete(connection: AsyncConnection, table: sa.Table, row_id: int) -> None:
    if (await connection.execute(sa.delete(table).where(table.c.id == row_id))).rowcount == 0:
        raise DoesNotExist(f"there is no {table.name[:-1]} {row_id}")


def _check_free(name: str | None, fields: Mapping[str, Any]) -> None:
    """Refuse the name of the key of a team's people for another key, which would stand in its way. Raises Invalid."""
    if name == PEOPLE and fields.get("owner") != ALL_PEOPLE:
        raise Invalid("name", f"the gateway makes the key {PEOPLE!r} itself: choose another name")


def _team(row: Any) -> Team:
    return msgspec.convert(row, Team, from_attributes=True)


def _key(row: Any) -> Key:
    return msgspec.convert(row, Key, from_attributes=True, builtin_types=(bytes,))


def _person(row: Any) -> Person:
    return Person(*row)


def _as_it_is(row: Any) -> Any:
    return row


def _budget(row: Any) -> Budget:
    return Budget(
        window=WindowKind.ROLLING if row.rolling_s else WindowKind(row.window_kind),
        limit=row.limit_microusd,
        value=row.whose[1:] if row.whose.startswith("=") else None,
        unit=Unit(row.unit),
        overdraft=Overdraft(row.overdraft),
        **{name: getattr(row, name) for name in _AS_STORED},
    )


_AS_STORED = (
    "id",
    "team_id",
    "is_hard",
    "axis",
    "rolling_s",
    "raised_by",
    "raised_until_ms",
    "epoch",
    "begun_ms",
    "time_zone",
)
_EACH = "*"
