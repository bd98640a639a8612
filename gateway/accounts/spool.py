"""Ledger rows on their way to SQL, in a file that outlives the worker.

Knows bytes, no rows, no Redis and no SQL. A row is stored before the client has the end of its
answer, and dropped once SQL has the row. `put` is one store into mapped memory (1 µs, no system
call). It survives a `kill -9`, because the page belongs to the kernel.

Each worker has its own file in the folder, and locks it while it runs. `adopt` takes the rows of
unlocked files: their workers ended before SQL had all rows.

A file is an array of slots of SLOT_BYTES. A row takes adjoining slots: its length in 4 bytes, then
its bytes. The length is written last, and 0 marks a free slot. While a row of several slots is put
or dropped, a bit of its length is set: readers then skip its slots, whose bytes may look like
lengths. A file is allocated in full: a mapped page without room on the disk would raise SIGBUS. If
the disk or a file of _SLOTS_MAX is full, or the folder cannot be written, rows stay in the worker's
memory alone until Redis has them.

Invariant: a row that was put and not dropped is adopted, unless the host itself fails. It may be
adopted twice after a kill: its receiver must count it once, by its id.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

SLOT_BYTES = 512
_SLOTS = 256
_SLOTS_MAX = 1 << 20  # 512 MiB
_LENGTH_BYTES = 4
_FREE = bytes(_LENGTH_BYTES)
_PARTIAL = 1 << 31
_SUFFIX = ".rows"
NOWHERE = range(0)
"""The slots of a row that is not in the file."""


class Spool:
    """The rows of one worker. With `folder` None it keeps none; `error` tells why the file is
    unused.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._path: Path | None = None
        self._fd = -1
        self.mapped: mmap.mmap | None = None
        self._used = bytearray(_SLOTS)  # 1 for each slot with a row
        self._next = 0  # the slot from which a free one is looked for
        self._count = 0
        self.error: OSError | None = None
        if folder is not None:
            try:
                self._make(folder)
            except OSError as error:
                self.error = error

    def __len__(self) -> int:
        """The number of rows in the file."""
        return self._count

    def put(self, data: bytes) -> range:
        """Store `data`; returns its slots, or NOWHERE without room."""
        if self.mapped is None:
            return NOWHERE
        size_bytes, slots = _LENGTH_BYTES + len(data), bytes(_slots(len(data)))
        first = self._used.find(slots, self._next)
        if first < 0:
            first = self._used.find(slots)
        if first < 0:
            first = len(self._used)
            if not self._grow(first + len(slots)):
                return NOWHERE
        self._next = end = first + len(slots)
        start = first * SLOT_BYTES
        body = start + _LENGTH_BYTES
        if end - first > 1:
            self.mapped[start:body] = (len(data) | _PARTIAL).to_bytes(_LENGTH_BYTES, "little")
        self.mapped[body : start + size_bytes] = data
        self.mapped[start:body] = len(data).to_bytes(_LENGTH_BYTES, "little")
        self._used[first:end] = b"\1" * len(slots)
        self._count += 1
        return range(first, end)

    def read(self, slots: range) -> bytes:
        """The row in these slots."""
        assert self.mapped is not None
        return next(_rows(self.mapped[slots.start * SLOT_BYTES : slots.stop * SLOT_BYTES]))

    def drop(self, slots: range) -> None:
        """Forget the row in these slots: SQL has it."""
        if not slots or self.mapped is None:
            return
        if len(slots) > 1:
            length = slice(slots[0] * SLOT_BYTES, slots[0] * SLOT_BYTES + _LENGTH_BYTES)
            partial = int.from_bytes(self.mapped[length], "little") | _PARTIAL
            self.mapped[length] = partial.to_bytes(_LENGTH_BYTES, "little")
        for slot in reversed(slots):
            self.mapped[slot * SLOT_BYTES : slot * SLOT_BYTES + _LENGTH_BYTES] = _FREE
        self._used[slots.start : slots.stop] = bytes(len(slots))
        self._count -= 1
        if not self._count and len(self._used) > _SLOTS:
            self._shrink()

    def adopt(self, take: Callable[[bytes, range], None]) -> None:
        """Call `take(data, slots)` for each row of an ended worker, and remove its file.

        Rows stay in that file while this worker's file lacks room for them.
        """
        if self._folder is None or self.mapped is None:
            return
        with contextlib.suppress(OSError):
            for path in sorted(self._folder.glob(f"*{_SUFFIX}")):
                if path != self._path:
                    self._adopt(path, take)

    def _adopt(self, path: Path, take: Callable[[bytes, range], None]) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.fstat(fd).st_nlink:
                return  # another worker adopted it
            for data in _rows(path.read_bytes()):
                slots = self.put(data)
                if not slots:
                    return
                take(data, slots)
            path.unlink()
        except BlockingIOError:
            return  # its worker runs
        finally:
            os.close(fd)

    def close(self) -> None:
        """Release the file: another worker adopts its rows; a file without rows is removed."""
        if self.mapped is None or self._path is None:
            return
        self.mapped.close()
        self.mapped = None
        if not self._count:
            self._path.unlink(missing_ok=True)
        os.close(self._fd)

    def _make(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{os.getpid()}-{secrets.token_hex(4)}"
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX)
            os.posix_fallocate(self._fd, 0, _SLOTS * SLOT_BYTES)
            self.mapped = mmap.mmap(self._fd, _SLOTS * SLOT_BYTES)
            self._path = path.rename(path.with_name(path.name + _SUFFIX))  # once locked, it may be seen
        except OSError:
            path.unlink(missing_ok=True)
            os.close(self._fd)
            raise

    def _grow(self, slots: int) -> bool:
        """Double the file until it has `slots`; returns False if the disk or the file's limit is
        too small.
        """
        assert self.mapped is not None
        size = len(self._used)
        while size < slots:
            size *= 2
        if size > _SLOTS_MAX:
            return False
        try:
            os.posix_fallocate(self._fd, 0, size * SLOT_BYTES)
        except OSError:
            return False
        self.mapped.resize(size * SLOT_BYTES)
        self._used += bytes(size - len(self._used))
        return True

    def _shrink(self) -> None:
        """Cut the file back to its first size after an outage."""
        assert self.mapped is not None
        self.mapped.resize(_SLOTS * SLOT_BYTES)
        self._used, self._next = bytearray(_SLOTS), 0


def _slots(size_bytes: int) -> int:
    return -(-(_LENGTH_BYTES + size_bytes) // SLOT_BYTES)


def _rows(data: bytes) -> Iterator[bytes]:
    start = 0
    while start + _LENGTH_BYTES <= len(data):
        length = int.from_bytes(data[start : start + _LENGTH_BYTES], "little")
        is_whole, length = length < _PARTIAL, length % _PARTIAL
        if length and is_whole:
            yield data[start + _LENGTH_BYTES : start + _LENGTH_BYTES + length]
        start += _slots(length) * SLOT_BYTES
