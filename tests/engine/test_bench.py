"""The engine's bench: runs on any checkpoint, beside transformers and the machine's floor, and writes what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from bench import engine as bench
from bench.engines import loads
from bench.engines.files import copy_file, shape_file
from bench.engines.floors import Ceilings, Floor
from bench.engines.loads import Request, Run, Scenario, summarise
from bench.engines.quality import compare, read
from bench.engines.reorder import reordered
from bench.engines.soak import Findings, Sample, soak
from local_engine.checkpoints.open import open_checkpoint
from local_engine.config import EngineConfig
from local_engine.weights.quantised import Quantised


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the smallest random shape."""
    return shape_file(tmp_path_factory.mktemp("models"), "tiny")


def test_the_bench_compares_and_writes_rows(
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Each system has a row per scenario with figures and the floor's, and the table says who is ahead."""
    scenarios = (
        Scenario("p", loads.PREFILL, 1, 40, 1),
        Scenario("d", loads.DECODE, 4, 8, 12, shared=8, is_warm=True),
        Scenario("o", loads.TOTAL, 5, 40, 12, is_open=True),
    )
    monkeypatch.setattr(loads, "SCENARIOS", scenarios)
    options = ["--model", str(checkpoint("qwen3")), "--dtype", "float32", "--device", "cpu", "--threads", "1"]
    assert bench.main([*options, "--repeats", "1", "--rate", "20", "--json", str(tmp_path / "rows")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [(row["system"], row["scenario"]) for row in rows] == [
        (system, scenario) for scenario in ("p", "d", "o") for system in ("sameway", "transformers")
    ]
    assert all(
        row["value"] > 0 and 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] and row["cpu_ms_per_token"] > 0
        for row in rows
    )
    assert all(0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"] for row in rows if row["scenario"] != "p")
    assert all((row["floor_value"] or 0) > 0 for row in rows if row["scenario"] != "o")
    table = capsys.readouterr().out
    assert "ceilings: " in table
    assert table.count("| transformers ") == 3


def test_times_are_counted_from_when_a_request_was_due() -> None:
    """A request that came late and waited is charged for its wait, and the pace is that of all decoding together."""

    class Told:
        name, weights = "told", "f32"

    requests = [Request((1, 2), 3), Request((1,), 3, due_s=1.0)]
    marks = ((2.0, 0.5), (2.5, 0.6), (3.0, 0.7), (4.5, 0.8), (5.0, 0.9), (6.5, 1.0))
    run = Run(times_s=((2.0, 3.0, 5.0), (2.5, 4.5, 6.5)), cpu_s=1.0, marks=marks)
    row = summarise(Told(), Scenario("x", loads.DECODE, 2, 2, 3), requests, [run], threads=1)  # type: ignore[arg-type]
    assert (row.ttft_p50_ms, row.ttft_p95_ms) == (1500.0, 2000.0)
    assert (row.tpot_p50_ms, row.tpot_p99_ms) == (1500.0, 2000.0)
    assert row.value == pytest.approx(3 / 2.5)  # at 3, 4.5 and 5, within 2.5 .. 5
    assert row.cpu_ms_per_token == pytest.approx(100.0)
    short = Run(times_s=((2.0, 3.0), (2.5, 4.5, 6.5)), cpu_s=1.0)
    with pytest.raises(RuntimeError, match="2 tokens where 3"):
        summarise(Told(), Scenario("x", loads.DECODE, 2, 2, 3), requests, [short], threads=1)  # type: ignore[arg-type]


def test_a_floor_is_what_must_be_read_or_multiplied(tiny: Path) -> None:
    """One row reads every weight once; many rows multiply; what is known already is not computed."""
    config = open_checkpoint(str(tiny)).config
    weights = 4 * 128 * (12 * 32 + 3 * 256) + 128 * 1024
    reads = Floor(config, 16.0, Ceilings(1e6, 1e30, 1e30))
    assert reads.step_s(rows=1, logit_rows=1, kv_tokens=0, pairs=1) == pytest.approx(2 * weights / 1e6)
    kv_bytes = 2 * 4 * 2 * 32 * 2
    assert reads.step_s(rows=1, logit_rows=1, kv_tokens=10, pairs=1) == pytest.approx(
        (2 * weights + 10 * kv_bytes) / 1e6
    )
    multiplies = Floor(config, 16.0, Ceilings(1e30, 1e6, 1e6))
    head = 128 * 1024
    attended = 4 * 7 * 4 * 4 * 32
    assert multiplies.step_s(rows=100, logit_rows=1, kv_tokens=0, pairs=7) == pytest.approx(
        (2 * (100 * (weights - head) + head) + attended) / 1e6
    )
    cold, warm = (
        multiplies.value(Scenario("s", loads.TOTAL, 4, 10, 5, shared=100, is_warm=is_warm)) for is_warm in (False, True)
    )
    assert cold is not None
    assert warm is not None
    assert warm > cold


def test_a_file_in_another_format_holds_the_same_weights(tiny: Path, tmp_path: Path) -> None:
    """What is read back differs by the format's rounding only, and the kept form is quantised."""
    path = tmp_path / "q8.gguf"
    copy_file(tiny, path, "q8_0")
    exact = {piece.name: piece.tensor for piece in open_checkpoint(str(tiny)).weights()}
    for piece in open_checkpoint(str(path)).weights():
        before = exact.pop(piece.name)
        assert isinstance(before, torch.Tensor)
        if isinstance(piece.tensor, Quantised):
            assert (piece.tensor.dequantised() - before).abs().max() <= before.abs().max() / 127
        else:
            assert torch.equal(piece.tensor, before)
    assert not exact


def test_a_reordered_model_is_the_same_function(tiny: Path, tmp_path: Path) -> None:
    """Its log probabilities are the same but for the order of sums, and its weights lie elsewhere."""
    other = reordered(tiny, tmp_path)
    one, two = (
        read(EngineConfig(model=str(path), dtype="float32", threads=1), 1, 32, is_native=False)
        for path in (tiny, other)
    )
    assert one.logprobs == pytest.approx(two.logprobs, abs=1e-4)
    name = "model.layers.1.mlp.down_proj.weight"
    before, after = (
        next(piece.tensor for piece in open_checkpoint(str(path)).weights() if piece.name == name)
        for path in (tiny, other)
    )
    assert isinstance(before, torch.Tensor)
    assert isinstance(after, torch.Tensor)
    assert not torch.equal(before, after)
    assert torch.equal(before.flatten().sort().values, after.flatten().sort().values)


@pytest.mark.long
def test_the_bench_states_the_loss_of_quality(tiny: Path, tmp_path: Path) -> None:
    """The reference agrees with itself, and every other way has its figures or the reason why it has none."""
    tables = compare(str(tiny), tmp_path, 1, 1, 32).split("\n\n")
    for table, ways in zip(tables, (3, 9), strict=True):
        (reference, *others) = [line for line in table.splitlines() if "%" in line or "needs" in line]
        assert reference.split()[-2:] == ["0.00%", "100.0%"]
        assert len(others) == ways - 1


def test_a_short_soak_finds_nothing_wrong(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Random traffic over two real engine processes ends in answers and explained errors."""
    assert soak(str(tiny), 4.0, 1, 0) == 0, capsys.readouterr().out
    assert " answered" in capsys.readouterr().out


def test_a_soak_tells_what_grew() -> None:
    """Memory and files that grow from quiet point to quiet point are named; what stays is not."""

    def findings(mb: float, fds: int) -> list[str]:
        found = Findings()
        for index in range(9):
            found.samples.append(Sample(index, 100.0 + mb * index, 9 + fds * index, 3, 50.0, 5, index))
        found.judge_growth()
        return found.wrong

    assert findings(0.5, 0) == []
    (memory, files) = findings(10.0, 1)
    assert "rss_mb" in memory
    assert "fds" in files


def test_the_bench_names_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong model, peer or scenario is a message and an exit status."""
    assert bench.main(["--model", str(tmp_path / "absent")]) == 2
    assert bench.main(["--peers", "llama"]) == 2
    assert bench.main(["--only", "decode"]) == 2
    assert "no scenario 'decode'; there are prefill-512" in capsys.readouterr().err
