"""Are two answers the same? The seam of a judge, equality up to form, and the agreement of short
answers by words and vectors.

Knows texts, and for agreement a function that encodes them; no HTTP, no language model and no
Redis. `agree` runs in the cache worker, which has the encoder. Invariants: an answer that can't be
compared is UNKNOWN, and nothing is learned from it; answers whose numbers, polarity or names differ
are never the same, however similar the texts; two refusals are never the same.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from cache.decision.guards import difference
from cache.decision.text_features import TextFeatures, read
from cache.decision.words import NEGATIONS
from cache.query import MissReason

if TYPE_CHECKING:
    from cache.encoder.types import Encoded  # imports numpy, which a gateway worker does without

EQUALITY = "equality"
PROSE = "prose"
EARLY = "too few answers yet, or too alike"  # of a judge that may rule on the same answers later


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
    numbers are written; JSON by its values, code by its lines.
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
    words = normalised(first)
    if words and words == normalised(second):
        return _equality(Ruling.SAME, "the same words")
    return _equality(Ruling.UNKNOWN, "other words")


def _equality(ruling: Ruling, why: str) -> Judgement:
    return Judgement(ruling, EQUALITY, why)


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
    r"""[-−]?(?<![\w])\d[\d,]*(?:\.\d+)?|[^\W_]+(?:['’][^\W_]+)*|[^\w\s.,;:!?'"`()\[\]{}…–—•·“”‘’„«»¡¿。、「」『』]|_"""
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


_SHORT_CHARS = 1_000
SHORT_WORDS = 25  # of an answer that states a fact; a longer one explains
_SAME_COSINE = 0.93
_SURE_COSINE = 0.97  # where each has a content word that the other lacks
_OTHER_COSINE = 0.5
_OTHER_COSINE_TERSE = 0.8  # answers of a word or two: their other words are all they say
_TERSE_WORDS = 3
_FORM = 4  # letters that the forms of a name begin with: "Europe", "European"
# in German, where all nouns begin with capitals
_BESIDE_NOUNS = frozenset(
    {"das", "dem", "den", "der", "die", "ein", "eine", "ist", "kein", "keine", "nicht", "und", "wir"}
)

_NAME = "agreement"
_STANCES = {"yes": "yes", "yeah": "yes", "yep": "yes", "correct": "yes", "true": "yes"}
_STANCES |= {"no": "no", "nope": "no", "incorrect": "no", "wrong": "no", "false": "no"}


def agree(fresh: str, cached: str, encode: Callable[[Sequence[str]], Encoded]) -> Judgement:
    """Whether a cached answer says what a fresh one does. Encodes both where their words leave it
    open.
    """
    if max(len(fresh), len(cached)) > _SHORT_CHARS:
        return Judgement(Ruling.UNKNOWN, _NAME, "too long to compare by meaning")
    if is_refusal(fresh) and is_refusal(cached):
        return Judgement(Ruling.UNKNOWN, _NAME, _REFUSALS)
    first, second = read(fresh), read(cached)
    if not first.tokens or not second.tokens or max(len(first.tokens), len(second.tokens)) > SHORT_WORDS:
        return Judgement(Ruling.UNKNOWN, _NAME, "too long to compare by meaning")
    differing = difference(first, second)
    if {_stance(first), _stance(second)} == {"yes", "no"}:
        return Judgement(Ruling.DIFFERENT, _NAME, "one says yes, the other no")
    if (differing is MissReason.POLARITY and _is_contrary(first, second)) or (
        differing is MissReason.NUMBERS and _says_other_numbers(first, second)
    ):
        return Judgement(Ruling.DIFFERENT, _NAME, f"{differing} differ")
    if differing is MissReason.NAMES and _says_other_names(first, second):
        return Judgement(Ruling.DIFFERENT, _NAME, "names differ")
    mine, its = encode([fresh, cached]).vectors
    cosine = float(mine @ its)
    is_swapped = bool(first.content_set - second.content_set and second.content_set - first.content_set)
    ruling = Ruling.UNKNOWN
    # two negations are not always none
    has_difference = differing is not None or first.negations != second.negations
    if not has_difference and cosine >= (_SURE_COSINE if is_swapped else _SAME_COSINE):
        ruling = Ruling.SAME
    has_shared_number = not _numbers(first).isdisjoint(_numbers(second))
    other_cosine = _OTHER_COSINE_TERSE if _are_terse(first, second) else _OTHER_COSINE
    # a yes or a no has many words: "Yes, you can hire it.", "It can be hired."
    takes_stance = _stance(first) or _stance(second) or (first.negations and second.negations)
    if is_swapped and not has_shared_number and not takes_stance and cosine < other_cosine:
        ruling = Ruling.DIFFERENT
    return Judgement(ruling, _NAME, f"similarity {cosine:.2f}")


def _is_contrary(first: TextFeatures, second: TextFeatures) -> bool:
    """Whether two answers of other polarity disagree: in the same words but for one each.

    In other words a negation may be of something else: "it is free", "you pay nothing". "No, it
    can't be" negates once.
    """
    if first.negations != second.negations and first.negations and second.negations:
        return False
    mine, its = first.content_set - NEGATIONS, second.content_set - NEGATIONS
    return _are_terse(first, second) or max(len(mine - its), len(its - mine)) <= 1


def _says_other_numbers(first: TextFeatures, second: TextFeatures) -> bool:
    """Whether two answers of other numbers disagree: in the same words, or with no number in
    common.

    Beside a common one, a number may be a step on the way, a further fact, or the same one rounded.
    """
    if _unnumbered(first) == _unnumbered(second):
        return True
    mine, its = _numbers(first), _numbers(second)
    is_told = _are_terse(first, second) or bool(mine and its and first.content_set == second.content_set)
    return is_told and mine.isdisjoint(its)


def _says_other_names(first: TextFeatures, second: TextFeatures) -> bool:
    """Whether each answer has names, and the other says none of them in any form.

    Nothing is seen in a language that writes all nouns as names, unless both are terse.
    """
    if not _are_terse(first, second) and not _BESIDE_NOUNS.isdisjoint({*first.tokens, *second.tokens}):
        return False
    return all(
        mine.names and {name[:_FORM] for name in mine.names}.isdisjoint(word[:_FORM] for word in its.tokens)
        for mine, its in ((first, second), (second, first))
    )


def _are_terse(first: TextFeatures, second: TextFeatures) -> bool:
    return max(len(first.content), len(second.content)) <= _TERSE_WORDS


def _unnumbered(first: TextFeatures) -> list[str]:
    return [word for word in first.tokens if not any(map(str.isdigit, word))]


def _numbers(first: TextFeatures) -> frozenset[str]:
    return frozenset(value for value, _ in first.numbers)


def _stance(first: TextFeatures) -> str:
    """The stance of an answer that begins with yes or no; empty for any other."""
    return _STANCES.get(first.tokens[0], "")
