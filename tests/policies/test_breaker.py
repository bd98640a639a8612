"""The breaker: opens on failures, rests longer each time, probes one call at a time."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies import Breaker
from policies.breaker import BreakerLimits
from tests.policies.clock import Clock

LIMITS = BreakerLimits(
    failures_max=3, calls_min=10, open_s=2.0, open_s_max=20.0, jitter=0.0, probe_s=30.0, half_life_s=1e9
)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def fail(breaker: Breaker, times: int, retry_after_s: float | None = None) -> None:
    for _ in range(times):
        breaker.record_failure(retry_after_s)


def test_opens_after_failures_in_a_row_and_says_why(clock: Clock) -> None:
    """Two failures are bad luck, three in a row open it."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 2)
    breaker.record_success()
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert not breaker.allows()
    assert not breaker.begin()
    assert breaker.reason == "it failed 3 times in a row, next try in 2 s"


def test_opens_on_the_rate_of_failures(clock: Clock) -> None:
    """Every second call failing opens it too, once there are enough calls to speak of a rate."""
    breaker = Breaker(clock, limits=LIMITS)
    for _ in range(4):
        breaker.record_success()
        breaker.record_failure()
    assert breaker.allows()
    breaker.record_success()
    breaker.record_failure()
    assert not breaker.allows()
    assert "50% of its recent calls failed" in breaker.reason


def test_old_failures_are_forgotten(clock: Clock) -> None:
    """Failures of long ago do not add to the rate of today."""
    breaker = Breaker(clock, limits=BreakerLimits(failures_max=100, calls_min=10, half_life_s=10, jitter=0))
    fail(breaker, 9)
    clock.now_s += 100
    fail(breaker, 5)
    assert breaker.allows()


def test_half_open_lets_one_probe_through(clock: Clock) -> None:
    """After its rest one call may go; others wait for its outcome; a success closes it for all."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    assert breaker.allows()
    assert breaker.begin()
    assert not breaker.begin()
    assert breaker.reason == "it failed 3 times in a row, one call is probing it"
    breaker.record_success()
    assert breaker.begin()
    assert breaker.begin()
    assert breaker.reason == ""


def test_rests_double_up_to_the_longest(clock: Clock) -> None:
    """Each failed probe doubles the rest: 2, 4, 8, 16, then 20 s."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    for rest_s in (2, 4, 8, 16, 20, 20):
        clock.now_s += rest_s - 0.01
        assert not breaker.allows()
        clock.now_s += 0.02
        assert breaker.begin()
        breaker.record_failure()
    clock.now_s += 100
    breaker.begin()
    breaker.record_success()
    fail(breaker, 3)
    clock.now_s += 2.01
    assert breaker.allows()


@pytest.mark.parametrize(("random", "rest_s"), [(0.0, 1.6), (0.5, 2.0), (0.999999, 2.4)])
def test_rests_are_spread(clock: Clock, random: float, rest_s: float) -> None:
    """The rest varies by +-20% with the injected randomness, so that workers do not probe in step."""
    breaker = Breaker(clock, lambda: random, BreakerLimits(failures_max=1, open_s=2.0, jitter=0.2))
    breaker.record_failure()
    clock.now_s += rest_s - 0.01
    assert not breaker.allows()
    clock.now_s += 0.02
    assert breaker.allows()


def test_retry_after_is_obeyed_from_the_first_failure(clock: Clock) -> None:
    """A deployment that says when to come back is left alone until then, within reason."""
    breaker = Breaker(clock, limits=LIMITS)
    breaker.record_failure(retry_after_s=50)
    clock.now_s += 49
    assert not breaker.allows()
    assert "asked to be left alone" in breaker.reason
    clock.now_s += 1
    assert breaker.allows()
    breaker.record_failure(retry_after_s=1e9)
    clock.now_s += LIMITS.retry_after_s_max
    assert breaker.allows()


def test_a_probe_that_never_reports_gives_its_place_back(clock: Clock) -> None:
    """A lost probe blocks the deployment for a while, not for ever."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    assert breaker.begin()
    clock.now_s += 29
    assert not breaker.allows()
    clock.now_s += 1
    assert breaker.begin()


def test_an_outage_ends_within_ten_seconds_of_its_cause(clock: Clock) -> None:
    """However long it lasted, by default the next call may probe within 10 s, also while earlier probes hang."""
    breaker = Breaker(clock, lambda: 0.999999)
    fail(breaker, 5)
    hanging = 0
    for _ in range(50):
        waited_s = 0
        while not breaker.begin():
            clock.now_s += 1
            waited_s += 1
            assert waited_s <= 10
        hanging += 1
        clock.now_s += 3  # each third one ends, as late as a time-out makes it
        if hanging == 3:
            breaker.record_failure()
            hanging = 0


def test_a_long_rest_is_for_calls_that_have_another_way(clock: Clock) -> None:
    """A call that no other deployment can take probes 10 s after a retry-after of an hour; it says so."""
    breaker = Breaker(clock, limits=LIMITS)
    breaker.record_failure(retry_after_s=3600)
    assert breaker.reason == "it asked to be left alone, next try in 1 h, or in 10 s if no other deployment can answer"
    clock.now_s += 9.9
    assert not breaker.allows(is_alone=True)
    clock.now_s += 0.2
    assert not breaker.allows()
    assert breaker.allows(is_alone=True)
    assert breaker.begin()
    assert not breaker.begin()
    breaker.record_failure(retry_after_s=3600)
    assert not breaker.allows(is_alone=True)
    clock.now_s += 10.1
    assert breaker.begin()
    breaker.record_success()
    assert breaker.allows()


def test_a_cancelled_probe_proves_nothing(clock: Clock) -> None:
    """The client left before an outcome: the next call probes."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    breaker.begin()
    breaker.record_cancelled()
    assert breaker.begin()


def test_failures_that_began_before_the_opening_do_not_extend_it(clock: Clock) -> None:
    """Twenty calls in flight that fail together open it once, for the first rest."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 20)
    clock.now_s += 2
    assert breaker.allows()


def test_a_denial_rests_at_once_until_a_probe_is_accepted(clock: Clock) -> None:
    """One denial opens it; each denied probe doubles the rest up to the longest; then it says that the next request tries."""
    breaker = Breaker(clock, limits=LIMITS)
    assert breaker.begin()
    breaker.record_denial("key refused")
    for rest_s in (5, 10, 20, 40, 60, 60):
        assert breaker.reason.startswith("key refused, next try in ")
        clock.now_s += rest_s - 0.5
        assert not breaker.allows()
        clock.now_s += 0.5
        assert (breaker.reason, breaker.denial) == ("key refused, the next request tries it", "key refused")
        assert breaker.begin()
        assert breaker.is_probed
        breaker.record_denial("key refused")
    clock.now_s += 61
    assert breaker.begin()
    breaker.record_accepted()
    assert (breaker.allows(), breaker.reason, breaker.denial) == (True, "", "")


def test_calls_that_began_before_a_denial_neither_extend_nor_end_it(clock: Clock) -> None:
    """Only a probe says whether the deployment accepts calls again."""
    breaker = Breaker(clock, limits=LIMITS)
    breaker.record_denial("no credit")
    breaker.record_denial("no credit")
    breaker.record_success()
    breaker.record_accepted()
    assert breaker.reason == "no credit, next try in 5 s"


class Calls(RuleBasedStateMachine):
    """Any order of calls, outcomes and time."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.breaker = Breaker(self.clock, lambda: 0.5, LIMITS)
        self.running = 0
        self.probes = 0

    @rule()
    def begin(self) -> None:
        was_open_before = self.breaker._open_until is not None
        asked = self.breaker.allows()
        begun = self.breaker.begin()
        assert asked == begun
        if begun:
            self.running += 1
            if was_open_before:
                assert not self.breaker.allows()  # one probe at a time

    @precondition(lambda self: self.running)
    @rule(outcome=st.sampled_from(["success", "failure", "retry", "cancelled"]))
    def end(self, outcome: str) -> None:
        self.running -= 1
        if outcome == "success":
            self.breaker.record_success()
            assert self.breaker.allows()
        elif outcome == "cancelled":
            self.breaker.record_cancelled()
        else:
            self.breaker.record_failure(5.0 if outcome == "retry" else None)

    @rule(s=st.floats(0, 60))
    def wait(self, s: float) -> None:
        self.clock.now_s += s

    @rule()
    def in_the_end_it_is_tried_again(self) -> None:
        self.clock.now_s += LIMITS.open_s_max + LIMITS.probe_s + 5.0
        assert self.breaker.allows()

    @invariant()
    def open_has_a_reason(self) -> None:
        assert self.breaker.allows() != bool(self.breaker.reason)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=30)
