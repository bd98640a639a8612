"""Teams, keys, people and sessions: read and changed, by the API and by the dashboard's forms.

The docstrings of operations are descriptions in the OpenAPI document. No HTML.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict

from msgspec import structs

from gateway.access.people import ADMIN_KEY
from gateway.accounts import DoesNotExist, Invalid, Key, Team, audit
from gateway.accounts.accounts import ALL_PEOPLE
from gateway.accounts.ledger import Group, LedgerFilter
from gateway.admin import budgets, models
from gateway.admin.guard import Acting, Principal
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id
from gateway.settings import Role
from policies.counters import value_of


async def list_teams(parts: WorkerParts) -> models.TeamsOut:
    """All teams with their keys and budgets."""
    return {"teams": await teams(parts), "holds": budgets.holds(parts)}


async def create_team(parts: WorkerParts, body: models.NewTeamIn, operator: Acting) -> models.TeamOut:
    """A new team, also with its first budget. 409 where the name is taken."""
    fields = body.given()
    if body.budget is not None:
        fields["budget"] = budgets.fields_of(body.budget)
    row = parts.audit_row(audit.TEAM_CREATED, "", operator)
    return await get_team(parts, (await parts.accounts.create_team(**fields, row=row)).id)


async def get_team(parts: WorkerParts, team_id: Id) -> models.TeamOut:
    """One team with its keys and its budgets as they stand."""
    (team,) = await _filled(parts, [await parts.accounts.team(team_id)], team_id)
    room = await parts.stored_responses.room(team_id)
    counts = {name: held.count for name, held in room.items()}
    stored = models.StoredOut(**counts, size_bytes=sum(held.bytes for held in room.values()))
    return team.model_copy(update={"stored": stored})


async def update_team(parts: WorkerParts, team_id: Id, body: models.TeamPatch, operator: Acting) -> models.TeamOut:
    """Changes the fields that are sent. An inactive team's keys stop working."""
    await parts.accounts.update_team(team_id, **body.given(), row=parts.audit_row(audit.TEAM_CHANGED, "", operator))
    return await get_team(parts, team_id)


async def delete_team(parts: WorkerParts, team_id: Id, operator: Acting) -> None:
    """Deletes a team with its keys and budgets; its ledger rows stay."""
    await parts.accounts.delete_team(team_id, parts.audit_row(audit.TEAM_DELETED, "", operator))


async def teams(parts: WorkerParts, name: str = "", after: int = 0, limit: int | None = None) -> list[models.TeamOut]:
    """Teams with their keys and budgets, by id: up to `limit` after the id `after`, whose names contain `name`."""
    part = name.lower()
    chosen = [team for team in await parts.accounts.list_teams() if team.id > after and part in team.name.lower()]
    return await _filled(parts, chosen[:limit])


async def _filled(parts: WorkerParts, chosen: Sequence[Team], team_id: int | None = None) -> list[models.TeamOut]:
    """The teams in `chosen` with their keys and budgets; `team_id` reads those of a single team."""
    keys, limits = defaultdict[int, list[Key]](list), defaultdict[int, list[models.BudgetOut]](list)
    for key in await parts.accounts.list_keys(team_id):
        keys[key.team_id].append(key)
    for budget in await budgets.budgets(parts, team_id, {team.id for team in chosen}):
        limits[budget.team_id].append(budget)
    return [models.TeamOut.of(team, keys=keys[team.id], budgets=limits[team.id]) for team in chosen]


# -- keys


async def list_keys(parts: WorkerParts) -> models.KeysOut:
    """All keys. Only the first characters of a key are known."""
    return {"keys": await parts.accounts.list_keys()}


async def list_keys_of_team(parts: WorkerParts, team_id: Id) -> models.KeysOut:
    """One team's keys."""
    return {"keys": (await get_team(parts, team_id)).keys}


async def create_key(parts: WorkerParts, team_id: Id, body: models.KeyIn, operator: Acting) -> models.NewKeyOut:
    """A new key; a member's is the member's own. The answer is the only place where its plaintext is ever shown."""
    return await _create_key(parts, team_id, body, operator, "" if _leads(operator, team_id) else operator.actor)


async def create_own_key(parts: WorkerParts, team_id: Id, body: models.KeyIn, operator: Acting) -> models.NewKeyOut:
    """A new key of whoever makes it."""
    return await _create_key(parts, team_id, body, operator, operator.actor)


async def _create_key(
    parts: WorkerParts, team_id: int, body: models.KeyIn, operator: Principal, owner: str
) -> models.NewKeyOut:
    fields, row = body.given(), parts.audit_row(audit.KEY_CREATED, "", operator)
    fields |= {"owner": owner, "is_bound": not _leads(operator, team_id)}
    return await parts.accounts.create_key(team_id, fields.pop("name"), row=row, **fields)


def _leads(operator: Principal, team_id: int) -> bool:
    return operator.is_admin or team_id in operator.roles.get(Role.TEAM_ADMIN, ())


async def update_key(parts: WorkerParts, key_id: Id, body: models.KeyPatch, operator: Acting) -> models.KeyOut:
    """Changes the fields that are sent."""
    return await parts.accounts.update_key(key_id, **body.given(), row=parts.audit_row(audit.KEY_CHANGED, "", operator))


async def rotate_key(parts: WorkerParts, key_id: Id, body: models.RotateIn, operator: Acting) -> models.NewKeyOut:
    """Gives a key another secret, shown in this answer alone; the one that it had works for `overlap_s` seconds more."""
    row = parts.audit_row(audit.KEY_CHANGED, "", operator)
    return await parts.accounts.rotate_key(key_id, body.overlap_s, row=row)


async def revoke_key(parts: WorkerParts, key_id: Id, operator: Acting) -> models.KeyOut:
    """The key stops working at once; its row stays for the ledger's sake."""
    return await parts.accounts.revoke_key(key_id, parts.audit_row(audit.KEY_CHANGED, "", operator))


async def me(parts: WorkerParts, operator: Acting) -> models.MeOut:
    """Who the caller is, the roles and their teams, and the caller's own keys with what each spent in 30 days."""
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    ids = sorted(frozenset().union(*operator.roles.values()) & teams.keys())
    keys = []
    for team_id in ids:
        since = LedgerFilter(team_id=team_id, from_ms=int((parts.clock() - _MONTH_S) * 1000))
        sums = {total.key_id: total for total in await parts.ledger.totals([Group.KEY], since)}
        for key in await parts.accounts.list_keys(team_id):
            if key.owner and key.owner == operator.actor:
                total = sums.get(key.id)
                cost, requests = (total.cost_microusd, total.requests) if total is not None else (0, 0)
                spent = {"team": teams[team_id], "cost_microusd": cost, "requests": requests}
                keys.append({**asdict(key), **spent})
    roles = {role.value: sorted(teams[id] for id in ids if id in of) for role, of in operator.roles.items()}
    return models.MeOut(actor=operator.actor, roles=roles, teams={id: teams[id] for id in ids}, keys=keys,
                        keys_stop_at_s=parts.accounts.persons.keys_stop_at_s(operator.actor))  # fmt: skip


_MONTH_S = 30 * 86_400


async def keep_keys(parts: WorkerParts, operator: Acting) -> None:
    """Gives the caller's own keys back, which stopped as the caller had not signed in for long."""
    if operator.actor not in parts.accounts.persons.listed:
        raise DoesNotExist("only a person who signs in has keys that stop")
    await parts.accounts.let_in(operator.actor, row=parts.audit_row(audit.KEYS_KEPT, operator.actor, operator))


# -- people and their sessions


async def list_people(parts: WorkerParts) -> models.PeopleOut:
    """Who has signed in or sent a token, and whose keys work until when."""
    keys = Counter(key.owner for key in await parts.accounts.list_keys() if key.is_active)
    persons = parts.accounts.persons
    people = [
        {
            **structs.asdict(person),
            "keys": keys[name],
            "keys_stop_at_s": persons.keys_stop_at_s(name),
            "is_disabled": persons.is_disabled(name),
        }
        for name, person in sorted(persons.listed.items())
    ]
    return {"people": people}


async def disable_person(parts: WorkerParts, body: models.PersonIn, operator: Acting) -> None:
    """Takes no sign-in, key or token of a person any more, on every host; also of one who was never here."""
    if body.name.casefold() in (ADMIN_KEY, ALL_PEOPLE, operator.actor.casefold()):
        raise Invalid("name", "expected another person than yourself, and no key")
    if body.name != value_of(body.name):
        raise Invalid("name", "expected a name in Unicode's form NFKC, as the provider's names are")
    await parts.accounts.disable(body.name, row=parts.audit_row(audit.PERSON_DISABLED, body.name, operator))
    marks = [parts.guard.mark(kind) for kind in ("sign-in", "agent")]
    for actor in {one.actor for one in await parts.guard.sessions.open_ones(marks)}:
        if actor.casefold() == body.name.casefold():
            await parts.guard.sessions.end_all(marks, actor=actor)


async def enable_person(parts: WorkerParts, body: models.PersonIn, operator: Acting) -> None:
    """Lets a person in again, whose keys work from now on as after a sign-in."""
    if body.name not in parts.accounts.persons.listed:
        raise DoesNotExist(f"there is no person {body.name!r}")
    await parts.accounts.let_in(body.name, row=parts.audit_row(audit.PERSON_ENABLED, body.name, operator))


async def list_sessions(parts: WorkerParts) -> models.SessionsOut:
    """Who is signed in at the dashboard, the latest first."""
    return {"sessions": await parts.guard.sessions.open_ones(parts.guard.all_marks)}


async def end_session(parts: WorkerParts, session_id: models.SessionId, operator: Acting) -> None:
    """Ends a session: its cookie opens nothing any more. It is in the audit log."""
    for session in await parts.guard.sessions.open_ones(parts.guard.all_marks):
        if session.id == session_id:
            await parts.audit.add(parts.audit_row(audit.SESSION_ENDED, f"{session.actor}, {session.client}", operator))
            await parts.guard.sessions.end_all(parts.guard.all_marks, digest=session.digest)
            return
    raise DoesNotExist(f"there is no session {session_id}")
