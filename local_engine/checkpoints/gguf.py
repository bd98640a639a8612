"""A GGUF checkpoint: weights, tokenizer and chat template in one file, or in several that were
split off one.

Knows GGUF's names for tensors, what its converter changes in them, and the metadata's keys that
llama.cpp reads. Invariants: pieces come out under Hugging Face's names with the values the original
checkpoint had; a model that the decoder cannot compute is refused, by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from local_engine.checkpoints import families
from local_engine.checkpoints.checkpoint import WeightPiece
from local_engine.checkpoints.gguf_file import GgufFile
from local_engine.config import ExpertsConfig, ModelConfig, ModelError, RopeConfig
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
# By these keys a file computes something else, but with one of these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (True,),
    "attention.temperature_length": (0,), "use_parallel_residual": (False,), "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
}  # fmt: skip

Shapes = Mapping[str, tuple[int, ...]]


class GgufCheckpoint:
    """Opens all of a model's files; reads weights in `weights`."""

    def __init__(self, path: Path) -> None:
        from local_engine.text.tokenizer_loader import tokenizer_from_gguf

        self.place = path
        self._files = _open_all(path)
        first = self._files[0]
        metadata = first.metadata
        shapes = {name: entry.shape for file in self._files for name, entry in file.tensors.items()}
        name = _SPLIT.sub("", first.path.name.removesuffix(".gguf"))
        self.config = model_config_from_gguf(metadata, shapes, name)
        self.tokenizer = tokenizer_from_gguf(metadata)
        family = families.family_of(str(metadata["general.architecture"]))
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
                    # [experts, rows, columns]
                    if len(entry.shape) == 3 and isinstance(values, torch.Tensor):
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
        if values.shape[0] % (2 * heads):
            raise ModelError(f"{file.path}: tensor {name!r} has {values.shape[0]} rows, which are not {heads} heads")
        return _rows(values, self._unpermuted(values.shape[0], heads))

    def _pieces(self, name: str, shape: tuple[int, ...]) -> list[str]:
        """The model's names for a tensor: many where it holds all of a layer's experts."""
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
        """The rows' order that undoes the converter's interleaving of each head's halves: row 2i +
        h of a head was row h * dim/2 + i."""
        return torch.arange(rows).view(heads, rows // heads // 2, 2).transpose(1, 2).reshape(-1)


def _rows(values: torch.Tensor | Quantised, which: torch.Tensor | slice) -> torch.Tensor | Quantised:
    return values.rows(which) if isinstance(values, Quantised) else values[which]


def _open_all(path: Path) -> list[GgufFile]:
    """The file, or where it is one of several (NAME-00002-of-00005.gguf) all of them, the first one
    first."""
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


# -- the metadata -----------------------------------------------------------------------------------------------------


def model_config_from_gguf(metadata: Mapping[str, Any], tensors: Shapes, name: str) -> ModelConfig:
    """A ModelConfig from a GGUF file's metadata and its tensors' names and shapes. Raises
    ModelError."""
    source = "the GGUF metadata"
    arch = str(families.require(metadata, "general.architecture", source))
    family = families.family_of(arch)
    for key, neutral in _NEUTRAL.items():
        found = metadata.get(f"{arch}.{key}")
        if found is not None and found not in neutral:
            raise ModelError(f"{source}: {arch}.{key} {found!r} is not supported")
    if not family.has_experts and metadata.get(f"{arch}.expert_count"):
        raise ModelError(f"{source}: {arch} with {metadata[f'{arch}.expert_count']} experts is not supported")
    heads = int(families.require(metadata, f"{arch}.attention.head_count", source))
    hidden_size = int(families.require(metadata, f"{arch}.embedding_length", source))
    layers = families.layers_of(metadata, f"{arch}.block_count", source)
    head_dim = int(metadata.get(f"{arch}.attention.key_length") or hidden_size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        found = metadata.get(f"{arch}.{key}") or head_dim
        if found != head_dim:
            raise ModelError(f"{source}: {arch}.{key} {found!r} beside heads of {head_dim} is not supported")
    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=family.hf,
        name=name,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=head_dim,
        intermediate_size=int(metadata.get(f"{arch}.feed_forward_length") or 0),
        vocabulary_size=families.require(tensors, "token_embd.weight", source)[0],  # some have no token
        context_tokens=int(families.require(metadata, f"{arch}.context_length", source)),
        rms_epsilon=float(families.require(metadata, f"{arch}.attention.layer_norm_rms_epsilon", source)),
        rope=_rope(metadata, arch, family),
        window_rope=_window_rope(metadata) if arch == "gemma3" else None,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in tensors,
        has_tied_embeddings="output.weight" not in tensors,
        windows=_windows(metadata, arch, family, layers, source),
        experts=_experts(metadata, arch, tensors, layers) if family.has_experts else None,
        activation="gelu_tanh" if family.is_gemma else "silu",
        attention_scale=_attention_divisor(arch, layers, hidden_size // heads, head_dim) ** -0.5,
        attention_softcap=families.softcap(metadata.get(f"{arch}.attn_logit_softcapping"))
        if family.has_attention_softcap
        else None,
        logit_softcap=families.softcap(metadata.get(f"{arch}.final_logit_softcapping")),
        eos_token_ids=tuple(dict.fromkeys(int(id) for id in eos if id is not None)),
        **families.gemma(family, hidden_size),
    )


def _windows(
    metadata: Mapping[str, Any], arch: str, family: families.Family, layers: int, source: str
) -> tuple[int, ...]:
    """As llama.cpp, which has windows in Gemma's layers alone."""
    window = metadata.get(f"{arch}.attention.sliding_window") if family.window_period else None
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return tuple(int(window or 0) if is_sliding else 0 for is_sliding in pattern)
    return families.windows_of({"sliding_window": window, "sliding_window_pattern": pattern}, family, layers, source)


def _window_rope(metadata: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(theta=float(metadata.get("gemma3.rope.freq_base_swa") or families.GEMMA_LOCAL_THETA))


def _attention_divisor(arch: str, layers: int, share: int, head_dim: int) -> int:
    """Scores are divided by this number's root. GGUF has no key for it; two models scale by another
    size."""
    return share if (arch, layers) in (("gemma2", 46), ("gemma3", 62)) else head_dim


def _experts(metadata: Mapping[str, Any], arch: str, tensors: Shapes, layers: int) -> ExpertsConfig:
    source = "the GGUF metadata"
    return ExpertsConfig(
        count=int(families.require(metadata, f"{arch}.expert_count", source)),
        per_token=int(families.require(metadata, f"{arch}.expert_used_count", source)),
        intermediate_size=int(families.require(metadata, f"{arch}.expert_feed_forward_length", source)),
        normalises=bool(metadata.get(f"{arch}.expert_weights_norm", True)),
        is_sparse=tuple(f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(layers)),
    )


def _rope(metadata: Mapping[str, Any], arch: str, family: families.Family) -> RopeConfig:
    kind = str(metadata.get(f"{arch}.rope.scaling.type") or "none")
    if kind not in ("none", "linear", "yarn"):
        raise ModelError(f"the GGUF metadata: rope scaling {kind!r} is not supported; supported: none, linear, yarn")
    factor = float(metadata.get(f"{arch}.rope.scaling.factor") or 1.0)
    original = metadata.get(f"{arch}.rope.scaling.original_context_length") or metadata.get(f"{arch}.context_length")
    given = metadata.get(f"{arch}.rope.scaling.attn_factor")
    return RopeConfig(
        theta=float(metadata.get(f"{arch}.rope.freq_base") or family.theta),
        kind="default" if kind == "none" else kind,
        factor=factor,
        original_context_tokens=int(original or 8192),
        beta_fast=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_fast") or 32.0),
        beta_slow=float(metadata.get(f"{arch}.rope.scaling.yarn_beta_slow") or 1.0),
        attention_factor=families.yarn_scale(factor, 1.0) * float(given or 1.0) if kind == "yarn" else 1.0,
    )
