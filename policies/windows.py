"""Budgets, and the time windows over which they count.

Knows no Redis. Calendar windows are in UTC or in a budget's time zone; a week is an ISO week, and a
day has 23 or 25 hours if the clocks change. A rolling window is counted in 48ths of its length.
Invariants: every time lies in exactly one calendar window of each kind, and a window's id never
names another, so no count is reset when a window ends; a rolling count includes all spend in the
window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

HOUR_MS = 3_600_000
BUCKETS = 48
"""The number of buckets in a rolling window."""

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
    """One window: [start_ms, end_ms) in unix milliseconds; `end_ms` None: it never ends.

    A rolling window's `end_ms` is when all of its present spend has expired.
    """

    kind: WindowKind
    id: str
    start_ms: int
    end_ms: int | None

    def holds(self, at_ms: int) -> bool:
        """Whether `at_ms`, unix milliseconds, lies in the window."""
        return self.start_ms <= at_ms and (self.end_ms is None or at_ms < self.end_ms)


class Unit(StrEnum):
    """The unit of a budget: µUSD, tokens, or requests."""

    MONEY = "money"
    TOKENS = "tokens"
    REQUESTS = "requests"


class Overdraft(StrEnum):
    """How a hard budget treats an answer that may be longer than its room.

    `refuse` holds the longest answer, or refuses the request. `truncate` holds the longest answer,
    or else an answer of the usual length, at which the answer is cut. `allow` holds the usual
    length and lets a longer answer exceed the limit.
    """

    REFUSE = "refuse"
    TRUNCATE = "truncate"
    ALLOW = "allow"


TEAM, KEY, USER, ALIAS, DEPLOYMENT, SESSION, TAG = "team", "key", "user", "alias", "deployment", "session", "tag:"
"""The axes of budgets; the name of a tag follows `tag:`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """A limit on the use of a team's requests in a window.

    A hard budget refuses requests that could exceed it; a soft budget warns. `limit` is in `unit`.
    On an axis other than the team it limits `value` alone, or with None each value separately; a
    request without a value has an empty one. `rolling_s` is the length of a rolling window.
    `raised_by` is added to the limit before `raised_until_ms`. Each reset increments `epoch`. Times
    are unix milliseconds. `is_shared`: it limits a count that every team has, with or without a
    budget. `may_cut`: an answer may be cut if the longest does not fit. `_is_utc`: its windows are
    UTC's, as hours and the total are in any zone.
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
        """The limit at `at_ms`, including an active raise."""
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
        """The number of the rolling window's bucket that contains `at_ms`."""
        return at_ms * BUCKETS // (self.rolling_s * 1000)


def window_at(kind: WindowKind, at_ms: int) -> Window:
    """The window of `kind` that contains `at_ms`, unix milliseconds."""
    return windows_at(at_ms)[PLACES[kind]]


def windows_at(at_ms: int) -> tuple[Window, ...]:
    """The calendar windows of all kinds that contain `at_ms`, unix milliseconds, in `CALENDAR`'s
    order.
    """
    return _windows_of_hour(at_ms // HOUR_MS)


@lru_cache(maxsize=64)
def _windows_of_hour(hour: int) -> tuple[Window, ...]:
    """The windows of an hour, counted since 1970.

    Every window begins with an hour, so an hour lies in one window of each kind.
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
    """A time zone's calendar window that contains a quarter of an hour, counted since 1970.

    It begins with the first moment of a local date, also if midnight is skipped or repeated.
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
