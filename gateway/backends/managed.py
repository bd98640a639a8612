"""Managed providers through litellm, for protocols other than OpenAI's.

The only file that imports litellm, and only once a deployment needs it: `start` imports it in a
thread, in two seconds, and the deployment is unready until then. Knows no teams, caches or routes.
Invariants: those of base.py, and two more. A finish reason that litellm made up, because the
provider's stream stopped, is never passed on. A request cannot set litellm's key, address or
settings: litellm reads only the fields in `_FIELDS`.

Known limits: litellm fills in a missing finish reason of a whole answer, so it cannot be detected,
and errors inside a stream have no status. litellm loses finishes in streams of several choices, so
those are requested whole.
"""

import asyncio
import contextlib
import functools
import json
import logging
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec

from cache.event_loop import is_own_want
from gateway.backends import base
from gateway.backends.dialect import Dialect, dialect_of
from gateway.backends.fitting import IDLE, check
from gateway.backends.keys import Keys
from gateway.backends.refusals import UpstreamRefusal, error_body, error_fields, refusal, retry_after_s, scrubbed, unfit
from gateway.exceptions import let_go
from gateway.wire.chunks import FinishTracker, to_chunk, with_pairs
from gateway.wire.plain import chunk_of
from gateway.wire.reader import PieceReader, Read
from gateway.wire.types import EMBEDDING, RERANK, Chunk
from gateway.wire.usage import count_of
from policies.durations import duration_s

# Fields that are passed to litellm: OpenAI's, and sampling parameters that providers share. With
# others a request could set `api_base` and receive our key.
# fmt: off
_FIELDS = frozenset({
    "messages", "functions", "function_call", "temperature", "top_p", "n", "stop", "max_tokens", "max_completion_tokens",
    "modalities", "prediction", "audio", "presence_penalty", "frequency_penalty", "logit_bias", "user", "response_format",
    "seed", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs", "reasoning_effort", "verbosity",
    "safety_identifier", "service_tier", "store", "prompt_cache_key", "web_search_options",
    "thinking", "top_k", "min_p", "repetition_penalty",
})
# fmt: on
_PLAIN_FIELDS = frozenset(
    {"input", "dimensions", "encoding_format", "user", "query", "documents", "top_n", "return_documents"}
)
_PLAIN_CALLS = {EMBEDDING: "aembedding", RERANK: "arerank"}
_OWN_FIELDS = frozenset({"cache", "model", "stream", "stream_options", "metadata"})
_CREDENTIALS = frozenset({"azure_ad_token"})  # litellm takes it out of `extra_body` and uses it

_import_lock = threading.Lock()

# pydantic warns of litellm's own types, dozens of times. litellm filters these during its import,
# but another thread that leaves `catch_warnings` meanwhile restores the filters. So: once, before.
warnings.filterwarnings("ignore", message=".*`ReadOnly` qualifier", category=UserWarning, module="pydantic")


def _import() -> Any:
    """Import litellm, silence it and run `_rehearse`. Takes seconds: call it in a thread."""
    with _import_lock:
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # no download of the table
        import litellm

        litellm.telemetry = False
        litellm.suppress_debug_info = True
        logging.getLogger("LiteLLM").setLevel(logging.CRITICAL)  # the gateway logs its failures
        _unlink_closed_responses()
        _keep_cached_sounds()
        asyncio.run(_rehearse(litellm))
        return litellm


@functools.cache
def _unlink_closed_responses() -> None:
    """Patch httpx to drop a stream's reference to its response on close.

    A response references its stream and its request, so that each request's body would stay in
    memory until a collection. httpx 0.28 has no public way.
    """
    from httpx import _client

    close = _client.BoundAsyncStream.aclose

    async def aclose(self: Any) -> None:
        if self._response is not None:
            await close(self)
            self._response = None

    _client.BoundAsyncStream.aclose = aclose  # type: ignore[method-assign]


@functools.cache
def _keep_cached_sounds() -> None:
    """Keep the count of cached audio tokens in Gemini's usage: they cost more than text tokens.

    litellm reads the counts by kind, prices them elsewhere by this field, and omits it here. A
    usage of another shape, which would raise there, loses its unreadable parts.
    """
    from litellm.llms.vertex_ai.gemini.vertex_and_google_ai_studio_gemini import VertexGeminiConfig
    from litellm.types.llms.openai import CachedTokensDetails

    count = VertexGeminiConfig._calculate_usage

    def counted(completion_response: Any) -> Any:
        given = completion_response.get("usageMetadata")
        counts = {name: _readable(name, value) for name, value in given.items()} if isinstance(given, dict) else {}
        completion_response["usageMetadata"] = counts  # litellm reads more of it later
        usage = count(completion_response)
        kinds = counts.get("cacheTokensDetails", ())
        sounds = sum(kind["tokenCount"] for kind in kinds if kind.get("modality") == "AUDIO")
        usage.prompt_tokens_details.cached_tokens_details = CachedTokensDetails(audio_tokens=sounds)
        return usage

    VertexGeminiConfig._calculate_usage = staticmethod(counted)


def _readable(name: str, value: Any) -> Any:
    """A count of Gemini's usage, or the list of its counts by kind; other fields stay unchanged."""
    if name.endswith("Details"):
        kinds = [kind for kind in value if isinstance(kind, dict)] if isinstance(value, list) else []
        return [
            {**kind, "tokenCount": count_of(kind.get("tokenCount", kind.get("token_count"))) or 0} for kind in kinds
        ]
    return count_of(value) or 0 if name.endswith("Count") else value


async def _rehearse(litellm: Any) -> None:
    """Send a request to a closed local port, and read one of litellm's mock streams.

    Loads its lazy imports, type hints and tokenizer (0.7 s) here and not on the event loop.
    """
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        request: dict[str, Any] = {
            "model": "openai/gpt-4o",
            "messages": [{"role": "user", "content": "?"}],
            "api_base": f"http://127.0.0.1:{bound.getsockname()[1]}/v1",
            "api_key": "none",
            "max_retries": 0,
        }
        for is_stream in (False, True):
            with contextlib.suppress(litellm.exceptions.InternalServerError, litellm.exceptions.APIConnectionError):
                await litellm.acompletion(**request, stream=is_stream)
        options = {"stream_options": {"include_usage": True}, "mock_response": "an answer"}
        async for _ in await litellm.acompletion(**request, stream=True, **options):
            pass


@functools.lru_cache(maxsize=64)
def _taken(litellm: Any, model: str) -> frozenset[str]:
    """The fields that litellm passes to the provider of `model`; all of `IDLE` without a list."""
    name, provider = litellm.get_llm_provider(model)[:2]
    return frozenset(litellm.get_supported_openai_params(model=name, custom_llm_provider=provider) or IDLE)


@functools.cache
def _spoken(provider: str) -> Dialect:
    return dialect_of("litellm", "", f"{provider}/")


@dataclass(eq=False, repr=False)
class ManagedBackend:
    """One deployment at a managed provider. `model` is litellm's name, like `anthropic/claude-...`."""

    name: str
    _: KW_ONLY
    model: str
    capabilities: frozenset[str]
    keys: Keys = field(default_factory=Keys)
    base_url: str | None = None
    headers: Mapping[str, str] | None = None
    unready: str = ""
    wall_clock: Callable[[], float] = time.time
    running: int = 0
    _importing: asyncio.Task[Any] | None = None

    async def start(self) -> None:
        """Begin the import of litellm; the deployment is ready after it."""
        if self._importing is None and not self.unready:
            self._importing = asyncio.create_task(asyncio.to_thread(_import), name="import-litellm")
            self._importing.add_done_callback(self._imported)

    def _imported(self, task: "asyncio.Task[Any]") -> None:
        if not task.cancelled() and task.exception() is not None:
            self.unready = f"litellm can't be used: {task.exception()}"

    async def aclose(self) -> None:
        if self._importing is not None:
            self._importing.cancel()  # the thread runs to its end
            self._importing = None

    def stream(self, request: base.BackendRequest) -> "ManagedStream":
        return ManagedStream(self, request)

    def load(self, prompt_tokens: int) -> base.Load:
        is_imported = self._importing is not None and self._importing.done()
        reason = self.unready or self.keys.problem or ("" if is_imported else "litellm is being loaded")
        return base.Load(
            is_ready=not reason, reason=reason, detail=self.keys.names if reason else "", running=self.running
        )

    async def library(self) -> Any:
        """Wait for the import and return litellm. Raises BackendUnavailable."""
        await self.start()
        if self._importing is not None:
            await asyncio.wait([self._importing])
        if (reason := self.unready or self.keys.problem) or self._importing is None:
            raise base.BackendUnavailable(f"The deployment is not ready: {reason}")
        return self._importing.result()

    def arguments(
        self, request: base.BackendRequest, litellm: Any, is_stream: bool, api_key: str = ""
    ) -> dict[str, Any]:
        """The arguments of litellm.acompletion, or of the function for a plain request.

        They include the body's known fields, and a generation's unknown fields if the provider
        speaks OpenAI's protocol. Raises BackendUnfit with a field that the provider lacks or
        litellm cannot send.
        """
        body = request.prefilled if request.prefix else request.body
        fields = _PLAIN_FIELDS if request.kind.is_plain else _FIELDS
        arguments = {name: value for name, value in body.items() if name in fields and value is not None}
        known = _FIELDS | _OWN_FIELDS | _CREDENTIALS | arguments.keys()
        unknown = {name: value for name, value in body.items() if name not in known and value is not None}
        if unknown and self._speaks_openai(litellm) and not request.kind.is_plain:
            arguments["extra_body"] = unknown
        elif lacking := unknown.keys() - {"prompt_cache_retention"}:
            raise unfit(f"`{min(lacking)}` is not supported by this model's API", min(lacking))
        if is_stream:
            arguments["stream_options"] = {"include_usage": True}
        if api_key:
            arguments["api_key"] = api_key
        if self.base_url:
            arguments["api_base"] = self.base_url
        if self.headers or request.trace:
            arguments["extra_headers"] = {**dict(request.trace), **(self.headers or {})}
        if not request.kind.is_plain:
            taken = _taken(litellm, request.model or self.model)
            check(arguments, IDLE.keys() - taken)
            arguments |= {
                "stream": is_stream,
                "_skip_mcp_handler": True,
            }  # tools would import a package that is not there
        return {
            **arguments,
            "model": request.model or self.model,
            "timeout": request.ttft_timeout_s + request.idle_timeout_s if is_stream else request.whole_timeout_s,
            "max_retries": 0,  # the gateway does the failover
            "num_retries": 0,
            "drop_params": not request.kind.is_plain,  # drops fields that the provider lacks; not `dimensions`
        }

    def _speaks_openai(self, litellm: Any) -> bool:
        provider: str = litellm.get_llm_provider(self.model)[1]
        return _spoken(provider).is_openai_like or provider in litellm.openai_compatible_providers

    def translated(self, error: Exception, litellm: Any, has_output: bool, api_key: str = "") -> base.BackendError:
        """The error of base.py for a litellm error. Inside a stream all errors are BackendBroken."""
        original = getattr(error, "original_exception", None)
        if isinstance(error, litellm.exceptions.MidStreamFallbackError) and isinstance(original, Exception):
            error = original
        detail = scrubbed(f"{type(error).__name__}: {error}"[:1000], api_key)
        if is_own_want(error):
            return base.BackendNotAsked(detail)
        if isinstance(error, litellm.exceptions.Timeout):
            return base.BackendTimeout("The deployment did not answer in time", detail=detail)
        if has_output:
            return base.BackendBroken("The deployment's answer broke off", detail=detail)
        if isinstance(error, litellm.exceptions.APIConnectionError):
            return base.BackendUnavailable("The deployment cannot be reached", detail=detail)
        status = getattr(error, "status_code", None)
        if not isinstance(status, int):
            return base.BackendUnavailable("The deployment failed", detail=detail)
        headers = getattr(error, "litellm_response_headers", None) or {}
        after_s = retry_after_s(headers, self.wall_clock())
        translated = refusal(UpstreamRefusal(status, _body(error, litellm), after_s, api_key))
        if not isinstance(translated, base.BackendRejected):
            translated.detail = detail
        return translated


class ManagedStream:
    """A running answer; see base.ChunkStream."""

    def __init__(self, backend: ManagedBackend, request: base.BackendRequest) -> None:
        self._backend = backend
        self._request = request
        self._is_stream = request.is_stream and request.choices == 1
        self._answer = PieceReader(request.request_id.removeprefix("req_"), request.body.get("tools"))
        self._finishes = FinishTracker(request.choices)
        self.api_key = ""
        self._litellm: Any = None  # set once the provider has the request
        self._source: Any = None  # litellm's stream
        self._whole: Chunk | None = None
        self._waiting: asyncio.Timeout | None = None
        self._has_output = False
        self._is_over = False
        self._is_finished = False

    def __aiter__(self) -> "ManagedStream":
        return self

    async def __anext__(self) -> list[Chunk]:
        if self._is_finished:
            raise StopAsyncIteration
        if self._is_over:
            raise _given_up()
        try:
            if self._litellm is None:
                await self._begin()
            chunks: list[Chunk] | None = []
            while chunks == []:
                chunks = await self._next()
        except BaseException:
            await self.aclose()
            raise
        if chunks is None:
            self._is_finished = True
            await self.aclose()
            raise StopAsyncIteration
        self._has_output = True
        return chunks

    async def aclose(self) -> None:
        """Close the provider's connection, or stop waiting for it."""
        if not self._is_over:
            self._is_over = True
            if self._litellm is not None:
                self._backend.running -= 1
        if self._waiting is not None:
            self._waiting.reschedule(0.0)
        source, self._source = self._source, None
        if source is not None:
            await source.aclose()

    async def _begin(self) -> None:
        litellm = await self._backend.library()
        if self._is_over:
            raise _given_up()
        self._litellm = litellm
        self._backend.running += 1
        call = getattr(litellm, _PLAIN_CALLS.get(self._request.kind, "acompletion"))
        reply = None
        while reply is None:
            self.api_key = self._backend.keys.take()
            arguments = self._backend.arguments(self._request, litellm, self._is_stream, self.api_key)
            try:
                reply = await self._bounded(call(**arguments))
            except base.BackendDenied as refused:
                if not self._backend.keys.refused(self, refused):
                    raise
        if self._is_stream:
            self._source = reply
        elif self._request.kind.is_plain:
            self._whole = chunk_of(_encoded(reply.model_dump(exclude_none=True)))
        else:
            self._whole = _whole(reply, self._answer, self._finishes)

    async def _next(self) -> list[Chunk] | None:
        """The next chunks, if any; None after the finish."""
        if not self._is_stream:
            whole, self._whole = self._whole, None
            return None if whole is None else [whole]
        source = self._source
        piece = await self._bounded(anext(source, None))
        if piece is not None:
            if _has_invented_finish(piece, source):
                raise base.BackendBroken("The deployment's answer ended before its finish")
            return _chunks(self._answer.read(_payload(piece, source.custom_llm_provider)), self._finishes)
        if left := self._answer.rest():
            return _chunks(left, self._finishes)
        if not self._finishes.is_complete:
            raise base.BackendBroken("The deployment's answer ended before its finish")
        return None

    async def _bounded(self, awaitable: Any) -> Any:
        """Await litellm within the time-outs, and translate its errors."""
        request = self._request
        timeout_s = request.idle_timeout_s if self._has_output else request.ttft_timeout_s
        if not self._is_stream:
            timeout_s = request.whole_timeout_s
        try:
            async with asyncio.timeout(timeout_s) as self._waiting:
                return await awaitable
        except TimeoutError as error:
            if self._is_over:
                raise _given_up() from None
            if is_own_want(error):
                raise base.BackendNotAsked(f"no connection within {duration_s(timeout_s)}") from None
            what = "fell silent inside its answer" if self._has_output else "sent nothing"
            raise base.BackendTimeout(f"The deployment {what} within {duration_s(timeout_s)}") from None
        except Exception as error:  # litellm passes on the errors of its providers' clients
            raise self._translated(error) from None
        finally:
            self._waiting = None

    def _translated(self, error: Exception) -> base.BackendError:
        """The error of base.py for a litellm error, whose frames are cleared: they reference each
        other.
        """
        translated = self._backend.translated(error, self._litellm, self._has_output, self.api_key)
        let_go(error)
        return translated


def _given_up() -> base.BackendBroken:
    return base.BackendBroken("The answer was given up")


# -- out


def _has_invented_finish(piece: Any, source: Any) -> bool:
    """Whether litellm invented a finish reason, because the provider's stream stopped."""
    if not any(getattr(choice, "finish_reason", None) for choice in piece.choices):
        return False
    return source.received_finish_reason is None and source.intermittent_finish_reason is None


def _payload(piece: Any, provider: str) -> bytes:
    fields = piece.model_dump(exclude_none=True)
    if not _spoken(provider).reports_cost:  # it would be litellm's own estimate
        fields.get("usage", {}).pop("cost", None)
    for choice in fields["choices"]:
        _tidy(choice)
        _tidy(choice.setdefault("delta", {}))
        choice.setdefault("finish_reason", None)
    if "usage" in fields and not any(c["delta"] or c["finish_reason"] for c in fields["choices"]):
        fields["choices"] = []
    return _encoded(fields)


def _chunks(pieces: Iterable[Read], finishes: FinishTracker) -> list[Chunk]:
    chunks = []
    for data, answer in pieces:
        finishes.add(answer)
        chunks.append(to_chunk(data, answer))
    return chunks


def _whole(reply: Any, reader: PieceReader, finishes: FinishTracker) -> Chunk:
    fields = reply.model_dump(exclude_none=True)
    for choice in fields["choices"]:
        _tidy(choice)
        message = choice["message"]
        _tidy(message)
        message.setdefault("content", None)
        choice.setdefault("logprobs", None)
    data, answer = reader.whole(_encoded(fields))
    finishes.add(answer)
    if not finishes.is_finished:
        raise base.BackendBroken("The deployment's answer ended before its finish")
    return to_chunk(data, answer, is_whole=True)


def _encoded(fields: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(fields, enc_hook=str)
    except UnicodeEncodeError:
        return with_pairs(json.dumps(fields, default=str).encode())


def _tidy(fields: dict[str, Any]) -> None:
    """Remove the field `provider_specific_fields` if it has no value."""
    own = fields.pop("provider_specific_fields", None)
    if own and any(value is not None for value in own.values()):
        fields["provider_specific_fields"] = own


def _object_in(text: str) -> bytes:
    """The JSON object that fills `text`, also if litellm printed its bytes: `b'{...}'`."""
    before, brace, rest = text.partition("{")
    object_text = f"{brace}{rest[: rest.rfind('}') + 1]}"
    match before.strip():
        case "":
            return object_text.encode()
        case "b'" | 'b"':
            return object_text.replace("\\'", "'").replace("\\\\", "\\").encode()
    return b""


def _body(error: Exception, litellm: Any) -> bytes:
    """The provider's error object, rebuilt from the parts that litellm kept."""
    fields = getattr(error, "body", None)
    fields = fields if isinstance(fields, dict) else {}
    message = fields.get("message")
    if not isinstance(message, str):
        # "litellm.BadRequestError: OpenAIException - the provider's own words, or its error object"
        message = str(getattr(error, "message", error)).rpartition("Exception - ")[2].removeprefix("litellm.")
        fields = error_fields(_object_in(message)) or fields
        message = str(fields.get("message") or message)
    code = fields.get("code")
    if isinstance(error, litellm.exceptions.ContextWindowExceededError):
        code = "context_length_exceeded"
    elif isinstance(error, litellm.exceptions.ContentPolicyViolationError):
        code = "content_policy_violation"
    return error_body(message, fields.get("type"), fields.get("param"), code)
