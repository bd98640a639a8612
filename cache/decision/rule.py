"""Which neighbour may answer a prompt: the seam of a rule, the fixed decision, the verified rule.

Pure: `decide` returns the namespace's new counters and writes nothing. Until a namespace has
verdicts, the verified rule serves a neighbour that the fixed rule serves and that adds nothing, for a
share of the requests. From then on it serves a neighbour that the namespace's own model is sure of.
Source: docs/semantic-cache.md. Invariants: no
similarity and no verdict overrides a veto (numbers, polarity, an aged answer about now, a long
template); a caller's `error_max` only tightens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec
import numpy as np

from cache.decision.features import AnswerGroup, Neighbour, WordCounts, candidates, features_of
from cache.decision.guards import (
    COLD_FIRST,
    COLD_WRONG,
    Thresholds,
    fixed_reason,
    is_added,
    is_vouched,
    thresholds_of,
    veto,
)
from cache.decision.model import (
    LearnedModel,
    Prior,
    Row,
    Run,
    Vector,
    asking_share,
    at_once,
)
from cache.decision.text_features import TextFeatures, read
from cache.query import MissReason, Query, Trial

ERROR_MAX = 0.01
_COMPARED = 3  # groups that a fresh answer is compared with
_ASKED_MAX, _ASKED_FROM = 4, 0.4  # candidates of a question, and the least cosine of each
_PEERS = 2  # further entries of the first group, for a second opinion
_YOUNG = 400  # verdicts, before which a fit to a few questions about one context is no better than the prior
_NEAR = 0.5  # the least cosine: what is farther is another question, whatever was learned
_SAME = 0.995  # that the same documents in another order, with the same question, have the same answer


@dataclass(frozen=True, slots=True)
class NamespaceCounters:
    """Counts of a namespace's decisions.

    `accepted` counts would-be hits. `served` counts hits since the last request that was generated,
    `risked` sums the errors to expect of them. `cold` is how many hits by the cold rule may follow
    at once.
    """

    accepted: int = 0
    served: int = 0
    risked: float = 0.0
    cold: float = COLD_FIRST


@dataclass(slots=True)
class NamespaceState:
    """The words of a namespace's keys, the model that verdicts have fitted (None before the first),
    its counters, and the share of the near answers not found equal that the judges can call
    different: 1 before the first, 0 where they leave all open.
    """

    word_counts: WordCounts = field(default_factory=WordCounts)
    model: LearnedModel | None = None
    counters: NamespaceCounters = NamespaceCounters()
    discernment: float = 1.0
    others: Sequence[LearnedModel] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """`served` is the place of the neighbour whose answer may be served; `reasons` has, for each,
    why not (None: it may). `doubtful` has the places of the answers that a verifier may be asked about,
    one of each group, the likeliest first, each with the probability that it is right.
    """

    served: int | None
    reasons: tuple[MissReason | None, ...]
    trial: Trial | None = None
    doubtful: tuple[tuple[int, float], ...] = ()


class Rule(Protocol):
    """Decides about the neighbours of a prompt, which come nearest first, at least one."""

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        """The decision, and the counters of the namespace after it."""

    def learn(self, row: Row, model: LearnedModel | None, others: Sequence[LearnedModel] = ()) -> LearnedModel | None:
        """Take in one comparison; the model of its namespace from now on. A first one may start
        from `others`, of other namespaces.
        """


def decide_fixed(error_max: float | None, text: str, neighbours: Sequence[Neighbour]) -> Decision:
    """The decision by fixed thresholds and guards, which needs no state and makes no trial. A
    smaller `error_max` takes stricter thresholds; below the strictest nothing is served.
    """
    asked, thresholds = read(text), thresholds_of(error_max)
    reasons = tuple([_why_not_fixed(thresholds, asked, one) for one in neighbours])
    return Decision(next((place for place, reason in enumerate(reasons) if reason is None), None), reasons)


def _why_not_fixed(thresholds: Thresholds | None, prompt: TextFeatures, neighbour: Neighbour) -> MissReason | None:
    if thresholds is None:
        return MissReason.STRICT
    if neighbour.similarity < thresholds.same:
        return MissReason.FAR
    if not neighbour.is_context_vouched:
        return MissReason.DOCUMENTS
    return fixed_reason(prompt, read(neighbour.text), neighbour.similarity, neighbour.age_s, thresholds)


class VerifiedRule:
    """The rule that learns from verdicts.

    `error_max` bounds wrong answers as a share of requests. `run` does the fits. `cold_wrong` is the
    share of the hits without verdicts that may be wrong.
    """

    def __init__(
        self,
        prior: Prior,
        error_max: float = ERROR_MAX,
        run: Run = at_once,
        cold_wrong: float = COLD_WRONG,
    ) -> None:
        self.prior = prior
        self._error_max = error_max
        self._cold_wrong = cold_wrong
        self._run = run
        self._cold = LearnedModel(prior)

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        error_max, prompt = self._bound(query), read(query.text)
        # the likeliest answer, and its witness: the neighbour that speaks for it
        fixed = decide_fixed(ERROR_MAX, query.text, neighbours)
        ranked = _ranked(query.text, neighbours, _plain(prompt, neighbours, fixed))
        first, witness = ranked[0], neighbours[ranked[0].index]
        known, model = read(witness.text), state.model or self._cold
        seen = features_of(query.text, neighbours, first, state.word_counts, model.word_odds, fixed.served is not None)
        vetoed, is_near = _veto(prompt, witness), witness.similarity >= _NEAR
        alike = [neighbour for neighbour in neighbours if (neighbour.group or neighbour.exact) == first.group]
        # certain: it is the same question, or the verdicts of the namespace are sure of it
        is_known = vetoed is not None or (is_near and _is_vouched(prompt, witness, alike))
        p = model.certain.logistic.p(seen) if is_known else 0.0
        is_told = query.untightened is None and vetoed is None and model.certain.is_fitted
        is_certain = is_told and p >= model.certain.threshold(error_max)
        # cold: no verdict vouches for it, but it adds nothing, and such hits are seldom wrong
        is_further = not is_certain and is_added(prompt, known)
        is_cold = not is_certain and is_near and vetoed is None and not is_further
        is_cold = is_cold and self._is_cold_sure(query, witness, state, seen, p)
        # each request pays a share of a hit by the cold rule
        counters = replace(state.counters, cold=min(COLD_FIRST, state.counters.cold + error_max / self._cold_wrong))
        is_spent = is_cold and counters.cold < 1.0
        is_sure = is_certain or (is_cold and not is_spent)
        risk = 1 - p if is_certain else min(1 - p, self._cold_wrong)
        trial = Trial(
            ranked=tuple(neighbours[candidate.index].exact for candidate in ranked[:_COMPARED]),
            features=_row_features(seen, counters) if vetoed is None else b"",
            p=p,
            chance=1.0,
            rule=b"",
            peers=tuple(neighbour.exact for neighbour in alike if neighbour is not witness)[:_PEERS],
            worth=1.0 if is_sure else asking_share(p, model.certain.verdicts),
            is_cold=not is_certain,
            hits=counters.accepted,
        )
        if is_sure:
            reasons = tuple(None if index == first.index else reason for index, reason in enumerate(fixed.reasons))
            served = _after_a_hit(counters, risk, is_cold=is_cold)
            trial = msgspec.structs.replace(trial, features=_row_features(seen, NamespaceCounters()))
            return Decision(first.index, reasons, trial), served
        unsure = MissReason.WORDS if is_further and not model.certain.is_fitted else MissReason.UNSURE
        why = MissReason.COLD if is_spent else vetoed or unsure
        reasons = tuple(
            why if index == first.index and (is_spent or reason is None) else reason or MissReason.UNSURE
            for index, reason in enumerate(fixed.reasons)
        )
        after = counters if vetoed is not None else NamespaceCounters(counters.accepted, cold=counters.cold)
        doubtful = self._doubtful(query, neighbours, ranked, state) if query.may_ask else ()
        return Decision(None, reasons, trial, doubtful), after

    def _doubtful(
        self, query: Query, neighbours: Sequence[Neighbour], ranked: Sequence[AnswerGroup], state: NamespaceState
    ) -> tuple[tuple[int, float], ...]:
        model, prompt = state.model or self._cold, read(query.text)
        doubtful = []
        for group in ranked:
            witness = neighbours[group.index]
            if witness.similarity < _ASKED_FROM or veto(prompt, read(witness.text), witness.age_s) is not None:
                continue
            seen = features_of(query.text, neighbours, group, state.word_counts, model.word_odds, False)
            doubtful.append((group.index, model.certain.logistic.p(seen)))
        return tuple(doubtful[:_ASKED_MAX])

    def learn(self, row: Row, model: LearnedModel | None, others: Sequence[LearnedModel] = ()) -> LearnedModel:
        """The first verdict of a namespace gives it a model of its own."""
        model = model or LearnedModel(self.prior, self._run, tuple(others))
        model.learn(row)
        return model

    def _bound(self, query: Query) -> float:
        return self._error_max if query.error_max is None else min(query.error_max, self._error_max)

    def _is_cold_sure(self, query: Query, witness: Neighbour, state: NamespaceState, seen: Vector, p: float) -> bool:
        """Whether an answer that adds nothing may be served without verdicts: those that there are
        leave it open, and the fixed thresholds serve it, or the prior of questions about one
        context does.
        """
        error_max, model, prompt = self._bound(query), state.model or self._cold, read(query.text)
        if not (query.untightened is not None or model.allows_cold(seen, error_max, state.discernment)):
            return False
        if not model.certain.is_fitted and any(one.is_told_against(seen) for one in state.others):
            return False
        return _why_not_fixed(thresholds_of(min(error_max, ERROR_MAX)), prompt, witness) is None


def _veto(prompt: TextFeatures, witness: Neighbour) -> MissReason | None:
    reason = veto(prompt, read(witness.text), witness.age_s)
    return reason or (None if witness.is_context_vouched else MissReason.DOCUMENTS)


def _is_vouched(prompt: TextFeatures, witness: Neighbour, alike: Sequence[Neighbour]) -> bool:
    known = read(witness.text)
    return is_vouched(prompt, known, [read(one.text) for one in alike], in_context=False)


def _after_a_hit(counters: NamespaceCounters, risk: float, *, is_cold: bool) -> NamespaceCounters:
    return NamespaceCounters(
        counters.accepted + 1, counters.served + 1, counters.risked + risk, counters.cold - is_cold
    )


def _plain(prompt: TextFeatures, neighbours: Sequence[Neighbour], fixed: Decision) -> int | None:
    """The place of the neighbour that the fixed rule would serve; one that adds nothing goes before
    one that does.
    """
    accepted = (place for place, reason in enumerate(fixed.reasons) if reason is None)
    return next((place for place in accepted if not is_added(prompt, read(neighbours[place].text))), fixed.served)


def _row_features(seen: Vector, counters: NamespaceCounters) -> bytes:
    """The features as a row has them: with what was served since the row before."""
    return np.append(seen, (counters.served, counters.risked)).astype("<f4").tobytes()


def _ranked(prompt: str, neighbours: Sequence[Neighbour], guarded: int | None) -> list[AnswerGroup]:
    """The first groups by their votes, `_COMPARED` at least if there are so many. The witness of
    each is its nearest key that no veto stops; groups without one come last, that of the neighbour
    which the fixed rule would serve comes first, with it as the witness.
    """
    free: list[AnswerGroup] = []
    vetoed: list[AnswerGroup] = []
    text = read(prompt)
    first = b"" if guarded is None else neighbours[guarded].group or neighbours[guarded].exact
    for candidate in sorted(candidates(neighbours), key=lambda each: each.group != first):
        if len(free) == _COMPARED:
            break
        keys = (at for at, near in enumerate(neighbours) if (near.group or near.exact) == candidate.group)
        served = (at for at in keys if _veto(text, neighbours[at]) is None)
        index = guarded if candidate.group == first else next(served, None)
        if index is None:
            vetoed.append(candidate)
        else:
            free.append(AnswerGroup(candidate.group, index, candidate.share, candidate.count, candidate.rival))
    return [*free, *vetoed]
