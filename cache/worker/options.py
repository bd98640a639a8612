"""How a cache worker is started: its command line as a value. Knows no cache and imports nothing
heavy.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field
from pathlib import Path

_THREADS = 2  # a short text takes two thirds of the time on two, and a tenth more of the processor


@dataclass(frozen=True, slots=True)
class Options:
    socket_path: Path
    redis_url: str
    embedder: str
    device: str
    precision: str
    threads: int
    keys_max: int
    size_bytes_max: int
    error_max: float
    is_audited: bool
    # as early as can be: a parent may die while this starts
    parent_pid: int = field(default_factory=os.getppid)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_options(argv: list[str] | None) -> Options:
    """Of a command line; exits with a message where it is none."""
    parser = argparse.ArgumentParser(prog="python -m cache.worker", description="The semantic cache of this host.")
    add = parser.add_argument
    add("--socket", dest="socket_path", type=Path, required=True, help="unix socket to listen on")
    add("--redis", dest="redis_url", default=os.environ.get("SAMEWAY_REDIS_URL"), help="default: $SAMEWAY_REDIS_URL")
    add("--embedder", default="default", help="a sentence-transformers model by name or path")
    add("--device", default="auto", choices=("auto", "cpu", "cuda"))
    add("--precision", default="auto", choices=("auto", "float32", "bfloat16"), help="of the encoder")
    add("--threads", type=int, default=min(_THREADS, _cores()), help="for the encoder on a CPU")
    add("--error-max", type=float, default=0.01, help="share of requests that may be answered wrongly")
    add(
        "--audit",
        dest="is_audited",
        action="store_true",
        help="have some would-be hits generated, for judges to compare",
    )
    add("--keys-max", type=int, default=1_000_000, help="prompts in the index; the oldest go first")
    add("--size-bytes-max", type=int, default=256 << 20, help="of a team's entries, with their sketches")
    found = parser.parse_args(argv)
    if not found.redis_url:
        parser.error("--redis or SAMEWAY_REDIS_URL is needed")
    return Options(**vars(found))
