"""From logits to tokens: penalties, temperature, top-k, top-p, min-p, seeds and log probabilities.

Knows sequences' parameters and counts, no text. All rows of a step are sampled together. Random rows invert the
cumulative distribution at one uniform number, a function of the sequence's seed and the token's position: so a seeded
sequence draws the same whatever runs beside it (its logits can still differ in the last bits with the batch's shape).
A draft is verified by drawing at each of its places as if it were not there: as long as what is drawn is what was
drafted, the next row's logits are the right ones. That keeps the distribution, and accepts a drafted token as often as
the model would say it, which for a draft without a distribution of its own is the best there is (arXiv:2211.17192).
Order of the filters: temperature, top-k, top-p, min-p, as in Hugging Face's generate.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import torch

from local_engine.messages import SamplingParams
from local_engine.sequence import Sequence

_CANDIDATES = (256, 4096)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token with its log probability under the model's own distribution."""

    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sequence's next token; `chosen` and `top` where log probabilities were asked for. `token_id` is None when the
    logits were not finite."""

    token_id: int | None
    chosen: Candidate | None = None
    top: tuple[Candidate, ...] = ()


class Drawn(Protocol):
    """What was drawn at each place, maybe still under way from the device."""

    @property
    def ids(self) -> torch.Tensor:
        """int64 [places], on the device: for the next step to read without waiting."""

    def read(self) -> list[Sampled]:
        """Wait for it."""


@dataclass(frozen=True, slots=True)
class Known:
    """Drawn and at hand."""

    sampled: list[Sampled]
    device: torch.device

    @property
    def ids(self) -> torch.Tensor:
        return torch.tensor([one.token_id or 0 for one in self.sampled], device=self.device)

    def read(self) -> list[Sampled]:
        return self.sampled


@dataclass(frozen=True, slots=True)
class Place:
    """A row of logits to draw from: the sequence's next token, or the one `ahead` places after it, were its draft right."""

    sequence: Sequence
    ahead: int = 0

    @property
    def position(self) -> int:
        """Of the token, counted in the answer."""
        return self.sequence.answer_tokens + self.sequence.in_flight + self.ahead

    @property
    def changes_logits(self) -> bool:
        params = self.sequence.params
        return self.sequence.has_penalties or bool(params.logit_bias) or self.position < params.min_tokens


@torch.inference_mode()
def sample(logits: torch.Tensor, places: Many[Place]) -> list[Sampled]:
    """The token at each place from logits [len(places), vocabulary]."""
    best, best_ids = logits.max(-1)
    is_finite: list[bool] = best.isfinite().tolist()
    ids: list[int] = best_ids.tolist()
    params = [place.sequence.params for place in places]
    wants_logprobs = [row for row, p in enumerate(params) if p.logprobs is not None]
    plain = logits
    changed = [row for row, place in enumerate(places) if place.changes_logits]
    drawn = [row for row, p in enumerate(params) if p.temperature > 0 and is_finite[row]]
    if changed or drawn:
        logits = logits.float() if logits.dtype is not torch.float32 else logits.clone()
        for row in changed:
            _change(logits[row], places[row])
        for row in changed:
            ids[row] = int(logits[row].argmax())
        if drawn:
            rows = logits if len(drawn) == len(places) else logits[drawn]
            for row, id in zip(drawn, _draw(rows, [places[row] for row in drawn]), strict=True):
                ids[row] = id
    sampled = [Sampled(id if good else None) for id, good in zip(ids, is_finite, strict=True)]
    if wants_logprobs:
        found = candidates(
            plain[wants_logprobs],
            [ids[row] for row in wants_logprobs],
            [params[row].logprobs or 0 for row in wants_logprobs],
        )
        for row, own in zip(wants_logprobs, found, strict=True):
            if sampled[row].token_id is not None:
                sampled[row] = own
    return sampled


def _change(row: torch.Tensor, place: Place) -> None:
    """Penalties, bias and the ban on stopping too early, in place on one row of logits."""
    sequence = place.sequence
    params = sequence.params
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(list(set(sequence.tokens)), device=row.device)
        values = row[seen]
        penalty = params.repetition_penalty
        row[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if sequence.counts and (params.presence_penalty != 0.0 or params.frequency_penalty != 0.0):
        answered = torch.tensor(list(sequence.counts), device=row.device)
        counts = torch.tensor(list(sequence.counts.values()), device=row.device, dtype=row.dtype)
        row[answered] -= params.presence_penalty + params.frequency_penalty * counts
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=row.device)
        row[biased] += torch.tensor(list(params.logit_bias.values()), device=row.device, dtype=row.dtype)
    if place.position < params.min_tokens and sequence.stop_token_ids:
        row[list(sequence.stop_token_ids)] = -torch.inf


def _draw(logits: torch.Tensor, places: Many[Place]) -> list[int]:
    """One random token per row."""
    params = [place.sequence.params for place in places]
    temperatures = torch.tensor([p.temperature for p in params], device=logits.device)
    logits = logits / temperatures.unsqueeze(1)
    uniform = torch.tensor(
        [place.sequence.uniform(place.position) for place in places], device=logits.device, dtype=torch.float64
    )
    is_filtered = [p.top_p < 1.0 or p.top_k > 0 or p.min_p > 0.0 for p in params]
    ids = [0] * len(places)
    whole = [row for row, filtered in enumerate(is_filtered) if not filtered]
    if whole:
        picked = _invert(logits[whole].softmax(-1), uniform[whole])
        for row, id in zip(whole, picked.tolist(), strict=True):
            ids[row] = id
    rest = [row for row, filtered in enumerate(is_filtered) if filtered]
    for width in (*_CANDIDATES, logits.shape[-1]):
        if not rest:
            break
        rest = _draw_filtered(logits, uniform, params, rest, min(width, logits.shape[-1]), ids)
    return ids


def _draw_filtered(
    logits: torch.Tensor,
    uniform: torch.Tensor,
    all_params: Many[SamplingParams],
    rows: list[int],
    width: int,
    ids: list[int],
) -> list[int]:
    """Draw for `rows` from their `width` likeliest tokens into `ids`; returns the rows whose filters let in more."""
    own = logits[rows]
    values, candidates = own.topk(width, -1)
    probabilities = (values - own.logsumexp(-1, keepdim=True)).exp()
    params = [all_params[row] for row in rows]
    vocabulary = own.shape[-1]
    top_k = torch.tensor([[p.top_k or vocabulary] for p in params], device=own.device)
    top_p = torch.tensor([[p.top_p] for p in params], device=own.device)
    min_p = torch.tensor([[p.min_p] for p in params], device=own.device)
    has_top_k = top_k < vocabulary
    kept = torch.arange(width, device=own.device) < top_k
    mass = torch.where(has_top_k, (probabilities * kept).sum(-1, keepdim=True), 1.0)
    before = (probabilities.cumsum(-1) - probabilities) / mass
    kept &= (before < top_p) | (top_p >= 1.0)
    kept &= probabilities >= min_p * probabilities[:, :1]
    is_enough = ~kept[:, -1] | (width == vocabulary) | (top_k.squeeze(1) <= width)
    kept[:, 0] = True
    picked = candidates.gather(1, _invert(probabilities * kept, uniform[rows]).unsqueeze(1)).squeeze(1).tolist()
    again = []
    for row, id, enough in zip(rows, picked, is_enough.tolist(), strict=True):
        if enough:
            ids[row] = id
        else:
            again.append(row)
    return again


def _invert(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Per row the first index whose cumulative weight exceeds uniform * total: never one of weight zero."""
    cumulative = weights.double().cumsum(-1)
    wanted = uniform.unsqueeze(1) * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).squeeze(1)
    return found.clamp_(max=weights.shape[-1] - 1)


@torch.inference_mode()
def candidates(logits: torch.Tensor, ids: Many[int], counts: Many[int]) -> list[Sampled]:
    """Log probabilities of these tokens, and of each row's likeliest, from the logits [len(ids), vocabulary] as the
    model gave them."""
    logprobs = logits.float().log_softmax(-1)
    chosen = logprobs[torch.arange(len(ids)), torch.tensor(ids, device=logits.device)].tolist()
    top_values, top_ids = logprobs.topk(max(1, *counts), -1)
    return [
        Sampled(
            id,
            Candidate(id, value),
            tuple(Candidate(*pair) for pair in zip(top[:count], values[:count], strict=True)),
        )
        for id, value, top, values, count in zip(
            ids, chosen, top_ids.tolist(), top_values.tolist(), counts, strict=True
        )
    ]
