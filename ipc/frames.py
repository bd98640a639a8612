"""One end of a connection: cuts its bytes into frames, and writes frames.

A frame is a 4-byte big-endian length and one message in msgpack. Knows no calls. Invariant: a frame
over the limit, or with bytes that are not a message, ends the connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast

import msgspec

LENGTH_BYTES = 4

T = TypeVar("T")
CallT = TypeVar("CallT")
ReplyT = TypeVar("ReplyT")
_log = logging.getLogger("ipc")
_encoder = msgspec.msgpack.Encoder()


class CallFrame(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """Client to server: a call under an id that the client chose. Without a body it cancels the
    call. `trace_id` is that of the request that the call is for, if it has one.
    """

    id: int
    body: T | None = None
    trace_id: str = ""


class ErrorFrame(msgspec.Struct, frozen=True, array_like=True):
    """An error in a reply: the name of its class, its message and its attributes."""

    kind: str
    message: str
    facts: dict[str, Any] = {}


class ReplyFrame(msgspec.Struct, Generic[T], frozen=True, array_like=True):
    """Server to client: a reply to the call `id`, or the server's state if `id` is 0."""

    id: int
    body: T | None = None
    is_last: bool = True
    error: ErrorFrame | None = None


@dataclass(frozen=True, slots=True)
class Wire(Generic[CallT, ReplyT]):
    """The messages, errors and limits that both ends of a socket agree on.

    `errors` are the classes of errors that can end a call; the first replaces any other class.
    `unsendable` is the error for a message too large for a frame.
    """

    calls: msgspec.msgpack.Decoder[CallFrame[CallT]]
    replies: msgspec.msgpack.Decoder[ReplyFrame[ReplyT]]
    errors: tuple[type[Exception], ...]
    unsendable: type[Exception]
    bytes_max: int

    def encode(self, message: CallFrame[CallT] | ReplyFrame[ReplyT]) -> bytes:
        """Return the frame of a message. Raises `unsendable`."""
        try:
            data = _encoder.encode(message)
        except OverflowError:
            raise self.unsendable("a number of the request needs more than 64 bits") from None
        if len(data) > self.bytes_max:
            raise self.unsendable(f"a message of {len(data)} bytes is sent, of at most {self.bytes_max}")
        return len(data).to_bytes(LENGTH_BYTES, "big") + data

    def error_frame(self, error: Exception, trace_id: str = "") -> ErrorFrame:
        """Return the frame of an error. An error of a class outside `errors` is a bug, and is
        logged.
        """
        if not isinstance(error, self.errors):
            _log.error("a call failed", exc_info=error, extra={"trace_id": trace_id})
            error = self.errors[0](f"{type(error).__name__}: {error}")
        return ErrorFrame(type(error).__name__, str(error), vars(error))

    def revived(self, error: ErrorFrame) -> Exception:
        """Return the error that the other end sent."""
        kind = next((kind for kind in self.errors if kind.__name__ == error.kind), self.errors[0])
        revived = kind.__new__(kind, error.message)
        vars(revived).update(error.facts)
        return revived


class FrameProtocol(asyncio.Protocol, Generic[T]):
    """Cuts the bytes of a connection into messages and gives each to `receive`."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], receive: Callable[[T], object], bytes_max: int) -> None:
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.has_received = False
        self.transport: asyncio.WriteTransport
        self._decoder = decoder
        self._receive = receive
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's do not descend from asyncio's
        self.transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.has_received = True
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= LENGTH_BYTES and not self.transport.is_closing():
            begin = start + LENGTH_BYTES
            end = begin + int.from_bytes(buffer[start:begin], "big")
            if end - begin > self._bytes_max:
                self.give_up(f"a frame of {end - begin} bytes, of at most {self._bytes_max}")
                return
            if end > len(buffer):
                break
            try:
                message = self._decoder.decode(memoryview(buffer)[begin:end])
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                self.give_up(f"no message: {error}")
                return
            self._receive(message)
            start = end
        del buffer[:start]

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def send(self, frame: bytes) -> bool:
        """Write a frame. Returns False if the connection has ended.

        The transport knows the end before `connection_lost` is called, and uvloop's raises for a
        write after it.
        """
        if self.transport.is_closing():
            return False
        self.transport.write(frame)
        return True

    def give_up(self, why: str) -> None:
        _log.warning("the other end sent %s: connection closed", why)
        self.transport.abort()
