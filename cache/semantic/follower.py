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
from typing import TypeVar

from cache.entry import About
from cache.events import AnswersSketched, EntriesDropped, EntryAdded, LogRecord, VerdictAdded
from cache.exact.log import LogPosition
from cache.exact.store import EntryStore, Sketched
from cache.fingerprint import Partition
from cache.redis_client import REDIS_FAILURES, Redis
from cache.semantic.cache import EntryKey, PromptAdded, Record, SemanticCache, SketchAdded
from cache.verdicts.records import AnswerSuspended
from cache.verdicts.store import VerdictStore

_FOLDED = 64  # records at a time: a lookup that comes during a rebuild waits for no more

T = TypeVar("T")

_log = logging.getLogger("cache.worker")  # not __name__: operators know the process by this name


@dataclass(slots=True)
class Progress:
    """Entries folded of those there were when the rebuild began."""

    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        return min(1.0, self.done / self.total) if self.total else 0.0


class Follower:
    """Keeps `cache` equal to the entries in Redis that have a text. `embedder_key` names the model
    of the stored vectors and sketches; `size_bytes_max` bounds a partition's entries.
    """

    def __init__(
        self,
        redis: Redis,
        cache: SemanticCache,
        thread: ThreadPoolExecutor,
        embedder_key: bytes,
        size_bytes_max: int = 256 << 20,
    ) -> None:
        self.progress = Progress()
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
        self._position: LogPosition | None = None
        self._lock = asyncio.Lock()
        self._has_warned = False

    @property
    def is_following(self) -> bool:
        """Whether the cache has been rebuilt and only the log is left to read."""
        return self._position is not None

    async def follow(self) -> None:
        """Fold what the log has, without waiting for more; where there is no place in the log,
        rebuild first. While Redis is away nothing happens but `is_up`.
        """
        async with self._lock:
            try:
                if self._position is None:
                    self._position = await self._rebuild()
                await self._read()
                await self._read_sketches()
                await self._save_vectors()
                await self._save_sketches()
                self.is_up = True
            except REDIS_FAILURES as error:
                self._fail(error)

    async def catch_up(self) -> None:
        """Fold one read of the log before a lookup, unless Redis is away or a rebuild is running.

        It waits for a read that began before, and reads again: that one may have missed records
        that this lookup should see.
        """
        if not self.is_up or self._position is None:
            return
        async with self._lock:
            try:
                await self._read(is_once=True)
            except REDIS_FAILURES as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        self.is_up = False
        self.failure = f"{type(error).__name__}: {error}"

    async def _read(self, is_once: bool = False) -> None:
        while self._position is not None:
            read = await self._store.log.read(self._position, is_glance=is_once)
            if read.is_lost:
                self._position = None  # rebuilt by the next `follow`
                return
            if read.records:
                await self._fold(await self._resolve(read.records))
            self._position = read.position
            if is_once or not read.is_more:
                return

    async def _rebuild(self) -> LogPosition:
        end = await self._store.log.end(uuid.uuid4().bytes)
        sizes = await self._store.sizes()
        self.progress = Progress(total=sum(size.entries for size in sizes))
        seen: set[EntryKey] = set()
        self._read_to.clear()
        self._sketched.clear()
        await self._run(self._cache.forget_verdicts)
        for partition in (size.partition for size in sizes):
            async for batch in self._store.scan(partition):
                records = await self._added(partition, [(one.exact, one.about) for one in batch])
                seen.update((partition, record.exact) for record in records)
                await self._fold(records)
                await self._fold_sketches(partition, [record.exact for record in records])
                self.progress.done += len(batch)
            await self._fold(await self._new_verdicts(partition))
        await self._run(lambda: self._cache.retain(seen))
        return end

    async def _resolve(self, records: Sequence[LogRecord]) -> list[Record]:
        """The records, with the store's facts on each entry that came; entries that are gone again
        are left out.

        A model does not depend on its partition's entries, so verdicts follow at the end.
        """
        came: dict[Partition, dict[bytes, PromptAdded | None]] = {}
        for record in records:
            if isinstance(record, EntryAdded):
                came.setdefault(record.partition, {})[record.exact] = None
            elif isinstance(record, AnswersSketched):
                self._sketched.setdefault(record.partition, {}).update(dict.fromkeys(record.exacts))
        for partition, added in came.items():
            exacts = list(added)
            abouts = await self._store.lookup_abouts(partition, exacts)
            added.update((one.exact, one) for one in await self._added(partition, zip(exacts, abouts, strict=True)))
        resolved: list[Record] = []
        for record in records:
            if isinstance(record, EntriesDropped):
                resolved.append(record)
            elif isinstance(record, EntryAdded) and (known := came[record.partition][record.exact]) is not None:
                resolved.append(known)
        announced = [record.partition for record in records if isinstance(record, VerdictAdded)]
        unread = [
            partition for partition in came if partition not in self._read_to
        ]  # had no entries when the rebuild came by
        for partition in dict.fromkeys((*announced, *unread)):
            resolved += await self._new_verdicts(partition)
        return resolved

    async def _new_verdicts(self, partition: Partition) -> list[Record]:
        """The verdicts of a partition since the last read.

        At the first read the stream's suspensions are history: the current ones are read after it,
        and changes in between come again with the next read.
        """
        after = self._read_to.get(partition)
        verdicts, self._read_to[partition] = await self._verdicts.read(partition, after or b"0-0")
        if after is not None:
            return [*verdicts]
        before = [record for record in verdicts if not isinstance(record, AnswerSuspended)]
        return [*before, *(AnswerSuspended(partition, name) for name in await self._verdicts.suspended(partition))]

    async def _added(self, partition: Partition, entries: Iterable[tuple[bytes, About | None]]) -> list[PromptAdded]:
        """The entries that can be found by meaning, with the groups of their answers."""
        known = [(exact, about, about.text) for exact, about in entries if about is not None and about.text is not None]
        if not known:
            return []
        groups = await self._verdicts.groups(partition, [exact for exact, _, _ in known])
        return [
            PromptAdded(
                partition=partition,
                exact=exact,
                compat=about.compat,
                text=text,
                created_at=about.created_at,
                expires_at=about.expires_at,
                group=group[1] if group is not None and group[0] == about.created_at else b"",
            )
            for (exact, about, text), group in zip(known, groups, strict=True)
        ]

    async def _fold(self, records: Sequence[Record]) -> None:
        vectors = await self._known_vectors([one for one in records if isinstance(one, PromptAdded)])
        for start in range(0, len(records), _FOLDED):
            await self._run(partial(self._cache.fold, records[start : start + _FOLDED], vectors))

    async def _known_vectors(self, added: Sequence[PromptAdded]) -> dict[EntryKey, bytes]:
        """Vectors that this or another host made before."""
        wanted: dict[Partition, list[bytes]] = {}
        for record in added:
            if not self._cache.knows_vector(record.partition, record.text):
                wanted.setdefault(record.partition, []).append(record.exact)
        vectors: dict[EntryKey, bytes] = {}
        for partition, exacts in wanted.items():
            row = await self._store.lookup_vectors(partition, self._embedder_key, exacts)
            for exact, data in zip(exacts, row, strict=True):
                if data == b"":
                    self._warn_of_another_embedder()
                elif data is not None:
                    vectors[partition, exact] = data
        return vectors

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
        unsaved = await self._run(self._cache.take_unsaved)
        by_partition: dict[Partition, list[tuple[bytes, bytes]]] = {}
        for partition, exact, vector in unsaved:
            by_partition.setdefault(partition, []).append((exact, vector))
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

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
