"""The progress of one attempt at one deployment, filled as its chunks arrive.

Accounting, the breaker and the cache read it. Knows no prompts and no routes. Invariant: an attempt
ends once, with one outcome.
"""

import time
from collections.abc import Awaitable, Sequence
from operator import attrgetter

import msgspec

from gateway.wire.fold import text_bytes
from gateway.wire.types import Chunk, size_of
from policies import Usage
from policies.replicas import Queued

_mended = attrgetter("mended")
_BYTES_PER_TOKEN = 3  # fewer than in most languages' texts


class Attempt(msgspec.Struct, frozen=True):
    """One attempt at a deployment. `outcome` is `ok`, `cancelled`, or the error in words."""

    name: str
    outcome: str
    duration_ms: float
    is_refusal: bool = False  # the request was at fault
    is_denial: bool = False  # the deployment refused for good: a key, credit, a model, a rule
    mended: int = 0  # fields of its answer that were not what they should be
    at_ms: float = 0.0  # from the start of the request until it began
    ttft_ms: float | None = None  # from then until its first content
    span_id: str = ""  # in the request's trace

    @property
    def verdict(self) -> str:
        """`ok`, `error` or `denied`; or `refused` or `cancelled`, which leave the health as it is.

        `refused`: the request was at fault.
        """
        if self.outcome in ("ok", "cancelled"):
            return self.outcome
        return "refused" if self.is_refusal else "denied" if self.is_denial else "error"


class Progress(msgspec.Struct):
    """The answer of one deployment so far. `draft` is the id of the entry that served as a draft."""

    deployment: str
    draft: str = ""
    ahead_tokens: int = 0  # that its replica read before this prompt
    warm_tokens: int = 0  # of the prompt, which its replica seemed to hold
    queued: Queued | None = None  # in its replica's backlog
    prefix_tokens: int = 0  # of an answer that it went on with, beside the prompt
    at_ms: float = 0.0  # from the start of the request until now
    span_id: str = ""  # in the request's trace, if that is the gateway's
    started: float = msgspec.field(default_factory=time.perf_counter)
    has_begun: bool = False
    is_whole: bool = False  # came in one piece: its first token took the whole time
    content_chunks: int = 0
    size_bytes: int = 0
    finish_reasons: list[str] = []
    usage: Usage | None = None
    chunks: list[Chunk] = []
    opening: bytes = b""  # as it came, where the chunks' names are replaced
    ttft_ms: float | None = None
    is_complete: bool = False
    is_abandoned: bool = False  # the last reader left while the deployment was at work
    attempt: Attempt | None = None  # once it has ended

    def add(self, chunks: Sequence[Chunk]) -> None:
        """Count `chunks`, which arrived together."""
        self.chunks += chunks
        self.size_bytes += size_of(chunks)
        for chunk in chunks:
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
                if self.queued is not None:
                    self.queued.begun()

    async def apart(self, waiting: Awaitable[None]) -> None:
        """Await `waiting`, without counting its time as the deployment's."""
        since = time.perf_counter()
        try:
            await waiting
        finally:
            self.started += time.perf_counter() - since

    def complete(self) -> None:
        """End the attempt with a whole answer."""
        self.is_complete = True
        self.end("ok")

    def abandon(self) -> None:
        """End the attempt because its last reader has left."""
        self.is_abandoned = True
        self.end("cancelled")

    def end(self, outcome: str, *, is_refusal: bool = False, is_denial: bool = False) -> None:
        """End the attempt. `outcome` is ok, cancelled, or why the deployment failed or refused the
        request.

        `is_denial`: the refusal is permanent.
        """
        duration_ms, mended = self.elapsed_ms(), sum(map(_mended, self.chunks))
        if self.queued is not None:
            self.leave()
        self.attempt = Attempt(
            name=self.deployment,
            outcome=outcome,
            duration_ms=duration_ms,
            is_refusal=is_refusal,
            is_denial=is_denial,
            mended=mended,
            at_ms=self.at_ms,
            ttft_ms=self.ttft_ms,
            span_id=self.span_id,
        )

    def leave(self) -> None:
        """Leave its replica's backlog."""
        if self.queued is not None:
            self.queued.leave()
            self.queued = None

    @property
    def has_content(self) -> bool:
        return self.content_chunks > 0

    def completion_tokens_at_least(self, tokens_per_ms: float) -> int:
        """A lower bound of the answer's tokens, for a deployment that did not count them.

        It is the largest of: its chunks, a third of its text's bytes, and the tokens of the elapsed
        time. `tokens_per_ms` is 0 for a model without hidden reasoning.
        """
        duration_ms = self.attempt.duration_ms if self.attempt is not None else self.elapsed_ms()
        unseen = duration_ms * tokens_per_ms
        return max(self.content_chunks, -(-text_bytes(self.chunks) // _BYTES_PER_TOKEN), int(unseen))

    def elapsed_ms(self) -> float:
        return (time.perf_counter() - self.started) * 1000.0
