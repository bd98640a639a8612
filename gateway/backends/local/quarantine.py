"""Suspects: the requests that were in an engine when its process died.

One of them may have killed it. Each is given a second chance, one at a time until its first token is there, so that a second
death tells which it was; that one is refused for a while, and nobody else is blamed. Knows requests' bodies and a clock.
Invariant: a request is at an engine's death at most twice before it is refused, whoever sends it again; as long as nobody
dies, nothing is computed and nothing waits.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import msgspec

from gateway.backends.base import BackendRejected, BackendRequest
from gateway.backends.refusals import error_body

_DEATHS_MAX = 2
_KEPT_S = 600.0
_COUNT_MAX = 1_000
_SAME_DEATH_S = 5.0


class Suspects:
    """One engine's, as one gateway worker has seen it die. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._deaths: dict[bytes, tuple[int, float]] = {}  # how many, and when the last was
        self._trial = asyncio.Lock()
        self._on_trial: bytes | None = None
        self._convicted_at = -_SAME_DEATH_S

    async def admit(self, request: BackendRequest) -> bytes | None:
        """Before a request goes to the engine: None where nothing is known of it; else its name for `passed` and `cleared`, once
        no other suspect is on trial. Raises BackendRejected for one that has killed, or whose turn did not come in time."""
        if not self._deaths:
            return None
        key = _key(request)
        if not self._count(key):
            return None
        try:
            async with asyncio.timeout(request.ttft_timeout_s):
                await self._trial.acquire()
        except TimeoutError:
            raise _refused("is tried again when others like it have been", 503) from None
        self._on_trial = key
        if self._count(key) >= _DEATHS_MAX:
            self.passed(key)
            raise _refused("is refused here for some minutes: that was the second time", 422)
        return key

    def passed(self, key: bytes | None) -> None:
        """The request's first token is there, or it has left: the next may be tried."""
        if key is not None and self._on_trial == key:
            self._on_trial = None
            self._trial.release()

    def cleared(self, key: bytes | None) -> None:
        """It was answered to its end."""
        if key is not None:
            self._deaths.pop(key, None)

    def died(self, request: BackendRequest) -> None:
        """The engine's process went away while it had this request."""
        key, now = _key(request), self._clock()
        if self._on_trial == key:
            self._convicted_at = now
        elif self._on_trial is not None or now - self._convicted_at < _SAME_DEATH_S:
            return
        self._deaths[key] = (self._count(key) + 1, now)
        if len(self._deaths) > _COUNT_MAX:
            del self._deaths[next(iter(self._deaths))]

    def _count(self, key: bytes) -> int:
        deaths, at = self._deaths.get(key, (0, 0.0))
        if deaths and self._clock() - at > _KEPT_S:
            del self._deaths[key]
            return 0
        return deaths


def _refused(what: str, status: int) -> BackendRejected:
    message = f"The local engine died while it worked on this request, which {what}"
    return BackendRejected(message, status=status, body=error_body(message, None, None, "engine_died"))


def _key(request: BackendRequest) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(request.body, order="deterministic"), key=request.salt[:64]).digest()
