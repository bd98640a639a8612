"""Responses in the background, with the official client: they outlive it, and end once, at any worker's eyes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from tests.journey.conftest import OpenWorld
from tests.world import KEY, Client, Finish, Tokens, World, unavailable, until


async def ended(client: AsyncOpenAI, id: str) -> Any:
    """A response once it has ended."""
    async with asyncio.timeout(30):
        while (found := await client.responses.retrieve(id)).status in ("queued", "in_progress"):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return found


async def begin(world: World, client: AsyncOpenAI, **more: Any) -> tuple[Any, asyncio.Event]:
    """A response that waits for the event after its first word."""
    go = asyncio.Event()
    world.backends["plain"].plays("slow ", go, "answer", Finish(), Tokens())
    made = await client.responses.create(model="mock", input="Go on.", background=True, **more)
    return made, go


async def begin_stream(world: World, key: str = KEY) -> tuple[Client, str, asyncio.Event]:
    """A streamed response whose client has its first word, its id, and what it waits for then."""
    go = asyncio.Event()
    world.backends["plain"].plays("slow ", go, "answer", Finish(), Tokens())
    client = world.begin(path="/v1/responses", key=key, input="Go on.", background=True, stream=True)
    await client.sees("response.output_text.delta")
    found = re.search(rb"resp_[0-9a-f]{32}", client._body)
    assert found is not None
    return client, found[0].decode(), go


async def test_a_stream_ends_well_where_the_answer_to_its_commit_was_lost(world: World) -> None:
    """The response is kept as completed, and so its stream says."""
    client, id, go = await begin_stream(world)
    world.loses_an_acknowledgement("change")
    go.set()
    reply = await client.reply()
    assert b"response.completed" in reply.body
    assert b"stream_broken" not in reply.body
    assert (await world.client().responses.retrieve(id)).status == "completed"


async def test_a_response_outlives_its_request(world: World) -> None:
    """Queued at once, in progress at another worker's eyes, completed as any other, recorded and paid once."""
    client, another = world.client(), (await world.another()).client()
    made, go = await begin(world, client)
    assert (made.status, made.background, made.output) == ("queued", True, [])
    async with asyncio.timeout(30):
        while (await another.responses.retrieve(made.id)).status != "in_progress":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    with pytest.raises(openai.BadRequestError, match="no output to go on from"):
        await another.responses.create(model="mock", input="more", previous_response_id=made.id)
    go.set()
    done = await ended(another, made.id)
    assert (done.status, done.output_text, done.background, done.error) == ("completed", "slow answer", True, None)
    assert done.usage.output_tokens == 5
    assert [one.content[0].text for one in (await another.responses.input_items.list(made.id)).data] == ["Go on."]
    await world.quiet()
    await until(lambda: world.ended == ["completed"])
    assert [one.request.id for one in world.records if one.request.operation == "responses"] == [
        made.id.replace("resp_", "req_")
    ]
    assert len(await world.ledger()) == 1
    await another.responses.create(model="mock", input="more", previous_response_id=made.id)


async def test_a_stream_resumes_at_any_worker(world: World) -> None:
    """From the event after a number, as often as wanted, also after the end; all events are the stream's own."""
    client, another = world.client(), (await world.another()).client()
    begun, id, go = await begin_stream(world)
    resumed = asyncio.ensure_future(another.responses.retrieve(id, stream=True, starting_after=2))
    begun.leave()
    go.set()
    rest = [event.to_dict() async for event in await resumed]
    whole = [event.to_dict() async for event in await client.responses.retrieve(id, stream=True)]
    sent = [line for line in (await begun.reply()).text.splitlines() if line.startswith("data: ")]
    assert sent
    assert whole[: len(sent)] == [json.loads(line.removeprefix("data: ")) for line in sent]
    assert whole[3:] == rest
    assert [one["sequence_number"] for one in whole] == list(range(len(whole)))
    kinds = [one["type"] for one in whole]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert (await client.responses.retrieve(id)).to_dict() == rest[-1]["response"]
    assert [one async for one in await client.responses.retrieve(id, stream=True, starting_after=99)] == []
    plain = await client.responses.create(model="mock", input="hello")
    with pytest.raises(openai.BadRequestError, match="has no stream"):
        await client.responses.retrieve(plain.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="starting_after"):
        await client.responses.retrieve(id, stream=True, extra_query={"starting_after": "x"})


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_cancelled_response_costs_no_more(world: World, is_stream: bool) -> None:
    """Cancelled at another worker: the generation ends at the next look, what it cost is settled, its stream ends."""
    team = await world.team()
    await world.budget(team, 10**9)
    client, another = world.client(team.key), (await world.another()).client(team.key)
    id = (await begin_stream(world, team.key))[1] if is_stream else (await begin(world, client))[0].id
    await world.backends["plain"].called()
    await until(lambda: world.backends["plain"].calls[0].steps > 1)
    for _ in range(2):
        assert (await another.responses.cancel(id)).status == "cancelled"
    await world.background.renew()
    await world.quiet()
    await until(lambda: world.ended == ["cancelled"])
    assert world.backends["plain"].calls[0].is_closed
    assert (await world.money_of(team))[1] == 0
    found = await client.responses.retrieve(id)
    assert (found.status, found.output) == ("cancelled", [])
    if is_stream:
        last = [one async for one in await another.responses.retrieve(id, stream=True)][-1]
        assert (last.type, last.response.status) == ("response.failed", "cancelled")


@pytest.mark.parametrize("act", ["cancel", "delete"])
async def test_an_answer_that_ends_after_its_cancellation_is_nowhere_complete(world: World, act: str) -> None:
    """Where another worker's cancellation or deletion is written first, the stream never says that it was completed."""
    another = (await world.another()).client()
    begun, id, go = await begin_stream(world)
    talk = await another.conversations.create()
    made, go_too = await begin(world, world.client(), conversation=talk.id)
    for one in (id, made.id):
        await getattr(another.responses, act)(one)
    go.set()
    go_too.set()
    await until(lambda: world.ended == ["cancelled", "cancelled"])
    told = (await begun.reply()).text
    assert "response.completed" not in told
    assert (await another.conversations.items.list(talk.id)).data == []
    assert ("response.failed" in told and '"status":"cancelled"' in told) == (act == "cancel"), told
    if act == "cancel":
        assert [(await another.responses.retrieve(one)).status for one in (id, made.id)] == ["cancelled"] * 2


async def test_only_a_response_in_the_background_is_cancelled(world: World) -> None:
    """One that has ended stays as it is; another kind is refused."""
    client = world.client()
    made = await client.responses.create(model="mock", input="hello", background=True)
    done = await ended(client, made.id)
    assert (await client.responses.cancel(made.id)).to_dict() == done.to_dict()
    plain = await client.responses.create(model="mock", input="hello")
    with pytest.raises(openai.BadRequestError, match="background"):
        await client.responses.cancel(plain.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.cancel("resp_" + "0" * 32)


async def test_a_worker_that_is_gone_leaves_a_failure(world: World) -> None:
    """After its lease the response has failed for good, with words that say so, and its late answer is dropped."""
    client, another = world.client(), (await world.another()).client()
    _, id, go = await begin_stream(world)
    assert (await another.responses.retrieve(id)).status in ("queued", "in_progress")
    world._others[0].clock.passes(16)
    found = await another.responses.retrieve(id)
    assert (found.status, found.error.code) == ("failed", "server_error")  # type: ignore[union-attr]
    assert "has ended before it was complete" in found.error.message  # type: ignore[union-attr]
    last = [one async for one in await another.responses.retrieve(id, stream=True)][-1]
    assert (last.type, last.response.error) == ("response.failed", found.error)  # type: ignore[union-attr]
    go.set()
    await until(lambda: world.ended == ["cancelled"])
    assert (await client.responses.retrieve(id)).status == "failed"
    assert len(world.backends["plain"].calls) == 1


async def test_what_fails_before_it_begins_is_refused_and_later_has_failed(world: World) -> None:
    """An unknown model and a spent rate limit are the request's errors; a deployment's failure is the response's."""
    team = await world.team(requests_per_min=1)
    client = world.client(team.key)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        await client.responses.create(model="none", input="x", background=True)
    with pytest.raises(openai.BadRequestError, match="not stored"):
        await client.responses.create(model="mock", input="x", background=True, store=False)
    world.backends["plain"].plays(unavailable())
    made = await client.responses.create(model="mock", input="x", background=True)
    with pytest.raises(openai.RateLimitError):
        await client.responses.create(model="mock", input="y", background=True)
    world.clock.passes(61)
    failed = await ended(client, made.id)
    assert (failed.status, failed.error.code) == ("failed", "server_error")
    assert failed.error.message
    assert len(await world.stored_sizes()) == 1
    await until(lambda: world.ended == ["failed"])


async def test_a_hit_and_a_conversation_in_the_background(world: World) -> None:
    """An answer from the cache completes it; its items join the conversation when it does."""
    client = world.client()
    await client.responses.create(model="mock", input="hello")
    hit = await ended(client, (await client.responses.create(model="mock", input="hello", background=True)).id)
    assert hit.output_text == "answer of plain"
    events = await client.responses.create(model="mock", input="hello", background=True, stream=True)
    assert [event async for event in events][-1].type == "response.completed"  # type: ignore[union-attr]
    assert len(world.backends["plain"].calls) == 1
    talk = await client.conversations.create()
    made, go = await begin(world, client, conversation=talk.id)
    assert (await client.conversations.items.list(talk.id)).data == []
    go.set()
    await ended(client, made.id)
    assert len((await client.conversations.items.list(talk.id)).data) == 2


async def streams_bytes(world: World) -> int:
    """What streams of responses in the background take of Redis, as Redis says it."""
    keys = [key async for key in world.redis.scan_iter("*background:*")]
    return sum([int(await world.redis.memory_usage(key, samples=0) or 0) for key in keys])


async def test_a_hits_stream_is_kept_packed(world: World) -> None:
    """A stream of a cached answer takes less than three times its text of Redis, and has every event, resumed anywhere, at any
    worker."""
    text = [f"word{number} " for number in range(2_000)]
    world.backends["plain"].plays(*text, Finish(), Tokens())
    client, another = world.client(), (await world.another()).client()
    await client.responses.create(model="mock", input="hello")
    before = await streams_bytes(world)
    ids = []
    for _ in range(5):
        reply = await world.ask(path="/v1/responses", model="mock", input="hello", background=True, stream=True)
        assert reply.body.count(b"response.output_text.delta") > 1
        ids.append(re.search(r"resp_[0-9a-f]{32}", reply.text))
    assert len(world.backends["plain"].calls) == 1
    assert await streams_bytes(world) - before < 3 * 5 * len("".join(text))
    assert ids[-1] is not None
    whole = [event.to_dict() async for event in await another.responses.retrieve(ids[-1][0], stream=True)]
    assert [one["sequence_number"] for one in whole] == list(range(len(whole)))
    assert "".join(one["delta"] for one in whole if one["type"] == "response.output_text.delta") == "".join(text)
    for after in (0, 1, 2, len(whole) // 2, len(whole) - 2):
        rest = await another.responses.retrieve(ids[-1][0], stream=True, starting_after=after)
        assert [event.to_dict() async for event in rest] == whole[after + 1 :]


async def test_a_teams_streams_have_a_bound(open_a_world: OpenWorld) -> None:
    """Over all workers: what has no room breaks a stream by name and is refused at the next, the answers are whole, another team
    and a request without `stream` are served, and there is room again when the streams are over."""
    world = await open_a_world(responses={"team_stream_bytes_max": 20_000})
    worlds = [world, await world.another()]
    world.backends["plain"].plays(*["word "] * 200, Finish(), Tokens())
    request = {"path": "/v1/responses", "model": "mock", "background": True, "stream": True}
    broken = await world.ask(**request, input="a long one")
    assert b"stream_broken" in broken.body
    refused = [await worlds[number % 2].ask(**request, input=f"{number}" + "x" * 9_000) for number in range(8)]
    assert {(one.status, one.error["code"]) for one in refused if one.status != 200} == {(503, "busy")}
    assert any(one.status == 503 for one in refused)
    assert await streams_bytes(world) < 60_000
    id = re.search(r"resp_[0-9a-f]{32}", broken.text)
    assert id is not None
    assert (await ended(world.client(), id[0])).output_text == "word " * 200
    assert (await world.ask(**request, key=(await world.team()).key, input="hello")).status == 200
    assert (await world.client().responses.create(model="mock", input="x", background=True)).status == "queued"

    async for key in world.redis.scan_iter("*background:*"):  # as if all of them were over
        if await world.redis.type(key) == b"zset":
            await world.redis.zadd(key, dict.fromkeys(await world.redis.zrange(key, 0, -1), 0), xx=True)
    assert (await world.ask(**request, input="again")).status == 200


async def test_no_more_are_in_the_background_than_may_be(world: World) -> None:
    """Of 280 that one team begins at once at two workers 250 are accepted."""
    worlds, go = [world, await world.another()], asyncio.Event()
    for one in worlds:
        one.backends["plain"].plays(go, "answer", Finish(), Tokens())
    clients = [
        worlds[number % 2].begin(path="/v1/responses", model="mock", input=f"{number}", background=True)
        for number in range(280)
    ]
    statuses = [(await one.reply()).status for one in clients]
    go.set()
    assert sorted(statuses) == [200] * 250 + [503] * 30
