"""Judges: what is the same answer, what is another, and what they leave open."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.encoder.types import Encoded
from cache.verdicts import Ruling, equal
from cache.verdicts.judges import agree, normalised

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
        ("1.2.3", "12.3", UNKNOWN),
        ("Paris", "Rome", UNKNOWN),
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
    """The same refusal of two prompts does not show that they ask for the same; by words or by meaning."""
    assert equal(refusal, refusal.upper()).ruling is UNKNOWN
    assert agree(refusal, refusal, lambda _: vectors(1.0)).ruling is UNKNOWN


@given(st.text(max_size=60))
def test_a_text_is_equal_to_itself_in_another_spacing(text: str) -> None:
    """Normalising is total, and does not see white space around words."""
    assert normalised(f"  {text}\n") == normalised(text)


def vectors(cosine: float) -> Encoded:
    return Encoded(np.array([[1.0, 0.0], [cosine, (1 - cosine**2) ** 0.5]], dtype=np.float32), np.array([1, 1]))


@pytest.mark.parametrize(
    ("one", "other", "cosine", "ruling"),
    [
        ("It is case 12.", "It is case 13.", 0.999, DIFFERENT),
        ("Your balance is 5 dollars as of May 3.", "Your balance is 7 dollars as of May 3.", 0.999, DIFFERENT),
        ("5 miles is 8.05 kilometers.", "30 miles = 48.3 km", 0.9, DIFFERENT),
        ("A fifth of 80 is 16.", "The answer is 16, because 0.2 x 80 = 16.", 0.8, UNKNOWN),
        ("5 miles is 8.05 kilometers.", "5 miles x 1.609344 = 8.0467 km, so roughly 8.", 0.9, UNKNOWN),
        ("Boil it for 12 minutes on a low flame.", "12 minutes; stir now and then, and cover the pot.", 0.5, UNKNOWN),
        ("Yes, it is open.", "No, it is not open.", 0.99, DIFFERENT),
        ("You can send it back.", "You can't send it back.", 0.99, DIFFERENT),
        ("Prices increased in the spring.", "Prices decreased in the spring.", 0.99, DIFFERENT),
        ("Parking at the back is free.", "You pay nothing to leave a car behind the house.", 0.75, UNKNOWN),
        (
            "The lamp goes out at ten unless you touch it.",
            "At ten the lamp turns itself off; a tap keeps it lit.",
            0.8,
            UNKNOWN,
        ),
        (
            "The parcel waits at the counter on Elm Road.",
            "Fetch it from the desk, which is in Elm Road.",
            0.54,
            UNKNOWN,
        ),
        ("It was Marie Curie.", "It was Albert Einstein.", 0.99, DIFFERENT),
        ("It begins in Cordoba, Spain.", "The start is in Lyon.", 0.9, DIFFERENT),
        ("A card from Europe costs little.", "Those European cards are cheap to use.", 0.9, UNKNOWN),
        ("The largest town there is Lyon.", "Lyon, which all of France visits at times.", 0.9, UNKNOWN),
        ("Das Konto ist kostenlos.", "Wir verlangen keine Gebühr.", 0.9, UNKNOWN),
        ("Herr Meyer.", "Frau Schmidt.", 0.9, DIFFERENT),
        ("Yes.", "No.", 0.99, DIFFERENT),
        ("Yes, you can hire it.", "It can be hired: write to the manager.", 0.4, UNKNOWN),
        ("It isn't rented out.", "Unfortunately that is not possible.", 0.4, UNKNOWN),
        ("No, it can't be hired.", "Unfortunately that is not possible.", 0.4, UNKNOWN),
        ("It is not far and not near.", "It is far and near.", 0.99, UNKNOWN),
        ("The capital of France is Paris.", "France's capital is Paris.", 0.96, SAME),
        ("a red dress", "a blue dress", 0.95, UNKNOWN),
        ("a red dress", "a blue car", 0.5, DIFFERENT),
        ("a cat", "a dog", 0.7, DIFFERENT),
        ("a cat", "a dog", 0.9, UNKNOWN),
        ("It takes a while to boil.", "It takes a while to boil, usually.", 0.98, SAME),
        (LONG, LONG + "Indeed.", 0.999, UNKNOWN),
        ("", "", 1.0, UNKNOWN),
    ],
)
def test_agreement(one: str, other: str, cosine: float, ruling: Ruling) -> None:
    """Numbers, polarity and names outweigh any similarity; long answers are never guessed at."""

    def encode(_: Sequence[str]) -> Encoded:
        return vectors(cosine)

    assert agree(one, other, encode).ruling is ruling
    assert agree(other, one, encode).ruling is ruling
