"""The operators' doors on the real application: which key opens which, what a stranger sees, and how guesses are slowed."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from fastapi import FastAPI
from fastapi.routing import APIRoute
from redis.asyncio import Redis

from cache.redis_link import RedisLink
from gateway import app as app_module
from gateway.admin.guard import COOKIE, Guard
from gateway.admin.guesses import Guesses, network_of
from gateway.app import create_app, served
from gateway.settings import Settings
from tests.admin.world import World, open_world
from tests.e2e.worker import keep_collector
from tests.services import RedisServer
from tests.world import deployment

ADMIN_KEY = "sk-admin-of-the-doors"
METRICS_KEY = "sk-metrics-of-the-doors"
OWN = {"sec-fetch-site": "same-origin"}
WRONG = {"authorization": "Bearer wrong"}

_MODELS: Any = {"small": {"deployments": [deployment("small@api")]}}

Open = Callable[..., Awaitable[FastAPI]]


@pytest.fixture
async def start(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Open]:
    """Starts workers of one installation in this process, without their loops."""
    keep_collector(monkeypatch)
    monkeypatch.setattr(app_module, "start_loops", lambda parts, stack: None)
    async with AsyncExitStack() as stack:

        async def open_app(**options: Any) -> FastAPI:
            fields: dict[str, Any] = {"admin_key": ADMIN_KEY, "metrics_key": METRICS_KEY, **options}
            settings = Settings(data_dir=tmp_path, redis_url=redis_server.url, engines={}, models=_MODELS, **fields)
            app = create_app(settings)
            await stack.enter_async_context(app.router.lifespan_context(app))
            return app

        yield open_app


@asynccontextmanager
async def visiting(
    app: FastAPI, address: str = "192.0.2.1", url: str = "http://gateway.test", **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client at `address`."""
    transport = httpx.ASGITransport(served(app), client=(address, 4_711))
    async with httpx.AsyncClient(transport=transport, base_url=url, **options) as client:
        yield client


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def log_in(client: httpx.AsyncClient, key: str = ADMIN_KEY, **options: Any) -> httpx.Response:
    return await client.post("/admin/login", data={"key": key}, headers=OWN, **options)


def refusals(app: FastAPI) -> dict[tuple[str, str], float]:
    """What the metric counts: refused keys by endpoint and outcome."""
    found = {}
    for line in app.state.parts.metrics.render().decode().splitlines():
        if line.startswith("sameway_wrong_keys_total{"):
            labels = dict(part.split("=") for part in line[line.index("{") + 1 : line.index("}")].split(","))
            found[labels["endpoint"].strip('"'), labels["outcome"].strip('"')] = float(line.rsplit(" ", 1)[1])
    return found


# -- /metrics and /readyz


async def test_a_stranger_learns_that_the_gateway_is_ready_and_no_more(start: Open) -> None:
    """Without a key /metrics is closed, and /readyz has its status and one word; no team, part, host or error shows."""
    app = await start()
    async with visiting(app) as stranger:
        for headers in ({}, {"authorization": f"Basic {ADMIN_KEY}"}, {"authorization": "Bearer "}):
            closed = await stranger.get("/metrics", headers=headers)
            assert (closed.status_code, closed.headers["www-authenticate"]) == (401, "Bearer")
            assert closed.json()["error"]["code"] == "invalid_api_key"
            ready = await stranger.get("/readyz", headers=headers)
            assert (ready.status_code, ready.json()) == (503, {"is_ready": False})
        assert (await stranger.head("/metrics")).status_code in (401, 405)
        for path in ("/healthz", "/health"):
            assert (await stranger.get(path)).json().keys() == {"status", "version", "build"}


@pytest.mark.parametrize("key", [ADMIN_KEY, METRICS_KEY])
async def test_a_key_opens_both(start: Open, key: str) -> None:
    """The admin's key and the one for metrics show the metrics and the parts, uncached."""
    app = await start()
    async with visiting(app, headers=bearer(key)) as scraper:
        metrics = await scraper.get("/metrics")
        assert metrics.status_code == 200
        assert "sameway_workers 1.0" in metrics.text
        assert metrics.headers["cache-control"] == "no-store"
        assert {"redis", "database"} <= (await scraper.get("/readyz")).json()["parts"].keys()


async def test_the_description_says_who_needs_a_key(start: Open) -> None:
    """/metrics needs one and answers text, its refusals are JSON; /readyz takes one. No reference leads nowhere."""
    app = await start()
    described = app.openapi()
    metrics, ready = (described["paths"][path]["get"] for path in ("/metrics", "/readyz"))
    assert (metrics["security"], ready["security"]) == ([{"adminKey": []}], [{}, {"adminKey": []}])
    contents = {status: list(reply["content"]) for status, reply in metrics["responses"].items()}
    error = ["application/json"]
    assert contents == {"200": ["text/plain"], "401": error, "403": error, "429": error}
    assert {"adminKey"} <= described["components"]["securitySchemes"].keys()
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(described)))
    assert {"ErrorBody", "ChatRequest"} <= named <= described["components"]["schemas"].keys()


async def test_the_metrics_key_opens_nothing_else(start: Open) -> None:
    """Neither the admin API nor the login form nor /v1 takes it."""
    app = await start()
    async with visiting(app, headers=bearer(METRICS_KEY)) as scraper:
        assert (await scraper.get("/admin/api/teams")).status_code == 401
        assert (await scraper.get("/v1/models")).status_code == 401
        assert (await log_in(scraper, METRICS_KEY)).status_code == 401
        assert (await scraper.get("/admin")).status_code == 303


async def test_without_a_metrics_key_the_admins_is_the_only_one(start: Open) -> None:
    """No key is set by default, and an empty one opens nothing."""
    app = await start(metrics_key=None)
    async with visiting(app) as client:
        assert (await client.get("/metrics", headers=bearer(ADMIN_KEY))).status_code == 200
        for key in ("None", "", METRICS_KEY):
            assert (await client.get("/metrics", headers=bearer(key))).status_code == 401


_HOSTS = {
    "localhost": True,
    "LocalHost:8080": True,
    "localhost.": True,
    "127.0.0.1:8080": True,
    "[::1]:8080": True,
    "192.0.2.7": True,
    "metrics.internal:80": True,
    "evil.test": False,
    "evil.test:8080": False,
    "localhost.evil.test": False,
    "127.0.0.1.evil.test": False,
    "localhost@evil.test": False,
    "evil.test\\@127.0.0.1": False,
    "evil.test#@127.0.0.1": False,
    "127.0.0.1, evil.test": False,
    "[::1": False,
    "": False,
}


async def test_in_the_open_mode_a_rebound_name_reads_nothing(start: Open) -> None:
    """On a loopback address a page's own name, bound to that address, gets neither metrics nor parts; with a key it may."""
    app = await start(is_metrics_open=True, host="metrics.internal")
    for host, is_known in _HOSTS.items():
        async with visiting(app, "127.0.0.1", "http://127.0.0.1:8080", headers={"host": host}) as page:
            metrics, ready = await page.get("/metrics"), await page.get("/readyz")
            assert metrics.status_code == (200 if is_known else 403), host
            assert ("parts" in ready.json()) == is_known, host
            if not is_known:
                assert metrics.json()["error"]["code"] == "unknown_host"
                assert (await page.get("/metrics", headers=bearer(METRICS_KEY))).status_code == 200


async def test_the_open_mode_is_open_to_any_name_elsewhere(start: Open) -> None:
    """On other addresses names are the operator's own; a wrong key is still refused."""
    app = await start(is_metrics_open=True)
    async with visiting(app, url="http://192.0.2.9:8080", headers={"host": "gateway.internal"}) as scraper:
        assert (await scraper.get("/metrics")).status_code == 200
        assert "parts" in (await scraper.get("/readyz")).json()
        assert (await scraper.get("/metrics", headers=WRONG)).status_code == 401


async def test_two_hosts_in_one_request_are_none(start: Open) -> None:
    """A request with two `Host` headers names no host."""
    app = await start(is_metrics_open=True)
    scope = {"type": "http", "method": "GET", "path": "/metrics", "query_string": b"", "server": ("127.0.0.1", 1)}
    scope["headers"] = [(b"host", b"localhost"), (b"host", b"evil.test")]
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    assert sent[0]["status"] == 403


# -- guesses


@pytest.mark.parametrize("endpoint", ["login", "admin_api", "metrics", "readyz"])
async def test_guesses_are_slowed_counted_and_logged(
    start: Open, endpoint: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After five wrong keys the next is not read, be it right, wherever it comes; another address is not affected."""
    monkeypatch.setattr(
        app_module, "Guard", partial(Guard, clock=lambda: 100.0)
    )  # forty guesses may take over a second
    app = await start(log_format="json")

    async def guess(client: httpx.AsyncClient, key: str) -> httpx.Response:
        if endpoint == "login":
            return await log_in(client, key)
        path = {"admin_api": "/admin/api/teams", "metrics": "/metrics", "readyz": "/readyz"}[endpoint]
        return await client.get(path, headers=bearer(key))

    async with visiting(app, "192.0.2.66") as attacker, visiting(app, "192.0.2.1") as admin:
        statuses = [(await guess(attacker, f"guess {number}")).status_code for number in range(40)]
        assert statuses == [401] * 6 + [429] * 34
        refused = await guess(attacker, ADMIN_KEY)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert "Too many wrong keys came from your address. Wait 1 second" in refused.text
        assert COOKIE not in attacker.cookies
        assert (await guess(admin, ADMIN_KEY)).status_code in (200, 303, 503)
    assert refusals(app) == {(endpoint, "wrong"): 6.0, (endpoint, "not_read"): 35.0}
    app_module.logs.close()
    logged = [line for line in capfd.readouterr().err.splitlines() if '"wrong_key"' in line]
    assert len(logged) == 6
    assert all(f'"endpoint":"{endpoint}"' in line and '"client":"192.0.2.66"' in line for line in logged)
    assert not any("guess" in line for line in logged)


async def test_an_open_session_is_not_shut_out_by_its_address(start: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong keys of whoever shares the address delay no admin who is logged in; one in a session is slowed by his own."""
    monkeypatch.setattr(app_module, "Guard", partial(Guard, clock=lambda: 100.0))
    app = await start()
    async with visiting(app) as admin, visiting(app) as attacker:
        assert (await log_in(admin)).status_code == 303
        for _ in range(10):
            await log_in(attacker, "wrong")
            await attacker.get("/admin/api/teams", headers=WRONG)
        assert (await log_in(attacker)).status_code == 429
        assert (await admin.get("/admin/api/teams", headers=bearer(ADMIN_KEY))).status_code == 200
        assert (await log_in(admin)).status_code == 303
        attacker.cookies.set(COOKIE, "made-up", path="/admin")
        assert (await log_in(attacker)).status_code == 429
        guesses = [(await admin.get("/admin/api/teams", headers=WRONG)).status_code for _ in range(8)]
        assert guesses == [401] * 6 + [429] * 2


async def test_no_location_has_the_client_s_host(start: Open) -> None:
    """Whatever path is asked for, with a slash or several at its end: a redirect names a path alone."""
    app = await start()
    app.state.routes.clear()
    paths = [route.path for route in app.router.routes]  # type: ignore[attr-defined]
    async with visiting(app, headers={"host": "evil.example"}) as client:
        await log_in(client)
        for path in [*paths, "/admin/static", "/admin/static/style.css", "/nothing", "/static-offline-docs"]:
            for asked in (path, f"{path}/", f"{path}//", f"//evil.example/..{path}/"):
                reply = await client.get("http://gateway.test" + re.sub(r"\{[^}]*\}", "1", asked))
                assert "evil.example" not in reply.headers.get("location", "").partition("?")[0], asked
        assert (await client.get("/admin/teams/")).status_code == 200


async def test_a_stranger_does_not_close_another_door(start: Open) -> None:
    """A scraper with an old key slows itself alone: the admin at the same address logs in."""
    app = await start()
    async with visiting(app) as client:
        for _ in range(10):
            await client.get("/metrics", headers=WRONG)
        assert (await client.get("/metrics", headers=bearer(METRICS_KEY))).status_code == 429
        assert (await log_in(client)).status_code == 303
        assert (await client.get("/admin/api/teams", headers=bearer(ADMIN_KEY))).status_code == 200


async def test_the_metrics_key_buys_no_guesses(start: Open) -> None:
    """Only the admin's own key forgets the wrong ones before it: the metrics key between guesses does not."""
    app = await start()
    async with visiting(app) as client:
        for _ in range(3):
            statuses = [(await client.get("/metrics", headers=WRONG)).status_code for _ in range(4)]
            assert statuses == [401] * 4
            await client.get("/metrics", headers=bearer(ADMIN_KEY))
        for expected in ([401] * 4, [401, 401, 429, 429]):
            statuses = [(await client.get("/metrics", headers=WRONG)).status_code for _ in range(4)]
            assert statuses == expected
            await client.get("/metrics", headers=bearer(METRICS_KEY))


async def test_pauses_grow_to_a_minute_and_are_forgotten() -> None:
    """Five are free, then 1 s, 2 s and so on; each pause ends by itself, and an hour of quiet forgets all."""
    now_s = 1_000.0
    guesses = Guesses(lambda: now_s)
    pauses = []
    for _ in range(14):
        pauses.append(await guesses.add("login", "192.0.2.1"))
        assert await guesses.wait_s("login", "192.0.2.1") == pauses[-1]
        now_s += pauses[-1]
        assert await guesses.wait_s("login", "192.0.2.1") == 0.0
    assert pauses == [0, 0, 0, 0, 0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    now_s += 3_601
    assert await guesses.add("login", "192.0.2.1") == 0.0


async def test_many_addresses_take_bounded_memory() -> None:
    """Of ten thousand networks the last 4,096 are kept, and all addresses of a customer's IPv6 network are one client."""
    guesses = Guesses(lambda: 0.0)
    for number in range(10_000):
        await guesses.add("login", f"2001:db8:{number:x}::1")
    assert len(guesses.tries) == 4_096
    for number in range(6):
        await guesses.add("login", f"2001:db8:ffff:ff{number:02x}::{number}")
    assert await guesses.wait_s("login", "2001:db8:ffff:ff00:1:2:3:4") == 1.0
    assert await guesses.wait_s("login", "2001:db8:ffff:fe00::1") == 0.0


@pytest.mark.parametrize(
    ("client", "network"),
    [
        ("192.0.2.1", "192.0.2.1"),
        ("::ffff:192.0.2.1", "192.0.2.1"),
        ("2001:db8::1", "2001:db8::/56"),
        ("2001:db8:0:ff::1", "2001:db8::/56"),
        ("fe80::1%eth0", "fe80::/56"),
        ("", ""),
        ("/run/x.sock", ""),
    ],
)
def test_addresses_of_one_client(client: str, network: str) -> None:
    """An IPv4 address is itself in either notation; IPv6 addresses count by /56."""
    assert network_of(client) == network


# -- sessions


async def test_a_logout_ends_the_session_in_all_workers(start: Open) -> None:
    """A cookie that was copied before the logout opens nothing after it, in the same worker or another; other sessions go on."""
    here, there = await start(), await start()
    async with visiting(here) as browser, visiting(here) as other:
        assert (await log_in(browser)).status_code == 303
        assert (await log_in(other)).status_code == 303
        stolen = {COOKIE: browser.cookies[COOKIE]}
        for app in (here, there):
            async with visiting(app, "192.0.2.66", cookies=stolen) as thief:
                assert (await thief.get("/admin/api/teams")).status_code == 200
        out = await browser.post("/admin/logout", headers=OWN)
        assert (out.status_code, out.headers["location"]) == (303, "/admin/login")
        assert COOKIE not in browser.cookies
        for app in (here, there):
            async with visiting(app, "192.0.2.66", cookies=stolen) as thief:
                assert (await thief.get("/admin/api/teams")).status_code == 401
                assert (await thief.get("/admin/teams")).headers["location"] == "/admin/login?next=/admin/teams"
                assert (await thief.get("/admin/login")).status_code == 200
        async with visiting(there, cookies={COOKIE: other.cookies[COOKIE]}) as still:
            assert (await still.get("/admin/api/teams")).status_code == 200


async def test_a_new_admin_key_ends_all_sessions(start: Open) -> None:
    """So does another secret; the same key again finds them."""
    async with visiting(await start()) as browser:
        await log_in(browser)
        cookies = {COOKIE: browser.cookies[COOKIE]}
    for options, status in (
        ({"admin_key": "sk-another-admin-key"}, 401),
        ({"secret": "another-secret-of-the-hosts"}, 401),
        ({}, 200),
    ):
        async with visiting(await start(**options), cookies=cookies) as browser:
            assert (await browser.get("/admin/api/teams")).status_code == status


async def test_the_database_has_no_cookie(start: Open, tmp_path: Path) -> None:
    """A copy of the database opens no session: it has digests of tokens alone."""
    async with visiting(await start()) as browser:
        await log_in(browser)
        token = browser.cookies[COOKIE].encode()
    stored = b"".join(path.read_bytes() for path in tmp_path.glob("sameway.db*"))
    assert token not in stored
    assert ADMIN_KEY.encode() not in stored


async def test_without_the_database_no_session_is_open(start: Open) -> None:
    """Whether a session has ended cannot be told then: pages answer 503; the key still opens the metrics."""
    app = await start()
    async with visiting(app) as browser:
        await log_in(browser)
        async with app.state.parts.accounts.database.writing() as connection:
            await connection.execute(sa.text("DROP TABLE sessions"))
        for path in ("/admin", "/admin/teams", "/admin/api/teams"):
            reply = await browser.get(path)
            assert reply.status_code == 503
            assert "The database does not answer" in reply.text
            assert "default" not in reply.text
        assert (await log_in(browser)).status_code == 503
        assert (await browser.get("/metrics", headers=bearer(ADMIN_KEY))).status_code == 200


# -- behind a proxy


@pytest.mark.parametrize("proxies", [["10.0.0.0/8"], ["10.1.2.3", "172.16.0.0/12"]])
@pytest.mark.parametrize("peer", ["10.1.2.3", "::ffff:10.1.2.3"])
async def test_behind_a_proxy_with_tls_the_cookie_is_secure(start: Open, proxies: list[str], peer: str) -> None:
    """The proxy says that the browser came by https; a client that is no trusted proxy may say what it likes."""
    app = await start(trusted_proxies=proxies)
    for address, proto, is_secure in (
        (peer, "https", True),
        (peer, "http", False),
        ("192.0.2.1", "https", False),
    ):
        async with visiting(app, address, headers={"x-forwarded-proto": proto}) as browser:
            reply = await log_in(browser)
            assert ("; secure" in reply.headers["set-cookie"].lower()) == is_secure
            out = await browser.post("/admin/logout", headers={**OWN, "cookie": f"{COOKIE}={'x'}"})
            assert out.status_code == 303


async def test_behind_a_proxy_clients_are_told_apart(start: Open) -> None:
    """Guesses count for the address that the trusted proxies name, not for the proxy and not for what a client claims."""
    app = await start(trusted_proxies=["10.0.0.0/8"])

    async def status(peer: str, forwarded: str, key: str = "wrong") -> int:
        async with visiting(app, peer, headers={"x-forwarded-for": forwarded}) as client:
            return (await log_in(client, key)).status_code

    for number in range(8):
        await status("10.0.0.1", f"198.51.100.{number}, 192.0.2.66:40{number:02}, 10.0.0.2")
    assert await status("10.0.0.1", "192.0.2.66", ADMIN_KEY) == 429
    assert await status("10.9.9.9", "203.0.113.1, 192.0.2.66", ADMIN_KEY) == 429
    assert await status("10.0.0.1", "192.0.2.1", ADMIN_KEY) == 303
    for number in range(8):
        await status("192.0.2.77", f"198.51.100.{number}")
    assert await status("192.0.2.77", "192.0.2.1", ADMIN_KEY) == 429


async def test_a_key_is_taken_from_its_addresses_alone(start: Open) -> None:
    """The address is the one that the trusted proxies name; another is refused with what to do, and without `addresses` none is."""
    app = await start(trusted_proxies=["10.0.0.0/8"])
    accounts = app.state.parts.accounts
    bound = await accounts.create_key(accounts.team_ids["default"], "ci", addresses=["192.0.2.0/25", "2001:db8::/32"])
    free = await accounts.create_key(accounts.team_ids["default"], "free")

    async def ask(peer: str, forwarded: str, key: str = bound.plaintext) -> httpx.Response:
        async with visiting(app, peer, headers={"x-forwarded-for": forwarded, **bearer(key)}) as client:
            return await client.get("/v1/models")

    for peer, forwarded, status in (
        ("10.0.0.1", "192.0.2.7", 200),
        ("10.0.0.1", "2001:db8::5", 200),
        ("10.0.0.1", "192.0.2.200", 403),
        ("10.0.0.1", "192.0.2.7, 192.0.2.200", 403),
        ("::ffff:192.0.2.7", "", 200),
        ("192.0.2.200", "192.0.2.7", 403),
    ):
        assert (await ask(peer, forwarded)).status_code == status, (peer, forwarded)
    refused = (await ask("192.0.2.200", "")).json()["error"]
    assert refused["code"] == "address_not_allowed"
    assert "not taken from 192.0.2.200" in refused["message"]
    assert (await ask("192.0.2.200", "", free.plaintext)).status_code == 200


_PREFIX = "/tools/sameway"


@pytest.mark.parametrize("is_cut", [True, False])
@pytest.mark.parametrize("named", ["setting", "header"])
async def test_below_a_sub_path_all_links_lead_there(start: Open, named: str, is_cut: bool) -> None:
    """Of pages, forms, redirects and the cookie, and of /docs, whether or not the proxy cuts the sub-path off."""
    app = await start(**({"public_path": _PREFIX} if named == "setting" else {"trusted_proxies": ["10.0.0.0/8"]}))
    told = {"x-forwarded-prefix": _PREFIX} if named == "header" else {}
    below = "" if is_cut else _PREFIX
    async with visiting(app, "10.0.0.1", headers=told) as browser:
        assert (await browser.get(f"{below}/")).headers["location"] == f"{_PREFIX}/admin"
        reply = await browser.post(f"{below}/admin/login", data={"key": ADMIN_KEY}, headers=OWN)
        assert reply.headers["location"] == f"{_PREFIX}/admin"
        assert f"Path={_PREFIX}/admin;" in reply.headers["set-cookie"]
        cookie = {"cookie": reply.headers["set-cookie"].partition(";")[0]}
        page = (await browser.get(f"{below}/admin/teams", headers=cookie)).text
        assert re.findall(r' (?:href|src|action)="(/[^"]*)"', page)
        assert all(link.startswith(_PREFIX) for link in re.findall(r' (?:href|src|action)="(/[^"]*)"', page))
        script = re.findall(r' src="(/[^"]*)"', page)[0].removeprefix("" if below else _PREFIX)
        assert (await browser.get(script)).status_code == 200
        docs = (await browser.get(f"{below}/docs")).text
        assert f"{_PREFIX}/openapi.json" in docs
        static = re.findall(rf'"{_PREFIX}(/static[^"]*js)"', docs)[0]
        assert (await browser.get(f"{below}{static}")).status_code == 200
        assert (await browser.get(f"{below}/v1/models")).status_code == 401


@pytest.mark.parametrize("prefix", ["//evil.example", "/a b", "https://evil.example", "/..", '/"><script>'])
async def test_a_sub_path_is_believed_from_a_proxy_alone(start: Open, prefix: str) -> None:
    """And only where it is a path: a client that names one changes nothing."""
    app = await start(trusted_proxies=["10.0.0.0/8"])
    for peer, told in (("192.0.2.1", _PREFIX), ("10.0.0.1", prefix)):
        async with visiting(app, peer, headers={"x-forwarded-prefix": told}) as browser:
            assert (await browser.get("/")).headers["location"] == "/admin"


# -- where the login leads, and what pages allow


_ELSEWHERE = (
    "/admin/../../evil",
    "/admin/..%2f..%2fevil",
    "/admin/%2e%2e/%2e%2e/evil",
    "/admin/./../evil",
    "/admin/..;/evil",
    "/admin//evil.test",
    "//evil.test",
    "///evil.test",
    "/\\evil.test",
    "\\\\evil.test",
    "/admin\\..\\evil",
    "/admin/%5c%5cevil.test",
    "/admin/\tx",
    "/\t/evil.test",
    "/admin/\n/evil.test",
    "/admin/x\r\nset-cookie: a=b",
    "/admin/\u2025/evil",
    "/admin/\u2044evil",
    "https://evil.test/admin",
    "https:evil.test",
    "javascript:alert(1)",
    "data:text/html,x",
    "evil.test",
    "admin",
    "/administer",
    "/admin@evil.test",
    "/admin:x@evil.test",
    "/v1/models",
    " /admin/teams",
    "/admin/teams#x",
    "/admin/teams?x=\n",
    "",
)


async def test_the_login_leads_into_the_dashboard_alone(start: Open) -> None:
    """A `next` that is no plain path of the dashboard is left out, however it is written."""
    app = await start()
    async with visiting(app) as browser:
        for target in _ELSEWHERE:
            reply = await log_in(browser, params={"next": target})
            assert (reply.status_code, reply.headers["location"]) == (303, "/admin"), target


async def test_the_login_leads_back(start: Open) -> None:
    """The page that asked for the login is shown after it."""
    app = await start()
    for target in ("/admin", "/admin/teams/3", "/admin/requests?model=a%20b&cursor=1-2", "/admin/cache"):
        async with visiting(app) as browser:
            asked = await browser.get(target)
            reply = await browser.post(asked.headers["location"], data={"key": ADMIN_KEY}, headers=OWN)
            assert reply.headers["location"] == target


async def test_nothing_of_the_operators_is_cached_or_framed(start: Open) -> None:
    """Pages, redirects, API, errors, metrics and descriptions: none may be stored, and none shows in a frame."""
    app = await start()
    async with visiting(app) as browser:
        await log_in(browser)
        for path in (
            "/admin",
            "/admin/teams/99",
            "/admin/login",
            "/admin/nothing",
            "/admin/api/teams",
            "/admin/api/nothing",
            "/admin/api/ledger.csv",
            "/metrics",
            "/readyz",
            "/docs",
            "/openapi.json",
            "/",
        ):
            reply = await browser.get(path)
            assert reply.headers["cache-control"] == "no-store", path
            assert reply.headers["x-frame-options"] == "DENY", path
            assert reply.headers["x-content-type-options"] == "nosniff", path


async def test_no_form_takes_a_foreign_page(start: Open) -> None:
    """Every POST of the dashboard, login and logout among them, and every change of the API by session is refused from elsewhere."""
    app = await start()
    forms = [
        ("POST", route.path)
        for route in app.routes
        if isinstance(route, APIRoute)
        and re.match(r"/admin(?!/api|/sign-in/logout)", route.path)
        and "POST" in (route.methods or ())
    ]
    assert len(forms) > 20
    assert {("POST", "/admin/login"), ("POST", "/admin/logout"), ("POST", "/admin/cache/purge")} <= set(forms)
    changes = [
        (method.upper(), path)
        for path, item in app.openapi()["paths"].items()
        if path.startswith("/admin/api/")
        for method in item
        if method != "get"
    ]
    assert len(changes) > 10
    async with visiting(app) as browser:
        await log_in(browser)
        for method, path in [*forms, *changes]:
            url = re.sub(r"\{\w+\}", "1", path)
            for headers in (
                {},
                {"sec-fetch-site": "cross-site"},
                {"sec-fetch-site": "same-site"},
                {"sec-fetch-site": "cross-site", "origin": "http://gateway.test"},
                {"origin": "https://evil.test"},
                {"origin": "null"},
                {"origin": "http://[", "host": "gateway.test"},
                {"origin": "http://gateway.test.evil.test"},
            ):
                options: Any = {"json": {"name": "x"}} if "/api/" in path else {"data": {"key": ADMIN_KEY}}
                reply = await browser.request(method, url, headers=headers, **options)
                assert reply.status_code == 403, (path, headers)
                assert "set-cookie" not in reply.headers
        assert (await browser.get("/admin/api/teams")).json()["teams"][0]["name"] == "default"


async def test_a_login_that_is_refused_says_how_to_go_on(redis: Redis, tmp_path: Path) -> None:
    """The form says that the key was wrong, then how long to wait, and works again after that."""
    async with open_world(redis, tmp_path) as world:
        await _refused_logins(world)


async def _refused_logins(world: World) -> None:
    key = str(world.admin.settings.admin_key)
    async with visiting(world.app) as browser:
        for _ in range(5):
            assert "That is not the admin key." in (await log_in(browser, "wrong")).text
        await log_in(browser, "wrong")
        reply = await log_in(browser, key)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert "Wait 1 second, then send the right one." in reply.text
        world.now_s += 1
        assert (await log_in(browser, key)).status_code == 303
    assert world.refused_keys == {("login", "wrong"): 6, ("login", "not_read"): 1}


async def test_all_workers_count_the_same_wrong_keys(redis_server: RedisServer, redis: Redis) -> None:
    """Five at one worker and one at another make all wait; the right key ends it for all; without Redis each counts its own."""
    link = RedisLink(redis_server.url, 1.0)
    here, there = (Guesses(lambda: 0.0, link) for _ in range(2))
    for _ in range(5):
        assert await here.add("login", "192.0.2.1") == 0.0
    assert await there.add("login", "192.0.2.1") == 1.0
    assert 0.0 < await here.wait_s("login", "192.0.2.1") <= 1.0
    assert await here.wait_s("login", "192.0.2.2") == await here.wait_s("metrics", "192.0.2.1") == 0.0
    await there.forget("login", "192.0.2.1")
    assert await here.wait_s("login", "192.0.2.1") == 0.0
    await link.aclose()
    away = RedisLink("redis://127.0.0.1:1", 0.2)
    alone = Guesses(lambda: 0.0, away)
    assert [await alone.add("login", "192.0.2.1") for _ in range(6)] == [0.0] * 5 + [1.0]
    await away.aclose()
