"""One answer as a chat completion, a response and a message: the same texts, calls, ends and tokens, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.message_events import MessageRenderer
from gateway.api.response_events import ResponseRenderer
from gateway.journey.turn import Arrival
from gateway.wire.chunks import read
from gateway.wire.fold import fold

_texts = st.text(max_size=20)
_calls = st.lists(
    st.tuples(st.sampled_from(["look", "see"]), st.dictionaries(_texts, st.integers() | _texts)), max_size=3
)
_ENDS = {  # by the chat's: the response's status and reason, and the message's
    "stop": ("completed", None, "end_turn"),
    "length": ("incomplete", "max_output_tokens", "max_tokens"),
    "content_filter": ("incomplete", "content_filter", "refusal"),
    "tool_calls": ("completed", None, "tool_use"),
}


def _chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return read(msgspec.json.encode({"id": "c", "model": "n", "created": 1, "choices": [choice], **more}))


def _pieces(text: str) -> list[str]:
    return [text[:3], text[3:]] if text else []


@given(_texts, _texts, _calls, st.sampled_from(["stop", "length", "content_filter"]))
def test_the_three_shapes_say_the_same(thought: str, text: str, calls: list[tuple[str, Any]], finish: str) -> None:
    """Of reasoning, a text and calls in pieces, with each end and all kinds of tokens."""
    finish = "tool_calls" if calls and finish == "stop" else finish
    chunks = [_chunk({"role": "assistant", "content": ""})]
    chunks += [_chunk({"reasoning_content": piece}) for piece in _pieces(thought)]
    chunks += [_chunk({"content": piece}) for piece in _pieces(text)]
    for index, (name, given_) in enumerate(calls):
        first, *rest = _pieces(json.dumps(given_))
        head = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": first}}
        chunks += [_chunk({"tool_calls": [head]})]
        chunks += [_chunk({"tool_calls": [{"index": index, "function": {"arguments": one}}]}) for one in rest]
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "total_tokens": 120,
        "prompt_tokens_details": {"cached_tokens": 30, "cache_creation_tokens": 20},
    }
    chunks.append(_chunk({}, finish, usage=usage))
    chat = json.loads(fold(chunks))["choices"][0]
    response = json.loads(ResponseRenderer({"model": "m"}, Arrival("req_1", 1.0, "responses")).whole(chunks, None))
    message = json.loads(MessageRenderer("m", False, "req_1").whole(chunks, None))
    items, blocks = response["output"], message["content"]
    assert (chat["message"]["content"] or "") == text
    assert "".join(part["text"] for one in items if one["type"] == "message" for part in one["content"]) == text
    assert "".join(one["text"] for one in blocks if one["type"] == "text") == text
    assert (chat["message"].get("reasoning_content") or "") == thought
    assert "".join(part["text"] for one in items if one["type"] == "reasoning" for part in one["summary"]) == thought
    assert "".join(one["thinking"] for one in blocks if one["type"] == "thinking") == thought
    said = [
        (one["id"], one["function"]["name"], one["function"]["arguments"])
        for one in chat["message"].get("tool_calls", ())
    ]
    found = [(one["call_id"], one["name"], one["arguments"]) for one in items if one["type"] == "function_call"]
    used = [(one["id"], one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]
    assert said == found
    assert [(id, name, json.loads(text)) for id, name, text in said] == used
    reason = (response["incomplete_details"] or {}).get("reason")
    assert (response["status"], reason, message["stop_reason"]) == _ENDS[chat["finish_reason"]]
    counted, read_ = response["usage"], message["usage"]
    assert (counted["input_tokens"], counted["output_tokens"]) == (100, 20)
    assert read_["input_tokens"] + read_["cache_read_input_tokens"] + read_["cache_creation_input_tokens"] == 100
    assert counted["input_tokens_details"]["cached_tokens"] == read_["cache_read_input_tokens"] == 30
    assert read_["output_tokens"] == 20
