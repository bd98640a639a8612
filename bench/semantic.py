"""How often the semantic cache hits, and how often it is wrong, on labelled requests.

    ./run bench semantic FOLDER... [--error-max 0.01 ...] [--seeds N] [--judge-noise 0 ...] [--requests N] [--json FILE]
    ./run bench semantic FOLDER... --http [--error-max 0.01 ...] [--seeds N] [--requests N] [--json FILE]

Streams each set in a seeded order through the product's own cache object, empty at first: a miss stores the request, and the judge
says by the labels which cached answers the fresh one equals, wrong with the probability of the noise. A hit is wrong where the
labels differ. Beside it: fixed cosine thresholds, the fixed rule with its guards, and vCache's rule (bench/vcache.py).
With `--http` the same streams go through a real gateway instead, with its own judges (bench/semantic_http.py).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.lab.processes import BenchError
from bench.labelled import Labelled, Recall, Request, load
from bench.semantic_http import stream_over_http
from bench.vcache import VCache
from cache import Hit, MissReason, Query
from cache.decision.features import Neighbour
from cache.decision.model import CalibratedModel, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, FixedRule, NamespaceCounters, NamespaceState, Rule, VerifiedRule
from cache.encoder.embedder import open_embedder
from cache.semantic.cache import SemanticCache

_COSINES = (0.8, 0.9, 0.95)


class Result(msgspec.Struct, frozen=True):
    """One stream. `possible`: requests whose label had come before. Over HTTP decisions can't be timed: their time is None."""

    set: str
    policy: str
    error_max: float
    seed: int
    judge_noise: float
    requests: int
    hits: int
    wrong: int
    possible: int
    decision_ms_p50: float | None


class Cosine:
    """Serves the nearest from a fixed similarity on."""

    def __init__(self, least: float) -> None:
        self._least = least

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        reasons = tuple(None if one.similarity >= self._least else MissReason.FAR for one in neighbours)
        return Decision(0 if reasons[0] is None else None, reasons), state.counters

    def learn(self, row: Row, model: CalibratedModel | None) -> CalibratedModel | None:
        """It does not."""
        return model


def stream(
    requests: Sequence[Request], embedder: Recall, rule: Rule, noise: float, draw: random.Random
) -> tuple[int, int, int, float]:
    """Hits, wrong hits, possible hits, and the median time of a decision, search and bookkeeping included, in ms."""
    cache = SemanticCache(embedder, rule, clock=lambda: 1.0)
    labels: dict[bytes, str] = {}
    known: set[str] = set()
    hits = wrong = possible = 0
    times: list[float] = []
    for request in requests:
        label = request.label
        possible += label in known
        known.add(label)
        started = time.perf_counter()
        (answer,) = cache.lookup([request.query])
        times.append((time.perf_counter() - started) * 1000)
        if isinstance(answer, Hit):
            hits += 1
            wrong += labels[answer.exact] != label
            continue
        labels[request.exact] = label
        cache.fold([request.added()])

        def is_same(other: bytes, label: str = label) -> bool:
            return (labels[other] == label) is not (draw.random() < noise)

        judged = cache.judge(request.query, answer, request.exact, is_same)
        if judged is not None:
            cache.fold([judged])
    return hits, wrong, possible, statistics.median(times)


def vcache(
    requests: Sequence[Request], embedder: Recall, error_max: float, noise: float, draw: random.Random
) -> tuple[int, int, int, float]:
    """The same for vCache's rule; one cache for each dialogue, as compat has it."""
    caches: dict[bytes, VCache] = {}
    known: set[str] = set()
    hits = wrong = possible = 0
    times: list[float] = []
    for request in requests:
        possible += request.label in known
        known.add(request.label)
        cache = caches.setdefault(request.query.compat, VCache(error_max, embedder.info.dims, draw))
        vector = embedder.encode([request.query.text]).vectors[0]
        started = time.perf_counter()
        found = cache.lookup(vector)
        times.append((time.perf_counter() - started) * 1000)
        if found.is_served:
            hits += 1
            wrong += found.answer != request.label
        else:
            cache.learn(vector, found, request.label, draw.random() < noise)
    return hits, wrong, possible, statistics.median(times)


def rules(error_max: float, seed: int) -> dict[str, Callable[[], Rule]]:
    made: dict[str, Callable[[], Rule]] = {
        "verified": lambda: VerifiedRule(PRIOR, error_max, random.Random(seed).random),
        "cold": lambda: VerifiedRule(PRIOR, error_max),
        "guards": FixedRule,
    }
    for least in _COSINES:
        made[f"cosine {least}"] = lambda least=least: Cosine(least)  # type: ignore[misc]
    return made


def measure(one: Labelled, embedder: Recall, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = one.shuffled(seed, options.requests)
        for error_max in options.error_max:
            for name in options.policies:
                learns = name in ("verified", "vcache")
                if not learns and name != "cold" and error_max != options.error_max[0]:
                    continue
                for noise in options.judge_noise if learns else (0.0,):
                    draw = random.Random(seed)
                    if name == "vcache":
                        found = vcache(requests, embedder, error_max, noise, draw)
                    else:
                        rule = rules(error_max, seed)[name]()
                        found = stream(requests, embedder, Unjudged(rule) if name == "cold" else rule, noise, draw)
                    result = Result(one.name, name, error_max, seed, noise, len(requests), *found)
                    results.append(result)
                    print(_line(result), flush=True)
    return results


def measure_over_http(one: Labelled, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = one.shuffled(seed, options.requests)
        for error_max in options.error_max:
            found = stream_over_http(requests, error_max=error_max)
            results.append(Result(one.name, "http", error_max, seed, 0.0, len(requests), *found, None))
            print(_line(results[-1]), flush=True)
    return results


class Unjudged:
    """A rule to which no verdict ever comes."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        decision, counters = self._rule.decide(query, neighbours, state)
        return Decision(decision.served, decision.reasons), counters

    def learn(self, row: Row, model: CalibratedModel | None) -> CalibratedModel | None:
        """None comes."""
        return model


def _line(one: Result) -> str:
    return (
        f"{one.set:18} {one.policy:12} {one.error_max:6.3f} {one.judge_noise:6.2f} {one.seed:5d} {one.requests:8d} "
        f"{100 * one.hits / one.requests:6.1f} {100 * one.wrong / one.requests:8.2f} "
        f"{100 * one.wrong / max(1, one.hits):7.2f} {100 * (one.hits - one.wrong) / max(1, one.possible):7.1f}"
        + ("" if one.decision_ms_p50 is None else f" {one.decision_ms_p50:6.2f}")
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench semantic", description=(__doc__ or "").splitlines()[0])
    names = ["verified", "cold", "guards", *(f"cosine {least}" for least in _COSINES), "vcache"]
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--error-max", nargs="+", type=float, default=[0.01])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--judge-noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--requests", type=int, default=None, help="the first of each shuffled stream; default: all")
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument("--http", action="store_true", help="through a real gateway, an empty one for each stream")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    options = parser.parse_args(argv)
    if options.http and (options.policies != names or options.judge_noise != [0.0]):
        parser.error("--http is one policy, the gateway's, and has judges of its own: no --policies, no --judge-noise")
    sets = [load(folder) for folder in options.folders]
    print(
        f"{'set':18} {'policy':12} {'bound':>6} {'noise':>6} {'seed':>5} {'requests':>8} {'hit %':>6} {'wrong %':>8} "
        f"{'of hits':>7} {'recall':>7} {'ms':>6}"
    )
    results: list[Result] = []
    if options.http:
        try:
            for one in sets:
                results += measure_over_http(one, options)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    else:
        encoder = open_embedder()
        for one in sets:
            results += measure(one, Recall(encoder, [one]), options)
    if options.json is not None:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
