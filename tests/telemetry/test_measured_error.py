"""The measured error: unbiased whatever was checked, honest about how little is known, and a bound that only tightens."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import beta

from gateway.accounts import Team
from gateway.journey.semantic import Bounds
from gateway.settings import CacheSettings, DeploymentSettings, ModelSettings, Settings
from gateway.telemetry.measured_error import CheckCounts, MeasuredErrors, clopper_pearson, measure

TEAM = Team(1, "acme", 0.0)


def settings(alias_max: float | None = None, error_max: float = 0.01) -> Settings:
    deployments = [DeploymentSettings(backend="litellm", model="m")]
    models = {"m": ModelSettings(deployments=deployments, semantic_error_max=alias_max)}
    return Settings(cache=CacheSettings(error_max=error_max), models=models)


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


def checked(requests: int, hit_share: float, error: float, draw: random.Random) -> CheckCounts:
    """A day's traffic whose would-be hits are audited with chances of their own, as the rule does, and checked in the shadow."""
    sample = CheckCounts(requests=0)
    for _ in range(requests):
        sample.requests += 1
        if draw.random() >= hit_share:
            continue
        audited = draw.choice([0.02, 0.1, 0.3])
        is_wrong = draw.random() < error * (3.0 if audited == 0.3 else 0.5)  # audits are where the risk is
        is_audited = draw.random() < audited
        sample.hits += not is_audited
        if is_audited or draw.random() < 0.05:
            weight = (1 - audited) / (audited + (1 - audited) * 0.05)
            sample.checks += 1
            sample.wrong += is_wrong
            sample.weight += weight
            sample.weight2 += weight**2
            sample.wrong_weight += weight * is_wrong
    return sample


def test_the_estimate_is_unbiased_where_audits_seek_the_risk() -> None:
    """Over many days its mean is the truth, and the interval covers it nearly always."""
    draw = random.Random(11)
    error, hit_share = 0.03, 0.5
    served = {0.02: 0.98, 0.1: 0.9, 0.3: 0.7}
    wrong = sum(part * error * (3.0 if audited == 0.3 else 0.5) for audited, part in served.items())
    truth = wrong / 3 * hit_share  # of all requests
    days = [measure(checked(4_000, hit_share, error, draw)) for _ in range(120)]
    mean = sum(day.estimate or 0.0 for day in days) / len(days)
    assert mean == pytest.approx(truth, rel=0.08)
    assert sum(day.low <= truth <= day.high for day in days) >= 0.9 * len(days)


def test_reports_only_raise() -> None:
    """They are wrong answers for certain, and no sample of the others."""
    quiet = CheckCounts(requests=1_000, hits=400, checks=50, weight=400.0, weight2=3_200.0)
    told = CheckCounts(**{name: getattr(quiet, name) for name in quiet.__struct_fields__} | {"reported_wrong": 30})
    silent, loud = measure(quiet), measure(told)
    assert silent.estimate == 0.0
    assert loud.estimate == pytest.approx(0.03)
    assert loud.low > silent.low == 0.0
    assert measure(CheckCounts(requests=10, hits=3)).estimate is None
    assert measure(CheckCounts()).checks == 0


def test_what_no_judge_could_tell_widens_the_interval_both_ways() -> None:
    """As right at its low end and wrong at its high end; where most of it is open there is no estimate. A bound that the settled
    checks tightened stays tight."""
    settled = CheckCounts(requests=1_000, hits=500, checks=50, wrong=5, weight=50, weight2=50, wrong_weight=5)
    some, most = (
        msgspec.structs.replace(settled, unsettled=count, unsettled_weight=float(count), unsettled_weight2=float(count))
        for count in (20, 200)
    )
    assert measure(some).estimate == measure(settled).estimate == 0.05
    assert measure(some).unsettled == 20
    assert measure(some).low < measure(settled).low < measure(settled).high < measure(some).high
    assert measure(most).estimate is None
    assert measure(most).high > 0.4
    for day in (settled, most):
        (tight,) = MeasuredErrors(Bounds(settings())).update({(1, "m"): day}, [TEAM])
        assert tight.strictness == pytest.approx(0.2)


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


def wrong_day(wrong: int, checks: int = 200) -> CheckCounts:
    return CheckCounts(
        requests=1_000, hits=500, checks=checks, wrong=wrong, weight=checks, weight2=checks, wrong_weight=float(wrong)
    )


def test_a_bound_tightens_itself_and_relaxes() -> None:
    """Past its interval's low end by as much as the estimate; until the estimate, not the interval, is back within."""
    truth = MeasuredErrors(Bounds(settings()))
    key = (1, "m")
    assert truth.update({key: wrong_day(6)}, [TEAM]) == []  # 1.5% estimated, and perhaps within
    assert truth.bounds.bound(TEAM, "m", None).untightened is None
    (tight,) = truth.update({key: wrong_day(20)}, [TEAM])  # 5%
    assert tight.strictness == pytest.approx(0.2)
    bound = truth.bounds.bound(TEAM, "m", 0.005)
    assert (bound.error_max, bound.untightened) == (pytest.approx(0.001), 0.005)
    assert truth.bounds.bound(TEAM, "other", None).untightened is None
    assert truth.update({key: wrong_day(6)}, [TEAM]) == []
    assert truth.bounds.bound(TEAM, "m", None).error_max < 0.01
    (relaxed,) = truth.update({key: wrong_day(3)}, [TEAM])
    assert relaxed.strictness == 1.0
    assert truth.bounds.bound(TEAM, "m", None) == truth.bounds.bound(TEAM, "other", None)


def test_one_wrong_answer_is_no_pattern() -> None:
    """Among the first few requests a single report does not tighten anything; a second does."""
    truth = MeasuredErrors(Bounds(settings()))
    assert truth.update({(1, "m"): CheckCounts(requests=2, hits=1, reported_wrong=1)}, [TEAM]) == []
    assert len(truth.update({(1, "m"): CheckCounts(requests=4, hits=2, reported_wrong=2)}, [TEAM])) == 1
    truth.update({}, [TEAM])
    assert truth.bounds.bound(TEAM, "m", None).untightened is None
