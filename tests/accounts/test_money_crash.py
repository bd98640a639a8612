"""Money after kill -9 of real processes, anywhere, and of Redis under them: nothing lost, doubled, leaked or overspent."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from pathlib import Path

from redis.asyncio import Redis

from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from gateway.accounts.ledger_writer import LedgerWriter
from policies import Budgets
from policies.holds import LEDGER_LOCK, LEDGER_SET_ASIDE
from tests.accounts.conftest import fork
from tests.accounts.spender import LEASE_S, limits_of, run
from tests.services import run_redis

_LIMIT = 150_000
_KILLS = 8


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def wait_for_more(path: Path, count: int) -> None:
    before, deadline = len(lines(path)), time.monotonic() + 60
    while len(lines(path)) < before + count:
        assert time.monotonic() < deadline, "the spenders do not get on"
        time.sleep(0.01)


def test_nothing_is_lost_or_doubled_by_kills(database_url: str, tmp_path: Path) -> None:
    """Three workers spend and write while each is killed again and again, and Redis twice; then the sums are compared."""
    chance, path = random.Random(), tmp_path / "acknowledged"
    with run_redis(is_durable=True) as server:
        arguments = server.url, database_url, str(path), _LIMIT
        processes = [fork(run, *arguments) for _ in range(3)]
        try:
            for kill in range(_KILLS):
                wait_for_more(path, chance.randrange(10, 60))
                victim = chance.randrange(3)
                assert processes[victim].is_alive()
                processes[victim].kill()
                processes[victim].join()
                if kill in (2, 5):
                    server.kill()
                    server.start()
                processes[victim] = fork(run, *arguments)
            wait_for_more(path, 50)
        finally:
            for process in processes:
                process.kill()
                process.join()
        asyncio.run(compare(server.url, database_url, path))


async def compare(redis_url: str, database_url: str, path: Path) -> None:
    assert "drift" not in lines(path)
    acknowledged = dict(line.split() for line in lines(path) if line != "refused")
    redis, accounts = Redis.from_url(redis_url), Accounts(database_url)
    await accounts.open()
    ledger, budgets = Ledger(accounts.database), Budgets(redis)
    limit, each_user, tokens = limits_of(_LIMIT)
    [before] = await budgets.spent([limit])
    users = await budgets.states([each_user])
    await redis.delete(LEDGER_LOCK)
    writer = LedgerWriter(redis, ledger, budgets)
    await writer.step()
    rows = {row.id: row for row in (await ledger.rows(LedgerFilter(), limit=100_000)).rows}
    assert {name: rows[name].cost_microusd for name in acknowledged} == {n: int(c) for n, c in acknowledged.items()}
    total = sum(row.cost_microusd for row in rows.values())
    assert writer.stats.drift_microusd == 0
    assert before.spent == total <= _LIMIT
    assert sum(state.spent for state in users) == total
    assert max(state.spent for state in users) <= each_user.limit
    of_tokens = sum(row.usage.prompt_tokens + row.usage.completion_tokens for row in rows.values())
    assert sum(state.spent for state in await budgets.states([tokens])) == of_tokens
    [by_day] = await ledger.totals([])
    assert (by_day.requests, by_day.cost_microusd) == (len(rows), total)
    for group, name in ((Group.USER, "user"), (Group.TAG, "tags")):
        where = LedgerFilter(tag="step") if group is Group.TAG else None
        sums = {getattr(one, group): one.cost_microusd for one in await ledger.totals([group], where)}
        of_rows: Counter[str] = Counter()
        for row in rows.values():
            value = row.user if name == "user" else row.tags_by_name()["step"]
            of_rows[f"={value}" if value else ""] += row.cost_microusd
        assert sums == of_rows
    lines_of_days: Counter[str] = Counter()
    for line in await ledger.savings(LedgerFilter()):
        lines_of_days[line.line] += line.amount_microusd
    assert lines_of_days == {"baseline": 3 * total, "spent": total, "prefix_read": total, "cheaper_route": total}
    assert await redis.xlen(LEDGER_SET_ASIDE) == 0
    await asyncio.sleep(LEASE_S)
    [after] = await budgets.spent([limit])
    assert (after.spent, after.held) == (total, 0)
    assert [state.held for state in await budgets.states([each_user, tokens]) if state.held] == []
    await redis.aclose()
    await accounts.close()
