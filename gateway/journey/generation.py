"""One generation as a value: what was asked, and the outcome of each stage.

It never awaits. Invariant: a stage sets its outcome whole; stages 4, 5 and 6 set `looked` in turn.
"""

import msgspec

from cache import Entry, Trial
from gateway.accounts import Identity
from gateway.deployments.alias import Alias
from gateway.deployments.progress import Progress
from gateway.journey.holds import Holds
from gateway.journey.outcomes import Answered, Looked, Stored
from gateway.journey.record import Record
from gateway.journey.storing import deployment_of
from gateway.journey.turn import Turn


class Compared(msgspec.Struct, frozen=True, eq=False):
    """The request for which a fresh answer is compared with cached ones: its record and its decision. Of
    a hit that is checked: the answer that was `served`, and the verifier that had allowed it.
    """

    record: Record
    trial: Trial
    served: Entry | None = None
    verified_by: str = ""


class Generation(msgspec.Struct, eq=False):
    """One generation, begun by `generation_of`. `checks` has the hit that it is made to check."""

    turn: Turn
    identity: Identity
    alias: Alias
    looked: Looked
    holds: Holds
    answered: Answered
    stored: Stored = Stored()
    checks: Compared | None = None
    blocks: tuple[bytes, ...] | None = None  # of its prompt, once replicas may have read some
    # how long these stages took, in milliseconds: 3 and 4, 6 without another worker's answer, 7, 10
    exact_ms: float = 0.0
    semantic_ms: float = 0.0
    reserve_ms: float = 0.0
    record_ms: float = 0.0

    @property
    def source(self) -> str:
        """semantic | coalesced | miss | bypass."""
        if self.looked.entry is not None:
            return "coalesced" if self.looked.is_from_elsewhere else "semantic"
        controls = self.turn.controls
        return "bypass" if controls.no_cache or controls.no_store else "miss"

    @property
    def deployment(self) -> str:
        """The deployment that generated the answer, recorded or new; empty before it has begun."""
        entry, progress = self.looked.entry, self.answered.progress
        return deployment_of(entry) if entry is not None else progress.deployment if progress.has_begun else ""


_NO_PROGRESS = Progress("")


def generation_of(turn: Turn, identity: Identity, alias: Alias, looked: Looked, holds: Holds) -> Generation:
    """The generation of a turn for which stages 2 to 5 are over."""
    demand = msgspec.structs.replace(turn.demand, operation=turn.kind.name, caller=str(identity.key.id))
    answered = Answered(serving=alias, demand=demand, progress=_NO_PROGRESS)
    return Generation(turn=turn, identity=identity, alias=alias, looked=looked, holds=holds, answered=answered)
