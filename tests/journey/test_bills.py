"""What is charged where a provider's own count is missing, late or absurd, and for embeddings."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from gateway.wire.types import Chunk
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, deployment

SECOND = 1_000_000


async def test_a_reader_who_leaves_before_the_count_pays_for_the_bytes(world: World) -> None:
    """An answer in few pieces costs at least a token for three of its bytes, and at most what was asked for."""
    go = asyncio.Event()
    world.backends["dear"].plays("word " * 300, go, "more", Finish(), Tokens())
    client = world.begin(model="dear", stream=True, max_tokens=450)
    await client.sees("word")
    client.leave()
    await world.is_released()
    (row,) = await world.ledger()
    assert row.completion_tokens == 450
    assert row.usage_estimated


async def test_a_leaver_pays_for_the_prompt_that_was_counted_at_the_start(world: World) -> None:
    """Anthropic counts a prompt, its cached and written parts too, before the first word: no estimate replaces that."""
    go = asyncio.Event()
    head = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    details = {"cached_tokens": 100, "cache_write_tokens": 1_000}
    count = {"prompt_tokens": 1_150, "completion_tokens": 1, "prompt_tokens_details": details}
    started = Chunk(msgspec.json.encode({**head, "usage_at_start": count}))
    world.backends["dear"].plays(started, "word", go)
    client = world.begin(
        model="dear", stream=True, max_tokens=450, messages=[{"role": "user", "content": "x " * 2_000}]
    )
    await client.sees("word")
    client.leave()
    await world.is_released()
    (row,) = await world.ledger()
    assert (row.prompt_tokens, row.cached_tokens, row.cache_write_tokens) == (1_150, 100, 1_000)
    assert row.usage_estimated


@pytest.mark.parametrize("usage", [False, True])
async def test_a_count_at_the_start_is_no_field_of_a_chat(world: World, usage: bool) -> None:
    """It is for bills and for Anthropic's messages: a streamed chat has OpenAI's fields alone, fresh and from the cache."""
    count = {"prompt_tokens": 1_150, "completion_tokens": 1}
    head = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage_at_start": count}
    world.backends["dear"].plays(Chunk(msgspec.json.encode(head)), "word", Finish(), Tokens(prompt=1_150, completion=1))
    for _ in range(2):
        reply = await world.ask(model="dear", stream=True, stream_options={"include_usage": usage})
        assert '"role":"assistant"' in reply.text
        assert "usage_at_start" not in reply.text
        await world.quiet()
    assert reply.headers["x-sameway-cache"] == "exact"


async def test_a_count_of_no_prompt_is_estimated(world: World) -> None:
    """A deployment that counts an answer and no prompt makes no prompt free."""
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=0, completion=5))
    await world.ask(model="dear", max_tokens=100)
    (row,) = await world.ledger()
    assert row.prompt_tokens > 0
    assert row.completion_tokens == 5


async def test_after_the_finish_the_count_is_awaited(world: World) -> None:
    """A client that leaves between the last word and the count costs what the provider counted, and the answer is stored."""
    go = asyncio.Event()
    world.backends["dear"].plays("short", Finish(), go, Tokens(prompt=7, completion=910))
    client = world.begin(model="dear", stream=True, max_tokens=1_000)
    await client.sees('"stop"')
    client.leave()
    await asyncio.sleep(0)
    go.set()
    await world.quiet()
    (row,) = await world.ledger()
    assert (row.prompt_tokens, row.completion_tokens, row.usage_estimated) == (7, 910, False)
    assert (await world.ask(model="dear", stream=True, max_tokens=1_000)).cache == "exact"


async def test_a_model_known_to_reason_costs_its_time(open_a_world: OpenWorld) -> None:
    """Tokens that no chunk shows are charged by the time that passed, within the answer asked for."""
    world = await open_a_world(models={"thinker": {"deployments": [deployment("thinker", model="o3")]}})
    go = asyncio.Event()
    world.backends["thinker"].plays(go)
    client = world.begin(model="thinker", stream=True, max_tokens=3)
    await world.backends["thinker"].called()
    await asyncio.sleep(0.2)  # eight tokens at 25 ms each
    client.leave()
    await world.is_released()
    (row,) = await world.ledger()
    assert row.completion_tokens == 3


@pytest.mark.parametrize("claim", [10**9, 10**18])
async def test_an_absurd_count_is_bounded_by_the_request(world: World, claim: int) -> None:
    """Neither the prompt nor the answer is charged beyond the context and the length asked for."""
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=claim, completion=claim))
    record = await world.record(await world.ask(model="dear", max_tokens=100))
    (row,) = await world.ledger()
    assert row.completion_tokens == 100
    assert row.prompt_tokens < 1_000_000
    assert record.cost_microusd == row.cost_microusd


async def test_a_field_without_a_price_is_refused(open_a_world: OpenWorld) -> None:
    """A deployment that allows a field which raises the bill takes it once its price is known."""
    bare = {"name": "bare", "backend": "openai", "base_url": "http://0.0.0.0/v1", "model": "m"}
    price = {"input_usd_per_mtok": 1, "output_usd_per_mtok": 2}
    models: dict[str, Any] = {
        "unpriced": {"deployments": [{**bare, "price": price, "allow_fields": ["service_tier"]}]},
        "priced": {
            "deployments": [
                {
                    **bare,
                    "name": "priced",
                    "price": {**price, "factors": {"service_tier": 2.5}},
                    "allow_fields": ["service_tier"],
                }
            ]
        },
    }
    world = await open_a_world(models=models)
    refused = await world.ask(model="unpriced", service_tier="priority")
    assert (refused.status, refused.error["code"]) == (400, "field_not_allowed")
    assert "has none for `service_tier`" in refused.error["message"]
    world.backends["priced"].plays("x", Finish(), Tokens(prompt=100, completion=10))
    assert (await world.ask(model="priced", service_tier="priority")).status == 200
    (row,) = await world.ledger()
    assert row.cost_microusd == 300  # 2.5 x (100 + 2 x 10)


async def test_embeddings_cost_tokens_and_money(open_a_world: OpenWorld) -> None:
    """They are taken from the limits and the budget by the token, and refused where either is spent."""
    world = await open_a_world(embedding_usd_per_mtok=1.0)
    team = await world.team("embeds", tokens_per_min=50)
    await world.budget(team, 60)
    reply = await world.ask(
        path="/v1/embeddings", model="all-minilm-l6-v2", input=["one two three", "four"], key=team.key
    )
    assert (reply.status, reply.headers["x-ratelimit-limit-tokens"]) == (200, "50")
    (row,) = await world.ledger()
    assert (row.kind, row.prompt_tokens, row.cost_microusd) == ("embeddings", 4, 4)
    assert await world.money_of(team) == (4, 0)
    assert world.records[-1].cost_microusd == 4
    dear = await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x " * 40, key=team.key)
    assert (dear.status, dear.error["code"]) == (429, "insufficient_quota")
    many = await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x " * 200, key=team.key)
    assert (many.status, many.error["code"]) == (429, "rate_limit_exceeded")
    world.semantic.bug = RuntimeError("a bug")
    assert (await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x", key=team.key)).status == 500
    await world.is_released()
    assert len(await world.ledger()) == 1
