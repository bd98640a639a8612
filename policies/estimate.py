"""How fast a deployment is lately: TTFT as a line in the prompt's length, TPOT, and how long to wait for a first token.

Knows no deployments' names and no requests, only their figures. Invariant: always answers, from priors before
anything was seen; forgets by count and by age, so that what was slow once is tried again.

TTFT is `a + b * prompt tokens` by weighted least squares under exponential forgetting (Ljung, "System
Identification", 2nd ed. 1999, section 11.2, in its two-parameter closed form), the slope drawn to its prior by a
ridge (Hoerl and Kennard 1970), which decides it while all prompts have one length. Latency's noise grows with its
length, so a long prompt's call weighs less. The priors fade as calls come in. TPOT is an exponentially weighted mean.
The time-out is a normal quantile of the logarithm of observed over predicted TTFT: latencies are skewed to the
right, their logarithms much less.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec


@dataclass(frozen=True, slots=True)
class EstimatePrior:
    """What is believed of a deployment that nobody has called: a TTFT for an empty prompt, its slope, and TPOT.

    `weight` is how many observations the belief counts for.
    """

    ttft_ms: float = 600.0
    prefill_ms_per_token: float = 0.3
    tpot_ms: float = 25.0
    weight: float = 1.0


class Figures(msgspec.Struct, frozen=True):
    """An estimate at one moment. `weight` is how many recent calls it rests on; a first token that takes `timeout_ratio` times
    what is predicted is not to be waited for any longer."""

    weight: float
    base_ms: float
    prefill_ms_per_token: float
    tpot_ms: float
    timeout_ratio: float = math.inf

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Predicted TTFT for a prompt of which nothing is warm."""
        return max(self.base_ms + self.prefill_ms_per_token * prompt_tokens, 1.0)


_FIGURES_KEPT_S = 1.0
_CALLS_FIGURED_EACH = 100  # the first ones at once
_CALLS_FIGURED_TOGETHER = 16
_NOISE_SPAN_TOKENS = 1000.0
_KEEP_PER_OBSERVATION = 0.95
_HALF_LIFE_S = 600.0
_TIMEOUT_SIGMAS = 4.0
_LOG_SPREAD_PRIOR = 0.7
_CALLS_BEFORE_TIMEOUT = 5.0
_OUTLIER_RATIO = 10.0


class Estimate:
    """Live figures of one deployment in one process. `clock` gives seconds that only grow."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, prior: EstimatePrior | None = None) -> None:
        self._clock = clock
        self._prior = prior or EstimatePrior()
        self._seen_at = clock()
        self._weight = 0.0
        self._x = 0.0
        self._y = 0.0
        self._xx = 0.0
        self._xy = 0.0
        self._calls = 0.0
        self._log_sum = 0.0
        self._log_squares = 0.0
        self._tpot_weight = 0.0
        self._tpot_sum = 0.0
        self._calls_seen = 0
        self._calls_unfigured = 0  # since the figures were worked out
        self._figures: Figures | None = None
        self._figured_at_s = 0.0

    @property
    def weight(self) -> float:
        """How many recent calls the figures rest on; 0 before the first, shrinking with time."""
        return self.figures().weight

    @property
    def tpot_ms(self) -> float:
        """Milliseconds per output token after the first."""
        return self.figures().tpot_ms

    @property
    def prefill_ms_per_token(self) -> float:
        """What one more prompt token adds to TTFT, and a warm one saves."""
        return self.figures().prefill_ms_per_token

    def ttft_ms(self, prompt_tokens: int) -> float:
        """Predicted TTFT for a prompt of which nothing is warm."""
        return self.figures().ttft_ms(prompt_tokens)

    def figures(self) -> Figures:
        """All of them at once, worked out at most a second ago. Between two calls they only fade, over minutes; and where there
        have been many calls, a few more change little (`_CALLS_FIGURED_TOGETHER`)."""
        now_s = self._clock()
        if self._figures is None or not 0.0 <= now_s - self._figured_at_s < _FIGURES_KEPT_S:
            kept = self._kept(now_s)
            belief = self._belief(kept)
            base_ms, slope = self._line(kept, belief)
            tpot_ms = (self._tpot_sum * kept + belief * self._prior.tpot_ms) / (self._tpot_weight * kept + belief)
            self._figures = Figures(self._calls * kept, base_ms, slope, tpot_ms, self._timeout_ratio(kept))
            self._figured_at_s = now_s
            self._calls_unfigured = 0
        return self._figures

    def ttft_timeout_ms(self, prompt_tokens: int, floor_ms: float, ceiling_ms: float) -> float:
        """How long to wait for the first token before the next candidate is tried: a wait that about one call in
        thirty thousand of a healthy deployment would exceed, within [floor_ms, ceiling_ms]; the ceiling before
        enough calls were seen to know."""
        figures = self.figures()
        if figures.weight < _CALLS_BEFORE_TIMEOUT:
            return ceiling_ms
        return min(max(figures.ttft_ms(prompt_tokens) * figures.timeout_ratio, floor_ms), ceiling_ms)

    def _timeout_ratio(self, kept: float) -> float:
        weight = self._calls * kept
        mean = self._log_sum * kept / (weight + 1.0)
        squares = (self._log_squares * kept + _LOG_SPREAD_PRIOR**2) / (weight + 1.0)
        spread = math.sqrt(max(squares - mean * mean, 0.01))
        return math.exp(min(mean + _TIMEOUT_SIGMAS * spread, 20.0))

    def observe(self, ttft_ms: float, tpot_ms: float | None, prompt_tokens: int) -> None:
        """One finished call. `prompt_tokens` are those it had to prefill (cached ones left out); `tpot_ms` None
        where fewer than two tokens came. Negative and non-finite figures are ignored."""
        if not (math.isfinite(ttft_ms) and ttft_ms >= 0 and prompt_tokens >= 0):
            return
        predicted_ms = self.ttft_ms(prompt_tokens)
        self._calls_seen += 1
        self._calls_unfigured += 1
        if self._calls_seen < _CALLS_FIGURED_EACH or self._calls_unfigured >= _CALLS_FIGURED_TOGETHER:
            self._figures = None
        # one freak call moves the line by as much as ten times the prediction, a deployment that stays slow all the way
        bounded_ms = min(max(ttft_ms, 1.0), predicted_ms * _OUTLIER_RATIO)
        now_s = self._clock()
        kept = self._kept(now_s)
        self._seen_at = now_s
        keep = kept * _KEEP_PER_OBSERVATION
        x = float(prompt_tokens)
        w = _certainty(x)
        self._weight = self._weight * keep + w
        self._x = self._x * keep + w * x
        self._y = self._y * keep + w * bounded_ms
        self._xx = self._xx * keep + w * x * x
        self._xy = self._xy * keep + w * x * bounded_ms
        ratio = math.log(bounded_ms / predicted_ms)
        self._calls = self._calls * keep + 1.0
        self._log_sum = self._log_sum * keep + ratio
        self._log_squares = self._log_squares * keep + ratio * ratio
        if tpot_ms is not None and math.isfinite(tpot_ms) and tpot_ms >= 0:
            self._tpot_weight = self._tpot_weight * keep + 1.0
            self._tpot_sum = self._tpot_sum * keep + tpot_ms
        else:
            self._tpot_weight *= kept
            self._tpot_sum *= kept

    def observe_timeout(self, waited_ms: float, prompt_tokens: int) -> None:
        """No first token within `waited_ms`: TTFT was at least that, so the prediction may rise but never fall."""
        self.observe(max(waited_ms, self.ttft_ms(prompt_tokens)), None, prompt_tokens)

    def _line(self, kept: float, belief: float) -> tuple[float, float]:
        """Base in ms and slope in ms per token of the fitted line, neither below 0."""
        prior = self._prior
        weight = self._weight * kept + belief
        x_mean = self._x * kept / weight
        y_mean = (self._y * kept + belief * prior.ttft_ms) / weight
        xx = self._xx * kept - weight * x_mean * x_mean
        xy = self._xy * kept - weight * x_mean * y_mean
        ridge = belief * _NOISE_SPAN_TOKENS**2
        slope = max((xy + ridge * prior.prefill_ms_per_token) / (max(xx, 0.0) + ridge), 0.0)
        base_ms = y_mean - slope * x_mean
        if base_ms < 0.0:  # a line through the origin, rather than one that promises tokens before the request
            return 0.0, y_mean / x_mean
        return base_ms, slope

    def _belief(self, kept: float) -> float:
        """How many calls the prior counts for now."""
        return self._prior.weight / (1.0 + self._calls * kept)

    def _kept(self, now_s: float) -> float:
        return math.pow(0.5, max(0.0, now_s - self._seen_at) / _HALF_LIFE_S)


def _certainty(prompt_tokens: float) -> float:
    return 1.0 / (1.0 + prompt_tokens / _NOISE_SPAN_TOKENS) ** 2
