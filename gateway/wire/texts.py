"""The texts in a body of any API: what a person or a model wrote.

Pure. A deny-list: what is not known to be a name, an id, a setting or encoded bytes is a text, so a field of a
newer API is one as well. The one walk for all that sees or replaces texts. Invariant: each text is found, and
replaced, wherever it stands; nothing else changes.
"""

import json
import re
from functools import lru_cache
from typing import Any, Protocol

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
_NUMBER_MIN = 10**6  # a shorter number proves nothing


class Visit(Protocol):
    """Returns what takes the place of a text. `is_name`: it stands where providers expect a name."""

    def __call__(self, text: str, *, is_name: bool = False) -> str: ...


def texts_in(body: Any) -> dict[str, None]:
    """The texts of a decoded body, each once, in one order. Raises BadRequest for a body that is too deep."""
    texts: dict[str, None] = {}

    def add(text: str, *, is_name: bool = False) -> str:
        texts[text] = None
        return text

    try:
        walked(body, add)
    except RecursionError:
        raise BadRequest("The body is nested too deeply", code="invalid_json") from None
    return texts


def swapped(body: Any, texts: dict[str, str]) -> Any:
    """`body` with other texts, by those that they replace."""

    def other(text: str, *, is_name: bool = False) -> str:
        return texts.get(text, text)

    return walked(body, other)


def walked(value: Any, visit: Visit, name: str = "", is_value: bool = False) -> Any:
    """`value`, the field `name`, as `visit` leaves its texts, and the keys and numbers that may be texts.

    It visits the fields of an object by their names, in one order. `is_value`: all in it is a call's. Raises
    RecursionError for a value that is too deep.
    """
    if isinstance(value, str):
        return _visited(value, visit, name, is_value) if value else value
    if isinstance(value, dict):
        is_value = is_value or name in _VALUES or name in _OBJECTS
        are_named = is_value or name == "properties"
        fields = {}
        for key in sorted(value):
            other = visit(key) if key and (are_named or not _is_field(key)) else key
            fields[key] = other, walked(value[key], visit, key, is_value)
        return dict([fields[key] for key in value])
    if isinstance(value, list):
        is_value, name = is_value or name in _VALUES, "" if name in _OBJECTS else name
        return [walked(item, visit, name, is_value) for item in value]
    if (is_value or name in _VALUES) and type(value) is int and value > _NUMBER_MIN:
        text = visit(str(value))
        return text if text != str(value) else value
    return value


@lru_cache(4096)
def _is_field(key: str) -> bool:
    return _FIELD.fullmatch(key) is not None


def _visited(text: str, visit: Visit, name: str, is_value: bool) -> str:
    if name in _ENCODED and (not is_value or len(text) > _ENCODED_MIN) and _BASE64.fullmatch(text):
        return text
    if is_value:
        return visit(text)
    if name in _NAMED or name.endswith(("_id", "_ids")):
        return text if _NAME.fullmatch(text) else visit(text, is_name=True)
    if name == "arguments" and text.lstrip()[:1] == "{":
        try:
            fields = decode_strictly(text.encode())
        except (BadRequest, UnicodeEncodeError):  # a model wrote it
            return visit(text)
        other = walked(fields, visit, "", True)
        return text if other == fields else json.dumps(other, ensure_ascii=False)
    return visit(text)


def drop_logprobs(answer: dict[str, Any]) -> None:
    """Remove the log probabilities of an answer, which spell its texts again."""
    for choice in answer.get("choices") or ():
        choice["logprobs"] = None
    for item in answer.get("output") or ():
        for part in item.get("content") or ():
            if isinstance(part, dict):
                part.pop("logprobs", None)
