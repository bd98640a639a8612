"""Where requests go, and that the record says why."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from gateway import app as app_module
from gateway.app import create_app, served
from gateway.settings import Settings
from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway, deployment, wait_for
from tests.e2e.upstream import Upstream
from tests.e2e.worker import keep_collector
from tests.services import RedisServer

_fresh = itertools.count()


def record_of(gateway: Gateway, reply: Any) -> dict[str, Any]:
    """The canonical log line of a reply."""
    request_id = reply.headers["x-request-id"]

    def found() -> list[dict[str, Any]]:
        return [r for r in gateway.records() if r["request_id"] == request_id]

    wait_for(lambda: bool(found()))
    assert len(found()) == 1
    return found()[0]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("model", "failed", "answered"), [("flaky", "failing", "backup"), ("hanging", "hangs", "answers")]
)
def test_failover_before_the_first_chunk(
    gateway: Gateway, upstream: Upstream, model: str, failed: str, answered: str, is_stream: bool
) -> None:
    """A deployment that fails or hangs costs the client nothing but time; the record names both."""
    reply = gateway.chat(f"failover {next(_fresh)}", model=model, stream=is_stream)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-sameway-backend"] == answered
    record = record_of(gateway, reply)
    tried = [attempt.split(":")[0] for attempt in record["attempts"]]
    assert tried[-1] == answered
    assert failed in tried or any(r.startswith(failed) for r in record["rejected"])
    assert record["why"]


def test_a_failing_deployment_is_left_alone(gateway: Gateway, upstream: Upstream) -> None:
    """After enough failures the breaker opens: the deployment is rejected with its reason instead of being tried."""

    def is_left_alone() -> bool:
        """After eight requests more; on a busy machine the breaker's rest may end between a request and the look."""
        for _ in range(8):
            reply = gateway.chat(f"breaker {next(_fresh)}", model="flaky")
            assert reply.status_code == 200
        view = gateway.admin("GET", "/deployments")["deployments"]
        failing = next(d for d in view if d["name"] == "failing")
        is_rejected = any("failing" in r for r in record_of(gateway, reply).get("rejected", []))
        return is_rejected and not failing["is_available"] and bool(failing["reason"])

    wait_for(is_left_alone, 60)


async def test_what_has_become_slow_is_waited_for(
    redis_server: RedisServer, redis: Redis, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time that was learned from fast answers is given up where nobody else can answer: a few requests later it suffices."""
    keep_collector(monkeypatch)
    monkeypatch.setattr(app_module, "start_loops", lambda parts, stack: None)
    settings = Settings(
        data_dir=tmp_path,
        redis_url=redis_server.url,
        api_key=API_KEY,
        engines={},
        cache={"is_semantic": False},  # type: ignore[arg-type]
        models={"mock": {"deployments": [deployment(upstream.url, "plain", "mock?delay_ms=1000")]}},  # type: ignore[dict-item]
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        (slow,) = app.state.parts.fleet.deployments
        slow.ttft_timeout_min_ms = 50.0
        for _ in range(60):
            slow.estimate.observe(10.0, 1.0, 20)
        headers = {"authorization": f"Bearer {API_KEY}"}
        body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(served(app)), base_url="http://test", headers=headers
        ) as client:
            statuses = [(await client.post("/v1/chat/completions", json=body)).status_code]
            while statuses[-1] != 200 and len(statuses) < 12:
                slow.health.reset()  # it would have rested in between
                statuses.append((await client.post("/v1/chat/completions", json=body)).status_code)
    assert statuses[0] == 504
    assert statuses[-1] == 200


async def test_a_refused_key_is_marked_and_takes_no_host_out_of_service(
    redis_server: RedisServer, redis: Redis, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deployments page and the problems say that the key is refused; readiness stays, because every host has that key."""
    keep_collector(monkeypatch)
    monkeypatch.setattr(app_module, "start_loops", lambda parts, stack: None)
    settings = Settings(
        data_dir=tmp_path,
        redis_url=redis_server.url,
        api_key=API_KEY,
        admin_key=ADMIN_KEY,
        engines={},
        cache={"is_semantic": False},  # type: ignore[arg-type]
        models={"mock": {"deployments": [deployment(upstream.url, "plain", "mock?status=401;body=auth")]}},  # type: ignore[dict-item]
    )
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        body = {"model": "mock", "messages": [{"role": "user", "content": "hello"}]}
        async with httpx.AsyncClient(transport=httpx.ASGITransport(served(app)), base_url="http://test") as client:
            key, admin = ({"authorization": f"Bearer {one}"} for one in (API_KEY, ADMIN_KEY))
            for _ in range(6):
                reply = await client.post("/v1/chat/completions", json=body, headers=key)
                assert (reply.status_code, reply.json()["error"]["code"]) == (424, "upstream_denied")
            (shown,) = (await client.get("/admin/api/deployments", headers=admin)).json()["deployments"]
            problems = (await client.get("/admin/api/status", headers=admin)).json()["problems"]
        app.state.parts.watch.was_ready = True  # there is no cache worker here
        report = app.state.parts.watch.report()
    assert len(upstream.seen().requests) == 3
    assert (shown["denial"], shown["is_available"]) == ("key refused (HTTP 401)", False)
    assert shown["reason"].startswith("key refused (HTTP 401), next try in ")
    assert any("key refused" in problem["message"] for problem in problems)
    assert (report["is_ready"], report["is_degraded"], report["parts"]["plain"]["health"]) == (True, True, "down")


def test_recent_routes_explain_themselves(gateway: Gateway) -> None:
    """The admin sees where a request went, why, and why each other candidate lost."""
    reply = gateway.chat(f"explain {next(_fresh)}", model="flaky")
    request_id = reply.headers["x-request-id"]

    def found() -> list[Any]:
        routes = gateway.admin("GET", "/routes", params={"model": "flaky"})["routes"]
        return [route for route in routes if route["request_id"] == request_id]

    wait_for(lambda: bool(found()))
    route = found()[0]
    assert route["deployment"] == "backup"
    assert route["why"]
    assert {"failing"} <= {r["name"] for r in route["rejected"]} | {a["name"] for a in route["attempts"]}
