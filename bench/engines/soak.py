"""`./run bench engine --soak MINUTES`: does an engine under random traffic lose, leak or invent anything?

Two engine processes serve the same traffic: prompts that share prefixes, partitions, priorities, every kind of
sampling, several choices, references, requests that are wrong, readers that leave early or at once, and clients that
disconnect in the middle. One process is killed, stopped for a while or asked to end, at random, and started again; the
other lives throughout, and its memory, handles and blocks are read whenever all is quiet.

What must hold: every request ends in an answer that is whole, in an error that its own request or a fault explains, or in
its reader's leaving; the engine checks its own books whenever it is idle and ends where they are wrong; fixed prompts are
answered alike throughout; at a quiet point no block is held and nothing is queued; memory and handles do not grow.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.engines.traffic import Ask, Outcome, Traffic, ask
from bench.lab.processes import Child
from local_engine import AsyncEngine, EngineLoading, EngineUnavailable, GenerateRequest, SamplingParams

_CLIENTS = 24  # tasks that ask, over both engines
_READY_TIMEOUT_S = 180.0
_QUIET_TIMEOUT_S = 120.0
_FAULT_PERIOD_S = 20.0
_QUIET_PERIOD_S = 25.0
_GROWTH_MAX_MB = 24.0
_CANARIES = 6
_OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "kv_blocks": 320,
    "sequences_max": 12,
    "queue_max": 48,
    "context_tokens_max": 1024,
    "step_tokens_max": 192,
}


@dataclass(frozen=True, slots=True)
class Sample:
    """The steady engine at a quiet point. `fds`: its open files; `shm`: entries of /dev/shm on the machine."""

    at_s: float
    rss_mb: float
    fds: int
    threads: int
    client_rss_mb: float
    client_fds: int
    requests: int


@dataclass(slots=True)
class Findings:
    """What the soak saw; `wrong` is empty where all is well."""

    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    samples: list[Sample] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def judge_growth(self) -> None:
        """Memory, files and threads of the steady engine: the middle of the first third of the quiet points beside that
        of the last."""
        third = len(self.samples) // 3
        if third == 0:
            return
        for name, most in (("rss_mb", _GROWTH_MAX_MB), ("fds", 2), ("threads", 0), ("client_fds", 2)):
            first, last = (
                statistics.median(getattr(sample, name) for sample in part)
                for part in (self.samples[:third], self.samples[-third:])
            )
            if last - first > most:
                self.wrong.append(f"{name} grew from {first:g} to {last:g}")

    def note(self, outcome: Outcome) -> None:
        self.outcomes[outcome.kind] += 1
        self.tokens += outcome.tokens
        if outcome.wrong is not None and len(self.wrong) < 50:
            self.wrong.append(outcome.wrong)

    def render(self) -> str:
        lines = [
            f"{sum(self.outcomes.values()):,} requests, {self.tokens:,} tokens: "
            + ", ".join(f"{count:,} {kind}" for kind, count in self.outcomes.most_common()),
            "faults: " + (", ".join(f"{count} {kind}" for kind, count in self.faults.most_common()) or "none"),
            f"{'at':>8}{'requests':>10}{'RSS MB':>9}{'files':>7}{'threads':>9}{'client MB':>11}{'files':>7}",
        ]
        lines += [
            f"{s.at_s:7.0f}s{s.requests:10,}{s.rss_mb:9.1f}{s.fds:7}{s.threads:9}{s.client_rss_mb:11.1f}{s.client_fds:7}"
            for s in self.samples
        ]
        lines += [f"WRONG: {text}" for text in self.wrong]
        return "\n".join(lines)


class Kept:
    """An engine process that is started again when it ends, and the client that stays connected to it."""

    def __init__(self, name: str, folder: Path, options: dict[str, Any], findings: Findings) -> None:
        self.name = name
        self.engine = AsyncEngine(folder / f"{name}.sock")
        self.log_path = folder / f"{name}.log"
        self.is_faulty = False  # a fault was just done to it
        self.is_ending = False
        self._folder = folder
        self._options = json.dumps(options)
        self._findings = findings
        self.child = self._start()

    def _start(self) -> Child:
        command = [
            sys.executable,
            "-m",
            "local_engine.process.worker",
            str(self._folder / f"{self.name}.sock"),
            self._options,
        ]
        return Child(command, self.log_path, {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}, Path.cwd())

    async def keep(self) -> None:
        """Start it again whenever it has ended; by itself it must not."""
        while not self.is_ending:
            status = self.child.process.poll()
            if status is not None:
                if not self.is_faulty:
                    self._findings.wrong.append(f"{self.name} ended with {status}: {self.child.log_tail()[-400:]}")
                self.is_faulty = False
                await asyncio.sleep(0.2)
                self.child = self._start()
            await asyncio.sleep(0.05)

    async def harm(self, draw: random.Random) -> None:
        """One fault at random."""
        kind = draw.choices(["SIGKILL", "SIGTERM", "SIGSTOP"], [6, 1, 1])[0]
        self._findings.faults[kind] += 1
        pid = self.child.pid
        if kind == "SIGSTOP":
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(draw.uniform(0.2, 2.0))
            os.kill(pid, signal.SIGCONT)
            return
        self.is_faulty = True
        os.kill(pid, signal.Signals[kind])

    async def end(self) -> None:
        """Ask it to end, which it must do well, leaving no socket behind."""
        self.is_ending = True
        await self.engine.aclose()
        await asyncio.to_thread(self.child.stop)
        if self.child.process.returncode != 0:
            self._findings.wrong.append(f"{self.name} ended with {self.child.process.returncode} when it was asked to")
        if Path(self.engine.socket_path).exists():
            self._findings.wrong.append(f"{self.name} left its socket")
        for line in self.log_path.read_text(errors="replace").splitlines():
            if "Traceback" in line or "the step failed" in line or "a request failed" in line:
                self._findings.wrong.append(f"{self.name} logged: {line}")


class Soak:
    """The traffic, the faults and the quiet points, beside each other until the time is over."""

    def __init__(self, model: str, duration_s: float, threads: int, seed: int, folder: Path) -> None:
        self.findings = Findings()
        self._draw = random.Random(seed)
        self._duration_s = duration_s
        options = {**_OPTIONS, "model": model, "threads": threads, **_invariance()}
        self._steady = Kept("steady", folder, options, self.findings)
        self._victim = Kept("victim", folder, options, self.findings)
        self._has_canaries = bool(_invariance())
        self._canaries: dict[int, tuple[int, ...]] = {}
        self._busy = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()
        self._may_ask = asyncio.Event()
        self._may_ask.set()

    async def run(self) -> None:
        """Raises TimeoutError where an engine is not ready, or never quiet, in a time that is ample."""
        keepers = [asyncio.create_task(kept.keep()) for kept in (self._steady, self._victim)]
        for kept in (self._steady, self._victim):
            kept.engine.start()
            async with asyncio.timeout(_READY_TIMEOUT_S):
                info = await kept.engine.wait_ready()
        traffic = Traffic(info.vocabulary_size, info.context_tokens, self._draw.getrandbits(32))
        start = time.monotonic()
        end = start + self._duration_s
        asking = [asyncio.create_task(self._ask(traffic, end, index)) for index in range(_CLIENTS)]
        harming = asyncio.create_task(self._harm())
        while time.monotonic() < end:
            await asyncio.sleep(min(_QUIET_PERIOD_S, max(0.1, end - time.monotonic())))
            await self._quiet(start)
        harming.cancel()
        await asyncio.gather(*asking)
        await asyncio.gather(harming, return_exceptions=True)
        for kept in (self._steady, self._victim):
            kept.is_ending = True
        await asyncio.gather(*keepers)
        for kept in (self._steady, self._victim):
            await self._wait_up(kept)
            await kept.end()
        self.findings.judge_growth()

    async def _wait_up(self, kept: Kept) -> None:
        """After a fault that came last it may not be up again; one that never is shows as a wrong exit status."""
        if kept.child.process.poll() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_READY_TIMEOUT_S):
                    await kept.engine.wait_ready()

    async def _ask(self, traffic: Traffic, end: float, index: int) -> None:
        while time.monotonic() < end:
            await self._may_ask.wait()
            self._busy += 1
            self._is_quiet.clear()
            try:
                kept = self._steady if index % 2 else self._victim
                wanted = traffic.next()
                outcome = await self._with_client(kept, wanted)
                self.findings.note(outcome)
                if outcome.kind in (EngineUnavailable.__name__, EngineLoading.__name__):
                    if kept is self._steady and not wanted.leaves_client:
                        self.findings.wrong.append(f"the steady engine was away: {outcome.kind}")
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(1.0):
                            await kept.engine.wait_ready()
            finally:
                self._busy -= 1
                if not self._busy:
                    self._is_quiet.set()

    async def _with_client(self, kept: Kept, wanted: Ask) -> Outcome:
        """By the client that all share, or by one that disconnects in the middle."""
        if not wanted.leaves_client:
            return await ask(kept.engine, wanted)
        own = AsyncEngine(kept.engine.socket_path)
        own.start()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await own.wait_ready()
            running = asyncio.create_task(ask(own, wanted))
            await asyncio.sleep(0.05)
            await own.aclose()
            return await running
        finally:
            await own.aclose()

    async def _harm(self) -> None:
        while True:
            await asyncio.sleep(self._draw.expovariate(1.0 / _FAULT_PERIOD_S))
            await self._victim.harm(self._draw)

    async def _quiet(self, start: float) -> None:
        """Let all requests end, ask the canaries, then read what the steady engine holds."""
        self._may_ask.clear()
        async with asyncio.timeout(_QUIET_TIMEOUT_S):
            await self._is_quiet.wait()
        if self._has_canaries:
            await self._ask_canaries()
        await asyncio.sleep(0.6)  # the engine's check of its books when idle, and its last state
        engine = self._steady.engine
        load = engine.load()
        if load.running or load.waiting or load.kv_blocks_used:
            self.findings.wrong.append(
                f"at rest: {load.running} run, {load.waiting} wait, {load.kv_blocks_used} blocks held"
            )
        if engine.calls:
            self.findings.wrong.append("at rest: the client holds requests")
        pid, own = self._steady.child.pid, os.getpid()
        self.findings.samples.append(
            Sample(
                at_s=time.monotonic() - start,
                rss_mb=_rss_mb(pid),
                fds=_fds(pid),
                threads=len(list(Path(f"/proc/{pid}/task").iterdir())),
                client_rss_mb=_rss_mb(own),
                client_fds=_fds(own),
                requests=sum(self.findings.outcomes.values()),
            )
        )
        self._may_ask.set()

    async def _ask_canaries(self) -> None:
        """Fixed prompts, greedily, all at once: their answers never change, whatever was cached or killed before."""

        async def answer(index: int, engine: AsyncEngine) -> tuple[int, ...]:
            tokens = random.Random(index).sample(range(1, 200), 40 + index)
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            async with engine.generate(GenerateRequest(prompt_token_ids=tokens, sampling=params)) as generation:
                return tuple([id async for output in generation for id in output.token_ids])

        engines = [self._steady.engine]
        if self._victim.engine.load().is_ready:
            engines.append(self._victim.engine)
        for engine in engines:
            asked = [answer(index, engine) for index in range(_CANARIES)]
            for index, found in enumerate(await asyncio.gather(*asked, return_exceptions=True)):
                if isinstance(found, BaseException):
                    if engine is self._steady.engine:
                        self.findings.wrong.append(f"canary {index}: {found!r}")
                elif self._canaries.setdefault(index, found) != found:
                    self.findings.wrong.append(f"canary {index} was answered otherwise")


def _invariance() -> dict[str, Any]:
    """Answers that may be compared, where this machine has the kernels for it."""
    from local_engine.kernels.cpu import kernels

    return {"is_batch_invariant": True, "weights": "int8"} if kernels() is not None else {}


def _rss_mb(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _fds(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@contextlib.contextmanager
def _no_new(folder: Path, findings: Findings) -> Iterator[None]:
    """Nothing more may be in `folder` afterwards than before, but what a running process has mapped: others' work."""
    before: set[Any] = set(os.listdir(folder)) if folder.is_dir() else set()
    yield
    left = (set(os.listdir(folder)) if folder.is_dir() else set()) - before
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is not ours to read
            mapped = maps.read_text()
            left = {name for name in left if f"{folder}/{name}" not in mapped}
    if left:
        findings.wrong.append(f"left in {folder}: {', '.join(sorted(left)[:5])}")


def soak(model: str, duration_s: float, threads: int, seed: int) -> int:
    """Run it and print what was found; 1 where anything is wrong."""

    async def run(folder: Path) -> Findings:
        whole = Soak(model, duration_s, threads, seed, folder)
        with _no_new(Path("/dev/shm"), whole.findings):
            await whole.run()
        return whole.findings

    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        findings = asyncio.run(run(Path(folder)))
    print(findings.render())
    return 1 if findings.wrong else 0
