"""One generation as a value: its turn, its identity, and the outcome of each stage.

It never awaits, and contains no services. Invariant: each outcome is set whole; where it is more
than one field, by the method of its stage.
"""

from collections.abc import Sequence

import msgspec

from cache import Entry, Fingerprint, Outcome
from cache.eligibility import CUT, store_refusal
from gateway.accounts import Identity, LedgerRow
from gateway.backends.base import BackendRequest
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment, with_cut
from gateway.deployments.progress import Attempt, Progress
from gateway.journey.bill import Spent, Try, book, charged, cost_of, with_charges
from gateway.journey.hedge import Hedged
from gateway.journey.rescue import Said, Seam, rest_of
from gateway.journey.semantic import SemanticResult, draft_of
from gateway.journey.storing import deployment_of, ends_as_asked, entry_of
from gateway.journey.turn import Turn
from gateway.reserved import with_calls_bound
from gateway.wire.errors import ApiError
from gateway.wire.types import Chunk, opened
from policies import Demand, Hold, Route, Usage

_UNSTREAMED = frozenset({"best_of", "prompt_logprobs"})  # servers refuse to stream with these


class Rejection(msgspec.Struct, frozen=True):
    """The reason why a deployment was not used, or an alias could not answer."""

    name: str
    reason: str


class Generation(msgspec.Struct, eq=False):
    """One generation, begun by `generation_of`.

    `warm` are the prompt tokens that deployments saw last, by name. `lacking` names the parts that
    failed before it began and that the request did without.
    """

    turn: Turn
    identity: Identity
    alias: Alias
    serving: Alias  # the alias or the fallback whose deployments are tried
    fingerprint: Fingerprint
    demand: Demand  # with what deployments said of the prompt's length
    warm: dict[str, int]
    lacking: tuple[str, ...]
    progress: Progress  # at the deployment that was tried last
    fallbacks: list[Rejection] = []  # the aliases that could not answer: the next fallback was asked
    semantic: SemanticResult = SemanticResult()
    unsought: str = ""  # why no semantic lookup may find its answer, apart from cache controls
    near: Entry | None = None  # the answer to the nearest prompt, which a local engine may use as a draft
    hold: Hold | None = None
    cut_at: int | None = None  # the answer's tokens at most, as a budget has no room for more
    more_holds: list[Hold] = []  # for what tries may cost beyond the first hold
    at_deployments: dict[str, Hold] = {}  # of the budgets on deployments, by the deployment's name
    no_room: dict[str, ApiError] = {}  # deployments whose budgets refused it
    headers: dict[bytes, bytes] | None = None  # the tokens' rate limits', once taken
    route: Route | None = None  # the first one, with each rejection
    why: str = ""  # why the deployment that was tried last was chosen
    queued_ms: float = 0.0  # waited for a place, as every deployment was full
    spent: Spent | None = None
    stored: Entry | None = None  # the entry that was to be stored
    store: str = ""  # `stored`, or the reason against it
    hedge: Hedged | None = None  # a second deployment that was asked at the same time
    served: Entry | None = None  # the recorded answer that is replayed
    is_claimed: bool = False  # other workers wait for its entry
    words: bytes | None = None  # the key by which its prompt's words find an answer
    elsewhere_ms: float | None = None  # another worker had been making its entry for so long
    awaited_until: float = 0.0  # by time.perf_counter, where it has waited for that worker
    seams: list[Seam] = []  # where another deployment went on with the answer
    whole_usage: Usage | None = None  # of an answer with seams, as its clients see it
    _beside: Sequence[Progress] = ()  # the tries of a race which did not answer
    _first_choice_model: str = ""
    _is_bounded: bool = False  # by a budget
    _tries: list[Try] = []

    # -- the outcomes of the stages ----------------------------------------------------------------

    def looked_up(self, result: SemanticResult) -> None:
        """6. Set the semantic hit, or the reason why there is none."""
        self.semantic = result
        self.served = result.entry

    def reserved(self, hold: Hold, usual_output: int | None = None) -> None:
        """7. Set the hold, and the tokens of a usual answer if it was taken for one."""
        self.hold = hold
        self.cut_at = usual_output if hold.is_cut else None
        self._is_bounded = hold.is_held

    def routed(self, route: Route) -> None:
        """8. Set the route before the first try."""
        self.route = route
        self._first_choice_model = self.serving.first_choice_model(self.turn.demand, self.warm, route)

    def fell_back(self, alias: Alias, reason: str) -> None:
        """8. Set the fallback whose deployments are tried next, and why the alias before it cannot answer."""
        self.fallbacks.append(Rejection(self.serving.name, reason))
        self.serving = alias

    def begin_try(
        self, deployment: Deployment, *, is_alone: bool, said: Said | None = None
    ) -> tuple[BackendRequest, Progress]:
        """9. The request to `deployment`, and the empty progress of its answer.

        `is_alone`: no other deployment can take over. `said`: the text that it goes on with.
        """
        turn, native = self.turn, self.turn.native
        # decision: always-stream
        is_stream = not turn.kind.is_plain and (
            turn.is_stream or (self.serving.has_choice and _UNSTREAMED.isdisjoint(turn.body))
        )
        draft = draft_of(self.near) if deployment.settings.engine else ""
        asked = turn.marked if turn.marked is not None and "cache_control" in deployment.capabilities else turn.body
        body = self.serving.with_max_tokens(deployment, turn.demand, asked) if self._is_bounded else asked
        if self._is_bounded and turn.demand.calls:
            body = with_calls_bound(body)
            if native is not None:
                native = msgspec.structs.replace(native, are_calls_bound=True)
        if self.cut_at is not None:
            body = with_cut(deployment, body, turn.kind, self.cut_at)
            if native is not None:
                native = msgspec.structs.replace(native, tokens_max=self.cut_at)
        prefix = ""
        if "prefill" in deployment.capabilities:
            body, prefix = opened(body)
        if said is not None:
            body, prefix = rest_of(body, said), prefix + said.text
        request = BackendRequest(
            body=body,
            is_stream=is_stream,
            salt=self.fingerprint.partition,
            request_id=turn.arrival.request_id,
            ttft_timeout_s=deployment.ttft_timeout_s(turn.demand.prompt_tokens, is_alone=is_alone),
            idle_timeout_s=deployment.settings.idle_timeout_ms / 1000.0,
            whole_timeout_s=deployment.settings.whole_timeout_ms / 1000.0,
            draft=draft,
            kind=turn.kind,
            model=deployment.model if self.serving.is_pattern else "",
            native=native,
            upload=turn.upload,
            passage=turn.passage,
            prefix=prefix,
        )
        progress = Progress(deployment.name, self.near.id if draft and self.near is not None else "")
        if said is not None:
            progress.prefix_tokens = said.tokens
        self._tries.append(Try(deployment, progress))
        self.progress = progress
        return request, progress

    def hedging(self, second: Deployment) -> None:
        """9. Set the deployment that was asked last as one beside a slow first one."""
        self.hedge = Hedged(second.name, "failed")
        self._beside = (self.progress,)

    def answers(self, progress: Progress) -> None:
        """9. Set the try, among those that run at once, whose answer is taken: it counts as the last."""
        self._tries.sort(key=lambda one: one.progress is progress)
        self.progress = progress

    def hedged(self, answering: Progress | None, others: Sequence[Progress]) -> None:
        """9. Set the end of a race: the try that answered, if any, and the others."""
        assert self.hedge is not None
        second = self.hedge.deployment
        if answering is not None:
            self.hedge = Hedged(second, "won" if answering.deployment == second else "lost")
        self._beside = others

    def must_fit(self, context_tokens: int) -> None:
        """9. Set that the request is longer than a context of `context_tokens`."""
        output = self.demand.output_tokens_max if self.demand.is_output_asked else 1
        known = self.demand.prompt_tokens_min or 0
        longer = max(known, context_tokens - output + 1)
        self.demand = msgspec.structs.replace(self.demand, prompt_tokens_min=longer)

    def covered(self, hold: Hold) -> None:
        """9. Add a hold for what the next try may cost beyond the others."""
        self.more_holds.append(hold)
        self._is_bounded = self._is_bounded or hold.is_held

    def covered_at(self, deployment: Deployment, hold: Hold) -> None:
        """9. Set the hold of the budgets on a deployment, before it is tried."""
        self.at_deployments[deployment.name] = hold
        self._is_bounded = self._is_bounded or hold.is_held

    def beyond_holds(self, deployment: Deployment) -> int:
        """The µUSD that a try at `deployment` may cost beyond all holds, after what is charged."""
        worst = self.serving.worst_case_at(deployment, self.turn.demand)
        demand = self.turn.demand
        ended = [one for one in charged(self._tries) if one.progress.attempt is not None]
        running = [one for one in self._tries if one.progress.attempt is None]
        used = sum(cost_of(one, self.alias, demand, self.cut_at) for one in ended)
        used += sum(self.serving.worst_case_at(one.deployment, demand) for one in running)
        held = sum(hold.microusd for hold in (self.hold, *self.more_holds) if hold is not None)
        return used + worst - held

    def end(self) -> tuple[list[LedgerRow], Spent]:
        """10. Fix the tokens and the cost. Returns them, and the rows to settle; none if nothing is charged."""
        if self.hold is None:
            self.spent = Spent(Usage(0, 0), 0, 0, 0, is_estimated=True)
            return [], self.spent
        rows, spent = book(self._tries, self.hold, self.turn, self.identity, self.alias, self.whole_usage, self.cut_at)
        self.spent = spent
        for one in self._tries:
            if any(claim.is_cut and claim.deployment == one.deployment.name for claim in spent.claims):
                one.deployment.overcounted(self.turn.demand)
        if self.hedge is not None:
            beside = [one for one in charged(self._tries) if any(one.progress is other for other in self._beside)]
            cost = sum(cost_of(one, self.alias, self.turn.demand, self.cut_at) for one in beside)
            self.hedge = msgspec.structs.replace(self.hedge, cost_microusd=cost)
        if self.hold.more or self.at_deployments:
            rows = with_charges(rows, self.hold, self.at_deployments)
        return rows, spent

    def learn_length(self, spent: Spent) -> None:
        """10. Learn how long answers of this alias are, where the deployment counted a whole one."""
        is_whole = self.progress.is_complete and self.cut_at is None
        if is_whole and not (spent.is_estimated or self.turn.kind.is_plain):
            self.alias.lengths.add(-(-spent.usage.completion_tokens // self.turn.demand.choices))

    # -- derived from the outcomes -----------------------------------------------------------------

    @property
    def source(self) -> str:
        """semantic | coalesced | miss | bypass."""
        if self.served is not None:
            return "semantic" if self.semantic.entry is not None else "coalesced"
        controls = self.turn.controls
        return "bypass" if controls.no_cache or controls.no_store else "miss"

    @property
    def awaited(self) -> str:
        """How waiting for another worker ended: `served`, `made` here after all, or `ended` with an error."""
        is_served = self.served is not None and self.semantic.entry is None
        return "served" if is_served else "made" if self._tries or self.served is not None else "ended"

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple([one.progress.attempt for one in self._tries if one.progress.attempt is not None])

    @property
    def tries(self) -> int:
        """The number of deployments that were tried; one that was tried again counts again."""
        return len(self._tries)

    @property
    def needs_cover(self) -> bool:
        """Whether the next try needs a hold of its own."""
        return bool(self.identity.at_deployments) or self.is_beyond_first

    @property
    def is_beyond_first(self) -> bool:
        """Whether the first hold may be too small for the next try."""
        return self.serving is not self.alias or (
            bool(self._tries) and any(one.progress.has_begun or one.progress.attempt is None for one in self._tries)
        )

    @property
    def answered_by(self) -> str:
        """The deployment that generated the answer, recorded or new; empty before it has begun."""
        if self.served is not None:
            return deployment_of(self.served)
        return self.progress.deployment if self.progress.has_begun else ""

    @property
    def degraded(self) -> tuple[str, ...]:
        return self.lacking + self.semantic.degraded

    @property
    def is_fallback(self) -> bool:
        """Whether another model than that of the first choice answered."""
        model = self._tries[-1].deployment.model if self._tries else ""
        return self.serving is not self.alias or (bool(self._tries) and self._first_choice_model not in ("", model))

    @property
    def is_cut(self) -> bool:
        """Whether the answer ended at a length limit: it is no answer to another request."""
        return CUT in self.progress.finish_reasons

    def store_refusal(self, entry_bytes_max: int, *, is_servable: bool) -> str | None:
        """The reason why the answer is not stored, as the cache counts it; None if it is.

        `is_servable`: some lookup could find it.
        """
        turn, progress = self.turn, self.progress
        outcome = Outcome(
            is_complete=progress.is_complete,
            finish_reasons=tuple(progress.finish_reasons),
            is_fallback=self.is_fallback,
            is_servable=is_servable,
            is_rescued=bool(self.seams),
            size_bytes=progress.size_bytes,
            has_content=progress.has_content,
            is_length_asked=self.cut_at is None
            and (
                turn.kind.output_tokens_default is not None
                or (self.is_cut and ends_as_asked(progress, turn.body, self.demand.choices))
            ),
        )
        refusal = store_refusal(outcome, turn.controls, entry_bytes_max)
        return refusal.value if refusal is not None else None

    def entry(self, chunks: Sequence[Chunk], spent: Spent, ttl_s: int, *, is_findable: bool) -> Entry:
        """The cache entry for this generation, which has ended."""
        progress = self.progress
        labels = {
            "model": self.alias.name,
            "deployment": progress.deployment,
            "cost_microusd": spent.answer_microusd,
            "prompt_tokens": spent.usage.prompt_tokens,
            "completion_tokens": spent.usage.completion_tokens,
            "duration_ms": int(progress.attempt.duration_ms if progress.attempt is not None else 0),
            "has_usage_chunk": int(bool(chunks) and chunks[-1].is_usage_only),
        }
        if spent.baseline_microusd is not None:
            labels["baseline_microusd"] = spent.baseline_microusd
        namespace = self.turn.controls.namespace
        return entry_of(self.fingerprint, chunks, labels, ttl_s=ttl_s, namespace=namespace, is_findable=is_findable)


_NO_PROGRESS = Progress("")


def generation_of(
    turn: Turn,
    identity: Identity,
    alias: Alias,
    fingerprint: Fingerprint,
    warm: dict[str, int],
    lacking: tuple[str, ...] = (),
) -> Generation:
    """The generation of a turn that no stage has seen; parameters as in `Generation`."""
    return Generation(
        turn=turn,
        identity=identity,
        alias=alias,
        serving=alias,
        fingerprint=fingerprint,
        demand=msgspec.structs.replace(turn.demand, operation=turn.kind.name, caller=str(identity.key.id)),
        warm=warm,
        lacking=lacking,
        progress=_NO_PROGRESS,
    )
