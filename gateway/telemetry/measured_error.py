"""The measured error of semantic hits by team and alias, and what follows when it drifts past its
bound. Knows no rule and no Redis. In order: what is counted, how judges err, the limits, the drift.

**Counts.** A would-be hit is audited (generated instead of served) or served; of the served some are
compared in the background (shadow checks). Chances are counted in steps, eight to a factor of two.
Statistics add up the events by name. Invariant: whatever was drawn to be compared is counted when it
is drawn, so what is lost on its way to a judge stays open.

**Judges.** How often a judge errs, by another one that ruled on the same pairs of answers. The other
is taken as right, so its own errors count as this one's. Invariant: a rate of which little is known
makes nothing bolder. Source: Clopper and Pearson (1934) for the intervals.

**Limits** for the number of wrong answers that were served, and evidence that too many are: valid at
every moment, however often one looks and whatever drifts.

A would-be hit is compared with a known chance π, drawn before anything is known of its answer. So
the draws alone carry the proof, and no assumption about requests, rules or time is needed. For one
that is wrong, let z be 1 if it was served and not found. For any c below -log(1 - π) the factor

    exp(c·z) if it was not found,  exp(-k) if it was,  with  π·exp(-k) + (1 - π)·exp(c) = 1

has the expectation 1. The product over all is a martingale (a bet, as by Waudby-Smith and Ramdas,
2023), and so is the mean of the products over a fixed grid of c. By Ville's inequality it ever
passes 1 / α with probability α at most: the numbers of unfound wrong answers at which it would have
are excluded at every moment (Howard, Ramdas, McAuliffe and Sekhon, 2021). The lower limit has the
same with signs reversed. Only sums of counts enter, so workers and hosts add theirs in any order.

What was drawn and not settled, because no judge could tell or none has yet, counts as found wrong
at the upper end and as right at the lower (Manski, 1990). A judge that errs in a share of at most e
finds a wrong answer with a chance of (1 - e)·π, and takes a share of at most e of the right ones
for wrong: the bounds of Rogan and Gladen (1978).

**Drift.** Reports only increase the estimate. Invariants: a bound only tightens, to the least of the
gateway's, the team's, the alias's and the request's; all workers that see the same counts decide the
same.

A drift begins in the hour in which the evidence of too many wrong answers, since any hour of the
last day, passes 1 to 100. Until it ends only the cold rule serves, at the bound times bound /
estimate. It ends when the evidence is gone (by requests answered within the bound), when its hours
are a day old, or with a new certificate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import msgspec

from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.telemetry import buckets

_PER_DOUBLING = 8
_STEP_MAX = 8 * _PER_DOUBLING  # a chance below 1/256 counts as none
_EARLY, _EARLY_MOST = 400, 0.3  # of the first hits: until a certificate says much


class Cell(msgspec.Struct):
    """The would-be hits of one step of chances."""

    served: int = 0
    audited: int = 0
    audits_right: int = 0
    audits_wrong: int = 0
    shadowed: int = 0  # of those served
    shadows_right: int = 0
    shadows_wrong: int = 0

    @property
    def wrong(self) -> int:
        return self.audits_wrong + self.shadows_wrong

    @property
    def settled(self) -> int:
        return self.wrong + self.audits_right + self.shadows_right

    @property
    def shadows_open(self) -> int:
        return max(0, self.shadowed - self.shadows_right - self.shadows_wrong)

    @property
    def open(self) -> int:
        """Drawn to be compared, and not settled: no judge could tell, or none has yet."""
        return max(0, self.audited - self.audits_right - self.audits_wrong) + self.shadows_open


class CheckCounts(msgspec.Struct):
    """Counts of one team and alias over some time."""

    requests: int = 0  # answered, from the cache or not; identical ones in flight count once
    hits: int = 0  # semantic ones
    cells: dict[int, Cell] = {}  # by step of chances
    judges: dict[str, int] = {}  # comparisons by the judge that settled them
    reported_wrong: int = 0
    reported_right: int = 0
    questions: int = 0  # to a judge model about its answers
    judging_microusd: int = 0

    def add(self, other: CheckCounts, sign: int = 1) -> None:
        """Add `other` to this, or with a sign of -1 take it away; no count falls below 0."""
        _sum(self, other, sign)
        for step, cell in other.cells.items():
            _sum(self.cells.setdefault(step, Cell()), cell, sign)
        for judge, count in other.judges.items():
            self.judges[judge] = max(0, self.judges.get(judge, 0) + sign * count)

    def count(self, name: str, amount: int = 1) -> None:
        """Add an event's amount; unknown names are ignored."""
        name, _, detail = name.partition(":")
        if name == _JUDGE:
            self.judges[detail] = self.judges.get(detail, 0) + amount
        elif not detail:
            buckets.add(self, name, amount)
        elif name in Cell.__struct_fields__ and detail.isdecimal():
            buckets.add(self.cells.setdefault(min(int(detail), _STEP_MAX), Cell()), name, amount)

    @property
    def audits(self) -> int:
        return sum(cell.audited for cell in self.cells.values())

    @property
    def shadow_checks(self) -> int:
        return sum(cell.shadowed for cell in self.cells.values())

    @property
    def checks(self) -> int:
        """Comparisons that a judge settled."""
        return sum(cell.settled for cell in self.cells.values())

    @property
    def wrong(self) -> int:
        return sum(cell.wrong for cell in self.cells.values())

    @property
    def unsettled(self) -> int:
        return sum(cell.open for cell in self.cells.values())

    @property
    def is_empty(self) -> bool:
        """True before the first semantic hit, drawn check or report of a wrong answer."""
        return not (self.hits or self.reported_wrong or self.cells)


def _sum(target: msgspec.Struct, other: msgspec.Struct, sign: int = 1) -> None:
    """Add the integers of `other` to those of `target`, which stay at 0 at least."""
    for name in target.__struct_fields__:
        if isinstance(count := getattr(target, name), int):
            setattr(target, name, max(0, count + sign * getattr(other, name)))


_JUDGE = "judge"


def served(chance: float, *, is_compared: bool) -> tuple[str, ...]:
    """The events of a served hit. `chance` is the probability that it is compared, `is_compared`
    the draw.
    """
    step = _step(chance)
    return (f"served:{step}", f"shadowed:{step}") if is_compared else (f"served:{step}",)


def shadow_share(share: float, hits: int) -> float:
    """The share of the next hits to check, after `hits` of them: larger for the first, `share` in
    the end. A share of 0 stays 0.
    """
    return max(share, min(_EARLY_MOST, _EARLY / max(1, hits))) if share else 0.0


def audited(chance: float) -> tuple[str, ...]:
    """The events of a would-be hit that is generated instead."""
    return (f"audited:{_step(chance)}",)


def settled(chance: float, judge: str, *, is_wrong: bool, is_audit: bool) -> tuple[str, ...]:
    """The events of a comparison that `judge` settled."""
    drawn, ruling = "audits" if is_audit else "shadows", "wrong" if is_wrong else "right"
    return (f"{drawn}_{ruling}:{_step(chance)}", f"{_JUDGE}:{judge.replace('|', '/')}")


def reported(*, is_wrong: bool) -> tuple[str, ...]:
    """The events of a report on a hit."""
    return ("reported_wrong" if is_wrong else "reported_right",)


def _step(chance: float) -> int:
    if chance < 2.0 ** (-_STEP_MAX / _PER_DOUBLING):
        return _STEP_MAX
    return min(_STEP_MAX - 1, max(0, math.ceil(-_PER_DOUBLING * math.log2(chance) - 1e-9) - 1))


def chances(step: int) -> tuple[float, float]:
    """The least and the largest chance of a step."""
    most = 2.0 ** (-step / _PER_DOUBLING)
    return (0.0 if step >= _STEP_MAX else 2.0 ** (-(step + 1) / _PER_DOUBLING)), most


CONFIDENCE = 0.95
VETO = "a veto between the prompts"
"""In the place of another judge. It proves no error: answers to other prompts may be the same."""

_KNOWN = 60  # pairs from which on a rate is known; before, it is as low as it can be
_TINY = 1e-300


class RulingCounts(msgspec.Struct):
    """Pairs of answers that two judges ruled on, by the ruling of the one and of the other."""

    same_same: int = 0
    same_different: int = 0
    different_same: int = 0
    different_different: int = 0

    @property
    def pairs(self) -> int:
        return self.same_same + self.same_different + self.different_same + self.different_different

    @property
    def agreed(self) -> int:
        return self.same_same + self.different_different

    @property
    def equal(self) -> int:
        """The pairs that the other judge calls the same."""
        return self.same_same + self.different_same

    def add(self, other: RulingCounts) -> None:
        """Add `other` to this."""
        _sum(self, other)

    @property
    def flips(self) -> tuple[float, float]:
        """The judge's error rates, as a verdict has them: the share of equal answers that it calls
        different, and of different ones that it calls the same. The first is taken as 0, which
        makes no answer likelier.
        """
        rate = false_same(self)
        is_known = self.pairs - self.equal >= _KNOWN
        return 0.0, rate.estimate or 0.0 if is_known else rate.low

    @property
    def allowed(self) -> float:
        """An upper bound of the share of this judge's verdicts that are wrong, on right or on wrong
        answers.
        """
        rates = (false_same(self), self.pairs - self.equal), (false_different(self), self.equal)
        return max(rate.high if pairs >= _KNOWN else rate.low for rate, pairs in rates)


class ErrorRate(msgspec.Struct, frozen=True):
    """A share with its 95% interval. The estimate is None before the first count."""

    estimate: float | None
    low: float
    high: float


def false_same(counts: RulingCounts) -> ErrorRate:
    """The share of different answers that the one judge calls the same."""
    return _rate(counts.same_different, counts.same_different + counts.different_different)


def false_different(counts: RulingCounts) -> ErrorRate:
    """The share of equal answers that the one judge calls different."""
    return _rate(counts.different_same, counts.equal)


def by_judge(rulings: Iterable[Mapping[str, RulingCounts]]) -> dict[str, RulingCounts]:
    """All rulings of each judge beside others. A key of `rulings` is two judges, with a line feed
    between.
    """
    by_name: dict[str, RulingCounts] = {}
    for names, counts in (pair for counted in rulings for pair in counted.items()):
        judge, _, other = names.partition("\n")
        if other != VETO:
            by_name.setdefault(judge, RulingCounts()).add(counts)
    return by_name


def _rate(count: int, total: int) -> ErrorRate:
    low, high = clopper_pearson(count, total) if total else (0.0, 1.0)
    return ErrorRate(count / total if total else None, low, high)


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


UPPER_MISSED, LOWER_MISSED = 0.04, 0.01  # the probability that a limit ever fails; together 5%
_GRID = tuple(2.0**-power for power in range(9))
# the large ones are cut to what a chance allows, which is best while little was found wrong
_PRIOR = tuple(math.log(weight / 15) for weight in (4, 3, 2, 1, 1, 1, 1, 1, 1))
_STAKE = 0.8  # of the largest c that a chance allows: there a wrong answer found would end the bet
_REPORTS = tuple(math.log(times) for times in (2.0, 5.0, 20.0, 100.0))
_STEPS = 32


def served_wrong(counts: CheckCounts, judge_error: float = 0.0) -> tuple[float, float]:
    """The lower and the upper limit of the number of wrong answers served by meaning.

    `judge_error` is the largest share of a judge's verdicts that may be wrong, of right answers and
    of wrong ones. Reports are certain.
    """
    cells = sorted(counts.cells.items(), reverse=True)  # the least chance first
    # hits of workers that counted no chances: any of them may be wrong
    unknown = max(0, counts.hits - sum(cell.served for _, cell in cells))
    shadows_wrong = sum(cell.shadows_wrong for _, cell in cells)
    open_ = sum(cell.shadows_open for _, cell in cells)
    low = _lowest(cells, judge_error) + (0 if judge_error else shadows_wrong)
    high = _most(cells, judge_error) + shadows_wrong + open_ + unknown
    hits = max(counts.hits, sum(cell.served for _, cell in cells))
    return max(low, float(counts.reported_wrong)), max(min(high, float(hits)), float(counts.reported_wrong))


def _most(cells: Sequence[tuple[int, Cell]], judge_error: float) -> float:
    """The largest number of wrong answers, served and not found, that is not excluded.

    They are thought to be where they would be hardest to find.
    """
    logs = list(_PRIOR)
    for step, cell in cells:
        wrong = cell.wrong + cell.open
        if wrong:
            logs = [log - wrong * cost for log, cost in zip(logs, _bets(step, judge_error)[1], strict=True)]
    total = 0.0
    for step, cell in cells:
        stakes = _bets(step, judge_error)[0]
        room = _root(partial(_excess, logs, stakes, -math.log(UPPER_MISSED)), cell.served)
        total += room
        if room < cell.served:
            break
        logs = [log + c * cell.served for log, c in zip(logs, stakes, strict=True)]
    return total


@lru_cache(1_024)
def _bets(step: int, judge_error: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """For each c of the grid: c, cut to what the chance allows, and k."""
    chance = chances(step)[0] * (1 - judge_error)
    if not chance:
        return (0.0,) * len(_GRID), (0.0,) * len(_GRID)
    taken = tuple(min(c, -_STAKE * math.log1p(-chance)) for c in _GRID)
    return taken, tuple(-math.log((1 - (1 - chance) * math.exp(c)) / chance) for c in taken)


def _lowest(cells: Sequence[tuple[int, Cell]], judge_error: float) -> float:
    """The least number of wrong answers, served and not found, that is not excluded."""
    logs = [log + one for log, one in zip(_found(cells, judge_error), _PRIOR, strict=True)]
    if _log_sum(logs) <= -math.log(LOWER_MISSED):
        return 0.0
    fewer = [-c for c in _GRID]
    served = sum(cell.served for _, cell in cells)
    return _root(lambda more: -_excess(logs, fewer, -math.log(LOWER_MISSED), more), served)


def _found(cells: Iterable[tuple[int, Cell]], judge_error: float) -> list[float]:
    """For each c of the grid: the logarithm of the product over the wrong answers that were found,
    less the most that a judge's errors may have added.
    """
    logs = [0.0] * len(_GRID)
    for step, cell in cells:
        rest = judge_error * (cell.served + cell.audited) * (1 - chances(step)[0])
        if cell.wrong or rest:
            gains = _gains(step)
            logs = [
                log + cell.wrong * gain - rest * (1 - math.exp(-c))
                for log, gain, c in zip(logs, gains, _GRID, strict=True)
            ]
    return logs


@lru_cache(1_024)
def _gains(step: int) -> tuple[float, ...]:
    """For each c of the grid: the logarithm of the factor of one wrong answer that was found."""
    most = chances(step)[1]
    return tuple(math.log((1 - (1 - most) * math.exp(-c)) / most) for c in _GRID)


def evidence(parts: Iterable[CheckCounts], error_max: float, judge_error: float = 0.0) -> list[float]:
    """After each of `parts` of a stream, the logarithm of the evidence that of the requests since
    some moment before more than a share of `error_max` was answered wrongly.

    Of an unchanged share within `error_max` it passes log A once in A parts at most, on average,
    for checks, and once for reports: the mean over a grid of CUSUMs, each of which is below an
    e-detector (Shin, Ramdas and Rinaldo, 2022). The checks that were settled stand for all: what
    could not be told must not hide what could.
    """
    checks, reports, logs = [0.0] * len(_GRID), [0.0] * len(_REPORTS), list[float]()
    even = -math.log(len(_REPORTS))
    for part in parts:
        allowed = error_max * part.requests
        settled_share = part.checks / (part.checks + part.unsettled) if part.unsettled else 1.0
        gains = _found(part.cells.items(), judge_error)
        checks = [
            max(0.0, before) + gain + math.expm1(-c) * allowed * settled_share
            for before, gain, c in zip(checks, gains, _GRID, strict=True)
        ]
        reports = [
            max(0.0, before) + c * part.reported_wrong - math.expm1(c) * allowed
            for before, c in zip(reports, _REPORTS, strict=True)
        ]
        of_checks = _log_sum([log + prior for log, prior in zip(checks, _PRIOR, strict=True)])
        logs.append(max(of_checks, _log_sum([log + even for log in reports])))
    return logs


def _excess(logs: Sequence[float], slopes: Sequence[float], limit: float, at: float) -> float:
    return _log_sum([log + slope * at for log, slope in zip(logs, slopes, strict=True)]) - limit


def _log_sum(logs: Sequence[float]) -> float:
    """The logarithm of the sum of exp(log)."""
    top = max(logs)
    return top + math.log(sum([math.exp(log - top) for log in logs]))


def _root(rising: Callable[[float], float], end: float) -> float:
    """The point in [0, `end`] at which a rising function passes 0."""
    if rising(0.0) >= 0.0:
        return 0.0
    if rising(end) <= 0.0:
        return float(end)
    low, high = 0.0, float(end)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) <= 0.0 else (low, middle)
    return high


_STRICTNESS_MIN, _STRICTNESS_MAX = 0.05, 0.5
_ODDS = 100.0
_FOUND_MIN = 0.1  # of the wrong answers that were compared

Pair = tuple[int, str]
"""A team's id and an alias."""


class Measured(msgspec.Struct, frozen=True):
    """The share of all requests that a semantic hit answered wrongly, with its interval.

    `estimate` is None before the first check or report, and while unsettled checks outweigh settled
    ones.
    """

    estimate: float | None
    low: float
    high: float
    judge_error: float = 0.0  # the share of verdicts that the interval allows to be wrong


class CheckedPeriod(msgspec.Struct):
    """The checks, reports and rulings of some time, and the requests that they stand for.

    `rulings` are by two judges, with a line feed between their names.
    """

    start_s: int
    counts: dict[Pair, CheckCounts] = {}
    rulings: dict[str, RulingCounts] = {}

    def add(self, field: buckets.Field, amount: int) -> None:
        """Add one field of the statistics, if it is of an answer, a check, a report or a ruling."""
        is_answer = field.count == buckets.REQUESTS and field.kind in buckets.ANSWERED
        if field.kind == buckets.JUDGES:
            buckets.add(self.rulings.setdefault(field.model, RulingCounts()), field.count, amount)
        elif is_answer or field.kind == buckets.CHECKS:
            counts = self.counts.setdefault((field.team_id, field.model), CheckCounts())
            counts.count(field.count, amount)
            if is_answer and field.kind == "semantic":
                counts.hits += amount


class Drift(msgspec.Struct, frozen=True):
    """Too many answers have been wrong since `since_s`, the start of an hour or of the certificate.

    `strictness`, below 1, is the factor of the bound.
    """

    since_s: float
    strictness: float


@dataclass(frozen=True, slots=True)
class LiveError:
    """The measured error of one team and alias over a day, its bound and its drift."""

    team_id: int
    team: str
    alias: str
    measured: Measured
    error_max: float
    drift: Drift | None

    @property
    def strictness(self) -> float:
        return self.drift.strictness if self.drift is not None else 1.0


def measure(counts: CheckCounts, judge_error: float = 0.0, rates: Mapping[str, RulingCounts] = {}) -> Measured:
    """Estimate the share of requests that a semantic hit answered wrongly.

    Reports are certain, checks cover the unreported hits: the larger of both counts. Judges miss
    wrong answers at `rates`, where these are known (Rogan and Gladen, 1978); what they find for
    sure of right ones lowers nothing. `judge_error` is the least that the interval allows for.
    """
    if not counts.requests:
        return Measured(None, 0.0, 1.0, judge_error)
    known = {judge: count for judge, count in counts.judges.items() if judge in rates}
    judge_error = max([judge_error, *(rates[judge].allowed for judge in known)])
    low, high = (min(1.0, wrong / counts.requests) for wrong in served_wrong(counts, judge_error))
    # decision: reports-only-raise
    estimate: float | None = min(1.0, counts.reported_wrong / counts.requests) or None
    settled = wrong = unsettled = 0.0
    for step, cell in counts.cells.items():
        chance = math.sqrt(math.prod(chances(step))) or 1.0
        others = (1 - chance) / chance  # that a check stands for (Horvitz and Thompson, 1952)
        settled += cell.settled * others + cell.shadows_right + cell.shadows_wrong
        wrong += cell.wrong * others + cell.shadows_wrong
        unsettled += cell.open * others + cell.shadows_open
    if settled > unsettled:
        told = max(1, sum(counts.judges.values()))
        missed = sum(rates[judge].flips[1] * count for judge, count in known.items()) / told
        share = wrong / settled / max(_FOUND_MIN, 1 - missed) * counts.hits / counts.requests
        estimate = max(low, min(high, max(share, estimate or 0.0)))
    return Measured(estimate, low, high, judge_error)


class MeasuredErrors:
    """This worker's measured errors of all teams and aliases; updates the strictness in `bounds`.

    Judges may err in a share of `judge_error` at least.
    """

    def __init__(self, bounds: Bounds, judge_error: float = 0.0) -> None:
        self.bounds = bounds
        self.judge_error = judge_error
        self.live: tuple[LiveError, ...] = ()
        self._rates: dict[str, RulingCounts] = {}

    def measure(self, counts: CheckCounts) -> Measured:
        """`measure`, with the error rates of judges from the last day's rulings."""
        return measure(counts, self.judge_error, self._rates)

    def flips(self, judge: str) -> tuple[float, float]:
        """The error rates of a judge, as a verdict has them."""
        return self._rates.get(judge, RulingCounts()).flips

    def update(
        self,
        hours: Sequence[CheckedPeriod],
        teams: Iterable[Team],
        certified: Mapping[Pair, tuple[float, CheckCounts]] | None = None,
    ) -> list[LiveError]:
        """Measure again from the hours of the last day, the oldest first.

        `certified` has the start of each certificate and its counts: what was before it is no
        evidence. Returns the errors that have begun to drift, or no longer do.
        """
        names, before = {team.id: team for team in teams}, dict(self.bounds.strictness)
        self._rates = by_judge(hour.rulings for hour in hours)
        live = []
        for team_id, alias in dict.fromkeys(pair for hour in hours for pair in hour.counts):
            team, day = names.get(team_id), CheckCounts()
            for hour in hours:
                day.add(hour.counts.get((team_id, alias), CheckCounts()))
            if team is None or day.is_empty:
                continue
            error_max = self.bounds.error_max(team, alias)
            parts = _parts((team_id, alias), hours, (certified or {}).get((team_id, alias)))
            live.append(
                LiveError(
                    team_id=team_id,
                    team=team.name,
                    alias=alias,
                    measured=self.measure(day),
                    error_max=error_max,
                    drift=self._drift(parts, error_max) if day.wrong or day.reported_wrong else None,
                )
            )
        self.live = tuple(live)
        tight = {(error.team_id, error.alias): error.strictness for error in live if error.drift is not None}
        self.bounds.strictness.clear()
        self.bounds.strictness.update(tight)
        return [error for error in live if ((error.team_id, error.alias) in before) != (error.drift is not None)]

    def _drift(self, parts: Sequence[tuple[float, CheckCounts]], error_max: float) -> Drift | None:
        """The drift after the last of `parts`, each with its start."""
        counts, began = [part for _, part in parts], None
        for index, log_evidence in enumerate(evidence(counts, error_max, self.judge_error)):
            if began is None and log_evidence >= math.log(_ODDS):
                began = index
            elif log_evidence <= 0.0:
                began = None
        if began is None:
            return None
        since = CheckCounts()
        for part in counts[began:]:
            since.add(part)
        estimate = self.measure(since).estimate
        strictness = min(_STRICTNESS_MAX, max(_STRICTNESS_MIN, error_max / estimate)) if estimate else _STRICTNESS_MAX
        return Drift(parts[began][0], strictness)


def _parts(
    pair: Pair, hours: Sequence[CheckedPeriod], certified: tuple[float, CheckCounts] | None
) -> list[tuple[float, CheckCounts]]:
    """The pair's counts by hour. If its certificate starts within them, the first part lasts from
    that start to the next full hour.
    """
    since_s, total = certified or (0.0, CheckCounts())
    parts = [(float(hour.start_s), hour.counts.get(pair, CheckCounts())) for hour in hours if hour.start_s >= since_s]
    if len(parts) < len(hours) and certified is not None:
        first = CheckCounts()
        first.add(total)
        for _, part in parts:
            first.add(part, -1)
        parts.insert(0, (since_s, first))
    return parts
