"""What the admin sees, put together from the parts: one function for each thing that a page and the API both show.

Knows no HTTP and no HTML. Invariant: nothing here changes anything but `purge` and the two that make and change budgets; what a part can't
tell while Redis is away is None where the rest is still worth seeing, and raises where it is the whole answer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from redis.exceptions import RedisError

from cache import CacheWorkerUnavailable, Hit, MissReason, Purge, Query, WorkerState, fingerprint
from gateway import accounts
from gateway.accounts import LedgerFilter
from gateway.admin import format as fmt
from gateway.admin.models import (
    AttemptOut,
    BudgetIn,
    BudgetOut,
    BudgetPatch,
    CacheOut,
    DeploymentOut,
    DeploymentTallyOut,
    KeyOut,
    LedgerOut,
    LedgerRowOut,
    ModelTally,
    NeighbourOut,
    OverviewOut,
    PartitionOut,
    PartOut,
    PercentilesOut,
    PointOut,
    PurgeIn,
    PurgeOut,
    RejectionOut,
    RouteOut,
    RoutesOut,
    SampleOut,
    StatsOut,
    StatusOut,
    TallyOut,
    TeamOut,
    TeamTally,
    TryIn,
    TryOut,
)
from gateway.admin.problems import problems
from gateway.admin.services import AdminServices, Health
from gateway.errors import BadRequest
from gateway.record import Record
from gateway.summary import KINDS, Summary, Tally, Window, kind_of
from policies import Budget, BudgetState, WindowKind

_LEDGER_PAGE = 500
_NEIGHBOURS = 8


# -- teams


async def teams(services: AdminServices) -> list[TeamOut]:
    """All teams with their keys and budgets, by id."""
    found, keys = await services.accounts.list_teams(), await services.accounts.list_keys()
    live = await budgets(services)
    return [
        TeamOut.model_validate(team).model_copy(
            update={
                "keys": [KeyOut.model_validate(key) for key in keys if key.team_id == team.id],
                "budgets": [budget for budget in live if budget.team_id == team.id],
            }
        )
        for team in found
    ]


async def team(services: AdminServices, team_id: int) -> TeamOut:
    """One team with its keys and budgets. Raises accounts.NotFound."""
    for one in await teams(services):
        if one.id == team_id:
            return one
    raise accounts.NotFound(f"there is no team {team_id}")


async def budgets(services: AdminServices, team_id: int | None = None) -> list[BudgetOut]:
    """Budgets with what counts against them now; without the live figures while Redis is away."""
    found = await services.accounts.list_budgets(team_id)
    try:
        states: Sequence[BudgetState | None] = await services.budgets.spent(found)
    except RedisError:
        states = [None] * len(found)
    return [budget_out(budget, state) for budget, state in zip(found, states, strict=True)]


def budget_out(budget: Budget, state: BudgetState | None) -> BudgetOut:
    """One budget on the wire."""
    out = BudgetOut.model_validate(budget)
    if state is None:
        return out
    used = state.spent_microusd + state.held_microusd
    return out.model_copy(
        update={
            "window_id": state.window.id,
            "spent_microusd": state.spent_microusd,
            "held_microusd": state.held_microusd,
            "remaining_microusd": max(0, budget.limit_microusd - used),
            "resets_at_s": state.window.end_ms / 1000 if state.window.end_ms is not None else None,
        }
    )


async def create_budget(services: AdminServices, team_id: int, body: BudgetIn) -> Budget:
    """A new budget. Raises accounts.Conflict where the team has one of the same window and hardness, accounts.NotFound."""
    await _check_alone(services, team_id, body.window, body.is_hard)
    return await services.accounts.create_budget(team_id, body.window, body.limit_microusd, body.is_hard)


async def update_budget(services: AdminServices, budget_id: int, body: BudgetPatch) -> Budget:
    """Changes the fields that were given. Raises as `create_budget` does."""
    changes = body.given()
    old = next((one for one in await services.accounts.list_budgets() if one.id == budget_id), None)
    if old is not None and changes.get("is_hard", old.is_hard) != old.is_hard:
        await _check_alone(services, old.team_id, old.window, not old.is_hard)
    return await services.accounts.update_budget(budget_id, **changes)


async def _check_alone(services: AdminServices, team_id: int, kind: WindowKind, is_hard: bool) -> None:
    """Of two budgets of one kind only the smaller would ever matter, and nobody could say which is meant."""
    for one in await services.accounts.list_budgets(team_id):
        if one.window == kind and one.is_hard == is_hard:
            name = f"{'hard' if is_hard else 'soft'} budget {fmt.window(kind)}"
            raise accounts.Conflict(f"this team has a {name} already: change that one")


# -- what happened


async def stats(
    services: AdminServices, window: Window, team_id: int | None = None, model: str | None = None
) -> StatsOut:
    """Counts over a window. Raises RedisError."""
    summary = await services.stats.query(window, team_id=team_id, model=model)
    names = {team.id: team.name for team in await services.accounts.list_teams()}
    return stats_out(summary, names)


async def stats_or_none(services: AdminServices, window: Window, team_id: int | None = None) -> StatsOut | None:
    """Counts over a window; None while Redis is away."""
    try:
        return await stats(services, window, team_id)
    except RedisError:
        return None


def stats_out(summary: Summary, team_names: dict[int, str]) -> StatsOut:
    """A summary on the wire: the busiest team and model first."""
    by_team = [
        TeamTally(
            **_tally(tally).model_dump(),
            team_id=team_id,
            team=team_names.get(team_id, "" if not team_id else "deleted"),
        )
        for team_id, tally in summary.by_team.items()
    ]
    by_model = [ModelTally(**_tally(tally).model_dump(), model=model) for model, tally in summary.by_model.items()]
    return StatsOut(
        window=summary.window,
        start_s=summary.start_s,
        end_s=summary.end_s,
        total=_tally(summary.total),
        by_team=sorted(by_team, key=lambda one: -one.requests),
        by_model=sorted(by_model, key=lambda one: -one.requests),
        by_deployment=[
            DeploymentTallyOut.model_validate(tally).model_copy(update={"deployment": name})
            for name, tally in sorted(summary.by_deployment.items())
        ],
        series=[PointOut.model_validate(point) for point in summary.series],
        ttft={name: PercentilesOut.model_validate(one) for name, one in summary.ttft.items()},
        duration={name: PercentilesOut.model_validate(one) for name, one in summary.duration.items()},
    )


def _tally(tally: Tally) -> TallyOut:
    out = TallyOut.model_validate(tally)
    return out.model_copy(update={"by_kind": {kind: out.by_kind.get(kind, 0) for kind in KINDS}})


@dataclass(frozen=True, slots=True)
class RouteFilter:
    """Which of the latest requests to show; None and empty mean any."""

    team_id: int | None = None
    model: str = ""
    cache: Literal["", "exact", "semantic", "coalesced", "miss", "bypass"] = ""
    deployment: str = ""
    outcome: Literal["", "ok", "refused", "failed", "failover"] = ""
    request_id: str = ""

    def matches(self, record: Record) -> bool:
        return (
            (self.team_id is None or record.team_id == self.team_id)
            and (not self.model or record.alias == self.model)
            and (not self.cache or record.cache == self.cache)
            and (not self.deployment or any(a.name == self.deployment for a in record.attempts))
            and (not self.request_id or record.request_id == self.request_id)
            and (not self.outcome or self.outcome in _outcomes(record))
        )


def _outcomes(record: Record) -> tuple[str, ...]:
    kind = kind_of(record.cache, record.status, record.error)
    outcome = kind if kind in ("refused", "failed") else "ok"
    return (outcome, "failover") if len(record.attempts) > 1 else (outcome,)


async def routes(services: AdminServices, where: RouteFilter, cursor: str = "", limit: int = 50) -> RoutesOut:
    """The latest requests, each with the reasons for its way. Raises RedisError."""
    page = await services.stats.routes(where.matches, before=cursor, limit=limit)
    return RoutesOut(routes=[route_out(record) for record in page.records], cursor=page.cursor)


async def near_misses(services: AdminServices, where: RouteFilter, cursor: str = "", limit: int = 50) -> RoutesOut:
    """The latest requests that came close to a cached answer. Raises RedisError."""
    page = await services.stats.near_misses(where.matches, before=cursor, limit=limit)
    return RoutesOut(routes=[route_out(record) for record in page.records], cursor=page.cursor)


def route_out(record: Record) -> RouteOut:
    fields: dict[str, Any] = {name: getattr(record, name) for name in record.__struct_fields__}
    fields["kind"] = kind_of(record.cache, record.status, record.error)
    fields["rejected"] = [RejectionOut(name=one.name, reason=one.reason) for one in record.rejected]
    fields["attempts"] = [
        AttemptOut(name=one.name, outcome=one.outcome, duration_ms=one.duration_ms) for one in record.attempts
    ]
    return RouteOut(**fields)


async def ledger(services: AdminServices, where: LedgerFilter, cursor: str | None, limit: int) -> LedgerOut:
    """A page of the ledger, newest first. Raises accounts.Invalid for a cursor that is none."""
    page = await services.ledger.rows(where, limit, cursor)
    return LedgerOut(rows=[LedgerRowOut.model_validate(row) for row in page.rows], cursor=page.cursor)


async def ledger_rows(services: AdminServices, where: LedgerFilter) -> AsyncIterator[LedgerRowOut]:
    """All rows of the ledger that match, newest first, a page in memory at a time."""
    cursor: str | None = None
    while True:
        page = await ledger(services, where, cursor, _LEDGER_PAGE)
        for row in page.rows:
            yield row
        cursor = page.cursor
        if cursor is None:
            return


# -- the machine


async def status(services: AdminServices) -> StatusOut:
    """Every part's health, and what an admin should look at. Never raises for Redis' sake."""
    parts, live = services.parts(), await budgets(services)
    summary = await _or_none(services, Window.HOUR)
    names = {team.id: team.name for team in await services.accounts.list_teams()}
    return StatusOut(
        version=services.version,
        uptime_s=max(0.0, services.clock() - services.started_at_s),
        parts=[PartOut.model_validate(part) for part in parts],
        problems=problems(parts, services.deployments(), live, names, summary),
    )


async def _or_none(services: AdminServices, window: Window) -> Summary | None:
    try:
        return await services.stats.query(window)
    except RedisError:
        return None


async def overview(services: AdminServices, window: Window) -> OverviewOut:
    """Health and counts; the counts are None while Redis is away."""
    return OverviewOut(status=await status(services), stats=await stats_or_none(services, window))


async def deployments(services: AdminServices) -> list[DeploymentOut]:
    """Every deployment with its health, its estimates and what it did in the last 24 h (None while Redis is away)."""
    summary = await _or_none(services, Window.DAY)
    found = []
    for view in services.deployments():
        out = DeploymentOut.model_validate(view)
        if summary is not None and view.name in summary.by_deployment:
            tally = DeploymentTallyOut.model_validate(summary.by_deployment[view.name])
            out = out.model_copy(update={"last_24h": tally.model_copy(update={"deployment": view.name})})
        found.append(out)
    return found


# -- the cache


async def cache(services: AdminServices) -> CacheOut:
    """Sizes, by team. Raises CacheUnavailable."""
    sizes, worker = await services.exact.stats(), await services.semantic.status()
    found = await services.accounts.list_teams()
    owners = {services.partition_of(team.id): team for team in found}
    partitions = [
        PartitionOut(
            team_id=owner.id if owner else None,
            team=owner.name if owner else None,
            entries=one.entries,
            size_bytes=one.size_bytes,
            size_bytes_max=services.exact.limits.size_bytes_max,
        )
        for one in sizes.partitions
        for owner in (owners.get(one.partition),)
    ]
    healths = {
        WorkerState.READY: Health.OK,
        WorkerState.LOADING: Health.STARTING,
        WorkerState.REBUILDING: Health.STARTING,
    }
    detail = f"{worker.entries:,} prompts, {worker.embedder}" if worker.is_ready else worker.detail or worker.state
    return CacheOut(
        entries=sizes.entries,
        size_bytes=sizes.size_bytes,
        partitions=sorted(partitions, key=lambda one: -one.size_bytes),
        l1_entries=sizes.l1_entries,
        l1_bytes=sizes.l1_bytes,
        semantic=PartOut(name="semantic index", health=healths.get(worker.state, Health.DOWN), detail=detail),
    )


async def purge(services: AdminServices, what: PurgeIn) -> PurgeOut:
    """Removes entries, or counts them. Raises BadRequest where no condition was given, CacheUnavailable, accounts.NotFound."""
    conditions = what.model_dump(exclude={"dry_run", "all"}, exclude_none=True)
    if what.all == bool(conditions):
        words = (
            "Give at least one of id, text, team_id, namespace, model, deployment and older_than_s, or `all`, not both"
        )
        raise BadRequest(words, param="all", code="invalid_value")
    if what.team_id is not None:
        await team(services, what.team_id)
    selector = Purge(
        partition=services.partition_of(what.team_id) if what.team_id is not None else None,
        id=what.id,
        text=what.text,
        namespace=what.namespace,
        labels=tuple((name, conditions[name]) for name in ("model", "deployment") if name in conditions),
        older_than_s=what.older_than_s,
    )
    result = await services.exact.purge(selector, is_dry_run=what.dry_run)
    owners = {services.partition_of(team.id): team for team in await services.accounts.list_teams()}
    samples = [
        SampleOut(
            id=sample.id,
            team_id=owner.id if owner else None,
            team=owner.name if owner else None,
            text=sample.text,
            created_at_s=sample.created_at,
            size_bytes=sample.size_bytes,
        )
        for sample in result.samples
        for owner in (owners.get(sample.partition),)
    ]
    return PurgeOut(dry_run=what.dry_run, count=result.count, size_bytes=result.size_bytes, samples=samples)


async def try_prompt(services: AdminServices, what: TryIn) -> TryOut:
    """What the cache would do with a prompt that is a whole request of one user message. Serves, stores and counts nothing.

    Raises accounts.NotFound for the team.
    """
    await team(services, what.team_id)
    body = {"model": what.model, "messages": [{"role": "user", "content": what.prompt}]}
    asked = fingerprint(body, services.partition_of(what.team_id))
    entry = (await services.exact.lookup(asked)).entry
    neighbours: tuple[NeighbourOut, ...] = ()
    decision, reason, similarity = "miss", "not_eligible", None
    if asked.text is not None:
        try:
            found = await services.semantic.near(Query(asked.partition, asked.compat, asked.text), _NEIGHBOURS)
        except CacheWorkerUnavailable as error:
            reason = f"{MissReason.UNAVAILABLE}: {error}"
        else:
            neighbours = tuple(
                NeighbourOut(text=one.text, similarity=one.similarity, id=one.exact.hex(), reason=one.reason or "")
                for one in found.neighbours
            )
            similarity = neighbours[0].similarity if neighbours else None
            if isinstance(found.decision, Hit):
                decision, reason = "semantic", "the nearest cached prompt means the same"
            else:
                reason = found.decision.reason.value
    if entry is not None:
        decision, reason, similarity = "exact", "this very request was answered before", 1.0
    return TryOut(decision=decision, reason=reason, similarity=similarity, neighbours=list(neighbours))
