"""AsyncEngine: the client of an engine worker's socket, for an event loop.

Knows the messages, and no torch, models or tokenizers. Invariant: a started generation is finished
by the engine, failed with a typed error, or aborted in the engine by `aclose`, even before its
first output.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import msgspec

from ipc import ReplyStream, RpcClient
from local_engine import messages as wire


class AsyncEngine:
    """A client of one engine worker that keeps itself connected.

        engine = AsyncEngine("/run/engine.sock")
        engine.start()
        await engine.wait_ready()
        async with engine.generate(GenerateRequest(messages=[...])) as outputs:
            async for output in outputs:
                print(output.text, end="")
        print(output.usage)

    Belongs to one event loop. `generate` never raises: the stream's first `__anext__` raises its
    errors.
    """

    def __init__(self, socket_path: str | Path, *, look_s: float = 1.0) -> None:
        """`look_s`: the seconds between checks for bytes from the worker; see `RpcClient`."""
        self.info: wire.ModelInfo | None = None
        self.ended: wire.EngineEnded | None = None  # why its process ended, since it was ready last
        self.starts_failed = 0  # processes that were seen loading since then, and ended
        self._load = wire.EngineLoad()
        self._is_changed = asyncio.Event()
        self._rpc = RpcClient(socket_path, wire.WIRE, on_state=self._learn, lost=self._lost, look_s=look_s)
        self.socket_path, self.calls = self._rpc.socket_path, self._rpc.streams
        self.start = self._rpc.start
        self.aclose = self._rpc.aclose

    async def wait_ready(self) -> wire.ModelInfo:
        """Wait until the model is loaded, even if the engine fails meanwhile; bound it with
        asyncio.timeout.
        """
        while not (self._load.is_ready and self.info is not None):
            self._is_changed.clear()
            await self._is_changed.wait()
        return self.info

    def load(self) -> wire.EngineLoad:
        """Return the last state that the worker sent.

        Without a connection `is_connected` and `is_ready` are False.
        """
        return self._load

    def generate(self, request: wire.GenerateRequest) -> ReplyStream[wire.Output]:
        """Start a generation. `__anext__` raises its errors, EngineUnavailable and EngineLoading
        included.
        """
        return cast(ReplyStream[wire.Output], self._rpc.call(request))

    async def tokenize(self, request: wire.TokenizeCall) -> wire.TokenIds:
        """Return the tokens of a prompt or of a conversation. Raises EngineError."""
        return cast(wire.TokenIds, await self._rpc.call(request).only())

    async def detokenize(self, token_ids: list[int]) -> str:
        """Return the text of `token_ids`, special ones included. Raises EngineError."""
        return cast(wire.TokensText, await self._rpc.call(wire.DetokenizeCall(token_ids)).only()).text

    def _learn(self, state: wire.EngineReply | None) -> None:
        if isinstance(state, wire.EngineState):
            self._load = msgspec.structs.replace(state.load, is_connected=True)
            self.info = state.info
            if state.load.is_ready:
                self.ended, self.starts_failed = None, 0
        else:
            self.starts_failed += self._load.is_connected and not self._load.is_ready
            self.ended = wire.read_ended(self.socket_path) or self.ended
            self._load = wire.EngineLoad()
            self.info = None
        self._is_changed.set()

    def _lost(self, ending: str) -> wire.EngineUnavailable:
        is_death = ending in ("went away", "fell silent") and not self._load.is_draining
        return wire.EngineUnavailable(f"the engine's process {ending}", is_death=is_death)
