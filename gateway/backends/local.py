"""The engine below, spoken to over its socket: OpenAI's parameters in, `chat.completion.chunk`s out.

Knows the engine's messages and no torch. What the engine has no notion of (images, tool calls to parse, grammars) is
refused, not ignored; routing should not have sent it here. Shapes: OpenAI API reference, "The chat completion chunk
object". Invariant: every choice begins with its role, ends with its finish, and the usage chunk comes last.
"""

import asyncio
import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

import local_engine
from gateway.backends.base import (
    BackendBroken,
    BackendError,
    BackendOverloaded,
    BackendRejected,
    BackendRequest,
    BackendTimeout,
    BackendUnavailable,
    Chunk,
    Load,
    Usage,
)
from gateway.backends.refusals import error_body
from gateway.backends.suspects import Suspects
from local_engine import (
    AsyncEngine,
    EngineLoad,
    GenerateRequest,
    Generation,
    ModelInfo,
    Output,
    SamplingParams,
    TokenLogprob,
)

_LOGPROB_MIN = -9999.0  # what OpenAI sends for "never"; JSON has no infinity
_SEED_MASK = (1 << 63) - 1
_PRIORITY_FLEX = 1  # OpenAI's tier for work that can wait: after everybody else's
_TOP_P_MIN = 1e-6  # OpenAI allows 0 and means the likeliest token

_encode = msgspec.json.encode


class _Parameters(msgspec.Struct):
    """The fields of a chat request that the engine acts on; vLLM's names for what OpenAI does not have."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_COMES_BACK_S = 30.0  # a process that is not there yet, or died, is started again within this or not at all
_STARTS_FAILED_MAX = 3  # one that dies again and again before it is ready is not on its way


class LocalBackend:
    """One deployment on a local engine. `model` is the alias that answers name as their model."""

    def __init__(
        self,
        name: str,
        *,
        socket_path: Path,
        model: str,
        capabilities: frozenset[str],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.model = model
        self.capabilities = capabilities
        self.engine = AsyncEngine(socket_path)
        self.wall_clock = wall_clock
        self.suspects = Suspects(time.monotonic)
        self._away_since: float | None = time.monotonic()

    def _why_not_ready(self, now: EngineLoad) -> str:
        ended = self.engine.ended
        if now.is_connected:
            reason = "" if now.is_ready else f"the model is loading: {round(100 * now.progress)}% ({now.stage})"
            return f"{reason}; before that it ended: {ended.why}" if reason and ended else reason
        if ended is None:
            return "the engine's process is not there"
        return f"the engine's process ended{' and is not started again' if ended.is_final else ''}: {ended.why}"

    def _is_coming(self) -> bool:
        """Of an engine that is not ready: whether it is worth waiting for."""
        engine = self.engine
        if engine.starts_failed >= _STARTS_FAILED_MAX or (engine.ended is not None and engine.ended.is_final):
            return False
        return self._away_since is None or time.monotonic() - self._away_since < _COMES_BACK_S

    async def start(self) -> None:
        """Connect, and keep connecting: an engine that is not there yet is an unready deployment, not an error."""
        await self.engine.connect()

    async def aclose(self) -> None:
        await self.engine.close()

    def stream(self, request: BackendRequest) -> "LocalStream":
        return LocalStream(self, request)

    def load(self, prompt_tokens: int) -> Load:
        now = self.engine.load()
        info = self.engine.info
        if now.is_connected:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
        return Load(
            is_ready=now.is_ready,
            reason=self._why_not_ready(now),
            is_starting=not now.is_ready and self._is_coming(),
            running=now.running,
            waiting=now.waiting,
            ttft_ms=now.predicted_ttft_ms(prompt_tokens),
            tpot_ms=now.decode_ms_per_token or None,
            context_tokens_max=info.context_tokens if info else None,
            output_tokens_max=info.context_tokens if info else None,
        )


class LocalStream:
    """One answer on its way; see base.ChunkStream."""

    def __init__(self, backend: LocalBackend, request: BackendRequest) -> None:
        self._backend = backend
        self._request = request
        self._generation: Generation | None = None
        self._ready: list[Chunk] = []
        self._writer: _Writer | None = None
        self._suspect: bytes | None = None
        self._has_output = False
        self._is_over = False
        self._is_finished = False

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> list[Chunk]:
        if not self._ready:
            if self._is_over:
                if self._is_finished:
                    raise StopAsyncIteration
                raise BackendBroken("The answer was given up")
            try:
                await self._fill()
            except BaseException:
                await self.aclose()
                raise
        ready, self._ready = self._ready, []
        return ready

    async def aclose(self) -> None:
        """Abort in the engine what has not finished; its blocks are free by the engine's next step."""
        self._ready.clear()
        self._is_over = True
        self._backend.suspects.passed(self._suspect)
        if self._generation is not None:
            await self._generation.aclose()

    async def _fill(self) -> None:
        if self._generation is None:
            asked = engine_request(self._request)
            self._suspect = await self._backend.suspects.admit(self._request)
            self._generation = self._backend.engine.generate(asked)
            self._writer = _Writer(self._backend, self._request)
        assert self._writer is not None
        request = self._request
        timeout_s = request.idle_timeout_s if self._has_output else request.ttft_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                output = await anext(self._generation)
        except TimeoutError:
            what = "fell silent inside its answer" if self._has_output else "sent nothing"
            raise BackendTimeout(f"The local engine {what} within {timeout_s:g} s") from None
        except local_engine.EngineError as error:
            if isinstance(error, local_engine.EngineUnavailable) and error.is_death:
                self._backend.suspects.died(self._request)
            raise _translated(error, self._has_output) from None
        except StopAsyncIteration:
            self._end()
            return
        if not self._has_output:
            self._has_output = True
            self._backend.suspects.passed(self._suspect)
        if output.finish_reason == "abort":
            raise BackendBroken("The local engine gave its answer up")
        self._ready.extend(self._writer.chunks(output))

    def _end(self) -> None:
        assert self._generation is not None
        assert self._writer is not None
        usage = self._generation.usage
        if usage is None:
            raise BackendBroken("The local engine's answer ended before its finish")
        self._ready.append(self._writer.usage(usage))
        self._is_over = self._is_finished = True
        self._backend.suspects.cleared(self._suspect)


class _Writer:
    """Writes chunks around a head that is encoded once."""

    def __init__(self, backend: LocalBackend, request: BackendRequest) -> None:
        head = {
            "id": f"chatcmpl-{request.request_id}",
            "object": "chat.completion.chunk",
            "created": int(backend.wall_clock()),
            "model": backend.model,
            "system_fingerprint": _fingerprint(backend.engine.info),
        }
        self._head = _encode(head)[:-1] + b',"choices":['
        self._begun: set[int] = set()

    def chunks(self, output: Output) -> list[Chunk]:
        """The chunks of one piece of one choice: its role before the first, then its text, then its finish."""
        written = []
        if output.index not in self._begun:
            self._begun.add(output.index)
            written.append(self._chunk(output.index, b'{"role":"assistant","content":"","refusal":null}'))
        if output.text or output.logprobs:
            logprobs = _logprobs(output.logprobs) if output.logprobs else b"null"
            delta = b'{"content":' + _encode(output.text) + b"}"
            written.append(self._chunk(output.index, delta, logprobs, has_content=bool(output.text)))
        if output.finish_reason is not None:
            written.append(self._chunk(output.index, b"{}", finish_reason=output.finish_reason))
        return written

    def _chunk(
        self,
        index: int,
        delta: bytes,
        logprobs: bytes = b"null",
        *,
        has_content: bool = False,
        finish_reason: str | None = None,
    ) -> Chunk:
        finish = b'"%b"' % finish_reason.encode() if finish_reason else b"null"
        data = b'%b{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":%b}]}' % (
            self._head,
            index,
            delta,
            logprobs,
            finish,
        )
        return Chunk(data, has_content=has_content, finish_reasons=(finish_reason,) if finish_reason else ())

    def usage(self, usage: local_engine.Usage) -> Chunk:
        counts = {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        }
        found = Usage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens,
            usage.drafted_tokens or None,
            usage.accepted_tokens or None,
        )
        return Chunk(self._head + b'],"usage":' + _encode(counts) + b"}", usage=found, is_usage_only=True)


def _logprobs(tokens: tuple[TokenLogprob, ...]) -> bytes:
    entries = [{**_logprob(token), "top_logprobs": [_logprob(top) for top in token.top]} for token in tokens]
    return _encode({"content": entries, "refusal": None})


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.text, "logprob": max(token.logprob, _LOGPROB_MIN), "bytes": list(token.raw)}


def _fingerprint(info: ModelInfo | None) -> str:
    """What OpenAI calls system_fingerprint: equal while model and numerics are."""
    facts = (info.name, info.architecture, info.parameters, info.dtype, info.device) if info else ()
    return "fp_" + hashlib.blake2b(repr(facts).encode(), digest_size=5).hexdigest()


# -- in ----------------------------------------------------------------------------------------------------------------


def engine_request(request: BackendRequest) -> GenerateRequest:
    """The engine's request for a client's. Raises BackendRejected for what the engine cannot do or a wrong type."""
    body = request.body
    if body.get("tools") and body.get("tool_choice") != "none":
        raise _rejected("This model can't call tools", "tools", "unsupported_parameter")
    kind = (body.get("response_format") or {}).get("type", "text")
    if kind != "text":
        raise _rejected(f"This model can't answer in the format {kind!r}", "response_format", "unsupported_parameter")
    try:
        asked = msgspec.convert(body, _Parameters, str_keys=True)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        raise _rejected(f"Invalid {param or 'request'}: {what}", param, "invalid_type") from None
    return GenerateRequest(
        messages=[_message(message, i) for i, message in enumerate(body["messages"])],
        sampling=_sampling(asked),
        n=asked.n or 1,
        salt=request.salt,
        priority=_PRIORITY_FLEX if body.get("service_tier") == "flex" else 0,
        reference=request.draft or None,
    )


def _sampling(asked: _Parameters) -> SamplingParams:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    given: dict[str, Any] = {
        "temperature": asked.temperature,
        "top_p": max(asked.top_p, _TOP_P_MIN) if asked.top_p is not None else None,
        "top_k": max(asked.top_k, 0) if asked.top_k is not None else None,  # vLLM's -1 is off
        "min_p": asked.min_p,
        "repetition_penalty": asked.repetition_penalty,
        "presence_penalty": asked.presence_penalty,
        "frequency_penalty": asked.frequency_penalty,
        "logit_bias": asked.logit_bias,
        "seed": asked.seed & _SEED_MASK if asked.seed is not None else None,
        "stop": tuple(stop),
        "stop_token_ids": tuple(asked.stop_token_ids or ()),
        "max_tokens": asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens,
        "min_tokens": asked.min_tokens,
        "ignore_eos": asked.ignore_eos,
        "logprobs": (asked.top_logprobs or 0) if asked.logprobs else None,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _message(message: dict[str, Any], position: int) -> dict[str, Any]:
    """A message as chat templates know it: a role and a text. Calls of tools are told the way templates tell them."""
    role = "system" if message["role"] == "developer" else message["role"]
    content = message.get("content")
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                param = f"messages[{position}].content"
                raise _rejected("This model reads text only", param, "unsupported_content")
        content = "".join(part["text"] for part in content)
    text = content or ""
    for call in message.get("tool_calls") or ():
        function = call.get("function") or {}
        told = {"name": function.get("name"), "arguments": function.get("arguments")}
        text += f"\n<tool_call>\n{_encode(told).decode()}\n</tool_call>"
    return {"role": role, "content": text}


# -- errors ------------------------------------------------------------------------------------------------------------


def _rejected(message: str, param: str | None, code: str | None) -> BackendRejected:
    return BackendRejected(message, status=400, body=error_body(message, None, param, code))


def _translated(error: local_engine.EngineError, has_output: bool) -> BackendError:
    match error:
        case local_engine.PromptTooLong():
            message = (
                f"This model's maximum context length is {error.context_tokens} tokens. "
                f"However, your messages resulted in {error.prompt_tokens} tokens."
            )
            return _rejected(message, "messages", "context_length_exceeded")
        case local_engine.InvalidRequest():
            return _rejected(str(error), error.param, "invalid_value")
        case local_engine.Overloaded():
            return BackendOverloaded("The local engine's queue is full", detail=str(error), retry_after_s=1.0)
        case local_engine.DeadlineExceeded():
            return BackendTimeout("The local engine did not finish in time", detail=str(error))
        case local_engine.EngineLoading():
            return BackendUnavailable(f"The local engine is not ready: {error}")
    if has_output:
        return BackendBroken("The local engine's answer broke off", detail=str(error))
    return BackendUnavailable("The local engine is not there", detail=str(error))
