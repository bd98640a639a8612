"""Reads the tokens of an answer as its provider reports them.

Sources: OpenAI's API reference ("The chat completion object", `usage`), DeepSeek's and OpenRouter's
(`prompt_cache_hit_tokens`, `cache_write_tokens`, `cost`), Moonshot's (`cached_tokens`), Anthropic's ("Compaction", `iterations`),
litellm's form of Anthropic's and Bedrock's (`cache_creation_input_tokens`,
`cache_creation_token_details`, `server_tool_use`), and Gemini's OpenAI-compatible endpoint, which
counts thoughts in `total_tokens` alone. Knows no prices. Invariants: an unreadable usage counts as
missing, and its answer is kept; no part of a prompt or of a completion is counted twice, and the
parts are at most the whole.
"""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import attrgetter, contains
from typing import Annotated, Any

import msgspec

from gateway.wire.types import Chunk
from policies import Usage
from policies.usage import COUNT_MAX as TOKENS_MAX  # a larger claim is the server's error

COST_USD_MAX = 1_000_000.0
_Count = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)] | None


class _Lives(msgspec.Struct, gc=False):
    ephemeral_5m_input_tokens: _Count = None
    ephemeral_1h_input_tokens: _Count = None


class _Cached(msgspec.Struct, gc=False):
    audio_tokens: _Count = None


class _Inputs(msgspec.Struct, gc=False):
    cached_tokens: _Count = None
    cached_tokens_details: _Cached | None = None
    cache_write_tokens: _Count = None
    cache_creation_tokens: _Count = None
    cache_creation_token_details: _Lives | None = None
    audio_tokens: _Count = None
    image_tokens: _Count = None
    web_search_requests: _Count = None


class _Outputs(msgspec.Struct, gc=False):
    reasoning_tokens: _Count = None
    audio_tokens: _Count = None
    image_tokens: _Count = None


class _Tools(msgspec.Struct, gc=False):
    web_search_requests: _Count = None


_Money = Annotated[float, msgspec.Meta(ge=0, le=COST_USD_MAX)] | None


class _Reported(msgspec.Struct, gc=False):
    """The usage fields of all providers."""

    prompt_tokens: _Count = None
    completion_tokens: _Count = None
    total_tokens: _Count = None
    prompt_tokens_details: _Inputs | None = None
    completion_tokens_details: _Outputs | None = None
    cache_read_input_tokens: _Count = None
    prompt_cache_hit_tokens: _Count = None
    cached_tokens: _Count = None
    cache_creation_input_tokens: _Count = None
    cache_creation: _Lives | None = None
    server_tool_use: _Tools | None = None
    cost: _Money = None  # OpenRouter, in USD
    rounds: _Count = None  # ours, of `from_anthropic`


class _Tier(msgspec.Struct, gc=False, frozen=True):
    service_tier: Any = None


class _Tiered(_Tier, frozen=True):
    usage: _Tier | None = None
    response: _Tier | None = None  # of an event of the Responses API


_DATA_OF, _TIER = attrgetter("data"), repeat(b'"service_tier"')
_decode = msgspec.json.Decoder(_Reported).decode
_NO_INPUTS, _NO_OUTPUTS, _NO_LIVES, _NO_TOOLS, _NO_CACHED = _Inputs(), _Outputs(), _Lives(), _Tools(), _Cached()
_NO_PARTS = msgspec.structs.astuple(_Reported())[3:]
_ANTHROPICS = frozenset({"cache_read_input_tokens", "cache_creation_input_tokens", "iterations", "server_tool_use"})
_NAMES = {
    "input_tokens": "prompt_tokens",
    "output_tokens": "completion_tokens",
    "input_tokens_details": "prompt_tokens_details",
    "input_token_details": "prompt_tokens_details",
    "output_tokens_details": "completion_tokens_details",
}
_CAPITAL = re.compile(r"(?<=[a-z])(?=[A-Z])")  # Vercel's AI SDK and its proxies write promptTokens
_PARTS = frozenset({"cache_creation", "cached_tokens_details", "server_tool_use"})
_PARTS |= {"prompt_tokens_details", "completion_tokens_details", "cache_creation_token_details"}


def usage_of(raw: bytes) -> Usage | None:
    """The tokens in the JSON of a `usage`; None without readable counts."""
    try:
        try:
            reported = _decode(raw)
        except msgspec.ValidationError:
            reported = msgspec.convert(_cleaned(msgspec.json.decode(raw)), _Reported)
        if not reported.prompt_tokens and not reported.completion_tokens:
            counts = renamed(msgspec.json.decode(raw, type=dict[str, Any]))
            reported = msgspec.convert(_cleaned(counts), _Reported)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    prompt, completion, total = reported.prompt_tokens or 0, reported.completion_tokens or 0, reported.total_tokens or 0
    if not prompt and not completion:
        return None
    if total <= prompt + completion <= TOKENS_MAX and msgspec.structs.astuple(reported)[3:] == _NO_PARTS:
        return Usage(prompt, completion)
    inputs, outputs = reported.prompt_tokens_details or _NO_INPUTS, reported.completion_tokens_details or _NO_OUTPUTS
    lives = inputs.cache_creation_token_details or reported.cache_creation or _NO_LIVES
    tools = reported.server_tool_use or _NO_TOOLS
    cached = inputs.cached_tokens or reported.cache_read_input_tokens or reported.prompt_cache_hit_tokens
    cached = cached or reported.cached_tokens or 0
    written_1h = lives.ephemeral_1h_input_tokens or 0
    written = inputs.cache_write_tokens or inputs.cache_creation_tokens or reported.cache_creation_input_tokens or 0
    written = max(written, (lives.ephemeral_5m_input_tokens or 0) + written_1h)
    sounds, cached_sounds = inputs.audio_tokens or 0, (inputs.cached_tokens_details or _NO_CACHED).audio_tokens or 0
    beside = total - prompt - completion
    if cached + written and (cached + written > prompt or beside == cached + written):
        prompt += cached + written  # counted beside the prompt, as Anthropic's own API does
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=max(completion, total - prompt),  # thoughts that only the total counts
        cached_tokens=cached,
        cache_write_tokens=written - written_1h,
        cache_write_1h_tokens=written_1h,
        # sounds that the rest of the prompt has no room for were cached
        cached_audio_tokens=max(cached_sounds, cached + written + sounds - prompt),
        audio_prompt_tokens=sounds,
        image_prompt_tokens=inputs.image_tokens or 0,
        reasoning_tokens=outputs.reasoning_tokens or 0,
        audio_completion_tokens=outputs.audio_tokens or 0,
        image_completion_tokens=outputs.image_tokens or 0,
        tool_calls=tools.web_search_requests or inputs.web_search_requests or 0,
        rounds=reported.rounds or 0,
        provider_cost_microusd=None if reported.cost is None else math.ceil(round(reported.cost * 1e6, 3)),
    )
    return usage.within(TOKENS_MAX, TOKENS_MAX)


def from_anthropic(given: Mapping[str, Any], rounds: int = 0) -> dict[str, Any]:
    """A chat completion's usage from Anthropic's. Its prompt includes the parts that Anthropic
    counts apart.

    Iterations other than messages, such as compactions, are billed beside the whole. `rounds`: how
    often the provider's tools made it read the prompt again.
    """
    listed = given.get("iterations")
    iterations = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []

    def count(name: str, inside: str = "") -> int:
        sums = [0, 0, 0]
        for place, one in [(0, given), *((1 + (one.get("type") != "message"), one) for one in iterations)]:
            held = one.get(inside) if inside else one
            sums[place] += (count_of(held.get(name)) if isinstance(held, Mapping) else None) or 0
        return max(sums[:2]) + sums[2]

    read, written = count("cache_read_input_tokens"), count("cache_creation_input_tokens")
    prompt, completion = count("input_tokens") + read + written, count("output_tokens")
    details: dict[str, Any] = {"cached_tokens": read, "cache_creation_tokens": written}
    if isinstance(given.get("cache_creation"), dict):
        lives = {name: count(name, "cache_creation") for name in _Lives.__struct_fields__}
        details["cache_creation_token_details"] = lives
    usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
    usage |= {"total_tokens": prompt + completion, "prompt_tokens_details": details}
    usage |= {name: given[name] for name in ("server_tool_use", "service_tier") if given.get(name)}
    rounds += len(iterations)
    return usage | ({"rounds": rounds} if rounds else {})


def renamed(usage: Mapping[str, Any]) -> dict[str, Any]:
    """A usage with OpenAI's newer names, or Anthropic's, in those of a chat completion's."""
    if "input_tokens" in usage and not _ANTHROPICS.isdisjoint(usage):
        return from_anthropic(usage)
    snakes = {_CAPITAL.sub("_", name).lower(): value for name, value in usage.items() if value}
    return {_NAMES.get(name, name): value for name, value in snakes.items()}


def tier_of(chunks: Sequence[Chunk]) -> str:
    """The tier that answered, as the provider says it last; empty if it says none.

    Sources: OpenAI's and Groq's `service_tier` of an answer, Anthropic's in its usage.
    """
    if True not in map(contains, map(_DATA_OF, chunks), _TIER):
        return ""
    for chunk in reversed(chunks):
        for data in reversed(chunk.each()) if b'"service_tier"' in chunk.data else ():
            with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
                answer = msgspec.json.decode(data, type=_Tiered)
                for part in (answer, answer.usage, answer.response):
                    if part is not None and isinstance(part.service_tier, str) and part.service_tier:
                        return part.service_tier.lower()[:100]
    return ""


def _cleaned(usage: Any) -> dict[str, Any]:
    """The readable fields of a usage. Fractions and numbers in texts are rounded up; others are
    dropped.
    """
    cleaned: dict[str, Any] = {}
    for name, value in usage.items() if isinstance(usage, dict) else ():
        if name in _PARTS:
            cleaned[name] = _cleaned(value)
        elif name == "cost":
            if (usd := _number(value)) is not None and usd <= COST_USD_MAX:
                cleaned[name] = usd
        elif (count := count_of(value)) is not None:
            cleaned[name] = count
    return cleaned


def count_of(value: Any) -> int | None:
    """A provider's count of tokens; fractions are rounded up, texts parsed. None for anything else."""
    number = _number(value)
    return None if number is None else math.ceil(min(number, TOKENS_MAX))


def _number(value: Any) -> float | None:
    """A positive number, also from a text; None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        return None
    return value
