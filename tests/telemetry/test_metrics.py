"""What a scrape says, of one worker and of several."""

import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from gateway.journey.record import Attempt
from gateway.telemetry import metric_names as names
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.shared_numbers import CAPACITY, SharedNumbers
from tests.telemetry.records import hit, miss

_ROOT = Path(__file__).parents[2]


def scrape(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample of a scrape, read by prometheus_client's own parser."""
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    """The sum of the samples of a name that carry these labels; None where there are none."""
    found = [v for (n, have), v in scrape(metrics).items() if n == name and labels.items() <= dict(have).items()]
    return sum(found) if found else None


def test_a_generation_is_counted_with_its_money_tokens_and_times() -> None:
    """One miss moves requests, cost, tokens, attempts, stores and the latency histograms, in base units."""
    metrics = Metrics(None)
    metrics.observe(miss())
    assert (
        value(metrics, "sameway_requests_total", route="chat", model="small", team="search", cache="miss", status="200")
        == 1
    )
    assert value(metrics, "sameway_cost_usd_total", team="search", deployment="local") == pytest.approx(120e-6)
    assert value(metrics, "sameway_tokens_total", type="input") == 40
    assert value(metrics, "sameway_tokens_total", type="output") == 11
    assert value(metrics, "sameway_attempts_total", deployment="local", outcome="ok") == 1
    assert value(metrics, "sameway_cache_stores_total", outcome="stored") == 1
    assert value(metrics, "gen_ai_server_time_to_first_token_seconds_sum") == pytest.approx(0.1)
    assert value(metrics, "gen_ai_server_time_per_output_token_seconds_sum") == pytest.approx(0.02)
    assert value(metrics, "gen_ai_server_request_duration_seconds_bucket", le="0.25") == 0
    assert value(metrics, "gen_ai_server_request_duration_seconds_bucket", le="0.5") == 1


def test_a_hit_saves_and_costs_nothing() -> None:
    """A hit moves the savings and no cost, and its tokens are no generation's."""
    metrics = Metrics(None)
    metrics.observe(hit())
    assert value(metrics, "sameway_saved_usd_total", mechanism="exact", team="search") == pytest.approx(120e-6)
    assert value(metrics, "sameway_saved_seconds_total", cache="exact") == pytest.approx(0.298)
    assert value(metrics, "sameway_cost_usd_total") is None
    assert value(metrics, "sameway_tokens_total") is None


def test_a_failover_counts_each_attempt() -> None:
    """Two attempts count once each, the failed one as an error, and the request as one failover; what the client was at
    fault for, or did not wait for, is no error of the deployment."""
    metrics = Metrics(None)
    for attempt in (Attempt("gpt", "too long", 1.0, is_refusal=True), Attempt("gpt", "cancelled", 1.0)):
        metrics.observe(miss(attempts=(attempt,)))
        assert value(metrics, "sameway_attempts_total", deployment="gpt", outcome=attempt.verdict) == 1
    metrics.observe(miss(attempts=(Attempt("gpt", "timed out after 5 s", 5_000.0), Attempt("local", "ok", 80.0))))
    assert value(metrics, "sameway_attempts_total", deployment="gpt", outcome="error") == 1
    assert value(metrics, "sameway_attempts_total", deployment="local", outcome="ok") == 1
    assert value(metrics, "sameway_failovers_total", model="small") == 1
    assert value(metrics, "gen_ai_client_operation_duration_seconds_count", error_type="error") == 1


def test_waiting_for_another_worker_is_counted_by_its_end() -> None:
    """Requests and their time, by how it ended; one that did not wait moves nothing."""
    metrics = Metrics(None)
    for end in ("served", "served", "made"):
        metrics.observe(miss(awaited=end, awaited_ms=250.0))
    metrics.observe(miss())
    assert value(metrics, "sameway_awaited_requests_total", model="small", outcome="served") == 2
    assert value(metrics, "sameway_awaited_requests_total", model="small", outcome="made") == 1
    assert value(metrics, "sameway_awaited_seconds_total", model="small") == pytest.approx(0.75)


def test_errors_and_lost_clients_are_counted() -> None:
    """A refusal counts its code and status, and a client that left counts as such."""
    metrics = Metrics(None)
    metrics.observe(miss(status=429, error="insufficient_quota", attempts=(), is_disconnected=True))
    assert value(metrics, "sameway_errors_total", code="insufficient_quota", route="chat") == 1
    assert value(metrics, "sameway_requests_total", status="429") == 1
    assert value(metrics, "sameway_disconnects_total", model="small") == 1


def test_gauges_are_merged_by_their_meaning(tmp_path: Path) -> None:
    """In-flight requests add up, the worst loop lag shows, and one worker without Redis is enough to show 0."""
    left, right = Metrics(tmp_path), Metrics(tmp_path)
    left.add(names.IN_FLIGHT, 2)
    right.add(names.IN_FLIGHT, 3)
    right.add(names.IN_FLIGHT, -1)
    left.set(names.LOOP_LAG, 0.001)
    right.set(names.LOOP_LAG, 0.2)
    left.set(names.REDIS_UP, 1)
    right.set(names.REDIS_UP, 0)
    for metrics in (left, right):
        assert value(metrics, "sameway_in_flight_requests") == 4
        assert value(metrics, "sameway_event_loop_lag_seconds") == 0.2
        assert value(metrics, "sameway_redis_up") == 0
        assert value(metrics, "sameway_workers") == 2
    left.close()
    right.close()


def test_a_gauge_nobody_set_is_not_shown() -> None:
    """An unknown state is absent, not 0."""
    assert value(Metrics(None), "sameway_redis_up") is None


_WORKER = """
import sys, time
from pathlib import Path
from gateway.telemetry import metric_names as names
from gateway.telemetry.metrics import Metrics
from tests.telemetry.records import hit
metrics = Metrics(Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    metrics.observe(hit())
metrics.set(names.IN_FLIGHT, 5)
print("ready", flush=True)
time.sleep(60)
"""


def _start_worker(folder: Path, requests: int, file_bytes_max: int = resource.RLIM_INFINITY) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_WORKER), str(folder), str(requests)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=_ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes_max, file_bytes_max)),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_workers_add_up_and_a_killed_one_loses_nothing(tmp_path: Path) -> None:
    """Counts of several processes are one sum at once; after kill -9 they stay, gauges go, and the next worker goes on."""
    mine = Metrics(tmp_path)
    mine.observe(hit())
    worker = _start_worker(tmp_path, 10)
    try:
        assert value(mine, "sameway_requests_total") == 11
        assert value(mine, "sameway_in_flight_requests") == 5
    finally:
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
    assert value(mine, "sameway_requests_total") == 11
    assert value(mine, "sameway_in_flight_requests") is None
    assert value(mine, "sameway_workers") == 1
    successor = Metrics(tmp_path)
    successor.observe(hit())
    assert value(mine, "sameway_requests_total") == 12
    assert len(list(tmp_path.glob("*.values"))) == 2
    assert value(successor, "sameway_in_flight_requests") is None
    mine.close()
    successor.close()


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    """Where the files have no room a worker counts for itself; what has a file never needs another byte, so nothing it counts can
    fail later."""
    worker = _start_worker(tmp_path, 10, file_bytes_max=500_000)
    worker.kill()
    worker.wait()
    mine = Metrics(tmp_path)
    assert mine.error is None
    before = {path: path.stat().st_blocks for path in tmp_path.iterdir()}
    mine.observe(hit())
    assert value(mine, "sameway_requests_total") == 1
    assert {path: path.stat().st_blocks for path in tmp_path.iterdir()} == before
    mine.close()


def test_a_series_line_cut_short_is_no_series(tmp_path: Path) -> None:
    """A crash inside the write of a series' line leaves the whole lines readable and the file usable."""
    first = SharedNumbers(tmp_path)
    start = first.allocate(("a",), 1)
    first.values[start] = 7.0
    first.close()
    lines = (tmp_path / "0.series").read_bytes().rstrip(b"\0")
    (tmp_path / "0.series").write_bytes(lines + b'[["b"],6')
    second = SharedNumbers(tmp_path)
    assert second.allocate(("a",), 1) == start
    assert second.values[start] == 7.0
    other = second.allocate(("c",), 3)
    assert other != start
    third = SharedNumbers(tmp_path)
    assert {key for shot in third.snapshots() for key, _ in shot.series} == {("a",), ("c",)}
    second.close()
    third.close()


def test_labels_nobody_bounded_cost_no_memory() -> None:
    """Beyond the room for series, new ones are dropped and counted; the old ones go on."""
    metrics = Metrics(None)
    metrics.observe(hit())
    for number in range(CAPACITY // 64):
        metrics.observe(hit(alias=f"model-{number}"))
    metrics.observe(hit())
    text = metrics.render().decode()
    assert re.search(r"^sameway_metric_series_dropped_total [1-9]", text, re.M)
    assert re.search(r'^sameway_requests_total\{.*model="small".*\} 2.0$', text, re.M)


def test_what_is_gone_is_not_shown_and_makes_room(tmp_path: Path) -> None:
    """A scrape by any worker names the models of now alone; when the room is full, theirs takes that of others."""
    models = {"small"}
    metrics, other = Metrics(tmp_path), Metrics(tmp_path)
    for one in (metrics, other):
        one.current = lambda: {"model": models, "gen_ai_request_model": models}
    for number in range(1_500):  # more than there is room for
        models = {"small", f"model-{number}"}
        metrics.observe(hit(alias="small"))
        metrics.observe(hit(alias=f"model-{number}"))
        if number % 250 == 249:
            other.render()
            metrics.render()
    for one in (metrics, other):
        assert value(one, "sameway_requests_total", model="small") == 1_500
        assert value(one, "sameway_requests_total") == 1_501
        assert value(one, "gen_ai_server_request_duration_seconds_count", gen_ai_request_model="model-1499") == 1
        assert value(one, "sameway_metric_series_dropped_total") is None
    metrics.close()
    assert value(other, "sameway_requests_total") == 1_501
    other.close()


@settings(max_examples=50)
@given(st.lists(st.floats(min_value=0, max_value=1e6), max_size=50))
def test_a_histogram_counts_every_value_in_its_bucket(durations_ms: list[float]) -> None:
    """Cumulative buckets agree with a count by hand, inclusive bounds included, and the last is the count."""
    metrics = Metrics(None)
    for duration_ms in durations_ms:
        metrics.observe(hit(duration_ms=duration_ms))
    name = "gen_ai_server_request_duration_seconds"
    counted, total = dict[str, float](), 0.0
    for (sample, labels), count in scrape(metrics).items():
        if sample == f"{name}_bucket":
            counted[dict(labels)["le"]] = count
        elif sample == f"{name}_count":
            total += count
    for bound in names.SECONDS:
        assert counted.get(repr(bound), 0) == sum(duration_ms / 1e3 <= bound for duration_ms in durations_ms)
    assert counted.get("+Inf", 0) == total == len(durations_ms)


def test_label_values_are_escaped() -> None:
    """A team's name may hold quotes, backslashes and line ends without breaking the text."""
    metrics = Metrics(None)
    hostile = 'a"b\\c\nd'
    metrics.observe(hit(team=hostile))
    assert value(metrics, "sameway_requests_total", team=hostile) == 1


def test_docs_list_the_metrics() -> None:
    """docs/metrics.md has one row per metric with its kind, labels and words, and no other."""
    rows = re.findall(
        r"^\| `([a-z0-9_]+)` \| (\w+) \| (.*?) \| (.*?) \|$", (_ROOT / "docs/metrics.md").read_text(), re.M
    )
    written = {name: (kind, labels, words) for name, kind, labels, words in rows}
    assert written == {
        one.name: (one.kind.value, ", ".join(f"`{label}`" for label in one.labels), one.help)
        for one in names.DEFINITIONS
    }
