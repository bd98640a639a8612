"""Sums of the ledger by one axis: equal to its rows, whatever was written when."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts import HitsRow, Invalid, LedgerRow
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from gateway.accounts.rollups import OTHER, SPANS, TAG_NAMES_MAX, periods
from gateway.accounts.row import SUMS, columns_of
from policies.budgets import VALUES_MAX
from tests.accounts.test_ledger import DAY_MS, NOON_MS, make_rows


def labelled(count: int, seed: int = 0) -> list[LedgerRow]:
    """Rows over 300 days with users and tags, of which most requests lack some."""
    chance = random.Random(seed)
    return [
        msgspec.structs.replace(
            row,
            at_ms=NOON_MS - chance.randrange(300 * DAY_MS),
            user=chance.choice(["", "alice", "bob", "*", "=x"]),
            tags=chance.choice(["", '{"project":"x"}', '{"project":"y","step":"1"}', '{"step":"*"}']),
            kind=chance.choice(["chat", "correction"]),
        )
        for row in make_rows(count, seed)
    ]


def amounts(row: LedgerRow) -> list[int]:
    return [int(row.kind != "correction"), *columns_of(SUMS[1:])(row)]


def value_of(row: LedgerRow, group: Group, tag: str | None) -> list[Any]:
    """The groups that a row counts in."""
    if group is Group.DAY:
        return [row.at_ms // DAY_MS]
    if group is Group.USER:
        return [f"={row.user}" if row.user else ""]
    if group is not Group.TAG:
        return [getattr(row, group)]
    if tag is None:
        return [f"={name}" for name in row.tags_by_name()]
    return [f"={value}" for name, value in row.tags_by_name().items() if name == tag]


async def check(ledger: Ledger, rows: list[LedgerRow], by: tuple[Group, ...], where: LedgerFilter) -> None:
    wanted: dict[tuple[Any, ...], list[int]] = defaultdict(lambda: [0] * len(SUMS))
    first = 0 if where.from_ms is None else where.from_ms // DAY_MS
    end = 10**9 if where.until_ms is None else -(-where.until_ms // DAY_MS)
    for row in rows:
        if not first <= row.at_ms // DAY_MS < end or where.team_id not in (None, row.team_id):
            continue
        for key in product(*(value_of(row, group, where.tag) for group in by)):
            wanted[key] = [have + more for have, more in zip(wanted[key], amounts(row), strict=True)]
    found = {}
    for total in await ledger.totals(by, where):
        key = tuple(getattr(total, group) for group in by)
        found[key] = [getattr(total, name) for name in SUMS]
    if Group.DAY in by:
        place = by.index(Group.DAY)
        days = {day: _iso(day) for key in wanted for day in [key[place]]}
        wanted = defaultdict(list, {(*k[:place], days[k[place]], *k[place + 1 :]): v for k, v in wanted.items()})
    assert found == dict(wanted)


def _iso(day: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(day * 86_400, UTC).date().isoformat()


AXES = (Group.TEAM, Group.KEY, Group.ALIAS, Group.DEPLOYMENT, Group.USER, Group.TAG, Group.DAY)
MORE = ((Group.TEAM, Group.USER), (Group.USER, Group.DAY), (Group.TEAM, Group.TAG, Group.DAY))


async def test_sums_by_every_axis_are_those_of_the_rows(accounts: Accounts) -> None:
    """In batches that overlap, with corrections, over any days, of all teams or one."""
    ledger, rows = Ledger(accounts.database), labelled(400)
    for start in (0, 100, 150, 250):
        await ledger.append(rows[start : start + 150])
    spans = ((None, None), (NOON_MS - 30 * DAY_MS, NOON_MS), (NOON_MS - 123 * DAY_MS, NOON_MS - 40 * DAY_MS))
    for by in [(axis,) for axis in AXES] + list(MORE):
        for from_ms, until_ms in spans:
            for team_id in (None, 2):
                await check(ledger, rows, by, LedgerFilter(team_id=team_id, from_ms=from_ms, until_ms=until_ms))
    for by in (*MORE, (Group.KEY,), (Group.TEAM, Group.KEY, Group.DEPLOYMENT), ()):  # those of files, page by page
        pages = [one async for one in ledger.each_total(by, LedgerFilter(), page=7)]
        assert sorted(pages, key=str) == sorted(await ledger.totals(by, most=10_000), key=str), by
    await check(ledger, rows, (Group.TAG,), LedgerFilter(tag="step"))
    [one] = await ledger.totals([], LedgerFilter(tag="project", tag_value="y", team_id=1))
    assert one.requests == sum(
        row.tags_by_name().get("project") == "y" and row.team_id == 1 and row.kind == "chat" for row in rows
    )
    [alice] = await ledger.totals([], LedgerFilter(user="alice"))
    assert alice.cost_microusd == sum(row.cost_microusd for row in rows if row.user == "alice")
    with pytest.raises(Invalid, match="by"):
        await ledger.totals([Group.USER, Group.KEY])


async def test_hits_and_checks_are_summed_as_rows_are(accounts: Accounts) -> None:
    """Two writers at once, with ids again: by each axis a hit stands beside what was generated, a question to a
    verifier is part of the cost, and both are in what was saved, unless a baseline is not known; of a day without rows, too."""
    ledger, base = Ledger(accounts.database), make_rows(1)[0]
    rows = [
        msgspec.structs.replace(
            base, id=f"r{number}", team_id=1, key_id=2, at_ms=NOON_MS, user="ann", tags='{"app":"web"}', cost_microusd=10,
            region="eu", session="run-2", kind=("chat", "verify", "check")[number % 3],
            baseline_microusd=(12, 0, None)[number % 3],
        )
        for number in range(60)
    ]  # fmt: skip
    hits = [
        HitsRow(
            id=f"h{number}.{key_id}", at_ms=NOON_MS + DAY_MS * (number % 2), team_id=1, alias=base.alias, source="exact",
            unknown=1, key_id=key_id, user=user, tags=tags, session=f"run-{key_id}", requests=requests, baseline_microusd=saved,
        )
        for number in range(40)
        for key_id, user, tags, requests, saved in ((2, "ann", '{"app":"web"}', 1, 5), (3, f"u{number}", "", 2, 3))
    ]  # fmt: skip
    await asyncio.gather(
        *(ledger.append(rows[start : start + 30]) for start in (0, 20, 30)),
        *(ledger.append_hits(hits[start : start + 30]) for start in (0, 20, 50)),
    )
    wanted = {
        Group.TEAM: {1: (60, 120, 160, 400)},
        Group.KEY: {2: (60, 40, 40, 400), 3: (0, 80, 120, 0)},
        Group.ALIAS: {base.alias: (60, 120, 160, 400)},
        Group.DEPLOYMENT: {base.deployment: (60, 0, -160, 400), "": (0, 120, 320, 0)},
        Group.REGION: {"eu": (60, 0, -160, 400)},
        Group.USER: {"=ann": (60, 40, 40, 400)} | {f"=u{number}": (0, 2, 3, 0) for number in range(40)},
        Group.TAG: {"=app": (60, 40, 40, 400)},
        Group.SESSION: {"run-2": (60, 40, 40, 400), "run-3": (0, 80, 120, 0)},
        Group.DAY: {"2026-11-21": (60, 60, 0, 400), "2026-11-22": (0, 60, 160, 0)},
    }
    for group, sums in wanted.items():
        found = {getattr(one, group): one for one in await ledger.totals([group])}
        assert {
            value: (one.requests, one.hits, one.saved_microusd, one.checks_microusd) for value, one in found.items()
        } == sums, group
    whole = await ledger.totals([Group.KEY, Group.ALIAS], LedgerFilter(key_id=3))
    assert [(one.hits, one.saved_microusd) for one in whole] == [(80, 120)]


async def test_users_and_tags_beyond_the_bound_share_one_sum(accounts: Accounts) -> None:
    """A client that invents users, values and names of tags adds a bounded number of rows and loses no money;
    those that had a row keep it."""
    ledger, base = Ledger(accounts.database), make_rows(1)[0]
    names = [f'{{"n{number % 40}":"v{number}","run":"r{number}"}}' for number in range(VALUES_MAX + 300)]
    rows = [
        msgspec.structs.replace(base, id=f"u{number}", user=f"u{number}", tags=tags, cost_microusd=7)
        for number, tags in enumerate(names)
    ]
    await ledger.append([msgspec.structs.replace(base, id="first", user="", tags='{"run":"r0"}', cost_microusd=1)])
    for start in range(0, len(rows), 500):
        await ledger.append(rows[start : start + 500])
    again = msgspec.structs.replace(base, id="again", user="u0", cost_microusd=5)
    await ledger.append([again, msgspec.structs.replace(again, id="more", user="late")])
    users = {total.user: total.cost_microusd for total in await ledger.totals([Group.USER])}
    assert (len(users), users["=u0"], users[OTHER]) == (VALUES_MAX + 2, 12, 300 * 7 + 5)
    tags = {total.tag: total.requests for total in await ledger.totals([Group.TAG])}
    assert len(tags) == TAG_NAMES_MAX + 1
    assert sum(users.values()) == sum(row.cost_microusd for row in rows) + 11
    runs = await ledger.totals([Group.TAG], LedgerFilter(tag="run"))
    assert (len(runs), sum(total.requests for total in runs)) == (VALUES_MAX + 1, VALUES_MAX + 301)


@given(first=st.integers(0, 30_000), days=st.integers(0, 3_000))
def test_periods_are_the_days_once(first: int, days: int) -> None:
    """They hold each day of the span once and no other, in few parts."""
    found = periods(first, first + days)
    held = [
        day
        for period in found
        for level, number in [divmod(period, 10**9)]
        for day in range(number * SPANS[level], (number + 1) * SPANS[level])
    ]
    assert held == list(range(first, first + days))
    assert len(found) <= 28 + days // SPANS[-1]
