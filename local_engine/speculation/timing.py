"""StepTiming: this engine's speed on this machine, measured from its own steps.

Predictions of TTFT and the choice of drafts use it. Knows only rows and seconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

_SHARE, _SLOPE_SHARE = 0.05, 0.2  # weights of a new measurement: contexts grow, batches change
_OFF_MIN = 32.0  # squared rows: steps that differ by less hardly show a row's time
_FORGETS = 0.003  # of a row's estimate, with each step
_SLOW_SHARE = 0.25  # of a step's excess time: as likely as not it waited for a busy machine


@dataclass(frozen=True, slots=True, order=True)
class Moment:
    """A time on the wall clock, and on this process' CPU clock."""

    wall_s: float
    cpu_s: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), time.process_time())

    def busy_s(self, before: Moment, *, is_device_here: bool) -> float:
        """The seconds since `before`, without the time that other processes had the cores; on a
        device outside this process, all seconds."""
        wall_s = self.wall_s - before.wall_s
        return min(wall_s, self.cpu_s - before.cpu_s) if is_device_here else wall_s


@dataclass(slots=True)
class Line:
    """The milliseconds of a step by its rows: a straight line through the mean of the latest steps.
    Its slope `row_ms` is learned from steps of other sizes (normalised least mean squares; an
    expectile, so that delayed steps count less)."""

    row_ms: float = 0.0
    # a row's time to fall back to where it was not measured for long; 0 is unknown
    assumed_ms: float = 0.0
    count: int = 0
    mean_rows: float = 0.0
    mean_ms: float = 0.0

    def observe(self, rows: int, duration_s: float) -> None:
        """Learn from a step of `rows` rows."""
        predicted = self.at(rows)
        self.count += 1
        if predicted is None:
            self.mean_rows, self.mean_ms = rows, 1000.0 * duration_s
            return
        error = 1000.0 * duration_s - predicted
        if error > 0.0 and self.count > 2:
            error = _SLOW_SHARE * min(error, predicted)
        off, new = rows - self.mean_rows, 1.0 / self.count
        self.mean_rows += max(_SHARE, new) * off
        self.mean_ms += max(_SHARE, new) * (predicted + error - self.mean_ms)
        self.row_ms = max(0.0, self.row_ms + max(_SLOPE_SHARE, new) * off * error / (off * off + _OFF_MIN))
        if self.assumed_ms:
            self.row_ms += _FORGETS * (self.assumed_ms - self.row_ms)

    def assume(self, row_ms: float) -> None:
        """Set a row's least time, measured from steps of another kind."""
        self.assumed_ms = _blend(self.assumed_ms, row_ms)
        self.row_ms = self.row_ms or self.assumed_ms

    def at(self, rows: int) -> float | None:
        """The milliseconds of a step of `rows` rows; None before the first measurement."""
        if not self.count:
            return None
        return max(0.1 * self.mean_ms, self.mean_ms + self.row_ms * (rows - self.mean_rows))


@dataclass(slots=True)
class StepTiming:
    """The speed of this engine. `steps`: decode steps by their rows, drafts and forced tokens
    included. `draft_steps`: steps of the draft model."""

    prefill_tokens_per_s: float = 0.0
    decode_ms_per_token: float = 0.0
    steps: Line = field(default_factory=Line)
    draft_steps: Line = field(default_factory=Line)

    def observe(self, counts: Many[int], duration_s: float, busy_s: float, *, is_decode: bool) -> None:
        """Learn from one step of each sequence's `counts` of tokens, all of them answers' if
        `is_decode`. `duration_s` is its wall time, `busy_s` the same without the time that other
        processes had the cores."""
        tokens = sum(counts)
        if is_decode:
            self.steps.observe(tokens, busy_s)
            if tokens == len(counts):
                self.decode_ms_per_token = _blend(self.decode_ms_per_token, 1000.0 * duration_s)
        elif tokens >= 32:
            self.prefill_tokens_per_s = _blend(self.prefill_tokens_per_s, tokens / duration_s)
            self.steps.assume(1000.0 * busy_s / tokens)

    def forget(self) -> None:
        """Discard all measurements: the steps so far were not typical."""
        self.prefill_tokens_per_s = self.decode_ms_per_token = 0.0
        self.steps, self.draft_steps = Line(), Line()


def _blend(average: float, value: float) -> float:
    return value if average == 0.0 else 0.9 * average + 0.1 * value
