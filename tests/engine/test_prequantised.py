"""Quantised checkpoints of every supported method answer as the floats they stand for."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig, ModelError
from local_engine.engine import Engine
from local_engine.kernels import cpu
from local_engine.weights.quantised import Quantised
from tests.engine import packers
from tests.engine.checkpoints import random_prompt, reference
from tests.engine.conftest import SMALL, greedy

Folder = Callable[[str], Path]
GROUPED = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "strategy": "group"}}}
COMPRESSED = {"quant_method": "compressed-tensors", "config_groups": GROUPED, "ignore": ["lm_head"]}
PACKED = {**COMPRESSED, "format": "pack-quantized"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}


def gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": 32, **more}


METHODS: dict[str, tuple[dict[str, Any], packers.Write]] = {
    "awq": (AWQ, packers.awq),
    "gptq-4": (gptq(4, sym=True), packers.gptq(4, is_symmetric=True)),
    "gptq-spare-bias": (gptq(4, sym=True), packers.gptq(4, is_symmetric=True, has_spare_bias=True)),
    "gptq-8": (gptq(8, sym=True), packers.gptq(8, is_symmetric=True)),
    "gptq-2": (gptq(2, sym=False), packers.gptq(2, is_symmetric=False)),
    "gptq-asymmetric": (gptq(4, sym=False), packers.gptq(4, is_symmetric=False)),
    "gptq-v2": (
        gptq(4, sym=False, checkpoint_format="gptq_v2"),
        packers.gptq(4, is_symmetric=False, layout="gptq_v2"),
    ),
    "gptq-order": (gptq(4, desc_act=True), packers.gptq(4, is_symmetric=False, has_order=True)),
    "packed-4": (PACKED, packers.packed(4, is_symmetric=True)),
    "packed-4-asymmetric": (PACKED, packers.packed(4, is_symmetric=False)),
    "packed-4-signed-zeros": (PACKED, packers.packed(4, is_symmetric=False, packs_zeros=False)),
    "packed-8-rows": (PACKED, packers.packed(8, is_symmetric=True, size=0)),
    "packed-4-order": (PACKED, packers.packed(4, is_symmetric=True, has_order=True)),
    "packed-4-small-groups": (PACKED, packers.packed(4, is_symmetric=True, size=16)),
    "int8": ({**COMPRESSED, "format": "int-quantized"}, packers.int8),
    "compressed-fp8": ({**COMPRESSED, "format": "float-quantized"}, packers.float8("row")),
    "fp8-tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, packers.float8("tensor")),
    "fp8-rows": ({"quant_method": "fbgemm_fp8"}, packers.float8("row")),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [32, 32]}, packers.float8("block")),
}
FLOATS = {"packed-4-small-groups", "compressed-fp8", "fp8-tensor", "fp8-rows", "fp8-blocks"}


def said(folder: Path, prompt: list[int], **options: Any) -> tuple[Engine, torch.Tensor]:
    """The engine, and the log probability it gives each of the prompt's tokens but the first."""
    engine = Engine(EngineConfig(model=str(folder), **{**SMALL, **options}))
    engine.submit(prompt, greedy(1, prompt_logprobs=0))
    (step,) = engine.step()
    return engine, torch.tensor([token.logprob for token in step.output.prompt_logprobs[1:]])


def expected(folder: Path, prompt: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        rows = reference(folder)(torch.tensor([prompt])).logits[0].log_softmax(-1)
    return rows[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]


def assert_answers(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for what minima in half precision and inputs in 15 bits make of a random model, which magnifies it."""
    errors = (found - wanted).abs()
    assert float(errors.mean()) < 0.02
    assert float(errors.max()) < 0.1


@pytest.mark.parametrize("method", METHODS)
def test_a_quantised_checkpoint_answers_as_its_values(checkpoint: Folder, tmp_path: Path, method: str) -> None:
    """Value by value the matrices are what was packed, and the logits are those of transformers on these values."""
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", *METHODS[method])
    plain = load_file(packers.float_of(folder) / "model.safetensors")
    for piece in open_checkpoint(str(folder)).weights():
        is_kept = isinstance(piece.tensor, Quantised)
        assert is_kept == (method not in FLOATS and "_proj" in piece.name)
        found = piece.tensor if isinstance(piece.tensor, torch.Tensor) else piece.tensor.dequantised()
        wanted = plain.pop(piece.name)
        torch.testing.assert_close(found.float(), wanted, rtol=1e-3, atol=2e-3 * float(wanted.abs().max()))
    assert not plain
    prompt = random_prompt(3, 40)
    _, ours = said(folder, prompt)
    assert_answers(ours, expected(packers.float_of(folder), prompt))


def test_experts_and_a_head_can_be_quantised(checkpoint: Folder, tmp_path: Path) -> None:
    """A mixture's experts each have their own codes; the router is left alone, and a head need not be."""
    section, write = METHODS["gptq-asymmetric"]
    folder = packers.rewrite(checkpoint("qwen3-moe-wide"), tmp_path / "packed", section, write, kept=("o_proj",))
    kept = {piece.name for piece in open_checkpoint(str(folder)).weights() if isinstance(piece.tensor, Quantised)}
    assert "lm_head.weight" in kept
    assert "model.layers.2.mlp.experts.5.down_proj.weight" in kept
    assert not any(name.endswith(("o_proj.weight", "mlp.gate.weight")) for name in kept)
    prompt = random_prompt(3, 40)
    _, ours = said(folder, prompt)
    assert_answers(ours, expected(packers.float_of(folder), prompt))


def test_a_module_left_alone_stays_as_it_is(
    checkpoint: Folder, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where one of three fused projections is not quantised, neither are its values changed nor the others'; the log
    says what is held as what."""
    section, write = METHODS["awq"]
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", section, write, kept=("k_proj", "lm_head"))
    prompt = random_prompt(4, 30)
    with caplog.at_level(logging.INFO):
        engine, ours = said(folder, prompt)
    assert_answers(ours, expected(packers.float_of(folder), prompt))
    assert "awq" in caplog.text
    if cpu.kernels() is not None:
        assert "4 bits" in caplog.text
        assert engine.info.weights_size_bytes < 0.6 * said(packers.float_of(folder), prompt)[0].info.weights_size_bytes


@pytest.mark.parametrize("method", ["awq", "gptq-order", "int8"])
def test_without_kernels_the_values_are_the_same(
    checkpoint: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Where no native product serves, matrices are dequantised and give the same answers."""
    monkeypatch.setattr("local_engine.kernels.cpu.kernels", lambda: None)
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", *METHODS[method])
    prompt = random_prompt(5, 30)
    _, ours = said(folder, prompt)
    assert_answers(ours, expected(packers.float_of(folder), prompt))


def test_blocks_of_float8_are_what_transformers_reads(checkpoint: Folder, tmp_path: Path) -> None:
    """transformers' own loader, which dequantises without a GPU, gives the same logits from the same file."""
    section = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    folder = packers.rewrite(checkpoint("qwen3-wide"), tmp_path / "packed", section, packers.float8("block"))
    prompt = random_prompt(6, 40)
    _, ours = said(folder, prompt)
    assert_answers(ours, expected(folder, prompt))


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"quant_method": "bitsandbytes"}, ["bitsandbytes", "awq, gptq, fp8, fbgemm_fp8, compressed-tensors"]),
        ({"bits": 4}, ["method ''"]),
        ({"quant_method": "awq", "version": "gemv"}, ["version", "gemv"]),
        ({"quant_method": "awq", "bits": 3}, ["bits", "3"]),
        ({"quant_method": "gptq", "bits": 3}, ["bits", "3", "8"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format", "marlin"]),
        ({**COMPRESSED, "format": "nvfp4-pack-quantized"}, ["nvfp4", "pack-quantized"]),
        ({**PACKED, "transform_config": {"config_groups": {"u": {}}}}, ["transform_config"]),
        ({**PACKED, "sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config"]),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, ["expert_dtype", "fp4"]),
    ],
)
def test_a_method_that_is_not_known_is_refused_by_name(
    checkpoint: Folder, tmp_path: Path, section: dict[str, Any], words: list[str]
) -> None:
    """The message names the file, what was found and what there is."""
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", section, packers.awq)
    with pytest.raises(ModelError) as caught:
        open_checkpoint(str(folder))
    for word in ["config.json", *words]:
        assert word in str(caught.value)


def broken(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> packers.Write:
    def write(weight: np.ndarray[Any, Any]) -> tuple[packers.Stored, np.ndarray[Any, Any]]:
        stored, values = METHODS["gptq-spare-bias"][1](weight)
        return stored | {name: change(stored[name])}, values

    return write


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("bias", lambda t: t + 1, "unexpected tensor"),
        ("scales", lambda t: t[:1].repeat(7, 1), "do not belong together"),
        ("qzeros", lambda t: t[:, :1], "do not belong together"),
        ("qweight", lambda t: t.float(), "qweight' is torch.float32"),
        ("g_idx", lambda t: t + 9, "inputs are not among"),
        ("qweight", lambda t: t[:4], "bits"),
    ],
)
def test_tensors_that_contradict_one_another_are_named(
    checkpoint: Folder, tmp_path: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor], words: str
) -> None:
    """A broken module is refused with its name."""
    folder = packers.rewrite(checkpoint("llama-wide"), tmp_path / "packed", gptq(4), broken(name, change))
    with pytest.raises(ModelError, match=r"model\.layers\.0\..*") as caught:
        Engine(EngineConfig(model=str(folder), **SMALL))
    assert words in str(caught.value)
    assert str(folder) in str(caught.value)
