"""The texts in a body of any API: what a person or a model wrote.

Pure. A deny-list: what is not known to be a name, an id, a setting or encoded bytes is a text, so a field of a
newer API is one as well. The one walk for all that sees or replaces texts. Invariant: each text is found, and
replaced, wherever it stands; nothing else changes.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from operator import is_
from typing import Any

from gateway.wire.errors import BadRequest
from gateway.wire.requests import decode_strictly

_NAMES = """
    background detail effort encoding_format finish_reason format id include language modalities mode model
    moderation name object output_format phase purpose quality reasoning_effort response_format role service_tier size
    status stop_reason style system_fingerprint timestamp_granularities tool_choice truncation ttl type verbosity voice
"""
_NAMED = frozenset(_NAMES.split())
_NAME = re.compile(r"[A-Za-z_][\w./:-]*|[\w.-]{1,5}", re.ASCII)  # another value of these fields is a text
_FIELD = re.compile(r"\$?[a-z_][A-Za-z_]*|\d{1,6}")
_ENCODED = frozenset({"data", "file_data", "encrypted_content", "signature", "b64_json", "url", "image_url"})
_BASE64 = re.compile(r"(?:data:[\w.+/;=-]*;base64,)?[A-Za-z0-9+/_-]{64,}={0,2}")
_ENCODED_MIN = 4096
"""The least characters of encoded bytes in a tool's call."""
_VALUES = frozenset({"arguments", "const", "default", "enum", "example", "examples"})
"""Of a call, and of a schema: each name, text and number in these may be a value."""
_OBJECTS = frozenset({"input", "output"})  # a list in these has messages
_IDS, _HOLDING = ("_id", "_ids"), frozenset({dict, list, int})
_FIELD_MAX = 64  # a longer one is a text, and stays in no cache
_NUMBER_MIN = 10**6  # a shorter number proves nothing


Visit = Callable[[str], str | None]
"""Returns what takes the place of a text; None: it stays."""


def texts_in(body: Any) -> dict[str, None]:
    """The texts of a decoded body, each once, in one order. Raises BadRequest for a body that is too deep."""
    texts: list[str] = []
    try:
        walked(body, texts.append)
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    return dict.fromkeys(texts)


def swapped(body: Any, texts: dict[str, str]) -> Any:
    """`body` with other texts, by those that they replace."""
    return walked(body, texts.get)


def walked(value: Any, visit: Visit, name: str = "", is_value: bool = False) -> Any:
    """`value`, the field `name`, as `visit` leaves its texts, and the keys and numbers that may be texts.

    It visits the fields of an object by their names, in one order; what it leaves is not copied. `is_value`: all
    in it is a call's. Raises RecursionError for a value that is too deep.
    """
    kind = type(value)
    if kind is str:
        return _visited(value, visit, name, is_value)
    if kind is dict:
        is_value = is_value or name in _VALUES or name in _OBJECTS
        are_named, changed = is_value or name == "properties", {}
        for key in sorted(value):
            item = value[key]
            other = visit(key) if (are_named or len(key) > _FIELD_MAX or not _is_field(key)) and key else None
            if type(item) is str:
                if not (key in _NAMED and item.isidentifier() and item.isascii()) or is_value:  # most are
                    item = _visited(item, visit, key, is_value)
            elif type(item) in _HOLDING:
                item = walked(item, visit, key, is_value)
            if item is not value[key] or other is not None:
                changed[key] = key if other is None else other, item
        return dict([changed.get(field[0], field) for field in value.items()]) if changed else value
    if kind is list:
        is_value, name = is_value or name in _VALUES, "" if name in _OBJECTS else name
        items = [(_visited if type(item) is str else walked)(item, visit, name, is_value) for item in value]
        return value if all(map(is_, items, value)) else items
    if (is_value or name in _VALUES) and kind is int and value > _NUMBER_MIN:
        other = visit(text := str(value))
        return value if other in (None, text) else other
    return value


@lru_cache(4096)
def _is_field(key: str) -> bool:
    return _FIELD.fullmatch(key) is not None


def _visited(text: str, visit: Visit, name: str, is_value: bool) -> str:
    is_encoded = name in _ENCODED and (not is_value or len(text) > _ENCODED_MIN) and _BASE64.fullmatch(text)
    if not text or is_encoded:
        return text
    other = None
    if is_value:
        other = visit(text)
    elif name in _NAMED or name.endswith(_IDS):
        if not _NAME.fullmatch(text) and (other := visit(text)) not in (None, text):
            other = re.sub(r"<(\w+)>", r"\1", other)  # providers refuse a name with < and >
    elif name == "arguments" and text.lstrip()[:1] in '{["':
        try:
            (given,) = decode_strictly(b'{"":%b}' % text.encode()).values()
        except (BadRequest, ValueError):  # a model wrote it
            other = visit(text)
        else:
            changed = walked(given, visit, "", True)
            other = None if changed == given else json.dumps(changed, ensure_ascii=False)
    else:
        other = visit(text)
    return text if other is None else other


def drop_logprobs(answer: dict[str, Any]) -> None:
    """Remove the log probabilities of an answer, which spell its texts again."""
    for choice in answer.get("choices") or ():
        choice["logprobs"] = None
    for item in answer.get("output") or ():
        for part in item.get("content") or ():
            if isinstance(part, dict):
                part.pop("logprobs", None)
