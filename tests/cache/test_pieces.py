"""The pieces of prompts: what is the question, what of the context differs, and what may answer across a difference."""

from __future__ import annotations

import json
import random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Hit, Miss, MissReason, Query, Trial
from cache.decision.features import FEATURES, SIMILARITY, Neighbour
from cache.decision.pieces import SHOWN_CHARS, compile_pattern, difference, digests, split, without
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, VerifiedRule
from cache.query import Asked, LookupResult, Undecided
from cache.semantic.cache import PromptAdded, SemanticCache
from cache.verdicts.records import AnswerJudged, Source, Verdict, answer_name
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask
from tests.cache.test_semantic import Yes

LAMP = (
    "The Ardea lamp has a dimmer with four steps and a timer that turns it off after ninety minutes.\nIts base is cast iron and weighs "
    "2.4 kg, so that it stands on uneven ground.\nWipe the shade with a dry cloth, never with alcohol.\nLet the bulb cool down first."
)
TENT = (
    "The Kittel tent sleeps three and takes ten minutes to pitch.\nThe outer skin holds a water column of 3,000 mm, the floor one of "
    "5,000 mm.\nClose all zips before you roll it up, and dry it within two days.\nKeep the poles in the short bag with the pegs inside."
)
TABLE = "\n".join(f"{n:02}.03,{n},cow {n},{n}.2,{n}.8,remark {n}" for n in range(1, 20))
CODE = "def price(kind):\n" + "\n".join(f"    if kind == 'kind{n}':\n        return {n}00" for n in range(9))
LAYOUTS = {
    "last": "Use only the context. Be brief.\n\nContext:\n{0}\n\nQuestion: {1}\nAnswer:",
    "first": "{1}\n\nSearch results, from the newest to the oldest one:\n{0}\nUse only what they say, in one sentence.",
    "tags": '<q>{1}</q>\n<ctx>\n<p id="1">\n{0}\n</p>\n</ctx>\nAnswer in at most twenty words, from the text alone.',
    "middle": "# Was die Suche fand\n\n{0}\n\n# Die Frage\n\n> {1}\n\n# Antworte so\n\nKurz, und nur mit dem, was oben steht.",
}


def ask_about(form: str, document: str, question: str) -> str:
    if form == "json":
        return json.dumps({"task": "answer", "context": document.split("\n"), "query": question, "words": 30}, indent=1)
    return LAYOUTS[form].format(document, question)


def entry(text: str, context: str = "", number: int = 0) -> PromptAdded:
    return PromptAdded(ACME, number.to_bytes(16, "big"), b"c" * 16, text, 0.0, 1e12, context=context)


def query(text: str, context: str = "") -> Query:
    return Query(ACME, b"c" * 16, text, context=context, may_ask=True)


def make(*entries: PromptAdded, rule: Yes | Told | VerifiedRule | None = None) -> SemanticCache:
    cache = SemanticCache(FakeEmbedder(is_constant=True, tokens_max=60), rule or Told(), Clock())
    cache.fold(entries)
    return cache


def served(cache: SemanticCache, text: str, context: str = "") -> LookupResult:
    (answer,) = cache.lookup([query(text, context)])
    return answer


class Told(Yes):
    """Serves the nearest where its context is the same or vouched for, and else asks about it."""

    def decide(
        self, query: Query, neighbours: list[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:  # type: ignore[override]
        trial = Trial((neighbours[0].exact,), b"", 0.9, 1.0, b"")
        if neighbours[0].is_context_vouched:
            return Decision(0, (None,) * len(neighbours), trial), state.counters
        doubtful = ((0, 0.9, b""),)
        return Decision(None, (MissReason.DOCUMENTS,) * len(neighbours), trial, doubtful), state.counters


@pytest.mark.parametrize("form", [*LAYOUTS, "json"])
@pytest.mark.parametrize("document", [LAMP + "\n" + TENT, TABLE, CODE])
def test_a_question_about_the_same_document_is_compared_alone(form: str, document: str) -> None:
    """In every layout, wherever the question stands; a changed, added or missing line is a difference, never a hit."""
    about = [
        ask_about(form, document, text) for text in ("colour and price", "Where is it sold?", "who made it in Lyon")
    ]
    cache = make(*(entry(text, number=number) for number, text in enumerate(about)))
    answer = served(cache, ask_about(form, document, "what is the weight"))
    assert isinstance(answer, Hit)
    assert any(text in answer.text for text in ("colour and price", "Where is it sold?", "who made it in Lyon"))
    assert len(answer.text) < 60
    lines = document.split("\n")
    for changed in (
        [*lines[:3], lines[3] + " more", *lines[4:]],
        [*lines[:3], *lines[4:]],
        [*lines[:3], "one more line", *lines[3:]],
        [lines[3], *lines[:3], *lines[4:]],
    ):
        for text in ("what is the weight", "Where is it sold?"):
            assert not isinstance(served(cache, ask_about(form, "\n".join(changed), text)), Hit)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_all_that_differs_is_compared_or_shown(data: st.DataObject) -> None:
    """Whatever lines two prompts have, and whichever of them ask: a line of one alone is in a question or in the difference."""
    lines = st.sampled_from(
        ["", "It is blue.", "Is it heavy?", "Price: 19", "Price: 20", *LAMP.split("\n"), *TABLE.split("\n")[:4]]
    )
    texts = [data.draw(st.lists(lines, min_size=2, max_size=12)) for _ in range(2)]
    one, other = (split(ACME, "system\nBe brief.", "\n".join(text)) for text in texts)
    assert one is not None
    assert other is not None
    asking = [tuple(data.draw(st.sets(st.sampled_from(two.last or ("",))))) for two in (one, other)]
    found = difference(one, other, *asking)
    apart = set(one.pieces) ^ set(other.pieces)
    if found is None:
        assert len(apart) >= 6 or sum(map(len, apart)) > SHOWN_CHARS
        return
    apart -= {*asking[0], *asking[1]}
    shown = "\n".join("\n".join(pair) for pair in found)
    assert all(piece[1:].partition("\0")[0].strip() in shown for piece in apart)
    if not found and not asking[0] and not asking[1]:
        assert one.pieces == other.pieces


def test_a_long_sentence_that_differs_is_another_document() -> None:
    """What is too long to be shown is neither served nor asked about."""
    long = "The pump runs " + "and runs " * 60
    cache = make(entry("How long?", f"system\n{LAMP}\n{long}"))
    assert isinstance(served(cache, "How long?", f"system\n{LAMP}\n{long}"), Hit)
    assert served(cache, "How long?", f"system\n{LAMP}\n{long} on") == Miss(MissReason.DOCUMENTS)
    assert served(cache, "How long?", f"system\n{TENT}\n{long}") == Miss(MissReason.DOCUMENTS)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("Today is Monday, 6 October 2025.", "Today is Thursday, 9 October 2025."),
        ("Heute ist Montag, der 6. Oktober.", "Heute ist Dienstag, der 7. Oktober."),
        ("利用者は田中さんです。", "利用者は佐藤さんです。"),
        ('{"session": "c7-9981"}', '{"session": "d1-0042"}'),
        ("Be brief.", ""),
    ],
)
def test_a_difference_of_contexts_is_asked_about(before: str, after: str) -> None:
    """A date, a name or an id, in any language and layout: without verdicts nothing is served, and both sides are shown."""
    cache = make(entry("What does a visit cost?", f"system\n{LAMP}\n{before}"))
    answer = served(cache, "what is the price of a visit", f"system\n{LAMP}\n{after}")
    assert isinstance(answer, Undecided)
    (candidate,) = answer.candidates
    assert candidate.differing == ((after, before),)
    assert answer.miss.trial is not None
    assert answer.miss.trial.differing == digests(candidate.differing)
    assert isinstance(served(cache, "what is the price", f"system\n{LAMP}\n{before}"), Hit)


def test_the_order_of_lines_is_a_difference() -> None:
    """The same lines in another order are asked about, and vouched for like others."""
    cache = make(entry("Which one is first?", f"system\n{LAMP}"))
    lines = LAMP.split("\n")
    answer = served(cache, "Which one is first?", "system\n" + "\n".join([lines[1], lines[0], *lines[2:]]))
    assert isinstance(answer, Undecided)
    ((mine, known),) = answer.candidates[0].differing
    assert mine.startswith(lines[1][:40])
    assert known.startswith(lines[0][:40])


def day(number: int) -> str:
    return f"system\n{LAMP}\nToday is day {number} for Anna{number}."


def judged(prompt: int, known: int, *, is_right: bool, similarity: float = 0.9) -> AnswerJudged:
    pair = ((f"Today is day {prompt} for Anna{prompt}.", f"Today is day {known} for Anna{known}."),)
    features = np.zeros(len(FEATURES) + 2, "<f4")
    features[SIMILARITY] = similarity
    trial = Trial(((0).to_bytes(16, "big"),), features.tobytes(), 0.9, 1.0, b"", differing=digests(pair))
    verdict = Verdict(source=Source.MISS, compat=b"c" * 16, is_right=is_right, trial=trial, at=0.0)
    return AnswerJudged(ACME, Verdict.decode(verdict.encode()), answer_name((0).to_bytes(16, "big"), 0.0), None)


def test_a_line_is_vouched_for_by_verdicts_on_it() -> None:
    """Twelve right verdicts of twelve, on three pairs of values, free it for values never seen; a wrong one ends that."""
    cache = make(entry("What does it weigh?", day(1)))
    for number in range(11):
        cache.fold([judged(number % 4 + 2, 1, is_right=True)])
        assert isinstance(served(cache, "what is its weight", day(99)), Undecided)
    cache.fold([judged(2, 1, is_right=False, similarity=0.1)])  # another question: it says nothing of the line
    cache.fold([judged(2, 1, is_right=True)])
    hit = served(cache, "what is its weight", day(99))
    assert isinstance(hit, Hit)
    assert hit.differing == (("Today is day 99 for Anna99.", "Today is day 1 for Anna1."),)
    assert isinstance(served(cache, "is it for Anna99", day(99)), Undecided)  # it names a word of the line
    assert isinstance(served(cache, "weight", f"{day(99)}\nBe brief."), Undecided)  # another line beside it
    cache.fold([judged(2, 1, is_right=False)])
    assert isinstance(served(cache, "what is its weight", day(99)), Undecided)


def test_one_changed_value_is_never_vouched_for() -> None:
    """Two versions of a document are one pair of values, however many verdicts find that they do not matter."""
    cache = make(entry("What does it weigh?", day(1)))
    cache.fold([judged(2, 1, is_right=True) for _ in range(40)])
    assert isinstance(served(cache, "what is its weight", day(2)), Undecided)


def test_the_verified_rule_serves_nothing_across_a_difference() -> None:
    """The same words, asked in another context, are no hit before verdicts vouch for the line."""
    rule = VerifiedRule(PRIOR)
    cache = make(entry("What does it weigh?", day(1)), rule=rule)
    assert isinstance(served(cache, "What does it weigh?", day(1)), Hit)
    assert not isinstance(served(cache, "What does it weigh?", day(2)), Hit)
    cache.fold([judged(number % 4 + 2, 1, is_right=True) for number in range(12)])
    assert isinstance(served(cache, "What does it weigh?", day(9)), Hit)


def test_contexts_of_other_tenants_and_parameters_share_nothing() -> None:
    """The context is compared within a partition and compat alone."""
    cache = make(entry("What does it weigh?", day(1)))
    for other in (Query(OTHER, b"c" * 16, "weight", context=day(1)), Query(ACME, b"d" * 16, "weight", context=day(1))):
        assert cache.lookup([other]) == [Miss(MissReason.EMPTY)]
    body = [{"role": "system", "content": LAMP}, {"role": "user", "content": "weight"}]
    assert ask("weight", messages=body).compat != ask("weight").compat


def test_a_restart_compares_the_same_questions() -> None:
    """The same entries, folded one by one or at once, answer alike; a dropped one leaves nothing behind."""
    texts = [ask_about("last", LAMP, f"Is number {n} the colour {'x' * n}?") for n in range(1, 9)]
    records = [entry(text, number=number) for number, text in enumerate(texts)]
    one, other = make(), make(*records)
    for record in records:
        one.fold([record])
    asked = [query(ask_about("last", LAMP, "of what colour")), query(ask_about("last", TENT, "of what colour"))]
    assert one.lookup(asked) == other.lookup(asked)
    one.retain(set())
    assert len(one) == one.namespaces == 0
    assert one.lookup(asked) == [Miss(MissReason.EMPTY)] * 2


def test_operators_patterns_are_left_out_of_system_prompts_alone() -> None:
    """One that does not end in time leaves all as it is; one that matches nothing or an empty text is refused."""
    context = "system\nBatch ZX-1, batch ZX-2\0user\nBatch ZX-3"
    assert without(context, [compile_pattern(r"ZX-\d+")]) == "system\nBatch ·, batch ·\0user\nBatch ZX-3"
    slow = "system\nZX-12 " + "a" * 5_000
    assert without(slow, [compile_pattern(r"ZX-\d+"), compile_pattern("(a+)+b"), compile_pattern("(a+)+c")]) == slow
    for pattern in ("(", "x*"):
        with pytest.raises(ValueError, match=r"it has to match|no regular expression"):
            compile_pattern(pattern)


def test_prompts_of_any_size_are_read_in_bounded_time() -> None:
    """One with more pieces than may be compared is not found by meaning."""
    draw = random.Random(0)
    text = "\n".join(str(draw.random()) for _ in range(5_000))
    cache = make(entry(text), entry("why", f"system\n{text[:30_000]}", number=1))
    assert len(cache) <= 1
    assert isinstance(served(cache, text), Miss)


def test_asked_pieces_cross_the_socket() -> None:
    """What a verifier is shown is a plain value."""
    asked = Asked(b"e", b"g", 0.9, "why", 0.5, (("a", ""),))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(asked), type=Asked) == asked
