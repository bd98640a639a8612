"""Pace: how fast this engine is on this machine, measured from its own steps.

Predictions of TTFT and the decision whether a draft pays stand on it. Knows rows and seconds, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from local_engine.scheduler import Chunk

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # steps of similar size are one measurement


@dataclass(slots=True)
class Pace:
    """Moving averages. A decode step of `rows` takes `_step_ms[size of rows]`."""

    prefill_tokens_per_s: float = 0.0
    decode_ms_per_token: float = 0.0
    _step_ms: dict[int, float] = field(default_factory=dict)

    def observe(self, chunks: Many[Chunk], duration_s: float) -> None:
        """Learn from one step that took `duration_s`."""
        tokens = sum(chunk.count for chunk in chunks)
        if all(chunk.count == 1 + len(chunk.draft) for chunk in chunks):
            size = _size(tokens)
            self._step_ms[size] = _blend(self._step_ms.get(size, 0.0), 1000.0 * duration_s)
            if tokens == len(chunks):
                self.decode_ms_per_token = _blend(self.decode_ms_per_token, 1000.0 * duration_s)
        elif tokens >= 32:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / duration_s)

    def cost(self, rows: int, more: int) -> float:
        """The time of a decode step of `rows + more` rows in times of one of `rows`; 1 while either is unmeasured, so
        that it gets measured. `more` is what one sequence drafts: so others are assumed to draft as much."""
        few, many = self._step_ms.get(_size(rows)), self._step_ms.get(_size(rows * (1 + more)))
        return max(1.0, many / few) if few and many else 1.0

    def forget(self) -> None:
        """Start anew: what was measured was not typical."""
        self.prefill_tokens_per_s = self.decode_ms_per_token = 0.0
        self._step_ms.clear()


def _size(rows: int) -> int:
    return next((size for size in _ROWS if rows <= size), rows)


def _blend(average: float, value: float) -> float:
    return value if average == 0.0 else 0.9 * average + 0.1 * value
