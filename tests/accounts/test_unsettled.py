"""Rows on their way to SQL: kept while Redis refuses them, and settled again where it loses them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from pathlib import Path

import pytest
from sqlalchemy.exc import SQLAlchemyError
from structlog.testing import capture_logs

from cache.redis_link import RedisLink
from gateway.accounts import LedgerRow, decode_row
from gateway.accounts.spool import Spool
from gateway.journey.budget import Money
from gateway.settings import BudgetSettings
from policies import Budget, Budgets, Hold, Usage, WindowKind
from policies.holds import LEDGER_STREAM
from tests.services import RedisServer, run_redis

_TOTAL = Budget(1, 7, WindowKind.TOTAL, 10**9)


def row_of(hold: Hold) -> LedgerRow:
    return LedgerRow(
        id=hold.id,
        at_ms=hold.at_ms,
        request_id=hold.id,
        team_id=7,
        key_id=1,
        alias="m",
        deployment="d",
        usage=Usage(1, 1),
        cost_microusd=5,
        kind="chat",
    )


class Books:
    """A Redis, a worker's money, and what a writer that runs when the test says so has put into SQL."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        self.server = server
        self.link = RedisLink(server.url, 5.0)
        self.budgets = Budgets(self.link, defer=self.link.defer)
        self.folder = folder
        self.spool = Spool(folder)
        self.sql: list[str] = []
        self.is_sql_down = False
        self.money = self.worker(self.spool)

    def worker(self, spool: Spool) -> Money:
        return Money(self.budgets, BudgetSettings(), spool, self.saved)

    async def saved(self, ids: Collection[str]) -> set[str]:
        if self.is_sql_down:
            raise SQLAlchemyError
        return set(ids) & set(self.sql)

    async def settle(self, *names: str) -> None:
        for name in names:
            hold = self.budgets.unreserved(name, 7)
            await self.money.settle(hold, row_of(hold))

    async def waiting(self) -> list[str]:
        """The rows in Redis that the writer has not taken."""
        entries = await self.link.execute_command("XRANGE", LEDGER_STREAM, "-", "+")
        return [decode_row(fields[b"row"]).id for _, fields in entries]

    async def write(self, *, only: int = 100) -> None:
        """The ledger's writer puts the oldest rows into SQL."""
        for entry, fields in await self.link.execute_command("XRANGE", LEDGER_STREAM, "-", "+", "COUNT", only):
            self.sql.append(decode_row(fields[b"row"]).id)
            await self.link.execute_command("XDEL", LEDGER_STREAM, entry)

    async def spent(self) -> int:
        [state] = await self.budgets.spent([_TOTAL])
        return state.spent


@pytest.fixture
async def books(tmp_path: Path) -> AsyncIterator[Books]:
    with run_redis() as server:
        made = Books(server, tmp_path / "spool")
        yield made
        await made.link.aclose()


async def test_what_redis_has_no_memory_for_is_settled_later(books: Books) -> None:
    """Redis is there and refuses every write, more than once: no row is given up, each is in the ledger once, and the log
    says so once.
    """
    await books.link.execute_command("CONFIG", "SET", "maxmemory", "1")
    await books.settle("a", "b")
    with capture_logs() as logged:
        for _ in range(3):
            await books.money.retry()
    assert books.money.unsettled == 2
    assert [line["event"] for line in logged] == ["ledger_row_refused"]
    await books.link.execute_command("CONFIG", "SET", "maxmemory", "0")
    await books.money.retry()
    assert books.money.unsettled == 0
    assert sorted(await books.waiting()) == ["a", "b"]


async def test_what_redis_never_takes_is_settled_by_a_later_worker(books: Books) -> None:
    """Redis ends before the workers do: the next start, with two workers and another Redis, settles each row once."""
    await books.link.execute_command("PING")
    books.server.kill()
    await books.settle("a", "b", "c")
    await books.money.aclose()
    with run_redis() as server:
        books.link = RedisLink(server.url, 5.0)
        books.budgets = Budgets(books.link, defer=books.link.defer)
        later = [books.worker(Spool(books.folder)) for _ in range(2)]
        for one in later:
            await one.adopt()
        assert sum(one.unsettled for one in later) == 3
        for one in later:
            await one.retry()
            assert one.unsettled == 0
        assert sorted(await books.waiting()) == ["a", "b", "c"]
        await books.write()
        for one in later:
            await one.aclose()
        await books.link.aclose()
    assert list(books.folder.iterdir()) == []


async def test_a_row_is_kept_until_sql_has_it(books: Books) -> None:
    """Not when Redis has it, and not while SQL is away; then it goes, and nothing is settled again."""
    await books.settle("a", "b")
    await books.money.confirm()
    assert len(books.spool) == 2
    await books.write(only=1)
    await books.settle("c")
    await books.money.confirm()
    assert len(books.spool) == 3  # `b` of the same look still waits
    await books.write()
    books.is_sql_down = True
    await books.money.confirm()
    assert len(books.spool) == 3
    books.is_sql_down = False
    await books.money.confirm()
    assert (len(books.spool), books.money.unsettled) == (0, 0)
    assert (books.sql, await books.spent()) == (["a", "b", "c"], 15)


@pytest.mark.parametrize("is_sql_down", [False, True])
async def test_what_redis_loses_is_settled_again_once(books: Books, is_sql_down: bool) -> None:
    """Redis is emptied, or another takes its place, with one row in SQL and two on their way: each ends in SQL once."""
    await books.settle("saved", "lost", "lost too")
    await books.write(only=1)
    await books.link.execute_command("FLUSHALL")
    await books.settle("later")
    books.is_sql_down = is_sql_down
    await books.money.confirm()
    books.is_sql_down = False
    for _ in range(3):
        await books.write()
        await books.money.confirm()
        await books.money.retry()
    assert sorted(books.sql) == ["later", "lost", "lost too", "saved"]
    assert await books.spent() == 15  # the writer restates what SQL had before
    assert len(books.spool) == 0


async def test_what_a_killed_worker_leaves_is_settled_once(books: Books) -> None:
    """Rows that SQL has are not settled again however long ago that was; those that Redis has, and those it lacks, once."""
    await books.settle("saved", "waiting")
    await books.write(only=1)
    await books.link.execute_command("DEL", "sameway:{money}:done:saved")  # as after a quarter of an hour
    books.spool.close()
    later = books.worker(Spool(books.folder))
    await later.adopt()
    await later.retry()
    await books.write()
    await later.confirm()
    assert (books.sql, await books.spent()) == (["saved", "waiting"], 10)
    await later.aclose()
    assert list(books.folder.iterdir()) == []


async def test_what_the_writer_sets_aside_is_not_settled_again(books: Books) -> None:
    """A row that Redis remembers and that has left its stream without reaching SQL is no lost one."""
    await books.settle("odd")
    await books.link.execute_command("DEL", LEDGER_STREAM)
    await books.money.confirm()
    await books.money.retry()
    assert (await books.waiting(), await books.spent(), len(books.spool)) == ([], 5, 0)
