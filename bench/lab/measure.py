"""One figure row: a scenario asked of a running system at a number of connections, repeated, with medians.

Knows neither how systems are started nor how rows are shown.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.lab.native import Load, LoadResult, Percentiles, Stub, run_load
from bench.lab.processes import BenchError, Cost, Meter, machine_cpu_s
from bench.lab.scenarios import Bodies, Scenario, Traffic, write_bodies
from bench.lab.systems import Running, Target

_SETTLE_S = 0.4  # what a system still does after its last answer is part of its cost, and not of the next measurement's
_SETTLE_MAX_S = 10.0
_EVENTS_MIN = 64


class Row(msgspec.Struct):
    """One line of the results. Times in milliseconds as the client saw them; CPU over all processes of the system."""

    system: str
    scenario: str
    connections: int
    requests: int
    requests_per_s: float
    p50_ms: float | None
    p95_ms: float | None
    p99_ms: float | None
    p999_ms: float | None
    ttft_p50_ms: float | None  # to the first event of a stream
    ttft_p99_ms: float | None
    events_per_request: float | None
    gap_p50_ms: float | None  # between a stream's events, as they arrive
    gap_p99_ms: float | None
    cpu_ms_per_request: float | None
    rss_mb: float | None  # peak, all processes
    errors: int
    overhead_p50_ms: float | None = None  # p50 less that of the upstream asked directly
    overhead_p99_ms: float | None = None
    overhead_ttft_p50_ms: float | None = None
    rate_per_s: float | None = None  # open loop: what was asked for
    repeats: int = 1
    upstream_share: float | None = None  # of the requests, how many reached the upstream
    cache: dict[str, int] = {}  # answers by where the system said that they came from
    cpu_ms_by_role: dict[str, float] = {}  # per request
    rss_mb_by_role: dict[str, float] = {}
    errors_by_kind: dict[str, int] = {}
    first_failure: str = ""
    client_cores: float = 0.0  # busy cores of the load tool, of the upstream and of the system
    upstream_cores: float = 0.0
    system_cores: float = 0.0
    other_cores: float = 0.0  # of everything else on the machine: what spoils requests/s and latencies
    version: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. `profile` runs beside the measured part of a run, given the load's duration."""

    duration_s: float
    warmup_s: float
    repeats: int
    timeout_s: float = 60.0
    profile: Callable[[Meter, float], None] | None = None
    salt: str = ""  # other texts than those of a plan with another


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition."""

    load: LoadResult
    cost: Cost
    upstream_requests: int
    upstream_cpu_s: float
    window_s: float  # over which the costs were read
    other_cores: float


def measure(
    name: str,
    running: Running,
    stub: Stub,
    scenario: Scenario,
    connections: int,
    rate: float | None,
    plan: Plan,
    folder: Path,
) -> Row:
    """Asks `plan.repeats` times and returns the medians. Raises BenchError when the system answers nothing at all."""
    samples = [
        _sample(
            running,
            stub,
            scenario,
            connections,
            rate,
            plan,
            folder,
            f"{scenario.name}-{connections}-{repeat}{plan.salt}",
        )
        for repeat in range(plan.repeats)
    ]
    if not any(sample.load.requests for sample in samples):
        raise BenchError(
            f"{name}: {scenario.name}: no request succeeded; the first failure: {samples[0].load.first_failure}"
        )
    return _row(name, running, scenario, connections, rate, samples)


def target_of(running: Running, scenario: Scenario) -> Target:
    """What the scenario's requests name on this system."""
    if scenario.pace_ms:
        return running.paced
    return running.instant if scenario.is_budgeted or running.unbudgeted is None else running.unbudgeted


def load_of(
    running: Running, scenario: Scenario, bodies: Bodies, connections: int, rate: float | None, plan: Plan
) -> Load:
    """The options of the load tool for one repetition."""
    target = target_of(running, scenario)
    return Load(
        port=running.port,
        bodies=bodies.asked,
        path=target.path,
        headers=target.headers,
        order=bodies.order,
        connections=connections,
        rate=rate,
        duration_s=max(plan.duration_s, 0.2 * scenario.pace_ms),
        warmup_s=0.0 if scenario.traffic is Traffic.ZIPF else plan.warmup_s,
        timeout_s=plan.timeout_s,
        is_stream=scenario.is_stream,
        events_min=_EVENTS_MIN if scenario.is_stream and scenario.reaches_upstream else 0,
        bytes_min=0 if scenario.is_stream else 400,
        tally=running.tally,
    )


def _sample(
    running: Running,
    stub: Stub,
    scenario: Scenario,
    connections: int,
    rate: float | None,
    plan: Plan,
    folder: Path,
    salt: str,
) -> Sample:
    bodies = write_bodies(scenario, target_of(running, scenario).model, salt, folder)
    load = load_of(running, scenario, bodies, connections, rate, plan)
    if bodies.first is not None:
        prime(load, bodies)
    meter = Meter(running.roots, running.role_of)
    before, started_s, machine_s = stub.stats(), time.monotonic(), machine_cpu_s()

    def start() -> None:
        nonlocal before, started_s, machine_s
        meter.wait_idle(_SETTLE_S, _SETTLE_MAX_S)
        before, started_s, machine_s = stub.stats(), time.monotonic(), machine_cpu_s()
        meter.reset()
        if plan.profile is not None:
            plan.profile(meter, load.duration_s)

    result = run_load(load, start)
    meter.wait_idle(_SETTLE_S, _SETTLE_MAX_S)
    cost, after = meter.read(), stub.stats()
    upstream_s = after.cpu_s - before.cpu_s
    other_s = machine_cpu_s() - machine_s - sum(cost.cpu_s.values()) - result.client_cpu_s - upstream_s
    window_s = time.monotonic() - started_s
    return Sample(result, cost, after.requests - before.requests, upstream_s, window_s, max(0.0, other_s / window_s))


def prime(load: Load, bodies: Bodies) -> None:
    """Asks each of `first` once, so that the measured requests can be hits."""
    assert bodies.first is not None
    once = Load(
        port=load.port,
        bodies=bodies.first,
        path=load.path,
        headers=load.headers,
        connections=min(8, bodies.first_count),
        duration_s=60.0,
        count=bodies.first_count,
        timeout_s=load.timeout_s,
        is_stream=load.is_stream,
    )
    result = run_load(once)
    if result.errors:
        raise BenchError(f"{result.errors} of {bodies.first_count} first requests failed: {result.first_failure}")
    time.sleep(2 * _SETTLE_S)


def _row(
    name: str, running: Running, scenario: Scenario, connections: int, rate: float | None, samples: Sequence[Sample]
) -> Row:
    def median(of: Callable[[Sample], float]) -> float:
        return statistics.median(of(sample) for sample in samples)

    def percentile(of: Callable[[LoadResult], Percentiles | None], rank: str) -> float | None:
        found = [getattr(p, rank) for sample in samples if (p := of(sample.load)) is not None]
        return round(statistics.median(found), 4) if found else None

    def per_request(sample: Sample, seconds: float) -> float:
        return 1000.0 * seconds / max(1, sample.load.requests + sample.load.errors)

    roles = sorted({role for sample in samples for role in sample.cost.cpu_s})
    tally: dict[str, int] = {}
    kinds: dict[str, int] = {}
    for sample in samples:
        for into, counted in ((tally, sample.load.tally), (kinds, sample.load.errors_by_kind)):
            for key, count in counted.items():
                into[key] = into.get(key, 0) + count
    return Row(
        system=name,
        scenario=scenario.name,
        connections=connections,
        requests=sum(sample.load.requests for sample in samples),
        requests_per_s=round(median(lambda s: s.load.requests_per_s), 2),
        p50_ms=percentile(lambda load: load.latency_ms, "p50"),
        p95_ms=percentile(lambda load: load.latency_ms, "p95"),
        p99_ms=percentile(lambda load: load.latency_ms, "p99"),
        p999_ms=percentile(lambda load: load.latency_ms, "p999"),
        ttft_p50_ms=percentile(lambda load: load.first_event_ms, "p50"),
        ttft_p99_ms=percentile(lambda load: load.first_event_ms, "p99"),
        events_per_request=round(median(lambda s: s.load.events / max(1, s.load.requests)), 1)
        if scenario.is_stream
        else None,
        gap_p50_ms=percentile(lambda load: load.gap_ms, "p50"),
        gap_p99_ms=percentile(lambda load: load.gap_ms, "p99"),
        cpu_ms_per_request=round(median(lambda s: per_request(s, sum(s.cost.cpu_s.values()))), 4) if roles else None,
        rss_mb=round(max(sum(s.cost.peak_rss_mb.values()) for s in samples), 1) if roles else None,
        errors=sum(sample.load.errors for sample in samples),
        rate_per_s=rate,
        repeats=len(samples),
        upstream_share=round(median(lambda s: s.upstream_requests / max(1, s.load.requests + s.load.errors)), 4),
        cache=tally,
        cpu_ms_by_role={
            r: round(statistics.median(per_request(s, s.cost.cpu_s.get(r, 0.0)) for s in samples), 4) for r in roles
        },
        rss_mb_by_role={r: round(max(s.cost.peak_rss_mb.get(r, 0.0) for s in samples), 1) for r in roles},
        errors_by_kind={kind: count for kind, count in kinds.items() if count},
        first_failure=next((s.load.first_failure for s in samples if s.load.first_failure), ""),
        client_cores=round(median(lambda s: s.load.client_cpu_s / s.load.elapsed_s if s.load.elapsed_s else 0.0), 3),
        upstream_cores=round(median(lambda s: s.upstream_cpu_s / s.load.elapsed_s if s.load.elapsed_s else 0.0), 3),
        system_cores=round(median(lambda s: sum(s.cost.cpu_s.values()) / s.window_s), 3),
        other_cores=round(median(lambda s: s.other_cores), 3),
        version=running.version,
    )
