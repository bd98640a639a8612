"""A caller's cache controls, and the rules that decide which answers are stored. Pure.

Knows no HTTP: the gateway parses `Cache-Control` and the body's `cache` object into `Controls`, and
describes the end of a generation in an `Outcome`. Invariants: only complete, successful generations
of the requested model are stored, and each refusal has one reason; an answer that a length limit
cut is stored only if the limit is the request's own, which is part of its key.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec


class Controls(msgspec.Struct, frozen=True):
    """One request's cache controls. Ages and TTLs are seconds; `error_max` and `verify`, a verifier's mode,
    may only tighten what is configured. `tags` are those by which a purge finds the answer.
    """

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age_s: int | None = None
    ttl_s: int | None = None
    namespace: str = ""
    error_max: float | None = None
    verify: str | None = None
    tags: tuple[str, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """The end of a generation.

    `finish_reasons` has one word for each choice; `size_bytes` is an entry's size.
    `is_length_asked`: the length at which it ends is the caller's own. `is_servable`: a lookup
    could find the entry. `is_rescued`: two deployments made it. `moves`: the answer depends on the
    moment, and such answers are not stored. `lack` says why it says nothing, if it does not.
    """

    is_complete: bool
    finish_reasons: tuple[str, ...]
    size_bytes: int
    is_fallback: bool = False
    lack: Refusal | None = None
    is_length_asked: bool = False
    is_servable: bool = True
    is_rescued: bool = False
    moves: bool = False


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
    BLANK = "blank"  # white space alone
    THOUGHTS = "thoughts"  # reasoning alone
    TTL = "ttl"
    MOVES = "moves"  # depends on the moment, and `moving_ttl_s` is 0
    TOO_LARGE = "too_large"
    CURATED = "curated"  # an operator's answer to the same request stays
    PURGED = "purged"  # after its request came
    UNAVAILABLE = "unavailable"  # Redis did not take the answer


CUT = "length"
"""The finish reason of a choice that ended at its length limit."""

_FINISHED = frozenset(("stop", CUT, "tool_calls", "function_call"))


def is_cut_as_asked(reasons: Sequence[str], choices: int, limit: int | None, tokens: int | None) -> bool:
    """Whether each of an answer's `choices` has exactly as many tokens as the request allows.

    `reasons` are their finish reasons. `limit` is the request's own bound of a choice's tokens, or
    None; `tokens` counts the tokens of all choices, None if the deployment did not count them.
    """
    if limit is None or tokens is None or len(reasons) != choices:
        return False
    # a choice has at most `limit`, so the sum says what each has
    return tokens == limit * choices and all(reason == CUT for reason in reasons)


def store_refusal(outcome: Outcome, controls: Controls, entry_bytes_max: int) -> Refusal | None:
    """Why this answer must not be stored, or None if it may be.

    It is the first reason that applies, the caller's control first.
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
    if outcome.lack is not None:
        return outcome.lack
    if controls.ttl_s is not None and controls.ttl_s <= 0:
        return Refusal.TTL
    if outcome.moves:
        return Refusal.MOVES
    return Refusal.TOO_LARGE if outcome.size_bytes > entry_bytes_max else None
