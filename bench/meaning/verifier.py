"""The played verifier: it knows the labels, and errs.

One question is about all candidates. For each of them the verifier's word is wrong with a probability: independently, or by topic,
where one draw decides for all questions about answers of that label. It names the likeliest of those that it finds right. A yes
that the bound can't bear alone is confirmed by a second question about that candidate: half of the time it errs in the same way,
else anew. It remembers pairs of wordings and is not asked about one twice. Knows no cache and no rule. Invariant: the draws follow
from the seed and the order of the questions.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cache.query import Asked

PRICE = 1 / 16  # of a question, where the answer of the model costs 1
ANSWER_S = 3.0
QUESTION_S = 0.4
LATE_S = 1.5  # after so long a generation begins without the verifier's word
_SAME_ERROR = 0.5


class Pace(enum.StrEnum):
    """`slow`: each word comes too late to serve, and still counts. `absent`: none comes, and none is paid for."""

    PROMPT = "prompt"
    SLOW = "slow"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A cached answer that a question is about, and its label."""

    asked: Asked
    label: str


@dataclass(frozen=True, slots=True)
class Word:
    """What came of it. `chosen`: the place of the candidate to serve, None if none may be served; `rights`: what is known now
    of each candidate, None of one on which there is no word; `questions`, and the seconds that they held up the request."""

    chosen: int | None
    rights: tuple[bool | None, ...]
    questions: int = 0
    seconds: float = 0.0


class PlayedVerifier:
    """`error`: its share of wrong words, for each candidate of a question. `error_max`: from which chance on that a yes is wrong it
    is confirmed."""

    def __init__(
        self, error: float, seed: int, *, by_topic: bool = False, pace: Pace = Pace.PROMPT, error_max: float = 0.01
    ) -> None:
        self.error = error
        self.pace = pace
        self._by_topic = by_topic
        self._error_max = error_max
        self._seed = seed
        self._random = random.Random(seed)
        self._words: dict[tuple[object, ...], bool] = {}

    def ask(self, text: str, label: str, candidates: Sequence[Candidate]) -> Word:
        """About a prompt with this text, whose right answer has this label."""
        keys = [(text, one.asked.text, one.asked.differing) for one in candidates]
        known = [self._words.get(key) for key in keys]
        if True in known:
            return Word(known.index(True), tuple(known))
        left = [place for place, word in enumerate(known) if word is None]
        if not left or self.pace is Pace.ABSENT:
            return Word(None, tuple(known))
        questions = 1
        errs = {place: self._errs(candidates[place].label) for place in left}
        chosen = next((p for p in left if (candidates[p].label == label) is not errs[p]), None)
        if chosen is not None and self._wants_confirmation(candidates[chosen].asked.p):
            questions += 1
            errs_again = errs[chosen] if self._random.random() < _SAME_ERROR else self._random.random() < self.error
            if (candidates[chosen].label == label) is errs_again:
                known[chosen], chosen = False, None
        elif chosen is None:
            known = [False if place in errs else word for place, word in enumerate(known)]
        if chosen is not None:
            known[chosen] = True
        for key, word in zip(keys, known, strict=True):
            if word is not None:
                self._words[key] = word
        if self.pace is Pace.SLOW:
            return Word(None, tuple(known), questions, LATE_S)
        return Word(chosen, tuple(known), questions, questions * QUESTION_S)

    def _wants_confirmation(self, p: float) -> bool:
        """Whether a yes is wrong too often, where its answer is right with probability `p` before."""
        wrong, right = (1 - p) * self.error, p * (1 - self.error)
        return wrong > self._error_max * (wrong + right)

    def _errs(self, label: str) -> bool:
        if not self._by_topic:
            return self._random.random() < self.error
        digest = hashlib.blake2b(f"{self._seed} {label}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.error * 2**64
