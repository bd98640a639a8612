"""Draws tokens on a GPU: the race of `sampler`, in one kernel, without a copy to the host.

Ids stay on the device for the next step; they and the requested log probabilities are copied to the
host, and only `read` waits for that. Knows places and their parameters, no text. Invariant: a draw
depends on its row's logits, parameters and key alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch

from local_engine.grammar import Masks
from local_engine.kernels.copies import on_device
from local_engine.kernels.gpu.draw import draw
from local_engine.sampler import TEMPERATURE_MIN, ban, change_logits, held_rows
from local_engine.sequence import Place, Sampled


@dataclass(frozen=True, slots=True)
class DeviceDrawn:
    """Ids on the device, with copies in flight to the host. `with_logprobs` are the places with log
    probabilities, `counts` their numbers."""

    ids: torch.Tensor
    copies: tuple[torch.Tensor, ...]
    arrived: torch.cuda.Event | None
    with_logprobs: list[int]
    counts: list[int]

    def read(self) -> list[Sampled]:
        """Wait for the copies."""
        if self.arrived is not None:
            self.arrived.synchronize()
        ids, *logprob_lists = (copy.tolist() for copy in self.copies)
        sampled = [Sampled(id if id >= 0 else None) for id in ids]
        if self.with_logprobs:
            for place, count, chosen, values, tops in zip(self.with_logprobs, self.counts, *logprob_lists, strict=True):
                if ids[place] >= 0:
                    sampled[place] = Sampled(ids[place], chosen, tuple(zip(tops[:count], values[:count], strict=True)))
        return sampled


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Many[int], places: Many[Place], masks: Masks | None = None) -> DeviceDrawn:
    """The token at each place from logits[rows[place]], drawn on the device alone."""
    device = logits.device
    params = [drawing.sequence.params for drawing in places]
    row_of = on_device(np.array(rows, np.int64), device)
    plain, plain_rows = logits, row_of
    if masks is not None or any(drawing.changes_logits for drawing in places):
        logits = logits[row_of].float()
        change_logits(logits, places)
        if masks is not None:
            ban(logits, list(held_rows(places).items()), masks)
        row_of = torch.arange(len(places), device=device)
    keys = [drawing.sequence.noise_key(drawing.position) for drawing in places]
    temperatures = [p.temperature and max(p.temperature, TEMPERATURE_MIN) for p in params]
    settings = [temperatures, [p.top_p for p in params], [p.min_p for p in params]]
    ids = draw(
        logits,
        row_of,
        on_device(np.array(keys, np.int64), device),
        on_device(np.array([p.top_k for p in params], np.int64), device),
        on_device(np.array(settings, np.float32), device),
    )
    with_logprobs = [index for index, p in enumerate(params) if p.logprobs is not None]
    counts = [params[index].logprobs or 0 for index in with_logprobs]
    results: tuple[torch.Tensor, ...] = (ids,)
    if with_logprobs:
        at = on_device(np.array(with_logprobs, np.int64), device)
        logprobs = plain[plain_rows[at]].float().log_softmax(-1)
        chosen = logprobs.gather(1, ids[at].clamp_min(0).unsqueeze(1)).squeeze(1)
        results = (ids, chosen, *logprobs.topk(max(1, *counts), -1))
    return DeviceDrawn(ids, *_on_their_way(results), with_logprobs, counts)


def _on_their_way(tensors: Many[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], torch.cuda.Event | None]:
    """Copies to the host that are complete once the event has occurred."""
    if tensors[0].device.type != "cuda":
        return tuple(tensors), None
    copies = tuple(torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors)
    arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
    arrived.record()
    return copies, arrived
