"""Are two answers the same? The seam of a judge, and equality up to form.

Knows texts; no HTTP, no language model and no Redis. Invariants: an answer that can't be compared is
UNKNOWN, and nothing is learned from it; two refusals are never the same.
"""

from __future__ import annotations

import json
import re
import unicodedata
from enum import StrEnum
from typing import Any, Protocol

import msgspec

EQUALITY = "equality"
PROSE = "prose"


class Ruling(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


class Judgement(msgspec.Struct, frozen=True):
    """The ruling of one judge, its name, and the reason in a few words."""

    ruling: Ruling
    judge: str
    why: str


class QAPair(msgspec.Struct, frozen=True):
    """An answer as a judge reads it, and the prompt it was given for."""

    prompt: str
    answer: str


class Judge(Protocol):
    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        """Whether the cached answer would have served the fresh one's prompt. Never raises: a
        failure is UNKNOWN.
        """


def equal(fresh: str, cached: str) -> Judgement:
    """Whether two answers are the same text but for case, white space, punctuation and the way
    numbers are written; JSON by its values, code by its lines. A label or a few words are different
    where they share none.
    """
    first, second = fresh.strip(), cached.strip()
    if not first or not second:
        return _equality(Ruling.UNKNOWN, "an empty answer")
    if is_refusal(first) and is_refusal(second):
        return _equality(Ruling.UNKNOWN, _REFUSALS)
    if first == second:
        return _equality(Ruling.SAME, "the same text")
    values = _json(first), _json(second)
    if None not in values:
        is_same = values[0] == values[1]
        return _equality(Ruling.SAME if is_same else Ruling.DIFFERENT, "JSON compared by value")
    if "```" in first or "```" in second:
        is_same = [line.rstrip() for line in first.splitlines()] == [line.rstrip() for line in second.splitlines()]
        return _equality(Ruling.SAME if is_same else Ruling.UNKNOWN, "code compared by line")
    mine, its = normalised(first), normalised(second)
    if mine and mine == its:
        return _equality(Ruling.SAME, "the same words")
    bare, its_bare = ({word.lstrip("-−") for word in all_ if word[-1].isalnum()} for all_ in (mine, its))
    is_label = len(first.split()) == len(second.split()) == 1 and bare != its_bare
    is_terse = max(len(mine), len(its)) <= _TERSE_WORDS and bare.isdisjoint(its_bare)
    if bare and its_bare and (is_label or is_terse):
        return _equality(Ruling.DIFFERENT, "other words, and nothing else")
    return _equality(Ruling.UNKNOWN, "other words")


def _equality(ruling: Ruling, why: str) -> Judgement:
    return Judgement(ruling, EQUALITY, why)


_TERSE_WORDS = 3
_REFUSALS = "refusals, which say nothing of their prompts"
_REFUSAL_CHARS = 300
_REFUSAL = re.compile(
    r"\b(?:i(?:'m| am) (?:unable|not able)|(?:sorry|afraid),? (?:but )?i (?:can|could|do|have|won|will)"
    r"|(?:can't|cannot|can not|won't) (?:help|assist|answer|provide|do that|comply)"
    r"|i (?:do not|don't) (?:know|have (?:enough|access))"
    r"|something went wrong|(?:didn't|did not|don't|do not) (?:quite )?understand"
    r"|(?:can|could) you (?:please )?(?:clarify|rephrase))"
)


def is_refusal(answer: str) -> bool:
    """Whether a short answer declines to answer. Equal ones do not show that their prompts ask
    for the same.
    """
    return len(answer) <= _REFUSAL_CHARS and _REFUSAL.search(answer.casefold().replace("’", "'")) is not None


# words, numbers, and each sign that is no punctuation of prose: operators, emoji, vowel signs
_TOKEN = re.compile(
    r"""[-−]?(?<![\w])\d+(?:,\d+)*(?:\.\d+)?|[^\W_]+(?:['’][^\W_]+)*|[^\w\s.,;:!?'"`()\[\]{}…–—•·“”‘’„«»¡¿。、「」『』]|_"""
)
_GROUPED = re.compile(r"[-−]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def normalised(text: str) -> tuple[str, ...]:
    """Words, numbers and signs: case, spacing, markdown's emphasis and the punctuation of prose
    left out.
    """
    plain = unicodedata.normalize("NFKC", text).casefold().replace("**", "").replace("__", "").replace("’", "'")
    return tuple(_number(token) if token[-1].isdigit() else token for token in _TOKEN.findall(plain))


def _number(token: str) -> str:
    """A number in one notation: 1,000.50 becomes 1000.5. Any other text stays as it is."""
    bare = token.replace("−", "-")
    if _GROUPED.fullmatch(bare):
        bare = bare.replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", bare):
        return token
    whole, _, rest = bare.partition(".")
    rest = rest.rstrip("0")
    return f"{whole}.{rest}" if rest else whole


def _json(text: str) -> str | None:
    """The object or array that the text is, in a fence or bare, as a text that equal values share. None
    for any other text, or one that is nested too deeply.
    """
    # one way to match each character: a run of line feeds must not take the square of its length
    fenced = re.fullmatch(r"```(?:json)?[^\S\n]*\n(.*)\n```", text, re.DOTALL)
    body = fenced[1].strip() if fenced else text
    if not body.startswith(("{", "[")):
        return None
    try:
        return _canonical(json.loads(body))
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> str:
    """A text that equal values share: keys in order, 1 and 1.0 alike, true and 1 not."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(its) for key, its in value.items()}
        if isinstance(value, list):
            return [plain(its) for its in value]
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return json.dumps(plain(value), sort_keys=True)
