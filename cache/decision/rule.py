"""Which neighbour may answer a prompt: the seam of a rule, and the rule that learns from verdicts.

Pure: `decide` returns the namespace's new counters and writes nothing. The table in
`VerifiedRule._case` is the rule: an exact check stops a hit and a question alike; the same question,
but for words that mean nothing, is a hit; any other is a hit only if verdicts of this namespace vouch
for each of its differences and p reaches the threshold. What is left is undecided. Source:
docs/semantic-cache.md. Invariant: no similarity and no verdict overrides the exact check; a caller's
`error_max` only tightens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from cache.decision.differences import Freed, WordCounts
from cache.decision.exact_marks import is_recased, veto
from cache.decision.features import AnswerGroup, Neighbour, candidates, features_of
from cache.decision.model import LearnedModel, Prior, Row, Run, Vector, at_once
from cache.decision.texts import words_of
from cache.query import BOUND_MIN, ERROR_MAX, MissReason, Query, Trial

ASKED_MAX, _ASKED_FROM, _ASKED_P = 4, 0.4, 0.05  # candidates of a question, and the least cosine and p of each
_COMPARED = 3  # groups that a fresh answer is compared with
_PEERS = 2  # further entries of the first group, for a second opinion
_NEAR = 0.5  # the least cosine of a hit: what is farther is another question, whatever was learned
_REWORDED, _STEADY = 3, 8  # right verdicts on an answer
_CERTAIN = 0.3  # of the bound, for certain hits beside a verifier
_FURTHER = -1, 0.0  # of a further answer to a request: it is no request of its own
_SAME = 0.99  # that the same question but for words that mean nothing has the same answer


@dataclass(frozen=True, slots=True)
class NamespaceCounters:
    """Counts of a namespace's decisions: all hits, and since the last request that was
    compared, how many were served and the errors to expect of them.
    """

    hits: int = 0
    served: int = 0
    risked: float = 0.0

    def after_hit(self, risk: float) -> NamespaceCounters:
        return NamespaceCounters(self.hits + 1, self.served + 1, self.risked + risk)

    def plus(self, served: int, risked: float) -> NamespaceCounters:
        return NamespaceCounters(self.hits, max(0, self.served + served), max(0.0, self.risked + risked))


@dataclass(slots=True)
class NamespaceState:
    """The words of a namespace's keys, the model that verdicts have fitted (None before the first),
    and its counters.
    """

    word_counts: WordCounts = field(default_factory=WordCounts)
    model: LearnedModel | None = None
    counters: NamespaceCounters = NamespaceCounters()


@dataclass(frozen=True, slots=True)
class Decision:
    """`served` is the place of the neighbour whose answer may be served; `reasons` has, for each,
    why not (None: it may). `doubtful` has the places of the answers that a verifier may be asked about,
    one of each group, the likeliest first, each with the probability that it is right and its features.
    """

    served: int | None
    reasons: tuple[MissReason | None, ...]
    trial: Trial | None = None
    doubtful: tuple[tuple[int, float, bytes], ...] = ()


class Rule(Protocol):
    """Decides about the neighbours of a prompt, which come nearest first, at least one."""

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        """The decision, and the counters of the namespace after it."""

    def learn(self, row: Row, model: LearnedModel | None) -> LearnedModel | None:
        """Take in one comparison; the model of its namespace from now on."""


@dataclass(frozen=True, slots=True)
class Case:
    """What the rule knows of one candidate: its features, the mean of p, the p that is relied on, 0
    where a difference is not vouched for, and why it may not be served.
    """

    candidate: AnswerGroup
    witness: Neighbour
    features: Vector
    mean: float
    p: float
    reason: MissReason | None


def is_vouched(candidate: AnswerGroup, neighbours: Sequence[Neighbour], freed: Freed, word_counts: WordCounts) -> bool:
    """Whether verdicts vouch for each difference: they freed its kind, or they called the answer right
    for _REWORDED other wordings and the word is no addition, is known in the namespace, and is in no
    near prompt with another answer. With _STEADY of them one word may be new, and any in such a prompt.
    """
    witness = neighbours[candidate.index]
    left = [difference for difference in candidate.differences if not freed.has(difference)]
    if not left:
        return True
    if witness.right < _REWORDED or witness.wrong > witness.right or any(difference.is_addition for difference in left):
        return False
    others = {word for near in neighbours if near.answer != candidate.group for word in words_of(near.text).word_set}
    new = sum(difference.is_asked and difference.word not in word_counts.counts for difference in left)
    is_contrary = any(difference.is_asked and difference.word in others for difference in left)
    return new <= 1 if witness.right >= _STEADY else not (new or is_contrary)


class VerifiedRule:
    """The rule that learns from verdicts. `error_max` bounds wrong answers as a share of requests;
    `run` does the fits.
    """

    def __init__(self, prior: Prior, error_max: float = ERROR_MAX, run: Run = at_once) -> None:
        self._prior = prior
        self._error_max = error_max
        self._run = run
        self._cold = LearnedModel(prior)

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        cases = self._cases(query, neighbours, state)
        first = cases[0]
        reasons = _reasons(query.text, neighbours, cases)
        trial = _trial(cases, neighbours, state.counters)
        if first.reason is None:
            return Decision(first.candidate.index, reasons, trial), state.counters.after_hit(1 - first.p)
        # a comparison of what the exact check stops teaches nothing
        counters = state.counters if first.candidate.vetoed else NamespaceCounters(state.counters.hits)
        doubtful = [
            (one.candidate.index, one.mean, _row(one, *_FURTHER))
            for one in cases
            if one.candidate.vetoed is None and one.mean >= _ASKED_P and one.witness.similarity >= _ASKED_FROM
        ]
        return Decision(None, reasons, trial, tuple(doubtful) if query.may_ask else ()), counters

    def _cases(self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState) -> list[Case]:
        """The candidates, the one to serve first."""
        model = state.model or self._cold
        least = self._threshold(query, model)
        found = candidates(query.text, neighbours, ASKED_MAX)
        cases = [self._case(query.text, neighbours, one, state, model, least) for one in found]
        return sorted(cases, key=lambda one: not (one.reason is None and one.p >= _SAME))

    def _threshold(self, query: Query, model: LearnedModel) -> float | None:
        """The least p to serve at; None where the bound allows no wrong answer at all. Where a verifier
        may be asked, it has `_CERTAIN` of the bound.
        """
        error_max = self._error_max if query.error_max is None else min(query.error_max, self._error_max)
        return (
            min(_SAME, model.threshold(error_max * _CERTAIN if query.may_ask else error_max))
            if error_max >= BOUND_MIN
            else None
        )

    def _case(
        self,
        text: str,
        neighbours: Sequence[Neighbour],
        candidate: AnswerGroup,
        state: NamespaceState,
        model: LearnedModel,
        least: float | None,
    ) -> Case:
        witness = neighbours[candidate.index]
        seen = features_of(text, neighbours, candidate, state.word_counts, model.freed)
        p = 0.0
        if candidate.vetoed is None and is_vouched(candidate, neighbours, model.freed, state.word_counts):
            p = float(model.logistic.lower(seen[None])[0])
            if is_same(text, witness.text) and witness.wrong <= witness.right:
                p = max(p, _SAME)
        # the rule as a table: the first that holds is why the answer may not be served
        table = (
            (candidate.vetoed is not None, candidate.vetoed),
            (least is None, MissReason.STRICT),
            (witness.similarity < _NEAR, MissReason.FAR),
            (not witness.is_context_vouched, MissReason.DOCUMENTS),
            (p == 0.0, MissReason.WORDS),
            (p < (least or 0.0), MissReason.UNSURE),
        )
        reason = next((why for holds, why in table if holds), None)
        mean = float(model.logistic.mean(seen[None])[0])
        return Case(candidate=candidate, witness=witness, features=seen, mean=mean, p=p, reason=reason)

    def learn(self, row: Row, model: LearnedModel | None) -> LearnedModel:
        """The first verdict of a namespace gives it a model of its own."""
        model = model or LearnedModel(self._prior, self._run)
        model.learn(row)
        return model


def is_same(prompt: str, known: str) -> bool:
    """Whether two prompts are one but for words that mean nothing (`cache.decision.harmless`)."""
    return words_of(prompt).core == words_of(known).core and not is_recased(prompt, known)


def _reasons(prompt: str, neighbours: Sequence[Neighbour], cases: Sequence[Case]) -> tuple[MissReason | None, ...]:
    """For each neighbour, why its answer may not be served: its own reason, or that of its answer."""
    by_group = {one.candidate.group: one for one in cases}
    reasons = []
    for near in neighbours:
        why, case = veto(prompt, near.text), by_group.get(near.answer)
        if why is None and near.similarity < _NEAR:
            why = MissReason.FAR
        if why is None and case is not cases[0]:
            why = (case.reason if case is not None else None) or MissReason.UNSURE
        reasons.append(why or cases[0].reason if case is cases[0] else why)
    return tuple(reasons)


def _row(case: Case, served: int, risked: float) -> bytes:
    return np.append(case.features, (served, risked)).astype("<f4").tobytes()


def _trial(cases: Sequence[Case], neighbours: Sequence[Neighbour], counters: NamespaceCounters) -> Trial:
    first, is_open = cases[0], cases[0].reason in (None, MissReason.UNSURE)
    group = [near.exact for near in neighbours if near.answer == first.candidate.group]
    alike = [exact for exact in dict.fromkeys(group) if exact != first.witness.exact]
    # a hit that is checked counts once, with those that are served
    since = (-1, first.p - 1.0) if first.reason is None else (counters.served, counters.risked)
    return Trial(
        ranked=tuple(one.witness.exact for one in cases[:_COMPARED]),
        features=_row(first, *since) if first.candidate.vetoed is None else b"",
        p=first.p if is_open else 0.0,
        chance=1.0,
        rule=b"",
        peers=tuple(alike[:_PEERS]),
        hits=counters.hits,
    )
