"""The Responses API with the official client: the same answers, budgets and cached entries as chat completions."""

from __future__ import annotations

import itertools
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.e2e.gateway import Gateway, wait_for
from tests.e2e.upstream import Upstream

_fresh = itertools.count()

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    "strict": False,
}


class City(BaseModel):
    name: str


def question() -> str:
    """A prompt that nobody has asked before."""
    return f"Tell me something about the letter {next(_fresh)}, at length."


def output(response: Any) -> list[Any]:
    """What a response says, without the ids that are each response's own."""
    return [item.model_dump(exclude={"id"}) for item in response.output]


@pytest.mark.parametrize("more", [{}, {"tools": [WEATHER, {**WEATHER, "name": "time"}]}, {"top_logprobs": 2}])
def test_a_response_is_what_its_events_tell(client: OpenAI, more: dict[str, Any]) -> None:
    """Generated or replayed, streamed through the SDK's own helper or whole: one output and one usage, events in order."""
    asked, told = question(), []
    for _ in range(2):
        with client.responses.stream(model="mock", input=asked, **more) as stream:
            events = list(stream)
            told.append(stream.get_final_response())
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
        added = [event.output_index for event in events if event.type == "response.output_item.added"]
        done = [event.output_index for event in events if event.type == "response.output_item.done"]
        assert added == done == list(range(len(told[0].output)))
    told.append(client.responses.parse(model="mock", input=asked, **more))
    assert all(response.status == "completed" for response in told)
    assert output(told[0]) == output(told[1]) == output(told[2])
    assert told[0].usage == told[2].usage
    assert told[2].usage is not None
    assert told[2].usage.total_tokens > 0


def test_chat_completions_and_responses_share_cached_answers(client: OpenAI) -> None:
    """Whichever asked first: instructions are a system message, one text part is its text, the length is the length."""
    asked = question()
    chat: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]
    items: Any = [{"role": "user", "content": [{"type": "input_text", "text": asked}]}]
    recorded = client.chat.completions.create(model="mock", messages=chat, max_completion_tokens=500)
    raw = client.responses.with_raw_response.create(
        model="mock", input=items, instructions="Be brief.", max_output_tokens=500, metadata={"a": "b"}
    )
    assert raw.headers["x-sameway-cache"] == "exact"
    response = raw.parse()
    assert response.output_text == recorded.choices[0].message.content
    assert (response.instructions, response.max_output_tokens, response.metadata) == ("Be brief.", 500, {"a": "b"})


def test_a_tool_loop_goes_on_from_what_was_answered(client: OpenAI, upstream: Upstream) -> None:
    """A response's own items are taken as input again: calls become one message, each result a tool's."""
    items: Any = [{"role": "user", "content": question()}]
    tools: Any = [WEATHER, {**WEATHER, "name": "time"}]
    called = client.responses.create(model="mock", input=items, tools=tools, store=False)
    calls: list[Any] = called.output
    assert [call.name for call in calls] == ["weather", "time"]
    items += [call.to_dict() for call in calls]
    items += [{"type": "function_call_output", "call_id": call.call_id, "output": "sunny"} for call in calls]
    assert "sunny" in client.responses.create(model="mock", input=items, tools=tools).output_text
    messages = upstream.seen().requests[-1]["body"]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call.call_id for call in calls]
    named = client.responses.create(
        model="mock", input=question(), tools=tools, tool_choice={"type": "function", "name": "time"}
    )
    assert named.status == "completed"
    assert upstream.seen().requests[-1]["body"]["tool_choice"] == {"type": "function", "function": {"name": "time"}}


def test_structured_output_is_parsed(client: OpenAI, upstream: Upstream) -> None:
    """`text_format` reaches the deployment as a JSON schema, and what it answers comes back as an object."""
    asked = question()
    upstream.labels({asked: '{"name": "Bergen"}'})
    parsed = client.responses.parse(model="mock", input=asked, text_format=City, reasoning={"effort": "low"})
    assert parsed.output_parsed == City(name="Bergen")
    body = upstream.seen().requests[-1]["body"]
    assert body["response_format"]["json_schema"]["name"] == "City"
    assert body["reasoning_effort"] == "low"


def test_what_ended_early_is_incomplete_and_what_broke_is_an_error(client: OpenAI) -> None:
    """`length` is no completion, and a stream that breaks ends in an error event, which the SDK raises."""
    assert client.responses.create(model="long", input=question()).incomplete_details.reason == "max_output_tokens"  # type: ignore[union-attr]
    *_, last = client.responses.create(model="long", input=question(), stream=True)
    assert last.type == "response.incomplete"
    with pytest.raises(openai.APIError):
        list(client.responses.create(model="cut-responses", input=question(), stream=True))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": 1}, "conversation"),
        ({"metadata": "x"}, "metadata"),
        ({"metadata": {"a": 1}}, "metadata[...]"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [5]}}, "tool_choice.tools[0]"),
        ({"tool_choice": {"type": "allowed_tools", "tools": 5}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "allowed_tools", "tools": {"a": 1}}}, "tool_choice.tools"),
        ({"background": True, "store": False}, "background"),
        ({"truncation": "middle"}, "truncation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "custom"}]}, "tools[0].name"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": [{"type": "web_search_call", "id": "ws_1", "status": "completed"}]}, "input[0].type"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"input": []}, "input"),
        ({"input": [{}] * 20_001}, "input"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
    ],
)
def test_what_is_not_supported_or_wrong_is_refused_by_name(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    """Never left out: an answer without what was asked for would look like one with it."""
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "mock", "input": "x", **fields})
    assert refused.value.param == param


def test_a_stored_response_is_continued_read_and_deleted(client: OpenAI, upstream: Upstream) -> None:
    """At once after the last byte of a stream or a whole answer; the deployment gets the whole history."""
    asked = question()
    with client.responses.stream(model="mock", input=asked) as stream:
        first = stream.get_final_response()
    second = client.responses.create(model="mock", input="And?", previous_response_id=first.id)
    sent = upstream.seen().requests[-1]["body"]["messages"]
    assert [one["content"] for one in sent] == [asked, first.output_text, "And?"]
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    assert [item.type for item in client.responses.input_items.list(second.id)] == ["message"]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.create(model="mock", input="And?", previous_response_id=second.id)


def test_a_response_is_recorded_as_one(gateway: Gateway, client: OpenAI) -> None:
    """Its log line names the route, with the tokens and the cost that a chat completion would have."""
    raw = client.responses.with_raw_response.create(model="mock", input=question())
    request_id = raw.headers["x-request-id"]
    wait_for(lambda: any(r["request_id"] == request_id for r in gateway.records()))
    record = next(r for r in gateway.records() if r["request_id"] == request_id)
    assert (record["route"], record["cache"], record["status"]) == ("responses", "miss", 200)
    assert raw.parse().id == request_id.replace("req_", "resp_")
