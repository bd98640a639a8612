"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's Messages API, as chat
completions.

Translates between two shapes and makes no decision: the pipeline handles the translated request as
a chat completion, so both share cached answers, budgets and routes. Shapes: Anthropic API
reference, "Messages", "Count Message tokens" and "Errors"; OpenAI API reference, "Create chat
completion". Invariants: a field that a chat completion cannot express is refused by its name and
never ignored, except fields that change no answer, and earlier thinking, which models do not need;
every error has Anthropic's shape.
"""

import contextlib
from collections.abc import Collection, Mapping
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gateway.api import asgi
from gateway.api.chat import AnswerEndpoint, Renderer
from gateway.api.endpoint import Call, ObjectEndpoint
from gateway.api.headers import Headers, error_headers
from gateway.api.message_events import MessageRenderer, error_fields_of, status_of
from gateway.api.provider_ids import NamedObjects, apart_from_cache
from gateway.api.tokens import counted
from gateway.backends.anthropic.backend import AnthropicBackend
from gateway.backends.base import BackendError, Native
from gateway.deployments.fleet import Fleet
from gateway.journey.turn import Turn, turn_of
from gateway.pipeline import Pipeline
from gateway.wire.carried import is_signed, restore
from gateway.wire.errors import ApiError, BadRequest, BeyondChat, MissingField, ThreadUnsupported
from gateway.wire.requests import (
    BOM,
    MESSAGES_MAX,
    convert,
    decode_object,
    has_long_writes,
    prompt_tokens_max,
)
from gateway.wire.types import CHAT, opened

_Content = str | list[dict[str, Any]]


class _Said(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: _Content


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinking(msgspec.Struct):
    type: str
    budget_tokens: Annotated[int, Meta(ge=1)] | None = None


class _Metadata(msgspec.Struct):
    user_id: str | None = None


class _Format(msgspec.Struct):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: _Format | None = None


class PromptRequest(msgspec.Struct, kw_only=True):
    """The fields that differ from a chat completion's; the chat's own struct checks the shared
    fields.
    """

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[_Said], Meta(min_length=1, max_length=MESSAGES_MAX)]
    system: _Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None
    output_format: _Format | None = None
    service_tier: str | None = None


class MessageRequest(PromptRequest, kw_only=True):
    """A prompt, with the limits and metadata of its answer."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)]
    stop_sequences: list[str] | None = None
    metadata: _Metadata | None = None


class InAnthropicsShape:
    """Gives an endpoint the headers and errors of Anthropic's API."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        await super().__call__(scope, receive, self.named(send))  # type: ignore[misc]  # the endpoint's own

    @staticmethod
    async def send_error(send: asgi.Send, request_id: str, error: ApiError) -> None:
        headers = [*error_headers(request_id, error), (b"request-id", request_id.encode())]
        told = {**error_fields_of(error), "request_id": request_id}
        await asgi.send_whole(send, status_of(error), headers, msgspec.json.encode(told))

    @staticmethod
    def named(send: asgi.Send) -> asgi.Send:
        """`send` that repeats the id of a successful response in the header that Anthropic's
        clients read.
        """
        return asgi.with_headers(send, _anthropics_id)


def _anthropics_id(start: asgi.Message) -> Headers:
    if start["status"] != 200:
        return []
    return [(b"request-id", value) for name, value in start["headers"] if name == b"x-request-id"]


class Messages(InAnthropicsShape, AnswerEndpoint):
    """The endpoint for messages. One instance per worker."""

    operation = "messages"

    async def read(self, call: Call) -> tuple[Turn, Renderer]:
        raw = await self.body(call)
        body = decode_object(raw, asgi.model_of(call.scope))
        request: MessageRequest = convert(body, MessageRequest)
        answer = {
            "max_completion_tokens": request.max_tokens,
            "stop": request.stop_sequences or None,
            "user": request.metadata.user_id if request.metadata else None,
        }
        native = _native(self._pipeline.fleet, request, body, raw, call.headers)
        answer = {name: value for name, value in answer.items() if value is not None}
        has_marks = b'"cache_control"' in raw or b"\\u00" in raw  # a name may have escapes
        # decision: one-shape-on-the-journey
        marked, native = _translated(request, body, native)
        unmarked = _translated(convert(bare := _bare(body), MessageRequest), bare, native)[0] if has_marks else marked
        is_marked = marked != unmarked
        unmarked |= answer
        turn = turn_of(unmarked, msgspec.json.encode(unmarked), call.headers, call.arrival, CHAT)
        needs = turn.demand.needs
        if native is not None and (native.is_needed or opened(turn.body)[1]):
            needs |= {"messages"}
        elif opened(turn.body)[1]:
            needs |= {"prefill"}
        is_long = has_marks and has_long_writes(raw)
        demand = msgspec.structs.replace(turn.demand, needs=needs, has_long_writes=is_long, is_output_bound=True)
        if native is not None:
            bound = prompt_tokens_max(len(raw), len(request.messages), native.media)
            least = 0 if native.media else demand.prompt_tokens_min
            bound = max(bound, demand.prompt_tokens_max)
            demand = msgspec.structs.replace(
                demand,
                prompt_tokens_min=least,
                prompt_tokens_max=bound,
                compacts=b"compact" in msgspec.json.encode(body.get("context_management")),
            )
        turn = apart_from_cache(turn, {"diagnostics": body.get("diagnostics")})
        kept = {**marked, **answer, "model": turn.alias} if is_marked else None
        turn = msgspec.structs.replace(turn, native=native, demand=demand, marked=kept)
        estimated = demand.prompt_tokens
        note_ids = partial(self._objects.own, team_id=call.identity.team.id) if self._objects.have_owners else None
        deployments = self._pipeline.fleet.alias(request.model).deployments.values() if native is not None else ()
        sent, id = {one.model for one in deployments}, call.arrival.request_id
        return turn, MessageRenderer(request.model, turn.is_stream, id, estimated, note_ids, sent)


class CountTokens(InAnthropicsShape, ObjectEndpoint):
    """The endpoint for the tokens of a prompt. One instance per worker.

    An `anthropic` deployment counts them itself; a local engine counts exactly, except tools. Else
    the count is the estimate that routing and budgets use.
    """

    operation = "count_tokens"

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._objects = NamedObjects(pipeline)

    async def answer(self, call: Call) -> Any:
        raw, body = await self.body(call)
        await self._objects.check(raw, call.identity.team.id)
        request: PromptRequest = convert(body, PromptRequest)
        native = _native(self._pipeline.fleet, request, body, raw, call.headers)
        chat, _ = _translated(convert(bare := _bare(body), PromptRequest), bare, native)
        alias = self.alias(call, request.model)
        if self._pipeline.settings.is_masked(alias.name, call.identity.team.name):  # no server gets the values
            native = None
        for deployment in alias.deployments.values():
            is_up = not deployment.absence and self._pipeline.guards.may_send(call.identity.team, alias, deployment)
            if native is not None and is_up and isinstance(deployment.backend, AnthropicBackend):
                name = deployment.model if alias.is_pattern else ""
                with contextlib.suppress(BackendError, KeyError):  # the estimate needs no server
                    tokens = await deployment.backend.count_tokens(native, call.arrival.request_id, name)
                    return {"input_tokens": tokens}
        return {"input_tokens": await counted(alias, chat)}


def _native(
    fleet: Fleet, request: PromptRequest, body: dict[str, Any], raw: bytes, headers: Mapping[str, str]
) -> Native | None:
    """The request for Anthropic's own API, or None if no deployment of its alias speaks that API."""
    alias = fleet.aliases.get(fleet.configured(request.model))
    if alias is None or not any("messages" in one.capabilities for one in alias.deployments.values()):
        return None
    sent = (headers.get(name, "") for name in ("anthropic-version", "anthropic-beta"))
    version, betas = [value if value.isascii() and value.isprintable() else "" for value in sent]
    lacking_parts = _unsaid(request.system, "system")
    for number, turn in enumerate(body["messages"]):
        lacking_parts += [*_unsaid(turn["content"], number), *_further(turn, ("role", "content"), number)]
        if turn["role"] == "system" or (number and turn["role"] == body["messages"][number - 1]["role"]):
            lacking_parts.append([number, turn["role"]])  # a chat completion has it in another place, or may join it
    media = _media(lacking_parts)
    for number, tool in enumerate(request.tools or ()):
        lacking_parts += _further(tool, _TOOL_FIELDS, "tools", number)
    lacking_parts += _further(body.get("tool_choice") or {}, _Choice.__struct_fields__, "tool_choice")
    said: dict[str, Any] = {"blocks": lacking_parts, "betas": betas}
    said |= {"thinking": body.get("thinking"), "context_management": body.get("context_management")}
    if b'"signature"' in raw or b'"redacted_thinking"' in raw:
        raw = _without_sealed(body, raw)
    return Native(raw.removeprefix(BOM), version, betas, said if any(said.values()) else None, media)


def _without_sealed(body: dict[str, Any], raw: bytes) -> bytes:
    """`raw` without thinking of other servers, which Anthropic refuses: it has not signed that."""
    turns = [
        {**turn, "content": [block for block in turn["content"] if not _is_unsigned(block)]}
        if isinstance(turn["content"], list)
        else turn
        for turn in body["messages"]
    ]
    return raw if turns == body["messages"] else msgspec.json.encode({**body, "messages": turns})


def _is_unsigned(block: Any) -> bool:
    is_thought = isinstance(block, dict) and block.get("type") in ("thinking", "redacted_thinking")
    return is_thought and not is_signed(block.get("signature", block.get("data")))


def _translated(
    request: PromptRequest, body: dict[str, Any], native: Native | None
) -> tuple[dict[str, Any], Native | None]:
    """The equivalent chat completion, with its marks, and the native request. Raises BadRequest."""
    try:
        return _chat(request, body), native
    except BeyondChat:
        if native is None:
            raise
        return _stand_in(request, body, native)


# they change no answer, or `_chat` translates them
_DROPPED = frozenset(
    {"metadata", "stream_options", "max_tokens", "stop_sequences", "cache_control", "context_management", "diagnostics"}
)


def _chat(request: PromptRequest, body: Mapping[str, Any]) -> dict[str, Any]:
    """The equivalent chat completion, without the fields that `MessageRequest` adds.

    Fields of neither struct stay as they are. Raises BadRequest with the invalid field.
    """
    if body.get("thread") is not None:
        raise ThreadUnsupported
    if body.get("container"):
        raise BeyondChat("container", "`container` is not supported here: only Anthropic's API has containers")
    for name in ("n", "logprobs", "audio"):
        if body.get(name) and (name, body[name]) != ("n", 1):
            words = "a message is one text, without log probabilities; /v1/chat/completions has them"
            raise BeyondChat(name, f"`{name}` is not supported here: {words}")
    choice, config = request.tool_choice, request.output_config or _OutputConfig()
    if further := set(body.get("output_config") or ()) - set(_OutputConfig.__struct_fields__):
        raise _no_such_field("output_config", min(further))
    if request.thinking is not None and request.thinking.type not in ("enabled", "disabled", "adaptive"):
        raise BeyondChat("thinking.type", "`thinking.type` may be enabled, disabled or adaptive here")
    translated = {
        "messages": [*_system(request.system), *_dialogue(request.messages)],
        "tools": [_tool(tool, f"tools[{number}]") for number, tool in enumerate(request.tools or ())] or None,
        "tool_choice": _tool_choice(choice),
        "parallel_tool_calls": False if choice is not None and choice.disable_parallel_tool_use else None,
        "response_format": _response_format(config.format or request.output_format),
        "reasoning_effort": config.effort or _effort(request.thinking),
        "service_tier": "default" if request.service_tier == "standard_only" else request.service_tier,
    }
    if not request.tools:  # of chat completions, these go with tools only
        translated["parallel_tool_calls"] = translated["tool_choice"] = None
    known = _DROPPED.union(PromptRequest.__struct_fields__) - {"model"}
    shared = {name: value for name, value in body.items() if name not in known}
    return shared | {name: value for name, value in translated.items() if value is not None}


def _no_such_field(where: str, name: str) -> BeyondChat:
    return BeyondChat(f"{where}.{name}", f"`{where}.{name}` is not supported here: leave it out")


def _stand_in(request: PromptRequest, body: Mapping[str, Any], native: Native) -> tuple[dict[str, Any], Native]:
    """A chat completion that carries the demand of a request for Anthropic's API alone.

    It has no user's text, so the semantic cache ignores it; `apart` holds the whole prompt.
    """
    known = _DROPPED.union(PromptRequest.__struct_fields__) - {"model", "tools"}
    prompt = {name: value for name, value in body.items() if name not in ("cache", "metadata", "stream")}
    chat = {name: value for name, value in body.items() if name not in known}
    chat["messages"] = [{"role": "assistant", "content": msgspec.json.encode(prompt).decode()}]
    # a tool that no chat completion says is reserved by its type, or changes nothing of demand and limits
    chat["tools"] = [tool for tool in request.tools or () if tool.get("type") not in (None, "custom")] or None
    return chat, msgspec.structs.replace(native, apart=[native.apart, _bare(prompt)], is_needed=True)


def _unsaid(content: _Content | None, *path: str | int) -> list[Any]:
    """The parts of a content that its chat completion lacks, each with its path.

    Lacking are all fields of a block other than a plain text, call or result, and the order if the
    chat completion's differs.
    """
    if not isinstance(content, list):
        return []
    lacking_parts: list[Any] = []
    kind_before: Any = None
    for number, block in enumerate(content):
        block_path, kind = (*path, number), block.get("type") if isinstance(block, dict) else None
        match kind:
            case "text":
                lacking_parts += _further(block, ("type", "text"), *block_path)
                if number:  # the translation may join texts, or have them before calls
                    lacking_parts.append([*block_path, block.get("text")])
            case "tool_use":
                lacking_parts += _further(block, ("type", "id", "name", "input"), *block_path)
            case "tool_result":
                lacking_parts += _further(block, ("type", "tool_use_id", "content"), *block_path)
                lacking_parts += _unsaid(block.get("content"), *block_path)
                if number and kind_before != "tool_result":
                    lacking_parts.append([*block_path, "tool_result"])
            case _:
                lacking_parts.append([*block_path, _bare(block)])
        kind_before = kind
    return lacking_parts


def _media(value: Any, name: str = "") -> int:
    """Count the parts of `value`, the field `name`, that may have more tokens than bytes: URLs, ids
    and compressed data.
    """
    if isinstance(value, list):
        return sum(_media(item, name) for item in value)
    if not isinstance(value, dict):
        return 0
    own = value.get("type") not in ("text", "content") if name == "source" else "file_id" in value
    return own + sum(_media(item, name) for name, item in value.items())


def _further(fields: Mapping[str, Any], known_fields: Collection[str], *path: str | int) -> list[Any]:
    further = {name: value for name, value in fields.items() if name not in known_fields and value is not None}
    return [[*path, bare]] if (bare := _bare(further)) else []


_TOOL_FIELDS = frozenset({"type", "name", "description", "input_schema", "strict"})


# what has blocks; elsewhere, as in a tool's input, `cache_control` is a name like another
_HOLDERS = frozenset({"messages", "system", "tools", "content", "source"})


def _bare(value: Any, has_marks: bool = True) -> Any:
    """`value` without its blocks' `cache_control` marks, which change no answer."""
    if isinstance(value, dict):
        rest = ((name, item) for name, item in value.items() if not has_marks or name != "cache_control")
        return {name: _bare(item, has_marks and name in _HOLDERS) for name, item in rest}
    return [_bare(item, has_marks) for item in value] if isinstance(value, list) else value


def _system(given: _Content | None, where: str = "system") -> list[dict[str, Any]]:
    if not given:
        return []
    content = given if isinstance(given, str) else _joined([_text(part, where, i) for i, part in enumerate(given)])
    return [{"role": "system", "content": content}]


def _text(block: Mapping[str, Any], where: str, number: int) -> dict[str, Any]:
    if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
        raise _no_such_block(block, f"{where}[{number}]", "text")
    return {"type": "text", "text": block["text"], **_mark(block)}


def _joined(parts: list[dict[str, Any]]) -> _Content:
    """The content of a message. A single unmarked text becomes a string, to share cached answers."""
    return parts[0]["text"] if len(parts) == 1 and parts[0].keys() == {"type", "text"} else parts


def _mark(block: Mapping[str, Any]) -> dict[str, Any]:
    """The mark of a provider's prompt cache, as litellm and OpenRouter take it in chat completions."""
    mark = block.get("cache_control")
    return {"cache_control": mark} if mark else {}


def _dialogue(turns: list[_Said]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    calls = set[str]()
    for number, turn in enumerate(turns):
        where = f"messages[{number}].content"
        if turn.role == "system":
            messages += _system(turn.content, where)
        elif isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        elif turn.role == "assistant":
            messages.append(_assistants(turn.content, where))
            calls.update(call["id"] for call in messages[-1].get("tool_calls", ()))
        else:
            messages += _users(turn.content, where, calls)
    if turns[-1].role == "assistant":
        if not messages[-1]["content"] or "tool_calls" in messages[-1]:
            raise BeyondChat(f"messages[{len(turns) - 1}].content", "A last message of the assistant may be a text")
        messages[-1]["prefix"] = True
    return messages


def _assistants(blocks: list[dict[str, Any]], where: str) -> dict[str, Any]:
    texts, calls, mark = list[str](), list[dict[str, Any]](), dict[str, Any]()
    carried, of_calls = dict[str, Any](), dict[str, dict[str, Any]]()
    for number, block in enumerate(blocks):
        match block:
            case {"type": "text", "text": str(text)}:
                texts.append(text)
                mark = _mark(block)
            case {"type": "tool_use", "id": str(id), "name": str(name), "input": dict(given)}:
                arguments = msgspec.json.encode(given).decode()
                function = {"name": name, "arguments": arguments}
                calls.append({"id": id, "type": "function", "function": function, **_mark(block)})
            case {"type": "thinking" | "redacted_thinking"}:  # others' have no field in a chat completion
                restore(carried, of_calls, block.get("signature") or block.get("data"), block.get("thinking") or "")
            case _:
                raise _no_such_block(block, f"{where}[{number}]", "text, tool_use, thinking, redacted_thinking")
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts or not calls else None, **mark}
    message |= carried
    calls = [{**of_calls.get(call["id"], {}), **call} for call in calls]
    return {**message, "tool_calls": calls} if calls else message


def _users(blocks: list[dict[str, Any]], where: str, calls: set[str]) -> list[dict[str, Any]]:
    """Translate a user's blocks: a message for each tool result, then one message for the other
    blocks.

    A tool's message can hold text alone, so the media of a result follow in the user's message, and
    the text refers to them.
    """
    results, parts = list[dict[str, Any]](), list[dict[str, Any]]()
    for number, block in enumerate(blocks):
        block_where = f"{where}[{number}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, block_where) | _mark(block))
            continue
        result: _Result = convert(block, _Result, block_where)
        if result.tool_use_id not in calls:
            words = f"No tool_use block with the id {result.tool_use_id[:100]} is before this tool_result"
            raise BadRequest(words, param=f"{block_where}.tool_use_id", code="invalid_value")
        given = [{"type": "text", "text": result.content}] if isinstance(result.content, str) else result.content or []
        translated = [_part(part, f"{block_where}.content[{i}]") for i, part in enumerate(given)]
        texts = list[str]()
        for part in translated:
            if part["type"] == "text":
                texts.append(part["text"])
            else:
                texts.append(f"[{part['type'].removesuffix('_url')} {len(parts) + 1} of the next message]")
                parts.append(part)
        text = "\n".join(texts)
        failed = "Error: " if result.is_error and not text.lower().startswith("error") else ""
        told = {"role": "tool", "tool_call_id": result.tool_use_id, "content": failed + text}
        results.append(told | _mark(block))
    return results + ([{"role": "user", "content": _joined(parts)}] if parts or not results else [])


class _Result(msgspec.Struct):
    tool_use_id: str
    content: _Content | None = None
    is_error: bool | None = None


def _part(block: dict[str, Any], where: str) -> dict[str, Any]:
    cited = block.get("citations")
    if isinstance(cited, dict) and cited.get("enabled"):
        raise _no_such_field(where, "citations")
    match block:
        case {"type": "text", "text": str(text)}:
            return {"type": "text", "text": text}
        case {"type": "image", "source": {"type": "url", "url": str(url)}}:
            return {"type": "image_url", "image_url": {"url": url}}
        case {"type": "image", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            return {"type": "image_url", "image_url": {"url": f"data:{kind};base64,{data}"}}
        case {"type": "document", "source": {"type": "text", "data": str(text)}}:
            return {"type": "text", "text": _titled(block, text)}
        case {"type": "document", "source": {"type": "base64", "media_type": str(kind), "data": str(data)}}:
            name = block.get("title")
            fields = {"filename": name if isinstance(name, str) else "document.pdf"}
            return {"type": "file", "file": {**fields, "file_data": f"data:{kind};base64,{data}"}}
        case {"type": "search_result", "content": list(content)}:
            texts = [_text(part, f"{where}.content", i)["text"] for i, part in enumerate(content)]
            return {"type": "text", "text": _titled(block, "\n".join(texts))}
    raise _no_such_block(
        block, where, "text, image and document (by base64, text or, of images, url), search_result, tool_result"
    )


def _titled(block: Mapping[str, Any], text: str) -> str:
    """A text preceded by lines with its block's title, source and context."""
    heads = (block.get(name) for name in ("title", "source", "context"))
    return "\n".join([*(head for head in heads if isinstance(head, str) and head), text])


def _no_such_block(block: Any, where: str, expected: str) -> BadRequest:
    kind = msgspec.json.encode(block.get("type") if isinstance(block, dict) else None).decode()[:100]
    words = f"A content block of the type {kind}, with these fields, is not supported here: expected {expected}"
    return BeyondChat(where, words)


class ClientTool(msgspec.Struct, kw_only=True):
    """A function that the client runs."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] = msgspec.field(name="input_schema")
    strict: bool | None = None


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    """A client's tool as a function. A tool of another type is reserved and stays unchanged."""
    if tool.get("type") not in (None, "custom"):
        return tool
    client_tool: ClientTool = convert(tool, ClientTool, where)
    told = {name for name, value in tool.items() if value is not None and (name, value) != _BY_MODELS}
    if further := told - _TOOL_FIELDS - _TOOL_HINTS:
        raise _no_such_field(where, min(further))
    function = {name: value for name, value in msgspec.structs.asdict(client_tool).items() if value is not None}
    return {"type": "function", "function": function, **_mark(tool)}


# how a tool is sent, or when its definition enters the prompt
_TOOL_HINTS = frozenset({"cache_control", "defer_loading", "eager_input_streaming"})
_BY_MODELS = ("allowed_callers", ["direct"])  # the default


def _tool_choice(choice: _Choice | None) -> str | dict[str, Any] | None:
    if choice is None or choice.type == "auto":
        return None
    if choice.type != "tool":
        return {"any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise MissingField("tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _response_format(format: _Format | None) -> dict[str, Any] | None:
    if format is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": format.schema, "strict": True}}


def _effort(thinking: _Thinking | None) -> str | None:
    """The effort for a thinking budget, by the budgets that Anthropic's guide gives for each
    effort.
    """
    if thinking is None or thinking.type != "enabled" or thinking.budget_tokens is None:
        return None
    return "low" if thinking.budget_tokens < 4096 else "medium" if thinking.budget_tokens < 16384 else "high"
