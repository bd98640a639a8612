"""Checks of values before they are written to the accounts, one rule a field.

No SQL. Invariant: a value that passes fits the tables and is valid for `policies`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gateway.accounts.errors import Invalid
from gateway.settings import secret_problem
from policies import WindowKind
from policies.prices import MICROUSD_MAX
from policies.windows import TEAM, Overdraft, Unit

_NAME_CHARS_MAX = 200
RATE_MAX = 10**12
ROLLING_S_MIN, ROLLING_S_MAX = 3_600, 90 * 86_400
AXES = "team, key, user, alias, deployment, or tag: and a name"
_AXIS = re.compile(r"team|key|user|alias|deployment|tag:[A-Za-z0-9_.-]{1,64}")


def check_team(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a team."""
    _check(values, _TEAM)


def check_key(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a key."""
    _check(values, _KEY)


def check_budget(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a budget."""
    _check(values, _BUDGET)


def check_new_budget(window: WindowKind, values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a new budget, and for those that do not fit together."""
    check_budget(values)
    if values.get("axis", TEAM) == TEAM and values.get("value") is not None:
        raise Invalid("value", "a budget on the team has no value: leave it out, or set `axis`")
    rolling_s = values.get("rolling_s", 0)
    if window is WindowKind.ROLLING and not ROLLING_S_MIN <= rolling_s <= ROLLING_S_MAX:
        raise Invalid("rolling_s", f"expected the length of the window, {ROLLING_S_MIN} to {ROLLING_S_MAX} seconds")
    if window is not WindowKind.ROLLING and rolling_s:
        raise Invalid("rolling_s", "only a rolling window has a length: set `window` to rolling, or leave it out")


def check_plaintext(plaintext: str) -> None:
    """Check a preset key. Raises Invalid.

    Keys are stored as plain SHA-256, so a preset key must be as hard to guess as a generated one.
    """
    if problem := secret_problem("api_key", plaintext):
        raise Invalid("api_key", problem)


def _check(values: Mapping[str, Any], rules: Mapping[str, tuple[Callable[[Any], bool], str]]) -> None:
    for name, value in values.items():
        rule = rules.get(name)
        if rule is None:
            raise Invalid(name, "there is no such field")
        is_right, expected = rule
        if not is_right(value):
            raise Invalid(name, f"expected {expected}, found {json.dumps(value, ensure_ascii=False, default=repr)}")


def _is_name(value: Any) -> bool:
    is_text = isinstance(value, str) and 0 < len(value) <= _NAME_CHARS_MAX
    return is_text and value.isprintable() and value == value.strip()


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most


def _is_zone(value: Any) -> bool:
    if value == "":
        return True
    try:
        ZoneInfo(value)
    except (ZoneInfoNotFoundError, ValueError, TypeError, OSError):
        return False
    return True


def _is_models(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and all(map(_is_name, value)))


_NAME = (_is_name, f"1 to {_NAME_CHARS_MAX} printable characters")
_FLAG = (lambda v: isinstance(v, bool), "true or false")
_RATE = (lambda v: v is None or _is_int(v, 1, RATE_MAX), "a whole number from 1 on, or null")

_Rules = Mapping[str, tuple[Callable[[Any], bool], str]]

_TEAM: _Rules = {
    "name": _NAME,
    "is_active": _FLAG,
    "requests_per_min": _RATE,
    "tokens_per_min": _RATE,
    "semantic_error_max": (lambda v: v is None or _is_number(v, 0, 1), "a number from 0 to 1, or null"),
    "is_semantic_enabled": _FLAG,
    "is_store_enabled": _FLAG,
    "time_zone": (_is_zone, "a time zone such as Europe/Berlin, or nothing for UTC"),
}
_KEY: _Rules = {
    "name": _NAME,
    "is_active": _FLAG,
    "requests_per_min": _RATE,
    "tokens_per_min": _RATE,
    "expires_at_s": (lambda v: v is None or _is_number(v, 0, 1e11), "unix seconds, or null"),
    "models": (_is_models, "an array of model names, or null for all"),
}
_AMOUNT = (
    lambda v: _is_int(v, 0, MICROUSD_MAX),
    f"a whole number (of µUSD, tokens or requests) from 0 to {MICROUSD_MAX}",
)
_BUDGET: _Rules = {
    "limit": _AMOUNT,
    "is_hard": _FLAG,
    "axis": (lambda v: isinstance(v, str) and _AXIS.fullmatch(v) is not None, AXES),
    "value": (
        lambda v: v is None or (isinstance(v, str) and len(v) <= _NAME_CHARS_MAX and (not v or v.isprintable())),
        f"up to {_NAME_CHARS_MAX} printable characters; nothing for requests without a value, null for each value",
    ),
    "unit": (lambda v: v in set(Unit), "money, tokens or requests"),
    "overdraft": (lambda v: v in set(Overdraft), "refuse, truncate or allow"),
    "rolling_s": (lambda v: _is_int(v, 0, ROLLING_S_MAX), f"a whole number of seconds up to {ROLLING_S_MAX}"),
    "raised_by": _AMOUNT,
    "raised_until_ms": (lambda v: _is_int(v, 0, MICROUSD_MAX), "unix milliseconds"),
}
