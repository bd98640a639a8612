"""Quantised checkpoints, written bit by bit from the published layouts: what the engine's reader is compared with.

Every writer takes a float checkpoint folder and makes two: the quantised one, and a float one that holds what its values
stand for. Nothing here is shared with the reader.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Array = np.ndarray[Any, np.dtype[Any]]
Stored = dict[str, torch.Tensor]
Write = Callable[[Array], tuple[Stored, Array]]  # a matrix to its tensors by their last names, and the values they mean


def rewrite(folder: Path, to: Path, section: dict[str, Any], write: Write, *, kept: tuple[str, ...] = ()) -> Path:
    """Copy a checkpoint, every projection's weight through `write`, but for those whose names end with one of `kept`;
    `to` gets the quantised one, `to`-float its values."""
    named: Stored = load_file(folder / "model.safetensors")
    packed, plain = {}, {}
    for name, weight in named.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "lm_head")) or module.endswith(kept or ("lm_head",)):
            packed[name] = plain[name] = weight
            continue
        stored, values = write(weight.numpy())
        packed |= {f"{module}.{last}": tensor.contiguous() for last, tensor in stored.items()}
        plain[name] = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
    config = json.loads((folder / "config.json").read_text())
    for place, weights, extra in ((to, packed, {"quantization_config": section}), (float_of(to), plain, {})):
        shutil.copytree(folder, place)
        (place / "config.json").write_text(json.dumps(config | extra))
        save_file(weights, place / "model.safetensors", {"format": "pt"})
    return to


def float_of(folder: Path) -> Path:
    """The float checkpoint beside a quantised one."""
    return folder.with_name(f"{folder.name}-float")


def quantised(
    weight: Array, size: int, bits: int, *, is_symmetric: bool, groups: Array | None = None
) -> tuple[Array, ...]:
    """codes [out, in] from 0, zeros and scales [out, groups], and the values; `groups` [in] says which group an input
    is in."""
    rows, columns = weight.shape
    group_of = np.arange(columns) // size if groups is None else groups
    count, top = columns // size, 2**bits - 1
    codes, values = np.zeros((rows, columns), np.int64), np.zeros((rows, columns), np.float32)
    zeros, scales = np.zeros((rows, count), np.int64), np.zeros((rows, count), np.float16)
    for group in range(count):
        own = weight[:, group_of == group]
        if is_symmetric:
            scale, zero = np.abs(own).max(1) / (top // 2), np.full(rows, 2 ** (bits - 1))
        else:
            scale = (own.max(1) - own.min(1)) / (top - 1)  # a zero of at least 1, which the first GPTQ layout needs
            zero = np.clip(np.round(-own.min(1) / scale) + 1, 1, top).astype(np.int64)
        half = scale.astype(np.float16)
        code = np.clip(np.round(own / half[:, None].astype(np.float32)) + zero[:, None], 0, top).astype(np.int64)
        codes[:, group_of == group], zeros[:, group], scales[:, group] = code, zero, half
        values[:, group_of == group] = (code - zero[:, None]) * half[:, None].astype(np.float32)
    return codes, zeros, scales, values


def into_words(values: Array, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """[rows, n] to int32 [rows, n * bits / 32]: the i-th of a word's values at bit i * bits, or, with `places`, at the
    bit of the place that it is named for."""
    per_word = 32 // bits
    rows, columns = values.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for column in range(columns):
        word, i = divmod(column, per_word)
        place = i if places is None else places.index(i)
        words[:, word] |= (values[:, column].astype(np.uint32) & np.uint32(2**bits - 1)) << np.uint32(place * bits)
    return torch.from_numpy(words.view(np.int32))


def awq(weight: Array) -> tuple[Stored, Array]:
    """AutoAWQ's gemm layout: along the outputs, in the order 0 2 4 6 1 3 5 7."""
    codes, zeros, scales, values = quantised(weight, 32, 4, is_symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": into_words(codes.T, 4, order),
        "qzeros": into_words(zeros.T, 4, order),
        "scales": torch.from_numpy(scales.T.copy()),
    }
    return stored, values


def gptq(
    bits: int, *, is_symmetric: bool, layout: str = "gptq", has_order: bool = False, has_spare_bias: bool = False
) -> Write:
    """AutoGPTQ's layout: codes along the inputs, zeros along the outputs, less one in the first version; that one also
    wrote biases of zeros."""

    def write(weight: Array) -> tuple[Stored, Array]:
        columns = weight.shape[1]
        group_of = np.arange(columns) // 32
        if has_order:
            group_of = group_of[np.random.default_rng(columns).permutation(columns)]
        codes, zeros, scales, values = quantised(weight, 32, bits, is_symmetric=is_symmetric, groups=group_of)
        stored = {
            "qweight": into_words(codes, bits).T,
            "qzeros": into_words(zeros.T - (1 if layout == "gptq" else 0), bits),
            "scales": torch.from_numpy(scales.T.copy()),
            "g_idx": torch.from_numpy(group_of.astype(np.int32)),
        }
        if has_spare_bias:
            stored["bias"] = torch.zeros(weight.shape[0], dtype=torch.float16)
        return stored, values

    return write


def packed(
    bits: int, *, is_symmetric: bool, size: int = 32, has_order: bool = False, packs_zeros: bool = True
) -> Write:
    """compressed-tensors' pack-quantized: codes along the inputs, zeros along the outputs; signed bytes in old files."""

    def write(weight: Array) -> tuple[Stored, Array]:
        columns = weight.shape[1]
        group_size = size or columns
        group_of = np.arange(columns) // group_size
        if has_order:
            group_of = group_of[np.random.default_rng(columns).permutation(columns)]
        codes, zeros, scales, values = quantised(weight, group_size, bits, is_symmetric=is_symmetric, groups=group_of)
        stored = {
            "weight_packed": into_words(codes, bits),
            "weight_scale": torch.from_numpy(scales),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not is_symmetric:
            signed = torch.from_numpy((zeros - 2 ** (bits - 1)).astype(np.int8))
            stored["weight_zero_point"] = into_words(zeros.T, bits).T if packs_zeros else signed
        if has_order:
            stored["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return stored, values

    return write


def int8(weight: Array) -> tuple[Stored, Array]:
    """compressed-tensors' int-quantized: signed bytes with a scale for each row, in bfloat16."""
    scales = torch.from_numpy(np.abs(weight).max(1, keepdims=True) / 127).bfloat16()
    codes = np.clip(np.round(weight / scales.float().numpy()), -127, 127).astype(np.int8)
    return {"weight": torch.from_numpy(codes), "weight_scale": scales}, codes * scales.float().numpy()


def float8(kind: str, block: int = 32) -> Write:
    """float8_e4m3fn with scales for the whole, each row or each block; the largest value is 448."""

    def write(weight: Array) -> tuple[Stored, Array]:
        rows, columns = weight.shape
        height, width = {"tensor": (rows, columns), "row": (1, columns), "block": (block, block)}[kind]
        tops = np.zeros((-(-rows // height), -(-columns // width)), np.float32)
        for (i, j), _ in np.ndenumerate(tops):
            tops[i, j] = np.abs(weight[i * height : (i + 1) * height, j * width : (j + 1) * width]).max()
        scales = tops / 448
        wide = np.kron(scales, np.ones((height, width), np.float32))[:rows, :columns]
        codes = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
        name = "weight_scale_inv" if kind == "block" else "weight_scale"
        found = torch.from_numpy(scales)
        return {"weight": codes, name: found.view(()) if kind == "tensor" else found}, codes.float().numpy() * wide

    return write
