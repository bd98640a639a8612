"""One generation as a value: whom it serves, what it has produced, what it cost.

Knows no services: nothing here awaits. `pipeline` fills a job stage by stage; what follows from it is computed here.
"""

import time
from typing import Protocol

import msgspec

from cache import Entry, Fingerprint, HitKind, Trial
from gateway.accounts import Identity, LedgerRow
from gateway.deployments.fleet import Alias, Deployment
from gateway.deployments.progress import Generated
from gateway.journey.flight import Flight, Reader
from gateway.journey.record import Attempt, Record
from gateway.journey.storing import entry_of
from gateway.journey.turn import Turn
from gateway.wire.types import Usage
from policies import Hold, Tokens


class Facts(msgspec.Struct):
    """What a flight tells of itself for its readers' headers and records."""

    kind: HitKind | None = None  # SEMANTIC where the generation turned out to be a replay
    similarity: float | None = None
    deployment: str = ""
    entry: Entry | None = None
    deadline: float | None = (
        None  # the latest of all readers', on the clock of time.perf_counter; None: somebody has none
    )
    usage: Usage | None = None  # once it has ended
    cost_microusd: int = 0


class Answer(msgspec.Struct, frozen=True):
    """A reply that has begun: a recorded entry, or a reader of a flight whose first chunk exists."""

    kind: HitKind | None  # None: generated for this request
    begun_ms: float  # from the request's arrival to its first chunk
    entry: Entry | None = None
    reader: Reader | None = None


class Job(msgspec.Struct):
    """One generation: the turn that started it, the flight it serves, and what has happened so far."""

    turn: Turn
    identity: Identity
    alias: Alias
    flight: Flight
    facts: Facts
    fingerprint: Fingerprint
    warm: dict[str, int]
    hold: Hold | None = None
    deployment: Deployment | None = None
    first_choice_model: str = ""
    generated: Generated = msgspec.field(default_factory=Generated)
    attempts: list[Attempt] = []
    has_taken_tokens: bool = False  # from a rate limit: to be corrected when it is known how many they were
    trial: Trial | None = None  # what the semantic decision was made of, for the verdict that may follow
    near: Entry | None = None  # what was answered to the nearest prompt: a draft for who can use one
    is_abandoned: bool = False  # everybody left while a deployment was at work

    def remaining_ms(self) -> float | None:
        """Until nobody waits any more; None where somebody has all the time there is."""
        deadline = self.facts.deadline
        return None if deadline is None else max(0.0, (deadline - time.perf_counter()) * 1000.0)

    @property
    def is_fallback(self) -> bool:
        """Another model than that of the first choice answered."""
        return self.deployment is not None and self.first_choice_model not in ("", self.deployment.model)

    @property
    def usage(self) -> Usage:
        """Tokens as the backend counted them; estimated where it never said: what was cut short still cost something."""
        made = self.generated
        return made.usage or Usage(
            prompt_tokens=self.turn.ask.prompt_tokens if made.has_begun or self.is_abandoned else 0,
            completion_tokens=made.content_chunks,
        )

    def ledger_row(self) -> LedgerRow | None:
        """What is to be paid; None where nothing was. A prompt that was read for nobody is paid for as well."""
        if self.hold is None or self.deployment is None or not (self.generated.has_begun or self.is_abandoned):
            return None
        usage = self.usage
        tokens = Tokens(usage.prompt_tokens, usage.completion_tokens, min(usage.cached_tokens, usage.prompt_tokens))
        return LedgerRow(
            id=self.hold.id,
            at_ms=self.hold.at_ms,
            request_id=self.turn.record.request_id,
            team_id=self.identity.team.id,
            key_id=self.identity.key.id,
            alias=self.alias.name,
            deployment=self.deployment.name,
            prompt_tokens=tokens.prompt,
            cached_tokens=tokens.cached,
            completion_tokens=tokens.completion,
            cost_microusd=self.deployment.price.cost(tokens),
            kind=self.turn.record.route,
        )

    def entry(self, ttl_s: int, *, is_by_meaning: bool) -> Entry:
        """What the cache keeps of it; without its text where nobody may find it by meaning, so that nobody embeds it."""
        turn = self.turn
        return entry_of(
            self.fingerprint,
            self.flight.chunks,
            self.generated,
            self.usage,
            turn.record,
            ttl_s=ttl_s,
            namespace=turn.controls.namespace,
            is_by_meaning=is_by_meaning,
        )


class Learner(Protocol):
    """Is told of every generation that a lookup by meaning came before, or that went past the cache; never awaits or raises."""

    def recorded(self, job: Job, stored: Entry | None) -> None: ...


def count_saved(record: Record, entry: Entry | None, facts: Facts | None) -> None:
    """What a reply that was not generated for this request had cost when it was."""
    if entry is not None:
        labels = entry.labels
        record.saved_microusd = int(labels.get("cost_microusd", 0))
        record.prompt_tokens = int(labels.get("prompt_tokens", 0))
        record.completion_tokens = int(labels.get("completion_tokens", 0))
        record.saved_ms = max(0.0, float(labels.get("duration_ms", 0)) - record.duration_ms)
    elif facts is not None and facts.usage is not None:
        record.saved_microusd = facts.cost_microusd
        record.prompt_tokens, record.completion_tokens = facts.usage.prompt_tokens, facts.usage.completion_tokens
