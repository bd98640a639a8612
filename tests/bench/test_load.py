"""The load tool counts what happened: against the compiled upstream, and against servers that misbehave on command."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bench.lab.native import UNIQUE, Load, Stub, run_load
from bench.lab.processes import BenchError
from bench.lab.systems import free_port

SSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    upstream = Stub(tmp_path, content_bytes=300, chunks=8)
    yield upstream
    upstream.stop()


class CannedServer:
    """Accepts connections one after the other, reads whole requests and lets `answer` say what goes back; None hangs up."""

    def __init__(self, answer: Callable[[bytes], list[bytes] | None]) -> None:
        self.bodies: list[bytes] = []
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as reader:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._serve_one(connection, reader):
                    pass

    def _serve_one(self, connection: socket.socket, reader: object) -> bool:
        size = 0
        for line in iter(reader.readline, b"\r\n"):  # type: ignore[attr-defined]
            if not line:
                return False
            if line.lower().startswith(b"content-length:"):
                size = int(line.split(b":")[1])
        self.bodies.append(reader.read(size))  # type: ignore[attr-defined]
        pieces = self._answer(self.bodies[-1])
        for piece in pieces or []:
            connection.sendall(piece)
        return pieces is not None and not pieces[-1].endswith(b"CLOSE")

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@pytest.fixture
def serve() -> Iterator[Callable[[Callable[[bytes], list[bytes] | None]], CannedServer]]:
    servers: list[CannedServer] = []

    def start(answer: Callable[[bytes], list[bytes] | None]) -> CannedServer:
        servers.append(CannedServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def bodies(folder: Path, *texts: str, is_stream: bool = False) -> Path:
    path = folder / "bodies.jsonl"
    lines = [
        json.dumps({"model": "m", "messages": [{"role": "user", "content": t}], "stream": is_stream}) for t in texts
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_counts_equal_the_upstreams(stub: Stub, tmp_path: Path) -> None:
    """As many requests are reported as the upstream saw, over as many connections, with no error."""
    result = run_load(Load(stub.port, bodies(tmp_path, "a"), connections=8, count=500, duration_s=20.0, bytes_min=300))
    assert (result.requests, result.errors, result.connects) == (500, 0, 8)
    assert result.latency_ms is not None
    assert result.latency_ms.count == 500
    assert stub.stats().requests == 500


def test_streams_are_counted_by_event(stub: Stub, tmp_path: Path) -> None:
    """A stream of eight chunks and a finish chunk is nine events and eight gaps, and complete with [DONE]."""
    load = Load(stub.port, bodies(tmp_path, "a", is_stream=True), connections=4, count=40, is_stream=True, events_min=9)
    result = run_load(load)
    assert (result.requests, result.errors, result.events) == (40, 0, 360)
    assert result.gap_ms is not None
    assert result.gap_ms.count == 320
    assert stub.stats().streams == 40


def test_a_paced_stream_has_gaps_of_its_pace(stub: Stub, tmp_path: Path) -> None:
    """Chunks sent every 5 ms arrive, on the whole, no faster."""
    load = Load(
        stub.port, bodies(tmp_path, "a", is_stream=True), "/pace/5/v1/chat/completions", count=3, is_stream=True
    )
    result = run_load(load)
    assert result.gap_ms is not None
    assert result.latency_ms is not None
    assert result.latency_ms.p50 >= 8 * 5


def test_warm_up_is_not_counted(stub: Stub, tmp_path: Path) -> None:
    """The reading at the measurement's start sees every warm-up request ended and no measured one begun."""
    seen: list[int] = []
    load = Load(stub.port, bodies(tmp_path, "a"), connections=4, count=100, warmup_s=5.0, warmup_count=37)
    result = run_load(load, lambda: seen.append(stub.stats().requests))
    assert seen == [37]
    assert (result.requests, stub.stats().requests) == (100, 137)


def test_too_few_events_or_bytes_are_short(stub: Stub, tmp_path: Path) -> None:
    """An answer with less in it than was asked for is an error, not a fast success."""
    stream = Load(stub.port, bodies(tmp_path, "a", is_stream=True), count=5, is_stream=True, events_min=10)
    assert run_load(stream).errors_by_kind["short"] == 5
    unary = Load(stub.port, bodies(tmp_path, "a"), count=5, bytes_min=10_000)
    assert run_load(unary).errors_by_kind["short"] == 5


def test_statuses_and_refused_connections_are_errors(stub: Stub, tmp_path: Path) -> None:
    """A 404 counts as `status` and nobody listening as `connect`."""
    assert run_load(Load(stub.port, bodies(tmp_path, "a"), path="/nowhere", count=3)).errors_by_kind["status"] == 3
    assert run_load(Load(free_port(), bodies(tmp_path, "a"), count=3)).errors_by_kind["connect"] == 3


def test_broken_answers_are_told_apart(serve: Callable[..., CannedServer], tmp_path: Path) -> None:
    """A body cut by a close, a stream without [DONE], an error inside a stream and silence each have their own count."""
    event, end = chunk(b"data: {}\n\n"), chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
    cases: dict[str, list[bytes]] = {
        "cut": [b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\nonly this CLOSE"],
        "short": [SSE, event, b"0\r\n\r\n"],
        "error_event": [SSE, event, chunk(b'data: {"error": {"message": "gone"}}\n\n'), end],
        "timeout": [SSE, event],
    }
    for kind, pieces in cases.items():
        server = serve(lambda _, pieces=pieces: pieces)
        load = Load(server.port, bodies(tmp_path, "a"), count=1, is_stream=kind != "cut", timeout_s=0.3)
        result = run_load(load)
        assert result.requests == 0, kind
        assert {k: n for k, n in result.errors_by_kind.items() if n} == {kind: 1}


def test_bytes_may_arrive_in_any_pieces(serve: Callable[..., CannedServer], tmp_path: Path) -> None:
    """Heads, chunk sizes and event lines split at every byte are read as if they had come at once."""
    text = (
        SSE
        + chunk(b"data: {}\n\ndata:")
        + chunk(b" {}\n")
        + b"5;x=y\r\n\ndata\r\n"
        + chunk(b": [DONE]\n\n")
        + b"0\r\na: b\r\n\r\n"
    )
    server = serve(lambda _: [text[i : i + 1] for i in range(len(text))])
    result = run_load(Load(server.port, bodies(tmp_path, "a"), count=3, is_stream=True, events_min=2))
    assert (result.requests, result.errors, result.events) == (3, 0, 6)


def test_the_open_loop_charges_a_stall_to_every_request_it_delays(
    serve: Callable[..., CannedServer], tmp_path: Path
) -> None:
    """Latency counts from when a request was due: ten due every 10 ms, served in 30 ms each, end over 200 ms late."""

    def slow(_: bytes) -> list[bytes]:
        time.sleep(0.03)
        return [whole(b"x")]

    result = run_load(Load(serve(slow).port, bodies(tmp_path, "a"), rate=100.0, duration_s=0.1))
    assert result.requests == 10
    assert result.latency_ms is not None
    assert result.latency_ms.max >= 10 * 30 - 9 * 10 - 1


def test_the_open_loop_sends_what_was_asked(stub: Stub, tmp_path: Path) -> None:
    """Rate times duration requests are sent, none twice and none left out."""
    result = run_load(Load(stub.port, bodies(tmp_path, "a"), connections=16, rate=500.0, duration_s=0.5))
    assert (result.requests, result.errors) == (250, 0)
    assert stub.stats().requests == 250


def test_fresh_values_and_orders(serve: Callable[..., CannedServer], tmp_path: Path) -> None:
    """The mark becomes a value that no other request has, and an order file says which body is asked when."""
    server = serve(lambda _: [whole(b"x")])
    path = bodies(tmp_path, f"first {UNIQUE}.", f"second {UNIQUE}.")
    order = tmp_path / "order"
    order.write_bytes(struct.pack("<3I", 1, 0, 0))
    run_load(Load(server.port, path, order=order, count=6))
    texts = [json.loads(body)["messages"][0]["content"] for body in server.bodies]
    assert [text.split()[0] for text in texts] == ["second", "first", "first"] * 2
    assert len({text.split()[1] for text in texts}) == 6


def test_headers_go_out_and_are_tallied(serve: Callable[..., CannedServer], tmp_path: Path) -> None:
    """Answers are counted by the value of the header that was named."""
    turns = iter(["exact", "exact", "miss", None])

    def answer(_: bytes) -> list[bytes]:
        turn = next(turns)
        extra = b"x-cache: %s\r\n" % turn.encode() if turn else b""
        return [b"HTTP/1.1 200 OK\r\n" + extra + b"content-length: 1\r\n\r\nx"]

    result = run_load(Load(serve(answer).port, bodies(tmp_path, "a"), count=4, tally="X-Cache"))
    assert result.tally == {"exact": 2, "miss": 1, "(none)": 1}


def test_a_wrong_option_is_said(tmp_path: Path) -> None:
    """The tool's own words reach the caller."""
    with pytest.raises(BenchError, match="no bodies"):
        run_load(Load(1, bodies(tmp_path), count=1))
