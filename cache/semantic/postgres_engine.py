"""PostgreSQL with pgvector 0.8 or newer as a vector engine.

    sameway_index_K   room, exact (together the primary key), partition, expires_at, vector, digest

K is the embedder's key in hex. A key has a row in each of its rooms. A room of up to `_EXACT_MAX`
keys is read whole, by the primary key; in a larger one the graph (HNSW) is searched, and searched on
until enough of what it finds is of the room (`hnsw.iterative_scan`, new in 0.8). Each write deletes
as many expired rows as it brings. Source: https://github.com/pgvector/pgvector. Knows no prompts.
Invariant: a search names one room, and finds keys of that room alone that have not expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import asyncpg
import numpy as np
from numpy.typing import NDArray

from cache.fingerprint import Partition
from cache.semantic.engine import EngineAway, EngineUnfit, PlacedKey, Proposed

_EXACT_MAX = 20_000
_EF = 160  # keys of the graph that a search looks at before it searches on
_LOCK = 0x53616D65  # while a host makes the table
_CONNECTIONS = 4
_NEEDED = "cache.index_url needs PostgreSQL with pgvector 0.8 or newer"
_FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError, EOFError)


class PostgresEngine:
    """Vectors of `dims` numbers of the embedder with this key. `timeout_s` bounds a statement."""

    def __init__(self, url: str, dims: int, embedder_key: bytes, timeout_s: float) -> None:
        self._url = url.replace("+asyncpg", "", 1)
        self._dims = dims
        self._timeout_s = timeout_s
        self._table = f"sameway_index_{embedder_key.hex()}"
        self._pool: Any = None

    async def open(self) -> None:
        try:
            link = await asyncpg.connect(self._url, timeout=self._timeout_s)
            try:
                await self._make(link)
            finally:
                await link.close(timeout=self._timeout_s)
        except _FAILURES as error:
            raise EngineAway(_said(error)) from None

    async def _make(self, link: Any) -> None:
        try:
            await link.execute("CREATE EXTENSION IF NOT EXISTS vector")
        except asyncpg.PostgresError as error:
            raise EngineUnfit(f"the extension `vector` cannot be made ({error}); {_NEEDED}") from None
        version = await link.fetchval("SELECT extversion FROM pg_extension WHERE extname = 'vector'")
        if tuple(map(int, version.split(".")[:2])) < (0, 8):
            raise EngineUnfit(f"the extension `vector` is of version {version}; {_NEEDED}")
        table = self._table
        async with link.transaction():
            await link.execute("SELECT pg_advisory_xact_lock($1)", _LOCK)
            for statement in (
                f"CREATE TABLE IF NOT EXISTS {table} (room bytea NOT NULL, exact bytea NOT NULL, partition bytea NOT NULL,"
                f" expires_at float8 NOT NULL, vector halfvec({self._dims}) NOT NULL, digest bytea NOT NULL,"
                " PRIMARY KEY (room, exact))",
                f"CREATE INDEX IF NOT EXISTS {table}_exact ON {table} (exact)",
                f"CREATE INDEX IF NOT EXISTS {table}_expires ON {table} (expires_at)",
                f"CREATE INDEX IF NOT EXISTS {table}_graph ON {table} USING hnsw (vector halfvec_ip_ops)",
            ):
                await link.execute(statement)

    async def put(self, keys: Sequence[PlacedKey]) -> None:
        rows = [
            (room, key.exact, key.partition, key.expires_at, self._sent(key.vector), key.vector[2 * self._dims :])
            for key in keys
            for room in key.rooms
        ]
        async with self._link() as link:
            await link.executemany(
                f"INSERT INTO {self._table} VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (room, exact) DO UPDATE SET"
                " expires_at = excluded.expires_at, vector = excluded.vector, digest = excluded.digest",
                rows,
            )
            await link.execute(
                f"DELETE FROM {self._table} WHERE ctid = ANY (ARRAY(SELECT ctid FROM {self._table} WHERE expires_at < $1"
                " ORDER BY expires_at LIMIT $2 FOR UPDATE SKIP LOCKED))",
                time.time(),
                2 * len(rows),
            )

    async def drop(self, partition: Partition, exacts: Sequence[bytes]) -> None:
        async with self._link() as link:
            await link.execute(
                f"DELETE FROM {self._table} WHERE exact = ANY ($1) AND partition = $2", list(exacts), partition
            )

    async def sample(self, room: bytes, count: int) -> Proposed:
        return await self._find("exact", room, count)

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> Proposed:
        # an expression is in no index: the room is read whole
        order = "(vector <#> $4) + 0" if size <= _EXACT_MAX else "vector <#> $4"
        return await self._find(order, room, count, self._sent(vector.astype("<f2").tobytes()))

    async def _find(self, order: str, room: bytes, count: int, *vector: bytes) -> Proposed:
        query = f"SELECT exact, vector, digest FROM {self._table} WHERE room = $1 AND expires_at > $2"
        async with self._link() as link:
            rows = await link.fetch(f"{query} ORDER BY {order} LIMIT $3", room, time.time(), count, *vector)
        return {
            exact: np.frombuffer(numbers, ">f2", offset=4).astype("<f2").tobytes() + digest
            for exact, numbers, digest in rows
        }

    def _sent(self, vector: bytes) -> bytes:
        """A vector as `halfvec_send` of pgvector has it: its length, two bytes of 0, big-endian numbers."""
        numbers = np.frombuffer(vector, "<f2", self._dims).astype(">f2")
        return self._dims.to_bytes(2, "big") + b"\0\0" + numbers.tobytes()

    @contextlib.asynccontextmanager
    async def _link(self) -> AsyncIterator[Any]:
        """A connection of the pool. Raises EngineAway for what fails inside."""
        try:
            if self._pool is None:
                self._pool = await asyncpg.create_pool(
                    self._url,
                    min_size=0,
                    max_size=_CONNECTIONS,
                    timeout=self._timeout_s,
                    command_timeout=self._timeout_s,
                    init=_prepare,
                )
            # not by asyncpg: on Python 3.11 its time limit may lose a cancellation
            async with asyncio.timeout(self._timeout_s), self._pool.acquire() as link:
                yield link
        except _FAILURES as error:
            raise EngineAway(_said(error)) from None

    async def aclose(self) -> None:
        if self._pool is not None:
            self._pool.terminate()


async def _prepare(link: Any) -> None:
    """Vectors travel as they are, and a plan is made for the room that is asked."""
    schema = await link.fetchval(
        "SELECT n.nspname FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace WHERE e.extname = 'vector'"
    )
    await link.set_type_codec("halfvec", schema=schema, encoder=bytes, decoder=bytes, format="binary")
    # the first use of the type loads the library, which has the settings
    await link.execute(
        f"SELECT '[0]'::{schema}.vector; SET hnsw.iterative_scan = strict_order; SET hnsw.ef_search = {_EF};"
        " SET plan_cache_mode = force_custom_plan"
    )


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
