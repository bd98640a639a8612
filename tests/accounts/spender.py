"""What processes of these tests run: one spends money until it is killed, one only opens the accounts."""

from __future__ import annotations

import asyncio
import os
import random
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.accounts import LedgerRow, charges_of, encode_row
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Ledger
from gateway.accounts.ledger_writer import LedgerWriter
from policies import Budget, Budgets, Hold, NotReady, Usage, WindowKind
from policies.counters import Need
from policies.windows import Unit

TEAM = 7
LEASE_S = 1.0
USERS = ("alice", "bob", "")


def limits_of(limit_microusd: int) -> list[Budget]:
    """A limit of the team, and those of each user in money and in tokens."""
    return [
        Budget(1, TEAM, WindowKind.TOTAL, limit_microusd),
        Budget(2, TEAM, WindowKind.TOTAL, limit_microusd // 3, axis="user"),
        Budget(3, TEAM, WindowKind.ROLLING, 10**9, axis="user", unit=Unit.TOKENS, rolling_s=86_400),
    ]


async def spend(budgets: Budgets, limits: Sequence[Budget], writer: LedgerWriter, file: int) -> None:
    """Reserve, settle, drain, one after another for ever, as a gateway does: a settle that got no answer is tried again. Each
    acknowledged settle is a line in `file`."""
    while True:
        name = uuid.uuid4().hex
        try:
            user = random.choice(USERS)
            need = Need(100, tokens=10, values={"user": user})
            hold = await budgets.reserve(name, TEAM, limits, need, LEASE_S)
        except (RedisError, NotReady):
            await asyncio.sleep(0.01)
            continue
        if not isinstance(hold, Hold):
            os.write(file, b"refused\n")
            await asyncio.sleep(0.05)
            continue
        await asyncio.sleep(random.random() * 0.01)
        cost = random.randrange(101)
        row = LedgerRow(
            id=name,
            at_ms=hold.at_ms,
            request_id="r",
            team_id=TEAM,
            key_id=1,
            alias="m",
            deployment="d",
            usage=Usage(1, 1),
            cost_microusd=cost,
            kind="generation",
            baseline_microusd=3 * cost,
            prefix_read_microusd=cost,
            mechanism="cheaper_route",
            user=user,
            tags=f'{{"step":"{cost % 7}"}}',
        )
        row = msgspec.structs.replace(row, charges=charges_of(row, hold.more))
        while True:
            try:
                await budgets.settle(hold, cost, encode_row(row), row.charges)
                break
            except RedisError:
                await asyncio.sleep(0.01)
        os.write(file, f"{name} {cost}\n".encode())
        if writer.stats.drift_microusd:  # a restatement under load found, or made, a wrong count
            os.write(file, b"drift\n")


async def main(redis_url: str, database_url: str, path: str, limit_microusd: int) -> None:
    accounts = Accounts(database_url)
    await accounts.open()
    redis = Redis.from_url(redis_url, socket_timeout=1.0, retry=Retry(NoBackoff(), 0))
    budgets = Budgets(redis)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    limits = limits_of(limit_microusd)
    writer = LedgerWriter(redis, Ledger(accounts.database), budgets, restate_every_s=0.2)
    await asyncio.gather(writer.run(), *(spend(budgets, limits, writer, file) for _ in range(8)))


def run(redis_url: str, database_url: str, path: str, limit_microusd: int) -> None:
    asyncio.run(main(redis_url, database_url, path, limit_microusd))


def open_first(url: str, said: str) -> None:
    """Writes to the file `said` whether this process made the first key, and whether it imported alembic for that."""

    async def opened() -> object:
        accounts = Accounts(url)
        await accounts.open()
        try:
            return await accounts.ensure_first()
        finally:
            await accounts.close()

    first = asyncio.run(opened())
    Path(said).write_text(f"{'first' if first else 'later'} {'alembic' in sys.modules}")
