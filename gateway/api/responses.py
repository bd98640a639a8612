"""`POST /v1/responses`: the stateless part of OpenAI's Responses API, as chat completions.

Knows two shapes and no decisions: the translated request is handled as a chat completion, so both
share cached answers, budgets and routes. Shapes: OpenAI API reference, "Create a model response"
and "Create chat completion". Invariant: a field that needs state between requests, or a tool that
is not a function, is refused by its name and never ignored, unless a deployment allows that tool:
then it is sent as it is.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api.chat import Chat, Renderer
from gateway.api.response_events import Response
from gateway.journey.turn import Arrival, Turn, read_turn
from gateway.wire.errors import BadRequest
from gateway.wire.requests import MESSAGES_MAX, convert, decode_object

_Content = str | list[dict[str, Any]]


class _Item(msgspec.Struct):
    """One item of `input`, of any supported kind."""

    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] = "user"
    content: _Content = ""
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    output: _Content = ""


class _Function(msgspec.Struct):
    """A function, or the choice of one."""

    name: str


class ResponseRequest(msgspec.Struct):
    """The fields that differ from a chat completion's; the shared ones are checked there."""

    input: str | Annotated[list[_Item], Meta(min_length=1, max_length=MESSAGES_MAX)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # the deployment refuses an input that is too long
    include: list[str] | None = None


# they change no answer
_DROPPED = frozenset({"max_tool_calls", "metadata", "store", "stream_options"})
_SEND_IT_ALL = "nothing is kept here between requests, so send the earlier items themselves in `input` (SDKs do with `store: false`)"
# the fields with one supported value, and the way out of another
_ONLY: Mapping[str, tuple[Any, str]] = {
    "background": (
        False,
        "nothing is kept here to be fetched later, so leave it out and read the answer, as a stream or whole",
    ),
    "n": (1, "a response is one answer, so send a request for each, or use /v1/chat/completions"),
    "prompt": (None, "no prompts are stored here, so send `instructions` and `input`"),
    **dict.fromkeys(("conversation", "previous_response_id"), (None, _SEND_IT_ALL)),
}
ITEMS = ("message", "function_call", "function_call_output", "reasoning")


class Responses(Chat):
    """The endpoint. One instance per worker."""

    operation = "responses"

    def read(
        self, raw: bytes, headers: Mapping[str, str], arrival: Arrival, model: str | None
    ) -> tuple[Turn, Renderer]:
        body = decode_object(raw, model)
        # decision: one-shape-on-the-journey
        turn = read_turn(msgspec.json.encode(_chat(body)), headers, arrival, metadata=body.get("metadata"))
        return turn, Response(body, arrival)


def _chat(body: dict[str, Any]) -> dict[str, Any]:
    """The equivalent chat completion. Raises BadRequest with the invalid field."""
    for name, (allowed, way) in _ONLY.items():
        if body.get(name) not in (None, allowed):
            raise _unsupported(name, f"`{name}` is not supported here: {way}")
    request: ResponseRequest = convert(body, ResponseRequest)
    text, reasoning = request.text or {}, request.reasoning or {}
    has_logprobs = bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())
    translated = {
        "messages": _messages(request),
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs if has_logprobs else None,
    }
    known = _DROPPED.union(_ONLY, ResponseRequest.__struct_fields__)
    shared = {name: value for name, value in body.items() if name not in known}
    if not request.tools:  # of chat completions, these go with tools only
        translated["parallel_tool_calls"] = None
        translated["tool_choice"] = None if request.tool_choice in ("auto", "none") else translated["tool_choice"]
    return shared | {name: value for name, value in translated.items() if value is not None}


def _unsupported(param: str, message: str) -> BadRequest:
    return BadRequest(message, param=param, code="unsupported_parameter")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A function in a chat completion's shape. A tool of another type stays as it is: it is reserved."""
    kind = tool.get("type")
    if kind == "custom":
        raise _unsupported(f"{where}.type", f"Tools of type `custom` are not supported here: {_FUNCTIONS}")
    if kind != "function":
        return tool
    convert(tool, _Function, where)
    return _nested("function", tool)


_FUNCTIONS = "/v1/responses has `function`, and /v1/chat/completions has `function` and `custom`"


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function":
        kind = msgspec.json.encode(choice.get("type")).decode()[:100]
        words = f"A `tool_choice` of type {kind} is not supported here"
        raise _unsupported("tool_choice.type", f"{words}: it may be none, auto, required or a function")
    function: _Function = convert(choice, _Function, "tool_choice")
    return _nested("function", {"name": function.name})


def _messages(request: ResponseRequest) -> list[dict[str, Any]]:
    """`instructions` and `input` as messages.

    Calls are added to the assistant's message before them, or to a new one.
    """
    messages: list[dict[str, Any]] = []
    calls, answered = set[str](), set[str]()
    if request.instructions is not None:
        messages.append({"role": "system", "content": request.instructions})
    items = [_Item(content=request.input)] if isinstance(request.input, str) else request.input
    for number, item in enumerate(items):
        where = f"input[{number}]"
        match item.type:
            case "message":
                messages.append({"role": item.role, "content": _content(item.content, f"{where}.content")})
            case "function_call":
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None})
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
                calls.add(item.call_id)
            case "function_call_output":
                if item.call_id not in calls:
                    words = f"No tool call found for function call output with call_id {item.call_id[:100]}."
                    raise BadRequest(words, param="input")
                answered.add(item.call_id)
                output = _content(item.output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            case "reasoning":  # chat completions have no field for it, and models do not need it
                continue
            case "item_reference":
                raise _unsupported(f"{where}.type", f"Items of type `item_reference` are not supported: {_SEND_IT_ALL}")
            case _:
                words = f"Items of type `{item.type[:100]}` are not supported here: there are {', '.join(ITEMS)}"
                raise _unsupported(f"{where}.type", f"{words}; leave out what another tool has left")
    if not messages:
        raise BadRequest("`input` must hold more than reasoning", param="input", code="invalid_value")
    if calls > answered:
        lacking = min(calls - answered)[:100]
        raise BadRequest(f"No tool output found for function call {lacking}.", param="input")
    return messages


def _content(content: _Content, where: str) -> _Content:
    """The content of a message. A single text becomes a string, to share cached answers."""
    if isinstance(content, str):
        return content
    parts = [_part(part, f"{where}[{number}]") for number, part in enumerate(content)]
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: dict[str, Any], where: str) -> dict[str, Any]:
    match part:
        case {"type": "input_text" | "output_text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "refusal" | "input_audio"}:
            return part
        case {"type": "input_image", "image_url": str(url)}:
            return _nested("image_url", {"url": url, "detail": part.get("detail")})
        case {"type": "input_file", "file_data": str(data)}:
            return _nested("file", {"filename": part.get("filename"), "file_data": data})
    kind = msgspec.json.encode(part.get("type")).decode()[:100]
    raise _unsupported(where, f"A content part of this type, with these fields, is not supported here: {kind}")


def _response_format(given: Any) -> dict[str, Any] | None:
    match given:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema"}:
            return _nested("json_schema", given)
    raise _unsupported("text.format", "`text.format.type` may be text, json_object or json_schema")


def _nested(type: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, a format or a part in a chat completion's shape: its fields are one level lower."""
    fields = {name: value for name, value in flat.items() if name != "type" and value is not None}
    return {"type": type, type: fields}
