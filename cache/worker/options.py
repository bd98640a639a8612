"""How a cache worker is started: its command line as a value. Knows no cache and imports nothing
heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cache.query import ERROR_MAX


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What `python -m cache.worker` gets as JSON. `embedder` is a sentence-transformers model by name or path;
    `device`, `precision` and `threads` are of the encoder, by default two threads, or one on one core.
    `error_max` is the share of requests that may be answered wrongly, `keys_max` the prompts in the
    index, of which the oldest go first, `size_bytes_max` that of a team's entries, with their sketches.
    """

    embedder: str = "default"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    threads: int | None = None
    error_max: float = ERROR_MAX
    keys_max: int = 1_000_000
    size_bytes_max: int = 256 << 20
