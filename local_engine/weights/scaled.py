"""Scaled: a matrix as 8-bit floats with a scale for each row, multiplied with inputs rounded
likewise (W8A8).

The type is e4m3 (arXiv:2209.05433). Each input row gets its own scale at run time, so that no row
of a step depends on another. Knows arrays and torch's product of 8-bit floats, no models.
Invariant: `dequantised` is the oracle of every product with it, up to the rounding of the inputs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache

import torch

from local_engine.kernels.supports import FP8_CAPABILITY, supports
from local_engine.weights.quantised import Quantised

E4M3_MAX = 448.0
ALIGNMENT = 16  # torch's product takes multiples of this as rows and columns
_SCALE_MIN = 1e-12
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scaled:
    """`codes` float8_e4m3fn [rows, columns], `scales` float32 [rows, 1]: value = code * scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def rows(self, order: torch.Tensor | slice) -> Scaled:
        """A matrix of the rows that `order` selects, in that order."""
        return Scaled(self.codes.view(torch.uint8)[order].view(self.codes.dtype), self.scales[order])

    def dequantised(self) -> torch.Tensor:
        """The values, float32 [rows, columns]."""
        return self.codes.float().mul_(self.scales)

    def write_to(self, out: torch.Tensor) -> None:
        """Dequantise into a matrix of any number type."""
        out.copy_(self.dequantised())

    def on(self, device: torch.device) -> Scaled:
        """A copy on `device`."""
        return Scaled(self.codes.to(device, copy=True), self.scales.to(device, copy=True))


Weights = torch.Tensor | Quantised | Scaled


def rows_of(values: Weights, order: torch.Tensor | slice) -> Weights:
    """The rows that `order` selects, in that order, of a matrix in any form."""
    return values[order] if isinstance(values, torch.Tensor) else values.rows(order)


def to_scaled(values: torch.Tensor) -> Scaled:
    """The nearest codes, with each row's largest value at the type's largest."""
    if supports(values.device, "fp8"):
        from local_engine.kernels.gpu.rows import to_fp8

        return Scaled(*to_fp8(values))
    wide = values.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(_SCALE_MIN) / E4M3_MAX
    return Scaled((wide / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), scales)


def joined(parts: list[Scaled]) -> Scaled:
    """Stack several matrices into one."""
    codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
    return Scaled(codes.view(torch.float8_e4m3fn), torch.cat([part.scales for part in parts]))


class ScaledProduct:
    """y = x W^T + b with W and x as 8-bit floats."""

    form = "8-bit floats"

    def __init__(self, matrix: Scaled) -> None:
        self.outputs = matrix.shape[0]
        self.size_bytes = matrix.codes.nbytes + matrix.scales.nbytes
        self.bias: torch.Tensor | None = None
        self._codes, self._scales = matrix.codes.contiguous().t(), matrix.scales.view(1, -1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not len(x):
            return x.new_empty(0, self.outputs)
        own = to_scaled(x)
        out = torch._scaled_mm(
            own.codes, self._codes, scale_a=own.scales, scale_b=self._scales, out_dtype=torch.bfloat16
        )
        return out.to(x.dtype) if self.bias is None else (out + self.bias).to(x.dtype)


@cache
def multiplies_fp8(device: torch.device) -> bool:
    """Whether torch multiplies 8-bit floats here, and correctly: Ada, Hopper and later, and CPUs,
    slowly."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < FP8_CAPABILITY:
        return False
    generator = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(rows, 64, generator=generator).to(device) for rows in (48, 3))
    matrix = to_scaled(weight)
    try:
        product = ScaledProduct(matrix)(x)
    except (RuntimeError, AttributeError, TypeError) as error:
        _log.warning("8-bit floats are not multiplied on %s: %s", device, error)
        return False
    wanted = to_scaled(x).dequantised() @ matrix.dequantised().T
    return bool((product - wanted).abs().max() <= 0.02 * wanted.abs().max())
