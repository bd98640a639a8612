"""Counts of would-be hits by the chance with which each was compared: the ground of the measured
error and of the certificate.

A would-be hit is audited (generated instead of served) or served; of the served some are compared
in the background (shadow checks). Chances are counted in steps, eight to a factor of two. Each
event has a letter, which statistics add up. Knows no Redis. Invariant: whatever was drawn to be
compared is counted when it is drawn, so what is lost on its way to a judge stays open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

_PER_DOUBLING = 8
_STEP_MAX = 8 * _PER_DOUBLING  # a chance below 1/256 counts as none
_EARLY, _EARLY_MOST = 400, 0.3  # of the first hits: until a certificate says much


class Cell(msgspec.Struct):
    """The would-be hits of one step of chances."""

    served: int = 0
    audited: int = 0
    audits_right: int = 0
    audits_wrong: int = 0
    shadowed: int = 0  # of those served
    shadows_right: int = 0
    shadows_wrong: int = 0

    @property
    def wrong(self) -> int:
        return self.audits_wrong + self.shadows_wrong

    @property
    def settled(self) -> int:
        return self.wrong + self.audits_right + self.shadows_right

    @property
    def shadows_open(self) -> int:
        return max(0, self.shadowed - self.shadows_right - self.shadows_wrong)

    @property
    def open(self) -> int:
        """Drawn to be compared, and not settled: no judge could tell, or none has yet."""
        return max(0, self.audited - self.audits_right - self.audits_wrong) + self.shadows_open


class CheckCounts(msgspec.Struct):
    """Counts of one team and alias over some time."""

    requests: int = 0  # answered, from the cache or not; identical ones in flight count once
    hits: int = 0  # semantic ones
    cells: dict[int, Cell] = {}  # by step of chances
    judges: dict[str, int] = {}  # comparisons by the judge that settled them
    reported_wrong: int = 0
    reported_right: int = 0
    questions: int = 0  # to a judge model about its answers
    judging_microusd: int = 0

    def add(self, other: CheckCounts) -> None:
        """Add `other` to this."""
        self._add(other, 1)

    def less(self, other: CheckCounts) -> CheckCounts:
        """These counts without those of `other`, at least 0."""
        left = CheckCounts()
        left.add(self)
        left._add(other, -1)
        return left

    def _add(self, other: CheckCounts, sign: int) -> None:
        _sum(self, other, sign, ("requests", "hits", *_COUNTS.values()))
        for step, cell in other.cells.items():
            _sum(self.cells.setdefault(step, Cell()), cell, sign, Cell.__struct_fields__)
        for judge, count in other.judges.items():
            self.judges[judge] = max(0, self.judges.get(judge, 0) + sign * count)

    def count(self, letter: str, amount: int) -> None:
        """Add an event's amount; unknown letters are ignored."""
        if letter.startswith(_JUDGE):
            name = letter.removeprefix(_JUDGE)
            self.judges[name] = self.judges.get(name, 0) + amount
        elif letter in _COUNTS:
            setattr(self, _COUNTS[letter], getattr(self, _COUNTS[letter]) + amount)
        else:
            kind = letter.rstrip("0123456789")
            field, step = _CELLS.get(kind), letter[len(kind) :]
            if field is not None and step:
                cell = self.cells.setdefault(min(int(step), _STEP_MAX), Cell())
                setattr(cell, field, getattr(cell, field) + amount)

    @property
    def audits(self) -> int:
        return sum(cell.audited for cell in self.cells.values())

    @property
    def shadow_checks(self) -> int:
        return sum(cell.shadowed for cell in self.cells.values())

    @property
    def checks(self) -> int:
        """Comparisons that a judge settled."""
        return sum(cell.settled for cell in self.cells.values())

    @property
    def wrong(self) -> int:
        return sum(cell.wrong for cell in self.cells.values())

    @property
    def unsettled(self) -> int:
        return sum(cell.open for cell in self.cells.values())

    @property
    def is_empty(self) -> bool:
        """Whether nothing was served by meaning, drawn or reported wrong."""
        return not (self.hits or self.reported_wrong or self.cells)


def _sum(target: object, other: object, sign: int, names: tuple[str, ...]) -> None:
    for name in names:
        setattr(target, name, max(0, getattr(target, name) + sign * getattr(other, name)))


_CELLS: Mapping[str, str] = {
    "h": "served",
    "a": "audited",
    "ar": "audits_right",
    "aw": "audits_wrong",
    "s": "shadowed",
    "sr": "shadows_right",
    "sw": "shadows_wrong",
}
_COUNTS: Mapping[str, str] = {
    "fw": "reported_wrong",
    "fr": "reported_right",
    "jq": "questions",
    "j$": "judging_microusd",
}
_JUDGE = "by:"


def served(chance: float, *, is_compared: bool) -> tuple[str, ...]:
    """The letters of a hit that is compared with `chance`, and whether it will be."""
    step = _step(chance)
    return (f"h{step}", f"s{step}") if is_compared else (f"h{step}",)


def shadow_share(share: float, hits: int) -> float:
    """The share of hits to check after `hits` of them, where `share` is that of many; 0 stays 0."""
    return max(share, min(_EARLY_MOST, _EARLY / max(1, hits))) if share else 0.0


def audited(chance: float) -> tuple[str, ...]:
    """The letters of a would-be hit that is generated instead."""
    return (f"a{_step(chance)}",)


def settled(chance: float, judge: str, *, is_wrong: bool, is_audit: bool) -> tuple[str, ...]:
    """The letters of a comparison that `judge` settled."""
    kind = ("a" if is_audit else "s") + ("w" if is_wrong else "r")
    return (f"{kind}{_step(chance)}", _JUDGE + judge.replace("|", "/"))


def reported(*, is_wrong: bool) -> tuple[str, ...]:
    """The letters of a report on a hit."""
    return ("fw" if is_wrong else "fr",)


def asked(cost_microusd: int) -> tuple[tuple[str, int], ...]:
    """The letters and amounts of a question to a judge model."""
    return ("jq", 1), ("j$", cost_microusd)


def _step(chance: float) -> int:
    if chance < 2.0 ** (-_STEP_MAX / _PER_DOUBLING):
        return _STEP_MAX
    return min(_STEP_MAX - 1, max(0, math.ceil(-_PER_DOUBLING * math.log2(chance) - 1e-9) - 1))


def chances(step: int) -> tuple[float, float]:
    """The least and the largest chance of a step."""
    most = 2.0 ** (-step / _PER_DOUBLING)
    return (0.0 if step >= _STEP_MAX else 2.0 ** (-(step + 1) / _PER_DOUBLING)), most
