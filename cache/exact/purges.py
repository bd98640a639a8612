"""Purges across processes: an L1 serves nothing that a purge would not reach.

Each process listens on one Redis channel and sends heartbeats on it: it trusts its L1 only while it
receives its own heartbeats. A purge is announced there, and every listener applies and signs it.
The purge returns when all have signed, or when the others must have missed their heartbeats.
Invariants: once a purge has returned, no process serves an entry that it removed, nor stores one
that was asked for before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import uuid
from collections import deque
from collections.abc import Callable

import msgspec

from cache.entry import Entry, Purge
from cache.exact.l1 import L1
from cache.exact.log import PURGE_CHANNEL, Announced, EntryLog
from cache.redis_client import REDIS_FAILURES, Subscribe, Subscription
from cache.stored import reader

_HEARTBEAT_S = 2.0
_HEARTBEAT_MISSED_S = 5.0
_RESUBSCRIBE_S = 0.5
_SIGNED_POLL_S = 0.002
_KEPT_MAX = 1_000
_read = reader(msgspec.msgpack.Decoder(Announced))


class Purges:
    """One process' end of the purge channel. `monotonic` gives seconds that never jump."""

    def __init__(self, log: EntryLog, l1: L1, clock: Callable[[], float], monotonic: Callable[[], float]) -> None:
        self._log = log
        self._l1 = l1
        self._clock = clock
        self._monotonic = monotonic
        self._heartbeat_at: float | None = None
        self._latest: deque[tuple[float, Purge]] = deque(maxlen=_KEPT_MAX)  # each with its time
        self._is_deaf = False  # it listened, and heard no heartbeat of its own since

    @property
    def is_on(self) -> bool:
        """Whether the L1 may be used; once it may not, it is emptied."""
        if self._heartbeat_at is None:
            return False
        if self._monotonic() - self._heartbeat_at <= _HEARTBEAT_MISSED_S:
            return True
        self._turn_off()
        self._is_deaf = True
        return False

    def reach(self, entry: Entry, asked_at: float) -> bool:
        """Whether a purge since `asked_at`, in seconds of the clock, was of `entry`, too, or may have been."""
        if not self.is_on and self._is_deaf:
            return asked_at < math.inf
        purges = [purge for at, purge in self._latest if at >= asked_at]
        about, now = entry.about() if purges else None, self._clock()
        return any(about and purge.matches(entry.partition, entry.exact, about, now) for purge in purges)

    async def announce(self, purge: Purge) -> None:
        """Announce a purge, before and after its entries leave Redis; returns once no process stores an
        earlier answer, and no L1 can serve what had left.

        Raises redis.exceptions.RedisError.
        """
        self._apply(purge)
        receipt = uuid.uuid4().bytes
        listening = await self._log.announce(purge, receipt)
        deadline = self._monotonic() + _HEARTBEAT_MISSED_S
        while self._monotonic() < deadline:
            if await self._log.signatures(receipt) >= listening:
                return
            await asyncio.sleep(_SIGNED_POLL_S)

    async def follow(self, subscribe: Subscribe) -> None:
        """Listen and apply purges until cancelled."""
        while True:
            try:
                async with subscribe(PURGE_CHANNEL) as subscription:
                    await self._listen(subscription)
            except REDIS_FAILURES:
                pass  # the L1 is off meanwhile, and lookups say what Redis says
            finally:
                was_on = self._heartbeat_at is not None
                self._turn_off()
            self._is_deaf |= was_on
            await asyncio.sleep(_RESUBSCRIBE_S)

    async def _listen(self, subscription: Subscription) -> None:
        name = uuid.uuid4().bytes
        heartbeats = asyncio.create_task(self._beat(name))
        try:
            async for message in subscription.listen():
                if message["type"] == "message":
                    await self._receive(message["data"], name)
        finally:
            heartbeats.cancel()

    async def _receive(self, data: bytes, name: bytes) -> None:
        try:
            announced = _read(data)
        except msgspec.DecodeError:
            announced = Announced(Purge())  # of another version: it must have meant something
        if announced.purge is not None:
            self._apply(announced.purge, is_replacement=not announced.receipt)
            if announced.receipt:
                # the process that waits for it gives up after a while
                with contextlib.suppress(*REDIS_FAILURES):
                    await self._log.sign(announced.receipt)
        elif announced.receipt == name:
            self._heartbeat_at = self._monotonic()
            if self._is_deaf:  # what it missed may have been any purge
                self._is_deaf = False
                self._latest.append((self._clock(), Purge()))

    async def _beat(self, name: bytes) -> None:
        while True:
            with contextlib.suppress(*REDIS_FAILURES):  # a missing heartbeat turns the L1 off
                await self._log.announce(None, name)
            await asyncio.sleep(_HEARTBEAT_S if self.is_on else _HEARTBEAT_S / 10)

    def _apply(self, purge: Purge, *, is_replacement: bool = False) -> None:
        self._l1.purge(purge, self._clock())
        if not is_replacement:
            self._latest.append((self._clock(), purge))

    def _turn_off(self) -> None:
        self._heartbeat_at = None
        self._l1.clear()
