"""The judge of prose: what it rules, where it abstains, and what never makes it say "same"."""

from __future__ import annotations

import random
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cache.encoder.types import Encoded
from cache.verdicts import Ruling
from cache.verdicts.prose import Answers, Sketch, pieces, sketch

SKETCH_BYTES_MAX = 8_192
SAME, DIFFERENT, UNKNOWN = Ruling.SAME, Ruling.DIFFERENT, Ruling.UNKNOWN
DIMS = 96


def word_vector(word: str) -> NDArray[np.float32]:
    return np.random.default_rng(list(word.encode("utf-8", "replace"))).standard_normal(DIMS).astype(np.float32)


def encode(texts: Sequence[str]) -> Encoded:
    """A sentence's vector is the sum of its words' vectors: texts that share words are near."""
    vectors = np.stack(
        [
            sum((word_vector(word) for word in text.casefold().replace(".", "").split()), np.zeros(DIMS))
            for text in texts
        ]
    )
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return Encoded(vectors.astype(np.float32), np.ones(len(texts), np.int32))


def syllables(draw: random.Random) -> str:
    return "".join(draw.choice("bdfgklmnprtvz") + draw.choice("aiou") for _ in range(4))


class Subject:
    """A made-up subject: its words, and answers that put some of them in sentences of any order."""

    def __init__(self, seed: int, words: int = 14) -> None:
        self.draw = random.Random(seed)
        self.words = [syllables(self.draw) for _ in range(words)]
        self.prompt = word_vector(f"prompt {seed}")
        self.prompt /= np.linalg.norm(self.prompt)

    def answer(self, share: float = 0.68) -> str:
        some = self.draw.sample(self.words, int(share * len(self.words)))
        sentences = [some[start : start + 4] for start in range(0, len(some), 4)]
        return " ".join(f"{' '.join(sentence).capitalize()}." for sentence in sentences)

    def asked(self) -> NDArray[np.float32]:
        """The vector of a prompt about it, near the others'."""
        made = self.prompt + 0.06 * np.random.default_rng(self.draw.randrange(10**6)).standard_normal(DIMS)
        return (made / np.linalg.norm(made)).astype(np.float32)


def named(number: int) -> bytes:
    return b"entry---" + number.to_bytes(8, "big")


class Namespace:
    """Answers under numbers, and rulings on fresh ones."""

    def __init__(self) -> None:
        self.answers = Answers()
        self.count = 0

    def add(self, text: str, prompt: NDArray[np.float32], *beside: bytes) -> bytes:
        """Keep an answer, and compare it with those `beside`, as after a miss."""
        self.count += 1
        made = sketch(text, encode)
        self.answers.add(named(self.count), prompt, made)
        for one in beside:
            self.answers.judge(made, named(self.count), [one])
        return named(self.count)

    def ruling(self, fresh: str, candidate: bytes) -> Ruling:
        return Ruling(self.answers.judge(sketch(fresh, encode), named(0), [candidate])[0].ruling)


Taught = tuple[Namespace, list[Subject], dict[int, bytes]]


def taught(pairs: int = 24, wordings: int = 5, *, are_echoed: bool = False) -> Taught:
    """A namespace of pairs of subjects whose prompts are near and whose answers share a few words; `are_echoed`: each answer
    says details of its prompt."""
    made, subjects, firsts = Namespace(), [], {}
    for pair in range(pairs):
        one, other = Subject(2 * pair), Subject(2 * pair + 1)
        other.prompt = one.prompt
        other.words[:3] = one.words[:3]
        subjects += [one, other]
    for _ in range(wordings):
        for number, subject in enumerate(subjects):
            detail, prompt = "", subject.asked()
            if are_echoed:
                detail = " ".join(syllables(subject.draw) for _ in range(2))
                prompt = (prompt + 0.3 * encode([detail]).vectors[0]) / np.linalg.norm(
                    prompt + 0.3 * encode([detail]).vectors[0]
                )
            near = [firsts[one] for one in (number, number ^ 1) if one in firsts]
            name = made.add(f"{subject.answer()} {detail.capitalize()}.", prompt, *near)
            firsts.setdefault(number, name)
    return made, subjects, firsts


@pytest.fixture(scope="module")
def namespace() -> Taught:
    return taught()


def test_wordings_of_one_answer_are_same_and_others_are_not(namespace: Taught) -> None:
    """In a namespace whose answers can be told apart, most wordings are recognised, and no other answer is called the same."""
    made, subjects, firsts = namespace
    own = [made.ruling(subject.answer(), firsts[number]) for number, subject in enumerate(subjects)]
    beside = [made.ruling(subject.answer(), firsts[number ^ 1]) for number, subject in enumerate(subjects)]
    assert own.count(SAME) > 0.7 * len(own)
    assert own.count(DIFFERENT) == 0
    assert beside.count(SAME) == 0
    assert beside.count(DIFFERENT) > 0.5 * len(beside)


def test_abstains_before_there_is_enough_to_compare_with() -> None:
    """A young namespace is not judged, not even of nearly equal answers."""
    made = Namespace()
    subject = Subject(1)
    first = made.add(subject.answer(), subject.asked())
    assert made.ruling(subject.answer(1.0), first) is UNKNOWN


def test_abstains_where_answers_to_near_prompts_are_as_alike_as_wordings() -> None:
    """Where the answers to near prompts share more or less of their words, without a gap, nothing is the same."""
    made, names, subjects = Namespace(), [], []
    draw = random.Random(5)
    for number in range(120):
        one, other = Subject(1_000 + 2 * number), Subject(1_001 + 2 * number)
        other.prompt = one.prompt
        shared = draw.randrange(4, 14)
        other.words[:shared] = one.words[:shared]
        names.append(made.add(one.answer(), one.asked()))
        made.add(other.answer(), other.asked(), names[-1])
        subjects.append((one, other))
    rulings = [made.ruling(other.answer(), name) for name, (_, other) in zip(names, subjects, strict=True)]
    assert rulings.count(SAME) == 0


def test_abstains_where_answers_say_what_their_prompts_differ_in() -> None:
    """Where answers to near prompts differ in a word that each has from its prompt, nothing is the same, however near they are."""
    made, subjects, firsts = taught(are_echoed=True)
    rulings = [made.ruling(subject.answer(), firsts[number]) for number, subject in enumerate(subjects)]
    assert rulings.count(SAME) == 0


def test_an_answer_that_is_the_first_of_its_subject_is_not_taken_for_a_near_one(namespace: Taught) -> None:
    """Answers of new subjects, which share four words of fourteen with a known one, are not the same as that."""
    made, subjects, firsts = namespace
    rulings = []
    for number, known in enumerate(subjects):
        new = Subject(5_000 + number)
        new.words[:4] = known.words[:4]
        rulings.append(made.ruling(new.answer(), firsts[number]))
    assert rulings.count(SAME) == 0


def test_an_answer_with_the_words_of_all_subjects_is_same_as_none(namespace: Taught) -> None:
    """Padding with the words of everything makes an answer near to no other in particular."""
    made, subjects, firsts = namespace
    padded = " ".join(f"{' '.join(subject.words[:9]).capitalize()}." for subject in subjects[:30])
    assert {made.ruling(padded, name) for name in firsts.values()} <= {DIFFERENT, UNKNOWN}


PLAIN = (
    "You can return an item within 30 days of delivery to our warehouse in Leeds. "
    "Please pack it in the original box and write the order number on the label. "
    "We refund the price to your card when the parcel has been checked by Dr. Smith on Monday."
)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("30 days", "14 days"),
        ("30 days", "30 weeks"),
        ("30 days", "days"),
        ("Leeds", "York"),
        ("Smith", "Jones"),
        ("Monday", "Tuesday"),
        ("You can", "You cannot"),
        ("We refund", "We never refund"),
        ("original", "second"),
        ("within 30 days", "within thirty-one days"),
        ("the price", "half the price"),
        ("Please pack it", "Please pack it naked"),
    ],
)
def test_one_changed_word_is_never_same(namespace: Taught, old: str, new: str) -> None:
    """Answers that share all text but a number, unit, date, name, negation or word are not the same, whichever came first."""
    made, _, _ = namespace
    prompt = word_vector("a prompt")
    texts = PLAIN, PLAIN.replace(old, new)
    assert texts[0] != texts[1]
    for one, other in (texts, texts[::-1]):
        name = made.add(one, prompt)
        assert made.ruling(one, name) is SAME
        assert made.ruling(other, name) is not SAME
        made.answers.drop(name)


def test_a_long_copy_with_an_opening_is_same(namespace: Taught) -> None:
    """An opening moves the places at which the sentences of a long answer are joined, and adds nothing."""
    made, _, _ = namespace
    subject = Subject(1_000, words=60)
    text = subject.answer(1.0)
    opening = "Of course, gladly."
    for number in range(8):
        made.add(f"{opening} {Subject(2_000 + number).answer()}", word_vector(f"prompt {number}"))
    name = made.add(text, subject.asked())
    assert made.ruling(f"{opening} {text}", name) is SAME
    made.answers.drop(name)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Yes.",
        "I'm sorry, but I can't help with that request today, as it is against the rules.",
        "I do not know the answer to this one, but please do ask me something else.",
        "a" * 65_536,
        "a.\n" * 20_000,
        "- x\n" * 16_000,
        "\x00" * 65_536,
        "\U0001f600" * 16_000,
        "\ud800",
        " " * 65_536,
        "1 " * 30_000,
    ],
)
def test_no_answer_and_no_prose_is_no_evidence(namespace: Taught, text: str) -> None:
    """Short texts, refusals and texts too long to be compared are UNKNOWN, also beside themselves."""
    made, _, _ = namespace
    name = made.add(text, word_vector("a prompt"))
    assert made.ruling(text, name) is UNKNOWN
    made.answers.drop(name)


@given(st.text(max_size=400))
def test_a_sketch_survives_its_stored_form(text: str) -> None:
    """Whatever the answer, its sketch is made, and reads back as the same bytes of a bounded size."""
    made = sketch(text, encode)
    data = made.encode()
    assert len(data) <= SKETCH_BYTES_MAX
    assert Sketch.decode(data).encode() == data
    assert len(pieces(text)) <= 8


@given(st.binary(max_size=200))
@example(b"\x96\xa2\x00\x80")
@example(msgspec.msgpack.encode(("p2", b"123", (1,), b"")))
def test_bytes_that_are_no_sketch_are_refused(data: bytes) -> None:
    """Other bytes raise ValueError."""
    with pytest.raises(ValueError, match=r".+"):
        Sketch.decode(data)
    whole = sketch(PLAIN, encode).encode()
    with pytest.raises(ValueError, match=r".+"):
        Sketch.decode(whole[:-1])


def test_the_longest_sketch_fits_its_bound() -> None:
    """An answer of as many words as are compared has a sketch within the bound, with vectors of MiniLM's size."""
    text = ". ".join(" ".join(f"Word{number * 12 + place}" for place in range(12)) for number in range(49))

    def wide(texts: Sequence[str]) -> Encoded:
        return Encoded(np.full((len(texts), 384), 384**-0.5, np.float32), np.ones(len(texts), np.int32))

    made = sketch(text, wide)
    assert made.lengths
    assert len(made.encode()) <= SKETCH_BYTES_MAX


def test_what_is_dropped_is_compared_with_nothing() -> None:
    """After all answers have gone none is kept, and none is ruled on."""
    made, subjects, firsts = taught()
    for name in list(made.answers.kept):
        made.answers.drop(name)
    assert made.answers.kept == {}
    assert made.ruling(subjects[0].answer(), firsts[0]) is UNKNOWN


def test_repeating_an_answer_does_not_make_its_words_weigh_less() -> None:
    """Words weigh by the distinct texts that have them: two hundred copies of one leave scores as they were."""
    scores = []
    for copies in (1, 200):
        made, subjects, firsts = taught()
        repeated, fresh, prompt = subjects[0].answer(), subjects[0].answer(), subjects[0].asked()
        for _ in range(copies):
            made.add(repeated, prompt)
            (judgement,) = made.answers.judge(sketch(fresh, encode), named(0), [firsts[1]])
        scores.append(float(judgement.why.split()[1].rstrip(",")))
    assert scores[0] == pytest.approx(scores[1], abs=0.03)


def test_rulings_on_names_that_are_not_there_are_unknown(namespace: Taught) -> None:
    """A candidate that was dropped, and the fresh answer itself, are not compared."""
    made, subjects, firsts = namespace
    fresh = sketch(subjects[0].answer(), encode)
    rulings = made.answers.judge(fresh, firsts[0], [b"another----------", firsts[0]])
    assert [one.ruling for one in rulings] == [UNKNOWN, UNKNOWN]
    assert made.answers.judge(Sketch(), firsts[0], [firsts[1]])[0].ruling is UNKNOWN
