"""The values of the admin plane, one function for each thing that a page and the API both show.

The docstrings of operations are descriptions in the OpenAPI document. No HTML. Invariant: nothing
here changes anything. While Redis is away, values from it are None where the rest is still useful;
where they are the whole answer, the function raises.
"""

import re
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from pydantic import Field
from redis.exceptions import RedisError

from gateway import accounts
from gateway.accounts.ledger import Group, LedgerTotal, flat_row
from gateway.accounts.rollups import OTHER
from gateway.admin import budgets, models
from gateway.admin.guard import Acting
from gateway.admin.parts import WorkerParts
from gateway.admin.problems import problems
from gateway.admin.queries import (
    ROUTES_CURSOR,
    Id,
    Label,
    LedgerCursor,
    LedgerGroups,
    LedgerRows,
    Limit,
    Routes,
    RoutesAfter,
    RoutesCursor,
    Whole,
)
from gateway.batches.batches import Batch
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.deployments.verifiers import assigned
from gateway.journey.record import FIELDS, Record, flat, stages_of
from gateway.telemetry.buckets import KINDS, kind_of
from gateway.telemetry.stats import Page
from gateway.telemetry.summary import RequestTally, StatsWindow
from gateway.wire.plain import OUTPUT_TOKENS_MAX
from gateway.wire.requests import OUTPUT_TOKENS_EXPECTED
from policies import Demand

_LEDGER_PAGE = 500
SUMS_PAGE = 2_000
_PROMPT_TOKENS_SHOWN = 500  # the prompt of predictions
_SHOWN = Demand(_PROMPT_TOKENS_SHOWN, 0, 0)
_ERRORS_SHOWN = 3
_Key = TypeVar("_Key", int, str)
_T = TypeVar("_T")
_Tally = TypeVar("_Tally", bound=models.TallyOut)
# a short question, without `max_tokens`, in a body of 100 bytes
_SHORT = Demand(
    prompt_tokens=10,
    prompt_tokens_max=100,
    output_tokens_max=OUTPUT_TOKENS_MAX,
    output_tokens_expected=OUTPUT_TOKENS_EXPECTED,
    is_output_asked=False,
)


# -- history


async def stats(
    parts: WorkerParts, window: StatsWindow = StatsWindow.DAY, team: Id | None = None, model: Label | None = None
) -> models.StatsOut:
    """Hit rate by kind, tokens, money and time saved, latency: in total, by team, model and surface, and over time."""
    summary = await parts.stats.query(window, team_id=team, model=model)
    names = {0: ""} | {team.id: team.name for team in await parts.accounts.list_teams()}
    return models.StatsOut.of(
        summary,
        total=_tally(models.TallyOut, summary.total),
        by_team=[
            _tally(models.TeamTally, tally, team_id=team_id, team=names.get(team_id, "deleted"))
            for team_id, tally in _ranked(summary.by_team)
        ],
        by_model=[_tally(models.ModelTally, tally, model=name) for name, tally in _ranked(summary.by_model)],
        by_surface=[_tally(models.SurfaceTally, tally, surface=name) for name, tally in _ranked(summary.by_surface)],
        by_deployment=[
            models.DeploymentTallyOut.of(tally, deployment=name)
            for name, tally in sorted(summary.by_deployment.items())
        ],
    )


def _ranked(tallies: Mapping[_Key, RequestTally]) -> list[tuple[_Key, RequestTally]]:
    """The sums of each part of the traffic, by descending requests."""
    return sorted(tallies.items(), key=lambda labelled: -labelled[1].requests)


def _tally(kind: type[_Tally], tally: RequestTally, **labels: int | str) -> _Tally:
    return kind.of(tally, by_kind={name: tally.by_kind.get(name, 0) for name in KINDS}, **labels)


async def or_none(reading: Awaitable[_T]) -> _T | None:
    """The result of `reading`; None while Redis is away."""
    try:
        return await reading
    except RedisError:
        return None


async def routes(
    parts: WorkerParts,
    operator: Acting,
    where: Routes,
    cursor: RoutesCursor = "",
    after: RoutesAfter = "",
    limit: Limit = 50,
) -> models.RoutesOut:
    """The latest requests, newest first, each with the winner, why, each rejection and each attempt."""
    _check_cursor(cursor)
    _check_cursor(after, "after")
    page = await parts.stats.routes(where.matches, before=cursor, after=after, limit=limit)
    return await _routes(parts, operator, page)


async def near_misses(
    parts: WorkerParts, operator: Acting, where: Routes, cursor: RoutesCursor = "", limit: Limit = 50
) -> models.RoutesOut:
    """The latest requests that came close to a cached answer (similarity 0.6 or more) and did not get it, with the reason."""
    _check_cursor(cursor)
    return await _routes(parts, operator, await parts.stats.near_misses(where.matches, before=cursor, limit=limit))


def _check_cursor(cursor: str, name: str = "cursor") -> None:
    if not re.search(ROUTES_CURSOR, cursor):
        raise accounts.Invalid(name, "expected one that an earlier page gave")


_DEFAULTS = {name: field.default for name, field in FIELDS.items() if field.default is not msgspec.NODEFAULT}


async def _routes(parts: WorkerParts, operator: Acting, page: Page) -> models.RoutesOut:
    """The records, each with its kind; with their texts for who may read them."""
    texts = any(record.cache.nearest for record in page.records)
    hidden = {} if texts and await parts.shows_texts(operator, "requests") else {"nearest": ""}
    routes = [
        {
            **_DEFAULTS,
            **flat(record),
            **hidden,
            "kind": kind_of(record.cache.source, record.ended.status, record.ended.error),
            "stages": msgspec.to_builtins(stages_of(record)),
        }
        for record in page.records
    ]
    return {"routes": routes, "cursor": page.cursor, "newest": page.newest}


async def ledger(
    parts: WorkerParts, where: LedgerRows, cursor: LedgerCursor | None = None, limit: Limit = 100
) -> models.LedgerOut:
    """One row per generation, also those that cost nothing, newest first."""
    page = await parts.ledger.rows(where, limit, cursor)
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    keys = {key.id: key.name for key in await parts.accounts.list_keys()}
    rows = [{**flat_row(row), "team": teams.get(row.team_id), "key": keys.get(row.key_id)} for row in page.rows]
    return {"rows": rows, "cursor": page.cursor}


async def ledger_sums(
    parts: WorkerParts, groups: LedgerGroups, limit: Annotated[int, Field(ge=1, le=10_000), Whole] = 1_000
) -> models.LedgerSumsOut:
    """Sums of whole UTC days, with hits, by team, key, user, model, deployment, tag, region, session and day, those
    that cost most first. Users, tags and regions go with teams and days alone; the values of one tag are those of
    `tag`, without which `by=tag` gives their names; sessions are those of the last 8 days."""
    totals, shown = await parts.ledger.totals(*groups, limit + 1), await _sum_rows(parts)
    return {"sums": list(map(shown, totals[:limit])), "has_more": len(totals) > limit}


async def ledger_sum_rows(parts: WorkerParts, groups: LedgerGroups) -> AsyncIterator[dict[str, Any]]:
    """All sums that `ledger_sums` has the dearest of, sorted by their groups. Raises Invalid."""
    await parts.ledger.totals(*groups, 1)  # what cannot be summed is refused before the file begins
    shown = await _sum_rows(parts)
    return (shown(total) async for total in parts.ledger.each_total(*groups, SUMS_PAGE))


async def _sum_rows(parts: WorkerParts) -> Callable[[LedgerTotal], dict[str, Any]]:
    """A function from a sum to the values of a `LedgerSumOut`."""
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    keys = {key.id: key for key in await parts.accounts.list_keys()}

    def shown(value: str | None) -> str | None:
        return value if value is None else "" if value == OTHER else value.removeprefix("=")

    def row_of(total: LedgerTotal) -> dict[str, Any]:
        key = None if total.key_id is None else keys.get(total.key_id)
        team_id = key.team_id if key is not None else total.team_id
        return {
            **msgspec.structs.asdict(total),
            "team_id": team_id,
            "team": None if team_id is None else teams.get(team_id),
            "key": key and key.name,
            "model": total.alias,
            "user": shown(total.user),
            "tag": shown(total.tag),
            "is_other": OTHER in (total.user, total.tag),
        }

    return row_of


async def ledger_rows(parts: WorkerParts, where: LedgerRows) -> AsyncIterator[dict[str, Any]]:
    """All matching rows of the ledger, newest first, one page in memory at a time."""
    cursor: str | None = None
    while True:
        page = await ledger(parts, where, cursor, _LEDGER_PAGE)
        for row in page["rows"]:
            yield row
        if (cursor := page["cursor"]) is None:
            return


# -- what filters offer


Choices = Mapping[str, Mapping[Any, str]]
"""The `teams`, `models` and `deployments` that a filter offers, each with its label; those that are no longer configured are last."""


async def _choices(
    parts: WorkerParts,
    teams: Mapping[int, str],
    aliases: Iterable[str],
    deployments: Iterable[str],
    among: Collection[int] | None = None,
) -> Choices:
    """The current names, and those of the past in `teams`, `aliases` and `deployments`; with `among`, the names of
    these teams alone.
    """
    current = {team.id: team.name for team in await parts.accounts.list_teams() if among is None or team.id in among}
    gone = {id: f"{name or f'team {id}'} (deleted)" for id, name in sorted(teams.items()) if id not in current}
    return {
        "teams": current | {id: label for id, label in gone.items() if id},
        "models": _with_retired(parts.settings.names, aliases),
        "deployments": _with_retired([deployment.name for deployment in parts.deployments()], deployments),
    }


def _with_retired(current: Iterable[str], seen: Iterable[str]) -> dict[str, str]:
    labels = {name: name for name in current}
    return labels | {name: f"{name} (retired)" for name in sorted(set(seen)) if name and name not in labels}


async def ledger_choices(parts: WorkerParts, among: Collection[int] | None = None) -> Choices:
    """What rows of the ledger, or those of the teams `among`, can be filtered by."""
    totals = await parts.ledger.totals([Group.TEAM, Group.ALIAS, Group.DEPLOYMENT])
    totals = tuple([total for total in totals if among is None or total.team_id in among])
    aliases, deployments = {total.alias or "" for total in totals}, {total.deployment or "" for total in totals}
    return await _choices(parts, {total.team_id or 0: "" for total in totals}, aliases, deployments, among)


async def route_choices(parts: WorkerParts, among: Collection[int] | None = None) -> Choices:
    """What the latest requests, or those of the teams `among`, can be filtered by. Raises RedisError."""
    teams, aliases, deployments = dict[int, str](), set[str](), set[str]()

    def note(record: Record) -> bool:
        if among is not None and record.request.team_id not in among:
            return False
        teams.setdefault(record.request.team_id, record.request.team)
        aliases.add(record.request.alias)
        deployments.update([attempt.name for attempt in record.answer.attempts])
        return False

    await parts.stats.routes(note)
    return await _choices(parts, teams, aliases, deployments, among)


# -- the machine


async def batches(parts: WorkerParts, cursor: Label = "", limit: Limit = 100) -> models.BatchesOut:
    """The batches of all teams with their progress, newest first."""
    page = await parts.batches.page(None, cursor, limit)
    rows = await batch_rows(parts, page[:limit])
    return {"batches": rows, "cursor": rows[-1]["id"] if len(page) > limit else None}


async def batch_rows(parts: WorkerParts, shown: Iterable[Batch]) -> list[Any]:
    """Batches, each with the name of its team."""
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    return [{**msgspec.structs.asdict(batch), "team": teams.get(batch.team_id, "")} for batch in shown]


async def hosts(parts: WorkerParts) -> models.HostsOut:
    """The hosts of this Redis: their workers, versions and digests of their configurations, and since when they are silent."""
    return {"hosts": await parts.hosts.all()}


async def status(parts: WorkerParts) -> models.StatusOut:
    """Every part's health, and what deserves a look."""
    healths, live = parts.healths(), await budgets.budgets(parts, is_paced=False)
    named = [("mask", team) for team in parts.settings.mask.teams]
    named += [(f"guards.{name}", team) for name, guard in parts.settings.guards.items() for team in guard.teams]
    summary = await or_none(parts.stats.query(StatsWindow.HOUR))
    names = {team.id: team.name for team in await parts.accounts.list_teams()}
    return models.StatusOut(
        version=parts.version,
        uptime_s=max(0.0, parts.clock() - parts.started_at_s),
        parts=list(healths),
        problems=problems(
            parts=healths,
            deployments=parts.deployments(),
            budgets=live,
            team_names=names,
            last_hour=summary,
            truths=parts.truth.live,
            unverified=[verifier.line for verifier in assigned(parts.settings) if not verifier.deployment],
            refused=parts.configuration.refused,
            hosts=await or_none(parts.hosts.all()) or (),
            named=named,
        ),
    )


async def overview(parts: WorkerParts, window: StatsWindow = StatsWindow.DAY) -> models.OverviewOut:
    """What the dashboard's first page shows."""
    return models.OverviewOut(status=await status(parts), stats=await or_none(stats(parts, window)))


async def deployments(parts: WorkerParts) -> models.DeploymentsOut:
    """Every deployment: health, estimates, queue."""
    summary, errors = await or_none(parts.stats.query(StatsWindow.DAY)), await _last_errors(parts)
    shown = []
    for deployment in parts.deployments():
        deployment = deployment.model_copy(update={"last_errors": errors.get(deployment.name, [])})
        if summary is not None and (tally := summary.by_deployment.get(deployment.name)):
            deployment.last_24h = models.DeploymentTallyOut.of(tally, deployment=deployment.name)
        shown.append(deployment)
    return {"deployments": shown}


async def _last_errors(parts: WorkerParts) -> dict[str, list[models.DeploymentErrorOut]]:
    """The last failed attempts among the latest requests of all hosts, by deployment."""
    errors: dict[str, list[models.DeploymentErrorOut]] = {}

    def note(record: Record) -> bool:
        for attempt in record.answer.attempts:
            if attempt.verdict in ("error", "denied") and len(errors.setdefault(attempt.name, [])) < _ERRORS_SHOWN:
                error = models.DeploymentErrorOut(
                    at_s=record.request.at_s, request_id=record.request.id, message=attempt.outcome
                )
                errors[attempt.name].append(error)
        return False

    await or_none(parts.stats.routes(note))
    return errors


def deployments_of(fleet: Fleet) -> list[models.DeploymentOut]:
    """All deployments as this worker sees them now, without their last 24 hours."""
    return [
        deployment_of(alias, deployment)
        for alias in fleet.aliases.values()
        for deployment in alias.deployments.values()
    ]


def deployment_of(alias: Alias, deployment: Deployment) -> models.DeploymentOut:
    """One deployment as this worker sees it now."""
    candidate = deployment.candidate(_SHOWN)
    load = deployment.backend.load(_PROMPT_TOKENS_SHOWN)
    output_tokens = alias.output_max(deployment, _SHORT)
    return models.DeploymentOut.of(
        deployment,
        candidate,
        load,
        deployment.price,
        alias=alias.name,
        backend=deployment.settings.backend,
        policy=alias.settings.policy,
        reason=deployment.trouble,
        denial=deployment.health.trouble[1],
        waiting=load.waiting + deployment.slots.waiting,
        capabilities=tuple(sorted(candidate.capabilities)),
        hold_microusd=deployment.price.cost_max(_SHORT.prompt_tokens_max, output_tokens),
        hold_output_tokens=output_tokens,
        context_tokens_max=candidate.context_tokens_max,
        output_tokens_max=candidate.output_tokens_max,
        ttft_timeout_ms=1000.0 * deployment.ttft_timeout_s(_PROMPT_TOKENS_SHOWN, is_alone=False),
        recent_calls=deployment.estimate.figures().weight,
    )
