"""`./run bench faults`: what clients and the books see while a Redis hangs and processes are killed under load.

    ./run bench faults [--part field,redis,kill] [--seconds 30] [--users 50] [--rounds 10] [--victims NAME,...] [--json FILE]

field: the sixteen faults of FailoverBench (`bench/field.py`). redis: Redis is stopped (SIGSTOP) for --seconds under --users
(half with a hard budget), once for each value of `budgets.on_redis_failure`. kill: each victim is killed (SIGKILL) --rounds
times under a third of the users; then the ledger, the spend and what clients got are compared. Exits with 1 where a bound that
docs/benchmarks.md states does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import io
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from bench.field import field as field_of
from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway, deployment, run_gateway, wait_for
from tests.e2e.upstream import Upstream, run_upstream

_P90_TIMES_MAX, _P99_TIMES_MAX = 1.3, 4.0
_WITHIN_S = 60.0
_TOKENS = 24  # more than any of the upstream's answers
VICTIMS: dict[str, Callable[[Gateway], list[psutil.Process]]] = {
    "worker": lambda gateway: [one for one in gateway.children("gateway worker") if "-m" in one.cmdline()],
    "cache": lambda gateway: [one for one in gateway.children("cache.worker") if "-m" in one.cmdline()],
    "engine": lambda gateway: gateway.children("local_engine.process.worker"),
    "redis": lambda gateway: gateway.children("redis.sock"),
    "supervisor": lambda gateway: [psutil.Process(gateway.process.pid)] if gateway.process is not None else [],
}


@dataclass
class Asked:
    """One request: its phase, model and key, how it ended (`ok`, a status with a code, or what broke), and its seconds."""

    phase: str
    model: str
    key: str
    end: str
    seconds: float
    id: str = ""
    is_fresh: bool = False


@dataclass
class Load:
    """Users who ask one question after the other, every third one a repeated one, until `is_over`; each asks one of `models`."""

    gateway: Gateway
    keys: Sequence[str]
    models: Sequence[str] = ("mock",)
    phase: str = "before"
    is_over: bool = False
    asked: list[Asked] = field(default_factory=list)

    async def run(self) -> None:
        one_each = httpx.Limits(
            max_connections=None, max_keepalive_connections=0
        )  # the kernel spreads them over workers
        async with httpx.AsyncClient(timeout=_WITHIN_S, limits=one_each, trust_env=False) as client:
            await asyncio.gather(*(self._user(client, number, key) for number, key in enumerate(self.keys)))

    async def _user(self, client: httpx.AsyncClient, number: int, key: str) -> None:
        chance = random.Random(number)
        for count in itertools.count():
            if self.is_over:
                return
            content = f"user {number} asks {count} {time.time_ns()}" if count % 3 else f"shared {count % 9}"
            model = self.models[number // 2 % len(self.models)]
            self.asked.append(await self._one(client, model, key, content, number % 2 > 0))
            await asyncio.sleep(chance.uniform(0.1, 0.3))

    async def _one(self, client: httpx.AsyncClient, model: str, key: str, content: str, is_stream: bool) -> Asked:
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "stream": is_stream, "messages": messages, "max_tokens": _TOKENS}
        phase, since = self.phase, time.perf_counter()
        try:
            url, headers = f"{self.gateway.base_url}/chat/completions", {"authorization": f"Bearer {key}"}
            reply = await client.post(url, json=body, headers=headers)
        except httpx.HTTPError as error:
            return Asked(phase, model, key, f"broken: {type(error).__name__}", time.perf_counter() - since)
        seconds, text = time.perf_counter() - since, reply.text
        if reply.status_code != 200:
            return Asked(phase, model, key, f"{reply.status_code} {reply.json()['error']['code']}", seconds)
        finishes = [f'"finish_reason":"{reason}"' in text.replace(" ", "") for reason in ("stop", "length")]
        is_whole = any(finishes) and (text.endswith("data: [DONE]\n\n") or not is_stream)
        end = "ok" if is_whole else "in-band error" if '{"error"' in text else "TRUNCATED"
        is_fresh = reply.headers["x-sameway-cache"] in ("miss", "bypass")
        return Asked(phase, model, key, end, seconds, reply.headers["x-request-id"], is_fresh)


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99 in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    return {f"p{100 * q:.0f}_ms": round(1000 * ordered[int(q * (len(ordered) - 1))], 1) for q in (0.5, 0.9, 0.99)}


@contextmanager
def _started(upstream: Upstream, folder: Path, **config: Any) -> Iterator[Gateway]:
    """A gateway of two workers that is ready, and whose first team has a hard budget that it never reaches."""
    models = {
        "mock": {"deployments": [deployment(upstream.url, "plain", "mock?delay_ms=50")]},
        **config.pop("models", {}),
    }
    base = {"workers": 2, "models": models, "cache": {"is_semantic": False}}
    budgets = {"hold_lease_s": 5, **config.pop("budgets", {})}
    folder.mkdir(parents=True, exist_ok=True)
    with run_gateway(folder, {**base, "budgets": budgets, **config}) as gateway:
        gateway.wait_ready()
        gateway.admin("POST", "/teams/1/budgets", json={"window": "total", "limit_microusd": 10**12, "is_hard": True})
        yield gateway


# -- Redis hangs -------------------------------------------------------------------------------------------------------


async def _through_a_pause(gateway: Gateway, free_key: str, arguments: argparse.Namespace) -> Load:
    load = Load(gateway, [API_KEY if number % 2 else free_key for number in range(arguments.users)])
    running = asyncio.create_task(load.run())
    await asyncio.sleep(arguments.seconds / 3)
    redis = VICTIMS["redis"](gateway)[0]
    load.phase = "paused"
    redis.suspend()
    await asyncio.sleep(arguments.seconds)
    load.phase = "resumed"
    redis.resume()
    await asyncio.sleep(arguments.seconds / 3)
    load.is_over = True
    await running
    return load


def _redis(upstream: Upstream, folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for setting in ("refuse", "allow"):
        with _started(upstream, folder / setting, budgets={"on_redis_failure": setting}) as gateway:
            team = gateway.admin("POST", "/teams", json={"name": "free"})["id"]
            free_key = gateway.admin("POST", f"/teams/{team}/keys", json={"name": "k"})["plaintext"]
            load = asyncio.run(_through_a_pause(gateway, free_key, arguments))
            books = books_of(gateway)
        found: dict[str, dict[str, float]] = {}
        for phase in ("before", "paused", "resumed"):
            served = [one for one in load.asked if one.phase == phase and one.end == "ok"]
            found[phase] = _quantiles([one.seconds for one in served])
            ends = {
                team: dict(
                    Counter(one.end for one in load.asked if one.phase == phase and (one.key == free_key) == is_free)
                )
                for team, is_free in (("free", True), ("hard", False))
            }
            yield {"part": "redis", "case": f"{setting}, {phase}", **found[phase], "ends": ends, "is_good": True}
        refused = [one for one in load.asked if one.phase == "paused" and one.key == API_KEY and one.end != "ok"]
        is_as_set = bool(refused) == (setting == "refuse") and all("budget_unavailable" in one.end for one in refused)
        p90_times = found["paused"]["p90_ms"] / found["before"]["p90_ms"]
        p99_times = found["paused"]["p99_ms"] / found["before"]["p99_ms"]
        is_quick = p90_times <= _P90_TIMES_MAX and p99_times <= _P99_TIMES_MAX
        times = {"p90_times": round(p90_times, 2), "p99_times": round(p99_times, 2)}
        good = is_as_set and is_quick and books["is_exact"]
        yield {"part": "redis", "case": f"{setting}, in all", **times, "ends": books, "is_good": good}


# -- processes are killed ----------------------------------------------------------------------------------------------


async def _through_kills(gateway: Gateway, victim: str, arguments: argparse.Namespace) -> Load:
    asked = ("mock", "local") if victim == "engine" else ("mock",)
    load = Load(gateway, [API_KEY] * max(4, arguments.users // 3), asked, phase=victim)
    running = asyncio.create_task(load.run())
    chance = random.Random(victim)
    for _ in range(arguments.rounds):
        await asyncio.sleep(chance.uniform(0.5, 2.0))
        pids = {one.pid for one in VICTIMS[victim](gateway)}
        chance.choice(VICTIMS[victim](gateway)).kill()
        await asyncio.to_thread(_until_back, gateway, victim, pids)
        since = len(load.asked)
        async with asyncio.timeout(_WITHIN_S):
            while not any(one.end == "ok" and one.model == asked[-1] for one in load.asked[since:]):  # noqa: ASYNC110 - a request has no event
                await asyncio.sleep(0.05)
    load.is_over = True
    await running
    return load


def _until_back(gateway: Gateway, victim: str, pids: set[int]) -> None:
    if victim == "supervisor":
        assert gateway.process is not None
        gateway.process.wait()
        gateway.start()
    wait_for(lambda: bool({one.pid for one in VICTIMS[victim](gateway)} - pids), _WITHIN_S)


def _kill(upstream: Upstream, folder: Path, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for victim in arguments.victims:
        price = {"input_usd_per_mtok": 1.0, "output_usd_per_mtok": 2.0}
        local = {"deployments": [{"name": "local", "backend": "local", "engine": "default", "price": price}]}
        more = {"models": {"local": local}} if victim == "engine" else {}
        with _started(upstream, folder / victim, cache={"is_semantic": True}, **more) as gateway:
            load = asyncio.run(_through_kills(gateway, victim, arguments))
            gateway.wait_ready()
            books = books_of(gateway, {one.id for one in load.asked if one.end == "ok" and one.is_fresh})
        ends = dict(Counter(one.end for one in load.asked))
        quantiles = _quantiles([one.seconds for one in load.asked if one.end == "ok"])
        good = books["is_exact"] and "TRUNCATED" not in ends
        yield {"part": "kill", "case": victim, **quantiles, "ends": {**ends, **books}, "is_good": good}


def books_of(gateway: Gateway, billed: set[str] = frozenset()) -> dict[str, Any]:  # type: ignore[assignment]
    """Rows, spend and holds of the first team at rest; `billed` are the requests that must have a row."""
    until = time.monotonic() + _WITHIN_S
    while True:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        text = httpx.get(f"{gateway.root}/admin/api/ledger.csv", headers=headers, timeout=_WITHIN_S).text
        rows = list(csv.DictReader(io.StringIO(text)))
        own = [row for row in rows if row["team_id"] == "1"]
        (budget,) = gateway.admin("GET", "/teams/1/budgets")["budgets"]
        books = {
            "rows": len(rows),
            "doubled": len(rows) - len({row["id"] for row in rows}),
            "lost": len(billed - {row["request_id"] for row in rows}),
            "drift_microusd": budget["spent_microusd"] - sum(int(row["cost_microusd"]) for row in own),
            "held_microusd": budget["held_microusd"],
        }
        books["is_exact"] = not any(count for name, count in books.items() if name != "rows")
        if books["is_exact"] or time.monotonic() > until:
            return books
        time.sleep(0.5)


def _field(upstream: Upstream, folder: Path, _: argparse.Namespace) -> Iterator[dict[str, Any]]:
    return field_of(upstream, folder)


PARTS = {"field": _field, "redis": _redis, "kill": _kill}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0 if every bound holds, else 1."""
    arguments = _parser().parse_args(argv)
    rows: list[dict[str, Any]] = []
    print("| part | case | p50 ms | p90 ms | p99 ms | times p90, p99 | ends | |\n" + "| --- " * 8 + "|", flush=True)
    with tempfile.TemporaryDirectory(prefix="bench-faults-") as folder, run_upstream() as upstream:
        for part in arguments.part:
            for row in PARTS[part](upstream, Path(folder) / part, arguments):
                rows.append(row)
                cells = [str(row.get(name, "")) for name in ("part", "case", "p50_ms", "p90_ms", "p99_ms")]
                cells.append(" ".join(str(row[name]) for name in ("p90_times", "p99_times") if name in row))
                print(
                    f"| {' | '.join(cells)} | {json.dumps(row['ends'])} | {'' if row['is_good'] else 'NO'} |",
                    flush=True,
                )
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(not all(row["is_good"] for row in rows))


def _parser() -> argparse.ArgumentParser:
    def some_of(names: Sequence[str]) -> Callable[[str], list[str]]:
        return lambda text: [name for name in names if name in text.split(",")]

    parser = argparse.ArgumentParser(
        prog="./run bench faults", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--part", type=some_of([*PARTS]), default=[*PARTS], help=f"some of: {', '.join(PARTS)}")
    parser.add_argument("--seconds", type=float, default=30, help="of the pause; a third of it before and after")
    parser.add_argument("--users", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=10, help="kills of each victim")
    parser.add_argument(
        "--victims", type=some_of([*VICTIMS]), default=[*VICTIMS], help=f"some of: {', '.join(VICTIMS)}"
    )
    parser.add_argument("--json", type=Path, default=None, help="write one JSON object for each row")
    return parser


if __name__ == "__main__":
    sys.exit(main())
