"""Concurrent identical requests share one generation: a flight is its answer and its audience.

It contains no HTTP, money or caches. Invariants: the last reader to leave cancels the generation; a
flight has all invariants of its `SharedStream`; no request joins a failed flight; a reply is a
recorded answer, or one reader of a flight.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from cache import Entry
from gateway.deployments.alias import Alias
from gateway.journey.generation import Generation
from gateway.journey.masks import MaskedReader
from gateway.journey.outcomes import Looked, SemanticResult
from gateway.journey.shared_stream import Reader, SharedStream
from gateway.journey.storing import chunks_of, kept
from gateway.journey.turn import Ended, Turn
from gateway.masking.answers import Restorer, restored_entry
from gateway.masking.vault import Vault

# after the last reader has left: a deployment counts its tokens at the end of the answer
_USAGE_AWAITED_S = 2.0


class Flight(SharedStream, eq=False, kw_only=True):
    """One generation, its answer and its readers.

    `deadline` is the latest of all readers', in seconds on the clock of `time.perf_counter`; None
    if one of them has none. `leader_ended` is the end of its first reader's reply.
    """

    generation: Generation
    deadline: float | None = None
    leader_ended: Ended = Ended()
    on_retire: Callable[[], None] | None = None  # ends its place in `Flights`
    _task: asyncio.Task[None] | None = None

    def take_off(self, generating: Coroutine[Any, Any, None]) -> None:
        """Start the generation in its own task: it belongs to the flight, not to a client."""
        self._task = asyncio.get_running_loop().create_task(generating)

    def admit(self, deadline: float | None, *, is_stream: bool, vault: Vault | None = None) -> Reader:
        """A new reader, from chunk 0; the first one leads. The flight has the latest `deadline`.

        `is_stream`: its client gets the chunks as they arrive. `vault`: with its values in them.
        """
        self.deadline = None if self.deadline is None or deadline is None else max(self.deadline, deadline)
        reader = Reader(self, is_leader=self._task is None, is_stream=is_stream)
        if vault is not None:
            reader = MaskedReader(self, reader.is_leader, is_stream, restorer=Restorer(vault))
        self.join(reader)
        return reader

    def remaining_ms(self) -> float | None:
        """Milliseconds until the latest deadline; None if a reader has none."""
        return None if self.deadline is None else max(0.0, (self.deadline - time.perf_counter()) * 1000.0)

    def finish(self, error: BaseException | None = None) -> None:
        """End the flight, with `error` if it failed; later calls change nothing.

        No request can join a failed flight. One can join a complete flight until `retire`, so that
        a request that arrives while the answer is being stored is not generated again.
        """
        SharedStream.finish(self, error)
        # decision: flights-until-stored
        if self.error is not None:
            self.retire()

    def retire(self) -> None:
        """Admit no more readers."""
        if self.on_retire is not None:
            self.on_retire()
            self.on_retire = None

    def abandoned(self) -> None:
        """Cancel the generation, once the deployment has counted a complete answer's tokens."""
        if self._task is None:
            return
        # a request that arrives before the task has unwound must not join a cancelled flight
        self.retire()
        progress, loop = self.generation.answered.progress, asyncio.get_running_loop()
        if progress.finish_reasons and progress.usage is None:
            self.resume()
            loop.call_later(_USAGE_AWAITED_S, self._cancel)
        else:
            # after the task's first step: a task that is cancelled before it would not record the flight
            loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.is_done and self._task is not None:
            self._task.cancel()


Key = tuple[bytes, int | None, float | None, str | None]


class Flights:
    """The flights under way, by request, maximum age and error bound.

    The key keeps a request for a fresher or more certain answer from joining a laxer request. A
    flight that must not be shared is not entered.
    """

    def __init__(self) -> None:
        self._by_key: dict[Key, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: Key) -> Flight | None:
        return self._by_key.get(key)

    def enter(self, key: Key, flight: Flight) -> None:
        """Let `find` return `flight` until it retires."""
        self._by_key[key] = flight

        def forget() -> None:
            if self._by_key.get(key) is flight:
                del self._by_key[key]

        flight.on_retire = forget


class Reply(msgspec.Struct, frozen=True):
    """The reply to one turn: the recorded answer in `looked`, or a `reader` of a `flight`.

    `alias` is the configured one that took it. `looked` is the outcome of the turn's own stages 3
    to 5.
    """

    turn: Turn
    alias: Alias
    looked: Looked
    flight: Flight | None = None
    reader: Reader | None = None
    looked_up_ms: float = 0.0  # from the start of the turn until stage 4 was over

    @property
    def is_leading(self) -> bool:
        """Whether it started a generation, which then records the request."""
        return self.reader is not None and self.reader.is_leader

    @property
    def served(self) -> Entry | None:
        """The entry that is replayed, found by stage 4, 5 or 6."""
        return self.looked.entry if self.flight is None else self.flight.generation.looked.entry

    @property
    def shown(self) -> Entry | None:
        """The same as its client gets it: with the values of the client's own request."""
        entry, vault = self.served, self.turn.vault
        return entry if entry is None or vault is None else restored_entry(entry, chunks_of(entry), vault)

    @property
    def kept(self) -> str:
        """Of a recorded answer: `curated`, or `stale` where a newer one is made; else empty."""
        return kept(self.served, is_stale=self.looked.is_stale)

    @property
    def source(self) -> str:
        """exact | semantic | coalesced | miss | bypass."""
        if self.flight is None:
            return "exact" if self.looked.semantic.entry is None else "semantic"
        return self.flight.generation.source if self.is_leading else "coalesced"

    @property
    def media(self) -> str:
        """The content type of a plain answer that has begun, and is no JSON."""
        entry, reader = self.served, self.reader
        if entry is not None:
            return str(entry.labels.get("media", ""))
        return reader.media if reader is not None else ""

    @property
    def semantic_hit(self) -> SemanticResult | None:
        """The semantic hit that is replayed, None of any other reply."""
        semantic = (self.looked if self.flight is None else self.flight.generation.looked).semantic
        return semantic if semantic.entry is not None else None

    @property
    def begun_ms(self) -> float | None:
        """Milliseconds from the start of the turn to the first chunk; None before that chunk."""
        if self.reader is None:
            return self.looked_up_ms
        ready_at = self.reader.ready_at
        return None if ready_at is None else (ready_at - self.turn.started) * 1000.0

    def end(self, how: Ended) -> None:
        """Set how it ended, for the record of a flight that it leads."""
        if self.flight is not None and self.is_leading:
            self.flight.leader_ended = how
