"""The real encoder, and the memory around it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from cache.embedder import Memo, SentenceEmbedder
from cache.semantic import Added, SemanticCache
from tests.cache.fakes import FakeEmbedder


@pytest.fixture(scope="module")
def embedder() -> SentenceEmbedder:
    return SentenceEmbedder(device="cpu")


def test_the_default_loads_offline_and_gives_unit_vectors(embedder: SentenceEmbedder) -> None:
    """all-MiniLM-L6-v2: 384 dimensions, a window of 256 tokens, paraphrases near, strangers far."""
    assert (embedder.info.name, embedder.info.dims, embedder.info.tokens_max) == ("all-MiniLM-L6-v2", 384, 256)
    vectors = embedder.encode(["The capital of France?", "What is France's capital?", "Bake a cake"]).vectors
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] @ vectors[1] > 0.9 > 0.3 > vectors[0] @ vectors[2]


def test_a_text_over_the_window_gets_no_vector(embedder: SentenceEmbedder) -> None:
    """It is counted whole, not truncated; its neighbours in the batch are not disturbed."""
    texts = ["hello", "word " * 254, "word " * 255, "hello"]
    encoded = embedder.encode(texts)
    assert encoded.tokens.tolist() == [3, 256, 257, 3]
    assert [bool(vector.any()) for vector in encoded.vectors] == [True, True, False, True]
    assert np.array_equal(encoded.vectors[0], encoded.vectors[3])


def test_no_texts_give_no_vectors(embedder: SentenceEmbedder) -> None:
    """An empty batch has a shape too."""
    assert Memo(embedder).encode([]).vectors.shape == (0, 384)


def test_any_model_by_path_and_a_key_that_knows_its_weights(embedder: SentenceEmbedder, tmp_path: Path) -> None:
    """A static model saved to a folder loads by its path; changed weights change the key, a copy does not."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding

    tokenizer = embedder._model.tokenizer.backend_tokenizer
    weights = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16)).astype(np.float32)
    keys = []
    for number, change in enumerate((0.0, 0.0, 1.0)):
        folder = tmp_path / str(number)
        SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights + change)]).save(str(folder))
        loaded = SentenceEmbedder(str(folder), device="cpu")
        assert (loaded.info.name, loaded.info.dims) == (str(number), 16)
        assert loaded.encode(["hello there"]).vectors.shape == (1, 16)
        keys.append(loaded.info.key)
    assert keys[0] == keys[1] != keys[2]
    assert embedder.info.key not in keys
    assert SentenceEmbedder(device="cpu").info.key == embedder.info.key


def test_the_memo_embeds_a_text_once_and_forgets_the_oldest() -> None:
    """Equal texts of one batch too; vectors stay in the order of the texts."""
    fake = FakeEmbedder()
    memo = Memo(fake, texts_max=3)
    first = memo.encode(["a", "b", "a"])
    assert fake.encoded == ["a", "b"]
    assert np.array_equal(first.vectors[0], first.vectors[2])
    memo.encode(["c", "a", "d"])  # b was used longest ago
    assert fake.encoded == ["a", "b", "c", "d"]
    assert [memo.knows(text) for text in "abcd"] == [True, False, True, True]
    again = memo.encode(["b", "a"])
    assert np.array_equal(again.vectors, np.stack([first.vectors[1], first.vectors[0]]))
    assert memo.encode(list("abcdefgh")).vectors.shape == (8, 16)  # more than it can remember


def test_importing_the_cache_imports_nothing_heavy() -> None:
    """The gateway imports it: no torch, FAISS, transformers or numpy."""
    heavy = "torch", "faiss", "transformers", "sentence_transformers", "numpy"
    code = f"import cache, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_capital_of_france(embedder: SentenceEmbedder) -> None:
    """The real encoder, index and rule together: paraphrases hit, a negation and another country do not."""
    import time

    from cache import Hit
    from tests.cache.fakes import ACME, ask, query

    cache = SemanticCache(embedder)
    stored = ask("What is the capital of France?")
    cache.fold([Added(ACME, stored.exact, stored.compat, str(stored.text), time.time(), time.time() + 60)])
    asked = {
        "What's France's capital city?": True,
        "Tell me the capital of France": True,
        "which city is the capital of france": True,
        "Can you tell me what the capital of France is?": True,
        "What is not the capital of France?": False,
        "What is the capital of Spain?": False,
        "What was the capital of France in 1940?": False,
        "What is the population of France?": False,
        "Answer in German: what is the capital of France?": False,
    }
    answers = cache.lookup([query(text) for text in asked])
    assert [isinstance(answer, Hit) for answer in answers] == list(asked.values())
