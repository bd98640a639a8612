"""One provider of answers to an alias: a backend with its price, its health and its estimates.

Supplies the values from which `policies.routing` decides, and learns from the outcome of each call.
Knows no aliases, teams, budgets or caches. Invariant: a slot that `begin` took is given back once,
by `end`.
"""

import dataclasses
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from gateway.backends import base
from gateway.backends.dialect import Dialect, Lessons
from gateway.backends.keys import Keys
from gateway.deployments.build import Facts, describe
from gateway.deployments.progress import Progress
from gateway.deployments.slots import Slots
from gateway.loggers import get_logger
from gateway.settings import DeploymentSettings
from policies import Candidate, Cause, Demand, Estimate, Health, Price, Usage
from policies.breaker import Asker
from policies.estimate import Figures
from policies.prices import MicroUSD
from policies.replicas import Backlog

_TTFT_TIMEOUT_MAX_MS = 60_000.0
_TTFT_TIMEOUT_UNLEARNED_MS = 10_000.0  # where another deployment can answer
_LEARNED_S = 600.0  # a context that has grown is found in this time
_NEAR = 4  # a request so many times longer tells little of a context
_SCOPES_MAX = 256
_RESTS = {"denied": Cause.DENIED, "full": Cause.FULL}
_OVERCOUNT_REST_S = 60.0

NOT_DEARER = frozenset({"", "auto", "default", "standard", "on_demand", "flex", "batch"})
"""The tiers that cost no more than none: OpenAI's, Anthropic's and Groq's."""

_log = get_logger()


class Prompts(msgspec.Struct):
    """The largest prompt served, and the context size of a refusal, which holds until `until_s`."""

    served: int = 0
    learned: int = 0
    until_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Deployment(Facts):
    """One backend that can answer an alias, with its facts, health and estimates."""

    name: str
    model: str  # deployments of one model give answers of one kind
    backend: base.Backend
    output_tokens_default: int | None  # its own limit where a request has none
    settings: DeploymentSettings
    health: Health
    estimate: Estimate
    slots: Slots
    claim: Callable[[Asker], Awaitable[bool]] | None = None  # the right to probe, among all workers and hosts
    ttft_timeout_min_ms: float = 5_000.0
    use: str = ""  # `drained` or `disabled` by an operator
    keys: Keys = field(default_factory=Keys)
    answers: set[base.ChunkStream] = field(default_factory=set)  # under way
    prompts: dict[str, Prompts] = field(default_factory=dict)  # by operation and model
    group: str = ""  # the deployment whose replica it is, for budgets and bills; else its own name
    backlog: Backlog | None = None  # of a replica
    counts_cached: bool = False  # its answers say how much of a prompt it had cached
    tokens_per_ms: float = 0.04  # of its latest answers, from their start, with the tokens that no chunk shows
    is_any_model: bool = field(init=False)  # it takes every name of a model
    lessons: Lessons = field(init=False)
    idle_timeout_s: float = field(init=False)  # of silence inside a stream: configured, else as its model reasons
    whole_timeout_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.group = self.group or self.name
        self.is_any_model = "*" in (self.settings.model or "")
        self.lessons = Lessons(self.health.clock)
        self.whole_timeout_s = self.settings.whole_timeout_ms / 1000.0
        idle_s, is_set = self.settings.idle_timeout_ms / 1000.0, "idle_timeout_ms" in self.settings.model_fields_set
        self.idle_timeout_s = idle_s if is_set else max(idle_s, self.dialect.silence_s)

    @property
    def is_as_described(self) -> bool:
        """Whether its facts are those of its settings and of the public table by now."""
        return all(getattr(self, name) == fact for name, fact in describe(self.settings).by_name().items())

    def asker(self, demand: Demand, request_id: str = "-") -> Asker:
        """The caller and the shape of a request, for the health of this deployment.

        A prompt longer than all served prompts has a separate shape.
        """
        scope = self._scope(demand)
        longest = self.prompts[scope].served if scope in self.prompts else 0
        shape = "+".join(sorted(demand.needs)) if demand.needs else ""
        return Asker(scope, demand.caller, f"{shape}+long" if demand.prompt_tokens > longest else shape, request_id)

    def _scope(self, demand: Demand) -> str:
        return f"{demand.operation}:{self.model}" if self.is_any_model else f"{demand.operation}:"

    @property
    def is_available(self) -> bool | None:
        """Whether the deployment answers, by its last call; None before its first call.

        A local engine is called at its start.
        """
        if self.use or not self.backend.load(0).is_ready:
            return False
        is_well = self.health.is_well
        return True if is_well is None and self.settings.backend == "local" else is_well

    @property
    def absence(self) -> str:
        """Why routing skips the deployment: `disabled`, `not_ready`, `denied` or `failed`; else
        empty.
        """
        if self.use or not self.backend.load(0).is_ready:
            return "disabled" if self.use else "not_ready"
        reason, denial = self.health.trouble
        return "denied" if denial else "failed" if reason else ""

    @property
    def trouble(self) -> str:
        """Why the deployment is unavailable, for operators; empty if it may be available."""
        load = self.backend.load(0)
        if self.use or not load.is_ready:
            return f"{self.use} by an operator" if self.use else load.why
        return self.health.trouble[0] or ("its last request failed" if self.health.is_well is False else "")

    def for_model(self, name: str) -> "Deployment":
        """This deployment with the price and the sizes of the model that a request names."""
        model = (self.settings.model or "").replace("*", name)
        facts = describe(self.settings.model_copy(update={"model": model}))
        named = dataclasses.replace(self, model=model, **facts.by_name())
        named.lessons = self.lessons
        return named

    def spoken(self) -> Dialect:
        """The dialect of its server, with what its refusals have taught."""
        return self.lessons.spoken(self.model, self.dialect)

    def cost(self, demand: Demand, usage: Usage) -> MicroUSD:
        """The cost of a request with this usage, in µUSD."""
        cost = (self._price(demand) if demand.tier else self.price).cost(usage)
        if demand.units > 1 or usage.units > 1 or demand.measure:
            has_tokens = cost > self.price.request_microusd  # tokens without a price leave that of the units
            cost += 0 if demand.measure and has_tokens else self._of_units(demand, usage.units)
        return self._raised(demand, cost) if demand.reserved or demand.is_batch else cost

    def cost_max(self, demand: Demand, completion_tokens: int) -> MicroUSD:
        """The highest possible cost in µUSD of a request whose answers have `completion_tokens`
        together.
        """
        cost = (self._price(demand) if demand.tier else self.price).cost_max(
            demand.prompt_tokens_read,
            completion_tokens,
            has_audio=demand.has_audio,
            has_long_writes=demand.has_long_writes,
            tool_calls=demand.calls,
        )
        if demand.units > 1 or demand.measure:
            cost += self._of_units(demand)
        return self._raised(demand, cost) if demand.reserved or demand.is_batch else cost

    def overcounted(self, demand: Demand) -> None:
        """Rest the deployment for all callers: it reported more tokens than it can have read or
        written.
        """
        _log.warning("usage_impossible", deployment=self.name, context_tokens=self.context_tokens_max)
        self.health.rest(self.asker(demand), _OVERCOUNT_REST_S, "it reported more tokens than it can have used")

    def lacks_price(self, demand: Demand) -> bool:
        """Whether it has prices for units, but none for the units of this request."""
        price = self.price
        is_free = not (price.input_microusd_per_mtok or price.output_microusd_per_mtok or price.request_microusd)
        return is_free and bool(price.units) and price.unit(demand.measure) is None

    def _of_units(self, demand: Demand, reported: int = 0) -> MicroUSD:
        """The cost of a request's units beside its tokens: of `reported` units, else of the most."""
        if not demand.measure:  # a search covers no more documents than the request was counted by
            return (max(reported, demand.units) - 1) * self.price.request_microusd
        return -(-(reported or demand.units) * (self.price.unit(demand.measure) or 0) // 1_000_000)

    def _price(self, demand: Demand) -> Price:
        """The price of the tier; the dearest tier's if the tier has no price and may be dearer."""
        if not self.tiers or (demand.tier in NOT_DEARER and demand.tier not in self.tiers):
            return self.price
        dearest = max(self.tiers.values(), key=lambda price: price.output_microusd_per_mtok)
        return self.tiers.get(demand.tier, dearest)

    def _raised(self, demand: Demand, cost: MicroUSD) -> MicroUSD:
        """`cost` times the factors of the reserved parts of the request, and of a batch."""
        if demand.is_batch:
            cost = -(-cost * self.batch_factor // 1_000_000)
        for name in demand.reserved.intersection(self.factors):
            cost = -(-cost * self.factors[name] // 1_000_000)
        return cost

    def candidate(self, demand: Demand, *, is_alone: bool = False) -> Candidate:
        """The deployment's current state for routing. `is_alone`: no other deployment can answer."""
        prompt_tokens = demand.prompt_tokens
        load = self.backend.load(prompt_tokens)
        resting, reason = None, ""
        if not load.is_ready:
            resting, reason = Cause.HEALTH, load.reason
        elif self.health.is_resting and not self.health.allows(asker := self.asker(demand), is_alone=is_alone):
            reason, kind = self.health.resting(asker)
            resting = _RESTS.get(kind, Cause.HEALTH)
        figures = self.estimate.figures()
        is_measured = figures.weight > 0  # a prior rejects no deployment
        offers = self.capabilities
        if load.may_think and self.settings.capabilities is None:  # as its engine shows
            offers = offers | {"reasoning"}
        candidate = Candidate(
            name=self.name,
            price=self.price,
            capabilities=offers,
            context_tokens_max=self._context(load, self._scope(demand)),
            output_tokens_max=load.output_tokens_max or self.output_tokens_max,
            ttft_ms=load.ttft_ms if load.ttft_ms is not None or not is_measured else figures.ttft_ms(prompt_tokens),
            tpot_ms=load.tpot_ms if load.tpot_ms is not None or not is_measured else figures.tpot_ms,
            resting=resting,
            health_reason=reason,
            use=self.use,
            full_at=self.slots.slots_max if self.slots.is_full and not self.slots.is_short else 0,
            priority=self.settings.priority,
            allowed=self.allowed,
            prefill_ms_per_token=figures.prefill_ms_per_token,
            batch_factor=self.batch_factor,
            region=self.settings.region,
            retention_days=self.settings.retention_days,
            is_local=self.settings.backend == "local",
        )
        return candidate if self.backlog is None else _behind(candidate, self.backlog, figures, prompt_tokens)

    def _context(self, load: base.Load, scope: str) -> int | None:
        context_tokens, prompts = load.context_tokens_max or self.context_tokens_max, self.prompts.get(scope)
        if prompts is None or self.health.clock() >= prompts.until_s:
            return context_tokens
        return prompts.learned if context_tokens is None else min(context_tokens, prompts.learned)

    def learn_window(self, error: base.BackendTooLong, demand: Demand) -> int | None:
        """Keep for a while the context size in `error`. Returns the size for this request, or None.

        A size counts only if no longer prompt was served, and if the request is longer, but by less
        than four times. A local engine states its size itself.
        """
        scope, size = self._scope(demand), error.context_tokens
        context_tokens = self._context(self.backend.load(0), scope)
        if size is None or self.settings.engine is not None:
            return context_tokens
        prompts, output = self._prompts(scope), demand.output_tokens_max if demand.is_output_asked else 0
        least = max(1, prompts.served, (demand.prompt_tokens + output) // _NEAR)
        if least <= size < demand.prompt_tokens_max + output:
            prompts.learned, prompts.until_s = size, self.health.clock() + _LEARNED_S
        return min(size, context_tokens or size)

    def _prompts(self, scope: str) -> Prompts:
        if scope not in self.prompts and len(self.prompts) >= _SCOPES_MAX:
            self.prompts.clear()
        return self.prompts.setdefault(scope, Prompts())

    def begin(self, asker: Asker, team: int = 0) -> bool:
        """Take a slot and the right to make one call; returns False if another call has either.

        `end` gives the slot back. `team` is the request's; 0 for the gateway's own.
        """
        if not self.slots.take(team):
            return False
        if not self.health.begin(asker):
            self.slots.give_back(team)
            return False
        return True

    def take_use(self, use: str) -> list[base.ChunkStream]:
        """Set the use that an operator chose. Returns the answers to close."""
        is_cut = use == "disabled" != self.use
        self.use = use
        return list(self.answers) if is_cut else []

    async def may_probe(self, asker: Asker, team: int = 0) -> bool:
        """Whether this worker may probe the deployment. If not, the call that `begin` admitted is
        ended.
        """
        try:
            is_first = self.claim is None or await self.claim(asker)
        except BaseException:
            self.health.cancelled(asker)
            self.end(team)
            raise
        if not is_first:
            self.end(team)
        return is_first

    def end(self, team: int = 0) -> None:
        """Give back the slot of a call that has ended."""
        self.slots.give_back(team)

    def ttft_timeout_s(self, prompt_tokens: int, *, is_alone: bool = True) -> float:
        """The time in seconds to wait for the first chunk: configured, else learned from this
        deployment, for the prompt and what a replica reads before it.

        Before it is learned it is about 10 s if another deployment can answer.
        """
        if self.settings.ttft_timeout_ms is not None:
            return self.settings.ttft_timeout_ms / 1000.0
        least_ms, most_ms = self.ttft_timeout_min_ms, _TTFT_TIMEOUT_MAX_MS
        if self.backlog is not None:
            prompt_tokens += self.backlog.ahead_tokens()
        unlearned_ms = most_ms if is_alone else _TTFT_TIMEOUT_UNLEARNED_MS
        if self.dialect.silence_s:  # what it has learned tells nothing of the next thought
            least_ms = most_ms = unlearned_ms = 1000.0 * self.dialect.silence_s if is_alone else most_ms
        return self.estimate.ttft_timeout_ms(prompt_tokens, least_ms, most_ms, unlearned_ms) / 1000.0

    def succeeded(self, progress: Progress, demand: Demand, asker: Asker) -> None:
        """Learn from a complete generation.

        An answer that came whole has only a total: its time to first token is taken as predicted,
        and its tokens share the rest.
        """
        self.health.succeeded(asker)
        assert progress.attempt is not None
        prompts, prompt_tokens = self._prompts(asker.scope), demand.prompt_tokens
        prompts.served = max(prompts.served, prompt_tokens)
        duration_ms, usage, tokens = progress.attempt.duration_ms, progress.usage, progress.content_chunks
        figures = self.estimate.figures()
        ttft_ms = progress.ttft_ms if progress.ttft_ms is not None else duration_ms
        if usage is not None:
            prompts.served = max(prompts.served, min(usage.prompt_tokens, demand.prompt_tokens_max))
            if prompts.served > prompts.learned:
                prompts.until_s = 0.0  # it has grown
            prompt_tokens = usage.prompt_tokens - usage.cached_tokens
            tokens = usage.completion_tokens
            if usage.reasoning_tokens:
                self.may_reason = True
            elif self.may_reason is None:
                self.may_reason = tokens > progress.completion_tokens_at_least(0.0)
            rate = tokens / max(duration_ms, 1.0)
            self.tokens_per_ms += (rate - self.tokens_per_ms) * (0.5 if figures.weight > 0 else 1.0)
        if progress.is_whole:
            ttft_ms = min(ttft_ms, figures.ttft_ms(prompt_tokens))
        if self.backlog is not None:
            self.backlog.answered(duration_ms - ttft_ms)
            self.counts_cached |= usage is not None and usage.cached_tokens > 0
            warm_tokens = 0 if self.counts_cached else progress.warm_tokens
            prompt_tokens += progress.ahead_tokens - min(warm_tokens, prompt_tokens)
        self.estimate.observe(ttft_ms, (duration_ms - ttft_ms) / (tokens - 1) if tokens > 1 else None, prompt_tokens)

    def failed(self, error: base.BackendError, asker: Asker) -> None:
        """Count a failure against the deployment, unless the request itself may be at fault."""
        match error:
            case _ if self.use == "disabled":  # its answers were given up
                self.health.cancelled(asker)
            case base.BackendDenied(mark=base.Mark() as mark):
                if self.health.resting(asker)[1] != "denied":
                    _log.warning("deployment_denied", deployment=self.name, mark=mark.value, status=error.status)
                self.health.failed(asker, denial=f"{mark} (HTTP {error.status})")
            case base.BackendDenied() | base.BackendRejected() | base.BackendNotAsked():
                self.health.cancelled(asker)
            case _:
                if self.backlog is not None and isinstance(error, base.BackendUnavailable) and error.status is None:
                    self.backlog.has_restarted = True  # if it comes back, then without its memory
                self.health.failed(asker, error.retry_after_s if isinstance(error, base.BackendOverloaded) else None)

    def note_timeout(self, prompt_tokens: int) -> None:
        """Learn from a time-out if no other deployment could answer.

        The deployment may have become slow, so its next time-out is longer. If another deployment
        can answer, the time-out stays, so that a deployment that hangs delays no request.
        """
        self.estimate.observe_timeout(1000.0 * self.ttft_timeout_s(prompt_tokens), prompt_tokens)


def _behind(candidate: Candidate, backlog: Backlog, measured: Figures, prompt_tokens: int) -> Candidate:
    """A replica as a candidate, behind its backlog."""
    figures = backlog.judged(measured)
    return msgspec.structs.replace(
        candidate,
        ttft_ms=backlog.ttft_ms(figures, prompt_tokens),
        tpot_ms=figures.tpot_ms,
        prefill_ms_per_token=figures.prefill_ms_per_token,
        others_ms_per_token=figures.prefill_ms_per_token,
        load_ms=backlog.load_ms(),
    )
