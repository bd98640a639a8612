"""The answers in this process' memory: read without a round trip, bounded in number and bytes,
evicted least recently used first.

Knows no Redis and no clock. `ExactCache` decides whether it may be read.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cache.entry import Entry, Purge
from cache.fingerprint import Partition

_ENTRY_BYTES = 1_000  # of the Python objects around one entry, and around one chunk
_CHUNK_BYTES = 150
_LET_GO_MAX = 16_384


class _Held(msgspec.Struct):
    """An entry, its size, and the forms derived from it."""

    entry: Entry
    size_bytes: int
    forms: dict[str, bytes] = {}


class L1:
    """Entries by partition and id, with their size.

    `purges` counts purges: an answer that was read from Redis before a purge must not be put here
    after it.
    """

    def __init__(self, entries_max: int, bytes_max: int) -> None:
        self._entries_max = entries_max
        self._bytes_max = bytes_max
        self._entries: OrderedDict[tuple[Partition, bytes], _Held] = OrderedDict()
        self._let_go_of: OrderedDict[bytes, None] = OrderedDict()  # for want of room, the latest last
        self.size_bytes = 0
        self.purges = 0

    def resize(self, bytes_max: int) -> None:
        """Hold at most so many bytes from now on."""
        self._bytes_max = bytes_max
        self._evict()

    def __len__(self) -> int:
        return len(self._entries)

    def was_here(self, exact: bytes) -> bool:
        """Whether the entry was evicted for lack of room, so that Redis probably has it."""
        return exact in self._let_go_of

    def lookup(self, partition: Partition, exact: bytes) -> Entry | None:
        held_entry = self._entries.get((partition, exact))
        if held_entry is None:
            return None
        self._entries.move_to_end((partition, exact))
        return held_entry.entry

    def store(self, entry: Entry) -> None:
        self._remove((entry.partition, entry.exact))
        size = _ENTRY_BYTES + entry.chunks_bytes + len(entry.chunks) * _CHUNK_BYTES + len(entry.text or "")
        if size > self._bytes_max:
            self._let_go(entry.exact)
            return
        self._entries[entry.partition, entry.exact] = _Held(entry, size)
        self.size_bytes += size
        self._evict()

    def derived(self, entry: Entry, form: str, make: Callable[[Entry], bytes]) -> bytes:
        """`make(entry)`, kept under the name `form` and counted while this very entry is held."""
        held_entry = self._entries.get((entry.partition, entry.exact))
        if held_entry is None or held_entry.entry is not entry:
            return make(entry)
        data = held_entry.forms.get(form)
        if data is None:
            data = held_entry.forms[form] = make(entry)
            held_entry.size_bytes += len(data)
            self.size_bytes += len(data)
            self._evict()
        return data

    def _evict(self) -> None:
        while self.size_bytes > self._bytes_max or len(self._entries) > self._entries_max:
            key = next(iter(self._entries))
            self._remove(key)
            self._let_go(key[1])

    def purge(self, purge: Purge, now: float) -> None:
        self.purges += 1
        purged_keys = [
            key
            for key, held in self._entries.items()
            if purge.matches(held.entry.partition, held.entry.exact, held.entry.about(), now)
        ]
        for key in purged_keys:
            self._remove(key)

    def drop(self, entry: Entry) -> None:
        """Let go of one entry."""
        self._remove((entry.partition, entry.exact))

    def clear(self) -> None:
        self.purges += 1
        self._entries.clear()
        self.size_bytes = 0

    def _let_go(self, exact: bytes) -> None:
        self._let_go_of[exact] = None
        self._let_go_of.move_to_end(exact)
        if len(self._let_go_of) > _LET_GO_MAX:
            self._let_go_of.popitem(last=False)

    def _remove(self, key: tuple[Partition, bytes]) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self.size_bytes -= found.size_bytes
