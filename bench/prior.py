"""What the verified rule knows before its first verdict: learned offline from labelled sets, written to cache/decision/prior.py.

    ./run bench prior FOLDER... [--write PATH] [--terms TEXT]

Streams each set through the product's cache with a rule that serves nothing and remembers its evidence: once as one namespace, and
once as many small ones (a prompt, with or without a paraphrase of it, among its nearest others), which is how every namespace
begins. All sets weigh the same. The prior serves nothing by itself: it is where a namespace's own model starts.
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
from cache.decision.differences import kinds_of
from cache.decision.features import FEATURES, Neighbour
from cache.decision.model import COUNT, LearnedModel, LogisticModel, Prior, Row
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, VerifiedRule
from cache.encoder.embedder import open_embedder
from cache.semantic.cache import SemanticCache

_REQUESTS = 6_000  # of a set as one namespace
_SMALL = 3_000  # small namespaces of a set
_WEIGHT = 300.0  # of a set, in comparisons: so sure is the prior
_REQUESTS_MIN = 1_000  # a set with fewer weighs less
_RIDGE, _STEPS = (1.0, 1e-3), 60  # the second of the intercept
_BLANK = Prior(np.zeros(COUNT), np.ones(COUNT), np.zeros(COUNT + 1), np.full(COUNT + 1, 1e-6))


@dataclass(frozen=True, slots=True)
class Rows:
    """Comparisons of a set: evidence (n, features), and whether the answers were the same (n)."""

    features: NDArray[np.float64]
    is_right: NDArray[np.float64]

    @classmethod
    def of(cls, rule: Watching) -> Rows:
        features = np.stack([row.features[:COUNT] for row in rule.rows])
        return cls(features, np.array([row.is_right for row in rule.rows], dtype=np.float64))


class Watching(VerifiedRule):
    """Serves nothing, keeps what verdicts tell, and learns from it only which kinds they free."""

    def __init__(self) -> None:
        super().__init__(_BLANK)
        self.rows: list[Row] = []

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        return super().decide(msgspec.structs.replace(query, error_max=0.0), neighbours, state)

    def learn(self, row: Row, model: LearnedModel | None) -> LearnedModel:
        model = model or LearnedModel(_BLANK)
        model.freed.learn(kinds_of(row.features, COUNT), bool(row.is_right), row.group)
        self.rows.append(row)
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
        del rule.rows[before : max(before, len(rule.rows) - 1)]


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
    """The model of all comparisons from nothing, with its signs held; every set weighs the same."""
    features = np.concatenate([one.features for one in sets])
    is_right = np.concatenate([one.is_right for one in sets])
    weights = np.concatenate(
        [np.full(len(one.is_right), _WEIGHT / max(len(one.is_right), _REQUESTS_MIN)) for one in sets]
    )
    mean = np.average(features, axis=0, weights=weights)
    scale = np.maximum(0.05, np.sqrt(np.average((features - mean) ** 2, axis=0, weights=weights)))
    blank = Prior(mean, scale, np.zeros(COUNT + 1), np.ones(COUNT + 1))
    return LogisticModel(blank).fitted(features, is_right, weights, ridge=_RIDGE, steps=_STEPS).as_prior()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench prior", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--write", type=Path, default=None, help="write the module here, else only print")
    parser.add_argument("--terms", default="", help="one line: the sets and their licences")
    options = parser.parse_args(argv)
    sets = [one for folder in options.folders for one in load(folder)]
    embedder = Recall(open_embedder(), [one.name for one in sets])
    embedder.want(request.query.text for one in sets for request in one.requests)
    embedder.save()
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


def _module(prior: Prior, embedder: str, terms: str) -> str:
    def line(values: NDArray[np.float64]) -> str:
        words = [f"{value:.4g}" for value in values]
        rows = [", ".join(words[at : at + 12]) for at in range(0, len(words), 12)]
        return "np.array((\n        " + ",\n        ".join(rows) + ",\n    ))"

    return f'''"""The prior of the verified rule. Written by `./run bench prior`; not by hand.

Coefficients for {embedder}.
{textwrap.fill("Learned from: " + terms, 100)}
No text of these sets is in it: only how much each kind of evidence counts.
"""

import numpy as np

from cache.decision.model import Prior

PRIOR = Prior(
    mean={line(prior.mean)},
    scale={line(prior.scale)},
    coefficients={line(prior.coefficients)},
    variance={line(prior.variance)},
)  # fmt: skip
'''


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
