"""What users and operators see is written down in `tests/golden`; a change of it is a decision, not
an accident.
"""

from __future__ import annotations

import pytest

from tests.golden.files import changes
from tests.golden.source import COLLECTORS


@pytest.mark.parametrize("name", COLLECTORS)
def test_names_stay(name: str) -> None:
    """Settings, commands, metrics, events, errors, tables, formats, headers and routes are called
    as they were.
    """
    assert (changed := changes(name, COLLECTORS[name]())) == "", changed
