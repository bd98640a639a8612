"""Two checkouts of Sameway in turn: the ratio of what their workers cost a request, and how far it spreads.

CPU a request depends on how many requests a turn of the event loop finds, and on the memory layout that a process
happened to get. `one_core` steadies the first. Fresh processes in each round, several pairs of them, average the second.
Invariant: between two readings of the CPU lie only the measured requests and the work that follows them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.lab.measure import Plan, load_of, prime, target_of
from bench.lab.native import Stub, run_load
from bench.lab.processes import BenchError, Meter, cpu_s, peak_rss_mb
from bench.lab.scenarios import Scenario, Traffic, write_bodies
from bench.lab.systems import Running, System

TOLERANCE = 0.02
_CONFIDENCE = 0.875  # of the interval that a verdict goes by; seven rounds reach it without their two extremes
_ROUNDS_MIN = 5
_WORKERS = ("gateway", "cache")
_WARM_REQUESTS = 256  # before each slice; four times what a scenario of hits repeats
_WARM_PARAPHRASES = 32  # dear ones: one of them takes what ten misses take
_IDLE_S = 0.03
_IDLE_SHARE = 0.05  # of a core: what a worker uses that does nothing
_IDLE_MAX_S = 2.0
_PLAN = Plan(duration_s=60.0, warmup_s=60.0, repeats=1)


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is asked: `starts` fresh processes of each side a round, `slices` a scenario and start."""

    rounds: int = 7
    starts: int = 1
    slices: int = 4
    misses: int = 400  # requests of a slice
    hits: int = 1200
    paraphrases: int = 96


class Comparison(msgspec.Struct):
    """One scenario on both sides. CPU in milliseconds a request, user and system, of the workers: the
    gateway's, and the cache worker where there is one.
    """

    scenario: str
    connections: int
    requests: int  # of each side, all rounds together
    cpu_ms: float  # medians of the rounds
    other_cpu_ms: float
    rss_mb: float
    other_rss_mb: float
    ratio: float  # this tree by the other: the median of `ratios`
    ratio_min: float
    ratio_max: float
    ratios: list[float]  # one a round
    verdict: str


@dataclass(slots=True)
class _Side:
    """One tree. `cpu_s` and `rss_mb` have one value a round for each scenario."""

    system: Callable[[int], System]
    cpu_s: dict[str, list[float]]
    rss_mb: dict[str, list[float]]


def checkout_of(path: Path) -> tuple[Path, str]:
    """The checkout's absolute path and its interpreter.

    Raises BenchError where `path` is no checkout of Sameway that `./run setup` made ready.
    """
    checkout = path.resolve()
    python = checkout / ".venv" / "bin" / "python"
    if not (checkout / "gateway" / "__main__.py").exists():
        raise BenchError(f"--against {path}: no checkout of Sameway: it has no gateway/__main__.py")
    if not os.access(python, os.X_OK):
        raise BenchError(f"--against {path}: not set up: it has no .venv/bin/python; call ./run setup there first")
    return checkout, str(python)


def revision_of(checkout: Path) -> str:
    """The commit, marked with `+` where tracked files differ from it; empty outside of git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Puts this process, and what it starts, on one core under SCHED_BATCH.

    A process that wakes up then preempts none of the others, so that the load tool's requests reach the worker in
    the same bundles each time.
    """
    cores, policy, parameter = os.sched_getaffinity(0), os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        os.sched_setscheduler(0, policy, parameter)


def compare(
    this: Callable[[int], System],
    other: Callable[[int], System],
    scenarios: Sequence[Scenario],
    connections: int,
    effort: Effort,
    stub: Stub,
    folder: Path,
) -> list[Comparison]:
    """Runs `effort.rounds` rounds; the side that begins alternates.

    `this` and `other` make a system for the number of a start. Raises BenchError where a side does not start, an
    answer fails, or a repeated question reaches the upstream.
    """
    sides = [
        _Side(system, {s.name: [] for s in scenarios}, {s.name: [] for s in scenarios}) for system in (this, other)
    ]
    for number in range(effort.rounds):
        print(f"bench: round {number + 1} of {effort.rounds}", file=sys.stderr, flush=True)
        for side in sides:
            for scenario in scenarios:
                side.cpu_s[scenario.name].append(0.0)
                side.rss_mb[scenario.name].append(0.0)
        for start in range(effort.starts):
            order = sides[:: 1 if (number + start) % 2 == 0 else -1]
            with tempfile.TemporaryDirectory(dir=folder) as own:
                _start_both(order, number * effort.starts + start, scenarios, connections, effort, stub, Path(own))
    return [_comparison(scenario, connections, effort, *sides) for scenario in scenarios]


def _start_both(
    order: Sequence[_Side],
    start: int,
    scenarios: Sequence[Scenario],
    connections: int,
    effort: Effort,
    stub: Stub,
    folder: Path,
) -> None:
    """Starts a fresh pair for each setup that the scenarios need, and measures their slices in turn."""
    groups: dict[str, list[Scenario]] = {}
    for scenario in scenarios:
        groups.setdefault(order[0].system(start).configuration(scenario.setup), []).append(scenario)
    for name, group in groups.items():
        with contextlib.ExitStack() as stack:
            pair: list[tuple[_Side, Running, list[int], Path]] = []
            for index, side in enumerate(order):
                own = folder / f"{name}-{index}"
                own.mkdir()
                running = side.system(start).start(group[0].setup, stub, own)
                stack.callback(running.stop)
                meter = Meter(running.roots, running.role_of)
                workers = [pid for role in _WORKERS for pid in meter.pids(role)]
                if not workers:
                    raise BenchError(f"no process below {running.roots} is known as a gateway worker")
                pair.append((side, running, workers, own))
            for scenario in group:
                for number in range(-1, effort.slices):  # the first slice is a warm-up
                    for side, running, workers, own in pair[:: 1 if number % 2 == 0 else -1]:
                        salt = f"{scenario.name}-{number}"
                        is_first = number < 0
                        used_s, rss_mb = _slice(
                            running, workers, stub, scenario, connections, effort, salt, own, is_first=is_first
                        )
                        if number >= 0:
                            side.cpu_s[scenario.name][-1] += used_s
                            side.rss_mb[scenario.name][-1] = max(side.rss_mb[scenario.name][-1], rss_mb)


def _slice(
    running: Running,
    workers: Sequence[int],
    stub: Stub,
    scenario: Scenario,
    connections: int,
    effort: Effort,
    salt: str,
    folder: Path,
    *,
    is_first: bool,
) -> tuple[float, float]:
    """CPU seconds of the workers for one slice, and their peak memory so far in MB."""
    count, is_new = _count(scenario, effort), scenario.traffic is Traffic.PARAPHRASED
    bodies = write_bodies(scenario, target_of(running, scenario).model, salt, folder)
    load = load_of(running, scenario, bodies, connections, None, _PLAN)
    load = dataclasses.replace(load, count=count, warmup_count=_WARM_PARAPHRASES if is_new else _WARM_REQUESTS)
    if is_first and bodies.first not in (None, bodies.asked):  # every slice says the same first
        prime(load, bodies)
    before_s, reached = 0.0, 0

    def begin() -> None:
        nonlocal before_s, reached
        before_s, reached = _idle_cpu_s(workers), stub.stats().requests

    result = run_load(load, begin)
    used_s, reached = _idle_cpu_s(workers) - before_s, stub.stats().requests - reached
    if result.errors or result.requests != count:
        raise BenchError(f"{scenario.name}: {result.errors} of {count} requests failed: {result.first_failure}")
    if scenario.traffic is Traffic.REPEATED and reached:
        raise BenchError(f"{scenario.name}: {reached} of {count} repeated questions reached the upstream")
    return used_s, sum(map(peak_rss_mb, workers))


def _count(scenario: Scenario, effort: Effort) -> int:
    """The requests of a slice; those that are all new are dear."""
    counts = {Traffic.UNIQUE: effort.misses, Traffic.PARAPHRASED: effort.paraphrases}
    return counts.get(scenario.traffic, effort.hits)


def _idle_cpu_s(workers: Sequence[int]) -> float:
    """CPU seconds of the workers so far, read once they have nothing to do."""
    deadline = time.monotonic() + _IDLE_MAX_S
    used_s = sum(map(cpu_s, workers))
    while True:
        time.sleep(_IDLE_S)
        before_s, used_s = used_s, sum(map(cpu_s, workers))
        if used_s - before_s < _IDLE_SHARE * _IDLE_S or time.monotonic() > deadline:
            return used_s


def _comparison(scenario: Scenario, connections: int, effort: Effort, this: _Side, other: _Side) -> Comparison:
    name = scenario.name
    a_round = effort.starts * effort.slices * _count(scenario, effort)
    ratios = [own / its for own, its in zip(this.cpu_s[name], other.cpu_s[name], strict=True)]
    return Comparison(
        scenario=name,
        connections=connections,
        requests=a_round * effort.rounds,
        cpu_ms=round(1000.0 * statistics.median(this.cpu_s[name]) / a_round, 4),
        other_cpu_ms=round(1000.0 * statistics.median(other.cpu_s[name]) / a_round, 4),
        rss_mb=round(max(this.rss_mb[name]), 1),
        other_rss_mb=round(max(other.rss_mb[name]), 1),
        ratio=round(statistics.median(ratios), 4),
        ratio_min=round(min(ratios), 4),
        ratio_max=round(max(ratios), 4),
        ratios=[round(ratio, 4) for ratio in ratios],
        verdict=verdict_of(ratios),
    )


def verdict_of(ratios: Sequence[float]) -> str:
    """Where the true ratio lies, as far as the rounds can say, against 1 within `TOLERANCE`.

    The interval around the true median is the sign test's: of seven rounds from the second lowest to the second
    highest. Fewer than five rounds decide nothing.
    """
    count = len(ratios)
    if count < _ROUNDS_MIN:
        return f"UNDECIDED: {count} of at least {_ROUNDS_MIN} rounds"
    outside, cut = 2.0 / 2**count, 0  # the probability that the true median lies beyond the rounds
    while outside + 2.0 * math.comb(count, cut + 1) / 2**count <= 1.0 - _CONFIDENCE:
        cut += 1
        outside += 2.0 * math.comb(count, cut) / 2**count
    inner = sorted(ratios)[cut : count - cut]
    low, high = inner[0], inner[-1]
    if low > 1.0 + TOLERANCE or high < 1.0 - TOLERANCE:
        return f"{'more' if low > 1.0 else 'less'} by over {TOLERANCE:.0%}"
    if low >= 1.0 - TOLERANCE and high <= 1.0 + TOLERANCE:
        return f"within {TOLERANCE:.0%}"
    return f"UNDECIDED: {low:.3f}..{high:.3f} is too wide for a statement about {TOLERANCE:.0%}"


def render(comparisons: Sequence[Comparison], this: str, other: str) -> str:
    """The table; `this` and `other` name the trees."""
    lines = [
        f"CPU of the workers a request, {this} by {other}: medians of {len(comparisons[0].ratios)} rounds",
        f"{'scenario':<18} {'this ms':>8} {'other ms':>8} {'ratio':>6}  {'min..max':<14} {'RSS MB':>11}  verdict",
    ]
    for row in comparisons:
        spread, memory = f"{row.ratio_min:.3f}..{row.ratio_max:.3f}", f"{row.rss_mb:.0f} / {row.other_rss_mb:.0f}"
        figures = f"{row.cpu_ms:8.4f} {row.other_cpu_ms:8.4f} {row.ratio:6.3f}  {spread:<14} {memory:>11}"
        lines.append(f"{row.scenario:<18} {figures}  {row.verdict}")
    return "\n".join(lines)
