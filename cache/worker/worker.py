"""The cache worker: one process a host with the encoder and the index, for all its gateway workers.

    SAMEWAY_REDIS_URL=URL python -m cache.worker SOCKET '{"embedder": "NAME"}'

The socket listens at once; heavy imports and the model follow in a thread, and until then lookups
are a miss with LOADING. One thread does all work on the cache, lookups in batches of those that
wait when the encoder is free, everything else in small pieces between them. While it decides on a
batch, another thread embeds the next one. The log is folded as Redis sends it. So a lookup asks
Redis nothing, and sees every store that finished before its request was looked up there.
Invariants: a lookup waits for the batch before its own and one other piece of work at most; a
request whose client has gone is not computed; garbage closes its own connection and nothing else;
while Redis is away the index answers lookups (a hit is only a pointer: the gateway fetches the
entry from Redis, so a purged one can't be served). Ends on SIGTERM, or with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from cache.entry import CacheWorkerUnavailable
from cache.event_loop import Loop
from cache.query import Miss, MissReason, Neighbourhood
from cache.redis_link import RedisLink
from cache.verdicts.judges import Judgement, Ruling
from cache.worker import messages as wire
from cache.worker.options import WorkerOptions
from cache.worker.queue import SpareTime, fitting
from ipc import IncomingCall, RpcServer, log_to_stderr

if TYPE_CHECKING:
    from cache.semantic.cache import SemanticCache
    from cache.semantic.engine import VectorEngine
    from cache.semantic.follower import Follower
    from cache.semantic.proposals import ProposalFollower
    from cache.worker.judging import AnswerJudging

T = TypeVar("T")
Job = IncomingCall[wire.Ask]
Lookup = tuple[Job, wire.AskLookup]

_log = logging.getLogger("cache.worker")  # not __name__: operators know the process by this name

# in one batch of lookups: a larger one is hardly faster a text, and all of it waits for its end
_LOOKUPS, _LOOKUP_CHARS = 8, 4_000
_JUDGINGS_MAX = 64
_FOLLOW_S = 0.25
_RETRIES_S = (1.0, 2.0, 5.0, 15.0)
_STATE_PERIOD_S = 0.25
_REDIS_TIMEOUT_S = 1.0
_ENGINE_TIMEOUT_S = 2.0  # of a write; a lookup waits for less
_THREADS = 2  # a short text takes two thirds of the time on two, and a tenth more of the processor
_SLOW_S = 0.5  # of a lookup, which a gateway waits a second for


class Worker:
    """One cache worker, from its start to its end."""

    def __init__(self, options: WorkerOptions, socket: Path, redis_url: str, index_url: str) -> None:
        self._options = options
        self._socket = socket
        self._redis_url, self._index_url = redis_url, index_url
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._preparing = asyncio.Lock()  # a batch of lookups
        self._batches = 0  # that are being answered
        self._cache: SemanticCache | None = None
        self._follower: Follower | None = None
        self._lookups: deque[Lookup] = deque()
        self._has_lookups = asyncio.Event()
        self._spare = SpareTime()
        self._proposals: ProposalFollower | None = None
        self._judging: AnswerJudging | None = None
        self._judging_turn = asyncio.Lock()
        self._judgings = 0  # that wait, or are under way
        self._failure = ""
        self._exit_status = 0
        self._counts = [0, 0]  # lookups, batches

    async def run(self) -> int:
        """Serve until SIGTERM, SIGINT or the parent's death. Returns the process' exit status: EX_CONFIG
        if the vector engine lacks a part. Raises OSError if it cannot listen on the socket.
        """
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        server = RpcServer(wire.WIRE, state=self._status, on_call=self._take, slow_s=_SLOW_S)
        serving = server.serve(self._socket, stop.is_set, _STATE_PERIOD_S)
        lanes = (self._answer_lookups(), self._answer_lookups())  # one embeds while the other decides
        tasks = [asyncio.create_task(work) for work in (serving, self._load_and_follow(), *lanes)]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        _log.info("stopping")
        for task in left:
            task.cancel()
        await asyncio.wait(tasks)
        for task in done:
            task.result()  # a task that ended by itself ended by a bug: say it
        return self._exit_status

    # --- loading and following

    async def _load_and_follow(self) -> None:
        loop = asyncio.get_running_loop()
        _log.info("loading the embedder %s", self._options.embedder)
        for attempt in itertools.count():
            started = time.monotonic()
            try:
                cache, key = await loop.run_in_executor(self._thread, _load, self._options)
                break
            except Exception as error:  # a model library may raise anything
                self._report_failure(error)
            await asyncio.sleep(_RETRIES_S[min(attempt, len(_RETRIES_S) - 1)])
        _log.info("the embedder %s is loaded, %.1f s", cache.embedder.name, time.monotonic() - started)
        self._failure = ""
        from cache.semantic.follower import Follower
        from cache.worker.judging import AnswerJudging

        redis, listening = (RedisLink(self._redis_url, times * _REDIS_TIMEOUT_S) for times in (1, 2))
        parts = redis, cache, self._thread, key, self._options.size_bytes_max, listening
        self._judging = AnswerJudging(cache)
        if not self._index_url:
            self._follower, self._cache = Follower(*parts), cache
            await asyncio.gather(self._follow(cache), self._follower.listen())
            return
        from cache.semantic.engine import EngineUnfit
        from cache.semantic.proposals import ProposalFollower

        engine = _engine(self._index_url, cache.dims, key)
        self._follower = self._proposals = ProposalFollower(*parts, engine=engine, encoding=self._encoding)
        self._cache = cache
        try:
            await asyncio.gather(
                self._follow(cache), self._follower.listen(), self._proposals.index(self._between_lookups)
            )
        except EngineUnfit as error:
            _log.error("%s", error)
            self._exit_status = os.EX_CONFIG
        finally:
            await engine.aclose()

    def _report_failure(self, error: Exception) -> None:
        """Keep why the embedder cannot be loaded, and log each new reason once. The worker tries
        again: a package may be installed, and a hub come back.
        """
        failure = _why_not_loaded(error)
        if failure != self._failure:
            is_a_bug = not isinstance(error, OSError | ImportError)
            _log.error("no answer is found by meaning: %s", failure, exc_info=is_a_bug)
        self._failure = failure

    async def _follow(self, cache: SemanticCache) -> None:
        """Rebuild, then keep up with the log and embed what waits, whenever no lookup does."""
        follower = self._follower
        assert follower is not None
        was = None
        while True:
            reporter = asyncio.create_task(self._report(follower)) if not follower.is_following else None
            try:
                await follower.follow()
            finally:
                if reporter is not None:
                    reporter.cancel()
            now = (follower.is_following, follower.is_up)
            if now != was:
                _log.info("%s, %d entries %s", _describe(*now), len(cache), "" if follower.is_up else follower.failure)
                was = now
            while not cache.is_settled and self._spare.has_no_lookup.is_set():
                await self._between_lookups(cache.settle)
            await asyncio.sleep(_FOLLOW_S)

    async def _report(self, follower: Follower) -> None:
        while True:
            await asyncio.sleep(1.0)
            progress = follower.progress
            _log.info("rebuilding the index: %d of %d entries", progress.done, progress.total)

    # --- answering

    async def _answer_lookups(self) -> None:
        while True:
            async with self._preparing:
                await self._has_lookups.wait()
                self._batches += 1
                lookups = await self._prepare(self._next_batch())
            if lookups:
                await self._answer_batch(lookups)
            self._batches -= 1
            if not self._lookups and not self._batches:
                self._spare.has_no_lookup.set()

    def _next_batch(self) -> list[Lookup]:
        count = fitting((len(ask.query.text) for _, ask in self._lookups), _LOOKUPS, _LOOKUP_CHARS)
        lookups = [self._lookups.popleft() for _ in range(count)]
        if not self._lookups:
            self._has_lookups.clear()
        return [(job, ask) for job, ask in lookups if job.is_open]

    async def _prepare(self, lookups: list[Lookup]) -> list[Lookup]:
        """Embed the prompts while the log is folded: neither needs the other. Returns the lookups whose
        clients still wait.

        If embedding fails, the lookup that follows fails too, and reports it.
        """
        cache, follower = self._cache, self._follower
        assert cache is not None
        assert follower is not None
        if not lookups:
            return lookups
        loop = asyncio.get_running_loop()
        known = [ask.query for _, ask in lookups if cache.has_neighbours(ask.query)]
        embedding = loop.run_in_executor(self._encoding, cache.prepare, known) if known else None
        await follower.catch_up()
        if embedding is not None:
            with contextlib.suppress(Exception):
                await embedding
        return [(job, ask) for job, ask in lookups if job.is_open]

    async def _answer_batch(self, lookups: list[Lookup]) -> None:
        assert self._cache is not None
        self._counts[0] += len(lookups)
        self._counts[1] += 1
        try:
            near = await asyncio.get_running_loop().run_in_executor(self._thread, _find, self._cache, lookups)
        except Exception as error:
            for job, _ in lookups:
                job.fail(error)
            return
        for (job, _), neighbourhood in zip(lookups, near, strict=True):
            job.reply(neighbourhood)

    def _await_batch(self, job: Job, ask: wire.AskLookup) -> None:
        self._lookups.append((job, ask))
        self._has_lookups.set()
        self._spare.lookup()

    async def _bring(self, proposals: ProposalFollower, job: Job, ask: wire.AskLookup) -> None:
        """Let a lookup wait for what the engine proposes; no other waits with it."""
        from cache.semantic.engine import EngineAway

        try:
            await proposals.bring(ask.query)
        except EngineAway:
            job.reply(Neighbourhood(Miss(MissReason.INDEX), ()))
        else:
            self._await_batch(job, ask)

    async def _embed(self, job: Job, ask: wire.AskEmbed) -> None:
        """Answer with the vectors of a few texts. Raises TextTooLong."""
        assert self._cache is not None
        info = self._cache.embedder
        for index, text in enumerate(ask.texts):
            if len(text) > info.chars_max:
                raise wire.TextTooLong(index, len(text), info.chars_max, "characters")
        encoded = await self._piece_of(job, partial(self._cache.embed, ask.texts))
        counts = encoded.tokens.tolist()
        for index, tokens in enumerate(counts):
            if tokens > info.tokens_max:
                raise wire.TextTooLong(index, tokens, info.tokens_max)
        vectors = tuple(vector.astype("<f4").tobytes() for vector in encoded.vectors)
        job.reply(wire.Embedded(vectors, tuple(counts), info.dims))

    async def _judge(self, job: Job, ask: wire.AskJudge) -> None:
        """Answer with rulings. Raises CacheWorkerUnavailable if too many answers wait."""
        assert self._judging is not None
        assert self._follower is not None
        if self._judgings == _JUDGINGS_MAX:
            raise CacheWorkerUnavailable("too many answers wait to be judged")
        self._judgings += 1
        try:
            async with self._judging_turn:
                await self._follower.catch_up()  # its entry was stored before
                job.reply(await self._judging.judge(ask, partial(self._piece_of, job)))
        except CacheWorkerUnavailable:
            raise
        except Exception:
            _log.exception("an answer could not be judged")
            unknown = Judgement(Ruling.UNKNOWN, "", "the cache worker failed")
            job.reply(wire.Judged((unknown,) * len(ask.others)))
        finally:
            self._judgings -= 1

    async def _piece_of(self, job: Job, work: Callable[[], T]) -> T:
        """Do a small piece of a job between lookups. Raises CacheWorkerUnavailable if its client
        has left.
        """
        if not job.is_open:
            raise CacheWorkerUnavailable("its client does not wait any more")
        return await self._between_lookups(work)

    async def _between_lookups(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do a piece of work in the cache's thread, between lookups."""
        loop = asyncio.get_running_loop()
        return await self._spare.do(lambda: loop.run_in_executor(self._thread, work, *arguments))

    # --- connections

    def _take(self, job: Job) -> Coroutine[Any, Any, None] | None:
        ask = job.body
        if self._cache is None:
            if isinstance(ask, wire.AskLookup):
                job.reply(Neighbourhood(Miss(MissReason.LOADING), ()))
            else:
                job.fail(CacheWorkerUnavailable(self._failure or "the embedder is still loading"))
        elif isinstance(ask, wire.AskEmbed):
            return self._embed(job, ask)
        elif isinstance(ask, wire.AskJudge):
            return self._judge(job, ask)
        elif self._proposals is not None and not self._proposals.has_all(ask.query):
            return self._bring(self._proposals, job, ask)
        else:
            self._await_batch(job, ask)
        return None

    def _status(self) -> wire.WorkerStatus:
        cache, follower = self._cache, self._follower
        if cache is None or follower is None:
            state = wire.WorkerState.FAILED if self._failure else wire.WorkerState.LOADING
            return wire.WorkerStatus(state, detail=self._failure, embedder=self._options.embedder)
        state = wire.WorkerState.READY if follower.is_following else wire.WorkerState.REBUILDING
        return wire.WorkerStatus(
            state,
            progress=1.0 if follower.is_following else follower.progress.share,
            detail=_describe(follower.is_following, follower.is_up),
            entries=len(cache),
            embedder=cache.embedder.name,
            lookups=self._counts[0],
            batches=self._counts[1],
            rule=cache.rule_name.hex(),
            index=self._proposals.trouble if self._proposals is not None else "",
        )


def _why_not_loaded(error: Exception) -> str:
    """Say in one line why the embedder cannot be loaded and what to do."""
    from cache.encoder.types import PrecisionUnavailable

    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = "faiss-cpu" if error.name == "faiss" else error.name
        return f"the package {package} is not installed (pip install {package})"
    message = " ".join(str(error).split())
    return (
        message if isinstance(error, FileNotFoundError | PrecisionUnavailable) else f"{type(error).__name__}: {message}"
    )


def _describe(is_following: bool, is_up: bool) -> str:
    if is_following:
        return "following the log" if is_up else "Redis is away: answering from what is there"
    return "rebuilding the index" if is_up else "waiting for Redis to rebuild the index"


def _load(options: WorkerOptions) -> tuple[SemanticCache, bytes]:
    """Load the embedder, which imports OpenVINO or torch, and an empty index, which imports FAISS.
    Runs in the cache's thread.
    """
    from cache.decision.model import beside
    from cache.decision.prior import PRIOR
    from cache.decision.rule import VerifiedRule
    from cache.encoder.embedder import open_embedder
    from cache.semantic.cache import SemanticCache
    from cache.semantic.index import VectorIndex, on_gpu

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = options.threads or min(_THREADS, cores)
    embedder = open_embedder(options.embedder, options.device, threads, options.precision)
    for words in (8, 20, 50, 100):
        embedder.encode(["word " * words])  # the first pass of a size compiles for it, and allocates
    index = VectorIndex(embedder.info.dims, on_gpu() if options.device != "cpu" else None)
    rule = VerifiedRule(PRIOR, options.error_max, beside())
    return SemanticCache(embedder, rule, keys_max=options.keys_max, index=index), embedder.info.key


def _engine(url: str, dims: int, embedder_key: bytes) -> VectorEngine:
    """The engine at a URL of Redis or PostgreSQL; nothing is sent yet."""
    from cache.semantic.postgres_engine import PostgresEngine
    from cache.semantic.redis_engine import RedisEngine

    engine = PostgresEngine if url.startswith("postgres") else RedisEngine
    return engine(url, dims, embedder_key, _ENGINE_TIMEOUT_S)


def _find(cache: SemanticCache, lookups: list[Lookup]) -> list[Neighbourhood]:
    asks = [ask for _, ask in lookups]
    near = cache.near([ask.query for ask in asks], max(ask.count for ask in asks))
    return [
        msgspec.structs.replace(neighbourhood, neighbours=neighbourhood.neighbours[: ask.count])
        for ask, neighbourhood in zip(asks, near, strict=True)
    ]


def main() -> int:
    socket, options = Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=WorkerOptions)
    # a command line shows to all users of a host, and a URL may have a password
    urls = os.environ["SAMEWAY_REDIS_URL"], os.environ.get("SAMEWAY_INDEX_URL", "")
    for name, value in (
        ("OMP_NUM_THREADS", "1"),  # FAISS': a search is too short to share
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)  # read when the libraries are imported
    log_to_stderr(logging.WARNING, "%(asctime)s %(levelname)s %(name)s %(message)s")
    _log.setLevel(logging.INFO)
    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(Worker(options, socket, *urls).run(), loop_factory=Loop)
    return 0
