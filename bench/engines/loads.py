"""Loads: what is asked of an engine, when, and what the times at which tokens came back say of it.

Knows no engine and no model beyond the size of its vocabulary. Every system is given the same requests and tells of each
one when its tokens came; all figures come from those times. Invariant: a request's times are one for each token it asked
for, never fewer: an answer that is cut short is an error, never a fast one.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

PREFILL, DECODE, TOTAL = "prefill tokens/s", "decode tokens/s", "output tokens/s"


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, how many tokens must answer it, and when it comes: seconds from the start of the run."""

    tokens: tuple[int, ...]
    answer: int
    due_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Run:
    """Of each request, in their order, when each of its tokens came: seconds from the start of the run. `cpu_s`: CPU
    time of the system's process over the run; `marks`: of each time that tokens came, the time and the CPU time so far,
    where the system can tell."""

    times_s: tuple[tuple[float, ...], ...]
    cpu_s: float
    marks: tuple[tuple[float, float], ...] = ()

    @property
    def total_s(self) -> float:
        return max(times[-1] for times in self.times_s)

    @property
    def all_began_s(self) -> float:
        return max(times[0] for times in self.times_s)

    def decoded(self) -> Phase | None:
        """While all were decoding: after the last first token and until the first end."""
        start, end = self.all_began_s, min(times[-1] for times in self.times_s)
        tokens = sum(start < at <= end for times in self.times_s for at in times)
        return Phase(tokens, end - start, self._cpu_s(start, end)) if tokens else None

    def _cpu_s(self, start_s: float, end_s: float) -> float | None:
        until = [max((cpu_s for at, cpu_s in self.marks if at <= moment), default=0.0) for moment in (start_s, end_s)]
        return until[1] - until[0] if self.marks else None

    def phase(self, figure: str, prompt_tokens: int) -> Phase | None:
        """What the figure is about."""
        if figure == PREFILL:
            return Phase(prompt_tokens, self.all_began_s, self._cpu_s(0.0, self.all_began_s))
        return self.decoded() if figure == DECODE else Phase(sum(map(len, self.times_s)), self.total_s, self.cpu_s)


@dataclass(frozen=True, slots=True)
class Phase:
    """So many tokens in so many seconds of time and of CPU time."""

    tokens: int
    duration_s: float
    cpu_s: float | None


class System(Protocol):
    """What answers prompts greedily. `weights` names how it keeps them."""

    name: str
    weights: str

    def lacks(self, scenario: Scenario) -> str | None:
        """Why it can't be asked this; None where it can."""

    def run(self, requests: Sequence[Request]) -> Run:
        """Answer all requests, each from its time on."""

    def close(self) -> None:
        """Free what it holds."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """`batch` prompts of `shared` common and `own` tokens of their own, each answered with `answer` tokens.

    `is_warm`: the common tokens were asked before, with others of their own. `is_open`: prompts of 32 to 1,024 tokens
    (uniform in their logarithm) with answers of 8 to 64 come one after the other at random, at a rate that is given,
    whether or not those before are answered; `own` and `answer` are then the greatest.
    """

    name: str
    figure: str
    batch: int
    own: int
    answer: int
    shared: int = 0
    is_warm: bool = False
    is_open: bool = False

    def requests(self, vocabulary: int, seed: int, rate_per_s: float | None = None) -> list[Request]:
        """Random token ids; another seed shares nothing but when they come."""
        draw = random.Random(f"{self.name} {seed}")
        if self.is_open:
            return self._open(draw, vocabulary, rate_per_s)
        common = self._tokens(draw, vocabulary, self.shared)
        return [Request(common + self._tokens(draw, vocabulary, self.own), self.answer) for _ in range(self.batch)]

    def before(self, vocabulary: int, seed: int) -> list[Request]:
        """What was asked before, where the scenario is warm."""
        if not self.is_warm:
            return []
        first = self.requests(vocabulary, seed)[0]
        draw = random.Random(f"{self.name} {seed} before")
        return [Request(first.tokens[: self.shared] + self._tokens(draw, vocabulary, self.own), 2)]

    def _open(self, draw: random.Random, vocabulary: int, rate_per_s: float | None) -> list[Request]:
        shape = random.Random(self.name)  # the same lengths and gaps in every repeat
        due_s = 0.0
        requests = []
        for _ in range(self.batch):
            own = round(32 * (self.own / 32) ** shape.random())
            answer = round(8 * (self.answer / 8) ** shape.random())
            requests.append(Request(self._tokens(draw, vocabulary, own), answer, due_s))
            due_s += shape.expovariate(rate_per_s) if rate_per_s else 0.0
        return requests

    @staticmethod
    def _tokens(draw: random.Random, vocabulary: int, count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))


SCENARIOS = (
    Scenario("prefill-512", PREFILL, 1, 512, 1),
    Scenario("prefill-4096", PREFILL, 1, 4096, 1),
    Scenario("decode-1", DECODE, 1, 128, 48),
    Scenario("decode-8", DECODE, 8, 128, 32),
    Scenario("decode-32", DECODE, 32, 64, 28),
    Scenario("decode-64", DECODE, 64, 32, 16),
    Scenario("shared-cold", TOTAL, 32, 30, 64, shared=1000),
    Scenario("shared-warm", TOTAL, 32, 30, 64, shared=1000, is_warm=True),
    Scenario("shared-small", TOTAL, 16, 24, 24, shared=384),
    Scenario("open", TOTAL, 32, 1024, 64, is_open=True),
)
QUICK = ("prefill-512", "decode-1", "decode-8", "shared-small")


@dataclass(frozen=True, slots=True)
class Row:
    """The medians of one system in one scenario; a figure that the scenario does not measure is None.

    `cpu_ms_per_token`: the system's CPU time per token of the headline's phase: of the prompts until the last has its
    first token, of what is decoded while all are, or of all output; a busy machine changes it little. `ttft_*` from the
    time a request was due to its first token, `tpot_*` between a request's further tokens, over all requests of all
    repeats. `floor_value`: the headline if nothing but reading and multiplying took time.
    """

    system: str
    weights: str
    scenario: str
    figure: str
    value: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float | None
    tpot_p95_ms: float | None
    tpot_p99_ms: float | None
    total_s: float
    cpu_ms_per_token: float | None
    floor_value: float | None
    floor_share: float | None
    threads: int
    repeats: int


def summarise(
    system: System,
    scenario: Scenario,
    requests: Sequence[Request],
    runs: Sequence[Run],
    *,
    threads: int,
    floor_value: float | None = None,
) -> Row:
    """Medians over the repeats; percentiles over all their requests. `requests`: of any repeat, their sizes are equal."""
    for run in runs:
        for request, times in zip(requests, run.times_s, strict=True):
            if len(times) != request.answer:
                raise RuntimeError(f"{system.name} gave {len(times)} tokens where {request.answer} were asked for")
    prompt_tokens = sum(len(request.tokens) for request in requests)
    decoded = [phase for run in runs if (phase := run.decoded()) is not None]
    phases = [phase for run in runs if (phase := run.phase(scenario.figure, prompt_tokens)) is not None]
    value = statistics.median(phase.tokens / phase.duration_s for phase in phases)
    cpu_ms = [1000 * phase.cpu_s / phase.tokens for phase in phases if phase.cpu_s is not None]
    ttft = [
        1000 * (times[0] - request.due_s) for run in runs for request, times in zip(requests, run.times_s, strict=True)
    ]
    tpot = [1000 * (times[-1] - times[0]) / (len(times) - 1) for run in runs for times in run.times_s if len(times) > 1]
    return Row(
        system=system.name,
        weights=system.weights,
        scenario=scenario.name,
        figure=scenario.figure,
        value=value,
        prefill_tokens_per_s=statistics.median(prompt_tokens / run.all_began_s for run in runs),
        decode_tokens_per_s=statistics.median(d.tokens / d.duration_s for d in decoded) if decoded else None,
        output_tokens_per_s=statistics.median(sum(map(len, run.times_s)) / run.total_s for run in runs),
        ttft_p50_ms=percentile(ttft, 50),
        ttft_p95_ms=percentile(ttft, 95),
        ttft_p99_ms=percentile(ttft, 99),
        tpot_p50_ms=percentile(tpot, 50) if tpot else None,
        tpot_p95_ms=percentile(tpot, 95) if tpot else None,
        tpot_p99_ms=percentile(tpot, 99) if tpot else None,
        total_s=statistics.median(run.total_s for run in runs),
        cpu_ms_per_token=statistics.median(cpu_ms) if cpu_ms else None,
        floor_value=floor_value,
        floor_share=value / floor_value if floor_value else None,
        threads=threads,
        repeats=len(runs),
    )


def percentile(values: Sequence[float], share: int) -> float:
    """The nearest-rank percentile: the smallest value that `share` percent of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
