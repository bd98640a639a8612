"""The exact cache: the answer to an equal request, and the deployment that last saw its dialogue.

Knows no HTTP, teams or models. A lookup reads a bounded in-process L1 and then Redis. Invariants:
lookups never raise (a failure of Redis is a miss with its reason); an entry is served only in its
own partition, to its own request or its own compat, before its expiry; no hit follows a purge that
returned (`cache.exact.purges` keeps the L1 consistent).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec

from cache.eligibility import Refusal
from cache.entry import About, CacheUnavailable, Entry, Purge
from cache.events import EntriesDropped
from cache.exact.batch import Defer
from cache.exact.claims import Look
from cache.exact.l1 import L1
from cache.exact.pointers import Pointer, Verified
from cache.exact.purges import Purges
from cache.exact.store import EntryListing, EntryStore, PartitionSize, pack, terms_of
from cache.fingerprint import Fingerprint, Partition
from cache.redis_client import REDIS_FAILURES, Redis, Subscribe

_LINKS_MAX = 32  # earlier links asked for in one lookup: the latest of the dialogue, and its first
_TOUCHES_MAX = 4_096
_SAMPLE_MAX = 20
_MOVING_MAX = 10_000


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Limits of the cache. Sizes in Redis are per partition: a tenant cannot evict another's
    answers.
    """

    size_bytes_max: int = 256 << 20
    entry_bytes_max: int = 4 << 20
    ttl_s_max: float = 30 * 86_400
    warm_ttl_s: float = 3_600
    moving_ttl_s: float = 60  # of an answer that depends on the moment
    l1_entries_max: int = 4_096
    l1_bytes_max: int = 8 << 20


class LookupMiss(StrEnum):
    """Why a lookup found nothing to serve; counted by this name."""

    ABSENT = "absent"
    EXPIRED = "expired"
    TOO_OLD = "too_old"
    UNREADABLE = "unreadable"
    UNAVAILABLE = "unavailable"


class Lookup(msgspec.Struct, frozen=True):
    """The result of a lookup. `warm` is the label stored with the longest known earlier prefix, and
    `warm_depth` that prefix's number of turns.

    `is_claimed`: other processes wait until the caller has made the entry. `elsewhere_ms` is how
    long another process has been making it, else None. `pointer` led to the entry, if it is another
    request's.
    """

    entry: Entry | None
    miss: LookupMiss | None
    warm: str | None = None
    warm_depth: int = 0
    is_claimed: bool = False
    elsewhere_ms: float | None = None
    pointer: Pointer | None = None


class StoreResult(msgspec.Struct, frozen=True):
    """The result of a store. `size_bytes` counts against the budget; `evicted` entries made room."""

    refusal: Refusal | None
    size_bytes: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class PurgeResult:
    """The entries that a purge removed or, in a dry run, would remove. `samples` are the first few."""

    count: int
    size_bytes: int
    samples: tuple[EntryListing, ...]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The sizes now. Expired entries count until a store in their partition sweeps them."""

    partitions: tuple[PartitionSize, ...]
    l1_entries: int
    l1_bytes: int

    @property
    def entries(self) -> int:
        return sum(one.entries for one in self.partitions)

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self.partitions)


class _NeedsRedis:
    """A context manager that raises CacheUnavailable if Redis fails."""

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, REDIS_FAILURES):
            raise CacheUnavailable(f"Redis: {error}") from error


_needs_redis = _NeedsRedis()


class ExactCache:
    """The exact cache of one process. `clock` gives unix seconds, `monotonic` seconds that never
    jump.

    Stores gather until `defer` calls back (None: the end of the event loop's tick).
    """

    def __init__(
        self,
        redis: Redis,
        limits: CacheLimits | None = None,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        defer: Defer | None = None,
    ) -> None:
        self.limits = limits = limits or CacheLimits()
        self._store = EntryStore(redis, defer, monotonic)
        self._clock = clock
        self._monotonic = monotonic
        self._l1 = L1(limits.l1_entries_max, limits.l1_bytes_max)
        self.purges = Purges(self._store.log, self._l1, clock, monotonic)
        self._touches: dict[Partition, dict[bytes, tuple[Entry, int]]] = {}  # and how often
        self._touches_count = 0
        self._moving: dict[bytes, None] = {}  # the latest entries whose answers were found to move

    def take(self, limits: CacheLimits) -> None:
        """Hold to these limits from now on."""
        self.limits = limits
        self._l1.resize(limits.l1_bytes_max)

    @property
    def l1_bytes(self) -> int:
        """The bytes of answers in this process' memory."""
        return self._l1.size_bytes

    # --- lookups: never raise

    def lookup_local(self, fp: Fingerprint, max_age_s: float | None = None) -> Entry | None:
        """The entry if this process holds it, without a round trip."""
        entry = self._l1.lookup(fp.partition, fp.exact) if self.is_l1_on else None
        if entry is None or self._unfit(entry, fp, max_age_s) is not None:
            return None
        self.use(entry)
        return entry

    def derived(self, entry: Entry, form: str, make: Callable[[Entry], bytes]) -> bytes:
        """`make(entry)` for a looked-up entry, made once for all its hits if this process holds the
        entry.
        """
        return self._l1.derived(entry, form, make)

    async def lookup(self, fp: Fingerprint, max_age_s: float | None = None, *, wants_warm: bool = True) -> Lookup:
        """The entry for this request and, if `wants_warm`, the warm hint, in one round trip."""
        entry = self.lookup_local(fp, max_age_s)
        return (
            Lookup(entry, None) if entry is not None else await self.lookup_shared(fp, max_age_s, wants_warm=wants_warm)
        )

    async def lookup_shared(
        self,
        fp: Fingerprint,
        max_age_s: float | None = None,
        *,
        wants_warm: bool = True,
        claims: bool | None = None,
        words_key: bytes | None = None,
    ) -> Lookup:
        """Like `lookup`, but without this process' own memory.

        With `claims` True, the caller claims an absent entry that no other process has claimed;
        `store` or `release` ends the claim. With None, claims and `words_key` are ignored.
        `words_key`, the digest of the request's words, may point at another request's entry, which
        counts as used only after `use`.
        """
        links = _earlier_links(fp.chain) if wants_warm else []
        purges_before, warm, depth = self._l1.purges, b"", 0
        entry, pointer = None, None
        miss: LookupMiss | None = LookupMiss.ABSENT
        sent_claim = None if self._l1.was_here(fp.exact) else claims  # a script costs Redis thrice
        try:
            # no variable holds a future that may fail: its error would hold this frame, in a cycle
            if links:
                warmed = [fp.chain[at - 1] for at in links]
                reply, labels = await asyncio.gather(
                    self._looking(fp, sent_claim, words_key), self._store.lookup_warm(fp.partition, warmed)
                )
                hints = ((label, at) for at, label in zip(links, labels, strict=True) if label)
                warm, depth = next(hints, (b"", 0))
            else:
                reply = await self._looking(fp, sent_claim, words_key)
            if reply is None and sent_claim is not claims:  # it is gone
                sent_claim, reply = claims, await self._looking(fp, claims, words_key)
            look = Look(reply) if sent_claim is None else self._store.claims.read(fp, reply)
            if look.data is not None:
                entry, miss = self._read(look.data, fp, max_age_s, purges_before)
                if claims is not None and entry is None:
                    look = self._store.claims.read(fp, await self._store.look(fp, wants=claims, stale=look.data))
                    if look.data is not None:  # stored since
                        entry, miss = self._read(look.data, fp, max_age_s, purges_before)
        except REDIS_FAILURES:
            return Lookup(None, LookupMiss.UNAVAILABLE)
        if look.pointed is not None:
            entry, pointer = self._pointed(*look.pointed, fp, max_age_s)
            miss = LookupMiss.ABSENT if entry is None else None
        return Lookup(
            entry=entry,
            miss=miss,
            warm=warm.decode(errors="replace") if warm else None,
            warm_depth=depth,
            is_claimed=look.is_claimed,
            elsewhere_ms=look.elsewhere_ms,
            pointer=pointer,
        )

    def _looking(self, fp: Fingerprint, claims: bool | None, words_key: bytes | None) -> Awaitable[Any]:
        """The encoded entry, or the reply for `Claims.read`."""
        if claims is None:
            return self._store.lookup(fp.partition, fp.exact)
        return self._store.look(fp, wants=claims, words_key=words_key)

    def _pointed(
        self, data: bytes, pointing: bytes, fp: Fingerprint, max_age_s: float | None
    ) -> tuple[Entry | None, Pointer | None]:
        """The entry at which a pointer points, and the pointer; None if the entry has another
        answer now.
        """
        try:
            entry, pointer = Entry.decode(data), Pointer.decode(pointing)
        except msgspec.DecodeError:
            return None, None
        is_fit = self._unfit(entry, fp, max_age_s) is None and pointer.names(entry)
        return (entry, pointer) if is_fit else (None, None)

    async def point(self, fp: Fingerprint, entry: Entry, words_key: bytes, verified: Verified) -> None:
        """Let the words of `fp`, by `words_key`, find an entry, until it, its answer or its group
        change.

        Ends a claim on `fp`. Raises CacheUnavailable.
        """
        with _needs_redis:
            claim = self._store.claims.end(fp.exact)
            await self._store.point(entry, words_key, verified, self.limits.size_bytes_max, claim)

    async def count_start(self, fp: Fingerprint) -> int:
        """Count the processes that began to ask a verifier about this namespace, over all hosts. Raises
        CacheUnavailable.
        """
        with _needs_redis:
            return await self._store.count_start(fp.partition, fp.compat)

    async def lookup_entry(
        self, fp: Fingerprint, exact: bytes, max_age_s: float | None = None, *, is_served: bool = True
    ) -> Lookup:
        """The entry that a semantic hit for `fp` points at, in the same partition and compat.

        A missing entry is reported to the semantic indexes, so that a stale pointer is removed at
        its first use. The entry's worth rises only if it `is_served`.
        """
        entry = self._l1.lookup(fp.partition, exact) if self.is_l1_on else None
        if entry is not None and entry.text is not None and self._unfit(entry, fp, max_age_s) is None:
            if is_served:
                self.use(entry)
            return Lookup(entry, None)
        purges_before = self._l1.purges
        try:
            data = await self._store.lookup(fp.partition, exact)
            entry, miss = self._read(data, fp, max_age_s, purges_before, is_served)
            if entry is not None and entry.text is None:  # it took the place of one with a text
                entry, miss = None, LookupMiss.ABSENT
            if miss in (LookupMiss.ABSENT, LookupMiss.UNREADABLE):
                await self._store.log.append(EntriesDropped(fp.partition, (exact,)))
        except REDIS_FAILURES:
            return Lookup(None, LookupMiss.UNAVAILABLE)
        return Lookup(entry, miss)

    async def lookup_about(self, partition: Partition, exact: bytes) -> About | None:
        """The stored facts about one entry. Raises redis.exceptions.RedisError."""
        stored = await self._store.lookup_about(partition, exact)
        return stored.about if stored is not None else None

    async def lookup_many(self, partition: Partition, compat: bytes, exacts: Sequence[bytes]) -> list[Entry | None]:
        """Entries to compare with, from Redis; None if missing, expired, or of another partition or
        compat.

        Raises redis.exceptions.RedisError.
        """
        entries: list[Entry | None] = []
        for data in await self._store.lookup_many(partition, exacts) if exacts else ():
            try:
                entry = Entry.decode(data) if data is not None else None
            except msgspec.DecodeError:
                entry = None
            is_fit = entry is not None and (entry.partition, entry.compat) == (partition, compat)
            entries.append(entry if is_fit and entry is not None and not self.is_stale(entry) else None)
        return entries

    def _read(
        self, data: bytes | None, fp: Fingerprint, max_age_s: float | None, purges_before: int, is_served: bool = True
    ) -> tuple[Entry | None, LookupMiss | None]:
        if data is None:
            return None, LookupMiss.ABSENT
        try:
            entry = Entry.decode(data)
        except msgspec.DecodeError:
            return None, LookupMiss.UNREADABLE
        miss = self._unfit(entry, fp, max_age_s)
        if miss is not None:
            return None, miss
        if not is_served:
            return entry, None
        # no purge came between the question and the answer
        if self.is_l1_on and purges_before == self._l1.purges:
            self._l1.store(entry)
        self.use(entry)
        return entry, None

    def _unfit(self, entry: Entry, fp: Fingerprint, max_age_s: float | None) -> LookupMiss | None:
        is_of_it = entry.exact == fp.exact or entry.compat == fp.compat
        if entry.partition != fp.partition or not is_of_it:
            return LookupMiss.UNREADABLE
        now = self._clock()
        if (entry.expires_at if entry.exact == fp.exact else entry.fresh_until) <= now:
            return LookupMiss.EXPIRED
        if max_age_s is not None and entry.age_s(now) > max_age_s:
            return LookupMiss.TOO_OLD
        return None

    def is_stale(self, entry: Entry) -> bool:
        """Whether it is time to make a newer answer than this one."""
        return entry.fresh_until <= self._clock()

    async def claim(self, fp: Fingerprint, entry: Entry) -> bool:
        """Claim to make a newer answer than `entry`, which is served meanwhile; False where another does,
        or has. `store` or `release` ends the claim. Raises CacheUnavailable.
        """
        with _needs_redis:
            return self._store.claims.read(fp, await self._store.look(fp, wants=True, stale=entry.encode())).is_claimed

    # --- stores

    async def moves(self, entry: Entry) -> None:
        """Take in that an answer depends on the moment. It lives no longer than `moving_ttl_s`, here, in
        Redis and in every index, nor do the next ones to its request that this process stores.
        Raises CacheUnavailable.
        """
        self._moving[entry.exact] = None
        if len(self._moving) > _MOVING_MAX:
            del self._moving[next(iter(self._moving))]
        if self._lived(entry).expires_at <= self._clock():
            await self.purge(Purge(partition=entry.partition, id=entry.id))
        else:
            if (await self.store(entry, asked_at=entry.created_at)).refusal is None:
                self.store_local(entry)

    def _lived(self, entry: Entry) -> Entry:
        """The entry with the time that it may live."""
        if entry.is_curated:
            return entry
        ttl_s = min(entry.ttl_s, self.limits.ttl_s_max)
        if entry.exact in self._moving:
            ttl_s = min(ttl_s, self.limits.moving_ttl_s)
        return entry if ttl_s == entry.ttl_s else msgspec.structs.replace(entry, ttl_s=float(ttl_s))

    def store_local(self, entry: Entry) -> None:
        """Put an entry into this process' L1 at once, before Redis has it; a curated one stays, as in Redis."""
        entry, held = self._lived(entry), self._l1.lookup(entry.partition, entry.exact)
        if self.is_l1_on and entry.expires_at > self._clock() and not (held is not None and held.is_curated):
            self._l1.store(entry)

    async def store(
        self,
        entry: Entry,
        warm: str | None = None,
        chain: Sequence[bytes] = (),
        words_key: bytes | None = None,
        asked_at: float = math.inf,
    ) -> StoreResult:
        """Store an answer and, if `warm` names its deployment, the warm hint for its prefixes in
        `chain`.

        `words_key` is the digest of its prompt's words, if they may find it. An entry over the
        entry limit is refused, and one that a purge since `asked_at` would have removed; an older
        answer to the same request is replaced. Raises CacheUnavailable.
        """
        now = self._clock()
        limits = self.limits
        entry = self._lived(entry)
        if entry.expires_at <= now:
            return StoreResult(Refusal.TTL)
        packed = pack(entry, has_words=words_key is not None)
        if packed.size_bytes > min(limits.entry_bytes_max, limits.size_bytes_max):
            return StoreResult(Refusal.TOO_LARGE)
        with _needs_redis:
            put = await self._store.store(
                packed,
                terms_of(entry.partition, limits.size_bytes_max, limits.warm_ttl_s),
                now=now,
                warm=warm,
                chain=chain,
                claim=self._store.claims.end(entry.exact),
                words_key=words_key,
            )
            if put.refusal is not None:  # this process may hold what was refused
                self._l1.drop(entry)
            elif put.is_replaced:  # other processes may hold the answer that this one replaces
                await self._store.log.announce(Purge(partition=entry.partition, id=entry.id))
            if put.refusal is None and self.purges.reach(entry, asked_at):  # now, as the purge may not have seen it
                self._l1.drop(entry)
                await self._store.purge(entry.partition, [entry.exact])
                await self._store.log.announce(Purge(partition=entry.partition, id=entry.id))  # who read it meanwhile
                return StoreResult(Refusal.PURGED, packed.size_bytes)
        return StoreResult(put.refusal, packed.size_bytes, len(put.evicted))

    async def store_warm(self, fp: Fingerprint, warm: str) -> None:
        """Store which deployment saw this dialogue, without an answer; ends a claim on `fp`.

        Raises CacheUnavailable.
        """
        warming = self._store.store_warm(fp.partition, {fp.chain[0], fp.exact}, warm, self.limits.warm_ttl_s)
        with _needs_redis:
            await asyncio.gather(warming, self._store.claims.release(fp))

    async def release(self, fp: Fingerprint) -> None:
        """End the claim to an entry that will not be made. Raises CacheUnavailable."""
        with _needs_redis:
            await self._store.claims.release(fp)

    async def renew_claims(self) -> None:
        """Renew the claims to entries that are being made; call it about once a second.

        Raises CacheUnavailable.
        """
        with _needs_redis:
            await self._store.claims.renew()

    # --- administration

    async def purge(self, purge: Purge, is_dry_run: bool = False) -> PurgeResult:
        """Remove the matching entries, here, in Redis and in every other process, or only count
        them. Their wordings go with them, and count in the size alone.

        Raises CacheUnavailable: then a part may be gone, and purging again finishes the work.
        """
        count = size = 0
        samples: list[EntryListing] = []
        with _needs_redis:
            if not is_dry_run:
                await self.purges.announce(purge)
            for partition in await self._partitions(purge):
                async for batch in self._matching(purge, partition):
                    # a wording has no answer of its own; its text may be what is asked for
                    answers = [entry for entry in batch if not entry.about.of or purge.text is not None]
                    samples += answers[: _SAMPLE_MAX - len(samples)]
                    removed, freed = len(answers), sum(entry.size_bytes for entry in batch)
                    if not is_dry_run:
                        gone, freed = await self._store.purge(partition, [entry.exact for entry in batch])
                        removed = min(gone, removed)
                    count, size = count + removed, size + freed
            if not is_dry_run:
                await self.purges.announce(purge)
        return PurgeResult(count, size, tuple(samples))

    async def entries(self, chosen: Purge) -> AsyncIterator[list[Entry]]:
        """The entries that a purge would remove, in batches, each with its context. Raises
        CacheUnavailable.
        """
        with _needs_redis:
            for partition in await self._partitions(chosen):
                async for batch in self._matching(chosen, partition):
                    encoded = await self._store.lookup_many(partition, [listing.exact for listing in batch])
                    yield [
                        msgspec.structs.replace(Entry.decode(data), context=listing.about.context)
                        for listing, data in zip(batch, encoded, strict=True)
                        if data is not None
                    ]

    async def take_in(self, entries: Sequence[tuple[Entry, bytes | None]]) -> list[str]:
        """Store entries, each with the key of its words. What became of each: `stored`, `unchanged` where it, or a newer
        one, is there already, or the reason against it. Raises CacheUnavailable: then a part may be
        stored.
        """
        with _needs_redis:
            return list(await asyncio.gather(*(self._take_in(entry, key) for entry, key in entries)))

    async def _take_in(self, entry: Entry, words_key: bytes | None) -> str:
        stored = await self._store.lookup_about(entry.partition, entry.exact)
        about = stored.about if stored is not None and stored.about.expires_at > self._clock() else None
        if about is not None and entry.is_curated:
            is_there = (about.labels, about.text) == (entry.labels, entry.text)
        else:
            is_there = about is not None and about.created_at >= entry.created_at
        if is_there:
            return "unchanged"
        refusal = (await self.store(entry, words_key=words_key)).refusal
        return "stored" if refusal is None else refusal.value

    async def _partitions(self, purge: Purge) -> list[Partition]:
        return [purge.partition] if purge.partition is not None else await self._store.partitions()

    async def _matching(self, purge: Purge, partition: Partition) -> AsyncIterator[list[EntryListing]]:
        now = self._clock()
        if purge.id is not None:
            with contextlib.suppress(ValueError):  # not hex: the id of nothing
                stored = await self._store.lookup_about(partition, bytes.fromhex(purge.id))
                if stored is not None and purge.matches(partition, stored.exact, stored.about, now):
                    yield [stored]
            return
        async for batch in self._store.scan(partition):
            matching = [one for one in batch if purge.matches(partition, one.exact, one.about, now)]
            if matching:
                yield matching

    async def stats(self) -> CacheStats:
        """The present sizes. Raises CacheUnavailable."""
        with _needs_redis:
            sizes = await self._store.sizes()
        return CacheStats(tuple(sizes), len(self._l1), self._l1.size_bytes)

    async def follow_purges(self, subscribe: Subscribe) -> None:
        """Apply every process' purges until cancelled.

        The L1 is on only while this runs and receives its own heartbeats.
        """
        await self.purges.follow(subscribe)

    @property
    def is_l1_on(self) -> bool:
        """Whether this process may hold entries, because a purge would reach it."""
        return self.purges.is_on

    # --- uses

    def use(self, entry: Entry) -> None:
        """Count a use of an entry."""
        uses = self._touches.setdefault(entry.partition, {})
        if self._touches_count < _TOUCHES_MAX or entry.exact in uses:
            self._touches_count += entry.exact not in uses
            _, count = uses.get(entry.exact, (entry, 0))
            uses[entry.exact] = (entry, count + 1)

    async def flush_touches(self) -> None:
        """Send the uses since the last call to Redis; call it about once a second. Raises
        CacheUnavailable.
        """
        touches, self._touches, self._touches_count = self._touches, {}, 0
        now = self._clock()
        touching = [
            self._store.touch(partition, now, [(entry.exact, count * entry.worth) for entry, count in uses.values()])
            for partition, uses in touches.items()
        ]
        with _needs_redis:
            await asyncio.gather(*touching)


def _earlier_links(chain: Sequence[bytes]) -> list[int]:
    """The depths (1 is the first turn) of the earlier links to look up, the longest first."""
    depths = list(range(len(chain) - 1, max(0, len(chain) - 1 - _LINKS_MAX), -1))
    return depths if not depths or depths[-1] == 1 else [*depths, 1]
