"""A decoder-only transformer of the Llama kind: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

One class serves every family of `config.FAMILIES`; what differs (biases, QK-norm, tied embeddings, rope scaling) is
data. Weights that are multiplied with the same input are stored as one matrix: Q, K, V together, gate and up together.
Knows no sequences: it sees the rows of one step. Invariant: row by row it computes what the Hugging Face model of the
same config computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from local_engine.attention import PagedKV, StepInput
from local_engine.config import ModelConfig, ModelError, RopeConfig
from local_engine.linear import Linear


@dataclass(slots=True)
class Layer:
    """One block's weights. `qk_norm` is [heads + kv_heads, head_dim], None where the family has none."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """Weights and the forward pass. Load every tensor with `take`, then `finish`, then call it step by step.

    `parameters` counts the weights taken so far; tied ones count once.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.dtype = dtype
        self.device = device
        self.parameters = 0
        self._targets: dict[str, torch.Tensor] = {}
        self._rope_factors: torch.Tensor | None = None
        hidden = config.hidden_size
        self._embedding = self._empty(config.vocabulary_size, hidden)
        self._targets["model.embed_tokens.weight"] = self._embedding
        self._final_norm = self._target("model.norm.weight", hidden)
        is_tied = config.has_tied_embeddings
        self._head = Linear(
            self._embedding if is_tied else self._target("lm_head.weight", config.vocabulary_size, hidden)
        )
        self._layers = [self._make_layer(f"model.layers.{index}") for index in range(config.layers)]
        self._cos = self._sin = torch.empty(0)

    @property
    def size_bytes(self) -> int:
        return self.parameters * self._embedding.element_size()

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """Load one tensor under its Hugging Face name. Raises ModelError for a wrong shape or an unknown name."""
        if name == "rope_freqs":
            self._rope_factors = tensor.float()
            return
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and self.config.has_tied_embeddings):
            return
        target = self._targets.pop(name, None)
        if target is None:
            raise ModelError(f"unexpected tensor {name!r} in a {self.config.architecture} checkpoint")
        is_shared = name.endswith(("q_norm.weight", "k_norm.weight"))  # one row for all heads
        wanted = target.shape[1:] if is_shared else target.shape
        if wanted != tensor.shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(wanted)}")
        target.copy_(tensor)
        self.parameters += tensor.numel()

    def finish(self, context_tokens: int) -> None:
        """After the last `take`: prepare the rotary tables. Raises ModelError when tensors are missing."""
        if self._targets:
            missing = sorted(self._targets)
            raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]!r}")
        for layer in self._layers:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                linear.prepare()
        self._head.prepare(keeps_weight=self.config.has_tied_embeddings)
        frequencies = rope_frequencies(self.config.rope, self.config.head_dim)
        if self._rope_factors is not None:
            frequencies = frequencies / self._rope_factors
        angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
        cos, sin = angles.cos(), angles.sin()
        self._cos = torch.cat((cos, cos), -1).to(self.dtype).to(self.device).unsqueeze(1)
        self._sin = torch.cat((-sin, sin), -1).to(self.dtype).to(self.device).unsqueeze(1)

    def __call__(self, step: StepInput, kv: PagedKV) -> torch.Tensor:
        """Logits [len(logit_rows), vocabulary] of one step; the step's KV is in the pool afterwards."""
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        shape, epsilon = (config.hidden_size,), config.rms_epsilon
        cos, sin = self._cos[step.positions], self._sin[step.positions]
        x = functional.embedding(step.token_ids, self._embedding)
        for index, layer in enumerate(self._layers):
            y = functional.rms_norm(x, shape, layer.attention_norm, epsilon)
            qkv = layer.qkv(y).view(-1, heads + 2 * kv_heads, size)
            qk = qkv[:, : heads + kv_heads]
            if layer.qk_norm is not None:
                qk = functional.rms_norm(qk, (size,), None, epsilon) * layer.qk_norm
            qk = (qk * cos).addcmul_(qk.roll(size // 2, -1), sin)
            kv.write(index, step.slots, qk[:, heads:], qkv[:, heads + kv_heads :])
            y = kv.attend(index, qk[:, :heads], step)
            x = x + layer.output(y)
            y = functional.rms_norm(x, shape, layer.mlp_norm, epsilon)
            gate, up = layer.gate_up(y).chunk(2, -1)
            x = x + layer.down(functional.silu(gate).mul_(up))
        x = functional.rms_norm(x[step.logit_rows], shape, self._final_norm, epsilon)
        return self._head(x)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def _target(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._targets[name] = tensor
        return tensor

    def _fused(
        self, prefix: str, names: tuple[str, ...], rows: tuple[int, ...], columns: int, *, has_bias: bool
    ) -> Linear:
        """One Linear whose consecutive rows are the checkpoint's tensors of these names."""
        weight = self._empty(sum(rows), columns)
        bias = self._empty(sum(rows)) if has_bias else None
        for name, part in zip(names, torch.split(weight, list(rows)), strict=True):
            self._targets[f"{prefix}.{name}.weight"] = part
        for name, part in zip(names, torch.split(bias, list(rows)) if bias is not None else (), strict=False):
            self._targets[f"{prefix}.{name}.bias"] = part
        return Linear(weight, bias)

    def _make_layer(self, prefix: str) -> Layer:
        config = self.config
        hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        qkv = ("q_proj", "k_proj", "v_proj")
        qkv_rows = (config.heads * size, config.kv_heads * size, config.kv_heads * size)
        gate_up = ("gate_proj", "up_proj")
        qk_norm = None
        if config.has_qk_norm:
            qk_norm = self._empty(config.heads + config.kv_heads, size)
            self._targets[f"{attention}.q_norm.weight"] = qk_norm[: config.heads]
            self._targets[f"{attention}.k_norm.weight"] = qk_norm[config.heads :]
        return Layer(
            attention_norm=self._target(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(attention, qkv, qkv_rows, hidden, has_bias=config.has_qkv_bias),
            qk_norm=qk_norm,
            output=self._fused(attention, ("o_proj",), (hidden,), config.heads * size, has_bias=config.has_output_bias),
            mlp_norm=self._target(f"{prefix}.post_attention_layernorm.weight", hidden),
            gate_up=self._fused(mlp, gate_up, (inner, inner), hidden, has_bias=config.has_mlp_bias),
            down=self._fused(mlp, ("down_proj",), (hidden,), inner, has_bias=config.has_mlp_bias),
        )


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians per position. llama3 keeps high frequencies, divides low ones by `factor` and blends
    between (the rule of Llama 3.1's reference code)."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low = rope.original_context_tokens / rope.low_freq_factor
        high = rope.original_context_tokens / rope.high_freq_factor
        share = (rope.original_context_tokens / wavelengths - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        blended = (1 - share) * frequencies / rope.factor + share * frequencies
        scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
        return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)
    return frequencies
