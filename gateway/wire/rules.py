"""The rules that OpenAI checks beyond types and ranges: which fields of a request need one another.

Managed servers check them; a local engine would ignore such a field. Sources: OpenAI API reference,
"Create chat completion" and "Create completion", and the API's own errors, whose `param` and `code`
these errors have. Pure. Knows no deployments.
"""

from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from gateway.wire.errors import BadRequest
from gateway.wire.requests import convert
from gateway.wire.types import CHAT, Kind

# the fields that are only allowed with another one
_ONLY_WITH_STREAM = {"stream_options": "stream"}
_ONLY_WITH = {
    **_ONLY_WITH_STREAM,
    "top_logprobs": "logprobs",
    "tool_choice": "tools",
    "parallel_tool_calls": "tools",
    "function_call": "functions",
}


class _EngineFields(msgspec.Struct):
    """The fields whose values a local engine bounds as OpenAI does."""

    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None


class _FunctionName(msgspec.Struct):
    name: Annotated[str, Meta(max_length=64, pattern=r"^[a-zA-Z0-9_-]+$")]


class _JsonSchema(msgspec.Struct, tag_field="type", tag="json_schema"):
    json_schema: _FunctionName


class _JsonObject(msgspec.Struct, tag_field="type", tag="json_object"):
    pass


class _PlainText(msgspec.Struct, tag_field="type", tag="text"):
    pass


class _EngineChat(_EngineFields):
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=128)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    response_format: _JsonSchema | _JsonObject | _PlainText | None = None


class _CalledFunction(msgspec.Struct):
    name: str
    arguments: str


class _AnsweredCall(msgspec.Struct):
    id: str
    type: str


class _EngineAllowedTools(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], Meta(min_length=1)]


class _Limit(NamedTuple):
    sign: str  # a part of the error about a value beyond it
    code: str


_LIMITS = (
    _Limit("`array` of length <=", code="array_above_max_length"),
    _Limit("`array` of length >=", code="empty_array"),
    _Limit("`string` of length <=", code="string_above_max_length"),
)


def check_rules(body: dict[str, Any], kind: Kind) -> None:
    """Check a request's `body`, whose types have been checked.

    Raises BadRequest for the first broken rule.
    """
    if kind.is_plain:
        return
    is_chat = kind is CHAT
    fields = _checked(body, _EngineChat if is_chat else _EngineFields)
    for name, other in (_ONLY_WITH if is_chat else _ONLY_WITH_STREAM).items():
        if body.get(name) is not None and not body.get(other):
            raise BadRequest(f"The '{name}' parameter is only allowed with '{other}'.", param=name)
    if is_chat:
        _check_tools(fields.tools or (), fields.tool_choice)
        _check_messages(body["messages"])


def _check_tools(tools: Any, choice: Any) -> None:
    names: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.get("type") == "function":
            where = f"tools[{index}].function"
            name = _name_of(tool, where)
            if name in names:
                words = f"Invalid '{where}.name': another tool is named '{name}'."
                raise BadRequest(words, param=f"{where}.name", code="invalid_value")
            names.add(name)
    if isinstance(choice, dict):
        _check_choice(choice, names, [tool.get("type") for tool in tools])


def _check_choice(choice: dict[str, Any], names: set[str], types: list[Any]) -> None:
    if choice.get("type") == "function":
        name = _name_of(choice, "tool_choice.function")
        if name not in names:
            message = f"Tool choice '{name}' not found in 'tools' parameter."
            raise BadRequest(message, param="tool_choice", code="invalid_value")
    elif choice.get("type") == "allowed_tools":
        allowed: _EngineAllowedTools = convert(
            choice.get("allowed_tools", {}), _EngineAllowedTools, "tool_choice.allowed_tools"
        )
        for tool in allowed.tools:
            if tool.get("type") not in types:
                message = "'tool_choice.allowed_tools.tools' has a tool of a type that 'tools' does not have."
                raise BadRequest(message, param="tool_choice", code="invalid_value")
            _check_choice(tool, names, types)


def _name_of(owner: dict[str, Any], where: str) -> str:
    """The name of a function in `owner`, a tool or a `tool_choice`."""
    name: str = _checked(owner.get("function"), _FunctionName, where).name
    return name


def _checked(owner: Any, shape: type[Any], where: str = "") -> Any:
    """Convert `owner` to a struct; a null counts as missing. Raises BadRequest with OpenAI's code."""
    given = {name: value for name, value in owner.items() if value is not None} if isinstance(owner, dict) else {}
    try:
        return convert(given, shape, where)
    except BadRequest as error:
        error.error_code = next((limit.code for limit in _LIMITS if limit.sign in error.message), error.error_code)
        error.param = error.param and error.param.removesuffix("[...]")
        raise


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Check that each tool call has its answer in the messages after it, and each answer its call."""
    calls, unanswered = set[str](), set[str]()
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            _check_answer(message, calls, f"messages.[{index}]")
            unanswered.discard(message["tool_call_id"])
            continue
        if unanswered:
            raise _unanswered(unanswered, f"messages.[{index}].role")
        calls = _calls(message, index) if role == "assistant" else set()
        unanswered = set(calls)
    if unanswered:
        raise _unanswered(unanswered, "messages")


def _check_answer(message: dict[str, Any], calls: set[str], where: str) -> None:
    id = message.get("tool_call_id")
    if id is None:
        reason = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        raise BadRequest(reason, param=f"{where}.tool_call_id")
    if id not in calls:
        reason = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        raise BadRequest(f"Invalid parameter: {reason}", param=f"{where}.role")


def _calls(message: dict[str, Any], index: int) -> set[str]:
    """The ids of the calls in an assistant's message."""
    calls = message.get("tool_calls")
    if calls is None and all(message.get(name) is None for name in ("content", "function_call", "refusal", "audio")):
        param = f"messages.[{index}].content"
        raise BadRequest("Invalid value for 'content': expected a string, got null.", param=param)
    if calls == []:
        param = f"messages[{index}].tool_calls"
        raise BadRequest(f"Invalid '{param}': empty array.", param=param, code="empty_array")
    ids = set[str]()
    for number, call in enumerate(calls or ()):
        where = f"messages[{index}].tool_calls[{number}]"
        kind: _AnsweredCall = _checked(call, _AnsweredCall, where)
        ids.add(kind.id)
        if kind.type == "function":
            _checked(call.get("function"), _CalledFunction, f"{where}.function")
    return ids


def _unanswered(ids: set[str], param: str) -> BadRequest:
    sentence = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
    )
    lacking = ", ".join(sorted(ids))[:500]
    return BadRequest(f"{sentence} The following tool_call_ids did not have response messages: {lacking}", param=param)
