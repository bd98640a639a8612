"""Linear: one matrix, multiplied by the fastest product of its device.

Quantised matrices stay quantised if the native product, or Triton's on a GPU, supports them;
bfloat16 uses the native product if the processor multiplies bfloat16 pairs and lacks a matrix unit
(AMX), which oneDNN uses better; other matrices on a CPU are packed for oneDNN beforehand, about
twice as fast as repacking at every call (measured at 1 to 8 rows). The plain product is the
fall-back and the oracle. Knows no model.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as functional

from local_engine.kernels.cpu import GROUP, PANEL, Kernels, Matrix, cpu_flags, kind_of, native_for
from local_engine.kernels.supports import supports
from local_engine.weights import scaled
from local_engine.weights.quantised import Quantised, QuantisedProduct, joined, packed, packed_bfloat16, quantise
from local_engine.weights.scaled import Scaled, ScaledProduct, to_scaled

# oneDNN's packing optimises for this many rows; other counts are as exact and about as fast
_ROWS_HINT = 32
# rows from which quantised matrices are multiplied panel by panel in bfloat16
_DEQUANTISED_FROM = 16
_BFLOAT16_TO_FLOAT32 = 2  # the product's kind beside those of `kind_of`
_ROWS_ALL = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions:
    """The form in which a matrix is stored and multiplied.

    `fp8`: 8-bit floats are `kept` if a GPU multiplies them, or other weights are rounded to them,
    too (`made`), on any device. `is_batch_invariant`: one order of sums for any number of rows.
    `is_head`: the result is float32 if the native product supports it; logits lie so close together
    that half precision would make some equal.
    """

    dtype: torch.dtype
    device: torch.device
    fp8: Literal["never", "kept", "made"] = "never"
    is_batch_invariant: bool = False
    is_head: bool = False


class Linear:
    """y = x W^T + b. The rows come in parts, the checkpoint's tensors. `load` each part, `prepare`
    once, then call.

    `bits`: wider parts are quantised to these bits, one number for each part, if the native product
    is available; None leaves all unchanged.
    """

    def __init__(
        self,
        rows: tuple[int, ...],
        columns: int,
        options: LinearOptions,
        *,
        has_bias: bool = False,
        bits: Many[int] | None = None,
    ) -> None:
        dtype, device = options.dtype, options.device
        self.rows, self.columns = rows, columns
        self.bias = torch.empty(sum(rows), dtype=dtype, device=device) if has_bias else None
        self._out_dtype = torch.float32 if options.is_head else dtype
        # decision: batch-invariant
        self._dequantised_from = _ROWS_ALL if options.is_batch_invariant else _DEQUANTISED_FROM
        self._dtype, self._device = dtype, device
        self._native = native_for(device, dtype)
        self._is_on_gpu = supports(device, "product") and columns % GROUP == 0
        is_aligned = columns % scaled.ALIGNMENT == 0 and all(count % scaled.ALIGNMENT == 0 for count in rows)
        can_fp8 = is_aligned and (options.fp8 == "made" or (options.fp8 == "kept" and device.type == "cuda"))
        self._makes_fp8 = is_aligned and options.fp8 == "made"
        self._keeps_fp8 = can_fp8 and scaled.multiplies_fp8(device)
        self._can_pack = device.type == "cpu" and not self._is_on_gpu
        is_native = self._native is not None and columns % GROUP == 0
        self._bits = bits if is_native or self._is_on_gpu else None
        self._parts: list[_Part | None] = [None] * len(rows)
        self._products: list[Product] = []

    @property
    def size_bytes(self) -> int:
        return sum(product.size_bytes for product in self._products)

    @property
    def is_native(self) -> bool:
        return all(isinstance(product, NativeProduct) for product in self._products)

    def native_products(self) -> list[NativeProduct] | None:
        """The products of all parts in the order of their outputs; None unless all are native."""
        found = [p for p in self._products if isinstance(p, NativeProduct) and p.order is None]
        return found if len(found) == len(self._products) else None

    @property
    def whole(self) -> torch.Tensor | None:
        """The matrix, if it is a single row-major one of floats without a bias, else None; it may
        be moved elsewhere."""
        product = self._products[0]
        is_whole = len(self._products) == 1 and self.bias is None
        return product.weight if is_whole and isinstance(product, _Torch) and not product.is_packed else None

    @whole.setter
    def whole(self, weight: torch.Tensor) -> None:
        product = self._products[0]
        assert isinstance(product, _Torch)
        product.weight = weight

    def forms(self) -> list[str]:
        """The form of each product's weights: "4 bits", "8 bits", or a number type."""
        return [product.form for product in self._products]

    def holds(self, index: int, value: torch.Tensor | Quantised | Scaled) -> bool:
        """Whether a part keeps its values up to the number type's rounding, because it is not
        quantised further."""
        return self._bits is None or (isinstance(value, Quantised) and value.bits <= self._bits[index])

    def load(self, index: int, value: torch.Tensor | Quantised | Scaled) -> None:
        """Load a part's weight, [rows[index], columns]. The last part lays all out for the fastest
        product and frees the parts, so that a model is in memory only once while it is read."""
        if self._bits is not None and not self.holds(index, value):
            value = value if isinstance(value, torch.Tensor) else value.dequantised()
            value = quantise(value.to(self._device), self._bits[index])
        self._parts[index] = self._as_held(value)
        if all(part is not None for part in self._parts):
            for run in _runs([part for part in self._parts if part is not None]):
                self._products.append(self._product(run))
            self._parts = []

    def prepare(self) -> None:
        """Prepare the products, after the last part and the bias."""
        assert self._products, "a part is missing"
        if self.bias is None:
            return
        outputs = [product.outputs for product in self._products]
        for product, bias in zip(self._products, torch.split(self.bias, outputs), strict=True):
            product.bias = bias.float() if isinstance(product, NativeProduct) else bias

    @property
    def has_rows(self) -> bool:
        """Whether single rows can be read from the product's layout, so that a tied embedding needs
        no copy."""
        (product, *others) = self._products
        is_plain = isinstance(product, NativeProduct) and product.order is None
        return not others and (is_plain or (isinstance(product, _Torch) and not product.is_packed))

    def take_rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows with these ids, [ids, columns]. Call it only if the matrix `has_rows`."""
        (product,) = self._products
        assert isinstance(product, NativeProduct | _Torch)
        return product.take_rows(ids)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._products) == 1:
            return self._products[0](x)
        return torch.cat([product(x) for product in self._products], -1)

    def _as_held(self, value: torch.Tensor | Quantised | Scaled) -> _Part:
        """A part in its product's form, as a copy of `value`; on a GPU its codes stay until they go
        there."""
        native = self._native
        if isinstance(value, Scaled) and self._keeps_fp8:
            return value.on(self._device)
        if isinstance(value, Scaled) or (self._makes_fp8 and isinstance(value, Quantised)):
            value = value.dequantised()
        if isinstance(value, torch.Tensor) and self._makes_fp8:
            return to_scaled(value.to(self._device))
        if isinstance(value, Quantised):
            if self._is_on_gpu and value.bits in (4, 8):
                return value
            if native is None or self.columns % GROUP:
                value.write_to(whole := torch.empty(value.shape, dtype=self._dtype))
                return self._as_held(whole)
            return _Panels(packed(value, native), value.shape[0], value.bits, value.order)
        if native is not None and self._dtype == torch.bfloat16 and has_pairs() and self.columns % 4 == 0:
            return _Panels(packed_bfloat16(value, native), value.shape[0], 16, None)
        return self._owned(value)

    def _owned(self, value: torch.Tensor) -> torch.Tensor:
        """A copy on the device of the product; a mapped tensor is converted only on the GPU."""
        if self._device.type == "cpu":
            return value.to(self._dtype, copy=True)
        return value.to(self._device).to(self._dtype)

    def _product(self, run: list[_Part]) -> Product:
        """Return the product for parts of one storage form: floats, panels, quantised or scaled."""
        makers: dict[type, Callable[[list[Any]], Product]] = {
            torch.Tensor: self._of_floats,
            _Panels: self._of_panels,
            Quantised: lambda parts: QuantisedProduct(joined(parts), self._device),
            Scaled: lambda parts: ScaledProduct(scaled.joined(parts)),
        }
        return makers[type(run[0])](run)

    def _of_floats(self, weights: list[torch.Tensor]) -> _Torch:
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return _Torch(weight, can_pack=self._can_pack and can_pack(self._dtype))

    def _of_panels(self, panels: list[_Panels]) -> NativeProduct:
        assert self._native is not None
        return NativeProduct(
            native=self._native,
            weight=torch.cat([part.codes for part in panels]) if len(panels) > 1 else panels[0].codes,
            outputs=sum(part.rows for part in panels),
            columns=self.columns,
            bits=panels[0].bits,
            order=panels[0].order,
            dequantised_from=self._dequantised_from,
            dtype=self._dtype,
            out_dtype=self._out_dtype,
        )


def _runs(parts: list[_Part]) -> list[list[_Part]]:
    """Group neighbouring parts that one product can serve."""
    runs: list[list[_Part]] = []
    for part in parts:
        last_part = runs[-1][-1] if runs else None
        if isinstance(last_part, _Panels) and isinstance(part, _Panels):
            can_join = last_part.can_go_before(part)
        elif isinstance(last_part, Quantised) and isinstance(part, Quantised):
            can_join = last_part.bits == part.bits and last_part.order is None and part.order is None
        else:
            can_join = any(isinstance(last_part, kind) and isinstance(part, kind) for kind in (torch.Tensor, Scaled))
        if can_join:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


@dataclass(frozen=True, slots=True)
class _Panels:
    """A part in the native product's layout, with `rows` rows; its last panel may be padded."""

    codes: torch.Tensor
    rows: int
    bits: int
    order: torch.Tensor | None

    def can_go_before(self, other: _Panels) -> bool:
        """Whether one product can read both: whole panels, equal code widths, and the same order of
        inputs."""
        is_plain = self.order is None and other.order is None
        is_same_order = is_plain or (
            self.order is not None and other.order is not None and torch.equal(self.order, other.order)
        )
        return self.rows % PANEL == 0 and self.bits == other.bits and is_same_order


_Part = torch.Tensor | _Panels | Quantised | Scaled


@dataclass(slots=True)
class NativeProduct:
    """Rows in the layout of the native product. `order`: the inputs in the order of its columns."""

    native: Kernels
    weight: torch.Tensor
    outputs: int
    columns: int
    bits: int
    order: torch.Tensor | None
    dequantised_from: int
    dtype: torch.dtype
    out_dtype: torch.dtype
    bias: torch.Tensor | None = None

    @property
    def kind(self) -> int:
        """The number of its input and output types in the kernels."""
        return _BFLOAT16_TO_FLOAT32 if self.out_dtype != self.dtype else kind_of(self.dtype) or 0

    def matrix(self) -> Matrix:
        """The C++ struct of the product; it points at the weight and the bias."""
        bias_at = None if self.bias is None else self.bias.data_ptr()
        shape = (self.bits, self.columns, self.outputs, self.dequantised_from)
        return Matrix(self.weight.data_ptr(), bias_at, *shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous() if self.order is None else x.index_select(1, self.order)
        out = torch.empty(x.shape[0], self.outputs, dtype=self.out_dtype)
        self.native.product(self.kind, ctypes.byref(self.matrix()), x.data_ptr(), out.data_ptr(), x.shape[0])
        return out

    def take_rows(self, ids: torch.Tensor) -> torch.Tensor:
        kind = kind_of(self.dtype)
        out = torch.empty(len(ids), self.columns, dtype=self.dtype)
        self.native.take_rows(kind, ctypes.byref(self.matrix()), ids.data_ptr(), out.data_ptr(), len(ids))
        return out

    @property
    def size_bytes(self) -> int:
        return self.weight.nbytes

    @property
    def form(self) -> str:
        return "bfloat16" if self.bits == 16 else f"{self.bits} bits"


class _Torch:
    """Rows for torch's product; packed for oneDNN if that is faster."""

    def __init__(self, weight: torch.Tensor, *, can_pack: bool) -> None:
        self.outputs, self.size_bytes = weight.shape[0], weight.nbytes
        self.form = str(weight.dtype).removeprefix("torch.")
        self.bias: torch.Tensor | None = None
        self.is_packed = can_pack
        self.weight = _operators()._reorder_linear_weight(weight, _ROWS_HINT) if can_pack else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_packed:
            return _operators()._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]
        return functional.linear(x, self.weight, self.bias)

    def take_rows(self, ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(ids, self.weight)


Product = NativeProduct | _Torch | QuantisedProduct | ScaledProduct


def has_pairs() -> bool:
    """Whether the native product is the fastest for bfloat16: the processor multiplies pairs, and
    lacks a matrix unit."""
    return "avx512_bf16" in cpu_flags() and "amx_bf16" not in cpu_flags()


def _operators() -> Any:
    return torch.ops.mkldnn


@cache
def can_pack(dtype: torch.dtype) -> bool:
    """Whether this build and machine multiply matrices packed for oneDNN, with the same result as
    unpacked."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).to(dtype)
    x = torch.randn(3, 64, generator=generator).to(dtype)
    try:
        repacked = _operators()._reorder_linear_weight(weight, _ROWS_HINT)
        product = _operators()._linear_pointwise(x, repacked, None, "none", [], "")
    except (RuntimeError, AttributeError):  # NotImplementedError is a RuntimeError
        return False
    return torch.allclose(product, functional.linear(x, weight), rtol=1e-2, atol=1e-2)
