"""Requests of the Responses API that no chat completion can say: to a server that has that API, and back."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.journey.conftest import OpenWorld
from tests.journey.responses_server import CALL, PAGE, REASONING, SEARCH, TEXT, Server, response, run_responses_server
from tests.journey.test_codex import request as codex
from tests.world import TOO_DEEP, Reply, World, deployment

_PATH = "/v1/responses"
_SEARCHES = {"type": "web_search", "external_web_access": False}
_FUNCTION = {"type": "function", "name": "lookup", "description": "Looks up.", "strict": False, "parameters": {}}
_SPACE = {"type": "namespace", "name": "mcp__docs__", "description": "Docs.", "tools": [_FUNCTION]}
_PRICE = {
    "input_usd_per_mtok": 1.0,
    "output_usd_per_mtok": 2.0,
    "cached_input_usd_per_mtok": 0.1,
    "tool_call_usd": 0.01,
}
_ITEMS: list[dict[str, Any]] = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "sandbox: read-only"}]},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Fix the bug."}]},
    {"type": "reasoning", "id": "rs_up0", "summary": [], "content": None, "encrypted_content": "gAAAA"},
    {"type": "web_search_call", "id": "ws_up0", "status": "completed", "action": {"type": "search", "query": "bug"}},
    {
        "type": "local_shell_call",
        "call_id": "call_c",
        "status": "completed",
        "action": {"type": "exec", "command": ["ls"]},
    },
    {"type": "local_shell_call_output", "id": "call_c", "output": "{}"},
]


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    with run_responses_server() as running:
        yield running


@pytest.fixture
async def world(open_a_world: OpenWorld, server: Server) -> World:
    """Of the alias `mock` one deployment has the API, and may search."""
    able = deployment("able", "gpt-up", capabilities=["responses", "tools"], allow_fields=["web_search"])
    made = await open_a_world(
        models={"mock": {"deployments": [{**able, "price": _PRICE}]}, "chat": {"deployments": [deployment("plain")]}}
    )
    await made.connects("able", server.url)
    return made


def codexs(**more: Any) -> dict[str, Any]:
    """A turn of the CLI with its defaults."""
    asked = codex(_ITEMS)
    return {**asked, "tools": [*asked["tools"], _SEARCHES, _SPACE], **more}


async def ask(world: World, body: dict[str, Any], **how: Any) -> Reply:
    return await world.ask(path=_PATH, raw=json.dumps(body).encode(), **how)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_codex_goes_out_and_comes_back_as_it_is(world: World, server: Server, is_stream: bool) -> None:
    """Byte for byte, whole and streamed, cached, and priced with the search but not the page that was opened."""
    server.answer = response(REASONING, SEARCH, PAGE, TEXT, CALL)
    asked = codexs(stream=is_stream)
    reply = await ask(world, asked)
    assert reply.status == 200, reply.text
    assert server.seen == [("/v1/responses", {**asked, "model": "gpt-up"})]
    assert reply.body == server.sent[0]
    assert (await ask(world, asked)).body == reply.body
    assert (len(server.seen), world.stored) == (1, [])
    (row,) = await world.ledger()
    assert (
        row.usage.prompt_tokens,
        row.usage.completion_tokens,
        row.usage.cached_tokens,
        row.usage.reasoning_tokens,
    ) == (1000, 50, 200, 20)
    assert row.cost_microusd == 800 + 20 + 100 + 10_000
    assert (row.kind, row.usage_estimated) == ("responses", False)


async def test_what_is_kept_is_continued_and_referred_to(world: World, server: Server) -> None:
    """Under the gateway's ids, whole and streamed; the provider gets its own ids back, and no reasoning it cannot read."""
    server.answer = response(REASONING, SEARCH, TEXT, CALL)
    client = world.client()
    first = await client.responses.create(model="mock", input="north?", tools=[_SEARCHES, _SPACE])  # type: ignore[list-item]
    assert (first.store, first.previous_response_id) == (True, None)  # type: ignore[attr-defined]
    assert server.seen[0][1]["store"] is False
    kept = await client.responses.retrieve(first.id)
    assert kept.to_dict() == first.to_dict()
    assert [item.id for item in kept.output] == [
        f"{one}_{first.id[5:]}_0_up{n}" for one, n in zip(("rs", "ws", "msg", "fc"), (1, 2, 4, 5), strict=True)
    ]
    done = {"type": "function_call_output", "call_id": "call_up5", "output": "ok"}
    more: dict[str, Any] = {"model": "mock", "tools": [_SEARCHES]}
    stream = await client.responses.create(**more, previous_response_id=first.id, input=[done], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response  # type: ignore[union-attr]
    assert {event.item_id for event in events if hasattr(event, "item_id")} <= {item.id for item in last.output}
    sent = server.seen[1][1]
    assert "previous_response_id" not in sent
    assert sent["input"][1:] == [REASONING, SEARCH, TEXT, CALL, {**done}]
    assert "id" not in sent["input"][0]
    assert (await client.responses.retrieve(last.id)).to_dict() == last.to_dict()
    referred = [{"type": "item_reference", "id": item.id} for item in last.output[:3]]
    await client.responses.create(**more, input=[*referred, {"role": "user", "content": "and?"}], store=False)  # type: ignore[list-item]
    assert server.seen[2][1]["input"][:3] == [REASONING, SEARCH, TEXT]


async def test_it_runs_in_the_background_and_in_conversations(world: World, server: Server) -> None:
    """As other responses do: followed by numbers without gaps, and its items become the conversation's."""
    server.answer = response(SEARCH, TEXT)
    client = world.client()
    talk = await client.conversations.create()
    more: dict[str, Any] = {
        "model": "mock",
        "input": "north?",
        "tools": [_SEARCHES],
        "background": True,
        "conversation": talk.id,
    }
    stream = await client.responses.create(**more, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    last = events[-1].response  # type: ignore[union-attr]
    assert (last.status, last.background, (await client.responses.retrieve(last.id)).status) == (
        "completed",
        True,
        "completed",
    )
    await client.responses.create(model="mock", input="and?", tools=[_SEARCHES], conversation=talk.id)  # type: ignore[list-item]
    assert server.seen[1][1]["input"][1:3] == [SEARCH, TEXT]


@pytest.mark.parametrize("depth", [TOO_DEEP, 30_000])
async def test_what_is_nested_too_deeply_is_said_to_be(world: World, server: Server, depth: int) -> None:
    """In a tool, an item or a field of the provider's own; nothing goes out."""
    deep = "[" * depth + "]" * depth
    for fields in (
        f'"input": "x", "tools": [{{"type": "web_search", "odd": {deep}}}]',
        f'"input": [{{"type": "web_search_call", "action": {deep}}}]',
        f'"input": "x", "tools": [{{"type": "web_search"}}], "odd": {deep}',
    ):
        refused = await world.ask(path=_PATH, raw=f'{{"model": "mock", {fields}}}'.encode())
        assert (refused.status, refused.error["code"]) == (400, "invalid_json")
        assert "nested too deeply" in refused.error["message"]
    assert server.seen == []


@pytest.mark.parametrize("is_background", [False, True])
async def test_what_authorizes_calls_of_mcp_servers_is_nowhere_kept(
    open_a_world: OpenWorld, server: Server, is_background: bool
) -> None:
    """Queued, in progress or ended, in the database and in the events, also where the provider repeats it; it goes out."""
    able = deployment("able", "gpt-up", capabilities=["responses", "tools"], allow_fields=["mcp"])
    able["price"] = {**_PRICE, "factors": {"mcp": 1}}
    world = await open_a_world(models={"mock": {"deployments": [able]}})
    await world.connects("able", server.url)
    secrets = {"authorization": "oauth-secret", "headers": {"X-Key": "header-secret"}}
    tools = [{"type": "mcp", "server_label": "d", "server_url": "https://example.com", **secrets}]
    tools += [{**_SPACE, "tools": [{**tools[0]}, _FUNCTION]}]
    server.answer = response(TEXT, tools=tools)
    told = ""
    for is_stream in (False, True):
        body = {"model": "mock", "input": f"north {is_stream}?", "tools": tools, "stream": is_stream}
        reply = await ask(world, {**body, "background": is_background})
        assert reply.status == 200, reply.text
        told += reply.text
    assert [one["tools"] for _, one in server.seen] == [tools] * 2
    found = [await world.client().responses.retrieve(id) for id in {*re.findall("resp_[0-9a-f]{32}", told)}]
    assert len(found) == 2
    assert {one.tools[0].server_label for one in found} == {"d"}  # type: ignore[union-attr]
    kept = [told.encode(), *(str(one.to_dict(warnings=False)).encode() for one in found)]
    kept += [file.read_bytes() for file in Path(world.sql_url.removeprefix("sqlite:///")).parent.glob("*.db*")]
    for key in await world.redis.keys("sameway:background:*"):
        kept += await world.redis.lrange(key, 0, -1)  # type: ignore[misc]
    assert b"server_label" in b"".join(kept[3:])
    assert b"-secret" not in b"".join(kept)


async def test_a_stream_that_breaks_off_says_so_and_is_not_kept(world: World, server: Server) -> None:
    """Also where a part of it was complete; a failed one has the provider's words; both are charged what was said."""
    server.answer = response(SEARCH, TEXT)
    server.events_max = 8
    reply = await ask(world, codexs())
    assert reply.body.startswith(server.sent[0])
    last = json.loads(reply.text.split("data: ")[-1])
    assert (last["type"], last["sequence_number"], last["error"]["code"]) == ("error", 8, "upstream_broken")
    server.events_max = None
    server.answer = response(status="failed", error={"code": "rate_limit_exceeded", "message": "Slow down."})
    failed = await ask(world, codexs(stream=False, input="again", tools=[_SEARCHES]))
    assert (failed.status, failed.error["code"]) == (429, "upstream_overloaded"), failed.text
    assert world.stored == []
    (row,) = await world.ledger()
    assert 3 < row.usage.completion_tokens < 100  # not a third of all bytes
    server.answer = response(TEXT, status="incomplete", incomplete_details={"reason": "max_output_tokens"})
    for _ in range(2):
        assert (await ask(world, codexs(stream=False))).cache == "miss"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "code_interpreter", "container": {"type": "auto"}}]}, "tools[0].type"),
        (
            {"tools": [_FUNCTION, {**_SPACE, "tools": [{"type": "mcp", "server_url": "https://x"}]}]},
            "tools[1].tools[0].type",
        ),
        ({"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}, "tools[0].environment"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_what_has_no_price_or_no_owner_is_refused_by_its_name(
    world: World, server: Server, fields: dict[str, Any], param: str
) -> None:
    """At the deployment with the API, in a namespace too."""
    reply = await ask(world, codexs(**fields))
    assert (reply.status, reply.error["param"]) == (400, param), reply.text
    assert server.seen == []


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [_FUNCTION, _SEARCHES]}, "tools[1].type"),
        ({"tools": [_FUNCTION, {**_SPACE, "tools": [{"type": "mcp", "server_url": "https://x"}]}]}, "tools[1].type"),
        ({"tools": [_SPACE, {**_SPACE, "name": "x", "tools": [{"type": "function"}]}]}, "tools[1].name"),
        ({"tools": [{**_SPACE, "tools": [{"type": "function", "name": None}]}]}, "tools[0].name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": _ITEMS}, "input[3].type"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
    ],
)
async def test_without_such_a_deployment_the_tool_is_named(world: World, fields: dict[str, Any], param: str) -> None:
    """As no candidate can serve the request; encrypted reasoning alone is left out."""
    plain = {**codex([_ITEMS[1], _ITEMS[2]]), "model": "chat"}
    assert (await ask(world, plain)).status == 200
    reply = await ask(world, {**plain, **fields})
    assert (reply.status, reply.error["param"]) == (400, param), reply.text


async def test_a_hard_budget_holds_for_it(world: World, server: Server) -> None:
    """The length that the budget has room for goes out under the API's own name, and a chat's names change nothing."""
    team = await world.team()
    await world.budget(team, 700_000)
    reply = await ask(world, codexs(stream=False, max_tokens=10**6, max_completion_tokens=10**6), key=team.key)
    assert reply.status == 200, reply.text
    sent = server.seen[0][1]
    assert sent["max_output_tokens"] == 4096
    assert not {"max_tokens", "max_completion_tokens"} & sent.keys()
    dear = codexs(stream=False, max_output_tokens=10**6)
    assert (await ask(world, dear, key=team.key)).status == 429


async def test_an_answer_without_a_status_is_kept_as_completed(world: World, server: Server) -> None:
    """Servers that imitate the API may leave it out of a whole answer."""
    server.answer = response(TEXT)
    del server.answer["status"]
    kept = await world.client().responses.create(model="mock", input="north?", tools=[_SEARCHES])  # type: ignore[list-item]
    assert (await world.client().responses.retrieve(kept.id)).status == "completed"
