"""Why prompts did not hit: each reason has a cause, each cause its advice, and what the API and the page say."""

from __future__ import annotations

from cache import MissReason
from cache.exact import LookupMiss
from gateway.admin.misses import CAUSE_OF, CAUSES
from gateway.journey.semantic import OBSERVED


def test_every_reason_of_a_miss_has_a_cause() -> None:
    """None of them is lost in the others, and every cause says what to do."""
    reasons = {*MissReason, *LookupMiss, "off", "off_for_team", "no-cache", "not_eligible", "gone", OBSERVED}
    assert {str(reason) for reason in reasons} <= CAUSE_OF.keys()
    assert set(CAUSE_OF.values()) | {"other"} == CAUSES.keys()
    assert all(CAUSES[cause] for cause in CAUSE_OF.values())
