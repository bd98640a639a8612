"""What a running gateway says and stores is called as it is written down in `tests/golden`."""

from __future__ import annotations

import pytest

from tests.golden.files import changes
from tests.golden.live import COLLECTORS


@pytest.mark.parametrize("name", COLLECTORS)
def test_a_running_gateway_says_and_stores_the_same(name: str) -> None:
    """Headers, bodies' fields, errors' words, Redis keys, log fields and the admin plane are as
    they were.
    """
    assert (changed := changes(name, COLLECTORS[name]())) == "", changed
