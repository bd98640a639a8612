"""8-bit floats: what is multiplied is what was stored, rounded once, by torch's own product of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.weights import scaled
from local_engine.weights.linear import Linear, LinearOptions
from local_engine.weights.scaled import Scaled, ScaledProduct, to_scaled
from tests.engine import packers
from tests.engine.checkpoints import random_prompt
from tests.engine.conftest import SMALL, greedy, run
from tests.engine.test_prequantised import METHODS, expected, said

CPU = torch.device("cpu")


@settings(max_examples=20)
@given(
    rows=st.integers(0, 5),
    outputs=st.sampled_from([16, 48]),
    columns=st.sampled_from([16, 64, 160]),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_a_product_is_that_of_the_rounded(
    rows: int, outputs: int, columns: int, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    """Each input row is rounded with its own scale: rows of any size beside one another, and one of zeros."""
    torch.manual_seed(seed)
    matrix = to_scaled(torch.randn(outputs, columns))
    x = (torch.randn(rows, columns) * torch.tensor([1.0, 1e-4, 0.0, 1e4, 3.0])[:rows, None]).to(dtype)
    product = ScaledProduct(matrix)
    product.bias = torch.randn(outputs).to(dtype) if has_bias else None
    wanted = to_scaled(x).dequantised() @ matrix.dequantised().T
    wanted = wanted if product.bias is None else wanted + product.bias.float()
    found = product(x)
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted, atol=1e-2, rtol=2e-2)


def test_rounding_is_to_the_nearest_and_never_past_the_greatest() -> None:
    """Values that the type holds stay what they are; what was rounded once is rounded to itself."""
    values = torch.tensor([[448.0, -448.0, 0.0, 1.0, 31.4, 0.3], [0.0] * 6])
    once = to_scaled(values)
    assert once.dequantised()[0, :4].tolist() == [448.0, -448.0, 0.0, 1.0]
    assert once.dequantised()[0, 4] == 32.0
    assert torch.equal(to_scaled(once.dequantised()).dequantised(), once.dequantised())
    assert torch.equal(once.dequantised()[1], values[1])


def test_parts_of_a_matrix_keep_their_own_codes() -> None:
    """Parts from a checkpoint beside one that is rounded here are one product; without a wish a CPU takes the floats."""
    torch.manual_seed(0)
    first, second = to_scaled(torch.randn(16, 32)), torch.randn(32, 32)
    x = torch.randn(2, 32)
    for fp8, form in (("made", "8-bit floats"), ("kept", "float32")):
        linear = Linear((16, 32), 32, LinearOptions(dtype=torch.float32, device=CPU, fp8=fp8))
        linear.load(0, first)
        linear.load(1, second)
        linear.prepare()
        assert linear.forms() == [form]
        below = to_scaled(second).dequantised() if fp8 == "made" else second
        inputs = to_scaled(x).dequantised() if fp8 == "made" else x
        wanted = inputs @ torch.cat((first.dequantised(), below)).T
        torch.testing.assert_close(linear(x), wanted, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("method", ["compressed-fp8", "fp8-tensor", "fp8-rows"])
def test_a_checkpoint_of_8_bit_floats_keeps_them(
    checkpoint: Callable[[str], Path], tmp_path: Path, method: str
) -> None:
    """Its codes are what is multiplied, with inputs that are rounded; answers are moved by that alone, which a random model
    with sharp logits magnifies."""
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", *METHODS[method])
    prompt = random_prompt(3, 40)
    engine, ours = said(folder, prompt, weights="fp8")
    errors = (ours - expected(packers.float_of(folder), prompt)).abs()
    assert float(errors.mean()) < 1.0
    decoder = engine.runner.decoder
    assert decoder.forms()["8-bit floats"] == 12
    name = "model.layers.1.self_attn.o_proj.weight"
    stored = next(piece.tensor for piece in open_checkpoint(str(folder)).weights() if piece.name == name)
    assert isinstance(stored, Scaled)
    x = torch.randn(3, stored.shape[1])
    wanted = to_scaled(x).dequantised() @ stored.dequantised().T
    torch.testing.assert_close(decoder.layers[1].output(x), wanted, atol=1e-2, rtol=2e-2)
    id = engine.submit(prompt, greedy(3))
    assert len(run(engine)[id]) == 3


def test_where_there_is_no_such_product_it_is_refused(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A probe that fails, or is wrong, names what is missing."""
    config = EngineConfig(model=str(checkpoint("llama-wide")), weights="fp8", **SMALL)
    scaled.multiplies_fp8.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(ScaledProduct, "__call__", lambda self, x: torch.zeros(len(x), self.outputs))
        with pytest.raises(ModelError, match="fp8 needs a GPU"):
            Engine(config)
    scaled.multiplies_fp8.cache_clear()
    assert scaled.multiplies_fp8(CPU)
    assert isinstance(to_scaled(torch.ones(1, 16)), Scaled)
