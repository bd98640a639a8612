"""What the guards see in two texts, and what the fixed rule does with it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache import MissReason
from cache.decision.features import Neighbour
from cache.decision.guards import difference, veto
from cache.decision.rule import decide_fixed
from cache.decision.text_features import is_exchanged, read

CAPITAL = "What is the capital of France?"

PARAPHRASES = [
    (CAPITAL, "What's France's capital city?"),
    (CAPITAL, "Tell me the capital of France"),
    (CAPITAL, "which city is the capital of france"),
    (CAPITAL, "Can you tell me what the capital of France is?"),
    ("How do I cancel my order?", "how can I cancel my orders"),
    ("What is 15% of 300?", "How much is fifteen percent of 300?"),
    ("Convert 5 km to miles", "convert 5 kilometers into miles"),
    ("What does HTTP status 404 mean?", "what is the meaning of the HTTP status 404"),
    ("Is remote work not allowed?", "Isn't remote work allowed?"),
    ("Hello there", "hello, there!"),
    ("PLEASE SWITCH OFF THE LIGHT", "switch off the light"),
    ("法国的首都是哪里？", "法国的首都是哪里"),
    ("Which one is the best phone?", "Which is the best phone?"),
    ("Once I am ready, what do I press?", "What do I press after I am ready?"),
    ("Should I stop at once?", "Should I stop at once, please?"),
    ("Wake me at 7am", "wake me at 07:00"),
    ("Call at half past twelve or at 7.45 pm", "call at half past twelve or at 19:45"),
    ("Close it at 12 am", "close it at 00:00"),
    ("The flight leaves at 1,000 feet", "the flight leaves at 1000 ft"),
    ("How do I reverse a list?", "How can I reverse a list?"),
    ("Can we park here?", "May we park here?"),
    ("What should I park here?", "What must I park here?"),
    ("How much is the fee for a dog?", "What is the fee for a dog?"),
    ("How much water do I need?", "What amount of water do I need?"),
]


@pytest.mark.parametrize(("one", "other"), PARAPHRASES)
def test_paraphrases_pass_the_guards(one: str, other: str) -> None:
    """Case, spelling of numbers and units, politeness and word order alone are no difference."""
    assert difference(read(one), read(other)) is None
    assert difference(read(other), read(one)) is None


DIFFERENCES = [
    ("What is 15% of 300?", "What is 15% of 500?", MissReason.NUMBERS),
    ("What is 15% of 300?", "What is 300% of 15?", MissReason.NUMBERS),
    ("I have three apples", "I have four apples", MissReason.NUMBERS),
    ("It costs two hundred and five dollars", "It costs two hundred and six dollars", MissReason.NUMBERS),
    ("Pay $5 now", "Pay €5 now", MissReason.NUMBERS),
    ("Convert 3 miles", "Convert 3 kilometers", MissReason.NUMBERS),
    ("What is new in Python 3.9?", "What is new in Python 3.10?", MissReason.NUMBERS),
    ("Set an alarm for 7am", "Set an alarm for 7pm", MissReason.NUMBERS),
    ("What happened in 1999?", "What happened?", MissReason.NUMBERS),
    ("The second chapter", "The third chapter", MissReason.NUMBERS),
    ("Wake me at 7:00", "Wake me at 7 pm", MissReason.NUMBERS),
    ("Wake me at 12 am", "Wake me at 12:00", MissReason.NUMBERS),
    ("Wake me at 13 pm", "Wake me at 13:00", MissReason.NUMBERS),
    ("Do I press it once?", "Do I press it twice?", MissReason.NUMBERS),
    ("Do I pay once a year?", "Do I pay twice a year?", MissReason.NUMBERS),
    ("When and where was Ada Lovelace born?", "When was Ada Lovelace born?", MissReason.FORM),
    ("What is it, and how much does it cost?", "What does it cost?", MissReason.FORM),
    ("How many rooms has it?", "What does it cost?", MissReason.FORM),
    ("Is it safe?", "Is it not safe?", MissReason.POLARITY),
    ("Is it safe?", "Isn't it safe?", MissReason.POLARITY),
    ("Which foods are safe?", "Which foods are unsafe?", MissReason.POLARITY),
    ("How do I enable 2FA?", "How do I disable 2FA?", MissReason.POLARITY),
    ("Turn the lights on", "Turn the lights off", MissReason.POLARITY),
    ("encrypt a file", "decrypt a file", MissReason.POLARITY),
    ("the minimum temperature", "the maximum temperature", MissReason.POLARITY),
    ("Answer with sources", "Answer without sources", MissReason.POLARITY),
    ("What is the capital of France?", "What is the capital of Spain?", MissReason.NAMES),
    ("Show case #D-7781 please", "Show case #D-7782 please", MissReason.NAMES),
    ("read the file my_notes", "read the file my_tasks", MissReason.NAMES),
    ("open https://a.example/x", "open https://a.example/y", MissReason.NAMES),
    ('Translate "good morning"', 'Translate "good night"', MissReason.NAMES),
    ("the balance of my account", "the balance of her account", MissReason.NAMES),
    ("our refunds in the EU", "our refunds in the US", MissReason.NAMES),
    ("Fly from Paris to Berlin", "Fly from Berlin to Paris", MissReason.DIRECTION),
    ("I have JSON and need YAML, convert it", "convert YAML, I have it, to JSON I need", MissReason.DIRECTION),
    ("does the dog bite the man", "does the man bite the dog", MissReason.DIRECTION),
    ("Did Anna call Ben?", "Was Anna called by Ben?", MissReason.DIRECTION),
    ("Can I call Ben?", "Can Ben call me?", MissReason.DIRECTION),
    ("Which teams beat Arsenal?", "Which teams did Arsenal beat?", MissReason.DIRECTION),
    ("Who was hired by Laura?", "Who hired Laura?", MissReason.DIRECTION),
    ("Who is Maria's manager?", "Who is Maria the manager of?", MissReason.DIRECTION),
    ("Subtract a from b", "Subtract b from a", MissReason.DIRECTION),
    ("Convert the for loop to a while loop", "Convert the while loop to a for loop", MissReason.DIRECTION),
    ("If it rains, is the match cancelled?", "If the match is cancelled, does it rain?", MissReason.DIRECTION),
    ("What can I bring?", "What must I bring?", MissReason.FORM),
    ("What is the refund policy?", "Where is the refund policy?", MissReason.FORM),
    ("How many orders are paid?", "Which orders are paid?", MissReason.FORM),
    ("Use AND in the filter", "Use OR in the filter", MissReason.NAMES),
    ("Where is platform A?", "Where is platform D?", MissReason.NAMES),
    ("What does x & y do?", "What does x && y do?", MissReason.NUMBERS),
    ("What does [0-9]+ match?", "What does [0-9]* match?", MissReason.NUMBERS),
    ("What does a[1:] give?", "What does a[:1] give?", MissReason.NUMBERS),
    ("Do I owe you money?", "Do you owe me money?", MissReason.DIRECTION),
    ("change it from central to pacific", "change it from pacific to central", MissReason.DIRECTION),
    ("what do you want me to call", "what do me want you to call", MissReason.DIRECTION),
    ("List the planets as json", "List the planets as yaml", MissReason.FORM),
    ("List the planets", "List the planets as a table", MissReason.FORM),
    ("reverse a string in python", "reverse a string in java", MissReason.FORM),
    ("explain it to a beginner", "explain it to an expert", MissReason.FORM),
    ("all reviewers approve", "some reviewers approve", MissReason.FORM),
    ("who invented radio", "when invented radio", MissReason.FORM),
    ("put bread on the shopping list", "is bread on the shopping list", MissReason.FORM),
    ("Can it be frozen?", "Should it be frozen?", MissReason.FORM),
    ("Must it be frozen?", "Should it be frozen?", MissReason.FORM),
    ("May I freeze it?", "Do I have to freeze it?", MissReason.FORM),
    ("Was it repaired?", "Will it be repaired?", MissReason.FORM),
    ("Has it been repaired?", "Can it be repaired?", MissReason.FORM),
    ("Is it repaired?", "Can it be repaired?", MissReason.FORM),
    ("Is parking prohibited?", "Is parking possible?", MissReason.FORM),
    ("When can I leave?", "When must I leave?", MissReason.FORM),
    ("When does the train leave?", "When did the train leave?", MissReason.FORM),
    ("place of the next meeting", "date of the next meeting", MissReason.FORM),
    ("Can the ticket be passed on?", "price of the ticket", MissReason.FORM),
    ("the timer for half an hour", "the timer for an hour and a half", MissReason.NUMBERS),
    ("the rota for today", "the rota for tomorrow", MissReason.TIME),
    ("will it rain in oslo on thursday", "will it rain in oslo on tuesday", MissReason.TIME),
    ("法国的首都是哪里？", "挪威的首都是哪里？", MissReason.WORDS),
    ("столица франции", "столица испании", MissReason.WORDS),
]


@pytest.mark.parametrize(("one", "other", "reason"), DIFFERENCES)
def test_each_guard_sees_its_difference(one: str, other: str, reason: MissReason) -> None:
    """In both directions, with the reason that names it."""
    assert difference(read(one), read(other)) is reason
    assert difference(read(other), read(one)) is reason


def decide(
    text: str, known: str, similarity: float, age_s: float = 0.0, error_max: float | None = None
) -> MissReason | None:
    verdict = decide_fixed(error_max, text, [Neighbour(similarity, known, b"exact", age_s)])
    assert (verdict.served == 0) is (verdict.reasons[0] is None)
    return verdict.reasons[0]


def test_a_code_is_told_from_another_and_not_from_its_other_spelling() -> None:
    """Whatever was learned; a text without a code may mean the same as one with it."""
    for other, reason in (("AB31", MissReason.NAMES), ("ab-30", None), ("AB30 or AB31", None), ("that", None)):
        assert veto(read("Show ticket AB30"), read(f"Show ticket {other}"), 0.0) is reason


def test_thresholds_depend_on_what_the_words_share() -> None:
    """The same content words need the least similarity, further words more, other words the most."""
    same, added, changed = "tell me the capital of France", "the old capital of France", "the old harbour of France"
    assert decide(CAPITAL, same, 0.81) is None
    assert decide(CAPITAL, same, 0.79) is MissReason.FAR
    assert decide(CAPITAL, added, 0.91) is None
    assert decide(CAPITAL, added, 0.89) is MissReason.FAR
    assert decide(CAPITAL, changed, 0.96) is None
    assert decide(CAPITAL, changed, 0.94) is MissReason.WORDS


def test_no_similarity_crosses_a_guard() -> None:
    """Even at cosine 1."""
    for one, other, reason in DIFFERENCES:
        assert decide(one, other, 1.0) is reason


def test_a_caller_may_only_tighten() -> None:
    """A smaller bound needs more similarity, down to serving nothing; a larger one than the default changes nothing."""
    same = "tell me the capital of France"
    assert decide(CAPITAL, same, 0.81, error_max=0.5) is None
    assert decide(CAPITAL, same, 0.79, error_max=0.5) is MissReason.FAR
    assert decide(CAPITAL, same, 0.85, error_max=0.005) is MissReason.FAR
    assert decide(CAPITAL, same, 0.95, error_max=0.005) is None
    assert decide(CAPITAL, CAPITAL, 1.0, error_max=0.001) is MissReason.STRICT
    assert decide(CAPITAL, CAPITAL, 1.0, error_max=0.0) is MissReason.STRICT


def test_a_question_about_now_is_served_only_a_fresh_answer() -> None:
    """Ten minutes; other questions do not age."""
    assert decide("What is the weather today?", "what's the weather today", 0.99, age_s=60) is None
    assert decide("What is the weather today?", "what's the weather today", 0.99, age_s=601) is MissReason.TIME
    assert decide(CAPITAL, CAPITAL, 0.99, age_s=1e6) is None


def test_a_long_template_hits_only_word_for_word() -> None:
    """Where forty words are shared, the few that differ decide."""
    template = "please translate the following line for the subtitle of our film and keep the tone " * 4
    assert decide(template + "we leave at dawn", template + "we stay until dawn", 0.999) is MissReason.WORDS
    assert decide(template + "I did it", template + "you did it", 0.999) is MissReason.WORDS
    assert decide(template + "we leave at dawn", template + "We leave at dawn!", 0.999) is None


def test_past_a_questions_length_only_the_same_words_hit() -> None:
    """In seventeen words one that differs hardly moves the cosine."""
    letter = "write a formal email to my supplier about the invoice that is late and ask for a "
    assert decide(letter + "refund", letter + "replacement", 0.98) is MissReason.WORDS
    assert decide(letter + "refund", letter + "quick refund", 0.98) is MissReason.WORDS
    assert decide(letter + "refund", "please " + letter + "refund", 0.9) is None


EXCHANGED = [
    ("does the dog chase the cat", "hi, does the cat chase the dog"),
    ("book a flight from oslo to rome", "i need a ticket from rome to oslo"),
    ("i need a ticket from oslo to rome", "fly me to oslo from rome"),
    ("what is 20 degrees kelvin in celsius", "please what is 20 degrees celsius in kelvin"),
    ("convert pdf to word", "how do i turn word into pdf"),
]
REORDERED = [
    ("turn off the light", "turn the light off"),
    ("fly me to rome from oslo", "fly me from oslo to rome"),
    ("change accent to male british", "change accent to british male"),
    ("what date is tomorrow", "what is tomorrow's date"),
    ("which city is the capital of canada", "canada's capital is which city"),
    ("in cleveland, which places serve clams", "which places in cleveland serve clams"),
]


def test_words_that_changed_places_are_told_from_words_in_another_order() -> None:
    """Who does it to whom, and from where to where, change; what stands before what alone does not."""
    assert [pair for pair in EXCHANGED if not is_exchanged(read(pair[0]), read(pair[1]))] == []
    assert [pair for pair in EXCHANGED if not is_exchanged(read(pair[1]), read(pair[0]))] == []
    assert [pair for pair in REORDERED if is_exchanged(read(pair[0]), read(pair[1]))] == []


def test_the_first_neighbour_that_passes_is_served() -> None:
    """A nearer one that a guard stops does not stand in the way; each has its reason."""
    neighbours = [
        Neighbour(0.97, "What is the capital of Spain?", b"1", 0),
        Neighbour(0.95, "tell me the capital of France", b"2", 0),
        Neighbour(0.20, "bake bread", b"3", 0),
    ]
    verdict = decide_fixed(None, CAPITAL, neighbours)
    assert verdict.served == 1
    assert verdict.reasons == (MissReason.NAMES, None, MissReason.FAR)


@given(st.text())
@example("from 0 to 0")
def test_reading_is_total_and_a_text_does_not_differ_from_itself(text: str) -> None:
    """Any text at all can be read."""
    assert difference(read(text), read(text)) is None


@pytest.mark.parametrize("character", "_.-+")
def test_a_long_run_of_one_sign_is_read_once(character: str) -> None:
    """Reading takes time in proportion to a text's length: with its square this test would take an hour."""
    assert read(character * 500_000).names == frozenset()


@given(st.text(), st.text())
def test_guards_are_symmetric(one: str, other: str) -> None:
    """Whether two texts differ does not depend on which was cached."""
    assert (difference(read(one), read(other)) is None) is (difference(read(other), read(one)) is None)
