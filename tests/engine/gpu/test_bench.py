"""What a person with a GPU runs, as far as a machine without one can tell."""

from __future__ import annotations

import pytest
import torch

from bench import cuda
from local_engine.gpu import rows


@pytest.fixture(autouse=True)
def _on_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEWAY_TRITON", "1")  # the bench sets it, and it must not outlive the test


def test_the_bench_compares_and_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that agree pass; one that does not is named, and the exit status tells; so does a device that is not there."""
    assert cuda.main(["--device", "cpu", "--shape", "135m"]) == 0
    assert "as torch" in capsys.readouterr().out
    monkeypatch.setattr(rows, "gate", lambda gate_up, activation: gate_up[:, : gate_up.shape[1] // 2])
    assert cuda.main(["--device", "cpu", "--shape", "135m"]) == 1
    assert "gate: AssertionError" in capsys.readouterr().out
    assert cuda.main(["--device", "cuda:99"]) == 2


def test_cases_can_be_run() -> None:
    """The timed cases are well formed: a norm and a decode run in the interpreter."""
    device = torch.device("cpu")
    for case in (next(cuda.row_cases(device)), next(cuda.attention_cases(device))):
        assert case.moved_bytes > 0
        case.run()
