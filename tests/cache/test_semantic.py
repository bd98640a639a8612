"""The semantic cache inline, with a stand-in for the encoder: what may be found, and from which log."""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Hit, Miss, MissReason, Partition, Query, Trial
from cache.decision.features import Neighbour
from cache.decision.model import LearnedModel, Row
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState
from cache.events import EntriesDropped
from cache.semantic.cache import PromptAdded, Record, SemanticCache
from cache.verdicts.records import AnswerJudged, Source, Verdict, answer_name
from tests.cache.fakes import ACME, OTHER, Clock, FakeEmbedder, ask, query


class Yes:
    """Serves the nearest, whatever it is."""

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        return Decision(0, (None,) * len(neighbours)), state.counters

    def learn(self, row: Row, model: LearnedModel | None) -> LearnedModel | None:
        """It does not."""
        return model


def added(text: str, now: float, tenant: Partition = ACME, ttl_s: float = 60.0, **fields: Any) -> PromptAdded:
    fp = ask(text, tenant, **fields)
    return PromptAdded(tenant, fp.exact, fp.compat, text, now, now + ttl_s)


def dropped(text: str, tenant: Partition = ACME, **fields: Any) -> EntriesDropped:
    return EntriesDropped(tenant, (ask(text, tenant, **fields).exact,))


@pytest.fixture
def clock() -> Clock:
    return Clock()


def one(cache: SemanticCache, asked: Query) -> Hit | Miss:
    """The answer, without what a judge would need."""
    (answer,) = cache.lookup([asked])
    return msgspec.structs.replace(answer, trial=None)


def test_a_paraphrase_hits_and_says_what_it_hit(clock: Clock) -> None:
    """The hit names the entry, its text and the similarity."""
    cache = SemanticCache(FakeEmbedder(), clock=clock)
    cache.fold([added("what is the capital of france", clock.now)])
    hit = one(cache, query("What is the capital of France"))
    assert hit == Hit(
        ask("what is the capital of france").exact, pytest.approx(1.0, abs=1e-3), "what is the capital of france"
    )


def test_a_miss_names_the_nearest(clock: Clock) -> None:
    """With its similarity and why it was not served."""
    cache = SemanticCache(FakeEmbedder(is_constant=True), clock=clock)
    cache.fold([added("the capital of France", clock.now)])
    miss = one(cache, query("the capital of Spain"))
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.WORDS
    assert miss.nearest is not None
    assert (miss.nearest.text, miss.nearest.reason) == ("the capital of France", MissReason.WORDS)
    assert one(cache, query("anything", OTHER)) == Miss(MissReason.EMPTY)


namespaces = st.tuples(st.sampled_from([ACME, OTHER]), st.sampled_from([0, 1, 2]))


@given(st.lists(st.tuples(namespaces, st.integers(0, 5)), max_size=30), st.lists(namespaces, min_size=1, max_size=8))
def test_nothing_crosses_a_partition_or_a_compat(
    stored: list[tuple[tuple[Partition, int], int]], asked: list[tuple[Partition, int]]
) -> None:
    """With all vectors equal and a rule that always says yes: every answer, and every neighbour shown, is of the same partition
    and compat; and one is found wherever there is one."""
    clock = Clock()
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), clock)
    owners: dict[bytes, tuple[Partition, int]] = {}
    for (tenant, seed), number in stored:
        record = added(f"text {number}", clock.now, tenant, seed=seed)
        owners[record.exact] = (tenant, seed)
        cache.fold([record])
    queries = [query("something else", tenant, seed=seed) for tenant, seed in asked]
    for place, answer in enumerate(cache.near(queries, 50)):
        tenant, seed = asked[place]
        expected = {exact for exact, owner in owners.items() if owner == (tenant, seed)}
        assert {near.exact for near in answer.neighbours} == expected
        if expected:
            assert isinstance(answer.decision, Hit)
            assert answer.decision.exact in expected
        else:
            assert answer.decision == Miss(MissReason.EMPTY)


def test_an_equal_compat_does_not_join_two_partitions(clock: Clock) -> None:
    """Both are compared, though a compat of this software never repeats across partitions."""
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), clock)
    compat = bytes(16)
    cache.fold([PromptAdded(ACME, b"a" * 16, compat, "text", clock.now, clock.now + 60)])
    assert one(cache, Query(OTHER, compat, "text")) == Miss(MissReason.EMPTY)
    assert isinstance(one(cache, Query(ACME, compat, "text")), Hit)


def work_of(cache: SemanticCache, asked: Query) -> set[str]:
    """The functions that one lookup runs: what it costs, without a clock."""
    run: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            run.add(frame.f_code.co_qualname)

    gc.disable()  # a collection in between calls functions of its own
    sys.setprofile(note)
    try:
        cache.lookup([asked])
    finally:
        sys.setprofile(None)
        gc.enable()
    return run


def test_what_another_partition_asked_costs_as_much_as_what_none_did(clock: Clock) -> None:
    """A text that others stored, asked or had embedded takes a pass of the encoder and all of the reading; one's own takes
    neither."""
    embedder = FakeEmbedder(is_constant=True)
    cache = SemanticCache(embedder, clock=clock)
    cache.fold([added("where is the blue kingfisher", clock.now, tenant) for tenant in (ACME, OTHER)])
    for tenant in (ACME, OTHER):
        for word in ("uqzt", "vqzt"):  # what a first time takes, and all words but one
            one(cache, query(f"how {word} is the winter stove", tenant))
    stored, asked, sent, unheard = (f"how {word} is the winter stove" for word in ("wqzt", "xqzt", "yqzt", "zqzt"))
    cache.fold([added(stored, clock.now, OTHER)])
    for text in (stored, asked):
        one(cache, query(text, OTHER))
    cache.embed([sent])
    costs = {}
    for text in (unheard, stored, asked, sent):
        embedder.encoded.clear()
        costs[text] = work_of(cache, query(text))
        assert embedder.encoded == [text]
    assert costs[stored] == costs[asked] == costs[sent] == costs[unheard]
    embedder.encoded.clear()
    spared = costs[unheard] - work_of(cache, query(unheard))
    assert {"FakeEmbedder.encode", "words_of", "_core", "marks_of"} <= spared
    assert embedder.encoded == []


def test_what_is_embedded_for_callers_leaves_no_trace(clock: Clock) -> None:
    """The same text takes another pass each time: the time of an answer says nothing of the askers before."""
    embedder = FakeEmbedder()
    cache = SemanticCache(embedder, clock=clock)
    for _ in range(2):
        cache.embed(["a secret", "a secret"])
    assert embedder.encoded == ["a secret"] * 4


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9), st.integers(1, 50)),
        st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("wait"), st.integers(1, 30), st.just(0)),
        st.tuples(st.just("ask"), st.integers(0, 9), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=200)
@given(steps)
def test_dropped_and_expired_entries_are_never_found(plan: list[tuple[str, int, int]]) -> None:
    """At every moment a text is found iff it was added, not dropped since, and has not expired. A hit does not prolong it."""
    clock = Clock()
    cache = SemanticCache(FakeEmbedder(), Yes(), clock)
    expiries: dict[str, float] = {}
    for what, number, ttl_s in plan:
        text = f"text {number}"
        if what == "add":
            cache.fold([added(text, clock.now, ttl_s=ttl_s)])
            expiries[text] = clock.now + ttl_s
        elif what == "drop":
            cache.fold([dropped(text)])
            expiries.pop(text, None)
        elif what == "wait":
            clock.now += number
        living = {one for one, expiry in expiries.items() if expiry > clock.now}
        (near,) = cache.near([query(text)], 50)
        assert {one.text for one in near.neighbours} == living
        assert len(cache) == len(living)
        assert cache.namespaces == (1 if living else 0)


@settings(max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(0, 1)), max_size=40), st.integers(4, 40))
def test_how_records_are_folded_does_not_matter(plan: list[tuple[bool, int, int]], cut: int) -> None:
    """One by one with lookups in between, or the survivors at once as a rebuild does, with the vectors the first one saved: the
    same answers to everything."""
    clock = Clock()
    records: list[Record] = [
        added(f"text {number} of ten", clock.now, seed=seed) if is_add else dropped(f"text {number} of ten", seed=seed)
        for is_add, number, seed in plan
    ]
    following = SemanticCache(FakeEmbedder(), clock=clock)
    saved = {}
    for place, record in enumerate(records):
        following.fold([record])
        if place % cut == 0:
            one(following, query("3 of ten TEXT", seed=0))
    while following.settle():
        pass
    for key in following.take_unsaved():
        saved[key.partition, key.exact] = key.vector
    state: dict[bytes, PromptAdded] = {}
    for record in records:
        if isinstance(record, PromptAdded):
            state[record.exact] = record
        elif isinstance(record, EntriesDropped):
            state.pop(record.exacts[0], None)
    rebuilt = SemanticCache(FakeEmbedder(), clock=clock)
    known = [dataclasses.replace(one, vector=saved.get((one.partition, one.exact), b"")) for one in state.values()]
    rebuilt.fold(sorted(known, key=lambda record: record.exact))
    questions = [query(f"{number} of ten TEXT", seed=seed) for number in range(10) for seed in (0, 1)]
    assert rebuilt.near(questions, 16) == following.near(questions, 16)


def test_only_what_is_asked_beside_is_embedded(clock: Clock) -> None:
    """A lone entry costs the encoder nothing until somebody asks in its namespace, and then once."""
    embedder = FakeEmbedder()
    cache = SemanticCache(embedder, clock=clock)
    assert one(cache, query("first")) == Miss(MissReason.EMPTY)
    cache.fold([added("first", clock.now), *(added("follow-up", clock.now, seed=seed) for seed in range(100))])
    assert cache.is_settled
    assert embedder.encoded == []
    one(cache, query("second"))
    assert sorted(embedder.encoded) == ["first", "second"]
    cache.fold([added("second", clock.now)])
    one(cache, query("second"))
    one(cache, query("first"))
    assert len(embedder.encoded) == 2
    assert [key.exact for key in cache.take_unsaved()] == [ask("first").exact, ask("second").exact]


def test_what_was_prepared_is_not_embedded_again(clock: Clock) -> None:
    """A prompt is embedded before what is new is known, once: the lookup that follows sees the new all the same."""
    embedder = FakeEmbedder()
    cache = SemanticCache(embedder, clock=clock)
    cache.prepare([query("anything")])
    assert embedder.encoded == []  # nothing is beside it
    cache.fold([added("the first text", clock.now)])
    cache.prepare([query("The second text")])
    cache.fold([added("the second text", clock.now)])
    hit = one(cache, query("The second text"))
    assert isinstance(hit, Hit)
    assert hit.exact == ask("the second text").exact
    assert embedder.encoded == ["The second text", "the second text", "the first text"]


def test_keys_that_wait_beside_others_are_embedded_in_the_background(clock: Clock) -> None:
    """In small portions, until none is left; a lookup meanwhile sees the newest."""
    embedder = FakeEmbedder()
    cache = SemanticCache(embedder, Yes(), clock)
    cache.fold([added(f"text {number}", clock.now) for number in range(100)])
    assert not cache.is_settled
    assert isinstance(one(cache, query("text 99")), Hit)
    assert len(embedder.encoded) <= 40
    portions = []
    while not cache.is_settled:
        portions.append(cache.settle())
    assert max(portions) == 8
    (near,) = cache.near([query("x")], 200)
    assert len(near.neighbours) == 100
    assert len(embedder.encoded) <= 102


def test_a_prompt_over_the_window_is_not_eligible(clock: Clock) -> None:
    """Neither asked nor stored: nothing is truncated."""
    cache = SemanticCache(FakeEmbedder(is_constant=True, tokens_max=5), Yes(), clock)
    cache.fold([added("short one", clock.now), added("a b c d e f", clock.now)])
    assert one(cache, query("a b c d e f g")) == Miss(MissReason.TOO_LONG)
    (near,) = cache.near([query("a b c d e")], 10)
    assert [neighbour.text for neighbour in near.neighbours] == ["short one"]


def test_a_lookup_beside_a_lone_prompt_over_the_window_is_a_miss(clock: Clock) -> None:
    """The cached prompt turns out too long as it is embedded beside the query, and goes."""
    cache = SemanticCache(FakeEmbedder(is_constant=True, tokens_max=5), Yes(), clock)
    cache.fold([added("a b c d e f g", clock())])
    assert one(cache, query("a b")) == Miss(MissReason.EMPTY)
    assert len(cache) == 0


def test_the_keys_are_bounded(clock: Clock) -> None:
    """The oldest go first."""
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), clock, keys_max=3)
    cache.fold([added(f"text {number}", clock.now) for number in range(5)])
    (near,) = cache.near([query("x")], 10)
    assert {neighbour.text for neighbour in near.neighbours} == {"text 2", "text 3", "text 4"}


def test_an_entry_answered_anew_keeps_its_place_and_gets_its_new_times(clock: Clock) -> None:
    """No second key, no second encoding, the new expiry."""
    embedder = FakeEmbedder()
    cache = SemanticCache(embedder, Yes(), clock)
    cache.fold([added("text", clock.now, ttl_s=10)])
    one(cache, query("text"))
    clock.now += 8
    cache.fold([added("text", clock.now, ttl_s=10)])
    clock.now += 8
    assert isinstance(one(cache, query("text")), Hit)
    assert len(cache) == 1
    assert embedder.encoded == ["text"]
    clock.now += 2
    assert one(cache, query("text")) == Miss(MissReason.EMPTY)


def test_a_rebuild_drops_what_redis_no_longer_has(clock: Clock) -> None:
    """`retain` leaves exactly the entries it was given."""
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), clock)
    cache.fold([added("a", clock.now), added("b", clock.now), added("a", clock.now, OTHER)])
    cache.retain({(ACME, ask("b").exact)})
    assert len(cache) == 1
    assert one(cache, query("a", OTHER)) == Miss(MissReason.EMPTY)


def test_queries_of_one_batch_do_not_mix(clock: Clock) -> None:
    """Each gets its own namespace's answer, in order."""
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), clock)
    cache.fold([added("a", clock.now), added("b", clock.now, OTHER), added("c", clock.now, seed=1)])
    asked = [query("x", OTHER), query("x", seed=2), query("x"), query("y", seed=1), query("x", OTHER)]
    answers = cache.lookup(asked)
    assert [answer.text if isinstance(answer, Hit) else answer.reason for answer in answers] == [
        "b",
        MissReason.EMPTY,
        "a",
        "c",
        "b",
    ]


def yes(wording: bytes, near: bytes = b"") -> AnswerJudged:
    """A verifier's yes to a wording, which came nearest to another one of the same answer."""
    verdict = Verdict(
        source=Source.VERIFIER,
        compat=ask("the box").compat,
        is_right=True,
        trial=Trial((), b"", 0.0, 1.0, b""),
        at=0.0,
        wordings=(wording, near),
    )
    return AnswerJudged(ACME, verdict, answer_name(ask("the box").exact, 0.0), None)


def test_a_wording_finds_its_answer_once_two_yes_say_so(clock: Clock) -> None:
    """One yes alone does not; the hit names the entry that has the answer, and that entry's own prompt."""
    cache = SemanticCache(FakeEmbedder(), Yes(), clock=clock)
    cache.fold([added("the box", clock.now), wording("open the lid now please", clock.now), yes(b"w" * 16)])
    far = one(cache, query("open the lid now please"))
    cache.fold([yes(b"v" * 16, b"w" * 16)])
    near = one(cache, query("open the lid now please"))
    assert isinstance(far, Hit)
    assert isinstance(near, Hit)
    assert (near.exact, near.text) == (ask("the box").exact, "the box")
    assert far.similarity < near.similarity == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("end", ["dropped", "answered anew"])
def test_a_wording_ends_with_the_answer_that_was_verified(clock: Clock, end: str) -> None:
    """What replaces that answer was never compared with the wording."""
    cache = SemanticCache(FakeEmbedder(), Yes(), clock=clock)
    cache.fold([added("the box", clock.now), wording("open the lid now please", clock.now)])
    cache.fold([yes(b"w" * 16), yes(b"v" * 16, b"w" * 16), added("a lid", clock.now)])
    before = one(cache, query("open the lid now please"))
    assert isinstance(before, Hit)
    assert before.similarity == pytest.approx(1.0, abs=1e-3)
    cache.fold([dropped("the box") if end == "dropped" else added("the box", clock.now + 1.0)])
    hit = one(cache, query("open the lid now please"))
    assert isinstance(hit, Hit)
    assert hit.similarity < 0.9


def test_verdicts_and_wordings_may_come_in_any_order(clock: Clock) -> None:
    """A rebuild reads the entries first and the verdicts afterwards; the log has them mixed."""
    entries = [added("the box", clock.now), wording("open the lid now please", clock.now)]
    verdicts = [yes(b"w" * 16), yes(b"v" * 16, b"w" * 16)]
    found = []
    for records in ([*entries, *verdicts], [*verdicts, *reversed(entries)]):
        cache = SemanticCache(FakeEmbedder(), Yes(), clock=clock)
        cache.fold(records)
        found.append(one(cache, query("open the lid now please")))
    assert found[0] == found[1]


def wording(text: str, now: float) -> PromptAdded:
    """A wording of the entry `the box`."""
    return dataclasses.replace(added(text, now), exact=b"w" * 16, of=ask("the box").exact)
