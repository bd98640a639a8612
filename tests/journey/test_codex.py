"""Requests as the Codex CLI sends them: what another deployment's chat completion is asked, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

from gateway.wire.types import Chunk
from tests.world import Finish, Tokens, World

_PATH = "/v1/responses"
_GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}
_TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "exec_command", "description": "Runs a command.", "strict": False, "parameters": {}},
    {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": _GRAMMAR},
    {"type": "local_shell"},
]


def request(items: list[dict[str, Any]]) -> dict[str, Any]:
    """A turn of the CLI."""
    return {
        "model": "mock",
        "instructions": "You are Codex.",
        "input": items,
        "tools": _TOOLS,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0199-session",
        "client_metadata": {"x-codex-installation-id": "0199-installation"},
        "text": {"verbosity": "low"},
    }


async def test_a_turn_of_codex_passes(world: World) -> None:
    """With its calls, their results and encrypted reasoning in the input: each in a chat completion's shape, streamed back."""
    text = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]}
    shell = {"type": "exec", "command": ["ls"], "env": {}, "timeout_ms": 1000, "working_directory": None}
    patched = [{"type": "input_text", "text": "Done"}]
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: read-only"}]},
        text,
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "function_call", "name": "exec_command", "arguments": "{}", "call_id": "call_a"},
        {"type": "function_call_output", "call_id": "call_a", "output": "main.py"},
        {"type": "custom_tool_call", "status": "completed", "call_id": "call_b", "name": "apply_patch", "input": "***"},
        {"type": "custom_tool_call_output", "call_id": "call_b", "output": patched},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "call_c", "status": "completed", "action": shell},
        {"type": "local_shell_call_output", "id": "call_c", "output": "{}"},
    ]
    reply = await world.ask(path=_PATH, raw=json.dumps(request(items)).encode())
    assert reply.status == 200
    assert "event: response.completed" in reply.text
    assert world.stored == []
    sent = world.backends["plain"].calls[-1].body
    roles = [one["role"] for one in sent["messages"]]
    assert roles == ["system", "developer", "user", *["assistant", "tool"] * 3]
    calls = [one["tool_calls"][0] for one in sent["messages"] if one["role"] == "assistant"]
    assert calls[0]["function"] == {"name": "exec_command", "arguments": "{}"}
    assert (calls[1]["type"], calls[1]["custom"]) == ("custom", {"name": "apply_patch", "input": "***"})
    assert json.loads(calls[2]["function"]["arguments"]) == {"command": ["ls"], "timeout_ms": 1000}
    grammar = {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: /.+/"}}
    assert sent["tools"][1] == {
        "type": "custom",
        "custom": {"name": "apply_patch", "description": "Edits files.", "format": grammar},
    }
    assert sent["tools"][2]["function"]["name"] == "local_shell"
    assert "client_metadata" not in sent  # an unknown field of a chat completion, which OpenAI refuses


async def test_tools_of_a_namespace_are_functions_of_a_chat_completion(world: World) -> None:
    """Both names are one there; the calls come back with both, and go out with one when they stand in the input."""
    look = {"type": "function", "name": "look", "description": "Looks up.", "parameters": {}}
    spaces: list[dict[str, Any]] = [
        {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [look, {**look, "name": "list"}]},
        {"type": "namespace", "name": "agents", "tools": [look]},
    ]
    called = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "agents__look", "arguments": "{}"}}
    plain = {"index": 1, "id": "call_b", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    delta = {"id": "c", "choices": [{"index": 0, "delta": {"tool_calls": [called, plain]}, "finish_reason": None}]}
    world.backends["plain"].plays(Chunk(json.dumps(delta).encode()), Finish("tool_calls"), Tokens())
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": "Look."},
        {"type": "function_call", "name": "list", "namespace": "mcp__docs__", "arguments": "{}", "call_id": "call_0"},
        {"type": "function_call_output", "call_id": "call_0", "output": "two"},
    ]
    asked = {**request(items), "tools": [*spaces, look], "stream": False}
    reply = await world.ask(path=_PATH, raw=json.dumps(asked).encode())
    first, second = reply.json["output"]
    assert (first["namespace"], first["name"], first["call_id"]) == ("agents", "look", "call_a")
    assert (second.get("namespace"), second["name"]) == (None, "look")
    sent = world.backends["plain"].calls[-1].body
    assert [one["function"]["name"] for one in sent["tools"]] == [
        "mcp__docs__look",
        "agents__look",
        "look",
        "mcp__docs__list",
    ]
    assert [one["function"]["description"] for one in sent["tools"][:2]] == ["Docs.\n\nLooks up.", "Looks up."]
    assert sent["messages"][-2]["tool_calls"][0]["function"]["name"] == "mcp__docs__list"
    choice = {"type": "function", "name": "look", "namespace": "agents"}
    await world.ask(path=_PATH, raw=json.dumps({**asked, "tool_choice": choice}).encode())
    assert world.backends["plain"].calls[-1].body["tool_choice"]["function"] == {"name": "agents__look"}
    await world.ask(path=_PATH, raw=json.dumps({**asked, "tools": [{**spaces[1], "tools": []}]}).encode())
    assert not {"tools", "tool_choice", "parallel_tool_calls"} & world.backends["plain"].calls[-1].body.keys()


async def test_tools_that_a_namespace_would_confuse_are_refused(world: World) -> None:
    """A call of `a__look` could be meant for either: the client would run the wrong one."""
    look = {"type": "function", "name": "look", "parameters": {}}
    space = {"type": "namespace", "name": "a", "tools": [look]}
    same = {**look, "name": "a__look"}, {**space, "name": "a__"}
    for tools in ([space, same[0]], [same[0], space], [space, same[1]]):
        asked = {**request([{"type": "message", "role": "user", "content": "Look."}]), "tools": tools}
        reply = await world.ask(path=_PATH, raw=json.dumps(asked).encode())
        assert (reply.status, reply.error["param"]) == (400, "tools[1]")
        assert "a__look" in reply.error["message"]


async def test_results_without_their_calls_are_refused(world: World) -> None:
    """And calls without their results, of every kind."""
    for kind in ("function_call", "custom_tool_call", "local_shell_call"):
        for items, words in (
            ([{"type": f"{kind}_output", "call_id": "call_x", "output": ""}], "No tool call found"),
            ([{"type": kind, "call_id": "call_x", "name": "f"}], "No tool output found"),
        ):
            reply = await world.ask(path=_PATH, raw=json.dumps(request(items)).encode())
            assert (reply.status, reply.error["param"]) == (400, "input")
            assert words in reply.error["message"]
            assert "call_x" in reply.error["message"]
