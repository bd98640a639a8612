"""Values found in texts, their placeholders, and answers with the values again, wherever they are cut."""

from __future__ import annotations

import json
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gateway.masking.answers import Restorer
from gateway.masking.finder import Finder
from gateway.masking.vault import Vault, masked_value
from gateway.settings import MaskSettings
from gateway.wire.chunks import read
from gateway.wire.fold import fold
from gateway.wire.types import Chunk

ALL = Finder(
    MaskSettings(
        regions=["DE"],
        ids=["es.dni", "de.idnr"],
        patterns={"ORDER": "ORD-[0-9]{8}", "QUOTED": "«[^»]*»"},
        lists={"CUSTOMER": ["Acme", "Müller GmbH"]},
    )
)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("mail alice@example.com, bob.o'neil+x@mail.example.co.uk", "mail <EMAIL_1>, <EMAIL_2>"),
        ("alice@example.com and alice@example.com", "<EMAIL_1> and <EMAIL_1>"),
        ("4111 1111 1111 1111 or 12 4111-1111-1111-1111", "<CARD_1> or 12 <CARD_2>"),
        ("4111 1111 1111 1112", "4111 1111 1111 1112"),
        ('{"to":"alice\\u0040example.com"} ?u=alice%40example.com&n=1', '{"to":"<EMAIL_1>"} ?u=<EMAIL_2>&n=1'),
        ("alice\u200b@exam\u00adple.com 4111\u200b1111\u200b1111\u200b1111", "<EMAIL_1> <CARD_1>"),
        ("of M\\u00fcller GmbH, 100%25 sure, \\ud83d\\ude00 %zz", "of <CUSTOMER_1>, 100%25 sure, \\ud83d\\ude00 %zz"),
        ("data: alice@example.com", "data: <EMAIL_1>"),
        ("DE89 3704 0044 0532 0130 00 and GB82WEST12345698765432 now", "<IBAN_1> and <IBAN_2> now"),
        ("GB82WEST12345698765433", "GB82WEST12345698765433"),
        ("call +49 30 901820 or 030 901820", "call <PHONE_1> or <PHONE_2>"),
        ("on 2024-01-05 12:30 for 1234567 EUR", "on 2024-01-05 12:30 for 1234567 EUR"),
        ("sk-proj-abcdefghij0123456789 sk-learn-contrib-library", "<KEY_1> sk-learn-contrib-library"),
        ("dni 12345678Z, not 12345678A; 36574261809", "dni <ID_1>, not 12345678A; <ID_2>"),
        (
            "ORD-12345678 for ACME and Müller GmbH, not Acmeist",
            "<ORDER_1> for <CUSTOMER_1> and <CUSTOMER_2>, not Acmeist",
        ),
        ("acme@example.com", "<EMAIL_1>"),
        ("«Acme, alice@example.com»", "<QUOTED_1>"),
        ("<EMAIL_1> &lt;CARD_2&gt; \\u003cKEY_3\\u003e", "<LITERAL_1> <LITERAL_2> <LITERAL_3>"),
        ('{"to":"x\\nalice@example.com"}', '{"to":"x\\n<EMAIL_1>"}'),
        ("٤١١١١١١١١١١١١١١١ ４１１１ １１１１ １１１１ １１１１", "<CARD_1> <CARD_2>"),
    ],
)
def test_what_can_be_proved_is_masked_and_comes_back(text: str, masked: str) -> None:
    """Checksums and formats tell a value from what looks like one, in digits of every script; every text comes back."""
    vault = Vault(ALL.spans)
    assert vault.masked(text) == masked
    assert vault.restored(masked) == text


@pytest.mark.parametrize("text", ["4111 " * 20_000, "1234567," * 12_000, "a@" * 50_000 + "<" * 50_000])
def test_a_hostile_text_takes_no_quadratic_time(text: str) -> None:
    """100 kB that are made of candidates take bounded work: beyond the checks of a request they are masked unproven."""
    began = time.process_time()
    vault = Vault(ALL.spans)
    assert vault.restored(vault.masked(text)) == text
    assert time.process_time() - began < 5  # far below what every window of it would take


MAIL, IMAGE = "alice@example.com", f"data:image/png;base64,{'Acme' * 20}/Acme/"


@pytest.mark.parametrize(
    ("body", "masked"),
    [
        ({"content": f"data: {MAIL}"}, {"content": "data: <EMAIL_1>"}),
        ({"source": {"data": "4111111111111111 " * 8}}, {"source": {"data": "<CARD_1> " * 8}}),
        ({"role": "user", "name": MAIL}, {"role": "user", "name": "EMAIL_1"}),
        ({"name": "get_Acme", "id": "call_1"}, {"name": "get_Acme", "id": "call_1"}),
        ({"properties": {MAIL: {}, "Acme": {}}}, {"properties": {"<EMAIL_1>": {}, "<CUSTOMER_1>": {}}}),
        ({"const": 4111111111111111, "default": {"id": MAIL}}, {"const": "<CARD_1>", "default": {"id": "<EMAIL_1>"}}),
        ({"arguments": '["alice\\u0040example.com"]'}, {"arguments": '["<EMAIL_1>"]'}),
        ({"logit_bias": {MAIL: 1}}, {"logit_bias": {"<EMAIL_1>": 1}}),
        ({"input": [{"role": "user", "content": "Acme"}]}, {"input": [{"role": "user", "content": "<CUSTOMER_1>"}]}),
        ({"url": IMAGE}, {"url": IMAGE}),
    ],
)
def test_values_are_masked_in_any_field(body: dict[str, Any], masked: dict[str, Any]) -> None:
    """A value in a field that names something, in a key or in a schema is masked; names that are identifiers stay."""
    assert masked_value(body, Vault(ALL.spans)) == masked


def test_the_arguments_of_a_call_stay_json() -> None:
    """In a call's arguments each text, number and key is masked by itself, and the rest keeps its bytes; names stay."""
    arguments = '{"to": ["a\\nalice@example.com"], "card": 4111111111111111, "bob@example.com": {"name": "Acme"}}'
    call = {"id": "call_1", "function": {"name": "Acme", "arguments": arguments}}
    masked = masked_value({"tool_calls": [call]}, Vault(ALL.spans))["tool_calls"][0]
    assert masked["function"]["name"] == "Acme"
    expected = {"to": ["a\n<EMAIL_2>"], "card": "<CARD_1>", "<EMAIL_1>": {"name": "<CUSTOMER_1>"}}
    assert json.loads(masked["function"]["arguments"]) == expected
    plain = {"tool_calls": [{"function": {"arguments": '{ "a":1 }'}}], "n": 4111111111111111, "model": "Acme"}
    assert masked_value(plain, Vault(ALL.spans)) == plain


def test_an_odd_placeholder_is_counted() -> None:
    """What a model changed and what no value stands for stay as they are, and each is counted."""
    vault = Vault(ALL.spans)
    vault.masked("alice@example.com and Acme")
    answer = "To Email 1, EMAIL_1, (customer_1) and <EMAIL_1>, &lt;EMAIL_1&gt;; <EMAIL_2> <CARD_1>"
    assert vault.odd(answer) == (3, 2)
    restored = vault.restored(answer)
    assert restored.count("alice@example.com") == 2
    assert restored.endswith("<EMAIL_2> <CARD_1>")


def test_a_pattern_that_cannot_be_used_is_refused() -> None:
    """A pattern RE2 cannot run in linear time, one of nothing, a kind that is taken and an unknown id stop the start."""
    wrong = {"BACK": r"(a)\1", "EMPTY": "a*", "EMAIL": "x", "low": "x"}
    with pytest.raises(ValidationError) as refused:
        MaskSettings(patterns=wrong, ids=["es.dni", "xx.none"])
    for part in ("patterns.BACK", "patterns.EMPTY", "'EMAIL'", "'low'", "'xx.none'"):
        assert part in str(refused.value)


# -- streams

VALUES = ("alice@example.com", '«say "hi"\\ to <CARD_1> &»', "4111 1111 1111 1111", "<EMAIL_1>")
_VAULT = Vault(ALL.spans)
MARKS = [_VAULT.masked(value) for value in VALUES]
TEXTS = st.lists(
    st.sampled_from(
        [
            *MARKS,
            "\\u003cEMAIL_1\\u003e",
            "&lt;EMAIL_1&gt;",
            "<EMAIL_9>",
            "<EMAIL_",
            "a < b & c",
            "<",
            "&lt;",
            "\\u00",
            "é",
            " x",
        ]
    ),
    max_size=6,
).map("".join)


def cut(text: str, places: list[int]) -> list[str]:
    edges = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[start:end] for start, end in pairwise(edges)]


def chat(delta: dict[str, Any], index: int = 0, reason: str | None = None) -> Chunk:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    choice = {"index": index, "delta": delta, "finish_reason": reason}
    return read(json.dumps({**head, "choices": [choice]}).encode())


@settings(max_examples=150, deadline=None)
@given(TEXTS, TEXTS, st.lists(st.integers(0, 200), max_size=30), st.lists(st.integers(0, 3), max_size=12))
def test_a_stream_is_restored_wherever_it_is_cut(
    text: str, arguments: str, places: list[int], batches: list[int]
) -> None:
    """Two choices, a content and a call's arguments, cut anywhere and read in any batches: the fold is the restored text."""
    quoted = json.dumps({"to": arguments}, ensure_ascii=False)
    chunks = [chat({"role": "assistant", "content": ""})]
    for part in cut(text, places):
        chunks += [chat({"content": part}), chat({"content": part}, 1)]
    chunks.append(
        chat({"tool_calls": [{"index": 0, "id": "t", "type": "function", "function": {"name": "f", "arguments": ""}}]})
    )
    chunks += [chat({"tool_calls": [{"index": 0, "function": {"arguments": part}}]}) for part in cut(quoted, places)]
    chunks += [chat({}, 0, "tool_calls"), chat({}, 1, "stop")]
    restorer, ready = Restorer(_VAULT), list[Chunk]()
    for size in [*batches, len(chunks)]:
        batch, chunks = chunks[:size], chunks[size:]
        ready += restorer.feed(batch)
    ready += restorer.rest()
    first, second = json.loads(fold(ready))["choices"]
    expected = _VAULT.restored(text)
    assert (first["message"]["content"] or "", second["message"]["content"] or "") == (expected, expected)
    assert first["message"]["tool_calls"][0]["function"]["arguments"] == _VAULT.restored(quoted, is_json=True)
    json.loads(first["message"]["tool_calls"][0]["function"]["arguments"])


def test_the_input_of_a_call_is_restored_under_any_name() -> None:
    """A whole message has a call's values again in fields that are names elsewhere, and in keys; the call's own name stays."""
    given = {"name": MARKS[0], "type": MARKS[2], "arguments": MARKS[1], MARKS[0]: [{"id": MARKS[0]}], "n": 1}
    call = {"type": "tool_use", "id": "toolu_1", "name": "<EMAIL_1>", "input": given}
    whole = Chunk(b"", native=json.dumps({"type": "message", "id": "msg_1", "content": [call]}).encode())
    (told,) = Restorer(_VAULT).all([whole])
    expected = {"name": VALUES[0], "type": VALUES[2], "arguments": VALUES[1], VALUES[0]: [{"id": VALUES[0]}], "n": 1}
    assert json.loads(told.native)["content"] == [{**call, "input": expected}]


@settings(max_examples=100, deadline=None)
@given(TEXTS, st.lists(st.integers(0, 200), max_size=30), st.integers(1, 40))
def test_events_of_other_apis_are_restored_wherever_they_are_cut(text: str, places: list[int], size: int) -> None:
    """Events of the Messages and of the Responses API, the latter as bytes in any pieces: their deltas join to the text."""
    parts = cut(text, places)
    deltas = [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": part}} for part in parts
    ]
    natives = [*deltas, {"type": "ping"}, {"type": "content_block_stop", "index": 0}, {"type": "message_stop"}]
    events = Restorer(_VAULT).all([Chunk(b"", native=json.dumps(one).encode()) for one in natives])
    told = [json.loads(one.native) for one in events]
    assert "".join(one["delta"]["text"] for one in told if "delta" in one) == _VAULT.restored(text)
    assert told[-1]["type"] == "message_stop"
    passed = [
        {"type": "response.output_text.delta", "item_id": "m", "sequence_number": n, "delta": part}
        for n, part in enumerate(parts)
    ]
    done = {"type": "response.output_text.done", "item_id": "m", "text": text}
    body = b"".join(
        b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in [*passed, done]
    )
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    restored = b"".join(
        one.data for one in Restorer(_VAULT).all([Chunk(one, media="text/event-stream") for one in pieces])
    )
    shown = [json.loads(event.partition(b"data: ")[2]) for event in restored.split(b"\n\n") if event]
    assert "".join(one["delta"] for one in shown[:-1]) == shown[-1]["text"] == _VAULT.restored(text)
    assert [one["sequence_number"] for one in shown[:-1]] == list(range(len(parts)))
