"""How each deployment's server is spoken to, on every surface: lengths, names, ids, and what its refusals teach."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.backends.base import BackendError
from gateway.backends.refusals import UpstreamRefusal, refusal
from tests.journey.conftest import OpenWorld
from tests.journey.test_surfaces import PATHS
from tests.world import Reply, World, deployment, unavailable

_USER = [{"role": "user", "content": "hello"}]
_LENGTHS = {
    "chat": {"messages": _USER, "max_tokens": 50},
    "newer chat": {"messages": _USER, "max_completion_tokens": 50},
    "both": {"messages": _USER, "max_tokens": 50, "max_completion_tokens": 50},
    "responses": {"input": "hello", "max_output_tokens": 50, "store": False},
    "messages": {"messages": _USER, "max_tokens": 50},
}
_SERVERS = {  # by the name of the length that they know
    "max_completion_tokens": [
        ("https://api.openai.com/v1", "gpt-4o"),
        ("https://x.openai.azure.com/openai/v1", "ours"),
        ("https://x.services.ai.azure.com/openai/v1", "ours"),
        ("http://proxy.example/v1", "gpt-5-mini"),
        ("http://proxy.example/v1", "openai/o3"),
    ],
    "max_tokens": [
        ("http://127.0.0.1:8000/v1", "llama"),
        ("http://127.0.0.1:8000/v1", "gpt-oss-120b"),
        ("https://api.mistral.ai/v1", "mistral-large"),
        ("https://api.deepseek.com/v1", "deepseek-chat"),
    ],
}


async def ask(world: World, surface: str, **fields: Any) -> Reply:
    body = {"model": "mock", **fields}
    how = {"key": body.pop("key")} if "key" in body else {}
    raw = json.dumps({"model": "mock", **body}).encode()
    return await world.ask(path=PATHS.get(surface, PATHS["chat"]), raw=raw, **how)


def _refusal(status: int, error: dict[str, Any]) -> BackendError:
    return refusal(UpstreamRefusal(status, json.dumps(error).encode()))


def _unknown(param: str | None, words: str = "") -> BackendError:
    """OpenAI's refusal of a field that a model does not know."""
    words = words or f"Unsupported parameter: '{param}' is not supported with this model."
    return _refusal(
        400,
        {"error": {"message": words, "type": "invalid_request_error", "param": param, "code": "unsupported_parameter"}},
    )


@pytest.mark.parametrize("asked", _LENGTHS)
@pytest.mark.parametrize(("name", "base_url", "model"), [(name, *one) for name, two in _SERVERS.items() for one in two])
async def test_a_length_is_said_once_in_the_servers_own_name(
    open_a_world: OpenWorld, asked: str, name: str, base_url: str, model: str
) -> None:
    """Whatever the surface calls it, and whichever of two names a chat has."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", model, base_url=base_url)]}})
    assert (await ask(world, asked, **_LENGTHS[asked])).status == 200
    lengths = {key: value for key, value in world.backends["one"].calls[0].body.items() if "tokens" in key}
    assert lengths == {name: 50}


async def test_the_operators_word_comes_before_what_is_known(open_a_world: OpenWorld) -> None:
    """A proxy before a known provider may speak otherwise."""
    own = {"base_url": "https://api.openai.com/v1", "dialect": {"length": "max_tokens", "tool_name": "[a-z]{1,12}"}}
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "gpt-5", **own)]}})
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    await ask(world, "chat", messages=_USER, max_completion_tokens=9, tools=tools)
    body = world.backends["one"].calls[0].body
    assert body["max_tokens"] == 9
    assert body["tools"][0]["function"]["name"].isalnum()


async def test_a_refused_name_of_the_length_is_said_again_by_the_other(open_a_world: OpenWorld) -> None:
    """Also where no other deployment could answer; a typed refusal of two requests of two keys teaches it for an hour."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "ours")]}})
    backend, other = world.backends["one"], await world.team()
    either, names = ["max_tokens", "max_completion_tokens"], []
    for number, key in enumerate([None, other.key, None, None]):
        if number == 3:
            world.clock.passes(3_601)
        calls, who = len(backend.calls), {} if key is None else {"key": key}
        if number != 2:
            backend.plays_once(_unknown("max_tokens"))
        content = [{"role": "user", "content": f"{number}"}]
        assert (await ask(world, "chat", messages=content, max_tokens=7, **who)).status == 200
        names.append([next(one for one in call.body if "tokens" in one) for call in backend.calls[calls:]])
    assert names == [either, either, either[1:], either]


async def test_words_of_a_refusal_decide_for_their_request_alone(open_a_world: OpenWorld) -> None:
    """They may be a client's: they teach nothing."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "ours")]}})
    backend = world.backends["one"]
    for number in range(3):
        backend.plays_once(_unknown(None, "max_tokens: Extra inputs are not permitted"))
        messages = [{"role": "user", "content": f"{number}"}]
        assert (await ask(world, "chat", messages=messages, max_tokens=7)).status == 200
    assert [next(one for one in call.body if "tokens" in one) for call in backend.calls][::2] == ["max_tokens"] * 3


@pytest.mark.parametrize(
    "error",
    [
        {"object": "error", "message": {"detail": [{"type": "extra_forbidden", "loc": ["body", "max_tokens"]}]}},
        {
            "detail": [
                {"type": "extra_forbidden", "loc": ["body", "max_tokens"], "msg": "Extra inputs are not permitted"}
            ]
        },
    ],
)
async def test_a_validation_error_names_its_field(open_a_world: OpenWorld, error: dict[str, Any]) -> None:
    """The place of a 422 is as good as a `param`."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "ours")]}})
    world.backends["one"].plays_once(_refusal(422, error))
    assert (await ask(world, "messages", messages=_USER, max_tokens=7)).status == 200
    assert world.backends["one"].calls[1].body["max_completion_tokens"] == 7


async def test_a_clients_own_field_is_never_left_out(open_a_world: OpenWorld) -> None:
    """A refusal of a client's own field, or of a value, is the client's."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "ours"), deployment("two", "ours")]}})
    large = {
        "message": "max_tokens is too large",
        "type": "invalid_request_error",
        "param": "max_tokens",
        "code": "invalid_value",
    }
    for error, fields in ((_unknown("seed"), {"seed": 1}), (_refusal(400, {"error": large}), {"max_tokens": 10_000})):
        for backend in world.backends.values():
            backend.calls.clear()
            backend.plays(error)
        assert (await ask(world, "chat", messages=_USER, **fields)).status == 400
        assert sum(len(backend.calls) for backend in world.backends.values()) == 1


@pytest.mark.parametrize(
    ("surface", "backend"), [("messages", "openai"), ("responses", "openai"), ("messages", "anthropic")]
)
async def test_a_refusal_of_a_translation_goes_on(open_a_world: OpenWorld, surface: str, backend: str) -> None:
    """What the gateway made of a request is not the client's to mend; the next deployment gets it."""
    two = deployment("two", backend=backend)
    models = {"mock": {"policy": "cheapest", "deployments": [deployment("one", usd=(0, 0)), two]}}
    world = await open_a_world(models=models)
    world.backends["one"].plays(_refusal(400, {"error": {"message": "No.", "param": None}}))
    reply = await ask(world, surface, **_LENGTHS[surface])
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "two")


async def test_names_and_ids_beyond_a_servers_limits_are_mapped(open_a_world: OpenWorld) -> None:
    """In tools, choices and histories; those that fit stay, and a call and its result stay a pair."""
    server = {"base_url": "https://api.openai.com/v1"}
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", "gpt-4o", **server)]}})
    names = ["n" * 65, "n" * 66, "a.b", "fits"]
    calls = [
        {"id": f"{name}:{'i' * 60}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for name in names
    ]
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "1"} for call in calls]
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in names]
    choice = {"type": "function", "function": {"name": "a.b"}}
    messages = [*_USER, {"role": "assistant", "content": None, "tool_calls": calls}, *results]
    await ask(world, "chat", messages=messages, tools=tools, tool_choice=choice)
    body = world.backends["one"].calls[0].body
    sent = [tool["function"]["name"] for tool in body["tools"]]
    called = body["messages"][1]["tool_calls"]
    assert [call["function"]["name"] for call in called] == sent
    assert body["tool_choice"]["function"]["name"] == sent[2]
    assert sent[3] == "fits"
    assert len(set(sent)) == 4
    assert all(len(name) <= 64 and "." not in name for name in sent)
    assert [call["id"] for call in called] == [one["tool_call_id"] for one in body["messages"][2:]]
    assert all(len(call["id"]) <= 40 for call in called)


async def test_one_failing_name_rests_no_other_name(open_a_world: OpenWorld) -> None:
    """An alias that takes every name has a health for each of its models."""
    world = await open_a_world(models={"o/*": {"deployments": [deployment("any", "*")]}})
    world.backends["any"].plays(unavailable())
    for number in range(4):
        assert (await world.ask(f"hi {number}", model="o/bad")).status == 503
    world.backends["any"].plays("good")
    assert (await world.ask("hi", model="o/good")).status == 200


@pytest.mark.parametrize(("limit", "sent"), [(1_000, 1_000), (40_000, 32_000), (None, 32_000)])
async def test_a_messages_bound_beyond_the_alias_is_what_it_can(
    open_a_world: OpenWorld, limit: int | None, sent: int
) -> None:
    """Anthropic's clients must set a length, and ask the same of every model; a chat's length stays a wish."""
    small = [deployment("one", output_tokens_max=limit), deployment("two", output_tokens_max=limit and limit // 2)]
    world = await open_a_world(models={"mock": {"deployments": small}})
    reply = await ask(world, "messages", messages=_USER, max_tokens=32_000)
    (body,) = [call.body for backend in world.backends.values() for call in backend.calls]
    assert (reply.status, body["max_tokens"]) == (200, sent)
    assert reply.headers.get("x-sameway-cut-at") == (None if sent == 32_000 else str(sent))
    assert (await ask(world, "chat", messages=_USER, max_tokens=32_000)).status == (400 if sent == 1_000 else 200)


async def test_a_messages_bound_leaves_room_for_its_prompt(open_a_world: OpenWorld) -> None:
    """A context has the prompt and the answer together."""
    world = await open_a_world(models={"mock": {"deployments": [deployment("one", context_tokens_max=2_000)]}})
    reply = await ask(world, "messages", messages=_USER, max_tokens=32_000)
    assert reply.status == 200
    assert 1_500 < world.backends["one"].calls[0].body["max_tokens"] < 2_000


async def test_a_bound_that_is_lowered_goes_out_in_anthropics_own_shape(open_a_world: OpenWorld) -> None:
    """A message that leaves as it came has the length that the deployment can write."""
    one = deployment("one", "claude-x", backend="anthropic", output_tokens_max=1_000)
    world = await open_a_world(models={"mock": {"deployments": [one]}})
    reply = await ask(world, "messages", messages=_USER, max_tokens=32_000)
    (call,) = world.backends["one"].calls
    assert call.native is not None
    assert (reply.status, reply.headers["x-sameway-cut-at"], call.native.tokens_max) == (200, "1000", 1_000)


@pytest.mark.parametrize(
    ("model", "fields", "waits"),
    [
        ("gpt-5", {}, [(60.0, 600.0)]),
        ("gpt-5", {"idle_timeout_ms": 90_000, "ttft_timeout_ms": 7_000}, [(7.0, 90.0)]),
        ("gpt-4o", {}, [(10.0, 60.0)]),
    ],
)
async def test_a_model_that_reasons_in_silence_has_the_time(
    open_a_world: OpenWorld, model: str, fields: dict[str, Any], waits: list[tuple[float, float]]
) -> None:
    """Also where others wait to answer, but for less; the operator's word comes first."""
    models = {"mock": {"deployments": [deployment("one", model, **fields), deployment("two", usd=(9, 9))]}}
    world = await open_a_world(models=models)
    await ask(world, "chat", messages=_USER)
    (call,) = world.backends["one"].calls
    assert [(round(call.ttft_timeout_s), call.idle_timeout_s)] == waits
