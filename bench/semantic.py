"""How often the semantic cache hits, and how often it is wrong, on labelled requests.

    ./run bench semantic FOLDER... [--verifier ERR | --verifier-topics ERR] [--pace slow|absent] [--judge-after labels|none]
    ./run bench semantic FOLDER... --answers FILE [--vary | --label-answers] [--judge-model ERR] [--requests N] ...
    ./run bench semantic --judge FILE
    ./run bench semantic --pairs FILE --beside FOLDER [--verdicts 1000] [--verifier ERR]
    ./run bench semantic --topic-shift FOLDER FOLDER [--requests N] [--verifier ERR]
    ./run bench semantic FOLDER... --additions [--verdicts 2000] [--verifier ERR]
    ./run bench semantic FOLDER --moving [--verifier ERR]
    ./run bench semantic FOLDER... --http [--answers FILE] [--error-max 0.01 ...] [--seeds N] [--requests N] [--json FILE]

Streams each set in a seeded order through the product's own cache object, empty at first: a miss stores the request, and the judge
says by the labels which cached answers the fresh one equals, wrong with the probability of the noise. A hit is wrong where the
labels differ. With `--verifier` a played verifier that errs in that share is asked before an answer is served
(bench/meaning/verifier.py); with `--verifier-topics` it errs by topic. Beside the rule: fixed cosine thresholds, and vCache's rule
(bench/vcache.py).
With `--zipf N` each stream has N requests drawn by Zipf from the set's labels; exact repeats are counted apart. `--parts` takes some
parts of a folder, `--join` makes one stream of them.
With `--pairs` each pair of FILE is sent alone, cold and beside verdicts on another topic (bench/meaning/pairs.py); with
`--topic-shift` the second set after the first in one namespace (bench/meaning/shift.py); with `--additions` questions of the sets
with something added (bench/meaning/additions.py); with `--moving` questions whose answer moves, again when it has aged
(bench/meaning/moving.py).
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
from bench.labelled import Labelled, Request, joined, load
from bench.meaning.moving import of_notes
from bench.meaning.pairs import load_pairs
from bench.meaning.rows import HEADINGS, Result, counted, line
from bench.meaning.stream import Outcome, Traffic, stream
from bench.meaning.trials import TrialRow, Trials, questions_of
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
_PAIR_VERDICTS, _ADDITION_VERDICTS = 1_000, 2_000


class Cosine:
    """A rule that serves the nearest from a fixed similarity on, and learns nothing."""

    def __init__(self, least: float) -> None:
        self._least = least

    def decide(
        self, query: Query, neighbours: Sequence[Neighbour], state: NamespaceState
    ) -> tuple[Decision, NamespaceCounters]:
        reasons = tuple(None if one.similarity >= self._least else MissReason.FAR for one in neighbours)
        return Decision(0 if reasons[0] is None else None, reasons), state.counters

    def learn(self, row: Row, model: LearnedModel | None) -> LearnedModel | None:
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


def rules(error_max: float) -> dict[str, Callable[[], Rule]]:
    made: dict[str, Callable[[], Rule]] = {
        "verified": lambda: VerifiedRule(PRIOR, error_max),
        "cold": lambda: VerifiedRule(PRIOR, error_max),
    }
    for least in _COSINES:
        made[f"cosine {least}"] = lambda least=least: Cosine(least)  # type: ignore[misc]
    return made


def requests_of(one: Labelled, seed: int, options: argparse.Namespace) -> list[Request]:
    """A seed's stream of a set."""
    return one.shuffled(seed, options.requests) if options.zipf is None else one.drawn(seed, options.zipf)


def measure(one: Labelled, embedder: Recall, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
    results = []
    for seed in range(options.seeds):
        requests = requests_of(one, seed, options)
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
                        outcomes = stream(requests, Traffic(embedder, rules(error_max)[policy](), judging, verifier))
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
        requests = requests_of(one, seed, options)
        for error_max in options.error_max:
            draw = random.Random(seed)
            draws = None if pools is None else [pools.draw(request.label, draw) for request in requests]
            outcomes = list(stream_over_http(requests, draws, error_max=error_max))
            results.append(counted(outcomes, name=one.name, policy="http", error_max=error_max, seed=seed))
            print(line(results[-1]), flush=True)
    return results


def try_out(sets: Sequence[Labelled], embedder: Recall, options: argparse.Namespace) -> list[Result | TrialRow]:
    """What is no stream: pairs, a shift of topic, additions, moving questions."""
    error_max = options.error_max[0]

    def traffic(seed: int) -> Traffic:
        return Traffic(embedder, rules(error_max)["verified"](), Ideal(0.0, random.Random(seed)))

    def show(text: str) -> None:
        print(text, flush=True)

    trials = Trials(embedder, traffic, lambda seed: verifier_of(options, seed, error_max), show)
    rows: list[Result | TrialRow] = []
    for seed in range(options.seeds):
        if options.pairs is not None:
            beside = joined(load(options.beside)).shuffled(seed)
            rows += trials.pairs(load_pairs(options.pairs), beside, options.verdicts or _PAIR_VERDICTS, seed)
        elif options.topic_shift:
            first, second = (joined(load(folder)) for folder in options.topic_shift)
            show(HEADINGS)
            rows += trials.shift(first, second, options.requests or _PAIR_VERDICTS, seed, error_max)
        elif options.additions:
            beside = sets[0].shuffled(seed)
            rows += trials.additions(questions_of(sets, seed), beside, options.verdicts or _ADDITION_VERDICTS, seed)
        else:
            requests = [request for one in sets for request in of_notes(one.requests)]
            others = [request for one in sets for request in one.shuffled(seed) if not of_notes([request])]
            rows += trials.moving(requests, others, seed)
    embedder.save()
    return rows


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
    parser.add_argument("--zipf", type=int, default=None, help="so many requests, drawn by Zipf from a set's labels")
    parser.add_argument("--parts", nargs="+", default=None, help="of the sets that have parts")
    parser.add_argument("--join", action="store_true", help="one stream of all parts")
    trials = parser.add_mutually_exclusive_group()
    trials.add_argument("--pairs", type=Path, default=None, help="no stream: each pair of this file alone")
    trials.add_argument("--topic-shift", type=Path, nargs=2, default=None, help="two sets in one namespace")
    trials.add_argument("--additions", action="store_true", help="no stream: questions with something added")
    trials.add_argument("--moving", action="store_true", help="no stream: questions whose answer has aged")
    parser.add_argument("--beside", type=Path, default=None, help="the set on whose answers there are verdicts")
    parser.add_argument("--verdicts", type=int, default=None, help="so many, beside which pairs or additions are sent")
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
    sources = (bool(options.folders), options.judge is not None, options.pairs is not None, bool(options.topic_shift))
    if sources.count(True) != 1:
        parser.error(
            "expected folders of sets, or --judge or --pairs with a file of pairs, or --topic-shift with two sets"
        )
    if (options.pairs is None) is not (options.beside is None):
        parser.error("--pairs and --beside come together")
    if options.verdicts is not None and options.pairs is None and not options.additions:
        parser.error("--verdicts is about --pairs and --additions")
    if options.zipf is not None and options.requests is not None:
        parser.error("--zipf says how many requests: no --requests")
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


def sets_of(options: argparse.Namespace) -> list[Labelled]:
    """The sets of the folders, by the flags."""
    sets = []
    for folder in options.folders:
        own = [one for one in load(folder) if options.parts is None or one.name.rpartition("/")[2] in options.parts]
        sets += [joined(own)] if options.join and own else own
    return sets


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
    sets = sets_of(options)
    pools = None
    if options.answers is not None:
        pools = load_pools(options.answers, is_varied=options.vary, is_label=options.label_answers)
        sets = [pools.of(one) for one in sets]
    results: list[Result | TrialRow] = []
    if options.pairs is not None or options.topic_shift or options.additions or options.moving:
        names = [one.name for one in sets] or [path.parent.name for path in (options.pairs,) if path is not None]
        names += [folder.name for folder in (options.beside, *(options.topic_shift or ())) if folder is not None]
        embedder = Recall(open_embedder(precision=options.precision), names, options.vectors)
        results = try_out(sets, embedder, options)
    elif options.http:
        print(HEADINGS)
        try:
            for one in sets:
                results += measure_over_http(one, pools, options)
        except BenchError as error:
            print(f"bench: {error}", file=sys.stderr)
            return 1
    else:
        print(HEADINGS)
        encoder = open_embedder(precision=options.precision)
        for one in sets:
            results += measure(one, Recall(encoder, [one.name], options.vectors), pools, options)
    if options.json is not None:
        options.json.write_text(json.dumps([msgspec.to_builtins(one) for one in results], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
