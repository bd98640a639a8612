"""The index against a plain list of vectors."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.encoder.gpu import TorchFlat
from cache.query import Hit
from cache.semantic.cache import SemanticCache
from cache.semantic.index import VectorIndex
from tests.cache.fakes import ACME, OTHER, FakeEmbedder, query
from tests.cache.test_semantic import Yes, added, dropped

DIMS = 8


def unit(seed: int) -> Any:
    """A unit vector that has been through float16, as the store's have."""
    vector = np.random.default_rng(seed).normal(size=DIMS).astype(np.float32)
    return (vector / np.linalg.norm(vector)).astype(np.float16).astype(np.float32)


class Later(list[Callable[[], None]]):
    """Work that is done when the test says so."""

    def __call__(self, work: Callable[[], None]) -> None:
        self.append(work)

    def catch_up(self) -> None:
        while self:
            self.pop(0)()


steps_of = st.lists(
    st.tuples(st.sampled_from("AB"), st.integers(0, 11), st.sampled_from(["add", "add", "remove", "ask", "make"])),
    max_size=80,
)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"flat_max": 4},
        {"mirror": faiss.IndexFlatIP, "mirror_min": 2},
        {"mirror": partial(TorchFlat, device="cpu"), "mirror_min": 2},
    ],
    ids=["flat", "lists", "copied by faiss", "copied by torch"],
)
@given(steps=steps_of, count=st.integers(1, 20))
def test_search_is_exact_whatever_came_and_went(kind: Any, steps: list[tuple[str, int, str]], count: int) -> None:
    """After any adds, removes and searches a search gives a namespace's own nearest, all of them and nothing of others: read whole;
    in lists that were made at any moment in between (few enough that all are probed); and in a copy such as a GPU holds (FAISS' flat
    index stands in for the GPU's: the same methods)."""
    later = Later()
    index = VectorIndex(DIMS, run=later, replayed_max=1, dead_max=2, **kind)
    model: dict[tuple[str, int], Any] = {}
    for name, number, what in steps:
        key = number * 3 + "ABC".index(name)
        if what == "ask":
            index.search(name.encode(), unit(number)[None, :], count)
        elif what == "make":
            later.catch_up()
        elif what == "add" and (name, key) not in model:
            index.add(name.encode(), key, unit(key))
            model[name, key] = unit(key)
        elif what == "remove":
            assert index.remove(name.encode(), key) is (model.pop((name, key), None) is not None)
    assert len(index) == len(model)
    question = unit(999)
    for name in "ABCD":
        mine = {key: float(vector @ question) for (owner, key), vector in model.items() if owner == name}
        (found,) = index.search(name.encode(), question[None, :], count)
        assert found.keys.tolist() == sorted(mine, key=lambda key: -mine[key])[:count]
        assert found.similarities == pytest.approx([mine[key] for key in found.keys.tolist()], abs=1e-5)


def test_lists_are_made_beside_the_work() -> None:
    """While a thread makes them, and makes them again at four times the size and at a quarter of it: every living key is found by its own
    vector, no removed one ever."""
    index = VectorIndex(DIMS, flat_max=250)
    chance = random.Random(0)
    living: dict[int, Any] = {}
    made = set()
    for key in range(3_000):
        living[key] = unit(key)
        index.add(b"A", key, living[key])
        if key % 3 == 0:
            gone = chance.choice(list(living)[:50])
            assert index.remove(b"A", gone)
            del living[gone]
        if key % 5 == 0 and living:
            asked = chance.choice(list(living)[-50:])
            (found,) = index.search(b"A", living[asked][None, :], 10)
            assert found.keys[0] == asked
            assert living.keys() >= set(found.keys.tolist())
        made.add(index.lists(b"A"))
    wait_until_settled(index)
    assert 1 in made
    assert len(made | {index.lists(b"A")}) >= 3
    before = index.lists(b"A")
    for key in list(living)[:-150]:
        assert index.remove(b"A", key)
        del living[key]
    wait_until_settled(index)
    assert index.lists(b"A") < before
    for key, vector in living.items():
        assert index.search(b"A", vector[None, :], 1)[0].keys.tolist() == [key]
    assert len(index) == len(living) == 150


def test_lists_miss_little() -> None:
    """Of the neighbours above a cosine of 0.8, in texts that come in groups, at least 99% are found."""
    dims, inner, groups, each = 64, 12, 1_000, 12
    chance = np.random.default_rng(0)
    centres = np.repeat(chance.normal(size=(groups, inner)), each, axis=0)  # texts fill few of the dimensions
    vectors = (centres + 0.4 * chance.normal(size=centres.shape)) @ chance.normal(size=(inner, dims))
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float16).astype(np.float32)
    index = VectorIndex(dims, flat_max=2_000)
    for key, vector in enumerate(vectors):
        index.add(b"A", key, vector)
    wait_until_settled(index)
    assert index.lists(b"A") > 100
    questions = vectors[:: each * 4] + 0.2 / 8 * chance.normal(size=(groups // 4, dims))
    questions = questions.astype(np.float32)
    questions /= np.linalg.norm(questions, axis=1, keepdims=True)
    near = found = 0
    for similarities, one in zip(questions @ vectors.T, index.search(b"A", questions, 16), strict=True):
        true = {int(key) for key in np.argsort(-similarities)[:16] if similarities[key] > 0.8}
        near, found = near + len(true), found + len(true & set(one.keys.tolist()))
    assert near > 500
    assert found / near > 0.99


def test_lists_that_can_not_be_made_leave_the_old_ones(caplog: pytest.LogCaptureFixture) -> None:
    """It is said, what came meanwhile is there, and the next growth tries again."""
    later = Later()
    index = VectorIndex(DIMS, flat_max=16, run=later)
    for key in range(20):
        index.add(b"A", key, unit(key))
    with mock.patch.object(VectorIndex, "train", side_effect=MemoryError("none left")):
        later.catch_up()
    assert "could not be made" in caplog.text
    assert index.is_settled
    assert index.search(b"A", unit(19)[None, :], 1)[0].keys.tolist() == [19]
    for key in range(20, 100):
        index.add(b"A", key, unit(key))
    assert not index.is_settled
    later.catch_up()
    assert index.lists(b"A") > 1
    assert index.search(b"A", unit(19)[None, :], 1)[0].keys.tolist() == [19]


records_of = st.lists(st.tuples(st.integers(0, 13), st.booleans(), st.sampled_from([ACME, OTHER])), max_size=50)


@given(records_of)
def test_lists_decide_as_reading_everything_does(plan: list[tuple[int, bool, Any]]) -> None:
    """As far as the probed lists reach, here all of them: the same hits and misses with the same neighbours."""
    now = 1_800_000_000.0
    small = VectorIndex(16, flat_max=4, run=lambda work: work())
    caches = [SemanticCache(FakeEmbedder(), clock=lambda: now, index=index) for index in (None, small)]
    for number, is_added, tenant in plan:
        record = added(f"text {number} of ten", now, tenant) if is_added else dropped(f"text {number} of ten", tenant)
        for one in caches:
            one.fold([record])
            one.lookup([query("text 3", tenant)])
    questions = [query(f"TEXT {number} ten", tenant) for number in range(10) for tenant in (ACME, OTHER)]
    assert caches[0].near(questions, 16) == caches[1].near(questions, 16)


def test_lists_do_not_cross_a_partition_or_a_compat() -> None:
    """With all vectors equal and a rule that always says yes."""
    index = VectorIndex(16, flat_max=4, run=lambda work: work())
    cache = SemanticCache(FakeEmbedder(is_constant=True), Yes(), index=index, clock=lambda: 0.0)
    for tenant in (ACME, OTHER):
        for seed in range(2):
            cache.fold([added(f"{tenant.hex()} {seed} {number}", 0.0, tenant, seed=seed) for number in range(12)])
    for tenant in (ACME, OTHER):
        for seed in range(2):
            (near,) = cache.near([query("something else", tenant, seed=seed)], 50)
            assert isinstance(near.decision, Hit)
            assert {one.text for one in near.neighbours} == {f"{tenant.hex()} {seed} {number}" for number in range(12)}
    (none,) = cache.near([query("something else", seed=2)], 50)
    assert none.neighbours == ()


def test_memory_is_counted_and_given_back() -> None:
    """Bytes grow with the vectors and are zero when all are gone."""
    index = VectorIndex(384)
    vector = np.full(384, 384**-0.5, dtype=np.float32)
    for key in range(1_000):
        index.add(b"A", key, vector)
    assert 1_000 * 384 * 2 <= index.size_bytes <= 1_200 * 384 * 2
    for key in range(1_000):
        index.remove(b"A", key)
    assert (len(index), index.size_bytes) == (0, 0)


def test_many_queries_at_once_are_answered_in_order() -> None:
    """A batch gives what one by one gives."""
    index = VectorIndex(DIMS)
    for key in range(50):
        index.add(b"A", key, unit(key))
    questions = np.stack([unit(seed) for seed in range(100, 140)])
    for question, found in zip(questions, index.search(b"A", questions, 5), strict=True):
        assert found.keys.tolist() == index.search(b"A", question[None, :], 5)[0].keys.tolist()


def test_a_vector_of_another_shape_is_refused() -> None:
    """Before anything is changed."""
    index = VectorIndex(DIMS)
    with pytest.raises(ValueError, match="dimensions"):
        index.add(b"A", 2, np.zeros(3, np.float32))
    assert len(index) == 0


def wait_until_settled(index: VectorIndex) -> None:
    """The test's own time-out ends a wait that does not."""
    while not index.is_settled:
        index.search(b"A", unit(0)[None, :], 1) if index.dims == DIMS else None
