"""How often the semantic cache hits, and how often it is wrong, on labelled requests.

    ./run bench semantic FOLDER... [--verifier ERR | --verifier-topics ERR] [--pace slow|absent] [--judge-after labels|none]
    ./run bench semantic FOLDER... --answers FILE [--vary | --label-answers] [--judge-model ERR] [--requests N] ...
    ./run bench semantic --judge FILE
    ./run bench semantic --pairs FILE --beside FOLDER [--verdicts 1000] [--verifier ERR]
    ./run bench semantic --topic-shift FOLDER FOLDER [--requests N] [--verifier ERR]
    ./run bench semantic FOLDER... --additions [--verdicts 2000] [--verifier ERR]
    ./run bench semantic FOLDER --moving [--verifier ERR]
    ./run bench semantic --goals DATA [--seeds 3] [--requests N] [--http]
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
With `--goals` the sets of the folder DATA are measured with a verifier that errs in 3% (or by `--verifier`, `--verifier-topics`) and
without any, and each goal is met or not (bench/meaning/goals.py); with `--http` the support chat goes through a gateway.
With `--http` the same streams go through a real gateway instead, with its own judges (bench/semantic_http.py).
A half of a stream fails where so many wrong answers are less likely than 1% at the bound.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import msgspec

from bench.answers import judge_pairs, load_pools
from bench.lab.processes import BenchError
from bench.meaning import goals
from bench.meaning.goal_runs import runs_of
from bench.meaning.measure import COSINES, measure, measure_over_http, sets_of, try_out
from bench.meaning.rows import HEADINGS, Result
from bench.meaning.trials import TrialRow
from bench.meaning.vectors import FOLDER, Recall
from bench.meaning.verifier import Pace
from cache.encoder.embedder import open_embedder


def parser_of() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="./run bench semantic", description=(__doc__ or "").splitlines()[0])
    names = ["verified", "cold", *(f"cosine {least}" for least in COSINES), "vcache"]
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
    parser.add_argument("--goals", type=Path, default=None, help="the table of goals, on the sets of this folder")
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
    sources = (
        bool(options.folders),
        options.judge is not None,
        options.pairs is not None,
        bool(options.topic_shift),
        options.goals is not None,
    )
    if sources.count(True) != 1:
        parser.error(
            "expected folders of sets, --judge or --pairs with a file of pairs, --topic-shift with two sets, or --goals with a folder"
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


def show_goals(options: argparse.Namespace) -> int:
    """Print the table of goals; 1 if one is not met, or a gateway does not start."""
    is_met = True
    try:
        runs = runs_of(options, open_embedder(precision=options.precision))
        print(goals.HEADINGS, flush=True)
        for goal in goals.goals(runs):
            print(goals.line(goal), flush=True)
            is_met = is_met and goal.with_verifier.is_met is not False and goal.without.is_met is not False
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    return 0 if is_met else 1


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
    if options.goals is not None:
        return show_goals(options)
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
