"""The values of one request and their placeholders: `<EMAIL_1>`, `<CARD_2>`.

Models repeat this form, which many data sets have, and no JSON or shell changes it; as a server's JSON
(`\\u003c`) or a model's HTML (`&lt;`) spells it, it is a placeholder all the same. A text that is already of
this form is a value too, of the kind LITERAL, so no text of a user is taken for a placeholder. Invariants: equal
values have one placeholder; numbers go by the order of appearance; nothing here is logged or stored.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from gateway.wire.texts import walked

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


def masked_value(value: Any, vault: Vault) -> Any:
    """A decoded body with placeholders. Raises RecursionError if it is too deep."""
    return walked(value, vault.masked)
