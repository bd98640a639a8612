"""The runs behind the table of goals, by the flags of the semantic bench. Prints each row on stderr, since the table is the output."""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.answers import load_pools
from bench.labelled import load
from bench.meaning.goals import Runs
from bench.meaning.measure import measure, measure_over_http, sets_of, try_out
from bench.meaning.rows import Result
from bench.meaning.trials import TrialRow
from bench.meaning.vectors import Recall
from cache.encoder.types import Embedder

_VERIFIER_ERROR = 0.03
_SHIFT_REQUESTS = 1_000
_TIMED = 200


def runs_of(options: argparse.Namespace, encoder: Embedder) -> Runs:
    """The runs on the sets in the folder of `--goals`."""
    data: Path = options.goals
    given = options.requests

    def flags(has_verifier: bool, **changed: object) -> argparse.Namespace:
        made = copy.copy(options)
        if not has_verifier:
            made.verifier = made.verifier_topics = None
        elif made.verifier is None and made.verifier_topics is None:
            made.verifier = _VERIFIER_ERROR
        for name, value in changed.items():
            setattr(made, name, value)
        return made

    def streams(has_verifier: bool, folder: str, parts: tuple[str, ...] | None, zipf: int | None) -> list[Result]:
        made = flags(has_verifier, folders=[data / folder], parts=parts, join=parts is not None, zipf=zipf)
        made.requests = None if zipf is not None else given
        with _aside():
            return [
                row
                for one in sets_of(made)
                for row in measure(one, Recall(encoder, [one.name], options.vectors), None, made)
            ]

    def live(has_verifier: bool, folder: str, parts: tuple[str, ...], zipf: int | None) -> list[Result]:
        made = flags(has_verifier, folders=[data / folder], parts=parts, join=True, zipf=zipf)
        made.requests = None if zipf is not None else given
        pools = load_pools(data / folder / "answers.jsonl")
        with _aside():
            return [row for one in sets_of(made) for row in measure_over_http(pools.of(one), pools, made)]

    def trial(has_verifier: bool, *names: str, **changed: object) -> list[Result | TrialRow]:
        made = flags(has_verifier, folders=[data / name for name in names], **changed)
        recalled = [*names, *(path.name for path in (made.beside, *(made.topic_shift or ())) if path is not None)]
        with _aside():
            return try_out(sets_of(made), Recall(encoder, recalled or ["near_pairs"], options.vectors), made)

    def pairs(has_verifier: bool) -> list[TrialRow]:
        found = trial(has_verifier, pairs=data / "near_pairs" / "pairs.jsonl", beside=data / "hwu64")
        return [row for row in found if isinstance(row, TrialRow)]

    def moving(has_verifier: bool) -> list[TrialRow]:
        return [row for row in trial(has_verifier, "support", moving=True) if isinstance(row, TrialRow)]

    def additions(has_verifier: bool) -> list[TrialRow]:
        found = trial(has_verifier, "clinc150", "support", additions=True)
        return [row for row in found if isinstance(row, TrialRow)]

    def shift(has_verifier: bool) -> list[Result]:
        found = trial(has_verifier, topic_shift=[data / "hwu64", data / "clinc150"], requests=_SHIFT_REQUESTS)
        return [row for row in found if isinstance(row, Result)]

    def embedding_ms() -> float:
        texts = [one.query.text for one in load(data / "clinc150")[0].requests[:_TIMED]]
        times = []
        for text in texts:
            started = time.perf_counter()
            encoder.encode([text])
            times.append((time.perf_counter() - started) * 1000)
        return sorted(times)[len(times) // 2]

    return Runs(
        streams=streams,
        live=live if options.http else None,
        pairs=pairs,
        moving=moving,
        additions=additions,
        shift=shift,
        embedding_ms=embedding_ms,
    )


@contextlib.contextmanager
def _aside() -> Iterator[None]:
    """Rows go to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
