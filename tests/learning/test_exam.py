"""A judge that nobody vouches for has to tell unrelated answers apart before its rulings count."""

from __future__ import annotations

import random

import pytest

from cache.verdicts import Judgement, QAPair, Ruling
from gateway.learning.exam import Exam, ExaminedJudge, Recent
from gateway.learning.llm_judge import NO_ANSWER


class Judge:
    """Says the same of equal answers and `otherwise` of others; it remembers what it was asked."""

    def __init__(self, otherwise: Ruling, why: str = "so") -> None:
        self._otherwise = otherwise
        self._why = why
        self.asked: list[tuple[str, str]] = []

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        self.asked.append((fresh.answer, cached.answer))
        return Judgement(Ruling.SAME if fresh.answer == cached.answer else self._otherwise, "judge", self._why)


TOPICS = ("opening hours shop", "password reset", "parcel weight", "holiday request")


async def rulings(judge: Judge, count: int, exam: Exam) -> list[Ruling]:
    """Its rulings on so many pairs of equal answers, to prompts about four things in turn."""
    recent, found = Recent(), []
    for number in range(count):
        pair = QAPair(TOPICS[number % 4], TOPICS[number % 4].upper())
        found.append((await ExaminedJudge(judge, exam, recent, b"here").judge(pair, pair)).ruling)
    return found


async def test_a_judge_that_passes_rules_from_then_on() -> None:
    """The first pair has nothing to be set against, the next twelve are the exam."""
    judge, exam = Judge(Ruling.DIFFERENT), Exam(random.Random(1).random)
    found = await rulings(judge, 60, exam)
    assert found == [Ruling.UNKNOWN] * 12 + [Ruling.SAME] * 48
    assert exam.is_passed
    assert exam.flips == (0.0, 0.0)


@pytest.mark.parametrize("otherwise", [Ruling.SAME, Ruling.UNKNOWN])
async def test_a_judge_that_calls_everything_the_same_or_nothing_never_rules(otherwise: Ruling) -> None:
    """It is hardly asked any more, either."""
    judge, exam = Judge(otherwise), Exam(random.Random(1).random)
    assert set(await rulings(judge, 200, exam)) == {Ruling.UNKNOWN}
    assert not exam.is_passed
    assert len(judge.asked) < 25


async def test_one_that_fails_later_is_heard_no_more() -> None:
    """The exam goes on now and then: a deployment may get another model."""
    judge, exam = Judge(Ruling.DIFFERENT), Exam(random.Random(1).random)
    await rulings(judge, 20, exam)
    await rulings(Judge(Ruling.SAME), 600, exam)
    assert not exam.is_passed
    assert exam.flips[1] > 0.2


async def test_no_answer_is_no_mark() -> None:
    """A deployment that is away neither passes nor fails."""
    exam = Exam(random.Random(1).random)
    await rulings(Judge(Ruling.UNKNOWN, NO_ANSWER), 30, exam)
    assert exam.questions == 0


async def test_answers_of_other_namespaces_are_not_shown() -> None:
    """The other answer of a question is of the same team and context."""
    judge, exam, recent = Judge(Ruling.DIFFERENT), Exam(random.Random(1).random), Recent()
    for number, topic in enumerate(TOPICS):
        pair = QAPair(topic, topic)
        await ExaminedJudge(judge, exam, recent, bytes([number])).judge(pair, pair)
    assert judge.asked == []
