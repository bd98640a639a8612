"""What a GGUF file's metadata means for the one decoder, as a ModelConfig.

Knows the keys that llama.cpp reads, no weights and no torch. Invariant: that of `families`: what the decoder cannot compute
is refused, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from local_engine.checkpoints.families import (
    GEMMA_LOCAL_THETA,
    Family,
    family_of,
    gemma,
    require,
    softcap,
    windows_of,
    yarn_scale,
)
from local_engine.config import ExpertsConfig, ModelConfig, ModelError, RopeConfig

# By these keys a file computes something else, but with one of these values.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "logit_scale": (0, 1), "residual_scale": (0, 1), "embedding_scale": (0, 1), "attention.scale": (0,),
    "attention.clamp_kqv": (0,), "attention.max_alibi_bias": (0,), "attention.causal": (True,),
    "attention.temperature_length": (0,), "use_parallel_residual": (False,), "expert_shared_count": (0,),
    "expert_weights_scale": (0, 1), "expert_gating_func": (0, 1), "expert_group_count": (0, 1),
}  # fmt: skip


Shapes = Mapping[str, tuple[int, ...]]


def model_config_from_gguf(metadata: Mapping[str, Any], tensors: Shapes, name: str) -> ModelConfig:
    """A ModelConfig from a GGUF file's metadata and its tensors' names and shapes. Raises ModelError."""
    source = "the GGUF metadata"
    arch = str(require(metadata, "general.architecture", source))
    family = family_of(arch)
    for key, neutral in _NEUTRAL.items():
        found = metadata.get(f"{arch}.{key}")
        if found is not None and found not in neutral:
            raise ModelError(f"{source}: {arch}.{key} {found!r} is not supported")
    if not family.has_experts and metadata.get(f"{arch}.expert_count"):
        raise ModelError(f"{source}: {arch} with {metadata[f'{arch}.expert_count']} experts is not supported")
    heads = int(require(metadata, f"{arch}.attention.head_count", source))
    hidden_size = int(require(metadata, f"{arch}.embedding_length", source))
    layers = int(require(metadata, f"{arch}.block_count", source))
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
        vocabulary_size=require(tensors, "token_embd.weight", source)[0],  # some have no token
        context_tokens=int(require(metadata, f"{arch}.context_length", source)),
        rms_epsilon=float(require(metadata, f"{arch}.attention.layer_norm_rms_epsilon", source)),
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
        attention_softcap=softcap(metadata.get(f"{arch}.attn_logit_softcapping"))
        if family.has_attention_softcap
        else None,
        logit_softcap=softcap(metadata.get(f"{arch}.final_logit_softcapping")),
        eos_token_ids=tuple(dict.fromkeys(int(id) for id in eos if id is not None)),
        **gemma(family, hidden_size),
    )


def _windows(metadata: Mapping[str, Any], arch: str, family: Family, layers: int, source: str) -> tuple[int, ...]:
    """As llama.cpp, which has windows in Gemma's layers alone."""
    window = metadata.get(f"{arch}.attention.sliding_window") if family.window_period else None
    pattern = metadata.get(f"{arch}.attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return tuple(int(window or 0) if is_sliding else 0 for is_sliding in pattern)
    return windows_of({"sliding_window": window, "sliding_window_pattern": pattern}, family, layers, source)


def _window_rope(metadata: Mapping[str, Any]) -> RopeConfig:
    return RopeConfig(theta=float(metadata.get("gemma3.rope.freq_base_swa") or GEMMA_LOCAL_THETA))


def _attention_divisor(arch: str, layers: int, share: int, head_dim: int) -> int:
    """What scores are divided by the root of; GGUF leaves it to who knows the two models that scale by another size."""
    return share if (arch, layers) in (("gemma2", 46), ("gemma3", 62)) else head_dim


def _experts(metadata: Mapping[str, Any], arch: str, tensors: Shapes, layers: int) -> ExpertsConfig:
    source = "the GGUF metadata"
    return ExpertsConfig(
        count=int(require(metadata, f"{arch}.expert_count", source)),
        per_token=int(require(metadata, f"{arch}.expert_used_count", source)),
        intermediate_size=int(require(metadata, f"{arch}.expert_feed_forward_length", source)),
        normalises=bool(metadata.get(f"{arch}.expert_weights_norm", True)),
        is_sparse=tuple(f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(layers)),
    )


def _rope(metadata: Mapping[str, Any], arch: str, family: Family) -> RopeConfig:
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
        attention_factor=yarn_scale(factor, 1.0) * float(given or 1.0) if kind == "yarn" else 1.0,
    )
