"""The gateway's Prometheus metrics: updates by finished requests, and one text for all workers.

Replaces prometheus_client's counters, whose locked look-ups of labels would add up to a dozen a
request; rendering is still prometheus_client's. Only `observe(record)` moves a request's counters
and histograms, so they agree with the log line and the statistics; other parts set gauges.
`metric_names` defines the names.

Invariant: a scraped counter never decreases, whichever worker answers and whichever has ended. That
of a model, deployment or team that is gone is missing, and may begin anew if that comes back.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from gateway.deployments.progress import Attempt
from gateway.journey.record import Record, Times
from gateway.telemetry import metric_names as names
from gateway.telemetry.buckets import HITS
from gateway.telemetry.shared_numbers import Key, SharedNumbers
from gateway.wire.errors import DeploymentFull
from policies import Usage

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SORTS_MAX = 20_000


class _RequestSeries(msgspec.Struct, frozen=True):
    """The series that requests of one sort move, by the positions of their first doubles.

    Looking these up takes longer than updating them, so it is done once for each sort of request.
    """

    counters: tuple[int, ...]  # each goes up by one
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
    attempt: int  # of a single successful attempt; 0 for others
    attempt_duration: int

    def count(self, values: "memoryview[float]", record: Record) -> None:
        """Count one finished request, without its attempts."""
        times, usage, money = record.times, record.usage, record.money
        for counter in self.counters:
            values[counter] += 1.0
        _add(values, self.duration, names.SECONDS, times.duration_ms / 1e3)
        if times.ttft_ms is not None:
            _add(values, self.ttft, names.SECONDS, times.ttft_ms / 1e3)
        if self.is_hit:
            values[self.saved_cost] += money.saved_microusd / 1e6
            values[self.saved_time] += times.saved_ms / 1e3
        elif usage.prompt_tokens or usage.completion_tokens or money.cost_microusd:
            values[self.cost] += money.cost_microusd / 1e6
            self._count_tokens(values, usage, times)

    def _count_tokens(self, values: "memoryview[float]", usage: Usage, times: Times) -> None:
        values[self.input_tokens] += usage.prompt_tokens
        values[self.output_tokens] += usage.completion_tokens
        _add(values, self.input_usage, names.TOKEN_BOUNDS, usage.prompt_tokens)
        _add(values, self.output_usage, names.TOKEN_BOUNDS, usage.completion_tokens)
        if usage.cached_tokens:
            values[self.cached_tokens] += usage.cached_tokens
        if times.ttft_ms is not None and usage.completion_tokens > 1:
            tpot_s = (times.duration_ms - times.ttft_ms) / (usage.completion_tokens - 1) / 1e3
            _add(values, self.tpot, names.TPOT_SECONDS, max(tpot_s, 0.0))

    def count_attempt(self, values: "memoryview[float]", attempt: Attempt) -> None:
        """Count the request's single, successful attempt."""
        values[self.attempt] += 1.0
        _add(values, self.attempt_duration, names.SECONDS, attempt.duration_ms / 1e3)


class Metrics:
    """This worker's metrics, and the text of all workers that share `folder` (None: of this one).

    Label values must come from the configuration (team, model, deployment) or from the code (cache,
    reason, code), never from a request. `current` gives, for some labels, the values that there are now:
    a scrape leaves out series with others. A host has room for several thousand series: those that are
    left out give way, and further ones are not counted.
    """

    def __init__(self, folder: Path | None, version: str = "unknown", commit: str = "unknown") -> None:
        self._numbers = SharedNumbers(folder)
        self.error = self._numbers.error  # the reason why other workers do not see these numbers, if any
        self._values: memoryview[float] = self._numbers.values
        self._by_sort: dict[tuple[str | int, ...], _RequestSeries] = {}
        self._starts: dict[Key, int] = {}
        self.current: Callable[[], Mapping[str, Collection[str]]] = dict
        for key, start in self._numbers.own():
            if key[0] not in names.BY_NAME or names.BY_NAME[key[0]].kind is names.MetricKind.GAUGE:
                self._values[start] = math.nan  # a gauge of the file's last worker
        self._start(names.SERIES_DROPPED)
        self.set(names.WORKERS, 1)
        self.set(names.BUILD, 1, version, commit)

    def observe(self, record: Record) -> None:
        """Count one finished request; takes about 3 µs."""
        request, ended, cache, answer, usage = record.request, record.ended, record.cache, record.answer, record.usage
        sort = (
            request.operation,
            request.alias,
            request.team,
            cache.source,
            ended.status,
            answer.deployment,
            cache.store,
            cache.miss_reason,
            ended.error,
        )
        series = self._by_sort.get(sort) or self._find(record, sort)
        series.count(self._values, record)
        if answer.attempts:
            self._count_attempts(record, series)
        if ended.is_disconnected:
            self.add(names.DISCONNECTS, 1, request.alias)
        is_refused = ended.error == DeploymentFull.code
        if answer.queued_ms or is_refused:
            self.add(names.QUEUED, 1, request.alias, "refused" if is_refused else "waited")
            self.add(names.QUEUED_TIME, answer.queued_ms / 1e3, request.alias)
        if request.loop:
            self.add(
                names.LOOPS, 1, request.alias, request.loop, "refused" if ended.error == request.loop else "marked"
            )
        for look in request.guards:
            self.add(names.GUARD_CALLS, 1, look.name, "after" if look.is_after else "before", look.verdict)
            self.add(names.GUARD_TIME, look.duration_ms / 1e3, look.name)
        if cache.awaited:
            self.add(names.AWAITED, 1, request.alias, cache.awaited)
            self.add(names.AWAITED_TIME, cache.awaited_ms / 1e3, request.alias)
        if (said := record.verifier).verdict:
            self.add(names.VERIFIER_WORDS, 1, request.alias, said.verdict)
            self.add(names.VERIFIER_TIME, (said.verify_ms or 0.0) / 1e3, request.alias)
        self._count_money(record)
        for part in cache.degraded:
            self.add(names.FAILURES, 1, part)
        if usage.drafted_tokens:
            for source, drafted in usage.drafted_tokens.items():
                self.add(names.DRAFTED, drafted, answer.deployment, source)
                self.add(names.ACCEPTED, (usage.accepted_tokens or {}).get(source, 0), answer.deployment, source)

    def _count_money(self, record: Record) -> None:
        """Count claims, estimates, unknown baselines and savings."""
        request, money = record.request, record.money
        if money.usage_estimated:
            self.add(names.ESTIMATED, 1, request.alias, record.answer.deployment)
        for claim in money.claims:
            self.add(names.CLAIMS, 1, claim.deployment, "cut" if claim.is_cut else "booked")
        if money.is_baseline_unknown:
            self.add(names.UNCOMPARED, 1, request.alias, request.team)
        if money.savings:
            for mechanism, amount in money.savings.items():
                saved = names.SAVED_COST if amount > 0 else names.EXTRA_COST
                self.add(saved, abs(amount) / 1e6, request.alias, request.team, mechanism)

    def _count_attempts(self, record: Record, series: _RequestSeries) -> None:
        answer, alias = record.answer, record.request.alias
        first = answer.attempts[0]
        is_usual = len(answer.attempts) == 1 and first.outcome == "ok" and first.name == answer.deployment
        if is_usual and series.attempt and not first.mended:
            series.count_attempt(self._values, first)
            return
        for attempt in answer.attempts:
            verdict = attempt.verdict
            self.add(names.ATTEMPTS, 1, attempt.name, verdict)
            if attempt.mended:
                self.add(names.MENDED, attempt.mended, attempt.name)
            start = self._start(names.ATTEMPT_DURATION, alias, attempt.name, "" if verdict == "ok" else verdict)
            _add(self._values, start, names.SECONDS, attempt.duration_ms / 1e3)
        if len(answer.attempts) > (1 if answer.hedge is None else 2):
            self.add(names.FAILOVERS, 1, alias)
        if answer.hedge is not None:
            self.add(names.HEDGES, 1, alias, answer.hedge.outcome)
            self.add(names.HEDGE_COST, answer.hedge.cost_microusd / 1e6, alias)
        if answer.seams:
            self.add(names.RESCUES, 1, alias, "error" if record.ended.error else "ok")

    def _find(self, record: Record, sort: tuple[str | int, ...]) -> _RequestSeries:
        if len(self._by_sort) >= _SORTS_MAX:
            self._by_sort.clear()
        request, ended, cache, deployment = record.request, record.ended, record.cache, record.answer.deployment
        route, model, team, source = request.operation, request.alias, request.team, cache.source
        error = str(ended.status) if ended.status >= 400 else ""
        counters = [self._start(names.REQUESTS, route, model, team, source, str(ended.status))]
        if cache.store:
            counters.append(self._start(names.STORES, cache.store))
        if cache.miss_reason:
            counters.append(self._start(names.SEMANTIC_MISSES, cache.miss_reason))
        if ended.error:
            counters.append(self._start(names.ERRORS, route, model, ended.error))
        is_hit = source in HITS
        is_generated = bool(deployment) and not is_hit
        series = self._by_sort[sort] = _RequestSeries(
            counters=tuple(counters),
            duration=self._start(names.DURATION, route, model, source, error),
            ttft=self._start(names.TTFT, route, model, source),
            tpot=self._start(names.TPOT, route, model),
            is_hit=is_hit,
            cost=self._start(names.COST, model, team, deployment),
            saved_cost=self._start(names.SAVED_COST, model, team, source) if is_hit else 0,
            saved_time=self._start(names.SAVED_TIME, model, source) if is_hit else 0,
            input_tokens=self._start(names.TOKENS, model, team, "input"),
            cached_tokens=self._start(names.TOKENS, model, team, "cached_input"),
            output_tokens=self._start(names.TOKENS, model, team, "output"),
            input_usage=self._start(names.TOKEN_USAGE, route, model, "input"),
            output_usage=self._start(names.TOKEN_USAGE, route, model, "output"),
            attempt=self._start(names.ATTEMPTS, deployment, "ok") if is_generated else 0,
            attempt_duration=self._start(names.ATTEMPT_DURATION, model, deployment, "") if is_generated else 0,
        )
        return series

    def _start(self, definition: names.Definition, *labels: str) -> int:
        key = (definition.name, *labels)
        start = self._starts.get(key)
        if start is None:
            assert len(labels) == len(definition.labels), f"{definition.name} has the labels {definition.labels}"
            start = self._starts[key] = self._numbers.allocate(key, definition.width)
            if start == 0:
                self.add(names.SERIES_DROPPED, 1)
        return start

    def _forget(self) -> None:
        """Give the room of series that are gone to others."""
        current = self.current()
        gone = {key for key, _ in self._numbers.own() if _is_gone(key, current)}
        if gone:
            with suppress(OSError):  # a full disk
                self._numbers.forget(gone)
                self._by_sort.clear()
                self._starts = {key: start for key, start in self._starts.items() if start and key not in gone}

    def add(self, definition: names.Definition, amount: float, *labels: str) -> None:
        """Add `amount` to a counter or a gauge. `labels` are in the order of the definition."""
        start = self._start(definition, *labels)
        before = self._values[start]
        self._values[start] = amount if math.isnan(before) else before + amount

    def set(self, definition: names.Definition, value: float, *labels: str) -> None:
        """Set this worker's gauge. `labels` are in the order of the definition."""
        self._values[self._start(definition, *labels)] = value

    def render(self) -> bytes:
        """The text of a scrape (CONTENT_TYPE), merged from all workers."""
        from prometheus_client import CollectorRegistry, generate_latest

        if self._numbers.is_half_full:
            self._forget()
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collected(self._merged()))
        return generate_latest(registry)

    def _merged(self) -> "list[Metric]":
        series: dict[Key, tuple[float, ...]] = {}
        current = self.current()
        for snapshot in self._numbers.snapshots():
            for key, numbers in snapshot.series:
                if _is_gone(key, current):
                    continue
                definition = names.BY_NAME[key[0]]
                if len(numbers) != definition.width:
                    continue  # written by an older version
                if definition.kind is names.MetricKind.GAUGE and (not snapshot.is_alive or math.isnan(numbers[0])):
                    continue
                known = series.get(key)
                series[key] = numbers if known is None else tuple(map(_MERGES[definition.merge], known, numbers))
        return [_family(definition, series) for definition in names.DEFINITIONS]

    def close(self) -> None:
        """Release the worker's files; the numbers stay."""
        self._numbers.close()


class _Collected:
    """A prometheus_client collector of finished metrics."""

    def __init__(self, metrics: "list[Metric]") -> None:
        self._metrics = metrics

    def collect(self) -> "Iterable[Metric]":
        return self._metrics


def _is_gone(key: Key, current: Mapping[str, Collection[str]]) -> bool:
    """Whether a series has a label's value that there is no more, or is an older version's."""
    definition = names.BY_NAME.get(key[0])
    if definition is None or len(key) != 1 + len(definition.labels):
        return True
    return any(
        value and value not in current.get(label, (value,))
        for label, value in zip(definition.labels, key[1:], strict=True)
    )


def _add(values: "memoryview[float]", start: int, bounds: tuple[float, ...], value: float) -> None:
    values[start] += value
    values[start + 1 + bisect_left(bounds, value)] += 1.0


_MERGES: dict[names.Merge, Callable[[float, float], float]] = {
    names.Merge.SUM: float.__add__,
    names.Merge.MAX: max,
    names.Merge.MIN: min,
}


def _family(definition: names.Definition, series: dict[Key, tuple[float, ...]]) -> "Metric":
    from prometheus_client.metrics_core import Metric

    family = Metric(definition.name.removesuffix("_total"), definition.help, definition.kind.value)
    for key, numbers in sorted(series.items()):
        if key[0] != definition.name:
            continue
        if definition.kind is not names.MetricKind.GAUGE and not any(numbers[1:] or numbers):
            continue  # allocated, but never moved
        labels = dict(zip(definition.labels, key[1:], strict=True))
        if definition.kind is not names.MetricKind.HISTOGRAM:
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
