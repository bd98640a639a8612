"""From Redis into a semantic cache: a rebuild at start-up, then the log, by the same fold.

Knows the store and the semantic cache, no sockets. Reads are asynchronous; the given thread does
all work on the cache, so encoding never blocks the event loop. Invariants: records are folded in
the log's order, verdicts in that of their partition's stream, each once; a rebuild beside a
changing store ends equal to it (it notes the log's end first, folds the scan, then the log from
there); a failure of Redis leaves the cache as it was and is retried.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from cache.entry import unpack_context
from cache.events import AnswersSketched, EntriesDropped, EntryAdded, LogRecord, VerdictAdded
from cache.exact.log import EntryLog, LogPosition
from cache.exact.store import EntryStore, PartitionSize, Sketched
from cache.fingerprint import Partition
from cache.redis_client import REDIS_FAILURES, Redis
from cache.semantic.cache import EntryKey, PromptAdded, Record, SemanticCache, SketchAdded
from cache.verdicts.records import AnswerSuspended
from cache.verdicts.store import Untold, VerdictStore

_FOLDED = 64  # records at a time: a lookup that comes during a rebuild waits for no more
_LISTENED_S = 1.0  # at a time: a lookup that comes while Redis gets the next read waits for it
_RETRY_S = 0.25
_LOOK_ROUNDS = 20  # of `follow`, of a second each: a worker whose word stays the same between two looks has ended

T = TypeVar("T")
Vectors = Sequence[bytes | None]

_log = logging.getLogger("cache.worker")  # not __name__: operators know the process by this name


class BetweenLookups(Protocol):
    async def __call__(self, work: Callable[[], T], /) -> T:
        """Do a small piece of work on the cache between lookups, and return its result."""


@dataclass(slots=True)
class FollowerProgress:
    """Entries folded of those there were when the rebuild began."""

    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0


class Follower:
    """Keeps `cache` equal to the entries in Redis that have a text. `embedder_key` names the model
    of the stored vectors and sketches; `size_bytes_max` bounds a partition's entries. `listen`
    needs `listening`, a connection of its own, whose commands may wait.
    """

    def __init__(
        self,
        redis: Redis,
        cache: SemanticCache,
        thread: ThreadPoolExecutor,
        embedder_key: bytes,
        size_bytes_max: int = 256 << 20,
        listening: Redis | None = None,
    ) -> None:
        self.progress = FollowerProgress()
        self.is_up = False
        self.failure = ""  # the last error of Redis
        self._store = EntryStore(redis)
        self._verdicts = VerdictStore(redis)
        # how far each partition's verdicts have been folded
        self._read_to: dict[Partition, bytes] = {}
        self._cache = cache
        self._thread = thread
        self._embedder_key = embedder_key
        self._size_bytes_max = size_bytes_max
        # announced, and not read yet: no lookup waits for them
        self._sketched: dict[Partition, dict[bytes, None]] = {}
        self._log = EntryLog(listening or redis)
        self._is_direct = getattr(listening, "is_direct", False)
        self._wait_ms = 0
        self._position: LogPosition | None = None
        # of a read of what follows that position
        self._replies: tuple[asyncio.Future[Any], asyncio.Future[Any]] | None = None
        self._lock = asyncio.Lock()
        self._has_warned = False
        self._name = uuid.uuid4().hex
        self._rounds = 0
        self._kept: Untold = {}
        self._seen: dict[bytes, bytes] = {}  # at the last look

    @property
    def is_following(self) -> bool:
        """Whether the cache has been rebuilt and only the log is left to read."""
        return self._position is not None

    async def listen(self) -> None:
        """For ever: fold what the log gets as soon as it has it, so that a lookup asks Redis nothing."""
        self._wait_ms = int(1000 * _LISTENED_S)
        while True:
            try:
                await self._receive()
            except REDIS_FAILURES as error:
                self._fail(error)
            if not (self.is_up and self.is_following):
                await asyncio.sleep(_RETRY_S)

    async def follow(self) -> None:
        """Fold what the log has; where there is no place in the log, rebuild first. Then keep in Redis
        what was made here. While Redis is away nothing happens but `is_up`.
        """
        try:
            if self._position is None:
                async with self._lock:
                    self._position = await self._rebuild()
            await self._receive()
            await self._read_sketches()
            await self._save_vectors()
            await self._save_sketches()
            await self._share_untold()
            self.is_up = True
        except REDIS_FAILURES as error:
            self._fail(error)

    async def catch_up(self) -> None:
        """Fold what the log has before a lookup, unless Redis is away or a rebuild is running."""
        if self.is_up and self._position is not None:
            try:
                await self._fold_replies()
            except REDIS_FAILURES as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.is_up = False
        self.failure = f"{type(error).__name__}: {error}"
        self._replies = None  # what they bring may not be folded

    async def _receive(self) -> None:
        """Wait for a read of the log, and fold it. Raises RedisError, OSError."""
        is_more = True
        while is_more and self._position is not None:
            self._replies = self._replies or self._log.listen(self._position, self._wait_ms)
            await asyncio.wait((self._replies[1],))
            is_more = await self._fold_replies()

    async def _fold_replies(self) -> bool:
        """Fold the reads of the log that have ended, while the next one is under way. Whether the log has more."""
        is_more = False
        async with self._lock:
            while self._position is not None and self._replies is not None:
                epoch, records = self._replies
                # Redis has the read now. The records of a store that has ended came before this reply
                if self._is_direct and not epoch.done():
                    await asyncio.wait((epoch,))
                if not records.done():
                    break
                read = await self._store.log.read(self._position, *await asyncio.gather(epoch, records))
                must_listen = self._wait_ms and not read.is_lost  # a rebuild ends at another position
                self._replies = self._log.listen(read.position, self._wait_ms) if must_listen else None
                if read.records:
                    await self._resolve(read.records)
                self._position, is_more = None if read.is_lost else read.position, read.is_more
        return is_more

    async def _rebuild(self) -> LogPosition:
        end = await self._store.log.end(uuid.uuid4().bytes)
        sizes = await self._sizes()
        self.progress = FollowerProgress(total=sum(size.entries for size in sizes))
        seen: set[EntryKey] = set()
        self._read_to.clear()
        self._sketched.clear()
        await self._run(self._cache.forget_verdicts)
        for partition in (size.partition for size in sizes):
            async for batch in self._store.scan(partition):
                added = await self._added(partition, [one.exact for one in batch])
                seen.update((partition, prompt.exact) for prompt in added)
                await self._fold(added)
                await self._fold_sketches(partition, [prompt.exact for prompt in added])
                self.progress.done += len(batch)
            await self._fold(self._take([await self._new_verdicts(partition)]))
        await self._run(lambda: self._cache.retain(seen))
        return end

    async def _sizes(self) -> list[PartitionSize]:
        """The partitions that a rebuild reads."""
        return await self._store.sizes()

    async def _resolve(self, records: Sequence[LogRecord]) -> None:
        """Fold the records, with the store's facts on each entry that came, in one round trip; entries
        that are gone again are left out.

        A model does not depend on its partition's entries, so verdicts follow at the end.
        """
        came: dict[Partition, dict[bytes, PromptAdded | None]] = {}
        verdicts: dict[Partition, None] = {}
        for record in records:
            if isinstance(record, EntryAdded):
                came.setdefault(record.partition, {})[record.exact] = None
            elif isinstance(record, AnswersSketched):
                self._sketched.setdefault(record.partition, {}).update(dict.fromkeys(record.exacts))
            elif isinstance(record, VerdictAdded):
                verdicts[record.partition] = None
        verdicts = self._to_read(verdicts, came)
        facts, judged = await asyncio.gather(
            asyncio.gather(*(self._added(partition, list(exacts)) for partition, exacts in came.items())),
            asyncio.gather(*map(self._new_verdicts, verdicts)),
        )
        for partition, added in zip(came, facts, strict=True):
            came[partition].update((prompt.exact, prompt) for prompt in self._wanted(added))
        resolved: list[Record] = []
        for record in records:
            if isinstance(record, EntriesDropped):
                resolved.append(record)
            elif isinstance(record, EntryAdded) and (prompt := came[record.partition][record.exact]) is not None:
                resolved.append(prompt)
        await self._fold([*resolved, *self._take(judged)])

    def _to_read(self, announced: Iterable[Partition], came: Iterable[Partition]) -> dict[Partition, None]:
        """The partitions whose verdicts are read: also those that had no entries when the rebuild came by."""
        return dict.fromkeys((*announced, *(partition for partition in came if partition not in self._read_to)))

    def _wanted(self, added: Sequence[PromptAdded]) -> Sequence[PromptAdded]:
        """Of the keys that came, those that the cache takes in."""
        return added

    async def _new_verdicts(self, partition: Partition) -> tuple[Partition, bytes, list[Record]]:
        """The verdicts of a partition since the last read, and the position after them.

        At the first read the stream's suspensions are history: the current ones are read after it,
        and changes in between come again with the next read.
        """
        after = self._read_to.get(partition)
        verdicts, position = await self._verdicts.read(partition, after or b"0-0")
        if after is not None:
            return partition, position, [*verdicts]
        before = [record for record in verdicts if not isinstance(record, AnswerSuspended)]
        suspended = await self._verdicts.suspended(partition)
        return partition, position, [*before, *(AnswerSuspended(partition, name) for name in suspended)]

    def _take(self, judged: Iterable[tuple[Partition, bytes, list[Record]]]) -> list[Record]:
        """What `_new_verdicts` gave, which is read no more."""
        self._read_to.update((partition, position) for partition, position, _ in judged)
        return [record for _, _, records in judged for record in records]

    async def _vectors(self, partition: Partition, exacts: Sequence[bytes], known: Vectors = ()) -> Vectors:
        """The vectors that this or another host made before."""
        return known or await self._store.lookup_vectors(partition, self._embedder_key, exacts)

    async def _added(self, partition: Partition, exacts: Sequence[bytes], known: Vectors = ()) -> list[PromptAdded]:
        """Those entries that can be found by meaning, with the groups of their answers and their vectors,
        which are read too unless `known` has them; in one round trip.
        """
        abouts, groups, vectors = await asyncio.gather(
            self._store.lookup_abouts(partition, exacts),
            self._verdicts.groups(partition, exacts),
            self._vectors(partition, exacts, known),
        )
        if b"" in vectors:
            self._warn_of_another_embedder()
        return [
            PromptAdded(
                partition=partition,
                exact=exact,
                compat=about.compat,
                text=about.text,
                created_at=about.created_at,
                expires_at=about.expires_at,
                group=group[1] if group is not None and group[0] == about.created_at else b"",
                vector=vector or b"",
                context=context,
                of=about.of,
            )
            for exact, about, group, vector in zip(exacts, abouts, groups, vectors, strict=True)
            if about is not None and about.text is not None
            if (context := unpack_context(about.context)) is not None
        ]

    async def _fold(self, records: Sequence[Record]) -> None:
        for start in range(0, len(records), _FOLDED):
            await self._run(partial(self._cache.fold, records[start : start + _FOLDED]))

    def _warn_of_another_embedder(self) -> None:
        """Once: vectors of two embedders are not comparable, so each host makes its own."""
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "Redis has vectors of another embedder than %s: they are made anew; hosts that share a Redis need the "
                "same cache.embedder and cache.precision",
                self._cache.embedder.name,
            )

    async def _save_vectors(self) -> None:
        by_partition: dict[Partition, list[tuple[bytes, bytes]]] = {}
        for key in await self._run(self._cache.take_unsaved):
            by_partition.setdefault(key.partition, []).append((key.exact, key.vector))
        for partition, vectors in by_partition.items():
            await self._store.store_vectors(partition, self._embedder_key, vectors)

    async def _read_sketches(self) -> None:
        """Read the sketches that another host made."""
        while self._sketched:
            partition, exacts = next(iter(self._sketched.items()))
            await self._fold_sketches(partition, [one for one in exacts if self._cache.wants_sketch(partition, one)])
            del self._sketched[partition]

    async def _fold_sketches(self, partition: Partition, exacts: Sequence[bytes]) -> None:
        for start in range(0, len(exacts), _FOLDED):
            some = exacts[start : start + _FOLDED]
            found = await self._store.lookup_sketches(partition, self._embedder_key, some)
            records = [SketchAdded(partition, one.exact, one.created_at, one.data) for one in found]
            await self._run(partial(self._cache.fold, records))

    async def _save_sketches(self) -> None:
        by_partition: dict[Partition, list[Sketched]] = {}
        for one in await self._run(self._cache.take_unsaved_sketches):
            by_partition.setdefault(one.partition, []).append(Sketched(one.exact, one.created_at, one.data))
        for partition, sketches in by_partition.items():
            await self._store.store_sketches(partition, self._embedder_key, sketches, self._size_bytes_max)

    async def _share_untold(self) -> None:
        """Keep in Redis which hits no comparison has told yet, and take over those of workers that ended.

        A worker that was only silent, and finds its own gone, has them no more.
        """
        self._rounds += 1
        untold = await self._run(self._cache.untold)
        if (untold or self._kept) and await self._verdicts.keep_untold(self._name, self._rounds, untold):
            await self._run(partial(self._cache.add_untold, self._kept, -1))
        self._kept = untold
        if self._rounds % _LOOK_ROUNDS == 0:
            before, self._seen = self._seen, await self._verdicts.untold()
            for worker, kept in self._seen.items():
                if worker != self._name.encode() and before.get(worker) == kept:
                    taken = await self._verdicts.take_untold(worker, kept)
                    await self._run(partial(self._cache.add_untold, taken))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
