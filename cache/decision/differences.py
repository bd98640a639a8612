"""How a prompt differs from the wordings of an answer, as kinds that verdicts can free.

Pure. Two texts are aligned word by word (Ratcliff and Obershelp, 1988). A kind is a word that one
side alone has, a word of a run that one side has beyond the other ("+": an addition, whatever its
words), or a word that stands elsewhere ("~"). Kinds are numbers, so that a stored verdict carries
them without a text. A difference counts only if the prompt has it from every near wording of the
answer. Invariant: only right verdicts free a kind, and a wrong one never does.
"""

from __future__ import annotations

import difflib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cache.decision.texts import Words, words_of

KINDS_MAX = 10  # of one comparison, the heaviest first; more are never vouched for
_WORDINGS = 6  # of an answer, the nearest: more tell little
_WORDS_MAX = 60  # a longer text is only compared as a set
_UNSEEN = 30  # texts of other words that a namespace is assumed to have had before its first
_DOUBT = 4.0  # verdicts that a kind needs to count half
# right verdicts on so many answers free a kind, with so many wrong ones at most to each right one
_FREED_GROUPS, _FREED_WRONG = 2, 0.5
_ADDED_GROUPS, _ADDED_WRONG = 3, 0.25  # the same of an addition


@dataclass(frozen=True, slots=True)
class WordDifference:
    """A word of one side. `form` is "" for a word alone, "+" or "++" for one of an addition, "~"
    for one elsewhere.
    """

    word: str
    is_asked: bool
    form: str = ""

    @property
    def is_addition(self) -> bool:
        return self.form.startswith("+")

    @property
    def kind(self) -> int:
        return _number(self.form + self.word)


@dataclass(slots=True)
class WordCounts:
    """In how many of a namespace's texts each word occurs."""

    texts: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, text: str, sign: int = 1) -> None:
        self.texts += sign
        for word in words_of(text).word_set:
            self.counts[word] += sign
            if not self.counts[word]:
                del self.counts[word]

    def weight(self, word: str) -> float:
        """Inverse document frequency between 0 and 1."""
        total = self.texts + _UNSEEN
        return max(0.0, math.log(total / (1 + self.counts.get(word, 0))) / math.log(total))


def between(prompt: Words, known: Words) -> dict[tuple[str, bool], str]:
    """The differences of two texts: by word and side, its form."""
    if max(len(prompt.core), len(known.core)) > _WORDS_MAX:
        only = [(word, True) for word in set(prompt.core) - set(known.core)]
        only += [(word, False) for word in set(known.core) - set(prompt.core)]
        return dict.fromkeys(only, "+")
    forms: dict[tuple[str, bool], str] = {}
    matcher = difflib.SequenceMatcher(None, prompt.core, known.core, autojunk=False)
    for tag, start, stop, low, high in matcher.get_opcodes():
        if tag == "equal":
            continue
        runs = (prompt.core[start:stop], True), (known.core[low:high], False)
        is_end = (stop == len(prompt.core) and high == len(known.core)) or not (start or low)
        for (run, is_asked), (other, _) in (runs, runs[::-1]):
            is_addition = not other and (is_end or len(run) > 1)
            text = known.core if is_asked else prompt.core
            for word in run:
                if is_addition:
                    forms[word, is_asked] = "+" if word not in text else "++"
                elif word not in text:
                    forms.setdefault((word, is_asked), "")
                elif word not in other:
                    forms.setdefault((word, is_asked), "~")
    return forms


def from_all(prompt: str, wordings: Sequence[str]) -> list[WordDifference]:
    """What differs from every one of the near wordings of one answer."""
    left = words_of(prompt)
    first, *others = [between(left, words_of(text)) for text in wordings[:_WORDINGS]]
    for other in others:
        # a prompt that has a wording whole, and more, is that wording with an addition
        is_whole = len({is_asked for _, is_asked in other}) == 1
        first = {
            key: other[key] if is_whole and other[key] else form
            for key, form in first.items()
            # another wording has the word, elsewhere
            if key in other and not (form in ("", "+") and other[key] in ("++", "~"))
        }
    return [WordDifference(word, is_asked, form) for (word, is_asked), form in first.items()]


def _number(word: str) -> int:
    """24 bits, so that float32 holds it exactly; never 0."""
    return (zlib.crc32(word.encode("utf-8", "surrogatepass")) & 0xFFFFFF) or 1


class Freed:
    """What verdicts say of each kind: how often answers were right and wrong where it differed.

    The right ones count whole, a wrong one is divided among the kinds that differed.
    """

    def __init__(self) -> None:
        self._counts: dict[int, tuple[float, float, frozenset[bytes]]] = {}
        self._all = (1.0, 1.0)

    def learn(self, kinds: Iterable[int], is_right: bool, group: bytes) -> None:
        """Count one verdict."""
        counted = [kind for kind in kinds if kind]
        blame, right = float(not is_right) / max(1, len(counted)), float(is_right)
        self._all = (self._all[0] + right, self._all[1] + float(not is_right))
        for kind in counted:
            before = self._counts.get(kind, (0.0, 0.0, frozenset()))
            groups = before[2] | {group} if is_right and len(before[2]) < _ADDED_GROUPS else before[2]
            self._counts[kind] = (before[0] + right, before[1] + blame, groups)

    def has(self, difference: WordDifference) -> bool:
        """Whether right verdicts on several answers have freed its kind."""
        right, wrong, groups = self._counts.get(difference.kind, (0.0, 0.0, frozenset()))
        least, most = (_ADDED_GROUPS, _ADDED_WRONG) if difference.is_addition else (_FREED_GROUPS, _FREED_WRONG)
        return len(groups) >= least and wrong <= most * right

    def log_odds(self, kind: int) -> float:
        """How much likelier than usual an answer is right where this differs."""
        right, wrong, _ = self._counts.get(kind, (0.0, 0.0, frozenset()))
        share = self._all[0] / sum(self._all)
        return math.log((right + _DOUBT * share) / (wrong + _DOUBT * (1 - share)) * (1 - share) / share)


def kinds_of(row: NDArray[np.float64], start: int) -> list[int]:
    return [kind for kind in row[start : start + KINDS_MAX].astype(np.int64).tolist() if kind]
