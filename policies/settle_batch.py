"""Settlements on their way to Redis: those of a moment leave in one script call, for which a team's windows are counted once.

Knows no budgets. Invariants: what was handed over is sent, whether or not its caller still waits; each settlement hears its own part
of the reply, and all of them a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from policies import holds as keys_of
from policies.prices import MICROUSD_MAX, MicroUSD
from policies.redis import Redis
from policies.scripts import SETTLE
from policies.windows import HOUR_MS

if TYPE_CHECKING:
    from policies.budgets import Hold

_TOGETHER_MAX = 64
_SUMMED_MAX = (
    MICROUSD_MAX // _TOGETHER_MAX
)  # larger amounts are counted alone: a sum of them may be no exact number in Lua

Later = Callable[[Callable[[], None]], object]
"""Calls back when what has gathered is to leave."""


class _Settlement(msgspec.Struct):
    hold: Hold
    member: str
    spend_microusd: MicroUSD
    row: bytes
    settled: asyncio.Future[bool]


class Settlements:
    """`later` None: they gather until the end of the event loop's tick."""

    def __init__(self, redis: Redis, later: Later | None) -> None:
        self._redis = redis
        self._later = later or (lambda leave: asyncio.get_running_loop().call_soon(leave))
        self._waiting: list[_Settlement] = []

    async def settle(self, hold: Hold, spend_microusd: MicroUSD, row: bytes) -> bool:
        """As `Budgets.settle`."""
        member = keys_of.member(hold.id, hold.amount_microusd)
        settled = asyncio.get_running_loop().create_future()
        self._waiting.append(_Settlement(hold, member, spend_microusd, row, settled))
        if len(self._waiting) == 1:
            self._later(self._leave)
        elif len(self._waiting) == _TOGETHER_MAX:
            self._leave()
        is_new: bool = await settled
        return is_new

    def _leave(self) -> None:
        """All that wait, in groups of one team, hour and set of held windows."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return  # they were many, and have left
        groups: dict[tuple[Any, ...], list[_Settlement]] = {}
        for one in waiting:
            hold = one.hold
            alone = hold.id if hold.amount_microusd > _SUMMED_MAX or one.spend_microusd > _SUMMED_MAX else ""
            groups.setdefault((hold.team_id, hold.at_ms // HOUR_MS, hold.held, alone), []).append(one)
        keys: list[str] = [keys_of.LEDGER_STREAM]
        arguments: list[Any] = [keys_of.SETTLED_KEPT_S * 1000]
        for (team_id, _, held, _), some in groups.items():
            hour = keys_of.hour_at(team_id, some[0].hold.at_ms)
            places = [keys_of.PLACES[kind] for kind in held]
            keys += hour.spends
            keys += [hour.holds[place] for place in places]
            keys += [keys_of.done_key(one.hold.id) for one in some]
            arguments += (len(some), len(places), team_id, *hour.keeps, *places)
            for one in some:
                hold = one.hold
                arguments += (one.member, hold.amount_microusd, one.spend_microusd, hold.at_ms, one.row)
        reply = asyncio.ensure_future(self._redis.eval(SETTLE, len(keys), *keys, *arguments))
        reply.add_done_callback(partial(_tell_each, [one.settled for some in groups.values() for one in some]))


def _tell_each(settled: Sequence[asyncio.Future[bool]], reply: asyncio.Future[Any]) -> None:
    error = asyncio.CancelledError() if reply.cancelled() else reply.exception()
    for place, future in enumerate(settled):
        if future.done():
            continue  # nobody waits any more
        if error is None:
            future.set_result(reply.result()[place] == 1)
        else:
            future.set_exception(error)
