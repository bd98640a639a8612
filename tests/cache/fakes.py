"""Stand-ins for the encoder and for time, and short ways to say a request and its entry."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from cache import Entry, Fingerprint, Partition, Query, Recorded, fingerprint, partition
from cache.encoder.types import EmbedderInfo, Encoded

ACME, OTHER = partition(b"secret", "team:1"), partition(b"secret", "team:2")


class Clock:
    """A clock that only tests move; `now` is unix seconds."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


class FakeEmbedder:
    """Deterministic unit vectors: one for all texts, or one for each set of words. `encoded` lists every text it worked on."""

    def __init__(self, is_constant: bool = False, dims: int = 16, tokens_max: int = 20) -> None:
        self.info = EmbedderInfo("fake", dims, tokens_max, b"fakefake")
        self.encoded: list[str] = []
        self._is_constant = is_constant

    def encode(self, texts: Sequence[str]) -> Encoded:
        self.encoded += texts
        tokens = np.array([len(text.split()) for text in texts], dtype=np.int32)
        vectors = np.stack([self._vector(text) for text in texts])
        vectors[tokens > self.info.tokens_max] = 0
        return Encoded(vectors, tokens)

    def _vector(self, text: str) -> Any:
        what = "" if self._is_constant else " ".join(sorted(set(text.casefold().split())))
        seed = int.from_bytes(hashlib.blake2b(what.encode(), digest_size=8).digest(), "big")
        vector = np.random.default_rng(seed).normal(size=self.info.dims).astype(np.float32)
        return vector / np.linalg.norm(vector)


def ask(text: str, tenant: Partition = ACME, **fields: Any) -> Fingerprint:
    return fingerprint({"model": "m", "messages": [{"role": "user", "content": text}], **fields}, tenant)


def query(text: str, tenant: Partition = ACME, error_max: float | None = None, **fields: Any) -> Query:
    return Query(tenant, ask(text, tenant, **fields).compat, text, error_max)


def entry_for(fp: Fingerprint, now: float, answer: str = "42", **fields: Any) -> Entry:
    values: dict[str, Any] = {"ttl_s": 60.0, "namespace": fp.namespace, **fields}
    chunks = (Recorded(answer.encode()), Recorded(b"{}", is_whole=True))
    return Entry(fp.partition, fp.exact, fp.compat, fp.text, chunks, now, **values)
