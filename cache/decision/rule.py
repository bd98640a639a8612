"""The verified rule: serve the likeliest answer where a lower bound on its being right permits it.

Pure, but for the injected randomness of audits. Until verdicts have come from a namespace it serves what the fixed rule would, and
what the shipped prior is sure of with every guard passed; from then on what the namespace's own model is sure of. Source:
docs/semantic-cache.md. Invariants: no similarity and no verdict crosses a veto (numbers, polarity, an answer about now that has
aged, a long template); a caller's `error_max` only tightens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cache.decision.features import Candidate, Neighbour, candidates, evidence
from cache.decision.guards import Assessment, FixedVerifier, Scene, Verdict, difference, is_drowned, is_long, is_stale
from cache.decision.model import Learner, Prior, Row, Run, Vector, at_once, audit_chance
from cache.decision.text_features import is_exchanged, is_negated, read
from cache.worker.messages import MissReason, Query

ERROR_MAX = 0.01
_COMPARED = 3  # groups that a fresh answer is compared with


class VerifiedRule:
    """`error_max` bounds wrong answers as a share of requests. `random` gives uniform numbers in [0, 1) and decides which would-be
    hits are audited; without it none is, as it must be where nobody judges. `run` does the fits."""

    def __init__(
        self,
        prior: Prior,
        error_max: float = ERROR_MAX,
        random: Callable[[], float] | None = None,
        run: Run = at_once,
    ) -> None:
        self.prior = prior
        self._error_max = error_max
        self._random = random
        self._run = run
        self._fixed = FixedVerifier()
        self._cold = Learner(prior)

    def decide(self, query: Query, neighbours: Sequence[Neighbour], scene: Scene) -> Verdict:
        error_max = self._error_max if query.error_max is None else min(query.error_max, self._error_max)
        fixed = self._fixed.decide(_bounded(query, ERROR_MAX), neighbours)
        ranked = _ranked(query.text, neighbours, fixed.served)
        first = ranked[0]
        learner = scene.learner or self._cold
        seen = evidence(query.text, neighbours, first, scene.words, learner.told, fixed.served is not None)
        p = learner.model.p(seen)
        witness = neighbours[first.place]
        veto = _veto(query.text, witness)
        if veto is not None:
            is_sure = False
        elif learner.is_fitted:
            is_sure = p >= learner.threshold(error_max)
        else:
            least = self.prior.threshold(error_max)
            is_free = _is_free(query.text, witness.text)
            is_sure = (is_free and least is not None and p >= least) or (
                fixed.served is not None
                and (
                    error_max >= ERROR_MAX
                    or self._fixed.decide(_bounded(query, error_max), neighbours).served == fixed.served
                )
            )
        chance = audit_chance(scene.accepted, p) if is_sure and self._random is not None else 1.0
        names = tuple(neighbours[one.place].exact for one in ranked[:_COMPARED])
        if is_sure:
            scene.accepted += 1
            if self._random is None or query.is_try or self._random() >= chance:
                scene.served, scene.risked = scene.served + 1, scene.risked + 1 - p
                reasons = tuple(None if place == first.place else reason for place, reason in enumerate(fixed.reasons))
                return Verdict(first.place, reasons, Assessment(names, _telling(seen, 0, 0.0), p, chance, False))
        assessment = Assessment(names, _telling(seen, scene.served, scene.risked), p, chance, veto is not None)
        if veto is None:
            scene.served, scene.risked = 0, 0.0
        why = MissReason.AUDIT if is_sure else veto or MissReason.UNSURE
        reasons = tuple(
            reason or (why if place == first.place else MissReason.UNSURE) for place, reason in enumerate(fixed.reasons)
        )
        return Verdict(None, reasons, assessment)

    def learn(self, row: Row, scene: Scene) -> None:
        """The first verdict of a namespace gives it a model of its own."""
        if scene.learner is None:
            scene.learner = Learner(self.prior, self._run)
        scene.learner.learn(row)


def _telling(seen: Vector, served: int, risked: float) -> Vector:
    """The evidence as a row has it."""
    return np.append(seen, (served, risked))


def _bounded(query: Query, error_max: float) -> Query:
    return Query(query.partition, query.compat, query.text, error_max)


def _ranked(asked: str, neighbours: Sequence[Neighbour], guarded: int | None) -> list[Candidate]:
    """The groups by their votes. The witness of each is its nearest key that no veto stops; groups without one come last, that of
    the neighbour which the fixed rule would serve comes first, with it as the witness."""
    found = []
    for one in candidates(neighbours):
        keys = (place for place, near in enumerate(neighbours) if (near.group or near.exact) == one.group)
        free = next((place for place in keys if _veto(asked, neighbours[place]) is None), None)
        is_first = guarded is not None and (neighbours[guarded].group or neighbours[guarded].exact) == one.group
        place = guarded if guarded is not None and is_first else one.place if free is None else free
        made = Candidate(one.group, place, one.share, one.count, one.rival)
        found.append((0 if is_first else 1 if free is not None else 2, made))
    found.sort(key=lambda pair: pair[0])
    return [one for _, one in found]


def _is_free(asked: str, known: str) -> bool:
    """Whether every guard passes."""
    one, other = read(asked), read(known)
    return difference(one, other) is None and not is_drowned(one, other)


def _veto(asked: str, neighbour: Neighbour) -> MissReason | None:
    """What nothing crosses."""
    one, other = read(asked), read(neighbour.text)
    if one.numbers != other.numbers:
        return MissReason.NUMBERS
    if is_negated(one, other):
        return MissReason.POLARITY
    if is_exchanged(one, other):
        return MissReason.DIRECTION
    if is_stale(one, neighbour):
        return MissReason.TIME
    if is_long(one, other) and one.words != other.words:
        return MissReason.WORDS
    return None
