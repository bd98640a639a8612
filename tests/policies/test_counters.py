"""Budgets with counts of their own, on a real Redis: by value, in other units and windows, and past their limit."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime
from typing import Any

import pytest
from redis.asyncio import Redis

from policies import Budget, Budgets, Hold, Refused, WindowKind
from policies.budgets import OwnSpend
from policies.counters import SESSION_KEPT_MS, Need
from policies.holds import LEDGER_LOCK, READY_KEY, Charge, Taken, count_keys
from policies.pace import pace_of
from policies.windows import DEPLOYMENT, SESSION, TEAM, USER, Overdraft, Unit
from tests.policies.clock import Clock

NOON_S = datetime(2096, 11, 21, 12, 0, tzinfo=UTC).timestamp()
EACH_USER = Budget(1, 7, WindowKind.DAY, 100, axis=USER)


@pytest.fixture
def clock() -> Clock:
    return Clock(NOON_S)


@pytest.fixture
async def budgets(redis: Redis, clock: Clock) -> Budgets:
    await redis.set(READY_KEY, "1")
    return Budgets(redis, clock, clock.ms, values_max=3)


def charges(hold: Hold, microusd: int, tokens: int = 0) -> list[Charge]:
    """What a row of this cost adds to the counts that the hold has taken of."""
    amounts = {Unit.MONEY: microusd, Unit.TOKENS: tokens, Unit.REQUESTS: 1}
    return [Charge(t.name, t.field, amounts[t.unit], t.keep_until_ms) for t in hold.more if t.field]


async def spend(budgets: Budgets, name: str, need: Need, *against: Budget, microusd: int | None = None) -> Hold:
    """A request that is held and settled for all it may cost, or for `microusd`."""
    taken = await budgets.reserve(name, 7, against, need, 60)
    assert isinstance(taken, Hold), taken
    cost = need.microusd if microusd is None else microusd
    assert await budgets.settle(taken, cost, b"row", charges(taken, cost, need.tokens))
    return taken


def of(user: str, microusd: int = 60, **more: Any) -> Need:
    return Need(microusd, values={USER: user}, **more)


async def used(budgets: Budgets, budget: Budget) -> dict[str, tuple[int, int]]:
    states = await budgets.states([budget])
    return {s.value: (s.spent, s.held) for s in states if s.spent or s.held}


async def test_each_value_has_its_limit_and_none_given_is_a_value(budgets: Budgets) -> None:
    """One user's spend leaves the others' room alone; requests that name none share one limit."""
    await spend(budgets, "a", of("alice"), EACH_USER)
    await spend(budgets, "b", of("bob"), EACH_USER)
    await spend(budgets, "c", of(""), EACH_USER)
    for user in ("alice", ""):
        refused = await budgets.reserve("d" + user, 7, (EACH_USER,), of(user), 60)
        assert isinstance(refused, Refused)
        assert refused.state.spent == 60
    assert await used(budgets, EACH_USER) == {"=alice": (60, 0), "=bob": (60, 0), "-": (60, 0)}


async def test_invented_values_share_one_limit_beyond_the_bound(budgets: Budgets, redis: Redis) -> None:
    """A client that names a new user each time gets the bound's number of limits and one more, in keys of bounded length."""
    names = [f"user {i} " + "x" * 10_000 for i in range(20)]
    outcomes = [await budgets.reserve(f"h{i}", 7, (EACH_USER,), of(name), 60) for i, name in enumerate(names)]
    assert [isinstance(one, Hold) for one in outcomes] == [True] * 4 + [False] * 16
    assert (await used(budgets, EACH_USER))["*"] == (0, 60)
    assert max(len(key) for key in await redis.keys()) < 100
    for one in outcomes:
        if isinstance(one, Hold):
            await budgets.settle(one, 1, b"", charges(one, 1))
    assert sum(spent for spent, _ in (await used(budgets, EACH_USER)).values()) == 4
    assert all(held == 0 for _, held in (await used(budgets, EACH_USER)).values())


async def test_a_refused_value_takes_no_place(budgets: Budgets) -> None:
    """Requests that no budget has room for do not fill the places of values."""
    for i in range(10):
        assert isinstance(await budgets.reserve(f"h{i}", 7, (EACH_USER,), of(f"u{i}", 101), 60), Refused)
    for name in ("a", "b", "c"):
        await spend(budgets, name, of(name), EACH_USER)
    assert set(await used(budgets, EACH_USER)) == {"=a", "=b", "=c"}


@pytest.mark.parametrize(("one", "other"), [("alice", " alice "), ("\u00e9", "e\u0301"), ("ﬁ", "fi"), ("Ａ", "A")])
async def test_forms_of_one_text_are_one_value(budgets: Budgets, one: str, other: str) -> None:
    """Compatible forms of Unicode and spaces at the ends give no second limit."""
    await spend(budgets, "a", of(one), EACH_USER)
    assert isinstance(await budgets.reserve("b", 7, (EACH_USER,), of(other), 60), Refused)


async def test_all_budgets_of_a_request_or_none(budgets: Budgets) -> None:
    """Team, user, tag, tokens and requests are held in one step; one without room holds none of them."""
    team = Budget(2, 7, WindowKind.DAY, 1000)
    tag = Budget(3, 7, WindowKind.MONTH, 500, axis="tag:project")
    tokens = Budget(4, 7, WindowKind.TOTAL, 50, unit=Unit.TOKENS)
    requests = Budget(5, 7, WindowKind.HOUR, 2, unit=Unit.REQUESTS)
    every = (EACH_USER, team, tag, tokens, requests)
    await spend(budgets, "a", of("alice", tokens=20), *every)
    refused = await budgets.reserve("b", 7, every, of("bob", tokens=31), 60)
    assert isinstance(refused, Refused)
    assert (refused.state.budget, refused.amount, refused.resets_in_s) == (tokens, 31, None)
    states = await budgets.spent(every)
    assert [(s.spent, s.held) for s in states] == [(60, 0), (60, 0), (60, 0), (20, 0), (1, 0)]
    await spend(budgets, "c", of("bob", tokens=1), *every)
    refused = await budgets.reserve("d", 7, every, of("carol", tokens=1), 60)
    assert isinstance(refused, Refused)
    assert refused.state.budget == requests


async def test_many_at_once_never_pass_any_limit(budgets: Budgets) -> None:
    """90 racing requests with three budgets each take exactly what the tightest allows."""
    tokens = Budget(4, 7, WindowKind.DAY, 35, unit=Unit.TOKENS)
    team = Budget(2, 7, WindowKind.DAY, 10_000)
    tries = [budgets.reserve(f"h{i}", 7, (EACH_USER, team, tokens), of("alice", 10, tokens=5), 60) for i in range(90)]
    held = [one for one in await asyncio.gather(*tries) if isinstance(one, Hold)]
    assert len(held) == 7
    await asyncio.gather(*(budgets.settle(one, 10, b"", charges(one, 10, 5)) for one in held))
    assert [(s.spent, s.held) for s in await budgets.spent((EACH_USER, team, tokens))] == [(70, 0), (70, 0), (35, 0)]


async def test_a_rolling_window_never_holds_more_than_its_limit(budgets: Budgets, clock: Clock) -> None:
    """Spend leaves the window when it is older than the window, no sooner, and the refusal says when."""
    day = Budget(6, 7, WindowKind.ROLLING, 100, rolling_s=86_400)
    for i in range(2):
        await spend(budgets, f"h{i}", Need(50), day)
        clock.now_s += 6 * 3600
    refused = await budgets.reserve("c", 7, (day,), Need(50), 60)
    assert isinstance(refused, Refused)
    assert refused.resets_in_s is not None
    assert 12 * 3600 <= refused.resets_in_s <= 12.6 * 3600
    clock.now_s += 12 * 3600 - 1
    assert isinstance(await budgets.reserve("d", 7, (day,), Need(50), 60), Refused)
    clock.now_s = NOON_S + 12 * 3600 + refused.resets_in_s
    await spend(budgets, "e", Need(50), day)
    assert isinstance(await budgets.reserve("f", 7, (day,), Need(1), 60), Refused)


async def test_a_raise_holds_until_its_end_and_a_reset_counts_anew(budgets: Budgets, clock: Clock) -> None:
    """A raised limit is the old one again after its end; after a reset earlier spend counts no more."""
    raised = Budget(2, 7, WindowKind.DAY, 100, raised_by=50, raised_until_ms=clock.ms() + 3_600_000)
    await spend(budgets, "a", Need(150), raised)
    clock.now_s += 3600
    assert isinstance(await budgets.reserve("b", 7, (raised,), Need(1), 60), Refused)
    again = Budget(2, 7, WindowKind.DAY, 100, epoch=1)
    await spend(budgets, "c", Need(100), again)
    assert isinstance(await budgets.reserve("d", 7, (again,), Need(1), 60), Refused)


async def test_overdraft_as_each_budget_says(budgets: Budgets) -> None:
    """Near its end one budget refuses, one holds a usual answer that is to be cut, one lets a longer answer pass."""
    need = Need(80, usual_microusd=10)
    for number, overdraft in enumerate(Overdraft):
        budget = Budget(20 + number, 7, WindowKind.TOTAL, 100, overdraft=overdraft, epoch=1)
        await spend(budgets, f"a{number}", Need(40), budget)
        taken = await budgets.reserve(f"b{number}", 7, (budget,), need, 60)
        if overdraft is Overdraft.REFUSE:
            assert isinstance(taken, Refused)
            continue
        assert isinstance(taken, Hold)
        assert taken.is_cut is (overdraft is Overdraft.TRUNCATE)
        assert (await used(budgets, budget))[""] == (40, 10)
        await budgets.settle(taken, 70, b"", charges(taken, 70))
        assert (await used(budgets, budget))[""] == (110, 0)
        assert isinstance(await budgets.reserve(f"c{number}", 7, (budget,), Need(1), 60), Refused)


@pytest.mark.parametrize("axis", [TEAM, USER])
async def test_a_repeated_call_is_cut_where_the_first_was(budgets: Budgets, axis: str) -> None:
    """A client of Redis that lost the reply and asks again gets the amounts that are held, so that it frees them."""
    cuts = Budget(2, 7, WindowKind.DAY, 100, axis=axis, overdraft=Overdraft.TRUNCATE)
    first, again = [await budgets.reserve("a", 7, (cuts,), of("alice", 150, usual_microusd=10), 60) for _ in range(2)]
    assert isinstance(first, Hold)
    assert first.is_cut
    assert again == first
    assert await budgets.release(first)
    assert await used(budgets, cuts) == {}


async def test_a_budget_that_may_not_be_cut_still_refuses(budgets: Budgets) -> None:
    """Of two budgets without room for the longest answer, one that refuses decides."""
    cuts = Budget(2, 7, WindowKind.DAY, 100, overdraft=Overdraft.TRUNCATE)
    refuses = Budget(3, 7, WindowKind.MONTH, 50)
    refused = await budgets.reserve("a", 7, (cuts, refuses), Need(120, usual_microusd=10), 60)
    assert isinstance(refused, Refused)
    assert refused.state.budget == refuses


async def test_a_deployment_is_limited_once_it_is_known(budgets: Budgets) -> None:
    """A budget on deployments takes no part before one is chosen, and limits each for itself then."""
    budget = Budget(2, 7, WindowKind.DAY, 100, axis=DEPLOYMENT)
    assert (await budgets.reserve("a", 7, (budget,), Need(500), 60)) == budgets.unreserved("a", 7)
    await spend(budgets, "b", Need(100, values={DEPLOYMENT: "x"}), budget)
    assert isinstance(await budgets.reserve("c", 7, (budget,), Need(1, values={DEPLOYMENT: "x"}), 60), Refused)
    await spend(budgets, "d", Need(100, values={DEPLOYMENT: "y"}), budget)


async def test_leases_of_such_holds_are_kept_and_end(budgets: Budgets, clock: Clock) -> None:
    """A hold of a value's count is renewed, expires, is released, and is repeated like any other."""
    kept = await budgets.reserve("a", 7, (EACH_USER,), of("alice"), 60)
    again = await budgets.reserve("a", 7, (EACH_USER,), of("alice"), 60)
    assert isinstance(kept, Hold)
    assert again == kept
    clock.now_s += 50
    await budgets.renew([kept], 60)
    clock.now_s += 50
    assert isinstance(await budgets.reserve("b", 7, (EACH_USER,), of("alice"), 60), Refused)
    intent = budgets.intended("c", 7, (EACH_USER,), of("bob"))
    await budgets.hold(intent, 60)
    await budgets.release(intent.whole())  # a caller that lost the reply
    assert await used(budgets, EACH_USER) == {"=alice": (0, 60)}
    clock.now_s += 61
    await spend(budgets, "d", of("alice"), EACH_USER)


async def test_the_pace_of_a_budget(budgets: Budgets, clock: Clock) -> None:
    """Half of a day's budget by 6 in the morning is used up at noon; nothing is said where too little is known."""
    budget = Budget(2, 7, WindowKind.DAY, 1000)
    clock.now_s -= 6 * 3600
    await spend(budgets, "a", Need(500), budget)
    (state,) = await budgets.spent([budget])
    pace = pace_of(state, clock.ms())
    assert (pace.per_day, pace.projected) == (2000, 2000)
    assert pace.used_up_at_ms == int(NOON_S * 1000)
    assert pace_of(state, clock.ms(), last_day=1) == pace
    (unknown,) = await budgets.spent([Budget(3, 7, WindowKind.TOTAL, 1000)])
    assert pace_of(unknown, clock.ms()).per_day is None
    made_ms = clock.ms() - 2 * 86_400_000
    rolling = Budget(4, 7, WindowKind.ROLLING, 1000, rolling_s=30 * 86_400, begun_ms=made_ms)
    await spend(budgets, "b", Need(500), rolling)
    (young,) = await budgets.spent([rolling])
    assert [pace_of(young, made_ms + days * 86_400_000).per_day for days in (0, 2, 40)] == [
        None,
        250,
        pytest.approx(50 / 3),
    ]


async def test_the_last_day_paces_a_longer_window(budgets: Budgets, clock: Clock) -> None:
    """A month's budget that was hardly used until yesterday ends at yesterday's rate; of a team that was made since, at the
    rate since then."""
    budget = Budget(2, 7, WindowKind.MONTH, 1000)
    await spend(budgets, "a", Need(500), budget)
    (state,) = await budgets.spent([budget])
    assert state.window.end_ms is not None
    days_left = (state.window.end_ms - clock.ms()) / 86_400_000
    pace = pace_of(state, clock.ms(), last_day=250)
    assert (pace.per_day, pace.projected) == (250, pytest.approx(500 + 250 * days_left))
    assert pace.used_up_at_ms == clock.ms() + 2 * 86_400_000
    assert pace_of(state, clock.ms(), 250, team_made_ms=clock.ms() - 6 * 3_600_000).per_day == 1000
    assert pace_of(state, clock.ms(), 250, team_made_ms=clock.ms() - 180_000).per_day is None
    assert pace_of(state, clock.ms(), team_made_ms=clock.ms() - 86_400_000).per_day == 500


def test_counts_of_teams_are_not_those_of_others() -> None:
    """A budget on the team's money draws on the count that it has anyway; any other does not."""
    assert Budget(1, 1, WindowKind.DAY, 1).is_shared
    assert Budget(1, 1, WindowKind.TOTAL, 1, time_zone="Europe/Berlin").is_shared
    for other in (
        Budget(1, 1, WindowKind.DAY, 1, axis=USER),
        Budget(1, 1, WindowKind.DAY, 1, axis=TEAM, unit=Unit.TOKENS),
        Budget(1, 1, WindowKind.DAY, 1, epoch=1),
        Budget(1, 1, WindowKind.DAY, 1, time_zone="Europe/Berlin"),
        Budget(1, 1, WindowKind.ROLLING, 1, rolling_s=3600),
    ):
        assert not other.is_shared
    assert Taken("a", "h|1", 1, 0).field == ""


RUN = Budget(9, 7, WindowKind.TOTAL, 125, axis=SESSION)


def by(session: str, microusd: int = 60) -> Need:
    return Need(microusd, tokens=5, values={SESSION: session})


async def test_every_session_has_a_limit_of_its_own(budgets: Budgets) -> None:
    """However many there are, also beyond those listed, each is held to its limit; requests without one to none."""
    for number in range(20):
        await spend(budgets, f"a{number}", by(f"run-{number}"), RUN)
        await spend(budgets, f"b{number}", by(f"run-{number}"), RUN)
        refused = await budgets.reserve(f"c{number}", 7, (RUN,), by(f"run-{number}"), 60)
        assert isinstance(refused, Refused)
        assert (refused.state.value, refused.state.spent, refused.resets_in_s) == (f"=run-{number}", 120, None)
    assert len([value for value in await used(budgets, RUN) if value != "*"]) == 3
    none_named = await budgets.reserve("d", 7, (RUN,), by("", 500), 60)
    assert none_named == budgets.unreserved("d", 7)
    of_none = Budget(10, 7, WindowKind.TOTAL, 100, axis=SESSION, value="")
    await spend(budgets, "e", by("", 100), RUN, of_none)
    assert isinstance(await budgets.reserve("f", 7, (of_none,), by("", 1), 60), Refused)


async def test_racing_calls_of_a_session_never_pass_its_limit(budgets: Budgets) -> None:
    """Of 90 at once those are held that fit; a second session is not touched; nothing stays held."""
    tries = [budgets.reserve(f"h{i}", 7, (RUN,), by("run", 20), 60) for i in range(90)]
    held = [one for one in await asyncio.gather(*tries) if isinstance(one, Hold)]
    assert len(held) == 6
    await spend(budgets, "other", by("other"), RUN)
    await asyncio.gather(*(budgets.settle(one, 20, b"", charges(one, 20)) for one in held))
    assert await used(budgets, RUN) == {"=run": (120, 0), "=other": (60, 0)}


async def test_a_session_at_rest_is_forgotten(redis: Redis) -> None:
    """Each use of its count puts the end off; 300 sessions that rested for as long leave no key of theirs."""
    await redis.set(READY_KEY, "1")
    clock = Clock(time.time())
    now = Budgets(redis, clock, values_max=3)
    hold = await spend(now, "a", by("run"), RUN)
    key = count_keys(hold.more[0].name)[0]
    assert await redis.pttl(key) == pytest.approx(SESSION_KEPT_MS, abs=60_000)
    clock.now_s += 3600
    await spend(now, "b", by("run"), RUN)
    assert await redis.pttl(key) == pytest.approx(SESSION_KEPT_MS + 3_600_000, abs=60_000)
    await redis.flushall()
    await redis.set(READY_KEY, "1")
    rested = Budgets(redis, Clock(time.time() - SESSION_KEPT_MS / 1000 - 1))
    for number in range(300):
        await spend(rested, f"h{number}", by(f"run-{number}"), RUN)
    assert [key for pattern in ("spend:b*", "holds:b*", "values:*") for key in await redis.keys(f"*{pattern}")] == []


async def test_a_session_is_counted_again_from_the_ledger(budgets: Budgets, redis: Redis, clock: Clock) -> None:
    """Where Redis lost its counts, the ledger's sum of a session holds it to its limit, and lists it."""
    hold = await spend(budgets, "a", by("run", 100), RUN)
    await redis.flushall()
    (row,) = charges(hold, 100)
    await redis.set(LEDGER_LOCK, "lock")
    assert await budgets.restate_own([OwnSpend(row.name, row.field, row.amount, row.keep_until_ms)], "lock") == 1
    await budgets.mark_ready("lock")
    refused = await budgets.reserve("b", 7, (RUN,), by("run", 26), 60)
    assert isinstance(refused, Refused)
    await spend(budgets, "c", by("run", 25), RUN)
    assert await used(budgets, RUN) == {"=run": (125, 0)}
