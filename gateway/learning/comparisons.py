"""Comparisons that teach the semantic cache, and the checks: fresh answers with cached ones.

After a miss is recorded, its answer is compared with those of up to three entries; the answer that
was generated to check a hit, with the one that was served. All of it runs after the response, in order and bounded:
an answer that finds no room is not judged. Knows no rule and no routes. Invariants: no request waits
for a comparison; a comparison that no judge can settle is a record too, and makes nothing likelier;
a check that was compared counts, settled or open, and one found wrong takes the answer out of
service; a check whose answer is cut or refused is open, and one that found no money or no deployment
was not drawn; a verdict has an id and counts once.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
from redis.exceptions import RedisError

from cache import CacheUnavailable, CacheWorkerUnavailable, Entry, ExactCache, Fingerprint, Partition, Trial
from cache.verdicts import (
    AnswerRef,
    Judge,
    Judgement,
    QAPair,
    Ruling,
    Scope,
    ServedReply,
    Source,
    Suspension,
    Verdict,
    VerdictStore,
)
from cache.worker import AnswerText
from gateway.journey.flight import Flight
from gateway.journey.generation import Compared
from gateway.journey.record import Record
from gateway.journey.storing import answer_id, answer_text, chunks_of
from gateway.learning.checks import Checks
from gateway.learning.own_judges import OwnJudges
from gateway.learning.verifier import NO_ANSWER, second_opinion
from gateway.loggers import get_logger
from gateway.telemetry import metric_names
from gateway.telemetry.measured_error import checked
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats
from gateway.wire.fold import fold
from gateway.wire.types import Chunk, size_of

QUEUE_MAX = 256
_AT_ONCE = 4
_ANSWER_BYTES_MAX = 64 << 10  # a longer one no judge reads
_CHUNKS_BYTES_MAX = 16 * _ANSWER_BYTES_MAX
_OF_THE_MOMENT = 424  # from this HTTP status on a refusal is not of what was asked: no money, no deployment, shutdown
LIKELY = 0.5  # p of a candidate from which on it is a surprise that its answer is not the same
_OPEN = Judgement(Ruling.UNKNOWN, "", "not an answer that can be compared")
_log = get_logger()


class CostlyJudges(Protocol):
    """The judges that cost money."""

    def of(self, record: Record, space: bytes) -> Judge | None:
        """The judge of this request's answer, in its namespace; None where it may not be asked now."""

    def check(self, record: Record, risk: float, *, is_wrong: bool) -> None:
        """Take in what a check found of a hit on a verifier's word, which had this risk."""


@dataclass(frozen=True, slots=True)
class Findings:
    """The statistics and the metrics of comparisons."""

    stats: Stats
    metrics: Metrics

    def note(self, record: Record, events: tuple[str, ...]) -> None:
        """Count events of a hit or a check (`measured_error`)."""
        self.stats.add_checks(record.request.team_id, record.request.alias, events)

    def count(self, source: Source, ruling: Ruling, judge: str) -> None:
        """Count a verdict."""
        self.metrics.add(metric_names.VERDICTS, 1, source.value, ruling.value, judge)


@dataclass(frozen=True, slots=True)
class _JudgingJob:
    """One comparison to make, with a fresh answer. `entry` is that answer, where it was stored;
    `was_asked`: a verifier's word is the verdict.
    """

    about: Compared
    fingerprint: Fingerprint
    chunks: Sequence[Chunk]
    entry: Entry | None
    was_asked: bool

    @property
    def is_check(self) -> bool:
        return self.about.served is not None

    @property
    def source(self) -> Source:
        return Source.AUDIT if self.is_check else Source.MISS


@dataclass(kw_only=True, eq=False)
class Judging:
    """The comparisons of one worker.

    `judges` cost nothing; `fallback` is asked about what they can't decide, but after a miss that a
    verifier was asked about. `findings` gets what was found; `checks` gets each hit. `defer` calls back
    when the replies that it gathers for feedback are to leave.
    """

    exact: ExactCache
    verdicts: VerdictStore
    judges: OwnJudges
    fallback: CostlyJudges | None = None
    reply_ttl_s: float
    findings: Findings
    checks: Checks
    defer: Callable[[Callable[[], None]], object] = lambda leave: leave()

    def __post_init__(self) -> None:
        self._queue: deque[_JudgingJob] = deque()
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._replies: list[tuple[Partition, ServedReply, tuple[str, ...]]] = []

    @property
    def waiting(self) -> int:
        """The number of answers that wait for a judge or are being judged."""
        return len(self._queue) + len(self._running)

    # -- called by the pipeline: never awaits, never raises

    def recorded(self, flight: Flight, record: Record) -> None:
        """Take a flight that is over, with its record."""
        generation = flight.generation
        answered, semantic, stored = generation.answered, generation.looked.semantic, generation.stored
        about = generation.checks
        if about is None and semantic.trial is not None:
            about = Compared(record, semantic.trial, semantic.entry, semantic.verified_by)
        if about is None:
            return
        if semantic.entry is not None:
            if semantic.verified_by:
                self.findings.note(record, ("verified_hits",))
            self._hit(flight, record, semantic.entry, about.trial)
            self.checks.hit(generation, about)
            return
        is_whole = answered.progress.is_complete and not (answered.seams or answered.fallbacks)
        # nobody can say what the rest of a cut answer would have been
        chunks = flight.chunks if is_whole and not answered.is_cut else ()
        entry = stored.entry if stored.outcome == "stored" else None
        was_asked = about.served is None and semantic.asking is not None
        if is_whole or 400 <= record.ended.status < _OF_THE_MOMENT:
            self._put(_JudgingJob(about, generation.looked.fingerprint, chunks, entry, was_asked))
        elif about.served is not None:
            self.findings.count(Source.AUDIT, Ruling.UNKNOWN, "not made")

    def _hit(self, flight: Flight, record: Record, entry: Entry, trial: Trial) -> None:
        """Keep what feedback on this hit needs."""
        fingerprint, name = flight.generation.looked.fingerprint, answer_id(entry)
        reply = ServedReply(
            id=record.request.id,
            exact=entry.exact,
            created_at=entry.created_at,
            compat=fingerprint.compat,
            alias=record.request.alias,
            at=record.request.at_s,
            trial=trial,
        )
        self._replies.append((fingerprint.partition, reply, (name,) if name else ()))
        if len(self._replies) == 1:
            self.defer(self._leave)

    def _put(self, job: _JudgingJob) -> None:
        """Judge an answer when its turn comes; without chunks it can't be compared."""
        if not job.chunks or job.fingerprint.text is None or size_of(job.chunks) > _CHUNKS_BYTES_MAX:
            self._note(job, _OPEN)
        elif len(self._queue) >= QUEUE_MAX:
            self.findings.count(job.source, Ruling.UNKNOWN, "no room")
        else:
            self._queue.append(job)
            self._wake.set()

    def _note(self, job: _JudgingJob, judgement: Judgement) -> None:
        """Count a check that ended."""
        if job.is_check:
            chance, is_verified = job.about.trial.chance, bool(job.about.verified_by)
            events = checked(chance, _is_same(judgement), judgement.judge, is_verified=is_verified)
            self.findings.note(job.about.record, events)

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    # -- the work

    async def run(self) -> None:
        """Judge waiting answers forever, a few at a time."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                if len(self._running) >= _AT_ONCE:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                self._start(self._carry_out(self._queue.popleft()))

    async def aclose(self) -> None:
        """Finish running comparisons; drop waiting ones."""
        self._queue.clear()
        self._leave()
        if self._running:
            await asyncio.wait(self._running, timeout=2.0)

    async def _carry_out(self, job: _JudgingJob) -> None:
        try:
            await self._compare(job)
        except CacheWorkerUnavailable as error:
            # decision: dropped-whole
            self.findings.count(job.source, Ruling.UNKNOWN, "no room")
            _log.info("verdict_lost", source=job.source, reason=str(error))
        except (RedisError, CacheUnavailable, OSError) as error:
            _log.info("verdict_lost", source=job.source, reason=f"{type(error).__name__}: {error}")
        except Exception:
            _log.exception("judging_failed", source=job.source, request_id=job.about.record.request.id)

    async def _compare(self, job: _JudgingJob) -> None:
        """Compare a fresh answer with those near it. The first comparison gives the verdict; the
        first equal answer gives the group.
        """
        trial, fresh = job.about.trial, _qa_pair(job.fingerprint.text or "", job.chunks)
        entries = await self._entries(job, trial.ranked)
        first = job.about.served or entries[0]
        if first is None:
            return
        known = [first, *[entry for entry in entries[1:] if entry is not None]]
        if fresh is None:
            self._note(job, _OPEN)
            return
        rulings = await self._judged(job, fresh, known)
        judgement, judge = rulings[0], None
        if judgement.ruling is Ruling.UNKNOWN and self.fallback is not None and not job.was_asked:
            judge = self.fallback.of(job.about.record, job.fingerprint.partition + job.fingerprint.compat)
            said = await _asked(judge, fresh, first)
            if said is not None and judge is not None and said.ruling is not Ruling.SAME and trial.p >= LIKELY:
                peers = [_cached_pair(peer) for peer in await self._entries(job, trial.peers) if peer is not None]
                said = await second_opinion(judge, said, fresh, [peer for peer in peers if peer is not None])
            judgement = said or judgement
        equal = first if _is_same(judgement) else None
        for other, free in zip(known[1:], rulings[1:], strict=True):
            if equal is None and free.ruling is Ruling.UNKNOWN:
                free = await _asked(judge, fresh, other) or free
            equal = equal or (other if _is_same(free) else None)
        await self._take(job, judgement, first, equal)
        if job.is_check and not trial.features and judgement.ruling is Ruling.DIFFERENT:
            for entry in {one.exact: one for one in (job.entry, entries[0]) if one is not None}.values():
                await self.exact.moves(entry)  # two answers to one prompt

    async def _take(self, job: _JudgingJob, judgement: Judgement, first: Entry, equal: Entry | None) -> None:
        """Let a verdict on serving `first` have its effects. `equal` has the answer that equals the
        fresh one.
        """
        about, is_right = job.about, _is_same(judgement)
        self.findings.count(job.source, judgement.ruling, judgement.judge)
        if is_right is not None and self.fallback is not None and about.verified_by:
            self.fallback.check(about.record, about.trial.risk, is_wrong=not is_right)
        self._note(job, judgement)
        is_told = job.was_asked or not about.trial.features
        if is_right is None and equal is None and not job.is_check and is_told:
            return
        fresh = AnswerRef(job.entry.exact, job.entry.created_at) if job.entry is not None else AnswerRef(b"", 0.0)
        verdict = Verdict(
            source=job.source,
            compat=job.fingerprint.compat,
            is_right=is_right,
            trial=about.trial,
            at=time.time(),
            exact=fresh.exact,
            created_at=fresh.created_at,
            judge=judgement.judge,
            why=judgement.why,
            alias=about.record.request.alias,
        )
        out, joined = None, AnswerRef(equal.exact, equal.created_at) if equal is not None else None
        if job.is_check and is_right is False:
            out = Suspension(
                exact=first.exact,
                source=job.source,
                at=verdict.at,
                judge=verdict.judge,
                why=verdict.why,
                request_id=about.record.request.id,
                alias=verdict.alias,
            )
        scope = Scope.ANSWER if out is not None else Scope.NOTHING
        ref, id = AnswerRef(first.exact, first.created_at), f"{about.record.request.id}:{job.source}"
        await self.verdicts.take(job.fingerprint.partition, id, verdict, ref, joined, scope, out)

    async def _entries(self, job: _JudgingJob, exacts: Sequence[bytes]) -> list[Entry | None]:
        return await self.exact.lookup_many(job.fingerprint.partition, job.fingerprint.compat, exacts)

    async def _judged(self, job: _JudgingJob, fresh: QAPair, cached: Sequence[Entry]) -> list[Judgement]:
        """The rulings of the judges that cost nothing, on each of `cached`. Raises
        CacheWorkerUnavailable.
        """
        rulings = [_OPEN] * len(cached)
        others = {index: pair.answer for index, entry in enumerate(cached) if (pair := _cached_pair(entry)) is not None}
        answers = [_answered(cached[index], text) for index, text in others.items()]
        settled = await self.judges.compare(
            job.fingerprint.partition, job.fingerprint.compat, _answered(job.entry, fresh.answer), answers
        )
        for index, ruling in zip(others, settled, strict=True):
            rulings[index] = ruling
        return rulings

    def _leave(self) -> None:
        """Send the replies that were gathered, in one round trip."""
        replies, self._replies = self._replies, []
        if replies:
            self._start(self._remember(replies))

    async def _remember(self, replies: list[tuple[Partition, ServedReply, tuple[str, ...]]]) -> None:
        try:
            await self.verdicts.remember_replies(replies, self.reply_ttl_s)
        except (RedisError, OSError) as error:
            _log.info("reply_not_remembered", reason=f"{type(error).__name__}: {error}")


def _is_same(judgement: Judgement) -> bool | None:
    return None if judgement.ruling is Ruling.UNKNOWN else judgement.ruling is Ruling.SAME


async def _asked(judge: Judge | None, fresh: QAPair, entry: Entry) -> Judgement | None:
    """The ruling of a judge that costs; None where there is none, or it did not answer."""
    cached = _cached_pair(entry) if judge is not None else None
    judgement = await judge.judge(fresh, cached) if judge is not None and cached is not None else None
    return None if judgement is None or judgement.why == NO_ANSWER else judgement


def _qa_pair(prompt: str, chunks: Sequence[Chunk]) -> QAPair | None:
    """A question and its answer, for a judge; None for an answer without a text."""
    try:
        whole = fold(chunks)
    except msgspec.DecodeError:
        return None
    answer = answer_text(whole) if len(whole) <= _ANSWER_BYTES_MAX else None
    return QAPair(prompt, answer) if answer is not None else None


def _cached_pair(entry: Entry) -> QAPair | None:
    """An entry's prompt and answer; None if one is missing, has no text, or is too long."""
    if entry.text is None or entry.chunks_bytes > _CHUNKS_BYTES_MAX:
        return None
    return _qa_pair(entry.text, chunks_of(entry))


def _answered(entry: Entry | None, text: str) -> AnswerText:
    return AnswerText(entry.exact, entry.created_at, text) if entry is not None else AnswerText(b"", 0.0, text)
