"""Faults of all kinds at once, over two workers and real processes: every request has one honest end, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.test_faults import VICTIMS, assert_money_agrees
from tests.e2e.upstream import Upstream

_DEADLINE_S = 20.0  # of a request; each fault's own limit is far below
_REQUESTS, _AT_ONCE = 240, 24
# how an upstream fails: before its answer, inside it, or not at all
FAULTS = {
    "plain": "mock?delay_ms=1",
    "paced": "mock?pace_ms=5;chunks=12",
    "refuses": "mock?status=503",
    "busy": "mock?status=429;retry_after=1",
    "rejects": "mock?status=400",
    "silent": "mock?hang=headers",
    "stalls": "mock?hang=middle",
    "cut": "mock?cut=middle;chunks=12",
    "reset": "mock?cut=middle;reset=1;chunks=12",
    "error": "mock?error=middle;chunks=12",
    "garbage": "mock?malformed=middle;chunks=12",
    "large": "mock?huge=3000000",
}
ENDS = ("complete", "status", "in-band")
_WELL = "mock?delay_ms=1"
# a second deployment goes on with a stream, or is asked beside a slow first one; another worker's answer is awaited
_TOGETHER = {
    "continued": "sameway_rescues_total",
    "hedged": "sameway_hedges_total",
    "slow": "sameway_awaited_requests_total",
}


def _config(url: str) -> dict[str, Any]:
    quick = {"ttft_timeout_ms": 400, "idle_timeout_ms": 400}

    def broken(name: str, model: str) -> dict[str, Any]:
        return deployment(url, f"{name}-broken", model, **quick)

    # a lone deployment that is silent is given more and more time
    alone = {
        name: {"deployments": [broken(f"{name}-alone", model)]} for name, model in FAULTS.items() if name != "silent"
    }
    saved = {
        f"{name}-saved": {
            "policy": "cheapest",
            "deployments": [broken(name, model), deployment(url, f"{name}-well", _WELL)],
        }
        for name, model in FAULTS.items()
    }
    dearer = {"input_usd_per_mtok": 1.1, "output_usd_per_mtok": 2.2}
    goes_on = deployment(url, "goes-on", "mock?chunks=12", capabilities=["prefill"])
    together = {
        "continued": {"deployments": [broken("continued", FAULTS["cut"]), goes_on], "policy": "cheapest"},
        # the first one has no plan of its own: it is slow from the moment that the upstream's plan says so
        "hedged": {
            "hedge_cost_max": 1.0,
            "policy": "cheapest",
            # dearer, so that the slow one stays the first choice
            "deployments": [deployment(url, "hedged", "mock"), {**deployment(url, "beside", _WELL), "price": dearer}],
        },
        "slow": {"deployments": [deployment(url, "slow", "mock?delay_ms=400")]},
    }
    budgets = {"hold_lease_s": 5}
    return {"workers": 2, "models": {**alone, **saved, **together}, "budgets": budgets, "redis_timeout_ms": 300}


async def _ask(client: httpx.AsyncClient, model: str, content: str, is_stream: bool, leaves: bool) -> str:
    """One request: how it ended. `leaves`: its client hangs up in the middle."""
    body = {"model": model, "messages": [{"role": "user", "content": content}], "stream": is_stream, "max_tokens": 16}
    try:
        async with (
            asyncio.timeout(_DEADLINE_S),
            client.stream("POST", "/chat/completions", json=body) as reply,
        ):
            if leaves:
                if is_stream:
                    await anext(reply.aiter_raw(), b"")
                return "left"
            text = (await reply.aread()).decode()
    except TimeoutError:
        return f"no end: {model}"
    except httpx.TransportError as error:
        return f"broken: {type(error).__name__}"
    return _end(reply.status_code, text, is_stream)


def _end(status: int, text: str, is_stream: bool) -> str:
    if status != 200:
        return "status" if json.loads(text)["error"]["message"] else f"no words: {text}"
    is_done, has_error = text.endswith("data: [DONE]\n\n"), '{"error"' in text
    if not is_stream:
        is_done = json.loads(text)["choices"][0]["finish_reason"] == "stop"
    if is_done == has_error:
        return f"neither or both: {text[-200:]}"
    return "complete" if is_done else "in-band"


async def _run(
    gateway: Gateway, aliases: list[str], chance: random.Random, acts: dict[int, Callable[[], object]]
) -> Counter[str]:
    """All requests, a few at a time; `acts` happen as the request of their number begins."""
    ends: Counter[str] = Counter()
    numbers = iter(range(_REQUESTS))
    drawn_from = [*FAULTS, *[f"{name}-saved" for name in FAULTS], *4 * [*_TOGETHER]]
    plans = [(chance.choice(drawn_from), chance.random()) for _ in range(_REQUESTS)]

    async def user(client: httpx.AsyncClient) -> None:
        for number in numbers:
            if number in acts:
                await asyncio.to_thread(acts[number])
            model, drawn = plans[number]
            content = f"mixed {number}" if number % 3 else f"shared {number % 9}"
            if model == "slow":
                content = f"slow {number // _AT_ONCE}"
            ends[await _ask(client, model, content, number % 2 > 0, leaves=drawn < 0.1)] += 1

    headers = {"authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=None) as client:
        await asyncio.gather(*(user(client) for _ in range(_AT_ONCE)))
    return ends


def _gauge(gateway: Gateway, name: str) -> float:
    """The sum of the samples of a metric that is there."""
    found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", gateway.observe("/metrics").text, re.M)
    assert found, name
    return sum(map(float, found))


def _has_moved(gateway: Gateway, model: str, metric: str) -> bool:
    """Whether a few equal streams at once move the metric: the two workers get some each, mostly."""
    content = f"{model} {time.time_ns()}"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: gateway.chat(content, model, stream=True, max_tokens=16), range(8)))
    return f"\n{metric}{{" in gateway.observe("/metrics").text


def _workers(gateway: Gateway) -> list[psutil.Process]:
    return [process for process in gateway.children("gateway worker") if "-m" in process.cmdline()]


@pytest.mark.long
@pytest.mark.parametrize("seed", [7])
def test_mixed_faults(upstream: Upstream, tmp_path: Path, seed: int) -> None:
    """Deployments that fail in twelve ways, clients that leave, a cache worker and a gateway worker that are killed, and a Redis
    that hangs and is killed, among streams that are gone on with, hedges and awaited answers: each request ends complete, with a
    status, or with an in-band error, in time. Only a connection to the killed worker breaks. Then nothing is held, in flight,
    queued or connected, memory is back, and the books are exact."""
    config = _config(upstream.url)
    with run_gateway(tmp_path, config) as gateway:
        gateway.wait_ready()
        gateway.admin("POST", "/teams/1/budgets", json={"window": "day", "limit_microusd": 10**9, "is_hard": True})
        for model in ("plain", "large", *20 * ["hedged"]):
            gateway.chat("warm", model, headers={"cache-control": "no-store"}, max_tokens=16)
        upstream.plan("delay_ms=1500")
        for model, metric in _TOGETHER.items():
            wait_for(lambda model=model, metric=metric: _has_moved(gateway, model, metric), 60)  # type: ignore[misc]
        before_bytes = _gauge(gateway, "sameway_workers_memory_bytes")
        redis = VICTIMS["redis"](gateway)[0]
        acts: dict[int, Callable[[], object]] = {
            40: lambda: VICTIMS["the cache worker"](gateway)[0].kill(),
            80: redis.suspend,
            120: redis.resume,
            150: lambda: _workers(gateway)[0].kill(),
            190: redis.kill,
        }
        ends = asyncio.run(_run(gateway, [*config["models"]], random.Random(seed), acts))
        broken = sum(count for end, count in ends.items() if end.startswith("broken"))
        assert {end for end in ends if end not in (*ENDS, "left") and not end.startswith("broken")} == set()
        assert broken <= _AT_ONCE  # those that were with the killed worker
        assert min(ends[end] for end in ENDS) > 5, ends
        gateway.wait_ready(60)
        assert_money_agrees(gateway)
        # the look itself is one
        wait_for(lambda: _gauge(gateway, "sameway_in_flight_requests") <= 1, 20)
        wait_for(lambda: _gauge(gateway, "sameway_deployment_running_requests") == 0, 20)
        wait_for(lambda: _gauge(gateway, "sameway_deployment_waiting_requests") == 0, 20)
        ours = int(gateway.root.rpartition(":")[2])

        def connected() -> list[Any]:
            found = []
            for process in _workers(gateway):
                with contextlib.suppress(psutil.NoSuchProcess):
                    opened = process.net_connections("tcp")
                    found += [one for one in opened if one.status == "ESTABLISHED" and one.laddr.port == ours]
            return found

        wait_for(lambda: connected() == [], 20, lambda: str(connected()))
        assert list((gateway.data_dir / "spool").glob("*.rows")) != []
        wait_for(
            lambda: _gauge(gateway, "sameway_workers_memory_bytes") < before_bytes + 60e6,
            40,
            lambda: f"{before_bytes / 1e6:.0f} MB, then {_gauge(gateway, 'sameway_workers_memory_bytes') / 1e6:.0f} MB",
        )
