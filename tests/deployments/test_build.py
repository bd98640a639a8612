"""What is known of a deployment before it is asked, and which backend stands for it."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.backends.keys import Keys
from gateway.deployments.build import build_backend, describe
from gateway.deployments.catalog import known, microusd
from gateway.settings import DeploymentSettings, Settings, keys_of
from gateway.wire.types import MEDIA
from policies import Price
from policies.prices import FREE


def deployment(**fields: Any) -> DeploymentSettings:
    return DeploymentSettings.model_validate(fields)


def test_a_known_model_has_its_price_sizes_and_abilities() -> None:
    """litellm's table answers for a model under its own name; money comes out as exact integers."""
    facts = describe(deployment(backend="openai", base_url="https://api.openai.com/v1", model="gpt-4o-mini"))
    assert facts.price == Price(150_000, 600_000, 75_000, tool_call_microusd=25_000)
    assert (facts.context_tokens_max, facts.output_tokens_max) == (128_000, 16_384)
    plain = {"tools", "json_object", "json_schema", "vision", "files", "logprobs", "n"}
    assert facts.capabilities == plain | {"responses"}  # its address has that API
    elsewhere = describe(deployment(backend="openai", base_url="https://example.com/v1", model="gpt-4o-mini"))
    assert elsewhere.capabilities == plain
    assert facts.is_price_known


@pytest.mark.parametrize(
    ("fields", "provider"),
    [
        ({"backend": "litellm", "model": "openai/gpt-4o-mini"}, "openai"),
        ({"backend": "litellm", "model": "gpt-4o-mini"}, "openai"),
        ({"backend": "litellm", "model": "azure/gpt-4o"}, "azure"),
        ({"backend": "openai", "model": "deepseek-chat", "base_url": "https://api.deepseek.com/v1"}, "deepseek"),
        (
            {"backend": "openai", "model": "openai/gpt-oss-120b", "base_url": "https://api.groq.com/openai/v1"},
            "groq",
        ),
    ],
)
def test_names_are_found_as_people_write_them(fields: dict[str, Any], provider: str) -> None:
    """With the provider before the name, without it, or with only the host to tell who serves it."""
    facts = describe(deployment(**fields))
    assert facts.is_price_known
    assert facts.price.output_microusd_per_mtok > 0
    host = fields.get("base_url", "").removeprefix("https://").partition("/")[0]
    row = known(fields["model"], host)
    assert row is not None
    assert row.provider == provider


@pytest.mark.parametrize(
    ("fields", "is_assumed"),
    [
        ({"backend": "openai", "base_url": "http://vllm:8000/v1", "model": "our/own-model"}, True),
        ({"backend": "openai", "base_url": "http://vllm:8000/v1", "model": "our/own-model", "capabilities": []}, False),
        ({"backend": "openai", "base_url": "https://api.openai.com/v1", "model": "gpt-4o-mini"}, False),
        ({"backend": "litellm", "model": "elsewhere/unheard-of"}, True),
        ({"backend": "local", "engine": "default"}, False),
    ],
)
def test_what_is_assumed_of_a_model_is_known_as_such(fields: dict[str, Any], is_assumed: bool) -> None:
    """The abilities of its kind are an assumption where neither settings nor tables name its own."""
    assert describe(deployment(**fields)).are_capabilities_assumed is is_assumed


@pytest.mark.parametrize(
    "fields",
    [
        {"backend": "litellm", "model": "gpt-4o"},
        {"backend": "anthropic", "model": "claude-haiku-4-5"},
        {"backend": "local", "engine": "default"},
    ],
)
def test_what_a_backend_cannot_do_is_not_offered(fields: dict[str, Any]) -> None:
    """Images and sounds go to OpenAI-compatible servers alone, whatever `capabilities` say."""
    media = [kind.name for kind in MEDIA]
    assert describe(deployment(**fields, capabilities=media)).capabilities.isdisjoint(media)


def test_an_unknown_model_is_free_and_says_that_nobody_knows() -> None:
    """A server of one's own has no price in any table; its abilities are those of its kind."""
    facts = describe(deployment(backend="openai", base_url="http://vllm:8000/v1", model="our/own-model"))
    assert facts.price == FREE
    assert not facts.is_price_known
    assert "tools" in facts.capabilities
    assert known("mistral/openai-not-a-model") is None
    assert known("elsewhere/gpt-4o-mini") is None, "another provider's model of that name is another price"


@pytest.mark.parametrize(
    ("fields", "has_audio"),
    [
        ({}, True),
        ({"price": {"input_usd_per_mtok": 1}}, False),
        ({"price": {"input_usd_per_mtok": 1, "audio_output_usd_per_mtok": 9}}, True),
        ({"price": {"input_usd_per_mtok": 1}, "capabilities": ["audio"]}, True),
    ],
)
def test_sounds_are_not_assumed_at_the_price_of_text(fields: dict[str, Any], has_audio: bool) -> None:
    """A priced server of an unknown model takes sounds where they have a price, or the operator says so."""
    facts = describe(deployment(backend="openai", base_url="http://vllm:8000/v1", model="our/own-model", **fields))
    assert ("audio" in facts.capabilities) is has_audio


def test_settings_come_first() -> None:
    """What the operator wrote is not overruled by a table."""
    facts = describe(
        deployment(
            backend="litellm",
            model="openai/gpt-4o-mini",
            price={
                "input_usd_per_mtok": 0.1,
                "output_usd_per_mtok": 0.2,
                "cached_input_usd_per_mtok": 0,
                "request_usd": 0.001,
            },
            capabilities=["tools"],
            context_tokens_max=1000,
            output_tokens_max=10,
        )
    )
    assert facts.price == Price(100_000, 200_000, 0, 1_000)
    assert facts.capabilities == {"tools", "cache_control"}
    assert (facts.context_tokens_max, facts.output_tokens_max) == (1000, 10)


def test_one_price_is_true_for_every_request_that_fits() -> None:
    """Where a provider charges more beyond a border, requests beyond it do not fit: budgets are never charged too little."""
    row = known("gemini/gemini-2.5-pro")
    assert row is not None
    assert row.context_tokens_max == 200_000


def test_who_goes_on_with_a_text() -> None:
    """OpenAI-compatible servers do unless their model is known for chats alone; litellm never, whatever is configured."""
    server = {"backend": "openai", "base_url": "https://api.openai.com/v1"}
    for model, has_completions in (("my-own", True), ("gpt-3.5-turbo-instruct", True), ("gpt-4o-mini", False)):
        assert ("completions" in describe(deployment(**server, model=model)).capabilities) is has_completions
    for fields in ({"model": "gpt-3.5-turbo-instruct"}, {"model": "x", "capabilities": ["completions", "tools"]}):
        assert "completions" not in describe(deployment(backend="litellm", **fields)).capabilities


def test_a_local_engine_is_free() -> None:
    """It can do n, logprobs, tools, JSON formats, completions and prefill, and costs nothing."""
    facts = describe(deployment(backend="local", engine="default"))
    assert (facts.price, facts.capabilities, facts.is_price_known) == (
        FREE,
        {"n", "logprobs", "tools", "json_object", "json_schema", "completions", "prefill"},
        True,
    )


@pytest.mark.parametrize(
    ("usd", "digits", "expected"), [(1.5e-07, 12, 150_000), (0.1, 6, 100_000), (0.0000001, 6, 1), (0, 6, 0)]
)
def test_money_is_decimal(usd: float, digits: int, expected: int) -> None:
    """Rounded up, and never because of binary fractions."""
    assert microusd(usd, digits) == expected


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"backend": "local", "engine": "default"}, "LocalBackend"),
        ({"backend": "openai", "base_url": "http://h:1/v1", "model": "m"}, "OpenAIBackend"),
        ({"backend": "litellm", "model": "anthropic/claude"}, "ManagedBackend"),
    ],
)
def test_each_kind_has_its_backend(fields: dict[str, Any], kind: str) -> None:
    """Built without connecting, importing litellm or needing a loop."""
    given = deployment(name="d", **fields)
    backend = build_backend("alias", given, describe(given), Settings(), Keys(keys_of(given), {}))
    assert type(backend).__name__ == kind
    assert backend.name == "d"
    assert backend.capabilities == describe(deployment(**fields)).capabilities


@pytest.mark.parametrize("backend", ["openai", "litellm"])
def test_a_missing_key_keeps_a_deployment_unready(backend: str) -> None:
    """The gateway starts without it, and routing is told why this one is out."""
    fields = {"backend": backend, "base_url": "http://h/v1", "model": "m", "api_key_env": "SOME_KEY"}
    given = deployment(**fields)
    load = build_backend("alias", given, describe(given), Settings(), Keys(keys_of(given), {})).load(1)
    assert (load.is_ready, load.reason) == (False, "the variable of its key is not set")
    ready = build_backend("alias", given, describe(given), Settings(), Keys(keys_of(given), {"SOME_KEY": "sk"})).load(1)
    assert ready.is_ready == (backend == "openai")
