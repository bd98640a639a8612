"""The ledger in SQL: one row a generation, and queries of spend and of savings.

No Redis and no budget limits. Invariant: `ledger_days` always equals `ledger` summed by UTC day,
and `savings_days` equals `ledger` and `ledger_hits`, because one transaction writes the rows and
their sums and writes a row once per id.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from enum import StrEnum
from operator import attrgetter
from typing import Any, TypeVar, cast

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.accounts import months, rollups, schema
from gateway.accounts.audit import AuditRow, inserted
from gateway.accounts.database import Database, uncancelled
from gateway.accounts.errors import Invalid
from gateway.accounts.months import HOUR_MS
from gateway.accounts.rollups import CORRECTION, DAY_MS, SPANS
from gateway.accounts.row import BOOKED, CHECKING, HIT_SUMS, SUMS, HitsRow, LedgerRow, columns_of
from policies import Usage, WindowKind
from policies.budgets import DrainedSpend, OwnSpend
from policies.windows import Window

_Row = TypeVar("_Row", LedgerRow, HitsRow)
_SAVED_BATCH = 500
SESSION_DAYS_MAX = 8
CURSOR = r"[0-9]{1,18}-[!-~]{1,100}"


@dataclass(frozen=True, slots=True)
class LedgerFilter:
    """A selection of rows; a field that is None selects all.

    `from_ms` is included and `until_ms` is not (unix milliseconds). An empty `user` selects
    requests without a user. `tag` is a tag's name, and `tag_value` its value.
    """

    team_id: int | None = None
    key_id: int | None = None
    alias: str | None = None
    deployment: str | None = None
    user: str | None = None
    tag: str | None = None
    tag_value: str | None = None
    session: str | None = None
    region: str | None = None
    from_ms: int | None = None
    until_ms: int | None = None


@dataclass(frozen=True, slots=True)
class LedgerPage:
    """Rows, newest first. `cursor` fetches the next page; None at the end."""

    rows: tuple[LedgerRow, ...]
    cursor: str | None


class Group(StrEnum):
    TEAM = "team_id"
    KEY = "key_id"
    ALIAS = "alias"
    DEPLOYMENT = "deployment"
    USER = "user"
    TAG = "tag"
    REGION = "region"
    SESSION = "session"
    DAY = "day"


class LedgerTotal(msgspec.Struct, frozen=True):
    """Sums over one group; ungrouped columns are None. `day` is an ISO date in UTC.

    `hits` cost nothing and are none of the `requests`. `saved_microusd` is the baseline of both less
    the cost, where a baseline is known: the sum of the steps of `savings`. Of the cost
    `checks_microusd` is for questions to verifiers and checks.

    `user` and `tag` have the form of `rollups`: OTHER, empty, or `=` and the value.
    """

    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_microusd: int
    hits: int
    saved_microusd: int
    checks_microusd: int
    team_id: int | None = None
    key_id: int | None = None
    alias: str | None = None
    deployment: str | None = None
    user: str | None = None
    tag: str | None = None
    region: str | None = None
    session: str | None = None
    day: str | None = None


COLUMNS: Mapping[str, Any] = {
    column.name: column.type.python_type | None if column.nullable else column.type.python_type
    for column in schema.ledger.columns
}
"""The types of the table's columns."""


def flat_row(row: LedgerRow) -> dict[str, Any]:
    """A row's values by the names in COLUMNS."""
    return dict(zip(COLUMNS, _values_of(row), strict=True))


BASELINE, SPENT, UNKNOWN_HITS = "baseline", "spent", "unknown_hits"
"""The lines of `savings_days` other than mechanisms."""


@dataclass(frozen=True, slots=True)
class SavingsLine:
    """The sum of one line for one team and UTC day. `day` is an ISO date."""

    day: str
    team_id: int
    line: str
    requests: int
    amount_microusd: int


@dataclass(frozen=True, slots=True)
class DaySpend:
    """The sum of the ledger's rows of one UTC day, team, key, alias, deployment and kind.

    Of the `requests`, `estimated` have estimated tokens, at `estimated_microusd`.
    """

    day: date
    team_id: int
    key_id: int
    alias: str
    deployment: str
    kind: str
    requests: int
    usage: Usage
    cost_microusd: int
    estimated: int
    estimated_microusd: int


class Ledger:
    """Reads and writes the ledger's tables. Database errors are sqlalchemy's own."""

    def __init__(self, database: Database) -> None:
        self.database = database

    @uncancelled
    async def append(self, rows: Sequence[LedgerRow]) -> int:
        """Insert rows with new ids, and add them to their days, in one transaction; on PostgreSQL in
        one for each part of the teams (`rollups.part_of`), side by side.

        Returns the number of new rows. An error of one transaction is raised once all have ended.
        """
        parts: dict[int, dict[str, LedgerRow]] = {}
        for row in sorted(rows, key=lambda row: row.id):  # so that two writers cannot deadlock
            parts.setdefault(0 if self.database.is_sqlite else rollups.part_of(row.team_id), {})[row.id] = row
        counts = await asyncio.gather(*map(self._append_part, parts.values()), return_exceptions=True)
        for error in counts:
            if isinstance(error, BaseException):
                raise error
        return sum(cast(list[int], counts))

    async def _append_part(self, by_id: Mapping[str, LedgerRow]) -> int:
        async with self.database.writing() as connection:
            return await self._append(connection, by_id)

    @uncancelled
    async def correct(self, rows: Sequence[LedgerRow], audit: AuditRow) -> int:
        """Append correcting rows with new ids, and the audit log's row, in one transaction.

        Without a new row nothing is written. Returns the number of new rows.
        """
        async with self.database.writing() as connection:
            count = await self._append(connection, {row.id: row for row in rows})
            if count:
                await connection.execute(inserted(audit))
            return count

    async def _append(self, connection: AsyncConnection, by_id: Mapping[str, LedgerRow]) -> int:
        new = await self._new(connection, schema.ledger, by_id, _values_of)
        by_hour = [((row.at_ms // HOUR_MS, row.team_id), (row.cost_microusd,)) for row in new]
        await self.database.add_up(connection, schema.ledger_hours, ("cost_microusd",), by_hour)
        await self._add_to_sums(connection, rollups.alike(new), SUMS)
        await self.database.add_up(connection, schema.savings_days, _SAVED, _lines(new))
        await self._add_to_counts(connection, new)
        await self._changed(connection, {hour for (hour, _), _ in by_hour})  # of all teams: locked last, and briefly
        return len(new)

    async def _new(
        self, connection: AsyncConnection, table: sa.Table, rows: Mapping[str, _Row], values_of: Callable[[_Row], Any]
    ) -> list[_Row]:
        """Insert the rows with new ids, and return them."""
        then = "ON CONFLICT (id, at_ms) DO NOTHING RETURNING id"
        if self.database.is_sqlite:  # no other writer runs meanwhile
            ids = (msgspec.json.encode(tuple(rows)).decode(),)
            known = set((await connection.exec_driver_sql(_KNOWN.format(table.name), ids)).scalars())
            rows, then = {row_id: row for row_id, row in rows.items() if row_id not in known}, ""
        else:  # a writer that pauses in here must not block the next one
            await connection.execute(sa.text("SET LOCAL idle_in_transaction_session_timeout = '30s'"))
            await months.prepare(connection, self.database, table, [row.at_ms for row in rows.values()])
        values = list(map(values_of, rows.values()))
        inserted_ids = await self.database.insert_many(connection, table, table.c.keys(), values, then)
        return [rows[row_id] for row_id in inserted_ids] if then else list(rows.values())

    async def saved(self, ids: Collection[str]) -> set[str]:
        """The members of `ids` that the ledger contains."""
        column, saved_ids, id_list = schema.ledger.c.id, set[str](), list(ids)
        for start in range(0, len(id_list), _SAVED_BATCH):
            statement = sa.select(column).where(column.in_(id_list[start : start + _SAVED_BATCH]))
            saved_ids.update(await self.database.scalars(statement))
        return saved_ids

    async def day_spends(self, first: date, last: date) -> tuple[DaySpend, ...]:
        """The sums of the rows of the UTC days from `first` to `last`, both included."""
        rows = schema.ledger.c
        start = datetime(first.year, first.month, first.day, tzinfo=UTC)
        end = datetime(last.year, last.month, last.day, tzinfo=UTC)
        day = sa.cast(rows.at_ms - rows.at_ms % DAY_MS, sa.BigInteger).label("day_ms")
        labels = [rows[name] for name in ("team_id", "key_id", "alias", "deployment", "kind")]
        sums = [
            _sum(sa.case((rows.kind == CORRECTION, 0), else_=1), "requests"),
            _sum(rows.cost_microusd, "cost_microusd"),
            _sum(sa.case((rows.usage_estimated, 1), else_=0), "estimated"),
            _sum(sa.case((rows.usage_estimated, rows.cost_microusd), else_=0), "estimated_microusd"),
        ]
        statement = (
            sa.select(day, *labels, *sums, *(_sum(rows[name], name) for name in BOOKED))
            .where(rows.at_ms >= int(start.timestamp() * 1000), rows.at_ms < int(end.timestamp() * 1000) + DAY_MS)
            .group_by(day, *labels)
            .order_by(day, *labels)
        )
        rows_by_name = [row._asdict() for row in await self.database.rows(statement)]
        return tuple(
            [
                DaySpend(
                    day=datetime.fromtimestamp(row["day_ms"] // 1000, UTC).date(),
                    usage=_usage(row),
                    **{column.name: row[column.name] for column in (*labels, *sums)},
                )
                for row in rows_by_name
            ]
        )

    @uncancelled
    async def append_hits(self, rows: Sequence[HitsRow]) -> None:
        """Insert rows with new ids, and add them to their days' sums and savings, in one transaction."""
        if not rows:
            return
        by_id = {row.id: row for row in sorted(rows, key=lambda row: row.id)}
        async with self.database.writing() as connection:
            new = await self._new(connection, schema.ledger_hits, by_id, _hits_values_of)
            # in the order of `_append`, so that the two cannot deadlock
            await self._add_to_sums(connection, rollups.hits(new), HIT_SUMS)
            lines = [line for row in new for line in _lines_of_hits(row)]
            await self.database.add_up(connection, schema.savings_days, _SAVED, lines)
            await self._changed(connection, {row.at_ms // HOUR_MS for row in new})

    async def rows(self, where: LedgerFilter, limit: int = 100, cursor: str | None = None) -> LedgerPage:
        """A page of rows, newest first. Raises Invalid for a malformed `cursor`."""
        table = schema.ledger
        statement = sa.select(table).where(*_conditions(table, where, (*_FILTERS, "user", "session", "region")))
        if where.tag is not None:
            statement = statement.where(_has_tag(table.c.tags, where.tag, where.tag_value))
        if where.from_ms is not None:
            statement = statement.where(table.c.at_ms >= where.from_ms)
        if where.until_ms is not None:
            statement = statement.where(table.c.at_ms < where.until_ms)
        if cursor is not None:
            statement = statement.where(sa.tuple_(table.c.at_ms, table.c.id) < sa.tuple_(*_position(cursor)))
        statement = statement.order_by(table.c.at_ms.desc(), table.c.id.desc()).limit(limit + 1)
        found = [_row(row._asdict()) for row in await self.database.rows(statement)]
        rows = tuple(found[:limit])
        return LedgerPage(rows, f"{rows[-1].at_ms}-{rows[-1].id}" if len(found) > limit else None)

    async def totals(
        self, by: Sequence[Group], where: LedgerFilter | None = None, most: int | None = None
    ) -> tuple[LedgerTotal, ...]:
        """Sums by the groups in `by`, sorted by them; with `most`, the dearest `most` groups,
        dearest first.

        Counts whole UTC days: `from_ms` and `until_ms` are widened to them. The group TAG has the values of the filter's
        `tag` or, without it, the names of tags. Sums by session are read from the rows and hits of the
        last SESSION_DAYS_MAX days of the filter. Raises Invalid for a user, a tag or a region
        together with a key, model, deployment, kind or one another, and for a session with a user or tag.
        """
        return tuple(map(_total, await self._sums(by, where or LedgerFilter(), most)))

    async def each_total(self, by: Sequence[Group], where: LedgerFilter, page: int) -> AsyncIterator[LedgerTotal]:
        """All sums, as `totals`, `page` of them in memory at a time."""
        last: list[Any] = []
        while True:
            rows = await self._sums(by, where, page, last)
            for row in rows:
                yield _total(row)
            if len(rows) < page:
                return
            last = [rows[-1][group] for group in by]

    @uncancelled
    async def _sums(
        self, by: Sequence[Group], where: LedgerFilter, most: int | None, last: Sequence[Any] | None = None
    ) -> Sequence[sa.RowMapping]:
        """The rows of `totals`; with `last`, the groups beyond it, sorted."""
        async with self.database.reading() as connection:
            is_by_day = bool({Group.DAY, Group.SESSION}.intersection(by)) or where.session is not None
            first, end = await self._days(connection, where, is_by_day=is_by_day)
            table, columns, conditions = _source(by, where, first, end)
            sums = {name: _sum(table.c[name], name) for name in (*SUMS, "hits")}
            if last:
                conditions.append(sa.tuple_(*columns) > sa.tuple_(*last))
            statement = sa.select(*columns, *sums.values()).where(*conditions).group_by(*columns)
            order = [sums["cost_microusd"].desc()] if most is not None and last is None else columns
            return (await connection.execute(statement.order_by(*order).limit(most))).mappings().all()

    async def _days(self, connection: AsyncConnection, where: LedgerFilter, *, is_by_day: bool) -> tuple[int, int]:
        """The first day of the filter with rows in the ledger, and the day after the last.

        Without `is_by_day`, days without rows before the first and after the last make whole
        blocks.
        """
        day = schema.ledger_days.c.day
        bounds = sa.select(sa.select(sa.func.min(day)).scalar_subquery(), sa.select(sa.func.max(day)).scalar_subquery())
        first, last_day = (await connection.execute(bounds)).one()
        if first is None:
            return 0, 0
        block = 1 if is_by_day else SPANS[-1]
        end = int(last_day) + 1
        since = -1 if where.from_ms is None else where.from_ms // DAY_MS
        until = end if where.until_ms is None else -(-where.until_ms // DAY_MS)
        first = since if since > first else int(first) // block * block
        end = until if until < end else -(-end // block) * block
        return first, end

    async def savings(self, where: LedgerFilter) -> tuple[SavingsLine, ...]:
        """The lines of `savings_days` by day, team and line.

        Of the filter, the team, the alias and the days apply, as in `totals`.
        """
        days = schema.savings_days
        columns = (days.c.day, days.c.team_id, days.c.line)
        sums = [_sum(days.c[name], name) for name in _SAVED]
        statement = sa.select(*columns, *sums).group_by(*columns).order_by(*columns)
        statement = statement.where(*_conditions(days, where, ("team_id", "alias")), *_whole_days(days, where))
        return tuple([SavingsLine(_date(day), *rest) for day, *rest in await self.database.rows(statement)])

    @uncancelled
    async def spent(self, windows: Sequence[Window]) -> tuple[DrainedSpend, ...]:
        """The spend of each team in each of `windows`, from the rows in SQL.

        Covers deleted teams, and teams that spent nothing.
        """
        hours, days = schema.ledger_hours, schema.ledger_days
        spends: list[DrainedSpend] = []
        async with self.database.reading() as connection:
            known = sa.union(sa.select(schema.teams.c.id), sa.select(days.c.team_id))
            team_ids = sorted((await connection.execute(known)).scalars())
            for window in windows:
                if window.kind is WindowKind.HOUR:
                    table, column, unit_ms = hours, hours.c.hour, HOUR_MS
                else:  # whole days
                    table, column, unit_ms = days, days.c.day, DAY_MS
                statement = sa.select(table.c.team_id, sa.func.sum(table.c.cost_microusd)).group_by(table.c.team_id)
                statement = statement.where(column >= window.start_ms // unit_ms)
                if window.end_ms is not None:
                    statement = statement.where(column < window.end_ms // unit_ms)
                sums = {team_id: int(spent) for team_id, spent in await connection.execute(statement)}
                spends += [DrainedSpend(team_id, window, sums.get(team_id, 0)) for team_id in team_ids]
        return tuple(spends)

    async def own_spends(self, now_ms: int) -> tuple[OwnSpend, ...]:
        """The spend in SQL of each separate count of a budget. Deletes the expired counts."""
        table = schema.budget_counts
        is_past = sa.and_(table.c.keep_until_ms > 0, table.c.keep_until_ms < now_ms)
        rows = [OwnSpend(*row) for row in await self.database.rows(sa.select(table))]
        live_rows = tuple([row for row in rows if not row.keep_until_ms or row.keep_until_ms >= now_ms])
        if len(live_rows) < len(rows):
            await self.database.write(sa.delete(table).where(is_past))
        return live_rows

    async def _add_to_counts(self, connection: AsyncConnection, rows: Sequence[LedgerRow]) -> None:
        sums: dict[tuple[str, str], list[int]] = {}
        for row in rows:
            for charge in row.charges:
                known = sums.setdefault((charge.name, charge.field), [0, 0])
                known[0] += charge.amount
                known[1] = max(known[1], charge.keep_until_ms)
        await self.database.add_up(
            connection, schema.budget_counts, ("spent", "keep_until_ms"), sums.items(), ["spent"]
        )

    async def _add_to_sums(
        self, connection: AsyncConnection, rows: Sequence[rollups.Alike], names: Sequence[str]
    ) -> None:
        by_day = (
            ((row.at_ms // DAY_MS, row.team_id, row.key_id, row.alias, row.deployment, row.kind), amounts)
            for row, amounts in rows
        )
        await self.database.add_up(connection, schema.ledger_days, names, by_day)
        await rollups.add(connection, self.database, rows, names)

    async def _changed(self, connection: AsyncConnection, hours: Iterable[int]) -> None:
        counts = [((hour,), (1, 0)) for hour in hours]
        await self.database.add_up(connection, schema.ledger_exports, ("changes", "exported"), counts)


_SAVED = ("requests", "amount_microusd")
_Line = tuple[tuple[int, int, str, str], tuple[int, int]]
"""The key of a row of `savings_days`, its requests and its amount."""


def _lines(rows: Iterable[LedgerRow]) -> Iterator[_Line]:
    """The savings lines of the ledger's rows. A row without a known baseline yields no line."""
    unsaved: dict[tuple[int, int, str], list[int]] = defaultdict(list)  # costs of rows that are their baselines
    for row in rows:
        key, cost, baseline = (row.at_ms // DAY_MS, row.team_id, row.alias), row.cost_microusd, row.baseline_microusd
        is_explained = row.mechanism or row.prefix_read_microusd or row.prefix_write_microusd
        if baseline == cost and not is_explained and row.kind != CORRECTION:
            unsaved[key].append(cost)
        elif baseline is not None:
            requests = int(row.kind != CORRECTION)
            # a try beside the one that answered is no further request
            if baseline or not row.mechanism:
                yield (*key, BASELINE), (requests, baseline)
            yield (*key, SPENT), (requests, cost)
            for line, amount in row.savings():
                yield (*key, line), (requests, amount)
    for key, costs in unsaved.items():
        for line in (BASELINE, SPENT):
            yield (*key, line), (len(costs), sum(costs))


def _lines_of_hits(row: HitsRow) -> Iterator[_Line]:
    key, known_requests = (row.at_ms // DAY_MS, row.team_id, row.alias), row.requests - row.unknown
    for line, requests, amount in (
        (BASELINE, known_requests, row.baseline_microusd),
        (row.source, known_requests, row.baseline_microusd),
        (UNKNOWN_HITS, row.unknown, 0),
    ):
        if requests:
            yield (*key, line), (requests, amount)


_values_of, _hits_values_of = columns_of(tuple(COLUMNS)), attrgetter(*schema.ledger_hits.c.keys())
_KNOWN = "SELECT id FROM {} WHERE id IN (SELECT value FROM json_each(?))"


_FILTERS = ("team_id", "key_id", "alias", "deployment")


def _conditions(table: sa.FromClause, where: LedgerFilter, names: Sequence[str] = _FILTERS) -> list[Any]:
    return [table.c[name] == getattr(where, name) for name in names if getattr(where, name) is not None]


def _has_tag(tags: sa.Column[str], name: str, value: str | None) -> sa.ColumnElement[bool]:
    """Whether the tags have one of this name, and with `value` this value: a key in a JSON object, as
    in a text each quote has a backslash before it.
    """
    text = msgspec.json.encode({name: value or ""}).decode()[1:-1]
    return sa.func.replace(tags, text if value is not None else text[:-2], "") != tags


def _whole_days(days: sa.Table, where: LedgerFilter) -> list[Any]:
    """The conditions that select the filter's UTC days in a table of days."""
    found = [] if where.from_ms is None else [days.c.day >= where.from_ms // DAY_MS]
    return found if where.until_ms is None else [*found, days.c.day < -(-where.until_ms // DAY_MS)]


def _source(
    by: Sequence[Group], where: LedgerFilter, first: int, end: int
) -> tuple[sa.FromClause, list[sa.ColumnElement[Any]], list[Any]]:
    """The table with the groups of the days from `first` to before `end`, its columns and
    conditions.

    Raises Invalid.
    """
    filtered = {group for group in Group if getattr(where, group, None) is not None}
    axes = ({*by} | filtered) - {Group.TEAM, Group.DAY}
    is_by_day = Group.DAY in by
    if Group.SESSION in axes:
        if axes & {Group.USER, Group.TAG}:
            raise Invalid("by", "sums by session go with no user and no tag: leave these groups and filters out")
        rows = _sums_of_rows(max(first, end - SESSION_DAYS_MAX), end)
        return rows, [rows.c[group] for group in by], _conditions(rows, where, (*_FILTERS, "session", "region"))
    if len(axes) > 1:
        if axes & {Group.USER, Group.TAG, Group.REGION}:
            raise Invalid(
                "by", "sums by user, tag or region go with team and day only: leave other groups and filters out"
            )
        days = schema.ledger_days
        conditions = [days.c.day.in_(rollups.periods(first, end, is_by_day=True)), *_conditions(days, where)]
        return days, [days.c[group] for group in by], conditions
    table, axis, value = schema.ledger_rollups, rollups.TEAM, None
    for group in axes:
        axis, value = group.value, getattr(where, group)
        if group is Group.TAG:
            axis, value = (rollups.TAGS, None) if where.tag is None else (rollups.tag_axis(where.tag), where.tag_value)
        if value is not None:
            value = rollups.stored(value) if group in (Group.USER, Group.TAG) else str(value)
    columns = {Group.TEAM: table.c.team_id, Group.DAY: table.c.period.label("day")}
    conditions = [table.c.period.in_(rollups.periods(first, end, is_by_day=is_by_day)), table.c.axis == axis]
    conditions += _conditions(table, where, ("team_id",))
    if value is not None:
        conditions.append(table.c.value == value)
    return table, [columns.get(group, table.c.value.label(group)) for group in by], conditions


def _sums_of_rows(first: int, end: int) -> sa.Subquery:
    """The rows and hits of these days, each with the columns of a sum."""
    rows, hits = schema.ledger.c, schema.ledger_hits.c
    names = (*_FILTERS, "session", "region", *SUMS, "hits")
    none: dict[str, Any] = dict.fromkeys((*SUMS, "hits"), sa.literal(0)) | dict.fromkeys(names[3:6], sa.literal(""))
    of_rows = {name: rows.get(name, value) for name, value in none.items()} | {
        "requests": sa.case((rows.kind == CORRECTION, 0), else_=1),
        "saved_microusd": sa.func.coalesce(rows.baseline_microusd - rows.cost_microusd, 0),
        "checks_microusd": sa.case((rows.kind.in_(CHECKING), rows.cost_microusd), else_=0),
    }
    of_hits = none | {"session": hits.session, "hits": hits.requests, "saved_microusd": hits.baseline_microusd}
    parts = [
        sa.select(
            (table.at_ms // DAY_MS).label("day"), *[(values[n] if n in values else table[n]).label(n) for n in names]
        ).where(table.at_ms.between(first * DAY_MS, end * DAY_MS - 1))
        for table, values in ((rows, of_rows), (hits, of_hits))
    ]
    return sa.union_all(*parts).subquery()


def _position(cursor: str) -> tuple[int, str]:
    if not re.fullmatch(CURSOR, cursor):
        raise Invalid("cursor", "expected one that an earlier page gave")
    at_ms, _, row_id = cursor.partition("-")
    return int(at_ms), row_id


def _sum(column: sa.ColumnElement[Any], name: str) -> sa.Label[int]:
    # a sum of BIGINT is a NUMERIC in PostgreSQL, of which each value costs a Decimal
    return sa.cast(sa.func.coalesce(sa.func.sum(column), 0), sa.BigInteger).label(name)


def _usage(columns: Mapping[str, Any]) -> Usage:
    return Usage(**{name: columns[name] for name in BOOKED if name in columns})


def _row(columns: Mapping[str, Any]) -> LedgerRow:
    return LedgerRow(usage=_usage(columns), **{name: columns[name] for name in COLUMNS if name not in BOOKED})


def _total(row: sa.RowMapping) -> LedgerTotal:
    values: dict[str, Any] = {**row}
    if Group.KEY in values:  # a text in the sums by one axis
        values[Group.KEY] = int(values[Group.KEY])
    if Group.DAY in values:
        values[Group.DAY] = _date(values[Group.DAY])
    return LedgerTotal(**values)


@functools.lru_cache(4_096)
def _date(day: int) -> str:
    return datetime.fromtimestamp(day * DAY_MS // 1000, UTC).date().isoformat()
