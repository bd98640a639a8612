"""What the host says of its parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from cache.redis_link import RedisLink
from gateway.deployments.fleet import build_fleet
from gateway.settings import Settings
from gateway.telemetry.health import HealthMonitor
from gateway.telemetry.parts import Health
from tests.services import run_redis


def test_a_remote_deployment_that_never_answered_says_so(tmp_path: Path) -> None:
    """It may be asked, so it is not down; that it works is known after its first answer."""
    api = {"name": "api", "backend": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    models = {"small": {"deployments": [api]}}
    settings = Settings.model_validate({"data_dir": tmp_path, "models": models})
    others: Any = None
    fleet = build_fleet(settings, lambda: 0.0, others)
    monitor = HealthMonitor(settings, others, others, others, others, fleet, others, others)

    def of_api() -> tuple[Health, str]:
        (part,) = [part for part in monitor.parts() if part.name == "api"]
        return part.health, part.detail

    assert of_api() == (Health.OK, "no answer from it yet")
    (deployment,) = fleet.deployments
    deployment.estimate.observe(10.0, 1.0, 20)
    assert of_api() == (Health.OK, "")


async def test_a_redis_that_may_evict_says_so(tmp_path: Path) -> None:
    """Its policy is beside its state, with what it may cost and what to set."""
    settings = Settings.model_validate({"data_dir": tmp_path})
    others: Any = None
    with run_redis(extra=("--maxmemory-policy", "allkeys-lru")) as server:
        link = RedisLink(server.url, 1.0)
        fleet = build_fleet(settings, lambda: 0.0, others)
        monitor = HealthMonitor(settings, link, others, others, others, fleet, others, others)
        looking = asyncio.create_task(monitor.run(others))
        async with asyncio.timeout(5):
            while "set maxmemory-policy noeviction" not in monitor.parts()[0].detail:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        looking.cancel()
        await link.aclose()
