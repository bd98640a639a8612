"""A GGUF checkpoint: weights, tokenizer and chat template in one file, or in several that were split off one.

Knows GGUF's names for tensors and what its converter changes in them. Invariant: pieces come out under Hugging Face's
names with the values the original checkpoint had.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from local_engine.checkpoints.checkpoint import WeightPiece
from local_engine.checkpoints.families import family_of
from local_engine.checkpoints.gguf_config import model_config_from_gguf
from local_engine.checkpoints.gguf_file import GgufFile
from local_engine.config import ModelError
from local_engine.weights.quantised import Quantised

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """Opens all of a model's files; reads weights when asked."""

    def __init__(self, path: Path) -> None:
        from local_engine.text.tokenizer_loader import tokenizer_from_gguf

        self.place = path
        self._files = _open_all(path)
        first = self._files[0]
        metadata = first.metadata
        shapes = {name: entry.shape for file in self._files for name, entry in file.tensors.items()}
        name = _SPLIT.sub("", first.path.name.removesuffix(".gguf"))
        try:
            self.config = model_config_from_gguf(metadata, shapes, name)
            self.tokenizer = tokenizer_from_gguf(metadata)
        except ModelError:
            raise
        except Exception as error:  # whatever a file may say, and what `tokenizers` makes of it: a bare Exception
            said = str(error).partition("\n")[0]
            raise ModelError(f"{path} says what makes no sense: {type(error).__name__}: {said}") from error
        family = family_of(str(metadata["general.architecture"]))
        self._is_permuted = family.is_gguf_rope_permuted
        self._names = {**_LAYER_NAMES, **(_GEMMA_NAMES if family.is_gemma else {})}
        self.form = "GGUF " + ", ".join(sorted({kind for file in self._files for kind in file.kinds()}))
        metadata.clear()  # the vocabulary's strings are in the tokenizer now

    def names(self) -> frozenset[str]:
        return frozenset(
            piece
            for file in self._files
            for name, entry in file.tensors.items()
            for piece in self._pieces(name, entry.shape)
        )

    def weights(self) -> Iterator[WeightPiece]:
        total_bytes = sum(file.size_bytes for file in self._files)
        before_bytes = 0
        for file in self._files:
            try:
                for name, entry in file.tensors.items():
                    values = self._read(file, name)
                    share = (before_bytes + file.end_of(name)) / total_bytes
                    pieces = self._pieces(name, entry.shape)
                    if len(entry.shape) == 3 and isinstance(values, torch.Tensor):  # [experts, rows, columns]
                        values = values.flatten(0, 1)
                    rows = values.shape[0] // len(pieces)
                    for index, piece in enumerate(pieces):
                        part = slice(index * rows, (index + 1) * rows)
                        own = values if len(pieces) == 1 else _rows(values, part)
                        yield WeightPiece(piece, own, share, file.path)
                    del values
                    file.forget(name)
            finally:
                file.close()
            before_bytes += file.size_bytes

    def _read(self, file: GgufFile, name: str) -> torch.Tensor | Quantised:
        kept = file.read_quantised(name)
        values = torch.from_numpy(file.read(name)) if kept is None else kept
        if "norm" in name and isinstance(values, torch.Tensor):
            values -= self.config.norm_offset  # files of families with one have it added already
        layer = _LAYER.fullmatch(name)
        if layer is None or not self._is_permuted or layer[2] not in ("attn_q", "attn_k"):
            return values
        heads = self.config.heads if layer[2] == "attn_q" else self.config.kv_heads
        order = self._unpermuted(values.shape[0], heads)
        return _rows(values, order)

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """What a tensor is to the model; one that holds all of a layer's experts is many."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return [_NAMES.get(name, name)]
        index, part, kind = layer.groups()
        if part in _EXPERTS:
            mlp = f"model.layers.{index}.mlp.experts"
            return [f"{mlp}.{expert}.{_EXPERTS[part]}.{kind}" for expert in range(shape[0])]
        return [f"model.layers.{index}.{self._names.get(part, part)}.{kind}"]

    @staticmethod
    def _unpermuted(rows: int, heads: int) -> torch.Tensor:
        """The rows' order that undoes the converter's interleaving of each head's halves: row 2i + h of a head was row
        h * dim/2 + i."""
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _rows(values: torch.Tensor | Quantised, which: torch.Tensor | slice) -> torch.Tensor | Quantised:
    return values.rows(which) if isinstance(values, Quantised) else values[which]


def _open_all(path: Path) -> list[GgufFile]:
    """The file, or where it is one of several (NAME-00002-of-00005.gguf) all of them, the first one first."""
    split = _SPLIT.search(path.name.removesuffix(".gguf"))
    if split is None:
        file = GgufFile(path)
        if int(file.metadata.get("split.count") or 1) > 1:
            raise ModelError(f"{path} is one of {file.metadata['split.count']} files, but not named -00001-of-...")
        return [file]
    count = int(split[2])
    stem = path.name.removesuffix(".gguf")[: split.start()]
    files = [GgufFile(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")) for number in range(1, count + 1)]
    wanted = int(files[0].metadata.get("split.tensors.count") or 0)
    found = sum(len(file.tensors) for file in files)
    if wanted and found != wanted:
        raise ModelError(f"{files[0].path} and its other files hold {found} tensors, not {wanted}")
    return files
