"""The engine in a separate process, behind a unix socket: `python -m local_engine.process.worker
SOCKET '{"model": "M"}'`, with an EngineConfig as JSON.

The event loop owns the socket and listens from the start, so that clients see the loading; one
thread owns the engine (`thread`), a second serves tokenize calls, and a third compiles grammars, so
that no step waits for them. Knows `messages` and no HTTP. Invariants: a client whose connection
ends holds nothing in the engine; a client's broken bytes close at most its own connection; the
process ends when its parent does, on SIGTERM (after a short drain), and by itself with status 78
(EX_CONFIG) when the model cannot be loaded, which a restart would not mend.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import uvloop

from ipc import IncomingCall, RpcServer, log_to_stderr
from local_engine import messages as wire
from local_engine.apart.process import AT_ONCE
from local_engine.config import EngineConfig, ModelError
from local_engine.process import prepare_environment
from local_engine.process.thread import EngineThread, Replies

_STATE_PERIOD_S = 0.05
_STEP_TIMES_MAX = 30.0  # of what the longest step took of late
_WHY_CHARS = 1_000

if TYPE_CHECKING:
    from local_engine.grammar import Compiled
    from local_engine.text.tokenizer import Tokenizer

Call = IncomingCall[wire.EngineRequest]

_CONVERSIONS_MAX = 64  # that wait
_GRAMMARS_MAX = 8  # that wait, of one partition

_log = logging.getLogger("local_engine.worker")


class EngineServer:
    """Connects clients with the engine's thread, and decides when the process ends."""

    def __init__(self, config: EngineConfig, *, step_s_max: float = 120.0) -> None:
        """A step counts as hung if it takes longer than `step_s_max` and than 30 times the longest
        recent step; a busy, slow machine takes less.
        """
        self._loop = asyncio.get_running_loop()
        self._thread: EngineThread[Call] = EngineThread(
            config, lambda replies: self._loop.call_soon_threadsafe(self._deliver, replies)
        )
        self._drain_s = config.drain_s
        self._drains_until: float | None = None
        self._step_s_max = step_s_max
        self._server = RpcServer(wire.WIRE, state=self._state, on_call=self._take, on_cancel=self._thread.abort)
        self._converter = ThreadPoolExecutor(1, "tokenizer")
        self._compiler = ThreadPoolExecutor(AT_ONCE, "grammars")
        self._turns: dict[bytes, asyncio.Lock] = {}  # one grammar of a partition at a time
        self._compiling: Counter[bytes] = Counter()
        self._converting = 0
        self._shown = ""  # stage
        self._looks, self._steps_ended = 0, 0

    async def serve(self, socket_path: Path) -> int:
        """Serve until SIGTERM, the parent's death or a failure of the engine. Returns the exit
        status.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._drain)
        self._thread.start()
        await self._server.serve(socket_path, self._is_over, _STATE_PERIOD_S)
        error = self._thread.error
        if error is None:
            return 0
        if self._thread.info is None and isinstance(error, ModelError | ValueError):
            return _refuse_to_run(socket_path, error)
        _log.error("the engine gave up", exc_info=error)
        wire.write_ended(socket_path, wire.EngineEnded(f"{type(error).__name__}: {error}"))
        return 1

    def _take(self, call: Call) -> Coroutine[Any, Any, None] | None:
        request = call.body
        if self._drains_until is not None:
            call.fail(wire.EngineUnavailable("the engine is shutting down"))
        elif not self._thread.load.is_ready:
            load = self._thread.load
            call.fail(wire.EngineLoading(f"the model is loading: {load.progress:.0%} ({load.stage})"))
        elif not isinstance(request, wire.GenerateRequest):
            return self._convert(call, request)
        elif request.grammar is not None or request.tools:
            return self._compile(call, request)
        else:
            self._thread.submit(call, request)
        return None

    async def _convert(self, call: Call, request: wire.TokenizeCall | wire.DetokenizeCall) -> None:
        """Answer with tokens or their text. Raises EngineError."""
        self._converting += 1
        try:
            if self._converting > _CONVERSIONS_MAX:
                raise wire.Overloaded(f"{_CONVERSIONS_MAX} requests wait for the tokenizer")
            assert self._thread.tokenizer is not None, "the engine is ready"
            call.reply(await self._loop.run_in_executor(self._converter, _converted, self._thread.tokenizer, request))
        finally:
            self._converting -= 1

    async def _compile(self, call: Call, request: wire.GenerateRequest) -> None:
        """Compile the grammar of a request, then submit it, unless its client has left. Raises
        EngineError.
        """
        self._compiling[request.salt] += 1
        try:
            if self._compiling[request.salt] > _GRAMMARS_MAX:
                raise wire.Overloaded(f"{_GRAMMARS_MAX} grammars of the same partition wait to be compiled")
            assert self._thread.grammars is not None, "the engine is ready"
            assert self._thread.tokenizer is not None, "the engine is ready"
            wanted = self._thread.tokenizer.grammar_of(request)
            kept = self._thread.grammars.kept(wanted, request.salt) if wanted is not None else None
            grammar = None if isinstance(kept, wire.InvalidRequest) else kept
            if wanted is not None and grammar is None:
                async with self._turns.setdefault(request.salt, asyncio.Lock()):
                    compiled = self._loop.run_in_executor(self._compiler, self._compiled, call, wanted, request.salt)
                    grammar = await compiled
            if call.is_open:
                self._thread.submit(call, request, grammar)
        finally:
            self._compiling[request.salt] -= 1
            if not self._compiling[request.salt]:
                del self._compiling[request.salt]
                self._turns.pop(request.salt, None)

    def _compiled(self, call: Call, grammar: wire.Grammar, salt: bytes) -> Compiled | None:
        assert self._thread.grammars is not None, "the engine is ready"
        return self._thread.grammars.compiled(grammar, salt) if call.is_open else None

    def _deliver(self, replies: Replies[Call]) -> None:
        for call, reply in replies:
            if isinstance(reply, Exception):
                call.fail(reply)
            else:
                call.reply(reply, is_last=reply.usage is not None)

    def _state(self) -> wire.EngineState:
        load = self._thread.load
        if self._drains_until is not None:
            load = msgspec.structs.replace(load, is_ready=False, is_draining=True, stage="shutting down")
        return wire.EngineState(load, self._thread.info)

    def _is_over(self) -> bool:
        """Whether the process must end. Logs each stage of the loading.

        A hung step ends the process. Checks are counted, not seconds: while the process was
        stopped, the step was, too.
        """
        thread, until = self._thread, self._drains_until
        line = f"{thread.load.stage} {10 * int(10 * thread.load.progress)}%"
        if not self._shown.startswith("ready") and line != self._shown:
            self._shown = line
            _log.info("%s", line)
        is_same_step = thread.steps_begun > thread.steps_ended == self._steps_ended
        self._looks, self._steps_ended = self._looks + 1 if is_same_step else 0, thread.steps_ended
        step_s = self._looks * _STATE_PERIOD_S
        if step_s > max(self._step_s_max, _STEP_TIMES_MAX * thread.step_s_expected):
            thread.error = TimeoutError(f"a step has taken more than {step_s:g} s")
            return True
        is_drained = until is not None and (not self._server.has_calls or time.monotonic() >= until)
        return is_drained or not thread.is_alive()

    def _drain(self) -> None:
        """Let running answers finish at the first signal, and end at the second."""
        self._drains_until = time.monotonic() + self._drain_s if self._drains_until is None else 0.0


def _converted(
    tokenizer: Tokenizer, request: wire.TokenizeCall | wire.DetokenizeCall
) -> wire.TokenIds | wire.TokensText:
    """Return the requested tokens or text. Raises InvalidRequest."""
    if isinstance(request, wire.DetokenizeCall):
        return wire.TokensText(tokenizer.decode_all(request.token_ids))
    if request.messages is not None:
        is_rendered = not request.has_special
        ids = tokenizer.encode_chat(request.messages, None, opens_answer=request.opens_answer, is_rendered=is_rendered)
    else:
        ids = tokenizer.encode(request.prompt or "", is_rendered=not request.has_special)
    return wire.TokenIds(ids, [tokenizer.token(id) for id in ids] if request.wants_texts else None)


def _refuse_to_run(socket_path: Path, error: Exception) -> int:
    """Log the reason in one line, and write it to the file for clients. Returns the exit status."""
    # a checkpoint's own words may be of any length, and no UTF-8
    why = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())[:_WHY_CHARS]
    _log.error("%s", why)
    wire.write_ended(socket_path, wire.EngineEnded(why, is_final=True))
    return os.EX_CONFIG


async def _serve(config: EngineConfig, socket_path: Path) -> int:
    return await EngineServer(config).serve(socket_path)


def main() -> int:
    socket_path, options = Path(sys.argv[1]), sys.argv[2]
    log_to_stderr(logging.INFO, "local_engine: %(message)s")
    prepare_environment()
    try:
        config = msgspec.json.decode(options, type=EngineConfig)
    except ValueError as error:
        return _refuse_to_run(socket_path, error)
    wire.ended_path(socket_path).unlink(missing_ok=True)
    return uvloop.run(_serve(config, socket_path))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # the engine's thread may be inside a long step; nothing is left to clean up
