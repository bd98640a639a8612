"""A Hugging Face checkpoint folder: config.json, tokenizer.json and safetensors, in one file or in
shards with an index.

Knows files and names, no model. Invariant: files are mapped, and their read pages are soon freed,
so that loading takes little more memory than the model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from local_engine.checkpoints.checkpoint import WeightPiece, parts_of, split
from local_engine.checkpoints.families import model_config_from_hf, token_ids
from local_engine.config import ModelError, read_json
from local_engine.weights.prequantised import is_beside, packing_from
from local_engine.weights.scaled import Weights

MAPPED_SIZE_MAX_BYTES = 256 << 20
_MLP_PARTS = ("gate_proj", "up_proj", "down_proj")
_RENAMED = (
    (re.compile(r"(\.mlp\.experts\.(?:gate_up|down)_proj)$"), r"\1.weight"),
    (re.compile(r"\.shared_mlp\.input_linear\."), ".mlp.gate_up_proj."),  # Granite 4
    (re.compile(r"\.shared_mlp\.output_linear\."), ".mlp.down_proj."),
)
_OF_IMAGES = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")
_OF_TEXT = re.compile(
    r"(?:model\.|language_model\.)+(?=(?:layers|embed_tokens|norm|lm_head)\.)|(?=(?:layers|embed_tokens|norm)\.)"
)


class FolderCheckpoint:
    """Reads the folder's descriptions when constructed, and its weights in `weights`."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        from local_engine.text.tokenizer_loader import tokenizer_from_folder

        self.path = folder
        path = folder / "config.json"
        config = read_json(path)
        try:
            self.config = model_config_from_hf(config, name or folder.name, str(path))
            self._packing = packing_from(config, str(path))
        except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:
            raise ModelError(f"{path} says what makes no sense: {type(error).__name__}: {error}") from error
        self.tokenizer = tokenizer_from_folder(folder)
        generation = folder / "generation_config.json"
        more = read_json(generation, is_needed=False).get("eos_token_id")
        tokenizer_ids = () if self.tokenizer.eos_token_id is None else (self.tokenizer.eos_token_id,)
        ids = (*self.config.eos_token_ids, *token_ids(more, str(generation)), *tokenizer_ids)
        self.config = dataclasses.replace(self.config, eos_token_ids=tuple(dict.fromkeys(ids)))
        self._tensors = SafetensorsFiles(_find_files(folder))
        if "lm_head.weight" in self.names():  # a head in the files is used, whatever the config has
            self.config = dataclasses.replace(self.config, has_tied_embeddings=False)
        self.form = "safetensors" if self._packing is None else f"safetensors, {self._packing.name}"

    def names(self) -> frozenset[str]:
        found = (self._name_of(name) for name in self._tensors.names)
        return frozenset(piece for name in found if name is not None for piece in parts_of(name, self.config))

    def weights(self) -> Iterator[WeightPiece]:
        tensors = self._tensors
        try:
            for name in tensors.names:
                common_name = self._name_of(name)
                if common_name is None:
                    continue
                value, path = self._value(name), tensors.path_of(name)
                for piece, part in split(common_name, value, self.config):
                    yield WeightPiece(piece, part, path)
                del value
                tensors.forget()
        finally:
            tensors.close()

    def _value(self, name: str) -> Weights:
        module = None if self._packing is None else self._packing.module_of(name, self._tensors)
        if self._packing is None or module is None:
            return self._tensors.read(name)
        try:
            return self._packing.unpack(self._tensors, module)
        except ModelError as error:
            raise ModelError(f"{self._tensors.path_of(name)}: {error}") from None

    def _name_of(self, name: str) -> str | None:
        """The common name for a tensor of the files; None if it is read with another tensor or not
        needed. Models saved without a head, or with an image encoder, have other prefixes."""
        if _OF_IMAGES.match(name):
            return None
        packing = self._packing
        common_name = _OF_TEXT.sub("model.", name, count=1).replace("model.lm_head.", "lm_head.")
        for old, new in _RENAMED:
            common_name = old.sub(new, common_name)
        if packing is not None and packing.module_of(name, self._tensors) is not None:
            return f"{common_name.rpartition('.')[0]}.weight"
        return None if packing is not None and (is_beside(name) or self._is_spare_bias(name)) else common_name

    def _is_spare_bias(self, name: str) -> bool:
        """Whether a bias belongs to no matrix of the model: AutoGPTQ's first versions wrote zero
        biases for every matrix."""
        module, _, kind = name.rpartition(".")
        if kind != "bias" or f"{module}.qweight" not in self._tensors:
            return False
        config, part = self.config, module.rpartition(".")[2]
        has_bias = {"q_proj": config.has_qkv_bias, "k_proj": config.has_qkv_bias, "v_proj": config.has_qkv_bias}
        has_bias |= {"o_proj": config.has_output_bias, **dict.fromkeys(_MLP_PARTS, config.has_mlp_bias)}
        return not has_bias.get(part, False) and not self._tensors.read(name).any()


class SafetensorsFiles:
    """The tensors of one or several files, by name. `names` are in the order of the files."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        self._mapped_bytes = 0
        for path in paths:
            for name in self._file(path).offset_keys():
                self._paths[name] = path
        self.names = tuple(self._paths)
        self.close()

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def path_of(self, name: str) -> Path:
        return self._paths[name]

    def read(self, name: str) -> torch.Tensor:
        """A tensor in the file's mapping: valid until `forget`. Raises ModelError."""
        from safetensors import SafetensorError

        path = self._paths.get(name)
        if path is None:
            raise ModelError(f"the checkpoint lacks the tensor {name!r}")
        try:
            tensor: torch.Tensor = self._file(path).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path}: tensor {name!r} cannot be read: {error}") from None
        self._mapped_bytes += tensor.nbytes
        return tensor

    def forget(self) -> None:
        """Close the files once many bytes are mapped: read pages count as this process's memory
        until then."""
        if self._mapped_bytes > MAPPED_SIZE_MAX_BYTES:
            self.close()

    def close(self) -> None:
        self._open.clear()
        self._mapped_bytes = 0

    def _file(self, path: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if path not in self._open:
            try:
                self._open[path] = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None
        return self._open[path]


def _find_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise ModelError(f"{index} has no weight_map from tensors to files")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    for path in files:
        if not path.is_file():
            pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt"))
            hint = "; pickled weights are not read: they can run code. Convert them to safetensors" if pickled else ""
            raise ModelError(f"{folder} lacks {path.name}{hint}")
    return files
