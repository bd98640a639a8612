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
from cache.decision.features import FEATURES, ONE_SIDED_MAX, Neighbour, WordCounts, WordOdds, candidates, features_of
from cache.decision.guards import COLD_WRONG
from cache.decision.model import CalibratedModel, LearnedModel, Prior, Row, asking_share
from cache.decision.prior import PRIOR
from cache.decision.rule import NamespaceState, VerifiedRule
from cache.events import EntriesDropped
from cache.fingerprint import Partition
from cache.query import Neighbourhood, Trial
from cache.semantic.cache import PromptAdded, SemanticCache
from cache.semantic.state import NamespaceStates
from cache.verdicts.records import AnswerJudged, Source, Verdict
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask, query

CAPITAL = "What is the capital of France?"
NUMBERS = itertools.count()


def near(similarity: float, text: str, group: bytes, **counts: int) -> Neighbour:
    return Neighbour(similarity, text, text.encode(), 0.0, group, **counts)


def test_neighbours_of_one_answer_vote_together() -> None:
    """Three that are a little further outvote the nearest; the witness is the nearest of the group."""
    some = [near(0.80, "a", b"1"), near(0.79, "b", b"2"), near(0.78, "c", b"2"), near(0.77, "d", b"2")]
    first, second = candidates(some)
    assert (first.group, first.index, first.count, first.rival) == (b"2", 1, 3, 0.80)
    assert (second.group, second.rival) == (b"1", 0.79)
    assert first.share + second.share == pytest.approx(1.0)


@given(
    st.text(), st.lists(st.tuples(st.text(), st.floats(-1, 1), st.sampled_from([b"1", b"2"])), min_size=1, max_size=20)
)
def test_evidence_is_total_and_finite(asked: str, known: list[tuple[str, float, bytes]]) -> None:
    """Whatever the texts: finite numbers, the features first, then words that float32 holds exactly."""
    some = sorted((near(s, text, group) for text, s, group in known), key=lambda one: -one.similarity)
    words = WordCounts()
    for one in some:
        words.add(one.text)
    for candidate in candidates(some):
        made = features_of(asked, some, candidate, words, WordOdds(), False)
        assert made.shape == (len(FEATURES) + ONE_SIDED_MAX,)
        assert np.isfinite(made).all()
        assert (made[len(FEATURES) :].astype(np.float32) == made[len(FEATURES) :]).all()


def test_verdicts_tell_which_words_may_be_left_out() -> None:
    """`please` was always harmless, `paris` never: they speak for and against, in other prompts too; a new word says nothing."""
    word_odds = WordOdds()

    def seen(asked: str, known: str) -> Any:
        some = [near(0.9, known, b"g")]
        return features_of(asked, some, candidates(some)[0], WordCounts(), word_odds, False)

    for place in range(20):
        word_odds.learn(seen(f"task{place} kindly", f"task{place}"), True)
        word_odds.learn(seen(f"task{place} paris", f"task{place}"), False)
    of = {word: seen(f"hotel {word}", "hotel")[FEATURES.index("worst told")] for word in ("kindly", "paris", "unheard")}
    assert of["paris"] < -1 < of["unheard"] == 0.0 < 0.5 < of["kindly"]


def test_the_witness_of_a_group_is_a_key_that_no_veto_stops() -> None:
    """The nearest key of the group has another number; the next of the same answer has the same."""
    some = [near(0.95, "wake me at 8", b"g"), near(0.90, "get me up at 7", b"g")]
    state = sure_state("wake me at 7", some[1])
    decision, _ = VerifiedRule(PRIOR).decide(query("wake me at 7"), some, state)
    assert decision.served == 1


@given(st.lists(st.text(), max_size=10))
def test_words_that_went_leave_no_trace(texts: list[str]) -> None:
    """Adding and removing the same texts leaves the counts as they were."""
    words = WordCounts()
    for sign in (1, -1):
        for text in texts:
            words.add(text, sign)
    assert words == WordCounts()


def prior() -> Prior:
    count = len(FEATURES)
    return Prior(np.zeros(count), np.ones(count), np.zeros(count + 1), np.full(count + 1, 1e-3))


def row_of(features: Any, served: int = 0, risked: float = 0.0) -> Any:
    """As a row has it: features, words, and what was served since the row before."""
    return np.concatenate([features[: len(FEATURES)], np.zeros(ONE_SIDED_MAX), (served, risked)])


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
    model = CalibratedModel(prior())
    for row in rows(3_000, 1):
        model.learn(row)
    fresh = rows(4_000, 2)
    for error_max in (0.005, 0.01, 0.05):
        served = served_of(model, fresh, error_max)
        assert len(served) > 200
        assert sum(not row.is_right for row in served) <= error_max * len(fresh)
        assert model.threshold(error_max) >= model.threshold(2 * error_max)


def sampled(all_rows: list[Row], share: float, equal: float, seed: int) -> list[Row]:
    """As a gateway has them whose free judge finds a share `equal` of right answers, and asks a model about `share` of the rest."""
    rng = np.random.default_rng(seed)
    made = []
    for row in all_rows:
        is_free, is_asked = bool(row.is_right) and rng.random() < equal, rng.random() < share
        unasked = replace(row, is_right=None, judge_chance=0.0)
        made.append(row if is_free else replace(row, judge_chance=share) if is_asked else unasked)
    return made


def served_of(model: CalibratedModel, fresh: list[Row], error_max: float = 0.01) -> list[Row]:
    return [row for row in fresh if model.logistic.p(row.features) >= model.threshold(error_max)]


@pytest.mark.parametrize("share", [0.1, 0.25])
def test_a_judge_that_is_asked_about_a_share_speaks_for_the_rest(share: float) -> None:
    """Equality can only say `same`: alone it would make everything likelier. The sample corrects it, within the bound."""
    model, fresh = CalibratedModel(prior()), rows(4_000, 2)
    for row in sampled(rows(4_000, 1), share, 0.3, 5):
        model.learn(row)
    served = served_of(model, fresh)
    assert len(served) > 200
    assert sum(not row.is_right for row in served) <= 0.01 * len(fresh)


@pytest.mark.parametrize("share", [0.0, 0.002])
def test_what_hardly_any_verdict_speaks_for_counts_as_wrong(share: float) -> None:
    """With next to nothing asked, what equality found does not make the rest likelier."""
    model = CalibratedModel(prior())
    for row in sampled(rows(3_000, 1), share, 0.3, 5):
        model.learn(row)
    assert model.is_fitted
    assert served_of(model, rows(2_000, 2)) == []


def test_the_label_of_a_judge_that_errs_has_the_true_one_as_its_mean() -> None:
    """Over its errors at the rates that it is known for; a judge of which nothing is known is taken at its word."""
    (one,) = rows(1, 1)
    different, same = 0.03, 0.01

    def label(is_right: bool | None, flips: tuple[float, float] = (different, same)) -> float:
        return Row(one.trial, is_right, 1.0, flips).label

    assert (1 - different) * label(True) + different * label(False) == pytest.approx(1.0)
    assert same * label(True) + (1 - same) * label(False) == pytest.approx(0.0)
    assert [label(is_right, (0.0, 0.0)) for is_right in (True, False, None)] == [1.0, 0.0, 0.0]


WORDS = (7, 8, 9)


def with_word(trial: Trial, word: int) -> Trial:
    """The trial where one prompt has this word."""
    features = np.frombuffer(trial.features, "<f4").copy()
    features[len(FEATURES)] = word
    return msgspec.structs.replace(trial, features=features.tobytes())


def test_a_late_verdict_takes_the_place_of_what_no_judge_could_tell() -> None:
    """A model that had to wait for verdicts ends as one that had them at once; a late one without its row is one more."""
    timely, late = LearnedModel(prior()), LearnedModel(prior())
    made = [compared(row_of(one.features, 1), one.is_right, 1.0, 0.8) for one in rows(300, 1, 0.2)]
    made = [replace(row, trial=with_word(row.trial, WORDS[place % 3])) for place, row in enumerate(made)]
    for row in made:
        timely.learn(row)
        late.learn(replace(row, is_right=None))
    unsure = [late.certain.logistic.p(row.features) for row in made]
    assert max(unsure) < 0.5
    for row in reversed(made):
        late.learn(replace(row, is_late=True))
    assert late.certain.kappa == pytest.approx(timely.certain.kappa)
    assert [late.certain.threshold(0.01), timely.certain.threshold(0.01)] == pytest.approx([0.95, 0.95], abs=0.05)
    assert [late.word_odds.log_odds(word) for word in WORDS] == pytest.approx(
        [timely.word_odds.log_odds(word) for word in WORDS]
    )
    for model in (late, timely):
        model.certain._refit(model.certain._rows, 1.0)
    for row in made[:50]:
        assert late.certain.logistic.p(row.features) == pytest.approx(timely.certain.logistic.p(row.features), abs=1e-4)
    late.learn(replace(made[0], is_late=True))
    timely.learn(made[0])
    assert late.certain.kappa == pytest.approx(timely.certain.kappa)


def test_a_judge_that_costs_is_asked_less_as_verdicts_come() -> None:
    """Always a known share above nothing, so that what was asked can speak for what was not; the unlikely ones less."""
    for p in (0.01, 0.5, 0.9, 0.99):
        assert asking_share(p, 0) == 1.0
        assert 0.05 <= asking_share(p, 5_000) <= asking_share(p, 1_000) <= 1.0
    assert asking_share(0.1, 5_000) < asking_share(0.9, 5_000)


def test_answers_that_are_never_right_are_never_served() -> None:
    """Nothing reaches the threshold, at any bound."""
    model = CalibratedModel(prior())
    for row in rows(500, 3):
        model.learn(compared(row.features, False, 1.0, 0.5))
    assert not any(model.logistic.p(row.features) >= model.threshold(0.01) for row in rows(500, 4))


def test_surprises_among_the_sure_raise_the_expected_errors() -> None:
    """Verdicts against a p of 0.95 make every p count for more errors; verdicts that bear it out earn no credit."""
    models = [CalibratedModel(prior()), CalibratedModel(prior())]
    for place, model in enumerate(models):
        for row in rows(200, 5):
            model.learn(compared(row.features, place == 0, 0.2, 0.95))
    assert models[0].kappa == 1 < models[1].kappa


def test_a_fit_may_run_later_and_comes_out_the_same() -> None:
    """What is decided meanwhile is decided by the model before."""
    waiting: list[Callable[[], object]] = []
    late, prompt = CalibratedModel(prior(), waiting.append), CalibratedModel(prior())
    made = rows(300, 1)
    for row in made:
        late.learn(row)
        prompt.learn(row)
    assert not late.is_fitted
    for work in waiting:
        work()
    assert late.threshold(0.01) == prompt.threshold(0.01)
    assert [late.logistic.p(row.features) for row in made] == [prompt.logistic.p(row.features) for row in made]


def test_what_was_left_of_the_budget_is_spent_and_what_was_overspent_is_saved() -> None:
    """Rows tell how much was served before them at which risk: none at all lowers the threshold, too much raises it."""
    models = [CalibratedModel(prior()) for _ in range(3)]
    for model, risk in zip(models, (0.0, 0.01, 0.05), strict=True):
        for row in rows(1_000, 1):
            model.learn(compared(row_of(row.features, 1, 2 * risk), row.is_right, 1.0, 0.5))
    frugal, even, lavish = (model.threshold(0.01) for model in models)
    assert frugal < even < lavish


def decide(
    text: str, known: Sequence[Neighbour], state: NamespaceState, error_max: float | None = None
) -> MissReason | None:
    decision, _ = VerifiedRule(PRIOR).decide(query(text, error_max=error_max), known, state)
    return None if decision.served is not None else decision.reasons[0]


def test_cold_it_serves_a_paraphrase_with_one_entry_there() -> None:
    """What the fixed rule would; names, polarity and numbers are still guarded."""
    one = [near(0.9, "tell me the capital of France", b"g")]
    assert decide(CAPITAL, one, NamespaceState()) is None
    assert decide("What is the capital of Italy?", one, NamespaceState()) is MissReason.NAMES
    assert decide("What is not the capital of France?", one, NamespaceState()) is MissReason.POLARITY
    assert decide(CAPITAL, one, NamespaceState(), error_max=0.0001) is not None


def sure_state(asked: str, known: Neighbour) -> NamespaceState:
    """A namespace where every verdict on such a pair said right."""
    state = NamespaceState(model=LearnedModel(PRIOR))
    assert state.model is not None
    seen = features_of(asked, [known], candidates([known])[0], WordCounts(), None, False)
    for _ in range(400):
        state.model.learn(compared(row_of(seen), True, 1.0, 0.9))
    return state


@pytest.mark.parametrize(
    ("asked", "known", "reason"),
    [
        ("open the box", "open a box", None),
        ("open 3 boxes", "open 4 boxes", MissReason.NUMBERS),
        ("open box AB31 of it", "open box AB30 of it", MissReason.NAMES),
        ("open https://a.example/7", "open https://a.example/8", MissReason.NAMES),
        ("open the box", "do not open the box", MissReason.POLARITY),
        ("open the box today", "open the box of today", MissReason.TIME),
        ("move it from the box to the crate", "move it from the crate to the box", MissReason.DIRECTION),
        ("translate schon to English", "translate schön to English", MissReason.WORDS),
        ("translate papá for me", "translate papa for me", MissReason.WORDS),
    ],
)
def test_no_verdict_crosses_a_veto(asked: str, known: str, reason: MissReason | None) -> None:
    """Four hundred right ones: other small words are served; another number, code, accent, a negation, the other direction or
    an old answer about now are not."""
    one = Neighbour(0.99, known, b"e", 10_000.0, b"g")
    assert decide(asked, [one], sure_state(asked, one)) is reason


def test_a_drift_leaves_it_to_the_cold_rule() -> None:
    """Whatever was learned before; what the cold rule would serve without a verdict is served."""
    learned, plain = (Neighbour(0.99, known, b"e", 0.0, b"g") for known in ("open the crate", "open the box please"))
    vouching = near(0.98, "take the box", b"g")
    for known, reason in ((learned, MissReason.UNSURE), (plain, None)):
        state = sure_state("open the box", known)
        for untightened, expected in ((None, None), (0.01, reason)):
            asked = msgspec.structs.replace(query("open the box", error_max=0.01), untightened=untightened)
            decision, _ = VerifiedRule(PRIOR).decide(asked, [known, vouching], state)
            assert (None if decision.served is not None else decision.reasons[0]) is expected


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


def test_what_no_judge_can_tell_makes_nothing_likelier() -> None:
    """Without the comparisons that it left open, a judge that can only say "same" would teach that all is the same: with them no hit
    is served but those of a cache without verdicts, though each answer comes in three wordings."""
    clock, draw = Clock(), random.Random(3)
    caches = [SemanticCache(BagEmbedder(), VerifiedRule(PRIOR), clock) for _ in range(2)]
    answers: dict[bytes, tuple[int, int]] = {}
    told, comparisons = 0, Comparisons()
    for number, (text, intent) in enumerate(requests(400, 7)):
        asked, exact = query(text), number.to_bytes(16, "big")
        learned, cold = (cache.lookup([asked])[0] for cache in caches)
        is_cold = isinstance(cold, Hit) or cold.reason is MissReason.COLD
        assert is_cold or not isinstance(learned, Hit)
        answers[exact] = intent, draw.randrange(3)
        added = comparisons.add(PromptAdded(ACME, exact, asked.compat, text, clock.now, clock.now + 1e6))
        for cache in caches:
            cache.fold([added])

        def is_same(other: bytes, own: tuple[int, int] = answers[exact]) -> bool | None:
            return True if answers[other] == own else None

        if isinstance(learned, Miss):
            judged = comparisons.compare(asked, learned, exact, is_same)
            told += judged is not None and judged.verdict.is_right is True
            caches[0].fold([judged] if judged is not None else [])
    assert told > 60


def test_verdicts_that_are_left_open_are_read_as_wrong_by_the_one_model_and_not_at_all_by_the_other() -> None:
    """Until the first of them there is one model; then the cold rule may serve what the verdicts are not against, unless the judges
    can call most answers different."""
    model = LearnedModel(prior())
    made = rows(300, 1)
    for row in made:
        model.learn(row)
    right = next(row.features for row in made if row.is_right and model.certain.logistic.p(row.features) > 0.95)
    assert not model.allows_cold(right, 0.01, 0.0)
    for row in rows(300, 2):
        model.learn(compared(row.features, None if row.is_right else False, 1.0, 0.5))
    assert model.certain.logistic.p(right) < 0.8
    assert model.allows_cold(right, 0.01, 0.1)
    assert not model.allows_cold(right, 0.01, 0.9)
    wrong = next(row.features for row in made if not row.is_right)
    assert not model.allows_cold(wrong, 0.01, 0.1)


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


def test_would_be_hits_are_counted() -> None:
    """Each hit says how many the namespace had before, by which the gateway checks them; a look counts for nothing."""
    clock = Clock()
    cache = SemanticCache(FakeEmbedder(is_constant=True), VerifiedRule(PRIOR, error_max=0.3), clock)
    fp, asked = ask("open the box please"), "please open the box"
    cache.fold([PromptAdded(ACME, fp.exact, fp.compat, "open the box please", clock.now, clock.now + 1e6)])
    cache.near([msgspec.structs.replace(query(asked), is_try=True)] * 5, 4)
    hits = [cache.lookup([query(asked)])[0].trial for _ in range(4)]
    assert [(trial.hits, trial.chance) for trial in hits if trial is not None] == [(at, 1.0) for at in range(4)]


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


def test_hits_without_verdicts_have_a_share_of_the_requests() -> None:
    """Twenty at first, then one for each 25 requests at a bound of 1%, half as many at 0.5%: were a quarter of them wrong, the bound
    would hold all the same."""
    for error_max, share in ((0.01, 1 / 25), (0.005, 1 / 50)):
        state = NamespaceState()
        one, served = [near(0.99, "tell me the capital of France", b"g")], 0
        for _ in range(1_000):
            decision, state.counters = VerifiedRule(PRIOR).decide(query(CAPITAL, error_max=error_max), one, state)
            assert decision.served is not None or decision.reasons == (MissReason.COLD,)
            served += decision.served is not None
        assert served == pytest.approx(20 + share * 1_000, abs=2)


def test_a_hit_of_the_cold_rule_spends_what_its_namespace_learned_and_a_quarter_at_most() -> None:
    """Not what the prior expects of it; the quarter is what its share of the requests allows for."""
    one, spent = [near(0.99, "tell me the capital of France", b"g")], []
    for intercept in (0.0, 2.0):
        learned = LearnedModel(replace(prior(), coefficients=np.append(np.zeros(len(FEATURES)), intercept)))
        decision, counters = VerifiedRule(prior()).decide(query(CAPITAL), one, NamespaceState(model=learned))
        assert decision.trial is not None
        assert decision.trial.is_cold
        spent.append((counters.risked, 1 - decision.trial.p))
    assert spent[0][0] == COLD_WRONG < spent[0][1]
    assert spent[1][0] == pytest.approx(spent[1][1])
    assert spent[1][1] < COLD_WRONG


class Told:
    """A partition with namespaces that learn what rows tell."""

    def __init__(self) -> None:
        self.states = NamespaceStates(VerifiedRule(prior()), b"rule")

    def learn(self, partition: Partition, compat: bytes, rows: Sequence[Row], alias: str = "") -> NamespaceState:
        for row in rows:
            verdict = Verdict(
                source=Source.MISS, compat=compat, is_right=row.is_right, trial=row.trial, at=0.0, alias=alias
            )
            kept = Verdict.decode(verdict.encode())
            self.states.learn(AnswerJudged(partition, kept, row.group, None))
        return self.states.of(partition + compat)

    @staticmethod
    def p_of_right(state: NamespaceState) -> float:
        """The mean p of further rows that are right."""
        assert state.model is not None
        return float(np.mean([state.model.certain.logistic.p(row.features) for row in rows(50, 6) if row.is_right]))


def test_a_namespace_starts_from_what_others_of_its_partition_learned_and_never_from_another_partition() -> None:
    """The same forty verdicts: after a namespace that learned the opposite, beside it in the partition or in another one."""
    first, few = rows(600, 1), rows(41, 5)
    opposite = [compared(row.features, not row.is_right, 1.0, 0.5) for row in first]
    p = []
    for partition, before in ((ACME, first), (ACME, opposite), (OTHER, opposite), (OTHER, [])):
        told = Told()
        told.learn(partition, b"a" * 16, before)
        p.append(told.p_of_right(told.learn(ACME, b"b" * 16, few)))
    alike, unlike, apart, alone = p
    assert alike > alone > unlike
    assert apart == alone


def test_a_namespace_starts_from_its_alias_then_from_its_partition_and_a_rebuild_agrees() -> None:
    """Forty verdicts of three aliases: one that learned the opposite before, one that learned the same, one without any."""
    told = Told()
    first, few = rows(600, 1), rows(41, 5)
    opposite = [compared(row.features, not row.is_right, 1.0, 0.5) for row in first]
    for again in range(2):
        for compat, alias, before in ((b"a", "small", opposite), (b"b", "large", first)):
            told.learn(ACME, compat * 16, before, alias)
        unlike, alike, apart = (
            told.p_of_right(told.learn(ACME, alias[:1].encode() * 16, few, alias))
            for alias in ("small", "large", "third")
        )
        assert alike > apart > unlike, again
        told.states.clear()


def test_other_granularity_in_another_namespace_does_not_break_the_bound() -> None:
    """There all of a kind are right, here a half of them: the threshold is this namespace's own."""
    told = Told()
    told.learn(ACME, b"a" * 16, rows(600, 1))
    model: Any = None
    served = wrong = 0
    fine = [compared(row.features, bool(row.is_right and row.features[1] > 0), 1.0, 0.5) for row in rows(1_500, 2)]
    for row in fine:
        state = told.states.of(ACME + b"b" * 16)
        model = state.model
        if model is not None and model.certain.is_fitted:
            p = model.certain.logistic.p(row.features)
            if p >= model.certain.threshold(0.05):
                served += 1
                wrong += not row.is_right
        told.learn(ACME, b"b" * 16, [row])
    assert served > 50
    assert wrong <= 0.05 * len(fine)


def test_a_learned_namespace_stops_hits_of_a_cold_one_beside_it_and_makes_none() -> None:
    """Verdicts against such answers count in a namespace that has none of its own."""
    one = [near(0.99, "tell me the capital of France", b"g")]
    seen = features_of(CAPITAL, one, candidates(one)[0], WordCounts(), None, True)
    far = [near(0.6, "name the seat of the french government", b"g")]
    for is_right, reason in ((True, None), (False, MissReason.UNSURE)):
        told = Told()
        told.learn(ACME, b"a" * 16, [compared(row_of(seen), is_right, 1.0, 0.5) for _ in range(400)])
        state = told.states.of(ACME + b"b" * 16)
        assert decide(CAPITAL, one, state) is reason
        assert decide(CAPITAL, far, state) is not None


def test_a_rebuild_of_many_namespaces_comes_to_the_same_models() -> None:
    """Whatever was learned before: verdicts are forgotten and folded again; the models kept for others are bounded."""
    told = Told()
    made = [(bytes([place]) * 16, rows(401, place)) for place in range(10)]

    def all_p() -> list[float]:
        found = []
        for compat, some in made:
            model = told.learn(ACME, compat, some).model
            assert model is not None
            found.append(model.certain.logistic.p(some[0].features))
        return found

    before = all_p()
    assert len(told.states.of(ACME + b"new").others) == 8
    told.states.clear()
    assert len(told.states.of(ACME + b"new").others) == 0
    assert all_p() == before
