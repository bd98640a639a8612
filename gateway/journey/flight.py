"""Concurrent identical requests share one generation: a flight has one writer and many readers.

It contains no HTTP, money or caches. Invariants: every reader gets every chunk from the first; a
reader that leaves does not affect the others; the last reader to leave cancels the generation; a
flight ends exactly once, complete or with an error; a reader that has read all chunks of a failed
flight gets the error, never a silent end; an answer begins again only for readers whose clients
have no byte of it. A reader gets a bounded number of bytes at a time, and the generation is held up
while every reader's client is far behind, never for one that is slower than another.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from cache import Entry
from gateway.exceptions import fresh
from gateway.journey.generation import Generation
from gateway.journey.turn import Ended, Turn
from gateway.wire.types import Chunk, size_of
from policies import Route

# after the last reader has left: a deployment counts its tokens at the end of the answer
_USAGE_AWAITED_S = 2.0
# of an answer that another worker is making
_PATIENCE_TIMES, _PATIENCE_MS_MAX, _EXPECTED_MS = 2.0, 20_000.0, 5_000.0
# of an answer, unread by the reader that is furthest; more is not taken from the deployment
BEHIND_BYTES_MAX = 128 << 10
_BATCH_BYTES = 64 << 10  # that a reader is given at a time


class Flight(msgspec.Struct, eq=False):
    """One generation and its readers.

    `deadline` is the latest of all readers', in seconds on the clock of `time.perf_counter`; None
    if one of them has none. `leader_ended` is the end of its first reader's reply.
    """

    generation: Generation
    deadline: float | None = None
    chunks: list[Chunk] = []
    size_bytes: int = 0  # of `chunks`
    taken_bytes: int = 0  # by the reader that is furthest
    first_at: float | None = None  # the first chunks' arrival, by time.perf_counter
    error: BaseException | None = None
    leader_ended: Ended = Ended()
    is_done: bool = False
    _on_end: Callable[[], None] | None = None
    _caught_up: asyncio.Future[None] | None = None
    _readers: "list[Reader]" = []
    _sleepers: list[asyncio.Future[None]] = []
    _task: asyncio.Task[None] | None = None

    def take_off(self, generating: Coroutine[Any, Any, None]) -> None:
        """Start the generation in its own task: it belongs to the flight, not to a client."""
        self._task = asyncio.get_running_loop().create_task(generating)

    def admit(self, deadline: float | None, *, is_stream: bool) -> "Reader":
        """A new reader, from chunk 0; the first one leads. The flight has the latest `deadline`.

        `is_stream`: its client gets the chunks as they arrive.
        """
        self.deadline = None if self.deadline is None or deadline is None else max(self.deadline, deadline)
        reader = Reader(self, self.generation, is_leader=self._task is None, is_stream=is_stream)
        self._readers.append(reader)
        if not is_stream:
            self._resume()
        return reader

    def remaining_ms(self) -> float | None:
        """Milliseconds until the latest deadline; None if a reader has none."""
        return None if self.deadline is None else max(0.0, (self.deadline - time.perf_counter()) * 1000.0)

    @property
    def has_left(self) -> bool:
        """Whether the client of a reader has begun to get the chunks."""
        return any(reader.is_stream and reader.ready_at is not None for reader in self._readers)

    def route(self, tried: frozenset[str] = frozenset(), needs: frozenset[str] = frozenset()) -> Route:
        """The current ranking of the deployments for its generation, without those in `tried`.

        `needs` are further capabilities that a deployment needs for it.
        """
        generation, demand = self.generation, self.generation.demand
        if needs:
            demand = msgspec.structs.replace(demand, needs=demand.needs | needs)
        return generation.serving.route(demand, generation.warm, self.remaining_ms(), tried)

    def patience_s(self) -> float:
        """How long to wait for the answer that another worker is making, in seconds.

        Twice the time that the first choice is expected to take, less the time that passed, and no
        longer than leaves it that time before the latest deadline.
        """
        ranked, elsewhere_ms, remaining_ms = (
            self.route().ranked,
            self.generation.elsewhere_ms or 0.0,
            self.remaining_ms(),
        )
        expected_ms = ranked[0].total_ms if ranked else _EXPECTED_MS
        patience_ms = min(_PATIENCE_TIMES * expected_ms, _PATIENCE_MS_MAX) - elsewhere_ms
        return (patience_ms if remaining_ms is None else min(patience_ms, remaining_ms - expected_ms)) / 1000.0

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add `chunks` that arrived together, with one wake-up for each reader."""
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.chunks.extend(chunks)
        self.size_bytes += size_of(chunks)
        if self._sleepers:
            self._wake()

    def held_up(self) -> "asyncio.Future[None] | None":
        """A future to await before more is taken from the deployment; None if a reader needs more.

        A client that gets the answer whole needs all of it.
        """
        is_behind = self.size_bytes - self.taken_bytes > BEHIND_BYTES_MAX
        if not is_behind or not self._readers or not all(reader.is_stream for reader in self._readers):
            return None
        self._caught_up = asyncio.get_running_loop().create_future()
        return self._caught_up

    def _resume(self) -> None:
        if self._caught_up is not None and not self._caught_up.done():
            self._caught_up.set_result(None)
        self._caught_up = None

    def _took(self, taken_bytes: int) -> None:
        """A reader has taken `taken_bytes` in all."""
        if taken_bytes > self.taken_bytes:
            self.taken_bytes = taken_bytes
            if self._caught_up is not None and self.size_bytes - taken_bytes <= BEHIND_BYTES_MAX // 2:
                self._resume()

    def restart(self, error: BaseException) -> bool:
        """Withdraw all chunks, so that another answer can take their place.

        A reader whose client has begun to get them ends with `error`. Returns False if no other
        reader is left; then nothing changes.
        """
        begun = [reader for reader in self._readers if reader.is_stream and reader.ready_at is not None]
        if len(begun) == len(self._readers):
            return False
        for reader in begun:
            reader.cut(error)
        self.chunks = []
        self.size_bytes = self.taken_bytes = 0
        self.first_at = None
        return True

    def finish(self, error: BaseException | None = None) -> None:
        """End the flight, with `error` if it failed; later calls change nothing.

        No request can join a failed flight. One can join a complete flight until `retire`, so that
        a request that arrives while the answer is being stored is not generated again.
        """
        if self.is_done:
            return
        self.is_done = True
        self.error = error
        self._wake()
        # decision: flights-until-stored
        if error is not None:
            self.retire()

    def retire(self) -> None:
        """Admit no more readers."""
        if self._on_end is not None:
            self._on_end()
            self._on_end = None

    def _wake(self) -> None:
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(None)

    def _leave(self, reader: "Reader") -> None:
        self._readers.remove(reader)
        self.taken_bytes = max([one.taken_bytes for one in self._readers]) if self._readers else 0
        if not self._readers and not self.is_done and self._task is not None:
            # a request that arrives before the task has unwound must not join a cancelled flight
            self.retire()
            progress, loop = self.generation.progress, asyncio.get_running_loop()
            if progress.finish_reasons and progress.usage is None:
                self._resume()
                loop.call_later(_USAGE_AWAITED_S, self._cancel)
            else:
                # after the task's first step: a task that is cancelled before it would not record the flight
                loop.call_soon(self._cancel)

    def _cancel(self) -> None:
        if not self.is_done and self._task is not None:
            self._task.cancel()


class Reader(msgspec.Struct, eq=False):
    """One client's place in a flight.

    No async generator, because `close` must also work before the first read.
    """

    _flight: Flight
    generation: Generation
    is_leader: bool
    is_stream: bool
    ready_at: float | None = None  # when it had its first chunk, by time.perf_counter
    taken_bytes: int = 0
    _position: int = 0
    _rest: list[Chunk] = []  # of an answer that was withdrawn
    _is_closed: bool = False
    _gone: BaseException | None = None
    _sleeper: asyncio.Future[None] | None = None

    @property
    def is_at_end(self) -> bool:
        """Whether the flight is complete, and all its chunks have been read."""
        flight = self._flight
        return flight.is_done and flight.error is None and self._position == len(flight.chunks)

    @property
    def media(self) -> str:
        """The type of the first chunk; empty before it has come."""
        return self._flight.chunks[0].media if self._flight.chunks else ""

    @property
    def status(self) -> int:
        """The status of the first chunk's response, once it has come."""
        return self._flight.chunks[0].status if self._flight.chunks else 200

    async def ready(self) -> None:
        """Wait until the first chunk exists. Raises the flight's error if it failed before that."""
        while not self._flight.chunks and not self._flight.is_done:
            await self._sleep()
        if not self._flight.chunks and self._flight.error is not None:
            raise fresh(self._flight.error)
        self.ready_at = time.perf_counter()

    async def next(self) -> list[Chunk]:
        """The chunks since the last call, 64 KiB and one at most; empty at the end.

        Raises the flight's error after its last chunk, and the reason given to `leave`.
        """
        flight = self._flight
        while True:
            if self._rest:
                batch, self._rest = self._rest, []
                return batch
            if self._gone is not None:
                raise fresh(self._gone)
            if self._position < len(flight.chunks):
                if flight.size_bytes - self.taken_bytes <= _BATCH_BYTES:
                    batch = flight.chunks[self._position :]
                    self._position = len(flight.chunks)
                    self.taken_bytes = flight.size_bytes
                else:
                    batch = self._some()
                flight._took(self.taken_bytes)
                return batch
            if flight.is_done:
                if flight.error is not None:
                    raise fresh(flight.error)
                return []
            await self._sleep()

    def _some(self) -> list[Chunk]:
        """The next chunks, until they are `_BATCH_BYTES`."""
        start, limit_bytes, chunks = self._position, self.taken_bytes + _BATCH_BYTES, self._flight.chunks
        while self.taken_bytes < limit_bytes and self._position < len(chunks):
            self.taken_bytes += len(chunks[self._position].data)
            self._position += 1
        return chunks[start : self._position]

    async def whole(self) -> list[Chunk]:
        """All chunks, once the flight is complete.

        Raises the flight's error, and the reason given to `leave`.
        """
        flight = self._flight
        while not flight.is_done:
            await self._sleep()
        if flight.error is not None:
            raise fresh(flight.error)
        return flight.chunks

    async def _sleep(self) -> None:
        if self._gone is not None:
            raise fresh(self._gone)
        self._sleeper = asyncio.get_running_loop().create_future()
        self._flight._sleepers.append(self._sleeper)
        await self._sleeper
        if self._gone is not None:
            raise fresh(self._gone)

    def leave(self, reason: BaseException) -> None:
        """Close, because the client left or its deadline passed; reads raise `reason`."""
        self._gone = reason
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)
        self.close()

    def cut(self, error: BaseException) -> None:
        """Close, because its answer was withdrawn; `next` gives its unread chunks, then `error`."""
        self._rest = self._flight.chunks[self._position :]
        self.leave(error)

    def ended(self, how: Ended) -> None:
        """Set the end of this reader's reply, for the record of a flight that it leads."""
        if self.is_leader:
            self._flight.leader_ended = how

    def close(self) -> None:
        """Leave the flight; the last reader to leave cancels the generation."""
        if not self._is_closed:
            self._is_closed = True
            self._flight._leave(self)


Key = tuple[bytes, int | None, float | None]


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

        flight._on_end = forget


class Reply(msgspec.Struct, frozen=True):
    """The reply to one turn: a recorded `entry`, or a reader of a flight.

    `alias` is the configured name that took it. `limits` are the headers of its rate limits.
    `pointed`: a generation that never began, because the prompt's words found `entry`.
    """

    turn: Turn
    alias: str
    limits: dict[bytes, bytes]
    entry: Entry | None = None
    reader: Reader | None = None
    looked_up_ms: float = 0.0  # from the start of the turn until the entry was found
    pointed: Generation | None = None
    degraded: tuple[str, ...] = ()  # of a joined flight; a leader's are its generation's

    @property
    def is_leading(self) -> bool:
        """Whether it started a generation, which then records the request."""
        return self.reader is not None and self.reader.is_leader

    @property
    def served(self) -> Entry | None:
        """The entry that is replayed, found by stage 4, 5 or 6."""
        return self.entry if self.reader is None else self.reader.generation.served

    @property
    def source(self) -> str:
        """exact | semantic | coalesced | miss | bypass."""
        if self.reader is None:
            return "exact" if self.pointed is None else "semantic"
        return self.reader.generation.source if self.reader.is_leader else "coalesced"

    @property
    def media(self) -> str:
        """The content type of a plain answer that has begun, and is no JSON."""
        entry, reader = self.served, self.reader
        if entry is not None:
            return str(entry.labels.get("media", ""))
        return reader.media if reader is not None else ""

    @property
    def similarity(self) -> float | None:
        """Of a semantic hit that is replayed, None of any other reply."""
        generation = self.pointed if self.reader is None else self.reader.generation
        is_hit = generation is not None and generation.semantic.entry is not None
        return generation.semantic.similarity if generation is not None and is_hit else None

    @property
    def begun_ms(self) -> float | None:
        """Milliseconds from the start of the turn to the first chunk; None before that chunk."""
        if self.reader is None:
            return self.looked_up_ms
        ready_at = self.reader.ready_at
        return None if ready_at is None else (ready_at - self.turn.started) * 1000.0
