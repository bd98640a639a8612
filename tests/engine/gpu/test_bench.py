"""What a person with a GPU runs, as far as a machine without one can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import cuda
from bench.cuda import Given, Row
from bench.engines import kernels
from local_engine.kernels.gpu import rows

TINY = Given("cpu", "tiny")


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWAY_TRITON", "1")  # the bench sets it, and it must not outlive the test


@pytest.mark.long
def test_phases_that_fail_are_named_and_the_others_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Real processes: one on a device that is not there fails, one has no time; rows that came are in the file."""
    path = tmp_path / "rows"
    with path.open("w") as file:
        assert cuda.run_all(["machine", "kernels"], Given("cuda:99", "tiny"), 120.0, file) == 1
        assert cuda.run_all(["machine"], TINY, 120.0, file) == 0
        assert cuda.run_all(["machine"], TINY, 1.0, file) == 1
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["phase"] for row in found if row["figure"] == "failed"] == ["machine", "kernels", "machine"]
    assert found[-1]["note"] == "no time was left"
    assert any(row["figure"] == "GB/s" and row["value"] > 0 for row in found)
    assert "failed phases: machine, kernels" in capsys.readouterr().out
    assert cuda.main(["--only", "engines"]) == 2


def test_a_phase_that_hangs_is_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Its limit is the process's end, and its name is told."""
    assert (cuda.run_phase("machine", TINY, 0.05, lambda row: None) or "").startswith("took more than")


def test_a_wrong_kernel_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the shape, the type and what differs; the others are said to be right."""
    found: list[Row] = []
    monkeypatch.setattr(rows, "gate", lambda gate_up, activation: gate_up[:, : gate_up.shape[1] // 2])
    cuda.kernels(TINY, found.append)
    assert [(row.name, row.value) for row in found] == [("135m float32 gate", 0.0)]
    assert "AssertionError" in found[0].note


@pytest.mark.long
@pytest.mark.parametrize("phase", ["engine", "transformers"])
def test_systems_are_measured_beside_the_floor_and_each_other(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model gives a row for each load, and rows give the ratios that are asked for."""
    found: list[Row] = []
    some = {"engine": ("decode-1", "apart-1000", "shared-1000"), "transformers": ("decode-1",)}[phase]
    monkeypatch.setitem(cuda.SCENARIOS, phase, tuple(s for s in cuda.SCENARIOS[phase] if s.name in some))
    getattr(cuda, phase)(TINY, found.append)
    measured = [row for row in found if row.name in some]
    assert [row.name for row in measured] == list(some)
    assert all((row.value or 0) > 0 and not row.note.startswith("error") for row in measured)
    if phase == "engine":
        assert all((row.floor or 0) > (row.value or 0) > 0 for row in measured)
        assert [row.name for row in cuda.compared(found)] == ["engine shared-1000 / engine apart-1000"]
        assert "MISSED" in str(measured[0])


def test_cases_can_be_run() -> None:
    """The timed cases are well formed: a norm and a decode run in the interpreter."""
    device = torch.device("cpu")
    for case in (next(kernels.row_cases(device)), next(kernels.attention_cases(device))):
        assert case.moved_bytes > 0
        case.run()
