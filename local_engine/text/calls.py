"""Splits an answer's text into thinking, text and tool calls.

Each family writes calls in its own format; `FORMATS` lists them, and one reader reads them all.
Sources: the chat templates of the models, and Meta's, Mistral's and Qwen's pages on function
calling. Knows no tokens and no templates. Invariants: the parts do not depend on how a text is cut
into pieces; text that only looks like a call (unknown tool, invalid arguments) stays text; only
white space beside a frame is lost.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from local_engine.messages import ANY_TOOL, CallPart, Grammar, InvalidRequest


@dataclass(frozen=True, slots=True)
class Format:
    """How models with `mark` in their template write calls: after `opens`, anywhere in the answer
    (empty: only at its beginning), and up to `closes`. If a grammar forces calls, it writes
    `opens`, `lead`, then for each call `head` with the name, the arguments and `tail`, with
    `between` them, and `last`."""

    mark: str
    opens: str
    closes: str = ""
    lead: str = ""
    head: str = '{"name": "NAME", "arguments": '
    tail: str = "}"
    between: str = ", "
    last: str = "]"


_TAGGED = Format(
    "<tool_call>", "<tool_call>", "</tool_call>", lead="\n", between="\n</tool_call>\n<tool_call>\n",
    last="\n</tool_call>",
)  # fmt: skip
_ARGS, _CALL_ID, _PYTHON_TAG = "[ARGS]", "[CALL_ID]", "<|python_tag|>"
_BARE: dict[str, Any] = {"opens": "", "head": '{"name": "NAME", "parameters": ', "between": "; ", "last": ""}
FORMATS = (
    _TAGGED,  # Hermes, Qwen, SmolLM3, Granite 4
    Format(_ARGS, "[TOOL_CALLS]", head=f"NAME{_ARGS}", tail="", between="[TOOL_CALLS]", last=""),  # Mistral, 2025 on
    Format("[TOOL_CALLS]", "[TOOL_CALLS]", lead="["),  # Mistral
    Format("<|tool", "<|tool_call|>", "<|/tool_call|>", lead="["),  # Phi-4-mini, Granite 3
    # OLMo 3, which by itself writes Python
    Format("<function_calls>", "<function_calls>", "</function_calls>", lead="\n[", last="]\n</function_calls>"),
    Format('"parameters": ', **_BARE),  # Llama 3
    Format("[func_name1(", **_BARE),  # Llama 3.2 and 4, which write Python
)
_OTHER_TAGS = "<function="  # Qwen3-Coder writes XML inside of its tags
THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
MARKS = frozenset(
    {_ARGS, _CALL_ID, _PYTHON_TAG, *(mark for one in FORMATS for mark in (one.opens, one.closes) if mark)}
)


def format_of(template: str) -> Format | None:
    """The format in which a chat template lets its model write calls; None if unknown."""
    if _OTHER_TAGS in template:
        return None
    return next((one for one in FORMATS if one.mark in template), None)


DEFAULT = _TAGGED

CALLS_MAX = 16  # in one answer, where a grammar forces them


def calls_grammar(
    format: Format, tools: Sequence[Mapping[str, Any]], choice: str, calls_max: int, answer: Grammar | None
) -> Grammar | None:
    """The grammar of an answer that may call these tools. It demands a call if `choice` is a tool's
    name or `ANY_TOOL`. Otherwise the answer may be text, or match `answer`; then a tool that is not
    `strict` may get any arguments. None if any text is allowed."""
    functions = [tool["function"] for tool in tools if choice in ("", ANY_TOOL, tool["function"]["name"])]
    if not choice and answer is None and not any(function.get("strict") for function in functions):
        return None
    schemas = [
        (function["name"], _schema(function) if choice or function.get("strict") else {"type": "object"})
        for function in functions
    ]
    description = {
        "format": asdict(format),
        "tools": schemas,
        "calls_max": calls_max or CALLS_MAX,
        "is_forced": bool(choice),
    }
    form = None if answer is None or choice else {"kind": answer.kind, "text": answer.text}
    return Grammar("calls", json.dumps({**description, "answer": form}))


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, which are an object without unnamed properties: these
    would fail at the tool. Raises InvalidRequest."""
    parameters = function.get("parameters") or {"properties": {}}
    kind = parameters.get("type", "object")
    if kind != "object" and (not isinstance(kind, list) or "object" not in kind):
        raise InvalidRequest(f"the parameters of the tool {function['name']} must be an object", param="tools")
    names, required = parameters.get("properties"), parameters.get("required", ())
    is_all = isinstance(names, dict) and isinstance(required, list | tuple) and names.keys() >= set(map(str, required))
    closed = {"additionalProperties": False} if is_all and _NAMERS.isdisjoint(parameters) else {}
    return {**closed, **parameters, "type": "object"}


# with these, a schema names properties elsewhere, too
_NAMERS = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "dependentSchemas"})


_BROKEN_MAX = 16  # texts that only begin like a call, in one answer
_BRACKET = re.compile(r"\\.?|[\"'{}\[\]()]", re.DOTALL)
_NAMED = re.compile(rf"([\w.-]{{1,64}})(?:{re.escape(_CALL_ID)}\w{{0,40}})?(?:{re.escape(_ARGS)})?\s{{0,8}}(?=[{{(])")
_NAMES = re.compile(r"[\w.-]{1,64}(?:\[[\w\[\]]{0,60})?\s{0,8}")  # all that one may begin with
# the beginning of a call that a grammar wrote
_HEAD = re.compile(
    rf"\s*\[?(?:\{{\"name\": \"([\w-]+)\", \"(?:arguments|parameters)\": |([\w-]+){re.escape(_ARGS)})(?=\{{)"
)


class _Call(msgspec.Struct):
    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_read_calls = msgspec.json.Decoder(_Call | list[_Call]).decode


@dataclass(slots=True)
class AnswerParts:
    """The text, the thinking and the calls that one piece of text adds to an answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[CallPart] = field(default_factory=list)


class AnswerReader:
    """Reads one answer piece by piece.

    `thinking`: the marks of the model's thinking block, which is already open if the answer
    `thinks`. `format` and `names` are the tools'. `is_held`: a grammar keeps calls in their frame,
    so they leave before they are complete. `is_forced`: it allows only calls, so any text belongs
    to a cut frame. `is_alone`: other text must match a grammar, so calls stand at the beginning or
    nowhere. After `calls_max` calls the answer is over; 0 is unbounded.
    """

    def __init__(
        self,
        thinking: tuple[str, str] | None = None,
        *,
        thinks: bool = False,
        format: Format | None = None,
        names: Collection[str] = (),
        is_held: bool = False,
        is_forced: bool = False,
        is_alone: bool = False,
        calls_max: int = 0,
    ) -> None:
        self._thinking, self._format, self._names = thinking, format, names
        self._is_held, self._is_alone, self._calls_max = is_held, is_alone, calls_max
        self._is_forced = is_forced
        self._is_bare = format is not None and not format.opens
        self._state = self._think if thinks else self._begin
        self._strips = thinks  # white space before the next text is part of a frame
        self._rest = self._frame = ""  # text that is not read, the mark before the call in it
        self._at, self._depth, self._quote = 0, 0, ""  # how far brackets are counted in the rest
        self._calls = self._broken = 0

    @property
    def thinks(self) -> bool:
        """Whether the text so far ends in a thinking block."""
        return self._state == self._think

    @property
    def is_framed(self) -> bool:
        """Whether the text so far ends in a thinking block or a call, which no stop string cuts."""
        return self._state in (self._think, self._call, self._arguments)

    @property
    def is_over(self) -> bool:
        """Whether the last allowed call is complete."""
        return 0 < self._calls_max <= self._calls and not self.is_framed

    def read(self, text: str, *, is_last: bool = False) -> AnswerParts:
        """The parts that are certain so far; with `is_last` all parts."""
        self._rest += text
        parts = AnswerParts()
        while self._state(parts, is_last):
            pass
        if self._is_forced:
            parts.text = ""
        return parts

    # -- each state takes what it can from the rest; false: it needs more text

    def _begin(self, parts: AnswerParts, is_last: bool) -> bool:
        """Before any text: a thinking block may open, or a call without a mark may begin."""
        text = self._rest.lstrip()
        opens = self._thinking[0] if self._thinking is not None and not self._strips else None
        marks = [mark for mark in (opens, _PYTHON_TAG if self._is_bare else None) if mark is not None]
        if not is_last and any(_is_part(text, mark) for mark in marks):
            return False
        if opens is not None and text.startswith(opens):
            self._rest, self._state, self._strips = text.removeprefix(opens), self._think, True
        elif self._is_bare and text.startswith(("{", "[", _PYTHON_TAG)):
            rest = text.removeprefix(_PYTHON_TAG)
            self._open(rest, frame=self._rest[: len(self._rest) - len(rest)])
        else:
            self._state = self._text
        return True

    def _think(self, parts: AnswerParts, is_last: bool) -> bool:
        assert self._thinking is not None
        text_before, mark, after = self._rest.partition(self._thinking[1])
        if self._strips:
            text_before = text_before.lstrip()
        sure_text = text_before.rstrip() if mark or is_last else _sure(text_before, self._thinking[1])
        parts.reasoning += sure_text
        self._strips = self._strips and not sure_text
        self._rest = after if mark else text_before[len(sure_text) :]
        if mark:
            self._state, self._strips = self._begin, True
        return bool(mark)

    def _text(self, parts: AnswerParts, is_last: bool) -> bool:
        opens = self._format.opens if self._format is not None and self._broken < _BROKEN_MAX else ""
        if self._is_alone and not self._calls and opens:
            text = self._rest.lstrip() if self._strips else self._rest
            if not opens.startswith(text[: len(opens)]):
                self._broken, opens = _BROKEN_MAX, ""
        text_before, mark, after = self._rest.partition(opens) if opens else (self._rest, "", "")
        if self._strips:
            text_before = text_before.lstrip()
        sure_text = text_before.rstrip() if mark else text_before if is_last or not opens else _sure(text_before, opens)
        parts.text += sure_text
        self._strips = self._strips and not sure_text
        self._rest = text_before[len(sure_text) :]
        if mark:
            self._open(after, frame=self._rest + opens)
        return bool(mark)

    def _open(self, text_left: str, frame: str = "") -> None:
        self._rest, self._frame, self._state = text_left, frame, self._call
        self._at, self._depth, self._quote = 0, 0, ""

    def _call(self, parts: AnswerParts, is_last: bool) -> bool:
        """Read calls: JSON, or Python, or a name and JSON."""
        if self._is_held and (head := _HEAD.match(self._rest)) and (head[1] or head[2]) in self._names:
            parts.calls.append(CallPart(self._calls, head[1] or head[2]))
            self._calls += 1
            self._open(self._rest[head.end() :])
            self._state = self._arguments
            return True
        if not self._at:
            body = self._rest.lstrip()
            self._frame, self._rest = self._frame + self._rest[: len(self._rest) - len(body)], body
            if not body.startswith(("{", "[")):
                name_match = _NAMED.match(body)
                if name_match is None and not is_last and (not body or _NAMES.fullmatch(body)):
                    return False
                self._at = name_match.end() if name_match is not None else -1
        end = self._end() if self._at >= 0 else -1
        if end == 0 and not is_last:
            return False
        calls = self._made(self._rest[:end]) if end > 0 else []
        for name, arguments in calls:
            parts.calls += (CallPart(self._calls, name), CallPart(self._calls, "", arguments))
            self._calls += 1
        if calls:
            self._rest, self._state, self._strips = self._rest[end:], self._after, True
        else:  # text: at least the frame, or the first character
            self._broken += 1
            parts.text += self._frame or self._rest[:1]
            self._rest = self._rest if self._frame else self._rest[1:]
            self._state, self._strips = self._text, False
        return True

    def _after(self, parts: AnswerParts, is_last: bool) -> bool:
        """After a call: its frame closes, another call follows in it, or text."""
        assert self._format is not None
        closes, self._rest = self._format.closes, self._rest.lstrip(" \t\r\n" if self._format.opens else " \t\r\n;")
        opens = self._format.opens
        if not self._rest or (not is_last and any(_is_part(self._rest, mark) for mark in (closes, opens))):
            return False
        if closes and self._rest.startswith(closes):
            self._rest, self._state = self._rest.removeprefix(closes), self._text
        elif opens and self._rest.startswith(opens):
            self._state = self._text
        elif self._rest[0] in "{[" or (closes and _NAMED.match(self._rest)):
            self._open(self._rest)
        elif closes and not is_last and _NAMES.fullmatch(self._rest):
            return False
        else:
            self._state = self._text
        return True

    def _arguments(self, parts: AnswerParts, is_last: bool) -> bool:
        """Pass on the arguments of a call that a grammar enforces, as they arrive."""
        end = self._end()
        sure_text = self._rest[: end or self._at]
        if sure_text:
            parts.calls.append(CallPart(self._calls - 1, "", sure_text))
        self._rest, self._at = self._rest[len(sure_text) :], 0
        if end:
            self._state = self._tail
        return end > 0

    def _tail(self, parts: AnswerParts, is_last: bool) -> bool:
        """After a call that a grammar enforces: the next call begins, or the frame ends."""
        assert self._format is not None
        next_call, frame_end = self._format.tail + self._format.between, self._format.tail + self._format.last
        if self._rest.startswith(next_call):
            self._open(self._rest.removeprefix(next_call))
            return True
        if not is_last and (_is_part(self._rest, next_call) or _is_part(self._rest, frame_end)):
            return False
        whole = self._rest.startswith(frame_end)
        self._rest = self._rest.removeprefix(frame_end) if whole or not next_call.startswith(self._rest) else ""
        self._state, self._strips = self._text, True
        return True

    def _end(self) -> int:
        """The end of the first brackets; 0 while they are open."""
        for bracket in _BRACKET.finditer(self._rest, self._at):
            mark = bracket[0]
            if mark == "\\":  # what it escapes has not come
                self._at = bracket.start()
                return 0
            if self._quote:
                self._quote = "" if mark == self._quote else self._quote
            elif mark in "{[(":
                self._depth += 1
            elif mark in "}])":
                self._depth -= 1
                if self._depth <= 0:
                    return bracket.end()
            elif mark in "\"'":
                self._quote = mark
        self._at = len(self._rest)
        return 0

    def _made(self, body: str) -> list[tuple[str, str]]:
        """The calls in `body`: names, and arguments as JSON. Empty if it contains anything else."""
        name_match = _NAMED.match(body)
        try:
            if name_match is None:
                calls = _python(body) if body[0] == "[" and not body[1:].lstrip().startswith("{") else _json(body)
            elif body[name_match.end()] == "{":
                calls = [(name_match[1], _object(body[name_match.end() :]))]
            else:
                calls = _python(f"[{body}]")
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return []
        return calls if all(name in self._names for name, _ in calls) else []


def _is_part(text: str, mark: str) -> bool:
    return text != mark and mark.startswith(text)


def _sure(text: str, mark: str) -> str:
    """The beginning of `text` that is neither white space before `mark` nor a part of `mark`."""
    return text[: len(text) - begun(text, mark)].rstrip()


def begun(text: str, mark: str) -> int:
    """The length of the longest end of `text` that is a proper beginning of `mark`."""
    return next((size for size in range(min(len(mark) - 1, len(text)), 0, -1) if text.endswith(mark[:size])), 0)


def _json(body: str) -> list[tuple[str, str]]:
    """The calls in a JSON text. Raises ValueError."""
    found = _read_calls(body)
    every = found if isinstance(found, list) else [found]
    return [(one.name, _object(bytes(one.arguments or one.parameters).decode())) for one in every]


def _object(arguments: str) -> str:
    """The arguments as a JSON object, which some models write in a string. Raises ValueError."""
    value = msgspec.json.decode(arguments)
    if isinstance(value, str):
        arguments, value = value, msgspec.json.decode(value)
    if not isinstance(value, dict | None):
        raise ValueError("arguments are an object")
    return "{}" if value is None else arguments


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's names by Python's constants."""

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        if len({ast.dump(key) for key in node.keys if key is not None}) < len(node.keys):
            raise ValueError("a key is there twice")
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        words: dict[str, Any] = {"true": True, "false": False, "null": None}
        return ast.Constant(words[node.id]) if node.id in words else node


def _python(body: str) -> list[tuple[str, str]]:
    """A list of calls with named arguments. Raises ValueError, TypeError, SyntaxError."""
    calls = []
    tree = _JsonWords().visit(ast.parse(body, mode="eval")).body
    for node in tree.elts if isinstance(tree, ast.List) else ():
        if not isinstance(node, ast.Call) or node.args or any(one.arg is None for one in node.keywords):
            raise ValueError("a call has named arguments")
        given = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
        if len(given) < len(node.keywords):
            raise ValueError("an argument is there twice")
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # an escape may spell half of a surrogate pair: UnicodeEncodeError, a ValueError
        calls.append((ast.unparse(node.func), arguments))
    return calls
