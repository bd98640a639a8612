"""Records of the log that all semantic indexes read, encoded as msgpack.

Knows no Redis and no entries. Invariant: the records hold digests and no prompt, so a purge leaves
no text in the log.
"""

from __future__ import annotations

import msgspec

from cache.fingerprint import Partition


class EntryAdded(msgspec.Struct, frozen=True, array_like=True, tag="+"):
    """A log record: an entry was stored and can be found by meaning."""

    partition: Partition
    exact: bytes


class EntriesDropped(msgspec.Struct, frozen=True, array_like=True, tag="-"):
    """A log record: these entries of a partition were removed."""

    partition: Partition
    exacts: tuple[bytes, ...]


class AnswersSketched(msgspec.Struct, frozen=True, array_like=True, tag="a"):
    """A log record: the answers of these entries of a partition have sketches."""

    partition: Partition
    exacts: tuple[bytes, ...]


class VerdictAdded(msgspec.Struct, frozen=True, array_like=True, tag="v"):
    """A log record: this partition's stream of verdicts has a new record (`cache.verdicts.store`)."""

    partition: Partition


LogRecord = EntryAdded | EntriesDropped | AnswersSketched | VerdictAdded
