"""The public facts of models: prices, sizes and capabilities, from the table in litellm's wheel.

Reads the table as a file, once, on first use, in about 20 ms; does not import litellm. Format:
litellm's model_prices_and_context_window.json, costs in USD per token. Invariant: a price is one
number for every request that fits `context_tokens_max`. Where a provider charges more above a
border, the size ends at that border, so that no budget is charged too little. Setting
`context_tokens_max` above the border accepts that risk.
"""

import functools
import importlib.util
import re
from decimal import ROUND_CEILING, Decimal
from pathlib import Path
from typing import Any

import msgspec

from policies import Price

_FILE = "model_prices_and_context_window_backup.json"
_CHAT_MODES = frozenset({"chat", "responses", "completion"})
_TIER = re.compile(r"(?:input|output)_cost_per_token_above_(\d+)k_tokens")
# litellm and the table mean OpenAI's own parameters for these providers.
_OPENAI_LIKE = frozenset({"openai", "azure"})
_ABILITIES = {
    "tools": ("supports_function_calling",),
    "json_schema": ("supports_response_schema", "supports_native_structured_output"),
    "json_object": ("supports_response_schema", "supports_native_structured_output"),
    "vision": ("supports_vision",),
    "audio": ("supports_audio_input",),
    "files": ("supports_pdf_input",),
}


class Known(msgspec.Struct, frozen=True):
    """One row of the table. Sizes in tokens; None where the table has none."""

    provider: str
    price: Price | None
    context_tokens_max: int | None
    output_tokens_max: int | None
    capabilities: frozenset[str]


def known(model: str, host: str = "") -> Known | None:
    """The row of `model`: under its own name, its provider's, or that of the
    `host` that serves it.
    """
    table = _table()
    provider, _, bare = model.partition("/")
    names = [model, *(f"{label}/{model}" for label in host.split(".") if label)]
    for name in names:
        if name in table:
            row = _row(table[name])
            if row is not None:
                return row
    if bare in table:
        row = _row(table[bare])
        if row is not None and row.provider == provider:
            return row
    return None


def can_chat(model: str, host: str = "") -> bool:
    """Whether the table does not say that `model` is for something else, as embeddings."""
    names = [model, model.partition("/")[2], *(f"{label}/{model}" for label in host.split(".") if label)]
    rows = [msgspec.json.decode(_table()[name]) for name in names if name in _table()]
    return not rows or any(row.get("mode") in (None, "chat", "responses") for row in rows)


@functools.cache
def _table() -> dict[str, msgspec.Raw]:
    spec = importlib.util.find_spec("litellm")
    if spec is None or spec.origin is None:
        return {}
    return msgspec.json.decode((Path(spec.origin).parent / _FILE).read_bytes(), type=dict[str, msgspec.Raw])


def _row(raw: msgspec.Raw) -> Known | None:
    row: dict[str, Any] = msgspec.json.decode(raw)
    if row.get("mode") not in _CHAT_MODES:
        return None
    provider = str(row.get("litellm_provider", ""))
    capabilities = {name for name, keys in _ABILITIES.items() if any(row.get(key) is True for key in keys)}
    if row["mode"] == "completion":
        capabilities |= {"completions", "suffix", "logprobs", "n"}
    if provider in _OPENAI_LIKE:
        capabilities |= {"json_object", "logprobs", "n"}
    borders = [1000 * int(found[1]) for found in map(_TIER.fullmatch, row) if found]
    sizes = [size for size in (row.get("max_input_tokens"), *borders) if isinstance(size, int)]
    output = row.get("max_output_tokens")
    return Known(
        provider=provider,
        price=_price(row),
        context_tokens_max=min(sizes, default=None),
        output_tokens_max=output if isinstance(output, int) else None,
        capabilities=frozenset(capabilities),
    )


def _price(row: dict[str, Any]) -> Price | None:
    prompt, answer = row.get("input_cost_per_token"), row.get("output_cost_per_token")
    if not isinstance(prompt, int | float) or not isinstance(answer, int | float):
        return None
    cached, request = row.get("cache_read_input_token_cost"), row.get("input_cost_per_request")
    return Price(
        input_microusd_per_mtok=microusd(prompt, 12),
        output_microusd_per_mtok=microusd(answer, 12),
        cached_input_microusd_per_mtok=microusd(cached, 12) if isinstance(cached, int | float) else None,
        request_microusd=microusd(request, 6) if isinstance(request, int | float) else 0,
    )


def microusd(usd: float, digits: int = 6) -> int:
    """USD times 10**`digits`, rounded up. Decimal, so that 0.1 is exactly 100,000."""
    return int(Decimal(repr(usd)).scaleb(digits).to_integral_value(ROUND_CEILING))
