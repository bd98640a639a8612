"""How a cache worker is started: its command line as a value. Knows no cache and imports nothing
heavy.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cache.query import ERROR_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The options of `python -m cache.worker`; see `ipc.options`."""

    socket: Annotated[Path, "unix socket to listen on"]
    # a command line shows to all users of a host, and the URL may have a password
    redis: Annotated[str, "URL; default: $SAMEWAY_REDIS_URL"] = field(
        default_factory=lambda: os.environ.get("SAMEWAY_REDIS_URL", "")
    )
    index: Annotated[str, "URL of a vector engine; default: $SAMEWAY_INDEX_URL, or FAISS"] = field(
        default_factory=lambda: os.environ.get("SAMEWAY_INDEX_URL", "")
    )
    embedder: Annotated[str, "a sentence-transformers model by name or path"] = "default"
    device: Annotated[Literal["auto", "cpu", "cuda"], "of the encoder"] = "auto"
    precision: Annotated[Literal["auto", "float32", "bfloat16"], "of the encoder"] = "auto"
    threads: Annotated[int | None, "for the encoder on a CPU; default: two, or one on one core"] = None
    error_max: Annotated[float, "share of requests that may be answered wrongly"] = ERROR_MAX
    keys_max: Annotated[int, "prompts in the index; the oldest go first"] = 1_000_000
    size_bytes_max: Annotated[int, "of a team's entries, with their sketches"] = 256 << 20
