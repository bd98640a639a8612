"""Responses that are kept, with the official client: continued, read, listed, deleted, and never another team's."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from sqlalchemy.exc import DBAPIError, OperationalError, ProgrammingError

from tests.journey.conftest import OpenWorld
from tests.world import KEY, Finish, Tokens, World, until

_fresh = itertools.count()
_NEVER = f"resp_{'0' * 32}"


def question() -> str:
    return f"What is the letter {next(_fresh)}?"


def messages(world: World, backend: str = "plain") -> list[tuple[str, Any]]:
    """What the deployment was sent last, as roles and contents."""
    return [(one["role"], one["content"]) for one in world.backends[backend].calls[-1].body["messages"]]


async def test_a_conversation_goes_on_from_the_last_response(world: World) -> None:
    """Whole or streamed, at once and at another worker: the model reads all of it; instructions are not carried over."""
    client, another = world.client(), (await world.another()).client()
    first = await client.responses.create(model="mock", input="I am Ada.", instructions="Be brief.")
    assert (first.store, first.previous_response_id) == (True, None)  # type: ignore[attr-defined]
    stream = await another.responses.create(model="mock", input="Who?", previous_response_id=first.id, stream=True)
    second = [event async for event in stream][-1].response  # type: ignore[union-attr]
    third = await client.responses.create(model="mock", input="Who am I?", previous_response_id=second.id)
    assert third.previous_response_id == second.id
    said = "answer of plain"
    assert messages(world) == [
        ("user", "I am Ada."), ("assistant", said), ("user", "Who?"), ("assistant", said), ("user", "Who am I?"),
    ]  # fmt: skip


async def test_a_continued_and_a_stateless_request_share_answers(world: World) -> None:
    """The cache's key is that of the whole history; an answer from the cache is kept under an id of its own."""
    client = world.client()
    first = await client.responses.create(model="mock", input="hello")
    more: Any = [{"role": "user", "content": "hello"}, *(item.to_dict() for item in first.output)]
    more.append({"role": "user", "content": "and now?"})
    await client.responses.create(model="mock", input=more, store=False)
    raw = await client.responses.with_raw_response.create(model="mock", input="and now?", previous_response_id=first.id)
    assert raw.headers["x-sameway-cache"] == "exact"
    streamed = await client.responses.create(model="mock", input="and now?", previous_response_id=first.id, stream=True)
    last = [event async for event in streamed][-1].response  # type: ignore[union-attr]
    ids = {first.id, raw.parse().id, last.id}
    assert len(ids) == 3
    for id in ids:
        assert (await client.responses.retrieve(id)).id == id


async def test_a_response_is_read_listed_and_deleted(world: World) -> None:
    """As it was sent; its input item by item, in pages; a deleted one is not found, nor what continues it continued."""
    client = world.client()
    parts: Any = [{"role": "user", "content": f"part {number}"} for number in range(5)]
    made = await client.responses.create(model="mock", input=parts, metadata={"a": "b"})
    assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
    listed = [item async for item in client.responses.input_items.list(made.id, limit=2, order="asc")]
    assert [item.content[0].text for item in listed] == [f"part {number}" for number in range(5)]  # type: ignore[union-attr]
    assert len({item.id for item in listed}) == 5
    newest = (await client.responses.input_items.list(made.id, limit=1)).data
    assert newest == listed[-1:]
    more = await client.responses.create(model="mock", input="more", previous_response_id=made.id)
    await client.responses.delete(made.id)
    for read in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=f"Response with id '{made.id}' not found."):
            await read(made.id)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="mock", input="and?", previous_response_id=more.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")
    assert f"Previous response with id '{made.id}' not found." in refused.value.message


async def test_references_stand_for_items_as_the_vercel_sdk_sends_them(world: World) -> None:
    """Messages and calls by their ids, without `store` or `previous_response_id`; an unknown id is refused by name."""
    client = world.client()
    first = await client.responses.create(model="mock", input=[{"role": "user", "content": "hello"}])
    (said,) = first.output
    user: Any = {"role": "user", "content": [{"type": "input_text", "text": "hello"}]}
    again: Any = [user, {"type": "item_reference", "id": said.id}, {"role": "user", "content": "and?"}]
    second = await client.responses.create(model="mock", input=again)
    assert messages(world) == [("user", "hello"), ("assistant", "answer of plain"), ("user", "and?")]
    bare: Any = [user, {"id": second.output[0].id}]
    await client.responses.create(model="mock", input=bare)
    assert messages(world) == [("user", "hello"), ("assistant", "answer of plain")]
    listed = (await client.responses.input_items.list(first.id)).data
    asked: Any = [{"type": "item_reference", "id": listed[0].id}, {"role": "user", "content": "anew"}]
    await client.responses.create(model="mock", input=asked)
    assert messages(world) == [("user", "hello"), ("user", "anew")]
    for id in ("msg_1", said.id.replace("_0", "_7"), "msg_" + "f" * 32 + "_0", "msg_\0"):
        with pytest.raises(openai.NotFoundError, match="Item with id") as refused:
            await client.responses.create(model="mock", input=[{"type": "item_reference", "id": id}])
        assert refused.value.param == "input"


@pytest.mark.parametrize("off", ["request", "setting", "team"])
async def test_nothing_is_kept_where_it_is_not_wanted(open_a_world: OpenWorld, off: str) -> None:
    """By the request, by the setting, or by the team: the answer says so, and no row is written."""
    world = await open_a_world(**({"responses": {"store": False}} if off == "setting" else {}))
    key = (await world.team(is_store_enabled=off != "team")).key
    client = world.client(key)
    made = await client.responses.create(model="mock", input="hello", **({"store": False} if off == "request" else {}))
    assert made.store is False  # type: ignore[attr-defined]
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(made.id)
    assert world.stored == []


async def _refusals(client: AsyncOpenAI, id: str, item_id: str) -> list[tuple[int, str]]:
    """What each way to name a response answers: status and body."""
    reference: Any = [{"type": "item_reference", "id": item_id}]
    ways = [
        client.responses.retrieve(id),
        client.responses.delete(id),
        client.responses.input_items.list(id),
        client.responses.create(model="mock", input="x", previous_response_id=id),
        client.responses.create(model="mock", input=reference),
    ]
    found = []
    for way in ways:
        with pytest.raises(openai.APIStatusError) as refused:
            await way
        found.append((refused.value.status_code, refused.value.response.text))
    return found


async def test_a_team_never_finds_anothers(world: World) -> None:
    """On every route, through every field: the same bytes as for an id that never was; the owner loses nothing."""
    owner, other = world.client(), world.client((await world.team()).key)
    made = await owner.responses.create(model="mock", input="a secret")
    item_id = made.output[0].id
    input_id = (await owner.responses.input_items.list(made.id)).data[0].id
    digits = made.id.removeprefix("resp_")
    for named in (item_id, input_id):
        never = await _refusals(other, _NEVER, named.replace(digits, "0" * 32))
        theirs = await _refusals(other, made.id, named)
        assert theirs == [(status, text.replace("0" * 32, digits)) for status, text in never]
    assert (await owner.responses.retrieve(made.id)).id == made.id
    assert "a secret" not in json.dumps(world.backends["plain"].calls[-1].body).replace("a secret", "", 1)


@pytest.mark.parametrize(
    "id", ["", "resp_1", "resp_\0" + "0" * 31, "x" * 5_000, "resp_" + "Z" * 32, "../conversations"]
)
async def test_odd_ids_are_not_found(world: World, id: str) -> None:
    """Whatever they contain: a refusal, never a failure."""
    reply = await world.ask(path="/v1/responses", model="mock", input="x", previous_response_id=id)
    assert reply.status == (200 if id == "" else 400)
    if id:
        assert reply.error["code"] == "previous_response_not_found"


async def test_kept_responses_go_with_their_time_their_room_and_their_team(open_a_world: OpenWorld) -> None:
    """After the retention a response is as never made; the oldest leave where a team has too much; a deleted team's all."""
    world = await open_a_world(responses={"retention_s": 60, "team_bytes_max": 2_000})
    client = world.client()
    first, *_, last = [await client.responses.create(model="mock", input=question()) for _ in range(5)]
    assert sum(await world.stored_sizes()) <= 2_000
    assert (await client.responses.retrieve(last.id)).id == last.id
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(first.id)
    world.clock.passes(61)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(last.id)
    await world.stored_responses.purge()
    assert await world.stored_sizes() == []
    team = await world.team()
    await world.client(team.key).responses.create(model="mock", input="hello")
    assert len(await world.stored_sizes()) == 1
    await world.delete_team(team)
    assert await world.stored_sizes() == []


async def test_an_answer_for_a_team_that_is_gone_loses_only_its_own_row(world: World) -> None:
    """Another team's answers, written at the same time, are kept."""
    team, go = await world.team(), asyncio.Event()
    world.backends["plain"].plays("slow ", go, "answer", Finish(), Tokens())
    asked = [world.client(key).responses.create(model="mock", input="hello") for key in (team.key, KEY)]
    tasks = [asyncio.ensure_future(one) for one in asked]
    await world.backends["plain"].called(2)
    await world.delete_team(team)
    go.set()
    _, kept = await asyncio.gather(*tasks)
    assert (await world.client().responses.retrieve(kept.id)).id == kept.id
    assert sorted(world.stored) in ([("lost", 1), ("stored", 0), ("stored", 1)], [("lost", 1), ("stored", 1)])


async def test_a_chain_of_a_thousand_turns_costs_what_its_texts_do(world: World) -> None:
    """One query a turn and a row that does not grow; a chain beyond a request's size is refused by name."""
    client, previous = world.client(), None
    for number in range(40):
        made = await client.responses.create(model="mock", input=f"turn {number}", previous_response_id=previous)
        previous = made.id
    assert len(messages(world)) == 2 * 39 + 1
    sizes = await world.stored_sizes()
    assert max(sizes) - min(sizes) < 60
    long = await world.chain_of(1_000, "x" * 100)
    await client.responses.create(model="mock", input="and?", previous_response_id=long)
    assert len(messages(world)) == 2 * 1_000 + 1
    endless = await world.chain_of(200, "x" * 100_000)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="mock", input="and?", previous_response_id=endless)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "previous_response_id")


async def test_references_load_no_more_than_a_request_may_have(open_a_world: OpenWorld) -> None:
    """Items of many long responses are refused by name; an answer's own input is not loaded for its output."""
    world = await open_a_world(body_bytes_max=20_000)
    client = world.client()
    made = [await client.responses.create(model="mock", input=f"{number}" + "x" * 9_000) for number in range(3)]
    said: Any = [{"type": "item_reference", "id": one.output[0].id} for one in made]
    assert (await client.responses.create(model="mock", input=said, store=False)).output_text
    inputs = [(await client.responses.input_items.list(one.id)).data[0].id for one in made]
    asked: Any = [{"type": "item_reference", "id": id} for id in inputs]
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model="mock", input=asked)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")


async def test_a_budget_counts_the_history(world: World) -> None:
    """A continued request holds what the same request without memory holds: its whole history is priced."""
    team = await world.team()
    await world.budget(team, 10**9)
    client, go = world.client(team.key), asyncio.Event()
    first = await client.responses.create(model="mock", input="x" * 2_000)
    whole: Any = [{"role": "user", "content": "x" * 2_000}, *(item.to_dict() for item in first.output)]
    held = []
    world.backends["plain"].plays(go, "answer", Finish(), Tokens())
    ways: list[dict[str, Any]] = [
        {"input": "y", "previous_response_id": first.id},
        {"input": [*whole, {"role": "user", "content": "z"}], "store": False},
    ]
    for number, way in enumerate(ways):
        task = asyncio.ensure_future(client.responses.create(model="mock", **way))
        await world.backends["plain"].called(number + 2)
        held.append((await world.money_of(team))[1])
        go.set()
        await task
        await world.quiet()
        go.clear()
    assert held[0] == held[1] > 2_000


async def test_input_tokens_count_all_that_is_read(world: World) -> None:
    """The history and references, as the same request without memory counts; nothing is generated or kept."""
    client = world.client()
    first = await client.responses.create(model="mock", input="x" * 2_000)
    whole: Any = [{"role": "user", "content": "x" * 2_000}, first.output[0].to_dict(), {"role": "user", "content": "y"}]
    named: Any = [whole[0], {"type": "item_reference", "id": first.output[0].id}, whole[2]]
    continued: dict[str, Any] = {"input": "y", "previous_response_id": first.id}
    ways: tuple[dict[str, Any], ...] = ({"input": whole}, {"input": named}, continued)
    counts = [await client.responses.input_tokens.count(model="mock", **way) for way in ways]
    assert {one.object for one in counts} == {"response.input_tokens"}
    assert len({one.input_tokens for one in counts}) == 1
    assert counts[0].input_tokens > 500
    assert len(world.backends["plain"].calls) == 1
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_tokens.count(model="none", input="x")
    other = world.client((await world.team()).key)
    with pytest.raises(openai.BadRequestError, match="not found"):
        await other.responses.input_tokens.count(model="mock", **continued)


async def test_a_commit_whose_answer_was_lost_counts(world: World) -> None:
    """The second try finds the response there, at once: it is stored once, and not called lost, as are its items in a
    conversation where it is not kept itself."""
    client = world.client()
    world.loses_an_acknowledgement("_insert")
    made = await client.responses.create(model="mock", input="hello")
    assert world.stored == [("stored", 1)]
    assert (await client.responses.retrieve(made.id)).output_text == made.output_text
    conversation = (await client.conversations.create()).id
    world.loses_an_acknowledgement("_insert")
    await client.responses.create(model="mock", input="more", conversation=conversation, store=False)
    assert world.stored[1:] == [("stored", 1)]
    assert len((await client.conversations.items.list(conversation)).data) == 2


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(OperationalError, 503, "database_unavailable"), (ProgrammingError, 500, "internal_error")],
)
async def test_a_database_that_fails_is_told_from_a_bug(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: type[DBAPIError], status: int, code: str
) -> None:
    """Clients are asked to try again where the database does not answer, not where it refuses a statement."""

    async def fail(*_: object) -> None:
        raise kind("SELECT", {}, Exception("out of order"))

    monkeypatch.setattr(world.stored_responses, "chain", fail)
    reply = await world.ask(path="/v1/responses", model="mock", input="x", previous_response_id=f"resp_{0:032x}")
    assert (reply.status, reply.error["code"]) == (status, code)


async def test_where_the_database_fails_the_answer_arrives(world: World) -> None:
    """The response is written later, without the client; what is lost is counted."""
    client = world.client()
    with world.database_fails():
        made = await client.responses.create(model="mock", input="hello")
        assert made.output_text == "answer of plain"
        assert world.stored == []
    await until(lambda: bool(world.stored))
    assert world.stored == [("stored", 1)]
    assert (await client.responses.retrieve(made.id)).id == made.id


async def test_what_is_named_often_counts_each_time(open_a_world: OpenWorld) -> None:
    """References, a history and tools that stand for more than a body may have are refused by name before they are sent, and
    leave no row; the same at the bound is answered."""
    world = await open_a_world(body_bytes_max=20_000)
    client = world.client()
    made = await client.responses.create(model="mock", input="x" * 4_000)
    (given,) = (await client.responses.input_items.list(made.id)).data
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 4_000}]}
    conversation = await client.conversations.create(items=[thought, {"role": "user", "content": "x" * 8_000}])  # type: ignore[list-item]
    thoughts = (await client.conversations.items.list(conversation.id, order="asc")).data[0].id
    rows, calls = len(await world.stored_sizes()), len(world.backends["plain"].calls)

    def named(id: str, times: int) -> Any:
        return [*([{"type": "item_reference", "id": id}] * times), {"role": "user", "content": "and?"}]

    refused: list[tuple[str, dict[str, Any]]] = [
        ("input", {"input": named(given.id, 5)}),
        ("input", {"input": named(given.id, 100)}),
        ("input", {"input": named(thoughts, 5)}),
        ("input", {"input": named(given.id, 3), "previous_response_id": made.id, "instructions": "x" * 6_000}),
        ("input", {"input": named(given.id, 3), "conversation": conversation.id}),
        ("tools", {"input": "x", "tools": [{"type": "local_shell"}] * 100}),
        ("tools[0].name", {"input": "x", "tools": [{"type": "namespace", "name": "n" * 5_000, "tools": [
            {"type": "function", "name": f"t{number}", "parameters": {}} for number in range(50)]}]}),
    ]  # fmt: skip
    for param, more in refused:
        for path in ("/v1/responses", "/v1/responses/input_tokens"):
            reply = await world.ask(path=path, model="mock", **more)
            assert (reply.status, reply.error["param"]) == (400, param), more
    assert (len(await world.stored_sizes()), len(world.backends["plain"].calls)) == (rows, calls)
    assert (await client.responses.create(model="mock", input=named(given.id, 4))).output_text
    assert len(kept := await world.stored_sizes()) == rows + 1
    assert max(kept) < 20_000
