"""Plan: cuts the attention of one step into tiles.

Rows come in spans, each consecutive tokens of one sequence. Short spans (decodes, with their
drafts) are split over their keys, and if several begin with the same blocks, attention reads that
prefix once for all of them; long spans (prompts) are cut into tiles of rows. Knows positions and
block ids, and the single tensor that is copied to the device. Invariant: every row's keys up to its
own are in exactly one of its tiles.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch

from local_engine.kernels.gpu.attention import TILE_FIELDS, Shape, Tiles, splits_for
from local_engine.kernels.shared_prefixes import Prefix

SHORT_ROWS_MAX = 16  # a span up to which its keys are split over programs instead of its rows
Numbers = np.ndarray[Any, np.dtype[np.int32]]
Tile = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class RowSpan:
    """Rows `first .. first + rows` of a step: a sequence's tokens from `position` on, with their KV
    in `blocks`."""

    first: int
    rows: int
    position: int
    blocks: list[int]

    @property
    def end(self) -> int:
        return self.position + self.rows


@dataclass(frozen=True, slots=True)
class Plan:
    """A step's tiles in one array, which one copy brings to the device. `numbers`: first `separate`
    tiles, then `shared`, then `whole` ones, then block ids."""

    numbers: Numbers
    separate: int
    shared: int
    whole: int
    split_rows: int
    rows_max: int

    def on(self, shape: Shape, numbers: torch.Tensor) -> Tiles:
        """The tiles, as views of `numbers` on its device."""
        device = numbers.device
        counts = [TILE_FIELDS * count for count in (self.separate, self.shared, self.whole)]
        separate, shared, whole, tables = torch.split(numbers, [*counts, len(numbers) - sum(counts)])
        separate_splits = splits_for(self.separate, shape.kv_heads, device)
        shared_splits = splits_for(self.shared, shape.kv_heads, device) if self.shared else 0
        return Tiles(
            tables=tables,
            separate=separate.view(-1, TILE_FIELDS) if self.separate else None,
            shared=shared.view(-1, TILE_FIELDS) if self.shared else None,
            whole=whole.view(-1, TILE_FIELDS) if self.whole else None,
            split_rows=self.split_rows,
            rows_max=self.rows_max,
            separate_splits=separate_splits,
            shared_splits=shared_splits,
            partials=shape.partials(separate_splits + shared_splits, self.split_rows, device)
            if self.separate
            else None,
        )


def plan(
    shape: Shape,
    short: Many[RowSpan],
    long: Many[RowSpan],
    prefixes: Many[Prefix] = (),
    *,
    separate_tiles: int = 0,
    shared_tiles: int = 0,
    split_rows: int = 0,
) -> Plan:
    """The tiles for the spans. `prefixes` have indices of `short`, each of consecutive ones. Empty
    tiles pad the result to `separate_tiles` and `shared_tiles`, and rows to `split_rows`, so that
    one captured graph fits many steps."""
    spans = [*short, *long]
    starts = np.cumsum([0, *(len(span.blocks) for span in spans)]).tolist()
    seen_before = [0] * len(spans)
    shared: list[Tile] = []
    for prefix in prefixes:
        tokens = prefix.blocks * shape.block_tokens
        members = [short[index] for index in prefix.members]
        for index in prefix.members:
            seen_before[index] = tokens
        table, first = starts[prefix.members[0]], members[0].first
        shared += _cut(shape, first, sum(span.rows for span in members), table, [tokens])
    tiles_of = [
        _cut(shape, span.first, span.rows, start, range(span.position + 1, span.end + 1), before)
        for span, start, before in zip(spans, starts, seen_before, strict=False)
    ]
    separate, whole = (list(chain.from_iterable(some)) for some in (tiles_of[: len(short)], tiles_of[len(short) :]))
    separate += [(0, 0, 0, 0, 0)] * (separate_tiles - len(separate))
    shared += [(0, 0, 0, 0, 0)] * (shared_tiles - len(shared))
    tiles = np.array([*separate, *shared, *whole], np.int32).reshape(-1)
    blocks = [np.array(span.blocks, np.int32) for span in spans]
    return Plan(
        np.concatenate([tiles, *blocks]),
        separate=len(separate),
        shared=len(shared),
        whole=len(whole),
        split_rows=max(split_rows, sum(span.rows for span in short)),
        rows_max=max((count for _, count, *_ in separate), default=1) or 1,
    )


def _cut(shape: Shape, first: int, rows: int, table: int, ends: Many[int], begin: int = 0) -> list[Tile]:
    """Cut rows into tiles of the kernel's height; `ends`: where each row's keys end, or a common
    end; they start at `begin`."""
    tiles = []
    for start in range(0, rows, shape.tile_rows):
        count = min(shape.tile_rows, rows - start)
        end = ends[start + count - 1] if len(ends) > 1 else ends[0]
        tiles.append((first + start, count, table, begin, end))
    return tiles
