"""Checks of hits by meaning: the hit is served, and its request generated anew beside it, by a request of the gateway's own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.world import KEY, Finish, Tokens, World, rejected, unavailable, until

FIRST, SECOND = "the first wording", "the second wording"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


async def drawn(world: World, key: str = KEY, **how: Any) -> str:
    """The id of an answer that is a hit for everything from now on; each hit is checked."""
    entry = (await world.record(await world.ask(FIRST, key=key, **how))).cache.entry
    world.semantic.hits(entry, hits=100)
    world.draws_checks()
    return entry


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_checked_hit_is_served_and_generated_beside(world: World, is_stream: bool) -> None:
    """The client gets a hit like any other, with the fresh answer still under way; that one is asked for with all the client sent."""
    how: dict[str, Any] = {"temperature": 0.3, "tools": TOOLS, "stream": is_stream}
    entry = await drawn(world, **how)
    go, backend = asyncio.Event(), world.backends["plain"]
    backend.plays(go, "another ", "long " * 50_000, "answer", Finish(), Tokens())
    hit = await world.begin(SECOND, **how).reply()
    assert (hit.cache, hit.content, hit.headers["x-sameway-cost-usd"]) == ("semantic", "answer of plain", "0")
    await until(lambda: len(backend.calls) == 2)
    go.set()
    await world.quiet()
    first, fresh = backend.calls
    assert fresh.body == {**first.body, "messages": [{"role": "user", "content": SECOND}]}
    assert (fresh.is_stream, fresh.partition) == (first.is_stream, first.partition)
    lesson = world.lessons[-1]
    assert (lesson.checks, lesson.stored) == (hit.id, world.records[-1].cache.entry)
    assert lesson.trial is not None
    assert (lesson.trial.ranked, lesson.trial.chance) == ((bytes.fromhex(entry),), 0.3)


async def test_a_fresh_answer_is_an_entry_of_its_own(world: World) -> None:
    """The same request gets it next time, as an exact hit that saves all that it would have cost."""
    await drawn(world)
    world.backends["plain"].plays("another answer", Finish(), Tokens())
    assert (await world.ask(SECOND)).content == "answer of plain"
    await world.quiet()
    again = await world.ask(SECOND)
    assert (again.cache, again.content, again.headers["x-sameway-saved-usd"]) == ("exact", "another answer", "0.000020")


async def test_its_team_pays_for_a_check(world: World) -> None:
    """By an operation of its own in record and ledger, which saves nothing and costs what the answer costs."""
    await drawn(world)
    hit = await world.ask(SECOND)
    await world.quiet()
    record = world.records[-1]
    assert (record.request.operation, record.request.key, record.cache.store) == ("check", "first", "stored")
    assert (record.money.cost_microusd, record.money.savings) == (20, {"checks": -20})
    assert (await world.record(hit)).money.saved_microusd == 20
    row = (await world.ledger())[-1]
    assert (row.kind, row.cost_microusd, row.baseline_microusd, row.mechanism) == ("check", 20, 0, "checks")
    assert row.request_id == record.request.id


async def test_a_budget_without_room_has_no_checks(world: World) -> None:
    """The hit is served all the same, and nothing more is spent or held."""
    team = await world.team()
    await drawn(world, team.key)
    await world.budget(team, 1)
    spent = await world.money_of(team)
    assert (await world.ask(SECOND, key=team.key)).cache == "semantic"
    await world.is_released()
    assert (len(world.backends["plain"].calls), await world.money_of(team)) == (1, spent)
    assert world.records[-1].ended.error == "insufficient_quota"


@pytest.mark.parametrize("failure", [unavailable(), rejected()])
async def test_a_check_that_fails_is_seen_by_no_client(world: World, failure: Exception) -> None:
    """Its record has the error, and the judges get what there is of it."""
    await drawn(world)
    world.backends["plain"].plays(failure)
    hit = await world.ask(SECOND)
    await world.is_released()
    assert (hit.status, (await world.record(hit)).ended.status) == (200, 200)
    assert world.records[-1].ended.status >= 400
    assert (world.lessons[-1].checks, world.lessons[-1].stored) == (hit.id, None)


async def test_no_check_begins_in_a_busy_worker(world: World) -> None:
    """With more than 64 generations under way; once they are over the next hit is checked."""
    await drawn(world)
    go = asyncio.Event()
    world.backends["plain"].plays(go, "an answer", Finish(), Tokens())
    clients = [world.begin(f"wording {number}", cache={"no-cache": True}) for number in range(65)]
    await until(lambda: world.generations == 65)
    first = await world.begin(SECOND).reply()
    await until(lambda: len(world.lessons) == 1 and world.generations == 65)
    go.set()
    replies = [await client.reply() for client in clients]
    assert {reply.cache for reply in replies} == {"bypass"}
    await world.quiet()
    second = await world.ask(SECOND)
    assert [first.cache, second.cache] == ["semantic"] * 2
    assert [lesson.checks for lesson in world.lessons] == ["", "", second.id]


async def test_a_request_that_stores_nothing_is_checked_without_a_trace(world: World) -> None:
    """Under `no-store` the fresh answer is compared and not kept."""
    await drawn(world)
    hit = await world.ask(SECOND, cache={"no-store": True})
    await world.quiet()
    assert (world.lessons[-1].checks, world.lessons[-1].stored) == (hit.id, None)
    assert (await world.ask(SECOND, cache={"no-store": True})).cache == "semantic"
    await world.quiet()


async def test_a_worker_that_ends_waits_for_no_check(world: World) -> None:
    """It is cancelled, down to its deployment, and its hold is settled; what clients wait for is finished."""
    await drawn(world)
    backend = world.backends["plain"]
    backend.plays("an", asyncio.Event(), "answer")
    hit = await world.begin(SECOND).reply()
    await until(lambda: len(backend.calls) == 2 and backend.calls[1].steps == 2)
    await world.stops()
    assert backend.calls[1].is_cancelled
    assert world.records[-1].ended.error == "client_gone"
    assert (hit.cache, world.generations) == ("semantic", 0)
    await world.is_released()
