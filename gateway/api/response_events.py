"""Converts the chunks of a chat completion into a response of the Responses API, or its events.

Shapes: OpenAI API reference, "The response object" and "Responses: streaming events". Knows no
HTTP, no cache and no backend. Invariants: the whole response equals the response that its events
build; events are numbered without gaps; every item that was added is done before the end.
"""

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import msgspec

from cache import Entry
from gateway.api.chat import COMMENT, EventRenderer, call_index, event_of
from gateway.api.memory import Keeping, kept_id
from gateway.journey.storing import chunks_of
from gateway.journey.turn import Arrival
from gateway.wire.carried import Carried
from gateway.wire.chunks import UNREADABLE, decoded, read
from gateway.wire.errors import ApiError
from gateway.wire.sse import Splitter
from gateway.wire.types import Chunk
from policies import Usage


class _TextKind(NamedTuple):
    """A kind of text in an answer: its item, the item's list of parts, the part with the text, and
    the names of the part's and of the text's events.
    """

    item: dict[str, Any]
    parts: str
    part: dict[str, Any]
    part_events: str
    text_events: str


_MESSAGE = {"type": "message", "role": "assistant", "content": []}
_OUTPUT_TEXT = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
_TEXT = _TextKind(_MESSAGE, "content", _OUTPUT_TEXT, "content_part", "output_text")
_REFUSAL = _TextKind(_MESSAGE, "content", {"type": "refusal", "refusal": ""}, "content_part", "refusal")
# a summary, because clients of this API show only the summary of a model's reasoning
_THOUGHT, _SUMMARY = {"type": "reasoning", "summary": []}, {"type": "summary_text", "text": ""}
_REASONING = _TextKind(_THOUGHT, "summary", _SUMMARY, "reasoning_summary_part", "reasoning_summary_text")

_IDS = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "local_shell_call": "lsh",
}
# of a call: the field that grows, and its events
_GROWING = {
    "function_call": ("arguments", "response.function_call_arguments"),
    "custom_tool_call": ("input", "response.custom_tool_call_input"),
}
_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}  # of failed responses, by the error's status
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_FIXED: dict[str, Any] = msgspec.json.decode(
    b'{"object":"response","status":"in_progress","background":false,"error":null,"incomplete_details":null,'
    b'"previous_response_id":null,"store":false,"usage":null}'
)
# the fields of the request that a response repeats, and their defaults
_REPEATED: dict[str, Any] = msgspec.json.decode(
    b'{"instructions":null,"max_output_tokens":null,"metadata":{},"parallel_tool_calls":true,"reasoning":null,'
    b'"service_tier":null,"temperature":1.0,"text":{"format":{"type":"text"}},"tool_choice":"auto","tools":[],'
    b'"top_logprobs":0,"top_p":1.0,"truncation":"disabled","user":null}'
)


Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""Keeps a response. Raises only for a background response."""


_NOT_KEPT = Keeping(is_stored=False)


class ResponseRenderer(EventRenderer):
    """The renderer of one response. `body` is the request; the response repeats some of its fields.

    The method `keep` passes the complete response to the parameter `keep`.
    """

    def __init__(
        self, body: Mapping[str, Any], arrival: Arrival, keeping: Keeping = _NOT_KEPT, keep: Keep | None = None
    ) -> None:
        super().__init__(bool(body.get("stream")))
        self._key = arrival.request_id.removeprefix("req_")
        repeated = {name: default if body.get(name) is None else body[name] for name, default in _REPEATED.items()}
        repeated["tools"] = _without_secrets(repeated["tools"])
        self._keep, self.is_kept = keep, keep is not None
        head = {"id": f"resp_{self._key}", "created_at": int(arrival.at_s), "model": body["model"]}
        head |= {"store": keeping.is_stored, "previous_response_id": keeping.previous_id}
        if keeping.conversation_id is not None:
            head["conversation"] = {"id": keeping.conversation_id}
        self.is_background = self._is_queued = keeping.is_background
        if keeping.is_background:
            head |= {"background": True, "status": "queued"}
        self._has_shell = any(tool.get("type") == "local_shell" for tool in body.get("tools") or ())
        self._output: list[dict[str, Any]] = []
        self.id = head["id"]
        self._head = {name: value for name, value in head.items() if name not in ("created_at", "model", "status")}
        self._response = {**_FIXED, **head, **repeated, "output": self._output}
        self._kind: _TextKind | None = None  # of the text that is growing, which is the last item's
        self._texts: list[str] = []
        # log probabilities whose text has not come: a token may end inside a character
        self._tokens: list[Any] = []
        # by their index: item, pieces of arguments
        self._calls: dict[int, tuple[int, list[str]]] = {}
        self._carried = Carried()
        self._annotations: list[Any] = []  # whose text has not come
        self._number = 0

    async def keep(self) -> None:
        if self._keep is not None:
            await self._keep(self._response)

    def queued(self) -> bytes:
        """The first events of a response in the background."""
        self._tell("response.created", response=self._response)
        self._tell("response.queued", response=self._response)
        return self._taken()

    def body(self) -> bytes:
        """The response in its current state."""
        return msgspec.json.encode(self._response)

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        self.events(chunks if entry is None else chunks_of(entry))
        self.end()
        return self.body()

    def end(self) -> bytes:
        self._close_text()
        for position, pieces in self._calls.values():
            item, text = self._output[position], "".join(pieces)
            if item["type"] in _GROWING:
                field, event = _GROWING[item["type"]]
                item[field] = text
                named = {"name": item["name"]} if field == "arguments" else {}
                self._tell(f"{event}.done", **self._place(position), **named, **{field: text})
            else:
                item["action"] |= _shell_action(text)
            self._close_item(position)
        self._carry()
        if self._response["status"] == "in_progress":
            self._response["status"] = "completed"
        self._tell(f"response.{self._response['status']}", response=self._response)
        return self._taken()

    def failed(self, error: ApiError) -> bytes:
        """The event of an error: flat as in the reference, and nested as OpenAI sends it to its
        SDKs.

        A background response gets the error as a field.
        """
        if self.is_background:
            code = _CODES.get(error.http_status, "server_error")
            self._response |= {"status": "failed", "error": {"code": code, "message": error.message}}
            self._tell("response.failed", response=self._response)
            return self._taken()
        told = msgspec.json.decode(error.body())["error"]  # a deployment's own, where it has one
        self._tell("error", **{name: told.get(name) for name in ("code", "message", "param")}, error=told)
        return self._taken()

    def _tell(self, event: str, **fields: Any) -> None:
        if self._is_stream:
            self._events.append(framed(event, self._number, **fields))
            self._number += 1

    def _take(self, payload: bytes) -> None:
        """Add one chunk. The backend has checked its types, except inside tool calls."""
        piece: dict[str, Any] = msgspec.json.decode(payload)
        if self._number == 0 or self._is_queued:
            self._response["model"] = piece.get("model") or self._response["model"]
            if self._is_queued:
                self._response["status"], self._is_queued = "in_progress", False
            else:
                self._tell("response.created", response=self._response)
            self._tell("response.in_progress", response=self._response)
        if piece.get("usage"):
            self._response["usage"] = _usage(payload)
        self._response["service_tier"] = piece.get("service_tier") or self._response["service_tier"]
        for choice in piece.get("choices") or ():
            delta = choice.get("delta") or {}
            self._carried.add(delta)
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            self._say(_REASONING, thought)
            # a response has log probabilities of text only
            if not thought and not delta.get("tool_calls"):
                logprobs = choice.get("logprobs")
                tokens = logprobs.get("content") if isinstance(logprobs, dict) else None
                self._tokens += tokens if isinstance(tokens, list) else ()
            self._say(_TEXT, delta.get("content"))
            self._say(_REFUSAL, delta.get("refusal"))
            self._annotate(delta.get("annotations"))
            for call in delta.get("tool_calls") or ():
                self._call(call)
            if (reason := _INCOMPLETE.get(choice.get("finish_reason"))) is not None:
                self._response |= {"status": "incomplete", "incomplete_details": {"reason": reason}}

    def _say(self, kind: _TextKind, text: Any) -> None:
        """Append to the growing text; begin a new item if the last item is of another kind."""
        if not isinstance(text, str) or not text:
            return
        if self._kind is not kind:
            self._close_text()
            if kind is not _REASONING:
                self._carry()
            self._kind = kind
            item, part = self._add(deepcopy(kind.item)), deepcopy(kind.part)
            self._tell(f"response.{kind.part_events}.added", **self._place(-1, kind), part=part)
            item[kind.parts].append(part)
        self._texts.append(text)
        more = self._with_tokens() if kind is _TEXT else {}
        self._tell(f"response.{kind.text_events}.delta", **self._place(-1, kind), delta=text, **more)

    def _with_tokens(self) -> dict[str, Any]:
        """Move the pending log probabilities into the growing text; returns them as a field."""
        tokens, self._tokens = self._tokens, []
        self._output[-1]["content"][0]["logprobs"] += tokens
        return {"logprobs": tokens}

    def _carry(self) -> None:
        """End the growing text; add an item for what the next turn needs, and no reasoning before carries."""
        self._close_text()
        if self._carried.is_pending:
            self._add({**deepcopy(_THOUGHT), "encrypted_content": self._carried.sealed()})
            self._close_item(-1)

    def _annotate(self, annotations: Any = None) -> None:
        """Add the citations of a chat to the text that is growing, or keep them for the next one."""
        self._annotations += annotations if isinstance(annotations, list) else ()
        if self._kind is not _TEXT or not self._annotations:
            return
        annotations, self._annotations = self._annotations, []
        shown = self._output[-1]["content"][0]["annotations"]
        for one in annotations:
            kind = one.get("type")
            annotation = {"type": kind, **one[kind]} if isinstance(one.get(kind), dict) else one
            place = {**self._place(-1, _TEXT), "annotation_index": len(shown)}
            shown.append(annotation)
            self._tell("response.output_text.annotation.added", **place, annotation=annotation)

    def _close_text(self) -> None:
        kind, self._kind = self._kind, None
        if kind is None:
            return
        if kind is _TEXT:
            self._with_tokens()
        if kind is _REASONING and (sealed := self._carried.sealed()):
            self._output[-1]["encrypted_content"] = sealed
        part = self._output[-1][kind.parts][0]
        field = "refusal" if kind is _REFUSAL else "text"
        part[field] = "".join(self._texts)
        self._texts.clear()
        told = {name: value for name, value in part.items() if name in (field, "logprobs")}
        self._tell(f"response.{kind.text_events}.done", **self._place(-1, kind), **told)
        self._tell(f"response.{kind.part_events}.done", **self._place(-1, kind), part=part)
        self._close_item(-1)

    def _call(self, call: Mapping[str, Any]) -> None:
        """Begin a call, or extend its arguments. Several calls may grow at once: `end` finishes
        them.
        """
        id = _text(call.get("id"))
        call = {**call, "id": id}
        kind, field = ("custom", "input") if isinstance(call.get("custom"), dict) else ("function", "arguments")
        body = call.get(kind)
        index = call_index(call, self._calls, self._output[-1].get("call_id") if self._output else None)
        body = body if isinstance(body, dict) else {}
        if index not in self._calls:
            fields: dict[str, Any] = {"call_id": id or f"call_{self._key}_{index}"}
            self._carried.add_call(fields["call_id"], call)
            self._carry()
            if self._has_shell and body.get("name") == "local_shell":
                fields |= {"type": "local_shell_call", "action": {"type": "exec", "command": [], "env": {}}}
            else:
                fields |= {"type": "function_call" if kind == "function" else "custom_tool_call"}
                fields |= {**_names(_text(body.get("name")), self._response["tools"]), field: ""}
            self._add(fields)
            self._calls[index] = (len(self._output) - 1, [])
        else:
            self._carried.add_call(self._output[self._calls[index][0]]["call_id"], call)
        position, pieces = self._calls[index]
        text = body.get(field)
        if isinstance(text, str) and text:
            pieces.append(text)
            if (growing := _GROWING.get(self._output[position]["type"])) is not None:
                self._tell(f"{growing[1]}.delta", **self._place(position), delta=text)

    def _add(self, fields: dict[str, Any]) -> dict[str, Any]:
        position = len(self._output)
        item = {"id": f"{_IDS[fields['type']]}_{self._key}_{position}", "status": "in_progress", **fields}
        self._output.append(item)
        self._tell("response.output_item.added", output_index=position, item=item)
        return item

    def _close_item(self, position: int) -> None:
        item = self._output[position]
        item["status"] = "incomplete" if self._response["status"] == "incomplete" else "completed"
        self._tell("response.output_item.done", output_index=position % len(self._output), item=item)

    def _place(self, position: int, kind: _TextKind | None = None) -> dict[str, Any]:
        place = {"item_id": self._output[position]["id"], "output_index": position % len(self._output)}
        return place if kind is None else {**place, f"{kind.parts}_index": 0}


class PassedResponseRenderer(ResponseRenderer):
    """The renderer of a provider's own response: unchanged, or with the gateway's ids if it is
    kept.

    The last event waits until the response is kept.
    """

    _last: Mapping[str, Any] | None = None
    _passed = b""
    _splitter: Splitter | None = None

    @property
    def ping(self) -> bytes:  # type: ignore[override]  # the provider's bytes may end inside an event
        return COMMENT if not self._passed or self._passed.endswith(b"\n\n") else b""

    def whole(self, chunks: Sequence[Chunk], entry: Entry | None) -> bytes:
        body = b"".join([one.data for one in (chunks if entry is None else chunks_of(entry))])
        if not self.is_kept:
            return body
        self._response = self._own(_completed(body))
        return self.body()

    def events(self, chunks: Sequence[Chunk]) -> bytes:
        data = b"".join([one.data for one in chunks])
        if chunks[0].is_whole:
            whole = _completed(data)
            self._tell("response.created", response={**self._own(whole), "status": "in_progress", "output": []})
            self._take(msgspec.json.encode({"type": f"response.{whole['status']}", "response": whole}))
        elif not self.is_kept:
            self._passed = data or self._passed
            return data
        else:
            self._splitter = self._splitter or Splitter()
            for payload in self._splitter.feed(data):
                self._take(payload)
        return self._taken()

    def end(self) -> bytes:
        if self._last is not None:
            self._tell(**self._last)
        return self._taken()

    def failed(self, error: ApiError) -> bytes:
        numbers = _NUMBERS.findall(self._passed)
        self._number = int(numbers[-1]) + 1 if numbers else self._number
        return super().failed(error)

    def _take(self, payload: bytes) -> None:
        try:
            event = decoded(payload, dict[str, Any])
        except UNREADABLE:  # no event of this API
            return
        kind = str(event.pop("type", ""))
        event.pop("sequence_number", None)
        if isinstance(event.get("response"), dict):
            event["response"] = self._response = self._own(event["response"])
        if isinstance(event.get("item"), dict):
            event["item"] = self._named(event["item"])
        if isinstance(event.get("item_id"), str):
            event["item_id"] = kept_id(event["item_id"], self._key)
        if kind in ("response.completed", "response.incomplete"):
            self._last = {"event": kind, **event}
        elif not (self.is_background and kind in ("response.created", "response.queued")):  # told before
            self._tell(kind, **event)

    def _own(self, response: dict[str, Any]) -> dict[str, Any]:
        output = [self._named(item) for item in response.get("output") or () if isinstance(item, dict)]
        return {**response, **self._head, "output": output, "tools": _without_secrets(response.get("tools", []))}

    def _named(self, item: dict[str, Any]) -> dict[str, Any]:
        return {**item, "id": kept_id(item["id"], self._key)} if isinstance(item.get("id"), str) else item


def _completed(whole: bytes) -> dict[str, Any]:
    """Decode a whole response; without a status it counts as completed."""
    return {"status": "completed", **decoded(whole, dict[str, Any])}


def _without_secrets(tools: Any) -> Any:
    """Tools as a response shows and keeps them: without the credentials of MCP servers."""
    if isinstance(tools, list):
        return [_without_secrets(tool) for tool in tools]
    if not isinstance(tools, dict):
        return tools
    hidden = _SECRETS if tools.get("type") == "mcp" else ()
    shown = {name: given for name, given in tools.items() if name not in hidden}
    return shown | {"tools": _without_secrets(tools["tools"])} if "tools" in tools else shown


_SECRETS = ("authorization", "headers")
_NUMBERS = re.compile(rb'"sequence_number":\s*(\d{1,9})')


def _text(value: Any) -> str:
    """A name or an id as text; a deployment may send another JSON type."""
    return value if isinstance(value, str) else "" if value is None else msgspec.json.encode(value).decode()


def in_namespace(space: str | None, name: str) -> str:
    """The name of a namespace's tool in a chat completion."""
    return f"{space.removesuffix('__')}__{name}" if space else name


def _names(name: str, tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The fields of a call of the tool `name` of a chat completion: its bare name, and its
    namespace.
    """
    spaces = (one for one in tools if one.get("type") == "namespace")
    both = ((space["name"], one.get("name", "")) for space in spaces for one in space["tools"])
    found = next((pair for pair in both if in_namespace(*pair) == name), None)
    return {"name": name} if found is None else {"namespace": found[0], "name": found[1]}


def framed(event: str, number: int, **fields: Any) -> bytes:
    """Encode an event of a stream with its sequence number."""
    return event_of(event, {"type": event, "sequence_number": number, **fields})


def _shell_action(arguments: str) -> dict[str, Any]:
    """The command in the arguments of a local shell call. Invalid arguments become the command's
    text.
    """
    try:
        action = decoded(arguments.encode())
        command = action["command"]
    except (msgspec.DecodeError, KeyError, TypeError):
        action, command = {}, arguments
    fields = {name: value for name, value in action.items() if name in _SHELL_FIELDS and value is not None}
    return {**fields, "command": [command] if isinstance(command, str) else command}


_SHELL_FIELDS = frozenset({"env", "working_directory", "timeout_ms", "user"})


def _usage(payload: bytes) -> dict[str, Any]:
    usage = read(payload).usage or Usage(0, 0)
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.cache_write_tokens + usage.cache_write_1h_tokens,
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
