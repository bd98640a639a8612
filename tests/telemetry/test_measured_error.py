"""The measured error: unbiased whatever was checked, honest about how little is known, and a bound that only tightens."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import chain

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from bench.certificate import STREAMS, Stream, simulate
from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.settings import CacheSettings, DeploymentSettings, ModelSettings, Settings
from gateway.telemetry.measured_error import (
    Cell,
    CheckCounts,
    CheckedPeriod,
    LiveError,
    MeasuredErrors,
    RulingCounts,
    audited,
    chances,
    clopper_pearson,
    evidence,
    measure,
    served,
    served_wrong,
    settled,
    shadow_share,
)

TEAM = Team(1, "acme", 0.0)
KEY = (1, "m")


def settings(alias_max: float | None = None, error_max: float = 0.01) -> Settings:
    deployments = [DeploymentSettings(backend="litellm", model="m")]
    models = {"m": ModelSettings(deployments=deployments, semantic_error_max=alias_max)}
    return Settings(cache=CacheSettings(error_max=error_max), models=models)


def counted(*events: tuple[str, ...], requests: int = 0, hits: int = 0) -> CheckCounts:
    counts = CheckCounts(requests=requests, hits=hits)
    for name in chain.from_iterable(events):
        counts.count(name)
    return counts


def audits(right: int, wrong: int = 0, unsettled: int = 0, chance: float = 0.1) -> CheckCounts:
    """A day's audits; nine times as many hits were served, of five times as many requests."""
    events = [audited(chance)] * (right + wrong + unsettled)
    events += [served(chance, is_compared=False)] * (9 * len(events))
    events += [settled(chance, "j", is_wrong=False, is_audit=True)] * right
    events += [settled(chance, "j", is_wrong=True, is_audit=True)] * wrong
    hits = 9 * (right + wrong + unsettled)
    return counted(*events, requests=5 * hits, hits=hits)


@given(st.floats(1e-9, 1.0))
def test_a_chance_lies_in_its_step(chance: float) -> None:
    """The limits take the end of the step that is against them; a chance below all counts as none."""
    (event,) = audited(chance)
    least, most = chances(int(event.removeprefix("audited:")))
    assert least <= chance * (1 + 1e-6)
    assert chance <= most * (1 + 1e-6)
    assert least == 0.0 or most / least < 1.1


@pytest.mark.parametrize("name", [stream.name for stream in STREAMS])
def test_the_limits_hold_at_every_moment(name: str) -> None:
    """Under drift, with late, missing and wrong verdicts, and where errors are not expected: short streams of the bench."""
    (stream,) = [one for one in STREAMS if one.name == name]
    runs = [simulate(stream, 500, random.Random(seed)) for seed in range(20)]
    assert sum(run.is_above and run.is_below for run in runs) >= 19
    assert all(run.low <= run.high for run in runs)


def test_many_checks_certify_twice_the_bound() -> None:
    """After 3,000 requests at half the bound, with one of five hits checked, and more of the first."""
    stream = Stream("", shadow_share=0.2)
    highs = [simulate(stream, 3_000, random.Random(seed)).high for seed in range(8)]
    assert sorted(highs)[5] <= 0.02


@pytest.mark.parametrize(
    ("share", "hits", "expected"),
    [(0.0, 0, 0.0), (0.02, 0, 0.3), (0.02, 4_000, 0.1), (0.02, 10**6, 0.02), (0.5, 0, 0.5)],
)
def test_more_of_the_first_hits_are_checked_where_any_are(share: float, hits: int, expected: float) -> None:
    """So that the first thousands of requests say something; without shadow checks there are none."""
    assert shadow_share(share, hits) == expected


def test_a_certificate_can_fail() -> None:
    """Where the draws are not what was counted, the truth leaves the interval: the test above is able to see that."""
    counts = counted(*[served(0.5, is_compared=False)] * 200, requests=400, hits=200)
    counts.add(counted(*[audited(0.5), settled(0.5, "j", is_wrong=False, is_audit=True)] * 200))
    assert served_wrong(counts)[1] < 10


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([0.01, 0.05, 0.2, 0.5]))
def test_more_wrong_or_unsettled_checks_widen(wrong: int, unsettled: int, chance: float) -> None:
    """What was found wrong raises both limits, what is open the upper one alone."""
    few, more = audits(40, wrong, unsettled, chance), audits(40, wrong, unsettled, chance)
    more.add(counted(audited(chance)))
    (low, high), (low_open, high_open) = served_wrong(few), served_wrong(more)
    assert low_open == pytest.approx(low, abs=1e-3)
    assert high_open >= high - 1e-3
    more.add(counted(settled(chance, "j", is_wrong=True, is_audit=True)))
    low_wrong, high_wrong = served_wrong(more)
    assert low_wrong >= low - 1e-3
    assert high_wrong == pytest.approx(high_open, abs=1e-3)


def test_workers_sums_are_one_stream() -> None:
    """The limits depend on the sums alone, whatever order events came in."""
    whole, first, second = audits(60, 3, 2), audits(30, 1, 2), audits(30, 2)
    first.add(second)
    assert served_wrong(first) == served_wrong(whole)
    whole.add(second, -1)
    assert whole.cells == audits(30, 1, 2).cells


def test_a_judges_errors_widen_the_interval() -> None:
    """A judge that may miss a tenth of the wrong answers, and take a tenth of the right ones for wrong."""
    counts = audits(180, 20)
    (low, high), (low_noisy, high_noisy) = served_wrong(counts), served_wrong(counts, judge_error=0.1)
    assert low > 40
    assert low_noisy == 0.0
    assert high_noisy > 1.05 * high


def test_hits_that_nothing_was_counted_of_may_be_wrong() -> None:
    """Of workers of an earlier release, and where nothing is ever compared."""
    assert measure(CheckCounts(requests=10, hits=3)).high == 0.3
    silent = counted(*[served(0.0, is_compared=False)] * 3, requests=10, hits=3)
    assert measure(silent).high == 0.3
    assert measure(silent).estimate is None
    assert measure(CheckCounts()).high == 1.0


def checked(requests: int, hit_share: float, error: float, draw: random.Random) -> CheckCounts:
    """A day's traffic whose would-be hits are audited with chances of their own, as the rule does, and checked in the shadow."""
    counts = CheckCounts(requests=requests)
    for _ in range(requests):
        if draw.random() >= hit_share:
            continue
        audit = draw.choice([0.02, 0.1, 0.3])
        is_wrong = draw.random() < error * (3.0 if audit == 0.3 else 0.5)  # audits are where the risk is
        chance = audit + (1 - audit) * 0.05
        is_audit = draw.random() < audit
        is_shadow = not is_audit and draw.random() < 0.05
        counts.hits += not is_audit
        events = audited(chance) if is_audit else served(chance, is_compared=is_shadow)
        if is_audit or is_shadow:
            events += settled(chance, "j", is_wrong=is_wrong, is_audit=is_audit)
        counts.add(counted(events))
    return counts


@given(st.integers(0, 1_000), st.floats(0.5, 50_000))
def test_the_interval_is_the_beta_distributions(permille: int, total: float) -> None:
    """As a well-kept library has it, for fractions of counts too."""
    share = permille / 1_000
    count = total if permille == 1_000 else share * total
    low, high = clopper_pearson(count, total)
    expected_low = beta.ppf(0.025, count, total - count + 1) if count > 0 else 0.0
    expected_high = beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    assert low == pytest.approx(expected_low, abs=1e-6)
    assert high == pytest.approx(expected_high, abs=1e-6)
    assert low <= share + 1e-9
    assert high >= share - 1e-9


def test_the_estimate_is_unbiased_where_audits_seek_the_risk() -> None:
    """Over many days its mean is the truth, and the interval covers it."""
    draw = random.Random(11)
    error, hit_share = 0.03, 0.5
    served_of = {0.02: 0.98, 0.1: 0.9, 0.3: 0.7}
    wrong = sum(part * error * (3.0 if audit == 0.3 else 0.5) for audit, part in served_of.items())
    truth = wrong / 3 * hit_share  # of all requests
    days = [measure(checked(4_000, hit_share, error, draw)) for _ in range(60)]
    mean = sum(day.estimate or 0.0 for day in days) / len(days)
    assert mean == pytest.approx(truth, rel=0.12)
    assert sum(day.low <= truth <= day.high for day in days) >= 0.95 * len(days)


def test_reports_only_raise() -> None:
    """They are wrong answers for certain, and no sample of the others."""
    quiet = audits(50)
    told = msgspec.structs.replace(quiet, reported_wrong=70, reported_right=500)
    silent, loud = measure(quiet), measure(told)
    assert silent.estimate == 0.0
    assert loud.estimate == loud.low == pytest.approx(70 / quiet.requests)
    assert silent.low == 0.0


def test_what_no_judge_could_tell_widens_the_interval_both_ways() -> None:
    """As wrong at its high end; where most of it is open there is no estimate. A drift that the settled checks found stays one."""
    settled_, some, most = audits(30, 20), audits(30, 20, 20), audits(30, 20, 200)
    assert measure(some).estimate == pytest.approx(measure(settled_).estimate or 0.0, rel=1e-6)
    assert measure(some).high > measure(settled_).high
    assert measure(most).estimate is None
    assert measure(most).high > 0.15
    for day in (settled_, some, most):
        assert update(MeasuredErrors(Bounds(settings())), day)[0].drift is not None


@pytest.mark.parametrize("wrong", [0, 4])
def test_what_a_judge_is_known_to_miss_raises_the_estimate_and_widens_the_interval(wrong: int) -> None:
    """By the rulings of the day, of all hours; what it is not known for changes nothing, and nothing lowers."""
    truth, bounds_ = MeasuredErrors(Bounds(settings())), Bounds(settings())
    day = audits(96, wrong)
    rulings = {"j\nmodel": RulingCounts(same_same=50, different_same=50, same_different=20, different_different=80)}
    truth.update([CheckedPeriod(0, {}, rulings), CheckedPeriod(3_600, {KEY: day})], [TEAM])
    plain, found = measure(day), truth.measure(day)
    assert found.estimate == pytest.approx(min(found.high, (plain.estimate or 0.0) / 0.8))
    assert found.low <= plain.low
    assert found.high > plain.high
    assert 0.5 < found.judge_error < 0.7  # of right answers, the margin included
    for nothing in ({}, {"j\nmodel": RulingCounts(same_same=9)}, {"other\nmodel": rulings["j\nmodel"]}):
        other = MeasuredErrors(bounds_)
        other.update([CheckedPeriod(0, {}, nothing), CheckedPeriod(3_600, {KEY: day})], [TEAM])
        assert other.measure(day) == plain


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
    return truth.update(hours(*counts), [TEAM])


def test_a_drift_tightens_the_bound_until_it_is_outweighed() -> None:
    """From the hour in which the evidence is there, however good the hours before; until many requests are answered rightly."""
    truth = MeasuredErrors(Bounds(settings()))
    good, bad = audits(100), audits(80, 20)
    assert update(truth, good, good, good) == []
    assert truth.bounds.bound(TEAM, "m", None).untightened is None
    (tight,) = update(truth, good, good, good, bad)
    assert tight.drift is not None
    assert tight.drift.since_s == 3 * 3_600
    assert tight.strictness == pytest.approx(0.25, rel=0.1)  # 4% since then
    bound = truth.bounds.bound(TEAM, "m", 0.005)
    assert (bound.error_max, bound.untightened) == (pytest.approx(0.005 * tight.strictness), 0.005)
    assert truth.bounds.bound(TEAM, "other", None).untightened is None
    assert update(truth, good, good, good, bad, good) == []
    assert truth.bounds.bound(TEAM, "m", None).error_max < 0.01
    (relaxed,) = update(truth, good, good, good, bad, *[good] * 5)
    assert relaxed.drift is None
    assert truth.bounds.bound(TEAM, "m", None) == truth.bounds.bound(TEAM, "other", None)


def test_a_new_certificate_ends_a_drift() -> None:
    """What was counted before its start is no evidence; what is counted since is."""
    truth, bad = MeasuredErrors(Bounds(settings())), audits(80, 20)
    assert len(update(truth, bad, bad)) == 1
    assert len(truth.update(hours(bad, bad), [TEAM], {KEY: (5_000.0, CheckCounts())})) == 1
    assert truth.bounds.bound(TEAM, "m", None).untightened is None
    (again,) = truth.update(hours(bad, bad), [TEAM], {KEY: (5_000.0, bad)})
    assert again.drift is not None
    assert again.drift.since_s == 5_000.0


def test_one_wrong_answer_is_no_pattern() -> None:
    """Among the first few requests a single report does not tighten anything; a second does."""
    truth = MeasuredErrors(Bounds(settings()))
    assert update(truth, CheckCounts(requests=2, hits=1, reported_wrong=1)) == []
    assert len(update(truth, CheckCounts(requests=4, hits=2, reported_wrong=2))) == 1
    update(truth)
    assert truth.bounds.bound(TEAM, "m", None).untightened is None


def test_a_share_at_the_bound_is_seldom_taken_for_a_drift() -> None:
    """Of a hundred days with exactly the bound's share of wrong answers, in about a tenth at most."""
    draw, alarms = random.Random(3), 0
    for _ in range(100):
        day = []
        for _ in range(24):
            cell = Cell(served=90)
            cell.audited = sum(draw.random() < 0.1 for _ in range(100))
            cell.audits_wrong = sum(draw.random() < 0.0222 for _ in range(cell.audited))
            cell.audits_right = cell.audited - cell.audits_wrong
            day.append(CheckCounts(requests=200, hits=90, cells={26: cell}))
        alarms += max(evidence(day, 0.01)) >= math.log(100.0)
    assert alarms <= 10
