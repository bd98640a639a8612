"""The index's bench, on few entries."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import index as bench


def test_it_measures_both_layouts_and_writes_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One namespace and many, each complete while it is small; a table and a row each."""
    assert bench.main(["--entries", "2000", "--json", str(tmp_path / "rows")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["entries"], row["namespaces"], row["lists"]) for row in rows] == [(2_000, 1, 1), (2_000, 200, 1)]
    assert all(row["recall"] == row["recall_near"] == 1.0 for row in rows)
    assert all(row["search_us_p99"] >= row["search_us_p50"] > 0 for row in rows)
    assert all(row["lookup_us_p99"] >= row["lookup_us_p50"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_it_takes_vectors_from_a_file_and_says_when_they_are_too_few(tmp_path: Path) -> None:
    """As many as there are, if that is enough to ask some of them."""
    vectors = np.random.default_rng(0).normal(size=(1_200, 32)).astype(np.float32)
    np.save(tmp_path / "some.npy", vectors)
    np.save(tmp_path / "few.npy", vectors[:900])
    assert bench.main(["--entries", "5000", "--vectors", str(tmp_path / "some.npy")]) == 0
    assert bench.main(["--vectors", str(tmp_path / "few.npy")]) == 2
