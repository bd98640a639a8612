"""A name that requests give as `model`, with its deployments: which of them may answer, in what
order.

Collects the values from which `policies.routing`, a pure function, decides. Knows no teams, budgets
or caches. Invariant: a request that no deployment of an alias may get is refused before the cache
answers it.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import policies
from gateway.deployments.deployment import Deployment
from gateway.reserved import FIELDS, TOOLS, Reserved, canonical, foreign_url, reserved, reserved_in_name
from gateway.settings import ModelSettings, is_pattern
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    DeploymentFull,
    Forbidden,
    NotFound,
    Unavailable,
    UpstreamDenied,
    sentence,
    shown,
)
from gateway.wire.plain import OUTPUT_TOKENS_MAX
from gateway.wire.requests import OUTPUT_TOKENS_EXPECTED
from gateway.wire.rules import check_rules
from gateway.wire.types import KINDS, Kind
from policies import Candidate, Cause, Demand, Route, RoutingPolicy
from policies.estimate import Lengths
from policies.replicas import Prefixes

_PASSED_NAME_MAX = 200
ABSENCES = ("denied", "failed", "not_ready", "disabled")
_PASSED_NAME = re.compile(rf"[!-)+-~]{{1,{_PASSED_NAME_MAX}}}")  # ASCII without spaces and `*`


@dataclass(slots=True)
class Alias:
    """A name that requests give as `model`, with its deployments.

    `is_pattern`: the alias takes every name with its prefix. `has_engine`: a local engine, which
    can use a draft, may answer. `has_choice`: a warm prefix can decide between deployments;
    `is_hinted`: Redis is asked which one has it, as no replicas' `prefixes` say so.
    `unpriced`: the model of a deployment that passes every name on and lacks a price for this name;
    else empty.
    """

    name: str
    settings: ModelSettings
    policy: RoutingPolicy
    deployments: Mapping[str, Deployment]
    lengths: Lengths = field(default_factory=Lengths)  # of the latest answers, in tokens
    is_pattern: bool = field(init=False)
    has_engine: bool = field(init=False)
    prefixes: Prefixes | None = None  # of its replicas
    hedges: "HedgeShare" = field(default_factory=lambda: HedgeShare())
    has_choice: bool = field(init=False)
    is_hinted: bool = field(init=False)
    unpriced: str = field(init=False)
    baseline: Deployment = field(init=False)  # savings are measured against its list price

    def __post_init__(self) -> None:
        self.is_pattern = is_pattern(self.name)
        self.has_engine = any(d.settings.engine is not None for d in self.deployments.values())
        self.has_choice = len(self.deployments) > 1 or self.prefixes is not None
        self.is_hinted = self.has_choice and self.prefixes is None
        named = next((d for d in self.deployments.values() if d.group == self.settings.baseline), None)
        self.baseline = named or max(
            self.deployments.values(), key=lambda d: d.settings.priority
        )  # of equals the first
        models = (d.model for d in self.deployments.values() if d.is_any_model and not d.is_price_known)
        self.unpriced = next(models, "")

    def for_name(self, name: str) -> "Alias":
        """This pattern alias for the model that one request names.

        It keeps the deployments that allow the reserved fields in the name. Raises NotFound, and
        BadRequest if no deployment is left.
        """
        model = name.removeprefix(self.name[:-1])
        if not _PASSED_NAME.fullmatch(model) or "://" in model or ".." in model or model.strip("/") != model:
            raise NotFound(
                f"The model `{shown(name)}` does not exist: expected up to {_PASSED_NAME_MAX} characters without spaces",
                param="model",
                code="model_not_found",
            )
        hidden = reserved_in_name(model)
        takers = [d for d in self.deployments.values() if d.allowed.issuperset(one.name for one in hidden)]
        if not takers:
            raise self._refusal(hidden)
        return dataclasses.replace(self, deployments={d.name: d.for_model(model) for d in takers})

    def allow(self, models: Collection[str] | None, name: str) -> None:
        """Refuse a key unless `name`, or this alias that takes it, is among its `models`; None: all
        are.

        Raises Forbidden.
        """
        if models is not None and name not in models and self.name not in models:
            raise Forbidden(f"This API key may not use the model `{name}`", param="model")

    def check(self, body: dict[str, Any], demand: Demand, kind: Kind) -> None:
        """Refuse a request that no deployment of this alias may get, before the cache answers it.

        An alias with a local engine takes only requests that OpenAI would take, so that routing
        does not decide whether a request is valid. Raises BadRequest.
        """
        if demand.reserved and not any(demand.reserved <= d.allowed for d in self.deployments.values()):
            raise self._refusal([one for one in reserved(body) if one.name in demand.reserved])
        for hosts in {d.image_hosts for d in self.deployments.values()} - {None} if demand.may_name_urls else ():
            if place := foreign_url(body, hosts or ()):
                raise _not_fetched(place, self.name, hosts or ())
        if self.has_engine:
            check_rules(body, kind)

    def _refusal(self, hidden: list[Reserved]) -> BadRequest:
        """The error for reserved parts that no single deployment allows together."""
        names = {part.name for part in hidden}
        # where each part is allowed somewhere, but not together, all of them are in the way
        in_the_way = names.difference(*(d.allowed for d in self.deployments.values())) or names
        first = next(part for part in hidden if part.name in in_the_way)
        is_unpriced = any(first.name in map(canonical, d.settings.allow_fields) for d in self.deployments.values())
        return _not_allowed(first, self.name, is_unpriced=is_unpriced)

    def unpriced_for(self, demand: Demand) -> str:
        """The first model without a price for a request's units, such as images; empty if all have
        prices.
        """
        if self.unpriced or not demand.measure:
            return self.unpriced
        return next((d.model or d.name for d in self.deployments.values() if d.lacks_price(demand)), "")

    def worst_case_microusd(self, demand: Demand, output_tokens: int | None = None) -> int:
        """The cost in µUSD that budgets hold: the longest answer, or `output_tokens`, at the
        highest price.
        """
        return max([self.worst_case_at(d, demand, output_tokens) for d in self.deployments.values()])

    def worst_case_at(self, deployment: Deployment, demand: Demand, output_tokens: int | None = None) -> int:
        """The cost in µUSD of the longest answer, or of `output_tokens`, at the price of
        `deployment`.
        """
        # decision: worst-case-by-bytes
        output = self.output_max(deployment, demand)
        return deployment.cost_max(demand, min(output, output_tokens or output) * demand.choices)

    def worst_case_tokens(self, demand: Demand, output_tokens: int | None = None) -> int:
        """The most tokens of a request with the longest answer, or with `output_tokens`."""
        output = max([self.output_max(d, demand) for d in self.deployments.values()])
        return demand.prompt_tokens_read + min(output, output_tokens or output) * demand.choices

    def usual_output(self, demand: Demand) -> int | None:
        """The length in tokens that nearly all answers stay within; None until it is learned."""
        usual_tokens = self.lengths.usual()
        if usual_tokens is None or not demand.output_tokens_max or demand.measure:
            return None
        return max(1, min(usual_tokens, max([self.output_max(d, demand) for d in self.deployments.values()])))

    def within_reach(self, demand: Demand) -> Demand:
        """`demand` with the longest answer that a deployment gives, where a bound is above all of them."""
        rooms = [_room(candidate, demand) for candidate in self._candidates(demand)] if demand.is_output_bound else []
        longest = max(rooms, default=0)
        if not 0 < longest < demand.output_tokens_max:
            return demand
        expected = min(longest, demand.output_tokens_expected)
        return msgspec.structs.replace(demand, output_tokens_max=longest, output_tokens_expected=expected)

    def length_held(self, deployment: Deployment, demand: Demand) -> int | None:
        """The length that a budget holds, where the request sets none: none can hold an unlimited
        answer.
        """
        is_bounded = deployment.output_tokens_default is not None and self.settings.output_tokens_default is None
        return None if demand.is_output_asked or is_bounded else self.output_max(deployment, demand)

    @property
    def absence(self) -> str:
        """The worst cause that keeps every deployment from answering; empty if a deployment may
        answer.
        """
        found = [d.absence for d in self.deployments.values()]
        return next(cause for cause in ABSENCES if cause in found) if all(found) else ""

    @property
    def is_starting(self) -> bool:
        """Whether no deployment is ready and at least one is starting."""
        loads = [d.backend.load(0) for d in self.deployments.values()]
        return any(load.is_starting for load in loads) and not any(load.is_ready for load in loads)

    def output_max(self, deployment: Deployment, demand: Demand) -> int:
        """The tokens of the longest answer that the request allows, or that the deployment
        generates.
        """
        if demand.is_output_asked:
            return demand.output_tokens_max
        asked = self.settings.output_tokens_default or deployment.output_tokens_default
        limit = deployment.backend.load(0).output_tokens_max or deployment.output_tokens_max
        return asked if asked is not None else (limit or OUTPUT_TOKENS_MAX)

    def route(self, demand: Demand, warm: Mapping[str, int], deadline_ms: float | None, tried: frozenset[str]) -> Route:
        """Rank this alias's deployments for a request in their current state.

        If no deployment can answer, deployments that asked for a long rest are tried sooner.
        """
        now = self._now(demand, warm, deadline_ms, tried)
        found = policies.route(now, self._candidates(demand), self.policy)
        if found.ranked or _RESTING.isdisjoint(rejected.cause for rejected in found.rejected):
            return found
        return policies.route(now, self._candidates(demand, is_alone=True), self.policy)

    def first_choice_model(self, demand: Demand, warm: Mapping[str, int], route: Route) -> str:
        """The model that routing would choose first if every deployment were healthy and had room.

        An answer of another model is a fallback, and is not cached.
        """
        ranked = route.ranked
        if route.rejected and any(rejected.cause in _PASSING for rejected in route.rejected):
            well = [_well(candidate) for candidate in self._candidates(demand)]
            ranked = policies.route(self._now(demand, warm, None, frozenset()), well, self.policy).ranked
        return self.deployments[ranked[0].name].model if ranked else ""

    def _candidates(self, demand: Demand, *, is_alone: bool = False) -> Sequence[Candidate]:
        return [d.candidate(demand, is_alone=is_alone) for d in self.deployments.values()]

    def _now(self, demand: Demand, warm: Mapping[str, int], deadline_ms: float | None, tried: frozenset[str]) -> Demand:
        """`demand` with the alias's default length, and with the state of this attempt."""
        default = None if demand.is_output_asked else self.settings.output_tokens_default
        if not (default or warm or tried or deadline_ms is not None):
            return demand
        output_max = default or demand.output_tokens_max
        return msgspec.structs.replace(
            demand,
            output_tokens_max=output_max,
            output_tokens_expected=min(output_max, OUTPUT_TOKENS_EXPECTED),
            warm=warm,
            ttft_deadline_ms=deadline_ms,
            excluded=tried,
        )


class HedgeShare:
    """Counts the spend of an alias at this worker, and the hedges' part of it, in µUSD."""

    __slots__ = ("_hedged", "_pending", "_spent")

    def __init__(self) -> None:
        self._spent = self._hedged = self._pending = 0

    def take(self, expected: int, share: float) -> bool:
        """Whether hedges stay within `share` of the spend after another hedge that may cost
        `expected`.

        If so, the caller calls `give_back` when the hedge ends.
        """
        if self._hedged + self._pending + expected > share * self._spent:
            return False
        self._pending += expected
        return True

    def give_back(self, expected: int) -> None:
        """Release the `expected` cost of a hedge that has ended."""
        self._pending -= expected

    def spent(self, cost: int, hedged: int) -> None:
        """Count a request's `cost`, with `hedged`, its part for the deployment that did not answer."""
        self._spent += cost
        self._hedged += hedged


def _room(candidate: Candidate, demand: Demand) -> int:
    """The tokens that an answer of `candidate` may have, beside a prompt that may be twice as long as it seems."""
    prompt_tokens = min(demand.prompt_tokens_max, 2 * demand.prompt_tokens)
    context = candidate.context_tokens_max
    sizes = candidate.output_tokens_max, None if context is None else context - prompt_tokens
    return max(0, min([size for size in sizes if size is not None], default=demand.output_tokens_max))


def _well(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, resting=None, full_at=0, use="")


def _not_allowed(part: Reserved, alias: str, *, is_unpriced: bool) -> BadRequest:
    way = "leave it out" if part.name in FIELDS else "send tools of the type `function`"
    effect = FIELDS.get(part.name) or TOOLS[part.name]
    refusal = f"{part.subject} is not for clients of the model `{alias}` to send ({effect}): {way}, or ask the operator"
    message = f"{refusal} to list `{part.name}` in the deployment's `allow_fields`"
    if is_unpriced:
        message = f"{refusal} for its price: `price` of the deployment has none for `{part.name}`"
    return BadRequest(message, param=part.param, code="field_not_allowed")


def _not_fetched(param: str, alias: str, hosts: Collection[str]) -> BadRequest:
    reason = (
        f"`{param}`: a server of the model `{alias}` would fetch it, and may do so from {', '.join(hosts) or 'no host'}"
    )
    way = "send a data: URL, or ask the operator to list the host in the deployment's `image_hosts`"
    return BadRequest(f"{reason}: {way}", param=param, code="url_not_allowed")


OUTPUT_TOO_LONG = "integer_above_max_value"
_PASSING = frozenset({Cause.DISABLED, Cause.HEALTH, Cause.DENIED, Cause.FULL})  # of the moment, not of the request


_RESTING = frozenset({Cause.HEALTH, Cause.FULL})


def no_route(route: Route, prompt: str, length: str) -> ApiError:
    """The error for a request that no deployment may try. `prompt` and `length` are the client's fields with them."""
    match route.cause:
        case Cause.CONTEXT:
            way = f"shorten `{prompt}`, or take a model with a longer context (GET /v1/models)"
            return BadRequest(f"{sentence(route.refusal)}: {way}", param=prompt, code="context_length_exceeded")
        case Cause.OUTPUT:  # no shorter prompt mends it, as agents would try, so it has OpenAI's other code
            return BadRequest(sentence(route.refusal), param=length, code=OUTPUT_TOO_LONG)
        case Cause.CAPABILITY:
            lacking = min(what for rejected in route.rejected for what in rejected.lacks)
            message = f"{sentence(route.refusal)}: GET /v1/models says which models do"
            return BadRequest(message, param=_ASKED_IN.get(lacking, prompt), code="unsupported_feature")
        case Cause.DEADLINE:
            return DeadlineExceeded(sentence(route.refusal))
        case Cause.LIMIT:
            return Unavailable(sentence(route.refusal), code="no_deployment_within_limits")
        case Cause.RESIDENCY:
            return Forbidden(sentence(route.refusal), code="residency_not_allowed")
        case Cause.FULL:
            return DeploymentFull(f"{sentence(route.refusal)}: try again later")
        case Cause.DENIED:
            return UpstreamDenied(sentence(route.refusal))
        case _:
            return Unavailable(sentence(route.refusal), code="no_deployment_available")


# The fields that need a capability. Images, sounds and files are in the prompt itself.
_ASKED_IN = {name: name for name in ("tools", "logprobs", "n", "suffix")} | {
    **dict.fromkeys((*(kind.name for kind in KINDS if kind.is_plain), "completions"), "model"),
    "json_object": "response_format",
    "json_schema": "response_format",
}
