"""The verifiers of this worker's requests: which one is asked about a stored answer, whether it
pays, and what follows from its word.

A question is a request of the gateway's own at the expense of the asking team. With `verifier:
auto` the cheapest deployment of the request's own alias that can chat is asked; where there is
none, a local engine. Invariants: a request goes on as a miss where its question is not answered in
time, and what is said later is a verdict all the same; nothing is served on a word beyond the error
account of its namespace; each word is a verdict, and joins no answers; a question's outcome opens
no breaker of clients' requests and teaches no estimate that routes them, because it goes to a copy
of the deployment with a breaker of its own.
"""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace
from redis.exceptions import RedisError

from cache import CacheUnavailable, Entry, ExactCache, Fingerprint
from cache.entry import wording_id
from cache.query import Asked, Undecided
from cache.verdicts import AnswerRef, Judge, Judgement, QAPair, Ruling, Source, Verdict, VerdictStore
from gateway.accounts import Identity, Team
from gateway.accounts.accounts import Accounts
from gateway.deployments.alias import Alias
from gateway.deployments.fleet import Fleet
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.journey.needs import booked_labels
from gateway.journey.outcomes import Asking, SemanticResult
from gateway.journey.queue import ranking
from gateway.journey.record import Record
from gateway.journey.storing import answer_text, chunks_of, shows
from gateway.learning.exam import Recent
from gateway.learning.internal_requests import BUSY, InternalRequests
from gateway.learning.moments import Gathered, Moments
from gateway.learning.spending import Spending
from gateway.learning.verifier import (
    ANSWER_CHARS_MAX,
    NO_ANSWER,
    REPLY_TOKENS_MAX,
    Choice,
    StoredAnswer,
    Verifier,
    question_chars,
)
from gateway.learning.verifier_pool import Askable, VerifierPool
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import AUTO, Settings
from gateway.wire.fold import fold
from policies import Demand
from policies.asking import (
    Calibration,
    Expense,
    any_right,
    false_yes_again,
    needs_a_second,
    pays,
    risk_of,
)
from policies.verification import Verify

_Labels = dict[str, str]
_LABELS = ("user", "session", "tags")
_WITHIN_S = 30.0  # for a word that no request waits for
_TYPICAL_CHARS = 600  # of an answer, before it is read
_ANSWER_BYTES_MAX = 256 << 10  # of an entry that is shown
_CHARS_PER_TOKEN, _REPLY_TOKENS = 4, 2
_log = get_logger()

NoteQuestion = Callable[[Team, str, int, str], None]
"""Takes the asking team, its alias, a question's cost in µUSD, and `answered` or `failed`."""
CountVerdict = Callable[[Source, Ruling, str], None]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """A stored answer, and what a verifier is shown of it. `is_first`: the rule finds it the likeliest."""

    candidate: Asked
    entry: Entry
    stored: StoredAnswer
    is_first: bool

    @property
    def unread(self) -> Sequence[tuple[str, str]]:
        """The differences of the contexts, where a verifier sees the answer's beginning alone."""
        return self.candidate.differing if len(self.stored.answer) > ANSWER_CHARS_MAX else ()


@dataclass(frozen=True, slots=True, eq=False)
class _Question:
    """A question that pays, about answers that are there. Its request waits for `within_ms`; None: for
    none of it, as the verifier only observes.
    """

    askable: Askable
    generation: Generation
    semantic: SemanticResult
    answers: list[_Answer]
    within_ms: float | None

    @property
    def fingerprint(self) -> Fingerprint:
        return self.generation.looked.fingerprint

    @property
    def prompt(self) -> str:
        return self.fingerprint.text or ""


@dataclass(kw_only=True, eq=False)
class Verifiers:
    """Asks the verifiers of one worker. `note` gets each question, `count` each verdict."""

    settings: Settings
    fleet: Fleet
    accounts: Accounts
    exact: ExactCache
    verdicts: VerdictStore
    requests: InternalRequests
    spending: Spending
    note: NoteQuestion
    count: CountVerdict

    def __post_init__(self) -> None:
        self.pool = VerifierPool(self.fleet, random.random)
        self._recent = Recent()
        self._calibration = Calibration()
        self._running: set[asyncio.Task[Any]] = set()
        self._moments = Moments(self.exact, self._of_moments, self._start)

    @property
    def is_named(self) -> bool:
        """Whether some alias has a verifier."""
        return any(self.settings.verification(name).verifier for name in self.settings.models)

    def connect(self, pipeline: Pipeline) -> None:
        """Ask about the undecided lookups of `pipeline`."""
        self._lookup = pipeline.semantic
        pipeline.verifier = self

    # -- stage 6

    async def look(self, flight: Flight, semantic: SemanticResult) -> SemanticResult:
        """Ask about an undecided lookup. Returns a hit on the verifier's word, or the same miss with
        the question.
        """
        try:
            question = await self._question(flight, semantic)
        except (RedisError, CacheUnavailable, OSError) as error:
            _log.info("verifier_not_asked", reason=f"{type(error).__name__}: {error}")
            return semantic
        except Exception:
            _log.exception("verifier_failed", request_id=flight.generation.turn.arrival.request_id)
            return semantic
        if question is None:
            return semantic
        if not question.askable.exam.counts:
            self._start(self._examine(question))
            return semantic
        asking = Asking(question.askable.name)
        task = self._start(self._decide(question, asking))
        if question.within_ms is None:
            return replace(semantic, asking=asking, question=self._lookup.shown(question.fingerprint))
        began, served = time.perf_counter(), None
        try:
            async with asyncio.timeout(question.within_ms / 1000.0):
                served = await asyncio.shield(task)
        except TimeoutError:  # what it says from now on fills another one's facts
            asking = Asking(question.askable.name)
        finally:
            asking.waited_ms = (time.perf_counter() - began) * 1000.0
        return replace(semantic, asking=asking) if served is None else self._served(question, asking, *served)

    async def _question(self, flight: Flight, semantic: SemanticResult) -> _Question | None:
        """The question, if the estimate says that it pays, every limit leaves room for it, and an answer is
        there. Raises RedisError.
        """
        generation, undecided = flight.generation, semantic.undecided
        alias, team, controls = generation.alias, generation.identity.team, generation.turn.controls
        verification = self._lookup.verification(controls, team, alias)
        is_observed = verification.mode is Verify.OBSERVE
        if undecided is None or (is_observed and (controls.only_if_cached or self._is_busy)):
            return None
        text = generation.looked.fingerprint.text or ""
        stored = [StoredAnswer(one.text, " " * _TYPICAL_CHARS, one.differing) for one in undecided.candidates]
        chosen = self._affordable(alias, verification.verifier, team, question_chars(text, stored))
        if chosen is None:
            return None
        askable, expense = chosen
        within_ms = None if is_observed else self._within_ms(flight, semantic, undecided, askable, expense)
        if within_ms is None and not is_observed:
            return None
        answers = await self._read(generation, undecided)
        return _Question(askable, generation, semantic, answers, within_ms) if answers else None

    def _within_ms(
        self, flight: Flight, semantic: SemanticResult, undecided: Undecided, askable: Askable, question: Expense
    ) -> float | None:
        """How long the request may wait for a question of this expense; None where it does not pay, or
        no yes could be served.
        """
        fingerprint, alias = flight.generation.looked.fingerprint, flight.generation.alias
        namespace, said = _namespace(fingerprint), [candidate.p for candidate in undecided.candidates]
        ps = [self._calibration.p(namespace, p, is_first=not place) for place, p in enumerate(said)]
        least_risk = risk_of(max(ps), false_yes_again(askable.exam.false_yes))
        if not self._has_room(fingerprint, semantic, least_risk):
            return None
        best = next(iter(ranking(flight).ranked), None)
        waits_ms, ttft_ms = [float(self.settings.cache.verify_ms)], best.ttft_ms if best is not None else 0.0
        limits_ms = (flight.remaining_ms(), alias.policy.ttft_ms_max)
        waits_ms += [limit_ms - ttft_ms for limit_ms in limits_ms if limit_ms is not None]
        generated = Expense(best.cost_microusd, best.total_ms) if best is not None else None
        is_worth = generated is None or pays(alias.policy.kind, any_right(ps), question, generated)
        return min(waits_ms) if is_worth and question.ms <= min(waits_ms) else None

    @property
    def _is_busy(self) -> bool:
        return self.requests.generations() - len(self._running) > BUSY

    async def _read(self, generation: Generation, undecided: Undecided) -> list[_Answer]:
        """The candidates whose answers are still there and can be read, in one round trip. What a verifier
        does not see of an answer has no word of the other context alone. Raises RedisError.
        """
        fingerprint, max_age_s = generation.looked.fingerprint, generation.turn.controls.max_age_s
        candidates, now = undecided.candidates, time.time()
        entries = await self.exact.lookup_many(
            fingerprint.partition, fingerprint.compat, [candidate.exact for candidate in candidates]
        )
        answers = [
            _Answer(candidate, entry, _stored(candidate, entry), is_first=candidate is candidates[0])
            for candidate, entry in zip(candidates, entries, strict=True)
            if entry is not None and entry.chunks_bytes <= _ANSWER_BYTES_MAX
            if max_age_s is None or entry.age_s(now) <= max_age_s
        ]
        return [answer for answer in answers if not shows(answer.entry, fingerprint, answer.unread)]

    async def _decide(self, question: _Question, asking: Asking) -> tuple[_Answer, float] | None:
        """The answer that the verifier calls right, and the risk that it is wrong; None without one
        that may be served.
        """
        verifier, answers = self._of(question, asking), question.answers
        choice, right = await verifier.choose(question.prompt, [answer.stored for answer in answers]), None
        if choice.number is not None and choice.number >= 0:
            answer = answers[choice.number]
            choice, risk = await self._confirmed(question, verifier, choice, answer)
            right = (answer, risk) if risk is not None else None
        asking.verdict = _verdict(choice, is_right=right is not None)
        asking.entry = right[0].entry if right is not None and question.within_ms is None else None
        if choice.why != NO_ANSWER:
            self._start(self._take(question, choice))
            self._start(self._examine(question))
        return right

    async def _confirmed(
        self, question: _Question, verifier: Verifier, choice: Choice, answer: _Answer
    ) -> tuple[Choice, float | None]:
        """The choice, after a second question where one yes risks much, or more than the account has;
        and the risk that is left, None where it may not be served.
        """
        assert choice.number is not None
        fingerprint, semantic, false_yes = question.fingerprint, question.semantic, question.askable.exam.false_yes
        p = self._p_of(question, answer)
        risk = risk_of(p, false_yes)
        if needs_a_second(risk, semantic.error_max) or not self._has_room(fingerprint, semantic, risk):
            is_right = await verifier.confirm(question.prompt, answer.stored)
            if is_right is not None:
                question.askable.exam.confirm(p, is_yes=is_right)
            if not is_right:
                return Choice(None if is_right is None else -1, "not confirmed", (choice.number,)), None
            risk = risk_of(p, false_yes_again(false_yes))
        return choice, risk if self._has_room(fingerprint, semantic, risk) else None

    def _served(self, question: _Question, asking: Asking, answer: _Answer, risk: float) -> SemanticResult:
        """The hit on a verifier's word, charged its risk."""
        semantic, candidate = question.semantic, answer.candidate
        self._lookup.errors.charge(question.fingerprint.compat, risk)
        self.exact.use(answer.entry)
        return replace(
            semantic,
            asking=asking,
            entry=answer.entry,
            similarity=candidate.similarity,
            miss_reason="",
            nearest="",
            question=self._lookup.shown(question.fingerprint),
            trial=replace(candidate.trial(semantic.trial), risk=risk),
            verified_by=asking.verifier,
        )

    def _p_of(self, question: _Question, answer: _Answer) -> float:
        """The probability that a candidate's answer is right."""
        namespace = _namespace(question.fingerprint)
        return self._calibration.p(namespace, answer.candidate.p, is_first=answer.is_first)

    def _has_room(self, fingerprint: Fingerprint, semantic: SemanticResult, risk: float) -> bool:
        """Whether the error account has room for a hit with this risk."""
        return self._lookup.errors.has(fingerprint.compat, risk, semantic.error_max)

    async def _take(self, question: _Question, choice: Choice) -> None:
        """Keep what the verifier said: a verdict on each answer that it ruled on."""
        fingerprint, askable, at = question.fingerprint, question.askable, time.time()
        for number in choice.shown:
            answer, is_chosen = question.answers[number], number == choice.number
            candidate = answer.candidate
            if choice.number is not None and 0 <= choice.number < number:
                continue  # it chose a likelier one, and said nothing of this
            if choice.number is not None:
                namespace, false_yes = _namespace(fingerprint), askable.exam.false_yes
                self._calibration.learn(namespace, candidate.p, false_yes, is_first=answer.is_first, is_yes=is_chosen)
            # one that it passed over is as likely as not another wording of the chosen answer
            is_right = True if is_chosen else False if choice.number == -1 else None
            verdict = Verdict(
                source=Source.VERIFIER,
                compat=fingerprint.compat,
                is_right=is_right,
                trial=candidate.trial(question.semantic.trial),
                at=at,
                judge=askable.name,
                why=choice.why,
                alias=question.generation.alias.name,
                wordings=(wording_id(fingerprint.exact), candidate.wording) if is_right else (),
            )
            ruling = Ruling.UNKNOWN if is_right is None else Ruling.SAME if is_right else Ruling.DIFFERENT
            self.count(Source.VERIFIER, ruling, askable.name)
            id = f"{question.generation.turn.arrival.request_id}:{Source.VERIFIER}:{number}"
            about = AnswerRef(candidate.exact, answer.entry.created_at)
            await self.verdicts.take(fingerprint.partition, id, verdict, about)

    async def _examine(self, question: _Question) -> None:
        stored, namespace = question.answers[0].stored, _namespace(question.fingerprint)
        pair = QAPair(stored.prompt, stored.answer)
        await question.askable.exam.sit(self._of(question), self._recent, namespace, pair)

    # -- questions

    def _affordable(
        self, alias: Alias, verifier: str | None, payer: Team, chars: int, times: int = 1
    ) -> tuple[Askable, Expense] | None:
        """The verifier of an answer of `alias`, and what a question with so many characters is expected
        to cost; None where nobody may be asked now, or it costs the team too much.
        """
        askable = self.pool.to_ask(alias, verifier)
        tokens = chars // _CHARS_PER_TOKEN
        demand = Demand(tokens, REPLY_TOKENS_MAX, _REPLY_TOKENS, prompt_tokens_max=chars)
        expense = askable.expected(demand) if askable is not None else None
        if askable is None or expense is None or not self.spending.allows(payer.id, times * expense.cost_microusd):
            return None
        return askable, expense

    def _of(self, question: _Question, asking: Asking | None = None) -> Verifier:
        generation = question.generation
        labels = booked_labels(generation.turn, generation.identity)
        return self._verifier(question.askable, generation.identity, generation.alias.name, labels, asking)

    def _verifier(
        self, askable: Askable, payer: Identity, alias: str, labels: _Labels, asking: Asking | None = None
    ) -> Verifier:
        async def ask(body: dict[str, Any]) -> bytes | None:
            reply = await self.requests.ask(body, payer, askable.alias, _WITHIN_S, labels)
            if asking is not None:
                asking.cost_microusd += reply.cost_microusd
                asking.verifier = reply.deployment or asking.verifier
            self.spending.add(payer.team.id, reply.cost_microusd)
            self.note(payer.team, alias, reply.cost_microusd, "failed" if reply.whole is None else "answered")
            return reply.whole

        return Verifier(askable.alias.name, ask, askable.name, has_odds=askable.has_odds)

    # -- after a miss

    def recorded(self, generation: Generation) -> None:
        """Ask later whether the answer of a generation that is recorded depends on the moment."""
        team, alias = generation.identity.team, generation.alias
        if self._lookup.verification(generation.turn.controls, team, alias).verifier is not None:
            self._moments.recorded(generation)

    def _of_moments(self, gathered: Gathered, chars: int) -> Verifier | None:
        """Who is asked which of these answers move; None where nobody may be, or it costs too much."""
        alias, payer = gathered.alias, gathered.payer
        verification = self.settings.verification(alias.name, payer.team.verify)
        chosen = self._affordable(alias, verification.verifier, payer.team, question_chars("", ()) + chars)
        cost_max = self.settings.cache.verify_share * gathered.cost_microusd
        if chosen is None or self._is_busy or chosen[1].cost_microusd > cost_max:
            return None
        return self._verifier(chosen[0], payer, alias.name, {})

    def of(self, record: Record, namespace: bytes) -> Judge | None:
        """The judge of a request's fresh answer, in its namespace; None where no verifier is named."""
        alias = record.request.alias
        if self._is_busy or self.settings.verification(alias).verifier is None:
            return None
        return _AfterMiss(partial(self._judge, record, namespace))

    async def _judge(self, record: Record, namespace: bytes, fresh: QAPair, cached: QAPair) -> Judgement:
        none = Judgement(Ruling.UNKNOWN, "", NO_ANSWER)
        payer = await self.accounts.of_key(record.request.key_id)
        if payer is None:
            return none
        verification = self.settings.verification(record.request.alias, payer.team.verify)
        alias = self.pool.alias(record.request.model or record.request.alias)
        if alias is None:
            return none
        chars = len(fresh.prompt) + len(fresh.answer) + len(cached.answer) + question_chars("", ())
        chosen = self._affordable(alias, verification.verifier, payer.team, chars, times=2)
        if chosen is None:
            return none
        askable, _ = chosen
        labels = {name: text for name in _LABELS if (text := getattr(record.request, name))}
        verifier = self._verifier(askable, payer, record.request.alias, labels)
        await askable.exam.sit(verifier, self._recent, namespace, fresh)
        return await verifier.judge(fresh, cached) if askable.exam.counts else none

    def check(self, record: Record, risk: float, *, is_wrong: bool) -> None:
        """Take in what a check found of a hit on a verifier's word, which had this risk."""
        verifier = self.settings.verification(record.request.alias).verifier
        exam = self.pool.exams.get(record.verifier.verifier if verifier == AUTO else verifier or "")
        if exam is not None:
            exam.check(risk, is_wrong=is_wrong)

    # -- the end

    def _start(self, work: Awaitable[Any]) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(self._carry_out(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _carry_out(self, work: Awaitable[Any]) -> Any:
        try:
            return await work
        except (RedisError, CacheUnavailable, OSError) as error:
            _log.info("verifier_word_lost", reason=f"{type(error).__name__}: {error}")
        except Exception:
            _log.exception("verifier_failed")
        return None

    async def drain(self) -> None:
        """Wait until every question is answered, and every word is kept."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self) -> None:
        """Give questions as long as a request may wait for one, and cancel the others."""
        self._moments.all_due()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self.settings.cache.verify_ms / 1000.0)
            for task in late:
                task.cancel()


class _AfterMiss:
    """A judge that is one function."""

    def __init__(self, ask: Callable[[QAPair, QAPair], Awaitable[Judgement]]) -> None:
        self._ask = ask

    async def judge(self, fresh: QAPair, cached: QAPair) -> Judgement:
        return await self._ask(fresh, cached)


def _namespace(fingerprint: Fingerprint) -> bytes:
    return fingerprint.partition + fingerprint.compat


def _verdict(choice: Choice, *, is_right: bool) -> str:
    """A choice as an `Asking` has it; `is_right`: the answer that it names may be served."""
    if choice.number is None:
        return "failed" if choice.why == NO_ANSWER else "unsure"
    return "no" if choice.number < 0 else "yes" if is_right else "risky"


def _stored(candidate: Asked, entry: Entry) -> StoredAnswer:
    """What a verifier is shown; an answer that can't be read as a text is empty."""
    try:
        answer = answer_text(fold(chunks_of(entry))) or ""
    except msgspec.DecodeError:
        answer = ""
    return StoredAnswer(candidate.text, answer[: ANSWER_CHARS_MAX + 1], candidate.differing)
