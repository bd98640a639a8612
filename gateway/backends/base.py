"""The one seam between the gateway and whatever generates: `Backend.stream(request)`, an async iterator of chunks as they come.

A backend knows one deployment and nothing of teams, money or caches. Errors of every backend are translated into the tree
below in its own file (what statuses mean, which two of them share, in refusals.py), and nowhere else:

    BackendError                    carries the deployment's words for the log, and what a client may be told
    ├── BackendUnavailable          no connection, a 5xx, a dead process: another deployment may do better
    ├── BackendOverloaded           429 or a full queue: another may do better; `retry_after_s` where it was said
    ├── BackendTimeout              no first chunk within its budget, or silence inside the stream
    ├── BackendRejected             a 400, 413 or 422 that no retry mends: the client's own fault, passed on with `status` and `body`
    └── BackendBroken               the stream ended without its finish: never shown as a finished answer

Invariant: a stream either ends after its finish reason has been seen, or raises. It never just stops.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

import msgspec

from gateway.wire.types import CHAT, Chunk, Kind, prompts_of
from local_engine import EngineLoad


class BackendRequest(msgspec.Struct, frozen=True):
    """What a backend is asked: the client's validated body (its own extensions removed) and what surrounds it."""

    body: dict[str, Any]
    is_stream: bool  # how the first client reads; a backend may answer a whole or chunks either way
    salt: bytes  # the partition: KV blocks are never shared across it
    request_id: str
    ttft_timeout_s: float
    idle_timeout_s: float
    draft: str = ""  # a text that the answer may share passages with; for who can verify guesses, others ignore it
    kind: Kind = CHAT

    @property
    def choices(self) -> int:
        """How many choices the answer is to have."""
        return (self.body.get("n") or 1) * self.prompts

    @property
    def prompts(self) -> int:
        """How many prompts are to be answered."""
        return 1 if self.kind is CHAT else len(prompts_of(self.body))


class Load(msgspec.Struct, frozen=True):
    """What a backend knows of itself right now, for the router; None where it can't know."""

    is_ready: bool = True
    reason: str = ""
    detail: str = ""  # more of the reason, for who looks after it: it may name files, so no client is told
    is_starting: bool = False  # not ready, but on its way: worth waiting for
    running: int = 0
    waiting: int = 0
    ttft_ms: float | None = None  # predicted for a prompt of the given length, its queue included
    tpot_ms: float | None = None
    context_tokens_max: int | None = None
    output_tokens_max: int | None = None
    engine: EngineLoad | None = None  # all that a local engine tells of itself, for who looks after it

    @property
    def why(self) -> str:
        """Why it is not ready, in full: for who looks after it."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class ChunkStream(Protocol):
    """An answer on its way: each read gives all chunks that have come since the last one, at least one.

    `aclose` may be called at any time, also before the first `anext`, and frees everything upstream.
    """

    def __aiter__(self) -> AsyncIterator[list[Chunk]]: ...
    async def __anext__(self) -> list[Chunk]: ...
    async def aclose(self) -> None: ...


class Backend(Protocol):
    """One deployment. `stream` connects lazily: errors come out of the first `anext`."""

    name: str
    capabilities: frozenset[str]

    async def start(self) -> None: ...
    def stream(self, request: BackendRequest) -> ChunkStream: ...
    def load(self, prompt_tokens: int) -> Load: ...
    async def aclose(self) -> None: ...


class BackendError(Exception):
    """A deployment did not do what it was asked. `message` is fit for a client; details go to the log through `detail`."""

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        status: int | None = None,
        body: bytes | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or message
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s


class BackendUnavailable(BackendError):
    """No connection, a 5xx, a dead or loading process."""


class BackendOverloaded(BackendError):
    """The deployment asks to be left alone for a while (429, a full queue)."""


class BackendTimeout(BackendError):
    """No first chunk within its budget, or silence inside the stream."""


class BackendRejected(BackendError):
    """The request itself is at fault; `status` and `body` (an OpenAI error object) are the deployment's own."""


class BackendBroken(BackendError):
    """The stream ended without a finish reason."""
