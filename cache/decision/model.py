"""The probability that a cached answer is right, and the threshold it must reach.

Pure numbers: knows no texts and no cache. The model is ridge logistic regression towards a prior.
By MacKay's Laplace approximation (1992) the posterior is normal with the inverse Hessian as its
covariance, and p = sigmoid(m - sd). The threshold spends the error budget where answers are
likeliest to be right (Neyman and Pearson): it ends the longest prefix of all requests by p with
expected errors within the budget. Invariant: the same rows in any order give the same model, up to
rounding; without a row the model is the prior.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cache.decision.features import IN_CONTEXT, WordOdds
from cache.query import Trial

Vector = NDArray[np.float64]

ROWS_MAX = 8_000
_REQUESTS = 4_000  # rows that the threshold is fitted to: the latest
_ROWS_MIN, _OF_ONE = 40, 10  # verdicts for a first fit, of which so many alike are on one answer at most
_RIDGE, _RIDGE_INTERCEPT = 15.0, 0.3
_WEIGHT_MAX = 20.0
_FAR = 5.0  # standard deviations: a number farther out says no more
_STEPS = 12
THRESHOLD_MIN = 0.7
_UNLIKELY = 0.5
_DISCERNING = 0.5  # of near answers not found equal: judges that call as many different are a guide
# of the bound: what is served at the threshold is wrong at most so many times as often
_WORST_MAX = 10.0
# 1 at least: most comparisons tell of p just below the threshold, where it is too cautious; what is
# served is not
_KAPPA_MIN, _KAPPA_MAX, _KAPPA_DEVIATIONS = 1.0, 6.0, 0.5
_NEARLY_SURE = 0.7  # comparisons from this p on tell how well p is calibrated where it matters
_BUDGET = 0.8  # of the bound; the rest is for what chance adds to an expectation
_BUDGET_MAX = 1.5
# in so many requests, as a share of those till now, is spent what was left
_CATCH_UP, _CATCH_UP_MIN = 0.25, 1_000
# of comparisons, the shares for which a judge that costs is asked
_ASKED_ALL, _ASKED_MIN, _HARDLY = 1_000, 0.25, 0.3
_STRATA = (0.5, 0.8)  # of p: what was asked speaks for what was not asked beside it


@dataclass(frozen=True, slots=True)
class Prior:
    """The parameters that `./run bench prior` learned offline.

    `mean` and `scale` are of each feature; `coefficients` are on that scale, the intercept last;
    `variance` is the covariance's diagonal. `in_context` is that of questions about one text, where
    another prior than this holds for them. `thresholds` has, for error bounds in descending order,
    the least p at which the prior may serve; one without any serves nothing.
    """

    mean: Vector
    scale: Vector
    coefficients: Vector
    variance: Vector
    thresholds: tuple[tuple[float, float], ...] = ()
    in_context: Prior | None = None

    def threshold(self, error_max: float) -> float | None:
        return next((least for bound, least in self.thresholds if error_max >= bound), None)


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison: the trial of a decision, and whether the answers were the same, None where no
    judge could tell.

    The trial's `chance` is that of the comparison: 1 on a miss, that of the check on a would-be
    hit. Its features end with the number of hits since the row before, and the errors to expect of
    them by the p that each had. A p of 0 says that nothing would have been served, however sure the
    model: such a row spends nothing of the budget.
    """

    trial: Trial
    is_right: bool | None
    judge_chance: float | None = None  # of the verdict
    flips: tuple[float, float] = (0.0, 0.0)  # of the verdict
    is_late: bool = False  # the verdict takes the place of a row that no judge could tell
    group: bytes = b""  # whose answer was compared

    @property
    def label(self) -> float:
        """The label whose loss has that of the true one as its mean (Natarajan et al., 2013)."""
        if self.is_right is None:
            return 0.0
        different, same = self.flips
        return (self.is_right - same) / (1 - different - same)

    @property
    def stands_for(self) -> float:
        """The number of comparisons that the row stands for: 1 where a judge was asked about all of them."""
        return min(_WEIGHT_MAX, 1 / self.judge_chance) if self.judge_chance else 1.0

    def is_awaited(self, late: Row) -> bool:
        """Whether a late verdict is on this comparison, which no judge could tell."""
        return self.is_right is None and self.trial.features == late.trial.features

    @property
    def features(self) -> Vector:
        return np.frombuffer(self.trial.features, "<f4").astype(np.float64)

    @property
    def similarity(self) -> float:
        """The cosine of the prompt and the witness."""
        similarity: float = np.frombuffer(self.trial.features, "<f4", 1)[0]
        return similarity


class LogisticModel:
    """The prior, and what was learned since. A fit makes another model: this one does not change."""

    def __init__(self, prior: Prior, coefficients: Vector | None = None, covariance: Vector | None = None) -> None:
        self._prior = prior
        self._coefficients = prior.coefficients if coefficients is None else coefficients
        self._covariance = np.diag(prior.variance) if covariance is None else covariance

    def after(self, others: Sequence[LogisticModel]) -> LogisticModel:
        """The model that a new namespace starts from, given k `others` that have learned.

        It lies k / (k + 1) of the way from this model to their mean. A fit is drawn back to it, and
        not to the prior.
        """
        if not others:
            return self
        mean = np.mean([one._coefficients for one in others], axis=0)
        share = len(others) / (len(others) + 1)
        start = replace(self._prior, coefficients=(1 - share) * self._prior.coefficients + share * mean)
        return LogisticModel(start)

    def p(self, features: Vector) -> float:
        """The lower bound, one standard deviation down."""
        mean = self._prior.mean
        x = np.ones(len(mean) + 1)
        scaled = (features[: len(mean)] - mean) / self._prior.scale
        np.minimum(np.maximum(scaled, -_FAR, out=scaled), _FAR, out=x[:-1])
        sd = math.sqrt(max(0.0, float(x @ self._covariance @ x)))
        return 1 / (1 + math.exp(-max(-35.0, min(35.0, float(x @ self._coefficients) - sd))))

    def lower(self, features: Vector) -> Vector:
        """The same for rows."""
        x = self._standard(features)
        sd = np.sqrt(np.maximum(0.0, np.einsum("ij,jk,ik->i", x, self._covariance, x)))
        return _sigmoid(x @ self._coefficients - sd)

    def fitted(self, features: Vector, is_right: Vector, weights: Vector) -> LogisticModel:
        """Newton's method on the penalised likelihood, from where this one is."""
        x = self._standard(features)
        prior = self._prior.coefficients
        ridge = np.full(len(prior), _RIDGE)
        ridge[-1] = _RIDGE_INTERCEPT
        b = self._coefficients.copy()
        hessian = np.diag(ridge)
        for _ in range(_STEPS):
            mean = _sigmoid(x @ b)
            gradient = x.T @ (weights * (mean - is_right)) + ridge * (b - prior)
            hessian = (x * (weights * mean * (1 - mean))[:, None]).T @ x + np.diag(ridge)
            step = np.linalg.solve(hessian, gradient)
            size = float(np.abs(step).max())
            b -= step * min(1.0, 2.0 / size if size else 1.0)
            if size < 1e-4:
                break
        return LogisticModel(self._prior, b, np.linalg.inv(hessian))

    def _standard(self, features: Vector) -> Vector:
        scaled = np.clip((features[:, : len(self._prior.mean)] - self._prior.mean) / self._prior.scale, -_FAR, _FAR)
        return np.hstack([scaled, np.ones((len(scaled), 1))])


class Strata:
    """Two models: of questions about one context, and of all others. Neither learns from the rows
    of the other. One model, where the prior has no other for such questions.
    """

    def __init__(self, prior: Prior, models: Sequence[LogisticModel] = ()) -> None:
        self._prior = prior
        self._models = models or [LogisticModel(one) for one in (prior, prior.in_context) if one is not None]

    def after(self, others: Sequence[Strata]) -> Strata:
        """`LogisticModel.after`, of each."""
        return Strata(self._prior, [one.after([o._models[at] for o in others]) for at, one in enumerate(self._models)])

    def p(self, features: Vector) -> float:
        """`LogisticModel.p`."""
        is_in = len(self._models) > 1 and features[IN_CONTEXT] > 0
        return self._models[1 if is_in else 0].p(features)

    def lower(self, features: Vector) -> Vector:
        """`LogisticModel.lower`."""
        p = np.empty(len(features))
        for one, own in zip(self._models, self._strata(features), strict=True):
            p[own] = one.lower(features[own])
        return p

    def fitted(self, features: Vector, is_right: Vector, weights: Vector) -> Strata:
        """`LogisticModel.fitted`, of each; one without rows stays as it is."""
        models = [
            one.fitted(features[own], is_right[own], weights[own]) if own.any() else one
            for one, own in zip(self._models, self._strata(features), strict=True)
        ]
        return Strata(self._prior, models)

    def _strata(self, features: Vector) -> list[NDArray[np.bool_]]:
        """Which rows are of each model."""
        if len(self._models) == 1:
            return [np.ones(len(features), dtype=np.bool_)]
        is_in = features[:, IN_CONTEXT] > 0
        return [~is_in, is_in]


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


class CalibratedModel:
    """A model and its thresholds, refitted as verdicts come. What no judge could tell counts as
    wrong.

    `run` does the fits; until a fit is done, decisions use the model before. A fit sees the rows of
    the moment when it became due, so the same rows give the same models whenever they are fitted.
    The first starts from what `others`, the models of other namespaces, have learned by then; its
    threshold and its calibration are of its own rows alone.
    """

    def __init__(self, prior: Prior, run: Run = at_once, others: Sequence[CalibratedModel] = ()) -> None:
        self.logistic = Strata(prior)
        self._run = run
        self._others = others
        self.word_odds = WordOdds()
        self._rows: list[Row] = []
        self._seen = 0
        self._alike: Counter[tuple[bytes, bool]] = Counter()  # verdicts, by the group that they are on
        self._fitted_at = 0
        self._fits = 0
        self._expected = self._wrong = 0.0  # of the comparisons that p was nearly sure of
        self._requests = 0.0  # that the rows stand for
        self._risked = 0.0  # errors to expect of those that were served
        # p of the latest rows, descending, and the errors to expect down to each, as a share of all
        # requests
        self._curve = (np.zeros(0), np.zeros(0))

    def copy(self) -> CalibratedModel:
        """Another one of the same rows, which learns apart from this one."""
        made = copy.copy(self)
        made.word_odds, made._rows, made._alike = self.word_odds.copy(), list(self._rows), self._alike.copy()
        return made

    @property
    def is_fitted(self) -> bool:
        """Whether enough verdicts have come."""
        return self._fits > 0

    @property
    def verdicts(self) -> int:
        return self._seen

    def learn(self, row: Row) -> None:
        """Take in a verdict. Fits at the first forty, then for every tenth more, at most 400."""
        self._rows.append(row)
        features = row.features
        self._requests += 1 + float(features[-2])
        self._risked += float(features[-1])
        if row.judge_chance != 0.0:
            self._seen += 1
            self._count(row)
        if len(self._rows) > ROWS_MAX + ROWS_MAX // 8:
            del self._rows[: ROWS_MAX // 8]
        self._fit_when_due()

    def correct(self, row: Row) -> bool:
        """Put a late verdict in the place of its row. False where that is not among the rows."""
        index = next((at for at, one in enumerate(self._rows) if one.is_awaited(row)), None)
        if index is None:
            return False
        self._count(self._rows[index], -1)
        self._rows[index] = row
        self._seen += 1
        self._count(row)
        self._fit_when_due()
        return True

    def _count(self, row: Row, sign: int = 1) -> None:
        """Count a verdict, or take it back with a `sign` of -1."""
        self.word_odds.learn(row.features, bool(row.is_right), sign)
        self._alike[row.group, bool(row.is_right)] += sign
        if row.trial.p >= _NEARLY_SURE:
            self._expected += sign * row.stands_for * (1 - row.trial.p)
            self._wrong += sign * row.stands_for * (1 - row.label)

    def _fit_when_due(self) -> None:
        # what one answer is right for says nothing about others
        if not self._fits and sum(min(_OF_ONE, count) for count in self._alike.values()) < _ROWS_MIN:
            return
        if self._seen >= max(_ROWS_MIN, self._fitted_at + min(400, max(10, self._fitted_at // 10))):
            self._fitted_at = self._seen
            rows, kappa = list(self._rows), self.kappa
            self._run(lambda: self._refit(rows, kappa))

    def threshold(self, error_max: float) -> float:
        """The least p to serve at, once fitted."""
        p, spent = self._curve
        count = int(np.searchsorted(spent, self._budget(error_max), side="right"))
        return max(THRESHOLD_MIN, 1 - _WORST_MAX * error_max, float(p[count - 1])) if count else 1.0

    def _budget(self, error_max: float) -> float:
        """The share of the coming requests that may go wrong: the bound, and what was left of it
        (or spent too much) till now.
        """
        wrong = self._risked * max(_KAPPA_MIN, (self._wrong + 1) / (self._expected + 1))
        left = (_BUDGET * error_max * self._requests - wrong) / max(_CATCH_UP_MIN, _CATCH_UP * self._requests)
        return max(error_max / 4, min(_BUDGET_MAX * error_max, _BUDGET * error_max + left))

    @property
    def kappa(self) -> float:
        """How many times as many errors there are as p says: half a standard deviation up in the
        Gamma posterior.
        """
        wrong = self._wrong + 1
        kappa = (wrong + _KAPPA_DEVIATIONS * math.sqrt(wrong)) / (self._expected + 1)
        return min(_KAPPA_MAX, max(_KAPPA_MIN, kappa))

    def _refit(self, rows: Sequence[Row], kappa: float) -> None:
        start = self.logistic.after([one.logistic for one in self._others])
        self._others = ()
        features = np.frombuffer(b"".join([row.trial.features for row in rows]), "<f4").astype(np.float64)
        features = features.reshape(len(rows), -1)
        labels = np.array([row.label for row in rows])
        weights = 1 / np.array([row.trial.chance for row in rows])
        model = start.fitted(features, labels, np.minimum(_WEIGHT_MAX, weights * _shares(rows)))
        # a check stands for 1 / chance would-be hits
        p, weights = model.lower(features[-_REQUESTS:]), weights[-_REQUESTS:]
        served = sum(features[-_REQUESTS:, -2].tolist())
        order = np.argsort(-p, kind="stable")
        order = order[np.array([row.trial.p > 0 for row in rows[-_REQUESTS:]])[order]]
        self.logistic = model
        self._fits += 1
        self._curve = p[order], np.cumsum((weights * (1 - p))[order]) * kappa / (len(p) + served)


class LearnedModel:
    """The verdicts of one namespace, read twice, because missing ones are not missing at random: of
    free text equality can say "same" and nothing else.

    `certain` takes every comparison that no judge could tell as wrong: the worst case, so that what
    it is sure of is right whatever the missing verdicts are. `_judged` has the verdicts alone. Before
    the first missing verdict both are one.
    """

    def __init__(self, prior: Prior, run: Run = at_once, others: Sequence[LearnedModel] = ()) -> None:
        self.certain: CalibratedModel = CalibratedModel(prior, run, [one.certain for one in others])
        self._judged = self.certain

    @property
    def word_odds(self) -> WordOdds:
        return self.certain.word_odds

    def learn(self, row: Row) -> None:
        """Take in a comparison."""
        if row.is_right is None and self._judged is self.certain:
            self._judged = self.certain.copy()
        if not (row.is_late and self.certain.correct(row)):
            self.certain.learn(row)
        if row.is_right is not None and self._judged is not self.certain:
            self._judged.learn(row)

    def is_told_against(self, features: Vector) -> bool:
        """Whether the verdicts alone, fitted, find an answer to a like request unlikely to be right."""
        return self._judged.is_fitted and self._judged.logistic.p(features) < _UNLIKELY

    def allows_cold(self, features: Vector, error_max: float, discernment: float) -> bool:
        """Whether the verdicts leave it to the cold rule to serve: too few have come, or judges can
        call few answers different and the verdicts that came are not against it.
        """
        if not self.certain.is_fitted:
            return True
        judged = self._judged
        if judged is self.certain or discernment >= _DISCERNING:
            return False
        return not judged.is_fitted or judged.logistic.p(features) >= judged.threshold(error_max)


def _shares(rows: Sequence[Row]) -> Vector:
    """How many comparisons each row stands for in a fit.

    Those that no judge that costs was asked about are spoken for by those beside them that one was,
    up to _WEIGHT_MAX each (Hajek's estimator); the rest of them counts as wrong.
    """
    judge_chances = np.array([np.nan if row.judge_chance is None else row.judge_chance for row in rows])
    shares = np.array([row.stands_for for row in rows])
    strata = np.digitize([row.trial.p for row in rows], _STRATA)
    for stratum in range(len(_STRATA) + 1):
        were, were_not = (strata == stratum) & (judge_chances > 0), (strata == stratum) & (judge_chances == 0)
        if were.any() and were_not.any():
            whole = were.sum() + were_not.sum()
            shares[were] = np.clip(shares[were] * whole / shares[were].sum(), 1.0, _WEIGHT_MAX)
            shares[were_not] = max(0.0, whole - shares[were].sum()) / were_not.sum()
    return shares


def asking_share(p: float, verdicts: int) -> float:
    """The share of comparisons like this one for which a judge that costs is worth its price.

    All till _ASKED_ALL verdicts have come, for an answer that is found equal is a new wording of
    its group; from then on fewer, and fewest of those that are hardly ever right.
    """
    share = max(_ASKED_MIN, min(1.0, _ASKED_ALL / max(1, verdicts)))
    return share if p >= _HARDLY or share == 1.0 else share / 2


def _sigmoid(x: Vector) -> Vector:
    result: Vector = 1 / (1 + np.exp(-np.clip(x, -35, 35)))
    return result
