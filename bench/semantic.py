"""How often the semantic cache hits, and how often it is wrong, on labelled requests.

    ./run bench semantic FOLDER... [--error-max 0.01 ...] [--seeds N] [--judge-noise 0 ...] [--requests N] [--json FILE]
    ./run bench semantic FOLDER... --answers FILE [--vary | --label-answers] [--judge-model ERR] [--requests N] ...
    ./run bench semantic --judge FILE
    ./run bench semantic --cold DATA [--seeds N] [--requests N] [--json FILE]
    ./run bench semantic FOLDER... --http [--answers FILE] [--error-max 0.01 ...] [--seeds N] [--requests N] [--json FILE]

Streams each set in a seeded order through the product's own cache object, empty at first: a miss stores the request, and the judge
says by the labels which cached answers the fresh one equals, wrong with the probability of the noise. A hit is wrong where the
labels differ. Beside it: fixed cosine thresholds, the fixed rule with its guards, and vCache's rule (bench/vcache.py).
With `--answers` each answer is drawn from its label's texts in FILE, and the product's own judges compare them (bench/answers.py).
With `--judge` the product's judges rule on the annotated pairs of FILE instead (bench/answers.py).
With `--cold` each set of the folder DATA is streamed by the cold rule alone, at 1 and 0.5%, with a share of cold hits that was made
from the other sets: the share of wrong ones on the worst of them. Sets whose folders' names begin alike, up to a `_`, are left out
together. It returns 1 if a half fails.
With `--http` the same streams go through a real gateway instead, with its own judges (bench/semantic_http.py).
A half of a stream fails where the exact one-sided 95% lower limit of its share of wrong answers is above the bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.answers import Ideal, Judging, Pools, Product, judge_pairs, load_pools
from bench.lab.processes import BenchError
from bench.labelled import Comparisons, Labelled, Recall, Request, load
from bench.semantic_http import stream_over_http
from bench.vcache import VCache
from cache import Hit, Miss, MissReason, Query
from cache.decision.features import Neighbour
from cache.decision.guards import COLD_WRONG
from cache.decision.model import LearnedModel, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, Rule, VerifiedRule, decide_fixed
from cache.encoder.embedder import open_embedder
from cache.encoder.types import Embedder
from cache.semantic.cache import SemanticCache

_COSINES = (0.8, 0.9, 0.95)
_COLD_BOUNDS = (0.01, 0.005)
_COLD_HITS = 50  # of a set, for its share of wrong ones to count
_NO_SHARE = 1e-6  # of cold hits wrong: each request pays for as many as there may be at once


class Result(msgspec.Struct, frozen=True):
    """One stream. `possible`: requests whose label had come before. `halves`: requests, hits and wrong hits of the first and the
    second half, `failed` how many of them fail. Over HTTP decisions can't be timed: their time is None."""

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
    halves: tuple[tuple[int, int, int], ...]
    failed: int
    questions: int = 0  # to a judge model


class Counts:
    """Hits and wrong ones of a stream of `requests` requests, by half."""

    def __init__(self, requests: int) -> None:
        self.possible = 0
        self._known: set[str] = set()
        self._halves = [[requests - requests // 2, 0, 0], [requests // 2, 0, 0]]
        self._seen = 0

    def add(self, label: str, *, is_hit: bool, is_wrong: bool) -> None:
        half = self._halves[self._seen >= self._halves[0][0]]
        half[1] += is_hit
        half[2] += is_wrong
        self._seen += 1
        self.possible += label in self._known
        self._known.add(label)

    def result(self, name: str, policy: str, error_max: float, seed: int, noise: float, ms: float | None) -> Result:
        halves = tuple((count, hits, wrong) for count, hits, wrong in self._halves)
        return Result(
            set=name,
            policy=policy,
            error_max=error_max,
            seed=seed,
            judge_noise=noise,
            requests=sum(count for count, _, _ in halves),
            hits=sum(hits for _, hits, _ in halves),
            wrong=sum(wrong for _, _, wrong in halves),
            possible=self.possible,
            decision_ms_p50=ms,
            halves=halves,
            failed=sum(count > 0 and _refutes(wrong, count, error_max) for count, _, wrong in halves),
        )


def _refutes(wrong: int, count: int, error_max: float) -> bool:
    """Whether so many wrong ones of `count` have a chance below 5% at a share of `error_max`."""
    logs = math.lgamma(count + 1), math.log(error_max), math.log1p(-error_max)
    fewer = sum(
        math.exp(logs[0] - math.lgamma(n + 1) - math.lgamma(count - n + 1) + n * logs[1] + (count - n) * logs[2])
        for n in range(wrong)
    )
    return 1 - fewer < 0.05


class _Unlearned:
    """A rule that learns nothing."""

    def learn(self, row: Row, model: LearnedModel | None, others: Sequence[LearnedModel] = ()) -> LearnedModel | None:
        return model


class Guards(_Unlearned):
    """Serves what the fixed thresholds and the guards let pass."""

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        return decide_fixed(query.error_max, query.text, neighbours), state.counters


class Cosine(_Unlearned):
    """Serves the nearest from a fixed similarity on."""

    def __init__(self, least: float) -> None:
        self._least = least

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        reasons = tuple(None if one.similarity >= self._least else MissReason.FAR for one in neighbours)
        return Decision(0 if reasons[0] is None else None, reasons), state.counters


def stream(requests: Sequence[Request], embedder: Recall, rule: Rule, judging: Judging) -> tuple[Counts, float]:
    """The counts, and the median time of a decision, search and bookkeeping included, in ms."""
    cache = SemanticCache(embedder, rule, clock=lambda: 1.0)
    labels: dict[bytes, str] = {}
    counts, comparisons = Counts(len(requests)), Comparisons()
    times: list[float] = []
    early: list[tuple[Request, Miss]] = []

    def learn(request: Request, answer: Miss, *, is_late: bool = False) -> None:
        assert answer.trial is not None
        judging.begin(answer.trial)
        judged = comparisons.compare(
            request.query, answer, request.exact, functools.partial(judging.is_same, request.exact)
        )
        if judged is None or (is_late and judged.verdict.is_right is None):
            return
        if judged.verdict.is_right is None and judging.is_early:
            early.append((request, answer))
        flips = judging.flips if judging.asked is not None else (0.0, 0.0)
        verdict = msgspec.structs.replace(judged.verdict, judge_chance=judging.asked, flips=flips, is_late=is_late)
        cache.fold([dataclasses.replace(judged, verdict=verdict)])

    for request in requests:
        started = time.perf_counter()
        (answer,) = cache.lookup([request.query])
        times.append((time.perf_counter() - started) * 1000)
        is_hit = isinstance(answer, Hit)
        counts.add(request.label, is_hit=is_hit, is_wrong=is_hit and labels[answer.exact] != request.label)
        if isinstance(answer, Hit):
            continue
        labels[request.exact] = request.label
        judging.generate(request.exact, request.query.text, request.label)
        cache.fold([comparisons.add(request.added())])
        while not cache.is_settled:
            cache.settle()
        if answer.trial is None or answer.nearest is None:
            continue
        learn(request, answer)
        while early and not judging.is_early:  # as a gateway makes them again
            learn(*early.pop(0), is_late=True)
    return counts, statistics.median(times)


def vcache(
    requests: Sequence[Request], embedder: Recall, error_max: float, noise: float, draw: random.Random
) -> tuple[Counts, float]:
    """The same for vCache's rule; one cache for each dialogue, as compat has it."""
    caches: dict[bytes, VCache] = {}
    counts = Counts(len(requests))
    times: list[float] = []
    for request in requests:
        cache = caches.setdefault(request.query.compat, VCache(error_max, embedder.info.dims, draw))
        vector = embedder.encode([request.query.text]).vectors[0]
        started = time.perf_counter()
        found = cache.lookup(vector)
        times.append((time.perf_counter() - started) * 1000)
        is_wrong = found.is_served and found.answer != request.label
        counts.add(request.label, is_hit=found.is_served, is_wrong=is_wrong)
        if not found.is_served:
            cache.learn(vector, found, request.label, draw.random() < noise)
    return counts, statistics.median(times)


def rules(error_max: float, seed: int) -> dict[str, Callable[[], Rule]]:
    made: dict[str, Callable[[], Rule]] = {
        "verified": lambda: VerifiedRule(PRIOR, error_max),
        "cold": lambda: VerifiedRule(PRIOR, error_max),
        "guards": Guards,
    }
    for least in _COSINES:
        made[f"cosine {least}"] = lambda least=least: Cosine(least)  # type: ignore[misc]
    return made


def measure(one: Labelled, embedder: Recall, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
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
                    judging = _judging(pools, embedder, noise, options, draw)
                    if name == "vcache":
                        counts, ms = vcache(requests, embedder, error_max, noise, draw)
                    else:
                        rule = rules(error_max, seed)[name]()
                        counts, ms = stream(requests, embedder, Unjudged(rule) if name == "cold" else rule, judging)
                    made = counts.result(one.name, name, error_max, seed, options.judge_model or noise, ms)
                    results.append(msgspec.structs.replace(made, questions=judging.questions))
                    print(_line(results[-1]), flush=True)
    return results


def measure_cold(sets: Sequence[Labelled], encoder: Embedder, options: argparse.Namespace) -> list[Result]:
    """Each set by the cold rule, as if it had been made from the other ones alone."""

    def streamed(one: Labelled, recall: Recall, seed: int, error_max: float, wrong: float) -> Result:
        rule = Unjudged(VerifiedRule(PRIOR, error_max, cold_wrong=wrong or _NO_SHARE))
        counts, ms = stream(one.shuffled(seed, options.requests), recall, rule, Ideal(0.0, random.Random(seed)))
        return counts.result(one.name, f"cold {wrong:.3f}", error_max, seed, 0.0, ms)

    recalls = {one.name: Recall(encoder, [one]) for one in sets}
    shares: dict[str, float] = {}
    for one in sets:
        alone = [streamed(one, recalls[one.name], seed, _COLD_BOUNDS[0], 0.0) for seed in range(options.seeds)]
        hits, wrong = sum(row.hits for row in alone), sum(row.wrong for row in alone)
        shares[one.name] = wrong / hits if hits >= _COLD_HITS else 0.0
        print(
            f"{one.name:20} without a share: {hits} hits, {100 * wrong / max(1, hits):.1f}% of them wrong", flush=True
        )
    print(f"the worst: {max(shares.values()):.3f}, and {COLD_WRONG} is built in")
    results = []
    for one in sets:
        wrong = max((share for name, share in shares.items() if _family(name) != _family(one.name)), default=0.0)
        for error_max in _COLD_BOUNDS:
            for seed in range(options.seeds):
                results.append(streamed(one, recalls[one.name], seed, error_max, wrong))
                print(_line(results[-1]), flush=True)
    return results


def _family(name: str) -> str:
    return name.partition("/")[0].partition("_")[0]


def _judging(
    pools: Pools | None, embedder: Recall, noise: float, options: argparse.Namespace, draw: random.Random
) -> Judging:
    if pools is None:
        return Ideal(noise, draw)
    return Product(pools, embedder.encode, options.judge_model, draw, is_steadfast=options.steadfast)


def measure_over_http(one: Labelled, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = one.shuffled(seed, options.requests)
        for error_max in options.error_max:
            counts = Counts(len(requests))
            draw = random.Random(seed)
            draws = None if pools is None else [pools.draw(request.label, draw) for request in requests]
            for request, (is_hit, is_wrong) in zip(
                requests, stream_over_http(requests, draws, error_max=error_max), strict=True
            ):
                counts.add(request.label, is_hit=is_hit, is_wrong=is_wrong)
            results.append(counts.result(one.name, "http", error_max, seed, 0.0, None))
            print(_line(results[-1]), flush=True)
    return results


class Unjudged(_Unlearned):
    """A rule to which no verdict ever comes."""

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        decision, counters = self._rule.decide(query, neighbours, state)
        return Decision(decision.served, decision.reasons), counters


def _line(one: Result) -> str:
    return (
        f"{one.set:20} {one.policy:12} {one.error_max:6.3f} {one.judge_noise:6.2f} {one.seed:5d} {one.requests:8d} "
        f"{100 * one.hits / one.requests:6.1f} {100 * one.wrong / one.requests:8.2f} "
        f"{100 * one.wrong / max(1, one.hits):7.2f} {100 * (one.hits - one.wrong) / max(1, one.possible):7.1f}"
        + ("       " if one.decision_ms_p50 is None else f" {one.decision_ms_p50:6.2f}")
        + "".join(
            f" {100 * hits / max(1, count):5.1f} {100 * wrong / max(1, count):5.2f}"
            for count, hits, wrong in one.halves
        )
        + (f"  {one.questions / max(1, one.requests):.2f} questions a request" if one.questions else "")
        + (f"  {one.failed} FAILED" if one.failed else "")
    )


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="./run bench semantic", description=(__doc__ or "").splitlines()[0])
    names = ["verified", "cold", "guards", *(f"cosine {least}" for least in _COSINES), "vcache"]
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--error-max", nargs="+", type=float, default=[0.01])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--judge-noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--requests", type=int, default=None, help="the first of each shuffled stream; default: all")
    parser.add_argument("--policies", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--answers", type=Path, default=None, help="lines with `label` and `answers`: one is drawn each time"
    )
    texts = parser.add_mutually_exclusive_group()
    texts.add_argument("--vary", action="store_true", help="an opening and a closing around each of --answers")
    texts.add_argument("--label-answers", action="store_true", help="the label itself, for the requests of --answers")
    parser.add_argument(
        "--judge-model", type=float, default=None, help="a judge model that errs in this share, with --answers"
    )
    parser.add_argument(
        "--steadfast", action="store_true", help="a judge model errs about a pair in both orders or in none"
    )
    parser.add_argument("--judge", type=Path, default=None, help="no stream: judge the annotated pairs of this file")
    parser.add_argument("--cold", type=Path, default=None, help="the cold rule, one set of this folder left out")
    parser.add_argument(
        "--precision", choices=["auto", "float32", "bfloat16"], default="float32", help="of the embedder, in process"
    )
    parser.add_argument("--http", action="store_true", help="through a real gateway, an empty one for each stream")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    options = parser.parse_args(argv)
    if [bool(options.folders), options.judge is not None, options.cold is not None].count(True) != 1:
        parser.error("expected folders of sets, or --judge with a file of pairs, or --cold with a folder of folders")
    if options.judge is not None:
        print(f"{'pairs':15} {'count':>6} {'same':>6} {'ruled':>6} {'false same':>11} {'false different':>16}")
        for found in judge_pairs(options.judge, open_embedder().encode):
            counts = f"{found.count:6d} {found.same:6d} {found.ruled:6d}"
            print(f"{found.name:15} {counts} {found.false_same:11d} {found.false_different:16d}")
        return 0
    if options.http and (options.policies != names or options.judge_noise != [0.0]):
        parser.error("--http is one policy, the gateway's, and has judges of its own: no --policies, no --judge-noise")
    if options.steadfast and options.judge_model is None:
        parser.error("--steadfast is about --judge-model")
    if options.answers is None and (options.vary or options.label_answers or options.judge_model is not None):
        parser.error("--vary, --label-answers and --judge-model are about --answers")
    if options.answers is not None and (
        options.judge_noise != [0.0] or (options.http and options.judge_model is not None)
    ):
        parser.error("--answers has the product's judges: no --judge-noise; --judge-model only in process")
    folders = options.folders or sorted(path.parent for path in options.cold.glob("*/stream.jsonl.gz"))
    sets = [one for folder in folders for one in load(folder)]
    pools = None
    if options.answers is not None:
        pools = load_pools(options.answers, is_varied=options.vary, is_label=options.label_answers)
        sets = [pools.of(one) for one in sets]
    print(
        f"{'set':20} {'policy':12} {'bound':>6} {'noise':>6} {'seed':>5} {'requests':>8} {'hit %':>6} {'wrong %':>8} "
        f"{'of hits':>7} {'recall':>7} {'ms':>6} {'halves: hit %, wrong %':>23}"
    )
    results: list[Result] = []
    if options.cold is not None:
        results = measure_cold(sets, open_embedder(precision=options.precision), options)
    elif options.http:
        try:
            for one in sets:
                results += measure_over_http(one, pools, options)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    else:
        encoder = open_embedder(precision=options.precision)
        for one in sets:
            results += measure(one, Recall(encoder, [one]), pools, options)
    if options.json is not None:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in results], indent=1) + "\n")
    return int(options.cold is not None and any(one.failed for one in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
