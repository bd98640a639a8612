"""The chunks of one answer, with one writer and many readers.

It knows no generation, money or caches. Invariants: every reader gets every chunk from the first; a
reader that leaves does not affect the others; a stream ends exactly once, complete or with an
error; a reader that has read all chunks of a failed stream gets the error, never a silent end; an
answer begins again only for readers whose clients have no byte of it. A reader gets a bounded
number of bytes at a time, and the writer is held up while every reader's client is far behind,
never for one that is slower than another.
"""

import asyncio
import time
from collections.abc import Sequence

import msgspec

from gateway.exceptions import fresh
from gateway.wire.types import Chunk, size_of

BEHIND_BYTES_MAX = 128 << 10
"""Of an answer, unread by the reader that is furthest; more is not taken from the deployment."""
_BATCH_BYTES = 64 << 10  # that a reader is given at a time


class SharedStream(msgspec.Struct, eq=False):
    """An answer as it comes, and its readers."""

    chunks: list[Chunk] = []
    size_bytes: int = 0  # of `chunks`
    taken_bytes: int = 0  # by the reader that is furthest
    first_at: float | None = None  # the first chunks' arrival, by time.perf_counter
    error: BaseException | None = None
    is_done: bool = False
    is_held: bool = False  # no reader gets a chunk before the end, and none of an answer that failed
    _caught_up: asyncio.Future[None] | None = None
    _readers: "list[Reader]" = []
    sleepers: list[asyncio.Future[bool]] = []

    @property
    def has_left(self) -> bool:
        """Whether the client of a reader has begun to get the chunks."""
        return any(reader.is_stream and reader.ready_at is not None for reader in self._readers)

    def extend(self, chunks: Sequence[Chunk]) -> None:
        """Add `chunks` that arrived together, with one wake-up for each reader."""
        if self.first_at is None:
            self.first_at = time.perf_counter()
        self.chunks.extend(chunks)
        self.size_bytes += size_of(chunks)
        if self.sleepers:
            self._wake()

    def held_up(self) -> asyncio.Future[None] | None:
        """A future to await before more is taken from the deployment; None if a reader needs more.

        A client that gets the answer whole needs all of it.
        """
        is_behind = self.size_bytes - self.taken_bytes > BEHIND_BYTES_MAX
        if not is_behind or self.is_held or not self._readers or not all(reader.is_stream for reader in self._readers):
            return None
        self._caught_up = asyncio.get_running_loop().create_future()
        return self._caught_up

    def resume(self) -> None:
        """Let the writer go on."""
        if self._caught_up is not None and not self._caught_up.done():
            self._caught_up.set_result(None)
        self._caught_up = None

    def took(self, taken_bytes: int) -> None:
        """A reader has taken `taken_bytes` in all."""
        if taken_bytes > self.taken_bytes:
            self.taken_bytes = taken_bytes
            if self._caught_up is not None and self.size_bytes - taken_bytes <= BEHIND_BYTES_MAX // 2:
                self.resume()

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
        """End the stream, with `error` if it failed; later calls change nothing."""
        if not self.is_done:
            self.is_done = True
            self.error = error
            if self.is_held and error is not None:
                self.chunks = []
            self.is_held = False
            self._wake()

    def join(self, reader: "Reader") -> None:
        """Add a reader, from chunk 0."""
        self._readers.append(reader)
        if not reader.is_stream:
            self.resume()

    def leave(self, reader: "Reader") -> None:
        """Remove a reader."""
        self._readers.remove(reader)
        self.taken_bytes = max([other.taken_bytes for other in self._readers]) if self._readers else 0
        if not self._readers and not self.is_done:
            self.abandoned()

    def abandoned(self) -> None:
        """The last reader has left before the end."""

    def _wake(self) -> None:
        sleepers, self.sleepers = self.sleepers, []
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(True)


class Reader(msgspec.Struct, eq=False):
    """One client's place in a stream. `is_stream`: the client gets the chunks as they arrive.

    No async generator, because `close` must also work before the first read.
    """

    _stream: SharedStream
    is_leader: bool
    is_stream: bool
    ready_at: float | None = None  # when it had its first chunk, by time.perf_counter
    taken_bytes: int = 0
    _position: int = 0
    _rest: list[Chunk] = []  # of an answer that was withdrawn
    _is_closed: bool = False
    _gone: BaseException | None = None
    _sleeper: asyncio.Future[bool] | None = None

    @property
    def is_at_end(self) -> bool:
        """Whether the stream is complete, and all its chunks have been read."""
        stream = self._stream
        return stream.is_done and stream.error is None and self._position == len(stream.chunks)

    @property
    def media(self) -> str:
        """The type of the first chunk; empty before it has come."""
        return self._stream.chunks[0].media if self._stream.chunks else ""

    @property
    def status(self) -> int:
        """The status of the first chunk's response, once it has come."""
        return self._stream.chunks[0].status if self._stream.chunks else 200

    async def ready(self) -> None:
        """Wait until the first chunk exists. Raises the stream's error if it failed before that."""
        while (not self._stream.chunks or self._stream.is_held) and not self._stream.is_done:
            await self._sleep()
        if not self._stream.chunks and self._stream.error is not None:
            raise fresh(self._stream.error)
        self.ready_at = time.perf_counter()

    async def next(self) -> list[Chunk] | None:
        """The chunks since the last call, 64 KiB and one at most; empty at the end; None if it was woken.

        Raises the stream's error after its last chunk, and the reason given to `leave`.
        """
        stream = self._stream
        while True:
            if self._rest:
                batch, self._rest = self._rest, []
                return batch
            if self._gone is not None:
                raise fresh(self._gone)
            if self._position < len(stream.chunks):
                if stream.size_bytes - self.taken_bytes <= _BATCH_BYTES:
                    batch = stream.chunks[self._position :]
                    self._position = len(stream.chunks)
                    self.taken_bytes = stream.size_bytes
                else:
                    batch = self._batch()
                stream.took(self.taken_bytes)
                return batch
            if stream.is_done:
                if stream.error is not None:
                    raise fresh(stream.error)
                return []
            if not await self._sleep():
                return None

    def _batch(self) -> list[Chunk]:
        """The next chunks, until they are `_BATCH_BYTES`."""
        start, limit_bytes, chunks = self._position, self.taken_bytes + _BATCH_BYTES, self._stream.chunks
        while self.taken_bytes < limit_bytes and self._position < len(chunks):
            self.taken_bytes += len(chunks[self._position].data)
            self._position += 1
        return chunks[start : self._position]

    async def whole(self) -> list[Chunk]:
        """All chunks, once the stream is complete.

        Raises the stream's error, and the reason given to `leave`.
        """
        stream = self._stream
        while not stream.is_done:
            await self._sleep()
        if stream.error is not None:
            raise fresh(stream.error)
        return stream.chunks

    async def _sleep(self) -> bool:
        """Wait for chunks or the end; returns False if it was woken before."""
        if self._gone is not None:
            raise fresh(self._gone)
        self._sleeper = asyncio.get_running_loop().create_future()
        self._stream.sleepers.append(self._sleeper)
        has_more = await self._sleeper
        if self._gone is not None:
            raise fresh(self._gone)
        return has_more

    def leave(self, reason: BaseException) -> None:
        """Close, because the client left or its deadline passed; reads raise `reason`."""
        self._gone = reason
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(True)
        self.close()

    def wake(self) -> None:
        """Let a `next` that waits return None."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(False)

    def cut(self, error: BaseException) -> None:
        """Close, because its answer was withdrawn; `next` gives its unread chunks, then `error`."""
        self._rest = self._stream.chunks[self._position :]
        self.leave(error)

    def close(self) -> None:
        """Leave the stream; the last reader to leave cancels the generation."""
        if not self._is_closed:
            self._is_closed = True
            self._stream.leave(self)
