"""The probability that a cached answer is right, and the threshold it must reach.

Pure numbers: knows no texts and no cache. The model is ridge logistic regression towards a prior.
By MacKay's Laplace approximation (1992) the posterior is normal with the inverse Hessian as its
covariance. Beside it, a region of the namespace has a deviation of its own, of which n verdicts near
by leave the variance 1 / (1/v + n/4): so confidence falls with the distance from verdicts. What is
served has p = sigmoid(m - sd); what is asked about has the mean.

One inequality bounds the error. T is the least p for which, over the latest requests,

    k * (served risk + sum of (1 - p) over the comparisons with p >= T) <= error_max * requests

where k is how many times as many of the nearly sure comparisons were wrong as their p said.

Invariants: the same rows in any order give the same model, up to rounding; without a row the model
is the prior; a difference never makes an answer likelier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from cache.decision.differences import Freed, kinds_of
from cache.decision.features import EVIDENCE, FEATURES, SIGNS
from cache.query import Trial

Vector = NDArray[np.float64]

ROWS_MAX = 8_000
_REQUESTS = 4_000  # rows that the threshold is of: the latest
_ROWS_MIN = 40  # verdicts for a first fit
_RIDGE = (15.0, 0.3)  # the second of the intercept
_WEIGHT_MAX = 20.0
_FAR = 5.0  # standard deviations: a number farther out says no more
_STEPS = 12
_REGION = 4.0  # variance of what a region without verdicts may deviate by, in logits
THRESHOLD_MIN = 0.7
_NEARLY_SURE = 0.9  # comparisons from this p on say how well p is calibrated where it matters
_EXCESS_MIN = 1.0  # the comparisons may say that p is too high, not that it is too low
COUNT = len(FEATURES)


@dataclass(frozen=True, slots=True)
class Prior:
    """The parameters that `./run bench prior` learned offline: `mean` and `scale` of each feature,
    `coefficients` on that scale, the intercept last, and the diagonal of their covariance.
    """

    mean: Vector
    scale: Vector
    coefficients: Vector
    variance: Vector


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the trial of a decision, and whether the answers were the same, None where no
    judge could tell.

    The trial's features end with the number of hits since the row before, and the errors to expect
    of them. Its `chance` is that of the comparison: 1 on a miss, that of a check of a hit.
    """

    trial: Trial
    is_right: bool | None
    group: bytes = b""  # whose answer was compared

    @property
    def label(self) -> float:
        """1 for the same, else 0."""
        return float(self.is_right is True)

    @property
    def weight(self) -> float:
        """How many comparisons it stands for (Horvitz and Thompson, 1952)."""
        return min(_WEIGHT_MAX, 1 / self.trial.chance)

    @property
    def features(self) -> Vector:
        return np.frombuffer(self.trial.features, "<f4").astype(np.float64)


class LogisticModel:
    """The prior, and what was learned since. A fit makes another model: this one does not change."""

    def __init__(self, prior: Prior, coefficients: Vector | None = None, covariance: Vector | None = None) -> None:
        self._prior = prior
        self._coefficients = prior.coefficients if coefficients is None else coefficients
        self._covariance = np.diag(prior.variance) if covariance is None else covariance

    def mean(self, features: Vector) -> Vector:
        """The probabilities of rows (n, features)."""
        return _sigmoid(self._standard(features) @ self._coefficients)

    def lower(self, features: Vector) -> Vector:
        """The same, one standard deviation down."""
        x = self._standard(features)
        variance = np.maximum(0.0, np.einsum("ij,jk,ik->i", x, self._covariance, x))
        verdicts = np.expm1(features[:, EVIDENCE])
        return _sigmoid(x @ self._coefficients - np.sqrt(variance + 1 / (1 / _REGION + verdicts / 4)))

    def fitted(
        self,
        features: Vector,
        is_right: Vector,
        weights: Vector,
        ridge: tuple[float, float] = _RIDGE,
        steps: int = _STEPS,
    ) -> LogisticModel:
        """Newton's method on the penalised likelihood; a weight of the wrong sign is held at 0."""
        x = self._standard(features)
        start = self._prior.coefficients
        penalty = np.full(len(start), ridge[0])
        penalty[-1] = ridge[1]
        b = self._coefficients.copy()
        for _ in range(steps):
            mean = _sigmoid(x @ b)
            gradient = x.T @ (weights * (mean - is_right)) + penalty * (b - start)
            hessian = (x * (weights * mean * (1 - mean))[:, None]).T @ x + np.diag(penalty)
            held = (b == 0) & (SIGNS * gradient > 0)
            free = ~held
            step = np.zeros(len(b))
            step[free] = np.linalg.solve(hessian[np.ix_(free, free)], gradient[free])
            size = float(np.abs(step).max())
            b = b - step * min(1.0, 2.0 / size if size else 1.0)
            b[b * SIGNS < 0] = 0.0
            if size < 1e-4:
                break
        return LogisticModel(self._prior, b, np.asarray(np.linalg.inv(hessian), np.float64))

    def as_prior(self) -> Prior:
        """Itself, for others to start from."""
        return replace(self._prior, coefficients=self._coefficients, variance=np.diag(self._covariance).copy())

    def _standard(self, features: Vector) -> Vector:
        scaled = np.clip((features[:, :COUNT] - self._prior.mean) / self._prior.scale, -_FAR, _FAR)
        return np.hstack([scaled, np.ones((len(scaled), 1))])


Run = Callable[[Callable[[], object]], object]
"""Does a piece of work, at once or on a thread of its own; pieces in the order in which they
came.
"""


def at_once(work: Callable[[], object]) -> object:
    return work()


def beside() -> Run:
    """On one thread, so that a fit holds up no decision. A fit that fails is logged by
    concurrent.futures: that is what the callback is for; the model stays as it was.
    """
    thread = ThreadPoolExecutor(1, thread_name_prefix="fits")
    return lambda work: thread.submit(work).add_done_callback(Future.result)


class LearnedModel:
    """The verdicts of one namespace: what they freed, a model and its threshold, refitted as they
    come. What no judge could tell counts as wrong, and frees nothing.

    `run` does the fits; until a fit is done, decisions use the model before. A fit sees the rows of
    the moment when it became due, so the same rows give the same models whenever they are fitted.
    """

    def __init__(self, prior: Prior, run: Run = at_once) -> None:
        self.logistic = LogisticModel(prior)
        self.freed = Freed()
        self.verdicts = 0
        self._run = run
        self._rows: list[Row] = []
        self._fitted_at = 0
        self._expected = self._wrong = 0.0  # of the comparisons that p was nearly sure of
        # p of the latest rows, descending, and the errors to expect down to each, as a share of all requests
        self._curve = (np.zeros(0), np.zeros(0))

    def learn(self, row: Row) -> None:
        """Take in a comparison. Fits at the first forty, then for every tenth more, at most 400."""
        self._rows.append(row)
        if row.is_right is not None:
            self.freed.learn(kinds_of(row.features, COUNT), row.is_right, row.group)
        if row.trial.p >= _NEARLY_SURE:
            self._expected += row.weight * (1 - row.trial.p)
            self._wrong += row.weight * (1 - row.label)
        self.verdicts += 1
        if len(self._rows) > ROWS_MAX + ROWS_MAX // 8:
            del self._rows[: ROWS_MAX // 8]
        if self.verdicts >= max(_ROWS_MIN, self._fitted_at + min(400, max(10, self._fitted_at // 10))):
            self._fitted_at = self.verdicts
            excess = max(_EXCESS_MIN, (self._wrong + 2) / (self._expected + 2))
            self._run(partial(self._refit, list(self._rows), excess))

    def threshold(self, error_max: float) -> float:
        """The least p to serve at; 1 before the first fit."""
        p, spent = self._curve
        count = int(np.searchsorted(spent, error_max, side="right"))
        return max(THRESHOLD_MIN, float(p[count - 1])) if count else 1.0

    def _refit(self, rows: Sequence[Row], excess: float) -> None:
        features = np.frombuffer(b"".join([row.trial.features for row in rows]), "<f4").astype(np.float64)
        features = features.reshape(len(rows), -1)
        weights = np.array([row.weight for row in rows])
        model = self.logistic.fitted(features, np.array([row.label for row in rows]), weights)
        latest = features[-_REQUESTS:]
        served, risk = latest[:, -2].sum(), latest[:, -1].sum()
        is_open = np.array([row.trial.p > 0 for row in rows[-_REQUESTS:]])
        p = model.lower(latest)
        order = np.argsort(-p, kind="stable")
        order = order[is_open[order]]
        spent = (risk + np.cumsum((1 - p)[order])) * excess / (len(p) + served)
        self.logistic, self._curve = model, (p[order], spent)


def _sigmoid(x: Vector) -> Vector:
    result: Vector = 1 / (1 + np.exp(-np.clip(x, -35, 35)))
    return result
