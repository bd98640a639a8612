"""What a response's events tell, whatever the deployment's chunks look like."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.api.response_events import ResponseRenderer
from gateway.journey.turn import Arrival
from gateway.wire.chunks import read, unfold
from gateway.wire.errors import Unavailable

_DONE = {"output_item": "item", "content_part": "part", "reasoning_summary_part": "part"}
_texts = st.text(max_size=90)
_calls = st.lists(st.tuples(_texts, _texts), max_size=3)


def response(*, is_stream: bool) -> ResponseRenderer:
    return ResponseRenderer({"model": "m", "stream": is_stream}, Arrival("req_1", 1.0, "responses"))


def events(body: bytes) -> list[dict[str, Any]]:
    """The events' data; each names itself in the event's own line too."""
    found = []
    for event in body.decode().split("\n\n")[:-1]:
        name, _, data = event.partition("\ndata: ")
        found.append(json.loads(data))
        assert name == f"event: {found[-1]['type']}"
    return found


def whole(message: dict[str, Any], finish: str = "stop") -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return msgspec.json.encode(
        {"id": "c", "object": "chat.completion", "model": "n", "choices": [choice], "usage": usage}
    )


@given(_texts, _texts, _texts, _calls)
def test_events_add_up_to_the_whole(reasoning: str, content: str, refusal: str, calls: list[tuple[str, str]]) -> None:
    """Numbered without gaps, deltas join to what is done, and the last event holds what a client that streams nothing gets."""
    tool_calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(calls)
    ]
    message = {"reasoning_content": reasoning, "content": content, "refusal": refusal, "tool_calls": tool_calls}
    chunks = unfold(whole(message))
    streamed = response(is_stream=True)
    told = events(b"".join([*(streamed.events([chunk]) for chunk in chunks), streamed.end()]))
    assert [event["sequence_number"] for event in told] == list(range(len(told)))
    deltas: dict[tuple[Any, ...], str] = {}
    for event in told:
        kind, _, verb = event["type"].removeprefix("response.").rpartition(".")
        if verb == "delta":
            place = (event["output_index"], kind)
            deltas[place] = deltas.get(place, "") + event["delta"]
        elif verb == "done" and kind not in _DONE:
            text = next(event[field] for field in ("text", "refusal", "arguments") if field in event)
            assert deltas.get((event["output_index"], kind), "") == text
    last = told[-1]
    assert last["type"] == "response.completed"
    done = {event["output_index"]: event["item"] for event in told if event["type"] == "response.output_item.done"}
    assert [done[position] for position in range(len(done))] == last["response"]["output"]
    assert json.loads(response(is_stream=False).whole([read(whole(message), is_whole=True)], None)) == last["response"]
    assert sum(1 for text in (reasoning, content, refusal) if text) + len(calls) == len(done)


def test_calls_of_a_clients_other_tools_have_their_own_items_and_events() -> None:
    """A custom tool's input grows like a function's arguments; the local shell's call has an action, and no name."""
    shell = {"command": ["ls", "-l"], "timeout_ms": 9, "env": None}
    calls = [
        {"id": "call_0", "type": "custom", "custom": {"name": "apply_patch", "input": "*** Begin Patch"}},
        {"id": "call_1", "type": "function", "function": {"name": "local_shell", "arguments": json.dumps(shell)}},
        {"id": "call_2", "type": "function", "function": {"name": "local_shell", "arguments": "rm -rf"}},
    ]
    body = {"model": "m", "stream": True, "tools": [{"type": "custom"}, {"type": "local_shell"}]}
    renderer = ResponseRenderer(body, Arrival("req_1", 1.0, "responses"))
    told = events(b"".join([*(renderer.events([one]) for one in unfold(whole({"tool_calls": calls}))), renderer.end()]))
    custom, listed, broken = told[-1]["response"]["output"]
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", "*** Begin Patch")
    assert "arguments" not in custom
    deltas = [event["delta"] for event in told if event["type"] == "response.custom_tool_call_input.delta"]
    (done,) = [event for event in told if event["type"] == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done["input"] == "*** Begin Patch"
    action = {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 9}
    assert (listed["type"], listed["call_id"], listed["action"]) == ("local_shell_call", "call_1", action)
    assert broken["action"]["command"] == ["rm -rf"]
    assert not [event for event in told if "function_call" in event["type"]]


@pytest.mark.parametrize("finish", ["length", "content_filter"])
def test_an_answer_that_was_cut_is_incomplete(finish: str) -> None:
    """The response, and its last item, say so."""
    told = json.loads(response(is_stream=False).whole([read(whole({"content": "a"}, finish), is_whole=True)], None))
    assert (told["status"], told["output"][-1]["status"]) == ("incomplete", "incomplete")
    assert told["incomplete_details"]["reason"] in ("max_output_tokens", "content_filter")


@pytest.mark.parametrize(
    "delta",
    [
        {"tool_calls": [{"function": "f"}, {"id": 7, "function": {"name": None, "arguments": {"a": 1}}}]},
        {"content": [{"type": "text"}], "reasoning": {"a": 1}},
        {"tool_calls": [{"id": {"a": 1}, "function": {"name": 5, "arguments": "{}"}}]},
        {"tool_calls": [{"id": ["a"], "custom": {"name": ["n"], "input": "x"}}]},
        {"content": None, "tool_calls": None},
        {},
    ],
)
def test_strange_deltas_break_nothing(delta: dict[str, Any]) -> None:
    """What nobody could show is left out; the response ends as any other."""
    strange = msgspec.json.encode(
        {"choices": [{"index": 0, "delta": delta, "logprobs": "none", "finish_reason": "stop"}]}
    )
    streamed = response(is_stream=True)
    told = events(streamed.events([read(strange)]) + streamed.end())
    assert told[-1]["type"] == "response.completed"
    for item in told[-1]["response"]["output"]:
        assert isinstance(item["call_id"], str)
        assert isinstance(item["name"], str)


@pytest.mark.parametrize("spelled", ["Hey 👋", "Hey ?"])
def test_no_log_probability_is_lost(spelled: str) -> None:
    """Also where a token ends inside a character and its text comes with the next, or where no token spells its text: streamed or
    whole, a response has those of the chat completion."""
    tokens = [{"token": text, "logprob": -0.5, "bytes": None} for text in ("Hey", "", " 👋", "")]
    choice = {"index": 0, "logprobs": {"content": tokens}, "finish_reason": "stop"}
    answer = {**json.loads(whole({})), "choices": [{**choice, "message": {"role": "assistant", "content": spelled}}]}
    chunks = unfold(msgspec.json.encode(answer))
    streamed = response(is_stream=True)
    told = events(streamed.events(chunks) + streamed.end())
    (item,) = told[-1]["response"]["output"]
    assert item["content"][0]["logprobs"] == tokens
    (done,) = (event for event in told if event["type"] == "response.output_text.done")
    assert (done["text"], done["logprobs"]) == (spelled, tokens)


def test_a_failure_is_told_as_the_reference_and_as_sdks_have_it() -> None:
    """Flat, and as an object: nothing says that the response was completed."""
    streamed = response(is_stream=True)
    streamed.events([read(b'{"choices":[{"index":0,"delta":{"content":"a"}}]}')])
    (told,) = events(streamed.failed(Unavailable("gone", code="upstream")))
    assert {name: told[name] for name in ("type", "code", "message", "param")} == {
        "type": "error",
        "code": "upstream",
        "message": "gone",
        "param": None,
    }
    assert told["error"]["message"] == "gone"


def test_calls_without_an_index_are_told_apart_by_their_ids() -> None:
    """Another id begins another call; the same one again, or none, goes on."""
    told = response(is_stream=False)
    for call_id, arguments in (("a", "1"), ("a", "2"), (None, "3"), ("b", "4")):
        call = {"id": call_id, "function": {"name": "f", "arguments": arguments}}
        told.events([read(msgspec.json.encode({"choices": [{"index": 0, "delta": {"tool_calls": [call]}}]}))])
    output = json.loads(told.whole([], None))["output"]
    assert [(item["call_id"], item["arguments"]) for item in output] == [("a", "123"), ("b", "4")]


@pytest.mark.parametrize("is_stream", [False, True])
def test_citations_and_the_tier_of_a_chat_are_told(is_stream: bool) -> None:
    """Each as the Responses API has it, flat, after its text; also where the chat came whole."""
    cited = {"start_index": 0, "end_index": 4, "title": "t", "url": "https://example.com"}
    message = {"content": "News.", "annotations": [{"type": "url_citation", "url_citation": cited}]}
    body = msgspec.json.decode(whole(message)) | {"service_tier": "flex"}
    renderer = response(is_stream=is_stream)
    told = renderer.events(unfold(msgspec.json.encode(body))) + renderer.end()
    answer = json.loads(renderer.body())
    (part,) = answer["output"][0]["content"]
    assert (part["text"], part["annotations"]) == ("News.", [{"type": "url_citation", **cited}])
    assert answer["service_tier"] == "flex"
    if is_stream:
        (added,) = [event for event in events(told) if event["type"].endswith("annotation.added")]
        assert (added["annotation_index"], added["annotation"]) == (0, part["annotations"][0])
