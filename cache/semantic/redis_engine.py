"""Redis' query engine as a vector engine: Redis 8, Redis Stack 7.4, or Valkey with valkey-search 1.3.

    sameway:index:{K}:P-E   hash   r: rooms in hex, with commas; s: the first 48 bits of E;
                                   v: vector; c: in hex, the digest of what was embedded
    sameway:index:{K}       index  of these hashes: r and c tags, s a number, v a graph (HNSW)

K is the embedder's key, P the partition and E `exact`, in hex. A hash expires with its entry. Which
parts a server has is asked by using them once. Sources:
https://redis.io/docs/latest/commands/ft.search/, https://valkey.io/commands/ft.search/ and its
https://valkey.io/topics/search-query (FLOAT16: the notes of release 1.3.0). Knows no prompts.
Invariant: a search names one room, and finds keys of that room alone.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from redis.exceptions import ResponseError

from cache.fingerprint import DIGEST_BYTES, Partition
from cache.redis_client import REDIS_FAILURES
from cache.redis_link import RedisLink
from cache.semantic.engine import EngineAway, EngineUnfit, PlacedKey, Proposed

_GRAPH = ("M", 16, "EF_CONSTRUCTION", 128)
_EF = 160  # keys of the graph that a search looks at
_BATCHES_FROM = 5_000  # keys of a room
_READS = 5
_AT_ONCE = 64  # keys in one write: a search waits for no more
# refusals that pass, the last three those of valkey-search (its src/query/search.h); any other says what
# the server cannot do
_FOR_NOW = re.compile(
    "OOM|READONLY|LOADING|Redis is loading|MASTERDOWN|BUSY|MISCONF|NOREPLICAS|NOAUTH|WRONGPASS"
    "|Search operation cancelled|Search query queue depth|Index or slot consistency"
)
_NEEDED = "cache.index_url needs Redis 8, Redis Stack 7.4, or Valkey with valkey-search 1.3"


class RedisEngine:
    """Vectors of `dims` numbers of the embedder with this key. `timeout_s` bounds a reply."""

    def __init__(self, url: str, dims: int, embedder_key: bytes, timeout_s: float) -> None:
        self._redis = RedisLink(url, timeout_s)
        self._dims = dims
        self._policy = ""
        # one hash tag: an index and its keys are of one node
        self._name = f"sameway:index:{{{embedder_key.hex()}}}"

    async def open(self) -> None:
        room, vector = bytes(DIGEST_BYTES), np.zeros(self._dims, dtype=np.float32)
        graph = ("HNSW", 10, "TYPE", "FLOAT16", "DIM", self._dims, "DISTANCE_METRIC", "IP", *_GRAPH)
        fields = ("SCHEMA", "r", "TAG", "c", "TAG", "s", "NUMERIC", "SORTABLE", "v", "VECTOR", *graph)
        # Redis' own choice reads rooms of tens of thousands one by one; Valkey has none to make
        batches = self._nearest(room, vector, 1, "HYBRID_POLICY BATCHES ")
        for part, command in (
            ("FT.CREATE with FLOAT16", ("FT.CREATE", self._name, "ON", "HASH", "PREFIX", 1, f"{self._name}:", *fields)),
            ("FT.SEARCH of the nearest keys with a tag", self._nearest(room, vector, 1)),
            ("FT.SEARCH by tag alone, sorted by a number", self._sample(room, 1)),
        ):
            refusal = await self._try(*command)
            if refusal and "already exists" not in refusal.lower():
                raise EngineUnfit(f"the server has no {part} ({refusal}); {_NEEDED}")
        self._policy = "" if await self._try(*batches) else "HYBRID_POLICY BATCHES "

    async def _try(self, *command: Any) -> str:
        """The server's refusal of a command; empty where it has it. Raises EngineAway."""
        try:
            await self._redis.execute_command(*command)
        except ResponseError as error:
            if _FOR_NOW.match(str(error)) is None:
                return str(error)
            raise EngineAway(str(error)) from None
        except REDIS_FAILURES as error:
            raise EngineAway(str(error) or type(error).__name__) from None
        return ""

    async def put(self, keys: Sequence[PlacedKey]) -> None:
        for start in range(0, len(keys), _AT_ONCE):
            commands: list[tuple[Any, ...]] = []
            for key in keys[start : start + _AT_ONCE]:
                name = self._key_of(key.partition, key.exact)
                numbers, check = key.vector[: 2 * self._dims], key.vector[2 * self._dims :].hex()
                rooms = ",".join(room.hex() for room in key.rooms)
                fields = ("r", rooms, "s", int.from_bytes(key.exact[:6], "big"), "v", numbers, "c", check)
                commands.append(("HSET", name, *(fields if check else fields[:-2])))
                commands.append(("PEXPIREAT", name, int(1000 * key.expires_at)))
            await self._send(*commands)

    async def drop(self, partition: Partition, exacts: Sequence[bytes]) -> None:
        if exacts:
            await self._send(*(("UNLINK", self._key_of(partition, exact)) for exact in exacts))

    async def sample(self, room: bytes, count: int) -> Proposed:
        for _ in range(_READS):
            (reply,) = await self._send(self._sample(room, count))
            proposed = self._read(reply)
            dead = [name for name, fields in _listed(reply) if not fields]
            if not dead:
                return proposed
            # a key that expired and was not removed yet takes a place in the reply: asking for it removes it
            await self._send(("EXISTS", *dead))
        raise EngineAway("keys expire faster than they can be read")

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> Proposed:
        policy = self._policy if size > _BATCHES_FROM else ""
        return self._read(*await self._send(self._nearest(room, vector, count, policy)))

    async def aclose(self) -> None:
        await self._redis.aclose()

    def _sample(self, room: bytes, count: int) -> tuple[Any, ...]:
        return ("FT.SEARCH", self._name, _filter(room), "SORTBY", "s", "ASC", *_fields(count))

    def _nearest(self, room: bytes, vector: NDArray[np.float32], count: int, policy: str = "") -> tuple[Any, ...]:
        asked = f"{_filter(room)}=>[KNN {count} @v $q {policy}EF_RUNTIME {_EF}]"
        return ("FT.SEARCH", self._name, asked, "PARAMS", 2, "q", vector.astype("<f2").tobytes(), *_fields(count))

    async def _send(self, *commands: tuple[Any, ...]) -> list[Any]:
        """The replies to commands, in one round trip."""
        try:
            return await asyncio.gather(*(self._redis.execute_command(*command) for command in commands))
        except REDIS_FAILURES as error:
            raise EngineAway(str(error) or type(error).__name__) from None

    def _key_of(self, partition: Partition, exact: bytes) -> str:
        return f"{self._name}:{partition.hex()}-{exact.hex()}"

    def _read(self, reply: Any) -> Proposed:
        return {
            bytes.fromhex(name[-2 * DIGEST_BYTES :].decode()): fields[b"v"]
            + bytes.fromhex(fields.get(b"c", b"").decode())
            for name, fields in _listed(reply)
            if fields
        }


def _listed(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """The names and fields in a reply: of RESP3 a map, of RESP2 (and of valkey-search) a list. A key that
    expired has no fields.
    """
    if isinstance(reply, dict):
        return [(one[b"id"], one[b"extra_attributes"] or {}) for one in reply[b"results"]]
    return [
        (name, fields if isinstance(fields, dict) else dict(zip(*[iter(fields or ())] * 2, strict=True)))
        for name, fields in zip(reply[1::2], reply[2::2], strict=True)
    ]


def _filter(room: bytes) -> str:
    return f"@r:{{{room.hex()}}}"


def _fields(count: int) -> tuple[Any, ...]:
    return ("RETURN", 2, "v", "c", "LIMIT", 0, count, "DIALECT", 2)
