"""The progress of one attempt at a generation: filled as its chunks come, read by the books, the breaker and the cache."""

import time
from collections.abc import Sequence

import msgspec

from gateway.wire.types import Chunk, Usage


class Generated(msgspec.Struct):
    """What one attempt at a generation has produced so far; filled as its chunks come."""

    started: float = msgspec.field(default_factory=time.perf_counter)
    has_begun: bool = False
    is_complete: bool = False
    is_whole: bool = False  # came in one piece: its time to first token is its time
    content_chunks: int = 0
    size_bytes: int = 0
    finish_reasons: list[str] = []
    usage: Usage | None = None
    ttft_ms: float | None = None

    def add(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            self.size_bytes += len(chunk.data)
            if chunk.has_content:
                self.content_chunks += chunk.count
            if chunk.finish_reasons:
                self.finish_reasons.extend(chunk.finish_reasons)
            if chunk.usage is not None:
                self.usage = chunk.usage
            if not self.has_begun and (chunk.has_content or chunk.finish_reasons or chunk.is_whole):
                self.has_begun = True
                self.is_whole = chunk.is_whole
                self.ttft_ms = self.elapsed_ms()

    @property
    def has_content(self) -> bool:
        return self.content_chunks > 0

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1000.0
