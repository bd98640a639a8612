"""Routing: a pure function from a demand, candidates and a policy to a ranking with reasons.

Knows no HTTP, no prompts' text and no clocks; never awaits. Invariant: the same inputs in any order
give the same route, and every candidate appears in it exactly once, ranked or rejected with a
reason.

The cost model covers money and time, cold or warm. `w` are the prompt tokens that a deployment is
known to hold warm (0 if unknown), `p` the prompt tokens, `o` the expected output tokens:

    cost     = price of (p - w) tokens + w at the cached price + o output tokens for each choice;
               without a price of tokens that of the units; of a line of a batch, its share
    ttft     = predicted TTFT of the whole prompt - w * prefill time per token      (never below a twentieth of it)
    total    = ttft + o * tpot

Of equal replicas `total` also counts what a choice does to other requests: they wait while `p - w`
is read, but for the `s` tokens of it that later prompts find read, and answers under way slow each
other:

    total   += load + prefill time of (p - w) tokens - 2 * prefill time of s tokens

so that a prompt goes where its prefix is, unless the queue there costs more than to read it again,
and a prefix of many prompts spreads (as "exploitation and exploration" in Preble, arXiv 2407.00023).

`cheapest` orders by cost, then total; `fastest` by total, then cost; `balanced` by

    score = ln((cost + 100 µUSD) / 100 µUSD) + ln((total + 100 ms) / 100 ms)

the weighted product model of multi-criteria decisions (Bridgman 1922; Triantaphyllou,
"Multi-Criteria Decision Making Methods", 2000, section 2.2) with equal weights: twice the price
weighs as much as twice the wait, on any scale, so the formula needs no exchange rate between
dollars and seconds. The two constants keep zero cost and zero time finite; below them differences
do not matter: a hundredth of a cent, and the 100 ms under which an answer feels immediate (Miller
1968). A score depends only on its own candidate, so adding or removing a candidate never swaps two
others.

A deployment without estimates counts as fast as the median of those with estimates, and is never
rejected for time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from operator import attrgetter
from statistics import median

import msgspec

from policies.durations import duration_ms
from policies.prices import MicroUSD, Price
from policies.usage import Usage

_COST_FLOOR_MICROUSD = 100
_TIME_FLOOR_MS = 100.0
_WARM_TTFT_SHARE_MIN = 0.05
_TTFT_PRIOR_MS = 1000.0
_TPOT_PRIOR_MS = 25.0
_FOUND_TOKENS_MAX = 50_000  # in one round


class Residency(msgspec.Struct, frozen=True):
    """Where a team's requests may go, and for how many days the provider may keep them; None: anything.

    A region includes those that begin with it and a `-`: `eu` includes `eu-west-1`.
    """

    regions: tuple[str, ...] | None = None
    retention_days_max: int | None = None

    def objection(self, candidate: Candidate) -> str:
        """The rule that keeps a request from `candidate`; empty if none does. What runs here goes nowhere."""
        if candidate.is_local:
            return ""
        region, days = candidate.region, candidate.retention_days
        if self.regions is not None and not any(f"{region}-".startswith(f"{one}-") for one in self.regions):
            return f"is in the region `{region or 'unknown'}`, and the team's `regions` are {', '.join(self.regions) or 'none'}"
        if self.retention_days_max is not None and (days is None or days > self.retention_days_max):
            kept = "an unknown time" if days is None else f"{days} days"
            return f"keeps requests for {kept}, and the team's `retention_days_max` is {self.retention_days_max}"
        return ""


class Demand(msgspec.Struct, frozen=True):
    """The needs of one request, which routing compares with deployments.

    `output_tokens_max` bounds the answer. If the caller set it (`is_output_asked`), a deployment
    with a lower bound is rejected; otherwise the bound shrinks to the deployment's. It is no wish
    where the caller had to set one (`is_output_bound`). `warm` maps a
    deployment's name to the prompt tokens that it read last, and `shared` to those of the others that
    it would hold for later prompts; `excluded` are the names already
    tried. `choices` answers are generated in parallel: each costs its own output, and together they
    take the time of one answer. Output tokens are counted per choice. `prompt_tokens` is the
    expected length of the prompt, `prompt_tokens_min` its certain length (None: the same). Only a
    prompt that certainly does not fit is rejected, because the deployment counts exactly. No route
    depends on `prompt_tokens_max`: it bounds the cost from above, for the amount that a budget
    holds. `ttft_deadline_ms` is the time left until the first token; None without a deadline.
    `reserved` are the parts of the request that only a deployment that allows them may get.

    For the cost: `has_audio`, in or out; `has_long_writes` to a provider's prompt cache; the
    requested `tier`; `is_batch`, a line of a batch; `units`, for each of which the price of a
    request is charged, or the most images, characters or seconds if `measure` names them as for
    `Price.unit`; `calls`, the most provider-run tool calls; `compacts`: it reads the prompt once
    more before. `prefers` are capabilities that rank a deployment first without being needed.
    `operation` and `caller` select a deployment's health. `may_name_urls`: the request may name
    addresses that a server would fetch. `residency` is the rule of the team.
    """

    prompt_tokens: int
    output_tokens_max: int
    output_tokens_expected: int
    needs: frozenset[str] = frozenset()
    warm: Mapping[str, int] = {}
    shared: Mapping[str, int] = {}
    ttft_deadline_ms: float | None = None
    excluded: frozenset[str] = frozenset()
    is_output_asked: bool = True
    is_output_bound: bool = False
    choices: int = 1
    prompt_tokens_min: int | None = None
    prompt_tokens_max: int = 0
    reserved: frozenset[str] = frozenset()
    has_audio: bool = False
    has_long_writes: bool = False
    tier: str = ""
    is_batch: bool = False
    units: int = 1
    prefers: frozenset[str] = frozenset()
    measure: str = ""
    operation: str = "chat"
    caller: str = "-"
    calls: int = 0
    compacts: bool = False
    may_name_urls: bool = True
    residency: Residency | None = None

    @property
    def rounds(self) -> int:
        """The number of times that the provider may read the prompt again."""
        return self.calls + self.compacts

    @property
    def prompt_tokens_read(self) -> int:
        """The most prompt tokens of all rounds, each with the text that the provider's tools found."""
        return self.prompt_tokens_max + self.rounds * (self.prompt_tokens_max + _FOUND_TOKENS_MAX)


class Cause(StrEnum):
    """The causes of rejections, in the order of the checks."""

    RESIDENCY = "residency"
    CAPABILITY = "capability"
    CONTEXT = "context"
    OUTPUT = "output"
    DISABLED = "disabled"
    DENIED = "denied"
    HEALTH = "health"
    FULL = "full"
    DEADLINE = "deadline"
    LIMIT = "limit"
    TRIED = "tried"


class Candidate(msgspec.Struct, frozen=True):
    """One deployment and its present figures.

    `ttft_ms` is predicted for this prompt without warm tokens, the queue included; each warm token
    saves `prefill_ms_per_token` of it. Between equal candidates the larger `priority` ranks first.
    `allowed` are the reserved parts of a request that it may get. `resting` is set if it gets no
    request now: HEALTH, or DENIED if it refuses every request until an operator mends it. `use` is
    `drained` or `disabled` if an operator took it out of use. `full_at` is the number of requests
    that it may run, if that many run; else 0. A line of a batch costs `batch_factor` millionths of
    the price. Of a replica each token that it reads makes others wait for `others_ms_per_token`, and
    `load_ms` is what the answers under way there take from one more. `region` and `retention_days`
    are what the settings say; empty and None: unknown. `is_local`: it runs beside the gateway.
    """

    name: str
    price: Price
    capabilities: frozenset[str] = frozenset()
    context_tokens_max: int | None = None
    output_tokens_max: int | None = None
    ttft_ms: float | None = None
    tpot_ms: float | None = None
    resting: Cause | None = None
    health_reason: str = ""
    full_at: int = 0
    use: str = ""
    priority: int = 0
    prefill_ms_per_token: float = 0.0
    others_ms_per_token: float = 0.0
    load_ms: float = 0.0
    allowed: frozenset[str] = frozenset()
    batch_factor: int = 1_000_000
    region: str = ""
    retention_days: int | None = None
    is_local: bool = False


class PolicyKind(StrEnum):
    CHEAPEST = "cheapest"
    FASTEST = "fastest"
    BALANCED = "balanced"


_CHEAPEST, _FASTEST, _ = PolicyKind


class RoutingPolicy(msgspec.Struct, frozen=True):
    """The order, and the limits on the predicted TTFT and on the expected cost of one request."""

    kind: PolicyKind = PolicyKind.BALANCED
    ttft_ms_max: float | None = None
    cost_microusd_max: MicroUSD | None = None


class Ranked(msgspec.Struct, frozen=True):
    """A candidate that may serve, with its expected cost and times. A smaller `score` is better."""

    name: str
    cost_microusd: MicroUSD
    ttft_ms: float
    total_ms: float
    score: float
    why: str


class Rejected(msgspec.Struct, frozen=True):
    """A candidate that may not serve.

    `lacks` are the demand's needs and reserved parts that it does not offer or allow.
    """

    name: str
    cause: Cause
    reason: str
    lacks: tuple[str, ...] = ()


class Route(msgspec.Struct, frozen=True):
    """The ranking, best first, and the rejected candidates by name."""

    ranked: tuple[Ranked, ...]
    rejected: tuple[Rejected, ...]

    @property
    def cause(self) -> Cause | None:
        """The cause of the candidate that passed the most checks; None if a candidate is ranked or
        none exists.
        """
        if self.ranked or not self.rejected:
            return None
        return max((r.cause for r in self.rejected), key=_CAUSES.index)

    @property
    def refusal(self) -> str:
        """The reasons for an empty ranking in one sentence; empty if a candidate can serve."""
        if self.ranked:
            return ""
        if not self.rejected:
            return "no deployment serves this model"
        return "no deployment can serve this request: " + "; ".join(f"{r.name} {r.reason}" for r in self.rejected)


_CAUSES = tuple(Cause)


def route(demand: Demand, candidates: Sequence[Candidate], policy: RoutingPolicy) -> Route:
    """Rank `candidates` for `demand` under `policy`.

    Raises ValueError for two candidates with the same name.
    """
    if len(candidates) > 1 and len({c.name for c in candidates}) != len(candidates):
        raise ValueError("candidates must have different names")
    ttft_prior_ms, tpot_prior_ms = _TTFT_PRIOR_MS, _TPOT_PRIOR_MS
    if len(candidates) > 1:  # one alone has no other's figures
        ttft_prior_ms = _median([c.ttft_ms for c in candidates], ttft_prior_ms)
        tpot_prior_ms = _median([c.tpot_ms for c in candidates], tpot_prior_ms)
    able_pairs: list[tuple[Candidate, Ranked]] = []
    rejected: list[Rejected] = []
    for candidate in candidates:
        rejection = _unable(demand, candidate)
        if rejection is None:
            ranked = _forecast(demand, candidate, policy.kind, ttft_prior_ms, tpot_prior_ms)
            rejection = _beyond(demand, policy, candidate, ranked)
        if rejection is None:
            able_pairs.append((candidate, ranked))
        else:
            rejected.append(rejection)
    if len(candidates) > 1:
        able_pairs.sort(key=partial(_order, demand))
        rejected.sort(key=attrgetter("name"))
    return Route(tuple([ranked for _, ranked in able_pairs]), tuple(rejected))


def _order(demand: Demand, able_pair: tuple[Candidate, Ranked]) -> tuple[int, float, float, MicroUSD, int, str]:
    candidate, ranked = able_pair
    lacks = len(demand.prefers - candidate.capabilities)
    return lacks, ranked.score, ranked.total_ms, ranked.cost_microusd, -candidate.priority, candidate.name


def _median(values: Iterable[float | None], prior: float) -> float:
    known_values = [v for v in values if v is not None]
    if len(known_values) < 2:
        return known_values[0] if known_values else prior
    return median(known_values)


def _forecast(
    demand: Demand, candidate: Candidate, kind: PolicyKind, ttft_prior_ms: float, tpot_prior_ms: float
) -> Ranked:
    """The figures of a candidate by the cost model, also in words."""
    warm = max(0, min(demand.warm.get(candidate.name, 0), demand.prompt_tokens)) if demand.warm else 0
    room = demand.output_tokens_max
    if not demand.is_output_asked:
        if candidate.output_tokens_max is not None:
            room = min(room, candidate.output_tokens_max)
        if candidate.context_tokens_max is not None:
            room = max(0, min(room, candidate.context_tokens_max - demand.prompt_tokens))
    expected = demand.output_tokens_expected if demand.output_tokens_expected < room else room
    cold_ttft_ms = ttft_prior_ms if candidate.ttft_ms is None else candidate.ttft_ms
    ttft_ms = cold_ttft_ms
    if warm:
        ttft_ms = max(ttft_ms - warm * candidate.prefill_ms_per_token, ttft_ms * _WARM_TTFT_SHARE_MIN)
    tpot_ms = tpot_prior_ms if candidate.tpot_ms is None else candidate.tpot_ms
    price = candidate.price
    cost = price.cost(Usage(demand.prompt_tokens, expected * demand.choices, warm))
    if demand.measure and cost <= price.request_microusd:  # tokens without a price leave that of the units
        cost -= -demand.units * (price.unit(demand.measure) or 0) // 1_000_000
    if demand.is_batch:
        cost = -(-cost * candidate.batch_factor // 1_000_000)
    total_ms = ttft_ms + tpot_ms * expected
    if candidate.others_ms_per_token:
        lasting = 2 * demand.shared.get(candidate.name, 0)
        total_ms += candidate.load_ms + candidate.others_ms_per_token * (demand.prompt_tokens - warm - lasting)
    why = f"{cost} µUSD, TTFT {ttft_ms:.0f} ms, {total_ms:.0f} ms in all"
    if warm:
        why += f", {warm} of {demand.prompt_tokens} prompt tokens warm"
    if candidate.ttft_ms is None or candidate.tpot_ms is None:
        why += ", not measured yet"
    rank = score(kind, cost, total_ms)
    return Ranked(name=candidate.name, cost_microusd=cost, ttft_ms=ttft_ms, total_ms=total_ms, score=rank, why=why)


def _unable(demand: Demand, candidate: Candidate) -> Rejected | None:
    """The rejection of a candidate that cannot serve under any policy, or None."""
    name = candidate.name
    if name in demand.excluded:
        return Rejected(name, Cause.TRIED, "was already tried")
    if demand.residency is not None and (objection := demand.residency.objection(candidate)):
        return Rejected(name, Cause.RESIDENCY, objection)
    if not demand.needs <= candidate.capabilities:
        missing = sorted(demand.needs - candidate.capabilities)
        return Rejected(name, Cause.CAPABILITY, f"does not offer {', '.join(missing)}", tuple(missing))
    if not demand.reserved <= candidate.allowed:
        missing = sorted(demand.reserved - candidate.allowed)
        return Rejected(name, Cause.CAPABILITY, f"does not allow {', '.join(missing)}", tuple(missing))
    output = demand.output_tokens_max if demand.is_output_asked else min(1, demand.output_tokens_max)
    context = candidate.context_tokens_max
    prompt = demand.prompt_tokens if demand.prompt_tokens_min is None else demand.prompt_tokens_min
    if context is not None and prompt + output > context:
        wanted = f"at least {prompt} prompt tokens and {output} of output"
        return Rejected(name, Cause.CONTEXT, f"has a context of {context} tokens, {wanted} are needed")
    limit = candidate.output_tokens_max
    if limit is not None and output > limit:
        return Rejected(name, Cause.OUTPUT, f"answers with at most {limit} tokens, {output} were asked for")
    if candidate.use:
        return Rejected(name, Cause.DISABLED, f"is {candidate.use} by an operator")
    if candidate.resting is not None:
        return Rejected(name, candidate.resting, f"is resting: {candidate.health_reason or 'it failed repeatedly'}")
    if candidate.full_at:
        return Rejected(name, Cause.FULL, f"is full: its `concurrency_max` of {candidate.full_at} requests run there")
    return None


def _beyond(demand: Demand, policy: RoutingPolicy, candidate: Candidate, ranked: Ranked) -> Rejected | None:
    """The rejection of a candidate beyond the caller's deadline or the policy's limits, or None."""
    name = candidate.name
    if (
        demand.ttft_deadline_ms is not None
        and candidate.ttft_ms is not None
        and ranked.ttft_ms > demand.ttft_deadline_ms
    ):
        detail = f"{duration_ms(ranked.ttft_ms)} to the first token, {duration_ms(demand.ttft_deadline_ms)} are left"
        return Rejected(name, Cause.DEADLINE, f"would take about {detail}")
    if policy.ttft_ms_max is not None and candidate.ttft_ms is not None and ranked.ttft_ms > policy.ttft_ms_max:
        detail = (
            f"TTFT of {duration_ms(ranked.ttft_ms)} is over the policy's limit of {duration_ms(policy.ttft_ms_max)}"
        )
        return Rejected(name, Cause.LIMIT, f"is too slow: a predicted {detail}")
    if policy.cost_microusd_max is not None and ranked.cost_microusd > policy.cost_microusd_max:
        detail = f"{ranked.cost_microusd} µUSD are over the policy's limit of {policy.cost_microusd_max} µUSD"
        return Rejected(name, Cause.LIMIT, f"is too dear: an expected {detail}")
    return None


def score(kind: PolicyKind, cost_microusd: MicroUSD, total_ms: float) -> float:
    """The score by which a policy of this kind ranks a cost and a time; the least is best."""
    if kind is _CHEAPEST:
        return float(cost_microusd)
    if kind is _FASTEST:
        return total_ms
    return math.log1p(cost_microusd / _COST_FLOOR_MICROUSD) + math.log1p(total_ms / _TIME_FLOOR_MS)
