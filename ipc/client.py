"""The client end of a socket: keeps itself connected, and multiplexes all calls over one
connection.

Runs on one event loop. Knows frames and not their messages. Invariants: a started call ends with
its last reply, with an error, or by cancellation in the server; ids are used once, so that no call
gets a reply of another connection.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import Generic, TypeVar

from ipc.frames import CallFrame, FrameProtocol, ReplyFrame, ReplyT, Wire

CallT = TypeVar("CallT")

TRACE_ID: ContextVar[str] = ContextVar("trace_id", default="")
"""The id of the trace that this task's calls belong to, 32 hex digits; empty without a trace."""

_RECONNECT_MIN_S, _RECONNECT_MAX_S = 0.05, 1.0
_SILENT_LOOKS_MAX = 10  # a server that works sends its state every second


class ReplyStream(Generic[ReplyT]):
    """The replies to one call: iterate to read them, `aclose` to cancel the call.

    It is not an async generator, which runs no `finally` if it was never started: its call would
    continue. `__anext__` raises the call's error after the replies that came before it; after that
    it raises StopAsyncIteration.
    """

    def __init__(self, cancel: Callable[[], object] = lambda: None) -> None:
        self._cancel = cancel
        self._replies: list[ReplyT] = []
        self._error: Exception | None = None
        self._is_over = False
        self._wake: asyncio.Future[None] | None = None

    def __aiter__(self) -> ReplyStream[ReplyT]:
        return self

    async def __anext__(self) -> ReplyT:
        while not self._replies:
            if self._error is not None:
                try:
                    raise self._error
                finally:
                    self._error = None  # its frames reference this object
            if self._is_over:
                raise StopAsyncIteration
            self._wake = asyncio.get_running_loop().create_future()
            try:
                await self._wake
            finally:
                self._wake = None
        return self._replies.pop(0)

    async def only(self, timeout_s: float | None = None) -> ReplyT:
        """Return the first reply and cancel the call. Raises the call's error, or TimeoutError."""
        try:
            async with asyncio.timeout(timeout_s):
                return await anext(self)
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Cancel the call in the server, unless it has ended. May be called at any time, and
        repeatedly.
        """
        if not self._is_over:
            self._cancel()
        self._replies.clear()
        self._error = None
        self.end()

    async def __aenter__(self) -> ReplyStream[ReplyT]:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def push(self, reply: ReplyT) -> None:
        """Append a reply."""
        self._replies.append(reply)
        self._notify()

    def end(self, error: Exception | None = None) -> None:
        """End the iteration after the replies so far, with `error` if given."""
        if not self._is_over:
            self._error, self._is_over = error, True
        self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class RpcClient(Generic[CallT, ReplyT]):
    """Calls the server at `socket_path`. It keeps itself connected from `start` to `aclose`.

    `on_state` gets each state that the server sends, and None when a connection ends or cannot be
    opened. `lost` makes the error of a call without a connection; its argument is the reason.
    """

    def __init__(
        self,
        socket_path: Path | str,
        wire: Wire[CallT, ReplyT],
        *,
        on_state: Callable[[ReplyT | None], object],
        lost: Callable[[str], Exception],
        look_s: float = 1.0,
    ) -> None:
        """`look_s` is the interval in seconds between checks for bytes from the server.

        After 10 checks without bytes the client closes the connection.
        """
        self.socket_path = str(socket_path)
        self._wire = wire
        self._on_state = on_state
        self._lost = lost
        self._look_s = look_s
        self._ids = itertools.count(1)
        self.streams: dict[int, ReplyStream[ReplyT]] = {}
        self._connection: FrameProtocol[ReplyFrame[ReplyT]] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to connect in the background. Needs a running event loop."""
        if self._task is None:
            self._task = asyncio.create_task(self._keep_connected(), name=f"connection to {self.socket_path}")

    async def aclose(self) -> None:
        """Disconnect. Running calls fail with the error of `lost`, and the server cancels them."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and not self._connection.transport.is_closing()

    def call(self, body: CallT) -> ReplyStream[ReplyT]:
        """Begin a call. Without a connection its stream raises the error of `lost`.

        If the message does not fit in a frame, the stream raises the wire's `unsendable`.
        """
        id = next(self._ids)
        stream: ReplyStream[ReplyT] = ReplyStream(lambda: self._cancel(id))
        try:
            frame = self._wire.encode(CallFrame(id, body, TRACE_ID.get()))
        except self._wire.unsendable as error:
            stream.end(error)
            return stream
        if self._connection is None or not self._connection.send(frame):
            stream.end(self._lost("is not there"))
        else:
            self.streams[id] = stream
        return stream

    def ask_state(self) -> None:
        """Ask the server to send its state."""
        self._cancel(0)

    def _receive(self, reply: ReplyFrame[ReplyT]) -> None:
        if reply.id == 0:
            self._on_state(reply.body)
            return
        stream = self.streams.pop(reply.id, None) if reply.is_last else self.streams.get(reply.id)
        if stream is None:
            return
        if reply.body is not None:
            stream.push(reply.body)
        if reply.is_last:
            stream.end(self._wire.revived(reply.error) if reply.error is not None else None)

    def _cancel(self, id: int) -> None:
        self.streams.pop(id, None)
        if self._connection is not None:
            self._connection.send(self._wire.encode(CallFrame(id)))

    async def _keep_connected(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _RECONNECT_MIN_S
        while True:
            try:
                _, connection = await loop.create_unix_connection(
                    lambda: FrameProtocol(self._wire.replies, self._receive, self._wire.bytes_max), self.socket_path
                )
            except OSError:
                self._on_state(None)
            else:
                pause_s = _RECONNECT_MIN_S
                await self._read(connection)
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(_RECONNECT_MAX_S, pause_s * 2)

    async def _read(self, connection: FrameProtocol[ReplyFrame[ReplyT]]) -> None:
        """Wait until the connection ends or the server falls silent, then fail the running calls.

        Checks are counted, not seconds: while this process was stopped, the server was not silent.
        """
        self._connection = connection
        ending, silent = "was left", 0
        try:
            while silent < _SILENT_LOOKS_MAX and not connection.closed.done():
                connection.has_received = False
                await asyncio.wait({connection.closed}, timeout=self._look_s)
                silent = 0 if connection.has_received else silent + 1
            ending = "went away" if connection.closed.done() else "fell silent"
        finally:
            self._connection = None
            connection.transport.abort()
            streams = list(self.streams.values())
            self.streams.clear()
            for stream in streams:
                stream.end(self._lost(ending))
            self._on_state(None)
