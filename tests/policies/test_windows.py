"""Windows: each moment in exactly one of each kind, named for ever."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import WindowKind
from policies.windows import CALENDAR, Budget, window_at, windows_at

moments_ms = st.integers(0, 4_000_000_000_000)


@given(moments_ms, st.sampled_from(CALENDAR))
def test_a_moment_lies_in_its_window_and_windows_touch(at_ms: int, kind: WindowKind) -> None:
    """The window holds the moment; its last millisecond has the same id, the next one another."""
    window = window_at(kind, at_ms)
    assert window.holds(at_ms)
    assert window_at(kind, window.start_ms) == window
    if window.end_ms is not None:
        assert window_at(kind, window.end_ms - 1) == window
        assert window_at(kind, window.end_ms).start_ms == window.end_ms
        assert window_at(kind, window.end_ms).id != window.id
        assert not window.holds(window.end_ms)


@given(moments_ms)
def test_ids_of_different_kinds_never_meet(at_ms: int) -> None:
    """The five windows of a moment have five ids: they share a namespace in Redis."""
    assert len({window.id for window in windows_at(at_ms)}) == len(CALENDAR)


@pytest.mark.parametrize(
    ("moment", "kind", "name"),
    [
        ("2026-11-21T13:59:59.999", WindowKind.HOUR, "2026-11-21T13"),
        ("2026-11-21T13:59:59.999", WindowKind.DAY, "2026-11-21"),
        ("2027-01-03T12:00:00", WindowKind.WEEK, "2026-W53"),
        ("2024-12-30T00:00:00", WindowKind.WEEK, "2025-W01"),
        ("2028-02-29T23:00:00", WindowKind.MONTH, "2028-02"),
        ("2026-12-31T23:59:59", WindowKind.MONTH, "2026-12"),
        ("2026-12-31T23:59:59", WindowKind.TOTAL, "total"),
    ],
)
def test_known_windows(moment: str, kind: WindowKind, name: str) -> None:
    """Calendar hours, days and months in UTC; weeks are ISO weeks, also around New Year."""
    at_ms = int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() * 1000)
    assert window_at(kind, at_ms).id == name


def test_a_month_ends_where_the_next_begins() -> None:
    """December ends on the first of January."""
    at_ms = int(datetime(2026, 12, 15, tzinfo=UTC).timestamp() * 1000)
    assert window_at(WindowKind.MONTH, at_ms).end_ms == int(datetime(2027, 1, 1, tzinfo=UTC).timestamp() * 1000)


@pytest.mark.parametrize(
    ("zone", "moment", "hours"),
    [
        ("Europe/Berlin", "2026-03-29T12:00:00", 23),
        ("Europe/Berlin", "2026-10-25T12:00:00", 25),
        ("Asia/Kolkata", "2026-10-25T12:00:00", 24),
        ("Australia/Lord_Howe", "2026-04-05T01:00:00", 24.5),
        ("Africa/Cairo", "2026-04-24T12:00:00", 23),  # its midnight is skipped
    ],
)
def test_days_of_a_time_zone_are_as_long_as_its_clocks_say(zone: str, moment: str, hours: float) -> None:
    """A day has 23 or 25 hours where the clocks change; windows touch, and have names of their own."""
    at_ms = int(datetime.fromisoformat(moment).replace(tzinfo=UTC).timestamp() * 1000)
    budget = Budget(1, 1, WindowKind.DAY, 1, time_zone=zone)
    day = budget.window_at(at_ms)
    assert day.end_ms is not None
    assert day.end_ms - day.start_ms == hours * 3_600_000
    assert budget.window_at(day.end_ms - 1) == budget.window_at(day.start_ms) == day
    assert budget.window_at(day.end_ms).start_ms == day.end_ms
    assert day.id != window_at(WindowKind.DAY, at_ms).id
    for kind in (WindowKind.WEEK, WindowKind.MONTH):
        longer = Budget(1, 1, kind, 1, time_zone=zone).window_at(at_ms)
        assert longer.start_ms <= day.start_ms
        assert longer.end_ms is not None
        assert longer.end_ms >= day.end_ms
