"""The interface to all generators: `Backend.stream(request)`, an async iterator of chunks.

A backend knows one deployment, and no teams, money or caches. Each backend translates its errors
into this tree in its own file; refusals.py maps the statuses that several backends share.

    BackendError                    message for the client, details for the log
    ├── BackendUnavailable          no connection, a 5xx, a dead process: another deployment may do better
    │   └── BackendNotAsked         this host lacked what a connection needs: no evidence about the deployment
    ├── BackendOverloaded           429 or a full queue; `retry_after_s` where the upstream gave it
    ├── BackendTimeout              no first chunk in time, or silence inside the stream
    ├── BackendRejected             400, 413 or 422: the request is at fault, and a retry is useless
    │   └── BackendUnfit            this deployment cannot do it; another may
    │       └── BackendTooLong      it does not fit this deployment's context; `context_tokens` if known
    ├── BackendDenied               401 to 405, 409, 410 or 451: a retry here is useless, another
    │                               deployment may do better; `mark` if it also denies other requests
    └── BackendBroken               the stream ended without its finish: never a finished answer

Invariant: a stream ends after its finish reason, or raises.
"""

from collections.abc import AsyncIterator, Mapping
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from gateway.backends.dialect import Dialect
from gateway.wire.forms import FormFiles
from gateway.wire.types import CHAT, COMPLETION, Chunk, Kind, prompts_of
from local_engine import EngineLoad


class Native(msgspec.Struct, frozen=True):
    """A request as a client of Anthropic's API sent it, for deployments with that API.

    `raw` is its body; `version` and `betas` are the headers `anthropic-version` and
    `anthropic-beta`. `media` of its parts may have more tokens than bytes. `apart` holds the parts
    that its chat completion lacks and that divide the cache; None: it lacks nothing. `tokens_max`
    replaces the length of the answer. `are_calls_bound`: its tools get limits.
    """

    raw: bytes
    version: str = ""
    betas: str = ""
    apart: Any = None
    media: int = 0
    is_needed: bool = False  # no chat completion says the same
    tokens_max: int | None = None
    are_calls_bound: bool = False


class Passage(msgspec.Struct, frozen=True):
    """The address of a request to a provider's own path, below the deployment's `base_url`.

    `path`, `query` and `headers` have been checked. `is_counted`: the request costs the tokens that
    its answer reports.
    """

    method: str
    path: str
    query: str
    headers: tuple[tuple[str, str], ...]
    is_counted: bool


class BackendRequest(msgspec.Struct, frozen=True):
    """A request to a backend: the validated body, without the gateway's own extensions."""

    body: dict[str, Any]
    is_stream: bool  # how the first client reads; the answer may have either form
    salt: bytes  # the partition: no other one shares its KV blocks
    request_id: str
    ttft_timeout_s: float
    idle_timeout_s: float
    # to a whole answer, which has no bytes until it is complete; the official SDKs wait this long by default
    whole_timeout_s: float = 600.0
    draft: str = ""  # a text that may share passages with the answer; engines verify it
    kind: Kind = CHAT
    model: str = ""  # the provider's name of the model, where the deployment takes every name
    native: Native | None = None
    passage: Passage | None = None  # where it goes, if not to the path of its kind
    upload: FormFiles | None = None  # the files of a form, whose fields are the body
    trace: tuple[tuple[str, str], ...] = ()  # headers, which the deployment's own precede
    prefix: str = ""  # the beginning of the answer, which a deployment with `prefill` goes on with
    dialect: Dialect = Dialect()
    names: Mapping[str, str] = {}  # the client's names of tools, by those in the body

    @property
    def prefilled(self) -> dict[str, Any]:
        """The body for a server that continues the `prefix`: it is the last message, or ends the
        prompt.

        The prefix loses its trailing white space, because some servers refuse it.
        """
        prefix = self.prefix.rstrip()
        if self.kind is not CHAT:
            return {**self.body, "prompt": prompts_of(self.body)[0] + prefix}  # type: ignore[operator]  # a text
        message = {"role": "assistant", "content": prefix, "prefix": True}
        return {**self.body, "messages": [*self.body["messages"], message]}

    @property
    def choices(self) -> int:
        """The number of choices of the answer."""
        return (self.body.get("n") or 1) * self.prompts

    @property
    def prompts(self) -> int:
        """The number of prompts."""
        return len(prompts_of(self.body)) if self.kind is COMPLETION else 1


class Load(msgspec.Struct, frozen=True):
    """The state of a backend, for routing; unknown values are None."""

    is_ready: bool = True
    reason: str = ""
    detail: str = ""  # more of the reason, for operators only: it may name files
    is_starting: bool = False  # not ready yet, and worth waiting for
    running: int = 0
    waiting: int = 0
    ttft_ms: float | None = None  # predicted for a prompt of the given length, its queue included
    tpot_ms: float | None = None
    context_tokens_max: int | None = None
    output_tokens_max: int | None = None
    may_think: bool = False  # a local engine's model has thinking blocks
    engine: EngineLoad | None = None  # the state of a local engine, for operators

    @property
    def why(self) -> str:
        """The full reason for unreadiness, for operators."""
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


class ChunkStream(Protocol):
    """A running answer: each read returns all chunks since the last read, at least one.

    `aclose` may be called at any time, also before the first `anext`, and frees everything
    upstream.
    """

    def __aiter__(self) -> AsyncIterator[list[Chunk]]: ...
    async def __anext__(self) -> list[Chunk]: ...
    async def aclose(self) -> None: ...


class Backend(Protocol):
    """One deployment. `stream` connects lazily: the first `anext` raises its errors."""

    name: str
    capabilities: frozenset[str]

    async def start(self) -> None: ...
    def stream(self, request: BackendRequest) -> ChunkStream: ...
    def load(self, prompt_tokens: int) -> Load: ...
    async def aclose(self) -> None: ...


class BackendError(Exception):
    """The base of a backend's errors. `message` is written for clients; `detail` is for the log."""

    def __init__(
        self,
        message: str,
        *,
        detail: str = "",
        status: int | None = None,
        body: bytes | None = None,
        retry_after_s: float | None = None,
        is_final: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail or message
        self.status = status
        self.body = body
        self.retry_after_s = retry_after_s
        self.is_final = is_final  # it would answer the same again


class BackendUnavailable(BackendError):
    """No connection, a 5xx, a dead or loading process."""


class BackendNotAsked(BackendUnavailable):
    """The host lacked descriptors, ports, memory or a resolver's answer: no deployment is at fault."""

    def __init__(self, detail: str) -> None:
        message = "The gateway's host lacks what a connection needs (open files, ports, or an answer of its resolver)"
        super().__init__(message, detail=detail)


class BackendOverloaded(BackendError):
    """A 429, or a full queue: the deployment needs a pause. `limits` are the provider's headers of its limits."""

    limits: Mapping[str, str] = {}


class BackendTimeout(BackendError):
    """No first chunk within its budget, or silence inside the stream."""


class BackendRejected(BackendError):
    """The request is at fault; the deployment sent `status` and `body` (an OpenAI error object)."""

    @property
    def param(self) -> str | None:
        """The field that the deployment named; None without one."""
        param: str | None = msgspec.json.decode(self.body)["error"]["param"] if self.body else None
        return param


class BackendUnfit(BackendRejected):
    """The deployment cannot do what the request needs; another deployment may."""


class BackendTooLong(BackendUnfit):
    """The request does not fit the deployment's context.

    `context_tokens` is that context's size, if the deployment reported it.
    """

    context_tokens: int | None = None


class Mark(StrEnum):
    """The cause of a denial that also hits other requests, until a person mends it."""

    KEY = "key refused"
    CREDIT = "no credit"
    MODEL = "no such model there"
    ABSENT = "not found there"


class BackendDenied(BackendError):
    """A permanent refusal for which the request's form is not at fault.

    `mark` is None if the refusal concerns this request alone.
    """

    mark: Mark | None = None


class BackendBroken(BackendError):
    """The stream ended without a finish reason."""
