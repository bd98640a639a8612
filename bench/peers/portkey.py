"""Portkey's open source gateway (TypeScript on node). Its cache is not part of the open source package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from bench.lab.native import WORK, Stub
from bench.lab.processes import BenchError, Child, answers
from bench.lab.systems import Running, Setup, Target, clean_environment, free_port

_VERSION = "1.15.2"
# The newest node-server that its streams work with: later ones hand it headers that it may not add to.
_PACKAGE = {"dependencies": {"@portkey-ai/gateway": _VERSION}, "overrides": {"@hono/node-server": "1.13.8"}}
_SERVER = Path("node_modules/@portkey-ai/gateway/build/start-server.js")


class Portkey:
    """The npm package `@portkey-ai/gateway`."""

    name = "portkey"

    def install(self) -> None:
        folder = WORK / "portkey"
        manifest = folder / "package.json"
        wanted = json.dumps(_PACKAGE)
        if (folder / _SERVER).exists() and manifest.read_text() == wanted:
            return
        if shutil.which("npm") is None or shutil.which("node") is None:
            raise BenchError("no node and npm on PATH")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        manifest.write_text(wanted)
        print(f"bench: installing @portkey-ai/gateway {_VERSION} into {folder}", file=sys.stderr, flush=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        if done.returncode != 0:
            raise BenchError(f"npm install failed: {done.stderr.strip()[-600:]}")

    def lacks(self, setup: Setup) -> str | None:
        return None if setup is Setup.MISS else "its open source gateway has no cache and one process"

    def configuration(self, setup: Setup) -> str:
        return "the"

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        port = free_port()
        command = ["node", str(WORK / "portkey" / _SERVER), f"--port={port}", "--headless"]
        environ = clean_environment(NODE_ENV="production")
        child = Child(command, folder / "portkey.log", environ, WORK / "portkey")
        try:
            child.wait_until(lambda: answers(f"http://127.0.0.1:{port}/"), 20.0)
        except BaseException:
            child.stop()
            raise

        def target(path: str) -> Target:
            upstream = f"http://127.0.0.1:{stub.port}{path}"
            provider = {"x-portkey-provider": "openai", "x-portkey-custom-host": upstream}
            return Target("stub", headers={"authorization": "Bearer sk-stub", **provider})

        return Running(port, (child.pid,), child.stop, _VERSION, instant=target("/v1"), paced=target("/pace/10/v1"))
