"""Measures how often semantic hits are wrong, with an interval, for each team and alias; tightens
bounds.

The measurement uses checks drawn at random, audits and shadow checks of would-be hits. A check
stands for the number of served hits that follows from its chance (Horvitz and Thompson, 1952).
Reports only increase the estimate. Knows no rule and no Redis.

Invariant: a bound only tightens, to the least of the gateway's, the team's, the alias's and the
request's. If the interval's low end exceeds the bound and two or more answers were wrong, the bound
is multiplied by bound / estimate, until the estimate is within the bound again.

The interval is Clopper and Pearson's (1934; 95%), for the effective number of checks, (sum of
weights)^2 / (sum of their squares) (Kish, 1965), times the share of requests that were hits. It is
exact for equal weights, and wide for few checks. Checks that no judge could settle widen it to the
worst and the best case (Manski, 1990): as if all of them had been wrong, or right. Where most are
unsettled there is no estimate, because verdicts are not missing at random.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import msgspec

from gateway.accounts import Team
from gateway.journey.semantic import Bounds

CONFIDENCE = 0.95
_STRICTNESS_MIN = 0.05
_PATTERN = 2
_TINY = 1e-300


class CheckCounts(msgspec.Struct):
    """Counts of one team and alias over some time.

    Weights are in served hits; `weight2` sums their squares.
    """

    requests: int = 0  # answered, from the cache or not
    hits: int = 0  # semantic ones
    checks: int = 0
    wrong: int = 0  # of the checks
    weight: float = 0.0
    weight2: float = 0.0
    wrong_weight: float = 0.0
    unsettled: int = 0  # compared too, but no judge could tell; not among `checks`
    unsettled_weight: float = 0.0
    unsettled_weight2: float = 0.0
    reported_wrong: int = 0
    reported_right: int = 0
    questions: int = 0  # to a judge model about its answers
    judging_microusd: int = 0

    def add(self, other: "CheckCounts") -> None:
        """Add `other` to this."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Measured(msgspec.Struct, frozen=True):
    """The share of all requests that a semantic hit answered wrongly, with its interval and checks.

    `estimate` is None without any check or report, and where more checks are unsettled than
    settled, by weight.
    """

    estimate: float | None
    low: float
    high: float
    checks: int
    unsettled: int = 0


@dataclass(frozen=True, slots=True)
class LiveError:
    """The measured error of one team and alias, and its bound, which is multiplied by `strictness`
    now.
    """

    team_id: int
    team: str
    alias: str
    sample: CheckCounts
    measured: Measured
    error_max: float
    strictness: float


def measure(sample: CheckCounts) -> Measured:
    """Estimate the share of requests that a semantic hit answered wrongly.

    Reports are certain, checks cover the unreported hits: the larger of both estimates counts, and
    the larger of both low ends.
    """
    if not sample.requests:
        return Measured(None, 0.0, 1.0, 0)
    share = sample.hits / sample.requests
    reported, reported_low = 0.0, 0.0
    if sample.reported_wrong:
        reported = min(1.0, sample.reported_wrong / sample.requests)
        reported_low, _ = clopper_pearson(min(sample.reported_wrong, sample.requests), sample.requests)
    weight = sample.weight + sample.unsettled_weight
    if not weight:
        return Measured(reported or None, reported_low, max(share, reported), 0)
    # decision: reports-only-raise
    effective = weight**2 / (sample.weight2 + sample.unsettled_weight2)
    low, _ = clopper_pearson(sample.wrong_weight / weight * effective, effective)
    _, high = clopper_pearson((sample.wrong_weight + sample.unsettled_weight) / weight * effective, effective)
    estimate: float | None = reported or None
    if sample.weight > sample.unsettled_weight:
        estimate = max(sample.wrong_weight / sample.weight * share, reported)
    return Measured(
        estimate, max(low * share, reported_low), max(high * share, reported), sample.checks, sample.unsettled
    )


def _settled(sample: CheckCounts) -> CheckCounts:
    """The same day without the checks that no judge could settle."""
    return msgspec.structs.replace(sample, unsettled=0, unsettled_weight=0.0, unsettled_weight2=0.0)


def clopper_pearson(count: float, total: float) -> tuple[float, float]:
    """The interval of the share `count` / `total`; both may be fractions (effective numbers)."""
    tail = (1.0 - CONFIDENCE) / 2.0
    low = 0.0 if count <= 0 else _quantile(tail, count, total - count + 1)
    high = 1.0 if count >= total else _quantile(1.0 - tail, count + 1, total - count)
    return low, high


def lower_limit(count: float, total: float) -> float:
    """The one-sided lower limit of the same share: it is above the truth in a twentieth of all
    samples at most.
    """
    return 0.0 if count <= 0 else _quantile(1.0 - CONFIDENCE, count, total - count + 1)


def _quantile(share: float, a: float, b: float) -> float:
    """The quantile of the beta distribution, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta(middle, a, b) < share else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, Lentz's
    method).
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there
        return 1.0 - _beta(1.0 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(500):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + term * d or _TINY)
        c = 1.0 + term / c or _TINY
        fraction *= c * d
        if abs(1.0 - c * d) < 1e-12:
            break
    return math.exp(log_front) * (fraction - 1.0) / a


class MeasuredErrors:
    """This worker's measured errors of all teams and aliases; updates the strictness in `bounds`."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.live: tuple[LiveError, ...] = ()

    def update(self, samples: Mapping[tuple[int, str], CheckCounts], teams: Iterable[Team]) -> list[LiveError]:
        """Measure again from recent counts; returns the errors whose bound was tightened or
        relaxed.
        """
        names, tightened = {team.id: team for team in teams}, self.bounds.strictness
        live, changed = [], []
        for (team_id, alias), sample in samples.items():
            team = names.get(team_id)
            if team is None or not (sample.hits or sample.checks or sample.unsettled or sample.reported_wrong):
                continue
            measured, error_max = measure(sample), self.bounds.error_max(team, alias)
            before = tightened.get((team_id, alias))
            # of the settled checks alone: what could not be settled must not hold a bound loose
            after = _strictness(sample, measure(_settled(sample)), error_max, is_tight=before is not None)
            one = LiveError(
                team_id=team_id,
                team=team.name,
                alias=alias,
                sample=sample,
                measured=measured,
                error_max=error_max,
                strictness=after,
            )
            live.append(one)
            if after < 1.0:
                tightened[team_id, alias] = after
            else:
                tightened.pop((team_id, alias), None)
            if (before is None) != (after == 1.0):
                changed.append(one)
        for gone in tightened.keys() - {(one.team_id, one.alias) for one in live}:
            del tightened[gone]
        self.live = tuple(live)
        return changed


def _strictness(sample: CheckCounts, measured: Measured, error_max: float, *, is_tight: bool) -> float:
    """The factor for the bound: 1 while the error may be within it; once tight, until the estimate
    is.

    A single wrong answer among the first few requests does not tighten it.
    """
    estimate = measured.estimate or 0.0
    has_pattern = sample.wrong + sample.reported_wrong >= _PATTERN
    is_past = estimate > error_max if is_tight else has_pattern and measured.low > error_max
    return max(_STRICTNESS_MIN, error_max / estimate) if is_past and estimate else 1.0
