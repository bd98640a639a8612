"""What the verified rule knows before its first verdict: learned offline from labelled sets, written to cache/decision/prior.py.

    ./run bench prior FOLDER... [--write PATH] [--terms TEXT]
    ./run bench prior FOLDER --contexts [--write PATH] [--terms TEXT]

Streams each set through the product's cache with a rule that serves nothing and remembers its evidence: once as one namespace, and
once as many small ones (a prompt, with or without a paraphrase of it, among its nearest others), which is how every namespace
begins. All sets weigh the same. The prior serves nothing by itself: it is where a namespace's own model starts.
With --contexts it learns, drawn towards the shipped prior, that of questions about one context (cache/decision/context_prior.py).
Each context of the set is streamed by itself, in several orders, a quarter of its requests twice; the thresholds are those at which
a prior learned from four fifths of the contexts kept a quarter of its bound on those comparisons of the last fifth that no guard
stops.
Train only on data whose licence allows shipping the result; --terms says whose it was.
"""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from bench.labelled import Comparisons, Labelled, Request, load
from bench.meaning.vectors import Recall
from cache import Query
from cache.decision.features import FEATURES, IN_CONTEXT, Neighbour
from cache.decision.guards import is_added, is_other_in_context
from cache.decision.model import LearnedModel, LogisticModel, Prior, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, VerifiedRule
from cache.decision.text_features import read
from cache.encoder.embedder import open_embedder
from cache.semantic.cache import SemanticCache

_REQUESTS = 6_000  # of a set as one namespace
_SMALL = 3_000  # small namespaces of a set
_WEIGHT = 300.0  # of a set, in comparisons: so sure is the prior
_REQUESTS_MIN = 1_000  # a set with fewer weighs less
_RIDGE = 1.0
_COUNT = len(FEATURES)
_ORDERS, _REPEATED = 6, 0.25  # of a context's requests
_ORDER_WEIGHT = 4.0  # of all orders of a context together: their comparisons differ
_CONTEXT_RIDGE = 30.0  # towards the shipped prior
_BOUNDS = (0.01, 0.005, 0.002)
_CONTEXT_MIN = 0.75  # of p: twenty contexts are too few to tell what is wrong below
_BLANK = Prior(np.zeros(_COUNT), np.ones(_COUNT), np.zeros(_COUNT + 1), np.full(_COUNT + 1, 1e-6))


@dataclass(frozen=True, slots=True)
class Rows:
    """Comparisons of a set: evidence (n, features), whether the answers were the same (n), and whether no guard of questions about
    one context stops the hit (n)."""

    features: NDArray[np.float64]
    is_right: NDArray[np.float64]
    is_free: NDArray[np.bool_]

    @classmethod
    def of(cls, rule: Watching) -> Rows:
        features = np.stack([row.features[:_COUNT] for row in rule.rows])
        return cls(features, np.array([row.is_right for row in rule.rows], dtype=np.float64), np.array(rule.is_free))


class Watching(VerifiedRule):
    """Keeps what verdicts tell, and learns nothing from it."""

    def __init__(self) -> None:
        super().__init__(_BLANK, error_max=0.0)
        self.rows: list[Row] = []
        self.is_free: list[bool] = []  # of each row
        self._is_free = False

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        decision, counters = super().decide(query, neighbours, state)
        trial = decision.trial
        if trial is not None:
            witness = next(one for one in neighbours if one.exact == trial.ranked[0])
            asked, known = read(query.text), read(witness.text)
            is_further = is_added(asked, known)
            self._is_free = (
                bool(trial.features) and trial.p > 0 and not (is_further or is_other_in_context(asked, known))
            )
        return decision, counters

    def learn(self, row: Row, model: LearnedModel | None, others: Sequence[LearnedModel] = ()) -> LearnedModel:
        model = model or LearnedModel(_BLANK)
        model.word_odds.learn(row.features, bool(row.is_right))
        self.rows.append(row)
        self.is_free.append(self._is_free)
        return model


def watch(requests: Sequence[Request], embedder: Recall, rule: Watching) -> None:
    """Stream requests into an empty cache; each is a miss and judged."""
    cache = SemanticCache(embedder, rule, clock=lambda: 1.0)
    labels, comparisons = {request.exact: request.label for request in requests}, Comparisons()
    for request in requests:
        (answer,) = cache.lookup([request.query])
        cache.fold([comparisons.add(request.added())])
        judged = comparisons.compare(
            request.query, answer, request.exact, lambda other, own=request.label: labels[other] == own
        )  # type: ignore[misc]
        if judged is not None:
            cache.fold([judged])
        while not cache.is_settled:
            cache.settle()


def watch_small(requests: Sequence[Request], embedder: Recall, rule: Watching, seed: int) -> None:
    """Each namespace: up to 15 prompts with other answers, half of them the nearest, in every second one a paraphrase, then the
    prompt itself. Only the last is kept."""
    rng = np.random.default_rng(seed)
    vectors = embedder.encode([request.query.text for request in requests]).vectors
    labels = np.array([request.label for request in requests])
    for place in rng.permutation(len(requests))[:_SMALL].tolist():
        order = np.argsort(-(vectors @ vectors[place]))
        order = order[order != place]
        same, others = order[labels[order] == labels[place]], order[labels[order] != labels[place]]
        count = int(np.exp(rng.uniform(0, np.log(16))))
        chosen = [*others[: count // 2].tolist(), *rng.choice(others, count - count // 2, replace=False).tolist()]
        if len(same) and rng.random() < 0.5:
            chosen[0] = int(same[0])
        before = len(rule.rows)
        some = [*(requests[one] for one in chosen), requests[place]]
        name = place.to_bytes(16, "big")
        watch([_renamed(one, name) for one in some], embedder, rule)
        for kept in (rule.rows, rule.is_free):
            del kept[before : max(before, len(kept) - 1)]


def _renamed(request: Request, compat: bytes) -> Request:
    """The same request in another namespace."""
    return replace(request, query=msgspec.structs.replace(request.query, compat=compat))


def rows_of(one: Labelled, embedder: Recall, seed: int = 1) -> list[Rows]:
    found = []
    for is_small in (False, True):
        rule = Watching()
        requests = one.shuffled(seed + is_small, _REQUESTS)
        if is_small:
            watch_small(requests, embedder, rule, seed)
        else:
            watch(requests, embedder, rule)
        if rule.rows:
            found.append(Rows.of(rule))
    return found


def fit(sets: Sequence[Rows]) -> Prior:
    """Weighted ridge logistic regression by Newton's method; every set weighs the same."""
    features = np.concatenate([one.features for one in sets])
    is_right = np.concatenate([one.is_right for one in sets])
    weights = np.concatenate(
        [np.full(len(one.is_right), _WEIGHT / max(len(one.is_right), _REQUESTS_MIN)) for one in sets]
    )
    mean = np.average(features, axis=0, weights=weights)
    scale = np.maximum(0.05, np.sqrt(np.average((features - mean) ** 2, axis=0, weights=weights)))
    x = np.hstack([np.clip((features - mean) / scale, -5, 5), np.ones((len(features), 1))])
    ridge = np.full(x.shape[1], _RIDGE)
    ridge[-1] = 1e-3
    b = np.zeros(x.shape[1])
    for _ in range(40):
        p = 1 / (1 + np.exp(-x @ b))
        hessian = (x * (weights * p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        b -= np.linalg.solve(hessian, x.T @ (weights * (p - is_right)) + ridge * b)
    return Prior(mean, scale, b, np.diag(np.linalg.inv(hessian)).copy())


def rows_by_context(sets: Sequence[Labelled], embedder: Recall) -> list[Rows]:
    """The comparisons of each context, by itself."""
    contexts: dict[str, list[Request]] = {}
    for one in sets:
        for request in one.requests:
            contexts.setdefault(request.label.rpartition("/")[0], []).append(request)
    found = []
    for requests in contexts.values():
        rule = Watching()
        for seed in range(_ORDERS):
            rng = np.random.default_rng(seed)
            again = rng.permutation(len(requests))[: int(_REPEATED * len(requests))].tolist()
            some = [*requests, *(replace(requests[at], exact=b"again" + requests[at].exact) for at in again)]
            watch([some[at] for at in rng.permutation(len(some)).tolist()], embedder, rule)
        found.append(Rows.of(rule))
    return found


def fit_contexts(rows: Sequence[Rows], thresholds: tuple[tuple[float, float], ...]) -> Prior:
    """The shipped prior, drawn to these comparisons; what compares places has no prior."""
    features = np.concatenate([one.features for one in rows])
    is_right = np.concatenate([one.is_right for one in rows])
    further = features[:, IN_CONTEXT + 1 :]
    mean = np.concatenate([PRIOR.mean[:IN_CONTEXT], [0.0], further.mean(axis=0)])
    scale = np.concatenate([PRIOR.scale[:IN_CONTEXT], [1.0], further.std(axis=0)])
    start = np.concatenate([PRIOR.coefficients[:IN_CONTEXT], np.zeros(_COUNT - IN_CONTEXT), PRIOR.coefficients[-1:]])
    x = np.hstack([np.clip((features - mean) / scale, -5, 5), np.ones((len(features), 1))])
    ridge = np.full(_COUNT + 1, _CONTEXT_RIDGE)
    ridge[IN_CONTEXT], ridge[IN_CONTEXT + 1 : -1], ridge[-1] = 1e6, 1.0, 0.1  # the first is one in all rows
    weight, b = _ORDER_WEIGHT / _ORDERS, start.copy()
    for _ in range(40):
        p = 1 / (1 + np.exp(-x @ b))
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + np.diag(ridge)
        b -= np.linalg.solve(hessian, weight * x.T @ (p - is_right) + ridge * (b - start))
    return Prior(mean, scale, b, np.diag(np.linalg.inv(hessian)).copy(), thresholds)


def context_prior(sets: Sequence[Labelled], embedder: Recall) -> Prior:
    """The prior of questions about one context."""
    rows = rows_by_context(sets, embedder)
    held: list[Rows] = []
    p: list[NDArray[np.float64]] = []
    for fold in range(5):
        prior = fit_contexts([one for place, one in enumerate(rows) if place % 5 != fold], ())
        held += rows[fold::5]
        p += [LogisticModel(prior).lower(one.features) for one in rows[fold::5]]
    is_free = np.concatenate([one.is_free for one in held])
    chances, is_right = np.concatenate(p)[is_free], np.concatenate([one.is_right for one in held])[is_free]
    order = np.argsort(-chances)
    wrong = np.cumsum(1 - is_right[order])
    requests = _ORDERS * (1 + _REPEATED) * sum(len(one.requests) for one in sets)
    thresholds = []
    for bound in _BOUNDS:
        within = np.nonzero(wrong <= 0.25 * bound * requests)[0]
        found = float(chances[order][within[-1]]) if len(within) else 1.0
        print(f"error {bound}: p at least {found:.3f}, which serves {len(within) / requests:.2f} of the requests")
        thresholds.append((bound, round(min(0.999, max(_CONTEXT_MIN, found)), 3)))
    return fit_contexts(rows, tuple(thresholds))


def _recall(sets: Sequence[Labelled]) -> Recall:
    embedder = Recall(open_embedder(), [one.name for one in sets])
    embedder.want(request.query.text for one in sets for request in one.requests)
    embedder.save()
    return embedder


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench prior", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, default=None, help="write the module here, else only print")
    parser.add_argument("--terms", default="", help="one line: the sets and their licences")
    parser.add_argument("--contexts", action="store_true", help="learn the prior of questions about one context")
    options = parser.parse_args(argv)
    if options.contexts:
        sets = [one for folder in options.folders for one in load(folder)]
        embedder = _recall(sets)
        prior = context_prior(sets, embedder)
        if options.write is not None:
            options.write.write_text(_module(prior, embedder.info.name, options.terms, is_of_contexts=True))
        return 0
    sets = [one for folder in options.folders for one in load(folder)]
    embedder = _recall(sets)
    found: list[list[Rows]] = []
    for one in sets:
        found.append(rows_of(one, embedder))
        shares = " ".join(f"{len(rows.is_right)} at {rows.is_right.mean():.2f}" for rows in found[-1])
        print(f"{one.name}: comparisons, and the share of right ones: {shares}", flush=True)
    prior = fit([rows for own in found for rows in own])
    for name, coefficient in zip((*FEATURES, "intercept"), prior.coefficients, strict=True):
        print(f"{coefficient:8.3f}  {name}")
    if options.write is not None:
        options.write.write_text(_module(prior, embedder.info.name, options.terms))
    return 0


def _module(prior: Prior, embedder: str, terms: str, *, is_of_contexts: bool = False) -> str:
    def line(values: NDArray[np.float64]) -> str:
        words = [f"{value:.4g}" for value in values]
        rows = [", ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        return "np.array((\n        " + ",\n        ".join(rows) + ",\n    ))"

    extra = f"    thresholds={prior.thresholds!r},\n" if is_of_contexts else "    in_context=CONTEXT_PRIOR,\n"
    needed = "" if is_of_contexts else "from cache.decision.context_prior import CONTEXT_PRIOR\n"
    whose = "questions about one context" if is_of_contexts else "the verified rule"
    return f'''"""The prior of {whose}. Written by `./run bench prior`; not by hand.

Coefficients for {embedder}.
{textwrap.fill("Learned from: " + terms, 100)}
No text of these sets is in it: only how much each kind of evidence counts.
"""

import numpy as np

{needed}from cache.decision.model import Prior

{"CONTEXT_" if is_of_contexts else ""}PRIOR = Prior(
    mean={line(prior.mean)},
    scale={line(prior.scale)},
    coefficients={line(prior.coefficients)},
    variance={line(prior.variance)},
{extra})  # fmt: skip
'''


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
