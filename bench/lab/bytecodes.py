"""How many bytecode instructions of the product's own code one warm request executes in a worker, by file and function.

`traced/sitecustomize.py` counts inside the worker. The requests are asked one after the other, and counted from the end
of one answer to the next. A function's count is the median of these: what loops do once a second is not part of it.
Invariant: equal code has equal counts, on each machine with the same version of Python.
"""

from __future__ import annotations

import collections
import http.client
import json
import os
import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.lab.measure import target_of
from bench.lab.native import BENCH, UNIQUE
from bench.lab.processes import BenchError, Meter
from bench.lab.scenarios import Scenario, write_bodies
from bench.lab.systems import Running

ENVIRON = "BENCH_BYTECODES"
_WARMUPS, _REQUESTS = 120, 31  # the first hundred calls update a deployment's figures one by one
_SHOWN = 30  # functions


@dataclass(frozen=True, slots=True)
class Bytecodes:
    """The instructions of one request of a scenario, by `file:function`."""

    scenario: str
    by_function: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_function.values())


def environ_of(folder: Path) -> dict[str, str]:
    """The environment of a gateway whose workers count, and write into `folder`."""
    return {ENVIRON: str(folder), "PYTHONPATH": str(BENCH / "lab" / "traced"), "PYTHONHASHSEED": "1"}


def count(
    running: Running, scenario: Scenario, folder: Path, warmups: int = _WARMUPS, requests: int = _REQUESTS
) -> Bytecodes:
    """Asks `scenario` of a gateway that was started with the environment of `folder`. Raises BenchError."""
    worker = Meter(running.roots, running.role_of).pids("gateway")[0]
    target = target_of(running, scenario)
    bodies = write_bodies(scenario, target.model, "bytecodes", folder)
    lines = bodies.asked.read_text().splitlines()
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30.0)
    counts: list[dict[str, int]] = []
    _cut(worker, folder)
    for number in range(bodies.first_count + warmups + requests):
        body = lines[number % len(lines)].replace(UNIQUE, f"{number:016}")
        connection.request("POST", target.path, body, {"content-type": "application/json", **target.headers})
        with connection.getresponse() as response:
            answer = response.read()
        if response.status != 200:
            raise BenchError(f"{scenario.name}: {response.status}: {answer[:300]!r}")
        counts.append(_cut(worker, folder))
    connection.close()
    measured = counts[-requests:]
    medians = {
        name: int(statistics.median_low(one.get(name, 0) for one in measured))
        for name in sorted({name for one in measured for name in one})
    }
    return Bytecodes(scenario.name, {name: number for name, number in medians.items() if number})


def _cut(worker: int, folder: Path) -> dict[str, int]:
    """What the worker executed since the last cut."""
    path = folder / f"{len(list(folder.glob('[0-9]*.json')))}.json"
    os.kill(worker, signal.SIGUSR1)
    deadline = time.monotonic() + 5.0
    while not path.exists():
        if time.monotonic() > deadline:
            raise BenchError("the worker counts no bytecodes")
        time.sleep(0.001)
    counts: dict[str, int] = json.loads(path.read_text())
    return counts


def render(counts: Sequence[Bytecodes]) -> str:
    """A table of files, and one of the functions that execute most; a column for each scenario."""
    names = [one.scenario for one in counts]
    by_file: list[Mapping[str, int]] = []
    for one in counts:
        files: collections.Counter[str] = collections.Counter()
        for name, number in one.by_function.items():
            files[name.partition(":")[0]] += number
        by_file.append(files)
    functions = [one.by_function for one in counts]
    totals = [{"all": one.total} for one in counts]
    return "\n".join(
        [
            "bytecode instructions of one warm request, by the code of gateway, cache and policies",
            *_table(names, totals),
            *_table(names, by_file),
            *_table(names, functions)[: _SHOWN + 2],
        ]
    )


def _table(names: Sequence[str], columns: Sequence[Mapping[str, int]]) -> list[str]:
    rows = {name for column in columns for name in column}
    ranked = sorted(rows, key=lambda row: (-max(column.get(row, 0) for column in columns), row))
    lines = ["", "".join(f"{name:>18}" for name in names)]
    return lines + ["".join(f"{column.get(row, 0):18,}" for column in columns) + f"  {row}" for row in ranked]
