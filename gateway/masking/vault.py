"""The values of one request and their placeholders: `<EMAIL_1>`, `<CARD_2>`.

Models repeat this form, which many data sets have, and no JSON or shell changes it; as a server's JSON
(`\\u003c`) or a model's HTML (`&lt;`) spells it, it is a placeholder all the same. A text that is already of
this form is a value too, of the kind LITERAL, so no text of a user is taken for a placeholder. Invariants: equal
values have one placeholder; numbers go by the order of appearance; nothing here is logged or stored.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

Span = tuple[int, int, str]
"""The start, the end and the kind of a value, in characters."""
Find = Callable[[str, list[int]], list[Span]]
"""Finds the values of a text; the list has one number, the checks that the request may still have."""

# RE2 reads it, too
PLACEHOLDER = re.compile(r"(?:<|&lt;|\\u003[cC])([A-Z][A-Z0-9]{0,19}_[0-9]{1,7})(?:>|&gt;|\\u003[eE])")
# the beginning of one, at the end of a text
_BEGUN = re.compile(
    r"(?:(?:<|&lt;|\\u003[cC])[A-Z0-9_]{0,28}(?:&(?:gt?)?|\\(?:u(?:0(?:0(?:3)?)?)?)?)?|&(?:lt?)?|\\(?:u(?:0(?:0(?:3)?)?)?)?)\Z"
)
_BEGUN_CHARS = 42
CHECKS_MAX = 50_000
"""Of checksums in one request, about half a second; from there on a candidate is masked without its proof."""


class Vault:
    """One request's values, found by `find`. `is_json`: its answer is JSON."""

    def __init__(self, find: Find, *, is_json: bool = False) -> None:
        self.find = find
        self._left: list[int] = [CHECKS_MAX]
        self._by_value: dict[str, str] = {}
        self._values: dict[str, str] = {}
        self._counts: Counter[str] = Counter()
        self.is_json = is_json

    def __len__(self) -> int:
        return len(self._values)

    def masked(self, text: str) -> str:
        """A text with placeholders in place of its values."""
        spans = self.find(text, self._left)
        if not spans:
            return text
        pieces, end_before = [], 0
        for start, end, kind in spans:
            pieces += [text[end_before:start], self._placeholder(text[start:end], kind)]
            end_before = end
        return "".join([*pieces, text[end_before:]])

    def _placeholder(self, value: str, kind: str) -> str:
        if value not in self._by_value:
            self._counts[kind] += 1
            name = f"{kind}_{self._counts[kind]}"
            self._by_value[value], self._values[name] = f"<{name}>", value
        return self._by_value[value]

    def restored(self, text: str, *, is_json: bool = False) -> str:
        """A text with the values again, spelled for a JSON string if it `is_json`."""

        def value_of(match: re.Match[str]) -> str:
            value = self._values.get(match[1])
            if value is None:
                return match[0]
            return json.dumps(value, ensure_ascii=False)[1:-1] if is_json else value

        return PLACEHOLDER.sub(value_of, text)

    def odd(self, text: str) -> tuple[int, int]:
        """How many placeholders of an answer came back changed, and how many are unknown here."""
        unknown = sum(name not in self._values for name in PLACEHOLDER.findall(text))
        kinds = "|".join(sorted(self._counts))
        rest = PLACEHOLDER.sub("", text)
        return len(re.findall(rf"(?i)\b(?:{kinds})[ _-]?[0-9]+\b", rest)) if kinds else 0, unknown


def split(text: str) -> tuple[str, str]:
    """A text without the beginning of a placeholder at its end, and that beginning."""
    begun = _BEGUN.search(text, max(0, len(text) - _BEGUN_CHARS))
    return (text[: begun.start()], text[begun.start() :]) if begun else (text, "")


# -- the texts of a request: roles, types, ids, names of tools and models, and encoded bytes stay ----

_NAMES = frozenset(
    {"model", "role", "type", "id", "name", "tool_call_id", "tool_use_id", "call_id", "item_id", "stream"}
)
_NAME = re.compile(r"[A-Za-z_][\w./:-]*", re.ASCII)  # a name that is another text is a person's
_FIELD = re.compile(r"[a-z_]+")
_ENCODED = frozenset({"data", "file_data", "encrypted_content", "signature", "b64_json", "url", "image_url"})
_BASE64 = re.compile(r"(?:data:[\w.+/;=-]*;base64,)?[A-Za-z0-9+/_-]{64,}={0,2}")
_VALUES = frozenset({"arguments", "input", "const", "default", "enum", "example", "examples"})
"""Of a call, and of a schema: a text, a number or a name in these may be a value."""
_NUMBER_MIN = 10**6  # a shorter number there proves nothing


def masked_value(value: Any, vault: Vault, name: str = "", *, is_content: bool = False) -> Any:
    """`value`, the field `name`, with placeholders. In a call's arguments (`is_content`) every text and number may
    hold a value, keys too.
    """
    if isinstance(value, str):
        return _masked(value, vault, name, is_content=is_content)
    if isinstance(value, dict):
        inside = is_content or name in _VALUES
        are_named = inside or name == "properties"
        masked = {  # in one order, by which the numbers go
            key: (
                vault.masked(key) if are_named or not _FIELD.fullmatch(key) else key,
                masked_value(value[key], vault, key, is_content=inside),
            )
            for key in sorted(value)
        }
        return dict(masked[key] for key in value)
    if isinstance(value, list):
        inside = is_content or (name in _VALUES and name != "input")  # the items of a response's input are messages
        return [masked_value(item, vault, "" if name == "input" else name, is_content=inside) for item in value]
    if (is_content or name in _VALUES) and type(value) is int and value > _NUMBER_MIN:
        text = vault.masked(str(value))
        return text if text != str(value) else value
    return value


def _masked(text: str, vault: Vault, name: str, *, is_content: bool) -> str:
    if is_content:
        return vault.masked(text)
    if name in _NAMES:  # providers refuse a name with < and >
        return text if _NAME.fullmatch(text) else re.sub(r"<(\w+)>", r"\1", vault.masked(text))
    if name in _ENCODED and _BASE64.fullmatch(text):
        return text
    if name == "arguments" and text.lstrip()[:1] in ("{", "["):
        try:
            given = json.loads(text)
        except ValueError:  # a model wrote it
            return vault.masked(text)
        masked = masked_value(given, vault, is_content=True)
        return text if masked == given else json.dumps(masked, ensure_ascii=False)
    return vault.masked(text)


def texts_of(value: Any, name: str = "") -> Iterator[str]:
    """The texts that may be masked, the numbers and the keys among them."""
    values = [(value, name)]
    while values:
        item, name = values.pop()
        if isinstance(item, dict):
            for key, inner in item.items():
                yield key
                values.append((inner, key))
        elif isinstance(item, list | tuple):
            values += [(inner, name) for inner in item]
        elif isinstance(item, str):
            if not (name in _ENCODED and len(item) > 4096 and _BASE64.fullmatch(item)):
                yield item
        elif type(item) is int:
            yield str(item)
