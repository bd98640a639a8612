"""How often a judge errs, by another one that ruled on the same pairs of answers.

Pure numbers: knows no texts and no Redis. The other judge is taken as right, so its own errors
count as this one's. Invariant: a rate of which little is known makes nothing bolder. Source:
Clopper and Pearson (1934) for the intervals.
"""

import math
from collections.abc import Iterable, Mapping

import msgspec

CONFIDENCE = 0.95
VETO = "a veto between the prompts"
"""In the place of another judge. It proves no error: answers to other prompts may be the same."""

_KNOWN = 60  # pairs from which on a rate is known; before, it is as low as it can be
_TINY = 1e-300


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

    @property
    def equal(self) -> int:
        """Those that the other one calls the same."""
        return self.same_same + self.different_same

    def add(self, other: "RulingCounts") -> None:
        """Add `other` to this."""
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def flips(self) -> tuple[float, float]:
        """The error rates as a verdict has them, for the loss of a label: the share of equal
        answers called different, taken as 0, which makes nothing likelier, and of different ones
        called the same.
        """
        rate = false_same(self)
        is_known = self.pairs - self.equal >= _KNOWN
        return 0.0, rate.estimate or 0.0 if is_known else rate.low

    @property
    def allowed(self) -> float:
        """The largest share of this judge's verdicts that may be wrong, of right answers or of wrong ones."""
        rates = (false_same(self), self.pairs - self.equal), (false_different(self), self.equal)
        return max(rate.high if pairs >= _KNOWN else rate.low for rate, pairs in rates)


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
    return _rate(counts.different_same, counts.equal)


def by_judge(rulings: Iterable[Mapping[str, RulingCounts]]) -> dict[str, RulingCounts]:
    """All rulings of each judge beside others; of two, there is a line feed between their names."""
    found: dict[str, RulingCounts] = {}
    for names, counts in (pair for some in rulings for pair in some.items()):
        judge, _, other = names.partition("\n")
        if other != VETO:
            found.setdefault(judge, RulingCounts()).add(counts)
    return found


def _rate(count: int, total: int) -> ErrorRate:
    low, high = clopper_pearson(count, total) if total else (0.0, 1.0)
    return ErrorRate(count / total if total else None, low, high)


def clopper_pearson(count: float, total: float) -> tuple[float, float]:
    """The interval of the share `count` / `total`; both may be fractions (effective numbers)."""
    tail = (1.0 - CONFIDENCE) / 2.0
    low = 0.0 if count <= 0 else _quantile(tail, count, total - count + 1)
    high = 1.0 if count >= total else _quantile(1.0 - tail, count + 1, total - count)
    return low, high


def lower_limit(count: float, total: float) -> float:
    """The one-sided lower limit of the same share: it is above the truth in a twentieth of all
    samples at most.
    """
    return 0.0 if count <= 0 else _quantile(1.0 - CONFIDENCE, count, total - count + 1)


def _quantile(share: float, a: float, b: float) -> float:
    """The quantile of the beta distribution, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _beta(middle, a, b) < share else (low, middle)
    return (low + high) / 2


def _beta(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22, Lentz's
    method).
    """
    if x <= 0.0 or x >= 1.0:
        return float(x >= 1.0)
    if x > (a + 1) / (a + b + 2):  # the fraction converges slowly there
        return 1.0 - _beta(1.0 - x, b, a)
    log_front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    fraction, c, d = 1.0, 1.0, 0.0
    for step in range(500):
        m = step // 2
        if step == 0:
            term = 1.0
        elif step % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1.0 / (1.0 + term * d or _TINY)
        c = 1.0 + term / c or _TINY
        fraction *= c * d
        if abs(1.0 - c * d) < 1e-12:
            break
    return math.exp(log_front) * (fraction - 1.0) / a
