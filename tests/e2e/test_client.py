"""The official `openai` client, sync and async, with only `base_url` and `api_key` changed."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from tests.e2e.gateway import API_KEY, Gateway
from tests.e2e.upstream import Upstream

_fresh = itertools.count()

TOOLS: Any = [
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]

VARIANTS: dict[str, dict[str, Any]] = {
    "text": {},
    "tools": {"tools": TOOLS},
    "several": {"n": 3},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}


def question() -> list[Any]:
    """A prompt that nobody has asked before."""
    return [{"role": "user", "content": f"Tell me something about the number {next(_fresh)}, in detail."}]


def gist(completion: Any) -> Any:
    """What must be equal however an answer was delivered."""
    return {
        "choices": [
            {
                "index": choice.index,
                "content": choice.message.content,
                "calls": [(c.function.name, c.function.arguments) for c in choice.message.tool_calls or []],
                "finish": choice.finish_reason,
                "logprobs": [(t.token, t.logprob, len(t.top_logprobs)) for t in choice.logprobs.content]
                if choice.logprobs
                else None,
            }
            for choice in sorted(completion.choices, key=lambda c: c.index)
        ],
        "usage": (completion.usage.prompt_tokens, completion.usage.completion_tokens),
    }


def folded(chunks: list[Any]) -> Any:
    """A stream's chunks as a client would put them together."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        if chunk.usage is not None:
            usage = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            one = choices.setdefault(
                choice.index, {"index": choice.index, "content": None, "calls": {}, "finish": None, "logprobs": None}
            )
            if choice.delta.content is not None:
                one["content"] = (one["content"] or "") + choice.delta.content
            for call in choice.delta.tool_calls or []:
                name, arguments = one["calls"].get(call.index, ("", ""))
                function = call.function
                one["calls"][call.index] = (name + (function.name or ""), arguments + (function.arguments or ""))
            if choice.logprobs and choice.logprobs.content:
                tokens = [(t.token, t.logprob, len(t.top_logprobs)) for t in choice.logprobs.content]
                one["logprobs"] = (one["logprobs"] or []) + tokens
            one["finish"] = choice.finish_reason or one["finish"]
    for one in choices.values():
        one["calls"] = [one["calls"][index] for index in sorted(one["calls"])]
        if one["calls"]:
            one["content"] = one["content"] or None
    return {"choices": [choices[index] for index in sorted(choices)], "usage": usage}


def stream(client: OpenAI, messages: list[Any], **more: Any) -> tuple[Any, str]:
    """A streamed answer folded, and what the cache said."""
    raw = client.chat.completions.with_raw_response.create(
        model="mock", messages=messages, stream=True, stream_options={"include_usage": True}, **more
    )
    return folded(list(raw.parse())), raw.headers["x-sameway-cache"]


def whole(client: OpenAI, messages: list[Any], **more: Any) -> tuple[Any, str]:
    """A whole answer, and what the cache said."""
    raw = client.chat.completions.with_raw_response.create(model="mock", messages=messages, **more)
    return gist(raw.parse()), raw.headers["x-sameway-cache"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("first", [stream, whole], ids=["recorded streamed", "recorded whole"])
def test_replays_equal_what_was_recorded(client: OpenAI, upstream: Upstream, first: Any, variant: str) -> None:
    """Recorded as a stream or whole, replayed as either: content, calls, finish, log probabilities and usage are the same."""
    messages, more = question(), VARIANTS[variant]
    recorded, kind = first(client, messages, **more)
    assert kind == "miss"
    direct = OpenAI(base_url=upstream.url, api_key="none")
    expected = gist(direct.chat.completions.create(model="mock", messages=messages, **more))
    assert recorded == expected
    for again in (stream, whole):
        replayed, kind = again(client, messages, **more)
        assert kind == "exact"
        assert replayed == expected


async def test_async_client(gateway: Gateway) -> None:
    """The async client gets the same answer streamed and whole, side by side."""
    async with AsyncOpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0) as client:
        messages = question()
        chunks, answer = await asyncio.gather(
            _all_chunks(client, messages), client.chat.completions.create(model="mock", messages=messages)
        )
        assert folded(chunks)["choices"][0]["content"] == answer.choices[0].message.content


async def _all_chunks(client: AsyncOpenAI, messages: list[Any]) -> list[Any]:
    return [chunk async for chunk in await client.chat.completions.create(model="mock", messages=messages, stream=True)]


def test_usage_comes_only_to_those_who_ask(client: OpenAI) -> None:
    """The final usage chunk with no choices is sent where include_usage asked for it, and nowhere else."""
    messages = question()
    for _ in range(2):  # generated, then replayed
        without = list(client.chat.completions.create(model="mock", messages=messages, stream=True))
        assert all(chunk.choices and chunk.usage is None for chunk in without)
        asked = client.chat.completions.create(
            model="mock", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        last = list(asked)[-1]
        assert last.choices == []
        assert last.usage is not None


def test_unknown_fields_pass_through(client: OpenAI, upstream: Upstream) -> None:
    """What Sameway does not know reaches the deployment as it was; what is Sameway's own does not."""
    client.chat.completions.create(
        model="mock", messages=question(), extra_body={"future_field": {"a": [1, None]}, "cache": {"ttl": 60}}
    )
    body = upstream.seen().requests[-1]["body"]
    assert body["future_field"] == {"a": [1, None]}
    assert "cache" not in body


def test_models_are_listed(client: OpenAI) -> None:
    """Every alias and the embedder are there, as a list and one by one."""
    names = {model.id for model in client.models.list()}
    assert {"mock", "flaky", "all-minilm-l6-v2"} <= names
    assert client.models.retrieve("mock").id == "mock"


def test_embeddings(client: OpenAI) -> None:
    """Unit vectors of the packaged model, as floats and as base64, near for near texts."""
    texts = ["How do I reset my password?", "I forgot my password, how can I reset it?", "Bananas are yellow."]
    made = client.embeddings.create(model="all-minilm-l6-v2", input=texts)  # the client asks for base64 by itself
    floats = client.embeddings.create(model="all-minilm-l6-v2", input=texts, encoding_format="float")
    vectors = [item.embedding for item in made.data]
    assert [len(v) for v in vectors] == [384] * 3
    assert made.usage.prompt_tokens > 10
    for one, other in zip(vectors, (item.embedding for item in floats.data), strict=True):
        assert one == pytest.approx(other, abs=1e-6)

    def near(a: list[float], b: list[float]) -> float:
        return sum(x * y for x, y in zip(a, b, strict=True))

    assert near(vectors[0], vectors[0]) == pytest.approx(1.0, abs=1e-4)
    assert near(vectors[0], vectors[1]) > near(vectors[0], vectors[2]) + 0.3
