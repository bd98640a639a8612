"""Fixtures of the engine's tests: random checkpoints, made once a session, and engines on them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from local_engine import native
from local_engine.config import EngineConfig
from local_engine.engine import Engine
from local_engine.messages import SamplingParams
from local_engine.pace import Pace
from tests.engine.checkpoints import make_checkpoint

SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_blocks": 128, "block_tokens": 4}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random checkpoint by family."""

    @cache
    def make(family: str) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / family, family)

    return make


@pytest.fixture(scope="session")
def kernels() -> native.Kernels:
    """The compiled functions; compiled here where set-up has not done it."""
    said = native.compile_kernels()
    found = native.kernels()
    if found is None and ("processor lacks" in said or "no C++ compiler" in said):
        pytest.skip(said)
    assert found is not None, said
    return found


@pytest.fixture(scope="session")
def make_engine(checkpoint: Callable[[str], Path]) -> Callable[..., Engine]:
    """An engine on a random checkpoint; keywords override the small defaults."""

    def make(family: str = "llama", *, is_overlapped: bool | None = None, **overrides: Any) -> Engine:
        config = EngineConfig(model=str(checkpoint(family)), **{**SMALL, **overrides})
        return Engine(config, is_overlapped=is_overlapped)

    return make


class FixedPace(Pace):
    """Prices of drafts that no clock decides: a looked-up one costs nothing, the draft model's `model_price`."""

    model_price = 0.9  # less than nothing: where there is a draft model, it drafts

    def cost(self, rows: int, more: int) -> float:
        return 1.0

    def model_cost(self, rows: int, more: int) -> float:
        return self.model_price


def at_fixed_prices(engine: Engine, model_price: float = 0.9) -> Engine:
    """The engine, drafting wherever it can."""
    pace = FixedPace()
    pace.model_price = model_price
    engine._pace = engine._scheduler._pace = pace
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
