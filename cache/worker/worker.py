"""The cache worker: one process a host with the encoder and the index, for all its gateway workers.

    python -m cache.worker --socket PATH [--redis URL] [--embedder NAME] [--device auto|cpu|cuda]

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
import random
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import uvloop

from cache.event_loop import Loop
from cache.query import Miss, MissReason, Neighbourhood
from cache.redis_link import RedisLink
from cache.verdicts.judges import Judgement, Ruling
from cache.worker import messages as wire
from cache.worker.options import Options, read_options
from cache.worker.queue import Connection, Job, SpareTime, fitting

if TYPE_CHECKING:
    from cache.semantic.cache import SemanticCache
    from cache.semantic.follower import Follower
    from cache.worker.judging import AnswerJudging

T = TypeVar("T")

_log = logging.getLogger("cache.worker")  # not __name__: operators know the process by this name

# in one batch of lookups: a larger one is hardly faster a text, and all of it waits for its end
_LOOKUPS, _LOOKUP_CHARS = 8, 4_000
_JUDGINGS_MAX = 64
_FOLLOW_S = 0.25
_RETRIES_S = (1.0, 2.0, 5.0, 15.0)
_PARENT_S = 0.5
_REDIS_TIMEOUT_S = 1.0


class Worker:
    """One worker; `run` is its whole life."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cache")
        self._encoding = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._preparing = asyncio.Lock()  # a batch of lookups
        self._batches = 0  # that are being answered
        self._cache: SemanticCache | None = None
        self._follower: Follower | None = None
        self._lookups: deque[Job] = deque()
        self._embeds: asyncio.Queue[Job] = asyncio.Queue()
        self._has_lookups = asyncio.Event()
        self._spare = SpareTime()
        self._judging: AnswerJudging | None = None
        self._judgings: asyncio.Queue[Job] = asyncio.Queue()
        self._failure = ""
        self._counts = [0, 0]  # lookups, batches
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the parent's death. Raises OSError where the socket can't
        be had.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        path = self._options.socket_path
        path.unlink(missing_ok=True)
        mask = os.umask(0o177)  # the socket is its user's alone
        try:
            server = await asyncio.start_unix_server(self._serve, str(path))
        finally:
            os.umask(mask)
        _log.info("listening on %s", path)
        lanes = (self._answer_lookups(), self._answer_lookups())  # one embeds while the other decides
        works = (self._load_and_follow(), *lanes, self._answer_embeds(), self._judge_answers())
        tasks = [asyncio.create_task(work) for work in (*works, self._until_stopped())]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        server.close()
        for task in tasks:
            task.cancel()
        path.unlink(missing_ok=True)
        for task in done:
            task.result()  # a task that ended by itself ended by a bug: say it

    async def _until_stopped(self) -> None:
        while not self._stop.is_set() and os.getppid() == self._options.parent_pid:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_PARENT_S):
                    await self._stop.wait()
        _log.info("stopping")

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

        redis, listening = (RedisLink(self._options.redis_url, times * _REDIS_TIMEOUT_S) for times in (1, 2))
        self._follower = Follower(redis, cache, self._thread, key, self._options.size_bytes_max, listening)
        self._judging = AnswerJudging(cache)
        self._cache = cache
        await asyncio.gather(self._follow(cache), self._follower.listen())

    def _report_failure(self, error: Exception) -> None:
        """Keep why the embedder can't be loaded, and log it in a line the first time. It's tried
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
                jobs = await self._prepare(self._next_batch())
            if jobs:
                await self._answer_batch(jobs)
            self._batches -= 1
            if not self._lookups and not self._batches:
                self._spare.has_no_lookup.set()

    def _next_batch(self) -> list[Job]:
        count = fitting((job.chars for job in self._lookups), _LOOKUPS, _LOOKUP_CHARS)
        jobs = [self._lookups.popleft() for _ in range(count)]
        if not self._lookups:
            self._has_lookups.clear()
        return [job for job in jobs if job.is_wanted()]

    async def _prepare(self, jobs: list[Job]) -> list[Job]:
        """Embed the prompts while the log is folded: neither needs the other. Returns the jobs that are
        wanted still.

        If embedding fails, the lookup that follows fails too and reports it.
        """
        cache, follower = self._cache, self._follower
        assert cache is not None
        assert follower is not None
        if not jobs:
            return jobs
        loop = asyncio.get_running_loop()
        queries = [job.ask.query for job in jobs if isinstance(job.ask, wire.AskLookup | wire.AskNear)]
        known = [query for query in queries if cache.has_neighbours(query)]
        embedding = loop.run_in_executor(self._encoding, cache.prepare, known) if known else None
        await follower.catch_up()
        if embedding is not None:
            with contextlib.suppress(Exception):
                await embedding
        return [job for job in jobs if job.is_wanted()]

    async def _answer_batch(self, jobs: list[Job]) -> None:
        assert self._cache is not None
        self._counts[0] += len(jobs)
        self._counts[1] += 1
        asks, loop = [job.ask for job in jobs], asyncio.get_running_loop()
        try:
            near = await loop.run_in_executor(self._thread, _find, self._cache, asks)
        except Exception as error:
            _log.exception("a batch of %d lookups failed", len(jobs))
            self._fail(jobs, error)
            return
        for job, found in zip(jobs, near, strict=True):
            job.answer(found if isinstance(job.ask, wire.AskNear) else found.decision)

    async def _answer_embeds(self) -> None:
        while True:
            job = await self._embeds.get()
            assert self._cache is not None
            try:
                if isinstance(job.ask, wire.AskEmbed) and job.is_wanted():
                    job.answer(await self._embed(self._cache, job.ask))
            except Exception as error:
                _log.exception("embedding failed")
                self._fail([job], error)

    async def _embed(self, cache: SemanticCache, ask: wire.AskEmbed) -> wire.Embedded | wire.TooLong:
        """The vectors of a few texts: the client sends many in several asks."""
        info = cache.embedder
        for place, text in enumerate(ask.texts):
            if len(text) > info.chars_max:
                return wire.TooLong(place, len(text), info.chars_max, "characters")
        encoded = await self._between_lookups(cache.embed, ask.texts)
        counts = encoded.tokens.tolist()
        for place, tokens in enumerate(counts):
            if tokens > info.tokens_max:
                return wire.TooLong(place, tokens, info.tokens_max)
        vectors = tuple(vector.astype("<f4").tobytes() for vector in encoded.vectors)
        return wire.Embedded(vectors, tuple(counts), info.dims)

    async def _judge_answers(self) -> None:
        while True:
            job = await self._judgings.get()
            if isinstance(job.ask, wire.AskJudge) and job.is_wanted():
                job.answer(await self._judge(job, job.ask))

    async def _judge(self, job: Job, ask: wire.AskJudge) -> wire.Judged | wire.Failed:
        assert self._judging is not None
        assert self._follower is not None
        try:
            await self._follower.catch_up()  # its entry was stored before
            return await self._judging.judge(ask, partial(self._piece_of, job))
        except TimeoutError:
            return wire.Failed("there was no time for it between lookups")
        except Exception:
            _log.exception("an answer could not be judged")
            return wire.Judged((Judgement(Ruling.UNKNOWN, "", "the cache worker failed"),) * len(ask.others))

    async def _piece_of(self, job: Job, work: Callable[[], T]) -> T:
        """Do a small piece of a job between lookups. Raises TimeoutError if it is not wanted any more."""
        if not job.is_wanted():
            raise TimeoutError
        return await self._between_lookups(work)

    async def _between_lookups(self, work: Callable[..., T], *arguments: Any) -> T:
        """Do in the cache's thread what is no lookup's."""
        loop = asyncio.get_running_loop()
        return await self._spare.do(lambda: loop.run_in_executor(self._thread, work, *arguments))

    def _fail(self, jobs: list[Job], error: Exception) -> None:
        for job in jobs:
            is_lookup = isinstance(job.ask, wire.AskLookup)
            job.answer(Miss(MissReason.UNAVAILABLE) if is_lookup else wire.Failed(f"{type(error).__name__}: {error}"))

    # --- connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        try:
            while True:
                length = int.from_bytes(await reader.readexactly(wire.LENGTH_BYTES), "big")
                if length > wire.FRAME_BYTES_MAX:
                    _log.warning("a frame of %d bytes: connection closed", length)
                    return
                self._take(connection, wire.read_ask(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client left
        except asyncio.CancelledError:
            pass  # the worker stops; Python 3.11 logs the traceback of a handler that was cancelled
        except msgspec.DecodeError as error:
            _log.warning("not a message: %s: connection closed", error)
        finally:
            connection.waiting.clear()
            writer.close()

    def _take(self, connection: Connection, ask: wire.Ask) -> None:
        if isinstance(ask, wire.AskStatus):
            connection.answer(ask.id, self._status())
        elif isinstance(ask, wire.Cancel):
            connection.waiting.discard(ask.id)
        elif self._cache is None:
            connection.answer(ask.id, self._not_ready(ask))
        else:
            connection.waiting.add(ask.id)
            deadline = time.monotonic() + ask.timeout_s
            if isinstance(ask, wire.AskEmbed):
                self._embeds.put_nowait(Job(connection, ask, deadline))
            elif isinstance(ask, wire.AskJudge):
                if self._judgings.qsize() >= _JUDGINGS_MAX:
                    connection.answer(ask.id, wire.Failed("too many answers wait to be judged"))
                    return
                self._judgings.put_nowait(Job(connection, ask, deadline))
            else:
                self._lookups.append(Job(connection, ask, deadline, len(ask.query.text)))
                self._has_lookups.set()
                self._spare.lookup()

    def _not_ready(self, ask: wire.AskLookup | wire.AskNear | wire.AskEmbed | wire.AskJudge) -> wire.AnswerPayload:
        miss = Miss(MissReason.LOADING)
        if isinstance(ask, wire.AskLookup):
            return miss
        if isinstance(ask, wire.AskNear):
            return Neighbourhood(miss, ())
        return wire.Failed(self._failure or "the embedder is still loading")

    def _status(self) -> wire.Status:
        cache, follower = self._cache, self._follower
        if cache is None or follower is None:
            state = wire.WorkerState.FAILED if self._failure else wire.WorkerState.LOADING
            return wire.Status(state, detail=self._failure, embedder=self._options.embedder)
        state = wire.WorkerState.READY if follower.is_following else wire.WorkerState.REBUILDING
        return wire.Status(
            state,
            progress=1.0 if follower.is_following else follower.progress.share,
            detail=_describe(follower.is_following, follower.is_up),
            entries=len(cache),
            namespaces=cache.namespaces,
            embedder=cache.embedder.name,
            dims=cache.embedder.dims,
            tokens_max=cache.embedder.tokens_max,
            is_redis_up=follower.is_up,
            lookups=self._counts[0],
            batches=self._counts[1],
            rule=cache.rule_name.hex(),
        )


def _why_not_loaded(error: Exception) -> str:
    """In one line, with what to do."""
    from cache.encoder.types import PrecisionUnavailable

    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        package = "faiss-cpu" if error.name == "faiss" else error.name
        return f"the package {package} is not installed (pip install {package})"
    words = " ".join(str(error).split())
    return words if isinstance(error, FileNotFoundError | PrecisionUnavailable) else f"{type(error).__name__}: {words}"


def _describe(is_following: bool, is_up: bool) -> str:
    if is_following:
        return "following the log" if is_up else "Redis is away: answering from what is there"
    return "rebuilding the index" if is_up else "waiting for Redis to rebuild the index"


def _load(options: Options) -> tuple[SemanticCache, bytes]:
    """Heavy: imports OpenVINO (or torch) and FAISS and loads the model. Runs in the worker's
    thread.
    """
    from cache.decision.model import beside
    from cache.decision.prior import PRIOR
    from cache.decision.rule import VerifiedRule
    from cache.encoder.embedder import open_embedder
    from cache.semantic.cache import SemanticCache
    from cache.semantic.index import VectorIndex, on_gpu

    embedder = open_embedder(options.embedder, options.device, options.threads, options.precision)
    for words in (8, 20, 50, 100):
        embedder.encode(["word " * words])  # the first pass of a size compiles for it, and allocates
    index = VectorIndex(embedder.info.dims, on_gpu() if options.device != "cpu" else None)
    rule = VerifiedRule(PRIOR, options.error_max, random.random if options.is_audited else None, beside())
    return SemanticCache(embedder, rule, keys_max=options.keys_max, index=index), embedder.info.key


def _find(cache: SemanticCache, asks: list[Any]) -> list[Neighbourhood]:
    count = max((ask.count for ask in asks if isinstance(ask, wire.AskNear)), default=0)
    found = cache.near([ask.query for ask in asks], count)
    return [
        msgspec.structs.replace(one, neighbours=one.neighbours[: ask.count] if isinstance(ask, wire.AskNear) else ())
        for ask, one in zip(asks, found, strict=True)
    ]


def main(argv: list[str] | None = None) -> int:
    options = read_options(argv)
    for name, value in (
        ("OMP_NUM_THREADS", "1"),  # FAISS': a search is too short to share
        ("OMP_WAIT_POLICY", "PASSIVE"),
        ("TOKENIZERS_PARALLELISM", "false"),
        ("TQDM_DISABLE", "1"),
    ):
        os.environ.setdefault(name, value)  # read when the libraries are imported
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    _log.setLevel(logging.INFO)
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(Worker(options).run(), loop_factory=Loop)
    return 0
