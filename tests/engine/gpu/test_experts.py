"""Experts computed together give what each gives by itself, whoever is chosen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from local_engine.engine import Engine
from local_engine.executors.gpu import GpuExecutor
from local_engine.kernels.gpu.experts import GroupedExperts
from local_engine.kernels.gpu.self_test import expert_by_expert
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import greedy, run


@settings(max_examples=10)
@given(
    rows=st.sampled_from([0, 1, 5, 40, 300]),
    experts=st.sampled_from([1, 3, 8]),
    per_token=st.integers(1, 3),
    seed=st.integers(0, 9),
)
def test_each_row_gets_what_it_chose(rows: int, experts: int, per_token: int, seed: int) -> None:
    """Any rows, also all to one expert, through small tiles and large ones."""
    torch.manual_seed(seed)
    per_token = min(per_token, experts)
    gate_up, down = torch.randn(experts, 40, 24), torch.randn(experts, 24, 20)
    x, shares = torch.randn(rows, 24), torch.rand(rows, per_token)
    first = torch.randint(experts, (rows, 1)) * (seed % 2)
    chosen = (first + torch.arange(per_token)) % experts
    found = GroupedExperts(gate_up, down, "silu", None)(x, chosen, shares)
    torch.testing.assert_close(found, expert_by_expert(x, gate_up, down, chosen, shares), atol=1e-2, rtol=1e-4)


@pytest.mark.long
def test_a_mixture_is_captured_and_answers_as_naively(
    make_engine: Callable[..., Engine], checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes of a model with experts run as graphs too."""
    monkeypatch.setenv("SAMEWAY_TRITON", "1")
    engine = make_engine("qwen3-moe-wide", sequences_max=2, context_tokens_max=24, draft_tokens_max=0)
    prompts = [random_prompt(seed, 5 + seed) for seed in (1, 2)]
    ids = [engine.submit(prompt, greedy(4)) for prompt in prompts]
    found = run(engine)
    naive = checkpoint("qwen3-moe-wide")
    assert [found[id] for id in ids] == [list(naive_greedy(naive, tuple(prompt), 4)) for prompt in prompts]
    steps = engine.runner.executor
    assert isinstance(steps, GpuExecutor)
    assert steps.graphs
