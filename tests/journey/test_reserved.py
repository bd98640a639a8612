"""Fields and tools that belong to the operator: refused by name, or sent where a deployment allows them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.reserved import FIELDS, OTHER_TOOLS, TOOLS
from tests.journey.conftest import OpenWorld
from tests.world import World, deployment

_CHAT, _TEXT, _RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
_FUNCTION = {"type": "function", "function": {"name": "look", "parameters": {}}}


_ASKED: dict[str, dict[str, Any]] = {
    _CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    _TEXT: {"prompt": "hello"},
    _RESPONSES: {"input": "hello"},
}


@pytest.mark.parametrize("path", [_CHAT, _TEXT, _RESPONSES])
async def test_a_reserved_field_is_refused_by_name(world: World, path: str) -> None:
    """On every surface, before anything is sent; the message names the way to allow it."""
    for name in FIELDS:
        body = {"model": "mock", **_ASKED[path], name: "priority"}
        reply = await world.ask(path=path, raw=json.dumps(body).encode())
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, name, "field_not_allowed")
        assert f"list `{name}` in the deployment's `allow_fields`" in reply.error["message"]
    assert world.backends["plain"].calls == []


@pytest.mark.parametrize("alias", ["plain", "engine"])
@pytest.mark.parametrize("tier", ["auto", "default", "flex", None])
async def test_the_default_tier_and_below_pass(world: World, alias: str, tier: str | None) -> None:
    """They cost no more than no tier at all."""
    model = {"plain": "mock"}.get(alias, alias)
    assert (await world.ask(model=model, service_tier=tier)).status == 200
    refused = await world.ask(model=model, service_tier=["priority"])
    assert (refused.status, refused.error["param"]) == (400, "service_tier")


async def test_no_cached_answer_hides_a_refusal(world: World) -> None:
    """`service_tier` is no part of the cache's key; the answer to a request without it does not open the door."""
    assert (await world.ask()).status == 200
    assert (await world.ask(service_tier="priority")).status == 400


@pytest.mark.parametrize(
    ("tool", "name", "param"),
    [
        ({"type": "web_search"}, "web_search", "tools[0].type"),
        ({"type": "web_search_preview_2025_03_11"}, "web_search", "tools[0].type"),
        ({"type": "web_search_20250305", "name": "web_search"}, "web_search", "tools[0].type"),
        ({"type": "file_search", "vector_store_ids": ["vs_1"]}, "file_search", "tools[0].type"),
        ({"type": "code_interpreter", "container": {"type": "auto"}}, "code_interpreter", "tools[0].type"),
        ({"type": "computer_use_preview"}, "computer_use", "tools[0].type"),
        ({"type": "computer_20250124", "name": "computer"}, "computer", "tools[0].type"),
        ({"type": "mcp", "server_url": "https://example.com"}, "mcp", "tools[0].type"),
        ({"type": "image_generation"}, "image_generation", "tools[0].type"),
        ({"type": "a_tool_of_tomorrow"}, OTHER_TOOLS, "tools[0].type"),
        ({"googleSearch": {}}, "google_search", "tools[0].googleSearch"),
        ({"type": "function", "googleSearch": {}}, "google_search", "tools[0].googleSearch"),
        ({"systemTool": {"name": "nova_grounding"}}, OTHER_TOOLS, "tools[0].systemTool"),
    ],
)
async def test_a_tool_that_the_provider_runs_is_refused_by_name(
    open_a_world: OpenWorld, tool: dict[str, Any], name: str, param: str
) -> None:
    """Beside a function, too; a deployment that allows it gets it as the client wrote it."""
    models = {
        "shut": {"deployments": [deployment("shut")]},
        "open": {"deployments": [deployment("closed", usd=(0, 0)), deployment("open", allow_fields=[name])]},
    }
    world = await open_a_world(models=models)
    reply = await world.ask(model="shut", tools=[_FUNCTION, tool])
    assert reply.status == 400
    assert reply.error["param"] == param.replace("0", "1")
    assert f"list `{name}` in" in reply.error["message"]
    assert (await world.ask(model="shut", tools=[_FUNCTION])).status == 200
    allowed = await world.ask(model="open", tools=[tool])
    assert (allowed.status, allowed.headers["x-sameway-backend"]) == (200, "open")
    assert world.backends["open"].calls[-1].body["tools"] == [tool]
    assert world.backends["closed"].calls == []


async def test_the_responses_api_refuses_tools_by_the_same_rule(open_a_world: OpenWorld) -> None:
    """The refusal names the type and what there is; an allowed tool is sent in the chat completion as it is."""
    models = {
        "shut": {"deployments": [deployment("shut")]},
        "open": {"deployments": [deployment("open", allow_fields=["web_search_preview"])]},
    }
    world = await open_a_world(models=models)
    search = {"type": "web_search", "search_context_size": "low"}
    refused = await world.ask(path=_RESPONSES, model="shut", input="hello", tools=[search])
    assert (refused.status, refused.error["param"]) == (400, "tools[0].type")
    assert "`web_search`" in refused.error["message"]
    assert "tools of the type `function`" in refused.error["message"]
    assert (await world.ask(path=_RESPONSES, model="open", input="hello", tools=[search])).status == 200
    assert world.backends["open"].calls[-1].body["tools"] == [search]


async def test_a_deployment_that_allows_all_of_them_is_chosen(open_a_world: OpenWorld) -> None:
    """Others are no candidates; where each part is allowed somewhere and never together, the refusal says so."""
    models = {
        "both": {
            "policy": "cheapest",
            "deployments": [
                deployment("none", usd=(0, 0)),
                deployment("one", usd=(1, 1), allow_fields=["priority"]),
                deployment("other", usd=(2, 2), allow_fields=["models", "route"]),
            ],
        }
    }
    world = await open_a_world(models=models)
    assert (await world.ask(model="both")).headers["x-sameway-backend"] == "none"
    assert (await world.ask(model="both", priority=-1)).headers["x-sameway-backend"] == "one"
    world.backends["one"].is_down("a test")
    resting = await world.ask("again", model="both", priority=-1)
    assert (resting.status, resting.error["code"]) == (503, "no_deployment_available")
    reply = await world.ask(model="both", models=["x"], route="fallback")
    assert reply.headers["x-sameway-backend"] == "other"
    assert world.backends["other"].calls[-1].body["route"] == "fallback"
    assert (await world.ask(model="both", models=["x"], priority=1)).error["param"] in ("models", "priority")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"extra_body": {"priority": 1}}, "extra_body"),
        ({"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs.chat_template"),
        ({"functions": [{"googleSearch": {}}]}, "functions[0].googleSearch"),
    ],
)
async def test_nested_forms_are_refused(world: World, fields: dict[str, Any], param: str) -> None:
    """A reserved field inside another one is a reserved field."""
    reply = await world.ask(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)


async def test_what_is_not_reserved_passes(world: World) -> None:
    """Nulls, unknown fields, OpenAI's own and sampling parameters of servers are sent as they came."""
    fields = {"priority": None, "top_k": 3, "metadata": {"a": "b"}, "chat_template_kwargs": {"enable_thinking": False}}
    fields |= {"tools": [{**_FUNCTION, "cache_control": {"type": "ephemeral"}}], "an_unknown": 1, "memory": "x"}
    assert (await world.ask(**fields)).status == 200
    assert fields.items() <= world.backends["plain"].calls[0].body.items()


def test_every_name_has_its_effect() -> None:
    """No name is both a field and a tool."""
    assert not FIELDS.keys() & TOOLS.keys()
