"""Sums over the buckets of a window: by kind, team, model and deployment, with percentiles.

Knows the buckets' fields, and no Redis. Latencies are sparse histograms whose bounds lie a factor
2^(1/4) apart, so buckets of any workers and lengths can be added, and a percentile is within 10%.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from gateway.telemetry import buckets
from gateway.telemetry.checks import CheckCounts
from gateway.telemetry.judge_error import RulingCounts

_GENERATED = ("miss", "bypass")


class Window(StrEnum):
    """How far back a query looks."""  # a description in the OpenAPI document

    HOUR = "1h"
    DAY = "24h"
    WEEK = "7d"
    MONTH = "30d"


class Percentiles(msgspec.Struct, frozen=True):
    """Percentiles of one latency; None if nothing was measured."""

    count: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class Tally(msgspec.Struct):
    """Sums over a part of the traffic."""

    requests: int = 0
    by_kind: dict[str, int] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_microusd: int = 0
    saved_microusd: int = 0
    avoided_microusd: int = 0
    uncompared: int = 0
    saved_tokens: int = 0
    saved_completion_tokens: int = 0
    saved_ms: int = 0

    @property
    def hits(self) -> int:
        """Answers from the cache, or from another request's generation."""
        return sum(self.by_kind.get(kind, 0) for kind in buckets.HITS)

    @property
    def hit_rate(self) -> float | None:
        """The share of hits among hits and misses; None if there were none."""
        answers = self.hits + self.by_kind.get("miss", 0)
        return self.hits / answers if answers else None


class Point(msgspec.Struct, frozen=True):
    """One step of a time series."""

    start_s: int
    length_s: int
    tally: Tally
    ttft_hit: Percentiles
    ttft_miss: Percentiles


class DeploymentTally(msgspec.Struct):
    """One deployment's work over a window, for all teams."""

    ok: int = 0
    failed: int = 0
    completion_tokens: int = 0
    cost_microusd: int = 0


class Summary(msgspec.Struct, frozen=True):
    """The result of a query."""

    window: Window
    start_s: int
    end_s: int
    total: Tally
    by_team: dict[int, Tally]
    by_model: dict[str, Tally]
    by_surface: dict[str, Tally]
    by_deployment: dict[str, DeploymentTally]
    series: tuple[Point, ...]
    ttft: dict[str, Percentiles]  # by kind of answer, and `all`
    duration: dict[str, Percentiles]
    rulings: dict[str, RulingCounts]  # of two judges, with a line feed between their names; for all teams
    samples: dict[tuple[int, str], CheckCounts]  # by team and model, for the measured error of semantic hits


def percentiles(histogram: dict[int, int]) -> Percentiles:
    p50, p95, p99 = (buckets.percentile_ms(histogram, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(sum(histogram.values()), p50, p95, p99)


class Folded:
    """A tally, and histograms of latencies by kind."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._histograms: dict[tuple[str, str], dict[int, int]] = {}

    def fold(self, field: buckets.Field, amount: int) -> None:
        """Add one field of a request's kind."""
        latency, bucket = field.letter[0], field.letter[1:]
        if latency not in (buckets.TTFT, buckets.DURATION) or not bucket.isdigit():
            fold(self.tally, field, amount)
            return
        histogram = self._histograms.setdefault((latency, field.kind), {})
        histogram[int(bucket)] = histogram.get(int(bucket), 0) + amount

    def _sum(self, latency: str, kinds: Iterable[str]) -> dict[int, int]:
        return buckets.merged(self._histograms.get((latency, kind), {}) for kind in kinds)

    def percentiles(self, latency: str) -> dict[str, Percentiles]:
        """The percentiles by kind, of all answers and of all hits."""
        kinds = (*buckets.HITS, *_GENERATED)
        groups = {"all": kinds, "hit": buckets.HITS, **{kind: (kind,) for kind in kinds}}
        return {name: percentiles(self._sum(latency, group)) for name, group in groups.items()}

    def point(self, start_s: int, length_s: int) -> Point:
        """These sums as a step of a series."""
        hit, miss = self._sum(buckets.TTFT, buckets.HITS), self._sum(buckets.TTFT, _GENERATED)
        return Point(start_s, length_s, self.tally, percentiles(hit), percentiles(miss))


def fold(tally: Tally, field: buckets.Field, amount: int) -> None:
    """Add one field of a request's kind to `tally`.

    Tokens of hits count as saved: those of the prompt were not read again, those of the answer not
    generated again.
    """
    if field.letter == buckets.REQUESTS:
        tally.requests += amount
        tally.by_kind[field.kind] = tally.by_kind.get(field.kind, 0) + amount
    elif field.kind in buckets.HITS and field.letter in ("p", "c"):
        tally.saved_tokens += amount
        tally.saved_completion_tokens += amount if field.letter == "c" else 0
    else:
        buckets.add(buckets.TALLIED, field.letter, amount, tally)


def fold_checks(counts: dict[tuple[int, str], CheckCounts], field: buckets.Field, amount: int) -> None:
    """Add one field to its team's and model's requests, semantic hits, checks and reports, if it is
    one of those.
    """
    is_answer = field.letter == buckets.REQUESTS and field.kind in buckets.ANSWERED
    if not is_answer and field.kind != buckets.TRUTH:
        return
    counted = counts.setdefault((field.team_id, field.model), CheckCounts())
    if is_answer:
        counted.requests += amount
        counted.hits += amount if field.kind == "semantic" else 0
    else:
        counted.count(field.letter, amount)


def fold_rulings(rulings: dict[str, RulingCounts], field: buckets.Field, amount: int) -> None:
    """Add one field to those of its two judges, if it is one of judges."""
    if field.kind == buckets.JUDGES:
        buckets.add(buckets.RULED, field.letter, amount, rulings.setdefault(field.model, RulingCounts()))


class Sums:
    """The sums of a window's buckets; requests count if they are of `team_id` and of `model` (None:
    any).
    """

    def __init__(self, team_id: int | None, model: str | None) -> None:
        self._team_id = team_id
        self._model = model
        self._total = Folded()
        self._by_team: dict[int, Tally] = {}
        self._by_model: dict[str, Tally] = {}
        self._by_surface: dict[str, Tally] = {}
        self._by_deployment: dict[str, DeploymentTally] = {}
        self._checks: dict[tuple[int, str], CheckCounts] = {}
        self._rulings: dict[str, RulingCounts] = {}
        self._series: list[Point] = []

    def add_point(self, start_s: int, length_s: int, fields: Iterable[tuple[buckets.Field, int]]) -> None:
        """Add the fields of one step of the series."""
        point = Folded()
        for field, amount in fields:
            if field.kind == buckets.DEPLOYMENT:
                tally = self._by_deployment.setdefault(field.model, DeploymentTally())
                buckets.add(buckets.TRIED, field.letter, amount, tally)
            elif field.kind == buckets.JUDGES:
                fold_rulings(self._rulings, field, amount)
            elif self._team_id in (None, field.team_id) and self._model in (None, field.model):
                self._add(point, field, amount)
        self._series.append(point.point(start_s, length_s))

    def _add(self, point: Folded, field: buckets.Field, amount: int) -> None:
        if field.letter.startswith(buckets.SURFACE):
            surface, _, kind = field.kind.partition("/")
            own = buckets.Field(field.letter.removeprefix(buckets.SURFACE), field.team_id, kind, field.model)
            fold(self._by_surface.setdefault(surface, Tally()), own, amount)
            return
        fold_checks(self._checks, field, amount)
        if field.kind != buckets.TRUTH:
            self._total.fold(field, amount)
            point.fold(field, amount)
            fold(self._by_team.setdefault(field.team_id, Tally()), field, amount)
            fold(self._by_model.setdefault(field.model, Tally()), field, amount)

    def summary(self, window: Window, start_s: int, end_s: int) -> Summary:
        """All sums so far, as those of [start_s, end_s)."""
        return Summary(
            window=window,
            start_s=start_s,
            end_s=end_s,
            total=self._total.tally,
            by_team=self._by_team,
            by_model=self._by_model,
            by_surface=self._by_surface,
            by_deployment=self._by_deployment,
            series=tuple(self._series),
            ttft=self._total.percentiles(buckets.TTFT),
            duration=self._total.percentiles(buckets.DURATION),
            rulings=self._rulings,
            samples=self._checks,
        )
