"""Maps a request to the counts that it draws on, for the budgets of its team.

Calls no Redis. A budget on a team's money over a calendar window limits the count that every team
has; any other budget has a separate count for each value, which begins when the budget is made.
Invariants: a count's name is a digest of bounded length, whatever a client sends; a request without
a value draws on a separate count; texts that differ only in their Unicode form or in spaces at the
ends are one value.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Mapping

import msgspec

from policies.holds import WINDOW_KEPT_S, Taken, keep_until
from policies.prices import MICROUSD_MAX
from policies.windows import BUCKETS, DEPLOYMENT, SESSION, TEAM, Budget, Overdraft, Unit, WindowKind

OTHER = "other"
"""The name of the count that further values share once a budget has its most counts."""

SESSION_KEPT_MS = 7 * 86_400_000
"""How long the total of a session outlives its last request; a later request begins it anew."""

_MONEY = Unit.MONEY
_SHOWN_CHARS = 64
_DIGEST_BYTES = 16


class Need(msgspec.Struct, frozen=True):
    """The most that a request may use, and its values by axis, which select budgets.

    `usual_microusd` and `usual_tokens` are for an answer of the usual length; None: unknown. A
    deployment that is not chosen yet has no value.
    """

    microusd: int
    tokens: int = 0
    requests: int = 1
    usual_microusd: int | None = None
    usual_tokens: int | None = None
    values: Mapping[str, str] = {}

    def most(self, unit: Unit) -> int:
        """The most of `unit` that the request may use."""
        amount = self.microusd if unit is _MONEY else self.tokens if unit is Unit.TOKENS else self.requests
        return amount if amount < MICROUSD_MAX else MICROUSD_MAX

    def usual(self, unit: Unit) -> int | None:
        """The amount of `unit` for an answer of the usual length; None if unknown."""
        return self.usual_microusd if unit is _MONEY else self.usual_tokens if unit is Unit.TOKENS else None


class Counter(msgspec.Struct):
    """A count that a request would draw on, with the budgets that limit it.

    `most` and `usual` are the amounts to hold. `values` names the set of values with separate
    counts, empty if every value has one; `digest` and `shown` are this value's.
    """

    name: str
    budgets: list[Budget]
    unit: Unit
    most: int = 0
    usual: int = 0
    keep_until_ms: int = 0
    field: str = "spent"  # a rolling window's: the number of the bucket
    oldest: str = ""  # of the buckets that still count
    values: str = ""
    other: str = ""
    digest: str = ""
    shown: str = ""
    is_shared: bool = False

    def taken(self, hold_id: str, amount: int, *, is_other: bool = False) -> Taken:
        """The entry of a hold of `amount`."""
        name = self.other if is_other else self.name
        return Taken(
            name=name,
            member=f"{hold_id}|{amount}",
            amount=amount,
            keep_until_ms=self.keep_until_ms,
            field="" if self.is_shared else self.field,
            unit=self.unit,
        )


def _is_about(budget: Budget, values: Mapping[str, str]) -> bool:
    if budget.axis == DEPLOYMENT and DEPLOYMENT not in values:
        return False
    if budget.axis == SESSION and budget.value is None and not values.get(SESSION):
        return False  # it belongs to no run
    return budget.value is None or value_of(budget.value) == value_of(values.get(budget.axis, ""))


def value_of(text: str) -> str:
    """The form in which budgets compare a value: NFKC, without spaces at its ends."""
    return text if text.isascii() and text == text.strip() else unicodedata.normalize("NFKC", text).strip()


def counters_of(team_id: int, budgets: Iterable[Budget], need: Need, at_ms: int) -> list[Counter]:
    """The counts that `budgets` limit for such a request at `at_ms`, unix milliseconds."""
    counters: dict[str, Counter] = {}
    for budget in budgets:
        most = need.most(budget.unit)
        if not most or (budget.axis != TEAM and not _is_about(budget, need.values)):
            continue
        counter = counter_of(budget, team_id, need.values.get(budget.axis, ""), at_ms)
        counter.most = counter.usual = most
        if (usual := need.usual(budget.unit)) is not None:
            counter.usual = min(usual, most)
            counter.most = counter.usual if budget.overdraft is Overdraft.ALLOW and budget.is_hard else most
        merged = counters.setdefault(counter.name, counter)
        if merged is not counter:  # a hard and a soft budget of one window
            merged.budgets.append(budget)
            if budget.is_hard:
                merged.most = counter.most
    return list(counters.values())


def counter_of(budget: Budget, team_id: int, value: str, at_ms: int) -> Counter:
    """The count of one value of a budget at `at_ms`, unix milliseconds, without an amount."""
    window = budget.window_at(at_ms)
    if budget.is_shared:
        return Counter(
            f"{team_id}:{window.id}", [budget], budget.unit, keep_until_ms=keep_until(window), is_shared=True
        )
    count_name = f"b{budget.id}.{budget.epoch}"
    counter = Counter(count_name, [budget], budget.unit, keep_until_ms=keep_until(window))
    period = window.id
    if budget.window is WindowKind.ROLLING:
        bucket = budget.bucket_at(at_ms)
        counter.field, counter.oldest = str(bucket), str(bucket - BUCKETS)
        counter.keep_until_ms = at_ms + budget.rolling_s * 2000 + WINDOW_KEPT_S * 1000
        period = str(at_ms // (budget.rolling_s * 1000))
    elif budget.axis == SESSION and not window.end_ms:
        counter.keep_until_ms = at_ms + SESSION_KEPT_MS
        period = _total_period(at_ms)
    if budget.axis != TEAM and budget.value is None:
        text = value_of(value)
        counter.digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).hexdigest()
        counter.shown = "=" + text[:_SHOWN_CHARS] if text else "-"
        counter.values = f"{count_name}:{period}"
    counter.name, counter.other = (f"{count_name}:{part}:{window.id}" for part in (counter.digest or "-", OTHER))
    if budget.axis == SESSION:
        counter.other = counter.name  # each has a count of its own: the bound is that of the list
    return counter


def _total_period(at_ms: int) -> str:
    """The period whose list of values has the sessions of this time."""
    return f"total-{at_ms // SESSION_KEPT_MS}"


def place_of(name: str, field: str, keep_until_ms: int) -> tuple[str, str]:
    """The set of values that contains the value of a count, and the value's digest.

    Both are empty if the count belongs to no single value.
    """
    count_name, digest, period = name.split(":", 2)
    if len(digest) != 2 * _DIGEST_BYTES:
        return "", ""
    if period == WindowKind.TOTAL and keep_until_ms:
        period = _total_period(keep_until_ms - SESSION_KEPT_MS)
    return f"{count_name}:{period if field == 'spent' else int(field) // BUCKETS}", digest
