"""A deployment's recent speed: TTFT as a line in the prompt's length, TPOT, and a time-out for the
first token.

Knows figures only, neither deployments nor requests. Invariant: always has an estimate, from priors
before the first call; forgets by count and by age, so a deployment that was slow is tried again.

TTFT is `a + b * prompt tokens` by weighted least squares under exponential forgetting (Ljung,
"System Identification", 2nd ed. 1999, section 11.2, in its two-parameter closed form). A ridge
(Hoerl and Kennard 1970) pulls the slope to its prior, and determines it while all prompts have one
length. A long prompt's latency is noisier, so its call weighs less. The priors fade with each call.
TPOT is an exponentially weighted mean. The time-out is a normal quantile of ln(observed TTFT /
predicted TTFT): latencies are skewed to the right, their logarithms much less.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from operator import add, mul

import msgspec


@dataclass(frozen=True, slots=True)
class EstimatePrior:
    """The figures of a deployment before its first call: TTFT of an empty prompt, its slope, and
    TPOT.

    `weight` is the number of observations that the prior counts for.
    """

    ttft_ms: float = 600.0
    prefill_ms_per_token: float = 0.3
    tpot_ms: float = 25.0
    weight: float = 1.0


class Figures(msgspec.Struct, frozen=True):
    """An estimate at one time.

    `weight` is the number of recent calls behind it. A first token times out after `timeout_ratio`
    times its prediction; one call in twenty exceeds `p95_ratio` times it.
    """

    weight: float
    base_ms: float
    prefill_ms_per_token: float
    tpot_ms: float
    timeout_ratio: float = math.inf
    p95_ratio: float = math.inf

    def ttft_ms(self, prompt_tokens: int) -> float:
        """The predicted TTFT in ms for a prompt without warm tokens."""
        ttft_ms = self.base_ms + self.prefill_ms_per_token * prompt_tokens
        return ttft_ms if ttft_ms > 1.0 else 1.0  # a call of `max` costs six times as much


_FIGURES_KEPT_S = 1.0
_CALLS_FIGURED_EACH = 100  # the first calls update the figures one by one
_CALLS_FIGURED_TOGETHER = 16
_NOISE_SPAN_TOKENS = 1000.0
KEEP_PER_OBSERVATION = 0.95
"""The factor by which each observation reduces the earlier sums."""
HALF_LIFE_S = 600.0
"""Seconds after which the sums count half."""
SUMS = 10
"""The number of sums in an estimate."""
_TIMEOUT_SIGMAS = 4.0
_P95_SIGMAS = 1.645
_LOG_SPREAD_PRIOR = 0.7
_CALLS_BEFORE_TIMEOUT = 5.0
_OUTLIER_RATIO = 10.0


class Estimate:
    """Live figures of one deployment in one process. `clock` gives seconds that never decrease."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, prior: EstimatePrior | None = None) -> None:
        self._clock = clock
        self._prior = prior or EstimatePrior()
        self._seen_at = clock()
        self._sums = (0.0,) * SUMS  # of the line, of the ratios' logarithms, of TPOT
        self.calls_seen = 0  # observations since its start
        self._calls_unfigured = 0  # since the figures were computed
        self._figures = Figures(0.0, 0.0, 0.0, 0.0)
        self._figured_until_s = -math.inf

    def figures(self) -> Figures:
        """All figures, computed at most a second ago.

        Between calls they only fade, over minutes. After many calls, a few more change them little
        (`_CALLS_FIGURED_TOGETHER`).
        """
        now_s = self._clock()
        if now_s >= self._figured_until_s:
            sums = self.sums()
            calls, log_sum, log_squares, tpot_weight, tpot_sum = sums[5:]
            belief = self._prior.weight / (1.0 + calls)  # the number of calls that the prior counts for now
            base_ms, slope = self._line(sums[:5], belief)
            tpot_ms = (tpot_sum + belief * self._prior.tpot_ms) / (tpot_weight + belief)
            self._figures = Figures(calls, base_ms, slope, tpot_ms, *_ratios(calls, log_sum, log_squares))
            self._figured_until_s = now_s + _FIGURES_KEPT_S
            self._calls_unfigured = 0
        return self._figures

    def ttft_timeout_ms(
        self, prompt_tokens: int, floor_ms: float, ceiling_ms: float, unlearned_ms: float = math.inf
    ) -> float:
        """The milliseconds to wait for the first token before the next candidate is tried.

        About one call in thirty thousand of a healthy deployment exceeds this wait. It lies within
        [floor_ms, ceiling_ms]. Before `_CALLS_BEFORE_TIMEOUT` calls it is `unlearned_ms`, or twice
        the prediction if that is longer.
        """
        figures = self.figures()
        if figures.weight < _CALLS_BEFORE_TIMEOUT:
            return min(max(unlearned_ms, 2.0 * figures.ttft_ms(prompt_tokens)), ceiling_ms)
        return min(max(figures.ttft_ms(prompt_tokens) * figures.timeout_ratio, floor_ms), ceiling_ms)

    def ttft_p95_ms(self, prompt_tokens: int) -> float | None:
        """The time to the first token in ms that one call in twenty exceeds; None until it is
        learned.
        """
        figures = self.figures()
        learned = figures.weight >= _CALLS_BEFORE_TIMEOUT
        return figures.ttft_ms(prompt_tokens) * figures.p95_ratio if learned else None

    def observe(self, ttft_ms: float, tpot_ms: float | None, prompt_tokens: int) -> None:
        """Add one finished call. Negative and non-finite figures are ignored.

        `prompt_tokens` are the prefilled tokens, without cached ones; `tpot_ms` is None for fewer
        than two tokens.
        """
        if not (math.isfinite(ttft_ms) and ttft_ms >= 0 and prompt_tokens >= 0):
            return
        predicted_ms = self.figures().ttft_ms(prompt_tokens)
        self.calls_seen += 1
        self._calls_unfigured += 1
        if self.calls_seen < _CALLS_FIGURED_EACH or self._calls_unfigured >= _CALLS_FIGURED_TOGETHER:
            self._figured_until_s = -math.inf
        # bounds an outlier's weight: one call counts as at most ten times its prediction
        bounded_ms = min(max(ttft_ms, 1.0), predicted_ms * _OUTLIER_RATIO)
        now_s = self._clock()
        kept_share = self._kept(now_s)
        self._seen_at = now_s
        keep = kept_share * KEEP_PER_OBSERVATION
        x = float(prompt_tokens)
        w = 1.0 / (1.0 + x / _NOISE_SPAN_TOKENS) ** 2
        wx, ratio = w * x, math.log(bounded_ms / predicted_ms)
        call = (w, wx, w * bounded_ms, wx * x, wx * bounded_ms, 1.0, ratio, ratio * ratio)
        *others, tpot_weight, tpot_sum = self._sums
        if tpot_ms is not None and math.isfinite(tpot_ms) and tpot_ms >= 0:
            tpot_weight, tpot_sum = tpot_weight * keep + 1.0, tpot_sum * keep + tpot_ms
        else:
            tpot_weight, tpot_sum = tpot_weight * kept_share, tpot_sum * kept_share
        self._sums = (*map(add, map(mul, others, repeat(keep)), call), tpot_weight, tpot_sum)

    def observe_timeout(self, waited_ms: float, prompt_tokens: int) -> None:
        """Add a call without a first token within `waited_ms`: the prediction may rise, but not
        fall.
        """
        self.observe(max(waited_ms, self.figures().ttft_ms(prompt_tokens)), None, prompt_tokens)

    def sums(self) -> tuple[float, ...]:
        """The learned sums, faded to now; the sums of several processes add up."""
        kept = self._kept(self._clock())
        return tuple(map(mul, self._sums, repeat(kept)))

    def restore(self, sums: tuple[float, ...]) -> None:
        """Replace all learned sums with `sums`, as of now."""
        self._sums = sums
        self._seen_at = self._clock()
        self._figured_until_s = -math.inf

    def _line(self, sums: tuple[float, ...], belief: float) -> tuple[float, float]:
        """The base in ms and the slope in ms per token of the fitted line, both at least 0."""
        prior, (weight, x, y, xx, xy) = self._prior, sums
        weight += belief
        x_mean = x / weight
        y_mean = (y + belief * prior.ttft_ms) / weight
        ridge = belief * _NOISE_SPAN_TOKENS**2
        covariance = xy - weight * x_mean * y_mean + ridge * prior.prefill_ms_per_token
        slope = max(covariance / (max(xx - weight * x_mean * x_mean, 0.0) + ridge), 0.0)
        base_ms = y_mean - slope * x_mean
        if base_ms < 0.0:  # TTFT cannot be negative: take the line through the origin
            return 0.0, y_mean / x_mean
        return base_ms, slope

    def _kept(self, now_s: float) -> float:
        return math.pow(0.5, max(0.0, now_s - self._seen_at) / HALF_LIFE_S)


def _ratios(calls: float, log_sum: float, log_squares: float) -> tuple[float, float]:
    """The ratios of the time-out and of the 95% quantile to the prediction."""
    mean = log_sum / (calls + 1.0)
    squares = (log_squares + _LOG_SPREAD_PRIOR**2) / (calls + 1.0)
    spread = math.sqrt(max(squares - mean * mean, 0.01))
    timeout, p95 = mean + _TIMEOUT_SIGMAS * spread, mean + _P95_SIGMAS * spread
    return math.exp(min(timeout, 20.0)), math.exp(min(p95, 20.0))


_LENGTHS_KEPT = 256
_LENGTHS_LEAST = 20
_LENGTHS_SHARE = 0.95


class Lengths:
    """The tokens of an alias's latest answers, each with one choice.

    Until enough answers are counted there is no usual length: a budget then holds the longest
    answer.
    """

    def __init__(self) -> None:
        self._latest: deque[int] = deque(maxlen=_LENGTHS_KEPT)

    def add(self, tokens: int) -> None:
        """Count a complete answer."""
        self._latest.append(tokens)

    def usual(self) -> int | None:
        """The 95% quantile, rounded up to an observed length; None for fewer than 20 answers."""
        if len(self._latest) < _LENGTHS_LEAST:
            return None
        ordered = sorted(self._latest)
        return ordered[min(len(ordered) - 1, int(_LENGTHS_SHARE * len(ordered)))]
