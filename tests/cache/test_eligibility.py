"""Which answers may be stored, and the reason where not."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cache import Controls, Outcome
from cache.eligibility import Refusal, is_cut_as_asked, store_refusal

GOOD = Outcome(is_complete=True, finish_reasons=("stop",), size_bytes=100)


@pytest.mark.parametrize("reasons", [("stop",), ("tool_calls",), ("function_call",), ("stop", "tool_calls")])
def test_complete_answers_are_stored(reasons: tuple[str, ...]) -> None:
    """Text and tool calls alike, with one choice or several."""
    assert store_refusal(replace(GOOD, finish_reasons=reasons), Controls(), 100) is None


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"is_complete": False}, Refusal.INCOMPLETE),
        ({"is_servable": False, "is_complete": False}, Refusal.OFF),
        ({"is_fallback": True}, Refusal.FALLBACK),
        ({"lack": Refusal.EMPTY}, Refusal.EMPTY),
        ({"lack": Refusal.BLANK}, Refusal.BLANK),
        ({"lack": Refusal.THOUGHTS}, Refusal.THOUGHTS),
        ({"size_bytes": 101}, Refusal.TOO_LARGE),
        ({"finish_reasons": ("length",)}, Refusal.TRUNCATED),
        ({"finish_reasons": ("stop", "length")}, Refusal.TRUNCATED),
        ({"finish_reasons": ("stop", "content_filter")}, Refusal.FILTERED),
        ({"finish_reasons": ()}, Refusal.UNFINISHED),
        ({"finish_reasons": ("",)}, Refusal.UNFINISHED),
        ({"finish_reasons": ("stop", "aborted")}, Refusal.UNFINISHED),
    ],
)
def test_every_other_answer_is_refused_with_its_reason(change: dict[str, Any], refusal: Refusal) -> None:
    """Truncated, failed, filtered, foreign, empty, unfinished or too large: one reason each."""
    assert store_refusal(replace(GOOD, **change), Controls(), 100) is refusal


def test_a_length_that_was_asked_for_is_no_truncation() -> None:
    """Where callers say how long an answer is to be, one of that length is whole; nothing else changes."""
    asked = replace(GOOD, is_length_asked=True, finish_reasons=("stop", "length"))
    assert store_refusal(asked, Controls(), 100) is None
    assert store_refusal(replace(asked, is_complete=False), Controls(), 100) is Refusal.INCOMPLETE
    assert store_refusal(replace(asked, finish_reasons=("length", "aborted")), Controls(), 100) is Refusal.UNFINISHED


@pytest.mark.parametrize(
    ("reasons", "choices", "limit", "tokens", "is_known"),
    [
        (("length",), 1, 20, 20, True),
        (("length",), 1, 20, 19, False),  # a provider's cut, or the context's
        (("length",), 1, 20, 21, False),
        (("length",), 1, None, 20, False),  # no limit of its own
        (("length",), 1, 20, None, False),  # not counted
        (("stop",), 1, 20, 20, False),
        (("length", "length"), 2, 20, 40, True),
        (("length", "length"), 2, 20, 20, False),
        (("length", "stop"), 2, 20, 40, False),  # which of them was cut at the limit?
        (("length", "length"), 1, 20, 20, False),
        (("length",), 2, 20, 40, False),  # a choice is missing
        ((), 1, 20, 20, False),
    ],
)
def test_a_cut_is_the_requests_own_where_each_choice_has_all_its_tokens(
    reasons: tuple[str, ...], choices: int, limit: int | None, tokens: int | None, is_known: bool
) -> None:
    """Only a count that leaves no other reading says that the request's own limit cut the answer."""
    assert is_cut_as_asked(reasons, choices, limit, tokens) is is_known


@pytest.mark.parametrize(
    ("controls", "refusal"),
    [
        (Controls(no_store=True), Refusal.NO_STORE),
        (Controls(ttl_s=0), Refusal.TTL),
        (Controls(ttl_s=1), None),
        (Controls(no_cache=True, only_if_cached=True, max_age_s=0), None),
    ],
)
def test_the_caller_decides_about_storing(controls: Controls, refusal: Refusal | None) -> None:
    """no-store and a TTL of nothing refuse; wishes about reading do not."""
    assert store_refusal(GOOD, controls, 100) is refusal
