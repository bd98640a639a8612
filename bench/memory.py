"""`./run bench memory`: what requests leave in a worker's memory when they fail, are refused or are left by their client.

    ./run bench memory [--requests 20] [--megabytes 12] [--settle 60] [--workers 1] [--case NAME,...] [--json FILE]

Starts a gateway and an upstream that fails on command. Each case is warmed up by ten requests; then memory is read, the requests
are sent one after the other, and memory is read again after a pause. Exits with 1 if a case keeps more than 20 MB.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import itertools
import json
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.lab.native import BENCH
from bench.lab.processes import BenchError, Child, answers, descendants
from bench.lab.systems import clean_environment

_ADMIN_KEY = "sk-admin-bench-0123456789"
_KEY = "sk-sw-bench-0123456789"
_WARM_UP = 10
_KEPT_MB_MAX = 20
_START_TIMEOUT_S = 120.0
_CHAT = "/v1/chat/completions"

# -- the upstream ------------------------------------------------------------------------------------------------------


class Upstream:
    """An OpenAI-compatible server in a thread. The model says what it does: see `_play`."""

    def __init__(self) -> None:
        started = threading.Event()
        self.port = 0

        async def serve() -> None:
            server = await asyncio.start_server(_converse, "127.0.0.1", 0, limit=1 << 26)
            self.port = server.sockets[0].getsockname()[1]
            started.set()
            await server.serve_forever()

        threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
        started.wait()


async def _converse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, OSError):
        while not writer.is_closing():
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            asked = json.loads(await reader.readexactly(int(length[1]) if length else 0))
            await _play(asked["model"], writer)
            await writer.drain()
    writer.close()


async def _play(model: str, writer: asyncio.StreamWriter) -> None:
    """Answer, or fail as the name of the model says."""
    error = {"error": {"message": "no", "type": "invalid_request_error", "param": None, "code": None}}
    if model.isdecimal():
        writer.write(_whole(int(model), json.dumps(error).encode()))
    elif model == "no-json":
        writer.write(_whole(200, b"<html>" * 1000))
    elif model == "hangs":
        await asyncio.sleep(3600)
    else:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for _ in range(10_000 if model == "streams" else 3):
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
            chunk["choices"] = [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]  # type: ignore[assignment]
            writer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
            await asyncio.sleep(0.02)
        writer.close()  # without a finish: the answer broke off


def _whole(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        status,
        len(body),
        body,
    )


# -- the clients -------------------------------------------------------------------------------------------------------


class Clients:
    """Sends one request after the other, each on its own connection; each has a prompt of its own."""

    def __init__(self, port: int, size_bytes: int, poor_key: str) -> None:
        self.poor_key = poor_key
        self._port = port
        self._text = "word " * (size_bytes // 5)
        self._numbers = itertools.count()

    def body(self, model: str, **fields: Any) -> bytes:
        messages = [{"role": "user", "content": f"{self._text}{next(self._numbers)}"}]
        return json.dumps({"model": model, "messages": messages, **fields}).encode()

    def ask(self, body: bytes, path: str = _CHAT, key: str = _KEY, **headers: str) -> str:
        """The status, or what the connection did instead."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        try:
            connection.request("POST", path, body, {"authorization": f"Bearer {key}", **headers})
            response = connection.getresponse()
            response.read()
            return str(response.status)
        except OSError as error:
            return type(error).__name__
        finally:
            connection.close()

    def leave(self, *bodies: bytes, part: float = 1.0, after_s: float = 0.5) -> str:
        """Send `part` of each body on a connection of its own, and close them all after a while."""
        with contextlib.ExitStack() as stack:
            for body in bodies:
                opened = stack.enter_context(socket.create_connection(("127.0.0.1", self._port)))
                head = f"POST {_CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {_KEY}\r\n"
                opened.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(body))
                opened.sendall(body[: int(part * len(body))])
            time.sleep(after_s)
        return "left"

    def pair(self, body: bytes) -> str:
        """Two at once, of which the second joins the first."""
        statuses: list[str] = []
        threads = [threading.Thread(target=lambda: statuses.append(self.ask(body))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return "+".join(sorted(statuses))


CASES: dict[str, Callable[[Clients], str]] = {
    "no key": lambda to: to.ask(to.body("200"), key="sk-none"),
    "no JSON": lambda to: to.ask(to.body("200")[:-2]),
    "bad field": lambda to: to.ask(to.body("200", temperature=9)),
    "no such model": lambda to: to.ask(to.body("none")),
    "too large": lambda to: to.ask(to.body("200") * 2),
    "only if cached": lambda to: to.ask(to.body("200"), **{"cache-control": "only-if-cached"}),
    "over budget": lambda to: to.ask(to.body("200"), key=to.poor_key),
    "too long": lambda to: to.ask(to.body("narrow")),
    "upstream 400": lambda to: to.ask(to.body("400")),
    "upstream 404": lambda to: to.ask(to.body("404")),
    "upstream 500": lambda to: to.ask(to.body("500")),
    "upstream no JSON": lambda to: to.ask(to.body("no-json")),
    "upstream silent": lambda to: to.ask(to.body("silent", stream=True)),
    "stream cut": lambda to: to.ask(to.body("cut", stream=True)),
    "two, upstream 400": lambda to: to.pair(to.body("400")),
    "deadline": lambda to: to.ask(to.body("hangs"), **{"x-stainless-read-timeout": "0.2"}),
    "left in its body": lambda to: to.leave(to.body("hangs"), part=0.8, after_s=0.1),
    "left while waiting": lambda to: to.leave(to.body("hangs")),
    "left in a stream": lambda to: to.leave(to.body("streams", stream=True)),
    "two left": lambda to: to.leave(*[to.body("hangs")] * 2),
    "prompts, no JSON": lambda to: to.ask(to.body("400")[:-2], path="/v1/completions"),
    "response, bad field": lambda to: to.ask(to.body("400"), path="/v1/responses"),
    "embeddings, bad field": lambda to: to.ask(to.body("400"), path="/v1/embeddings"),
    "litellm 400": lambda to: to.ask(to.body("litellm")),
}


# -- the gateway -------------------------------------------------------------------------------------------------------


def _settings(upstream: Upstream, folder: Path, workers: int) -> dict[str, Any]:
    price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
    at = {"base_url": f"http://127.0.0.1:{upstream.port}/v1", "price": price}

    def one(model: str, **more: Any) -> dict[str, Any]:
        return {"deployments": [{"backend": "openai", "name": f"at-{model}", "model": model, **at, **more}]}

    models = {name: one(name) for name in ("200", "400", "404", "500", "no-json", "hangs", "streams", "cut")}
    lite = {"backend": "litellm", "name": "litellm", "model": "openai/400", "api_key_env": "UPSTREAM_KEY"}
    models["litellm"] = {"deployments": [{**lite, **at}]}
    models["narrow"] = {
        "deployments": [{"backend": "openai", "name": "narrow", "model": "200", "context_tokens_max": 100, **at}]
    }
    quick = {"ttft_timeout_ms": 200, "idle_timeout_ms": 200}
    models["silent"] = {"deployments": [{"backend": "openai", "name": "silent", "model": "hangs", **quick, **at}]}
    return {
        "data_dir": str(folder / "data"),
        "workers": workers,
        "log_format": "json",
        "engines": {},
        "cache": {"is_semantic": False},
        "models": models,
    }


@contextlib.contextmanager
def _gateway(upstream: Upstream, folder: Path, workers: int) -> Iterator[tuple[Child, int]]:
    """A gateway that is ready, and its port."""
    config = folder / "sameway.yaml"
    config.write_text(yaml.safe_dump(_settings(upstream, folder, workers)))
    command = [sys.executable, "-m", "gateway", "serve", "--config", str(config), "--port", "0"]
    keys = {"SAMEWAY_ADMIN_KEY": _ADMIN_KEY, "SAMEWAY_API_KEY": _KEY, "UPSTREAM_KEY": "sk-upstream-0123456789"}
    child = Child(command, folder / "sameway.log", clean_environment(**keys), BENCH.parent)

    def port() -> int:
        found = re.search(r"base_url\s+http://[^\s:]+:(\d+)/", child.log_path.read_text(errors="replace"))
        return int(found[1]) if found else 0

    try:
        child.wait_until(lambda: bool(port()), _START_TIMEOUT_S)
        child.wait_until(lambda: answers(f"http://127.0.0.1:{port()}/readyz"), _START_TIMEOUT_S)
        yield child, port()
    finally:
        child.stop()


def _poor_key(port: int) -> str:
    """The key of a new team that can afford nothing."""

    def post(path: str, body: dict[str, Any]) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        headers = {"authorization": f"Bearer {_ADMIN_KEY}", "content-type": "application/json"}
        connection.request("POST", f"/admin/api{path}", json.dumps(body), headers)
        made = json.loads(connection.getresponse().read())
        connection.close()
        return made

    team = post("/teams", {"name": "poor"})["id"]
    post(f"/teams/{team}/budgets", {"window": "day", "limit_microusd": 1, "is_hard": True})
    return str(post(f"/teams/{team}/keys", {"name": "key"})["plaintext"])


def _resident_mb(root: int) -> float:
    """The resident memory of all gateway workers below `root`."""
    workers = [pid for pid in descendants(root) if b"gateway\0worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in workers]
    return sum(pages) * 4096 / 1e6


def _measured(case: str, clients: Clients, root: int, arguments: argparse.Namespace) -> dict[str, Any]:
    act = CASES[case]
    for _ in range(_WARM_UP):
        act(clients)
    time.sleep(arguments.settle)
    before = _resident_mb(root)
    ends: dict[str, int] = {}
    for _ in range(arguments.requests):
        end = act(clients)
        ends[end] = ends.get(end, 0) + 1
    at_once = _resident_mb(root)
    time.sleep(arguments.settle)
    after = _resident_mb(root)
    return {
        "case": case,
        "ends": ends,
        "before_mb": before,
        "at_once_mb": at_once,
        "after_mb": after,
        "kept_mb": after - before,
    }


def _print(row: dict[str, Any]) -> None:
    ends = ", ".join(f"{count} x {end}" for end, count in row["ends"].items())
    figures = " | ".join(f"{row[name]:.1f}" for name in ("before_mb", "at_once_mb", "after_mb", "kept_mb"))
    print(f"| {row['case']} | {ends} | {figures} |", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0 if no case keeps more than 20 MB, else 1."""
    arguments = _parser().parse_args(argv)
    cases = [name for name in CASES if arguments.case is None or name in arguments.case]
    rows: list[dict[str, Any]] = []
    print("| exit | ends | MB before | at once | after | kept |\n| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-memory-") as folder:
        upstream = Upstream()
        try:
            with _gateway(upstream, Path(folder), arguments.workers) as (child, port):
                clients = Clients(port, int(arguments.megabytes * 1e6), _poor_key(port))
                for case in cases:
                    rows.append(_measured(case, clients, child.pid, arguments))
                    _print(rows[-1])
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(any(row["kept_mb"] > _KEPT_MB_MAX for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run bench memory", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20, help="of each case, after ten that warm it up")
    parser.add_argument("--megabytes", type=float, default=12, help="size of each request's body")
    parser.add_argument("--settle", type=float, default=60, help="seconds before each reading")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--case", type=lambda text: text.split(","), default=None, help=f"some of: {', '.join(CASES)}")
    parser.add_argument("--json", type=Path, default=None, help="write one JSON object for each case")
    return parser


if __name__ == "__main__":
    sys.exit(main())
