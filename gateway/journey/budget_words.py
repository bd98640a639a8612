"""What a budget is and why it refuses a request, in words for a client and an admin.

Knows no Redis and no ledger.
"""

from datetime import UTC, datetime

from gateway.accounts import Identity
from gateway.wire.errors import BudgetExceeded, SessionSpent
from policies import Budget, Refused
from policies.durations import duration_s
from policies.holds import BudgetState
from policies.prices import dollars
from policies.windows import SESSION, TEAM, Unit, Window, WindowKind


def refusal_of(identity: Identity, refused: Refused) -> BudgetExceeded:
    """The error of a request that a budget refuses: which one, what is left of it and when it has room again."""
    state, budget, limit = refused.state, refused.state.budget, refused.limit
    window, is_money = window_words(budget), budget.unit is Unit.MONEY
    verb, does = ("is", "cost") if is_money else ("are", "use")
    message = (
        f"Team {identity.team.name} has {'an' if window == 'hour' else 'a'} {window} budget of "
        f"{amount_words(limit, budget.unit)}{subject_words(state)}: {amount_words(state.spent, budget.unit)} {verb} spent, "
        f"{amount_words(state.held, budget.unit)} {verb} held by requests under way, and this request may {does} "
        f"{amount_words(refused.amount, budget.unit)}."
    )
    is_run = budget.axis == SESSION and refused.resets_in_s is None
    if refused.amount > limit and budget.unit is not Unit.REQUESTS:  # it does not fit a new window either
        message += " That is more than the whole budget: ask for a shorter answer with `max_tokens`."
        return (SessionSpent if is_run else BudgetExceeded)(message, None)
    if is_run:
        remedy = "a new session has a budget of its own, and your admin can raise this one"
        return SessionSpent(f"{message} Stop here and tell your user: {remedy}.", None)
    if refused.resets_in_s is None:
        return BudgetExceeded(f"{message} It does not reset by itself: ask your admin to raise or reset it.", None)
    does = "has room again" if budget.window is WindowKind.ROLLING else "resets"
    message += f" The budget {does} in {duration_s(refused.resets_in_s)}{_at(state.window)}."
    return BudgetExceeded(message, refused.resets_in_s)


def window_words(budget: Budget) -> str:
    """The window of a budget as an adjective: `day`, `total`, `rolling 24h`."""
    if budget.window is not WindowKind.ROLLING:
        return budget.window.value
    return f"rolling {duration_s(budget.rolling_s)}"


def amount_words(amount: int, unit: Unit) -> str:
    """An amount with its unit."""
    return f"${dollars(amount)}".rstrip("0").rstrip(".") if unit is Unit.MONEY else f"{amount:,} {unit.value}"


def subject_words(state: BudgetState) -> str:
    """What a budget limits, other than the team: ` for the user alice`."""
    budget = state.budget
    if budget.axis == TEAM:
        return ""
    axis = budget.axis.replace("tag:", "tag ", 1)
    if budget.value is not None:
        value = budget.value or "requests without one"
    else:
        value = {"-": "requests without one", "*": "values beyond those counted apart"}.get(state.value) or state.value[
            1:
        ]
    return f" for the {axis} {value}" if not value.startswith(("requests ", "values ")) else f" for the {axis}, {value}"


def _at(window: Window) -> str:
    if window.end_ms is None or window.kind is WindowKind.ROLLING:
        return ""
    return f", at {datetime.fromtimestamp(window.end_ms / 1000, UTC):%Y-%m-%d %H:%M} UTC"
