"""Budgets for the API and the pages: as they stand, and what an admin does with them.

The docstrings of operations are descriptions in the OpenAPI document. No HTML. Invariant: a raise
and a reset write a row of the audit log, or do not happen.
"""

from collections.abc import Collection, Sequence
from typing import Any

from redis.exceptions import RedisError

from gateway import accounts
from gateway.accounts import audit
from gateway.admin import models
from gateway.admin.format import utc
from gateway.admin.guard import Acting, Principal
from gateway.admin.parts import WorkerParts
from gateway.admin.queries import Id
from gateway.journey.budget_words import amount_words
from gateway.telemetry.summary import StatsWindow
from gateway.wire.errors import Forbidden
from policies import Budget
from policies.holds import BudgetState
from policies.pace import Pace, pace_of
from policies.windows import TEAM, Unit

_LIMITS = {"limit_microusd": Unit.MONEY, "limit_tokens": Unit.TOKENS, "limit_requests": Unit.REQUESTS}
_AMOUNTS = ("spent", "held", "remaining", "per_day", "projected")
_VALUES_SHOWN = 100


async def list_budgets(parts: WorkerParts) -> models.BudgetsOut:
    """All budgets, with what is spent, held and left now."""
    return {"budgets": await budgets(parts)}


async def list_budgets_of_team(parts: WorkerParts, team_id: Id) -> models.BudgetsOut:
    """One team's budgets, with what is spent, held and left now."""
    await parts.accounts.team(team_id)
    return {"budgets": await budgets(parts, team_id)}


async def create_budget(parts: WorkerParts, team_id: Id, body: models.BudgetIn, operator: Acting) -> models.BudgetOut:
    """A new budget. On the team's money it counts from its window's start, else from now. 409 where one of its kind is."""
    _check_below(body.axis, operator)
    row = parts.audit_row(audit.BUDGET_CREATED, "", operator)
    budget = await parts.accounts.create_budget(team_id, **fields_of(body), row=row)
    return await _live(parts, budget.id)


async def update_budget(
    parts: WorkerParts, budget_id: Id, body: models.BudgetPatch, operator: Acting
) -> models.BudgetOut:
    """Changes the fields that are sent. 409 where the team has one of that kind."""
    given = body.given()
    limits = {name: limit for name in _LIMITS if (limit := given.pop(name, None)) is not None}
    budget = await _definition(parts, budget_id)
    _check_below(budget.axis, operator)
    if limits:
        for name in limits:
            if _LIMITS[name] is not budget.unit:
                raise accounts.Invalid(name, f"this budget counts {budget.unit}, and its unit cannot change")
        given["limit"] = next(iter(limits.values()))
    await parts.accounts.update_budget(budget_id, **given, row=parts.audit_row(audit.BUDGET_CHANGED, "", operator))
    return await _live(parts, budget_id)


async def list_values(parts: WorkerParts, budget_id: Id) -> models.BudgetValuesOut:
    """The values of a budget on each value that used the most in the running window."""
    budget = await _definition(parts, budget_id)
    states = sorted(await parts.budgets.states([budget]), key=lambda state: -(state.spent + state.held))
    shown = [state for state in states if state.spent or state.held][:_VALUES_SHOWN]
    return models.BudgetValuesOut(
        values=[models.BudgetValueOut.of(state, value=name_of(state)) for state in shown],
        values_total=sum(state.value not in ("", "*") for state in states),
    )


async def raise_budget(
    parts: WorkerParts, budget_id: Id, body: models.BudgetRaiseIn, operator: Acting
) -> models.BudgetOut:
    """Raises the limit until a moment; a later raise replaces it. It is in the audit log."""
    budget = await _definition(parts, budget_id)
    _check_below(budget.axis, operator)
    if body.until_s <= parts.clock() and body.by:
        raise accounts.Invalid("until_s", "expected a moment that has not passed")
    entry = f"budget {budget_id}: {amount_words(body.by, budget.unit)} more until {utc(body.until_s)}"
    row = parts.audit_row(audit.BUDGET_RAISED, entry, operator, budget.team_id)
    await parts.accounts.raise_budget(budget_id, body.by, int(body.until_s * 1000), row)
    return await _live(parts, budget_id)


async def reset_budget(parts: WorkerParts, budget_id: Id, operator: Acting) -> models.BudgetOut:
    """Counts from 0 again. Requests under way count before the reset. It is in the audit log."""
    budget = await _live(parts, budget_id)
    _check_below(budget.axis, operator)
    spent = "an unknown amount" if budget.spent is None else amount_words(budget.spent, budget.unit)
    row = parts.audit_row(audit.BUDGET_RESET, f"budget {budget_id}: {spent} was spent", operator, budget.team_id)
    await parts.accounts.reset_budget(budget_id, row)
    return await _live(parts, budget_id)


async def delete_budget(parts: WorkerParts, budget_id: Id, operator: Acting) -> None:
    """The team is no longer held to it."""
    _check_below((await _definition(parts, budget_id)).axis, operator)
    await parts.accounts.delete_budget(budget_id, parts.audit_row(audit.BUDGET_DELETED, "", operator))


def _check_below(axis: str, operator: Principal) -> None:
    """Refuse a change of a team's own budget by others than an admin. Raises Forbidden."""
    if axis == TEAM and not operator.is_admin:
        message = "A budget on all of a team is the admin's: choose an axis below it, such as key, user or a tag"
        raise Forbidden(message, code="role_not_allowed")


def holds(parts: WorkerParts) -> list[models.HoldOut]:
    """The amount that a short question holds of a budget, by model: that of its most expensive deployment."""
    largest: dict[str, models.HoldOut] = {}
    for deployment in parts.deployments():
        alias, microusd = deployment.alias, deployment.hold_microusd
        if alias not in largest or largest[alias].microusd < microusd:
            largest[alias] = models.HoldOut(model=alias, microusd=microusd, output_tokens=deployment.hold_output_tokens)
    return list(largest.values())


async def budgets(
    parts: WorkerParts,
    team_id: int | None = None,
    among: Collection[int] | None = None,
    *,
    is_paced: bool = True,
) -> list[models.BudgetOut]:
    """All budgets, or those of one team or of the teams `among`, with their current use; without it while Redis is away.

    `is_paced`: those of a team's money have the rate of the last 24 hours.
    """
    known = await parts.accounts.list_budgets(team_id)
    shown = [budget for budget in known if among is None or budget.team_id in among]
    return await _in_use(parts, shown, is_paced=is_paced)


async def _live(parts: WorkerParts, budget_id: int) -> models.BudgetOut:
    """One budget with its current use. Raises accounts.DoesNotExist."""
    (budget,) = await _in_use(parts, [await _definition(parts, budget_id)])
    return budget


async def _definition(parts: WorkerParts, budget_id: int) -> Budget:
    for budget in await parts.accounts.list_budgets():
        if budget.id == budget_id:
            return budget
    raise accounts.DoesNotExist(f"there is no budget {budget_id}")


async def _in_use(parts: WorkerParts, known: Sequence[Budget], *, is_paced: bool = True) -> list[models.BudgetOut]:
    needed, days, made_ms = holds(parts), dict[int, int](), dict[int, int]()
    try:
        states: Sequence[BudgetState | None] = await parts.budgets.spent(known)
        if is_paced and any(map(_is_money, known)):
            by_team = (await parts.stats.query(StatsWindow.DAY)).by_team
            days = {team_id: tally.cost_microusd for team_id, tally in by_team.items()}
            made_ms = {team.id: int(team.created_at_s * 1000) for team in await parts.accounts.list_teams()}
    except RedisError:
        states = [None] * len(known)
    at_ms = int(parts.clock() * 1000)
    return [
        _out(budget, state, needed, at_ms, pace)
        for budget, state in zip(known, states, strict=True)
        for day in [days.get(budget.team_id) if _is_money(budget) else None]
        for pace in [Pace() if state is None else pace_of(state, at_ms, day, made_ms.get(budget.team_id, 0))]
    ]


def _is_money(budget: Budget) -> bool:
    """Whether it is on all the money of a team, which the statistics have too."""
    return budget.unit is Unit.MONEY and budget.axis == "team"


def fields_of(body: models.BudgetIn) -> dict[str, Any]:
    """The fields of a new budget. Raises accounts.Invalid without exactly one limit."""
    given = body.model_dump()
    limits = {name: value for name in _LIMITS if (value := given.pop(name)) is not None}
    if len(limits) != 1:
        raise accounts.Invalid("limit_microusd", "expected exactly one of limit_microusd, limit_tokens, limit_requests")
    ((name, limit),) = limits.items()
    return {**given, "unit": _LIMITS[name], "limit": limit}


def name_of(state: BudgetState) -> str | None:
    """The axis value that a state counts: empty for requests without a value, None where values share a count."""
    if state.budget.value is not None or not state.value:
        return state.budget.value or ""
    return None if state.value == "*" else state.value[1:]


def _out(
    budget: Budget, state: BudgetState | None, needed: Sequence[models.HoldOut], at_ms: int, pace: Pace
) -> models.BudgetOut:
    """A budget with its current use, as the API shows it."""
    is_money, limit = budget.unit is Unit.MONEY, budget.limit_at(at_ms)
    small = [hold.model for hold in needed if hold.microusd > limit] if budget.is_hard and is_money else []
    terms = {
        "rolling_s": budget.rolling_s or None,
        "time_zone": budget.time_zone or "UTC",
        "limit_now": limit,
        "limit_microusd": budget.limit if is_money else None,
        "raised_until_s": budget.raised_until_ms / 1000 if budget.raised_until_ms > at_ms else None,
        "too_small_for": small,
    }
    if state is None:
        return models.BudgetOut.of(budget, **terms)
    remaining = max(0, limit - state.spent - state.held)
    end_ms = None if budget.rolling_s else state.window.end_ms
    amounts = zip(_AMOUNTS, (state.spent, state.held, remaining, pace.per_day, pace.projected), strict=True)
    money = {f"{name}_microusd": None if amount is None else round(amount) for name, amount in amounts}
    return models.BudgetOut.of(
        budget,
        state,
        pace,
        **terms,
        **(money if is_money else {}),
        window_id=state.window.id,
        remaining=remaining,
        fullest=name_of(state) if budget.axis != "team" and budget.value is None else None,
        resets_at_s=None if end_ms is None else end_ms / 1000,
        used_up_at_s=None if pace.used_up_at_ms is None else pace.used_up_at_ms / 1000,
    )
