"""Questions with a known answer for a verifier: is the answer to an unrelated prompt right for this
one, and is a prompt's own?

A model that is too small to read says yes to everything, and would make the cache bolder; one that
says no to everything only costs. So a verifier is first asked about a dozen answers of which the
namespace says what is right: prompts without a common word, and prompts with their own answer.
Later it is asked so now and then. Knows no deployments. Invariants: no word of a verifier that no
operator named counts before it has passed, and none after it has failed; the exam asks about
answers of one namespace alone.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from cache.verdicts import QAPair
from gateway.learning.verifier import NO_ANSWER, StoredAnswer, Verifier
from policies.asking import SAME_AGAIN

_QUESTIONS = 12
_WRONG_MAX = 0.2
_RULED_MIN = 0.5
_AGAIN = 0.02  # the share of further questions with an exam's question beside them
_KEPT, _NAMESPACES_MAX = 6, 1_000
_SHORT = 3  # letters of a word that any two prompts may share
_FALSE_YES, _FALSE_YES_WEIGHT = 0.03, 60  # the share of false yes before the first answer, and what it weighs
_EXPECTED = 8.0  # wrong hits as expected, beside those of the checks: a few say little


class Exam:
    """The exam of one verifier. `random` gives numbers in [0, 1). One that an operator named counts
    until it has failed.
    """

    def __init__(self, random: Callable[[], float], *, is_named: bool) -> None:
        self._random = random
        self._is_named = is_named
        self._is_running = False
        self.questions = self.rulings = self.wrong = 0
        self.wrong_asked = self.wrong_yes = 0  # of answers that are wrong
        self.ruled = self.erred = 0.0  # answers that a second question stands for, and the errors about them
        self.risked, self.wrong_hits = 0.0, 0  # of checked hits

    @property
    def is_over(self) -> bool:
        return self.questions >= _QUESTIONS

    @property
    def is_passed(self) -> bool:
        return (
            self.is_over and self.wrong <= _WRONG_MAX * self.questions and self.rulings >= _RULED_MIN * self.questions
        )

    @property
    def is_failed(self) -> bool:
        return self.is_over and not self.is_passed

    @property
    def counts(self) -> bool:
        """Whether the verifier's word counts."""
        return self.is_passed or (self._is_named and not self.is_over)

    @property
    def false_yes(self) -> float:
        """The share of wrong answers that it calls right: by the exam and by how often it takes a yes
        back, times how many more hits on its word were found wrong than expected.
        """
        weight = self.wrong_asked + _FALSE_YES_WEIGHT
        share = (self.wrong_yes + _FALSE_YES * _FALSE_YES_WEIGHT) / weight
        erred = max(self.erred, share * self.ruled)  # yes that stand may repeat errors: they make the share no smaller
        share = (share * weight + erred) / (weight + self.ruled)
        return min(1.0, share * (self.wrong_hits + _EXPECTED) / (self.risked + _EXPECTED))

    def take(self, number: int | None, *, is_right: bool) -> None:
        """Take in its choice about one answer, of which it is known whether it `is_right`."""
        is_yes = number is not None and number >= 0
        self.questions += 1
        self.rulings += number is not None
        self.wrong += number is not None and is_yes is not is_right
        self.wrong_asked += not is_right
        self.wrong_yes += is_yes and not is_right

    def confirm(self, p: float, *, is_yes: bool) -> None:
        """Take in its word on a second question about an answer that it called right, and which was so
        with the probability `p`. A yes comes of 1 / (p + (1 - p) f) answers, and a second question
        takes back only the errors that do not repeat.
        """
        self.ruled += 1.0 / (p + (1.0 - p) * self.false_yes)
        self.erred += 0.0 if is_yes else 1.0 / (1.0 - SAME_AGAIN)

    def check(self, risk: float, *, is_wrong: bool) -> None:
        """Take in what a check found of a hit on its word, which had this risk of being wrong."""
        self.risked += risk
        self.wrong_hits += is_wrong

    async def sit(self, verifier: Verifier, recent: "Recent", namespace: bytes, pair: QAPair) -> None:
        """Ask what is due, about a prompt of this namespace with its own answer, and about other
        answers that the namespace had lately.
        """
        others = recent.unrelated(namespace, pair)
        recent.remember(namespace, pair)
        if self._is_running or (self.is_over and self._random() >= _AGAIN):
            return
        self._is_running = True
        try:
            for other in [*others, pair] if not self.is_over else others[:1]:
                choice = await verifier.choose(pair.prompt, [StoredAnswer(other.prompt, other.answer)])
                if choice.why == NO_ANSWER:
                    return
                self.take(choice.number, is_right=other is pair)
        finally:
            self._is_running = False


class Recent:
    """The latest answers of each namespace that verifiers have seen."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[bytes, deque[QAPair]] = OrderedDict()

    def unrelated(self, namespace: bytes, pair: QAPair) -> list[QAPair]:
        """The recent answers to prompts that share no word with that of `pair`."""
        words = _words(pair.prompt)
        kept = self._pairs.get(namespace, ()) if words else ()
        return [other for other in kept if not words & _words(other.prompt)]

    def remember(self, namespace: bytes, pair: QAPair) -> None:
        kept = self._pairs.setdefault(namespace, deque(maxlen=_KEPT))
        if pair not in kept:
            kept.append(pair)
        self._pairs.move_to_end(namespace)
        if len(self._pairs) > _NAMESPACES_MAX:
            self._pairs.popitem(last=False)


def _words(prompt: str) -> frozenset[str]:
    return frozenset(word for word in prompt.casefold().split() if len(word) > _SHORT)
