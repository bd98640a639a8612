"""Pace: how fast this engine is on this machine, measured from its own steps.

Predictions of TTFT and the decision whether a draft pays stand on it. Knows rows and seconds, nothing else.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from local_engine.scheduler import Chunk

_ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # steps of similar size are one measurement
_FRESH_STEPS = 1000  # an older measurement is none: contexts grow, machines get busy


@dataclass(slots=True)
class Times:
    """Milliseconds of steps by their rows, as moving averages, with when each was last measured."""

    _ms: dict[int, tuple[float, int]] = field(default_factory=dict)

    def observe(self, rows: int, duration_s: float, now: int) -> None:
        size = _size(rows)
        self._ms[size] = (_blend(self._ms.get(size, (0.0, 0))[0], 1000.0 * duration_s), now)

    def at(self, rows: int, now: int) -> float | None:
        """What a step of so many rows takes: as measured, or on the line through the measurements next to it. None where there
        are too few: of that size or, for sizes beside it, of two."""
        size = _size(rows)
        known = sorted((at, ms) for at, (ms, when) in self._ms.items() if now - when < _FRESH_STEPS)
        exact = dict(known).get(size)
        if exact is not None or len(known) < 2:
            return exact
        first = min(bisect(known, (size, 0.0)), len(known) - 1) or 1
        (low, low_ms), (high, high_ms) = known[first - 1], known[first]
        return max(min(low_ms, high_ms), low_ms + (high_ms - low_ms) * (size - low) / (high - low))

    def least(self, now: int) -> float:
        """What the quickest step takes; 0 where none is known."""
        return min((ms for ms, when in self._ms.values() if now - when < _FRESH_STEPS), default=0.0)


@dataclass(slots=True)
class Pace:
    """Moving averages, counted in decode steps. `draft_steps`: those of the draft model, where there is one."""

    prefill_tokens_per_s: float = 0.0
    decode_ms_per_token: float = 0.0
    steps: Times = field(default_factory=Times)
    draft_steps: Times = field(default_factory=Times)
    _now: int = 0

    def observe(self, chunks: Many[Chunk], duration_s: float) -> None:
        """Learn from one step that took `duration_s`."""
        tokens = sum(chunk.count for chunk in chunks)
        if all(chunk.count == 1 + len(chunk.draft) for chunk in chunks):
            self._now += 1
            self.steps.observe(tokens, duration_s, self._now)
            if tokens == len(chunks):
                self.decode_ms_per_token = _blend(self.decode_ms_per_token, 1000.0 * duration_s)
        elif tokens >= 32:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / duration_s)

    def observe_draft(self, rows: int, duration_s: float) -> None:
        """Learn from one step of the draft model that gave a token to each of `rows` sequences."""
        self.draft_steps.observe(rows, duration_s, self._now)

    def cost(self, rows: int, more: int) -> float:
        """The time of a decode step of `rows + more` rows in times of one of `rows`; infinite while the latter is unknown and
        1 while the former is, so that both get measured. `more` is what one sequence drafts: so others are assumed to
        draft as much."""
        few, many = self.steps.at(rows, self._now), self.steps.at(rows * (1 + more), self._now)
        if few is None:
            return math.inf
        return max(1.0, many / few) if many is not None else 1.0

    def model_cost(self, rows: int, more: int) -> float:
        """The same where the draft model makes the draft, one step of its own for each token."""
        few = self.steps.at(rows, self._now)
        draft = self.draft_steps.at(rows, self._now) or self.draft_steps.least(self._now)
        return self.cost(rows, more) + (more * draft / few if few else 0.0)

    def forget(self) -> None:
        """Start anew: what was measured was not typical."""
        self.prefill_tokens_per_s = self.decode_ms_per_token = 0.0
        self.steps, self.draft_steps = Times(), Times()


def _size(rows: int) -> int:
    return next((size for size in _ROWS if rows <= size), rows)


def _blend(average: float, value: float) -> float:
    return value if average == 0.0 else 0.9 * average + 0.1 * value
