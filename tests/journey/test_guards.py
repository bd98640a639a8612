"""A company's guard: what it sees, what becomes of its word on each exit, and of a guard that has none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.backends.anthropic.answer import MessageReader
from gateway.journey.record import stages_of
from gateway.settings import GuardSettings
from gateway.telemetry.metrics import Metrics
from gateway.transport.fetch import signed
from gateway.wire.chunks import read
from tests.guard import StandInGuard, guard_of
from tests.journey.responses_server import SEARCH, TEXT, response, run_responses_server
from tests.services import RedisServer
from tests.world import Finish, Tokens, Whole, World, broken, deployment, open_world, until

MODELS: dict[str, Any] = {
    "mock": {"deployments": [deployment("plain", capabilities=["tools", "completions", "embeddings"])]},
    "claude": {"deployments": [deployment("claude", capabilities=["tools", "messages"])]},
    "twins": {"policy": "fastest", "deployments": [deployment("left"), deployment("right")]},
    "able": {"deployments": [deployment("able", capabilities=["responses", "tools"], allow_fields=["web_search"])]},
    "guarded": {"guard": "own", "deployments": [deployment("guarded")]},
}


@pytest.fixture
async def guard() -> AsyncIterator[StandInGuard]:
    async with guard_of() as listening:
        yield listening


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path, guard: StandInGuard) -> AsyncIterator[World]:
    """A world whose every team has the guard, which sees requests."""
    guards = {"all": {"url": guard.url, "teams": ["*"]}, "own": {"url": guard.url + "/own"}}
    async with open_world(redis_server, tmp_path, models=MODELS, guards=guards) as opened:
        yield opened
        await opened.is_released()


def sees_answers(world: World, guard: StandInGuard, **more: Any) -> None:
    """From now on the guard of all teams sees answers, too."""
    world.sets(guards={"all": GuardSettings(url=guard.url, teams=["*"], is_after=True, **more)})


def looks(record: Any) -> list[tuple[str, bool, str]]:
    return [(one.name, one.is_after, one.verdict) for one in record.request.guards]


DOCUMENTS = [
    {
        "type": "document",
        "title": "{}",
        "context": "{}",
        "source": {"type": "text", "media_type": "text/plain", "data": "{}"},
    },
    {"type": "search_result", "title": "{}", "source": "{}", "content": [{"type": "text", "text": "{}"}]},
    {"type": "text", "text": "hi"},
]
SURFACES: list[dict[str, Any]] = [
    {"path": "/v1/chat/completions", "content": "{}"},
    {"path": "/v1/chat/completions", "content": "{}", "stream": True},
    {"path": "/v1/chat/completions", "messages": [{"role": "user", "content": [{"type": "text", "text": "{}"}]}]},
    {"path": "/v1/completions", "prompt": "{}"},
    {"path": "/v1/embeddings", "input": ["{}", "another"]},
    {"path": "/v1/responses", "instructions": "{}", "input": "hi"},
    {"path": "/v1/responses", "input": [{"role": "user", "content": [{"type": "input_text", "text": "{}"}]}]},
    {"path": "/v1/messages", "max_tokens": 9, "system": "{}", "messages": [{"role": "user", "content": "hi"}]},
    {
        "path": "/v1/messages",
        "model": "claude",
        "max_tokens": 9,
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "sh", "input": {"cmd": "{}"}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "the {}"}]},
        ],
        "tools": [{"name": "sh", "input_schema": {"type": "object"}}],
    },
    {"path": "/v1/messages", "model": "claude", "max_tokens": 9, "messages": [{"role": "user", "content": DOCUMENTS}]},
    {"path": "/v1/chat/completions", "content": "hi", "metadata": {"case": "{}"}, "stop": ["{}"]},
    {
        "path": "/v1/chat/completions",
        "content": "hi",
        "tools": [{"type": "function", "function": {"name": "f", "description": "{}", "parameters": {"enum": ["{}"]}}}],
    },
]


def about(surface: dict[str, Any], text: str) -> dict[str, Any]:
    filled: dict[str, Any] = json.loads(json.dumps(surface).replace("{}", text))
    return filled


@pytest.mark.parametrize("surface", SURFACES)
async def test_texts_are_replaced_or_refused_on_each_surface(
    world: World, guard: StandInGuard, surface: dict[str, Any]
) -> None:
    """The provider gets what the guard left, and nothing of what it refused; the error has the surface's shape and the guard's words."""
    reply = await world.ask(**about(surface, "a secret"))
    assert reply.status == 200, reply.text
    backend = world.backends[surface.get("model", "plain").replace("mock", "plain")]
    call = backend.calls[-1]
    sent = json.dumps(call.body) + (call.native.raw.decode() if call.native is not None else "")
    assert "secret" not in sent
    assert "[MASKED]" in sent
    assert looks(await world.record(reply)) == [("all", False, "replaced")]
    assert any("a secret" in text for text in guard.texts()[0])
    calls = len(backend.calls)
    refused = await world.ask(**about(surface, "a forbidden thing"))
    error = refused.json["error"]
    assert (refused.status, len(backend.calls)) == (400, calls)
    assert error["message"] == "The guard `all` refused the request: The policy 7 forbids it."
    assert error["type"] == "invalid_request_error"
    record = await world.record(refused)
    assert (record.ended.error, looks(record)) == ("guard_refused", [("all", False, "refused")])


async def test_replaced_texts_are_the_key_of_the_cache(world: World) -> None:
    """Prompts that differ in what the guard masks share an answer, by their bytes and by their meaning; the time is a stage."""
    first = await world.ask("the secret")
    second = await world.ask("the [MASKED]")
    assert (first.cache, second.cache) == ("miss", "exact")
    assert [one.text for one in world.semantic.asked] == ["the [MASKED]"]
    record = await world.record(second)
    stages = [stage.name for stage in stages_of(record)]
    assert stages[:2] == ["guard", "exact lookup"]
    metrics = Metrics(None)
    metrics.observe(record)
    counted = [line for line in metrics.render().decode().splitlines() if line.startswith("sameway_guard_calls_total{")]
    assert counted == ['sameway_guard_calls_total{guard="all",outcome="allowed",stage="before"} 1.0']


async def test_the_log_has_what_the_guard_left(world: World) -> None:
    """Of a replaced prompt the other text, fresh and as a hit; of one that was refused, or came to no guard, nothing."""
    for content, model in (("a secret", "mock"), ("a secret", "mock"), ("forbidden", "mock"), ("a secret", "nowhere")):
        await world.ask(content, model=model)
    logged = [turn and turn.body["messages"][0]["content"] for turn in world.logged]
    assert logged == ["a [MASKED]", "a [MASKED]", None, None]


async def test_the_guard_of_an_alias_comes_before_that_of_the_team(world: World, guard: StandInGuard) -> None:
    """Each sees what the one before it left, who asks and for what; another alias has the team's alone."""
    record = await world.record(await world.ask("a secret", model="guarded"))
    assert looks(record) == [("own", False, "replaced"), ("all", False, "allowed")]
    assert guard.texts() == [["a secret"], ["a [MASKED]"]]
    (first, _) = guard.looks
    assert (first["model"], first["litellm_call_id"]) == ("guarded", record.request.id)
    assert first["request_data"]["user_api_key_team_alias"] == record.request.team
    assert looks(await world.record(await world.ask("hi"))) == [("all", False, "allowed")]


async def test_what_is_sent_is_signed_and_has_the_headers(
    world: World, guard: StandInGuard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signature is that of Standard Webhooks over the very bytes; without the secret no verdict comes, and the request is refused."""
    secured = GuardSettings(url=guard.url, teams=["*"], secret_env="GUARD_SECRET", headers={"x-api-key": "k"})
    world.sets(guards={"all": secured})
    assert (await world.ask("hi")).error["code"] == "guard_unavailable"
    monkeypatch.setenv("GUARD_SECRET", "whsec_c2VjcmV0")
    assert (await world.ask("hi")).status == 200
    (sent,) = guard.headers
    own = signed("whsec_c2VjcmV0", sent["webhook-id"], int(sent["webhook-timestamp"]), guard.bodies[0])
    assert (sent["webhook-signature"], sent["x-api-key"]) == (own["webhook-signature"], "k")


def _http(status: bytes, body: bytes, more: bytes = b"") -> bytes:
    return b"HTTP/1.1 " + status + b"\r\n" + more + b"content-length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize("fail", ["closed", "open"])
@pytest.mark.parametrize(
    "says",
    [
        _http(b"500 Down", b'{"action":"NONE"}'),
        _http(b"302 Found", b'{"action":"NONE"}', b"location: http://elsewhere.example/\r\n"),
        _http(b"200 OK", b"maybe"),
        _http(b"200 OK", b'{"action":"MAYBE"}'),
        _http(b"200 OK", b'{"action":"GUARDRAIL_INTERVENED","texts":[]}'),
        _http(b"200 OK", b'{"action":"NONE","pad":"' + b"x" * (33 << 20) + b'"}'),
        b"no HTTP at all\r\n\r\n",
        b"",
    ],
    ids=["down", "elsewhere", "no-json", "unknown", "miscounted", "huge", "garbage", "silent"],
)
async def test_a_guard_without_a_verdict(world: World, guard: StandInGuard, says: bytes, fail: Any) -> None:
    """Closed, the request is refused and no deployment asked; open, it goes on as it is; both are in the record and counted."""
    world.sets(
        guards={"all": GuardSettings(url=guard.url, teams=["*"], fail=fail, timeout_ms=150 if not says else 5_000)}
    )
    guard.says = says
    reply = await world.ask("a secret")
    record = await world.record(reply)
    assert looks(record) == [("all", False, "failed")]
    if fail == "open":
        assert reply.status == 200
        assert world.backends["plain"].calls[0].body["messages"][0]["content"] == "a secret"
    else:
        assert (reply.status, reply.error["code"], world.backends["plain"].calls) == (503, "guard_unavailable", [])


async def test_equal_requests_at_once_are_one_look(world: World, guard: StandInGuard) -> None:
    """Three wait for one verdict, and one generation answers them; a client that leaves takes nobody's verdict along."""
    guard.is_open.clear()
    waiting = [world.begin("same") for _ in range(4)]
    await until(lambda: len(guard.looks) == 1)
    await asyncio.sleep(0.02)
    waiting.pop(0).leave()
    guard.is_open.set()
    replies = [await client.reply() for client in waiting]
    await world.quiet()
    assert (len(guard.looks), len(world.backends["plain"].calls)) == (1, 1)
    assert [reply.content for reply in replies] == ["answer of plain"] * 3


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_answer_waits_for_the_verdict(world: World, guard: StandInGuard, is_stream: bool) -> None:
    """No byte leaves before it; a replaced answer is sent and stored with the other text; each hit is seen again."""
    sees_answers(world, guard)
    world.backends["plain"].plays("my sec", "ret", Finish(), Tokens())
    guard.is_open.clear()
    client = world.begin("hi", stream=is_stream)
    await until(lambda: len(guard.looks) == 1)
    assert world.backends["plain"].calls == []
    guard.is_open.set()
    await world.backends["plain"].called()
    guard.is_open.clear()
    await until(lambda: len(guard.looks) == 2)
    assert not client.has_begun
    guard.is_open.set()
    reply = await client.reply()
    await world.quiet()
    assert (reply.status, reply.content, reply.cache) == (200, "my [MASKED]", "miss")
    assert "sec" not in reply.text.replace("seconds", "")
    assert guard.texts("response") == [["my secret"]]
    record = await world.record(reply)
    assert looks(record) == [("all", False, "allowed"), ("all", True, "replaced")]
    assert "guard" in [stage.name for stage in stages_of(record)][-2:]
    hit = await world.ask("hi", stream=not is_stream)
    assert (hit.cache, hit.content) == ("exact", "my [MASKED]")
    assert guard.texts("response")[1:] == [["my [MASKED]"]]


async def test_a_refused_answer_reaches_nobody(world: World, guard: StandInGuard) -> None:
    """Neither its reader nor one that joined gets a byte; it is not stored, and what it cost is booked."""
    sees_answers(world, guard)
    begin = asyncio.Event()
    world.backends["plain"].plays(begin, "a forbidden word", Finish(), Tokens())
    first = world.begin("hi", stream=True)
    await world.backends["plain"].called()
    second = world.begin("hi")
    await until(lambda: len(guard.looks) == 2)
    begin.set()
    replies = [await first.reply(), await second.reply()]
    await world.quiet()
    assert [(reply.status, reply.error["code"]) for reply in replies] == [(400, "guard_refused")] * 2
    assert all("word" not in reply.text for reply in replies)
    record = await world.record(replies[0])
    assert (record.cache.store, record.money.cost_microusd > 0) == ("", True)
    world.backends["plain"].plays("a good word", Finish(), Tokens())
    assert (await world.ask("hi")).cache == "miss"


async def test_hits_are_seen_before_they_are_served(world: World, guard: StandInGuard) -> None:
    """A verdict that changes holds for what is stored: by bytes, by meaning, and for those that wait beside."""
    sees_answers(world, guard)
    entry = (await world.record(await world.ask("first wording"))).cache.entry

    def strict(look: dict[str, Any]) -> dict[str, Any]:
        if look["input_type"] == "request":
            return {"action": "NONE"}
        return {"action": "GUARDRAIL_INTERVENED", "texts": ["other words"]}

    guard.decide = strict
    exact = await world.ask("first wording")
    world.semantic.hits(entry)
    semantic = await world.ask("second wording")
    streamed = await world.ask("third wording", stream=True)
    replies = [exact, semantic, streamed]
    assert [reply.cache for reply in replies] == ["exact", "semantic", "semantic"]
    assert [reply.content for reply in replies] == ["other words"] * 3
    guard.decide = lambda look: {"action": "BLOCKED" if look["input_type"] == "response" else "NONE"}
    for wording in ("first wording", "fourth wording"):
        refused = await world.ask(wording)
        assert (refused.status, refused.error["code"]) == (400, "guard_refused")
    assert len(world.backends["plain"].calls) == 1


async def test_another_guard_serves_no_answer_of_an_earlier_one(world: World, guard: StandInGuard) -> None:
    """Without a guard of answers, with one, with another version and another URL: each begins with an empty cache."""
    changes: list[dict[str, Any]] = [{}, {"version": "2"}, {"version": "2"}]
    assert (await world.ask("hi")).cache == "miss"
    caches = []
    for change in changes:
        sees_answers(world, guard, **change)
        caches.append((await world.ask("hi")).cache)
    world.sets(guards={"all": GuardSettings(url=f"{guard.url}/v2", teams=["*"], is_after=True, version="2")})
    assert [*caches, (await world.ask("hi")).cache] == ["miss", "miss", "exact", "miss"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/completions"])
async def test_answers_are_seen_on_each_surface(world: World, guard: StandInGuard, path: str) -> None:
    """A message, a response and a completion are replaced as a chat is, whole and as a stream, in their shapes."""
    sees_answers(world, guard)
    asked = {"/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9}}
    fields: dict[str, Any] = asked.get(path, {"prompt": "hi"} if path.endswith("completions") else {"input": "hi"})
    for is_stream in (False, True):
        world.backends["plain"].plays(
            *(("the sec", "ret", Finish(), Tokens()) if is_stream else (Whole("the secret"),))
        )
        reply = await world.ask(path=path, stream=is_stream, cache={"namespace": str(is_stream)}, **fields)
        assert reply.status == 200, reply.text
        assert "the [MASKED]" in reply.text
        assert "secret" not in reply.text


@pytest.mark.parametrize("word", ["secret", "plain"])
async def test_an_answer_of_anthropics_own_api_is_seen(world: World, guard: StandInGuard, word: str) -> None:
    """Its thoughts and its tools' inputs are texts, too; what is replaced comes without signatures, what is allowed byte for byte."""
    sees_answers(world, guard)
    thought = {"type": "thinking", "thinking": f"a {word}", "signature": "c2ln"}
    call = {"type": "tool_use", "id": "toolu_1", "name": "sh", "input": {"cmd": f"cat {word}"}}
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "stop_reason": "tool_use", "stop_sequence": None,
        "content": [thought, {"type": "text", "text": f"the {word}"}, call], "usage": {"input_tokens": 3, "output_tokens": 4},
    }  # fmt: skip
    native = json.dumps(message).encode()
    first, *others = [read(payload) for payload in MessageReader(1).whole(native) if payload != b"[DONE]"]
    world.backends["claude"].plays(replace(first, native=native), *others)
    asked = {
        "path": "/v1/messages",
        "model": "claude",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": "hi"}],
    }
    for _ in range(2):
        reply = await world.ask(**asked)
        assert reply.status == 200, reply.text
        assert "secret" not in reply.text
        assert [one["type"] for one in reply.json["content"]][-2:] == ["text", "tool_use"]
        if word == "plain":
            assert reply.json["content"] == message["content"]
        else:
            assert reply.json["content"][-1]["input"] == {"cmd": "cat [MASKED]"}


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_providers_own_response_is_seen(
    world: World, guard: StandInGuard, is_stream: bool, is_kept: bool
) -> None:
    """One that no chat completion can say: its texts are replaced, fresh and from the cache, in the form that was asked for."""
    sees_answers(world, guard)
    said = {**TEXT, "content": [{**TEXT["content"][0], "text": "the secret"}]}
    with run_responses_server() as server:
        server.answer = response(SEARCH, said)
        await world.connects("able", server.url)
        asked = {"model": "able", "input": "north?", "tools": [{"type": "web_search"}], "store": is_kept}
        body = json.dumps({**asked, "stream": is_stream}).encode()
        replies = [await world.ask(path="/v1/responses", raw=body) for _ in range(2)]
        assert len(server.seen) == 1
    for reply in replies:
        assert (reply.status, reply.is_stream) == (200, is_stream)
        assert "the [MASKED]" in reply.text
        assert "secret" not in reply.text
        last = [line.removeprefix("data:") for line in reply.text.splitlines() if line.startswith("data:")][-1:]
        whole = json.loads(last[0])["response"] if is_stream else reply.json
        assert (whole["status"], whole["output"][-1]["content"][0]["text"]) == ("completed", "the [MASKED]")


async def test_a_failing_deployment_is_replaced_before_the_verdict(world: World, guard: StandInGuard) -> None:
    """A stream that breaks off while it is held is another deployment's: its reader sees that whole answer alone."""
    sees_answers(world, guard)
    world.backends["left"].plays("half", broken())
    world.backends["right"].plays("half of it", broken())
    failed = await world.ask("hi", model="twins", stream=True)
    assert (failed.status, "half" in failed.text) == (502, False)
    world.backends["right"].plays("a whole answer", Finish(), Tokens())
    reply = await world.ask("hi", model="twins", stream=True)
    assert (reply.content, reply.is_done) == ("a whole answer", True)


async def test_tokens_are_not_counted_elsewhere_before_a_guard_saw_the_texts(world: World) -> None:
    """The count of a message's tokens is the gateway's own estimate, and no guard is asked."""
    reply = await world.ask(
        path="/v1/messages/count_tokens", model="claude", messages=[{"role": "user", "content": "a secret"}]
    )
    assert reply.json["input_tokens"] > 0
    assert world.backends["claude"].calls == []


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_guard_sees_values_before_they_are_masked(
    redis_server: RedisServer, tmp_path: Path, guard: StandInGuard, is_stream: bool
) -> None:
    """A guard gets a request's own texts, and an answer's with placeholders; its client gets the values, from a hit as well."""
    models = {"mock": {"mask": True, "deployments": [deployment("plain")]}}
    guards = {"all": {"url": guard.url, "teams": ["*"], "is_after": True}}
    async with open_world(redis_server, tmp_path, models=models, guards=guards) as world:
        world.backends["plain"].plays("To <EMA", "IL_1>: done", Finish(), Tokens())
        for source in ("miss", "exact"):
            reply = await world.ask("a secret for alice@example.com", stream=is_stream)
            assert (reply.cache, reply.content) == (source, "To alice@example.com: done")
        (call,) = world.backends["plain"].calls
        assert call.body["messages"][0]["content"] == "a [MASKED] for <EMAIL_1>"
        assert (guard.texts()[0], guard.texts("response")[0]) == (
            ["a secret for alice@example.com"],
            ["To <EMAIL_1>: done"],
        )
