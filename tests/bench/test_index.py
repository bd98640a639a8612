"""The index's bench, on few entries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import index as bench


def test_it_measures_both_layouts_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One namespace and many, each complete while it is small, on as many vectors of a file as there are; a table and a row each."""
    np.save(tmp_path / "some.npy", bench.made_vectors(1_100))
    arguments = ["--entries", "5000", "--vectors", str(tmp_path / "some.npy"), "--json", str(tmp_path / "rows")]
    assert bench.main(arguments) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["entries"], row["namespaces"], row["lists"]) for row in rows] == [(600, 1, 1), (600, 60, 1)]
    assert all(row["recall"] == row["recall_near"] == 1.0 for row in rows)
    assert all(row["search_us_p99"] >= row["search_us_p50"] > 0 for row in rows)
    assert all(row["lookup_us_p99"] >= row["lookup_us_p50"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_it_says_when_vectors_are_too_few(tmp_path: Path) -> None:
    """Too few to ask some of them."""
    np.save(tmp_path / "few.npy", bench.made_vectors(900))
    assert bench.main(["--vectors", str(tmp_path / "few.npy")]) == 2
