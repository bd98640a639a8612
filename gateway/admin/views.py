"""The values of the admin plane, one function for each thing that a page and the API both show.

No HTTP and no HTML. Invariant: nothing here changes anything. While Redis is away, values from it
are None where the rest is still useful; where they are the whole answer, the function raises.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec
from redis.exceptions import RedisError

from gateway import accounts
from gateway.accounts import Group, LedgerFilter, Team
from gateway.accounts.ledger import flat_row
from gateway.accounts.rollups import OTHER
from gateway.admin import budget_views, models
from gateway.admin.parts import AdminParts
from gateway.admin.problems import problems
from gateway.batches.batches import Batch
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import Fleet
from gateway.journey.record import FIELDS, Record, flat
from gateway.telemetry.buckets import KINDS, kind_of
from gateway.telemetry.measured_error import false_different, false_same
from gateway.telemetry.stats import Page
from gateway.telemetry.summary import RequestTally, StatsWindow, Summary
from gateway.wire.plain import OUTPUT_TOKENS_MAX
from gateway.wire.requests import OUTPUT_TOKENS_EXPECTED
from policies import Demand

_LEDGER_PAGE = 500
_PROMPT_TOKENS_SHOWN = 500  # the prompt of predictions
_SHOWN = Demand(_PROMPT_TOKENS_SHOWN, 0, 0)
_ERRORS_SHOWN = 3
Key = TypeVar("Key", int, str)
# a short question, without `max_tokens`, in a body of 100 bytes
_SHORT = Demand(
    prompt_tokens=10,
    prompt_tokens_max=100,
    output_tokens_max=OUTPUT_TOKENS_MAX,
    output_tokens_expected=OUTPUT_TOKENS_EXPECTED,
    is_output_asked=False,
)


# -- teams


async def teams(parts: AdminParts, name: str = "", after: int = 0, limit: int | None = None) -> list[models.TeamOut]:
    """Teams with their keys and budgets, by id: up to `limit` after the id `after`, whose names contain `name`."""
    asked = name.lower()
    found = [team for team in await parts.accounts.list_teams() if team.id > after and asked in team.name.lower()]
    return await _filled(parts, found[:limit])


async def _filled(parts: AdminParts, found: Sequence[Team], team_id: int | None = None) -> list[models.TeamOut]:
    """The teams `found`, of which one alone is `team_id`, with their keys and budgets."""
    keys, budgets = defaultdict[int, list[models.KeyOut]](list), defaultdict[int, list[models.BudgetOut]](list)
    for key in await parts.accounts.list_keys(team_id):
        keys[key.team_id].append(models.KeyOut.model_validate(key))
    for budget in await budget_views.budgets(parts, team_id, {team.id for team in found}):
        budgets[budget.team_id].append(budget)
    return [
        models.TeamOut.model_validate(team).model_copy(update={"keys": keys[team.id], "budgets": budgets[team.id]})
        for team in found
    ]


async def team(parts: AdminParts, team_id: int) -> models.TeamOut:
    """One team with its keys and budgets, and what is kept for it. Raises accounts.DoesNotExist."""
    (one,) = await _filled(parts, [await parts.accounts.team(team_id)], team_id)
    room = await parts.stored_responses.room(team_id)
    counts = {name: held.count for name, held in room.items()}
    stored = models.StoredOut(**counts, size_bytes=sum(held.bytes for held in room.values()))
    return one.model_copy(update={"stored": stored})


async def batches(parts: AdminParts, cursor: str, limit: int) -> models.BatchesOut:
    """The batches of all teams, newest first."""
    found, teams = await parts.batches.page(None, cursor, limit), await parts.accounts.list_teams()
    rows = [batch_out(one, teams) for one in found[:limit]]
    return models.BatchesOut(batches=rows, cursor=rows[-1].id if len(found) > limit else None)


def batch_out(batch: Batch, teams: Sequence[Team]) -> models.BatchOut:
    """A batch, with the name of its team."""
    team = next((one.name for one in teams if one.id == batch.team_id), "")
    return models.BatchOut.model_validate({**msgspec.structs.asdict(batch), "team": team})


# -- history


async def stats(
    parts: AdminParts, window: StatsWindow, team_id: int | None = None, model: str | None = None
) -> models.StatsOut:
    """Counts over a window. Raises RedisError."""
    summary = await parts.stats.query(window, team_id=team_id, model=model)
    teams = await parts.accounts.list_teams()
    out = stats_out(summary, {team.id: team.name for team in teams})
    found = {
        "semantic": _semantic(parts, summary, teams),
        "judging": _judging(summary, teams),
        "judges": _judges(summary),
    }
    return out.model_copy(update=found)


def _judging(summary: Summary, teams: Sequence[Team]) -> list[models.JudgingOut]:
    """What judging cost each team that it was done for."""
    names, found = {team.id: team.name for team in teams}, dict[int, models.JudgingOut]()
    for (team_id, _), sample in summary.samples.items():
        if team_id not in names or not sample.questions:
            continue
        saved = summary.by_team[team_id].avoided_microusd if team_id in summary.by_team else 0
        one = models.JudgingOut(
            team_id=team_id, team=names[team_id], questions=0, cost_microusd=0, saved_microusd=saved
        )  # fmt: skip
        one = found.setdefault(team_id, one)
        one.questions += sample.questions
        one.cost_microusd += sample.judging_microusd
    return sorted(found.values(), key=lambda one: -one.questions)


def _judges(summary: Summary) -> list[models.JudgeOut]:
    """The judges that another one was set beside, by descending pairs."""
    found = []
    for names, counts in summary.rulings.items():
        judge, _, other = names.partition("\n")
        found.append(
            models.JudgeOut(
                judge=judge,
                other=other,
                pairs=counts.pairs,
                agreed=counts.agreed,
                false_same=false_same(counts),
                false_different=false_different(counts),
            )
        )
    return sorted(found, key=lambda one: -one.pairs)


def _semantic(parts: AdminParts, summary: Summary, teams: Sequence[Team]) -> list[models.SemanticOut]:
    """The measured error of semantic hits beside its bound, by descending hits."""
    known = {team.id: team for team in teams}
    now = {(live.team_id, live.alias): live.strictness for live in parts.truth.live}
    found = []
    for (team_id, alias), sample in summary.samples.items():
        team = known.get(team_id)
        if team is None or sample.is_empty:
            continue
        measured = parts.truth.measure(sample)
        found.append(
            models.SemanticOut(
                team_id=team_id,
                team=team.name,
                model=alias,
                requests=sample.requests,
                hits=sample.hits,
                checks=sample.checks,
                unsettled=sample.unsettled,
                reported_wrong=sample.reported_wrong,
                reported_right=sample.reported_right,
                estimate=measured.estimate,
                low=measured.low,
                high=measured.high,
                error_max=parts.truth.bounds.error_max(team, alias),
                strictness=now.get((team_id, alias), 1.0),
            )
        )
    return sorted(found, key=lambda one: -one.hits)


async def stats_or_none(parts: AdminParts, window: StatsWindow, team_id: int | None = None) -> models.StatsOut | None:
    """Counts over a window; None while Redis is away."""
    try:
        return await stats(parts, window, team_id)
    except RedisError:
        return None


def stats_out(summary: Summary, team_names: dict[int, str]) -> models.StatsOut:
    """A summary for the API: teams, models and surfaces by descending requests."""
    names = {0: "", **team_names}
    return models.StatsOut(
        window=summary.window,
        start_s=summary.start_s,
        end_s=summary.end_s,
        total=_tally(summary.total),
        by_team=[
            models.TeamTally(**sums, team_id=team_id, team=names.get(team_id, "deleted"))
            for team_id, sums in _ranked(summary.by_team)
        ],
        by_model=[models.ModelTally(**sums, model=model) for model, sums in _ranked(summary.by_model)],
        by_surface=[models.SurfaceTally(**sums, surface=surface) for surface, sums in _ranked(summary.by_surface)],
        by_deployment=[
            models.DeploymentTallyOut(deployment=name, **msgspec.structs.asdict(tally))
            for name, tally in sorted(summary.by_deployment.items())
        ],
        series=[models.PointOut.model_validate(point) for point in summary.series],
        ttft=summary.ttft,
        duration=summary.duration,
    )


def _ranked(tallies: Mapping[Key, RequestTally]) -> Iterator[tuple[Key, dict[str, Any]]]:
    """The sums of each part of the traffic, by descending requests."""
    for key, tally in sorted(tallies.items(), key=lambda one: -one[1].requests):
        yield key, _tally(tally).model_dump()


def _tally(tally: RequestTally) -> models.TallyOut:
    out = models.TallyOut.model_validate(tally)
    return out.model_copy(update={"by_kind": {kind: out.by_kind.get(kind, 0) for kind in KINDS}})


CacheKind = Literal["", "exact", "semantic", "coalesced", "miss", "bypass"]
Outcome = Literal["", "ok", "refused", "failed", "failover"]


@dataclass(frozen=True, slots=True)
class RouteFilter:
    """A selection of the latest requests; None and empty values select all."""

    team_id: int | None = None
    model: str = ""
    cache: CacheKind = ""
    deployment: str = ""
    outcome: Outcome = ""
    request_id: str = ""

    def matches(self, record: Record) -> bool:
        return (
            (self.team_id is None or record.request.team_id == self.team_id)
            and (not self.model or record.request.alias == self.model)
            and (not self.cache or record.cache.source == self.cache)
            and (not self.deployment or any(a.name == self.deployment for a in record.answer.attempts))
            and (not self.request_id or record.request.id == self.request_id)
            and (not self.outcome or self.outcome in _outcomes(record))
        )


def _kind(record: Record) -> str:
    return kind_of(record.cache.source, record.ended.status, record.ended.error)


def _outcomes(record: Record) -> tuple[str, ...]:
    kind = _kind(record)
    outcome = kind if kind in ("refused", "failed") else "ok"
    return (outcome, "failover") if len(record.answer.attempts) > 1 else (outcome,)


async def routes(parts: AdminParts, where: RouteFilter, cursor: str = "", limit: int = 50) -> models.RoutesOut:
    """The latest requests, each with the reasons for its route.

    Raises accounts.Invalid for a malformed `cursor`, RedisError.
    """
    _check_cursor(cursor)
    return _routes(await parts.stats.routes(where.matches, before=cursor, limit=limit))


async def near_misses(parts: AdminParts, where: RouteFilter, cursor: str = "", limit: int = 50) -> models.RoutesOut:
    """The latest misses with a near cached answer.

    Raises accounts.Invalid for a malformed `cursor`, RedisError.
    """
    _check_cursor(cursor)
    return _routes(await parts.stats.near_misses(where.matches, before=cursor, limit=limit))


ROUTES_CURSOR = r"^([0-9]{1,19}-[0-9]{1,19})?$"  # an entry of a Redis stream; 20 digits may be too many


def _check_cursor(cursor: str) -> None:
    if not re.search(ROUTES_CURSOR, cursor):
        raise accounts.Invalid("cursor", "expected one that an earlier page gave")


_DEFAULTS = {name: field.default for name, field in FIELDS.items() if field.default is not msgspec.NODEFAULT}


def _routes(page: Page) -> models.RoutesOut:
    """The records, each with its kind."""
    found = [{**_DEFAULTS, **flat(record), "kind": _kind(record)} for record in page.records]
    return models.RoutesOut.model_validate({"routes": found, "cursor": page.cursor})


async def ledger(parts: AdminParts, where: LedgerFilter, cursor: str | None, limit: int) -> models.LedgerOut:
    """A page of the ledger, newest first. Raises accounts.Invalid for a malformed `cursor`."""
    page = await parts.ledger.rows(where, limit, cursor)
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    keys = {key.id: key.name for key in await parts.accounts.list_keys()}
    rows = [{**flat_row(row), "team": teams.get(row.team_id), "key": keys.get(row.key_id)} for row in page.rows]
    return models.LedgerOut.model_validate({"rows": rows, "cursor": page.cursor})


GROUPS = {
    "team": Group.TEAM, "key": Group.KEY, "user": Group.USER, "model": Group.ALIAS, "deployment": Group.DEPLOYMENT,
    "tag": Group.TAG, "day": Group.DAY,
}  # fmt: skip
"""What sums of the ledger can be grouped by, by the names of the API."""


async def ledger_sums(parts: AdminParts, by: Sequence[str], where: LedgerFilter, limit: int) -> models.LedgerSumsOut:
    """Sums of the ledger by the groups in `by`, the `limit` that cost most. Raises accounts.Invalid
    for groups that do not go together.
    """
    totals = await parts.ledger.totals([GROUPS[name] for name in dict.fromkeys(by)], where, limit + 1)
    teams = {team.id: team.name for team in await parts.accounts.list_teams()}
    keys = {key.id: key.name for key in await parts.accounts.list_keys()}

    def shown(value: str | None) -> str | None:
        return value if value is None else "" if value == OTHER else value.removeprefix("=")

    sums = [
        {
            **msgspec.structs.asdict(one.usage),
            **msgspec.structs.asdict(one),
            "team": teams.get(one.team_id) if one.team_id is not None else None,
            "key": keys.get(one.key_id) if one.key_id is not None else None,
            "model": one.alias,
            "user": shown(one.user),
            "tag": shown(one.tag),
            "is_other": OTHER in (one.user, one.tag),
        }
        for one in totals[:limit]
    ]
    return models.LedgerSumsOut.model_validate({"sums": sums, "has_more": len(totals) > limit})


async def ledger_rows(parts: AdminParts, where: LedgerFilter) -> AsyncIterator[dict[str, Any]]:
    """All matching rows of the ledger, newest first, one page in memory at a time."""
    cursor: str | None = None
    while True:
        page = await ledger(parts, where, cursor, _LEDGER_PAGE)
        for row in page.rows:
            yield dict(row)  # type: ignore[call-overload]
        cursor = page.cursor
        if cursor is None:
            return


# -- what filters offer


@dataclass(frozen=True, slots=True)
class Choices:
    """The names that a filter offers, each with its label; those that are no longer configured are last."""

    teams: dict[int, str]
    models: dict[str, str]
    deployments: dict[str, str]


async def _choices(
    parts: AdminParts, teams: Mapping[int, str], aliases: Iterable[str], deployments: Iterable[str]
) -> Choices:
    """The current names, and those of the past in `teams`, `aliases` and `deployments`."""
    now = {team.id: team.name for team in await parts.accounts.list_teams()}
    gone = {id: f"{name or f'team {id}'} (deleted)" for id, name in sorted(teams.items()) if id not in now}
    return Choices(
        teams=now | {id: label for id, label in gone.items() if id},
        models=_with_retired(parts.settings.names, aliases),
        deployments=_with_retired([one.name for one in parts.deployments()], deployments),
    )


def _with_retired(current: Iterable[str], seen: Iterable[str]) -> dict[str, str]:
    labels = {name: name for name in current}
    return labels | {name: f"{name} (retired)" for name in sorted(set(seen)) if name and name not in labels}


async def ledger_choices(parts: AdminParts) -> Choices:
    """What rows of the ledger can be filtered by."""
    teams = await parts.ledger.totals([Group.TEAM])
    aliases, deployments = [await parts.ledger.totals([group]) for group in (Group.ALIAS, Group.DEPLOYMENT)]
    return await _choices(
        parts,
        {one.team_id: "" for one in teams if one.team_id},
        [one.alias for one in aliases if one.alias],
        [one.deployment for one in deployments if one.deployment],
    )


async def route_choices(parts: AdminParts) -> Choices:
    """What the latest requests can be filtered by. Raises RedisError."""
    teams, aliases, deployments = dict[int, str](), set[str](), set[str]()

    def note(record: Record) -> bool:
        teams.setdefault(record.request.team_id, record.request.team)
        aliases.add(record.request.alias)
        deployments.update([attempt.name for attempt in record.answer.attempts])
        return False

    await parts.stats.routes(note)
    return await _choices(parts, teams, aliases, deployments)


# -- the machine


async def status(parts: AdminParts) -> models.StatusOut:
    """The health of all parts, and the problems. Works without Redis."""
    healths, live = parts.healths(), await budget_views.budgets(parts)
    summary = await _or_none(parts, StatsWindow.HOUR)
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
            is_judged=parts.settings.cache.judge_model == "auto",
        ),
    )


async def _or_none(parts: AdminParts, window: StatsWindow) -> Summary | None:
    try:
        return await parts.stats.query(window)
    except RedisError:
        return None


async def overview(parts: AdminParts, window: StatsWindow) -> models.OverviewOut:
    """Health and counts; the counts are None while Redis is away."""
    return models.OverviewOut(status=await status(parts), stats=await stats_or_none(parts, window))


async def deployments(parts: AdminParts) -> list[models.DeploymentOut]:
    """All deployments with their health, their estimates and their last 24 hours.

    `last_24h` is None while Redis is away.
    """
    summary, errors = await _or_none(parts, StatsWindow.DAY), await _last_errors(parts)
    found = []
    for one in parts.deployments():
        one = one.model_copy(update={"last_errors": errors.get(one.name, [])})
        if summary is not None and one.name in summary.by_deployment:
            tally = msgspec.structs.asdict(summary.by_deployment[one.name])
            one.last_24h = models.DeploymentTallyOut(deployment=one.name, **tally)
        found.append(one)
    return found


async def _last_errors(parts: AdminParts) -> dict[str, list[models.DeploymentErrorOut]]:
    """The last failed attempts among the latest requests of all hosts, by deployment."""
    found: dict[str, list[models.DeploymentErrorOut]] = {}

    def note(record: Record) -> bool:
        for attempt in record.answer.attempts:
            if attempt.verdict in ("error", "denied") and len(found.setdefault(attempt.name, [])) < _ERRORS_SHOWN:
                request = record.request
                one = models.DeploymentErrorOut(at_s=request.at_s, request_id=request.id, words=attempt.outcome)
                found[attempt.name].append(one)
        return False

    with contextlib.suppress(RedisError):
        await parts.stats.routes(note)
    return found


def deployments_of(fleet: Fleet) -> list[models.DeploymentOut]:
    """All deployments as this worker sees them now, without their last 24 hours."""
    return [deployment_of(alias, one) for alias in fleet.aliases.values() for one in alias.deployments.values()]


def deployment_of(alias: Alias, deployment: Deployment) -> models.DeploymentOut:
    """One deployment as this worker sees it now."""
    seen = deployment.candidate(_SHOWN)
    load = deployment.backend.load(_PROMPT_TOKENS_SHOWN)
    output_tokens = alias.output_max(deployment, _SHORT)
    return models.DeploymentOut(
        name=deployment.name,
        alias=alias.name,
        backend=deployment.settings.backend,
        model=deployment.model,
        policy=alias.settings.policy,
        is_available=deployment.is_available,
        reason=deployment.trouble,
        use=deployment.use,
        ttft_timeout_ms=1000.0 * deployment.ttft_timeout_s(_PROMPT_TOKENS_SHOWN, is_alone=False),
        recent_calls=deployment.estimate.weight,
        denial=deployment.health.trouble[1],
        running=load.running,
        waiting=load.waiting + deployment.places.waiting,
        ttft_ms=seen.ttft_ms,
        tpot_ms=seen.tpot_ms,
        input_microusd_per_mtok=deployment.price.input_microusd_per_mtok,
        output_microusd_per_mtok=deployment.price.output_microusd_per_mtok,
        is_price_known=deployment.is_price_known,
        can_chat=deployment.can_chat,
        capabilities=tuple(sorted(seen.capabilities)),
        are_capabilities_assumed=deployment.are_capabilities_assumed,
        hold_microusd=deployment.price.cost_max(_SHORT.prompt_tokens_max, output_tokens),
        hold_output_tokens=output_tokens,
        context_tokens_max=seen.context_tokens_max,
        output_tokens_max=seen.output_tokens_max,
        engine=load.engine and models.EngineOut.model_validate(load.engine),
    )
