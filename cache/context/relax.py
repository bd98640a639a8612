"""The compat of a request without what its last text does not rely on.

Pure, but for what a `Learned` has seen. Where a semantic lookup follows, `relaxed` reads a request
once more. It leaves out volatile spans of the system prompt that the last text does not need, and a
history that it does not need; tools are a set, and the ids of tool calls are their places. Knows no
index and no verdicts. Invariants: a request of which nothing can be left out keeps its byte-exact
compat; the partition, roles, parameters, tools, every other byte of the system prompt and the last
turn's other parts stay in; an answer that shows what was left out is for its own request alone
(`shows_left_out`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from cache.context.dialogue import stands_alone
from cache.context.learned import Learned
from cache.context.questions import DAYS, relied_on, words_of
from cache.context.volatile import TEXT_CHARS_MAX, Span, SpanKind, spans
from cache.decision.text_features import read_for
from cache.decision.words import FUNCTION_WORDS, OTHER_NUMBERS, SMALL
from cache.fingerprint import CONTEXT_CHARS_MAX, Fingerprint, fingerprint

_SpansOf = Callable[[str], tuple[Span, ...]]
_SYSTEM = ("system", "developer")
_HISTORY_CHARS_MAX = 32_768

_encode = msgspec.json.Encoder(order="sorted").encode
_TOKEN = re.compile(r"[^\W_](?:[\w'’.,:/@+-]*[^\W_])?")
_SPAN_CHARS_MAX = 80  # a shorter text that is left out is a span


def relaxed(
    full: Fingerprint,
    body: Mapping[str, Any],
    keyed: Collection[str] = (),
    patterns: tuple[re.Pattern[str], ...] = (),
    learned: Learned | None = None,
) -> Fingerprint:
    """The fingerprint of `body` with its compat relaxed, and with what that leaves out.

    `keyed` is as `fingerprint` takes it; `patterns` are an operator's volatile spans. `learned`
    learns from this request.
    """

    def spans_of(text: str) -> tuple[Span, ...]:
        known = spans(text, patterns)
        return learned.spans(full.partition, text, known) if learned is not None else known

    messages = body.get("messages")
    if full.text is None or not isinstance(messages, list):
        return full
    try:
        with read_for(full.partition):
            reduced = _relaxed(full, body, messages, keyed, spans_of)
    except (ValueError, RecursionError):  # the arguments of a call are deeper as a value than as a text
        return full
    context = "\n".join(text for turn in messages[:-1] for text in _texts_of(turn))
    return msgspec.structs.replace(reduced, context=context) if 0 < len(context) <= CONTEXT_CHARS_MAX else reduced


def _relaxed(
    full: Fingerprint,
    body: Mapping[str, Any],
    messages: list[Any],
    keyed: Collection[str],
    spans_of: _SpansOf,
) -> Fingerprint:
    assert full.text is not None, "its caller has checked it"
    count = next((at for at, message in enumerate(messages) if message.get("role") not in _SYSTEM), len(messages))
    systems, history, last = messages[:count], messages[count:-1], messages[-1]
    tools = {name: _as_set(body[name]) for name in ("tools", "functions") if isinstance(body.get(name), list)}
    is_alone = not history or _is_alone(full.text, history, systems)
    left_out: list[str] = []
    kept = "" if is_alone else "history"
    turns: list[Any] = [*systems, *_by_value(history), last]
    if is_alone:
        left_out += [str(message["content"]) for message in history]
        turns, slots, kept = _without_slots(systems, full.text, spans_of, has_tools=bool(tools))
        turns.append(last)
        left_out += slots
    if turns == messages and all(body[name] == tool for name, tool in tools.items()):
        return msgspec.structs.replace(full, kept=kept) if kept else full
    reduced = fingerprint({**body, **tools, "messages": turns}, full.partition, full.namespace, keyed)
    beside = (full.text, *(part for message in turns[:-1] for part in _texts_in(message))) if left_out else ()
    return msgspec.structs.replace(full, compat=reduced.compat, kept=kept, left_out=tuple(left_out), beside=beside)


def shows_left_out(answer: str, full: Fingerprint) -> bool:
    """Whether an answer has a name, a figure or an id of what its request's compat leaves out, and
    that nothing else in the request has.
    """
    if not full.left_out:
        return False
    beside = frozenset(word for text in full.beside for word in (*_words(text), *_DIGIT.findall(text)))
    telling, plain = _telling(answer) - beside, _squeezed(answer)
    return any(
        _shows_span(text, answer, plain, beside)
        if len(text) <= _SPAN_CHARS_MAX
        else not telling.isdisjoint(_words(text))  # of a history, what looks like names, figures and ids
        for text in full.left_out
    )


def _shows_span(value: str, answer: str, plain: str, beside: frozenset[str]) -> bool:
    """Whether an answer may show a span, also in another spelling, in part, by its initials, or
    counted from it.
    """
    if not _squeezed(value).isascii():
        return True  # a name of another script has many spellings in Latin letters
    tokens = [part for token in _TOKEN.findall(value) for part in _parts(token) if part not in beside]
    forms = {_squeezed(form) for part in tokens for form in (part, part.translate(_UMLAUTS))} | {_squeezed(value)}
    forms.update(figure for figure in _FIGURE.findall(value) if figure not in beside)
    if any(len(form) > 2 and form in plain for form in forms) or not _words(answer).isdisjoint(tokens):
        return True
    is_counted = not _CODE.fullmatch(value) and any(char.isdigit() for char in value)
    is_counted = is_counted or not DAYS.isdisjoint(words_of(value))
    if is_counted:
        said = frozenset(words_of(answer))
        return any(word not in beside and (word in _COUNTING or word[0].isdigit()) for word in said)
    return bool(_INITIALS.search(answer))


def _squeezed(text: str) -> str:
    """The letters and digits of a text, case-folded, without accents."""
    return "".join(char for char in unicodedata.normalize("NFKD", text.casefold()) if char.isalnum())


_UMLAUTS = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue", "ß": "ss", "å": "aa", "ø": "oe", "æ": "ae"})
_CODE = re.compile(r"(?!.*(?:(?:19|20)\d\d|\d{6}T\d))(?=[\d_-]*[A-Za-z])(?=[A-Za-z_-]*\d)[\w-]{5,}")  # no date
_DIGIT = re.compile(r"(?<![\w.,])\d(?![\w.,]\w)\b")  # too short for `_words`
_FIGURE = re.compile(r"\d{3,}")
_INITIALS = re.compile(r"\b[A-Z]\. ?[A-Z]\b")
_COUNTING = DAYS | frozenset((*SMALL, *OTHER_NUMBERS))


def _words(text: str) -> frozenset[str]:
    """The content words of a text, case-folded, and the parts of joined words."""
    return frozenset(word for token in _TOKEN.findall(text) for word in _parts(token) if word not in FUNCTION_WORDS)


def _telling(text: str) -> frozenset[str]:
    """Of these those that begin with a capital or have a digit."""
    telling = (token for token in _TOKEN.findall(text) if token[0].isupper() or not token.isalpha())
    return frozenset(word for token in telling for word in _parts(token) if word not in FUNCTION_WORDS)


def _parts(token: str) -> list[str]:
    folded = token.casefold()
    return [word for word in (folded, *re.split(r"[\W_]+", folded)) if len(word) > 1]


# --- the system prompt


def _without_slots(
    systems: Sequence[Any], question: str, spans_of: _SpansOf, *, has_tools: bool
) -> tuple[list[Any], list[str], str]:
    """The turns of the system prompt without the spans that the question does not rely on, the
    texts of these, and `volatile` where it relies on one.
    """
    texts = [_texts_of(message) for message in systems]
    is_long = sum(len(text) for row in texts for text in row) > TEXT_CHARS_MAX
    spans = [[() if is_long else spans_of(text) for text in row] for row in texts]
    if not any(text_spans for row in spans for text_spans in row):
        return list(systems), [], ""
    turns: list[Any] = []
    left_out: list[str] = []
    kept = ""
    read = [list(zip(*rows, strict=True)) for rows in zip(texts, spans, strict=True)]
    rest = "\n".join(_rest(text, text_spans) for row in read for text, text_spans in row)
    for message, row in zip(systems, read, strict=True):
        parts = []
        for text, text_spans in row:
            needed = relied_on(question, text_spans, rest, has_tools=has_tools)
            free = [span for place, span in enumerate(text_spans) if place not in needed]
            kept = "volatile" if needed else kept
            left_out += [span.value for span in free if span.kind is not SpanKind.ORDER]
            parts.append(_skeleton(text, free) if free else text)
        is_same = all(isinstance(part, str) for part in parts)
        # a list where a turn has a text: no request can send that
        turns.append(message if is_same else [{**message, "content": 0}, parts])
    return turns, left_out, kept


def _skeleton(text: str, free: Sequence[Span]) -> list[Any]:
    """The text in pieces, with the kind of each free span in its place, or its lines as a set."""
    pieces: list[Any] = []
    end = 0
    for span in free:
        lines = sorted(line.strip() for line in span.value.splitlines()) if span.kind is SpanKind.ORDER else []
        pieces += (text[end : span.start], [span.kind.value, *lines])
        end = span.end
    return [*pieces, text[end:]]


def _rest(text: str, spans: Sequence[Span]) -> str:
    return " ".join(piece for piece in _skeleton(text, spans) if isinstance(piece, str))


def _texts_of(turn: Any) -> list[str]:
    """The texts of a system turn; none where it has anything else."""
    content = turn.get("content")
    if isinstance(content, str):
        return [content]
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str) for part in content
    ):
        return [part["text"] for part in content]
    return []


def _texts_in(turn: Any) -> list[str]:
    """All pieces of text that stayed in a turn."""
    if isinstance(turn, dict):
        return _texts_of(turn)
    return [
        piece for part in turn[1] for piece in ([part] if isinstance(part, str) else part) if isinstance(piece, str)
    ]


# --- the history


def _is_alone(question: str, history: Sequence[Any], systems: Sequence[Any]) -> bool:
    """Whether the question needs nothing of a history, which has to be plain talk in turns."""
    roles = ["user", "assistant"] * (len(history) // 2)
    dialogue = []
    for turn, role in zip(history, roles, strict=False):
        text = turn.get("content")
        plain = {name for name, value in turn.items() if value not in (None, [])}
        if turn.get("role") != role or plain != {"role", "content"} or not isinstance(text, str):
            return False
        dialogue.append((role, text))
    if len(dialogue) != len(history) or sum(len(text) for _, text in dialogue) > _HISTORY_CHARS_MAX:
        return False
    if any(not _texts_of(one) for one in systems):
        return False
    return stands_alone(question, dialogue, "\n".join(text for one in systems for text in _texts_of(one)))


def _by_value(history: Sequence[Any]) -> list[Any]:
    """The history with each tool call's id as its place, and its arguments as values."""
    if not any(turn.get("tool_calls") or turn.get("tool_call_id") for turn in history):
        return list(history)
    places: dict[str, int] = {}
    return [_call_by_value(turn, places) for turn in history]


def _call_by_value(turn: Any, places: dict[str, int]) -> Any:
    calls, answered = turn.get("tool_calls"), turn.get("tool_call_id")
    if isinstance(answered, str) and answered in places:
        turn = {**turn, "tool_call_id": places[answered]}
    if isinstance(calls, list) and all(isinstance(call, dict) and isinstance(call.get("id"), str) for call in calls):
        renamed_calls = []
        for call in calls:
            function = call.get("function")
            if isinstance(function, dict) and isinstance(function.get("arguments"), str):
                function = {**function, "arguments": _value_of(function["arguments"])}
            renamed_calls.append({**call, "id": places.setdefault(call["id"], len(places)), "function": function})
        turn = {**turn, "tool_calls": renamed_calls}
    return turn


def _value_of(text: str) -> Any:
    """The value of a JSON text, in a list; any other text as it is."""
    try:
        return [msgspec.json.decode(text)]
    except (msgspec.DecodeError, RecursionError):
        return text


def _as_set(tools: list[Any]) -> list[Any]:
    try:
        return sorted(tools, key=_encode)
    except TypeError:
        return tools
