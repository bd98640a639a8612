"""The measured error: an interval that holds whenever one looks, honest about how little is known, and a bound that tightens."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.learning.checks import check_share
from gateway.settings import CacheSettings, DeploymentSettings, ModelSettings, Settings
from gateway.telemetry.measured_error import (
    Basis,
    Cell,
    Certificate,
    CertificateStart,
    CheckCounts,
    CheckedPeriod,
    LiveError,
    MeasuredErrors,
    checked,
    measure,
    reported,
)

TEAM = Team(1, "acme", 0.0)
KEY = (1, "m")
FINAL = 0.03


def settings(alias_max: float | None = None, error_max: float = 0.01) -> Settings:
    deployments = [DeploymentSettings(backend="litellm", model="m")]
    models = {"m": ModelSettings(deployments=deployments, semantic_error_max=alias_max)}
    return Settings(cache=CacheSettings(error_max=error_max), models=models)


def counted(*events: tuple[str, ...], requests: int = 0, hits: int = 0) -> CheckCounts:
    counts = CheckCounts(requests=requests, hits=hits)
    for name in chain.from_iterable(events):
        counts.count(name)
    return counts


def day(right: int, wrong: int = 0, open_: int = 0, share: float = 0.1) -> CheckCounts:
    """A day's checks of a tenth of the would-be hits, which are a third of the requests."""
    count = right + wrong + open_
    events = [checked(share, is_right, "j", is_verified=False) for is_right in [True] * right + [False] * wrong]
    events += [checked(share, None, "", is_verified=False)] * open_
    return counted(*events, requests=30 * count, hits=9 * count)


def stream(
    rate: Callable[[int], float], requests: int, seed: int, hit_share: float = 0.6
) -> tuple[CheckCounts, int, int]:
    """The counts of a namespace's stream in which the n-th would-be hit is wrong with the chance `rate(n)`; how often one looked,
    and how often the share of requests to be answered wrongly was outside the interval."""
    draw, counts, would, expected, looks, outside = random.Random(seed), CheckCounts(), 0, 0.0, 0, 0
    for _ in range(requests):
        counts.requests += 1
        if draw.random() >= hit_share:
            continue
        chance, share = rate(would), check_share(would, FINAL)
        would += 1
        if draw.random() >= share:
            counts.hits += 1
            expected += chance
            continue
        for event in checked(share, draw.random() >= chance, "j", is_verified=False):
            counts.count(event)
        if counts.checks % 3 == 0:
            looks += 1
            found = measure(counts)
            outside += not found.low <= expected / counts.requests <= found.high
    return counts, looks, outside


RATES: dict[str, Callable[[int], float]] = {
    "within the bound": lambda _: 0.01,
    "twice the bound": lambda _: 0.03,
    "five times the bound": lambda _: 0.08,
    "right at first": lambda hit: 0.0 if hit < 300 else 0.02,
    "wrong at first": lambda hit: 0.05 if hit < 200 else 0.005,
    "twice as many later": lambda hit: 0.01 if hit < 600 else 0.02,
}


@pytest.mark.parametrize("name", RATES)
def test_the_interval_has_the_truth_at_every_moment(name: str) -> None:
    """In 95% of streams, whenever one looks, also where the share of wrong answers changes on the way."""
    streams = [stream(RATES[name], 2_500, seed) for seed in range(60)]
    assert sum(outside == 0 for _, _, outside in streams) >= 57
    assert min(looks for _, looks, _ in streams) > 40


def test_the_interval_can_fail() -> None:
    """Where what is checked is no sample of the hits, the truth leaves it: the test above is able to see that."""
    counts = CheckCounts(requests=1_000, hits=600, cells={300: Cell(right=150)})
    assert measure(counts).high < 0.02
    assert measure(CheckCounts(requests=1_000, hits=600, cells={300: Cell(right=150, wrong=30)})).low > 0.02


@pytest.mark.parametrize(
    ("requests", "cells", "high"),
    [
        (1_500, {300: Cell(89), 100: Cell(60)}, 0.016),
        (1_500, {300: Cell(88, 1), 100: Cell(60)}, 0.02),
        (1_500, {300: Cell(89), 100: Cell(59, 1)}, 0.025),
        (10_000, {300: Cell(89), 100: Cell(70), 30: Cell(150)}, 0.01),
        (10_000, {300: Cell(87, 2), 100: Cell(69, 1), 30: Cell(150)}, 0.015),
        (100_000, {300: Cell(89), 100: Cell(70), 30: Cell(1_761, 9)}, 0.007),
    ],
)
def test_the_checks_by_default_say_much(requests: int, cells: dict[int, Cell], high: float) -> None:
    """The upper limit of a stream of one namespace of which 60% would be hits, with the wrong ones that were found."""
    hits = round(0.6 * requests) - sum(cell.all for cell in cells.values())
    assert measure(CheckCounts(requests=requests, hits=hits, cells=cells)).high <= high


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([0.01, 0.05, 0.3, 1.0]))
def test_more_wrong_or_open_checks_widen(wrong: int, open_: int, share: float) -> None:
    """What was found wrong raises both limits, what is open the upper one alone."""
    few, open_one, wrong_one = (
        day(41, wrong, open_, share),
        day(40, wrong, open_ + 1, share),
        day(40, wrong + 1, open_, share),
    )
    least, most, worst = measure(few), measure(open_one), measure(wrong_one)
    assert most.low == pytest.approx(least.low)
    assert most.high >= least.high
    assert worst.low >= least.low
    assert worst.high == pytest.approx(most.high)
    assert least.low <= least.high


def test_checks_count_by_the_hits_that_they_stand_for() -> None:
    """A wrong one of the later hits, of which fewer are checked, says more than one of the first."""
    first, later = ({300: Cell(88, 1), 30: Cell(30)}, {300: Cell(89), 30: Cell(29, 1)})
    early, late = (measure(CheckCounts(requests=3_000, hits=1_500, cells=cells)) for cells in (first, later))
    assert late.high > early.high
    assert (late.estimate or 0) > (early.estimate or 0)


def test_an_estimate_is_never_zero() -> None:
    """That no wrong one was found among some checks does not say that there is none."""
    assert 0.0 < (measure(day(30)).estimate or 0) < 0.01
    assert measure(day(0, 0, 1)).estimate is None
    assert measure(CheckCounts(requests=10, hits=3)).estimate is None


def test_workers_sums_are_one_stream() -> None:
    """The interval depends on the sums alone, whatever order events came in."""
    whole, first, second = day(60, 3, 2), day(30, 1, 2), day(30, 2)
    first.add(second)
    assert (measure(first), first.judges) == (measure(whole), whole.judges)


def test_events_of_another_version_are_ignored() -> None:
    """What is no count, or has no share."""
    assert counted(("shadowed:3", "right:x", "right:0", "right:2000", "unknown")) == CheckCounts(cells={3: Cell()})


def test_a_judges_errors_widen_the_interval() -> None:
    """A judge that may miss a tenth of the wrong answers, and take a tenth of the right ones for wrong."""
    counts = day(180, 20)
    sure, noisy = measure(counts), measure(counts, judge_error=0.1)
    assert sure.low > 0.01
    assert noisy.low == 0.0
    assert noisy.high > 1.05 * sure.high


def test_hits_of_which_nothing_was_checked_may_be_wrong() -> None:
    """All of them; and before the first request nothing is known."""
    assert measure(CheckCounts(requests=10, hits=3)).high == 0.3
    assert measure(CheckCounts()).high == 1.0


def test_what_a_verifier_allowed_is_measured_apart() -> None:
    """By the same checks, which count among all."""
    events = [checked(0.1, True, "j", is_verified=False)] * 50 + [checked(0.1, False, "j", is_verified=True)] * 5
    counts = counted(*events, ("verified_hits",) * 45, requests=1_000, hits=500)
    verified = counts.of_verifier
    assert (counts.checks, counts.wrong, verified.checks, verified.wrong, verified.hits) == (55, 5, 5, 5, 45)
    assert measure(verified).high == 0.045
    assert measure(counts).high < 0.2


def test_reports_only_raise() -> None:
    """They are wrong answers for certain, and no sample of the others."""
    quiet = day(50)
    told = msgspec.structs.replace(quiet, reported_wrong=70, reported_right=500)
    silent, loud = measure(quiet), measure(told)
    assert loud.estimate == pytest.approx(70 / quiet.requests)
    assert loud.high >= loud.estimate > loud.low > 0.02
    assert silent.low == 0.0


bounds = st.one_of(st.none(), st.floats(0, 1))


@given(st.floats(0, 1), bounds, bounds, bounds)
def test_nobody_loosens_a_bound(
    configured: float, team: float | None, alias: float | None, asked: float | None
) -> None:
    """The least of all that are given holds."""
    given_ = [one for one in (configured, team, alias, asked) if one is not None]
    bounded = Bounds(settings(alias, configured))
    found = bounded.error_max(Team(1, "t", 0.0, semantic_error_max=team), "m", asked)
    assert found == min(given_)


def hours(*counts: CheckCounts) -> list[CheckedPeriod]:
    return [CheckedPeriod(3_600 * at, {KEY: one}) for at, one in enumerate(counts)]


def update(truth: MeasuredErrors, *counts: CheckCounts) -> Sequence[LiveError]:
    return truth.update(hours(*counts), [TEAM], {})


def test_too_many_wrong_tighten_the_bound_until_they_are_outweighed() -> None:
    """By the last day's lower limit; a request's own bound is tightened, too, and other models' bounds are not."""
    truth, good, bad = MeasuredErrors(Bounds(settings())), day(100), day(70, 30)
    assert update(truth, good, good) == []
    assert truth.bounds.bound(TEAM, "m", None).untightened is None
    (tight,) = update(truth, good, good, bad)
    assert tight.measured.low > 0.01
    assert tight.strictness == pytest.approx(0.33, rel=0.1)  # of 3% estimated
    bound = truth.bounds.bound(TEAM, "m", 0.005)
    assert (bound.error_max, bound.untightened) == (pytest.approx(0.005 * tight.strictness), 0.005)
    assert truth.bounds.bound(TEAM, "other", None).untightened is None
    assert update(truth, good, good, bad, good) == []
    assert truth.bounds.bound(TEAM, "m", None).error_max < 0.01
    (relaxed,) = update(truth, good, good, bad, *[good] * 9)
    assert relaxed.strictness == 1.0
    assert truth.bounds.bound(TEAM, "m", None) == truth.bounds.bound(TEAM, "other", None)


def test_a_new_certificate_ends_the_tightening() -> None:
    """What was counted before its start is no evidence; what is counted since is."""
    truth, bad = MeasuredErrors(Bounds(settings())), day(60, 40)
    assert len(update(truth, bad, bad)) == 1
    start = CertificateStart("1", 5_000.0, Basis(0.01, "j"))
    (relaxed,) = truth.update(hours(bad, bad), [TEAM], {KEY: Certificate(start, day(5))})
    assert relaxed.strictness == 1.0
    (again,) = truth.update(hours(bad, bad), [TEAM], {KEY: Certificate(start, bad)})
    assert again.strictness < 1.0


def test_one_wrong_answer_is_no_pattern() -> None:
    """Among the first few requests a single report, or a single check found wrong, does not tighten anything; a few do."""
    truth = MeasuredErrors(Bounds(settings()))
    assert update(truth, counted(reported(is_wrong=True), requests=2, hits=1)) == []
    assert update(truth, day(2, 1)) == []
    assert len(update(truth, counted(*[reported(is_wrong=True)] * 3, requests=6, hits=3))) == 1
    update(truth)
    assert truth.bounds.bound(TEAM, "m", None).untightened is None


def test_a_share_at_the_bound_is_seldom_taken_for_too_many() -> None:
    """Of a hundred days with exactly the bound's share of wrong answers, in a few at most."""
    draw, alarms = random.Random(3), 0
    for _ in range(100):
        truth, parts = MeasuredErrors(Bounds(settings())), []
        for _ in range(24):
            wrong = sum(draw.random() < 0.0222 for _ in range(10))
            parts.append(CheckCounts(requests=200, hits=90, cells={100: Cell(10 - wrong, wrong)}))
            update(truth, *parts)
            alarms += truth.live[0].strictness < 1.0
    assert alarms <= 5


@pytest.mark.parametrize(
    ("share", "hits", "expected"),
    [(0.0, 100, 0.0), (0.03, 2, 0.0), (0.03, 3, 0.3), (0.03, 299, 0.3), (0.03, 300, 0.1), (0.03, 1_000, 0.03), (0.5, 3, 0.5)],
)  # fmt: skip
def test_more_of_the_first_hits_are_checked(share: float, hits: int, expected: float) -> None:
    """But for the first three; without a share there are no checks."""
    assert check_share(hits, share) == expected
