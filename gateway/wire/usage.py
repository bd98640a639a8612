"""Reads the tokens of an answer as its provider reports them.

Sources: OpenAI's API reference ("The chat completion object", `usage`), DeepSeek's and OpenRouter's
(`prompt_cache_hit_tokens`, `cache_write_tokens`), litellm's form of Anthropic's and Bedrock's
(`cache_creation_input_tokens`, `cache_creation_token_details`, `server_tool_use`), and Gemini's
OpenAI-compatible endpoint, which counts thoughts in `total_tokens` alone. Knows no prices.
Invariants: a usage that cannot be read is no usage, and costs no answer; no part of a prompt or of
a completion is counted twice, and the parts are at most the whole.
"""

import math
from typing import Any

import msgspec

from gateway.wire.types import Usage

# a larger claim is the server's error; sums of claims must not overflow
TOKENS_MAX = 1_000_000_000


def usage_of(raw: bytes) -> Usage | None:
    """The tokens in the JSON of a `usage`; None where it has none that can be read."""
    try:
        given = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    if not isinstance(given, dict):
        return None
    prompt, completion, total = (_count(given, f"{name}_tokens") for name in ("prompt", "completion", "total"))
    if not prompt and not completion:
        return None
    inputs, outputs = _part(given, "prompt_tokens_details"), _part(given, "completion_tokens_details")
    cached = (
        _count(inputs, "cached_tokens")
        or _count(given, "cache_read_input_tokens")
        or _count(given, "prompt_cache_hit_tokens")
    )
    lives = _part(inputs, "cache_creation_token_details") or _part(given, "cache_creation")
    written = (
        _count(inputs, "cache_write_tokens")
        or _count(inputs, "cache_creation_tokens")
        or _count(given, "cache_creation_input_tokens")
    )
    written_1h = _count(lives, "ephemeral_1h_input_tokens")
    written = max(written, _count(lives, "ephemeral_5m_input_tokens") + written_1h)
    beside = total - prompt - completion
    if cached + written and (cached + written > prompt or beside == cached + written):
        prompt += cached + written  # counted beside the prompt, as Anthropic's own API does
    completion = max(completion, total - prompt)  # thoughts that only the total counts
    tools = _part(given, "server_tool_use")
    usage = Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=cached,
        cache_write_tokens=written - written_1h,
        cache_write_1h_tokens=written_1h,
        audio_prompt_tokens=_count(inputs, "audio_tokens"),
        image_prompt_tokens=_count(inputs, "image_tokens"),
        reasoning_tokens=_count(outputs, "reasoning_tokens"),
        audio_completion_tokens=_count(outputs, "audio_tokens"),
        image_completion_tokens=_count(outputs, "image_tokens"),
        tool_calls=_count(tools, "web_search_requests") or _count(inputs, "web_search_requests"),
    )
    return usage.within(TOKENS_MAX, TOKENS_MAX)


def _part(given: dict[str, Any], name: str) -> dict[str, Any]:
    part = given.get(name)
    return part if isinstance(part, dict) else {}


def _count(given: dict[str, Any], name: str) -> int:
    """A count, also as a fraction or a text, rounded up; 0 for whatever is none."""
    count = given.get(name)
    if isinstance(count, str):
        try:
            count = float(count)
        except ValueError:
            return 0
    if not isinstance(count, int | float) or isinstance(count, bool) or not 0 < count < math.inf:
        return 0
    return math.ceil(min(count, 10**18))
