"""Reads request bodies within limits of size, of time, and of what a team's unfinished ones hold.

Formats: ASGI HTTP specification 2.3; gzip (RFC 1952). Knows no HTTP server and no endpoints.
Invariants: no more of a body than its limit is held, whatever its announced length, and no more of
its decompressed content; a body that does not come counts as a request, and ends.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Mapping
from typing import Any

from gateway.accounts import Identity
from gateway.journey.rate_limits import LimitHeaders, Limits
from gateway.transport.eager import Eager
from gateway.wire.errors import BadRequest, BodyTooSlow, RateLimited, TooLarge, UnsupportedMediaType

_IDLE_S = 20.0  # without a byte; a body has this long, too, and a second more for each _BYTES_PER_S
_LOOKS = 20  # within that time
_BYTES_PER_S = 500  # as Apache's mod_reqtimeout
_UNFINISHED_MAX = 4  # full bodies of a size, of one owner in one worker
_GZIP_WBITS = 31  # zlib's argument for one gzip member with its checksum
_GZIP_STEP_BYTES = 256 << 10  # one to two milliseconds of work
_GZIP_MEMBERS_MAX = 1_000  # a block compressor makes one for each 64 KiB; each costs time, empty or not

Receive = Callable[[], Awaitable[Any]]


class ClientGone(Exception):
    """The client left: no response is sent."""


class BodyBroken(ClientGone):
    """The body ended before its end, or is not one by HTTP's rules: who is still there gets a 400."""


class Bodies:
    """The bodies under way in one worker, and the bytes that they hold, by owner and limit of size."""

    def __init__(self, limits: Limits | None = None, idle_s: float = _IDLE_S) -> None:
        self.limits = limits
        self.idle_s = idle_s
        self.held: Counter[tuple[Hashable, int]] = Counter()
        self.late_at_s: dict[Body, float] = {}  # of those that wait for bytes, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    def of(self, receive: Receive, headers: Mapping[str, str], identity: Identity | None) -> "Body":
        """The body of a request of `identity`; None: the caller is not known yet."""
        body = Body(self, receive, headers, identity)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.idle_s / _LOOKS, self._look)
        return body

    def _look(self) -> None:
        """End the bodies that are late. One timer for all of them costs a request less than its own."""
        self._timer = None
        loop = asyncio.get_running_loop()
        for body, late_at_s in list(self.late_at_s.items()):
            if late_at_s <= loop.time():
                body.expire()
        if self.late_at_s:
            self._timer = loop.call_later(self.idle_s / _LOOKS, self._look)


class Body:
    """One request's body.

    A request that `is_counted` in the rate limits is not counted again. `taken` has their headers, if
    it was counted while it arrived.
    """

    __slots__ = ("_bodies", "_headers", "_held", "_identity", "_receive", "_task", "is_counted", "taken")

    def __init__(self, bodies: Bodies, receive: Receive, headers: Mapping[str, str], identity: Identity | None) -> None:
        self._bodies = bodies
        self._receive = receive
        self._headers = headers
        self._identity = identity
        self._task: asyncio.Task[Any] | None = None  # that waits for bytes; None once it is late
        self._held = 0  # bytes of it, while it is unfinished
        self.is_counted = identity is None
        self.taken: Eager[LimitHeaders] | None = None

    def expire(self) -> None:
        """End the wait for bytes."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def whole(self, bytes_max: int) -> bytes:
        """All of it, of `bytes_max` bytes at most, compressed and decompressed.

        Raises TooLarge, UnsupportedMediaType, BadRequest for invalid gzip, BodyTooSlow, RateLimited,
        BodyBroken.
        """
        encoding = self._headers.get("content-encoding", "").strip().lower()
        if encoding not in ("", "identity", "gzip", "x-gzip"):  # RFC 9110, section 8.4.1.3: the same
            raise UnsupportedMediaType(
                f"The body has Content-Encoding {encoding[:100]!r}: expected gzip, or none for a plain body"
            )
        pieces = [piece async for piece in self.read(bytes_max)]
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        return await _decompressed(body, bytes_max) if "gzip" in encoding else body

    def pieces(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The same as it arrives, without an encoding."""
        if self._headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise UnsupportedMediaType("Files can't be sent with a Content-Encoding: send them as they are")
        return self.read(bytes_max)

    async def read(self, bytes_max: int) -> AsyncIterator[bytes]:
        """The body as it is sent, encoded or not."""
        announced = self._headers.get("content-length", "")
        length = int(announced) if announced.isdecimal() else None
        if length is not None and length > bytes_max:
            raise _too_large(bytes_max)
        size, began_s = 0, asyncio.get_running_loop().time()
        try:
            while True:
                message = await self._next(began_s, size)
                if message["type"] != "http.request":
                    raise BodyBroken
                piece: bytes = message.get("body", b"")
                size += len(piece)
                if size > bytes_max:
                    raise _too_large(bytes_max)
                yield piece
                if size == length or not message.get("more_body"):
                    return
                self._hold(size, bytes_max)
                if not self.is_counted:  # before more of it is read
                    self.is_counted = True
                    self.taken = await self._count()
        finally:
            if self._held:
                self._hold(0, bytes_max)

    def _hold(self, size: int, bytes_max: int) -> None:
        """Count `size` bytes of a body that is unfinished. Raises RateLimited."""
        held, owner = self._bodies.held, (self._identity and self._identity.team.id, bytes_max)
        held[owner] += size - self._held
        self._held = size
        if not held[owner]:
            del held[owner]
        elif size and held[owner] > _UNFINISHED_MAX * bytes_max:
            raise RateLimited(
                f"Requests whose bodies have not come to their end hold over {_UNFINISHED_MAX * bytes_max} "
                "bytes: end them, or send fewer at once",
                retry_after_s=1.0,
            )

    async def _count(self) -> Eager[LimitHeaders]:
        """Count the request. Raises RateLimited."""
        assert self._bodies.limits is not None
        assert self._identity is not None
        return Eager.done(await self._bodies.limits.take(self._identity))

    async def _next(self, began_s: float, size: int) -> Any:
        """The next message, after `size` bytes. Raises BodyTooSlow."""
        idle_s, late_at_s = self._bodies.idle_s, self._bodies.late_at_s
        self._task = task = asyncio.current_task()
        now_s = asyncio.get_running_loop().time() if size else began_s
        late_at_s[self] = min(now_s, began_s + size / _BYTES_PER_S) + idle_s
        try:
            return await self._receive()
        except asyncio.CancelledError:
            if self._task is not None or task is None:
                raise
            task.uncancel()
            raise BodyTooSlow(size, idle_s) from None
        finally:
            del late_at_s[self]


async def _decompressed(body: bytes, bytes_max: int) -> bytes:
    """The content of all gzip members in `body` (RFC 1952, section 2.2).

    Works in bounded steps, and other requests run between them. Raises TooLarge, BadRequest.
    """
    inflate, members, parts, size = zlib.decompressobj(_GZIP_WBITS), 1, list[bytes](), 0
    for start in range(0, len(body), _GZIP_STEP_BYTES):
        # a member's end returns the rest of its input: a slice bounds what is copied
        rest = body[start : start + _GZIP_STEP_BYTES]
        while rest:
            if inflate.eof:
                inflate, members = zlib.decompressobj(_GZIP_WBITS), members + 1
            if members > _GZIP_MEMBERS_MAX:
                raise _bad_gzip(f"it has more than {_GZIP_MEMBERS_MAX} members")
            try:
                part = inflate.decompress(rest, _GZIP_STEP_BYTES)
            except zlib.error:
                raise _bad_gzip("it is not gzip, or not all of it") from None
            size += len(part)
            if size > bytes_max:
                raise _too_large(bytes_max, "decompressed ")
            parts.append(part)
            rest = inflate.unused_data or inflate.unconsumed_tail
            await asyncio.sleep(0)
    if not inflate.eof:
        raise _bad_gzip("it ends before its data does")
    return b"".join(parts)


def _bad_gzip(why: str) -> BadRequest:
    return BadRequest(f"The body has Content-Encoding gzip, but {why}", code="invalid_encoding")


def _too_large(bytes_max: int, how: str = "") -> TooLarge:
    return TooLarge(f"The {how}request body is larger than the limit of {bytes_max} bytes")
