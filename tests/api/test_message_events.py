"""What the events of Anthropic's Messages API add up to, whatever the deployment's chunks look like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.message_events import MessageRenderer
from gateway.wire.chunks import read
from gateway.wire.errors import Unavailable, Upstream

_texts = st.text(max_size=20)
_deltas = st.one_of(
    st.fixed_dictionaries({"content": _texts}),
    st.fixed_dictionaries({"reasoning_content": _texts}),
    st.fixed_dictionaries({"refusal": _texts}),
    st.tuples(st.integers(0, 2), _texts).map(lambda one: {"tool_calls": [_call(*one)]}),
)
_finishes = st.sampled_from(["stop", "length", "tool_calls", "content_filter"])


def _call(index: int, arguments: str) -> dict[str, Any]:
    return {"index": index, "id": f"t{index}", "function": {"name": f"f{index}", "arguments": arguments}}


def chunk(delta: dict[str, Any], finish: str | None = None, **more: Any) -> Any:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return read(msgspec.json.encode({"id": "c", "model": "n", "choices": [choice], **more}))


def events(body: bytes) -> list[dict[str, Any]]:
    """The events' data; each names itself in the event's own line too."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def built(told: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client builds of a stream's events; checks their order."""
    assert [told[0]["type"], told[-1]["type"]] == ["message_start", "message_stop"]
    message: dict[str, Any] = told[0]["message"]
    is_open, arguments = False, ""
    for event in told[1:-1]:
        content = message["content"]
        match event["type"]:
            case "content_block_start":
                assert (event["index"], is_open) == (len(content), False)
                content.append(event["content_block"])
                is_open, arguments = True, ""
            case "content_block_delta":
                assert (event["index"], is_open) == (len(content) - 1, True)
                block, delta = content[-1], event["delta"]
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                else:
                    name = delta["type"].removesuffix("_delta")
                    block[name] += delta[name]
            case "content_block_stop":
                assert (event["index"], is_open) == (len(content) - 1, True)
                is_open = False
                if content[-1]["type"] == "tool_use":
                    content[-1]["input"] = read_input(arguments)
            case "message_delta":
                message |= {**event["delta"], "usage": event["usage"]}
    assert not is_open
    return message


def read_input(arguments: str) -> dict[str, Any]:
    try:
        given = msgspec.json.decode(arguments or "{}")
    except msgspec.DecodeError:
        given = None
    return given if isinstance(given, dict) else {"INVALID_JSON": arguments}


@given(st.lists(_deltas, max_size=12), _finishes)
def test_events_add_up_to_the_whole(deltas: list[dict[str, Any]], finish: str) -> None:
    """One block is open at a time, also where calls grow side by side, and nothing of the answer is lost."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    chunks = [*map(chunk, deltas), chunk({}, finish, usage=usage)]
    streamed = MessageRenderer("m", True, "req_1")
    told = events(b"".join([*(streamed.events([one]) for one in chunks), streamed.end()]))
    whole = json.loads(MessageRenderer("m", False, "req_1").whole(chunks, None))
    assert built(told) == whole
    assert (whole["usage"]["input_tokens"], whole["usage"]["cache_read_input_tokens"]) == (5, 4)
    texts = "".join(delta.get("content", "") + delta.get("refusal", "") for delta in deltas)
    assert "".join(block["text"] for block in whole["content"] if block["type"] == "text") == texts
    for index in range(3):
        pieces = [
            call["function"]["arguments"] for d in deltas for call in d.get("tool_calls", ()) if call["index"] == index
        ]
        blocks = [block for block in whole["content"] if block.get("id") == f"t{index}"]
        assert [block["input"] for block in blocks] == ([read_input("".join(pieces))] if pieces else [])


def test_a_message_begins_with_the_best_count_of_its_prompt() -> None:
    """An estimate; the deployment's count where it comes with the first chunks; the end has the last count."""
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    last = chunk({}, "stop", usage=usage)
    for first, counted in (([chunk({"content": "a"})], 123), ([chunk({"content": "a"}), last], 9)):
        renderer = MessageRenderer("m", True, "req_1", 123)
        told = events(renderer.events(first) + renderer.events([last]) + renderer.end())
        assert told[0]["message"]["usage"]["input_tokens"] == counted
        assert told[-2]["usage"]["input_tokens"] == 9


def test_the_text_that_ended_an_answer_is_named() -> None:
    """Where the server says which stop sequence it met."""
    named = msgspec.json.encode({"choices": [{"delta": {}, "finish_reason": "stop", "stop_reason": "END"}]})
    whole = json.loads(MessageRenderer("m", False, "req_1").whole([chunk({"content": "a"}), read(named)], None))
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("stop_sequence", "END")


def test_an_error_inside_a_stream_has_anthropics_shape() -> None:
    """By its status, and with the words of a deployment's own error."""
    (told,) = events(MessageRenderer("m", True, "req_1").failed(Unavailable("No room")))
    assert told["error"] == {"type": "api_error", "message": "No room"}
    own = Upstream("x")
    own.http_status, own.raw_body = 400, b'{"error":{"message":"Bad field"}}'
    (told,) = events(MessageRenderer("m", True, "req_1").failed(own))
    assert told["error"] == {"type": "invalid_request_error", "message": "Bad field"}
