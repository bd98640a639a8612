"""The instant upstream speaks OpenAI's shapes: what a gateway needs to believe it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from bench.lab.native import Stub


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    upstream = Stub(tmp_path_factory.mktemp("stub"), content_bytes=120, chunks=5)
    yield upstream
    upstream.stop()


def ask(stub: Stub, body: dict[str, Any], path: str = "/v1/chat/completions") -> bytes:
    request = urllib.request.Request(f"http://127.0.0.1:{stub.port}{path}", json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=10.0) as response:
        content: bytes = response.read()
    return content


def events(content: bytes) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in content.decode().split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_whole_answer(stub: Stub) -> None:
    """A chat.completion of the asked size, finished, with usage that adds up."""
    answer = json.loads(ask(stub, {"messages": [], "stream": False}))
    assert answer["object"] == "chat.completion"
    assert len(answer["choices"][0]["message"]["content"]) == 120
    assert answer["choices"][0]["finish_reason"] == "stop"
    usage = answer["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/pace/1/v1/chat/completions"])
def test_a_stream(stub: Stub, path: str) -> None:
    """Five deltas and a finish chunk, the role in the first, whether at once or paced."""
    chunks = events(ask(stub, {"stream": True}, path))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert [delta["content"] for delta in deltas[:5]] == [f" word0{n}" for n in range(5)]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["stop"]


def test_usage_in_a_stream_when_asked_for(stub: Stub) -> None:
    """`include_usage` adds a last chunk without choices."""
    chunks = events(ask(stub, {"stream": True, "stream_options": {"include_usage": True}}))
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_what_it_does_not_know(stub: Stub) -> None:
    """Another path is a 404."""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        ask(stub, {}, "/v1/embeddings")
