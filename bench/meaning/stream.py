"""A stream of labelled requests through the product's own cache object, as a gateway would send it: lookup, the verifier's question,
generation, comparison.

A certain hit is served. What is undecided goes to the played verifier, whose word is a verdict that the cache learns; its yes is
served. Everything else is generated and stored, and compared with what came nearest. Knows no HTTP and no gateway.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import msgspec

from bench.answers import Judging
from bench.labelled import Comparisons, Request
from bench.meaning.vectors import Recall
from bench.meaning.verifier import Candidate, PlayedVerifier, Word
from cache import Hit, Miss, MissReason
from cache.decision.rule import Rule
from cache.events import EntriesDropped
from cache.query import Undecided
from cache.semantic.cache import SemanticCache
from cache.verdicts.records import AnswerJudged, Source, Verdict


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request. `served`: whose stored answer it got, None if its own was generated; `reason`: why the rule had no hit;
    `decision_ms`: of the lookup; `questions` and `waited_s`: to the verifier, before; `candidates`: of its question."""

    request: Request
    served: Request | None
    reason: MissReason | None = None
    decision_ms: float = 0.0
    is_exact: bool = False
    is_verified: bool = False
    questions: int = 0
    candidates: int = 0
    waited_s: float = 0.0

    @property
    def is_wrong(self) -> bool:
        return self.served is not None and self.served.label != self.request.label


@dataclass(slots=True)
class Clock:
    """Seconds of a stream; an entry is as old as the clock says."""

    now: float = 1.0


class Traffic:
    """One cache, empty at first. `judging` compares a fresh answer with cached ones after a miss, None: nothing does. An exact
    repeat is served without a lookup."""

    def __init__(
        self,
        embedder: Recall,
        rule: Rule,
        judging: Judging | None,
        verifier: PlayedVerifier | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or Clock()
        self.cache = SemanticCache(embedder, rule, clock=lambda: self.clock.now)
        self.judging = judging
        self.verifier = verifier
        self._comparisons = Comparisons()
        self._stored: dict[bytes, Request] = {}
        self._early: list[tuple[Request, Miss]] = []
        self.verdicts = 0  # of a judge or the verifier, that were folded

    def send(self, request: Request) -> Outcome:
        """What the request gets; the cache learns from it."""
        if request.exact in self._stored:
            return Outcome(request, self._stored[request.exact], is_exact=True)
        outcome, miss, records = self._decide(request)
        if outcome.served is not None or miss is None:
            self.cache.fold(records)
            return outcome
        self.store(request)
        judged = self._compare(request, miss)
        self.cache.fold([one for one in records if judged is None or one.verdict.trial.ranked[0] != judged])
        return outcome

    def probe(self, request: Request) -> Outcome:
        """What the request would get; the cache learns nothing from it, nor the verifier."""
        return self._decide(request)[0]

    def store(self, request: Request) -> None:
        """The request's own answer is generated and cached."""
        self._stored[request.exact] = request
        if self.judging is not None:
            self.judging.generate(request.exact, request.query.text, request.label)
        self.cache.fold([self._comparisons.add(request.added(self.clock.now - 1.0))])
        while not self.cache.is_settled:
            self.cache.settle()

    def drop(self, request: Request) -> None:
        """It is cached no more."""
        del self._stored[request.exact]
        self.cache.fold([EntriesDropped(request.query.partition, (request.exact,))])

    def _decide(self, request: Request) -> tuple[Outcome, Miss | None, list[AnswerJudged]]:
        """The outcome, the rule's miss (None of a hit), and the verifier's verdicts."""
        query = request.query
        if self.verifier is not None:
            query = msgspec.structs.replace(query, may_ask=True)
        started = time.perf_counter()
        (answer,) = self.cache.lookup([query])
        ms = (time.perf_counter() - started) * 1000
        if isinstance(answer, Hit):
            return Outcome(request, self._stored[answer.exact], None, ms), None, []
        if isinstance(answer, Miss) or self.verifier is None:
            miss = answer if isinstance(answer, Miss) else answer.miss
            return Outcome(request, None, miss.reason, ms), miss, []
        word, records = self._ask(request, answer, self.verifier)
        served = None if word.chosen is None else self._stored[answer.candidates[word.chosen].exact]
        outcome = Outcome(
            request,
            served,
            answer.miss.reason,
            ms,
            is_verified=served is not None,
            questions=word.questions,
            candidates=len(answer.candidates),
            waited_s=word.seconds,
        )
        return outcome, answer.miss, records

    def _ask(self, request: Request, answer: Undecided, verifier: PlayedVerifier) -> tuple[Word, list[AnswerJudged]]:
        candidates = [Candidate(asked, self._stored[asked.exact].label) for asked in answer.candidates]
        word = verifier.ask(request.query.text, request.label, candidates)
        records = []
        if word.questions:
            for asked, is_right in zip(answer.candidates, word.rights, strict=True):
                if is_right is not None:
                    records.append(self._verdict(request, answer, asked.exact, is_right, verifier.error))
        return word, records

    def _verdict(self, request: Request, answer: Undecided, exact: bytes, is_right: bool, error: float) -> AnswerJudged:
        """What the verifier said of one candidate; the rule's features are of the first answer that it ranked."""
        (asked,) = [one for one in answer.candidates if one.exact == exact]
        trial = answer.miss.trial
        assert trial is not None, "a question is about answers that the rule ranked"
        features = trial.features if trial.ranked[:1] == (exact,) else b""
        verdict = Verdict(
            source=Source.MISS,
            compat=request.query.compat,
            is_right=is_right,
            trial=msgspec.structs.replace(trial, ranked=(exact,), features=features, p=asked.p, chance=1.0),
            at=self.clock.now,
            judge="verifier",
            flips=(0.0, error),
        )
        return AnswerJudged(request.query.partition, verdict, asked.group, None)

    def _compare(self, request: Request, miss: Miss) -> bytes | None:
        """The entry that a verdict after a miss was about; None if there was none."""
        if self.judging is None or miss.trial is None or miss.nearest is None:
            return None
        judged = self._learn(request, miss)
        while self._early and not self.judging.is_early:  # as a gateway makes them again
            self._learn(*self._early.pop(0), is_late=True)
        return judged

    def _learn(self, request: Request, miss: Miss, *, is_late: bool = False) -> bytes | None:
        judging = self.judging
        assert judging is not None
        assert miss.trial is not None
        judging.begin(miss.trial)
        same = functools.partial(judging.is_same, request.exact)
        judged = self._comparisons.compare(request.query, miss, request.exact, same)
        if judged is None or (is_late and judged.verdict.is_right is None):
            return None
        if judged.verdict.is_right is None and judging.is_early:
            self._early.append((request, miss))
        flips = judging.flips if judging.asked is not None else (0.0, 0.0)
        self.verdicts += judged.verdict.is_right is not None
        verdict = msgspec.structs.replace(judged.verdict, judge_chance=judging.asked, flips=flips, is_late=is_late)
        self.cache.fold([replace(judged, verdict=verdict)])
        return miss.trial.ranked[0] if verdict.is_right is not None else None


def stream(requests: Iterable[Request], traffic: Traffic) -> list[Outcome]:
    return [traffic.send(request) for request in requests]
