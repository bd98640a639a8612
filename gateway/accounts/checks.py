"""Checks of texts and of budgets before they are written to the accounts.

No SQL. The admin API's models check the types and the ranges of numbers before. Invariant: a text
that passes fits the tables, and a budget that passes is valid for `policies`.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from gateway.accounts.errors import Invalid
from gateway.settings import is_network, secret_problem
from policies import WindowKind
from policies.windows import TEAM

_NAME_CHARS_MAX = 200
RATE_MAX = 10**12
ROLLING_S_MIN, ROLLING_S_MAX = 3_600, 90 * 86_400
AXES = "team, key, user, session, alias, deployment, or tag: and a name"
_AXIS = re.compile(r"team|key|user|session|alias|deployment|tag:[A-Za-z0-9_.-]{1,64}")


def check(values: Mapping[str, Any]) -> None:
    """Check the texts among the fields of a team, key or budget. Raises Invalid for the first bad
    text.
    """
    for name in [name for name in values if name in _RULES]:
        is_right, expected = _RULES[name]
        if not is_right(values[name]):
            shown = json.dumps(values[name], ensure_ascii=False, default=repr)
            raise Invalid(name, f"expected {expected}, found {shown}")
    if "new_keys" in values:
        check(values["new_keys"])


def check_new_budget(window: WindowKind, values: Mapping[str, Any]) -> None:
    """Check the values of a new budget, and that they fit together. Raises Invalid."""
    check(values)
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


def _is_name(value: str) -> bool:
    return 0 < len(value) <= _NAME_CHARS_MAX and value.isprintable() and value == value.strip()


def _is_zone(value: str) -> bool:
    try:
        return value == "" or bool(ZoneInfo(value))
    except (ZoneInfoNotFoundError, ValueError, OSError):
        return False


_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_is_name, f"1 to {_NAME_CHARS_MAX} printable characters"),
    "time_zone": (_is_zone, "a time zone such as Europe/Berlin, or nothing for UTC"),
    "models": (
        lambda models: models is None or all(map(_is_name, models)),
        "an array of model names, or null for all",
    ),
    "addresses": (
        lambda networks: networks is None or (0 < len(networks) <= 100 and all(map(is_network, networks))),
        "1 to 100 addresses or networks like 10.0.0.0/8, or null for all",
    ),
    "axis": (lambda axis: _AXIS.fullmatch(axis) is not None, AXES),
    "value": (
        lambda value: value is None or (len(value) <= _NAME_CHARS_MAX and (not value or value.isprintable())),
        f"up to {_NAME_CHARS_MAX} printable characters; nothing for requests without a value, null for each value",
    ),
}
