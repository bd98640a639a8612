"""A look inside: samples the gateway workers of a running scenario with py-spy and says which functions cost what.

py-spy is installed into an environment of its own the first time. It samples from outside, so the worker runs the code that
users run; only the thread that holds the interpreter is counted, and native code counts to the Python function that called it.
"""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path

from bench.lab.native import WORK
from bench.lab.processes import BenchError, Meter
from bench.lab.systems import environment_of

_RATE_HZ = 200
_SHOWN = 40


class Profiler:
    """Pass `start` as a plan's `profile`; afterwards `report` tells, and `folder` holds the collapsed stacks."""

    def __init__(self, folder: Path) -> None:
        environment_of("py-spy", ["py-spy==0.4.2"])
        self._binary = WORK / "py-spy" / "bin" / "py-spy"
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.stacks = folder / "stacks.txt"
        self._process: subprocess.Popen[str] | None = None

    def start(self, meter: Meter, duration_s: float) -> None:
        """Samples the first gateway worker for `duration_s`."""
        pids = meter.pids("gateway")
        if not pids:
            raise BenchError("no gateway worker to profile")
        command = [
            str(self._binary),
            "record",
            "--format",
            "raw",
            "--rate",
            str(_RATE_HZ),
            "--output",
            str(self.stacks),
        ]
        command += ["--pid", str(pids[0]), "--duration", str(max(1, int(duration_s))), "--gil"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def report(self, cpu_ms_per_request: float) -> str:
        """The functions with the largest own and total share, in microseconds of CPU per request."""
        if self._process is None:
            raise BenchError("nothing was profiled")
        try:
            _, said = self._process.communicate(timeout=60.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise BenchError("py-spy did not end") from None
        if self._process.returncode != 0:
            raise BenchError(f"py-spy ended with {self._process.returncode}: {said.strip()[-400:]}")
        own: collections.Counter[str] = collections.Counter()
        total: collections.Counter[str] = collections.Counter()
        entered: collections.Counter[str] = collections.Counter()
        samples = 0
        for line in self.stacks.read_text().splitlines():
            stack, _, count = line.rpartition(" ")
            frames = [_short(frame) for frame in stack.split(";") if not frame.startswith(("process ", "thread "))]
            if not frames:
                continue
            samples += int(count)
            own[frames[-1]] += int(count)
            entered[_entry(frames)] += int(count)
            for frame in set(frames):
                total[frame] += int(count)
        if not samples:
            raise BenchError("py-spy took no samples")
        scale = 1000.0 * cpu_ms_per_request / samples
        lines = [
            f"{samples} samples; {1000 * cpu_ms_per_request:.1f} us of CPU per request in this worker; {self.stacks}"
        ]
        for title, counted in (("by what the event loop runs", entered), ("own", own), ("with what it calls", total)):
            lines.append(f"\n  us/request  {title}")
            lines += [f"  {count * scale:10.1f}  {frame}" for frame, count in counted.most_common(_SHOWN)]
        return "\n".join(lines)


def _entry(frames: list[str]) -> str:
    """The task's or callback's outermost function; the parts add up to the whole."""
    loop = next((i for i, frame in enumerate(frames) if frame.startswith("run (") and "asyncio/runners" in frame), None)
    if loop is None:
        return f"thread: {frames[-1]}"
    return frames[loop + 1] if loop + 1 < len(frames) else "the loop itself"


def _short(frame: str) -> str:
    """`function (path/file.py:line)` without the line and with the path from the package on."""
    name, _, place = frame.partition(" (")
    path = place.rpartition(":")[0] or place.rstrip(")")
    for mark in ("site-packages/", f"{Path(sys.prefix).parent}/", "lib/python3"):
        path = path.rpartition(mark)[2]
    return f"{name} ({path})"
