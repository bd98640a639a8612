"""Routes, retries and failover: free until the first chunk, an error after it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.backends.base import BackendNotAsked
from gateway.backends.refusals import UpstreamRefusal, refusal
from tests.journey.conftest import OpenWorld
from tests.world import (
    Finish,
    Tokens,
    World,
    broken,
    denied,
    deployment,
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
    assert [one.name for one in record.answer.attempts] == ["first", "second"]
    assert [one.verdict for one in record.answer.attempts] == ["error", "ok"]
    assert (record.answer.deployment, record.answer.policy, record.ended.status) == ("second", "cheapest", 200)
    assert record.cache.store == "stored"  # the same model: as good as the first choice
    assert [row.deployment for row in await world.ledger()] == ["second"]


async def test_a_whole_answer_has_a_limit_of_its_own(open_a_world: OpenWorld) -> None:
    """The deployment's `whole_timeout_ms`, ten minutes by default, bounds an answer in one piece, beside that of a first chunk."""
    hurried = deployment("hurried", ttft_timeout_ms=8_000, whole_timeout_ms=20_000)
    world = await open_a_world(
        models={"hurried": {"deployments": [hurried]}, "usual": {"deployments": [deployment("usual")]}}
    )
    for name in ("hurried", "usual"):
        assert (await world.ask(model=name)).status == 200
    (call,), (usual,) = world.backends["hurried"].calls, world.backends["usual"].calls
    assert (call.is_stream, call.ttft_timeout_s, call.whole_timeout_s, usual.whole_timeout_s) == (
        False,
        8.0,
        20.0,
        600.0,
    )


async def test_what_this_host_lacks_rests_no_deployment(world: World) -> None:
    """However often a host has no descriptor for a call, the deployment is asked again as soon as it has one; others go first."""
    world.backends["first"].plays(BackendNotAsked("OSError: [Errno 24] Too many open files"))
    for number in range(10):
        assert (await world.ask(f"question {number}", model="pair")).content == "answer of second"
    world.backends["second"].plays(BackendNotAsked("OSError: [Errno 24] Too many open files"))
    refused = [await world.ask(f"another {number}", model="pair") for number in range(3)]
    assert {(reply.status, reply.error["code"]) for reply in refused} == {(503, "upstream_unavailable")}
    for name in ("first", "second"):
        world.backends[name].plays("well ", Finish(), Tokens())
    assert (await world.ask("well?", model="pair")).headers["x-sameway-backend"] == "first"


async def test_chunks_without_content_commit_to_nothing(world: World) -> None:
    """A deployment that fails after an empty first chunk is failed over, and the client sees none of it."""
    world.backends["first"].plays("", unavailable())
    reply = await world.ask(model="pair", stream=True)
    assert reply.content == "answer of second"
    assert len([event for event in reply.events if event != "[DONE]" and event["choices"]]) == 3


async def test_an_error_after_the_first_chunk(world: World) -> None:
    """A stream that has begun fails: no other deployment goes on with it by assumption, and what was read is paid."""
    world.backends["first"].plays_once("half ", unavailable("it died"))
    reply = await world.ask(model="pair", stream=True)
    assert reply.status == 200
    assert reply.error["code"] == "upstream_unavailable"
    assert not reply.is_done
    assert world.backends["second"].calls == []
    record = await world.record(reply)
    assert (record.ended.status, record.ended.error, record.cache.store) == (503, "upstream_unavailable", "incomplete")
    assert record.answer.attempts[0].outcome == "it died"
    (row,) = await world.ledger()
    assert row.usage.completion_tokens >= 1
    assert (await world.ask(model="pair")).cache == "miss"


async def test_a_whole_that_breaks_is_failed_over(world: World) -> None:
    """No byte of a whole has left: the next deployment answers, both are paid, and the answer is stored."""
    team = await world.team("with money")
    await world.budget(team, 1_000_000)
    world.backends["dear-first"].plays_once("half ", "of ", broken())
    reply = await world.ask(model="breaking", key=team.key)
    assert (reply.status, reply.headers["x-sameway-backend"], reply.content) == (200, "next", "answer of next")
    record = await world.record(reply)
    assert [one.verdict for one in record.answer.attempts] == ["error", "ok"]
    assert (record.cache.store, record.usage.completion_tokens) == ("stored", 5)
    rows = await world.ledger()
    tokens = {row.deployment: row.usage.completion_tokens for row in rows}
    assert (tokens["next"], tokens["dear-first"] >= 2) == (5, True)
    assert len({row.id for row in rows}) == 2
    assert {row.request_id for row in rows} == {reply.id}
    spent, held = await world.money_of(team)
    assert (spent, held) == (sum(row.cost_microusd for row in rows), 0)
    assert record.money.cost_microusd == spent
    again = await world.ask(model="breaking", key=team.key)
    answer = next(row for row in rows if row.deployment == "next")
    assert (again.cache, (await world.record(again)).money.avoided_microusd) == ("exact", answer.cost_microusd)


async def test_a_whole_that_breaks_everywhere_fails_once(world: World) -> None:
    """A deployment that broke inside its answer is not asked again by the same request; each is paid once."""
    world.backends["first"].plays("one ", broken())
    world.backends["second"].plays("one ", "two ", broken())
    reply = await world.ask(model="pair")
    assert (reply.status, reply.error["code"]) == (502, "upstream_broken")
    assert [len(world.backends[name].calls) for name in ("first", "second")] == [1, 1]
    rows = await world.ledger()
    assert len([row for row in rows if row.usage.completion_tokens > 0]) == 2
    assert (await world.record(reply)).money.cost_microusd == sum(row.cost_microusd for row in rows)


async def test_a_second_answer_needs_money_of_its_own(world: World) -> None:
    """After a paid try the next one is held for; where the budget has no room, the first failure is the client's."""
    team = await world.team("nearly out of money")
    worst = 2 * 1000 + 200
    await world.budget(team, worst)
    world.backends["dear-first"].plays("word " * 10, *["word"] * 150, broken())
    reply = await world.ask("x", model="breaking", key=team.key, max_tokens=1000)
    assert (reply.status, reply.error["code"]) == (502, "upstream_broken")
    assert world.backends["next"].calls == []
    spent, held = await world.money_of(team)
    assert (spent, held) == (sum(row.cost_microusd for row in await world.ledger()), 0)


async def test_a_stream_that_has_begun_ends_and_the_whole_beside_it_does_not(world: World) -> None:
    """Of one flight, the stream whose client has bytes ends with the error; the whole gets the next deployment's answer."""
    go = asyncio.Event()
    world.backends["first"].plays_once("half ", go, broken())
    streamed = world.begin(model="pair", stream=True)
    await streamed.sees("half ")
    whole = world.begin(model="pair")
    await asyncio.sleep(0.1)  # it has joined the flight
    go.set()
    stream, answer = await streamed.reply(), await whole.reply()
    assert (stream.content, stream.error["code"], stream.is_done) == ("half ", "upstream_broken", False)
    assert (answer.status, answer.cache, answer.content) == (200, "coalesced", "answer of second")
    assert (await world.record(stream)).ended.status == 502
    assert len(await world.ledger()) == 2
    assert (await world.ask(model="pair")).content == "answer of second"


async def test_a_stream_that_joins_a_second_answer_sees_only_that(world: World) -> None:
    """A stream that joins while the next deployment is asked gets the second answer, and nothing of the first."""
    broke, go = asyncio.Event(), asyncio.Event()
    world.backends["first"].plays_once("half ", broke, broken())
    world.backends["second"].plays_once(go, "all of it", Finish(), Tokens())
    whole = world.begin(model="pair")
    await world.backends["first"].called()
    await asyncio.sleep(0.005)
    broke.set()
    await world.backends["second"].called()
    stream = world.begin(model="pair", stream=True)
    await asyncio.sleep(0.005)
    go.set()
    assert [(await client.reply()).content for client in (whole, stream)] == ["all of it"] * 2


def _too_long(words: str, code: str | None = "context_length_exceeded") -> Exception:
    """What a deployment makes of a request that does not fit its context."""
    error = {"error": {"message": words, "type": "invalid_request_error", "param": "messages", "code": code}}
    return refusal(UpstreamRefusal(400, json.dumps(error).encode()))


_OPENAI_WORDS = (
    "This model's maximum context length is 8192 tokens. However, your messages resulted in 9631 tokens. "
    "Please reduce the length of the messages."
)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_context_that_is_too_small_is_failed_over(world: World, is_stream: bool) -> None:
    """The next deployment whose context is larger or unknown answers; the smaller one is passed by, and no breaker counts it."""
    world.backends["told-8k"].plays(_too_long(_OPENAI_WORDS))
    reply = await world.ask(model="windows", stream=is_stream)
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "unknown")
    assert world.backends["also-8k"].calls == []
    record = await world.record(reply)
    assert [one.verdict for one in record.answer.attempts] == ["refused", "ok"]
    for number in range(10):
        await world.ask(f"question {number}", model="windows")
    world.backends["told-8k"].plays("short ", "again", Finish(), Tokens())
    assert (await world.ask("another", model="windows")).headers["x-sameway-backend"] == "told-8k"


async def test_the_size_of_a_context_is_kept(world: World) -> None:
    """A deployment that gave the size of its context is not asked again, for a while, with a prompt that certainly is longer."""
    world.backends["told-8k"].plays(_too_long("This model's maximum context length is 100 tokens."))
    await world.ask("word " * 200, model="windows")
    assert len(world.backends["told-8k"].calls) == 1
    reply = await world.ask("other " * 200, model="windows")
    assert len(world.backends["told-8k"].calls) == 1
    (refused,) = [one for one in (await world.record(reply)).answer.rejected if one.name == "told-8k"]
    assert refused.reason.startswith("has a context of 100 tokens")
    world.clock.passes(601)
    await world.ask("more " * 200, model="windows")
    assert len(world.backends["told-8k"].calls) == 2


async def test_a_context_that_is_too_small_everywhere_is_the_clients_error(world: World) -> None:
    """Where no larger context is left the client gets the deployment's own 400."""
    world.backends["first"].plays(_too_long(_OPENAI_WORDS))
    world.backends["second"].plays(_too_long("Prompt is too long: 9631 tokens > 8192 maximum", None))
    reply = await world.ask(model="pair")
    assert (reply.status, reply.error["code"], reply.error["message"]) == (
        400,
        "context_length_exceeded",
        _OPENAI_WORDS,
    )
    assert [len(world.backends[name].calls) for name in ("first", "second")] == [1, 1]
    assert await world.ledger() == []


async def test_all_fail_and_are_tried_again(world: World) -> None:
    """When every deployment failed there is a pause and a second round."""
    backend = world.backends["plain"]
    backend.plays_once(overloaded(retry_after_s=0.001))
    reply = await world.ask()
    assert (reply.status, reply.content) == (200, "answer of plain")
    record = await world.record(reply)
    assert [one.verdict for one in record.answer.attempts] == ["error", "ok"]


async def test_all_fail_for_good(world: World) -> None:
    """After three attempts the last failure is the client's answer, and nothing is paid."""
    backend = world.backends["plain"]
    backend.plays(overloaded(retry_after_s=0.001))
    reply = await world.ask()
    assert (reply.status, reply.error["code"]) == (429, "upstream_overloaded")
    assert int(reply.headers["retry-after-ms"]) == 1
    record = await world.record(reply)
    assert 1 <= len(record.answer.attempts) <= 3
    assert (record.answer.deployment, record.cache.store, record.money.cost_microusd) == ("", "", 0)
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
    assert (record.ended.status, record.ended.error) == (status, "upstream_rejected")
    assert record.answer.attempts[0].verdict == "refused"
    assert (await world.ask("another", model="pair")).status == status  # still the first choice


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [401, 402, 403, 404, 409, 451])
async def test_a_permanent_refusal_is_failed_over(world: World, status: int, is_stream: bool) -> None:
    """A deployment that refuses for good is tried once, and the next one answers."""
    world.backends["first"].plays(denied(status))
    reply = await world.ask(model="pair", stream=is_stream)
    assert (reply.status, reply.headers["x-sameway-backend"]) == (200, "second")
    record = await world.record(reply)
    assert [one.verdict for one in record.answer.attempts] == ["denied", "ok"]
    assert len(world.backends["first"].calls) == 1


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("status", [401, 402, 403, 404, 409, 451])
async def test_a_permanent_refusal_is_told_once(world: World, status: int, is_stream: bool) -> None:
    """Where no deployment is left the client gets the cause, under a status that is not its own key's and that no SDK retries."""
    world.backends["plain"].plays(denied(status, "No, says the provider"))
    reply = await world.ask(stream=is_stream)
    assert (reply.status, reply.error["code"], reply.error["type"]) == (424, "upstream_denied", "upstream_error")
    assert reply.headers["x-should-retry"] == "false"
    assert "retry-after" not in reply.headers
    assert f"HTTP {status}" in reply.error["message"]
    assert "No, says the provider" in reply.error["message"]
    assert len(world.backends["plain"].calls) == 1
    assert await world.ledger() == []
    assert (await world.record(reply)).ended.error == "upstream_denied"


async def test_each_refusal_is_in_the_message(world: World) -> None:
    """Where several deployments refuse, the message has the cause of each; none is tried twice."""
    world.backends["first"].plays(denied(403, "Not from here"))
    world.backends["second"].plays(denied(451, "Not by law"))
    reply = await world.ask(model="pair")
    assert reply.status == 424
    assert all(part in reply.error["message"] for part in ("first: ", "Not from here", "second: ", "Not by law"))
    assert [len(world.backends[name].calls) for name in ("first", "second")] == [1, 1]


_PROMPT = "My name is Ada\nand my sister's is “Eve”, who lives at the end of our street."


@pytest.mark.parametrize(
    "words",
    [
        _PROMPT,
        f"Invalid input: {json.dumps(_PROMPT)[:50]}",
        f"got {json.dumps(_PROMPT)[-45:]}",
        json.dumps({"input": _PROMPT}, ensure_ascii=False),
    ],
)
@pytest.mark.parametrize("failed", [denied, rejected])
async def test_words_of_a_server_that_quote_the_prompt_are_in_no_record(world: World, words: str, failed: Any) -> None:
    """The client reads them, whole or a part and however JSON spells them; the record says where they came from, and keeps others."""
    world.backends["plain"].plays(failed(403, words))
    reply = await world.ask(_PROMPT)
    record = await world.record(reply)
    assert words.split()[-1] in reply.error["message"]
    assert record.answer.attempts[-1].outcome.endswith("in words of the request")
    assert not any(part in repr(record) for part in ("Ada", "Eve", "street"))
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    assert (await world.record(await world.ask(_PROMPT, x=deep))).answer.attempts[-1].outcome.endswith("of the request")
    other = await world.record(await world.ask("Another request, of which they say nothing."))
    assert other.answer.attempts[-1].outcome == failed(403, words).detail[:300]
    long = await world.record(await world.ask("Another one", x="y" * 2**20))
    assert long.answer.attempts[-1].outcome.endswith("in words of the request")


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("refusing", ["first", "second"])
async def test_what_a_retry_mends_is_retried_without_what_it_does_not(world: World, status: int, refusing: str) -> None:
    """Beside a deployment that refuses for good one that is overloaded is tried again, and its failure is the client's answer."""
    overworked = "second" if refusing == "first" else "first"
    world.backends[refusing].plays(denied(status))
    world.backends[overworked].plays(overloaded(retry_after_s=0.001))
    reply = await world.ask(model="pair")
    assert (reply.status, reply.error["code"]) == (429, "upstream_overloaded")
    assert len(world.backends[refusing].calls) == 1
    assert "x-should-retry" not in reply.headers


@pytest.mark.parametrize(
    ("status", "code", "mark"),
    [(401, None, "key refused"), (402, None, "no credit"), (404, "model_not_found", "no such model there")],
)
async def test_what_refuses_every_request_rests(world: World, status: int, code: str | None, mark: str) -> None:
    """A key, credit or model that three requests were refused rests the deployment; the route says why, and later one tries it."""
    first = world.backends["first"]
    first.plays(denied(status, code=code))
    for number in range(3):
        await world.ask(f"one {number}", model="pair")
    reply = await world.ask("two", model="pair")
    assert len(first.calls) == 3
    record = await world.record(reply)
    (refused,) = record.answer.rejected
    assert refused.reason.startswith(f"is resting: {mark} (HTTP {status}), next try in ")
    assert [one.name for one in record.answer.attempts] == ["second"]
    world.clock.passes(70)
    await world.ask("three", model="pair")
    assert len(first.calls) == 4
    first.plays("well ", "again", Finish(), Tokens())
    world.clock.passes(70)
    assert (await world.ask("four", model="pair")).content == "well again"
    assert (await world.ask("five", model="pair")).content == "well again"


async def test_a_lone_deployment_that_refuses_recovers_by_itself(world: World) -> None:
    """While the only deployment rests, requests are refused at once with the cause; the first one after its rest finds it mended."""
    plain = world.backends["plain"]
    plain.plays(denied(401))
    for number in range(3):
        await world.ask(f"one {number}")
    reply = await world.ask("two")
    assert (reply.status, reply.error["code"]) == (424, "upstream_denied")
    assert "key refused (HTTP 401)" in reply.error["message"]
    assert reply.headers["x-should-retry"] == "false"
    assert len(plain.calls) == 3
    plain.plays("mended", Finish(), Tokens())
    world.clock.passes(70)
    assert (await world.ask("three")).content == "mended"
    assert (await world.ask("four")).content == "mended"


async def test_the_first_chunk_of_a_probe_ends_the_rest(world: World) -> None:
    """A deployment that begins to answer is mended: other requests need not wait for the end of that answer."""
    plain = world.backends["plain"]
    for number in range(3):
        plain.plays_once(denied(402))
        await world.ask(f"one {number}")
    world.clock.passes(70)
    more = asyncio.Event()
    plain.plays_once("long ", more, "answer", Finish(), Tokens())
    probe = world.begin("two", stream=True)
    await plain.called(4)
    await probe.sees("long")
    assert (await world.begin("three").reply()).status == 200
    more.set()
    assert (await probe.reply()).content == "long answer"


async def test_while_a_probe_runs_a_retry_may_help(world: World) -> None:
    """A request beside the probe of a lone deployment is not told that a retry is useless."""
    plain = world.backends["plain"]
    for number in range(3):
        plain.plays_once(denied(401))
        await world.ask(f"one {number}")
    world.clock.passes(70)
    more = asyncio.Event()
    plain.plays_once(more, "late", Finish(), Tokens())
    probe = world.begin("two")
    await plain.called(4)
    reply = await world.begin("three").reply()
    assert (reply.status, reply.error["code"]) == (503, "no_deployment_available")
    assert "x-should-retry" not in reply.headers
    more.set()
    assert (await probe.reply()).status == 200


@pytest.mark.parametrize("status", [403, 409, 451])
async def test_what_may_be_the_requests_marks_nothing(world: World, status: int) -> None:
    """However many requests are forbidden one by one, the deployment stays the first choice of others."""
    first = world.backends["first"]
    for number in range(20):
        first.plays_once(denied(status))
        assert (await world.ask(f"question {number}", model="pair")).headers["x-sameway-backend"] == "second"
    assert (await world.ask("another", model="pair")).headers["x-sameway-backend"] == "first"


async def test_a_request_at_fault_is_no_proof_that_a_key_works(world: World) -> None:
    """A probe that is refused for its own form ends no rest: the next request probes."""
    first = world.backends["first"]
    for number in range(3):
        first.plays_once(denied(401))
        await world.ask(f"one {number}", model="pair")
    world.clock.passes(70)
    first.plays_once(rejected(400))
    assert (await world.ask("two", model="pair")).status == 400
    first.plays_once(denied(401))
    assert (await world.ask("three", model="pair")).headers["x-sameway-backend"] == "second"
    assert (await world.ask("four", model="pair")).headers["x-sameway-backend"] == "second"
    assert len(first.calls) == 5


async def test_an_answer_of_another_model_is_a_fallback_while_the_first_refuses(world: World) -> None:
    """The answer of another model is not kept while the first choice's key is refused."""
    world.backends["big"].plays(denied(401))
    for number in range(2):
        reply = await world.ask(f"question {number}", model="mixed")
        assert (await world.record(reply)).cache.store == "fallback"


async def test_a_failing_deployment_is_left_alone(world: World) -> None:
    """After enough failures a deployment is rejected with its reason instead of being tried, and later tried again."""
    world.backends["first"].plays(unavailable())
    for number in range(10):
        reply = await world.ask(f"question {number}", model="pair")
    record = await world.record(reply)
    assert [one.name for one in record.answer.attempts] == ["second"]
    (refused,) = record.answer.rejected
    assert refused.name == "first"
    assert refused.reason
    world.backends["first"].plays("well ", "again", Finish(), Tokens())
    world.clock.passes(600)
    assert (await world.ask("after a rest", model="pair")).headers["x-sameway-backend"] == "first"


async def test_a_deployment_that_is_back_is_used_within_ten_seconds(world: World) -> None:
    """After an outage of any length a live request finds within 10 s that the first choice answers again."""
    first = world.backends["first"]
    first.plays(unavailable())
    for number in range(60):
        world.clock.passes(4)
        assert (await world.ask(f"question {number}", model="pair")).headers["x-sameway-backend"] == "second"
    assert len(first.calls) < 60 / 2 + 6
    first.plays("well ", "again", Finish(), Tokens())
    world.clock.passes(10)
    assert (await world.ask("after the outage", model="pair")).headers["x-sameway-backend"] == "first"


async def test_a_deployment_that_never_answered_is_not_waited_for_long(world: World) -> None:
    """Beside another deployment a first call has about 10 s to its first token, and more for a long prompt; alone it has 60 s."""
    first, second = world.backends["first"], world.backends["second"]
    first.plays_once(timed_out())
    assert (await world.ask("one", model="pair")).headers["x-sameway-backend"] == "second"
    assert (first.calls[0].ttft_timeout_s, second.calls[0].ttft_timeout_s) == (10.0, 60.0)
    await world.ask("many words " * 30_000, model="pair")
    assert first.calls[1].ttft_timeout_s > 20.0
    await world.ask("one")
    assert world.backends["plain"].calls[0].ttft_timeout_s == 60.0


async def test_a_lone_deployment_is_not_closed_for_an_hour(world: World) -> None:
    """Where no other deployment can answer, a long retry-after rests a deployment for 10 s."""
    plain = world.backends["plain"]
    plain.plays_once(overloaded(retry_after_s=3600))
    assert (await world.ask("one")).status == 429
    assert (await world.ask("two")).status == 503
    world.clock.passes(10.5)
    assert (await world.ask("three")).status == 200
    assert (await world.ask("four")).status == 200


async def test_a_long_retry_after_is_obeyed_while_another_deployment_answers(world: World) -> None:
    """A deployment that asked for an hour gets it, until the others cannot answer."""
    first, second = world.backends["first"], world.backends["second"]
    first.plays_once(overloaded(retry_after_s=3600))
    for number in range(5):
        assert (await world.ask(f"question {number}", model="pair")).headers["x-sameway-backend"] == "second"
        world.clock.passes(60)
    assert len(first.calls) == 1
    second.plays_once(unavailable())
    assert (await world.ask("another", model="pair")).headers["x-sameway-backend"] == "first"


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
    assert [(one.name, one.reason) for one in record.answer.rejected] == [("engine", "is resting: its process is gone")]
    assert record.answer.attempts == ()


async def test_a_client_does_not_wait_past_its_deadline_for_an_engine(world: World) -> None:
    """Waiting for an engine ends with the client's deadline."""
    world.backends["engine"].is_down("loading the model", is_starting=True)
    reply = await world.ask(model="engine", headers={"x-stainless-read-timeout": "0.05"})
    assert (reply.status, reply.error["code"]) == (504, "deadline_exceeded")


@pytest.mark.parametrize(
    ("model", "fields", "status", "code", "param"),
    [
        ("narrow", {"content": "long " * 200}, 400, "context_length_exceeded", "messages"),
        ("simple", {"max_tokens": 1001}, 400, "integer_above_max_value", "max_tokens"),
        ("simple", {"max_completion_tokens": 1001}, 400, "integer_above_max_value", "max_completion_tokens"),
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
    assert (record.ended.status, record.ended.error, record.answer.deployment) == (status, code, "")


async def test_a_response_is_told_of_its_own_length(world: World) -> None:
    """Its field has another name than a chat's."""
    asked = json.dumps({"model": "simple", "input": "hello", "max_output_tokens": 1001}).encode()
    reply = await world.ask(path="/v1/responses", raw=asked)
    assert (reply.error["code"], reply.error["param"]) == ("integer_above_max_value", "max_output_tokens")


async def test_a_model_that_is_not_configured_is_no_label(world: World) -> None:
    """A name that a client made up does not become a label in records."""
    assert (await world.record(await world.ask(model="made up"))).request.alias == ""


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
    assert (await world.record(reply)).cache.store == "fallback"
    assert (await world.ask(model="mixed")).cache == "miss"


async def test_a_fallback_is_one_also_while_the_first_choice_rests(world: World) -> None:
    """The first choice is what it would be if all were well, not what is left of the route."""
    world.backends["big"].is_down("restarting")
    reply = await world.ask(model="mixed")
    record = await world.record(reply)
    assert (record.answer.deployment, record.cache.store) == ("small", "fallback")
    assert [one.name for one in record.answer.rejected] == ["big"]


async def test_a_policy_may_wait_for_the_first_choice(open_a_world: OpenWorld) -> None:
    """With `retry_first_ms` the first choice is asked again where its pauses fit, and the next one where they do not."""
    deployments = [deployment("first", usd=(0, 0)), deployment("second")]
    models = {"patient": {"policy": "cheapest", "retry_first_ms": 1000, "deployments": deployments}}
    world = await open_a_world(models=models)
    first = world.backends["first"]
    first.plays_once(overloaded(retry_after_s=0.01))
    reply = await world.ask(model="patient")
    assert (reply.content, len(first.calls)) == ("answer of first", 2)
    first.plays(unavailable())
    reply = await world.ask("another", model="patient")
    assert (reply.content, len(first.calls)) == ("answer of second", 5)
    first.plays(overloaded(retry_after_s=7))
    reply = await world.ask("a third", model="patient")
    assert (reply.content, len(first.calls)) == ("answer of second", 6)
