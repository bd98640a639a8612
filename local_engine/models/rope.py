"""Rotary position embedding: the angles of every position, by each of the ways to stretch a
context.

Knows shapes and a RopeConfig. The two halves of a head rotate together (Hugging Face's layout).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from local_engine.config import RopeConfig


@dataclass(frozen=True, slots=True)
class Rotary:
    """cos and sin [context, 1, head_dim]; sin is negative in its first half: x * cos + roll(x) *
    sin rotates."""

    cos: torch.Tensor
    sin: torch.Tensor


def rotary(
    rope: RopeConfig,
    head_dim: int,
    context_tokens: int,
    *,
    factors: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Rotary:
    """The tables of a model. `factors` [head_dim / 2] divide the frequencies (how GGUF files carry
    llama3's rule)."""
    frequencies = rope_frequencies(rope, head_dim)
    if factors is not None:
        frequencies = frequencies / factors
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float32), frequencies)
    cos, sin = angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
    return Rotary(
        torch.cat((cos, cos), -1).to(dtype).to(device).unsqueeze(1),
        torch.cat((-sin, sin), -1).to(dtype).to(device).unsqueeze(1),
    )


def rope_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """[head_dim / 2] radians per position."""
    frequencies = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    match rope.kind:
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
    """Keeps high frequencies, divides low ones by `factor` and blends between (Llama 3.1's
    reference code)."""
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
    """Between the dimensions that turn `beta_fast` and `beta_slow` times within the trained context
    a ramp leads from kept to divided frequencies (arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """Where the dimension is that turns so often."""
        ratio = rope.original_context_tokens / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    last = last + 0.001 if first == last else last  # a step instead of a ramp
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    return frequencies / rope.factor * ramp + frequencies * (1 - ramp)
