"""A GGUF checkpoint: weights, tokenizer and chat template in one file, or in its splits.

Knows GGUF's names for tensors, its converter's changes to them, and the metadata's keys that
llama.cpp reads. Invariants: pieces have Hugging Face's names and the original checkpoint's values;
a model that the decoder cannot compute is refused, by name.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from local_engine.checkpoints import families
from local_engine.checkpoints.checkpoint import WeightPiece, parts_of, split
from local_engine.checkpoints.gguf_file import GgufFile
from local_engine.config import ModelConfig, ModelError, require_among
from local_engine.weights.scaled import Weights, rows_of

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight")  # of the rotation's frequencies
_UNUSED = (*_DIVISORS, "rope_factors_long.weight")  # as tensors of the model
_LAYER_NAMES = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_qkv": "self_attn.qkv_proj",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip
_POST_NORM_NAMES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_SPLIT = re.compile(r"-(\d{5})-of-(\d{5})$")
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
# By these keys a file computes something else, but with one of these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (True,),
    "attention.temperature_length": (0,), "use_parallel_residual": (False,), "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
}  # fmt: skip
# of these, by the fields that some families read
_SCALES = {
    "logit_scale": "logits_scaling", "residual_scale": "residual_multiplier",
    "embedding_scale": "embedding_multiplier", "attention.scale": "attention_multiplier",
}  # fmt: skip

# of two models, whose scores are divided by the root of a head's share of the width; GGUF has no key for it
_SCALED_BY_SHARE = (("gemma2", 46), ("gemma3", 62))

# Files name one end, mostly the text's; these end a turn where the chat template writes them.
_TURN_ENDS = ("<|im_end|>", "<|end|>", "<|eot_id|>", "<|end_of_text|>", "<end_of_turn>", "<|endoftext|>")

Shapes = Mapping[str, tuple[int, ...]]


class GgufCheckpoint:
    """Opens all of a model's files; reads weights in `weights`."""

    def __init__(self, path: Path) -> None:
        from local_engine.text.tokenizer_loader import tokenizer_from_gguf

        self.path = path
        self._files = _open_all(path)
        first = self._files[0]
        metadata = first.metadata
        shapes = {name: entry.shape for file in self._files for name, entry in file.tensors.items()}
        name = _SPLIT.sub("", first.path.name.removesuffix(".gguf"))
        divisors = [file.read(one) for file in self._files for one in _DIVISORS if one in file.tensors]
        self.config = model_config_from_gguf(metadata, shapes, name, [float(x) for one in divisors for x in one])
        self.tokenizer = tokenizer_from_gguf(metadata)
        family = families.family_of(str(metadata["general.architecture"]))
        self._is_permuted = family.is_gguf_rope_permuted
        own = _POST_NORM_NAMES if self.config.norms != "before" else {}
        own |= {"ffn_up": "mlp.gate_up_proj"} if family.gguf == "phi3" else {}
        self._names = {**_LAYER_NAMES, **own}
        self.form = "GGUF " + ", ".join(sorted({kind for file in self._files for kind in file.kinds()}))
        metadata.clear()  # the vocabulary's strings are in the tokenizer now

    def names(self) -> frozenset[str]:
        names = (name for file in self._files for name in file.tensors if name not in _UNUSED)
        return frozenset(piece for name in names for piece in parts_of(self._name(name), self.config))

    def weights(self) -> Iterator[WeightPiece]:
        for file in self._files:
            try:
                for name in [name for name in file.tensors if name not in _UNUSED]:
                    values = self._read(file, name)
                    for piece, own in split(self._name(name), values, self.config):
                        yield WeightPiece(piece, own, file.path)
                    del values
                    file.forget(name)
            finally:
                file.close()

    def _read(self, file: GgufFile, name: str) -> Weights:
        kept = file.read_quantised(name)
        values = torch.from_numpy(file.read(name)) if kept is None else kept
        if "norm" in name and isinstance(values, torch.Tensor):
            values -= self.config.norm_offset  # files of families with one have it added already
        layer = _LAYER.fullmatch(name)
        if layer is None or not self._is_permuted or layer[2] not in ("attn_q", "attn_k"):
            return values
        heads = self.config.attention.heads if layer[2] == "attn_q" else self.config.attention.kv_heads
        if values.shape[0] % (2 * heads):
            raise ModelError(f"{file.path}: tensor {name!r} has {values.shape[0]} rows, which are not {heads} heads")
        # the converter has interleaved each head's halves: row 2i + h of a head was row h * dim/2 + i
        return rows_of(values, torch.arange(values.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1))

    def _name(self, name: str) -> str:
        """Hugging Face's name for a tensor."""
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return _NAMES.get(name, name)
        index, part, kind = layer.groups()
        return f"model.layers.{index}.{self._names.get(part, part)}.{kind}"


def _open_all(path: Path) -> list[GgufFile]:
    """Open the file or, if it is a split (NAME-00002-of-00005.gguf), all splits in order."""
    split = _SPLIT.search(path.name.removesuffix(".gguf"))
    if split is None:
        file = GgufFile(path)
        if int(file.metadata.get("split.count") or 1) > 1:
            raise ModelError(f"{path} is one of {file.metadata['split.count']} files, but not named -00001-of-...")
        return [file]
    count = int(split[2])
    stem = path.name.removesuffix(".gguf")[: split.start()]
    files = [GgufFile(path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf")) for number in range(1, count + 1)]
    tensors_expected = int(files[0].metadata.get("split.tensors.count") or 0)
    found = sum(len(file.tensors) for file in files)
    if tensors_expected and found != tensors_expected:
        raise ModelError(f"{files[0].path} and its other files hold {found} tensors, not {tensors_expected}")
    return files


# -- the metadata -----------------------------------------------------------------------------------------------------


def model_config_from_gguf(
    metadata: Mapping[str, Any], tensors: Shapes, name: str, divisors: list[float]
) -> ModelConfig:
    """The ModelConfig of a GGUF file, from its metadata, its tensors' names and shapes, and the
    `divisors` of the rotation's frequencies, which may be empty. The metadata is translated to the
    keys of Hugging Face's config.json. Raises ModelError."""
    source = "the GGUF metadata"
    arch = str(families.require(metadata, "general.architecture", source))
    family = families.family_of(arch)

    def required(key: str) -> Any:
        return families.require(metadata, f"{arch}.{key}", source)

    def value_of(key: str) -> Any:
        return metadata.get(f"{arch}.{key}")

    heads, hidden_size = int(required("attention.head_count")), int(required("embedding_length"))
    layers = families.layers_of(metadata, f"{arch}.block_count", source)
    head_dim = int(value_of("attention.key_length") or hidden_size // heads)
    rotated = int(value_of("rope.dimension_count") or head_dim)
    _refuse_other_functions(value_of, arch, family, head_dim)
    kv_heads = value_of("attention.head_count_kv") or heads
    if isinstance(kv_heads, list):  # 0 in Mamba's layers
        if len(set(kv_heads)) > 1:
            raise ModelError(
                f"{source}: {arch}.attention.head_count_kv: layers without attention (Mamba) are not supported"
            )
        kv_heads = kv_heads[0]
    inner = (
        tensors["blk.0.ffn_gate.weight"][0] if "blk.0.ffn_gate.weight" in tensors else value_of("feed_forward_length")
    )
    config: dict[str, Any] = {
        "architectures": [family.hf],
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(kv_heads),
        "head_dim": head_dim,
        "partial_rotary_factor": rotated / head_dim,
        family.mlp_size: int(inner or 0),
        "vocab_size": families.require(tensors, "token_embd.weight", source)[0],  # some have no token
        "max_position_embeddings": int(required("context_length")),
        "rms_norm_eps": float(required("attention.layer_norm_rms_epsilon")),
        "rope_theta": value_of("rope.freq_base"),
        "rope_scaling": _rope_scaling(value_of, divisors, "rope_factors_short.weight" in tensors, source),
        "rope_local_base_freq": value_of("rope.freq_base_swa"),
        "position_embedding_type": None if value_of("rope.scaling.finetuned") is False else "rope",
        "query_pre_attn_scalar": hidden_size // heads if (arch, layers) in _SCALED_BY_SHARE else head_dim,
        "attn_logit_softcapping": value_of("attn_logit_softcapping"),
        "final_logit_softcapping": value_of("final_logit_softcapping"),
        "layer_types": None,
        "num_local_experts": None,
        **{field: value_of(key) for key, field in _SCALES.items() if field in family.reads},
        **_windows(value_of, arch, family),
        **(_experts(value_of, tensors, layers) if family.has_experts else {}),
    }
    config["original_max_position_embeddings"] = config["rope_scaling"]["original_max_position_embeddings"]
    ends = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    tokens, template = metadata.get("tokenizer.ggml.tokens") or (), metadata.get("tokenizer.chat_template") or ""
    ends += [tokens.index(mark) for mark in _TURN_ENDS if mark in template and mark in tokens]
    return dataclasses.replace(
        families.model_config_from_hf(config, name, source),
        has_qkv_bias="blk.0.attn_q.bias" in tensors or "blk.0.attn_qkv.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_mlp_bias="blk.0.ffn_gate.bias" in tensors,
        has_tied_embeddings="output.weight" not in tensors,
        eos_token_ids=tuple(dict.fromkeys(int(id) for id in ends if id is not None)),
    )


def _refuse_other_functions(value_of: Callable[[str], Any], arch: str, family: families.Family, head_dim: int) -> None:
    """Raise ModelError for a key that makes the model compute another function than the family's."""
    refused_keys = [
        key
        for key, neutral in _NEUTRAL.items()
        if value_of(key) is not None and value_of(key) not in neutral and _SCALES.get(key) not in family.reads
    ]
    sizes = ["attention.value_length", *(() if "partial_rotary_factor" in family.reads else ("rope.dimension_count",))]
    refused_keys += [key for key in sizes if value_of(key) not in (None, 0, head_dim)]
    if refused_keys:
        raise ModelError(f"the GGUF metadata: {arch}.{refused_keys[0]} {value_of(refused_keys[0])!r} is not supported")
    if bool(value_of("expert_count")) != family.has_experts:
        told = f"{value_of('expert_used_count')} of {value_of('expert_count')} experts"
        raise ModelError(f"the GGUF metadata: {arch}: {told} are not supported")


def _experts(value_of: Callable[[str], Any], tensors: Shapes, layers: int) -> dict[str, Any]:
    return {
        "num_experts": int(value_of("expert_count")),
        "num_experts_per_tok": value_of("expert_used_count"),
        "moe_intermediate_size": value_of("expert_feed_forward_length"),
        "norm_topk_prob": value_of("expert_weights_norm") is not False,
        "mlp_only_layers": [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" not in tensors],
    }


def _windows(value_of: Callable[[str], Any], arch: str, family: families.Family) -> dict[str, Any]:
    """The windows as in llama.cpp: only in Gemma's, OLMo's and Phi 3's layers."""
    window = value_of("attention.sliding_window") if family.window_period or arch == "phi3" else None
    pattern = value_of("attention.sliding_window_pattern")
    if isinstance(pattern, list) and window:
        kinds = [families.SLIDING if is_sliding else families.FULL for is_sliding in pattern]
        return {"sliding_window": window, "layer_types": kinds}
    return {"sliding_window": window, "sliding_window_pattern": None if isinstance(pattern, list) else pattern}


def _rope_scaling(value_of: Callable[[str], Any], divisors: list[float], is_short: bool, source: str) -> dict[str, Any]:
    """The rotation's scaling. `divisors` divide frequencies; short ones hold within the original
    context. (Other files encode llama3's rule in them.)"""
    kind, factor = str(value_of("rope.scaling.type") or "none"), float(value_of("rope.scaling.factor") or 1.0)
    original = value_of("rope.scaling.original_context_length") or value_of("context_length")
    attention_factor = float(value_of("rope.scaling.attn_factor") or 1.0)
    if divisors and kind in ("none", "longrope"):
        ends = original if is_short else value_of("context_length")
        scaling = {"rope_type": "longrope", "short_factor": divisors, "attention_factor": attention_factor}
        return {**scaling, "original_max_position_embeddings": ends}
    require_among(kind, ("none", "longrope") if divisors else ("none", "linear", "yarn"), f"{source}: rope scaling")
    of_yarn = float(value_of("rope.scaling.yarn_attn_factor") or families.yarn_scale(factor, 1.0))
    return {
        "rope_type": "default" if kind == "none" else kind,
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": value_of("rope.scaling.yarn_beta_fast"),
        "beta_slow": value_of("rope.scaling.yarn_beta_slow"),
        "attention_factor": of_yarn * attention_factor,
    }
