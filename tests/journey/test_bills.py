"""What is charged where a provider's own count is missing, late or absurd, and for embeddings."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Ledger, LedgerFilter
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats
from gateway.telemetry.summary import StatsWindow
from gateway.wire.types import Chunk
from policies import Budget, Usage, WindowKind
from policies.breaker import Asker
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, broken, deployment, unavailable

SECOND = 1_000_000
ASKER = Asker("chat:")


async def test_a_reader_who_leaves_before_the_count_pays_for_the_bytes(world: World) -> None:
    """An answer in few pieces costs at least a token for three of its bytes, and at most what was asked for."""
    go = asyncio.Event()
    world.backends["dear"].plays("word " * 300, go, "more", Finish(), Tokens())
    client = world.begin(model="dear", stream=True, max_tokens=450)
    await client.sees("word")
    client.leave()
    await world.is_released()
    (row,) = await world.ledger()
    assert row.usage.completion_tokens == 450
    assert row.usage_estimated


@pytest.mark.parametrize("name", ["f", "f" * 80])
async def test_a_leaver_pays_for_the_prompt_that_was_counted_at_the_start(world: World, name: str) -> None:
    """Anthropic counts a prompt, its cached and written parts too, before the first word: no estimate replaces that."""
    go = asyncio.Event()
    head = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    count = {"input_tokens": 50, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 1_000}
    event = {"type": "message_start", "message": {"usage": count}}
    started = Chunk(msgspec.json.encode(head), native=msgspec.json.encode(event))
    world.backends["dear"].plays(started, "word", go)
    messages = [{"role": "user", "content": "x " * 2_000}]
    tools = [{"type": "function", "function": {"name": name}}]  # a long name is replaced
    client = world.begin(model="dear", stream=True, max_tokens=450, messages=messages, tools=tools)
    await client.sees("word")
    client.leave()
    await world.is_released()
    (row,) = await world.ledger()
    assert (row.usage.prompt_tokens, row.usage.cached_tokens, row.usage.cache_write_tokens) == (1_150, 100, 1_000)
    assert row.usage_estimated


async def test_a_count_of_no_prompt_is_estimated(world: World) -> None:
    """A deployment that counts an answer and no prompt makes no prompt free."""
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=0, completion=5))
    await world.ask(model="dear", max_tokens=100)
    (row,) = await world.ledger()
    assert row.usage.prompt_tokens > 0
    assert row.usage.completion_tokens == 5


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
    assert (row.usage.prompt_tokens, row.usage.completion_tokens, row.usage_estimated) == (7, 910, False)
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
    assert row.usage.completion_tokens == 3


def _bound(**more: Any) -> dict[str, Any]:
    return {"m": {"deployments": [deployment("bound", context_tokens_max=8_000, **more)]}}


def counted(prompt: int, completion: int, **more: int) -> Chunk:
    return Chunk(b'{"choices":[]}', usage=Usage(prompt, completion, **more), is_usage_only=True)


@pytest.mark.parametrize("claim", [10**9, 10**18])
async def test_an_absurd_count_is_bounded_by_the_deployment(open_a_world: OpenWorld, claim: int) -> None:
    """More than the context can hold is booked as the context, the deployment rests, and the record says so."""
    world = await open_a_world(models=_bound())
    world.backends["bound"].plays("x", Finish(), Tokens(prompt=claim, completion=claim))
    record = await world.record(await world.ask(model="m", max_tokens=100))
    (row,) = await world.ledger()
    assert (row.usage.prompt_tokens, row.usage.completion_tokens) == (8_000, 8_000)
    assert record.money.cost_microusd == row.cost_microusd == 24_000
    assert [(one.deployment, one.is_cut) for one in record.money.claims] == [("bound", True)]
    assert not world._deployment("bound").health.allows(ASKER)
    assert "more tokens than it can have used" in world._deployment("bound").health.resting(ASKER)[0]


async def test_a_count_above_the_hold_is_booked_and_trips_the_budget(open_a_world: OpenWorld) -> None:
    """A server that counts more than was asked for is believed within its context: the next request finds no room."""
    world = await open_a_world(models=_bound())
    team = await world.team()
    await world.budget(team, 4_000)
    world.backends["bound"].plays("x", Finish(), Tokens(prompt=3_000, completion=500))
    record = await world.record(await world.ask(model="m", max_tokens=100, key=team.key))
    (row,) = await world.ledger()
    assert (row.usage.prompt_tokens, row.usage.completion_tokens, row.cost_microusd) == (3_000, 500, 4_000)
    assert [(one.deployment, one.is_cut) for one in record.money.claims] == [("bound", False)]
    assert await world.money_of(team) == (4_000, 0)
    refused = await world.ask("next", model="m", max_tokens=100, key=team.key)
    assert (refused.status, refused.error["code"]) == (429, "insufficient_quota")
    world.backends["bound"].plays("x", Finish(), Tokens())
    answered = await world.record(await world.ask("others", model="m", max_tokens=100))
    assert (answered.ended.status, answered.money.claims) == (200, ())


_SEARCH = {"type": "web_search_20250305", "name": "web_search"}
_PRICED = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0, "tool_call_usd": 0.01}


def _searching(**more: Any) -> dict[str, Any]:
    bound = {**deployment("bound", **more), "price": _PRICED, "allow_fields": ["web_search"]}
    return {"m": {"deployments": [bound]}}


@pytest.mark.parametrize(
    ("context", "usage"),
    [
        (None, counted(2_000_000, 5, tool_calls=30)),  # the calls alone are told
        (200_000, counted(2_000_000, 5, tool_calls=30)),
        (200_000, counted(3_900_000, 40_000, rounds=19)),  # calls that cost nothing, and are told by their blocks
    ],
)
async def test_a_loop_of_tools_is_charged_as_it_is_counted(
    open_a_world: OpenWorld, context: int | None, usage: Chunk
) -> None:
    """Each round bills the prompt again, so the sum passes the context: every token and call is booked, and nothing rests."""
    world = await open_a_world(models=_searching(context_tokens_max=context))
    world.backends["bound"].plays("x", Finish(), usage)
    record = await world.record(await world.ask(model="m", tools=[_SEARCH], max_tokens=50))
    (row,) = await world.ledger()
    told = usage.usage
    assert told is not None
    assert (row.usage.prompt_tokens, row.usage.completion_tokens, row.usage.tool_calls) == (
        told.prompt_tokens,
        told.completion_tokens,
        told.tool_calls,
    )
    assert row.cost_microusd == told.prompt_tokens + 2 * told.completion_tokens + 10_000 * told.tool_calls
    assert record.money.cost_microusd == row.cost_microusd
    assert world._deployment("bound").health.allows(ASKER)


async def test_the_calls_that_are_held_are_sent(open_a_world: OpenWorld) -> None:
    """Where money is held, each tool that takes a limit gets the hold's, or the client's if that is less; other tools,
    and teams without a budget, send what they sent."""
    world = await open_a_world(models=_searching())
    team = await world.team()
    await world.budget(team, 10**9)
    function = {"type": "function", "function": {"name": "f", "parameters": {}}, "max_uses": 50}
    limits: list[Any] = []
    for asked in ({}, {"max_uses": 1_000}, {"max_uses": 3}, {"max_uses": "many"}):
        reply = await world.ask(str(asked), model="m", tools=[{**_SEARCH, **asked}, function], key=team.key)
        assert reply.status == 200
        sent = world.backends["bound"].calls[-1].body["tools"]
        limits.append(sent[0]["max_uses"])
        assert sent[1] == function
    assert limits == [10, 10, 3, 10]
    await world.ask("free", model="m", tools=[_SEARCH])
    assert world.backends["bound"].calls[-1].body["tools"] == [_SEARCH]


async def test_the_hold_is_for_the_calls_that_may_be_made(open_a_world: OpenWorld) -> None:
    """A budget has room for the calls and for what they find: it lets two searches through where it refuses ten."""
    world = await open_a_world(models=_searching())
    team = await world.team()
    await world.budget(team, 200_000)
    few, many = [{**_SEARCH, "max_uses": 2}], [{**_SEARCH, "max_uses": 2}] * 5
    assert (await world.ask("few", model="m", tools=few, max_tokens=50, key=team.key)).status == 200
    assert (await world.ask("many", model="m", tools=many, max_tokens=50, key=team.key)).status == 429
    assert (await world.ask("all", model="m", tools=[_SEARCH], max_tokens=50, key=team.key)).status == 429


@pytest.mark.parametrize(
    ("path", "body", "price", "units", "microusd"),
    [
        ("rerank", {"query": "q", "documents": ["a", "b"]}, {"request_usd": 0.002}, 80, 160_000),
        ("rerank", {"query": "q", "documents": ["a", "b"]}, {"request_usd": 0.002}, 0, 2_000),
        ("images/generations", {"prompt": "p"}, {"image_usd": {"default": 0.04}}, 2, 80_000),
    ],
)
async def test_units_are_charged_as_they_are_counted(
    open_a_world: OpenWorld, path: str, body: dict[str, Any], price: dict[str, Any], units: int, microusd: int
) -> None:
    """What is not billed by tokens costs as often as the provider says, and as often as was held where it says nothing."""
    unit = {**deployment("unit", capabilities=["rerank", "images"]), "price": price}
    world = await open_a_world(models={"m": {"deployments": [unit]}})
    answer = Chunk(b"{}", is_whole=True, has_content=True, finish_reasons=("stop",), usage=Usage(0, 0, units=units))
    world.backends["unit"].plays(answer if units else msgspec.structs.replace(answer, usage=None))
    assert (await world.ask(path=f"/v1/{path}", raw=msgspec.json.encode({"model": "m", **body}))).status == 200
    (row,) = await world.ledger()
    assert row.cost_microusd == microusd == world.records[-1].money.cost_microusd


async def _gone_before_a_word(world: World) -> None:
    world.backends["dear"].plays_once(asyncio.Event())
    client = world.begin(model="dear", stream=True)
    await world.backends["dear"].called()
    client.leave()
    await client.reply()


async def _broken_then_down(world: World) -> None:
    world.backends["dear-first"].plays_once("half ", broken())
    world.backends["next"].plays(unavailable())
    assert (await world.ask(model="breaking")).status == 503


async def _broken_then_answered(world: World) -> None:
    world.backends["dear-first"].plays_once("half ", broken())
    assert (await world.ask(model="breaking")).status == 200


async def _broken_everywhere(world: World) -> None:
    world.backends["dear-first"].plays("half ", broken())
    world.backends["next"].plays("half ", "done", broken())
    assert (await world.ask(model="breaking")).status == 502


async def _answered_and_found(world: World) -> None:
    await world.ask(model="dear")
    await world.ask(model="dear")


@pytest.mark.parametrize(
    "happens", [_gone_before_a_word, _broken_then_down, _broken_then_answered, _broken_everywhere, _answered_and_found]
)
async def test_whoever_tells_the_cost_tells_the_same(
    world: World, happens: Callable[[World], Awaitable[None]], tmp_path: Path
) -> None:
    """Records, metrics, the overview's sums, the ledger and its savings: abandoned and failed tries cost the same in each."""
    await happens(world)
    rows = await world.ledger()
    cost = sum(row.cost_microusd for row in rows)
    assert cost > 0
    assert cost == sum(record.money.cost_microusd for record in world.records)
    [counted_in_redis] = await world._budgets.spent([Budget(1, rows[0].team_id, WindowKind.TOTAL, 1)])
    assert counted_in_redis.spent == cost
    metrics, stats = Metrics(None), Stats(world.redis, lambda: world.records[-1].request.at_s)
    for record in world.records:
        metrics.observe(record)
        stats.add(record)
    lines = [line for line in metrics.render().decode().splitlines() if line.startswith("sameway_cost_usd_total{")]
    assert sum(float(line.rpartition(" ")[2]) for line in lines) == pytest.approx(cost / 1e6)
    await stats.flush()
    summary = await stats.query(StatsWindow.HOUR)
    assert summary.total.cost_microusd == cost == sum(one.cost_microusd for one in summary.by_deployment.values())
    accounts = Accounts(f"sqlite:///{tmp_path}/books.db")
    await accounts.open()
    ledger = Ledger(accounts.database)
    await ledger.append(rows)
    saved = await ledger.savings(LedgerFilter())
    await accounts.close()
    assert sum(one.amount_microusd for one in saved if one.line == "spent") == cost
    baseline = sum(one.amount_microusd for one in saved if one.line == "baseline")
    assert baseline == sum(record.money.baseline_microusd for record in world.records if record.cache.source == "miss")
    of_records = sum(sum((record.money.savings or {}).values()) for record in world.records)
    assert of_records == sum(one.amount_microusd for one in saved if one.line not in ("spent", "baseline"))


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


@pytest.mark.parametrize(
    ("asked", "answered", "microusd"),
    [
        (None, "", 1_250),
        (None, "default", 1_250),
        ("flex", "flex", 625),
        ("flex", "default", 1_250),
        (None, "flex", 625),
        ("auto", "priority", 2_500),
        ("priority", "priority", 2_500),
        ("priority", "default", 1_250),
        ("priority", "", 2_500),
        (None, "standard", 1_250),
        (None, "a new tier", 2_500),
    ],
)
async def test_the_tier_that_answered_is_charged(
    open_a_world: OpenWorld, asked: str | None, answered: str, microusd: int
) -> None:
    """As the answer says it, asked or not; without its word the tier that was asked for."""
    one = {**deployment("one", "gpt-5", base_url="https://api.openai.com/v1"), "price": None}
    world = await open_a_world(models={"mock": {"deployments": [{**one, "allow_fields": ["service_tier"]}]}})
    world.backends["one"].plays("x", Finish(), Tokens(prompt=1_000, completion=0, tier=answered))
    assert (await world.ask(service_tier=asked)).status == 200
    (row,) = await world.ledger()
    assert row.cost_microusd == microusd


@pytest.mark.parametrize(("asked", "answered", "microusd"), [("priority", "default", 120), (None, "priority", 300)])
async def test_the_operators_factor_goes_with_the_tier(
    open_a_world: OpenWorld, asked: str | None, answered: str, microusd: int
) -> None:
    """It raises the cost of what a dearer tier answered, and of nothing else."""
    one = deployment("one", allow_fields=["service_tier"])
    one["price"] |= {"factors": {"service_tier": 2.5}}
    world = await open_a_world(models={"mock": {"deployments": [one]}})
    world.backends["one"].plays("x", Finish(), Tokens(prompt=100, completion=10, tier=answered))
    assert (await world.ask(service_tier=asked)).status == 200
    assert (await world.ledger())[0].cost_microusd == microusd


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
    assert (row.kind, row.usage.prompt_tokens, row.cost_microusd) == ("embeddings", 4, 4)
    assert await world.money_of(team) == (4, 0)
    assert world.records[-1].money.cost_microusd == 4
    dear = await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x " * 40, key=team.key)
    assert (dear.status, dear.error["code"]) == (429, "insufficient_quota")
    many = await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x " * 200, key=team.key)
    assert (many.status, many.error["code"]) == (429, "rate_limit_exceeded")
    world.semantic.bug = RuntimeError("a bug")
    assert (await world.ask(path="/v1/embeddings", model="all-minilm-l6-v2", input="x", key=team.key)).status == 500
    await world.is_released()
    assert len(await world.ledger()) == 1
