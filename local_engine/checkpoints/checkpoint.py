"""A model on disk, as the engine reads it, whatever its format. Knows no format and no model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from local_engine.config import ModelConfig
from local_engine.text.tokenizer import Tokenizer
from local_engine.weights.quantised import Quantised
from local_engine.weights.scaled import Scaled


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One tensor of the checkpoint, under Hugging Face's name: float on the CPU, or quantised as
    the file has it. It may lie in the mapping of `file`: it is valid until the next piece is read.
    `share` of all bytes, 0..1, is read with it.
    """

    name: str
    tensor: torch.Tensor | Quantised | Scaled
    share: float
    file: Path


class Checkpoint(Protocol):
    """A model on disk: at `place`, a file or a folder. `form` names the format of its weights in a
    few words."""

    config: ModelConfig
    tokenizer: Tokenizer
    place: Path
    form: str

    def names(self) -> frozenset[str]:
        """The names of the tensors that `weights` gives; reads no weights."""

    def weights(self) -> Iterator[WeightPiece]:
        """Every tensor once. Raises ModelError where the files are broken."""
