"""Families of models: converts a checkpoint's description to a ModelConfig of the common decoder.

Reads Hugging Face's config.json into a ModelConfig (`gguf` reads GGUF's metadata). Knows no weights
and no torch. Invariant: a ModelConfig describes a model that the decoder computes exactly; every
other model is refused, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from local_engine.config import AttentionConfig, ExpertsConfig, ModelConfig, ModelError, RopeConfig, require_among

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
_LAYERS_MAX = 10_000
SLIDING, FULL = "sliding_attention", "full_attention"
_LAYER_TYPES = {"attention": FULL, FULL: FULL, SLIDING: SLIDING}

# Fields by which other architectures' models, and models derived from the supported ones, compute
# something else. A config that names one is read only where its value changes nothing.
_MUST_BE_ONE = (
    "partial_rotary_factor", "rotary_pct", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale",
    "scale_emb", "mup_multiplier", "routed_scaling_factor",
)  # fmt: skip
_MUST_BE_UNSET = (
    "attention_chunk_size", "attention_chunk", "attention_multiplier", "attn_temperature_tuning", "attention_sinks",
    "clip_qkv", "qk_clip", "use_qk_norm", "qk_layernorm", "no_rope_layer_interval", "scale_depth", "dim_model_base", "alibi",
    "use_bidirectional_attention", "use_parallel_residual", "parallel_attn", "add_cross_attention", "kv_lora_rank",
    "q_lora_rank", "n_shared_experts", "shared_expert_intermediate_size", "use_mrope", "rope_interleave",
    "rope_interleaved", "use_layer_norm", "layer_scale", "num_experts", "num_local_experts", "attn_logit_softcapping",
    "final_logit_softcapping",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture's additions to the common decoder. `gguf` is its name in GGUF files,
    `model_type` in a config.json.

    `traits`: the ModelConfig's fields that all its models share. `reads`: fields that other
    families must not have and that are computed here. `has_qkv_bias` None: as in the config.
    `window_period`: every n-th layer attends to everything, the others to a window; 0 if the config
    decides otherwise. `has_layer_types`: whether a list of each layer's type decides.
    `has_windows`: whether any layer can have a window. `window_theta`: the base by which layers
    with a window rotate, unscaled; 0 is the base of the other layers, None rotates like them.
    `is_gemma`: embeddings scaled by the width's root, gelu. `has_attention_softcap`: whether a
    configured soft cap is used (Gemma 3 ignores its own). `mlp_size`: the field of the MLP's size.
    `defaults`: the values of fields that a config.json lacks and that only `transformers`' own
    config class has.
    """

    hf: str
    model_type: str
    gguf: str
    traits: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    has_qkv_bias: bool | None = None
    is_gguf_rope_permuted: bool = False
    is_gemma: bool = False
    has_attention_softcap: bool = False
    window_period: int = 0
    window_theta: float | None = None
    has_layer_types: bool = False
    has_windows: bool = True
    theta: float = 10_000.0
    mlp_size: str = "intermediate_size"
    defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.reads


_EXPERTS = ("num_experts", "num_local_experts")
_GRANITE = (
    "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling", "position_embedding_type",
)  # fmt: skip
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_QK_NORM: dict[str, Any] = {"has_qk_norm": True}
_AROUND: dict[str, Any] = {"norms": "around", "norm_offset": 1.0}
_AFTER: dict[str, Any] = {**_QK_NORM, "norms": "after", "has_wide_qk_norm": True}
_MISTRAL = {"sliding_window": 4096, "num_key_value_heads": 8}
_QWEN = {"sliding_window": 4096, "use_sliding_window": False, "max_window_layers": 28}
_GEMMA = {
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096, "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
_GEMMA2 = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "max_position_embeddings": 8192}
_GEMMA3 = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_SMOLLM3 = {
    "num_key_value_heads": 4, "no_rope_layer_interval": 4, "use_sliding_window": False, "tie_word_embeddings": True,
    "max_position_embeddings": 32_768,
}  # fmt: skip
_PHI3 = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "original_max_position_embeddings": 4096}
# by default its class has Mamba's layers and experts, which are refused
_GRANITE4 = {
    "num_local_experts": 8, "layer_types": ["mamba"], "shared_intermediate_size": 1024, "attention_multiplier": 1.0,
}  # fmt: skip

FAMILIES = (
    Family("LlamaForCausalLM", "llama", "llama", is_gguf_rope_permuted=True, has_windows=False),
    Family("MistralForCausalLM", "mistral", "mistral", is_gguf_rope_permuted=True, has_layer_types=True, defaults=_MISTRAL),
    Family("Qwen2ForCausalLM", "qwen2", "qwen2", has_qkv_bias=True, has_layer_types=True, defaults=_QWEN),
    Family("Qwen3ForCausalLM", "qwen3", "qwen3", traits=_QK_NORM, has_layer_types=True, defaults={**_QWEN, "head_dim": 128}),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", "qwen3moe", traits=_QK_NORM, reads=_EXPERTS, defaults=_QWEN),
    Family("Gemma2ForCausalLM", "gemma2", "gemma2", traits=_AROUND, reads=_CAPS, is_gemma=True, window_period=2,
           has_layer_types=True, has_attention_softcap=True, defaults={**_GEMMA, **_GEMMA2}),
    Family("Gemma3ForCausalLM", "gemma3_text", "gemma3", traits={**_AROUND, **_QK_NORM}, reads=_CAPS, is_gemma=True,
           window_period=6, window_theta=1e4, has_layer_types=True, theta=1e6, defaults={**_GEMMA, **_GEMMA3}),
    Family("SmolLM3ForCausalLM", "smollm3", "smollm3", reads=("no_rope_layers", "no_rope_layer_interval"),
           is_gguf_rope_permuted=True, has_layer_types=True, theta=2e6, defaults=_SMOLLM3),
    Family("Phi3ForCausalLM", "phi3", "phi3", reads=("partial_rotary_factor",), has_qkv_bias=False, defaults=_PHI3),
    Family("GraniteForCausalLM", "granite", "granite", reads=_GRANITE, is_gguf_rope_permuted=True, has_windows=False,
           defaults={"attention_multiplier": 1.0, "position_embedding_type": "rope"}),
    Family("GraniteMoeHybridForCausalLM", "granitemoehybrid", "granitehybrid", reads=_GRANITE, is_gguf_rope_permuted=True,
           has_layer_types=True, mlp_size="shared_intermediate_size", defaults=_GRANITE4),
    Family("Olmo3ForCausalLM", "olmo3", "olmo2", traits=_AFTER, window_period=4, window_theta=0.0, has_layer_types=True,
           theta=5e5, defaults={"sliding_window": 4096, "rms_norm_eps": 1e-5}),
    Family("Olmo2ForCausalLM", "olmo2", "olmo2", traits=_AFTER, has_windows=False, defaults={"rms_norm_eps": 1e-5}),
)  # fmt: skip
# their text model is a supported one
_WITH_IMAGES = {"Gemma3ForConditionalGeneration": "Gemma3ForCausalLM"}


def family_of(architecture: str) -> Family:
    """The family of an architecture, by its name at Hugging Face or in GGUF. Raises ModelError with
    the list of supported ones."""
    for family in FAMILIES:
        if architecture in (family.hf, family.model_type, family.gguf):
            return family
    supported = ", ".join(f"{family.hf} (GGUF: {family.gguf})" for family in FAMILIES)
    raise ModelError(f"architecture {architecture!r} is not supported; supported: {supported}")


def require(config: Mapping[str, Any], key: str, source: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ModelError(f"{source} has no {key!r}")
    return value


def layers_of(config: Mapping[str, Any], key: str, source: str) -> int:
    """The number of layers. Raises ModelError for a number outside 1 to 10,000."""
    layers = int(require(config, key, source))
    if not 0 < layers <= _LAYERS_MAX:
        raise ModelError(f"{source}: {key} is {layers}, expected 1 to {_LAYERS_MAX:,}")
    return layers


def model_config_from_hf(config: Mapping[str, Any], name: str, source: str) -> ModelConfig:
    """The ModelConfig of a config.json. `source` names the file in errors. Raises ModelError."""
    family, given = _text_config(config, source)
    config = {**family.defaults, **given}
    _refuse_other_functions(config, family, source)
    heads = int(require(config, "num_attention_heads", source))
    hidden_size = int(require(config, "hidden_size", source))
    layers = layers_of(config, "num_hidden_layers", source)
    head_dim = int(config.get("head_dim") or hidden_size // heads)
    has_bias = bool(config.get("attention_bias", False))
    rotated = _rotated(config, family, layers)
    if not all(rotated) and not config.get("layer_types"):
        config = {**config, "layer_types": [FULL if turns else SLIDING for turns in rotated]}
    windows = windows_of(config, family, layers, source)
    rope, window_rope = _ropes({**config, "head_dim": head_dim}, family, source)
    score_divisor = config["query_pre_attn_scalar"] if family.is_gemma else head_dim
    # a stream that is this often as small needs no factor where it is added to
    residual = float(config.get("residual_multiplier") or 1.0)
    return ModelConfig(
        architecture=family.hf,
        name=name,
        hidden_size=hidden_size,
        layers=layers,
        attention=AttentionConfig(
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            windows=windows,
            scale=float(config.get("attention_multiplier") or float(score_divisor) ** -0.5),
            softcap=softcap(config.get("attn_logit_softcapping")) if family.has_attention_softcap else None,
        ),
        intermediate_size=int(require(config, family.mlp_size, source)),
        vocabulary_size=int(require(config, "vocab_size", source)),
        context_tokens=_context_tokens(config, rope),
        rms_epsilon=float(config.get("rms_norm_eps", 1e-6)) / residual**2,
        ropes=tuple(
            (window_rope if window else rope) if turns else RopeConfig(kind="none")
            for turns, window in zip(rotated, windows, strict=False)
        ),
        has_qkv_bias=has_bias if family.has_qkv_bias is None else family.has_qkv_bias,
        has_output_bias=has_bias and family.has_qkv_bias is None,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        experts=_experts(config, layers, source) if family.has_experts else None,
        activation=_activation(config, family, source),
        logit_softcap=softcap(config.get("final_logit_softcapping")),
        logit_divisor=float(config.get("logits_scaling") or 1.0),
        embedding_scale=float(
            math.sqrt(hidden_size) if family.is_gemma else (config.get("embedding_multiplier") or 1.0) / residual
        ),
        eos_token_ids=token_ids(config.get("eos_token_id"), source),
        **{"has_qk_norm": False, **family.traits},
    )


def _rotated(config: Mapping[str, Any], family: Family, layers: int) -> list[bool]:
    """For each layer, whether it rotates."""
    rotates = config.get("no_rope_layers")  # which names those that do
    if rotates is None:
        period = int(config.get("no_rope_layer_interval") or 0)
        rotates = [not period or (layer + 1) % period for layer in range(layers)]
    is_left_out = "position_embedding_type" in family.reads and config.get("position_embedding_type") != "rope"
    return [bool(turns) and not is_left_out for turns in rotates[:layers]]


def _text_config(config: Mapping[str, Any], source: str) -> tuple[Family, Mapping[str, Any]]:
    """The family, and the part of the config that describes its text decoder.

    A model that was saved without its head (`LlamaModel`) is identified by its type.
    """
    named = config.get("architectures") or []
    name = str(named[0]) if named and not str(named[0]).endswith("Model") else str(config.get("model_type") or "")
    if not name:
        raise ModelError(f"{source} names no architecture")
    if name not in _WITH_IMAGES:
        return family_of(name), config
    text = require(config, "text_config", source)
    outer = {key: config[key] for key in ("tie_word_embeddings", "eos_token_id") if config.get(key) is not None}
    return family_of(_WITH_IMAGES[name]), {**text, **outer}


def _refuse_other_functions(config: Mapping[str, Any], family: Family, source: str) -> None:
    """Raise ModelError for a field that makes the model compute another function than the family's."""
    # decision: exact-or-refused
    refused_keys = [key for key in _MUST_BE_UNSET if config.get(key)]
    refused_keys += [key for key in _MUST_BE_ONE if config.get(key) not in (None, 1)]
    refused_keys += [key for key in ("no_rope_layers",) if not all(config.get(key) or ())]
    refused_keys += [key for key in ("is_causal",) if config.get(key) is False]
    refused_keys = [key for key in refused_keys if key not in family.reads]
    if refused_keys:
        raise ModelError(f"{source}: {refused_keys[0]} {config[refused_keys[0]]!r} is not supported in a {family.hf}")


def token_ids(value: Any, source: str) -> tuple[int, ...]:
    """The ids of a config's `eos_token_id`, which may be null, a number or a list. Raises
    ModelError."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) for id in ids):
        raise ModelError(f"{source}: eos_token_id is {value!r}, expected a number or numbers")
    return tuple(dict.fromkeys(ids))


def softcap(value: Any) -> float | None:
    return float(value) if value else None


def _activation(config: Mapping[str, Any], family: Family, source: str) -> str:
    # Gemma 1's configs named an activation in hidden_act that was not used; hidden_activation is
    # the true one
    key = "hidden_activation" if family.is_gemma else "hidden_act"
    named = str(config.get(key) or "silu")
    require_among(named, _ACTIVATIONS, f"{source}: {key}")
    return _ACTIVATIONS[named]


def _context_tokens(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """The context in tokens. Dynamic and longrope scaling change the angles of all positions,
    including cached keys', beyond the trained context: so it ends there."""
    context = int(config.get("max_position_embeddings") or 2048)
    return min(context, rope.original_context_tokens) if rope.kind in ("dynamic", "longrope") else context


def windows_of(config: Mapping[str, Any], family: Family, layers: int, source: str) -> tuple[int, ...]:
    """The tokens to which a token attends, by layer; configs specify them by a list of types, a
    period, or the first layer."""
    window = int(config.get("sliding_window") or 0) if config.get("use_sliding_window", True) else 0
    types = config.get("layer_types") or ()
    unknown = set(types) - _LAYER_TYPES.keys()
    if unknown:
        raise ModelError(f"{source}: layer_types {sorted(unknown)} are not supported; supported: {FULL}, {SLIDING}")
    by_type = tuple(window if kind == SLIDING else 0 for kind in types)
    if by_type and family.has_layer_types:
        return by_type
    if not family.has_windows:
        window = 0
    period = int(config.get("sliding_window_pattern") or family.window_period)
    first = 0 if family.has_experts else int(config.get("max_window_layers") or 0)
    windows = tuple(window if ((layer + 1) % period if period else layer >= first) else 0 for layer in range(layers))
    if SLIDING in types and by_type != windows:
        raise ModelError(f"{source}: layer_types of several kinds are not supported in a {family.hf}")
    return windows


def _experts(config: Mapping[str, Any], layers: int, source: str) -> ExpertsConfig | None:
    step = int(config.get("decoder_sparse_step") or 1)
    dense = set(config.get("mlp_only_layers") or ())
    count = config.get("num_experts", config.get("num_local_experts"))
    if count == 0:
        return None
    return ExpertsConfig(
        count=int(require({"num_experts": count}, "num_experts", source)),
        per_token=int(require(config, "num_experts_per_tok", source)),
        intermediate_size=int(require(config, "moe_intermediate_size", source)),
        normalises=bool(config.get("norm_topk_prob", False)),
        is_sparse=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(layers)),
    )


def _ropes(config: Mapping[str, Any], family: Family, source: str) -> tuple[RopeConfig, RopeConfig]:
    """The rotary embeddings of layers without and with a window. Reads all spellings: rope_theta
    with rope_scaling, rope_parameters (transformers 5), and rope_parameters by the layer's type
    (Gemma 3, OLMo 3)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or {}
    theta = config.get("rope_theta") or family.theta
    by_type = not {FULL, SLIDING}.isdisjoint(parameters)
    full, local = (parameters.get(FULL) or {}, parameters.get(SLIDING) or {}) if by_type else (parameters, {})
    rope = _rope({**full, **scaling}, theta, config, family, source)
    if family.window_theta is None and not by_type:
        return rope, rope
    window_theta = config.get("rope_local_base_freq") or family.window_theta or theta
    return rope, _rope(local, window_theta, config, family, source)


def _rope(
    scaling: Mapping[str, Any], theta: float, config: Mapping[str, Any], family: Family, source: str
) -> RopeConfig:
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind == "su" or (kind == "yarn" and family.hf == "Phi3ForCausalLM"):  # what Phi 3 called it at first
        kind = "longrope"
    require_among(kind, ROPE_TYPES, f"{source}: rope scaling")
    share = scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if share != 1.0 and "partial_rotary_factor" not in family.reads:
        raise ModelError(f"{source}: partial_rotary_factor {share!r} is not supported in a {family.hf}")
    context = int(config.get("max_position_embeddings") or 2048)
    given = config.get("original_max_position_embeddings") or scaling.get("original_max_position_embeddings")
    original = int(given or (8192 if kind == "llama3" else context))
    factor = float(scaling.get("factor") or (context / original if kind in ("yarn", "longrope") else 1.0))
    return RopeConfig(
        theta=float(scaling.get("rope_theta") or theta),
        kind=kind,
        factor=factor,
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_context_tokens=context if kind == "dynamic" else original,
        beta_fast=float(scaling.get("beta_fast") or 32.0),
        beta_slow=float(scaling.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(kind, scaling, factor, original),
        has_whole_bounds=bool(scaling.get("truncate", True)),
        divisors=tuple(map(float, require(scaling, "short_factor", source))) if kind == "longrope" else (),
        dims=None if share == 1.0 else int(config["head_dim"] * share),
    )


def _attention_factor(kind: str, scaling: Mapping[str, Any], factor: float, original: int) -> float:
    """The factor that multiplies cos and sin."""
    if kind not in ("yarn", "longrope"):
        return 1.0
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    if kind == "longrope":
        return 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(original))
    over, under = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if over and under:
        return yarn_scale(factor, float(over)) / yarn_scale(factor, float(under))
    return yarn_scale(factor, 1.0)


def yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
