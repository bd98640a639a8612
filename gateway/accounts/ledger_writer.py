"""Drains the ledger's stream from Redis to SQL, and keeps Redis's counts equal to the ledger.

Every worker runs a writer; a lock in Redis lets a single writer write. No HTTP and no limits.
Invariants:

- a row is in SQL once per id: an entry leaves the stream only after the commit that holds its row,
  and a repeated insert is a no-op. A kill at any point loses no row and doubles none;
- correctness does not depend on the lock's lease: after a pause beyond its lease, a writer's
  inserts and deletes are no-ops, and a script that checks the lock refuses its restatement;
- an entry that is not a row moves to a separate stream and is counted. Its spend still counts, and
  the entries behind it are not blocked.

Restatement (`Budgets.restate`) runs when this writer gets the lock, when Redis has lost its data
(no `ready` key; Redis refuses reserves until it is done), and every `restate_every_s`, when it
should find no difference.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import msgspec
from redis.exceptions import RedisError
from sqlalchemy.exc import DataError, IntegrityError, SQLAlchemyError

from gateway.accounts import months
from gateway.accounts.ledger import Ledger
from gateway.accounts.row import HitsRow, LedgerRow, decode_row
from gateway.loggers import get_logger
from gateway.settings import LedgerSettings
from policies import Budgets
from policies.budgets import LockLost
from policies.holds import LEDGER_LOCK, LEDGER_SET_ASIDE, LEDGER_STREAM
from policies.lease import Lease
from policies.prices import MicroUSD
from policies.redis import RedisCommands
from policies.windows import windows_at

BATCH = 4_000  # rows that are alike share their sums: more rows in a batch cost less each
_LOCK_MS = 5_000
_SKEW_MS = 300_000
_IDLE_S = 0.25
_FOLLOWER_IDLE_S = 1.0
_TROUBLE_S_MAX = 5.0
_FORGET_EVERY_S = 3_600.0
_OWN_RESTATED_MAX = 10_000  # more of them only after Redis lost its memory, or another writer its lock

_log = get_logger()

# KEYS stream. ARGV count. Replies the oldest entries, of which each client of Redis makes other values.
_READ = "return redis.call('XRANGE', KEYS[1], '-', '+', 'COUNT', ARGV[1])"

# KEYS stream, set aside. ARGV entry id, reason.
# Replies 1 where the entry was moved, 0 where it is gone.
_SET_ASIDE = """
local entry = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not entry then return 0 end
local fields = entry[2]
fields[#fields + 1] = 'reason'
fields[#fields + 1] = ARGV[2]
redis.call('XADD', KEYS[2], '*', unpack(fields))
redis.call('XDEL', KEYS[1], ARGV[1])
return 1
"""


@dataclass(slots=True)
class WriterStats:
    """Counts since the writer's creation. `drift_microusd` sums the corrections of restatements."""

    is_leader: bool = False
    rows: int = 0
    repeated: int = 0
    set_aside: int = 0
    restatements: int = 0
    drift_microusd: MicroUSD = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class _StreamEntry:
    id: bytes
    row: LedgerRow | None
    refusal: str = ""


@dataclass(eq=False, repr=False)
class LedgerWriter:
    """Writes the ledger's stream to SQL: `run` it until cancelled, or call `step`.

    `clock` gives unix seconds; `token` must differ between writers. Months that ended
    `ledger.kept_days` ago are removed, with `files_url` once the ledger's files have their rows.
    """

    redis: RedisCommands
    ledger: Ledger
    budgets: Budgets
    _: KW_ONLY
    clock: Callable[[], float] = time.time
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    restate_every_s: float = 60.0
    settings: LedgerSettings = field(default_factory=LedgerSettings)
    stats: WriterStats = field(default_factory=WriterStats)
    _restated_at_s: float | None = None
    _forgot_at_s: float = -_FORGET_EVERY_S
    _trouble_s: float = 0.0

    def __post_init__(self) -> None:
        self._lease = Lease(self.redis, LEDGER_LOCK, self.token, _LOCK_MS)

    async def run(self) -> None:
        """Step until cancelled. Waits after failures of Redis and SQL, `_TROUBLE_S_MAX` at most."""
        await self._lease.keep(self._turn)

    async def _turn(self) -> float:
        try:
            is_leader = await self.step()
        except (RedisError, SQLAlchemyError, OSError, LockLost):
            self.stats.failures += 1
            self.stats.is_leader = False
            self._trouble_s = min(max(2 * self._trouble_s, _IDLE_S), _TROUBLE_S_MAX)
            await self._lease.drop()  # another writer may reach SQL
            return self._trouble_s
        self._trouble_s = 0.0
        return _IDLE_S if is_leader else _FOLLOWER_IDLE_S

    async def step(self) -> bool:
        """Drain the stream, and restate if that is due, if this writer holds the lock.

        Returns whether it does. Raises LockLost, the Redis client's errors and sqlalchemy's; no
        entry is lost by them.
        """
        self.stats.is_leader = await self._drain()
        if not self.stats.is_leader:
            self._restated_at_s = None
            return False
        now_s = self.clock()
        is_due = self._restated_at_s is None or now_s - self._restated_at_s >= self.restate_every_s
        if is_due or not await self.budgets.is_ready():
            await self._restate()
            self._restated_at_s = now_s
        if now_s - self._forgot_at_s >= _FORGET_EVERY_S:
            self._forgot_at_s = now_s
            now_ms, database = int(now_s * 1000), self.ledger.database
            for month in await months.forget(
                database, now_ms, self.settings.kept_days, must_be_in_files=self.settings.files_url is not None
            ):
                _log.info("ledger_month_dropped", month=month, kept_days=self.settings.kept_days)
        return True

    async def backlog(self) -> int:
        """The number of entries in the stream."""
        return int(await self.redis.execute_command("XLEN", LEDGER_STREAM))

    async def _drain(self) -> bool:
        """Write the stream's entries to SQL.

        Returns False if another writer holds the lock from the start. Raises LockLost if this
        writer lost the lock meanwhile.
        """
        entries = await self._read(is_new=True)
        if entries is None:
            return False
        while entries:
            await self._write(entries)
            if len(entries) < BATCH:
                break
            entries = await self._read(is_new=False)
            if entries is None:
                raise LockLost
        return True

    async def _read(self, *, is_new: bool) -> list[_StreamEntry] | None:
        # only the holder reads: entries that one holder leaves, the next one finds in the stream
        if not await self._lease.take(is_new=is_new):
            return None
        found = await self.redis.eval(_READ, 1, LEDGER_STREAM, BATCH)
        return [_entry(entry_id, fields) for entry_id, fields in found]

    async def _write(self, entries: Sequence[_StreamEntry]) -> None:
        readable = [(entry, entry.row) for entry in entries if entry.row is not None]
        try:
            new = await self.ledger.append([row for _, row in readable])
        except (DataError, IntegrityError) as error:
            if len(entries) > 1:  # find the faulty one
                half = len(entries) // 2
                await self._write(entries[:half])
                await self._write(entries[half:])
                return
            await self._set_aside(entries[0].id, f"{type(error).__name__}: {error.orig}")
            return
        self.stats.rows += new
        self.stats.repeated += len(readable) - new
        if readable:
            await self.redis.execute_command("XDEL", LEDGER_STREAM, *(entry.id for entry, _ in readable))
        for entry in entries:
            if entry.row is None:
                await self._set_aside(entry.id, entry.refusal)

    async def _set_aside(self, entry_id: bytes, reason: str) -> None:
        self.stats.set_aside += await self.redis.eval(
            _SET_ASIDE, 2, LEDGER_STREAM, LEDGER_SET_ASIDE, entry_id, reason[:500]
        )

    async def _restate(self) -> None:
        """Restate the current windows, and the windows of `_SKEW_MS` ago for clocks that are
        behind.
        """
        now_ms = int(self.clock() * 1000)
        windows = dict.fromkeys((*windows_at(now_ms), *windows_at(now_ms - _SKEW_MS)))
        drained = await self.ledger.spent(tuple(windows))
        restated = await self.budgets.restate(drained, self.token)
        own = await self.ledger.own_spends(now_ms)
        if self._restated_at_s is None or len(own) <= _OWN_RESTATED_MAX or not await self.budgets.is_ready():
            await self.budgets.restate_own(own, self.token)
        await self.budgets.mark_ready(self.token)
        self.stats.restatements += 1
        self.stats.drift_microusd += restated.drift_microusd


class HitsWriter:
    """Writes this worker's hits to SQL. They cost nothing, so neither the stream nor budgets hold
    them.

    `take` returns the hits since its last call. Rows that SQL refused stay for the next call. A
    kill loses the hits since the last write.
    """

    def __init__(self, ledger: Ledger, take: Callable[[], Sequence[HitsRow]]) -> None:
        self._ledger = ledger
        self._take = take
        self._waiting: Sequence[HitsRow] = ()

    async def flush(self) -> None:
        """Write the hits. Errors of the database pass through."""
        for _ in range(2):  # those that waited, and those since; while SQL is away they stay summed
            self._waiting = self._waiting or self._take()
            await self._ledger.append_hits(self._waiting)
            self._waiting = ()


def _entry(entry_id: bytes, fields: list[Any] | None) -> _StreamEntry:
    value_by_name = dict(zip(fields[::2], fields[1::2], strict=False)) if fields else {}
    try:
        row = decode_row(value_by_name[b"row"])
    except (KeyError, msgspec.MsgspecError) as error:
        return _StreamEntry(entry_id, None, f"not a row: {type(error).__name__} {error}")
    booked = (value_by_name.get(b"team"), value_by_name.get(b"at_ms"), value_by_name.get(b"cost"))
    if booked != (b"%d" % row.team_id, b"%d" % row.at_ms, b"%d" % row.cost_microusd):
        return _StreamEntry(entry_id, None, "its row says other than what was booked")
    return _StreamEntry(entry_id, row)
