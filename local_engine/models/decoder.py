"""A decoder-only transformer of the Llama kind: RMSNorm, rotary positions, grouped-query attention,
a gated MLP.

One class serves every family of `families.FAMILIES`; their differences (biases, norms, windows,
caps, experts, rope scaling) are data. Weights with a common input are stored as one matrix: Q, K, V
together, gate and up together. Knows the rows of one step and no sequences. Invariant: each row
equals the result of the Hugging Face model with the same config.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as functional

from local_engine.attention import KV, Angles, StepInput
from local_engine.config import ModelConfig, ModelError
from local_engine.kernels.fused import add_norm, rms_norm, row_kernels, softcap
from local_engine.models.mlp import Experts, Mlp
from local_engine.models.rope import rotary, turning_first
from local_engine.weights.linear import Linear, LinearOptions
from local_engine.weights.quantised import Quantised, bits_of
from local_engine.weights.scaled import Scaled, rows_of


@dataclass(slots=True)
class Layer:
    """One block's weights. `qk_norm` is [heads + kv_heads, head_dim]; norms that the family lacks
    are None."""

    attention_norm: torch.Tensor | None
    qkv: Linear
    qk_norm: torch.Tensor | None
    output: Linear
    output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | Experts
    down_norm: torch.Tensor | None

    def linears(self) -> Iterator[Linear]:
        yield self.qkv
        yield self.output
        yield from self.mlp.linears()


@dataclass(frozen=True, slots=True)
class Part:
    """The target of a checkpoint's tensor: part `index` of a Linear's rows."""

    linear: Linear
    index: int

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.linear.rows[self.index], self.linear.columns))


# Hugging Face's names for the norms before and after attention, before and after the MLP
_NORMS = {
    "before": ("input", None, "post_attention", None),
    "around": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
    "after": (None, "post_attention", None, "post_feedforward"),
}


def _normalise_wide(qkv: torch.Tensor, weight: torch.Tensor, config: ModelConfig) -> None:
    """Normalise each row's queries as one vector and its keys as another, in place."""
    queries = config.attention.heads
    for heads in (slice(queries), slice(queries, len(weight))):
        own = qkv[:, heads]
        own.copy_(rms_norm(own.flatten(1), weight[heads].flatten(), config.rms_epsilon).view_as(own))


def _check_numbers(name: str, tensor: torch.Tensor | Quantised | Scaled) -> None:
    """Check a weight's number type, and that it is finite: otherwise every answer would be
    nonsense. Raises ModelError."""
    numbers = [tensor] if isinstance(tensor, torch.Tensor) else [tensor.scales]
    if isinstance(tensor, Quantised):
        numbers.append(tensor.minimums)
    for values in numbers:
        if not values.is_floating_point() or values.dtype.itemsize < 2:
            raise ModelError(f"tensor {name!r} holds {values.dtype}, expected floats of 16 bits or more")
        lowest, highest = values.aminmax()
        if not (lowest.isfinite() and highest.isfinite()):
            raise ModelError(f"tensor {name!r} holds values that are no finite numbers (NaN or infinity)")


def _write(tensor: torch.Tensor | Quantised | Scaled, to: torch.Tensor) -> None:
    if isinstance(tensor, torch.Tensor):
        to.copy_(tensor)
    else:
        tensor.write_to(to)


class Decoder:
    """Weights and the forward pass. Call `expect` with the names, `load` for every tensor,
    `finish`, then the decoder itself for each step.

    `parameters` counts the weights loaded so far; tied weights count once.
    """

    def __init__(self, config: ModelConfig, options: LinearOptions, *, bits: int | None = None) -> None:
        """`options` apply to matrices; the head, routers and experts are never 8-bit floats.
        `bits`: 8 or 4 quantises matrices while they are read, if supported (`bits_of`); None keeps
        them as stored."""
        self.config = config
        self.dtype = options.dtype
        self.device = options.device
        self.native = row_kernels(self.device, self.dtype)
        self.parameters = 0
        self._bits = bits
        self._options, self._options_exact = options, replace(options, fp8="never")
        self._targets: dict[str, torch.Tensor | Part] = {}
        self._norms: list[torch.Tensor] = []
        hidden = config.hidden_size
        self._embedding: torch.Tensor | None = None  # none where it is the head's matrix
        self.final_norm = self._norm("model.norm.weight", hidden)
        of_head = replace(self._options_exact, is_head=True)
        self.head = self._linear(("lm_head",), (config.vocabulary_size,), hidden, options=of_head)
        if config.has_tied_embeddings:
            self._targets["model.embed_tokens.weight"] = self._targets.pop("lm_head.weight")
        else:
            self._embedding = self._empty(config.vocabulary_size, hidden)
            self._targets["model.embed_tokens.weight"] = self._embedding
        self.layers = [self._make_layer(index) for index in range(config.layers)]
        self.rotary: list[Angles] = []

    @property
    def size_bytes(self) -> int:
        own = 0 if self._embedding is None else self._embedding.nbytes
        return own + sum(linear.size_bytes for linear in self.linears())

    @property
    def has_one_way(self) -> bool:
        """Whether the launched kernels do not depend on the tokens."""
        return all(not isinstance(layer.mlp, Experts) or layer.mlp.grouped is not None for layer in self.layers)

    @property
    def is_batch_invariant(self) -> bool:
        """Whether every product computes a row independently of the other rows."""
        return all(linear.is_native for linear in self.linears())

    def linears(self) -> Iterator[Linear]:
        yield self.head
        for layer in self.layers:
            yield from layer.linears()

    def expect(self, names: frozenset[str]) -> None:
        """Before the first `load`: compare a checkpoint's tensors with those that this model needs.
        Raises ModelError."""
        missing = sorted(self._targets.keys() - names)
        if missing:
            raise ModelError(f"the checkpoint lacks {len(missing)} tensors, the first is {missing[0]!r}")
        for name in sorted(names - self._targets.keys()):
            if not self._is_unused(name):
                raise ModelError(f"unexpected tensor {name!r} in a {self.config.architecture} checkpoint")

    def forms(self) -> Counter[str]:
        """The number of matrices in each form: "4 bits", "8 bits", or a number type."""
        return Counter(form for linear in self.linears() for form in linear.forms())

    def _is_unused(self, name: str) -> bool:
        """Whether a tensor is a rotary table of an old file."""
        return name.endswith("rotary_emb.inv_freq")

    def load(self, name: str, tensor: torch.Tensor | Quantised | Scaled) -> None:
        """Load one of the expected tensors under its Hugging Face name. Raises ModelError for a
        wrong shape."""
        if self._is_unused(name):
            return
        target = self._targets.pop(name, None)
        if target is None:
            raise ModelError(f"tensor {name!r} is there twice")
        # one row for all heads
        is_shared = name.endswith(("q_norm.weight", "k_norm.weight")) and not self.config.has_wide_qk_norm
        wanted = target.shape[1:] if is_shared else target.shape
        if wanted != tensor.shape:
            raise ModelError(f"tensor {name!r} has shape {tuple(tensor.shape)}, expected {tuple(wanted)}")
        _check_numbers(name, tensor)
        module = name.split(".")[-2]
        if module in ("q_proj", "k_proj") and (dims := self.config.ropes[int(name.split(".")[2])].dims) is not None:
            tensor = rows_of(tensor, turning_first(tensor.shape[0], self.config.attention.head_dim, dims))
        if isinstance(target, Part):
            target.linear.load(target.index, tensor)
            if name == "model.embed_tokens.weight" and not (self.head.has_rows and self.head.holds(0, tensor)):
                self._embedding = self._empty(*tensor.shape)
                _write(tensor, self._embedding)
        else:
            _write(tensor, target)
        self.parameters += tensor.shape.numel()

    def finish(self, context_tokens: int) -> None:
        """After the last `load`: prepare products and rotary tables."""
        config = self.config
        for layer in self.layers:
            for linear in layer.linears():
                linear.prepare()
            if isinstance(layer.mlp, Experts):
                layer.mlp.prepare(self.device)
        self.head.prepare()
        for norm in self._norms:
            norm += config.norm_offset
        self.final_norm /= config.logit_divisor
        tables = {
            rope: rotary(rope, config.attention.head_dim, context_tokens, dtype=self.dtype, device=self.device)
            for rope in set(config.ropes)
        }
        self.rotary = [tables[rope] for rope in config.ropes]

    def __call__(self, step: StepInput, kv: KV) -> torch.Tensor:
        """The logits [len(logit_rows), vocabulary] of one step; stores the step's KV in the pool."""
        config = self.config
        epsilon = config.rms_epsilon
        x = self.embed(step.token_ids)
        more = torch.zeros_like(x)  # the layer before adds this to x
        tables = {id(table): table for table in self.rotary}
        angles = {key: kv.angles(*table, step.positions) for key, table in tables.items()}
        for index, layer in enumerate(self.layers):
            y = add_norm(self.native, x, more, layer.attention_norm, epsilon)
            qkv = layer.qkv(y).view(len(y), -1, config.attention.head_dim)
            qk_norm = layer.qk_norm
            if config.has_wide_qk_norm and qk_norm is not None:
                _normalise_wide(qkv, qk_norm, config)
                qk_norm = None
            y = layer.output(kv.attend(index, qkv, qk_norm, angles[id(self.rotary[index])], step))
            y = y if layer.output_norm is None else rms_norm(y, layer.output_norm, epsilon)
            more = layer.mlp(add_norm(self.native, x, y, layer.mlp_norm, epsilon))
            more = more if layer.down_norm is None else rms_norm(more, layer.down_norm, epsilon)
        x = x[step.logit_rows] + more[step.logit_rows]
        return softcap(self.head(add_norm(self.native, x, None, self.final_norm, epsilon)), config.logit_softcap)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The first layer's input, [tokens, hidden]."""
        x = (
            self.head.take_rows(token_ids)
            if self._embedding is None
            else functional.embedding(token_ids, self._embedding)
        )
        scale, is_rounded = self.config.embedding_scale, self.config.norms == "around"  # as Gemma's is
        return x if scale == 1.0 else x * torch.tensor(scale, dtype=x.dtype if is_rounded else torch.float32)

    def _empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def _norm(self, name: str, *shape: int) -> torch.Tensor:
        """Register a norm's weight; in float32 for the native kernels, and if `finish` changes it,
        because half precision would round the change away."""
        is_wide = self.native is not None or self.config.norm_offset or self.config.logit_divisor != 1.0
        tensor = self._empty(*shape, dtype=torch.float32 if is_wide else None)
        self._targets[name] = tensor
        self._norms.append(tensor)
        return tensor

    def _linear(
        self,
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        *,
        has_bias: bool = False,
        options: LinearOptions | None = None,
        is_exact: bool = False,
    ) -> Linear:
        """A Linear of the checkpoint's tensors `names`, stacked by rows. `options` default to the
        model's. `is_exact` prevents further quantisation."""
        bits = None if self._bits is None or is_exact else [bits_of(n, self._bits, self.config.layers) for n in names]
        linear = Linear(rows, columns, options or self._options, has_bias=has_bias, bits=bits)
        self._targets |= {f"{name}.weight": Part(linear, index) for index, name in enumerate(names)}
        if linear.bias is not None:
            biases = torch.split(linear.bias, list(rows))
            self._targets |= {f"{name}.bias": own for name, own in zip(names, biases, strict=True)}
        return linear

    def _make_layer(self, index: int) -> Layer:
        config, prefix = self.config, f"model.layers.{index}"
        hidden, qkv_rows, heads = config.hidden_size, config.attention.qkv_rows, config.attention.heads
        attention = f"{prefix}.self_attn"
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        qk_norm = None
        if config.has_qk_norm:
            shape = (heads + config.attention.kv_heads, config.attention.head_dim)
            qk_norm = self._norm(f"{attention}.q_norm.weight", *shape)
            for name, own in (("q_norm", qk_norm[:heads]), ("k_norm", qk_norm[heads:])):
                self._targets[f"{attention}.{name}.weight"] = own.flatten() if config.has_wide_qk_norm else own
        attention_norm, output_norm, mlp_norm, down_norm = (
            None if name is None else self._norm(f"{prefix}.{name}_layernorm.weight", hidden)
            for name in _NORMS[config.norms]
        )
        return Layer(
            attention_norm=attention_norm,
            qkv=self._linear(qkv, qkv_rows, hidden, has_bias=config.has_qkv_bias),
            qk_norm=qk_norm,
            output=self._linear((f"{attention}.o_proj",), (hidden,), qkv_rows[0], has_bias=config.has_output_bias),
            output_norm=output_norm,
            mlp_norm=mlp_norm,
            mlp=self._make_mlp(index, f"{prefix}.mlp"),
            down_norm=down_norm,
        )

    def _make_mlp(self, index: int, prefix: str) -> Mlp | Experts:
        config = self.config
        experts = config.experts
        if experts is None or not experts.is_sparse[index]:
            return self._dense(prefix, config.intermediate_size)
        exact = self._options_exact
        return Experts(
            # not quantised: it is small, and every expert's share hangs on it
            router=self._linear(
                (f"{prefix}.gate",), (experts.count,), config.hidden_size, options=exact, is_exact=True
            ),
            experts=tuple(
                self._dense(f"{prefix}.experts.{expert}", experts.intermediate_size, exact)
                for expert in range(experts.count)
            ),
            per_token=experts.per_token,
            normalises=experts.normalises,
        )

    def _dense(self, prefix: str, inner: int, options: LinearOptions | None = None) -> Mlp:
        hidden = self.config.hidden_size
        gate, up, down = (f"{prefix}.{name}_proj" for name in ("gate", "up", "down"))
        linear = partial(self._linear, has_bias=self.config.has_mlp_bias, options=options)
        return Mlp(
            gate_up=linear((gate, up), (inner, inner), hidden),
            down=linear((down,), (hidden,), inner),
            activation=self.config.activation,
            native=self.native,
        )
