"""What Anthropic's Messages API refuses of a request, as its documentation and public reports have it.

Sources: Anthropic API reference, "Messages"; platform.claude.com, migration guides of Claude 4.6 to 5.5, "Structured
outputs", "Extended thinking"; the words are those of reports on GitHub (LiteLLM#3286, #15097, opencode#37916).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NAME, _ID = re.compile(r"[a-zA-Z0-9_-]{1,128}"), re.compile(r"[a-zA-Z0-9_-]+")
_KNOWN = """
    model messages max_tokens system stop_sequences stream temperature top_p top_k tools tool_choice metadata service_tier
    thinking output_config context_management
"""
_FIELDS = frozenset(_KNOWN.split())
_MEDIA = frozenset(["image/jpeg", "image/png", "image/gif", "image/webp", "application/pdf"])
_BOUNDS = frozenset(["minimum", "maximum", "minLength", "maxLength", "maxItems", "oneOf"])


def refusal(body: dict[str, Any]) -> str:
    """The first reason to refuse `body`; empty if it is taken."""
    return next(_refusals(body), "")


def _refusals(body: dict[str, Any]) -> Iterator[str]:
    model = body["model"]
    is_new = bool(re.search(r"opus-4-7|-5", model.replace("4-5", "")))
    for name in body.keys() - _FIELDS:
        yield f"{name}: Extra inputs are not permitted"
    if is_new and {"temperature", "top_p", "top_k"} & body.keys():
        yield "`temperature` is deprecated for this model."
    if {"temperature", "top_p"} <= body.keys():
        yield "`temperature` and `top_p` cannot both be specified for this model. Please use only one."
    if not 0 <= body.get("temperature", 1) <= 1:
        yield "temperature: range: 0..1"
    for stop in body.get("stop_sequences", ()):
        if not stop.strip():
            yield "stop_sequences: each stop sequence must contain non-whitespace"
    if len(body.get("metadata", {}).get("user_id", "")) > 256:
        yield "metadata.user_id: String should have at most 256 characters"
    if body.get("service_tier", "auto") not in ("auto", "standard_only"):
        yield "service_tier: Input should be 'auto' or 'standard_only'"
    yield from _thinking(body, is_new)
    yield from _tools(body.get("tools", ()))
    kinds = {block["type"] for message in body["messages"] for block in message["content"]}
    if not body.get("tools") and {"tool_use", "tool_result"} & kinds:
        yield "Requests which include `tool_use` or `tool_result` blocks must define tools"
    yield from _format(body.get("output_config", {}).get("format", {}).get("schema", {}))
    yield from _texts("system", body.get("system", ()))
    yield from _dialogue(body["messages"], is_new)


def _thinking(body: dict[str, Any], is_new: bool) -> Iterator[str]:
    thinking, effort = body.get("thinking", {}), body.get("output_config", {}).get("effort")
    kind = thinking.get("type", "disabled")
    if is_new and kind == "enabled":
        yield '"thinking.type.enabled" is not supported for this model. Use "thinking.type.adaptive" and "output_config.effort"'
    if not is_new and (kind == "adaptive" or effort):
        yield "This model does not support the effort parameter."
    if effort not in (None, "low", "medium", "high", "xhigh", "max"):
        yield "output_config.effort: Input should be 'low', 'medium', 'high', 'xhigh' or 'max'"
    if kind == "enabled" and not 1024 <= thinking["budget_tokens"] < body["max_tokens"]:
        yield "`max_tokens` must be greater than `thinking.budget_tokens`"
    if kind != "disabled":
        if body.get("temperature", 1) != 1:
            yield "`temperature` may only be set to 1 when thinking is enabled"
        if body.get("tool_choice", {}).get("type") in ("any", "tool"):
            yield "Thinking may not be enabled when tool_choice forces tool use."
        last = [message for message in body["messages"] if message["role"] == "assistant"][-1:]
        is_loop = body["messages"][-1]["content"][0]["type"] == "tool_result"
        if is_loop and last and last[0]["content"][0]["type"] not in ("thinking", "redacted_thinking"):
            yield "Expected `thinking` or `redacted_thinking`, but found `tool_use`"


def _tools(tools: Any) -> Iterator[str]:
    for number, tool in enumerate(tools):
        schema = tool.get("input_schema", {})
        if not _NAME.fullmatch(tool.get("name", "")):
            yield f"tools.{number}.custom.name: String should match pattern '^[a-zA-Z0-9_-]{{1,128}}$'"
        if schema.get("type") != "object":
            yield f"tools.{number}.custom.input_schema.type: Field required"
        if tool.get("strict"):
            yield from _format(schema)
        if {"anyOf", "oneOf", "allOf"} & schema.keys():
            yield f"tools.{number}.custom.input_schema: input_schema does not support oneOf, allOf, or anyOf at the top level"
    if len({tool["name"] for tool in tools}) < len(tools):
        yield "tools: Tool names must be unique."


def _format(schema: Any) -> Iterator[str]:
    if isinstance(schema, list):
        for one in schema:
            yield from _format(one)
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object" and schema.get("additionalProperties") is not False:
        yield "output_config.format.schema: For 'object' type, 'additionalProperties' must be explicitly set to false"
    for name in _BOUNDS & schema.keys():
        yield f"output_config.format.schema: For this type, property '{name}' is not supported"
    for one in schema.values():
        yield from _format(one)


def _texts(where: str, blocks: Any) -> Iterator[str]:
    for block in blocks if isinstance(blocks, list) else ():
        if block["type"] == "text" and not block["text"].strip():
            yield f"{where}: text content blocks must contain non-whitespace text"


def _dialogue(messages: list[dict[str, Any]], is_new: bool) -> Iterator[str]:
    if not messages:
        yield "messages: at least one message is required"
        return
    if messages[0]["role"] != "user":
        yield 'messages: first message must use the "user" role'
    seen: set[str] = set()
    waiting: list[str] = []
    for number, message in enumerate(messages):
        blocks = message["content"]
        if not blocks:
            yield f"messages.{number}: all messages must have non-empty content"
            continue
        yield from _texts(f"messages.{number}", blocks)
        results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
        if sorted(results) != sorted(waiting) or [b["type"] for b in blocks[: len(results)]] != ["tool_result"] * len(
            results
        ):
            yield f"messages.{number}: `tool_use` ids were found without `tool_result` blocks immediately after"
        waiting = [block["id"] for block in blocks if block["type"] == "tool_use"]
        for block in blocks:
            yield from _block(f"messages.{number}", block, seen)
    if messages[-1]["role"] == "assistant":
        if is_new:
            yield "This model does not support assistant message prefill. The conversation must end with a user message."
        if messages[-1]["content"][-1].get("text", "x").endswith((" ", "\n")):
            yield "messages: final assistant content cannot end with trailing whitespace"


def _block(where: str, block: dict[str, Any], seen: set[str]) -> Iterator[str]:
    match block["type"]:
        case "tool_use":
            if not _ID.fullmatch(block["id"] or "") or not _NAME.fullmatch(block["name"]) or block["id"] in seen:
                yield f"{where}.tool_use.id: String should match pattern '^[a-zA-Z0-9_-]+$'"
            seen.add(block["id"])
        case "tool_result":
            yield from _texts(where, block["content"])
        case "thinking" if not block.get("signature"):
            yield f"{where}.thinking.signature: Field required"
        case "image" | "document":
            source = block["source"]
            if source["type"] == "base64" and source["media_type"] not in _MEDIA:
                yield f"{where}.source.base64.media_type: Input should be 'image/jpeg', 'image/png', ..."
