"""Comparisons that teach the semantic cache: fresh answers with cached ones, served hits, repeats.

After a miss or an audit is recorded, its answer is compared with those of up to three entries. A
share of served hits is generated afresh and compared. A client that asks the same again at once,
past the cache, gives a verdict on the hit before. All of it runs after the response, in order and
bounded: an answer that finds no room is not judged. Knows no rule and no routes. Invariants: no
request waits for a comparison; a comparison that no judge can settle is a record too, and makes
nothing likelier; whether a judge that costs is asked is drawn with a known chance, which the record
has, for verdicts that only some pairs could get are no sample; a verdict has an id and counts once.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
from redis.exceptions import RedisError

from cache import CacheUnavailable, CacheWorkerUnavailable, Entry, ExactCache, Fingerprint, MissReason, Partition, Trial
from cache.verdicts import (
    EARLY,
    EQUALITY,
    PROSE,
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
from gateway.journey.outcomes import AuditDraw
from gateway.journey.record import Record
from gateway.journey.storing import answer_id, answer_text, chunks_of
from gateway.journey.turn import Turn
from gateway.learning.own_judges import OwnJudges
from gateway.learning.verifier import NO_ANSWER, second_opinion
from gateway.learning.verifiers import Verifiers
from gateway.loggers import get_logger
from gateway.telemetry import measured_error, metric_names
from gateway.telemetry.measured_error import VETO, MeasuredErrors, RulingCounts
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.stats import Stats
from gateway.wire.fold import fold
from gateway.wire.types import Chunk, size_of

QUEUE_MAX = 256
_AT_ONCE = 4
_ANSWER_BYTES_MAX = 64 << 10  # a longer one no judge reads
LIKELY = 0.5  # p of a candidate from which on it is a surprise that its answer is not the same
_CALIBRATED = 0.05  # of what the judges that cost nothing ruled on, and a judge that costs could be asked about
_CHUNKS_BYTES_MAX = 16 * _ANSWER_BYTES_MAX
EARLY_MAX, _EARLY_SPACES_MAX = 256, 64  # comparisons of a namespace to make again, and namespaces
_AGAIN_S = 60.0
_AGAIN_KEYS_MAX = 10_000
_AGAIN_SHARED = 0.8  # of the words of both prompts
# of a verdict on an answer that no judge could compare and a client did not take
_AGAIN_WEIGHT = 0.25
_OPEN = Judgement(Ruling.UNKNOWN, "", "not an answer that can be compared")
_log = get_logger()

Regenerate = Callable[[Turn], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Findings:
    """The statistics and the metrics of comparisons, and the error rates of judges."""

    stats: Stats
    metrics: Metrics
    truth: MeasuredErrors
    judges: Verifiers | None

    def note(self, team_id: int, alias: str, events: tuple[str, ...], certificate: str | None) -> str:
        """Count events of a would-be hit, for a certificate or the current one; return the
        certificate.
        """
        return self.stats.add_checks(team_id, alias, events, certificate)

    def count(self, source: Source, ruling: Ruling, judge: str) -> None:
        """Count a verdict."""
        self.metrics.add(metric_names.VERDICTS, 1, source.value, ruling.value, judge)

    def compared(self, judgement: Judgement, other: Judgement) -> None:
        """Count the rulings of two judges on the same answers."""
        if Ruling.UNKNOWN not in (judgement.ruling, other.ruling):
            counts = RulingCounts(**{f"{judgement.ruling}_{other.ruling}": 1})
            self.stats.add_rulings(judgement.judge, other.judge, counts)

    def flips(self, judge: str) -> tuple[float, float]:
        """A judge's error rates, as a verdict has them."""
        examined = self.judges.flips(judge) if self.judges is not None else (0.0, 0.0)
        return max(self.truth.flips(judge), examined, key=lambda rates: rates[1])


@dataclass(frozen=True, slots=True)
class _JudgingJob:
    """One comparison to make: the request, its fresh or served answer, and the decision about it."""

    record: Record
    turn: Turn | None  # SHADOW: to be answered afresh
    text: str
    partition: Partition
    compat: bytes
    chunks: Sequence[Chunk]  # of the answer; none where it is still to be generated
    entry: Entry | None  # what was stored, or what was served
    trial: Trial
    source: Source
    chance: float  # with which probability this comparison is made
    certificate: str | None  # that it counts for; None: for none
    served: AnswerRef | None = None  # AGAIN: the answer that was not taken
    is_late: bool = False  # it was compared before, too early for a judge

    @property
    def space(self) -> bytes:
        """The namespace."""
        return self.partition + self.compat


@dataclass(frozen=True, slots=True)
class _Served:
    """The last semantic hits of a key."""

    at: float
    prompt_words: frozenset[str]
    answer: AnswerRef
    trial: Trial


@dataclass(kw_only=True, eq=False)
class Judging:
    """The comparisons of one worker.

    `judges` cost nothing; `fallback` is asked about a share of what they can't decide, by the worth
    that the decision gave it. `regenerate` answers a turn afresh at the gateway's own expense, or
    returns None; `share` says for a team's id and an alias which share of the next hits to check
    so. `random` gives numbers in [0, 1). `findings` gets every would-be hit and what was found of
    it. `defer` calls back when the replies that it gathers for feedback are to leave.
    """

    exact: ExactCache
    verdicts: VerdictStore
    judges: OwnJudges
    fallback: Verifiers | None = None
    regenerate: Regenerate | None = None
    share: Callable[[int, str], float]
    reply_ttl_s: float
    random: Callable[[], float]
    findings: Findings
    defer: Callable[[Callable[[], None]], object] = lambda leave: leave()

    def __post_init__(self) -> None:
        self._regenerates = True  # as of the last time
        self._queue: deque[_JudgingJob] = deque()
        self._early: OrderedDict[bytes, deque[_JudgingJob]] = OrderedDict()  # by namespace
        self._due: deque[_JudgingJob] = deque()  # of these, those that a judge may settle now
        self._wake = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()
        self._replies: list[tuple[Partition, ServedReply, tuple[str, ...]]] = []
        self._served: OrderedDict[int, deque[_Served]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of answers that wait for a judge or are being judged."""
        return len(self._queue) + len(self._due) + len(self._running)

    # -- called by the pipeline: never awaits, never raises

    def recorded(self, flight: Flight, record: Record) -> None:
        """Take a flight that is over, with its record."""
        generation, answered = flight.generation, flight.generation.answered
        semantic, stored = generation.looked.semantic, generation.stored
        trial, hit = semantic.trial, semantic.entry
        entry = stored.entry if stored.outcome == "stored" else None
        if trial is not None and hit is not None:
            self._hit(flight, record, hit, trial)
        elif answered.is_cut:
            return  # no judge can say what the rest of it would have been
        elif trial is not None and answered.progress.is_complete:
            is_audit = record.cache.miss_reason == MissReason.AUDIT
            source = Source.AUDIT if is_audit else Source.MISS
            audit = semantic.audit
            chance, certificate = 1.0, None
            if is_audit:
                chance = _chance(trial, self._shadow_share(record.request.team_id, record.request.alias))
            if audit is not None:
                chance, certificate = audit.chance, audit.certificate
            self._put(self._job_of(flight, record, entry, trial, source, chance, certificate))
        elif generation.turn.controls.no_cache and answered.progress.is_complete:
            last = self._last_served(generation.looked.fingerprint, record)
            if last is not None:
                self._put(self._job_of(flight, record, entry, last.trial, Source.AGAIN, 1.0, None, last.answer))

    def _hit(self, flight: Flight, record: Record, entry: Entry, trial: Trial) -> None:
        fingerprint = flight.generation.looked.fingerprint
        answer = AnswerRef(entry.exact, entry.created_at)
        served = self._served.setdefault(record.request.key_id, deque(maxlen=4))
        served.append(_Served(time.monotonic(), _words(fingerprint.text or ""), answer, trial))
        self._served.move_to_end(record.request.key_id)
        if len(self._served) > _AGAIN_KEYS_MAX:
            self._served.popitem(last=False)
        reply = ServedReply(
            id=record.request.id,
            exact=entry.exact,
            created_at=entry.created_at,
            compat=fingerprint.compat,
            alias=record.request.alias,
            at=record.request.at_s,
            trial=trial,
        )
        name = answer_id(entry)
        self._replies.append((fingerprint.partition, reply, (name,) if name else ()))
        if len(self._replies) == 1:
            self.defer(self._leave)
        share = self._shadow_share(record.request.team_id, record.request.alias)
        is_checked = bool(share) and self.random() < share
        # without money, a deployment or room there is no check; one that is tried finds out when there is
        can = self._can_check
        counts = is_checked and can
        chance = _chance(trial, share if can else 0.0)
        events = measured_error.served(chance, is_compared=counts)
        certificate = self.findings.note(record.request.team_id, record.request.alias, events, None)
        if is_checked:
            made_for = certificate if counts else None
            self._put(self._job_of(flight, record, entry, trial, Source.SHADOW, _chance(trial, share), made_for))

    @property
    def _can_check(self) -> bool:
        """True if this worker could generate a served hit afresh now, as far as it knows before it
        tries.
        """
        return self._regenerates and len(self._queue) < QUEUE_MAX

    def audited(self, team_id: int, alias: str, trial: Trial) -> AuditDraw:
        """Count an audit that was drawn, whatever its outcome."""
        chance = _chance(trial, self._shadow_share(team_id, alias) if self._can_check else 0.0)
        return AuditDraw(chance, self.findings.note(team_id, alias, measured_error.audited(chance), None))

    def _shadow_share(self, team_id: int, alias: str) -> float:
        return self.share(team_id, alias) if self.regenerate is not None else 0.0

    def _last_served(self, fingerprint: Fingerprint, record: Record) -> _Served | None:
        """The hit of the last minute with this prompt, if the key asks it again past the cache."""
        words_now, now = _words(fingerprint.text or ""), time.monotonic()
        for served in reversed(self._served.get(record.request.key_id, ())):
            both = len(words_now | served.prompt_words)
            if now - served.at <= _AGAIN_S and both and len(words_now & served.prompt_words) / both >= _AGAIN_SHARED:
                self._served[record.request.key_id].remove(served)
                return served
        return None

    def _job_of(
        self,
        flight: Flight,
        record: Record,
        entry: Entry | None,
        trial: Trial,
        source: Source,
        chance: float,
        certificate: str | None,
        served: AnswerRef | None = None,
    ) -> _JudgingJob | None:
        fingerprint, chunks = flight.generation.looked.fingerprint, flight.chunks
        if fingerprint.text is None or size_of(chunks) > _CHUNKS_BYTES_MAX:
            return None
        fresh = () if source is Source.SHADOW else chunks
        return _JudgingJob(
            record=record,
            turn=flight.generation.turn if source is Source.SHADOW else None,
            text=fingerprint.text,
            partition=fingerprint.partition,
            compat=fingerprint.compat,
            chunks=fresh,
            entry=entry,
            trial=trial,
            source=source,
            chance=chance,
            certificate=certificate,
            served=served,
        )

    def _put(self, job: _JudgingJob | None) -> None:
        if job is None:
            return
        if len(self._queue) >= QUEUE_MAX:
            self.findings.count(job.source, Ruling.UNKNOWN, "no room")
            return
        self._queue.append(job)
        self._wake.set()

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
            while self._queue or self._due:
                if len(self._running) >= _AT_ONCE:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                    continue
                self._start(self._carry_out((self._due or self._queue).popleft()))

    async def aclose(self) -> None:
        """Finish running comparisons; drop waiting ones."""
        self._queue.clear()
        self._due.clear()
        self._leave()
        if self._running:
            await asyncio.wait(self._running, timeout=2.0)

    async def _carry_out(self, job: _JudgingJob) -> None:
        try:
            match job.source:
                case Source.SHADOW:
                    await self._check_served(job)
                case Source.AGAIN:
                    await self._check_again(job)
                case _ if job.is_late:
                    await self._compare_again(job)
                case _:
                    await self._compare(job)
        except CacheWorkerUnavailable as error:
            # decision: dropped-whole
            self.findings.count(job.source, Ruling.UNKNOWN, "no room")
            _log.info("verdict_lost", source=job.source, reason=str(error))
        except (RedisError, CacheUnavailable, OSError) as error:
            _log.info("verdict_lost", source=job.source, reason=f"{type(error).__name__}: {error}")
        except Exception:
            _log.exception("judging_failed", source=job.source, request_id=job.record.request.id)

    async def _compare(self, job: _JudgingJob) -> None:
        """Compare a fresh answer with those near it. The first comparison gives the verdict; the
        first equal answer gives the group.
        """
        trial, fresh = job.trial, _qa_pair(job.text, job.chunks)
        entries = await self.exact.lookup_many(job.partition, job.compat, trial.ranked)
        first = entries[0]
        if first is None or fresh is None:
            return
        known = [entry for entry in entries if entry is not None]
        judgements = await self._judged(job, fresh, known, job.entry)
        share = 1.0 if job.source is Source.AUDIT else trial.worth
        judgement = judgements[0]
        is_early, can_ask = self._is_early(job, judgement), self.fallback is not None and not job.is_late
        judge = self._asker(job) if can_ask and not is_early and self.random() < share else None
        self._beside_prompts(job, judgement)
        chance: float | None = None
        if judge is not None and judgement.ruling is not Ruling.UNKNOWN and self.random() < _CALIBRATED:
            self.findings.compared(judgement, await self._settled(_OPEN, fresh, first, judge))
        if judgement.ruling is Ruling.UNKNOWN and can_ask and not is_early:
            judgement, is_asked = await self._costly(job, judge, fresh, first, judgement)
            chance = share if is_asked else 0.0
        is_right = _is_same(judgement)
        equal = first if is_right else None
        for other, free in zip(known[1:], judgements[1:], strict=True):
            if equal is None and _is_same(await self._settled(free, fresh, other, judge if chance else None)):
                equal = other
        is_nothing = is_right is None and equal is None
        if not (is_nothing and job.is_late):
            self._report(job, judgement, is_right)
            if not is_nothing or job.source is not Source.MISS or trial.features:
                verdict = self._verdict(job, trial, judgement, is_right, entry=job.entry)
                verdict = msgspec.structs.replace(verdict, judge_chance=chance)
                ref = AnswerRef(equal.exact, equal.created_at) if equal is not None else None
                other_ref = AnswerRef(first.exact, first.created_at)
                id = f"{job.record.request.id}:{job.source}{':late' * job.is_late}"
                await self.verdicts.take(job.partition, id, verdict, other_ref, ref)
        # last: a late verdict takes the place of one that is there
        if is_early:
            self._keep_early(job)
        elif judgement.judge == PROSE and is_right is not None and (due := self._early.pop(job.space, None)):
            self._due += due
            self._wake.set()

    def _is_early(self, job: _JudgingJob, judgement: Judgement) -> bool:
        """True if the comparison is made again later, once the judge of prose rules in its
        namespace. A judge that costs settles it now instead.
        """
        if judgement.why != EARLY or job.entry is None or not job.trial.features:
            return False
        kept = self._early.get(job.space, ())
        return self.fallback is None or (self.fallback.is_sparing and len(kept) < EARLY_MAX)

    def _keep_early(self, job: _JudgingJob) -> None:
        assert job.entry is not None
        bare = msgspec.structs.replace(job.entry, chunks=(), text=None)
        kept = self._early.setdefault(job.space, deque(maxlen=EARLY_MAX))
        kept.append(replace(job, text="", chunks=(), entry=bare, is_late=True))
        self._early.move_to_end(job.space)
        if len(self._early) > _EARLY_SPACES_MAX:
            self._early.popitem(last=False)

    async def _compare_again(self, job: _JudgingJob) -> None:
        """Make a comparison again, if its answer is still there."""
        assert job.entry is not None
        (entry,) = await self.exact.lookup_many(job.partition, job.compat, (job.entry.exact,))
        if entry is not None and entry.text is not None and entry.created_at == job.entry.created_at:
            await self._compare(replace(job, text=entry.text, chunks=chunks_of(entry), entry=entry))

    def _beside_prompts(self, job: _JudgingJob, judgement: Judgement) -> None:
        """Set a ruling beside the prompts, where these say by themselves what is right.

        The rule learns nothing from such pairs: of a hit by the same words, whose answers are two
        to one prompt, and of a miss by a veto, such as another number. Equal texts are no error.
        """
        if job.trial.features or judgement.judge == EQUALITY:
            return
        if job.source is Source.MISS:
            self.findings.compared(judgement, Judgement(Ruling.DIFFERENT, VETO, ""))
        else:
            self.findings.compared(judgement, Judgement(Ruling.SAME, "the same prompt", ""))

    async def _costly(
        self, job: _JudgingJob, judge: Judge | None, fresh: QAPair, entry: Entry, cheap: Judgement
    ) -> tuple[Judgement, bool]:
        """The ruling of `judge` where the others are undecided, with a second opinion where the
        ruling is surprising. The second value is True if the judge answered.
        """
        cached = _cached_pair(entry)
        if judge is None or cached is None:
            return cheap, False
        judgement = await judge.judge(fresh, cached)
        if judgement.why == NO_ANSWER:
            return judgement, False
        if judgement.ruling is not Ruling.SAME and job.trial.p >= LIKELY and job.trial.peers:
            entries = await self.exact.lookup_many(job.partition, job.compat, job.trial.peers)
            peers = [_cached_pair(peer) for peer in entries if peer is not None]
            judgement = await second_opinion(judge, judgement, fresh, [peer for peer in peers if peer is not None])
        return judgement, True

    async def _check_served(self, job: _JudgingJob) -> None:
        """Generate a semantic hit's answer afresh and compare. A wrong answer is not served again
        until it is cleared.
        """
        assert self.regenerate is not None
        assert job.entry is not None
        assert job.turn is not None
        answer = await self.regenerate(job.turn)
        self._regenerates = answer is not None
        fresh = _qa_pair(job.text, [Chunk(answer, is_whole=True)]) if answer is not None else None
        if fresh is None:
            return
        judgement = await self._alone(job, fresh, job.entry, None)
        self._beside_prompts(job, judgement)
        is_right = _is_same(judgement)
        self._report(job, judgement, is_right)
        verdict = self._verdict(job, job.trial, judgement, is_right)
        ref = AnswerRef(job.entry.exact, job.entry.created_at)
        await self._take_served(job, verdict, ref, judgement, is_wrong=is_right is False)

    async def _check_again(self, job: _JudgingJob) -> None:
        """Compare the answer of a repeated request with the hit before.

        A different fresh answer is a wrong verdict, one that no judge can compare a weak one.
        """
        fresh, served = _qa_pair(job.text, job.chunks), job.served
        assert served is not None
        (entry,) = await self.exact.lookup_many(job.partition, job.compat, (served.exact,))
        if fresh is None or entry is None or entry.created_at != served.created_at:
            return
        judgement = await self._alone(job, fresh, entry, job.entry)
        is_right = _is_same(judgement)
        self._report(job, judgement, is_right)
        if is_right:
            return
        verdict = self._verdict(job, job.trial, judgement, False)
        if is_right is None:
            verdict = _weak(verdict)
        await self._take_served(job, verdict, served, judgement, is_wrong=is_right is False)

    async def _take_served(
        self, job: _JudgingJob, verdict: Verdict, ref: AnswerRef, judgement: Judgement, *, is_wrong: bool
    ) -> None:
        record = job.record
        out = Suspension(
            exact=ref.exact,
            source=job.source,
            at=verdict.at,
            judge=judgement.judge,
            why=judgement.why,
            request_id=record.request.id,
            alias=record.request.alias,
        )
        scope = Scope.ANSWER if is_wrong else Scope.NOTHING
        await self.verdicts.take(
            job.partition,
            f"{record.request.id}:{job.source}",
            verdict,
            ref,
            None,
            scope,
            out if is_wrong else None,
        )

    def _verdict(
        self,
        job: _JudgingJob,
        trial: Trial,
        judgement: Judgement,
        is_right: bool | None,
        *,
        entry: Entry | None = None,
    ) -> Verdict:
        """`entry` is the fresh answer, where it was stored."""
        return Verdict(
            source=job.source,
            compat=job.compat,
            is_right=is_right,
            trial=msgspec.structs.replace(trial, chance=job.chance),
            at=time.time(),
            exact=entry.exact if entry is not None else b"",
            created_at=entry.created_at if entry is not None else 0.0,
            judge=judgement.judge,
            why=judgement.why,
            flips=self.findings.flips(judgement.judge),
            alias=job.record.request.alias,
            is_late=job.is_late,
        )

    def _report(self, job: _JudgingJob, judgement: Judgement, is_right: bool | None) -> None:
        self.findings.count(job.source, judgement.ruling, judgement.judge)
        if is_right is not None and self.fallback is not None and job.record.verifier.verifier:
            self.fallback.check(job.record, 1.0 - job.trial.p, is_wrong=not is_right)
        if job.certificate is not None and is_right is not None:
            is_audit = job.source is Source.AUDIT
            events = measured_error.settled(job.chance, judgement.judge, is_wrong=not is_right, is_audit=is_audit)
            self.findings.note(job.record.request.team_id, job.record.request.alias, events, job.certificate)

    async def _judged(
        self, job: _JudgingJob, fresh: QAPair, cached: Sequence[Entry], stored: Entry | None
    ) -> list[Judgement]:
        """The rulings of the judges that cost nothing, on each of `cached`. `stored` is the fresh
        answer, where it was stored. Raises CacheWorkerUnavailable.
        """
        rulings = [_OPEN] * len(cached)
        others = {index: pair.answer for index, entry in enumerate(cached) if (pair := _cached_pair(entry)) is not None}
        answers = [_answered(cached[index], text) for index, text in others.items()]
        settled = await self.judges.compare(job.partition, job.compat, _answered(stored, fresh.answer), answers)
        for index, ruling in zip(others, settled, strict=True):
            rulings[index] = ruling
        return rulings

    async def _settled(self, free: Judgement, fresh: QAPair, entry: Entry, fallback: Judge | None) -> Judgement:
        """The ruling `free`, or that of `fallback` where `free` is UNKNOWN."""
        cached = _cached_pair(entry) if free.ruling is Ruling.UNKNOWN and fallback is not None else None
        return await fallback.judge(fresh, cached) if fallback is not None and cached is not None else free

    async def _alone(self, job: _JudgingJob, fresh: QAPair, entry: Entry, stored: Entry | None) -> Judgement:
        """A ruling on one answer. `stored` is the fresh one, where it was stored."""
        (free,) = await self._judged(job, fresh, (entry,), stored)
        return await self._settled(free, fresh, entry, self._asker(job))

    def _asker(self, job: _JudgingJob) -> Judge | None:
        return self.fallback.of(job.record, job.space) if self.fallback is not None else None

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


def _chance(trial: Trial, share: float) -> float:
    """The probability with which a would-be hit is compared: it is generated instead, or served and
    then checked with the probability `share`. A trial has a chance of 1 where the rule would not
    serve, or where audits are off.
    """
    audited = trial.chance if trial.chance < 1.0 else 0.0
    return audited + (1.0 - audited) * share


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


def _weak(verdict: Verdict) -> Verdict:
    """Reduce a verdict to a part of one in its group's tally. The model learns nothing from it."""
    trial = msgspec.structs.replace(verdict.trial, features=b"")
    return msgspec.structs.replace(verdict, trial=trial, weight=_AGAIN_WEIGHT)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.casefold().split())
