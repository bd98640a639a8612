"""`POST /v1/responses`: OpenAI's Responses API, translated to chat completions or sent unchanged.

Translates between two shapes and makes no decision: the pipeline handles the translated request,
with the items that it refers to, as a chat completion, so both share cached answers, budgets and
routes. A request that no chat completion expresses goes to a deployment with the Responses API,
which stores nothing. Shapes: OpenAI API reference, "Create a model response" and "Create chat
completion". Invariant: a field that no deployment of the alias supports is refused by its name and
never ignored.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.accounts import Identity
from gateway.api import asgi
from gateway.api.background import Background, send_events
from gateway.api.batches import Metadata
from gateway.api.chat import AnswerEndpoint, Renderer, Respond
from gateway.api.endpoint import Call, ObjectEndpoint
from gateway.api.headers import JSON, base_headers
from gateway.api.memory import Item, Keeping, Memory, sendable
from gateway.api.response_events import PassedResponseRenderer, ResponseRenderer, in_namespace
from gateway.api.tokens import counted
from gateway.journey.turn import Turn, read_controls, read_turn
from gateway.pipeline import Pipeline
from gateway.wire.carried import is_signed, restore, unsealed
from gateway.wire.errors import BadRequest, BeyondChat, MissingField, shown
from gateway.wire.requests import MESSAGES_MAX, convert, decode_object
from gateway.wire.types import CHAT, RESPONSE, Kind

_Content = str | list[dict[str, Any]]


class InputItem(msgspec.Struct):
    """One item of `input`, of any supported kind."""

    type: str | None = None  # a message
    role: Literal["system", "developer", "user", "assistant"] | None = None  # user
    content: _Content | None = ""
    id: str | None = None
    call_id: str | None = None
    name: str = ""
    namespace: str | None = None
    arguments: str = ""
    input: str = ""
    action: dict[str, Any] = {}
    output: _Content = ""
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class _ModelName(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1)]


class _NamedTool(msgspec.Struct):
    """A function or a custom tool, or a `tool_choice` that names it."""

    name: str
    namespace: str | None = None


class _ToolNamespace(msgspec.Struct):
    name: Annotated[str, Meta(max_length=128)]  # each of its tools' names has it
    tools: list[dict[str, Any]]
    description: str | None = None


class _AllowedTools(msgspec.Struct):
    tools: list[dict[str, Any]] | None = None


class _Conversation(msgspec.Struct):
    id: str


_Include = Literal[
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
    "message.input_image.image_url",
    "web_search_call.results",
    "web_search_call.action.sources",
    "file_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
]


class ResponseRequest(msgspec.Struct):
    """The fields that differ from a chat completion's; the chat's own struct checks the shared
    fields.
    """

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None  # the deployment refuses an input that is too long
    include: list[_Include] | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    conversation: str | _Conversation | None = None
    background: bool | None = None
    metadata: Metadata | None = None


# those that are translated; a summary of the reasoning comes with every answer
_TEXT, _REASONING = frozenset({"format", "verbosity"}), frozenset({"effort", "summary", "generate_summary"})
# they change no answer
_DROPPED = frozenset({"client_metadata", "max_tool_calls", "stream_options"})
# fields of no chat completion, which go to a provider's Responses API alone
_NO_CHATS = ("access_programs", "background_options", "context_management", "image")
# the fields with one supported value, and the way out of another
ONLY: Mapping[str, tuple[Any, str]] = {
    "n": (1, "a response is one answer, so send a request for each, or use /v1/chat/completions"),
    "audio": (None, "a response is text here, so use /v1/chat/completions"),
    "prompt": (None, "no prompts are stored here, so send `instructions` and `input`"),
}
_CALLS = ("function_call", "custom_tool_call", "local_shell_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
ITEMS = ("message", *_CALLS, *_OUTPUTS, "reasoning", "item_reference")


class Responses(AnswerEndpoint):
    """The endpoint for responses. One instance per worker."""

    operation = "responses"

    def __init__(self, pipeline: Pipeline, body_bytes_max: int, memory: Memory, background: Background) -> None:
        super().__init__(pipeline, body_bytes_max)
        self._memory = memory
        self._background = background
        self.release = memory.conversations.release

    async def begin(self, turn: Turn, renderer: Renderer, identity: Identity) -> Respond:
        assert isinstance(renderer, ResponseRenderer)
        body = await self._background.begin(turn, renderer, identity)
        headers = base_headers(turn.arrival.request_id)
        if turn.is_stream:
            events = self._background.events(identity.team, renderer.id, -1)
            return lambda scope, send: send_events(scope, send, headers, events)
        return lambda _, send: asgi.send_whole(send, 200, [JSON, *headers], body)

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        body = decode_object(await self.body(call), asgi.model_of(call.scope))
        identity, arrival = call.identity, call.arrival
        request, inputs, sent, kind = await as_sent(body, self._memory, identity, self._pipeline, arrival.request_id)
        # decision: one-shape-on-the-journey
        turn = read_turn(sent, call.headers, arrival, kind, metadata=body.get("metadata"))
        conversation_id = _conversation_of(request)
        alias = self._pipeline.fleet.configured(turn.alias)
        if conversation_id is not None and not self._memory.is_kept(None, identity.team, alias):
            raise BeyondChat(
                "conversation", "`conversation` is not supported where nothing is kept: send all in `input`"
            )
        keeping = Keeping(
            self._memory.is_kept(request.store, identity.team, alias),
            request.previous_response_id or None,
            conversation_id,
            request.background is True,
        )
        if keeping.is_background:
            if arrival.batch or not keeping.is_stored:
                words = "a line of a batch" if arrival.batch else "a request whose response is not stored"
                raise BeyondChat("background", f"`background` is not supported in {words}: leave it out")
            turn = msgspec.structs.replace(turn, deadline=None)
        is_kept = keeping.is_stored or conversation_id is not None
        keep = partial(self._memory.put, identity, keeping, inputs) if is_kept else None
        renderer = ResponseRenderer if kind is CHAT else PassedResponseRenderer
        return turn, renderer(body, arrival, keeping, keep)


class InputTokens(ObjectEndpoint):
    """`POST /v1/responses/input_tokens`: count the tokens of a request's input, with references
    resolved.

    A local engine counts exactly, except tools; for other models the count is the estimate of
    routing and budgets. One instance per worker.
    """

    operation = "input_tokens"

    def __init__(self, pipeline: Pipeline, memory: Memory) -> None:
        super().__init__(pipeline)
        self._memory = memory

    async def answer(self, call: Call) -> Any:
        _, body = await self.body(call)
        alias = self.alias(call, convert(body, _ModelName).model)
        read_controls("", body.get("cache"))
        _, _, sent, kind = await as_sent(body, self._memory, call.identity, self._pipeline)
        tokens = await counted(alias, msgspec.json.decode(sent), kind)
        return {"object": "response.input_tokens", "input_tokens": tokens}


async def as_sent(
    body: dict[str, Any], memory: Memory, identity: Identity, pipeline: Pipeline, request_id: str = ""
) -> tuple[ResponseRequest, list[Item], bytes, Kind]:
    """A request's `body`, its input's items without references, the request to send as JSON, and
    its kind.

    The request to send is the equivalent chat completion, or the same request with the kept items
    in its input. If `request_id` is given, that request locks its conversation. Raises ApiError
    with the invalid field.
    """
    for name, (allowed, way) in ONLY.items():
        if body.get(name) not in (None, allowed):
            raise BeyondChat(name, f"`{name}` is not supported here: {way}")
    request: ResponseRequest = convert(body, ResponseRequest)
    given, items_before = body.get("input"), list[Item]()
    conversation_id = _conversation_of(request)
    previous_id = request.previous_response_id or None
    if previous_id is not None and conversation_id is not None:
        raise BadRequest(
            "`conversation` and `previous_response_id` exclude each other: send one of them",
            param="conversation",
            code="mutually_exclusive_parameters",
        )
    if request.input is None and previous_id is None and conversation_id is None:
        raise MissingField("input", body)
    inputs: list[Item] = [{"role": "user", "content": given}] if isinstance(given, str) else given or []
    inputs = items = await memory.resolved(identity.team, inputs)
    if previous_id is not None or conversation_id is not None:
        if conversation_id is not None:
            items_before = await memory.said(identity.team, conversation_id, request_id)
        else:
            items_before = await memory.before(identity.team, str(previous_id))
        items = [*items_before, *inputs]
        if len(items) > MESSAGES_MAX:
            raise BadRequest(
                f"`input` and what it continues have more than {MESSAGES_MAX} items: send what is needed of them",
                param="previous_response_id" if conversation_id is None else "conversation",
                code="context_length_exceeded",
            )
    items = [_unsealed(item) for item in items]
    fleet, bytes_max = pipeline.fleet, pipeline.settings.body_bytes_max
    alias = fleet.aliases.get(fleet.configured(str(body.get("model"))))
    may_pass = alias is not None and any("responses" in one.capabilities for one in alias.deployments.values())
    try:
        if not (may_pass and _is_beyond_chat(request, items)):
            chat = _chat(body, request, _messages(items, request.instructions, len(items_before)))
            return request, inputs, _encoded(chat, bytes_max), CHAT
    except BeyondChat:
        if not may_pass:
            raise
    sent = {name: value for name, value in body.items() if name not in _UNSENT}
    return request, inputs, _encoded({**sent, "input": sendable(items), "store": False}, bytes_max), RESPONSE


def _encoded(request: Mapping[str, Any], bytes_max: int) -> bytes:
    """`request` as JSON, encoded piece by piece: a short request may refer to long items.

    Raises BadRequest as soon as it is longer than a request's body may be.
    """
    encoded = bytearray()
    for name, value in request.items():
        encoded += b",%b:" % msgspec.json.encode(name)
        pieces = value if isinstance(value, list) and value else [value]
        for number, piece in enumerate(pieces):
            encoded += b"," * (number > 0) or b"[" * (pieces is value)
            encoded += msgspec.json.encode(piece)
            if len(encoded) > bytes_max:
                raise BadRequest(
                    f"`{name}` and all that the request refers to have more than {bytes_max} bytes: send less",
                    param="input" if name == "messages" else name,
                    code="context_length_exceeded",
                )
        encoded += b"]" * (pieces is value)
    return b"{" + encoded[1:] + b"}"


# the gateway's own part, and a chat's names of the length, which would take the place of its own
_UNSENT = frozenset({"previous_response_id", "conversation", "background", "max_tokens", "max_completion_tokens"})


_SUMMARY = "A summary of the conversation so far, but for the messages above:\n\n"


def _unsealed(item: Item) -> Item:
    """A compaction of this gateway as the message that it stands for; other items stay.

    Raises BadRequest.
    """
    content = item.get("encrypted_content")
    if item.get("type") != "compaction" or not content or is_signed(content):
        return item
    if (summary := unsealed(content, str)) is None:
        words = "A compaction's `encrypted_content` is not as it was given out: send it unchanged"
        raise BadRequest(words, param="input", code="invalid_value")
    return {"type": "message", "role": "user", "content": f"{_SUMMARY}{summary}"}


def _is_beyond_chat(request: ResponseRequest, items: Sequence[Item]) -> bool:
    """Whether a chat completion would lose a part of the request: a tool, or a model's reasoning."""
    return (
        any(tool.get("type") not in ("function", "custom") for tool in request.tools or ())
        or "reasoning.encrypted_content" in (request.include or ())
        or any(is_signed(item.get("encrypted_content")) for item in items)
    )


def _conversation_of(request: ResponseRequest) -> str | None:
    named = request.conversation
    return named.id if isinstance(named, _Conversation) else named


def checked_items(items: list[dict[str, Any]]) -> list[Item]:
    """`items` as the items of a conversation. Raises BadRequest with the invalid field."""
    for number, one in enumerate(items):
        where = f"items[{number}]"
        item: InputItem = convert(one, InputItem, where)
        kind = item.type or "message"
        if kind not in ITEMS or kind == "item_reference":
            raise BeyondChat(f"{where}.type", f"Items of type `{kind[:100]}` are not supported here")
        if kind in ("message", *_OUTPUTS):
            _content(item.content if kind == "message" else item.output, where)
    return items


def _chat(body: Mapping[str, Any], request: ResponseRequest, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The equivalent chat completion. Raises BadRequest with the invalid field."""
    text, reasoning = request.text or {}, dict(request.reasoning or {})
    for name, default in (("context", "auto"), ("mode", "standard")):
        if reasoning.get(name) in (None, default):
            reasoning.pop(name, None)
    for name in _NO_CHATS:
        if body.get(name) is not None:
            raise BeyondChat(name, f"`{name}` is not supported here: only OpenAI's Responses API has it")
    for where, given, known_fields in (("text", text, _TEXT), ("reasoning", reasoning, _REASONING)):
        if further := given.keys() - known_fields:
            name = f"{where}.{min(further)}"
            raise BeyondChat(name, f"`{name}` is not supported here: leave it out")
    has_logprobs = bool(request.top_logprobs) or "message.output_text.logprobs" in (request.include or ())
    translated = {
        "messages": messages,
        "tools": _tools(request.tools or (), "tools") or None,
        "tool_choice": _tool_choice(request.tool_choice),
        "parallel_tool_calls": request.parallel_tool_calls,
        "response_format": _response_format(text.get("format")),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "max_completion_tokens": request.max_output_tokens,
        "logprobs": has_logprobs or None,
        "top_logprobs": request.top_logprobs if has_logprobs else None,
    }
    known_fields = _DROPPED.union(ONLY, ResponseRequest.__struct_fields__)
    shared = {name: value for name, value in body.items() if name not in known_fields}
    if not translated["tools"]:  # of chat completions, these go with tools only
        translated["parallel_tool_calls"] = None
        translated["tool_choice"] = None if request.tool_choice in ("auto", "none") else translated["tool_choice"]
    return shared | {name: value for name, value in translated.items() if value is not None}


SHELL = "local_shell"
_SHELL: dict[str, Any] = {
    "name": SHELL,
    "description": "Runs a command on the user's machine and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "the program and its arguments"},
            "env": {"type": "object", "additionalProperties": {"type": "string"}},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


def _tools(tools: Sequence[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """`tools` in a chat completion's shape, in order; a namespace's second and later tools come
    last.
    """
    groups, owners = [], dict[str, str | None]()
    for number, tool in enumerate(tools):
        path, space = f"{where}[{number}]", tool.get("name") if tool.get("type") == "namespace" else None
        members = _members(tool, path)
        for name in [member["name"] for member in members if isinstance(member.get("name"), str)]:
            if owners.setdefault(name, space) != space:  # a call could not be told from the other's
                raise BeyondChat(path, f"Two tools would be called {shown(name)} in a chat completion: rename one")
        groups.append([_tool(member, path) for member in members])
    return [group[0] for group in groups if group] + [member for group in groups for member in group[1:]]


def _members(tool: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The tools of a namespace, or `tool` itself."""
    if tool.get("type") != "namespace":
        return [tool]
    space: _ToolNamespace = convert(tool, _ToolNamespace, where)
    members = [
        {**one, "name": in_namespace(space.name, name)} if isinstance(name := one.get("name"), str) else one
        for one in space.tools
    ]
    if members and space.description:  # it is about them all, so the first one has it
        description = f"{space.description}\n\n{members[0].get('description') or ''}".rstrip()
        members[0] = {**members[0], "description": description}
    return members


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A tool that the client runs, in a chat completion's shape; the local shell becomes a
    function.

    A tool of another type is reserved and stays unchanged.
    """
    kind = tool.get("type")
    if kind == SHELL:
        return {"type": "function", "function": _SHELL}
    if kind not in ("function", "custom"):
        return tool
    convert(tool, _NamedTool, where)
    if isinstance(form := tool.get("format"), dict) and form.get("type") == "grammar":
        tool = {**tool, "format": _nested("grammar", form)}
    return _nested(kind, tool)


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools":
        allowed: _AllowedTools = convert(choice, _AllowedTools, "tool_choice")
        tools = _tools(allowed.tools or (), "tool_choice.tools")
        return {"type": kind, kind: {"mode": choice.get("mode"), "tools": tools}}
    if kind not in ("function", "custom"):
        shown = msgspec.json.encode(kind).decode()[:100]
        words = f"A `tool_choice` of type {shown} is not supported here"
        raise BeyondChat("tool_choice.type", f"{words}: it may be none, auto, required, a tool or allowed tools")
    named: _NamedTool = convert(choice, _NamedTool, "tool_choice")
    return _nested(kind, {"name": in_namespace(named.namespace, named.name)})


def _messages(items: Sequence[Item], instructions: str | None, count_before: int) -> list[dict[str, Any]]:
    """`instructions` and `items` as messages; the first `count_before` items precede its `input`.

    Calls join the assistant's message before them, or begin a new one.
    """
    messages: list[dict[str, Any]] = []
    carried, of_calls = dict[str, Any](), dict[str, dict[str, Any]]()  # for the assistant's next message and calls
    calls, answered = dict[str, str](), set[str]()  # each call's id, by it and by its item's
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for number, fields in enumerate(items, -count_before):
        where = f"input[{number}]"
        if (kind := fields.get("type") or "message") not in ITEMS or kind == "item_reference":
            message = f"Items of type `{shown(str(kind))}` are not supported here: there are {', '.join(ITEMS)}"
            raise BeyondChat(f"{where}.type", f"{message}; leave out what another tool has left")
        item: InputItem = convert(fields, InputItem, where)
        match kind:
            case "message":
                messages.append({"role": item.role or "user", "content": _content(item.content, f"{where}.content")})
                if item.role == "assistant":
                    messages[-1] |= carried
                    carried = {}
            case kind if kind in _CALLS:
                call_id = item.call_id or item.id or ""
                if not messages or messages[-1]["role"] != "assistant":
                    messages.append({"role": "assistant", "content": None, **carried})
                    carried = {}
                further = of_calls.get(call_id, {})
                messages[-1].setdefault("tool_calls", []).append({**further, "id": call_id, **_call(item)})
                calls |= {item.id or call_id: call_id, call_id: call_id}
            case kind if kind in _OUTPUTS:
                named = item.call_id or item.id or ""
                if (call_id := calls.get(named, "")) == "" and named not in calls:
                    message = f"No tool call found for {kind.replace('_', ' ')} with call_id {named[:100]}."
                    raise BadRequest(message, param="input")
                answered.add(call_id)
                output = _content(item.output, f"{where}.output")
                messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
            case _:  # another server's reasoning has no field in a chat completion
                text = "".join(part["text"] for part in item.summary or () if isinstance(part.get("text"), str))
                last = messages[-1] if messages and messages[-1]["role"] == "assistant" else carried
                restore(last, of_calls, item.encrypted_content, text)
                for call in last.get("tool_calls", ()):
                    call |= of_calls.get(call["id"], {})
    if not messages:
        raise BadRequest("`input` must hold more than reasoning", param="input", code="invalid_value")
    if lacking := set(calls.values()) - answered:
        raise BadRequest(f"No tool output found for function call {min(lacking)[:100]}.", param="input")
    return messages


def _call(item: InputItem) -> dict[str, Any]:
    """A call of a tool, without its id."""
    name = in_namespace(item.namespace, item.name)
    if item.type == "custom_tool_call":
        return _nested("custom", {"name": name, "input": item.input})
    if item.type == "function_call":
        return _nested("function", {"name": name, "arguments": item.arguments})
    arguments = {name: value for name, value in item.action.items() if name != "type" and value not in (None, {})}
    return _nested("function", {"name": SHELL, "arguments": msgspec.json.encode(arguments).decode()})


def _content(content: _Content | None, where: str) -> _Content:
    """The content of a message. A single text becomes a string, to share cached answers."""
    if content is None:
        words = f"Invalid {where}: Expected `string | array`, got `null`"
        raise BadRequest(words, param=where, code="invalid_type")
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
    raise BeyondChat(where, f"A content part of this type, with these fields, is not supported here: {kind}")


def _response_format(format: Any) -> dict[str, Any] | None:
    match format:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"type": "json_object"}
        case {"type": "json_schema"}:
            return _nested("json_schema", format)
    raise BeyondChat("text.format", "`text.format.type` may be text, json_object or json_schema")


def _nested(type: str, flat: Mapping[str, Any]) -> dict[str, Any]:
    """A tool, a format or a part in a chat completion's shape, which nests the fields one level
    lower.
    """
    fields = {name: value for name, value in flat.items() if name != "type" and value is not None}
    return {"type": type, type: fields}
