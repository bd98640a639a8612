"""What the host says of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gateway.deployments.fleet import build_fleet
from gateway.settings import Settings
from gateway.telemetry.health import HealthMonitor
from gateway.telemetry.parts import Health


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
