"""The replicas' bench, on a short day."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import replicas as bench


def test_every_router_answers_the_same_day(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A row each; prefixes are found where they were sent; what a dying replica took is counted; every turn has its first token."""
    assert bench.main(["--seconds", "40", "--seeds", "1", "--json", str(tmp_path / "rows")]) in (0, 1)
    rows = {row["router"]: row for row in json.loads((tmp_path / "rows").read_text())}
    assert list(rows) == list(bench.ROUTERS)
    assert all(0 < row["ttft_ms_p50"] <= row["ttft_ms_p90"] <= row["ttft_ms_p99"] for row in rows.values())
    assert rows["product"]["prefix_share"] > rows["round robin"]["prefix_share"]
    assert rows["product"]["ttft_ms_p90"] < min(
        rows[name]["ttft_ms_p90"] for name in ("round robin", "least in flight")
    )
    assert "p90 beside the oracle's" in capsys.readouterr().out
