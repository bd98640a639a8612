"""Streams that break off, and the deployments that go on with them."""

from __future__ import annotations

import asyncio

import pytest

from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, broken, deployment, overloaded, timed_out, unavailable, until


@pytest.mark.parametrize("failure", [broken(), timed_out(), unavailable()])
async def test_another_deployment_goes_on(world: World, failure: Exception) -> None:
    """The client of a stream that breaks off gets one whole answer: no text is repeated or lost, and both are paid."""
    team = await world.team("with money")
    await world.budget(team, 1_000_000)
    world.backends["breaks"].plays_once("One ", "two ", "thr", failure)
    world.backends["goes on"].plays_once("ee ", "four", Finish(), Tokens(prompt=30, completion=2))
    reply = await world.ask(
        model="rescued", stream=True, key=team.key, max_tokens=50, stream_options={"include_usage": True}
    )
    assert (reply.content, reply.is_done) == ("One two three four", True)
    call = world.backends["goes on"].calls[0]
    assert (call.prefix, call.body["max_tokens"]) == ("One two thr", 47)
    assert world.backends["cannot"].calls == []
    pieces = [event for event in reply.events if event != "[DONE]"]
    assert len({piece["id"] for piece in pieces}) == 1
    told = [piece["sameway"] for piece in pieces if "sameway" in piece]
    assert told == [{"rescued": {"broken": "breaks", "deployment": "goes on", "characters": 11}}]
    usage = pieces[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (27, 5, 32)
    record = await world.record(reply)
    assert [(one.broken, one.deployment, one.characters) for one in record.answer.seams] == [("breaks", "goes on", 11)]
    assert (record.ended.status, record.cache.store, record.usage.completion_tokens) == (200, "rescued", 5)
    rows = {row.deployment: row for row in await world.ledger()}
    assert rows["breaks"].usage.completion_tokens >= 3
    assert rows["goes on"].usage.completion_tokens == 2
    assert rows["goes on"].usage.prompt_tokens == 30
    assert await world.money_of(team) == (sum(row.cost_microusd for row in rows.values()), 0)
    assert record.money.cost_microusd == sum(row.cost_microusd for row in rows.values())
    assert (await world.ask(model="rescued", max_tokens=50, key=team.key)).cache == "miss"


async def test_a_long_answer_is_read_between_others(world: World) -> None:
    """What a long answer said is read a part at a time: other requests go on meanwhile."""
    said = [f"{number} " for number in range(5_000)]
    world.backends["breaks"].plays_once(*said, broken())
    world.backends["goes on"].plays_once("end", Finish(), Tokens())
    client = world.begin(model="rescued", stream=True, max_tokens=20_000)
    call = await world.backends["breaks"].called()
    while call.steps <= len(said):  # noqa: ASYNC110
        await asyncio.sleep(0)
    turns = 0
    while not world.backends["goes on"].calls:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 10
    assert (await client.reply()).content == "".join(said) + "end"


async def test_a_server_that_begins_anew_is_joined_where_it_says_the_same(world: World) -> None:
    """A server that ignores the beginning and says it again is joined behind it; one that says other text is not."""
    world.backends["breaks"].plays("The capital of France", broken())
    world.backends["goes on"].plays_once("The ", "capital of ", "France is ", "Paris.", Finish(), Tokens(9, 6))
    reply = await world.ask(model="rescued", stream=True, stream_options={"include_usage": True})
    assert (reply.content, reply.is_done) == ("The capital of France is Paris.", True)
    assert reply.events[-2]["usage"]["completion_tokens"] == 6
    world.backends["goes on"].plays_once("The capital of Spain is Madrid.", Finish(), Tokens())
    reply = await world.ask("another", model="rescued", stream=True)
    assert (reply.content, reply.is_done) == ("The capital of France", False)
    assert reply.error["code"] == "upstream_broken"


async def test_white_space_at_the_joint_is_there_once(world: World) -> None:
    """Servers get the text without its last white space, and may write it again: the client sees it once."""
    for number, text in enumerate(("second", " second")):
        world.backends["breaks"].plays_once("first ", broken())
        world.backends["goes on"].plays_once(text, Finish(), Tokens())
        assert (await world.ask(f"{number}", model="rescued", stream=True)).content == "first second"


@pytest.mark.parametrize("rest", [["an: hi"], ["a", "n", ": hi"]])
async def test_a_stop_sequence_across_the_joint_ends_the_answer(world: World, rest: list[str]) -> None:
    """A stop sequence counts over the whole answer: the part behind the joint is not delivered, and the rest is cancelled."""
    world.backends["breaks"].plays_once("Well.\nHum", broken())
    world.backends["goes on"].plays_once(*rest, " more", Finish(), Tokens())
    reply = await world.ask(model="rescued", stream=True, stop=["\nHuman:"])
    assert (reply.content, reply.is_done) == ("Well.\nHum", True)
    finishes = [choice["finish_reason"] for event in reply.events[:-1] for choice in event["choices"]]
    assert [one for one in finishes if one] == ["stop"]


async def test_a_deployment_that_another_worker_probes_does_not_go_on(world: World) -> None:
    """The one call that may probe a resting deployment counts a continuation, too: the stream ends with its error."""
    world.backends["breaks"].plays_once(unavailable())
    world.backends["cannot"].plays_once(unavailable())
    world.backends["goes on"].plays_once(overloaded(retry_after_s=5))
    assert (await world.ask("rests", model="rescued")).status == 429
    world.clock.passes(6)
    world.is_probed_elsewhere("goes on")
    world.backends["breaks"].plays_once("one ", broken())
    reply = await world.ask(model="rescued", stream=True)
    assert (reply.content, reply.is_done) == ("one ", False)
    assert reply.error["code"] == "upstream_broken"
    assert len(world.backends["goes on"].calls) == 1
    await world.is_released()


async def test_a_stream_waits_for_a_place_where_it_goes_on(open_a_world: OpenWorld) -> None:
    """Where the only deployment that continues is full, the stream waits in its queue; with no room there, it ends with its error."""
    continues = deployment("continues", capabilities=["prefill"], concurrency_max=1, queue_max=1)
    models = {
        "rescued": {"policy": "cheapest", "deployments": [deployment("breaks", usd=(0, 0)), continues]},
    }
    world = await open_a_world(models=models)
    more = asyncio.Event()
    world.backends["breaks"].plays(unavailable())
    world.backends["continues"].plays_once(more, "slow", Finish(), Tokens())
    running = world.begin("running", model="rescued")
    await world.backends["continues"].called()
    world.backends["breaks"].plays("one ", broken())
    world.backends["continues"].plays_once("two", Finish(), Tokens())
    waits = world.begin("waits", model="rescued", stream=True)
    await until(lambda: world.waiting("continues") == 1)
    refused = await world.begin("refused", model="rescued", stream=True).reply()
    assert (refused.content, refused.error["code"]) == ("one ", "upstream_broken")
    more.set()
    assert (await running.reply()).content == "slow"
    reply = await waits.reply()
    assert (reply.content, reply.is_done) == ("one two", True)
    await world.is_released()


async def test_an_answer_that_has_its_length_is_complete(world: World) -> None:
    """Where all tokens that were asked for have come, only the finish was lost: nobody is asked for it."""
    world.backends["breaks"].plays_once("a", "b", "c", broken())
    reply = await world.ask(model="rescued", stream=True, max_tokens=3)
    assert (reply.content, reply.is_done) == ("abc", True)
    assert reply.events[-2]["choices"][0]["finish_reason"] == "length"
    assert world.backends["goes on"].calls == []
    assert (await world.record(reply)).cache.store in ("rescued", "incomplete")


async def test_a_rescue_that_breaks_off_is_the_clients_error(world: World) -> None:
    """The second break is the end where no third deployment can go on: an error event, and no `[DONE]`."""
    world.backends["breaks"].plays_once("one ", broken())
    world.backends["goes on"].plays_once("two ", timed_out())
    reply = await world.ask(model="rescued", stream=True)
    assert (reply.content, reply.is_done) == ("one two ", False)
    assert reply.error["code"] == "upstream_broken"
    record = await world.record(reply)
    assert (record.cache.store, len(record.answer.attempts)) == ("incomplete", 2)
    assert len(await world.ledger()) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True},
    ],
)
async def test_what_is_more_than_text_is_not_continued(open_a_world: OpenWorld, fields: dict[str, object]) -> None:
    """Tool calls, JSON formats, several choices and log probabilities end with the error."""
    everything = ["tools", "json_object", "n", "logprobs", "prefill"]
    models = {
        "rescued": {
            "policy": "cheapest",
            "deployments": [
                deployment("breaks", usd=(0, 0), capabilities=everything),
                deployment("goes on", capabilities=everything),
            ],
        }
    }
    world = await open_a_world(models=models)
    world.backends["breaks"].plays("one ", broken())
    reply = await world.ask(model="rescued", stream=True, **fields)
    assert (reply.error["code"], reply.is_done) == ("upstream_broken", False)
    assert world.backends["goes on"].calls == []


async def test_a_policy_may_want_the_error(world: World) -> None:
    """`rescue: error` ends a stream that breaks off, whatever another deployment could do."""
    world.backends["breaks off"].plays("one ", broken())
    reply = await world.ask(model="unrescued", stream=True)
    assert (reply.error["code"], reply.is_done) == ("upstream_broken", False)
    assert world.backends["could"].calls == []


async def test_reasoning_in_progress_is_not_continued(world: World) -> None:
    """A text that breaks off inside its reasoning is no beginning of an answer."""
    world.backends["breaks"].plays("<think>let me see", broken())
    assert (await world.ask(model="rescued", stream=True)).error["code"] == "upstream_broken"


async def test_a_completion_is_continued(world: World) -> None:
    """A text completion goes on as a chat does."""
    world.backends["breaks"].plays_once("one ", broken())
    world.backends["goes on"].plays_once("two", Finish(), Tokens())
    reply = await world.ask(model="rescued", path="/v1/completions", prompt="count", stream=True)
    assert (reply.content, reply.is_done) == ("one two", True)


async def test_a_whole_beside_a_stream_gets_the_same_answer(world: World) -> None:
    """A whole that shares the flight of a stream gets the rescued answer, in one piece; so does a stream that joins later."""
    go, more = asyncio.Event(), asyncio.Event()
    world.backends["breaks"].plays_once("one ", go, broken())
    world.backends["goes on"].plays_once("two ", more, "three", Finish(), Tokens())
    stream = world.begin(model="rescued", stream=True)
    await stream.sees("one ")
    whole = world.begin(model="rescued")
    go.set()
    await stream.sees("two ")
    late = world.begin(model="rescued", stream=True)
    await late.sees("two ")
    more.set()
    replies = [await client.reply() for client in (stream, whole, late)]
    assert [reply.content for reply in replies] == ["one two three"] * 3
    assert replies[1].json["sameway"]["rescued"]["deployment"] == "goes on"


async def test_a_client_that_leaves_cancels_the_rescue(world: World) -> None:
    """A client that leaves during the rescue cancels the deployment that goes on; both prompts are paid."""
    world.backends["breaks"].plays_once("one ", broken())
    world.backends["goes on"].plays_once("two ", asyncio.Event())
    client = world.begin(model="rescued", stream=True)
    await client.sees("two ")
    client.leave()
    await client.reply()
    await world.quiet()
    assert world.backends["goes on"].calls[0].is_cancelled
    assert len(await world.ledger()) == 2
