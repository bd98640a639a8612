"""Signs, operators and case that make another question of nearly the same text."""

from __future__ import annotations

import pytest

from cache.decision.guards import difference, veto
from cache.decision.text_features import read
from cache.query import MissReason


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is 3 - 5?", "What is 3 + 5?"),
        ("What is 8 * 2?", "What is 8 / 2?"),
        ("Is 8 > 2?", "Is 8 < 2?"),
        ("Is 5 >= 4?", "Is 5 <= 4?"),
        ("What is -7 + 3?", "What is 7 + 3?"),
        ("What is 6! in words?", "What is 6 in words?"),
        ("Convert -40 C to F", "Convert 40 C to F"),
        ("What is the derivative X' here?", "What is the derivative X here?"),
        ("What is 12 * 4?", "What is 12 / 4?"),
        ("How long is 5 MB at this rate?", "How long is 5 Mb at this rate?"),
        ("How long is 5MB at this rate?", "How long is 5Mb at this rate?"),
        ("How far is 5 Mm?", "How far is 5 mm?"),
        ("Is 10 mW much?", "Is 10 MW much?"),
        ("Tell me about CO here", "Tell me about Co here"),
        ("Does it help us there?", "Does it help US there?"),
        ("What does the WHO there say?", "What does the who there say?"),
        ("How old is Turkey there?", "How old is turkey there?"),
    ],
)
def test_signs_and_case_are_differences(one: str, other: str) -> None:
    """No similarity and no verdict lets one answer the other."""
    for asked, known in ((one, other), (other, one)):
        assert difference(read(asked), read(known)) is MissReason.NUMBERS
        assert veto(read(asked), read(known), 0.0) is MissReason.NUMBERS


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I write a 30-day plan?", "How do I write a 30 day plan?"),
        ("what is the capital of turkey", "What is the capital of Turkey?"),
        ("WHO IS THE PRESIDENT OF THE US?", "who is the president of the us"),
        ("Is covid-19 over?", "Is Covid-19 over?"),
        ("May I park there?", "may i park there"),
    ],
)
def test_hyphens_and_lazy_typing_are_none(one: str, other: str) -> None:
    """They change no question."""
    assert read(one).marks == read(other).marks
    assert difference(read(one), read(other)) is not MissReason.NUMBERS
