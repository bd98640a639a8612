"""Answers as six providers' APIs give them, whole and streamed, through the backends, priced as their invoices are.

Shapes: the providers' API references; usages are made by their documentation, and the sums by hand.
"""

from __future__ import annotations

import json
import re
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gateway.backends.anthropic.answer import MessageReader
from gateway.backends.anthropic.backend import AnthropicBackend
from gateway.backends.base import Backend, BackendRequest, Native
from gateway.backends.keys import Keys
from gateway.backends.managed import ManagedBackend
from gateway.backends.openai.backend import OpenAIBackend
from gateway.deployments.build import describe
from gateway.settings import DeploymentSettings
from tests.backends.conftest import ask, collect
from tests.e2e.anthropic_server import events

TEXT = "It rains."


def lines(pieces: list[Any]) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(piece).encode() for piece in pieces)


def openai(usage: dict[str, Any]) -> tuple[bytes, bytes]:
    """A chat completion of OpenAI's API and of those that speak it."""
    head = {"id": "c", "created": 1, "model": "m"}
    whole = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": TEXT}}
    pieces: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": TEXT}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "usage": usage},
    ]
    chunks = lines([{**head, "object": "chat.completion.chunk", **piece} for piece in pieces])
    body = {**head, "object": "chat.completion", "choices": [whole], "usage": usage}
    return json.dumps(body).encode(), chunks + b"data: [DONE]\n\n"


def anthropic(usage: dict[str, Any]) -> tuple[bytes, bytes]:
    """A message; of a stream its start has the prompt's tokens, and its end the answer's."""
    whole = {"id": "msg", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn"}
    whole |= {"stop_sequence": None, "content": [{"type": "text", "text": TEXT}], "usage": usage}
    pieces = list(events(whole))
    for piece in pieces:
        if piece["type"] == "message_start":
            begun = {**usage, "output_tokens": 1}
            begun.pop("server_tool_use", None)
            piece["message"]["usage"] = begun
        elif piece["type"] == "message_delta":
            tools = {name: usage[name] for name in ("server_tool_use",) if name in usage}
            piece["usage"] = {"output_tokens": usage["output_tokens"], **tools}
    sent = b"".join(b"event: %b\ndata: %b\n\n" % (p["type"].encode(), json.dumps(p).encode()) for p in pieces)
    return json.dumps(whole).encode(), sent


def gemini(usage: dict[str, Any]) -> tuple[bytes, bytes]:
    """generateContent; each piece of a stream counts what there is so far."""

    def piece(text: str, counted: dict[str, Any], **more: Any) -> dict[str, Any]:
        content = {"role": "model", "parts": [{"text": text}]}
        return {"candidates": [{"index": 0, "content": content, **more}], "usageMetadata": counted, "modelVersion": "m"}

    begun = {**usage, "candidatesTokenCount": 1}
    begun["totalTokenCount"] -= usage["candidatesTokenCount"] - 1
    end = piece(TEXT[5:], usage, finishReason="STOP")
    whole = piece(TEXT, usage, finishReason="STOP")
    return json.dumps(whole).encode(), lines([piece(TEXT[:5], begun), end])


def bedrock(usage: dict[str, Any]) -> tuple[bytes, bytes]:
    """Converse; a stream is in AWS' event stream encoding."""

    def message(name: str, payload: dict[str, Any]) -> bytes:
        headers = b""
        for key, value in ((":event-type", name), (":content-type", "application/json"), (":message-type", "event")):
            headers += (
                struct.pack("!B", len(key)) + key.encode() + b"\x07" + struct.pack("!H", len(value)) + value.encode()
            )
        data = json.dumps(payload).encode()
        prelude = struct.pack("!II", 16 + len(headers) + len(data), len(headers))
        start = prelude + struct.pack("!I", zlib.crc32(prelude)) + headers + data
        return start + struct.pack("!I", zlib.crc32(start))

    content = {"message": {"role": "assistant", "content": [{"text": TEXT}]}}
    whole = {"output": content, "stopReason": "end_turn", "usage": usage, "metrics": {"latencyMs": 1}}
    sent = (
        ("messageStart", {"role": "assistant"}),
        ("contentBlockDelta", {"contentBlockIndex": 0, "delta": {"text": TEXT}}),
        ("contentBlockStop", {"contentBlockIndex": 0}),
        ("messageStop", {"stopReason": "end_turn"}),
        ("metadata", {"usage": usage, "metrics": {"latencyMs": 1}}),
    )
    return json.dumps(whole).encode(), b"".join(message(*one) for one in sent)


CLAUDE = {
    "input_tokens": 21,
    "cache_creation_input_tokens": 6_000,
    "cache_read_input_tokens": 4_000,
    "cache_creation": {"ephemeral_5m_input_tokens": 5_000, "ephemeral_1h_input_tokens": 1_000},
    "output_tokens": 300,
    "server_tool_use": {"web_search_requests": 2},
}
# 21 x 3 + 4,000 x 0.3 + 5,000 x 3.75 + 1,000 x 6 + 300 x 15, and two searches at 0.01 USD
CLAUDE_MICROUSD = 63 + 1_200 + 18_750 + 6_000 + 4_500 + 20_000
GPT = {
    "prompt_tokens": 5_000,
    "completion_tokens": 800,
    "total_tokens": 5_800,
    "prompt_tokens_details": {"cached_tokens": 1_024, "cache_write_tokens": 2_048, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 512, "audio_tokens": 0, "rejected_prediction_tokens": 0},
}
SOUNDS = {
    "prompt_tokens": 120,
    "completion_tokens": 90,
    "total_tokens": 210,
    "prompt_tokens_details": {"cached_tokens": 0, "text_tokens": 20, "image_tokens": 0, "audio_tokens": 100},
    "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": 30, "audio_tokens": 60},
}
THOUGHTS = {
    "promptTokenCount": 1_000,
    "cachedContentTokenCount": 600,
    "candidatesTokenCount": 200,
    "thoughtsTokenCount": 700,
    "totalTokenCount": 1_900,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 800}, {"modality": "AUDIO", "tokenCount": 200}],
    "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 600}],
    "candidatesTokensDetails": [{"modality": "TEXT", "tokenCount": 200}],
}
CACHED_SOUNDS = {
    "promptTokenCount": 1_000,
    "cachedContentTokenCount": 600,
    "candidatesTokenCount": 200,
    "totalTokenCount": 1_200,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 300}, {"modality": "AUDIO", "tokenCount": 700}],
    "cacheTokensDetails": [{"modality": "TEXT", "tokenCount": 100}, {"modality": "AUDIO", "tokenCount": 500}],
}
PICTURE = {
    "promptTokenCount": 20,
    "candidatesTokenCount": 1_300,
    "totalTokenCount": 1_320,
    "promptTokensDetails": [{"modality": "TEXT", "tokenCount": 20}],
    "candidatesTokensDetails": [{"modality": "IMAGE", "tokenCount": 1_290}, {"modality": "TEXT", "tokenCount": 10}],
}
CONVERSE = {
    "inputTokens": 100,
    "outputTokens": 10,
    "totalTokens": 2_110,
    "cacheReadInputTokens": 500,
    "cacheWriteInputTokens": 1_500,
    "cacheDetails": [{"ttl": "1h", "inputTokens": 1_000}, {"ttl": "5m", "inputTokens": 500}],
}
DEEPSEEK = {
    "prompt_tokens": 3_000,
    "completion_tokens": 50,
    "total_tokens": 3_050,
    "prompt_tokens_details": {"cached_tokens": 2_560},
    "completion_tokens_details": {"reasoning_tokens": 30},
    "prompt_cache_hit_tokens": 2_560,
    "prompt_cache_miss_tokens": 440,
}
OPENROUTER = {
    "prompt_tokens": 900,
    "completion_tokens": 100,
    "total_tokens": 1_000,
    "cost": 0.0042,
    "is_byok": False,
    "prompt_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 300, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 40, "image_tokens": 0},
    "cost_details": {"upstream_inference_cost": None},
}


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """Answers with `whole`, or with `stream` where that is asked for."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            is_stream = "stream" in self.path.lower() or json.loads(body).get("stream")
            answer: bytes = self.server.stream if is_stream else self.server.whole  # type: ignore[attr-defined]
            self.send_response(200)
            kind = "application/vnd.amazon.eventstream" if "converse" in self.path else "text/event-stream"
            self.send_header("content-type", kind if is_stream else "application/json")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def backend(kind: str, model: str, url: str) -> Backend:
    options: Any = {"model": model, "capabilities": frozenset[str](), "base_url": url, "keys": Keys.fixed("sk-1234")}
    if kind == "litellm":
        return ManagedBackend("d", **options)
    return AnthropicBackend("d", **options) if kind == "anthropic" else OpenAIBackend("d", **options)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "model", "recorded", "microusd"),
    [
        ("anthropic", "claude-sonnet-4-5", anthropic(CLAUDE), CLAUDE_MICROUSD),
        ("litellm", "anthropic/claude-sonnet-4-5", anthropic(CLAUDE), CLAUDE_MICROUSD),
        # 1,928 x 4 + 1,024 x 0.4 + 2,048 x 5 + 800 x 20: 34,361.6
        ("openai", "gpt-5.6", openai(GPT), 34_362),
        ("litellm", "openai/gpt-5.6", openai(GPT), 34_362),
        # 20 x 2.5 + 100 x 32 + 30 x 10 + 60 x 64
        ("openai", "gpt-audio", openai(SOUNDS), 50 + 3_200 + 300 + 3_840),
        # 200 x 0.3 + 600 x 0.03 + 200 sounds x 1 + (200 + 700 thoughts) x 2.5
        ("litellm", "gemini/gemini-2.5-flash", gemini(THOUGHTS), 60 + 18 + 200 + 2_250),
        # 200 x 0.3 + 200 sounds x 1 + 100 x 0.03 and 500 sounds x 0.1 from the cache + 200 x 2.5
        ("litellm", "gemini/gemini-2.5-flash", gemini(CACHED_SOUNDS), 60 + 200 + 3 + 50 + 500),
        # 20 x 0.3 + 10 x 2.5 + 1,290 of a picture x 30
        ("litellm", "gemini/gemini-2.5-flash-image", gemini(PICTURE), 6 + 25 + 38_700),
        # 100 x 3.3 + 500 x 0.33 + 500 x 4.125 + 1,000 x 6.6 + 10 x 16.5: 9,322.5
        ("litellm", "bedrock/converse/us.anthropic.claude-sonnet-4-5-20250929-v1:0", bedrock(CONVERSE), 9_323),
        ("litellm", "bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", bedrock(CONVERSE), 9_323),
        ("litellm", "openrouter/anthropic/claude-sonnet-4.5", openai(OPENROUTER), 300 + 150 + 1_125 + 1_500),
        # 440 x 0.28 + 2,560 x 0.028 + 50 x 0.42: 215.88
        ("litellm", "deepseek/deepseek-chat", openai(DEEPSEEK), 216),
        ("openai", "deepseek/deepseek-chat", openai(DEEPSEEK), 216),
        # 100 x 3 + 500 x 0.3 + 300 x 3.75 + 100 x 15
        ("openai", "anthropic/claude-sonnet-4.5", openai(OPENROUTER), 300 + 150 + 1_125 + 1_500),
    ],
)
async def test_an_answer_costs_what_its_provider_bills(
    server: ThreadingHTTPServer,
    kind: str,
    model: str,
    recorded: tuple[bytes, bytes],
    microusd: int,
    is_stream: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each kind of token, and calls of the provider's tools, to the µUSD."""
    server.whole, server.stream = recorded  # type: ignore[attr-defined]
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_REGION_NAME", "us-east-1")
    url = f"http://127.0.0.1:{server.server_port}"
    if kind == "openai":
        url += "/v1"
    one = backend(kind, model, url)
    await one.start()
    if isinstance(one, ManagedBackend):
        await one.library()
    chunks = await collect(one.stream(ask(is_stream=is_stream)))
    await one.aclose()
    usage = next(chunk.usage for chunk in reversed(chunks) if chunk.usage is not None)
    named = {"price": {"input_usd_per_mtok": 3, "output_usd_per_mtok": 15, "cached_input_usd_per_mtok": 0.3}}
    given = {"backend": kind, "model": model, "base_url": "https://openrouter.ai/api/v1" if kind == "openai" else None}
    price = describe(DeploymentSettings.model_validate({**given, **(named if "sonnet-4.5" in model else {})})).price
    assert price.cost(usage) == microusd, usage
    # as the provider says itself, and no library
    assert usage.provider_cost_microusd == (4_200 if recorded == openai(OPENROUTER) else None)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("usage", "prompt_tokens"),
    [
        *[(odd, None) for odd in (None, 7, "many", [], [None])],
        *[
            ({"cacheTokensDetails": odd}, 1_000)
            for odd in (None, 7, "AUDIO", {}, [None, "AUDIO", 7, []], [{"modality": "AUDIO", "tokenCount": None}])
        ],
        *[
            ({name: odd}, 1_000)
            for name in ("promptTokensDetails", "candidatesTokensDetails")
            for odd in (None, "x", [1])
        ],
        ({"candidatesTokenCount": None, "thoughtsTokenCount": "x", "cachedContentTokenCount": []}, 1_000),
        ({"promptTokenCount": "1001", "cacheTokensDetails": [{"modality": "AUDIO", "tokenCount": "5"}]}, 1_001),
    ],
)
async def test_a_usage_of_geminis_that_cannot_be_read_costs_no_answer(
    server: ThreadingHTTPServer, usage: Any, prompt_tokens: int | None, is_stream: bool
) -> None:
    """The text comes through litellm; what can be read of the counts is counted."""
    told = json.dumps({**CACHED_SOUNDS, **usage} if isinstance(usage, dict) else usage).encode()
    server.whole, server.stream = (  # type: ignore[attr-defined]
        re.sub(rb'(?<="usageMetadata": ).*?(?=, "modelVersion")', told, sent) for sent in gemini(CACHED_SOUNDS)
    )
    one = backend("litellm", "gemini/gemini-2.5-flash", f"http://127.0.0.1:{server.server_port}")
    await one.start()
    chunks = await collect(one.stream(ask(is_stream=is_stream)))
    await one.aclose()
    choices = [choice for chunk in chunks for choice in json.loads(chunk.data)["choices"]]
    pieces = [choice["delta" if is_stream else "message"] for choice in choices]
    assert "".join(piece.get("content") or "" for piece in pieces) == TEXT
    counted = [chunk.usage.prompt_tokens for chunk in chunks if chunk.usage is not None]
    assert counted[-1:] == ([] if prompt_tokens is None else [prompt_tokens])


@pytest.mark.parametrize("usage", ["many", 7, [1]])
def test_a_usage_of_another_shape_costs_no_answer(usage: Any) -> None:
    """Anthropic's: the text comes, whole and streamed, and its tokens are not counted."""
    message = {"type": "message", "content": [{"type": "text", "text": TEXT}], "stop_reason": "end_turn"}
    pieces: list[dict[str, Any]] = [
        {"type": "message_start", "message": {"content": [], "usage": usage}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": TEXT}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": usage},
        {"type": "message_stop"},
    ]
    whole = MessageReader(0).whole(json.dumps({**message, "usage": usage}).encode())
    for chunks in (whole, MessageReader(0).chunks(json.dumps(piece).encode() for piece in pieces)):
        assert any(TEXT in chunk.decode() for chunk in chunks)
        assert chunks[-1] == b"[DONE]"
        assert not any(b'"usage":' in chunk for chunk in chunks)


@pytest.mark.parametrize(("asked", "sent"), [({}, 10), ({"max_uses": 1000}, 10), ({"max_uses": 2}, 2)])
def test_a_message_goes_out_with_the_calls_that_are_held(asked: dict[str, Any], sent: int) -> None:
    """Of a request in Anthropic's own shape the limits of its tools change, and nothing else; without a hold nothing does."""
    search = {"type": "web_search_20250305", "name": "web_search", **asked}
    client = {"name": "f", "input_schema": {}, "max_uses": 99}
    raw = json.dumps({"model": "m", "max_tokens": 9, "messages": [], "tools": [search, client]}).encode()
    backend = AnthropicBackend("a", base_url="http://0.0.0.0", model="m", capabilities=frozenset())
    for is_bound in (False, True):
        request = BackendRequest(
            body={},
            is_stream=False,
            salt=b"",
            request_id="r",
            ttft_timeout_s=1.0,
            idle_timeout_s=1.0,
            native=Native(raw, are_calls_bound=is_bound),
        )
        out = backend.payload(request)
        if is_bound:
            assert json.loads(out) == {**json.loads(raw), "tools": [{**search, "max_uses": sent}, client]}
        else:
            assert out == raw
