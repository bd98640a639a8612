"""`./run bench ledger`: how long queries of spend and savings take on a large ledger, and how fast it is written.

    ./run bench ledger [--rows 10000000] [--days 90] [--runs 40] [--rate 5000] [--postgres] [--json FILE]

Makes the rows itself in a temporary folder: 50 teams with 200 keys, 10,000 users, 10 models of two deployments and a tag of 30
values, spread over --days. The first rows go through Redis and the ledger's own writer: those that wait, as fast as it can, and
then --rate new ones a second from another process, for 20 s. Beside it the same rows are copied into a table without sums (on
PostgreSQL by COPY). The others are inserted by SQL, and summed up as the writer would. Each query runs --runs times with other
teams, keys and days. Exits with 1 where a p95 is over 200 ms, or where over a second's rows wait at the end of the 20 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import sqlalchemy as sa

from cache.redis_link import RedisLink
from gateway.accounts import LedgerRow, encode_row, schema
from gateway.accounts.database import Database
from gateway.accounts.ledger import COLUMNS, Group, Ledger, LedgerFilter, flat_row
from gateway.accounts.ledger_writer import BATCH, LedgerWriter
from gateway.accounts.months import forget, prepare
from gateway.accounts.rollups import SPANS, SUMS, period_of
from gateway.accounts.row import HIT_SUMS
from policies import Budgets, Usage
from policies.holds import LEDGER_STREAM
from tests.services import run_postgres, run_redis

_P95_MS_MAX = 200.0
_DAY_MS = 86_400_000
_END_MS = 20_500 * _DAY_MS
_TEAMS, _KEYS, _MODELS, _USERS, _PROJECTS = 50, 200, 10, 200, 30
_TAGS = "'{{\"project\":\"p' || {} || '\"}}'"
_TIMED = 40_000
_SENT_FOR_S = 20


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench ledger", description=__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--days", type=int, default=90)
    parser.add_argument("--runs", type=int, default=40)
    parser.add_argument("--rate", type=int, default=5_000, help="rows a second for 20 s; 0: none")
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of its own; default: SQLite")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sameway-ledger-"))
        url = f"sqlite:///{folder}/ledger.db"
        server = stack.enter_context(run_postgres()) if arguments.postgres else None
        if server is not None:
            url = server.create_database()
        redis_url = stack.enter_context(run_redis()).url
        writing = asyncio.run(_write(url, redis_url, arguments.days, arguments.rate, server and server.pid))
        found = writing | asyncio.run(_run(url, arguments.rows, arguments.days, arguments.runs))
    print(f"{found['rows']:,} rows over {arguments.days} days on {'PostgreSQL' if arguments.postgres else 'SQLite'}")
    print(
        f"writer: {found['written_per_s']:,.0f} rows a second that waited, {found['to_copies']:.2f} of what bare copies reach; "
        f"a row costs {found['writer_us']:.0f} us of the writer's CPU, and {found['server_us']:.0f} us of the server's"
    )
    print(
        f"{found['sent_per_s']:,.0f} new rows a second for {_SENT_FOR_S} s: at most {found['waiting_max']:,} wait, ",
        end="",
    )
    print(f"{found['waiting_at_end']:,} at the end; the others inserted in {found['filled_s']:,.0f} s")
    for name, (p50, p95, cpu) in found["queries"].items():
        print(f"{name:48} p50 {p50:7.1f} ms   p95 {p95:7.1f} ms   CPU of this process {cpu:7.1f} ms")
    print(f"{found['months']} months removed, in {found['dropped_s']:.2f} s each")
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2))
    slow = [name for name, (_, p95, _) in found["queries"].items() if p95 > _P95_MS_MAX]
    print(f"over {_P95_MS_MAX:.0f} ms at p95: {', '.join(slow) or 'none'}")
    return 1 if slow or found["waiting_at_end"] > arguments.rate or found["sent_per_s"] < 0.98 * arguments.rate else 0


async def _run(url: str, rows: int, days: int, runs: int) -> dict[str, Any]:
    database = Database(url)
    await database.open()
    ledger = Ledger(database)
    began = time.perf_counter()
    await _fill(database, min(_TIMED, rows), rows, days)
    await database.close()  # its connections are made anew
    filled_s = time.perf_counter() - began
    queries = {name: await _timed(query, runs) for name, query in _queries(ledger, random.Random(1), days).items()}
    began = time.perf_counter()
    months = await forget(database, _END_MS, 32)
    dropped_s = (time.perf_counter() - began) / max(1, len(months))
    await database.close()
    times = {"filled_s": filled_s, "months": len(months), "dropped_s": dropped_s}
    return {"rows": rows, "queries": queries, **times}


async def _write(url: str, redis_url: str, days: int, rate: int, server_pid: int | None) -> dict[str, float]:
    """The writer's rows a second, and what waits while others add `rate` a second."""
    database, link = Database(url), RedisLink(redis_url, 10.0)
    await database.open()
    writer, chance = LedgerWriter(link, Ledger(database), Budgets(link)), random.Random(0)
    rows = sorted([_row(chance, f"w{number}", days) for number in range(_TIMED)], key=lambda row: row.at_ms)
    await _send(link, rows[:BATCH])
    await writer.step()
    rows = rows[BATCH:]
    await _send(link, rows)
    began, used, server_used = time.perf_counter(), time.process_time(), _cpu_s(server_pid)
    await writer.step()
    taken_s, used_s = time.perf_counter() - began, time.process_time() - used
    server_s = _cpu_s(server_pid) - server_used
    copied_per_s = await _copied_per_s(database, rows)
    context, before, waiting = multiprocessing.get_context("spawn"), writer.stats.rows, [0]
    sent_s = context.Value("d", 0.0)
    sender = context.Process(target=_send_for, args=(redis_url, days, rate, sent_s), daemon=True)
    sender.start()
    running = asyncio.create_task(writer.run())
    while not sent_s.value:
        waiting.append(await writer.backlog())
        await asyncio.sleep(0.05)
    waiting.append(await writer.backlog())
    while await writer.backlog():  # noqa: ASYNC110 - Redis tells no one
        await asyncio.sleep(0.05)
    running.cancel()
    await asyncio.wait([running])
    sent = writer.stats.rows - before
    await link.aclose()
    await database.close()
    return {
        "written_per_s": len(rows) / taken_s,
        "to_copies": len(rows) / taken_s / copied_per_s,
        "writer_us": 1e6 * used_s / len(rows),
        "server_us": 1e6 * server_s / len(rows),
        "sent_per_s": sent / sent_s.value,
        "waiting_max": max(waiting),
        "waiting_at_end": waiting[-1],
    }


async def _send(link: RedisLink, rows: Sequence[LedgerRow]) -> None:
    """Put rows into the stream, as settling does."""
    for start in range(0, len(rows), 500):
        commands = [
            ("row", encode_row(row), "team", row.team_id, "at_ms", row.at_ms, "cost", row.cost_microusd)
            for row in rows[start : start + 500]
        ]
        await asyncio.gather(*(link.execute_command("XADD", LEDGER_STREAM, "*", *fields) for fields in commands))


def _send_for(redis_url: str, days: int, rate: int, taken_s: Any) -> None:
    """Send `rate` rows a second for 20 s, a fiftieth of it at a time: the rest of a process that lags is sent at once."""

    async def send() -> None:
        link, chance, sent = RedisLink(redis_url, 10.0), random.Random(1), 0
        began = time.perf_counter()
        while sent < rate * _SENT_FOR_S:
            due = min(rate * _SENT_FOR_S, int((time.perf_counter() - began) * rate))
            await _send(link, [_row(chance, f"s{number}", days) for number in range(sent, due)])
            sent = due
            await asyncio.sleep(0.02)
        taken_s.value = time.perf_counter() - began
        await link.aclose()

    asyncio.run(send())


async def _copied_per_s(database: Database, rows: Sequence[LedgerRow]) -> float:
    """The rows a second that go into a table of equal indexes, without sums, by COPY on PostgreSQL."""
    values = [tuple(flat_row(row).values()) for row in rows]
    async with database.writing() as connection:
        like = "AS SELECT * FROM ledger LIMIT 0" if database.is_sqlite else "(LIKE ledger INCLUDING ALL)"
        await connection.exec_driver_sql(f"CREATE TABLE bare {like}")
        driver: Any = (await connection.get_raw_connection()).driver_connection
        began = time.perf_counter()
        if database.is_sqlite:
            await driver.executemany(f"INSERT INTO bare VALUES ({', '.join('?' * len(COLUMNS))})", values)
        else:
            await driver.copy_records_to_table("bare", records=values)
        taken_s = time.perf_counter() - began
        await connection.exec_driver_sql("DROP TABLE bare")
    return len(rows) / taken_s


def _cpu_s(server_pid: int | None) -> float:
    """The CPU time of a PostgreSQL and its processes."""
    processes = [psutil.Process(server_pid)] if server_pid else []
    times = [one.cpu_times() for root in processes for one in (root, *root.children())]
    return sum(one.user + one.system for one in times)


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
