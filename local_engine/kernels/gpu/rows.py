"""The operations between a layer's matrices, each in one pass over its rows: norm, gate, and
rotate-and-store, in Triton.

The torch forms in `kernels.fused` are the oracle. Sums and products are in float32 and rounded
once. Knows rows, no weights' meaning.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from local_engine.kernels.supports import is_interpreted


@triton.jit
def _add_norm(x, more, weight, out, epsilon, width, HAS_MORE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * width
    column = tl.arange(0, BLOCK)
    is_in = column < width
    value = tl.load(x + at + column, mask=is_in, other=0.0)
    if HAS_MORE:
        added = value.to(tl.float32) + tl.load(more + at + column, mask=is_in, other=0.0).to(tl.float32)
        value = added.to(value.dtype)  # the norm is of what is stored
        tl.store(x + at + column, value, mask=is_in)
    wide = value.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / width + epsilon)
    factor = tl.load(weight + column, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + at + column, (wide * scale * factor).to(out.dtype.element_ty), mask=is_in)


def add_norm(x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x += more, in place; returns its RMSNorm (arXiv:1910.07467). [rows, width], contiguous."""
    out = torch.empty_like(x)
    rows, width = x.shape
    if rows:
        _add_norm[(rows,)](
            x,
            x if more is None else more,
            weight,
            out,
            epsilon,
            width,
            HAS_MORE=more is not None,
            BLOCK=triton.next_power_of_2(width),
            num_warps=8 if width > 2048 else 4,
        )
    return out


@triton.jit
def _gate(gate_up, out, width, IS_GELU: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < width
    x = tl.load(gate_up + row * 2 * width + column, mask=is_in, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=is_in, other=0.0).to(tl.float32)
    if IS_GELU:  # tanh(z) = 1 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        activated = 0.5 * x * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    else:
        activated = x / (1.0 + tl.exp(-x))
    tl.store(out + row * width + column, (activated * up).to(out.dtype.element_ty), mask=is_in)


def gate(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up of [rows, gate and up side by side]; `activation` silu or gelu_tanh
    (arXiv:2002.05202)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(1024, triton.next_power_of_2(width))
        _gate[(rows, triton.cdiv(width, block))](gate_up, out, width, IS_GELU=activation == "gelu_tanh", BLOCK=block)
    return out


@triton.jit(do_not_specialize=["positions", "slots"])
def _rotate_write(
    qkv,
    pool,
    norm,
    cos,
    sin,
    positions,
    slots,
    epsilon,
    head_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = HEAD_DIM // 2
    ROTATED: tl.constexpr = HEADS + KV_HEADS
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    is_dim = dim < HALF
    is_in = is_dim & (head < ROTATED + KV_HEADS)
    first_half = qkv + (row * (ROTATED + KV_HEADS) + head) * HEAD_DIM + dim
    first = tl.load(first_half, mask=is_in, other=0.0)
    second = tl.load(first_half + HALF, mask=is_in, other=0.0)
    x, y = first.to(tl.float32), second.to(tl.float32)
    is_rotated = head < ROTATED
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / HEAD_DIM + epsilon)
        factor = norm + head * HEAD_DIM + dim
        x *= scale[:, None] * tl.load(factor, mask=is_dim & is_rotated, other=0.0).to(tl.float32)
        y *= scale[:, None] * tl.load(factor + HALF, mask=is_dim & is_rotated, other=0.0).to(tl.float32)
    angle = tl.load(positions + row) * HEAD_DIM + dim
    x_cos = tl.load(cos + angle, mask=is_dim, other=0.0).to(tl.float32)
    y_cos = tl.load(cos + angle + HALF, mask=is_dim, other=0.0).to(tl.float32)
    x_sin = tl.load(sin + angle, mask=is_dim, other=0.0).to(tl.float32)
    y_sin = tl.load(sin + angle + HALF, mask=is_dim, other=0.0).to(tl.float32)
    first = tl.where(is_rotated, (x * x_cos + y * x_sin).to(first.dtype), first)
    second = tl.where(is_rotated, (y * y_cos + x * y_sin).to(first.dtype), second)
    tl.store(first_half, first, mask=is_in & (head < HEADS))
    tl.store(first_half + HALF, second, mask=is_in & (head < HEADS))
    slot = tl.load(slots + row + head * 0)
    is_kept = is_in & (head >= HEADS) & (slot >= 0)
    page = pool + (head - HEADS).to(tl.int64) * head_stride + slot * HEAD_DIM + dim
    tl.store(page, first, mask=is_kept)
    tl.store(page + HALF, second, mask=is_kept)


def rotate_write(
    qkv: torch.Tensor,
    pool: torch.Tensor,
    norm: torch.Tensor | None,
    epsilon: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Normalise (`norm` [heads + kv_heads, head_dim]) and rotate the q of qkv [rows, heads + 2
    kv_heads, head_dim] in place; write its k, likewise, and its v into the pool [2 kv_heads,
    blocks, block_tokens, head_dim]. `cos` and `sin` are the tables of all positions; a row with a
    negative slot stores nothing."""
    rows, all_heads, size = qkv.shape
    kv_heads = pool.shape[0] // 2
    if rows:
        _rotate_write[(rows,)](
            qkv,
            pool,
            cos if norm is None else norm,
            cos,
            sin,
            positions,
            slots,
            epsilon,
            pool.stride(0),
            HEADS=all_heads - 2 * kv_heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=size,
            HAS_NORM=norm is not None,
            BLOCK_H=triton.next_power_of_2(all_heads),
            BLOCK_D=triton.next_power_of_2(size // 2),
            num_warps=4,
        )


@triton.jit
def _to_fp8(x, codes, scales, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([BLOCK], tl.float32)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value))
    scale = tl.maximum(tl.max(largest, 0), 1e-12) / 448.0
    tl.store(scales + row, scale)
    for first in range(0, width, BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * width + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(codes + row * width + at, (value / scale).to(codes.dtype.element_ty), mask=at < width)


def to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, width], contiguous, as e4m3 with a scale for each row, float32 [rows, 1]."""
    rows, width = x.shape
    # the interpreter rounds 31 to 16: there the last step is torch's
    dtype = torch.float32 if is_interpreted() else torch.float8_e4m3fn
    codes = torch.empty(rows, width, dtype=dtype, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if rows:
        _to_fp8[(rows,)](x.contiguous(), codes, scales, width, BLOCK=min(4096, triton.next_power_of_2(width)))
    return codes.to(torch.float8_e4m3fn), scales
