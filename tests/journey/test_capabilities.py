"""What a model can do: listed for clients, and followed by routing, for an alias of a local engine and a managed model."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.backends.base import BackendUnfit
from gateway.backends.refusals import error_body
from gateway.journey.turn import arrive, read_turn
from gateway.wire import types
from tests.world import Load, World

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
IMAGE = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,eA=="}}]}]


async def test_models_say_what_they_can_do(world: World) -> None:
    """The union of an alias's deployments, in OpenRouter's fields and in ours; what is assumed is called so."""
    async with world.client() as client:
        listed = {one.id: one.model_dump() for one in (await client.models.list()).data}
        able = (await client.models.retrieve("able")).model_dump()
    assert listed["able"] == able
    assert {"tools", "json_schema", "vision", "reasoning", "prefill"} <= set(able["capabilities"])
    assert {"tools", "tool_choice", "structured_outputs", "reasoning_effort"} <= set(able["supported_parameters"])
    assert able["architecture"] == {"input_modalities": ["text", "file", "image"], "output_modalities": ["text"]}
    assert (able["context_length"], able["are_capabilities_assumed"]) == (9_000, False)
    engine = listed["engine"]
    assert set(engine["capabilities"]) == {
        "n", "logprobs", "tools", "json_object", "json_schema", "completions", "prefill",
    }  # fmt: skip
    assert engine["architecture"]["input_modalities"] == ["text"]
    assert (listed["simple"]["capabilities"], listed["simple"]["supported_parameters"]) == ([], [])
    assert listed["mock"]["are_capabilities_assumed"]
    assert listed["mock"]["architecture"]["output_modalities"] == ["text"]
    world.backends["engine"].state = Load(may_think=True, context_tokens_max=512)
    async with world.client() as client:
        thinks = (await client.models.retrieve("engine")).model_dump()
    assert thinks["capabilities"] == sorted([*engine["capabilities"], "reasoning"])
    assert thinks["context_length"] == 512


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({"tools": TOOLS, "tool_choice": "required"}, "own"),
        ({"response_format": SCHEMA}, "own"),
        ({"response_format": {"type": "json_object"}}, "own"),
        ({"messages": IMAGE}, "managed"),
        ({"reasoning_effort": "minimal"}, "own"),
        ({"reasoning_effort": "high"}, "managed"),
    ],
)
async def test_a_request_goes_where_it_can_be_answered(world: World, asked: dict[str, Any], first: str) -> None:
    """Tools and schemas to the local engine too, images and an effort of reasoning to the model that has them."""
    reply = await world.ask(model="able", **asked)
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, first)


async def test_reasoning_is_preferred_and_not_needed(world: World) -> None:
    """Where the model that reasons is down the other one answers, and an engine whose model thinks is as good."""
    world.backends["managed"].is_down("it is away")
    reply = await world.ask(model="able", reasoning_effort="high")
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "own")
    world.backends["managed"].is_up()
    world.backends["own"].state = Load(may_think=True)
    reply = await world.ask("think", model="able", reasoning_effort="high")
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "own")


async def test_a_schema_that_the_engine_does_not_hold_goes_on(world: World) -> None:
    """Its refusal comes before a token, and the managed model answers."""
    message = "the schema cannot be held: the engine cannot hold the keyword not (#/not)"
    body = error_body(message, None, "response_format", "unsupported_grammar")
    world.backends["own"].plays(BackendUnfit(message, status=400, body=body))
    reply = await world.ask(model="able", response_format=SCHEMA)
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "managed")


@pytest.mark.parametrize(
    ("kind", "body", "alias"),
    [
        (types.MODERATION, {"input": "x"}, "omni-moderation-latest"),
        (types.IMAGE, {"prompt": "x"}, "gpt-image-1.5"),
        (types.IMAGE_EDIT, {"prompt": "x", "image": "x"}, "gpt-image-1.5"),
        (types.VARIATION, {"image": "x"}, "dall-e-2"),
    ],
)
def test_what_names_no_model_asks_for_openais_default(kind: types.Kind, body: dict[str, Any], alias: str) -> None:
    """As OpenAI's clients leave `model` out of these; another one is kept."""
    assert read_turn(json.dumps(body).encode(), {}, arrive(kind.name), kind).alias == alias
    named = {**body, "model": "own"}
    assert read_turn(json.dumps(named).encode(), {}, arrive(kind.name), kind).alias == "own"
