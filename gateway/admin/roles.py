"""Who may do what in the admin plane: one table, for the API, the pages and their forms.

A route's name is the name of its operation and, for pages and forms, the page that it shows; each name
stands in one row of `TABLE`. Who has a role for some teams alone may do an operation if its request
names teams, all of them are among those, and a member's keys are the member's own. Invariant: what the
table does not allow is refused; a route without a row cannot be made.
"""

from typing import Any, NamedTuple

from fastapi import Request

from gateway.admin.guard import Principal
from gateway.admin.queries import id_of
from gateway.settings import Role
from gateway.wire.errors import Forbidden
from gateway.wire.requests import decode_strictly

_ADMIN, _FINANCE, _VIEWER, _AUDITOR, _TEAM_ADMIN, _MEMBER = Role


class Access(NamedTuple):
    """A row: the routes with the names `of` are for roles `everywhere`, and for roles `in_teams` in their own teams."""

    what: str
    of: str
    everywhere: tuple[Role, ...]
    in_teams: tuple[Role, ...] = ()


TABLE = (
    Access("See who one is; the playground; sign in an agent", "me keep_keys playground device", tuple(Role)),
    Access("Overview, health, deployments, models, batches",
           "overview status deployments hosts batches list_models models", (_ADMIN, _VIEWER)),
    Access("Sums, savings and the ledger", "stats savings ledger ledger_sums", (_ADMIN, _FINANCE, _VIEWER), (_TEAM_ADMIN,)),
    Access("Requests, without texts", "routes requests", (_ADMIN, _VIEWER), (_TEAM_ADMIN,)),
    Access("The cache, without texts",
           "cache quality cache_misses cache_verifier certificate near_misses wrong", (_ADMIN, _VIEWER)),
    Access("All teams", "list_teams list_keys list_budgets teams", (_ADMIN, _FINANCE, _VIEWER)),
    Access("One team, its keys and budgets", "get_team list_keys_of_team list_budgets_of_team list_values team",
           (_ADMIN, _FINANCE, _VIEWER), (_TEAM_ADMIN,)),
    Access("Make, rotate and revoke keys; a member, own ones",
           "create_key create_own_key rotate_key revoke_key", (_ADMIN,), (_TEAM_ADMIN, _MEMBER)),
    Access("Change keys", "update_key", (_ADMIN,), (_TEAM_ADMIN,)),
    Access("Budgets; a team admin, those below the team's own",
           "create_budget update_budget raise_budget reset_budget delete_budget", (_ADMIN,), (_TEAM_ADMIN,)),
    Access("Purge answers", "purge", (_ADMIN,), (_TEAM_ADMIN,)),
    Access("Texts: questions, answers, exports, verdicts",
           "answer feedback try_prompt export_answers clear", (_ADMIN,)),
    Access("Teams and their limits", "create_team update_team delete_team", (_ADMIN,)),
    Access("Deployments, batches, models, configuration, certificates, imports",
           "act try_deployment cancel_batch reload set_model revert certify import_answers", (_ADMIN,)),
    Access("People and sessions", "list_people disable_person enable_person list_sessions end_session sessions", (_ADMIN,)),
    Access("The audit log", "audit export_audit", (_ADMIN, _AUDITOR)),
)  # fmt: skip
OF = {name: access for access in TABLE for name in access.of.split()}
"""The row of each name."""


class NotAllowed(Forbidden):
    """403: the roles of this person do not include the operation."""

    code = "role_not_allowed"


class TeamNotNamed(NotAllowed):
    """403: the person may do this for some `teams`, and the request does not name exactly such."""

    def __init__(self, teams: frozenset[int]) -> None:
        named = ", ".join(map(str, sorted(teams)))
        super().__init__(f"Your roles allow this for the teams {named}, and with your own keys: name one, as `team_id`")
        self.teams = teams


def may(principal: Principal, names: str) -> bool:
    """Whether a role of `principal` has what all `names` stand for, if only for some teams."""
    return all(not principal.roles.keys().isdisjoint(OF[name].everywhere + OF[name].in_teams) for name in names.split())


async def allow(request: Request, principal: Principal, names: str) -> None:
    """Refuse what no role of `principal` allows. Raises NotAllowed, TeamNotNamed."""
    for name in names.split():
        access = OF[name]
        if not principal.roles.keys().isdisjoint(access.everywhere):
            continue
        scoped = [role for role in access.in_teams if role in principal.roles]
        if not scoped:
            roles = ", ".join(principal.roles) or "none"
            raise NotAllowed(
                f"This needs one of the roles {', '.join(access.everywhere + access.in_teams)}; yours: {roles}"
            )
        teams, owners = await _named(request)
        if not any(
            teams and teams <= principal.roles[role] and (role is not _MEMBER or owners <= {principal.actor})
            for role in scoped
        ):
            raise TeamNotNamed(frozenset().union(*(principal.roles[role] for role in scoped)))


async def _named(request: Request) -> tuple[set[int], set[str]]:
    """The teams that a request names, as its operation reads them, and the owners of its keys; team -1 for
    what there is not.
    """
    accounts, path = request.app.state.parts.accounts, request.path_params
    of_team = "team" if request.scope["route"].name == "stats" else "team_id"
    sent = [*path.items(), *request.query_params.multi_items(), *await _fields(request)]
    teams = {-1 if (team_id := id_of(value)) is None else team_id for name, value in sent if name == of_team}
    owners = set[str]()
    if "key_id" in path:
        key = next((key for key in await accounts.list_keys() if key.id == id_of(path["key_id"])), None)
        teams.add(key.team_id if key is not None else -1)
        owners.add(key.owner if key is not None else "")
    if "budget_id" in path:
        budgets: dict[int | None, int] = {budget.id: budget.team_id for budget in await accounts.list_budgets()}
        teams.add(budgets.get(id_of(path["budget_id"]), -1))
    return teams, owners


async def _fields(request: Request) -> list[tuple[str, Any]]:
    """The fields of a request's body, read as its operation does, whatever `Content-Type` says."""
    if request.method in ("GET", "HEAD"):
        return []
    if not request.scope["route"].path.startswith("/admin/api/"):
        return list((await request.form()).multi_items())
    try:
        body = decode_strictly(await request.body() or b"{}")
    except ValueError:  # which the operation refuses in its own words
        return [("team_id", -1)]
    return list(body.items()) if isinstance(body, dict) else []
