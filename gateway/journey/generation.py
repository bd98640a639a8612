"""One generation as a value: its turn, its identity, and the outcome of each stage.

It never awaits, and contains no services. Invariants: each outcome is set once, whole, by the method
of its stage; each deployment that generated for it has a row of its own in the ledger.
"""

from collections.abc import Sequence

import msgspec

from cache import Entry, Fingerprint
from cache.eligibility import CUT
from gateway.accounts import Identity, LedgerRow
from gateway.backends.base import BackendRequest
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.progress import Attempt, Progress
from gateway.journey.rescue import Said, Seam, rest_of
from gateway.journey.semantic import SemanticResult, draft_of
from gateway.journey.storing import deployment_of, ends_as_asked, entry_of, refusal_of
from gateway.journey.turn import Turn
from gateway.wire.types import Chunk, Usage
from policies import Hold, Route, Tokens

_UNSTREAMED = frozenset({"best_of", "prompt_logprobs"})  # servers refuse to stream with these


class Spent(msgspec.Struct, frozen=True):
    """The tokens of the answer of a generation that has ended, and the cost of all its tries.

    `answer_microusd` is the answer's own share of the cost, and `charged_tokens` are those of all
    tries. `is_estimated`: the deployment did not report its tokens. `claimed`: the tokens that it
    reported, where they were more than the request allowed.
    """

    usage: Usage
    cost_microusd: int
    answer_microusd: int
    charged_tokens: int
    is_estimated: bool = False
    claimed: Usage | None = None


class Booked(msgspec.Struct, frozen=True):
    """A row for the ledger, and the hold that it settles."""

    hold: Hold
    row: LedgerRow


class Step(msgspec.Struct, frozen=True):
    """An alias that could not answer, and why: the next fallback is asked."""

    name: str
    reason: str


class Try(msgspec.Struct, frozen=True):
    """A deployment that was tried, and its answer so far."""

    deployment: Deployment
    progress: Progress

    @property
    def is_charged(self) -> bool:
        # decision: abandoned-prompts-are-charged
        return self.progress.has_begun or self.progress.is_abandoned


class Generation:
    """One generation.

    `warm` are the prompt tokens that deployments saw last, by name. `degraded` names the parts that
    failed and that the request did without.
    """

    __slots__ = (
        "_degraded",
        "_first_choice_model",
        "_near",
        "_tries",
        "_whole_usage",
        "alias",
        "demand",
        "fingerprint",
        "headers",
        "hold",
        "identity",
        "more_holds",
        "queued_ms",
        "route",
        "seams",
        "semantic",
        "serving",
        "spent",
        "steps",
        "store",
        "stored",
        "turn",
        "warm",
        "why",
    )  # fmt: skip

    def __init__(
        self,
        turn: Turn,
        identity: Identity,
        alias: Alias,
        fingerprint: Fingerprint,
        warm: dict[str, int],
        degraded: tuple[str, ...],
    ) -> None:
        self.turn = turn
        self.identity = identity
        self.alias = alias
        self.serving = alias  # the alias or the fallback whose deployments are tried
        self.steps: list[Step] = []  # the aliases that could not answer
        self.fingerprint = fingerprint
        self.warm = warm
        self.semantic = SemanticResult()
        self.demand = turn.demand  # with what deployments said of the prompt's length
        self.hold: Hold | None = None
        self.more_holds: list[Hold] = []  # for what tries may cost beyond the first hold
        self.headers: dict[bytes, bytes] | None = None  # the tokens' rate limits', once taken
        self.route: Route | None = None  # the first one, with each rejection
        self.why = ""  # why the deployment that was tried last was chosen
        self.queued_ms = 0.0  # waited for a place, as every deployment was full
        self.spent: Spent | None = None
        self.stored: Entry | None = None  # the entry that was to be stored
        self.store = ""  # `stored`, or the reason against it
        self._degraded = degraded
        self._near: Entry | None = None
        self._first_choice_model = ""
        self.seams: list[Seam] = []  # where another deployment went on with the answer
        self._whole_usage: Usage | None = None  # of an answer with seams
        self._tries: list[Try] = []

    # -- the outcomes of the stages ----------------------------------------------------------------

    def looked_up(self, result: SemanticResult) -> None:
        """6. Set the semantic hit, or the reason why there is none."""
        self.semantic = result

    def reserved(self, hold: Hold) -> None:
        """7. Set the hold."""
        self.hold = hold

    def admitted(self, headers: dict[bytes, bytes]) -> None:
        """7. Set `headers`, which describe the rate limits after the tokens were taken."""
        self.headers = headers

    def found_near(self, entry: Entry | None) -> None:
        """7. Set the answer to the nearest prompt, which a local engine may use as a draft."""
        self._near = entry

    def routed(self, route: Route) -> None:
        """8. Set the route before the first try."""
        self.route = route
        self._first_choice_model = self.serving.first_choice_model(self.turn.demand, self.warm, route)

    def fell_back(self, alias: Alias, reason: str) -> None:
        """8. Set the fallback whose deployments are tried next, and why the alias before it cannot answer."""
        self.steps.append(Step(self.serving.name, reason))
        self.serving = alias

    def chosen(self, why: str) -> None:
        """9. Set the reason why the deployment that is tried next was ranked first."""
        self.why = why

    def begin_try(
        self, deployment: Deployment, *, is_alone: bool, said: Said | None = None
    ) -> tuple[BackendRequest, Progress]:
        """9. The request to `deployment`, and the empty progress of its answer.

        `is_alone`: no other deployment can take over. `said`: the text that it goes on with.
        """
        turn = self.turn
        # decision: always-stream
        is_stream = turn.is_stream or (len(self.serving.deployments) > 1 and _UNSTREAMED.isdisjoint(turn.body))
        is_bounded = any(hold.held for hold in self._holds)
        draft = draft_of(self._near) if deployment.settings.engine else ""
        body = self.serving.with_max_tokens(deployment, turn.demand, turn.body) if is_bounded else turn.body
        request = BackendRequest(
            body=body if said is None else rest_of(body, said),
            is_stream=is_stream,
            salt=self.fingerprint.partition,
            request_id=turn.arrival.request_id,
            ttft_timeout_s=deployment.ttft_timeout_s(turn.demand.prompt_tokens, is_alone=is_alone),
            idle_timeout_s=deployment.settings.idle_timeout_ms / 1000.0,
            draft=draft,
            kind=turn.kind,
            model=deployment.model if self.serving.is_pattern else "",
            prefix="" if said is None else said.text,
        )
        progress = Progress(deployment.name, self._near.id if draft and self._near is not None else "")
        progress.prefix_tokens = 0 if said is None else said.tokens
        self._tries.append(Try(deployment, progress))
        return request, progress

    def went_on(self, seam: Seam) -> None:
        """9. Set where another deployment goes on with the answer."""
        self.seams.append(seam)

    def whole_usage(self, usage: Usage | None) -> None:
        """9. Set the tokens of an answer with seams, as its clients see them."""
        self._whole_usage = usage

    def must_fit(self, context_tokens: int) -> None:
        """9. Set that the request is longer than a context of `context_tokens`."""
        output = self.demand.output_tokens_max if self.demand.is_output_asked else 1
        known = self.demand.prompt_tokens_min or 0
        longer = max(known, context_tokens - output + 1)
        self.demand = msgspec.structs.replace(self.demand, prompt_tokens_min=longer)

    def covered(self, hold: Hold) -> None:
        """9. Add a hold for what the next try may cost beyond the others."""
        self.more_holds.append(hold)

    def beyond_holds(self, deployment: Deployment) -> int:
        """The µUSD that a try at `deployment` may cost beyond all holds, after what is charged."""
        worst = self.serving.worst_case_at(deployment, self.turn.demand)
        return sum(map(self._cost, self._charged)) + worst - sum(hold.amount_microusd for hold in self._holds)

    def end(self) -> list[Booked]:
        """10. Fix the tokens and the cost. Returns the rows to settle; none if nothing is charged.

        The last row settles the hold; rows of earlier tries have ids of their own.
        """
        charged = self._charged if self.hold is not None else []
        booked = []
        for number, one in enumerate(charged, 1):
            assert self.hold is not None
            hold = self.hold
            if number < len(charged):
                hold = Hold(f"{hold.id}.{number}", hold.team_id, hold.at_ms)
            booked.append(Booked(hold, self._ledger_row(one, hold)))
        is_counted = any(one.progress.has_begun for one in charged)
        rows = [one.row for one in booked]
        reported = self.progress.usage
        usage = self._usage(self._tries[-1]) if self._tries else Usage(0, 0)
        self.spent = Spent(
            usage=self._whole_usage or usage,
            cost_microusd=sum(row.cost_microusd for row in rows) if is_counted else 0,
            answer_microusd=rows[-1].cost_microusd if is_counted else 0,
            charged_tokens=sum(row.prompt_tokens + row.completion_tokens for row in rows),
            is_estimated=reported is None,
            claimed=reported if usage is not reported else None,
        )
        return booked

    def recorded(self, entry: Entry | None, store: str) -> None:
        """10. Set the entry made of the answer, if any, and `stored` or the reason against it."""
        self.stored = entry
        self.store = store

    # -- derived from the outcomes -----------------------------------------------------------------

    @property
    def source(self) -> str:
        """semantic | miss | bypass."""
        if self.semantic.entry is not None:
            return "semantic"
        controls = self.turn.controls
        return "bypass" if controls.no_cache or controls.no_store else "miss"

    @property
    def progress(self) -> Progress:
        """The progress at the deployment that was tried last; empty if none was tried."""
        return self._tries[-1].progress if self._tries else _NO_PROGRESS

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple([one.progress.attempt for one in self._tries if one.progress.attempt is not None])

    @property
    def tries(self) -> int:
        """The number of deployments that were tried; one that was tried again counts again."""
        return len(self._tries)

    @property
    def has_begun(self) -> bool:
        """Whether a deployment has generated something for it."""
        return any(one.progress.has_begun for one in self._tries)

    @property
    def is_beyond_first(self) -> bool:
        """Whether the first hold may be too small for the next try."""
        return self.serving is not self.alias or self.has_begun

    @property
    def _charged(self) -> list[Try]:
        return [one for one in self._tries if one.is_charged]

    @property
    def _holds(self) -> list[Hold]:
        return [*([self.hold] if self.hold is not None else []), *self.more_holds]

    @property
    def answered_by(self) -> str:
        """The deployment that generated the answer, recorded or new; empty before it has begun."""
        if self.semantic.entry is not None:
            return deployment_of(self.semantic.entry)
        return self.progress.deployment if self.progress.has_begun else ""

    @property
    def degraded(self) -> tuple[str, ...]:
        return self._degraded + self.semantic.degraded

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
        kind, controls = self.turn.kind, self.turn.controls
        return refusal_of(
            self.progress,
            kind,
            controls,
            entry_bytes_max,
            is_fallback=self.is_fallback,
            is_servable=is_servable,
            is_rescued=bool(self.seams),
            is_cut_as_asked=self.is_cut and ends_as_asked(self.progress, self.turn.body, self.demand.choices),
        )

    def entry(self, chunks: Sequence[Chunk], ttl_s: int, *, is_findable: bool) -> Entry:
        """The cache entry for this generation, which has ended."""
        assert self.spent is not None
        labels = {
            "model": self.alias.name,
            "deployment": self.progress.deployment,
            "cost_microusd": self.spent.answer_microusd,
            "prompt_tokens": self.spent.usage.prompt_tokens,
            "completion_tokens": self.spent.usage.completion_tokens,
            "duration_ms": int(self.progress.elapsed_ms()),
        }
        namespace = self.turn.controls.namespace
        return entry_of(self.fingerprint, chunks, labels, ttl_s=ttl_s, namespace=namespace, is_findable=is_findable)

    def _usage(self, one: Try) -> Usage:
        """The tokens that the backend counted, else an estimate: a cut answer costs money, too.

        Neither is more than the request allowed: the context window, and the answers asked for.
        """
        progress, deployment, demand = one.progress, one.deployment, self.turn.demand
        output_max = max(self.alias.output_max(deployment, demand) * demand.choices, progress.content_chunks)
        if progress.usage is not None:
            context_max = max(deployment.context_tokens_max or 0, demand.prompt_tokens_max + progress.prefix_tokens)
            return progress.usage.within(context_max, output_max)
        # decision: abandoned-prompts-are-charged
        if not (progress.has_begun or progress.is_abandoned):
            return Usage(0, 0)
        may_reason = progress.has_begun if deployment.may_reason is None else deployment.may_reason
        said = progress.completion_tokens_at_least(deployment.tokens_per_ms if may_reason else 0.0)
        return Usage(demand.prompt_tokens + progress.prefix_tokens, min(said, output_max))

    def _cost(self, one: Try) -> int:
        return one.deployment.cost(self.turn.demand, tokens_of(self._usage(one)))

    def _ledger_row(self, one: Try, hold: Hold) -> LedgerRow:
        """A prompt is charged even if every client leaves before the first token."""
        usage = self._usage(one)
        return LedgerRow(
            id=hold.id,
            # decision: hold-keeps-its-moment
            at_ms=hold.at_ms,
            request_id=self.turn.arrival.request_id,
            team_id=self.identity.team.id,
            key_id=self.identity.key.id,
            alias=self.turn.alias,
            deployment=one.deployment.name,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            cost_microusd=one.deployment.cost(self.turn.demand, tokens_of(usage)),
            kind=self.turn.arrival.operation,
            usage_estimated=one.progress.usage is None,
            cache_write_tokens=usage.cache_write_tokens,
            cache_write_1h_tokens=usage.cache_write_1h_tokens,
            audio_prompt_tokens=usage.audio_prompt_tokens,
            image_prompt_tokens=usage.image_prompt_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            audio_completion_tokens=usage.audio_completion_tokens,
            image_completion_tokens=usage.image_completion_tokens,
            tool_calls=usage.tool_calls,
        )


def tokens_of(usage: Usage) -> Tokens:
    """`usage` as prices count it."""
    return Tokens(
        prompt=usage.prompt_tokens,
        completion=usage.completion_tokens,
        cached=usage.cached_tokens,
        cache_write=usage.cache_write_tokens,
        cache_write_1h=usage.cache_write_1h_tokens,
        audio_prompt=usage.audio_prompt_tokens,
        image_prompt=usage.image_prompt_tokens,
        reasoning=usage.reasoning_tokens,
        audio_completion=usage.audio_completion_tokens,
        image_completion=usage.image_completion_tokens,
        tool_calls=usage.tool_calls,
    )


_NO_PROGRESS = Progress("")
