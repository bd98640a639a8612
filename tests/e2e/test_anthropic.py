"""An `anthropic` deployment behind every surface: Anthropic's API in, Anthropic's API or OpenAI's out."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic import Anthropic
from openai import OpenAI

from tests.e2e.anthropic_server import BLOCKS, Server, message, run_anthropic_server
from tests.e2e.gateway import API_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()


@pytest.fixture(scope="module")
def server_process() -> Iterator[Server]:
    with run_anthropic_server() as server:
        yield server


@pytest.fixture
def server(server_process: Server) -> Server:
    """The shared server, with its first script and nothing seen."""
    server_process.answer = message([{"type": "text", "text": "Hello."}], "end_turn")
    server_process.refusal = server_process.events_max = server_process.recorded = None
    server_process.seen.clear()
    return server_process


@pytest.fixture(scope="module")
def behind(
    server_process: Server, upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    """A gateway with an alias at the server, and one that falls over to an OpenAI-compatible one."""
    price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 5.0}
    claude = {
        "backend": "anthropic",
        "base_url": server_process.url,
        "model": "claude-test",
        "api_key_env": "CLAUDE_KEY",
        "price": {**price, "cached_input_usd_per_mtok": 0.1, "tool_call_usd": 0.01},
    }
    free = {**claude, "name": "free", "price": {}}
    config = {
        **WITHOUT_EMBEDDER,
        "models": {
            "claude": {"deployments": [{**claude, "name": "claude", "allow_fields": ["web_search"]}]},
            "claude-test": {"deployments": [{**claude, "name": "same-name", "is_traced": False}]},
            "either": {"policy": "cheapest", "deployments": [free, deployment(upstream_process.url, "backup")]},
        },
    }
    with run_gateway(tmp_path_factory.mktemp("anthropic"), config, env={"CLAUDE_KEY": "sk-ant-secret"}) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def claude(behind: Gateway) -> Iterator[Anthropic]:
    with Anthropic(base_url=behind.root, api_key=API_KEY, max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture(scope="module")
def chat(behind: Gateway) -> Iterator[OpenAI]:
    with OpenAI(base_url=behind.base_url, api_key=API_KEY, max_retries=0, timeout=30) as made:
        yield made


NEW = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}


def claude_codes(**more: Any) -> dict[str, Any]:
    """A request in the shape of Claude Code's: cached system blocks, tools, and a loop with thinking."""
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    schema = {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"a": {}}}
    thought = {"type": "thinking", "thinking": "hm\u2028", "signature": "EqQB+/c2ln=="}
    call = {"type": "tool_use", "id": "toolu_9", "name": "Bash", "input": {"command": "ls", "timeout": 1.5}}
    result = {"type": "tool_result", "tool_use_id": "toolu_9", "content": "a\nb", "is_error": False, **cached}
    return {
        "model": "claude",
        "max_tokens": 32000,
        "system": [{"type": "text", "text": "You are an agent."}, {"type": "text", "text": "Be brief.", **cached}],
        "tools": [{"name": "Bash", "description": "Runs", "input_schema": schema}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": f"List the files, {next(_fresh)}"}]},
            {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]},
            {"role": "user", "content": [result]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "extra_body": dict(NEW),
        "metadata": {"user_id": "user_1"},
        **more,
    }


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_of_anthropics_goes_out_as_it_came(claude: Anthropic, server: Server, is_stream: bool) -> None:
    """Signatures, cache controls and unknown fields included; the model's name alone is the deployment's."""
    asked = claude_codes()
    server.answer = message(BLOCKS)
    betas = {"anthropic-beta": "interleaved-thinking-2025-05-14,context-management-2025-06-27"}
    if is_stream:
        asked["stream"] = True
    raw = claude.messages.with_raw_response.create(**asked, extra_headers=betas)
    headers, path, sent = server.seen[-1]
    asked.pop("extra_body")
    assert json.loads(sent) == {**asked, **NEW, "model": "claude-test"}
    asked["extra_body"] = NEW
    assert path == "/v1/messages"
    assert (headers["x-api-key"], headers["anthropic-beta"]) == ("sk-ant-secret", betas["anthropic-beta"])
    assert headers["anthropic-version"] == raw.http_request.headers["anthropic-version"]
    assert "authorization" not in headers
    assert raw.headers["x-sameway-cache"] == "miss"
    again = claude.messages.with_raw_response.create(**asked, extra_headers=betas)
    assert again.headers["x-sameway-cache"] == "exact"
    other = claude.messages.with_raw_response.create(**asked)
    assert other.headers["x-sameway-cache"] == "miss"


@pytest.mark.parametrize("is_stream", [False, True])
def test_half_a_character_costs_no_answer(claude: Anthropic, server: Server, is_stream: bool) -> None:
    """A surrogate without its pair is U+FFFD in a text, and in the input of a call of a whole answer."""
    call = {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "b" if is_stream else "b\udc00"}}
    server.answer = message([{"type": "text", "text": "a\ud800"}, call])
    with claude.messages.stream(**claude_codes()) if is_stream else contextlib.nullcontext() as stream:
        told = claude.messages.create(**claude_codes()) if stream is None else stream.get_final_message()
    said, asked = told.content
    assert (said.type, asked.type) == ("text", "tool_use")
    assert (said.text, asked.input) == ("a\ufffd", {"command": "b" if is_stream else "b\ufffd"})


def recording(is_stream: bool) -> bytes:
    """A request as Claude Code's own client writes it, with what a decoder and an encoder would change: spaces inside,
    escapes, an integer over 64 bits, 1.50, and an image in a failed result."""
    image = '{"type":"image","source":{"type":"base64","media_type":"image/png","data":"aGk="}}'
    system = (
        '[{"type":"text","text":"You are Claude Code."},'
        '{"type":"text","text":"Env\\u2028","cache_control":{"type":"ephemeral","ttl":"1h"}}]'
    )
    tools = ",".join(f'{{"name":"T{n}","description":"d","input_schema":{{"type": "object" }}}}' for n in range(40))
    turns = (
        f'[{{"role":"user","content":"Go {next(_fresh)} caf\\u00e9"}},{{"role":"assistant","content":['
        '{"type":"thinking","thinking":"hm","signature":"EqQB+/c2ln=="},{"type":"redacted_thinking","data":"b3Bh"},'
        '{"type":"tool_use","id":"toolu_1","name":"T1","input":{"a":1.50,"b":123456789012345678901234567890}}]},'
        f'{{"role":"user","content":[{{"type":"tool_result","tool_use_id":"toolu_1","is_error":true,"content":[{image}]}},'
        '{"type":"text","text":"Go on","cache_control":{"type":"ephemeral"}}]},{"role":"system","content":"Be quick."}]'
    )
    more = (
        '"metadata":{"user_id":"user_ab_session_cd"},"thinking":{"type":"adaptive"},'
        '"context_management":{"edits":[{"type":"clear_thinking_20251015","keep":"all"}]},'
        '"output_config":{"effort":"max","task_budget":{"type":"tokens","total":90000}}'
    )
    stream = ',"stream":true' if is_stream else ""
    head = f'"model":"claude-test","max_tokens":64000,"system":{system},"tools":[{tools}],"messages":{turns}'
    return f"{{{head},{more}{stream}}}".encode()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_that_need_not_change_leaves_byte_for_byte(behind: Gateway, server: Server, is_stream: bool) -> None:
    """As does a question for its tokens; each beta and the version of the API go with it."""
    raw, more = recording(is_stream), {"anthropic-beta": "a-2026-01-01,b-2026-02-02", "anthropic-version": "2026-10-21"}
    headers = {"x-api-key": API_KEY, "content-type": "application/json", **more}
    answered = httpx.post(f"{behind.root}/v1/messages?beta=true", content=raw, headers=headers, timeout=30)
    assert answered.status_code == 200
    counted = httpx.post(f"{behind.root}/v1/messages/count_tokens", content=raw, headers=headers, timeout=30)
    assert counted.json() == server.counted
    for (seen, path, sent), expected in zip(server.seen, ("/v1/messages", "/v1/messages/count_tokens"), strict=True):
        assert path == expected
        assert {name: seen[name] for name in more} == more
        assert sent == raw if path == "/v1/messages" or not is_stream else json.loads(sent)


@pytest.mark.parametrize("twice", ['"tools":[{"type":"web_search","type":"custom","name":"x","input_schema":{}}]'])
def test_no_second_field_of_one_name_passes_the_checks(behind: Gateway, server: Server, twice: str) -> None:
    """What one parser reads as the client's tool, another might read as the provider's."""
    text = f'{{"model":"claude-test","max_tokens":5,"messages":[{{"role":"user","content":"x"}}],{twice}}}'
    refused = httpx.post(f"{behind.root}/v1/messages", content=text, headers={"x-api-key": API_KEY}, timeout=30)
    assert refused.status_code == 400
    assert "twice" in refused.json()["error"]["message"]
    assert server.seen == []


def test_tokens_are_estimated_where_the_server_does_not_count(claude: Anthropic, server: Server) -> None:
    """An overloaded server costs no count."""
    asked: Any = {"model": "claude", "messages": [{"role": "user", "content": "x" * 400}]}
    assert claude.messages.count_tokens(**asked).input_tokens == 4711
    server.refusal = (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    assert 100 <= claude.messages.count_tokens(**asked).input_tokens < 300


def test_a_stream_begins_with_the_tokens_of_its_prompt(claude: Anthropic, server: Server) -> None:
    """Those that the server counted, fresh and from the cache; a chat that shares the answer does not show them."""
    asked: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": f"Begin {next(_fresh)}"}]}
    for _ in range(2):
        with claude.messages.stream(model="claude", **asked) as stream:
            first = next(iter(stream))
            assert first.type == "message_start"
            begun = first.message.usage
            assert (begun.input_tokens, begun.cache_read_input_tokens, begun.cache_creation_input_tokens) == (
                11,
                200,
                300,
            )
            ended = stream.get_final_message().usage
        assert (ended.input_tokens, ended.cache_read_input_tokens, ended.output_tokens) == (11, 200, 40)
    assert len(server.seen) == 1


def test_a_beginning_of_the_answer_goes_on_there(claude: Anthropic, server: Server) -> None:
    """As it came; the answer is what follows it."""
    begun: Any = [{"role": "user", "content": f"Hi {next(_fresh)}"}, {"role": "assistant", "content": "Well,"}]
    assert claude.messages.create(model="claude", max_tokens=9, messages=begun).content
    assert json.loads(server.seen[-1][2])["messages"] == begun


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_cached", [False, True])
def test_every_block_comes_back_unchanged(claude: Anthropic, server: Server, is_stream: bool, is_cached: bool) -> None:
    """Thinking with its signature, citations and a server's tools, in order; fresh and from the cache."""
    asked = claude_codes(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    server.answer = message(BLOCKS)
    if is_cached:
        claude.messages.create(**asked)
    if is_stream:
        with claude.messages.stream(**asked) as stream:
            got: Any = stream.get_final_message()
    else:
        got = claude.messages.create(**asked)
    blocks = [
        block.model_dump(exclude_none=True, exclude={"parsed_output", "caller"}, mode="json") for block in got.content
    ]
    assert blocks == BLOCKS
    assert got.stop_reason == "tool_use"
    used = got.usage.model_dump(exclude_none=True)
    assert {name: used[name] for name in ("input_tokens", "cache_read_input_tokens", "output_tokens")} == {
        "input_tokens": 11,
        "cache_read_input_tokens": 200,
        "output_tokens": 40,
    }
    if not is_stream:  # the SDK adds up a stream's usage without it
        assert used["cache_creation"] == {"ephemeral_5m_input_tokens": 100, "ephemeral_1h_input_tokens": 200}
    assert len(server.seen) == 1


def _start(index: int, **block: Any) -> dict[str, Any]:
    return {"type": "content_block_start", "index": index, "content_block": block}


def _delta(index: int, kind: str, **fields: Any) -> dict[str, Any]:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def _stop(index: int) -> dict[str, Any]:
    return {"type": "content_block_stop", "index": index}


# the shapes of the streams that anthropic-sdk-python's tests record (tests/lib/streaming/fixtures), and
# a block and a delta of a later version
LATER_USAGE = {"input_tokens": 40, "cache_read_input_tokens": 7, "output_tokens": 8}
LATER_USAGE |= {"output_tokens_details": {"thinking_tokens": 3}, "server_tool_use": {"web_search_requests": 1}}
LATER_USAGE |= {"iterations": [{"type": "message", "input_tokens": 40, "output_tokens": 8}]}
LATER: list[dict[str, Any]] = [
    {"type": "future_event", "usage": {"input_tokens": 99}},
    {
        "type": "message_start",
        "message": {
            "id": "msg_01Later",
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": "claude-opus-4-7",
            "stop_reason": None,
            "stop_sequence": None,
            "input_transformations": [{"type": "thinking_dropped", "path": "messages.0.content.0"}],
            "usage": {"input_tokens": 25, "output_tokens": 1, "service_tier": "standard", "inference_geo": "eu"},
        },
    },
    _start(0, type="compaction", content=None, encrypted_content=None),
    {"type": "ping"},
    _delta(0, "compaction_delta", content="Earlier.", encrypted_content="EpwBCioI"),
    _stop(0),
    _start(1, type="text", text="", citations=None),
    _delta(1, "text_delta", text="Hello "),
    _delta(1, "text_delta", text="there"),
    _stop(1),
    _start(2, type="later_block", steps=[], note="a"),
    _delta(2, "later_delta", steps=[1], note="b"),
    _stop(2),
    _start(3, type="tool_use", id="toolu_1", name="look", caller={"type": "direct"}, input={}),
    _delta(3, "input_json_delta", partial_json='{"n": 1.50}'),
    _stop(3),
    _start(4, type="thinking", thinking="", signature=""),
    _delta(4, "thinking_delta", thinking="Hm.", estimated_tokens=32),  # a stream's alone: a block has no such field
    _delta(4, "signature_delta", signature="c2ln"),
    _stop(4),
    {
        "type": "message_delta",
        "delta": {
            "stop_reason": "tool_use",
            "stop_sequence": None,
            "stop_details": None,
            "container": {"id": "container_01", "expires_at": "2027-01-01T00:00:00Z"},
        },
        "usage": LATER_USAGE,
        "context_management": {"applied_edits": [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2}]},
    },
    {"type": "message_stop"},
]


def _post(behind: Gateway, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{behind.base_url}{path}", json=body, headers={"x-api-key": API_KEY}, timeout=30)


def _events(raw: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in raw.text.split("\n") if line.startswith("data: ")]


def test_a_stream_of_its_api_is_kept_and_repeated_as_it_came(behind: Gateway, server: Server) -> None:
    """Events, blocks, deltas and fields of any version, fresh and from the cache; the whole of it has them all."""
    server.recorded = b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in LATER)
    asked = {
        "model": "claude",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": f"Later {next(_fresh)}"}],
    }
    fresh, again = (_post(behind, "/messages", {**asked, "stream": True}) for _ in range(2))
    assert again.headers["x-sameway-cache"] == "exact"
    assert _events(fresh) == _events(again) == LATER
    whole = _post(behind, "/messages", asked)
    assert whole.headers["x-sameway-cache"] == "exact"
    start, end = LATER[1]["message"], LATER[-2]
    assert whole.json() == {
        **start,
        **end["delta"],
        "context_management": end["context_management"],
        "usage": {**start["usage"], **LATER_USAGE},
        "content": [
            {"type": "compaction", "content": "Earlier.", "encrypted_content": "EpwBCioI"},
            {"type": "text", "text": "Hello there", "citations": None},
            {"type": "later_block", "steps": [1], "note": "ab"},
            {"type": "tool_use", "id": "toolu_1", "name": "look", "caller": {"type": "direct"}, "input": {"n": 1.5}},
            {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        ],
    }
    chat = _post(behind, "/chat/completions", {**asked, "max_tokens": None, "max_completion_tokens": 50})
    assert chat.headers["x-sameway-cache"] == "exact"
    said = chat.json()["choices"][0]["message"]
    assert (said["content"], said["tool_calls"][0]["id"]) == ("Hello there", "toolu_1")
    assert len(server.seen) == 1


def test_a_whole_answer_of_its_api_is_kept_and_repeated_as_it_came(
    claude: Anthropic, behind: Gateway, server: Server
) -> None:
    """Byte for byte where it need not change; its stream builds the same message in Anthropic's SDK."""
    more = {"container": {"id": "container_01", "expires_at": "2027-01-01T00:00:00Z"}, "stop_details": None}
    edits = {"applied_edits": [{"type": "clear_thinking_20251015", "cleared_input_tokens": 5}]}
    compacted = {"type": "compaction", "content": "Earlier.", "encrypted_content": "EpwB"}
    called = {"type": "tool_use", "id": "t1", "name": "look", "input": {"n": 1}, "caller": {"type": "direct"}}
    blocks = [compacted, *BLOCKS, called]
    server.answer = {**message(blocks), **more, "context_management": edits, "later": [1]}
    asked: Any = {"max_tokens": 50, "messages": [{"role": "user", "content": f"Whole {next(_fresh)}"}]}
    for _ in range(2):
        told = _post(behind, "/messages", {"model": "claude-test", **asked})
        assert told.text == json.dumps(server.answer)
    with claude.beta.messages.stream(model="claude-test", **asked) as stream:
        built = stream.get_final_message()
    told_by_sdk = claude.beta.messages.create(model="claude-test", **asked)
    plain = [one.model_dump(exclude={"content": {"__all__": {"parsed_output"}}}) for one in (built, told_by_sdk)]
    assert plain[0] == plain[1]
    assert len(server.seen) == 1


@pytest.mark.parametrize("version", ["", "-20270101"])
@pytest.mark.parametrize("kind", ["claude", "either"])
def test_a_message_names_the_model_that_was_asked_for(behind: Gateway, server: Server, kind: str, version: str) -> None:
    """Claude Code sends thinking back of such a message alone; a model that the gateway did not ask for stays."""
    server.answer = {**message(BLOCKS), "model": f"claude-test{version}"}
    asked: Any = {"model": kind, "max_tokens": 50, "messages": [{"role": "user", "content": f"Who {next(_fresh)}"}]}
    wholes = [_post(behind, "/messages", asked) for _ in range(2)]
    streams = [_post(behind, "/messages", asked | {"stream": True}) for _ in range(2)]
    told = [one.json() for one in wholes] + [_events(one)[0]["message"] for one in streams]
    assert [one["model"] for one in told] == [kind] * 4
    assert wholes[0].json() == server.answer | {"model": kind}
    server.answer = {**message(BLOCKS), "model": "claude-of-another-name"}
    asked["messages"] = [{"role": "user", "content": f"Name the colours of flag {next(_fresh)}"}]
    assert _post(behind, "/messages", asked).json() == server.answer


def test_a_thread_is_refused_so_that_the_sdk_sends_the_whole_conversation(claude: Anthropic, server: Server) -> None:
    """Its tool runner keeps threads at the provider by default; no team owns one here, and no cache sees it."""

    @anthropic.beta_tool
    def look(where: str) -> str:
        """Look.

        Args:
            where: The place.
        """
        server.answer = message([{"type": "text", "text": "Sunny."}], "end_turn")
        return f"sun in {where}"

    server.answer = message([{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"where": "Rome"}}])
    question: Any = [{"role": "user", "content": f"Look, {next(_fresh)}"}]
    last = claude.beta.messages.tool_runner(model="claude", max_tokens=99, tools=[look], messages=question).until_done()
    assert last.content[0].type == "text"
    sent = [json.loads(raw) for _, _, raw in server.seen]
    assert [len(one["messages"]) for one in sent] == [1, 3]
    assert not any("thread" in one for one in sent)
    with pytest.raises(anthropic.BadRequestError) as refused:
        claude.beta.messages.count_tokens(model="claude", messages=question, extra_body={"thread": {"type": "create"}})
    assert refused.value.body["error"]["details"]["error_code"] == "thread_unsupported_request"  # type: ignore[index]


def test_what_names_the_providers_state_is_not_answered_from_the_cache(claude: Anthropic, server: Server) -> None:
    """Nor is it kept for others, nor sent to another kind of server."""
    asked: Any = {"model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": str(next(_fresh))}]}
    for _ in range(2):
        claude.messages.create(**asked, extra_body={"diagnostics": {"previous_message_id": "msg_1"}})
    assert len(server.seen) == 2
    for _ in range(2):
        claude.messages.create(**asked, extra_body={"diagnostics": {"previous_message_id": None}})
    assert len(server.seen) == 3


def test_another_servers_thinking_is_not_sent_to_anthropic(claude: Anthropic, server: Server) -> None:
    """It has no signature of Anthropic's, which refuses the request for that; its own thinking stays."""
    others = [{"type": "thinking", "thinking": "Hm", "signature": one} for one in ("", "sameway1.e30=")]
    others.append({"type": "redacted_thinking", "data": "sameway1.e30="})
    own: list[Any] = [{"type": "thinking", "thinking": "So", "signature": "EqQB"}, {"type": "text", "text": "Yes."}]
    turns: Any = [{"role": "user", "content": str(next(_fresh))}, {"role": "assistant", "content": [*others, *own]}]
    turns.append({"role": "user", "content": "And?"})
    claude.messages.create(model="claude", max_tokens=9, messages=turns)
    assert json.loads(server.seen[-1][2])["messages"][1]["content"] == own


def test_a_trace_goes_on_at_the_deployment(claude: Anthropic, server: Server) -> None:
    """Unless the operator forbids it; nothing else of a client's headers does."""
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "baggage": "user=1"}
    for model, expected in (("claude", trace), ("claude-test", {})):
        asked: Any = [{"role": "user", "content": str(next(_fresh))}]
        claude.messages.create(
            model=model, max_tokens=9, messages=asked, extra_headers={**trace, "x-secret": "1", "x-request-id": "mine"}
        )
        headers = server.seen[-1][0]
        assert {name: headers[name] for name in (*trace, "x-secret") if name in headers} == expected
        assert headers["x-request-id"].startswith("req_")


def test_what_only_anthropics_api_says_needs_such_a_deployment(claude: Anthropic, server: Server) -> None:
    """A file by its id goes to the deployment that takes it, never to another one, and is kept apart in the cache."""
    document = {"type": "document", "source": {"type": "file", "file_id": "file_1"}}
    asked: Any = {
        "model": "either",
        "max_tokens": 50,
        "messages": [{"role": "user", "content": [document, {"type": "text", "text": f"Which {next(_fresh)}?"}]}],
    }
    claude.messages.create(**asked)
    assert json.loads(server.seen[-1][2])["messages"] == asked["messages"]
    document["source"]["file_id"] = "file_2"  # type: ignore[index]
    assert claude.messages.with_raw_response.create(**asked).headers["x-sameway-cache"] == "miss"
    server.refusal = (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    document["source"]["file_id"] = "file_3"  # type: ignore[index]
    with pytest.raises(anthropic.APIStatusError) as refused:
        claude.messages.create(**asked)
    told: Any = refused.value.body
    assert (refused.value.status_code, told["error"]["type"]) == (529, "overloaded_error")


@pytest.mark.parametrize(
    "change",
    [
        {"thinking": {"type": "adaptive"}},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}},
        {"thinking": {"type": "enabled", "budget_tokens": 1025}},
        {"tools": [{"name": "Bash", "input_schema": {"type": "object"}, "input_examples": [{"a": 1}]}]},
        {"tools": [{"name": "Bash", "input_schema": {"type": "object"}, "defer_loading": True}]},
        {"document": {"citations": {"enabled": True}}},
        {"document": {"title": "A title"}},
        {"document": {"context": "A context"}},
    ],
)
def test_what_a_chat_does_not_say_is_part_of_the_key(claude: Anthropic, server: Server, change: dict[str, Any]) -> None:
    """A message that differs in it alone gets an answer of its own; one that differs in `cache_control` does not."""
    question = f"What does it say, {next(_fresh)}?"

    def ask(more: dict[str, Any], document: dict[str, Any]) -> str:
        source = {"type": "text", "media_type": "text/plain", "data": "The fee is 35 euros."}
        content = [{"type": "document", "source": source, **document}, {"type": "text", "text": question}]
        tools = [{"name": "Bash", "input_schema": {"type": "object"}}]
        asked = {"tools": tools, **more, "messages": [{"role": "user", "content": content}]}
        raw = claude.messages.with_raw_response.create(model="claude", max_tokens=2000, extra_body=asked, messages=[])
        return raw.headers["x-sameway-cache"]

    changed = {name: value for name, value in change.items() if name != "document"}
    assert ask({}, {}) == "miss"
    assert ask(changed, change.get("document", {})) == "miss"
    assert ask({}, {"cache_control": {"type": "ephemeral"}}) == "exact"


def test_a_message_falls_over_to_another_kind_of_server(claude: Anthropic, server: Server) -> None:
    """As a chat completion; the answer comes back as a message."""
    server.refusal = (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}})
    text = f"Which colour is {next(_fresh)}?"
    raw = claude.messages.with_raw_response.create(
        model="either", max_tokens=50, messages=[{"role": "user", "content": text}]
    )
    assert raw.headers["x-sameway-backend"] == "backup"
    block = raw.parse().content[0]
    assert block.type == "text"
    assert text in block.text


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_chat_is_translated_there_and_back(chat: OpenAI, server: Server, behind: Gateway, is_stream: bool) -> None:
    """Messages, tools, formats and usage, whole and streamed; each kind of token is priced."""
    server.answer = message(BLOCKS)
    image = "data:image/png;base64,aGk="
    function = {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {}}}
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"text":"x"}'}}
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": f"Say {next(_fresh)}"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": image}}]},
    ]
    asked: Any = {
        "model": "claude",
        "messages": messages,
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "stop": "END",
        "max_completion_tokens": 100,
        "user": "u1",
        "seed": 1,
    }
    if is_stream:
        with chat.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
            got: Any = stream.get_final_completion()
    else:
        raw = chat.chat.completions.with_raw_response.create(**asked)
        # 11 + 200 x 0.1 + 100 x 1.25 + 200 x 2 of the prompt, 40 x 5 of the answer
        assert raw.headers["x-sameway-cost-usd"] == "0.000756"
        got = raw.parse()
    result = {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "sunny"}]}
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    sent = json.loads(server.seen[-1][2])
    sent.pop("stream", None)
    assert sent == {
        "model": "claude-test",
        "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": messages[1]["content"]},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "c1", "name": "weather", "input": {"text": "x"}}],
            },
            {"role": "user", "content": [result, {"type": "image", "source": source}]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": {"type": "object", "properties": {}}}],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
        "stop_sequences": ["END"],
        "max_tokens": 100,
        "metadata": {"user_id": "u1"},
    }
    choice = got.choices[0]
    assert choice.message.content == "First cited"
    assert choice.finish_reason == "tool_calls"
    assert [(one.function.name, json.loads(one.function.arguments or "{}")) for one in choice.message.tool_calls] == [
        ("weather", {"text": "Bergen, 5 °C"}),
        ("time", {}),
    ]
    assert choice.message.reasoning_content == "The user asks for both."
    assert (got.usage.prompt_tokens, got.usage.prompt_tokens_details.cached_tokens) == (511, 200)


def test_the_length_of_a_chat_includes_its_thinking(chat: OpenAI, server: Server) -> None:
    """So no budget holds less than may be generated; a length with no room for thinking has none."""
    for effort, length, budget in (("high", 40_000, 16_384), ("high", 4_096, 2_048), ("low", 2_000, None)):
        question: Any = [{"role": "user", "content": str(next(_fresh))}]
        chat.chat.completions.create(
            model="claude", messages=question, reasoning_effort=effort, max_completion_tokens=length
        )
        sent = json.loads(server.seen[-1][2])
        assert (sent["max_tokens"], sent.get("thinking", {}).get("budget_tokens")) == (length, budget)


def test_a_chat_with_what_the_api_lacks_is_refused_by_name(chat: OpenAI, server: Server) -> None:
    """Never left out, where it would change the answer."""
    for fields, param in (
        ({"temperature": 1.5}, "temperature"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"stop": "\n"}, "stop"),
        ({"reasoning_effort": ["low"]}, "reasoning_effort"),
        ({"tools": [{"type": "web_search"}]}, "web_search"),  # in OpenAI's words, where the operator allows it
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat.chat.completions.create(
                model="claude", messages=[{"role": "user", "content": str(next(_fresh))}], **fields
            )
        assert param in str(refused.value)
    assert server.seen == []


def test_failures_are_anthropics_words_and_broken_streams_are_errors(claude: Anthropic, server: Server) -> None:
    """A refusal keeps its message and status; a stream without its end is never a whole answer."""
    server.refusal = (400, {"type": "error", "error": {"type": "invalid_request_error", "message": "No such beta"}})
    with pytest.raises(anthropic.BadRequestError, match="No such beta"):
        claude.messages.create(**claude_codes())
    server.refusal, server.events_max = None, 4
    with pytest.raises(anthropic.APIStatusError):
        list(claude.messages.create(**claude_codes(stream=True)))
    server.events_max, server.answer = None, message([{"type": "text", "text": "x", "citations": ["y"]}])
    with pytest.raises(anthropic.APIStatusError) as broken:
        claude.messages.create(**claude_codes())
    assert broken.value.status_code == 502


def test_the_ledger_has_each_kind_of_token(claude: Anthropic, server: Server, behind: Gateway) -> None:
    """Cache reads, and writes by lifetime, as Anthropic counted them."""
    raw = claude.messages.with_raw_response.create(**claude_codes())
    request_id = raw.headers["x-request-id"]
    wait_for(lambda: any(r["request_id"] == request_id for r in behind.records()))
    record = next(r for r in behind.records() if r["request_id"] == request_id)
    assert (record["prompt_tokens"], record["cached_tokens"], record["completion_tokens"]) == (511, 200, 40)
    assert record["cost_microusd"] == 756


def test_a_key_never_shows(behind: Gateway, server: Server) -> None:
    """Not in an error, also where the server repeats it."""
    told = {"type": "error", "error": {"type": "authentication_error", "message": "bad key sk-ant-secret"}}
    server.refusal = (401, told)
    answer = behind.chat("hello", model="claude")
    assert answer.status_code == 424
    assert "sk-ant-secret" not in answer.text
