"""The seam between the bench and what it measures: a system can be installed, started in a setup, and stopped.

Knows no scenario and no figures. Invariant: a system that can't be had raises BenchError with the reason, and the bench
prints it: nothing is left out in silence.
"""

from __future__ import annotations

import enum
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from bench.lab.native import WORK, Stub
from bench.lab.processes import BenchError, Child


class Setup(enum.StrEnum):
    """How a system is configured for a scenario, one worker unless it says otherwise."""

    MISS = "miss"  # as it serves requests that it has not seen; a peer's cache is off where that is faster
    HIT_MEMORY = "hit-memory"  # exact answers from the worker's own memory
    HIT_REDIS = "hit-redis"  # exact answers from Redis, each time
    SEMANTIC = "semantic"  # answers by meaning
    WORDS = "words"  # the same, from Redis each time and without audits: each would end a question's hits by its words
    TWO_WORKERS = "two-workers"
    TRACED = "traced"  # as misses and answers from memory, with the spans of every request sent


@dataclass(frozen=True, slots=True)
class Target:
    """What a request names to reach an upstream through a system."""

    model: str
    path: str = "/v1/chat/completions"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Running:
    """A started system, and how it is spoken to. `roots` are the processes whose trees are its cost."""

    port: int
    roots: tuple[int, ...]
    stop: Callable[[], None]
    version: str
    instant: Target
    paced: Target  # the upstream that sends a chunk every 10 ms
    unbudgeted: Target | None = None  # the instant one, asked by a team without limits and budgets
    tally: str | None = None  # the header that tells where an answer came from
    role_of: Callable[[str], str] = lambda command: "gateway"


class Upstream(Protocol):
    """What a system is put in front of, on loopback: an OpenAI-compatible server."""

    port: int


class System(Protocol):
    """One thing to measure."""

    name: str

    def install(self) -> None:
        """Makes it runnable, once; raises BenchError with the reason where it can't be."""

    def lacks(self, setup: Setup) -> str | None:
        """Why it has no such setup; None where it has."""

    def configuration(self, setup: Setup) -> str:
        """Setups of one configuration are measured on one running system."""

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        """Returns once it serves. `folder` is empty and its own."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what could configure a gateway or send it to a proxy, and with `extra`."""
    dropped = ("SAMEWAY_", "LITELLM_", "OPENAI_", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "PYTHONPATH", "VIRTUAL_ENV")
    kept = {name: text for name, text in os.environ.items() if not name.upper().startswith(dropped)}
    return {**kept, **extra}


def environment_of(
    name: str, requirements: list[str], *, timeout_s: float = 900.0, environ: Mapping[str, str] | None = None
) -> Path:
    """The folder of a Python environment that holds `requirements`, made the first time. `environ`: what a package that
    is compiled wants to find. Raises BenchError."""
    folder = WORK / name
    stamp = folder / ".requirements"
    wanted = "\n".join(requirements)
    if stamp.exists() and stamp.read_text() == wanted:
        return folder
    print(f"bench: installing {', '.join(requirements)} into {folder}", file=sys.stderr, flush=True)
    python = folder / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    variables = clean_environment(**(environ or {}))
    if uv.exists():
        make = [str(uv), "venv", "--quiet", "--clear", "--seed", "--python", sys.executable, str(folder)]
        install = [str(uv), "pip", "install", "--quiet", "--python", str(python), *requirements]
        index = subprocess.run(
            [sys.executable, "-m", "pip", "config", "get", "global.index-url"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip()
        if index:  # uv does not read pip's configuration
            variables.setdefault("UV_DEFAULT_INDEX", index)
        if "PIP_FIND_LINKS" in variables:
            variables.setdefault("UV_FIND_LINKS", variables["PIP_FIND_LINKS"])
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(folder)]
        install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
    for command in (make, install):
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=variables, timeout=timeout_s)
        if done.returncode != 0:
            raise BenchError(f"{' '.join(command[:4])} ... failed: {done.stderr.strip()[-600:]}")
    stamp.write_text(wanted)
    return folder


def start_redis(folder: Path) -> tuple[Child, int]:
    """A redis-server without persistence on a TCP port of its own, for peers. Raises BenchError where there is none."""
    beside = Path(sys.executable).with_name("redis-server")
    binary = shutil.which("redis-server") or (str(beside) if beside.exists() else None)
    if binary is None:
        raise BenchError("no redis-server on PATH")
    port = free_port()
    command = [binary, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    child = Child(command, folder / "redis.log", clean_environment(), folder)
    child.wait_until(lambda: "eady to accept connections" in child.log_tail(), 10.0)
    return child, port
