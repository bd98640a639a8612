"""Products with quantised matrices on a GPU, in Triton: codes are dequantised in registers.

For decodes, which wait for weights to arrive: half the bytes of bfloat16 at 8 bits, a quarter at 4.
Knows a matrix as codes with a scale and a minimum for each 32 inputs, no model. Invariant: a weight
is scale * code + minimum, rounded to the input's type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from local_engine.kernels.cpu import GROUP
from local_engine.kernels.supports import is_interpreted

_OUTPUTS = 64  # of a program
_GROUPS = 4  # of a round: 128 bytes of 8-bit codes in a row of memory
BITS = (4, 8)


@triton.jit
def _each(of_groups, RUN: tl.constexpr):
    """Repeat [groups, outputs] to float32 [groups * RUN, outputs]: each group's number for all of
    its bytes."""
    GROUPS: tl.constexpr = of_groups.shape[0]
    OUTPUTS: tl.constexpr = of_groups.shape[1]
    wide = tl.broadcast_to(of_groups.to(tl.float32)[:, None, :], (GROUPS, RUN, OUTPUTS))
    return tl.reshape(wide, (GROUPS * RUN, OUTPUTS))


@triton.jit(do_not_specialize=["rows"])
def _product(
    x,  # [rows, columns]
    codes,  # uint8 [outputs, columns * BITS / 8]
    scales,  # float16 [outputs, columns / GROUP]
    minimums,  # the same
    bias,  # [outputs]
    out,  # [rows, outputs]
    rows,
    columns,
    row_bytes,  # of codes
    groups,  # of a row
    outputs,
    HAS_BIAS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
):
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_output = row < rows, output < outputs
    # bytes of a group: with 4 bits its first half lies in the low halves
    RUN: tl.constexpr = GROUP * BITS // 8
    ROUND: tl.constexpr = BLOCK_K // GROUP
    byte = tl.arange(0, BLOCK_K * BITS // 8)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, row_bytes, BLOCK_K * BITS // 8):
        at = first + byte
        is_in = at < row_bytes
        column = at if BITS == 8 else at // RUN * GROUP + at % RUN
        is_code = is_output[None, :] & is_in[:, None]
        code = tl.load(codes + output[None, :].to(tl.int64) * row_bytes + at[:, None], mask=is_code, other=0)
        group = first // RUN + tl.arange(0, ROUND)
        where = output[None, :].to(tl.int64) * groups + group[:, None]
        is_group = is_output[None, :] & (group < groups)[:, None]
        scale = _each(tl.load(scales + where, mask=is_group, other=0.0), RUN)
        minimum = _each(tl.load(minimums + where, mask=is_group, other=0.0), RUN)
        x_at = x + row[:, None].to(tl.int64) * columns + column[None, :]
        is_x = is_row[:, None] & is_in[None, :]
        inputs = tl.load(x_at, mask=is_x, other=0.0)
        if BITS == 4:
            weight = ((code & 15).to(tl.float32) * scale + minimum).to(inputs.dtype)
            more = tl.load(x_at + RUN, mask=is_x, other=0.0)
            high = ((code >> 4).to(tl.float32) * scale + minimum).to(inputs.dtype)
            if WIDEN:
                acc += tl.dot(more.to(tl.float32), high.to(tl.float32), input_precision="ieee")
            else:
                acc += tl.dot(more, high, input_precision="ieee")
        else:
            weight = (code.to(tl.float32) * scale + minimum).to(inputs.dtype)
        if WIDEN:
            acc += tl.dot(inputs.to(tl.float32), weight.to(tl.float32), input_precision="ieee")
        else:
            acc += tl.dot(inputs, weight, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = out + row[:, None].to(tl.int64) * outputs + output[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


def product(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    minimums: torch.Tensor,
    bias: torch.Tensor | None,
    bits: int,
) -> torch.Tensor:
    """x [rows, columns] times a matrix of codes, packed by `halves` if they have 4 bits. Returns
    [rows, outputs] of x's type."""
    (rows, columns), outputs = x.shape, len(codes)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    lanes = min(64, max(16, triton.next_power_of_2(rows)))
    if rows:
        _product[(triton.cdiv(outputs, _OUTPUTS), triton.cdiv(rows, lanes))](
            x,
            codes,
            scales,
            minimums,
            scales if bias is None else bias,
            out,
            rows,
            columns,
            codes.shape[1],
            scales.shape[1],
            outputs,
            HAS_BIAS=bias is not None,
            BITS=bits,
            GROUP=GROUP,
            BLOCK_M=lanes,
            BLOCK_N=_OUTPUTS,
            BLOCK_K=GROUP * _GROUPS,
            WIDEN=is_interpreted() and x.dtype is torch.bfloat16,
            num_warps=4,
            num_stages=3,
        )
    return out


def halves(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes below 16, two per byte: the first half of each group in the low bits, the second
    in the high bits."""
    groups = codes.view(codes.shape[0], -1, 2, GROUP // 2)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).view(codes.shape[0], -1)
