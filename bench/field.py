"""The sixteen faults of FailoverBench, with real timings, against a started gateway: how each request ends, by setting.

A fault is an alias whose first deployment fails so, and whose second one is well. Every alias has default settings but for one:
`retry_first_ms`, or a second deployment that continues the beginning of an answer. Knows the test upstream's plans. Source of
faults, limits and verdicts: FailoverBench's published catalogue; the faults are told by another upstream than its own.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.gateway import API_KEY, Gateway, deployment, run_gateway
from tests.e2e.upstream import Upstream

_WORDS = 60
_ANSWER = "".join(f"word{number} " for number in range(_WORDS))
_DOWN_S, _EVERY_S, _BACK_WITHIN_S = 60.0, 4.0, 30.0
_CALLS_MAX = 4  # of the failing deployment for one request: more is hammering
_FLAPS = "flaps"
_MAY_END = ("malformed chunk", "stream cut, none continues")  # with an error in the stream, whatever the setting
_BREAKS_OFF = ("stream cut", "stream stalls", *_MAY_END)


@dataclass(frozen=True)
class Fault:
    """How the first deployment fails, and the seconds within which the request ends. `calls`: how often a client is served
    best by asking the failing deployment. `is_final`: the failure is the answer. `is_prefilled`: whether the one that is well
    may continue an answer."""

    plan: str
    within_s: float = 20.0
    calls: tuple[int, int] = (1, _CALLS_MAX)
    is_final: bool = False
    is_prefilled: bool = True


FAULTS = {
    "429, retry-after 2 s, once": Fault("status=429;retry_after=2;times=1", calls=(2, 2)),
    "429, always": Fault("status=429"),
    "500, once": Fault("status=500;times=1", calls=(2, 2)),
    "503, always": Fault("status=503"),
    "reset before its answer": Fault("cut=headers;reset=1;times=1"),
    "silent": Fault("hang=headers", calls=(1, 1)),
    "first token after 20 s": Fault("pace_ms=20000", 15.0),
    "stream cut": Fault("pace_ms=15;cut=middle", 40.0),
    "stream stalls": Fault("pace_ms=15;hang=middle", 100.0),
    "malformed chunk": Fault("pace_ms=15;malformed=middle"),
    "no [DONE]": Fault("pace_ms=15;has_done=0", 8.0),
    "context too small": Fault("status=400;body=context", calls=(1, 1)),
    "content filter": Fault("status=400;body=filter", calls=(1, 1), is_final=True),
    "stream cut, none continues": Fault("pace_ms=15;cut=middle", 40.0, is_prefilled=False),
    _FLAPS: Fault("", 30.0, calls=(0, 1_000)),
    "503, who answered": Fault("status=503;body=empty"),
}
# the setting beside the defaults, and whether requests are streams
COLUMNS: dict[str, tuple[dict[str, Any], bool]] = {
    "whole": ({}, False),
    "whole, retry_first_ms": ({"retry_first_ms": 10_000}, False),
    "stream": ({}, True),
    "stream, prefill": ({"prefill": True}, True),
}


def _alias(url: str, column: str, name: str) -> dict[str, Any]:
    fault, settings = FAULTS[name], dict(COLUMNS[column][0])
    can = {"capabilities": ["prefill"]} if settings.pop("prefill", False) and fault.is_prefilled else {}
    model = f"{column}, {name}"
    plan = f"?chunks={_WORDS};{fault.plan}" if fault.plan else ""
    price = {"input_usd_per_mtok": 5.0, "output_usd_per_mtok": 9.0}
    failing = deployment(url, f"{model}: fails", f"fails: {model}{plan}")
    well = deployment(url, f"{model}: is well", f"is well: {model}?chunks={_WORDS}", price=price, **can)
    return {"policy": "cheapest", "deployments": [failing, well], **settings}


async def _ask(client: httpx.AsyncClient, column: str, name: str, number: int = 0) -> tuple[str, str]:
    """How one request ended (`whole`, an error, or what is wrong with it), and the deployment that answered."""
    body: dict[str, Any] = {"model": f"{column}, {name}", "messages": [{"role": "user", "content": f"Say it {number}"}]}
    if COLUMNS[column][1]:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    try:
        async with asyncio.timeout(FAULTS[name].within_s):
            reply = await client.post("/chat/completions", json=body)
    except TimeoutError:
        return "NO END", ""
    except httpx.TransportError as error:
        return f"BROKEN {type(error).__name__}", ""
    backend = reply.headers.get("x-sameway-backend", "")
    if reply.status_code != 200:
        return f"{reply.status_code} {reply.json()['error']['code']}", backend
    if not COLUMNS[column][1]:
        (choice,), said = reply.json()["choices"], reply.json()
        return _end(choice["message"]["content"], choice["finish_reason"], said, backend), backend
    *events, last = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    if last != "[DONE]":
        return f"in-band {json.loads(last)['error']['code']}", backend
    chunks = [json.loads(event) for event in events]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    finish = ",".join(choice["finish_reason"] for choice in choices if choice["finish_reason"])
    return _end(text, finish, chunks[-1], backend), backend


def _end(text: str, finish: str, last: dict[str, Any], backend: str) -> str:
    if (text, finish) != (_ANSWER, "stop"):
        return f"TRUNCATED {finish} {len(text.split())} words"
    answered = str(last.get("model")).partition(":")[0]
    is_named = answered == backend.rpartition(": ")[2] or (backend.endswith("fails") and answered == "is well")
    return "whole" if last.get("usage") and is_named else "whole, usage or model missing"


def _verdict(name: str, end: str, calls: int) -> str:
    """`pass`, `partial` (served, in another way than the catalogue asks for), `safe` (one clean error) or FAIL."""
    fault = FAULTS[name]
    if end[:4].isupper() or calls > _CALLS_MAX:
        return f"FAIL: {end}, {calls} calls"
    if fault.is_final:
        return "pass" if end[:1] == "4" and calls == 1 else "partial"
    if not end.startswith("whole"):
        return f"safe: {end}"
    return "pass" if end == "whole" and fault.calls[0] <= calls <= fault.calls[1] else "partial"


async def _flaps(client: httpx.AsyncClient, upstream: Upstream, column: str) -> str:
    """Down for a minute and back, under a request every few seconds: each is served, and the first deployment is used again."""
    began, back_s = time.monotonic(), None
    is_down = True
    while back_s is None:
        ends = await _ask(client, column, _FLAPS, int(time.monotonic() * 1000))
        now_s = time.monotonic() - began
        if not ends[0].startswith("whole"):
            return f"FAIL: {ends[0]} after {now_s:.0f} s"
        if is_down and now_s > _DOWN_S:
            is_down = False
            await asyncio.to_thread(upstream.plan, f"chunks={_WORDS}")
        if "fails" in ends[1]:
            back_s = now_s - _DOWN_S
        elif now_s > _DOWN_S + _BACK_WITHIN_S:
            return f"FAIL: not used within {_BACK_WITHIN_S:.0f} s of its return"
        await asyncio.sleep(_EVERY_S)
    return "pass"


async def _run(gateway: Gateway, upstream: Upstream) -> dict[tuple[str, str], str]:
    places = [(column, name) for column in COLUMNS for name in FAULTS if name != _FLAPS]
    headers = {"authorization": f"Bearer {API_KEY}"}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.base_url, headers=headers, timeout=None, limits=limits) as client:
        upstream.plan("status=503")
        flapping = [asyncio.create_task(_flaps(client, upstream, column)) for column in COLUMNS]
        ends = await asyncio.gather(*(_ask(client, *place) for place in places))
        asked = await asyncio.to_thread(upstream.seen)
        calls = Counter(one["body"]["model"].partition("?")[0] for one in asked.requests)
        found = {
            place: _verdict(place[1], end, calls[f"fails: {', '.join(place)}"])
            for place, (end, _) in zip(places, ends, strict=True)
        }
        flapped = await asyncio.gather(*flapping)
    return found | {(column, _FLAPS): end for column, end in zip(COLUMNS, flapped, strict=True)}


def _is_good(name: str, column: str, verdict: str) -> bool:
    """Whether a cell is as docs/benchmarks.md says."""
    if FAULTS[name].calls == (2, 2) and "retry_first_ms" not in COLUMNS[column][0]:
        return verdict in ("pass", "partial")  # failing over at once serves the client better than waiting
    is_open_end = name in _MAY_END if "prefill" in COLUMNS[column][0] else name in _BREAKS_OFF
    return verdict == "pass" or (COLUMNS[column][1] and is_open_end and verdict.startswith("safe"))


def field(upstream: Upstream, folder: Path) -> Iterator[dict[str, Any]]:
    """A row for each fault, and one with the counts of each column."""
    models = {f"{column}, {name}": _alias(upstream.url, column, name) for column in COLUMNS for name in FAULTS}
    folder.mkdir(parents=True, exist_ok=True)
    with run_gateway(folder, {"models": models, "cache": {"is_semantic": False}}) as gateway:
        found = asyncio.run(_run(gateway, upstream))
    for name in FAULTS:
        ends = {column: found[column, name] for column in COLUMNS}
        good = all(_is_good(name, column, end) for column, end in ends.items())
        yield {"part": "field", "case": name, "ends": ends, "is_good": good}
    counts = {column: dict(Counter(found[column, name].partition(":")[0] for name in FAULTS)) for column in COLUMNS}
    yield {"part": "field", "case": "in all", "ends": counts, "is_good": True}
