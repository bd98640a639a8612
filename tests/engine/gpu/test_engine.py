"""The engine on the GPU's kernels, static buffers and prefix tiles, by Triton's interpreter: answers stay the naive ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from local_engine.engine import Engine
from local_engine.executors.gpu import GpuExecutor
from local_engine.messages import SamplingParams
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import at_fixed_prices, greedy, run

Make = Callable[..., Engine]
Folder = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWAY_TRITON", "1")
    monkeypatch.setattr("local_engine.executors.gpu.SAVED_TOKENS_MIN", 8)


@pytest.mark.long
def test_a_mix_of_prompts_gives_the_naive_answers(make_engine: Make, checkpoint: Folder) -> None:
    """Prompts in chunks, decodes in padded batches and prefixes that are shared: greedy answers equal the naive ones."""
    engine = make_engine("gemma2", step_tokens_max=24, sequences_max=3, context_tokens_max=32, draft_tokens_max=0)
    common = random_prompt(1, 17)
    prompts = [common, common + random_prompt(2, 3), random_prompt(3, 5)]
    ids = [engine.submit(prompt, greedy(4)) for prompt in prompts]
    found = run(engine)
    assert [found[id] for id in ids] == [list(naive_greedy(checkpoint("gemma2"), tuple(p), 4)) for p in prompts]
    steps = engine.runner.executor
    assert isinstance(steps, GpuExecutor)
    assert {has_shared for _, has_shared in steps.graphs} == {False, True}
    assert max(rows for rows, _ in steps.graphs) == 3


def test_graphs_are_checked_before_they_are_used(
    make_engine: Make, checkpoint: Folder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All sizes are captured and compared at once; where a replay gives something else, decodes run unrecorded and it is
    said."""
    engine = make_engine("qwen3", sequences_max=2, context_tokens_max=16, draft_tokens_max=0)
    steps = engine.runner.executor
    assert isinstance(steps, GpuExecutor)
    steps.warm_up()
    assert {rows for rows, _ in steps.graphs} == {1, 2}
    steps.graphs.clear()
    monkeypatch.setattr(steps, "recorded", lambda compute: lambda: None)
    steps.warm_up()
    assert "decodes run without CUDA graphs" in caplog.text
    prompt = random_prompt(1, 5)
    id = engine.submit(prompt, greedy(3))
    assert run(engine)[id] == list(naive_greedy(checkpoint("qwen3"), tuple(prompt), 3))
    assert not steps.graphs


@pytest.mark.long
def test_an_overlapped_engine_with_drafts_and_seeds_answers_as_torch_does(
    make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token under way is read on the device, in a replayed step and in one with drafts; norms of queries and keys."""
    wishes = [
        (random_prompt(4, 3), SamplingParams(temperature=0.9, top_p=0.8, seed=3, max_tokens=6, logprobs=2)),
        ([5, 6, 7, 5, 6, 7, 5, 6, 7, 5, 6], greedy(6)),
    ]
    answers = []
    for wish in ("1", "0"):
        monkeypatch.setenv("SAMEWAY_TRITON", wish)
        is_overlapped = wish == "1"
        engine = at_fixed_prices(
            make_engine("qwen3", sequences_max=2, context_tokens_max=24, is_overlapped=is_overlapped)
        )  # it guesses, however slow that is here
        ids = [engine.submit(prompt, params) for prompt, params in wishes]
        found = run(engine)
        answers.append([found[id] for id in ids])
        assert wish == "0" or engine.load().drafted_tokens_total
    assert answers[0] == answers[1]
