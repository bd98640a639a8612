"""The public facts of models: prices, sizes and capabilities, from a table that is packaged.

Reads the table once, on first use, in about 10 ms. Its rows are litellm's, costs in USD per token;
`sameway prices update` lays newer ones over them. Invariant: a price is one
number for every request that fits `context_tokens_max`. If a provider charges more above a prompt
length, `context_tokens_max` is that length, so that no budget is charged too little. A setting
`context_tokens_max` above it accepts that risk.
"""

import dataclasses
import datetime
import functools
import math
import re
from collections.abc import Mapping
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import msgspec

from gateway.deployments.price_table import PriceTable, TableError, read_rows, read_table
from gateway.loggers import get_logger
from policies import Price

PACKAGED = Path(__file__).with_name("prices.json")
_log = get_logger()
_CHAT_MODES = frozenset({"chat", "responses", "completion"})
_PLAIN_MODES = {  # to capabilities
    "embedding": {"embeddings"},
    "rerank": {"rerank"},
    "moderation": {"moderations"},
    "image_generation": {"images", "image_edits", "image_variations"},
    "image_edit": {"image_edits"},
    "audio_speech": {"speech"},
    "audio_transcription": {"transcriptions", "translations"},
}
_UNITS = {  # to the table's names, which are for one unit
    "characters": ("input_cost_per_character",),
    "seconds": ("input_cost_per_second", "output_cost_per_second"),
    "images": ("output_cost_per_image", "input_cost_per_image"),
}
_TIERS = ("priority", "flex", "ultrafast", "balanced", "decisions")
_TIER = re.compile(r"(?:input|output)_cost_per_token_above_(\d+)k_tokens")
# litellm and the table mean OpenAI's own parameters for these providers.
_DIVIDED = {"bedrock": "bedrock_", "vertex_ai": "vertex_ai-"}
_OPENAI_LIKE = frozenset({"openai", "azure"})
_ABILITIES = {
    "tools": ("supports_function_calling",),
    "json_schema": ("supports_response_schema", "supports_native_structured_output"),
    "json_object": ("supports_response_schema", "supports_native_structured_output"),
    "vision": ("supports_vision",),
    "audio": ("supports_audio_input",),
    "files": ("supports_pdf_input",),
    "reasoning": ("supports_reasoning",),
}


class Known(msgspec.Struct, frozen=True):
    """One row of the table. Sizes are in tokens; None if the table lacks the value."""

    provider: str
    price: Price | None
    tiers: Mapping[str, Price]  # by `service_tier`
    context_tokens_max: int | None
    output_tokens_max: int | None
    capabilities: frozenset[str]


def known(model: str, host: str = "") -> Known | None:
    """The row of `model` under its own name, its provider's, or the name of the serving `host`."""
    table = _table()
    provider, _, bare = model.partition("/")
    for name in _names(model, host):
        row = _row(table[name]) if name in table else None
        if row is not None:
            return row
    while bare:  # after the provider there may be a route or a region: bedrock/converse/..., bedrock/us-east-1/...
        row = _row(table[bare]) if bare in table else None
        # the table divides some providers: bedrock_converse, vertex_ai-language-models
        if row is not None and (row.provider == provider or row.provider.startswith(_DIVIDED.get(provider, "\0"))):
            return row
        bare = bare.partition("/")[2]
    return None


def can_chat(model: str, host: str = "") -> bool:
    """Whether the table lets `model` chat. False only for models of another kind, such as
    embeddings.
    """
    names = [*_names(model, host), model.partition("/")[2]]
    rows = [msgspec.json.decode(_table()[name]) for name in names if name in _table()]
    return not rows or any(row.get("mode") in (None, "chat", "responses") for row in rows)


def _names(model: str, host: str) -> list[str]:
    """The names under which the table may list a model that `host` serves."""
    return [model, *(f"{label}/{model}" for label in host.split(".") if label)]


_places = [PACKAGED]


def use(path: Path) -> None:
    """From now on the table at `path`, if there is one, counts besides the packaged one: of a model
    that both have, the later table's row.
    """
    if path.exists() or len(_places) > 1:
        _places[1:] = [path] if path.exists() else []
        _table.cache_clear()


@functools.cache
def _table() -> dict[str, msgspec.Raw]:
    tables = []
    for path in _places:
        try:
            tables.append(read_table(path))
        except TableError as error:
            _log.error("prices_not_read", reason=str(error), consequence="those of the package count")
    return {name: row for table in sorted(tables, key=lambda table: table.date) for name, row in table.models.items()}


def newer_table(path: Path, today: datetime.date) -> PriceTable:
    """The table in an operator's file, of this format or litellm's, with what is read of it. Raises TableError."""
    kinds = ("input_cost_per_token", "output_cost_per_token", *_KINDS.values())
    fields = {"mode", "litellm_provider", "max_input_tokens", "max_output_tokens", *kinds, *_REQUESTS}
    fields |= {f"{kind}_{tier}" for kind in kinds for tier in _TIERS}
    fields |= {field for fields in (*_UNITS.values(), *_ABILITIES.values()) for field in fields}
    return read_rows(path, lambda field: field in fields or bool(_TIER.fullmatch(field)), today)


def _row(raw: msgspec.Raw) -> Known | None:
    row: dict[str, Any] = msgspec.json.decode(raw)
    mode = row.get("mode")
    if mode not in _CHAT_MODES and mode not in _PLAIN_MODES:
        return None
    provider = str(row.get("litellm_provider", ""))
    capabilities = {name for name, keys in _ABILITIES.items() if any(row.get(key) is True for key in keys)}
    if mode in _PLAIN_MODES:
        capabilities = set(_PLAIN_MODES[mode])
    elif mode == "completion":
        capabilities |= {"completions", "suffix", "logprobs", "n"}
    if provider in _OPENAI_LIKE and mode in _CHAT_MODES:
        capabilities |= {"json_object", "logprobs", "n"}
    borders = [1000 * int(found[1]) for found in map(_TIER.fullmatch, row) if found]
    sizes = [size for size in (row.get("max_input_tokens"), *borders) if isinstance(size, int)]
    output = row.get("max_output_tokens")
    return Known(
        provider=provider,
        price=_price(row),
        tiers={tier: price for tier in _TIERS if (price := _price(row, f"_{tier}")) is not None},
        context_tokens_max=min(sizes, default=None),
        # an image or a sound is not asked for in tokens
        output_tokens_max=output if isinstance(output, int) and mode in _CHAT_MODES else None,
        capabilities=frozenset(capabilities),
    )


# kinds of tokens by the table's names
_KINDS = {
    "cached_input": "cache_read_input_token_cost",
    "cached_audio_input": "cache_read_input_audio_token_cost",
    "cache_write": "cache_creation_input_token_cost",
    "cache_write_1h": "cache_creation_input_token_cost_above_1hr",
    "audio_input": "input_cost_per_audio_token",
    "image_input": "input_cost_per_image_token",
    "reasoning": "output_cost_per_reasoning_token",
    "audio_output": "output_cost_per_audio_token",
    "image_output": "output_cost_per_image_token",
}


_REQUESTS = (
    "input_cost_per_request",
    "input_cost_per_query",
    "search_context_cost_per_query",
    "output_cost_per_image_token",
)


def _price(row: dict[str, Any], tier: str = "") -> Price | None:
    """The price of a `tier`. A part without a price in that tier has its usual price."""
    prompt, answer = row.get(f"input_cost_per_token{tier}"), row.get(f"output_cost_per_token{tier}")
    units = [
        (unit, max(microusd(usd, 12) for usd in found))
        for unit, names in _UNITS.items()
        if (found := [usd for name in names if isinstance(usd := row.get(name), int | float)][:2])
    ]
    if row["mode"] in _PLAIN_MODES and answer is None:
        answer = row.get("output_cost_per_image_token") or 0.0
    if prompt is None and row["mode"] in _PLAIN_MODES and (units or row.get("input_cost_per_audio_token")):
        prompt = row.get("input_cost_per_audio_token") or 0.0
    if not isinstance(prompt, int | float) or not isinstance(answer, int | float):
        return None
    kinds = {kind: row.get(f"{name}{tier}") or row.get(name) for kind, name in _KINDS.items()}
    request = row.get("input_cost_per_request") or row.get("input_cost_per_query")
    searches = row.get("search_context_cost_per_query")
    search = max(searches.values(), default=None) if isinstance(searches, dict) else None
    return Price(
        input_microusd_per_mtok=microusd(prompt, 12),
        output_microusd_per_mtok=microusd(answer, 12),
        request_microusd=microusd(request, 6) if isinstance(request, int | float) else 0,
        tool_call_microusd=microusd(search, 6) if isinstance(search, int | float) else None,
        units=tuple(units) if row["mode"] in _PLAIN_MODES else (),
        **{
            f"{kind}_microusd_per_mtok": microusd(usd, 12)
            for kind, usd in kinds.items()
            if isinstance(usd, int | float)
        },
    )


def with_writes(price: Price, factors: tuple[float, float] | None) -> Price:
    """`price`, completed with a provider's prices of writing its prompt cache: `factors` of the
    input price, for the usual life and for an hour.
    """
    if factors is None:
        return price
    usual_price, hour_price = (math.ceil(price.input_microusd_per_mtok * factor) for factor in factors)
    write, write_1h = price.cache_write_microusd_per_mtok, price.cache_write_1h_microusd_per_mtok
    return dataclasses.replace(
        price,
        cache_write_microusd_per_mtok=usual_price if write is None else write,
        cache_write_1h_microusd_per_mtok=hour_price if write_1h is None else write_1h,
    )


def microusd(usd: float, digits: int = 6) -> int:
    """USD times 10**`digits`, rounded up. Decimal, so that 0.1 is exactly 100,000."""
    return int(Decimal(repr(usd)).scaleb(digits).to_integral_value(ROUND_CEILING))
