"""The log: one canonical line per request, and lines for other events. JSON, or columns for people.

The caller renders a line; a thread writes lines in batches, so a slow terminal or a full pipe never
delays a request. If the log's reader is too slow for long, or its disk is full, lines are dropped,
counted and reported.

Invariant: texts of prompts and answers are logged only if `settings.log_prompts` is set.
"""

import atexit
import errno
import logging
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, BinaryIO

import msgspec
import structlog
from structlog.typing import EventDict

from gateway.journey.record import Record, flat
from gateway.loggers import get_logger
from gateway.settings import Settings
from gateway.telemetry.buckets import NOT_OUR_FAILURES
from ipc import TRACE_ID
from policies.durations import duration_ms
from policies.prices import dollars

_LINES_MAX = 20_000
_GATHER_S = 0.02
_AGAIN_S = 1.0  # after a write that failed
_encode = msgspec.json.Encoder(enc_hook=repr).encode


class LogWriter:
    """Writes lines to `stream` from a thread. Calls `on_drop` with the number of dropped lines."""

    def __init__(self, stream: BinaryIO, on_drop: Callable[[int], object]) -> None:
        self._stream: Any = getattr(stream, "raw", stream)  # a buffer hides which bytes a full disk took
        self._on_drop = on_drop
        self._lines: list[bytes] = []
        self._unwritten = memoryview(b"")
        self._dropped = 0
        self._writing = threading.Lock()
        self._has_lines = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="sameway-log", daemon=True)
        self._thread.start()

    def msg(self, line: bytes) -> None:
        """Queue one line, without its newline; never blocks."""
        lines = self._lines
        if len(lines) >= _LINES_MAX:
            self._dropped += 1
            return
        lines.append(line)
        if len(lines) == 1:
            self._has_lines.set()

    debug = info = warning = error = critical = exception = msg

    def _run(self) -> None:
        while not self._is_closed:
            self._has_lines.wait(_AGAIN_S if self._unwritten else None)
            time.sleep(_GATHER_S)  # gathers a burst into one wake-up and one write
            self.flush()

    def flush(self) -> None:
        """Write all queued lines; returns when the operating system has them, or its disk is full."""
        with self._writing:
            self._has_lines.clear()
            try:
                self._write()
                lines, dropped, self._lines, self._dropped = self._lines, self._dropped, [], 0
                if dropped:
                    lines.append(_encode({"event": "log_lines_dropped", "level": "warning", "count": dropped}))
                    self._on_drop(dropped)
                self._unwritten = memoryview(b"".join(line + b"\n" for line in lines))
                self._write()
            except (BrokenPipeError, ValueError):  # nothing can be logged any more
                self._is_closed = True
            except OSError:  # a full disk, say; what is unwritten keeps its place
                return

    def _write(self) -> None:
        while self._unwritten:
            if (written := self._stream.write(self._unwritten)) is None:
                raise BlockingIOError(errno.EAGAIN, "a full pipe that does not block")
            self._unwritten = self._unwritten[written:]

    def close(self) -> None:
        """Write all queued lines and stop the thread, within 2 s."""
        self._is_closed = True
        self._has_lines.set()
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self.flush()


class Log:
    """The configured log: its writer, and the format of its lines."""

    def __init__(self, writer: LogWriter, *, is_json: bool, has_colours: bool, settings: Settings) -> None:
        self.writer = writer
        self._settings = settings
        self._render = _render_json if is_json else _request_renderer(has_colours)
        self.processors: list[Any] = [
            _stamp,
            _traced,
            structlog.processors.format_exc_info,
            _render_json if is_json else _pretty_renderer(has_colours),
        ]

    def emit(self, record: Record, *, prompt: str = "", answer: str = "") -> None:
        """Write the canonical line of a finished request; `prompt` and `answer` only if prompts may
        be logged.
        """
        level = "error" if record.ended.status >= 500 and record.ended.error not in NOT_OUR_FAILURES else "info"
        # not through structlog, whose chain of processors would double the cost of this line
        fields = _flatten(record, level)
        if self._settings.log_prompts:
            texts = {"prompt": prompt, "answer": answer, "nearest": record.cache.nearest}
            fields.update({name: text for name, text in texts.items() if text})
        self.writer.msg(self._render(None, level, fields))


_current: Log | None = None


def configure(
    settings: Settings, stream: BinaryIO | None = None, on_drop: Callable[[int], object] = lambda _: None
) -> Log:
    """Configure structlog and the standard library's logging to write to `stream` (default:
    stderr).

    The format `auto` is `pretty` on a terminal and `json` otherwise. For `on_drop` see `LogWriter`.
    """
    global _current
    close()
    target = stream or sys.stderr.buffer
    is_terminal = target.isatty()
    is_json = settings.log_format == "json" or (settings.log_format == "auto" and not is_terminal)
    writer = LogWriter(target, on_drop)
    log = _current = Log(writer, is_json=is_json, has_colours=is_terminal, settings=settings)
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, *log.processors],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=lambda *_: writer,
        cache_logger_on_first_use=False,
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge()]
    root.setLevel(logging.WARNING)
    atexit.register(close)
    return log


def close() -> None:
    """Write all queued lines and stop the writer."""
    global _current
    log, _current = _current, None
    if log is not None:
        log.writer.close()
        atexit.unregister(close)


def _flatten(record: Record, level: str) -> dict[str, Any]:
    """The record as flat fields, without defaults; the most searched fields come first, always."""
    answer, times = record.answer, record.times
    fields: dict[str, Any] = {
        "event": "request",
        "level": level,
        "timestamp": _iso(record.request.at_s),
        "request_id": record.request.id,
        "status": record.ended.status,
        "cache": record.cache.source,
        "route": record.request.operation,
    }
    fields.update(flat(record))
    del fields["at_s"]  # it is the timestamp
    if answer.rejected:
        fields["rejected"] = [f"{rejection.name}: {rejection.reason}" for rejection in answer.rejected]
    if record.request.guards:
        fields["guards"] = [f"{g.name}: {g.verdict} ({g.duration_ms:.0f} ms)" for g in record.request.guards]
    if answer.attempts:
        fields["attempts"] = [f"{a.name}: {a.outcome} ({a.duration_ms:.0f} ms)" for a in answer.attempts]
    if answer.fallbacks:
        fields["fallbacks"] = [f"{fallback.name}: {fallback.reason}" for fallback in answer.fallbacks]
    if answer.hedge is not None:
        fields["hedge"] = f"{answer.hedge.deployment}: {answer.hedge.outcome}, {answer.hedge.cost_microusd} µUSD"
    if answer.seams:
        fields["seams"] = [f"{seam.broken} -> {seam.deployment} after {seam.characters}" for seam in answer.seams]
    fields.pop("nearest", None)  # texts
    fields.pop("question", None)
    fields["duration_ms"] = round(times.duration_ms, 3)
    if times.ttft_ms is not None:
        fields["ttft_ms"] = round(times.ttft_ms, 3)
    if times.saved_ms:
        fields["saved_ms"] = round(times.saved_ms, 3)
    return fields


_second = (-1, "")


def _iso(at_s: float) -> str:
    """RFC 3339 in UTC with milliseconds. The part up to the second is computed once a second."""
    global _second
    whole = int(at_s)
    known, text = _second
    if whole != known:
        text = datetime.fromtimestamp(whole, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        _second = (whole, text)
    return f"{text}.{int((at_s - whole) * 1000):03d}Z"


def _stamp(_logger: Any, method: str, event: EventDict) -> EventDict:
    return {"timestamp": _iso(time.time()), "level": method, **event}


def _traced(_logger: Any, _method: str, event: EventDict) -> EventDict:
    if trace_id := TRACE_ID.get():
        event.setdefault("trace_id", trace_id)
    return event


def _render_json(_logger: Any, _method: str, event: EventDict) -> bytes:
    return _encode(event)


_COLOURS = {"exact": "32", "semantic": "36", "coalesced": "34", "error": "31", "warning": "33", "dim": "2"}


def _paint(text: str, colour: str, has_colours: bool) -> str:
    code = _COLOURS.get(colour)
    return f"\033[{code}m{text}\033[0m" if has_colours and code else text


def _pretty_renderer(has_colours: bool) -> Callable[[Any, str, EventDict], bytes]:
    def render(_logger: Any, _method: str, event: EventDict) -> bytes:
        clock = _local_clock(event.pop("timestamp"))
        level, what = event.pop("level"), str(event.pop("event"))
        source = event.pop("source", "")
        exception = event.pop("exception", "")
        pairs = " ".join(f"{key}={_printable(value)}" for key, value in event.items() if value is not None)
        head = (
            f"{_paint(clock, 'dim', has_colours)} {_paint(f'{level:7}', level, has_colours)} {what.replace('_', ' ')}"
        )
        tail = _paint(f"{pairs} [{source}]" if source else pairs, "dim", has_colours)
        return f"{head}  {tail}".rstrip().encode() + (f"\n{exception}".encode() if exception else b"")

    return render


def _request_renderer(has_colours: bool) -> Callable[[Any, str, EventDict], bytes]:
    def render(_logger: Any, _method: str, event: EventDict) -> bytes:
        cache, status = event["cache"], event["status"]
        parts = [
            _paint(_local_clock(event["timestamp"]), "dim", has_colours),
            _paint(str(status), "error" if status >= 500 else "warning" if status >= 400 else "", has_colours),
            _paint(f"{cache:9}", cache, has_colours),
            f"{duration_ms(event['duration_ms']):>10}",
            _printable(event.get("alias") or event["route"]),
        ]
        if event.get("deployment"):
            parts.append(f"→ {_printable(event['deployment'])}")
        if event.get("saved_microusd"):
            parts.append(f"saved ${dollars(event['saved_microusd'])}")
        elif event.get("cost_microusd"):
            parts.append(f"${dollars(event['cost_microusd'])}")
        parts += [f"{key}={_printable(event[key])}" for key in _PRETTY_REST if event.get(key)]
        parts.append(_paint(_printable(event["request_id"]), "dim", has_colours))
        return "  ".join(parts).encode()

    return render


_PRETTY_REST = (
    "team",
    "error",
    "asked",
    "refusal",
    "loop",
    "guards",
    "miss_reason",
    "similarity",
    "store",
    "attempts",
    "nearest",
    "prompt",
    "answer",
)


def _printable(value: Any) -> str:
    """`value` on one line, without control characters: a client's text must not move the cursor."""
    text = value if isinstance(value, str) else str(value)
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def _local_clock(timestamp: str) -> str:
    return datetime.fromisoformat(timestamp).astimezone().strftime("%H:%M:%S")


class _Bridge(logging.Handler):
    """Passes the standard library's records to this log."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = min(record.levelno // 10 * 10, logging.CRITICAL)  # that of a name that structlog knows
            get_logger(record.name).log(level, record.getMessage(), exc_info=record.exc_info or None)
        except Exception:
            self.handleError(record)
