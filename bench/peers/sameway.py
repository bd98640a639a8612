"""Sameway as its users start it: `python -m gateway serve`, everything on, its embedded Redis and SQLite in a fresh folder.

The asking team has rate limits and a hard budget that it never reaches, and every answer has a price: limits, money and the
ledger work on each request. A second team has neither limits nor a budget.
"""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from bench.lab.native import BENCH
from bench.lab.processes import BenchError, Child, answers
from bench.lab.systems import Running, Setup, Target, Upstream, clean_environment

_ADMIN_KEY = "sk-admin-bench-0123456789"
_START_TIMEOUT_S = 60.0
_LIMITS = {"requests_per_min": 100_000_000, "tokens_per_min": 100_000_000_000}
_BUDGET = {"window": "day", "limit_microusd": 10**14, "is_hard": True}


class Sameway:
    """The gateway of `checkout`, run by the interpreter `python`; by default those of this bench.

    `environ`: variables beside those of the bench. `verifier`: the path of the upstream that answers a verifier's questions, for a
    sixteenth of the price; without it there is none. `cache`: settings of that section, beside the setup's.
    """

    name = "sameway"

    def __init__(
        self,
        *,
        checkout: Path = BENCH.parent,
        python: str = sys.executable,
        environ: Mapping[str, str] | None = None,
        verifier: str | None = None,
        **cache: object,
    ) -> None:
        self._checkout = checkout
        self._python = python
        self._environ = environ or {}
        self._verifier = verifier
        self._cache = cache

    def install(self) -> None:
        """It runs in the bench's own environment."""

    def lacks(self, setup: Setup) -> str | None:
        return None

    def configuration(self, setup: Setup) -> str:
        return "plain" if setup in (Setup.MISS, Setup.HIT_MEMORY) else setup.value

    def start(self, setup: Setup, stub: Upstream, folder: Path) -> Running:
        config = folder / "sameway.yaml"
        config.write_text(yaml.safe_dump(_settings(setup, stub, folder, self._cache, self._verifier)))
        command = [self._python, "-m", "gateway", "serve", "--config", str(config), "--port", "0"]
        environ = clean_environment(SAMEWAY_ADMIN_KEY=_ADMIN_KEY, **self._environ)
        child = Child(command, folder / "sameway.log", environ, self._checkout)
        try:
            child.wait_until(lambda: _port(child) is not None, _START_TIMEOUT_S)
            port = _port(child)
            assert port is not None
            child.wait_until(lambda: answers(f"http://127.0.0.1:{port}/readyz"), _START_TIMEOUT_S)
            keys = [_make_team(port, name, limits, budgets) for name, limits, budgets in _TEAMS]
        except BaseException:
            child.stop()
            raise
        return Running(
            port=port,
            roots=(child.pid,),
            stop=child.stop,
            version=metadata.version("sameway"),
            instant=Target("instant", headers={"authorization": f"Bearer {keys[0]}"}),
            paced=Target("paced", headers={"authorization": f"Bearer {keys[0]}"}),
            unbudgeted=Target("instant", headers={"authorization": f"Bearer {keys[1]}"}),
            tally="x-sameway-cache",
            role_of=_role_of,
        )


_TEAMS: tuple[tuple[str, dict[str, Any], list[dict[str, Any]]], ...] = (
    ("bench", _LIMITS, [_BUDGET]),
    ("bench-free", {}, []),
)


def _settings(
    setup: Setup, stub: Upstream, folder: Path, cache: Mapping[str, object], verifier: str | None
) -> dict[str, Any]:
    def model(path: str, share: float = 1.0) -> dict[str, Any]:
        price = {"input_usd_per_mtok": share, "output_usd_per_mtok": 2.0 * share}
        deployment = {
            "backend": "openai",
            "base_url": f"http://127.0.0.1:{stub.port}{path}",
            "model": "stub",
            "price": price,
        }
        return {"deployments": [{**deployment, "output_tokens_max": 4096, "context_tokens_max": 131_072}]}

    return {
        "data_dir": str(folder / "data"),
        "workers": 2 if setup is Setup.TWO_WORKERS else 1,
        "log_format": "json",
        "engines": {},
        # the upstream takes any body, and a receiver's answer has no content that matters
        **({"traces": {"endpoint": f"http://127.0.0.1:{stub.port}/v1/traces"}} if setup is Setup.TRACED else {}),
        "cache": {
            "is_semantic": setup in (Setup.SEMANTIC, Setup.WORDS),
            "check_share": 0 if setup is Setup.WORDS else 0.03,
            **({"l1_bytes_max": 0} if setup in (Setup.HIT_REDIS, Setup.WORDS) else {}),
            **({"verifier": "verifier"} if verifier is not None else {}),
            **cache,
        },
        "models": {
            "instant": model("/v1"),
            "paced": model("/pace/10/v1"),
            **({"verifier": model(verifier, 1 / 16)} if verifier is not None else {}),
        },
    }


def _port(child: Child) -> int | None:
    found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", child.log_path.read_text(errors="replace"))
    return int(found[1]) if found else None


def _make_team(port: int, name: str, limits: dict[str, Any], budgets: list[dict[str, Any]]) -> str:
    """A team with a key, through the admin API; the answer is the key."""
    team = _admin(port, "teams", {"name": name, **limits})["id"]
    for budget in budgets:
        _admin(port, f"teams/{team}/budgets", budget)
    return str(_admin(port, f"teams/{team}/keys", {"name": name})["plaintext"])


def _admin(port: int, path: str, body: dict[str, Any]) -> Any:
    headers = {"authorization": f"Bearer {_ADMIN_KEY}", "content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/admin/api/{path}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=10.0) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise BenchError(f"sameway: POST {path}: {error.code} {error.read()[:300]!r}") from None


def _role_of(command: str) -> str:
    for role, mark in (
        ("redis", "redis.sock"),
        ("cache", "cache.worker"),
        ("engine", "local_engine"),
        ("gateway", " worker "),
    ):
        if mark in command:
            return role
    return "supervisor"
