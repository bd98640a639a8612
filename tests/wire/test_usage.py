"""Usages as providers report them, read and priced to the µUSD."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.backends.anthropic.answer import MessageReader
from gateway.deployments.build import describe
from gateway.settings import DeploymentSettings
from gateway.wire.chunks import read
from gateway.wire.plain import chunk_of
from gateway.wire.usage import usage_of
from policies import Usage
from policies.usage import PARTS


def of(usage: Any) -> Usage | None:
    return usage_of(json.dumps(usage).encode())


OPENAI = {
    "prompt_tokens": 5_000,
    "completion_tokens": 800,
    "total_tokens": 5_800,
    "prompt_tokens_details": {"cached_tokens": 1_024, "cache_write_tokens": 2_048, "audio_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 512, "audio_tokens": 0, "rejected_prediction_tokens": 0},
}
ANTHROPIC = {  # as litellm gives it
    "prompt_tokens": 10_021,
    "completion_tokens": 300,
    "total_tokens": 10_321,
    "prompt_tokens_details": {
        "cached_tokens": 4_000,
        "cache_creation_tokens": 6_000,
        "cache_creation_token_details": {"ephemeral_5m_input_tokens": 5_000, "ephemeral_1h_input_tokens": 1_000},
    },
    "cache_creation_input_tokens": 6_000,
    "cache_read_input_tokens": 4_000,
    "server_tool_use": {"web_search_requests": 2},
}
GEMINI = {"prompt_tokens": 1_000, "completion_tokens": 200, "total_tokens": 1_900}
DEEPSEEK = {
    "prompt_tokens": 3_000,
    "completion_tokens": 50,
    "total_tokens": 3_050,
    "prompt_cache_hit_tokens": 2_560,
    "prompt_cache_miss_tokens": 440,
}
BEDROCK = {
    "prompt_tokens": 2_100,
    "completion_tokens": 10,
    "total_tokens": 2_110,
    "cache_creation_input_tokens": 2_000,
    "cache_read_input_tokens": 0,
}
OPENROUTER = {
    "prompt_tokens": 900,
    "completion_tokens": 100,
    "total_tokens": 1_000,
    "cost": 0.0042,
    "prompt_tokens_details": {"cached_tokens": 500, "cache_write_tokens": 300},
}
AUDIO = {
    "prompt_tokens": 100,
    "completion_tokens": 60,
    "prompt_tokens_details": {"audio_tokens": 90},
    "completion_tokens_details": {"audio_tokens": 50},
}


@pytest.mark.parametrize(
    ("backend", "model", "usage", "microusd"),
    [
        # 1,928 x 4 + 1,024 x 0.4 + 2,048 x 5 + 800 x 20 USD a million: 34,361.6
        ("openai", "gpt-5.6", OPENAI, 34_362),
        # 21 x 3 + 4,000 x 0.3 + 5,000 x 3.75 + 1,000 x 6 + 300 x 15, and 2 searches of 0.01 USD
        ("litellm", "anthropic/claude-sonnet-4-5", ANTHROPIC, 63 + 1_200 + 18_750 + 6_000 + 4_500 + 20_000),
        # 1,000 x 0.3 + 900 x 2.5: 700 thoughts are in the total alone
        ("litellm", "gemini/gemini-2.5-flash", GEMINI, 300 + 2_250),
        # 440 x 0.28 + 2,560 x 0.028 + 50 x 0.42: 215.88
        ("litellm", "deepseek/deepseek-chat", DEEPSEEK, 216),
        # 100 x 3.3 + 2,000 x 4.125 + 10 x 16.5
        ("litellm", "bedrock/us.anthropic.claude-sonnet-4-5-20250929-v1:0", BEDROCK, 330 + 8_250 + 165),
        # the table has no price of writing for this name: 1.25 of 3; 100 x 3 + 500 x 3 + 300 x 3.75 + 100 x 15
        ("openai", "anthropic/claude-unheard-of", OPENROUTER, 300 + 1_500 + 1_125 + 1_500),
    ],
)
def test_a_recorded_usage_is_priced_to_the_microusd(
    backend: str, model: str, usage: dict[str, Any], microusd: int
) -> None:
    """Whole and streamed, each kind of token has its own price, as the provider's invoice has it."""
    unheard = {"price": {"input_usd_per_mtok": 3, "output_usd_per_mtok": 15}} if "unheard" in model else {}
    settings = {"backend": backend, "model": model, "base_url": "https://api.openai.com/v1", **unheard}
    price = describe(DeploymentSettings.model_validate(settings)).price
    for data in ({"choices": [], "usage": usage}, {"choices": [{"index": 0, "message": {}}], "usage": usage}):
        found = read(json.dumps(data).encode()).usage
        assert found is not None
        assert price.cost(found) == microusd


def test_sounds_are_counted_apart() -> None:
    """Audio tokens are parts of the prompt and of the completion."""
    assert of(AUDIO) == Usage(100, 60, audio_prompt_tokens=90, audio_completion_tokens=50)


def test_a_cache_counted_beside_the_prompt_is_added_to_it() -> None:
    """Some servers leave cached tokens out of the prompt's; the total shows it, or that they are more."""
    beside = {"prompt_tokens": 20, "completion_tokens": 5, "cache_read_input_tokens": 400}
    assert of(beside) == Usage(420, 5, cached_tokens=400)
    assert of({**beside, "prompt_tokens": 500, "total_tokens": 905}) == Usage(900, 5, cached_tokens=400)
    assert of({**beside, "prompt_tokens": 500, "total_tokens": 505}) == Usage(500, 5, cached_tokens=400)


@pytest.mark.parametrize(
    "usage",
    [
        "null",
        '"many"',
        "[]",
        "{}",
        "1e400",
        '{"prompt_tokens":1e400,"completion_tokens":1}',
        '{"prompt_tokens":-3}',
        "{",
    ],
)
def test_a_usage_that_cannot_be_read_is_none(usage: str) -> None:
    """It is estimated then, and the answer around it is read."""
    assert usage_of(usage.encode()) is None
    if usage != "{":
        assert read(f'{{"choices":[{{"index":0,"delta":{{"content":"x"}}}}],"usage":{usage}}}'.encode()).has_content


@pytest.mark.parametrize("count", ["7", "7.0", '"7"', "6.5"])
def test_counts_in_other_spellings_are_read(count: str) -> None:
    """A fraction is rounded up, and a text is a number."""
    found = usage_of(f'{{"prompt_tokens":{count},"completion_tokens":2}}'.encode())
    assert found == Usage(7, 2)


_numbers = st.none() | st.booleans() | st.integers(-10, 10**20) | st.floats() | st.text(max_size=3)
_NAMES = """
    prompt_tokens completion_tokens total_tokens cached_tokens cache_read_input_tokens cache_creation_input_tokens
    cache_write_tokens audio_tokens image_tokens reasoning_tokens ephemeral_1h_input_tokens web_search_requests
    prompt_tokens_details completion_tokens_details cache_creation_token_details server_tool_use
"""
_names = st.sampled_from(_NAMES.split())
_usages = st.recursive(st.dictionaries(_names, _numbers), lambda inner: st.dictionaries(_names, _numbers | inner))


@given(_usages, st.integers(0, 10**6), st.integers(0, 10**6))
def test_whatever_a_server_claims_parts_fit_their_wholes(usage: dict[str, Any], prompt: int, completion: int) -> None:
    """No claim is negative or counted twice, and a bound holds for all of them."""
    found = usage_of(msgspec.json.encode(usage))
    for one in (found, found and found.within(prompt, completion)):
        if one is not None:
            assert one.is_sound
            assert all(
                sum(getattr(one, part) for part in parts) <= getattr(one, whole) for whole, parts in PARTS.items()
            )
    if found is not None:
        assert found.within(prompt, completion).prompt_tokens <= prompt
        assert found.within(prompt, completion).completion_tokens <= completion


@pytest.mark.parametrize(
    ("cost", "microusd"),
    [
        ("0.0042", 4200),
        ("0", 0),
        ("1e-7", 1),
        ("-1", None),
        ('"0.5"', 500_000),
        ("1e30", None),
        ("[]", None),
        ("null", None),
    ],
)
def test_the_providers_own_cost_is_kept(cost: str, microusd: int | None) -> None:
    """OpenRouter's, in USD; one that cannot be is left out, and the tokens are read."""
    found = usage_of(b'{"prompt_tokens":9,"completion_tokens":1,"cost":%b}' % cost.encode())
    assert found == Usage(9, 1, provider_cost_microusd=microusd)


@pytest.mark.parametrize("odd", [b'"data": {"a": 1}', b'"message": "done"', b'"created": "today"', b'"meta": []'])
def test_other_fields_of_an_answer_cost_no_count(odd: bytes) -> None:
    """A provider's field of a known name and another shape leaves the tokens that the answer reports."""
    usage = chunk_of(b'{%b, "usage": {"input_tokens": 7, "output_tokens": 2}}' % odd).usage
    assert usage == Usage(7, 2)


_COMPACTED = {
    "input_tokens": 10,
    "output_tokens": 5,
    "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 40},
    "cache_creation_input_tokens": 40,
    "iterations": [
        {"type": "compaction", "input_tokens": 180_000, "output_tokens": 3_500, "cache_read_input_tokens": 70},
        {"type": "message", "input_tokens": 10, "output_tokens": 5, "cache_creation_input_tokens": 40},
        {"type": "compaction", "input_tokens": 7, "cache_creation": {"ephemeral_1h_input_tokens": 2}},
        "odd",
        {"type": "compaction", "input_tokens": "many", "cache_creation": 3},
    ],
}


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_anthropic_bills_beside_its_count_is_counted(is_stream: bool) -> None:
    """A compaction reads the whole prompt before the message does, and only the iterations tell it."""
    searched: list[dict[str, Any]] = [{"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}}]
    searched += [{"type": "web_search_tool_result", "tool_use_id": "s", "content": []}, {"type": "text", "text": "x"}]
    message = {"type": "message", "content": searched, "stop_reason": "end_turn", "usage": _COMPACTED}
    reader = MessageReader(0)
    if is_stream:
        early = {"type": "message_start", "message": {**message, "usage": {"input_tokens": 10, "output_tokens": 1}}}
        events = [early]
        for index, block in enumerate(searched):
            events.append({"type": "content_block_start", "index": index, "content_block": block})
            events.append({"type": "content_block_stop", "index": index})
        events += [{"type": "message_delta", "delta": message, "usage": _COMPACTED}, {"type": "message_stop"}]
        chunks = reader.chunks(map(msgspec.json.encode, events))
    else:
        chunks = reader.whole(msgspec.json.encode(message))
    found = read(chunks[-2]).usage
    assert found is not None
    assert found.rounds == 4 + 2
    assert msgspec.structs.replace(found, rounds=0) == Usage(
        10 + 40 + 180_000 + 70 + 7, 5 + 3_500, cached_tokens=70, cache_write_1h_tokens=42
    )


@pytest.mark.parametrize(
    ("body", "usage"),
    [
        ({"usage": {"type": "duration", "seconds": 36_000}}, Usage(0, 0, units=36_000)),
        ({"text": "x", "duration": "8.47"}, Usage(0, 0, units=9)),
        ({"results": [], "meta": {"billed_units": {"search_units": 80}}}, Usage(0, 0, units=80)),
        (
            {"results": [], "meta": {"tokens": {"input_tokens": 9}, "billed_units": {"search_units": 3.0}}},
            Usage(9, 0, units=3),
        ),
        ({"results": [], "meta": {"billed_units": {"search_units": "odd"}}}, None),
        ({"created": 1, "data": [{"url": "u"}, {"url": "u"}]}, Usage(0, 0, units=2)),
        ({"created": 1, "data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 4}}, Usage(4, 0)),
        (
            {"usage": {"input_tokens": 100, "output_tokens": 5, "cache_read_input_tokens": 40}},
            Usage(140, 5, cached_tokens=40),
        ),
        (
            {
                "output": [
                    {"type": "reasoning"},
                    {"type": "mcp_call"},
                    {"type": "web_search_call"},
                    {"type": "message"},
                ],
                "usage": {"input_tokens": 100, "output_tokens": 5},
            },
            Usage(100, 5, tool_calls=1, rounds=3),
        ),
    ],
)
def test_a_plain_answer_tells_its_units_and_rounds(body: dict[str, Any], usage: Usage | None) -> None:
    """Seconds, searches and images beside or instead of tokens, and how often the prompt was read again."""
    assert chunk_of(json.dumps(body).encode()).usage == usage
