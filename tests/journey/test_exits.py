"""Every way out of the journey: refusals before it, bugs in it, a client that leaves; one response and one record each."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from gateway.backends.refusals import UpstreamRefusal, refusal
from tests.journey.conftest import OpenWorld
from tests.services import RedisServer
from tests.world import Finish, Tokens, World, overloaded, rejected, unavailable

INTERNAL = "The gateway failed while it answered this request"


@pytest.mark.parametrize("key", [None, "sk-sw-unknown"])
async def test_without_a_key_nothing_is_read(world: World, key: str | None) -> None:
    """A caller who is not known gets 401, also with a body that is no JSON, and a record without a team."""
    reply = await world.ask(key=key, raw=b"{no json")
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.request.team, record.request.alias) == (
        401,
        "invalid_api_key",
        "",
        "",
    )
    assert record.times.duration_ms >= 0


async def test_a_key_may_be_kept_to_some_models(world: World) -> None:
    """A key that is limited to other models gets 403, and the record names whose it was."""
    team = await world.team(models=("mock",))
    assert (await world.ask(key=team.key)).status == 200
    reply = await world.ask(model="pair", key=team.key)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (403, "model_not_allowed", "model")
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.request.team, record.request.alias) == (
        403,
        "model_not_allowed",
        "another",
        "pair",
    )


@pytest.mark.parametrize(
    ("raw", "param", "code"),
    [
        (b"{no json", None, "invalid_json"),
        (b"[]", None, "invalid_json"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "model", "missing_required_parameter"),
        (b'{"model": "mock", "messages": []}', "messages", "invalid_value"),
        (b'{"model": "mock", "messages": [{"role": "user"}]}', "messages[0].content", "missing_required_parameter"),
        (b'{"model": "mock", "messages": [{"role": "user", "content": "x"}], "cache": 1}', "cache", "invalid_type"),
    ],
    ids=["no json", "no object", "no model", "no messages", "no content", "cache"],
)
async def test_what_is_asked_wrongly_is_refused(world: World, raw: bytes, param: str | None, code: str) -> None:
    """A body that can't be used gets 400 with the field, before a limit is charged or a deployment asked."""
    reply = await world.ask(raw=raw)
    assert (reply.status, reply.error["param"], reply.error["code"]) == (400, param, code)
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.request.team) == (400, code, "default")
    assert record.answer.attempts == ()


async def test_a_body_that_is_too_large(open_a_world: OpenWorld) -> None:
    """A body beyond the limit is refused with 413."""
    world = await open_a_world(body_bytes_max=1_000)
    reply = await world.ask("x" * 2_000)
    assert (reply.status, reply.error["code"]) == (413, "request_too_large")
    assert (await world.record(reply)).ended.status == 413
    await world.is_released()


async def test_a_refusal_is_recorded_in_the_words_the_client_got(world: World) -> None:
    """Budgets, rate limits and a limited key: the record has the amounts, the limits and the reset that the response has."""
    poor, slow, narrow = (
        await world.team("poor"),
        await world.team("slow", requests_per_min=1),
        await world.team("narrow"),
    )
    await world.budget(poor, 5)
    limited = await world.team("limited", models=("pair",))
    await world.ask(key=slow.key)
    for reply, words in (
        (await world.ask("x", key=poor.key), "day budget of $0.000005: $0 is spent"),
        (await world.ask("x", key=slow.key), "1 requests per minute. Try again in"),
        (await world.ask("x", key=limited.key), "may not use the model `mock`"),
        (await world.ask("x", key=narrow.key, model="narrow", max_tokens=4_000), "narrow"),
    ):
        record = await world.record(reply)
        assert record.ended.refusal == reply.error["message"]
        assert words in record.ended.refusal


async def test_the_name_of_an_unknown_model_is_recorded(world: World) -> None:
    """Cut and in printable characters, beside an alias that stays empty: a name that a client chose is never a label."""
    for asked, shown in (
        ("gpt-9", "gpt-9"),
        ("x" * 5_000, "x" * 99 + "…"),
        ("a\x1b[31m\n\u202eb", "a\\x1b[31m\\n\\u202eb"),
        ("\x00" * 500, "\\x00" * 25),
    ):
        reply = await world.ask(model=asked)
        assert (reply.status, reply.error["code"]) == (404, "model_not_found")
        assert shown in reply.error["message"]
        record = await world.record(reply)
        assert (record.request.alias, record.request.model, record.ended.refusal) == ("", shown, reply.error["message"])


async def test_a_providers_words_are_not_recorded_as_ours(world: World) -> None:
    """A provider may quote the prompt in its refusal: the client gets that, the record only the code."""
    world.backends["plain"].plays(rejected(words="Bad content: my secret"))
    reply = await world.ask("my secret")
    assert "my secret" in reply.error["message"]
    record = await world.record(reply)
    assert (record.ended.error, record.ended.refusal) == ("upstream_rejected", "")


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("where", ["semantic", "route", "backend"])
async def test_a_bug_in_a_stage(world: World, logged: list[Any], where: str, is_stream: bool) -> None:
    """A bug before the first chunk is a 500 that tells no details; it is logged, nothing stays held, and nothing is paid."""
    team = await world.team()
    await world.budget(team, 1_000_000)
    bug = RuntimeError("a secret detail")
    if where == "semantic":
        world.semantic.bug = bug
    elif where == "route":
        world.backends["plain"].bug = bug
    else:
        world.backends["plain"].plays(bug)
    reply = await world.ask(key=team.key, stream=is_stream)
    assert (reply.status, reply.error["code"], reply.error["message"]) == (500, "internal_error", INTERNAL)
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.cache.store) == (500, "internal_error", "")
    assert await world.money_of(team) == (0, 0)
    assert await world.ledger() == []
    assert [one["event"] for one in logged if one["log_level"] == "error"] == ["generation_failed"]


async def test_a_bug_after_the_first_chunk(world: World) -> None:
    """A stream that is cut by a bug ends with an error event; what had come is paid, and not stored."""
    world.backends["plain"].plays("half ", RuntimeError("a bug"))
    reply = await world.ask(stream=True)
    assert (reply.status, reply.error["code"], reply.is_done) == (200, "internal_error", False)
    record = await world.record(reply)
    (row,) = await world.ledger()
    assert (record.ended.status, record.cache.store, record.usage.completion_tokens) == (
        500,
        "incomplete",
        row.usage.completion_tokens,
    )
    assert row.usage.completion_tokens >= 2


async def test_a_bug_is_no_fault_of_the_deployment(world: World) -> None:
    """A deployment is not rested for a bug of the gateway's."""
    world.backends["first"].plays(RuntimeError("a bug"))
    for number in range(10):
        assert (await world.ask(f"question {number}", model="pair")).status == 500
    world.backends["first"].plays("well", Finish(), Tokens())
    assert (await world.ask("again", model="pair")).headers["x-sameway-backend"] == "first"


@pytest.mark.parametrize("stage", ["store", "settle"])
async def test_a_bug_while_recording_takes_nothing_from_the_client(world: World, logged: list[Any], stage: str) -> None:
    """The answer has left by then: the client has all of it, the failure is logged, and the other work is done."""
    world.breaks(stage)
    reply = await world.ask(stream=True)
    assert (reply.status, reply.content, reply.is_done) == (200, "answer of plain", True)
    record = await world.record(reply)
    assert (record.ended.status, record.money.cost_microusd) == (200, 20)
    assert "record_failed" in [one["event"] for one in logged]
    if stage == "settle":
        assert (await world.ask()).cache == "exact"
    else:
        assert len(await world.ledger()) == 1


async def test_a_bug_before_the_answer_is_kept(world: World) -> None:
    """A record stage that fails at once ends the flight: no reader waits for ever."""
    world.breaks("store_local")
    reply = await world.begin(stream=True).reply()
    assert (reply.status, reply.error["code"], reply.is_done) == (200, "internal_error", False)
    assert "recorded" in reply.error["message"]


async def test_a_client_that_leaves_at_once(world: World) -> None:
    """A client that has gone before its request was read leaves a record of it and nothing else."""
    client = world.begin(model="mock")
    client.leave()
    await client.reply()
    await world.quiet()
    assert len(world.records) == 1


async def test_a_client_that_reads_a_hit_and_leaves(world: World) -> None:
    """A hit is sent in one piece: leaving changes neither the answer nor the record."""
    await world.ask()
    client = world.begin(stream=True)
    client.leave()
    reply = await client.reply()
    assert (await world.record(reply)).cache.source == "exact"


async def test_the_journey_without_redis(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """Without Redis a request is generated, answered and recorded: a cache that fails is a miss."""
    world = await open_a_world(own_redis)
    await world.ask()
    own_redis.kill()
    replies = [await world.ask(), await world.ask("another", stream=True)]
    assert [(reply.status, reply.content) for reply in replies] == [(200, "answer of plain")] * 2
    record = await world.record(replies[1])
    assert (record.cache.degraded, record.cache.store) == (("redis",), "unavailable")


async def test_a_redis_that_hangs_costs_its_time_out(open_a_world: OpenWorld, own_redis: RedisServer) -> None:
    """A Redis that takes commands and answers none is given up after its time-out, and then not asked for a while."""
    world = await open_a_world(own_redis, redis_timeout_ms=50)
    own_redis.pause()
    try:
        replies = [await world.ask(f"question {number}") for number in range(3)]
    finally:
        own_redis.resume()
    assert [reply.status for reply in replies] == [200] * 3


async def test_many_at_once_leave_nothing(world: World) -> None:
    """A hundred requests, some leaving early, some failing, some the same: each has one record, and nothing stays."""
    world.backends["first"].plays("", RuntimeError("a bug"))
    world.backends["first"].plays_once("one ", "two", Finish(), Tokens())
    clients = [
        world.begin(
            f"question {number % 20}", model=("mock", "pair", "dear", "nothing")[number % 4], stream=number % 3 == 0
        )
        for number in range(100)
    ]
    for number, client in enumerate(clients):
        if number % 7 == 0:
            await asyncio.sleep(0)
            client.leave()
    for client in clients:
        await client.reply()
    await world.quiet()
    assert len(world.records) == 100


async def test_an_internal_request_is_recorded_once(world: World) -> None:
    """One that is answered and one that fails before it begins leave a record each."""
    assert b"answer of plain" in (await world.ask_internally("judge this") or b"")
    world.backends["plain"].plays(rejected())
    assert await world.ask_internally("judge that") is None
    assert [(record.request.operation, record.cache.source, record.ended.status) for record in world.records] == [
        ("verify", "bypass", 200),
        ("verify", "bypass", 400),
    ]


@pytest.mark.parametrize(
    "how",
    [{"key": None}, {"raw": b"{no json"}, {"model": "none"}],
    ids=["401", "400", "404"],
)
async def test_a_refusal_leaves_nothing_to_the_collector(world: World, how: dict[str, Any]) -> None:
    """A refused request, whose exception has a traceback, is freed by its last reference."""
    await world.ask(**how)
    rounds = list[int]()
    gc.disable()
    try:
        for _ in range(5):  # what runs beside the requests may leave a cycle in one of the rounds
            gc.collect()
            for _ in range(10):
                await world.ask(**how)
            rounds.append(gc.collect())
            if rounds[-1] < 10:
                break
    finally:
        gc.enable()
    assert min(rounds) < 10, rounds


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (408, "timeout_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "api_error"),
        (504, "timeout_error"),
        (529, "overloaded_error"),
    ],
)
async def test_a_message_learns_why_its_deployment_failed(world: World, status: int, kind: str) -> None:
    """Each status is one of its own in Anthropic's API; a limit comes with the provider's words and numbers."""
    told, limits = b'{"error": {"message": "Slow down."}}', {"x-ratelimit-remaining-tokens": "0"}
    world.backends["plain"].plays(refusal(UpstreamRefusal(status, told, 7.0, limits=limits)))
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    reply = await world.ask(None, path="/v1/messages", **asked)
    assert (reply.status, reply.error["type"]) == (status, kind)
    assert reply.headers["request-id"] == reply.headers["x-request-id"]
    if status == 429:
        assert "Slow down." in reply.error["message"]
        assert (reply.headers["x-ratelimit-remaining-tokens"], reply.headers["retry-after"]) == ("0", "7")


async def test_a_full_queue_is_no_failure_for_a_message(world: World) -> None:
    """It is what Anthropic calls overloaded; a connection that fails is not."""
    asked = {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    for failure, told in ((overloaded(), (529, "overloaded_error")), (unavailable(), (503, "api_error"))):
        world.backends["plain"].plays(failure)
        reply = await world.ask(None, path="/v1/messages", **asked)
        assert (reply.status, reply.error["type"]) == told
