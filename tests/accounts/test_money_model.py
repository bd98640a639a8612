"""Budgets against a model: whatever order reserves, answers, kills, time, losses of Redis and writers come in, the sums hold."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import msgspec
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

from gateway.accounts import LedgerRow, charges_of, encode_row
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Ledger, LedgerFilter
from gateway.accounts.ledger_writer import LedgerWriter
from gateway.accounts.row import decode_row
from gateway.deployments.progress import Progress
from gateway.journey import bill
from gateway.wire.usage import usage_of
from policies import Budget, Budgets, Demand, Hold, NotReady, Price, Refused, Usage, WindowKind
from policies.counters import Need
from policies.holds import LEDGER_LOCK, LEDGER_STREAM, BudgetState
from policies.windows import ALIAS, BUCKETS, CALENDAR, DEPLOYMENT, KEY, TEAM, USER, Overdraft, Unit
from tests.services import RedisServer, run_redis

T = TypeVar("T")
START_MS = 3_999_999_700_000  # 100 s into an hour, so that waits cross windows' ends from both sides
LEASE_S = 60
TEAMS = (1, 2)
LIMITS = (
    Budget(1, 1, WindowKind.HOUR, 1000),
    Budget(2, 1, WindowKind.DAY, 1500, overdraft=Overdraft.ALLOW),
    Budget(3, 1, WindowKind.TOTAL, 3000),
    Budget(4, 1, WindowKind.WEEK, 700, is_hard=False),
    Budget(5, 2, WindowKind.MONTH, 2000),
    Budget(6, 2, WindowKind.MONTH, 900, is_hard=False),
    Budget(7, 1, WindowKind.DAY, 800, axis=USER),
    Budget(8, 1, WindowKind.ROLLING, 1200, axis="tag:p", unit=Unit.TOKENS, rolling_s=7200),
    Budget(9, 2, WindowKind.TOTAL, 4, axis=KEY, value="1", unit=Unit.REQUESTS),
    Budget(10, 2, WindowKind.HOUR, 900, axis=ALIAS, overdraft=Overdraft.ALLOW),
    Budget(11, 2, WindowKind.ROLLING, 1500, axis=DEPLOYMENT, rolling_s=3600, overdraft=Overdraft.TRUNCATE),
    Budget(12, 2, WindowKind.DAY, 700, axis=USER, time_zone="Europe/Berlin", overdraft=Overdraft.TRUNCATE),
    Budget(13, 2, WindowKind.DAY, 500, axis="tag:p", value="x", unit=Unit.TOKENS, is_hard=False),
)
VALUES_MAX = 2
VALUES = st.fixed_dictionaries(
    {KEY: st.sampled_from(["1", "2"]), ALIAS: st.just("m")},
    optional={
        USER: st.sampled_from(["alice", " \uff41lice ", "bob", "carol", ""]),
        "tag:p": st.sampled_from(["x", "y", "z"]),
        DEPLOYMENT: st.sampled_from(["d", "e"]),
    },
)
REQUESTS = st.fixed_dictionaries(
    {
        "team_id": st.sampled_from(TEAMS),
        "values": VALUES,
        "model": st.sampled_from(["dear", "dear", "free"]),
        "output": st.sampled_from([300, 100, 20]),
        "has_usual": st.sampled_from([True, True, False]),
        "worker": st.integers(0, 1),
        "is_repeated": st.booleans(),
    }
)
PROMPT_MAX, CONTEXT, USUAL = 100, 200, 30
PRICES = {
    "dear": Price(
        1_000_000,
        2_000_000,
        100_000,
        cache_write_microusd_per_mtok=1_250_000,
        cache_write_1h_microusd_per_mtok=2_000_000,
    ),
    "free": Price(0, 0),
}
ALIAS_OF: Any = SimpleNamespace(output_max=lambda _, demand: demand.output_tokens_max)
WRITES = {"cached_tokens": 20, "cache_creation_tokens": 60, "cache_creation_token_details": {}}
WRITES["cache_creation_token_details"] = {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 40}
ANSWERS: dict[str, Any] = {
    "plain": {"prompt_tokens": 60, "completion_tokens": 40},
    "writes": {"prompt_tokens": 100, "completion_tokens": 9, "prompt_tokens_details": WRITES},
    "tiny": {"prompt_tokens": 1, "completion_tokens": 0},
    "long prompt": {"prompt_tokens": 150, "completion_tokens": 10},
    "absurd": {"prompt_tokens": 10**18, "completion_tokens": 10**18, "total_tokens": 10**18},
    "longest": {"prompt_tokens": PROMPT_MAX, "completion_tokens": 10**6},
    "unreadable": {"prompt_tokens": "many", "completion_tokens": [1]},
    "missing": None,
    "left": None,
}
"""Usages as they come; the reader of `left` is gone after one token."""


class OneSlot:
    """Redis, minding that the keys of a script share a slot and that the script is told of them."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    async def execute_command(self, *args: Any) -> Any:
        return await self._redis.execute_command(*args)

    async def eval(self, script: str, numkeys: int, *rest: Any) -> Any:
        assert len({key_slot(key.encode()) for key in rest[:numkeys]}) == 1
        return await self._redis.eval(script, numkeys, *rest)


class Draw(NamedTuple):
    """What a hold takes of the count `name`; `most` is what its request may cost."""

    name: tuple[Any, ...]
    budget: Budget
    amount: int
    most: int


class Asked(NamedTuple):
    """A hold with what it was taken for, and the worker that took it."""

    hold: Hold
    draws: Sequence[Draw]
    demand: Demand
    model: str
    worker: int

    @property
    def at_ms(self) -> int:
        return self.hold.at_ms


@dataclass(slots=True)
class Held:
    """What the model knows of a hold that counts."""

    asked: Asked
    until_ms: int


class Money(RuleBasedStateMachine):
    """`ledger` is what was spent; `live` what is held; `running` the generations whose worker is alive."""

    server: RedisServer
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
        self.running: dict[str, Asked] = {}
        self.ended: dict[str, tuple[Asked, LedgerRow | None]] = {}
        self.ended_before_loss: dict[str, tuple[Asked, LedgerRow]] = {}
        self.asked: dict[str, Asked] = {}
        self.limits = list(LIMITS)
        self.ceilings = Counter[tuple[Any, ...]]()  # the highest limit of each count so far
        self.over = defaultdict[tuple[Any, ...], list[tuple[int, int]]](list)  # when and how much it may be passed
        self.values = defaultdict[tuple[Any, ...], list[str]](list)  # those with a count of their own
        self.restarts = 0
        self.is_ready = False
        self.is_exact = False
        self.run(self.open())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def open(self) -> None:
        path = Path(self.folder.name) / "money.db"
        shutil.copy(self.template, path)
        self.redis = Redis.from_url(self.server.url)
        await self.redis.flushall()
        self.accounts = Accounts(f"sqlite:///{path}")
        self.sql = Ledger(self.accounts.database)
        self.workers = [self.worker(), self.worker()]
        self.writers = [
            LedgerWriter(
                OneSlot(self.redis), self.sql, worker, clock=lambda: self.now_ms / 1000, token=token, restate_every_s=0
            )
            for token, worker in zip("ab", self.workers, strict=True)
        ]

    def worker(self) -> Budgets:
        clock = lambda: self.now_ms / 1000  # noqa: E731
        return Budgets(OneSlot(self.redis), clock, lambda: self.now_ms, values_max=VALUES_MAX)

    def teardown(self) -> None:
        self.lose_the_lock()
        self.step(writer=0)
        self.sums_hold()
        self.wait(LEASE_S)  # all workers are gone
        self.running.clear()
        self.sums_hold()
        every = [*self.limits, *(Budget(0, team_id, kind, 0) for team_id in TEAMS for kind in CALENDAR)]
        assert not any(state.held for state in self.run(self.workers[1].states(every)))
        self.run(self.redis.aclose())
        self.run(self.accounts.close())
        self.runner.close()
        self.folder.cleanup()

    # ── the model's own arithmetic ──

    def counts(self, budget: Budget, at_ms: int) -> bool:
        """Whether what was begun at `at_ms` counts against a budget now."""
        if budget.window is WindowKind.ROLLING:
            return budget.bucket_at(at_ms) >= budget.bucket_at(self.now_ms) - BUCKETS
        return budget.window_at(self.now_ms).holds(at_ms)

    def spent(self, name: tuple[Any, ...], budget: Budget) -> int:
        found = 0
        for one, row in self.ledger.items():
            if self.counts(budget, row.at_ms):
                draws = self.asked[one].draws
                is_on = row.team_id == budget.team_id if budget.is_shared else name in [draw.name for draw in draws]
                found += used_of(row, budget.unit) if is_on else 0
        return found

    def held(self, name: tuple[Any, ...], budget: Budget) -> int:
        return sum(
            draw.amount
            for held in self.live.values()
            if held.until_ms > self.now_ms
            for draw in held.asked.draws
            if draw.name == name and (budget.window is WindowKind.ROLLING or self.counts(budget, held.asked.at_ms))
        )

    def is_live(self, name: str) -> bool:
        return name in self.live and self.live[name].until_ms > self.now_ms

    def known_values(self, budget: Budget, at_ms: int | None = None) -> list[str]:
        at_ms = self.now_ms if at_ms is None else at_ms
        is_rolling = budget.window is WindowKind.ROLLING
        period = at_ms // (budget.rolling_s * 1000) if is_rolling else budget.window_at(at_ms).id
        return self.values[budget.id, budget.epoch, period]

    def name_of(self, budget: Budget, values: Mapping[str, str]) -> tuple[Any, ...]:
        """The count that a request with `values` draws on."""
        if budget.is_shared:
            return budget.team_id, budget.window
        if budget.axis == TEAM or budget.value is not None:
            return budget.id, budget.epoch, ""
        shown, known = shown_of(values.get(budget.axis, "")), self.known_values(budget)
        return budget.id, budget.epoch, shown if shown in known or len(known) < VALUES_MAX else "*"

    def row(self, name: str, asked: Asked, answer: str) -> LedgerRow:
        """The row of an answer, as the bill makes it."""
        given, content = ANSWERS[answer], {"missing": 25, "unreadable": 7}.get(answer, 1)
        found = None if given is None else usage_of(json.dumps(given).encode())
        price = PRICES[asked.model]
        at: Any = SimpleNamespace(price=price, context_tokens_max=CONTEXT, may_reason=False, tokens_per_ms=0.0)
        progress = Progress("d", has_begun=True, content_chunks=content, usage=found)
        usage = bill.usage_of(bill.Try(at, progress), ALIAS_OF, asked.demand, USUAL if asked.hold.is_cut else None)
        row = LedgerRow(
            id=name,
            at_ms=asked.at_ms,
            request_id="r",
            team_id=asked.hold.team_id,
            key_id=1,
            alias="m",
            deployment="d",
            usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            cost_microusd=price.cost(usage),
            kind="generation",
        )
        return msgspec.structs.replace(row, charges=charges_of(row, asked.hold.more))

    def pick(self, names: dict[str, Any], choice: int) -> str:
        return sorted(names)[choice % len(names)]

    # ── what may happen ──

    @initialize(is_started=st.sampled_from([True, True, True, False]))
    def begin(self, is_started: bool) -> None:
        if is_started:
            self.step(writer=0)

    @rule(requests=st.lists(REQUESTS, min_size=1, max_size=4))
    def reserve(self, requests: list[dict[str, Any]]) -> None:
        for one in requests:
            self.ask(**one)

    def ask(
        self,
        *,
        team_id: int,
        values: dict[str, str],
        model: str,
        output: int,
        has_usual: bool,
        worker: int,
        is_repeated: bool,
    ) -> None:
        """`is_repeated`: the first reply was lost on its way, and the client of Redis asks again."""
        self.names += 1
        name, price = f"h{self.names}", PRICES[model]
        demand = Demand(50, output, output, prompt_tokens_max=PROMPT_MAX, has_long_writes=True)
        microusd, usual = (price.cost_max(PROMPT_MAX, size, has_long_writes=True) for size in (output, USUAL))
        need = Need(
            microusd, PROMPT_MAX + output, 1, *((usual, PROMPT_MAX + USUAL) if has_usual else ()), values=values
        )
        groups: dict[tuple[Any, ...], list[Budget]] = {}
        for budget in self.limits:
            if budget.team_id == team_id and need.most(budget.unit) and is_about(budget, values):
                groups.setdefault(self.name_of(budget, values), []).append(budget)
        budgets = self.workers[worker]
        limits = [budget for budget in self.limits if budget.team_id == team_id]
        attempt = budgets.reserve(name, team_id, limits, need, LEASE_S)
        if groups and not self.is_ready:
            with pytest.raises(NotReady):
                self.run(attempt)
            return
        taken = self.run(attempt)
        if is_repeated and isinstance(taken, Hold):
            again = self.run(budgets.reserve(name, team_id, limits, need, LEASE_S))
            assert isinstance(again, Hold)
            assert (again.held, again.more, again.is_cut) == (taken.held, taken.more, taken.is_cut)
        used, amounts, usuals = dict[Any, int](), dict[Any, int](), dict[Any, int]()
        for count, some in groups.items():
            first = next((one for one in some if one.is_hard), some[0])
            used[count] = self.spent(count, first) + self.held(count, first)
            most, known = need.most(first.unit), need.usual(first.unit)
            usuals[count] = most if known is None else min(most, known)
            amounts[count] = usuals[count] if first.is_hard and first.overdraft is Overdraft.ALLOW else most
        all_of = [(count, budget) for count, some in groups.items() for budget in some]
        full = [(c, b) for c, b in all_of if b.is_hard and used[c] + amounts[c] > b.limit_at(self.now_ms)]
        never = [(c, b) for c, b in full if used[c] + (usuals if b.may_cut else amounts)[c] > b.limit_at(self.now_ms)]
        if self.is_exact:  # after a repeated delivery, the count that decided is unknown here
            if never:
                assert isinstance(taken, Refused)
                assert taken.state.budget in [budget for _, budget in never]
                return
            assert isinstance(taken, Hold)
            assert taken.is_cut == bool(full)
        if not isinstance(taken, Hold):
            return
        held = usuals if taken.is_cut else amounts
        draws = []
        for count, some in groups.items():
            draws.append(Draw(count, some[0], held[count], held[count] if taken.is_cut else need.most(some[0].unit)))
            known_values = self.known_values(some[0])
            if len(count) == 3 and count[2] not in ("", "*", *known_values):
                known_values.append(count[2])
            for budget in some:
                self.ceilings[count] = max(self.ceilings[count], budget.limit_at(self.now_ms) if budget.is_hard else 0)
        self.asked[name] = self.running[name] = Asked(taken, draws, demand, model, worker)
        self.live[name] = Held(self.asked[name], self.now_ms + LEASE_S * 1000)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9), answers=st.lists(st.sampled_from(sorted(ANSWERS)), min_size=1, max_size=3))
    def settle(self, choice: int, answers: list[str]) -> None:
        """Several at once; also late: after the lease, in a later window, after Redis lost everything."""
        some: dict[str, tuple[Asked, LedgerRow]] = {}
        for answer in answers[: len(self.running)]:
            name = self.pick(self.running, choice)
            asked = self.running.pop(name)
            row = self.row(name, asked, answer)
            some[name] = (asked, row)
            for draw in asked.draws:
                used = used_of(row, draw.budget.unit)
                assert used <= draw.most or answer in (
                    "long prompt",
                    "absurd",
                    "longest",
                )  # no prompt is longer than its bytes
                self.over[draw.name].append((row.at_ms, used - draw.amount if self.is_live(name) else used))

        async def all_of_them() -> list[bool]:
            return await asyncio.gather(
                *(
                    self.workers[asked.worker].settle(asked.hold, row.cost_microusd, encode_row(row), row.charges)
                    for asked, row in some.values()
                )
            )

        assert all(self.run(all_of_them()))
        for name, (asked, row) in some.items():
            self.ledger[name] = row
            self.live.pop(name, None)
            self.ended[name] = (asked, row)

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9))
    def release(self, choice: int) -> None:
        name = self.pick(self.running, choice)
        asked = self.running.pop(name)
        assert self.run(self.workers[asked.worker].release(asked.hold))
        self.live.pop(name, None)
        self.ended[name] = (asked, None)

    @precondition(lambda self: self.ended)
    @rule(choice=st.integers(0, 99), is_settle=st.booleans())
    def repeat(self, choice: int, is_settle: bool) -> None:
        """A delivery whose answer was lost comes again."""
        name = self.pick(self.ended, choice)
        asked, row = self.ended[name]
        again, budgets = row or self.row(name, asked, "plain"), self.workers[choice % 2]
        if is_settle:
            assert not self.run(budgets.settle(asked.hold, again.cost_microusd, encode_row(again), again.charges))
        else:
            assert not self.run(budgets.release(asked.hold))
        self.run(budgets.renew([asked.hold], LEASE_S))

    @precondition(lambda self: self.ended_before_loss)
    @rule(choice=st.integers(0, 99))
    def repeat_from_before_the_loss(self, choice: int) -> None:
        """Redis forgot that this was settled: the count is wrong until the ledger is counted again, the ledger never."""
        name = self.pick(self.ended_before_loss, choice)
        asked, row = self.ended_before_loss.pop(name)
        assert self.run(self.workers[0].settle(asked.hold, row.cost_microusd, encode_row(row), row.charges))
        self.ledger[name] = row
        self.ended[name] = (asked, row)
        self.is_exact = self.is_exact and row.cost_microusd == 0 and not row.charges
        for draw in asked.draws:
            self.over[draw.name].append((row.at_ms, used_of(row, draw.budget.unit)))

    @precondition(lambda self: self.running)
    @rule(choice=st.integers(0, 9), is_all=st.booleans())
    def renew(self, choice: int, is_all: bool) -> None:
        names = sorted(self.running) if is_all else [self.pick(self.running, choice)]
        self.run(self.workers[choice % 2].renew([self.running[name].hold for name in names], LEASE_S))
        for name in names:
            asked = self.running[name]
            if not self.is_live(name):  # it is taken again without a look at the limits
                for draw in asked.draws:
                    self.over[draw.name].append((asked.at_ms, draw.amount))
            self.live[name] = Held(asked, self.now_ms + LEASE_S * 1000)

    @rule(worker=st.integers(0, 1))
    def kill(self, worker: int) -> None:
        """A worker ends without a word: its holds count until their leases are over."""
        self.running = {name: asked for name, asked in self.running.items() if asked.worker != worker}
        self.workers[worker] = self.worker()

    @precondition(lambda self: not self.restarts)
    @rule()
    def redis_is_killed(self) -> None:
        """Its file has all that it said it did."""
        self.restarts += 1
        self.server.kill()
        self.server.start()
        self.run(self.redis.connection_pool.disconnect())

    @rule(s=st.sampled_from([1, 20, 61, 600, 3600, 86_400, 8 * 86_400]))
    def wait(self, s: int) -> None:
        self.now_ms += s * 1000

    @rule(writer=st.integers(0, 1))
    def step(self, writer: int) -> None:
        """A worker's writer does its work, if the lock lets it."""
        if self.run(self.writers[writer].step()):
            self.drained |= set(self.ledger)
            self.is_ready = self.is_exact = True
            for name, row in self.ledger.items():  # what spent keeps its place
                for draw in self.asked[name].draws:
                    known = (
                        self.known_values(replace(draw.budget, epoch=draw.name[1]), row.at_ms) if draw.name[2:] else []
                    )
                    if draw.name[2:] not in ((), ("",), ("*",)) and draw.name[2] not in known:
                        known.append(draw.name[2])

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
        self.ended_before_loss |= {name: (a, row) for name, (a, row) in self.ended.items() if row is not None}
        self.ended.clear()
        self.live.clear()
        self.values.clear()
        self.is_ready = self.is_exact = False

    @rule(
        choice=st.integers(0, len(LIMITS) - 1),
        how=st.sampled_from(["limit", "raise", "reset", "delete", "make"]),
        amount=st.integers(0, 3000),
    )
    def change_a_budget(self, choice: int, how: str, amount: int) -> None:
        """In the middle of a window, with generations under way. Holds know the counts that they are of."""
        made = LIMITS[choice]
        known = next((one for one in self.limits if one.id == made.id), None)
        if (known is None) != (how == "make"):
            return
        if known is not None:
            self.limits.remove(known)
            made = known
        match how:
            case "limit":
                made = replace(made, limit=amount)
            case "raise":
                made = replace(made, raised_by=amount, raised_until_ms=self.now_ms + 600_000)
            case "reset":
                made = replace(made, epoch=made.epoch + 1)
            case "delete":
                return
        self.limits.append(made)
        if made.is_shared:  # which counts all the time, also without a limit
            name = self.name_of(made, {})
            self.ceilings[name] = max(self.ceilings[name], self.spent(name, made) + self.held(name, made))

    # ── what must be true ──

    @invariant()
    def sums_hold(self) -> None:
        teams = [Budget(0, team_id, kind, 0) for team_id in TEAMS for kind in CALENDAR]
        own = [budget for budget in self.limits if not budget.is_shared]
        found = self.run(self.workers[0].states([*teams, *own]))
        states = [replace(state, value=SHOWN.get(state.value, state.value)) for state in found]
        for state in states:
            budget = state.budget
            name = self.name_of(budget, {}) if budget.is_shared else (budget.id, budget.epoch, state.value)
            assert state.held == self.held(name, budget), budget
            if self.is_exact:
                assert state.spent == self.spent(name, budget), budget
        for budget in own:
            if budget.axis != TEAM and budget.value is None:
                assert {s.value for s in states if s.budget is budget} == {"*", *self.known_values(budget)}
        self.no_limit_is_passed(states)

    def no_limit_is_passed(self, states: Sequence[BudgetState]) -> None:
        """But by what came late, by a prompt that its provider says is longer, and where that is allowed."""
        by_name = {self.name_of(b, {}) if b.is_shared else (b.id, b.epoch): b for b in self.limits if b.is_hard}
        for state in states:
            name = self.name_of(state.budget, {}) if state.budget.is_shared else ()
            name = name or (state.budget.id, state.budget.epoch, state.value)
            if (
                self.is_exact
                and state.budget.is_shared is (len(name) == 2)
                and (name in by_name or name[:2] in by_name)
            ):
                over = sum(max(0, amount) for at_ms, amount in self.over[name] if self.counts(state.budget, at_ms))
                assert state.spent + state.held <= self.ceilings[name] + over, state

    @invariant()
    def the_ledger_is_whole(self) -> None:
        in_sql = {row.id: row for row in self.run(self.sql.rows(LedgerFilter(), limit=10_000)).rows}
        waiting = [decode_row(fields[b"row"]) for _, fields in self.run(self.redis.xrange(LEDGER_STREAM))]
        found = in_sql | {row.id: bare(row) for row in waiting}
        assert found == {name: bare(row) for name, row in self.ledger.items()}
        assert set(in_sql) == self.drained & set(self.ledger)


def shown_of(text: str) -> str:
    """A value as budgets show it: texts that differ only in their form or in spaces at the ends are one."""
    text = unicodedata.normalize("NFKC", text).strip()
    return f"={text}" if text else "-"


SHOWN = {
    f"#{blake2b(text.encode(), digest_size=16).hexdigest()}": shown_of(text)
    for text in ("alice", "bob", "carol", "", "x", "y", "z", "m", "d", "e")
}
"""Values whose texts Redis lost."""


def is_about(budget: Budget, values: Mapping[str, str]) -> bool:
    if budget.axis == TEAM or (budget.value is None and budget.axis != DEPLOYMENT):
        return True
    return budget.value in (None, values.get(budget.axis)) and (budget.axis != DEPLOYMENT or DEPLOYMENT in values)


def bare(row: LedgerRow) -> LedgerRow:
    """Its columns in SQL."""
    return msgspec.structs.replace(row, charges=())


def used_of(row: LedgerRow, unit: Unit) -> int:
    """What a row adds to a count of `unit`."""
    if unit is Unit.REQUESTS:
        return 1
    return row.cost_microusd if unit is Unit.MONEY else row.usage.prompt_tokens + row.usage.completion_tokens


def test_money_holds(tmp_path: Path) -> None:
    """No order of events passes a hard limit, leaks a hold, or doubles or loses a row."""

    async def prepare() -> None:
        accounts = Accounts(f"sqlite:///{tmp_path / 'template.db'}")
        await accounts.open()
        await accounts.close()

    asyncio.run(prepare())
    Money.template = tmp_path / "template.db"
    with run_redis(is_durable=True, extra=("--appendfsync", "no")) as Money.server:
        run_state_machine_as_test(
            Money,
            settings=settings(
                max_examples=25, stateful_step_count=30, derandomize=True, suppress_health_check=list(HealthCheck)
            ),
        )
