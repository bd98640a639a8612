"""Norms, gates and rotate-and-store in Triton give what torch's steps give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.config import RopeConfig
from local_engine.kernels import fused
from local_engine.kernels.gpu import rows as kernels
from local_engine.models.rope import rotary

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
dtypes = st.sampled_from(list(TOLERANCE))


@settings(max_examples=15)
@given(rows=st.integers(0, 4), width=st.integers(1, 70), has_more=st.booleans(), dtype=dtypes)
def test_add_norm_equals_torch(rows: int, width: int, has_more: bool, dtype: torch.dtype) -> None:
    """The sum lands in place, its norm is returned, at any width and for no rows."""
    torch.manual_seed(rows * 100 + width)
    x, weight = torch.randn(rows, width).to(dtype), torch.randn(width)
    more = torch.randn(rows, width).to(dtype) if has_more else None
    wanted_x = x.clone()
    wanted = fused.add_norm(None, wanted_x, more, weight, 1e-5)
    found = kernels.add_norm(x, more, weight, 1e-5)
    ulp = 0.0 if dtype is torch.float32 else 2**-7  # the interpreter cuts off where a GPU rounds
    torch.testing.assert_close(x, wanted_x, atol=0, rtol=ulp)
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@settings(max_examples=10)
@given(
    rows=st.integers(0, 3), width=st.integers(1, 70), activation=st.sampled_from(["silu", "gelu_tanh"]), dtype=dtypes
)
def test_gate_equals_torch(rows: int, width: int, activation: str, dtype: torch.dtype) -> None:
    """Both activations, also far from zero."""
    torch.manual_seed(width)
    gate_up = (20 * torch.randn(rows, 2 * width)).to(dtype)
    wanted = fused.gate(None, gate_up.float(), activation)
    found = kernels.gate(gate_up, activation)
    torch.testing.assert_close(found.float(), wanted, atol=1e-4, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 16), (3, 1, 20)])
def test_rotate_write_equals_torch(heads: int, kv_heads: int, size: int, has_norm: bool) -> None:
    """Queries turn in place, keys turn into their pages beside the values; a row without a slot stores nothing."""
    torch.manual_seed(size)
    cos, sin = rotary(RopeConfig(), size, 50, dtype=torch.float32, device=torch.device("cpu"))
    qkv = torch.randn(3, heads + 2 * kv_heads, size)
    positions, slots = torch.tensor([0, 7, 49]), torch.tensor([9, -1, 2])
    norm = torch.randn(heads + kv_heads, size) if has_norm else None
    qk, values = qkv[:, : heads + kv_heads].clone(), qkv[:, heads + kv_heads :].clone()
    if norm is not None:
        qk = fused.rms_norm(qk, None, 1e-6, norm)
    qk = qk * cos[positions] + qk.roll(size // 2, -1) * sin[positions]
    pool = torch.zeros(2 * kv_heads, 3, 4, size)
    wanted = pool.clone().view(2 * kv_heads, -1, size)
    for row, slot in ((0, 9), (2, 2)):
        wanted[:kv_heads, slot], wanted[kv_heads:, slot] = qk[row, heads:], values[row]
    kernels.rotate_write(qkv, pool, norm, 1e-6, cos, sin, positions, slots)
    torch.testing.assert_close(qkv[:, :heads], qk[:, :heads], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool, wanted.view(pool.shape), atol=1e-5, rtol=1e-5)
