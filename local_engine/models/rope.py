"""Rotary position embedding: the angles of every position, for each method to extend a context.

Knows shapes and a RopeConfig. The two halves of a head rotate together (Hugging Face's layout).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as functional

from local_engine.attention import Angles
from local_engine.config import RopeConfig


def rotary(rope: RopeConfig, head_dim: int, context_tokens: int, *, dtype: torch.dtype, device: torch.device) -> Angles:
    """The tables of a model: cos and sin [context, 1, head_dim]; sin is negative in its first half:
    x * cos + roll(x) * sin rotates. If only some dimensions of a head are rotated, the others come
    last in each half: `turning_first` is their order."""
    dims = rope.dims or head_dim
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), rope_frequencies(rope, dims))
    still = (0, (head_dim - dims) // 2)
    cos = functional.pad(angles.cos() * rope.attention_factor, still, value=1.0)
    sin = functional.pad(angles.sin() * rope.attention_factor, still)
    halves = (torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    wide_cos, wide_sin = (table.to(dtype).to(device).unsqueeze(1) for table in halves)
    return wide_cos, wide_sin


def turning_first(rows: int, head_dim: int, dims: int) -> torch.Tensor:
    """The order of q's or k's rows that `rotary`'s tables expect: in each half of a head the `dims`
    rotated dimensions first. Products of q and k stay the same."""
    (x, y), (u, v) = torch.arange(dims).chunk(2), torch.arange(dims, head_dim).chunk(2)
    return (torch.arange(0, rows, head_dim).unsqueeze(1) + torch.cat((x, u, y, v))).flatten()


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """The radians per position, [head_dim / 2]."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
        case "none":
            return torch.zeros_like(frequencies)
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, head_dim)
        case "longrope":
            return frequencies / torch.tensor(rope.divisors)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep high frequencies, divide low ones by `factor`, and blend between (Llama 3.1's reference
    code)."""
    wavelengths = 2 * math.pi / frequencies
    low = rope.original_context_tokens / rope.low_freq_factor
    high = rope.original_context_tokens / rope.high_freq_factor
    share = (rope.original_context_tokens / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - share) * frequencies / rope.factor + share * frequencies
    scaled = torch.where(wavelengths > low, frequencies / rope.factor, frequencies)
    return torch.where((wavelengths <= low) & (wavelengths >= high), blended, scaled)


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Ramp from kept to divided frequencies between the dimensions that turn `beta_fast` and
    `beta_slow` times within the trained context (arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The dimension that turns `turns` times within the trained context."""
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if first == last else last  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
