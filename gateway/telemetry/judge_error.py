"""How often a judge errs, by another one that ruled on the same pairs of answers.

Pure numbers: knows no judges, texts or Redis. The other judge is taken as right, so its own errors
count as this one's. Sources: Clopper and Pearson (1934) for the intervals; Rogan and Gladen (1978)
for a share that was measured by a judge of known error.
"""

import msgspec

from gateway.telemetry.measured_error import clopper_pearson


class RulingCounts(msgspec.Struct):
    """Pairs of answers that two judges ruled on, by the ruling of the one and of the other."""

    same_same: int = 0
    same_different: int = 0
    different_same: int = 0
    different_different: int = 0

    @property
    def pairs(self) -> int:
        return self.same_same + self.same_different + self.different_same + self.different_different

    @property
    def agreed(self) -> int:
        return self.same_same + self.different_different


class ErrorRate(msgspec.Struct, frozen=True):
    """A share with its 95% interval; the estimate is None where nothing was counted."""

    estimate: float | None
    low: float
    high: float


def false_same(counts: RulingCounts) -> ErrorRate:
    """The share of different answers that the one judge calls the same."""
    return _rate(counts.same_different, counts.same_different + counts.different_different)


def false_different(counts: RulingCounts) -> ErrorRate:
    """The share of equal answers that the one judge calls different."""
    return _rate(counts.different_same, counts.different_same + counts.same_same)


def true_share(share_wrong: float, false_different: float, false_same: float) -> float:
    """The share that is wrong, where a judge with these error rates called `share_wrong` different."""
    informative = 1.0 - false_different - false_same
    return min(1.0, max(0.0, (share_wrong - false_different) / informative)) if informative > 0 else 1.0


def _rate(count: int, total: int) -> ErrorRate:
    low, high = clopper_pearson(count, total) if total else (0.0, 1.0)
    return ErrorRate(count / total if total else None, low, high)
