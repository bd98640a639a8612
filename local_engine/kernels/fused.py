"""The operations between matrices, each in one pass if native or Triton kernels support it, else in
torch's steps.

The torch form is the oracle. Knows rows, no weights' meaning.
"""

from __future__ import annotations

from types import ModuleType

import torch
import torch.nn.functional as functional

from local_engine.kernels.cpu import Kernels, kind_of, native_for
from local_engine.kernels.supports import supports

RowKernels = Kernels | ModuleType  # of C++, or the module of Triton's forms


def row_kernels(device: torch.device, dtype: torch.dtype) -> RowKernels | None:
    """The kernels for this device and type; None if only torch supports them."""
    if not supports(device, "rows"):
        return native_for(device, dtype)
    from local_engine.kernels.gpu import rows

    return rows


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, per_head: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) over the last dimension; `per_head` weights each head separately."""
    is_wide = any(w is not None and w.dtype != x.dtype for w in (weight, per_head))
    y = functional.rms_norm(x.float() if is_wide else x, x.shape[-1:], weight, epsilon)
    return (y if per_head is None else y * per_head).to(x.dtype)


def add_norm(
    native: RowKernels | None, x: torch.Tensor, more: torch.Tensor | None, weight: torch.Tensor | None, epsilon: float
) -> torch.Tensor:
    """x += more, in place; returns its RMSNorm, or x itself without a `weight`. [rows, width];
    native: `weight` is float32."""
    if weight is None:
        return x if more is None else x.add_(more)
    if native is None:
        if more is not None:
            x += more
        return rms_norm(x, weight, epsilon)
    if not isinstance(native, Kernels):
        normed: torch.Tensor = native.add_norm(x, more, weight, epsilon)
        return normed
    out = torch.empty_like(x)
    rows, width = x.shape
    more_at = None if more is None else more.data_ptr()
    native.add_norm(kind_of(x.dtype), x.data_ptr(), more_at, weight.data_ptr(), out.data_ptr(), rows, width, epsilon)
    return out


def gate(native: RowKernels | None, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up of [rows, gate and up side by side]; `activation` silu or gelu_tanh."""
    if native is None:
        gated, up = gate_up.chunk(2, -1)
        gated = functional.silu(gated) if activation == "silu" else functional.gelu(gated, approximate="tanh")
        return gated.mul_(up)
    if not isinstance(native, Kernels):
        activated: torch.Tensor = native.gate(gate_up, activation)
        return activated
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype)
    native.gate(kind_of(gate_up.dtype), gate_up.data_ptr(), out.data_ptr(), rows, width, activation == "gelu_tanh")
    return out


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap), in place; without a cap x stays unchanged."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)
