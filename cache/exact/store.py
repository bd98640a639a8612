"""Cached answers in Redis: entries and their accounting. The only file that knows these keys.

    sameway:{P}:entries   hash    exact -> Entry
    sameway:{P}:about     hash    exact -> size (10 digits), About
    sameway:{P}:used      zset    exact by uses, their worth and age, ms: the order of eviction
    sameway:{P}:expires   zset    exact by expiry, ms
    sameway:{P}:bytes     string  sum of the sizes
    sameway:{P}:vectors   hash    exact -> embedder's key, vector of its prompt; exact and `a` ->
                                  embedder's key, its answer's time, sketch of that; by cache workers
    sameway:{P}:groups    hash    which answers are equal, written by `cache.verdicts.store`
    sameway:{P}:words     hash    key of a prompt's words -> pointer to an entry; exact and `p` -> keys
    sameway:{P}:warm:L    string  the deployment that last saw the prefix with digest L
    sameway:{P}:starts:C  string  how many processes began to ask a verifier about the namespace with compat C
    sameway:cache:partitions      zset    partition by when it last began to hold entries, s

P is the partition in hex, the hash tag of all its keys; vectors, sketches, groups and words are
removed with their entry. Knows no policy and no L1. Invariants: one script changes an entry and its
accounting together, so a partition's bytes are exact and never above its budget; every key of a
script is in KEYS and under one hash tag (Redis Cluster); a partition without live entries expires
whole, a sixteenth of its last entry's lifetime later. Hash fields hold entries (not a key for each)
so that eviction needs no undeclared keys.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import msgspec

from cache.eligibility import Refusal
from cache.entry import About, Entry
from cache.events import AnswersSketched, EntriesDropped, EntryAdded
from cache.exact.batch import BatchItem, BatchTerms, Defer, StoreBatch
from cache.exact.claims import Claims
from cache.exact.log import EntryLog, appending
from cache.exact.pointers import Verified, own_pointer
from cache.exact.scripts import DROP, FORGET_PARTITION, POINT, PUT_SKETCHES, PUT_VECTORS, TOUCH
from cache.fingerprint import DIGEST_BYTES, Fingerprint, Partition
from cache.redis_client import Redis
from cache.stored import reader

_PARTITIONS = "sameway:cache:partitions"

_NAMES = ("entries", "about", "used", "expires", "bytes", "vectors", "groups", "words", "suspended")
_HALF_LIFE_MS = 6 * 3_600_000  # after which a use counts half when it comes to eviction
_STARTS_KEPT_S = 30 * 86_400
_SCAN_COUNT = 500
_DROP_COUNT = 200
_SKETCHED_COUNT = 64  # in one command
_AT_ONCE = 16  # commands in flight together, where each may take a connection
_OVERHEAD_BYTES = 400  # of the hash fields, sorted sets and the digests in them, for one entry
_VECTOR_BYTES = 1_000  # and for the vector of an entry that has a text
_WORDS_BYTES = 250  # and for the pointer from its words
_REFUSALS = {-1: Refusal.CURATED, -2: Refusal.TOO_LARGE}  # by the script's word


T = TypeVar("T")


class Packed(msgspec.Struct, frozen=True):
    """An entry in its form for Redis.

    `size_bytes` counts against the budget: its data, its facts, its vector, and Redis' overhead.
    Its sketch is added once it is stored.
    """

    entry: Entry
    data: bytes
    about: bytes
    size_bytes: int


class StoreEffect(msgspec.Struct, frozen=True):
    """The result of storing one entry; `refusal`: it was not."""

    is_replaced: bool
    evicted: tuple[bytes, ...]
    refusal: Refusal | None = None


@dataclass(frozen=True, slots=True)
class EntryListing:
    """One entry, without its chunks."""

    partition: Partition
    exact: bytes
    size_bytes: int
    about: About

    @property
    def id(self) -> str:
        return self.exact.hex()

    @property
    def text(self) -> str | None:
        return self.about.text


@dataclass(frozen=True, slots=True)
class Sketched:
    """The encoded sketch of the answer that entry `exact` had at `created_at`."""

    exact: bytes
    created_at: float
    data: bytes


@dataclass(frozen=True, slots=True)
class PartitionSize:
    partition: Partition
    entries: int
    size_bytes: int


_read_about = reader(msgspec.msgpack.Decoder(About))
_ENCODER = msgspec.msgpack.Encoder()


class EntryStore:
    """Entries in Redis. All methods raise redis.exceptions.RedisError or OSError while Redis is
    away.
    """

    def __init__(
        self, redis: Redis, defer: Defer | None = None, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        """`defer` schedules the call that sends gathered entries; see `cache.exact.batch`."""
        self.log = EntryLog(redis)
        self.claims = Claims(redis, monotonic)
        self._redis = redis
        self._batch = StoreBatch(redis, defer)
        self._is_direct = getattr(redis, "is_direct", False)
        self._announcing: asyncio.Future[Any] | None = None

    # --- one entry

    def look(self, fp: Fingerprint, wants: bool, stale: bytes = b"", words_key: bytes | None = None) -> Awaitable[Any]:
        """The encoded entry or the state of its claim, for `claims.read`; see `Claims.look`."""
        keys = _keys(fp.partition)
        return self.claims.look(fp, (keys[0], keys[7], keys[6], keys[8]), wants=wants, stale=stale, words_key=words_key)

    def lookup(self, partition: Partition, exact: bytes) -> Awaitable[bytes | None]:
        """The encoded entry, which may have expired."""
        return self._redis.execute_command("HGET", _keys(partition)[0], exact)

    async def point(self, entry: Entry, words_key: bytes, verified: Verified, size_bytes_max: int, claim: str) -> None:
        """Let the words of `words_key` point at an entry while it and its answer exist. `claim`:
        see `store`.
        """
        keys = (*_keys(entry.partition)[:8], *((claim,) if claim else ()))
        terms = (size_bytes_max, words_key, entry.exact, struct.pack(">d", entry.created_at), verified.encode())
        await self._redis.eval(POINT, len(keys), *keys, *terms, self.claims.process)

    async def count_start(self, partition: Partition, compat: bytes) -> int:
        """Count the processes that began to ask about a namespace; the count is kept while some do."""
        key = "sameway:{" + partition.hex() + "}:starts:" + compat.hex()
        count, _ = await asyncio.gather(
            self._redis.execute_command("INCR", key), self._redis.execute_command("EXPIRE", key, _STARTS_KEPT_S)
        )
        return int(count)

    async def lookup_many(self, partition: Partition, exacts: Sequence[bytes]) -> list[bytes | None]:
        """The encoded entries; None for missing ones."""
        data: list[bytes | None] = await self._redis.execute_command("HMGET", _keys(partition)[0], *exacts)
        return data

    def lookup_warm(self, partition: Partition, links: Sequence[bytes]) -> Awaitable[list[bytes | None]]:
        """The deployment that last saw each prefix."""
        return self._redis.execute_command("MGET", *(_warm_key(partition, link) for link in links))

    async def store(
        self,
        packed: Packed,
        terms: BatchTerms,
        *,
        now: float,
        warm: str | None,
        chain: Sequence[bytes],
        claim: str = "",
        words_key: bytes | None = None,
    ) -> StoreEffect:
        """Store an entry, evicting the entries of its partition with the least recent worth until
        it fits.

        The key `claim`, if any, is deleted. `words_key` is the key by which its prompt's words find
        it.
        """
        entry, warm_keys = packed.entry, []
        if warm is not None:
            links = dict.fromkeys((entry.exact, *chain[-1:], *chain[:1]))
            warm_keys = [_warm_key(entry.partition, link) for link in links]
        worth = "-" if entry.is_curated else entry.worth
        facts = f"{_ms(entry.expires_at)} {worth} {len(warm_keys)} {1 if claim else 0} {warm or ''}"
        argv = (entry.exact, packed.data, packed.about, facts, words_key + own_pointer(entry) if words_key else b"")
        # behind the entry: a follower that reads the record fetches the facts on it
        record = EntryAdded(entry.partition, entry.exact) if entry.text is not None else None
        later_commands = (appending(record),) if record is not None and self._is_direct else ()
        more_keys = (*warm_keys, claim) if claim else warm_keys
        # no local keeps the item: its error would hold this frame, and the frame the item
        became, *evicted = await self._batch.store(terms, BatchItem(argv, more_keys, later_commands, _ms(now)))
        if record is not None and not later_commands:
            await self.log.append(record)
        # the indexes may have the one before
        dropped = (entry.exact, *evicted) if became == 1 and entry.text is None else tuple(evicted)
        if dropped:  # no store waits for that: a pointer to what is gone finds nothing
            self._announcing = asyncio.ensure_future(self.log.append(EntriesDropped(entry.partition, dropped)))
        return StoreEffect(became == 1, tuple(evicted), _REFUSALS.get(became))

    async def store_warm(self, partition: Partition, links: Iterable[bytes], warm: str, warm_ttl_s: float) -> None:
        """Store which deployment saw these prefixes, without an entry."""
        key_of, ttl_ms = _warm_key, _ms(warm_ttl_s)
        commands = (self._redis.execute_command("SET", key_of(partition, one), warm, "PX", ttl_ms) for one in links)
        await asyncio.gather(*commands)

    async def touch(self, partition: Partition, now: float, uses: Iterable[tuple[bytes, float]]) -> None:
        """Record the worth of each entry's uses. Missing entries are ignored."""
        for some in _portions(list(uses), _DROP_COUNT):
            arguments = [argument for use in some for argument in use]
            await self._redis.eval(TOUCH, 1, _keys(partition)[2], _ms(now), _HALF_LIFE_MS, *arguments)

    async def purge(self, partition: Partition, exacts: Sequence[bytes]) -> tuple[int, int]:
        """Remove entries, and log their removal. Returns their number and their bytes."""
        keys, count, freed = _keys(partition)[:8], 0, 0
        for portion in _portions(exacts, _DROP_COUNT):
            some = tuple(portion)
            removed, _ = await asyncio.gather(
                self._redis.eval(DROP, len(keys), *keys, *some), self.log.append(EntriesDropped(partition, some))
            )
            count, freed = count + removed[0], freed + removed[1]
        return count, freed

    # --- all entries

    async def partitions(self) -> list[Partition]:
        """Every partition that holds entries or lately did, the latest to begin first."""
        members: list[bytes] = await self._redis.execute_command("ZREVRANGE", _PARTITIONS, 0, -1)
        return [Partition(member) for member in members if len(member) == DIGEST_BYTES]

    async def sizes(self) -> list[PartitionSize]:
        """The size of each partition. Empty partitions are removed from the list."""
        reply: list[Any] = await self._redis.execute_command("ZREVRANGE", _PARTITIONS, 0, -1, "WITHSCORES")
        latest = {Partition(member): score for member, score in reply if len(member) == DIGEST_BYTES}
        sizes = []
        for portion in _portions(list(latest), _AT_ONCE):
            sizes += await asyncio.gather(*(self.size(partition) for partition in portion))
        for empty in (size.partition for size in sizes if size.entries == 0):
            # unless an entry was stored there meanwhile
            await self._redis.eval(FORGET_PARTITION, 1, _PARTITIONS, empty, int(latest[empty]))
        return [size for size in sizes if size.entries]

    async def scan(self, partition: Partition) -> AsyncIterator[list[EntryListing]]:
        """Batches of the partition's entries; an entry that stays throughout occurs at least once."""
        cursor, key = 0, _keys(partition)[1]
        while True:
            cursor, values = await self._redis.execute_command("HSCAN", key, cursor, "COUNT", _SCAN_COUNT)
            listings = [_listing(partition, exact, value) for exact, value in values.items()]
            batch = [listing for listing in listings if listing is not None]
            if batch:
                yield batch
            if cursor == 0:
                return

    async def lookup_abouts(self, partition: Partition, exacts: Sequence[bytes]) -> list[About | None]:
        """The stored facts about these entries; None for missing ones."""
        values: list[bytes | None] = await self._redis.execute_command("HMGET", _keys(partition)[1], *exacts)
        listings = [_listing(partition, exact, value) for exact, value in zip(exacts, values, strict=True)]
        return [None if listing is None else listing.about for listing in listings]

    async def lookup_about(self, partition: Partition, exact: bytes) -> EntryListing | None:
        value: bytes | None = await self._redis.execute_command("HGET", _keys(partition)[1], exact)
        return _listing(partition, exact, value)

    async def size(self, partition: Partition) -> PartitionSize:
        keys = _keys(partition)
        count, size = await asyncio.gather(
            self._redis.execute_command("HLEN", keys[1]), self._redis.execute_command("GET", keys[4])
        )
        return PartitionSize(partition, int(count), int(size or 0))

    # --- vectors

    async def store_vectors(
        self, partition: Partition, embedder_key: bytes, vectors: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """Store vectors (exact, bytes) beside their entries; vectors without an entry are dropped."""
        keys = _keys(partition)
        for some in _portions(vectors, _DROP_COUNT):
            argv: list[bytes] = []
            for exact, vector in some:
                argv += (exact, embedder_key + vector)
            await self._redis.eval(PUT_VECTORS, 2, keys[5], keys[1], *argv)

    async def lookup_vectors(
        self, partition: Partition, embedder_key: bytes, exacts: Sequence[bytes]
    ) -> list[bytes | None]:
        """The vectors of this embedder; None for a missing vector, empty for another embedder's."""
        values: list[bytes | None] = await self._redis.execute_command("HMGET", _keys(partition)[5], *exacts)
        return [value and (value[len(embedder_key) :] if value.startswith(embedder_key) else b"") for value in values]

    # --- sketches

    async def store_sketches(
        self, partition: Partition, embedder_key: bytes, sketches: Sequence[Sketched], size_bytes_max: int
    ) -> None:
        """Store sketches beside their entries, and count them in the entries' sizes.

        Entries with the least recent worth are evicted for them; sketches without an entry are
        dropped. The log records both.
        """
        keys = _keys(partition)[:8]
        for portion in _portions(sketches, _SKETCHED_COUNT):
            argv: list[Any] = [size_bytes_max]
            for sketch in portion:
                argv += (sketch.exact, embedder_key + struct.pack(">d", sketch.created_at) + sketch.data)
            evicted: list[bytes] = await self._redis.eval(PUT_SKETCHES, len(keys), *keys, *argv)
            if evicted:
                await self.log.append(EntriesDropped(partition, tuple(evicted)))
            await self.log.append(AnswersSketched(partition, tuple(one.exact for one in portion)))

    async def lookup_sketches(
        self, partition: Partition, embedder_key: bytes, exacts: Sequence[bytes]
    ) -> list[Sketched]:
        """Read the sketches of the answers of `exacts`; another embedder's sketches are left out."""
        sketches = []
        for portion in _portions(exacts, _SKETCHED_COUNT):
            values: list[bytes | None] = await self._redis.execute_command(
                "HMGET", _keys(partition)[5], *(exact + b"a" for exact in portion)
            )
            for exact, value in zip(portion, values, strict=True):
                if value is not None and value.startswith(embedder_key) and len(value) > len(embedder_key) + 8:
                    (created_at,) = struct.unpack_from(">d", value, len(embedder_key))
                    sketches.append(Sketched(exact, created_at, value[len(embedder_key) + 8 :]))
        return sketches


def pack(entry: Entry, *, has_words: bool = False) -> Packed:
    """Encode an entry and compute its size. `has_words`: a pointer leads from its prompt's words to
    it.
    """
    data, about = entry.encode(), _ENCODER.encode(entry.about())
    size = len(data) + len(about) + _OVERHEAD_BYTES + (_VECTOR_BYTES if entry.text is not None else 0)
    size += _WORDS_BYTES if has_words else 0
    return Packed(entry, data, b"%010d" % size + about, size)


@lru_cache(maxsize=4096)
def _keys(partition: Partition) -> tuple[str, ...]:
    # decision: cache-budget-per-partition
    tag = "sameway:{" + partition.hex() + "}:"
    return tuple(tag + name for name in _NAMES)


@lru_cache(maxsize=4096)
def terms_of(partition: Partition, size_bytes_max: int, warm_ttl_s: float) -> BatchTerms:
    """The terms for storing entries of a partition. Warm hints last for `warm_ttl_s` seconds."""
    return BatchTerms(
        keys=_keys(partition)[:8],
        size_max=size_bytes_max,
        warm_ttl_ms=_ms(warm_ttl_s),
        half_life_ms=_HALF_LIFE_MS,
        list_key=_PARTITIONS,
        partition=partition,
    )


def _warm_key(partition: Partition, link: bytes) -> str:
    return "sameway:{" + partition.hex() + "}:warm:" + link.hex()


def _portions(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _listing(partition: Partition, exact: bytes, value: bytes | None) -> EntryListing | None:
    """The stored value about an entry, decoded; None for a missing or damaged one."""
    try:
        return EntryListing(partition, exact, int(value[:10]), _read_about(value[10:])) if value is not None else None
    except (msgspec.DecodeError, ValueError):
        return None
