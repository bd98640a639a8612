"""What a client reads about a field that no request may have so."""

import pytest

from gateway.api.responses import ResponseRequest
from gateway.journey.turn import CacheFields
from gateway.wire.errors import BadRequest
from gateway.wire.plain import EmbeddingsRequest
from gateway.wire.requests import CompletionRequest, convert


@pytest.mark.parametrize(
    ("body", "shape", "expected"),
    [
        ({"verify": "no"}, CacheFields, "Invalid verify: expected one of before, after, observe, off, got 'no'"),
        ({"truncation": "no"}, ResponseRequest, "Invalid truncation: expected one of auto, disabled, got 'no'"),
        ({"include": ["no"]}, ResponseRequest, "Invalid include[0]: expected one of code_interpreter_call.outputs, "),
    ],
)
def test_a_wrong_choice_is_told_the_right_ones(body: dict[str, object], shape: type, expected: str) -> None:
    """Of an enum, a literal and a list of literals."""
    with pytest.raises(BadRequest) as refused:
        convert(body, shape)
    assert refused.value.message.startswith(expected)
    assert refused.value.error_code == "invalid_value"


@pytest.mark.parametrize(("given", "read"), [(8.0, 8), (1e3, 1_000), (-3.0, -3)])
def test_a_whole_number_with_a_point_is_an_integer(given: float, read: int) -> None:
    """As JSON Schema says; also within a list, and in what is sent on."""
    body = {"model": "m", "input": ["a"], "dimensions": given, "encoding_format": None}
    if given > 0:
        assert convert(body, EmbeddingsRequest).dimensions == body["dimensions"] == read
    tokens = {"model": "m", "prompt": [1, abs(given)]}
    assert convert(tokens, CompletionRequest).prompt == tokens["prompt"] == [1, abs(read)]


@pytest.mark.parametrize("given", [8.5, "8", 1e400])
def test_another_number_is_none(given: object) -> None:
    """A fraction, a text, and what is beyond all numbers."""
    with pytest.raises(BadRequest, match=r"Invalid dimensions: Expected `integer \| null`"):
        convert({"model": "m", "input": "a", "dimensions": given}, EmbeddingsRequest)
