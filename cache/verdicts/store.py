"""Verdicts in Redis, with groups of equal answers, suspensions, and the answers of responses.

    sameway:{P}:verdicts     stream   verdicts, in the order in which every index learns them
    sameway:{P}:groups       hash     exact -> its answer's time, the name of its group
    sameway:{P}:suspended    hash     name -> Suspension, until it is cleared
    sameway:{P}:told         zset     the ids of the newest verdicts that were taken, by their time
    sameway:{P}:reply:R      string   Reply: the answer that response R, or the answer R, served
    sameway:{P}:replies      zset     the keys of these, by their time
    sameway:cache:untold     hash     cache worker -> a number that rises while it lives, and its Untold

P is the partition in hex. Knows no answers and no texts: digests, numbers and times. The log
(`cache.exact.log`) names the partitions with new verdicts, and a follower reads their streams from
its last position: a verdict that a crashed process did not announce is read with the next.
Invariants: one script takes a verdict with all its effects, once for an id; a group holds answers,
not entries: an answer made anew is in none.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from cache.events import VerdictAdded
from cache.exact.log import EntryLog
from cache.fingerprint import DIGEST_BYTES, Partition
from cache.redis_client import Redis
from cache.stored import reader
from cache.verdicts.records import (
    AnswerCleared,
    AnswerJudged,
    AnswerRef,
    AnswerSuspended,
    Scope,
    ServedReply,
    Source,
    Suspension,
    Verdict,
    VerdictRecord,
)

VERDICTS_MAX = 10_000  # about, of a partition; a rebuild learns from these
KEPT_S = 30 * 86_400.0  # after the last verdict of a partition
_ONCE_S = 7 * 86_400.0
_READ_COUNT = 1_000
_SUSPENDED_MAX = 10_000
REPLIES_MAX = 100_000  # of a partition, some 50 MB
TAKEN_MAX = 100_000  # some 10 MB


Untold = dict[bytes, tuple[int, float]]
"""By namespace, the hits that no comparison has told yet, and the errors to expect of them."""

_UNTOLD = "sameway:cache:untold"
_ENCODER = msgspec.msgpack.Encoder()
_read_untold = reader(msgspec.msgpack.Decoder(tuple[int, Untold]))
_read_suspension = reader(msgspec.msgpack.Decoder(Suspension))

# Whether no verdict with this id is among the newest that were taken; then it is.
_IS_FIRST = """
local function is_first(told, id, once_ms, most)
  local time = redis.call('TIME')
  if redis.call('ZADD', told, 'NX', time[1] * 1000 + math.floor(time[2] / 1000), id) == 0 then return false end
  redis.call('ZREMRANGEBYRANK', told, 0, -1 - most)
  redis.call('PEXPIRE', told, once_ms)
  return true
end
"""

# KEYS: told. ARGV: id, once_ms, most.
_TAKE_ONCE = _IS_FIRST + "return is_first(KEYS[1], ARGV[1], ARGV[2], ARGV[3]) and 1 or 0"

# KEYS: verdicts, groups, about, suspended, told, words. ARGV: verdict, once_ms, kept_ms, length_max,
# other, its time, same as (or empty), its time, asked (or empty), its time, scope, suspension,
# suspended_max, 1 where it is wrong for whoever gets it, id, told_max. Answers whether it was new. A group is resolved here, where
# nothing can move it meanwhile. The pointers from other prompts to a wrong answer go.
_TAKE = (
    _IS_FIRST
    + """
local verdicts, groups, about, suspended = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
if not is_first(KEYS[5], ARGV[15], ARGV[2], ARGV[16]) then return 0 end
local function group_of(exact, created)
  local known = redis.call('HGET', groups, exact)
  if known and string.sub(known, 1, 8) == created then return string.sub(known, 9), true end
  return exact .. created, false
end
local other = group_of(ARGV[5], ARGV[6])
local joined = ''
if ARGV[7] ~= '' and ARGV[9] ~= '' and redis.call('HEXISTS', about, ARGV[9]) == 1 then
  local _, has_one = group_of(ARGV[9], ARGV[10])
  if not has_one then
    joined = group_of(ARGV[7], ARGV[8])
    redis.call('HSET', groups, ARGV[9], ARGV[10] .. joined)
    local left = redis.call('PTTL', about)
    if left > 0 then redis.call('PEXPIRE', groups, left) end
  end
end
local listed = ARGV[14] == '1' and redis.call('HGET', KEYS[6], ARGV[5] .. 'p') or ''
for at = 1, #listed, 16 do
  local key = string.sub(listed, at, at + 15)
  local pointer = redis.call('HGET', KEYS[6], key)
  if pointer and string.sub(pointer, 1, 16) == ARGV[5] and #pointer > 48 then redis.call('HDEL', KEYS[6], key) end
end
local name = ''
if ARGV[11] == 'a' then name = 'a' .. ARGV[5] .. ARGV[6] end
if ARGV[11] == 'g' then name = 'g' .. other end
if name ~= '' and redis.call('HLEN', suspended) < tonumber(ARGV[13]) then
  redis.call('HSET', suspended, name, ARGV[12])
  redis.call('PEXPIRE', suspended, ARGV[3])
end
redis.call('XADD', verdicts, 'MAXLEN', '~', ARGV[4], '*', 'f', ARGV[1], 'o', other, 'j', joined, 's', name)
redis.call('PEXPIRE', verdicts, ARGV[3])
return 1
"""
)

# KEYS: verdicts, suspended. ARGV: name, length_max. Answers whether it was suspended.
_CLEAR = """
if redis.call('HDEL', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[2], '*', 'c', ARGV[1])
return 1
"""

# KEYS: replies, the keys of one reply. ARGV: the reply, ttl_ms, most. The oldest give way.
_REMEMBER = """
local time = redis.call('TIME')
for at = 2, #KEYS do
  redis.call('SET', KEYS[at], ARGV[1], 'PX', ARGV[2])
  redis.call('ZADD', KEYS[1], time[1] * 1000 + math.floor(time[2] / 1000), KEYS[at])
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
local over = redis.call('ZCARD', KEYS[1]) - ARGV[3]
if over <= 0 then return end
for _, key in ipairs(redis.call('ZRANGE', KEYS[1], 0, over - 1)) do redis.call('DEL', key) end
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, over - 1)
"""


class VerdictStore:
    """Everything raises redis.exceptions.RedisError or OSError while Redis is away."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._log = EntryLog(redis)

    async def take(
        self,
        partition: Partition,
        id: str,
        verdict: Verdict,
        other: AnswerRef,
        same_as: AnswerRef | None = None,
        scope: Scope = Scope.NOTHING,
        suspension: Suspension | None = None,
    ) -> bool:
        """Keep a verdict on the answer `other`, with what follows: the asked entry joins the group
        of `same_as`, `scope` goes out of service. False where one with this id was taken before:
        nothing happens then, but that it is said again.
        """
        tag = _tag(partition)
        keys = tuple(tag + name for name in ("verdicts", "groups", "about", "suspended", "told", "words"))
        equal = (same_as.exact, _double(same_as.created_at)) if same_as is not None else (b"", b"")
        argv = (
            verdict.encode(), _ms(_ONCE_S), _ms(KEPT_S), VERDICTS_MAX, other.exact, _double(other.created_at), *equal,
            verdict.exact, _double(verdict.created_at), scope.value, _ENCODER.encode(suspension) if suspension else b"",
            _SUSPENDED_MAX, int(verdict.is_right is False and verdict.source is not Source.VERIFIER), id, TAKEN_MAX,
        )  # fmt: skip
        is_new = bool(await self._redis.eval(_TAKE, len(keys), *keys, *argv))
        await self._log.append(VerdictAdded(partition))
        return is_new

    async def take_once(self, partition: Partition, id: str) -> bool:
        """Keep the id of a verdict. Returns False if it was taken before."""
        told = _tag(partition) + "told"
        return bool(await self._redis.eval(_TAKE_ONCE, 1, told, id, _ms(_ONCE_S), TAKEN_MAX))

    async def was_taken(self, partition: Partition, id: str) -> bool:
        return await self._redis.execute_command("ZSCORE", _tag(partition) + "told", id) is not None

    async def clear(self, partition: Partition, name: bytes) -> bool:
        """Put an answer back into service. False where it was not out of it."""
        tag = _tag(partition)
        was = bool(await self._redis.eval(_CLEAR, 2, tag + "verdicts", tag + "suspended", name, VERDICTS_MAX))
        await self._log.append(VerdictAdded(partition))
        return was

    async def keep_untold(self, worker: str, beat: int, untold: Untold) -> bool:
        """Keep what a worker has to tell. Whether this is its first since it had nothing, or since that was taken."""
        if not untold:
            return not await self._redis.execute_command("HDEL", _UNTOLD, worker)
        return bool(await self._redis.execute_command("HSET", _UNTOLD, worker, _ENCODER.encode((beat, untold))))

    async def untold(self) -> dict[bytes, bytes]:
        """What all workers have to tell, for `take_untold`: one that lives changes its own."""
        kept: dict[bytes, bytes] = await self._redis.execute_command("HGETALL", _UNTOLD)
        return kept

    async def take_untold(self, worker: bytes, kept: bytes) -> Untold:
        """What a worker that ended had kept; empty where another has it."""
        if not await self._redis.execute_command("HDEL", _UNTOLD, worker):
            return {}
        try:
            return _read_untold(kept)[1]
        except msgspec.DecodeError:  # of another version
            return {}

    async def suspended(self, partition: Partition) -> dict[bytes, Suspension]:
        """The suspensions of a partition, by name."""
        suspensions: dict[bytes, Suspension] = {}
        cursor = 0
        while True:
            cursor, page = await self._redis.execute_command(
                "HSCAN", _tag(partition) + "suspended", cursor, "COUNT", 500
            )
            for name, value in page.items():
                try:
                    suspensions[name] = _read_suspension(value)
                except msgspec.DecodeError:  # of another version: out of service all the same
                    suspensions[name] = Suspension(exact=name[1 : 1 + DIGEST_BYTES], source=Source.FEEDBACK, at=0.0)
            if cursor == 0:
                return suspensions

    async def read(self, partition: Partition, after: bytes) -> tuple[list[VerdictRecord], bytes]:
        """Everything said after a position of the stream (`0-0`: all that is kept), and the
        position then.
        """
        records: list[VerdictRecord] = []
        while True:
            # decision: verdicts-in-one-stream
            items: list[Any] = await self._redis.execute_command(
                "XRANGE", _tag(partition) + "verdicts", b"(" + after, "+", "COUNT", _READ_COUNT
            )
            for id, fields in items:
                records += _records(partition, fields)
                after = id
            if len(items) < _READ_COUNT:
                return records, after

    async def groups(self, partition: Partition, exacts: Sequence[bytes]) -> list[tuple[float, bytes] | None]:
        """For each entry when its grouped answer was made, and the group."""
        values: list[bytes | None] = await self._redis.execute_command("HMGET", _tag(partition) + "groups", *exacts)
        return [(_undouble(value[:8]), value[8:]) if value is not None and len(value) > 8 else None for value in values]

    async def remember_replies(
        self, replies: Iterable[tuple[Partition, ServedReply, Iterable[str]]], ttl_s: float
    ) -> None:
        """Each under its id, and under other names that its reader may know it by; a name means the
        latest reply that had it.
        """
        sent = [
            self._redis.eval(_REMEMBER, len(keys), *keys, reply.encode(), _ms(ttl_s), REPLIES_MAX)
            for partition, reply, names in replies
            for tag in (_tag(partition),)
            for keys in ([tag + "replies", *(f"{tag}reply:{reply_command}" for reply_command in (reply.id, *names))],)
        ]
        for reply_command in sent:
            await reply_command

    async def reply(self, partition: Partition, id: str) -> ServedReply | None:
        """The answer that a response served; None if it is not remembered, or not
        in a form that this version reads."""
        value = await self._redis.execute_command("GET", _tag(partition) + "reply:" + id)
        try:
            return ServedReply.decode(value) if value is not None else None
        except msgspec.DecodeError:
            return None


def _records(partition: Partition, fields: dict[bytes, bytes]) -> list[VerdictRecord]:
    if b"c" in fields:
        return [AnswerCleared(partition, fields[b"c"])]
    try:
        verdict = Verdict.decode(fields[b"f"])
    except (msgspec.DecodeError, KeyError):
        return []  # of another version of Sameway beside this one
    judged = AnswerJudged(partition, verdict, fields[b"o"], fields[b"j"] or None)
    return [judged, AnswerSuspended(partition, fields[b"s"])] if fields[b"s"] else [judged]


def _tag(partition: Partition) -> str:
    return "sameway:{" + partition.hex() + "}:"


def _ms(seconds: float) -> int:
    return int(seconds * 1000)


def _double(value: float) -> bytes:
    return struct.pack(">d", value)


def _undouble(data: bytes) -> float:
    value: float = struct.unpack(">d", data)[0]
    return value
