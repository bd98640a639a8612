"""Models that nobody trained, made where they run: random weights in the shapes of real ones, on no disk.

What a step costs depends on shapes, not on what the weights say; eight billion of them are made on a GPU in a second.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from local_engine.checkpoints.checkpoint import WeightPiece
from local_engine.checkpoints.families import model_config_from_hf
from local_engine.config import ModelConfig
from local_engine.text.tokenizer import Tokenizer

_QWEN3 = {"head_dim": 128, "vocab_size": 151_936, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960}
_TINY = {"vocab_size": 512, "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "num_hidden_layers": 1}
_TINY |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {  # Qwen3-8B
        **_QWEN3,
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "30b-a3b": {  # Qwen3-30B-A3B
        **_QWEN3,
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "tiny": {**_TINY, "model_type": "qwen3", "intermediate_size": 64},
    "tiny-moe": {
        **_TINY,
        "model_type": "qwen3_moe",
        "intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}
_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


class MadeCheckpoint:
    """A checkpoint of that shape whose tensors are drawn on the device as they are asked for."""

    form = "random bfloat16"

    def __init__(self, shape: str, device: torch.device) -> None:
        config = SHAPES[shape] | {"architectures": [_ARCHITECTURES[SHAPES[shape]["model_type"]]]}
        self.config: ModelConfig = model_config_from_hf(config, shape, shape)
        backend = Backend(models.BPE({"a": 0}, []))
        backend.decoder = decoders.ByteLevel()  # type: ignore[assignment, unused-ignore]
        self.tokenizer = Tokenizer(backend)
        self.path = Path(shape)
        self._device = device

    def names(self) -> frozenset[str]:
        return frozenset(tensor.name for tensor in self._tensors())

    def weights(self) -> Iterator[WeightPiece]:
        for tensor in self._tensors():
            made = torch.randn(tensor.size, dtype=torch.bfloat16, device=self._device).mul_(0.02)
            yield WeightPiece(tensor.name, made if len(tensor.size) > 1 else torch.ones_like(made), self.path)

    def _tensors(self) -> Iterator[_Tensor]:
        model = self.config
        hidden, size = model.hidden_size, model.attention.head_dim
        yield _Tensor("model.embed_tokens.weight", (model.vocabulary_size, hidden))
        yield _Tensor("lm_head.weight", (model.vocabulary_size, hidden))
        yield _Tensor("model.norm.weight", (hidden,))
        for layer in range(model.layers):
            prefix = f"model.layers.{layer}"
            yield _Tensor(f"{prefix}.input_layernorm.weight", (hidden,))
            yield _Tensor(f"{prefix}.post_attention_layernorm.weight", (hidden,))
            for part, rows in zip("qkv", model.attention.qkv_rows, strict=True):
                yield _Tensor(f"{prefix}.self_attn.{part}_proj.weight", (rows, hidden))
            for part in ("q", "k"):
                yield _Tensor(f"{prefix}.self_attn.{part}_norm.weight", (size,))
            yield _Tensor(f"{prefix}.self_attn.o_proj.weight", (hidden, model.attention.qkv_rows[0]))
            if model.experts is None:
                yield from _mlp(f"{prefix}.mlp", hidden, model.intermediate_size)
                continue
            yield _Tensor(f"{prefix}.mlp.gate.weight", (model.experts.count, hidden))
            for expert in range(model.experts.count):
                yield from _mlp(f"{prefix}.mlp.experts.{expert}", hidden, model.experts.intermediate_size)


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    size: tuple[int, ...]


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[_Tensor]:
    for part in ("gate", "up"):
        yield _Tensor(f"{prefix}.{part}_proj.weight", (inner, hidden))
    yield _Tensor(f"{prefix}.down_proj.weight", (hidden, inner))
