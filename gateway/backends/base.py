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

from local_engine import EngineLoad


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Tokens of one generation, as its backend counted them; a local engine's guesses by their source."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    drafted_tokens: dict[str, int] | None = None
    accepted_tokens: dict[str, int] | None = None


class Kind(msgspec.Struct, frozen=True):
    """What is asked for: a chat's next message, or a text's continuation. All that differs on the journey is here."""

    name: str  # in records
    path: str  # on OpenAI-compatible servers
    prompt: str  # the field that is answered
    # how long an answer becomes where its caller does not say; None: as long as it takes, and one that was cut is not whole
    output_tokens_default: int | None = None


CHAT = Kind("chat", "/chat/completions", "messages")
COMPLETION = Kind("text_completion", "/completions", "prompt", 16)


def prompts_of(body: dict[str, Any]) -> list[str | list[int]]:
    """A completion's prompts, of which there may be one or many: each a text or token ids."""
    given = body["prompt"]
    return given if isinstance(given, list) and not isinstance(given[0], int) else [given]


class Chunk(msgspec.Struct, frozen=True, gc=False):
    """One piece of an answer: `data` is the JSON of a `chat.completion.chunk`, or of a whole `chat.completion`; of a completion
    either is a `text_completion`. Chunks that came together and differ in their one text alone are one piece: `count` of them,
    each on a line of `data`.

    The other fields are what a light parse found, so that nobody parses `data` again on the way to the client.
    """

    data: bytes
    is_whole: bool = False  # data is one complete answer
    has_content: bool = False  # some delta that a person would see; time to first token counts to here
    finish_reasons: tuple[str, ...] = ()
    usage: Usage | None = None
    is_usage_only: bool = False  # `choices: []`: sent on only to clients that asked for usage
    count: int = 1

    def each(self) -> list[bytes]:
        """The JSON of each chunk in this piece."""
        return [self.data] if self.count == 1 else self.data.split(b"\n")


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
