"""Verdicts as plain values: what was found, what follows from it, and what a response had served.

Knows no Redis and no rule. An answer is named by its entry's id and when it was made, so that one made anew is another; a group of
equal answers by its first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from cache.fingerprint import Partition


class Source(StrEnum):
    """Where a verdict comes from."""

    MISS = "miss"  # a request that was generated anyway, and the answers near it
    AUDIT = "audit"  # a would-be hit that was generated instead
    SHADOW = "shadow"  # a served hit, generated afresh in the background
    FEEDBACK = "feedback"  # somebody said so
    AGAIN = "again"  # a served hit whose client asked again at once, past the cache


class Scope(StrEnum):
    """What a wrong verdict takes out of service."""

    NOTHING = ""
    ANSWER = "a"
    GROUP = "g"


class Finding(msgspec.Struct, frozen=True, array_like=True, tag="f1"):
    """One verdict as it is kept. Fields as in `Judged`; `judge` and `why` say who found so, `at` is unix seconds."""

    source: Source
    compat: bytes
    exact: bytes
    created_at: float
    is_right: bool | None
    evidence: bytes
    p: float
    chance: float
    rule: bytes
    at: float
    judge: str = ""
    why: str = ""
    weight: float = 1.0


class Suspension(msgspec.Struct, frozen=True, array_like=True, tag="s1"):
    """Why an answer is out of service. `exact` is the entry that was served; `request_id` who was served it."""

    exact: bytes
    source: Source
    at: float
    judge: str = ""
    why: str = ""
    request_id: str = ""
    alias: str = ""


class Reply(msgspec.Struct, frozen=True, array_like=True, tag="r1"):
    """What response `id` served: the answer of entry `exact`, made at `created_at`, on this trial's evidence."""

    id: str
    exact: bytes
    created_at: float
    compat: bytes
    alias: str
    at: float
    evidence: bytes
    p: float
    rule: bytes


@dataclass(frozen=True, slots=True)
class AnswerRef:
    """One answer: its entry and when it was made."""

    exact: bytes
    created_at: float


def answer_name(exact: bytes, created_at: float) -> bytes:
    """The name of one answer: 16 bytes of its entry's id, and when it was made as a big-endian double."""
    # decision: groups-hold-answers
    return exact + struct.pack(">d", created_at)


@dataclass(frozen=True, slots=True)
class Judged:
    """What comparing the fresh answer of entry `exact` (empty: it has none) with cached ones told, or what somebody said of a served
    one. `other` names the group of the first comparison and `is_right` says whether the answers were the same, None where nobody
    could tell; it counts `weight` in the group's tally. `joined` names the group whose answer the fresh one equals, if any. `evidence`
    (float32), `p`, `chance` and `rule` are the trial's, evidence empty where the model has nothing to learn from it."""

    partition: Partition
    compat: bytes
    exact: bytes
    created_at: float
    other: bytes
    joined: bytes | None
    is_right: bool | None
    evidence: bytes
    p: float
    chance: float
    rule: bytes
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Suspended:
    """An answer (`name` is `a` and its name) or a whole group of equal ones (`g` and its name) is out of service."""

    partition: Partition
    name: bytes


@dataclass(frozen=True, slots=True)
class Cleared:
    """Somebody has looked at it: it may be served again."""

    partition: Partition
    name: bytes
