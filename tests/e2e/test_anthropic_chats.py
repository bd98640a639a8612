"""Chats of clients that know OpenAI's API alone, at an `anthropic` deployment with the rules of its API."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.anthropic_rules import refusal
from tests.e2e.anthropic_server import Server, message, run_anthropic_server
from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway
from tests.e2e.upstream import Upstream

_fresh = itertools.count()
_PNG = "data:image/png;base64,iVBORw0KGgo="


def _user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _call(id: Any, name: str = "get_weather", arguments: Any = '{"city":"Oslo"}') -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calls(*calls: dict[str, Any], content: Any = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(calls)}


def _result(id: Any, content: Any = "4 degrees") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


def _tool(name: str = "get_weather", parameters: Any = None, **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}} if parameters is None else parameters
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "out", "schema": schema}}}


_HI, _ASK = _user("hi"), [_user("Weather?")]
_REQUIRED = [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {"required": ["b"]}]
CHATS: dict[str, dict[str, Any]] = {
    "opus effort": {"model": "opus", "reasoning_effort": "high"},
    "opus effort xhigh": {"model": "opus", "reasoning_effort": "xhigh"},
    "opus effort minimal": {"model": "opus", "reasoning_effort": "minimal"},
    "opus effort none": {"model": "opus", "reasoning_effort": "none"},
    "opus temperature": {"model": "opus", "temperature": 0.2},
    "opus temperature 1": {"model": "opus", "temperature": 1},
    "opus ends with the assistant": {"model": "opus", "messages": [_HI, {"role": "assistant", "content": "Well, "}]},
    "effort xhigh": {"reasoning_effort": "xhigh"},
    "effort and a temperature": {"reasoning_effort": "high", "temperature": 0.2, "max_tokens": 8000},
    "effort and a forced tool": {"reasoning_effort": "low", "tools": [_tool()], "tool_choice": "required"},
    "effort after a call": {
        "reasoning_effort": "medium",
        "messages": [*_ASK, _calls(_call("c1")), _result("c1")],
        "tools": [_tool()],
        "max_tokens": 9000,
    },
    "temperature and top_p": {"temperature": 0.5, "top_p": 0.9},
    "temperature and top_p of 1": {"temperature": 1, "top_p": 1},
    "temperature and top_p of 1.0": {"temperature": 0.3, "top_p": 1.0},
    "temperature 0 and top_p": {"temperature": 0, "top_p": 0.9},
    "empty part of the user": {"messages": [_user([{"type": "text", "text": ""}, {"type": "text", "text": "hi"}])]},
    "empty part of the assistant": {
        "messages": [_HI, {"role": "assistant", "content": [{"type": "text", "text": ""}]}, _user("again")]
    },
    "empty part of the system": {"messages": [{"role": "system", "content": [{"type": "text", "text": ""}]}, _HI]},
    "white space alone": {"messages": [_HI, {"role": "assistant", "content": "yes?"}, _user(" \n")]},
    "an empty user": {"messages": [_user("")]},
    "empty result": {"messages": [*_ASK, _calls(_call("c1")), _result("c1", "")], "tools": [_tool()]},
    "white part of a result": {
        "messages": [*_ASK, _calls(_call("c1")), _result("c1", [{"type": "text", "text": " "}])],
        "tools": [_tool()],
    },
    "the system alone": {"messages": [{"role": "system", "content": "Say hello."}]},
    "begins with the assistant": {"messages": [{"role": "assistant", "content": "Hello!"}, _HI]},
    "white space at the end": {"messages": [_HI, {"role": "assistant", "content": "It is "}]},
    "anyOf at the top": {"tools": [_tool(parameters={"anyOf": _REQUIRED})]},
    "oneOf beside properties": {
        "tools": [_tool(parameters={"type": "object", "properties": {"b": {}}, "oneOf": _REQUIRED})]
    },
    "allOf at the top": {"tools": [_tool(parameters={"allOf": _REQUIRED, "additionalProperties": False})]},
    "$ref at the top": {
        "tools": [_tool(parameters={"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"type": "string"}}}}})]
    },
    "no type": {"tools": [_tool(parameters={"properties": {"a": {"type": "string"}}})]},
    "no parameters": {"tools": [{"type": "function", "function": {"name": "now"}}]},
    "a nullable object": {"tools": [_tool(parameters={"type": ["object", "null"], "properties": {}})]},
    "a dot in a name": {
        "tools": [_tool("weather.get")],
        "tool_choice": {"type": "function", "function": {"name": "weather.get"}},
    },
    "a long name": {"tools": [_tool("w" * 140), _tool("w" * 141)]},
    "names in the history": {"messages": [*_ASK, _calls(_call("c1", "a.b")), _result("c1")], "tools": [_tool("a.b")]},
    "ids of Kimi": {
        "messages": [*_ASK, _calls(_call("functions.get_weather:0")), _result("functions.get_weather:0")] * 2,
        "tools": [_tool()],
    },
    "no tools beside calls": {"messages": [*_ASK, _calls(_call("c1")), _result("c1")]},
    "a strict tool": {
        "tools": [_tool(parameters={"type": "object", "properties": {"n": {"minimum": 1}}}, strict=True)]
    },
    "empty ids": {"messages": [*_ASK, _calls(_call(""), _call("")), _result(""), _result("")], "tools": [_tool()]},
    "a call without a result": {"messages": [*_ASK, _calls(_call("c1")), _user("Forget it.")], "tools": [_tool()]},
    "a result without a call": {"messages": [*_ASK, _result("c9"), _user("Well?")], "tools": [_tool()]},
    "broken arguments": {"messages": [*_ASK, _calls(_call("c1", arguments='{"ci')), _result("c1")], "tools": [_tool()]},
    "white stops": {"stop": ["\n", "END"]},
    "a schema of an answer": _json({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}}),
    "image/jpg": {"messages": [_user([{"type": "image_url", "image_url": {"url": _PNG.replace("png", "jpg")}}])]},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0},
    "any JSON": {"response_format": {"type": "json_object"}},
}
REFUSED = {"opus temperature", "temperature and top_p", "white stops", "penalties"}


@pytest.fixture(scope="module")
def claude() -> Iterator[Server]:
    with run_anthropic_server() as server:
        server.judge = refusal
        yield server


@pytest.fixture(scope="module")
def gateway(claude: Server, upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with two models of Anthropic's, each alone and with an OpenAI-compatible server beside it."""
    price = {"input_usd_per_mtok": 0, "output_usd_per_mtok": 0}
    models: dict[str, Any] = {}
    for alias, model in (("sonnet", "claude-sonnet-4-5"), ("opus", "claude-opus-4-7")):
        one = {"name": alias, "backend": "anthropic", "base_url": claude.url, "model": model, "price": price}
        models[alias] = {"deployments": [one]}
        both = [{**one, "name": f"{alias}-first"}, deployment(upstream_process.url, f"{alias}-second")]
        models[f"{alias}-or"] = {"policy": "cheapest", "deployments": both}
    with run_gateway(tmp_path_factory.mktemp("chats"), {**WITHOUT_EMBEDDER, "models": models}) as running:
        running.wait_ready()
        yield running


def _ask(gateway: Gateway, beside: str, chat: dict[str, Any]) -> httpx.Response:
    body = {"messages": [_HI], **chat, "model": chat.get("model", "sonnet") + beside, "user": str(next(_fresh))}
    headers = {"authorization": f"Bearer {API_KEY}", "cache-control": "no-cache"}
    return httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers=headers, timeout=30)


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_is_said_as_anthropics_api_takes_it(gateway: Gateway, claude: Server, name: str) -> None:
    """What can be said is answered; what cannot is refused by its name, and never sent."""
    claude.seen.clear()
    answer = _ask(gateway, "", CHATS[name])
    assert (answer.status_code == 400) is (name in REFUSED), answer.text
    if name in REFUSED:
        assert claude.seen == []
        assert answer.json()["error"]["param"] in answer.json()["error"]["message"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_chat_that_cannot_be_said_there_is_answered_beside(gateway: Gateway, name: str) -> None:
    """A refusal by name goes on to the alias's next deployment."""
    answer = _ask(gateway, "-or", CHATS[name])
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-sameway-backend"].endswith("-second")


def test_a_refusal_of_a_translation_goes_to_the_next_deployment(gateway: Gateway, claude: Server) -> None:
    """What the server refuses of a request that the gateway made is not the client's to mend."""
    claude.judge = lambda _: "messages: something that no table knows"
    try:
        alone, beside = _ask(gateway, "", {}), _ask(gateway, "-or", {})
    finally:
        claude.judge = refusal
    assert (alone.status_code, alone.json()["error"]["message"]) == (400, "messages: something that no table knows")
    assert beside.status_code == 200
    assert beside.headers["x-sameway-backend"] == "sonnet-second"


@pytest.mark.parametrize("is_stream", [False, True])
def test_names_of_tools_come_back_as_they_were_sent(gateway: Gateway, claude: Server, is_stream: bool) -> None:
    """A name that the server does not take is another one there, and the client's in the answer."""
    chat = {"tools": [_tool("weather.get"), _tool("weather_get")], "stream": is_stream}
    claude.answer = message([{"type": "text", "text": "Hello."}], "end_turn")
    _ask(gateway, "", {**chat, "stream": False})
    sent = [tool["name"] for tool in json.loads(claude.seen[-1][2])["tools"]]
    claude.answer = message([{"type": "tool_use", "id": "toolu_1", "name": name, "input": {}} for name in sent])
    parts = _parts(_ask(gateway, "", chat))
    names = [call["function"].get("name") for part in parts for call in part.get("tool_calls") or ()]
    assert sent[0] not in ("weather.get", "weather_get")
    assert sent[1] == "weather_get"
    assert list(filter(None, names)) == ["weather.get", "weather_get"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_any_json_comes_by_a_tool(gateway: Gateway, claude: Server, is_stream: bool) -> None:
    """Where the API has no JSON mode, the arguments of a forced call are the answer's text."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "json_answer", "input": {"n": [1, 2]}}
    claude.answer = message([call])
    answer = _ask(gateway, "", {**CHATS["any JSON"], "stream": is_stream})
    parts = _parts(answer)
    assert json.loads("".join(part.get("content") or "" for part in parts)) == {"n": [1, 2]}
    assert not any(part.get("tool_calls") for part in parts)
    assert '"finish_reason":"stop"' in answer.text


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("name", ["weather.get", "json_answer"])
def test_a_hit_says_what_was_answered(gateway: Gateway, claude: Server, name: str, is_stream: bool) -> None:
    """A stored answer has the client's names of tools, or JSON as its text, whole and streamed."""
    more = {"tools": [_tool(name)]} if "." in name else CHATS["any JSON"]
    chat = {**more, "model": "sonnet", "messages": [_user(f"Weather? {name} {is_stream}")]}
    headers = {"authorization": f"Bearer {API_KEY}"}
    claude.answer = message([{"type": "text", "text": "Hello."}], "end_turn")
    _ask(gateway, "", {**chat, "messages": [_user("Which tools are there?")]})
    (tool,) = json.loads(claude.seen[-1][2])["tools"]
    claude.answer = message([{"type": "tool_use", "id": "toolu_1", "name": tool["name"], "input": {"n": 1}}])
    asked, said = len(claude.seen), []
    for streams in (is_stream, not is_stream):
        body = {**chat, "stream": streams}
        answer = httpx.post(f"{gateway.base_url}/chat/completions", json=body, headers=headers, timeout=30)
        parts = _parts(answer)
        functions = [call["function"] for part in parts for call in part.get("tool_calls") or ()]
        texts = [
            "".join(one.get("arguments") or "" for one in functions),
            "".join(p.get("content") or "" for p in parts),
        ]
        said.append([{one["name"] for one in functions if one.get("name")}, *map(str.split, texts)])
    assert len(claude.seen) == asked + 1
    assert said[0] == said[1]
    assert said[0][0] == ({name} if "." in name else set())


def _parts(answer: httpx.Response) -> list[dict[str, Any]]:
    """The message of a whole answer, or the deltas of a stream."""
    lines = [
        line.removeprefix("data: ") for line in answer.text.splitlines() if line.removeprefix("data: ").startswith("{")
    ]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return [choice["message"] if "message" in choice else choice["delta"] for choice in choices]
