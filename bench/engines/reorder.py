"""The same model with its inner units in another order: the function is unchanged, but every 32 neighbouring inputs of a
matrix come from 32 places. Weights that were quantised in groups are so taken off their grids, and become what the weights
of a checkpoint in floats are to a quantiser.

The hidden units, those inside each MLP and those inside each head of the values are permuted, each where it is written and
where it is read. Knows the tensors of GGUF's dense Llama and Qwen3 models; others are refused.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import numpy as np

from bench.engines.files import copy_file
from local_engine.config import ModelError

Array = np.ndarray[Any, Any]
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


class _Orders:
    """Which unit comes where: `hidden` everywhere, of each layer those of its MLP and of one head's values."""

    def __init__(self, hidden: int, inner: int, head_dim: int) -> None:
        self._draw = random.Random(0)
        self.hidden = self._order(hidden)
        self._inner, self._head_dim = inner, head_dim
        self._layers: dict[str, tuple[Array, Array]] = {}

    def _order(self, count: int) -> Array:
        return np.array(self._draw.sample(range(count), count))

    def of(self, layer: str) -> tuple[Array, Array]:
        if layer not in self._layers:
            self._layers[layer] = (self._order(self._inner), self._order(self._head_dim))
        return self._layers[layer]

    def heads(self, layer: str, units: int) -> Array:
        """The order within each head, over all heads of a side of a matrix: the same in all, so that queries that share
        values find them."""
        own = self.of(layer)[1]
        return np.concatenate([own + start for start in range(0, units, len(own))])


def reordered(source: Path, folder: Path) -> Path:
    """`source` in bfloat16 with its inner units in another order. Raises ModelError for a model that is not known here."""
    path = folder / f"{source.name.removesuffix('.gguf')}-reordered.gguf"
    orders: list[_Orders] = []

    def change(name: str, values: Array, metadata: dict[str, Any]) -> Array:
        if not orders:
            architecture = metadata["general.architecture"]
            heads = metadata[f"{architecture}.attention.head_count"]
            hidden = metadata[f"{architecture}.embedding_length"]
            head_dim = metadata.get(f"{architecture}.attention.key_length") or hidden // heads
            orders.append(_Orders(hidden, metadata[f"{architecture}.feed_forward_length"], head_dim))
        return _reorder(name, values, orders[0])

    copy_file(source, path, "bf16", change)
    return path


def _reorder(name: str, values: Array, orders: _Orders) -> Array:
    hidden = orders.hidden
    if name in ("token_embd.weight", "output.weight"):
        return values[:, hidden]
    if name == "output_norm.weight":
        return values[hidden]
    found = _LAYER.fullmatch(name)
    layer, part = found.groups() if found else ("", "")
    if part in ("attn_norm", "ffn_norm"):
        return values[hidden]
    if part in ("attn_q_norm", "attn_k_norm") or name == "rope_freqs.weight":
        return values
    if part in ("attn_q", "attn_k"):
        return values[:, hidden]
    if part == "attn_v":
        return values[orders.heads(layer, len(values))][:, hidden]
    if part == "attn_output":
        return values[hidden][:, orders.heads(layer, values.shape[1])]
    if part in ("ffn_gate", "ffn_up"):
        return values[orders.of(layer)[0]][:, hidden]
    if part == "ffn_down":
        return values[hidden][:, orders.of(layer)[0]]
    raise ModelError(f"no order is known for the tensor {name!r}")
