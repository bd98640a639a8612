"""The seam to a vector engine: a server that keeps the vectors of all hosts' cached prompts.

Knows no server, no cache and no prompts: digests and vectors. An engine proposes, and decides
nothing: what it finds is checked with the entry in Redis, its cosine is computed anew, and the rule
of `cache.decision` sees it beside what the host has. Invariants: an engine has no text; what it
forgets, finds late or finds not at all costs hits alone; where it cannot be asked the lookup is a
miss (`cache.semantic.proposals`). Without one, FAISS holds all keys in the worker
(`cache.semantic.index`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cache.fingerprint import Partition

Proposed = Mapping[bytes, bytes]
"""Stored vectors by the `exact` of their keys, in any order; a vector as in `PlacedKey`."""


class EngineUnfit(Exception):
    """The server lacks a part that is needed. The message names it, and what has it."""


class EngineAway(Exception):
    """The engine did not answer, or refused. The message says what it said."""


@dataclass(frozen=True, slots=True)
class PlacedKey:
    """A cached prompt as an engine keeps it. `rooms` are the digests of where it is searched
    (`room_id`); `expires_at` is in unix seconds; `vector` is float16, little-endian, and behind it,
    where not all of the prompt was embedded, the digest of what was.
    """

    partition: Partition
    exact: bytes
    rooms: tuple[bytes, ...]
    expires_at: float
    vector: bytes


class VectorEngine(Protocol):
    """Vectors by room. Every method but `open` raises EngineAway."""

    async def open(self) -> None:
        """Ask the server what it can do, and make the index where it has none. Raises EngineUnfit or
        EngineAway; may be called again.
        """

    async def put(self, keys: Sequence[PlacedKey]) -> None:
        """Keep these keys, until they expire, in place of what has their names."""

    async def drop(self, partition: Partition, exacts: Sequence[bytes]) -> None:
        """Forget keys of a partition; missing ones are ignored."""

    async def sample(self, room: bytes, count: int) -> Proposed:
        """The `count` keys of a room with the least `exact`: all, where it has fewer. An `exact` is a
        digest, so these are a random sample, and equal on every host.
        """

    async def nearest(self, room: bytes, vector: NDArray[np.float32], count: int, size: int) -> Proposed:
        """About the `count` nearest of a room of about `size` keys."""

    async def aclose(self) -> None:
        """Close the connections."""


def room_id(name: bytes) -> bytes:
    """The name of a room in an engine: 16 bytes, whatever the room's own length."""
    return hashlib.blake2b(name, digest_size=16, person=b"sw.engine.room").digest()
