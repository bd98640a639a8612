"""The verifiers of this worker's requests: whom to ask about a stored answer, whether it pays, and
what follows from its word.

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

from cache import CacheUnavailable, Entry, ExactCache
from cache.entry import wording_id
from cache.query import Asked, Undecided
from cache.verdicts import AnswerRef, Judge, Judgement, QAPair, Ruling, Source, Verdict, VerdictStore
from gateway.accounts import Identity, Team
from gateway.accounts.accounts import Accounts
from gateway.deployments.fleet import Fleet
from gateway.journey.flight import Flight
from gateway.journey.generation import Generation
from gateway.journey.needs import booked_labels
from gateway.journey.outcomes import Asking, SemanticResult
from gateway.journey.queue import ranking
from gateway.journey.record import Record
from gateway.journey.semantic import SemanticLookup
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
from gateway.learning.whom import Askable, Whom
from gateway.loggers import get_logger
from gateway.pipeline import Pipeline
from gateway.settings import AUTO, Settings
from gateway.wire.fold import fold
from policies import Demand
from policies.asking import (
    Calibration,
    ErrorAccount,
    Expense,
    any_right,
    false_yes_again,
    needs_a_second,
    pays,
    risk_of,
)
from policies.verification import Verification, Verify

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


class _Plan(msgspec.Struct, frozen=True, eq=False):
    """A question that pays: whom to ask, and how long its request may wait."""

    askable: Askable
    within_ms: float
    is_observed: bool


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
        self._lookup: SemanticLookup | None = None  # of the pipeline, once it is connected
        self.whom = Whom(self.fleet, random.random)
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
            plan = self._plan(flight, semantic)
            answers = await self._read(flight.generation, semantic) if plan is not None else []
        except (RedisError, CacheUnavailable, OSError) as error:
            _log.info("verifier_not_asked", reason=f"{type(error).__name__}: {error}")
            return semantic
        except Exception:
            _log.exception("verifier_failed", request_id=flight.generation.turn.arrival.request_id)
            return semantic
        if plan is None or not answers:
            return semantic
        generation, exam = flight.generation, plan.askable.exam
        if not exam.counts:
            self._start(self._examine(plan, generation, answers[0]))
            return semantic
        asking = Asking(plan.askable.name)
        task = self._start(self._decide(plan, asking, generation, semantic, answers))
        if plan.is_observed:
            question = (generation.looked.fingerprint.text or "") if self.settings.log_prompts else ""
            return replace(semantic, asking=asking, question=question)
        began, served = time.perf_counter(), None
        try:
            async with asyncio.timeout(plan.within_ms / 1000.0):
                served = await asyncio.shield(task)
        except TimeoutError:  # what it says from now on fills another one's facts
            asking = Asking(plan.askable.name)
        finally:
            asking.waited_ms = (time.perf_counter() - began) * 1000.0
        semantic = replace(semantic, asking=asking)
        return semantic if served is None else self._served(generation, semantic, *served)

    def _plan(self, flight: Flight, semantic: SemanticResult) -> _Plan | None:
        """Whom to ask, if the estimate says that it pays, and every limit leaves room for it."""
        generation, undecided = flight.generation, semantic.undecided
        alias, team = generation.alias, generation.identity.team
        controls, text = generation.turn.controls, generation.looked.fingerprint.text or ""
        verification = self._verification(generation)
        is_observed = verification.mode is Verify.OBSERVE
        if undecided is None or (is_observed and (controls.only_if_cached or self._is_busy)):
            return None
        askable = self.whom.to_ask(alias, verification.verifier)
        if askable is None:
            return None
        shown = [StoredAnswer(one.text, " " * _TYPICAL_CHARS, one.differing) for one in undecided.candidates]
        question = askable.expected(_demand(question_chars(text, shown)))
        ps = [self._p(generation, undecided, candidate) for candidate in undecided.candidates]
        if question is None or not self.spending.allows(team.id, question.cost_microusd):
            return None
        if is_observed:
            return _Plan(askable, _WITHIN_S * 1000.0, is_observed=True)
        least_risk = risk_of(max(ps), false_yes_again(askable.exam.false_yes))
        if not self._has_room(generation, semantic, least_risk):
            return None
        best = next(iter(ranking(flight).ranked), None)
        waits_ms, ttft_ms = [float(self.settings.cache.verify_ms)], best.ttft_ms if best is not None else 0.0
        limits_ms = (flight.remaining_ms(), alias.policy.ttft_ms_max)
        waits_ms += [limit_ms - ttft_ms for limit_ms in limits_ms if limit_ms is not None]
        generated = Expense(best.cost_microusd, best.total_ms) if best is not None else None
        is_worth = generated is None or pays(alias.policy.kind, any_right(ps), question, generated)
        if not is_worth or question.ms > min(waits_ms):
            return None
        return _Plan(askable, min(waits_ms), is_observed=False)

    @property
    def _is_busy(self) -> bool:
        return self.requests.generations() - len(self._running) > BUSY

    async def _read(self, generation: Generation, semantic: SemanticResult) -> list[tuple[Asked, Entry]]:
        """The candidates whose answers are still there and can be read, in one round trip. What a verifier
        does not see of an answer has no word of the other context alone. Raises RedisError.
        """
        assert semantic.undecided is not None
        fingerprint, max_age_s = generation.looked.fingerprint, generation.turn.controls.max_age_s
        candidates, now = semantic.undecided.candidates, time.time()
        entries = await self.exact.lookup_many(
            fingerprint.partition, fingerprint.compat, [candidate.exact for candidate in candidates]
        )
        return [
            (candidate, entry)
            for candidate, entry in zip(candidates, entries, strict=True)
            if entry is not None and entry.chunks_bytes <= _ANSWER_BYTES_MAX
            if max_age_s is None or entry.age_s(now) <= max_age_s
            if not shows(entry, fingerprint, _unread(candidate, entry))
        ]

    async def _decide(
        self,
        plan: _Plan,
        asking: Asking,
        generation: Generation,
        semantic: SemanticResult,
        answers: list[tuple[Asked, Entry]],
    ) -> tuple[Asked, Entry, float] | None:
        """The answer that the verifier calls right, and the risk that it is wrong; None without one
        that may be served.
        """
        verifier = self._of(plan.askable, generation, asking)
        shown = [_stored(candidate, entry) for candidate, entry in answers]
        choice = await verifier.choose(generation.looked.fingerprint.text or "", shown)
        right, undecided = None, semantic.undecided
        assert undecided is not None
        if choice.number is not None and choice.number >= 0:
            candidate, entry = answers[choice.number]
            p = self._p(generation, undecided, candidate)
            choice, risk = await self._confirmed(plan, verifier, generation, semantic, choice, shown, p)
            right = (candidate, entry, risk) if risk is not None else None
        asking.verdict = _verdict(choice, is_right=right is not None)
        asking.entry = right[1] if right is not None and plan.is_observed else None
        if choice.why != NO_ANSWER:
            self._start(self._take(plan, generation, semantic, answers, choice))
            self._start(self._examine(plan, generation, answers[0]))
        return right

    async def _confirmed(
        self,
        plan: _Plan,
        verifier: Verifier,
        generation: Generation,
        semantic: SemanticResult,
        choice: Choice,
        shown: Sequence[StoredAnswer],
        p: float,
    ) -> tuple[Choice, float | None]:
        """The choice, after a second question where one yes risks much, or more than the account has;
        and the risk that is left, None where it may not be served.
        """
        assert choice.number is not None
        fingerprint, false_yes = generation.looked.fingerprint, plan.askable.exam.false_yes
        risk = risk_of(p, false_yes)
        if needs_a_second(risk, semantic.error_max) or not self._has_room(generation, semantic, risk):
            is_right = await verifier.confirm(fingerprint.text or "", shown[choice.number])
            if is_right is not None:
                plan.askable.exam.confirm(p, is_yes=is_right)
            if not is_right:
                return Choice(None if is_right is None else -1, "not confirmed", (choice.number,)), None
            risk = risk_of(p, false_yes_again(false_yes))
        return choice, risk if self._has_room(generation, semantic, risk) else None

    def _served(
        self, generation: Generation, semantic: SemanticResult, candidate: Asked, entry: Entry, risk: float
    ) -> SemanticResult:
        """The hit on a verifier's word, charged its risk."""
        fingerprint = generation.looked.fingerprint
        assert semantic.asking is not None
        assert self._lookup is not None
        self._lookup.errors.charge(fingerprint.compat, risk)
        self.exact.use(entry)
        return replace(
            semantic,
            entry=entry,
            similarity=candidate.similarity,
            miss_reason="",
            nearest="",
            question=(fingerprint.text or "") if self.settings.log_prompts else "",
            trial=msgspec.structs.replace(candidate.trial(semantic.trial), risk=risk),
            verified_by=semantic.asking.verifier,
        )

    def _p(self, generation: Generation, undecided: Undecided, candidate: Asked) -> float:
        """The probability that a candidate's answer is right."""
        is_first = candidate is undecided.candidates[0]
        return self._calibration.p(_namespace(generation), candidate.p, is_first=is_first)

    def _has_room(self, generation: Generation, semantic: SemanticResult, risk: float) -> bool:
        """Whether the error account has room for a hit with this risk."""
        errors = self._lookup.errors if self._lookup is not None else ErrorAccount()
        return errors.has(generation.looked.fingerprint.compat, risk, semantic.error_max)

    async def _take(
        self,
        plan: _Plan,
        generation: Generation,
        semantic: SemanticResult,
        answers: list[tuple[Asked, Entry]],
        choice: Choice,
    ) -> None:
        """Keep what the verifier said: a verdict on each answer that it ruled on."""
        name, at, undecided = plan.askable.name, time.time(), semantic.undecided
        assert undecided is not None
        for number in choice.shown:
            candidate, entry = answers[number]
            if choice.number is not None and 0 <= choice.number < number:
                continue  # it chose a likelier one, and said nothing of this
            if choice.number is not None:
                self._calibration.learn(
                    _namespace(generation),
                    candidate.p,
                    plan.askable.exam.false_yes,
                    is_first=candidate is undecided.candidates[0],
                    is_yes=number == choice.number,
                )
            is_right = None if choice.number is None else number == choice.number
            if choice.number is not None and choice.number >= 0 and not is_right:
                is_right = None  # passed over: as likely as not another wording of the chosen answer
            verdict = Verdict(
                source=Source.VERIFIER,
                compat=generation.looked.fingerprint.compat,
                is_right=is_right,
                trial=candidate.trial(semantic.trial),
                at=at,
                judge=name,
                why=choice.why,
                alias=generation.alias.name,
                wordings=(wording_id(generation.looked.fingerprint.exact), candidate.wording) if is_right else (),
            )
            ruling = Ruling.UNKNOWN if is_right is None else Ruling.SAME if is_right else Ruling.DIFFERENT
            self.count(Source.VERIFIER, ruling, name)
            id = f"{generation.turn.arrival.request_id}:{Source.VERIFIER}:{number}"
            partition = generation.looked.fingerprint.partition
            await self.verdicts.take(partition, id, verdict, AnswerRef(candidate.exact, entry.created_at))

    async def _examine(self, plan: _Plan, generation: Generation, answer: tuple[Asked, Entry]) -> None:
        fingerprint, exam = generation.looked.fingerprint, plan.askable.exam
        stored, verifier = _stored(*answer), self._of(plan.askable, generation)
        space = fingerprint.partition + fingerprint.compat
        await exam.sit(verifier, self._recent, space, QAPair(stored.prompt, stored.answer))

    # -- questions

    def _of(self, askable: Askable, generation: Generation, asking: Asking | None = None) -> Verifier:
        labels = booked_labels(generation.turn, generation.identity)
        return self._verifier(askable, generation.identity, generation.alias.name, labels, asking)

    def _verifier(
        self, askable: Askable, payer: Identity, alias: str, labels: _Labels, asking: Asking | None = None
    ) -> Verifier:
        ask = partial(self._ask, askable, payer, alias, labels, asking)
        return Verifier(askable.alias.name, ask, askable.name, has_odds=askable.has_odds)

    async def _ask(
        self,
        askable: Askable,
        payer: Identity,
        alias: str,
        labels: _Labels,
        asking: Asking | None,
        body: dict[str, Any],
    ) -> bytes | None:
        team = payer.team
        reply = await self.requests.ask(body, payer, askable.alias, _WITHIN_S, labels)
        if asking is not None:
            asking.cost_microusd += reply.cost_microusd
            asking.verifier = reply.deployment or asking.verifier
        self.spending.add(team.id, reply.cost_microusd)
        self.note(team, alias, reply.cost_microusd, "failed" if reply.whole is None else "answered")
        return reply.whole

    # -- after a miss

    def recorded(self, generation: Generation) -> None:
        """Ask later whether the answer of a generation that is recorded depends on the moment."""
        if self._verification(generation).verifier is not None:
            self._moments.recorded(generation)

    def _verification(self, generation: Generation) -> Verification:
        of_request = generation.turn.controls.verify
        word = None if of_request is None else Verify(of_request)
        return self.settings.verification(generation.alias.name, generation.identity.team.verify, word)

    def _of_moments(self, gathered: Gathered, chars: int) -> Verifier | None:
        """Who is asked which of these answers move; None where nobody may be, or it costs too much."""
        verification = self.settings.verification(gathered.alias.name, gathered.payer.team.verify)
        askable = self.whom.to_ask(gathered.alias, verification.verifier)
        question = askable.expected(_demand(question_chars("", ()) + chars)) if askable is not None else None
        if askable is None or question is None or self._is_busy:
            return None
        cost_max, team_id = self.settings.cache.verify_share * gathered.cost_microusd, gathered.payer.team.id
        if question.cost_microusd > cost_max or not self.spending.allows(team_id, question.cost_microusd):
            return None
        return self._verifier(askable, gathered.payer, gathered.alias.name, {})

    def of(self, record: Record, space: bytes) -> Judge | None:
        """The judge of a request's fresh answer, in its namespace; None where no verifier is named."""
        alias = record.request.alias
        if self._is_busy or self.settings.verification(alias).verifier is None:
            return None
        return _AfterMiss(partial(self._judge, record, space))

    async def _judge(self, record: Record, space: bytes, fresh: QAPair, cached: QAPair) -> Judgement:
        none = Judgement(Ruling.UNKNOWN, "", NO_ANSWER)
        payer = await self.accounts.of_key(record.request.key_id)
        if payer is None:
            return none
        verification = self.settings.verification(record.request.alias, payer.team.verify)
        alias = self.whom.alias(record.request.model or record.request.alias)
        askable = self.whom.to_ask(alias, verification.verifier) if alias is not None else None
        chars = len(fresh.prompt) + len(fresh.answer) + len(cached.answer) + question_chars("", ())
        question = askable.expected(_demand(chars)) if askable is not None else None
        if askable is None or question is None or not self.spending.allows(payer.team.id, 2 * question.cost_microusd):
            return none
        labels = {name: text for name in _LABELS if (text := getattr(record.request, name))}
        verifier = self._verifier(askable, payer, record.request.alias, labels)
        await askable.exam.sit(verifier, self._recent, space, fresh)
        return await verifier.judge(fresh, cached) if askable.exam.counts else none

    def check(self, record: Record, risk: float, *, is_wrong: bool) -> None:
        """Take in what a check found of a hit on a verifier's word, which had this risk."""
        verifier = self.settings.verification(record.request.alias).verifier
        exam = self.whom.exams.get(record.verifier.verifier if verifier == AUTO else verifier or "")
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


def _namespace(generation: Generation) -> bytes:
    fingerprint = generation.looked.fingerprint
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


def _unread(candidate: Asked, entry: Entry) -> Sequence[tuple[str, str]]:
    """The differences of the contexts, where a verifier sees the answer's beginning alone."""
    return candidate.differing if len(_stored(candidate, entry).answer) > ANSWER_CHARS_MAX else ()


def _demand(chars: int) -> Demand:
    tokens = chars // _CHARS_PER_TOKEN
    return Demand(tokens, REPLY_TOKENS_MAX, _REPLY_TOKENS, prompt_tokens_max=chars)
