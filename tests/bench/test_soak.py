"""The soak's bench, for a few seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import soak as bench


@pytest.mark.long
def test_a_short_soak_has_every_act_and_no_failure(tmp_path: Path) -> None:
    """Requests of each kind succeed or are left, the operator's acts too, the books agree, and each process is read."""
    bench.main(
        ["--minutes", "0.09", "--rate", "20", "--workers", "1", "--no-semantic", "--json", str(tmp_path / "rows.json")]
    )
    figures = json.loads((tmp_path / "rows.json").read_text())
    assert figures["failures"] == []
    assert {"miss", "hit", "stream", "left waiting", "left streaming"} < figures["ends"].keys()
    assert {"reload", "rotation", "import", "purge"} < figures["ends"].keys()
    assert figures["ends"]["hit"]["exact"] > 0
    assert figures["books"]["is_exact"]
    read = {row["who"] for row in figures["rows"] if row["what"] == "MB"}
    assert {"supervisor", "worker 1", "redis", "redis data"} <= read


def test_growth_is_told_apart_from_a_warm_up() -> None:
    """What fills at first and then stays is good; what grows by more than its limit after the warm-up is not."""
    times = [float(second) for second in range(0, 600, 10)]
    fills = [(at, 100.0 + min(at, 150.0)) for at in times]
    leaks = [(at, 100.0 + at / 10.0 + at % 20.0) for at in times]
    rows = {row["who"]: row for row in bench.growth({("fills", "MB"): fills, ("leaks", "MB"): leaks}, 200.0)}
    assert rows["fills"]["is_good"]
    assert rows["fills"]["an_hour"] == 0.0
    assert rows["fills"]["an_hour_in_all"] > 0.0
    assert not rows["leaks"]["is_good"]
    assert 350 < rows["leaks"]["an_hour"] < 370
