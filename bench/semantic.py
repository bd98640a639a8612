"""How often the semantic cache hits, and how often it is wrong, on labelled requests.

    ./run bench semantic FOLDER... [--verifier ERR | --verifier-topics ERR] [--pace slow|absent] [--judge-after labels|none]
    ./run bench semantic FOLDER... --answers FILE [--vary | --label-answers] [--judge-model ERR] [--requests N] ...
    ./run bench semantic --judge FILE
    ./run bench semantic FOLDER... --http [--answers FILE] [--error-max 0.01 ...] [--seeds N] [--requests N] [--json FILE]

Streams each set in a seeded order through the product's own cache object, empty at first: a miss stores the request, and the judge
says by the labels which cached answers the fresh one equals, wrong with the probability of the noise. A hit is wrong where the
labels differ. With `--verifier` a played verifier that errs in that share is asked before an answer is served
(bench/meaning/verifier.py); with `--verifier-topics` it errs by topic. Beside the rule: fixed cosine thresholds, and vCache's rule
(bench/vcache.py).
With `--answers` each answer is drawn from its label's texts in FILE, and the product's own judges compare them (bench/answers.py).
With `--judge` the product's judges rule on the annotated pairs of FILE instead (bench/answers.py).
With `--http` the same streams go through a real gateway instead, with its own judges (bench/semantic_http.py).
A half of a stream fails where so many wrong answers are less likely than 1% at the bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from bench.answers import Ideal, Judging, Pools, Product, judge_pairs, load_pools
from bench.lab.processes import BenchError
from bench.labelled import Labelled, Request, load
from bench.meaning.rows import HEADINGS, Result, counted, line
from bench.meaning.stream import Outcome, Traffic, stream
from bench.meaning.vectors import FOLDER, Recall
from bench.meaning.verifier import Pace, PlayedVerifier
from bench.semantic_http import stream_over_http
from bench.vcache import VCache
from cache import MissReason, Query
from cache.decision.features import Neighbour
from cache.decision.model import LearnedModel, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, Rule, VerifiedRule
from cache.encoder.embedder import open_embedder

_COSINES = (0.8, 0.9, 0.95)


class Cosine:
    """A rule that serves the nearest from a fixed similarity on, and learns nothing."""

    def __init__(self, least: float) -> None:
        self._least = least

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        reasons = tuple(None if one.similarity >= self._least else MissReason.FAR for one in neighbours)
        return Decision(0 if reasons[0] is None else None, reasons), state.counters

    def learn(self, row: Row, model: LearnedModel | None, others: Sequence[LearnedModel] = ()) -> LearnedModel | None:
        return model


def vcache(
    requests: Sequence[Request], embedder: Recall, error_max: float, noise: float, draw: random.Random
) -> list[Outcome]:
    """A stream by vCache's rule; one cache for each dialogue, as compat has it."""
    caches: dict[bytes, VCache] = {}
    outcomes = []
    for request in requests:
        cache = caches.setdefault(request.query.compat, VCache(error_max, embedder.info.dims, draw))
        vector = embedder.encode([request.query.text]).vectors[0]
        started = time.perf_counter()
        found = cache.lookup(vector)
        ms = (time.perf_counter() - started) * 1000
        served = dataclasses.replace(request, label=found.answer) if found.is_served else None
        outcomes.append(Outcome(request, served, None, ms))
        if not found.is_served:
            cache.learn(vector, found, request.label, draw.random() < noise)
    return outcomes


def rules(error_max: float, seed: int) -> dict[str, Callable[[], Rule]]:
    made: dict[str, Callable[[], Rule]] = {
        "verified": lambda: VerifiedRule(PRIOR, error_max, random.Random(seed).random),
        "cold": lambda: VerifiedRule(PRIOR, error_max),
    }
    for least in _COSINES:
        made[f"cosine {least}"] = lambda least=least: Cosine(least)  # type: ignore[misc]
    return made


def measure(one: Labelled, embedder: Recall, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = one.shuffled(seed, options.requests)
        embedder.want(request.query.text for request in requests)
        for error_max in options.error_max:
            for policy in options.policies:
                learns = policy in ("verified", "vcache")
                if not learns and policy != "cold" and error_max != options.error_max[0]:
                    continue
                for noise in options.judge_noise if learns else (0.0,):
                    draw = random.Random(seed)
                    judging = None if policy == "cold" else judging_of(pools, embedder, noise, options, draw)
                    verifier = verifier_of(options, seed, error_max) if policy == "verified" else None
                    if policy == "vcache":
                        outcomes = vcache(requests, embedder, error_max, noise, draw)
                    else:
                        outcomes = stream(
                            requests, Traffic(embedder, rules(error_max, seed)[policy](), judging, verifier)
                        )
                    results.append(
                        counted(
                            outcomes,
                            name=one.name,
                            policy=policy,
                            error_max=error_max,
                            seed=seed,
                            judge_noise=options.judge_model or noise,
                            verifier=verifier_name(options) if verifier is not None else "",
                            judge_questions=judging.questions if judging is not None else 0,
                        )
                    )
                    print(line(results[-1]), flush=True)
    embedder.save()
    return results


def judging_of(
    pools: Pools | None, embedder: Recall, noise: float, options: argparse.Namespace, draw: random.Random
) -> Judging | None:
    """What compares answers after a miss, by the flags."""
    if options.judge_after == "none":
        return None
    if pools is None or options.judge_after == "labels":
        return Ideal(noise, draw)
    return Product(pools, embedder.encode, options.judge_model, draw, is_steadfast=options.steadfast)


def verifier_of(options: argparse.Namespace, seed: int, error_max: float) -> PlayedVerifier | None:
    """The played verifier of the flags; None without one."""
    by_topic = options.verifier_topics is not None
    error = options.verifier_topics if by_topic else options.verifier
    if error is None:
        return None
    return PlayedVerifier(error, seed, by_topic=by_topic, pace=Pace(options.pace), error_max=error_max)


def verifier_name(options: argparse.Namespace) -> str:
    by_topic = options.verifier_topics is not None
    error = options.verifier_topics if by_topic else options.verifier
    pace = "" if options.pace == Pace.PROMPT else f" {options.pace}"
    return f"{100 * error:g}%{' topics' if by_topic else ''}{pace}"


def measure_over_http(one: Labelled, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = one.shuffled(seed, options.requests)
        for error_max in options.error_max:
            draw = random.Random(seed)
            draws = None if pools is None else [pools.draw(request.label, draw) for request in requests]
            outcomes = list(stream_over_http(requests, draws, error_max=error_max))
            results.append(counted(outcomes, name=one.name, policy="http", error_max=error_max, seed=seed))
            print(line(results[-1]), flush=True)
    return results


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./run bench semantic", description=(__doc__ or "").splitlines()[0])
    names = ["verified", "cold", *(f"cosine {least}" for least in _COSINES), "vcache"]
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--error-max", nargs="+", type=float, default=[0.01])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--judge-noise", nargs="+", type=float, default=[0.0])
    parser.add_argument("--requests", type=int, default=None, help="the first of each shuffled stream; default: all")
    parser.add_argument("--policies", nargs="+", choices=names, default=["verified"])
    verifiers = parser.add_mutually_exclusive_group()
    verifiers.add_argument("--verifier", type=float, default=None, help="errs in this share of its words")
    verifiers.add_argument(
        "--verifier-topics", type=float, default=None, help="errs always on this share of the labels"
    )
    parser.add_argument("--pace", choices=list(Pace), default=Pace.PROMPT.value, help="of the verifier")
    parser.add_argument(
        "--judge-after",
        choices=["labels", "none", "product"],
        default=None,
        help="what compares answers after a miss; default: the product's judges with --answers, else the labels",
    )
    parser.add_argument("--vectors", type=Path, default=FOLDER, help="vectors that were made before; read and added to")
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
    parser.add_argument(
        "--precision", choices=["auto", "float32", "bfloat16"], default="float32", help="of the embedder, in process"
    )
    parser.add_argument("--http", action="store_true", help="through a real gateway, an empty one for each stream")
    parser.add_argument("--json", type=Path, default=None, help="write the rows here")
    return parser


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse flags that another one makes meaningless."""
    if bool(options.folders) is (options.judge is not None):
        parser.error("expected folders of sets, or --judge with a file of pairs")
    if options.http and (options.policies != ["verified"] or options.judge_noise != [0.0]):
        parser.error("--http is one policy, the gateway's, and has judges of its own: no --policies, no --judge-noise")
    if options.steadfast and options.judge_model is None:
        parser.error("--steadfast is about --judge-model")
    if options.answers is None and (options.vary or options.label_answers or options.judge_model is not None):
        parser.error("--vary, --label-answers and --judge-model are about --answers")
    if options.answers is None and options.judge_after == "product":
        parser.error("--judge-after product compares --answers")
    if options.answers is not None and (
        options.judge_noise != [0.0] or (options.http and options.judge_model is not None)
    ):
        parser.error("--answers has the product's judges: no --judge-noise; --judge-model only in process")


def main(argv: list[str]) -> int:
    parser = parser_of()
    options = parser.parse_args(argv)
    check(parser, options)
    if options.judge is not None:
        print(f"{'pairs':15} {'count':>6} {'same':>6} {'ruled':>6} {'false same':>11} {'false different':>16}")
        for found in judge_pairs(options.judge, open_embedder().encode):
            counts = f"{found.count:6d} {found.same:6d} {found.ruled:6d}"
            print(f"{found.name:15} {counts} {found.false_same:11d} {found.false_different:16d}")
        return 0
    sets = [one for folder in options.folders for one in load(folder)]
    pools = None
    if options.answers is not None:
        pools = load_pools(options.answers, is_varied=options.vary, is_label=options.label_answers)
        sets = [pools.of(one) for one in sets]
    print(HEADINGS)
    results: list[Result] = []
    if options.http:
        try:
            for one in sets:
                results += measure_over_http(one, pools, options)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    else:
        encoder = open_embedder(precision=options.precision)
        for one in sets:
            results += measure(one, Recall(encoder, [one.name], options.vectors), pools, options)
    if options.json is not None:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
