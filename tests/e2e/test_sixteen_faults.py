"""The sixteen ways in which FailoverBench's deployments fail, over sockets: each request ends with the whole answer or one clean error.

Each alias has a deployment that fails and a healthy one behind it. Source of the faults: FailoverBench's published catalogue.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway
from tests.e2e.upstream import Upstream

_WITHIN_S = 15.0  # of each request; the limits of the deployments are far below
_LIMIT_MS = 1_500
_PIECES = 12
_ANSWER = "".join(f"word{number} " for number in range(_PIECES))


@dataclass(frozen=True)
class Fault:
    """How the first deployment fails, and how requests end. `cut_stream`: the end of a stream that no deployment can go on with;
    `calls_max`: of the failing deployment, for one request."""

    plan: str
    end: str = "whole"
    cut_stream: str = "whole"
    calls_max: int = 1


# the fifteenth has a test of its own: it is about many requests
FAULTS = {
    "limited once": Fault("status=429;retry_after=1;times=1"),
    "limited": Fault("status=429", calls_max=2),
    "fails once": Fault("status=500;times=1"),
    "overloaded": Fault("status=503", calls_max=2),
    "reset": Fault("cut=headers;reset=1;times=1"),
    "silent": Fault("hang=headers"),
    "slow": Fault("pace_ms=30000"),
    "cut": Fault("pace_ms=100;cut=middle", cut_stream="in-band upstream_broken"),
    "stalls": Fault("pace_ms=100;hang=middle", cut_stream="in-band upstream_timeout"),
    "malformed": Fault("pace_ms=100;malformed=middle", cut_stream="in-band upstream_broken"),
    "no done": Fault("has_done=0"),
    "too long": Fault("status=400;body=context"),
    "filtered": Fault(
        "status=400;body=filter", end="400 content_policy_violation", cut_stream="400 content_policy_violation"
    ),
    "cut, as a whole": Fault("is_whole=1;cut=middle"),
    "stalls, as a whole": Fault("is_whole=1;hang=middle"),
    "malformed, as a whole": Fault("is_whole=1;malformed=middle"),
}
KINDS = ("stream", "whole")
HEALTHY = ("continues", "begins anew")


def _alias(url: str, name: str, plan: str, healthy: str, **settings: Any) -> dict[str, Any]:
    """A failing deployment, and a healthy one that continues the beginning of an answer or doesn't."""
    limits = {"ttft_timeout_ms": _LIMIT_MS, "idle_timeout_ms": _LIMIT_MS}
    failing = deployment(url, f"{name} fails", f"{name} fails?chunks={_PIECES};{plan}", **limits)
    price = {"input_usd_per_mtok": 5.0, "output_usd_per_mtok": 9.0}
    can = {"capabilities": ["prefill"]} if healthy == "continues" else {}
    well = deployment(url, f"{name} is well", f"{name} is well?chunks={_PIECES}", **can, price=price)
    return {"policy": "cheapest", "deployments": [failing, well], **settings}


@pytest.fixture(scope="module")
def failing(upstream_process: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with an alias for each fault, kind of request and healthy deployment, as some faults happen once."""
    upstream_process.reset()
    url = upstream_process.url
    models = {
        f"{name}, {kind}, {healthy}": _alias(url, f"{name}, {kind}, {healthy}", fault.plan, healthy)
        for name, fault in FAULTS.items()
        for kind in KINDS
        for healthy in HEALTHY
    }
    for kind in KINDS:
        models[f"flaps, {kind}"] = _alias(url, f"flaps, {kind}", "status=503;times=6", "begins anew")
        for name in ("limited once", "fails once"):
            plan = FAULTS[name].plan
            alias = f"{name}, {kind}, patient"
            models[alias] = _alias(url, alias, plan, "begins anew", retry_first_ms=5_000)
    with run_gateway(
        tmp_path_factory.mktemp("failing"), {"models": models, "cache": {"is_semantic": False}}
    ) as gateway:
        yield gateway


@pytest.fixture
async def client(failing: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    headers = {"authorization": f"Bearer {API_KEY}"}
    async with httpx.AsyncClient(base_url=failing.base_url, headers=headers, timeout=_WITHIN_S) as made:
        yield made


async def _ask(client: httpx.AsyncClient, alias: str, content: str = "Say it") -> tuple[str, str]:
    """How a request of the kind in the alias's name ended, and the deployment that the response names."""
    is_stream = "stream" in alias
    body = {"model": alias, "messages": [{"role": "user", "content": content}], "stream": is_stream}
    async with asyncio.timeout(_WITHIN_S):
        reply = await client.post("/chat/completions", json=body)
    backend = reply.headers.get("x-sameway-backend", "")
    if reply.status_code != 200:
        return f"{reply.status_code} {reply.json()['error']['code']}", backend
    if not is_stream:
        (choice,) = reply.json()["choices"]
        return _end(choice["message"]["content"], [choice["finish_reason"]]), backend
    *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    if last != "[DONE]":
        return f"in-band {json.loads(last)['error']['code']}", backend
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return _end(text, [choice["finish_reason"] for choice in choices if choice["finish_reason"]]), backend


def _end(text: str, finishes: list[str]) -> str:
    return "whole" if (text, finishes) == (_ANSWER, ["stop"]) else f"NOT THE ANSWER {finishes} {text}"


async def test_each_fault_ends_with_the_answer_or_one_error(
    failing: Gateway, client: httpx.AsyncClient, upstream_process: Upstream
) -> None:
    """All at once, as streams and as wholes: no failing deployment is asked again and again, and the whole answer comes wherever it
    can: of a stream that has begun, only from a deployment that continues it."""
    upstream_process.reset()
    places = [(name, kind, healthy) for name in FAULTS for kind in KINDS for healthy in HEALTHY]
    found = await asyncio.gather(*(_ask(client, ", ".join(place)) for place in places))
    expected = {
        place: FAULTS[place[0]].cut_stream if place[1:] == ("stream", "begins anew") else FAULTS[place[0]].end
        for place in places
    }
    assert {place: end for place, (end, _) in zip(places, found, strict=True)} == expected
    calls = Counter(request["body"]["model"].partition("?")[0] for request in upstream_process.seen().requests)
    for place in places:
        assert 1 <= calls[f"{', '.join(place)} fails"] <= FAULTS[place[0]].calls_max, place
        assert calls[f"{', '.join(place)} is well"] <= 1, place
    assert "Traceback" not in failing.log.read_text()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_deployment_that_was_down_serves_again(client: httpx.AsyncClient, kind: str) -> None:
    """While it is down every request is answered by the other one; once it is back, it gets requests again."""
    backends: list[str] = []
    async with asyncio.timeout(_WITHIN_S):
        while "fails" not in (backends or [""])[-1]:
            end, backend = await _ask(client, f"flaps, {kind}", f"Request {len(backends)}")
            assert end == "whole"
            backends.append(backend)
            await asyncio.sleep(0.1)
    assert len(backends) > 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["limited once", "fails once"])
async def test_a_patient_alias_asks_the_first_one_again(client: httpx.AsyncClient, name: str, kind: str) -> None:
    """With `retry_first_ms`, the deployment that failed once answers itself."""
    assert await _ask(client, f"{name}, {kind}, patient") == ("whole", f"{name}, {kind}, patient fails")
