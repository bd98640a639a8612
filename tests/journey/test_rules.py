"""OpenAI's rules between fields: kept where a local engine may answer, left to other servers to keep."""

from __future__ import annotations

from typing import Any

import pytest

from tests.journey.conftest import OpenWorld
from tests.world import World, deployment

_CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
_ASKED = {"role": "user", "content": "hello"}


def _tool(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def _said(**fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, **fields}


def _told(call: str) -> dict[str, Any]:
    return {"role": "tool", "content": "sunny", "tool_call_id": call}


BROKEN: list[tuple[dict[str, Any], str, str | None]] = [
    ({"top_logprobs": 2}, "top_logprobs", None),
    ({"top_logprobs": 2, "logprobs": False}, "top_logprobs", None),
    ({"stop": list("abcde")}, "stop", "array_above_max_length"),
    ({"stream_options": {"include_usage": True}}, "stream_options", None),
    ({"logit_bias": {"5": 101}}, "logit_bias", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice", None),
    ({"parallel_tool_calls": True}, "parallel_tool_calls", None),
    ({"function_call": "auto"}, "function_call", None),
    ({"tools": []}, "tools", "empty_array"),
    ({"tools": [_tool("look")] * 129}, "tools", "array_above_max_length"),
    ({"tools": [_tool("look"), _tool("look")]}, "tools[1].function.name", "invalid_value"),
    ({"tools": [_tool("look up")]}, "tools[0].function.name", "invalid_value"),
    ({"tools": [_tool("x" * 65)]}, "tools[0].function.name", "string_above_max_length"),
    ({"tools": [_tool(None)]}, "tools[0].function.name", "missing_required_parameter"),
    ({"tools": [_tool(5)]}, "tools[0].function.name", "invalid_type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function.name", "missing_required_parameter"),
    ({"tools": [_tool("look")], "tool_choice": "always"}, "tool_choice", "invalid_value"),
    ({"tools": [_tool("look")], "tool_choice": _tool("find")}, "tool_choice", "invalid_value"),
    *(
        ({"tools": [_tool("look")], "tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}, param, code)
        for allowed, param, code in (
            (5, "tool_choice.allowed_tools", "invalid_type"),
            ({"mode": "auto", "tools": ["x"]}, "tool_choice.allowed_tools.tools[0]", "invalid_type"),
            ({"mode": 5, "tools": [_tool("look")]}, "tool_choice.allowed_tools.mode", "invalid_type"),
            ({"mode": "none", "tools": [_tool("look")]}, "tool_choice.allowed_tools.mode", "invalid_value"),
            ({"mode": "required", "tools": [_tool("find")]}, "tool_choice", "invalid_value"),
            ({"mode": "required", "tools": [{"type": "custom"}]}, "tool_choice", "invalid_value"),
            ({"mode": "auto", "tools": [_tool(["f"])]}, "tool_choice.function.name", "invalid_type"),
        )
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing_required_parameter"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    ({"messages": [_ASKED, _told("call_1")]}, "messages.[1].role", None),
    ({"messages": [_ASKED, {"role": "tool", "content": "x"}]}, "messages.[1].tool_call_id", None),
    ({"messages": [_ASKED, _said(tool_calls=[_CALL]), _told("call_2")]}, "messages.[2].role", None),
    (
        {"messages": [_ASKED, _said(tool_calls=[_CALL]), _told("call_1"), _ASKED, _told("call_1")]},
        "messages.[4].role",
        None,
    ),
    ({"messages": [_ASKED, _said(tool_calls=[_CALL])]}, "messages", None),
    ({"messages": [_ASKED, _said(tool_calls=[_CALL]), _ASKED]}, "messages.[2].role", None),
    ({"messages": [_ASKED, _said(tool_calls=[])]}, "messages[1].tool_calls", "empty_array"),
    ({"messages": [_ASKED, _said()]}, "messages.[1].content", None),
    (
        {"messages": [_ASKED, _said(tool_calls=[{**_CALL, "id": None}])]},
        "messages[1].tool_calls[0].id",
        "missing_required_parameter",
    ),
    (
        {"messages": [_ASKED, _said(tool_calls=[{**_CALL, "function": "look"}])]},
        "messages[1].tool_calls[0].function.name",
        "missing_required_parameter",
    ),
]


@pytest.mark.parametrize(("fields", "param", "code"), BROKEN)
async def test_a_broken_rule_is_refused_as_openai_does(
    world: World, fields: dict[str, Any], param: str, code: str | None
) -> None:
    """With its `param` and `code`, before the engine has the request."""
    reply = await world.ask(model="engine", **fields)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)
    assert reply.error["type"] == "invalid_request_error"
    assert world.backends["engine"].calls == []


@pytest.mark.parametrize("fields", [{"stop": list("abcde")}, {"stream_options": {}}, {"logit_bias": {"5": -200}}])
async def test_completions_have_the_rules_that_they_share(world: World, fields: dict[str, Any]) -> None:
    """The same fields, at the other endpoint."""
    reply = await world.ask(model="engine", path="/v1/completions", prompt="hello", **fields)
    assert (reply.status, reply.error["param"]) == (400, next(iter(fields)))


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 2, "logprobs": True},
        {"stop": list("abcd"), "logit_bias": {"5": 100, "6": -100}},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"tools": None, "tool_choice": None, "response_format": {"type": "text"}},
        {"messages": [_ASKED, _said(tool_calls=[_CALL, {**_CALL, "id": "b"}]), _told("b"), _told("call_1"), _ASKED]},
        {"messages": [_ASKED, _said(refusal="no"), _ASKED, _said(content="x", tool_calls=None)]},
        {"messages": [_ASKED, _said(function_call={"name": "look", "arguments": ""}), _ASKED]},
    ],
)
async def test_what_keeps_the_rules_is_answered(world: World, fields: dict[str, Any]) -> None:
    """The rules refuse nothing that OpenAI takes."""
    assert (await world.ask(model="engine", **fields)).status == 200


async def test_a_cached_answer_does_not_hide_a_broken_rule(world: World) -> None:
    """`stream_options` is no part of the cache's key, and the rule holds all the same."""
    assert (await world.ask(model="engine")).status == 200
    assert (await world.ask(model="engine", stream_options={})).status == 400


async def test_routing_does_not_decide_what_is_valid(open_a_world: OpenWorld) -> None:
    """An alias with an engine keeps the rules whichever deployment is first; one without leaves them to its servers."""
    engine, server = deployment("engine", engine="default", usd=(5, 5)), deployment("server", usd=(0, 0))
    models = {
        "mixed": {"policy": "cheapest", "deployments": [engine, server]},
        "managed": {"deployments": [deployment("m")]},
    }
    world = await open_a_world(models=models)
    assert (await world.ask(model="mixed", stop=list("abcde"))).status == 400
    assert (await world.ask(model="mixed")).headers["x-sameway-backend"] == "server"
    assert (await world.ask(model="managed", stop=list("abcde"), tool_choice="required")).status == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/responses", {"input": "hello", "parallel_tool_calls": {}}, "parallel_tool_calls"),
        ("/v1/completions", {"prompt": [[]]}, "prompt[0]"),
        ("/v1/completions", {"prompt": [[1], []]}, "prompt[1]"),
    ],
)
async def test_a_field_of_another_type_is_refused_where_it_would_not_be_used(
    world: World, path: str, fields: dict[str, Any], param: str
) -> None:
    """As `/openapi.json` says of it: a field that changes nothing in this request is checked, too."""
    reply = await world.ask(path=path, **fields)
    assert (reply.status, reply.error["param"]) == (400, param)


@pytest.mark.parametrize(
    ("items", "words"),
    [
        ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "No tool call found"),
        ([{"type": "reasoning"}], "must hold more than reasoning"),
        ([{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}], "No tool output found"),
    ],
)
async def test_the_responses_api_names_its_own_fields(world: World, items: list[Any], words: str) -> None:
    """A client that sent `input` is not told of `messages`."""
    reply = await world.ask(path="/v1/responses", input=items)
    assert (reply.status, reply.error["param"]) == (400, "input")
    assert words in reply.error["message"]


async def test_the_responses_api_adds_no_broken_rule(world: World) -> None:
    """A `tool_choice` without tools is valid there, and OpenAI's own default."""
    fields: dict[str, Any] = {"tool_choice": "auto", "tools": [], "parallel_tool_calls": True, "truncation": "auto"}
    reply = await world.ask(path="/v1/responses", model="engine", input="hello", **fields)
    assert reply.status == 200
    assert reply.json["truncation"] == "auto"
