"""What a caller asked of the cache, and which answers may be kept. Pure values and pure functions.

Knows no HTTP: the gateway parses `Cache-Control` and the body's `cache` object into `Controls`, and
tells how a generation ended in an `Outcome`. Invariants: only complete, successful generations of
the asked model are stored, and each refusal has one reason; an answer that a length limit cut is
stored only where the limit is the request's own, which is part of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Controls(msgspec.Struct, frozen=True):
    """One request's wishes. Ages and TTLs are seconds; `error_max` and `verify`, a verifier's mode,
    may only tighten what is configured.
    """

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: int | None = None
    ttl_s: int | None = None
    namespace: str = ""
    error_max: float | None = None
    verify: str | None = None


class Outcome(msgspec.Struct, frozen=True):
    """The end of a generation. `finish_reasons` has one word for each choice; `size_bytes` is what
    an entry would take. `is_length_asked`: the length at which it ends is the caller's own.
    `is_servable`: some lookup could find the entry. `is_rescued`: two deployments made it.
    """

    is_complete: bool
    finish_reasons: tuple[str, ...]
    size_bytes: int
    is_fallback: bool = False
    has_content: bool = True
    is_length_asked: bool = False
    is_servable: bool = True
    is_rescued: bool = False


class Refusal(StrEnum):
    """The reasons against storing an answer. Metrics count them by these names."""

    NO_STORE = "no_store"
    OFF = "off"  # the exact cache is off, and no semantic lookup may find the answer
    INCOMPLETE = "incomplete"
    RESCUED = "rescued"
    FALLBACK = "fallback"
    FILTERED = "filtered"
    TRUNCATED = "truncated"
    UNFINISHED = "unfinished"
    EMPTY = "empty"
    TTL = "ttl"
    TOO_LARGE = "too_large"
    UNAVAILABLE = "unavailable"  # Redis did not take the answer


CUT = "length"
"""The finish reason of a choice that ended at its length limit."""

_FINISHED = frozenset(("stop", CUT, "tool_calls", "function_call"))


def is_cut_as_asked(reasons: Sequence[str], choices: int, limit: int | None, tokens: int | None) -> bool:
    """Whether each of an answer's `choices` has exactly as many tokens as the request allows.

    `reasons` are their finish reasons. `limit` is the request's own bound of a choice's tokens,
    None where it has none; `tokens` is how many all choices have, None where the deployment did not
    count them.
    """
    if limit is None or tokens is None or len(reasons) != choices:
        return False
    # a choice has at most `limit`, so the sum says what each has
    return tokens == limit * choices and all(reason == CUT for reason in reasons)


def store_refusal(outcome: Outcome, controls: Controls, entry_bytes_max: int) -> Refusal | None:
    """Why this answer must not be stored, or None where it may be. The first reason that applies,
    the caller's wish first.
    """
    reasons = outcome.finish_reasons
    if controls.no_store:
        return Refusal.NO_STORE
    if not outcome.is_servable:
        return Refusal.OFF
    if not outcome.is_complete:
        return Refusal.INCOMPLETE
    # decision: doubtful-not-stored
    if outcome.is_rescued:
        return Refusal.RESCUED
    if outcome.is_fallback:
        return Refusal.FALLBACK
    if "content_filter" in reasons:
        return Refusal.FILTERED
    if CUT in reasons and not outcome.is_length_asked:
        return Refusal.TRUNCATED
    if not reasons or not _FINISHED.issuperset(reasons):
        return Refusal.UNFINISHED
    if not outcome.has_content:
        return Refusal.EMPTY
    if controls.ttl_s is not None and controls.ttl_s <= 0:
        return Refusal.TTL
    return Refusal.TOO_LARGE if outcome.size_bytes > entry_bytes_max else None
