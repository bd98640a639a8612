"""Redis as the ground state of cached answers: the keys, the scripts and the log. The only file that knows the layout.

    sameway:{P}:entries   hash    exact -> Entry                          P: the partition in hex, the hash tag of all its keys
    sameway:{P}:about     hash    exact -> size (10 digits), About
    sameway:{P}:used      zset    exact by last use, ms                   who is evicted next
    sameway:{P}:expires   zset    exact by expiry, ms
    sameway:{P}:bytes     string  sum of the sizes
    sameway:{P}:vectors   hash    exact -> embedder's key, vector         written by cache workers, gone with the entry
    sameway:{P}:warm:L    string  who saw the prefix with digest L last
    sameway:cache:partitions      zset    partition by last store, s
    sameway:cache:log             stream  what was added and dropped, for the semantic indexes
    sameway:cache:epoch           string  random; another one means that Redis lost its data
    sameway:cache:purge           channel what was purged, for the in-process caches
    sameway:cache:purged:R        string  how many of them have obeyed

Knows no policy and no L1. Invariants: one script moves an entry and its accounting together, so a partition's bytes are exact and
never above its budget; every key of a script is in KEYS and under one hash tag (Redis Cluster); a partition without live entries
expires whole. Hash fields hold entries (not a key for each) so that eviction needs no undeclared keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from redis.exceptions import RedisError

from cache.entry import About, CacheUnavailable, Entry, Purge
from cache.fingerprint import DIGEST_BYTES, Partition
from cache.scripts import DROP, PUT, PUT_VECTORS

PURGE_CHANNEL = "sameway:cache:purge"
_LOG = "sameway:cache:log"
_EPOCH = "sameway:cache:epoch"
_PARTITIONS = "sameway:cache:partitions"

LOG_LENGTH_MAX = 100_000  # about; a follower that falls further behind rebuilds
_READ_COUNT = 1_000
_SCAN_COUNT = 500
_DROP_COUNT = 200
_OVERHEAD_BYTES = 400  # of the hash fields, sorted sets and the digests in them, for one entry
_RECEIPT_TTL_S = 60
_VECTOR_BYTES = 1_000  # and for the vector of an entry that has a text

REDIS_FAILURES = (RedisError, OSError, TimeoutError)


class Redis(Protocol):
    """What is needed of redis.asyncio.Redis (decode_responses=False) or of anything that batches for it. Replies are as redis-py
    parses them: HSCAN a cursor and a dict, XRANGE pairs of id and dict."""

    async def execute_command(self, *args: Any) -> Any: ...
    async def eval(self, script: str, numkeys: int, *keys_and_args: Any) -> Any: ...


class Added(msgspec.Struct, frozen=True, array_like=True, tag="+"):
    """A log record: this entry can be found by meaning."""

    partition: Partition
    exact: bytes
    compat: bytes
    text: str
    created_at: float
    expires_at: float


class Dropped(msgspec.Struct, frozen=True, array_like=True, tag="-"):
    """A log record: these entries of a partition are gone."""

    partition: Partition
    exacts: tuple[bytes, ...]


LogRecord = Added | Dropped


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """A message on the purge channel. A heartbeat is one without a purge; `receipt` names who waits for obedience, or the heart."""

    purge: Purge | None
    receipt: bytes = b""


@dataclass(frozen=True, slots=True)
class Packed:
    """An entry as it goes to Redis. `size_bytes` is what it counts against the budget: its data, what is kept about it, its
    vector, and Redis' overhead."""

    entry: Entry
    data: bytes
    about: bytes
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Put:
    """What storing one entry did."""

    is_replaced: bool
    evicted: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """One entry as a scan finds it: without its chunks."""

    exact: bytes
    size_bytes: int
    about: About


@dataclass(frozen=True, slots=True)
class LogPosition:
    """How far a follower has read, and of which life of Redis' data."""

    id: bytes
    epoch: bytes


@dataclass(frozen=True, slots=True)
class LogRead:
    """Records after a position. `is_lost`: the position is not in this log any more; rebuild from a scan."""

    records: tuple[LogRecord, ...]
    position: LogPosition
    is_lost: bool
    is_more: bool


@dataclass(frozen=True, slots=True)
class PartitionSize:
    partition: Partition
    entries: int
    size_bytes: int


_LOG_DECODER = msgspec.msgpack.Decoder(LogRecord)
_ABOUT_DECODER = msgspec.msgpack.Decoder(About)
_ENCODER = msgspec.msgpack.Encoder()


class EntryStore:
    """Entries in Redis. Everything raises redis.exceptions.RedisError or OSError while Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    # --- one entry

    async def fetch(self, partition: Partition, exact: bytes) -> bytes | None:
        """The encoded entry, perhaps an expired one."""
        data: bytes | None = await self._redis.execute_command("HGET", _keys(partition)[0], exact)
        return data

    async def fetch_warm(self, partition: Partition, links: Sequence[bytes]) -> list[bytes | None]:
        """Who saw each prefix last."""
        if not links:
            return []
        labels: list[bytes | None] = await self._redis.execute_command(
            "MGET", *(_warm_key(partition, link) for link in links)
        )
        return labels

    async def put(
        self,
        packed: Packed,
        *,
        now: float,
        size_bytes_max: int,
        warm: str | None,
        links: Iterable[bytes],
        warm_ttl_s: float,
    ) -> Put:
        """Store an entry, evicting the least recently used ones of its partition until it fits."""
        entry = packed.entry
        keys = [*_keys(entry.partition)]
        if warm is not None:
            keys += [_warm_key(entry.partition, link) for link in dict.fromkeys(links)]
        argv = (
            entry.exact,
            packed.data,
            packed.about,
            packed.size_bytes,
            _ms(now),
            _ms(entry.expires_at),
            size_bytes_max,
        )
        waiting: list[Awaitable[Any]] = [
            self._redis.eval(PUT, len(keys), *keys, *argv, _ms(warm_ttl_s), warm or ""),
            self._redis.execute_command("ZADD", _PARTITIONS, int(now), entry.partition),
        ]
        if entry.text is not None:
            added = Added(entry.partition, entry.exact, entry.compat, entry.text, entry.created_at, entry.expires_at)
            waiting.append(self._append(added))
        was_there, *evicted = (await asyncio.gather(*waiting))[0]
        if evicted:
            await self._append(Dropped(entry.partition, tuple(evicted)))
        return Put(bool(was_there), tuple(evicted))

    async def link(self, partition: Partition, links: Iterable[bytes], warm: str, warm_ttl_s: float) -> None:
        """Remember who saw these prefixes, without an entry."""
        key_of, ttl_ms = _warm_key, _ms(warm_ttl_s)
        commands = (self._redis.execute_command("SET", key_of(partition, one), warm, "PX", ttl_ms) for one in links)
        await asyncio.gather(*commands)

    async def touch(self, partition: Partition, uses: Iterable[tuple[bytes, float]]) -> None:
        """Record when entries were used last; those that are gone stay gone."""
        arguments: list[Any] = []
        for exact, at in uses:
            arguments += (_ms(at), exact)
        await self._redis.execute_command("ZADD", _keys(partition)[2], "XX", *arguments)

    async def drop(self, partition: Partition, exacts: Sequence[bytes]) -> tuple[int, int]:
        """Remove entries and say so in the log. The answer is how many there were, and their bytes."""
        keys, count, freed = _keys(partition), 0, 0
        for start in range(0, len(exacts), _DROP_COUNT):
            some = tuple(exacts[start : start + _DROP_COUNT])
            removed, _ = await asyncio.gather(
                self._redis.eval(DROP, len(keys), *keys, *some), self._append(Dropped(partition, some))
            )
            count, freed = count + removed[0], freed + removed[1]
        return count, freed

    # --- all entries

    async def partitions(self) -> list[Partition]:
        """Every partition that ever stored, the latest first."""
        members: list[bytes] = await self._redis.execute_command("ZREVRANGE", _PARTITIONS, 0, -1)
        return [Partition(member) for member in members if len(member) == DIGEST_BYTES]

    async def forget_partitions(self, before: float) -> None:
        """Forget partitions whose last store was before a unix time at which every entry of theirs had expired."""
        await self._redis.execute_command("ZREMRANGEBYSCORE", _PARTITIONS, "-inf", f"({int(before)}")

    async def scan(self, partition: Partition) -> AsyncIterator[list[Stored]]:
        """Batches of the partition's entries: each that is there all the while at least once."""
        cursor = 0
        while True:
            cursor, found = await self._redis.execute_command(
                "HSCAN", _keys(partition)[1], cursor, "COUNT", _SCAN_COUNT
            )
            batch = []
            for exact, value in found.items():
                about = _decode_about(value)
                if about is not None:
                    batch.append(Stored(exact, int(value[:10]), about))
            if batch:
                yield batch
            if cursor == 0:
                return

    async def find(self, partition: Partition, exact: bytes) -> Stored | None:
        value: bytes | None = await self._redis.execute_command("HGET", _keys(partition)[1], exact)
        about = _decode_about(value) if value is not None else None
        return Stored(exact, int(value[:10]), about) if value is not None and about is not None else None

    async def size(self, partition: Partition) -> PartitionSize:
        keys = _keys(partition)
        count, size = await asyncio.gather(
            self._redis.execute_command("HLEN", keys[1]), self._redis.execute_command("GET", keys[4])
        )
        return PartitionSize(partition, int(count), int(size or 0))

    # --- vectors

    async def put_vectors(
        self, partition: Partition, embedder_key: bytes, vectors: Sequence[tuple[bytes, bytes]]
    ) -> None:
        """Keep vectors (exact, bytes) beside their entries; those whose entry is gone are not kept."""
        keys = _keys(partition)
        for start in range(0, len(vectors), _DROP_COUNT):
            argv: list[bytes] = []
            for exact, vector in vectors[start : start + _DROP_COUNT]:
                argv += (exact, embedder_key + vector)
            await self._redis.eval(PUT_VECTORS, 2, keys[5], keys[1], *argv)

    async def fetch_vectors(
        self, partition: Partition, embedder_key: bytes, exacts: Sequence[bytes]
    ) -> list[bytes | None]:
        """The vectors that this embedder made, None where there is none."""
        if not exacts:
            return []
        values: list[bytes | None] = await self._redis.execute_command("HMGET", _keys(partition)[5], *exacts)
        return [
            value[len(embedder_key) :] if value is not None and value.startswith(embedder_key) else None
            for value in values
        ]

    # --- the log

    async def _append(self, record: LogRecord) -> None:
        data = _ENCODER.encode(record)
        await self._redis.execute_command("XADD", _LOG, "MAXLEN", "~", LOG_LENGTH_MAX, "*", "r", data)

    async def log_end(self, new_epoch: bytes) -> LogPosition:
        """The position after the last record. `new_epoch` names the life of Redis' data if it has no name yet."""
        await self._redis.execute_command("SET", _EPOCH, new_epoch, "NX")
        epoch, last = await asyncio.gather(
            self._redis.execute_command("GET", _EPOCH),
            self._redis.execute_command("XREVRANGE", _LOG, "+", "-", "COUNT", 1),
        )
        return LogPosition(last[0][0] if last else b"0-0", epoch)

    async def read_log(self, position: LogPosition) -> LogRead:
        """Up to a thousand records after `position`; never waits for new ones."""
        epoch, items = await asyncio.gather(
            self._redis.execute_command("GET", _EPOCH),
            self._redis.execute_command("XRANGE", _LOG, b"(" + position.id, "+", "COUNT", _READ_COUNT),
        )
        is_full = len(items) == _READ_COUNT
        is_lost = epoch != position.epoch
        if is_full and not is_lost:
            # only a follower this far behind can have lost records to trimming
            first = await self._redis.execute_command("XRANGE", _LOG, "-", "+", "COUNT", 1)
            is_lost = bool(first) and _id_key(first[0][0]) > _id_key(position.id)
        records = []
        for _, fields in items:
            try:
                records.append(_LOG_DECODER.decode(fields[b"r"]))
            except (msgspec.DecodeError, KeyError):
                continue  # of another version of Sameway beside this one: its entries are none of ours
        end = LogPosition(items[-1][0] if items else position.id, position.epoch)
        return LogRead(tuple(records), end, is_lost, is_full)

    async def announce_purge(self, purge: Purge, receipt: bytes = b"") -> int:
        """Tell every in-process cache; the answer is how many listen. Each signs a given receipt once it has obeyed."""
        heard: int = await self._redis.execute_command(
            "PUBLISH", PURGE_CHANNEL, _ENCODER.encode(Announced(purge, receipt))
        )
        return heard

    async def beat(self, name: bytes) -> None:
        """A heartbeat on the purge channel, for whoever knows its name."""
        await self._redis.execute_command("PUBLISH", PURGE_CHANNEL, _ENCODER.encode(Announced(None, name)))

    async def sign(self, receipt: bytes) -> None:
        key = _receipt_key(receipt)
        await asyncio.gather(
            self._redis.execute_command("INCR", key), self._redis.execute_command("EXPIRE", key, _RECEIPT_TTL_S)
        )

    async def signatures(self, receipt: bytes) -> int:
        return int(await self._redis.execute_command("GET", _receipt_key(receipt)) or 0)


def pack(entry: Entry) -> Packed:
    data, about = entry.encode(), _ENCODER.encode(entry.about())
    size = len(data) + len(about) + _OVERHEAD_BYTES + (_VECTOR_BYTES if entry.text is not None else 0)
    return Packed(entry, data, b"%010d" % size + about, size)


def unavailable(error: BaseException) -> CacheUnavailable:
    return CacheUnavailable(f"Redis: {error}")


def _keys(partition: Partition) -> tuple[str, ...]:
    tag = "sameway:{" + partition.hex() + "}:"
    return (tag + "entries", tag + "about", tag + "used", tag + "expires", tag + "bytes", tag + "vectors")


def _warm_key(partition: Partition, link: bytes) -> str:
    return "sameway:{" + partition.hex() + "}:warm:" + link.hex()


def _receipt_key(receipt: bytes) -> str:
    return "sameway:cache:purged:" + receipt.hex()


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _decode_about(value: bytes) -> About | None:
    try:
        return _ABOUT_DECODER.decode(value[10:])
    except msgspec.DecodeError:
        return None


def _id_key(stream_id: bytes) -> tuple[int, int]:
    ms, _, sequence = stream_id.partition(b"-")
    return int(ms), int(sequence or 0)
