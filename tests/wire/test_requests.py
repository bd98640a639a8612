"""What a client reads about a field that no request may have so."""

import pytest

from gateway.api.responses import ResponseRequest
from gateway.journey.turn import CacheFields
from gateway.wire.errors import BadRequest
from gateway.wire.requests import convert


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
