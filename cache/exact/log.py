"""The stream and the channel through which processes tell each other about entries and purges.

    sameway:cache:log       stream   partition and id of each entry that came or went, for the indexes,
                                     and the partitions with new verdicts
                                     its group `index`: what each host's cache worker brings to
                                     the vector engine, if there is one
    sameway:cache:filling   string   while a cache worker brings all entries to it
    sameway:cache:epoch     string   random; a change means that Redis lost its data
    sameway:cache:purge     channel  purges, for the in-process caches, and their heartbeats
    sameway:cache:purged:R  string   how many caches have applied the purge with receipt R

Knows no entries: the log holds digests, no prompt, so a purge leaves no text in it. Invariant: a
follower that may have missed records gets `is_lost`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from redis.exceptions import ResponseError

from cache.entry import Purge
from cache.events import LogRecord
from cache.redis_client import Redis
from cache.stored import reader

PURGE_CHANNEL = "sameway:cache:purge"
_LOG = "sameway:cache:log"
_EPOCH = "sameway:cache:epoch"
_GROUP, _CLAIMED_MS = "index", 30_000
_FILLING, _FILLING_MS = "sameway:cache:filling", 600_000

LOG_LENGTH_MAX = 100_000  # about; a follower that falls further behind rebuilds
READ_COUNT = 1_000
_RECEIPT_TTL_S = 60


class Announced(msgspec.Struct, frozen=True, array_like=True):
    """A message on the purge channel. Without a purge it is a heartbeat.

    `receipt` names the process that waits until all have applied the purge, or the sender of the
    heartbeat.
    """

    purge: Purge | None
    receipt: bytes = b""


@dataclass(frozen=True, slots=True)
class LogPosition:
    """A follower's position: the last record that it read, and the epoch of Redis' data."""

    id: bytes
    epoch: bytes


@dataclass(frozen=True, slots=True)
class LogRead:
    """Records after a position. `is_lost`: the log no longer has the position; rebuild from the
    entries.
    """

    records: tuple[LogRecord, ...]
    position: LogPosition
    is_lost: bool
    is_more: bool


class EntryLog:
    """The stream and the channel. All methods raise redis.exceptions.RedisError or OSError while
    Redis is away.
    """

    def __init__(self, redis: Redis) -> None:
        self._redis = redis

    def append(self, record: LogRecord) -> Awaitable[Any]:
        """Append a record; `RedisLink` sends it even if the result is not awaited."""
        return self._redis.execute_command(*appending(record))

    async def end(self, new_epoch: bytes) -> LogPosition:
        """The position after the last record. `new_epoch` names Redis' data if they have no name
        yet.
        """
        await self._redis.execute_command("SET", _EPOCH, new_epoch, "NX")
        epoch, last_records = await asyncio.gather(
            self._redis.execute_command("GET", _EPOCH),
            self._redis.execute_command("XREVRANGE", _LOG, "+", "-", "COUNT", 1),
        )
        return LogPosition(last_records[0][0] if last_records else b"0-0", epoch)

    def listen(self, position: LogPosition, wait_ms: int = 0) -> tuple[asyncio.Future[Any], asyncio.Future[Any]]:
        """Request up to a thousand records after `position`. `read` takes the replies.

        The second reply comes when Redis has a record, or after `wait_ms`; the first once Redis has
        both commands.
        """
        block = ("BLOCK", wait_ms) if wait_ms else ()
        log = ("XREAD", "COUNT", READ_COUNT, *block, "STREAMS", _LOG, position.id)
        epoch, records = (asyncio.ensure_future(self._redis.execute_command(*one)) for one in (("GET", _EPOCH), log))
        return epoch, records

    async def read(self, position: LogPosition, epoch: bytes | None, reply: Any) -> LogRead:
        """The records in the replies to `listen(position)`."""
        items = reply[0][1] if reply else ()
        is_full, is_lost = len(items) == READ_COUNT, epoch != position.epoch
        if is_full and not is_lost:
            # only a follower this far behind can have lost records to trimming
            first = await self._redis.execute_command("XRANGE", _LOG, "-", "+", "COUNT", 1)
            is_lost = bool(first) and _order(first[0][0]) > _order(position.id)
        records = [record for record in (_record(fields) for _, fields in items) if record is not None]
        end = LogPosition(items[-1][0] if items else position.id, position.epoch)
        return LogRead(tuple(records), end, is_lost, is_full)

    async def assigned(self, worker: str, count: int) -> list[tuple[bytes, LogRecord | None]]:
        """Up to `count` records, with their ids, that no other worker was given. What a worker was given
        and did not end in half a minute is given to another.
        """
        try:
            claimed = await self._redis.execute_command(
                "XAUTOCLAIM", _LOG, _GROUP, worker, _CLAIMED_MS, "0-0", "COUNT", count
            )
            items = claimed[1]
            if not items:
                command = ("XREADGROUP", "GROUP", _GROUP, worker, "COUNT", count, "STREAMS", _LOG, ">")
                reply = await self._redis.execute_command(*command)
                items = reply[0][1] if reply else ()
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._redis.execute_command("XGROUP", "CREATE", _LOG, _GROUP, "$", "MKSTREAM")
            return []
        return [(id, _record(fields)) for id, fields in items if fields is not None]

    async def end_assigned(self, ids: Sequence[bytes]) -> None:
        """These records need no work any more."""
        if ids:
            await self._redis.execute_command("XACK", _LOG, _GROUP, *ids)

    async def may_fill(self) -> bool:
        """Whether no other worker fills the engine. One that takes long may get company: that is no harm."""
        return bool(await self._redis.execute_command("SET", _FILLING, 1, "NX", "PX", _FILLING_MS))

    async def end_filling(self) -> None:
        await self._redis.execute_command("DEL", _FILLING)

    async def announce(self, purge: Purge | None, receipt: bytes = b"") -> int:
        """Send a purge, or without one a heartbeat, to every in-process cache; returns the
        listeners' number.

        Each signs the receipt when it has applied the purge.
        """
        message = _ENCODER.encode(Announced(purge, receipt))
        listening: int = await self._redis.execute_command("PUBLISH", PURGE_CHANNEL, message)
        return listening

    async def sign(self, receipt: bytes) -> None:
        key = _receipt_key(receipt)
        await asyncio.gather(
            self._redis.execute_command("INCR", key), self._redis.execute_command("EXPIRE", key, _RECEIPT_TTL_S)
        )

    async def signatures(self, receipt: bytes) -> int:
        return int(await self._redis.execute_command("GET", _receipt_key(receipt)) or 0)


_ENCODER = msgspec.msgpack.Encoder()
_records: msgspec.msgpack.Decoder[LogRecord] = msgspec.msgpack.Decoder(LogRecord)
_read = reader(_records)


def _record(fields: Mapping[bytes, bytes]) -> LogRecord | None:
    """None for one of another version of Sameway beside this one: its entries are none of ours."""
    try:
        return _read(fields[b"r"])
    except (msgspec.DecodeError, KeyError):
        return None


def appending(record: LogRecord) -> tuple[Any, ...]:
    """The command that appends a record."""
    return ("XADD", _LOG, "MAXLEN", "~", LOG_LENGTH_MAX, "*", "r", _ENCODER.encode(record))


def _receipt_key(receipt: bytes) -> str:
    return "sameway:cache:purged:" + receipt.hex()


def _order(stream_id: bytes) -> tuple[int, int]:
    ms, _, sequence = stream_id.partition(b"-")
    return int(ms), int(sequence or 0)
