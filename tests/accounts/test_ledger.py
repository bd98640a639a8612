"""The ledger in SQL, on both databases: once per id, summed by day, and asked in pages."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from datetime import UTC, datetime
from itertools import combinations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts import HitsRow, Invalid, LedgerRow, decode_row, encode_row
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from policies import Usage, WindowKind
from policies.windows import window_at, windows_at

NOON_MS = int(datetime(2026, 11, 21, 12, tzinfo=UTC).timestamp() * 1000)
DAY_MS = 86_400_000


@pytest.fixture
def ledger(accounts: Accounts) -> Ledger:
    return Ledger(accounts.database)


def hits_of(at_ms: int) -> HitsRow:
    """Two hits at `at_ms` that saved 5 µUSD."""
    return HitsRow(
        id=f"h{at_ms}",
        at_ms=at_ms,
        team_id=1,
        key_id=1,
        alias="a",
        source="exact",
        requests=2,
        unknown=0,
        baseline_microusd=5,
    )


def make_rows(count: int, seed: int = 0) -> list[LedgerRow]:
    chance = random.Random(seed)
    return [
        LedgerRow(
            id=f"{seed}-{i}",
            at_ms=NOON_MS - chance.randrange(4 * DAY_MS),
            request_id=f"r{i}",
            team_id=chance.randrange(1, 4),
            key_id=chance.randrange(1, 6),
            alias=chance.choice(["small", "large"]),
            deployment=chance.choice(["local", "far"]),
            usage=Usage(chance.randrange(1000), chance.randrange(500), chance.randrange(100)),
            cost_microusd=chance.randrange(10_000),
            kind=chance.choice(["generation", "embedding"]),
        )
        for i in range(count)
    ]


async def test_a_row_is_written_once_per_id(ledger: Ledger) -> None:
    """Repeated rows, within a batch and between batches, change neither rows nor sums."""
    rows = make_rows(300)
    assert await ledger.append([]) == 0
    assert await ledger.append([*rows[:200], *rows[:50]]) == 200
    assert await ledger.append(rows) == 100
    [total] = await ledger.totals([])
    assert total.requests == 300
    assert total.cost_microusd == sum(row.cost_microusd for row in rows)


async def test_writers_at_once_agree(ledger: Ledger) -> None:
    """Overlapping batches of concurrent writers end up in SQL once, and so do their sums."""
    rows = make_rows(400)
    written = await asyncio.gather(*(ledger.append(rows[start : start + 250]) for start in (0, 50, 100, 150)))
    assert sum(written) == 400
    [total] = await ledger.totals([])
    assert (total.requests, total.completion_tokens) == (400, sum(row.usage.completion_tokens for row in rows))


async def test_cancelled_writers_leave_the_database_free(ledger: Ledger) -> None:
    """A writer cancelled anywhere has written its batch whole or not at all, and blocks nobody after it."""
    rows = make_rows(150)
    chance = random.Random(3)
    for start in range(0, 150, 5):
        task = asyncio.create_task(ledger.append(rows[start : start + 5]))
        await asyncio.sleep(chance.random() * 0.004)
        task.cancel()
        await asyncio.wait([task])
    found = {row.id for row in (await ledger.rows(LedgerFilter(), limit=200)).rows}
    assert all(len({row.id for row in rows[start : start + 5]} & found) in (0, 5) for start in range(0, 150, 5))
    assert await ledger.append(rows) == 150 - len(found)


async def test_pages_hold_every_row_once_newest_first(ledger: Ledger) -> None:
    """Following the cursor visits all rows of the filter in order, also where moments are equal."""
    rows = [msgspec.structs.replace(row, at_ms=row.at_ms // DAY_MS * DAY_MS) for row in make_rows(120)]
    await ledger.append(rows)
    where = LedgerFilter(team_id=2, from_ms=NOON_MS - 3 * DAY_MS, until_ms=NOON_MS - DAY_MS)
    found: list[LedgerRow] = []
    cursor = None
    while True:
        page = await ledger.rows(where, limit=7, cursor=cursor)
        found += page.rows
        cursor = page.cursor
        if cursor is None:
            break
        assert len(page.rows) == 7
    wanted = [row for row in rows if row.team_id == 2 and NOON_MS - 3 * DAY_MS <= row.at_ms < NOON_MS - DAY_MS]
    assert [row.at_ms for row in found] == sorted((row.at_ms for row in wanted), reverse=True)
    assert sorted(found, key=lambda row: row.id) == sorted(wanted, key=lambda row: row.id)
    assert len(found) > 14


async def test_rows_of_a_user_or_a_tag(ledger: Ledger) -> None:
    """A filter by user, by a tag's name and by its value; a value that spells another tag is no such tag."""
    labels = (("ada", '{"env":"prod"}'), ("ada", '{"env":"a_b"}'), ("bob", r'{"note":"\"env\":\"prod\""}'), ("", ""))
    rows = make_rows(len(labels))
    await ledger.append(
        [msgspec.structs.replace(row, user=u, tags=t) for row, (u, t) in zip(rows, labels, strict=True)]
    )
    for where, expected in (
        (LedgerFilter(user="ada"), [0, 1]),
        (LedgerFilter(tag="env"), [0, 1]),
        (LedgerFilter(tag="env", tag_value="prod"), [0]),
        (LedgerFilter(tag="env", tag_value="axb"), []),
        (LedgerFilter(tag="env", tag_value="Prod"), []),
        (LedgerFilter(tag="note", user="ada"), []),
    ):
        found = {row.id for row in (await ledger.rows(where)).rows}
        assert found == {rows[index].id for index in expected}


async def test_filters_join(ledger: Ledger) -> None:
    """Every field of a filter narrows."""
    rows = make_rows(200)
    await ledger.append(rows)
    where = LedgerFilter(team_id=1, key_id=2, alias="small", deployment="far")
    names = ("team_id", "key_id", "alias", "deployment")
    wanted = {row.id for row in rows if all(getattr(row, name) == getattr(where, name) for name in names)}
    assert {row.id for row in (await ledger.rows(where)).rows} == wanted
    [total] = await ledger.totals([], where)
    assert total.requests == len(wanted)


@pytest.mark.parametrize("cursor", ["", "x", "5", "-", "x-5", "²-a", "9" * 19 + "-a"])
async def test_a_made_up_cursor_is_refused(ledger: Ledger, cursor: str) -> None:
    """A cursor is one that a page gave."""
    with pytest.raises(Invalid, match="cursor"):
        await ledger.rows(LedgerFilter(), cursor=cursor)


async def test_totals_by_every_grouping(ledger: Ledger) -> None:
    """Grouped by any two of team, key, alias, deployment and day, the sums are those of the rows."""
    rows = make_rows(200)
    await ledger.append(rows)
    for pair in combinations(set(Group) - {Group.USER, Group.TAG, Group.REGION}, 2):  # those: test_rollups.py
        wanted: dict[tuple[object, ...], int] = defaultdict(int)
        for row in rows:
            day = datetime.fromtimestamp(row.at_ms / 1000, UTC).date().isoformat()
            wanted[tuple(day if g is Group.DAY else getattr(row, g) for g in pair)] += row.cost_microusd
        found = {tuple(getattr(t, g) for g in pair): t.cost_microusd for t in await ledger.totals(pair)}
        assert found == wanted
    [nothing] = await ledger.totals([], LedgerFilter(team_id=99))
    assert (nothing.requests, nothing.cost_microusd) == (0, 0)
    assert await ledger.totals([Group.TEAM], LedgerFilter(team_id=99)) == ()


async def test_totals_widen_to_whole_days(ledger: Ledger) -> None:
    """From noon to noon means both days whole."""
    rows = make_rows(200)
    await ledger.append(rows)
    found = await ledger.totals([Group.DAY], LedgerFilter(from_ms=NOON_MS - DAY_MS, until_ms=NOON_MS))
    assert [total.day for total in found] == ["2026-11-20", "2026-11-21"]


async def test_spend_by_window_is_the_sum_of_its_rows(accounts: Accounts, ledger: Ledger) -> None:
    """For every window of some moments, teams that are and teams that were, also those that spent nothing."""
    team = await accounts.create_team("a")
    rows = [msgspec.structs.replace(row, team_id=row.team_id + 100) for row in make_rows(300)]
    rows += [msgspec.structs.replace(row, id=f"x{row.id}", at_ms=NOON_MS - 60_000) for row in rows[:20]]
    await ledger.append(rows)
    moments = (NOON_MS, NOON_MS - 1, NOON_MS - 3 * DAY_MS)
    windows = tuple(dict.fromkeys(window for moment in moments for window in windows_at(moment)))
    spent = await ledger.spent(windows)
    assert {(s.team_id, s.window) for s in spent} == {(t, w) for t in (team.id, 101, 102, 103) for w in windows}
    for one in spent:
        of_team = (row for row in rows if row.team_id == one.team_id and one.window.holds(row.at_ms))
        assert one.spent_microusd == sum(row.cost_microusd for row in of_team)
    assert any(one.spent_microusd and one.window == window_at(WindowKind.HOUR, NOON_MS - 1) for one in spent)


texts = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=50)
counts = st.integers(0, 2**53 - 1)
ids = st.integers(0, 2**31 - 1)
usages = st.builds(Usage, *[counts] * 12, provider_cost_microusd=st.none() | counts)
rows_of_any_kind = st.builds(
    LedgerRow, texts.filter(bool), counts, texts, ids, ids, texts, texts, usages, counts, texts
)


@given(rows_of_any_kind)
def test_rows_survive_the_way(row: LedgerRow) -> None:
    """What is encoded is what is decoded."""
    assert decode_row(encode_row(row)) == row


def test_earlier_versions_read_a_row_and_their_rows_are_read() -> None:
    """In a rolling restart both write the stream: the counts stand beside the other fields, and three always do."""
    fields = {
        "id": "a", "at_ms": NOON_MS, "request_id": "a", "team_id": 1, "key_id": 1, "alias": "m", "deployment": "d",
        "prompt_tokens": 7, "cached_tokens": 0, "completion_tokens": 5, "cost_microusd": 9, "kind": "chat",
        "reasoning_tokens": 2,
    }  # fmt: skip
    row = decode_row(msgspec.msgpack.encode(fields))
    assert row.usage == Usage(7, 5, reasoning_tokens=2)
    assert msgspec.msgpack.decode(encode_row(row)) == fields


@pytest.mark.parametrize(
    "wrong",
    [
        {"cost_microusd": -1},
        {"cost_microusd": 2**53},
        {"alias": "a\x00b"},
        {"alias": "x" * 513},
        {"id": ""},
        {"usage": Usage(-1, 0)},
        {"usage": Usage(0, 0, tool_calls=2**53)},
    ],
)
def test_what_a_database_would_refuse_is_refused_before(wrong: dict[str, object]) -> None:
    """Numbers too large and texts with NUL do not get as far as SQL."""
    row = msgspec.structs.replace(make_rows(1)[0], **wrong)
    with pytest.raises(msgspec.ValidationError):
        decode_row(encode_row(row))


async def test_savings_are_the_sum_of_rows_hits_and_corrections(ledger: Ledger) -> None:
    """In batches that overlap, with rows of no known baseline, hits written again and corrections below 0."""
    chance = random.Random(5)
    rows = [
        msgspec.structs.replace(
            one,
            baseline_microusd=None if chance.random() < 0.2 else chance.randrange(20_000),
            prefix_read_microusd=chance.randrange(-5, 300),
            prefix_write_microusd=chance.randrange(200),
            mechanism=chance.choice(["", "cheaper_route", "dearer_route", "local_engine", "tries", "checks"]),
        )
        for one in make_rows(300)
    ]
    correction = {"kind": "correction", "mechanism": "correction", "baseline_microusd": 0}
    zero = {"prefix_read_microusd": 0, "prefix_write_microusd": 0}
    rows += [
        msgspec.structs.replace(one, id=f"c{one.id}", cost_microusd=chance.randrange(-900, 900), **correction, **zero)
        for one in rows[:20]
    ]
    hits = [
        HitsRow(
            id=f"h{number}", at_ms=NOON_MS - number * DAY_MS, team_id=1, key_id=1, alias="small", source="exact", requests=5,
            unknown=number % 3, baseline_microusd=100 * number,
        )
        for number in range(9)
    ]  # fmt: skip
    await asyncio.gather(
        *(ledger.append(rows[start : start + 150]) for start in (0, 80, 170)),
        *(ledger.append_hits(hits[start : start + 5]) for start in (0, 2, 4)),
    )
    await ledger.append(rows)
    found: dict[str, int] = defaultdict(int)
    for line in await ledger.savings(LedgerFilter()):
        found[line.line] += line.amount_microusd
    known = [row for row in rows if row.baseline_microusd is not None]
    from_hits = sum(one.baseline_microusd for one in hits)
    assert found["baseline"] == sum(row.baseline_microusd or 0 for row in known) + from_hits
    assert found["spent"] == sum(row.cost_microusd for row in known)
    assert found["exact"] == from_hits
    assert found["correction"] == -sum(row.cost_microusd for row in known if row.kind == "correction")
    steps = sum(amount for line, amount in found.items() if line not in ("baseline", "spent", "unknown_hits"))
    assert found["baseline"] - steps == found["spent"]
    [total] = await ledger.totals([])
    assert (total.requests, total.cost_microusd) == (300, sum(row.cost_microusd for row in rows))
