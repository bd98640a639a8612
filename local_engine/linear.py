"""Linear: one matrix, multiplied by the best means its device has.

Quantised matrices stay quantised where the native product serves them; bfloat16 goes to the native product where the
processor multiplies bfloat16 pairs and has no matrix unit (AMX), which oneDNN uses better; other matrices on a CPU are
packed for oneDNN beforehand, which is about twice as fast as repacking at every call (measured at 1 to 8 rows). The plain
product is the fall-back and the oracle. Knows no model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional

from local_engine.native import GROUP, Kernels, kernels, kind_of
from local_engine.quantised import Quantised, joined, packed, packed_bfloat16, quantise

_ROWS_HINT = 32  # oneDNN's packing optimises for this many rows; other counts are as exact and about as fast
_DEQUANTISED_FROM = 16  # rows from which quantised matrices are multiplied panel by panel in bfloat16
_BFLOAT16_TO_FLOAT32 = 2  # the product's kind beside those of `kind_of`
_ROWS_ALL = (1 << 31) - 1


class Linear:
    """y = x W^T + b. Its rows come in parts, the checkpoint's tensors. `put` each, `prepare` once, then call.

    `bits`: what wider parts are quantised to where the native product can be used; None leaves all as they are.
    `is_batch_invariant`: one order of sums for any number of rows. `is_head`: its result is float32 where the native
    product gives it; logits lie so close together that half precision would make some equal.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        columns: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        has_bias: bool = False,
        bits: int | None = None,
        is_batch_invariant: bool = False,
        is_head: bool = False,
    ) -> None:
        self.rows, self.columns = rows, columns
        self.size_bytes = 0
        self.is_native = False
        self._is_head = is_head
        self._dequantised_from = _ROWS_ALL if is_batch_invariant else _DEQUANTISED_FROM
        self.bias = torch.empty(sum(rows), dtype=dtype, device=device) if has_bias else None
        self._dtype, self._device = dtype, device
        self._native = native_for(device, dtype)
        self._bits = bits if self._native is not None and columns % GROUP == 0 else None
        self._parts: list[torch.Tensor | Quantised | None] = [None] * len(rows)
        self._multiply: Callable[[torch.Tensor], torch.Tensor] | None = None

    def put(self, index: int, value: torch.Tensor | Quantised) -> None:
        """Take a part's weight, [rows[index], columns]."""
        if isinstance(value, Quantised):
            is_kept = self._bits is None or value.bits <= self._bits
            self._parts[index] = value if is_kept else quantise(value.dequantised(), self._bits or value.bits)
        else:
            self._parts[index] = quantise(value, self._bits) if self._bits else value.to(self._dtype, copy=True)

    def prepare(self) -> None:
        """After the last part: lay the weight out for the fastest product there is, and give the parts up."""
        parts = [part for part in self._parts if part is not None]
        native = self._native
        if native is not None and self.columns % GROUP == 0 and any(isinstance(part, Quantised) for part in parts):
            whole = joined([part if isinstance(part, Quantised) else quantise(part, 8) for part in parts])
            self._multiply = self._native_product(native, packed(whole), whole.bits)
        else:
            floats = [part.dequantised().to(self._dtype) if isinstance(part, Quantised) else part for part in parts]
            weight = (torch.cat(floats) if len(floats) > 1 else floats[0]).to(self._device)
            if native is not None and weight.dtype == torch.bfloat16 and has_pairs() and self.columns % 4 == 0:
                self._multiply = self._native_product(native, packed_bfloat16(weight), 16)
            else:
                self._multiply = self._torch_product(weight)
        self._parts = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert self._multiply is not None, "prepare() was not called"
        return self._multiply(x)

    def _native_product(self, native: Kernels, weight: torch.Tensor, bits: int) -> Callable[..., torch.Tensor]:
        self.size_bytes, self.is_native = weight.nbytes, True
        many = self._dequantised_from
        out_dtype = torch.float32 if self._is_head else self._dtype
        kind = kind_of(self._dtype) if out_dtype == self._dtype else _BFLOAT16_TO_FLOAT32
        columns, outputs = self.columns, sum(self.rows)
        self.bias = bias = None if self.bias is None else self.bias.float()

        def multiply(x: torch.Tensor) -> torch.Tensor:
            x = x.contiguous()
            bias_at = None if bias is None else bias.data_ptr()
            out = torch.empty(x.shape[0], outputs, dtype=out_dtype)
            rows = x.shape[0]
            native.product(
                kind, bits, x.data_ptr(), weight.data_ptr(), bias_at, out.data_ptr(), rows, columns, outputs, many
            )
            return out

        return multiply

    def _torch_product(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        self.size_bytes = weight.nbytes
        bias = self.bias
        if self._device.type != "cpu" or not can_pack(self._dtype):
            return lambda x: functional.linear(x, weight, bias)
        operators, repacked = _operators(), _operators()._reorder_linear_weight(weight, _ROWS_HINT)
        return lambda x: operators._linear_pointwise(x, repacked, bias, "none", [], "")


def native_for(device: torch.device, dtype: torch.dtype) -> Kernels | None:
    """The native kernels, where they serve this device and type."""
    return kernels() if device.type == "cpu" and kind_of(dtype) is not None else None


@cache
def has_pairs() -> bool:
    """Whether the native product is the best for bfloat16: the processor multiplies pairs, and has no matrix unit."""
    info = Path("/proc/cpuinfo")
    flags = info.read_text() if info.is_file() else ""
    return "avx512_bf16" in flags and "amx_bf16" not in flags


def _operators() -> Any:
    return torch.ops.mkldnn


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine multiply matrices packed for oneDNN, and get the same as without packing."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        repacked = _operators()._reorder_linear_weight(weight, _ROWS_HINT)
        found = _operators()._linear_pointwise(x, repacked, None, "none", [], "")
    except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    return torch.allclose(found, functional.linear(x, weight), rtol=1e-2, atol=1e-2)
