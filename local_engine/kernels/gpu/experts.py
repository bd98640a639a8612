"""Mixtures of experts on a GPU: a step's rows sorted by expert, then one product for all experts,
in Triton.

The choice of experts is only known on the device, so the grid has room for any (as in vLLM's and
SGLang's fused_moe): each program finds its expert from the counts, and a program without an expert
ends at once. So a step's shape does not depend on the choice, and can be captured. A pair is a row
with one of its chosen experts. Knows matrices [experts, outputs, columns], no router. Invariant:
each pair is in exactly one block, of its own expert's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from local_engine.kernels.fused import gate
from local_engine.kernels.supports import is_interpreted

if TYPE_CHECKING:
    from local_engine.kernels.fused import RowKernels

_SCANNED = 1024  # pairs that are looked at together


@triton.jit(do_not_specialize=["pairs"])
def _sort(
    chosen,  # int64 [pairs]: the expert
    order,  # int32 [pairs]: the pairs of expert 0, those of expert 1, ...
    counts,  # int32 [experts]
    pairs,
    BLOCK: tl.constexpr,
):
    expert = tl.program_id(0)
    before = 0
    count = 0
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        choices = tl.load(chosen + at, mask=at < pairs, other=2147483647)
        before += tl.sum((choices < expert).to(tl.int32), 0)
        count += tl.sum((choices == expert).to(tl.int32), 0)
    tl.store(counts + expert, count)
    for first in range(0, pairs, BLOCK):
        at = first + tl.arange(0, BLOCK)
        is_own = tl.load(chosen + at, mask=at < pairs, other=2147483647) == expert
        place = before + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(order + place, at, mask=is_own)
        before += tl.sum(is_own.to(tl.int32), 0)


@triton.jit(do_not_specialize=["experts"])
def _product_each(
    x,  # [pairs / SPREAD, columns]
    weights,  # [experts, outputs, columns]
    order,
    counts,
    shares,  # [pairs]: the factor of a pair's result
    out,  # [pairs, outputs]
    experts,
    columns,
    outputs,
    SPREAD: tl.constexpr,
    HAS_SHARES: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    block = tl.program_id(0)
    lane = tl.arange(0, BLOCK_E)
    each = tl.load(counts + lane, mask=lane < experts, other=0)
    blocks = (each + BLOCK_M - 1) // BLOCK_M
    stops = tl.cumsum(blocks, 0)
    if block >= tl.sum(blocks, 0):
        return
    expert = tl.sum((stops <= block).to(tl.int32), 0)
    is_before = lane < expert
    rank = (block - tl.sum(tl.where(is_before, blocks, 0), 0)) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_pair = rank < tl.sum(tl.where(lane == expert, each, 0), 0)
    pair = tl.load(order + tl.sum(tl.where(is_before, each, 0), 0) + rank, mask=is_pair, other=0).to(tl.int64)
    output = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = output < outputs
    column = tl.arange(0, BLOCK_K)
    x_at = x + (pair // SPREAD)[:, None] * columns + column[None, :]
    weight_at = weights + (expert.to(tl.int64) * outputs + output[None, :]) * columns + column[:, None]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, columns, BLOCK_K):
        is_column = first + column < columns
        inputs = tl.load(x_at + first, mask=is_pair[:, None] & is_column[None, :], other=0.0)
        weight = tl.load(weight_at + first, mask=is_output[None, :] & is_column[:, None], other=0.0)
        if WIDEN:
            acc += tl.dot(inputs.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(inputs, weight, input_precision="tf32x3")
    if HAS_SHARES:
        acc *= tl.load(shares + pair, mask=is_pair, other=0.0).to(tl.float32)[:, None]
    to = out + pair[:, None] * outputs + output[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_pair[:, None] & is_output[None, :])


class GroupedExperts:
    """All experts of a layer. `gate_up` [experts, 2 inner, hidden], `down` [experts, hidden,
    inner]; `native` computes the gate between them."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor, activation: str, native: RowKernels | None) -> None:
        self._gate_up, self._down, self._activation, self._native = gate_up, down, activation, native

    def __call__(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        """The result [rows, hidden] for x [rows, hidden] and each row's choice: experts int64 and
        shares [rows, per_token]."""
        rows, per_token = chosen.shape
        if not rows:
            return torch.empty_like(x)
        experts, pairs = len(self._gate_up), rows * per_token
        order = torch.empty(pairs, dtype=torch.int32, device=x.device)
        counts = torch.empty(experts, dtype=torch.int32, device=x.device)
        chosen, shares = chosen.contiguous(), shares.contiguous()
        _sort[(experts,)](chosen, order, counts, pairs, BLOCK=_SCANNED)
        wide = self._product(x, self._gate_up, order, counts, None, pairs, per_token)
        found = self._product(gate(self._native, wide, self._activation), self._down, order, counts, shares, pairs, 1)
        return found.view(rows, per_token, -1).sum(1)

    def _product(
        self,
        x: torch.Tensor,
        weights: torch.Tensor,
        order: torch.Tensor,
        counts: torch.Tensor,
        shares: torch.Tensor | None,
        pairs: int,
        spread: int,
    ) -> torch.Tensor:
        """The products [pairs, outputs]: each pair's row of x times its expert's matrix, times its
        share."""
        experts, outputs, columns = weights.shape
        out = torch.empty(pairs, outputs, dtype=x.dtype, device=x.device)
        sizes = block_sizes(pairs, experts, x.element_size())
        blocks = min(pairs, pairs // sizes["BLOCK_M"] + experts)
        _product_each[(blocks, triton.cdiv(outputs, sizes["BLOCK_N"]))](
            x,
            weights,
            order,
            counts,
            out if shares is None else shares,
            out,
            experts,
            columns,
            outputs,
            SPREAD=spread,
            HAS_SHARES=shares is not None,
            BLOCK_E=triton.next_power_of_2(experts),
            WIDEN=is_interpreted() and x.dtype is torch.bfloat16,
            **sizes,
        )
        return out


def block_sizes(pairs: int, experts: int, element_size_bytes: int) -> dict[str, int]:
    """The kernel's block sizes: with few pairs per expert it waits for weights, many are multiplied
    in large tiles; 128 bytes of a row are read at once."""
    columns = 128 // element_size_bytes
    if pairs < 64 * experts:
        return {"BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 2 * columns, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": columns, "num_warps": 8, "num_stages": 3}
