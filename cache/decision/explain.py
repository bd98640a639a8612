"""A decision with its explanation: the rule's choice, answers out of service, the trial.

Knows no index and no Redis, and writes nothing. Invariants: an answer that is out of service is not
served, and no other answer takes its place, because the features were those of that answer. If only
a bound that tightened itself refused, the reason says so.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cache.decision.features import NEIGHBOURS, Neighbour
from cache.decision.pieces import digests
from cache.decision.rule import NamespaceCounters, NamespaceState, Rule
from cache.query import Asked, Hit, LookupResult, Miss, MissReason, Near, Neighbourhood, Query, Trial, Undecided

# reasons of the one neighbour that would be served, which need not be the nearest
_WITHHELD = (MissReason.TIGHTENED, MissReason.SUSPENDED)
_WOULD_BE_SERVED = (None, MissReason.TIGHTENED)


def decide(
    query: Query, known: Sequence[Neighbour], count: int, state: NamespaceState, rule: Rule, rule_name: bytes
) -> tuple[Neighbourhood, NamespaceCounters]:
    """The decision with the `count` nearest of `known`, which come nearest first, at least one; and
    the counters after it.
    """
    seen = known[:NEIGHBOURS]
    decision, counters = rule.decide(query, seen, state)
    reasons = list(decision.reasons)
    if decision.served is None and query.untightened is not None:
        loose = _untightened(query, seen, rule, state)
        if loose is not None:
            reasons[loose] = MissReason.TIGHTENED
    first = decision.trial.ranked[0] if decision.trial is not None else None
    for index, reason in enumerate(reasons):
        # a wrong verdict takes an answer out of service, and makes the rule unsure of it as well
        is_first = reason is MissReason.UNSURE and known[index].exact == first
        if known[index].is_suspended and (is_first or reason in _WOULD_BE_SERVED):
            reasons[index] = MissReason.SUSPENDED
    # decision: withdrawn-until-cleared
    served = decision.served if decision.served is not None and not known[decision.served].is_suspended else None
    # decision: trial-in-the-reply
    trial = _trial(decision.trial, known, rule_name)
    nears = [
        _near(one, reasons[index] if index < len(reasons) else MissReason.FAR)
        for index, one in enumerate(known[: max(1, count)])
    ]
    answer: LookupResult
    if served is not None:
        hit = seen[served]
        answer = Hit(hit.exact, hit.similarity, hit.stored or hit.text, trial, hit.differing)
    else:
        named = [reason for reason in reasons if reason in _WITHHELD]
        answer = miss = Miss(named[0] if named else reasons[0] or MissReason.FAR, nears[0], trial)
        candidates = tuple(
            _asked(seen[index], p, features) for index, p, features in decision.doubtful if not seen[index].is_suspended
        )
        if query.may_ask and candidates and not named:
            answer = Undecided(candidates, miss)
    if not count:
        return Neighbourhood(answer, ()), counters
    return Neighbourhood(answer, tuple(nears[:count]), *_bar(query, state)), counters


def _asked(neighbour: Neighbour, p: float, features: bytes) -> Asked:
    return Asked(
        exact=neighbour.exact,
        group=neighbour.answer,
        similarity=neighbour.similarity,
        text=neighbour.stored or neighbour.text,
        p=p,
        differing=neighbour.differing,
        features=features,
        wording=neighbour.wording,
    )


def _untightened(query: Query, seen: Sequence[Neighbour], rule: Rule, state: NamespaceState) -> int | None:
    """The place that would be served at the bound before it tightened itself."""
    looser = msgspec.structs.replace(query, error_max=query.untightened, untightened=None, is_try=True)
    decision, _ = rule.decide(looser, seen, state)
    return decision.served


def _trial(trial: Trial | None, known: Sequence[Neighbour], rule_name: bytes) -> Trial | None:
    if trial is None:
        return None
    first = next(one for one in known if one.exact == trial.ranked[0])
    return msgspec.structs.replace(trial, rule=rule_name, differing=digests(first.differing))


def _near(neighbour: Neighbour, reason: MissReason | None) -> Near:
    return Near(
        similarity=neighbour.similarity,
        text=neighbour.text,
        exact=neighbour.exact,
        reason=reason,
        group=neighbour.group,
        keys=neighbour.keys,
        right=neighbour.right,
        wrong=neighbour.wrong,
    )


def _bar(query: Query, state: NamespaceState) -> tuple[float | None, int]:
    """The least p that would be served, and how many verdicts say so."""
    model = state.model
    if model is None:
        return None, 0
    least = model.threshold(query.error_max) if query.error_max is not None else 1.0
    return least if least < 1.0 else None, model.verdicts
