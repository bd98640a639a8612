"""`./run bench certificate`: does the certificate cover the truth at every moment, and how soon does
it say much?

Streams are simulated; the audits' policy, the counts and the limits are the product's own. A would-
be hit has a risk of its own and an answer that is wrong by it; audits and shadow checks are drawn,
verdicts come late, a share never comes, and a judge errs. Knows no gateway.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from cache.decision.model import audit_chance
from gateway.telemetry.measured_error import CheckCounts, audited, served, served_wrong, settled, shadow_share

ERROR_MAX = 0.01
_RISKS = (0.001, 0.004, 0.02, 0.08)  # of would-be hits, in equal parts, before they are scaled
_LATE = 40  # requests until a verdict comes, at most


@dataclass(frozen=True)
class Stream:
    """What is simulated. `error` is the share of all requests answered wrongly; it is multiplied by
    `drift` in the last third. `lost` is the share of comparisons without a verdict, of wrong
    answers twice that.
    """

    name: str
    error: float = ERROR_MAX / 2
    hit_share: float = 0.5
    shadow_share: float = 0.0
    drift: float = 1.0
    lost: float = 0.0
    judge_error: float = 0.0
    allowed_error: float = 0.0  # what the certificate allows for
    is_blind: bool = False  # risks say nothing about which answers are wrong


STREAMS = (
    Stream("steady, default audits"),
    Stream("steady, shadow_share 0.2", shadow_share=0.2),
    Stream("steady, shadow_share 0.3", shadow_share=0.3),
    Stream("drift to six times the error", drift=6.0),
    Stream("the same, shadow_share 0.2", drift=6.0, shadow_share=0.2),
    Stream("errors where none are expected", is_blind=True, drift=6.0),
    Stream("judges abstain, twice as often from wrong ones", lost=0.3, drift=3.0, shadow_share=0.2),
    Stream("judges err in 3%, allowed for", judge_error=0.03, allowed_error=0.03, drift=3.0, shadow_share=0.2),
    Stream("all of it", drift=6.0, lost=0.2, judge_error=0.05, allowed_error=0.05, shadow_share=0.1),
)


@dataclass(frozen=True)
class Run:
    """One stream's outcome: whether the limits held at each moment, and the last ones, as shares."""

    is_above: bool  # the upper limit was never below the truth
    is_below: bool
    truth: float
    low: float
    high: float


def simulate(stream: Stream, requests: int, draw: random.Random) -> Run:
    """One stream from its first request; the limits are compared with the truth whenever either may
    have changed.
    """
    counts, wrong, accepted = CheckCounts(), 0, 0
    waiting = deque[tuple[int, tuple[str, ...]]]()
    is_above = is_below = True
    scale = stream.error / stream.hit_share / (sum(_RISKS) / len(_RISKS))
    for number in range(requests):
        counts.requests += 1
        is_news = False
        if draw.random() < stream.hit_share:
            risk = draw.choice(_RISKS)
            chance_wrong = (sum(_RISKS) / len(_RISKS) if stream.is_blind else risk) * scale
            chance_wrong *= stream.drift if number >= requests * 2 // 3 else 1.0
            is_wrong = draw.random() < min(1.0, chance_wrong)
            audit = audit_chance(accepted, 1 - risk)
            accepted += 1
            share = shadow_share(stream.shadow_share, counts.hits)
            chance = audit + (1 - audit) * share
            is_audit = draw.random() < audit
            is_shadow = not is_audit and draw.random() < share
            counts.hits += not is_audit
            for event in audited(chance) if is_audit else served(chance, is_compared=is_shadow):
                counts.count(event)
            wrong += is_wrong and not is_audit
            is_news = is_wrong
            if (is_audit or is_shadow) and draw.random() >= stream.lost * (1 + is_wrong):
                said = is_wrong != (draw.random() < stream.judge_error)
                events = settled(chance, "judge", is_wrong=said, is_audit=is_audit)
                waiting.append((number + draw.randrange(1, _LATE), events))
        for _, events in _due(waiting, number):
            is_news = True
            for event in events:
                counts.count(event)
        if is_news:
            low, high = served_wrong(counts, stream.allowed_error)
            is_above, is_below = is_above and wrong <= high + 1e-9, is_below and low <= wrong + 1e-9
    for _, events in waiting:
        for event in events:
            counts.count(event)
    low, high = served_wrong(counts, stream.allowed_error)
    return Run(is_above, is_below, wrong / requests, low / requests, high / requests)


def _due(waiting: deque[tuple[int, tuple[str, ...]]], number: int) -> Iterator[tuple[int, tuple[str, ...]]]:
    """The verdicts that have come by now, each once."""
    for _ in range(len(waiting)):
        one = waiting.popleft()
        if one[0] <= number:
            yield one
        else:
            waiting.append(one)


def measure(stream: Stream, requests: int, streams: int, seed: int) -> dict[str, object]:
    """The figures of many runs of one kind of stream."""
    runs = [simulate(stream, requests, random.Random(f"{seed}:{number}")) for number in range(streams)]
    highs = sorted(run.high for run in runs)
    return {
        "stream": asdict(stream),
        "requests": requests,
        "streams": streams,
        "covered": sum(run.is_above and run.is_below for run in runs) / streams,
        "above": sum(run.is_above for run in runs) / streams,
        "truth": statistics.mean(run.truth for run in runs),
        "low": statistics.median(run.low for run in runs),
        "high": statistics.median(highs),
        "high_p90": highs[int(0.9 * (streams - 1))],
        "within": sum(high <= 2 * ERROR_MAX for high in highs) / streams,
    }


def main(argv: list[str]) -> int:
    """Measure each kind of stream; returns 1 where one is covered in less than 95%."""
    parser = argparse.ArgumentParser(prog="./run bench certificate", description=__doc__.split("\n\n")[0])
    parser.add_argument("--streams", type=int, default=1_000, help="of each kind")
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="the kinds whose name has this text")
    parser.add_argument("--json", type=Path, help="append a row a kind to this file")
    options = parser.parse_args(argv)
    print(f"{options.streams} streams of {options.requests} requests each, bound {ERROR_MAX:.0%}; shares in %\n")
    print(f"{'stream':48}{'covered':>9}{'wrong':>8}{'low':>7}{'high':>7}{'p90':>7}{'at most twice the bound':>25}")
    is_covered = True
    for stream in STREAMS:
        if options.only not in stream.name:
            continue
        row = measure(stream, options.requests, options.streams, options.seed)
        figures = {
            name: 100 * float(str(row[name])) for name in ("covered", "truth", "low", "high", "high_p90", "within")
        }
        print(
            f"{stream.name:48}{figures['covered']:9.1f}{figures['truth']:8.2f}{figures['low']:7.2f}"
            f"{figures['high']:7.2f}{figures['high_p90']:7.2f}{figures['within']:25.1f}",
            flush=True,
        )
        is_covered = is_covered and figures["covered"] >= 95.0
        if options.json is not None:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0 if is_covered else 1
