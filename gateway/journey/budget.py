"""The gateway's side of budgets: a hold before each generation that costs, a ledger row after it.

Knows no routes and no chunks. Invariants: money fails closed unless the operator configures
otherwise; every generation's row is settled, however it ended; a hold lasts as long as its
generation and no longer; a row is in the spool until SQL has it, and Redis gets it, again where it
has lost it, from this process or a later one.
"""

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import msgspec
from redis.exceptions import RedisError, ResponseError
from sqlalchemy.exc import SQLAlchemyError

from gateway.accounts import Identity, LedgerRow, decode_row, encode_row
from gateway.accounts.spool import NOWHERE, Spool
from gateway.journey.budget_words import refusal_of
from gateway.loggers import get_logger
from gateway.settings import BudgetSettings
from gateway.wire.errors import Unavailable
from policies import Budgets, Hold, NotReady, Refused
from policies.budgets import Intent
from policies.counters import Need

_RETRY_EVERY_S = 0.5
_HELD_AGAIN_S = 0.1
_CONFIRM_EVERY_S = 2.0
_ADOPT_EVERY = 3  # looks
_LAST_CONFIRM_S = 1.0
_log = get_logger()

Saved = Callable[[Collection[str]], Awaitable[set[str]]]
"""Those of the ids of rows that SQL has. Raises sqlalchemy's errors."""


@dataclass(slots=True)
class _Unsettled:
    hold: Hold
    row: LedgerRow
    spooled: range  # where the spool has the row
    was_settled: bool = False


class Money:
    """Holds and settlements of one worker; `spool` keeps rows until SQL has them."""

    def __init__(self, budgets: Budgets, settings: BudgetSettings, spool: Spool, saved: Saved) -> None:
        self._budgets = budgets
        self._settings = settings
        self._spool = spool
        self._saved = saved
        self._living: dict[str, Hold] = {}
        self._away_since: float | None = None  # when Redis first failed of late, by the steady clock
        self._unsettled: deque[_Unsettled] = deque()
        self._refusal = ""  # what Redis said of the latest row that it refused, until it takes one
        self._settled: dict[str, range] = {}  # where the spool has rows, by their ids
        self._written: deque[tuple[int, dict[str, range]]] = deque()  # the same, by a time when Redis had the rows

    @property
    def unsettled(self) -> int:
        """The number of rows that wait for Redis."""
        return len(self._unsettled)

    @property
    def holds(self) -> int:
        """The number of generations under way that hold money."""
        return len(self._living)

    async def reserve(self, identity: Identity, hold_id: str, need: Need, *, at_deployment: bool = False) -> Hold:
        """Hold the worst case, `need`, against every budget of the team that applies, or, with
        `at_deployment`, against those on deployments.

        An amount of 0 is neither held nor refused. Raises BudgetExceeded, Unavailable.
        """
        budgets = identity.at_deployments if at_deployment else identity.budgets
        intent = self._budgets.intended(hold_id, identity.team.id, budgets, need)
        try:
            outcome = await self._held(intent)
        except asyncio.CancelledError:  # Redis may hold it already, until its lease ends
            await self.release(intent.whole())  # the link sends it after the hold
            raise
        except (RedisError, NotReady) as error:
            if self._settings.on_redis_failure == "refuse" and intent.is_hard:
                raise Unavailable(
                    "This team's budget can't be checked at the moment; try again shortly", code="budget_unavailable"
                ) from error
            outcome = self._budgets.unreserved(hold_id, identity.team.id)
        if isinstance(outcome, Refused):
            raise refusal_of(identity, outcome)
        if outcome.is_held:
            self._living[hold_id] = outcome
        return outcome

    async def _held(self, intent: Intent) -> Hold | Refused:
        """Hold the money; wait for a Redis that went away just now. Raises RedisError, NotReady."""
        while True:
            try:
                outcome = await self._budgets.hold(intent, self._settings.hold_lease_s)
            except (RedisError, NotReady):
                now = time.monotonic()
                self._away_since = now if self._away_since is None else self._away_since
                is_patient = self._settings.on_redis_failure == "refuse" and intent.is_hard
                if not is_patient or now - self._away_since >= self._settings.redis_wait_s:
                    raise
                await asyncio.sleep(_HELD_AGAIN_S)
            else:
                self._away_since = None
                return outcome

    async def settle(self, hold: Hold, row: LedgerRow) -> None:
        """Spend `row.cost_microusd` of the hold and release the rest; kept while Redis is away.

        The row is in the spool before this awaits.
        """
        self._living.pop(hold.id, None)
        data = encode_row(row)
        spooled = self._spool.put(data)
        try:
            await self._budgets.settle(hold, row.cost_microusd, data, row.charges)
        except (RedisError, asyncio.CancelledError) as error:
            self._unsettled.append(_Unsettled(hold, row, spooled))
            if isinstance(error, asyncio.CancelledError):
                raise
        else:
            self._keep_until_saved(row.id, spooled)

    async def release(self, hold: Hold) -> None:
        """Release the whole hold. While Redis is away, the hold ends with its lease instead."""
        self._living.pop(hold.id, None)
        if hold.is_held:
            try:
                await self._budgets.release(hold)
            except RedisError as error:
                _log.warning("hold_left_to_its_lease", hold=hold.id, reason=str(error))

    async def keep(self) -> None:
        """For ever: renew the holds under way, and retry the rows that could not be settled, also
        those of workers that ended; forget those that SQL has.
        """
        await asyncio.gather(self._keep_settling(), self._keep_comparing())

    async def _keep_comparing(self) -> None:
        for look in itertools.count():
            if look % _ADOPT_EVERY == 0:
                await self.adopt()
            await self.confirm()
            await asyncio.sleep(_CONFIRM_EVERY_S)

    async def _keep_settling(self) -> None:
        renew_in_s = 0.0
        while True:
            await self.retry()
            await asyncio.sleep(_RETRY_EVERY_S)
            renew_in_s -= _RETRY_EVERY_S
            if renew_in_s <= 0 and self._living:
                with contextlib.suppress(RedisError):  # else at the next retry
                    await self._budgets.renew(tuple(self._living.values()), self._settings.hold_lease_s)
                    renew_in_s = self._settings.hold_lease_s / 4

    async def retry(self) -> None:
        """Settle the waiting rows, oldest first, until Redis fails again or refuses one."""
        while self._unsettled:
            waiting = self._unsettled[0]
            try:
                row = waiting.row
                is_new = await self._budgets.settle(waiting.hold, row.cost_microusd, encode_row(row), row.charges)
            except ResponseError as error:  # the next retry begins with another row
                if str(error) != self._refusal:
                    _log.warning("ledger_row_refused", hold=waiting.hold.id, reason=str(error))
                self._refusal = str(error)
                self._unsettled.rotate(-1)
                return
            except RedisError:
                waiting.was_settled = False  # it may be settled now
                return
            self._refusal = ""
            self._unsettled.popleft()
            if is_new or not waiting.was_settled:
                self._keep_until_saved(row.id, waiting.spooled)
            else:  # Redis remembers it, and its stream has it no more: the writer has set it aside
                _log.error("ledger_row_not_saved", row=msgspec.to_builtins(row))
                self._spool.drop(waiting.spooled)

    async def confirm(self) -> None:
        """Forget the rows that SQL has. Those that neither Redis nor SQL has are settled again."""
        settled, self._settled = self._settled, {}
        if not (settled or self._written):
            return
        try:
            now_ms, oldest_ms = await self._budgets.ledger_times()
        except RedisError:
            self._settled = settled | self._settled
            return
        if settled:
            self._written.append((now_ms, settled))
        while self._written and (oldest_ms is None or self._written[0][0] < oldest_ms):
            try:
                await self._compare(self._written[0][1], was_settled=True)
            except (SQLAlchemyError, OSError):
                return
            self._written.popleft()

    async def _compare(self, spooled_rows: dict[str, range], *, was_settled: bool) -> None:
        saved = await self._saved(spooled_rows)
        for row_id, spooled in spooled_rows.items():
            if row_id in saved:
                self._spool.drop(spooled)
            else:
                self._offer(spooled, was_settled=was_settled)

    def _offer(self, spooled: range, *, was_settled: bool) -> None:
        row = decode_row(self._spool.read(spooled))
        self._unsettled.append(_Unsettled(Hold(row.id, row.team_id, row.at_ms), row, spooled, was_settled))

    def _keep_until_saved(self, row_id: str, spooled: range) -> None:
        if spooled != NOWHERE:
            self._settled[row_id] = spooled

    async def adopt(self) -> None:
        """Take over the rows of workers that ended before SQL had them.

        Their holds end with their leases.
        """
        spooled_rows: dict[str, range] = {}

        def take(data: bytes, spooled: range) -> None:
            try:
                spooled_rows[decode_row(data).id] = spooled
            except msgspec.MsgspecError as error:  # the host failed while it was written
                _log.error("ledger_row_unreadable", data=data.hex(), reason=str(error))
                self._spool.drop(spooled)

        self._spool.adopt(take)
        if spooled_rows:
            _log.info("ledger_rows_adopted", rows=len(spooled_rows))
            try:
                await self._compare(spooled_rows, was_settled=False)
            except (SQLAlchemyError, OSError):
                for spooled in spooled_rows.values():
                    self._offer(spooled, was_settled=False)

    async def aclose(self) -> None:
        """Retry once more, then leave the rows to the spool.

        A row that is not in it is logged, whole: no row is lost silently.
        """
        await self.retry()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_CONFIRM_S):
                await self.confirm()
        for waiting in self._unsettled:
            if waiting.spooled == NOWHERE:
                _log.error("ledger_row_not_settled", row=msgspec.to_builtins(waiting.row))
        if self._unsettled:
            _log.warning("ledger_rows_left", rows=len(self._unsettled))
        self._spool.close()
