"""A verifier has to tell right answers from unrelated ones before its word counts, and to go on doing so."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from cache.verdicts import QAPair
from gateway.learning.exam import Exam, Recent
from gateway.learning.verifier import Verifier

TOPICS = ("opening hours shop", "password reset", "parcel weight", "holiday request", "invoice address", "broken lamp")


class Reader:
    """Says 1 to a prompt's own answer, and `otherwise` to others; it remembers the questions."""

    def __init__(self, otherwise: str | None = "0", right: str | None = "1") -> None:
        self._otherwise = otherwise
        self._right = right
        self.questions: list[tuple[str, str]] = []

    async def ask(self, body: dict[str, Any]) -> bytes | None:
        question = json.loads(body["messages"][1]["content"])
        (candidate,) = question["candidates"]
        self.questions.append((question["request"], candidate["answer"]))
        word = self._right if candidate["answer"] == question["request"].upper() else self._otherwise
        return None if word is None else json.dumps({"choices": [{"message": {"content": word}}]}).encode()


async def sits(reader: Reader, exam: Exam, rounds: int = 2, recent: Recent | None = None) -> None:
    recent = recent or Recent()
    for number in range(rounds * len(TOPICS)):
        topic = TOPICS[number % len(TOPICS)]
        await exam.sit(Verifier("small", reader.ask), recent, b"here", QAPair(topic, topic.upper()))


def exam(*, is_named: bool = False) -> Exam:
    return Exam(random.Random(1).random, is_named=is_named)


async def test_a_verifier_that_reads_passes() -> None:
    """It is asked a dozen questions at once, then now and then; its share of false yes is hardly above zero."""
    reader, one = Reader(), exam()
    assert not one.counts
    await sits(reader, one, 1)
    assert one.is_passed
    assert one.counts
    asked = len(reader.questions)
    assert 12 <= asked < 20
    await sits(reader, one, 100)
    assert asked < len(reader.questions) < asked + 40
    assert one.false_yes < 0.03


@pytest.mark.parametrize(("otherwise", "right"), [("1", "1"), ("0", "0"), ("?", "?")])
@pytest.mark.parametrize("is_named", [False, True])
async def test_one_that_says_the_same_to_everything_fails(otherwise: str, right: str, is_named: bool) -> None:
    """Yes to all makes errors, no to all costs and teaches what is not so, and nothing that can be read says nothing. One that an
    operator named is heard until then."""
    one = exam(is_named=is_named)
    assert one.counts is is_named
    await sits(Reader(otherwise, right), one, 4)
    assert one.is_over
    assert not one.counts


async def test_one_that_fails_later_is_heard_no_more() -> None:
    """The exam goes on now and then: a deployment may get another model."""
    one, recent = exam(), Recent()
    await sits(Reader(), one, 2, recent)
    assert one.counts
    await sits(Reader("1"), one, 400, recent)
    assert not one.counts
    assert one.false_yes > 0.1


async def test_no_answer_is_no_mark() -> None:
    """A deployment that is away neither passes nor fails."""
    one = exam()
    await sits(Reader(None, None), one)
    assert one.questions == 0


async def test_answers_of_other_namespaces_are_not_shown() -> None:
    """The other answer of a question is of the same team and context."""
    reader, one, recent = Reader(), exam(), Recent()
    for number, topic in enumerate(TOPICS):
        await one.sit(Verifier("small", reader.ask), recent, bytes([number]), QAPair(topic, topic.upper()))
    assert [request.upper() for request, _ in reader.questions] == [answer for _, answer in reader.questions]


async def test_checks_correct_the_share_of_false_yes() -> None:
    """Hits on its word that checks found wrong make a yes count less, those found right more."""
    one = exam(is_named=True)
    before = one.false_yes
    for number in range(120):
        one.check(0.02, is_wrong=number % 4 == 0)
    assert one.false_yes > 3 * before
    other = exam(is_named=True)
    for _ in range(600):
        other.check(0.02, is_wrong=False)
    assert other.false_yes < before / 2


@pytest.mark.parametrize(("taken_back", "low", "high"), [(0, 0.03, 0.03), (6, 0.025, 0.04), (18, 0.07, 0.1)])
def test_a_yes_that_a_second_question_takes_back_makes_false_yes_likelier(
    taken_back: int, low: float, high: float
) -> None:
    """Of 200 yes to answers half of which are right, 3% of errors make 6 that are taken back, and 10% 18."""
    one = exam()
    for number in range(200):
        one.confirm(0.5, is_yes=number >= taken_back)
    assert low <= one.false_yes <= high


def test_a_yes_to_an_unlikely_answer_stands_for_more_answers_than_one_to_a_likely_one() -> None:
    """As often taken back, it shows fewer errors of each answer that was asked about."""
    shares = []
    for p in (0.1, 0.9):
        one = exam()
        for number in range(200):
            one.confirm(p, is_yes=bool(number % 10))
        shares.append(one.false_yes)
    assert 3 * shares[0] < shares[1]


def test_a_few_checks_do_not_make_a_verifier_better_than_its_words_say() -> None:
    """No wrong hit where three were expected is luck as well."""
    one = exam()
    before = one.false_yes
    for _ in range(150):
        one.check(0.02, is_wrong=False)
    assert one.false_yes > 0.7 * before
