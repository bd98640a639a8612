"""Budgets on the journey: what is held, what is settled, and what is refused."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

from tests.journey.conftest import OpenWorld
from tests.services import RedisServer
from tests.world import Finish, Team, Tokens, World, deployment, rejected, timed_out, unavailable


@pytest.fixture
async def team(world: World) -> Team:
    """A team with a budget of a dollar a day."""
    made = await world.team("with money")
    await world.budget(made, 1_000_000)
    return made


async def test_the_worst_case_is_held_and_the_cost_settled(world: World, team: Team) -> None:
    """While an answer comes, what the dearest deployment could charge is held; afterwards its cost is spent."""
    go = asyncio.Event()
    world.backends["dear"].plays("one ", go, "two", Finish(), Tokens(prompt=7, completion=3))
    client = world.begin("hello", model="dear", key=team.key, stream=True)
    await client.sees("one ")
    spent, held = await world.money_of(team)
    assert spent == 0
    assert 2_000 < held < 2_500  # 1,000 tokens of answer, and the prompt's upper bound
    go.set()
    reply = await client.reply()
    await world.quiet()
    assert await world.money_of(team) == (7 + 2 * 3, 0)
    (row,) = await world.ledger()
    record = await world.record(reply)
    assert row.cost_microusd == record.money.cost_microusd == 13
    assert (row.usage.prompt_tokens, row.usage.completion_tokens, row.usage.cached_tokens) == (7, 3, 0)
    assert (row.request_id, row.id) == (reply.id, reply.id)
    assert (row.team_id, row.alias, row.deployment, row.kind) == (team.id, "dear", "dear", "chat")


async def test_the_worst_case_is_the_length_that_was_asked_for(world: World, team: Team) -> None:
    """A request with a length of its own holds for that length, and for each choice."""
    held = []
    for fields in ({"max_tokens": 10}, {"max_tokens": 110}, {"max_tokens": 110, "n": 2}):
        never = asyncio.Event()
        world.backends["dear"].plays("one ", never)
        client = world.begin("hello", model="dear", key=team.key, stream=True, **fields)
        await client.sees("one ")
        held.append((await world.money_of(team))[1])
        client.leave()
        await client.reply()
        await world.quiet()
    assert 200 <= held[1] - held[0] <= 210  # 100 tokens more, and a digit in the body
    assert 220 <= held[2] - held[1] <= 240  # 110 tokens more, and a field in the body


async def test_the_books_agree_with_what_was_spent(world: World, team: Team) -> None:
    """After hits, misses and failures the ledger's rows sum up to what counts against the budget and to the records."""
    world.backends["first"].plays_once(unavailable())
    for content in ("one", "two", "one", "three"):
        await world.ask(content, model="pair", key=team.key)
        await world.ask(content, model="dear", key=team.key)
    spent, held = await world.money_of(team)
    rows = await world.ledger()
    assert held == 0
    assert spent == sum(row.cost_microusd for row in rows) > 0
    assert spent == sum(record.money.cost_microusd for record in world.records)
    assert len(rows) == 6


async def test_a_cached_prompt_is_charged_at_its_own_price(world: World, team: Team) -> None:
    """Tokens that the provider had cached are on the books as such."""
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=100, completion=1, cached=60))
    record = await world.record(await world.ask(model="dear", key=team.key))
    (row,) = await world.ledger()
    assert (row.usage.cached_tokens, record.usage.cached_tokens) == (60, 60)


async def test_usage_that_was_not_given_is_estimated(world: World, team: Team) -> None:
    """A deployment that never counts is charged by the prompt's length and the bytes that came."""
    world.backends["dear"].plays("one ", "two ", "three", Finish())
    record = await world.record(await world.ask(model="dear", key=team.key))
    (row,) = await world.ledger()
    assert row.usage.completion_tokens == record.usage.completion_tokens >= len("one two three") / 3
    assert row.usage.prompt_tokens == record.usage.prompt_tokens > 0
    assert record.cache.store == "stored"
    assert row.usage_estimated
    assert record.money.usage_estimated
    world.backends["dear"].plays("one", Finish(), Tokens(prompt=100, completion=1))
    counted = await world.record(await world.ask("another", model="dear", key=team.key))
    assert not counted.money.usage_estimated
    assert [one.usage_estimated for one in await world.ledger()] == [True, False]


@pytest.mark.parametrize("failure", [rejected(), timed_out()])
async def test_a_failed_generation_costs_nothing(world: World, team: Team, failure: Exception) -> None:
    """A hold whose generation never began is released, and there is no row."""
    world.backends["dear"].plays(failure)
    reply = await world.ask(model="dear", key=team.key)
    assert reply.status in (400, 504)
    assert await world.money_of(team) == (0, 0)
    assert await world.ledger() == []


async def test_a_hold_ends_when_the_last_client_leaves(world: World, team: Team) -> None:
    """A client that leaves before the first chunk leaves no hold behind; the prompt that was read is spent."""
    never = asyncio.Event()
    world.backends["dear"].plays(never)
    client = world.begin(model="dear", key=team.key)
    await world.backends["dear"].called()
    client.leave()
    await client.reply()
    (row,) = await world.ledger()
    spent, held = await world.money_of(team)
    assert (spent, held) == (row.cost_microusd, 0)


async def test_a_budget_is_never_passed(world: World) -> None:
    """Many at once against a budget for a few: what fits is served, the rest is refused, and the sum stays under it."""
    team = await world.team("poor")
    await world.budget(team, 6_000)
    clients = [world.begin(f"spend {n}", model="dear", key=team.key, max_tokens=900) for n in range(12)]
    replies = [await client.reply() for client in clients]
    await world.quiet()
    served = [reply for reply in replies if reply.status == 200]
    assert 1 <= len(served) < 12
    assert {reply.status for reply in replies} == {200, 429}
    spent, held = await world.money_of(team)
    assert (spent, held) == (20 * len(served), 0)


async def test_a_refusal_says_when_to_come_back(world: World) -> None:
    """A team without room gets 429 with the window's reset, is told not to retry, and its prompt goes nowhere."""
    team = await world.team("poor")
    await world.budget(team, 2_500)
    never = asyncio.Event()
    world.backends["dear"].plays_once("one ", never)
    holding = world.begin("first", model="dear", key=team.key, stream=True)
    await holding.sees("one ")
    reply = await world.begin("second", model="dear", key=team.key).reply()
    assert (reply.status, reply.error["type"], reply.error["code"]) == (429, "insufficient_quota", "insufficient_quota")
    assert reply.headers["x-should-retry"] == "false"
    assert 0 < int(reply.headers["retry-after"]) <= 86_400
    assert "Team poor has a day budget of $0.0025" in reply.error["message"]
    assert re.search(r"The budget resets in \d.*, at \d{4}-\d\d-\d\d 00:00 UTC\.$", reply.error["message"])
    assert len(world.backends["dear"].calls) == 1
    holding.leave()
    await holding.reply()
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.answer.attempts) == (429, "insufficient_quota", ())


async def test_what_no_window_can_hold_is_refused_for_good(world: World) -> None:
    """A request that may cost more than the whole budget is told to ask for less, not to wait."""
    team = await world.team("poor")
    await world.budget(team, 100)
    reply = await world.ask(model="dear", key=team.key)
    assert reply.status == 429
    assert "more than the whole budget" in reply.error["message"]
    assert "retry-after" not in reply.headers


async def test_a_team_without_money_gets_its_cached_answers(world: World) -> None:
    """Hits cost nothing: a budget that is spent refuses generations only."""
    team = await world.team("poor")
    first = await world.ask("before", model="dear", key=team.key)
    await world.budget(team, 1)
    again = await world.ask("before", model="dear", key=team.key)
    assert (again.status, again.cache, again.content) == (200, "exact", first.content)
    assert (await world.ask("after", model="dear", key=team.key)).status == 429


async def test_what_is_free_needs_no_money(world: World) -> None:
    """An alias whose deployments cost nothing is served to a team that has nothing."""
    team = await world.team("poor")
    await world.budget(team, 0)
    assert (await world.ask(model="engine", key=team.key)).status == 200


async def test_a_soft_budget_refuses_nothing(world: World) -> None:
    """A soft budget that is passed only warns."""
    team = await world.team("soft")
    await world.budget(team, 1, is_hard=False)
    assert [(await world.ask(content, key=team.key)).status for content in ("one", "two")] == [200, 200]
    assert (await world.money_of(team))[0] == 40


async def test_the_length_that_is_held_is_sent(world: World, team: Team) -> None:
    """Where money is held for an answer of some length the deployment is told that length, and else it is not."""
    await world.ask("held", model="dear", key=team.key)
    await world.ask("free", model="dear")
    await world.ask("own", model="dear", key=team.key, max_completion_tokens=7)
    bodies = [call.body for call in world.backends["dear"].calls]
    assert [body.get("max_tokens") for body in bodies] == [1000, None, 7]


# -- without Redis ---------------------------------------------------------------------------------------------------------


async def test_money_fails_closed(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """While Redis is away a team with a hard budget is refused, and one without any is served."""
    world = await open_a_world(own_redis, budgets={"redis_wait_s": 0})
    team = await world.team("with money")
    await world.budget(team, 1_000_000)
    own_redis.kill()
    refused = await world.ask(model="dear", key=team.key)
    assert (refused.status, refused.error["code"]) == (503, "budget_unavailable")
    assert refused.headers["retry-after"] == "1"
    assert world.backends["dear"].calls == []
    served = await world.ask(model="dear")
    assert (served.status, served.cache) == (200, "miss")
    record = await world.record(served)
    assert (record.cache.degraded, record.cache.store) == (("redis",), "unavailable")


async def test_a_fail_over_is_waited_for(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """A request of a team with a hard budget waits for a Redis that went away just now, and holds its money once."""
    world = await open_a_world(own_redis, budgets={"redis_wait_s": 30}, redis_timeout_ms=50)
    team = await world.team("with money")
    await world.budget(team, 1_000_000)
    own_redis.pause()
    asked = asyncio.create_task(world.ask(model="dear", key=team.key))
    await asyncio.sleep(0.3)
    assert not asked.done()
    own_redis.resume()
    assert (await asked).status == 200
    await world.settles()
    assert await world.money_of(team) == (20, 0)


async def test_money_may_fail_open(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """Where the operator says so a team is served without its budget, and its row is settled when Redis is back."""
    world = await open_a_world(own_redis, budgets={"on_redis_failure": "allow"})
    team = await world.team("with money")
    await world.budget(team, 1_000_000)
    own_redis.kill()
    assert (await world.ask(model="dear", key=team.key)).status == 200
    assert world.unsettled == 1
    own_redis.start()
    await world.settles()
    assert await world.money_of(team) == (20, 0)
    assert [row.cost_microusd for row in await world.ledger()] == [20]


async def test_a_row_outlives_a_redis_that_goes_away(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """Redis goes away in the middle of an answer: the client gets all of it, and the cost is kept until it can be settled."""
    world = await open_a_world(own_redis)
    go = asyncio.Event()
    world.backends["dear"].plays("one ", go, "two", Finish(), Tokens())
    client = world.begin(model="dear", stream=True)
    await client.sees("one ")
    own_redis.kill()
    go.set()
    assert (await client.reply()).content == "one two"
    await world.quiet()
    assert world.unsettled == 1
    own_redis.start()
    await world.settles()
    assert [row.cost_microusd for row in await world.ledger()] == [20]


_PDF = {"type": "base64", "media_type": "application/pdf", "data": "QUFB"}
_FILE, _URL = {"type": "file", "file_id": "file_1"}, {"type": "url", "url": "https://example.com/a"}


def _fetched(document: dict[str, Any]) -> dict[str, Any]:
    return {"type": "web_fetch_tool_result", "tool_use_id": "s1", "content": {"type": "x", "content": document}}


@pytest.mark.parametrize(
    ("path", "role", "parts"),
    [
        ("messages", "assistant", [{"type": "thinking", "thinking": "T" * 20_000, "signature": "s"}]),
        ("messages", "assistant", [{"type": "redacted_thinking", "data": "D" * 20_000}]),
        *(
            ("messages", "user", [{"type": kind, "source": source, **more}])
            for kind in ("image", "document")
            for source in (_PDF, _URL, _FILE)
            for more in ({}, {"citations": {"enabled": True}})
        ),
        ("messages", "user", [{"type": "document", "source": {"type": "content", "content": [{"source": _URL}]}}]),
        ("messages", "user", [{"type": "container_upload", "file_id": "file_1"}]),
        (
            "messages",
            "user",
            [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "image", "source": _URL}]}],
        ),
        ("messages", "assistant", [_fetched({"type": "document", "source": _PDF})]),
        ("messages", "assistant", [{"type": "mcp_tool_result", "content": [{"type": "text", "text": "x" * 20_000}]}]),
        (
            "messages",
            "user",
            [{"type": "search_result", "source": "s", "content": [{"type": "text", "text": "x" * 20_000}]}],
        ),
        ("chat/completions", "user", [{"type": "image_url", "image_url": {"url": "https://example.com/a"}}]),
        ("chat/completions", "user", [{"type": "file", "file": {"file_id": "file_1"}}]),
        ("chat/completions", "user", [{"type": "video_url", "video_url": {"url": "https://example.com/a"}}]),
        ("chat/completions", "user", [{"type": "input_audio", "input_audio": {"data": "QUFB", "format": "wav"}}]),
        ("responses", "user", [{"type": "input_image", "image_url": "https://example.com/a"}]),
        ("responses", "user", [{"type": "input_file", "filename": "a.pdf", "file_data": _PDF["data"]}]),
    ],
)
async def test_a_hold_covers_what_has_more_tokens_than_a_chat_shows(
    open_a_world: OpenWorld, path: str, role: str, parts: list[dict[str, Any]]
) -> None:
    """What the deployment counted is booked whole, and a hard budget of less refuses the request before it is sent."""
    able = deployment("able", capabilities=["messages", "vision", "files", "audio"])
    world = await open_a_world(models={"able": {"deployments": [able]}})
    go = {"role": "user", "content": "Go"}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
    spoken: list[Any] = [go, *([called] if "tool_use_id" in parts[0] else []), {"role": role, "content": parts}, go]
    body = {"model": "able", "max_tokens": 50, "messages": spoken}
    if path == "responses":
        body = {"model": "able", "max_output_tokens": 50, "input": spoken}
    world.backends["able"].plays("answer", Finish(), Tokens(15_000, 5))
    assert (await world.ask(path=f"/v1/{path}", raw=json.dumps(body).encode())).status == 200
    assert [row.usage.prompt_tokens for row in await world.ledger()] == [15_000]
    team = await world.team()
    await world.budget(team, 15_000)
    refused = await world.ask(path=f"/v1/{path}", raw=json.dumps(body).encode(), key=team.key)
    assert (refused.status, len(world.backends["able"].calls)) == (429, 1)


async def test_a_sound_by_its_id_is_held_for(open_a_world: OpenWorld) -> None:
    """An earlier answer of the assistant that is a sound has tokens of which the body shows none."""
    world = await open_a_world(models={"able": {"deployments": [deployment("able", capabilities=["audio"])]}})
    spoken = [{"role": "user", "content": "Go"}, {"role": "assistant", "audio": {"id": "audio_1"}}]
    team = await world.team()
    await world.budget(team, 15_000)
    body = {"model": "able", "max_tokens": 50, "messages": [*spoken, spoken[0]]}
    refused = await world.ask(path="/v1/chat/completions", raw=json.dumps(body).encode(), key=team.key)
    assert (refused.status, len(world.backends["able"].calls)) == (429, 0)
