"""The ledger summed by one axis at a time: by team, key, alias, deployment, region, user,
and each tag, with the hits of each.

A period is a UTC day, or a block of 8 or 64 days, so that a long time is read from few periods.
Knows no filters of the API and no budgets. Invariants:

- the sums change in the transaction of the rows, so that they equal the ledger's rows even after a
  kill;
- a team has at most TAG_NAMES_MAX names of tags, and VALUES_MAX users and values of a tag, in a
  block
  of 64 days: further values share OTHER, and further names count under OTHER without their values.
"""

import operator
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import schema
from gateway.accounts.database import Database, arrays, summed
from gateway.accounts.row import SUMS, HitsRow, LedgerRow, columns_of
from policies import Usage
from policies.budgets import VALUES_MAX

SPANS = (1, 8, 64)
"""The days of a period, by its level."""

TEAM, KEY, ALIAS, DEPLOYMENT, REGION = "team", "key_id", "alias", "deployment", "region"
USER, TAGS = "user", "tags"
"""Axes. A row of TAGS has a tag's name as its value; the values of a tag have `tag_axis`."""

NONE, OTHER = "", "*"
"""The values for rows without a value, and beyond the bound; any other value begins with `=`."""

TAG_NAMES_MAX = 20
CORRECTION = "correction"
"""The kind, and the mechanism, of rows that correct a day's cost, without a generation."""

DAY_MS = 86_400_000
_PARTS = 4
_LEVEL = 1_000_000_000  # more than there are days
_LOOKED_UP = 1_000

_Scope = tuple[int, str, int]
"""A period, an axis and a team."""

_Label = tuple[int, str, int, str]
"""The key of a row."""

_table = schema.ledger_rollups
_names = tuple(column.name for column in _table.primary_key)
_KNOWN = (
    f"SELECT {', '.join(_names)} FROM ledger_rollups "
    f"JOIN unnest({arrays(_table, _names)}) AS wanted ({', '.join(_names)}) USING ({', '.join(_names)})"
)
_amounts_of = columns_of(SUMS[1:])
_labels_of = operator.attrgetter("team_id", "key_id", "alias", "deployment", "kind", "user", "tags", "region")

Alike = tuple[LedgerRow, list[int]]
"""One of several rows with equal labels, and the sums of all in the order of SUMS."""


def tag_axis(name: str) -> str:
    """The axis of a tag's values; `name` is as sent."""
    return f"tag:{name}"


def part_of(team_id: int) -> int:
    """The part of a team's sums: those of different parts are written side by side."""
    return team_id % _PARTS


def stored(value: str) -> str:
    """The form in which the table keeps a user, or the name or value of a tag."""
    return f"={value}" if value else NONE


def period_of(day: int, level: int) -> int:
    """The period of `level` that contains `day` (since 1970)."""
    return level * _LEVEL + day // SPANS[level]


def periods(first: int, end: int, *, is_by_day: bool = False) -> list[int]:
    """The fewest periods that cover the days from `first` to before `end`; with `is_by_day`, the
    days.
    """
    blocks: list[int] = []
    while first < end:
        level = (
            0 if is_by_day else max(n for n, s in enumerate(SPANS) if (first % s == 0 and first + s <= end) or not n)
        )
        blocks.append(period_of(first, level))
        first += SPANS[level]
    return blocks


def alike(rows: Iterable[LedgerRow]) -> list[Alike]:
    """Sum the rows of a day that agree in all labels."""
    groups: dict[tuple[Any, ...], tuple[LedgerRow, list[tuple[int, ...]]]] = {}
    for row in rows:
        _, amounts = groups.setdefault((row.at_ms // DAY_MS, *_labels_of(row)), (row, []))
        amounts.append(_amounts_of(row))
    return [
        (row, [0 if row.kind == CORRECTION else len(amounts), *map(sum, zip(*amounts, strict=True))])
        for row, amounts in groups.values()
    ]


def hits(rows: Iterable[HitsRow]) -> list[Alike]:
    """The hits by HIT_SUMS, as rows without a deployment."""
    return [
        (
            LedgerRow(
                id=row.id, at_ms=row.at_ms, request_id="", team_id=row.team_id, key_id=row.key_id, alias=row.alias,
                deployment="", usage=Usage(), cost_microusd=0, kind=row.source, user=row.user, tags=row.tags,
            ),
            [row.requests, row.baseline_microusd],
        )
        for row in rows
    ]  # fmt: skip


async def add(
    connection: AsyncConnection, database: Database, rows: Sequence[Alike], names: Sequence[str] = SUMS
) -> None:
    """Add the amounts `names` of new rows to the sums, in the rows' transaction."""
    labels = {row.id: [(stored(name), stored(value)) for name, value in row.tags_by_name().items()] for row, _ in rows}
    values_by_scope: dict[_Scope, set[str]] = defaultdict(set)
    for row, _ in rows:
        block = _block_of(row)
        if row.user:
            values_by_scope[block, USER, row.team_id].add(stored(row.user))
        for name, value in labels[row.id]:
            values_by_scope[block, TAGS, row.team_id].add(name)
            values_by_scope[block, tag_axis(name[1:]), row.team_id].add(value)
    if values_by_scope and not database.is_sqlite:  # of two writers one waits, so that the bounds hold
        for part in sorted({part_of(row.team_id) for row, _ in rows}):
            await connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock('ledger_rollups'::regclass::int, {part})")
    known_labels = await _admitted(database, connection, values_by_scope) if values_by_scope else set[_Label]()
    by_day = summed(
        ((row.at_ms // DAY_MS, axis, row.team_id, value), amounts)
        for row, amounts in rows
        for axis, value in {*_values(row, labels[row.id], known_labels)}
    )
    by_period = (((period_of(day, n), *rest), sums) for (day, *rest), sums in by_day.items() for n in range(len(SPANS)))
    await database.add_up(connection, _table, names, by_period)


def _block_of(row: LedgerRow) -> int:
    return period_of(row.at_ms // DAY_MS, len(SPANS) - 1)


def _values(row: LedgerRow, tags: Sequence[tuple[str, str]], labels: Container[_Label]) -> Iterator[tuple[str, str]]:
    """The axes and values that a row counts under. A user, or a tag, beyond the bounds becomes OTHER."""
    yield from ((TEAM, NONE), (KEY, str(row.key_id)), (ALIAS, row.alias), (DEPLOYMENT, row.deployment))
    if row.region:
        yield REGION, row.region
    block, user = _block_of(row), stored(row.user)
    yield USER, user if not user or (block, USER, row.team_id, user) in labels else OTHER
    for name, value in tags:
        if (block, TAGS, row.team_id, name) not in labels:
            yield TAGS, OTHER
            continue
        axis = tag_axis(name[1:])
        yield TAGS, name
        yield axis, value if (block, axis, row.team_id, value) in labels else OTHER


async def _admitted(
    database: Database, connection: AsyncConnection, values_by_scope: Mapping[_Scope, Iterable[str]]
) -> set[_Label]:
    """The wanted values that the table counts separately, with those that it admits now."""
    scope_columns, columns = [_table.c[name] for name in _names[:3]], [_table.c[name] for name in _names]
    labels = sorted((*scope, value) for scope, values in values_by_scope.items() for value in values)
    known_labels: set[_Label] = set()
    for part in _parts(labels):
        if database.is_sqlite:
            rows = await connection.execute(sa.select(*columns).where(sa.tuple_(*columns).in_(part)))
        else:  # a tenth of the time of a thousand tuples in the statement
            rows = await connection.exec_driver_sql(_KNOWN, tuple(map(list, zip(*part, strict=True))))
        known_labels.update((period, axis, team_id, value) for period, axis, team_id, value in rows)
    new: dict[_Scope, list[_Label]] = defaultdict(list)
    for label in labels:
        if label not in known_labels:
            new[label[:3]].append(label)
    counts: dict[_Scope, int] = {}
    for scopes in _parts(list(new)):
        statement = (
            sa.select(*scope_columns, sa.func.count())
            .where(sa.tuple_(*scope_columns).in_(scopes))
            .group_by(*scope_columns)
        )
        rows = await connection.execute(statement.where(_table.c.value.not_in((NONE, OTHER))))
        counts |= {(period, axis, team_id): count for period, axis, team_id, count in rows}
    for scope, labels_there in new.items():
        most = TAG_NAMES_MAX if scope[1] == TAGS else VALUES_MAX
        known_labels.update(labels_there[: max(0, most - counts.get(scope, 0))])
    return known_labels


def _parts(values: list[Any]) -> Iterator[list[Any]]:
    for start in range(0, len(values), _LOOKED_UP):
        yield values[start : start + _LOOKED_UP]
