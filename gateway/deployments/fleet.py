"""The deployments of this worker: each a backend with its price, its breaker and its estimates.

Collects the values that `policies.routing` decides by, and learns from each outcome; the decision
is a pure function there. No teams, budgets or caches.
"""

import asyncio
import dataclasses
import random
import re
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

import policies
from gateway.backends import base
from gateway.deployments.build import build_backend, describe
from gateway.deployments.places import Places
from gateway.deployments.progress import Progress
from gateway.loggers import get_logger
from gateway.reserved import FIELDS, PAID, TOOLS, Reserved, canonical, reserved, reserved_in_name
from gateway.settings import DeploymentSettings, ModelSettings, Settings, deployment_name, is_pattern
from gateway.wire.errors import (
    ApiError,
    BadRequest,
    DeadlineExceeded,
    NotFound,
    Unavailable,
    UpstreamDenied,
    sentence,
    shown,
)
from gateway.wire.requests import OUTPUT_TOKENS_EXPECTED, OUTPUT_TOKENS_MAX
from gateway.wire.rules import check_rules
from gateway.wire.types import Kind
from policies import Breaker, Candidate, Cause, Demand, Estimate, Price, Route, RoutingPolicy, Tokens
from policies.prices import MicroUSD
from policies.routing import PolicyKind

_log = get_logger()

_PASSED_NAME_MAX = 200
_PASSED_NAME = re.compile(rf"[!-)+-~]{{1,{_PASSED_NAME_MAX}}}")  # ASCII without spaces and `*`
_TTFT_TIMEOUT_MAX_MS = 60_000.0
_TTFT_TIMEOUT_UNLEARNED_MS = 10_000.0  # where another deployment can answer
_ATTEMPTS_MAX = 3  # after so many, no other round over all deployments begins
TRIES_MAX = 8
"""The most tries of one request, at all its deployments."""
_NAMES_SHOWN_MAX = 10
_PAUSE_BEFORE_RETRY_S = 0.2
_PAUSE_MAX_S = 2.0
_TOOL_CALLS_MAX = 10  # of tools that the provider runs, in one request, as far as a hold foresees


@dataclass(slots=True)
class Deployment:
    """One place where an alias can be answered."""

    name: str
    model: str  # deployments of one model give answers of one kind
    backend: base.Backend
    price: Price
    capabilities: frozenset[str]
    context_tokens_max: int | None
    output_tokens_max: int | None
    output_tokens_default: int | None  # its own limit where a request has none
    settings: DeploymentSettings
    breaker: Breaker
    estimate: Estimate
    places: Places
    claim: Callable[[], Awaitable[bool]]  # the right to probe, among all workers and hosts
    allowed: frozenset[str] = frozenset()  # reserved fields and tools that clients may send to it
    ttft_timeout_min_ms: float = 5_000.0
    is_price_known: bool = True
    are_capabilities_assumed: bool = False
    can_chat: bool = True
    use: str = ""  # `drained` or `disabled` by an operator
    answers: set[base.ChunkStream] = field(default_factory=set)  # under way
    context_learned: int | None = None  # the size that it gave when it refused a longer request
    tiers: Mapping[str, Price] = field(default_factory=dict)  # by `service_tier`
    factors: Mapping[str, int] = field(default_factory=dict)  # by reserved part: a million times the price's
    may_reason: bool | None = None  # whether answers have tokens that no chunk shows; None: not known
    tokens_per_ms: float = 0.04  # of its latest answers, from their start, with the tokens that no chunk shows

    @property
    def has_answered(self) -> bool:
        """Whether it has answered a request lately, whatever the model's name."""
        return self.estimate.weight > 0

    @property
    def is_any_model(self) -> bool:
        """Whether it takes every name of a model."""
        return "*" in (self.settings.model or "")

    def for_model(self, name: str) -> "Deployment":
        """This deployment with the price and the sizes of the model that a request names."""
        model = (self.settings.model or "").replace("*", name)
        facts = describe(self.settings.model_copy(update={"model": model}))
        return dataclasses.replace(
            self,
            model=model,
            price=facts.price,
            capabilities=facts.capabilities,
            context_tokens_max=facts.context_tokens_max,
            output_tokens_max=facts.output_tokens_max,
            allowed=facts.allowed,
            is_price_known=facts.is_price_known,
            are_capabilities_assumed=facts.are_capabilities_assumed,
            can_chat=facts.can_chat,
            tiers=facts.tiers,
            factors=facts.factors,
            may_reason=facts.may_reason,
        )

    def cost(self, demand: Demand, tokens: Tokens) -> MicroUSD:
        """The cost of the tokens of a request, in µUSD."""
        return self._raised(demand, self._price(demand).cost(tokens))

    def cost_max(self, demand: Demand, completion_tokens: int) -> MicroUSD:
        """The highest possible cost of a request whose answers have so many tokens together."""
        calls = _TOOL_CALLS_MAX if demand.reserved & PAID else 0
        cost = self._price(demand).cost_max(
            demand.prompt_tokens_max,
            completion_tokens,
            has_audio=demand.has_audio,
            has_long_writes=demand.has_long_writes,
            tool_calls=calls,
        )
        return self._raised(demand, cost)

    def _price(self, demand: Demand) -> Price:
        """The price of the tier asked for; of a tier without one, the dearest."""
        if not demand.tier or not self.tiers:
            return self.price
        dearest = max(self.tiers.values(), key=lambda price: price.output_microusd_per_mtok)
        return self.tiers.get(demand.tier, dearest)

    def _raised(self, demand: Demand, cost: MicroUSD) -> MicroUSD:
        """`cost` times the factors of the reserved parts of the request."""
        for name in demand.reserved.intersection(self.factors):
            cost = -(-cost * self.factors[name] // 1_000_000)
        return cost

    def candidate(self, prompt_tokens: int, *, is_alone: bool = False) -> Candidate:
        """This deployment as routing sees it, now. `is_alone`: no other one can answer."""
        load = self.backend.load(prompt_tokens)
        is_unavailable = not (load.is_ready and self.breaker.allows(is_alone=is_alone))
        figures = self.estimate.figures()
        is_measured = figures.weight > 0  # a prior rejects no deployment
        return Candidate(
            name=self.name,
            price=self.price,
            capabilities=self.capabilities,
            context_tokens_max=self._context(load),
            output_tokens_max=load.output_tokens_max or self.output_tokens_max,
            ttft_ms=load.ttft_ms if load.ttft_ms is not None or not is_measured else figures.ttft_ms(prompt_tokens),
            tpot_ms=load.tpot_ms if load.tpot_ms is not None or not is_measured else figures.tpot_ms,
            is_unavailable=is_unavailable,
            is_denied=is_unavailable and load.is_ready and bool(self.breaker.denial) and not self.breaker.is_probed,
            health_reason=(load.reason if not load.is_ready else self.breaker.reason) if is_unavailable else "",
            use=self.use,
            full_at=self.places.places_max if self.places.is_full else 0,
            priority=self.settings.priority,
            allowed=self.allowed,
            prefill_ms_per_token=figures.prefill_ms_per_token,
        )

    def _context(self, load: base.Load) -> int | None:
        known = load.context_tokens_max or self.context_tokens_max
        if self.context_learned is None:
            return known
        return self.context_learned if known is None else min(known, self.context_learned)

    def learn_window(self, error: base.BackendTooLong) -> int | None:
        """Keep the size of the context that `error` gives. Returns the size that is known, if any.

        A local engine states its size itself, which may change with its next start.
        """
        if error.context_tokens is not None and self.settings.engine is None:
            self.context_learned = error.context_tokens
        return self._context(self.backend.load(0))

    def begin(self) -> bool:
        """Take a place and the right to make one call; returns False if another call took it.

        `end` gives the place back.
        """
        return not self.places.is_full and self.breaker.begin() and self.places.take()

    def begin_try_out(self) -> None:
        """Take a place and the right to make one call for an operator, whatever the state."""
        self.places.taken += 1
        self.breaker.begin_anyway()

    def take_use(self, use: str) -> list[base.ChunkStream]:
        """Set what an operator made of it. Returns the answers that must be given up."""
        is_cut = use == "disabled" != self.use
        self.use = use
        return list(self.answers) if is_cut else []

    async def may_probe(self) -> bool:
        """Whether no other worker is probing it; if one is, the call that `begin` admitted ends."""
        try:
            is_first = await self.claim()
        except BaseException:
            self.breaker.record_cancelled()
            self.end()
            raise
        if not is_first:
            self.end()
        return is_first

    def end(self) -> None:
        """Give back the place of a call that has ended."""
        self.places.give_back()

    def ttft_timeout_s(self, prompt_tokens: int, *, is_alone: bool = True) -> float:
        """The time to wait for the first chunk: as configured, else learned
        from this deployment.

        Where it is not learned yet, and another deployment can answer, it is about 10 s.
        """
        if self.settings.ttft_timeout_ms is not None:
            return self.settings.ttft_timeout_ms / 1000.0
        most_ms = _TTFT_TIMEOUT_MAX_MS
        unlearned_ms = most_ms if is_alone else _TTFT_TIMEOUT_UNLEARNED_MS
        return self.estimate.ttft_timeout_ms(prompt_tokens, self.ttft_timeout_min_ms, most_ms, unlearned_ms) / 1000.0

    def succeeded(self, made: Progress, prompt_tokens: int) -> None:
        """Learn from a complete generation.

        An answer that came whole has only a total: its time to first token is taken as predicted,
        and its tokens share the rest.
        """
        self.breaker.record_success()
        duration_ms = made.elapsed_ms()
        ttft_ms = made.ttft_ms if made.ttft_ms is not None else duration_ms
        if made.usage is not None:
            if self.context_learned and made.usage.prompt_tokens > self.context_learned:
                self.context_learned = None  # it has grown
            prompt_tokens = made.usage.prompt_tokens - made.usage.cached_tokens
            if made.usage.reasoning_tokens:
                self.may_reason = True
            elif self.may_reason is None:
                self.may_reason = made.usage.completion_tokens > made.completion_tokens_at_least(0.0)
            rate = made.usage.completion_tokens / max(duration_ms, 1.0)
            self.tokens_per_ms += (rate - self.tokens_per_ms) * (0.5 if self.has_answered else 1.0)
        if made.is_whole:
            ttft_ms = min(ttft_ms, self.estimate.ttft_ms(prompt_tokens))
        tokens = made.usage.completion_tokens if made.usage else made.content_chunks
        self.estimate.observe(ttft_ms, (duration_ms - ttft_ms) / (tokens - 1) if tokens > 1 else None, prompt_tokens)

    def failed(self, error: base.BackendError) -> None:
        """Count a failure against the deployment, unless the request itself may be at fault."""
        if self.use == "disabled":  # its answers were given up
            self.breaker.record_cancelled()
            return
        match error:
            case base.BackendRejected() if not self.breaker.denial:
                self.breaker.record_success()
            case base.BackendDenied(mark=base.Mark() as mark) if not (mark is base.Mark.ADDRESS and self.has_answered):
                if not self.breaker.denial:
                    _log.warning("deployment_denied", deployment=self.name, mark=mark.value, reason=error.detail)
                if mark is base.Mark.MODEL and self.is_any_model:  # the client chose that name
                    self.breaker.record_cancelled()
                    return
                self.breaker.record_denial(f"{mark} (HTTP {error.status})")
            case base.BackendRejected() | base.BackendDenied():
                self.breaker.record_cancelled()
            case base.BackendOverloaded():
                self.breaker.record_failure(error.retry_after_s)
            case _:
                self.breaker.record_failure()

    def note_timeout(self, prompt_tokens: int) -> None:
        """Learn from a time-out, where no other deployment could answer either.

        The deployment may have become slow, so its next time-out is longer. Where others answer,
        its time-out stays, so that a deployment that hangs delays no request.
        """
        self.estimate.observe_timeout(1000.0 * self.ttft_timeout_s(prompt_tokens), prompt_tokens)


@dataclass(slots=True)
class Alias:
    """A name that requests give as `model`, with its deployments.

    `is_pattern`: it takes every name. `has_engine`: a local engine, which can use a draft, may
    answer.
    """

    name: str
    settings: ModelSettings
    policy: RoutingPolicy
    deployments: Mapping[str, Deployment]
    is_pattern: bool = field(init=False)
    has_engine: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_pattern = is_pattern(self.name)
        self.has_engine = any(d.settings.engine is not None for d in self.deployments.values())

    def for_name(self, name: str) -> "Alias":
        """This alias, which takes every name, for the name of one request.

        It keeps the deployments that allow the reserved fields in the name. Raises NotFound, and
        BadRequest if no deployment is left.
        """
        rest = name.removeprefix(self.name[:-1])
        if not _PASSED_NAME.fullmatch(rest) or "://" in rest or ".." in rest or rest.strip("/") != rest:
            raise NotFound(
                f"The model `{shown(name)}` does not exist: expected up to {_PASSED_NAME_MAX} characters without spaces",
                param="model",
                code="model_not_found",
            )
        hidden = reserved_in_name(rest)
        takers = [d for d in self.deployments.values() if d.allowed.issuperset(one.name for one in hidden)]
        if not takers:
            raise self._refusal(hidden)
        return dataclasses.replace(self, deployments={d.name: d.for_model(rest) for d in takers})

    @property
    def unpriced(self) -> str:
        """The model of a deployment that passes every name on and has no price for this one; empty
        if there is none.
        """
        models = (d.model for d in self.deployments.values() if d.is_any_model and not d.is_price_known)
        return next(models, "")

    def check(self, body: dict[str, Any], demand: Demand, kind: Kind) -> None:
        """Refuse what no deployment of this alias may get, before the cache answers it.

        A local engine may get what OpenAI would take; so that routing does not decide whether a
        request is valid, its alias takes no other request. Raises BadRequest.
        """
        if demand.reserved and not any(demand.reserved <= d.allowed for d in self.deployments.values()):
            raise self._refusal(reserved(body))
        if self.has_engine:
            check_rules(body, kind)

    def _refusal(self, found: list[Reserved]) -> BadRequest:
        """The error for reserved things of which no deployment allows all."""
        names = {one.name for one in found}
        # where each part is allowed somewhere, but not together, all of them are in the way
        in_the_way = names.difference(*(d.allowed for d in self.deployments.values())) or names
        first = next(one for one in found if one.name in in_the_way)
        is_unpriced = any(first.name in map(canonical, d.settings.allow_fields) for d in self.deployments.values())
        return _not_allowed(first, self.name, is_unpriced=is_unpriced)

    def worst_case_microusd(self, demand: Demand) -> int:
        """The longest answer at the highest price: the amount that budgets hold."""
        return max(self.worst_case_at(d, demand) for d in self.deployments.values())

    def worst_case_at(self, deployment: Deployment, demand: Demand) -> int:
        """The longest answer at the price of `deployment`, µUSD."""
        # decision: worst-case-by-bytes
        return deployment.cost_max(demand, self.output_max(deployment, demand) * demand.choices)

    def with_max_tokens(self, deployment: Deployment, demand: Demand, body: dict[str, Any]) -> dict[str, Any]:
        """`body` with the reserved length as its limit: a budget cannot hold an
        unlimited answer.
        """
        is_bounded = deployment.output_tokens_default is not None and self.settings.output_tokens_default is None
        if demand.is_output_asked or is_bounded:
            return body
        return with_length(deployment, body, self.output_max(deployment, demand))

    @property
    def has_choice(self) -> bool:
        """Whether a warm prefix can decide between deployments."""
        return len(self.deployments) > 1

    @property
    def is_starting(self) -> bool:
        """No deployment is ready, and at least one is starting."""
        loads = [d.backend.load(0) for d in self.deployments.values()]
        return any(load.is_starting for load in loads) and not any(load.is_ready for load in loads)

    def output_max(self, deployment: Deployment, demand: Demand) -> int:
        """The tokens of the longest answer that a request allows, or that the deployment gives."""
        if demand.is_output_asked:
            return demand.output_tokens_max
        asked = self.settings.output_tokens_default or deployment.output_tokens_default
        limit = deployment.backend.load(0).output_tokens_max or deployment.output_tokens_max
        return asked if asked is not None else (limit or OUTPUT_TOKENS_MAX)

    def route(self, demand: Demand, warm: Mapping[str, int], deadline_ms: float | None, tried: frozenset[str]) -> Route:
        """Rank this alias's deployments for a request, now.

        Where none can answer, those that asked for a long rest are asked sooner.
        """
        now = self._now(demand, warm, deadline_ms, tried)
        found = policies.route(now, self._candidates(demand), self.policy)
        if found.ranked or all(rejected.cause is not Cause.HEALTH for rejected in found.rejected):
            return found
        return policies.route(now, self._candidates(demand, is_alone=True), self.policy)

    def first_choice_model(self, demand: Demand, warm: Mapping[str, int], route: Route) -> str:
        """The model of the first choice if every deployment were healthy and had room.

        An answer of another model is a fallback, and is not cached.
        """
        ranked = route.ranked
        if any(rejected.cause in _PASSING for rejected in route.rejected):
            well = [_well(candidate) for candidate in self._candidates(demand)]
            ranked = policies.route(self._now(demand, warm, None, frozenset()), well, self.policy).ranked
        return self.deployments[ranked[0].name].model if ranked else ""

    def _candidates(self, demand: Demand, *, is_alone: bool = False) -> Sequence[Candidate]:
        return [d.candidate(demand.prompt_tokens, is_alone=is_alone) for d in self.deployments.values()]

    def _now(self, demand: Demand, warm: Mapping[str, int], deadline_ms: float | None, tried: frozenset[str]) -> Demand:
        """`demand` with what this alias adds to it."""
        output_max, default = demand.output_tokens_max, self.settings.output_tokens_default
        if not demand.is_output_asked and default:
            output_max = default
        return msgspec.structs.replace(
            demand,
            output_tokens_max=output_max,
            output_tokens_expected=min(output_max, OUTPUT_TOKENS_EXPECTED),
            warm=warm,
            ttft_deadline_ms=deadline_ms,
            excluded=tried,
        )


def with_length(deployment: Deployment, body: dict[str, Any], tokens_max: int) -> dict[str, Any]:
    """`body` with a limit of its answer, under the name that the deployment knows."""
    is_openai = "api.openai.com" in (deployment.settings.base_url or "")
    # other servers accept only the older name
    return {**body, "max_completion_tokens" if is_openai else "max_tokens": tokens_max}


def _well(candidate: Candidate) -> Candidate:
    return msgspec.structs.replace(candidate, is_unavailable=False, full_at=0, use="")


def pause_before_retry(failure: base.BackendError, attempts: int) -> float | None:
    """Seconds to wait before another round over all deployments; None where a
    round is pointless.
    """
    if attempts >= _ATTEMPTS_MAX or isinstance(failure, base.BackendTimeout):
        return None
    pause_s = failure.retry_after_s if failure.retry_after_s is not None else _PAUSE_BEFORE_RETRY_S * 2**attempts
    return pause_s * random.uniform(1.0, 1.25) if pause_s <= _PAUSE_MAX_S else None


def _not_allowed(found: Reserved, alias: str, *, is_unpriced: bool) -> BadRequest:
    way = "leave it out" if found.name in FIELDS else "send tools of the type `function`"
    effect = FIELDS.get(found.name) or TOOLS[found.name]
    words = f"{found.words} is not for clients of the model `{alias}` to send ({effect}): {way}, or ask the operator"
    message = f"{words} to list `{found.name}` in the deployment's `allow_fields`"
    if is_unpriced:
        message = f"{words} for its price: `price` of the deployment has none for `{found.name}`"
    return BadRequest(message, param=found.param, code="field_not_allowed")


class Fleet:
    """Every alias with its deployments. Raises NotFound for a name it does not have."""

    def __init__(self, aliases: Mapping[str, Alias], embedding_alias: str = "") -> None:
        self.aliases = aliases
        self._embedding_alias = embedding_alias
        self._closing: set[asyncio.Future[None]] = set()
        self._whole_names = frozenset(name for name in aliases if not is_pattern(name))
        # the longest prefix first
        self._patterns = sorted((name for name in aliases if is_pattern(name)), key=len, reverse=True)

    def configured(self, name: str) -> str:
        """The configured alias that takes requests for `name`; empty if there is none."""
        if name in self._whole_names:
            return name
        if name == self._embedding_alias:
            return ""
        return next((one for one in self._patterns if name.startswith(one[:-1]) and len(name) >= len(one)), "")

    @property
    def deployments(self) -> list[Deployment]:
        return [d for alias in self.aliases.values() for d in alias.deployments.values()]

    def alias(self, name: str, allowed: Collection[str] | None = None) -> Alias:
        """The alias of this name. Raises NotFound, which names those of `allowed`; None: all."""
        found = self.aliases.get(self.configured(name))
        if found is None:
            names = [one for one in self.aliases if allowed is None or one in allowed]
            there = ", ".join(f"`{one}`" for one in names[:_NAMES_SHOWN_MAX]) or "none that this API key may use"
            more = ", ..." if len(names) > _NAMES_SHOWN_MAX else ""
            raise NotFound(
                f"The model `{shown(name)}` does not exist; there is {there}{more} (GET /v1/models)",
                param="model",
                code="model_not_found",
            )
        return found.for_name(name) if found.is_pattern else found

    def take_uses(self, uses: Mapping[str, str]) -> None:
        """Take the deployments in `uses` out of use, and the others in.

        Answers of one that was disabled are given up.
        """
        for deployment in self.deployments:
            for answer in deployment.take_use(uses.get(deployment.name, "")):
                closing = asyncio.ensure_future(answer.aclose())
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def start(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.start()

    async def aclose(self) -> None:
        for deployment in self.deployments:
            await deployment.backend.aclose()


def build_fleet(settings: Settings, clock: Callable[[], float]) -> Fleet:
    """The fleet that the settings describe; nothing is connected yet."""
    aliases = {}
    for alias, model in settings.models.items():
        deployments = [_build(alias, d, settings, clock) for d in model.deployments]
        policy = RoutingPolicy(
            kind=PolicyKind(model.policy),
            ttft_ms_max=model.ttft_ms_max,
            cost_microusd_max=model.cost_microusd_max,
        )
        aliases[alias] = Alias(alias, model, policy, {d.name: d for d in deployments})
    return Fleet(aliases, settings.embedding_alias)


def _build(alias: str, deployment: DeploymentSettings, settings: Settings, clock: Callable[[], float]) -> Deployment:
    facts = describe(deployment)
    if not facts.is_price_known and not is_pattern(alias):
        _log.warning("price_unknown", deployment=deployment_name(alias, deployment), consequence="counted as free")
    return Deployment(
        name=deployment_name(alias, deployment),
        model=deployment.model or settings.engines[deployment.engine or ""].model,
        backend=build_backend(alias, deployment, settings),
        price=facts.price,
        capabilities=facts.capabilities,
        context_tokens_max=facts.context_tokens_max,
        output_tokens_max=facts.output_tokens_max,
        output_tokens_default=settings.engines[deployment.engine].output_tokens_default if deployment.engine else None,
        settings=deployment,
        is_price_known=facts.is_price_known,
        are_capabilities_assumed=facts.are_capabilities_assumed,
        can_chat=facts.can_chat,
        breaker=Breaker(clock, random.random),
        estimate=Estimate(clock),
        places=Places(deployment.concurrency_max, deployment.queue_max),
        claim=_alone,
        allowed=facts.allowed,
        tiers=facts.tiers,
        factors=facts.factors,
        may_reason=facts.may_reason,
    )


async def _alone() -> bool:
    """The claim of a worker that shares nothing."""
    return True


_PASSING = frozenset({Cause.DISABLED, Cause.HEALTH, Cause.DENIED, Cause.FULL})  # of the moment, not of the request


def no_route(route: Route, prompt: str) -> ApiError:
    """The error for a request that no deployment may try. `prompt` is the field with the prompt."""
    match route.cause:
        case Cause.CONTEXT | Cause.OUTPUT:
            return BadRequest(sentence(route.refusal), param=prompt, code="context_length_exceeded")
        case Cause.CAPABILITY:
            lacking = min(what for rejected in route.rejected for what in rejected.lacks)
            return BadRequest(sentence(route.refusal), param=_ASKED_IN.get(lacking, prompt), code="unsupported_feature")
        case Cause.DEADLINE:
            return DeadlineExceeded(sentence(route.refusal))
        case Cause.LIMIT:
            return Unavailable(sentence(route.refusal), code="no_deployment_within_limits")
        case Cause.DENIED:
            return UpstreamDenied(sentence(route.refusal))
        case _:
            return Unavailable(sentence(route.refusal), code="no_deployment_available")


# The fields that need a capability. Images, sounds and files are in the prompt itself.
_ASKED_IN = {name: name for name in ("tools", "logprobs", "n", "suffix")} | {
    "completions": "model",
    "json_object": "response_format",
    "json_schema": "response_format",
}
