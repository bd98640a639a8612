"""Deployments that an operator takes out of use: routing says so, and what runs there ends as asked."""

from __future__ import annotations

import asyncio

import pytest

from tests.world import Finish, Tokens, World


@pytest.mark.parametrize("use", ["drained", "disabled"])
async def test_what_is_out_of_use_gets_no_request(world: World, use: str) -> None:
    """The others answer, the route names the operator, and nothing of another model is kept for the first choice."""
    world.takes_out(big=use)
    reply = await world.ask(model="mixed")
    assert reply.headers["x-sameway-backend"] == "small"
    record = await world.record(reply)
    assert record.answer.rejected[0].reason == f"is {use} by an operator"
    assert record.cache.store == "fallback"
    world.takes_out(big=use, small=use)
    refused = await world.ask("another", model="mixed")
    assert (refused.status, refused.error["code"]) == (503, "no_deployment_available")
    assert f"is {use} by an operator" in refused.error["message"]
    world.takes_out()
    assert (await world.ask("again", model="mixed")).headers["x-sameway-backend"] == "big"


async def test_draining_lets_running_requests_end(world: World) -> None:
    """What runs there when it is drained is answered whole."""
    first, more = world.backends["first"], asyncio.Event()
    first.plays_once("a ", more, "whole one", Finish(), Tokens())
    client = world.begin(model="pair", stream=True)
    await client.sees("a ")
    world.takes_out(first="drained")
    assert (await world.begin("two", model="pair").reply()).headers["x-sameway-backend"] == "second"
    more.set()
    assert (await client.reply()).content == "a whole one"


async def test_disabling_gives_running_requests_up(world: World) -> None:
    """What has not begun fails over; what has begun ends with an error event; nothing counts against the deployment."""
    first, never = world.backends["first"], asyncio.Event()
    first.plays("a ", never)
    begun = world.begin("one", model="pair", stream=True)
    await begun.sees("a ")
    first.plays(never)
    silent = world.begin("two", model="pair", stream=True)
    await first.called(2)
    world.takes_out(first="disabled")
    reply = await begun.reply()
    assert (reply.is_done, reply.error["code"]) == (False, "upstream_broken")
    assert (await silent.reply()).content == "answer of second"
    await world.is_released()
    world.takes_out()
    first.plays("well", Finish(), Tokens())
    assert (await world.ask("three", model="pair")).headers["x-sameway-backend"] == "first"
