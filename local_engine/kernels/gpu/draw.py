"""Draws tokens: the race of `local_engine.sampler` in Triton, one program for each row.

Filters are thresholds here, not sorted lists: the k-th largest logit, the smallest that top-p
admits and min-p's bound are found by bisection over the logits' bits, so tokens exactly as likely
as the last admitted one are admitted, too. Knows tensors, no sequences. Invariant: a draw depends
on its row's logits, parameters and key alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def _ordered(x):
    """Map float32 to int64 in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _noise(key, token):
    """`kernels.noise.noise`: SplitMix64, with shifts made unsigned by masks."""
    z = key + (token.to(tl.int64) + 1) * -7046029254386353131
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    z = z ^ ((z >> 31) & 0x1FFFFFFFF)
    uniform = (((z >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) + 0.5) * 1.1102230246251565e-16
    return -tl.log(uniform)


@triton.jit
def _kth_largest(row_logits, vocabulary, temperature, top_k, low, high, BLOCK: tl.constexpr):
    """The largest bound in low .. high that at least top_k logits reach."""
    while low < high:
        middle = low + (high - low + 1) // 2
        count = top_k * 0
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
            count += tl.sum(((_ordered(x) >= middle) & (at < vocabulary)).to(tl.int64), 0)
        if count >= top_k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def _nucleus(row_logits, vocabulary, temperature, most, top_p, low, high, BLOCK: tl.constexpr):
    """The smallest bound in low .. high with less than top_p of the mass from low on above it."""
    mass = 0.0
    for start in range(0, vocabulary, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
        mass += tl.sum(tl.where(_ordered(x) >= low, tl.exp(x - most), 0.0), 0)
    while low < high:
        middle = low + (high - low) // 2
        above = 0.0
        for start in range(0, vocabulary, BLOCK):
            at = start + tl.arange(0, BLOCK)
            x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
            above += tl.sum(tl.where(_ordered(x) > middle, tl.exp(x - most), 0.0), 0)
        if above < top_p * mass:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit(do_not_specialize=["places"])
def _draw(
    logits,  # [any, vocabulary]
    rows,  # int64 [places]: the rows of logits
    keys,  # int64 [places]
    top_ks,  # int64 [places], 0 is none
    floats,  # float32 [3, places]: temperatures, top_p, min_p
    ids,  # int64 [places]: the tokens drawn, -1 where logits are not finite
    vocabulary,
    places,
    BLOCK: tl.constexpr,
):
    draw_index = tl.program_id(0)
    row_logits = logits + tl.load(rows + draw_index) * vocabulary
    temperature = tl.load(floats + draw_index)
    column = tl.arange(0, BLOCK)

    largest = float("-inf")
    likeliest = 0
    broken = 0
    for start in range(0, vocabulary, BLOCK):
        at = start + column
        x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32)
        broken += tl.sum((x != x).to(tl.int32), 0)
        here = tl.max(tl.where(x == x, x, float("-inf")), 0)
        if here > largest:
            largest = here
            likeliest = tl.min(tl.where(x == here, at, vocabulary), 0)
    is_finite = (broken == 0) & (largest > float("-inf")) & (largest < float("inf"))
    drawn = likeliest

    if is_finite & (temperature > 0.0):
        top_k = tl.load(top_ks + draw_index)
        top_p = tl.load(floats + places + draw_index)
        min_p = tl.load(floats + 2 * places + draw_index)
        most = largest / temperature
        total = 0.0
        for start in range(0, vocabulary, BLOCK):
            at = start + column
            x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
            total += tl.sum(tl.exp(x - most), 0)
        ceiling = _ordered(most)
        least = ceiling * 0 - (1 << 33)  # below all that is ordered
        if (top_k > 0) & (top_k < vocabulary):
            least = _kth_largest(row_logits, vocabulary, temperature, top_k, least, ceiling, BLOCK)
        if top_p < 1.0:
            least = _nucleus(row_logits, vocabulary, temperature, most, top_p, least, ceiling, BLOCK)
        key = tl.load(keys + draw_index)
        first = tl.full([1], float("inf"), tl.float64)
        winner = tl.full([1], 0, tl.int32) + likeliest
        for start in range(0, vocabulary, BLOCK):
            at = start + column
            x = tl.load(row_logits + at, mask=at < vocabulary, other=float("-inf")).to(tl.float32) / temperature
            weight = tl.exp(x - most)
            is_in = (_ordered(x) >= least) & (weight >= min_p) & (weight > 0.0)
            time = tl.where(is_in, _noise(key, at) / tl.where(is_in, weight, 1.0).to(tl.float64), float("inf"))
            soonest = tl.min(time, 0)
            who = tl.min(tl.where(time == soonest, at, vocabulary), 0)
            winner = tl.where(soonest < first, who, winner)
            first = tl.minimum(first, soonest)
        drawn = tl.max(winner, 0)
    tl.store(ids + draw_index, tl.where(is_finite, drawn, -1).to(tl.int64))


def draw(
    logits: torch.Tensor, rows: torch.Tensor, keys: torch.Tensor, top_ks: torch.Tensor, settings: torch.Tensor
) -> torch.Tensor:
    """The drawn ids, int64 [places], from logits[rows]; -1 if these are not finite. `keys` and
    `top_ks` (0: off) are int64 [places], `settings` float32 [temperature (0 is greedy), top_p,
    min_p; places]."""
    places, vocabulary = len(rows), logits.shape[1]
    ids = torch.empty(places, dtype=torch.int64, device=logits.device)
    block = min(_BLOCK, triton.next_power_of_2(vocabulary))
    _draw[(places,)](logits, rows, keys, top_ks, settings, ids, vocabulary, places, BLOCK=block, num_warps=8)
    return ids
