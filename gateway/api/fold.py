"""Chunks -> whole: the `chat.completion` that a stream of `chat.completion.chunk`s tells.

Shapes: OpenAI API reference, "The chat completion chunk object"; fields that are not in there travel along. Knows no HTTP, no cache
and no backend. Invariant: `fold(unfold(whole))` is JSON-equal to `whole`, and how chunks are spelled changes nothing.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from gateway.backends.base import Chunk

_FIRST = frozenset({"id", "created", "model"})  # Azure opens with a chunk where these are empty
_DROPPED = frozenset({"object", "choices", "obfuscation"})  # obfuscation pads chunks against eavesdroppers
# Whatever else is text in a delta comes in parts; these come whole, and from some servers again and again.
_IDENTITY = frozenset({"id", "type", "name", "role", "index"})


_decode_text = msgspec.json.Decoder(str).decode
_RUNS_MAX = 4  # where every chunk is padded differently, none is looked for any more


class _Text(list[str]):
    """A string that is still growing: joined once at the end, so that a long answer costs no quadratic time."""


def fold(chunks: Iterable[Chunk]) -> bytes:
    """The `chat.completion` that `chunks` tell. A whole chunk is that already, and is passed through byte for byte.

    Text in deltas is joined, tool calls by their `index`, lists appended; of other fields the last value that is not
    null stays. A message always has `role` and `content`. Raises msgspec.DecodeError.
    """
    top: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    run: _Run | None = None
    runs = 0
    for chunk in chunks:
        if chunk.is_whole:
            return chunk.data
        if run is not None:
            if run.takes(chunk.data):
                continue
            run = None
        piece: dict[str, Any] = msgspec.json.decode(chunk.data)
        for key, value in piece.items():
            if key in _FIRST:
                top[key] = top.get(key) or value
            elif key not in _DROPPED and (value is not None or key not in top):
                top[key] = value
        for choice in piece.get("choices") or ():
            _fold_choice(choices, choice)
        if chunk.has_content and runs < _RUNS_MAX:
            run = _Run.begun(chunk.data, piece, choices)
            runs += run is not None
    head = {key: top.pop(key) for key in ("id", "created", "model") if key in top}
    body = [_settled_choice(choices[index]) for index in sorted(choices)]
    return msgspec.json.encode({**head, "object": "chat.completion", "choices": body, **top})


class _Run:
    """Chunks that differ in their one text alone, as most servers write them: folded by their bytes, at a fifth of the cost.

    To fold a chunk again changes nothing but its text, so a chunk with the same bytes around another text adds that text.
    """

    __slots__ = ("_after", "_before", "_texts")

    def __init__(self, before: bytes, after: bytes, texts: _Text) -> None:
        self._before = before
        self._after = after
        self._texts = texts

    @staticmethod
    def begun(data: bytes, piece: dict[str, Any], choices: dict[int, dict[str, Any]]) -> "_Run | None":
        """The run that `data`, decoded as `piece` and folded into `choices`, may have begun."""
        if len(piece.get("choices") or ()) != 1:
            return None
        choice = piece["choices"][0]
        text = (choice.get("delta") or {}).get("content")
        if not isinstance(text, str) or choice.get("logprobs") is not None:
            return None
        before, found, after = data.partition(b'"content":"%b"' % text.encode())
        if not found:  # spelled with escapes, or with spaces
            return None
        before, after = before + b'"content":"', b'"' + after
        try:
            probe = msgspec.json.decode(before + b"?" + after)
        except msgspec.DecodeError:
            return None
        if probe != {**piece, "choices": [{**choice, "delta": {"content": "?"}}]}:
            return None
        message = choices[choice.get("index") or 0]["message"]
        if isinstance(message["content"], str):
            message["content"] = _Text([message["content"]])
        return _Run(before, after, message["content"]) if isinstance(message["content"], _Text) else None

    def takes(self, data: bytes) -> bool:
        """Whether `data` goes on with the run; its text has been added then."""
        before, after = self._before, self._after
        if not (data.startswith(before) and data.endswith(after) and len(data) >= len(before) + len(after)):
            return False
        try:
            self._texts.append(_decode_text(b'"%b"' % data[len(before) : -len(after)]))
        except msgspec.DecodeError:  # more than one string: another shape altogether
            return False
        return True


def _fold_choice(choices: dict[int, dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index") or 0
    choice = choices.setdefault(index, {"index": index, "message": {"role": "assistant", "content": None}})
    for key, value in piece.items():
        if key in ("delta", "message"):
            choice["message"] = _merged(choice["message"], value, key)
        elif key == "logprobs":
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
            for call in new:
                _merge_call(old, call)
        else:
            old.extend(new)
        return old
    return new


def _as_parts(text: str | _Text) -> list[dict[str, Any]]:
    """Text where a list of parts is wanted: Mistral's reasoning models send both in one stream."""
    joined = "".join(text)
    return [{"type": "text", "text": joined}] if joined else []


def _merge_call(calls: list[Any], new: dict[str, Any]) -> None:
    """Continue the call of the same index; without an index, the last call, unless another id begins one."""
    index = new.get("index")
    for call in calls:
        if index is not None and call.get("index") == index:
            _merged(call, new, "")
            return
    if index is None and calls and new.get("id") in (None, "", calls[-1].get("id")):
        _merged(calls[-1], new, "")
    else:
        calls.append(new)


def _settled_choice(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice with its texts joined, and its tool calls in order and without the stream's `index`."""
    settled: dict[str, Any] = _settled(choice)
    message = settled["message"]
    if message.get("tool_calls"):
        calls = sorted(message["tool_calls"], key=lambda call: call.get("index") or 0)
        message["tool_calls"] = [{key: value for key, value in call.items() if key != "index"} for call in calls]
    return settled


def _settled(value: Any) -> Any:
    if isinstance(value, _Text):
        return "".join(value)
    if isinstance(value, list):
        return [_settled(item) for item in value]
    return {key: _settled(item) for key, item in value.items()} if isinstance(value, dict) else value
