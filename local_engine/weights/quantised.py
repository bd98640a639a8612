"""Quantised: a matrix as small codes with a scale and a minimum for each 32 inputs: value = scale *
code + minimum.

This form represents GGUF's Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 exactly, and Q4_K, Q5_K and, with a
scale for each 16 inputs, Q6_K up to the rounding of a product to half precision (formats:
ggml-org/ggml, ggml-common.h). Any float matrix can be quantised to it. Knows arrays, no models.
Invariant: `dequantised` is the oracle of every product with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from local_engine.kernels.cpu import GROUP, PANEL, Kernels

_ROWS_AT_ONCE = 1024
# of a group's range; larger and smaller cuts, more of them and more rounds gain at most 4% of the
# error
_CUT = 1 / 30

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Halves = np.ndarray[Any, np.dtype[np.float16]]


@dataclass(frozen=True, slots=True)
class Quantised:
    """A quantised matrix.

    `codes` are uint8 [rows, columns], below 2 ** `bits`, which is 4, 6 or 8; `scales` and
    `minimums` float16 [rows, columns / 32]. With 6 bits they are for 16 inputs each, and the
    minimum is -32 times the scale. If groups are not of consecutive inputs, `order` int64 [columns]
    is the input of each column of the codes.
    """

    # decision: one-quantised-form
    codes: torch.Tensor
    scales: torch.Tensor
    minimums: torch.Tensor
    bits: int
    order: torch.Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, order: torch.Tensor | slice) -> Quantised:
        """A matrix of the rows that `order` selects, in that order."""
        return Quantised(self.codes[order], self.scales[order], self.minimums[order], self.bits, self.order)

    def dequantised(self) -> torch.Tensor:
        """The values, float32 [rows, columns], with the columns in the inputs' order."""
        values = self.codes.view(*self.scales.shape, -1).float()
        values.mul_(self.scales.float().unsqueeze(-1)).add_(self.minimums.float().unsqueeze(-1))
        values = values.view(self.shape)
        return values if self.order is None else torch.empty_like(values).index_copy_(1, self.order, values)

    def write_to(self, out: torch.Tensor) -> None:
        """Dequantise into a matrix of any number type, some rows at a time, without a whole float32
        matrix."""
        for start in range(0, len(out), _ROWS_AT_ONCE):
            some = slice(start, start + _ROWS_AT_ONCE)
            out[some].copy_(self.rows(some).dequantised())


def bits_of(name: str, bits: int, layers: int) -> int:
    """The bits of a matrix in a model that is quantised to `bits`. In 4 bits, values and the head
    lose most and are small, and the MLPs' down projections come next: these get 8, the down
    projections only in the layers where llama.cpp's Q4_K_M also has more bits: the first and the
    last eighth, and every third of the others."""
    if bits != 4:
        return bits
    if name.endswith("down_proj"):
        layer, eighth = int(name.split(".")[2]), layers // 8
        return 8 if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2 else 4
    return 8 if name.endswith("v_proj") or not name.startswith("model.layers.") else 4


def quantise(values: torch.Tensor, bits: int) -> Quantised:
    """Quantise to 8 bits, symmetric around 0 and to the nearest codes, or to 4 bits with fitted
    scales and minimums."""
    rows, columns = values.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=values.device)
    scales, minimums = (
        torch.empty(rows, columns // GROUP, dtype=torch.float16, device=values.device) for _ in range(2)
    )
    # in float32 a large matrix would be many times what comes of it
    for start in range(0, rows, _ROWS_AT_ONCE):
        batch = slice(start, start + _ROWS_AT_ONCE)
        groups = values[batch].float().view(-1, columns // GROUP, GROUP)
        if bits == 8:
            row_scales = (groups.abs().amax(-1) / 127).half()
            row_minimums = (row_scales.float() * -128).half()
            row_codes = _nearest(groups, row_scales, 0.0).clamp_(-127, 127).add_(128)
        else:
            row_scales, row_minimums = _fitted(groups)
            row_codes = _nearest(groups, row_scales, row_minimums.float().unsqueeze(-1)).clamp_(0, 15)
        codes[batch], scales[batch], minimums[batch] = row_codes.view(-1, columns), row_scales, row_minimums
    return Quantised(codes, scales, minimums, bits)


def _fitted(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minimums for 4-bit codes, the best of three fits for each group by squared error.
    The fits round to codes between the group's ends, or with either end cut by a thirtieth, and lay
    a line through the values by least squares."""
    lowest, highest = groups.aminmax(dim=-1)
    best = torch.full_like(lowest, torch.inf)
    scales, minimums = (torch.zeros_like(lowest, dtype=torch.float16) for _ in range(2))
    for below, above in ((0.0, 0.0), (_CUT, 0.0), (0.0, _CUT)):
        steps, start = (highest - lowest) * ((1 - below - above) / 15), lowest + (highest - lowest) * below
        codes = _nearest(groups, steps, start.unsqueeze(-1)).clamp_(0, 15)
        sums, products = codes.sum(-1), torch.linalg.vecdot(groups, codes)
        totals, spread = groups.sum(-1), GROUP * torch.linalg.vecdot(codes, codes) - sums.square()
        own_scales = ((GROUP * products - totals * sums) / spread.clamp(min=1.0)).half()
        own_minimums = ((totals - own_scales.float() * sums) / GROUP).half()
        codes = _nearest(groups, own_scales, own_minimums.float().unsqueeze(-1)).clamp_(0, 15)
        errors = codes.mul_(own_scales.float().unsqueeze(-1)).add_(own_minimums.float().unsqueeze(-1))
        errors = errors.sub_(groups).square_().sum(-1)
        is_better = errors < best
        best = torch.where(is_better, errors, best)
        scales, minimums = torch.where(is_better, own_scales, scales), torch.where(is_better, own_minimums, minimums)
    return scales, minimums


def joined(parts: list[Quantised]) -> Quantised:
    """Stack several matrices into one. All have the same bits, in groups of consecutive inputs."""
    if len(parts) == 1:
        return parts[0]
    codes, scales, minimums = (
        torch.cat(own) for own in zip(*((p.codes, p.scales, p.minimums) for p in parts), strict=True)
    )
    return Quantised(codes, scales, minimums, parts[0].bits)


def _nearest(groups: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor | float) -> torch.Tensor:
    steps = scales.float().unsqueeze(-1)
    return (groups - minimums).div_(torch.where(steps == 0, 1.0, steps)).round_()


def packed(matrix: Quantised, native: Kernels) -> torch.Tensor:
    """The matrix in the native product's layout, uint8 [panels, groups, bytes] (matmul.cpp)."""
    rows, columns = matrix.shape
    size_bytes = PANEL * GROUP * matrix.bits // 8 + 4 * PANEL
    out = torch.empty(-(-rows // PANEL), columns // GROUP, size_bytes, dtype=torch.uint8)
    codes, scales, minimums = (t.contiguous() for t in (matrix.codes, matrix.scales, matrix.minimums))
    native.pack(matrix.bits, codes.data_ptr(), scales.data_ptr(), minimums.data_ptr(), out.data_ptr(), rows, columns)
    return out


def packed_bfloat16(weight: torch.Tensor, native: Kernels) -> torch.Tensor:
    """Floats [rows, columns] as bfloat16 in the native product's layout: [panels, columns / 2, 16
    rows, 2]."""
    rows, columns = weight.shape
    out = torch.empty(-(-rows // PANEL), columns // 2, PANEL, 2, dtype=torch.bfloat16)
    for start in range(0, rows, _ROWS_AT_ONCE):  # whole panels
        some = weight[start : start + _ROWS_AT_ONCE].to(torch.bfloat16).contiguous()
        native.pack_pairs(some.data_ptr(), out[start // PANEL :].data_ptr(), len(some), columns // 2)
    return out


class QuantisedProduct:
    """y = x W^T + b with W as codes of 4 or 8 bits on a GPU (kernels/gpu/product.py)."""

    def __init__(self, matrix: Quantised, device: torch.device) -> None:
        """`matrix` has whole groups."""
        from local_engine.kernels.gpu.product import halves, product

        self.outputs = matrix.shape[0]
        self.bias: torch.Tensor | None = None
        self._bits, self.form = matrix.bits, f"{matrix.bits} bits"
        codes = matrix.codes.to(device)
        self._codes = (codes if matrix.bits == 8 else halves(codes)).contiguous()
        self._scales = matrix.scales.contiguous().to(device)
        self._minimums = matrix.minimums.contiguous().to(device)
        self.size_bytes = self._codes.nbytes + self._scales.nbytes + self._minimums.nbytes
        self._order = None if matrix.order is None else matrix.order.to(device)
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if self._order is None else x.index_select(1, self._order)
        return self._product(x, self._codes, self._scales, self._minimums, self.bias, self._bits)


# -- GGUF's blocks -----------------------------------------------------------------------------------------------------


def from_gguf(raw: Bytes, kind: str, shape: tuple[int, ...]) -> Quantised | None:
    """A tensor's raw bytes [rows, bytes of a row] of the ggml type `kind`, without requantisation;
    None for unsupported types. Further dimensions count as rows."""
    reader = {
        **dict.fromkeys(("Q4_0", "Q4_1", "Q5_0", "Q5_1"), _q4_q5),
        "Q8_0": _q8,
        **dict.fromkeys(("Q4_K", "Q5_K"), _qk),
        "Q6_K": _q6,
    }.get(kind)
    if reader is None or len(shape) < 2:
        return None
    codes, scales, minimums = reader(raw, kind)
    rows, columns = math.prod(shape[:-1]), shape[-1]
    bits = {"4": 4, "6": 6}.get(kind[1], 8)
    size = GROUP // 2 if bits == 6 else GROUP
    return Quantised(
        torch.from_numpy(np.ascontiguousarray(codes)).view(rows, columns),
        torch.from_numpy(np.ascontiguousarray(scales)).view(rows, columns // size),
        torch.from_numpy(np.ascontiguousarray(minimums)).view(rows, columns // size),
        bits,
    )


Blocks = tuple[Bytes, Halves, Halves]


def _halves(blocks: Bytes, offset: int) -> Halves:
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16)


def _nibbles(packed: Bytes) -> Bytes:
    """Unpack [blocks, n] to [blocks, 2n], low halves first."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=-1).astype(np.uint8, copy=False)


def _q4_q5(raw: Bytes, kind: str) -> Blocks:
    has_fifth, has_minimum = kind[1] == "5", kind[-1] == "1"
    blocks = raw.reshape(-1, 18 + 4 * has_fifth + 2 * has_minimum)
    scales, codes = _halves(blocks, 0), _nibbles(blocks[:, -16:])
    middle = np.float16(-16 if has_fifth else -8)
    minimums: Halves = _halves(blocks, 2) if has_minimum else (scales * middle).astype(np.float16)
    if has_fifth:
        codes |= np.unpackbits(blocks[:, -20:-16], axis=1, bitorder="little") << 4
    return codes, scales, minimums


def _q8(raw: Bytes, kind: str) -> Blocks:
    blocks = raw.reshape(-1, 34)
    scales = _halves(blocks, 0)
    return (blocks[:, 2:] ^ 0x80).astype(np.uint8, copy=False), scales, (scales * np.float16(-128)).astype(np.float16)


def _qk(raw: Bytes, kind: str) -> Blocks:
    """256 values: a half-precision scale and minimum for all, 6-bit ones for each 32, and codes of
    4 or 5 bits."""
    blocks = raw.reshape(-1, 144 if kind == "Q4_K" else 176)
    small = blocks[:, 4:16].reshape(-1, 3, 4)
    low, middle, high = small[:, 0], small[:, 1], small[:, 2]
    sixes = np.concatenate((low & 63, (high & 15) | ((low >> 6) << 4)), axis=1)
    minima = np.concatenate((middle & 63, (high >> 4) | ((middle >> 6) << 4)), axis=1)
    scales = (_halves(blocks, 0).astype(np.float32) * sixes).astype(np.float16)
    minimums = (-_halves(blocks, 2).astype(np.float32) * minima).astype(np.float16)
    codes = _nibbles(blocks[:, -128:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    if kind == "Q5_K":
        bits = (blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
        codes = (codes | (bits << 4)).astype(np.uint8, copy=False)
    return codes, scales, minimums


def _q6(raw: Bytes, kind: str) -> Blocks:
    """256 values: the lower four bits, the upper two, an 8-bit scale for each 16, and a
    half-precision scale for all."""
    blocks = raw.reshape(-1, 210)
    lower, upper = blocks[:, :128].reshape(-1, 2, 64), blocks[:, 128:192].reshape(-1, 2, 1, 32)
    twos = (upper >> np.array([0, 2, 4, 6], np.uint8)[:, None]) & 3
    codes = _nibbles(lower) | (twos.reshape(-1, 2, 128) << 4)
    small = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32)
    scales = (_halves(blocks, 208).astype(np.float32) * small).astype(np.float16)
    return codes.astype(np.uint8, copy=False), scales, (scales * np.float16(-32)).astype(np.float16)
