"""Families of models: what a checkpoint's own description means for the one decoder.

Reads Hugging Face's config.json and GGUF metadata into a ModelConfig. Knows no weights and no torch. Invariant: a
ModelConfig that was built describes a model the decoder computes exactly; what it cannot compute is refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from local_engine.config import ExpertsConfig, ModelConfig, ModelError, RopeConfig

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_SLIDING = "sliding_attention"
_GEMMA_LOCAL_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture adds to the common decoder. `gguf` is its name in GGUF files.

    `has_qkv_bias` None: the config says. `window_period`: every so-many-th layer sees everything, the others a window;
    0 where the config decides otherwise. `is_gemma`: scaled embeddings, norms with an offset of 1 and after each part
    as well, gelu, tied embeddings. `has_attention_softcap`: whether one that is named is used (Gemma 3 names one and
    does not use it).
    """

    hf: str
    gguf: str
    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None
    has_experts: bool = False
    is_gguf_rope_permuted: bool = False
    is_gemma: bool = False
    has_attention_softcap: bool = False
    window_period: int = 0
    theta: float = 10_000.0


FAMILIES = (
    Family("LlamaForCausalLM", "llama", is_gguf_rope_permuted=True),
    Family("MistralForCausalLM", "mistral", is_gguf_rope_permuted=True),
    Family("Qwen2ForCausalLM", "qwen2", has_qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", has_qk_norm=True),
    Family("Qwen3MoeForCausalLM", "qwen3moe", has_qk_norm=True, has_experts=True),
    Family("Gemma2ForCausalLM", "gemma2", is_gemma=True, window_period=2, has_attention_softcap=True),
    Family("Gemma3ForCausalLM", "gemma3", is_gemma=True, window_period=6, has_qk_norm=True, theta=1_000_000.0),
)


def family_of(architecture: str) -> Family:
    """The family of a Hugging Face or GGUF architecture name. Raises ModelError with the list of supported ones."""
    for family in FAMILIES:
        if architecture in (family.hf, family.gguf):
            return family
    supported = ", ".join(f"{family.hf} (GGUF: {family.gguf})" for family in FAMILIES)
    raise ModelError(f"architecture {architecture!r} is not supported; supported: {supported}")


def _require(config: Mapping[str, Any], key: str, source: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ModelError(f"{source} has no {key!r}")
    return value


# -- Hugging Face ------------------------------------------------------------------------------------------------------


def model_config_from_hf(config: Mapping[str, Any], name: str, source: str) -> ModelConfig:
    """A ModelConfig from the contents of a config.json. `source` names the file in errors. Raises ModelError."""
    architectures = config.get("architectures") or []
    if not architectures:
        raise ModelError(f"{source} names no architecture")
    family = family_of(str(architectures[0]))
    for key, wanted in (
        ("partial_rotary_factor", 1.0),
        ("use_bidirectional_attention", False),
    ):
        found = config.get(key)
        if found is not None and found != wanted:
            raise ModelError(f"{source}: {key} {found!r} is not supported")
    heads = int(_require(config, "num_attention_heads", source))
    hidden_size = int(_require(config, "hidden_size", source))
    layers = int(_require(config, "num_hidden_layers", source))
    head_dim = int(config.get("head_dim") or (256 if family.is_gemma else hidden_size // heads))
    has_bias = bool(config.get("attention_bias", False))
    eos = config.get("eos_token_id")
    rope, window_rope = _ropes(config, family, source)
    return ModelConfig(
        architecture=family.hf,
        name=name,
        hidden_size=hidden_size,
        layers=layers,
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=head_dim,
        intermediate_size=int(_require(config, "intermediate_size", source)),
        vocabulary_size=int(_require(config, "vocab_size", source)),
        context_tokens=_context_tokens(config, rope),
        rms_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=rope,
        window_rope=window_rope,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=has_bias if family.has_qkv_bias is None else family.has_qkv_bias,
        has_output_bias=has_bias and family.has_qkv_bias is None,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", family.is_gemma)),
        windows=_windows(config, family, layers),
        experts=_experts(config, layers, source) if family.has_experts else None,
        activation=_activation(config, family, source),
        attention_scale=float(config.get("query_pre_attn_scalar") or 256 if family.is_gemma else head_dim) ** -0.5,
        attention_softcap=_softcap(config.get("attn_logit_softcapping")) if family.has_attention_softcap else None,
        logit_softcap=_softcap(config.get("final_logit_softcapping")),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
        **_gemma(family, hidden_size),
    )


def _gemma(family: Family, hidden_size: int) -> dict[str, Any]:
    if not family.is_gemma:
        return {}
    return {"norm_offset": 1.0, "embedding_scale": math.sqrt(hidden_size), "has_post_norms": True}


def _softcap(value: Any) -> float | None:
    return float(value) if value else None


def _activation(config: Mapping[str, Any], family: Family, source: str) -> str:
    default = "gelu_pytorch_tanh" if family.is_gemma else "silu"
    # Gemma 1's configs named an activation in hidden_act that was not used; hidden_activation is the true one
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    named = str(config.get(key) or default)
    if named not in _ACTIVATIONS:
        raise ModelError(f"{source}: {key} {named!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[named]


def _context_tokens(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """The context. Dynamic scaling changes all positions' angles once the trained context is passed, cached keys' too:
    so it ends there."""
    context = int(config.get("max_position_embeddings") or 2048)
    return min(context, rope.original_context_tokens) if rope.kind == "dynamic" else context


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int, ...]:
    """Per layer the tokens a token sees; the three ways configs tell it: a list of types, a period, the first layer."""
    window = int(config.get("sliding_window") or 0)
    if not window or not config.get("use_sliding_window", not family.hf.startswith("Qwen")):
        return (0,) * layers
    types = config.get("layer_types")
    if types:
        return tuple(window if kind == _SLIDING else 0 for kind in types)
    period = int(config.get("sliding_window_pattern") or family.window_period)
    if period:
        return tuple(window if (layer + 1) % period else 0 for layer in range(layers))
    first = int(config.get("max_window_layers", 0)) if family.hf in ("Qwen2ForCausalLM", "Qwen3ForCausalLM") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _experts(config: Mapping[str, Any], layers: int, source: str) -> ExpertsConfig:
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    return ExpertsConfig(
        count=int(config.get("num_experts") or _require(config, "num_local_experts", source)),
        per_token=int(_require(config, "num_experts_per_tok", source)),
        intermediate_size=int(_require(config, "moe_intermediate_size", source)),
        normalises=bool(config.get("norm_topk_prob", False)),
        is_sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _ropes(config: Mapping[str, Any], family: Family, source: str) -> tuple[RopeConfig, RopeConfig | None]:
    """The rotary embedding, and that of layers with a window where it is another. All spellings: rope_theta with
    rope_scaling, rope_parameters (transformers 5), and rope_parameters by the layer's type (Gemma 3)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    theta = config.get("rope_theta") or family.theta
    if "full_attention" in parameters:
        return (
            _rope(parameters["full_attention"], theta, config, source),
            _rope(parameters.get(_SLIDING) or {}, _GEMMA_LOCAL_THETA, config, source),
        )
    rope = _rope({**parameters, **(config.get("rope_scaling") or {})}, theta, config, source)
    if family.hf != "Gemma3ForCausalLM":
        return rope, None
    return rope, RopeConfig(theta=float(config.get("rope_local_base_freq") or _GEMMA_LOCAL_THETA))


def _rope(scaling: Mapping[str, Any], theta: float, config: Mapping[str, Any], source: str) -> RopeConfig:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    share = scaling.get("partial_rotary_factor", 1.0)
    if share != 1.0:
        raise ModelError(f"{source}: partial_rotary_factor {share!r} is not supported")
    context = int(config.get("max_position_embeddings") or 2048)
    original = int(scaling.get("original_max_position_embeddings") or (8192 if kind == "llama3" else context))
    factor = float(scaling.get("factor") or (context / original if kind == "yarn" else 1.0))
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or theta),
        kind=kind,
        factor=factor,
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_context_tokens=context if kind == "dynamic" else original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(scaling, factor) if kind == "yarn" else 1.0,
        has_whole_bounds=bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if over and under:
        return _yarn_scale(factor, float(over)) / _yarn_scale(factor, float(under))
    return _yarn_scale(factor, 1.0)


def _yarn_scale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * weight * math.log(factor) + 1.0


# -- GGUF --------------------------------------------------------------------------------------------------------------


def model_config_from_gguf(metadata: Mapping[str, Any], tensors: frozenset[str], name: str) -> ModelConfig:
    """A ModelConfig from a GGUF file's metadata and the names of its tensors. Raises ModelError."""
    source = "the GGUF metadata"
    arch = str(_require(metadata, "general.architecture", source))
    family = family_of(arch)
    heads = int(_require(metadata, f"{arch}.attention.head_count", source))
    hidden_size = int(_require(metadata, f"{arch}.embedding_length", source))
    layers = int(_require(metadata, f"{arch}.block_count", source))
    head_dim = int(metadata.get(f"{arch}.attention.key_length") or hidden_size // heads)
    window = int(metadata.get(f"{arch}.attention.sliding_window") or 0)
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
        vocabulary_size=len(_require(metadata, "tokenizer.ggml.tokens", source)),
        context_tokens=int(_require(metadata, f"{arch}.context_length", source)),
        rms_epsilon=float(_require(metadata, f"{arch}.attention.layer_norm_rms_epsilon", source)),
        rope=_gguf_rope(metadata, arch, family),
        window_rope=RopeConfig(theta=_GEMMA_LOCAL_THETA) if arch == "gemma3" else None,
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_tied_embeddings="output.weight" not in tensors,
        windows=_windows({"sliding_window": window, "use_sliding_window": True}, family, layers),
        experts=_gguf_experts(metadata, arch, tensors, layers) if family.has_experts else None,
        activation="gelu_tanh" if family.is_gemma else "silu",
        attention_scale=_gguf_attention_divisor(arch, layers, hidden_size // heads, head_dim) ** -0.5,
        attention_softcap=_softcap(metadata.get(f"{arch}.attn_logit_softcapping"))
        if family.has_attention_softcap
        else None,
        logit_softcap=_softcap(metadata.get(f"{arch}.final_logit_softcapping")),
        eos_token_ids=tuple(dict.fromkeys(int(id) for id in eos if id is not None)),
        **_gemma(family, hidden_size),
    )


def _gguf_attention_divisor(arch: str, layers: int, share: int, head_dim: int) -> int:
    """What scores are divided by the root of; GGUF leaves it to who knows the two models that scale by another size."""
    return share if (arch, layers) in (("gemma2", 46), ("gemma3", 62)) else head_dim


def _gguf_experts(metadata: Mapping[str, Any], arch: str, tensors: frozenset[str], layers: int) -> ExpertsConfig:
    source = "the GGUF metadata"
    return ExpertsConfig(
        count=int(_require(metadata, f"{arch}.expert_count", source)),
        per_token=int(_require(metadata, f"{arch}.expert_used_count", source)),
        intermediate_size=int(_require(metadata, f"{arch}.expert_feed_forward_length", source)),
        normalises=bool(metadata.get(f"{arch}.expert_weights_norm", True)),
        is_sparse=tuple(f"blk.{layer}.ffn_gate_inp.weight" in tensors for layer in range(layers)),
    )


def _gguf_rope(metadata: Mapping[str, Any], arch: str, family: Family) -> RopeConfig:
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
        attention_factor=_yarn_scale(factor, 1.0) * float(given or 1.0) if kind == "yarn" else 1.0,
    )
