"""A hold's value, and the keys of money in Redis, all in one slot (`{money}`), so that one script
can change them all.

    {money}:spend:COUNT         hash    `held`, and `spent` or what each bucket of a rolling window has
    {money}:holds:COUNT         zset    `id|amount` of each hold by the end of its lease, ms
    {money}:values:BUDGET:TIME  hash    the values that have a count of their own: digest, text
    {money}:done:HOLD           string  marks a settled or released hold, for SETTLED_KEPT_S
    {money}:ledger              stream  rows on their way to SQL
    {money}:ready               string  exists once the ledger is counted

A count is named `TEAM:WINDOW`, or `bBUDGET.EPOCH:DIGEST:WINDOW` if it belongs to one budget. Does
not call Redis. Invariant: a key contains its window's id, so no key is ever reset.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import msgspec

from policies.prices import MICROUSD_MAX, MicroUSD
from policies.windows import HOUR_MS, Budget, Unit, Window, WindowKind, windows_at

# decision: money-one-slot
_PREFIX = "sameway:{money}:"
READY_KEY = _PREFIX + "ready"
LEDGER_STREAM = _PREFIX + "ledger"
LEDGER_SET_ASIDE = _PREFIX + "ledger:set-aside"
LEDGER_LOCK = _PREFIX + "ledger:lock"

SETTLED_KEPT_S = 900
"""How long Redis remembers a settled or released hold; a repeated call within this time changes
nothing.
"""

WINDOW_KEPT_S = 2 * 86_400
"""How long a window's count outlives its window: longer than any generation runs."""


@dataclass(frozen=True, slots=True)
class BudgetState:
    """A budget, and the amounts that counted against it when Redis was read, in its unit.

    `value` is the value that they belong to: `=` and a text; `-` for requests without a value; `*`
    for values that share a count; `#` and a digest until a request names a value that Redis lost
    again; empty if the budget has one count. `digest` is the value's, if it has a separate count.
    `frees_at_ms` is when a rolling window has the requested room.
    """

    budget: Budget
    window: Window
    spent: int
    held: int
    value: str = ""
    frees_at_ms: int | None = None
    digest: str = ""

    def resets_in_s(self, now_s: float) -> float | None:
        """The seconds until the window ends, or has room; None if it never does."""
        end_ms = self.window.end_ms if self.frees_at_ms is None else self.frees_at_ms
        return None if end_ms is None else max(0.0, end_ms / 1000 - now_s)


class Taken(msgspec.Struct, frozen=True):
    """The amount that a hold takes of one count. `field` gets the spend; if empty, `SETTLE` counts
    it.
    """

    name: str
    member: str
    amount: int
    keep_until_ms: int
    field: str = ""
    unit: Unit = Unit.MONEY


class Charge(msgspec.Struct, frozen=True, array_like=True):
    """The amount that a row of the ledger adds to a count of a budget."""

    name: str
    field: str
    amount: int
    keep_until_ms: int


class Hold(msgspec.Struct, frozen=True):
    """Money reserved for one generation that began at `at_ms`, unix milliseconds.

    For a team without budgets `amount_microusd` is 0 and `held` is empty. `more` are the amounts of
    other counts, or other amounts of these counts. `is_cut`: it has room only for an answer of the
    usual length.
    """

    id: str
    team_id: int
    at_ms: int
    amount_microusd: MicroUSD = 0
    held: tuple[WindowKind, ...] = ()
    more: tuple[Taken, ...] = ()
    is_cut: bool = False

    @property
    def microusd(self) -> int:
        """The money that it holds, of the count with the least."""
        amounts = [taken.amount for taken in self.more if taken.unit is Unit.MONEY]
        return min([*amounts, *([self.amount_microusd] if self.held else [])], default=0)

    @property
    def is_held(self) -> bool:
        """Whether it holds any amount."""
        return bool(self.held or self.more)


class Hour(msgspec.Struct, frozen=True):
    """The windows that contain one hour, with one team's keys for each.

    `keeps` are the keys' expiry times in unix milliseconds; 0 means that a key never expires.
    """

    windows: tuple[Window, ...]
    spends: tuple[str, ...]
    holds: tuple[str, ...]
    keeps: tuple[int, ...]


def hour_at(team_id: int, at_ms: int) -> Hour:
    """The windows and keys of `team_id` for the hour that contains `at_ms`, unix milliseconds."""
    return _hour(team_id, at_ms // HOUR_MS)


@lru_cache(maxsize=4096)
def _hour(team_id: int, hour: int) -> Hour:
    windows = windows_at(hour * HOUR_MS)
    spends, holds = zip(*(count_keys(f"{team_id}:{window.id}") for window in windows), strict=True)
    return Hour(windows, spends, holds, tuple(keep_until(window) for window in windows))


def spend_key(team_id: int, window: Window) -> str:
    return count_keys(f"{team_id}:{window.id}")[0]


def count_keys(name: str) -> tuple[str, str]:
    """The spend key and the holds key of a count."""
    return f"{_PREFIX}spend:{name}", f"{_PREFIX}holds:{name}"


def values_key(name: str) -> str:
    return f"{_PREFIX}values:{name}"


def done_key(hold_id: str) -> str:
    return f"{_PREFIX}done:{hold_id}"


def member(hold_id: str, amount_microusd: MicroUSD) -> str:
    """The sorted set's member for a hold. Raises ValueError if it could not be parsed again."""
    if "|" in hold_id or not 0 <= amount_microusd <= MICROUSD_MAX:
        raise ValueError(f"not a hold: {hold_id!r} over {amount_microusd} µUSD")
    return f"{hold_id}|{amount_microusd}"


def keep_until(window: Window) -> int:
    """The expiry time of the keys of `window`, unix milliseconds; 0 for never."""
    return 0 if window.end_ms is None else window.end_ms + WINDOW_KEPT_S * 1000
