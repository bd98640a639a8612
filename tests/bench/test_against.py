"""`--against`: what it refuses, what it says about a spread, and that it takes both sides in turn."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.gateway import main
from bench.lab.against import Comparison, Effort, checkout_of, compare, one_core, render, verdict_of
from bench.lab.native import Stub
from bench.lab.processes import BenchError
from bench.lab.scenarios import SCENARIOS
from bench.lab.systems import Running, Setup
from bench.peers.direct import Direct


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    upstream = Stub(tmp_path)
    yield upstream
    upstream.stop()


class Named(Direct):
    """The upstream itself, whose CPU counts as a worker's; `starts` gets its name at each start."""

    def __init__(self, name: str, starts: list[str]) -> None:
        self.name = name
        self._starts = starts

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        self._starts.append(self.name)
        return replace(super().start(setup, stub, folder), roots=(stub.pid,))


def test_a_folder_that_is_not_set_up_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a folder without a gateway nor a checkout without its own interpreter is measured."""
    assert main(["--against", str(tmp_path)]) == 1
    assert "no checkout of Sameway" in capsys.readouterr().err
    (tmp_path / "gateway").mkdir()
    (tmp_path / "gateway" / "__main__.py").touch()
    with pytest.raises(BenchError, match=r"\./run setup"):
        checkout_of(tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch(mode=0o755)
    assert checkout_of(tmp_path) == (tmp_path.resolve(), str(python))


def test_scenarios_without_a_fixed_course_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A paced, an open-loop and a Zipf scenario can't be compared so; a semantic one can."""
    wanted = "miss-paced,hit-open,zipf,semantic-hit"
    assert main(["--against", str(Path(__file__).parents[2]), "--scenario", wanted]) == 1
    assert "miss-paced, hit-open, zipf:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ([0.99, 1.0, 1.01, 1.0, 1.0, 1.0, 1.3], "within 2%"),
        ([1.03, 1.04, 1.05, 1.04, 1.03, 1.04, 0.7], "more by over 2%"),
        ([0.9, 0.91, 0.92, 0.9, 0.91, 0.92, 0.9], "less by over 2%"),
        ([0.95, 0.96, 1.0, 1.0, 1.0, 1.04, 1.05], "UNDECIDED: 0.960..1.040 is too wide for a statement about 2%"),
        ([1.0, 1.0, 1.0, 1.0, 1.3], "UNDECIDED: 1.000..1.300 is too wide for a statement about 2%"),
        ([0.5, 0.6, 0.7, 0.8, 0.99, 1.0, 1.0, 1.0, 1.0, 1.0, 1.01, 1.2, 1.3, 1.4, 1.5], "within 2%"),
        ([1.0, 1.0], "UNDECIDED: 2 of at least 5 rounds"),
    ],
)
def test_a_spread_that_is_too_wide_is_said(ratios: list[float], verdict: str) -> None:
    """One round out of line on either side of seven is left out, of fifteen four; the others must agree."""
    assert verdict_of(ratios) == verdict


def test_both_sides_are_started_and_asked_in_turn(stub: Stub, tmp_path: Path) -> None:
    """The side that begins alternates, a round has its ratio, and only the measured requests count."""
    starts: list[str] = []
    scenario = next(s for s in SCENARIOS if s.name == "miss-stream")
    effort = Effort(rounds=2, starts=2, slices=1, misses=20)
    rows = compare(
        lambda start: Named(f"this{start}", starts),
        lambda start: Named(f"other{start}", starts),
        [scenario],
        4,
        effort,
        stub,
        tmp_path,
    )
    assert starts == ["this0", "other0", "other1", "this1", "other2", "this2", "this3", "other3"]
    assert [len(row.ratios) for row in rows] == [2]
    assert rows[0].requests == 80
    assert rows[0].ratio_min <= rows[0].ratio <= rows[0].ratio_max
    assert rows[0].rss_mb > 1
    assert stub.stats().requests == 2 * 2 * 2 * (20 + 256) * 2


def test_a_repeated_question_that_is_no_hit_is_an_error(stub: Stub, tmp_path: Path) -> None:
    """A cache that does not answer is not compared as if it did."""
    scenario = next(s for s in SCENARIOS if s.name == "hit-memory")
    with pytest.raises(BenchError, match="20 of 20 repeated questions reached the upstream"):
        compare(
            lambda start: Named("this", []),
            lambda start: Named("other", []),
            [scenario],
            4,
            Effort(rounds=1, starts=1, slices=1, hits=20),
            stub,
            tmp_path,
        )


def test_one_core_is_left_again() -> None:
    """Affinity and scheduling are as before afterwards."""
    cores, policy = os.sched_getaffinity(0), os.sched_getscheduler(0)
    with one_core():
        assert len(os.sched_getaffinity(0)) == 1
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
    assert (os.sched_getaffinity(0), os.sched_getscheduler(0)) == (cores, policy)


def test_the_table_names_trees_ratio_spread_and_memory() -> None:
    """A line has all that a statement about a change needs."""
    row = Comparison(
        scenario="miss",
        connections=32,
        requests=9,
        cpu_ms=0.3,
        other_cpu_ms=0.31,
        rss_mb=104.6,
        other_rss_mb=106.0,
        ratio=0.968,
        ratio_min=0.95,
        ratio_max=1.01,
        ratios=[0.968] * 7,
        verdict="within 2%",
    )
    text = render([row], "here (abc)", "there (def)")
    assert "here (abc) by there (def): medians of 7 rounds" in text
    assert "0.3000   0.3100  0.968  0.950..1.010     105 / 106  within 2%" in text
