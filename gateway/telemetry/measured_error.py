"""The measured error of semantic hits by team and alias, and what follows when it drifts past its
bound.

The ground is `checks`, the limits are `confidence`'s. Reports only increase the estimate. Knows no
rule and no Redis. Invariants: a bound only tightens, to the least of the gateway's, the team's, the
alias's and the request's; all workers that see the same counts decide the same.

A drift begins in the hour in which the evidence of too many wrong answers, since any hour of the
last day, passes 1 to 100. Until it ends only the cold rule serves, at the bound times bound /
estimate. It ends when the evidence is gone (by requests answered within the bound), when its hours
are a day old, or with a new certificate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.telemetry.checks import CheckCounts, chances
from gateway.telemetry.confidence import evidence, served_wrong
from gateway.telemetry.judge_error import RulingCounts, by_judge

_STRICTNESS_MIN, _STRICTNESS_MAX = 0.05, 0.5
_ODDS = 100.0
_FOUND_MIN = 0.1  # of the wrong answers that were compared

Pair = tuple[int, str]
"""A team's id and an alias."""


class Measured(msgspec.Struct, frozen=True):
    """The share of all requests that a semantic hit answered wrongly, with its interval.

    `estimate` is None without any check or report, and where more checks are unsettled than
    settled, by weight.
    """

    estimate: float | None
    low: float
    high: float
    judge_error: float = 0.0  # the share of verdicts that the interval allows to be wrong


class Hour(msgspec.Struct, frozen=True):
    """The counts of one hour; `rulings` are of two judges, with a line feed between their names."""

    start_s: int
    counts: Mapping[Pair, CheckCounts]
    rulings: dict[str, RulingCounts] = {}


class Drift(msgspec.Struct, frozen=True):
    """Too many wrong answers since `since_s`, the start of an hour or of the certificate.

    `strictness` is what the bound is multiplied with, below 1.
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
        """`measure`, with what the last day's rulings say of the judges."""
        return measure(counts, self.judge_error, self._rates)

    def flips(self, judge: str) -> tuple[float, float]:
        """The error rates of a judge, as a verdict has them."""
        return self._rates.get(judge, RulingCounts()).flips

    def update(
        self,
        hours: Sequence[Hour],
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
        tight = {(one.team_id, one.alias): one.strictness for one in live if one.drift is not None}
        self.bounds.strictness.clear()
        self.bounds.strictness.update(tight)
        return [one for one in live if ((one.team_id, one.alias) in before) != (one.drift is not None)]

    def _drift(self, parts: Sequence[tuple[float, CheckCounts]], error_max: float) -> Drift | None:
        """The drift after the last of `parts`, each with its start."""
        counts, began = [part for _, part in parts], None
        for at, found in enumerate(evidence(counts, error_max, self.judge_error)):
            if began is None and found >= math.log(_ODDS):
                began = at
            elif found <= 0.0:
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
    pair: Pair, hours: Sequence[Hour], certified: tuple[float, CheckCounts] | None
) -> list[tuple[float, CheckCounts]]:
    """The pair's counts by hour. Where its certificate starts within them, the first is that from
    the start until the next full hour.
    """
    since_s, total = certified or (0.0, CheckCounts())
    parts = [(float(hour.start_s), hour.counts.get(pair, CheckCounts())) for hour in hours if hour.start_s >= since_s]
    if len(parts) < len(hours) and certified is not None:
        later = CheckCounts()
        for _, part in parts:
            later.add(part)
        parts.insert(0, (since_s, total.less(later)))
    return parts
