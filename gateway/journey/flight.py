"""Identical requests in the air share one generation: a flight has one writer and any number of readers.

Knows no HTTP, money or caches. Invariants: every reader sees every chunk from the first; a reader that leaves takes
nothing from the others; the last reader to leave cancels the generation; a flight ends exactly once, whole or with an
error, and a reader that has seen all chunks of a failed flight gets the error, never a silent end.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gateway.wire.types import Chunk


class Flight:
    """One generation and its audience. `facts` is what the generation tells of itself for the readers' headers."""

    __slots__ = ("_is_done", "_readers", "_sleepers", "_task", "chunks", "error", "facts", "on_end")

    def __init__(self, facts: Any) -> None:
        self.facts = facts
        self.chunks: list[Chunk] = []
        self.error: BaseException | None = None
        self.on_end: Callable[[], None] | None = None
        self._is_done = False
        self._readers = 0
        self._sleepers: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    @property
    def is_done(self) -> bool:
        return self._is_done

    def take_off(self, generation: Coroutine[Any, Any, None]) -> None:
        """Start the generation in a task of its own: it belongs to the flight, not to the client that asked first."""
        self._task = asyncio.create_task(generation)

    def join(self) -> "Reader":
        """One more reader, from chunk 0."""
        self._readers += 1
        return Reader(self)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Everything that has come at once, with one wake-up for each reader."""
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
        if error is not None:
            self.retire()

    def retire(self) -> None:
        """Nobody joins from here on."""
        if self.on_end is not None:
            self.on_end()
            self.on_end = None

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _leave(self) -> None:
        self._readers -= 1
        if self._readers == 0 and not self._is_done and self._task is not None:
            # nobody joins a flight that is being cancelled: it leaves the table now, not when the task has unwound
            self.retire()
            self._task.cancel()


class Reader:
    """One client's place in a flight. A class, not an async generator: `aclose` must work before the first read as well."""

    __slots__ = ("_flight", "_gone", "_is_closed", "_position", "_sleeper")

    def __init__(self, flight: Flight) -> None:
        self._flight = flight
        self._position = 0
        self._is_closed = False
        self._gone: BaseException | None = None
        self._sleeper: asyncio.Future[None] | None = None

    @property
    def facts(self) -> Any:
        return self._flight.facts

    @property
    def is_at_end(self) -> bool:
        """All chunks of a flight that ended well have been read."""
        flight = self._flight
        return flight.is_done and flight.error is None and self._position == len(flight.chunks)

    async def ready(self) -> None:
        """Until the first chunk exists. Raises what the generation raised, if it failed before that."""
        while not self._flight.chunks and not self._flight.is_done:
            await self._sleep()
        if not self._flight.chunks and self._flight.error is not None:
            raise self._flight.error

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

    def close(self) -> None:
        """Give the place back; the last one out cancels the generation."""
        if not self._is_closed:
            self._is_closed = True
            self._flight._leave()


Key = tuple[bytes, int | None, float | None]


class Flights:
    """The flights in the air, by request, age and error bound: who asks for a fresher or surer answer must not be given one that
    was found for somebody else. A flight that must not be shared is simply not entered."""

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

        flight.on_end = forget
