"""A program in a separate process, with bounds on time, memory and stack.

Both ends of a pair of pipes: `Apart` starts this file as a process, which opens the program of that
name in this folder and then answers each value. The kernel ends the process after seconds of CPU
time. Knows no templates and no grammars. Invariants: this file and the programs import nothing of
the package; whatever a program does, `ask` returns or raises.
"""

from __future__ import annotations

import contextlib
import json
import resource
import runpy
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

AT_ONCE = 2  # processes for work that takes long
_CPU_S = 2.0
_WALL_S = 60.0  # of a machine that has no time for it
_ENDS_S = 1.0
_MEMORY_BYTES = 1 << 30
_STACK_BYTES = 1 << 21  # below that of a thread: what fits here, fits there
_LENGTH_BYTES = 8


class ProgramRefusal(Exception):
    """The program did not answer; the message says why."""


class Apart:
    """A program opened on `source`, and its process, which the first use starts. Thread-safe."""

    def __init__(self, program: str, source: Any = None) -> None:
        self._program = program
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._finalizer: Any = None

    def start(self) -> None:
        """Start the process, which takes a tenth of a second; otherwise the first `ask` waits for
        it."""
        with self._lock, contextlib.suppress(OSError):
            self._started()

    def ask(self, values: Mapping[str, Any]) -> str:
        """Send JSON values to the program; returns its text. Raises ProgramRefusal."""
        with self._lock:
            try:
                process = self._started()
                assert process.stdin is not None
                assert process.stdout is not None
                _write(process.stdin, values)
                waiting = select.poll()
                waiting.register(process.stdout, select.POLLIN)
                reply = _read(process.stdout) if waiting.poll(1_000 * _WALL_S) else None
            except OSError as error:
                raise ProgramRefusal(f"its process cannot be used: {error}") from None
            if reply is None:
                self._finalizer()  # the next `ask` starts another process
                raise ProgramRefusal(_why_ended(process.returncode))
        if "refusal" in reply:
            raise ProgramRefusal(reply["refusal"])
        return str(reply["text"])

    def _started(self) -> subprocess.Popen[bytes]:
        """The running process, restarted if it has ended. Raises OSError."""
        if self._process is None or self._process.poll() is not None:
            if self._finalizer is not None:
                self._finalizer()
            # decision: programs-apart
            # -P: its own folder is no place to import from
            argv = [sys.executable, "-P", __file__, str(Path(__file__).with_name(f"{self._program}.py"))]
            self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._finalizer = weakref.finalize(self, _end, self._process)
            assert self._process.stdin is not None
            _write(self._process.stdin, self._source)
        return self._process


def _why_ended(status: int) -> str:
    """The reason why the process ended without a reply."""
    if status in (-signal.SIGPROF, -signal.SIGKILL):
        return f"it takes more than {_CPU_S:g} s"
    if status in (-signal.SIGSEGV, -signal.SIGABRT):
        return "it is nested too deeply, or takes too much memory"
    return f"its process ended with status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()
    # one that ended by itself keeps its status
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_S)
    process.kill()
    process.wait()


def _write(pipe: IO[bytes], value: Any) -> None:
    data = json.dumps(value, default=str).encode()
    pipe.write(len(data).to_bytes(_LENGTH_BYTES, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """The next value; None at the end."""
    length = pipe.read(_LENGTH_BYTES)
    data = pipe.read(int.from_bytes(length, "big")) if len(length) == _LENGTH_BYTES else b""
    return json.loads(data) if data else None


# -- the process ------------------------------------------------------------------------------------------------------


def _serve(program: str) -> None:
    """Answer each value from the pipe until its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the engine
    for kind, most in (
        (resource.RLIMIT_AS, _MEMORY_BYTES),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most, most))
    source = _read(sys.stdin.buffer)
    open_program: Callable[[Any], Callable[[dict[str, Any]], str]] = runpy.run_path(program)["opened"]
    answer: Callable[[dict[str, Any]], str] | None = None
    while (values := _read(sys.stdin.buffer)) is not None:
        # the default action of its signal ends the process, whatever it is in
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        try:
            answer = answer or open_program(source)
            reply = {"text": answer(values)}
        except MemoryError:
            reply = {"refusal": "it takes too much memory"}
        except Exception as error:  # a template can raise anything
            reply = {"refusal": str(error)[:1_000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, reply)


if __name__ == "__main__":
    _serve(sys.argv[1])
