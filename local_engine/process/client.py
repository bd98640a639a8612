"""AsyncEngine: an engine worker's socket, seen from an event loop.

Knows the wire and nothing of torch, models or tokenizers. Invariant: a generation that was started
is always either finished by the engine, failed with a typed error, or aborted in the engine by
`aclose`: a reader that is closed before its first item aborts too.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import deque
from pathlib import Path
from typing import cast

import msgspec

from local_engine import messages as wire

_SILENT_LOOKS_MAX = 10  # a worker that works sends something every second


class Generation:
    """One running generation: iterate for `Output`s, `aclose` to abort. Not an async generator on
    purpose: an async generator that was never started runs no `finally`, and would leak the work it
    stands for.

    `usage` is set once every choice has finished, which is before the iteration ends. Raises
    EngineError from `__anext__`; after an error or the end, iteration stays ended.
    """

    def __init__(self, engine: AsyncEngine, id: int) -> None:
        self.id = id
        self.usage: wire.Usage | None = None
        self._engine = engine
        self._items: deque[wire.Output] = deque()
        self._error: wire.EngineError | None = None
        self._is_done = False
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> wire.Output:
        while True:
            if self._items:
                return self._items.popleft()
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # its frames reference this object
            if self._is_done:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None

    async def aclose(self) -> None:
        """Abort in the engine what has not finished; safe to call at any time, any number of
        times."""
        if not self._is_done:
            self._is_done = True
            self._engine._abort(self.id)
        self._items.clear()
        self._error = None
        self._notify()

    async def __aenter__(self) -> Generation:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _push(self, outputs: tuple[wire.Output, ...], usage: wire.Usage | None) -> None:
        if self._is_done:
            return
        self._items.extend(outputs)
        if usage is not None:
            self.usage = usage
            self._is_done = True
        self._notify()

    def _fail(self, error: wire.EngineError) -> None:
        if self._is_done:
            return
        self._error = error
        self._is_done = True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class _Frames(asyncio.Protocol):
    """Cuts the byte stream into frames and hands each one's messages to the engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._engine = engine
        self._buffer = bytearray()
        self.has_received = False
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's do not descend from asyncio's
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= 4:
            size_bytes = int.from_bytes(buffer[start : start + 4], "big")
            if len(buffer) - start - 4 < size_bytes <= wire.FRAME_SIZE_MAX_BYTES:
                break
            try:
                if size_bytes > wire.FRAME_SIZE_MAX_BYTES:
                    raise msgspec.DecodeError(f"a frame of {size_bytes} bytes")
                messages = self._engine._decoder.decode(memoryview(buffer)[start + 4 : start + 4 + size_bytes])
            except (msgspec.MsgspecError, UnicodeDecodeError):
                assert self._transport is not None
                self._transport.abort()
                return
            start += 4 + size_bytes
            for message in messages:
                self._engine._on_message(message)
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


class AsyncEngine:
    """A client of one engine worker that keeps itself connected.

        engine = AsyncEngine("/run/engine.sock")
        await engine.connect()
        async with engine.generate(GenerateRequest(messages=[...])) as generation:
            async for output in generation:
                print(output.text, end="")
        print(generation.usage)

    Belongs to one event loop. `generate` never raises: the generation's first `__anext__` raises
    its errors.
    """

    def __init__(
        self,
        socket_path: str | Path,
        *,
        reconnect_min_s: float = 0.05,
        reconnect_max_s: float = 2.0,
        look_s: float = 1.0,
    ) -> None:
        """`look_s`: seconds between looks whether the worker has sent anything; after 10 in vain it
        is silent."""
        self.socket_path = str(socket_path)
        self.info: wire.ModelInfo | None = None
        self.ended: wire.Ended | None = None  # why its process ended, since it was ready last
        self.starts_failed = 0  # processes that were seen loading since then, and ended
        self._reconnect_min_s = reconnect_min_s
        self._reconnect_max_s = reconnect_max_s
        self._look_s = look_s
        self._load = wire.EngineLoad()
        self._ids = itertools.count(1)
        self._generations: dict[int, Generation] = {}
        self._calls: dict[int, asyncio.Future[wire.Tokens | wire.Text]] = {}
        self._transport: asyncio.WriteTransport | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_changed = asyncio.Event()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[list[wire.ToClient]] = msgspec.msgpack.Decoder(list[wire.ToClient])

    async def connect(self) -> None:
        """Start connecting and reconnecting in the background; returns after the first attempt,
        whatever came of it."""
        if self._task is None:
            first_attempt = asyncio.Event()
            self._task = asyncio.create_task(self._stay_connected(first_attempt), name="engine-connection")
            await first_attempt.wait()

    async def close(self) -> None:
        """Disconnect for good. Running generations raise EngineUnavailable; the worker aborts them
        by itself."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def wait_ready(self) -> wire.ModelInfo:
        """Wait until the model is loaded; bound it with asyncio.timeout. The wait ends by no error
        of the engine's."""
        while not (self._load.is_ready and self.info is not None):
            self._is_changed.clear()
            await self._is_changed.wait()
        return self.info

    def load(self) -> wire.EngineLoad:
        """The last state the worker pushed; `is_connected` and `is_ready` are False when there is
        none."""
        return self._load

    def generate(self, request: wire.GenerateRequest) -> Generation:
        """Start a generation. Its errors, EngineUnavailable and EngineLoading included, come from
        its `__anext__`."""
        generation = Generation(self, next(self._ids))
        refusal = self._refusal()
        if refusal is not None:
            generation._fail(refusal)
            return generation
        try:
            self._send(wire.Submit(generation.id, request))
            self._generations[generation.id] = generation
        except OverflowError:
            generation._fail(wire.InvalidRequest("a number of the request needs more than 64 bits"))
        return generation

    async def tokenize(self, asked: wire.Tokenize) -> wire.Tokens:
        """The tokens of a prompt or of a conversation; the id is chosen here. Raises EngineError."""
        return cast(wire.Tokens, await self._call(asked))

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of these tokens, special ones included. Raises EngineError."""
        return cast(wire.Text, await self._call(wire.Detokenize(0, token_ids))).text

    async def _call(self, message: wire.Tokenize | wire.Detokenize) -> wire.Tokens | wire.Text:
        refusal = self._refusal()
        if refusal is not None:
            raise refusal
        message = msgspec.structs.replace(message, id=next(self._ids))
        answer: asyncio.Future[wire.Tokens | wire.Text] = asyncio.get_running_loop().create_future()
        self._calls[message.id] = answer
        self._send(message)
        try:
            return await answer
        finally:
            del self._calls[message.id]

    def _refusal(self) -> wire.EngineError | None:
        if not self._is_connected:
            return wire.EngineUnavailable(f"no engine answers at {self.socket_path}")
        now = self._load
        if now.is_draining:
            return wire.EngineUnavailable("the engine is shutting down")
        if not now.is_ready:
            return wire.EngineLoading(f"the model is loading: {now.progress:.0%} ({now.stage})")
        return None

    @property
    def _is_connected(self) -> bool:
        """Whether there is a connection to write to.

        Its end is seen here before `_until_silent` returns, and uvloop's transport raises for a
        write after it.
        """
        return self._transport is not None and not self._transport.is_closing()

    def _send(self, message: wire.ToWorker) -> None:
        if self._transport is not None and self._is_connected:
            body = self._encoder.encode([message])
            self._transport.write(len(body).to_bytes(4, "big") + body)

    def _abort(self, id: int) -> None:
        if self._generations.pop(id, None) is not None:
            self._send(wire.Abort(id))

    def _on_message(self, message: wire.ToClient) -> None:
        match message:
            case wire.Outputs():
                generation = self._generations.get(message.id)
                if generation is not None:
                    if message.usage is not None:
                        del self._generations[message.id]
                    generation._push(message.outputs, message.usage)
            case wire.Failed():
                generation = self._generations.pop(message.id, None)
                if generation is not None:
                    generation._fail(wire.error_from_wire(message))
                elif (call := self._calls.get(message.id)) is not None and not call.done():
                    call.set_exception(wire.error_from_wire(message))
            case wire.Tokens() | wire.Text():
                if (call := self._calls.get(message.id)) is not None and not call.done():
                    call.set_result(message)
            case wire.State():
                self._load = msgspec.structs.replace(message.load, is_connected=True)
                self.info = message.info
                if message.load.is_ready:
                    self.ended, self.starts_failed = None, 0
                self._is_changed.set()

    async def _stay_connected(self, first_attempt: asyncio.Event) -> None:
        loop = asyncio.get_running_loop()
        pause_s = self._reconnect_min_s
        try:
            while True:
                try:
                    transport, frames = await loop.create_unix_connection(lambda: _Frames(self), self.socket_path)
                except OSError:
                    self.ended = wire.read_ended(self.socket_path) or self.ended
                    first_attempt.set()
                    await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                    pause_s = min(self._reconnect_max_s, pause_s * 2)
                    continue
                pause_s = self._reconnect_min_s
                self._transport = transport
                first_attempt.set()
                how = ""  # it was left, by `close`
                try:
                    how = await self._until_silent(frames)
                finally:
                    transport.abort()
                    self._on_lost(how)
        finally:
            first_attempt.set()

    async def _until_silent(self, frames: _Frames) -> str:
        """Wait until the connection ends or nothing has come for too long: a worker sends at least
        its state, every second. Counted in looks, not by the clock: if this process was stopped,
        the worker was not silent."""
        silent = 0
        while silent < _SILENT_LOOKS_MAX and not frames.closed.done():
            frames.has_received = False
            await asyncio.wait({frames.closed}, timeout=self._look_s)
            silent = 0 if frames.has_received else silent + 1
        return "went away" if frames.closed.done() else "fell silent"

    def _on_lost(self, how: str) -> None:
        is_death = bool(how) and not self._load.is_draining
        self.starts_failed += self._load.is_connected and not self._load.is_ready
        self._transport = None
        self._load = wire.EngineLoad()
        self.info = None
        self._is_changed.set()
        why = f"the engine's process {how or 'was left'}"
        generations, self._generations = self._generations, {}
        for generation in generations.values():
            generation._fail(wire.EngineUnavailable(why, is_death=is_death))
        for call in self._calls.values():
            if not call.done():
                call.set_exception(wire.EngineUnavailable(why))
