"""Groups sequences by a common prefix, so that attention computes it once (cascade attention).

Knows lists of block ids, no tokens and no tensors: sequences share a prefix if their block tables
begin with the same blocks, as prefix reuse causes. Invariant: the groups are disjoint, and every
member's table begins with the group's blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Many
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Prefix:
    """Sequences with a common prefix: the tables with the indices `members` begin with the same
    `blocks` blocks."""

    members: tuple[int, ...]
    blocks: int


def shared_prefixes(tables: Many[list[int]], saved_blocks_min: int) -> list[Prefix]:
    """The groups that save the most reading, each at least `saved_blocks_min` blocks: the whole
    prefix, for every member but one. A longer prefix of fewer members wins over a shorter one of
    more if it saves more."""
    order = sorted(range(len(tables)), key=lambda index: tables[index])
    alike = [_common(tables[one], tables[next_]) for one, next_ in itertools.pairwise(order)]
    groups = _best(alike, 0, len(order))
    return [
        Prefix(tuple(order[first:stop]), blocks)
        for first, stop, blocks in groups
        if blocks * (stop - first - 1) >= max(1, saved_blocks_min)
    ]


def _best(shared_counts: list[int], first: int, stop: int) -> list[tuple[int, int, int]]:
    """(first, stop, blocks) groups of the sorted tables first .. stop; neighbours have
    `shared_counts` blocks in common."""
    if stop - first < 2:
        return []
    least = min(shared_counts[first : stop - 1])
    cuts = [index + 1 for index in range(first, stop - 1) if shared_counts[index] == least]
    parts = [
        group
        for start, end in zip([first, *cuts], [*cuts, stop], strict=True)
        if end - start < stop - first
        for group in _best(shared_counts, start, end)
    ]
    whole = (first, stop, least)
    return parts if sum(map(_saved, parts)) > _saved(whole) else [whole]


def _saved(group: tuple[int, int, int]) -> int:
    first, stop, blocks = group
    return blocks * (stop - first - 1)


def _common(table: list[int], other_table: list[int]) -> int:
    """The number of blocks at the start that two tables have in common."""
    low, high = 0, min(len(table), len(other_table))
    while low < high:
        middle = (low + high + 1) // 2
        if table[low:middle] == other_table[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
