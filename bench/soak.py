"""`./run bench soak`: does a gateway that is changed while it works lose a request, or grow?

    ./run bench soak [--minutes 60] [--rate 20] [--workers 2] [--no-semantic] [--json FILE]

`sameway serve` with its embedded Redis and SQLite, and an upstream that answers as each model's name says. Requests come at a rate:
new ones, repeated ones, other wordings, streams, and clients that leave while they wait or in a stream. Meanwhile the configuration
changes ten times a minute (deployments come and go), the provider's key is another one every 20 s, answers are imported, asked
for, and purged every 15 s, and everything is purged every two minutes. Answers live for 60 s, so that all that is kept is bounded.

Exits with 1 where a request failed, an answer is another prompt's, the books do not agree, a process ended, something is left
behind at the end, or something grew after the warm-up (the first third, twenty minutes at most) by more than 12 MB, 12 files, 12
sockets, 4 threads or 40 keys without an expiry. Growth is that of the line through the readings. An hour's warm-up fills what the
cache worker remembers of the last texts that it has read.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
import redis
import yaml

from bench.faults import books_of
from tests.e2e.gateway import ADMIN_KEY, API_KEY, Gateway, deployment
from tests.e2e.upstream import Upstream, run_upstream

_GROWTH_MAX = {"MB": 12.0, "files": 12.0, "sockets": 12.0, "threads": 4.0, "keys": 40.0}
_WARM_UP_S_MAX = 1_200.0
_TTL_S = 60
_PERIOD_S_MIN = 2.0  # a worker looks at a key's file each second
_TOPICS = ("reset my password", "export my invoices", "return a damaged item", "read the meter", "pay by bank transfer")
_WORDINGS = ("How do I {}?", "What is the way to {}?", "Please tell me how to {}", "Can you explain how one can {}?")
_CURATED = "An operator wrote this."

Reading = tuple[float, float]
"""At which second, how much."""

# -- the requests ------------------------------------------------------------------------------------------------------


@dataclass
class Soak:
    """What is asked of one gateway, and what became of it. `failures` has a line each."""

    gateway: Gateway
    upstream: Upstream
    workers: int = 2
    is_semantic: bool = True
    failures: list[str] = field(default_factory=list)
    ends: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    seconds: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    billed: set[str] = field(default_factory=set)
    said: dict[str, str] = field(default_factory=dict)  # to the repeated ones, at first
    chance: random.Random = field(default_factory=lambda: random.Random(39))
    texts: int = 0  # that were new
    purging: asyncio.Lock = field(default_factory=asyncio.Lock)  # a purge of all would take what was imported

    def _fresh(self) -> int:
        self.texts += 1
        return self.texts

    def fail(self, what: str) -> None:
        self.failures.append(f"{time.strftime('%H:%M:%S')} {what}")

    async def ask(self, client: httpx.AsyncClient) -> None:
        """One request of a kind by chance."""
        kinds: tuple[tuple[int, Callable[[httpx.AsyncClient], Awaitable[str]]], ...] = (
            (25, self._miss),
            (30, self._hit),
            (10, self._wording),
            (15, self._stream),
            (8, self._streamed_hit),
            (4, self._messages),
            (4, self._left_waiting),
            (4, self._left_streaming),
        )
        (act,) = self.chance.choices([one for _, one in kinds], [weight for weight, _ in kinds])
        kind, since = act.__name__.removeprefix("_").replace("_", " "), time.perf_counter()
        try:
            end = await act(client)
        except (httpx.HTTPError, ValueError, KeyError) as error:
            end = f"BROKEN: {type(error).__name__} {error}"
            self.fail(f"{kind}: {end}")
        self.ends[kind][end] += 1
        self.seconds[kind].append(time.perf_counter() - since)

    async def _miss(self, client: httpx.AsyncClient) -> str:
        return await self._whole(client, f"Item {self._fresh()} of {self.chance.random()}")

    async def _hit(self, client: httpx.AsyncClient) -> str:
        return await self._whole(client, f"Often asked, number {self.chance.randrange(20)}", is_repeated=True)

    async def _wording(self, client: httpx.AsyncClient) -> str:
        return await self._whole(client, self.chance.choice(_WORDINGS).format(self.chance.choice(_TOPICS)))

    async def _stream(self, client: httpx.AsyncClient) -> str:
        return await self._streamed(client, f"Tell {self._fresh()} at length", "paced")

    async def _streamed_hit(self, client: httpx.AsyncClient) -> str:
        return await self._streamed(client, f"Tell again, number {self.chance.randrange(10)}", "paced")

    async def _messages(self, client: httpx.AsyncClient) -> str:
        body = {"model": "mock", "max_tokens": 64, "messages": [_user(f"Message {self._fresh()}")]}
        reply = await client.post(f"{self.gateway.base_url}/messages", json=body)
        return self._end(reply, "messages", bool(reply.status_code != 200 or reply.json()["content"]))

    async def _left_waiting(self, client: httpx.AsyncClient) -> str:
        body = {"model": "late", "messages": [_user(f"Wait {self._fresh()}")]}
        try:
            reply = await client.post(f"{self.gateway.base_url}/chat/completions", json=body, timeout=0.5)
        except httpx.TimeoutException:
            return "left"
        return self._end(reply, "left waiting", is_whole=True)

    async def _left_streaming(self, client: httpx.AsyncClient) -> str:
        body = {"model": "paced", "stream": True, "messages": [_user(f"Leave {self._fresh()}")]}
        async with client.stream("POST", f"{self.gateway.base_url}/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                await reply.aread()
                return self._end(reply, "left streaming", is_whole=True)
            await anext(reply.aiter_raw())
        return "left"

    async def _whole(self, client: httpx.AsyncClient, text: str, *, is_repeated: bool = False) -> str:
        body = {"model": "mock", "messages": [_user(text)]}
        reply = await client.post(f"{self.gateway.base_url}/chat/completions", json=body)
        is_whole = True
        if reply.status_code == 200:
            said = reply.json()["choices"][0]["message"]["content"]
            is_whole = bool(said) and (not is_repeated or self.said.setdefault(text, said) == said)
        return self._end(reply, text, is_whole)

    async def _streamed(self, client: httpx.AsyncClient, text: str, model: str) -> str:
        body = {"model": model, "stream": True, "messages": [_user(text)]}
        reply = await client.post(f"{self.gateway.base_url}/chat/completions", json=body)
        events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
        said = any(choice["delta"].get("content") for event in events for choice in event.get("choices", ()))
        is_whole = said and not any("error" in event for event in events) and reply.text.endswith("data: [DONE]\n\n")
        return self._end(reply, text, is_whole)

    def _end(self, reply: httpx.Response, what: str, is_whole: bool) -> str:
        source: str = reply.headers.get("x-sameway-cache", "")
        if reply.status_code != 200 or not is_whole:
            self.fail(f"{what}: {reply.status_code} {source} {reply.text[-300:]!r}")
            return f"{reply.status_code} FAILED"
        if source in ("miss", "bypass"):
            self.billed.add(reply.headers["x-request-id"])
        return source

    # -- the operator --------------------------------------------------------------------------------------------------

    def config(self, turn: int) -> dict[str, Any]:
        """The file's contents: one deployment of `mock` and an alias go by turns, and so do limits."""
        key = {"api_key_file": str(self.gateway.folder / "key")}

        def at(name: str, plan: str) -> dict[str, Any]:
            return deployment(self.upstream.url, name, f"mock?{plan}", **key)

        changing = f"turn-{turn % 10}"
        return {
            "workers": self.workers,
            "engines": {},
            "models": {
                "mock": {"deployments": [at("plain", "delay_ms=20"), at(changing, "delay_ms=20")]},
                "paced": {"deployments": [at("paced", "pace_ms=30;chunks=20")]},
                "late": {"deployments": [at("late", "delay_ms=3000")]},
                changing: {"deployments": [at(f"own-{changing}", "delay_ms=20")]},
            },
            "cache": {
                "check_share": 0,
                "is_semantic": self.is_semantic,
                "ttl_s": _TTL_S,
                "ttl_s_max": _TTL_S + turn % 3,
                "l1_bytes_max": 1 << 20,
            },
        }

    async def reload(self, client: httpx.AsyncClient, turn: int) -> None:
        """Another file, and the admin API, the watch of the file, or both at once have it read."""
        _replace(self.gateway.folder / "sameway.yaml", yaml.safe_dump(self.config(turn + 1)))
        if turn % 2 == 0:
            reply = await self._admin(client, "reload", "/config/reload")
            if reply is None:
                return
        else:
            await asyncio.sleep(3.0)  # the file's watch has found it
        own = f"turn-{(turn + 1) % 10}"
        body = {"model": own, "messages": [_user(f"The newest {self._fresh()}")]}
        reply = await client.post(f"{self.gateway.base_url}/chat/completions", json=body)
        self._end(reply, f"reload {turn}", is_whole=True)

    async def rotate(self, client: httpx.AsyncClient, turn: int) -> None:
        """Another provider's key. What the upstream was last asked had the one before."""
        seen = (await asyncio.to_thread(self.upstream.seen)).requests[-1:]
        wrong = [one for one in seen if one["headers"].get("authorization") != f"Bearer sk-upstream-{turn}"]
        if wrong:
            self.fail(f"rotation {turn}: the upstream was asked with {wrong[0]['headers'].get('authorization')}")
        _replace(self.gateway.folder / "key", f"sk-upstream-{turn + 1}\n")
        self.ends["rotation"]["done"] += 1

    async def curate(self, client: httpx.AsyncClient, turn: int) -> None:
        async with self.purging:
            await self._curate(client, turn)

    async def _curate(self, client: httpx.AsyncClient, turn: int) -> None:
        """Answers of the operator are imported and served, then purged and gone."""
        texts = [f"Curated {turn} {number}" for number in range(50)]
        lines = [
            {"request": {"model": "mock", "messages": [_user(text)], "cache": {"tags": ["soak"]}}, "answer": _CURATED}
            for text in texts
        ]
        content = "".join(json.dumps(line) + "\n" for line in lines)
        done = await self._admin(client, "import", "/cache/import?team_id=1", content=content)
        if done is None:
            return
        if done.json()["stored"] != len(texts):
            self.fail(f"import {turn}: {done.text[:300]}")
        body = {"model": "mock", "messages": [_user(texts[0])], "cache": {"tags": ["soak"]}}
        asked = [await client.post(f"{self.gateway.base_url}/chat/completions", json=body) for _ in range(2)]
        for reply in asked:
            self._end(reply, "curated", reply.status_code != 200 or _CURATED in reply.text)
        await self._admin(client, "purge", "/cache/purge", json={"tag": "soak", "dry_run": False})
        await asyncio.sleep(1.0)
        headers = {"cache-control": "only-if-cached"}
        reply = await client.post(f"{self.gateway.base_url}/chat/completions", json=body, headers=headers)
        if reply.status_code != 504:
            self.fail(f"purge {turn}: a purged answer: {reply.status_code} {reply.text[:300]}")

    async def purge(self, client: httpx.AsyncClient, turn: int) -> None:
        async with self.purging:
            await self._admin(client, "purge of all", "/cache/purge", json={"all": True, "dry_run": False})

    async def _admin(self, client: httpx.AsyncClient, what: str, path: str, **body: Any) -> httpx.Response | None:
        """The answer, or none where it is a failure."""
        headers = {"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"}
        try:
            reply = await client.post(f"{self.gateway.root}/admin/api{path}", headers=headers, **body)
        except httpx.HTTPError as error:
            self.ends[what]["BROKEN"] += 1
            self.fail(f"{what}: {type(error).__name__} {error}")
            return None
        self.ends[what][str(reply.status_code)] += 1
        if reply.status_code != 200:
            self.fail(f"{what}: {reply.status_code} {reply.text[:300]}")
            return None
        return reply


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _replace(path: Path, text: str) -> None:
    """Another file in its place, as Kubernetes and Vault's agents do it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.replace(path)


# -- the readings ------------------------------------------------------------------------------------------------------


class Readings:
    """Memory, files, sockets and threads of each process of a gateway, Redis' keys and memory, and files on disk."""

    def __init__(self, gateway: Gateway) -> None:
        assert gateway.process is not None
        self._folder = gateway.folder
        self._supervisor = psutil.Process(gateway.process.pid)
        self._processes = self._named()
        (store,) = (one for name, one in self._processes.items() if name == "redis")
        address = next(part for part in " ".join(store.cmdline()).split() if part.startswith("unixsocket:"))
        self._redis = redis.Redis(unix_socket_path=address.removeprefix("unixsocket:"))
        self._since = time.monotonic()
        self.rows: dict[tuple[str, str], list[Reading]] = {}  # by who and what

    def _named(self) -> dict[str, psutil.Process]:
        found = {"supervisor": self._supervisor}
        workers = itertools.count(1)
        for child in self._supervisor.children(recursive=True):
            line = " ".join(child.cmdline())
            name = "redis" if "redis" in line.split(" ")[0] or "unixsocket" in line else "cache worker"
            found[f"worker {next(workers)}" if "gateway worker" in line else name] = child
        return found

    def take(self) -> None:
        """Read all. Raises psutil.NoSuchProcess where a process has ended."""
        at_s = time.monotonic() - self._since

        def note(who: str, what: str, value: float) -> None:
            self.rows.setdefault((who, what), []).append((at_s, value))

        for name, process in self._processes.items():
            with process.oneshot():
                note(name, "MB", process.memory_info().rss / 1e6)
                note(name, "files", process.num_fds())
                note(name, "threads", process.num_threads())
            note(name, "sockets", len(process.net_connections("all")))
        memory: Any = self._redis.info("memory")
        note("redis data", "MB", memory["used_memory"] / 1e6)
        keys: Any = self._redis.info("keyspace")
        counts = keys.get("db0", {"keys": 0, "expires": 0})
        note("redis data", "keys", counts["keys"] - counts["expires"])  # those of settled requests live for an hour
        on_disk = [one for one in self._folder.rglob("*") if not one.is_socket()]
        note("disk", "files", len(on_disk))

    def latest(self) -> str:
        """The memory of each, for people."""
        return ", ".join(f"{who} {some[-1][1]:.0f}" for (who, what), some in self.rows.items() if what == "MB")


def growth(rows: Mapping[tuple[str, str], Sequence[Reading]], warm_up_s: float) -> list[dict[str, Any]]:
    """A row each: first and last, slopes an hour with and without the warm-up, and what it grew by after it."""
    found = []
    for (who, what), all_ in rows.items():
        later = [one for one in all_ if one[0] >= warm_up_s]
        slope = _slope(later)
        grew = slope * (later[-1][0] - later[0][0]) if later else 0.0
        row: dict[str, Any] = {"who": who, "what": what, "first": all_[0][1], "warm": (later or all_)[0][1]}
        row |= {"last": all_[-1][1], "most": max(value for _, value in all_), "grew": round(grew, 2)}
        row |= {"an_hour_in_all": round(3600 * _slope(all_), 1), "an_hour": round(3600 * slope, 1)}
        found.append({**row, "is_good": grew <= _GROWTH_MAX[what]})
    return found


def _slope(points: Sequence[Reading]) -> float:
    """The least squares' slope a second; 0 for fewer than three points."""
    if len(points) < 3:
        return 0.0
    return statistics.linear_regression(*zip(*points, strict=True)).slope


# -- the run -----------------------------------------------------------------------------------------------------------


async def _run(soak: Soak, readings: Readings, seconds: float, rate: float) -> None:
    headers = {"authorization": f"Bearer {API_KEY}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    async with httpx.AsyncClient(headers=headers, timeout=60.0, limits=limits, trust_env=False) as client:
        until = time.monotonic() + seconds

        async def every(period_s: float, act: Callable[[httpx.AsyncClient, int], Awaitable[None]]) -> None:
            start = time.monotonic()
            for turn in itertools.count():
                due = start + period_s * (turn + 1)
                if due > until:
                    return
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                try:
                    await act(client, turn)
                except (httpx.HTTPError, OSError, ValueError, KeyError) as error:
                    soak.fail(f"{act.__name__} {turn}: {type(error).__name__} {error}")

        async def read(_: httpx.AsyncClient, turn: int) -> None:
            await asyncio.to_thread(readings.take)
            if turn % 6 == 5:
                count = sum(map(len, soak.seconds.values()))
                print(f"{count:,} requests, {len(soak.failures)} failures, MB: {readings.latest()}", flush=True)

        async def load() -> None:
            async with asyncio.TaskGroup() as asked:
                due = time.monotonic()
                while due < until:
                    due += soak.chance.expovariate(rate)
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    asked.create_task(soak.ask(client))

        async with asyncio.TaskGroup() as all_:
            all_.create_task(load())
            short = min(1.0, seconds / 150.0)  # a short run has each act, too
            acts = ((6.0, soak.reload), (20.0, soak.rotate), (15.0, soak.curate), (120.0, soak.purge), (10.0, read))
            for period_s, act in acts:
                all_.create_task(every(max(_PERIOD_S_MIN, period_s * short), act))


def _left(gateway: Gateway, run_files: Path) -> list[str]:
    """Stop the gateway; what it leaves behind that it should not."""
    assert gateway.process is not None
    below = psutil.Process(gateway.process.pid).children(recursive=True)
    gateway.stop()
    _, alive = psutil.wait_procs(below, timeout=10)
    wrong = [f"left behind: process {one.pid}" for one in alive]
    wrong += [f"left behind: {one}" for one in run_files.rglob("*")]
    if gateway.process.returncode != 0:
        wrong.append(f"the gateway ended with {gateway.process.returncode}")
    records = [json.loads(line) for line in gateway.log.read_text().splitlines() if line.startswith("{")]
    errors = Counter(str(one.get("event")) for one in records if one.get("level") in ("error", "critical"))
    stacks = gateway.log.read_text().count("Traceback (most recent call last)")
    wrong += [f"the log: {count} times {event}" for event, count in errors.items()]
    return [*wrong, *([f"the log: {stacks} stacks"] if stacks else [])]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the bench; returns 0 if nothing failed or grew, else 1."""
    arguments = _parser().parse_args(argv)
    seconds = arguments.minutes * 60.0
    with tempfile.TemporaryDirectory(prefix="bench-soak-") as name, run_upstream() as upstream:
        folder = Path(name)
        scratch = folder / "tmp"
        scratch.mkdir()
        (folder / "key").write_text("sk-upstream-0\n")
        gateway = Gateway(folder, {}, {"TMPDIR": str(scratch)})
        soak = Soak(gateway, upstream, arguments.workers, is_semantic=arguments.semantic)
        _replace(folder / "sameway.yaml", yaml.safe_dump(soak.config(0)))
        try:
            gateway.start()
            gateway.wait_ready()
            budget = {"window": "total", "limit_microusd": 10**12, "is_hard": True}
            gateway.admin("POST", "/teams/1/budgets", json=budget)
            readings = Readings(gateway)
            try:
                readings.take()
                asyncio.run(_run(soak, readings, seconds, arguments.rate))
            except* psutil.NoSuchProcess as error:
                soak.fail(f"a process has ended: {error.exceptions}")
            books = books_of(gateway, soak.billed)
            if not books["is_exact"]:
                soak.fail(f"the books: {books}")
        finally:
            left = _left(gateway, scratch) if gateway.process is not None else []
        log = gateway.log.read_text()
    soak.failures += left
    rows = growth(readings.rows, min(seconds / 3.0, _WARM_UP_S_MAX))
    _print(soak, rows, books)
    if arguments.json is not None:
        figures = {"ends": soak.ends, "rows": rows, "books": books, "failures": soak.failures}
        arguments.json.write_text(
            json.dumps({**figures, "readings": {" ".join(k): v for k, v in readings.rows.items()}})
        )
        arguments.json.with_suffix(".log").write_text(log)
    return int(bool(soak.failures) or not all(row["is_good"] for row in rows))


def _print(soak: Soak, rows: Sequence[dict[str, Any]], books: dict[str, Any]) -> None:
    print("| asked | times | p50 ms | p99 ms | ends |\n| --- | --- | --- | --- | --- |")
    for kind, ends in sorted(soak.ends.items()):
        times = sorted(soak.seconds[kind]) or [0.0]
        quantiles = [f"{1000 * times[p * (len(times) - 1) // 100]:.0f}" for p in (50, 99)]
        told = ", ".join(f"{count} {end}" for end, count in ends.most_common())
        print(f"| {kind} | {sum(ends.values())} | {' | '.join(quantiles)} | {told} |")
    names = ("first", "warm", "last", "most", "grew", "an_hour", "an_hour_in_all")
    print("\n| of | what | first | warm | last | most | grew when warm | an hour, warm | an hour, in all | |")
    print("| --- " * 10 + "|")
    for row in rows:
        figures = " | ".join(f"{row[name]:.1f}" for name in names)
        print(f"| {row['who']} | {row['what']} | {figures} | {'' if row['is_good'] else 'GREW'} |")
    print(f"\nthe books: {json.dumps(books)}\nfailures: {len(soak.failures)}")
    print("".join(f"  {one}\n" for one in soak.failures[:40]), end="", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="./run bench soak", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=20.0, help="requests a second")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-semantic", dest="semantic", action="store_false", help="exact hits only")
    parser.add_argument("--json", type=Path, default=None, help="write all figures, and the gateway's log beside it")
    return parser
