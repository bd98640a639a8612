"""The reader of what servers send: calls of tools, however they are spelled and cut; ends; texts; what says nothing."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire.chunks import read, to_chunk
from gateway.wire.fold import fold
from gateway.wire.reader import PieceReader, end_of, lack_of, said

NAMES = st.sampled_from(["get_weather", "get_time", "f"])
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "tz"]), st.sampled_from(["Rome", {"a": {}}, "}", 1]), min_size=1)


def piece(*entries: dict[str, Any], end: str | None = None) -> bytes:
    delta = {"tool_calls": list(entries)} if entries else {}
    return msgspec.json.encode({"choices": [{"index": 0, "delta": delta, "finish_reason": end}]})


def folded(payloads: list[bytes]) -> list[Any]:
    """The calls of the answer that a server sent so: their ids, names and arguments."""
    reader = PieceReader("k")
    pieces = [one for payload in [*payloads, piece(end="tool_calls")] for one in reader.read(payload)]
    message = json.loads(fold([to_chunk(*one) for one in [*pieces, *reader.rest()]]))["choices"][0]["message"]
    return [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]]


@st.composite
def spelled(draw: st.DrawFn) -> tuple[list[tuple[str, str]], list[bytes], bool]:
    """Calls, the pieces in which a server sends them, and whether each has an id."""
    calls = draw(st.lists(st.tuples(NAMES, ARGUMENTS.map(json.dumps)), min_size=1, max_size=3, unique=True))
    index, has_ids = draw(st.sampled_from(["own", "zero", "none", "null", "text"])), draw(st.booleans())
    repeats_id, repeats_name = draw(st.booleans()), draw(st.booleans())
    head = draw(st.sampled_from(["alone", "with arguments"]))
    entries = []
    for number, (name, text) in enumerate(calls):
        cuts = sorted(draw(st.lists(st.integers(1, len(text) - 1), max_size=3, unique=True)))
        parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        for at, part in enumerate(["", *parts] if head == "alone" else parts):
            entry: dict[str, Any] = {"function": {"arguments": part}}
            if index != "none":
                entry["index"] = {"own": number, "zero": 0, "null": None, "text": str(number)}[index]
            if has_ids and (at == 0 or repeats_id):
                entry["id"] = f"call_{number}"
            if at == 0 or repeats_name:
                entry["function"]["name"] = name
            entries.append(entry)
    return calls, [piece(entry) for entry in entries], has_ids


@given(spelled())
def test_calls_are_told_apart_however_they_are_spelled(case: Any) -> None:
    """Indexes, ids and names that are shared, repeated or absent, and arguments that are cut anywhere: the same calls."""
    calls, payloads, has_ids = case
    found = folded(payloads)
    assert [(name, text) for _, name, text in found] == calls
    assert len({id for id, _, _ in found}) == len(calls)
    if has_ids:
        assert [id for id, _, _ in found] == [f"call_{number}" for number in range(len(calls))]


@pytest.mark.parametrize(
    ("named", "calls"),
    [
        (["list", "get"], [("list", ""), ("get", "{}")]),
        (["list", "list_all"], [("list", ""), ("list_all", "{}")]),
        (["ge", "t"], [("get", "{}")]),
        (["list", "_all"], [("list_all", "{}")]),
    ],
)
def test_a_call_without_arguments_ends_where_another_tool_is_named(
    named: list[str], calls: list[tuple[str, str]]
) -> None:
    """At one index and without ids, where a name may also come in pieces: the request's tools tell."""
    tools = [{"type": "function", "function": {"name": name}} for name in ("list", "get", "list_all")]
    reader = PieceReader("k", tools)
    payloads = [piece({"index": 0, "function": {"name": name, "arguments": ""}}) for name in named]
    payloads += [piece({"index": 0, "function": {"arguments": "{}"}}), piece(end="tool_calls")]
    read = [to_chunk(*one) for payload in payloads for one in reader.read(payload)]
    message = json.loads(fold(read))["choices"][0]["message"]
    assert [(one["function"]["name"], one["function"]["arguments"]) for one in message["tool_calls"]] == calls
    assert len({one["id"] for one in message["tool_calls"]}) == len(calls)


@given(st.lists(st.tuples(NAMES, ARGUMENTS.map(json.dumps)), min_size=1, max_size=3))
def test_openais_own_spelling_passes_as_it_came(calls: list[tuple[str, str]]) -> None:
    """Not a byte of it changes, though a call's beginning waits for what follows."""
    payloads = []
    for number, (name, text) in enumerate(calls):
        head = {
            "index": number,
            "id": f"call_{number}",
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        parts = [{"index": number, "function": {"arguments": part}} for part in (text[:3], text[3:])]
        payloads += [piece(one) for one in (head, *parts)]
    payloads.append(piece(end="tool_calls"))
    reader = PieceReader()
    assert [one for payload in payloads for one, _ in reader.read(payload)] == payloads


def test_calls_without_end_are_refused() -> None:
    """A server that begins one call after another is no model's."""
    reader = PieceReader()
    for number in range(PieceReader.CALLS_MAX):
        reader.read(piece({"index": number, "id": f"c{number}", "function": {"name": "f", "arguments": "{}"}}))
    with pytest.raises(msgspec.DecodeError, match="calls of tools"):
        reader.read(piece({"index": 10**6, "id": "more", "function": {"name": "f", "arguments": "{}"}}))


def test_a_call_without_a_name_ends_with_its_answer() -> None:
    """What waited for the name leaves with the end, also where no end comes."""
    reader = PieceReader("k")
    assert reader.read(piece({"index": 0, "id": "a", "function": {"arguments": "{}"}})) == []
    assert len(reader.read(piece(end="tool_calls"))) == 2
    reader = PieceReader("k")
    assert reader.read(piece({"index": 0, "id": "a", "function": {"arguments": "{}"}})) == []
    assert len(reader.rest()) == 1
    assert reader.rest() == []


@pytest.mark.parametrize(
    ("end", "ours"), [("STOP", "stop"), ("stop", "stop"), ("Safety", "content_filter"), ("x", "x")]
)
def test_ends_have_openais_word(end: str, ours: str) -> None:
    """Known ends in any case; an unknown one keeps its name."""
    assert end_of(end) == ours


def test_texts_are_found_where_servers_put_them() -> None:
    """Reasoning that is told in two fields is told once, and parts of a content are thoughts or text."""
    part = {"reasoning": "a", "reasoning_details": [{"text": "a"}], "content": [{"type": "text", "text": "b"}]}
    assert list(said({**part, "refusal": "c"})) == [("thought", "a"), ("text", "b"), ("refusal", "c")]
    assert list(said({"content": [{"type": "thinking", "thinking": [{"text": "a"}]}, "b"]})) == [
        ("thought", "a"),
        ("text", "b"),
    ]


@pytest.mark.parametrize(
    ("deltas", "lack"),
    [
        ([{"content": "a"}, {}], ""),
        ([{"content": " "}, {"content": "\n"}], "blank"),
        ([{"content": ""}, {}], "empty"),
        ([{"reasoning": "a"}, {"content": " "}], "thoughts"),
        ([{"reasoning": "a"}, {"content": "a"}, {}], ""),
        ([{"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "{}"}}]}], ""),
        ([{"refusal": "No."}], ""),
    ],
)
def test_what_says_nothing_is_told_from_the_rest(deltas: list[Any], lack: str) -> None:
    """Streamed, or whole."""
    chunks = [read(msgspec.json.encode({"choices": [{"index": 0, "delta": delta}]})) for delta in deltas]
    assert lack_of(chunks) == lack_of([read(fold(chunks), is_whole=True)]) == lack
