"""Judges: what is the same answer, what is another, and what they leave open."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.verdicts import Ruling, equal
from cache.verdicts.judges import normalised

SAME, DIFFERENT, UNKNOWN = Ruling.SAME, Ruling.DIFFERENT, Ruling.UNKNOWN
LONG = "It depends on many things, and each of them would have to be told in full before anybody could say more. " * 2


@pytest.mark.parametrize(
    ("one", "other", "ruling"),
    [
        ("Paris", " paris. ", SAME),
        ("It costs 1,000.50 USD", "it costs 1000.5 usd!", SAME),
        ("**Bold** claim", "bold claim", SAME),
        ("5", "5.0", SAME),
        ("-5", "5", UNKNOWN),
        ("$5", "5", UNKNOWN),
        ("5%", "5", UNKNOWN),
        ("a+b", "a-b", UNKNOWN),
        ("don't go", "dont go", UNKNOWN),
        ("1.2.3", "12.3", DIFFERENT),
        ("Paris", "Rome", DIFFERENT),
        ("Paris", "Paris, France", UNKNOWN),
        ("card_lost", "card_declined", DIFFERENT),
        ("Yes.", "No, never.", DIFFERENT),
        ("It is free of charge.", "You pay nothing.", UNKNOWN),
        ("1, 2 and 3", "1 2 and 3", SAME),
        ('{"a": 1, "b": [1.0, "x"]}', '{"b":[1,"x"],"a":1}', SAME),
        ('```json\n{"a": 1}\n```', '{"a": 1}', SAME),
        ('{"a": 1}', '{"a": 2}', DIFFERENT),
        ('{"a": true}', '{"a": 1}', DIFFERENT),
        ('["A"]', '["a"]', DIFFERENT),
        ('{"a": 1}', "a is 1", UNKNOWN),
        ("```\nIf x:\n```", "```\nif x:\n```", UNKNOWN),
        ("```\nx = 1  \n```", "```\nx = 1\n```", SAME),
        (LONG, LONG.upper(), SAME),
        (LONG, LONG + "Or not.", UNKNOWN),
        ("", "", UNKNOWN),
        ("👍", "👎", UNKNOWN),
        ("Done ✓", "Done ✗", UNKNOWN),
        ("दिन", "दीन", UNKNOWN),
        ("()", "[]", UNKNOWN),
        ("你好。", "你好", SAME),
        ("[" * 60_000 + "]" * 60_000, "[" * 60_000 + " " + "]" * 60_000, UNKNOWN),
        ("```\n" + "\n" * 65_000 + "x", "x", UNKNOWN),
    ],
)
def test_equality(one: str, other: str, ruling: Ruling) -> None:
    """Form is no difference; what carries meaning is; of other words it says nothing. Either way round."""
    for a, b in ((one, other), (other, one)):
        assert equal(a, b).ruling is ruling


REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "I don't know.",
    "Sorry, I didn\u2019t quite understand. Could you rephrase your question?",
    "Something went wrong. Please try again later.",
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_two_refusals_are_no_evidence(refusal: str) -> None:
    """The same refusal of two prompts does not show that they ask for the same."""
    assert equal(refusal, refusal.upper()).ruling is UNKNOWN


@given(st.text(max_size=60))
def test_a_text_is_equal_to_itself_in_another_spacing(text: str) -> None:
    """Normalising is total, and does not see white space around words."""
    assert normalised(f"  {text}\n") == normalised(text)
