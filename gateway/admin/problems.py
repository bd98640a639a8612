"""Problems that an admin should look at, in words, the urgent ones first.

A pure function of measurements. No HTTP.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from urllib.parse import quote

from gateway.admin.format import amount, in_units, window
from gateway.admin.models import BudgetOut, DeploymentOut, Problem
from gateway.telemetry.hosts import Host
from gateway.telemetry.measured_error import LiveError
from gateway.telemetry.parts import GatewayPart, PartHealth
from gateway.telemetry.summary import Summary

_FAILED_SHARE_MAX = 0.05
_REFUSED_SHARE_MAX = 0.5
_REQUESTS_MIN = 20
_BUDGET_SHARE_NEAR = 0.9
_DEPLOYMENTS, _TEAMS = "/admin/deployments", "/admin/teams"


def problems(
    parts: Sequence[GatewayPart],
    deployments: Sequence[DeploymentOut],
    budgets: Sequence[BudgetOut],
    team_names: Mapping[int, str],
    last_hour: Summary | None,
    truths: Sequence[LiveError] = (),
    unverified: Sequence[str] = (),
    refused: str = "",
    hosts: Sequence[Host] = (),
    named: Sequence[tuple[str, str]] = (),
) -> list[Problem]:
    """All current problems; empty when all is well.

    `unverified` says of aliases that no deployment can verify their answers; `refused`, what is wrong
    with the latest configuration; `named`, the sections that mask and guard with their teams.
    """
    current = [
        *([Problem(f"The configuration was not changed: {refused}", _DEPLOYMENTS, True)] if refused else ()),
        *_of_parts(parts, {view.name for view in deployments}),
        *_of_deployments(deployments, {part.name for part in parts if part.health is PartHealth.STARTING}),
        *_of_budgets(budgets, team_names),
        *_of_traffic(parts, last_hour),
        *_of_refusals(team_names, last_hour),
        *_of_truth(truths),
        *(Problem(line, _DEPLOYMENTS) for line in unverified),
        *_of_hosts(hosts),
        *(
            Problem(f"`{section}` names the team {team}, and there is none: it may have another name", _TEAMS, True)
            for section, team in named
            if team not in {*team_names.values(), "*"}
        ),
    ]
    current = [replace(problem, message=in_units(problem.message)) for problem in current]
    return sorted(current, key=lambda problem: not problem.is_urgent)


def _of_parts(parts: Sequence[GatewayPart], deployment_names: Set[str]) -> list[Problem]:
    return [
        Problem(
            f"{part.name} is {'down' if part.health is PartHealth.DOWN else 'starting'}"
            + (f": {part.detail}" if part.detail else ""),
            _DEPLOYMENTS,
            part.health is PartHealth.DOWN,
        )
        for part in parts
        if part.health is not PartHealth.OK and part.name not in deployment_names
    ]


def _of_hosts(hosts: Sequence[Host]) -> Iterator[Problem]:
    """Hosts that serve another version or configuration than this one; the page shows which."""
    for here in (host for host in hosts if host.is_here):
        for host in (host for host in hosts if not host.is_away):
            for what, its, ours in (
                ("version", host.versions, here.versions),
                ("configuration", host.configs, here.configs),
            ):
                if not set(its) & set(ours):
                    message = f"The host {host.name} has another {what} ({', '.join(its)}) than this one"
                    yield Problem(f"{message} ({', '.join(ours)})", f"{_DEPLOYMENTS}#hosts")


def _of_deployments(deployments: Sequence[DeploymentOut], starting: Set[str]) -> Iterator[Problem]:
    for alias in dict.fromkeys(view.alias for view in deployments):
        views = [view for view in deployments if view.alias == alias]
        away = [view for view in views if view.is_available is False]
        href = f"{_DEPLOYMENTS}?model={quote(alias, safe='')}"
        reasons = "; ".join(f"{view.name}: {view.reason}" for view in away)
        if len(away) == len(views):
            is_starting = any(view.name in starting for view in away)
            message = (
                f"{alias} can't be answered yet: {reasons}" if is_starting else f"Nobody can answer {alias}: {reasons}"
            )
            yield Problem(message, href, not is_starting)
        elif away:
            yield Problem(f"{alias} does without some of its deployments: {reasons}", href)


def _of_budgets(budgets: Sequence[BudgetOut], team_names: Mapping[int, str]) -> Iterator[Problem]:
    for budget in budgets:
        if budget.share is None or budget.share < _BUDGET_SHARE_NEAR:
            continue
        team = team_names.get(budget.team_id, f"Team {budget.team_id}")
        name = f"budget of {amount(budget.limit_now, budget.unit)} {window(budget.window, budget.rolling_s)}"
        if budget.axis != "team":
            whose = budget.value if budget.value is not None else budget.fullest
            name += f" on the {budget.axis} {whose or '(none given)'}"
        spent = f"{amount(budget.spent or 0, budget.unit)} spent"
        if budget.share < 1:
            message = f"{team} has used {budget.share:.0%} of its {name} ({spent})"
        elif budget.is_hard:
            message = f"{team} has used up its {name} ({spent}): only cached answers are served"
        else:
            message = f"{team} is over its soft {name} ({spent})"
        yield Problem(message, f"/admin/teams/{budget.team_id}", budget.share >= 1 and budget.is_hard)


def _of_truth(truths: Sequence[LiveError]) -> list[Problem]:
    """Bounds that have tightened themselves after too many wrong semantic hits."""
    return [
        Problem(
            f"At least {error.measured.low:.1%} of {error.team}'s requests for {error.alias} were answered wrongly by "
            f"meaning in the last day; the bound is {error.error_max:.2%}: it has tightened itself",
            "/admin/quality#certificate",
            is_urgent=True,
        )
        for error in truths
        if error.strictness < 1.0
    ]


def _of_traffic(parts: Sequence[GatewayPart], last_hour: Summary | None) -> list[Problem]:
    """Too many failed requests.

    Not while a part is starting: it causes failures, and is listed itself.
    """
    if last_hour is None or last_hour.total.requests < _REQUESTS_MIN:
        return []
    if any(part.health is PartHealth.STARTING for part in parts):
        return []
    failed = last_hour.total.by_kind.get("failed", 0)
    share = failed / last_hour.total.requests
    if share <= _FAILED_SHARE_MAX:
        return []
    message = f"{share:.0%} of the last hour's requests failed ({failed:,} of {last_hour.total.requests:,})"
    return [Problem(message, "/admin/requests?outcome=failed", is_urgent=True)]


def _of_refusals(team_names: Mapping[int, str], last_hour: Summary | None) -> Iterator[Problem]:
    """Teams that had most of their requests refused.

    This finds a budget below the price of one answer, which is never used up.
    """
    for team_id, tally in last_hour.by_team.items() if last_hour is not None else ():
        refused = tally.by_kind.get("refused", 0)
        if team_id in team_names and tally.requests >= _REQUESTS_MIN and refused > _REFUSED_SHARE_MAX * tally.requests:
            whose = f"{team_names[team_id]}'s {tally.requests:,} requests of the last hour"
            message, href = f"{refused:,} of {whose} were refused", f"/admin/requests?team_id={team_id}&outcome=refused"
            yield Problem(message, href)
