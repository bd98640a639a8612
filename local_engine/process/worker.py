"""The engine in a process of its own, behind a unix socket: `python -m local_engine.process.worker
--socket PATH [--model M]`.

The event loop owns the socket and listens from the start, so that clients learn of the loading; one
thread owns the engine (`thread`), another one tokenizes for clients that ask for tokens alone, and
a third compiles grammars, so that no step waits for them. Knows the wire (`messages`); no HTTP.

Invariants: a client whose connection ends holds nothing in the engine; what one client sends,
however broken, closes at most its own connection; the process ends when its parent does, on SIGTERM
(after a short drain), and by itself with status 78 (EX_CONFIG) when the model cannot be loaded,
which starting again would not mend.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from local_engine import messages as wire
from local_engine.apart.process import AT_ONCE
from local_engine.config import EngineConfig, ModelError
from local_engine.process.options import EX_CONFIG, arguments, config_from, prepare_environment
from local_engine.process.thread import EngineThread, Key, Ready

_STATE_PERIOD_S = 0.05
_STATE_REPEAT_S = 1.0
_STEP_TIMES_MAX = 30.0  # of what the longest step took of late
_PARENT_PERIOD_S = 0.5
_WHY_CHARS = 1_000
_UNREAD_SIZE_MAX_BYTES = 64 * 1024 * 1024

if TYPE_CHECKING:
    from local_engine.grammar import Compiled
    from local_engine.text.tokenizer import Tokenizer

_CONVERSIONS_MAX = 64  # that wait
_GRAMMARS_MAX = 8  # that wait, of one partition

_log = logging.getLogger("local_engine.worker")


class Server:
    """The socket's side: connections in, frames out, and the end of the process."""

    def __init__(self, config: EngineConfig, *, drain_s: float, step_s_max: float = 120.0) -> None:
        """`drain_s`: how long running answers have after SIGTERM. A step that takes longer than
        `step_s_max` and than 30 times what the longest one took of late never ends: the device
        hangs. A slow machine that is busy takes less."""
        self._loop = asyncio.get_running_loop()
        self._thread = EngineThread(config, lambda sent: self._loop.call_soon_threadsafe(self._deliver, sent))
        self._drain_s = drain_s
        self._step_s_max = step_s_max
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._running: set[Key] = set()
        self._clients = 0
        self._is_draining = False
        self._drain: asyncio.Task[None] | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._converter = ThreadPoolExecutor(1, "tokenizer")
        self._compiler = ThreadPoolExecutor(AT_ONCE, "grammars")
        self._turns: dict[bytes, asyncio.Lock] = {}  # one grammar of a partition at a time
        self._compiling: Counter[bytes] = Counter()
        self._conversions: set[asyncio.Task[None]] = set()
        self._compilations: set[asyncio.Task[None]] = set()
        self._sent: wire.State | None = None
        self._is_over = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[wire.ToWorker]] = msgspec.msgpack.Decoder(list[wire.ToWorker])

    async def serve(self, socket_path: Path) -> int:
        """Until SIGTERM, the parent's death or a failure to load; returns the exit status."""
        server = await asyncio.start_unix_server(self._on_connection, socket_path)
        socket_path.chmod(0o600)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        self._thread.start()
        tasks = [asyncio.create_task(self._push_state()), asyncio.create_task(self._watch_parent())]
        await self._is_over.wait()
        server.close()
        for task in tasks:
            task.cancel()
        for writer in list(self._writers.values()):
            writer.close()
        if self._connections:
            await asyncio.wait(self._connections, timeout=1.0)
        with contextlib.suppress(FileNotFoundError):
            socket_path.unlink()
        error = self._thread.error
        if error is None:
            return 0
        if isinstance(error, ModelError | ValueError):
            return _refuse_to_run(socket_path, error)
        _log.error("the engine gave up", exc_info=error)
        _write_ended(socket_path, wire.Ended(f"{type(error).__name__}: {error}"))
        return 1

    async def _on_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        self._clients += 1
        client = self._clients
        self._writers[client] = writer
        self._write(writer, [self._state()])
        try:
            while True:
                size_bytes = int.from_bytes(await reader.readexactly(4), "big")
                if size_bytes > wire.FRAME_SIZE_MAX_BYTES:
                    _log.warning("a client sent a frame of %d bytes; its connection is closed", size_bytes)
                    break
                frame = await reader.readexactly(size_bytes)
                for message in self._decoder.decode(frame):
                    self._on_message(Key(client, message.id), message)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left: the `finally` does the rest
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            _log.warning("a client sent what is no message (%s); its connection is closed", error)
        finally:
            del self._writers[client]
            for key in [key for key in self._running if key.client == client]:
                self._forget(key)
                self._thread.send((key, wire.Abort(key.id)))
            writer.close()

    def _on_message(self, key: Key, message: wire.ToWorker) -> None:
        refusal: wire.EngineError | None = None
        if self._is_draining:
            refusal = wire.EngineUnavailable("the engine is shutting down")
        elif not self._thread.load.is_ready:
            refusal = wire.EngineLoading("the model is loading")
        if isinstance(message, wire.Abort):
            self._forget(key)
        elif refusal is not None:
            self._deliver([(key, wire.error_to_wire(key.id, refusal))])
            return
        elif isinstance(message, wire.Tokenize | wire.Detokenize):
            task = asyncio.create_task(self._convert(key, message))
            self._conversions.add(task)
            task.add_done_callback(self._conversions.discard)
            return
        else:
            self._running.add(key)
            self._is_idle.clear()
            if message.request.grammar is not None or message.request.tools:
                compilation = asyncio.create_task(self._compile(key, message))
                self._compilations.add(compilation)
                compilation.add_done_callback(self._compilations.discard)
                return
        self._thread.send((key, message if isinstance(message, wire.Abort) else Ready(message.request)))

    async def _convert(self, key: Key, message: wire.Tokenize | wire.Detokenize) -> None:
        """Answer a request for tokens or their text; its error is its own answer."""
        answer: wire.ToClient
        try:
            if len(self._conversions) > _CONVERSIONS_MAX:
                raise wire.Overloaded(f"{_CONVERSIONS_MAX} requests wait for the tokenizer")
            assert self._thread.tokenizer is not None, "the engine is ready"
            answer = await self._loop.run_in_executor(self._converter, _converted, self._thread.tokenizer, message)
        except Exception as error:  # its own answer, whatever it is
            answer = wire.error_to_wire(key.id, error)
        writer = self._writers.get(key.client)
        if writer is not None:
            self._write(writer, [answer])

    async def _compile(self, key: Key, message: wire.Submit) -> None:
        """Submit a request once its grammar is compiled, unless it was aborted meanwhile."""
        request = message.request
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
                    compiled = self._loop.run_in_executor(self._compiler, self._compiled, key, wanted, request.salt)
                    grammar = await compiled
        except Exception as error:
            self._deliver([(key, wire.error_to_wire(key.id, error))])
        else:
            if key in self._running and (grammar is not None or wanted is None):
                self._thread.send((key, Ready(request, grammar)))
        finally:
            self._compiling[request.salt] -= 1
            if not self._compiling[request.salt]:
                del self._compiling[request.salt]
                self._turns.pop(request.salt, None)

    def _compiled(self, key: Key, wanted: wire.Grammar, salt: bytes) -> Compiled | None:
        assert self._thread.grammars is not None, "the engine is ready"
        return self._thread.grammars.compiled(wanted, salt) if key in self._running else None

    def _forget(self, key: Key) -> None:
        self._running.discard(key)
        if not self._running:
            self._is_idle.set()

    def _deliver(self, messages: list[tuple[Key, wire.ToClient]]) -> None:
        """One frame per client for all that a step had for it."""
        by_client: dict[int, list[wire.ToClient]] = {}
        for key, message in messages:
            by_client.setdefault(key.client, []).append(message)
            if not isinstance(message, wire.Outputs) or message.usage is not None:
                self._forget(key)
        for client, own in by_client.items():
            writer = self._writers.get(client)
            if writer is not None:
                self._write(writer, own)

    def _write(self, writer: asyncio.StreamWriter, messages: list[wire.ToClient]) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _UNREAD_SIZE_MAX_BYTES:
            _log.warning("a client does not read; its connection is closed")
            writer.transport.abort()
            return
        body = self._encoder.encode(messages)
        writer.write(len(body).to_bytes(4, "big") + body)

    def _state(self) -> wire.State:
        load = self._thread.load
        if self._is_draining:
            load = msgspec.structs.replace(load, is_ready=False, is_draining=True, stage="shutting down")
        return wire.State(load, self._thread.info)

    async def _push_state(self) -> None:
        """Push every change of the load to the clients, a few times a second, and the load every
        second at least; print the stages of the loading. A step that never ends is the end of the
        process. It is counted in looks, not by the clock: if the process was stopped, the step was
        too."""
        shown, sent_at, looks, ended = "", 0.0, 0, 0
        while True:
            state, now = self._state(), time.monotonic()
            if state != self._sent or now - sent_at >= _STATE_REPEAT_S:
                self._sent, sent_at = state, now
                for writer in list(self._writers.values()):
                    self._write(writer, [state])
                line = f"{state.load.stage} {10 * int(10 * state.load.progress)}%"
                if not shown.startswith("ready") and line != shown:
                    shown = line
                    print(f"local_engine: {line}", file=sys.stderr, flush=True)
            thread = self._thread
            is_same_step = thread.steps_begun > thread.steps_ended == ended
            looks, ended = looks + 1 if is_same_step else 0, thread.steps_ended
            if looks * _STATE_PERIOD_S > max(self._step_s_max, _STEP_TIMES_MAX * thread.step_s_expected):
                thread.error = TimeoutError(f"a step has taken more than {looks * _STATE_PERIOD_S:g} s")
                self._is_over.set()
            if not self._thread.is_alive():
                self._is_over.set()
            await asyncio.sleep(_STATE_PERIOD_S)

    async def _watch_parent(self) -> None:
        parent = os.getppid()
        while not self._is_over.is_set():
            await asyncio.sleep(_PARENT_PERIOD_S)
            if os.getppid() != parent:
                _log.warning("the parent process is gone")
                self._is_over.set()

    def _on_signal(self) -> None:
        """The first signal drains, the second one ends."""
        if self._is_draining:
            self._is_over.set()
            return
        self._is_draining = True
        self._drain = self._loop.create_task(self._finish_running())

    async def _finish_running(self) -> None:
        if self._running:
            self._is_idle.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_idle.wait(), self._drain_s)
        self._is_over.set()


def _converted(tokenizer: Tokenizer, asked: wire.Tokenize | wire.Detokenize) -> wire.Tokens | wire.Text:
    """The tokens or the text that a client asked for. Raises InvalidRequest."""
    if isinstance(asked, wire.Detokenize):
        return wire.Text(asked.id, tokenizer.decode_all(asked.token_ids))
    if asked.messages is not None:
        is_rendered = not asked.has_special
        ids = tokenizer.encode_chat(asked.messages, None, opens_answer=asked.opens_answer, is_rendered=is_rendered)
    else:
        ids = tokenizer.encode(asked.prompt or "", is_rendered=not asked.has_special)
    return wire.Tokens(asked.id, ids, [tokenizer.token(id) for id in ids] if asked.wants_texts else None)


def _refuse_to_run(socket_path: Path, error: Exception) -> int:
    """Print why in one line, and write it down for the clients."""
    # a checkpoint's own words may be of any length, and no UTF-8
    why = " ".join(str(error).encode("utf-8", "backslashreplace").decode().split())[:_WHY_CHARS]
    print(f"local_engine: {why}", file=sys.stderr, flush=True)
    _write_ended(socket_path, wire.Ended(why, is_final=True))
    return EX_CONFIG


def _write_ended(socket_path: Path, ended: wire.Ended) -> None:
    try:
        wire.write_ended(socket_path, ended)
    except OSError as error:
        _log.warning("why this engine ended is told here alone: %s", error)


async def _serve(config: EngineConfig, socket_path: Path, drain_s: float) -> int:
    return await Server(config, drain_s=drain_s).serve(socket_path)


def main() -> int:
    parser = argparse.ArgumentParser(prog="local_engine.process.worker", description=__doc__, parents=[arguments()])
    parser.add_argument("--socket", type=Path, required=True, help="path of the unix socket to listen on")
    parser.add_argument("--drain-s", type=float, default=2.0, help="seconds that running answers have after SIGTERM")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="local_engine: %(message)s", stream=sys.stderr)
    prepare_environment()
    try:
        config = config_from(options)
    except ValueError as error:
        return _refuse_to_run(options.socket, error)
    wire.ended_path(options.socket).unlink(missing_ok=True)
    return asyncio.run(_serve(config, options.socket, options.drain_s))


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    os._exit(status)  # the engine's thread may be inside a long step; nothing is left to clean up
