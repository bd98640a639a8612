"""Limits for the number of wrong answers that were served, and evidence that too many are: valid at
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
for wrong: the bounds of Rogan and Gladen (1978). Knows no time and no Redis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial

from gateway.telemetry.checks import Cell, CheckCounts, chances

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
    found = sum(cell.shadows_wrong for _, cell in cells)
    open_ = sum(cell.shadows_open for _, cell in cells)
    low = _lowest(cells, judge_error) + (0 if judge_error else found)
    high = _most(cells, judge_error) + found + open_ + unknown
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
    """For each of the grid c, as far as the chance allows it, and k."""
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
    """For each of the grid the logarithm of what the wrong answers found multiply by, less what a
    judge's errors may have added.
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
    """For each of the grid the logarithm of what a wrong answer found multiplies by."""
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
    checks, reports, found = [0.0] * len(_GRID), [0.0] * len(_REPORTS), list[float]()
    even = -math.log(len(_REPORTS))
    for part in parts:
        allowed = error_max * part.requests
        told = part.checks / (part.checks + part.unsettled) if part.unsettled else 1.0
        gains = _found(part.cells.items(), judge_error)
        checks = [
            max(0.0, before) + gain + math.expm1(-c) * allowed * told
            for before, gain, c in zip(checks, gains, _GRID, strict=True)
        ]
        reports = [
            max(0.0, before) + c * part.reported_wrong - math.expm1(c) * allowed
            for before, c in zip(reports, _REPORTS, strict=True)
        ]
        of_checks = _log_sum([one + prior for one, prior in zip(checks, _PRIOR, strict=True)])
        found.append(max(of_checks, _log_sum([one + even for one in reports])))
    return found


def _excess(logs: Sequence[float], slopes: Sequence[float], limit: float, at: float) -> float:
    return _log_sum([log + slope * at for log, slope in zip(logs, slopes, strict=True)]) - limit


def _log_sum(logs: Sequence[float]) -> float:
    """The logarithm of the sum of exp(log)."""
    top = max(logs)
    return top + math.log(sum([math.exp(log - top) for log in logs]))


def _root(rising: Callable[[float], float], end: float) -> float:
    """Where a function that rises passes 0, from 0 to `end`."""
    if rising(0.0) >= 0.0:
        return 0.0
    if rising(end) <= 0.0:
        return float(end)
    low, high = 0.0, float(end)
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) <= 0.0 else (low, middle)
    return high
