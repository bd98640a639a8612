"""Another topic in a namespace that has learned from one: what it gets, and what the first topic keeps.

Both sets are streamed into one namespace. The second topic after the first stands beside the second topic alone; what follows of the
first one stands beside the same requests without the second topic between. Knows no table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.labelled import Labelled, Request
from bench.meaning.stream import Outcome, Traffic, stream


@dataclass(frozen=True, slots=True)
class Shifted:
    """The outcomes of the second set alone and after the first, and of the first one's later half without and with the second
    between."""

    alone: list[Outcome]
    after: list[Outcome]
    kept_alone: list[Outcome]
    kept: list[Outcome]


def shift(first: Sequence[Request], second: Sequence[Request], traffic: Callable[[], Traffic]) -> Shifted:
    """`traffic` makes an empty cache."""
    half = len(first) // 2
    apart = traffic()
    stream(first[:half], apart)
    together = traffic()
    stream(first[:half], together)
    after = stream(second, together)
    return Shifted(
        alone=stream(second, traffic()),
        after=after,
        kept_alone=stream(first[half:], apart),
        kept=stream(first[half:], together),
    )


def labels_apart(one: Labelled) -> Labelled:
    """The set with its name in each label: another set's labels are other ones."""
    return Labelled(one.name, tuple(replace(each, label=f"{one.name}: {each.label}") for each in one.requests))
