"""One upstream and one gateway in front of it, shared by the tests that only talk to them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from redis.asyncio import Redis

from gateway.settings import Settings
from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway
from tests.e2e.upstream import Upstream, run_upstream
from tests.e2e.worker import Host, NewHost, open_worker
from tests.services import RedisServer


@pytest.fixture(scope="session")
def upstream_process() -> Iterator[Upstream]:
    with run_upstream() as server:
        yield server


@pytest.fixture
def upstream(upstream_process: Upstream) -> Upstream:
    """The shared upstream, with nothing seen yet."""
    upstream_process.reset()
    return upstream_process


@pytest.fixture(scope="session")
def shared_gateway(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with a few aliases at the upstream; ready, cache worker included."""
    url = upstream_process.url

    def at(name: str, model: str = "mock", **more: object) -> dict[str, object]:
        return deployment(url, name, model, **more)

    free = {"price": {}}  # the cheapest is tried first

    config = {
        "body_bytes_max": 1_000_000,
        "models": {
            "mock": {"deployments": [at("plain")]},
            "masked": {"mask": True, "deployments": [at("masked")]},
            "dear": {"deployments": [at("dear", output_tokens_max=1000)]},
            "slow": {"deployments": [at("slow", "mock?pace_ms=80;chunks=20")]},
            "late": {"deployments": [at("late", "mock?delay_ms=1500")]},
            "later": {"deployments": [at("later", "mock?delay_ms=3000")]},
            "flaky": {
                "policy": "cheapest",
                "deployments": [at("failing", "mock?status=500", **free), at("backup")],
            },
            "other-model": {
                "policy": "cheapest",
                "deployments": [at("down", "big?status=500", **free), at("small", "small")],
            },
            "hanging": {
                "policy": "cheapest",
                "deployments": [at("hangs", "mock?hang=headers", **free, ttft_timeout_ms=300), at("answers")],
            },
            "cut": {"deployments": [at("cutter", "mock?cut=middle")]},
            "cut-too": {"deployments": [at("cutter-too", "mock?cut=middle")]},
            "cut-responses": {"deployments": [at("cutter-responses", "mock?cut=middle")]},
            "cut-three": {"deployments": [at("cutter-three", "mock?cut=middle")]},
            "busy": {"deployments": [at("busy", "mock?status=429;retry_after=7")]},
            "busy-too": {"deployments": [at("busy-too", "mock?status=429;retry_after=7")]},
            "throttled": {"deployments": [at("throttled", "mock?status=429;retry_after=7")]},  # of one test
            "no-text": {"deployments": [at("no-text", "mock?note=bytes")]},
            "out-of-range": {"deployments": [at("out-of-range", "mock?note=range;is_stream=1")]},
            "rejecting": {"deployments": [at("rejecting", "mock?status=400")]},
            "long": {"deployments": [at("long", "mock?finish=length")]},
            "filtered": {"deployments": [at("filtered", "mock?finish=content_filter")]},
            "limited": {"deployments": [at("no-tools", capabilities=[])]},
            "narrow": {"deployments": [at("narrow", context_tokens_max=50)]},
        },
    }
    with run_gateway(tmp_path_factory.mktemp("gateway"), config) as running:
        running.wait_ready()
        yield running


@pytest.fixture
def gateway(shared_gateway: Gateway) -> Gateway:
    """The shared gateway with an empty cache: what another test asked is no hit of this one, be it by meaning."""
    shared_gateway.admin("POST", "/cache/purge", json={"all": True, "dry_run": False})
    return shared_gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[OpenAI]:
    """The official client, pointed at the gateway and changed in nothing else."""
    with OpenAI(base_url=gateway.base_url, api_key=API_KEY, max_retries=0, timeout=30) as made:
        yield made


@pytest.fixture
async def new_host(
    redis_server: RedisServer, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[NewHost]:
    async with AsyncExitStack() as stack:

        async def opened(models: dict[str, Any], **more: Any) -> Host:
            settings = Settings(
                data_dir=tmp_path,
                redis_url=redis_server.url,
                api_key=API_KEY,
                secret="s" * 32,
                engines={},
                cache={"is_semantic": False},  # type: ignore[arg-type]
                models={name: {"deployments": given} for name, given in models.items()},  # type: ignore[misc]
                **more,
            )
            worker = await stack.enter_async_context(open_worker(settings, monkeypatch))
            host = Host(worker.parts, worker.port)
            stack.push_async_callback(host.aclose)
            return host

        yield opened
