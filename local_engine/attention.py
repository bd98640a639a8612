"""Attention over paged KV: the pools, and attention by torch and by the native kernels.

A layer's pool is [2 * kv_heads (K, then V), blocks, block_tokens, head_dim]: one copy gathers K and
V of many sequences, each head's tokens in a row. (The native kernels order a block differently:
kernels/cpu/pages.h.) Queries that share a KV head are laid out as rows of one query matrix
(grouped-query attention, arXiv:2305.13245), so K and V are never repeated. Knows no weights and no
scheduling.

Invariants: a layer's KV of this step is written before any of it is read; masked values are finite,
because 0 * NaN is NaN (pools start as zeros, and the engine calls `clear` after a step with other
values).
"""

from __future__ import annotations

import contextlib
import math
import mmap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as functional

from local_engine.config import ModelConfig
from local_engine.kernels.cpu import TILE, Kernels, kind_of, native_for
from local_engine.kernels.fused import rms_norm, softcap

if TYPE_CHECKING:
    from local_engine.kernels.gpu.attention import Tiles


Angles = tuple[torch.Tensor, torch.Tensor]  # cos and sin


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows of a step from `start` on: `rows` consecutive tokens of each of several sequences, which
    are padded to a common length.

    `blocks` [sequences, blocks each]; `masks` additive, [sequences, queries per KV head * rows,
    tokens] (for a single row: [sequences, 1, tokens]), one per window (`KV.windows`).
    """

    start: int
    rows: int
    blocks: torch.Tensor
    masks: tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows `0 .. stop` of a step for the native kernel, which reads pages in place.

    `blocks`: the sequences' blocks one after the other; a row's blocks begin at `starts[row]`.
    `work`: the attended tokens of all rows. Rows of sequences with a common prefix should be
    neighbours: the kernel reads the shared part once for all of them.
    """

    stop: int
    blocks: torch.Tensor
    starts: torch.Tensor
    work: int


@dataclass(frozen=True, slots=True)
class StepInput:
    """Everything the decoder needs for one step over `rows` tokens; `logit_rows` are the rows with
    predictions.

    `slots`: where each row's KV goes, counted in tokens from the pool's start. Attention also needs
    `groups` (torch), `paged` (the native kernels) or `tiles` (the GPU's).
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor
    groups: tuple[RowGroup, ...] = ()
    paged: PagedRows | None = None
    tiles: Tiles | None = None


class KV(ABC):
    """The KV of `blocks` blocks of `block_tokens` tokens in every layer, and attention over it.
    `windows` are the distinct windows of the model's layers; a block has room for whole tiles of
    `tile_tokens` tokens."""

    tile_tokens = 1

    def __init__(
        self, model: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.blocks, self.block_tokens = model, blocks, block_tokens
        attention = model.attention
        self.windows = tuple(dict.fromkeys(attention.windows))
        self.window_of = [self.windows.index(window) for window in attention.windows]
        shape = (2 * attention.kv_heads, blocks, self.room(block_tokens), attention.head_dim)
        self.pools = [_zeros(shape, dtype, device) for _ in range(model.layers)]

    @classmethod
    def room(cls, block_tokens: int) -> int:
        """The tokens for which a block has room."""
        return -(-block_tokens // cls.tile_tokens) * cls.tile_tokens

    @property
    def size_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    @torch.inference_mode()
    def clear(self) -> None:
        """Set all pools to zero."""
        for pool in self.pools:
            pool.zero_()

    def angles(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Angles:
        """The part of rotary tables [context, 1, head_dim] that `attend` needs: all, because
        kernels look positions up."""
        return cos, sin

    @abstractmethod
    def attend(
        self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None, angles: Angles, step: StepInput
    ) -> torch.Tensor:
        """Normalise (`qk_norm`) and rotate the q and k of qkv [rows, heads + 2 kv_heads, head_dim],
        perhaps in place, store k and v, and attend. Returns [rows, heads * head_dim]. `angles` come
        from the layer's tables."""


class NativeKV(KV):
    """Pools in the order of the native kernels, which read pages in place."""

    tile_tokens = TILE

    def __init__(
        self, native: Kernels, model: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype
    ) -> None:
        super().__init__(model, blocks=blocks, block_tokens=block_tokens, dtype=dtype, device=torch.device("cpu"))
        self.native, shape = native, model.attention
        self._sizes = (shape.heads, shape.kv_heads, shape.head_dim, block_tokens, blocks)

    def attend(
        self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None, angles: Angles, step: StepInput
    ) -> torch.Tensor:
        """Attend in two passes over the rows. `qk_norm` is float32."""
        rows, kind, pool, model = step.paged, kind_of(qkv.dtype), self.pools[layer].data_ptr(), self.model
        assert rows is not None, "the step was not prepared for pages"
        self.native.rotate_write(
            kind,
            qkv.data_ptr(),
            None if qk_norm is None else qk_norm.data_ptr(),
            model.rms_epsilon,
            *(table.data_ptr() for table in angles),
            step.positions.data_ptr(),
            step.slots.data_ptr(),
            pool,
            len(qkv),
            *self._sizes,
        )
        output = torch.empty(len(qkv), model.attention.qkv_rows[0], dtype=qkv.dtype)
        self.native.attend(
            kind,
            qkv.data_ptr(),
            pool,
            rows.blocks.data_ptr(),
            rows.starts.data_ptr(),
            step.positions.data_ptr(),
            model.attention.windows[layer],
            model.attention.scale,
            model.attention.softcap or 0.0,
            output.data_ptr(),
            rows.stop,
            rows.work,
            *self._sizes,
        )
        return output


class TorchKV(KV):
    """Pools that torch's own kernels read, on any device."""

    def __init__(
        self, model: ModelConfig, *, blocks: int, block_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(model, blocks=blocks, block_tokens=block_tokens, dtype=dtype, device=device)
        attention = model.attention
        self._heads, self._kv_heads, self._head_dim = attention.heads, attention.kv_heads, attention.head_dim
        self._workspace = torch.empty(0, dtype=dtype, device=device)
        self._has_slow_sdpa = device.type == "cpu" and dtype != torch.float32

    def angles(self, cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor) -> Angles:
        """The rows of the tables at these positions, [rows, 1, head_dim]."""
        return cos[positions], sin[positions]

    def attend(
        self, layer: int, qkv: torch.Tensor, qk_norm: torch.Tensor | None, angles: Angles, step: StepInput
    ) -> torch.Tensor:
        """Attend with torch's operations; qkv stays unchanged."""
        rotated = self._heads + self._kv_heads
        qk = qkv[:, :rotated]
        if qk_norm is not None:
            qk = rms_norm(qk, None, self.model.rms_epsilon, qk_norm)
        cos, sin = angles
        qk = (qk * cos).addcmul_(qk.roll(self._head_dim // 2, -1), sin)
        queries = qk[:, : self._heads]
        self._write(layer, step.slots, qk[:, self._heads :], qkv[:, rotated:])
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in step.groups:
            self._attend_group(layer, queries, output, group)
        return output.view(output.shape[0], -1)

    def _write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store a step's [rows, kv_heads, head_dim] keys and values."""
        pool = self.pools[layer].view(2 * self._kv_heads, -1, self._head_dim)
        pool[: self._kv_heads].index_copy_(1, slots, keys.transpose(0, 1))
        pool[self._kv_heads :].index_copy_(1, slots, values.transpose(0, 1))

    def _attend_group(self, layer: int, queries: torch.Tensor, output: torch.Tensor, group: RowGroup) -> None:
        count, heads, size = len(group.blocks), self._kv_heads, self._head_dim
        kv = self._gather(self.pools[layer], group.blocks.flatten()).view(2 * heads, count, -1, size)
        stop = group.start + count * group.rows
        by_head = queries[group.start : stop].view(count, group.rows, heads, -1, size).permute(2, 0, 3, 1, 4)
        by_head = by_head.reshape(heads, count, -1, size)
        mask = group.masks[self.window_of[layer]]
        if self.model.attention.softcap is not None or (self._has_slow_sdpa and group.rows == 1):
            attended = self._by_products(by_head, kv[:heads], kv[heads:], mask)
        else:
            attended = functional.scaled_dot_product_attention(
                by_head.transpose(0, 1),
                kv[:heads].transpose(0, 1),
                kv[heads:].transpose(0, 1),
                attn_mask=mask.unsqueeze(1),
                scale=self.model.attention.scale,
            ).transpose(0, 1)
        by_row = attended.reshape(heads, count, -1, group.rows, size).permute(1, 3, 0, 2, 4)
        output[group.start : stop] = by_row.reshape(-1, self._heads, size)

    def _by_products(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attention as two batched products: [kv_heads, sequences, queries, head_dim], K and V
        [kv_heads, sequences, tokens, head_dim], mask [sequences or none, queries or 1, tokens].

        torch's fused kernel lacks a soft cap; in half precision on CPUs it multiplies head by head,
        at 2 to 7 times the cost of this for one query per sequence. Scores are rounded to the
        type's precision before the softmax, as in transformers' "eager" attention.
        """
        heads, count, rows, size = queries.shape
        scaled = (queries * self.model.attention.scale).reshape(heads * count, rows, size)
        scores = torch.bmm(scaled, keys.flatten(0, 1).transpose(1, 2)).view(heads, count, rows, -1)
        weights = softcap(scores, self.model.attention.softcap).add_(mask).softmax(-1).flatten(0, 1)
        return torch.bmm(weights, values.flatten(0, 1)).view(heads, count, rows, size)

    def _gather(self, pool: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        """Copy blocks into the workspace: allocating memory for every layer of every step would
        cost more than the copy."""
        shape = (pool.shape[0], blocks.shape[0], *pool.shape[2:])
        elements = math.prod(shape)
        if self._workspace.numel() < elements:
            self._workspace = torch.empty(elements + elements // 4, dtype=pool.dtype, device=pool.device)
        return torch.index_select(pool, 1, blocks, out=self._workspace[:elements].view(shape))


def block_size_bytes(model: ModelConfig, block_tokens: int, dtype: torch.dtype, device: torch.device) -> int:
    """The size of a block in all layers together, in bytes."""
    kind = TorchKV if attention_kernels(model, dtype, device) is None else NativeKV
    return model.layers * sum(model.attention.qkv_rows[1:]) * kind.room(block_tokens) * dtype.itemsize


def attention_kernels(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> Kernels | None:
    """The native kernels, or None if they do not support heads of this size."""
    return native_for(device, dtype) if model.attention.head_dim <= 256 else None


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU from untouched pages, which take no memory until they are written.

    These are small pages: a block lies in as many places as there are heads, and with huge pages
    the first few blocks of every layer would take hundreds of megabytes.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages has none to refuse
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
