"""A chat template in a process of its own, with bounds on time, memory and output.

Both ends of a pair of pipes: `Template` starts this file as a process, which reads the template and
then renders values as they come. A checkpoint's template is a program that came with the weights.
Jinja's sandbox keeps it from files and attributes; the kernel ends the process after seconds of
CPU time. Knows no messages and no tokens. Invariants: this file imports nothing of the package;
whatever a template does, `render` returns or raises.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import IO, Any, NoReturn

_CPU_S = 2.0
_WALL_S = 60.0  # of a machine that has no time for it
_ENDS_S = 1.0
_MEMORY_BYTES = 1 << 30
_CHARS_MAX = 1 << 24  # as many as the largest request has bytes
_LENGTH_BYTES = 8


class TemplateRefusal(Exception):
    """The template did not render the values; the message says why."""


class Template:
    """A template, and from the first use on its process. Safe to use from several threads."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._finalizer: Any = None

    def start(self) -> None:
        """Start the process, which takes a tenth of a second: else the first `render` waits for
        it."""
        with self._lock, contextlib.suppress(OSError):
            self._started()

    def render(self, values: Mapping[str, Any]) -> str:
        """The text that the template makes of JSON values. Raises TemplateRefusal."""
        with self._lock:
            try:
                process = self._started()
                reply = process.ask(values)
            except OSError as error:
                raise TemplateRefusal(f"its process cannot be used: {error}") from None
            if reply is None:
                self._finalizer()  # the next `render` starts another process
                raise TemplateRefusal(process.why_ended())
        if "refusal" in reply:
            raise TemplateRefusal(reply["refusal"])
        return reply["text"]

    def _started(self) -> _Process:
        """The process: another one where it has ended. Raises OSError."""
        if self._process is None or self._process.is_over:
            if self._finalizer is not None:
                self._finalizer()
            self._process = _Process(self._source)
            self._finalizer = weakref.finalize(self, self._process.end)
        return self._process


class _Process:
    """The process, and the pipes to it."""

    def __init__(self, source: str) -> None:
        # decision: templates-apart
        # -P: its own folder is no place to import from
        argv = [sys.executable, "-P", __file__]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        _write(self._in, source)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    def ask(self, values: Mapping[str, Any]) -> dict[str, str] | None:
        """The reply; None where the process ended, or took too long. Raises OSError."""
        _write(self._in, values)
        waiting = select.poll()
        waiting.register(self._out, select.POLLIN)
        reply: dict[str, str] | None = _read(self._out) if waiting.poll(1_000 * _WALL_S) else None
        return reply

    def why_ended(self) -> str:
        """Why it gave no reply. It has ended."""
        status = self._process.returncode
        if status in (-signal.SIGPROF, -signal.SIGKILL):
            return f"it takes more than {_CPU_S:g} s"
        return f"its process ended with status {status}"

    def end(self) -> None:
        for pipe in (self._in, self._out):
            with contextlib.suppress(OSError):
                pipe.close()
        # one that ended by itself keeps its status
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_S)
        self._process.kill()
        self._process.wait()


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


def _serve() -> None:
    """Render what comes, until nothing does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the engine
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    source = _read(sys.stdin.buffer)
    render: Callable[[dict[str, Any]], str] | None = None
    while (values := _read(sys.stdin.buffer)) is not None:
        # the default action of its signal ends the process, whatever it is in
        signal.setitimer(signal.ITIMER_PROF, _CPU_S)
        try:
            render = render or _compiled(source)
            reply = {"text": render(values)}
        except MemoryError:
            reply = {"refusal": "it takes too much memory"}
        except Exception as error:  # a template can raise anything
            reply = {"refusal": str(error)[:1_000] or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(sys.stdout.buffer, reply)


def _compiled(source: str) -> Callable[[dict[str, Any]], str]:
    """The template in the dialect that `transformers` defines: sandboxed, trimmed blocks, a few
    functions more."""
    import jinja2
    import jinja2.ext
    import jinja2.nodes
    import jinja2.parser
    import jinja2.sandbox

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    class Generation(jinja2.ext.Extension):
        """{% generation %} marks a training target: here its content is rendered as it is."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    template = environment.from_string(source)

    def render(values: dict[str, Any]) -> str:
        parts, size = [], 0
        for part in template.generate(**values):
            size += len(part)
            if size > _CHARS_MAX:
                refuse(f"it writes more than {_CHARS_MAX:,} characters")
            parts.append(part)
        return "".join(parts)

    return render


if __name__ == "__main__":
    _serve()
