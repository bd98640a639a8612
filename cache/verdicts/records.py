"""Verdicts as plain values: the verdict on an answer, its effects, and the answer that a response
served.

Knows no Redis and no rule. The name of an answer is its entry's id and its time, so an answer made
anew is another; the name of a group of equal answers is that of its first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from cache.fingerprint import Partition
from cache.query import Trial
from cache.stored import reader


class Source(StrEnum):
    """Where a verdict comes from."""

    MISS = "miss"  # a request that was generated anyway, and the answers near it
    AUDIT = "audit"  # a check: a hit, whose request was generated anew beside it
    FEEDBACK = "feedback"  # a client or an admin reported it
    VERIFIER = "verifier"  # a verifier's word on a stored answer, which no fresh one stood beside


class Scope(StrEnum):
    """The reach of a wrong verdict: which answers it takes out of service."""

    NOTHING = ""
    ANSWER = "a"
    GROUP = "g"


class Verdict(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="f3"):
    """Whether a cached answer was right for a request, None where no judge could say, on the trial
    of that request.

    `exact` and `created_at` name the fresh answer it was compared with (empty: there is none). The
    trial's `chance` is with which probability this comparison was made; its features are empty
    where the model has nothing to learn. `at` is unix seconds; `judge` and `why` say which judge
    found so; `alias` is the model that the request named. `wordings` are that of the request and, if
    there is one, the nearest of the same answer, of which a verifier's yes is one more sign.
    """

    source: Source
    compat: bytes
    is_right: bool | None
    trial: Trial
    at: float
    exact: bytes = b""
    created_at: float = 0.0
    judge: str = ""
    why: str = ""
    alias: str = ""
    wordings: tuple[bytes, ...] = ()

    def encode(self) -> bytes:
        """The stored form, without the answers that the trial names: the stream has the judged one beside it."""
        return _encoded(self)

    @staticmethod
    def decode(data: bytes) -> Verdict:
        """Raises msgspec.DecodeError for anything but a verdict of this version."""
        verdict = _read_verdict(data)
        if not 0.0 < verdict.trial.chance <= 1.0 or len(verdict.trial.features) % _FLOAT_BYTES:
            raise msgspec.ValidationError("no chance of a comparison, or no row of numbers")
        return verdict


class Suspension(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="s1"):
    """Why an answer is out of service. `exact` is the entry that was served, `request_id` the
    request that it answered.
    """

    exact: bytes
    source: Source
    at: float
    judge: str = ""
    why: str = ""
    request_id: str = ""
    alias: str = ""


class ServedReply(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="r2"):
    """What response `id` served: the answer of entry `exact`, made at `created_at`, on this
    trial.
    """

    id: str
    exact: bytes
    created_at: float
    compat: bytes
    alias: str
    at: float
    trial: Trial

    def encode(self) -> bytes:
        """As it is kept; the chance of a check is none of a report's."""
        return _encoded(self, chance=1.0)

    @staticmethod
    def decode(data: bytes) -> ServedReply:
        """Raises msgspec.DecodeError."""
        return _read_reply(data)


def _encoded(value: Verdict | ServedReply, **changes: Any) -> bytes:
    trial = replace(value.trial, ranked=(), peers=(), **changes)
    return msgspec.msgpack.encode(replace(value, trial=trial))


_FLOAT_BYTES = 4
_read_verdict = reader(msgspec.msgpack.Decoder(Verdict))
_read_reply = reader(msgspec.msgpack.Decoder(ServedReply))


@dataclass(frozen=True, slots=True)
class AnswerRef:
    """One answer: its entry and when it was made."""

    exact: bytes
    created_at: float


def answer_name(exact: bytes, created_at: float) -> bytes:
    """The name of one answer: 16 bytes of its entry's id, and when it was made as a big-endian
    double.
    """
    # decision: groups-hold-answers
    return exact + struct.pack(">d", created_at)


@dataclass(frozen=True, slots=True)
class AnswerJudged:
    """A verdict, as the indexes learn it.

    `other` names the group of the judged answer, `joined` the group of the answer that equals the
    fresh one, if any.
    """

    partition: Partition
    verdict: Verdict
    other: bytes
    joined: bytes | None


@dataclass(frozen=True, slots=True)
class AnswerSuspended:
    """An answer (`name` is `a` and its name) or a whole group of equal ones (`g` and its name) is
    out of service.
    """

    partition: Partition
    name: bytes


@dataclass(frozen=True, slots=True)
class AnswerCleared:
    """An admin has cleared an answer or a group: it may be served again."""

    partition: Partition
    name: bytes


VerdictRecord = AnswerJudged | AnswerSuspended | AnswerCleared
