"""The gateway's Prometheus metrics: what each is called, how a finished request moves them, and one text for all workers.

Knows records and numbers somebody else measured; asks nobody anything. Counters and histograms move through
`observe(record)` and nothing else moves them, so they agree with the log line and the stats; gauges are set by whoever
knows. The names are in definitions.py.

Invariant: what a scrape has shown never goes down, whichever worker answered it and whichever has died since.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gateway.journey.record import Record
from gateway.telemetry.metric_names import (
    ACCEPTED,
    ATTEMPT_DURATION,
    ATTEMPTS,
    BUILD,
    BY_NAME,
    COST,
    DEFINITIONS,
    DISCONNECTS,
    DRAFTED,
    DURATION,
    ERRORS,
    FAILOVERS,
    FAILURES,
    REQUESTS,
    SAVED_COST,
    SAVED_TIME,
    SECONDS,
    SEMANTIC_MISSES,
    SERIES_DROPPED,
    STORES,
    TOKEN_BOUNDS,
    TOKEN_USAGE,
    TOKENS,
    TPOT,
    TPOT_SECONDS,
    TTFT,
    WORKERS,
    Definition,
    Kind,
    Merge,
)
from gateway.telemetry.shared_numbers import Key, SharedNumbers

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
HITS = frozenset(("exact", "semantic", "coalesced"))

_PLANS_MAX = 20_000


class _Plan(msgspec.Struct, frozen=True):
    """Where the numbers of one sort of request live: looked up once per request, filled once per sort."""

    counted: tuple[int, ...]  # these go up by one
    duration: int
    ttft: int
    tpot: int
    is_hit: bool
    cost: int
    saved_cost: int
    saved_time: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    input_usage: int
    output_usage: int
    attempt: int  # the one that is as good as always the only one
    attempt_duration: int


class Metrics:
    """The metrics of this worker, and the text of all workers that share `folder` (None: this process alone).

    Label values must come from the configuration (team, model, deployment) or from our own code (cache, reason, code):
    never from a request as it came. A host has room for several thousand series; those beyond are counted nowhere.
    """

    def __init__(self, folder: Path | None) -> None:
        self._slots = SharedNumbers(folder)
        self.error = self._slots.error  # why these numbers are this worker's alone
        self._values: memoryview[float] = self._slots.values
        self._plans: dict[tuple[str | int, ...], _Plan] = {}
        self._starts: dict[Key, int] = {}
        for key, start in self._slots.own():
            if key[0] not in BY_NAME or BY_NAME[key[0]].kind is Kind.GAUGE:
                self._values[start] = math.nan  # a gauge of the worker that had this file before
        self._start(SERIES_DROPPED)
        self.set(WORKERS, 1)
        self.set(BUILD, 1, _version())

    def observe(self, record: Record) -> None:
        """Moves everything that one finished request moves. About 3 us."""
        sort = (
            record.route,
            record.alias,
            record.team,
            record.cache,
            record.status,
            record.deployment,
            record.store,
            record.miss_reason,
            record.error,
        )
        plan = self._plans.get(sort) or self._plan(record, sort)
        values = self._values
        for slot in plan.counted:
            values[slot] += 1.0
        duration_s = record.duration_ms / 1e3
        values[plan.duration] += duration_s
        values[plan.duration + 1 + bisect_left(SECONDS, duration_s)] += 1.0
        if record.ttft_ms is not None:
            ttft_s = record.ttft_ms / 1e3
            values[plan.ttft] += ttft_s
            values[plan.ttft + 1 + bisect_left(SECONDS, ttft_s)] += 1.0
        if plan.is_hit:
            values[plan.saved_cost] += record.saved_microusd / 1e6
            values[plan.saved_time] += record.saved_ms / 1e3
        elif record.prompt_tokens or record.completion_tokens:
            self._observe_generation(record, plan)
        if record.attempts:
            self._observe_attempts(record, plan)
        if record.is_disconnected:
            self.add(DISCONNECTS, 1, record.alias)
        for part in record.survived:
            self.add(FAILURES, 1, part)
        for source, drafted in (record.drafted_tokens or {}).items():
            self.add(DRAFTED, drafted, record.deployment, source)
            self.add(ACCEPTED, (record.accepted_tokens or {}).get(source, 0), record.deployment, source)

    def _observe_generation(self, record: Record, plan: _Plan) -> None:
        values = self._values
        values[plan.cost] += record.cost_microusd / 1e6
        values[plan.input_tokens] += record.prompt_tokens
        values[plan.output_tokens] += record.completion_tokens
        _add(values, plan.input_usage, TOKEN_BOUNDS, record.prompt_tokens)
        _add(values, plan.output_usage, TOKEN_BOUNDS, record.completion_tokens)
        if record.cached_tokens:
            values[plan.cached_tokens] += record.cached_tokens
        if record.ttft_ms is not None and record.completion_tokens > 1:
            tpot_s = (record.duration_ms - record.ttft_ms) / (record.completion_tokens - 1) / 1e3
            _add(values, plan.tpot, TPOT_SECONDS, max(tpot_s, 0.0))

    def _observe_attempts(self, record: Record, plan: _Plan) -> None:
        first = record.attempts[0]
        is_usual = len(record.attempts) == 1 and first.outcome == "ok" and first.name == record.deployment
        if is_usual and plan.attempt:
            self._values[plan.attempt] += 1.0
            _add(self._values, plan.attempt_duration, SECONDS, first.duration_ms / 1e3)
            return
        for attempt in record.attempts:
            verdict = attempt.verdict
            self.add(ATTEMPTS, 1, attempt.name, verdict)
            start = self._start(ATTEMPT_DURATION, record.alias, attempt.name, "" if verdict == "ok" else verdict)
            _add(self._values, start, SECONDS, attempt.duration_ms / 1e3)
        if len(record.attempts) > 1:
            self.add(FAILOVERS, 1, record.alias)

    def _plan(self, record: Record, sort: tuple[str | int, ...]) -> _Plan:
        if len(self._plans) >= _PLANS_MAX:
            self._plans.clear()
        route, model, team, cache = record.route, record.alias, record.team, record.cache
        error = str(record.status) if record.status >= 400 else ""
        counted = [self._start(REQUESTS, route, model, team, cache, str(record.status))]
        if record.store:
            counted.append(self._start(STORES, record.store))
        if record.miss_reason:
            counted.append(self._start(SEMANTIC_MISSES, record.miss_reason))
        if record.error:
            counted.append(self._start(ERRORS, route, model, record.error))
        is_generated = bool(record.deployment) and cache not in HITS
        plan = _Plan(
            counted=tuple(counted),
            duration=self._start(DURATION, route, model, cache, error),
            ttft=self._start(TTFT, route, model, cache),
            tpot=self._start(TPOT, route, model),
            is_hit=cache in HITS,
            cost=self._start(COST, model, team, record.deployment),
            saved_cost=self._start(SAVED_COST, model, team, cache) if cache in HITS else 0,
            saved_time=self._start(SAVED_TIME, model, cache) if cache in HITS else 0,
            input_tokens=self._start(TOKENS, model, team, "input"),
            cached_tokens=self._start(TOKENS, model, team, "cached_input"),
            output_tokens=self._start(TOKENS, model, team, "output"),
            input_usage=self._start(TOKEN_USAGE, route, model, "input"),
            output_usage=self._start(TOKEN_USAGE, route, model, "output"),
            attempt=self._start(ATTEMPTS, record.deployment, "ok") if is_generated else 0,
            attempt_duration=self._start(ATTEMPT_DURATION, model, record.deployment, "") if is_generated else 0,
        )
        self._plans[sort] = plan
        return plan

    def _start(self, definition: Definition, *labels: str) -> int:
        key = (definition.name, *labels)
        start = self._starts.get(key)
        if start is None:
            assert len(labels) == len(definition.labels), f"{definition.name} has the labels {definition.labels}"
            start = self._starts[key] = self._slots.allocate(key, definition.width)
            if start == 0:
                self.add(SERIES_DROPPED, 1)
        return start

    def add(self, definition: Definition, amount: float, *labels: str) -> None:
        """Moves a counter, or a gauge that is counted up and down, by `amount`."""
        start = self._start(definition, *labels)
        before = self._values[start]
        self._values[start] = amount if math.isnan(before) else before + amount

    def set(self, definition: Definition, value: float, *labels: str) -> None:
        """Sets a gauge of this worker."""
        self._values[self._start(definition, *labels)] = value

    def render(self) -> bytes:
        """The text of a scrape (CONTENT_TYPE): every worker's numbers, merged."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._merged()))
        return generate_latest(registry)

    def _merged(self) -> "list[Metric]":
        series: dict[Key, tuple[float, ...]] = {}
        for snapshot in self._slots.snapshots():
            for key, numbers in snapshot.series:
                definition = BY_NAME.get(key[0])
                if definition is None or len(numbers) != definition.width or len(key) != 1 + len(definition.labels):
                    continue  # an older version's
                if definition.kind is Kind.GAUGE and (not snapshot.is_alive or math.isnan(numbers[0])):
                    continue
                known = series.get(key)
                series[key] = numbers if known is None else _merge(definition, known, numbers)
        return [_family(definition, series) for definition in DEFINITIONS]

    def close(self) -> None:
        self._slots.close()


class _Collected:
    """prometheus_client's collector seam over metrics that are already made."""

    def __init__(self, metrics: "list[Metric]") -> None:
        self._metrics = metrics

    def collect(self) -> "Iterable[Metric]":
        return self._metrics


def _add(values: "memoryview[float]", start: int, bounds: tuple[float, ...], value: float) -> None:
    values[start] += value
    values[start + 1 + bisect_left(bounds, value)] += 1.0


_MERGES: dict[Merge, Callable[[float, float], float]] = {Merge.SUM: float.__add__, Merge.MAX: max, Merge.MIN: min}


def _merge(definition: Definition, left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, ...]:
    merge = _MERGES[definition.merge]
    return tuple(merge(a, b) for a, b in zip(left, right, strict=True))


def _family(definition: Definition, series: dict[Key, tuple[float, ...]]) -> "Metric":
    from prometheus_client.metrics_core import Metric

    family = Metric(definition.name.removesuffix("_total"), definition.help, definition.kind.value)
    for key, numbers in sorted(series.items()):
        if key[0] != definition.name:
            continue
        if definition.kind is not Kind.GAUGE and not any(numbers[1:] or numbers):
            continue  # made ready, never moved
        labels = dict(zip(definition.labels, key[1:], strict=True))
        if definition.kind is not Kind.HISTOGRAM:
            family.add_sample(definition.name, labels, numbers[0])
            continue
        for bound, count in _cumulative(definition.bounds, numbers):
            family.add_sample(f"{definition.name}_bucket", {**labels, "le": bound}, count)
        family.add_sample(f"{definition.name}_count", labels, sum(numbers[1:]))
        family.add_sample(f"{definition.name}_sum", labels, numbers[0])
    return family


def _cumulative(bounds: tuple[float, ...], numbers: tuple[float, ...]) -> Iterator[tuple[str, float]]:
    total = 0.0
    for bound, count in zip((*bounds, math.inf), numbers[1:], strict=True):
        total += count
        yield ("+Inf" if bound == math.inf else repr(bound)), total


def _version() -> str:
    try:
        return version("sameway")
    except PackageNotFoundError:
        return "unknown"
