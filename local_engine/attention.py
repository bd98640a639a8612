"""Attention over paged KV, by torch's own kernels: the plain path on every device, and the oracle for faster ones.

A layer's pool is [2 * kv_heads (K, then V), blocks, block_tokens, head_dim]: one copy gathers K and V of many sequences,
each head's tokens in a row. (The native kernels have an order of their own within a block: native/pages.h.)
Queries that share a KV head are laid out as rows of one query matrix (grouped-query attention, arXiv:2305.13245), so K
and V are never repeated. Knows no weights and no scheduling.

Invariants: a layer's KV of this step is written before any of it is read; what a mask hides is finite (pools start as
zeros and a step that produced anything else is answered by `clear`), because 0 * NaN would show through.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.nn.functional as functional

from local_engine.config import ModelConfig
from local_engine.kernels.cpu import TILE, Kernels, kind_of, native_for

if TYPE_CHECKING:
    from local_engine.kernels.gpu.attention import Tiles


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows `start .. stop` of a step: sequences of similar length with one query each, padded to a common length.

    `blocks` [sequences * blocks each]; `masks` additive, [sequences, 1, tokens], one per window (`PagedKV.windows`).
    """

    start: int
    stop: int
    blocks: torch.Tensor
    masks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """Rows `start .. stop` of a step: consecutive tokens of one sequence, which see `tokens` tokens up to their own.

    `blocks` [blocks of the sequence]; `masks` additive, [queries per KV head * rows, tokens], one per window.
    """

    start: int
    stop: int
    tokens: int
    blocks: torch.Tensor
    masks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows `0 .. stop` of a step for the native kernel, which reads pages where they lie.

    `blocks`: the sequences' blocks one after the other; a row's begin at `starts[row]`. `work`: tokens seen in all.
    Rows of sequences that share a prefix should be neighbours: the kernel looks at what they share once for all of them.
    """

    stop: int
    blocks: torch.Tensor
    starts: torch.Tensor
    work: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """Everything the decoder needs for one step over `rows` tokens; `logit_rows` are those to predict from.

    `slots`: where each row's KV goes, counted in tokens from the pool's start. What attention needs besides is in
    `decodes` and `prefills` for torch's means, in `paged` for the native kernel, in `tiles` for the GPU's.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    decodes: tuple[DecodeGroup, ...] = ()
    prefills: tuple[PrefillSpan, ...] = ()
    paged: PagedRows | None = None
    tiles: Tiles | None = None


class KV(Protocol):
    """The pools of all layers, as a decoder uses them."""

    @property
    def is_fused(self) -> bool:
        """Whether `rotate_write` does what is between projections and attention in one pass."""

    def rotate_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: StepInput,
    ) -> None:
        """Normalise and rotate the q and k of qkv [rows, heads + 2 kv_heads, head_dim] in place, and store k and v. `cos`
        and `sin` are of all positions."""

    def attend(self, layer: int, queries: torch.Tensor, step: StepInput) -> torch.Tensor:
        """[rows, heads, head_dim] queries to [rows, heads * head_dim] outputs."""


class PagedKV:
    """The pools of all layers and attention over them. `windows` are the distinct ones of the model's layers."""

    def __init__(
        self, model: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.native = _native(model, dtype, device)
        self.windows = tuple(dict.fromkeys(model.windows))
        self.window_of = [self.windows.index(window) for window in model.windows]
        self._heads, self._kv_heads, self._head_dim = model.heads, model.kv_heads, model.head_dim
        self._scale, self._softcap = model.attention_scale, model.attention_softcap
        self._layer_windows = model.windows
        self._sizes = (model.heads, model.kv_heads, model.head_dim, block_tokens)
        shape = (2 * model.kv_heads, blocks, _stored_tokens(block_tokens, self.native), model.head_dim)
        self.pools = [_zeros(shape, dtype, device) for _ in range(model.layers)]
        self._workspace = torch.empty(0, dtype=dtype, device=device)
        self._has_slow_sdpa = device.type == "cpu" and dtype != torch.float32

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @property
    def is_fused(self) -> bool:
        """Whether `rotate_write` does what is between projections and attention in one pass."""
        return self.native is not None

    @torch.inference_mode()
    def clear(self) -> None:
        """All zeros again."""
        for pool in self.pools:
            pool.zero_()

    def rotate_write(
        self,
        layer: int,
        qkv: torch.Tensor,
        qk_norm: torch.Tensor | None,
        epsilon: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        step: StepInput,
    ) -> None:
        """Native only. Normalise and rotate the q and k of qkv [rows, heads + 2 kv_heads, head_dim] in place, and store
        k and v. `cos` and `sin` are of all positions, `qk_norm` float32."""
        assert self.native is not None
        norm_at = None if qk_norm is None else qk_norm.data_ptr()
        heads, kv_heads, size, block_tokens = self._sizes
        self.native.rotate_write(
            kind_of(qkv.dtype),
            qkv.data_ptr(),
            norm_at,
            epsilon,
            cos.data_ptr(),
            sin.data_ptr(),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            self.pools[layer].data_ptr(),
            qkv.shape[0],
            heads,
            kv_heads,
            size,
            block_tokens,
            self.blocks,
        )

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a step's [rows, kv_heads, head_dim] keys and values."""
        pool = self.pools[layer].view(2 * self._kv_heads, -1, self._head_dim)
        pool[: self._kv_heads].index_copy_(1, slots, keys.transpose(0, 1))
        pool[self._kv_heads :].index_copy_(1, slots, values.transpose(0, 1))

    def attend(self, layer: int, queries: torch.Tensor, step: StepInput) -> torch.Tensor:
        """[rows, heads, head_dim] queries to [rows, heads * head_dim] outputs."""
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if step.paged is not None:
            self._attend_natively(layer, queries, output, step, step.paged)
        for group in step.decodes:
            self._decode(layer, queries, output, group)
        for span in step.prefills:
            self._prefill(layer, queries, output, span)
        return output.view(output.shape[0], -1)

    def _attend_natively(
        self, layer: int, queries: torch.Tensor, output: torch.Tensor, step: StepInput, rows: PagedRows
    ) -> None:
        assert self.native is not None
        heads, kv_heads, size, block_tokens = self._sizes
        assert queries.stride(0) == (heads + 2 * kv_heads) * size, "queries must lie in their qkv"
        self.native.attend(
            kind_of(queries.dtype),
            queries.data_ptr(),
            self.pools[layer].data_ptr(),
            rows.blocks.data_ptr(),
            rows.starts.data_ptr(),
            step.positions.data_ptr(),
            self._layer_windows[layer],
            self._scale,
            self._softcap or 0.0,
            output.data_ptr(),
            rows.stop,
            rows.work,
            heads,
            kv_heads,
            size,
            block_tokens,
            self.blocks,
        )

    def _decode(self, layer: int, queries: torch.Tensor, output: torch.Tensor, group: DecodeGroup) -> None:
        count, heads, size = group.stop - group.start, self._kv_heads, self._head_dim
        kv = self._gather(self.pools[layer], group.blocks).view(2 * heads, count, -1, size)
        rows = queries[group.start : group.stop].reshape(count, heads, -1, size).transpose(0, 1)
        mask = group.masks[self.window_of[layer]]
        if self._has_slow_sdpa or self._softcap is not None:
            found = self._by_products(rows, kv[:heads], kv[heads:], mask).transpose(0, 1)
        else:
            found = self._fused(rows.transpose(0, 1), kv.transpose(0, 1), mask.unsqueeze(1))
        output[group.start : group.stop] = found.reshape(count, self._heads, size)

    def _prefill(self, layer: int, queries: torch.Tensor, output: torch.Tensor, span: PrefillSpan) -> None:
        count, heads, size = span.stop - span.start, self._kv_heads, self._head_dim
        kv = self._gather(self.pools[layer], span.blocks).view(2 * heads, 1, -1, size)[:, :, : span.tokens]
        rows = queries[span.start : span.stop].view(count, heads, -1, size).permute(1, 2, 0, 3)
        rows = rows.reshape(heads, 1, -1, size)
        mask = span.masks[self.window_of[layer]]
        if self._softcap is not None:
            found = self._by_products(rows, kv[:heads], kv[heads:], mask)
        else:
            found = self._fused(rows.transpose(0, 1), kv.transpose(0, 1), mask)
        found = found.view(heads, -1, count, size).permute(2, 0, 1, 3)
        output[span.start : span.stop] = found.reshape(count, self._heads, size)

    def _fused(self, rows: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """torch's own kernel: rows [sequences, kv_heads, queries, head_dim], kv [sequences, 2 * kv_heads, tokens, ...]."""
        heads = self._kv_heads
        return functional.scaled_dot_product_attention(
            rows, kv[:, :heads], kv[:, heads:], attn_mask=mask, scale=self._scale
        )

    def _by_products(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention as two batched products: [kv_heads, sequences, queries, head_dim], K and V [kv_heads, sequences,
        tokens, head_dim], mask [sequences or none, queries or 1, tokens].

        torch's fused kernel knows no soft cap; and in half precision on CPUs it makes small products per head and pays
        for each: 2 to 7 times the time of this at one query per sequence. Scores are rounded to the type's precision
        before the softmax, as in transformers' "eager" attention.
        """
        heads, count, rows, size = queries.shape
        scaled = (queries * self._scale).reshape(heads * count, rows, size)
        scores = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2)).view(heads, count, rows, -1)
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        weights = scores.add_(mask).softmax(-1).flatten(0, 1)
        return torch.bmm(weights, values.flatten(0, 1)).view(heads, count, rows, size)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Copy blocks into the workspace: fresh memory for every layer of every step would cost more than the copy."""
        shape = (pool.shape[0], blocks.shape[0], *pool.shape[2:])
        elements = math.prod(shape)
        if self._workspace.numel() < elements:
            self._workspace = torch.empty(elements + elements // 4, dtype=pool.dtype, device=pool.device)
        return torch.index_select(pool, 1, blocks, out=self._workspace[:elements].view(shape))


def block_size_bytes(model: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """What a block takes in all layers together."""
    tokens = _stored_tokens(block_tokens, _native(model, dtype, device))
    return 2 * model.layers * model.kv_heads * model.head_dim * tokens * torch.empty(0, dtype=dtype).element_size()


def _native(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The native kernels, where they serve heads of this size."""
    return native_for(device, dtype) if model.head_dim <= 256 and model.head_dim % 2 == 0 else None


def _stored_tokens(block_tokens: int, native: Kernels | None) -> int:
    """Tokens a block has room for: the native kernels keep whole tiles."""
    return block_tokens if native is None else -(-block_tokens // TILE) * TILE


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from untouched pages, which take no memory until they are written.

    Small pages there: a block lies in as many places as there are heads, and huge pages would make the first few
    blocks of every layer take hundreds of megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * torch.empty(0, dtype=dtype).element_size())
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages has none to refuse
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
