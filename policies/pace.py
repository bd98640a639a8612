"""How fast a budget is used, and when it will be used up at that rate.

A pure function of a budget's state. Invariant: it makes no projection too early in a window.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.holds import BudgetState
from policies.windows import SESSION, WindowKind

_DAY_MS = 86_400_000
_PASSED_MIN = 0.02  # of a window, before a rate means something
_PASSED_MIN_MS = 3_600_000  # of a budget without an end, and of a team


@dataclass(frozen=True, slots=True)
class Pace:
    """The rate of a budget's use. `per_day` and `projected`, the use at the window's end, are in the
    budget's unit; None if unknown, or without an end.

    `used_up_at_ms` is when the limit is reached; None if the window ends before, or never.
    """

    per_day: float | None = None
    projected: float | None = None
    used_up_at_ms: int | None = None


def pace_of(state: BudgetState, at_ms: int, last_day: int | None = None, team_made_ms: int = 0) -> Pace:
    """The pace of a budget at `at_ms`, unix milliseconds: its spend over the elapsed time, or where a
    window is longer, `last_day`, its use in the last 24 hours. No time counts before its team was made.
    """
    budget, window = state.budget, state.window
    if budget.window is WindowKind.ROLLING:
        passed_ms = min(budget.rolling_s * 1000, at_ms - budget.begun_ms)
        return Pace(state.spent * _DAY_MS / passed_ms) if passed_ms >= _PASSED_MIN_MS else Pace()
    if budget.axis == SESSION and window.end_ms is None:
        return Pace()  # when it began is not known
    if last_day is not None and (window.end_ms is None or window.end_ms - window.start_ms > 2 * _DAY_MS):
        passed_ms = at_ms - team_made_ms
        return Pace() if passed_ms < _PASSED_MIN_MS else _at_rate(state, at_ms, last_day / min(_DAY_MS, passed_ms))
    is_whole = budget.is_shared and window.end_ms is not None
    start_ms = max(window.start_ms, team_made_ms if is_whole else budget.begun_ms)
    passed_ms = at_ms - start_ms
    least_ms = _PASSED_MIN_MS if window.end_ms is None else (window.end_ms - window.start_ms) * _PASSED_MIN
    if not start_ms or passed_ms < max(least_ms, 1):
        return Pace()
    return _at_rate(state, at_ms, state.spent / passed_ms)


def _at_rate(state: BudgetState, at_ms: int, per_ms: float) -> Pace:
    end_ms, amount_left = state.window.end_ms, state.budget.limit_at(at_ms) - state.spent
    projected = None if end_ms is None else state.spent + per_ms * (end_ms - at_ms)
    if amount_left <= 0 or not per_ms:
        return Pace(per_ms * _DAY_MS, projected)
    used_up_at_ms = at_ms + amount_left / per_ms
    is_within = used_up_at_ms < (float(2**53) if end_ms is None else end_ms)
    return Pace(per_ms * _DAY_MS, projected, int(used_up_at_ms) if is_within else None)
