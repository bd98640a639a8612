"""The writer between Redis and SQL: once per row, one of many at a time, and counts that heal themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec.structs import replace
from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import LedgerRow, charges_of, encode_row
from gateway.accounts.accounts import Accounts
from gateway.accounts.database import Database
from gateway.accounts.ledger import Ledger, LedgerFilter
from gateway.accounts.ledger_writer import LedgerWriter
from policies import Budget, Budgets, Hold, NotReady, Refused, Usage, WindowKind
from policies.budgets import LockLost
from policies.counters import Need
from policies.holds import LEDGER_LOCK, LEDGER_SET_ASIDE, LEDGER_STREAM, READY_KEY
from tests.accounts.conftest import empty

NOW_S = 4_000_000_000.0  # far enough from the present that Redis does not expire its windows
DAY = Budget(1, 7, WindowKind.DAY, 10**9)


@pytest.fixture
def ledger(accounts: Accounts) -> Ledger:
    return Ledger(accounts.database)


@pytest.fixture
def budgets(redis: Redis) -> Budgets:
    return Budgets(redis, lambda: NOW_S)


@pytest.fixture
async def writer(redis: Redis, ledger: Ledger, budgets: Budgets) -> AsyncIterator[LedgerWriter]:
    return LedgerWriter(redis, ledger, budgets, clock=lambda: NOW_S, token="one")


def row_of(name: str, cost: int, at_ms: int, team_id: int = 7) -> LedgerRow:
    return LedgerRow(
        id=name,
        at_ms=at_ms,
        request_id=f"r-{name}",
        team_id=team_id,
        key_id=3,
        alias="m",
        deployment="d",
        usage=Usage(10, 5),
        cost_microusd=cost,
        kind="generation",
    )


async def spend(budgets: Budgets, name: str, cost: int) -> None:
    hold = budgets.unreserved(name, 7)
    assert await budgets.settle(hold, cost, encode_row(row_of(name, cost, hold.at_ms)))


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def spent(budgets: Budgets) -> int:
    [state] = await budgets.spent([DAY])
    return state.spent


async def test_rows_get_to_sql_and_leave_redis(writer: LedgerWriter, ledger: Ledger, budgets: Budgets) -> None:
    """A step drains all that waits, in several batches, and the counts agree."""
    await asyncio.gather(*(spend(budgets, f"h{i}", 10) for i in range(60)))
    for start in range(60, 1100, 60):
        await asyncio.gather(*(spend(budgets, f"h{i}", 10) for i in range(start, start + 60)))
    assert await writer.backlog() == 1140
    assert await writer.step()
    assert await writer.backlog() == 0
    assert writer.stats.rows == 1140
    [total] = await ledger.totals([])
    assert total.cost_microusd == 11_400 == await spent(budgets)
    assert writer.stats.drift_microusd == 0


async def test_the_first_step_makes_money_ready(writer: LedgerWriter, budgets: Budgets) -> None:
    """A new installation refuses reserves until its empty ledger was counted."""
    with pytest.raises(NotReady):
        await budgets.reserve("a", 7, [DAY], 1, 60)
    await writer.step()
    await budgets.reserve("a", 7, [DAY], 1, 60)


async def test_a_crash_between_insert_and_delete_doubles_nothing(
    writer: LedgerWriter, ledger: Ledger, budgets: Budgets, redis: Redis
) -> None:
    """Rows that SQL has already, met again in the stream, are only taken out of it."""
    await spend(budgets, "a", 10)
    await spend(budgets, "b", 20)
    hold = budgets.unreserved("a", 7)
    await ledger.append([row_of("a", 10, hold.at_ms)])
    await writer.step()
    assert (writer.stats.rows, writer.stats.repeated) == (1, 1)
    [total] = await ledger.totals([])
    assert (total.requests, total.cost_microusd) == (2, 30)
    assert await spent(budgets) == 30


async def test_parts_of_the_teams_are_written_side_by_side(
    accounts_postgres: str, redis: Redis, budgets: Budgets
) -> None:
    """A transaction that waits for another's sums keeps no other team's rows; cut off there, no row is lost or doubled."""
    await empty(accounts_postgres)
    accounts = Accounts(accounts_postgres)
    await accounts.open()
    ledger = Ledger(accounts.database)
    writer = LedgerWriter(redis, ledger, budgets, clock=lambda: NOW_S, token="one")
    rows = [replace(row_of(f"h{n}", n, 10**12, team_id=n), user="u") for n in range(1, 9)]
    await ledger.append([replace(rows[0], id="first")])  # makes the month
    for row in rows:
        booked = ("team", row.team_id, "at_ms", row.at_ms, "cost", row.cost_microusd)
        await redis.execute_command("XADD", LEDGER_STREAM, "*", "row", encode_row(row), *booked)
    other = await asyncpg.connect(accounts_postgres.replace("+asyncpg", ""))
    async with other.transaction():
        await other.execute("SELECT * FROM ledger_rollups WHERE team_id = 1 FOR UPDATE")
        step = asyncio.create_task(writer.step())
        while (await ledger.totals([]))[0].requests < 7:  # noqa: ASYNC110 - SQL tells no one
            await asyncio.sleep(0.01)
        await other.fetch(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        with pytest.raises(SQLAlchemyError):
            await step
    assert {row.team_id for row in (await ledger.rows(LedgerFilter())).rows} == {1, 2, 3, 4, 6, 7, 8}
    assert await writer.step()
    assert (writer.stats.rows, writer.stats.repeated, await writer.backlog()) == (2, 6, 0)
    assert (await ledger.totals([]))[0].cost_microusd == 37
    await other.close()
    await accounts.close()


async def test_one_of_many_writes(redis: Redis, ledger: Ledger, budgets: Budgets) -> None:
    """The lock picks one; when that one is gone, another takes over and counts the ledger first."""
    one, two = (LedgerWriter(redis, ledger, budgets, clock=lambda: NOW_S, token=name) for name in ("one", "two"))
    assert await one.step()
    assert not await two.step()
    await spend(budgets, "a", 10)
    await redis.delete(LEDGER_LOCK)
    assert await two.step()
    assert not await one.step()
    assert (two.stats.rows, two.stats.restatements) == (1, 1)


async def test_a_redis_that_lost_its_memory_is_told_the_spend(
    writer: LedgerWriter, budgets: Budgets, redis: Redis
) -> None:
    """After a flush reserves are refused, the ledger is counted with what is still in the stream, and they work again."""
    await writer.step()
    await spend(budgets, "a", 600)
    await writer.step()
    await redis.flushall()
    await spend(budgets, "b", 30)
    with pytest.raises(NotReady):
        await budgets.reserve("c", 7, [DAY], 1, 60)
    await writer.step()
    assert await spent(budgets) == 630
    assert await budgets.is_ready()
    assert writer.stats.drift_microusd == 5 * 600  # in each of the five windows


async def test_counts_of_users_come_back_after_a_loss(writer: LedgerWriter, budgets: Budgets, redis: Redis) -> None:
    """What each user has spent is counted again from SQL and from the stream, in calendar and in rolling windows."""
    await writer.step()
    each = Budget(8, 7, WindowKind.DAY, 1000, axis="user")
    rolling = Budget(9, 7, WindowKind.ROLLING, 1000, axis="user", rolling_s=86_400)
    for name, cost in (("a", 600), ("b", 30)):
        need = Need(cost, values={"user": "alice"})
        hold = await budgets.reserve(name, 7, [each, rolling], need, 60)
        assert isinstance(hold, Hold)
        row = row_of(name, cost, hold.at_ms)
        row = msgspec.structs.replace(row, charges=charges_of(row, hold.more))
        if name == "b":
            await redis.flushall()
        assert await budgets.settle(hold, cost, encode_row(row), row.charges)
        if name == "a":
            await writer.step()
    with pytest.raises(NotReady):
        await budgets.reserve("c", 7, [each], Need(1, values={"user": "alice"}), 60)
    await writer.step()
    refused = await budgets.reserve("d", 7, [each], Need(371, values={"user": "alice"}), 60)
    assert isinstance(refused, Refused)
    assert refused.state.spent == 630
    refused = await budgets.reserve("e", 7, [rolling], Need(371, values={"user": "alice"}), 60)
    assert isinstance(refused, Refused)
    assert refused.state.spent == 630
    await writer.step()  # a row that came again, and a restatement, change nothing
    assert isinstance(await budgets.reserve("f", 7, [each, rolling], Need(370, values={"user": "alice"}), 60), Hold)


async def test_a_loss_makes_no_room_for_more_values(writer: LedgerWriter, redis: Redis) -> None:
    """Values that spent keep their places: further ones share a count after a flush, too, in any window."""
    budgets = Budgets(redis, lambda: NOW_S, values_max=2)
    await writer.step()
    each = Budget(8, 7, WindowKind.DAY, 1000, axis="user")
    rolling = Budget(9, 7, WindowKind.ROLLING, 1000, axis="tag:p", rolling_s=7200)
    limits = [each, rolling]
    for user in ("alice", ""):
        hold = await budgets.reserve(f"h{user}", 7, limits, Need(900, values={"user": user, "tag:p": user}), 60)
        assert isinstance(hold, Hold)
        row = row_of(hold.id, 900, hold.at_ms)
        row = msgspec.structs.replace(row, charges=charges_of(row, hold.more))
        assert await budgets.settle(hold, 900, encode_row(row), row.charges)
    await writer.step()
    await redis.flushall()
    await writer.step()
    states = await budgets.states(limits)
    assert sorted(state.value[0] for state in states) == ["#", "#", "#", "#", "*", "*"]
    assert sorted(state.spent for state in states) == [0, 0, 900, 900, 900, 900]
    assert isinstance(
        await budgets.reserve("bob", 7, limits, Need(600, values={"user": "bob", "tag:p": "bob"}), 60), Hold
    )
    for name, budget in (("user", each), ("tag:p", rolling)):
        refused = await budgets.reserve(f"carol {name}", 7, [budget], Need(600, values={name: "carol"}), 60)
        assert isinstance(refused, Refused)
        assert refused.state.value == "*"
    assert isinstance(await budgets.reserve("again", 7, [each], Need(100, values={"user": "alice"}), 60), Hold)
    values = {state.value for state in await budgets.states([each])}
    assert {"=alice", "*"} < values  # its text is back with its next request


async def test_drift_is_found_and_put_right(redis: Redis, ledger: Ledger, budgets: Budgets) -> None:
    """A count that lost writes (a fail-over to a lagging replica) is right again after the next restatement, and told of."""
    now_s = NOW_S
    writer = LedgerWriter(redis, ledger, budgets, clock=lambda: now_s, restate_every_s=60)
    await spend(budgets, "a", 600)
    await writer.step()
    await redis.hincrby("sameway:{money}:spend:7:total", "spent", -100)
    await writer.step()
    assert writer.stats.drift_microusd == 0
    now_s += 60
    await writer.step()
    assert writer.stats.drift_microusd == 100
    assert await redis.hget("sameway:{money}:spend:7:total", "spent") == b"600"


@pytest.mark.parametrize("row", [b"", b"\xc1", msgspec.msgpack.encode({"id": "a"}), None])
async def test_what_is_no_row_is_set_aside(
    writer: LedgerWriter, ledger: Ledger, budgets: Budgets, redis: Redis, row: bytes | None
) -> None:
    """A bad entry blocks nobody: it moves to a stream of its own with its reason, and its spend still counts."""
    await spend(budgets, "a", 10)
    hold = budgets.unreserved("bad", 7)
    await budgets.settle(hold, 5, row if row is not None else encode_row(row_of("bad", 6, hold.at_ms)))
    await spend(budgets, "b", 20)
    await writer.step()
    assert (writer.stats.rows, writer.stats.set_aside, await writer.backlog()) == (2, 1, 0)
    [(_, fields)] = await redis.xrange(LEDGER_SET_ASIDE)
    assert fields[b"reason"]
    assert fields[b"cost"] == b"5"
    assert await spent(budgets) == 35
    await redis.delete(READY_KEY)
    await writer.step()
    assert await spent(budgets) == 35


async def test_a_row_that_sql_refuses_is_found_among_the_good(
    writer: LedgerWriter, budgets: Budgets, redis: Redis, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that fails for one row's sake is tried row by row; only that one is set aside."""
    append = ledger.append

    async def picky(rows: list[LedgerRow]) -> int:
        if any(row.id == "h3" for row in rows):  # stands for a constraint this code does not know
            rows = [msgspec.structs.replace(row, alias=None) if row.id == "h3" else row for row in rows]
        return await append(rows)

    monkeypatch.setattr(ledger, "append", picky)
    for i in range(6):
        await spend(budgets, f"h{i}", 1)
    await writer.step()
    assert (writer.stats.rows, writer.stats.set_aside, await writer.backlog()) == (5, 1, 0)
    monkeypatch.undo()
    assert {row.id for row in (await ledger.rows(LedgerFilter())).rows} == {"h0", "h1", "h2", "h4", "h5"}


async def test_a_database_that_is_away_loses_nothing(redis: Redis, budgets: Budgets, accounts: Accounts) -> None:
    """While SQL fails the rows wait in Redis and the failure is counted; when it is back they arrive."""
    ledger = Ledger(accounts.database)
    writer = LedgerWriter(redis, ledger, budgets, clock=lambda: NOW_S)
    real = accounts.database
    ledger.database = Database("postgresql://nobody@/none?host=/nonexistent")
    await spend(budgets, "a", 10)
    task = asyncio.create_task(writer.run())
    await until(lambda: writer.stats.failures > 0)
    assert await redis.xlen(LEDGER_STREAM) == 1
    while await redis.get(LEDGER_LOCK) is not None:  # noqa: ASYNC110 (it lets others try)
        await asyncio.sleep(0.001)
    ledger.database = real
    await until(lambda: writer.stats.rows > 0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await redis.get(LEDGER_LOCK) is None


class Paused:
    """A Redis client that stops before a chosen call until it is told to go on: a process that was paused there."""

    def __init__(self, redis: Redis, words: str) -> None:
        self._redis = redis
        self._words = words
        self.reached = asyncio.Event()
        self.go_on = asyncio.Event()

    async def _wait(self, command: str) -> None:
        if self._words in command and not self.reached.is_set():
            self.reached.set()
            await self.go_on.wait()

    async def execute_command(self, *args: Any) -> Any:
        await self._wait(str(args[0]))
        return await self._redis.execute_command(*args)

    async def eval(self, script: str, numkeys: int, *rest: Any) -> Any:
        await self._wait(script)
        return await self._redis.eval(script, numkeys, *rest)


@pytest.mark.parametrize("words", ["'PX', ARGV[2]", "'XRANGE'", "XDEL", "drift + math.abs", "'SET', KEYS[2], '1'"])
async def test_a_writer_paused_past_its_lock_spoils_nothing(
    redis: Redis, ledger: Ledger, budgets: Budgets, words: str
) -> None:
    """Wherever a writer stops for longer than its lease, another does the work, and its late steps change nothing."""
    await spend(budgets, "a", 100)
    client = Paused(redis, words)
    slow = LedgerWriter(client, ledger, Budgets(client, lambda: NOW_S), clock=lambda: NOW_S, token="slow")
    step = asyncio.create_task(slow.step())
    await client.reached.wait()
    await redis.delete(LEDGER_LOCK)  # its lease ran out
    other = LedgerWriter(redis, ledger, budgets, clock=lambda: NOW_S, token="other")
    await spend(budgets, "b", 20)
    assert await other.step()
    await spend(budgets, "c", 3)
    await redis.delete(READY_KEY)  # and Redis lost it once more
    client.go_on.set()
    [outcome] = await asyncio.gather(step, return_exceptions=True)
    assert outcome is False or isinstance(outcome, LockLost)
    assert not await budgets.is_ready()
    assert await spent(budgets) == 123
    assert await other.step()
    [total] = await ledger.totals([])
    assert (total.requests, total.cost_microusd) == (3, 123)
    assert await spent(budgets) == 123
