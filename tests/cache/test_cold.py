"""Without a verdict a stored answer is served to the same question alone, but for words that mean nothing."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.decision.features import Neighbour
from cache.decision.prior import PRIOR
from cache.decision.rule import NamespaceState, VerifiedRule
from cache.query import MissReason
from tests.cache.fakes import query

TEXT = st.characters(exclude_categories=["Cs"])
CAPITAL = "What is the capital of France?"

SAME = [
    (CAPITAL, "Tell me, what is France's capital?"),
    (CAPITAL, "What's the capital of France"),
    (CAPITAL, "Hello! Can you tell me the capital of France, please? Thanks a lot"),
    ("How do I reset my password?", "Tell me how to reset my password."),
    ("How can I reset my password?", "how do i reset my pass\u200bword"),
    ("PLEASE SWITCH OFF THE LIGHT", "switch off the light"),
    ("法国的首都是哪里？", "法国的首都是哪里"),
    ("Was ist die Hauptstadt von Frankreich?", "Hallo, sag mir bitte die Hauptstadt von Frankreich"),
    ("¿Cuál es la capital de Francia?", "dime la capital de Francia, por favor"),
    ("Quelle est la capitale de la France ?", "Bonjour, dis-moi la capitale de la France. Merci"),
    ("Comment puis-je changer mon adresse ?", "comment est-ce que je peux changer mon adresse"),
]


def why_not(asked: str, known: str, error_max: float | None = None, similarity: float = 0.99) -> MissReason | None:
    """Why the answer to `known` is not served, without a verdict; None if it is."""
    some = [Neighbour(similarity, known, b"e", 0.0)]
    decision, _ = VerifiedRule(PRIOR).decide(query(asked, error_max=error_max), some, NamespaceState())
    assert (decision.served == 0) is (decision.reasons[0] is None)
    return decision.reasons[0]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_greetings_thanks_and_the_words_that_ask_are_no_difference(one: str, other: str) -> None:
    """In four languages, in both directions."""
    assert why_not(one, other) is None
    assert why_not(other, one) is None


DIFFERENCES = [
    ("What is 15% of 300?", "What is 15% of 500?"),
    ("What is 15% of 300?", "What is 300% of 15?"),
    ("I have three apples", "I have four apples"),
    ("It costs two hundred and five dollars", "It costs two hundred and six dollars"),
    ("Pay $5 now", "Pay €5 now"),
    ("Convert 3 miles", "Convert 3 kilometers"),
    ("What is new in Python 3.9?", "What is new in Python 3.10?"),
    ("Set an alarm for 7am", "Set an alarm for 7pm"),
    ("What happened in 1999?", "What happened?"),
    ("The second chapter", "The third chapter"),
    ("Wake me at 7:00", "Wake me at 7 pm"),
    ("Wake me at 12 am", "Wake me at 12:00"),
    ("Wake me at 13 pm", "Wake me at 13:00"),
    ("Do I press it once?", "Do I press it twice?"),
    ("Do I pay once a year?", "Do I pay twice a year?"),
    ("When and where was Ada Lovelace born?", "When was Ada Lovelace born?"),
    ("What is it, and how much does it cost?", "What does it cost?"),
    ("How many rooms has it?", "What does it cost?"),
    ("Is it safe?", "Is it not safe?"),
    ("Is it safe?", "Isn't it safe?"),
    ("Which foods are safe?", "Which foods are unsafe?"),
    ("How do I enable 2FA?", "How do I disable 2FA?"),
    ("Turn the lights on", "Turn the lights off"),
    ("encrypt a file", "decrypt a file"),
    ("the minimum temperature", "the maximum temperature"),
    ("Answer with sources", "Answer without sources"),
    ("What is the capital of France?", "What is the capital of Spain?"),
    ("Show case #D-7781 please", "Show case #D-7782 please"),
    ("read the file my_notes", "read the file my_tasks"),
    ("open https://a.example/x", "open https://a.example/y"),
    ('Translate "good morning"', 'Translate "good night"'),
    ("the balance of my account", "the balance of her account"),
    ("our refunds in the EU", "our refunds in the US"),
    ("Fly from Paris to Berlin", "Fly from Berlin to Paris"),
    ("I have JSON and need YAML, convert it", "convert YAML, I have it, to JSON I need"),
    ("does the dog bite the man", "does the man bite the dog"),
    ("Did Anna call Ben?", "Was Anna called by Ben?"),
    ("Can I call Ben?", "Can Ben call me?"),
    ("Which teams beat Arsenal?", "Which teams did Arsenal beat?"),
    ("Who was hired by Laura?", "Who hired Laura?"),
    ("Who is Maria's manager?", "Who is Maria the manager of?"),
    ("Subtract a from b", "Subtract b from a"),
    ("Convert the for loop to a while loop", "Convert the while loop to a for loop"),
    ("If it rains, is the match cancelled?", "If the match is cancelled, does it rain?"),
    ("What can I bring?", "What must I bring?"),
    ("What is the refund policy?", "Where is the refund policy?"),
    ("How many orders are paid?", "Which orders are paid?"),
    ("Use AND in the filter", "Use OR in the filter"),
    ("Where is platform A?", "Where is platform D?"),
    ("What does x & y do?", "What does x && y do?"),
    ("What does [0-9]+ match?", "What does [0-9]* match?"),
    ("What does a[1:] give?", "What does a[:1] give?"),
    ("Do I owe you money?", "Do you owe me money?"),
    ("change it from central to pacific", "change it from pacific to central"),
    ("what do you want me to call", "what do me want you to call"),
    ("List the planets as json", "List the planets as yaml"),
    ("List the planets", "List the planets as a table"),
    ("reverse a string in python", "reverse a string in java"),
    ("explain it to a beginner", "explain it to an expert"),
    ("all reviewers approve", "some reviewers approve"),
    ("who invented radio", "when invented radio"),
    ("put bread on the shopping list", "is bread on the shopping list"),
    ("Can it be frozen?", "Should it be frozen?"),
    ("Must it be frozen?", "Should it be frozen?"),
    ("May I freeze it?", "Do I have to freeze it?"),
    ("Was it repaired?", "Will it be repaired?"),
    ("Has it been repaired?", "Can it be repaired?"),
    ("Is it repaired?", "Can it be repaired?"),
    ("Is parking prohibited?", "Is parking possible?"),
    ("When can I leave?", "When must I leave?"),
    ("When does the train leave?", "When did the train leave?"),
    ("place of the next meeting", "date of the next meeting"),
    ("Can the ticket be passed on?", "price of the ticket"),
    ("the timer for half an hour", "the timer for an hour and a half"),
    ("the rota for today", "the rota for tomorrow"),
    ("will it rain in oslo on thursday", "will it rain in oslo on tuesday"),
    ("法国的首都是哪里？", "挪威的首都是哪里？"),
    ("столица франции", "столица испании"),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENCES)
def test_nothing_else_is_served(one: str, other: str) -> None:
    """However similar two texts are; in both directions."""
    assert why_not(one, other) is not None
    assert why_not(other, one) is not None


def test_a_caller_may_only_tighten() -> None:
    """To 0: then nothing is served."""
    assert why_not(CAPITAL, "Tell me the capital of France", error_max=1.0) is None
    assert why_not(CAPITAL, "Tell me the capital of France", error_max=0.0) is MissReason.STRICT


@pytest.mark.parametrize(("similarity", "reason"), [(0.51, None), (0.49, MissReason.FAR)])
def test_a_far_question_gets_no_answer(similarity: float, reason: MissReason | None) -> None:
    """Not even for the same words: the encoder saw another text."""
    assert why_not(CAPITAL, "Tell me the capital of France", similarity=similarity) is reason


@given(st.text(TEXT), st.text(TEXT))
def test_reading_is_total_and_a_text_does_not_differ_from_itself(text: str, other: str) -> None:
    """Whatever the characters; and no order of the two makes a difference."""
    assert why_not(text, text) is None
    assert (why_not(text, other) is None) is (why_not(other, text) is None)


@pytest.mark.parametrize("character", ["!", "-", "a", "1", "1,", "(", "'s ", "how to "])
def test_a_long_run_of_one_sign_is_read_at_once(character: str) -> None:
    """No pattern looks back over a text for each character of it."""
    text = character * (8_000 // len(character))
    assert all(why_not(one, other) is None for one, other in itertools.product((text,), repeat=2))
