"""What a server wants back of an answer in the next turn, and surfaces have no field for.

Servers with OpenAI's API want the reasoning, or a signature of it, in the assistant's message under
the name by which it came (DeepSeek's and Kimi's guides to thinking with tools: `reasoning_content`;
OpenRouter, "Preserving reasoning", and MiniMax, "Interleaved thinking": `reasoning_details`; litellm:
`thinking_blocks`) and in its calls (Google, "Thought signatures": `extra_content`). Messages and
responses carry it in fields that a client sends back unread: a thinking block's `signature` or
`data`, a reasoning item's `encrypted_content`. Knows no HTTP. Invariants: nothing is restored but
what a client of chat completions may say itself; another server's signature is left alone.
"""

import base64
import binascii
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from gateway.wire.reader import THOUGHTS

T = TypeVar("T")

_MARK = "sameway1."
*_TEXTS, _DETAILS = THOUGHTS
_LISTS = (_DETAILS, "thinking_blocks")
_OF_CALLS = frozenset({"index", "id", "type", "function", "custom"})  # which every surface has
_GROWING = ("text", "summary", "thinking")  # of an entry of a list


class _Fields(msgspec.Struct, omit_defaults=True):
    name: str = ""  # of the text, which the surface shows
    lists: dict[str, list[dict[str, Any]]] = {}
    extra_content: Any = None
    calls: dict[str, dict[str, Any]] = {}  # further fields of calls by their ids


class Carried:
    """What an answer has of it so far, and no block or item carries yet."""

    def __init__(self) -> None:
        self._fields = _Fields()

    def add(self, delta: Mapping[str, Any]) -> None:
        """Note what a delta of a chat completion has of it, except in calls."""
        fields = self._fields
        fields.name = next((name for name in _TEXTS if isinstance(delta.get(name), str) and delta[name]), fields.name)
        if delta.get("extra_content") is not None:
            fields.extra_content = delta["extra_content"]
        for name in _LISTS:
            for entry in delta[name] if isinstance(delta.get(name), list) else ():
                if isinstance(entry, dict):
                    _append(fields.lists.setdefault(name, []), entry)

    def add_call(self, id: str, call: Mapping[str, Any]) -> None:
        """Note the further fields of a call, whose client's id is `id`."""
        if further := {name: value for name, value in call.items() if name not in _OF_CALLS and value is not None}:
            self._fields.calls.setdefault(id, {}).update(further)

    @property
    def is_pending(self) -> bool:
        """Whether there is more than the name of a text to carry."""
        return bool(self._fields.lists or self._fields.calls or self._fields.extra_content is not None)

    def sealed(self) -> str:
        """What has been noted since the last call, as an opaque text; empty if nothing was."""
        fields, self._fields = self._fields, _Fields()
        if fields == _Fields():
            return ""
        return seal(fields)


def _append(entries: list[dict[str, Any]], entry: dict[str, Any]) -> None:
    """Add an entry of a stream's list: the next piece of its last entry, or a new one."""
    last = entries[-1] if entries else {}
    if last.get("type") != entry.get("type") or last.get("index") != entry.get("index") or "index" not in entry:
        entries.append(dict(entry))
        return
    for name, value in entry.items():
        is_piece = name in _GROWING and isinstance(value, str) and isinstance(last.get(name), str)
        last[name] = last[name] + value if is_piece else last.get(name) if value is None else value


def seal(value: Any) -> str:
    """`value` as a text that clients send back unread. They may read it: it is no secret."""
    return _MARK + base64.urlsafe_b64encode(msgspec.json.encode(value)).decode()


def unsealed(text: Any, kind: type[T]) -> T | None:
    """The value that `seal` made `text` of; None for any other text."""
    if not isinstance(text, str) or not text.startswith(_MARK):
        return None
    try:
        data = base64.b64decode(text.removeprefix(_MARK), altchars=b"-_", validate=True)
        return msgspec.json.decode(data, type=kind)
    except (binascii.Error, msgspec.DecodeError, UnicodeDecodeError):
        return None


def is_signed(text: Any) -> bool:
    """Whether a server made this opaque text: there is one, and the gateway did not make it."""
    return bool(text) and not (isinstance(text, str) and text.startswith(_MARK))


def restore(message: dict[str, Any], calls: dict[str, dict[str, Any]], sealed: Any, text: str) -> None:
    """Set what `sealed` carries in an assistant's `message`, with the `text` that was shown beside it,
    and the further fields of calls in `calls`. Another server's text changes nothing.
    """
    if (fields := unsealed(sealed, _Fields)) is None:
        return
    if fields.name in _TEXTS and text:
        message[fields.name] = message.get(fields.name, "") + text
    for name in _LISTS:
        if entries := fields.lists.get(name):
            message[name] = [*message.get(name, ()), *entries]
    if fields.extra_content is not None:
        message["extra_content"] = fields.extra_content
    for id, further in fields.calls.items():
        calls[id] = {name: value for name, value in further.items() if name not in _OF_CALLS}
