"""An embedder that remembers: the vectors of texts by their digest, in one file a set.

Knows no set and no policy. Vectors are rounded to float16, as the store keeps them, also the first time: a run that reads a file
gives what the run that wrote it gave.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cache.encoder.types import Embedder, EmbedderInfo, Encoded

FOLDER = Path(".bench/vectors")
_PORTION = 512
_Row = tuple[NDArray[np.float16], int, bool]  # a vector, its text's tokens, and whether one of them is unknown


class Recall:
    """`names`: the sets whose files in `folder` are read; `save` writes what is new to that of the first."""

    def __init__(self, embedder: Embedder, names: Sequence[str], folder: Path = FOLDER) -> None:
        self.info: EmbedderInfo = embedder.info
        self._embedder = embedder
        self._paths = [folder / f"{name.partition('/')[0]}-{embedder.info.key.hex()}.npz" for name in names]
        self._known: dict[bytes, _Row] = {}
        self._own: dict[bytes, _Row] = {}  # of the first file, and new ones
        for path in dict.fromkeys(self._paths):
            rows = _read(path)
            self._known |= rows
            self._own |= rows if path == self._paths[0] else {}
        self._saved = len(self._own)

    def want(self, texts: Iterable[str]) -> None:
        """Embed these texts at once: many are cheaper together."""
        missing = [text for text in dict.fromkeys(texts) if _digest(text) not in self._known]
        for at in range(0, len(missing), _PORTION):
            self._remember(missing[at : at + _PORTION])

    def encode(self, texts: Sequence[str]) -> Encoded:
        self.want(texts)
        rows = [self._known[_digest(text)] for text in texts]
        return Encoded(
            np.stack([vector for vector, _, _ in rows]).astype(np.float32),
            np.array([tokens for _, tokens, _ in rows], dtype=np.int32),
            frozenset(at for at, (_, _, is_unread) in enumerate(rows) if is_unread),
        )

    def save(self) -> None:
        """Write what the file of the first set does not have yet."""
        if len(self._own) == self._saved:
            return
        path, rows = self._paths[0], self._own
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part.npz")
        np.savez(
            part,
            digests=np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), -1),
            vectors=np.stack([vector for vector, _, _ in rows.values()]),
            tokens=np.array([tokens for _, tokens, _ in rows.values()], dtype=np.int32),
            unread=np.array([is_unread for _, _, is_unread in rows.values()]),
        )
        part.rename(path)
        self._saved = len(rows)

    def _remember(self, texts: Sequence[str]) -> None:
        encoded = self._embedder.encode(texts)
        vectors, tokens = encoded.vectors.astype(np.float16), encoded.tokens.tolist()
        rows = {_digest(text): (vectors[at], tokens[at], at in encoded.unread) for at, text in enumerate(texts)}
        self._known |= rows
        self._own |= rows


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


def _read(path: Path) -> dict[bytes, _Row]:
    if not path.exists():
        return {}
    with np.load(path) as kept:
        digests = [row.tobytes() for row in kept["digests"]]
        return dict(
            zip(
                digests,
                zip(kept["vectors"], kept["tokens"].tolist(), kept["unread"].tolist(), strict=True),
                strict=True,
            )
        )
