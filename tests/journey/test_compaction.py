"""Conversations that a summary replaces, with the official client, at deployments of both kinds."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from tests.journey.conftest import OpenWorld
from tests.journey.responses_server import REASONING, TEXT, response, run_responses_server
from tests.world import Finish, Tokens, World, deployment

_SAID: list[Any] = [
    {"role": "user", "content": "Fix the bug in a.py."},
    {"type": "function_call", "call_id": "call_1", "name": "run", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "2 failed"},
    {"role": "assistant", "content": "I changed line 3."},
    {"role": "user", "content": "And b.py?"},
]
_TOOLS: list[Any] = [{"type": "function", "name": "run", "parameters": {"type": "object"}, "strict": False}]


async def test_a_summary_stands_for_a_conversation(world: World) -> None:
    """The user's messages come back with one opaque item, and the next request has the summary as a message."""
    world.backends["plain"].plays("line 3 of a.py was wrong", Finish(), Tokens(100, 7))
    client = world.client()
    short = await client.responses.compact(model="mock", input=_SAID, extra_body={"tools": _TOOLS})
    sent = world.backends["plain"].calls[-1].body
    assert [one["role"] for one in sent["messages"]] == ["user", "assistant", "tool", "assistant", "user", "user"]
    assert (sent["tool_choice"], "tools" in sent) == ("none", True)
    assert (short.object, short.usage.input_tokens, short.usage.output_tokens) == ("response.compaction", 100, 7)
    *users, item = short.output
    assert [one.content[0].text for one in users] == ["Fix the bug in a.py.", "And b.py?"]  # type: ignore[union-attr]
    assert item.type == "compaction"
    assert "line 3" not in item.encrypted_content

    more: Any = [*(one.to_dict() for one in short.output), {"role": "user", "content": "Go on."}]
    made = await client.responses.create(model="mock", input=more)
    said = [(one["role"], one["content"]) for one in world.backends["plain"].calls[-1].body["messages"]]
    assert [said[0], said[1], said[3]] == [("user", "Fix the bug in a.py."), ("user", "And b.py?"), ("user", "Go on.")]
    assert said[2][0] == "user"
    assert said[2][1].endswith("\n\nline 3 of a.py was wrong")
    await client.responses.create(model="mock", input="And now?", previous_response_id=made.id)
    assert "line 3" in json.dumps(world.backends["plain"].calls[-1].body["messages"])
    again = await client.responses.compact(model="mock", previous_response_id=made.id)
    assert [one.type for one in again.output] == ["message", "message", "message", "compaction"]


async def test_a_compaction_is_cached_and_never_by_meaning(world: World) -> None:
    """An equal conversation has the same summary; another one asks a deployment."""
    body = {"model": "mock", "input": "Remember 7."}
    first, second = [await world.ask(path="/v1/responses/compact", raw=json.dumps(body).encode()) for _ in range(2)]
    assert (first.status, second.headers["x-sameway-cache"]) == (200, "exact")
    assert len(world.backends["plain"].calls) == 1


@pytest.mark.parametrize("steps", [("half a summ", Finish("length"), Tokens()), (" \n", Finish(), Tokens())])
async def test_half_a_summary_is_an_error(world: World, steps: Any) -> None:
    """What it lacks would be lost without a sign."""
    world.backends["plain"].plays(*steps)
    reply = await world.ask(path="/v1/responses/compact", raw=b'{"model": "mock", "input": "hello"}')
    assert (reply.status, reply.json["error"]["code"]) == (502, "upstream_broken")


async def test_what_a_compaction_is_not_is_refused(world: World) -> None:
    """By name: a stream, work in the background, a conversation; nothing to compact; an item that was changed."""
    client = world.client()
    for field in ("stream", "background"):
        with pytest.raises(openai.BadRequestError, match=f"`{field}` is not supported here"):
            await client.responses.compact(model="mock", input="hello", extra_body={field: True})
    with pytest.raises(openai.BadRequestError, match="Missing required field: input"):
        await client.responses.compact(model="mock")
    for content, words in (("sameway1.!", "not as it was given out"), ("gAAAA", "Items of type `compaction`")):
        changed: Any = [{"type": "compaction", "encrypted_content": content}]
        with pytest.raises(openai.BadRequestError, match=words):
            await client.responses.create(model="mock", input=changed)


async def test_a_provider_with_this_api_writes_the_summary_too(open_a_world: OpenWorld) -> None:
    """Of reasoning that only it can read; the summary then goes to any deployment."""
    with run_responses_server() as server:
        world = await open_a_world(
            models={"mock": {"deployments": [deployment("able", capabilities=["responses"])]}},
        )
        await world.connects("able", server.url)
        server.answer = response(REASONING, TEXT)
        thought: Any = {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"}
        short = await world.client().responses.compact(model="mock", input=[thought, *_SAID])
        assert server.seen[-1][1]["input"][0]["encrypted_content"] == "gAAAA"
        assert [one.type for one in short.output] == ["message", "message", "compaction"]
