"""A pointer from the words of a prompt to the entry that answers it: the value that Redis keeps.

Knows no Redis and no words. A pointer names an answer (an entry and its time), so it does not match
a regenerated answer. A pointer from another prompt, which a lookup found to mean the same, has that
hit's trial, and the answer's group. Invariant: `names` is checked before an entry is served.
"""

from __future__ import annotations

import struct

import msgspec

from cache.entry import Entry
from cache.fingerprint import DIGEST_BYTES
from cache.query import Trial
from cache.stored import reader

_NAME_BYTES = DIGEST_BYTES + 8
_NO_GROUP = bytes(_NAME_BYTES)  # of an entry's own words: they hold whatever equals its answer


class Verified(msgspec.Struct, frozen=True, array_like=True, tag="w3"):
    """The hit that found two prompts to mean the same, at `at` (unix seconds) and the bound
    `error_max`. `verifier` is the deployment that said so; empty: the rule did.
    """

    similarity: float
    trial: Trial
    error_max: float
    at: float
    verifier: str = ""

    def encode(self) -> bytes:
        """Encode the part of a pointer after its names, which the script puts before it."""
        return _ENCODER.encode(self)


class Pointer(msgspec.Struct, frozen=True):
    """A pointer to an answer. `verified` is None for a pointer from the entry's own words."""

    answer: bytes
    verified: Verified | None = None

    def names(self, entry: Entry) -> bool:
        """Whether the pointer names this very answer, and other words may find it."""
        return entry.text is not None and self.answer == _name(entry)

    @staticmethod
    def decode(data: bytes) -> Pointer:
        """Decode a pointer of this version. Raises msgspec.DecodeError for anything else."""
        rest = data[2 * _NAME_BYTES :]
        verified = _read(rest) if rest else None
        if verified is not None and not (0.0 <= verified.trial.chance <= 1.0 and len(verified.trial.features) % 4 == 0):
            raise msgspec.ValidationError("no chance of a comparison, or no row of numbers")
        return Pointer(data[:_NAME_BYTES], verified)


def own_pointer(entry: Entry) -> bytes:
    """The pointer from an entry's own words, encoded."""
    return _name(entry) + _NO_GROUP


def _name(entry: Entry) -> bytes:
    # as `cache.verdicts.records.answer_name`, with which suspensions are written
    return entry.exact + struct.pack(">d", entry.created_at)


_ENCODER = msgspec.msgpack.Encoder()
_read = reader(msgspec.msgpack.Decoder(Verified))
