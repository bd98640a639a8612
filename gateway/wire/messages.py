"""A message of Anthropic's Messages API, and the events of its stream: each is made of the other.

Shapes: Anthropic API reference, "Messages" and "Streaming Messages". Knows no HTTP, no cache and no
backend. Invariants: a field, a block or a delta of a later version is kept; a message is what
Anthropic's SDKs build of its events. Where they skip an unknown delta, its texts and lists extend
the block's field of that name, and its other values replace it, as every known delta does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gateway.wire.chunks import UNREADABLE, decoded

OWN_STOPS = frozenset({"pause_turn", "model_context_window_exceeded"})
"""The reasons of an end that a chat completion lacks."""
_AT_END = ("stop_reason", "stop_sequence", "stop_details", "container")  # fields of the last event's delta
# of a block by its type: the texts that grow, each in a delta of its own
_GROWN = {"text": ("text",), "thinking": ("thinking", "signature")}
# the field of a known delta that is its block's: the API refuses others, such as a stream's progress, in a history
_OF_BLOCKS = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}


class MessageFold:
    """The message of the events so far."""

    def __init__(self) -> None:
        self._fields: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._texts: dict[tuple[int, str], list[str]] = {}  # the pieces of each growing text, by block and field

    def add(self, event: Mapping[str, Any]) -> None:
        """Add one event. One of another type changes nothing."""
        match event.get("type"):
            case "message_start":
                self._fields = dict(event["message"])
                self._blocks = dict(enumerate(map(dict, self._fields.get("content") or ())))
            case "content_block_start":
                block = self._blocks[event["index"]] = dict(event["content_block"])
                if block["type"] == "fallback":  # another model goes on, as the SDKs show it
                    self._fields["model"] = block["to"]["model"]
            case "content_block_delta":
                self._grow(event["index"], event["delta"])
            case "message_delta":
                usage = {**(self._fields.get("usage") or {}), **_known(event.get("usage") or {})}
                delta = event["delta"]
                self._fields |= {name: delta[name] for name in _AT_END[:3] if name in delta}
                self._fields |= _known({**event, **delta, "type": "message", "usage": usage})
                self._fields.pop("delta")

    def _grow(self, index: int, delta: Mapping[str, Any]) -> None:
        block = self._blocks.get(index)
        if block is None:
            return
        for name, value in _known(delta).items():
            if name != _OF_BLOCKS.get(delta["type"], name):
                continue
            if name == "citation":
                name, value = "citations", [value]
            if name == "partial_json":
                self._texts.setdefault((index, "input"), []).append(value)
            elif isinstance(value, str) and name != "type":
                self._texts.setdefault((index, name), []).append(value)
            elif isinstance(value, list):
                block[name] = [*(block.get(name) or ()), *value]
            elif name != "type":
                block[name] = value

    def message(self) -> dict[str, Any]:
        """The message; call it once, after the last event."""
        for (index, name), pieces in self._texts.items():
            block, text = self._blocks[index], "".join(pieces)
            if name != "input":
                block[name] = (block.get(name) or "") + text
            elif text:
                block[name] = input_of(text)
        return {**self._fields, "content": [self._blocks[index] for index in sorted(self._blocks)]}


def _known(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def input_of(arguments: str) -> dict[str, Any]:
    """The input of a call. Arguments that are not an object go under the key `INVALID_JSON`.

    Source: Anthropic's guide, "Fine-grained tool streaming".
    """
    try:
        value = decoded(arguments.encode() or b"{}")
    except UNREADABLE:
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": arguments}


def events_of(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events that a stream of this message would have, one delta for each text or input."""
    yield {"type": "message_start", "message": {**message, "content": [], **dict.fromkeys(_AT_END[:2])}}
    for index, block in enumerate(message["content"]):
        opening, deltas = _opened(block)
        yield {"type": "content_block_start", "index": index, "content_block": opening}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    delta = {name: message[name] for name in _AT_END if name in message}
    beside = {name: message[name] for name in ("context_management",) if message.get(name)}
    yield {"type": "message_delta", "delta": delta, "usage": message.get("usage"), **beside}
    yield {"type": "message_stop"}


def _opened(block: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A block as it begins, and the deltas that follow; one of another type is whole from the start."""
    kind, opening, deltas = block["type"], dict(block), list[dict[str, Any]]()
    for name in _GROWN.get(kind, ()):
        if block.get(name):
            opening[name] = ""
            deltas.append({"type": f"{name}_delta", name: block[name]})
    if kind == "text" and block.get("citations"):
        opening["citations"] = []
        deltas += [{"type": "citations_delta", "citation": one} for one in block["citations"]]
    if isinstance(block.get("input"), dict):
        opening["input"] = {}
        text = msgspec.json.encode(block["input"]).decode()
        deltas.append({"type": "input_json_delta", "partial_json": text})
    if kind == "compaction":
        opening |= {"content": None, "encrypted_content": None}
        deltas.append({**block, "type": "compaction_delta"})
    return opening, deltas
