"""Are two answers the same? The seam of a judge, and the one that costs nothing: equality up to form.

Knows texts, no HTTP, models or Redis. That short answers agree is found in the cache worker, which has the encoder
(`cache.verdicts.agreement`); a judge that asks a model is the gateway's. Invariant: what can't be told is UNKNOWN, and nothing is learned
from it.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Protocol

import msgspec


class Ruling(StrEnum):
    SAME = "same"
    DIFFERENT = "different"
    UNKNOWN = "unknown"


class Opinion(msgspec.Struct, frozen=True):
    """What one judge says, its name, and why in a few words."""

    ruling: Ruling
    judge: str
    why: str


class Told(msgspec.Struct, frozen=True):
    """An answer as a judge reads it, and the prompt it was given for."""

    prompt: str
    answer: str


class Judge(Protocol):
    async def judge(self, fresh: Told, cached: Told) -> Opinion:
        """Whether the cached answer would have done for the fresh one's prompt. Never raises: what fails is UNKNOWN."""


class EqualityJudge:
    """The same text but for case, white space, punctuation and the way numbers are written; JSON by its values, code by its lines."""

    name = "equality"

    async def judge(self, fresh: Told, cached: Told) -> Opinion:
        one, other = fresh.answer.strip(), cached.answer.strip()
        if not one or not other:
            return self._says(Ruling.UNKNOWN, "an empty answer")
        if one == other:
            return self._says(Ruling.SAME, "the same text")
        values = _json(one), _json(other)
        if None not in values:
            is_same = _canonical(values[0]) == _canonical(values[1])
            return self._says(Ruling.SAME if is_same else Ruling.DIFFERENT, "JSON compared by value")
        if "```" in one or "```" in other:
            is_same = [line.rstrip() for line in one.splitlines()] == [line.rstrip() for line in other.splitlines()]
            return self._says(Ruling.SAME if is_same else Ruling.UNKNOWN, "code compared by line")
        if normalised(one) == normalised(other):
            return self._says(Ruling.SAME, "the same words")
        return self._says(Ruling.UNKNOWN, "other words")

    def _says(self, ruling: Ruling, why: str) -> Opinion:
        return Opinion(ruling, self.name, why)


class Panel:
    """Several judges, asked in order until one can tell: the cheap first."""

    def __init__(self, judges: Sequence[Judge]) -> None:
        self._judges = judges

    async def judge(self, fresh: Told, cached: Told) -> Opinion:
        opinion = Opinion(Ruling.UNKNOWN, "", "nobody to ask")
        for judge in self._judges:
            opinion = await judge.judge(fresh, cached)
            if opinion.ruling is not Ruling.UNKNOWN:
                break
        return opinion


_TOKEN = re.compile(r"[-−]?(?<![\w])\d[\d,]*(?:\.\d+)?|[^\W_]+(?:['’][^\W_]+)*|[+\-*/=<>%$€£¥^|&~@\\_#]")
_GROUPED = re.compile(r"[-−]?\d{1,3}(?:,\d{3})+(?:\.\d+)?")


def normalised(text: str) -> tuple[str, ...]:
    """Words, numbers and operators: case, spacing, markdown's emphasis and the punctuation of prose left out."""
    plain = unicodedata.normalize("NFKC", text).casefold().replace("**", "").replace("__", "").replace("’", "'")
    return tuple(_number(token) if token[-1].isdigit() else token for token in _TOKEN.findall(plain))


def _number(token: str) -> str:
    """1,000.50 as 1000.5; what is no number in this notation as it is."""
    bare = token.replace("−", "-")
    if _GROUPED.fullmatch(bare):
        bare = bare.replace(",", "")
    if not re.fullmatch(r"-?\d+(\.\d+)?", bare):
        return token
    whole, _, rest = bare.partition(".")
    rest = rest.rstrip("0")
    return f"{whole}.{rest}" if rest else whole


def _json(text: str) -> Any:
    """The object or array that the text is, in a fence or bare; None where it is none."""
    fenced = re.fullmatch(r"```(?:json)?\s*\n(.*)\n```", text, re.DOTALL)
    body = fenced[1].strip() if fenced else text
    if not body.startswith(("{", "[")):
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _canonical(value: Any) -> str:
    """A text that equal values share: keys in order, 1 and 1.0 alike, true and 1 not."""

    def plain(one: Any) -> Any:
        if isinstance(one, dict):
            return {key: plain(its) for key, its in one.items()}
        if isinstance(one, list):
            return [plain(its) for its in one]
        return int(one) if isinstance(one, float) and one.is_integer() else one

    return json.dumps(plain(value), sort_keys=True)
