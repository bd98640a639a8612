"""The compiled parts: builds `load.c` and `stub.c` when needed, runs the load tool, keeps a stub upstream.

Knows nothing of gateways or scenarios. Invariant: `on_measuring` runs after the last warm-up request has ended and before
the first measured one starts, so what it reads is the cost of exactly the measured requests.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bench.lab.processes import BenchError, Child

BENCH = Path(__file__).resolve().parent.parent
WORK = BENCH.parent / ".bench"
UNIQUE = "@@@@@@@@@@@@@@@@"  # in a body: the load tool puts a value there that no other request of a run has


def build(name: str) -> Path:
    """The binary of `bench/NAME.c`, compiled if it is older than its sources. Raises BenchError without a C compiler."""
    sources = [BENCH / f"{name}.c", BENCH / "http1.h"]
    binary = WORK / "bin" / name
    if binary.exists() and binary.stat().st_mtime >= max(source.stat().st_mtime for source in sources):
        return binary
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError("no C compiler (cc, gcc or clang; or name one in CC): the load tool and the upstream are C")
    binary.parent.mkdir(parents=True, exist_ok=True)
    fresh = binary.with_name(f"{name}.{os.getpid()}")
    done = subprocess.run(
        [compiler, "-O2", "-std=gnu11", "-o", str(fresh), str(sources[0])], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise BenchError(f"{compiler} could not build {sources[0].name}:\n{done.stderr}")
    fresh.rename(binary)
    return binary


class Stub:
    """A running instant upstream on loopback."""

    def __init__(self, folder: Path, *, content_bytes: int = 400, chunks: int = 64) -> None:
        port_path = folder / "stub.log"
        command = [str(build("stub")), "--content-bytes", str(content_bytes), "--chunks", str(chunks)]
        self._child = Child(command, port_path, os.environ, folder)
        try:
            self._child.wait_until(lambda: port_path.read_text().strip().isdigit(), 5.0)
        except BaseException:
            self._child.stop()
            raise
        self.port = int(port_path.read_text())

    @property
    def pid(self) -> int:
        return self._child.pid

    def stats(self) -> StubStats:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/stats", timeout=5.0) as response:
            return msgspec.json.decode(response.read(), type=StubStats)

    def stop(self) -> None:
        self._child.stop()


class StubStats(msgspec.Struct, frozen=True):
    """What the upstream has seen since it started."""

    requests: int
    streams: int
    connections: int
    cpu_s: float


class Percentiles(msgspec.Struct, frozen=True):
    """A distribution in milliseconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    p999: float
    max: float


class LoadResult(msgspec.Struct, frozen=True):
    """What one run of the load tool saw. `errors_by_kind`: connect, status, short, cut, error_event, timeout, unsent."""

    requests: int
    elapsed_s: float
    requests_per_s: float
    client_cpu_s: float
    bytes: int
    events: int
    connects: int
    errors: int
    errors_by_kind: dict[str, int]
    first_failure: str
    tally: dict[str, int]
    latency_ms: Percentiles | None
    first_byte_ms: Percentiles | None
    first_event_ms: Percentiles | None
    gap_ms: Percentiles | None


@dataclass(frozen=True, slots=True)
class Load:
    """One run of the load tool; the fields are its options."""

    port: int
    bodies: Path
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] | None = None
    order: Path | None = None
    connections: int = 1
    rate: float | None = None
    duration_s: float = 2.0
    count: int | None = None
    warmup_s: float = 0.0
    warmup_count: int | None = None
    timeout_s: float = 30.0
    is_stream: bool = False
    events_min: int = 0
    bytes_min: int = 0
    tally: str | None = None

    def command(self) -> list[str]:
        flags: dict[str, object] = {
            "--port": self.port,
            "--bodies": self.bodies,
            "--path": self.path,
            "--order": self.order,
            "--connections": self.connections,
            "--rate": self.rate,
            "--duration": self.duration_s,
            "--count": self.count,
            "--warmup": self.warmup_s,
            "--warmup-count": self.warmup_count,
            "--timeout": self.timeout_s,
            "--events-min": self.events_min,
            "--bytes-min": self.bytes_min,
            "--tally": f"{self.tally}:" if self.tally else None,
        }
        command = [str(build("load")), "--wait"]
        for flag, value in flags.items():
            command += [flag, str(value)] if value is not None else []
        for name, text in (self.headers or {}).items():
            command += ["--header", f"{name}: {text}"]
        return [*command, "--stream"] if self.is_stream else command


def run_load(load: Load, on_measuring: Callable[[], None] = lambda: None) -> LoadResult:
    """Runs the tool to its end. Raises BenchError when it refuses its options or dies."""
    pipe = subprocess.PIPE
    with subprocess.Popen(load.command(), stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stderr is not None
            for line in process.stdout:
                if json.loads(line)["event"] == "result":
                    return msgspec.json.decode(line, type=LoadResult)
                on_measuring()
                process.stdin.write("go\n")
                process.stdin.flush()
            raise BenchError(f"the load tool ended early: {process.stderr.read().strip()}")
        finally:
            process.kill()
