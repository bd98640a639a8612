"""What each request would have cost without Sameway, and by what it cost less or more."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.accounts import LedgerRow
from gateway.accounts.accounts import Accounts
from gateway.accounts.ledger import Group, Ledger, LedgerFilter
from gateway.accounts.ledger_writer import HitsWriter
from gateway.telemetry.stats import Stats
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Tokens, World, broken, deployment, unavailable

LISTED = deployment("listed", usd=(10.0, 20.0), priority=1)  # an answer of 10 and 5 tokens: 200 µUSD
CHEAP = deployment("cheap")  # 20
MODELS: dict[str, Any] = {
    "routed": {"policy": "cheapest", "deployments": [LISTED, CHEAP]},
    "local": {
        "policy": "cheapest",
        "baseline": "far",
        "deployments": [deployment("near", engine="default", usd=(0, 0)), deployment("far", usd=(10.0, 20.0))],
    },
    "dearer": {
        "policy": "cheapest",
        "deployments": [deployment("down", usd=(0.5, 1.0), priority=1), deployment("dearer", usd=(2.0, 4.0))],
    },
    "plain": {"deployments": [deployment("plain-one")]},
    "cached": {
        "deployments": [
            {
                **deployment("prefix"),
                "price": {
                    "input_usd_per_mtok": 1,
                    "output_usd_per_mtok": 2,
                    "cached_input_usd_per_mtok": 0.1,
                    "cache_write_usd_per_mtok": 3,
                },
            }
        ]
    },
    "unpriced": {
        "policy": "cheapest",
        "baseline": "secret",
        "deployments": [
            {"name": "secret", "backend": "openai", "base_url": "http://0.0.0.0/v1", "model": "no-such-model"},
            deployment("known"),
        ],
    },
}


@pytest.fixture
async def world(open_a_world: OpenWorld) -> World:
    return await open_a_world(models=MODELS)


def parts(row: LedgerRow) -> tuple[int | None, int, dict[str, int]]:
    return row.baseline_microusd, row.cost_microusd, dict(row.savings())


async def test_a_miss_is_compared_with_the_first_choice(world: World) -> None:
    """A cheaper route and a local engine save the difference to the list price; the only deployment saves nothing."""
    for model, expected in (
        ("routed", (200, 20, {"cheaper_route": 180})),
        ("local", (200, 0, {"local_engine": 200})),
        ("plain", (20, 20, {})),
    ):
        record = await world.record(await world.ask(model=model))
        row = (await world.ledger())[-1]
        assert parts(row) == expected
        assert (record.money.baseline_microusd, record.money.savings or {}) == (expected[0], expected[2])
        assert record.money.saved_microusd == expected[0] - expected[1]


async def test_a_hit_saves_the_whole_list_price(world: World) -> None:
    """Exact, semantic and shared: none costs anything, and each would have cost what the first choice charges."""
    first = await world.ask(model="routed")
    hit = await world.record(await world.ask(model="routed"))
    assert (hit.cache.source, hit.money.saved_microusd, hit.money.avoided_microusd, hit.money.cost_microusd) == (
        "exact",
        200,
        20,
        0,
    )
    world.semantic.hits((await world.record(first)).cache.entry)
    near = await world.ask("other words", model="routed")
    assert (near.cache, near.headers["x-sameway-saved-usd"]) == ("semantic", "0.000200")
    world.semantic.misses("empty")
    go = asyncio.Event()
    world.backends["cheap"].plays("x", go, Finish(), Tokens())
    led = world.begin("at once", model="routed")
    await world.backends["cheap"].called(2)
    shared = world.begin("at once", model="routed")
    await asyncio.sleep(0.01)
    go.set()
    assert (await led.reply()).cache == "miss"
    record = await world.record(await shared.reply())
    assert (record.cache.source, record.money.saved_microusd, record.money.avoided_microusd) == ("coalesced", 200, 20)


async def test_what_cost_more_is_shown(world: World) -> None:
    """A dearer deployment that took over, and a try that was paid for nothing, are amounts below 0."""
    world.backends["down"].plays(unavailable())
    await world.ask(model="dearer")
    assert parts((await world.ledger())[-1]) == (10, 40, {"dearer_route": -30})
    world.backends["cheap"].plays_once("half ", broken())
    record = await world.record(await world.ask(model="routed"))
    tried, answered = (await world.ledger())[-2:]
    assert parts(tried) == (0, tried.cost_microusd, {"tries": -tried.cost_microusd})
    assert parts(answered) == (200, 200, {})
    assert record.money.saved_microusd == -tried.cost_microusd
    assert record.money.savings == {"tries": -tried.cost_microusd}


async def test_the_providers_prompt_cache_is_counted_both_ways(world: World) -> None:
    """Reading it saves, writing it costs, and the two are apart."""
    world.backends["prefix"].plays("x", Finish(), Tokens(prompt=100, completion=5, cached=40))
    await world.ask(model="cached")
    assert parts((await world.ledger())[-1]) == (110, 74, {"prefix_read": 36})


async def test_an_unknown_price_is_unknown(world: World) -> None:
    """Neither a baseline without a price nor a deployment that is counted as free makes a saving."""
    world.backends["secret"].plays(unavailable())
    first = await world.ask(model="unpriced")
    record = await world.record(first)
    assert (record.money.is_baseline_unknown, record.money.saved_microusd, record.answer.deployment) == (
        True,
        0,
        "known",
    )
    assert (await world.ledger())[-1].baseline_microusd is None
    again = await world.ask(model="unpriced")
    assert "x-sameway-saved-usd" not in again.headers
    assert (await world.record(again)).money.is_baseline_unknown


async def test_the_days_are_the_sum_of_rows_and_hits(world: World, accounts_of: Accounts) -> None:
    """Rows and hits written twice count once, and the baseline less every line is what was spent."""
    ledger = Ledger(accounts_of.database)
    stats = Stats(world.redis, lambda: 0.0)
    hits = HitsWriter(ledger, stats.take_hits)
    for text in ("one", "one", "two"):
        await world.ask(text, model="routed")
    await world.ask("one", model="routed", user="ann", metadata={"app": "web"})
    world.backends["cheap"].plays(unavailable())
    await world.ask("three", model="routed")
    await world.quiet()
    for record in world.records:
        stats.add(record)
    rows = await world.ledger()
    for _ in range(2):
        await ledger.append(rows)
        await hits.flush()
    found: dict[str, list[int]] = {}
    for line in await ledger.savings(LedgerFilter()):
        sums = found.setdefault(line.line, [0, 0])
        sums[0] += line.requests
        sums[1] += line.amount_microusd
    assert found == {"baseline": [5, 1000], "spent": [3, 240], "exact": [2, 400], "cheaper_route": [2, 360]}
    by_user = {
        total.user: (total.requests, total.hits, total.saved_microusd) for total in await ledger.totals([Group.USER])
    }
    [by_key] = await ledger.totals([Group.KEY, Group.ALIAS], LedgerFilter(key_id=rows[0].key_id, deployment=""))
    assert (by_user, by_key.hits) == ({"": (3, 1, 560), "=ann": (0, 1, 200)}, 2)
    [by_tag] = await ledger.totals([Group.TAG], LedgerFilter(tag="app"))
    assert (by_tag.tag, by_tag.hits, by_tag.saved_microusd, by_tag.cost_microusd) == ("=web", 1, 200, 0)


@pytest.fixture
async def accounts_of(world: World) -> Accounts:
    return world._accounts
