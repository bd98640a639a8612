"""What an engine is told (EngineConfig) and what a checkpoint says of itself (ModelConfig).

Knows no weights and no torch. Invariant: a ModelConfig that was built describes a model the decoder computes exactly;
whatever it cannot compute is refused here, by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3")


class ModelError(Exception):
    """The model cannot be loaded: missing, broken, or of a kind that is not supported. The message names which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. None means: decided from the machine when the engine starts.

    `model`: a GGUF file, a checkpoint folder, a hub name, or None for the embedded default. `dtype`: auto, float32,
    bfloat16 or float16. `kv_blocks` overrides `kv_size_mb`. `step_tokens_max` bounds the tokens of one step, decode
    and prefill together; `sequences_max` those that run at once; `queue_max` those that wait.
    """

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None
    kv_size_mb: int | None = None
    kv_blocks: int | None = None
    block_tokens: int = 16
    context_tokens_max: int | None = None
    step_tokens_max: int | None = None
    sequences_max: int | None = None
    queue_max: int = 256
    answer_tokens_default: int = 512
    has_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name in (
            "threads",
            "kv_size_mb",
            "kv_blocks",
            "block_tokens",
            "context_tokens_max",
            "step_tokens_max",
            "sequences_max",
            "queue_max",
            "answer_tokens_default",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, not {self.dtype!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (arXiv:2104.09864). `kind` llama3 rescales low frequencies as Llama 3.1 does; `factors` divides
    each frequency (how GGUF files carry the same)."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a decoder-only transformer of the Llama kind, in the words of Hugging Face's config.json."""

    architecture: str
    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocabulary_size: int
    context_tokens: int
    rms_epsilon: float
    rope: RopeConfig
    has_qk_norm: bool
    has_qkv_bias: bool
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """What one architecture adds to the common decoder. `gguf` is its name in GGUF files."""

    hf: str
    gguf: str
    has_qk_norm: bool = False
    has_qkv_bias: bool | None = None
    is_gguf_rope_permuted: bool = False


FAMILIES = (
    Family("LlamaForCausalLM", "llama", is_gguf_rope_permuted=True),
    Family("MistralForCausalLM", "mistral", is_gguf_rope_permuted=True),
    Family("Qwen2ForCausalLM", "qwen2", has_qkv_bias=True),
    Family("Qwen3ForCausalLM", "qwen3", has_qk_norm=True),
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


def model_config_from_hf(config: Mapping[str, Any], name: str, source: str) -> ModelConfig:
    """A ModelConfig from the contents of a config.json. `source` names the file in errors. Raises ModelError."""
    architectures = config.get("architectures") or []
    if not architectures:
        raise ModelError(f"{source} names no architecture")
    family = family_of(str(architectures[0]))
    for key, wanted in (("quantization_config", None), ("hidden_act", "silu"), ("partial_rotary_factor", 1.0)):
        found = config.get(key)
        if found is not None and found != wanted:
            raise ModelError(f"{source}: {key} {found!r} is not supported")
    heads = int(_require(config, "num_attention_heads", source))
    hidden_size = int(_require(config, "hidden_size", source))
    has_bias = bool(config.get("attention_bias", False))
    eos = config.get("eos_token_id")
    return ModelConfig(
        architecture=family.hf,
        name=name,
        hidden_size=hidden_size,
        layers=int(_require(config, "num_hidden_layers", source)),
        heads=heads,
        kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden_size // heads),
        intermediate_size=int(_require(config, "intermediate_size", source)),
        vocabulary_size=int(_require(config, "vocab_size", source)),
        context_tokens=_context_tokens(config),
        rms_epsilon=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config, source),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias=has_bias if family.has_qkv_bias is None else family.has_qkv_bias,
        has_output_bias=has_bias and family.has_qkv_bias is None,
        has_mlp_bias=bool(config.get("mlp_bias", False)),
        has_tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (int(eos),),
    )


def _context_tokens(config: Mapping[str, Any]) -> int:
    """The context, cut to the sliding window where there is one: within it, full attention is the same computation."""
    context = int(config.get("max_position_embeddings") or 2048)
    window = config.get("sliding_window")
    if window is not None and config.get("use_sliding_window", True):
        context = min(context, int(window))
    return context


def _rope(config: Mapping[str, Any], source: str) -> RopeConfig:
    """Both spellings: rope_theta + rope_scaling, and rope_parameters (transformers 5)."""
    parameters: Mapping[str, Any] = config.get("rope_parameters") or {}
    scaling: Mapping[str, Any] = config.get("rope_scaling") or parameters
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    if kind not in ROPE_TYPES:
        raise ModelError(f"{source}: rope scaling {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    return RopeConfig(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0),
        kind=kind,
        factor=float(scaling.get("factor") or 1.0),
        low_freq_factor=float(scaling.get("low_freq_factor") or 1.0),
        high_freq_factor=float(scaling.get("high_freq_factor") or 4.0),
        original_context_tokens=int(scaling.get("original_max_position_embeddings") or 8192),
    )


def model_config_from_gguf(metadata: Mapping[str, Any], tensors: frozenset[str], name: str) -> ModelConfig:
    """A ModelConfig from a GGUF file's metadata and the names of its tensors. Raises ModelError."""
    source = "the GGUF metadata"
    arch = str(_require(metadata, "general.architecture", source))
    family = family_of(arch)
    scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
    if scaling not in ("none", "linear"):
        raise ModelError(f"{source}: rope scaling {scaling!r} is not supported; supported: none, linear")
    heads = int(_require(metadata, f"{arch}.attention.head_count", source))
    hidden_size = int(_require(metadata, f"{arch}.embedding_length", source))
    eos = [metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=family.hf,
        name=name,
        hidden_size=hidden_size,
        layers=int(_require(metadata, f"{arch}.block_count", source)),
        heads=heads,
        kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
        head_dim=int(metadata.get(f"{arch}.attention.key_length") or hidden_size // heads),
        intermediate_size=int(_require(metadata, f"{arch}.feed_forward_length", source)),
        vocabulary_size=len(_require(metadata, "tokenizer.ggml.tokens", source)),
        context_tokens=int(_require(metadata, f"{arch}.context_length", source)),
        rms_epsilon=float(_require(metadata, f"{arch}.attention.layer_norm_rms_epsilon", source)),
        rope=RopeConfig(
            theta=float(metadata.get(f"{arch}.rope.freq_base", 10_000.0)),
            kind="default" if scaling == "none" else "linear",
            factor=float(metadata.get(f"{arch}.rope.scaling.factor", 1.0)),
        ),
        has_qk_norm=family.has_qk_norm,
        has_qkv_bias="blk.0.attn_q.bias" in tensors,
        has_output_bias="blk.0.attn_output.bias" in tensors,
        has_tied_embeddings="output.weight" not in tensors,
        eos_token_ids=tuple(dict.fromkeys(int(id) for id in eos if id is not None)),
    )
