"""Attention over paged KV in Triton: one kernel for prefill, decode, drafts and shared prefixes,
and a kernel that merges.

The kernel computes tiles. A tile is some consecutive rows of a step that attend to the same range
of keys in the same block table: a part of a prompt, one sequence's decode row with its draft, or
the rows of many sequences over their shared prefix (cascade attention,
flashinfer.ai/2024/02/02/cascade-inference). All query heads of a KV head are rows of one tile
(arXiv:2305.13245), so keys are read once for all of them. If tiles are few, each range of keys is
split over several programs (flash-decoding, pytorch.org/blog/flash-decoding); their partial results
are merged by log-sum-exp. Softmax is computed online (arXiv:2205.14135). Knows pools in the layout
of `local_engine.attention`, and no schedules. Invariant: a row attends to the keys at positions up
to its own within its window and its tile's range, each exactly once for any split.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from local_engine.config import AttentionConfig
from local_engine.kernels.supports import is_interpreted, multiprocessors

TILE_FIELDS = 5  # first row, rows, where its table begins, first key, end of the keys
_SPLITS_MAX = 32


@triton.jit(do_not_specialize=["tables", "tiles", "positions", "rows_all", "first_split", "splits"])
def _attend(
    queries,  # [rows, query_stride / head_dim, head_dim]
    pool,  # [2 * kv_heads, blocks, block_tokens, head_dim]
    out,  # [rows, heads, head_dim], or partial float32 [splits, rows, heads, head_dim]
    lse,  # partial float32 [splits, rows, heads], in powers of two
    tables,  # int32, block ids
    tiles,  # int32 [tiles, TILE_FIELDS]
    positions,  # int64 [rows]
    scale,
    softcap,
    window,
    query_stride,
    head_stride,
    rows_all,
    first_split,
    splits,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_PARTIAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIELDS: tl.constexpr,
    WIDEN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row_first = tl.load(tiles + tile * FIELDS)
    rows = tl.load(tiles + tile * FIELDS + 1)
    table = tl.load(tiles + tile * FIELDS + 2)
    key_first = tl.load(tiles + tile * FIELDS + 3)
    key_end = tl.load(tiles + tile * FIELDS + 4)

    lane = tl.arange(0, BLOCK_M)
    is_row = lane < rows * GROUP
    row = row_first + lane // GROUP
    head = kv_head * GROUP + lane % GROUP
    dim = tl.arange(0, BLOCK_D)
    is_dim = dim < HEAD_DIM
    position = tl.load(positions + row, mask=is_row, other=-1).to(tl.int32)
    query_at = row.to(tl.int64)[:, None] * query_stride + head[:, None] * HEAD_DIM + dim[None, :]
    q = tl.load(queries + query_at, mask=is_row[:, None] & is_dim[None, :], other=0.0)

    end = tl.minimum(key_end, tl.max(position, 0) + 1)
    begin = key_first
    if HAS_WINDOW:
        begin = tl.maximum(begin, tl.min(tl.where(is_row, position, 2147483647), 0) - window + 1)
    share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), splits), BLOCK_N) * BLOCK_N
    start = begin + split * share
    stop = tl.minimum(start + share, end)

    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    keys_pool = pool + kv_head.to(tl.int64) * head_stride
    values_pool = pool + (kv_head + KV_HEADS).to(tl.int64) * head_stride
    for first in range(start, stop, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        is_key = key < stop
        block = tl.load(tables + table + key // BLOCK_TOKENS, mask=is_key, other=0)
        slot = block.to(tl.int64) * BLOCK_TOKENS + key % BLOCK_TOKENS
        k = tl.load(
            keys_pool + slot[None, :] * HEAD_DIM + dim[:, None], mask=is_key[None, :] & is_dim[:, None], other=0.0
        )
        if WIDEN:
            scores = tl.dot(q.to(tl.float32), k.to(tl.float32), input_precision="ieee") * scale
        else:
            scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        is_seen = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_seen &= key[None, :] > position[:, None] - window
        scores = tl.where(is_seen, scores * 1.4426950408889634, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        base = tl.where(larger == float("-inf"), 0.0, larger)  # a row that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        v = tl.load(
            values_pool + slot[:, None] * HEAD_DIM + dim[None, :], mask=is_key[:, None] & is_dim[None, :], other=0.0
        )
        total = total * decay + tl.sum(weights, 1)
        if WIDEN:
            acc = acc * decay[:, None] + tl.dot(weights, v.to(tl.float32), input_precision="ieee")
        else:
            acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = larger

    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    attended = acc / total[:, None]
    row_head = row.to(tl.int64) * (KV_HEADS * GROUP) + head
    if IS_PARTIAL:
        row_head += (first_split + split).to(tl.int64) * rows_all * (KV_HEADS * GROUP)
        tl.store(lse + row_head, tl.where(is_empty, float("-inf"), largest + tl.log2(total)), mask=is_row)
    out_at = row_head[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out + out_at, attended.to(out.dtype.element_ty), mask=is_row[:, None] & is_dim[None, :])


@triton.jit(do_not_specialize=["rows_all", "splits"])
def _merge(
    partial,  # float32 [splits, rows_all, heads, head_dim]
    lse,  # float32 [splits, rows_all, heads]
    out,  # [rows, heads, head_dim]
    rows_all,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row_head = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    split = tl.arange(0, BLOCK_S)
    dim = tl.arange(0, BLOCK_D)
    partial_at = row_head + split.to(tl.int64) * rows_all * HEADS
    exponents = tl.load(lse + partial_at, mask=split < splits, other=float("-inf"))
    largest = tl.max(exponents, 0)
    weights = tl.exp2(exponents - tl.where(largest == float("-inf"), 0.0, largest))
    has_any = (weights > 0.0)[:, None]  # what no tile wrote is not even finite
    parts = tl.load(
        partial + partial_at[:, None] * HEAD_DIM + dim[None, :], mask=has_any & (dim < HEAD_DIM)[None, :], other=0.0
    )
    total = tl.sum(weights, 0)
    merged = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out + row_head * HEAD_DIM + dim, merged.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@dataclass(frozen=True, slots=True)
class Partials:
    """Buffers for the partial results of splits: `out` float32 [splits, rows, heads, head_dim],
    `lse` float32 [splits, rows, heads]. `lse` is all -inf before a step's first layer: each layer
    fills the same places."""

    out: torch.Tensor
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """A step's attention as tiles [tiles, TILE_FIELDS] int32; `tables` int32: the sequences' blocks
    one after the other.

    `whole` tiles cover rows that no other tile covers; `separate` and `shared` tiles cover the rows
    before `split_rows`: `separate` the keys of a single sequence, in `separate_splits` parts,
    `shared` the keys of several, in `shared_splits`. `rows_max` is the most rows of a separate
    tile.
    """

    tables: torch.Tensor
    whole: torch.Tensor | None = None
    separate: torch.Tensor | None = None
    shared: torch.Tensor | None = None
    split_rows: int = 0
    rows_max: int = 1
    separate_splits: int = 1
    shared_splits: int = 0
    partials: Partials | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape(AttentionConfig):
    """A model's attention over blocks of `block_tokens` tokens."""

    block_tokens: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def tile_rows(self) -> int:
        """The most rows of a tile."""
        return max(1, self._lanes // self.group)

    @property
    def _lanes(self) -> int:
        return max(64 if self.head_dim > 128 else 128, _power_of_2(self.group))

    def lanes(self, rows: int) -> int:
        """The kernel's size for a tile of `rows` rows, a power of two that tl.dot supports. Decodes
        have the smallest size and all others share one, because each size is compiled as a separate
        kernel."""
        return 16 if rows * self.group <= 16 else self._lanes

    def partials(self, splits: int, rows: int, device: torch.device) -> Partials:
        """Buffers for `splits` partial results of `rows` rows."""
        places = (splits, rows, self.heads)
        return Partials(
            torch.empty(*places, self.head_dim, dtype=torch.float32, device=device),
            torch.full(places, -torch.inf, dtype=torch.float32, device=device),
        )


def _power_of_2(least: int) -> int:
    return 1 << (least - 1).bit_length()


def splits_for(tiles: int, kv_heads: int, device: torch.device) -> int:
    """The number of parts for each tile's keys that gives every multiprocessor about two programs."""
    return max(1, min(_SPLITS_MAX, 2 * multiprocessors(device) // max(1, tiles * kv_heads)))


def attend(
    shape: Shape, layer: int, queries: torch.Tensor, pool: torch.Tensor, positions: torch.Tensor, tiles: Tiles
) -> torch.Tensor:
    """Attend with queries [rows, heads, head_dim], whose rows may lie apart; returns [rows, heads *
    head_dim]. `positions` are int64 [rows]."""
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    launch = partial(_launch, shape, layer, queries, pool, positions, tiles.tables)
    if tiles.separate is not None:
        assert tiles.partials is not None
        partials, splits = tiles.partials, tiles.separate_splits
        launch(tiles.separate, tiles.rows_max, splits, 0, partials)
        if tiles.shared is not None:
            launch(tiles.shared, shape.tile_rows, tiles.shared_splits, splits, partials)
            splits += tiles.shared_splits
        _merge[(tiles.split_rows, shape.heads)](
            partials.out,
            partials.lse,
            out,
            partials.lse.shape[1],
            splits,
            HEADS=shape.heads,
            HEAD_DIM=shape.head_dim,
            BLOCK_D=_power_of_2(shape.head_dim),
            # each size is a kernel of its own to compile
            BLOCK_S=8 if splits <= 8 else 2 * _SPLITS_MAX,
            num_warps=4,
        )
    if tiles.whole is not None:
        launch(tiles.whole, shape.tile_rows, 1, 0, out)
    return out.view(out.shape[0], -1)


def _launch(
    shape: Shape,
    layer: int,
    queries: torch.Tensor,
    pool: torch.Tensor,
    positions: torch.Tensor,
    tables: torch.Tensor,
    tiles: torch.Tensor,
    rows: int,
    splits: int,
    first_split: int,
    into: torch.Tensor | Partials,
) -> None:
    """Compute tiles of at most `rows` rows, directly into an output or as partial results from
    `first_split` on."""
    is_partial = isinstance(into, Partials)
    out = into.out if isinstance(into, Partials) else into
    window, size = shape.windows[layer], shape.head_dim
    lanes = shape.lanes(rows)
    _attend[(tiles.shape[0], shape.kv_heads, splits)](
        queries,
        pool,
        out,
        into.lse if isinstance(into, Partials) else out,
        tables,
        tiles,
        positions,
        shape.scale,
        shape.softcap or 1.0,
        window,
        queries.stride(0),
        pool.stride(0),
        out.shape[1] if is_partial else 0,
        first_split,
        splits,
        GROUP=shape.group,
        KV_HEADS=shape.kv_heads,
        HEAD_DIM=size,
        BLOCK_TOKENS=shape.block_tokens,
        HAS_SOFTCAP=shape.softcap is not None,
        HAS_WINDOW=window > 0,
        IS_PARTIAL=is_partial,
        BLOCK_M=lanes,
        FIELDS=TILE_FIELDS,
        WIDEN=is_interpreted() and queries.dtype is torch.bfloat16,
        PRECISION="tf32x3",  # of float32: three products of its halves, on tensor cores
        **block_sizes(size, lanes, queries.element_size()),
    )


def block_sizes(head_dim: int, lanes: int, element_size_bytes: int) -> dict[str, int]:
    """The keys per round, with the warps and stages that fit a multiprocessor for tiles of `lanes`
    lanes."""
    wide = max(16, _power_of_2(head_dim))
    key_bytes = wide * element_size_bytes
    return {
        "BLOCK_N": 16 if key_bytes > 512 else 32 if key_bytes > 256 else 64,
        "BLOCK_D": wide,
        "num_warps": 8 if lanes >= 128 else 4,
        "num_stages": 2 if key_bytes > 256 else 3,
    }
