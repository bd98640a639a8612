"""`./run bench replicas`: how soon answers begin at eight replicas, by who chooses the replica.

    ./run bench replicas [--seconds N] [--seeds N] [--json FILE]

Simulated: an agent day, compressed. Sessions share system prompts and grow turn by turn; there is a burst, a replica that works at a
quarter of its speed for a while, and one that dies and comes back without its memory. A replica reads prompts in chunks beside its
decode steps, holds a bounded KV memory with the blocks that it has read, and makes requests wait where that is full; its rates are
those of the local engine (docs/benchmarks.md, the embedded model on two threads). The product chooses with its own fleet: four
workers, each with the real aliases, breakers, estimates, backlogs and prefixes, which tell each other every 250 ms. The others know
at once which replica is dead, and what is in flight everywhere; the oracle also knows each queue, each memory and each speed.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import tempfile
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from gateway.backends.base import BackendUnavailable
from gateway.deployments.alias import Alias
from gateway.deployments.deployment import Deployment
from gateway.deployments.fleet import build_fleet
from gateway.deployments.progress import Attempt, Progress
from gateway.settings import Settings
from policies import Demand, Usage
from policies.breaker import Asker
from policies.replicas import Reading, Work, pooled

_REPLICAS, _WORKERS = 8, 4
_PREFILL_MS, _STEP_MS, _ROW_MS = 0.69, 8.0, 1.2  # a token, a decode step, and each answer in it
_CHUNK = 256  # prompt tokens in a step
_KV_BLOCKS, _BLOCK = 1_000, 128  # of a replica; tokens of one
_TOLD_S = 0.1
_PROMPT_MAX = 16_000
_SYSTEMS = (2_400, 1_800, 3_200, 1_200)  # tokens of the system prompts


@dataclass(eq=False)
class Request:
    """A turn of a session: its blocks, the tokens that it brings and those of its answer."""

    session: int
    arrived: float
    chain: tuple[bytes, ...]
    tokens: int
    answer: int
    then: Callable[[float], None]  # what its end begins
    cached: int = 0
    to_read: int = 0
    made: int = 0
    first: float = 0.0  # when its first token came
    sent: float = 0.0
    told: Callable[[float, str], None] = lambda now, what: None  # first, done or lost


class Replica:
    """A server. `speed` 1 is its own; 0: it is dead."""

    def __init__(self, name: str, sim: Sim) -> None:
        self.name, self.sim, self.speed = name, sim, 1.0
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        self.read_tokens = self.lost_tokens = 0
        self.is_stepping = False

    @property
    def held(self) -> int:
        """The KV blocks of running requests."""
        return sum(-(-(one.tokens + one.answer) // _BLOCK) for one in self.running)

    def warm(self, request: Request) -> int:
        """The tokens of a prompt that its memory holds."""
        depth = 0
        while depth < len(request.chain) and request.chain[depth] in self.memory:
            depth += 1
        return depth * _BLOCK

    def ahead(self) -> int:
        """The tokens that it reads before those of a new request."""
        return sum(one.to_read for one in self.running) + sum(
            max(1, one.tokens - self.warm(one)) for one in self.waiting
        )

    def take(self, request: Request) -> bool:
        """Queue a request; returns False where the server is dead."""
        if not self.speed:
            return False
        request.sent = self.sim.now
        self.waiting.append(request)
        self.wake()
        return True

    def wake(self) -> None:
        if not self.is_stepping and self.speed and (self.waiting or self.running):
            self.is_stepping = True
            self.step()

    def step(self) -> None:
        """Admit what fits, and read and decode for one step."""
        while self.waiting and len(self.running) < 64:
            request = self.waiting[0]
            need = -(-(request.tokens + request.answer) // _BLOCK)
            if self.running and self.held + need > _KV_BLOCKS:
                break
            self.waiting.popleft()
            request.cached = min(self.warm(request), request.tokens - 1)
            request.to_read, request.made = request.tokens - request.cached, 0
            self.remember(request.chain[: request.cached // _BLOCK])
            self.running.append(request)
        budget, read = _CHUNK, 0
        decoding = [one for one in self.running if not one.to_read]
        for request in self.running:
            part = min(budget - read, request.to_read)
            request.to_read, read = request.to_read - part, read + part
        self.read_tokens += read
        duration_ms = (_STEP_MS + _ROW_MS * len(decoding) + _PREFILL_MS * read) / self.speed
        self.sim.at(self.sim.now + duration_ms / 1000.0, lambda: self.stepped(decoding))

    def stepped(self, decoding: list[Request]) -> None:
        now = self.sim.now
        if not self.speed:
            return
        for request in list(self.running):
            if request.to_read:
                continue
            if request in decoding or not request.made:
                request.made += 1
            if request.made == 1:
                self.remember(request.chain)
                request.first = now
                request.told(now, "first")
            if request.made >= request.answer:
                self.running.remove(request)
                request.told(now, "done")
        self.is_stepping = False
        self.wake()

    def remember(self, chain: tuple[bytes, ...]) -> None:
        for block in reversed(chain):
            self.memory[block] = None
            self.memory.move_to_end(block)
        while len(self.memory) > max(0, _KV_BLOCKS - self.held):
            self.memory.popitem(last=False)

    def die(self) -> None:
        """Lose every request, and what was read and made for them."""
        gone = [*self.running, *self.waiting]
        self.lost_tokens += sum(one.tokens - one.cached - one.to_read + one.made for one in self.running)
        self.speed, self.is_stepping = 0.0, False
        self.running, self.waiting = [], deque()
        self.memory.clear()
        self.read_tokens = 0
        for request in gone:
            request.told(self.sim.now, "lost")

    def revive(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.wake()


class Sim:
    """The clock, the replicas and the traffic of one run. `choose` is asked for each request."""

    def __init__(self, seed: int, seconds: float, rate: float) -> None:
        self.now, self._events, self._count = 0.0, list[tuple[float, int, Callable[[], None]]](), 0
        # what arrives is drawn apart from what routers draw, and for each session: it is the same for all
        self.seed, self.arrivals, self.chance = seed, random.Random(seed), random.Random(seed)
        self.seconds, self.rate = seconds, rate
        self.replicas = {f"r{n}": Replica(f"r{n}", self) for n in range(_REPLICAS)}
        self.router: Router
        self.ttfts_ms: list[float] = []
        self.tokens = self.cached = self.sessions = self.begun = 0

    def at(self, when: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, act))

    def run(self, router: Router) -> None:
        self.router, seconds = router, self.seconds
        slow, dying = self.replicas["r2"], self.replicas["r5"]
        self.at(0.50 * seconds, lambda: setattr(slow, "speed", 0.25))
        self.at(0.75 * seconds, lambda: setattr(slow, "speed", 1.0))
        self.at(0.80 * seconds, dying.die)
        self.at(0.90 * seconds, dying.revive)
        self.at(0.0, self.arrive)
        self.at(0.0, self.tell)
        while self._events:
            self.now, _, act = heapq.heappop(self._events)
            act()

    def tell(self) -> None:
        self.router.tell()
        if self.now < self.seconds or self.begun:
            self.at(self.now + _TOLD_S, self.tell)

    def arrive(self) -> None:
        """A session begins; the next one follows."""
        if self.now >= self.seconds:
            return
        is_burst = 0.30 * self.seconds < self.now < 0.40 * self.seconds
        self.at(self.now + self.arrivals.expovariate(self.rate * (2.0 if is_burst else 1.0)), self.arrive)
        self.sessions += 1
        chance = random.Random(f"{self.seed} {self.sessions}")
        system = chance.choices(range(len(_SYSTEMS)), (8, 4, 2, 1))[0]
        self.turn(self.sessions, chance, system, _SYSTEMS[system], _drawn(chance, 5, 1.0, 60))

    def turn(self, session: int, chance: random.Random, system: int, before: int, left: int) -> None:
        """One turn of a session: what a tool or a person said is new."""
        tokens, answer = before + _drawn(chance, 150, 1.2, 3_000), _drawn(chance, 50, 0.8, 400)
        shared = _SYSTEMS[system] // _BLOCK
        chain = tuple(
            blake2b(f"{system if n < shared else (system, session)} {n}".encode(), digest_size=8).digest()
            for n in range(tokens // _BLOCK)
        )

        def then(now: float) -> None:
            if left > 1 and tokens < _PROMPT_MAX:
                pause_s = chance.expovariate(1 / 3.0)
                self.at(now + pause_s, lambda: self.turn(session, chance, system, tokens + answer, left - 1))

        self.begun += 1
        self.send(Request(session, self.now, chain, tokens, answer, then))

    def send(self, request: Request, tried: frozenset[str] = frozenset()) -> None:
        """Ask replicas until one takes the request."""
        while True:
            name, told = self.router.choose(request, tried)
            if not name:  # none can be asked now
                self.at(self.now + 0.1, lambda: self.send(request))
                return
            if self.asked(name, request, told):
                return
            tried |= {name}

    def asked(self, name: str, request: Request, told: Told) -> bool:
        """Ask a replica; returns False where it is dead."""
        request.told = lambda now, what: self.told(request, told, now, what)
        if self.replicas[name].take(request):
            return True
        told("refused")
        return False

    def told(self, request: Request, told: Callable[[str], None], now: float, what: str) -> None:
        told(what)
        if what == "first":
            self.ttfts_ms.append((now - request.arrived) * 1000.0)
            self.tokens, self.cached = self.tokens + request.tokens, self.cached + request.cached
        elif what == "done":
            self.begun -= 1
            request.then(now)
        elif not request.first:
            self.send(request)
        else:  # the client has begun to read: its session ends
            self.begun -= 1


def _drawn(chance: random.Random, median: float, sigma: float, most: int) -> int:
    return max(1, min(most, int(chance.lognormvariate(math.log(median), sigma))))


Told = Callable[[str], None]


class Router:
    """Who chooses. `choose` returns a replica's name, empty for none, and what is told of the request's fate."""

    def __init__(self, sim: Sim) -> None:
        self.sim = sim
        self.inflight = dict.fromkeys(sim.replicas, 0)

    def tell(self) -> None:
        """Called every 250 ms."""

    def alive(self, tried: frozenset[str]) -> list[str]:
        return [name for name, one in self.sim.replicas.items() if one.speed and name not in tried]

    def choose(self, request: Request, tried: frozenset[str]) -> tuple[str, Told]:
        names = self.alive(tried)
        if not names:
            return "", lambda what: None
        name = self.pick(request, names)
        self.inflight[name] += 1

        def told(what: str) -> None:
            if what != "first":
                self.inflight[name] -= 1

        return name, told

    def pick(self, request: Request, names: list[str]) -> str:
        raise NotImplementedError


class RoundRobin(Router):
    turn = 0

    def pick(self, request: Request, names: list[str]) -> str:
        self.turn += 1
        return names[self.turn % len(names)]


class LeastInFlight(Router):
    def pick(self, request: Request, names: list[str]) -> str:
        return min(names, key=lambda name: (self.inflight[name], self.sim.chance.random()))


class SessionSticky(LeastInFlight):
    """A session stays where its first turn went, which is where least was in flight."""

    def __init__(self, sim: Sim) -> None:
        super().__init__(sim)
        self.homes: dict[int, str] = {}

    def pick(self, request: Request, names: list[str]) -> str:
        home = self.homes.get(request.session)
        if home not in names:
            home = self.homes[request.session] = super().pick(request, names)
        return home


class PrefixOnly(LeastInFlight):
    """Where the longest prefix was sent; of equals where least is in flight."""

    def __init__(self, sim: Sim) -> None:
        super().__init__(sim)
        self.sent: dict[str, set[bytes]] = {name: set() for name in sim.replicas}

    def pick(self, request: Request, names: list[str]) -> str:
        def depth(name: str) -> int:
            return next(
                (n for n, block in enumerate(request.chain) if block not in self.sent[name]), len(request.chain)
            )

        longest = max(map(depth, names))
        name = super().pick(request, [name for name in names if depth(name) == longest])
        self.sent[name].update(request.chain)
        return name


class Oracle(Router):
    """The product's reasons, with what no gateway can know: each queue, memory and speed at this moment."""

    def __init__(self, sim: Sim) -> None:
        super().__init__(sim)
        self.reads: Counter[bytes] = Counter()

    def pick(self, request: Request, names: list[str]) -> str:
        costs = {name: self.cost(self.sim.replicas[name], request) for name in names}
        self.reads.update(request.chain)
        return min(names, key=lambda name: (costs[name], self.sim.chance.random()))

    def cost(self, replica: Replica, request: Request) -> float:
        cold = request.chain[replica.warm(request) // _BLOCK :]
        lone = sum(_BLOCK / (1 + self.reads[block] / _REPLICAS) for block in cold)
        tokens = replica.ahead() + request.tokens - len(request.chain) * _BLOCK + lone
        steps = -(-tokens // _CHUNK)
        row_ms = _STEP_MS + _ROW_MS * len(replica.running)
        wait_ms = (tokens + lone) * _PREFILL_MS + steps * row_ms
        wait_ms += 70 * _ROW_MS * (len(replica.running) + len(replica.waiting))
        need = -(-(request.tokens + request.answer) // _BLOCK) + sum(
            -(-(one.tokens + one.answer) // _BLOCK) for one in replica.waiting
        )
        room = _KV_BLOCKS - replica.held
        for one in sorted(replica.running, key=lambda one: one.answer - one.made):
            if need <= room:
                break
            room += -(-(one.tokens + one.answer) // _BLOCK)
            wait_ms = max(wait_ms, (one.answer - one.made) * row_ms + tokens * _PREFILL_MS)
        return wait_ms / replica.speed


class Product(Router):
    """The product's own fleets, one for each worker."""

    def __init__(self, sim: Sim) -> None:
        super().__init__(sim)
        self.workers = [_alias(lambda: sim.now) for _ in range(_WORKERS)]
        self.names = {d.name: f"r{n}" for n, d in enumerate(self.workers[0].deployments.values())}
        for alias in self.workers[1:]:  # their exchange twice a second makes these equal
            for name, deployment in alias.deployments.items():
                first = self.workers[0].deployments[name]
                deployment.estimate, deployment.health = first.estimate, first.health

    def tell(self) -> None:
        """What `SharedLoad` does through Redis."""
        for alias in self.workers:
            assert alias.prefixes is not None
            news, alias.prefixes.news = list(alias.prefixes.news), deque()
            for other in self.workers:
                if other is not alias and other.prefixes is not None:
                    for name, chain in news:
                        other.prefixes.note(name, chain)
        siblings = pooled([one.estimate.figures() for one in self.workers[0].deployments.values()])
        for name, short in self.names.items():
            replica = self.sim.replicas[short]
            reading = None
            if replica.speed:
                running, waiting = len(replica.running), len(replica.waiting)
                used = min(1.0, replica.held / _KV_BLOCKS)
                reading = Reading(running, waiting, used, _KV_BLOCKS * _BLOCK, replica.read_tokens)
            for alias in self.workers:
                parts = [one.deployments[name].backlog.sent for one in self.workers if one is not alias]  # type: ignore[union-attr]
                backlog, prefixes = alias.deployments[name].backlog, alias.prefixes
                assert backlog is not None
                assert prefixes is not None
                backlog.others = Work(*map(sum, zip(*map(msgspec.structs.astuple, parts), strict=True)))
                backlog.siblings = siblings
                backlog.take(reading)
                if backlog.has_restarted:
                    backlog.has_restarted = False
                    prefixes.forget(name)
                if reading is not None:
                    prefixes.resize(name, reading.kv_tokens)

    def choose(self, request: Request, tried: frozenset[str]) -> tuple[str, Told]:
        alias = self.workers[self.sim.chance.randrange(_WORKERS)]
        assert alias.prefixes is not None
        warm = alias.prefixes.warm(request.chain, request.tokens)
        shared = alias.prefixes.shared(request.chain, request.tokens, warm, self.names)
        demand = Demand(request.tokens, request.answer, 100, prompt_tokens_max=request.tokens, shared=shared)
        names = frozenset(name for name, short in self.names.items() if short in tried)
        route = alias.route(demand, warm, None, names)
        if not route.ranked:
            return "", lambda what: None
        deployment = alias.deployments[route.ranked[0].name]
        asker = deployment.asker(demand, f"{id(request)}")
        if not deployment.begin(asker):
            return "", lambda what: None
        progress, backlog = Progress(deployment.name), deployment.backlog
        assert backlog is not None
        progress.warm_tokens = warm.get(deployment.name, 0)
        progress.ahead_tokens = backlog.ahead_tokens(deployment.estimate.figures().prefill_ms_per_token)
        progress.queued = backlog.enter(request.tokens - progress.warm_tokens)
        alias.prefixes.read(deployment.name, request.chain)
        return self.names[deployment.name], lambda what: self.told(request, deployment, progress, demand, asker, what)

    def told(
        self, request: Request, deployment: Deployment, progress: Progress, demand: Demand, asker: Asker, what: str
    ) -> None:
        if what == "first":
            assert progress.queued is not None
            progress.queued.begun()
            progress.ttft_ms = (self.sim.now - request.sent) * 1000.0
            return
        progress.leave()
        deployment.end()
        if what == "done":
            duration_ms = (self.sim.now - request.sent) * 1000.0
            progress.attempt = Attempt(deployment.name, "ok", duration_ms)
            progress.usage = Usage(request.tokens, request.answer, request.cached)
            deployment.succeeded(progress, demand, asker)
        else:
            deployment.failed(BackendUnavailable("gone"), asker)


def _alias(clock: Callable[[], float]) -> Alias:
    listed = [f"http://10.0.0.{n}:8000/v1" for n in range(_REPLICAS)]
    deployment = {"name": "pool", "backend": "openai", "model": "m", "price": {}, "replicas": listed}
    models: Any = {"pool": {"deployments": [deployment]}}
    settings = Settings(data_dir=Path(tempfile.gettempdir()), models=models)
    no_embedder: Any = None
    return build_fleet(settings, clock, no_embedder).aliases["pool"]


class Row(msgspec.Struct, frozen=True):
    """One router: milliseconds to the first token, the share of prompt tokens that were in a replica's memory, and the tokens that
    were read or made for requests that a replica's death took."""

    router: str
    requests: int
    ttft_ms_p50: float
    ttft_ms_p90: float
    ttft_ms_p99: float
    prefix_share: float
    lost_tokens: int


ROUTERS: dict[str, type[Router]] = {
    "product": Product,
    "round robin": RoundRobin,
    "least in flight": LeastInFlight,
    "session-sticky": SessionSticky,
    "prefix-only": PrefixOnly,
    "oracle": Oracle,
}


def measured(name: str, seeds: int, seconds: float, rate: float) -> Row:
    """Every day of a router, together."""
    days = [Sim(seed, seconds, rate) for seed in range(seeds)]
    for day in days:
        day.run(ROUTERS[name](day))
    ttfts = [ttft for day in days for ttft in day.ttfts_ms]
    cuts = statistics.quantiles(ttfts, n=100)
    return Row(
        router=name,
        requests=len(ttfts),
        ttft_ms_p50=round(cuts[49]),
        ttft_ms_p90=round(cuts[89]),
        ttft_ms_p99=round(cuts[98]),
        prefix_share=round(sum(day.cached for day in days) / sum(day.tokens for day in days), 3),
        lost_tokens=sum(one.lost_tokens for day in days for one in day.replicas.values()),
    )


def main(argv: list[str]) -> int:
    """Returns 1 where the product is not ahead of every other router, or over 15% behind the oracle, in p90."""
    parser = argparse.ArgumentParser(
        prog="./run bench replicas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=300.0, help="of a day")
    parser.add_argument("--seeds", type=int, default=3, help="days")
    parser.add_argument("--rate", type=float, default=1.0, help="sessions a second")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = [measured(name, args.seeds, args.seconds, args.rate) for name in ROUTERS]
    print(
        "| router | requests | TTFT p50 | p90 | p99 | prefix share | tokens lost |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for row in rows:
        print(
            f"| {row.router} | {row.requests:,} | {row.ttft_ms_p50:,.0f} ms | {row.ttft_ms_p90:,.0f} ms | {row.ttft_ms_p99:,.0f} ms "
            f"| {row.prefix_share:.0%} | {row.lost_tokens:,} |"
        )
    if args.json is not None:
        args.json.write_text(json.dumps([msgspec.to_builtins(row) for row in rows], indent=2))
    product, *others, oracle = rows
    is_ahead = all(product.ttft_ms_p90 < other.ttft_ms_p90 for other in others)
    print(f"p90 beside the oracle's: {product.ttft_ms_p90 / oracle.ttft_ms_p90:.2f}")
    return 0 if is_ahead and product.ttft_ms_p90 <= 1.15 * oracle.ttft_ms_p90 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
