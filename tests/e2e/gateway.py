"""A real gateway for tests: the command line, a configuration file, a free port, a data directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

API_KEY = "sk-sw-test-0123456789abcdef0123456789abcdef"
ADMIN_KEY = "sk-admin-test-0123456789"

WITHOUT_EMBEDDER: dict[str, Any] = {"cache": {"is_semantic": False}}
"""Settings of a gateway that starts no cache worker: for tests that need neither meaning nor local embeddings."""


class Gateway:
    """`python -m gateway serve` and what a test wants of it."""

    def __init__(self, folder: Path, config: dict[str, Any], env: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        self.log = folder / "gateway.log"
        self._config = folder / "sameway.yaml"
        # an audit turns a hit into a miss by chance: only tests of audits want them
        config = {**config, "cache": {"check_share": 0, **config.get("cache", {})}}
        self._config.write_text(yaml.safe_dump(config))
        self._env = env or {}
        self.stdout = ""
        self.root = ""
        self.process: subprocess.Popen[str] | None = None

    def start(self, *arguments: str) -> None:
        """Start and wait for the port. Raises AssertionError with the log where it does not come."""
        argv = [
            sys.executable,
            "-m",
            "gateway",
            "serve",
            "--config",
            str(self._config),
            "--data-dir",
            str(self.data_dir),
        ]
        keys = {"SAMEWAY_API_KEY": API_KEY, "SAMEWAY_ADMIN_KEY": ADMIN_KEY, "SAMEWAY_LOG_FORMAT": "json"}
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                [*argv, "--port", "0", *arguments],
                env={**os.environ, **keys, **self._env},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stdout += line
            found = re.search(r"base_url\s+(http\S+)/v1", line)
            if found:
                self.root = found[1]
                threading.Thread(target=self._drain, daemon=True).start()
                return
        raise AssertionError(f"the gateway did not start: {self.stdout}\n{self.log.read_text()}")

    def _drain(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.stdout += line

    @property
    def base_url(self) -> str:
        return f"{self.root}/v1"

    def wait_ready(self, within_s: float = 90.0) -> None:
        """Until `/readyz` is 200."""
        wait_for(lambda: httpx.get(f"{self.root}/readyz", timeout=5).status_code == 200, within_s, self.why_not_ready)

    def why_not_ready(self) -> str:
        with contextlib.suppress(httpx.HTTPError):
            return self.observe("/readyz").text + self.log.read_text()[-3000:]
        return self.log.read_text()[-3000:]

    def observe(self, path: str) -> httpx.Response:
        """`/metrics`, or all of `/readyz`, with the admin's key."""
        return httpx.get(f"{self.root}{path}", headers={"authorization": f"Bearer {ADMIN_KEY}"}, timeout=10)

    def chat(self, content: str, model: str = "mock", key: str = API_KEY, **body: Any) -> httpx.Response:
        """One chat completion over plain HTTP."""
        headers = {"authorization": f"Bearer {key}", **body.pop("headers", {})}
        body = {"model": model, "messages": [{"role": "user", "content": content}], **body}
        return httpx.post(f"{self.base_url}/chat/completions", json=body, headers=headers, timeout=60)

    def chat_anew(self, content: str, **arguments: Any) -> httpx.Response:
        """The first reply that joins no answer before: a repeat joins one that is still being recorded."""
        while (reply := self.chat(content, **arguments)).headers.get("x-sameway-cache") == "coalesced":
            pass
        return reply

    def admin(self, method: str, path: str, **arguments: Any) -> Any:
        """The JSON of one admin call. Raises httpx.HTTPStatusError."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        reply = httpx.request(method, f"{self.root}/admin/api{path}", headers=headers, timeout=30, **arguments)
        reply.raise_for_status()
        return reply.json() if reply.content else None

    def records(self) -> list[dict[str, Any]]:
        """The canonical log lines so far."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [record for line in lines if (record := json.loads(line)).get("event") == "request"]

    def children(self, mark: str) -> list[psutil.Process]:
        """The processes under the supervisor whose command line contains `mark`."""
        assert self.process is not None
        found = []
        for child in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if mark in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def stop(self) -> None:
        if self.process is None or self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def run_gateway(
    folder: Path, config: dict[str, Any], *arguments: str, env: dict[str, str] | None = None
) -> Iterator[Gateway]:
    """A gateway that has its port; stopped at the end."""
    gateway = Gateway(folder, config, env)
    try:
        gateway.start(*arguments)
        yield gateway
    finally:
        gateway.stop()


def wait_for(is_there: Callable[[], bool], within_s: float = 30.0, why: Callable[[], str] = str) -> None:
    """Poll until something is so. Raises AssertionError when it is not in time."""
    deadline = time.monotonic() + within_s
    while True:
        with contextlib.suppress(httpx.TransportError):
            if is_there():
                return
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {within_s} s. {why()}")
        time.sleep(0.05)


def deployment(upstream_url: str, name: str, model: str = "mock", **more: Any) -> dict[str, Any]:
    """An OpenAI-compatible deployment at the test upstream."""
    price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
    return {"name": name, "backend": "openai", "base_url": upstream_url, "model": model, "price": price, **more}
