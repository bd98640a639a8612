"""A kernel that is wrong, or fails, is found out before a model runs on it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from local_engine.config import AttentionConfig, ModelConfig, RopeConfig
from local_engine.executors.gpu import shape_of, verify
from local_engine.kernels import supports
from local_engine.kernels.gpu import draw, rows
from local_engine.kernels.gpu.self_test import failures

CPU = torch.device("cpu")
MODEL = ModelConfig(
    architecture="any",
    name="any",
    hidden_size=24,
    layers=2,
    attention=AttentionConfig(heads=4, kv_heads=2, head_dim=16, windows=(0, 5), scale=0.25),
    intermediate_size=32,
    vocabulary_size=64,
    context_tokens=64,
    rms_epsilon=1e-6,
    ropes=(RopeConfig(),) * 2,
    has_qk_norm=False,
    has_qkv_bias=False,
)


@pytest.mark.parametrize(("dtype", "block_tokens"), [(torch.float32, 1), (torch.bfloat16, 2), (torch.float32, 4)])
def test_all_kernels_agree_with_torch(dtype: torch.dtype, block_tokens: int) -> None:
    """On this machine, in Triton's interpreter, nothing is to be said against any of them, in blocks of any size."""
    assert failures(shape_of(MODEL, block_tokens), MODEL.hidden_size, dtype, CPU) == []


def test_kernels_that_are_wrong_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that computes something else and one that does not compile are named, and torch does the work of their part."""
    monkeypatch.setenv("SAMEWAY_TRITON", "1")
    monkeypatch.setattr(supports, "left_alone", set())

    def fails(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of resource: shared memory")

    monkeypatch.setattr(rows, "gate", lambda gate_up, activation: gate_up[:, : gate_up.shape[1] // 2])
    monkeypatch.setattr(rows, "add_norm", fails)
    found = failures(shape_of(MODEL, 4), MODEL.hidden_size, torch.float32, CPU)
    assert [one.kernel for one in found] == ["add_norm", "gate"]
    assert "shared memory" in found[0].why
    assert supports.supports(CPU, "rows")
    verify(MODEL, 4, torch.float32, CPU)
    assert [part for part in supports.PARTS if not supports.supports(CPU, part)] == ["rows"]


def test_a_token_that_is_a_little_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are compared exactly, however coarse the type of the logits."""
    right = draw.draw
    monkeypatch.setattr(draw, "draw", lambda *arguments: right(*arguments) + 1)
    found = failures(shape_of(MODEL, 4), MODEL.hidden_size, torch.bfloat16, CPU)
    assert [(one.part, one.kernel) for one in found] == [("draw", "draw")]
