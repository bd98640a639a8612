"""Numbers of a host's workers for one scrape: doubles in memory-mapped files, a file per worker.

Knows no metrics: a series is a key and a run of doubles. An update is one store into mapped memory
(about 0.1 µs, without a lock: one thread writes a file). It survives a `kill -9`, because the page
belongs to the kernel.

Each worker has a pair of files in the folder: `N.series`, a JSON line `[key, start, width]` for
each series, and `N.values`, the doubles. A worker takes the first unlocked pair. So a restarted
worker continues a pair, there are as many pairs as workers ran at once, and a lock marks a running
worker.

Both files get all their bytes at once: a mapped page without room on the disk would raise SIGBUS at
a later update. If there is no room, or the folder is not writable, a worker keeps its numbers in
its own memory.

Invariant: within a pair, runs `[start, start + width)` never overlap and never move. A run that was
forgotten begins anew at 0, for another key.
"""

import contextlib
import fcntl
import mmap
import os
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import msgspec

CAPACITY = 1 << 17  # doubles; 1 MiB, room for several thousand series
SERIES_BYTES = 1 << 20
SCRATCH = 64  # doubles at the front, for series without room

Key = tuple[str, ...]  # a metric's name and its label values


class Run(msgspec.Struct, frozen=True, array_like=True):
    """The place of a series: `width` doubles from `start`."""

    key: Key
    start: int
    width: int


class Snapshot(msgspec.Struct, frozen=True):
    """One worker's series and their doubles at the time of reading."""

    is_alive: bool
    series: tuple[tuple[Key, tuple[float, ...]], ...]


class SharedNumbers:
    """This worker's numbers, and a reader of all workers' numbers.

    `folder` None keeps them in private memory; `error` is the reason if files could not be used.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._lock_fd = -1
        self._series_fd = -1
        self._name = ""
        self._runs: dict[Key, Run] = {}
        self._free = defaultdict[int, list[int]](list)  # starts of runs, by width
        self._end = SCRATCH
        self._series_end_bytes = 0
        self.error: OSError | None = None
        try:
            self._map = mmap.mmap(-1, CAPACITY * 8) if folder is None else self._claim(folder)
        except OSError as error:
            self.error = error
            self._give_up_files()
            self._runs.clear()
            self._end = SCRATCH
            self._map = mmap.mmap(-1, CAPACITY * 8)
        self.values = memoryview(self._map).cast("d")

    def _claim(self, folder: Path) -> mmap.mmap:
        folder.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            lock_fd = os.open(folder / f"{number}.values", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                os.close(lock_fd)
                number += 1
        self._lock_fd = lock_fd
        self._name = str(number)
        os.posix_fallocate(lock_fd, 0, CAPACITY * 8)
        path = folder / f"{number}.series"
        for run in _runs(path):
            self._runs[run.key] = run
            self._end = max(self._end, run.start + run.width)
        self._series_fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._series_end_bytes = path.read_bytes().rfind(b"\n") + 1  # of whole lines
        os.ftruncate(self._series_fd, self._series_end_bytes)
        os.posix_fallocate(self._series_fd, 0, SERIES_BYTES)
        return mmap.mmap(lock_fd, CAPACITY * 8)

    def allocate(self, key: Key, width: int) -> int:
        """The index of the series' first double, the same for the same key; 0 if the file is full."""
        known = self._runs.get(key)
        if known is not None and known.width == width:
            return known.start
        free = self._free[width]
        if width > SCRATCH or (not free and self._end + width > CAPACITY):
            return 0
        run = Run(key, free[-1] if free else self._end, width)
        if self._series_fd >= 0:
            line = msgspec.json.encode(run) + b"\n"
            if self._series_end_bytes + len(line) > SERIES_BYTES:
                return 0
            os.pwrite(self._series_fd, line, self._series_end_bytes)
            self._series_end_bytes += len(line)
        if free:
            free.pop()
        else:
            self._end += width
        self._runs[key] = run
        return run.start

    @property
    def is_half_full(self) -> bool:
        free = sum(width * len(starts) for width, starts in self._free.items())
        return self._end - free > CAPACITY // 2 or self._series_end_bytes > SERIES_BYTES // 2

    def forget(self, keys: Collection[Key]) -> None:
        """Give the room of these series to others. Raises OSError, and then forgets none."""
        kept = {key: run for key, run in self._runs.items() if key not in keys}
        if self._folder is not None and self._series_fd >= 0:
            path = self._folder / f"{self._name}.series"
            lines = b"".join(msgspec.json.encode(run) + b"\n" for run in kept.values())
            new = path.with_suffix(".new")
            new.write_bytes(lines)
            fd = os.open(new, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.posix_fallocate(fd, 0, SERIES_BYTES)
                new.replace(path)
            except OSError:
                os.close(fd)
                raise
            os.close(self._series_fd)
            self._series_fd, self._series_end_bytes = fd, len(lines)
        for run in self._runs.values():
            if run.key in keys:
                self._map[run.start * 8 : (run.start + run.width) * 8] = bytes(run.width * 8)
                self._free[run.width].append(run.start)
        self._runs = kept

    def own(self) -> Iterator[tuple[Key, int]]:
        """The series of this worker's pair, also those of earlier workers, with their starts."""
        return ((run.key, run.start) for run in self._runs.values())

    def snapshots(self) -> Iterator[Snapshot]:
        """The numbers of this worker, of other running workers, and of workers that ended."""
        yield Snapshot(True, self._read(self._runs.values(), bytes(self._map[: self._end * 8])))
        if self._folder is None:
            return
        for path in sorted(self._folder.glob("*.values")):
            if path.stem == self._name:
                continue
            runs = {run.key: run for run in _runs(path.with_suffix(".series"))}
            yield Snapshot(_is_locked(path), self._read(runs.values(), path.read_bytes()))

    @staticmethod
    def _read(runs: Iterable[Run], data: bytes) -> tuple[tuple[Key, tuple[float, ...]], ...]:
        values = memoryview(data[: len(data) // 8 * 8]).cast("d")
        return tuple(
            (run.key, tuple(values[run.start : run.start + run.width]))
            for run in runs
            if run.start + run.width <= len(values)
        )

    def close(self) -> None:
        """Release the pair for the next worker; the numbers stay."""
        self.values.release()
        self._map.close()
        self._give_up_files()

    def _give_up_files(self) -> None:
        for fd in (self._series_fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self._series_fd = self._lock_fd = -1


def _runs(path: Path) -> list[Run]:
    """The series of a file, without a line that a crash cut off."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    return [msgspec.json.decode(line, type=Run) for line in lines]


def _is_locked(path: Path) -> bool:
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
