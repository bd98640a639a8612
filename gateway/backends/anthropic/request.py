"""Translates a chat completion's request into one of Anthropic's Messages API.

Shapes: OpenAI API reference, "Create chat completion"; Anthropic API reference, "Messages". Knows
no HTTP. Invariant: a field that changes the answer is translated or refused by its name. Fields of
neither API are passed on for the server to check.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.backends.refusals import check_verbosity, unfit

OUTPUT_TOKENS = 4096  # Anthropic requires a maximum; OpenAI's clients may leave it out
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 4096, "high": 16384}  # of thinking, in tokens
_BUDGET_MIN = 1024  # the least that Anthropic takes
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)
# how an answer is sent, billed or attributed, or best effort by OpenAI's own reference
_DELIVERY = """
    cache stream stream_options seed n store metadata prompt_cache_key prompt_cache_retention safety_identifier
    verbosity logprobs top_logprobs
"""
_TRANSLATED = """
    model messages max_tokens max_completion_tokens stop tools tool_choice parallel_tool_calls response_format
    reasoning_effort user service_tier
"""
# a zero or nothing at all changes no answer
_REFUSED = "presence_penalty frequency_penalty logit_bias functions function_call prediction audio thread"
_KNOWN = frozenset({*_DELIVERY.split(), *_TRANSLATED.split(), *_REFUSED.split()})


def to_message(body: Mapping[str, Any]) -> dict[str, Any]:
    """The Messages API's request for a chat completion's, without `model` and `stream`.

    Raises BackendUnfit with the name of a field that the Messages API cannot express.
    """
    try:
        return _message(body)
    except (AttributeError, TypeError) as error:  # such as a call that is a number, which other servers judge
        words = "The messages, the tools or another field have a value of a type that this model's API does not take"
        raise unfit(words, "messages") from error


def _message(body: Mapping[str, Any]) -> dict[str, Any]:
    for name in _REFUSED.split():
        if body.get(name):
            raise unfit(f"`{name}` is not supported by this model's API", name)
    check_verbosity(body)
    system, messages = _dialogue(body["messages"])
    stop = body.get("stop")
    message = {
        "messages": messages,
        "system": system or None,
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or OUTPUT_TOKENS,
        "stop_sequences": ([stop] if isinstance(stop, str) else stop) or None,
        "tools": [_tool(tool) for tool in body.get("tools") or ()] or None,
        "metadata": {"user_id": body["user"]} if body.get("user") else None,
        # OpenAI's tiers that need no permission are Anthropic's usual one
        "service_tier": "standard_only"
        if body.get("service_tier") in ("default", "flex")
        else body.get("service_tier"),
        **_tool_choice(body),
        **_format(body.get("response_format")),
    }
    effort = body.get("reasoning_effort")
    if effort in _BUDGETS and body.get("thinking") is None:
        # both APIs' maximum includes the thinking, and no more than it is reserved and charged
        budget = min(_BUDGETS[effort], message["max_tokens"] // 2)
        message["thinking"] = {"type": "enabled", "budget_tokens": budget} if budget >= _BUDGET_MIN else None
    elif effort not in (None, "none"):
        raise unfit(f"`reasoning_effort` may be none, {', '.join(_BUDGETS)}", "reasoning_effort")
    if (body.get("temperature") or 0) > 1:
        raise unfit("`temperature` is at most 1 for this model's API", "temperature")
    others = {name: value for name, value in body.items() if name not in _KNOWN}
    return {name: value for name, value in {**others, **message}.items() if value is not None}


def _dialogue(chat_messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The system's blocks, and the messages; consecutive messages of one role are merged."""
    system: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(chat_messages):
        where, role = f"messages[{number}]", message["role"]
        if role in ("system", "developer"):
            system += _blocks(message.get("content"), where)
            continue
        if role == "tool":
            content = _blocks(message.get("content"), where)
            blocks = [{"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": content}]
        elif role == "assistant":
            blocks = _said(message, where)
        elif role == "user":
            blocks = _blocks(message.get("content"), where)
        else:
            raise unfit(f"`{where}.role` `{role}` is not supported by this model's API", f"{where}.role")
        name = "assistant" if role == "assistant" else "user"
        if messages and messages[-1]["role"] == name:
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": name, "content": blocks})
    return system, messages


def _said(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The blocks of an assistant's message. `thinking_blocks` come from an earlier answer."""
    thoughts = message.get("thinking_blocks") or ()
    blocks = [{name: value for name, value in one.items() if name != "index"} for one in thoughts]
    blocks += _blocks(message.get("content"), where)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        try:
            arguments = msgspec.json.decode(function.get("arguments") or "{}")
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise unfit(f"`{where}.tool_calls` has arguments that are no JSON object", f"{where}.tool_calls")
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments})
    return blocks


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []  # Anthropic refuses an empty text
    return [_block(part, f"{where}.content[{number}]") for number, part in enumerate(content or ())]


def _block(part: dict[str, Any], where: str) -> dict[str, Any]:
    cache_mark = {"cache_control": part["cache_control"]} if part.get("cache_control") else {}
    match part:
        case {"type": "text", "text": str(text)} | {"type": "refusal", "refusal": str(text)}:
            return {"type": "text", "text": text, **cache_mark}
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return {"type": "image", "source": _source(url), **cache_mark}
        case {"type": "file", "file": {"file_data": str(url), **more}} if _DATA.fullmatch(url):
            title = {"title": more["filename"]} if more.get("filename") else {}
            return {"type": "document", "source": _source(url), **title, **cache_mark}
    kind = msgspec.json.encode(part.get("type")).decode()[:100]
    raise unfit(f"`{where}` has a part that this model's API does not take: {kind}", where)


def _source(url: str) -> dict[str, Any]:
    data_url = _DATA.fullmatch(url)
    if data_url is None:
        return {"type": "url", "url": url}
    return {"type": "base64", "media_type": data_url[1], "data": data_url[2]}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as a client tool; a tool of another type stays unchanged."""
    function = tool.get("function")
    if isinstance(tool.get("custom"), dict):
        raise unfit("`tools` of the type `custom` have no schema, which this model's API requires", "tools")
    if tool.get("type") != "function" or not isinstance(function, dict):
        return tool
    fields = {
        "name": function.get("name"),
        "description": function.get("description"),
        "input_schema": function.get("parameters") or {"type": "object", "properties": {}},
        "strict": function.get("strict") or None,
        "cache_control": tool.get("cache_control"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool_choice(body: Mapping[str, Any]) -> dict[str, Any]:
    if not body.get("tools"):
        return {}
    match body.get("tool_choice"):
        case None | "auto":
            choice = {"type": "auto"}
        case "none":
            return {"tool_choice": {"type": "none"}}
        case "required":
            choice = {"type": "any"}
        case {"type": "function", "function": {"name": str(name)}}:
            choice = {"type": "tool", "name": name}
        case _:
            raise unfit("`tool_choice` may be none, auto, required or a function for this model's API", "tool_choice")
    if body.get("parallel_tool_calls") is False:
        return {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
    return {"tool_choice": choice} if body.get("tool_choice") is not None else {}


def _format(format: Any) -> dict[str, Any]:
    match format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    words = "`response_format` may be text or json_schema with a `schema` for this model's API"
    raise unfit(words, "response_format")
