"""TritonKV: the pools of all layers on a GPU, and what the decoder asks of them; the counterpart of `attention.PagedKV`.

Same layout, [2 * kv_heads (K, then V), blocks, block_tokens, head_dim] a layer, but nothing is gathered and nothing masked
beforehand: kernels read pages where they lie. Knows no schedules. Invariant: a layer's KV of a step is written before any
of it is read; what no tile reaches is never read.
"""

from __future__ import annotations

import torch

from local_engine.attention import StepInput
from local_engine.config import ModelConfig
from local_engine.kernels.gpu.attention import Shape, attend
from local_engine.kernels.gpu.rows import rotate_write
from local_engine.models.rope import Rotary


def shape_of(model: ModelConfig, block_tokens: int) -> Shape:
    """What attention depends on in this model."""
    return Shape(
        heads=model.heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_tokens=block_tokens,
        scale=model.attention_scale,
        softcap=model.attention_softcap,
        windows=model.windows,
    )


class TritonKV:
    """Room for `blocks` blocks in every layer."""

    native = None
    is_fused = True

    def __init__(
        self, model: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.windows = model.windows
        self.shape = shape_of(model, block_tokens)
        shape = (2 * model.kv_heads, blocks, block_tokens, model.head_dim)
        self._pools = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(model.layers)]

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pool in self._pools)

    @torch.inference_mode()
    def clear(self) -> None:
        """All zeros again."""
        for pool in self._pools:
            pool.zero_()

    def rotate_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        epsilon: float,
        rotary: Rotary,
        step: StepInput,
    ) -> None:
        """Normalise and rotate the q and k of qkv [rows, heads + 2 kv_heads, head_dim] in place, and store k and v.
        `rotary` is of all positions."""
        rotate_write(qkv, self._pools[layer], qk_norm, epsilon, rotary.cos, rotary.sin, step.positions, step.slots)

    def attend(self, layer: int, queries: torch.Tensor, step: StepInput) -> torch.Tensor:
        """[rows, heads, head_dim] queries to [rows, heads * head_dim] outputs."""
        assert step.tiles is not None, "the step was not prepared for tiles"
        return attend(self.shape, layer, queries, self._pools[layer], step.positions, step.tiles)
