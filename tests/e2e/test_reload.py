"""A configuration that changes while its gateway serves: the file, SIGHUP, the command and the admin API."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream
from tests.provider import AUDIENCE, CLIENT_ID, StandInProvider, provider_of

_fresh = itertools.count()


class Changing:
    """A gateway of two workers, and its file."""

    def __init__(self, gateway: Gateway, folder: Path, url: str) -> None:
        self.gateway = gateway
        self.file = folder / "sameway.yaml"
        self.url = url
        # a connection each, so that requests reach both workers
        headers = {"authorization": f"Bearer {API_KEY}", "connection": "close"}
        self.client = httpx.Client(headers=headers, timeout=60)

    def config(self, **models: Any) -> dict[str, Any]:
        """The file's contents: an alias `mock`, and those of `models`, each at one deployment of its own name."""
        at = {alias: {"deployments": [deployment(self.url, **given)]} for alias, given in models.items()}
        first: dict[str, Any] = {"mock": {"deployments": [deployment(self.url, "plain", "mock")]}}
        return {"workers": 2, "cache": {"check_share": 0}, "engines": {}, "models": first | at}

    def write(self, config: dict[str, Any]) -> None:
        """Another file in the place of the one that is there, as Kubernetes and careful editors do it."""
        new = self.file.with_suffix(".new")
        new.write_text(yaml.safe_dump(config))
        new.replace(self.file)

    def takes(self, **models: Any) -> None:
        """Write the file, and wait until every worker answers with it."""
        self.write(self.config(**models))
        wait_for(lambda: all(self.served() == {"mock", *models} for _ in range(8)), 60, self.gateway.why_not_ready)

    def served(self) -> set[str]:
        """The aliases of the worker that answers."""
        reply = self.client.get(f"{self.gateway.base_url}/models")
        return {one["id"] for one in reply.json()["data"]} - {"all-minilm-l6-v2"}

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """`sameway reload`."""
        argv = [sys.executable, "-m", "gateway", "reload", "--config", str(self.file)]
        argv += ["--data-dir", str(self.gateway.data_dir), "--port", "0", *arguments]
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)

    def metric(self, series: str) -> float:
        """What a scrape has for the series that begins so; 0 without one."""
        lines = self.gateway.observe("/metrics").text.splitlines()
        return next((float(line.split()[1]) for line in lines if line.startswith(series)), 0.0)

    def asks(self, model: str) -> int:
        """The status of a request that no cache has."""
        return self.chat(model).status_code

    def chat(self, model: str, **body: Any) -> httpx.Response:
        """The answer to a new question."""
        body |= {"model": model, "messages": [{"role": "user", "content": f"{model} {next(_fresh)}"}]}
        return self.client.post(f"{self.gateway.base_url}/chat/completions", json=body)


@pytest.fixture(scope="module")
def changing(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Changing]:
    folder = tmp_path_factory.mktemp("reload")
    first = Changing(Gateway(folder, {}), folder, upstream_process.url)
    with run_gateway(folder, first.config()) as gateway:
        yield Changing(gateway, folder, upstream_process.url)


def test_ten_reloads_under_load_lose_no_request(changing: Changing, upstream: Upstream) -> None:
    """Streams and requests go on while aliases come, change and go; those of an alias that has gone end whole."""
    is_over = threading.Event()

    def load() -> list[int]:
        statuses = []
        while not is_over.is_set():
            statuses.append(changing.asks("mock"))
            time.sleep(0.03)
        return statuses

    def stream() -> str:
        return changing.chat("going", stream=True).text

    with ThreadPoolExecutor(4) as pool:
        loads = [pool.submit(load) for _ in range(2)]
        try:
            for turn in range(5):
                upstream.reset()
                changing.takes(going={"name": f"going-{turn}", "model": "mock?pace_ms=40;chunks=20"})
                streams = [pool.submit(stream) for _ in range(2)]
                wait_for(lambda: sum(one["body"]["model"].startswith("mock?") for one in upstream.seen().requests) == 2)
                changing.takes()
                assert changing.asks("going") == 404
                assert all(one.result().count("data: [DONE]") == 1 and "error" not in one.result() for one in streams)
        finally:
            is_over.set()
        statuses = [status for one in loads for status in one.result()]
    assert len(statuses) > 20
    assert set(statuses) == {200}


def test_a_wrong_file_changes_nothing_and_is_told(changing: Changing) -> None:
    """The command has an exit status and the reason, as have log, metrics and dashboard; the file as it was heals all."""

    def problems() -> list[str]:
        told = [one["message"] for one in changing.gateway.admin("GET", "/status")["problems"]]
        return [one for one in told if "models.mock.policy" in one]

    changing.takes()
    wrong = changing.config()
    wrong["models"]["mock"]["policy"] = "cheepest"
    changing.write(wrong)
    wait_for(lambda: changing.metric("sameway_config_refused ") == 1)
    told = changing.command()
    assert told.returncode == 2
    assert "models.mock.policy" in told.stderr
    assert "cheapest" in told.stderr
    assert changing.asks("mock") == 200
    assert problems()
    for worker in changing.gateway.children("gateway worker"):
        worker.kill()
        worker.wait()
    changing.gateway.wait_ready()
    wait_for(lambda: changing.metric("sameway_config_refused ") == 1 and bool(problems()))  # the next one knows it, too
    assert "reload_refused" in changing.gateway.log.read_text()
    changing.write(changing.config())
    wait_for(lambda: changing.metric("sameway_config_refused ") == 0)
    assert not problems()


def test_every_way_to_reload_has_its_answer(changing: Changing) -> None:
    """SIGHUP ends no process and is logged; the command and the admin API tell what has changed, also where a restart is
    needed.
    """
    changing.takes()
    assert changing.gateway.process is not None
    children = changing.gateway.children("")
    for process in (*children, changing.gateway.process):
        process.send_signal(signal.SIGHUP)
    wait_for(
        lambda: any('"SIGHUP"' in line for line in changing.gateway.log.read_text().splitlines() if "reloaded" in line)
    )
    assert changing.gateway.children("") == children
    told = changing.command()
    assert (told.returncode, told.stdout) == (0, "Nothing has changed.\n"), told.stderr
    assert changing.gateway.admin("POST", "/config/reload")["changes"] == {}
    config = {**changing.config(), "redis_timeout_ms": 700}
    changing.write(config)
    refused = changing.command()
    assert refused.returncode == 2
    assert "redis_timeout_ms: it changes by a restart alone" in refused.stderr
    with pytest.raises(httpx.HTTPStatusError) as error:
        changing.gateway.admin("POST", "/config/reload")
    assert error.value.response.status_code == 400
    assert "redis_timeout_ms" in error.value.response.text
    changing.takes()
    assert changing.asks("mock") == 200


@pytest.mark.long
def test_a_closed_terminal_ends_its_gateway(changing: Changing, tmp_path: Path) -> None:
    """SIGHUP of a terminal that is gone stops the gateway that ran in it."""
    child, terminal = pty.fork()
    if not child:
        argv = [sys.executable, "-m", "gateway", "serve", "--config", str(changing.file), "--data-dir", str(tmp_path)]
        os.execv(sys.executable, [*argv, "--port", "0"])
    shown = b""
    while b"base_url" not in shown:
        shown += os.read(terminal, 4096)
    os.close(terminal)
    ended = 0
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        time.sleep(0.1)
        ended, _ = os.waitpid(child, os.WNOHANG)
    if not ended:
        os.kill(child, signal.SIGKILL)
    assert ended == child


def test_a_setting_that_changes_counts_at_once(changing: Changing) -> None:
    """A limit of bodies, which each endpoint has, is the new one in every worker; so are who reads metrics, what
    is logged, and whom proxies name as the client.
    """
    changing.takes()
    key = changing.gateway.admin("POST", "/teams/1/keys", json={"name": "there", "addresses": ["192.0.2.0/24"]})
    told = {"authorization": f"Bearer {key['plaintext']}", "x-forwarded-for": "192.0.2.7", "connection": "close"}

    def listed() -> set[int]:
        return {httpx.get(f"{changing.gateway.base_url}/models", headers=told).status_code for _ in range(6)}

    assert listed() == {403}
    metrics, mark = f"{changing.gateway.root}/metrics", f"question {next(_fresh)} of a person"
    body = {"model": "mock", "messages": [{"role": "user", "content": mark}]}
    more = {"is_metrics_open": True, "log_prompts": True, "trusted_proxies": ["127.0.0.1"]}
    changing.write(changing.config() | {"body_bytes_max": 30} | more)
    wait_for(lambda: all(changing.asks("mock") == 413 for _ in range(6)))
    assert httpx.get(metrics).status_code == 200
    assert listed() == {200}
    changing.write(changing.config() | {"log_prompts": True})
    wait_for(lambda: all(changing.asks("mock") == 200 for _ in range(6)))
    assert httpx.get(metrics).status_code == 401
    assert mark not in changing.gateway.log.read_text()
    changing.client.post(f"{changing.gateway.base_url}/chat/completions", json=body)
    wait_for(lambda: mark in changing.gateway.log.read_text())
    changing.takes()


def test_newer_prices_count_from_the_next_request(changing: Changing, upstream: Upstream) -> None:
    """`sameway prices update` on a gateway that serves: the model's cost changes in every worker, and its connections stay."""
    changing.takes(priced={"name": "priced", "model": "gpt-4o-mini", "price": None})

    def costs() -> set[str]:
        return {changing.chat("priced").headers["x-sameway-cost-usd"] for _ in range(6)}

    (before,) = costs()
    row = {"mode": "chat", "litellm_provider": "openai", "input_cost_per_token": 9e-3, "output_cost_per_token": 9e-3}
    (table := changing.file.with_name("newer.json")).write_text(json.dumps({"gpt-4o-mini": row}))
    where = ["--config", str(changing.file), "--data-dir", str(changing.gateway.data_dir)]
    argv = [sys.executable, "-m", "gateway", "prices", "update", str(table), *where]
    subprocess.run(argv, check=True, capture_output=True, timeout=60)
    wait_for(lambda: len(after := costs()) == 1 and float(after.pop()) > 1_000 * float(before))


@pytest.mark.long
def test_an_engine_comes_and_goes(changing: Changing) -> None:
    """A model of a new engine waits while its progress is told, then answers; the engine ends after its last request, whole."""
    changing.takes()
    config = changing.config()
    config["engines"] = {"grown": {}}
    config["models"]["grown"] = {"deployments": [{"name": "grown", "backend": "local", "engine": "grown"}]}
    changing.write(config)
    seen: list[str] = []

    def is_there() -> bool:
        part = changing.gateway.observe("/readyz").json()["parts"].get("grown", {"health": "", "detail": ""})
        seen.append(part["detail"])
        assert changing.asks("mock") == 200  # no host is taken out of service
        return bool(part["health"] == "ok")

    wait_for(is_there, 120, changing.gateway.why_not_ready)
    assert any("%" in detail for detail in seen), seen
    assert len(changing.gateway.children("local_engine.process")) == 1
    body = {
        "model": "grown",
        "messages": [{"role": "user", "content": "Count to 100."}],
        "max_tokens": 120,
        "stream": True,
    }
    with changing.client.stream("POST", f"{changing.gateway.base_url}/chat/completions", json=body) as reply:
        lines = reply.iter_lines()
        next(lines)
        changing.takes()
        rest = "".join(lines)
    assert "[DONE]" in rest
    assert "error" not in rest
    assert changing.asks("grown") == 404
    wait_for(lambda: not changing.gateway.children("local_engine"), 60)


def test_without_a_gateway_the_command_says_so(changing: Changing, tmp_path: Path) -> None:
    """Nobody listens for a data directory in which no gateway runs."""
    told = changing.command("--data-dir", str(tmp_path / "elsewhere"))
    assert told.returncode == 1
    assert "no gateway" in told.stderr


def test_a_model_is_kept_in_the_database(changing: Changing) -> None:
    """A dry run changes nothing; a change is used, audited and reverted; the file wins."""
    changing.takes()
    admin, all_served = changing.gateway.admin, lambda *names: all(changing.served() == set(names) for _ in range(6))
    model = {"deployments": [deployment(changing.url, "kept-there")]}
    asked = {"alias": "kept", "model": model}
    assert admin("POST", "/config/models", json={**asked, "is_dry_run": True})["changes"] == {"models.kept": "added"}
    assert all_served("mock")
    assert admin("POST", "/config/models", json=asked) == {"changes": {"models.kept": "added"}, "is_in_file": False}
    assert all_served("mock", "kept")
    assert changing.asks("kept") == 200
    listed = admin("GET", "/config/models")
    assert [(one["alias"], one["is_in_file"]) for one in listed["models"]] == [("kept", False), ("mock", True)]
    [change] = listed["history"]
    assert (change["before"], change["after"]) == (None, model)
    assert any(row["action"] == "model_changed" for row in admin("GET", "/audit")["rows"])

    changing.takes(kept={"name": "of-the-file", "model": "mock"})
    wait_for(lambda: changing.chat("kept").headers.get("x-sameway-backend") == "of-the-file")
    assert admin("POST", "/config/models", json=asked)["is_in_file"]
    changing.write(changing.config())
    wait_for(lambda: changing.chat("kept").headers.get("x-sameway-backend") == "kept-there")

    admin("POST", "/config/models/revert", json={"id": change["id"]})
    assert all_served("mock")
    assert changing.asks("kept") == 404


@pytest.mark.long
def test_a_kept_model_is_known_after_a_restart(changing: Changing) -> None:
    """A worker that starts finds what the database has."""
    changing.takes()
    model = {"deployments": [deployment(changing.url, "lasting")]}
    changing.gateway.admin("POST", "/config/models", json={"alias": "lasting", "model": model})
    changing.gateway.stop()
    changing.gateway.start()
    wait_for(lambda: all(changing.served() == {"mock", "lasting"} for _ in range(6)))
    changing.gateway.admin("POST", "/config/models", json={"alias": "lasting", "model": None})
    assert changing.served() == {"mock"}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"deployments": []}, "at least 1"),
        (
            {"policy": "cheepest", "deployments": [{"backend": "openai", "base_url": "http://h/v1", "model": "m"}]},
            "cheapest",
        ),
        (
            {
                "deployments": [
                    {"backend": "openai", "base_url": "http://h/v1", "model": "m", "headers": {"x-key": "sk"}}
                ]
            },
            "headers",
        ),
        ({"deployments": [{"backend": "openai", "base_url": "http://u:p@h/v1", "model": "m"}]}, "only the file"),
        (
            {
                "deployments": [
                    {"backend": "openai", "base_url": "http://h/v1", "model": "m", "api_key_file": "/etc/passwd"}
                ]
            },
            "key",
        ),
    ],
)
def test_a_model_that_cannot_be_is_refused(changing: Changing, model: Any, words: str) -> None:
    """It is checked as the file is, and takes no secrets that the file does not name; nothing is kept."""
    before = changing.gateway.admin("GET", "/config/models")
    with pytest.raises(httpx.HTTPStatusError) as error:
        changing.gateway.admin("POST", "/config/models", json={"alias": "wrong", "model": model})
    assert error.value.response.status_code == 400
    assert words in error.value.response.text
    assert changing.gateway.admin("GET", "/config/models") == before


def test_people_s_tokens_are_taken_and_end_in_every_worker(changing: Changing) -> None:
    """With `access` in the file a JWT is a caller of its team, until its person is logged out at the provider or disabled here:
    both workers refuse it within a second; a newer token of who was logged out is taken, one of who is disabled is not.
    """
    began, ended = threading.Event(), threading.Event()
    providers: list[StandInProvider] = []

    async def serve() -> None:
        async with provider_of(time.time) as provider:
            providers.append(provider)
            began.set()
            await asyncio.to_thread(ended.wait)

    serving = threading.Thread(target=asyncio.run, args=(serve(),))
    serving.start()
    began.wait(10)
    provider = providers[0]
    try:
        groups = {"people": {"role": "member", "teams": ["default"]}}
        access = {"issuer": provider.issuer, "client_id": CLIENT_ID, "audience": AUDIENCE, "algorithms": ["ES256"]}
        changing.write(changing.config() | {"access": {**access, "groups": groups}})

        def statuses(token: str) -> set[int]:
            headers = {"authorization": f"Bearer {token}"}
            return {
                changing.client.get(f"{changing.gateway.base_url}/models", headers=headers).status_code
                for _ in range(8)
            }

        first = provider.token(groups=["people"], iat=int(time.time()) - 9)
        wait_for(lambda: statuses(first) == {200})
        asked = changing.client.post(
            f"{changing.gateway.base_url}/chat/completions",
            json={"model": "mock", "messages": [{"role": "user", "content": "a person's"}]},
            headers={"authorization": f"Bearer {first}"},
        )
        assert asked.status_code == 200
        event = {"http://schemas.openid.net/event/backchannel-logout": {}}
        logout = provider.token(aud=CLIENT_ID, events=event, jti="1", iat=int(time.time()) - 5)
        reply = httpx.post(f"{changing.gateway.root}/admin/sign-in/logout", data={"logout_token": logout})
        assert reply.status_code == 200
        wait_for(lambda: statuses(first) == {401}, 1.0)
        second = provider.token(groups=["people"])
        assert statuses(second) == {200}
        changing.gateway.admin("POST", "/people/disable", json={"name": "alice"})
        wait_for(lambda: statuses(second) == {401}, 1.0)
        changing.gateway.admin("POST", "/people/enable", json={"name": "alice"})
        wait_for(lambda: statuses(second) == {200}, 1.0)
    finally:
        ended.set()
        serving.join()
        changing.takes()
