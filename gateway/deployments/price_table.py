"""The table of models' prices as a file: its format, and how a newer one is laid over it.

JSON: `date`, `source` and `models`, whose rows have the names and values of litellm's
model_prices_and_context_window.json, of which only what is read is kept. Knows no setting: what the
operator's file says of a price stands before every table. Invariant: a table is replaced whole.
"""

import datetime
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec


class PriceTable(msgspec.Struct, frozen=True):
    """The table in one file, of the day `date`."""

    date: datetime.date
    source: str
    models: dict[str, msgspec.Raw]


class TableError(ValueError):
    """A file that cannot be read as a table; the message is for people."""


def read_table(path: Path) -> PriceTable:
    """Raises TableError."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PriceTable)
    except (OSError, msgspec.DecodeError) as error:
        raise TableError(f"{path}: expected a table of prices, found {error}") from None


def read_rows(path: Path, is_read: Callable[[str], bool], today: datetime.date) -> PriceTable:
    """A table of this format or of litellm's, which has no date and is of `today`; of each row only
    what `is_read`. Raises TableError.
    """
    try:
        given = json.loads(path.read_bytes())
        is_ours = "models" in given and "date" in given
        rows = given["models"] if is_ours else given
        date = datetime.date.fromisoformat(given["date"]) if is_ours else today
        kept = {name: {field: value for field, value in row.items() if is_read(field)} for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise TableError(f"{path}: expected a table of models and their prices, found {error}") from None
    wrong = [
        f"{name}.{field}: {value!r}" for name, row in kept.items() for field, value in row.items() if _is_wrong(value)
    ]
    if wrong:
        raise TableError(f"{path}: expected numbers from 0 on, found {'; '.join(wrong[:3])}")
    if not any("input_cost_per_token" in row for row in kept.values()):
        raise TableError(f"{path}: expected rows with `input_cost_per_token`, found none")
    source = str(given.get("source", path.name)) if is_ours else f"litellm's table, {path.name}"
    packed = {name: msgspec.Raw(msgspec.json.encode(row)) for name, row in kept.items() if "mode" in row}
    return PriceTable(date, source, packed)


def merge(new: PriceTable, path: Path) -> tuple[int, int]:
    """Lay the rows of `new` over those of the table at `path`, which may not exist.

    Returns how many are new, and how many changed. Raises TableError if the one there is newer.
    """
    old = read_table(path) if path.exists() else PriceTable(new.date, "", {})
    if old.date > new.date:
        raise TableError(f"{path} is of {old.date}, and this one of {new.date}: nothing was changed")
    changed = sum(name in old.models and bytes(old.models[name]) != bytes(row) for name, row in new.models.items())
    rows = {**old.models, **new.models}
    lines = [f"{json.dumps(name)}: {bytes(rows[name]).decode()}" for name in sorted(rows)]  # a row a line, for diffs
    head = json.dumps({"date": str(new.date), "source": new.source})[:-1]
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(head + ', "models": {\n' + ",\n".join(lines) + "\n}}\n")
    unfinished.rename(path)
    return len(rows) - len(old.models), changed


def _is_wrong(value: Any) -> bool:
    """Whether a value is a number that no price or size has."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and not (math.isfinite(value) and value >= 0)
