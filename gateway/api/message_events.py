"""Converts the chunks of a chat completion into a message of Anthropic's API, or its events; an
answer of that API is repeated as it came.

Shapes: Anthropic API reference, "Messages", "Streaming Messages" and "Errors". Knows no HTTP, no
cache and no backend. Invariants: the whole message equals the message that its events build; one
block is open at a time, and each is closed before the end.
"""

import re
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import msgspec

from cache import Entry
from gateway.api.chat import EventRenderer, event_of, framed
from gateway.journey.storing import chunks_of
from gateway.wire.carried import Carried
from gateway.wire.chunks import decoded, read
from gateway.wire.errors import ApiError
from gateway.wire.messages import OWN_STOPS, MessageFold, events_of
from gateway.wire.reader import said
from gateway.wire.types import TOLD, Chunk
from policies import Usage

_STOPS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_DATE = re.compile(r"-\d{8}$")  # of a version, such as claude-haiku-4-5-20251001
_STATUSES = {"upstream_overloaded": 529, "deployment_full": 529}  # by their codes, where no server gave a status
_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}


# what grows in a block, as it begins
_EMPTY: dict[str, Any] = {
    "tool_use": {"input": {}},
    "thinking": {"thinking": "", "signature": ""},
    "text": {"text": ""},
}

NoteIds = Callable[[set[str]], Awaitable[None]]
"""Notes the ids of a provider's objects as the team's."""


class MessageRenderer(EventRenderer):
    """The renderer of one message, which names the `model` that was asked for.

    Claude Code sends no thinking back of a message that names another model than it asks:
    github.com/musistudio/claude-code-router/issues/1629. An answer of Anthropic's API is told as it
    came, but for the names in `sent`, by which deployments were asked in place of `model`; the chunks that another deployment adds to it
    go on in its blocks, and `note_ids` gets the id of its container. `prompt_tokens` is an
    estimate, until the deployment counts them.
    """

    ping = event_of("ping", {"type": "ping"})

    def __init__(
        self,
        model: str,
        is_stream: bool,
        request_id: str,
        prompt_tokens: int = 0,
        note_ids: NoteIds | None = None,
        sent: Collection[str] = (),
    ) -> None:
        super().__init__(is_stream)
        self._note_ids, self.is_kept = note_ids, note_ids is not None
        self._container: dict[str, Any] | None = None
        self._model, self._sent = model, sent
        self._request_id = request_id
        self._key = request_id.removeprefix("req_")
        self._folded = MessageFold()
        self._carried = Carried()
        self._blocks: list[dict[str, Any]] = []  # each as it begins; one of another type is whole then
        self._parts: dict[int, list[str]] = {}  # texts and arguments that wait for the turn of their block
        self._calls: dict[int, int] = {}  # the positions of calls' blocks
        self._open: int | None = None  # the block that is growing on the wire; later ones wait for its end
        self._started = 0  # blocks that have begun on the wire
        self._is_begun = self._is_native_at_end = self._is_stopped = False
        self._stop: str | None = None
        self._stop_sequence: str | None = None
        self._is_refused = False
        self._usage = _usage(Usage(prompt_tokens, 0))

    async def keep(self) -> None:
        if self._note_ids is not None and self._container and isinstance(id := self._container.get("id"), str):
            await self._note_ids({id})

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        chunks = chunks if entry is None else chunks_of(entry)
        if (native := chunks[0].native) and (message := decoded(native))["type"] == "message":
            self._container = message.get("container")
            return msgspec.json.encode(message | {"model": self._model}) if self._is_renamed(message) else native
        self.events(chunks)
        self.end()
        return msgspec.json.encode(self._folded.message())

    def _is_renamed(self, message: dict[str, Any]) -> bool:
        """Whether it names the model of a deployment, or a dated version of it, which the client did not."""
        return self._model not in self._sent and _DATE.sub("", str(message.get("model"))) in self._sent

    def replay(self, entry: Entry) -> bytes:
        chunks = chunks_of(entry)
        counted = read(chunks[-1].data, chunks[-1].is_whole).usage if chunks[-1].data else None
        self._usage = self._usage if counted is None else _usage(counted)
        return self.events(chunks) + self.end()

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        """The next chunks of an answer, as events. Raises msgspec.DecodeError."""
        if not self._is_begun and (counted := next((c.usage for c in chunks if c.usage is not None), None)):
            self._usage = _usage(counted)
        framed_events = []
        for chunk in chunks:
            if chunk.native == TOLD:
                continue
            if chunk.native:
                event = decoded(chunk.native)
                for one in events_of(event) if event["type"] == "message" else ():
                    self._pass(one)
                if event["type"] != "message":
                    self._pass(event, chunk.native)
            elif not self._is_native_at_end:
                framed_events.append(super().events([chunk]))
        return b"".join((*framed_events, self._taken()))

    def end(self) -> bytes:
        if self._is_native_at_end:
            if not self._is_stopped:  # some servers leave it out
                self._tell("message_stop")
            return self._taken()
        self._close()
        for position in range(self._started, len(self._blocks)):
            self._start(position)
            if parts := self._parts.get(position):
                self._grow(position, "".join(parts))
            self._close()
        self._carry()
        self._close()
        delta = {"stop_reason": self._reason(), "stop_sequence": self._stop_sequence}
        self._tell("message_delta", delta=delta, usage=self._usage)
        self._tell("message_stop")
        return self._taken()

    def failed(self, error: ApiError) -> bytes:
        return event_of("error", {**error_fields_of(error), "request_id": self._request_id})

    def _tell(self, event: str, **fields: Any) -> None:
        self._add({"type": event, **fields})

    def _add(self, event: dict[str, Any], data: bytes = b"") -> None:
        """Add an event to the stream, as `data` if it came so, or to the whole message."""
        if self._is_stream:
            self._events.append(framed(event["type"], data or msgspec.json.encode(event)))
        else:
            self._folded.add(event)

    def _pass(self, event: dict[str, Any], data: bytes = b"") -> None:
        """Tell an event of Anthropic's API as it came, and note what another deployment would go on with."""
        match event["type"]:
            case "message_start":
                self._is_begun = True
                if self._is_renamed(event["message"]):
                    event, data = event | {"message": event["message"] | {"model": self._model}}, b""
            case "content_block_start":
                kind = event["content_block"]["type"]
                self._blocks.append({"type": kind if kind in ("text", "thinking") else "closed"})
                self._open, self._started = event["index"], len(self._blocks)
            case "content_block_stop" if self._open is not None:
                self._open, self._blocks[-1] = None, {"type": "closed"}
            case "message_delta":
                self._container = event["delta"].get("container")
                self._is_native_at_end = event["delta"].get("stop_reason") is not None
            case "message_stop":
                self._is_native_at_end = self._is_stopped = True
        self._add(event, data)

    # --- one chunk

    def _take(self, payload: bytes) -> None:
        """Add one chunk, which the backend's reader has checked."""
        piece: dict[str, Any] = msgspec.json.decode(payload)
        if not self._is_begun:
            self._is_begun = True
            head: dict[str, Any] = {
                "id": f"msg_{self._key}",
                "type": "message",
                "role": "assistant",
                "model": self._model,
            }
            empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self._usage}
            self._tell("message_start", message=head | empty)
        if piece.get("usage"):
            self._usage = _usage(read(payload).usage or Usage(0, 0))
        for choice in piece.get("choices") or ():
            delta = choice.get("delta") or {}
            texts = list(said(delta))
            self._carried.add(delta)
            self._say("thinking", "".join(text for kind, text in texts if kind == "thought"))
            self._say("text", "".join(text for kind, text in texts if kind != "thought"))
            self._is_refused = self._is_refused or any(kind == "refusal" for kind, _ in texts)
            for call in delta.get("tool_calls") or ():
                self._call(call)
            if (finish := choice.get("finish_reason")) is not None:
                native = choice.get("native_finish_reason")
                self._stop = native if native in OWN_STOPS else _STOPS.get(finish, finish)
                matched = choice.get("stop_reason")  # vLLM's and SGLang's: the string that ended it
                if finish == "stop" and isinstance(matched, str):
                    self._stop, self._stop_sequence = "stop_sequence", matched

    def _say(self, kind: str, text: str) -> None:
        if not text:
            return
        if not self._blocks or self._blocks[-1]["type"] != kind:
            self._begin({"type": kind})
        self._grow(len(self._blocks) - 1, text)

    def _call(self, call: dict[str, Any]) -> None:
        """Begin a call, or extend its arguments."""
        index, function = call["index"], call.get("function") or {}
        if index not in self._calls:
            self._carried.add_call(call["id"], call)
            self._begin({"type": "tool_use", "id": call["id"], "name": function.get("name") or ""})
            self._calls[index] = len(self._blocks) - 1
        else:
            self._carried.add_call(self._blocks[self._calls[index]]["id"], call)
        if arguments := function.get("arguments"):
            self._grow(self._calls[index], arguments)

    # --- blocks

    def _begin(self, fields: dict[str, Any]) -> None:
        """Add a block. It starts on the wire unless a call is open: calls may grow side by side."""
        is_waiting = self._open is not None and self._blocks[self._open]["type"] == "tool_use"
        if not is_waiting:
            self._close()
        if fields["type"] != "thinking":
            self._carry()
        self._blocks.append(fields | _EMPTY.get(fields["type"], {}))
        if not is_waiting:
            self._close()
            self._start(len(self._blocks) - 1)

    def _carry(self) -> None:
        """Begin a block for what the next turn needs, and no thinking before carries."""
        if self._carried.is_pending:
            self._begin({"type": "redacted_thinking", "data": self._carried.sealed()})

    def _start(self, position: int) -> None:
        self._open, self._started = position, position + 1
        self._tell("content_block_start", index=position, content_block=self._blocks[position])

    def _grow(self, position: int, text: str) -> None:
        if position != self._open:
            self._parts.setdefault(position, []).append(text)
            return
        kind = self._blocks[position]["type"]
        grown = {"type": f"{kind}_delta", kind: text}
        delta = {"type": "input_json_delta", "partial_json": text} if kind == "tool_use" else grown
        self._tell("content_block_delta", index=position, delta=delta)

    def _close(self) -> None:
        if self._open is None:
            return
        if self._blocks[self._open]["type"] == "thinking":
            delta = {"type": "signature_delta", "signature": self._carried.sealed()}
            self._tell("content_block_delta", index=self._open, delta=delta)
        self._tell("content_block_stop", index=self._open)
        self._open = None

    # --- the message

    def _reason(self) -> str:
        if self._is_refused:
            return "refusal"
        return "tool_use" if self._calls and self._stop in (None, "end_turn") else self._stop or "end_turn"


def _usage(usage: Usage) -> dict[str, Any]:
    """The usage in Anthropic's shape, which counts a prompt's cached tokens apart from its other
    tokens.
    """
    written = usage.cache_write_tokens + usage.cache_write_1h_tokens
    lives = (usage.cache_write_tokens, usage.cache_write_1h_tokens)
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens - written),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation": dict(zip(("ephemeral_5m_input_tokens", "ephemeral_1h_input_tokens"), lives, strict=True)),
        "output_tokens": usage.completion_tokens,
    }


def status_of(error: ApiError) -> int:
    """The status of an error for a client of Anthropic's API, which knows more of them: a deployment's server's own,
    where the same request may succeed later.
    """
    cause = error.cause or 0
    if error.http_status < 500 and error.http_status != 429:
        return error.http_status
    is_told = cause in (408, 429) or 500 <= cause < 600
    return cause if is_told else _STATUSES.get(error.error_code or "", error.http_status)


# Anthropic's words, by which Claude Code knows that it must compact: github.com/earendil-works/pi/issues/102
_TOO_LONG = "prompt is too long"


def error_fields_of(error: ApiError) -> dict[str, Any]:
    """An error in Anthropic's shape; its message names the invalid field.

    A deployment's error keeps its message.
    """
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    if error.raw_body is not None:
        message = msgspec.json.decode(error.raw_body)["error"]["message"]
    if error.error_code == "context_length_exceeded" and _TOO_LONG not in message:
        message = f"{_TOO_LONG}: {message}"
    status = status_of(error)
    kind = "billing_error" if error.error_code == "insufficient_quota" else _ERRORS.get(status)
    kind = kind or ("invalid_request_error" if 400 <= status < 500 and status != 424 else "api_error")
    details = {"details": error.details} if error.details else {}
    return {"type": "error", "error": {"type": kind, "message": message, **details}}
