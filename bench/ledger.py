"""`./run bench ledger`: how long queries of spend and savings take on a large ledger, and how fast it is written.

    ./run bench ledger [--rows 10000000] [--days 90] [--runs 40] [--postgres] [--json FILE]

Makes the rows itself in a temporary folder: 50 teams with 200 keys, 10,000 users, 10 models of two deployments and a tag of 30
values, spread over --days. The first rows go through the ledger's own writer, which is timed; the others are inserted by
SQL, and summed up as the writer would. Each query runs --runs times with other teams, keys and days. Exits with 1 where a
p95 is over 200 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from gateway.accounts import LedgerRow, schema
from gateway.accounts.database import Database
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from gateway.accounts.ledger_writer import BATCH
from gateway.accounts.months import forget, prepare
from gateway.accounts.rollups import SPANS, SUMS, period_of
from gateway.accounts.row import HIT_SUMS
from policies import Usage
from tests.services import run_postgres

_P95_MS_MAX = 200.0
_DAY_MS = 86_400_000
_END_MS = 20_500 * _DAY_MS
_TEAMS, _KEYS, _MODELS, _USERS, _PROJECTS = 50, 200, 10, 200, 30
_TAGS = "'{{\"project\":\"p' || {} || '\"}}'"
_TIMED = 20_000


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench ledger", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of its own; default: SQLite")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sameway-ledger-"))
        url = f"sqlite:///{folder}/ledger.db"
        if arguments.postgres:
            url = stack.enter_context(run_postgres()).create_database()
        found = asyncio.run(_run(url, arguments.rows, arguments.days, arguments.runs))
    print(f"{found['rows']:,} rows over {arguments.days} days on {'PostgreSQL' if arguments.postgres else 'SQLite'}")
    print(f"writer: {found['written_per_s']:,.0f} rows a second; the others inserted in {found['filled_s']:,.0f} s")
    for name, (p50, p95, cpu) in found["queries"].items():
        print(f"{name:48} p50 {p50:7.1f} ms   p95 {p95:7.1f} ms   CPU of this process {cpu:7.1f} ms")
    print(f"{found['months']} months removed, in {found['dropped_s']:.2f} s each")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    slow = [name for name, (_, p95, _) in found["queries"].items() if p95 > _P95_MS_MAX]
    print(f"over {_P95_MS_MAX:.0f} ms at p95: {', '.join(slow) or 'none'}")
    return 1 if slow else 0


async def _run(url: str, rows: int, days: int, runs: int) -> dict[str, Any]:
    database = Database(url)
    await database.open()
    ledger, chance = Ledger(database), random.Random(0)
    timed = [_row(chance, f"w{number}", days) for number in range(min(_TIMED, rows))]
    timed.sort(key=lambda row: row.at_ms)
    began = time.perf_counter()
    for start in range(0, len(timed), BATCH):
        await ledger.append(timed[start : start + BATCH])
    written_per_s = len(timed) / (time.perf_counter() - began)
    began = time.perf_counter()
    await _fill(database, len(timed), rows, days)
    await database.close()  # its connections are made anew
    filled_s = time.perf_counter() - began
    queries = {name: await _timed(query, runs) for name, query in _queries(ledger, random.Random(1), days).items()}
    began = time.perf_counter()
    months = await forget(database, _END_MS, 32)
    dropped_s = (time.perf_counter() - began) / max(1, len(months))
    await database.close()
    times = {"written_per_s": written_per_s, "filled_s": filled_s, "months": len(months), "dropped_s": dropped_s}
    return {"rows": rows, "queries": queries, **times}


def _row(chance: random.Random, name: str, days: int) -> LedgerRow:
    key = chance.randrange(_KEYS)
    model = (key + chance.randrange(3)) % _MODELS
    cost = chance.randrange(50, 5_000)
    return LedgerRow(
        id=name,
        at_ms=_END_MS - (days + SPANS[-1]) * _DAY_MS - 1 - chance.randrange(_DAY_MS),  # a block of its own
        request_id=name,
        team_id=1 + key % _TEAMS,
        key_id=key,
        alias=f"model-{model}",
        deployment=f"model-{model}@{chance.randrange(2)}",
        usage=Usage(chance.randrange(4_000), chance.randrange(800)),
        cost_microusd=cost,
        kind="chat",
        baseline_microusd=3 * cost,
        mechanism="cheaper_route",
        user=f"user-{key % _TEAMS}-{chance.randrange(_USERS)}",
        tags=f'{{"project":"p{chance.randrange(_PROJECTS)}"}}',
    )


async def _fill(database: Database, have: int, rows: int, days: int) -> None:
    """Insert the rest by SQL, and sum it up by SQL as the writer does.

    A day at a time, from the first to the last and in the order of its moments: a temporary table has
    it, from which it is summed, and each index grows at its end.
    """
    is_sqlite = database.is_sqlite
    if is_sqlite:
        numbers = "WITH RECURSIVE n(i) AS (SELECT {start} UNION ALL SELECT i + 1 FROM n WHERE i + 1 < {end})"
        chance, text = "abs(random())", "CAST({} AS TEXT)"
    else:
        numbers = "WITH n(i) AS (SELECT generate_series(CAST({start} AS bigint), {end} - 1))"
        chance, text = "floor(random() * 2147483647)::bigint", "({})::text"
    columns = (
        "id, at_ms, request_id, team_id, key_id, alias, deployment, prompt_tokens, cached_tokens, completion_tokens, "
        'cost_microusd, kind, baseline_microusd, mechanism, "user", tags'
    )
    i, key, model = "i", "k", f"(k + i / 5 % 3) % {_MODELS}"
    row = {
        "id": text.format(f"{i} + 100000000"),
        "at_ms": f"{{first}} + ({i} - {{start}}) * {_DAY_MS} / ({{end}} - {{start}})",
        "request_id": f"'r' || {text.format(i)}",
        "team_id": f"1 + {key} % {_TEAMS}",
        "key_id": key,
        "alias": f"'model-' || {text.format(model)}",
        "deployment": f"'model-' || {text.format(model)} || '@' || {text.format('i % 2')}",
        "prompt_tokens": f"{chance} % 4000",
        "cached_tokens": "0",
        "completion_tokens": f"{chance} % 800",
        "cost_microusd": "50 + i * 7 % 4950",
        "kind": "'chat'",
        "baseline_microusd": "3 * (50 + i * 7 % 4950)",
        "mechanism": "'cheaper_route'",
        '"user"': f"'user-' || {text.format(f'{key} % {_TEAMS}')} || '-' || {text.format(f'{chance} % {_USERS}')}",
        "project": text.format(f"{chance} % {_PROJECTS}"),
    }
    select = ", ".join(f"{value} AS {name}" for name, value in row.items())
    today = f"CREATE TEMP TABLE today AS {numbers} SELECT {select} FROM (SELECT i, i * 7919 / 13 % {_KEYS} AS k FROM n) AS x"
    keys = "team_id, key_id, alias, deployment, kind"
    sums = "sum(prompt_tokens), 0, sum(completion_tokens), sum(cost_microusd)"
    zeros = ", ".join(["0"] * (len(SUMS) - 5 + len(HIT_SUMS)))
    axes = (
        ("team", "''"),
        ("key_id", "CAST(key_id AS TEXT)"),
        ("alias", "alias"),
        ("deployment", "deployment"),
        ("user", "'=' || \"user\""),
        ("tags", "'=project'"),
        ("tag:project", "'=p' || project"),
    )
    lines = (
        ("baseline", "baseline_microusd"),
        ("spent", "cost_microusd"),
        ("cheaper_route", "baseline_microusd - cost_microusd"),
    )
    statements = [
        today,
        f"INSERT INTO ledger ({columns}) SELECT {columns.removesuffix('tags')} {_TAGS.format('project')} FROM today",
        f"INSERT INTO ledger_days (day, {keys}, requests, prompt_tokens, cached_tokens, completion_tokens, cost_microusd) "
        f"SELECT {{day}}, {keys}, count(*), {sums} FROM today GROUP BY {keys}",
        *(
            f"INSERT INTO savings_days (day, team_id, alias, line, requests, amount_microusd) SELECT {{day}}, team_id, alias, "
            f"'{line}', count(*), sum({amount}) FROM today GROUP BY team_id, alias"
            for line, amount in lines
        ),
        *(
            f"INSERT INTO ledger_rollups SELECT {{day}}, '{axis}', team_id, {value}, count(*), {sums}, {zeros} FROM today "
            f"GROUP BY team_id, 4"
            for axis, value in axes
        ),
        "DROP TABLE today",
    ]
    if is_sqlite:  # ends with the connection, which the caller closes
        async with database.reading() as connection:
            await connection.exec_driver_sql("PRAGMA cache_size=-262144")
    for number in range(days):
        day = _END_MS // _DAY_MS - days + number
        values = {
            "day": day,
            "first": day * _DAY_MS,
            "start": have + (rows - have) * number // days,
            "end": have + (rows - have) * (number + 1) // days,
        }
        async with database.writing() as connection:
            await prepare(connection, database, schema.ledger, [day * _DAY_MS])
            for statement in statements:
                await connection.exec_driver_sql(_with(statement, values))
    added = ", ".join(f"sum({name})" for name in (*SUMS, *HIT_SUMS))
    async with database.writing() as connection:
        for level in range(1, len(SPANS)):
            period = f"{period_of(0, level)} + period / {SPANS[level]}"
            days_of_fill = f"period BETWEEN {_END_MS // _DAY_MS - days} AND {_END_MS // _DAY_MS}"
            await connection.exec_driver_sql(
                f"INSERT INTO ledger_rollups SELECT {period}, axis, team_id, value, {added} FROM ledger_rollups "
                f"WHERE {days_of_fill} GROUP BY {period}, axis, team_id, value"
            )
    if not is_sqlite:  # as its autovacuum does
        async with database.writing() as connection:
            await connection.execute(sa.text("ANALYZE"))


def _with(statement: str, values: dict[str, int]) -> str:
    for name, value in values.items():
        statement = statement.replace(f"{{{name}}}", str(value))
    return statement


def _queries(ledger: Ledger, chance: random.Random, days: int) -> dict[str, Callable[[], Awaitable[Any]]]:
    def last(some: int, **fields: Any) -> LedgerFilter:
        until = _END_MS - chance.randrange(max(1, days - some + 1)) * _DAY_MS
        return LedgerFilter(from_ms=until - some * _DAY_MS, until_ms=until, **fields)

    def team(some: int, **fields: Any) -> LedgerFilter:
        return last(some, team_id=chance.randrange(1, _TEAMS + 1), **fields)

    def key() -> LedgerFilter:
        return LedgerFilter(key_id=chance.randrange(_KEYS))

    month, totals = min(30, days), ledger.totals
    axes = {"team": Group.TEAM, "key": Group.KEY, "user": Group.USER, "model": Group.ALIAS, "tag": Group.TAG}
    found: dict[str, Callable[[], Awaitable[Any]]] = {}
    for some in (month, days):
        for name, axis in (*axes.items(), ("day", Group.DAY)):
            tag = "project" if axis is Group.TAG else None
            found[f"all teams by {name}, {some} days"] = lambda a=axis, s=some, t=tag: totals(
                [a], last(s, tag=t), 1_000
            )
            found[f"one team by {name}, {some} days"] = lambda a=axis, s=some, t=tag: totals([a], team(s, tag=t), 1_000)
    return {
        **found,
        f"one team by model and day, {month} days": lambda: totals([Group.ALIAS, Group.DAY], team(month)),
        f"one team by user and day, {month} days": lambda: totals([Group.USER, Group.DAY], team(month)),
        f"one team by key, model and deployment, {month} days": lambda: totals(
            [Group.KEY, Group.ALIAS, Group.DEPLOYMENT], team(month)
        ),
        f"one user of a team by day, {days} days": lambda: totals([Group.DAY], team(days, user="user-3-7")),
        f"one key by day, {days} days": lambda: totals([Group.DAY], key()),
        f"savings by team and day, {month} days": lambda: ledger.savings(last(month)),
        "a page of a team's rows": lambda: ledger.rows(team(month), 100),
    }


async def _timed(query: Callable[[], Awaitable[Any]], runs: int) -> tuple[float, float, float]:
    """Median and 95th percentile, and the median of this process' CPU time (with SQLite all there is), ms, after one run
    that warms the connection.
    """
    await query()
    taken: list[float] = []
    cpu: list[float] = []
    for _ in range(runs):
        began, used = time.perf_counter(), time.process_time()
        await query()
        taken.append((time.perf_counter() - began) * 1000)
        cpu.append((time.process_time() - used) * 1000)
    return _percentile(taken, 0.5), _percentile(taken, 0.95), _percentile(cpu, 0.5)


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
