"""Identical requests in the air share one generation: a flight has one writer and any number of readers.

It contains no HTTP, money or caches. Invariants: every reader gets every chunk from the first; a reader that leaves takes
nothing from the others; the last reader to leave cancels the generation; a flight ends exactly once, whole or with an
error, and a reader that has seen all chunks of a failed flight gets the error, never a silent end.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from cache import Entry
from gateway.journey.generation import Generation
from gateway.journey.turn import Ended, Turn
from gateway.wire.types import Chunk
from policies import Route


class Flight:
    """One generation and its audience. `deadline` is the latest of all readers', on the clock of `time.perf_counter`; None where
    one of them has none. `leader_ended` is how the reply of its first reader ended."""

    __slots__ = (
        "_is_done", "_on_end", "_readers", "_sleepers", "_task", "chunks", "deadline", "error", "first_at", "generation",
        "leader_ended",
    )  # fmt: skip

    def __init__(self, generation: Generation) -> None:
        self.generation = generation
        self.deadline = generation.turn.deadline
        self.chunks: list[Chunk] = []
        self.first_at: float | None = None  # when the first chunks came, on the clock of time.perf_counter
        self.error: BaseException | None = None
        self.leader_ended = Ended()
        self._on_end: Callable[[], None] | None = None
        self._is_done = False
        self._readers = 0
        self._sleepers: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        return self._is_done

    def take_off(self, generating: Coroutine[Any, Any, None]) -> None:
        """Start the generation in a task of its own: it belongs to the flight, not to the client that asked first."""
        self._task = asyncio.create_task(generating)

    def admit(self, deadline: float | None) -> "Reader":
        """One more reader, from chunk 0; the first one leads. The flight waits for the latest deadline."""
        self._readers += 1
        self.deadline = None if self.deadline is None or deadline is None else max(self.deadline, deadline)
        return Reader(self, is_leader=self._task is None)

    def remaining_ms(self) -> float | None:
        """Milliseconds until the latest deadline; None where a reader has none."""
        return None if self.deadline is None else max(0.0, (self.deadline - time.perf_counter()) * 1000.0)

    def route(self, tried: frozenset[str] = frozenset()) -> Route:
        """The deployments for its generation, ranked now, without those `tried`."""
        generation = self.generation
        return generation.alias.route(generation.turn.demand, generation.warm, self.remaining_ms(), tried)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Everything that has come at once, with one wake-up for each reader."""
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.chunks.extend(chunks)
        if self._sleepers:
            self._wake()

    def finish(self, error: BaseException | None = None) -> None:
        """End the flight; the first call counts. One that failed can't be joined any more; one that ended well can, until
        `retire`: what is asked again while its answer is being stored must not be generated again."""
        if self._is_done:
            return
        self._is_done = True
        self.error = error
        self._wake()
        # decision: flights-until-stored
        if error is not None:
            self.retire()

    def retire(self) -> None:
        """No reader joins from here on."""
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _leave(self) -> None:
        self._readers -= 1
        if self._readers == 0 and not self._is_done and self._task is not None:
            # a flight that is being cancelled leaves the table now, not when the task has unwound
            self.retire()
            self._task.cancel()


class Reader:
    """One client's place in a flight. A class, not an async generator: `close` must work before the first read as well."""

    __slots__ = ("_flight", "_gone", "_is_closed", "_position", "_sleeper", "is_leader", "ready_at")

    def __init__(self, flight: Flight, *, is_leader: bool) -> None:
        self.is_leader = is_leader
        self.ready_at: float | None = None  # when its first chunk was there, on the clock of time.perf_counter
        self._flight = flight
        self._position = 0
        self._is_closed = False
        self._gone: BaseException | None = None
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def generation(self) -> Generation:
        return self._flight.generation

    @property
    def is_at_end(self) -> bool:
        """All chunks of a flight that ended well have been read."""
        flight = self._flight
        return flight.is_done and flight.error is None and self._position == len(flight.chunks)

    async def ready(self) -> None:
        """Until the first chunk exists. Raises the generation's error, if it failed before that."""
        while not self._flight.chunks and not self._flight.is_done:
            await self._sleep()
        if not self._flight.chunks and self._flight.error is not None:
            raise self._flight.error
        self.ready_at = time.perf_counter()

    async def next(self) -> list[Chunk]:
        """All chunks that have come since the last call, at least one; empty at the end. Raises the flight's error after
        its last chunk."""
        flight = self._flight
        while True:
            if self._gone is not None:
                raise self._gone
            if self._position < len(flight.chunks):
                batch = flight.chunks[self._position :]
                self._position = len(flight.chunks)
                return batch
            if flight.is_done:
                if flight.error is not None:
                    raise flight.error
                return []
            await self._sleep()

    async def _sleep(self) -> None:
        if self._gone is not None:
            raise self._gone
        self._sleeper = asyncio.get_running_loop().create_future()
        self._flight._sleepers.append(self._sleeper)
        await self._sleeper
        if self._gone is not None:
            raise self._gone

    def leave(self, reason: BaseException) -> None:
        """Close from outside (the client has gone, its deadline has passed): a read that waits raises `reason`."""
        self._gone = reason
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
        self.close()

    def ended(self, how: Ended) -> None:
        """Say how the reply to this reader's client ended, which is the record's of a flight that this reader leads."""
        if self.is_leader:
            self._flight.leader_ended = how

    def close(self) -> None:
        """Give the place back; the last one out cancels the generation."""
        if not self._is_closed:
            self._is_closed = True
            self._flight._leave()


Key = tuple[bytes, int | None, float | None]


class Flights:
    """The flights in the air, by request, age and error bound: a request for a fresher or surer answer must not be given one
    that was found for a laxer request. A flight that must not be shared is not entered."""

    def __init__(self) -> None:
        self._by_key: dict[Key, Flight] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, key: Key) -> Flight | None:
        return self._by_key.get(key)

    def enter(self, key: Key, flight: Flight) -> None:
        """Let others find this flight until it ends."""
        self._by_key[key] = flight

        def forget() -> None:
            if self._by_key.get(key) is flight:
                del self._by_key[key]

        flight._on_end = forget


class Reply(msgspec.Struct, frozen=True):
    """The reply to one turn: a recorded `entry`, or a place in a flight. `limits` are the headers of its rate limits."""

    turn: Turn
    limits: dict[bytes, bytes]
    entry: Entry | None = None
    reader: Reader | None = None
    looked_up_ms: float = 0.0  # until the entry was found, since the turn began
    degraded: tuple[str, ...] = ()  # of a reply that joined a flight: a leader's are its generation's

    @property
    def is_leading(self) -> bool:
        """It started a generation, which also records the request."""
        return self.reader is not None and self.reader.is_leader

    @property
    def served(self) -> Entry | None:
        """The entry that is replayed, found by stage 4 or by stage 6."""
        return self.entry if self.reader is None else self.reader.generation.semantic.entry

    @property
    def source(self) -> str:
        """exact | semantic | coalesced | miss | bypass."""
        if self.reader is None:
            return "exact"
        return self.reader.generation.source if self.reader.is_leader else "coalesced"

    @property
    def begun_ms(self) -> float | None:
        """From the request's arrival to the first chunk; None where it has not come yet."""
        if self.reader is None:
            return self.looked_up_ms
        ready_at = self.reader.ready_at
        return None if ready_at is None else (ready_at - self.turn.started) * 1000.0
