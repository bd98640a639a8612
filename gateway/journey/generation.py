"""One generation as a value: its turn, its identity, and the outcome of each stage.

It never awaits, and contains no services. Invariant: each outcome is set once, whole, by the method
of its stage.
"""

from collections.abc import Sequence

import msgspec

from cache import Entry, Fingerprint
from gateway.accounts import Identity, LedgerRow
from gateway.backends.base import BackendRequest
from gateway.deployments.fleet import Alias, Deployment
from gateway.deployments.progress import Attempt, Progress
from gateway.journey.semantic import SemanticResult, draft_of
from gateway.journey.storing import deployment_of, entry_of, refusal_of
from gateway.journey.turn import Turn
from gateway.wire.types import Chunk, Usage
from policies import Hold, Route, Tokens

_UNSTREAMED = frozenset({"best_of", "prompt_logprobs"})  # servers refuse to stream with these
# a whole answer has no bytes until it is complete; the official SDKs wait this long by default
_WHOLE_TIMEOUT_S = 600.0


class Spent(msgspec.Struct, frozen=True):
    """The tokens of a generation that has ended, and its cost.

    `is_estimated`: the deployment did not report its tokens.
    """

    usage: Usage
    cost_microusd: int
    is_estimated: bool = False


class Generation:
    """One generation.

    `warm` are the prompt tokens that deployments saw last, by name. `degraded` names the parts that
    failed and that the request did without.
    """

    __slots__ = (
        "_degraded", "_first_choice_model", "_near", "_tries", "alias", "fingerprint", "headers", "hold", "identity", "route",
        "semantic", "spent", "store", "stored", "turn", "warm", "why",
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
        self.fingerprint = fingerprint
        self.warm = warm
        self.semantic = SemanticResult()
        self.hold: Hold | None = None
        self.headers: dict[bytes, bytes] | None = None  # the tokens' rate limits', once taken
        self.route: Route | None = None  # the first one, with each rejection
        self.why = ""  # why the deployment that was tried last was chosen
        self.spent: Spent | None = None
        self.stored: Entry | None = None  # the entry that was to be stored
        self.store = ""  # `stored`, or the reason against it
        self._degraded = degraded
        self._near: Entry | None = None
        self._first_choice_model = ""
        self._tries: list[Progress] = []

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
        self._first_choice_model = self.alias.first_choice_model(self.turn.demand, self.warm, route)

    def chosen(self, why: str) -> None:
        """9. Set the reason why the deployment that is tried next was ranked first."""
        self.why = why

    def begin_try(self, deployment: Deployment, *, is_alone: bool) -> tuple[BackendRequest, Progress]:
        """9. The request to `deployment`, and the empty progress of its answer.

        `is_alone`: no other deployment can take over.
        """
        turn = self.turn
        # decision: always-stream
        is_stream = turn.is_stream or (len(self.alias.deployments) > 1 and _UNSTREAMED.isdisjoint(turn.body))
        is_bounded = self.hold is not None and bool(self.hold.held)
        draft = draft_of(self._near) if deployment.settings.engine else ""
        request = BackendRequest(
            body=self.alias.with_max_tokens(deployment, turn.demand, turn.body) if is_bounded else turn.body,
            is_stream=is_stream,
            salt=self.fingerprint.partition,
            request_id=turn.arrival.request_id,
            ttft_timeout_s=deployment.ttft_timeout_s(turn.demand.prompt_tokens, is_alone=is_alone),
            idle_timeout_s=deployment.settings.idle_timeout_ms / 1000.0 if is_stream else _WHOLE_TIMEOUT_S,
            draft=draft,
            kind=turn.kind,
            model=deployment.model if self.alias.is_pattern else "",
        )
        progress = Progress(deployment.name, self._near.id if draft and self._near is not None else "")
        self._tries.append(progress)
        return request, progress

    def end(self) -> LedgerRow | None:
        """10. Fix the tokens and the cost. Returns the row to settle; None if there is none."""
        row = self._ledger_row()
        is_counted = row is not None and self.progress.has_begun
        cost_microusd = row.cost_microusd if row is not None and is_counted else 0
        self.spent = Spent(self._usage(), cost_microusd, self.progress.usage is None)
        return row

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
        return self._tries[-1] if self._tries else _NO_PROGRESS

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return tuple([progress.attempt for progress in self._tries if progress.attempt is not None])

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
        model = self.alias.deployments[self.progress.deployment].model if self._tries else ""
        return bool(self._tries) and self._first_choice_model not in ("", model)

    def store_refusal(self, entry_bytes_max: int, *, is_servable: bool) -> str | None:
        """The reason why the answer is not stored, as the cache counts it; None if it is.

        `is_servable`: some lookup could find it.
        """
        kind, controls = self.turn.kind, self.turn.controls
        return refusal_of(
            self.progress, kind, controls, entry_bytes_max, is_fallback=self.is_fallback, is_servable=is_servable
        )

    def entry(self, chunks: Sequence[Chunk], ttl_s: int, *, is_findable: bool) -> Entry:
        """The cache entry for this generation, which has ended."""
        assert self.spent is not None
        labels = {
            "model": self.alias.name,
            "deployment": self.progress.deployment,
            "cost_microusd": self.spent.cost_microusd,
            "prompt_tokens": self.spent.usage.prompt_tokens,
            "completion_tokens": self.spent.usage.completion_tokens,
            "duration_ms": int(self.progress.elapsed_ms()),
        }
        namespace = self.turn.controls.namespace
        return entry_of(self.fingerprint, chunks, labels, ttl_s=ttl_s, namespace=namespace, is_findable=is_findable)

    def _usage(self) -> Usage:
        """The tokens that the backend counted, else an estimate: a cut answer costs money, too."""
        progress = self.progress
        return progress.usage or Usage(
            # decision: abandoned-prompts-are-charged
            prompt_tokens=self.turn.demand.prompt_tokens if progress.has_begun or progress.is_abandoned else 0,
            completion_tokens=progress.content_chunks,
        )

    def _ledger_row(self) -> LedgerRow | None:
        """A prompt is charged even if every client leaves before the first token."""
        progress = self.progress
        if self.hold is None or not (progress.has_begun or progress.is_abandoned):
            return None
        usage = self._usage()
        tokens = Tokens(usage.prompt_tokens, usage.completion_tokens, min(usage.cached_tokens, usage.prompt_tokens))
        return LedgerRow(
            id=self.hold.id,
            # decision: hold-keeps-its-moment
            at_ms=self.hold.at_ms,
            request_id=self.turn.arrival.request_id,
            team_id=self.identity.team.id,
            key_id=self.identity.key.id,
            alias=self.turn.alias,
            deployment=progress.deployment,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
            cost_microusd=self.alias.deployments[progress.deployment].price.cost(tokens),
            kind=self.turn.arrival.operation,
            usage_estimated=progress.usage is None,
        )


_NO_PROGRESS = Progress("")
