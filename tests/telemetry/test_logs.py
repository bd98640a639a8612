"""What the log says, to machines and to people, and what it never says."""

import errno
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.deployments.progress import Attempt
from gateway.journey.outcomes import Rejection
from gateway.loggers import get_logger
from gateway.settings import Settings
from gateway.telemetry import logs
from tests.telemetry.records import hit, miss


class Terminal(io.BytesIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Each test leaves neither a writer nor a root handler behind."""
    handlers = logging.getLogger().handlers[:]
    yield
    logs.close()
    logging.getLogger().handlers[:] = handlers


def written(stream: io.BytesIO) -> str:
    logs.close()
    return stream.getvalue().decode()


def lines(stream: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in written(stream).splitlines()]


def test_a_request_is_one_flat_json_line() -> None:
    """The line has event, time, what answered and every field that is set; lists are of strings."""
    stream = io.BytesIO()
    log = logs.configure(Settings(log_format="json"), stream)
    attempts = (Attempt("gpt", "timed out", 5_000.4), Attempt("local", "ok", 80.0))
    log.emit(
        miss(
            rejected=(Rejection("tiny", "no tools"),),
            attempts=attempts,
            why="cheapest of 2",
            user="ann",
            tags='{"app":"web"}',
        )
    )
    (line,) = lines(stream)
    assert line["event"] == "request"
    assert line["level"] == "info"
    assert line["timestamp"] == "2025-11-21T12:00:00.000Z"
    assert (line["status"], line["cache"], line["route"], line["team"]) == (200, "miss", "chat", "search")
    assert line["cost_microusd"] == 120
    assert line["rejected"] == ["tiny: no tools"]
    assert line["attempts"] == ["gpt: timed out (5000 ms)", "local: ok (80 ms)"]
    assert (line["why"], line["user"], line["tags"]) == ("cheapest of 2", "ann", '{"app":"web"}')
    assert not any(isinstance(value, dict) for value in line.values())


def test_a_server_error_is_an_error_line() -> None:
    """A 5xx is logged at level error, so that a filter by level finds it; one that the client asked for is not."""
    stream = io.BytesIO()
    log = logs.configure(Settings(log_format="json"), stream)
    log.emit(miss(status=503, error="upstream_unavailable"))
    log.emit(miss(status=504, error="not_cached"))
    failed, asked_for = lines(stream)
    assert (failed["level"], failed["error"]) == ("error", "upstream_unavailable")
    assert (asked_for["level"], asked_for["error"]) == ("info", "not_cached")


@pytest.mark.parametrize("log_format", ["json", "pretty"])
def test_prompts_are_written_only_where_the_settings_say_so(log_format: Any) -> None:
    """Off by default: neither prompt, answer nor a neighbour's text; on: all three."""
    for log_prompts in (False, True):
        stream = io.BytesIO()
        log = logs.configure(Settings(log_format=log_format, log_prompts=log_prompts), stream)
        log.emit(
            miss(nearest="secret neighbour", question="secret question"),
            prompt="secret question",
            answer="secret answer",
        )
        assert written(stream).count("secret") == (3 if log_prompts else 0)


def test_auto_is_pretty_on_a_terminal_and_json_elsewhere() -> None:
    """`auto` looks at the stream it writes to."""
    terminal, pipe = Terminal(), io.BytesIO()
    log = logs.configure(Settings(), terminal)
    log.emit(hit())
    assert "saved $0.000120" in written(terminal)
    log = logs.configure(Settings(), pipe)
    log.emit(hit())
    assert lines(pipe)[0]["cache"] == "exact"


def test_a_client_cannot_move_the_terminals_cursor() -> None:
    """Control characters of a client's text are spelled out in the pretty log, and no text breaks the line."""
    stream = Terminal()
    log = logs.configure(Settings(log_format="pretty", log_prompts=True), stream)
    log.emit(miss(error="a\x1b[2Jb\nc"), prompt="\x1b]0;title\x07")
    get_logger("test").info("said", text="x\x1b[2Jy\nz")
    text = written(stream)
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text
    assert len(text.splitlines()) == 2


def test_other_lines_and_other_libraries_land_in_the_same_log() -> None:
    """get_logger and the standard library's logging share the stream, with level, source and exception."""
    stream = io.BytesIO()
    logs.configure(Settings(log_format="json"), stream)
    get_logger("engine").info("model_loaded", seconds=3.5)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it %s", "broke")
    first, second = lines(stream)
    assert (first["event"], first["source"], first["seconds"], first["level"]) == (
        "model_loaded",
        "engine",
        3.5,
        "info",
    )
    assert (second["event"], second["source"], second["level"]) == ("it broke", "uvicorn.error", "error")
    assert "ValueError: boom" in second["exception"]


def test_a_reader_that_stays_away_costs_lines_not_requests() -> None:
    """While nobody reads, emit returns at once; what was too much is counted, and the count is logged when the reader is back."""
    read_end, write_end = os.pipe()
    dropped: list[int] = []
    stream = os.fdopen(write_end, "wb", buffering=0)
    log = logs.configure(Settings(log_format="json"), stream, dropped.append)  # type: ignore[arg-type]
    for _ in range(45_000):
        log.emit(hit())
    received = io.BytesIO()

    def read() -> None:
        while data := os.read(read_end, 1 << 20):
            received.write(data)

    reader = threading.Thread(target=read)
    reader.start()
    logs.close()
    stream.close()
    reader.join()
    os.close(read_end)
    whole = [json.loads(line) for line in received.getvalue().splitlines()]
    requests = sum(line["event"] == "request" for line in whole)
    assert sum(dropped) > 0
    assert requests + sum(dropped) == 45_000
    assert sum(line.get("count", 0) for line in whole) == sum(dropped)


def test_a_full_disk_delays_lines_and_ends_no_log() -> None:
    """What a disk had no room for is written when it has room again, from the byte where it stopped."""
    stream = FullDisk(room=100)
    log = logs.configure(Settings(log_format="json"), stream)
    for _ in range(3):
        log.emit(hit())
        log.writer.flush()
    assert len(stream.getvalue()) == 100
    stream.room = 1 << 20
    get_logger().info("later")
    logs.close()
    assert [line["event"] for line in lines(stream)] == ["request"] * 3 + ["later"]


class FullDisk(io.BytesIO):
    """A file that takes `room` bytes more, as write(2) does on a disk that fills up."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, data: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = super().write(data[: self.room])
        self.room -= written
        return written


def test_a_closed_pipe_ends_the_log_and_nothing_else() -> None:
    """When the log's reader has gone for good, requests go on."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    log = logs.configure(Settings(log_format="json"), os.fdopen(write_end, "wb"))
    log.emit(hit())
    logs.close()
    log.emit(hit())
    print("still here", file=sys.stderr)
