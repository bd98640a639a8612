"""NativeStep: a decoder's whole step as one native call.

Describes a model to the kernels once, as pointers: its matrices, norms, rotary tables and pools of KV. Serves models all
of whose products are native and dense; of every other `native_step` is None, and Decoder calls kernels one by one. That is
the oracle too. Invariant: it computes what the decoder does, to the last bit but for norms after attention and MLP.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence as Many

import torch

from local_engine.attention import PagedKV, StepInput
from local_engine.kernels.cpu import Kernels, Matrix, kind_of
from local_engine.kernels.fused import softcap
from local_engine.models.decoder import Decoder, Layer
from local_engine.models.mlp import Mlp
from local_engine.weights.linear import Linear, NativeProduct

_POINTER, _INT, _LONG, _FLOAT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float


class _Linear(ctypes.Structure):
    _fields_ = (("parts", ctypes.POINTER(Matrix)), ("count", _INT), ("outputs", _INT))


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "qk_norm", "output_norm", "mlp_norm", "down_norm")),
        *((name, _Linear) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("cos", "sin", "pool")),
        ("window", _LONG),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.POINTER(_Layer)),
        ("windows", ctypes.POINTER(_LONG)),
        ("final_norm", _POINTER),
        ("head", _Linear),
        *((name, _LONG) for name in ("blocks", "weights")),
        *((name, _INT) for name in ("layer_count", "window_count", "kind", "head_kind", "hidden")),
        *((name, _INT) for name in ("heads", "kv_heads", "size", "block_tokens", "is_gelu")),
        *((name, _FLOAT) for name in ("epsilon", "scale", "cap")),
    )


def native_step(decoder: Decoder, kv: PagedKV) -> NativeStep | None:
    """What runs this model's steps in one native call; None where its products or its MLPs are not all native."""
    if kv.native is None or any(linear.native_products() is None for linear in decoder.linears()):
        return None
    if not all(isinstance(layer.mlp, Mlp) for layer in decoder.layers):
        return None
    return NativeStep(decoder, kv, kv.native)


class NativeStep:
    """Holds what its description points at: the decoder and the pools."""

    def __init__(self, decoder: Decoder, kv: PagedKV, native: Kernels) -> None:
        self._decoder, self._kv, self._native = decoder, kv, native
        config, products = decoder.config, decoder.head.native_products()
        assert products is not None
        self._logits_dtype = products[0].out_dtype
        self._layers = (_Layer * config.layers)(*(self._layer(i, layer) for i, layer in enumerate(decoder.layers)))
        self._windows = (_LONG * len(kv.windows))(*kv.windows)
        self._model = _Model(
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
            heads=config.heads,
            kv_heads=config.kv_heads,
            size=config.head_dim,
            block_tokens=kv.block_tokens,
            is_gelu=config.activation == "gelu_tanh",
            epsilon=config.rms_epsilon,
            scale=config.attention_scale,
            cap=config.attention_softcap or 0.0,
        )

    def __call__(self, step: StepInput) -> torch.Tensor:
        """Logits [len(logit_rows), vocabulary] of one step; the step's KV is in the pool afterwards."""
        assert step.paged is not None
        config, x = self._decoder.config, self._decoder.embed(step.token_ids)
        logits = torch.empty(len(step.logit_rows), config.vocabulary_size, dtype=self._logits_dtype)
        given = (x, step.positions, step.slots, step.paged.blocks, step.paged.starts, step.logit_rows, logits)
        pointers = (tensor.data_ptr() for tensor in given)
        self._native.step(ctypes.byref(self._model), *pointers, len(x), len(logits))
        return softcap(logits, config.logit_softcap)

    def _layer(self, index: int, layer: Layer) -> _Layer:
        mlp, rotary = layer.mlp, self._decoder.rotary[index]
        assert isinstance(mlp, Mlp)
        return _Layer(
            attention_norm=layer.attention_norm.data_ptr(),
            qk_norm=_pointer(layer.qk_norm),
            output_norm=_pointer(layer.output_norm),
            mlp_norm=layer.mlp_norm.data_ptr(),
            down_norm=_pointer(layer.down_norm),
            qkv=_linear(layer.qkv),
            output=_linear(layer.output),
            gate_up=_linear(mlp.gate_up),
            down=_linear(mlp.down),
            cos=rotary.cos.data_ptr(),
            sin=rotary.sin.data_ptr(),
            pool=self._kv.pools[index].data_ptr(),
            window=self._kv.window_of[index],
        )


def _linear(linear: Linear) -> _Linear:
    products: Many[NativeProduct] = linear.native_products() or ()
    parts = (Matrix * len(products))(*(product.matrix() for product in products))
    return _Linear(parts, len(products), sum(linear.rows))


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
