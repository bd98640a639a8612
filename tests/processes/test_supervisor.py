"""What the supervisor starts is what the settings say."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from cache.query import ERROR_MAX
from cache.worker import SemanticClient, WorkerState
from cache.worker.options import WorkerOptions
from gateway.child_output import ChildOutput
from gateway.settings import CacheSettings, EngineSettings, Settings
from gateway.supervisor import Child, ChildKind, Heartbeat, cache_child, engine_argv, kill_if_silent, redis_binary
from ipc import JSON_VARIABLE
from local_engine.config import EngineConfig

SET: dict[str, Any] = {
    "model": "org/model",
    "draft_model": "org/small",
    "device": "cpu",
    "dtype": "float32",
    "weights": "int8",
    "threads": 3,
    "context_tokens_max": 4096,
    "kv_size_mb": 77,
    "output_tokens_default": 99,
    "queue_max": 11,
}
NAMES = {"output_tokens_default": "answer_tokens_default"}  # what the engine calls it


def told(**engine: Any) -> EngineConfig:
    """What an engine's process makes of its command line."""
    settings = Settings(engines={"default": EngineSettings(**engine)})
    python, flag, module, socket, options = engine_argv(settings, "default")
    assert (python, flag, module) == (sys.executable, "-m", "local_engine.process.worker")
    assert socket == str(settings.engine_socket("default"))
    return msgspec.json.decode(options, type=EngineConfig)


def test_an_engine_is_told_each_of_its_settings() -> None:
    """Every setting of an engine arrives in its process under its name; none is forgotten on the way."""
    assert SET.keys() == EngineSettings.model_fields.keys()
    config = told(**SET)
    assert {name: getattr(config, NAMES.get(name, name)) for name in SET} == SET


def test_an_engine_s_defaults_are_its_own() -> None:
    """What nobody set is the engine's default, and the default model has no name."""
    assert told() == EngineConfig()


def test_the_cache_worker_is_told_its_settings(tmp_path: Path) -> None:
    """What operators set of it arrives in its process, and what they did not is the default; Redis' URL is no part of it."""
    named: dict[str, Any] = {
        "embedder": "-odd", "device": "cpu", "precision": "float32", "threads": 3, "error_max": 0.02,
        "size_bytes_max": 77,
    }  # fmt: skip
    for cache in (named, {}):
        settings = Settings(data_dir=tmp_path, redis_url="redis://:secret@h", cache=CacheSettings(**cache))
        python, flag, module, socket, options = cache_child(settings, {}).argv
        assert (python, flag, module, socket) == (sys.executable, "-m", "cache.worker", str(settings.cache_socket))
        expected = {"error_max": ERROR_MAX, "size_bytes_max": 256 << 20} | cache
        assert msgspec.json.decode(options, type=WorkerOptions) == WorkerOptions(**expected)
        assert "secret" not in options


MUTE = """
import socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
listening.listen()
while True:
    speaking, _ = listening.accept()
    while sys.argv[2] == "speaks":
        speaking.sendall(b".")
        import time; time.sleep(0.01)
"""


@pytest.mark.parametrize("habit", ["speaks", "hangs"])
async def test_a_process_that_falls_silent_is_noticed(habit: str, tmp_path: Path) -> None:
    """A heartbeat that stops is noticed after as many intervals as asked for; one that goes on never is."""
    heartbeat = Heartbeat(tmp_path / "s.sock", interval_s=0.1)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", MUTE, str(heartbeat.path), habit)
    listening = asyncio.create_task(heartbeat.silent_for(10))
    try:
        await asyncio.wait({listening}, timeout=30 if habit == "hangs" else 3)
        assert listening.done() == (habit == "hangs")
        assert process.returncode is None
    finally:
        listening.cancel()
        process.kill()
        await process.wait()


async def test_a_cache_worker_that_hangs_is_killed(tmp_path: Path) -> None:
    """A cache worker that runs answers the supervisor, also while its model loads; a stopped one is killed."""
    settings = Settings(data_dir=tmp_path)
    child = cache_child(settings, {"SAMEWAY_REDIS_URL": "redis://127.0.0.1:1"})
    assert child.heartbeat is not None
    child.heartbeat.path.parent.mkdir(parents=True, exist_ok=True)
    child.heartbeat.interval_s = 0.2
    process = await asyncio.create_subprocess_exec(*child.argv, env={**os.environ, **child.env})
    killing = asyncio.create_task(kill_if_silent(child, process))
    try:
        async with SemanticClient(child.heartbeat.path) as client, asyncio.timeout(120):
            while client.status.state in (WorkerState.AWAY, WorkerState.LOADING):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert not killing.done()
            process.send_signal(signal.SIGSTOP)
            assert await process.wait() == -signal.SIGKILL
    finally:
        killing.cancel()
        if process.returncode is None:
            process.kill()


async def test_a_silent_process_is_killed(tmp_path: Path) -> None:
    """The supervisor kills a process whose heartbeat stops."""
    heartbeat = Heartbeat(tmp_path / "s.sock", interval_s=0.01)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", MUTE, str(heartbeat.path), "hangs")
    killing = asyncio.create_task(kill_if_silent(Child(ChildKind.ENGINE, "engine", [], heartbeat=heartbeat), process))
    try:
        assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGKILL
    finally:
        killing.cancel()


def test_the_embedded_server_is_the_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's redis-server comes first; without one, the Valkey that the package brings, and it runs."""
    monkeypatch.setenv("PATH", str(tmp_path))
    shown = subprocess.run([redis_binary(), "--version"], capture_output=True, text=True, check=True)
    assert "Valkey server v=9" in shown.stdout
    own = tmp_path / "redis-server"
    own.touch(0o755)
    assert redis_binary() == str(own)


WRITES = r"""
import logging, sys
from ipc import log_to_stderr
log_to_stderr(logging.INFO, "%(message)s")
logging.getLogger("cache.worker").info("loading %s", "a model")
print("a library's own words", flush=True)
print("29068:M 27 Nov 2026 20:59:54.501 # User requested shutdown...", flush=True)
print('{"event": "half a line', flush=True)
print("x" * 3_000_000, flush=True)
raise RuntimeError("on two\nlines")
"""


async def test_what_a_child_writes_is_in_the_log_of_the_supervisor() -> None:
    """Its own lines with their level, source and stack, Redis' with theirs, and text of others; none of over a megabyte."""
    output = ChildOutput()
    with structlog.testing.capture_logs() as events:
        writing = await output.pipe("cache")
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", WRITES, stdout=writing, stderr=writing, env={**os.environ, JSON_VARIABLE: "1"}
        )
        os.close(writing)
        assert await process.wait() == 1
        await output.aclose(within_s=30)
    shown = [
        (line["log_level"], line.get("source"), line["event"]) for line in events if not line["event"].startswith("xx")
    ]
    assert shown == [
        ("info", "cache.worker", "loading a model"),
        ("info", None, "a library's own words"),
        ("warning", None, "User requested shutdown..."),
        ("info", None, '{"event": "half a line'),
        ("critical", "process", "the process ends: on two\nlines"),
    ]
    assert "RuntimeError: on two\nlines" in events[-1]["exception"]
    assert {line["process"] for line in events} == {"cache"}
    assert max(len(line["event"]) for line in events) <= 1 << 20
