"""The played verifier: it knows the labels, and errs.

One question is about all candidates. For each of them the verifier's word is wrong with a probability: independently, or by topic,
where one draw decides for all questions about answers of that label. It names the likeliest of those that it finds right. A second
question, put otherwise, confirms a yes: half of the time it errs in the same way, else anew. Knows no cache and no rule. Invariant:
the draws follow from the seed and the order of the questions.
"""

from __future__ import annotations

import enum
import hashlib
import random
from collections.abc import Sequence

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


class PlayedVerifier:
    """`error`: its share of wrong words, for each candidate of a question."""

    def __init__(self, error: float, seed: int, *, by_topic: bool = False, pace: Pace = Pace.PROMPT) -> None:
        self.error = error
        self.pace = pace
        self._by_topic = by_topic
        self._seed = seed
        self._random = random.Random(seed)
        self._of_moments = random.Random(seed)
        self._has_erred = False

    @property
    def name(self) -> str:
        pace = "" if self.pace is Pace.PROMPT else f" {self.pace}"
        return f"{100 * self.error:g}%{' topics' if self._by_topic else ''}{pace}"

    def choose(self, label: str, candidates: Sequence[str]) -> int | None:
        """Which of the answers with these labels it calls right for a request of this label: a place; None for none of them."""
        errs = [self._errs(candidate) for candidate in candidates]
        chosen = next((at for at, own in enumerate(candidates) if (own == label) is not errs[at]), None)
        self._has_erred = chosen is not None and errs[chosen]
        return chosen

    def confirm(self, label: str, candidate: str) -> bool:
        """Whether it says the same of its last choice, asked otherwise."""
        errs = self._has_erred if self._random.random() < _SAME_ERROR else self._random.random() < self.error
        return (candidate == label) is not errs

    def moves(self, note: str) -> bool:
        """Whether it calls an answer one that moves: asked twice where it errs about one of two requests that are known."""
        for _ in range(2):
            if not any(self._of_moments.random() < self.error for _ in range(2)):
                return (note == "moves") is not (self._of_moments.random() < self.error)
        return False

    def _errs(self, label: str) -> bool:
        if not self._by_topic:
            return self._random.random() < self.error
        digest = hashlib.blake2b(f"{self._seed} {label}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.error * 2**64
