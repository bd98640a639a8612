"""The dashboard has words for every value that it may show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

import pytest

from cache import MissReason
from cache.verdicts import Source
from gateway.admin.html import Pages
from gateway.journey.semantic import OBSERVED
from gateway.settings import DeploymentSettings


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("backends", get_args(DeploymentSettings.model_fields["backend"].annotation)),
        ("reasons", [*(reason.value for reason in MissReason), OBSERVED]),
        ("sources", [source.value for source in Source]),
    ],
)
def test_each_value_has_its_words(table: str, values: Iterable[str]) -> None:
    """A new kind of backend, reason or source of a verdict has a row in parts.html."""
    pages = Pages(lambda: 0.0, "")
    words: dict[str, str] = getattr(pages.templates.get_template("parts.html").module, table)
    assert set(values) <= words.keys()
