"""`sameway doctor`: each trouble with its remedy, and nothing spent unasked."""

from __future__ import annotations

import json
import resource
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.cli import main
from tests.e2e.gateway import ADMIN_KEY, WITHOUT_EMBEDDER, Gateway, deployment, run_gateway
from tests.e2e.upstream import Upstream
from tests.services import run_redis

KEY = "sk-of-the-provider"


class _Models(BaseHTTPRequestHandler):
    """A provider that lists its models for one key, with a clock that may be wrong."""

    late_s = 0.0

    def do_GET(self) -> None:
        is_right = KEY in (self.headers.get("authorization", ""), self.headers.get("authorization", "")[7:])
        self.send_response_only(200 if is_right else 401)
        self.send_header("date", formatdate(time.time() + self.late_s, usegmt=True))
        self.end_headers()
        self.wfile.write(b'{"data": []}')

    def log_message(self, *_: Any) -> None:
        return


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of localhost for a week, with its key, that no list of authorities has."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    request = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "7",
    ]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        [*request, *names, "-keyout", path, "-out", path.with_suffix(".crt")], check=True, capture_output=True
    )
    path.write_text(path.read_text() + path.with_suffix(".crt").read_text())
    return path


@pytest.fixture
def serve() -> Iterator[Callable[..., str]]:
    """Starts a provider, with TLS if it has a certificate, and gives its address."""
    servers: list[HTTPServer] = []

    def start(certificate: Path | None = None, late_s: float = 0.0) -> str:
        server = HTTPServer(("localhost", 0), type("Late", (_Models,), {"late_s": late_s}))
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"{'https' if certificate else 'http'}://localhost:{server.server_port}/v1"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def look(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, tuple[str, str, bool]]]:
    """What doctor finds of these settings: by what it is about, what was found, the remedy, and whether it is serious."""
    monkeypatch.setenv("PROVIDER_KEY", KEY)
    monkeypatch.setenv("OLD_KEY", "sk-old")

    def found(*arguments: str, status: int, **settings: Any) -> dict[str, tuple[str, str, bool]]:
        file = tmp_path / "sameway.yaml"
        file.write_text(yaml.safe_dump({"data_dir": str(tmp_path), **settings}))
        capsys.readouterr()
        assert main(["doctor", "--config", str(file), "--json", *arguments]) == status, capsys.readouterr()
        told = json.loads(capsys.readouterr().out)
        return {one["about"]: (one["state"], one["remedy"], one["is_serious"]) for one in told}

    return found


def _models(**urls: tuple[str, str]) -> dict[str, Any]:
    return {
        name: {"deployments": [{**deployment(url.removesuffix("/v1"), name), "base_url": url, "api_key_env": key}]}
        for name, (url, key) in urls.items()
    }


def test_servers_are_asked_for_what_costs_nothing(
    serve: Callable[..., str],
    look: Callable[..., dict[str, tuple[str, str, bool]]],
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A right and a wrong key, a server that is away, a clock that is off, and certificates: unknown, or near its end."""
    plain, late, secured = serve(), serve(late_s=-600.0), serve(certificate)
    urls = {
        "right": (plain, "PROVIDER_KEY"),
        "old": (plain, "OLD_KEY"),
        "away": ("http://localhost:9/v1", "PROVIDER_KEY"),
        "late": (late, "PROVIDER_KEY"),
        "secured": (secured, "PROVIDER_KEY"),
    }
    findings = look(status=1, models=_models(**urls))
    assert findings["right"] == ("takes its key", "", False)
    assert findings["old"] == ("refuses the key (401)", "put a key of localhost into OLD_KEY", True)
    assert findings["away"][2] is True
    assert "start it, correct its `base_url`" in findings["away"][1]
    assert -610 < float(findings["clock of late"][0].split()[0]) < -590
    assert "NTP" in findings["clock of late"][1]
    assert findings["certificate of secured"][2] is True
    assert "SSL_CERT_FILE" in findings["certificate of secured"][1]
    assert KEY not in json.dumps(findings)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.with_suffix(".crt")))
    findings = look(status=0, models=_models(secured=urls["secured"]))
    assert findings["certificate of secured"][1:] == ("renew it", False)
    assert findings["secured"][0] == "takes its key"
    assert "start it, and name its address" in findings["gateway"][1]


def test_redis_and_limits_have_their_remedies(look: Callable[..., dict[str, tuple[str, str, bool]]]) -> None:
    """A Redis that may evict budgets, one that writes nothing down, one that is away, and too few open files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with run_redis(extra=("--maxmemory-policy", "allkeys-lru")) as redis:
        # one too few, as this process may have a thousand open itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (4_095, hard))
        try:
            findings = look(status=1, redis_url=redis.url)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert findings["Redis' maxmemory-policy"][2] is True
        assert "noeviction" in findings["Redis' maxmemory-policy"][1]
        assert "appendonly yes" in findings["Redis' appendonly"][1]
        assert "LimitNOFILE" in findings["open files"][1]
    assert look(status=1, redis_url=redis.url)["Redis"][2] is True


def test_what_is_wrong_with_the_configuration_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As at the start: each wrong setting by its name."""
    file = tmp_path / "sameway.yaml"
    file.write_text("workers: none\n")
    assert main(["doctor", "--config", str(file)]) == 2
    assert "workers:" in capsys.readouterr().err


@pytest.mark.long
def test_each_deployment_is_asked_only_with_leave(
    upstream: Upstream, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `--yes` or a terminal nothing is sent; with it each gets one short question, and its cost is told."""
    models = {
        "mock": {"deployments": [deployment(upstream.url, "plain")]},
        "rejecting": {"deployments": [deployment(upstream.url, "rejecting", "mock?status=400")]},
    }
    monkeypatch.setenv("SAMEWAY_ADMIN_KEY", ADMIN_KEY)
    with run_gateway(tmp_path, {**WITHOUT_EMBEDDER, "models": models}) as gateway:
        gateway.wait_ready()

        def asked(*more: str) -> tuple[int, str]:
            capsys.readouterr()
            arguments = ["--config", str(tmp_path / "sameway.yaml"), "--data-dir", str(gateway.data_dir)]
            return main(["doctor", *arguments, "--url", gateway.root, *more]), capsys.readouterr().out

        assert "not asked, as a question costs its price" in asked()[1]
        assert upstream.seen().generations == 0
        status, out = asked("--yes")
        assert status == 1
        assert "ok    question to plain: answers in" in out
        assert "error question to rejecting" in out


def test_a_gateway_that_runs_is_healthy(gateway: Gateway, capsys: pytest.CaptureFixture[str]) -> None:
    """Its own Redis and database are reached as it reaches them."""
    main(["doctor", "--config", str(gateway.folder / "sameway.yaml"), "--data-dir", str(gateway.data_dir)])
    out = capsys.readouterr().out
    for line in (" Redis: answers in", "ok    Redis' maxmemory-policy: noeviction", "ok    database: answers"):
        assert line in out
