"""The program that tries a grammar: a schema or an expression came with a request.

`process` runs it. It answers with the library's own grammar, which then compiles within about the
same time and stack. Knows no tokenizer: a vocabulary of single bytes shows what compiling costs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

# No answer can go on with white space, and names are forced with their punctuation.
# Nothing is approximated, whatever a schema's own "x-guidance" says.
_OPTIONS: Any = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "coerce_one_of": False,
    "lenient": False,
}
_LITERAL = ("enum", "const", "default", "examples", "example")  # their values are no schemas
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LACKS = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT = re.compile(r"Unknown format: (.*)")


def opened(limits: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """What answers `kind` and `text` of a grammar. Raises ValueError where it cannot be held."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

    class Bytes:
        tokens = (*(bytes([byte]) for byte in range(256)), b"")
        eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    tokenizer = LLTokenizer(TokenizerWrapper(Bytes()), slices=[])

    def why_not(grammar: str) -> str:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
        matcher.compute_bitmask()
        return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()

    def of_schema(text: str) -> str:
        schema = json.loads(text)
        if not isinstance(schema, dict | bool):
            raise ValueError("a schema must be an object")
        while True:
            grammar = str(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_OPTIONS))
            reason = why_not(grammar)
            unknown = _FORMAT.search(reason)
            # a format that is not known asserts nothing (JSON Schema 2020-12, validation, 7.2.3)
            if unknown is None or not _without_format(schema, unknown[1].strip()):
                break
        if reason:
            raise ValueError(_in_place(schema, reason))
        return grammar

    def answer(wanted: dict[str, Any]) -> str:
        kind, text = wanted["kind"], wanted["text"]
        if kind == "json":
            return of_schema(text)
        if kind == "grammar":
            from llguidance.gbnf_to_lark import any_to_lark

            grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
        elif kind == "choice":
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        else:
            grammar = LLMatcher.grammar_from_regex(text)
        if reason := why_not(grammar):
            raise ValueError(reason)
        return str(grammar)

    return answer


def _subschemas(schema: Any, place: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in `schema`, with its JSON pointer."""
    waiting = [(place, schema)]
    while waiting:
        place, schema = waiting.pop()
        if isinstance(schema, list):
            waiting += [(f"{place}/{index}", one) for index, one in enumerate(schema)]
        elif isinstance(schema, dict):
            yield place, schema
            for key, value in schema.items():
                own = f"{place}/{key}"
                if key in _NAMED and isinstance(value, dict):
                    waiting += [(f"{own}/{name}", one) for name, one in value.items()]
                elif key not in _LITERAL and isinstance(value, dict | list):
                    waiting.append((own, value))


def _without_format(schema: Any, name: str) -> bool:
    """Take this format out wherever it is; returns whether it was anywhere."""
    having = [one for _, one in _subschemas(schema) if one.get("format") == name]
    for one in having:
        del one["format"]
    return bool(having)


def _in_place(schema: Any, reason: str) -> str:
    """The reason, with the place in the schema of the keyword that it names."""
    lacks = _LACKS.search(reason)
    if lacks is None:
        return reason
    keys = json.loads(lacks[1])
    place = next((f"{place}/{key}" for place, one in _subschemas(schema) for key in keys if key in one), "#")
    return f"the engine cannot hold the keyword {' or '.join(keys)} ({place})"
