"""Budgets on a real Redis: the worst case held at once over all of them, settled or released once."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from policies import Budget, Budgets, Hold, NotReady, Refused, WindowKind
from policies.budgets import DrainedSpend, HoldClosed, LockLost
from policies.holds import LEDGER_LOCK, LEDGER_STREAM, READY_KEY, spend_key
from policies.windows import window_at
from tests.policies.clock import Clock

# far enough from the present that Redis does not expire the windows
NOON_S = datetime(2096, 11, 21, 12, 0, tzinfo=UTC).timestamp()
HOUR = Budget(1, 7, WindowKind.HOUR, 1000)
TOTAL = Budget(2, 7, WindowKind.TOTAL, 1500)
SOFT = Budget(3, 7, WindowKind.DAY, 500, is_hard=False)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON_S)


@pytest.fixture
async def budgets(redis: Redis, clock: Clock) -> Budgets:
    await redis.set(READY_KEY, "1")
    return Budgets(redis, clock, clock.ms)


async def hold(budgets: Budgets, name: str, amount: int, *against: Budget) -> Hold:
    taken = await budgets.reserve(name, 7, against or (HOUR,), amount, 60)
    assert isinstance(taken, Hold)
    return taken


async def counts(budgets: Budgets, *of: Budget) -> list[tuple[int, int]]:
    return [(s.spent, s.held) for s in await budgets.spent(of or (HOUR,))]


async def test_a_hold_counts_until_it_is_settled_for_less(budgets: Budgets, redis: Redis) -> None:
    """The worst case is held over every budget; settling leaves the real spend and the row, in every window."""
    taken = await hold(budgets, "a", 400, HOUR, TOTAL)
    assert await counts(budgets, HOUR, TOTAL) == [(0, 400), (0, 400)]
    assert await budgets.settle(taken, 150, b"row")
    assert await counts(budgets, HOUR, TOTAL, SOFT) == [(150, 0), (150, 0), (150, 0)]
    [(_, fields)] = await redis.xrange(LEDGER_STREAM)
    assert fields == {b"team": b"7", b"at_ms": b"%d" % taken.at_ms, b"cost": b"150", b"row": b"row"}


async def test_all_budgets_or_none(budgets: Budgets) -> None:
    """One budget without room refuses the hold in all of them, and says what it saw."""
    await hold(budgets, "a", 900, HOUR, TOTAL)
    refused = await budgets.reserve("b", 7, (HOUR, TOTAL), 600, 60)
    assert isinstance(refused, Refused)
    assert refused.state.budget == HOUR
    assert (refused.state.spent, refused.state.held) == (0, 900)
    assert await counts(budgets, HOUR, TOTAL) == [(0, 900), (0, 900)]


async def test_exactly_the_limit_fits(budgets: Budgets) -> None:
    """spent + held + amount may be the limit, not one µUSD more."""
    await hold(budgets, "a", 600)
    assert isinstance(await budgets.reserve("b", 7, (HOUR,), 401, 60), Refused)
    assert isinstance(await budgets.reserve("c", 7, (HOUR,), 400, 60), Hold)


async def test_a_refusal_names_the_last_reset(budgets: Budgets, clock: Clock) -> None:
    """With two budgets exhausted the later reset is the one to wait for."""
    clock.now_s += 600
    day = Budget(4, 7, WindowKind.DAY, 1000)
    await budgets.settle(await hold(budgets, "a", 1000), 1000, b"")
    refused = await budgets.reserve("b", 7, (HOUR, day), 1, 60)
    assert isinstance(refused, Refused)
    assert refused.state.budget == day
    assert refused.resets_in_s == 12 * 3600 - 600
    never = await budgets.reserve("c", 7, (Budget(5, 7, WindowKind.TOTAL, 1000), day), 1, 60)
    assert isinstance(never, Refused)
    assert never.resets_in_s is None


async def test_a_soft_budget_lets_pass(budgets: Budgets) -> None:
    """Beyond a soft budget there are holds; a hard one beside it still decides."""
    await hold(budgets, "a", 500, HOUR, SOFT)
    await hold(budgets, "b", 100, HOUR, SOFT)
    assert isinstance(await budgets.reserve("c", 7, (HOUR, SOFT), 500, 60), Refused)


async def test_no_budgets_no_round_trip(clock: Clock) -> None:
    """A team without budgets gets an empty hold from a client that would fail if asked."""

    class Nobody:
        async def execute_command(self, *args: object) -> object:
            raise AssertionError(args)

        async def eval(self, script: str, numkeys: int, *rest: object) -> object:
            raise AssertionError(script)

    taken = await Budgets(Nobody(), clock).reserve("a", 7, (), 10**9, 60)
    assert taken == Hold("a", 7, clock.ms())


async def test_spend_without_a_hold_is_counted_and_in_the_ledger(budgets: Budgets, redis: Redis) -> None:
    """A team without budgets, and a hold forgone on purpose, settle like any other."""
    assert await budgets.settle(budgets.unreserved("a", 7), 70, b"row")
    assert await counts(budgets, HOUR, TOTAL) == [(70, 0), (70, 0)]
    assert await redis.xlen(LEDGER_STREAM) == 1


async def test_a_budget_made_in_the_middle_counts_from_the_window_start(budgets: Budgets) -> None:
    """Spend is counted whether or not somebody looks: a new budget sees what its window has spent already."""
    await budgets.settle(budgets.unreserved("a", 7), 990, b"")
    refused = await budgets.reserve("b", 7, (Budget(9, 7, WindowKind.MONTH, 1000),), 11, 60)
    assert isinstance(refused, Refused)
    assert refused.state.spent == 990


async def test_settling_twice_or_after_a_release_changes_nothing(budgets: Budgets, redis: Redis) -> None:
    """The first end of a hold is its only one, whichever it was."""
    first, second = await hold(budgets, "a", 300), await hold(budgets, "b", 300)
    assert [await budgets.settle(first, 100, b"r"), await budgets.settle(first, 100, b"r")] == [True, False]
    assert not await budgets.release(first)
    assert [await budgets.release(second), await budgets.release(second)] == [True, False]
    assert not await budgets.settle(second, 100, b"r")
    assert await counts(budgets) == [(100, 0)]
    assert await redis.xlen(LEDGER_STREAM) == 1


async def test_reserving_twice_holds_once(budgets: Budgets) -> None:
    """A reserve whose answer was lost may be repeated, even where there is no room for a second."""
    for _ in range(3):
        await hold(budgets, "a", 700)
    assert await counts(budgets) == [(0, 700)]


async def test_a_closed_hold_cannot_be_taken_again(budgets: Budgets) -> None:
    """A release that overtakes its reserve wins: nothing is left held by a generation that is over."""
    await budgets.release(Hold("a", 7, int(NOON_S * 1000), 100, (WindowKind.HOUR,)))
    with pytest.raises(HoldClosed):
        await budgets.reserve("a", 7, (HOUR,), 100, 60)
    assert await counts(budgets) == [(0, 0)]


async def test_a_hold_expires_with_its_lease(budgets: Budgets, clock: Clock) -> None:
    """What a dead worker held is free again after the lease, seen by the next reserve."""
    await hold(budgets, "a", 1000)
    clock.now_s += 59
    assert isinstance(await budgets.reserve("b", 7, (HOUR,), 1, 60), Refused)
    clock.now_s += 2
    await hold(budgets, "c", 1000)
    assert await counts(budgets) == [(0, 1000)]


async def test_a_living_worker_renews(budgets: Budgets, clock: Clock) -> None:
    """A renewed hold outlives its first lease; one that expired is taken again; a settled one is not brought back."""
    kept, late, settled = [await hold(budgets, name, 100) for name in "abc"]
    clock.now_s += 50
    await budgets.renew([kept], 60)
    clock.now_s += 30
    assert await counts(budgets) == [(0, 100)]
    await budgets.settle(settled, 10, b"")
    await budgets.renew([late, settled, budgets.unreserved("d", 7)], 60)
    assert await counts(budgets) == [(10, 200)]
    await budgets.settle(kept, 20, b"")
    await budgets.settle(late, 30, b"")
    assert await counts(budgets) == [(60, 0)]


async def test_a_settle_after_the_lease_still_counts_once(budgets: Budgets, clock: Clock, redis: Redis) -> None:
    """A process that was paused past its lease books its spend and row; the hold was free meanwhile."""
    paused = await hold(budgets, "a", 800)
    clock.now_s += 100
    await hold(budgets, "b", 900)
    assert await budgets.settle(paused, 700, b"row")
    assert not await budgets.settle(paused, 700, b"row")
    assert await counts(budgets) == [(700, 900)]
    assert await redis.xlen(LEDGER_STREAM) == 1


async def test_a_hold_belongs_to_the_window_it_was_taken_in(budgets: Budgets, clock: Clock) -> None:
    """Settled in the next hour, the spend counts in the hour of the hold, and in the day both share."""
    clock.now_s += 3590
    taken = await hold(budgets, "a", 1000)
    clock.now_s += 20
    assert await counts(budgets, HOUR) == [(0, 0)]
    await hold(budgets, "b", 1000)
    await budgets.settle(taken, 600, b"")
    assert await counts(budgets, HOUR, SOFT) == [(0, 1000), (600, 0)]
    clock.now_s -= 20
    assert await counts(budgets, HOUR) == [(600, 0)]


async def test_windows_forget_by_themselves(budgets: Budgets, redis: Redis) -> None:
    """Every key but the total's and the ledger's has an end: two days after its window."""
    await budgets.settle(await hold(budgets, "a", 500, HOUR, TOTAL, SOFT), 5, b"")
    await hold(budgets, "b", 500, HOUR, TOTAL, SOFT)
    lasting = {key.decode() for key in await redis.keys() if await redis.pttl(key) == -1}
    total = {"sameway:{money}:spend:7:total", "sameway:{money}:holds:7:total"}
    assert lasting == {READY_KEY, LEDGER_STREAM, *total}


async def test_a_redis_that_forgot_refuses_to_guess(budgets: Budgets, redis: Redis) -> None:
    """Without the ready key nothing is reserved; settling a generation that ran meanwhile is still recorded."""
    taken = await hold(budgets, "a", 100)
    await redis.flushall()
    assert not await budgets.is_ready()
    with pytest.raises(NotReady):
        await budgets.reserve("b", 7, (HOUR,), 1, 60)
    assert await budgets.settle(taken, 40, b"row")
    assert await redis.xlen(LEDGER_STREAM) == 1


async def test_restating_counts_sql_and_streams_alike(budgets: Budgets, redis: Redis, clock: Clock) -> None:
    """After a loss each window becomes what SQL says plus the entries still on their way to it; drift is reported."""
    hour, day = window_at(WindowKind.HOUR, clock.ms()), window_at(WindowKind.DAY, clock.ms())
    await budgets.settle(budgets.unreserved("a", 7), 30, b"")
    clock.now_s -= 3600
    await budgets.settle(budgets.unreserved("b", 7), 5, b"")
    await budgets.settle(budgets.unreserved("c", 8), 9, b"")
    clock.now_s += 3600
    await redis.delete("sameway:{money}:spend:7:" + hour.id, READY_KEY)
    await redis.set(LEDGER_LOCK, "mine")
    drained = [DrainedSpend(7, hour, 100), DrainedSpend(7, day, 1000), DrainedSpend(8, day, 0)]
    with pytest.raises(LockLost):
        await budgets.restate(drained, "another's")
    restated = await budgets.restate(drained, "mine")
    assert (restated.windows, restated.drift_microusd) == (2, 130 + 1000)
    assert await counts(budgets, HOUR, SOFT) == [(130, 0), (1035, 0)]
    assert (await budgets.restate(drained, "mine")).windows == 0
    with pytest.raises(LockLost):
        await budgets.mark_ready("another's")
    await budgets.mark_ready("mine")
    assert await budgets.is_ready()


async def test_many_at_once_never_pass_the_limit(budgets: Budgets) -> None:
    """Concurrent reserves take exactly what fits."""
    tries = [budgets.reserve(f"h{i}", 7, (HOUR, TOTAL), 30, 60) for i in range(80)]
    held = [taken for taken in await asyncio.gather(*tries) if isinstance(taken, Hold)]
    assert len(held) == 1000 // 30
    await asyncio.gather(*(budgets.settle(taken, 30, b"") for taken in held))
    assert await counts(budgets, HOUR, TOTAL) == [(990, 0), (990, 0)]


async def test_settlements_of_one_moment_are_one_call(redis: Redis, clock: Clock) -> None:
    """Of several teams, hours, sets of budgets and sizes, one of them twice: each counts once, in its own windows, and has its row."""
    calls: list[tuple[Any, ...]] = []

    class Counting:
        def eval(self, *arguments: Any) -> Any:
            calls.append(arguments)
            return redis.eval(*arguments)

        def execute_command(self, *arguments: Any) -> Any:
            return redis.execute_command(*arguments)

    await redis.set(READY_KEY, "1")
    budgets = Budgets(Counting(), clock, clock.ms)
    other, rich = Budget(4, 8, WindowKind.DAY, 2**53 - 1), Budget(5, 9, WindowKind.TOTAL, 2**53 - 1)
    early = await hold(budgets, "early", 100)
    clock.now_s += 3600
    held = [await hold(budgets, f"h{i}", 100 + i, HOUR, SOFT) for i in range(3)]
    theirs = await budgets.reserve("t", 8, (other,), 50, 60)
    huge = [await budgets.reserve(f"r{i}", 9, (rich,), 2**52 - 1, 60) for i in range(2)]
    assert isinstance(theirs, Hold)
    assert all(isinstance(one, Hold) for one in huge)
    await budgets.release(held[1])
    free = budgets.unreserved("f", 7)
    calls.clear()
    spends = [(early, 90), (held[0], 7), (held[1], 8), (held[2], 9), (held[0], 7), (theirs, 50), (free, 0)]
    spends += [(one, 2**52 - 1) for one in huge if isinstance(one, Hold)]
    done = await asyncio.gather(*(budgets.settle(one, spend, one.id.encode()) for one, spend in spends))
    assert done == [True, True, False, True, False, True, True, True, True]
    assert len(calls) == 1
    assert await counts(budgets, HOUR, SOFT, TOTAL, other, rich) == [
        (16, 0),
        (106, 0),
        (106, 0),
        (50, 0),
        (2**53 - 2, 0),
    ]
    rows = {fields[b"row"]: int(fields[b"cost"]) for _, fields in await redis.xrange(LEDGER_STREAM)}
    assert rows == {one.id.encode(): spend for (one, spend), is_new in zip(spends, done, strict=True) if is_new}


async def test_a_settlement_whose_caller_left_is_sent(budgets: Budgets, redis: Redis) -> None:
    """It has gathered with others, and money must not be forgotten with who waited for it."""
    left, stays = await hold(budgets, "a", 100), await hold(budgets, "b", 100)
    leaving = asyncio.create_task(budgets.settle(left, 60, b"a"))
    staying = asyncio.create_task(budgets.settle(stays, 30, b"b"))
    await asyncio.sleep(0)
    leaving.cancel()
    assert await staying
    assert await counts(budgets) == [(90, 0)]
    assert await redis.xlen(LEDGER_STREAM) == 2


async def test_a_count_that_redis_refuses_costs_no_row(budgets: Budgets, redis: Redis, clock: Clock) -> None:
    """One team's key is of another type: all who were in the call hear of it, and once they have repeated it every row is there once."""
    damaged = spend_key(8, window_at(WindowKind.HOUR, clock.ms()))
    await redis.set(damaged, "no hash")
    holds = [budgets.unreserved(f"h{team}", team) for team in (7, 8, 9)]
    outcomes = await asyncio.gather(
        *(budgets.settle(one, 10, one.id.encode()) for one in holds), return_exceptions=True
    )
    assert {type(outcome) for outcome in outcomes} == {ResponseError}
    assert [await budgets.settle(one, 10, one.id.encode()) for one in holds] == [False, False, True]
    assert [fields[b"row"] for _, fields in await redis.xrange(LEDGER_STREAM)] == [b"h7", b"h8", b"h9"]


async def test_amounts_that_lua_cannot_carry_are_refused(budgets: Budgets) -> None:
    """Beyond 2**53 a number would silently lose µUSD."""
    with pytest.raises(ValueError, match="not a hold"):
        await budgets.reserve("a", 7, (HOUR,), 2**53, 60)
    with pytest.raises(ValueError, match="not a hold"):
        await budgets.reserve("a|b", 7, (HOUR,), 1, 60)
    with pytest.raises(ValueError, match="spend_microusd"):
        await budgets.settle(budgets.unreserved("a", 7), -1, b"")
    rich = Budget(1, 7, WindowKind.HOUR, 2**53 - 1)
    exact = 2**53 - 1 - 7
    await budgets.settle(await hold(budgets, "a", exact, rich), exact, b"")
    assert await counts(budgets, rich) == [(exact, 0)]
    assert isinstance(await budgets.reserve("b", 7, (rich,), 8, 60), Refused)
    assert isinstance(await budgets.reserve("c", 7, (rich,), 7, 60), Hold)


async def test_leases_run_on_redis_own_clock(redis: Redis, clock: Clock) -> None:
    """A host whose clock is an hour ahead does not expire the holds of others."""
    await redis.set(READY_KEY, "1")
    here, ahead = Budgets(redis, clock), Clock(NOON_S)
    ahead.now_s += 1800
    await hold(here, "a", 800)
    refused = await Budgets(redis, ahead).reserve("b", 7, (HOUR,), 300, 60)
    assert isinstance(refused, Refused)
    short = Budgets(redis, clock)
    await short.reserve("c", 7, (HOUR,), 100, 0.0)
    await asyncio.sleep(0.005)
    assert await counts(short) == [(0, 800)]
