"""A step's chunks as rows: which token each row is, where in its sequence, and where its KV goes.

Knows chunks and blocks, no model. Invariant: it reads a sequence (tokens, blocks) and never changes
it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch

from local_engine.attention import KV, StepInput
from local_engine.sequence import Chunk
from local_engine.step_in_flight import StepInFlight

Longs = np.ndarray[Any, np.dtype[np.int64]]
TOKENS, POSITIONS, SLOTS = range(3)


def fill_rows(longs: Longs, chunks: Many[Chunk], block_tokens: int) -> None:
    """Fill the rows' `TOKENS`, `POSITIONS` and `SLOTS` in int64 [3 or more, rows]; a token that a
    step under way will give is 0."""
    at = 0
    for chunk in chunks:
        stop = at + chunk.count
        first = chunk.start // block_tokens
        blocks = np.array(chunk.sequence.blocks[first : -(-chunk.end // block_tokens)], np.int64)
        where = np.arange(chunk.start, chunk.end)
        longs[TOKENS, at:stop] = chunk.tokens
        longs[POSITIONS, at:stop] = where
        longs[SLOTS, at:stop] = blocks[where // block_tokens - first] * block_tokens + where % block_tokens
        at = stop


def logit_rows(chunks: Many[Chunk], ordered: Many[Chunk]) -> Longs:
    """The rows to predict from, in the order of `chunks`; `ordered`: the same chunks in the order
    of their rows."""
    stops = itertools.accumulate(chunk.count for chunk in ordered)
    stop_of = dict(zip(map(id, ordered), stops, strict=True))
    rows = [stop_of[id(chunk)] - back for chunk in chunks for back in range(chunk.logit_rows, 0, -1)]
    return np.array(rows, np.int64)


def step_input(
    chunks: Many[Chunk], ordered: Many[Chunk], before: StepInFlight | None, kv: KV, **attention: Any
) -> StepInput:
    """The step of `chunks`, whose rows are in the order of `ordered`, on the device of `kv`, with
    what `attention` needs. Tokens that are not known yet are the draws of the step `before`."""
    longs = np.empty((3, sum(chunk.count for chunk in ordered)), np.int64)
    fill_rows(longs, ordered, kv.block_tokens)
    device = kv.pools[0].device
    rows, predicted = (
        torch.from_numpy(own).to(device, non_blocking=True) for own in (longs, logit_rows(chunks, ordered))
    )
    if before is not None:
        _fill_in_drawn(rows[TOKENS], ordered, before)
    return StepInput(
        token_ids=rows[TOKENS], positions=rows[POSITIONS], slots=rows[SLOTS], logit_rows=predicted, **attention
    )


def _fill_in_drawn(token_ids: torch.Tensor, chunks: Many[Chunk], before: StepInFlight) -> None:
    """Fill in the draws of the step `before` where the chunks' tokens are unknown: each is a decode
    of that one token."""
    places = before.places()
    starts = itertools.accumulate((chunk.count for chunk in chunks), initial=0)
    found = [
        (row, places[chunk.sequence.id]) for row, chunk in zip(starts, chunks, strict=False) if chunk.sequence.in_flight
    ]
    if found:
        rows, own = torch.tensor(found, device=token_ids.device).T
        token_ids[rows] = before.drawn.ids[own]
