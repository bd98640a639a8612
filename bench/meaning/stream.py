"""A stream of labelled requests through the product's own cache object, as a gateway would send it: lookup, the verifier's question,
generation, comparison.

A certain hit is served. What is undecided goes to the played verifier if that pays, whose word is a verdict that the cache learns;
its yes is served. What is not served is generated, and so is, beside it, a share of the hits, for a check; a fresh answer is stored, and
compared with what came nearest. Knows no HTTP.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import msgspec

from bench.answers import Judging
from bench.labelled import Comparisons, Request
from bench.meaning.gate import Gate
from bench.meaning.vectors import Recall
from cache import CacheLimits, Hit, MissReason, Trial
from cache.decision.rule import Rule
from cache.entry import wording_id
from cache.events import EntriesDropped
from cache.moving import moves
from cache.query import Asked, Undecided
from cache.semantic.cache import SemanticCache
from cache.verdicts.records import AnswerJudged, Source, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `served`: whose stored answer it got, None if its own was generated; `reason`: why the rule had no hit;
    `decision_ms`: of the lookup; `questions` and `waited_s`: to the verifier, before; `candidates`: of its question;
    `is_checked`: a hit beside which its own was generated, too."""

    request: Request
    served: Request | None
    reason: MissReason | None = None
    decision_ms: float = 0.0
    is_exact: bool = False
    is_verified: bool = False
    questions: int = 0
    candidates: int = 0
    waited_s: float = 0.0
    is_checked: bool = False

    @property
    def is_wrong(self) -> bool:
        return self.served is not None and self.served.label != self.request.label


@dataclass(slots=True)
class Clock:
    """Seconds of a stream; an entry is as old as the clock says."""

    now: float = 1.0


@dataclass(frozen=True, slots=True)
class _Decision:
    """What is known of a request before it is generated, if it is. `trial`: of what a fresh answer is compared with; `asked`: what
    the verifier chose, with its `risk`; `records`: its verdicts."""

    outcome: Outcome
    trial: Trial | None
    records: Sequence[AnswerJudged] = ()
    asked: Asked | None = None
    risk: float = 0.0


class Traffic:
    """One cache, empty at first. `judging` compares a fresh answer with cached ones after a miss, None: nothing does. An exact
    repeat is served without a lookup."""

    def __init__(
        self,
        embedder: Recall,
        rule: Rule,
        judging: Judging | None,
        gate: Gate | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.cache = SemanticCache(embedder, rule, clock=lambda: self.clock.now)
        self.judging = judging
        self.gate = gate
        self._comparisons = Comparisons()
        self._stored: dict[bytes, Request] = {}
        self.verdicts = 0  # of a judge, that were folded

    def send(self, request: Request) -> Outcome:
        """What the request gets; the cache learns from it."""
        if request.exact in self._stored:
            return Outcome(request, self._stored[request.exact], is_exact=True)
        if self.gate is not None:
            self.gate.pay(request.query)
        made = self._decide(request)
        if made.outcome.served is not None:
            made = self._drawn(request, made)
        if made.outcome.served is not None and not made.outcome.is_checked:
            self.cache.fold(made.records)
            if made.asked is not None and made.outcome.questions:
                self._word(request, made.outcome.served)
            return made.outcome
        self.store(request)
        judged = self._compare(request, made)
        self.cache.fold([one for one in made.records if judged is None or one.verdict.trial.ranked[0] != judged])
        return made.outcome

    def probe(self, request: Request) -> Outcome:
        """What the request would get; the cache learns nothing from it."""
        if self.gate is not None:
            self.gate.pay(request.query)
        return self._decide(request).outcome

    def store(self, request: Request) -> None:
        """The request's own answer is generated and cached."""
        self._stored[request.exact] = request
        if self.judging is not None:
            self.judging.generate(request.exact, request.query.text, request.label)
        added = request.added(self.clock.now - 1.0)
        verifier = self.gate.verifier if self.gate is not None else None
        if moves(request.query.text) or (verifier is not None and verifier.moves(request.note)):
            added = replace(added, expires_at=added.created_at + CacheLimits().moving_ttl_s)
        self.cache.fold([self._comparisons.add(added)])
        while not self.cache.is_settled:
            self.cache.settle()

    def _word(self, request: Request, served: Request) -> None:
        """The request's prompt is a wording of the one whose answer it got."""
        added = request.added(self.clock.now - 1.0)
        self.cache.fold([replace(added, exact=wording_id(request.exact), of=served.exact)])
        while not self.cache.is_settled:
            self.cache.settle()

    def drop(self, request: Request) -> None:
        """It is cached no more."""
        del self._stored[request.exact]
        self.cache.fold([EntriesDropped(request.query.partition, (request.exact,))])

    def _decide(self, request: Request) -> _Decision:
        gate = self.gate
        may_ask = gate is not None and gate.verifier is not None
        query = msgspec.structs.replace(request.query, may_ask=may_ask)
        started = time.perf_counter()
        (answer,) = self.cache.lookup([query])
        ms = (time.perf_counter() - started) * 1000
        if isinstance(answer, Hit):
            outcome = Outcome(request, self._stored[answer.exact], None, ms)
            return _Decision(outcome, answer.trial)
        miss = answer.miss if isinstance(answer, Undecided) else answer
        outcome = Outcome(request, None, miss.reason, ms)
        trial = miss.trial if miss.nearest is not None else None
        if not isinstance(answer, Undecided) or gate is None:
            return _Decision(outcome, trial)
        labels = [self._stored[asked.exact].label for asked in answer.candidates]
        word = gate.ask(query, request.label, answer.candidates, labels)
        outcome = replace(
            outcome, questions=word.questions, candidates=len(labels) if word.questions else 0, waited_s=word.seconds
        )
        yes = max((at for at, is_right in enumerate(word.rights) if is_right), default=0)
        records = [
            self._verdict(request, asked.trial(trial), asked, is_right)
            for at, (asked, is_right) in enumerate(zip(answer.candidates, word.rights, strict=False))
            if is_right is not None or at < yes
        ]
        if word.chosen is None:
            return _Decision(outcome, trial, records)
        asked = answer.candidates[word.chosen]
        outcome = replace(outcome, served=self._stored[asked.exact], is_verified=True)
        return _Decision(outcome, asked.trial(trial), records, asked, word.risk)

    def _drawn(self, request: Request, made: _Decision) -> _Decision:
        """A hit after the draw: as it was, or checked."""
        gate = self.gate
        if gate is None:
            return made
        gate.charge(request.query, made.risk if made.asked is not None else 1.0 - made.trial.p if made.trial else 0.0)
        share = gate.draw_check(request.query)
        if share is None:
            return made
        gate.check(request.query, made.asked, made.risk, is_wrong=made.outcome.is_wrong)
        trial = None if made.trial is None else msgspec.structs.replace(made.trial, chance=share)
        return replace(made, outcome=replace(made.outcome, is_checked=True), trial=trial, records=())

    def _verdict(self, request: Request, trial: Trial, asked: Asked, is_right: bool | None) -> AnswerJudged:
        """What the verifier said of one candidate."""
        verdict = Verdict(
            source=Source.VERIFIER,
            compat=request.query.compat,
            is_right=is_right,
            trial=trial,
            at=self.clock.now,
            judge="verifier",
            wordings=(wording_id(request.exact), asked.wording) if is_right else (),
        )
        return AnswerJudged(request.query.partition, verdict, asked.group, None)

    def _compare(self, request: Request, made: _Decision) -> bytes | None:
        """The entry that a verdict after a generation was about; None if there was none."""
        if self.judging is None or made.trial is None:
            return None
        judging, trial = self.judging, made.trial
        judging.begin(trial)
        same = functools.partial(judging.is_same, request.exact)
        judged = self._comparisons.compare(request.query, trial, request.exact, same)
        if judged is None:
            return None
        self.cache.fold([judged])
        is_told = judged.verdict.is_right is not None
        self.verdicts += is_told
        return trial.ranked[0] if is_told else None


def stream(requests: Iterable[Request], traffic: Traffic) -> list[Outcome]:
    return [traffic.send(request) for request in requests]
