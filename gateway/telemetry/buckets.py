"""The fields of the statistics in Redis: one hash for a minute, an hour or a day.

A field is `count|team|kind|surface|model` (the model last: it may contain anything); its value is an
integer. `count` is a field of a struct, with a number or a judge behind a colon where there are many:

    kind          counts of           with a colon
    one of KINDS  `Tally`             ttft:N, duration:N, verified:N: requests in step N of a histogram
    deployment    `DeploymentTally`   (the model is the deployment; no team)
    checks        `CheckCounts`       right:N and others of `Cell`, by the share in thousandths; judge:NAME

In the hash of the certificates the kind is a certificate's id, and the counts are those of checks.
Knows no Redis. Invariant: adding the fields of two buckets gives the bucket of both.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import msgspec

HITS = ("exact", "semantic", "coalesced")
ANSWERED = ("exact", "semantic", "miss")  # once each; who coalesced shares the answer of another
# An error is never a miss.
KINDS = (*HITS, "miss", "bypass", "refused", "failed")
DEPLOYMENT = "deployment"
CHECKS = "checks"
BATCH_LINES = "batch_lines"  # the surface of lines of batches; of other requests it is the record's route
REQUESTS = "requests"
TTFT = "ttft"
DURATION = "duration"
VERIFIED = "verified"  # the wait for a verifier's word
NOT_OUR_FAILURES = frozenset({"not_cached", "deadline_exceeded"})  # 504s that the client asked for
_DENIED = "upstream_denied"  # a 4xx that is not the client's


class Field(msgspec.Struct, frozen=True):
    """A field's name, parsed."""

    count: str
    team_id: int
    kind: str
    surface: str
    model: str


def field_name(count: str, team_id: int | str, kind: str, surface: str, model: str) -> str:
    """The name of a field, of its parts."""
    return f"{count}|{team_id}|{kind}|{surface}|{model}"


def read_fields(reply: list[bytes]) -> Iterator[tuple[Field, int]]:
    """The fields and values of a bucket's flat reply."""
    for name, amount in zip(reply[::2], reply[1::2], strict=True):
        try:
            count, team, kind, surface, model = name.decode().split("|", 4)
            field = Field(count, int(team or 0), kind, surface, model), int(amount)
        except ValueError:
            continue  # no field of ours; UnicodeDecodeError is one, too
        yield field


def add(sums: msgspec.Struct, count: str, amount: int) -> None:
    """Add `amount` to a count of `sums`; a count of another version is ignored."""
    known = getattr(sums, count) if count in sums.__struct_fields__ else None
    if isinstance(known, int):
        setattr(sums, count, known + amount)


def kind_of(cache: str, status: int, error: str) -> str:
    """The request's kind, one of KINDS: `cache` for an answer, `refused` for a 4xx and for a 504
    that the client asked for, `failed` for any other 5xx and for a 424.
    """
    if status < 400:
        return cache
    is_refused = (status < 500 and error != _DENIED) or error in NOT_OUR_FAILURES
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
