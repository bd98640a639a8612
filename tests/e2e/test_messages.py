"""Anthropic's Messages API with its official client: the same answers, budgets and cached entries as chat completions."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from openai import OpenAI

from tests.e2e.gateway import API_KEY, Gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place",
    "input_schema": {"type": "object", "properties": {"text": {"type": "string"}}},
}


@pytest.fixture
def claude(gateway: Gateway) -> Iterator[Anthropic]:
    """The official client, pointed at the gateway and changed in nothing else."""
    with Anthropic(base_url=gateway.root, api_key=API_KEY, max_retries=0, timeout=30) as made:
        yield made


def question() -> str:
    """A prompt that no other test has sent."""
    return f"Tell me something about the colour {next(_fresh)}, at length."


def said(*texts: str) -> Any:
    """A dialogue of these texts, the user's first."""
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def blocks(message: Any) -> list[Any]:
    """A message's content, without what the SDK's helper for streams adds."""
    return [block.model_dump(exclude={"parsed_output"}) for block in message.content]


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER, {**WEATHER, "name": "time"}]}])
def test_a_message_is_what_its_events_tell(claude: Anthropic, more: dict[str, Any]) -> None:
    """Generated or replayed, streamed through the SDK's own helper or whole: one content, one usage, one end."""
    asked, told = said(question()), []
    for _ in range(2):
        with claude.messages.stream(model="mock", max_tokens=500, messages=asked, **more) as stream:
            events = [event.type for event in stream]
            told.append(stream.get_final_message())
        assert (events[0], events[-1]) == ("message_start", "message_stop")
        assert events.count("content_block_start") == events.count("content_block_stop") == len(told[-1].content)
    told.append(claude.messages.create(model="mock", max_tokens=500, messages=asked, **more))
    assert blocks(told[0]) == blocks(told[1]) == blocks(told[2])
    assert {one.model for one in told} == {"mock"}
    assert told[0].usage == told[2].usage
    assert told[2].usage.output_tokens > 0
    assert told[2].stop_reason == ("tool_use" if more else "end_turn")
    if more:
        assert [block.name for block in told[2].content if block.type == "tool_use"] == ["weather", "time"]


def test_messages_and_chat_completions_share_cached_answers(claude: Anthropic, client: OpenAI) -> None:
    """Whichever came first: the system prompt is a message, one text block is its text, `cache_control` is no key."""
    asked = question()
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    recorded = client.chat.completions.create(model="mock", messages=chat, max_completion_tokens=500)
    cached: Any = {"type": "text", "cache_control": {"type": "ephemeral"}}
    raw = claude.messages.with_raw_response.create(
        model="mock",
        max_tokens=500,
        system=[{**cached, "text": "Be brief."}],
        messages=[{"role": "user", "content": [{**cached, "text": asked}]}],
        metadata={"user_id": "u1"},
    )
    assert raw.headers["x-sameway-cache"] == "exact"
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    block = raw.parse().content[0]
    assert block.type == "text"
    assert block.text == recorded.choices[0].message.content


def test_a_tool_loop_goes_on_from_what_was_answered(claude: Anthropic, upstream: Upstream) -> None:
    """A message's own blocks are taken as input again: calls become one message, each result a tool's."""
    messages = said(question())
    tools: Any = [WEATHER, {**WEATHER, "name": "time"}]
    called = claude.messages.create(model="mock", max_tokens=500, messages=messages, tools=tools)
    calls = [block for block in called.content if block.type == "tool_use"]
    thought: Any = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    messages.append({"role": "assistant", "content": [thought, *called.content]})
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": "sunny"},
        {"type": "tool_result", "tool_use_id": calls[1].id, "is_error": True, "content": [image]},
        {"type": "text", "text": "Go on."},
    ]
    messages.append({"role": "user", "content": results})
    claude.messages.create(model="mock", max_tokens=500, messages=messages, tools=tools, tool_choice={"type": "any"})
    body = upstream.seen().requests[-1]["body"]
    sent = body["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in sent[1]["tool_calls"]] == [call.id for call in calls]
    assert [message["content"] for message in sent[2:4]] == ["sunny", "Error: [image 1 of the next message]"]
    assert [part["type"] for part in sent[4]["content"]] == ["image_url", "text"]
    assert body["tool_choice"] == "required"
    assert body["tools"][0]["function"]["parameters"] == WEATHER["input_schema"]


def test_the_async_client_streams_and_leaves(gateway: Gateway, upstream: Upstream) -> None:
    """A stream that its reader leaves is cancelled at the deployment."""

    async def leave() -> str:
        async with (
            AsyncAnthropic(base_url=gateway.root, api_key=API_KEY, max_retries=0) as made,
            made.messages.stream(model="slow", max_tokens=500, messages=said(question())) as stream,
        ):
            async for text in stream.text_stream:
                return text
        return ""

    assert asyncio.run(leave())
    wait_for(lambda: upstream.seen().dropped >= 1)


def test_ends_and_usage_have_anthropics_names(claude: Anthropic) -> None:
    """A cut answer ends by `max_tokens`, a filtered one by `refusal`."""
    cut = claude.messages.create(model="long", max_tokens=500, messages=said(question()))
    assert cut.stop_reason == "max_tokens"
    assert claude.messages.create(model="filtered", max_tokens=500, messages=said(question())).stop_reason == "refusal"


def test_errors_have_anthropics_shape(claude: Anthropic, gateway: Gateway) -> None:
    """Before the first byte and inside a stream; the SDK raises its own class for each status."""
    with pytest.raises(anthropic.NotFoundError) as unknown:
        claude.messages.create(model="no-such", max_tokens=5, messages=said("x"))
    body: Any = unknown.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert body["request_id"] == unknown.value.request_id
    with pytest.raises(anthropic.AuthenticationError) as stranger:
        Anthropic(base_url=gateway.root, api_key="sk-wrong", max_retries=0).messages.count_tokens(
            model="mock", messages=said("x")
        )
    denied: Any = stranger.value.body
    assert denied["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.BadRequestError) as rejected:
        claude.messages.create(model="rejecting", max_tokens=5, messages=said(question()))
    told: Any = rejected.value.body
    assert told["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.APIStatusError) as broken:
        list(claude.messages.create(model="cut", max_tokens=5, messages=said(question()), stream=True))
    assert "broke" in str(broken.value) or "ended" in str(broken.value)


_DOCUMENT = {"type": "document", "source": {"type": "file", "file_id": "f"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": said("x", "so")}, "messages: No deployment can serve this request: plain does not offer prefill"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [_DOCUMENT]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t"}]}]},
            "messages[0].content[0].tool_use_id",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"mcp_servers": [{"type": "url", "url": "https://x", "name": "x"}]}, "mcp_servers"),
        ({"output_config": {"mood": "good"}}, "output_config.mood"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_wrong_or_not_supported_is_refused_by_name(
    claude: Anthropic, fields: dict[str, Any], param: str
) -> None:
    """Never left out: an answer without what was asked for would look like one with it."""
    body = {"model": "mock", "max_tokens": 5, "messages": said("x"), **fields}
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.post("/v1/messages", body=body, cast_to=object)
    told: Any = refused.value.body
    assert param in told["error"]["message"]


def test_every_refusal_of_its_routes_has_anthropics_shape(gateway: Gateway) -> None:
    """Of a path, a method, a body and a key, with the request's id; a deployment's 429 where that is why."""
    for method, path, status, kind in (
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches/x/y/z", 404, "not_found_error"),
        ("POST", "/v1/messages", 400, "invalid_request_error"),
    ):
        reply = httpx.request(method, gateway.root + path, headers={"x-api-key": API_KEY}, content=b"[")
        assert (reply.status_code, reply.json()["type"], reply.json()["error"]["type"]) == (status, "error", kind)
        assert reply.json()["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert httpx.get(f"{gateway.root}/v1/completions").json()["error"]["code"] == "method_not_allowed"
    with Anthropic(base_url=gateway.root, api_key=API_KEY, max_retries=0) as claude:
        with pytest.raises(anthropic.APIStatusError) as busy:
            claude.messages.create(model="throttled", max_tokens=5, messages=said(question()))
        assert (busy.value.status_code, busy.value.response.headers["retry-after"]) == (429, "7")


def test_tokens_are_counted(claude: Anthropic) -> None:
    """A longer prompt has more; a model without a local engine gets the estimate of its budgets."""
    short = claude.messages.count_tokens(model="mock", messages=said("x"))
    long = claude.messages.count_tokens(model="mock", system="Be brief. " * 50, messages=said("x"), tools=[WEATHER])
    assert 0 < short.input_tokens < long.input_tokens


def test_a_message_is_recorded_as_one(gateway: Gateway, claude: Anthropic) -> None:
    """Its log line names the route, with the tokens and the cost that a chat completion would have."""
    raw = claude.messages.with_raw_response.create(model="mock", max_tokens=50, messages=said(question()))
    request_id = raw.headers["x-request-id"]
    wait_for(lambda: any(r["request_id"] == request_id for r in gateway.records()))
    record = next(r for r in gateway.records() if r["request_id"] == request_id)
    assert (record["route"], record["cache"], record["status"]) == ("messages", "miss", 200)
    assert raw.parse().id == request_id.replace("req_", "msg_")


_TOOL = """
import sys
from anthropic import Anthropic
from openai import OpenAI
asked = {"model": "mock", "messages": [{"role": "user", "content": sys.argv[1]}]}
print(Anthropic().messages.create(max_tokens=50, **asked).content[0].text)
print(OpenAI().chat.completions.create(max_completion_tokens=50, **asked).choices[0].message.content)
"""


def run_tool(*command: str, key: str = API_KEY) -> subprocess.CompletedProcess[str]:
    """`sameway run` with this command and the environment of a user who has a key of Anthropic's, too."""
    environ = {**os.environ, "SAMEWAY_API_KEY": key, "ANTHROPIC_API_KEY": "sk-ant-own"}
    argv = [sys.executable, "-m", "gateway", "run", *command]
    return subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=60, check=False)


def test_a_tool_starts_with_the_gateway_as_its_provider(gateway: Gateway, tmp_path: Path) -> None:
    """Both official clients find it in their environment, and Codex, which reads no address there, in its arguments;
    its own exit status is the command's.
    """
    asked = question()
    ran = run_tool("--url", f"{gateway.root}/v1", "--", sys.executable, "-c", _TOOL, asked)
    assert ran.stderr == ""
    first, second = ran.stdout.splitlines()
    assert first == second
    assert asked in first
    ended = run_tool("--url", gateway.root, "--model", "mock", "--", sys.executable, "-c", "raise SystemExit(7)")
    assert ended.returncode == 7
    codex, opencode = tmp_path / "codex", tmp_path / "opencode"
    codex.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    opencode.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$OPENCODE_CONFIG_CONTENT" "$SAMEWAY_SESSION" "$ANTHROPIC_CUSTOM_HEADERS"\n'
    )
    for tool in (codex, opencode):
        tool.chmod(0o755)
    config, session, header = run_tool(
        "--url", gateway.root, "--model", "mock", "--", str(opencode)
    ).stdout.splitlines()
    assert header == f"x-sameway-session: {session}"
    told = json.loads(config)
    assert (told["model"], told["provider"]["sameway"]["models"]) == ("sameway/mock", {"mock": {}})
    assert told["provider"]["sameway"]["options"]["headers"] == {"x-sameway-session": session}
    given = run_tool("--url", gateway.root, "--model", "mock", "--", str(codex), "exec", "hello").stdout.splitlines()
    assert given[-2:] == ["exec", "hello"]
    assert set(given[:-2:2]) == {"-c"}
    chosen = tomllib.loads("\n".join(given[1:-2:2]))
    assert (chosen["model_provider"], chosen["model"]) == ("sameway", "mock")
    provider = chosen["model_providers"]["sameway"]
    assert (provider["base_url"], provider["env_key"]) == (f"{gateway.root}/v1", "OPENAI_API_KEY")
    assert provider["http_headers"]["x-sameway-session"] not in ("", session)


def test_a_tool_does_not_start_without_a_gateway(gateway: Gateway) -> None:
    """The message names what is missing: the key, the gateway, or the command."""
    for command, key, words in (
        (["--", "true"], "", "SAMEWAY_API_KEY is not set"),
        (["--url", gateway.root, "--", "true"], "sk-sw-wrong-key-of-no-team", "answered 401"),
        (["--url", "http://127.0.0.1:9", "--", "true"], API_KEY, "cannot be reached"),
        (["--url", "localhost", "--", "true"], API_KEY, "cannot be reached"),
        (["--url", "http://[::", "--", "true"], API_KEY, "cannot be reached"),
        (["--url", gateway.root, "--", "no-such-command"], API_KEY, "cannot be started"),
        (["--url", gateway.root, "--model", "a/no model", "--", "true"], API_KEY, "has no model 'a/no model'"),
    ):
        refused = run_tool(*command, key=key)
        assert refused.returncode != 0
        assert words in refused.stderr
