"""Whatever comes in whatever order, through whatever pool and chunk size: the naive answer, and nothing leaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from local_engine.engine import Engine
from tests.engine.checkpoints import naive_greedy, random_prompt
from tests.engine.conftest import at_fixed_prices, greedy

ANSWER = 10


@dataclass(frozen=True)
class Arrival:
    """One request: it comes before the engine's `at`-th step and, where `abort_after` is set, leaves after as many."""

    shared: int
    own: int
    seed: int
    at: int
    answer: int
    salt: bytes
    priority: int
    abort_after: int | None

    @property
    def prompt(self) -> list[int]:
        return random_prompt(0, 40)[: self.shared] + random_prompt(self.seed, self.own)


arrivals = st.builds(
    Arrival,
    shared=st.sampled_from([0, 3, 8, 17, 32]),
    own=st.integers(1, 14),
    seed=st.integers(1, 4),
    at=st.integers(0, 12),
    answer=st.integers(1, ANSWER),
    salt=st.sampled_from([b"", b"", b"other"]),
    priority=st.sampled_from([0, 0, 1]),
    abort_after=st.none() | st.integers(0, 8),
)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    requests=st.lists(arrivals, min_size=1, max_size=7),
    blocks=st.integers(15, 60),
    block_tokens=st.sampled_from([4, 5, 16]),
    step_tokens_max=st.sampled_from([1, 2, 5, 13, 64]),
    sequences_max=st.integers(1, 8),
    draft_tokens_max=st.sampled_from([0, 1, 3, 8]),
    is_overlapped=st.booleans(),
    draft_model=st.sampled_from([None, None, "~", "", "other"]),
)
def test_any_mix_gives_the_naive_answers(
    make_engine: Callable[..., Engine],
    checkpoint: Callable[[str], Path],
    family: str,
    requests: list[Arrival],
    blocks: int,
    block_tokens: int,
    step_tokens_max: int,
    sequences_max: int,
    draft_tokens_max: int,
    is_overlapped: bool,
    draft_model: str | None,
) -> None:
    """Greedy answers equal the naive forward pass and every step leaves the engine's books in order, whatever drafts: nobody,
    a model that is near, the model itself, or one that knows nothing."""
    drafts = {"~": family + "~", "": family, "other": "mistral-window"}
    engine = make_engine(
        family,
        kv_blocks=blocks,
        block_tokens=block_tokens,
        step_tokens_max=step_tokens_max,
        sequences_max=sequences_max,
        draft_tokens_max=draft_tokens_max,
        is_overlapped=is_overlapped,
        draft_model=str(checkpoint(drafts[draft_model])) if draft_model is not None else None,
    )
    at_fixed_prices(engine)
    coming = sorted(requests, key=lambda request: request.at)
    live: dict[int, tuple[Arrival, int]] = {}
    found: dict[int, list[int]] = {}
    finished: dict[int, Arrival] = {}
    steps = 0
    while coming or engine.has_work:
        while coming and coming[0].at <= steps:
            request = coming.pop(0)
            id = engine.submit(request.prompt, greedy(request.answer), salt=request.salt, priority=request.priority)
            live[id], found[id] = (request, steps), []
        for id, (request, since) in list(live.items()):
            if request.abort_after is not None and steps - since >= request.abort_after:
                engine.abort(id)
                del live[id]
        engine.check_integrity()
        for step in engine.step():
            assert step.error is None
            found[step.id].extend(step.output.token_ids)
            if step.output.finish_reason is not None:
                assert step.output.finish_reason == "length"
                finished[step.id] = live.pop(step.id)[0]
        engine.check_integrity()
        steps += 1
        assert steps < 5000, "no progress"
    assert not live
    assert engine.load().kv_blocks_used == 0
    for id, request in finished.items():
        expected = naive_greedy(checkpoint(family), tuple(request.prompt), ANSWER)
        assert found[id] == list(expected[: request.answer])
