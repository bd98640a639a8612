"""The interface to a model on disk, in any format. Knows no format and no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from local_engine.config import ModelConfig, ModelError
from local_engine.text.tokenizer import Tokenizer
from local_engine.weights.scaled import Weights, rows_of

# matrices that some checkpoints have as one, the first of them on top
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One tensor of the checkpoint, under Hugging Face's name: float on the CPU, or quantised as in
    the file.

    It may lie in the mapping of `file`: it is valid until the next piece is read.
    """

    name: str
    tensor: Weights
    file: Path


class Checkpoint(Protocol):
    """A model on disk at `path`, a file or a folder. `form` describes the format of its weights."""

    config: ModelConfig
    tokenizer: Tokenizer
    path: Path
    form: str

    def names(self) -> frozenset[str]:
        """The names of the pieces that `weights` yields; reads no weights."""

    def weights(self) -> Iterator[WeightPiece]:
        """Every piece once. Raises ModelError if the files are broken."""


def parts_of(name: str, config: ModelConfig) -> tuple[str, ...]:
    """The model's names for a checkpoint's tensor: several if it holds matrices that are separate
    in the model, or all experts of a layer."""
    *path, module, kind = name.split(".")
    modules = _FUSED.get(module, (module,))
    if path[-1:] == ["experts"] and config.experts is not None:
        return tuple(".".join((*path, str(i), own, kind)) for i in range(config.experts.count) for own in modules)
    return tuple(".".join((*path, own, kind)) for own in modules)


def split(name: str, values: Weights, config: ModelConfig) -> Iterator[tuple[str, Weights]]:
    """Split a checkpoint's tensor into the model's, with their names. Raises ModelError."""
    names = parts_of(name, config)
    if isinstance(values, torch.Tensor) and values.dim() == 3:  # [experts, rows, columns]
        values = values.flatten(0, 1)
    sizes = [values.shape[0] // len(names)] * len(names)
    if ".qkv_proj." in name:
        sizes = list(config.attention.qkv_rows)
    if sum(sizes) != values.shape[0]:
        raise ModelError(f"tensor {name!r} has {values.shape[0]} rows, which are not those of {len(names)} matrices")
    first_row = 0
    for own, size in zip(names, sizes, strict=True):
        yield own, values if len(names) == 1 else rows_of(values, slice(first_row, first_row + size))
        first_row += size
