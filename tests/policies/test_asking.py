"""Whether a question to a verifier pays, and what a namespace's account lets through."""

from __future__ import annotations

import math
import random

import pytest

from policies.asking import (
    FIRST_REQUESTS,
    Calibration,
    ErrorAccount,
    Expense,
    any_right,
    false_yes_again,
    is_affordable,
    pays,
    risk_of,
)
from policies.routing import PolicyKind

LARGE, QUICK, QUESTION = Expense(1_600, 3_000.0), Expense(20, 300.0), Expense(100, 400.0)


@pytest.mark.parametrize(
    ("kind", "p", "generation", "is_asked"),
    [
        ("balanced", 0.3, LARGE, True),
        ("balanced", 0.02, LARGE, False),
        ("balanced", 0.9, QUICK, False),
        ("cheapest", 0.1, LARGE, True),
        ("cheapest", 0.05, LARGE, False),
        ("fastest", 0.2, LARGE, True),
        ("fastest", 0.9, QUICK, False),
    ],
)
def test_a_question_is_weighed_as_deployments_are(kind: str, p: float, generation: Expense, is_asked: bool) -> None:
    """By the score of the alias's own policy: a large model's answer is worth a question, that of a quick and cheap one is not."""
    assert pays(PolicyKind(kind), p, QUESTION, generation) is is_asked


def test_where_nothing_costs_the_time_decides() -> None:
    """As with two models of one's own under `cheapest`."""
    assert pays(PolicyKind.CHEAPEST, 0.5, Expense(0, 100.0), Expense(0, 1_000.0))
    assert not pays(PolicyKind.CHEAPEST, 0.05, Expense(0, 100.0), Expense(0, 1_000.0))


def test_questions_stay_within_their_share() -> None:
    """Of what the requests would have cost; on the first day more, and some before anything is counted."""
    assert is_affordable(10, 480, 10_000, 0.05, is_first_day=False)
    assert not is_affordable(10, 500, 10_000, 0.05, is_first_day=False)
    assert is_affordable(0, 500, 0, 0.05, is_first_day=False)
    assert is_affordable(10, 2_500, 10_000, 0.05, is_first_day=True)
    assert is_affordable(10, 0, 0, 0.05, is_first_day=True)
    assert not is_affordable(10, 500, 0, 0.05, is_first_day=True)
    assert not is_affordable(0, 0, 10_000, 0.0, is_first_day=True)


def test_the_risk_of_a_yes() -> None:
    """Bayes: the less likely an answer was, the more a yes to it is an error; a second one lowers that by half or so."""
    assert risk_of(1.0, 0.03) == 0.0
    assert risk_of(0.5, 0.03) == pytest.approx(0.0291, abs=1e-4)
    assert risk_of(0.1, 0.03) == pytest.approx(0.2126, abs=1e-4)
    assert risk_of(0.0, 0.0) == 1.0
    assert risk_of(0.1, false_yes_again(0.03)) == pytest.approx(0.122, abs=1e-3)
    assert any_right([0.5, 0.5]) == 0.75


def test_what_the_rule_says_is_set_right_by_what_the_verifier_says() -> None:
    """Per namespace, and apart for the likeliest answer of a question; an unseen range has what the rule says."""
    calibration, draw = Calibration(), random.Random(5).random
    for _ in range(2_000):
        is_right = draw() < 0.6
        calibration.learn(b"here", 0.9, 0.03, is_first=True, is_yes=is_right or draw() < 0.03)
    assert calibration.p(b"here", 0.9, is_first=True) == pytest.approx(0.6, abs=0.05)
    assert calibration.p(b"here", 0.9, is_first=False) == 0.9
    assert calibration.p(b"there", 0.9, is_first=True) == 0.9
    for _ in range(50):
        calibration.learn(b"here", 0.5, 0.03, is_first=True, is_yes=False)
    assert 0.0 < calibration.p(b"here", 0.5, is_first=True) < 0.1


@pytest.mark.parametrize("p", [0.15, 0.3, 0.7])
def test_wrong_answers_stay_within_the_bound(p: float) -> None:
    """Of requests whose answers are right with the probability p, and a verifier that errs as it is known to."""
    draw, account, wrong, served = random.Random(int(100 * p)).random, ErrorAccount(), 0, 0
    account.start(b"here", 0.01)
    requests, false_yes, error_max = 20_000, 0.03, 0.01
    for _ in range(requests):
        account.pay(b"here", error_max)
        is_right = draw() < p
        if not (is_right or draw() < false_yes) or not account.has(b"here", risk_of(p, false_yes), error_max):
            continue
        account.charge(b"here", risk_of(p, false_yes))
        served, wrong = served + 1, wrong + (not is_right)
    expected = error_max * (requests + FIRST_REQUESTS)
    assert 0 < wrong <= expected + 4 * math.sqrt(expected)
    assert served > 0.02 * requests * p


def test_each_namespace_and_worker_has_its_account() -> None:
    """It starts with what some requests pay, shared among the workers, where that is given; one hit may take a part of it; a
    bound of 0 lets nothing through."""
    one, two = ErrorAccount(), ErrorAccount(workers=2)
    for account in (one, two):
        assert account.pay(b"a", 0.01)
        assert not account.has(b"a", 0.01, 0.01)
        account.start(b"a", 0.01)
        account.start(b"b", 0.01)
        assert not account.pay(b"a", 0.01)
    assert one.has(b"a", 0.15, 0.01)
    assert not two.has(b"a", 0.15, 0.01)
    assert two.has(b"b", 0.08, 0.01)
    one.charge(b"a", 0.5)
    assert not one.has(b"a", 0.1, 0.01)
    assert one.has(b"b", 0.15, 0.01)
    one.pay(b"strict", 0.0)
    one.start(b"strict", 0.0)
    assert not one.has(b"strict", 0.001, 0.0)
