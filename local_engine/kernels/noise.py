"""The noise that draws tokens, a pure function of a key and a token: torch's form, and the oracle
of Triton's (gpu/draw.py).

Knows tensors of integers, no sequences.
"""

from __future__ import annotations

import torch

# SplitMix64's constants as signed numbers, and what is left of the sign after a shift
_GOLDEN, _MIX_1, _MIX_2 = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_MASK_33, _MASK_34, _MASK_37, _MASK_53 = ((1 << bits) - 1 for bits in (33, 34, 37, 53))


def noise(keys: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Exponentially distributed numbers with mean 1 for keys [rows, 1] and tokens [rows, any]
    (int64): SplitMix64 (Steele, Lea and Flood, OOPSLA 2014) from the state `key`, with the number
    at the token's index."""
    # decision: noise-by-position
    z = keys + (tokens + 1) * _GOLDEN
    z = (z ^ (z >> 30 & _MASK_34)) * _MIX_1
    z = (z ^ (z >> 27 & _MASK_37)) * _MIX_2
    z = z ^ (z >> 31 & _MASK_33)
    uniform = ((z >> 11 & _MASK_53).double() + 0.5) * 2.0**-53
    return -uniform.log()
