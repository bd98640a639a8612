"""Chat: renders a conversation by the model's own Jinja template, in a separate process.

Knows the template and the control tokens' spellings, no token ids. Invariant: no text of a message
can act as a control token (end a turn, open one as the system): if a text spells one, the rendered
text is cut inside the spelling, and the parts, encoded one by one, give the same characters as
ordinary tokens.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

from local_engine.apart.process import Apart, ProgramRefusal
from local_engine.messages import InvalidRequest
from local_engine.text.calls import DEFAULT, THINKING, Format, format_of

_TOOLS = """# Tools

You may call one or more of these functions, if they help with the request:
<tools>
{}
</tools>

For each call, return a JSON object with the function's name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <arguments-as-JSON-object>}}
</tool_call>"""
_WITH_TOOLS = "You are a helpful assistant with some tools."
_PROBE = {"type": "function", "function": {"name": "sameway_probe", "description": "", "parameters": {}}}
_CUTS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them out of all text


class ChatTemplate:
    """One model's template. `control`: the spellings of its control tokens."""

    def __init__(self, template: str, bos_token: str, eos_token: str, control: Sequence[str]) -> None:
        self._template = Apart("template", template)
        self._format, self._has_calls = format_of(template), "tool_calls" in template
        self._bos_token = bos_token
        self._eos_token = eos_token
        longest_first = sorted((token for token in control if len(token) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def start(self) -> None:
        """Start the template's process, so that the first conversation does not wait for it."""
        self._template.start()

    @functools.cached_property
    def _reads_tools(self) -> str:
        """How the template takes tools: `apart`, as a separate value; `in system`, as JSON in the
        system's message (Phi-4-mini); or empty, not at all."""
        question = {"role": "user", "content": "?"}
        for way, messages, tools in (
            ("apart", [question], [_PROBE]),
            ("in system", [{"role": "system", "content": "", "tools": json.dumps([_PROBE])}, question], None),
        ):
            with contextlib.suppress(ProgramRefusal):
                if "sameway_probe" in self._ask(messages, tools, opens_answer=True):
                    return way
        return ""

    @property
    def format(self) -> Format:
        """The format in which the model writes tool calls; the default if its template takes no
        tools."""
        return self._format if self._format is not None and self._reads_tools else DEFAULT

    def _ask(self, messages: Any, tools: Any, *, opens_answer: bool) -> str:
        """Render the template. Raises ProgramRefusal."""
        return self._template.ask(
            {
                "messages": messages,
                "tools": tools,
                "xml_tools": tools,  # SmolLM3's word for them
                "add_generation_prompt": opens_answer,
                "bos_token": self._bos_token,
                "eos_token": self._eos_token,
            }
        )

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        opens_answer: bool = True,
        prefix: str = "",
    ) -> list[str]:
        """The conversation as the parts to encode, by default with the opening of the assistant's
        turn, and with `prefix` as the beginning of its answer. Raises InvalidRequest."""
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        try:
            plain = [_plain(message) for message in messages]
            if not self._has_calls or (tools and self._reads_tools != "apart"):
                lays_out = functools.partial(_in_system, self.format) if self._reads_tools == "in system" else _told
                plain = lays_out(plain, () if self._reads_tools == "apart" else tools or ())
                tools = tools if self._reads_tools == "apart" else None
            given = json.dumps([plain, list(tools or ()), prefix], ensure_ascii=False, default=str)
            cut = next((mark for mark in _CUTS if mark not in given), None)
            if cut is None:
                raise InvalidRequest("messages must not consist of noncharacters", param="messages")
            given_tools = self._cut(list(tools), cut) if tools else None
            text = self._ask(self._cut(plain, cut), given_tools, opens_answer=opens_answer)
            closes = [closes for opens, closes in THINKING if prefix and text.rstrip().endswith(opens)]
            text += "".join(f"{mark}\n\n" for mark in closes) + str(self._cut(prefix, cut))
            text.encode()  # a tool call's arguments can spell what is no character
        except ProgramRefusal as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        except RecursionError:
            raise InvalidRequest("messages, tool calls or tools are nested too deeply", param="messages") from None
        except UnicodeEncodeError:
            raise InvalidRequest("messages have a surrogate without its pair", param="messages") from None
        return text.split(cut)

    def _cut(self, value: Any, mark: str) -> Any:
        """A copy with `mark` inside every control token that its strings spell."""
        if isinstance(value, str):
            if self._control is None:
                return value
            return self._control.sub(lambda found: found[0][0] + mark + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._cut(key, mark): self._cut(own, mark) for key, own in value.items()}
        if isinstance(value, list | tuple):
            return [self._cut(own, mark) for own in value]
        return value


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: content is a string, a tool call's arguments are an
    object."""
    plain = dict(message)
    content = plain.get("content")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise InvalidRequest("the local engine reads text parts only", param="messages")
            texts.append(part["text"])
        plain["content"] = "\n".join(texts)
    elif content is None:
        plain["content"] = ""
    elif not isinstance(content, str):
        raise InvalidRequest("a message's content must be a string or a list of parts", param="messages")
    if not isinstance(plain.get("role"), str):
        raise InvalidRequest("every message needs a role", param="messages")
    calls = plain.pop("tool_calls", None)
    if isinstance(calls, list) and calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if "tool_call_id" in plain:
        plain["tool_call_id"] = _short(plain["tool_call_id"])
    return plain


def _short(id: Any) -> str:
    """A call's id as the nine characters that Mistral's templates require."""
    return blake2b(str(id).encode("utf-8", "replace"), digest_size=5).hexdigest()[:9]


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise InvalidRequest("a tool call's arguments are not JSON", param="messages") from None
    return {**call, "id": _short(call.get("id")), "function": {**function, "arguments": arguments}}


def _calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The name and the arguments of each tool call in a message."""
    calls = (call["function"] for call in message.get("tool_calls", ()) if "function" in call)
    return [{name: call.get(name) for name in ("name", "arguments")} for call in calls]


def _in_system(format: Format, messages: Sequence[dict[str, Any]], tools: Any) -> list[dict[str, Any]]:
    """The conversation for a template that takes tools from the system's message and any role, as
    in Phi-4-mini's model card: calls are text."""
    if tools:
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": _WITH_TOOLS}, *messages]
        text = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        messages = [{**messages[0], "tools": text}, *messages[1:]]
    laid_out = []
    for message in messages:
        calls = _calls_of(message)
        text = json.dumps(calls)
        content = f"{message['content']}{format.opens}{text}{format.closes}" if calls else message["content"]
        laid_out.append({**message, "content": content})
    return laid_out


def _told(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[dict[str, Any]]:
    """The conversation for a template without tools: the tools are in the system's message, calls
    in the assistant's, and their results, together, in a user's. It uses Hermes' frames."""
    laid_out: list[dict[str, Any]] = []
    if tools:
        text = _TOOLS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if messages[0]["role"] == "system":
            text = f"{messages[0]['content']}\n\n{text}"
            messages = messages[1:]
        laid_out.append({"role": "system", "content": text})
    is_result = False
    for message in messages:
        role, content = message["role"], message["content"]
        was_result, is_result = is_result, role == "tool"
        if is_result:
            role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
        calls = _calls_of(message)
        for call in calls:
            content += f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        content = content.lstrip("\n") if calls else content
        if is_result and was_result:
            laid_out[-1]["content"] += "\n" + content
        else:
            laid_out.append({**message, "role": role, "content": content})
    return laid_out
