"""Teams' rules: where their requests may go, on each exit, and what is kept of them, and for how long."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from policies import Candidate, Price
from policies.routing import Residency
from tests.services import RedisServer
from tests.world import Finish, Tokens, World, broken, deployment, open_world, rejected

EU: dict[str, Any] = {"region": "eu-west-1", "retention_days": 0, "capabilities": ["tools", "completions", "prefill"]}
MODELS: dict[str, Any] = {
    "mock": {"deployments": [deployment("us", usd=(0, 0), region="us-east-1"), deployment("eu", usd=(9, 9), **EU)]},
    "us-only": {"fallbacks": ["eu-only"], "deployments": [deployment("us2", region="us-east-1", retention_days=30)]},
    "eu-only": {"deployments": [deployment("eu2", **EU)]},
    "alone": {"deployments": [deployment("us3", region="us-east-1", retention_days=30)]},
    "unknown": {"deployments": [deployment("unknown")]},
    "engine": {"deployments": [deployment("engine", engine="default")]},
    "raced": {
        "policy": "cheapest",
        "hedge_cost_max": 1.0,
        "deployments": [
            deployment("slow", **EU),
            deployment("other", usd=(2, 4), region="us-east-1", capabilities=["prefill"]),
        ],
    },
    "checked": {"verifier": "alone", "deployments": [deployment("eu3", usd=(100, 100), **EU)]},
}


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[World]:
    async with open_world(redis_server, tmp_path, models=MODELS) as opened:
        yield opened
        await opened.is_released()


def asked(world: World) -> list[str]:
    """The deployments that got a request."""
    return sorted(name for name, backend in world.backends.items() if backend.calls)


@pytest.mark.parametrize(
    ("regions", "days_max", "candidate", "objection"),
    [
        (None, None, {"region": "us"}, ""),
        (("eu",), None, {"region": "eu-west-1"}, ""),
        (("eu-west-1",), None, {"region": "eu-west-1"}, ""),
        (("eu-west-1",), None, {"region": "eu"}, "is in the region `eu`, and the team's `regions` are eu-west-1"),
        (("eu",), None, {"region": "europe"}, "is in the region `europe`, and the team's `regions` are eu"),
        (("eu", "ch"), None, {}, "is in the region `unknown`, and the team's `regions` are eu, ch"),
        (("eu",), 0, {"is_local": True}, ""),
        (None, 0, {"retention_days": 0}, ""),
        (None, 7, {"retention_days": 30}, "keeps requests for 30 days, and the team's `retention_days_max` is 7"),
        (None, 7, {}, "keeps requests for an unknown time, and the team's `retention_days_max` is 7"),
    ],
)
def test_a_rule_and_a_deployment(
    regions: tuple[str, ...] | None, days_max: int | None, candidate: dict[str, Any], objection: str
) -> None:
    """A region includes its parts and no other name; what is not known is not allowed; what runs here goes nowhere."""
    assert Residency(regions, days_max).objection(Candidate("d", Price(0, 0), **candidate)) == objection


async def test_requests_go_where_the_rule_allows(world: World) -> None:
    """The dearer deployment answers, and is the first choice: its answer is stored; a local engine and a fallback may answer."""
    team = await world.team(regions=["eu"], retention_days_max=0)
    reply = await world.ask(key=team.key)
    record = await world.record(reply)
    assert (record.answer.deployment, record.cache.store) == ("eu", "stored")
    assert [one.reason for one in record.answer.rejected] == [
        "is in the region `us-east-1`, and the team's `regions` are eu"
    ]
    assert (await world.ask(key=team.key)).cache == "exact"
    fallback = await world.record(await world.ask(key=team.key, model="us-only"))
    assert (fallback.answer.deployment, fallback.answer.fallbacks[0].reason) == ("eu2", "residency_not_allowed")
    assert (await world.ask(key=team.key, model="engine")).status == 200
    assert asked(world) == ["engine", "eu", "eu2"]
    assert (await world.record(await world.ask())).answer.deployment == "us"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
async def test_a_refusal_names_the_rule(world: World, path: str) -> None:
    """It is a 403 of each surface, whatever its form; nothing was asked and nothing is charged."""
    team = await world.team(regions=["eu"])
    fields: dict[str, Any] = {"input": "hi"} if path.endswith("responses") else {"max_tokens": 9}
    fields |= {"messages": [{"role": "user", "content": "hi"}]} if "input" not in fields else {}
    for is_stream in (False, True):
        reply = await world.ask(path=path, key=team.key, model="alone", stream=is_stream, **fields)
        assert reply.status == 403
        assert "us3 is in the region `us-east-1`, and the team's `regions` are eu" in reply.json["error"]["message"]
    assert (asked(world), await world.ledger()) == ([], [])


async def test_an_unknown_retention_is_not_allowed(world: World) -> None:
    """Of deployments that say nothing, and of those that keep longer."""
    team = await world.team(retention_days_max=7)
    for model in ("unknown", "alone"):
        assert (await world.ask(key=team.key, model=model)).error["code"] == "residency_not_allowed"
    assert (await world.ask(key=team.key, model="eu-only")).status == 200


async def test_rescues_and_verifiers_keep_to_the_rule(world: World) -> None:
    """A stream that breaks off ends rather than go on elsewhere; a verifier elsewhere is not asked, and the request is a miss.
    Of a team without a rule both are.
    """
    for name, rules, others in (("ruled", {"regions": ["eu"]}, []), ("free", {}, ["other", "us3"])):
        team = await world.team(name, **rules)
        world.backends["slow"].plays_once("half of", broken())
        ended = await world.ask(key=team.key, model="raced", stream=True)
        assert ended.is_done is bool(others)
        world.semantic.misses("far")
        entry = (await world.record(await world.ask("one", key=team.key, model="checked"))).cache.entry
        world.semantic.doubts((entry, "one"), p=0.9)
        assert (await world.ask("two", key=team.key, model="checked")).cache == "miss"
        await world.quiet()
        assert asked(world) == sorted(["eu3", "slow", *others])


async def test_no_answer_from_before_a_rule_is_served(world: World) -> None:
    """What was made elsewhere before is found neither by its bytes nor by its words, and serves again without the rule."""
    team = await world.team()
    assert (await world.record(await world.ask(key=team.key))).answer.deployment == "us"
    await world.changes(team, regions=["eu"])
    record = await world.record(await world.ask(key=team.key))
    assert (record.cache.source, record.answer.deployment) == ("miss", "eu")
    await world.changes(team, regions=None)
    assert (await world.record(await world.ask(key=team.key))).answer.deployment == "us"


async def test_answers_are_kept_as_long_as_the_rule_allows(world: World) -> None:
    """For its seconds and no longer, whatever the request asks; with 0 nothing is stored, and equal requests are made again."""
    team = await world.team(store_s_max=60)
    entry = (await world.record(await world.ask(key=team.key, cache={"ttl": 3_600}))).cache.entry
    assert (await world.ask(key=team.key)).cache == "exact"
    assert entry
    world.clock.passes(61)
    assert (await world.ask(key=team.key)).cache == "miss"
    none = await world.team("none", store_s_max=0)
    replies = [await world.ask(key=none.key) for _ in range(2)]
    assert [reply.cache for reply in replies] == ["bypass", "bypass"]
    assert (await world.record(replies[1])).cache.store == "no_store"
    assert not [key async for key in world.redis.scan_iter(match="*secret*")]


@pytest.mark.parametrize(("seconds", "is_kept"), [(0, False), (60, False), (40 * 86_400, True)])
async def test_responses_are_kept_if_the_rule_allows_as_long(world: World, seconds: int, is_kept: bool) -> None:
    """A rule shorter than `responses.retention_s` keeps no response and no conversation, and says so."""
    team = await world.team(store_s_max=seconds)
    reply = await world.ask(path="/v1/responses", key=team.key, model="eu-only", input="hi")
    assert reply.json["store"] is is_kept
    conversation = await world.ask(path="/v1/conversations", key=team.key, raw=json.dumps({}).encode())
    assert (conversation.status == 200) is is_kept


async def test_records_of_a_team_with_a_time_have_no_texts(world: World) -> None:
    """The latest requests stay for longer than its answers: they have neither its questions nor what is near them."""
    world.sets(log_prompts=True)
    for team, is_kept in ((await world.team(), True), (await world.team("timed", store_s_max=60), False)):
        entry = (await world.record(await world.ask("one", key=team.key, model="eu-only"))).cache.entry
        world.semantic.hits(entry)
        record = await world.record(await world.ask("two", key=team.key, model="eu-only"))
        assert (record.cache.source, record.cache.question) == ("semantic", "two" if is_kept else "")


async def test_no_text_of_a_team_that_keeps_nothing_is_logged(world: World) -> None:
    """Its turn does not come to the log, on a miss, a failure and a refusal, however early; another team's does."""
    team = await world.team(store_s_max=0, regions=["eu"])
    for model in ("mock", "alone", "nowhere"):
        await world.ask("quiet words", key=team.key, model=model)
    world.backends["eu2"].plays(rejected())
    await world.ask("quiet words", key=team.key, model="eu-only")
    world.backends["eu2"].plays("words", Finish(), Tokens())
    await world.ask("loud words")
    assert [turn.body["messages"][0]["content"] for turn in world.logged if turn is not None] == ["loud words"]
