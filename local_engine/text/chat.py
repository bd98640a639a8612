"""Chat: a conversation as the model's own Jinja template lays it out, in a process of its own.

Knows the template and the control tokens' spellings, no token ids. Invariant: no text of a message
can act as a control token (end a turn, open one as the system): where a text spells one, the
rendered text is cut inside the spelling, and the parts, encoded one by one, give the same
characters as ordinary tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from local_engine.apart.process import Apart, Refusal
from local_engine.messages import InvalidRequest

_CUTS = tuple(map(chr, range(0xFDD0, 0xFDF0)))  # noncharacters: Unicode keeps them out of all text


class Chat:
    """One model's template. `control`: the spellings of its control tokens."""

    def __init__(self, template: str, bos_token: str, eos_token: str, control: Sequence[str]) -> None:
        self._template = Apart("template", template)
        self._bos_token = bos_token
        self._eos_token = eos_token
        longest_first = sorted((token for token in control if len(token) > 1), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def start(self) -> None:
        """Start the template's process, so that the first conversation need not wait for it."""
        self._template.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        *,
        opens_answer: bool = True,
        prefix: str = "",
    ) -> list[str]:
        """The conversation as the parts to encode, by default up to where the assistant begins,
        with `prefix` as the beginning of its answer. Raises InvalidRequest."""
        if not messages:
            raise InvalidRequest("messages must not be empty", param="messages")
        try:
            plain = [_plain(message) for message in messages]
            given = json.dumps([plain, list(tools or ()), prefix], ensure_ascii=False, default=str)
            cut = next((mark for mark in _CUTS if mark not in given), None)
            if cut is None:
                raise InvalidRequest("messages must not consist of noncharacters", param="messages")
            text: str = self._template.ask(
                {
                    "messages": self._cut(plain, cut),
                    "tools": self._cut(list(tools), cut) if tools else None,
                    "add_generation_prompt": opens_answer,
                    "bos_token": self._bos_token,
                    "eos_token": self._eos_token,
                }
            )
            text += str(self._cut(prefix, cut))
            text.encode()  # a tool call's arguments can spell what is no character
        except Refusal as error:
            raise InvalidRequest(f"the chat template refuses these messages: {error}", param="messages") from None
        except RecursionError:
            raise InvalidRequest("messages, tool calls or tools are nested too deeply", param="messages") from None
        except UnicodeEncodeError:
            raise InvalidRequest("messages have a surrogate without its pair", param="messages") from None
        return text.split(cut)

    def _cut(self, value: Any, mark: str) -> Any:
        """The same value with `mark` inside every control token that one of its strings spells."""
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
    calls = plain.get("tool_calls")
    if isinstance(calls, list):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    return plain


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        raise InvalidRequest("a tool call's arguments are not JSON", param="messages") from None
    return {**call, "function": {**function, "arguments": arguments}}
