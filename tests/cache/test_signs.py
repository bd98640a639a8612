"""Signs, operators and case that make another question of nearly the same text."""

from __future__ import annotations

import pytest

from cache.decision.exact_marks import is_recased, marks_of, veto


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
        ("Who can receive A- blood?", "Who can receive A blood?"),
        ("What is the charge of O2?", "What is the charge of O2-?"),
        ("What notes are in B major?", "What notes are in B♭ major?"),
        ("What does :) mean?", "What does :( mean?"),
        ("What is A ⊂ B?", "What is A ⊆ B?"),
        ("How much is $5 in yen?", "How much is $5M in yen?"),
        ("List the primes in [1,10]", "List the primes in [1,10)"),
        ("What does the ! operator do?", "What does the ? operator do?"),
        ("What does i-- do in C?", "What does --i do in C?"),
        ("Explain !a in JavaScript", "Explain !!a in JavaScript"),
        ("Explain a?.b in JavaScript", "Explain a??b in JavaScript"),
        ("What does `grep -v` do?", "What does `grep -V` do?"),
        ("What does rm -i do?", "What does rm i do?"),
        ("What does the regex a* match?", "What does the regex a? match?"),
        ("What does the regex a*? match?", "What does the regex a* match?"),
        ("Explain the regex ^[a-z]{2}$", "Explain the regex ^[a-z]{2,}$"),
        ("What does \\Pi mean in LaTeX?", "What does \\pi mean in LaTeX?"),
        ("What does the type int* mean?", "What does the type int& mean?"),
        ("What does x[1:] give?", "What does x[:1] give?"),
        ("Is (() balanced?", "Is ()) balanced?"),
        ("Is Nf3? a good move", "Is Nf3 a good move"),
    ],
)
def test_signs_and_case_are_differences(one: str, other: str) -> None:
    """No similarity and no verdict lets one answer the other; a name in small letters is another word without a verdict."""
    for asked, known in ((one, other), (other, one)):
        assert veto(asked, known) is not None or is_recased(asked, known)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("How do I write a 30-day plan?", "How do I write a 30 day plan?"),
        ("what is the capital of turkey", "What is the capital of Turkey?"),
        ("WHO IS THE PRESIDENT OF THE US?", "who is the president of the us"),
        ("Is covid-19 over?", "Is Covid-19 over?"),
        ("May I park there?", "may i park there"),
        ("Why is it late?!", "Why is it late"),
        ("Hello! What is it, then; why?", "Hello, what is it then, why"),
        ("Tell me (in short) - what is it?", "Tell me, in short: what is it …"),
        ("C'est quoi, le Pérou ?", "C’est quoi le Pérou"),
        ("- How much is it?", "How much is it"),
    ],
)
def test_hyphens_and_lazy_typing_are_none(one: str, other: str) -> None:
    """They change no question."""
    assert marks_of(one).signs == marks_of(other).signs
    assert veto(one, other) is None
    assert not is_recased(one, other)
