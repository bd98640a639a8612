"""Aliases that take every name: where a name goes, what it costs, and what an attacker can do with names."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gateway.settings import Settings
from tests.journey.conftest import OpenWorld
from tests.world import denied, deployment

_OPENAI = {"backend": "openai", "base_url": "https://api.openai.com/v1", "model": "*"}
MODELS: dict[str, Any] = {
    "exact": {"deployments": [deployment("exact")]},
    "*": {"deployments": [{"name": "any", **_OPENAI}]},
    "openai/*": {"deployments": [{"name": "openai", **_OPENAI}]},
    "openai/ft/*": {"deployments": [{"name": "tuned", **_OPENAI, "model": "ft:*"}]},
}


@pytest.mark.parametrize(
    ("asked", "alias", "name", "upstream"),
    [
        ("exact", "exact", "exact", ""),
        ("gpt-4o", "*", "any", "gpt-4o"),
        ("openai/gpt-4o", "openai/*", "openai", "gpt-4o"),
        ("openai/ft/x", "openai/ft/*", "tuned", "ft:x"),
        ("other/gpt-4o", "*", "any", "other/gpt-4o"),
    ],
)
async def test_a_name_goes_to_the_longest_prefix(
    open_a_world: OpenWorld, asked: str, alias: str, name: str, upstream: str
) -> None:
    """An exact alias comes first, then the longest prefix; the rest of the name is the provider's model."""
    world = await open_a_world(models=MODELS)
    reply = await world.ask(model=asked)
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, name)
    assert world.backends[name].calls[0].model == upstream
    record = await world.record(reply)
    assert (record.request.alias, record.request.model) == (alias, "" if asked == alias else asked)
    assert [row.alias for row in await world.ledger()] == [asked]


async def test_each_name_has_its_price_and_its_own_answers(open_a_world: OpenWorld) -> None:
    """Two names of one alias differ in cost, and share no cached answer."""
    world = await open_a_world(models=MODELS)
    costs = []
    for name in ("gpt-4o", "gpt-4o-mini"):
        reply = await world.ask("the same", model=name)
        assert reply.cache == "miss"
        costs.append((await world.record(reply)).money.cost_microusd)
        assert (await world.ask("the same", model=name)).cache == "exact"
    assert costs[0] > costs[1] > 0


async def test_a_name_without_a_price_is_refused_under_a_hard_budget(open_a_world: OpenWorld) -> None:
    """What cannot be counted is not spent; without a hard budget it is free, as any model without a price."""
    world = await open_a_world(models=MODELS)
    team = await world.team()
    assert (await world.ask(model="no-such-price", key=team.key)).status == 200
    await world.budget(team, 10**9)
    reply = await world.ask("two", model="no-such-price", key=team.key)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (400, "price_unknown", "model")
    assert "no-such-price" in reply.error["message"]
    assert (await world.ask(model="gpt-4o", key=team.key)).status == 200


async def test_a_keys_models_are_those_it_asks_for(open_a_world: OpenWorld) -> None:
    """A key for one name may not use the others of its alias; a key for the alias may use them all."""
    world = await open_a_world(models=MODELS)
    one, every = await world.team("one", models=("gpt-4o",)), await world.team("every", models=("openai/*",))
    none = await world.team("none", models=())
    asked = [(one, "gpt-4o"), (one, "gpt-4o-mini"), (every, "openai/x"), (every, "gpt-4o"), (none, "gpt-4o")]
    assert [(await world.ask(model=name, key=team.key)).status for team, name in asked] == [200, 403, 200, 403, 403]


@pytest.mark.parametrize("name", ["", "openai/", "a b", "x" * 201, "https://evil.example/x", "a/../b", "*", "a\x00b"])
async def test_names_that_are_none_are_refused(open_a_world: OpenWorld, name: str) -> None:
    """No address, no control character and no pattern is passed on as a model's name."""
    world = await open_a_world(models={name: one for name, one in MODELS.items() if name != "exact"})
    reply = await world.ask(model=name)
    assert (reply.status, reply.error["code"]) in [(404, "model_not_found"), (400, "invalid_value")]
    assert all(backend.calls == [] for backend in world.backends.values())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("openai/gpt-4o:online", "plugins"),
        ("openai/gpt-4o:free:ONLINE", "plugins"),
        ("openai/gpt-4o:nitro", "provider"),
        ("@preset/mine", "preset"),
        ("openai/gpt-4o:online@preset/mine", "plugins"),
    ],
)
async def test_a_name_smuggles_no_reserved_field(open_a_world: OpenWorld, name: str, field: str) -> None:
    """A part of a name that stands for a reserved field goes to the deployments that allow that field alone."""
    closed, opened = {"name": "closed", **_OPENAI}, {"name": "opened", **_OPENAI, "allow_fields": ["plugins"]}
    world = await open_a_world(
        models={"*": {"deployments": [closed]}, "or/*": {"deployments": [closed | {"name": "first"}, opened]}}
    )
    reply = await world.ask(model=name)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "model", "field_not_allowed")
    assert f"list `{field}` in the deployment's `allow_fields`" in reply.error["message"]
    allowed = await world.ask(model=f"or/{name}")
    if "nitro" in name or "preset" in name:
        assert "list `pr" in allowed.error["message"]  # provider or preset, which it does not allow
    else:
        assert (allowed.status, allowed.headers["x-sameway-backend"]) == (200, "opened")
    assert world.backends["closed"].calls == world.backends["first"].calls == []


@pytest.mark.parametrize("name", ["llama3:8b", "openai/gpt-4o:free", "x:online-chat", "qwen:nitro2"])
async def test_other_endings_of_a_name_pass(open_a_world: OpenWorld, name: str) -> None:
    """A tag of a server's own is part of the model's name."""
    world = await open_a_world(models=MODELS)
    assert (await world.ask(model=name)).status == 200


async def test_a_name_that_the_provider_lacks_takes_nothing_out_of_service(open_a_world: OpenWorld) -> None:
    """One client's made-up name is refused with the provider's words; others go on."""
    world = await open_a_world(models=MODELS)
    world.backends["any"].plays_once(denied(404, "No model `made-up`", "model_not_found"))
    reply = await world.ask(model="made-up")
    assert (reply.status, reply.error["code"]) == (424, "upstream_denied")
    assert (await world.ask(model="gpt-4o")).status == 200


async def test_many_names_leave_nothing_behind(open_a_world: OpenWorld) -> None:
    """The fleet and the labels are those of the configuration, however many names were asked for."""
    world = await open_a_world(models=MODELS)
    for number in range(30):
        await world.ask("the same", model=f"name-{number}")
    assert {record.request.alias for record in world.records} == {"*"}
    assert {row.deployment for row in await world.ledger()} == {"any"}


@pytest.mark.parametrize(
    ("alias", "deployment", "words"),
    [
        ("*", {"backend": "litellm", "model": "*"}, "provider/*"),
        ("*", {**_OPENAI, "model": "gpt-4o"}, "expected `*`"),
        ("*", {"backend": "local", "engine": "default"}, "expected `*`"),
        ("x", {**_OPENAI}, "only an alias `*` or `prefix/*`"),
    ],
)
def test_patterns_that_cannot_work_prevent_the_start(alias: str, deployment: dict[str, Any], words: str) -> None:
    """An alias that takes every name passes it on, to a provider that the operator chose."""
    settings: dict[str, Any] = {"models": {alias: {"deployments": [deployment]}}}
    with pytest.raises(ValueError, match=re.escape(words)):
        Settings(**settings)
