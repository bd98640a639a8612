"""What the host says of its parts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from cache.redis_link import RedisLink
from gateway.deployments.fleet import Fleet, build_fleet
from gateway.settings import Settings
from gateway.telemetry.health import HealthMonitor
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.parts import PartHealth
from policies.breaker import Asker
from policies.replicas import Reading
from tests.services import run_redis


def monitor_of(settings: Settings, fleet: Fleet, link: Any = None) -> HealthMonitor:
    """A monitor of the deployments, with none of the other parts but Redis if `link` is given."""
    absent = dict.fromkeys(("accounts", "writer", "semantic", "money", "pipeline"))
    return HealthMonitor(settings=settings, fleet=fleet, link=link, **absent)


def test_a_remote_deployment_that_never_answered_says_so(tmp_path: Path) -> None:
    """It may be asked, so it is not down; that it works is known after its first answer."""
    api = {"name": "api", "backend": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    models = {"small": {"deployments": [api]}}
    settings = Settings.model_validate({"data_dir": tmp_path, "models": models})
    others: Any = None
    fleet = build_fleet(settings, lambda: 0.0, others)
    monitor = monitor_of(settings, fleet)

    def of_api() -> tuple[PartHealth, str]:
        (part,) = [part for part in monitor.parts() if part.name == "api"]
        return part.health, part.detail

    assert of_api() == (PartHealth.UNASKED, "no answer from it yet")
    (deployment,) = fleet.deployments
    deployment.health.succeeded(Asker("chat:"))
    assert of_api() == (PartHealth.OK, "")


def test_a_replicas_own_queue_is_a_gauge(tmp_path: Path) -> None:
    """What a server's metrics say of its requests is told; without them nothing is, and no zero."""
    pool = {"backend": "openai", "model": "m", "replicas": ["http://127.0.0.1:9/v1"]}
    settings = Settings.model_validate({"data_dir": tmp_path, "models": {"a": {"deployments": [pool]}}})
    fleet, metrics = build_fleet(settings, lambda: 0.0, cast(Any, None)), Metrics(None)
    (replica,) = fleet.deployments
    assert replica.backlog is not None
    for reading, told in ((Reading(running=4, waiting=2, kv_used=0.5), {"4.0", "2.0", "0.5"}), (None, set())):
        replica.backlog.take(reading)
        monitor_of(settings, fleet).set_deployment_gauges(metrics)
        lines = metrics.render().decode().splitlines()
        own = [line for line in lines if line.startswith(("sameway_replica_", "sameway_engine_kv"))]
        assert {line.rpartition(" ")[2] for line in own} == told


@pytest.mark.parametrize(("denial", "cause"), [("key refused (HTTP 401)", "denied"), ("", "failed")])
def test_health_is_what_happened_last_everywhere(tmp_path: Path, denial: str, cause: str) -> None:
    """Long after its last failure a deployment is down in `/readyz` and in the metrics, its model by cause; a success ends it.

    The host stays ready: another one has the same provider, and only a request can find it well.
    """
    api = {"backend": "openai", "model": "m", "base_url": "http://127.0.0.1:9/v1"}
    models = {name: {"deployments": [{"name": f"{name}-api", **api}]} for name in ("dead", "unasked")}
    settings = Settings.model_validate({"data_dir": tmp_path, "models": models})
    now_s, others = [0.0], cast(Any, None)
    fleet = build_fleet(settings, lambda: now_s[0], others)
    monitor = monitor_of(settings, fleet)
    metrics = Metrics(None)
    dead = fleet.alias("dead").deployments["dead-api"]

    def seen() -> tuple[PartHealth, str, set[str]]:
        (part,) = [part for part in monitor.parts() if part.name == "dead-api"]
        monitor.set_deployment_gauges(metrics)
        lines = metrics.render().decode().splitlines()
        shown = [
            line for line in lines if line.startswith(("sameway_deployment_available", "sameway_model_unavailable"))
        ]
        return part.health, part.detail, {line for line in shown if "available{dep" in line or line.endswith(" 1.0")}

    assert seen() == (PartHealth.UNASKED, "no answer from it yet", set())
    for number in range(3):
        dead.health.failed(Asker("chat:", request=f"r{number}"), denial=denial)
    now_s[0] += 10_000.0
    health, detail, shown = seen()
    assert health is PartHealth.DOWN
    assert detail.endswith(", the next request tries it")
    assert shown == {
        'sameway_deployment_available{deployment="dead-api"} 0.0',
        f'sameway_model_unavailable{{cause="{cause}",model="dead"}} 1.0',
    }
    monitor.was_ready = True
    assert (monitor.report()["is_ready"], monitor.report()["is_degraded"]) == (True, True)
    probe = Asker("chat:", request="probe")
    assert dead.health.begin(probe)
    dead.health.succeeded(probe)
    assert seen() == (PartHealth.OK, "", {'sameway_deployment_available{deployment="dead-api"} 1.0'})
    metrics.close()


async def test_a_redis_that_may_evict_says_so(tmp_path: Path) -> None:
    """Its policy is beside its state, with what it may cost and what to set."""
    settings = Settings.model_validate({"data_dir": tmp_path})
    others: Any = None
    with run_redis(extra=("--maxmemory-policy", "allkeys-lru")) as server:
        link = RedisLink(server.url, 1.0)
        fleet = build_fleet(settings, lambda: 0.0, others)
        monitor = monitor_of(settings, fleet, link)
        looking = asyncio.create_task(monitor.run(others))
        async with asyncio.timeout(30):
            while "set maxmemory-policy noeviction" not in monitor.parts()[0].detail:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        looking.cancel()
        await link.aclose()
