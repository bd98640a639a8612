"""Reads a provider's CSV of usage or cost, row by row, into sums by UTC day and model.

Reads the columns of OpenAI's exports ("completions_usage", "cost"), of Anthropic's Console (tokens,
cost), of OpenRouter's activity, and of a plain CSV: date, model, tokens by kind, cost. Knows no ledger and no prices.
Invariants: memory grows with the days and models, not with the file; an ambiguous cell is refused,
with its line and column.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import UTC, date, datetime
from decimal import Decimal, InvalidOperation
from itertools import chain
from pathlib import Path

_GROUPS_MAX = 100_000
_TEXT_MAX = 300
_TOKENS_MAX = 10**15
_USD_MAX = Decimal(10**9)

# what each column is, by its name in lower case with `_` for spaces
_COLUMNS = {
    "date": ("date", "day", "usage_date", "usage_date_utc", "start_time_iso", "start_time", "created_at"),
    "model": ("model", "model_version", "model_name", "line_item", "model_permaslug"),
    "requests": ("requests", "num_model_requests"),
    "prompt": ("prompt_tokens", "input_tokens", "tokens_prompt"),
    "plain": ("plain_tokens", "input_tokens_no_cache", "usage_input_tokens_no_cache", "uncached_input_tokens"),
    "cached": (
        "cached_tokens", "input_cached_tokens", "cache_read_tokens", "cache_read_input_tokens",
        "usage_input_tokens_cache_read", "tokens_cached",
    ),
    "written": (
        "cache_write_tokens", "cache_creation_input_tokens", "usage_input_tokens_cache_write_5m",
    ),
    "written_1h": ("cache_write_1h_tokens", "usage_input_tokens_cache_write_1h"),
    "completion": ("completion_tokens", "output_tokens", "usage_output_tokens", "tokens_completion"),
    "usd": ("cost", "cost_usd", "amount", "amount_usd", "amount_value", "cost_total"),
    "microusd": ("cost_microusd",),
    "currency": ("currency", "amount_currency"),
    "batch": ("batch", "usage_type"),
    "tier": ("service_tier",),
    "kind": ("cost_type",),
}  # fmt: skip
_IGNORED = frozenset(
    {
        "end_time", "end_time_iso", "project_id", "project_name", "user_id", "user_email", "api_key_id", "api_key",
        "api_key_name", "organization_id", "organization_name", "api_source", "workspace", "context_window",
        "token_type", "inference_geo", "speed", "quantity", "quantity_unit", "web_search_count",
        "input_audio_tokens", "output_audio_tokens", "input_text_tokens", "output_text_tokens", "input_image_tokens",
        "output_image_tokens", "input_cached_audio_tokens", "input_cached_text_tokens", "input_cached_image_tokens",
        "input_uncached_tokens", "reasoning_tokens", "tokens_reasoning", "generation_id", "cost_web_search", "cost_cache",
        "cost_file_processing", "byok_usage_inference", "provider_name", "variant", "cancelled", "streamed", "user",
        "finish_reason_raw", "finish_reason_normalized", "generation_time_ms", "time_to_first_token_ms",
        "api_key_disabled", "app_name",
    }
)  # fmt: skip
_MEANINGS = {name: meaning for meaning, names in _COLUMNS.items() for name in names}
_TOKENS = ("prompt", "plain", "cached", "written", "written_1h", "completion")
_BATCH = frozenset({"batch", "true", "1", "yes", "batches"})


class ExportError(Exception):
    """The file cannot be read as an export; the message has the place, the text and the
    expectation.
    """


@dataclass(slots=True)
class Billed:
    """The use and cost of one UTC day and model, on a provider's bill or in the ledger.

    `prompt_tokens` are all input tokens, including `cached_tokens` and the `cache_write...` tokens.
    `batch_microusd` is the batches' part of the cost; `names` are the file's names of the model.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cache_write_tokens: int = 0
    cache_write_1h_tokens: int = 0
    completion_tokens: int = 0
    cost_microusd: int = 0
    batch_microusd: int = 0
    names: set[str] = field(default_factory=set)

    def add(self, other: Billed) -> None:
        """Add the counts and the cost of `other`."""
        for name in COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


COUNTS = tuple(field.name for field in fields(Billed)[:-2])
"""The counts that a provider's bill and the ledger share, by the ledger's names."""


@dataclass(slots=True)
class Export:
    """The sums of a file, and the kinds of columns that it has. `notes` list assumptions."""

    billed: dict[tuple[date, str], Billed]
    has_tokens: bool
    has_requests: bool
    has_cost: bool
    notes: list[str]


def read_export(path: Path, ignored: Sequence[str] = ()) -> Export:
    """The sums of the CSV at `path`; columns in `ignored` are not read.

    Raises ExportError, and OSError.
    """
    with path.open("rb") as raw:
        start = raw.read(4)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        encoding = "utf-16"
    elif start.startswith(b"PK"):
        raise ExportError("the file is a spreadsheet or an archive: expected a CSV; save it as CSV (UTF-8)")
    elif start.lstrip(b"\xef\xbb\xbf \r\n")[:1] in (b"{", b"["):
        raise ExportError("the file is JSON: expected a CSV, as the pages of the provider's console export it")
    else:
        encoding = "utf-8-sig"
    try:
        with path.open(encoding=encoding, newline="") as text:
            return _read(text, frozenset(map(_normal, ignored)))
    except UnicodeDecodeError as error:
        raise ExportError(f"the file is not UTF-8 (byte {error.start} of a block): save it as CSV (UTF-8)") from None


def _read(text: Iterable[str], ignored: frozenset[str]) -> Export:
    lines = iter(text)
    head = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t|", key=head.count)
    if not head.strip():
        raise ExportError(f"the file is empty: expected a line of column names, {_expected()}")
    reader = csv.reader(chain([head], lines), delimiter=delimiter, strict=True)
    try:
        names = [_normal(name) for name in next(reader)]
        sums = _Sums(delimiter, _positions(names, ignored))
        for row in reader:
            if any(cell.strip() for cell in row):
                if len(row) != len(names):
                    raise ExportError(
                        f"line {reader.line_num}: found {len(row)} cells, expected {len(names)} as in the first line"
                    )
                sums.add(row, reader.line_num)
    except csv.Error as error:
        raise ExportError(f"line {reader.line_num}: no CSV: {error}") from None
    return sums.export()


def _normal(name: str) -> str:
    return re.sub(r"[\s\-.]+", "_", name.strip().strip("\ufeff'\"").lower())


def _expected() -> str:
    return f"date, model, and of these what there is: {', '.join(names[0] for names in list(_COLUMNS.values())[2:])}"


def _positions(names: Sequence[str], ignored: frozenset[str]) -> dict[str, int]:
    """The column of each meaning."""
    for needed in ("date", "model"):
        if not (set(names) - ignored).intersection(_COLUMNS[needed]):
            raise ExportError(f"no column is the {needed}: expected {' or '.join(_COLUMNS[needed])}")
    unknown = [name for name in names if name not in _MEANINGS and name not in _IGNORED and name not in ignored]
    if unknown:
        shown = ", ".join(shown_text(name or "(no name)") for name in unknown[:10])
        raise ExportError(
            f"unknown column: {shown}. Expected {_expected()}. `--ignore COLUMN` leaves a column out of the comparison"
        )
    positions: dict[str, int] = {}
    for position, name in enumerate(names):
        meaning = _MEANINGS.get(name)
        if meaning is None or name in ignored:
            continue
        if meaning in positions:
            if meaning == "date":  # OpenAI has the moment twice
                positions["date"] = position if name.endswith("_iso") else positions["date"]
                continue
            other = names[positions[meaning]]
            raise ExportError(f"two columns are the {meaning}: {other!r} and {name!r}; `--ignore` one of them")
        positions[meaning] = position
    if not positions.keys() & {*_TOKENS, "usd", "microusd"}:
        raise ExportError(f"no column has tokens or costs: expected {_expected()}")
    return positions


_PLAIN = re.compile(r"0?\.\d{1,12}|\d{1,9}|\d{4,9}\.\d{1,12}")  # can be read in one way alone


class _Sums:
    """Sums rows by day and model."""

    def __init__(self, delimiter: str, positions: Mapping[str, int]) -> None:
        self._delimiter = delimiter
        self._positions = positions
        self._exact: dict[tuple[date, str], tuple[Billed, Decimal, Decimal]] = {}
        self._is_zone_assumed = False
        self._read: dict[tuple[str, str], tuple[date, str]] = {}  # days and models by their texts, which repeat

    def add(self, row: Sequence[str], line: int) -> None:
        """Add one row. Raises ExportError."""
        cells = {meaning: _cell(row[place]) for meaning, place in self._positions.items()}
        tokens = {name: self._count(cells[name], name, line) for name in (*_TOKENS, "requests") if name in cells}
        usd = self._usd(cells, line)
        if not cells["model"] and not any(tokens.values()) and not usd:
            return  # an empty day of OpenAI's cost export
        if not cells["model"] and cells.get("kind", "") not in ("", "token", "tokens"):
            cells["model"] = cells["kind"]  # Anthropic's web searches are of no model
        texts = (cells["date"], cells["model"])
        key = self._read.get(texts)
        if key is None:
            key = (self._day(cells["date"], line), _model(cells["model"], line))
            if len(self._read) < _GROUPS_MAX:
                self._read[texts] = key
        day, model = key
        sums = self._exact.get((day, model))
        if sums is None:
            if len(self._exact) >= _GROUPS_MAX:
                raise ExportError(f"line {line}: more than {_GROUPS_MAX:,} pairs of a day and a model")
            sums = (Billed(), Decimal(0), Decimal(0))
        billed, cost, batch = sums
        parts = tokens.get("cached", 0) + tokens.get("written", 0) + tokens.get("written_1h", 0)
        prompt = tokens["plain"] + parts if "plain" in tokens else tokens.get("prompt", 0)
        if parts > prompt:
            raise ExportError(f"line {line}: {parts:,} tokens of the prompt cache, but a prompt of {prompt:,}")
        billed.add(
            Billed(
                requests=tokens.get("requests", 0),
                prompt_tokens=prompt,
                cached_tokens=tokens.get("cached", 0),
                cache_write_tokens=tokens.get("written", 0),
                cache_write_1h_tokens=tokens.get("written_1h", 0),
                completion_tokens=tokens.get("completion", 0),
            )
        )
        billed.names.add(cells["model"].partition(", ")[0])
        is_batch = any(cells.get(name, "").lower() in _BATCH for name in ("batch", "tier"))
        is_batch = is_batch or "batch" in cells["model"].lower()
        self._exact[day, model] = (billed, cost + usd, batch + (usd if is_batch else 0))

    def _usd(self, cells: Mapping[str, str], line: int) -> Decimal:
        if cells.get("currency", "").lower() not in ("", "usd"):
            raise ExportError(f"line {line}: found the currency {shown_text(cells['currency'])}, expected usd")
        if "microusd" in cells:
            return self._number(cells["microusd"], "cost_microusd", line) / 1_000_000
        return self._number(cells.get("usd", ""), "cost", line)

    def _count(self, text: str, name: str, line: int) -> int:
        if text.isdecimal() and len(text) < 16:
            return int(text)
        number = self._number(text, name, line, is_count=True)
        if not 0 <= number <= _TOKENS_MAX or number != number.to_integral_value():
            raise ExportError(f"line {line}: found {shown_text(text)} {name}, expected a whole number from 0 on")
        return int(number)

    def _number(self, text: str, name: str, line: int, *, is_count: bool = False) -> Decimal:
        if _PLAIN.fullmatch(text):
            return Decimal(text)
        plain = text.strip().removeprefix("$").replace("\u00a0", "").replace("\u202f", "").replace("'", "")
        plain = plain.replace(" ", "")
        if not plain or plain == "-":
            return Decimal(0)
        where = f"line {line}: the {name} {shown_text(text)}"
        if not re.fullmatch(r"[+-]?[\d.,]+(?:[eE][+-]?\d{1,3})?", plain):
            raise ExportError(f"{where} is no number: a formula or a text, expected digits")
        if is_count and re.fullmatch(r"\d{1,3}(?:[.,]\d{3})+", plain):
            plain = re.sub("[.,]", "", plain)
        elif "," in plain or (self._delimiter == ";" and re.fullmatch(r"[+-]?[1-9]\d{0,2}\.\d{3}", plain)):
            plain = self._with_point(plain, where)
        try:
            number = Decimal(plain)
        except InvalidOperation:
            raise ExportError(f"{where} is no number") from None
        if abs(number) > _USD_MAX * (1_000_000 if is_count or name.endswith("microusd") else 1):
            raise ExportError(f"{where} is larger than any bill")
        return number

    def _with_point(self, plain: str, where: str) -> str:
        """Rewrite a number with grouping signs or a decimal comma for Decimal. Raises ExportError."""
        comma, point = plain.rfind(","), plain.rfind(".")
        if comma >= 0 and point >= 0:
            grouping, decimal = (".", ",") if comma > point else (",", ".")
            return plain.replace(grouping, "").replace(decimal, ".")
        sign = "," if comma >= 0 else "."
        if plain.count(sign) > 1:
            return plain.replace(sign, "")
        if re.fullmatch(rf"[+-]?[1-9]\d{{0,2}}\{sign}\d{{3}}", plain):
            raise ExportError(f"{where} is a thousand or a fraction: write it without separators")
        return plain.replace(sign, ".")

    def _day(self, text: str, line: int) -> date:
        if text.isdecimal() and len(text) in (10, 13):
            return datetime.fromtimestamp(int(text[:10]), UTC).date()
        try:
            if re.fullmatch(r"\d{4}-\d\d-\d\d", text):
                return date.fromisoformat(text)
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise ExportError(
                f"line {line}: found the date {shown_text(text)}, expected 2026-11-22, an ISO time or unix seconds"
            ) from None
        if moment.tzinfo is None:
            self._is_zone_assumed = True
            return moment.date()
        return moment.astimezone(UTC).date()

    def export(self) -> Export:
        billed = {}
        for key, (billed_sum, cost, batch) in self._exact.items():
            billed_sum.cost_microusd, billed_sum.batch_microusd = round(cost * 1_000_000), round(batch * 1_000_000)
            billed[key] = billed_sum
        if not billed:
            raise ExportError("the file has no rows of usage below its column names")
        return Export(
            billed,
            has_tokens=bool(self._positions.keys() & set(_TOKENS)),
            has_requests="requests" in self._positions,
            has_cost=bool(self._positions.keys() & {"usd", "microusd"}),
            notes=["times without a zone are taken as UTC"] if self._is_zone_assumed else [],
        )


def _cell(text: str) -> str:
    """A cell's text without the marks that spreadsheets put around texts."""
    text = text.strip()
    if text.startswith('="') and text.endswith('"'):
        text = text[2:-1]
    return text.removeprefix("'").strip()


def _model(text: str, line: int) -> str:
    name = text.partition(", ")[0]  # OpenAI's line items: "gpt-4o-2024-08-06, input"
    if not name or len(name) > _TEXT_MAX or name.startswith(("=", "+", "@")) or not name.isprintable():
        raise ExportError(f"line {line}: found the model {shown_text(text)}, expected a model's name")
    return normal_model(name)


_DATED = re.compile(r"[-@](?:\d{4}-\d\d-\d\d|\d{8}|latest)(?:-v\d+(?::\d+)?)?$|-v\d+:\d+$")
_REGION = re.compile(r"^(?:us|eu|apac|global)\.")


def normal_model(name: str) -> str:
    """A model's name without provider, region and date, so that its dated names and aliases agree."""
    bare = _REGION.sub("", name.strip().lower().rpartition("/")[2])
    return _DATED.sub("", bare.removeprefix("anthropic."))


def shown_text(text: str) -> str:
    """The file's text for a terminal: short, and without control characters."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")
