"""The rules that OpenAI checks beyond types and ranges: which fields of a request need one another.

Managed servers check them; a local engine would answer as if the field had not been sent. Sources:
OpenAI API reference, "Create chat completion" and "Create completion", and the errors that the API
answers with, whose `param` and `code` these have. Pure. Knows no deployments.
"""

import re
from typing import Annotated, Any, Literal

import msgspec

from gateway.wire.errors import BadRequest
from gateway.wire.requests import convert, json_name
from gateway.wire.types import CHAT, Kind

_STOPS_MAX = 4
_TOOLS_MAX = 128
_BIAS_MAX = 100
_NAME_CHARS_MAX = 64
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
_FORMATS = ("text", "json_object", "json_schema")
_CHOICES = ("none", "auto", "required")


def check_rules(body: dict[str, Any], kind: Kind) -> None:
    """Check a request's `body`, whose types have been checked.

    Raises BadRequest for the first broken rule.
    """
    if kind.is_plain:
        return
    stop = body.get("stop")
    if isinstance(stop, list) and len(stop) > _STOPS_MAX:
        raise _too_long("stop", len(stop), _STOPS_MAX)
    if body.get("stream_options") is not None and not body.get("stream"):
        raise _only_with("stream_options", "'stream' is enabled")
    for token, bias in (body.get("logit_bias") or {}).items():
        if not -_BIAS_MAX <= bias <= _BIAS_MAX:
            what = f"Expected a value from {-_BIAS_MAX} to {_BIAS_MAX}, but got {bias:g} instead."
            raise BadRequest(f"Invalid 'logit_bias.{token}': {what}", param="logit_bias", code="invalid_value")
    if kind is not CHAT:
        return
    if body.get("top_logprobs") is not None and not body.get("logprobs"):
        raise _only_with("top_logprobs", "'logprobs' is enabled")
    _check_tools(body)
    _check_format(body.get("response_format"))
    _check_messages(body["messages"])


def _check_tools(body: dict[str, Any]) -> None:
    tools = body.get("tools")
    if tools is None:
        for name in ("tool_choice", "parallel_tool_calls"):
            if body.get(name) is not None:
                raise _only_with(name, "'tools' are specified", is_value=True)
    elif not tools:
        raise _empty("tools")
    elif len(tools) > _TOOLS_MAX:
        raise _too_long("tools", len(tools), _TOOLS_MAX)
    if body.get("function_call") is not None and body.get("functions") is None:
        raise _only_with("function_call", "'functions' are specified", is_value=True)
    names: set[Any] = set()
    for index, tool in enumerate(tools or ()):
        if tool.get("type") == "function":
            param = f"tools[{index}].function.name"
            name = _name(tool.get("function"), param)
            if name in names:
                raise BadRequest(
                    f"Invalid '{param}': another tool is named '{name}'.", param=param, code="invalid_value"
                )
            names.add(name)
    _check_choice(body.get("tool_choice"), names, tools or [])


def _check_choice(choice: Any, names: set[Any], tools: list[dict[str, Any]]) -> None:
    if isinstance(choice, str) and choice not in _CHOICES:
        raise _unknown("tool_choice", choice, _CHOICES)
    if isinstance(choice, dict) and choice.get("type") == "function":
        name = _name(choice.get("function"), "tool_choice.function.name")
        if name not in names:
            message = f"Tool choice '{name}' not found in 'tools' parameter."
            raise BadRequest(message, param="tool_choice", code="invalid_value")
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        allowed: _Allowed = convert(choice.get("allowed_tools", {}), _Allowed, "tool_choice.allowed_tools")
        for one in allowed.tools:
            if one.get("type") not in [tool.get("type") for tool in tools]:
                message = "'tool_choice.allowed_tools.tools' has a tool of a type that 'tools' does not have."
                raise BadRequest(message, param="tool_choice", code="invalid_value")
            _check_choice(one, names, tools)


class _Allowed(msgspec.Struct):
    mode: Literal["auto", "required"]
    tools: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]


def _check_format(format: dict[str, Any] | None) -> None:
    if format is None:
        return
    if format["type"] not in _FORMATS:
        raise _unknown("response_format.type", format["type"], _FORMATS)
    if format["type"] == "json_schema":
        if format.get("json_schema") is None:
            raise _missing("response_format.json_schema")
        _name(format["json_schema"], "response_format.json_schema.name")


def _check_messages(messages: list[dict[str, Any]]) -> None:
    """Each call of a tool has its answer in the messages after it, and each answer its call."""
    calls, unanswered = set[str](), set[str]()
    for index, message in enumerate(messages):
        role = message["role"]
        if role == "tool":
            _check_answer(message, calls, index)
            unanswered.discard(message["tool_call_id"])
            continue
        if unanswered:
            raise _unanswered(unanswered, f"messages.[{index}].role")
        calls = _calls(message, index) if role == "assistant" else set()
        unanswered = set(calls)
    if unanswered:
        raise _unanswered(unanswered, "messages")


def _check_answer(message: dict[str, Any], calls: set[str], index: int) -> None:
    id = message.get("tool_call_id")
    if id is None:
        words = "Missing parameter 'tool_call_id': messages with role 'tool' must have a 'tool_call_id'."
        raise BadRequest(words, param=f"messages.[{index}].tool_call_id")
    if id not in calls:
        words = "messages with role 'tool' must be a response to a preceeding message with 'tool_calls'."
        raise BadRequest(f"Invalid parameter: {words}", param=f"messages.[{index}].role")


def _calls(message: dict[str, Any], index: int) -> set[str]:
    """The ids of the calls in an assistant's message."""
    given = message.get("tool_calls")
    if given is None:
        if all(message.get(name) is None for name in ("content", "function_call", "refusal", "audio")):
            param = f"messages.[{index}].content"
            raise BadRequest("Invalid value for 'content': expected a string, got null.", param=param)
        return set()
    if not given:
        raise _empty(f"messages[{index}].tool_calls")
    ids = set[str]()
    for number, call in enumerate(given):
        where = f"messages[{index}].tool_calls[{number}]"
        ids.add(_text(call, f"{where}.id"))
        kind = _text(call, f"{where}.type")
        inner = call.get(kind)
        if kind == "function":
            _text(inner, f"{where}.function.name")
            _text(inner, f"{where}.function.arguments")
    return ids


def _name(owner: Any, param: str) -> str:
    """The name of a function or a schema, which is the last part of `param`."""
    name = _text(owner, param)
    if len(name) > _NAME_CHARS_MAX:
        words = f"Expected a string with maximum length {_NAME_CHARS_MAX}, but got a string with length {len(name)} instead."
        raise BadRequest(f"Invalid '{param}': string too long. {words}", param=param, code="string_above_max_length")
    if not _NAME.fullmatch(name):
        words = f"Expected a string that matches the pattern '^{_NAME.pattern}$'."
        raise BadRequest(
            f"Invalid '{param}': string does not match pattern. {words}", param=param, code="invalid_value"
        )
    return name


def _text(owner: Any, param: str) -> str:
    value = owner.get(param.rpartition(".")[2]) if isinstance(owner, dict) else None
    if value is None:
        raise _missing(param)
    if not isinstance(value, str):
        message = f"Invalid type for '{param}': expected a string, but got {json_name(value)} instead."
        raise BadRequest(message, param=param, code="invalid_type")
    return value


def _missing(param: str) -> BadRequest:
    return BadRequest(f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter")


def _only_with(param: str, condition: str, is_value: bool = False) -> BadRequest:
    if is_value:
        return BadRequest(f"Invalid value for '{param}': '{param}' is only allowed when {condition}.", param=param)
    return BadRequest(f"The '{param}' parameter is only allowed when {condition}.", param=param)


def _unknown(param: str, value: str, known: tuple[str, ...]) -> BadRequest:
    values = ", ".join(f"'{one}'" for one in known)
    return BadRequest(
        f"Invalid value: '{value[:100]}'. Supported values are: {values}.", param=param, code="invalid_value"
    )


def _unanswered(ids: set[str], param: str) -> BadRequest:
    words = (
        "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'."
    )
    lacking = ", ".join(sorted(ids))[:500]
    return BadRequest(f"{words} The following tool_call_ids did not have response messages: {lacking}", param=param)


def _empty(param: str) -> BadRequest:
    words = "Expected an array with minimum length 1, but got an empty array instead."
    return BadRequest(f"Invalid '{param}': empty array. {words}", param=param, code="empty_array")


def _too_long(param: str, length: int, length_max: int) -> BadRequest:
    words = f"Expected an array with maximum length {length_max}, but got an array with length {length} instead."
    return BadRequest(f"Invalid '{param}': array too long. {words}", param=param, code="array_above_max_length")
