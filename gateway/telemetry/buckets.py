"""The format of the statistics' buckets in Redis: one hash for a minute, an hour or a day.

A field is `letter|team|kind|model` (the model last: it may contain anything); its value is an
integer. The kind is one of KINDS, or `deployment` (the model is then the deployment, and the team
empty), or `truth` (checks and reports of semantic hits), or `judges` (the model is then two judges
with a line feed between, and the team empty). In the hash of the certificates the kind is a
certificate's id. The letters:

    requests of a kind     r requests; TALLIED; tN and dN: histogram bucket N of TTFT and duration
    truth, certificates    those of `checks`; certificates have r too
    judges                 RULED
    deployment             TRIED
    SURFACE and a letter   r and TALLIED of a surface: the kind is then `surface/kind`

Knows no Redis. Invariant: adding the fields of two buckets gives the bucket of both.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec

HITS = ("exact", "semantic", "coalesced")
ANSWERED = ("exact", "semantic", "miss")  # once each; who coalesced shares the answer of another
# An error is never a miss.
KINDS = (*HITS, "miss", "bypass", "refused", "failed")
DEPLOYMENT = "deployment"
TRUTH = "truth"
JUDGES = "judges"
SURFACE = "@"
BATCH_LINES = "batch_lines"  # the surface of lines of batches; of other requests it is the record's route
REQUESTS = "r"
TTFT = "t"
DURATION = "d"
_NOT_OUR_FAILURES = frozenset({"not_cached", "deadline_exceeded"})  # 504s that the client asked for
_DENIED = "upstream_denied"  # a 4xx that is not the client's


# the attribute of a record or a sum, by its letter
TALLIED: Mapping[str, str] = {
    "p": "prompt_tokens",
    "c": "completion_tokens",
    "k": "cached_tokens",
    "$": "cost_microusd",
    "s": "avoided_microusd",
    "sv": "saved_microusd",
    "u": "uncompared",
    "ms": "saved_ms",
}
RULED: Mapping[str, str] = {
    "ss": "same_same",
    "sd": "same_different",
    "ds": "different_same",
    "dd": "different_different",
}
TRIED: Mapping[str, str] = {
    "ok": "ok",
    "no": "failed",
    "c": "completion_tokens",
    "$": "cost_microusd",
}


def amounts(metrics: Mapping[str, str], source: Any) -> Iterator[tuple[str, int]]:
    """Each letter with its amount in `source`, as an integer."""
    for letter, name in metrics.items():
        yield letter, round(getattr(source, name))


def add(metrics: Mapping[str, str], letter: str, amount: int, target: Any) -> None:
    """Add a field's amount to its attribute of `target`; unknown letters are ignored."""
    name = metrics.get(letter)
    if name is not None:
        setattr(target, name, getattr(target, name) + amount)


class Field(msgspec.Struct, frozen=True):
    """A field's name, parsed."""

    letter: str
    team_id: int
    kind: str
    model: str


def field_name(letter: str, team_id: int | str, kind: str, model: str) -> str:
    """A field's name."""
    return f"{letter}|{team_id}|{kind}|{model}"


def read_fields(reply: list[bytes]) -> Iterator[tuple[Field, int]]:
    """The fields and values of a bucket's flat reply."""
    for name, amount in zip(reply[::2], reply[1::2], strict=True):
        try:
            letter, team, kind, model = name.decode().split("|", 3)
            field = Field(letter, int(team or 0), kind, model), int(amount)
        except ValueError:
            continue  # no field of ours; UnicodeDecodeError is one, too
        yield field


def kind_of(cache: str, status: int, error: str) -> str:
    """The request's kind, one of KINDS: `cache` for an answer, `refused` for a 4xx and for a 504
    that the client asked for, `failed` for any other 5xx and for a 424.
    """
    if status < 400:
        return cache
    is_refused = (status < 500 and error != _DENIED) or error in _NOT_OUR_FAILURES
    return "refused" if is_refused else "failed"


_STEPS_PER_DOUBLING = 4
_BOUNDS_MS = [2 ** (step / _STEPS_PER_DOUBLING) / 10 for step in range(31 * _STEPS_PER_DOUBLING)]  # about 60 h


step: Callable[[float], int] = partial(bisect_left, _BOUNDS_MS)
"""The histogram bucket of a latency: 0 up to 0.1 ms, then four to each doubling."""


def percentile_ms(histogram: Mapping[int, int], share: float) -> float | None:
    """The geometric middle of the bucket with the `share`-th value; None for an empty histogram."""
    rest = math.ceil(share * sum(histogram.values()))
    for step in sorted(histogram):
        rest -= histogram[step]
        if rest <= 0:
            return float(2 ** ((step - 0.5) / _STEPS_PER_DOUBLING) / 10)
    return None


def merged(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """The sum of several histograms."""
    total: dict[int, int] = {}
    for histogram in histograms:
        for step, count in histogram.items():
            total[step] = total.get(step, 0) + count
    return total
