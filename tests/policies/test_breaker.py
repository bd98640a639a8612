"""Health: a breaker opens on failures, rests longer each time, probes one call at a time; each caller has one of its own."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from policies import Health
from policies.breaker import Asker, Breaker, BreakerLimits
from tests.policies.clock import Clock

LIMITS = BreakerLimits(open_s=2.0, open_s_max=20.0, jitter=0.0, probe_s=30.0)
_fresh = itertools.count()


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def begin(breaker: Breaker, unit: str = "probe") -> bool:
    """Begin a call where it may."""
    if is_allowed := breaker.allows(unit, is_alone=True):
        breaker.begin(unit)
    return is_allowed


def fail(breaker: Breaker, times: int, retry_after_s: float | None = None) -> None:
    """So many requests fail."""
    for _ in range(times):
        breaker.record_failure(f"r{next(_fresh)}", "", retry_after_s)


def test_opens_after_failures_in_a_row_and_says_why(clock: Clock) -> None:
    """Two failures are bad luck, three in a row open it."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 2)
    breaker.record_success("probe")
    fail(breaker, 2)
    assert breaker.allows()
    fail(breaker, 1)
    assert not breaker.allows()
    assert not begin(breaker)
    assert breaker.reason == "it failed 3 times in a row, next try in 2 s"


def test_half_open_lets_one_probe_through(clock: Clock) -> None:
    """After its rest one call may go; others wait for its outcome; a success closes it for all."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    assert breaker.allows()
    assert begin(breaker)
    assert not begin(breaker)
    assert breaker.reason == "it failed 3 times in a row, one call is probing it"
    breaker.record_success("probe")
    assert begin(breaker)
    assert begin(breaker)
    assert breaker.reason == ""


def test_rests_double_up_to_the_longest(clock: Clock) -> None:
    """Each failed probe doubles the rest: 2, 4, 8, 16, then 20 s."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    for rest_s in (2, 4, 8, 16, 20, 20):
        clock.now_s += rest_s - 0.01
        assert not breaker.allows()
        clock.now_s += 0.02
        assert begin(breaker)
        breaker.record_failure("probe")
    clock.now_s += 100
    begin(breaker)
    breaker.record_success("probe")
    fail(breaker, 3)
    clock.now_s += 2.01
    assert breaker.allows()


@pytest.mark.parametrize(("random", "rest_s"), [(0.0, 1.6), (0.5, 2.0), (0.999999, 2.4)])
def test_rests_are_spread(clock: Clock, random: float, rest_s: float) -> None:
    """The rest varies by +-20% with the injected randomness, so that workers do not probe in step."""
    breaker = Breaker(clock, lambda: random, BreakerLimits(open_s=2.0, jitter=0.2))
    fail(breaker, 3)
    clock.now_s += rest_s - 0.01
    assert not breaker.allows()
    clock.now_s += 0.02
    assert breaker.allows()


def test_retry_after_is_obeyed_from_the_first_failure(clock: Clock) -> None:
    """A deployment that says when to come back is left alone until then, within reason."""
    breaker = Breaker(clock, limits=LIMITS)
    breaker.record_failure("probe", retry_after_s=50)
    clock.now_s += 49
    assert not breaker.allows()
    assert "asked to be left alone" in breaker.reason
    clock.now_s += 1
    assert breaker.allows()
    breaker.record_failure("probe", retry_after_s=1e9)
    clock.now_s += LIMITS.retry_after_s_max
    assert breaker.allows()


def test_a_probe_that_never_reports_gives_its_place_back(clock: Clock) -> None:
    """A lost probe blocks the deployment for a while, not for ever."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    assert begin(breaker)
    clock.now_s += 29
    assert not breaker.allows()
    clock.now_s += 1
    assert begin(breaker)


def test_an_outage_ends_within_ten_seconds_of_its_cause(clock: Clock) -> None:
    """However long it lasted, by default the next call may probe within 10 s, also while earlier probes hang."""
    breaker = Breaker(clock, lambda: 0.999999)
    fail(breaker, 3)
    hanging = 0
    for _ in range(50):
        waited_s = 0
        while not begin(breaker):
            clock.now_s += 1
            waited_s += 1
            assert waited_s <= 10
        hanging += 1
        clock.now_s += 3  # each third one ends, as late as a time-out makes it
        if hanging == 3:
            breaker.record_failure("probe")
            hanging = 0


def test_a_long_rest_is_for_calls_that_have_another_way(clock: Clock) -> None:
    """A call that no other deployment can take probes 10 s after a retry-after of an hour; it says so."""
    breaker = Breaker(clock, limits=LIMITS)
    breaker.record_failure("probe", retry_after_s=3600)
    assert (
        breaker.reason
        == "it is full and asked to be left alone, next try in 1 h, or in 10 s if no other deployment can answer"
    )
    clock.now_s += 9.9
    assert not breaker.allows(is_alone=True)
    clock.now_s += 0.2
    assert not breaker.allows()
    assert breaker.allows(is_alone=True)
    assert begin(breaker)
    assert not begin(breaker)
    breaker.record_failure("probe", retry_after_s=3600)
    assert not breaker.allows(is_alone=True)
    clock.now_s += 10.1
    assert begin(breaker)
    breaker.record_success("probe")
    assert breaker.allows()


def test_a_cancelled_probe_proves_nothing(clock: Clock) -> None:
    """The client left before an outcome: the next call probes."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 3)
    clock.now_s += 2
    begin(breaker)
    breaker.record_cancelled("probe")
    assert begin(breaker)


def test_failures_that_began_before_the_opening_do_not_extend_it(clock: Clock) -> None:
    """Twenty calls in flight that fail together open it once, for the first rest."""
    breaker = Breaker(clock, limits=LIMITS)
    fail(breaker, 20)
    clock.now_s += 2
    assert breaker.allows()


def deny(breaker: Breaker, times: int = 3, cause: str = "key refused") -> None:
    """So many requests are denied."""
    for _ in range(times):
        breaker.record_failure(f"r{next(_fresh)}", denial=cause)


def test_a_denial_rests_longer_until_a_probe_succeeds(clock: Clock) -> None:
    """Each denied probe doubles the rest up to the longest; then it says that the next request tries."""
    breaker = Breaker(clock, limits=LIMITS)
    deny(breaker)
    for rest_s in (5, 10, 20, 40, 60, 60):
        assert breaker.reason.startswith("key refused, next try in ")
        clock.now_s += rest_s - 0.5
        assert not breaker.allows()
        clock.now_s += 0.5
        assert (breaker.reason, breaker.denial) == ("key refused, the next request tries it", "key refused")
        assert begin(breaker)
        assert breaker.is_probed
        breaker.record_failure("probe", denial="key refused")
    clock.now_s += 61
    assert begin(breaker)
    breaker.record_success("probe")
    assert (breaker.allows(), breaker.reason, breaker.denial) == (True, "", "")


def test_calls_that_began_before_a_denial_neither_extend_nor_end_it(clock: Clock) -> None:
    """Only a probe says whether the deployment accepts calls again."""
    breaker = Breaker(clock, limits=LIMITS)
    deny(breaker, 5, "no credit")
    breaker.record_success("probe")
    assert breaker.reason == "no credit, next try in 5 s"


def asker(caller: str = "a", shape: str = "", request: str = "", scope: str = "chat:") -> Asker:
    """Another request of a caller."""
    return Asker(scope, caller, shape, request or f"r{next(_fresh)}")


@pytest.fixture
def health(clock: Clock) -> Health:
    return Health(clock, limits=LIMITS)


@pytest.mark.parametrize("callers", ["aaa", "abc"])
@pytest.mark.parametrize("denial", ["", "key refused"])
def test_what_is_dead_is_left_after_three_requests(health: Health, callers: str, denial: str) -> None:
    """Of one caller, or of three; by two, each leaves it after its own third."""
    for one in callers:
        assert health.allows(asker(one))
        health.failed(asker(one), denial=denial)
    assert not any(health.allows(asker(one)) for one in callers)
    assert (bool(health.trouble[0]), health.trouble[1]) == (True, denial)


@pytest.mark.parametrize("denial", ["", "key refused"])
@pytest.mark.parametrize("retry_after_s", [None, 60.0])
def test_one_caller_takes_nothing_from_another(
    health: Health, clock: Clock, denial: str, retry_after_s: float | None
) -> None:
    """However it varies its requests, for however long, and whether or not the other asked before."""
    for number in range(200):
        one = asker("attacker", f"s{number % 7}")
        if health.begin(one):
            health.failed(one, retry_after_s, denial)
        assert health.begin(asker("b"))
        if number % 10 == 9:
            health.succeeded(asker("b"))
        clock.now_s += 0.3


def test_one_caller_does_not_prolong_the_rest_of_all(health: Health, clock: Clock) -> None:
    """After a real outage the first request of another one ends it, whatever the attacker's probes do."""
    for one in ("attacker", "b", "c"):
        health.failed(asker(one))
    assert not health.allows(asker("d"))
    for _ in range(100):
        clock.now_s += 2.1
        one = asker("attacker")
        if health.begin(one):
            health.failed(one)
        assert health.allows(asker("d"))
    for other in ("d", "b"):
        probe = asker(other)
        assert health.begin(probe)
        health.succeeded(probe)
    assert health.is_well


def test_a_request_counts_once(health: Health) -> None:
    """However often it is tried."""
    for _ in range(9):
        health.failed(asker(request="the same"))
    health.failed(asker())
    assert health.allows(asker())


def test_a_rest_is_as_wide_as_its_evidence(health: Health) -> None:
    """Requests of one shape that fail rest that shape; with another one that fails, all of the caller's."""
    for _ in range(3):
        health.failed(asker(shape="tools"))
    assert not health.allows(asker(shape="tools"))
    plain = asker(shape="")
    assert health.begin(plain)
    health.succeeded(plain)
    assert not health.allows(asker(shape="tools"))
    health.failed(asker(shape=""))
    assert health.allows(asker(shape=""))
    for _ in range(2):
        health.failed(asker(shape=""))
    assert not health.allows(asker(shape=""))


def test_operations_and_models_are_apart(health: Health) -> None:
    """A path that a server lacks, or a name, rests no other; what never worked makes nothing ill that does."""
    health.succeeded(asker())
    for one in "abcd":
        health.failed(asker(one, scope="rerank:"), denial="not found there")
        health.failed(asker(one, scope="chat:made-up"), denial="no such model there")
    assert not health.allows(asker("e", scope="rerank:"))
    assert health.allows(asker("e"))
    assert health.is_well


def test_well_is_what_happened_last(health: Health, clock: Clock) -> None:
    """A rest that is over heals nothing; a probe that succeeds does."""
    assert health.is_well is None
    health.succeeded(asker())
    assert health.is_well is True
    for _ in range(3):
        health.failed(asker())
    clock.now_s += 1000.0
    assert health.is_well is False
    assert health.trouble[0] == "it failed 3 times in a row, the next request tries it"
    probe = asker()
    assert health.begin(probe)
    health.succeeded(probe)
    assert (health.is_well, health.trouble) == (True, ("", ""))


def test_many_names_leave_a_bounded_memory(health: Health) -> None:
    """What works is forgotten before what fails."""
    for number in range(2000):
        health.failed(asker(scope=f"chat:{number}"))
    assert len(health.breakers) <= 256


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
        was_open_before = self.breaker.is_open
        asked = self.breaker.allows()
        begun = begin(self.breaker)
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
            self.breaker.record_success("probe")
            assert self.breaker.allows()
        elif outcome == "cancelled":
            self.breaker.record_cancelled("probe")
        else:
            self.breaker.record_failure("probe", "", 5.0 if outcome == "retry" else None)

    @rule(s=st.floats(0, 60))
    def wait(self, s: float) -> None:
        self.clock.now_s += s

    @rule()
    def in_the_end_it_is_tried_again(self) -> None:
        self.clock.now_s += LIMITS.open_s_max + LIMITS.probe_s + 5.0
        assert self.breaker.allows()

    @invariant()
    def open_has_a_reason(self) -> None:
        assert self.breaker.is_open == bool(self.breaker.reason)


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=60, stateful_step_count=30)
