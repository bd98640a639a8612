"""Fields and tools that belong to the operator: refused by name, or sent where a deployment allows them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.journey.turn import arrive, turn_of
from gateway.reserved import FIELDS, OTHER_TOOLS, TOOLS, foreign_url
from gateway.wire.forms import FormFiles
from gateway.wire.types import TRANSCRIPTION
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
        ({"input": "x", "tools": [{"type": "local_shell"}]}, "tools[0].type"),
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


@pytest.mark.parametrize("given", [["x"], "x", 1, True, [{"chat_template": "{{ x }}"}]])
async def test_another_type_opens_no_door(world: World, given: Any) -> None:
    """A field whose parts decide is refused as a whole where it is of a type that has no such parts."""
    for name in ("chat_template_kwargs", "modalities", "prompt_cache_retention", "service_tier"):
        reply = await world.ask(**{name: given})
        assert (reply.status, reply.error["param"]) == (400, name)
    functions = await world.ask(functions={"googleSearch": {}})
    assert (functions.status, functions.error["param"]) == (400, "functions")
    assert world.backends["plain"].calls == []


async def test_sounds_are_asked_of_those_that_make_them(open_a_world: OpenWorld) -> None:
    """By `modalities` alone, too; images are another price, and need the operator's word."""
    models = {
        "both": {
            "deployments": [
                deployment("text", usd=(0, 0), capabilities=[]),
                deployment("sound", usd=(1, 1), capabilities=["audio"]),
            ]
        }
    }
    world = await open_a_world(models=models)
    asked = await world.ask(model="both", modalities=["text", "audio"])
    assert asked.headers["x-sameway-backend"] == "sound"
    assert (await world.ask("again", model="both", modalities=["text"])).headers["x-sameway-backend"] == "text"
    assert (await world.ask(model="both", modalities=["text", "image"])).error["code"] == "field_not_allowed"


_PICTURE = "https://pictures.example.com/a.png"


def _shown(part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, part]}]


_PARTS = [
    {"type": "image_url", "image_url": {"url": "URL"}},
    {"type": "image_url", "image_url": "URL"},
    {"image_url": {"url": "URL"}},
    {"type": "video_url", "video_url": {"url": "URL"}},
    {"type": "text", "text": "x", "audio_url": ["URL"]},
]


def _part(part: Any, url: str) -> Any:
    return json.loads(json.dumps(part).replace("URL", url.replace("\\", "\\\\")))


@pytest.mark.parametrize("part", _PARTS)
@pytest.mark.parametrize(
    "base_url", ["http://10.1.2.3:8000/v1", "http://vllm:8000/v1", "http://a.svc.cluster.local/v1"]
)
async def test_an_own_server_fetches_from_listed_hosts_alone(
    open_a_world: OpenWorld, base_url: str, part: dict[str, Any]
) -> None:
    """It would reach into its own network for a client; whatever a part calls itself, a data: URL passes."""
    own = {"base_url": base_url, "capabilities": ["vision"]}
    models = {
        "own": {"deployments": [deployment("own", **own)]},
        "listed": {"deployments": [deployment("listed", **own, image_hosts=["pictures.example.com", "*.cdn.example"])]},
        "public": {"deployments": [deployment("public", capabilities=["vision"])]},
    }
    world = await open_a_world(models=models)
    for url in (
        _PICTURE,
        "http://169.254.169.254/latest",
        "file:///etc/passwd",
        "HTTP://localhost/",
        " http://10.0.0.1/",
    ):
        reply = await world.ask(model="own", messages=_shown(_part(part, url)))
        assert (reply.status, reply.error["code"]) == (400, "url_not_allowed")
        assert reply.error["param"].startswith("messages[0].content[1].")
    for url in (
        "http://pictures.example.com@10.0.0.1/",
        "http://10.0.0.1\\@pictures.example.com/",
        "http://a.b.cdn.example/",
    ):
        assert (await world.ask(model="listed", messages=_shown(_part(part, url)))).status == 400
    for model, url in (
        ("listed", _PICTURE),
        ("listed", "https://a.cdn.example/b"),
        ("public", _PICTURE),
        ("own", "data:,x"),
    ):
        assert (await world.ask(model=model, messages=_shown(_part(part, url)))).status == 200, (model, url)
    assert world.backends["own"].calls[-1].body["messages"][0]["content"][1] == _part(part, "data:,x")


async def test_an_own_server_is_not_reached_by_another_api_or_a_fallback(open_a_world: OpenWorld) -> None:
    """The Responses API, Anthropic's messages and an alias that stands in are refused alike."""
    own = deployment("own", base_url="http://10.1.2.3/v1", capabilities=["vision"])
    down = deployment("down", capabilities=["vision"])
    models = {"own": {"deployments": [own]}, "down": {"deployments": [down], "fallbacks": ["own"]}}
    world = await open_a_world(models=models)
    shown = [{"role": "user", "content": [{"type": "input_image", "image_url": _PICTURE}]}]
    assert (await world.ask(path=_RESPONSES, model="own", input=shown)).error["code"] == "url_not_allowed"
    block = {"type": "image", "source": {"type": "url", "url": _PICTURE}}
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": [block]}]}
    assert (await world.ask(path="/v1/messages", model="own", **asked)).status == 400
    world.backends["down"].is_down("a test")
    assert (await world.ask(model="down", messages=_shown(_part(_PARTS[0], _PICTURE)))).status >= 400
    assert world.backends["own"].calls == []


def test_the_fields_of_a_form_are_searched_for_urls(tmp_path: Path) -> None:
    """Some servers of transcriptions fetch the file that a field names; a form has no JSON to search first."""
    fields = {"model": "own", "file": {"bytes": 9}, "file_url": "http://169.254.169.254/latest"}
    with FormFiles(tmp_path) as upload:
        turn = turn_of(fields, b"", {}, arrive("transcriptions"), TRANSCRIPTION, upload=upload)
    assert turn.demand.may_name_urls
    assert foreign_url(turn.body, ()) == "file_url"
