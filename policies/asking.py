"""Whether to ask a verifier before an answer is generated, and what its yes may cost: pure estimates.

With `s` the score by which the alias's policy ranks deployments (`policies.routing`), `q` the cost
and time of a question, `g` those of a generation, and `p` the probability that an answer is right:

    ask if    p s(q) + (1 - p) s(q + g) < s(g)

So a question has the price of latency that the alias's own policy has. Of an answer that a verifier
calls right, with `f` its share of yes to wrong answers:

    risk      (1 - p) f / ((1 - p) f + p)

Every hit by meaning pays its risk from an account into which each request pays 0.75 of `error_max`.
Invariant: no answer is served on a verifier's word beyond the account.
"""

from bisect import bisect
from collections import OrderedDict

import msgspec

from policies.prices import MicroUSD
from policies.routing import PolicyKind, score

FIRST_REQUESTS = 75
"""A namespace's account starts with what so many requests pay, and has no more at any time."""
SAME_AGAIN = 0.5
"""Of a verifier's errors about one pair, so many come again at a second question, however put."""
_PAID = 0.75  # of the bound; the rest is for chance
_AT_ONCE = 0.3  # of what an account has: one hit with a large risk would take the room of many others
_CONFIRMED = 1.0  # bounds that a yes may risk without a second question
_EDGES, _UNSEEN = (0.1, 0.25, 0.4, 0.6, 0.75, 0.88, 0.96), 6.0  # of the bins; the answers that p weighs
_NAMESPACES_MAX = 20_000
_FIRST_DAY_TIMES, _FIRST_QUESTIONS = 5.0, 50


class Expense(msgspec.Struct, frozen=True):
    """What a request to a deployment is expected to cost and take."""

    cost_microusd: MicroUSD
    ms: float

    def __add__(self, other: "Expense") -> "Expense":
        return Expense(self.cost_microusd + other.cost_microusd, self.ms + other.ms)


def pays(kind: PolicyKind, p: float, question: Expense, generation: Expense) -> bool:
    """Whether a question is expected to score better than a generation without one. Where both
    score alike, as where neither costs, the time decides.
    """
    with_question = p * _score(kind, question) + (1.0 - p) * _score(kind, question + generation)
    alone = _score(kind, generation)
    return with_question < alone or (with_question == alone and question.ms < p * generation.ms)


def _score(kind: PolicyKind, expense: Expense) -> float:
    return score(kind, expense.cost_microusd, expense.ms)


def is_affordable(cost: MicroUSD, spent: MicroUSD, baseline: MicroUSD, share: float, *, is_first_day: bool) -> bool:
    """Whether questions stay within `share` of `baseline`, what the requests would have cost, after
    one more of `cost`; one that costs nothing does. On the first day the share is five times as
    large, and fifty questions may come before the first request is counted, so that learning comes
    first.
    """
    if not share or not cost:
        return share > 0
    allowed = share * baseline
    if is_first_day:
        allowed = _FIRST_DAY_TIMES * allowed + _FIRST_QUESTIONS * cost
    return spent + cost <= allowed


def any_right(ps: list[float]) -> float:
    """The probability that one of several answers is right."""
    none = 1.0
    for p in ps:
        none *= 1.0 - p
    return 1.0 - none


def risk_of(p: float, false_yes: float) -> float:
    """The probability that an answer which a verifier calls right is wrong; `p` is that of its being
    right before.
    """
    wrong = (1.0 - p) * false_yes
    return wrong / (wrong + p) if wrong + p > 0 else 1.0


def needs_a_second(risk: float, error_max: float) -> bool:
    """Whether a yes with this risk is confirmed by a second question, whatever the account has."""
    return risk > _CONFIRMED * error_max


def false_yes_again(false_yes: float) -> float:
    """The share of wrong answers that two questions, put in two ways, both call right."""
    return false_yes * (SAME_AGAIN + (1.0 - SAME_AGAIN) * false_yes)


class Calibration:
    """How often the answers that a verifier was asked about were right, by namespace, by what the rule
    had said of them, and apart for the likeliest of a question and the others.

    A bin of n answers, of which a verifier that calls a share f of wrong ones right said yes to y,
    holds about (y - f n) / (1 - f) right ones (Rogan and Gladen, 1978), beside the few that the rule
    had said.
    """

    def __init__(self) -> None:
        self._bins: OrderedDict[bytes, dict[tuple[bool, int], tuple[float, float]]] = OrderedDict()

    def p(self, namespace: bytes, said: float, *, is_first: bool) -> float:
        """The probability that an answer is right of which the rule says the probability `said`."""
        answers, right = self._bins.get(namespace, {}).get((is_first, bisect(_EDGES, said)), (0.0, 0.0))
        return (right + _UNSEEN * said) / (answers + _UNSEEN)

    def learn(self, namespace: bytes, said: float, false_yes: float, *, is_first: bool, is_yes: bool) -> None:
        """Take in a verifier's word on one answer of a question. One that it did not choose is a no."""
        bins, key = self._bins.setdefault(namespace, {}), (is_first, bisect(_EDGES, said))
        answers, right = bins.get(key, (0.0, 0.0))
        more = (is_yes - false_yes) / (1.0 - false_yes) if false_yes < 1.0 else 0.0
        bins[key] = (answers + 1.0, max(0.0, right + more))
        self._bins.move_to_end(namespace)
        if len(self._bins) > _NAMESPACES_MAX:
            self._bins.popitem(last=False)


class ErrorAccount:
    """The wrong answers that may still be expected of hits by meaning, by namespace, as one of
    `workers` sees it.
    """

    def __init__(self, workers: int = 1) -> None:
        self._first = _PAID * FIRST_REQUESTS / workers
        self._left: OrderedDict[bytes, float] = OrderedDict()

    def pay(self, namespace: bytes, error_max: float) -> bool:
        """One more request pays in, with this bound. Whether the namespace is new: see `start`."""
        is_new, left = namespace not in self._left, self._left.pop(namespace, 0.0)
        self._left[namespace] = min(error_max * self._first, left + _PAID * error_max)
        if len(self._left) > _NAMESPACES_MAX:
            self._left.popitem(last=False)
        return is_new

    def start(self, namespace: bytes, error_max: float) -> None:
        """Give a namespace what it starts with: once for each of `workers`, over all hosts."""
        most = error_max * self._first
        self._left[namespace] = min(most, self._left.get(namespace, 0.0) + most)

    def has(self, namespace: bytes, risk: float, error_max: float) -> bool:
        """Whether a hit with this risk may be served; a new namespace has what this request pays."""
        return _AT_ONCE * self._left.get(namespace, _PAID * error_max) >= risk

    def charge(self, namespace: bytes, risk: float) -> None:
        """A hit with this risk was served."""
        self._left[namespace] = max(-1.0, self._left.get(namespace, 0.0) - risk)
