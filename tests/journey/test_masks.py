"""Requests that are masked: no value leaves the gateway, every caller gets its own back, on every surface."""

from __future__ import annotations

import json
import sqlite3
from typing import Any
from urllib.parse import urlsplit

import pytest

from gateway.settings import MaskSettings
from gateway.telemetry.metrics import Metrics
from gateway.wire.types import Chunk
from tests.journey.conftest import OpenWorld
from tests.world import Finish, Reply, Tokens, Whole, World, deployment, rejected

EMAIL, CARD = "alice@example.com", "4111 1111 1111 1111"
SECRETS = (EMAIL, CARD, "example.com", "bob@")
ASKED = f"Write to {EMAIL} about {CARD}."
MASKED = "Write to <EMAIL_1> about <CARD_1>."
MODELS = {
    "mock": {"mask": True, "deployments": [deployment("plain")]},
    "open": {"deployments": [deployment("clear")]},
    "open-first": {"fallbacks": ["mock"], "deployments": [deployment("first")]},
}
_USER = [{"role": "user", "content": ASKED}]
SURFACES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _USER},
    "/v1/completions": {"prompt": ASKED},
    "/v1/responses": {"input": ASKED},
    "/v1/messages": {"messages": _USER, "max_tokens": 50},
}


async def ask(world: World, path: str, **fields: Any) -> Reply:
    return await world.ask(path=path, raw=json.dumps({"model": "mock", **SURFACES[path], **fields}).encode())


async def kept(world: World) -> bytes:
    """All that Redis and the database have, and all that was recorded and sent upstream."""
    values: list[Any] = []
    for key in await world.redis.keys():
        read = {
            "string": "GET",
            "hash": "HGETALL",
            "list": "LRANGE",
            "zset": "ZRANGE",
            "set": "SMEMBERS",
            "stream": "XRANGE",
        }
        command = read[(await world.redis.type(key)).decode()]
        ends = {"LRANGE": (0, -1), "ZRANGE": (0, -1), "XRANGE": ("-", "+")}.get(command, ())
        values.append((key, await world.redis.execute_command(command, key, *ends)))
    with sqlite3.connect(urlsplit(world.sql_url).path) as database:
        values += database.iterdump()
    calls = [(one.body, one.native, one.draft) for each in world.backends.values() for one in each.calls]
    return repr((values, calls, world.records, world.spans())).encode()


def shows_none(text: str) -> None:
    assert not [secret for secret in SECRETS if secret in text]


@pytest.mark.parametrize("path", SURFACES)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_no_value_leaves_and_its_caller_gets_it_back(
    open_a_world: OpenWorld, logged: list[Any], path: str, is_stream: bool
) -> None:
    """No surface shows a planted value upstream, in Redis, SQL, logs, spans or records; a miss and a hit both give it back."""
    world = await open_a_world(models=MODELS, log_prompts=True)
    world.backends["plain"].plays("To <EMA", "IL_1", "> of <CARD_1", "> <", "EMAIL_7>", Finish(), Tokens())
    labels = (
        {"metadata": {"user_id": EMAIL}}
        if path == "/v1/messages"
        else {"user": EMAIL, "metadata": {"of": f"x {EMAIL}"}}
    )
    for source in ("miss", "exact"):
        reply = await ask(world, path, stream=is_stream, **labels)
        assert reply.status == 200
        assert reply.cache == source
        if is_stream:
            texts = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
            deltas = [one["delta"] for one in texts if one.get("type") == "response.output_text.delta"]
            deltas += [one["delta"].get("text", "") for one in texts if one.get("type") == "content_block_delta"]
            text = "".join(deltas) or reply.content
        else:
            text = json.dumps(reply.json)
        assert f"To {EMAIL} of {CARD} <EMAIL_7>" in text
        record = await world.record(reply)
        assert (record.request.masked, record.request.changed, record.request.unknown) == (2, 0, 1)
    (call,) = world.backends["plain"].calls
    assert MASKED in json.dumps(call.body)
    shown = (await kept(world)).decode()
    assert MASKED in shown
    shows_none(shown + repr(logged))


async def test_callers_share_an_entry_and_get_their_own_values(open_a_world: OpenWorld) -> None:
    """The same question with other values is one entry; each caller has its own, also from a flight that both read."""
    world = await open_a_world(models=MODELS)
    world.backends["plain"].plays("Dear <EMAIL_1>", ", not <EMAIL_2>", Finish(), Tokens())
    replies = [
        await world.ask(f"Greet {first}, not {second}, as {first}", stream=is_stream)
        for first, second in (("a@x.com", "b@y.org"), ("carol@z.net", "a@x.com"))
        for is_stream in (True, False)
    ]
    assert [one.cache for one in replies] == ["miss", "exact", "exact", "exact"]
    said = ["Dear a@x.com, not b@y.org", "Dear carol@z.net, not a@x.com"]
    assert [one.content for one in replies] == [said[0], said[0], said[1], said[1]]
    again = await world.ask("Greet a@x.com, not a@x.com, as a@x.com")
    assert again.cache == "miss"


async def test_a_hit_by_meaning_has_only_placeholders_of_its_request(open_a_world: OpenWorld) -> None:
    """An answer with a placeholder that another wording has no value for is a miss, with one value or none; another is a hit."""
    world = await open_a_world(models=MODELS)
    world.backends["plain"].plays("Dear <EMAIL_1>", ", not <EMA", "IL_2>", Finish(), Tokens())
    entry = (await world.record(await world.ask("Greet a@x.com, not b@y.org"))).cache.entry
    world.semantic.hits(entry)
    for words, source in (("Hello all", "miss"), ("Hello c@z.net", "miss"), ("Hello c@z.net not d@z.net", "semantic")):
        reply = await world.ask(words)
        assert reply.cache == source
    assert reply.content == "Dear c@z.net, not d@z.net"


async def test_a_flight_restores_for_each_reader(open_a_world: OpenWorld) -> None:
    """Two callers with other values wait for one generation, and each reads its own."""
    world = await open_a_world(models=MODELS)
    world.backends["plain"].plays("Dear <EM", "AIL_1>", Finish(), Tokens())
    first = world.begin("Greet a@x.com", stream=True)
    second = world.begin("Greet b@y.org")
    replies = [await first.reply(), await second.reply()]
    assert [one.content for one in replies] == ["Dear a@x.com", "Dear b@y.org"]
    assert sorted(one.cache for one in replies) == ["coalesced", "miss"]
    assert len(world.backends["plain"].calls) == 1


async def test_a_whole_answer_and_a_broken_stream_are_restored(open_a_world: OpenWorld) -> None:
    """A server's whole answer is restored in JSON, as JSON; what waits for a placeholder's end leaves before an error."""
    world = await open_a_world(models=MODELS)
    world.backends["plain"].plays(Whole('{"to": "<QUOTED_1>"}'))
    world.sets(mask=MaskSettings(patterns={"QUOTED": "«[^»]*»"}))
    form = {"response_format": {"type": "json_object"}}
    reply = await world.ask('As JSON: «say "hi"»', **form)
    assert json.loads(reply.content) == {"to": '«say "hi"»'}
    world.backends["plain"].plays("almost <QUOT", rejected())
    reply = await world.ask("«x» again", stream=True)
    assert reply.content == "almost <QUOT"
    assert reply.error


async def test_what_is_asked_of_whom_is_masked(open_a_world: OpenWorld) -> None:
    """A team or an alias is masked, an alias with a masked fallback too; others get their texts as they are."""
    world = await open_a_world(models=MODELS)
    for model, is_masked in (("open", False), ("open-first", True), ("mock", True)):
        await world.ask(f"{ASKED} {model}", model=model)
        assert (await world.record(await world.ask(f"{ASKED} {model}", model=model))).request.masked == 2 * is_masked
    bodies = {name: str([call.body for call in one.calls]) for name, one in world.backends.items()}
    assert EMAIL in bodies["clear"]
    shows_none(bodies["first"] + bodies["plain"])
    world.sets(mask=MaskSettings(teams=["default", (await world.record(await world.ask("x"))).request.team]))
    await world.ask(ASKED, model="open")
    assert MASKED in str(world.backends["clear"].calls[-1].body)
    await world.ask(path="/v1/embeddings", model="open", input=[ASKED, "hello"])
    assert world.backends["clear"].calls[-1].body["input"] == [MASKED, "hello"]


async def test_a_header_that_goes_on_has_no_value(open_a_world: OpenWorld) -> None:
    """Baggage and state with a value stay here, those without go on, and the trace stays whole."""
    world = await open_a_world(models=MODELS)
    trace = {"traceparent": f"00-{'4111111111111111' * 2}-{'4111111111111111'}-01"}
    for more, state in (({"baggage": f"user={EMAIL}"}, "a=1"), ({"baggage": "user=1"}, "a=bob%40example.com")):
        await world.ask(ASKED + state, headers={**trace, **more, "tracestate": state})
    told = [dict(call.trace) for call in world.backends["plain"].calls]
    assert told == [{**trace, "tracestate": "a=1"}, {**trace, "baggage": "user=1"}]


async def test_users_stay_apart_by_their_digests(open_a_world: OpenWorld) -> None:
    """A label with a value becomes its digest: two users never share an answer that is kept for each user."""
    world = await open_a_world(models=MODELS, cache={"key_fields": ["user"]})
    replies = [await world.ask("hello", user=user) for user in ("a@x.com", "b@y.org", "a@x.com")]
    assert [one.cache for one in replies] == ["miss", "miss", "exact"]
    users = [call.body["user"] for call in world.backends["plain"].calls]
    assert len(set(users)) == 2
    assert all(user.startswith("masked-") for user in users)


async def test_a_request_that_cannot_be_masked_goes_nowhere(
    open_a_world: OpenWorld, monkeypatch: pytest.MonkeyPatch, logged: list[Any]
) -> None:
    """A failure while a request is masked refuses it: nothing is sent, stored or logged of it."""
    world = await open_a_world(models=MODELS)

    def fails(*_: object) -> str:
        raise ValueError(EMAIL)

    monkeypatch.setattr("gateway.masking.vault.Vault.masked", fails)
    reply = await world.ask(ASKED, user=EMAIL)
    assert (reply.status, reply.error["code"]) == (500, "masking_failed")
    assert not world.backends["plain"].calls
    shows_none((await kept(world)).decode() + repr(logged) + reply.text)


async def test_a_refusal_that_quotes_a_value_is_recorded_without_it(open_a_world: OpenWorld, logged: list[Any]) -> None:
    """The client reads what was wrong; no record and no log has the value, before and after the first masked request."""
    world = await open_a_world(models=MODELS)
    for _ in range(2):
        refused = await world.ask(raw=json.dumps({"model": "mock", "messages": [{"role": EMAIL}]}).encode())
        assert refused.status == 400
        assert EMAIL in refused.text
        await world.ask(ASKED)
    shows_none((await kept(world)).decode() + repr(logged))
    assert "got '<EMAIL_1>'" in repr(world.records)


async def test_nothing_masked_is_kept_as_a_response(open_a_world: OpenWorld) -> None:
    """A response whose request is masked is not stored, and a conversation or a background response is refused by name."""
    world = await open_a_world(models=MODELS)
    reply = await ask(world, "/v1/responses", store=True)
    assert reply.json["store"] is False
    for field in ({"background": True}, {"conversation": "conv_" + "0" * 32}):
        refused = await ask(world, "/v1/responses", **field)
        assert refused.status in (400, 404)
    shows_none((await kept(world)).decode())


async def test_calls_of_tools_and_metrics(open_a_world: OpenWorld) -> None:
    """A call's arguments come back with the values, and what came back changed is counted by its model, however deep."""
    world = await open_a_world(models=MODELS)

    def call(arguments: str) -> Chunk:
        head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
        called = {"index": 0, "id": "t", "type": "function", "function": {"name": "send", "arguments": arguments}}
        choice = {"index": 0, "delta": {"tool_calls": [called]}, "finish_reason": None}
        return Chunk(json.dumps({**head, "choices": [choice]}).encode(), has_content=True)

    world.backends["plain"].plays(call('{"to":"<EM'), call('AIL_1>","cc":"email_1"}'), Finish("tool_calls"), Tokens())
    reply = await world.ask(ASKED, tools=[{"type": "function", "function": {"name": "send"}}])
    function = reply.json["choices"][0]["message"]["tool_calls"][0]["function"]
    assert json.loads(function["arguments"]) == {"to": EMAIL, "cc": "email_1"}
    metrics = Metrics(None)
    for record in world.records:
        metrics.observe(record)
    shown = metrics.render().decode()
    assert 'sameway_masked_values_total{model="mock"} 2.0' in shown
    assert 'sameway_odd_placeholders_total{model="mock",outcome="changed"} 1.0' in shown
    deep = '{"to":' + "[" * 900 + '"email_1"' + "]" * 900 + "}"
    world.backends["plain"].plays(call(deep), Finish("tool_calls"), Tokens())
    record = await world.record(
        await world.ask(f"{ASKED} And?", tools=[{"type": "function", "function": {"name": "send"}}])
    )
    assert (record.ended.status, record.request.changed) == (200, 1)


async def test_a_native_request_is_masked_as_well(open_a_world: OpenWorld) -> None:
    """Anthropic's own request and events have placeholders on the way, and values for the client, in a call's input too."""
    models = {"mock": {"mask": True, "deployments": [deployment("plain", capabilities=["messages", "tools"])]}}
    world = await open_a_world(models=models)

    def event(**fields: Any) -> Chunk:
        return Chunk(b"", native=json.dumps(fields).encode())

    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "content": [],
        "model": "m",
        "usage": {"input_tokens": 3},
    }
    block = {"type": "tool_use", "id": "toolu_1", "name": "send", "input": {}}
    deltas = [{"type": "input_json_delta", "partial_json": part} for part in ('{"to":"<EM', 'AIL_1>"}')]
    stop = {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    world.backends["plain"].plays(
        Chunk(
            json.dumps({**head, "choices": [{"index": 0, "delta": {"role": "assistant"}}]}).encode(),
            native=json.dumps({"type": "message_start", "message": message}).encode(),
        ),
        event(type="content_block_start", index=0, content_block=block),
        *(event(type="content_block_delta", index=0, delta=one) for one in deltas),
        event(type="content_block_stop", index=0),
        Chunk(
            json.dumps({**head, "choices": [stop]}).encode(),
            has_content=True,
            finish_reasons=("tool_calls",),
            native=json.dumps(
                {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 2}}
            ).encode(),
        ),
        event(type="message_stop"),
    )
    used = {"type": "tool_use", "id": "toolu_0", "name": "send", "input": {"to": EMAIL, "name": "x"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_0", "content": f"sent to {EMAIL}"}
    said = [*_USER, {"role": "assistant", "content": [used]}, {"role": "user", "content": [result]}]
    reply = await ask(world, "/v1/messages", messages=said, stream=True, tools=[{"name": "send", "input_schema": {}}])
    (call,) = world.backends["plain"].calls
    assert call.native is not None
    given = json.loads(call.native.raw)["messages"]
    assert given[1]["content"][0]["input"] == {"to": "<EMAIL_1>", "name": "x"}
    assert given[2]["content"][0]["content"] == "sent to <EMAIL_1>"
    shows_none((await kept(world)).decode())
    told = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    parts = [one["delta"]["partial_json"] for one in told if one["type"] == "content_block_delta"]
    assert json.loads("".join(parts)) == {"to": EMAIL}
    assert told[-1]["type"] == "message_stop"
    assert [one["type"] for one in told].count("content_block_stop") == 1
