"""Teams and keys: read and changed, by the API and by the dashboard's forms.

The docstrings of operations are descriptions in the OpenAPI document. No HTML.
"""

from collections import defaultdict
from collections.abc import Sequence

from gateway.accounts import Key, Team
from gateway.admin import budgets, models
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id


async def list_teams(parts: WorkerParts) -> models.TeamsOut:
    """All teams with their keys and budgets."""
    return {"teams": await teams(parts), "holds": budgets.holds(parts)}


async def create_team(parts: WorkerParts, body: models.NewTeamIn) -> models.TeamOut:
    """A new team, also with its first budget. 409 where the name is taken."""
    fields = body.given()
    if body.budget is not None:
        fields["budget"] = budgets.fields_of(body.budget)
    return await get_team(parts, (await parts.accounts.create_team(**fields)).id)


async def get_team(parts: WorkerParts, team_id: Id) -> models.TeamOut:
    """One team with its keys and its budgets as they stand."""
    (team,) = await _filled(parts, [await parts.accounts.team(team_id)], team_id)
    room = await parts.stored_responses.room(team_id)
    counts = {name: held.count for name, held in room.items()}
    stored = models.StoredOut(**counts, size_bytes=sum(held.bytes for held in room.values()))
    return team.model_copy(update={"stored": stored})


async def update_team(parts: WorkerParts, team_id: Id, body: models.TeamPatch) -> models.TeamOut:
    """Changes the fields that are sent. An inactive team's keys stop working."""
    await parts.accounts.update_team(team_id, **body.given())
    return await get_team(parts, team_id)


async def delete_team(parts: WorkerParts, team_id: Id) -> None:
    """Deletes a team with its keys and budgets; its ledger rows stay."""
    await parts.accounts.delete_team(team_id)


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


async def create_key(parts: WorkerParts, team_id: Id, body: models.KeyIn) -> models.NewKeyOut:
    """A new key. The answer is the only place where its plaintext is ever shown."""
    fields = body.given()
    return await parts.accounts.create_key(team_id, fields.pop("name"), **fields)


async def update_key(parts: WorkerParts, key_id: Id, body: models.KeyPatch) -> models.KeyOut:
    """Changes the fields that are sent."""
    return await parts.accounts.update_key(key_id, **body.given())


async def revoke_key(parts: WorkerParts, key_id: Id) -> models.KeyOut:
    """The key stops working at once; its row stays for the ledger's sake."""
    return await parts.accounts.revoke_key(key_id)
