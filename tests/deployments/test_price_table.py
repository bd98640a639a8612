"""The table of prices, and newer ones that are laid over it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.cli import main
from gateway.deployments import catalog
from gateway.deployments.catalog import known, use
from gateway.deployments.price_table import read_table

MODEL = "gpt-4o-mini"
ROW = {"mode": "chat", "litellm_provider": "openai", "input_cost_per_token": 9e-6, "output_cost_per_token": 8e-6}


@pytest.fixture(autouse=True)
def packaged() -> Iterator[None]:
    """The packaged table alone, before and after."""
    yield
    use(Path("nowhere"))


def update(tmp_path: Path, table: Any) -> int:
    """`sameway prices update`; returns its exit status."""
    (tmp_path / "new.json").write_text(table if isinstance(table, str) else json.dumps(table))
    status = main(["prices", "update", str(tmp_path / "new.json"), "--data-dir", str(tmp_path / "data")])
    use(tmp_path / "data" / "prices.json")
    return status


def input_price() -> int:
    """microUSD for a million tokens."""
    row = known(MODEL)
    assert row is not None
    assert row.price is not None
    return row.price.input_microusd_per_mtok


def test_the_packaged_table_is_dated_and_says_whence() -> None:
    """It needs no litellm, and knows models of every kind."""
    table = read_table(catalog.PACKAGED)
    assert (table.date.year, "MIT" in table.source) == (2026, True)
    assert input_price() == 150_000
    assert known("text-embedding-3-small") is not None
    assert known("claude-sonnet-4-5") is not None


def test_a_newer_table_counts_for_its_models_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """litellm's file as it is: its rows come first, those of other models stay, and it is told how many changed."""
    assert update(tmp_path, {"sample_spec": {"max_tokens": "a number"}, MODEL: ROW}) == 0
    assert "1 models new, 0 changed" in capsys.readouterr().out
    assert input_price() == 9_000_000
    assert known("gpt-4o") is not None
    assert update(tmp_path, {MODEL: {**ROW, "input_cost_per_token": 7e-6}}) == 0
    assert "0 models new, 1 changed" in capsys.readouterr().out
    assert input_price() == 7_000_000


def test_an_older_table_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither over a newer update, nor over the package's own rows once that is newer."""
    old, new = (
        {"date": date, "source": "us", "models": {MODEL: {**ROW, "input_cost_per_token": usd}}}
        for date, usd in (("2020-01-01", 1e-6), ("2020-02-01", 2e-6))
    )
    assert update(tmp_path, new) == 0
    assert update(tmp_path, old) == 2
    assert "2020-02-01, and this one of 2020-01-01: nothing was changed" in capsys.readouterr().err
    assert input_price() == 150_000


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("{", "expected a table of models"),
        ([1], "expected a table of models"),
        ({"a": 1}, "expected a table of models"),
        ({MODEL: {**ROW, "output_cost_per_token": -1e-6}}, "gpt-4o-mini.output_cost_per_token: -1e-06"),
        ({MODEL: {"mode": "chat"}}, "found none"),
        ({"date": "soon", "source": "", "models": {MODEL: ROW}}, "expected a table of models"),
    ],
)
def test_a_wrong_table_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], table: Any, expected: str
) -> None:
    """Whole, with what was expected; what was there stays."""
    assert update(tmp_path, table) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "data" / "prices.json").exists()


def test_a_table_that_was_damaged_counts_no_more(tmp_path: Path) -> None:
    """The packaged one does; a gateway starts all the same."""
    (tmp_path / "prices.json").write_text("{")
    use(tmp_path / "prices.json")
    assert input_price() == 150_000
