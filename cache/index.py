"""The nearest vectors within a namespace. The only file that imports faiss.

Knows no texts and no Redis. A namespace's vectors lie together in memory of their own, so a search reads nothing of others and is
exact: FAISS' brute-force kernel over one block. On a GPU a large block is searched in a copy there, kept up to date by the next
search. Invariants: a search answers with keys of its namespace only; add and remove are O(dims); a removed key is never
answered again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

MIRROR_ROWS_MIN = 4_096  # a smaller block is searched faster where it is

MakeFlat = Callable[[int], Any]
"""From dimensions to an empty FAISS index that searches exactly by inner product."""


def on_gpu() -> MakeFlat | None:
    """How to make an index on the GPU; None where this FAISS, or this machine, has none."""
    if not hasattr(faiss, "StandardGpuResources") or faiss.get_num_gpus() == 0:
        return None
    resources = faiss.StandardGpuResources()
    return lambda dims: faiss.GpuIndexFlatIP(resources, dims)


@dataclass(frozen=True, slots=True)
class Found:
    """For one query, keys of the nearest vectors and their cosines, the nearest first."""

    keys: NDArray[np.int64]
    similarities: NDArray[np.float32]


class VectorIndex:
    """Unit vectors by namespace and key. A key is a number of the caller's, unique over all namespaces. Blocks of at least
    `mirror_rows_min` vectors are searched in what `mirror` makes, if anything."""

    def __init__(self, dims: int, mirror: MakeFlat | None = None, mirror_rows_min: int = MIRROR_ROWS_MIN) -> None:
        self.dims = dims
        self._mirror = mirror
        self._mirror_rows_min = mirror_rows_min
        self._blocks: dict[bytes, _Block] = {}
        self._count = 0
        self.size_bytes = 0

    def __len__(self) -> int:
        return self._count

    def add(self, namespace: bytes, key: int, vector: NDArray[np.float32]) -> None:
        """Raises ValueError for a key that is there already, or a vector of another shape."""
        if vector.shape != (self.dims,):
            raise ValueError(f"expected {self.dims} dimensions, got {vector.shape}")
        block = self._blocks.get(namespace)
        if block is None:
            block = self._blocks[namespace] = _Block(self.dims)
            self.size_bytes += block.size_bytes
        before = block.size_bytes
        block.add(key, vector)
        self.size_bytes += block.size_bytes - before
        self._count += 1

    def remove(self, namespace: bytes, key: int) -> bool:
        """Whether it was there."""
        block = self._blocks.get(namespace)
        if block is None:
            return False
        before = block.size_bytes
        if not block.remove(key):
            return False
        self.size_bytes += block.size_bytes - before
        self._count -= 1
        if not block.place_of:
            self.size_bytes -= block.size_bytes
            del self._blocks[namespace]
        return True

    def search(self, namespace: bytes, queries: NDArray[np.float32], count: int) -> list[Found]:
        """For each of the (n, dims) queries its up to `count` nearest in the namespace."""
        block = self._blocks.get(namespace)
        if block is None:
            nothing = Found(np.zeros(0, np.int64), np.zeros(0, np.float32))
            return [nothing] * len(queries)
        size = len(block.place_of)
        count = min(count, size)
        if self._mirror is not None and size >= self._mirror_rows_min:
            similarities, places = block.mirrored(self._mirror).search(queries, count)
        else:
            similarities, places = faiss.knn(queries, block.rows[:size], count, metric=faiss.METRIC_INNER_PRODUCT)
        return [Found(block.keys[row], line) for row, line in zip(places, similarities, strict=True)]


class _Block:
    """The vectors of one namespace, without gaps: the last row moves to where one was removed."""

    __slots__ = ("_copied", "_copy", "keys", "place_of", "rows")

    def __init__(self, dims: int) -> None:
        self.rows = np.empty((1, dims), dtype=np.float32)
        self.keys = np.empty(1, dtype=np.int64)
        self.place_of: dict[int, int] = {}
        self._copy: Any = None
        self._copied = 0  # rows of the copy that are as they are here

    @property
    def size_bytes(self) -> int:
        return self.rows.nbytes + self.keys.nbytes

    def add(self, key: int, vector: NDArray[np.float32]) -> None:
        if key in self.place_of:
            raise ValueError(f"key {key} is there already")
        place = len(self.place_of)
        if place == len(self.keys):
            self._resize(2 * place)
        self.rows[place] = vector
        self.keys[place] = key
        self.place_of[key] = place

    def remove(self, key: int) -> bool:
        place = self.place_of.pop(key, None)
        if place is None:
            return False
        last = len(self.place_of)
        self._copied = min(self._copied, place)
        if place != last:
            self.rows[place] = self.rows[last]
            self.keys[place] = self.keys[last]
            self.place_of[int(self.keys[place])] = place
        if last and last * 4 < len(self.keys):
            self._resize(2 * last)
        return True

    def mirrored(self, make: MakeFlat) -> Any:
        """The copy, brought up to date. FAISS' flat indexes on a GPU can append and be emptied, not overwrite."""
        size = len(self.place_of)
        if self._copy is None:
            self._copy = make(self.rows.shape[1])
        if self._copied < self._copy.ntotal:
            self._copy.reset()
            self._copied = 0
        if self._copied < size:
            self._copy.add(self.rows[self._copied : size])
            self._copied = size
        return self._copy

    def _resize(self, capacity: int) -> None:
        size = min(len(self.keys), capacity)
        rows = np.empty((capacity, self.rows.shape[1]), dtype=np.float32)
        keys = np.empty(capacity, dtype=np.int64)
        rows[:size], keys[:size] = self.rows[:size], self.keys[:size]
        self.rows, self.keys = rows, keys
