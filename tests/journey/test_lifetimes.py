"""How long an answer is served: by its alias, until a purge by tag, and beyond its time while a newer one is made."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.journey.conftest import OpenWorld
from tests.world import MODELS, Finish, Tokens, World, unavailable, until

_STALE = {"ttl_s": 10, "stale_s": 100, "is_semantic": True}


def _with(**settings: Any) -> dict[str, Any]:
    return {**MODELS, "mock": {**MODELS["mock"], **settings}}


async def test_the_alias_has_its_own_time(open_a_world: OpenWorld) -> None:
    """Its `ttl_s` takes the place of the common one; a request's own comes first."""
    world = await open_a_world(models=_with(ttl_s=100), cache={"ttl_s": 10})
    await world.ask("by the alias")
    await world.ask("by the request", cache={"ttl": 20})
    world.clock.passes(50)
    assert (await world.ask("by the alias")).cache == "exact"
    assert (await world.ask("by the request")).cache == "miss"
    await world.is_released()


async def test_a_stale_answer_is_served_while_one_request_of_all_workers_makes_a_newer_one(
    open_a_world: OpenWorld,
) -> None:
    """No client waits; the newer answer is made once, at the team's expense, and takes the place of the stale one."""
    world = await open_a_world(cache=_STALE)
    other, go = await world.another(), asyncio.Event()
    await world.ask("hello")
    world.clock.passes(20)
    other.clock.passes(20)
    world.backends["plain"].plays("newer", go, Finish(), Tokens())
    other.backends["plain"].plays("newer", go, Finish(), Tokens())
    replies = [await (world, other)[n % 2].begin("hello").reply() for n in range(6)]
    assert {(reply.cache, reply.headers["x-sameway-kept"]) for reply in replies} == {("exact", "stale")}
    assert {reply.content for reply in replies} == {"answer of plain"}
    await until(lambda: world.generations + other.generations == 1)
    go.set()
    await world.quiet()
    await other.quiet()
    made = [record for record in world.records + other.records if record.request.operation == "refresh"]
    assert [record.cache.store for record in made] == ["stored"]
    assert [row.kind for row in await world.ledger()] == ["chat", "refresh"]
    for one in (world, other):
        one.clock.passes(-20)  # the newer one was made by the machine's clock
        reply = await one.ask("hello")
        assert (reply.content, reply.cache, reply.headers.get("x-sameway-kept")) == ("newer", "exact", None)
    await world.is_released()


async def test_a_deployment_that_is_down_is_asked_once_and_the_stale_answer_stays(open_a_world: OpenWorld) -> None:
    """A refresh that fails leaves the answer until its time is over, and is not begun again by each request."""
    world = await open_a_world(cache=_STALE)
    await world.ask("hello")
    world.clock.passes(20)
    world.backends["plain"].plays(unavailable())
    for _ in range(4):
        assert (await world.ask("hello")).cache == "exact"
    assert [record.request.operation for record in world.records].count("refresh") == 1
    world.clock.passes(200)
    world.backends["plain"].plays("again", Finish(), Tokens())
    assert (await world.ask("hello")).cache == "miss"
    await world.is_released()


@pytest.mark.parametrize(
    "how",
    [{"cache": {"no-store": True}}, {"headers": {"cache-control": "only-if-cached"}}],
    ids=["no-store", "only-if-cached"],
)
async def test_a_request_that_may_not_store_makes_no_newer_answer(open_a_world: OpenWorld, how: dict[str, Any]) -> None:
    """It gets the stale answer, and nothing is generated for it."""
    world = await open_a_world(cache=_STALE)
    await world.ask("hello")
    world.clock.passes(20)
    calls = len(world.backends["plain"].calls)
    assert (await world.ask("hello", **how)).cache == "exact"
    assert len(world.backends["plain"].calls) == calls
    await world.is_released()


async def test_who_asked_for_a_time_of_its_own_gets_nothing_later(open_a_world: OpenWorld) -> None:
    """`cache.ttl` of a request is the whole life of its answer."""
    world = await open_a_world(cache=_STALE)
    await world.ask("hello", cache={"ttl": 10})
    world.clock.passes(20)
    assert (await world.ask("hello")).cache == "miss"
    await world.is_released()


async def test_a_stale_answer_is_served_to_its_own_request_alone(open_a_world: OpenWorld) -> None:
    """In other words the question is generated: nothing that is found by meaning is past its time."""
    world: World = await open_a_world(cache=_STALE)
    first = await world.ask("What is the capital of Peru?")
    world.semantic.hits((await world.record(first)).cache.entry)
    world.clock.passes(20)
    reply = await world.ask("Which city is the capital of Peru?")
    assert (reply.cache, reply.headers["x-sameway-miss-reason"]) == ("miss", "expired")
    await world.is_released()


async def test_a_purge_by_tag_ends_the_answers_that_were_made_for_it(world: World) -> None:
    """A request's tags go to its entry; another text, and too many, are refused by name."""
    await world.ask("with the price list", cache={"tags": ["prices", "of 2026"]})
    await world.ask("with a map", cache={"tags": ["maps"]})
    assert await world.purge_by_tag("of 2026") == 1
    assert (await world.ask("with the price list")).cache == "miss"
    assert (await world.ask("with a map")).cache == "exact"
    go = asyncio.Event()
    world.backends["plain"].plays_once(go, "by the old list", Finish(), Tokens())
    client = world.begin("with the list", cache={"tags": ["prices"]})
    await world.backends["plain"].called(4)
    assert await world.purge_by_tag("prices") == 0
    go.set()
    reply = await client.reply()
    assert (reply.content, (await world.record(reply)).cache.store) == ("by the old list", "purged")
    assert (await world.ask("with the list")).cache == "miss"
    for tags in (["two\nlines"], [""], ["x"] * 17, "prices", [1]):
        reply = await world.ask("wrong", cache={"tags": tags})
        assert (reply.status, reply.error["param"].startswith("cache.tags")) == (400, True), tags
