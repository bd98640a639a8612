"""`./run bench fleet`: two hosts on one Redis Cluster and one PostgreSQL, while each part in turn is lost under load.

    ./run bench fleet [--has-index] [--users 12] [--seconds 12] [--only NAME ...] [--json FILE]

The cluster has three masters with a replica each; the database has a standby that follows synchronously, and its address moves when
the standby is promoted, as a managed database's does. Users ask through the two hosts in turn, and go to the other where a host
refuses a connection, as behind a balancer. A third of the prompts are new, a third are repeated, and a third are other wordings of
known questions. The faults: every process of either host is killed; the Redis master that has the money is killed, and its replica
takes over; the database is killed, and its standby is promoted; the hosts are restarted one after the other with another
configuration. Exits with 1 where a request broke that was not cut with its process, an answer is another prompt's, hits that are
wrong by meaning pass the error bound, or the books do not agree.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from bench.faults import books_of
from policies.holds import LEDGER_STREAM
from tests.e2e.gateway import API_KEY, Gateway, deployment
from tests.e2e.upstream import Upstream, run_upstream
from tests.services import (
    PostgresServer,
    RedisCluster,
    RedisServer,
    postgres_binaries,
    run_query_engine,
    run_redis_cluster,
)

_NODE_TIMEOUT_MS = 2_000
_TIMEOUT_S = 60.0
_ERROR_MAX = 0.01
_TOKENS = 64
_WORDINGS = (
    "How do I {}?",
    "What is the way to {}?",
    "Please tell me how to {}",
    "I would like to {}. How?",
    "Can you explain how one can {}?",
)
_TOPICS = (
    "reset my password",
    "cancel my subscription",
    "export my invoices",
    "change the delivery address",
    "add a colleague to the account",
    "turn off notifications",
    "return a damaged item",
    "read the meter",
    "pay by bank transfer",
    "delete my profile",
)


# -- what the hosts share ----------------------------------------------------------------------------------------------


class Database:
    """A PostgreSQL and its synchronous standby, behind one address."""

    def __init__(self, folder: Path) -> None:
        self._address = folder / "pg"
        self.primary = PostgresServer(_made(folder / "first"), postgres_binaries())
        self.primary.start()
        self._address.symlink_to(self.primary.folder)
        url = self.primary.create_database()
        self.url = url.replace(str(self.primary.folder), str(self._address))
        self.standby = PostgresServer(_made(folder / "second"), postgres_binaries())
        self.standby.follow(self.primary)
        self.primary.sql("ALTER SYSTEM SET synchronous_standby_names = '*'", "SELECT pg_reload_conf()")

    def fail_over(self) -> None:
        """Kill the primary, promote the standby, and move the address to it."""
        self.primary.kill()
        time.sleep(2.0)  # what finds it out takes its time
        self.standby.sql("ALTER SYSTEM SET synchronous_standby_names = ''", "SELECT pg_promote()")
        new = self._address.with_suffix(".new")
        new.symlink_to(self.standby.folder)
        new.rename(self._address)

    def stop(self) -> None:
        for server in (self.standby, self.primary):
            server.kill()


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


# -- the users ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """A text, what the upstream says to it, and whether other wordings have the same answer."""

    text: str
    answer: str


@dataclass(frozen=True)
class Asked:
    """How one request ended, at which host, and during which fault."""

    phase: str
    host: int
    end: str
    source: str
    seconds: float
    request_id: str


@dataclass
class Fleet:
    """Two hosts and what was asked of them. `killed` are the hosts whose processes a fault ends, with the time of it."""

    hosts: Sequence[Gateway]
    prompts: Sequence[Prompt]
    phase: str = "before"
    is_over: bool = False
    asked: list[Asked] = field(default_factory=list)
    killed_at: dict[int, float] = field(default_factory=dict)

    async def run(self, users: int) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(timeout=_TIMEOUT_S, limits=limits, trust_env=False) as client:
            await asyncio.gather(*(self._user(client, number) for number in range(users)))

    async def _user(self, client: httpx.AsyncClient, number: int) -> None:
        chance = random.Random(number)
        for count in itertools.count(number):
            if self.is_over:
                return
            self.asked.append(await self._one(client, count % 2, chance.choice(self.prompts), number % 2 > 0))
            await asyncio.sleep(chance.uniform(0.1, 0.3))

    async def _one(self, client: httpx.AsyncClient, host: int, prompt: Prompt, is_stream: bool) -> Asked:
        phase, since = self.phase, time.perf_counter()
        body = {"model": "mock", "stream": is_stream, "max_tokens": _TOKENS}
        body["messages"] = [{"role": "user", "content": prompt.text}]
        headers = {"authorization": f"Bearer {API_KEY}"}
        for turn in (host, 1 - host):
            sent = time.perf_counter()
            try:
                reply = await client.post(f"{self.hosts[turn].base_url}/chat/completions", json=body, headers=headers)
            except httpx.ConnectError:
                continue  # a balancer goes on to the other host
            except httpx.HTTPError as error:
                was_killed = sent <= self.killed_at.get(turn, 0.0)
                end = "cut with its process" if was_killed else f"BROKEN: {type(error).__name__}"
                return Asked(phase, turn, end, "", time.perf_counter() - since, "")
            seconds, source = time.perf_counter() - since, reply.headers.get("x-sameway-cache", "")
            end = _end(reply, prompt, is_stream)
            return Asked(phase, turn, end, source, seconds, reply.headers.get("x-request-id", ""))
        return Asked(phase, host, "BROKEN: no host", "", time.perf_counter() - since, "")


def _end(reply: httpx.Response, prompt: Prompt, is_stream: bool) -> str:
    if reply.status_code != 200:
        return f"{reply.status_code} {reply.json()['error']['code']}"
    if not is_stream:
        said = reply.json()["choices"][0]["message"]["content"]
    else:
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        if any("error" in event for event in events):
            return "in-band error"
        if not reply.text.endswith("data: [DONE]\n\n"):
            return "TRUNCATED"
        deltas = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        said = "".join(deltas)
    if said == prompt.answer:
        return "ok"
    return "wrong by meaning" if reply.headers["x-sameway-cache"] == "semantic" else f"WRONG: {said[:60]!r}"


def _prompts(count: int) -> list[Prompt]:
    """A third of them numbered and asked once or twice, a third numbered and asked often, a third wordings of topics."""
    rare = [Prompt(f"Describe item {number} of the list", f"Item {number} it is.") for number in range(count)]
    often = rare[:20] * (count // 20)
    topics = [Prompt(form.format(topic), f"This is how to {topic}.") for topic in _TOPICS for form in _WORDINGS]
    return rare + often + topics * (count // len(topics))


# -- the faults --------------------------------------------------------------------------------------------------------


def _kill_host(fleet: Fleet, number: int) -> None:
    """SIGKILL every process of a host, and start it again."""
    host = fleet.hosts[number]
    assert host.process is not None
    supervisor = psutil.Process(host.process.pid)
    for process in [supervisor, *supervisor.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    host.process.wait()
    fleet.killed_at[number] = time.perf_counter()
    host.start()
    host.wait_ready()


def _kill_engine(engine: RedisServer, seconds: float) -> None:
    """Kill the vector engine; it comes back without its index."""
    engine.kill()
    time.sleep(seconds)
    engine.start()


def _roll(fleet: Fleet) -> None:
    """Restart the hosts one after the other, each with a configuration that has one model more."""
    for host in fleet.hosts:
        host.stop()
        path = host.folder / "sameway.yaml"
        config = yaml.safe_load(path.read_text())
        (known,) = config["models"]["mock"]["deployments"]
        config["models"]["second"] = {"deployments": [{**known, "name": "second"}]}
        path.write_text(yaml.safe_dump(config))
        host.start()
        host.wait_ready()


def _faults(fleet: Fleet, cluster: RedisCluster, database: Database) -> dict[str, Callable[[], None]]:
    return {
        "east is killed": lambda: _kill_host(fleet, 0),
        "west is killed": lambda: _kill_host(fleet, 1),
        "Redis fails over": lambda: cluster.fail_over(LEDGER_STREAM),
        "the database fails over": database.fail_over,
        "a rolling restart": lambda: _roll(fleet),
    }


async def _through(fleet: Fleet, faults: dict[str, Callable[[], None]], arguments: argparse.Namespace) -> None:
    running = asyncio.create_task(fleet.run(arguments.users))
    await asyncio.sleep(arguments.seconds)
    for name, act in faults.items():
        if not arguments.only or name in arguments.only:
            fleet.phase = name
            await asyncio.gather(asyncio.to_thread(act), asyncio.sleep(arguments.seconds))
            fleet.phase = f"after: {name}"
            await asyncio.sleep(arguments.seconds / 2)
    fleet.is_over = True
    await running


@contextlib.contextmanager
def _fleet(upstream: Upstream, folder: Path, shared: dict[str, Any], index: str | None) -> Iterator[Fleet]:
    """Two hosts that are ready; their first team has a hard budget that it never reaches."""
    prompts = _prompts(600)
    labels = {prompt.text: prompt.answer for prompt in prompts}
    upstream.labels(labels)
    config = {
        "workers": 2,
        "models": {"mock": {"deployments": [deployment(upstream.url, "mock", "mock?delay_ms=100")]}},
        "engines": {},
        "budgets": {"hold_lease_s": 5},
        "cache": {"error_max": _ERROR_MAX, **({"index_url": index} if index else {})},
        **shared,
    }
    env = {"SAMEWAY_SECRET": "one secret for every host, or no host reads the other's cache"}
    hosts = [Gateway(_made(folder / name), config, env) for name in ("east", "west")]
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Gateway.start, hosts))
        for host in hosts:
            host.wait_ready()
        hosts[0].admin("POST", "/teams/1/budgets", json={"window": "total", "limit_microusd": 10**12, "is_hard": True})
        yield Fleet(hosts, prompts)
    finally:
        for host in hosts:
            host.stop()


def _rows(fleet: Fleet) -> Iterator[dict[str, Any]]:
    for phase in dict.fromkeys(one.phase for one in fleet.asked):
        some = [one for one in fleet.asked if one.phase == phase]
        seconds = sorted(one.seconds for one in some if one.end == "ok") or [0.0]
        yield {
            "case": phase,
            "asked": len(some),
            "ends": dict(Counter(one.end for one in some).most_common()),
            "sources": dict(Counter(one.source for one in some if one.end == "ok").most_common()),
            **{f"p{p}_ms": round(1000 * seconds[p * (len(seconds) - 1) // 100], 1) for p in (50, 99)},
        }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0 if every bound holds, else 1."""
    parser = argparse.ArgumentParser(prog="./run bench fleet", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--has-index", action="store_true", help="vectors are in Redis' query engine, which is killed too"
    )
    parser.add_argument("--users", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=12.0, help="at least, of each fault")
    parser.add_argument("--only", nargs="*", help="these faults")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="bench-fleet-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        folder.chmod(0o755)  # PostgreSQL is another user's where this one is root
        cluster = stack.enter_context(run_redis_cluster(replicas=3, node_timeout_ms=_NODE_TIMEOUT_MS))
        database = Database(folder)
        stack.callback(database.stop)
        upstream = stack.enter_context(run_upstream())
        shared = {"redis_url": cluster.url, "database_url": database.url}
        engine = stack.enter_context(run_query_engine()) if arguments.has_index else None
        fleet = stack.enter_context(_fleet(upstream, folder, shared, engine.url if engine is not None else None))
        faults = _faults(fleet, cluster, database)
        if engine is not None:
            faults["the vector engine is killed"] = lambda: _kill_engine(engine, arguments.seconds)
        asyncio.run(_through(fleet, faults, arguments))
        billed = {one.request_id for one in fleet.asked if one.end == "ok" and one.source in ("miss", "bypass")}
        books = books_of(fleet.hosts[0], billed)
        rows = list(_rows(fleet))
    hits = sum(one.source == "semantic" for one in fleet.asked)
    wrong = sum(one.end == "wrong by meaning" for one in fleet.asked)
    broken = sum(one.end.isupper() or one.end.split(":")[0] in ("BROKEN", "WRONG", "TRUNCATED") for one in fleet.asked)
    rows.append({"case": "in all", "asked": len(fleet.asked), "broken": broken, "hits": hits, "wrong": wrong, **books})
    for row in rows:
        print(json.dumps(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return int(bool(broken) or wrong > _ERROR_MAX * len(fleet.asked) or not books["is_exact"])
