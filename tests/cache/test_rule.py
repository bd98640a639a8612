"""The verified rule: what verdicts teach it, what they can't, and that the same records give the same decisions."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.labelled import Comparisons
from bench.vcache import VCache
from cache import Hit, Miss, MissReason
from cache.decision.differences import KINDS_MAX, Freed, WordCounts, WordDifference, from_all
from cache.decision.features import EVIDENCE, FEATURES, Neighbour, candidates, features_of
from cache.decision.model import LearnedModel, Prior, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import NamespaceState, VerifiedRule
from cache.events import EntriesDropped
from cache.query import Asked, Neighbourhood, Trial
from cache.semantic.cache import PromptAdded, SemanticCache
from cache.semantic.state import NamespaceStates
from cache.verdicts.records import AnswerJudged, Source, Verdict
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask, query

CAPITAL = "What is the capital of France?"
NUMBERS = itertools.count()


def near(similarity: float, text: str, group: bytes, **counts: int) -> Neighbour:
    return Neighbour(similarity, text, text.encode(), 0.0, group, **counts)


@given(st.lists(st.text(), max_size=10))
def test_words_that_went_leave_no_trace(texts: list[str]) -> None:
    """Adding and removing the same texts leaves the counts as they were."""
    words = WordCounts()
    for sign in (1, -1):
        for text in texts:
            words.add(text, sign)
    assert words == WordCounts()


def test_neighbours_of_one_answer_vote_together() -> None:
    """Three that are a little further outvote the nearest; the witness is the nearest of the group."""
    some = [near(0.80, "a", b"1"), near(0.79, "b", b"2"), near(0.78, "c", b"2"), near(0.77, "d", b"2")]
    first, second = candidates("a", some, 4)
    assert (first.group, first.index, first.count, first.rival) == (b"2", 1, 3, 0.80)
    assert (second.group, second.rival) == (b"1", 0.79)
    assert first.share + second.share == pytest.approx(1.0)


def test_the_witness_of_a_group_is_a_key_that_no_exact_check_stops() -> None:
    """The nearest key of the group has another number; the next of the same answer has the same."""
    some = [near(0.95, "wake me at 8", b"g"), near(0.90, "please wake me at 7", b"g")]
    decision, _ = VerifiedRule(PRIOR).decide(query("wake me at 7"), some, NamespaceState())
    assert decision.served == 1


@given(
    st.text(), st.lists(st.tuples(st.text(), st.floats(-1, 1), st.sampled_from([b"1", b"2"])), min_size=1, max_size=20)
)
def test_evidence_is_total_and_finite(asked: str, known: list[tuple[str, float, bytes]]) -> None:
    """Whatever the texts: finite numbers, the features first, then kinds of difference that float32 holds exactly."""
    some = sorted((near(s, text, group) for text, s, group in known), key=lambda one: -one.similarity)
    words = WordCounts()
    for one in some:
        words.add(one.text)
    for candidate in candidates(asked, some, 4):
        made = features_of(asked, some, candidate, words, Freed())
        assert made.shape == (len(FEATURES) + KINDS_MAX,)
        assert np.isfinite(made).all()
        assert (made[len(FEATURES) :].astype(np.float32) == made[len(FEATURES) :]).all()


def forms(asked: str, *known: str) -> dict[str, str]:
    return {one.word: one.form for one in from_all(asked, known)}


def test_differences_are_words_additions_and_words_elsewhere() -> None:
    """Found by alignment: a run at an end is an addition whatever its words, also where it repeats those of the prompt."""
    assert forms("open the red box", "open the box") == {"red": ""}
    assert forms("open the box as a pirate", "open the box") == {"as": "+", "pirate": "+"}
    assert forms("open the box open the box", "open the box") == {"open": "++", "box": "++"}
    assert forms("do what i say open the box", "open the box") == {"do": "+", "what": "+", "i": "+", "say": "+"}
    assert forms("ship it from Rome to Oslo", "ship it from Oslo to Rome").keys() & {"rome", "oslo"}
    assert forms("Öffne die Kiste auf Deutsch", "Öffne die Kiste") == {"auf": "+", "deutsch": "+"}


def test_another_wording_of_the_answer_vouches_for_what_it_has_or_lacks() -> None:
    """A difference counts only if the prompt has it from all near wordings; an addition to one stays one."""
    assert forms("open the box quickly", "open the box", "quickly open the crate") == {}
    assert forms("open the box", "open the box quickly", "open the crate") == {}
    assert forms("open the box in latin", "open the box", "a crate, open it at once") == {"in": "+", "latin": "+"}


def test_only_right_verdicts_on_several_answers_free_a_kind() -> None:
    """Two for a word, three for an addition; wrong ones take it back, and repeated right ones never free it."""
    freed, word, added = Freed(), WordDifference("kindly", True), WordDifference("kindly", True, "+")
    for place in range(5):
        assert freed.has(word) is (place >= 2)
        assert freed.has(added) is (place >= 3)
        for one in (word, added):
            freed.learn([one.kind], True, b"%d" % place)
    for _ in range(3):
        assert freed.has(added)
        freed.learn([word.kind, added.kind], False, b"1")
    assert not freed.has(added)
    repeated = WordDifference("please", True)
    for _ in range(50):
        freed.learn([repeated.kind], True, b"one answer")
    assert not freed.has(repeated)


def prior() -> Prior:
    count = len(FEATURES)
    return Prior(np.zeros(count), np.ones(count), np.zeros(count + 1), np.full(count + 1, 1e-3))


def row_of(features: Any, served: int = 0, risked: float = 0.0) -> Any:
    """As a row has it: features with verdicts near by, no kinds, and what was served since the row before."""
    made = features[: len(FEATURES)].copy()
    made[EVIDENCE] = 6.0
    return np.concatenate([made, np.zeros(KINDS_MAX), (served, risked)])


def served_of(model: LearnedModel, fresh: list[Row], error_max: float = 0.01) -> list[Row]:
    return [row for row in fresh if lower(model, row) >= model.threshold(error_max)]


def lower(model: LearnedModel, row: Row) -> float:
    return float(model.logistic.lower(row.features[None])[0])


def compared(features: Any, is_right: bool | None, chance: float, p: float) -> Row:
    """Each on another answer."""
    trial = Trial((), features.astype("<f4").tobytes(), p, chance, b"rule")
    return Row(trial, is_right, group=b"%d" % next(NUMBERS))


def rows(count: int, seed: int, wrong: float = 0.02) -> list[Row]:
    """Where the first number is positive the answer is right, but for a share of `wrong`."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        seen = row_of(rng.normal(size=len(FEATURES)))
        made.append(compared(seen, bool((seen[0] > 0) != (rng.random() < wrong)), 1.0, 0.5))
    return made


def test_what_passes_the_threshold_is_wrong_less_than_the_bound() -> None:
    """On requests like those it learned from, counted over all of them; and a larger bound serves more."""
    model = LearnedModel(prior())
    for row in rows(3_000, 1):
        model.learn(row)
    fresh = rows(4_000, 2)
    for error_max in (0.01, 0.05):
        served = served_of(model, fresh, error_max)
        assert len(served) > 200
        assert sum(not row.is_right for row in served) <= error_max * len(fresh)
        assert model.threshold(error_max) >= model.threshold(2 * error_max)


def test_answers_that_are_never_right_are_never_served() -> None:
    """Nothing reaches the threshold, at any bound."""
    model = LearnedModel(prior())
    for row in rows(500, 3):
        model.learn(compared(row.features, False, 1.0, 0.5))
    assert not any(lower(model, row) >= model.threshold(0.01) for row in rows(500, 4))


def decide(
    text: str, known: Sequence[Neighbour], state: NamespaceState, error_max: float | None = None
) -> MissReason | None:
    decision, _ = VerifiedRule(PRIOR).decide(query(text, error_max=error_max), known, state)
    return None if decision.served is not None else decision.reasons[0]


INTENTS = ("alarm wake clock", "music play song", "weather rain forecast", "lamp light room")


def requests(count: int, seed: int) -> list[tuple[str, int]]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        intent = draw.randrange(len(INTENTS))
        made.append((" ".join([*draw.sample(INTENTS[intent].split(), 2), draw.choice("abcdefgh")]), intent))
    return made


class BagEmbedder(FakeEmbedder):
    """Texts that share words are near."""

    def _vector(self, text: str) -> Any:
        vector = sum((super(BagEmbedder, self)._vector(word) for word in text.split()), np.zeros(self.info.dims))
        return (vector / np.linalg.norm(vector)).astype(np.float32)


def run(
    count: int, cache: SemanticCache, clock: Clock
) -> tuple[list[PromptAdded | EntriesDropped | AnswerJudged], int]:
    records: list[PromptAdded | EntriesDropped | AnswerJudged] = []
    answers: dict[bytes, int] = {}
    hits, comparisons = 0, Comparisons()
    for number, (text, intent) in enumerate(requests(count, 7)):
        asked = query(text)
        (answer,) = cache.lookup([asked])
        if isinstance(answer, Hit):
            hits += 1
            assert answers[answer.exact] == intent
            continue
        exact = number.to_bytes(16, "big")
        answers[exact] = intent
        records.append(comparisons.add(PromptAdded(ACME, exact, asked.compat, text, clock.now, clock.now + 1e6)))
        cache.fold(records[-1:])
        judged = comparisons.compare(asked, answer, exact, lambda other, own=intent: answers[other] == own)  # type: ignore[misc]
        if judged is not None:
            records.append(judged)
            cache.fold([judged])
    return records, hits


def seen(near: Neighbourhood) -> tuple[object, ...]:
    """All of a decision but what was served lately, which only the process knows that served it."""
    answer = near.decision
    what = answer.exact if isinstance(answer, Hit) else answer.reason
    return what, near.neighbours, near.p_min, near.verdicts, answer.trial.p if answer.trial else None


def test_verdicts_teach_a_namespace_and_a_rebuild_decides_the_same() -> None:
    """From misses alone it learns which neighbours answer each other; the records folded again give the same answers."""
    clock = Clock()
    cache = SemanticCache(BagEmbedder(), VerifiedRule(PRIOR), clock)
    records, hits = run(400, cache, clock)
    assert hits > 100
    rebuilt = SemanticCache(BagEmbedder(), VerifiedRule(PRIOR), clock)
    rebuilt.fold(records)
    while rebuilt.settle():
        pass
    questions = [query(text) for text, _ in requests(60, 8)]
    assert [seen(one) for one in rebuilt.near(questions, 16)] == [seen(one) for one in cache.near(questions, 16)]


@settings(max_examples=30)
@given(st.lists(st.integers(0, 11), min_size=1, max_size=40))
def test_what_was_dropped_is_not_served_whatever_was_learned(drops: list[int]) -> None:
    """Neither by its own key nor by its group; verdicts on entries that are gone are taken without harm."""
    clock = Clock()
    cache = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR), clock)
    texts = [f"alpha beta {letter}" for letter in "abcdefghijkl"]
    living, comparisons = set[str](), Comparisons()
    for number in drops:
        text = texts[number]
        fp = ask(text)
        if text in living:
            cache.fold([EntriesDropped(ACME, (fp.exact,))])
            living.discard(text)
        else:
            cache.fold([comparisons.add(PromptAdded(ACME, fp.exact, fp.compat, text, clock.now, clock.now + 60))])
            living.add(text)
        (answer,) = cache.lookup([query(text)])
        judged = comparisons.compare(query(text), answer, fp.exact, lambda _: True)
        if judged is not None:
            cache.fold([judged])
        (answer,) = cache.lookup([query("beta alpha a")])
        assert isinstance(answer, Miss) or answer.text in living


def test_vcache_explores_until_an_entry_has_shown_its_threshold() -> None:
    """The rule it is compared with: never from cold; then at similarities that were always right."""
    cache = VCache(0.1, 2, random.Random(1))
    vector = np.array([1.0, 0.0], dtype=np.float32)
    outcomes = []
    for _ in range(400):
        found = cache.lookup(vector)
        outcomes.append(found.is_served)
        if not found.is_served:
            cache.learn(vector, found, "yes", False)
    assert not outcomes[0]
    assert sum(outcomes[200:]) > sum(outcomes[:200]) > 0


def test_a_tightened_bound_says_what_it_refused() -> None:
    """Served at the bound as it was and not as it is: the reason is the tightening."""
    clock = Clock()
    cache = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR), clock)
    fp = ask("open the box please")
    cache.fold([PromptAdded(ACME, fp.exact, fp.compat, "open the box please", clock.now, clock.now + 1e6)])
    asked = query("please open the box", error_max=0.01)
    tight = msgspec.structs.replace(asked, error_max=1e-5, untightened=0.01)
    first, second, third = cache.lookup([asked, tight, msgspec.structs.replace(tight, untightened=None)])
    assert isinstance(first, Hit)
    assert isinstance(second, Miss)
    assert isinstance(third, Miss)
    assert second.reason is MissReason.TIGHTENED
    assert third.reason is not MissReason.TIGHTENED


def test_what_no_judge_can_tell_counts_as_wrong() -> None:
    """Where a third of the right answers is found to be equal and nothing else is told, next to nothing is served."""
    model = LearnedModel(prior())
    for place, row in enumerate(rows(3_000, 1)):
        model.learn(row if row.is_right and place % 3 == 0 else replace(row, is_right=None))
    assert len(served_of(model, rows(2_000, 2))) <= 0.01 * 2_000


def test_a_fit_may_run_later_and_comes_out_the_same() -> None:
    """What is decided meanwhile is decided by the model before."""
    waiting: list[Callable[[], object]] = []
    late, prompt = LearnedModel(prior(), waiting.append), LearnedModel(prior())
    made = rows(300, 1)
    for row in made:
        late.learn(row)
        prompt.learn(row)
    assert late.threshold(0.01) == 1.0
    for work in waiting:
        work()
    assert late.threshold(0.01) == prompt.threshold(0.01)
    assert [lower(late, row) for row in made] == [lower(prompt, row) for row in made]


def test_what_was_overspent_is_saved() -> None:
    """Rows say how much was served before them at which risk: the more, the higher the threshold."""
    models = [LearnedModel(prior()) for _ in range(3)]
    for model, risk in zip(models, (0.0, 0.005, 0.05), strict=True):
        for row in rows(1_000, 1):
            model.learn(compared(row_of(row.features, 1, 2 * risk), row.is_right, 1.0, 0.5))
    frugal, even, lavish = (model.threshold(0.01) for model in models)
    assert frugal < even < lavish == 1.0


def test_surprises_among_the_sure_raise_the_threshold() -> None:
    """Verdicts against a p of 0.95 make every p count for more errors; verdicts that bear it out earn no credit."""
    thresholds = []
    for wrong in (0, 40):
        model = LearnedModel(prior())
        for place, row in enumerate(rows(1_000, 5)):
            model.learn(compared(row.features, row.is_right if place >= wrong else False, 1.0, 0.95))
        thresholds.append(model.threshold(0.01))
    assert thresholds[0] < thresholds[1]


def test_confidence_falls_with_the_distance_from_verdicts() -> None:
    """Where the answers near by had no verdict, what was learned elsewhere is no reason to serve."""
    model = LearnedModel(prior())
    for row in rows(3_000, 1):
        model.learn(row)
    sure = next(row for row in rows(100, 2) if lower(model, row) > model.threshold(0.01))
    far = sure.features
    far[EVIDENCE] = 0.0
    risk = [1 - lower(model, sure), 1 - float(model.logistic.lower(far[None])[0])]
    assert risk[1] > 3 * risk[0]


def test_a_difference_never_makes_an_answer_likelier() -> None:
    """However many verdicts say so: the weights of differences are not above 0."""
    model, place = LearnedModel(prior()), FEATURES.index("weight asked only")
    for row in rows(600, 1):
        model.learn(replace(row, is_right=bool(row.features[place] > 0)))
    some = rows(1, 2)[0].features
    some[place] = 0.0
    more = some.copy()
    more[place] = 3.0
    assert model.logistic.mean(more[None])[0] <= model.logistic.mean(some[None])[0]


def test_what_was_learned_is_of_one_namespace_and_a_rebuild_agrees() -> None:
    """Another namespace, and another partition, know nothing of it; verdicts forgotten and folded again make the same model."""
    states = NamespaceStates(VerifiedRule(prior()), b"rule")

    def learn() -> float:
        for row in rows(200, 1):
            verdict = Verdict(source=Source.MISS, compat=b"a" * 16, is_right=row.is_right, trial=row.trial, at=0.0)
            states.learn(AnswerJudged(ACME, Verdict.decode(verdict.encode()), row.group, None))
        model = states.of(ACME + b"a" * 16).model
        assert model is not None
        return lower(model, rows(1, 2)[0])

    before = learn()
    assert states.of(ACME + b"b" * 16).model is None
    assert states.of(OTHER + b"a" * 16).model is None
    states.clear()
    assert states.of(ACME + b"a" * 16).model is None
    assert learn() == before


def undecided(asked: str, known: Sequence[Neighbour], state: NamespaceState | None = None) -> list[int]:
    decision, _ = VerifiedRule(PRIOR).decide(
        msgspec.structs.replace(query(asked), may_ask=True), known, state or NamespaceState()
    )
    return [place for place, *_ in decision.doubtful]


def test_a_verifier_may_be_asked_about_what_no_exact_check_stops() -> None:
    """At most four answers, one of each group, the likeliest first; none beside a certain hit."""
    some = [near(0.9 - place / 100, f"open box of kind {word}", word.encode()) for place, word in enumerate("abcdef")]
    assert undecided("unlock a crate of kind z", some) == [0, 1, 2, 3]
    assert undecided("open box of kind a please", some) == []
    assert undecided("open 3 boxes", [near(0.9, "open 4 boxes", b"g")]) == []
    assert undecided("open the box", [near(0.3, "close the lid", b"g")]) == []


def test_each_answer_that_is_asked_about_has_a_row_of_its_own() -> None:
    """A verdict on a further one teaches as one on the first, and is no request in the inequality."""
    some = [near(0.9, "open box of kind a", b"a"), near(0.85, "open box of kind b", b"b")]
    asked = msgspec.structs.replace(query("open box of kind z"), may_ask=True)
    decision, _ = VerifiedRule(PRIOR).decide(asked, some, NamespaceState())
    place, p, features = decision.doubtful[1]
    further = Asked(some[place].exact, b"b", 0.85, some[place].text, p, features=features).trial(decision.trial)
    assert decision.trial is not None
    assert further.p == 0.0
    assert further.features[:-8] != decision.trial.features[:-8]
    of_requests, of_answers = LearnedModel(prior()), LearnedModel(prior())
    for row in rows(400, 1):
        for model, request in ((of_requests, 0.0), (of_answers, np.frombuffer(further.features, "<f4")[-2])):
            model.learn(row)
            numbers = np.append(row.features[:-2], (request, 0.0)).astype("<f4").tobytes()
            model.learn(replace(row, trial=msgspec.structs.replace(row.trial, features=numbers, p=0.0)))
    assert of_requests.threshold(0.01) < of_answers.threshold(0.01) < 1.0


def test_another_context_is_asked_about_and_never_certain() -> None:
    """Until verdicts vouch for the pieces that differ."""
    known = msgspec.structs.replace(near(0.99, CAPITAL, b"g"), differing=(("Plan: basic", "Plan: pro"),))
    for is_vouched, served in ((True, 0), (False, None)):
        some = [msgspec.structs.replace(known, is_context_vouched=is_vouched)]
        decision, _ = VerifiedRule(PRIOR).decide(query(CAPITAL), some, NamespaceState())
        assert decision.served == served
    assert undecided(CAPITAL, some) == [0]
