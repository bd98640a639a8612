"""Translates a chat completion's request into one of Anthropic's Messages API.

Shapes: OpenAI API reference, "Create chat completion"; Anthropic API reference, "Messages". Its
tools' schemas are `schemas.py`'s. Knows no HTTP. Invariant: a field that changes the answer is
translated or refused by its name. Fields of neither API are passed on for the server to check.
"""

import base64
import re
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from gateway.backends.anthropic.schemas import input_schema, output_schema
from gateway.backends.dialect import Dialect
from gateway.backends.fitting import DELIVERY, IDLE, check
from gateway.backends.refusals import unfit

_ANY_MODEL = Dialect()
OUTPUT_TOKENS = 4096  # Anthropic requires a maximum; OpenAI's clients may leave it out
# of thinking, in tokens
_BUDGETS = {"minimal": 1024, "low": 1024, "medium": 4096, "high": 16384, "xhigh": 32768, "max": 32768}
_BUDGET_MIN = 1024  # the least that Anthropic takes
_USER_CHARS = 256
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[\w.+-]+=[^;,]*)*;base64,(.*)", re.DOTALL)
_NOTHING = "(empty message)"  # Anthropic takes no user's turn without a text
_CONTINUE = "(continue)"  # OpenAI's models go on after an assistant's message; later Claudes need a user's
_NO_RESULT = "(no result)"
_TRANSLATED = """
    model messages max_tokens max_completion_tokens stop tools tool_choice parallel_tool_calls response_format
    reasoning_effort user service_tier temperature top_p n logprobs top_logprobs
"""
_REFUSALS = """
    presence_penalty frequency_penalty logit_bias functions function_call prediction audio thread modalities verbosity
"""
_REFUSED = frozenset(_REFUSALS.split())
_KNOWN = frozenset({*DELIVERY, *_TRANSLATED.split(), *_REFUSED})


def to_message(body: Mapping[str, Any], dialect: Dialect = _ANY_MODEL) -> dict[str, Any]:
    """The Messages API's request for a chat completion's, without `model` and `stream`.

    Raises BackendUnfit with the name of a field that the Messages API or this model cannot express.
    """
    try:
        return _message(body, dialect)
    except (AttributeError, TypeError) as error:  # such as a call that is a number, which other servers judge
        words = "The messages, the tools or another field have a value of a type that this model's API does not take"
        raise unfit(words, "messages") from error


def _message(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    check(body, _REFUSED)
    system, messages = _dialogue(body["messages"], dialect)
    message = {
        "messages": messages,
        "system": system or None,
        "max_tokens": body.get("max_completion_tokens") or body.get("max_tokens") or OUTPUT_TOKENS,
        "stop_sequences": _stop(body.get("stop")),
        "tools": [_tool(tool) for tool in body.get("tools") or ()] or _called(messages) or None,
        "metadata": {"user_id": _user(body["user"])} if body.get("user") else None,
        # OpenAI's tiers that need no permission are Anthropic's usual one; its priority is used where there is any
        "service_tier": _TIERS.get(body.get("service_tier"), body.get("service_tier")),
        **({"tool_choice": {"type": "none"}} if not body.get("tools") and _called(messages) else {}),
        **_tool_choice(body, dialect),
        **_format(body.get("response_format")),
    }
    message |= _thinking(body, message, dialect)
    message |= _sampling(body, dialect)
    others = {name: value for name, value in body.items() if name not in _KNOWN}
    return {name: value for name, value in {**others, **message}.items() if value is not None}


_TIERS: Mapping[Any, str] = {"default": "standard_only", "flex": "standard_only", "priority": "auto"}


def _user(user: Any) -> str:
    """`user`, which only attributes the request: a digest if it is longer than Anthropic takes."""
    text = str(user)
    return text if len(text) <= _USER_CHARS else blake2b(text.encode("utf-8", "replace"), digest_size=32).hexdigest()


def _stop(stop: Any) -> list[str] | None:
    stops = [stop] if isinstance(stop, str) else list(stop or ())
    if any(one and not one.strip() for one in stops):
        raise unfit("`stop` of white space alone is not supported by this model's API", "stop")
    return [one for one in stops if one] or None


def _thinking(body: Mapping[str, Any], message: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """What `reasoning_effort` asks for, in the model's own form.

    Both APIs' maximum includes the thinking, and no more than it is reserved and charged. Neither
    with a forced tool, nor inside a turn that began without it, nor beside a temperature does
    Anthropic take thinking; an effort, which is a hint, it takes there, too.
    """
    effort = body.get("reasoning_effort")
    if effort not in (None, "none", *_BUDGETS):
        raise unfit(f"`reasoning_effort` may be none, {', '.join(dialect.efforts or _BUDGETS)}", "reasoning_effort")
    is_forced = message.get("tool_choice", {}).get("type") in ("any", "tool")
    is_hindered = is_forced or _continues_without_thinking(message["messages"])
    is_hindered |= any(body.get(name) not in (None, 1) for name in ("temperature", "top_p"))
    if body.get("thinking") is not None:
        return {}
    if not dialect.efforts:
        budget = min(_BUDGETS.get(effort or "none", 0), message["max_tokens"] // 2)
        is_thinking = budget >= _BUDGET_MIN and not is_hindered
        return {"thinking": {"type": "enabled", "budget_tokens": budget}} if is_thinking else {}
    fields: dict[str, Any] = {}
    if effort in (None, "none"):
        is_off = dialect.thinking == "by_itself" and (effort == "none" or is_hindered)
        fields = {"thinking": {"type": "disabled"}} if is_off else {}
        level = "low" if effort == "none" and dialect.thinking == "always" else None
    else:
        level = "low" if effort == "minimal" else effort if effort in dialect.efforts else "high"
        if dialect.thinking == "adaptive" and not is_hindered:
            fields = {"thinking": {"type": "adaptive"}}
        elif dialect.thinking == "by_itself" and is_hindered:
            fields = {"thinking": {"type": "disabled"}}
    return fields | ({"output_config": {**message.get("output_config", {}), "effort": level}} if level else {})


def _continues_without_thinking(messages: list[dict[str, Any]]) -> bool:
    """Whether the last turn goes on after an assistant's text, or after calls without thinking before."""
    if messages[-1]["role"] == "assistant":
        return True
    if len(messages) < 2 or messages[-1]["content"][0].get("type") != "tool_result":
        return False
    return messages[-2]["content"][0].get("type") not in ("thinking", "redacted_thinking")


def _sampling(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
    """`temperature` and `top_p`, as the model takes them; raises BackendUnfit for others."""
    temperature, top_p = body.get("temperature"), body.get("top_p")
    if (temperature or 0) > 1:
        raise unfit("`temperature` is at most 1 for this model's API", "temperature")
    sampling = {"temperature": temperature, "top_p": top_p}
    # a value that changes nothing need not be said; the greedy choice is not cut by `top_p`
    given = {name: value for name, value in sampling.items() if value is not None and value != IDLE[name]}
    if temperature == 0:
        given.pop("top_p", None)
    if dialect.sampling == "none" and given:
        raise unfit(f"`{min(given)}` is not supported by this model", min(given))
    if dialect.sampling == "one" and len(given) > 1:
        raise unfit("`temperature` and `top_p` cannot both be set for this model: leave one out", "top_p")
    return given


def _dialogue(chat: list[dict[str, Any]], dialect: Dialect) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The system's blocks, and the messages; consecutive messages of one role are merged.

    Results stand first in the turn after their calls, one for each; other ones are texts.
    """
    system: list[dict[str, Any]] = []
    messages: list[dict[str, Any]] = []
    for number, message in enumerate(chat):
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
            blocks = _blocks(message.get("content"), where) or [{"type": "text", "text": _NOTHING}]
        else:
            raise unfit(f"`{where}.role` `{role}` is not supported by this model's API", f"{where}.role")
        name = "assistant" if role == "assistant" else "user"
        if messages and messages[-1]["role"] == name:
            messages[-1]["content"] += blocks
        elif blocks:
            messages.append({"role": name, "content": blocks})
    if not messages or messages[0]["role"] == "assistant":
        messages.insert(0, {"role": "user", "content": [{"type": "text", "text": _NOTHING}]})
    _pair(messages)
    if messages[-1]["role"] == "assistant":
        _end(messages, dialect)
    return system, messages


def _pair(messages: list[dict[str, Any]]) -> None:
    """Give each call its one result, at the head of the next user's turn."""
    for number, message in enumerate(list(messages)):
        if message["role"] == "assistant":
            continue
        before = messages[number - 1]["content"] if number else ()
        calls = [block["id"] for block in before if block["type"] == "tool_use"]
        results: dict[Any, dict[str, Any]] = {}
        others = []
        for block in message["content"]:
            if block["type"] != "tool_result":
                others.append(block)
            elif block["tool_use_id"] not in calls:
                others += block["content"] or [{"type": "text", "text": _NO_RESULT}]
            elif block["tool_use_id"] in results:
                results[block["tool_use_id"]]["content"] += block["content"]
            else:
                results[block["tool_use_id"]] = block
        missing = {"type": "tool_result", "content": _NO_RESULT, "is_error": True}
        message["content"] = [results.get(call) or {**missing, "tool_use_id": call} for call in calls] + others


def _end(messages: list[dict[str, Any]], dialect: Dialect) -> None:
    """Let a dialogue that ends with the assistant end as Anthropic takes it."""
    blocks = messages[-1]["content"]
    if any(block["type"] == "tool_use" for block in blocks) or not dialect.has_prefill:
        messages.append({"role": "user", "content": [{"type": "text", "text": _CONTINUE}]})
        _pair(messages)
    elif blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()


def _said(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The blocks of an assistant's message. `thinking_blocks` come from an earlier answer; those of
    other servers have no signature, and Anthropic takes none of them.
    """
    thoughts = [one for one in message.get("thinking_blocks") or () if one.get("signature") or one.get("data")]
    blocks = [{name: value for name, value in one.items() if name != "index"} for one in thoughts]
    blocks += _blocks(message.get("content"), where)
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        text = function.get("arguments") or "{}"
        try:
            arguments = text if isinstance(text, dict) else msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):  # platform.claude.com: Fine-grained tool streaming
            arguments = {"INVALID_JSON": text}
        blocks.append({"type": "tool_use", "id": call.get("id"), "name": function.get("name"), "input": arguments})
    return blocks


def _blocks(content: Any, where: str) -> list[dict[str, Any]]:
    """The blocks of a content, without texts of white space alone, which Anthropic refuses."""
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
    blocks = [_block(part, f"{where}.content[{number}]") for number, part in enumerate(parts)]
    return [block for block in blocks if block["type"] != "text" or block["text"].strip()]


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
    media, data = data_url[1].lower().replace("image/jpg", "image/jpeg"), data_url[2]
    if media.startswith("text/"):  # a text is a document without base64
        return {"type": "text", "media_type": "text/plain", "data": base64.b64decode(data).decode("utf-8", "replace")}
    return {"type": "base64", "media_type": media, "data": data}


def _called(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that a dialogue called: Anthropic takes no calls of tools that the request does not have."""
    names = [block["name"] for message in messages for block in message["content"] if block["type"] == "tool_use"]
    return [{"name": name, "input_schema": input_schema(None)} for name in dict.fromkeys(names)]


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A function as a client tool; a tool of another type stays unchanged."""
    function = tool.get("function")
    if isinstance(tool.get("custom"), dict):
        raise unfit("`tools` of the type `custom` have no schema, which this model's API requires", "tools")
    if tool.get("type") != "function" or not isinstance(function, dict):
        if not tool.get("name") and tool.get("type") != "mcp_toolset":
            raise unfit(f"`tools` of the type `{tool.get('type')}` are not this API's: its own have a `name`", "tools")
        return tool
    fields = {
        "name": function.get("name"),
        "input_schema": (output_schema if function.get("strict") else dict)(input_schema(function.get("parameters"))),
        "description": function.get("description") or None,
        "strict": function.get("strict") or None,
        "cache_control": tool.get("cache_control"),
    }
    return {name: value for name, value in fields.items() if value is not None}


def _tool_choice(body: Mapping[str, Any], dialect: Dialect) -> dict[str, Any]:
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
    if choice["type"] != "auto" and not dialect.can_force_tools:
        raise unfit("`tool_choice` may be none or auto for this model", "tool_choice")
    if body.get("parallel_tool_calls") is False:
        return {"tool_choice": {**choice, "disable_parallel_tool_use": True}}
    return {"tool_choice": choice} if body.get("tool_choice") is not None else {}


def _format(format: Any) -> dict[str, Any]:
    match format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"output_config": {"format": {"type": "json_schema", "schema": output_schema(schema)}}}
    words = "`response_format` may be text or json_schema with a `schema` for this model's API"
    raise unfit(words, "response_format")
