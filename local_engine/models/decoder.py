"""A decoder-only transformer of the Llama kind: RMSNorm, rotary positions, grouped-query attention, a gated MLP.

One class serves every family of `families.FAMILIES`; what differs (biases, norms, windows, caps, experts, rope scaling)
is data. Weights that are multiplied with the same input are stored as one matrix: Q, K, V together, gate and up
together. Knows no sequences: it sees the rows of one step. Invariant: row by row it computes what the Hugging Face model
of the same config computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

from local_engine.attention import PagedKV, StepInput
from local_engine.config import ModelConfig, ModelError, RopeConfig
from local_engine.linear import Linear
from local_engine.models.mlp import Experts, Mlp
from local_engine.models.rope import Rotary, rotary


@dataclass(slots=True)
class Layer:
    """One block's weights. `qk_norm` is [heads + kv_heads, head_dim]; it and the norms after attention and MLP are
    None where the family has none."""

    attention_norm: torch.Tensor
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp | Experts
    down_norm: torch.Tensor | None

    def linears(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output
        yield from self.mlp.linears()


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
        self._norms: list[torch.Tensor] = []
        self._rope_factors: torch.Tensor | None = None
        hidden = config.hidden_size
        self._embedding = self._empty(config.vocabulary_size, hidden)
        self._targets["model.embed_tokens.weight"] = self._embedding
        self._final_norm = self._norm("model.norm.weight", hidden)
        self._head = Linear(
            self._embedding
            if config.has_tied_embeddings
            else self._target("lm_head.weight", config.vocabulary_size, hidden)
        )
        self._layers = [self._make_layer(index) for index in range(config.layers)]
        self._rotary: list[Rotary] = []

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
        """After the last `take`: prepare products and rotary tables. Raises ModelError when tensors are missing."""
        if self._targets:
            missing = sorted(self._targets)
            raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]!r}")
        config = self.config
        for layer in self._layers:
            for linear in layer.linears():
                linear.prepare()
        self._head.prepare(keeps_weight=config.has_tied_embeddings)
        for norm in self._norms:
            norm += config.norm_offset
        rope = self._table(config.rope, context_tokens, self._rope_factors)
        local = rope if config.window_rope is None else self._table(config.window_rope, context_tokens, None)
        self._rotary = [local if window else rope for window in config.windows]

    def __call__(self, step: StepInput, kv: PagedKV) -> torch.Tensor:
        """Logits [len(logit_rows), vocabulary] of one step; the step's KV is in the pool afterwards."""
        config = self.config
        x = functional.embedding(step.token_ids, self._embedding)
        if config.embedding_scale != 1.0:
            x = x * torch.tensor(config.embedding_scale, dtype=x.dtype)
        tables: dict[int, Rotary] = {}  # this step's rows of each rotary table
        for index, layer in enumerate(self._layers):
            table = self._rotary[index]
            if id(table) not in tables:
                tables[id(table)] = Rotary(table.cos[step.positions], table.sin[step.positions])
            y = rms_norm(x, layer.attention_norm, config.rms_epsilon)
            y = layer.output(self._attend(index, layer, y, tables[id(table)], step, kv))
            x = x + (y if layer.output_norm is None else rms_norm(y, layer.output_norm, config.rms_epsilon))
            y = layer.mlp(rms_norm(x, layer.mlp_norm, config.rms_epsilon))
            x = x + (y if layer.down_norm is None else rms_norm(y, layer.down_norm, config.rms_epsilon))
        logits = self._head(rms_norm(x[step.logit_rows], self._final_norm, config.rms_epsilon))
        return softcap(logits, config.logit_softcap)

    def _attend(
        self, index: int, layer: Layer, x: torch.Tensor, table: Rotary, step: StepInput, kv: PagedKV
    ) -> torch.Tensor:
        """One layer's attention up to its output matrix: project, normalise, rotate, remember, look back."""
        config = self.config
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        qkv = layer.qkv(x).view(-1, heads + 2 * kv_heads, size)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = rms_norm(qk, None, config.rms_epsilon, layer.qk_norm)
        qk = (qk * table.cos).addcmul_(qk.roll(size // 2, -1), table.sin)
        kv.write(index, step.slots, qk[:, heads:], qkv[:, heads + kv_heads :])
        return kv.attend(index, qk[:, :heads], step)

    def _table(self, rope: RopeConfig, context_tokens: int, factors: torch.Tensor | None) -> Rotary:
        size = self.config.head_dim
        return rotary(rope, size, context_tokens, factors=factors, dtype=self.dtype, device=self.device)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _target(self, name: str, *shape: int) -> torch.Tensor:
        tensor = self._empty(*shape)
        self._targets[name] = tensor
        return tensor

    def _norm(self, name: str, *shape: int) -> torch.Tensor:
        """A norm's weight; in float32 where an offset is added, which rounding to half precision would blur."""
        tensor = self._empty(*shape, dtype=torch.float32 if self.config.norm_offset else None)
        self._targets[name] = tensor
        self._norms.append(tensor)
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

    def _make_layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        hidden, size, has_post = config.hidden_size, config.head_dim, config.has_post_norms
        attention = f"{prefix}.self_attn"
        qkv_rows = (config.heads * size, config.kv_heads * size, config.kv_heads * size)
        qk_norm = None
        if config.has_qk_norm:
            qk_norm = self._norm(f"{attention}.q_norm.weight", config.heads + config.kv_heads, size)
            self._targets[f"{attention}.q_norm.weight"] = qk_norm[: config.heads]
            self._targets[f"{attention}.k_norm.weight"] = qk_norm[config.heads :]
        after = f"{prefix}.post_attention_layernorm.weight"  # Llama's name for what comes before the MLP
        return Layer(
            attention_norm=self._norm(f"{prefix}.input_layernorm.weight", hidden),
            qkv=self._fused(attention, ("q_proj", "k_proj", "v_proj"), qkv_rows, hidden, has_bias=config.has_qkv_bias),
            qk_norm=qk_norm,
            output=self._fused(attention, ("o_proj",), (hidden,), config.heads * size, has_bias=config.has_output_bias),
            output_norm=self._norm(after, hidden) if has_post else None,
            mlp_norm=self._norm(f"{prefix}.pre_feedforward_layernorm.weight" if has_post else after, hidden),
            mlp=self._make_mlp(index, f"{prefix}.mlp"),
            down_norm=self._norm(f"{prefix}.post_feedforward_layernorm.weight", hidden) if has_post else None,
        )

    def _make_mlp(self, index: int, prefix: str) -> Mlp | Experts:
        config = self.config
        experts = config.experts
        if experts is None or not experts.is_sparse[index]:
            return self._dense(prefix, config.intermediate_size)
        return Experts(
            router=Linear(self._target(f"{prefix}.gate.weight", experts.count, config.hidden_size)),
            experts=tuple(
                self._dense(f"{prefix}.experts.{expert}", experts.intermediate_size) for expert in range(experts.count)
            ),
            per_token=experts.per_token,
            normalises=experts.normalises,
        )

    def _dense(self, prefix: str, inner: int) -> Mlp:
        hidden, has_bias = self.config.hidden_size, self.config.has_mlp_bias
        return Mlp(
            gate_up=self._fused(prefix, ("gate_proj", "up_proj"), (inner, inner), hidden, has_bias=has_bias),
            down=self._fused(prefix, ("down_proj",), (hidden,), inner, has_bias=has_bias),
            activation=self.config.activation,
        )


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, per_head: torch.Tensor | None = None
) -> torch.Tensor:
    """RMSNorm (arXiv:1910.07467) over the last dimension; `per_head` multiplies instead of one row for all."""
    is_wide = any(w is not None and w.dtype != x.dtype for w in (weight, per_head))
    y = functional.rms_norm(x.float() if is_wide else x, x.shape[-1:], weight, epsilon)
    return (y if per_head is None else y * per_head).to(x.dtype)


def softcap(x: torch.Tensor, cap: float | None) -> torch.Tensor:
    """cap * tanh(x / cap), in place; no cap leaves x as it is."""
    return x if cap is None else x.div_(cap).tanh_().mul_(cap)
