"""Managed providers through litellm, its OpenAI provider pointed at the test upstream: real litellm, real HTTP."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from gateway.backends.base import (
    BackendBroken,
    BackendDenied,
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendTimeout,
    BackendUnavailable,
    BackendUnfit,
    Mark,
)
from gateway.backends.keys import Keys
from gateway.backends.managed import ManagedBackend
from gateway.settings import ApiKeySettings
from gateway.wire.fold import fold
from gateway.wire.types import EMBEDDING, RERANK, Chunk, Kind
from policies import Usage
from tests.backends.conftest import SECRET, ask, collect, collect_into, until
from tests.e2e.upstream import Upstream, run_upstream
from tests.transport.servers import Wire, serve

TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("look", "find")]


def make_managed(url: str, **options: Any) -> ManagedBackend:
    options = {"model": "openai/mock", "capabilities": frozenset[str](), "keys": Keys.fixed(SECRET), **options}
    return ManagedBackend("m", base_url=url, **options)


@pytest.fixture
async def managed(upstream: Upstream) -> AsyncIterator[ManagedBackend]:
    backend = make_managed(upstream.url)
    await backend.start()
    await backend.library()
    yield backend
    assert backend.running == 0, "a stream was not accounted for"
    await backend.aclose()


@pytest.mark.parametrize(
    ("model", "kind", "body", "field"),
    [
        ("openai/mock", EMBEDDING, {"input": "two words"}, "data"),
        ("jina_ai/mock", RERANK, {"query": "q", "documents": ["d"]}, "results"),
    ],
)
async def test_plain_requests(upstream: Upstream, model: str, kind: Kind, body: dict[str, Any], field: str) -> None:
    """Embeddings and ranks come as one object; `dimensions` of a model that takes none is refused and not left out."""
    backend = make_managed(upstream.url, model=model)
    await backend.library()
    asked = msgspec.structs.replace(ask(is_stream=False), body={"model": "m", **body}, kind=kind)
    (chunk,) = await collect(backend.stream(asked))
    assert field in msgspec.json.decode(chunk.data)
    if kind is EMBEDDING:
        assert chunk.usage == Usage(2, 0)
        with pytest.raises(BackendRejected, match="dimensions"):
            await collect(backend.stream(msgspec.structs.replace(asked, body={**asked.body, "dimensions": 3})))
    await backend.aclose()


@pytest.mark.parametrize(
    ("fields", "refused"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"presence_penalty": 1, "user": "u"}, "presence_penalty"),
        ({"n": 2}, "n"),
        ({"verbosity": "low"}, "verbosity"),
        ({"x_new": [1], "seed": 1}, "x_new"),
        (
            {
                "temperature": 0,
                "n": 1,
                "presence_penalty": 0,
                "logit_bias": {},
                "seed": 1,
                "verbosity": "medium",
                "x": None,
                "prompt_cache_retention": "24h",
            },
            "",
        ),
    ],
)
async def test_a_field_that_the_provider_lacks_is_refused(upstream: Upstream, fields: Any, refused: str) -> None:
    """By its name, where it would change the answer; litellm would leave it out. Hints are left out."""
    backend = make_managed(upstream.url, model="anthropic/claude-sonnet-4-5")
    await backend.library()
    asked = msgspec.structs.replace(ask(is_stream=False), body={"model": "m", "messages": [], **fields})
    if refused:
        with pytest.raises(BackendUnfit) as error:
            await collect(backend.stream(asked))
        assert json.loads(error.value.body or b"")["error"]["param"] == refused
    else:
        assert backend.arguments(asked, await backend.library(), is_stream=False)["temperature"] == 0
    assert backend.running == 0
    await backend.aclose()


@pytest.mark.parametrize(
    ("plan", "body"),
    [
        ("", {}),
        ("", {"n": 2}),
        ("", {"tools": TOOLS}),
        ("", {"logprobs": True, "top_logprobs": 1}),
        ("has_reasoning=1", {}),
        ("", {"max_tokens": 2}),
        ("finish=content_filter", {}),
    ],
)
async def test_a_stream_tells_what_a_whole_tells(
    upstream: Upstream, managed: ManagedBackend, plan: str, body: dict[str, Any]
) -> None:
    """Text, tool calls, log probabilities, reasoning, finish and usage survive litellm, either way."""
    upstream.plan(plan)
    [whole] = await collect(managed.stream(ask(is_stream=False, **body)))
    chunks = await collect(managed.stream(ask(**body)))
    told, streamed = json.loads(whole.data), json.loads(fold(chunks))
    for ours, theirs in zip(streamed["choices"], told["choices"], strict=True):
        for key in ("content", "tool_calls", "reasoning_content"):
            assert (ours["message"].get(key) or None) == (theirs["message"].get(key) or None)
        assert (ours.get("logprobs") or {}).get("content") == (theirs["logprobs"] or {}).get("content")
        assert ours["finish_reason"] == theirs["finish_reason"]
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    # of a whole litellm guesses the reasoning tokens, which cost as the others do
    reasoning_tokens = whole.usage.reasoning_tokens
    assert msgspec.structs.replace(chunks[-1].usage, reasoning_tokens=reasoning_tokens) == whole.usage
    assert whole.usage.cached_tokens > 0
    assert chunks[-1].is_usage_only or chunks[-1].is_whole
    assert told["model"] == "mock"


@pytest.mark.parametrize("is_stream", [True, False])
async def test_half_a_character_costs_no_answer(is_stream: bool) -> None:
    """A surrogate without its pair in a provider's answer is U+FFFD."""
    said = {"role": "assistant", "content": "a\ud800"}
    choice = {"index": 0, "delta" if is_stream else "message": said, "finish_reason": "stop"}
    body = json.dumps(
        {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    ).encode()
    body = b"data: %b\n\ndata: [DONE]\n\n" % body if is_stream else body
    kind = b"text/event-stream" if is_stream else b"application/json"

    async def script(wire: Wire) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n" % (kind, len(body))
        await wire.send(head + body)

    async with serve(script) as served:
        backend = make_managed(served.url)
        await backend.start()
        await backend.library()
        chunks = await collect(backend.stream(ask(is_stream=is_stream)))
        await backend.aclose()
    assert json.loads(fold(chunks))["choices"][0]["message"]["content"] == "a\ufffd"


async def test_what_is_sent(upstream: Upstream, managed: ManagedBackend) -> None:
    """Known fields and, to a server of OpenAI's protocol, unknown ones; our key; nothing that steers litellm."""
    hostile = {
        "api_base": "http://127.0.0.1:9/v1",
        "base_url": "http://127.0.0.1:9/v1",
        "api_key": "sk-stolen",
        "mock_response": "made up",
        "custom_llm_provider": "anthropic",
        "fallbacks": ["openai/other"],
        "extra_headers": {"authorization": "Bearer sk-stolen"},
        "num_retries": 5,
        "timeout": 0.001,
    }
    chunks = await collect(managed.stream(ask(cache={"ttl": 1}, metadata={"a": "b"}, seed=7, x_new=[1], **hostile)))
    assert chunks[-1].usage is not None
    [seen] = upstream.seen().requests
    assert seen["headers"]["authorization"] == f"Bearer {SECRET}"
    assert {key: seen["body"][key] for key in ("model", "seed", "x_new", "stream", "stream_options")} == {
        "model": "mock", "seed": 7, "x_new": [1], "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    assert "cache" not in seen["body"]
    assert "metadata" not in seen["body"]


@pytest.mark.parametrize("model", ["openrouter/mock", "hosted_vllm/mock"])
async def test_unknown_fields_reach_other_servers_of_openais_protocol(upstream: Upstream, model: str) -> None:
    """As they came, also where litellm does not list the provider among those of the protocol."""
    backend = make_managed(upstream.url, model=model)
    await backend.library()
    await collect(backend.stream(ask(x_new=[1])))
    assert upstream.seen().requests[-1]["body"]["x_new"] == [1]
    await backend.aclose()


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("plan", "kind", "retry_after_s"),
    [
        ("status=500", BackendUnavailable, None),
        ("status=502;body=html", BackendUnavailable, None),
        ("status=503;retry_after=3", BackendOverloaded, 3.0),
        ("status=429;retry_after=2", BackendOverloaded, 2.0),
        ("cut=headers", BackendUnavailable, None),
        ("hang=headers", BackendTimeout, None),
    ],
)
async def test_failures_that_another_deployment_may_mend(
    upstream: Upstream,
    managed: ManagedBackend,
    plan: str,
    kind: type[BackendError],
    retry_after_s: float | None,
    is_stream: bool,
) -> None:
    """litellm's exceptions become our errors, asked once, and tell a client nothing of the provider's words but about a limit."""
    upstream.plan(plan)
    with pytest.raises(BackendError) as caught:
        await collect(managed.stream(ask(is_stream=is_stream, ttft_s=0.5, idle_s=0.5)))
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == retry_after_s
    hidden = ("sk-", "nginx", "litellm", *(() if plan.startswith("status=429") else ("upstream", "platform")))
    assert not any(word in caught.value.message for word in hidden)
    assert len(upstream.seen().requests) == 1


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("plan", "status", "mark", "words"),
    [
        ("status=401;body=auth", 401, Mark.KEY, ": Incorrect API key provided: [key]. Find yours"),
        ("status=402", 402, Mark.CREDIT, ": upstream says no"),
        ("status=429;body=quota", 429, Mark.CREDIT, ": You exceeded your current quota"),
        ("status=404;body=missing", 404, Mark.ABSENT, ": The model `x` does not exist"),
        ("status=403", 403, None, ": upstream says no"),
        ("status=409", 409, None, ": upstream says no"),
        ("status=451", 451, None, ": upstream says no"),
    ],
)
async def test_a_permanent_refusal_says_why(
    upstream: Upstream,
    managed: ManagedBackend,
    plan: str,
    status: int,
    mark: Mark | None,
    words: str,
    is_stream: bool,
) -> None:
    """litellm's exceptions of a permanent refusal become ours, with the provider's words and without its key."""
    upstream.plan(plan)
    with pytest.raises(BackendDenied) as caught:
        await collect(managed.stream(ask(is_stream=is_stream)))
    assert (caught.value.status, caught.value.mark) == (status, mark)
    assert words in caught.value.message
    assert not any(part in caught.value.message + caught.value.detail for part in ("sk-", "cret", "****"))
    assert len(upstream.seen().requests) == 1


@pytest.mark.parametrize("is_stream", [True, False])
async def test_another_protocols_words_are_read(upstream: Upstream, is_stream: bool) -> None:
    """Where litellm passes a provider's error object on as text, the client gets its message, not the object."""
    managed = make_managed(upstream.url, model="mistral/x")
    await managed.start()
    upstream.plan("status=401;body=auth")
    with pytest.raises(BackendDenied) as caught:
        await collect(managed.stream(ask(is_stream=is_stream)))
    await managed.aclose()
    told = caught.value.message
    assert told.endswith("(key refused): Incorrect API key provided: [key]. Find yours at https://platform.example")


@pytest.mark.parametrize(
    ("plan", "message", "param", "code"),
    [
        ("status=400", "upstream says no", "messages", None),
        ("status=422", "upstream says no", "messages", None),
        ("status=400;body=context", "This model's maximum context length is 8 tokens", None, "context_length_exceeded"),
    ],
)
async def test_what_the_client_must_mend_keeps_its_words(
    upstream: Upstream, managed: ManagedBackend, plan: str, message: str, param: str | None, code: str | None
) -> None:
    """A rejection carries the provider's status and message in OpenAI's shape, without litellm's decoration."""
    upstream.plan(plan)
    with pytest.raises(BackendRejected) as caught:
        await collect(managed.stream(ask()))
    error = json.loads(caught.value.body or b"")["error"]
    assert (error["message"], error["param"], error["code"]) == (message, param, code)
    assert caught.value.status in (400, 422)


@pytest.mark.parametrize(
    ("plan", "kind", "chunks"),
    [
        ("cut=first", BackendError, 0),
        ("cut=middle", BackendBroken, 4),
        ("cut=middle;reset=1", BackendBroken, 4),
        ("cut=middle;is_until_close=1", BackendBroken, 4),
        ("has_finish=0", BackendBroken, 7),
        ("has_finish=0;has_done=0", BackendBroken, 7),
        ("hang=first", BackendTimeout, 0),
        ("hang=middle", BackendTimeout, 4),
        ("error=first", BackendUnavailable, 0),
        ("error=middle", BackendBroken, 4),
        ("malformed=middle", BackendBroken, 4),
        ("is_whole=1;body=html", BackendBroken, 0),
    ],
)
async def test_a_broken_stream_is_never_a_finished_one(
    upstream: Upstream, managed: ManagedBackend, plan: str, kind: type[BackendError], chunks: int
) -> None:
    """litellm ends a cut stream with a finish reason of its own making; here it is an error."""
    upstream.plan(plan)
    seen: list[Chunk] = []
    stream = managed.stream(ask(ttft_s=0.6, idle_s=0.6))
    with pytest.raises(BackendError) as caught:
        await collect_into(seen, stream)
    assert isinstance(caught.value, kind)
    assert not any(chunk.finish_reasons for chunk in seen)
    assert len(seen) <= chunks
    assert managed.running == 0


async def test_leaving_early_closes_the_connection(upstream: Upstream, managed: ManagedBackend) -> None:
    """The provider sees the reader go, in the middle of an answer and while it waits for one."""
    upstream.plan("chunks=1000;pace_ms=20")
    stream = managed.stream(ask())
    await anext(stream)
    await stream.aclose()
    await until(upstream, lambda seen: seen.dropped == 1)
    with pytest.raises(BackendBroken):
        await anext(stream)

    upstream.reset()
    upstream.plan("hang=headers")
    stream = managed.stream(ask(ttft_s=60))
    reader = asyncio.create_task(collect(stream))
    await until(upstream, lambda seen: seen.generations == 1)
    await stream.aclose()
    with pytest.raises(BackendBroken):
        await reader
    await until(upstream, lambda seen: seen.dropped == 1)


async def test_closing_before_and_after(upstream: Upstream, managed: ManagedBackend) -> None:
    """A stream that was never read asks nobody; one that ended stays ended."""
    stream = managed.stream(ask())
    await stream.aclose()
    with pytest.raises(BackendBroken):
        await anext(stream)
    assert upstream.seen().requests == []
    stream = managed.stream(ask())
    assert [chunk async for chunks in stream for chunk in chunks][-1].usage == Usage(6, 6, 3)
    await stream.aclose()
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_nobody_there() -> None:
    """A refused connection is an unavailable deployment."""
    with run_upstream() as gone:
        gone.stop()
        backend = make_managed(gone.url)
        with pytest.raises(BackendUnavailable):
            await collect(backend.stream(ask()))
        await backend.aclose()


async def test_readiness_follows_the_import(upstream: Upstream) -> None:
    """Unready until litellm is there, with the reason; without its key for good, with that reason."""
    backend = make_managed(upstream.url)
    assert backend.load(1).reason == "litellm is being loaded"
    await backend.start()
    await backend.library()
    assert backend.load(1).is_ready
    await backend.aclose()
    keyless = make_managed(upstream.url, keys=Keys([ApiKeySettings(env="ANTHROPIC_API_KEY")], {}))
    await keyless.start()
    assert keyless.load(1).why == "the variable of its key is not set: ANTHROPIC_API_KEY"
    with pytest.raises(BackendUnavailable, match="the variable of its key is not set"):
        await collect(keyless.stream(ask()))


def test_nothing_heavy_is_imported_with_the_module() -> None:
    """The event loop never pays for litellm: importing the backends imports neither it nor the openai package."""
    heavy = ("litellm", "openai", "torch", "httpx", "local_engine.engine")
    code = f"import sys, gateway.backends.managed; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
