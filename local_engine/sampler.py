"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeds and log probabilities.

Knows sequences' parameters and counts, no text. All rows of a step are sampled together. A random
row is a race: each token arrives after an exponentially distributed time divided by its
probability, and the first token wins (the Gumbel-max trick; arXiv:1611.00712). The times' noise is
a function of the sequence's seed, the position and the token (`noise`): so a seeded sequence draws
the same in any batch (its logits can still differ in the last bits with the batch's shape). A draft
is verified by drawing at each of its places as without a draft: while the drawn token equals the
drafted one, the next row's logits are the right ones. A draft model draws with the same noise, so
the two agree wherever their distributions do, with at least (1 - d) / (1 + d) at a total variation
of d (arXiv:2408.07978; accepting a random draft by chance, as in arXiv:2211.17192, reaches 1 - d,
but then a seed's answer depends on the draft). Order of the filters: temperature, top-k, top-p,
min-p, as in Hugging Face's generate.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from local_engine.grammar import Masks
from local_engine.kernels.copies import on_device
from local_engine.kernels.cpu import native_for
from local_engine.kernels.noise import noise
from local_engine.messages import SamplingParams
from local_engine.sequence import Place, Sampled

_CANDIDATES = (256, 4096)
TEMPERATURE_MIN = 1e-6  # colder is greedy anyway, and would pass what a float can hold


class Drawn(Protocol):
    """The token drawn at each place, perhaps still in flight from the device."""

    @property
    def ids(self) -> torch.Tensor:
        """The drawn ids, int64 [places], on the device: for the next step to read without waiting."""

    def read(self) -> list[Sampled]:
        """Wait for the drawn tokens."""


@dataclass(frozen=True, slots=True)
class HostDrawn:
    """Tokens that the host has drawn; `read` does not wait."""

    sampled: list[Sampled]
    device: torch.device

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor([one.token_id or 0 for one in self.sampled], device=self.device)

    def read(self) -> list[Sampled]:
        return self.sampled


@torch.inference_mode()
def sample(logits: torch.Tensor, places: Many[Place], masks: Masks | None = None) -> list[Sampled]:
    """The token at each place from logits [len(places), vocabulary]."""
    ids = draw(logits, places, masks)
    sampled = [Sampled(id) for id in ids]
    with_logprobs = [row for row, place in enumerate(places) if place.sequence.params.logprobs is not None]
    with_logprobs = [row for row in with_logprobs if ids[row] is not None]
    if with_logprobs:
        wanted = [places[row].sequence.params.logprobs or 0 for row in with_logprobs]
        logprobs = candidates(logits[with_logprobs], [ids[row] or 0 for row in with_logprobs], wanted)
        for row, token in zip(with_logprobs, logprobs, strict=True):
            sampled[row] = token
    return sampled


@torch.inference_mode()
def draw(logits: torch.Tensor, places: Many[Place], masks: Masks | None = None) -> list[int | None]:
    """The ids that `sample` would give, without log probabilities; None for a row with logits that
    are not finite."""
    best, best_ids = logits.max(-1)
    is_finite: list[bool] = best.isfinite().tolist()
    ids: dict[int, int] = dict(enumerate(best_ids.tolist()))
    random_rows = [row for row, place in enumerate(places) if place.sequence.params.temperature > 0 and is_finite[row]]
    changed_rows = [row for row, place in enumerate(places) if place.changes_logits]
    mask_by_row = held_rows(places) if masks is not None else {}
    if changed_rows:
        logits = logits.float() if logits.dtype is not torch.float32 else logits.clone()
        change_logits(logits, places)
    for rows in (random_rows, sorted({*changed_rows, *mask_by_row}.difference(random_rows))):
        if rows:
            row_places = [places[row] for row in rows]
            temperatures = [drawing.sequence.params.temperature for drawing in row_places]
            scores = logits if len(rows) == len(places) else logits[rows]
            scores = scores / torch.tensor(
                [[max(t, TEMPERATURE_MIN) if t else 1.0] for t in temperatures], device=scores.device
            )
            row_masks = [(index, mask_by_row[row]) for index, row in enumerate(rows) if row in mask_by_row]
            total = scores.new_empty(len(rows), 1) if rows is random_rows else None
            if total is not None and len(row_masks) < len(rows):
                total = scores.logsumexp(-1, keepdim=True)
            if masks is not None:
                ban(scores, row_masks, masks, total)
            tokens: list[int] = scores.argmax(-1).tolist() if total is None else _race(scores, row_places, total)
            ids |= zip(rows, tokens, strict=True)
    return [id if good else None for id, good in zip(ids.values(), is_finite, strict=True)]


def held_rows(places: Many[Place]) -> dict[int, int]:
    """The rows with a grammar, each with the index of its mask."""
    held = (row for row, place in enumerate(places) if place.sequence.grammar is not None)
    return {row: at for at, row in enumerate(held)}


def ban(logits: torch.Tensor, held: list[tuple[int, int]], masks: Masks, total: torch.Tensor | None = None) -> None:
    """Ban, in place, the tokens that grammars forbid: in float32 logits, and in `total` [rows, 1],
    the log sums of exponentials of those rows. `held`: rows, and the indexes of their masks."""
    rows, at = torch.tensor(held, dtype=torch.int64).view(-1, 2).T.contiguous()
    bits, size = torch.from_numpy(masks())[at], logits.shape[-1]
    if (native := native_for(logits.device, logits.dtype)) is not None:
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (logits, rows, bits, total))
        native.ban(*pointers, len(rows), size, bits.shape[1])
        return
    rows, bits = rows.to(logits.device), bits.to(logits.device, non_blocking=True)
    banned = (bits.unsqueeze(2) >> torch.arange(32, device=bits.device) & 1 == 0).flatten(1)[:, :size]
    logits[rows] = logits[rows].masked_fill(banned, -torch.inf)
    if total is not None:
        total[rows] = logits[rows].logsumexp(-1, keepdim=True)


Edits = list[tuple[int, Mapping[int, float]]]  # rows, and what is done to the logits of tokens there


def change_logits(logits: torch.Tensor, places: Many[Place]) -> None:
    """Apply penalties, bias and the ban on stopping too early, in place on float32 [places,
    vocabulary]."""
    factors: Edits = []
    additions: Edits = []
    for row, drawing in enumerate(places):
        sequence, params = drawing.sequence, drawing.sequence.params
        if params.repetition_penalty != 1.0:
            factors.append((row, dict.fromkeys(sequence.tokens, params.repetition_penalty)))
        if params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            penalties = {
                token: -params.presence_penalty - params.frequency_penalty * count
                for token, count in sequence.counts.items()
            }
            additions.append((row, penalties))
        additions.append((row, params.logit_bias))
        if drawing.position < params.min_tokens and sequence.grammar is None:
            additions.append((row, dict.fromkeys(sequence.stop_token_ids, -math.inf)))
    if factors:
        indexes, factor = _flat(factors, logits.device)
        values = logits[indexes]
        logits[indexes] = torch.where(values > 0, values / factor, values * factor)
    indexes, added = _flat(additions, logits.device)
    logits.index_put_(indexes, added, accumulate=True)


def _flat(edits: Edits, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The rows and tokens of the edits, and their values."""
    rows = np.repeat([row for row, _ in edits], [len(values) for _, values in edits])
    tokens = np.fromiter(itertools.chain.from_iterable(values for _, values in edits), np.int64)
    values = np.fromiter(itertools.chain.from_iterable(values.values() for _, values in edits), np.float32)
    return (on_device(rows, device), on_device(tokens, device)), on_device(values, device)


def _race(logits: torch.Tensor, places: Many[Place], total: torch.Tensor) -> list[int]:
    """One random token per row. `logits` are divided by the temperature; `total` are their log sums
    of exponentials."""
    device, params = logits.device, [place.sequence.params for place in places]
    keys = torch.tensor([[place.sequence.noise_key(place.position)] for place in places], device=device)
    ids = [0] * len(places)
    rows_left = list(range(len(places)))
    for width in (*_CANDIDATES, logits.shape[-1]):
        if rows_left:
            race = _Rows(logits[rows_left], keys[rows_left], total[rows_left], [params[row] for row in rows_left])
            winners = _first(race, min(width, logits.shape[-1]))
            for row, id in zip(rows_left, winners, strict=True):
                ids[row] = id
            rows_left = [row for row, id in zip(rows_left, winners, strict=True) if id < 0]
    return ids


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows to draw from: logits [rows, vocabulary] at their temperature, keys and log sums of
    exponentials [rows, 1]."""

    logits: torch.Tensor
    keys: torch.Tensor
    total: torch.Tensor
    params: list[SamplingParams]


def _first(rows: _Rows, width: int) -> list[int]:
    """The winner of each row among the `width` likeliest; -1 if the filters admit more tokens."""
    device, vocabulary = rows.logits.device, rows.logits.shape[-1]
    values, tokens = rows.logits.topk(width, -1)
    probabilities = (values - rows.total).exp()
    top_k = torch.tensor([[p.top_k or vocabulary] for p in rows.params], device=device)
    top_p = torch.tensor([[p.top_p] for p in rows.params], device=device)
    min_p = torch.tensor([[p.min_p] for p in rows.params], device=device)
    is_open = (top_k >= vocabulary) & (top_p >= 1.0) & (min_p <= 0.0)
    is_kept = torch.arange(width, device=device) < top_k
    mass = torch.where(top_k < vocabulary, (probabilities * is_kept).sum(-1, keepdim=True), 1.0)
    before = (probabilities.cumsum(-1) - probabilities) / mass
    is_kept &= (before < top_p) | (top_p >= 1.0)
    is_kept &= probabilities >= min_p * probabilities[:, :1]
    # else top-p's share is of more than is here
    has_mass = (top_k <= width) | (top_k >= vocabulary) | (top_p >= 1.0)
    is_enough = is_open | (~is_kept[:, -1:] & has_mass) | (top_k <= width)
    is_kept[:, 0] = True
    rates = (probabilities * is_kept).double()
    times, at = (noise(rows.keys, tokens) / rates).min(-1, keepdim=True)
    winners = tokens.gather(1, at).squeeze(1)
    if width < vocabulary:
        _let_tail_win(rows, is_open, rates, times, tokens, winners)
        winners = winners.masked_fill(~is_enough.squeeze(1), -1)
    ids: list[int] = winners.tolist()
    return ids


def _let_tail_win(
    rows: _Rows,
    is_open: torch.Tensor,
    rates: torch.Tensor,
    times: torch.Tensor,
    tokens: torch.Tensor,
    winners: torch.Tensor,
) -> None:
    """In unfiltered rows, let the tokens outside the likeliest `tokens` race as one, by their
    common share. If the tail is first, draw one of its tokens in proportion, into `winners`. The
    minimum of many exponential times is one exponential time of the summed rate."""
    tail = ((1.0 - rates.sum(-1, keepdim=True)) * is_open).clamp_min(0.0)
    tail_token = torch.full_like(rows.keys, -1)
    for row in (noise(rows.keys, tail_token) / tail < times).nonzero()[:, 0].tolist():
        weights = rows.logits[row].double().softmax(-1)
        weights[tokens[row]] = 0.0
        cumulative = weights.cumsum(-1)
        wanted = (-noise(rows.keys[row], tail_token[row] - 1)).exp() * cumulative[-1]
        if cumulative[-1] > 0.0:  # what was left may have been rounding
            winners[row] = torch.searchsorted(cumulative, wanted, right=True).clamp_(max=weights.shape[0] - 1)[0]


@torch.inference_mode()
def candidates(logits: torch.Tensor, ids: Many[int], counts: Many[int]) -> list[Sampled]:
    """The log probabilities of `ids`, and of each row's likeliest tokens, from the model's own
    logits [len(ids), vocabulary]."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs[torch.arange(len(ids)), torch.tensor(ids, device=logits.device)].tolist()
    tops = [_likeliest(row, count) for row, count in zip(logprobs, counts, strict=True)]
    return [Sampled(*token) for token in zip(ids, chosen, tops, strict=True)]


def _likeliest(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest tokens. Equal ones come by ascending id, as in greedy decoding: 16-bit
    logits are often equal."""
    if not count:
        return ()
    ids = (logprobs >= logprobs.topk(min(count, len(logprobs))).values[-1]).nonzero()[:, 0]
    values, order = logprobs[ids].sort(descending=True, stable=True)
    return tuple(zip(ids[order[:count]].tolist(), values[:count].tolist(), strict=True))
