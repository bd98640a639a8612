"""One form for durations, wherever a person reads them."""

from __future__ import annotations

import pytest

from policies.durations import duration_ms, duration_s


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 ms"),
        (0.0, "0 ms"),
        (0.000_000_01, "0 ms"),
        (0.000_42, "0.42 ms"),
        (0.0042, "4.2 ms"),
        (0.004, "4 ms"),
        (0.250, "250 ms"),
        (0.99951, "1 s"),
        (1.34, "1.3 s"),
        (5.0, "5 s"),
        (9.96, "10 s"),
        (59.6, "1 min"),
        (250.0, "4 min 10 s"),
        (11_520.0, "3 h 12 min"),
        (86_405.0, "1 d"),
        (742_400.0, "8 d 14 h"),
        (9 * 86_400.0, "9 d"),
    ],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    """From microseconds to days; one unit alone is the start of the same text."""
    assert duration_s(seconds) == text
    assert duration_ms(seconds * 1_000) == text
    assert text.startswith(duration_s(seconds, 1))
