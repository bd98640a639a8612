"""Settlements that Redis refuses for a while: kept, and settled once it takes them."""

from __future__ import annotations

from gateway.accounts import LedgerRow
from gateway.journey.budget import Money
from gateway.settings import BudgetSettings
from gateway.transport.redis_link import RedisLink
from policies import Budgets
from policies.holds import LEDGER_STREAM
from tests.services import run_redis


async def test_what_redis_has_no_memory_for_is_settled_later() -> None:
    """Redis is there and refuses every write, more than once: no row is given up, and each is in the ledger once."""
    with run_redis() as server:
        link = RedisLink(server.url, 5.0)
        budgets = Budgets(link, defer=link.defer)
        money = Money(budgets, BudgetSettings())
        await link.execute_command("CONFIG", "SET", "maxmemory", "1")
        for name in ("a", "b"):
            hold = budgets.unreserved(name, 7)
            await money.settle(
                hold,
                LedgerRow(
                    id=name,
                    at_ms=hold.at_ms,
                    request_id=name,
                    team_id=7,
                    key_id=1,
                    alias="m",
                    deployment="d",
                    prompt_tokens=1,
                    cached_tokens=0,
                    completion_tokens=1,
                    cost_microusd=5,
                    kind="chat",
                ),
            )
        for _ in range(3):
            await money.retry()
        assert money.unsettled == 2
        await link.execute_command("CONFIG", "SET", "maxmemory", "0")
        await money.retry()
        assert money.unsettled == 0
        assert await link.execute_command("XLEN", LEDGER_STREAM) == 2
        await link.aclose()
