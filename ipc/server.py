"""The server end of a socket: calls in, replies and the server's state out.

Knows frames and not their messages. Invariants: a call is answered on its own connection, and not
after it ended there; a client that does not read loses only its connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Generic

from ipc.frames import CallFrame, CallT, FrameProtocol, ReplyFrame, Wire

_STATE_REPEAT_S = 1.0
_UNREAD_BYTES_MAX = 64 << 20
_CLOSE_S = 1.0

_log = logging.getLogger("ipc")


class IncomingCall(Generic[CallT]):
    """A call of one client. It is open until its last reply, or until the client cancels it.

    The end of a call that has a trace is logged if it failed or was slow: without its texts.
    """

    __slots__ = ("_began_s", "_id", "_peer", "body", "is_open", "trace_id")

    def __init__(self, peer: _Peer[CallT], frame: CallFrame[CallT], body: CallT) -> None:
        self.body = body
        self.trace_id = frame.trace_id
        self.is_open = True  # its last reply is still wanted
        self._peer = peer
        self._id = frame.id
        self._began_s = time.monotonic()

    def reply(self, body: Any, *, is_last: bool = True) -> None:
        """Send a reply, if the call is open."""
        self._send(ReplyFrame(self._id, body, is_last))

    def fail(self, error: Exception) -> None:
        """End the call with an error, if it is open."""
        self._send(ReplyFrame(self._id, error=self._peer.wire.error_frame(error, self.trace_id)))

    def _send(self, reply: ReplyFrame[Any]) -> None:
        if not self.is_open:
            return
        if reply.is_last:
            self.close(reply.error.kind if reply.error is not None else "answered")
        self._peer.send_reply(reply)

    def close(self, how: str) -> None:
        """End the call: `how` is "answered", "cancelled" or the kind of its error."""
        self.is_open = False
        del self._peer.calls[self._id]
        took_s, is_failed = time.monotonic() - self._began_s, how not in ("answered", "cancelled")
        if self.trace_id and (is_failed or took_s >= self._peer.server.slow_s):
            words, level = (type(self.body).__name__, how, took_s), logging.WARNING if is_failed else logging.INFO
            _log.log(level, "%s: %s after %.3f s", *words, extra={"trace_id": self.trace_id})


@dataclass(eq=False)
class RpcServer(Generic[CallT]):
    """Passes each call to `on_call`, and each open call that its client cancels or leaves to
    `on_cancel`.

    `on_call` may return a coroutine that answers the call; an error that it raises ends the call.
    The server sends `state()` to each new client, and to all clients when it changes and every
    second. A call that takes `slow_s` seconds is slow.
    """

    wire: Wire[CallT, Any]
    _: KW_ONLY
    state: Callable[[], Any]
    on_call: Callable[[IncomingCall[CallT]], Coroutine[Any, Any, None] | None]
    on_cancel: Callable[[IncomingCall[CallT]], object] = lambda call: None
    slow_s: float = 5.0

    def __post_init__(self) -> None:
        self.peers: set[_Peer[CallT]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._pushed: Any = None
        self._pushed_at = 0.0

    async def serve(self, socket_path: Path, is_over: Callable[[], bool], period_s: float) -> None:
        """Listen on a new unix socket that only this user can open. Raises OSError.

        Returns when `is_over()`, which is called every `period_s`, is true, or when the parent
        process has ended. Before, it sends the pending replies, and closes all connections.
        """
        parent = os.getppid()
        socket_path.unlink(missing_ok=True)
        mask = os.umask(0o177)
        try:
            listening = await asyncio.get_running_loop().create_unix_server(lambda: _Peer(self), str(socket_path))
        finally:
            os.umask(mask)
        try:
            while not is_over() and os.getppid() == parent:
                self._push_state()
                await asyncio.sleep(period_s)
        finally:
            listening.close()
            socket_path.unlink(missing_ok=True)
            for peer in self.peers:
                peer.transport.close()
            if self.peers:
                await asyncio.wait([peer.closed for peer in self.peers], timeout=_CLOSE_S)

    def take(self, call: IncomingCall[CallT]) -> None:
        """Begin to answer a call."""
        work = self.on_call(call)
        if work is not None:
            task = asyncio.create_task(self._answer(call, work))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, call: IncomingCall[CallT], work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:  # its own answer, whatever it is
            call.fail(error)

    def _push_state(self) -> None:
        state, now = self.state(), time.monotonic()
        if state != self._pushed or now - self._pushed_at >= _STATE_REPEAT_S:
            self._pushed, self._pushed_at = state, now
            for peer in list(self.peers):
                peer.send_reply(ReplyFrame(0, state))

    @property
    def has_calls(self) -> bool:
        """Whether any call is open."""
        return any(peer.calls for peer in self.peers)


class _Peer(FrameProtocol[CallFrame[CallT]], Generic[CallT]):
    """A client's connection, with its open calls by id."""

    def __init__(self, server: RpcServer[CallT]) -> None:
        super().__init__(server.wire.calls, self._take, server.wire.bytes_max)
        self.wire = server.wire
        self.calls: dict[int, IncomingCall[CallT]] = {}
        self.server = server

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.server.peers.add(self)
        self.send_reply(ReplyFrame(0, self.server.state()))

    def connection_lost(self, error: Exception | None) -> None:
        self.server.peers.discard(self)
        for id in list(self.calls):
            self._cancel(id)
        super().connection_lost(error)

    def send_reply(self, reply: ReplyFrame[Any]) -> None:
        try:
            frame = self.wire.encode(reply)
        except self.wire.unsendable as error:
            self._cancel(reply.id)
            frame = self.wire.encode(ReplyFrame(reply.id, error=self.wire.error_frame(error)))
        if self.send(frame) and self.transport.get_write_buffer_size() > _UNREAD_BYTES_MAX:
            _log.warning("a client does not read: connection closed")
            self.transport.abort()

    def _take(self, frame: CallFrame[CallT]) -> None:
        if frame.body is None and frame.id == 0:
            self.send_reply(ReplyFrame(0, self.server.state()))
        elif frame.body is None:
            self._cancel(frame.id)
        elif frame.id in self.calls:
            self.give_up("an id that is in use")
        else:
            call = self.calls[frame.id] = IncomingCall(self, frame, frame.body)
            self.server.take(call)

    def _cancel(self, id: int) -> None:
        if (call := self.calls.get(id)) is not None:
            call.close("cancelled")
            self.server.on_cancel(call)
