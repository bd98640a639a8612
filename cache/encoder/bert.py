"""BERT sentence encoders on a CPU, without torch: OpenVINO runs a graph built from the weights.

The only file that imports openvino. It runs sentence-transformers folders of the plain kind:
BertModel, mean or CLS pooling, unit length (all-MiniLM, BGE, GTE); `read_plan` recognises them.
Vectors equal torch's to within 1e-6 in float32 (Devlin et al. 2019, arXiv:1810.04805); in bfloat16,
on processors that multiply it, cosines change by 0.0006 in the mean. Texts are packed end to end
into one row of tokens, and an attention mask keeps them apart, so a batch of mixed lengths computes
hardly any padding. Knows no cache. Invariant: no text is truncated.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache.encoder.types import KEY_BYTES, EmbedderInfo, Encoded, folder_key, unknown_id, unread_among

# a pass is padded to one of these: a graph compiled for its size takes a millisecond less
_SIZES = (16, 32, 64, 128)
_ANY_SIZE = -1  # of a longer text
# a pass of so many tokens has several texts, for which threads take a third more of the processor
_ALONE_FROM = 64
# texts go into one pass up to this; more only makes the mask, which grows with its square, dearer
_PACK_TOKENS = _SIZES[-1]
_MEAN, _CLS = ("mean", "pooling_mode_mean_tokens"), ("cls", "pooling_mode_cls_token")
_MODULES = ("Transformer", "Pooling", "Normalize")


@dataclass(frozen=True, slots=True)
class BertPlan:
    """The settings of a model's folder.

    `is_mean`: the vector is the mean over all tokens, else the first token's. `tokens_max` counts
    special tokens.
    """

    folder: Path
    layers: int
    heads: int
    dims: int
    epsilon: float
    tokens_max: int
    is_mean: bool


def read_plan(folder: Path) -> BertPlan | None:
    """Read the plan of the model in `folder`.

    Returns None unless it is a plain BERT, stored as safetensors in float32.
    """
    settings = _read(folder / "config.json")
    modules = _read(folder / "modules.json")
    pooling = _read(folder / "1_Pooling" / "config.json")
    sentence = _read(folder / "sentence_bert_config.json")
    tokenizer = _read(folder / "tokenizer_config.json")
    prompts = _read(folder / "config_sentence_transformers.json")
    if not all((folder / name).is_file() for name in ("model.safetensors", "tokenizer.json")):
        return None
    # a word in newer folders, a flag for each mode in older ones
    named = pooling.get("pooling_mode")
    modes = [named] if named else [name for name, on in pooling.items() if name.startswith("pooling_mode_") and on]
    is_plain = (
        settings.get("model_type") == "bert"
        and settings.get("hidden_act") == "gelu"
        and settings.get("position_embedding_type", "absolute") == "absolute"
        and not sentence.get("do_lower_case")
        and not prompts.get("default_prompt_name")
        and isinstance(modules, list)
        and tuple(str(module.get("type")).rsplit(".", 1)[-1] for module in modules) in (_MODULES, _MODULES[:2])
        and len(modes) == 1
        and modes[0] in (*_MEAN, *_CLS)
    )
    if not is_plain or not _has_weights(folder / "model.safetensors"):
        return None
    window = int(settings["max_position_embeddings"])
    return BertPlan(
        folder,
        layers=int(settings["num_hidden_layers"]),
        heads=int(settings["num_attention_heads"]),
        dims=int(settings["hidden_size"]),
        epsilon=float(settings["layer_norm_eps"]),
        tokens_max=min(window, int(sentence.get("max_seq_length") or tokenizer.get("model_max_length") or window)),
        is_mean=modes[0] in _MEAN,
    )


class BertEmbedder:
    """The loaded model of a plan; loading takes a fraction of a second. `name` is for people.

    With `is_bfloat16` products are in bfloat16, which the name and the key include.
    """

    def __init__(self, plan: BertPlan, name: str, threads: int = 1, *, is_bfloat16: bool = False) -> None:
        """Load the weights. Raises ImportError without OpenVINO, and KeyError if a weight is
        missing.
        """
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        key = folder_key(plan.folder)
        if is_bfloat16:
            name, key = f"{name} (bfloat16)", blake2b(b"bfloat16", digest_size=KEY_BYTES, key=key).digest()
        self.info = EmbedderInfo(name, plan.dims, plan.tokens_max, key)
        self._is_mean = plan.is_mean
        self._tokenizer = Tokenizer.from_file(str(plan.folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._unknown = unknown_id(self._tokenizer)
        self._graph = _graph(plan, load_file(plan.folder / "model.safetensors"))
        self._threads = threads
        self._how = {
            # decision: embedder-precision
            "INFERENCE_PRECISION_HINT": "bf16" if is_bfloat16 else "f32",
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "ENABLE_CPU_PINNING": False,
        }
        self._lock = threading.Lock()  # a request runs for one thread at a time
        self._requests: dict[int, Any] = {}  # by size; the first pass of a size compiles its own
        self._tensor = _openvino().Tensor

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return vectors and token counts (special tokens included), in order. Thread-safe."""
        rows = [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        vectors = np.zeros((len(rows), self.info.dims), dtype=np.float32)
        for pack in _packs(counts, self.info.tokens_max):
            vectors[pack] = self._run([rows[index] for index in pack], counts[pack])
        return Encoded(vectors, counts, unread_among(rows, self._unknown))

    def _run(self, rows: Sequence[list[int]], counts: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return a vector for each row of token ids."""
        tokens = int(counts.sum())
        kind = next((size for size in _SIZES if tokens <= size), _ANY_SIZE)
        size = tokens if kind == _ANY_SIZE else kind
        ids, positions = np.zeros((2, size), dtype=np.int32)
        ids[:tokens] = np.fromiter((token for row in rows for token in row), dtype=np.int32, count=tokens)
        positions[:tokens] = np.concatenate([np.arange(count, dtype=np.int32) for count in counts])
        owners = np.full(size, -1)  # what is padded sees itself alone
        owners[:tokens] = np.repeat(np.arange(len(rows)), counts)
        mask = np.where(owners[:, None] == owners, np.float32(0), np.float32(-np.inf))
        pooled = owners == np.arange(size)[:, None]
        if not self._is_mean:
            pooled &= positions == 0
        # named: tensors only point at their arrays
        inputs = (ids, positions, mask, pooled.astype(np.float32))
        with self._lock:
            request = self._requests.get(kind) or self._compiled(kind)
            # handed to `infer` they would cost three times as much
            for index, values in enumerate(inputs):
                request.set_input_tensor(index, self._tensor(values, shared_memory=True))
            request.infer()
            vectors: NDArray[np.float32] = request.get_output_tensor(0).data[: len(rows)]
            unit: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return unit

    def _compiled(self, kind: int) -> Any:
        """Compile the graph for passes of `kind` tokens, and return its inference request."""
        graph = self._graph.clone()
        graph.reshape({port: [kind] * len(port.partial_shape) for port in graph.inputs})
        how = {**self._how, "INFERENCE_NUM_THREADS": 1 if kind >= _ALONE_FROM else self._threads}
        self._requests[kind] = _openvino().Core().compile_model(graph, "CPU", how).create_infer_request()
        return self._requests[kind]


def _packs(counts: NDArray[np.int32], tokens_max: int) -> list[list[int]]:
    """Divide texts among passes, by their indexes, longest first so that short texts fill the last
    pass.
    """
    packs: list[list[int]] = []
    room = 0
    for index in np.argsort(-counts, kind="stable").tolist():
        count = max(1, int(counts[index]))  # a pass has as many slots for texts as for tokens
        if count > tokens_max:
            continue
        if count > room:
            packs.append([])
            room = _PACK_TOKENS
        packs[-1].append(index)
        room -= count
    return packs


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 (AVX512_BF16, AMX). Raises ImportError without
    OpenVINO.
    """
    return "BF16" in _openvino().Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def _openvino() -> Any:
    # openvino imports its telemetry where it finds it, and that calls out to the internet; without,
    # it does without
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    import openvino

    return openvino


def _graph(plan: BertPlan, weights: dict[str, NDArray[np.float32]]) -> Any:
    """Build the graph from token ids, positions, attention mask (0 or -inf) and pooling weights to
    pooled vectors.
    """
    openvino = _openvino()
    from openvino import opset13 as op

    def whole(*values: int) -> Any:
        return op.constant(np.array(values, dtype=np.int64))

    def normed(x: Any, name: str) -> Any:
        x = op.mvn(x, whole(1), True, plan.epsilon, "INSIDE_SQRT")
        return op.add(op.multiply(x, op.constant(weights[name + ".weight"])), op.constant(weights[name + ".bias"]))

    def linear(x: Any, name: str) -> Any:
        return op.add(
            op.matmul(x, op.constant(weights[name + ".weight"]), False, True), op.constant(weights[name + ".bias"])
        )

    def heads(x: Any) -> Any:
        x = op.reshape(x, whole(1, -1, plan.heads, plan.dims // plan.heads), False)
        return op.transpose(x, whole(0, 2, 1, 3))

    def embedded(name: str, rows: Any) -> Any:
        table = op.constant(weights[f"embeddings.{name}_embeddings.weight"])
        return op.gather(table, rows, op.constant(np.int64(0)))

    ids, positions = (op.parameter([-1], np.int32) for _ in range(2))
    mask, pooling = (op.parameter([-1, -1], np.float32) for _ in range(2))
    first_type = op.constant(weights["embeddings.token_type_embeddings.weight"][0])
    x = op.add(op.add(embedded("word", ids), embedded("position", positions)), first_type)
    x = normed(x, "embeddings.LayerNorm")
    spread = op.unsqueeze(mask, whole(0, 1))
    for layer in range(plan.layers):
        name = f"encoder.layer.{layer}."
        query, key, value = (heads(linear(x, f"{name}attention.self.{part}")) for part in ("query", "key", "value"))
        seen = op.transpose(op.scaled_dot_product_attention(query, key, value, spread), whole(0, 2, 1, 3))
        seen = linear(op.reshape(seen, whole(-1, plan.dims), False), name + "attention.output.dense")
        x = normed(op.add(x, seen), name + "attention.output.LayerNorm")
        wide = op.gelu(linear(x, name + "intermediate.dense"), "erf")
        x = normed(op.add(x, linear(wide, name + "output.dense")), name + "output.LayerNorm")
    return openvino.Model([op.matmul(pooling, x, False, False)], [ids, positions, mask, pooling])


def _has_weights(path: Path) -> bool:
    """Whether the file's header describes a bare BertModel in float32.

    Format: https://huggingface.co/docs/safetensors.
    """
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    types = {tensor["dtype"] for name, tensor in header.items() if name.endswith((".weight", ".bias"))}
    return "embeddings.word_embeddings.weight" in header and types == {"F32"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else {}
