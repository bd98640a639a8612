"""Budgets and the windows of time they count over.

Knows no Redis. Calendar windows are in UTC or in a budget's time zone; a week is an ISO week, and a
day has 23 or 25 hours where the clocks change. A rolling window is counted in 48ths of its length.
Invariants: every moment lies in exactly one calendar window of each kind, and a window's id never
names another, so no count is reset when a window ends; a rolling count never leaves spend out that
lies in the window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

HOUR_MS = 3_600_000
BUCKETS = 48
"""The parts in which a rolling window is counted."""

_QUARTER_MS = 900_000  # offsets of time zones are whole quarters of an hour


class WindowKind(StrEnum):
    HOUR = "hour"
    DAY = "day"
    WEEK = "week"
    MONTH = "month"
    TOTAL = "total"
    ROLLING = "rolling"


_ROLLING = WindowKind.ROLLING  # an attribute of an enum costs a search
CALENDAR: tuple[WindowKind, ...] = tuple(kind for kind in WindowKind if kind is not _ROLLING)
"""The kinds that are counted for every team."""

PLACES = {kind: place for place, kind in enumerate(CALENDAR)}
"""The position of each kind among a moment's windows."""


@dataclass(frozen=True, slots=True)
class Window:
    """One window: [start_ms, end_ms) in unix milliseconds; `end_ms` is None for the window that
    never ends. A rolling window's `end_ms` is when all that it holds has left it.
    """

    kind: WindowKind
    id: str
    start_ms: int
    end_ms: int | None

    def holds(self, at_ms: int) -> bool:
        """Whether `at_ms`, unix milliseconds, lies in the window."""
        return self.start_ms <= at_ms and (self.end_ms is None or at_ms < self.end_ms)


class Unit(StrEnum):
    """What a budget counts: µUSD, tokens, or requests."""

    MONEY = "money"
    TOKENS = "tokens"
    REQUESTS = "requests"


class Overdraft(StrEnum):
    """What a hard budget does about an answer that may be longer than it has room for.

    `refuse` holds the longest answer, else refuses the request. `truncate` does so, and where only
    that is too much holds an answer of the usual length, which is cut there. `allow` holds the
    usual length and lets a longer answer pass the limit.
    """

    REFUSE = "refuse"
    TRUNCATE = "truncate"
    ALLOW = "allow"


TEAM, KEY, USER, ALIAS, DEPLOYMENT, TAG = "team", "key", "user", "alias", "deployment", "tag:"
"""The axes of budgets; the name of a tag follows `tag:`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on what the requests of a team may use in a window.

    A hard budget refuses requests that could exceed it; a soft one warns. `limit` is in `unit`. On
    an axis other than the team it limits `value` alone, or with None each value for itself; the
    value of a request without one is empty. `rolling_s` is the length of a rolling window.
    `raised_by` is added to the limit before `raised_until_ms`. Each reset raises `epoch`. Times are
    unix milliseconds. `is_shared`: it limits a count that every team has, with or without a budget.
    `may_cut`: an answer may be cut where there is no room for the longest.
    `_is_utc`: its windows are those of UTC; hours and the total are, in any zone.
    """

    id: int
    team_id: int
    window: WindowKind
    limit: int
    is_hard: bool = True
    axis: str = TEAM
    value: str | None = None
    unit: Unit = Unit.MONEY
    rolling_s: int = 0
    overdraft: Overdraft = Overdraft.REFUSE
    raised_by: int = 0
    raised_until_ms: int = 0
    epoch: int = 0
    begun_ms: int = field(default=0, compare=False)  # it was made or reset then; 0: not known
    time_zone: str = ""
    is_shared: bool = field(init=False, compare=False, repr=False)
    may_cut: bool = field(init=False, compare=False, repr=False)
    _is_utc: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        is_utc = self.time_zone in ("", "UTC") or self.window in (WindowKind.HOUR, WindowKind.TOTAL)
        object.__setattr__(self, "_is_utc", is_utc)
        object.__setattr__(self, "may_cut", self.overdraft is Overdraft.TRUNCATE)
        is_plain = self.axis == TEAM and self.unit is Unit.MONEY and self.window is not _ROLLING
        object.__setattr__(self, "is_shared", is_plain and not self.epoch and is_utc)

    def limit_at(self, at_ms: int) -> int:
        """The limit at a moment, with a raise that is in force."""
        return self.limit + self.raised_by if at_ms < self.raised_until_ms else self.limit

    def window_at(self, at_ms: int) -> Window:
        """The budget's window that contains `at_ms`, unix milliseconds."""
        if self.window is _ROLLING:
            length_ms = self.rolling_s * 1000
            return Window(self.window, f"rolling-{self.rolling_s}", at_ms - length_ms, at_ms + length_ms)
        if self._is_utc:
            return _windows_of_hour(at_ms // HOUR_MS)[PLACES[self.window]]
        return _zoned(self.window, at_ms // _QUARTER_MS, self.time_zone)

    def bucket_at(self, at_ms: int) -> int:
        """The number of the part of time in which a rolling window counts `at_ms`."""
        return at_ms * BUCKETS // (self.rolling_s * 1000)


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


@lru_cache(maxsize=1024)
def _zoned(kind: WindowKind, quarter: int, zone: str) -> Window:
    """The calendar window of a time zone that contains a quarter of an hour, counted since 1970.

    It begins with the first moment of a local date, also where midnight is skipped or comes twice.
    """
    at_s = quarter * _QUARTER_MS // 1000
    today = datetime.fromtimestamp(at_s, ZoneInfo(zone)).date()
    match kind:
        case WindowKind.DAY:
            first, last = today, today + timedelta(days=1)
        case WindowKind.WEEK:
            first = today - timedelta(days=today.weekday())
            last = first + timedelta(days=7)
        case _:
            first = today.replace(day=1)
            last = (first + timedelta(days=32)).replace(day=1)
    return Window(kind, f"{kind.value}-{first}@{zone}", _starts_ms(first, zone), _starts_ms(last, zone))


def _starts_ms(day: date, zone: str) -> int:
    return int(datetime(day.year, day.month, day.day, tzinfo=ZoneInfo(zone)).timestamp()) * 1000
