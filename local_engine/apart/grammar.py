"""The program that checks a request's grammar: a schema or an expression.

`process` runs it. It answers with the library's own grammar, which then compiles within about the
same time and stack. Knows no tokenizer: a vocabulary of single bytes shows the cost of compiling.
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
_NUMERIC = ("const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_EXACT_MAX = (1 << 53) - 1  # the library reads numbers as 64-bit floats
_TEXT_MAX = 1 << 14  # characters of what is repeated: each takes a state of the library's lexer
_PARTS = re.compile(
    r"\\(?:[xuU]\{\w*\}|.)|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,\d*)?\}|.", re.DOTALL
)  # of an expression
_LACKS = re.compile(r"Unimplemented keys: (\[.*\])")
_FORMAT = re.compile(r"Unknown format: (.*)")


def opened(limits: dict[str, Any]) -> Callable[[dict[str, Any]], str]:
    """A function that compiles a grammar, given by `kind` and `text`. It raises ValueError for a
    grammar that the engine cannot enforce."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
    from llguidance.gbnf_to_lark import any_to_lark

    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])

    def why_not(grammar: str) -> str:
        matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(**limits, verbose_errors=False))
        matcher.compute_ff_bytes()
        bits = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.try_consume_tokens([(bits & -bits).bit_length() - 1])
        matcher.rollback(1)
        return str(matcher.get_error()).removesuffix("<non-verbose/>").strip()

    def of_schema(text: str) -> str:
        schema = json.loads(text)
        _check(schema)
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

    def of_calls(wanted: dict[str, Any]) -> str:
        parts = [_named(f"tool_{number}", in_tool(*tool)) for number, tool in enumerate(wanted["tools"])]
        if wanted["answer"] is not None:
            parts.append(_named("answer", answer(wanted["answer"])))

        grammar = json.dumps({"grammars": [_calls(wanted, wanted["ids"]), *parts]})
        trial = json.dumps({"grammars": [_calls(wanted, {}), *parts]})  # bytes have no marks that are tokens
        if reason := why_not(trial):
            raise ValueError(reason)
        return grammar

    def in_tool(name: str, schema: Any) -> str:
        try:
            return of_schema(json.dumps(schema))
        except ValueError as error:
            raise ValueError(f"in the tool {name}: {error}") from None

    def answer(wanted: dict[str, Any]) -> str:
        kind, text = wanted["kind"], wanted["text"]
        if kind == "calls":
            return of_calls({**json.loads(text), "ids": wanted["ids"]})
        if kind == "json":
            return of_schema(text)
        if kind != "choice":
            _check_repeats(*(text.splitlines() if kind == "grammar" else [text]))
        if kind == "grammar":
            grammar = LLMatcher.grammar_from_lark(any_to_lark(text))
        elif kind == "choice":
            grammar = LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        else:
            grammar = LLMatcher.grammar_from_regex(text)
        if reason := why_not(grammar):
            raise ValueError(reason)
        return str(grammar)

    return answer


class _Bytes:
    """A tokenizer with the library's interface, whose tokens are the bytes."""

    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _named(name: str, grammar: str) -> dict[str, Any]:
    """A grammar of the library as a part of another grammar."""
    if not grammar.startswith("{"):  # it may be Lark's notation
        return {"name": name, "lark_grammar": grammar}
    return {**json.loads(grammar)["grammars"][0], "name": name}


def _calls(wanted: dict[str, Any], ids: dict[str, int]) -> dict[str, str]:
    """The frame of a format around tool calls, as `text.calls` describes it; `ids` are the marks
    that are single tokens."""
    marks = re.compile("(" + "|".join(map(re.escape, ids)) + ")") if ids else None

    def spelled(text: str) -> str:
        parts = marks.split(text) if marks else [text]
        return " ".join(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part) or '""'

    format = wanted["format"]
    names = [format["head"].replace("NAME", name) for name, _ in wanted["tools"]]
    calls = " | ".join(f"{spelled(name)} @tool_{number}" for number, name in enumerate(names))
    more = f"({spelled(format['between'])} call){{0,{wanted['calls_max'] - 1}}}" if wanted["calls_max"] > 1 else ""
    rules = [
        f"calls: {spelled(format['lead'])} call {more} {spelled(format['last'])}",
        f"call: ({calls}) {spelled(format['tail'])}",
    ]
    opens = format["opens"]
    if wanted["is_forced"] or wanted["answer"] is not None:
        rules.append(f"start: {spelled(opens)} calls" + ("" if wanted["is_forced"] else " | @answer"))
    elif not opens:  # text begins with anything else
        rules.append("start: calls | /([^{\\s](.|\\n)*)?/")
    elif opens in ids:
        rules.append(f"start: (TEXT {spelled(opens)} calls)* TEXT")
        # spelled by other tokens, the mark would begin a call that nothing holds
        mark = re.escape(opens).replace("/", "\\/")
        rules.append(f"TEXT: /(.|\\n)*/ & ~/(.|\\n)*{mark}(.|\\n)*/")
    else:
        rules += ["start: (opens calls)* TEXT", f"opens[lazy]: TEXT {spelled(opens)}", r"TEXT: /(.|\n)*/"]
    return {"name": "calls", "lark_grammar": "\n".join(rules)}


def _subschemas(schema: Any, pointer: str = "#") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema in `schema`, with its JSON pointer."""
    waiting = [(pointer, schema)]
    while waiting:
        pointer, schema = waiting.pop()
        if isinstance(schema, list):
            waiting += [(f"{pointer}/{index}", node) for index, node in enumerate(schema)]
        elif isinstance(schema, dict):
            yield pointer, schema
            for key, value in schema.items():
                child = f"{pointer}/{key}"
                if key in _NAMED and isinstance(value, dict):
                    waiting += [(f"{child}/{name}", node) for name, node in value.items()]
                elif key not in _LITERAL and isinstance(value, dict | list):
                    waiting.append((child, value))


def _check(schema: Any) -> None:
    """Raise ValueError for a schema that the library would accept and not enforce."""
    if not isinstance(schema, dict | bool):
        raise ValueError("a schema must be an object")
    for pointer, node in _subschemas(schema):
        try:
            json.loads(json.dumps([node.get(key) for key in _NUMERIC]), parse_int=_exact, parse_float=_exact)
            _check_repeats(node.get("pattern"), f".{{{node.get('minLength')}}}", *(node.get("patternProperties") or ()))
        except ValueError as error:
            raise ValueError(f"{error} ({pointer})") from None
        least, required = node.get("minProperties"), node.get("required")
        if isinstance(least, int) and least > max(1, len(required) if isinstance(required, list) else 0):
            raise ValueError(f"the engine cannot hold the keyword minProperties above the keys required ({pointer})")


def _exact(digits: str) -> None:
    """Raise ValueError for a number that a 64-bit float cannot represent exactly."""
    if abs(float(digits)) > _EXACT_MAX:
        raise ValueError(f"the engine cannot hold the number {digits[:40]} exactly: it is over 2^53 - 1")


def _check_repeats(*expressions: Any) -> None:
    """Raise ValueError if nested repeat counts multiply to too long a text."""
    for expression in expressions:
        outer, times = [1], 1
        for part in reversed(list(_PARTS.finditer(expression if isinstance(expression, str) else ""))):
            if part[1]:
                times *= int(part[1])
                continue
            total, times = outer[-1] * times, 1
            if total > _TEXT_MAX:
                raise ValueError(f"the engine cannot hold a part repeated {total:,} times; it holds {_TEXT_MAX:,}")
            if part[0] == ")":
                outer.append(total)
            elif part[0][0] == "(" and len(outer) > 1:
                outer.pop()


def _without_format(schema: Any, name: str) -> bool:
    """Remove this format everywhere; returns whether it occurred."""
    return [one.pop("format") for _, one in _subschemas(schema) if one.get("format") == name] != []


def _in_place(schema: Any, reason: str) -> str:
    """The reason, with the place in the schema of the keyword that it names."""
    lacks = _LACKS.search(reason)
    if lacks is None and "coerce_one_of" not in reason:
        return reason
    keys = json.loads(lacks[1]) if lacks else ["oneOf"]
    pointer = next((f"{pointer}/{key}" for pointer, node in _subschemas(schema) for key in keys if key in node), "#")
    why = f"the engine cannot hold the keyword {' or '.join(keys)} ({pointer})"
    return why if lacks else f"{why}, whose branches may overlap; anyOf is held"
