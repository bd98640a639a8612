"""Budgets on users, tags, models, deployments, tokens and requests, from a client's request to the books."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gateway.accounts import Identity, Key
from gateway.accounts import Team as Payer
from gateway.journey.needs import booked_labels
from gateway.journey.turn import SESSION_HEADERS, arrive, read_turn
from gateway.wire.types import CHAT
from tests.world import Finish, Team, Tokens, World, broken, unavailable

LONG = 4_000


@pytest.fixture
async def team(world: World) -> Team:
    return await world.team("with money")


async def booked(world: World, axis: str = "") -> int:
    """What the ledger says was spent."""
    return sum(row.cost_microusd for row in await world.ledger())


async def test_each_user_has_a_limit_and_the_refusal_says_what_to_do(world: World, team: Team) -> None:
    """A user without room gets a 429 that names the user, the window and the reset; another user is served."""
    each = await world.budget(team, LONG, axis="user")
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=10, completion=1_000))
    assert (await world.ask("one", model="dear", key=team.key, user="alice")).status == 200
    reply = await world.ask("two", model="dear", key=team.key, user="alice")
    assert reply.status == 429
    assert reply.error["code"] == "insufficient_quota"
    assert reply.headers["x-should-retry"] == "false"
    assert int(reply.headers["retry-after"]) <= 86_400
    words = reply.error["message"]
    assert "day budget of $0.004 for the user alice: $0.00201 is spent" in words
    assert "resets in" in words
    assert (await world.ask("three", model="dear", key=team.key, safety_identifier="alice")).status == 429
    assert (await world.ask("four", model="dear", key=team.key, user="bob")).status == 200
    assert (await world.ask("five", model="dear", key=team.key)).status == 200
    assert "requests without one" in (await world.ask("six", model="dear", key=team.key, user="")).error["message"]
    assert await world.used_of(each) == {"=alice": (2_010, 0), "=bob": (2_010, 0), "-": (2_010, 0)}
    assert (await world.ask("one", model="dear", key=team.key, user="alice")).cache == "exact"


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ({"metadata": {"project": "x"}}, "=x"),
        ({"headers": {"x-sameway-tags": "env=prod, project=x"}}, "=x"),
        ({"metadata": {"project": "y"}, "headers": {"x-sameway-tags": "project=x"}}, "=x"),
        ({"metadata": {"project": ["a", {"c": 1, "b": 2}]}}, '=["a",{"b":2,"c":1}]'),
        ({"metadata": ["project"]}, "-"),
        ({"metadata": {"other": "x"}}, "-"),
        ({}, "-"),
        ({"headers": {"x-sameway-tags": "project"}}, "-"),
    ],
)
async def test_a_tag_comes_from_metadata_or_a_header(world: World, team: Team, how: dict[str, Any], value: str) -> None:
    """Whatever a client sends as a tag is a value, and nothing is one too; the header goes first."""
    tag = await world.budget(team, 10**6, axis="tag:project", window="month")
    assert (await world.ask(model="dear", key=team.key, **how)).status == 200
    assert await world.used_of(tag) == {value: (await booked(world), 0)}


async def test_rows_have_the_user_the_session_and_the_tags_of_their_request(world: World, team: Team) -> None:
    """Of a plain request, an odd one and an embedding; texts are bounded, stay apart, and no row is set aside."""
    long, many = "x" * 5_000, {f"tag{number:02}": "v" for number in range(40)}
    odd = {"": "a", "nul": "a\0b", "empty": "", "number": 7, long: long}
    await world.ask("one", model="dear", key=team.key)
    two_tags = {"x-sameway-tags": "app=web,=x,y"}
    await world.ask("two", model="dear", key=team.key, user="  alice ", prompt_cache_key="run-1", headers=two_tags)
    await world.ask("three", model="dear", key=team.key, user=f"{long}1", prompt_cache_key="run-1", metadata=odd)
    many["session_id"] = "run-2"
    await world.ask("four", model="dear", key=team.key, user=f"{long}2", prompt_cache_key="run-1", metadata=many)
    embedded = {"path": "/v1/embeddings", "input": "hello", "user": "bob"}
    await world.ask(None, model="all-minilm-l6-v2", key=team.key, **embedded)
    one, two, three, four, five = await world.ledger()
    assert (one.user, one.tags, five.user) == ("", "", "bob")
    assert (two.user, two.tags_by_name()) == ("alice", {"app": "web"})
    tags = three.tags_by_name()
    assert {name: value for name, value in tags.items() if len(name) < 60} == {"nul": "a\ufffdb", "number": "7"}
    assert [(len(name), name == value) for name, value in tags.items() if len(name) > 60] == [(64, True)]
    assert len(three.user) == len(four.user) == 64
    assert three.user != four.user
    assert len(four.tags_by_name()) == 16
    assert [row.session for row in (one, two, three, four, five)] == ["", "run-1", "run-1", "run-2", ""]
    assert [(row.region, row.deployment) for row in (one, five)] == [("eu-west-1", "dear"), ("", five.deployment)]


async def test_a_run_has_a_budget_under_the_name_that_its_rows_have(world: World, team: Team) -> None:
    """Whatever names a session, the count and the ledger have it alike; a request that names none is not held to it."""
    run = await world.budget(team, LONG, axis="session", window="total")
    named = [(name, {"headers": {name: f" run of {name} "}}) for name in SESSION_HEADERS]
    named += [("x", {"metadata": {"session_id": "run of x"}}), ("y", {"prompt_cache_key": "run of y"})]
    named += [("z", {"headers": {"x-sameway-session": "run of z", "session-id": "-"}, "prompt_cache_key": "-"})]
    long = "x" * 300
    for source, how in [*named, ("long", {"headers": {"session-id": long}})]:
        assert (await world.ask(source, model="dear", key=team.key, **how)).status == 200
    names = [row.session for row in await world.ledger()]
    assert names[:-1] == [f"run of {source}" for source, _ in named]
    assert {value[1:] for value in await world.used_of(run)} == set(names)
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=10, completion=1_000))
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1000}
    for path, body in (("chat/completions", said), ("responses", {"input": "b"}), ("messages", {**said, "top_k": 5})):
        headers = {"session-id": path, "cache-control": "no-cache"}
        how = {"model": "dear", "key": team.key, "path": f"/v1/{path}", "headers": headers, **body}
        assert (await world.ask(None, **how)).status == 200
        refused = await world.ask(None, **how)
        assert (refused.status, refused.headers["x-should-retry"]) == (402, "false")
        words = refused.error["message"]
        assert f"total budget of $0.004 for the session {path}: $0.00201 is spent" in words
        assert words.endswith("a new session has a budget of its own, and your admin can raise this one.")
    assert refused.error["type"] == "billing_error"
    assert (await world.ask("more", model="dear", key=team.key)).status == 200


async def test_tags_of_responses_count(world: World, team: Team) -> None:
    """The Responses API's metadata is not lost on the way."""
    tag = await world.budget(team, 10**6, axis="tag:project")
    how: dict[str, Any] = {"metadata": {"project": "x"}, "input": "hello", "path": "/v1/responses"}
    assert (await world.ask(None, model="dear", key=team.key, **how)).status == 200
    assert await world.used_of(tag) == {"=x": (await booked(world), 0)}


async def test_embeddings_draw_on_every_axis(world: World, team: Team) -> None:
    """Texts that are embedded count their tokens for the user and for the embedder."""
    each = await world.budget(team, 100, axis="user", unit="tokens")
    embedder = await world.budget(team, 100, axis="deployment", unit="requests")
    how: dict[str, Any] = {"path": "/v1/embeddings", "input": "three small words", "user": "alice"}
    reply = await world.ask(None, model="all-minilm-l6-v2", key=team.key, **how)
    assert reply.status == 200, reply.text
    assert await world.used_of(each) == {"=alice": (3, 0)}
    assert await world.used_of(embedder) == {"=embedder": (1, 0)}


async def test_free_answers_count_tokens_and_requests(world: World, team: Team) -> None:
    """A deployment without a price passes no limit of tokens or requests unseen."""
    tokens = await world.budget(team, 10**5, unit="tokens", axis="alias")
    requests = await world.budget(team, 2, unit="requests", axis="key")
    for content in ("one", "two"):
        assert (await world.ask(content, model="engine", key=team.key, max_tokens=10)).status == 200
    refused = await world.ask("three", model="engine", key=team.key, max_tokens=10)
    assert refused.status == 429
    assert "2 requests are spent" in refused.error["message"]
    assert await world.used_of(tokens) == {"=engine": (30, 0)}
    assert list((await world.used_of(requests)).values()) == [(2, 0)]


async def test_a_spent_deployment_is_passed_over_with_a_reason(world: World, team: Team) -> None:
    """The next deployment answers; where none has room, the refusal names the budget that has it last."""
    first = await world.budget(team, 2_000, axis="deployment", value="dear-first")
    second = await world.budget(team, LONG, axis="deployment", value="next", window="total")
    world.backends["dear-first"].plays("x", Finish(), Tokens(prompt=10, completion=1_000))
    for content, by in (("one", "dear-first"), ("two", "next")):
        reply = await world.ask(content, model="breaking", key=team.key, max_tokens=1000)
        assert reply.headers["x-sameway-backend"] == by
    record = await world.record(reply)
    assert ("dear-first", "has no room in its budget") in [(one.name, one.reason) for one in record.answer.rejected]
    assert (await world.used_of(first))[""] == (1_010, 0)
    await world.change_budget(second, limit=1)
    refused = await world.ask("three", model="breaking", key=team.key, max_tokens=1000)
    assert refused.status == 429
    assert "total budget of $0.000001 for the deployment next" in refused.error["message"]


async def test_the_books_agree_on_every_axis(world: World, team: Team) -> None:
    """After failures in the middle, leavers and answers without usage, each count is the ledger's sum, and nothing is held."""
    axes = [
        await world.budget(team, 10**7, axis=axis)
        for axis in ("user", "key", "alias", "deployment", "tag:p", "session")
    ]
    rolling = await world.budget(team, 10**7, window="rolling", rolling_s=3600)
    requests = await world.budget(team, 100, unit="requests")
    tokens = await world.budget(team, 10**7, unit="tokens")
    shared = await world.budget(team, 10**7, window="total")
    world.backends["dear-first"].plays_once("half ", broken())
    world.backends["dear-first"].plays_once(unavailable())
    for number in range(4):
        await world.ask(
            f"q{number}", model="breaking", key=team.key, user="alice", metadata={"p": "x"}, prompt_cache_key="r"
        )
    world.backends["dear"].plays("no usage", Finish())
    await world.ask("q", model="dear", key=team.key, user="bob", prompt_cache_key="r")
    never = asyncio.Event()
    world.backends["dear"].plays("one ", never)
    client = world.begin("leaves", model="dear", key=team.key, stream=True, user="bob", prompt_cache_key="s")
    await client.sees("one ")
    client.leave()
    await client.reply()
    await world.quiet()
    total, rows = await booked(world), await world.ledger()
    assert len(rows) == 7  # the answer that broke off has one of its own
    for budget in (*axes, rolling, shared):
        used = await world.used_of(budget)
        assert sum(spent for spent, _ in used.values()) == total, budget
        assert all(held == 0 for _, held in used.values()), budget
    assert (await world.used_of(requests))[""] == (6, 0)
    assert (await world.used_of(tokens))[""] == (
        sum(r.usage.prompt_tokens + r.usage.completion_tokens for r in rows),
        0,
    )
    by_deployment = await world.used_of(axes[3])
    for name in {row.deployment for row in rows}:
        assert by_deployment[f"={name}"][0] == sum(row.cost_microusd for row in rows if row.deployment == name)


async def test_a_second_try_holds_tokens_of_its_own(world: World, team: Team) -> None:
    """After an answer that broke off, another deployment is asked only if the tokens of both have room."""
    budget = await world.budget(team, 1_300, unit="tokens")
    world.backends["dear-first"].plays("half ", broken())
    reply = await world.ask(model="breaking", key=team.key, max_tokens=1000)
    assert reply.status != 200
    assert world.backends["next"].calls == []
    assert (await world.used_of(budget))[""][0] <= 1_300


async def test_a_budget_may_change_under_a_request(world: World, team: Team) -> None:
    """A budget that is made, lowered below its spend or deleted while an answer comes loses no hold and no row."""
    go = asyncio.Event()
    each = await world.budget(team, 10**6, axis="user")
    gone = await world.budget(team, 10**6, axis="alias")
    world.backends["dear"].plays("one ", go, "two", Finish(), Tokens(prompt=7, completion=3))
    client = world.begin("hello", model="dear", key=team.key, stream=True, user="alice")
    await client.sees("one ")
    late = await world.budget(team, 10**6, axis="tag:p")
    await world.change_budget(each, limit=1)
    await world.change_budget(gone)
    go.set()
    assert (await client.reply()).status == 200
    await world.quiet()
    assert await world.used_of(each) == {"=alice": (13, 0)}
    assert await world.used_of(gone) == {"=dear": (13, 0)}
    assert await world.used_of(late) == {}
    assert (await world.ask("more", model="dear", key=team.key, user="alice")).status == 429


async def test_an_answer_is_cut_where_the_budget_ends(world: World, team: Team) -> None:
    """Near the limit an answer of the usual length is asked for, which the header says, and it is not stored as the whole."""
    budget = await world.budget(team, 10**6, overdraft="truncate")
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=10, completion=20))
    for number in range(20):
        await world.ask(f"q{number}", model="dear", key=team.key)
    spent = (await world.used_of(budget))[""][0]
    await world.change_budget(budget, limit=spent + 1_000)
    world.backends["dear"].plays("cut ", Finish("length"), Tokens(prompt=10, completion=20))
    reply = await world.ask("long", model="dear", key=team.key, max_completion_tokens=900)
    assert reply.status == 200
    assert reply.headers["x-sameway-cut-at"] == "20"
    call = world.backends["dear"].calls[-1]
    assert call.body["max_tokens"] == 20
    assert "max_completion_tokens" not in call.body
    assert (await world.record(reply)).cache.store == "truncated"


async def test_an_answer_may_pass_the_limit_where_that_is_allowed(world: World, team: Team) -> None:
    """A usual answer is held; a longer one is charged whole, and the next request is refused."""
    budget = await world.budget(team, 10**6, overdraft="allow")
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=10, completion=20))
    for number in range(20):
        await world.ask(f"q{number}", model="dear", key=team.key)
    spent = (await world.used_of(budget))[""][0]
    await world.change_budget(budget, limit=spent + 1_000)
    world.backends["dear"].plays("x", Finish(), Tokens(prompt=10, completion=900))
    assert (await world.ask("long", model="dear", key=team.key)).status == 200
    assert (await world.used_of(budget))[""] == (spent + 10 + 1_800, 0)
    assert (await world.ask("more", model="dear", key=team.key)).status == 429


async def test_an_inference_gateway_hears_whose_a_request_is(world: World, team: Team) -> None:
    """Team, user, session and tag go in the headers that its operator named, quoted; a session is one from its first turn on."""
    said = [{"role": "user", "content": "first"}]
    more = [*said, {"role": "assistant", "content": "a"}, {"role": "user", "content": "second"}]
    await world.ask(model="behind", key=team.key, messages=said, user="zoë", metadata={"priority": "high"})
    await world.ask(model="behind", key=team.key, messages=more)
    third_turn = [*more, {"role": "assistant", "content": "b"}, {"role": "user", "content": "third"}]
    await world.ask(model="behind", key=team.key, messages=third_turn, prompt_cache_key="of the client's")
    first, second, third = (dict(call.trace) for call in world.backends["behind"].calls)
    assert (first["x-user"], first["x-objective"]) == ("zo%C3%AB", "high")
    assert first["x-fairness"] == second["x-fairness"] != ""
    assert second.keys() == {"x-fairness", "x-session"}
    assert first["x-session"] == second["x-session"]
    assert third["x-session"] == "of%20the%20client%27s"


def test_a_million_tags_cost_no_more_than_the_first() -> None:
    """What a client may send without limit is looked up by name: the event loop is held for a few milliseconds."""
    tags = {"session_id": "run-1", **{str(n): [1] for n in range(300_000)}}
    raw = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}'
    turn = read_turn(raw, {"x-sameway-tags": "env=prod"}, arrive(CHAT.name), metadata=tags)
    identity = Identity(Key(1, 1, "key", "sk-sw-", b"", 0.0), Payer(1, "team", 0.0), ())
    begun = time.thread_time()
    labels = booked_labels(turn, identity)
    assert time.thread_time() - begun < 0.05
    assert labels["session"] == "run-1"
    assert msgspec.json.decode(labels["tags"]) == {"session_id": "run-1", **{str(n): "[1]" for n in range(15)}}
