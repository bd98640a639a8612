"""What a vector engine proposes, copied into a worker's semantic cache, which decides as ever.

A `ProposalFollower` copies rooms when they are asked for, instead of all entries at the start. Of a
room it reads a random sample: all keys, where they are few, and then nothing asks the engine any
more; of a larger room each lookup's nearest keys are copied too. The log keeps the copies equal to
Redis, and what a copy holds of a key is read from its entry: of the engine's word only vectors are
kept. Words are counted in samples alone, so that a lookup does not make the words around it seem
common. Each record of the log is brought to the engine by one host's worker.

Invariants: a decision about a room of which neither all keys nor the nearest could be read is a
miss (EngineAway); a key whose entry is gone is not copied; verdicts of a partition are read before
its first decision; the copies stay within `copied_max` keys, those not asked for longest go first.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from cache.events import EntriesDropped, EntryAdded, LogRecord
from cache.exact.store import PartitionSize
from cache.fingerprint import DIGEST_BYTES, Partition
from cache.query import Query
from cache.redis_client import REDIS_FAILURES
from cache.semantic.cache import SEARCHED, PromptAdded
from cache.semantic.engine import EngineAway, PlacedKey, Proposed, VectorEngine, room_id
from cache.semantic.follower import BetweenLookups, Follower, FollowerProgress, Vectors

ROOM_KEYS = 1_000
"""Keys of a room that are read at first."""
COPIED_MAX = 100_000

_LAST = b"\xff" * DIGEST_BYTES
_EXTRAS = 4  # keys of a room, in samples: a whole one may be too large by then
_READ_FOR_S = 300.0  # after which a copied room is read anew: what the engine got late is in it then
_PAUSE_S = 1.0  # after a failure
_ASSIGNED, _IDLE_S = 64, 0.2  # records at a time, and the pause where there are none
_PLACED, _PLACED_CHARS = 8, 2_000  # keys that a lookup may have to wait for
_FILLED = room_id(b"filled")  # has a key for the Redis data that are in the engine
_FILLED_LOOK_S = 30.0
_FOREVER_S = 10 * 365 * 86_400.0


@dataclass(slots=True)
class _CopiedRoom:
    """What is here of a room. `bound` is the last key of its sample; `keys` are those that were copied,
    the sample's first.
    """

    partition: Partition
    namespace: bytes
    bound: bytes = _LAST
    read_at: float = float("-inf")
    asked_at: float = 0.0
    keys: dict[bytes, None] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        return self.bound == _LAST

    @property
    def share(self) -> float:
        """Of the room's keys, the share of the sample: digests are spread evenly."""
        return (int.from_bytes(self.bound, "big") + 1) / (1 << 8 * DIGEST_BYTES)


class ProposalFollower(Follower):
    """A follower whose cache has what `engine` proposes. `timeout_s` bounds what one lookup waits for
    it, `encoding` embeds prompts, `monotonic` gives seconds. `parts` are those of a `Follower`.
    """

    def __init__(
        self,
        *parts: Any,
        engine: VectorEngine,
        encoding: ThreadPoolExecutor,
        timeout_s: float = 0.25,
        room_keys: int = ROOM_KEYS,
        copied_max: int = COPIED_MAX,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(*parts)
        self.away = ""  # why the engine did not answer the last lookup
        self._refused = ""  # why it did not take the last write
        self._engine = engine
        self._encoding = encoding
        self._timeout_s = timeout_s
        self._room_keys = room_keys
        self._copied_max = copied_max
        self._monotonic = monotonic
        self._rooms: dict[bytes, _CopiedRoom] = {}
        self._reads: dict[bytes, asyncio.Task[None]] = {}
        self._pauses_until = 0.0
        self._looked_filled_at = float("-inf")
        self._is_open = False
        self._assigned: list[tuple[bytes, LogRecord | None]] = []  # that the engine does not have yet

    @property
    def trouble(self) -> str:
        """What the engine fails at; empty while it does not."""
        return self.away or self._refused

    # --- for a lookup

    def has_all(self, query: Query) -> bool:
        """Whether a lookup needs nothing from the engine or from Redis."""
        rooms = [self._rooms.get(name) for name in self._cache.rooms_of(query)]
        for room in filter(None, rooms):
            room.asked_at = self._monotonic()
        is_known = query.partition in self._read_to
        return is_known and all(room is not None and room.is_whole and self._is_fresh(room) for room in rooms)

    async def bring(self, query: Query) -> None:
        """Copy what a lookup of the query needs. Raises EngineAway."""
        if self._monotonic() < self._pauses_until or not (self._is_open and self.is_following):
            raise EngineAway(self.trouble or self.failure or "it was not asked yet")
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._bring(query)
        except (EngineAway, *REDIS_FAILURES) as error:
            self._pauses_until = self._monotonic() + _PAUSE_S
            self.away = f"{error}" or f"no answer within {self._timeout_s:g} s"
            raise EngineAway(self.away) from None
        self.away = ""

    async def _bring(self, query: Query) -> None:
        if query.partition not in self._read_to:
            async with self._lock:
                if query.partition not in self._read_to:
                    await self._fold(self._take([await self._new_verdicts(query.partition)]))
        names = self._cache.rooms_of(query)
        await asyncio.gather(*(self._reading(name, query) for name in names))
        if not self._rooms.keys() >= set(names):
            raise EngineAway(f"more than {self._copied_max} keys are asked for at once")
        large = [name for name in names if not self._rooms[name].is_whole]
        if not large:
            return
        vector = await asyncio.get_running_loop().run_in_executor(self._encoding, self._cache.vector_of, query)
        if vector is None:
            return
        for name in large:
            room = self._rooms[name]
            size = int(self._room_keys / room.share)
            await self._copy(room, await self._engine.nearest(room_id(name), vector, SEARCHED, size), room.bound)

    def _is_fresh(self, room: _CopiedRoom) -> bool:
        """Whether a room need not be read. While the engine is away the log alone has to do."""
        age_s = self._monotonic() - room.read_at
        return age_s < _READ_FOR_S or (bool(self.away) and room.is_whole and age_s < float("inf"))

    async def _reading(self, name: bytes, query: Query) -> None:
        """Read a room, once for all who ask for it."""
        room = self._rooms.get(name)
        if room is not None and self._is_fresh(room):
            return
        reading = self._reads.get(name)
        if reading is None:
            if room is None:  # what the log has from now on is copied
                room = self._rooms[name] = _CopiedRoom(query.partition, query.namespace, asked_at=self._monotonic())
            reading = self._reads[name] = asyncio.create_task(self._read(name, room))
            reading.add_done_callback(partial(self._end_reading, name))
        await asyncio.shield(reading)

    def _end_reading(self, name: bytes, reading: asyncio.Task[None]) -> None:
        del self._reads[name]
        if not reading.cancelled():
            reading.exception()  # who waited has it

    async def _read(self, name: bytes, room: _CopiedRoom) -> None:
        sample = await self._engine.sample(room_id(name), self._room_keys)
        bound = _LAST if len(sample) < self._room_keys else max(sample)
        await self._copy(room, sample, bound)
        more = [exact for exact in room.keys if exact not in sample]
        await self._forget(name, room, more[: -self._room_keys])
        room.bound, room.read_at = bound, self._monotonic()
        self._cache.shares[room.namespace] = room.share
        while len(self._cache) > self._copied_max and len(self._rooms) > 1:
            name = min(self._rooms, key=lambda name: self._rooms[name].asked_at)
            room = self._rooms.pop(name)
            self._cache.shares.pop(room.namespace, None)
            await self._forget(name, room, list(room.keys))

    # decision: engine-proposes
    async def _copy(self, room: _CopiedRoom, proposed: Proposed, bound: bytes) -> None:
        """Take in the keys that are not here, with what their entries say. The engine is told of those
        that have none.
        """
        async with self._lock:
            exacts = [exact for exact in sorted(proposed) if not self._cache.rooms_with(room.partition, exact)]
            vectors = [proposed[exact] for exact in exacts]
            added = await self._added(room.partition, exacts, vectors) if exacts else []
            await self._fold([replace(key, is_counted=key.exact <= bound) for key in added])
            self._sketched.setdefault(room.partition, {}).update((key.exact, None) for key in added)
        gone = set(exacts).difference(key.exact for key in added)
        self._note(room, (exact for exact in sorted(proposed) if exact not in gone))
        if gone:
            await self._engine.drop(room.partition, sorted(gone))

    def _note(self, room: _CopiedRoom, exacts: Iterable[bytes]) -> None:
        """These keys of a room are here now. Where they are many it is read anew, which lets go of some."""
        room.keys |= dict.fromkeys(exacts)
        if len(room.keys) > _EXTRAS * self._room_keys:
            room.read_at = float("-inf")

    async def _forget(self, name: bytes, room: _CopiedRoom, exacts: Sequence[bytes]) -> None:
        """Let go of copies, but those that another room here has."""
        others = self._rooms.keys() - {name}
        gone = tuple(one for one in exacts if others.isdisjoint(self._cache.rooms_with(room.partition, one)))
        room.keys = {exact: None for exact in room.keys if exact not in set(exacts)}
        await self._fold([EntriesDropped(room.partition, gone)])

    # --- the log

    async def _sizes(self) -> list[PartitionSize]:
        """Nothing is read at the start: rooms are, when they are asked for."""
        self._rooms.clear()
        return []

    def _to_read(self, announced: Iterable[Partition], came: Iterable[Partition]) -> dict[Partition, None]:
        return dict.fromkeys(partition for partition in announced if partition in self._read_to)

    async def _vectors(self, partition: Partition, exacts: Sequence[bytes], known: Vectors = ()) -> Vectors:
        return known or [None] * len(exacts)

    def _wanted(self, added: Sequence[PromptAdded]) -> Sequence[PromptAdded]:
        wanted = []
        for key in added:
            rooms = [self._rooms[name] for name in self._cache.rooms_of(key) if name in self._rooms]
            for room in rooms:
                self._note(room, (key.exact,))
            if rooms:
                wanted.append(replace(key, is_counted=any(key.exact <= room.bound for room in rooms)))
        return wanted

    async def _save_vectors(self) -> None:
        """What asks in a long message may change with what comes beside it: its vector is placed anew. A
        short one is placed by the worker that was given its record.
        """
        changed = [one for one in await self._run(self._cache.take_unsaved) if len(one.vector) > 2 * self._cache.dims]
        if changed and self._is_open and not self.trouble:
            try:
                await self._engine.put(changed)
            except EngineAway as error:
                self._refused = str(error)

    # --- the engine

    async def index(self, between_lookups: BetweenLookups) -> None:
        """For ever: bring to the engine what the log gives this worker. Raises EngineUnfit."""
        while True:
            is_more = False
            try:
                if self._refused or not self._is_open:  # it may have lost its index, too
                    await self._engine.open()
                    self._is_open = True
                is_more = await self._index_assigned(between_lookups)
                if self._monotonic() - self._looked_filled_at > _FILLED_LOOK_S:
                    await self._fill_if_empty(between_lookups)
                    self._looked_filled_at = self._monotonic()
                self._refused = ""
            except EngineAway as error:
                self._refused = str(error)
            except REDIS_FAILURES as error:
                self._fail(error)
            if not is_more:
                await asyncio.sleep(_PAUSE_S if self._refused else _IDLE_S)

    async def _index_assigned(self, between_lookups: BetweenLookups) -> bool:
        """Whether there may be more. A record counts as done once the engine has it."""
        assigned = self._assigned = self._assigned or await self._store.log.assigned(self._name, _ASSIGNED)
        came: dict[Partition, list[bytes]] = {}
        for _, record in assigned:
            if isinstance(record, EntriesDropped):
                await self._engine.drop(record.partition, record.exacts)
            elif isinstance(record, EntryAdded):
                came.setdefault(record.partition, []).append(record.exact)
        for partition, exacts in came.items():
            await self._place(await self._added(partition, list(dict.fromkeys(exacts))), between_lookups)
        await self._store.log.end_assigned([id for id, _ in assigned])
        self._assigned = []
        return len(assigned) == _ASSIGNED

    async def _place(self, added: Sequence[PromptAdded], between_lookups: BetweenLookups) -> None:
        placed: list[PlacedKey] = []
        for start in range(0, len(added), _PLACED):
            placed += await between_lookups(partial(self._cache.placed, added[start : start + _PLACED]))
        if placed:
            await self._engine.put(placed)

    async def _fill_if_empty(self, between_lookups: BetweenLookups) -> None:
        """Bring all entries to an engine that never had them, or has lost them."""
        data = (await self._store.log.end(uuid.uuid4().bytes)).epoch
        if data in await self._engine.sample(_FILLED, ROOM_KEYS) or not await self._store.log.may_fill():
            return
        sizes = await self._store.sizes()
        self.progress = FollowerProgress(total=sum(size.entries for size in sizes))
        for partition in (size.partition for size in sizes):
            async for batch in self._store.scan(partition):
                exacts = [one.exact for one in batch]
                vectors = await super()._vectors(partition, exacts)
                await self._place(await self._added(partition, exacts, vectors), between_lookups)
                self.progress.done += len(batch)
                await self._index_assigned(between_lookups)
        vector = np.full(self._cache.dims, self._cache.dims**-0.5, dtype="<f2").tobytes()
        await self._engine.put([PlacedKey(Partition(_FILLED), data, (_FILLED,), time.time() + _FOREVER_S, vector)])
        await self._store.log.end_filling()
