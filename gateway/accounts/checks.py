"""Checks of values before they are written to the accounts, one rule a field.

No SQL. Invariant: a value that passes fits the tables and is valid for `policies`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from gateway.accounts.errors import Invalid
from gateway.settings import secret_problem
from policies.prices import MICROUSD_MAX

_NAME_CHARS_MAX = 200
RATE_MAX = 10**12


def check_team(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a team."""
    _check(values, _TEAM)


def check_key(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a key."""
    _check(values, _KEY)


def check_budget(values: Mapping[str, Any]) -> None:
    """Raises Invalid for the first invalid value of a budget."""
    _check(values, _BUDGET)


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


def _is_text(value: Any, chars_max: int) -> bool:
    return isinstance(value, str) and 0 < len(value) <= chars_max and value.isprintable() and value == value.strip()


def _is_int(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: Any, least: float, most: float) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and least <= value <= most


def _is_models(value: Any) -> bool:
    return value is None or (isinstance(value, tuple) and all(_is_text(name, _NAME_CHARS_MAX) for name in value))


_NAME = (lambda v: _is_text(v, _NAME_CHARS_MAX), f"1 to {_NAME_CHARS_MAX} printable characters")
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
}
_KEY: _Rules = {
    "name": _NAME,
    "is_active": _FLAG,
    "requests_per_min": _RATE,
    "tokens_per_min": _RATE,
    "expires_at_s": (lambda v: v is None or _is_number(v, 0, 1e11), "unix seconds, or null"),
    "models": (_is_models, "an array of model names, or null for all"),
}
_BUDGET: _Rules = {
    "limit_microusd": (lambda v: _is_int(v, 0, MICROUSD_MAX), f"a whole number of µUSD from 0 to {MICROUSD_MAX}"),
    "is_hard": _FLAG,
}
