"""Gathers settlements and sends them in one script call, which updates each team's windows once.

Knows no budgets. Invariants: a settlement is sent even if its caller was cancelled; each caller
gets its own part of the reply, and all callers get the failure of the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import msgspec

from policies.holds import LEDGER_STREAM, SETTLED_KEPT_S, Charge, Hold, count_keys, done_key, hour_at, member
from policies.prices import MICROUSD_MAX, MicroUSD
from policies.redis import RedisCommands
from policies.scripts import SETTLE
from policies.windows import HOUR_MS, PLACES, WindowKind

_TOGETHER_MAX = 64
# A larger amount is settled in a group of its own: Lua could not represent a sum of such amounts
# exactly.
_SUMMED_MAX = MICROUSD_MAX // _TOGETHER_MAX

Defer = Callable[[Callable[[], None]], object]
"""Schedules a callback for the moment at which the gathered calls are sent."""


class _Settlement(msgspec.Struct):
    hold: Hold
    member: str
    spend_microusd: MicroUSD
    row: bytes
    charges: Sequence[Charge]
    settled: asyncio.Future[bool]


class SettleBatch:
    """The settlements that wait for the next call.

    `defer` schedules that call; None sends at the end of the event loop's tick.
    """

    def __init__(self, redis: RedisCommands, defer: Defer | None) -> None:
        self._redis = redis
        self._defer = defer or (lambda send: asyncio.get_running_loop().call_soon(send))
        self._waiting: list[_Settlement] = []

    def settle(
        self, hold: Hold, spend_microusd: MicroUSD, row: bytes, charges: Sequence[Charge]
    ) -> asyncio.Future[bool]:
        """Settle one hold, with the parameters and the result of `Budgets.settle`."""
        settled: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        name = member(hold.id, hold.amount_microusd)
        self._waiting.append(
            _Settlement(
                hold=hold,
                member=name,
                spend_microusd=spend_microusd,
                row=row,
                charges=charges,
                settled=settled,
            )
        )
        if len(self._waiting) == 1:
            self._defer(self._send)
        elif len(self._waiting) == _TOGETHER_MAX:
            self._send()
        return settled

    def _send(self) -> None:
        """Send all waiting settlements, grouped by team, hour and set of held windows."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return  # a full batch was sent before the deferred call
        groups: dict[tuple[Any, ...], list[_Settlement]] = {}
        for settlement in waiting:
            hold = settlement.hold
            alone = hold.id if hold.amount_microusd > _SUMMED_MAX or settlement.spend_microusd > _SUMMED_MAX else ""
            groups.setdefault((hold.team_id, hold.at_ms // HOUR_MS, hold.held, alone), []).append(settlement)
        keys: list[str] = [LEDGER_STREAM]
        arguments: list[Any] = [SETTLED_KEPT_S * 1000]
        for (team_id, _, held, _), settlements in groups.items():
            counts, terms = _windows(team_id, settlements[0].hold.at_ms // HOUR_MS, held)
            # decision: spend-always-counted
            keys += counts
            keys += [done_key(settlement.hold.id) for settlement in settlements]
            arguments.append(f"{len(settlements)} {terms}")
            for settlement in settlements:
                hold = settlement.hold
                further = len(hold.more) + len(settlement.charges)
                arguments += (f"{settlement.member}|{settlement.spend_microusd}|{hold.at_ms}|{further}", settlement.row)
                if further:
                    _add_further(keys, arguments, hold, settlement.charges)
        reply = asyncio.ensure_future(self._redis.eval(SETTLE, len(keys), *keys, *arguments))
        reply.add_done_callback(partial(_answer_each, [one.settled for group in groups.values() for one in group]))


@lru_cache(maxsize=4096)
def _windows(team_id: int, hour: int, held: tuple[WindowKind, ...]) -> tuple[tuple[str, ...], str]:
    """The keys of a group's spends and holds, and its argument without the number of settlements."""
    windows = hour_at(team_id, hour * HOUR_MS)
    places = [PLACES[kind] for kind in held]
    keys = (*windows.spends, *(windows.holds[place] for place in places))
    return keys, " ".join(map(str, (len(places), team_id, *windows.keeps, *places)))


def _add_further(keys: list[str], arguments: list[Any], hold: Hold, charges: Sequence[Charge]) -> None:
    """Add the keys and the arguments of the counts other than the five windows."""
    for taken in hold.more:
        keys += count_keys(taken.name)
        arguments += (taken.member, taken.amount, 0, "", 0)
    for charge in charges:
        keys += count_keys(charge.name)
        arguments += ("", 0, charge.amount, charge.field, charge.keep_until_ms)


def _answer_each(settled: Sequence[asyncio.Future[bool]], reply: asyncio.Future[Any]) -> None:
    error = asyncio.CancelledError() if reply.cancelled() else reply.exception()
    for index, future in enumerate(settled):
        if future.done():
            continue  # its caller was cancelled
        if error is None:
            future.set_result(reply.result()[index] == 1)
        else:
            future.set_exception(error)
