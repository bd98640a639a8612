"""Questions with a known answer for a judge that no operator named: are two unrelated answers the
same?

A model that is too small to judge says SAME to everything, in both orders, and would make the cache
bolder. So a judge that `auto` chose is asked about a fresh answer and one to a prompt without a
common word, first a dozen times, then now and then. Knows no deployments. Invariants: no ruling of
a judge counts before it has passed, or after it has failed; the exam asks about answers of one
namespace alone.
"""

from collections import OrderedDict, deque
from collections.abc import Callable

from cache.verdicts import Judge, Judgement, QAPair, Ruling
from gateway.learning.llm_judge import NO_ANSWER

_QUESTIONS = 12
_WRONG_MAX = 0.2
_RULED_MIN = 0.5
_AGAIN, _AGAIN_FAILED = 0.05, 0.02  # shares of further comparisons with a question before them
_KEPT, _SPACES_MAX = 6, 1_000
_SHORT = 3  # letters of a word that any two prompts may share


class Exam:
    """The exam of one judge. `random` gives numbers in [0, 1)."""

    def __init__(self, random: Callable[[], float]) -> None:
        self._random = random
        self.questions = self.rulings = self.wrong = 0

    @property
    def is_over(self) -> bool:
        return self.questions >= _QUESTIONS

    @property
    def is_passed(self) -> bool:
        return (
            self.is_over and self.wrong <= _WRONG_MAX * self.questions and self.rulings >= _RULED_MIN * self.questions
        )

    @property
    def flips(self) -> tuple[float, float]:
        """The judge's error rates, as a verdict has them. Its errors on equal answers are unknown
        and taken as 0.
        """
        return 0.0, self.wrong / max(1, self.questions)

    def is_due(self) -> bool:
        return not self.is_over or self._random() < (_AGAIN if self.is_passed else _AGAIN_FAILED)

    def take(self, ruling: Ruling) -> None:
        """Take in the ruling on two unrelated answers."""
        self.questions += 1
        self.rulings += ruling is not Ruling.UNKNOWN
        self.wrong += ruling is Ruling.SAME


class Recent:
    """The latest answers of each namespace that judges have seen."""

    def __init__(self) -> None:
        self._pairs: OrderedDict[bytes, deque[QAPair]] = OrderedDict()

    def unrelated(self, space: bytes, fresh: QAPair) -> QAPair | None:
        """A recent answer to a prompt that shares no word with `fresh`; None without one."""
        words = _words(fresh.prompt)
        return next((one for one in self._pairs.get(space, ()) if not words & _words(one.prompt)), None)

    def remember(self, space: bytes, pair: QAPair) -> None:
        self._pairs.setdefault(space, deque(maxlen=_KEPT)).append(pair)
        self._pairs.move_to_end(space)
        if len(self._pairs) > _SPACES_MAX:
            self._pairs.popitem(last=False)


class ExaminedJudge:
    """`judge`, as far as its `exam` goes, about answers of one namespace."""

    def __init__(self, judge: Judge, exam: Exam, recent: Recent, space: bytes) -> None:
        self._judge = judge
        self._exam = exam
        self._recent = recent
        self._space = space

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        """The judge's ruling. Before it has passed its exam, and after it has failed, the same as
        without an answer.
        """
        exam, recent = self._exam, self._recent
        other = recent.unrelated(self._space, fresh)
        recent.remember(self._space, fresh)
        if other is not None and exam.is_due():
            judgement = await self._judge.judge(fresh, other)
            if judgement.why == NO_ANSWER:
                return judgement
            exam.take(judgement.ruling)
        if not exam.is_passed:
            return Judgement(Ruling.UNKNOWN, "", NO_ANSWER)
        return await self._judge.judge(fresh, cached)


def _words(prompt: str) -> frozenset[str]:
    return frozenset(word for word in prompt.casefold().split() if len(word) > _SHORT)
