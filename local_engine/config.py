"""The settings of an engine (EngineConfig) and the shape of a model (ModelConfig).

`checkpoints` reads a ModelConfig from a checkpoint; its readers share `read_json` and
`require_among`. Knows no weights and no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

_SIZE_MAX = 2**31
_DTYPES, _WEIGHTS = ("auto", "float32", "bfloat16", "float16"), ("auto", "int8", "int4", "fp8")
_POSITIVE = ("rms_epsilon", "logit_softcap", "embedding_scale", "logit_divisor")


class ModelError(Exception):
    """The model cannot be loaded: it is missing, broken, or not supported. The message names which."""


def read_json(path: Path, *, is_needed: bool = True) -> dict[str, Any]:
    """A JSON object of a checkpoint; {} without the file, unless it `is_needed`. Raises ModelError."""
    try:
        content = json.loads(path.read_bytes()) if is_needed or path.is_file() else {}
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object")
    return content


def require_among(value: object, supported: Iterable[object], subject: str) -> None:
    """Raise ModelError with the `supported` values unless `value`, named `subject`, is among them."""
    if value not in supported:
        raise ModelError(f"{subject} {value!r} is not supported; supported: {', '.join(map(str, supported))}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The settings of one engine, which its process gets as JSON.
    None means: decided from the machine when the engine starts.

    `weights`: a checkpoint's quantised weights stay so if a kernel supports them; for int8, int4
    and fp8 weights are quantised while they are read; fp8, 8-bit floats, also quantises inputs.
    `kv_blocks` overrides `kv_size_mb`. `draft_tokens_max` bounds the drafted tokens that are
    verified (see `speculation`). `is_batch_invariant`: logits, to their last bit, do not depend on
    the rest of the batch or the chunks of a prompt. None: wherever the native kernels do all the
    work; True: refuse to start where they do not; False: long prompts may be a tenth faster and
    their last bits differ.
    """

    model: str | None = None  # a GGUF file, a checkpoint folder or a hub name; default: the embedded model
    draft_model: str | None = None  # a smaller model with the same tokenizer, which guesses for it
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    weights: str = "auto"  # auto (as the checkpoint has them), int8, int4, fp8
    threads: int | None = None  # CPU threads; default: the cores there are
    kv_size_mb: int | None = None  # memory for KV; default: by what is free
    kv_blocks: int | None = None  # the same, counted in blocks
    block_tokens: int = 16  # tokens of one KV block
    context_tokens_max: int | None = None  # a shorter context than the model's
    step_tokens_max: int | None = None  # tokens of one step, prefill and decode together
    sequences_max: int | None = None  # sequences that run at once
    queue_max: int = 256  # requests that may wait
    answer_tokens_default: int = 512  # max_tokens where a request has none
    draft_tokens_max: int = 8  # tokens guessed per sequence and step; 0: none
    is_batch_invariant: bool | None = None
    drain_s: float = 2.0  # that running answers have after SIGTERM

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value, least = getattr(self, name), 0 if name == "draft_tokens_max" else 1
            if type(value) is int and value < least:
                raise ValueError(f"{name} must be {least} or more, not {value}")
        for name, known in (("dtype", _DTYPES), ("weights", _WEIGHTS)):
            if (value := getattr(self, name)) not in known:
                raise ValueError(f"{name} must be {', '.join(known[:-1])} or {known[-1]}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding (arXiv:2104.09864). `kind`: default, linear (positions divided by `factor`,
    arXiv:2306.15595), llama3 (low frequencies rescaled as in Llama 3.1), yarn (arXiv:2309.00071,
    with its `beta_*`; `attention_factor` multiplies cos and sin), dynamic (NTK-aware; default
    within the trained context), longrope (arXiv:2402.13753; within the trained context frequencies
    are divided by `divisors`, one for each), or none: no rotation. `dims`: how many dimensions of a
    head are rotated; None is all."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_tokens: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    has_whole_bounds: bool = True
    divisors: tuple[float, ...] = ()
    dims: int | None = None

    def __post_init__(self) -> None:
        """Raise ModelError for angles that no model has."""
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_context_tokens", "beta_slow"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelError(f"rope: {name} must be above 0, not {getattr(self, name)}")
        if not all(0 < divisor < math.inf for divisor in self.divisors):
            raise ModelError(f"rope: factors must be above 0, not {self.divisors}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A sparse mixture of experts in place of the MLP (arXiv:2101.03961): `count` experts of
    `intermediate_size`; each token uses `per_token` of them. `is_sparse`: for each layer, whether
    it has a mixture. `normalises`: whether the weights of the chosen experts are scaled to sum to
    1."""

    count: int
    per_token: int
    intermediate_size: int
    normalises: bool
    is_sparse: tuple[bool, ...]

    def __post_init__(self) -> None:
        """Raise ModelError for mixtures that no model has."""
        if not 1 <= self.per_token <= self.count:
            raise ModelError(f"each token takes {self.per_token} of {self.count} experts; expected 1 to {self.count}")
        if self.intermediate_size < 1:
            raise ModelError(f"experts' size must be 1 or more, not {self.intermediate_size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of all layers: scores are multiplied by `scale` and bounded as softcap *
    tanh(score / softcap). `windows`: the number of tokens, itself included, that a token attends to
    in each layer; 0 is all."""

    heads: int
    kv_heads: int
    head_dim: int
    windows: tuple[int, ...]
    scale: float
    softcap: float | None = None

    @property
    def qkv_rows(self) -> tuple[int, int, int]:
        """The output dimensions of a layer's q, k and v."""
        kv_rows = self.kv_heads * self.head_dim
        return self.heads * self.head_dim, kv_rows, kv_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder-only transformer of the Llama kind, mostly in the terms of Hugging
    Face's config.json.

    `ropes`: the rotation of each layer. `norms`: whether attention and MLP are normalised before
    (their input), after (their output), or around, which is both. With `has_wide_qk_norm` the norm
    of queries and keys is over all heads at once. `norm_offset` is added to every norm's weight,
    `embedding_scale` multiplies embeddings, `logit_divisor` divides logits, `logit_softcap` bounds
    them as cap * tanh(x / cap).
    """

    architecture: str
    name: str
    hidden_size: int
    layers: int
    attention: AttentionConfig
    intermediate_size: int
    vocabulary_size: int
    context_tokens: int
    rms_epsilon: float
    ropes: tuple[RopeConfig, ...]
    has_qk_norm: bool
    has_qkv_bias: bool
    experts: ExpertsConfig | None = None
    activation: str = "silu"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_divisor: float = 1.0
    norms: Literal["before", "around", "after"] = "before"
    has_wide_qk_norm: bool = False
    has_output_bias: bool = False
    has_mlp_bias: bool = False
    has_tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ModelError for sizes that no model has."""
        attention = self.attention
        sizes = [(self, name) for name in ("hidden_size", "layers", "vocabulary_size", "context_tokens")]
        for owner, name in (*sizes, *((attention, name) for name in ("heads", "kv_heads", "head_dim"))):
            if not 1 <= getattr(owner, name) < _SIZE_MAX:
                raise ModelError(f"{self.name}: {name} must be from 1 to {_SIZE_MAX}, not {getattr(owner, name)}")
        factors = {name: getattr(self, name) for name in _POSITIVE}
        factors |= {"attention_scale": attention.scale, "attention_softcap": attention.softcap}
        for name, value in factors.items():
            if value is not None and not 0 < value < math.inf:
                raise ModelError(f"{self.name}: {name} must be above 0, not {value}")
        if attention.heads % attention.kv_heads:
            raise ModelError(f"{self.name}: {attention.heads} heads are no multiple of {attention.kv_heads} KV heads")
        if attention.head_dim % 2:
            raise ModelError(f"{self.name}: a head of {attention.head_dim} has no two halves to rotate")
        for what, told in (("windows", attention.windows), ("ropes", self.ropes)):
            if len(told) != self.layers:
                raise ModelError(f"{self.name}: {len(told)} {what} are told for {self.layers} layers")
        if any(window < 0 for window in attention.windows):
            raise ModelError(f"{self.name}: a window must be of 1 token or more, not {min(attention.windows)}")
        if self.intermediate_size < 1 and not (self.experts and all(self.experts.is_sparse)):
            raise ModelError(f"{self.name}: intermediate_size must be 1 or more, not {self.intermediate_size}")
        for rope in self.ropes:
            dims = attention.head_dim if rope.dims is None else rope.dims
            if not 0 < dims <= attention.head_dim or dims % 2:
                raise ModelError(f"{self.name}: {dims} of {attention.head_dim} dimensions can't be rotated in pairs")
            if rope.divisors and len(rope.divisors) != dims // 2:
                raise ModelError(f"{self.name}: {len(rope.divisors)} rope factors are told for heads of {dims}")
