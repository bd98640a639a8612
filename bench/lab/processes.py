"""Child processes that never outlive the bench, and what a tree of them has cost: CPU seconds and peak memory, by role.

Knows nothing of gateways. Invariant: every process started here is ended by `stop`, and dies with the bench even when the
bench is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PROCESS_CLOCK = 2  # clock_getcpuclockid(3): another process's user and system time, in nanoseconds
_END_TIMEOUT_S = 20.0
_INTERRUPTS = {signal.SIGINT, signal.SIGTERM}


class BenchError(Exception):
    """The bench can't go on; `str()` says what is missing or went wrong, fit for a person."""


def _die_with_parent() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Child:
    """One process in a session of its own, its output in `log_path`."""

    def __init__(self, command: Sequence[str], log_path: Path, environ: Mapping[str, str], cwd: Path) -> None:
        self.command = list(command)
        self.log_path = log_path
        log_path.parent.mkdir(parents=True, exist_ok=True)
        # an exception that a signal raises while the interpreter is at its hooks of a fork is lost
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
        with self._interruptible_after(before), log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environ),
                cwd=cwd,
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @contextlib.contextmanager
    def _interruptible_after(self, mask: set[signal.Signals]) -> Iterator[None]:
        """Restore the mask of signals at the end; one that came meanwhile ends the process."""
        try:
            yield
        finally:
            try:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            except KeyboardInterrupt:
                self.stop()
                raise

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_tail(self) -> str:
        return self.log_path.read_text(errors="replace")[-3000:]

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float) -> None:
        """Returns once `is_ready()`; raises BenchError with the log's end when the process ends first or time is up."""
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                how = "ended" if self.process.poll() is not None else f"was not ready within {timeout_s:.0f} s"
                raise BenchError(f"{Path(self.command[0]).name} {how}:\n{self.log_tail()}")
            time.sleep(0.05)

    def stop(self) -> None:
        """SIGTERM and time for an orderly end, then SIGKILL for it and whatever is left below it."""
        below = descendants(self.pid)
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=_END_TIMEOUT_S)
        for pid in (self.pid, *below):
            if pid != self.pid or self.process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=_END_TIMEOUT_S)
        while any(map(is_running, below)):
            time.sleep(0.005)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def answers(url: str) -> bool:
    """Whether a GET is answered with 200 within a second."""
    try:
        with urllib.request.urlopen(url, timeout=1.0) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def descendants(root: int) -> tuple[int, ...]:
    """The live processes below `root`, without it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children.setdefault(_stat(int(entry.name))[1], []).append(int(entry.name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return tuple(found)


def machine_cpu_s() -> float:
    """CPU seconds that this machine has spent on anything, or that its host took from it, since it started."""
    user, nice, system, _, _, irq, soft_irq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + soft_irq + steal) * _TICK_S


def _stat(pid: int) -> tuple[float, int]:
    """CPU seconds of all the process's threads, ended ones included, and its parent."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return cpu_s(pid), int(fields[1])


def cpu_s(pid: int) -> float:
    """User and system time of all the process's threads, ended ones included. Raises OSError where there is none."""
    return time.clock_gettime(~pid << 3 | _PROCESS_CLOCK)


def peak_rss_mb(pid: int) -> float:
    """The high-water mark of its resident memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What a system's processes used: by role, since `Meter.reset`."""

    cpu_s: Mapping[str, float]
    peak_rss_mb: Mapping[str, float]


class Meter:
    """Reads the cost of the trees below some root processes. `role_of(command_line)` names each process."""

    def __init__(self, roots: Sequence[int], role_of: Callable[[str], str]) -> None:
        self._roots = tuple(roots)
        self._role_of = role_of
        self._start: dict[int, float] = {}

    def _pids(self) -> list[int]:
        return [pid for root in self._roots for pid in (root, *descendants(root))]

    def reset(self) -> None:
        """From now on: remembers the CPU used so far and sets each process's memory peak back to what it holds."""
        self._start = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):
                self._start[pid] = _stat(pid)[0]
                Path(f"/proc/{pid}/clear_refs").write_text("5")

    def wait_idle(self, least_s: float, most_s: float) -> None:
        """Returns after `least_s` once the trees use less than a tenth of a core, or after `most_s`."""
        deadline = time.monotonic() + most_s
        used_s = self._used_s()
        while True:
            time.sleep(least_s)
            before_s, used_s = used_s, self._used_s()
            if used_s - before_s < 0.1 * least_s or time.monotonic() > deadline:
                return

    def _used_s(self) -> float:
        total = 0.0
        for pid in self._pids():
            with contextlib.suppress(OSError):
                total += _stat(pid)[0]
        return total

    def read(self) -> Cost:
        cpu_s: dict[str, float] = {}
        rss_mb: dict[str, float] = {}
        for pid in self._pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                role = self._role_of(command)
                cpu_s[role] = cpu_s.get(role, 0.0) + _stat(pid)[0] - self._start.get(pid, 0.0)
                rss_mb[role] = rss_mb.get(role, 0.0) + peak_rss_mb(pid)
        return Cost(cpu_s, rss_mb)

    def pids(self, role: str) -> list[int]:
        """The processes that play `role`, for a profiler."""
        found = []
        for pid in self._pids():
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if self._role_of(command) == role:
                    found.append(pid)
        return found
