"""The months of the ledger: removed whole, while their sums stay; made at once by any number of writers."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import msgspec
import pytest
import sqlalchemy as sa

from gateway.accounts import LedgerRow, schema
from gateway.accounts.accounts import Accounts
from gateway.accounts.audit import LEDGER_DROPPED, Audit
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from gateway.accounts.months import forget, month_of
from policies import WindowKind
from policies.windows import window_at
from tests.accounts.test_ledger import hits_of, make_rows


@pytest.fixture
def ledger(accounts: Accounts) -> Ledger:
    return Ledger(accounts.database)


def ms(*at: int) -> int:
    return int(datetime(*at, tzinfo=UTC).timestamp() * 1000)  # type: ignore[misc,arg-type]


NOW_MS = ms(2026, 11, 27, 12)
MONTHS = [(2026, 8), (2026, 9), (2026, 10), (2026, 11)]


def rows_of_months() -> list[LedgerRow]:
    """Ten rows of each month: of its first and last moment, and between them."""
    rows = make_rows(40)
    months = [month for at in MONTHS if (month := month_of(ms(*at, 1)))]
    moments = [
        at_ms
        for month in months
        for at_ms in (month.start_ms, month.end_ms - 1, *(month.start_ms + day * 86_400_000 for day in range(8)))
    ]
    return [msgspec.structs.replace(row, at_ms=at_ms) for row, at_ms in zip(rows, moments, strict=True)]


async def test_a_month_is_removed_whole_and_its_sums_stay(ledger: Ledger) -> None:
    """Rows of months that ended 32 days ago are gone, once, with a row in the audit log; spend, savings and later rows stay;
    a row that comes late counts, and goes with the next look."""
    rows, groups = rows_of_months(), [[group] for group in (Group.TEAM, Group.KEY, Group.ALIAS, Group.DAY)]
    await ledger.append(rows)
    await ledger.append_hits([hits_of(ms(2026, 7, 3)), hits_of(ms(2026, 11, 3))])
    windows = [window_at(kind, NOW_MS) for kind in (WindowKind.MONTH, WindowKind.TOTAL)]
    before = [await ledger.totals(by) for by in groups], await ledger.savings(LedgerFilter())
    spent = await ledger.spent(windows)
    assert await forget(ledger.database, NOW_MS, None) == []
    assert await forget(ledger.database, NOW_MS, 32) == ["2026_07", "2026_08", "2026_09"]
    assert await forget(ledger.database, NOW_MS, 32) == []
    left = (await ledger.rows(LedgerFilter(), limit=100)).rows
    assert {row.id for row in left} == {row.id for row in rows if row.at_ms >= ms(2026, 10, 1)}
    async with ledger.database.reading() as connection:
        hits = (await connection.execute(sa.select(schema.ledger_hits.c.at_ms))).scalars().all()
    assert hits == [ms(2026, 11, 3)]
    assert ([await ledger.totals(by) for by in groups], await ledger.savings(LedgerFilter())) == before
    assert await ledger.spent(windows) == spent
    audit = await Audit(ledger.database).rows(10)
    assert [(row.action, row.entry) for row in audit] == [
        (LEDGER_DROPPED, month) for month in ("2026_09", "2026_08", "2026_07")
    ]
    late = msgspec.structs.replace(rows[0], id="late")
    assert await ledger.append([late]) == 1
    assert await forget(ledger.database, NOW_MS, 32) == ["2026_08"]
    [total] = await ledger.totals([])
    assert total.requests == 41


async def test_moments_of_no_month_are_kept(ledger: Ledger) -> None:
    """A row of 1970 or of the year 9999 is one like any other, and no month's removal takes it or waits for it."""
    first, last = (
        msgspec.structs.replace(row, at_ms=at_ms) for row, at_ms in zip(make_rows(2), (0, 2**53 - 1), strict=True)
    )
    rows = [first, *rows_of_months()[10:], last]
    assert await ledger.append(rows) == len(rows)
    assert await ledger.append(rows) == 0
    assert await forget(ledger.database, NOW_MS, 32) == ["2026_09"]
    left = (await ledger.rows(LedgerFilter(), limit=100)).rows
    assert (left[0], left[-1], len(left)) == (last, first, 22)


async def test_writers_at_once_make_a_month_once(ledger: Ledger) -> None:
    """Many writers begin the same months at once: none fails, and each row is there."""
    rows = rows_of_months()
    written = await asyncio.gather(*(ledger.append(rows[start::4]) for start in range(4)), ledger.append(rows))
    assert sum(written) == 40


async def test_spend_of_an_hour_is_read_from_sums(ledger: Ledger) -> None:
    """The hour's spend is that of its rows, and is known without them; old hours are forgotten."""
    rows = [msgspec.structs.replace(row, at_ms=NOW_MS + number * 300_000) for number, row in enumerate(make_rows(24))]
    await ledger.append(rows)
    hour = window_at(WindowKind.HOUR, NOW_MS)
    spent = {team.team_id: team.spent_microusd for team in await ledger.spent([hour])}
    assert sum(spent.values()) == sum(row.cost_microusd for row in rows[:12])
    async with ledger.database.writing() as connection:
        await connection.execute(sa.delete(schema.ledger))
    assert {team.team_id: team.spent_microusd for team in await ledger.spent([hour])} == spent
    await forget(ledger.database, NOW_MS + 41 * 86_400_000, None)
    assert not any(team.spent_microusd for team in await ledger.spent([hour]))


@pytest.mark.parametrize(
    ("at", "name"),
    [(ms(2026, 12, 31, 23, 59, 59), "2026_12"), (ms(2027, 1, 1), "2027_01"), (ms(2028, 2, 29), "2028_02")],
)
def test_a_month_holds_its_moments(at: int, name: str) -> None:
    """From its first moment to before the first of the next month."""
    month = month_of(at)
    assert month is not None
    assert month.name == name
    assert month.start_ms <= at < month.end_ms
    following = month_of(month.end_ms)
    assert following is not None
    assert following.start_ms == month.end_ms
