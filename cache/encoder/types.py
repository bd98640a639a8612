"""The values and the protocol of encoders, and the key of a model's vectors.

Imports no model library.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

_MODEL_SUFFIXES = (".json", ".txt", ".safetensors", ".bin", ".model")
# of a text that fills a window: several times what words have, so that much white space fits too
_TOKEN_CHARS = 32

KEY_BYTES = 8


@dataclass(frozen=True, slots=True)
class EmbedderInfo:
    """A model that makes vectors.

    `key` (8 bytes) changes with all that can change vectors: weights, pooling, window, precision.
    """

    name: str
    dims: int
    tokens_max: int
    key: bytes

    @property
    def chars_max(self) -> int:
        """The longest text, in characters, that the tokenizer may read.

        The tokenizer needs seconds for a word of megabytes, which is one token.
        """
        return self.tokens_max * _TOKEN_CHARS


@dataclass(frozen=True, slots=True)
class Encoded:
    """The vectors of n texts. `vectors` is float32 (n, dims), of unit length; `tokens` is int32
    (n,).

    A text over the window has a vector of zeros. `unread` are the indexes of texts with an unknown
    token: texts that differ only there can have one vector.
    """

    vectors: NDArray[np.float32]
    tokens: NDArray[np.int32]
    unread: frozenset[int] = frozenset()


class PrecisionUnavailable(OSError):
    """This machine cannot run the model in that precision. The message has the reason and the
    remedy.
    """


class Embedder(Protocol):
    @property
    def info(self) -> EmbedderInfo: ...

    def encode(self, texts: Sequence[str]) -> Encoded: ...


def unknown_id(tokenizer: Any) -> int | None:
    """Return the id of a `tokenizers.Tokenizer`'s unknown token, or None without such a token."""
    id: int | None = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    return id


def unread_among(rows: Sequence[Sequence[int]], unknown: int | None) -> frozenset[int]:
    """Return the indexes of the rows of token ids that contain `unknown`."""
    return frozenset(place for place, row in enumerate(rows) if unknown is not None and unknown in row)


def folder_key(folder: Path) -> bytes:
    """Return a digest of a model's files.

    All runtimes give the same vectors to within float32's rounding.
    """
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for path in sorted(path for path in folder.rglob("*") if path.suffix in _MODEL_SUFFIXES):
        digest.update(f"{path.relative_to(folder).as_posix()} {path.stat().st_size} ".encode())
        digest.update(path.read_bytes())
    return digest.digest()
