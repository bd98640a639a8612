"""Prompts with the same words: what may differ, and what never."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.decision.normal_form import normal_form, words_key

COMPAT = b"c" * 16
SUBJECTS = [
    "my card",
    "the capital of France",
    "an Apple store",
    "Polish food",
    "the US",
    "us",
    "ΣΟΦΟΣ",
    "straße",
    "İzmir",
]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the capital of France?", " What is  the capital of France? \n"),
        ("the best pizza", "  the best  pizza"),
        ("What’s the  population of Peru?", "What’s the population of Peru?"),
    ],
)
def test_what_cannot_matter_is_folded(one: str, other: str) -> None:
    """Spaces of one line of prose."""
    assert normal_form(one) == normal_form(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("What is the us position?", "What is the US position?"),
        ("Polish shoes", "polish shoes"),
        ("Apple recipes", "apple recipes"),
        ("What is polish?", "What is Polish?"),
        ("Paris is large", "Paris is large?"),
        ("Paris is large.", "Paris is large"),
        ("What is 1 000?", "What is 1000?"),
        ("What is 1  000?", "What is 1 000?"),
        ("What is 1.5?", "What is 15?"),
        ("What is 5.", "What is 5"),
        ("What does f(x)  do?", "What does f(x) do?"),
        ("  return x", "return x ;"),
        ("What is `a  b`?", "What is `a b`?"),
        ('What is "a  b"?', 'What is "a b"?'),
        ("What is 'a  b'?", "What is 'a b'?"),
        ("if x:\n    y", "if x:\n  y"),
        ("a - b", "a -b"),
        ("what is snake_case  here", "what is snake_case here"),
        ("How many words are in this sentence?", "how many words are in this sentence"),
        ("Is the final period needed?", "Is the final period needed"),
        ("What is the re\u0301sume\u0301?", "What is the resume?"),
        ("What is the r\u00e9sum\u00e9?", "What is the re\u0301sume\u0301?"),
        ("WHAT IS IT?", "What is it?"),
        ("What is ΣΟΦΟΣ?", "What is σοφος?"),
        ("What is straße?", "What is STRASSE?"),
        ("What is İzmir?", "What is izmir?"),
        ("What is done. Go on?", "What is done. Go on"),
        ("What is more, he left?", "What is more, he left"),
        ("What is the U.S.?", "What is the U.S?"),
        ("When will is needed!", "When will is needed"),
        ("What is tea??", "What is tea"),
    ],
)
def test_what_may_matter_stays(one: str, other: str) -> None:
    """Names, numbers, quotes, code, statements and questions, other alphabets' cases: distinct, also in doubt."""
    assert normal_form(one) != normal_form(other)


@pytest.mark.parametrize(
    "text",
    [
        "What is\u200b it?", "to\u200bday", "What is \U000e0041it?", "x" * 2_001,
    ],
)  # fmt: skip
def test_some_prompts_have_no_key(text: str) -> None:
    """A prompt with characters that no screen shows, a long one: the rule decides each time."""
    assert words_key(COMPAT, text) is None


def test_a_key_is_of_one_compat() -> None:
    """Another context is another key."""
    assert words_key(COMPAT, "hello") != words_key(b"d" * 16, "hello")


@st.composite
def respelled(draw: st.DrawFn) -> tuple[str, str]:
    """A question, and the same with nothing changed but what may be."""
    subject = draw(st.sampled_from(SUBJECTS))
    opener = draw(st.sampled_from(["What is", "Where is", "How do I find", "Is there", "Can I see", "Tell me about"]))
    end = "." if opener == "Tell me about" else "?"
    first = f"{opener} {subject}{end}"
    spaced = first.replace(" ", draw(st.sampled_from([" ", "  ", "   "])))
    outer = draw(st.sampled_from(["", " ", "\n", "\t "]))
    return first, outer + spaced + outer


@settings(max_examples=300, deadline=None)
@given(respelled())
def test_forms_are_equal_where_only_what_may_differ_differs(pair: tuple[str, str]) -> None:
    """Any mix of allowed differences leaves the form as it was."""
    assert normal_form(pair[0]) == normal_form(pair[1])


@settings(max_examples=1_000, deadline=None)
@given(st.text(alphabet="WhatisdoIcnTelm UuSs.?!,'-_0129(\n\té\u0301ßσΣİ\u200b", max_size=40))
def test_a_form_keeps_every_word(text: str) -> None:
    """Of any text: its form is its own form, and has its letters and digits in their order; no word changes case."""
    form = normal_form(text)
    assert normal_form(form) == form
    kept, mine = ("".join(char for char in one if char not in " .?\t\r\n") for one in (form, text))
    assert kept == mine
