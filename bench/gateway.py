"""`./run bench gateway`: what Sameway adds to every request, beside the bare upstream and beside other gateways.

    ./run bench gateway [--quick] [--peers litellm,tensorzero,portkey,nginx] [--scenario NAME,...] [--json FILE]
    ./run bench gateway --profile SCENARIO
    ./run bench gateway --bytecodes [--scenario NAME,...] [--json FILE]
    ./run bench gateway --soak REQUESTS
    ./run bench gateway --against CHECKOUT [--quick] [--repeats ROUNDS] [--starts PAIRS] [--scenario NAME,...] [--json FILE]

Starts a compiled instant upstream, then one system after the other, asks each with a compiled load tool, and reads what its
processes used. --against compares this tree with another checkout. docs/benchmarks.md tells the method. Everything stays on
loopback and is stopped at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.lab import against, bytecodes
from bench.lab.measure import Plan, Row, measure
from bench.lab.native import BENCH, WORK, Stub, build
from bench.lab.processes import BenchError
from bench.lab.profile import Profiler
from bench.lab.report import render, write_json
from bench.lab.scenarios import SCENARIOS, Scenario, Traffic
from bench.lab.systems import Running, System
from bench.peers import PEERS
from bench.peers.direct import Direct
from bench.peers.sameway import Sameway

_OPEN_LOOP_SHARE = 0.5
_OPEN_LOOP_CONNECTIONS = 256
_SOAKED = ("miss", "hit-memory", "miss-stream", "hit-memory-stream")
_COUNTED = ("miss", "hit-memory", "hit-redis", "miss-stream")


@dataclass(slots=True)
class Bench:
    """One call: what is asked of whom, and what has come of it."""

    scenarios: Sequence[Scenario]
    connections: Sequence[int]
    plan: Plan
    folder: Path
    stub: Stub
    rows: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    def run(self, system: System) -> None:
        """Every scenario of `system`; what it can't do is noted, and what goes wrong does not stop the others."""
        wanted = [s for s in self.scenarios if s.is_direct or system.name != "direct"]
        try:
            system.install()
        except BenchError as error:
            self.absent.append(f"{system.name}: {error}")
            return
        groups: dict[str, list[Scenario]] = {}
        lacking: dict[str, list[str]] = {}
        for scenario in wanted:
            reason = system.lacks(scenario.setup)
            if reason is None:
                groups.setdefault(system.configuration(scenario.setup), []).append(scenario)
            else:
                lacking.setdefault(reason, []).append(scenario.name)
        self.absent += [f"{system.name} ({', '.join(names)}): {reason}" for reason, names in lacking.items()]
        for group in groups.values():
            with tempfile.TemporaryDirectory(prefix=f"{system.name}-", dir=self.folder) as own:
                try:
                    running = system.start(group[0].setup, self.stub, Path(own))
                except BenchError as error:
                    self.absent.append(f"{system.name} ({', '.join(s.name for s in group)}): {error}")
                    continue
                try:
                    for scenario in group:
                        self._ask(system.name, running, scenario, Path(own))
                finally:
                    running.stop()

    def _ask(self, name: str, running: Running, scenario: Scenario, folder: Path) -> None:
        rate = None
        connections: Sequence[int] = [n for n in scenario.connections if n in self.connections]
        if scenario.rate_of is not None:
            reached = [
                r for r in self.rows if r.system == name and r.scenario == scenario.rate_of and r.connections == 32
            ]
            if not reached:
                return
            rate = float(max(1, round(_OPEN_LOOP_SHARE * reached[0].requests_per_s)))
            connections = [_OPEN_LOOP_CONNECTIONS]
        for count in connections:
            print(f"bench: {name}: {scenario.name}, {count} connections", file=sys.stderr, flush=True)
            try:
                row = measure(name, running, self.stub, scenario, count, rate, self.plan, folder)
            except BenchError as error:
                self.absent.append(f"{name}, {scenario.name}, {count} connections: {error}")
                continue
            self._compare_with_direct(row)
            self.rows.append(row)

    def _compare_with_direct(self, row: Row) -> None:
        for direct in self.rows:
            if direct.system == "direct" and (direct.scenario, direct.connections) == (row.scenario, row.connections):
                row.overhead_p50_ms = _less(row.p50_ms, direct.p50_ms)
                row.overhead_p99_ms = _less(row.p99_ms, direct.p99_ms)
                row.overhead_ttft_p50_ms = _less(row.ttft_p50_ms, direct.ttft_p50_ms)


def _less(value: float | None, floor: float | None) -> float | None:
    return None if value is None or floor is None else round(value - floor, 4)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the bench; 0 when every system that was asked for was measured, 1 when Sameway could not be, 2 for a wrong flag."""
    arguments = _parser().parse_args(argv)
    if sys.platform != "linux":
        print("bench: needs Linux: it reads /proc", file=sys.stderr)
        return 1
    for number in (signal.SIGTERM, signal.SIGINT):  # so that what was started is stopped; a shell's `&` ignores SIGINT
        signal.signal(number, _interrupt)
    try:
        if arguments.soak:
            return _soak(arguments.soak, arguments.duration or 10.0)
        if arguments.against is not None:
            return _against(arguments)
        if arguments.bytecodes:
            return _bytecodes(arguments)
        return _profile(arguments) if arguments.profile else _compare(arguments)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    names = [scenario.name for scenario in SCENARIOS]
    parser = argparse.ArgumentParser(
        prog="./run bench gateway", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="the main scenarios once, briefly: one to two minutes")
    parser.add_argument(
        "--peers", type=_names(PEERS), default=[], help=f"also measure, comma-separated: {', '.join(PEERS)}"
    )
    parser.add_argument(
        "--scenario", type=_names(names), default=None, help=f"only these, comma-separated: {', '.join(names)}"
    )
    parser.add_argument(
        "--connections", type=_numbers, default=None, help="only these numbers of connections, comma-separated"
    )
    parser.add_argument("--duration", type=float, default=None, help="seconds of each measurement (3, quick 1.5)")
    parser.add_argument(
        "--repeats", type=int, default=None, help="measurements of which the median counts (3, quick 1)"
    )
    parser.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="also write the rows, one JSON object a line"
    )
    parser.add_argument(
        "--profile", choices=names, default=None, help="sample Sameway's worker in this scenario instead"
    )
    parser.add_argument(
        "--bytecodes",
        action="store_true",
        help="count the instructions of the product's own code that one warm request executes instead",
    )
    parser.add_argument(
        "--soak",
        type=int,
        default=None,
        metavar="REQUESTS",
        help="so many requests, hits and misses: does memory grow?",
    )
    parser.add_argument(
        "--against",
        type=Path,
        default=None,
        metavar="CHECKOUT",
        help="this tree and another in turn, seven rounds (quick: three): the ratio of CPU a request and its spread;\n"
        "CHECKOUT: a folder in which ./run setup was called; `.` shows the noise of the machine",
    )
    parser.add_argument(
        "--starts",
        type=int,
        default=1,
        help="--against: fresh pairs of processes a round (1); more average more layouts",
    )
    parser.add_argument("--without-sameway", action="store_true", help="measure only the upstream and the peers")
    return parser


def _names(known: Iterable[str]) -> Callable[[str], list[str]]:
    choices = list(known)

    def names(text: str) -> list[str]:
        chosen = [name.strip() for name in text.split(",") if name.strip()]
        unknown = [name for name in chosen if name not in choices]
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(choices)}")
        return chosen

    return names


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _plan(arguments: argparse.Namespace) -> Plan:
    duration_s = arguments.duration or (1.5 if arguments.quick else 3.0)
    return Plan(
        duration_s, warmup_s=min(0.5, duration_s / 3), repeats=arguments.repeats or (1 if arguments.quick else 3)
    )


def _chosen(arguments: argparse.Namespace) -> list[Scenario]:
    if arguments.scenario is not None:
        wanted = set(arguments.scenario)
        wanted |= {s.rate_of for s in SCENARIOS if s.name in wanted and s.rate_of is not None}
        return [s for s in SCENARIOS if s.name in wanted]
    return [s for s in SCENARIOS if s.is_quick or not arguments.quick]


def _compare(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    connections = arguments.connections or ([1, 32] if arguments.quick else [1, 32, 256])
    systems: list[System] = [Direct()]
    systems += [] if arguments.without_sameway else [Sameway()]
    systems += [PEERS[name] for name in arguments.peers]
    with _workspace() as (folder, stub):
        bench = Bench(_chosen(arguments), connections, _plan(arguments), folder, stub)
        try:
            for system in systems:
                bench.run(system)
        finally:  # what was measured before an interruption is still worth reading
            bench.absent += [f"{name}: not asked for (--peers {name})" for name in PEERS if name not in arguments.peers]
            print(render(bench.rows, bench.absent))
            print(f"\n{time.monotonic() - started:.0f} s in all", flush=True)
            if arguments.json is not None:
                write_json(bench.rows, arguments.json)
    is_measured = any(row.system == "sameway" for row in bench.rows)
    return 0 if is_measured or arguments.without_sameway else 1


def _profile(arguments: argparse.Namespace) -> int:
    """One scenario at 32 connections, sampled, then the same without the sampler for the cost per request."""
    scenario = next(s for s in SCENARIOS if s.name == arguments.profile)
    profiler = Profiler(WORK / "profile" / scenario.name)
    duration_s = arguments.duration or 8.0
    count = (arguments.connections or [32])[0]
    plain = Plan(duration_s / 2, 1.0, 1)
    with _workspace() as (folder, stub):
        running = Sameway().start(scenario.setup, stub, folder)
        try:
            row = measure("sameway", running, stub, scenario, count, None, plain, folder)
            sampled = Plan(duration_s, 1.0, 1, profile=profiler.start)
            measure("sameway", running, stub, scenario, count + 1, None, sampled, folder)
            print(render([row], []))
            print(profiler.report(row.cpu_ms_by_role.get("gateway", 0.0)))
        finally:
            running.stop()
    return 0


def _bytecodes(arguments: argparse.Namespace) -> int:
    """One request at a time; a gateway for each setup."""
    names = arguments.scenario or _COUNTED
    counts: list[bytecodes.Bytecodes] = []
    with _workspace() as (folder, stub):
        for number, scenario in enumerate(s for s in SCENARIOS if s.name in names):
            counted = folder / str(number)
            counted.mkdir()
            running = Sameway(environ=bytecodes.environ_of(counted)).start(scenario.setup, stub, counted)
            try:
                counts.append(bytecodes.count(running, scenario, counted))
            finally:
                running.stop()
    print(bytecodes.render(counts))
    if arguments.json is not None:
        arguments.json.write_text("".join(f"{json.dumps(asdict(one))}\n" for one in counts))
    return 0


def _soak(requests: int, duration_s: float) -> int:
    """Hits and misses in turn on one running gateway, whole and streamed; after each round the peak memory of each role."""
    asked = [s for s in SCENARIOS if s.name in _SOAKED]
    done = number = 0
    with _workspace() as (folder, stub):
        running = Sameway().start(asked[0].setup, stub, folder)
        try:
            while done < requests:
                scenario = asked[number % len(asked)]
                plan = Plan(
                    duration_s, 0.0, 1, salt=f"-{number}"
                )  # what was a miss in an earlier round is a miss again
                row = measure("sameway", running, stub, scenario, 32, None, plan, folder)
                done, number = done + row.requests, number + 1
                memory = ", ".join(f"{role} {mb:.0f}" for role, mb in row.rss_mb_by_role.items())
                print(f"{done:>9,} requests  {scenario.name:18} {row.errors} errors  RSS MB: {memory}", flush=True)
        finally:
            running.stop()
    return 0


def _against(arguments: argparse.Namespace) -> int:
    """This tree and the other checkout, in turn, on one core."""
    started = time.monotonic()
    checkout, python = against.checkout_of(arguments.against)
    wanted = set(arguments.scenario or _SOAKED)
    scenarios = [s for s in SCENARIOS if s.name in wanted]
    unfit = [s.name for s in scenarios if s.rate_of or s.pace_ms or s.traffic is Traffic.ZIPF]
    if unfit:
        raise BenchError(f"--against: {', '.join(unfit)}: neither closed-loop misses nor closed-loop hits")
    effort = against.Effort(rounds=arguments.repeats or (3 if arguments.quick else 7), starts=arguments.starts)

    def this(start: int) -> System:
        return Sameway(environ={"PYTHONHASHSEED": str(start + 1)})

    def other(start: int) -> System:
        return Sameway(checkout=checkout, python=python, environ={"PYTHONHASHSEED": str(start + 1)})

    with against.one_core(), _workspace() as (folder, stub):
        connections = (arguments.connections or [32])[0]
        rows = against.compare(this, other, scenarios, connections, effort, stub, folder)
    names = [f"{path} ({against.revision_of(path)})" for path in (BENCH.parent, checkout)]
    print(against.render(rows, *names))
    print(f"\n{time.monotonic() - started:.0f} s in all", flush=True)
    if arguments.json is not None:
        write_json(rows, arguments.json)
    return 0


@contextlib.contextmanager
def _workspace() -> Iterator[tuple[Path, Stub]]:
    """A temporary folder and a running upstream; both are gone afterwards."""
    build("load")
    with tempfile.TemporaryDirectory(prefix="sameway-bench-") as folder:
        stub = Stub(Path(folder))
        try:
            yield Path(folder), stub
        finally:
            stub.stop()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
