"""Routing: deterministic, explained, and blind to the order of its candidates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from policies import Candidate, Cause, Demand, Price, RoutingPolicy, route
from policies.routing import PolicyKind

_CAPABILITIES = ["tools", "json_schema", "vision"]
_NAMES = ["a", "b", "c", "d", "e"]
_sets = st.frozensets(st.sampled_from(_CAPABILITIES))
_ms = st.none() | st.floats(0, 1e5)

candidates = st.builds(
    Candidate,
    name=st.sampled_from(_NAMES),
    price=st.builds(Price, st.integers(0, 10**7), st.integers(0, 10**8), st.none() | st.integers(0, 10**7)),
    capabilities=_sets,
    context_tokens_max=st.none() | st.integers(1, 20_000),
    output_tokens_max=st.none() | st.integers(1, 10_000),
    ttft_ms=_ms,
    tpot_ms=_ms,
    resting=st.sampled_from([None, Cause.HEALTH, Cause.DENIED]),
    priority=st.integers(-1, 1),
    prefill_ms_per_token=st.floats(0, 10),
)
fleets = st.lists(candidates, max_size=5, unique_by=lambda c: c.name)
demands = st.builds(
    Demand,
    prompt_tokens=st.integers(0, 10_000),
    output_tokens_max=st.integers(0, 5000),
    output_tokens_expected=st.integers(0, 5000),
    needs=_sets,
    warm=st.dictionaries(st.sampled_from(_NAMES), st.integers(0, 20_000)),
    ttft_deadline_ms=_ms,
    excluded=st.frozensets(st.sampled_from(_NAMES), max_size=1),
    is_output_asked=st.booleans(),
    choices=st.integers(1, 4),
)
policies = st.builds(
    RoutingPolicy, st.sampled_from(PolicyKind), st.none() | st.floats(1, 1e5), st.none() | st.integers(0, 10**6)
)

SMALL = Demand(prompt_tokens=1000, output_tokens_max=500, output_tokens_expected=200)
LOCAL = Candidate("local", Price(0, 0), ttft_ms=500, tpot_ms=20)
CHEAP = Candidate("cheap", Price(150_000, 600_000), ttft_ms=700, tpot_ms=10)
FAST = Candidate("fast", Price(2_500_000, 10_000_000), ttft_ms=200, tpot_ms=4)


def names(demand: Demand, fleet: list[Candidate], policy: RoutingPolicy) -> list[str]:
    return [r.name for r in route(demand, fleet, policy).ranked]


@given(demands, fleets, policies, st.randoms())
def test_the_order_of_candidates_does_not_matter(demand: Demand, fleet, policy: RoutingPolicy, random) -> None:
    """The same inputs in any order give the same route."""
    shuffled = list(fleet)
    random.shuffle(shuffled)
    assert route(demand, fleet, policy) == route(demand, shuffled, policy)


@given(demands, fleets, policies)
def test_everyone_appears_once_and_rejections_speak(demand: Demand, fleet, policy: RoutingPolicy) -> None:
    """Each candidate is ranked or rejected, never both, and a rejection has words."""
    found = route(demand, fleet, policy)
    assert sorted([r.name for r in found.ranked] + [r.name for r in found.rejected]) == sorted(c.name for c in fleet)
    assert all(r.reason for r in found.rejected)
    assert (found.cause is None) == bool(found.ranked or not fleet)
    assert bool(found.refusal) != bool(found.ranked)
    assert [r.score for r in found.ranked] == sorted(r.score for r in found.ranked)


@given(demands, fleets, policies)
def test_nobody_is_ranked_who_cannot_or_may_not(demand: Demand, fleet, policy: RoutingPolicy) -> None:
    """Capabilities, size, health, tries, deadline and limits all hold for every ranked candidate."""
    by_name = {c.name: c for c in fleet}
    for ranked in route(demand, fleet, policy).ranked:
        candidate = by_name[ranked.name]
        assert demand.needs <= candidate.capabilities
        assert candidate.resting is None
        assert candidate.name not in demand.excluded
        output = demand.output_tokens_max if demand.is_output_asked else min(1, demand.output_tokens_max)
        if candidate.context_tokens_max is not None:
            assert demand.prompt_tokens + output <= candidate.context_tokens_max
        if candidate.output_tokens_max is not None:
            assert output <= candidate.output_tokens_max
        if policy.cost_microusd_max is not None:
            assert ranked.cost_microusd <= policy.cost_microusd_max
        if candidate.ttft_ms is not None and candidate.tpot_ms is not None:
            assert policy.ttft_ms_max is None or ranked.ttft_ms <= policy.ttft_ms_max
            assert demand.ttft_deadline_ms is None or ranked.ttft_ms <= demand.ttft_deadline_ms


@given(demands, fleets, policies)
def test_losing_a_loser_changes_nothing_for_the_measured(demand: Demand, fleet, policy: RoutingPolicy) -> None:
    """Where all are measured, leaving one candidate out never swaps two others."""
    fleet = [c for c in fleet if c.ttft_ms is not None and c.tpot_ms is not None]
    whole = names(demand, fleet, policy)
    for left_out in fleet:
        rest = [c for c in fleet if c is not left_out]
        assert names(demand, rest, policy) == [n for n in whole if n != left_out.name]


@given(demands, fleets, policies)
def test_a_warm_prefix_never_makes_a_deployment_slower(demand: Demand, fleet, policy: RoutingPolicy) -> None:
    """Warm tokens lower the expected TTFT of their deployment, or leave it."""
    cold = {r.name: r for r in route(replace(demand, warm={}), fleet, policy).ranked}
    for ranked in route(demand, fleet, policy).ranked:
        if ranked.name in cold:
            assert ranked.ttft_ms <= cold[ranked.name].ttft_ms


def test_cheapest_goes_by_cost_then_time() -> None:
    """Free before cheap before dear; of two free ones the faster."""
    slower = replace(LOCAL, name="slower", ttft_ms=900)
    policy = RoutingPolicy(PolicyKind.CHEAPEST)
    assert names(SMALL, [FAST, slower, CHEAP, LOCAL], policy) == ["local", "slower", "cheap", "fast"]


def test_fastest_goes_by_the_whole_answer() -> None:
    """A quick first token with slow others loses where the answer is long."""
    starter = Candidate("starter", Price(0, 0), ttft_ms=10, tpot_ms=50)
    assert names(SMALL, [starter, CHEAP, FAST], RoutingPolicy(PolicyKind.FASTEST)) == ["fast", "cheap", "starter"]


def test_balanced_gives_up_money_for_much_time_and_time_for_much_money() -> None:
    """Free and a little slower beats paid; free and very slow does not; a hundred times the price for a bit of speed does not."""
    policy = RoutingPolicy(PolicyKind.BALANCED)
    assert names(SMALL, [CHEAP, LOCAL], policy)[0] == "local"
    crawling = replace(LOCAL, tpot_ms=300)
    assert names(SMALL, [CHEAP, crawling], policy)[0] == "cheap"
    luxury = Candidate("luxury", Price(15_000_000, 75_000_000), ttft_ms=500, tpot_ms=9)
    assert names(SMALL, [CHEAP, luxury], policy)[0] == "cheap"


def test_balanced_does_not_care_for_what_nobody_notices() -> None:
    """A thousandth of a cent is no reason to wait three times as long, nor ten milliseconds a reason to pay twice."""
    penny = Candidate("penny", Price(5_000, 5_000), ttft_ms=300, tpot_ms=1)
    free = Candidate("free", Price(0, 0), ttft_ms=900, tpot_ms=3)
    assert names(SMALL, [free, penny], RoutingPolicy(PolicyKind.BALANCED))[0] == "penny"


def test_a_warm_prefix_tips_the_scales_in_time_and_in_money() -> None:
    """Of two alike the warm one wins by TTFT (prefill saved) and by cost (the cached price)."""
    cold = Candidate("cold", Price(1_000_000, 0, 100_000), ttft_ms=1000, tpot_ms=1, prefill_ms_per_token=0.8)
    warm = replace(cold, name="warm")
    demand = replace(SMALL, warm={"warm": 900})
    for kind in PolicyKind:
        ranked = route(demand, [cold, warm], RoutingPolicy(kind)).ranked
        assert ranked[0].name == "warm"
        assert ranked[0].ttft_ms == pytest.approx(280)
        assert ranked[0].cost_microusd == 100 + 90
        assert "900 of 1000 prompt tokens warm" in ranked[0].why


def test_ties_go_to_priority_then_name() -> None:
    """Equal in everything: the larger priority first, then the alphabet."""
    twins = [replace(LOCAL, name=n, priority=p) for n, p in (("b", 0), ("a", 0), ("z", 1))]
    assert names(SMALL, twins, RoutingPolicy(PolicyKind.CHEAPEST)) == ["z", "a", "b"]


def test_the_unmeasured_is_tried_and_not_condemned() -> None:
    """Without estimates a deployment counts as the median, and no limit on time rejects it."""
    unknown = Candidate("unknown", Price(0, 0))
    found = route(SMALL, [FAST, unknown], RoutingPolicy(PolicyKind.CHEAPEST, ttft_ms_max=50))
    assert [r.name for r in found.ranked] == ["unknown"]
    assert "not measured yet" in found.ranked[0].why


@pytest.mark.parametrize(
    ("candidate", "demand", "policy", "cause", "words"),
    [
        (LOCAL, replace(SMALL, excluded=frozenset({"local"})), RoutingPolicy(), Cause.TRIED, "already"),
        (LOCAL, replace(SMALL, needs=frozenset({"vision"})), RoutingPolicy(), Cause.CAPABILITY, "vision"),
        (replace(LOCAL, context_tokens_max=1400), SMALL, RoutingPolicy(), Cause.CONTEXT, "1400"),
        (replace(LOCAL, output_tokens_max=499), SMALL, RoutingPolicy(), Cause.OUTPUT, "499"),
        (
            replace(LOCAL, resting=Cause.HEALTH, health_reason="it failed 5 times in a row"),
            SMALL,
            RoutingPolicy(),
            Cause.HEALTH,
            "5 times",
        ),
        (LOCAL, replace(SMALL, ttft_deadline_ms=400), RoutingPolicy(), Cause.DEADLINE, "first token"),
        (LOCAL, SMALL, RoutingPolicy(ttft_ms_max=400), Cause.LIMIT, "limit of 400 ms"),
        (CHEAP, SMALL, RoutingPolicy(cost_microusd_max=100), Cause.LIMIT, "limit of 100 µUSD"),
    ],
)
def test_each_rejection_has_its_cause_and_words(candidate, demand, policy, cause, words) -> None:
    """Every reason to be rejected is told apart, and is the route's own where nobody is left."""
    found = route(demand, [candidate], policy)
    assert found.rejected[0].cause is cause
    assert words in found.rejected[0].reason
    assert found.cause is cause
    assert words in found.refusal


def test_an_output_bound_nobody_asked_for_shrinks_instead() -> None:
    """A default bound fits itself to the deployment: the expected cost and time are those of the shorter answer."""
    small = replace(CHEAP, context_tokens_max=1200, output_tokens_max=150)
    demand = replace(SMALL, is_output_asked=False)
    ranked = route(demand, [small], RoutingPolicy()).ranked[0]
    assert ranked.cost_microusd == 150 + 90
    assert ranked.total_ms == 700 + 150 * 10


def test_choices_cost_each_and_take_the_time_of_one() -> None:
    """Four answers side by side: one prompt, four outputs, one wait."""
    [one] = route(SMALL, [CHEAP], RoutingPolicy()).ranked
    [four] = route(replace(SMALL, choices=4), [CHEAP], RoutingPolicy()).ranked
    assert (one.cost_microusd, four.cost_microusd) == (150 + 120, 150 + 480)
    assert four.total_ms == one.total_ms


def test_a_line_of_a_batch_and_a_picture_have_prices_of_their_own() -> None:
    """The cheapest is that of the price that the request will have: a batch's share, the units that it asks for."""
    cheapest = RoutingPolicy(PolicyKind.CHEAPEST)
    dear = replace(CHEAP, name="dear", price=Price(200_000, 700_000), batch_factor=500_000)
    assert names(SMALL, [CHEAP, dear], cheapest) == ["cheap", "dear"]
    assert names(replace(SMALL, is_batch=True), [CHEAP, dear], cheapest) == ["dear", "cheap"]
    picture = replace(SMALL, output_tokens_expected=0, measure="images/hd/", units=3)
    units = (("images", 10_000 * 10**6), ("images/hd", 80_000 * 10**6))
    one = replace(CHEAP, name="one", price=Price(0, 0, units=units))
    other = replace(CHEAP, name="other", price=Price(0, 0, units=(("images", 50_000 * 10**6),)))
    ranked = route(picture, [one, other], cheapest).ranked
    assert [(each.name, each.cost_microusd) for each in ranked] == [("other", 150_000), ("one", 240_000)]


def test_the_furthest_candidate_explains_an_empty_ranking() -> None:
    """One is too small, one over the limit: the limit is what stands between the caller and an answer."""
    small = replace(LOCAL, name="small", context_tokens_max=10)
    found = route(SMALL, [small, CHEAP], RoutingPolicy(cost_microusd_max=1))
    assert found.cause is Cause.LIMIT
    assert "cheap is too dear" in found.refusal
    assert "small has a context" in found.refusal


def test_two_of_one_name_are_a_mistake() -> None:
    """Names tell deployments apart everywhere."""
    with pytest.raises(ValueError, match="names"):
        route(SMALL, [LOCAL, LOCAL], RoutingPolicy())
