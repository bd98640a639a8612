"""The engine's bench: runs on any checkpoint, beside transformers, and writes what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import engine as bench


def test_the_bench_compares_and_writes_rows(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each system has a row per scenario with figures, and the table has their ratio."""
    scenarios = (bench.Scenario("p", bench.PREFILL, 1, 40, 1), bench.Scenario("d", bench.DECODE, 4, 8, 12, shared=8))
    monkeypatch.setattr(bench, "SCENARIOS", scenarios)
    options = ["--model", str(checkpoint("qwen3")), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    assert bench.main([*options, "--repeats", "1", "--json", str(tmp_path / "rows")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["system"], row["scenario"]) for row in rows] == [
        (system, scenario) for scenario in ("p", "d") for system in ("sameway", "transformers")
    ]
    assert all(row["prefill_tokens_per_s"] > 0 and row["ttft_ms"] > 0 and row["cpu_s"] > 0 for row in rows)
    assert all(row["decode_tokens_per_s"] > 0 for row in rows if row["scenario"] == "d")
    assert capsys.readouterr().out.count("x") >= 2


def test_the_bench_states_the_loss_of_quality(
    checkpoint: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference agrees with itself, and every other way has its figures or the reason why it has none."""
    model = str(checkpoint("llama-wide"))
    print(bench.compare(model, 1, 2, 32))
    lines = capsys.readouterr().out.splitlines()
    (reference, *others) = [line for line in lines if "%" in line or "needs" in line]
    assert reference.split()[-2:] == ["0.00%", "100.0%"]
    assert len(others) == 4


def test_the_bench_names_a_model_it_cannot_load(tmp_path: Path) -> None:
    """A wrong model is a message and an exit status."""
    assert bench.main(["--model", str(tmp_path / "absent")]) == 2
