"""A second deployment beside a slow first one: the quicker answers, both are billed, and the share of the spend holds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.backends.openai.backend import OpenAIBackend
from tests.e2e.upstream import run_upstream
from tests.journey.conftest import OpenWorld
from tests.world import KEY, Finish, Tokens, World, broken, deployment, until

_BUDGET = 400  # µUSD: room for the dearer of two tries, and not for both


def _models(share: float = 1.0, *further: dict[str, Any], **second: Any) -> dict[str, Any]:
    bounds = {"output_tokens_max": 100}
    deployments = [
        deployment("first", usd=(1.0, 1.0), **bounds),
        deployment("second", usd=(2.0, 2.0), **bounds, **second),
        *further,
    ]
    return {"mock": {"policy": "cheapest", "hedge_cost_max": share, "deployments": deployments}}


def _knows(world: World, name: str) -> None:
    """A deployment whose hundred calls took a millisecond to the first token."""
    world._deployment(name).estimate.restore((100.0, 0.0, 100.0, 0.0, 0.0, 100.0, 0.0, 0.0, 100.0, 100.0))


async def _learned(world: World, calls: int = 8) -> None:
    """The first deployment is known as quick, and the alias has a spend."""
    for number in range(calls):
        assert (await world.ask(f"quick {number}")).headers["x-sameway-backend"] == "first"
    if calls >= 8:
        _knows(world, "first")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_the_second_answers_where_the_first_is_slow(open_a_world: OpenWorld, is_stream: bool) -> None:
    """The first says nothing: the second is asked, answers, and the first is cancelled; both prompts are paid, each by its row."""
    world, never = await open_a_world(models=_models()), asyncio.Event()
    await _learned(world)
    before = len(await world.ledger())
    world.backends["first"].plays_once(never)
    reply = await world.ask("slow", stream=is_stream, max_tokens=5)
    assert (reply.content, reply.headers["x-sameway-backend"]) == ("answer of second", "second")
    assert reply.headers["x-sameway-hedge"] == "second"
    (call,) = world.backends["first"].calls[8:]
    assert (call.is_cancelled, call.is_closed) == (True, True)
    record = await world.record(reply)
    assert record.answer.hedge is not None
    assert (record.answer.hedge.deployment, record.answer.hedge.outcome) == ("second", "won")
    rows = (await world.ledger())[before:]
    assert [row.deployment for row in rows] == ["first", "second"]
    assert rows[0].usage.prompt_tokens > 0
    assert record.answer.hedge.cost_microusd == rows[0].cost_microusd
    assert record.money.cost_microusd == sum(row.cost_microusd for row in rows)
    assert [(one.name, one.verdict) for one in record.answer.attempts] == [("first", "cancelled"), ("second", "ok")]
    assert record.cache.store == "stored"
    await world.is_released()


async def test_the_second_has_slots_that_workers_share(open_a_world: OpenWorld) -> None:
    """A worker that was granted no slot of the second asks for one, and the second answers."""
    world, never = await open_a_world(models=_models(concurrency_max=1)), asyncio.Event()
    await _learned(world)
    slots = world._deployment("second").slots
    slots.share(lambda: slots.grant(1, 1, is_refused=False))
    world.backends["first"].plays_once(never)
    assert (await world.ask("slow", max_tokens=5)).headers["x-sameway-hedge"] == "second"


@pytest.mark.parametrize("place", ["headers", "first"])
async def test_the_loser_is_cancelled_to_its_socket(open_a_world: OpenWorld, place: str) -> None:
    """A server that brings no content sees its connection closed once the other deployment answers."""
    world = await open_a_world(models=_models())
    await _learned(world)
    with run_upstream() as upstream:
        server = OpenAIBackend(
            "first", base_url=upstream.url, model=f"mock?hang={place}", capabilities=frozenset(), api_key="sk-secret"
        )
        await server.start()
        scripted, world._deployment("first").backend = world._deployment("first").backend, server
        reply = await world.ask("slow", stream=True, max_tokens=5)
        assert (reply.content, reply.headers["x-sameway-hedge"]) == ("answer of second", "second")
        await until(lambda: upstream.seen().dropped == 1)
        assert (upstream.seen().connections_open, server.running) == (0, 0)
        world._deployment("first").backend = scripted
        await server.aclose()
    await world.is_released()


async def test_the_first_answers_after_all(open_a_world: OpenWorld) -> None:
    """The first has its content before the second: the second is cancelled, and what it cost is told."""
    world, go, never = await open_a_world(models=_models()), asyncio.Event(), asyncio.Event()
    await _learned(world)
    world.backends["first"].plays_once(go, "late", Finish(), Tokens())
    world.backends["second"].plays_once(never)
    client = world.begin("slow", stream=True, max_tokens=5)
    call = await world.backends["second"].called()
    go.set()
    reply = await client.reply()
    assert (reply.content, reply.headers["x-sameway-backend"]) == ("late", "first")
    record = await world.record(reply)
    assert record.answer.hedge is not None
    assert (record.answer.hedge.outcome, record.answer.deployment) == ("lost", "first")
    assert record.answer.hedge.cost_microusd > 0
    assert call.is_cancelled
    await world.is_released()


async def test_it_is_off_by_default(open_a_world: OpenWorld) -> None:
    """Without the setting a slow first deployment is waited for."""
    world, go = await open_a_world(models=_models(0.0)), asyncio.Event()
    await _learned(world)
    world.backends["first"].plays_once(go, "late", Finish(), Tokens())
    client = world.begin("slow", max_tokens=5)
    await world.backends["first"].called(9)
    await asyncio.sleep(0.1)
    go.set()
    assert (await client.reply()).content == "late"
    assert world.backends["second"].calls == []


@pytest.mark.parametrize("why", ["share", "spend", "drained", "full", "resting", "unlearned", "budget", "alone"])
async def test_no_second_is_asked(open_a_world: OpenWorld, why: str) -> None:
    """Not beyond its share of the spend, nor where the second is out of use, full or resting, nor before anything is learned."""
    more = {"concurrency_max": 1} if why == "full" else {}
    models = _models(1e-6 if why == "share" else 1.0, **more)
    if why == "alone":
        models["mock"]["deployments"].pop()
    world, go = await open_a_world(models=models), asyncio.Event()
    team = await world.team()
    if why == "budget":
        await world.budget(team, _BUDGET)
    await _learned(world, {"unlearned": 2, "spend": 0}.get(why, 8))
    if why == "spend":
        _knows(world, "first")
    if why == "drained":
        world.takes_out(second="drained")
    if why == "full":
        world._deployment("second").slots.taken = 1
    if why == "resting":
        world.rests("second")
    world.backends["first"].plays_once(go, "late", Finish(), Tokens())
    calls = len(world.backends["first"].calls)
    client = world.begin("slow", key=team.key if why == "budget" else KEY, max_tokens=5)
    await world.backends["first"].called(calls + 1)
    await asyncio.sleep(0.15)
    if why == "budget":  # its part of the share is free again, while the first is still at work
        hedges = world._pipeline.fleet.aliases["mock"].hedges
        spent = sum(record.money.cost_microusd for record in world.records)
        assert hedges.take(spent, 1.0)
        hedges.give_back(spent)
    go.set()
    reply = await client.reply()
    assert reply.content == "late"
    assert "x-sameway-hedge" not in reply.headers
    if why != "alone":
        assert world.backends["second"].calls == []
    if why == "full":
        world._deployment("second").slots.taken = 0


async def test_both_fail_and_a_third_answers(open_a_world: OpenWorld) -> None:
    """Neither of the two has content: the next deployment is asked, and none of them twice."""
    third = deployment("third", usd=(3.0, 3.0), output_tokens_max=100)
    world, go = await open_a_world(models=_models(1.0, third)), asyncio.Event()
    await _learned(world)
    world.backends["first"].plays_once(go, broken())
    world.backends["second"].plays_once(broken())
    client = world.begin("slow", max_tokens=5)
    await world.backends["second"].called()
    go.set()
    reply = await client.reply()
    assert reply.content == "answer of third"
    record = await world.record(reply)
    assert record.answer.hedge is not None
    assert (record.answer.hedge.outcome, record.answer.hedge.cost_microusd) == ("failed", 0)
    assert [one.name for one in record.answer.attempts] == ["first", "second", "third"]
    await world.is_released()


async def test_a_client_that_leaves_ends_both(open_a_world: OpenWorld) -> None:
    """The last client leaves while two deployments are at work: both are cancelled, and both prompts are paid."""
    world, never = await open_a_world(models=_models()), asyncio.Event()
    await _learned(world)
    for name in ("first", "second"):
        world.backends[name].plays_once(never)
    client = world.begin("slow", stream=True, max_tokens=5)
    await world.backends["second"].called()
    client.leave()
    await client.reply()
    await world.quiet()
    assert [world.backends[name].calls[-1].is_cancelled for name in ("first", "second")] == [True, True]
    assert {row.deployment for row in (await world.ledger())[8:]} == {"first", "second"}
    await world.is_released()


async def test_a_slow_first_is_learned(open_a_world: OpenWorld) -> None:
    """A first that loses again and again is no longer taken for quick: fewer seconds are asked."""
    world, never = await open_a_world(models=_models()), asyncio.Event()
    await _learned(world)
    estimate = world._deployment("first").estimate
    before = estimate.ttft_p95_ms(10)
    world.backends["first"].plays_once(never)
    await world.ask("slow", max_tokens=5)
    after = estimate.ttft_p95_ms(10)
    assert before is not None
    assert after is not None
    assert after > before


async def test_the_share_holds_over_many(open_a_world: OpenWorld) -> None:
    """However many requests are slow at once, the losers cost no more than their share of the spend."""
    world, never = await open_a_world(models=_models(0.6)), asyncio.Event()
    await _learned(world, 20)
    for _ in range(10):
        world.backends["first"].plays_once(never)
    clients = [world.begin(f"slow {number}", max_tokens=5) for number in range(10)]
    await until(lambda: len(world.backends["first"].calls) >= 30)
    await asyncio.sleep(0.1)
    for client in clients:
        client.leave()
        await client.reply()
    await world.quiet()
    spent = sum(record.money.cost_microusd for record in world.records)
    hedged = sum(record.answer.hedge.cost_microusd for record in world.records if record.answer.hedge is not None)
    assert any(record.answer.hedge is not None for record in world.records)
    assert hedged <= 0.6 * spent
