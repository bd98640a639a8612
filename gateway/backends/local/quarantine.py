"""The requests that were running when an engine crashed: each may be the cause.

Each is retried alone until its first token, so that a second crash identifies the cause. That
request is refused for ten minutes. Reads the requests' bodies and a clock. Invariant: a request can
crash the engine at most twice. Without a crash this class does nothing.
"""

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from gateway.backends.base import BackendRejected, BackendRequest
from gateway.backends.refusals import error_body

_CRASHES_MAX = 2
_KEPT_S = 600.0
_COUNT_MAX = 1_000
_SAME_CRASH_S = 5.0


class Quarantine:
    """The crashes of one engine, as observed by one gateway worker. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._crashes: dict[bytes, tuple[int, float]] = {}  # how many, and the time of the last
        self._turn = asyncio.Lock()
        self._alone: bytes | None = None
        self._found_at = -_SAME_CRASH_S

    async def admit(self, request: BackendRequest) -> bytes | None:
        """Let a request go to the engine, alone if it was running at a crash.

        Returns None if no crash is counted against the request; else its key, for `leave` and
        `forget`, once no other such request runs. Raises BackendRejected after the second crash, or
        if the request's turn does not come within its `ttft_timeout_s`.
        """
        if not self._crashes:
            return None
        key = _key(request)
        if not self._count(key):
            return None
        try:
            async with asyncio.timeout(request.ttft_timeout_s):
                await self._turn.acquire()
        except TimeoutError:
            raise _refused("is tried again when others like it have been", 503) from None
        self._alone = key
        if self._count(key) >= _CRASHES_MAX:
            self.leave(key)
            raise _refused("is refused here for some minutes: that was the second time", 422)
        return key

    def leave(self, key: bytes | None) -> None:
        """Let the next request be retried: the request of `key` has its first token, or has ended."""
        if key is not None and self._alone == key:
            self._alone = None
            self._turn.release()

    def forget(self, key: bytes | None) -> None:
        """Clear the request of `key`, which has a complete answer: it did not cause the crash."""
        if key is not None:
            self._crashes.pop(key, None)

    def note_crash(self, request: BackendRequest) -> None:
        """Count a crash of the engine against a request that was running."""
        key, now = _key(request), self._clock()
        if self._alone == key:
            self._found_at = now
        elif self._alone is not None or now - self._found_at < _SAME_CRASH_S:
            return
        self._crashes[key] = (self._count(key) + 1, now)
        if len(self._crashes) > _COUNT_MAX:
            del self._crashes[next(iter(self._crashes))]

    def _count(self, key: bytes) -> int:
        crashes, at = self._crashes.get(key, (0, 0.0))
        if crashes and self._clock() - at > _KEPT_S:
            del self._crashes[key]
            return 0
        return crashes


def _refused(consequence: str, status: int) -> BackendRejected:
    message = f"The local engine died while it worked on this request, which {consequence}"
    return BackendRejected(message, status=status, body=error_body(message, None, None, "engine_died"))


def _key(request: BackendRequest) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(request.body, order="deterministic"), key=request.salt[:64]).digest()
