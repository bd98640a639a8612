"""Routes, retries and failover: free until the first chunk, an error after it."""

from __future__ import annotations

import asyncio

import pytest

from tests.world import (
    Finish,
    Tokens,
    World,
    broken,
    overloaded,
    rejected,
    timed_out,
    unavailable,
)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("failure", [unavailable(), overloaded(), timed_out(), broken()])
async def test_failover_before_the_first_chunk(world: World, failure: Exception, is_stream: bool) -> None:
    """A deployment that fails before its answer begins costs the client nothing; the record names both."""
    world.backends["first"].plays(failure)
    reply = await world.ask(model="pair", stream=is_stream)
    assert (reply.status, reply.headers["x-sameway-backend"], reply.content) == (200, "second", "answer of second")
    record = await world.record(reply)
    assert [one.name for one in record.attempts] == ["first", "second"]
    assert [one.verdict for one in record.attempts] == ["error", "ok"]
    assert (record.deployment, record.policy, record.status) == ("second", "cheapest", 200)
    assert record.store == "stored"  # the same model: as good as the first choice
    assert [row.deployment for row in await world.ledger()] == ["second"]


async def test_chunks_without_content_commit_to_nothing(world: World) -> None:
    """A deployment that fails after an empty first chunk is failed over, and the client sees none of it."""
    world.backends["first"].plays("", unavailable())
    reply = await world.ask(model="pair", stream=True)
    assert reply.content == "answer of second"
    assert len([event for event in reply.events if event != "[DONE]" and event["choices"]]) == 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_error_after_the_first_chunk(world: World, is_stream: bool) -> None:
    """An answer that has begun fails: no other deployment goes on with it, and what was read is paid."""
    world.backends["first"].plays_once("half ", unavailable("it died"))
    reply = await world.ask(model="pair", stream=is_stream)
    assert reply.status == (200 if is_stream else 503)
    assert reply.error["code"] == "upstream_unavailable"
    assert not reply.is_done
    assert world.backends["second"].calls == []
    record = await world.record(reply)
    assert (record.status, record.error, record.store) == (503, "upstream_unavailable", "incomplete")
    assert record.attempts[0].outcome == "it died"
    assert [row.completion_tokens for row in await world.ledger()] == [1]
    assert (await world.ask(model="pair")).cache == "miss"


async def test_all_fail_and_are_tried_again(world: World) -> None:
    """When every deployment failed there is a pause and a second round."""
    backend = world.backends["plain"]
    backend.plays_once(overloaded(retry_after_s=0.001))
    reply = await world.ask()
    assert (reply.status, reply.content) == (200, "answer of plain")
    record = await world.record(reply)
    assert [one.verdict for one in record.attempts] == ["error", "ok"]


async def test_all_fail_for_good(world: World) -> None:
    """After three attempts the last failure is the client's answer, and nothing is paid."""
    backend = world.backends["plain"]
    backend.plays(overloaded(retry_after_s=0.001))
    reply = await world.ask()
    assert (reply.status, reply.error["code"]) == (429, "upstream_overloaded")
    assert int(reply.headers["retry-after-ms"]) == 1
    record = await world.record(reply)
    assert 1 <= len(record.attempts) <= 3
    assert (record.deployment, record.store, record.cost_microusd) == ("", "", 0)
    assert await world.ledger() == []


async def test_a_long_pause_is_the_clients_to_take(world: World) -> None:
    """A deployment that asks for a long rest is not waited for: the client gets its retry-after."""
    world.backends["plain"].plays(overloaded(retry_after_s=7))
    reply = await world.ask()
    assert (reply.status, reply.headers["retry-after"]) == (429, "7")
    assert len(world.backends["plain"].calls) == 1


async def test_a_time_out_is_not_repeated(world: World) -> None:
    """A deployment that did not begin in time is not asked again by the same request."""
    world.backends["plain"].plays(timed_out())
    reply = await world.ask()
    assert (reply.status, reply.error["code"]) == (504, "upstream_timeout")
    assert len(world.backends["plain"].calls) == 1


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_a_request_at_fault_is_refused_once(world: World, status: int) -> None:
    """What the request itself got wrong is passed on word for word, tried nowhere else, and counts against no deployment."""
    world.backends["first"].plays(rejected(status))
    reply = await world.ask(model="pair")
    assert (reply.status, reply.error["message"], reply.error["param"]) == (status, "Bad field", "x")
    assert world.backends["second"].calls == []
    record = await world.record(reply)
    assert (record.status, record.error) == (status, "upstream_rejected")
    assert record.attempts[0].verdict == "refused"
    assert (await world.ask("another", model="pair")).status == status  # still the first choice


async def test_a_failing_deployment_is_left_alone(world: World) -> None:
    """After enough failures a deployment is rejected with its reason instead of being tried, and later tried again."""
    world.backends["first"].plays(unavailable())
    for number in range(10):
        reply = await world.ask(f"question {number}", model="pair")
    record = await world.record(reply)
    assert [one.name for one in record.attempts] == ["second"]
    (refused,) = record.rejected
    assert refused.name == "first"
    assert refused.reason
    world.backends["first"].plays("well ", "again", Finish(), Tokens())
    world.clock.passes(600)
    assert (await world.ask("after a rest", model="pair")).headers["x-sameway-backend"] == "first"


async def test_an_engine_that_is_starting_is_waited_for(world: World) -> None:
    """Where nothing can answer yet and something is about to, a late answer is better than an error."""
    world.backends["engine"].is_down("loading the model", is_starting=True)
    client = world.begin(model="engine")
    await asyncio.sleep(0.03)
    assert world.backends["engine"].calls == []
    world.backends["engine"].is_up()
    assert (await client.reply()).content == "answer of engine"


async def test_an_engine_that_is_down_is_not_waited_for(world: World) -> None:
    """Where nothing can answer and nothing is about to, the client gets 503 with the reason, and no hold stays."""
    world.backends["engine"].is_down("its process is gone")
    reply = await world.ask(model="engine")
    assert (reply.status, reply.error["code"]) == (503, "no_deployment_available")
    assert "its process is gone" in reply.error["message"]
    record = await world.record(reply)
    assert [(one.name, one.reason) for one in record.rejected] == [("engine", "is resting: its process is gone")]
    assert record.attempts == ()


async def test_a_client_does_not_wait_past_its_deadline_for_an_engine(world: World) -> None:
    """Waiting for an engine ends with the client's deadline."""
    world.backends["engine"].is_down("loading the model", is_starting=True)
    reply = await world.ask(model="engine", headers={"x-stainless-read-timeout": "0.05"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("model", "fields", "status", "code", "param"),
    [
        ("narrow", {"content": "long " * 200}, 400, "context_length_exceeded", "messages"),
        ("simple", {"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "unsupported_feature", "tools"),
        ("simple", {"response_format": {"type": "json_object"}}, 400, "unsupported_feature", "response_format"),
        ("nothing", {}, 404, "model_not_found", "model"),
    ],
)
async def test_why_no_deployment_may_answer(
    world: World, model: str, fields: dict[str, object], status: int, code: str, param: str
) -> None:
    """A request that no deployment can serve says which field makes it so, and costs nothing."""
    reply = await world.ask(model=model, **fields)
    assert (reply.status, reply.error["code"], reply.error["param"]) == (status, code, param)
    assert await world.ledger() == []
    record = await world.record(reply)
    assert (record.status, record.error, record.deployment) == (status, code, "")


async def test_a_model_that_is_not_configured_is_no_label(world: World) -> None:
    """A name that a client made up does not become a label in records."""
    assert (await world.record(await world.ask(model="made up"))).alias == ""


async def test_streams_are_asked_for_where_failover_is_possible(world: World) -> None:
    """A whole answer is streamed from a deployment that another could replace, and asked for whole from a lone one."""
    await world.ask(model="pair")
    await world.ask(model="mock")
    assert (world.backends["first"].calls[0].is_stream, world.backends["plain"].calls[0].is_stream) == (True, False)


async def test_a_fallback_model_answers_and_is_not_stored(world: World) -> None:
    """Another model than that of the first choice may answer, and its answer is not kept under the alias."""
    world.backends["big"].plays(unavailable())
    reply = await world.ask(model="mixed")
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "small")
    assert (await world.record(reply)).store == "fallback"
    assert (await world.ask(model="mixed")).cache == "miss"


async def test_a_fallback_is_one_also_while_the_first_choice_rests(world: World) -> None:
    """The first choice is what it would be if all were well, not what is left of the route."""
    world.backends["big"].is_down("restarting")
    reply = await world.ask(model="mixed")
    record = await world.record(reply)
    assert (record.deployment, record.store) == ("small", "fallback")
    assert [one.name for one in record.rejected] == ["big"]
