"""The real encoder, and the memory around it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cache.encoder.embedder as module
from cache.encoder.bert import BertEmbedder, has_bfloat16, read_plan
from cache.encoder.embedder import Memo, SentenceEmbedder, open_embedder, packaged_folder
from cache.encoder.types import Embedder, PrecisionUnavailable
from cache.semantic.cache import PromptAdded, SemanticCache
from tests.cache.fakes import ACME, OTHER, FakeEmbedder


@pytest.fixture(scope="module")
def embedder() -> Embedder:
    return open_embedder(device="cpu")


@pytest.fixture(scope="module")
def reference() -> SentenceEmbedder:
    """The same model through the library."""
    return SentenceEmbedder(packaged_folder(), "reference", "cpu")


TEXTS = [
    *("word " * count for count in (1, 2, 20, 127, 128, 254, 255, 400)),
    "", " ", "What is the capital of France?", "Größe, naïve, 東京, 🙂 and \u0000", "def f(x): return x ** 2", "hello\n\n\tthere",
]  # fmt: skip


def test_the_default_loads_offline_and_gives_unit_vectors(embedder: Embedder) -> None:
    """all-MiniLM-L6-v2: 384 dimensions, a window of 256 tokens, paraphrases near, strangers far."""
    assert (embedder.info.name, embedder.info.dims, embedder.info.tokens_max) == ("all-MiniLM-L6-v2", 384, 256)
    vectors = embedder.encode(["The capital of France?", "What is France's capital?", "Bake a cake"]).vectors
    assert vectors.dtype == np.float32
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    assert vectors[0] @ vectors[1] > 0.9 > 0.3 > vectors[0] @ vectors[2]


def test_a_text_over_the_window_gets_no_vector(embedder: Embedder) -> None:
    """It is counted whole, not truncated; its neighbours in the batch are not disturbed."""
    texts = ["hello", "word " * 254, "word " * 255, "hello"]
    encoded = embedder.encode(texts)
    assert encoded.tokens.tolist() == [3, 256, 257, 3]
    assert [bool(vector.any()) for vector in encoded.vectors] == [True, True, False, True]
    assert np.array_equal(encoded.vectors[0], encoded.vectors[3])


def test_what_is_no_token_is_not_compared(embedder: Embedder, reference: SentenceEmbedder) -> None:
    """Texts that differ in unknown tokens alone have one vector, so that the cache takes none of them for another."""
    texts = [
        "她喜欢他吗",
        "他喜欢她吗",
        "What does 🚀 mean?",
        "What does 🎉 mean?",
        "What does a rocket mean?",
        "x" * 101,
    ]
    for model in (embedder, reference):
        made = model.encode(texts)
        assert made.unread == {0, 1, 2, 3, 5}
        assert made.tokens.max() < model.info.tokens_max
        assert made.vectors[0] @ made.vectors[1] > 0.9999 < made.vectors[2] @ made.vectors[3]
        over = Memo(model).encode([(b"team", text) for text in texts]).tokens > model.info.tokens_max
        assert over.tolist() == [True, True, True, True, False, True]


def test_no_texts_give_no_vectors(embedder: Embedder) -> None:
    """An empty batch has a shape too."""
    assert Memo(embedder).encode([]).vectors.shape == (0, 384)


def test_any_model_by_path_and_a_key_that_knows_its_weights(embedder: Embedder, tmp_path: Path) -> None:
    """A static model saved to a folder loads by its path; changed weights change the key, a copy does not."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(packaged_folder() / "tokenizer.json"))
    weights = np.random.default_rng(0).normal(size=(tokenizer.get_vocab_size(), 16)).astype(np.float32)
    keys = []
    for number, change in enumerate((0.0, 0.0, 1.0)):
        folder = tmp_path / str(number)
        SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights + change)]).save(str(folder))
        loaded = open_embedder(str(folder), device="cpu")
        assert isinstance(loaded, SentenceEmbedder)
        assert (loaded.info.name, loaded.info.dims) == (str(number), 16)
        assert loaded.encode(["hello there"]).vectors.shape == (1, 16)
        keys.append(loaded.info.key)
    assert keys[0] == keys[1] != keys[2]
    assert embedder.info.key not in keys
    assert open_embedder(device="cpu").info.key == embedder.info.key


def test_the_fast_way_gives_the_library_s_vectors(embedder: Embedder, reference: SentenceEmbedder) -> None:
    """On one thread without torch or with it: equal to 1e-5, the same counts, the same window, the same key."""
    assert isinstance(embedder, BertEmbedder)
    one, other = embedder.encode(TEXTS), reference.encode(TEXTS)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert np.abs(one.vectors - other.vectors).max() < 1e-5
    assert (embedder.info.key, embedder.info.tokens_max) == (reference.info.key, reference.info.tokens_max)


@pytest.mark.skipif(not has_bfloat16(), reason="this processor does not multiply bfloat16")
def test_a_precision_is_an_embedder(embedder: Embedder) -> None:
    """In bfloat16 the name and the key are others, cosines nearly the same; `auto` takes it, float32 pins the other."""
    half = open_embedder(device="cpu", precision="bfloat16")
    assert (half.info.name, half.info.key) == ("all-MiniLM-L6-v2 (bfloat16)", open_embedder(precision="auto").info.key)
    assert half.info.key != embedder.info.key == open_embedder(device="cpu", precision="float32").info.key
    texts = [text for text in TEXTS if len(text) < 700]
    one, other = embedder.encode(texts), half.encode(texts)
    assert one.tokens.tolist() == other.tokens.tolist()
    assert np.linalg.norm(other.vectors, axis=1) == pytest.approx(1.0, abs=1e-5)
    moved = np.abs(one.vectors @ one.vectors.T - other.vectors @ other.vectors.T)
    assert 0 < moved.max() < 0.01


def test_a_precision_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the processor has no bfloat16 `auto` is float32; who asks for it learns what to set."""
    monkeypatch.setattr(module, "has_bfloat16", lambda: False)
    assert open_embedder(device="cpu", precision="auto").info.name == "all-MiniLM-L6-v2"
    with pytest.raises(PrecisionUnavailable, match=r"set `cache\.precision` to float32"):
        open_embedder(device="cpu", precision="bfloat16")


def test_what_else_is_in_a_batch_does_not_matter(embedder: Embedder) -> None:
    """Texts that share a pass do not see each other, whatever their lengths and order."""
    for texts in (TEXTS, TEXTS[::-1], TEXTS * 3):
        together = embedder.encode(texts)
        for place, text in enumerate(texts):
            alone = embedder.encode([text])
            assert together.tokens[place] == alone.tokens[0]
            assert together.vectors[place] == pytest.approx(alone.vectors[0], abs=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_other_berts_run_the_fast_way_too(tmp_path: Path, pooling: str) -> None:
    """Another shape, another pooling, no normalisation: read from the folder's settings, equal to the library's."""
    save_bert(tmp_path, pooling)
    fast = open_embedder(str(tmp_path), device="cpu")
    assert isinstance(fast, BertEmbedder)
    slow = SentenceEmbedder(tmp_path, "slow", "cpu")
    assert (fast.info.dims, fast.info.tokens_max) == (slow.info.dims, slow.info.tokens_max) == (24, 12)
    texts = [text for text in TEXTS if len(text) < 60]
    assert np.abs(fast.encode(texts).vectors - slow.encode(texts).vectors).max() < 1e-5


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("config.json", {"model_type": "mpnet"}),
        ("config.json", {"hidden_act": "relu"}),
        ("config.json", {"position_embedding_type": "relative_key"}),
        ("sentence_bert_config.json", {"do_lower_case": True}),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}),
    ],
)
def test_a_model_that_is_not_plain_goes_through_the_library(tmp_path: Path, file: str, change: dict[str, Any]) -> None:
    """What the fast way does not know it does not guess."""
    save_bert(tmp_path, "mean")
    assert read_plan(tmp_path) is not None
    settings = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps({**settings, **change}))
    assert read_plan(tmp_path) is None


def save_bert(folder: Path, pooling: str) -> None:
    """A small random BERT with the default's tokenizer."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
    from transformers import AutoTokenizer, BertConfig, BertModel

    torch.manual_seed(0)
    settings = BertConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=40, max_position_embeddings=16
    )
    BertModel(settings).save_pretrained(folder / "bert")
    AutoTokenizer.from_pretrained(str(packaged_folder())).save_pretrained(str(folder / "bert"))
    bert = Transformer(str(folder / "bert"), max_seq_length=12)
    SentenceTransformer(modules=[bert, Pooling(24, pooling_mode=pooling)]).save(str(folder))


def test_loading_calls_nobody() -> None:
    """No socket is asked for an address while the default loads and encodes: nothing is told to anybody."""
    code = (
        "import sys; sys.addaudithook(lambda name, _: name.startswith('socket.') and print(name));"
        "from cache.encoder.embedder import open_embedder; open_embedder(device='cpu').encode(['hello']);"
        "import time; time.sleep(0.2)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_the_memo_embeds_a_text_once_and_forgets_the_oldest() -> None:
    """Equal texts of one batch too; vectors stay in the order of the texts."""
    fake = FakeEmbedder()
    memo = Memo(fake, texts_max=3)
    first = memo.encode([(ACME, text) for text in "aba"])
    assert fake.encoded == ["a", "b"]
    assert np.array_equal(first.vectors[0], first.vectors[2])
    memo.encode([(ACME, text) for text in "cad"])  # b was used longest ago
    assert fake.encoded == ["a", "b", "c", "d"]
    assert [memo.knows(ACME, text) for text in "abcd"] == [True, False, True, True]
    again = memo.encode([(ACME, text) for text in "ba"])
    assert np.array_equal(again.vectors, np.stack([first.vectors[1], first.vectors[0]]))
    assert memo.encode([(ACME, text) for text in "abcdefgh"]).vectors.shape == (8, 16)  # more than it can remember
    fake.encoded.clear()
    memo.encode([(ACME, "h"), (OTHER, "h")])
    assert fake.encoded == ["h"]  # of another partition: it is not known there


def test_several_threads_get_what_one_gets(embedder: Embedder) -> None:
    """The worker's thread and the encoder's share an embedder and a memo that forgets while both use it."""
    texts = [f"text number {number}" for number in range(12)]
    right, memo = embedder.encode(texts).vectors, Memo(embedder, texts_max=3)

    def differs(thread: int) -> float:
        places = [(thread + step) % len(texts) for step in range(40)]
        made = [memo.encode([(ACME, texts[place]), (ACME, texts[place - 1])]).vectors[0] for place in places]
        alone = [embedder.encode([texts[place]]).vectors[0] for place in places]
        return float(np.abs([*(np.stack(made) - right[places]), *(np.stack(alone) - right[places])]).max())

    with ThreadPoolExecutor(4) as threads:
        assert max(threads.map(differs, range(4))) < 2e-6


def test_importing_the_cache_imports_nothing_heavy() -> None:
    """The gateway imports it: no torch, FAISS, transformers or numpy."""
    heavy = "torch", "faiss", "transformers", "sentence_transformers", "numpy"
    code = f"import cache, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_capital_of_france(embedder: Embedder) -> None:
    """The real encoder, index and rule together: the same question hits, a negation and another country do not."""
    import time

    from cache import Hit
    from tests.cache.fakes import ask, query

    cache = SemanticCache(embedder)
    stored = ask("What is the capital of France?")
    cache.fold([PromptAdded(ACME, stored.exact, stored.compat, str(stored.text), time.time(), time.time() + 60)])
    asked = {
        "Tell me, what is France's capital?": True,
        "Tell me the capital of France": True,
        "which city is the capital of france": False,
        "Can you tell me the capital of France, please?": True,
        "What is not the capital of France?": False,
        "What is the capital of Spain?": False,
        "What was the capital of France in 1940?": False,
        "What is the population of France?": False,
        "Answer in German: what is the capital of France?": False,
    }
    answers = cache.lookup([query(text) for text in asked])
    assert [isinstance(answer, Hit) for answer in answers] == list(asked.values())
