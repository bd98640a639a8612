"""`./run bench index`: what the vector index of one cache worker takes, and how fast and how complete its answers are.

    ./run bench index [--entries 1000,10000,100000,1000000] [--vectors FILE.npy] [--json FILE]
    ./run bench index --engine faiss|redis|pgvector [--entries 1000000] [--partitions 200,2000] [--seconds 60]

Folds entries with ready vectors into the product's own cache object, in one namespace and in namespaces of ten; then adds, removes and
searches. Vectors are made (texts in groups, 384 dimensions of which 48 matter) or come from a file: float32, one unit vector a row.
Recall is of the 16 nearest, and of those of them above a cosine of 0.8, beside reading every vector. With `--engine` it measures a
server of vectors instead (`bench.vector_engines`).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache import Partition, Query
from cache.encoder.types import EmbedderInfo, Encoded
from cache.semantic.cache import PromptAdded, SemanticCache
from cache.semantic.index import VectorIndex

_DIMS, _INNER_DIMS, _GROUP = 384, 48, 8
_NEAREST, _NEAR = 16, 0.8
_ASKED, _CHANGED = 500, 2_000
_SMALL = 10  # keys in each of many namespaces
_PARTITION = Partition(b"bench-partition-")


class Row(msgspec.Struct, frozen=True):
    """One size and layout. `fold_cpu_s` is for taking every entry in, `lists_cpu_s` for making the lists beside that, in processor
    time; `fold_us_p99` says whether one entry waited for it. `rss_mb` is what the whole cache object takes, `index_mb` the vectors
    of it. Microseconds are of one thread; of what is added, removed, searched and looked up they are processor time."""

    entries: int
    namespaces: int
    lists: int
    fold_cpu_s: float
    lists_cpu_s: float
    fold_us_p99: float
    rss_mb: int
    index_mb: int
    add_us: float
    remove_us: float
    search_us_p50: float
    search_us_p99: float
    lookup_us_p50: float
    lookup_us_p99: float
    recall: float
    recall_near: float


class Ready:
    """An encoder whose vectors are there already."""

    def __init__(self, dims: int) -> None:
        self.info = EmbedderInfo("ready", dims, 1_000, b"readyrea")
        self.next: NDArray[np.float32] = np.zeros(dims, dtype=np.float32)

    def encode(self, texts: Sequence[str]) -> Encoded:
        return Encoded(np.repeat(self.next[None], len(texts), axis=0), np.ones(len(texts), dtype=np.int32))


def made_vectors(count: int) -> NDArray[np.float32]:
    """Unit vectors (count, dims) in groups of paraphrases, through float16 as the store keeps them."""
    chance = np.random.default_rng(0)
    spread = (chance.normal(size=(_INNER_DIMS, _DIMS)) / _INNER_DIMS**0.5).astype(np.float32)
    made = np.empty((count, _DIMS), dtype=np.float32)
    for start in range(0, count, 65_536):
        size = min(65_536, count - start)
        groups = chance.normal(size=(-(-size // _GROUP), _INNER_DIMS)).astype(np.float32)
        inner = np.repeat(groups, _GROUP, axis=0)[:size] + 0.4 * chance.normal(size=(size, _INNER_DIMS))
        made[start : start + size] = _unit(inner.astype(np.float32) @ spread)
    chance.shuffle(made)  # so that what is asked has its group in the index
    return made


def measure(vectors: NDArray[np.float32], keys_each: int | None) -> Row:
    """One row, in namespaces of `keys_each`, or in one."""
    count = len(vectors) - _ASKED
    before_mb = _rss_mb()
    encoder, index = Ready(vectors.shape[1]), VectorIndex(vectors.shape[1])
    cache = SemanticCache(encoder, index=index, keys_max=len(vectors) + _CHANGED)
    compats = [(place // (keys_each or count)).to_bytes(16, "big") for place in range(count)]
    now = time.time()
    folds, used_by_all, used_here = [], time.process_time(), time.thread_time()
    for place, compat in enumerate(compats):
        exact = place.to_bytes(16, "big")
        text, vector = f"what is the answer to question {place}?", vectors[place].astype("<f2").tobytes()
        record = PromptAdded(_PARTITION, exact, compat, text, now, now + 86_400, vector=vector)
        folds.append(_timed(lambda: cache.fold([record])))  # noqa: B023
    fold_cpu_s = time.thread_time() - used_here
    while not index.is_settled:
        time.sleep(0.05)
    lists_cpu_s = max(0.0, time.process_time() - used_by_all - fold_cpu_s)
    rss_mb = _rss_mb() - before_mb
    asked = vectors[count:]
    names = [_PARTITION + compats[place * (count // _ASKED)] for place in range(_ASKED)]
    searches = [_used(lambda: index.search(name, one[None], _NEAREST)) for name, one in zip(names, asked, strict=True)]  # noqa: B023
    recall, recall_near = _recalls(index, vectors[:count], asked, names[0]) if keys_each is None else (1.0, 1.0)
    lookups = []
    for place, (name, encoder.next) in enumerate(zip(names, asked, strict=True)):
        query = Query(_PARTITION, name[len(_PARTITION) :], f"how may question {place} be answered?")
        lookups.append(_used(lambda: cache.lookup([query])))  # noqa: B023
    adds = [_used(lambda: index.add(names[0], 10**9 + n, asked[n % _ASKED])) for n in range(_CHANGED)]  # noqa: B023
    removes = [_used(lambda: index.remove(names[0], 10**9 + n)) for n in range(_CHANGED)]  # noqa: B023
    return Row(
        count, cache.namespaces, index.lists(names[0]), round(fold_cpu_s, 1), round(lists_cpu_s, 1), _us(folds, 99),
        rss_mb, index.size_bytes >> 20, _us(adds), _us(removes), _us(searches), _us(searches, 99), _us(lookups),
        _us(lookups, 99), recall, recall_near,
    )  # fmt: skip


def _row(size: int, keys_each: int | None, source: Path | None) -> Row | None:
    vectors = _unit(np.load(source, mmap_mode="r")[: size + _ASKED]) if source else made_vectors(size + _ASKED)
    return measure(vectors, keys_each) if len(vectors) >= 2 * _ASKED else None


def _recalls(
    index: VectorIndex, vectors: NDArray[np.float32], asked: NDArray[np.float32], name: bytes
) -> tuple[float, float]:
    true = found = true_near = found_near = 0
    for start in range(0, len(asked), 50):
        some = asked[start : start + 50]
        similarities = some @ vectors.T
        nearest = np.argpartition(-similarities, _NEAREST, axis=1)[:, :_NEAREST]
        for row, best, one in zip(similarities, nearest, index.search(name, some, _NEAREST), strict=True):
            got = set(one.keys.tolist())
            near = {int(key) for key in best if row[key] > _NEAR}
            true, found = true + _NEAREST, found + len(got & set(best.tolist()))
            true_near, found_near = true_near + len(near), found_near + len(got & near)
    return round(found / true, 4), round(found_near / max(1, true_near), 4)


def _timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _used(work: Callable[[], object]) -> float:
    started = time.thread_time()
    work()
    return time.thread_time() - started


def _us(times: Sequence[float], percent: int = 50) -> float:
    return round(1e6 * statistics.quantiles(times, n=100)[percent - 1], 1)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit.astype(np.float16).astype(np.float32)


def _rss_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 >> 10


def _of_engine(arguments: argparse.Namespace) -> int:
    from bench import vector_engines  # starts servers

    layouts = [int(part) for part in arguments.partitions.split(",")]
    print("  ".join(f"{name:>13}" for name in vector_engines.EngineRow.__struct_fields__))
    for size in (int(part) for part in arguments.entries.split(",")):
        for row in vector_engines.rows(arguments.engine, size, layouts, arguments.seconds):
            print("  ".join(f"{value:>13}" for value in msgspec.structs.astuple(row)), flush=True)
    return 0


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="./run bench index", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--entries", default="1000,10000,100000,1000000", help="sizes, comma-separated")
    parser.add_argument("--vectors", type=Path, default=None, metavar="FILE.npy", help="use these instead of made ones")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="also write the rows")
    parser.add_argument(
        "--engine", choices=("faiss", "redis", "pgvector"), default=None, help="measure a vector engine"
    )
    parser.add_argument("--partitions", default="200,2000", help="of an engine's keys, comma-separated")
    parser.add_argument("--seconds", type=float, default=60.0, help="of reads and writes of an engine")
    arguments = parser.parse_args(argv)
    if arguments.engine is not None:
        return _of_engine(arguments)
    rows = []
    print("  ".join(f"{name:>13}" for name in Row.__struct_fields__))
    for size in (int(part) for part in arguments.entries.split(",")):
        for keys_each in (None, _SMALL):
            with ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn")
            ) as fresh:  # its memory is this row's alone
                row = fresh.submit(_row, size, keys_each, arguments.vectors).result()
            if row is None:
                print(f"bench: at least {2 * _ASKED} vectors are needed", file=sys.stderr)
                return 2
            rows.append(row)
            print("  ".join(f"{value:>13}" for value in msgspec.structs.astuple(row)), flush=True)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(msgspec.to_builtins(row)) + "\n" for row in rows))
    return 0
