"""Budgets and the windows of time they count over.

Knows no Redis. Windows are calendar windows in UTC; a week is an ISO week. Invariant: every moment
lies in exactly one window of each kind, and a window's id never names another, so no count is reset
when a window ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache

from policies.prices import MicroUSD

HOUR_MS = 3_600_000


class WindowKind(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    TOTAL = "total"


PLACES = {kind: place for place, kind in enumerate(WindowKind)}
"""The position of each kind among a moment's windows."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window: [start_ms, end_ms) in unix milliseconds; `end_ms` is None for the window that
    never ends.
    """

    kind: WindowKind
    id: str
    start_ms: int
    end_ms: int | None

    def holds(self, at_ms: int) -> bool:
        """Whether `at_ms`, unix milliseconds, lies in the window."""
        return self.start_ms <= at_ms and (self.end_ms is None or at_ms < self.end_ms)


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on a team's spend per window.

    A hard budget refuses requests that could exceed it; a soft one warns.
    """

    id: int
    team_id: int
    window: WindowKind
    limit_microusd: MicroUSD
    is_hard: bool = True


def window_at(kind: WindowKind, at_ms: int) -> Window:
    """The window of `kind` that contains `at_ms`, unix milliseconds."""
    return windows_at(at_ms)[PLACES[kind]]


def windows_at(at_ms: int) -> tuple[Window, ...]:
    """The windows of all kinds that contain `at_ms`, unix milliseconds, in the order of
    `WindowKind`.
    """
    return _windows_of_hour(at_ms // HOUR_MS)


@lru_cache(maxsize=64)
def _windows_of_hour(hour: int) -> tuple[Window, ...]:
    """The windows of an hour, counted since 1970: every window begins with an hour, so an hour has
    one of each.
    """
    start = datetime.fromtimestamp(hour * 3600, UTC)
    midnight = start.replace(hour=0)
    monday = midnight - timedelta(days=midnight.weekday())
    year, week, _ = monday.isocalendar()
    first = midnight.replace(day=1)
    return (
        _window(WindowKind.HOUR, f"{start:%Y-%m-%dT%H}", start, start + timedelta(hours=1)),
        _window(WindowKind.DAY, f"{midnight:%Y-%m-%d}", midnight, midnight + timedelta(days=1)),
        _window(WindowKind.WEEK, f"{year}-W{week:02}", monday, monday + timedelta(days=7)),
        _window(WindowKind.MONTH, f"{first:%Y-%m}", first, (first + timedelta(days=32)).replace(day=1)),
        Window(WindowKind.TOTAL, "total", 0, None),
    )


def _window(kind: WindowKind, name: str, start: datetime, end: datetime) -> Window:
    return Window(kind, name, int(start.timestamp()) * 1000, int(end.timestamp()) * 1000)
