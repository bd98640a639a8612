"""Budgets: reserve the worst case before a generation, settle or release it once after.

Knows no HTTP, models or SQL. Redis counts spend per team in all five windows, with or without a
budget on them. A budget is only a limit on such a count, so a change in the middle of a window
takes effect at once. Invariants:

- a reserve succeeds only if spent + held + amount <= limit for every hard budget of the team;
- a hold is settled or released at most once, even if the call is repeated, and expires with its
  lease;
- one script writes the spend and its ledger entry: sum(ledger, drained or not) == spent.

A hold belongs to the moment it was taken (`at_ms`, the worker's clock). Its spend and its ledger
row carry that moment: a settle in a later window counts in the hold's window, and rows alone are
enough to sum the ledger. Leases use Redis's clock, which all hosts share, so hosts with skewed
clocks cannot expire each other's holds. A settle after its hold expired still counts. A repeated
settle changes nothing for `SETTLED_KEPT_S`; after that the ledger's unique row id and `restate`
correct a double count.

Redis must not evict these keys: `maxmemory-policy noeviction`. If Redis lost them (no `ready` key),
`reserve` raises NotReady until `restate` and `mark_ready` have counted the ledger again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from policies import holds as keys_of
from policies import scripts
from policies.holds import (
    LEDGER_LOCK,
    LEDGER_SET_ASIDE,
    LEDGER_STREAM,
    READY_KEY,
    SETTLED_KEPT_S,
    BudgetState,
    Hold,
)
from policies.prices import MICROUSD_MAX, MicroUSD
from policies.redis import Redis
from policies.settle_batch import Defer, SettleBatch
from policies.windows import PLACES, Budget, Window, window_at

_RESTATE_BATCH = 200


class NotReady(Exception):
    """Redis has no counts (it is new or lost its data), and the ledger is not counted yet."""


class HoldClosed(Exception):
    """The hold's id was settled or released before: an id serves one generation."""


class LockLost(Exception):
    """Another writer took the ledger's lock during a restatement, and continues it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A hard budget has no room for `amount_microusd`; nothing was held.

    `resets_in_s` is None where the window never ends.
    """

    state: BudgetState
    amount_microusd: MicroUSD
    resets_in_s: float | None


@dataclass(frozen=True, slots=True)
class DrainedSpend:
    """The sum of a team's ledger rows in SQL over one window."""

    team_id: int
    window: Window
    spent_microusd: MicroUSD


@dataclass(frozen=True, slots=True)
class Restated:
    """How many counts `restate` corrected, and the sum of the corrections; both 0 unless Redis lost
    data.
    """

    windows: int
    drift_microusd: MicroUSD


class Budgets:
    """All teams' money in Redis. Errors of the Redis client pass through.

    `clock` gives unix seconds and selects the window. `lease_clock_ms` None uses Redis's clock for
    leases. `defer` schedules the call that sends gathered settlements; None sends them at the end
    of the event loop's tick.
    """

    def __init__(
        self,
        redis: Redis,
        clock: Callable[[], float] = time.time,
        lease_clock_ms: Callable[[], int] | None = None,
        defer: Defer | None = None,
    ) -> None:
        self._redis = redis
        self._clock = clock
        self._lease_clock_ms = lease_clock_ms
        self._settle_batch = SettleBatch(redis, defer)

    async def reserve(
        self, hold_id: str, team_id: int, budgets: Sequence[Budget], amount_microusd: MicroUSD, lease_s: float
    ) -> Hold | Refused:
        """Hold `amount_microusd` against all of `budgets` (one team's) or none of them. A repeated
        call holds once.

        A team without budgets gets an empty hold, without a round trip. Raises NotReady,
        HoldClosed, and ValueError for an amount outside [0, MICROUSD_MAX] or a hold id with a `|`.
        """
        return await self.hold(self.intended(hold_id, team_id, budgets, amount_microusd), budgets, lease_s)

    def intended(self, hold_id: str, team_id: int, budgets: Sequence[Budget], amount_microusd: MicroUSD) -> Hold:
        """The hold that `hold` would take now.

        A caller that lost the reply of `hold` can release this value.
        """
        if not budgets:
            return self.unreserved(hold_id, team_id)
        kinds = (
            tuple(sorted({b.window for b in budgets}, key=PLACES.__getitem__))
            if len(budgets) > 1
            else (budgets[0].window,)
        )
        return Hold(hold_id, team_id, self._now_ms(), amount_microusd, kinds)

    async def hold(self, hold: Hold, budgets: Sequence[Budget], lease_s: float) -> Hold | Refused:
        """Take an intended hold against the `budgets` it was made for.

        Result and errors are those of `reserve`.
        """
        if not hold.held:
            return hold
        amount_microusd, kinds = hold.amount_microusd, hold.held
        hour = keys_of.hour_at(hold.team_id, hold.at_ms)
        places = [PLACES[kind] for kind in kinds]
        limits: list[Any] = []
        for budget in budgets:
            limits += [kinds.index(budget.window) + 1, budget.limit_microusd, int(budget.is_hard)]
        reply = await self._redis.eval(
            scripts.RESERVE,
            2 + 2 * len(places),
            READY_KEY,
            keys_of.done_key(hold.id),
            *_pairs(hour, places),
            self._lease_now(),
            keys_of.member(hold.id, amount_microusd),
            amount_microusd,
            int(lease_s * 1000),
            len(places),
            *[hour.keeps[place] for place in places],
            *limits,
        )
        if reply[0] == -1:
            raise NotReady("the ledger is being counted")
        if reply[0] == -2:
            raise HoldClosed(hold.id)
        passed = []
        for budget in budgets:
            i = kinds.index(budget.window)
            spent, held = int(reply[1 + 2 * i]), int(reply[2 + 2 * i])
            if spent + held + amount_microusd > budget.limit_microusd:
                passed.append(BudgetState(budget, hour.windows[places[i]], spent, held))
        if reply[0] == 0:
            # the budget that resets last decides when the amount can fit
            worst = max((s for s in passed if s.budget.is_hard), key=lambda s: s.window.end_ms or float("inf"))
            return Refused(worst, amount_microusd, worst.resets_in_s(hold.at_ms / 1000))
        warnings = tuple(s for s in passed if not s.budget.is_hard)
        return msgspec.structs.replace(hold, warnings=warnings) if warnings else hold

    def unreserved(self, hold_id: str, team_id: int) -> Hold:
        """An empty hold taken now: for a team without budgets, or where the gateway may serve
        without Redis.
        """
        return Hold(hold_id, team_id, self._now_ms())

    async def settle(self, hold: Hold, spend_microusd: MicroUSD, row: bytes) -> bool:
        """End `hold`, count `spend_microusd` in all windows of its moment, and append `row` to the
        ledger's stream.

        Returns False if the hold was settled or released before. The spend may exceed the hold.
        `row` is opaque here; it must carry the hold's id, team and moment, and the same spend.
        Raises ValueError for a spend outside [0, MICROUSD_MAX].
        """
        if not 0 <= spend_microusd <= MICROUSD_MAX:
            raise ValueError(f"spend_microusd must be in [0, {MICROUSD_MAX}], not {spend_microusd}")
        return await self._settle_batch.settle(hold, spend_microusd, row)

    async def release(self, hold: Hold) -> bool:
        """End `hold` without spend and ledger row.

        Returns False if it was settled or released before.
        """
        pairs = _pairs(keys_of.hour_at(hold.team_id, hold.at_ms), [PLACES[kind] for kind in hold.held])
        reply = await self._redis.eval(
            scripts.RELEASE,
            1 + len(pairs),
            keys_of.done_key(hold.id),
            *pairs,
            SETTLED_KEPT_S * 1000,
            keys_of.member(hold.id, hold.amount_microusd),
            hold.amount_microusd,
        )
        return bool(reply == 1)

    async def renew(self, holds: Sequence[Hold], lease_s: float) -> None:
        """Extend the leases of running generations, from now; call it a few times per lease.

        Takes a hold again that expired or that Redis lost, without checking the limits: its
        generation is running. Does not take again a hold that was settled or released.
        """
        await asyncio.gather(*(self._renew(hold, lease_s) for hold in holds if hold.held))

    async def _renew(self, hold: Hold, lease_s: float) -> None:
        hour = keys_of.hour_at(hold.team_id, hold.at_ms)
        places = [PLACES[kind] for kind in hold.held]
        pairs = _pairs(hour, places)
        await self._redis.eval(
            scripts.RENEW,
            1 + len(pairs),
            keys_of.done_key(hold.id),
            *pairs,
            self._lease_now(),
            keys_of.member(hold.id, hold.amount_microusd),
            hold.amount_microusd,
            int(lease_s * 1000),
            *[hour.keeps[place] for place in places],
        )

    async def spent(self, budgets: Sequence[Budget]) -> tuple[BudgetState, ...]:
        """The amounts that count against each of `budgets` now, in their order; they may belong to
        several teams.
        """
        if not budgets:
            return ()
        at_ms = self._now_ms()
        windows = [window_at(budget.window, at_ms) for budget in budgets]
        pairs = [key for b in budgets for key in _pairs(keys_of.hour_at(b.team_id, at_ms), [PLACES[b.window]])]
        reply = await self._redis.eval(scripts.SPENT, len(pairs), *pairs, self._lease_now())
        return tuple(
            BudgetState(budget, window, int(reply[2 * i]), int(reply[2 * i + 1]))
            for i, (budget, window) in enumerate(zip(budgets, windows, strict=True))
        )

    async def is_ready(self) -> bool:
        """Whether Redis has counts, so that `reserve` works."""
        return bool(await self._redis.execute_command("EXISTS", READY_KEY))

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
            for one in batch:
                window = one.window
                arguments += [one.team_id, window.start_ms, window.end_ms or 0, one.spent_microusd]
                arguments.append(keys_of.keep_until(window))
            keys = [LEDGER_LOCK, LEDGER_STREAM, LEDGER_SET_ASIDE]
            keys += [keys_of.spend_key(one.team_id, one.window) for one in batch]
            reply = await self._redis.eval(scripts.RESTATE, len(keys), *keys, lock_token, *arguments)
            if reply[0] == -1:
                raise LockLost
            windows += reply[0]
            drift += int(reply[1])
        return Restated(windows, drift)

    async def mark_ready(self, lock_token: str) -> None:
        """Enable `reserve`, after every present window was restated. Raises LockLost."""
        if await self._redis.eval(scripts.MARK_READY, 2, LEDGER_LOCK, READY_KEY, lock_token) == -1:
            raise LockLost

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _lease_now(self) -> int | str:
        return "" if self._lease_clock_ms is None else self._lease_clock_ms()


def _pairs(hour: keys_of.Hour, places: Sequence[int]) -> list[str]:
    """The spend key and the holds key of each window."""
    return [key for place in places for key in (hour.spends[place], hour.holds[place])]
