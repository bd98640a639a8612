"""Reads a SentencePiece model (`tokenizer.model`) of checkpoints without a tokenizer.json.

The format is google/sentencepiece's sentencepiece_model.proto; only the fields that decide ids are
read. The result has GGUF's keys for the same facts, so that one builder serves both. Knows bytes,
no tokenizer. Invariant: a model whose ids cannot be rebuilt is refused by name.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from local_engine.config import ModelError

# Field numbers of the messages ModelProto, SentencePiece, TrainerSpec and NormalizerSpec
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _UNK_ID, _BOS_ID, _EOS_ID = 3, 40, 41, 42
_CHARSMAP, _HAS_PREFIX, _STRIPS_SPACES = 2, 3, 4
_MODELS = {1: "t5", 2: "llama"}  # unigram, BPE: in GGUF's words

Field = tuple[int, int | bytes]


def sentencepiece_metadata(path: Path) -> dict[str, Any]:
    """The vocabulary under GGUF's keys. Raises ModelError."""
    parts: dict[int, list[dict[int, int | bytes]]] = {_PIECES: [], _TRAINER: [{}], _NORMALIZER: [{}]}
    try:
        for number, value in _fields(path.read_bytes()):
            if number in parts and isinstance(value, bytes):
                parts[number].append(dict(_fields(value)))
        pieces, trainer, normalizer = parts[_PIECES], parts[_TRAINER][-1], parts[_NORMALIZER][-1]
        tokens = [bytes(piece[_TEXT]).decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(_SCORE, bytes(4)))[0] for piece in pieces]  # type: ignore[arg-type]
    except (OSError, ValueError, KeyError, IndexError, TypeError, struct.error) as error:
        raise ModelError(f"{path} is not a SentencePiece model: {type(error).__name__}: {error}") from None
    model = _MODELS.get(int(trainer.get(_MODEL_TYPE, 1)))
    if model is None or not tokens:
        raise ModelError(f"{path} is no unigram or BPE model of SentencePiece")
    ids = {name: _signed(trainer.get(number, first)) for name, number, first in _ID_FIELDS}
    return {
        "tokenizer.ggml.model": model,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": [int(piece.get(_KIND, 1)) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(_HAS_PREFIX, 1)),
        "tokenizer.ggml.remove_extra_whitespaces": bool(normalizer.get(_STRIPS_SPACES, 1)),
        "tokenizer.ggml.precompiled_charsmap": normalizer.get(_CHARSMAP, b""),
        **{f"tokenizer.ggml.{name}_token_id": id for name, id in ids.items() if 0 <= id < len(tokens)},
    }


_ID_FIELDS = (("unknown", _UNK_ID, 0), ("bos", _BOS_ID, 1), ("eos", _EOS_ID, 2))


def _signed(value: int | bytes) -> int:
    """An int32 from protobuf, which writes negative numbers in 64 bits."""
    number = int(value)
    return number - (1 << 64) if number >= 1 << 63 else number


def _fields(message: bytes) -> Iterator[Field]:
    """The fields of a protobuf message: numbers as numbers, all others as bytes. Raises ValueError,
    IndexError."""
    position = 0
    while position < len(message):
        tag, position = _varint(message, position)
        kind = tag & 7
        if kind == 0:
            number, position = _varint(message, position)
            yield tag >> 3, number
            continue
        size_bytes = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size_bytes, position = _varint(message, position)
        if size_bytes is None or position + size_bytes > len(message):
            raise ValueError(f"a field of kind {kind} at byte {position} of {len(message)}")
        yield tag >> 3, message[position : position + size_bytes]
        position += size_bytes


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        octet = message[position]
        position += 1
        value |= (octet & 127) << shift
        if octet < 128:
            return value, position
        shift += 7
