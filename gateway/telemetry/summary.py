"""Sums over the buckets of a window: by kind, team, model and deployment, with percentiles.

Knows the buckets' fields, and no Redis. Latencies are sparse histograms whose bounds lie a factor
2^(1/4) apart, so buckets of any workers and lengths can be added, and a percentile is within 10%.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

from gateway.telemetry import buckets
from gateway.telemetry.measured_error import CheckCounts, CheckedPeriod, RulingCounts

_GENERATED = ("miss", "bypass")


class StatsWindow(StrEnum):
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


class RequestTally(msgspec.Struct):
    """Sums over a part of the traffic.

    Tokens of hits count as saved: those of the prompt were not read again, those of the answer not
    generated again.
    """

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
    # of a verifier: requests that it was asked about, those with a yes, the hits on its word and what they saved
    asked_requests: int = 0
    confirmed_requests: int = 0
    verified_hits: int = 0
    verified_saved_microusd: int = 0
    # where it only observes: the hits by meaning that would have been
    would_hits: int = 0
    would_saved_microusd: int = 0

    @property
    def hits(self) -> int:
        """Answers from the cache, or from another request's generation."""
        return sum(self.by_kind.get(kind, 0) for kind in buckets.HITS)

    @property
    def hit_rate(self) -> float | None:
        """The share of hits among hits and misses; None before the first of them."""
        answers = self.hits + self.by_kind.get("miss", 0)
        return self.hits / answers if answers else None

    def add(self, field: buckets.Field, amount: int) -> None:
        """Add one field of a request's kind; those of latencies are ignored."""
        buckets.add(self, field.count, amount)
        if field.count == buckets.REQUESTS:
            self.by_kind[field.kind] = self.by_kind.get(field.kind, 0) + amount


class Point(msgspec.Struct, frozen=True):
    """One step of a time series."""

    start_s: int
    length_s: int
    tally: RequestTally
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

    window: StatsWindow
    start_s: int
    end_s: int
    total: RequestTally
    by_team: dict[int, RequestTally]
    by_model: dict[str, RequestTally]
    by_surface: dict[str, RequestTally]
    by_deployment: dict[str, DeploymentTally]
    series: tuple[Point, ...]
    ttft: dict[str, Percentiles]  # by kind of answer, and `all`
    duration: dict[str, Percentiles]
    verified: dict[str, Percentiles]  # the waits for a verifier's word, by model
    rulings: dict[str, RulingCounts]  # of two judges, with a line feed between their names; for all teams
    samples: dict[tuple[int, str], CheckCounts]  # by team and model, for the measured error of semantic hits


def percentiles(histogram: Mapping[int, int]) -> Percentiles:
    p50, p95, p99 = (buckets.percentile_ms(histogram, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(sum(histogram.values()), p50, p95, p99)


class Latencies:
    """Histograms by latency and kind."""

    def __init__(self) -> None:
        self._histograms = defaultdict[tuple[str, str], Counter[int]](Counter)

    def add(self, field: buckets.Field, amount: int) -> None:
        """Add a field of latencies; ignore others."""
        latency, _, step = field.count.partition(":")
        if step.isdecimal():
            self._histograms[latency, field.kind][int(step)] += amount

    def percentiles(self, latency: str, kinds: Iterable[str]) -> Percentiles:
        """The percentiles of the requests of these kinds."""
        histogram = Counter[int]()
        for kind in kinds:
            histogram.update(self._histograms.get((latency, kind), ()))
        return percentiles(histogram)

    def by_group(self, latency: str) -> dict[str, Percentiles]:
        """The percentiles by kind, of all answers and of all hits."""
        kinds = (*buckets.HITS, *_GENERATED)
        groups = {"all": kinds, "hit": buckets.HITS, **{kind: (kind,) for kind in kinds}}
        return {name: self.percentiles(latency, group) for name, group in groups.items()}


class WindowSums:
    """The sums of a window's buckets; requests count if they are of `team_id` and of `model` (None:
    any).
    """

    def __init__(self, team_id: int | None, model: str | None) -> None:
        self._team_id = team_id
        self._model = model
        self._total = RequestTally()
        self._latencies = Latencies()
        self._by_team = defaultdict[int, RequestTally](RequestTally)
        self._by_model = defaultdict[str, RequestTally](RequestTally)
        self._by_surface = defaultdict[str, RequestTally](RequestTally)
        self._by_deployment = defaultdict[str, DeploymentTally](DeploymentTally)
        self._checked = CheckedPeriod(0)
        self._waits = defaultdict[str, Counter[int]](Counter)
        self._series: list[Point] = []

    def add_point(self, start_s: int, length_s: int, fields: Iterable[tuple[buckets.Field, int]]) -> None:
        """Add the fields of one step of the series."""
        tally, latencies = RequestTally(), Latencies()
        for field, amount in fields:
            if field.kind == buckets.DEPLOYMENT:
                buckets.add(self._by_deployment[field.model], field.count, amount)
            elif field.kind == buckets.JUDGES:
                self._checked.add(field, amount)
            elif self._team_id in (None, field.team_id) and self._model in (None, field.model):
                self._checked.add(field, amount)
                if field.kind in buckets.KINDS:
                    self._add(field, amount, (self._latencies, tally, latencies))
        hit, miss = (latencies.percentiles(buckets.TTFT, kinds) for kinds in (buckets.HITS, _GENERATED))
        self._series.append(Point(start_s, length_s, tally, hit, miss))

    def _add(self, field: buckets.Field, amount: int, more: tuple[RequestTally | Latencies, ...]) -> None:
        latency, _, step = field.count.partition(":")
        if latency == buckets.VERIFIED:
            self._waits[field.model][int(step)] += amount
            return
        tallies = (self._total, self._by_team[field.team_id], self._by_model[field.model])
        for sums in (*tallies, self._by_surface[field.surface], *more):
            sums.add(field, amount)

    def summary(self, window: StatsWindow, start_s: int, end_s: int) -> Summary:
        """Build the summary of [start_s, end_s) from all sums so far."""
        return Summary(
            window=window,
            start_s=start_s,
            end_s=end_s,
            total=self._total,
            by_team=self._by_team,
            by_model=self._by_model,
            by_surface=self._by_surface,
            by_deployment=self._by_deployment,
            series=tuple(self._series),
            ttft=self._latencies.by_group(buckets.TTFT),
            duration=self._latencies.by_group(buckets.DURATION),
            verified={model: percentiles(steps) for model, steps in self._waits.items()},
            rulings=self._checked.rulings,
            samples=self._checked.counts,
        )
