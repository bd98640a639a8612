"""LiteLLM's proxy, with the settings that its documentation gives for production and for benchmarks.

One uvicorn worker on uvloop and httptools (its granian server measured the same), a master key, no database, no callbacks,
no retries, logs at ERROR, the price table that it bundles. OpenTelemetry is installed, as in its own images: without it this
version tries to import it again on each request, and takes three times as long. Misses are measured with its cache off,
which is its fastest; hits with its in-memory and its Redis cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from bench.lab.native import WORK, Stub
from bench.lab.processes import BenchError, Child, answers
from bench.lab.systems import Running, Setup, Target, clean_environment, environment_of, free_port, start_redis

_VERSION = "1.106.2"
_REQUIREMENTS = [
    f"litellm[proxy]=={_VERSION}",
    "httptools==0.9.0",
    "opentelemetry-sdk==1.45.2",
    "opentelemetry-exporter-otlp==1.45.2",
]
_KEY = "sk-bench"
_START_TIMEOUT_S = 90.0
_ENVIRON = {
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "DISABLE_ADMIN_UI": "True",
    "NO_DOCS": "True",
}


class LiteLLM:
    """The proxy of the PyPI package `litellm[proxy]`, in an environment of its own."""

    name = "litellm"

    def install(self) -> None:
        environment_of("litellm", _REQUIREMENTS)

    def lacks(self, setup: Setup) -> str | None:
        if setup is Setup.TRACED:
            return "its spans are not those of this bench"
        return "its semantic cache calls an embedding API per request" if setup is Setup.SEMANTIC else None

    def configuration(self, setup: Setup) -> str:
        return setup.value

    def start(self, setup: Setup, stub: Stub, folder: Path) -> Running:
        children: list[Child] = []

        def stop() -> None:
            for child in reversed(children):
                child.stop()

        try:
            redis_port = None
            if setup is Setup.HIT_REDIS:
                redis, redis_port = start_redis(folder)
                children.append(redis)
            config = folder / "litellm.yaml"
            config.write_text(yaml.safe_dump(_settings(setup, stub, redis_port)))
            port = free_port()
            workers = 2 if setup is Setup.TWO_WORKERS else 1
            binary = WORK / "litellm" / "bin" / "litellm"
            flags = {
                "--config": config,
                "--host": "127.0.0.1",
                "--port": port,
                "--num_workers": workers,
                "--telemetry": False,
            }
            command = [str(binary), *(str(word) for flag in flags.items() for word in flag)]
            children.append(Child(command, folder / "litellm.log", clean_environment(**_ENVIRON), folder))
            children[-1].wait_until(lambda: answers(f"http://127.0.0.1:{port}/health/liveliness"), _START_TIMEOUT_S)
        except BaseException:
            stop()
            raise
        return Running(
            port=port,
            roots=tuple(child.pid for child in children),
            stop=stop,
            version=_VERSION,
            instant=Target("instant", headers={"authorization": f"Bearer {_KEY}"}),
            paced=Target("paced", headers={"authorization": f"Bearer {_KEY}"}),
            role_of=lambda line: "redis" if "redis-server" in line else "gateway",
        )


def _settings(setup: Setup, stub: Stub, redis_port: int | None) -> dict[str, Any]:
    def model(name: str, path: str) -> dict[str, Any]:
        params = {
            "model": "openai/gpt-4o-mini",
            "api_base": f"http://127.0.0.1:{stub.port}{path}",
            "api_key": "sk-stub",
        }
        return {"model_name": name, "litellm_params": params}

    litellm: dict[str, Any] = {"callbacks": [], "num_retries": 0, "request_timeout": 60, "set_verbose": False}
    if setup is Setup.HIT_MEMORY or setup is Setup.TWO_WORKERS:
        litellm |= {"cache": True, "cache_params": {"type": "local"}}
    if setup is Setup.HIT_REDIS:
        if redis_port is None:
            raise BenchError("litellm: no Redis for its cache")
        litellm |= {
            "cache": True,
            "cache_params": {"type": "redis", "host": "127.0.0.1", "port": redis_port, "ttl": 3600},
        }
    return {
        "model_list": [model("instant", "/v1"), model("paced", "/pace/10/v1")],
        "general_settings": {"master_key": _KEY},
        "litellm_settings": litellm,
    }
