"""Money against a model: whatever order reserves, settles, crashes, time, losses of Redis and writers come in, the sums hold."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis.asyncio import Redis
from redis.crc import key_slot

from gateway.accounts import LedgerRow, encode_row
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Ledger, LedgerFilter
from gateway.accounts.ledger_writer import LedgerWriter
from gateway.accounts.row import decode_row
from policies import Budget, Budgets, Hold, NotReady, Refused, WindowKind
from policies.holds import LEDGER_LOCK, LEDGER_STREAM
from policies.windows import CALENDAR, window_at
from tests.services import RedisServer

T = TypeVar("T")
START_MS = 3_999_999_700_000  # 100 s into an hour, so that waits cross windows' ends from both sides
LEASE_S = 60
TEAMS = (1, 2)
LIMITS = (
    Budget(1, 1, WindowKind.HOUR, 1000),
    Budget(2, 1, WindowKind.DAY, 1500),
    Budget(3, 1, WindowKind.TOTAL, 3000),
    Budget(4, 1, WindowKind.WEEK, 700, is_hard=False),
    Budget(5, 2, WindowKind.MONTH, 2000),
)


class OneSlot:
    """Redis, minding that the keys of a script share a slot and that the script is told of them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def execute_command(self, *args: Any) -> Any:
        return await self._redis.execute_command(*args)

    async def eval(self, script: str, numkeys: int, *rest: Any) -> Any:
        assert len({key_slot(key.encode()) for key in rest[:numkeys]}) == 1
        return await self._redis.eval(script, numkeys, *rest)


@dataclass(slots=True)
class Held:
    """What the model knows of a hold that counts."""

    hold: Hold
    until_ms: int


class Money(RuleBasedStateMachine):
    """`ledger` is what was spent; `live` what is held; `running` the generations whose worker is alive."""

    url: str
    template: Path

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = tempfile.TemporaryDirectory(prefix="sameway-money-")
        self.now_ms = START_MS
        self.names = 0
        self.ledger: dict[str, LedgerRow] = {}
        self.drained: set[str] = set()
        self.live: dict[str, Held] = {}
        self.running: dict[str, Hold] = {}
        self.ended: dict[str, tuple[Hold, LedgerRow | None]] = {}
        self.ended_before_loss: dict[str, tuple[Hold, LedgerRow]] = {}
        self.limits = list(LIMITS)
        self.is_ready = False
        self.is_exact = False
        self.run(self.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def open(self) -> None:
        path = Path(self.folder.name) / "money.db"
        shutil.copy(self.template, path)
        self.redis = Redis.from_url(self.url)
        await self.redis.flushall()
        self.accounts = Accounts(f"sqlite:///{path}")
        self.sql = Ledger(self.accounts.database)
        link = OneSlot(self.redis)
        self.budgets = Budgets(link, lambda: self.now_ms / 1000, lambda: self.now_ms)
        self.writers = [
            LedgerWriter(link, self.sql, self.budgets, clock=lambda: self.now_ms / 1000, token=token, restate_every_s=0)
            for token in ("a", "b")
        ]

    def teardown(self) -> None:
        self.run(self.redis.delete(LEDGER_LOCK))
        self.step(writer=0)
        self.sums_hold()
        self.run(self.redis.aclose())
        self.run(self.accounts.close())
        self.runner.close()
        self.folder.cleanup()

    # ── the model's own arithmetic ──

    def spent(self, team_id: int, kind: WindowKind) -> int:
        window = window_at(kind, self.now_ms)
        return sum(r.cost_microusd for r in self.ledger.values() if r.team_id == team_id and window.holds(r.at_ms))

    def held(self, team_id: int, kind: WindowKind) -> int:
        window = window_at(kind, self.now_ms)
        return sum(
            held.hold.amount_microusd
            for held in self.live.values()
            if held.hold.team_id == team_id
            and kind in held.hold.held
            and window.holds(held.hold.at_ms)
            and held.until_ms > self.now_ms
        )

    def row(self, hold: Hold, cost: int) -> LedgerRow:
        return LedgerRow(
            id=hold.id,
            at_ms=hold.at_ms,
            request_id="r",
            team_id=hold.team_id,
            key_id=1,
            alias="m",
            deployment="d",
            prompt_tokens=1,
            cached_tokens=0,
            completion_tokens=1,
            cost_microusd=cost,
            kind="generation",
        )

    def pick(self, names: dict[str, Any], choice: int) -> str:
        return sorted(names)[choice % len(names)]

    # ── what may happen ──

    @initialize(is_started=st.booleans())
    def begin(self, is_started: bool) -> None:
        if is_started:
            self.step(writer=0)

    @rule(team_id=st.sampled_from(TEAMS), amount=st.integers(0, 900))
    def reserve(self, team_id: int, amount: int) -> None:
        self.names += 1
        name = f"h{self.names}"
        limits = [b for b in self.limits if b.team_id == team_id and amount]  # none limits what costs nothing
        attempt = self.budgets.reserve(name, team_id, limits, amount, LEASE_S)
        if limits and not self.is_ready:
            with pytest.raises(NotReady):
                self.run(attempt)
            return
        taken = self.run(attempt)
        used = {b: self.spent(team_id, b.window) + self.held(team_id, b.window) for b in limits}
        passed = [b for b in limits if used[b] + amount > b.limit]
        if not self.is_exact:  # after a repeated delivery, the count that decided is unknown here
            if isinstance(taken, Hold):
                self.running[name] = taken
                self.live[name] = Held(taken, self.now_ms + LEASE_S * 1000)
            return
        if any(b.is_hard for b in passed):
            assert isinstance(taken, Refused)
            assert taken.state.budget in passed
            return
        assert isinstance(taken, Hold)
        assert [w.budget for w in taken.warnings] == passed
        assert set(taken.held) == {b.window for b in limits}
        self.running[name] = taken
        self.live[name] = Held(taken, self.now_ms + LEASE_S * 1000)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9), share=st.sampled_from([0, 0.3, 1, 1.5]))
    def settle(self, choice: int, share: float) -> None:
        """Also late: after the lease, in a later window, after Redis lost everything."""
        name = self.pick(self.running, choice)
        hold = self.running.pop(name)
        row = self.row(hold, int(hold.amount_microusd * share))
        assert self.run(self.budgets.settle(hold, row.cost_microusd, encode_row(row)))
        self.ledger[name] = row
        self.live.pop(name, None)
        self.ended[name] = (hold, row)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def release(self, choice: int) -> None:
        name = self.pick(self.running, choice)
        hold = self.running.pop(name)
        assert self.run(self.budgets.release(hold))
        self.live.pop(name, None)
        self.ended[name] = (hold, None)

    @precondition(lambda self: self.ended)
    @rule(choice=st.integers(0, 99), is_settle=st.booleans())
    def repeat(self, choice: int, is_settle: bool) -> None:
        """A delivery whose answer was lost comes again."""
        hold, row = self.ended[self.pick(self.ended, choice)]
        again = row or self.row(hold, 5)
        if is_settle:
            assert not self.run(self.budgets.settle(hold, again.cost_microusd, encode_row(again)))
        else:
            assert not self.run(self.budgets.release(hold))
        self.run(self.budgets.renew([hold], LEASE_S))

    @precondition(lambda self: self.ended_before_loss)
    @rule(choice=st.integers(0, 99))
    def repeat_from_before_the_loss(self, choice: int) -> None:
        """Redis forgot that this was settled: the count is wrong until the ledger is counted again, the ledger never."""
        name = self.pick(self.ended_before_loss, choice)
        hold, row = self.ended_before_loss.pop(name)
        assert self.run(self.budgets.settle(hold, row.cost_microusd, encode_row(row)))
        self.ledger[name] = row
        self.ended[name] = (hold, row)
        self.is_exact = self.is_exact and row.cost_microusd == 0

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9), is_all=st.booleans())
    def renew(self, choice: int, is_all: bool) -> None:
        names = sorted(self.running) if is_all else [self.pick(self.running, choice)]
        holds = [self.running[name] for name in names]
        self.run(self.budgets.renew(holds, LEASE_S))
        for name, hold in zip(names, holds, strict=True):
            self.live[name] = Held(hold, self.now_ms + LEASE_S * 1000)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def crash(self, choice: int) -> None:
        """A worker dies: its hold counts until its lease is over."""
        del self.running[self.pick(self.running, choice)]

    @rule(s=st.sampled_from([1, 20, 61, 600, 3600, 86_400, 8 * 86_400]))
    def wait(self, s: int) -> None:
        self.now_ms += s * 1000

    @rule(writer=st.integers(0, 1))
    def step(self, writer: int) -> None:
        """A worker's writer does its work, if the lock lets it."""
        if self.run(self.writers[writer].step()):
            self.drained |= set(self.ledger)
            self.is_ready = self.is_exact = True

    @rule()
    def lose_the_lock(self) -> None:
        self.run(self.redis.delete(LEDGER_LOCK))

    @rule()
    def writer_dies_between_insert_and_delete(self) -> None:
        entries = self.run(self.redis.xrange(LEDGER_STREAM))
        self.run(self.sql.append([decode_row(fields[b"row"]) for _, fields in entries]))
        self.drained |= set(self.ledger)

    @rule()
    def redis_loses_everything(self) -> None:
        """Rows that had not reached SQL are lost with it (append-only persistence is there to prevent it), no others."""
        self.run(self.redis.flushall())
        self.ledger = {name: row for name, row in self.ledger.items() if name in self.drained}
        self.ended_before_loss |= {name: (h, row) for name, (h, row) in self.ended.items() if row is not None}
        self.ended.clear()
        self.live.clear()
        self.is_ready = self.is_exact = False

    @rule(team_id=st.sampled_from(TEAMS), kind=st.sampled_from(CALENDAR), limit=st.integers(0, 3000))
    def change_a_budget(self, team_id: int, kind: WindowKind, limit: int) -> None:
        """In the middle of a window, with generations under way. The model's holds know the windows they are in."""
        self.limits = [b for b in self.limits if (b.team_id, b.window) != (team_id, kind)]
        self.limits.append(Budget(100 + len(self.limits), team_id, kind, limit))

    # ── what must be true ──

    @invariant()
    def sums_hold(self) -> None:
        kinds = [Budget(0, team_id, kind, 0) for team_id in TEAMS for kind in CALENDAR]
        for state in self.run(self.budgets.spent(kinds)):
            team_id, kind = state.budget.team_id, state.budget.window
            assert state.held == self.held(team_id, kind)
            if self.is_exact:
                assert state.spent == self.spent(team_id, kind)

    @invariant()
    def the_ledger_is_whole(self) -> None:
        in_sql = {row.id: row for row in self.run(self.sql.rows(LedgerFilter(), limit=10_000)).rows}
        waiting = [decode_row(fields[b"row"]) for _, fields in self.run(self.redis.xrange(LEDGER_STREAM))]
        assert in_sql | {row.id: row for row in waiting} == self.ledger
        assert set(in_sql) == self.drained & set(self.ledger)


def test_money_holds(redis_server: RedisServer, tmp_path: Path) -> None:
    """No order of events passes a hard limit, leaks a hold, or doubles or loses a row."""

    async def prepare() -> None:
        accounts = Accounts(f"sqlite:///{tmp_path / 'template.db'}")
        await accounts.open()
        await accounts.close()

    asyncio.run(prepare())
    Money.url, Money.template = redis_server.url, tmp_path / "template.db"
    run_state_machine_as_test(
        Money,
        settings=settings(max_examples=50, stateful_step_count=30, suppress_health_check=list(HealthCheck)),
    )
