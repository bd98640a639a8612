"""Settlements that Redis refuses for a while: kept, and settled once it takes them."""

from __future__ import annotations

from pathlib import Path

from cache.redis_link import RedisLink
from gateway.accounts import LedgerRow, decode_row
from gateway.accounts.spool import Spool
from gateway.journey.budget import Money
from gateway.settings import BudgetSettings
from policies import Budgets, Hold
from policies.holds import LEDGER_STREAM
from tests.services import run_redis


def row_of(hold: Hold) -> LedgerRow:
    return LedgerRow(
        id=hold.id,
        at_ms=hold.at_ms,
        request_id=hold.id,
        team_id=7,
        key_id=1,
        alias="m",
        deployment="d",
        prompt_tokens=1,
        cached_tokens=0,
        completion_tokens=1,
        cost_microusd=5,
        kind="chat",
    )


async def test_what_redis_has_no_memory_for_is_settled_later() -> None:
    """Redis is there and refuses every write, more than once: no row is given up, and each is in the ledger once."""
    with run_redis() as server:
        link = RedisLink(server.url, 5.0)
        budgets = Budgets(link, defer=link.defer)
        money = Money(budgets, BudgetSettings(), Spool(None))
        await link.execute_command("CONFIG", "SET", "maxmemory", "1")
        for name in ("a", "b"):
            hold = budgets.unreserved(name, 7)
            await money.settle(hold, row_of(hold))
        for _ in range(3):
            await money.retry()
        assert money.unsettled == 2
        await link.execute_command("CONFIG", "SET", "maxmemory", "0")
        await money.retry()
        assert money.unsettled == 0
        assert await link.execute_command("XLEN", LEDGER_STREAM) == 2
        await link.aclose()


async def test_what_redis_never_takes_is_settled_by_a_later_worker(tmp_path: Path) -> None:
    """Redis ends before the workers do: the next start, with two workers and another Redis, settles each row once."""
    with run_redis() as server:
        link = RedisLink(server.url, 1.0)
        budgets = Budgets(link, defer=link.defer)
        money = Money(budgets, BudgetSettings(), Spool(tmp_path))
        await link.execute_command("PING")
        server.kill()
        for name in ("a", "b", "c"):
            hold = budgets.unreserved(name, 7)
            await money.settle(hold, row_of(hold))
        await money.aclose()
        await link.aclose()
    with run_redis() as server:
        link = RedisLink(server.url, 5.0)
        later = [Money(Budgets(link, defer=link.defer), BudgetSettings(), Spool(tmp_path)) for _ in range(2)]
        for one in later:
            one.adopt()
        assert sum(one.unsettled for one in later) == 3
        for one in later:
            await one.aclose()
            assert one.unsettled == 0
        entries = await link.execute_command("XRANGE", LEDGER_STREAM, "-", "+")
        assert sorted(decode_row(fields[b"row"]).id for _, fields in entries) == ["a", "b", "c"]
        await link.aclose()
    assert list(tmp_path.iterdir()) == []
