"""A real engine worker process for tests."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from local_engine import AsyncEngine

SMALL_OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "threads": 1, "kv_blocks": 128, "block_tokens": 4}


@dataclass(frozen=True)
class Worker:
    """A running process and where it listens."""

    process: subprocess.Popen[bytes]
    socket_path: Path
    log_path: Path


def engine_argv(socket_path: Path, **options: Any) -> list[str]:
    """The command line of a small engine worker with these further options."""
    told = json.dumps(SMALL_OPTIONS | options)
    return [sys.executable, "-m", "local_engine.process.worker", str(socket_path), told]


def start(socket_path: Path, log_path: Path, **options: Any) -> subprocess.Popen[bytes]:
    """Start the process; its output goes to a file."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    with log_path.open("wb") as log:
        return subprocess.Popen(engine_argv(socket_path, **options), stderr=log, stdout=log, env=environment)


@contextmanager
def worker_process(model: Path, **options: Any) -> Iterator[Worker]:
    """A worker on a checkpoint, perhaps still loading; gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="engine-") as folder:  # a socket's path must stay short
        socket_path, log_path = Path(folder) / "engine.sock", Path(folder) / "log"
        process = start(socket_path, log_path, model=str(model), **options)
        try:
            yield Worker(process, socket_path, log_path)
        finally:
            process.kill()
            process.wait()


@asynccontextmanager
async def connected(socket_path: Path, look_s: float = 1.0) -> AsyncIterator[AsyncEngine]:
    """A client of a worker that is ready."""
    engine = AsyncEngine(socket_path, look_s=look_s)
    try:
        engine.start()
        async with asyncio.timeout(60):
            await engine.wait_ready()
        yield engine
    finally:
        await engine.aclose()
