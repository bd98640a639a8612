"""`./run bench batch`: a batch through kills of everything, and the memory of a worker that takes a large file.

    ./run bench batch [--lines 1000] [--kills 3] [--mb 1024] [--json FILE]

lines: a gateway of two workers runs a batch; --kills times every process of it, its Redis included, is killed (SIGKILL) and
started again. Then each line must be in the output once, the ledger must have a row for each generation that ended, and spend
and rows must agree. file: a file of --mb goes up and comes down; the memory of the workers is read on the way. Exits with 1
where a line is missing or doubled, the books do not agree, or the memory grows by over 64 MB.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI

from bench.faults import books_of
from tests.e2e.gateway import API_KEY, Gateway, deployment
from tests.e2e.upstream import Upstream, run_upstream

_CHAT = "/v1/chat/completions"
_WITHIN_S = 600.0
_GROWTH_MB_MAX = 64.0
_BOUNDARY = "bench"


def _gateway(upstream: Upstream, folder: Path, bytes_max: int) -> Gateway:
    folder.mkdir(parents=True)
    models = {"mock": {"deployments": [deployment(upstream.url, "mock", "mock?delay_ms=200")]}}
    limits = {"file_bytes_max": bytes_max, "team_bytes_max": 4 * bytes_max}
    return Gateway(
        folder,
        {
            "workers": 2,
            "models": models,
            "engines": {},
            "cache": {"is_semantic": False},
            "batches": limits,
            "budgets": {"hold_lease_s": 5},
        },
    )


def _client(gateway: Gateway) -> OpenAI:
    return OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0, timeout=60)


def _kill(gateway: Gateway) -> None:
    """SIGKILL every process of the gateway, at once."""
    assert gateway.process is not None
    supervisor = psutil.Process(gateway.process.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    gateway.process.wait()


def lines(upstream: Upstream, folder: Path, count: int, kills: int) -> dict[str, Any]:
    """The batch. Returns what it shows."""
    gateway = _gateway(upstream, folder, 1 << 30)
    gateway.start()
    try:
        gateway.wait_ready()
        gateway.admin("POST", "/teams/1/budgets", json={"window": "total", "limit_microusd": 10**12, "is_hard": True})
        text = "".join(
            json.dumps(
                {
                    "custom_id": f"line-{number}",
                    "method": "POST",
                    "url": _CHAT,
                    "body": {"model": "mock", "messages": [{"role": "user", "content": f"line {number}"}]},
                }
            )
            + "\n"
            for number in range(count)
        )
        client = _client(gateway)
        file = client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=_CHAT, completion_window="24h")
        began, left = time.monotonic(), kills
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            if left and upstream.seen().generations >= count * (kills - left + 1) // (kills + 1):
                left -= 1
                _kill(gateway)
                gateway.start()
                gateway.wait_ready()
                client = _client(gateway)
            assert time.monotonic() - began < _WITHIN_S, batch
            time.sleep(0.05)
            batch = client.batches.retrieve(batch.id)
        seconds = time.monotonic() - began
        assert batch.output_file_id is not None, batch
        output = [json.loads(line) for line in client.files.content(batch.output_file_id).text.splitlines()]
        ids = Counter(one["custom_id"] for one in output)
        books = books_of(gateway)
        generations = upstream.seen().generations
    finally:
        gateway.stop()
    found = {
        "lines": count,
        "kills": kills - left,
        "missing": count - len(ids),
        "doubled": sum(ids.values()) - len(ids),
        "errors": batch.error_file_id or "none",
        "generated_again": generations - count,
        **{f"books_{name}": value for name, value in books.items()},
        "seconds": round(seconds, 1),
    }
    is_whole = not (found["missing"] or found["doubled"] or batch.error_file_id)
    return {**found, "is_good": is_whole and books["is_exact"]}


def _body(size: int) -> Iterator[bytes]:
    """A multipart form with a file of `size` bytes."""
    yield f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'.encode()
    yield f'--{_BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
    piece = b"x" * ((1 << 20) - 1) + b"\n"
    for _ in range(size // len(piece)):
        yield piece
    yield f"\r\n--{_BOUNDARY}--\r\n".encode()


def file(upstream: Upstream, folder: Path, mb: int) -> dict[str, Any]:
    """The large file, up, read as a batch, and down. Returns what it shows."""
    size = mb << 20
    gateway = _gateway(upstream, folder, size + (1 << 20))
    gateway.start()
    peaks: list[float] = []
    is_over = threading.Event()

    def watch() -> None:
        workers = [one for one in gateway.children("gateway worker") if "-m" in one.cmdline()]
        while not is_over.wait(0.1):
            peaks.append(max(one.memory_info().rss for one in workers) / 1e6)

    try:
        gateway.wait_ready()
        client = _client(gateway)
        client.files.create(file=("a", b"x"), purpose="batch")
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        time.sleep(0.5)
        before, began = max(peaks), time.monotonic()
        headers = {
            "authorization": f"Bearer {API_KEY}",
            "content-type": f"multipart/form-data; boundary={_BOUNDARY}",
        }
        made = httpx.post(f"{gateway.base_url}/files", content=_body(size), headers=headers, timeout=_WITHIN_S).json()
        up_s, began = time.monotonic() - began, time.monotonic()
        received = 0
        with httpx.stream("GET", f"{gateway.base_url}/files/{made['id']}/content", headers=headers, timeout=60) as got:
            for part in got.iter_raw():
                received += len(part)
        down_s, began = time.monotonic() - began, time.monotonic()
        batch = client.batches.create(input_file_id=made["id"], endpoint=_CHAT, completion_window="24h")
        while batch.status not in ("completed", "failed"):
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        batch_s = time.monotonic() - began
        is_over.set()
        watching.join()
    finally:
        is_over.set()
        gateway.stop()
    found = {
        "mb": mb,
        "before_mb": round(before, 1),
        "peak_mb": round(max(peaks), 1),
        "up_s": round(up_s, 1),
        "down_s": round(down_s, 1),
        "batch_of_long_lines_s": round(batch_s, 1),
    }
    return {**found, "is_good": received == made["bytes"] and max(peaks) - before <= _GROWTH_MB_MAX}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0 if every bound holds, else 1."""
    parser = argparse.ArgumentParser(prog="./run bench batch", description=__doc__.split("\n")[0])
    parser.add_argument("--lines", type=int, default=1_000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--mb", type=int, default=1_024, help="0: no file")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-batch-") as folder, run_upstream() as upstream:
        if arguments.lines:
            found.append(lines(upstream, Path(folder) / "lines", arguments.lines, arguments.kills))
            print(json.dumps(found[-1]), flush=True)
        if arguments.mb:
            found.append(file(upstream, Path(folder) / "file", arguments.mb))
            print(json.dumps(found[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(one) + "\n" for one in found))
    return int(not all(one["is_good"] for one in found))
