"""Labelled requests, as a stream for the semantic cache: a folder with `stream.jsonl.gz` (or without .gz), one request a line.

A line has `text`, `label` (the same label: the same right answer) and perhaps `system`, `history` (the earlier turns of its dialogue,
the oldest first) and `part`: the lines of each part are a set of their own. Vectors are kept in `.bench/vectors`, so that a set is
embedded once. Knows no policy.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cache import Hit, Miss, Partition, Query, fingerprint
from cache.encoder.types import Embedder, EmbedderInfo, Encoded, Tokens
from cache.semantic.cache import PromptAdded
from cache.verdicts.records import AnswerJudged, Source, Verdict, answer_name

TENANT = Partition(bytes(16))
_VECTORS = Path(".bench/vectors")
_FOREVER = 1e12
_PORTION = 512


@dataclass(frozen=True, slots=True)
class Request:
    """One labelled request and its dialogue. `exact` is unique over the set: to it an equal text is another request, no exact hit."""

    query: Query
    exact: bytes
    label: str
    messages: Sequence[Mapping[str, str]]

    def added(self) -> PromptAdded:
        query = self.query
        return PromptAdded(TENANT, self.exact, query.compat, query.text, 0.0, _FOREVER, context=query.context)


@dataclass(frozen=True, slots=True)
class Labelled:
    """A set by its folder's name, `folder/part` where its lines have parts."""

    name: str
    requests: tuple[Request, ...]

    def shuffled(self, seed: int, count: int | None = None) -> list[Request]:
        """The requests in an order."""
        order = np.random.default_rng(seed).permutation(len(self.requests))
        return [self.requests[place] for place in order[:count]]


def load(folder: Path) -> list[Labelled]:
    """The sets of a folder, by the order in which their parts come. Raises OSError or ValueError where it has no readable stream."""
    parts: dict[str, list[Request]] = {}
    plain = folder / "stream.jsonl"
    with plain.open() if plain.exists() else gzip.open(folder / "stream.jsonl.gz", "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            name = f"{folder.name}/{row['part']}" if "part" in row else folder.name
            parts.setdefault(name, []).append(_request(row, number))
    return [Labelled(name, tuple(requests)) for name, requests in parts.items()]


def _request(row: Mapping[str, Any], number: int) -> Request:
    turns = [*row.get("history", ()), row["text"]]
    messages = [
        {"role": "assistant" if (len(turns) - place) % 2 == 0 else "user", "content": turn}
        for place, turn in enumerate(turns)
    ]
    if row.get("system") is not None:
        messages.insert(0, {"role": "system", "content": row["system"]})
    exact = hashlib.blake2b(str(number).encode(), digest_size=16).digest()
    return Request(_query(messages, row["text"]), exact, str(row["label"]), messages)


def _query(messages: Sequence[Mapping[str, str]], text: str) -> Query:
    made = fingerprint({"model": "bench", "messages": messages}, TENANT)
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


class Recall:
    """An embedder that has seen all texts of some sets before, and remembers others."""

    def __init__(self, embedder: Embedder, sets: Sequence[Labelled]) -> None:
        self.info: EmbedderInfo = embedder.info
        self._embedder = embedder
        self._known: dict[str, tuple[NDArray[np.float32], int]] = {}
        for one in sets:
            texts = list(dict.fromkeys(request.query.text for request in one.requests))
            encoded = _kept(embedder, one.name, texts)
            self._known |= dict(zip(texts, zip(encoded.vectors, encoded.tokens.tolist(), strict=True), strict=True))

    def encode(self, texts: Sequence[str]) -> Encoded:
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        if new:
            encoded = self._embedder.encode(new)
            self._known |= dict(zip(new, zip(encoded.vectors, encoded.tokens.tolist(), strict=True), strict=True))
        found = [self._known[text] for text in texts]
        tokens = np.array([count for _, count in found], dtype=np.int32)
        return Encoded(np.stack([vector for vector, _ in found]).astype(np.float32), tokens)

    def encode_tokens(self, text: str) -> Tokens | None:
        return self._embedder.encode_tokens(text)


def _kept(embedder: Embedder, name: str, texts: Sequence[str]) -> Encoded:
    """The vectors of a set, in float16 on disk, as the store keeps them."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=6).hexdigest()
    path = _VECTORS / f"{name.replace('/', '-')}-{digest}-{embedder.info.key.hex()}.npz"
    if not path.exists():
        portions = [embedder.encode(texts[at : at + _PORTION]) for at in range(0, len(texts), _PORTION)]
        path.parent.mkdir(parents=True, exist_ok=True)
        np.savez(
            path,
            vectors=np.concatenate([one.vectors for one in portions]).astype(np.float16),
            tokens=np.concatenate([one.tokens for one in portions]),
        )
    with np.load(path) as kept:
        return Encoded(kept["vectors"], kept["tokens"])
