"""People of npm's certified `oidc-provider`, by `docs/access.md`: a real gateway, a real browser."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

import httpx
import pytest
from playwright.async_api import Page

from tests.admin.browser import chromium
from tests.e2e.gateway import Gateway

_SCRIPT = Path(__file__).with_name("provider.mjs")
_SECRET = "a-secret:with%,+and&=/of-tests"


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def provider(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The issuer, and the port of the gateway that it knows."""
    assert all(map(shutil.which, ("node", "npm"))), "this test needs Node.js 20 or newer with npm: install it"
    shutil.copy(_SCRIPT, tmp_path)
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), "oidc-provider@9.13.3"]
    subprocess.run(install, check=True, capture_output=True, timeout=300)
    port, gateway = _free_port(), _free_port()
    argv = ["node", str(tmp_path / _SCRIPT.name), str(port), f"http://127.0.0.1:{gateway}"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"
        yield f"http://127.0.0.1:{port}", gateway
    finally:
        process.terminate()
        process.wait()


async def _at_provider(page: Page, name: str) -> None:
    """Fill in the provider's login and consent, as far as it shows them."""
    await page.wait_for_url("**/interaction/**")
    await page.locator("input[name=login]").fill(name)
    await page.locator("input[name=password]").fill("any")
    await page.locator("button[type=submit]").click()
    await page.get_by_text("Authorize").first.wait_for()
    await page.locator("button[type=submit]").click()


async def _sign_in(page: Page, root: str, name: str) -> None:
    await page.goto(f"{root}/admin/login")
    await page.get_by_role("link", name="Sign in").click()
    await _at_provider(page, name)
    await page.wait_for_url(f"{root}/admin*")


async def _token(page: Page, issuer: str, name: str) -> str:
    """An access token for the API, by a client of its own with PKCE."""
    verifier, back = "v" * 43, f"{issuer}/done"
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    query = {"client_id": "laptop", "response_type": "code", "redirect_uri": back, "scope": "openid llm"}
    query |= {"resource": "urn:sameway", "code_challenge": challenge, "code_challenge_method": "S256"}
    await page.goto(f"{issuer}/auth?{urlencode(query)}")
    await _at_provider(page, name)
    await page.wait_for_url(f"{back}?*")
    code = parse_qs(urlsplit(page.url).query)["code"][0]
    form = {"grant_type": "authorization_code", "client_id": "laptop", "code": code}
    form |= {"redirect_uri": back, "code_verifier": verifier, "resource": "urn:sameway"}
    async with httpx.AsyncClient() as client:
        return str((await client.post(f"{issuer}/token", data=form)).raise_for_status().json()["access_token"])


async def _models(page: Page, root: str, token: str) -> int:
    reply = await page.context.request.get(f"{root}/v1/models", headers={"authorization": f"Bearer {token}"})
    return reply.status


@pytest.mark.long
async def test_people_sign_in_bring_tokens_and_log_out(provider: tuple[str, int], tmp_path: Path) -> None:
    """Sign-in, a token at /v1, new keys of the provider in the middle, logout, and logout by the back channel."""
    issuer, port = provider
    groups = {"platform": {"role": "admin"}, "search": {"role": "member", "teams": ["default"]}}
    access = {"issuer": issuer, "client_id": "sameway", "scopes": ["openid", "email", "groups"]}
    access |= {"user_claim": "email", "audience": "sameway-api", "required_claims": {"scope": "llm"}}
    gateway = Gateway(tmp_path, {"access": {**access, "groups": groups}}, {"SAMEWAY_ACCESS_SECRET": _SECRET})
    await asyncio.to_thread(gateway.start, "--port", str(port), "--workers", "2")
    root = gateway.root
    try:
        async with chromium() as browser:
            admin = await (await browser.new_context()).new_page()
            await _sign_in(admin, root, "ada-platform")
            assert (await admin.context.request.get(f"{root}/admin/teams")).status == 200
            member = await (await browser.new_context()).new_page()
            old = await _token(member, issuer, "mem-search")
            assert await _models(member, root, old) == 200

            assert (await admin.context.request.post(f"{issuer}/rotate")).ok
            assert await _models(member, root, old) == 200
            new = await _token(await (await browser.new_context()).new_page(), issuer, "mem-search")
            until_s = time.monotonic() + 25  # keys are read again at most every ten seconds, in each worker
            while await _models(member, root, new) != 200:
                assert time.monotonic() < until_s, gateway.log.read_text()
                await asyncio.sleep(0.5)

            second = await (await browser.new_context()).new_page()
            await _sign_in(second, root, "bea-platform")
            await second.goto(f"{issuer}/session/end")
            await second.get_by_role("button", name="Yes").click()  # the provider tells the gateway, not the browser
            await second.get_by_text("Sign-out Success").wait_for()
            await second.goto(f"{root}/admin/teams")
            assert urlsplit(second.url).path == "/admin/login"

            await admin.goto(f"{root}/admin/audit")  # her session was not ended
            assert "bea-platform@example.com" in await admin.locator("main").inner_text()

            await _sign_in(second, root, "bea-platform")
            await second.get_by_role("button", name="Log out").click()
            await second.wait_for_url(f"{issuer}/session/end?*")
            await second.get_by_role("button", name="Yes").click()
            await second.wait_for_url(f"{root}/admin/login*")
            await second.goto(f"{root}/admin/teams")
            assert urlsplit(second.url).path == "/admin/login"
        rows = gateway.admin("GET", "/audit")["rows"]
        doors = [(row["action"], row["actor"][:3]) for row in reversed(rows) if row["action"].startswith("signed")]
        assert doors == [("signed_in", "ada"), ("signed_in", "bea"), ("signed_in", "bea"), ("signed_out", "bea")]
    finally:
        gateway.stop()
