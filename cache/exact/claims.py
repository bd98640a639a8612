"""Claims to requests that are being answered: one process answers, the others wait for its entry.

    sameway:{P}:claim:E   string  `process:since`: the process that makes entry E, and since when, ms

A lookup that finds no entry takes the claim in the same script, and so in the same round trip;
storing the entry, or a pointer from its words, ends it. P is the partition in hex, E the entry's
exact digest in hex. Knows no generations. Invariants: a process holds a claim only while it renews
it, so that a killed process' claim ends within `LEASE_S`, and any claim within `HELD_S_MAX`; only
the process that holds a claim releases it; a read-only Redis returns entries and no claims.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from cache.exact.scripts import POINTED, RELEASED
from cache.fingerprint import Fingerprint
from cache.redis_client import Redis

_KEY = "sameway:{%s}:claim:%s"
LEASE_S = 3.0
LEASE_MS = int(LEASE_S * 1000)
HELD_S_MAX = 30.0
_RENEWED_AFTER_S = 1.0
_TAKEN, _OWN, _ELSEWHERE, _NONE = 1, 2, 3, 0

# KEYS: entries, claim; by words also words, groups, suspended. ARGV: exact, the terms (process, lease_ms, 1
# where a claim is wanted, the SHA-1 of an entry that does not count or 0); by words also their key. Answers the entry, or
# the one that its words point at, or {what became of the claim, its age in ms}.
_ENTRY = """
local process, lease_ms, wants, stale = string.match(ARGV[2], '^(%x+) (%d+) (%d) (%x+)$')
local entry = redis.call('HGET', KEYS[1], ARGV[1])
if entry and (stale == '0' or redis.sha1hex(entry) ~= stale) then return entry end
"""
_CLAIM = """
local claim = redis.pcall('GET', KEYS[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local owner, since = string.match(type(claim) == 'string' and claim or '', '^(%x+):(%d+)$')
if owner == process then return {2, 0} end
if owner then return {3, math.max(0, now - since)} end
if wants == '0' then return {0, 0} end
local is_set = redis.pcall('SET', KEYS[2], process .. ':' .. string.format('%.0f', now), 'PX', lease_ms)
return {is_set.ok and 1 or 0, 0}
"""
_LOOK = _ENTRY + _CLAIM
_LOOK_BY_WORDS = (
    POINTED
    + _ENTRY
    + """
local found = pointed(ARGV[3], KEYS[1], KEYS[3], KEYS[4], KEYS[5])
if found then return found end
"""
    + _CLAIM
)

# KEYS: claim. ARGV: process.
_RELEASE = RELEASED + "release(KEYS[1], ARGV[1]) return 1"


class Look(msgspec.Struct, frozen=True):
    """The result of a look: the encoded entry, or the state of the claim.

    Without an entry, `is_claimed` tells that this caller makes it, `elsewhere_ms` how long another
    process has been making it. `pointed`: the entry that its words point at, and the pointer,
    encoded.
    """

    data: bytes | None
    is_claimed: bool = False
    elsewhere_ms: float | None = None
    pointed: tuple[bytes, bytes] | None = None


class Claims:
    """The claims of one process. `monotonic` gives seconds that never jump."""

    def __init__(self, redis: Redis, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._redis = redis
        self._monotonic = monotonic
        self.process = secrets.token_hex(8)
        self._terms = {wants: f"{self.process} {LEASE_MS} {wants:d} " for wants in (False, True)}
        self._held: dict[bytes, tuple[str, float]] = {}  # by exact digest: key, since when

    def look(
        self, fp: Fingerprint, keys: Sequence[str], *, wants: bool, stale: bytes = b"", words_key: bytes | None = None
    ) -> Awaitable[Any]:
        """Look for the entry, then for the entry at which `words_key` points; else claim it if
        `wants`.

        `keys` are a partition's entries, words, groups, suspended. `stale`: an encoded entry that
        counts as missing while it is stored. `read` reads the reply. Raises the client's errors.
        """
        terms = self._terms[wants] + (hashlib.sha1(stale, usedforsecurity=False).hexdigest() if stale else "0")
        if words_key is None:
            return self._redis.eval(_LOOK, 2, keys[0], _key(fp), fp.exact, terms)
        return self._redis.eval(_LOOK_BY_WORDS, 5, keys[0], _key(fp), *keys[1:], fp.exact, terms, words_key)

    def read(self, fp: Fingerprint, reply: Any) -> Look:
        """Read the reply to `look`."""
        if isinstance(reply, bytes):
            return Look(reply)
        state, age_ms, *pointed = reply
        if pointed:
            return Look(None, pointed=(pointed[0], pointed[1]))
        # its own, and not held here: the reply to the command that took it was lost
        if state == _TAKEN or (state == _OWN and fp.exact not in self._held):
            self._held[fp.exact] = (_key(fp), self._monotonic())
            return Look(None, is_claimed=True)
        return Look(None, elsewhere_ms=float(age_ms) if state == _ELSEWHERE else None)

    def end(self, exact: bytes) -> str:
        """Forget a claim and return its key, which the store ends; empty if this process holds
        none.
        """
        held = self._held.pop(exact, None)
        return held[0] if held is not None else ""

    async def release(self, fp: Fingerprint) -> None:
        """End a claim without an entry, so that a waiting process makes it. Raises RedisError."""
        held = self._held.pop(fp.exact, None)
        if held is not None:
            await self._redis.eval(_RELEASE, 1, held[0], self.process)

    async def renew(self) -> None:
        """Renew this process' claims; call it about once a second. Raises the client's errors.

        A claim of over `HELD_S_MAX` ends: no request waits that long.
        """
        now = self._monotonic()
        for exact in [exact for exact, (_, since) in self._held.items() if now - since > HELD_S_MAX]:
            del self._held[exact]
        old = [key for key, since in self._held.values() if now - since > _RENEWED_AFTER_S]
        await asyncio.gather(*(self._redis.execute_command("PEXPIRE", key, LEASE_MS) for key in old))


def _key(fp: Fingerprint) -> str:
    return _KEY % (fp.partition.hex(), fp.exact.hex())
