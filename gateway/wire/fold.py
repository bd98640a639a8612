"""Folds a stream of `chat.completion.chunk`s into a `chat.completion`, and likewise text
completions.

Shapes: OpenAI API reference, "The chat completion chunk object" and "The completion object";
unknown fields are kept. Knows no HTTP, no cache and no backend. Invariant: `fold(unfold(whole))` is
JSON-equal to `whole`, however the chunks are spelled.
"""

import re
from collections.abc import Sequence
from typing import Any

import msgspec

from gateway.wire.chunks import TEXT, UNREADABLE, DeltaTemplate, is_text
from gateway.wire.types import Chunk, each_of, size_of

_FIRST = frozenset({"id", "created", "model"})  # Azure's first chunk has these empty
# obfuscation pads chunks against eavesdroppers
_DROPPED = frozenset({"object", "choices", "obfuscation"})
# other text in a delta arrives in parts; these arrive whole, from some servers repeatedly
_IDENTITY = frozenset({"id", "type", "name", "role", "index"})

_READ_BYTES_MAX = 256 << 10  # of an answer without a count: a few milliseconds
# fields of a choice that a model does not write
_UNWRITTEN = frozenset({"finish_reason", "logprobs", "role", "type", "id", "audio"})


_DELTA = re.compile(rb'"delta":\s*"((?:[^"\\]|\\.)*+)"')


class _Text(list[str]):
    """A growing string, joined once at the end: a long answer must not take quadratic time."""


def fold(chunks: Sequence[Chunk]) -> bytes:
    """The `chat.completion` or `text_completion` of `chunks`; a whole chunk passes through
    unchanged.

    Joins text in deltas, joins tool calls by their `index`, appends lists, and keeps the last
    non-null value of other fields. A message always has `role` and `content`. Raises
    msgspec.DecodeError.
    """
    if chunks and chunks[0].is_whole:
        return chunks[0].data
    try:
        return _fold(each_of(chunks))
    except UNREADABLE as error:
        raise msgspec.DecodeError(str(error)) from None


def text_bytes(chunks: Sequence[Chunk]) -> int:
    """The UTF-8 bytes that a model wrote in `chunks`: text, reasoning, tool calls.

    Typed events count by their deltas; unreadable chunks count whole. A long answer is extrapolated
    from its beginning: reading all of it takes a second.
    """
    size_bytes, ends = 0, 0
    while ends < len(chunks) and size_bytes < _READ_BYTES_MAX:
        size_bytes += len(chunks[ends].data)
        ends += 1
    if ends < len(chunks):
        return text_bytes(chunks[:ends]) * size_of(chunks) // size_bytes
    try:
        answer = msgspec.json.decode(fold(chunks)) if chunks else {}
        return sum(_text_bytes(choice) for choice in answer.get("choices") or ())
    except (*UNREADABLE, AttributeError, TypeError):
        typed = _DELTA.findall(b"".join(chunk.data for chunk in chunks))
        return sum(map(len, typed)) or size_of(chunks)


def _text_bytes(part: Any) -> int:
    if isinstance(part, str):
        return len(part.encode("utf-8", "replace"))
    if isinstance(part, dict):
        return sum(_text_bytes(value) for key, value in part.items() if key not in _UNWRITTEN)
    return sum(map(_text_bytes, part)) if isinstance(part, list) else 0


def _fold(payloads: Sequence[bytes]) -> bytes:
    top: dict[str, Any] = {}
    kind = "chat.completion"
    choices: dict[int, dict[str, Any]] = {}
    runs = position = 0
    while position < len(payloads):
        piece: dict[str, Any] = msgspec.json.decode(payloads[position])
        for key, value in piece.items():
            if key in _FIRST:
                top[key] = top.get(key) or value
            elif key not in _DROPPED and (value is not None or key not in top):
                top[key] = value
        if piece.get("object") == TEXT:
            kind = TEXT
        for choice in piece.get("choices") or ():
            _fold_choice(choices, choice)
        position += 1
        if runs < DeltaTemplate.PER_ANSWER_MAX and len(piece.get("choices") or ()) == 1:
            (read,) = piece["choices"]
            choice = choices[read.get("index") or 0]
            key, said, text = "text", choice, read.get("text")
            if not is_text(read):
                key, said, text = "content", choice["message"], (read.get("delta") or {}).get("content")
            run = DeltaTemplate.of(payloads[position - 1], text) if isinstance(text, str) else None
            if run is not None:
                runs += 1
                position += _fold_run(run, payloads[position:], said, key)
    head = {key: top.pop(key) for key in ("id", "created", "model") if key in top}
    body = [_settled_choice(choices[index]) for index in sorted(choices)]
    return msgspec.json.encode({**head, "object": kind, "choices": body, **top})


def _fold_run(run: DeltaTemplate, payloads: Sequence[bytes], message: dict[str, Any], key: str) -> int:
    """Fold the chunks that match `run` into `said[key]` by their texts, at a fifth of the cost.

    Returns their number.
    """
    if not isinstance(message[key], str | _Text):
        return 0
    texts = run.texts(payloads)
    message[key] = _merged(message[key], "".join(texts), key)
    return len(texts)


def _fold_choice(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index") or 0
    if index not in choices:
        said = {"text": ""} if is_text(piece) else {"message": {"role": "assistant", "content": None}}
        choices[index] = {"index": index, **said}
    choice = choices[index]
    for key, value in piece.items():
        if key in ("delta", "message"):
            choice["message"] = _merged(choice["message"], value, key)
        elif key == "logprobs" or (key == "text" and "message" not in choice):
            choice[key] = _merged(choice.get(key), value, key)
        elif key != "index" and (value is not None or key not in choice):
            choice[key] = value


def _merged(old: Any, new: Any, key: str) -> Any:
    """`old` continued by `new`, as the value of `key`; may change `old`."""
    if new is None or old is None:
        return old if new is None else new
    if key in _IDENTITY:
        return old or new
    if isinstance(old, dict) and isinstance(new, dict):
        for name, value in new.items():
            old[name] = _merged(old[name], value, name) if name in old else value
        return old
    if isinstance(new, list) and isinstance(old, str | _Text):
        old = _as_parts(old)
    elif isinstance(old, list) and not isinstance(old, _Text) and isinstance(new, str):
        new = _as_parts(new)
    if isinstance(new, str) and isinstance(old, str | _Text):
        text = _Text([old]) if isinstance(old, str) else old
        text.append(new)
        return text
    if isinstance(old, list) and isinstance(new, list):
        if key == "tool_calls":
            known = {call.get("index"): call for call in old}
            for call in new:
                if (begun := known.get(call.get("index"))) is not None:
                    _merged(begun, call, "")
                else:
                    old.append(call)
        else:
            old.extend(new)
        return old
    return new


def _as_parts(text: str | _Text) -> list[dict[str, Any]]:
    """Text as a list of parts: Mistral's reasoning models mix both forms in one stream."""
    joined = "".join(text)
    return [{"type": "text", "text": joined}] if joined else []


def _settled_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with its texts joined, its tool calls in order and without the stream's `index`."""
    settled_choice: dict[str, Any] = _settled(choice)
    message = settled_choice.get("message")
    if message and message.get("tool_calls"):
        calls = sorted(message["tool_calls"], key=lambda call: call.get("index") or 0)
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return settled_choice


def _settled(value: Any) -> Any:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, list):
        return [_settled(item) for item in value]
    return {key: _settled(item) for key, item in value.items()} if isinstance(value, dict) else value
