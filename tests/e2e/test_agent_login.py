"""People's agents at a real gateway with two workers: `sameway login`, `sameway run`, and Claude Code's own sign-in."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from gateway.console import CommandError
from gateway.login import logout
from tests.e2e.gateway import Gateway, deployment
from tests.e2e.upstream import run_upstream
from tests.provider import CLIENT_ID, StandInProvider, provider_of

_OWN_PAGE = {"sec-fetch-site": "same-origin"}


@asynccontextmanager
async def place(folder: Path, **access: Any) -> AsyncIterator[tuple[Gateway, StandInProvider]]:
    """A gateway where the people of `search` sign in, and what answers behind it."""
    with run_upstream() as upstream:
        async with provider_of(time.time) as provider:
            groups = {"search": {"role": "member", "teams": ["default"]}}
            whole = {"issuer": provider.issuer, "client_id": CLIENT_ID, "groups": groups, **access}
            models = {"claude-sonnet-4-5": {"deployments": [deployment(upstream.url, "up")]}}
            gateway = Gateway(folder, {"access": whole, "models": models})
            try:
                await asyncio.to_thread(gateway.start, "--workers", "2")
                yield gateway, provider
            finally:
                await asyncio.to_thread(gateway.stop)


async def allow(gateway: Gateway, provider: StandInProvider, code: str) -> None:
    """Sign in as `ada` of `search` in a browser, and allow the code."""
    async with httpx.AsyncClient(base_url=gateway.root, headers=_OWN_PAGE) as browser:
        asked = parse_qs(urlsplit((await browser.get("/admin/sign-in")).headers["location"]).query)
        now_s = int(time.time())
        provider.claims = {"iss": provider.issuer, "aud": CLIENT_ID, "sub": "ada", "groups": ["search"]}
        provider.claims |= {"iat": now_s, "exp": now_s + 300, "nonce": asked["nonce"][0]}
        back = await browser.get("/admin/sign-in/callback", params={"code": "c", "state": asked["state"][0]})
        assert back.status_code == 200, back.text
        said = await browser.post("/admin/device", data={"user_code": code, "decision": "allow"})
        assert "asks as ada" in said.text, said.text


async def test_a_logout_that_the_gateway_did_not_take_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the gateway can't revoke, `sameway logout` says so and keeps the tokens; the next one ends the sign-in."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    answers = [(503, {"error": "temporarily_unavailable"}), (200, {})]

    class Answering(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, body = answers.pop(0)
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "sameway").mkdir()
        (tmp_path / "sameway" / "credentials.json").write_text(json.dumps({url: {"refresh_token": "r"}}))
        with pytest.raises(CommandError, match="temporarily_unavailable"):
            await asyncio.to_thread(logout, url)
        assert [await asyncio.to_thread(logout, url) for _ in range(2)] == [True, False]
        server.shutdown()
        thread.join()


@pytest.mark.long
async def test_sameway_run_needs_no_key_after_sameway_login(tmp_path: Path) -> None:
    """The sign-in is allowed in a browser, serves a tool as the person, is refreshed, and ends by `sameway logout`."""
    environ = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path / "config"), "SAMEWAY_API_KEY": ""}

    async def sameway(*words: str) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-m", "gateway", *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return await asyncio.create_subprocess_exec(*argv, env=environ, **pipes)  # type: ignore[arg-type]

    async with place(tmp_path, audience="x") as (gateway, provider):
        url = ("--url", f"{gateway.root}/v1")
        tool = ("run", *url, "--", sys.executable, "-c", "import os; print(os.environ['OPENAI_API_KEY'])")
        before = await sameway(*tool)
        assert b"sameway login" in (await before.communicate())[1]
        assert not (tmp_path / "config").exists()
        login = await sameway("login", *url)
        assert login.stderr is not None
        said = (await login.stderr.readline() + await login.stderr.readline()).decode()
        await allow(gateway, provider, said.rpartition("code ")[2].strip())
        assert b"signed in" in (await login.communicate())[0]
        file = tmp_path / "config" / "sameway" / "credentials.json"
        assert file.stat().st_mode & 0o777 == 0o600
        stored = json.loads(file.read_text())
        tokens = []
        for expires_at_s in (stored[gateway.root]["expires_at_s"], time.time()):
            file.write_text(json.dumps({gateway.root: {**stored[gateway.root], "expires_at_s": expires_at_s}}))
            out, errors = await (await sameway(*tool)).communicate()
            assert errors == b""
            tokens.append(out.decode().strip())
        assert tokens[0] == stored[gateway.root]["access_token"] != tokens[1]
        body = {"model": "claude-sonnet-4-5", "messages": [{"role": "user", "content": "hello"}]}
        async with httpx.AsyncClient(headers={"authorization": f"Bearer {tokens[1]}"}) as client:
            assert (await client.post(f"{gateway.root}/v1/chat/completions", json=body)).status_code == 200
            assert [(await client.post(f"{gateway.root}/v1/{kind}")).status_code for kind in ("logs", "traces")] == [
                200
            ] * 2
        assert b"signed out" in (await (await sameway("logout", *url)).communicate())[0]
        assert json.loads(file.read_text()) == {}
        assert b"SAMEWAY_API_KEY is not set" in (await (await sameway(*tool)).communicate())[1]
