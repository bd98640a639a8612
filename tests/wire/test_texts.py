"""The one walk over a body: whatever is not known to be a name or encoded bytes is seen, and replaced, as a text."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.wire.errors import BadRequest
from gateway.wire.texts import swapped, texts_in

_IMAGE = "data:image/png;base64," + "QUJD" * 40
SEEN: list[Any] = [
    {"a_field_of_next_year": {"deep": [{"x": "a word"}]}},
    {"role": "a word"},
    {"type": "a word", "text": "hi"},
    {"messages": [{"name": "a word"}]},
    {"stop": ["a word"]},
    {"user": "a word", "metadata": {"case": "a word"}},
    {"tools": [{"function": {"description": "a word"}}]},
    {"parameters": {"properties": {"a word": {"type": "string"}}, "required": ["a word"]}},
    {"parameters": {"properties": {"to": {"enum": ["a word"], "default": {"id": "a word"}}}}},
    {"content": [{"type": "tool_use", "input": {"type": "a word", "id": ["a word"]}}]},
    {"content": [{"type": "tool_result", "content": [{"type": "document", "source": {"data": "a word"}}]}]},
    {"content": [{"type": "file", "file": {"filename": "a word", "file_data": "a word"}}]},
    {"content": [{"type": "image_url", "image_url": {"url": "https://a.example/?q=a word"}}]},
    {"output": {"name": "a word", "url": "a word"}},
    {"arguments": '{"a word": {"url": "a\\u0020word"}}'},
    {"arguments": '{"to": "a word", "to": "b"}'},
    {"arguments": '{"to": "a word'},
    {"arguments": '["a\\u0020word"]'},
    {"a word": 1},
    {"logprobs": [{"token": "a word"}]},
]


@pytest.mark.parametrize("body", SEEN)
def test_a_text_is_seen_and_replaced_wherever_it_stands(body: Any) -> None:
    """In an unknown field, a name, a key, a schema, a call, a nested result, a file or an address; nothing of it is left."""
    seen = [text for text in texts_in(body) if "a word" in text]
    assert seen
    assert "word" not in json.dumps(swapped(body, {text: text.replace("a word", "[M]") for text in seen}))


@pytest.mark.parametrize(
    "body",
    [
        {"model": "gpt-4o", "role": "user", "type": "text", "tool_choice": "auto", "call_id": "call_1", "ttl": "5m"},
        {"object": "chat.completion", "choices": [{"finish_reason": "stop", "index": 0}], "created": 1_700_000_000},
        {"content": [{"type": "image_url", "image_url": {"url": _IMAGE, "detail": "high"}}]},
        {"type": "computer_call_output", "output": {"image_url": _IMAGE + "QUJD" * 1200}},
        {"logit_bias": {"50256": -100}, "temperature": 0.5, "additionalProperties": False, "input": [[15496, 995]]},
    ],
)
def test_what_is_no_text_is_not_seen(body: Any) -> None:
    """Settings, ids, roles, encoded bytes and token ids are for the provider alone."""
    assert set(texts_in(body)) <= {"image_url"}  # in a tool's output each name is a text


def test_numbers_of_a_call_are_texts() -> None:
    """A card's number in a call's arguments is seen and replaced as a text would be; a count elsewhere is none."""
    body = {"arguments": '{"card": 4111111111111111, "n": 3}', "seed": 4111111111111111}
    assert list(texts_in(body)) == ["card", "4111111111111111", "n"]
    replaced = swapped(body, {"4111111111111111": "[M]"})
    assert (json.loads(replaced["arguments"]), replaced["seed"]) == ({"card": "[M]", "n": 3}, 4111111111111111)


def test_a_body_that_is_too_deep_is_refused() -> None:
    """One that a walk cannot end is the client's error, in the body and in a call's arguments."""
    body: Any = "a word"
    for _ in range(5000):
        body = [body]
    with pytest.raises(BadRequest, match="too deeply"):
        texts_in(body)
    deep = '{"x": ' * 3000 + "1" + "}" * 3000
    assert list(texts_in({"arguments": deep})) == [deep]
