"""What servers want back of an answer comes back in the next turn, on every surface and however the answer was read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.wire.messages import MessageFold
from gateway.wire.types import Chunk
from tests.world import Finish, Tokens, World

_CALL = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at":"Rome"}'}}
_SIGNED = {"extra_content": {"google": {"thought_signature": "c2ln"}}}
_DETAIL = {"type": "reasoning.text", "index": 0, "format": "anthropic-claude-v1"}
_ENCRYPTED = {"type": "reasoning.encrypted", "id": "call_1", "index": 0, "data": "opaque"}
_BLOCK = {"type": "thinking", "thinking": "Hm so.", "signature": "EqQB"}
# the deltas of an answer, and the fields of the assistant's message and of its call in the next turn
SERVERS: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "reasoning_content": (
        [{"reasoning_content": "Hm "}, {"reasoning_content": "so."}, {"tool_calls": [_CALL]}],
        {"reasoning_content": "Hm so."},
        {},
    ),
    "reasoning_content and a text": (
        [{"reasoning_content": "Hm so."}, {"content": "I look."}, {"tool_calls": [_CALL]}],
        {"reasoning_content": "Hm so.", "content": "I look."},
        {},
    ),
    "a signature in the call": ([{"content": "I look."}, {"tool_calls": [{**_CALL, **_SIGNED}]}], {}, _SIGNED),
    "a signature in the second of two": (
        [{"tool_calls": [{**_CALL, "id": "call_0"}]}, {"tool_calls": [{**_CALL, "index": 1, **_SIGNED}]}],
        {},
        _SIGNED,
    ),
    "a signature after the call": ([{"tool_calls": [_CALL]}, {"extra_content": {"a": 1}}], {"extra_content": {"a": 1}}, {}),
    "reasoning_details": (
        [
            {"reasoning": "Hm ", "reasoning_details": [{**_DETAIL, "text": "Hm "}]},
            {"reasoning": "so.", "reasoning_details": [{**_DETAIL, "text": "so."}]},
            {"reasoning_details": [{**_DETAIL, "signature": "c2ln"}]},
            {"tool_calls": [_CALL]},
        ],
        {"reasoning": "Hm so.", "reasoning_details": [{**_DETAIL, "text": "Hm so.", "signature": "c2ln"}]},
        {},
    ),
    "encrypted details": (
        [{"tool_calls": [_CALL], "reasoning_details": [_ENCRYPTED]}],
        {"reasoning_details": [_ENCRYPTED]},
        {},
    ),
    "thinking_blocks": (
        [{"reasoning_content": "Hm so."}, {"thinking_blocks": [_BLOCK]}, {"tool_calls": [_CALL]}],
        {"reasoning_content": "Hm so.", "thinking_blocks": [_BLOCK]},
        {},
    ),
}  # fmt: skip
_TOOL = {"name": "look", "parameters": {"type": "object"}}
_ASKS = {"role": "user", "content": "Which way?"}


@pytest.fixture(params=list(SERVERS))
def server(request: pytest.FixtureRequest, world: World) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the next turn must have, of a deployment that plays the answer."""
    deltas, fields, of_call = SERVERS[request.param]
    chunks = [{"id": "c", "choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in deltas]
    steps = [Chunk(json.dumps(one).encode(), has_content=True) for one in chunks]
    world.backends["plain"].plays(*steps, Finish("tool_calls"), Tokens())
    return fields, of_call


def check(world: World, server: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """The last request has the answer's fields in its assistant's message."""
    fields, of_call = server
    (said,) = [one for one in world.backends["plain"].calls[-1].body["messages"] if one["role"] == "assistant"]
    call = {name: value for name, value in _CALL.items() if name != "index"} | of_call
    assert said.pop("tool_calls")[-1] == call
    said["content"] = said.get("content") or None
    assert said == {"role": "assistant", "content": None} | ({"content": "I look."} if said["content"] else {}) | fields


async def _message(world: World, *, is_stream: bool, **body: Any) -> list[dict[str, Any]]:
    tools = [{"name": "look", "input_schema": {"type": "object"}}]
    asked = {"max_tokens": 99, "tools": tools, "stream": is_stream, **body}
    reply = await world.ask(None, path="/v1/messages", **asked)
    assert reply.status == 200, reply.text
    if not is_stream:
        return list(reply.json["content"])
    message = MessageFold()
    for line in reply.text.split("\n"):
        if line.startswith("data: "):
            message.add(json.loads(line[6:]))
    return list(message.message()["content"])


@pytest.mark.parametrize("ways", [(False,), (True,), (False, True), (True, False)], ids=str)
async def test_of_messages(world: World, server: tuple[Any, Any], ways: tuple[bool, ...]) -> None:
    """In the blocks of the assistant, which a client sends back unread: whole, streamed and from the cache."""
    for is_stream in ways:
        blocks = await _message(world, is_stream=is_stream, messages=[_ASKS])
    assert len(world.backends["plain"].calls) == 1
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [{"type": "tool_result", "tool_use_id": one, "content": "sun"} for one in calls]
    dialogue = [_ASKS, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    await _message(world, is_stream=False, messages=dialogue)
    check(world, server)


async def _response(world: World, *, is_stream: bool, **body: Any) -> dict[str, Any]:
    tools = [{"type": "function", **_TOOL}]
    reply = await world.ask(None, path="/v1/responses", tools=tools, stream=is_stream, **body)
    assert reply.status == 200, reply.text
    if not is_stream:
        return dict(reply.json)
    return dict(json.loads(reply.text.rstrip().split("\n")[-1].removeprefix("data: "))["response"])


@pytest.mark.parametrize("ways", [(False,), (True,), (False, True), (True, False)], ids=str)
@pytest.mark.parametrize("link", ["items", "previous_response_id", "conversation"])
async def test_of_responses(world: World, server: tuple[Any, Any], ways: tuple[bool, ...], link: str) -> None:
    """In the items of the output, sent back by the client or kept here."""
    linked: dict[str, Any] = {}
    for is_stream in ways:
        if link == "conversation":
            linked = {"conversation": (await world.client().conversations.create()).id}
        response = await _response(world, is_stream=is_stream, input=[_ASKS], **linked)
    assert len(world.backends["plain"].calls) == 1
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": one, "output": "sun"} for one in calls]
    if link == "items":
        await _response(world, is_stream=False, input=[_ASKS, *response["output"], *results])
    elif link == "conversation":
        await _response(world, is_stream=False, input=results, **linked)
    else:
        await _response(world, is_stream=False, input=results, previous_response_id=response["id"])
    check(world, server)
