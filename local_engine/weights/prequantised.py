"""Quantised checkpoints of Hugging Face's kind: which tensors are one matrix, and what their bits
mean.

config.json's `quantization_config` names the method. The names of a module's tensors show whether
it is quantised at all, so lists of modules left alone (lm_head, routers) need no reading. Settings
of quantised activations are not read: activations are rounded by row where 8-bit floats are
multiplied as such, and nowhere else.

Layouts: AWQ as AutoAWQ's "gemm" packs it (casper-hansen/AutoAWQ, arXiv:2306.00978); GPTQ as
AutoGPTQ and GPTQModel do (arXiv:2210.17323); FP8 with a scale for each tensor, row or block
(DeepSeek-V3, arXiv:2412.19437, section 3.3); vllm-project/compressed-tensors. Knows names and bits,
no files. Invariant: a matrix that comes out has, value by value, the values of the method's own
loader, but for the rounding of scales and minimums to half precision where it stays quantised;
where that would lose more, or the native products can't hold it, it comes out as floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from local_engine.config import ModelError, require_among
from local_engine.kernels.cpu import GROUP
from local_engine.weights.quantised import Quantised
from local_engine.weights.scaled import Scaled

# scales of quantised activations and keys, and GPTQModel's own notes
_LEFT_OUT = frozenset((
    "input_scale", "activation_scale", "input_zero_point", "input_scale_ub", "output_scale", "k_scale", "v_scale", "q_scale",
))  # fmt: skip
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the nibble of each of eight columns lies
_PACKED_BITS = (2, 4, 8)


class Tensors(Protocol):
    """A checkpoint's tensors by name."""

    def __contains__(self, name: object, /) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """Raises ModelError where there is none."""


Unpack = Callable[[Tensors, str], torch.Tensor | Quantised | Scaled]


@dataclass(frozen=True, slots=True)
class Packing:
    """How a checkpoint holds quantised matrices. `main` ends the name of the tensor that stands for
    a matrix, `beside` those of the tensors that go with it; a matrix is quantised where one of
    `signs` is there."""

    name: str
    main: str
    beside: frozenset[str]
    signs: tuple[str, ...]
    unpack: Unpack

    def module_of(self, name: str, tensors: Tensors) -> str | None:
        """The module of the quantised matrix that this tensor stands for; None for any other
        tensor."""
        module, _, kind = name.rpartition(".")
        return module if kind == self.main and any(f"{module}.{sign}" in tensors for sign in self.signs) else None

    def is_beside(self, name: str) -> bool:
        """Whether this tensor is read with another one, or not needed."""
        kind = name.rpartition(".")[2]
        return kind in self.beside or kind in _LEFT_OUT


def packing_from(config: Mapping[str, Any], source: str) -> Packing | None:
    """The quantisation that a config.json describes; None where there is none. Raises ModelError
    with the list of methods for one that is not known, and by name for a variant that is not."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    if not isinstance(section, Mapping):
        raise ModelError(f"{source}: quantization_config is not an object")
    method = str(section.get("quant_method") or "").lower()
    require_among(method, _METHODS, f"{source}: quantization_config: method")
    return _METHODS[method](section, f"{source}: quantization_config:")


# -- AWQ and GPTQ ------------------------------------------------------------------------------------------------------


def _awq(section: Mapping[str, Any], source: str) -> Packing:
    version = str(section.get("version") or section.get("format") or "gemm").lower()
    bits = int(section.get("bits") or section.get("w_bit") or 4)
    require_among(version, ("gemm",), f"{source} version")
    require_among(bits, (4,), f"{source} bits")
    return Packing("awq", "qweight", frozenset(("qzeros", "scales")), ("scales",), _unpack_awq)


def _unpack_awq(tensors: Tensors, module: str) -> torch.Tensor | Quantised:
    """qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]; value =
    (code - zero) * scale."""

    def columns(name: str) -> torch.Tensor:
        words = _int32(tensors, f"{module}.{name}")
        return _unpacked(words, 4).view(*words.shape, 8)[..., _AWQ_PLACES].flatten(-2)

    codes = columns("qweight").T.contiguous()
    return _matrix(module, codes, columns("qzeros").T, tensors.read(f"{module}.scales").T, 4)


def _gptq(section: Mapping[str, Any], source: str) -> Packing:
    layout = str(section.get("checkpoint_format") or "gptq").lower()
    layout = "marlin" if section.get("is_marlin_format") else layout
    bits = int(section.get("bits") or 0)
    require_among(layout, ("gptq", "gptq_v2"), f"{source} checkpoint_format")
    require_among(bits, _PACKED_BITS, f"{source} bits")
    # the first layout stores zeros less one
    unpack = partial(_unpack_gptq, bits=bits, missing=int(layout == "gptq"))
    return Packing(f"gptq ({layout})", "qweight", frozenset(("qzeros", "scales", "g_idx")), ("scales",), unpack)


def _unpack_gptq(tensors: Tensors, module: str, *, bits: int, missing: int) -> torch.Tensor | Quantised:
    """qweight int32 [in * bits / 32, out], qzeros int32 [groups, out * bits / 32], scales [groups,
    out], g_idx int32 [in]: the group of each input. A module's own bits may differ from the
    config's, as its shapes show."""
    words = _int32(tensors, f"{module}.qweight")
    groups = tensors.read(f"{module}.g_idx").long() if f"{module}.g_idx" in tensors else None
    if groups is not None and len(groups):
        bits = 32 * words.shape[0] // len(groups)
    if bits not in _PACKED_BITS:
        raise ModelError(f"tensor '{module}.qweight' holds codes of {bits} bits; supported: {_PACKED_BITS}")
    codes = _unpacked(words.T.contiguous(), bits)
    zeros = _unpacked(_int32(tensors, f"{module}.qzeros"), bits)
    zeros = (zeros + missing) & (2**bits - 1)
    return _matrix(module, codes, zeros.T, tensors.read(f"{module}.scales").T, bits, groups)


# -- FP8 ---------------------------------------------------------------------------------------------------------------

_FP8_SCALES = ("weight_scale_inv", "weight_scale")


def _fp8(section: Mapping[str, Any], source: str) -> Packing:
    require_among(section.get("expert_dtype", "fp8"), ("fp8",), f"{source} expert_dtype")
    block = section.get("weight_block_size")
    if block is not None and not (isinstance(block, list | tuple) and len(block) == 2):
        raise ModelError(f"{source} weight_block_size {block!r} is not supported; supported: [rows, columns]")
    unpack = partial(_unpack_scaled, block=tuple(map(int, block)) if block else None)
    method = str(section.get("quant_method")).lower()
    return Packing(method, "weight", frozenset(_FP8_SCALES), _FP8_SCALES, unpack)


def _unpack_scaled(tensors: Tensors, module: str, *, block: tuple[int, ...] | None) -> torch.Tensor | Scaled:
    """weight float8 [out, in] times a scale: one for all, one for each row, or (dequantised) one
    for each block."""
    weight = tensors.read(f"{module}.weight")
    if not weight.dtype.is_floating_point or weight.dtype.itemsize != 1:
        raise ModelError(f"tensor '{module}.weight' is {weight.dtype} beside a scale; expected an 8-bit float")
    name = next(f"{module}.{kind}" for kind in _FP8_SCALES if f"{module}.{kind}" in tensors)
    scales = tensors.read(name).float()
    values = weight.float()
    if not torch.isfinite(values).all():
        raise ModelError(f"tensor '{module}.weight' has values that are no numbers")
    rows, columns = values.shape
    if scales.numel() == 1 or (scales.numel() == rows and scales.shape[0] == rows):
        scales = scales.view(-1, 1).expand(rows, 1)
        return Scaled(weight, scales) if weight.dtype is torch.float8_e4m3fn else values.mul_(scales)
    if block is not None and scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        wide = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return values.mul_(wide)
    raise ModelError(f"tensor {name!r} has shape {tuple(scales.shape)}, which fits no weight of {rows} x {columns}")


# -- compressed-tensors ------------------------------------------------------------------------------------------------

_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed_tensors(section: Mapping[str, Any], source: str) -> Packing:
    groups = section.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    formats = {str(group.get("format") or section.get("format")) for group in found}
    for name in sorted(formats or {str(section.get("format"))}):
        require_among(name, _FORMATS, f"{source} format")
    for key in ("sparsity_config", "transform_config"):
        extra = section.get(key)
        if extra and extra.get("format", "") != "dense":
            raise ModelError(f"{source} {key} {extra!r} is not supported; supported: none")
    blocks = {tuple(w["block_structure"]) for g in found if (w := g.get("weights") or {}).get("block_structure")}
    if len(blocks) > 1:
        raise ModelError(f"{source} block_structure {sorted(blocks)} is not supported; supported: one for all")
    block = next(iter(blocks), None)
    name = f"compressed-tensors ({', '.join(sorted(formats))})"
    beside = frozenset(("weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"))
    if formats == {"pack-quantized"}:
        return Packing(name, "weight_packed", beside, ("weight_scale",), _unpack_packed)
    if "pack-quantized" in formats:
        require_among(sorted(formats), _FORMATS, f"{source} format")

    def unpack(tensors: Tensors, module: str) -> torch.Tensor | Quantised | Scaled:
        if tensors.read(f"{module}.weight").dtype == torch.int8:
            return _unpack_int8(tensors, module)
        return _unpack_scaled(tensors, module, block=block)

    return Packing(name, "weight", beside, ("weight_scale",), unpack)


def _unpack_packed(tensors: Tensors, module: str) -> torch.Tensor | Quantised:
    """weight_packed int32 [out, in * bits / 32], weight_shape [out, in], weight_scale [out,
    groups]; where it is not symmetric weight_zero_point int32 [out * bits / 32, groups] or int8
    [out, groups]; with activation order weight_g_idx [in]."""
    words = _int32(tensors, f"{module}.weight_packed")
    rows, columns = (int(size) for size in tensors.read(f"{module}.weight_shape").tolist())
    bits = next((b for b in _PACKED_BITS if words.shape == (rows, -(-columns * b // 32))), None)
    if bits is None:
        raise ModelError(
            f"tensor '{module}.weight_packed' has shape {tuple(words.shape)}, which holds no {rows} x {columns} codes "
            f"of {_PACKED_BITS} bits"
        )
    codes = _unpacked(words, bits)[:, :columns]
    scales = tensors.read(f"{module}.weight_scale")
    scales = scales.view(1, 1).expand(rows, 1) if scales.numel() == 1 else scales
    zeros: torch.Tensor | None = None
    if f"{module}.weight_zero_point" in tensors:
        zeros = tensors.read(f"{module}.weight_zero_point")
        if zeros.dtype == torch.int8:  # as the first versions wrote them
            zeros = zeros.short() + 2 ** (bits - 1)
        else:
            words = _int32(tensors, f"{module}.weight_zero_point")
            zeros = _unpacked(words.T.contiguous(), bits)[:, :rows].T
    groups = tensors.read(f"{module}.weight_g_idx").long() if f"{module}.weight_g_idx" in tensors else None
    # what an initial, unused one is filled with
    if groups is not None and bool((groups < 0).any()):
        groups = None
    return _matrix(module, codes, zeros, scales, bits, groups)


def _unpack_int8(tensors: Tensors, module: str) -> torch.Tensor | Quantised:
    """weight int8 [out, in], weight_scale [out, groups], [out, 1] or [1], and maybe
    weight_zero_point as the scale."""
    weight = tensors.read(f"{module}.weight")

    def wide(name: str) -> torch.Tensor:
        values = tensors.read(f"{module}.{name}")
        return values.view(1, 1).expand(weight.shape[0], 1) if values.numel() == 1 else values.view(len(weight), -1)

    zeros = wide("weight_zero_point").short() + 128 if f"{module}.weight_zero_point" in tensors else None
    codes = weight.view(torch.uint8) ^ 0x80
    return _matrix(module, codes, zeros, wide("weight_scale"), 8)


_METHODS: dict[str, Callable[[Mapping[str, Any], str], Packing]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed_tensors,
}  # fmt: skip


# -- bits --------------------------------------------------------------------------------------------------------------


def _int32(tensors: Tensors, name: str) -> torch.Tensor:
    words = tensors.read(name)
    if words.dtype != torch.int32 or words.dim() != 2:
        raise ModelError(f"tensor {name!r} is {words.dtype} {tuple(words.shape)}; expected a matrix of torch.int32")
    return words


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, n] to uint8 [rows, n * 32 / bits]: the lowest bits come first."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    mask = 2**bits - 1
    return torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)


def _matrix(
    module: str,
    codes: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    bits: int,
    groups: torch.Tensor | None = None,
) -> torch.Tensor | Quantised:
    """(code - zero) * scale. codes uint8 [rows, columns]; zeros (None: the middle code) and scales
    [rows, groups]; `groups` [columns] names each column's, None: they follow one another. Raises
    ModelError where shapes contradict."""
    rows, columns = codes.shape
    count = scales.shape[-1]
    if scales.shape != (rows, count) or (zeros is not None and zeros.shape != scales.shape) or columns % count:
        shapes = [tuple(codes.shape), None if zeros is None else tuple(zeros.shape), tuple(scales.shape)]
        raise ModelError(f"{module}: codes, zeros and scales of shapes {shapes} do not belong together")
    if groups is not None and (groups.shape != (columns,) or int(groups.max()) >= count or int(groups.min()) < 0):
        raise ModelError(f"{module}: the groups of its {columns} inputs are not among {count}")
    size = columns // count
    wide = scales.float()
    minimums = wide * (-(2 ** (bits - 1)) if zeros is None else -zeros.float())
    order = None
    if groups is not None and not torch.equal(groups, torch.arange(columns) // size):
        order = torch.argsort(groups, stable=True)
        if not torch.equal(groups[order], torch.arange(columns) // size):  # groups of several sizes
            return codes * wide[:, groups] + minimums[:, groups]
    if size % GROUP or not (_fits_half(wide) and _fits_half(minimums)):
        groups = torch.arange(columns) // size if groups is None else groups
        return codes * wide[:, groups] + minimums[:, groups]
    repeats = size // GROUP
    return Quantised(
        codes.contiguous() if order is None else codes[:, order],
        wide.half().repeat_interleave(repeats, 1),
        minimums.half().repeat_interleave(repeats, 1),
        4 if bits < 8 else 8,
        order,
    )


def _fits_half(values: torch.Tensor) -> bool:
    """Whether half precision holds these to a thousandth of the largest: not where all are tiny, or
    one is huge."""
    return bool((values.half().float() - values).abs().max() <= values.abs().max() / 1000)
