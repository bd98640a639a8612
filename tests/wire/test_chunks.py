"""Wholes and chunks are two shapes of one answer: each direction loses nothing."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from gateway.wire.chunks import DeltaTemplate, FinishTracker, decoded, mended, parse, read, to_chunk, unfold
from gateway.wire.fold import fold, text_bytes
from gateway.wire.reader import PieceReader
from gateway.wire.types import Chunk
from policies import Usage

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=120)
anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
unknown = st.dictionaries(
    st.sampled_from(["x_one", "x_two", "provider_specific_fields", "citations"]), anything, max_size=2
)


@st.composite
def messages(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(st.none() | text), **draw(unknown)}
    for key, values in {
        "refusal": st.none() | text,
        "reasoning_content": st.none() | text,
        "annotations": st.just([]) | st.just([{"type": "url_citation", "url_citation": {"title": "t"}}]),
        "function_call": st.none() | st.just({"name": "f", "arguments": "{}"}),
        "audio": st.none() | st.just({"id": "a", "data": "UklG", "transcript": "hm", "expires_at": 3}),
        "tool_calls": st.none()
        | st.lists(
            st.builds(
                lambda id, name, arguments, more: {
                    "id": id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                    **more,
                },
                text, text, text, unknown,
            ),
            max_size=3,
        ),
    }.items():  # fmt: skip
        if draw(st.booleans()):
            message[key] = draw(values)
    return message


@st.composite
def choices(draw: st.DrawFn, index: int) -> dict[str, Any]:
    message = draw(messages())
    choice: dict[str, Any] = {
        "index": index,
        "message": message,
        "finish_reason": draw(st.sampled_from(["stop", "length", "tool_calls", None])),
        **draw(unknown),
        **draw(st.just({}) | st.fixed_dictionaries({"text": text})),
    }
    kind = draw(st.sampled_from(["absent", "null", "spelled", "other"]))
    if kind == "null":
        choice["logprobs"] = None
    elif kind == "spelled":
        tokens = re.findall(r"\s?\S+|\s", message["content"] or "")
        choice["logprobs"] = {"content": [token(t) for t in tokens], "refusal": None}
    elif kind == "other":
        choice["logprobs"] = {
            "content": draw(st.none() | st.just([token("�")])),
            "refusal": draw(st.none() | st.just([token("no")])),
        }
    return choice


def token(spelled: str) -> dict[str, Any]:
    return {"token": spelled, "logprob": -0.5, "bytes": list(spelled.encode()), "top_logprobs": []}


@st.composite
def wholes(draw: st.DrawFn) -> dict[str, Any]:
    whole: dict[str, Any] = {
        "id": draw(text), "object": "chat.completion", "created": draw(st.integers(0, 2**40)), "model": draw(text),
        "choices": [draw(choices(index)) for index in range(draw(st.integers(1, 3)))], **draw(unknown),
    }  # fmt: skip
    if draw(st.booleans()):
        whole["system_fingerprint"] = draw(st.none() | text)
    if draw(st.booleans()):
        details = {"cached_tokens": draw(st.integers(0, 9))}
        whole["usage"] = draw(
            st.none()
            | st.just(
                {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12, "prompt_tokens_details": details}
            )
        )
    return whole


@st.composite
def texts(draw: st.DrawFn) -> dict[str, Any]:
    """A whole completion."""
    choices = []
    for index in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.sampled_from(["a", " word", "é", "日本", "\n", '"}']), max_size=3))
        told = {
            "tokens": tokens,
            "token_logprobs": [None, *[-0.5] * len(tokens)][: len(tokens)],
            "top_logprobs": [None, *[{one: -0.5} for one in tokens[1:]]][: len(tokens)],
            "text_offset": [len("".join(tokens[:place])) for place in range(len(tokens))],
        }
        choice = {
            "index": index,
            "text": "".join(tokens),
            "finish_reason": draw(st.sampled_from(["stop", "length", None])),
        }
        choices.append({**choice, "logprobs": draw(st.none() | st.just(told)), **draw(unknown)})
    head = {"id": "c", "object": "text_completion", "created": 1, "model": "m", **draw(unknown)}
    usage = draw(st.sampled_from([{}, {"usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}}]))
    return {**head, "choices": choices, **usage}


@given(texts(), st.data())
def test_a_completion_comes_back_from_its_chunks(whole: dict[str, Any], data: st.DataObject) -> None:
    """The same of a completion, however its text and log probabilities are cut and its choices interleaved."""
    chunks = unfold(json.dumps(whole).encode())
    assert json.loads(fold(chunks)) == whole
    assert [read(chunk.data) for chunk in chunks] == chunks
    assert [reason for chunk in chunks for reason in chunk.finish_reasons] == [
        choice["finish_reason"] for choice in whole["choices"] if choice["finish_reason"]
    ]
    pieces = [json.loads(chunk.data) for chunk in chunks]
    cut: list[list[dict[str, Any]]] = []
    for piece in pieces:
        for choice in piece["choices"]:
            place, told = data.draw(st.integers(0, len(choice["text"]))), choice["logprobs"]
            at = data.draw(st.integers(0, len(told["tokens"]))) if told else 0
            begun = {"index": choice["index"], "text": choice["text"][:place], "finish_reason": None, "logprobs": None}
            rest = {**choice, "text": choice["text"][place:]}
            if told:
                begun["logprobs"] = {name: values[:at] for name, values in told.items()}
                rest["logprobs"] = {name: values[at:] for name, values in told.items()}
            cut.append([{**piece, "choices": [begun]}, {**piece, "choices": [rest]}])
    mixed = []
    while any(cut):
        mixed.append(data.draw(st.sampled_from([queue for queue in cut if queue])).pop(0))
    mixed += [piece for piece in pieces if not piece["choices"]]
    assert json.loads(fold([read(json.dumps(piece).encode()) for piece in mixed])) == whole


@given(wholes())
def test_a_whole_comes_back_from_its_chunks(whole: dict[str, Any]) -> None:
    """fold(unfold(x)) is x: text, tool calls, log probabilities, usage, unknown fields, and null where null was."""
    assert json.loads(fold(unfold(json.dumps(whole).encode()))) == whole


@given(wholes())
def test_chunks_know_what_they_carry(whole: dict[str, Any]) -> None:
    """What unfold says of each chunk is what a reader finds in its bytes, and the finishes are those of the whole."""
    data = json.dumps(whole).encode()
    chunks = unfold(data)
    assert [read(chunk.data) for chunk in chunks] == chunks
    assert [r for chunk in chunks for r in chunk.finish_reasons] == list(read(data, is_whole=True).finish_reasons)
    assert [chunk.usage for chunk in chunks if chunk.usage] == [u for u in (read(data).usage,) if u]


@given(wholes(), st.data())
def test_a_stream_cut_otherwise_folds_the_same(whole: dict[str, Any], data: st.DataObject) -> None:
    """Text and arguments may come in any pieces, choices interleaved: the whole is the same."""
    pieces: list[list[dict[str, Any]]] = []
    for chunk in unfold(json.dumps(whole).encode()):
        piece = json.loads(chunk.data)
        head = {key: value for key, value in piece.items() if key != "choices"}
        if not piece["choices"]:
            tail = piece
            continue
        choice = piece["choices"][0]
        while len(pieces) <= choice["index"]:
            pieces.append([])
        pieces[choice["index"]].append(head | {"choices": [choice]})
        for call in choice["delta"].get("tool_calls") or ():
            arguments = call["function"]["arguments"]
            cut = data.draw(st.integers(0, len(arguments)))
            call["function"]["arguments"] = arguments[:cut]
            more = {"index": call["index"], "function": {"arguments": arguments[cut:]}}
            pieces[choice["index"]].append(
                {"choices": [{"index": choice["index"], "delta": {"tool_calls": [more]}, "finish_reason": None}]}
            )
    mixed = []
    while any(pieces):
        mixed.append(data.draw(st.sampled_from([queue for queue in pieces if queue])).pop(0))
    if whole.get("usage") is not None:
        mixed.append(tail)
    folded = json.loads(fold([read(json.dumps(piece).encode()) for piece in mixed]))
    assert folded == whole


texts = st.sampled_from(["a", "b ", 'say "', "\\", "\n", "é😀", "", '","x":"'])
others: list[dict[str, Any]] = [
    {},
    {"role": "assistant", "content": ""},
    {"content": None},
    {"reasoning_content": "hm"},
    {"content": "a", "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    {"content": [{"type": "text", "text": "part"}]},
]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    """A chunk whose text is still to come."""
    choice: dict[str, Any] = {"index": draw(st.sampled_from([0, 0, 0, 1])), "delta": {}}
    if draw(st.booleans()):
        choice["logprobs"] = draw(st.sampled_from([None, {"content": [token("a")]}]))
    if draw(st.booleans()):
        choice["finish_reason"] = draw(st.sampled_from([None, None, "stop"]))
    shape: dict[str, Any] = {"id": "c", "created": 1, "choices": [choice] * draw(st.sampled_from([0, 1, 1, 1, 2]))}
    if draw(st.booleans()):
        shape["usage"] = draw(st.sampled_from([None, {"prompt_tokens": 1}, {"prompt_tokens": 2}]))
    return shape


@given(st.data())
def test_how_chunks_are_spelled_changes_nothing(data: st.DataObject) -> None:
    """Compact, spaced or escaped: chunks that repeat each other but for their text fold like chunks read one by one."""
    pieces = []
    for shape in data.draw(
        st.lists(shapes(), min_size=1, max_size=3).flatmap(lambda few: st.lists(st.sampled_from(few)))
    ):
        for text in data.draw(st.lists(texts, min_size=1, max_size=5)):
            delta = data.draw(st.sampled_from([{"content": text}] * 6 + others))
            pieces.append({**shape, "choices": [{**choice, "delta": delta} for choice in shape["choices"]]})
    check_spellings(pieces)


def check_spellings(pieces: list[dict[str, Any]]) -> None:
    expected = fold([read(json.dumps(piece).encode()) for piece in pieces])
    for is_escaped in (True, False):
        compact = [json.dumps(piece, separators=(",", ":"), ensure_ascii=is_escaped).encode() for piece in pieces]
        assert fold([read(spelled) for spelled in compact]) == expected


def test_what_repeats_with_a_text_counts_each_time() -> None:
    """Log probabilities beside equal texts, a second field in the delta, a field that changes between equal chunks."""

    def piece(delta: dict[str, Any], usage: int, **fields: Any) -> dict[str, Any]:
        return {"id": "c", "choices": [{"index": 0, "delta": delta, **fields}], "usage": {"prompt_tokens": usage}}

    check_spellings([piece({"content": "a"}, 1, logprobs={"content": [token("a")]})] * 3)
    check_spellings([piece({"content": "a", "reasoning_content": "b"}, 1)] * 3)
    check_spellings([piece({"content": "a"}, 1)] * 2 + [piece({}, 2)] + [piece({"content": "b"}, 1)] * 2)
    check_spellings([piece({"content": "a"}, 1)] * 2 + [piece({"content": "b"}, 2)] + [piece({"content": "c"}, 1)])


PIECE = b'{"id":"c","choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}'
TEXT_PIECE = b'{"id":"c","choices":[{"index":0,"text":"%b","finish_reason":null}]}'
INSIDES = st.one_of(
    text.filter(bool).map(lambda spoken: msgspec.json.encode(spoken)[1:-1]),
    st.sampled_from(
        [b"", b"\\", b'a","b', b'"', b"\\u00e9", b"\xff", b'x"},"finish_reason":"stop","y":{"z":"', b'\\","', b"\x01"]
    ),
    st.binary(max_size=6),
)


@given(
    st.sampled_from([PIECE, TEXT_PIECE]),
    st.lists(INSIDES, max_size=6),
    st.lists(st.sampled_from([b"[DONE]", b"{}", PIECE % b"a" + b" "]), max_size=2),
)
def test_a_run_takes_what_differs_in_its_text_alone(piece: bytes, insides: list[bytes], others: list[bytes]) -> None:
    """Whatever stands where the text was: what is taken is the same chunk with another text, and all of it at the front."""
    run = DeltaTemplate.of(piece % b"hello", "hello")
    assert run is not None
    payloads = [*(piece % inside for inside in insides), *others, piece % b"later"]
    texts = run.texts(payloads)
    for payload, spoken in zip(payloads, texts, strict=False):
        told = json.loads(payload)
        assert spoken
        choice = told["choices"][0]
        assert (choice.pop("text") if piece is TEXT_PIECE else choice.pop("delta")) in (spoken, {"content": spoken})
        assert told == {"id": "c", "choices": [{"index": 0, "finish_reason": None}]}
    if all(inside.isalnum() for inside in insides):
        assert len(texts) == (len(insides) if others else len(insides) + 1)


def test_text_is_cut_at_word_borders_and_the_sdk_reads_it() -> None:
    """A replayed whole looks like a stream: several pieces, cut after words, that the official client's types accept."""
    answer = "The quick brown fox jumps over the lazy dog, and then it sleeps for a very long time."
    message = {"role": "assistant", "content": answer, "refusal": None}
    whole = {
        "id": "c",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }
    chunks = [ChatCompletionChunk.model_validate_json(chunk.data) for chunk in unfold(json.dumps(whole).encode())]
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == answer
    assert len(texts) >= 3
    assert all(piece.endswith(" ") for piece in texts[:-1])
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None


def test_a_whole_chunk_passes_through_byte_for_byte() -> None:
    """A recorded whole is served as it came, white space and all."""
    data = b'{ "id" : "x", "choices": [ ] }'
    assert fold([Chunk(data, is_whole=True)]) == data


def stream(*deltas: dict[str, Any], **fields: Any) -> list[Chunk]:
    last = {"index": 0, "delta": {}, "finish_reason": "stop"}
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas] + [last]
    return [
        read(
            json.dumps(
                {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [c], **fields}
            ).encode()
        )
        for c in choices
    ]


def message_of(chunks: list[Chunk]) -> dict[str, Any]:
    found = ChatCompletion.model_validate_json(fold(chunks)).choices[0].message.model_dump(exclude_unset=True)
    return {key: value for key, value in found.items() if key != "role"}


def read_by(chunks: list[Chunk]) -> list[Chunk]:
    """The chunks that the reader makes of a server's."""
    reader = PieceReader()
    pieces = [piece for chunk in chunks for piece in reader.read(chunk.data)]
    return [to_chunk(*piece) for piece in [*pieces, *reader.rest()]]


def test_the_habits_of_servers_fold_well() -> None:
    """Repeated ids and names, calls without an index, empty heads, parts mixed with text, a `text` beside the delta: as seen."""
    call = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    repeated = {"index": 0, "id": "", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    whole_call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    assert message_of(
        read_by(stream({"role": "assistant", "content": None, "tool_calls": [call]}, {"tool_calls": [repeated]}))
    ) == {"content": None, "tool_calls": [whole_call]}
    second = {**whole_call, "id": "call_2"}
    assert message_of(read_by(stream({"tool_calls": [whole_call]}, {"tool_calls": [second]})))["tool_calls"] == [
        whole_call,
        second,
    ]
    parts = json.loads(fold(stream({"content": [{"type": "thinking", "thinking": "hm"}]}, {"content": "yes"})))
    assert parts["choices"][0]["message"]["content"] == [
        {"type": "thinking", "thinking": "hm"},
        {"type": "text", "text": "yes"},
    ]
    azure = Chunk(b'{"id":"","created":0,"model":"","object":"","choices":[],"prompt_filter_results":[1]}')
    folded = json.loads(fold([azure, *stream({"content": "a"}, obfuscation="xx")]))
    assert (folded["id"], folded["created"], folded["model"], folded["prompt_filter_results"]) == ("c", 1, "m", [1])
    assert "obfuscation" not in folded
    twice = [
        {"index": 0, "text": t, "delta": {"role": "assistant", "content": t}, "finish_reason": None}
        for t in ("", "a", " b")
    ]
    folded = json.loads(fold([read(msgspec.json.encode({"id": "c", "choices": [one]})) for one in twice]))
    assert folded["choices"][0]["message"]["content"] == "a b"
    assert folded["object"] == "chat.completion"
    assert json.loads(fold(unfold(msgspec.json.encode(folded)))) == folded


def test_a_long_stream_folds_in_linear_time() -> None:
    """A hundred thousand pieces are joined once, not copied again for each."""
    chunks = stream({"content": "x" * 50}) * 100_000
    assert len(message_of(chunks)["content"]) == 5_000_000


@pytest.mark.parametrize(
    ("fields", "usage"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}, Usage(5, 2, 4)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": None}, Usage(5, 2, 0)),
        ({"prompt_tokens": 5, "completion_tokens": 2, "prompt_cache_hit_tokens": 3}, Usage(5, 2, 3)),
        (
            {"prompt_tokens": 5, "completion_tokens": None, "prompt_tokens_details": {"cached_tokens": 9}},
            Usage(14, 0, 9),
        ),
    ],
)
def test_usage_is_read_under_its_names(fields: dict[str, Any], usage: Usage) -> None:
    """Cached tokens are found where OpenAI and DeepSeek put them; more than the prompt are counted beside it."""
    assert read(json.dumps({"choices": [], "usage": fields}).encode()) == Chunk(
        json.dumps({"choices": [], "usage": fields}).encode(), usage=usage, is_usage_only=True
    )


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"{",
        b"[]",
        b'{"choices": 3}',
        b'{"choices": [{"index": "a"}]}',
        b'{"choices": [{"delta": {"content": "\\ud800"}}]}',
        b"\xff",
        b'{"choices": [], "note": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_answer_is_refused(bad: bytes) -> None:
    """Whatever is wrong with the bytes, one kind of error says so."""
    with pytest.raises(msgspec.DecodeError):
        read(bad)


@pytest.mark.parametrize(
    "cut", [b'{"choices": [{"delta": {"content": "' + b'\\"a' * 100_000, b'{"n": ' + b"1" * 300_000, b"[" * 100_000]
)
def test_what_is_cut_is_refused_at_once(cut: bytes) -> None:
    """Quotes, digits and brackets without an end are looked at once, not once for each place where one may begin."""
    for reader in (mended, decoded):
        with pytest.raises(msgspec.DecodeError):
            reader(cut)


@pytest.mark.parametrize("note", [b'"\xff"', b"1e999", b"[" * 100_000 + b"]" * 100_000])
def test_what_cannot_be_read_in_full_is_one_kind_of_error(note: bytes) -> None:
    """Neither a whole of chunks nor chunks of a whole are made of what holds such a thing, wherever it stands."""
    with pytest.raises(msgspec.DecodeError):
        fold([Chunk(b'{"choices": [], "note": %b}' % note)])
    with pytest.raises(msgspec.DecodeError):
        unfold(b'{"choices": [], "note": %b}' % note)


def test_an_ending_needs_every_choice() -> None:
    """Two choices asked for, one finished and the other begun or not even begun: no end."""

    def piece(index: int, reason: str | None) -> bytes:
        return json.dumps({"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}).encode()

    ending = FinishTracker(2)
    assert not ending.is_finished
    ending.add(parse(piece(0, "stop")))
    assert (ending.is_finished, ending.is_complete) == (True, False)
    ending.add(parse(piece(1, None)))
    assert (ending.is_finished, ending.is_complete) == (False, False)
    ending.add(parse(piece(1, "length")))
    assert (ending.is_finished, ending.is_complete) == (True, True)


@pytest.mark.parametrize(
    "delta",
    [{"tool_calls": "x"}, {"tool_calls": {"a": 1}}, {"tool_calls": [None]}, {"tool_calls": [{"index": "0"}]}],
)
def test_what_could_not_be_folded_is_not_taken(delta: dict[str, Any]) -> None:
    """Tool calls that are no list of objects are no answer: nothing of them reaches a client or a cache."""
    for key in ("delta", "message"):
        with pytest.raises(msgspec.DecodeError):
            read(msgspec.json.encode({"id": "c", "choices": [{"index": 0, key: delta}]}))


def test_a_chunk_may_carry_a_message_beside_a_null_delta() -> None:
    """Seen of servers that send their whole as a single event."""
    piece = {"index": 0, "delta": None, "message": {"content": "hi"}, "finish_reason": "stop"}
    (choice,) = msgspec.json.decode(fold([read(msgspec.json.encode({"id": "c", "choices": [piece]}))]))["choices"]
    assert choice["message"]["content"] == "hi"


@pytest.mark.parametrize("claimed", [2**31, 2**53, 2**63, 10**30])
def test_absurd_usage_stays_a_number_that_everything_can_add(claimed: int) -> None:
    """What a server claims goes into Redis' integers, SQL's and Lua's: it is bounded where it is read."""
    usage = {"prompt_tokens": claimed, "completion_tokens": claimed, "prompt_cache_hit_tokens": claimed}
    found = read(msgspec.json.encode({"choices": [], "usage": {}}).replace(b"{}", json.dumps(usage).encode())).usage
    assert found is not None
    assert max(found.prompt_tokens, found.completion_tokens, found.cached_tokens) <= 1_000_000_000


def test_the_text_of_a_long_answer_is_judged_by_its_beginning() -> None:
    """Its length without a server's count holds the worker up no longer than 256 KiB do: what follows is not read."""
    alike = [b'{"choices":[{"index":0,"delta":{"content":"four"}}]}'] * 8_000
    read_of, unread = [Chunk(data) for data in alike], [Chunk(b"x" * len(alike[0]))] * 8_000
    assert text_bytes(read_of[:1_000]) == 4_000
    assert text_bytes(read_of) == 32_000
    assert text_bytes(read_of + unread) == 64_000
