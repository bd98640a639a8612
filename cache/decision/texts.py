"""A text as words, in every language alike, and what is remembered of texts.

Pure. A word is folded for case and split at apostrophes; of scripts without spaces each character is
a word. What is remembered is remembered for one partition alone. Invariant: reading is total and
deterministic.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from cache.decision import harmless

F = TypeVar("F", bound=Callable[..., Any])

_PARTITION: ContextVar[bytes] = ContextVar("partition", default=b"")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
# "France's capital" is the capital of France
_GENITIVE = re.compile(r"\b(?P<owner>[^\W\d_]{3,})['’]s (?P<thing>[^\W\d_]{3,})\b")
# characters that no screen shows and that are no letters to a model either
INVISIBLE = re.compile(
    "[\u00ad\u034f\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u206f\ufe00-\ufe0f\ufeff]"
)
HIDDEN = re.compile("[\U000e0000-\U000e0fff]")  # tags and variation selectors: a model reads them as letters


@contextlib.contextmanager
def read_for(partition: bytes) -> Iterator[None]:
    """Remember for `partition` alone what is read inside: a text costs the same whether another
    partition has asked it or not.
    """
    token = _PARTITION.set(partition)
    try:
        yield
    finally:
        _PARTITION.reset(token)


def remembered(chars_max: int) -> Callable[[F], F]:
    """Remember a function's results for the texts read last, each for its partition. All together have
    at most `chars_max` characters, so that long texts are fewer.
    """

    def decorate(function: F) -> F:
        latest: dict[tuple[bytes, str], Any] = {}
        before: dict[tuple[bytes, str], Any] = {}
        chars = 0

        @functools.wraps(function)
        def read(text: str) -> Any:
            nonlocal latest, before, chars
            # decision: memos-per-partition
            key = (_PARTITION.get(), text)
            result = latest.get(key)
            if result is None:
                result = before.get(key) or function(text)
                chars += len(text)
                if chars > chars_max // 2:
                    latest, before, chars = {}, latest, len(text)
                latest[key] = result
            return result

        return cast(F, read)

    return decorate


@dataclass(frozen=True, slots=True)
class Words:
    """One text, read. `core` is what is left without the words of `cache.decision.harmless`."""

    word_set: frozenset[str]
    core: tuple[str, ...]


@remembered(1 << 18)
def words_of(text: str) -> Words:
    """Read a text. Results are remembered: the same prompts come again."""
    spelled = _WORD.findall(_GENITIVE.sub(_turned, visible(text)))
    tokens = tuple(word.casefold() for word in spelled)
    return Words(word_set=frozenset(tokens), core=_core(tokens))


def visible(text: str) -> str:
    """The text without the characters that no screen shows."""
    return HIDDEN.sub("", INVISIBLE.sub("", text))


def trigrams_of(text: str) -> frozenset[tuple[str, str, str]]:
    """The runs of three characters. Not remembered: a text's take most room and least time."""
    padded = f"  {visible(text).casefold()} "
    return frozenset(zip(padded, padded[1:], padded[2:], strict=False))


def _turned(match: re.Match[str]) -> str:
    owner, thing = match["owner"], match["thing"]
    is_asking = owner.casefold() + " s" in ("what s", "that s", "here s") or thing.casefold() in harmless.FILLERS
    return match.group() if is_asking else f"{thing} of {owner}"


def _core(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The words without fillers, without courtesies at both ends and without a phrase at the start
    that asks. A phrase that asks for a way leaves "how".
    """
    rest, is_how, before = " ".join(tokens), False, ""
    while before != rest and not is_how:
        before = rest
        for phrases in (harmless.COURTESIES, harmless.ASKING_HOW, harmless.ASKING):
            match = phrases.match(rest)
            if match is not None and match.end() < len(rest):
                is_how = phrases is harmless.ASKING_HOW
                rest = rest[match.end() :]
                break
    rest_words = rest.split(" ")
    for start in range(len(rest_words) - 1, 0, -1):
        if harmless.COURTESIES.fullmatch(" ".join(rest_words[start:])):
            rest_words = rest_words[:start]
    return ("how",) * is_how + tuple(word for word in rest_words if word not in harmless.FILLERS)
