"""Fixtures of the engine's tests: random checkpoints, made once a session, and engines on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from local_engine.config import EngineConfig
from local_engine.kernels import cpu
from local_engine.messages import SamplingParams
from local_engine.speculation.timing import Line, StepTiming

if TYPE_CHECKING:
    from local_engine.engine import Engine

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_blocks": 128, "block_tokens": 4}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint by family."""
    from tests.engine.checkpoints import make_checkpoint  # it imports torch, which `quick` does without

    @cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family)

    return make


@pytest.fixture(scope="session")
def kernels() -> cpu.Kernels:
    """The compiled functions; compiled here where set-up has not done it."""
    said = cpu.compile_kernels()
    found = cpu.kernels()
    if found is None and ("processor lacks" in said or "no C++ compiler" in said):
        pytest.skip(said)
    assert found is not None, said
    return found


@pytest.fixture(scope="session")
def make_engine(checkpoint: Callable[[str], Path]) -> Callable[..., Engine]:
    """An engine on a random checkpoint; keywords override the small defaults."""
    from local_engine.engine import Engine

    def make(family: str = "llama", *, is_overlapped: bool | None = None, **overrides: Any) -> Engine:
        config = EngineConfig(model=str(checkpoint(family)), **{**SMALL, **overrides})
        return Engine(config, is_overlapped=is_overlapped)

    return make


class FixedLine(Line):
    """A step of any size takes the same, whatever is measured: rows cost nothing, so that whatever can be drafted is."""

    def observe(self, rows: int, duration_s: float) -> None:
        pass

    def assume(self, row_ms: float) -> None:
        pass


def at_fixed_prices(engine: Engine, model_step_ms: float = 0.0) -> Engine:
    """The engine, drafting wherever it can, by prices that no clock decides: a row costs nothing, a step 10 ms, one of the
    draft model `model_step_ms`."""
    engine.speculator.timing = StepTiming(
        steps=FixedLine(count=1, mean_ms=10.0), draft_steps=FixedLine(count=1, mean_ms=model_step_ms)
    )
    return engine


def greedy(max_tokens: int = 12, **more: Any) -> SamplingParams:
    """Greedy decoding that only length ends."""
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **more)


def run(engine: Engine, *, check: bool = True) -> dict[int, list[int]]:
    """Step until nothing is left; returns the tokens of each sequence."""
    tokens: dict[int, list[int]] = {}
    while engine.has_work:
        for step in engine.step():
            assert step.error is None, step.error
            tokens.setdefault(step.id, []).extend(step.output.token_ids)
        if check:
            engine.check_integrity()
    return tokens


def run_text(engine: Engine) -> dict[int, str]:
    """Step until nothing is left; returns the text of each sequence."""
    text: dict[int, str] = {}
    while engine.has_work:
        for step in engine.step():
            assert step.error is None, step.error
            text[step.id] = text.get(step.id, "") + step.output.text
    return text
