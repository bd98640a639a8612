"""Questions whose answer moves with time: the same set is asked again when its answers are so old.

A request with the note `moves` has no right answer in the cache once the answer has aged; one with `stays` does. Each is cached at
first, unless its answer may not be, and asked again in the same words. Knows no table.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.labelled import Request
from bench.meaning.stream import Traffic

AGES_S = {"a second": 1.0, "an hour": 3_600.0, "a day": 86_400.0}
_TIMED = re.compile(
    r"\b(right now|now|still|yet|tonight|today|tomorrow|so far|this morning|this week|at the moment)\b", re.IGNORECASE
)


@dataclass(frozen=True, slots=True)
class MovingRow:
    """Of so many questions of a kind how many were served an answer of that age."""

    age: str
    kind: str
    count: int
    served: int


def kind_of(request: Request) -> str:
    if request.note != "moves":
        return "stays"
    return "moves, with a time word" if _TIMED.search(request.query.text) else "moves, without"


def ask_again(requests: Sequence[Request], traffic: Traffic) -> list[MovingRow]:
    """For each age in turn."""
    for request in requests:
        traffic.store(request)
    stored_at, rows = traffic.clock.now, []
    for age, seconds in AGES_S.items():
        traffic.clock.now = stored_at + seconds
        served = [(kind_of(request), traffic.probe(request).served is not None) for request in requests]
        for kind in sorted({kind for kind, _ in served}):
            own = [is_served for name, is_served in served if name == kind]
            rows.append(MovingRow(age, kind, len(own), sum(own)))
    return rows


def of_notes(requests: Iterable[Request]) -> list[Request]:
    """The requests that say whether they move."""
    return [request for request in requests if request.note in ("moves", "stays")]
