"""A local engine behind its socket. request.py builds its requests, answer.py reads its outputs.

Uses the engine's messages and errors; no torch. Invariant: an answer without a reader is aborted in
the engine, with all its choices.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, TypeVar

import local_engine
from gateway.backends import base
from gateway.backends.local.answer import ChatWriter, TextWriter, Writer
from gateway.backends.local.quarantine import Quarantine
from gateway.backends.local.request import engine_requests, form_field, messages_of, rejected
from gateway.backends.refusals import error_body
from gateway.wire.types import CHAT, Chunk
from ipc import ReplyStream
from local_engine import AsyncEngine, EngineLoad, GenerateRequest, Output
from local_engine.messages import TokenizeCall
from policies.durations import duration_s

_T = TypeVar("_T")
_CONVERTED_WITHIN_S = 30.0
_ANSWERS_AT_ONCE = 64  # of one request with many prompts: more would fill the queue
_COMES_BACK_S = 30.0  # a process that is away longer is taken to be gone
_STARTS_FAILED_MAX = 3  # after so many, requests stop waiting for the engine


@dataclass(eq=False, repr=False)
class LocalBackend:
    """One deployment on a local engine. Answers name `model`, the alias, as their model."""

    name: str
    _: KW_ONLY
    socket_path: Path
    model: str
    capabilities: frozenset[str]
    wall_clock: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self.engine = AsyncEngine(self.socket_path)
        self.quarantine = Quarantine(time.monotonic)
        self._away_since: float | None = time.monotonic()

    def _why_not_ready(self, now: EngineLoad) -> str:
        if now.is_connected:
            return "" if now.is_ready else f"the model is loading: {round(100 * now.progress)}% ({now.stage})"
        ended = self.engine.ended
        if ended is None:
            return "the engine's process is not there"
        return f"the engine's process ended{' and is not started again' if ended.is_final else ''}"

    def _is_coming(self) -> bool:
        """Whether requests should wait for an unready engine."""
        engine = self.engine
        if engine.starts_failed >= _STARTS_FAILED_MAX or (engine.ended is not None and engine.ended.is_final):
            return False
        return self._away_since is None or time.monotonic() - self._away_since < _COMES_BACK_S

    async def start(self) -> None:
        """Connect in the background, and reconnect for ever. Until then the deployment is unready."""
        self.engine.start()

    async def aclose(self) -> None:
        await self.engine.aclose()

    async def tokenize(self, body: dict[str, Any], **flags: bool) -> tuple[list[int], list[str] | None]:
        """Return the token ids of the body's `prompt`, else of its `messages` with the chat
        template, and the tokens' texts if they are wanted.

        `flags` are those of `TokenizeCall`. Raises BackendError.
        """
        prompt = body.get("prompt")
        messages = None if prompt is not None else messages_of(body)
        reply = await _within(self.engine.tokenize(TokenizeCall(prompt=prompt, messages=messages, **flags)))
        return reply.token_ids, reply.texts

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`. Raises BackendError."""
        return await _within(self.engine.detokenize(token_ids))

    def stream(self, request: base.BackendRequest) -> "LocalStream":
        return LocalStream(self, request)

    def load(self, prompt_tokens: int) -> base.Load:
        now = self.engine.load()
        info = self.engine.info
        if now.is_connected:
            self._away_since = None
        elif self._away_since is None:
            self._away_since = time.monotonic()
        return base.Load(
            is_ready=now.is_ready,
            reason=self._why_not_ready(now),
            detail=self.engine.ended.why if self.engine.ended is not None and not now.is_ready else "",
            is_starting=not now.is_ready and self._is_coming(),
            running=now.running,
            waiting=now.waiting,
            ttft_ms=now.predicted_ttft_ms(prompt_tokens),
            tpot_ms=now.decode_ms_per_token or None,
            context_tokens_max=info.context_tokens if info else None,
            output_tokens_max=info.context_tokens if info else None,
            may_think=info is not None and info.may_think,
            engine=now if now.is_ready else None,
        )


class LocalStream:
    """A running answer; see base.ChunkStream.

    The engine generates several prompts of one request at once; the chunks come prompt by prompt.
    """

    def __init__(self, backend: LocalBackend, request: base.BackendRequest) -> None:
        self._backend = backend
        self._request = request
        self._waiting: deque[GenerateRequest] = deque()  # prompts
        # of earlier prompts; the first one is being read
        self._generations: deque[ReplyStream[Output]] = deque()
        self._usages: list[local_engine.EngineUsage] = []  # of the finished prompts
        self._ready: list[Chunk] = []
        self._writer: Writer | None = None
        self._quarantine_key: bytes | None = None
        self._has_output = False
        self._is_over = False
        self._is_finished = False

    def __aiter__(self) -> "LocalStream":
        return self

    async def __anext__(self) -> list[Chunk]:
        while not self._ready:
            if self._is_over:
                if self._is_finished:
                    raise StopAsyncIteration
                raise base.BackendBroken("The answer was given up")
            try:
                await self._fill()
            except BaseException:
                await self.aclose()
                raise
        ready, self._ready = self._ready, []
        return ready

    async def aclose(self) -> None:
        """Abort unfinished choices in the engine; its next step frees their blocks."""
        self._ready.clear()
        self._is_over = True
        self._backend.quarantine.leave(self._quarantine_key)
        for generation in self._generations:
            await generation.aclose()

    async def _fill(self) -> None:
        backend, request = self._backend, self._request
        if self._writer is None:
            self._waiting.extend(engine_requests(request))
            self._quarantine_key = await backend.quarantine.admit(request)
            writer = ChatWriter if request.kind is CHAT else TextWriter
            self._writer = writer(request, backend.model, int(backend.wall_clock()), backend.engine.info)
        while self._waiting:
            prompt = self._waiting[0]
            if len(self._generations) >= max(1, _ANSWERS_AT_ONCE // (prompt.best_of or prompt.n)):
                break
            self._generations.append(backend.engine.generate(self._waiting.popleft()))
        generation = self._generations[0]
        timeout_s = request.idle_timeout_s if self._has_output else request.ttft_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                output = await anext(generation)
        except TimeoutError:
            what = "fell silent inside its answer" if self._has_output else "sent nothing"
            raise base.BackendTimeout(f"The local engine {what} within {duration_s(timeout_s)}") from None
        except local_engine.EngineError as error:
            if isinstance(error, local_engine.EngineUnavailable) and error.is_death:
                backend.quarantine.note_crash(self._request)
            raise _translated(error, request.kind.prompt, self._has_output, request.body) from None
        except StopAsyncIteration:
            raise base.BackendBroken("The local engine's answer ended before its finish") from None
        if not self._has_output:
            self._has_output = True
            backend.quarantine.leave(self._quarantine_key)
        if output.finish_reason == "abort":
            raise base.BackendBroken("The local engine gave its answer up")
        index = len(self._usages) * (request.body.get("n") or 1) + output.index
        self._ready.extend(self._writer.chunks(output, index))
        if output.usage is None:
            return
        self._usages.append(output.usage)
        self._generations.popleft()
        if not self._generations and not self._waiting:
            self._ready.append(self._writer.usage(self._usages))
            self._is_over = self._is_finished = True
            backend.quarantine.forget(self._quarantine_key)


async def _within(reply: Coroutine[Any, Any, _T]) -> _T:
    """Await the engine's reply to a tokenize or detokenize call, within 30 s. Raises BackendError."""
    try:
        async with asyncio.timeout(_CONVERTED_WITHIN_S):
            return await reply
    except TimeoutError:
        raise base.BackendTimeout(f"The local engine sent nothing within {duration_s(_CONVERTED_WITHIN_S)}") from None
    except local_engine.EngineError as error:
        raise _translated(error, "messages", False) from None


# -- errors

_WORDS_MAX = 400


def _translated(
    error: local_engine.EngineError, prompt: str, has_output: bool, body: Mapping[str, Any] = {}
) -> base.BackendError:
    """Return the error of base.py for an engine's error. `prompt` is the field with the prompt."""
    match error:
        case local_engine.PromptTooLong():
            message = (
                f"This model's maximum context length is {error.context_tokens} tokens. "
                f"However, your {prompt} resulted in {error.prompt_tokens} tokens."
            )
            refusal_body = error_body(message, None, prompt, "context_length_exceeded")
            too_long = base.BackendTooLong(message, status=400, body=refusal_body)
            too_long.context_tokens = error.context_tokens
            return too_long
        case local_engine.InvalidRequest(param="grammar"):  # also where the model cannot go on within it
            message = str(error).partition("\n")[0][:_WORDS_MAX]  # what a library adds is for its makers
            refusal_body = error_body(message, None, form_field(body, message), "unsupported_grammar")
            return base.BackendUnfit(message, status=400, body=refusal_body)
        case local_engine.InvalidRequest() if not has_output:
            param = prompt if error.param in ("messages", "prompt_token_ids") else error.param
            return rejected(str(error), param, "invalid_value")
        case local_engine.Overloaded():
            return base.BackendOverloaded("The local engine's queue is full", detail=str(error), retry_after_s=1.0)
        case local_engine.EngineLoading():
            return base.BackendUnavailable(f"The local engine is not ready: {error}")
    if has_output:
        return base.BackendBroken("The local engine's answer broke off", detail=str(error))
    failed = isinstance(error, local_engine.EngineFailed)
    what = "failed at this request" if failed else "is not there"
    return base.BackendUnavailable(f"The local engine {what}", detail=str(error))
