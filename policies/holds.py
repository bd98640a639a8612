"""Where money lies in Redis: one slot (`{money}`), so that a script can move all of it in one step.

    {money}:spend:TEAM:WINDOW   hash    `spent` and `held`, µUSD
    {money}:holds:TEAM:WINDOW   zset    `id|amount` of each hold by the end of its lease, ms
    {money}:done:HOLD           string  a hold that was settled or released, for a while
    {money}:ledger              stream  rows on their way to SQL
    {money}:ready               string  there once the ledger is counted

Knows no Redis. Invariant: a window's id is in its keys, so nothing has to be reset.
"""

from __future__ import annotations

from functools import lru_cache

import msgspec

from policies.prices import MICROUSD_MAX, MicroUSD
from policies.windows import HOUR_MS, Window, WindowKind, windows_at

_PREFIX = "sameway:{money}:"
READY_KEY = _PREFIX + "ready"
LEDGER_STREAM = _PREFIX + "ledger"
LEDGER_SET_ASIDE = _PREFIX + "ledger:set-aside"
LEDGER_LOCK = _PREFIX + "ledger:lock"

SETTLED_KEPT_S = 900
"""How long a settled or released hold is remembered, to make a repeated call a no-op."""

WINDOW_KEPT_S = 2 * 86_400
"""How long a window's count outlives the window: longer than any generation runs."""

PLACES = {kind: place for place, kind in enumerate(WindowKind)}
"""Where a kind of window is among all of a moment's."""


class Hour(msgspec.Struct, frozen=True):
    """The windows of all kinds that hold an hour, a team's keys for each, and until when to keep them (unix ms, 0: for ever)."""

    windows: tuple[Window, ...]
    spends: tuple[str, ...]
    holds: tuple[str, ...]
    keeps: tuple[int, ...]


def hour_at(team_id: int, at_ms: int) -> Hour:
    """The hour that holds a moment, as one team sees it."""
    return _hour(team_id, at_ms // HOUR_MS)


@lru_cache(maxsize=4096)
def _hour(team_id: int, hour: int) -> Hour:
    windows = windows_at(hour * HOUR_MS)
    return Hour(
        windows,
        tuple(spend_key(team_id, window) for window in windows),
        tuple(holds_key(team_id, window) for window in windows),
        tuple(keep_until(window) for window in windows),
    )


def spend_key(team_id: int, window: Window) -> str:
    return f"{_PREFIX}spend:{team_id}:{window.id}"


def holds_key(team_id: int, window: Window) -> str:
    return f"{_PREFIX}holds:{team_id}:{window.id}"


def done_key(hold_id: str) -> str:
    return f"{_PREFIX}done:{hold_id}"


def member(hold_id: str, amount_microusd: MicroUSD) -> str:
    """A hold among those of a window. Raises ValueError for what could not be read back."""
    if "|" in hold_id or not 0 <= amount_microusd <= MICROUSD_MAX:
        raise ValueError(f"not a hold: {hold_id!r} over {amount_microusd} µUSD")
    return f"{hold_id}|{amount_microusd}"


def keep_until(window: Window) -> int:
    return 0 if window.end_ms is None else window.end_ms + WINDOW_KEPT_S * 1000
