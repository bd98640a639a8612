"""What a gateway decides around a lookup, by the product's own pure parts: whether to ask the verifier, what its yes may cost, which
hits are checked.

The costs and times are those of the played verifier. Each pair of wordings is asked about once. Knows no cache object and no set.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bench.meaning.verifier import ANSWER_S, LATE_S, PRICE, QUESTION_S, Pace, PlayedVerifier
from cache.query import Asked, Query
from gateway.learning.checks import check_share
from gateway.learning.exam import Exam
from policies.asking import (
    Calibration,
    ErrorAccount,
    Expense,
    any_right,
    false_yes_again,
    needs_a_second,
    pays,
    risk_of,
)
from policies.routing import PolicyKind

_ANSWER_MICROUSD = 1_000
_CHECKED = 0.03  # of the hits, in the end
_QUESTION = Expense(round(_ANSWER_MICROUSD * PRICE), QUESTION_S * 1_000)
_ANSWER = Expense(_ANSWER_MICROUSD, ANSWER_S * 1_000)


@dataclass(frozen=True, slots=True)
class Word:
    """What came of an undecided lookup. `chosen`: the place of the candidate to serve, with its risk, None if none is served;
    `rights`: what the verifier said of each now, None where it said nothing; `questions`, and the seconds that they took."""

    chosen: int | None = None
    risk: float = 0.0
    rights: tuple[bool | None, ...] = ()
    questions: int = 0
    seconds: float = 0.0


class Gate:
    """One namespace is one account, as at a gateway."""

    def __init__(self, verifier: PlayedVerifier | None, error_max: float, seed: int) -> None:
        self.verifier = verifier
        self._error_max = error_max
        self._random = random.Random(seed)
        self._errors = ErrorAccount()
        self._calibration = Calibration()
        self._exam = Exam(self._random.random, is_named=True)
        self._hits: Counter[bytes] = Counter()
        self._words: dict[tuple[object, ...], bool] = {}

    def pay(self, query: Query) -> None:
        """One more request."""
        if self._errors.pay(query.compat, self._error_max):
            self._errors.start(query.compat, self._error_max)

    def charge(self, query: Query, risk: float) -> None:
        """A hit with this risk was served."""
        self._errors.charge(query.compat, risk)

    def draw_check(self, query: Query) -> float | None:
        """The share with which a hit is checked, if it is."""
        share = check_share(self._hits[query.namespace], _CHECKED)
        self._hits[query.namespace] += 1
        return share if self._random.random() < share else None

    def check(self, query: Query, asked: Asked | None, risk: float, *, is_wrong: bool) -> None:
        """What a check found of a hit on the verifier's word; a wrong one is forgotten."""
        if asked is None:
            return
        self._exam.check(risk, is_wrong=is_wrong)
        if is_wrong:
            self._words[_pair(query, asked)] = False

    def ask(self, query: Query, label: str, candidates: Sequence[Asked], labels: Sequence[str]) -> Word:
        """What the verifier says of the stored answers `candidates`, which have these labels, for a request of that label."""
        verifier = self.verifier
        known = [self._words.get(_pair(query, asked)) for asked in candidates]
        ps = [self._calibration.p(query.compat, asked.p, is_first=not rank) for rank, asked in enumerate(candidates)]
        if True in known:
            chosen = known.index(True)
            risk = risk_of(ps[chosen], false_yes_again(self._exam.false_yes))
            return Word(chosen if self._has_room(query, risk) else None, risk)
        left = [at for at, word in enumerate(known) if word is None]
        if (
            verifier is None
            or verifier.pace is Pace.ABSENT
            or not left
            or not self._is_worth(query, [ps[at] for at in left])
        ):
            return Word()
        place = verifier.choose(label, [labels[at] for at in left])
        said: list[bool | None] = [None] * len(candidates)
        chosen, risk, questions = None, 0.0, 1
        if place is None:
            for at in left:
                said[at] = False
        else:
            chosen = left[place]
            said[chosen] = True
            risk = risk_of(ps[chosen], self._exam.false_yes)
            if needs_a_second(risk, self._error_max) or not self._has_room(query, risk):
                questions = 2
                is_yes = said[chosen] = verifier.confirm(label, labels[chosen])
                self._exam.confirm(ps[chosen], is_yes=is_yes)
                risk = risk_of(ps[chosen], false_yes_again(self._exam.false_yes))
                chosen = chosen if said[chosen] and self._has_room(query, risk) else None
        for at in left if place is None else left[: place + 1]:
            self._calibration.learn(
                query.compat, candidates[at].p, self._exam.false_yes, is_first=not at, is_yes=bool(said[at])
            )
        for asked, word in zip(candidates, said, strict=True):
            if word is not None:
                self._words[_pair(query, asked)] = word
        is_late = verifier.pace is Pace.SLOW
        seconds = LATE_S if is_late else questions * QUESTION_S
        return Word(None if is_late else chosen, risk, tuple(said), questions, seconds)

    def _is_worth(self, query: Query, ps: list[float]) -> bool:
        """Whether a question pays, and a yes might be served."""
        least = risk_of(max(ps), false_yes_again(self._exam.false_yes))
        return self._has_room(query, least) and pays(PolicyKind.BALANCED, any_right(ps), _QUESTION, _ANSWER)

    def _has_room(self, query: Query, risk: float) -> bool:
        return self._errors.has(query.compat, risk, self._error_max)


def _pair(query: Query, asked: Asked) -> tuple[object, ...]:
    return query.namespace, query.text, query.context, asked.text, asked.differing
