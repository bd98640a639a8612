"""Formats numbers and times for people: money, durations, sizes, shares, ages, with units.

Each function is a filter of the templates. No HTML but the <time> element of `ago`. Pure functions;
`now_s` is a parameter.
"""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup

from policies import WindowKind
from policies.durations import duration_ms, duration_s
from policies.prices import dollars as exact_dollars

NOTHING = "–"


def usd(microusd: int | None, decimals: int | None = None) -> str:
    """Dollars with `decimals`, those of a whole column; else with the decimals that matter: $1,234, $12.30, $0.0042."""
    if microusd is None:
        return NOTHING
    if decimals is not None and 0 < abs(microusd) * 10**decimals < 500_000:
        return f"{'-' if microusd < 0 else ''}<${10**-decimals:.{decimals}f}"
    places = _decimals(microusd) if decimals is None else decimals
    return f"{'-' if microusd < 0 else ''}${abs(microusd) / 1e6:,.{places}f}"


def _decimals(microusd: int) -> int:
    """The decimals with which an amount has three figures, without zeros beyond the cents: $0.0120 is $0.012."""
    dollars = abs(microusd) / 1e6
    if dollars >= 1 or not dollars:
        return 2 if 0 < dollars < 1_000 else 0
    fraction = f"{dollars:.{min(6, 2 - math.floor(math.log10(dollars)))}f}".partition(".")[2]
    return max(2, len(fraction.rstrip("0")))


def decimals(rows: Iterable[Any], name: str = "") -> int:
    """The decimals that all amounts of a column share: those of the finest one, or cents where there are $100 and more."""
    found = (row if not name else row[name] if isinstance(row, Mapping) else getattr(row, name) for row in rows)
    amounts = [abs(amount) for amount in found if amount]
    return 2 if max(amounts, default=0) >= 100_000_000 else max(map(_decimals, amounts), default=0)


def sign(amount: float | None) -> str:
    """The class of an amount that was saved: good above 0, bad below it."""
    return "good" if amount and amount > 0 else "bad" if amount else ""


def dollars(microusd: int) -> str:
    """An exact amount for a form: no currency sign, at least two decimals."""
    whole, _, fraction = exact_dollars(microusd).partition(".")
    return f"{whole}.{fraction.rstrip('0').ljust(2, '0')}"


def amount(number: float | None, unit: str) -> str:
    """An amount of a budget's unit."""
    if number is None:
        return NOTHING
    return usd(round(number)) if unit == "money" else f"{count(number)} {unit}"


def count(number: float | None) -> str:
    """A whole number, grouped; from 100,000 on in k and M."""
    if number is None:
        return NOTHING
    for limit, divisor, unit in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e5, 1e3, "k")):
        if number >= limit:
            return f"{number / divisor:.3g} {unit}"
    return f"{number:,.0f}"


def percent(share: float | None) -> str:
    """0.634 is 63%. Small shares keep a digit; only 0 is 0%."""
    if share is None:
        return NOTHING
    if 0 < share < 0.001:
        return "<0.1%"
    if share < 0.1 and round(share * 1000) % 10:
        return f"{share:.1%}"
    return f"{share:.0%}" if share < 0.995 or share >= 1 else ">99%"


def ms(value: float | None) -> str:
    """A duration in milliseconds, which may be unknown."""
    return NOTHING if value is None else duration_ms(value)


def span(window: str) -> str:
    """A window of statistics, such as 24h, as a duration that does not break."""
    return f"{window[:-1]}\N{NO-BREAK SPACE}{window[-1]}"


def size(size_bytes: float | None) -> str:
    """Bytes in binary units: 512 B, 3.4 KiB, 256 MiB."""
    if size_bytes is None:
        return NOTHING
    value, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"


def price(microusd_per_mtok: int) -> str:
    """A price for a million tokens."""
    return "free" if microusd_per_mtok == 0 else f"{usd(microusd_per_mtok)} / M tokens"


def changes(text: str) -> list[tuple[str, str | None, str | None]]:
    """The change of a row of the audit log: each field's name in words, and its values before and after in the unit
    that the field's name ends in; None: there is none. What is new and says nothing is left out.
    """
    pairs = [pair for pair in json.loads(text or "{}").items() if pair[0] not in ("id", "team_id")]  # which the row has
    return [_change(name, old, new) for name, (old, new) in pairs if old is not None or new or _says(name, new)]


def _says(name: str, value: Any) -> bool:
    """Whether a value that is nothing says something: a switch that is off, a limit of 0."""
    return value is False or (value == 0 and name.startswith("limit"))


def _change(name: str, before: Any, after: Any) -> tuple[str, str | None, str | None]:
    *words, unit = name.split("_")
    label = " ".join(words if unit in ("microusd", "s", "ms") else [*words, unit])
    return label, _in_unit(before, name), _in_unit(after, name)


def _in_unit(value: Any, name: str) -> str | None:
    """A value as people read it, by the unit that its name ends in."""
    if isinstance(value, dict):
        shown = {part: _in_unit(one, part) for part, one in value.items() if one is not None}
        return "; ".join(f"{_change(part, None, None)[0]}: {one}" for part, one in shown.items()) or None
    if value is None or isinstance(value, list | str):
        return value if value is None else (value if isinstance(value, str) else ", ".join(map(str, value))) or NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith(("_at_s", "_until_s", "_ms")):
        return utc(value / (1_000 if name.endswith("_ms") else 1)) if value else NOTHING
    if name.endswith("_microusd"):
        return usd(value)
    return duration_s(value) if name.endswith("_s") else percent(value) if name.endswith("_max") else str(value)


def window(kind: WindowKind | str, rolling_s: int | None = None) -> str:
    """A budget's window in words: per month, in total, in any 24 h."""
    if kind == WindowKind.ROLLING:
        return f"in any {duration_s(rolling_s)}" if rolling_s else "in a rolling window"
    return "in total" if kind == WindowKind.TOTAL else f"per {WindowKind(kind).value}"


_MICROUSD = re.compile(r"(\d+) µUSD")
_MS = re.compile(r"(?<![\d.])(\d+) ms\b")


_BODY = re.compile(r'\{.*?"message":\s*"((?:[^"\\]|\\.)*)".*', re.DOTALL)
_ERRNO = re.compile(
    r"(?:\w+Error: )*(?:Redis is away: no connection: )?\[Errno (-?\d+)\] (?:Connect call failed \('(.+?)'(?:, (\d+))?.*?\))?"
)


def in_units(text: str) -> str:
    """A part's own words for people: µUSD as dollars, ms as durations, an errno by its name, an error's body by its message."""
    text = _ERRNO.sub(_named_errno, _BODY.sub(r"\1", text))
    return _MS.sub(lambda time: ms(int(time[1])), _MICROUSD.sub(lambda amount: usd(int(amount[1])), text))


def _named_errno(refused: re.Match[str]) -> str:
    number, host, port = refused.groups()
    return f"{os.strerror(int(number)).lower()} by {host}{(port and f':{port}') or ''}" if host else ""


def utc(at_s: float) -> str:
    """A moment with date, time and zone."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def moment(at_s: float) -> Markup:
    """A date and time in UTC for a column that says so."""
    return _time(at_s, f"{datetime.fromtimestamp(at_s, UTC):%Y-%m-%d %H:%M:%S}")


def clock(at_s: float, now_s: float) -> Markup:
    """The time of day in UTC, or of another day the date and the minute."""
    at, now = datetime.fromtimestamp(at_s, UTC), datetime.fromtimestamp(now_s, UTC)
    return _time(at_s, f"{at:%H:%M:%S}" if at.date() == now.date() else f"{at:%d %b %H:%M}")


def ago(at_s: float | None, now_s: float) -> Markup | str:
    """The distance to now, with the moment as its title: of the past its largest unit, of the future two."""
    if at_s is None:
        return "never"
    distance = now_s - at_s
    text = f"{duration_s(int(distance), 1)} ago" if distance > 0 else f"in {duration_s(-distance)}"
    return _time(at_s, "now" if abs(distance) < 1 else text)


def _time(at_s: float, text: str) -> Markup:
    at = datetime.fromtimestamp(at_s, UTC).isoformat()
    return Markup('<time datetime="{}" title="{}">{}</time>').format(at, utc(at_s), text)
