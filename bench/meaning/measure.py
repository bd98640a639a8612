"""The runs of the semantic bench by its flags: streams under a policy, in process or through a gateway, and trials.

Knows how a policy, a judge and a verifier are made of flags, and prints each row as it comes.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import time
from collections.abc import Callable, Sequence

from bench.answers import Ideal, Judging, Pools, Product
from bench.labelled import Labelled, Request, joined, load
from bench.meaning.gate import Gate
from bench.meaning.moving import of_notes
from bench.meaning.pairs import load_pairs
from bench.meaning.rows import HEADINGS, Result, counted, line
from bench.meaning.stream import Outcome, Traffic, stream
from bench.meaning.trials import TrialRow, Trials, questions_of
from bench.meaning.vectors import Recall
from bench.meaning.verifier import Pace, PlayedVerifier
from bench.semantic_http import stream_over_http
from bench.vcache import VCache
from cache import MissReason, Query
from cache.decision.features import Neighbour
from cache.decision.model import LearnedModel, Row
from cache.decision.prior import PRIOR
from cache.decision.rule import Decision, NamespaceCounters, NamespaceState, Rule, VerifiedRule

COSINES = (0.8, 0.9, 0.95)
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

    def learn(self, row: Row, model: LearnedModel | None, *_: object) -> LearnedModel | None:
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
    for least in COSINES:
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
                    gate = gate_of(options, seed, error_max) if policy == "verified" else None
                    if policy == "vcache":
                        outcomes = vcache(requests, embedder, error_max, noise, draw)
                    else:
                        outcomes = stream(requests, Traffic(embedder, rules(error_max)[policy](), judging, gate))
                    results.append(
                        counted(
                            outcomes,
                            name=one.name,
                            policy=policy,
                            error_max=error_max,
                            seed=seed,
                            judge_noise=options.judge_model or noise,
                            verifier=gate.verifier.name if gate is not None and gate.verifier is not None else "",
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


def gate_of(options: argparse.Namespace, seed: int, error_max: float) -> Gate:
    """What a gateway decides, with the played verifier of the flags or none."""
    return Gate(verifier_of(options, seed), error_max, seed)


def verifier_of(options: argparse.Namespace, seed: int) -> PlayedVerifier | None:
    """The played verifier of the flags; None without one."""
    by_topic = options.verifier_topics is not None
    error = options.verifier_topics if by_topic else options.verifier
    return None if error is None else PlayedVerifier(error, seed, by_topic=by_topic, pace=Pace(options.pace))


def measure_over_http(one: Labelled, pools: Pools | None, options: argparse.Namespace) -> list[Result]:
    """The same streams through a real gateway. Raises BenchError."""
    results = []
    for seed in range(options.seeds):
        requests = requests_of(one, seed, options)
        for error_max in options.error_max:
            draw = random.Random(seed)
            draws = None if pools is None else [pools.draw(request.label, draw) for request in requests]
            verifier = verifier_of(options, seed)
            outcomes = list(stream_over_http(requests, draws, verifier, error_max=error_max))
            name = verifier.name if verifier is not None else ""
            results.append(
                counted(outcomes, name=one.name, policy="http", error_max=error_max, seed=seed, verifier=name)
            )
            print(line(results[-1]), flush=True)
    return results


def try_out(sets: Sequence[Labelled], embedder: Recall, options: argparse.Namespace) -> list[Result | TrialRow]:
    """What is no stream: pairs, a shift of topic, additions, moving questions."""
    error_max = options.error_max[0]

    def traffic(seed: int) -> Traffic:
        return Traffic(embedder, rules(error_max)["verified"](), Ideal(0.0, random.Random(seed)))

    def show(text: str) -> None:
        print(text, flush=True)

    trials = Trials(embedder, traffic, lambda seed: gate_of(options, seed, error_max), show)
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


def sets_of(options: argparse.Namespace) -> list[Labelled]:
    """The sets of the folders, by the flags."""
    sets = []
    for folder in options.folders:
        own = [one for one in load(folder) if options.parts is None or one.name.rpartition("/")[2] in options.parts]
        sets += [joined(own)] if options.join and own else own
    return sets
