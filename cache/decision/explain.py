"""From neighbours to a decision that explains itself: the verifier's verdict, what is out of service, and what a judge will need.

Knows no index and no Redis. Invariants: an answer that is out of service is not served, and no other takes its place: what lies
behind it was not what the evidence spoke for; a bound that has tightened itself says so where it alone refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from cache.decision.features import NEIGHBOURS, Neighbour
from cache.decision.guards import Assessment, Scene, Verifier
from cache.semantic.state import Lore
from cache.worker.messages import Hit, Miss, MissReason, Near, Neighbourhood, Query, Trial

_WOULD_BE_SERVED = (None, MissReason.TIGHTENED, MissReason.AUDIT)


def decide(query: Query, known: Sequence[Neighbour], count: int, verifier: Verifier, lore: Lore) -> Neighbourhood:
    """The decision with the `count` nearest of `known`, which come nearest first, at least one."""
    scene = lore.scene(query.partition + query.compat)
    if query.is_try:
        scene = replace(scene)  # what it counts is counted in a copy
    seen = known[:NEIGHBOURS]
    verdict = verifier.decide(query, seen, scene)
    reasons = list(verdict.reasons)
    if verdict.served is None and MissReason.AUDIT not in reasons and query.untightened is not None:
        loose = _untightened(query, seen, verifier, scene)
        if loose is not None:
            reasons[loose] = MissReason.TIGHTENED
    for place, reason in enumerate(reasons):
        if reason in _WOULD_BE_SERVED and known[place].is_suspended:
            reasons[place] = MissReason.SUSPENDED
    # decision: withdrawn-until-cleared
    served = verdict.served if verdict.served is not None and not known[verdict.served].is_suspended else None
    # decision: trial-in-the-reply
    trial = _trial(verdict.assessment, known, lore.rule)
    nears = [
        _near(one, reasons[place] if place < len(reasons) else MissReason.FAR)
        for place, one in enumerate(known[: max(1, count)])
    ]
    decision: Hit | Miss
    if served is not None:
        decision = Hit(seen[served].exact, seen[served].similarity, seen[served].text, trial)
    else:
        told = [reason for reason in reasons if reason in (MissReason.TIGHTENED, MissReason.SUSPENDED)]
        decision = Miss(told[0] if told else reasons[0] or MissReason.FAR, nears[0], trial)
    if not count:
        return Neighbourhood(decision, ())
    return Neighbourhood(decision, tuple(nears[:count]), *_bar(query, scene))


def _untightened(query: Query, seen: Sequence[Neighbour], verifier: Verifier, scene: Scene) -> int | None:
    """What would be served at the bound as it was."""
    looser = msgspec.structs.replace(query, error_max=query.untightened, untightened=None, is_try=True)
    return verifier.decide(looser, seen, replace(scene)).served


def _trial(made: Assessment | None, known: Sequence[Neighbour], rule: bytes) -> Trial | None:
    if made is None:
        return None
    is_out = any(one.is_suspended and one.exact == made.ranked[0] for one in known)  # generated for certain
    evidence = b"" if made.is_vetoed else made.evidence.astype("<f4").tobytes()
    return Trial(made.ranked, evidence, made.p, 1.0 if is_out else made.chance, rule)


def _near(one: Neighbour, reason: MissReason | None) -> Near:
    return Near(one.similarity, one.text, one.exact, reason, one.group, one.keys, one.right, one.wrong)


def _bar(query: Query, scene: Scene) -> tuple[float | None, int]:
    """The least p that would be served, and how many verdicts say so."""
    learner = scene.learner
    if learner is None:
        return None, 0
    is_known = learner.is_fitted and query.error_max is not None
    return learner.threshold(query.error_max or 0.0) if is_known else None, learner.verdicts
