"""Labelled requests, as a stream for the semantic cache: a folder with `stream.jsonl.gz` (or without .gz), one request a line.

A line has `text`, `label` (the same label: the same right answer) and perhaps `system`, `history` (the earlier turns of its dialogue,
the oldest first) and `part`: the lines of each part are a set of their own; `id`, `must_miss_with` (the id of a near request of
another label) and `note` are for the tables. Knows no policy.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cache import Hit, Miss, Partition, Query, fingerprint
from cache.context.learned import Learned
from cache.context.relax import relaxed
from cache.semantic.cache import PromptAdded
from cache.verdicts.records import AnswerJudged, Source, Verdict, answer_name

TENANT = Partition(bytes(16))
_FOREVER = 1e12


@dataclass(frozen=True, slots=True)
class Request:
    """One labelled request and its dialogue. `exact` is unique over the set: to it an equal text is another request, no exact hit."""

    query: Query
    exact: bytes
    label: str
    messages: Sequence[Mapping[str, str]]
    id: str = ""
    near: str = ""  # the id of a request of another label that is near
    note: str = ""

    def added(self, at: float = 0.0) -> PromptAdded:
        return PromptAdded(TENANT, self.exact, self.query.compat, self.query.text, at, _FOREVER)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A set by its folder's name, `folder/part` where its lines have parts."""

    name: str
    requests: tuple[Request, ...]

    def shuffled(self, seed: int, count: int | None = None) -> list[Request]:
        """The requests in an order, each with the compat that a gateway gives it which has seen those before it."""
        order = np.random.default_rng(seed).permutation(len(self.requests))
        return self._seen_in_order(order[:count].tolist())

    def drawn(self, seed: int, count: int) -> list[Request]:
        """So many requests, the label of each drawn by Zipf (the n-th of a seeded order has 1/n of the weight of the first) and its
        wording evenly: the same request may come again."""
        rng = np.random.default_rng(seed)
        places: dict[str, list[int]] = {}
        for place, request in enumerate(self.requests):
            places.setdefault(request.label, []).append(place)
        own = [places[label] for label in rng.permutation(sorted(places)).tolist()]
        weights = 1.0 / np.arange(1, len(own) + 1)
        labels = rng.choice(len(own), count, p=weights / weights.sum()).tolist()
        return self._seen_in_order([own[label][rng.integers(len(own[label]))] for label in labels])

    def _seen_in_order(self, places: Sequence[int]) -> list[Request]:
        learned = Learned()
        return [
            replace(one, query=_query(one.messages, one.query.text, learned))
            for one in (self.requests[place] for place in places)
        ]


def joined(sets: Sequence[Labelled]) -> Labelled:
    """One set of all requests of several; its name has theirs."""
    name = sets[0].name + "".join("+" + one.name.rpartition("/")[2] for one in sets[1:])
    return Labelled(name, tuple(request for one in sets for request in one.requests))


def load(folder: Path) -> list[Labelled]:
    """The sets of a folder, by the order in which their parts come. Raises OSError or ValueError where it has no readable stream."""
    parts: dict[str, list[Request]] = {}
    plain = folder / "stream.jsonl"
    with plain.open() if plain.exists() else gzip.open(folder / "stream.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            name = f"{folder.name}/{row['part']}" if "part" in row else folder.name
            parts.setdefault(name, []).append(request_of(row, f"{folder.name} {number}"))
    return [Labelled(name, tuple(requests)) for name, requests in parts.items()]


def request_of(row: Mapping[str, Any], name: str) -> Request:
    turns = [*row.get("history", ()), row["text"]]
    messages = [
        {"role": "assistant" if (len(turns) - place) % 2 == 0 else "user", "content": turn}
        for place, turn in enumerate(turns)
    ]
    if row.get("system") is not None:
        messages.insert(0, {"role": "system", "content": row["system"]})
    exact = hashlib.blake2b(name.encode(), digest_size=16).digest()
    return Request(
        query=_query(messages, row["text"]),
        exact=exact,
        label=str(row["label"]),
        messages=messages,
        id=str(row.get("id", "")),
        near=str(row.get("must_miss_with", "")),
        note=str(row.get("note", "")),
    )


def _query(messages: Sequence[Mapping[str, str]], text: str, learned: Learned | None = None) -> Query:
    body = {"model": "bench", "messages": messages}
    made = relaxed(fingerprint(body, TENANT), body, learned=learned)
    return Query(TENANT, made.compat, made.text or text, context=made.context)


class Comparisons:
    """Verdicts on fresh answers and groups of equal ones, for a cache without the gateway and Redis, which make them else."""

    def __init__(self) -> None:
        self._answers: dict[bytes, tuple[float, bytes]] = {}  # by entry: when it was made, and its group

    def add(self, entry: PromptAdded) -> PromptAdded:
        """An entry that the cache gets; it is returned."""
        self._answers[entry.exact] = entry.created_at, answer_name(entry.exact, entry.created_at)
        return entry

    def compare(
        self, query: Query, answer: Hit | Miss, exact: bytes, same: Callable[[bytes], bool | None]
    ) -> AnswerJudged | None:
        """The verdict on the likeliest neighbour of `query`, whose fresh answer is entry `exact`. None where `answer`, the decision,
        had nothing to compare with, or nothing can be learned. `same` tells whether the fresh answer equals that of another entry,
        None if that can't be decided."""
        trial = answer.trial
        if trial is None:
            return None
        first, *others = trial.ranked
        is_right = same(first)
        if is_right is None and not trial.features:
            return None
        equal = first if is_right else next((one for one in others if same(one)), None)
        created_at, joined = self._answers[exact][0], self._answers[equal][1] if equal is not None else None
        if joined is not None:
            self._answers[exact] = created_at, joined
        verdict = Verdict(
            source=Source.AUDIT if trial.chance < 1.0 else Source.MISS,
            compat=query.compat,
            is_right=is_right,
            trial=trial,
            at=created_at,
            exact=exact,
            created_at=created_at,
        )
        return AnswerJudged(query.partition, verdict, self._answers[first][1], joined)
