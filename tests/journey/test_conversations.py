"""Conversations, with the official client: kept item by item, continued by responses, and never another team's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from gateway.accounts.holdings import ROW_BYTES
from gateway.backends.base import BackendRejected
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, until


def said(text: str, role: str = "user") -> Any:
    return {"type": "message", "role": role, "content": text}


def sent(world: World) -> list[tuple[str, Any]]:
    """What the deployment was sent last."""
    return [(one["role"], one["content"]) for one in world.backends["plain"].calls[-1].body["messages"]]


async def test_responses_go_on_in_a_conversation(world: World) -> None:
    """Whole, streamed and unstored, at two workers: each reads all items before, and adds its input and output."""
    client, another = world.client(), (await world.another()).client()
    made = await client.conversations.create(items=[said("Be brief.", "system")], metadata={"topic": "letters"})
    assert (made.object, made.metadata) == ("conversation", {"topic": "letters"})
    first = await client.responses.create(model="mock", input="I am Ada.", conversation=made.id)
    assert first.conversation is not None
    assert (first.conversation.id, first.previous_response_id) == (made.id, None)
    stream = await another.responses.create(model="mock", input="Who?", conversation={"id": made.id}, stream=True)
    assert [event async for event in stream][-1].response.conversation.id == made.id  # type: ignore[union-attr]
    unstored = await client.responses.create(model="mock", input="So?", conversation=made.id, store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(unstored.id)
    await client.responses.delete(first.id)
    await client.responses.create(model="mock", conversation=made.id)
    answer = ("assistant", "answer of plain")
    assert sent(world) == [
        ("system", "Be brief."), ("user", "I am Ada."), answer, ("user", "Who?"), answer, ("user", "So?"), answer
    ]  # fmt: skip
    assert (await client.responses.input_tokens.count(model="mock", conversation=made.id)).input_tokens > 20


async def test_items_are_listed_added_and_deleted(world: World) -> None:
    """In pages of either order, under ids that references know; a deleted item is read no more."""
    client = world.client()
    made = await client.conversations.create()
    added = await client.conversations.items.create(made.id, items=[said(f"part {number}") for number in range(5)])
    assert [one.status for one in added.data] == ["completed"] * 5  # type: ignore[union-attr]
    listed = [one async for one in client.conversations.items.list(made.id, limit=2, order="asc")]
    assert listed == added.data
    assert [one.id async for one in client.conversations.items.list(made.id, limit=3)] == [
        one.id for one in reversed(listed)
    ]
    third = str(listed[2].id)
    assert await client.conversations.items.retrieve(third, conversation_id=made.id) == listed[2]
    reference: Any = [{"type": "item_reference", "id": third}, said("and?")]
    await client.responses.create(model="mock", input=reference)
    assert sent(world) == [("user", "part 2"), ("user", "and?")]
    gone = await client.conversations.items.delete(third, conversation_id=made.id)
    assert gone.id == made.id
    with pytest.raises(openai.NotFoundError, match=f"Item with id '{third}' not found in conversation"):
        await client.conversations.items.retrieve(third, conversation_id=made.id)
    await client.responses.create(model="mock", input="all?", conversation=made.id)
    assert ("user", "part 2") not in sent(world)
    changed = await client.conversations.update(made.id, metadata={"a": "b"})
    assert (changed.metadata, changed.created_at) == ({"a": "b"}, made.created_at)
    assert (await client.conversations.retrieve(made.id)) == changed
    deleted = await client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{made.id}' not found"):
        await client.responses.create(model="mock", input="more", conversation=made.id)


async def test_calls_and_their_results_stay_together(world: World) -> None:
    """A call in one turn and its result in the next; a result without its call is refused by name."""
    client = world.client()
    call: Any = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}
    made = await client.conversations.create(items=[said("Go"), call])
    with pytest.raises(openai.BadRequestError, match="No tool output found for function call c1"):
        await client.responses.create(model="mock", input="more", conversation=made.id)
    result: Any = [{"type": "function_call_output", "call_id": "c1", "output": "42"}]
    await client.responses.create(model="mock", input=result, conversation=made.id)
    assert [role for role, _ in sent(world)] == ["user", "assistant", "tool"]


async def test_a_shells_outputs_have_ids_of_their_own(world: World) -> None:
    """Also two with one id, or with one that no column takes: each is paged, read and deleted by itself."""
    client = world.client()
    odd = "a\0" + "b" * 9_000
    calls: Any = [
        {"type": "local_shell_call", "call_id": id, "action": {"type": "exec", "command": ["ls"]}} for id in ("c1", odd)
    ]
    outputs: Any = [{"type": "local_shell_call_output", "id": id, "output": "out"} for id in ("c1", odd)]
    made = await client.conversations.create(items=[said("Go"), *calls, *outputs])
    await client.responses.create(model="mock", conversation=made.id)
    told = sent(world)
    assert [role for role, _ in told] == ["user", "assistant", "tool", "tool"]
    await client.conversations.items.create(made.id, items=[outputs[0]])
    listed = [str(one.id) async for one in client.conversations.items.list(made.id, limit=1, order="asc")]
    assert len(set(listed)) == 7
    assert not {"c1", odd} & set(listed)
    room = (await world.room())[1]
    item = await client.conversations.items.retrieve(listed[-1], conversation_id=made.id)
    await client.conversations.items.delete(listed[-1], conversation_id=made.id)
    assert room - (await world.room())[1] == ROW_BYTES + len(json.dumps(item.to_dict(), separators=(",", ":")))
    await client.responses.create(model="mock", conversation=made.id, input="more")
    assert sent(world)[: len(told)] == told


async def test_metadata_changes_when_it_is_sent(world: World) -> None:
    """A change without it is refused, and null empties it; an empty id is no conversation."""
    client = world.client()
    made = await client.conversations.create(metadata={"a": "b"})
    for body in ({}, {"items": [said("x")]}, {"metadata": {}, "more": 1}):
        with pytest.raises(openai.BadRequestError):
            await client.post(f"/conversations/{made.id}", body=body, cast_to=object)
    assert (await client.conversations.retrieve(made.id)).metadata == {"a": "b"}
    assert (await client.conversations.update(made.id, metadata=None)).metadata == {}
    none: Any
    for none in ("", {"id": ""}):
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="mock", input="x", conversation=none)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [said("x")] * 21}, "items"),
        ({"items": [], "more": 1}, "more"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "items[0].type"),
        ({"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ({"items": [said("x"), {"role": "user", "content": [{"type": "odd"}]}]}, "items[1][0]"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ],
)
async def test_odd_conversations_are_refused_by_name(world: World, body: Any, param: str) -> None:
    """Nothing is kept of them."""
    refused = await world.ask(path="/v1/conversations", raw=json.dumps(body).encode())
    assert (refused.status, refused.error["param"]) == (400, param)


async def test_one_request_at_a_time_writes_a_conversation(world: World) -> None:
    """Others get a 409 at each worker until it ends, however it ends, or until the lease of a killed worker is over."""
    other = await world.another()
    client, another = world.client(), other.client().with_options(max_retries=0)
    made = await client.conversations.create(items=[said("first")])
    item = str((await client.conversations.items.list(made.id)).data[0].id)
    asked: Any = {"model": "mock", "conversation": made.id}

    async def is_locked() -> bool:
        """At both workers, for all that writes the items."""
        codes = set[Any]()
        for ask in (
            another.responses.create(**asked, input="x"),
            client.with_options(max_retries=0).conversations.items.create(made.id, items=[said("x")]),
            another.conversations.items.delete(item, conversation_id=made.id),
        ):
            try:
                await ask
            except openai.ConflictError as refused:
                codes.add(refused.code)
        return codes == {"conversation_locked"}

    def pass_s(seconds: float) -> None:
        world.clock.passes(seconds)
        other.clock.passes(seconds)

    for how in ({}, {"stream": True}, {"background": True}):
        go = asyncio.Event()
        world.backends["plain"].plays_once("slow ", go, "answer", Finish(), Tokens())
        running = world.begin(path="/v1/responses", input=json.dumps(how), **asked, **how)
        await until(lambda: len(world.backends["plain"].calls) > 0)
        world.backends["plain"].calls.clear()
        pass_s(14)
        await world.background.renew()
        pass_s(14)
        assert await is_locked()
        await another.conversations.update(made.id, metadata={"a": "b"})
        await another.responses.input_tokens.count(model="mock", conversation=made.id)
        go.set()
        await running.reply()
        await world.quiet()
        await another.conversations.items.create(made.id, items=[said("x")])
    world.backends["plain"].plays_once(BackendRejected("no"))
    assert (await world.ask(path="/v1/responses", input="refused", **asked)).status == 400
    go = asyncio.Event()
    world.backends["plain"].plays_once("slow ", go)
    leaving = world.begin(path="/v1/responses", input="leaves", stream=True, **asked)
    await leaving.sees("slow")
    leaving.leave()
    await world.quiet()
    world.backends["plain"].plays_once("slow ", go, Finish(), Tokens())
    killed = world.begin(path="/v1/responses", input="killed", stream=True, **asked)
    await killed.sees("slow")
    pass_s(14)
    assert await is_locked()
    pass_s(2)
    await another.responses.create(**asked, input="next")
    go.set()
    await killed.reply()


async def test_one_memory_at_a_time(world: World) -> None:
    """A request that names a response and a conversation is refused."""
    client = world.client()
    first = await client.responses.create(model="mock", input="hello")
    made = await client.conversations.create()
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="mock", input="x", previous_response_id=first.id, conversation=made.id)
    assert refused.value.code == "mutually_exclusive_parameters"


async def test_conversations_go_with_their_time_their_room_and_their_team(open_a_world: OpenWorld) -> None:
    """The time begins anew with each change; the oldest whole conversation leaves at the write that needs its room, and what
    is larger than a team's room is refused."""
    world = await open_a_world(responses={"retention_s": 60, "team_bytes_max": 3_800})
    client = world.client()
    first, second = [await client.conversations.create(items=[said("x" * 900)]) for _ in range(2)]
    world.clock.passes(40)
    await client.conversations.items.create(first.id, items=[said("y")])
    response = await client.responses.create(model="mock", input="short")
    assert (await client.conversations.retrieve(second.id)).id == second.id
    await client.conversations.items.create(first.id, items=[said("z" * 700)])
    for more in (world.client().conversations.items.create(first.id, items=[said("z" * 4_000)]), world.client(
        ).conversations.create(metadata={f"{number}": "m" * 500 for number in range(8)})):  # fmt: skip
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await more
        assert refused.value.code == "storage_quota_exceeded"
    assert (await client.conversations.retrieve(first.id)).id == first.id
    assert (await client.responses.retrieve(response.id)).id == response.id
    with pytest.raises(openai.NotFoundError):
        await client.conversations.retrieve(second.id)
    world.clock.passes(40)
    assert len((await client.conversations.items.list(first.id)).data) == 3
    world.clock.passes(21)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.list(first.id)
    await world.stored_responses.purge()
    assert await world.room() == (0, 0)
    team = await world.team()
    await world.client(team.key).conversations.create(items=[said("hello")])
    assert await world.conversation_items() == 1
    await world.delete_team(team)
    assert await world.conversation_items() == 0


@pytest.mark.parametrize("off", ["setting", "team"])
async def test_no_conversation_is_kept_where_storing_is_off(open_a_world: OpenWorld, off: str) -> None:
    """By the setting or by the team: a refusal that says so, and no row."""
    world = await open_a_world(**({"responses": {"store": False}} if off == "setting" else {}))
    key = (await world.team(is_store_enabled=off != "team")).key
    for ask in (world.client(key).conversations.create(), world.client(key).responses.create(
        model="mock", input="x", conversation="conv_" + "0" * 32
    )):  # fmt: skip
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await ask
        assert refused.value.code == "storing_is_off"


async def test_a_long_conversation_is_refused_by_name(open_a_world: OpenWorld) -> None:
    """Beyond a request's size; shorter it is read whole."""
    world = await open_a_world(body_bytes_max=20_000)
    client = world.client()
    made = await client.conversations.create(items=[said("x" * 9_000)])
    await client.responses.create(model="mock", input="and?", conversation=made.id)
    await client.conversations.items.create(made.id, items=[said("y" * 12_000)])
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="mock", input="and?", conversation=made.id)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "conversation")
