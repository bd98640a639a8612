"""Budgets: reserve the worst case before a generation, settle or release it once after.

Knows no HTTP, models or SQL. Redis counts spend per team in all five windows, with or without a
budget. A budget on a team's money only limits such a count, so a change in the middle of a window
takes effect at once; other budgets have separate counts (`policies/counters.py`). Invariants:

- one script checks all hard budgets that apply: a reserve succeeds only if spent + held + amount <=
  limit for each; if a budget allows overdraft, the amount is a usual answer's;
- a hold is settled or released at most once, even if the call is repeated, and expires with its
  lease;
- one script writes the spend and its ledger entry: sum(ledger, drained or not) == spent.

A hold belongs to the time at which it was taken (`at_ms`, the worker's clock). Its spend and its
ledger row have that time: a settle in a later window counts in the hold's window, and the rows
suffice to sum the ledger. Leases use Redis's clock, which all hosts share, so hosts with skewed
clocks cannot expire each other's holds. A settle after its hold expired still counts. A repeated
settle changes nothing for `SETTLED_KEPT_S`; after that the ledger's unique row id and `restate`
correct a double count.

Redis must not evict these keys: `maxmemory-policy noeviction`. If Redis lost them (no `ready` key),
`reserve` raises NotReady until `restate` and `mark_ready` have counted the ledger again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from policies import holds as keys_of
from policies import scripts
from policies.counters import OTHER, Counter, Need, counter_of, counters_of, place_of
from policies.holds import (
    LEDGER_LOCK,
    LEDGER_SET_ASIDE,
    LEDGER_STREAM,
    READY_KEY,
    SETTLED_KEPT_S,
    BudgetState,
    Charge,
    Hold,
    Taken,
)
from policies.prices import MICROUSD_MAX, MicroUSD
from policies.redis import RedisCommands
from policies.settle_batch import Defer, SettleBatch
from policies.windows import BUCKETS, PLACES, Budget, Window, WindowKind

VALUES_MAX = 1000
"""The most values of a budget with separate counts in a window; further values share one. Of
sessions it bounds the list: each has a count of its own.
"""

_RESTATE_BATCH = 200
_READ_BATCH = 500


class NotReady(Exception):
    """Redis has no counts (it is new or lost its data), and the ledger is not counted yet."""


class HoldClosed(Exception):
    """The hold's id was settled or released before: an id serves one generation."""


class LockLost(Exception):
    """Another writer took the ledger's lock during a restatement, and continues it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A hard budget has no room for `amount`, in its unit; nothing was held.

    If several budgets refuse, `state` is of the budget that has room last. `resets_in_s` is None if
    the window never ends.
    """

    state: BudgetState
    limit: int
    amount: int
    resets_in_s: float | None


@dataclass(frozen=True, slots=True)
class DrainedSpend:
    """The sum of a team's ledger rows in SQL over one window."""

    team_id: int
    window: Window
    spent_microusd: MicroUSD


class OwnSpend(msgspec.Struct, frozen=True):
    """The ledger's sum in SQL for a budget's separate count."""

    name: str
    field: str
    spent: int
    keep_until_ms: int


class Intent(msgspec.Struct, frozen=True):
    """A hold that may be taken at `at_ms`, of `counters`, which are empty if no budget limits the
    request.
    """

    hold_id: str
    team_id: int
    at_ms: int
    counters: Sequence[Counter]

    @property
    def is_hard(self) -> bool:
        """Whether a hard budget limits the request."""
        return any(budget.is_hard for counter in self.counters for budget in counter.budgets)

    def whole(self) -> Hold:
        """A hold of every amount that could be taken, so that its release frees whatever was taken."""
        taken = tuple(
            counter.taken(self.hold_id, amount, is_other=is_other)
            for counter in self.counters
            for amount in {counter.most, counter.usual}
            for is_other in ((False, True) if counter.values else (False,))
        )
        return Hold(self.hold_id, self.team_id, self.at_ms, more=taken)


@dataclass(frozen=True, slots=True)
class Restated:
    """The number of counts that `restate` corrected, and the sum of the corrections.

    Both are 0 unless Redis lost data.
    """

    windows: int
    drift_microusd: MicroUSD


_Counts = Iterable[tuple[Counter, int, int, int]]
"""Each count with its spent and held amounts, and 1 if further values share it."""


class Budgets:
    """All teams' money in Redis. Errors of the Redis client pass through.

    `clock` gives unix seconds and selects the window. `lease_clock_ms` None uses Redis's clock for
    leases. `defer` schedules the call that sends gathered settlements; None sends them at the end
    of the event loop's tick.
    """

    def __init__(
        self,
        redis: RedisCommands,
        clock: Callable[[], float] = time.time,
        lease_clock_ms: Callable[[], int] | None = None,
        defer: Defer | None = None,
        values_max: int = VALUES_MAX,
    ) -> None:
        self._values_max = values_max
        self._redis = redis
        self._clock = clock
        self._lease_clock_ms = lease_clock_ms
        self._settle_batch = SettleBatch(redis, defer)

    async def reserve(
        self, hold_id: str, team_id: int, budgets: Sequence[Budget], need: Need | MicroUSD, lease_s: float
    ) -> Hold | Refused:
        """Hold `need`, or an amount in µUSD, against all of one team's `budgets` that apply, or
        none.

        A repeated call holds once. A request that no budget limits gets an empty hold, without a
        round trip. Raises NotReady, HoldClosed, and ValueError for an amount outside [0,
        MICROUSD_MAX] or a hold id with a `|`.
        """
        return await self.hold(self.intended(hold_id, team_id, budgets, need), lease_s)

    def intended(self, hold_id: str, team_id: int, budgets: Sequence[Budget], need: Need | MicroUSD) -> Intent:
        """The hold that `hold` would take now.

        A caller that lost the reply of `hold` can release all of the intent. Raises ValueError for
        an amount outside [0, MICROUSD_MAX] or a hold id with a `|`.
        """
        keys_of.member(hold_id, need if isinstance(need, int) else 0)
        if isinstance(need, int):
            need = Need(need)
        at_ms = self._now_ms()
        return Intent(hold_id, team_id, at_ms, counters_of(team_id, budgets, need, at_ms) if budgets else ())

    async def hold(self, intent: Intent, lease_s: float) -> Hold | Refused:
        """Take an intended hold, with the result and the errors of `reserve`."""
        counters, at_ms = intent.counters, intent.at_ms
        if not counters:
            return Hold(intent.hold_id, intent.team_id, at_ms)
        keys: list[str] = [READY_KEY, keys_of.done_key(intent.hold_id)]
        value_keys: list[str] = []
        # texts: each argument costs, and a number more than its digits
        arguments = [self._lease_now(), intent.hold_id, str(int(lease_s * 1000))]
        for counter in counters:
            keys += keys_of.count_keys(counter.name)
            values_max = 0
            if counter.values:
                values_max = self._values_max
                value_keys += (keys_of.values_key(counter.values), *keys_of.count_keys(counter.other))
            limits = ""
            for budget in counter.budgets:
                limits += f"{budget.limit_at(at_ms)}:{budget.is_hard:d}{budget.may_cut:d},"
            amounts = f"{counter.most} {counter.usual} {counter.keep_until_ms} {counter.oldest}"
            arguments.append(f"{amounts} {limits} {values_max} {counter.digest} {counter.shown}")
        reply = await self._redis.eval(scripts.RESERVE, len(keys) + len(value_keys), *keys, *value_keys, *arguments)
        if reply[0] == -1:
            raise NotReady("the ledger is being counted")
        if reply[0] == -2:
            raise HoldClosed(intent.hold_id)
        if reply[0] == 0:
            return await self._refused(at_ms, zip(counters, reply[1::3], reply[2::3], reply[3::3], strict=True))
        return _taken(intent, reply[3::3], is_cut=reply[0] == 2)

    async def _refused(self, at_ms: int, counts: _Counts) -> Refused:
        """The refusal by the budget that has room last."""
        refusals: list[Refused] = []
        for counter, spent, held, is_other in counts:
            for budget in counter.budgets:
                amount = counter.usual if budget.may_cut else counter.most
                excess = spent + held + amount - budget.limit_at(at_ms)
                if excess <= 0 or not budget.is_hard:
                    continue
                frees_at_ms = None
                if budget.window is WindowKind.ROLLING:
                    name = counter.other if is_other else counter.name
                    frees_at_ms = await self._frees_at_ms(budget, name, excess, at_ms)
                state = BudgetState(
                    budget=budget,
                    window=budget.window_at(at_ms),
                    spent=spent,
                    held=held,
                    value="*" if is_other and counter.other != counter.name else counter.shown,
                    frees_at_ms=frees_at_ms,
                )
                refusals.append(Refused(state, budget.limit_at(at_ms), amount, state.resets_in_s(at_ms / 1000)))
        return max(refusals, key=lambda one: float("inf") if one.resets_in_s is None else one.resets_in_s)

    async def _frees_at_ms(self, budget: Budget, name: str, excess: int, at_ms: int) -> int:
        """The time, unix ms, by which `excess` of a rolling window's spend has expired; at most its
        length ahead.
        """
        fields = await self._redis.execute_command("HGETALL", keys_of.count_keys(name)[0])
        flat = list(fields.items()) if isinstance(fields, dict) else list(zip(fields[::2], fields[1::2], strict=True))
        length_ms = budget.rolling_s * 1000
        for bucket, spent in sorted((int(field), int(value)) for field, value in flat if field != b"held"):
            excess -= spent
            if excess <= 0:
                return max(at_ms, (bucket + BUCKETS + 1) * length_ms // BUCKETS + 1)
        return at_ms + length_ms

    def unreserved(self, hold_id: str, team_id: int) -> Hold:
        """An empty hold taken now: for a team without budgets, or if the gateway may serve without
        Redis.
        """
        return Hold(hold_id, team_id, self._now_ms())

    async def settle(self, hold: Hold, spend_microusd: MicroUSD, row: bytes, charges: Sequence[Charge] = ()) -> bool:
        """End `hold`, count `spend_microusd` in all windows of its time, and append `row` to the
        stream.

        `charges` are the amounts for the counts of budgets. Returns False if the hold was settled
        or released before. The spend may exceed the hold. `row` is opaque here; it must carry the
        hold's id, team and time, the same spend and the charges. Raises ValueError for a spend
        outside [0, MICROUSD_MAX].
        """
        if not 0 <= spend_microusd <= MICROUSD_MAX:
            raise ValueError(f"spend_microusd must be in [0, {MICROUSD_MAX}], not {spend_microusd}")
        return await self._settle_batch.settle(hold, spend_microusd, row, charges)

    async def release(self, hold: Hold) -> bool:
        """End `hold` without spend and ledger row.

        Returns False if it was settled or released before.
        """
        keys, arguments = [keys_of.done_key(hold.id)], list[Any]([SETTLED_KEPT_S * 1000])
        for taken in _all_of(hold):
            keys += keys_of.count_keys(taken.name)
            arguments += (taken.member, taken.amount)
        return bool(await self._redis.eval(scripts.RELEASE, len(keys), *keys, *arguments) == 1)

    async def renew(self, holds: Sequence[Hold], lease_s: float) -> None:
        """Extend the leases of running generations, from now; call it a few times per lease.

        Takes an expired or lost hold again, without a check of the limits: its generation is
        running. A settled or released hold is not taken again.
        """
        await asyncio.gather(*(self._renew(hold, lease_s) for hold in holds if hold.is_held))

    async def _renew(self, hold: Hold, lease_s: float) -> None:
        keys, arguments = [keys_of.done_key(hold.id)], [self._lease_now(), int(lease_s * 1000)]
        for taken in _all_of(hold):
            keys += keys_of.count_keys(taken.name)
            arguments += (taken.member, taken.amount, taken.keep_until_ms)
        await self._redis.eval(scripts.RENEW, len(keys), *keys, *arguments)

    async def spent(self, budgets: Sequence[Budget], at_ms: int | None = None) -> tuple[BudgetState, ...]:
        """The amounts that count against each of `budgets` now, or at `at_ms`, in their order.

        The budgets may belong to several teams. For an each-value budget it is the fullest value's
        amount.
        """
        fullest: dict[int, BudgetState] = {}
        for index, state in await self._states(budgets, self._now_ms() if at_ms is None else at_ms):
            known = fullest.get(index)
            if known is None or state.spent + state.held > known.spent + known.held:
                fullest[index] = state
        return tuple(fullest[index] for index in range(len(budgets)))

    async def states(self, budgets: Sequence[Budget], at_ms: int | None = None) -> tuple[BudgetState, ...]:
        """Like `spent`, with a state for each value that has a count."""
        return tuple(state for _, state in await self._states(budgets, self._now_ms() if at_ms is None else at_ms))

    async def _states(self, budgets: Sequence[Budget], at_ms: int) -> list[tuple[int, BudgetState]]:
        """Each state with the index of its budget. An each-value budget has at least one state."""
        counters: list[tuple[int, Budget, str, Counter]] = []
        for index, budget in enumerate(budgets):
            counter = counter_of(budget, budget.team_id, budget.value or "", at_ms)
            if not counter.values:
                counters.append((index, budget, counter.shown, counter))
                continue
            values = await self._redis.execute_command("HGETALL", keys_of.values_key(counter.values))
            flat = list(values.items()) if isinstance(values, dict) else zip(values[::2], values[1::2], strict=True)
            names = {
                digest.decode(): shown.decode("utf-8", "replace") or f"#{digest.decode()}" for digest, shown in flat
            }
            names[OTHER] = "*"
            for digest, shown in names.items():
                name = counter.other if digest == OTHER else counter.name.replace(counter.digest, digest)
                of_value = msgspec.structs.replace(counter, name=name, digest=digest)
                counters.append((index, budget, shown, of_value))
        states = []
        for start in range(0, len(counters), _READ_BATCH):
            batch = counters[start : start + _READ_BATCH]
            keys = [key for *_, counter in batch for key in keys_of.count_keys(counter.name)]
            oldest = [counter.oldest for *_, counter in batch]
            reply = await self._redis.eval(scripts.SPENT, len(keys), *keys, self._lease_now(), *oldest)
            for i, (index, budget, shown, counter) in enumerate(batch):
                spent, held = int(reply[2 * i]), int(reply[2 * i + 1])
                state = BudgetState(budget, budget.window_at(at_ms), spent, held, shown, digest=counter.digest)
                states.append((index, state))
        return states

    async def is_ready(self) -> bool:
        """Whether Redis has counts, so that `reserve` works."""
        return bool(await self._redis.execute_command("EXISTS", READY_KEY))

    async def ledger_times(self) -> tuple[int, int | None]:
        """Redis's present time, and the time of the oldest row that waits for SQL (or None), in ms."""
        now_ms, oldest = await self._redis.eval(scripts.LEDGER_TIMES, 1, LEDGER_STREAM, self._lease_now())
        return int(now_ms), int(oldest.split(b"-")[0]) if oldest else None

    async def restate(self, drained: Sequence[DrainedSpend], lock_token: str) -> Restated:
        """Set the counts of these windows to the ledger's: `drained` plus the entries still in its
        streams.

        Only the holder of `LEDGER_LOCK` (its value is `lock_token`) may call this, and only if it
        drained nothing since it summed `drained`. Safe under load. Raises LockLost.
        """
        windows = drift = 0
        for start in range(0, len(drained), _RESTATE_BATCH):
            batch = drained[start : start + _RESTATE_BATCH]
            arguments: list[Any] = []
            for spend in batch:
                window = spend.window
                arguments += [spend.team_id, window.start_ms, window.end_ms or 0, spend.spent_microusd]
                arguments.append(keys_of.keep_until(window))
            keys = [LEDGER_LOCK, LEDGER_STREAM, LEDGER_SET_ASIDE]
            keys += [keys_of.spend_key(one.team_id, one.window) for one in batch]
            reply = await self._redis.eval(scripts.RESTATE, len(keys), *keys, lock_token, *arguments)
            if reply[0] == -1:
                raise LockLost
            windows += reply[0]
            drift += int(reply[1])
        return Restated(windows, drift)

    async def restate_own(self, drained: Sequence[OwnSpend], lock_token: str) -> int:
        """Do `restate` for the budgets' separate counts and the sets of their values.

        Returns the number of corrected counts.
        """
        corrected = 0
        for start in range(0, len(drained), _READ_BATCH):
            batch = drained[start : start + _READ_BATCH]
            keys, arguments = [LEDGER_LOCK, LEDGER_STREAM, LEDGER_SET_ASIDE], list[Any]()
            for spend in batch:
                values, digest = place_of(spend.name, spend.field, spend.keep_until_ms)
                keys += (keys_of.count_keys(spend.name)[0], keys_of.values_key(values))
                arguments += (spend.name, spend.field, spend.spent, spend.keep_until_ms, digest)
            reply = await self._redis.eval(scripts.RESTATE_OWN, len(keys), *keys, lock_token, *arguments)
            if reply[0] == -1:
                raise LockLost
            corrected += reply[0]
        return corrected

    async def mark_ready(self, lock_token: str) -> None:
        """Enable `reserve`, after every present window was restated. Raises LockLost."""
        if await self._redis.eval(scripts.MARK_READY, 2, LEDGER_LOCK, READY_KEY, lock_token) == -1:
            raise LockLost

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _lease_now(self) -> int | str:
        return "" if self._lease_clock_ms is None else self._lease_clock_ms()


def _taken(intent: Intent, are_others: Sequence[int], *, is_cut: bool) -> Hold:
    """The hold as it was taken; `are_others` has 1 for each count that further values share.

    Equal amounts of the team's own windows are kept as window kinds.
    """
    held: list[WindowKind] = []
    more: list[Taken] = []
    amount_microusd = None
    for counter, is_other in zip(intent.counters, are_others, strict=True):
        amount = counter.usual if is_cut else counter.most
        if counter.is_shared and amount_microusd in (None, amount):
            amount_microusd = amount
            held.append(counter.budgets[0].window)
        else:
            more.append(counter.taken(intent.hold_id, amount, is_other=is_other == 1))
    return Hold(
        id=intent.hold_id,
        team_id=intent.team_id,
        at_ms=intent.at_ms,
        amount_microusd=amount_microusd or 0,
        held=tuple(sorted(held, key=PLACES.__getitem__) if len(held) > 1 else held),
        more=tuple(more),
        is_cut=is_cut,
    )


def _all_of(hold: Hold) -> list[Taken]:
    """All counts that a hold draws on, including its team's windows."""
    taken = list(hold.more)
    if hold.held:
        hour = keys_of.hour_at(hold.team_id, hold.at_ms)
        name = keys_of.member(hold.id, hold.amount_microusd)
        for kind in hold.held:
            place = PLACES[kind]
            count = f"{hold.team_id}:{hour.windows[place].id}"
            taken.append(Taken(count, name, hold.amount_microusd, hour.keeps[place]))
    return taken
