"""Reads quantised checkpoints in Hugging Face's format: groups their tensors into matrices, and
decodes their bits.

config.json's `quantization_config` names the method. The names of a module's tensors show whether
it is quantised at all, so lists of unquantised modules (lm_head, routers) are not read. Settings of
quantised activations are not read: activations are rounded, by row, only where 8-bit floats are
multiplied.

One reader serves all methods: a `Packing` describes the layout.

Layouts: AWQ in AutoAWQ's "gemm" packing (casper-hansen/AutoAWQ, arXiv:2306.00978); GPTQ of AutoGPTQ
and GPTQModel (arXiv:2210.17323); FP8 with a scale for each tensor, row or block (DeepSeek-V3,
arXiv:2412.19437, section 3.3); vllm-project/compressed-tensors. Knows names and bits, no files.
Invariant: a matrix has, value by value, the values of the method's own loader, except that a
quantised matrix has scales and minimums rounded to half precision; if that would lose more, or the
native products do not support it, the result is floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from local_engine.config import ModelError, require_among
from local_engine.kernels.cpu import GROUP
from local_engine.weights.quantised import Quantised
from local_engine.weights.scaled import Scaled

# the ends of names: of what is read with the codes, of quantised activations and keys, and GPTQModel's own notes
_BESIDE = frozenset((
    "scales", "qzeros", "g_idx", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_g_idx", "weight_shape",
    "input_scale", "activation_scale", "input_zero_point", "input_scale_ub", "output_scale", "k_scale", "v_scale", "q_scale",
))  # fmt: skip
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in an int32 the nibble of each of eight outputs lies
_PACKED_BITS = (2, 4, 8)


class Tensors(Protocol):
    """A checkpoint's tensors by name."""

    def __contains__(self, name: object, /) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor. Raises ModelError for a missing name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """The layout of a method's quantised matrices, by the suffixes of their tensors' names. The
    tensor `codes` stands for the matrix, and any of `scales` shows that it is quantised.

    `is_transposed`: tensors are [inputs, outputs]. `bits` of a code, if shapes do not show them.
    `zeros_missing` is added to zeros. `order`: codes are packed along the outputs, in this order,
    and not along the inputs. `block`: the rows and columns that share the scale of 8-bit floats.
    """

    name: str
    codes: str = "weight"
    scales: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    zeros: str = "weight_zero_point"
    groups: str = "weight_g_idx"
    is_transposed: bool = False
    bits: int = 0
    zeros_missing: int = 0
    order: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None

    def module_of(self, name: str, tensors: Tensors) -> str | None:
        """The module whose quantised matrix this tensor stands for; None for any other tensor."""
        module, _, kind = name.rpartition(".")
        return module if kind == self.codes and any(f"{module}.{scale}" in tensors for scale in self.scales) else None

    def unpack(self, tensors: Tensors, module: str) -> torch.Tensor | Quantised | Scaled:
        """The matrix of a module, (code - zero) * scale. Raises ModelError if its tensors
        contradict one another."""
        scale = next(kind for kind in self.scales if f"{module}.{kind}" in tensors)
        kinds = (self.codes, scale, self.zeros, self.groups, "weight_shape")
        codes, scales, zeros, groups, shape = (self._read(tensors, module, kind) for kind in kinds)
        assert codes is not None
        assert scales is not None
        is_packed = self.codes != "weight"
        if not is_packed and codes.dtype.is_floating_point and codes.dtype.itemsize == 1:
            return _scaled(codes, scales.float(), self.block, f"{module}.{scale}")
        if codes.dim() != 2 or codes.dtype != (torch.int32 if is_packed else torch.int8):
            expected = "a matrix of torch.int32" if is_packed else "a matrix of 8-bit floats or integers"
            raise ModelError(
                f"tensor '{module}.{self.codes}' is {codes.dtype} {tuple(codes.shape)}; expected {expected}"
            )
        # what an initial, unused order is filled with
        if groups is not None and (not len(groups) or bool((groups < 0).any())):
            groups = None
        if not is_packed:
            bits, codes = 8, codes.view(torch.uint8) ^ 0x80
        else:
            columns = int(shape[1]) if shape is not None else None if groups is None else len(groups)
            bits = self.bits if columns is None else self._bits(module, codes, columns)
            codes = _unpacked(codes, bits, 1 if self.order is None else 0, self.order)[:, :columns]
        rows = len(codes)
        if zeros is not None and zeros.dtype == torch.int8:  # around 0, as codes in int8 are
            zeros = _by_row(zeros.short() + 2 ** (bits - 1), rows)
        elif zeros is not None:
            zeros = (_unpacked(zeros, bits, 0, self.order)[:rows] + self.zeros_missing) & (2**bits - 1)
        return _matrix(module, codes, zeros, _by_row(scales, rows), bits, None if groups is None else groups.long())

    def _read(self, tensors: Tensors, module: str, kind: str) -> torch.Tensor | None:
        """One of the module's tensors, outputs first; None if the module lacks it."""
        if f"{module}.{kind}" not in tensors:
            return None
        tensor = tensors.read(f"{module}.{kind}")
        return tensor.T if self.is_transposed and tensor.dim() == 2 else tensor

    def _bits(self, module: str, codes: torch.Tensor, columns: int) -> int:
        """The bits of a module, which may differ from the config's. Raises ModelError for
        unsupported bits."""
        for bits in _PACKED_BITS:
            if codes.shape[1] == -(-columns * bits // 32):
                return bits
        raise ModelError(
            f"tensor '{module}.{self.codes}' has shape {tuple(codes.shape)}, which holds no codes of {_PACKED_BITS} bits "
            f"for {columns} inputs"
        )


def is_beside(name: str) -> bool:
    """Whether a quantised checkpoint's tensor is read with another tensor, or not needed."""
    return name.rpartition(".")[2] in _BESIDE


def packing_from(config: Mapping[str, Any], source: str) -> Packing | None:
    """The quantisation that a config.json describes, or None. Raises ModelError with the list of
    methods for an unknown method, and by name for an unknown variant."""
    section = config.get("quantization_config") or config.get("compression_config")
    if not section:
        return None
    if not isinstance(section, Mapping):
        raise ModelError(f"{source}: quantization_config is not an object")
    method = str(section.get("quant_method") or "").lower()
    require_among(method, _METHODS, f"{source}: quantization_config: method")
    return _METHODS[method](section, f"{source}: quantization_config:")


_GPTQ = Packing(name="", codes="qweight", scales=("scales",), zeros="qzeros", groups="g_idx", is_transposed=True)


def _awq(section: Mapping[str, Any], source: str) -> Packing:
    require_among(
        str(section.get("version") or section.get("format") or "gemm").lower(), ("gemm",), f"{source} version"
    )
    require_among(int(section.get("bits") or section.get("w_bit") or 4), (4,), f"{source} bits")
    return replace(_GPTQ, name="awq", bits=4, order=_AWQ_ORDER)


def _gptq(section: Mapping[str, Any], source: str) -> Packing:
    layout = str(section.get("checkpoint_format") or "gptq").lower()
    layout = "marlin" if section.get("is_marlin_format") else layout
    bits = int(section.get("bits") or 0)
    require_among(layout, ("gptq", "gptq_v2"), f"{source} checkpoint_format")
    require_among(bits, _PACKED_BITS, f"{source} bits")
    # the first layout stores zeros less one
    return replace(_GPTQ, name=f"gptq ({layout})", bits=bits, zeros_missing=int(layout == "gptq"))


def _fp8(section: Mapping[str, Any], source: str) -> Packing:
    require_among(section.get("expert_dtype", "fp8"), ("fp8",), f"{source} expert_dtype")
    block = section.get("weight_block_size")
    if block is not None and not (isinstance(block, list | tuple) and len(block) == 2):
        raise ModelError(f"{source} weight_block_size {block!r} is not supported; supported: [rows, columns]")
    return Packing(name=str(section["quant_method"]).lower(), block=tuple(map(int, block)) if block else None)


_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")


def _compressed_tensors(section: Mapping[str, Any], source: str) -> Packing:
    named = section.get("config_groups")
    groups = list(named.values()) if isinstance(named, Mapping) else []
    formats = {str(group.get("format") or section.get("format")) for group in groups} or {str(section.get("format"))}
    for name in sorted(formats):
        require_among(name, _FORMATS, f"{source} format")
    if len(formats) > 1 and "pack-quantized" in formats:
        require_among(sorted(formats), _FORMATS, f"{source} format")
    for key in ("sparsity_config", "transform_config"):
        extra = section.get(key)
        if extra and extra.get("format", "") != "dense":
            raise ModelError(f"{source} {key} {extra!r} is not supported; supported: none")
    blocks = {tuple(w["block_structure"]) for g in groups if (w := g.get("weights") or {}).get("block_structure")}
    if len(blocks) > 1:
        raise ModelError(f"{source} block_structure {sorted(blocks)} is not supported; supported: one for all")
    return Packing(
        name=f"compressed-tensors ({', '.join(sorted(formats))})",
        codes="weight_packed" if formats == {"pack-quantized"} else "weight",
        scales=("weight_scale",),
        block=next(iter(blocks), None),
    )


_METHODS: dict[str, Callable[[Mapping[str, Any], str], Packing]] = {
    "awq": _awq, "gptq": _gptq, "fp8": _fp8, "fbgemm_fp8": _fp8, "compressed-tensors": _compressed_tensors,
}  # fmt: skip


def _scaled(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, ...] | None, name: str
) -> torch.Tensor | Scaled:
    """8-bit floats [rows, columns] times a scale: a single one, one for each row, or (dequantised)
    one for each block. `name` is the scales' tensor."""
    values = codes.float()
    if not torch.isfinite(values).all():
        raise ModelError(f"tensor '{name.rpartition('.')[0]}.weight' has values that are no numbers")
    rows, columns = values.shape
    if scales.numel() == 1 or (scales.numel() == rows and scales.shape[0] == rows):
        scales = scales.view(-1, 1).expand(rows, 1)
        return Scaled(codes, scales) if codes.dtype is torch.float8_e4m3fn else values.mul_(scales)
    if block is not None and scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        wide = scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
        return values.mul_(wide)
    raise ModelError(f"tensor {name!r} has shape {tuple(scales.shape)}, which fits no weight of {rows} x {columns}")


def _unpacked(packed_codes: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] | None) -> torch.Tensor:
    """Unpack int32 to uint8, 32 / bits times as long along `axis`: the lowest bits come first, or
    each word's codes in the `order`."""
    octets = packed_codes.movedim(axis, -1).contiguous().view(torch.uint8)
    mask = 2**bits - 1
    codes = torch.stack([(octets >> shift) & mask for shift in range(0, 8, bits)], -1).flatten(-2)
    if order is not None:
        codes = codes.view(*codes.shape[:-1], -1, len(order))[..., order].flatten(-2)
    return codes.movedim(-1, axis)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Scales or zeros as [rows, groups], from a single value or one for each row."""
    if values.numel() == 1:
        return values.view(1, 1).expand(rows, 1)
    return values.unsqueeze(-1) if values.dim() == 1 else values


def _matrix(
    module: str,
    codes: torch.Tensor,
    zeros: torch.Tensor | None,
    scales: torch.Tensor,
    bits: int,
    groups: torch.Tensor | None,
) -> torch.Tensor | Quantised:
    """(code - zero) * scale. codes are uint8 [rows, columns]; zeros (None: the middle code) and
    scales are [rows, groups]; `groups` [columns] has each column's group, None: in order. Raises
    ModelError if shapes contradict."""
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
    consecutive = torch.arange(columns) // size
    groups = consecutive if groups is None else groups
    order = None if torch.equal(groups, consecutive) else torch.argsort(groups, stable=True)
    is_even = order is None or torch.equal(groups[order], consecutive)  # else groups are of several sizes
    if not is_even or size % GROUP or not (_fits_half(wide) and _fits_half(minimums)):
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
    """Whether half precision represents the values to a thousandth of the largest: not if all are
    tiny, or one is huge."""
    return bool((values.half().float() - values).abs().max() <= values.abs().max() / 1000)
