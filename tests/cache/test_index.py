"""The index against a plain list of vectors."""

from __future__ import annotations

from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.index import VectorIndex

DIMS = 8


def unit(seed: int) -> Any:
    vector = np.random.default_rng(seed).normal(size=DIMS).astype(np.float32)
    return vector / np.linalg.norm(vector)


steps_of = st.lists(
    st.tuples(st.sampled_from("AB"), st.integers(0, 7), st.sampled_from(["add", "remove", "ask"])), max_size=80
)


@pytest.mark.parametrize("mirror", [None, faiss.IndexFlatIP])
@settings(deadline=None)
@given(steps=steps_of, count=st.integers(1, 20))
def test_search_is_exact_whatever_came_and_went(mirror: Any, steps: list[tuple[str, int, str]], count: int) -> None:
    """After any adds, removes and searches a search gives a namespace's own nearest, all of them and nothing of others; where it
    is, and in a copy such as a GPU holds (FAISS' flat index stands in for the GPU's: the same methods)."""
    index = VectorIndex(DIMS, mirror, mirror_rows_min=2)
    model: dict[tuple[str, int], Any] = {}
    for name, number, what in steps:
        key = number * 3 + "ABC".index(name)
        if what == "ask":
            index.search(name.encode(), unit(number)[None, :], count)
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


def test_memory_is_counted_and_given_back() -> None:
    """Bytes grow with the rows and are zero when all are gone."""
    index = VectorIndex(DIMS)
    for key in range(1000):
        index.add(b"A", key, unit(key))
    assert 1000 * DIMS * 4 <= index.size_bytes <= 3000 * DIMS * 4
    for key in range(990):
        index.remove(b"A", key)
    assert index.size_bytes <= 64 * DIMS * 4
    for key in range(990, 1000):
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


def test_a_wrong_add_is_refused() -> None:
    """Twice the same key, or another shape."""
    index = VectorIndex(DIMS)
    index.add(b"A", 1, unit(1))
    with pytest.raises(ValueError, match="already"):
        index.add(b"A", 1, unit(2))
    with pytest.raises(ValueError, match="dimensions"):
        index.add(b"A", 2, np.zeros(3, np.float32))
