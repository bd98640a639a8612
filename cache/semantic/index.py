"""The nearest vectors within a namespace. The only file that imports faiss.

Knows no texts and no Redis. Each namespace has FAISS inverted lists of its own: one list, searched
whole, while it is small; past `flat_max` keys about 4 sqrt(2 n) lists, of which the 32 nearest are
searched. A thread makes new lists for a namespace that has outgrown its own, or shrunk under them:
it trains on a sample, copies list by list, and replays the changes since; searches use the old
lists until the new ones are complete. Vectors are kept as float16 (768 bytes for 384 dimensions);
those that have been through float16 before, as the store's have, are kept exactly. On a GPU a large
namespace is searched, exactly, in a copy there. Sources: Johnson et al., "Billion-scale similarity
search with GPUs", arXiv:1702.08734, and FAISS' guidelines on the number of lists.

Invariants: a search answers with keys of its namespace only; a removed key is never answered again;
below `flat_max` keys a search is exact; add and remove take microseconds at any size.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from cache.encoder.gpu import TorchFlat, has_cuda

_log = logging.getLogger("cache.index")  # not __name__: operators know it by this name

FLAT_MAX = 20_000  # keys searched one by one: about half a millisecond
MIRROR_MIN = 4_096  # a smaller namespace is searched faster where it is than on a GPU
_PROBES = 32  # lists searched, and more where there are more than 32 times as many
_GROWTH = 4  # lists made for n keys serve from n / 4 to 4 n
_SAMPLE_PER_LIST = 48
_REPLAYED_MAX = 64  # changes replayed while searches wait
_DEAD_MAX = 1_024  # removed rows that a copy on a GPU drags along; its top-k ends at 2,048
_COPY_ROWS = 65_536

MakeFlat = Callable[[int], Any]
"""From dimensions to an empty index that searches exactly by inner product: FAISS' flat ones, or
TorchFlat.
"""
_Changes = dict[int, NDArray[np.float32] | None]
Run = Callable[[Callable[[], None]], None]
"""Does some work beside the caller's."""


def on_gpu() -> MakeFlat | None:
    """How to make an index on the GPU: with FAISS where this FAISS can, else with torch; None where
    this machine has none.
    """
    if hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0:
        resources = faiss.StandardGpuResources()
        return lambda dims: faiss.GpuIndexFlatIP(resources, dims)
    return TorchFlat if has_cuda() else None


def in_thread(work: Callable[[], None]) -> None:
    """Run `work` in a daemon thread of normal priority: now and then it holds a lock that searches
    wait for.
    """
    threading.Thread(target=work, name="index", daemon=True).start()


@dataclass(frozen=True, slots=True)
class Found:
    """For one query, keys of the nearest vectors and their cosines, the nearest first."""

    keys: NDArray[np.int64]
    similarities: NDArray[np.float32]


class VectorIndex:
    """Unit vectors by namespace and key, a number of the caller's that no two vectors share. Used
    by one thread; `run` is where lists are made. `mirror` makes the copies on a GPU, of namespaces
    with at least `mirror_min` keys.
    """

    def __init__(
        self,
        dims: int,
        mirror: MakeFlat | None = None,
        mirror_min: int = MIRROR_MIN,
        flat_max: int = FLAT_MAX,
        run: Run = in_thread,
        replayed_max: int = _REPLAYED_MAX,
        dead_max: int = _DEAD_MAX,
    ) -> None:
        self.dims = dims
        self._replayed_max = replayed_max
        self._dead_max = dead_max
        self._mirror = mirror
        self._mirror_min = mirror_min
        self._flat_max = flat_max
        self._run = run
        self._whole = faiss.IndexFlatIP(dims)  # the one centroid of every small namespace
        self._whole.add(np.zeros((1, dims), dtype=np.float32))
        # decision: lists-per-namespace
        self._blocks: dict[bytes, _VectorBlock] = {}
        self._count = 0
        # around every use of lists that others can see; the thread that makes new ones takes turns
        self._lock = threading.Lock()
        self._making = threading.Lock()  # one at a time

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """About what the vectors and their lists take."""
        return sum(block.size_bytes for block in self._blocks.values())

    @property
    def is_settled(self) -> bool:
        """Whether no lists are being made."""
        return all(block.changes is None for block in self._blocks.values())

    def lists(self, namespace: bytes) -> int:
        """How many lists a namespace has: 1 where every search reads all of it."""
        block = self._blocks.get(namespace)
        return int(block.lists.nlist) if block is not None else 0

    def add(self, namespace: bytes, key: int, vector: NDArray[np.float32]) -> None:
        """A key must not be there already. Raises ValueError for a vector of another shape."""
        if vector.shape != (self.dims,):
            raise ValueError(f"expected {self.dims} dimensions, got {vector.shape}")
        block = self._blocks.get(namespace)
        if block is None:
            block = self._blocks[namespace] = _VectorBlock(_empty(self._whole))
        with self._lock:
            block.add(key, vector)
        self._count += 1
        self._remake_if_due(block)

    def remove(self, namespace: bytes, key: int) -> bool:
        """Whether it was there."""
        block = self._blocks.get(namespace)
        if block is None:
            return False
        with self._lock:
            was_there = block.remove(key)
        if was_there:
            self._count -= 1
            if block.lists.ntotal == 0:
                del self._blocks[namespace]
            else:
                self._remake_if_due(block)
        return was_there

    def vectors(self, namespace: bytes, keys: Sequence[int]) -> NDArray[np.float32]:
        """The vectors that keys of the namespace were added with, rounded to float16, (n, dims). Raises
        RuntimeError where one is not there.
        """
        with self._lock:
            found: NDArray[np.float32] = self._blocks[namespace].lists.reconstruct_batch(np.array(keys, dtype=np.int64))
        return found

    def search(self, namespace: bytes, queries: NDArray[np.float32], count: int) -> list[Found]:
        """For each of the (n, dims) queries its up to `count` nearest in the namespace, as far as
        the probed lists have them.
        """
        block = self._blocks.get(namespace)
        if block is None:
            return [_found([], [])] * len(queries)
        if self._mirror is not None and block.lists.ntotal >= self._mirror_min:
            if block.copy is None:
                block.copy = _Copy(self._mirror(self.dims), block.lists, self._dead_max)
            return block.copy.search(queries, count)
        with self._lock:
            similarities, keys = block.lists.search(queries, min(count, block.lists.ntotal))
        return [_found(row[row >= 0], line[row >= 0]) for row, line in zip(keys, similarities, strict=True)]

    # --- making lists

    def _remake_if_due(self, block: _VectorBlock) -> None:
        if self._mirror is None and block.changes is None and block.is_outgrown(self._flat_max):
            block.changes = {}
            self._run(lambda: self._remake(block))

    def _remake(self, block: _VectorBlock) -> None:
        try:
            with self._making:
                fresh = self._copied(block)
                while True:
                    with self._lock:
                        if len(block.changes or ()) <= self._replayed_max:
                            _replay(fresh, block.changes or {})
                            block.made_for = fresh.ntotal if fresh.nlist > 1 else 0
                            block.lists, block.changes = fresh, None
                            return
                        changes, block.changes = block.changes or {}, {}
                    _replay(fresh, changes)
        except Exception:  # most likely out of memory: the old lists stay, the next growth retries
            _log.exception("the lists of %d vectors could not be made", block.lists.ntotal)
            with self._lock:
                block.made_for, block.changes = block.lists.ntotal, None

    def _copied(self, block: _VectorBlock) -> Any:
        """New lists with what is in the block's, but for the keys that came or went since the work
        began.
        """
        count = int(block.lists.ntotal)
        lists = int(4 * (2 * count) ** 0.5) if count >= self._flat_max // 2 else 1
        copied = _empty(self.train(block, lists) if lists > 1 else self._whole)
        for place in range(block.lists.nlist):
            with self._lock:
                keys, vectors = _read(block.lists, place)
                changes = block.changes or {}
            kept = np.array([key not in changes for key in keys.tolist()], dtype=bool)
            if kept.any():
                copied.add_with_ids(_as_float32(vectors[kept]), keys[kept])
        return copied

    def train(self, block: _VectorBlock, lists: int) -> Any:
        """The centroids of so many lists: spherical k-means on a sample of all the old ones."""
        share = min(1.0, _SAMPLE_PER_LIST * lists / max(1, block.lists.ntotal))
        random = np.random.default_rng(lists)
        sample = []
        for place in range(block.lists.nlist):
            with self._lock:
                _, vectors = _read(block.lists, place)
            sample.append(_as_float32(vectors[random.random(len(vectors)) < share]))
        centroids = faiss.IndexFlatIP(self.dims)
        trained = _empty(centroids, lists)
        trained.cp.min_points_per_centroid = 1  # or it warns
        trained.train(np.concatenate(sample))
        return centroids


class _VectorBlock:
    """A namespace. `changes` are the keys that came (with a vector) or went since new lists are
    being made, by the last word on each; None while none are.
    """

    __slots__ = ("changes", "copy", "lists", "made_for")

    def __init__(self, lists: Any) -> None:
        self.lists = lists
        self.made_for = 0  # keys that there were when the lists were made
        self.changes: _Changes | None = None
        self.copy: _Copy | None = None

    @property
    def size_bytes(self) -> int:
        # code, key, its place in the direct map
        vectors = self.lists.ntotal * (self.lists.code_size + 8 + 48)
        return int(vectors + self.lists.nlist * 4 * self.lists.d + 3_000)

    def is_outgrown(self, flat_max: int) -> bool:
        count = self.lists.ntotal
        if self.lists.nlist == 1:
            return bool(count >= max(flat_max, _GROWTH * self.made_for))
        return bool(count >= _GROWTH * self.made_for or count * _GROWTH <= self.made_for)

    def add(self, key: int, vector: NDArray[np.float32]) -> None:
        self.lists.add_with_ids(vector[None], np.array([key], dtype=np.int64))
        if self.changes is not None:
            self.changes[key] = vector
        if self.copy is not None:
            self.copy.add([key], vector[None])

    def remove(self, key: int) -> bool:
        if not self.lists.remove_ids(np.array([key], dtype=np.int64)):
            return False
        if self.changes is not None:
            self.changes[key] = None
        if self.copy is not None:
            self.copy.remove(key)
        return True


class _Copy:
    """A namespace's vectors in `flat`, on a GPU.

    Such an index can't overwrite: removed rows stay, unanswered, until there are more than
    `dead_max`.
    """

    def __init__(self, flat: Any, lists: Any, dead_max: int) -> None:
        self._dead_max = dead_max
        self._flat = flat
        self._lists = lists
        self._fill()

    def _fill(self) -> None:
        """Anew, from the lists."""
        self._flat.reset()
        self._keys = np.empty(1_024, dtype=np.int64)  # by place; -1 where the row is dead
        self._count = 0
        self._place_of: dict[int, int] = {}
        self._dead = 0
        self._waiting: list[NDArray[np.float32]] = []
        for place in range(self._lists.nlist):
            keys, vectors = _read(self._lists, place)
            for start in range(0, len(keys), _COPY_ROWS):
                self.add(keys[start : start + _COPY_ROWS].tolist(), _as_float32(vectors[start : start + _COPY_ROWS]))

    def add(self, keys: list[int], vectors: NDArray[np.float32]) -> None:
        end = self._count + len(keys)
        if end > len(self._keys):
            self._keys = np.concatenate([self._keys, np.empty(max(end, len(self._keys)), dtype=np.int64)])
        self._keys[self._count : end] = keys
        self._place_of.update(zip(keys, range(self._count, end), strict=True))
        self._count = end
        self._waiting.append(vectors)

    def remove(self, key: int) -> None:
        self._keys[self._place_of.pop(key)] = -1
        self._dead += 1

    def search(self, queries: NDArray[np.float32], count: int) -> list[Found]:
        if self._dead > self._dead_max:
            self._fill()
        if self._waiting:
            self._flat.add(np.concatenate(self._waiting))
            self._waiting = []
        similarities, places = self._flat.search(queries, min(count + self._dead, self._count))
        keys = self._keys[places]
        return [
            _found(row[row >= 0][:count], line[row >= 0][:count]) for row, line in zip(keys, similarities, strict=True)
        ]


def _empty(centroids: Any, lists: int | None = None) -> Any:
    """FAISS lists without vectors. A direct map by hash makes removal real and immediate."""
    inverted_lists = faiss.IndexIVFScalarQuantizer(
        centroids,
        centroids.d,
        lists or centroids.ntotal,
        faiss.ScalarQuantizer.QT_fp16,
        faiss.METRIC_INNER_PRODUCT,
        False,  # the vectors themselves, not what they differ from the centroid by
    )
    inverted_lists.nprobe = max(_PROBES, inverted_lists.nlist // 32)
    inverted_lists.is_trained = lists is None
    inverted_lists.set_direct_map_type(faiss.DirectMap.Hashtable)  # type: ignore[attr-defined]
    return inverted_lists


def _read(lists: Any, number: int) -> tuple[NDArray[np.int64], NDArray[np.float16]]:
    """A copy of one list: keys and vectors."""
    count = lists.invlists.list_size(number)
    if count == 0:
        return np.zeros(0, np.int64), np.zeros((0, lists.d), np.float16)
    keys = faiss.rev_swig_ptr(lists.invlists.get_ids(number), count).copy()
    codes = faiss.rev_swig_ptr(lists.invlists.get_codes(number), count * lists.code_size).copy()
    return keys, codes.view(np.float16).reshape(count, lists.d)


def _replay(lists: Any, changes: _Changes) -> None:
    came = [(key, vector) for key, vector in changes.items() if vector is not None]
    if changes:
        lists.remove_ids(np.array(list(changes), dtype=np.int64))
    if came:
        lists.add_with_ids(np.stack([vector for _, vector in came]), np.array([key for key, _ in came], dtype=np.int64))


def _as_float32(vectors: NDArray[np.float16]) -> NDArray[np.float32]:
    return vectors.astype(np.float32)


def _found(keys: Any, similarities: Any) -> Found:
    return Found(np.asarray(keys, dtype=np.int64), np.asarray(similarities, dtype=np.float32))
