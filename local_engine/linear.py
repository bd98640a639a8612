"""Linear: one matrix, multiplied by the best means its device has.

On a CPU oneDNN multiplies a matrix it has packed beforehand about twice as fast as one it must repack on every call
(measured at 1 to 8 rows), with the same result; torch offers that through `torch.ops.mkldnn`, the operators its own
compiler emits. Where they are missing or disagree with the plain product, the plain product it is. Knows no model.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as functional

_ROWS_HINT = 32  # packing optimises for this many rows; other counts are as exact and about as fast


class Linear:
    """y = x W^T + b. Fill `weight` and `bias`, then `prepare` once, then call."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def prepare(self, *, keeps_weight: bool = False) -> None:
        """Repack for the fastest kernel there is. The plain weight is given up unless something else needs it too."""
        if self.weight.device.type == "cpu" and can_pack(self.weight.dtype):
            self._packed = _operators()._reorder_linear_weight(self.weight, _ROWS_HINT)
            if not keeps_weight:
                self.weight = torch.empty(0)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return functional.linear(x, self.weight, self.bias)
        product: torch.Tensor = _operators()._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return product


def _operators() -> Any:
    return torch.ops.mkldnn


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine multiply packed matrices of that type, and get the same as without packing."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        packed = _operators()._reorder_linear_weight(weight, _ROWS_HINT)
        found = _operators()._linear_pointwise(x, packed, None, "none", [], "")
    except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    return torch.allclose(found, functional.linear(x, weight), rtol=1e-2, atol=1e-2)
