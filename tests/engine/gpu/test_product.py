"""Products with codes on the GPU give what the dequantised matrix gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.weights.linear import Linear, LinearOptions
from local_engine.weights.quantised import Quantised, QuantisedProduct, quantise

CPU = torch.device("cpu")


@settings(max_examples=12)
@given(
    rows=st.sampled_from([0, 1, 3, 17, 70]),
    outputs=st.sampled_from([1, 50, 64, 130]),
    groups=st.integers(1, 5),
    bits=st.sampled_from([4, 8]),
    has_bias=st.booleans(),
    is_ordered=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float16]),
)
def test_products_equal_the_dequantised(
    rows: int, outputs: int, groups: int, bits: int, has_bias: bool, is_ordered: bool, dtype: torch.dtype
) -> None:
    """Any number of rows, outputs and groups; with a bias, and with inputs in another order."""
    torch.manual_seed(rows + outputs)
    matrix = quantise(torch.randn(outputs, 32 * groups), bits)
    if is_ordered:
        matrix = Quantised(matrix.codes, matrix.scales, matrix.minimums, bits, torch.randperm(32 * groups))
    x = torch.randn(rows, 32 * groups).to(dtype)
    product = QuantisedProduct(matrix, CPU)
    product.bias = torch.randn(outputs).to(dtype) if has_bias else None
    wanted = x.float() @ matrix.dequantised().to(dtype).float().T
    wanted = wanted if product.bias is None else wanted + product.bias.float()
    error = {torch.float32: 1e-4, torch.float16: 3e-2}[dtype]
    torch.testing.assert_close(product(x).float(), wanted, atol=error, rtol=error)


@pytest.mark.parametrize(("bits", "forms"), [(None, ["4 bits", "8 bits", "float32"]), (4, ["4 bits"])])
def test_a_linear_keeps_codes_where_the_gpu_serves_them(
    monkeypatch: pytest.MonkeyPatch, bits: int | None, forms: list[str]
) -> None:
    """Parts of 4 and 8 bits stay what they are, floats too; asked for 4 bits, all become one matrix of them."""
    monkeypatch.setenv("SAMEWAY_TRITON", "1")
    torch.manual_seed(0)
    whole = torch.randn(48, 64)
    parts = (quantise(whole[:16], 4), quantise(whole[16:32], 8), whole[32:])
    linear = Linear(
        (16, 16, 16), 64, LinearOptions(dtype=torch.float32, device=CPU), has_bias=True, bits=bits and (bits,) * 3
    )
    assert linear.bias is not None
    linear.bias.copy_(torch.randn(48))
    for index, part in enumerate(parts):
        linear.load(index, part)
    linear.prepare()
    assert linear.forms() == forms
    held = [parts[0].dequantised(), parts[1].dequantised(), whole[32:]]
    if bits:
        held[1:] = [quantise(values, bits).dequantised() for values in held[1:]]
    x = torch.randn(3, 64)
    torch.testing.assert_close(linear(x), x @ torch.cat(held).T + linear.bias, atol=1e-4, rtol=1e-4)
