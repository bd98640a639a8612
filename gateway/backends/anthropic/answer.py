"""Translates an answer of Anthropic's Messages API into chunks of a chat completion.

Shapes: Anthropic API reference, "Messages" and "Streaming Messages"; OpenAI API reference, "The
chat completion chunk object". `thinking_blocks` is litellm's field for signatures and redacted
thinking, which a client must send back unchanged; `content_blocks` and `citations` carry the blocks
for which a chat completion lacks a field. Knows no HTTP. Invariant: an unreadable event passes
unchanged or as invalid JSON, so that the stream reports it as broken.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from gateway.wire.chunks import UNREADABLE, decoded
from gateway.wire.messages import OWN_STOPS, MessageFold, events_of
from gateway.wire.reader import end_of
from gateway.wire.usage import from_anthropic

_DONE = b"[DONE]"
_WRONG = (*UNREADABLE, KeyError, TypeError, AttributeError)  # what reading an answer of another shape raises


class MessageReader:
    """Reads one answer, begun at `created` (unix seconds)."""

    def __init__(self, created: int) -> None:
        self._head: dict[str, Any] = {"object": "chat.completion.chunk", "created": created}
        self._usage: dict[str, Any] = {}
        self._kinds: dict[int, str] = {}  # of the blocks by their index
        self._calls: dict[int, int] = {}  # the numbers of calls by the index of their block
        self._others: dict[int, MessageFold] = {}  # blocks of other types, until they are whole
        self._rounds = 0  # at most as many as those blocks
        self._thought: list[str] = []  # of the block that is growing
        self._listed: dict[str, int] = {}  # the number of entries in each field that is a list

    def chunks(self, payloads: Iterable[bytes]) -> list[bytes]:
        """Translate the data of events into chunks."""
        return [chunk for payload in payloads for chunk in self._read(payload)]

    def whole(self, body: bytes) -> list[bytes]:
        """Translate a whole message into chunks; returns `body` alone if it holds no message."""
        try:
            message = decoded(body)
            if message["type"] != "message":
                return [body]
            return [chunk for event in events_of(message) for chunk in self._take(event)]
        except _WRONG:
            return [body]

    def _read(self, payload: bytes) -> Sequence[bytes]:
        if payload == _DONE:  # a server with OpenAI's end
            return [*self.end(), _DONE]
        try:
            event = decoded(payload)
            return [payload] if event["type"] == "error" else self._take(event)
        except _WRONG:
            return [b"not an event of this API: " + payload]

    def _take(self, event: dict[str, Any]) -> Sequence[bytes]:
        match event["type"]:
            case "message_start":
                message = event["message"]
                self._head |= {"id": message.get("id"), "model": message.get("model")}
                self._count(message.get("usage"))
                return [self._chunk({"role": "assistant", "content": ""})]
            case "content_block_start":
                return self._begin(event, event["index"], event["content_block"])
            case "content_block_delta":
                return self._grow(event, event["index"], event["delta"])
            case "content_block_stop":
                return self._end(event["index"])
            case "message_delta":
                self._count(event.get("usage"))
                return self._finish(event["delta"])
            case "message_stop":
                return [*self.end(), _DONE]
        return []  # a ping, or an event of a later version

    def end(self) -> list[bytes]:
        """The counted tokens, once; a server may end its stream without saying so."""
        usage, self._usage = self._usage, {}
        counted = {**self._head, "choices": [], "usage": from_anthropic(usage, self._rounds)}
        return [msgspec.json.encode(counted)] if usage else []

    def _count(self, usage: Any) -> None:
        """Take the latest counts; a usage that is not an object is ignored, and a zero after a count."""
        for name, value in usage.items() if isinstance(usage, dict) else ():
            self._usage[name] = value or self._usage.get(name, value)

    def _begin(self, event: dict[str, Any], index: int, block: dict[str, Any]) -> list[bytes]:
        kind = self._kinds[index] = block["type"]
        match kind:
            case "text":
                delta: dict[str, Any] = {"content": block["text"]} if block.get("text") else {}
                if self._kinds.get(index - 1) == "text":
                    delta["content_blocks"] = [self._numbered("content_blocks", {"type": "text"})]
                return [self._chunk(delta)] if delta else []
            case "thinking":
                self._thought = []
                return [self._think(block["thinking"])] if block.get("thinking") else []
            case "redacted_thinking":
                return [self._entry("thinking_blocks", block)]
            case "tool_use":
                number = self._calls[index] = len(self._calls)
                given = block.get("input")
                arguments = msgspec.json.encode(given).decode() if given else ""
                function = {"name": block.get("name"), "arguments": arguments}
                call = {"index": number, "id": block.get("id"), "type": "function", "function": function}
                return [self._chunk({"tool_calls": [call]})]
        self._others[index] = MessageFold()
        self._others[index].add(event)
        self._rounds += 1
        return []

    def _grow(self, event: dict[str, Any], index: int, delta: dict[str, Any]) -> list[bytes]:
        if index in self._others:
            self._others[index].add(event)
            return []
        match delta["type"]:
            case "text_delta":
                return [self._chunk({"content": delta["text"]})]
            case "thinking_delta":
                return [self._think(delta["thinking"])]
            case "signature_delta":
                signed = {"type": "thinking", "thinking": "".join(self._thought), "signature": delta["signature"]}
                return [self._entry("thinking_blocks", signed)]
            case "citations_delta":
                return [self._entry("citations", delta["citation"])]
            case "input_json_delta":
                return self._arguments(index, delta["partial_json"])
        return [self._entry("content_blocks", delta)]  # of a later version

    def _arguments(self, index: int, text: str) -> list[bytes]:
        call = {"index": self._calls[index], "function": {"arguments": text}}
        return [self._chunk({"tool_calls": [call]})] if text else []

    def _end(self, index: int) -> list[bytes]:
        other = self._others.pop(index, None)
        return [] if other is None else [self._entry("content_blocks", other.message()["content"][0])]

    def _think(self, text: str) -> bytes:
        self._thought.append(text)
        return self._chunk({"reasoning_content": text})

    def _entry(self, name: str, value: dict[str, Any]) -> bytes:
        """A chunk with one entry of a list."""
        return self._chunk({name: [self._numbered(name, value)]})

    def _numbered(self, name: str, value: dict[str, Any]) -> dict[str, Any]:
        """The entry of a list with the `index` by which OpenAI's clients join lists."""
        index = self._listed.get(name, 0)
        self._listed[name] = index + 1
        return {"index": index, **value}

    def _finish(self, delta: dict[str, Any]) -> list[bytes]:
        reason = delta.get("stop_reason")
        if reason is None:
            return []
        choice_fields: dict[str, Any] = {"native_finish_reason": reason} if reason in OWN_STOPS else {}
        if reason == "stop_sequence":
            choice_fields["stop_reason"] = delta.get("stop_sequence")  # as vLLM names it
        return [self._chunk({}, end_of(reason), **choice_fields)]

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": finish, **more}
        return msgspec.json.encode({**self._head, "choices": [choice]})
