"""Budgets for the API and the pages: as they stand, and what an admin does with them.

Knows no HTTP. Invariant: a raise and a reset write a row of the audit log, or do not happen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from redis.exceptions import RedisError

from gateway import accounts
from gateway.accounts.audit import BUDGET_RAISED, BUDGET_RESET
from gateway.admin import models
from gateway.admin.format import utc
from gateway.admin.parts import AdminParts
from gateway.journey.budget import amount_words
from policies import Budget
from policies.holds import BudgetState
from policies.pace import pace_of
from policies.windows import Unit

_LIMITS = {"limit_microusd": Unit.MONEY, "limit_tokens": Unit.TOKENS, "limit_requests": Unit.REQUESTS}
_VALUES_SHOWN = 100


def holds(parts: AdminParts) -> list[models.HoldOut]:
    """What a short question holds of a budget, by model: the most of its deployments."""
    found: dict[str, models.HoldOut] = {}
    for one in parts.deployments():
        hold = models.HoldOut(model=one.alias, microusd=one.hold_microusd, output_tokens=one.hold_output_tokens)
        if one.alias not in found or found[one.alias].microusd < hold.microusd:
            found[one.alias] = hold
    return list(found.values())


async def budgets(
    parts: AdminParts, team_id: int | None = None, among: Collection[int] | None = None
) -> list[models.BudgetOut]:
    """All budgets, or those of one team or of the teams `among`, with their current use; without it while Redis is away."""
    found = await parts.accounts.list_budgets(team_id)
    return await _in_use(parts, [one for one in found if among is None or one.team_id in among])


async def _in_use(parts: AdminParts, found: Sequence[Budget]) -> list[models.BudgetOut]:
    needed = holds(parts)
    try:
        states: Sequence[BudgetState | None] = await parts.budgets.spent(found)
    except RedisError:
        states = [None] * len(found)
    at_ms = int(parts.clock() * 1000)
    return [_out(budget, state, needed, at_ms) for budget, state in zip(found, states, strict=True)]


async def one(parts: AdminParts, budget_id: int) -> models.BudgetOut:
    """One budget with its current use. Raises accounts.DoesNotExist."""
    (found,) = await _in_use(parts, [await _definition(parts, budget_id)])
    return found


async def _definition(parts: AdminParts, budget_id: int) -> Budget:
    for budget in await parts.accounts.list_budgets():
        if budget.id == budget_id:
            return budget
    raise accounts.DoesNotExist(f"there is no budget {budget_id}")


async def values(parts: AdminParts, budget_id: int) -> models.BudgetValuesOut:
    """The values of a budget with the most use. Raises accounts.DoesNotExist, RedisError."""
    found = await _definition(parts, budget_id)
    states = sorted(await parts.budgets.states([found]), key=lambda state: -(state.spent + state.held))
    shown = [state for state in states if state.spent or state.held][:_VALUES_SHOWN]
    return models.BudgetValuesOut(
        values=[models.BudgetValueOut(value=name_of(s), spent=s.spent, held=s.held) for s in shown],
        values_total=sum(state.value not in ("", "*") for state in states),
    )


async def change(parts: AdminParts, budget_id: int, body: models.BudgetPatch) -> models.BudgetOut:
    """Change the fields that were sent. Raises accounts.Invalid, accounts.DoesNotExist."""
    given = body.given()
    limits = {name: given.pop(name) for name in _LIMITS if given.get(name) is not None}
    if limits:
        budget = await one(parts, budget_id)
        for name in limits:
            if _LIMITS[name] is not budget.unit:
                raise accounts.Invalid(name, f"this budget counts {budget.unit}, and its unit cannot change")
        given["limit"] = next(iter(limits.values()))
    given = {name: value for name, value in given.items() if name not in _LIMITS}
    await parts.accounts.update_budget(budget_id, **given)
    return await one(parts, budget_id)


def fields_of(body: models.BudgetIn) -> dict[str, Any]:
    """The fields of a new budget. Raises accounts.Invalid without exactly one limit."""
    given = body.model_dump()
    limits = {name: value for name in _LIMITS if (value := given.pop(name)) is not None}
    if len(limits) != 1:
        raise accounts.Invalid("limit_microusd", "expected exactly one of limit_microusd, limit_tokens, limit_requests")
    ((name, limit),) = limits.items()
    return {**given, "unit": _LIMITS[name], "limit": limit}


def team_fields(body: models.NewTeamIn) -> dict[str, Any]:
    """The fields of a new team, with those of its first budget. Raises accounts.Invalid."""
    return body.given() | ({"budget": fields_of(body.budget)} if body.budget is not None else {})


async def raise_limit(
    parts: AdminParts, budget_id: int, body: models.BudgetRaiseIn, client: str, way: str
) -> models.BudgetOut:
    """Raise the limit until a moment. Raises accounts.Invalid, accounts.DoesNotExist."""
    budget = await one(parts, budget_id)
    if body.until_s <= parts.clock() and body.by:
        raise accounts.Invalid("until_s", "expected a moment that has not passed")
    what = f"budget {budget_id}: {amount_words(body.by, budget.unit)} more until {utc(body.until_s)}"
    row = parts.audit_row(BUDGET_RAISED, what, client, way, budget.team_id)
    await parts.accounts.raise_budget(budget_id, body.by, int(body.until_s * 1000), row)
    return await one(parts, budget_id)


async def reset(parts: AdminParts, budget_id: int, client: str, way: str) -> models.BudgetOut:
    """Count from 0 again. Raises accounts.DoesNotExist."""
    budget = await one(parts, budget_id)
    spent = "an unknown amount" if budget.spent is None else amount_words(budget.spent, budget.unit)
    row = parts.audit_row(BUDGET_RESET, f"budget {budget_id}: {spent} was spent", client, way, budget.team_id)
    await parts.accounts.reset_budget(budget_id, row)
    return await one(parts, budget_id)


def name_of(state: BudgetState) -> str | None:
    """The value of a state: empty for requests without one, None for those that share a count."""
    if state.budget.value is not None or not state.value:
        return state.budget.value or ""
    return None if state.value == "*" else state.value[1:]


def _out(budget: Budget, state: BudgetState | None, needed: Sequence[models.HoldOut], at_ms: int) -> models.BudgetOut:
    """One budget on the wire."""
    is_money, limit = budget.unit is Unit.MONEY, budget.limit_at(at_ms)
    out = models.BudgetOut(
        id=budget.id,
        team_id=budget.team_id,
        window=budget.window,
        rolling_s=budget.rolling_s or None,
        time_zone=budget.time_zone or "UTC",
        axis=budget.axis,
        value=budget.value,
        unit=budget.unit,
        limit=budget.limit,
        limit_now=limit,
        limit_microusd=budget.limit if is_money else None,
        is_hard=budget.is_hard,
        overdraft=budget.overdraft,
        raised_by=budget.raised_by,
        raised_until_s=budget.raised_until_ms / 1000 if budget.raised_until_ms > at_ms else None,
    )
    if budget.is_hard and is_money:
        out.too_small_for = [hold.model for hold in needed if hold.microusd > limit]
    if state is None:
        return out
    pace, remaining = pace_of(state, at_ms), max(0, limit - state.spent - state.held)
    is_rolling = bool(budget.rolling_s)
    return out.model_copy(
        update={
            "window_id": state.window.id,
            "spent": state.spent,
            "held": state.held,
            "remaining": remaining,
            "spent_microusd": state.spent if is_money else None,
            "held_microusd": state.held if is_money else None,
            "remaining_microusd": remaining if is_money else None,
            "fullest": name_of(state) if budget.axis != "team" and budget.value is None else None,
            "resets_at_s": None if state.window.end_ms is None or is_rolling else state.window.end_ms / 1000,
            "per_day": pace.per_day,
            "used_up_at_s": None if pace.used_up_at_ms is None else pace.used_up_at_ms / 1000,
        }
    )
