"""What the buckets of a window add up to: sums by kind, team, model and deployment, and percentiles of latencies.

Knows the buckets' fields and nothing of where they are kept. Latencies are histograms whose bounds lie a factor 2^(1/4)
apart, sparse, so buckets of any workers and lengths add up and a percentile is within 10%.

Invariant: adding up is associative: the sum of two windows' fields is the fields of both windows.
"""

import math
from collections.abc import Iterable, Iterator
from enum import StrEnum

import msgspec

from gateway.telemetry.measured_error import Sample

HITS = ("exact", "semantic", "coalesced")
# What became of a request, so that errors never count as misses.
KINDS = (*HITS, "miss", "bypass", "refused", "failed")
_RULED_OUT = frozenset({"not_cached", "deadline_exceeded"})  # 504s by the caller's own wish: nothing of ours failed


def kind_of(cache: str, status: int, error: str) -> str:
    """One of KINDS: what the cache did, `refused` for a 4xx and for what the caller ruled out, `failed` for any other 5xx."""
    if status < 400:
        return cache
    return "refused" if status < 500 or error in _RULED_OUT else "failed"


class Window(StrEnum):
    """How far back a query looks."""

    HOUR = "1h"
    DAY = "24h"
    WEEK = "7d"
    MONTH = "30d"


class Percentiles(msgspec.Struct, frozen=True):
    """Of one latency, in ms; None where nothing was measured."""

    count: int
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None


class Tally(msgspec.Struct):
    """Sums over some part of the traffic."""

    requests: int = 0
    by_kind: dict[str, int] = {}
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    cost_microusd: int = 0
    saved_microusd: int = 0
    saved_tokens: int = 0
    saved_ms: int = 0

    @property
    def hits(self) -> int:
        return sum(self.by_kind.get(kind, 0) for kind in HITS)

    @property
    def hit_rate(self) -> float | None:
        """Hits of all answers the cache was asked for; None where it was asked for none."""
        answers = self.hits + self.by_kind.get("miss", 0)
        return self.hits / answers if answers else None


class Point(msgspec.Struct, frozen=True):
    """One step of the series."""

    start_s: int
    length_s: int
    tally: Tally
    ttft_hit: Percentiles
    ttft_miss: Percentiles


class DeploymentTally(msgspec.Struct):
    """What one deployment was asked for, over a window, by all teams."""

    ok: int = 0
    failed: int = 0
    completion_tokens: int = 0
    cost_microusd: int = 0


class Summary(msgspec.Struct, frozen=True):
    """The answer to one query."""

    window: Window
    start_s: int
    end_s: int
    total: Tally
    by_team: dict[int, Tally]
    by_model: dict[str, Tally]
    by_deployment: dict[str, DeploymentTally]
    series: tuple[Point, ...]
    ttft: dict[str, Percentiles]  # by kind of answer, and `all`
    duration: dict[str, Percentiles]
    samples: dict[tuple[int, str], Sample]  # by team and model, for the error of answers by meaning


_STEPS_PER_DOUBLING = 4
_STEP_MAX = 31 * _STEPS_PER_DOUBLING  # about 60 h in units of 0.1 ms


def step(ms: float) -> int:
    """The histogram's bucket: 0 up to 0.1 ms, then four to each doubling."""
    return min(max(math.ceil(_STEPS_PER_DOUBLING * math.log2(ms * 10)), 0), _STEP_MAX) if ms > 0 else 0


def _percentile_ms(histogram: dict[int, int], share: float) -> float | None:
    """Geometric middle of the bucket that holds the `share`-th value."""
    rest = math.ceil(share * sum(histogram.values()))
    for step in sorted(histogram):
        rest -= histogram[step]
        if rest <= 0:
            return float(2 ** ((step - 0.5) / _STEPS_PER_DOUBLING) / 10)
    return None


def percentiles(histogram: dict[int, int]) -> Percentiles:
    p50, p95, p99 = (_percentile_ms(histogram, share) for share in (0.5, 0.95, 0.99))
    return Percentiles(sum(histogram.values()), p50, p95, p99)


class Field(msgspec.Struct, frozen=True):
    """A hash field, taken apart."""

    metric: str
    team_id: int
    kind: str
    model: str


def read_fields(reply: list[bytes]) -> Iterator[tuple[Field, int]]:
    """The fields and values of a bucket's flat reply."""
    for name, amount in zip(reply[::2], reply[1::2], strict=True):
        metric, team, kind, model = name.decode().split("|", 3)
        yield Field(metric, int(team or 0), kind, model), int(amount)


_SUMS = {"p": "prompt_tokens", "c": "completion_tokens", "k": "cached_tokens", "$": "cost_microusd"}
_SUMS |= {"s": "saved_microusd", "ms": "saved_ms"}


def fold(tally: Tally, field: Field, amount: int) -> None:
    if field.metric == "r":
        tally.requests += amount
        tally.by_kind[field.kind] = tally.by_kind.get(field.kind, 0) + amount
    elif field.metric in _SUMS:
        is_saved = field.kind in HITS and field.metric in ("p", "c")
        name = "saved_tokens" if is_saved else _SUMS[field.metric]
        setattr(tally, name, getattr(tally, name) + amount)


SAMPLE_SCALE = 10_000  # weights in a bucket are integers


def fold_sample(samples: dict[tuple[int, str], Sample], field: Field, amount: int) -> None:
    """Requests, hits by meaning, checks and reports of a team and alias (kind `truth`: n, b, w, q, x, fw, fr)."""
    is_answer = field.metric == "r" and field.kind in (*HITS, "miss")
    if not is_answer and field.kind != "truth":
        return
    sample = samples.setdefault((field.team_id, field.model), Sample())
    match field.metric:
        case "r":
            sample.requests += amount
            sample.hits += amount if field.kind == "semantic" else 0
        case "n":
            sample.checks += amount
        case "w":
            sample.weight += amount / SAMPLE_SCALE
        case "q":
            sample.weight2 += amount / SAMPLE_SCALE
        case "x":
            sample.wrong_weight += amount / SAMPLE_SCALE
        case "b":
            sample.wrong += amount
        case "fw":
            sample.reported_wrong += amount
        case "fr":
            sample.reported_right += amount


def fold_deployment(tally: DeploymentTally, field: Field, amount: int) -> None:
    name = {"ok": "ok", "no": "failed", "c": "completion_tokens", "$": "cost_microusd"}[field.metric]
    setattr(tally, name, getattr(tally, name) + amount)


class Folded:
    """A tally and its latencies' histograms, by kind."""

    def __init__(self) -> None:
        self.tally = Tally()
        self._histograms: dict[tuple[str, str], dict[int, int]] = {}

    def fold(self, field: Field, amount: int) -> None:
        which = field.metric[0]
        if which not in "td" or not field.metric[1:].isdigit():
            fold(self.tally, field, amount)
            return
        histogram = self._histograms.setdefault((which, field.kind), {})
        bucket = int(field.metric[1:])
        histogram[bucket] = histogram.get(bucket, 0) + amount

    def _sum(self, which: str, kinds: Iterable[str]) -> dict[int, int]:
        merged: dict[int, int] = {}
        for kind in kinds:
            for step, count in self._histograms.get((which, kind), {}).items():
                merged[step] = merged.get(step, 0) + count
        return merged

    def percentiles(self, which: str) -> dict[str, Percentiles]:
        groups = {
            "all": (*HITS, "miss", "bypass"),
            "hit": HITS,
            **{kind: (kind,) for kind in (*HITS, "miss", "bypass")},
        }
        return {name: percentiles(self._sum(which, kinds)) for name, kinds in groups.items()}

    def point(self, start_s: int, length_s: int) -> Point:
        hit, miss = self._sum("t", HITS), self._sum("t", ("miss", "bypass"))
        return Point(start_s, length_s, self.tally, percentiles(hit), percentiles(miss))
