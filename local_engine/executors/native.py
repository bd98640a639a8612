"""NativeExecutor: a step by the native kernels, in a single call if the model allows.

A model with only native, dense products is described to the kernels once, as pointers: matrices,
norms, rotary tables and pools of KV. For any other model the decoder calls kernels one by one,
which is also the oracle. Invariants: a single call equals the decoder to the last bit, except in
norms after attention and MLP; a sequence is read, never changed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial

import torch

from local_engine.attention import NativeKV, PagedRows, StepInput
from local_engine.executors.rows import step_input
from local_engine.kernels.cpu import Kernels, Matrix, kind_of
from local_engine.kernels.fused import softcap
from local_engine.models.decoder import Decoder, Layer
from local_engine.models.mlp import Mlp
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight
from local_engine.weights.linear import Linear, NativeProduct

_SPAN_TOKENS = 256  # the native kernel reads a shared prefix in pieces of so many tokens
_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _LinearPointers(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(Matrix)), ("count", _INT), ("outputs", _INT))


class _LayerPointers(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "qk_norm", "output_norm", "mlp_norm", "down_norm")),
        *((name, _LinearPointers) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("cos", "sin", "pool")),
        ("window", _LONG),
    )


class _ModelPointers(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_LayerPointers)),
        ("windows", ctypes.POINTER(_LONG)),
        ("final_norm", _POINTER),
        ("head", _LinearPointers),
        *((name, _LONG) for name in ("blocks", "weights")),
        *((name, _INT) for name in ("layer_count", "window_count", "kind", "head_kind", "hidden")),
        *((name, _INT) for name in ("heads", "kv_heads", "size", "block_tokens", "is_gelu")),
        *((name, _FLOAT) for name in ("epsilon", "scale", "cap")),
    )


class NativeExecutor:
    """Runs a loaded model's steps on a CPU; `kv` is its pools; `step` computes a step's logits."""

    def __init__(self, native: Kernels, decoder: Decoder, *, blocks: int, block_tokens: int) -> None:
        self.kv = NativeKV(native, decoder.config, blocks=blocks, block_tokens=block_tokens, dtype=decoder.dtype)
        self.step: Callable[[StepInput], torch.Tensor] = partial(decoder, kv=self.kv)
        is_native = all(linear.native_products() is not None for linear in decoder.linears())
        is_plain = decoder.config.norms != "after" and not decoder.config.has_wide_qk_norm
        if is_native and is_plain and all(isinstance(layer.mlp, Mlp) for layer in decoder.layers):
            self.step = NativeStep(decoder, self.kv)
        self._prefix_blocks = max(1, _SPAN_TOKENS // block_tokens)

    @torch.inference_mode()
    def run(self, chunks: Many[TokenChunk], before: StepInFlight | None) -> torch.Tensor:
        """The logits [sum of their logit_rows, vocabulary], in the order of the chunks."""
        # sequences with a common prefix become neighbours
        ordered = sorted(chunks, key=lambda chunk: chunk.sequence.blocks[:: self._prefix_blocks])
        return self.step(step_input(chunks, ordered, before, self.kv, paged=_paged(ordered)))


class NativeStep:
    """The model's description as pointers, and the call. Keeps the decoder and the pools to which
    it points."""

    def __init__(self, decoder: Decoder, kv: NativeKV) -> None:
        self._decoder, self._kv = decoder, kv
        config, products = decoder.config, decoder.head.native_products()
        assert products is not None
        self._logits_dtype = products[0].out_dtype
        self._layers = (_LayerPointers * config.layers)(
            *(self._layer(i, layer) for i, layer in enumerate(decoder.layers))
        )
        self._windows = (_LONG * len(kv.windows))(*kv.windows)
        self._model = _ModelPointers(
            layers=self._layers,
            windows=self._windows,
            final_norm=decoder.final_norm.data_ptr(),
            head=_linear(decoder.head),
            blocks=kv.blocks,
            weights=sum(sum(linear.rows) * linear.columns for linear in decoder.linears()),
            layer_count=config.layers,
            window_count=len(kv.windows),
            kind=kind_of(decoder.dtype),
            head_kind=products[0].kind,
            hidden=config.hidden_size,
            heads=config.attention.heads,
            kv_heads=config.attention.kv_heads,
            size=config.attention.head_dim,
            block_tokens=kv.block_tokens,
            is_gelu=config.activation == "gelu_tanh",
            epsilon=config.rms_epsilon,
            scale=config.attention.scale,
            cap=config.attention.softcap or 0.0,
        )

    def __call__(self, step: StepInput) -> torch.Tensor:
        """The logits [len(logit_rows), vocabulary] of one step; stores the step's KV in the pool."""
        assert step.paged is not None
        config, x = self._decoder.config, self._decoder.embed(step.token_ids)
        logits = torch.empty(len(step.logit_rows), config.vocabulary_size, dtype=self._logits_dtype)
        given = (x, step.positions, step.slots, step.paged.blocks, step.paged.starts, step.logit_rows, logits)
        pointers = (tensor.data_ptr() for tensor in given)
        self._kv.native.step(ctypes.byref(self._model), *pointers, len(x), len(logits))
        return softcap(logits, config.logit_softcap)

    def _layer(self, index: int, layer: Layer) -> _LayerPointers:
        mlp, (cos, sin) = layer.mlp, self._decoder.rotary[index]
        assert isinstance(mlp, Mlp)
        return _LayerPointers(
            attention_norm=_pointer(layer.attention_norm),
            qk_norm=_pointer(layer.qk_norm),
            output_norm=_pointer(layer.output_norm),
            mlp_norm=_pointer(layer.mlp_norm),
            down_norm=_pointer(layer.down_norm),
            qkv=_linear(layer.qkv),
            output=_linear(layer.output),
            gate_up=_linear(mlp.gate_up),
            down=_linear(mlp.down),
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            pool=self._kv.pools[index].data_ptr(),
            window=self._kv.window_of[index],
        )


def _linear(linear: Linear) -> _LinearPointers:
    products: Many[NativeProduct] = linear.native_products() or ()
    parts = (Matrix * len(products))(*(product.matrix() for product in products))
    return _LinearPointers(parts, len(products), sum(linear.rows))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _paged(chunks: Many[TokenChunk]) -> PagedRows:
    starts = itertools.accumulate((len(chunk.sequence.blocks) for chunk in chunks), initial=0)
    per_row = [start for chunk, start in zip(chunks, starts, strict=False) for _ in range(chunk.count)]
    blocks = [block for chunk in chunks for block in chunk.sequence.blocks]
    return PagedRows(
        stop=len(per_row),
        blocks=torch.tensor(blocks, dtype=torch.int64),
        starts=torch.tensor(per_row, dtype=torch.int64),
        work=sum(chunk.count * chunk.end for chunk in chunks),
    )
