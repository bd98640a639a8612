"""The bench itself: its rows have the documented fields, its bodies are fair, its costs are true, it leaves nothing running."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from bench.__main__ import main as dispatch
from bench.gateway import main
from bench.lab.bytecodes import count, environ_of
from bench.lab.bytecodes import render as render_bytecodes
from bench.lab.measure import Plan, Row, measure
from bench.lab.native import Stub, build
from bench.lab.processes import BenchError, Child, Meter, answers, descendants, is_running
from bench.lab.report import render, write_json
from bench.lab.scenarios import SCENARIOS, Scenario, write_bodies
from bench.lab.systems import Running, Setup, Target, clean_environment
from bench.peers import PEERS
from bench.peers.direct import Direct
from bench.peers.sameway import Sameway

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stub(tmp_path: Path) -> Iterator[Stub]:
    upstream = Stub(tmp_path)
    yield upstream
    upstream.stop()


def documentation() -> str:
    return (ROOT / "docs" / "benchmarks.md").read_text()


def test_rows_have_the_documented_fields(stub: Stub, tmp_path: Path) -> None:
    """A measured row, written as JSON, has exactly the fields that docs/benchmarks.md lists, and a stream's all have values."""
    scenario = next(s for s in SCENARIOS if s.name == "miss-stream")
    running = Direct().start(Setup.MISS, stub, tmp_path)
    row = measure("direct", running, stub, scenario, 2, None, Plan(0.2, 0.05, 2), tmp_path)
    path = tmp_path / "rows.jsonl"
    write_json([row, row], path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 2
    section = documentation().partition("## Rows")[2].partition("\n## ")[0]
    documented = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert sorted(lines[0]) == sorted(documented)
    assert lines[0]["requests"] > 0
    assert lines[0]["errors"] == 0
    assert lines[0]["upstream_share"] == 1.0
    assert lines[0]["events_per_request"] == 65.0
    assert lines[0]["ttft_p50_ms"] <= lines[0]["p50_ms"] <= lines[0]["p99_ms"]


def test_every_scenario_is_documented() -> None:
    """docs/benchmarks.md explains each scenario by its name."""
    text = documentation()
    assert [s.name for s in SCENARIOS if f"`{s.name}`" not in text] == []


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_bodies_are_requests_and_never_an_earlier_runs(scenario: Scenario, tmp_path: Path) -> None:
    """Each line is a chat request of the scenario's size; what one repetition asks for the first time no other has asked."""
    one, other = (write_bodies(scenario, "m", salt, tmp_path) for salt in ("a", "b"))
    asked = [json.loads(line) for line in one.asked.read_text().splitlines()]
    assert all(body.get("stream", False) is scenario.is_stream and body["model"] == "m" for body in asked)
    texts = [body["messages"][-1]["content"] for body in asked]
    assert len(set(texts)) == len(texts)
    if one.first is None or one.first == one.asked:
        assert {len(text) for text in texts} == {scenario.prompt_bytes}
        assert not set(one.asked.read_text().splitlines()) & set(other.asked.read_text().splitlines())
    else:
        assert not set(texts) & {
            json.loads(line)["messages"][-1]["content"] for line in one.first.read_text().splitlines()
        }


def test_the_meter_counts_the_whole_tree(tmp_path: Path) -> None:
    """CPU burnt by a grandchild is the tree's, under the role of its command line; what was used before does not count."""
    burn = "import time\nwhile time.process_time() < {}: pass\nprint('done', flush=True)\ntime.sleep(60)"
    script = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn.format(0.3)!r}, 'burner'])"
    child = Child([sys.executable, "-c", script, "parent"], tmp_path / "log", clean_environment(), tmp_path)
    try:
        meter = Meter([child.pid], lambda command: "burner" if command.rstrip().endswith("burner") else "parent")
        child.wait_until(lambda: "done" in child.log_tail(), 30.0)
        cost = meter.read()
        assert cost.cpu_s["burner"] >= 0.29
        assert cost.peak_rss_mb["burner"] > 1
        assert len(meter.pids("burner")) == 1
        meter.reset()
        assert meter.read().cpu_s["burner"] < 0.29
    finally:
        child.stop()


def test_stopping_a_child_ends_what_it_started(tmp_path: Path) -> None:
    """A grandchild that ignores SIGTERM is gone after `stop`."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    script = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {stubborn!r}])"
    child = Child([sys.executable, "-c", script], tmp_path / "log", clean_environment(), tmp_path)
    child.wait_until(lambda: "up" in child.log_tail(), 30.0)
    below = descendants(child.pid)
    child.stop()
    assert below
    assert not any(map(is_running, below))


def test_the_table_says_ratios_floors_and_absence() -> None:
    """Sameway's advantage stands in the peers' lines, the floor beside what was reached, and the absent by name and reason."""
    row = {field.name: None for field in msgspec.structs.fields(Row) if field.required}
    common = {"scenario": "miss", "connections": 32, "requests": 9, "errors": 0}
    own = Row(**{**row, **common, "system": "sameway", "requests_per_s": 3000.0, "cpu_ms_per_request": 0.3})
    peer = Row(**{**row, **common, "system": "litellm", "requests_per_s": 125.0, "cpu_ms_per_request": 7.5})
    text = render([own, peer], ["portkey: no node"])
    assert re.search(r"^litellm .* 24x req/s 25x CPU$", text, re.MULTILINE)
    assert "miss: 24.0 times LiteLLM's requests/s; at least 10: reached" in text
    assert "absent: portkey: no node" in text


def test_wrong_names_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown bench, scenario or peer is an error that names the known ones."""
    assert dispatch(["nothing"]) == 2
    for flags in (["--scenario", "nothing"], ["--peers", "nothing"]):
        with pytest.raises(SystemExit) as stop:
            main(flags)
        assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "gateway" in said
    assert "hit-memory" in said
    assert "litellm" in said


def test_systems_say_what_they_lack() -> None:
    """Every peer either offers a setup or says why not, and Sameway lacks none."""
    for setup in Setup:
        assert Sameway().lacks(setup) is None
        for peer in PEERS.values():
            reason = peer.lacks(setup)
            assert reason is None or len(reason) > 10
            assert peer.configuration(setup)


def test_an_interrupted_bench_leaves_nothing_running() -> None:
    """Ctrl-C in the middle of a measurement ends the upstream and the load tool, and prints what there is."""
    for name in ("stub", "load"):  # their compiler is no part of a measurement
        build(name)
    command = [sys.executable, "-m", "bench", "gateway", "--without-sameway", "--scenario", "miss", "--duration", "60"]
    bench = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 60.0
    while len(below := descendants(bench.pid)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    bench.send_signal(signal.SIGINT)
    said, _ = bench.communicate(timeout=50.0)
    assert bench.returncode == 130
    assert "absent: litellm: not asked for" in said
    assert len(below) >= 2
    assert not any(map(is_running, below))


def test_a_system_that_fails_is_named_and_the_others_go_on(stub: Stub, tmp_path: Path) -> None:
    """No request succeeding is an error that carries the first failure's words."""
    nowhere = Running(stub.port, (), lambda: None, "", Target("m", "/nowhere"), Target("m", "/nowhere"))
    with pytest.raises(BenchError, match=r"no request succeeded.*404"):
        measure("it", nowhere, stub, SCENARIOS[0], 1, None, Plan(0.05, 0.0, 1), tmp_path)
    assert answers(f"http://127.0.0.1:{stub.port}/stats")


def test_bytecodes_are_counted_by_function(stub: Stub, tmp_path: Path) -> None:
    """A hit from memory executes the same functions each time, and nothing of a generation."""
    scenario = next(s for s in SCENARIOS if s.name == "hit-memory")
    running = Sameway(environ=environ_of(tmp_path)).start(scenario.setup, stub, tmp_path)
    try:
        counted = count(running, scenario, tmp_path, warmups=2, requests=3)
    finally:
        running.stop()
    assert counted.by_function["cache/fingerprint.py:fingerprint"] > 20
    assert "gateway/journey/attempt.py:attempt" not in counted.by_function
    assert counted.total < 10_000
    assert f"{counted.total:,}  all" in render_bytecodes([counted])
