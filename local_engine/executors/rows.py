"""A step's chunks as rows: each row's token, its position, and the slot of its KV.

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
from local_engine.kernels.copies import on_device
from local_engine.sequence import TokenChunk
from local_engine.step_in_flight import StepInFlight

Longs = np.ndarray[Any, np.dtype[np.int64]]
TOKENS, POSITIONS, SLOTS, SOURCES = range(4)


def fill_rows(longs: Longs, chunks: Many[TokenChunk], block_tokens: int, before: StepInFlight | None) -> None:
    """Fill the rows' `TOKENS`, `POSITIONS`, `SLOTS` and `SOURCES` in int64 [4 or more, rows]. A
    token that the step `before` will give is 0, and its source is its index among that step's
    draws. All other sources are -1, and so are the slots of unused rows."""
    drawn_at = {} if before is None else before.places()
    longs[SLOTS] = longs[SOURCES] = -1
    first_row = 0
    for chunk in chunks:
        stop = first_row + chunk.count
        first = chunk.start // block_tokens
        blocks = np.array(chunk.sequence.blocks[first : -(-chunk.end // block_tokens)], np.int64)
        where = np.arange(chunk.start, chunk.end)
        longs[TOKENS, first_row:stop] = chunk.tokens
        longs[POSITIONS, first_row:stop] = where
        longs[SLOTS, first_row:stop] = blocks[where // block_tokens - first] * block_tokens + where % block_tokens
        if chunk.sequence.in_flight:  # its first row is the decode of that token
            longs[SOURCES, first_row] = drawn_at[chunk.sequence.id]
        first_row = stop


def known_tokens(rows: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The tokens of `rows` from `fill_rows`, with the `drawn` token for each row with a source."""
    sources = rows[SOURCES]
    return torch.where(sources >= 0, drawn[sources.clamp_min(0)], rows[TOKENS])


def logit_rows(chunks: Many[TokenChunk], ordered: Many[TokenChunk]) -> Longs:
    """The rows with predictions, in the order of `chunks`; `ordered`: the same chunks in the order
    of their rows."""
    stops = itertools.accumulate(chunk.count for chunk in ordered)
    stop_of = dict(zip(map(id, ordered), stops, strict=True))
    rows = [stop_of[id(chunk)] - back for chunk in chunks for back in range(chunk.logit_rows, 0, -1)]
    return np.array(rows, np.int64)


def step_input(
    chunks: Many[TokenChunk], ordered: Many[TokenChunk], before: StepInFlight | None, kv: KV, **attention: Any
) -> StepInput:
    """The step of `chunks`, with rows in the order of `ordered`, on the device of `kv`; `attention`
    has the fields for attention. Unknown tokens are the draws of the step `before`."""
    longs = np.zeros((4, sum(chunk.count for chunk in ordered)), np.int64)
    fill_rows(longs, ordered, kv.block_tokens, before)
    device = kv.pools[0].device
    rows = on_device(longs, device)
    tokens = rows[TOKENS]
    if before is not None and (longs[SOURCES] >= 0).any():
        tokens = known_tokens(rows, before.drawn.ids)
    return StepInput(
        token_ids=tokens,
        positions=rows[POSITIONS],
        slots=rows[SLOTS],
        logit_rows=on_device(logit_rows(chunks, ordered), device),
        **attention,
    )
