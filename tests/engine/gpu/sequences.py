"""Sequences to draw for, without an engine."""

from __future__ import annotations

from typing import Any

from local_engine.messages import SamplingParams
from local_engine.sequence import Sequence


def sequence(wish: SamplingParams) -> Sequence:
    """Some way into its answer, which said 3 twice."""
    made: Any = Sequence(
        id=1,
        tokens=[1, 2, 3, 4, 3, 3],
        prompt_tokens=3,
        params=wish,
        answer_tokens_max=20,
        stop_token_ids=frozenset({5}),
        cache_salt=b"",
        priority=0,
        seed=wish.seed or 0,
        text=None,  # type: ignore[arg-type]
    )
    made.counts.update([4, 3, 3])
    return made  # type: ignore[no-any-return]
