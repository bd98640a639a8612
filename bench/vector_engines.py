"""`./run bench index --engine faiss|redis|pgvector`: a vector engine under reads, as many writes, and TTL churn.

Keys with made vectors in partitions whose sizes follow Zipf's law, as do the lookups. Each lookup is timed with the decoding of its
reply and the cosines; beside it a key is put and the oldest dropped. `--engine faiss` is the worker's own index for the same work.
The servers are those of the tests, on this machine, and start here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from numpy.typing import NDArray

from bench.index import made_vectors
from cache import Partition
from cache.redis_link import RedisLink
from cache.semantic.cache import SEARCHED
from cache.semantic.engine import PlacedKey, VectorEngine, room_id
from cache.semantic.index import VectorIndex
from cache.semantic.postgres_engine import PostgresEngine
from cache.semantic.proposals import ROOM_KEYS
from cache.semantic.redis_engine import RedisEngine
from tests.services import pgvector_binaries, run_postgres, run_query_engine

ENGINES = ("faiss", "redis", "pgvector")
_PARTITION = Partition(b"bench-partition-")
_KEY = b"benchkey"
_FILL, _NEAR = 256, 0.8


class EngineRow(msgspec.Struct, frozen=True):
    """One engine and layout. Milliseconds are wall time of one lookup that asks the engine, beside as many writes; `copied` is the share of
    lookups whose room a worker has whole and which ask nothing; `engine_cpu_ms` is the server's processor time for a write, a removal
    and what is left of a lookup. `first_ms` is a sample and a search by a host that has nothing."""

    engine: str
    keys: int
    partitions: int
    fill_per_s: int
    lookup_ms_p50: float
    lookup_ms_p99: float
    engine_cpu_ms: float
    writes_per_s: int
    recall_near: float
    copied: float
    first_ms: float
    host_mb: int
    engine_mb: int


class OwnIndex:
    """FAISS in this process, by the calls of an engine."""

    def __init__(self, dims: int) -> None:
        self._index = VectorIndex(dims)
        self._exacts: list[bytes] = []
        self._numbers: dict[bytes, tuple[bytes, int]] = {}

    async def open(self) -> None: ...

    async def put(self, keys: list[PlacedKey]) -> None:
        for key in keys:
            number = len(self._exacts)
            self._exacts.append(key.exact)
            self._numbers[key.exact] = key.rooms[0], number
            self._index.add(key.rooms[0], number, np.frombuffer(key.vector, "<f2").astype(np.float32))

    async def drop(self, partition: Partition, exacts: list[bytes]) -> None:
        for exact in exacts:
            self._index.remove(*self._numbers.pop(exact))

    async def sample(self, room: bytes, count: int) -> dict[bytes, bytes]:
        return {}

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> dict[bytes, bytes]:
        (near,) = self._index.search(room, vector[None], count)
        return {self._exacts[number]: b"" for number in near.keys.tolist()}

    async def aclose(self) -> None: ...


@contextlib.asynccontextmanager
async def _started(name: str, dims: int) -> AsyncIterator[tuple[Any, Callable[[], Any], int]]:
    """An engine on a server of its own, how to ask for the bytes that it takes, and its process."""
    if name == "faiss":
        yield OwnIndex(dims), _none, os.getpid()
    elif name == "redis":
        with run_query_engine() as server:
            engine: VectorEngine = RedisEngine(server.url, dims, _KEY, 60.0)
            link = RedisLink(server.url, 60.0)

            async def used() -> int:
                return int((await link.execute_command("INFO", "memory"))["used_memory"])

            yield engine, used, server.pid
            await asyncio.gather(engine.aclose(), link.aclose())
    else:
        with run_postgres(pgvector_binaries()) as postgres:
            url = postgres.create_database()
            engine = PostgresEngine(url, dims, _KEY, 60.0)

            async def size() -> int:
                import asyncpg

                link = await asyncpg.connect(url.replace("+asyncpg", ""))
                total: int = await link.fetchval("SELECT pg_database_size(current_database())")
                await link.close()
                return total

            assert postgres._process is not None
            yield engine, size, postgres._process.pid
            await engine.aclose()


async def _none() -> int:
    return 0


async def measure(name: str, keys: int, partitions: int, seconds: float) -> EngineRow:
    """One row."""
    chance = np.random.default_rng(1)
    vectors = made_vectors(2 * keys if keys <= 200_000 else keys + 200_000)
    weights = 1 / np.arange(1, partitions + 1)
    weights /= weights.sum()
    homes = chance.choice(partitions, size=len(vectors), p=weights)
    rooms = [room_id(number.to_bytes(4, "big")) for number in range(partitions)]
    exacts = [chance.bytes(16) for _ in range(len(vectors))]

    def placed(place: int) -> PlacedKey:
        data = vectors[place].astype("<f2").tobytes()
        return PlacedKey(_PARTITION, exacts[place], (rooms[homes[place]],), time.time() + 86_400, data)

    async with _started(name, vectors.shape[1]) as (engine, used, pid):
        before_mb = _rss_mb()
        await engine.open()
        began = time.perf_counter()
        for start in range(0, keys, _FILL):
            await engine.put([placed(place) for place in range(start, min(start + _FILL, keys))])
        fill_per_s = int(keys / (time.perf_counter() - began))
        sizes = np.bincount(homes[:keys], minlength=partitions)
        began = time.perf_counter()
        await engine.sample(rooms[0], ROOM_KEYS)
        await engine.nearest(rooms[0], vectors[0], SEARCHED, int(sizes[0]))
        first_ms = 1e3 * (time.perf_counter() - began)
        times, recalls, asked, whole, at = [], [], 0, 0, keys
        ends_at, began, cpu_s = time.perf_counter() + seconds, time.perf_counter(), _cpu_s(pid)
        while time.perf_counter() < ends_at and at < len(vectors):
            place = int(chance.integers(at - keys, at))
            home, asked = int(homes[place]), asked + 1
            query = vectors[place] + chance.normal(size=vectors.shape[1]).astype(np.float32) * 0.01
            query /= np.linalg.norm(query)
            if sizes[home] < ROOM_KEYS and name != "faiss":
                whole += 1
            else:
                started = time.perf_counter()
                proposed = await engine.nearest(rooms[home], query, SEARCHED, int(sizes[home]))
                if name != "faiss":
                    np.frombuffer(b"".join(proposed.values()), "<f2").reshape(len(proposed), -1).astype(
                        np.float32
                    ) @ query
                times.append(time.perf_counter() - started)
                if len(recalls) < 300:
                    members = np.flatnonzero(homes[at - keys : at] == home) + at - keys
                    cosines = vectors[members] @ query
                    best = members[np.argsort(-cosines)[:16]]
                    near = [exacts[one] for one in best if float(vectors[one] @ query) > _NEAR]
                    if near:
                        recalls.append(sum(one in proposed for one in near) / len(near))
            await engine.put([placed(at)])
            await engine.drop(_PARTITION, [exacts[at - keys]])
            sizes[homes[at]] += 1
            sizes[homes[at - keys]] -= 1
            at += 1
        took_s = time.perf_counter() - began
        return EngineRow(
            engine=name,
            keys=keys,
            partitions=partitions,
            fill_per_s=fill_per_s,
            lookup_ms_p50=_ms(times, 50),
            lookup_ms_p99=_ms(times, 99),
            engine_cpu_ms=round(1e3 * (_cpu_s(pid) - cpu_s) / asked, 2),
            writes_per_s=int((at - keys) / took_s),
            recall_near=round(statistics.mean(recalls), 4),
            copied=round(whole / asked, 2),
            first_ms=round(first_ms, 1),
            host_mb=_rss_mb() - before_mb,
            engine_mb=int(await used()) >> 20,
        )


def rows(name: str, keys: int, partitions: list[int], seconds: float) -> Iterator[EngineRow]:
    """A row for each layout, as it is measured."""
    for count in partitions:
        yield asyncio.run(measure(name, keys, count, seconds))


def _cpu_s(pid: int) -> float:
    """Of a process and all that it started."""
    whole = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return float(sum(one.cpu_times().user + one.cpu_times().system for one in whole))


def _ms(times: list[float], percent: int) -> float:
    return round(1e3 * statistics.quantiles(times, n=100)[percent - 1], 2)


def _rss_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 >> 10
